"""What is measured and told of a run: timings, trace, heartbeat, quick evaluations. Owns how often and how much."""

import re
from dataclasses import dataclass, field

from salesrl_trl.config.checks import about, check, check_positive, load_object
from salesrl_trl.evaluation.figures import WORST_BRANCH, checked_figures
from salesrl_trl.evaluation.record import QuickEvalSettings
from salesrl_trl.names import REWARD

ALL_STEPS = 2**62
"""More than any run has."""


@dataclass
class TelemetryConfig:
    """What is measured and told of a run.

    Args:
        timing (`bool`, *optional*, defaults to `True`):
            Measure the phases of each step, throughput and memory. Without it there are no heartbeats and no trace.
        perf_logging_steps (`int`, *optional*, defaults to `1`):
            Log throughput, utilisation and memory at every so many-th step, over the steps since the last time; takes
            effect at steps that are logged at all (`logging_steps`).
        peak_tflops (`float`, *optional*):
            Dense bf16 peak of one device in TFLOP/s, for utilisation on a chip that the table does not know.
        trace_steps (`str`, *optional*, defaults to `"1:50"`):
            Steps that go into `trace.json`: first and last, `"100:"` for all from there on, `""` for no trace. A step
            that fails goes into a trace whatever its number.
        trace_max_mb (`float`, *optional*, defaults to `64.0`):
            Largest trace in MB. Spans beyond it are left out.
        heartbeat_s (`float`, *optional*, defaults to `10.0`):
            Tell of a phase that lasts longer, then at every doubling; 0 for never.
        quick_eval_steps (`int`, *optional*, defaults to `0`):
            Evaluate greedily at every so many-th step; 0 for never.
        quick_eval_rows (`int`, *optional*, defaults to `16`):
            Held-out rows of such an evaluation, the same all through the run, spread evenly over the branches.
        quick_eval_best (`str`, *optional*):
            The figure that selects the best policy, which is kept in `OUTPUT_DIR/best`: `reward` (the mean over all
            rows), `worst_branch`, a branch (its score), or one of your figures (over all rows, higher is better). Of
            that branch, or of each branch, at least `min_valid_reward_fraction` must have been scored.
        quick_eval_figures (`list[str]`, *optional*):
            Figures of your own: dotted paths of classes such as `"my_package.my_module.MyFigure"`.
            `evaluation.figures.Figure` describes them.
    """

    timing: bool = field(default=True, metadata=about("measure phases, throughput and memory"))
    perf_logging_steps: int = field(default=1, metadata=about("log throughput and memory at every so many-th step"))
    peak_tflops: float | None = field(default=None, metadata=about("bf16 peak of a chip the table does not know"))
    trace_steps: str = field(default="1:50", metadata=about("steps in trace.json, FIRST:LAST; empty for none"))
    trace_max_mb: float = field(default=64.0, metadata=about("largest trace.json"))
    heartbeat_s: float = field(default=10.0, metadata=about("tell of a phase that lasts longer; 0 for never"))
    quick_eval_steps: int = field(default=0, metadata=about("greedy evaluation at every so many-th step; 0 for never"))
    quick_eval_rows: int = field(default=16, metadata=about("held-out rows of a quick evaluation"))
    quick_eval_best: str | None = field(
        default=None, metadata=about("keep the best policy by: reward, worst_branch, a branch or a figure of your own")
    )
    quick_eval_figures: list[str] = field(
        default_factory=list, metadata=about("dotted paths of classes: figures of your own in quick evaluations")
    )

    def __post_init__(self) -> None:
        check_positive(self, "perf_logging_steps", "trace_max_mb", "quick_eval_rows")
        for name in ("heartbeat_s", "quick_eval_steps"):
            value = getattr(self, name)
            check(value >= 0, f"`{name}` is {value}. Expected 0 for never, or more.")
        peak = self.peak_tflops
        check(peak is None or peak > 0, f"`peak_tflops` is {peak}. Expected more than 0, such as 989.4.")
        self.traced_steps()
        self.quick_eval()

    def traced_steps(self) -> range:
        """`trace_steps` as numbers, counted from 1."""
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
        """When quick evaluations are due, and their figures."""
        return QuickEvalSettings(
            steps=self.quick_eval_steps,
            rows=self.quick_eval_rows,
            best=self.quick_eval_best,
            figures=checked_figures(load_object(path, "quick_eval_figures") for path in self.quick_eval_figures),
        )

    def check_branches(self, branches: list[str]) -> None:
        """Check what depends on the branches.

        Raises:
            `ConfigError`: `quick_eval_best` is no figure, or one of your figures has the name of a branch.
        """
        own = checked_figures(self.quick_eval().figures, branches)
        known = (REWARD, WORST_BRANCH, *branches, *(figure.name for figure in own))
        check(
            self.quick_eval_best is None or self.quick_eval_best in known,
            f"`quick_eval_best` is {self.quick_eval_best!r}. Expected one of: {', '.join(known)}.",
        )
