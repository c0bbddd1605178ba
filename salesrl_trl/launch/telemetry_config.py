"""Settings of measurements and quick evaluations. A part of `launch.settings.RunConfig`."""

import re
from dataclasses import dataclass, field

from salesrl_trl.config.checks import check, load_object
from salesrl_trl.config.quick_evaluations import WORST_BRANCH, QuickEvalSettings, checked_figures
from salesrl_trl.config.ranges import Count, NumberOrNone, Positive, check_settings
from salesrl_trl.names import REWARD

ALL_STEPS = 2**62
"""More steps than any run has."""


@dataclass
class TelemetryConfig:
    """Measurements, logs and quick evaluations of a run, and how often they come."""

    peak_tflops: Positive | None = None
    """Dense bf16 peak of one device in TFLOP/s, for the utilisation of a chip that is not in the package's table."""
    trace_steps: str = "1:50"
    """First and last step in `trace.json`. `"100:"` means all steps from 100 on, `""` no trace. A step that fails is
    in a trace whatever its number."""
    quick_eval_steps: NumberOrNone = 0
    """Optimizer steps between two quick evaluations, which decode greedily; 0 for none."""
    quick_eval_rows: Count = 16
    """Held-out rows of a quick evaluation, spread evenly over the branches. They stay the same during the run."""
    quick_eval_best: str | None = None
    """The figure that selects the best policy, which is kept in `OUTPUT_DIR/best`: `reward` (the mean over all rows),
    `worst_branch`, a branch (its score), or one of your figures (over all rows, higher is better). At least
    `min_valid_reward_fraction` of that branch, or of each branch, must have a score."""
    quick_eval_figures: list[str] = field(default_factory=list)
    """Dotted paths of classes for figures of your own, such as `"my_package.my_module.MyFigure"`.
    `config.quick_evaluations.Figure` describes such a class."""

    def __post_init__(self) -> None:
        check_settings(self)
        self.traced_steps()
        self.quick_eval()

    def traced_steps(self) -> range:
        """The steps of `trace_steps`, counted from 1."""
        if not self.trace_steps:
            return range(0)
        match = re.fullmatch(r"(\d+):(\d*)", str(self.trace_steps))
        steps = range(int(match[1]), int(match[2]) + 1 if match[2] else ALL_STEPS) if match else range(0)
        check(
            len(steps) > 0,
            f"`trace_steps` is {self.trace_steps!r}. Expected FIRST:LAST such as '1:50', FIRST: for all from there "
            "on, or nothing for no trace; in YAML between quotes, or 1:50 is read as 110.",
        )
        return steps

    def quick_eval(self) -> QuickEvalSettings:
        """The steps and the figures of quick evaluations."""
        return QuickEvalSettings(
            steps=self.quick_eval_steps,
            rows=self.quick_eval_rows,
            best=self.quick_eval_best,
            figures=checked_figures(load_object(path, "quick_eval_figures") for path in self.quick_eval_figures),
        )

    def check_branches(self, branches: list[str]) -> None:
        """Raise `ConfigError` if `quick_eval_best` is no figure, or one of your figures has the name of a branch."""
        own = checked_figures(self.quick_eval().figures, branches)
        known = (REWARD, WORST_BRANCH, *branches, *(figure.name for figure in own))
        check(
            self.quick_eval_best is None or self.quick_eval_best in known,
            f"`quick_eval_best` is {self.quick_eval_best!r}. Expected one of: {', '.join(known)}.",
        )
