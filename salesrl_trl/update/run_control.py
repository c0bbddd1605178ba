"""Whether a generation batch counts, and whether the run goes on.

Owns which batches are left out for want of rewards and what a run ends with. What is gathered from other ranks is the
trainer's.
"""

from collections import Counter
from collections.abc import Mapping

from salesrl_trl.errors import RunStopped, SalesRLError, TooFewRewardsError

ADVICE = {
    "no_passages": "`no_passages` means that the RAG service found nothing for these rows, not even with the "
    "conversation itself and without a threshold: look whether its index is loaded and holds this knowledge, and "
    "whether it knows the rows' tenant_id. "
}
"""What to look at, by the reason of a failure that does not say it itself."""


class RunControl:
    """Decides for one run after another.

    Args:
        min_valid_reward_fraction (`float`):
            Share of a generation batch's completions that must have a reward.
        max_skipped_generations (`int`):
            Batches in a row that may lack it; the last of them ends the run.
        places (`Mapping[str, str]`, *optional*, defaults to none):
            Where each service is, by the name that its reason codes begin with.
    """

    def __init__(
        self, min_valid_reward_fraction: float, max_skipped_generations: int, places: Mapping[str, str] | None = None
    ) -> None:
        self.wanted_fraction = min_valid_reward_fraction
        """Share of completions below which a batch is skipped."""
        self._most = max_skipped_generations
        self._places = places or {}
        self.restart()

    def restart(self) -> None:
        """A run begins."""
        self.requested: str | None = None
        """What asked this rank for a stop."""
        self.error: SalesRLError | None = None
        """What the run ends with after the step under way."""
        self.is_skipping = False
        """Whether the generation batch in training is left out of the loss."""
        self._moves = False
        self._skipped_in_a_row = 0

    def record_batch(self, scored_fraction: float, missing: Counter[str]) -> str | None:
        """Skip a batch of which too little was scored; end the run after too many in a row.

        Args:
            scored_fraction (`float`):
                Share of its completions that have a reward, on all ranks.
            missing (`Counter[str]`):
                Reason code to count of those that have none.

        Returns:
            `str`: what there is to say of a skipped batch. `None` for one that counts.
        """
        wanted = self.wanted_fraction
        self.is_skipping = scored_fraction < wanted
        if not self.is_skipping:
            self._skipped_in_a_row = 0
            return None
        self._skipped_in_a_row += 1
        reasons = ", ".join(f"{reason} {count}" for reason, count in missing.most_common(5))
        if self._skipped_in_a_row >= self._most:
            failed = [name for name in self._places if any(reason.startswith(f"{name}_") for reason in missing)]
            where = "".join(f"{name} is {self._places[name]}. " for name in failed)
            advice = "".join(text for reason, text in ADVICE.items() if reason in missing)
            self.error = TooFewRewardsError(
                f"{self._skipped_in_a_row} generation batches in a row had fewer than {wanted:.0%} of their "
                f"completions scored. Failures in the last one: {reasons}. {where}{advice}A checkpoint was saved; "
                "mend the service and go on with --resume_from_checkpoint DIR."
            )
        return (
            f"skipping an update: {scored_fraction:.0%} of the completions could be scored, wanted {wanted:.0%} "
            f"({reasons})"
        )

    def record_micro_batch(self) -> None:
        """One of the batch seen last was trained on."""
        self._moves = self._moves or not self.is_skipping

    def drain_moves(self) -> bool:
        """Whether any micro-batch since the last time counted: else the optimizer step is none."""
        moves, self._moves = self._moves, False
        return moves

    def stop(self, step: int) -> None:
        """End the run because some rank was asked to, after `step` optimizer steps."""
        reason = self.requested or "a request to another rank"
        self.error = RunStopped(
            f"stopped by {reason} after {step} steps. The state was saved; go on with --resume_from_checkpoint DIR."
        )
