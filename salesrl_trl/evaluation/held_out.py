"""The full evaluations of the held-out rows: a line each, their file, and the first beside the last.

Owns the wording, the file, and the standard error of a change. The figures are those that the trainer has logged.
"""

import json
import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from salesrl_trl.ground.process import put_aside, write_whole
from salesrl_trl.names import HELD_OUT_FILE, REWARD, RIGHT_DOCUMENT, outcome_of, reward_of
from salesrl_trl.types import Outcome

logger = logging.getLogger(__name__)

T = TypeVar("T")
Figures = Mapping[str, float | None]


class Written(NamedTuple):
    """What the policy wrote to a prompt of an evaluation. It may quote a customer: not for logs, unless asked for."""

    prompt: object
    """As TRL has it: a text, or a list of messages."""
    completion: object
    """Likewise."""
    reward: float | None
    """`None` if it could not be scored."""


class HeldOut(TrainerCallback):
    """Logs each evaluation of the held-out rows in a line, and keeps the last one of each step in `held_out.json`. At
    the end of training it sets the first beside the last. A resumed run goes on with the file.

    `output_dir`: Folder of `held_out.json`. `drain_rewards`: Returns the rewards of an evaluation's completions in
    their order, NaN for a missing one. `drain_written`: Returns what the policy wrote in an evaluation, on this rank.
    `num_generations`: Completions of a row. They are neighbours. `examples`: Conversations that are shown at the end,
    with what the policy wrote first and last. `are_actions`: whether completions are actions, of which figures say
    more. `is_cut`: whether the budget ended before all completions were scored. Then the evaluation is not kept: the
    run ends, and a resume makes it again.
    """

    def __init__(
        self,
        branches: Sequence[str],
        output_dir: Path,
        drain_rewards: Callable[[], Sequence[float]],
        drain_written: Callable[[], Sequence[Written]],
        *,
        num_generations: int,
        examples: int = 0,
        are_actions: bool = True,
        is_cut: Callable[[], bool] = bool,
    ) -> None:
        self._branches = branches
        self._path = output_dir / HELD_OUT_FILE
        self._drain_rewards = drain_rewards
        self._drain_written = drain_written
        self._num_generations = num_generations
        self._examples = examples
        self._are_actions = are_actions
        self._is_cut = is_cut
        self._evaluations: list[_Evaluation] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        self._evaluations = []
        if state.is_world_process_zero and state.global_step:
            self._evaluations = [each for each in _read(self._path) if each.step <= state.global_step]

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        logged = {key.removeprefix("eval_"): value for key, value in state.log_history[-1].items()}
        invalid = logged.get(outcome_of(Outcome.INVALID_ACTION))
        figures = {
            REWARD: logged.get(REWARD),
            **{branch: logged.get(reward_of(branch)) for branch in self._branches},
        }
        if self._are_actions:
            figures["valid_actions"] = None if invalid is None else 1 - invalid
            figures |= {"right_document": logged[RIGHT_DOCUMENT]} if RIGHT_DOCUMENT in logged else {}
        rewards, written = self._drain_rewards(), self._drain_written()
        scored = sum(not math.isnan(reward) for reward in rewards)
        if self._is_cut():
            if state.is_world_process_zero:
                few = f"{scored} of {len(rewards)} completions were scored"
                logger.info(f"[HeldOut@{state.global_step}] left out: the budget ended when {few}")
            return
        rows = row_means(rewards, self._num_generations)
        if args.dataloader_persistent_workers:
            rows = []  # with these, TRL shuffles each evaluation in another way
        self._evaluations = [each for each in self._evaluations if each.step != state.global_step]
        examples = spread(written[:: self._num_generations], self._examples)
        self._evaluations.append(_Evaluation(state.global_step, figures, rows, examples))
        if not state.is_world_process_zero:
            return
        few = "" if scored == len(rewards) else f"; {scored} of {len(rewards)} completions were scored"
        logger.info(f"[HeldOut@{state.global_step}] {_text(figures)}{few}")
        text = (
            json.dumps([{"step": evaluation.step, **evaluation.figures} for evaluation in self._evaluations], indent=2)
            + "\n"
        )
        try:
            write_whole(self._path, text)
        except OSError as error:  # a full disk must not keep the other ranks waiting
            logger.warning(f"{self._path} can't be written ({type(error).__name__})")
        if len(self._evaluations) > 1 and state.global_step >= state.max_steps:
            self._compare()

    def _compare(self) -> None:
        first, last = self._evaluations[0], self._evaluations[-1]
        logger.info(f"held-out before (step {first.step}): {_text(first.figures)}")
        logger.info(f"held-out after  (step {last.step}): {_text(last.figures)}")
        for number, (earlier, later) in enumerate(zip(first.examples, last.examples, strict=False), start=1):
            if earlier.prompt == later.prompt:
                logger.info(f"held-out example {number}: {_plain(earlier.prompt)}")
                for when, written in (("before", earlier), ("after ", later)):
                    reward = "n/a" if written.reward is None else f"{written.reward:.2f}"
                    logger.info(f"    {when} reward={reward} {_plain(written.completion)}")
        before, after = first.figures[REWARD], last.figures[REWARD]
        if before is None or after is None:
            return
        if not first.rows or len(first.rows) != len(last.rows):  # the order of rows is not known
            logger.info(f"held-out mean reward changed by {after - before:+.3f}")
            return
        changes = changes_by_row(first.rows, last.rows)
        total = len(first.rows)
        if not changes:
            logger.warning(f"held-out: none of {total} rows was scored both times, so that no change is known")
            return
        error = "" if len(changes) < 2 else f" ± {standard_error(changes):.3f} (standard error, row by row)"
        some = (
            "" if len(changes) == total else f", over the {len(changes)} of {total} rows that were scored both times"
        )
        logger.info(f"held-out mean reward changed by {statistics.fmean(changes):+.3f}{error}{some}")


