"""Quick evaluations: greedy answers to a fixed held-out sample every few steps, keeping the best policy."""

import json
import logging
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset

from salesrl_trl import names
from salesrl_trl.config.quick_evaluations import BETA, OWN_FIGURES
from salesrl_trl.data.branches import Branches
from salesrl_trl.errors import CheckpointError, ConfigError
from salesrl_trl.ground.process import put_in_place
from salesrl_trl.kl.penalty import penalty
from salesrl_trl.launch.evaluation.quick_record import (
    QuickEvalHistory,
    QuickEvaluation,
    checked_figures,
    evaluation_of,
)
from salesrl_trl.names import Phase
from salesrl_trl.types import Answered, Example, Outcome
from salesrl_trl.wiring.part import Part, PartContext

logger = logging.getLogger(__name__)


class GreedySubject:
    """The policy in training, decoded greedily. All ranks call it together."""

    def __init__(self, run: PartContext) -> None:
        self._run, trl = run, run.trl
        self._ends = frozenset({*trl.eos_token_ids, trl.tokenizer.pad_token_id})
        self._penalty = run.args.kl_penalty()

    def answer(self, rows: Sequence[Example]) -> list[Answered]:
        """Answers to this rank's rows, in their order, with their rewards, without affecting training."""
        run, step = self._run, self._run.trl.step()
        size = run.args.per_device_eval_batch_size
        batches = [list(rows[first : first + size]) for first in range(0, len(rows), size)]
        answers: list[Answered] = []
        with run.trl.set_aside(), run.sampler.greedily(), run.ledger.aside("eval"):  # without changing other metrics
            for batch in run.pipeline.evaluations(batches, step):
                rollout, output = run.scoring.evaluate(batch, step)
                assert rollout.sampled is not None and rollout.result is not None
                ids_of, rewards = rollout.sampled.completion_ids, rollout.result.rewards
                texts = run.trl.tokenizer.batch_decode(ids_of, skip_special_tokens=True)
                parts = zip(batch, texts, rewards, ids_of, self._kl(output), strict=True)
                for row, text, reward, ids, (kl, tokens) in parts:
                    columns = {name: value for name, value in row.items() if name not in ("prompt", "images")}
                    cut, branch = not ids or ids[-1] not in self._ends, run.branches.of(row)
                    made = Answered(branch=branch, text=text, reward=reward, tokens=len(ids), truncated=cut)
                    answers.append(replace(made, kl=kl, kl_tokens=tokens, columns=columns))
        return answers

    def _kl(self, output: Mapping[str, torch.Tensor]) -> list[tuple[float | None, int]]:
        """Sum and number of tokens of the KL per answer, from TRL's output; `None` and 0 without a reference."""
        mask = output["completion_mask"].bool()  # (B, C)
        reference, logps = output.get("ref_per_token_logps"), output.get("old_per_token_logps")
        if reference is None:
            return [(None, 0)] * len(mask)
        if logps is None:
            logps = self._run.trl.logps_of(output)
        log_ratio = torch.where(mask, (reference - logps).double(), 0.0)  # (B, C)
        kl = penalty(log_ratio, None, self._penalty.estimator, self._penalty.clamp)
        sums = torch.where(mask, kl, 0.0).sum(dim=1)  # (B,)
        return list(zip(sums.tolist(), mask.sum(dim=1).tolist(), strict=True))


