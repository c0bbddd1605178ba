"""The checkpoints of a run: written to a temporary folder, moved into place when complete, and rotated. They include
completions not yet trained on."""

import contextlib
import io
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from accelerate import PartialState
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerState

from salesrl_trl.checkpoint.identity import Identity, check_identity, write_identity
from salesrl_trl.checkpoint.run_files import put_run_aside
from salesrl_trl.checkpoint.whole import STATE_FILE, Manifest, find, read, seal, whole
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.errors import BudgetSpent, CheckpointError, ConfigError
from salesrl_trl.generation.sampler import Sampled
from salesrl_trl.ground.process import patched, put_in_place
from salesrl_trl.kl.branched import BranchedKL
from salesrl_trl.names import CHECKPOINT_FOLDERS, PARTS_STATE_FILE, ROLLOUTS_FILE, SAVING_FOLDER, UNDER_WAY_FILE
from salesrl_trl.rollout.buffer import Buffer
from salesrl_trl.rollout.in_flight import KeptRollouts
from salesrl_trl.rollout.rollout_scoring import Output
from salesrl_trl.update.run_control import RunControl, on_any_rank
from salesrl_trl.update.stopping import STOPPED

logger = get_logger(__name__)

Batches = list[Output]  # TRL's slices of a generation batch


class HasState(Protocol):
    """A part of the trainer. `name`: key of its state; defaults to its class name."""

    name: str

    def state_dict(self) -> dict[str, object]: ...
    def load_state_dict(self, state: Mapping[str, object], /) -> None: ...


