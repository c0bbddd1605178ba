"""The best policy so far, in a folder of its own.

Owns the way into the folder: a policy is saved beside the one before, and then takes its place. So the folder is
always whole. The record decides which policy is the best.
"""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from salesrl_trl.errors import CheckpointError
from salesrl_trl.evaluation.answers import Ranks
from salesrl_trl.evaluation.record import QuickEvaluation
from salesrl_trl.ground.process import put_in_place
from salesrl_trl.names import BEST_FOLDER, BEST_NOTE_FILE

logger = logging.getLogger(__name__)

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*/*.distcp", "*/*.pt")
"""Files of a saved policy: it has at least one of these."""


class BestPolicy:
    """The folder of the best policy.

    `by`: Figure that selects the best policy. `ranks`: the processes of the run. The main one renames, all of them
    save.
    """

    def __init__(self, output_dir: Path, by: str | None, ranks: Ranks) -> None:
        self.folder = output_dir / BEST_FOLDER
        self._by = by
        self._ranks = ranks

    @property
    def step(self) -> int | None:
        """The step of the policy in the folder; 0 without a note of it, `None` without a policy."""
        if not self.folder.is_dir():
            return None
        note = self.folder / BEST_NOTE_FILE
        return int(json.loads(note.read_text(encoding="utf-8"))["step"]) if note.is_file() else 0

    def keep(self, evaluation: QuickEvaluation, save: Callable[[Path], None]) -> bool:
        """Save the policy in place of the best one before; all ranks together.

        `evaluation`: its evaluation, for the note. `save`: Writes the policy into a folder; called on all ranks.

        Returns:
            `bool`: whether it is there, on all ranks. If it can't be saved, on a full disk for example, the one before
            stays, and a line says so.
        """
        fresh = self._beside("new")
        if self._ranks.index == 0:
            shutil.rmtree(fresh, ignore_errors=True)
        self._ranks.wait()
        reason = _failure(lambda: save(fresh))
        reasons = [each for each in self._ranks.gather([reason]) if each is not None]
        if self._ranks.index == 0 and not reasons:
            reason = _failure(lambda: self._finish(evaluation, fresh))
            reasons = [] if reason is None else [reason]
        if self._ranks.index == 0 and reasons:
            shutil.rmtree(fresh, ignore_errors=True)
            logger.warning(f"the best policy was not kept: {reasons[0]}")
        return self._ranks.from_main(not reasons)

    def _finish(self, evaluation: QuickEvaluation, fresh: Path) -> None:
        if not any(path for pattern in WEIGHTS for path in fresh.glob(pattern)):
            raise CheckpointError(f"with these settings saving leaves no weights in {fresh}")
        note = {"step": evaluation.step, "by": self._by, **evaluation.as_dict()}
        (fresh / BEST_NOTE_FILE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
        put_in_place(fresh, self.folder)

    def put_aside(self) -> Path:
        """Rename the folder, so that nothing is written over the policy in it. Returns its new place."""
        aside = self._beside("earlier")
        shutil.rmtree(aside, ignore_errors=True)
        self.folder.rename(aside)
        return aside

    def _beside(self, suffix: str) -> Path:
        return self.folder.with_name(f"{BEST_FOLDER}.{suffix}")


def _failure(work: Callable[[], None]) -> str | None:
    """Why it failed, in words; `None` if it did not. Another rank must not wait for one that failed."""
    try:
        work()
    except CheckpointError as error:
        return str(error)
    except Exception as error:
        return f"it can't be saved ({type(error).__name__})"
    return None
