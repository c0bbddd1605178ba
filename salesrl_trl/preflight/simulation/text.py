"""The figures of a simulation as text.

Owns tables, lines and the verdict. Refuses to compute figures.
"""

from collections.abc import Mapping, Sequence

from salesrl_trl.names import USAGE
from salesrl_trl.preflight.simulation.findings import StepSummary, Summary
from salesrl_trl.reward.service.transport import TRAFFIC
from salesrl_trl.telemetry.step_lines import figure


def step_text(summary: StepSummary, steps: int) -> str:
    """The lines of one step."""
    lines = [
        f"[Step {summary['step']}/{steps}] {summary['seconds']:.2f} s | scored {summary['scored']:.0%} | mean reward "
        f"{figure(summary['mean_reward'])} | {_counts(summary['outcomes'])}",
        summary["judge"],
    ]
    for each in summary["completions"]:  # as repr, which holds no control characters for the terminal
        lines.append(f"  {each['variant']} | {each['outcome']} {figure(each['value'])} | {each['text']!r}")
    return "\n".join(lines)


def report_text(summary: Summary, steps: int, wanted: float) -> str:
    """The text at the end.

    Args:
        steps (`int`):
            Steps that were simulated.
        wanted (`float`):
            `min_valid_reward_fraction`.
    """
    variants, services, judges = summary["variants"], summary["services"], summary["judges"]
    per_variant = [
        [name, each["count"], figure(each["mean_reward"]), _counts(each["outcomes"])]
        for name, each in variants.items()
    ]
    per_service = [[name, *each.values()] for name, each in services.items()]
    per_judge = [[name, *(f"{value:.4f}" if what == "usd" else value for what, value in each.items())]
                 for name, each in judges.items()]  # fmt: skip
    waits = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in summary["waited_for"].items())
    lines = (
        *_table(["variant", "count", "mean reward", "outcomes"], per_variant),
        *_table(["service", *TRAFFIC, "slots"], per_service),
        *_table(["judge", *USAGE], per_judge),
        f"calls saved by the cache: {_counts(summary['calls_saved'])}",
        f"seconds per step: p50 {summary['seconds']['p50']:.2f}, max {summary['seconds']['max']:.2f}",
        f"the slowest completions of all steps waited for: {waits}",
        *(f"FINDING {text}" for text in summary["findings"]),
        *(f"HINT {text}" for text in summary["hints"]),
        _verdict(summary, steps, wanted),
    )
    return "\n".join(lines)


def _verdict(summary: Summary, steps: int, wanted: float) -> str:
    skipped = summary["skipped_steps"]
    least = f"the worst had {summary['least_scored']:.0%} of its completions scored, {wanted:.0%} are needed"
    if not skipped:
        return f"VERDICT good: training would skip no step ({least})."
    which = ", ".join(map(str, skipped))
    return f"VERDICT bad: training would skip {len(skipped)} of {steps} steps: {which} ({least})."


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return ["", *(line.rstrip() for line in padded)]
