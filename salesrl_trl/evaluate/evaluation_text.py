"""An evaluation as text: a table of the policies, a table of their difference, and what both mean.

Computes no figures. Called by `evaluate.__main__`.
"""

from salesrl_trl.evaluate.findings import ALL, LABELS, EvaluationFindings
from salesrl_trl.evaluation.row_statistics import FEW_ROWS, Difference, Mean
from salesrl_trl.ground.tables import aligned

UNKNOWN = "n/a"
FEW = "*"


def text_of(findings: EvaluationFindings) -> str:
    """The whole text, with a line of what was scored too little to be judged."""
    lines = [f"{label}  {name}" for label, name in zip(LABELS, findings.policies, strict=False)]
    groups = findings.answered[0].groups
    branches = ", ".join(f"{name} {group.reward.total}" for name, group in groups.items() if name != ALL)
    plural = "" if findings.samples == 1 else "s"
    sampled = f"; {findings.samples} sampled answer{plural} to a row, seed {findings.seed}" if findings.samples else ""
    lines += [f"{len(findings.rows)} held-out rows ({branches}){sampled}", "", *_policies(findings)]
    if findings.differences:
        lines += ["", *_differences(findings)]
    lines += ["", *_notes(findings)]
    return "\n".join(lines)


def _policies(findings: EvaluationFindings) -> list[str]:
    head = ("policy", "answers", "branch", "reward", "95 % interval", "rows scored", "valid", "unscored", "tokens",
            "truncated")  # fmt: skip
    rows = [
        (
            *((answered.label, answered.mode) if name == ALL else ("", "")),
            name,
            _number(group.reward.value),
            _interval(group.reward),
            f"{group.reward.rows} of {group.reward.total}",
            f"{group.valid:.1%}",
            f"{group.unscored:.1%}",
            f"{group.tokens:.1f}",
            f"{group.truncated:.1%}",
        )
        for answered in findings.answered
        for name, group in answered.groups.items()
    ]
    return aligned([head, *rows], left=3)


def _differences(findings: EvaluationFindings) -> list[str]:
    head = ("B - A", "branch", "change", "95 % interval", "p", "better", "worse", "equal", "rows scored for both")
    rows = [
        (
            mode if name == ALL else "", name, _number(change.value, "+"), _interval(change, "+"),
            "<0.001" if change.p is not None and change.p < 0.001 else _number(change.p),
            str(change.better), str(change.worse), str(change.equal), f"{change.rows} of {change.total}",
        )
        for mode, by_branch in findings.differences.items()
        for name, change in by_branch.items()
    ]  # fmt: skip
    return [
        *aligned([head, *rows], left=2),
        "",
        *(f"{mode}: {_verdict(by_branch[ALL], findings.least)}" for mode, by_branch in findings.differences.items()),
    ]


def _verdict(change: Difference, least: float) -> str:
    if change.value is None or change.lacks(least):
        return "too few rows were scored for both, so that nothing is known about the difference."
    if change.interval is None:
        if change.better + change.worse:
            return "no difference is shown: without two rows of different changes there is no interval."
        return "no difference is shown: all rows that were scored for both have equal rewards."
    if not change.is_shown:
        return "no difference is shown: the interval includes 0."
    order = "better" if change.value > 0 else "worse"
    return f"B is {order} than A by {abs(change.value):.3f}: the interval excludes 0."


def _notes(findings: EvaluationFindings) -> list[str]:
    means: list[Mean] = [group.reward for answered in findings.answered for group in answered.groups.values()]
    means += [change for by_branch in findings.differences.values() for change in by_branch.values()]
    lines = [
        "Intervals and p: Student's t over rows. A row counts once, with the mean reward of its answers.",
        "A row of which fewer than half of the answers could be scored is left out, on both sides of a comparison.",
    ]
    if any(mean.is_few and mean.interval is not None for mean in means):
        lines.append(f"{FEW} fewer than {FEW_ROWS} rows: too few to rely on.")
    for answered in findings.answered:
        if answered.missing:
            reasons = ", ".join(f"{reason} {count}" for reason, count in answered.missing.items())
            lines.append(f"{answered.label} {answered.mode}: answers that could not be scored: {reasons}")
    if findings.lacking:
        share = f"`min_valid_reward_fraction`: {findings.least:.0%}"
        lines += ["", f"TOO FEW SCORED, expected {share} of the rows:", *(f"  {line}" for line in findings.lacking)]
    return lines


def _number(value: float | None, sign: str = "") -> str:
    return UNKNOWN if value is None else f"{value:{sign}z.3f}"


def _interval(mean: Mean, sign: str = "") -> str:
    if mean.interval is None:
        return UNKNOWN
    low, high = (_number(end, sign) for end in mean.interval)
    return f"{low} to {high}{FEW if mean.is_few else ''}"