@dataclass(frozen=True, slots=True)
class _Evaluation:
    step: int
    figures: Figures
    rows: Sequence[float]
    """Mean reward of each row, NaN without one. Empty if the order of rows is not known."""
    examples: Sequence[Written] = ()


def _read(path: Path) -> list[_Evaluation]:
    """The evaluations of earlier starts. A file that can't be read is kept under another name."""
    if not path.is_file():
        return []
    try:
        records = [dict(load) for load in json.loads(path.read_text(encoding="utf-8"))]
        return [_Evaluation(int(record.pop("step")), record, []) for record in records]
    except (ValueError, TypeError, KeyError) as error:
        (kept,) = put_aside(path)
        logger.warning(f"{path} can't be read ({type(error).__name__}). It is kept as {kept.name}")
        return []


def spread(items: Sequence[T], number: int) -> list[T]:
    """So many of the items, evenly spread over them; all if there are fewer."""
    number = min(number, len(items))
    return [items[place * len(items) // number] for place in range(number)]


def row_means(rewards: Sequence[float], num_generations: int) -> list[float]:
    """Mean reward of each row; NaN if fewer than half of its completions could be scored.

    While services are down only invalid actions have a reward. Their mean would not be the row's.

    `rewards`: by completion, NaN for a missing one. Completions of a row are neighbours.
    """
    rows = [rewards[first : first + num_generations] for first in range(0, len(rewards), num_generations)]
    scored = [[reward for reward in row if not math.isnan(reward)] for row in rows]
    return [
        statistics.fmean(some) if 2 * len(some) >= len(row) else math.nan
        for row, some in zip(rows, scored, strict=True)
    ]


def changes_by_row(before: Sequence[float], after: Sequence[float]) -> list[float]:
    """The change of each row that was scored both times.

    The same rows are compared with each other, so that it does not matter how much easier one row is than another.

    `before`: Mean reward by row, NaN without one.
    """
    return [b - a for a, b in zip(before, after, strict=True) if not math.isnan(b - a)]


def standard_error(changes: Sequence[float]) -> float:
    """Standard error of the mean of two changes or more."""
    return statistics.stdev(changes) / math.sqrt(len(changes))


def _plain(text: object) -> str:
    """A text, or that of the last message, in a line."""
    if isinstance(text, list):  # of messages, or of the parts of one
        texts = [part.get("text", "") for part in text if "role" not in part]
        return " ".join(texts) if texts else _plain(text[-1]["content"])
    return " | ".join(str(text).splitlines())


def _text(figures: Figures) -> str:
    return " ".join(f"{name}={'n/a' if value is None else f'{value:.2f}'}" for name, value in figures.items())
