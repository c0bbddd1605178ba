"""The full evaluations of the held-out rows: a line each, their file, and the first beside the last.

Owns the wording and the file. The figures are those that the trainer has logged.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from salesrl_trl.names import HELD_OUT_FILE, REWARD, outcome_of, reward_of
from salesrl_trl.types import Outcome

logger = logging.getLogger(__name__)

Figures = Mapping[str, float | None]


class HeldOut(TrainerCallback):
    """Logs each evaluation of the held-out rows in a line, and keeps all of them in `held_out.json`. At the end of
    training it sets the first beside the last.

    Args:
        branches (`Sequence[str]`):
            Branch names.
        output_dir (`Path`):
            Folder of `held_out.json`.
    """

    def __init__(self, branches: Sequence[str], output_dir: Path) -> None:
        self._branches = branches
        self._output_dir = output_dir
        self._evaluations: list[tuple[int, Figures]] = []

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        logged = {key.removeprefix("eval_"): value for key, value in state.log_history[-1].items()}
        invalid = logged.get(outcome_of(Outcome.INVALID_ACTION))
        figures = {
            REWARD: logged.get(REWARD),
            **{branch: logged.get(reward_of(branch)) for branch in self._branches},
            "valid_actions": None if invalid is None else 1 - invalid,
        }
        self._evaluations.append((state.global_step, figures))
        if not state.is_world_process_zero:
            return
        logger.info(f"[HeldOut@{state.global_step}] {_text(figures)}")
        self._output_dir.mkdir(parents=True, exist_ok=True)
        text = json.dumps([{"step": step, **each} for step, each in self._evaluations], indent=2) + "\n"
        (self._output_dir / HELD_OUT_FILE).write_text(text, encoding="utf-8")
        if len(self._evaluations) > 1 and state.global_step >= state.max_steps:
            self._compare()

    def _compare(self) -> None:
        (first_step, first), (last_step, last) = self._evaluations[0], self._evaluations[-1]
        logger.info(f"held-out before (step {first_step}): {_text(first)}")
        logger.info(f"held-out after  (step {last_step}): {_text(last)}")
        before, after = first[REWARD], last[REWARD]
        if before is not None and after is not None:
            logger.info(f"held-out mean reward changed by {after - before:+.3f}")


def _text(figures: Figures) -> str:
    return " ".join(f"{name}={'n/a' if value is None else f'{value:.2f}'}" for name, value in figures.items())
