"""A lookahead that follows what rewards and steps take. `rollout.lookahead` owns the choice."""

from collections.abc import Mapping

from salesrl_trl.rollout.lookahead import LookaheadControl
from salesrl_trl.wiring.part import Part, PartContext


class LookaheadPart(Part):
    def connect(self, run: PartContext) -> None:
        args = run.args
        self._pipeline = run.pipeline
        self._control = LookaheadControl(args.rollout_lookahead, args.most_lookahead, run.least_lookahead)

    def on_log(self, _: object, __: object, ___: object, logs: Mapping[str, float], **____: object) -> None:
        """Moves the number by the figures of a step's line. It is the same on all ranks, as these figures are."""
        self._pipeline.move_lookahead(self._control.next(logs))