@dataclass(eq=False)
class Keeper:
    """Saves a run's checkpoints, with the state of `kl` and of the trainer's `parts`. `run_control` knows whether the
    current generation batch is excluded from the loss, and so from a checkpoint."""

    args: SalesGRPOConfig
    kl: BranchedKL | None
    run_control: RunControl
    parts: Sequence["HasState"] = ()
    buffer: Buffer = field(init=False)  # of rollouts, once built

    def __post_init__(self) -> None:
        self._kept: dict[int, KeptRollouts] = {}
        self._output_dir = Path(self.args.output_dir)
        self._is_main, self._leads_node = self.args.process_index == 0, self.args.local_process_index == 0
        self._last: Path | None = None
        self.run = ""  # its id, once begun
        self._states: Mapping[str, Mapping[str, object]] = {}  # states of parts from the checkpoint being resumed

    def begin(self, asked: str | os.PathLike[str] | bool | None, identity: Identity, model: str) -> str | None:
        """Begin a run, or resume it from the returned checkpoint; a collective. Moves files of another run aside.
        `asked`: as in `whole.find`; `model`: the policy's folder or name. Raises `ConfigError` if the checkpoint
        cannot be resumed, or if the run needs a file that would be moved."""
        self._identity = identity
        self._last = choose_on_all_ranks(asked, self.args, identity)
        agreed(lambda: put_run_aside(self._output_dir, self._last, [model]) if self._is_main else None)
        if self._leads_node:
            put_run_aside(self._output_dir, self._last)  # leftovers on nodes without a shared disk
        self.run = agreed(_run_of, self._last, self._output_dir)
        self._clear()
        self._states = {}
        return None if self._last is None else str(self._last)

    def report(self, state: TrainerState) -> None:
        """Log where a run resumes. `state`: the resumed state."""
        if self._last is not None:
            logger.info(f"resuming from {self._last.name}, step {state.global_step} of {state.max_steps}")

    def save(self, state: TrainerState, write: Callable[[], None]) -> Path | None:
        """Save a checkpoint, unless this step has one; a collective. Returns the new folder. `write` makes
        transformers write it into the settings' output folder, on all ranks. Raises `CheckpointError` on all ranks if
        any failed to write its part; then the folder does not exist, and earlier ones are unchanged."""
        folder = self._output_dir / f"{CHECKPOINT_FOLDERS}{state.global_step}"
        if folder == self._last:
            return None
        fresh = self._output_dir / SAVING_FOLDER / folder.name
        self._clear()
        PartialState().wait_for_everyone()
        with patched(self.args, "output_dir", str(fresh.parent)), self._on_all_ranks(folder):
            write()
        # With a shared disk, the first iteration moves the folder; otherwise each machine has its own left.
        for finishes in (self._is_main, self._leads_node):
            with self._on_all_ranks(folder):
                if finishes:
                    self._finish(fresh, folder, state)
        self._last = folder
        if self._leads_node:
            self._rotate(state.best_model_checkpoint)
        return folder

    def add_parts(self, folder: Path, update: int, micro_step: int, slices: Batches) -> None:
        """Write the package's own files. `update` and `micro_step`: steps done. `slices`: TRL's, of the current
        generation batch."""
        is_inside, flying = bool(micro_step % self.args.window), self.buffer.in_flight(micro_step, update)
        moved = any(rollout.inputs or not rollout.rows for rollout in flying.values())  # to other prompts of a process
        if self.args.should_save:
            write_identity(folder, self._identity, is_inside or moved)
            if self.kl is not None:
                self.kl.save(folder)
            if states := {name: state for name, part in self._named() if (state := part.state_dict())}:
                (folder / PARTS_STATE_FILE).write_text(json.dumps(states))
        if is_inside and not self.run_control.is_skipping:
            self._save_part(folder, UNDER_WAY_FILE, batches=slices)
        if not self.args.save_rollouts and not moved:
            return
        rollouts = {}
        for first, rollout in flying.items():
            content = {name: getattr(rollout, name) for name in ("rows", "steps", "behaviour_logps", "inputs")}
            sampled, kept = rollout.sampled if self.args.save_rollouts else None, None
            if is_whole := sampled and not (sampled.seats or any(sampled.generated[6] or ())):
                metrics = {name: [*map(float, values)] for name, values in sampled.metrics.items()}
                tokens = {"generated": tuple(sampled.generated), "metrics": metrics, "tokens": int(sampled.tokens)}
                lists = {"versions": [*sampled.versions], "failures": [*sampled.failures]}
                cut_off = any((why or "").endswith((STOPPED, BudgetSpent.default_code)) for why in sampled.failures)
                kept = None if cut_off else {**tokens, **lists}  # the run's end is no failure: held again
            if is_whole or moved:
                rollouts[first] = {**content, "sampled": kept}
        self._save_part(folder, ROLLOUTS_FILE, rollouts=rollouts)

    def load_parts(self, folder: Path, micro_step: int) -> Batches | None:
        """Resume the state of the KL. Returns the current generation batch, if any; a collective. Without a batch TRL
        generates one, which is a collective, so the result is `None` on all ranks if any lacks it."""
        if self.kl is not None:
            self.kl.load(folder)
        states = folder / PARTS_STATE_FILE
        self._states = agreed(lambda: json.loads(states.read_text()) if states.is_file() else {})
        saved = self._load_part(folder, ROLLOUTS_FILE)
        self._kept = {}
        if saved is not None:
            for first, kept in saved["rollouts"].items():
                sampled = kept["sampled"] and Sampled(**kept["sampled"])
                self._kept[first] = KeptRollouts(**{**kept, "sampled": sampled})
            logger.info(f"resuming with {len(self._kept)} rollouts in flight")
        if not micro_step % self.args.window:
            return None
        saved = self._load_part(folder, UNDER_WAY_FILE)
        if saved is None:
            logger.warning(
                f"{folder} was saved in the middle of a generation batch whose completions can't be used (absent, or "
                "of another number of processes or other batch sizes). They are regenerated from the same prompts"
            )
        return None if saved is None else saved["batches"]

    def _save_part(self, folder: Path, name: str, **content: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / name.format(rank=self.args.process_index)
        torch.save({"arrangement": self.args.arrangement, **content}, path)

    def _load_part(self, folder: Path, name: str) -> dict[str, Any] | None:
        """This process's part; `None` on all ranks if any lacks one with this arrangement; a collective."""
        path = folder / name.format(rank=self.args.process_index)
        state = torch.load(path, map_location=self.args.device, weights_only=True) if path.is_file() else None
        is_usable = state is not None and state["arrangement"] == self.args.arrangement
        return None if on_any_rank(not is_usable, self.args.device) else state

    def restore_parts(self) -> None:
        """Pass each part the state read by `load_parts`, or an empty one."""
        for name, part in self._named():
            part.load_state_dict(self._states.get(name, {}))

    def _named(self) -> list[tuple[str, "HasState"]]:
        return [(part.name or type(part).__name__, part) for part in self.parts]

    def drain_rollouts(self) -> Mapping[int, KeptRollouts]:
        """The rollouts in flight read by `load_parts`, once."""
        rollouts, self._kept = self._kept, {}
        return rollouts

    def _clear(self) -> None:
        if self._leads_node:
            shutil.rmtree(self._output_dir / SAVING_FOLDER, ignore_errors=True)

    @contextlib.contextmanager
    def _on_all_ranks(self, folder: Path) -> Iterator[None]:
        """If the block fails on one rank, raise on all, naming the underlying `OSError` if there is one."""
        error, reason = None, None
        try:
            yield
        except Exception as failure:
            cause: BaseException | None = failure
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            text = " ".join(str(cause or failure).split())[:300]
            error, reason = failure, f"{type(cause or failure).__name__}: {text}"
        reasons = [text for text in gather_object([reason]) if text is not None]
        if not reasons:
            return
        self._clear()
        free = shutil.disk_usage(self._output_dir).free / 2**30
        before = f"{self._last} is intact" if self._last is not None else "There is no earlier one"
        raise CheckpointError(
            f"{folder} could not be saved ({reasons[0]}). {self._output_dir} has {free:.3g} GiB free. {before}. Free "
            "some space, and resume with --resume_from_checkpoint auto."
        ) from error

    def _finish(self, fresh: Path, folder: Path, state: TrainerState) -> None:
        if not fresh.is_dir():  # already in place
            return
        if state.best_model_checkpoint == str(fresh):
            state.best_model_checkpoint = str(folder)
            state.save_to_json(str(fresh / STATE_FILE))
        seal(fresh, PartialState().num_processes, not self.args.save_only_model, self._output_dir, self.run)
        put_in_place(fresh, folder)

    def _rotate(self, best: str | None) -> None:
        if (limit := self.args.save_total_limit or 0) <= 0:
            return
        known = whole(self._output_dir)
        old = [folder for folder in known if folder != self._last and str(folder) != best]
        for folder in old[: max(len(known) - limit, 0)]:
            gone = self._output_dir / SAVING_FOLDER / folder.name
            gone.parent.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # another machine did, on a shared disk
                folder.rename(gone)  # first, because a partly deleted folder looks like a damaged one
            shutil.rmtree(gone, ignore_errors=True)


def why_not_kept(dataset: Dataset) -> str | None:
    """Why a checkpoint cannot store rows like the first one, else `None`."""
    torch.save(dataset[0], saved := io.BytesIO())
    is_held = not torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(saved.getvalue()))
    return None if is_held else "checkpoints cannot store values such as dates: convert them to texts or numbers"


