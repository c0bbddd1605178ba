"""The checkpoints of a run: written beside the others, put in place when they are whole, deleted when they are old.

Owns the way of a checkpoint into the output folder, and the package's own files in it. Refuses to decide when one is
saved: transformers does. `whole` owns the manifest.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import TrainerState

from salesrl_trl.checkpoint.identity import Identity, write_identity
from salesrl_trl.checkpoint.resume import choose_on_all_ranks
from salesrl_trl.checkpoint.under_way import (
    Batches,
    load_rollouts,
    load_under_way,
    save_rollouts,
    save_under_way,
)
from salesrl_trl.checkpoint.whole import STATE_FILE, Manifest, folders, in_order, read, seal
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.errors import CheckpointError
from salesrl_trl.ground.patched import replaced
from salesrl_trl.ground.process import put_in_place
from salesrl_trl.kl.branched import BranchedKL
from salesrl_trl.names import CHECKPOINT_FOLDERS, SAVING_FOLDER
from salesrl_trl.rollout.pipeline import KeptRollouts


class Keeper:
    """Saves the checkpoints of one run.

    `kl`: its state is part of a checkpoint. `identity`: from the training dataset to the identity of the run.
    `is_skipping`: whether the generation batch under way is left out of the loss. Then it is no part of a checkpoint.
    `in_flight`: `Pipeline.in_flight`.
    """

    def __init__(
        self,
        args: SalesGRPOConfig,
        kl: BranchedKL | None,
        identity: Callable[[object], Identity],
        is_skipping: Callable[[], bool],
        in_flight: Callable[[int, int], Mapping[int, KeptRollouts]],
    ) -> None:
        self._args = args
        self._kl = kl
        self._identity_of = identity
        self._is_skipping = is_skipping
        self._in_flight = in_flight
        self._kept: Mapping[int, KeptRollouts] = {}
        self._output_dir = Path(args.output_dir)
        self._is_main, self._leads_node = args.process_index == 0, args.local_process_index == 0
        self._last: Path | None = None

    def begin(self, asked: str | os.PathLike[str] | bool | None, dataset: object) -> str | None:
        """A run begins, or goes on from a checkpoint; a collective.

        `asked`: as `whole.find` has it.

        Returns:
            `str`, *optional*: the checkpoint. Raises `ConfigError` if the run can't go on from it.
        """
        self._identity = self._identity_of(dataset)
        self._last = choose_on_all_ranks(asked, self._args, self._identity)
        self._clear()
        return None if self._last is None else str(self._last)

    def save(self, state: TrainerState, write: Callable[[], None]) -> None:
        """Save a checkpoint; a collective. Nothing is written if this step has one already.

        `state`: counts of the run. It names the best checkpoint. `write`: Lets transformers write a checkpoint into
        the output folder that the settings name, on all ranks.

        Raises:
            `CheckpointError`: on all ranks, if any of them could not write its part. The folder is not there then, and
                the checkpoints before it are as they were.
        """
        folder = self._output_dir / f"{CHECKPOINT_FOLDERS}{state.global_step}"
        if folder == self._last:
            return
        fresh = self._output_dir / SAVING_FOLDER / folder.name
        self._clear()
        PartialState().wait_for_everyone()
        with replaced(self._args, "output_dir", str(fresh.parent)):
            self._on_all_ranks(folder, write)
        self._on_all_ranks(folder, lambda: self._finish(fresh, folder, state) if self._is_main else None)
        # With a shared disk, the folder is in its place now. Else each machine has one of its own left.
        self._on_all_ranks(folder, lambda: self._finish(fresh, folder, state) if self._leads_node else None)
        self._last = folder
        if self._leads_node:
            self._rotate(state.best_model_checkpoint)

    def add_parts(self, folder: Path, update: int, micro_step: int, slices: Batches) -> None:
        """Write the package's own files: the state of the KL, the run's identity, the generation batch under way, and
        the rollouts in flight.

        `update`: Optimizer steps done. `micro_step`, `slices`: Micro-steps done, and the slices of the generation
        batch under way, as TRL counts and keeps them.
        """
        is_inside = bool(micro_step % self._args.window)
        if self._args.should_save:
            write_identity(folder, self._identity, is_inside)
            if self._kl is not None:
                self._kl.save(folder)
        if is_inside and not self._is_skipping():
            save_under_way(folder, self._args.process_index, self._args.arrangement, slices)
        if self._args.save_rollouts:
            in_flight = self._in_flight(micro_step, update)
            save_rollouts(folder, self._args.process_index, self._args.arrangement, in_flight)

    def load_parts(self, folder: Path, micro_step: int) -> Batches | None:
        """Go on with the state of the KL. Returns the generation batch under way, if there is one; a collective."""
        if self._kl is not None:
            self._kl.load(folder)
        place = (folder, self._args.process_index, self._args.arrangement, self._args.device)
        self._kept = load_rollouts(*place)
        return load_under_way(*place) if micro_step % self._args.window else None

    def drain_rollouts(self) -> Mapping[int, KeptRollouts]:
        """The rollouts in flight of the checkpoint that `load_parts` has read: once, then none."""
        kept, self._kept = self._kept, {}
        return kept

    def _clear(self) -> None:
        """Delete what is half-written, or half-deleted."""
        if self._leads_node:
            shutil.rmtree(self._output_dir / SAVING_FOLDER, ignore_errors=True)

    def _on_all_ranks(self, folder: Path, work: Callable[[], None]) -> None:
        """Do it. If it fails on one rank, it has failed on all of them."""
        error, reason = None, None
        try:
            work()
        except Exception as failure:
            error, reason = failure, _reason(failure)
        reasons = [each for each in gather_object([reason]) if each is not None]
        if not reasons:
            return
        self._clear()
        free = shutil.disk_usage(self._output_dir).free / 2**30
        before = f"{self._last} is whole" if self._last is not None else "there is none before it"
        raise CheckpointError(
            f"{folder} could not be saved ({reasons[0]}). Expected to write it, and {self._output_dir} has "
            f"{free:.3g} GiB free. {before}. Make room, and go on with --resume_from_checkpoint auto."
        ) from error

    def _finish(self, fresh: Path, folder: Path, state: TrainerState) -> None:
        """Write the manifest and put the checkpoint in place, unless it is there."""
        if not fresh.is_dir():
            return
        if state.best_model_checkpoint == str(fresh):
            state.best_model_checkpoint = str(folder)
            state.save_to_json(str(fresh / STATE_FILE))
        processes, has_optimizer = PartialState().num_processes, not self._args.save_only_model
        seal(fresh, processes=processes, has_optimizer=has_optimizer, output_dir=self._output_dir)
        put_in_place(fresh, folder)

    def _rotate(self, best: str | None) -> None:
        """Delete the oldest whole checkpoints above the limit, but neither the best nor the last one."""
        limit = self._args.save_total_limit or 0
        if limit <= 0:
            return
        found = {folder: read(folder) for folder in folders(self._output_dir)}
        whole = {each: manifest for each, manifest in found.items() if isinstance(manifest, Manifest)}
        old = [each for each in in_order(whole) if each != self._last and str(each) != best]
        for each in old[: max(len(whole) - limit, 0)]:
            gone = self._output_dir / SAVING_FOLDER / each.name
            gone.parent.mkdir(exist_ok=True)
            each.rename(gone)  # first of all: a folder that is deleted in part looks like a damaged one
            shutil.rmtree(gone, ignore_errors=True)


def _reason(failure: BaseException) -> str:
    """What failed: the operating system's own error, if another one came of it."""
    cause: BaseException | None = failure
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    found = cause or failure
    return f"{type(found).__name__}: {' '.join(str(found).split())[:300]}"
