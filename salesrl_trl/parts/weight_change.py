"""Whether the first steps of a run move its weights. `update.weights` owns how that is measured."""

from salesrl_trl.update.weights import WeightChange
from salesrl_trl.wiring.part import Part, PartContext


class WeightChangePart(WeightChange, Part):
    def __init__(self) -> None: ...

    def connect(self, run: PartContext) -> None:
        super().__init__(run.trl.accelerator, run.trl.log)
