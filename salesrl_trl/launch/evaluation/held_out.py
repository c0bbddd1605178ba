"""Full evaluations of the held-out rows: log lines, their file, and the change from the first to the last."""

import json
import logging
import math
import statistics
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path

from transformers import TrainerState, TrainingArguments

from salesrl_trl.ground.process import write_whole
from salesrl_trl.ground.row_statistics import standard_error
from salesrl_trl.ground.texts import number
from salesrl_trl.names import BY_ROW, HELD_OUT_FILE, REWARD, RIGHT_DOCUMENT, mean_of, outcome_of, reward_of
from salesrl_trl.types import EvaluatedCompletion, Outcome
from salesrl_trl.wiring.part import Part, PartContext

logger = logging.getLogger(__name__)

Figures = Mapping[str, float | None]


class HeldOut(Part):
    """Logs each evaluation of the held-out rows, and keeps the last one of each step in `held_out.json`. At the end of
    training, it compares the first with the last. Several datasets are only logged. An evaluation cut short by the
    budget is discarded, and repeated on resume."""

    def __init__(self) -> None:
        self._evaluations: list[_Evaluation] = []
        self.done_at: int | None = None  # step of the last kept evaluation, on all ranks

    def connect(self, run: PartContext) -> None:
        self._run, self._names = run, run.reward_loop.reward.names
        self._path = Path(run.args.output_dir) / HELD_OUT_FILE
        self._num_generations = run.trl.num_generations_eval  # completions per row, which are adjacent
        several = self._names.functions if len(self._names.functions) > 1 else {}
        others = {name: tag for part in run.parts for name, tag in part.held_out_figures.items()}
        self._further = others | {name: mean_of(name) for name in several}  # tags in the log by name

    def card_values(self) -> Mapping[str, object]:
        ends = [(self._evaluations[0], self._evaluations[-1])] if self._evaluations else []
        return {"ends": ends, "change_in_words": change_in_words}

    def on_train_begin(self, _: object, state: TrainerState, *__: object, **___: object) -> None:
        self._evaluations, self.done_at = [], None
        if state.is_world_process_zero and state.global_step:
            evaluations = _read(self._path)
            self._evaluations = [before for before in evaluations if before.step <= state.global_step]

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, *_: object, eval_dataloader: object = None, **__: object
    ) -> None:
        logged = {key.removeprefix("eval_"): value for key, value in state.log_history[-1].items()}
        dataset = next((key for key in logged if key.endswith("_runtime")), "").removesuffix("_runtime")  # of several
        head = f"[HeldOut@{state.global_step}] {f'{dataset}: ' if dataset else ''}"
        rewards, written = self._run.ledger.drain_evaluated()
        dataset_rows = getattr(eval_dataloader, "dataset", None)
        if isinstance(dataset_rows, Sized):  # accelerate pads the last batch with the first rows
            rewards = rewards[: len(dataset_rows) * self._num_generations]
        scored = sum(not math.isnan(reward) for reward in rewards)
        share = f"{scored} of {len(rewards)} completions were scored"
        if self._run.run_control.is_spent:
            if state.is_world_process_zero:
                logger.info(f"{head}discarded: the budget ended when {share}")
            return
        self.done_at = state.global_step
        figures = self._figures(logged)
        if state.is_world_process_zero:
            logger.info(f"{head}{_text(figures)}{'' if scored == len(rewards) else f'; {share}'}")
        if dataset:
            return
        # with persistent workers, TRL shuffles each evaluation differently
        rows = [] if args.dataloader_persistent_workers else row_means(rewards, self._num_generations)
        firsts = written[:: self._num_generations]
        count = min(self._run.args.held_out_examples, len(firsts))
        examples = [firsts[place * len(firsts) // count] for place in range(count)]
        self._evaluations = [each for each in self._evaluations if each.step != state.global_step]
        self._evaluations.append(_Evaluation(state.global_step, figures, rows, examples))
        if state.is_world_process_zero:
            self._write()
            if len(self._evaluations) > 1 and state.global_step >= state.max_steps:
                _compare(self._evaluations[0], self._evaluations[-1])

    def _figures(self, logged: Figures) -> Figures:
        invalid = logged.get(outcome_of(Outcome.INVALID_ACTION))
        every = self._run.args.branches
        branches = every if len(every) > 1 else ()  # one branch's reward is the overall reward
        figures = {REWARD: logged.get(REWARD), **{branch: logged.get(reward_of(branch)) for branch in branches}}
        if self._names.has_actions:
            figures["valid_actions"] = None if invalid is None else 1 - invalid
            figures |= {"right_document": logged[RIGHT_DOCUMENT]} if RIGHT_DOCUMENT in logged else {}
        return figures | {name: logged.get(tag) for name, tag in self._further.items()}

    def _write(self) -> None:
        records: list[dict[str, object]] = [{"step": each.step, **each.figures} for each in self._evaluations]
        # for the comparison with the last one, also after a resume
        records[0][BY_ROW] = [None if math.isnan(row) else row for row in self._evaluations[0].rows]
        try:
            write_whole(self._path, json.dumps(records, indent=2) + "\n")
        except OSError as error:  # a full disk must not keep the other ranks waiting
            logger.warning(f"{self._path} can't be written ({type(error).__name__})")


@dataclass(frozen=True, slots=True)
class _Evaluation:
    step: int
    figures: Figures
    rows: Sequence[float]  # mean reward of each row, NaN without one; empty if the order of rows is unknown
    examples: Sequence[EvaluatedCompletion] = ()


def _compare(first: _Evaluation, last: _Evaluation) -> None:
    words = ("first ", "last  ") if first.step else ("before", "after ")  # training
    for word, evaluation in zip(words, (first, last), strict=True):
        logger.info(f"held-out {word} (step {evaluation.step}): {_text(evaluation.figures)}")
    for place, (earlier, later) in enumerate(zip(first.examples, last.examples, strict=False), start=1):
        if earlier.prompt == later.prompt:
            logger.info(f"held-out example {place}: {_plain(earlier.prompt)}")
            for when, written in zip(words, (earlier, later), strict=True):
                logger.info(
                    f"    {when} reward={number(written.reward, '.2f')} {_plain(written.text or written.completion)}"
                )
    if (text := change_in_words(first, last)) is not None:
        logger.info(f"held-out{text}")


def change_in_words(first: _Evaluation, last: _Evaluation) -> str | None:
    """The change of the mean reward as text, with its standard error if the rows are known."""
    before, after = first.figures[REWARD], last.figures[REWARD]
    if before is None or after is None:
        return None
    if not first.rows or len(first.rows) != len(last.rows):  # the order of rows is unknown
        return f" mean reward changed by {after - before:+.3f}"
    # paired by row, so that their difficulty cancels
    both = zip(first.rows, last.rows, strict=True)
    changes = [later - earlier for earlier, later in both if not math.isnan(later - earlier)]
    total = len(first.rows)
    if not changes:
        return f": none of {total} rows was scored both times, so the change is unknown"
    error = "" if len(changes) < 2 else f" ± {standard_error(changes):.3f} (standard error, row by row)"
    some = "" if len(changes) == total else f", over the {len(changes)} of {total} rows scored both times"
    return f" mean reward changed by {statistics.fmean(changes):+.3f}{error}{some}"


def _read(path: Path) -> list[_Evaluation]:
    if not path.is_file():
        return []
    try:
        records = [dict(load) for load in json.loads(path.read_text(encoding="utf-8"))]
        rows = [[math.nan if row is None else float(row) for row in record.pop(BY_ROW, ())] for record in records]
        return [_Evaluation(int(each.pop("step")), each, of_rows) for each, of_rows in zip(records, rows, strict=True)]
    except (ValueError, TypeError, KeyError) as error:
        logger.warning(f"{path} can't be read ({type(error).__name__}) and will be rewritten")
        return []


def row_means(rewards: Sequence[float], num_generations: int) -> list[float]:
    """Mean reward of each row, NaN if fewer than half of its adjacent completions are scored: during an outage, only
    invalid actions are, which would bias the mean."""
    rows = [rewards[first : first + num_generations] for first in range(0, len(rewards), num_generations)]
    pairs = [(row, [reward for reward in row if not math.isnan(reward)]) for row in rows]
    return [statistics.fmean(scored) if 2 * len(scored) >= len(row) else math.nan for row, scored in pairs]


def _plain(text: object) -> str:
    """A text, or that of the last message, on one line."""
    if isinstance(text, list):  # of messages, or of the parts of one
        texts = [part.get("text", "") for part in text if "role" not in part]
        return " ".join(texts) if texts else _plain(text[-1]["content"])
    return " | ".join(str(text).splitlines())


def _text(figures: Figures) -> str:
    return " ".join(f"{name}={number(value, '.2f')}" for name, value in figures.items())