class QuickEvalPart(Part):
    """Evaluates the policy every few steps on the same rows, and keeps the best one. Raises `ConfigError` for an
    invalid metric, or one whose name is taken."""

    def connect(self, run: PartContext) -> None:
        settings, ranks, folder = run.quick_eval, PartialState(), Path(run.args.output_dir)
        assert settings is not None
        self._run, self._settings, self._ranks = run, settings, ranks
        self._subject = GreedySubject(run)
        self._rows = sample(run.trl.eval_dataset, settings.rows, run.branches, ranks)
        others = (figure for part in run.parts for figure in part.quick_figures if figure not in settings.figures)
        self._figures = checked_figures((*others, *settings.figures), run.args.branches)
        self._figure_names = (*OWN_FIGURES, *(figure.name for figure in self._figures))
        run.figures.words["figure"] = self._figure_names
        least_scored = run.args.min_valid_reward_fraction
        self._history = QuickEvalHistory(folder / names.QUICK_EVAL_FILE, settings.best, least_scored)
        self._folder = folder / names.BEST_FOLDER
        self._evaluated_step = 0

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Resume the run's record."""
        step, is_main = self._run.trl.step(), self._ranks.is_main_process
        known = (self._history.read(), self._kept_step()) if is_main else None
        [(records, kept_step)] = broadcast_object_list([known])
        self._history.resume(records, step)
        # A run may end between a step's checkpoint and its evaluation, which is then still due
        is_made = any(evaluation.step == step for evaluation in self._history.evaluations)
        self._evaluated_step = step if is_made else 0
        best = self._history.best
        if kept_step is None or (best is not None and best.step == kept_step):
            return
        # The policy in the folder is from an earlier run, or from a later step than the resumed one
        self._history.best = None
        if is_main:
            aside = self._folder.with_name(f"{names.BEST_FOLDER}.earlier")
            shutil.rmtree(aside, ignore_errors=True)
            self._folder.rename(aside)
            logger.info(f"moved the best policy of an earlier start (step {kept_step}) to {aside}")

    def after_step(self, step: int) -> None:
        if step % self._settings.steps == 0 and step != self._evaluated_step:
            self._evaluated_step = step
            self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        run, started, phase = self._run, time.perf_counter(), self._run.instruments.timeline.phase
        with phase(Phase.EVALUATION):
            answers = gather_object(self._subject.answer(self._rows))
            if run.run_control.is_spent:  # the run ends; a resume evaluates again
                if self._ranks.is_main_process:
                    logger.info(f"[QuickEval@{step}] discarded: the budget ended before all rows were scored")
                return
            seconds, branches = time.perf_counter() - started, run.args.branches
            betas = {} if run.kl is None else dict(zip(branches, run.kl.control.betas, strict=True))
            evaluation = evaluation_of(answers, branches, betas, step, seconds, self._figures)
            # All ranks use the main rank's metrics, so that either all or none save the policy
            [evaluation] = broadcast_object_list([evaluation])
            before = self._history.best
            is_best = self._history.add(evaluation)
        with phase(Phase.CHECKPOINT):
            is_kept = is_best and self._keep(evaluation)
            if is_best and not is_kept:
                self._history.best = before  # the saved one is still the one to beat
        with phase(Phase.LOGGING):
            if self._ranks.is_main_process:
                failed = Counter(answer.reward.reason for answer in answers if answer.reward.outcome is not Outcome.OK)
                self._report(evaluation, failed, is_kept)
            overall = {names.REWARD: evaluation.reward, **evaluation.figures}
            logged = {f"{names.QUICK_EVAL}{name}": value for name, value in overall.items()}
            logged[names.QUICK_SECONDS] = evaluation.seconds
            for branch, figures in evaluation.branches.items():
                logged |= {names.quick_of(branch, name): figures[name] for name in (*self._figure_names, BETA)}
            run.trl.log(logged)

    def _report(self, evaluation: QuickEvaluation, failed: Counter[str], is_kept: bool) -> None:
        reasons = "".join(f" {reason}={count}" for reason, count in sorted(failed.items()))
        logger.info(evaluation.line(self._figures) + (f" failures{reasons}" if failed else ""))
        logger.info(self._history.front_line())
        if is_kept:
            by = self._settings.best or names.REWARD
            logger.info(f"[Best@{evaluation.step}] {by} {evaluation.score(by):.3f}, saved in {self._folder}")
        try:
            self._history.write()
        except OSError as error:  # a full disk must not keep the other ranks waiting
            logger.warning(f"{self._history.path} can't be written ({type(error).__name__})")

    def _kept_step(self) -> int | None:
        """The step of the policy in the folder; 0 without a note, `None` without a policy."""
        if not self._folder.is_dir():
            return None
        note = self._folder / names.BEST_NOTE_FILE
        return int(json.loads(note.read_text(encoding="utf-8"))["step"]) if note.is_file() else 0

    def _keep(self, evaluation: QuickEvaluation) -> bool:
        """Save the policy to a temporary folder, then replace the previous best one, so that the folder is always
        complete. Called on all ranks together. Returns whether it was saved; if not, the previous one remains."""
        fresh = self._folder.with_name(f"{names.BEST_FOLDER}.new")
        if self._ranks.is_main_process:
            shutil.rmtree(fresh, ignore_errors=True)
        self._ranks.wait_for_everyone()
        failed: list[str] = []
        try:
            self._run.trl.save(fresh)
        except Exception as error:  # other ranks must not wait for this one
            failed = [_in_words(error)]
        reasons = gather_object(failed)
        if self._ranks.is_main_process and not reasons:
            try:
                if not any(path for pattern in WEIGHTS for path in fresh.glob(pattern)):
                    raise CheckpointError(f"saving with these settings wrote no weights to {fresh}")
                note = {"step": evaluation.step, "by": self._settings.best, **asdict(evaluation)}
                (fresh / names.BEST_NOTE_FILE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
                put_in_place(fresh, self._folder)
            except Exception as error:
                reasons = [_in_words(error)]
        if self._ranks.is_main_process and reasons:
            shutil.rmtree(fresh, ignore_errors=True)
            logger.warning(f"the best policy was not kept: {reasons[0]}")
        return bool(broadcast_object_list([not reasons])[0])


WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*/*.distcp", "*/*.pt")
"""Weight files, of which a saved policy has at least one."""


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"it can't be saved ({type(error).__name__})"


def sample(dataset: object, rows: int, branches: Branches, ranks: PartialState) -> list[Example]:
    """This rank's rows, at least one, from the trainer's `eval_dataset`. `rows`: their number over all ranks. Raises
    `ConfigError` if there are fewer held-out rows than processes."""
    if not isinstance(dataset, Dataset):
        kind = type(dataset).__name__
        raise ConfigError(f"quick evaluations need an `eval_dataset`, which is {kind}. Or set `quick_eval_steps: 0`.")
    branch_ids = [branches.names.index(branch) for branch in branches.of_rows(dataset)]
    chosen = spread(branch_ids, rows, len(branches.names), ranks.num_processes)
    if not chosen:
        count = f"{len(branch_ids)} held-out rows for {ranks.num_processes} processes"
        raise ConfigError(f"quick evaluations have {count}. Hold out more, or set `quick_eval_steps: 0`.")
    share = len(chosen) // ranks.num_processes
    return [dataset[place] for place in chosen[ranks.process_index * share : (ranks.process_index + 1) * share]]


def spread(branch_ids: Sequence[int], rows: int, branches: int, processes: int) -> list[int]:
    """Indices of the rows to evaluate, from the branch of each held-out row: the first of each branch in turn. Each
    process gets the same number, at least one; a remainder is dropped."""
    by_branch = [[place for place, own in enumerate(branch_ids) if own == branch] for branch in range(branches)]
    turns = max((len(places) for places in by_branch), default=0)
    chosen = [places[turn] for turn in range(turns) for places in by_branch if turn < len(places)]
    return chosen[: min(max(rows, processes), len(chosen)) // processes * processes]
