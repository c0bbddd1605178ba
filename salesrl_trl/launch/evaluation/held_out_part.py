"""The evaluations of the held-out rows of a run. `evaluation.held_out` owns their lines and their file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from salesrl_trl.launch.evaluation.held_out import HeldOut, change_in_words
from salesrl_trl.names import mean_of
from salesrl_trl.wiring.part import Part, PartContext


class HeldOutPart(HeldOut, Part):
    def __init__(self) -> None: ...

    def connect(self, run: PartContext) -> None:
        names, control = run.reward_loop.reward.names, run.run_control
        several = names.functions if len(names.functions) > 1 else {}
        others = {name: tag for part in run.parts for name, tag in part.held_out_figures.items()}
        super().__init__(
            run.args.branches,
            Path(run.args.output_dir),
            run.ledger.drain_evaluated,
            num_generations=run.trl.num_generations_eval,
            examples=run.args.held_out_examples,
            are_actions=names.has_actions,
            further=others | {name: mean_of(name) for name in several},
            is_cut=lambda: control.is_spent,
        )

    def card_values(self) -> Mapping[str, Any]:
        return {"ends": self.ends(), "change_in_words": change_in_words}