P = ParamSpec("P")
T = TypeVar("T")


def choose_on_all_ranks(
    asked: str | os.PathLike[str] | bool | None, args: SalesGRPOConfig, identity: Identity
) -> Path | None:
    """`whole.find` on all ranks, then `check_identity`; a collective. Each machine's first process verifies digests,
    the others compare sizes; all follow rank 0's choice. Raises `ConfigError` on all ranks if any rejects the
    checkpoint."""
    is_first, allowed = args.local_process_index == 0, args.allow_changed_resume
    chosen = agreed(find, asked, args.output_dir, with_digests=is_first, without_manifest=allowed)
    if chosen is None:
        return None
    note = agreed(check_identity, chosen, identity, allowed)
    if note is not None:
        logger.warning(note)
    manifest = read(chosen)
    saved_by = manifest.processes if isinstance(manifest, Manifest) else args.world_size
    if saved_by != args.world_size:
        logger.warning(
            f"{chosen} was saved by {saved_by} processes, and this run has {args.world_size}: random generators are "
            "reseeded, so completions differ from an uninterrupted run's. The prompts are the same"
        )
    return chosen


def _run_of(checkpoint: Path | None, output_dir: Path) -> str:
    """The run's id if it resumes from a checkpoint of its own folder, else a new one."""
    is_own = checkpoint is not None and checkpoint.resolve().parent == output_dir.resolve()
    manifest = read(checkpoint) if checkpoint is not None and is_own else None
    return (manifest.run if isinstance(manifest, Manifest) else "") or uuid.uuid4().hex


