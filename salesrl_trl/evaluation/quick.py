"""Quick evaluations of a trainer: a fixed held-out sample, answered greedily, scored, told, and the best policy kept.

Owns when that is and how TRL's own way of generating and scoring is used for it without leaving a trace in what the
trainer gathers for others. The figures, the line and the record are `quick_eval`'s.
"""

import contextlib
import copy
import json
import logging
import math
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather
from datasets import Dataset
from transformers import Trainer

from salesrl_trl.errors import ConfigError
from salesrl_trl.evaluation.record import (
    COLUMNS,
    OVERALL,
    QuickEvalHistory,
    QuickEvalSettings,
    QuickEvaluation,
    evaluation_of,
    spread,
)
from salesrl_trl.kl.estimators import penalty
from salesrl_trl.names import (
    BEST_FOLDER,
    BEST_NOTE_FILE,
    QUICK_EVAL_FILE,
    QUICK_FIGURES,
    QUICK_REWARD,
    QUICK_SECONDS,
    Phase,
    quick_of,
)

logger = logging.getLogger(__name__)

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*/*.distcp", "*/*.pt")
"""What a saved policy holds one of."""


class QuickEvaluator:
    """Evaluates a trainer's policy every few steps. All methods are collectives.

    Args:
        trainer (`SalesGRPOTrainer`):
            Whose policy, reward, generation and evaluation rows are used.
        settings (`QuickEvalSettings`):
            When, and on how much.

    Raises:
        `ConfigError`: there are no held-out rows, or fewer than processes.
    """

    def __init__(self, trainer: Any, settings: QuickEvalSettings) -> None:
        self._trainer = trainer
        self._settings = settings
        self._folder = Path(trainer.args.output_dir)
        self._history = QuickEvalHistory(
            self._folder / QUICK_EVAL_FILE, settings.best, trainer.args.min_valid_reward_fraction
        )
        self._rows = self._sample()
        self._evaluated_step = 0

    def run_begins(self) -> None:
        """Take up the record of a run that goes on; every rank the main one's, for all save the best together."""
        trainer = self._trainer
        step = trainer.state.global_step
        told: list[Any] = [self._history.read(), self._best_on_disk()] if trainer.accelerator.is_main_process else []
        told = broadcast_object_list(told or [None, None])
        self._history.resume(told[0], step)
        # A run may have ended between a step's checkpoint and its evaluation: that one is then still due
        self._evaluated_step = step if self._history.has(step) else 0
        on_disk = told[1]
        if on_disk is None or (self._history.best is not None and self._history.best.step == on_disk):
            return
        # An earlier run's, or one of steps that this run goes back behind: not its best, and not to be written over
        self._history.best = None
        if trainer.accelerator.is_main_process:
            aside = self._folder / f"{BEST_FOLDER}.earlier"
            shutil.rmtree(aside, ignore_errors=True)
            (self._folder / BEST_FOLDER).rename(aside)
            logger.info(f"the best policy of an earlier start (step {on_disk}) is now in {aside}")

    def evaluate_if_due(self) -> None:
        """Evaluate, unless this step was."""
        step = self._trainer.state.global_step
        if step % self._settings.steps == 0 and step != self._evaluated_step:
            self._evaluated_step = step
            self._evaluate()

    def _evaluate(self) -> None:
        """Answer the sample greedily; tell, record, and keep the policy if it is the best so far."""
        trainer, started = self._trainer, time.perf_counter()
        with trainer._timeline.phase(Phase.EVALUATION):
            rows, failed = self._answer()
            table = gather(rows).cpu()  # (world size x rows, columns)
            control = trainer._kl
            betas = {} if control is None else dict(zip(trainer.args.branches, control.betas, strict=True))
            evaluation = evaluation_of(
                table, trainer.args.branches, betas, trainer.state.global_step, time.perf_counter() - started
            )
            is_best = self._history.add(evaluation)
        with trainer._timeline.phase(Phase.CHECKPOINT):
            kept = is_best and self._keep(evaluation)
        with trainer._timeline.phase(Phase.LOGGING):
            if trainer.accelerator.is_main_process:
                self._tell(evaluation, failed, kept)
            Trainer.log(trainer, _metrics(evaluation))  # without what TRL gathers for a step

    def _tell(self, evaluation: QuickEvaluation, reasons: Counter[str], kept: bool) -> None:
        failed = "".join(f" {reason}={count}" for reason, count in sorted(reasons.items()))
        logger.info(evaluation.line() + (f" failures{failed}" if failed else ""))
        logger.info(self._history.front_line())
        if kept:
            score = evaluation.score(self._settings.best or OVERALL)
            logger.info(
                f"[Best@{evaluation.step}] {self._settings.best} {score:.3f}, saved in {self._folder / BEST_FOLDER}"
            )
        try:
            self._history.write()
        except OSError as error:  # a full disk on one rank is not to keep the others waiting
            logger.warning(f"{self._folder / QUICK_EVAL_FILE} can't be written ({type(error).__name__})")

    def _keep(self, evaluation: QuickEvaluation) -> bool:
        """Save the policy beside the best so far, then put it in its place: what is there is always whole. Returns
        whether this rank did so, which is the main one's work."""
        trainer = self._trainer
        fresh, best = self._folder / f"{BEST_FOLDER}.new", self._folder / BEST_FOLDER
        if trainer.accelerator.is_main_process:
            shutil.rmtree(fresh, ignore_errors=True)
        trainer.accelerator.wait_for_everyone()
        trainer.save_model(str(fresh), _internal_call=True)  # which pushes to no hub
        trainer.accelerator.wait_for_everyone()
        if not trainer.accelerator.is_main_process:
            return False
        if not any(path for pattern in WEIGHTS for path in fresh.glob(pattern)):
            logger.warning(f"the best policy was not kept: with these settings saving leaves no weights in {fresh}")
            return False
        note = {"step": evaluation.step, "by": self._settings.best, **evaluation.as_dict()}
        (fresh / BEST_NOTE_FILE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
        aside = self._folder / f"{BEST_FOLDER}.old"
        shutil.rmtree(aside, ignore_errors=True)
        if best.exists():
            best.rename(aside)
        fresh.rename(best)
        shutil.rmtree(aside, ignore_errors=True)
        return True

    def _best_on_disk(self) -> int | None:
        """The step of the best policy in the folder, 0 where that is not known; `None` without one."""
        note = self._folder / BEST_FOLDER / BEST_NOTE_FILE
        if not note.parent.is_dir():
            return None
        return int(json.loads(note.read_text(encoding="utf-8"))["step"]) if note.is_file() else 0

    def _sample(self) -> list[dict[str, Any]]:
        """This rank's part of the rows; the same all through the run."""
        trainer, dataset = self._trainer, self._trainer.eval_dataset
        if not isinstance(dataset, Dataset):
            raise ConfigError(
                f"a quick evaluation takes its rows from `eval_dataset`, which is {type(dataset).__name__}. "
                "Expected a dataset. Give one, or set `quick_eval_steps: 0`."
            )
        processes, index = trainer.accelerator.num_processes, trainer.accelerator.process_index
        branches = trainer.args.branches
        branch_ids = [branches.index(trainer._reward.branch_of(row)) for row in dataset["row"]]
        chosen = spread(branch_ids, self._settings.rows, len(branches), processes)
        if not chosen:
            raise ConfigError(
                f"a quick evaluation has {len(branch_ids)} held-out rows for {processes} processes. Expected one for "
                "each. Hold out more, or set `quick_eval_steps: 0`."
            )
        each = len(chosen) // processes
        return [dataset[place] for place in chosen[index * each : (index + 1) * each]]

    def _answer(self) -> tuple[torch.Tensor, Counter[str]]:
        """This rank's table of completions, shape (rows, len(`COLUMNS`)), float64, and on all ranks the reasons of
        those that have no verdict."""
        trainer = self._trainer
        was_training, size = trainer.model.training, trainer.args.per_device_eval_batch_size
        trainer.model.eval()
        try:
            with self._greedily(), self._set_aside():
                batches = [self._rows[first : first + size] for first in range(0, len(self._rows), size)]
                tables = [self._answer_batch(rows) for rows in batches]
                return torch.cat(tables), trainer._ledger.failures("eval")
        finally:
            trainer.model.train(was_training)

    def _answer_batch(self, rows: list[dict[str, Any]]) -> torch.Tensor:
        trainer = self._trainer
        output = trainer._generate_and_score_completions([dict(row) for row in rows])
        kl, tokens = self._kl(output)  # each (rows,)
        ids, ends = trainer._completion_ids, {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
        columns = (
            trainer._branch_ids(rows),
            [math.nan if reward.value is None else reward.value for reward in trainer._reward.last],
            [float(not each or each[-1] not in ends) for each in ids],
            [len(each) for each in ids],
        )
        table = torch.tensor(list(zip(*columns, strict=True)), dtype=torch.float64)  # (rows, 4)
        return torch.cat((table.to(kl.device), torch.stack((kl, tokens), dim=1)), dim=1).reshape(-1, len(COLUMNS))

    def _kl(self, output: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of the KL and number of tokens of each completion, both shape (rows,), float64; NaN and 0 without a
        reference policy."""
        trainer, mask = self._trainer, output["completion_mask"].bool()  # (rows, T)
        reference = output.get("ref_per_token_logps")
        if reference is None:
            nothing = torch.zeros(len(mask), dtype=torch.float64, device=mask.device)
            return nothing * math.nan, nothing
        logps = output.get("old_per_token_logps")
        if logps is None:
            logps = trainer._logps_of(output)
        log_ratio = torch.where(mask, (reference - logps).double(), 0.0)  # (rows, T)
        settings = trainer.args.kl_penalty()
        kl = penalty(log_ratio, None, settings.estimator, settings.clamp)
        return torch.where(mask, kl, 0.0).sum(dim=1), mask.sum(dim=1).double()

    @contextlib.contextmanager
    def _greedily(self) -> Iterator[None]:
        """Each prompt once, and always the likeliest token."""
        trainer = self._trainer
        owner = trainer.vllm_generation if trainer.use_vllm else trainer.generation_config
        names = ("temperature", "generation_kwargs") if trainer.use_vllm else ("do_sample",)
        kept = [(trainer, "num_generations_eval", trainer.num_generations_eval)]
        kept += [(owner, name, getattr(owner, name)) for name in names]
        trainer.num_generations_eval = 1
        if trainer.use_vllm:
            sampled = {"temperature", "top_p", "top_k", "min_p", "n", "best_of"}
            owner.temperature = 0.0
            owner.generation_kwargs = {k: v for k, v in owner.generation_kwargs.items() if k not in sampled}
        else:
            owner.do_sample = False
        try:
            yield
        finally:
            for holder, name, value in kept:
                setattr(holder, name, value)

    @contextlib.contextmanager
    def _set_aside(self) -> Iterator[None]:
        """What is gathered for the next line of an evaluation, and TRL's table of completions, stay as they are."""
        trainer = self._trainer
        kept = (trainer._metrics["eval"], trainer._logs)
        trainer._metrics["eval"], trainer._logs = defaultdict(list), copy.deepcopy(trainer._logs)
        try:
            with trainer._ledger.aside("eval"):
                yield
        finally:
            trainer._metrics["eval"], trainer._logs = kept


def _metrics(evaluation: QuickEvaluation) -> dict[str, float | None]:
    """As they are logged. TensorBoard leaves out what could not be measured."""
    figures: dict[str, float | None] = {QUICK_REWARD: evaluation.reward}
    figures[QUICK_SECONDS] = evaluation.seconds
    for branch, each in evaluation.branches.items():
        for what in QUICK_FIGURES:
            figures[quick_of(branch, what)] = getattr(each, what)
    return figures