def agreed(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The first rank's result. Raises the `ConfigError` of any rank on all of them."""
    result: T | None = None
    refused: str | None = None
    try:
        result = work(*args, **kwargs)
    except ConfigError as error:
        refused = str(error)
    gathered = gather_object([(result, refused)])
    if refusals := [refusal for _, refusal in gathered if refusal is not None]:
        raise ConfigError(refusals[0])
    first: T = gathered[0][0]
    return first


OF_SETTINGS = ("initial_lr", "weight_decay", "betas", "eps", "momentum")
"""Entries of an optimizer's groups that come from the settings, which torch would load with its state."""


@contextlib.contextmanager
def fitted(optimizer: Any, schedule: Any, step: int) -> Iterator[None]:
    """While active, both load what fits and log what does not: the state of another kind of optimizer is reset, and a
    transformers schedule continues at this run's learning rate after `step` optimizer steps."""
    load_optimizer, load_schedule, fresh = optimizer.load_state_dict, schedule.load_state_dict, optimizer.param_groups

    def optimizer_of(state: dict[str, Any]) -> None:
        groups = state["param_groups"]
        sizes = [[len(group["params"]) for group in every] for every in (groups, fresh)]
        others = {name for old in groups for name in old} - {"initial_lr", *(name for new in fresh for name in new)}
        if sizes[0] != sizes[1] or others:  # `initial_lr` belongs to a schedule
            logger.warning("the optimizer state is reset: the checkpoint's is of another kind or for other weights")
            return
        kept = [{name: new[name] for name in OF_SETTINGS if name in new} for new in fresh]
        load_optimizer({**state, "param_groups": [old | new for old, new in zip(groups, kept, strict=True)]})

    def schedule_of(state: dict[str, Any]) -> None:
        own = schedule.state_dict()
        own.pop("load_state_dict", None)  # this function
        if state.keys() == own.keys() and len(state["_last_lr"]) == len(fresh):
            load_schedule(state)
        elif isinstance(schedule, LambdaLR):
            schedule.last_epoch = step
        if isinstance(schedule, LambdaLR):
            schedule.base_lrs = own["base_lrs"]
            parts = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
            schedule._last_lr = [rate * share(schedule.last_epoch) for rate, share in parts]
        for group, rate in zip(schedule.optimizer.param_groups, rates := schedule.get_last_lr(), strict=True):
            group["lr"] = rate
        if rates != state["_last_lr"]:
            logger.warning(
                f"the learning rate continues at {rates[0]:.3g}, by this run's schedule; the checkpoint's was "
                f"{state['_last_lr'][0]:.3g}"
            )

    optimizer.load_state_dict, schedule.load_state_dict = optimizer_of, schedule_of
    try:
        yield
    finally:  # not `patched`: a schedule saves all its attributes
        del optimizer.load_state_dict, schedule.load_state_dict
