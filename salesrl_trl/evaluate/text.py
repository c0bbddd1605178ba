"""An evaluation as text: a table of the policies, a table of their difference, and what both mean.

Owns tables, lines and wording. Refuses to compute figures.
"""

from collections.abc import Sequence

from salesrl_trl.evaluate.findings import ALL, LABELS, EvaluationFindings, GroupOfRows
from salesrl_trl.evaluation.row_statistics import FEW_ROWS, Difference, Mean

UNKNOWN = "n/a"
FEW = "*"


def text_of(findings: EvaluationFindings) -> str:
    """The whole text, with a line of what was scored too little to be judged."""
    lines = [f"{label}  {name}" for label, name in zip(LABELS, findings.policies, strict=False)]
    lines += [_rows(findings), "", *_policies(findings)]
    if findings.differences:
        lines += ["", *_differences(findings)]
    lines += ["", *_notes(findings)]
    return "\n".join(lines)


def _rows(findings: EvaluationFindings) -> str:
    branches = ", ".join(
        f"{name} {group.reward.total}" for name, group in findings.answered[0].groups.items() if name != ALL
    )
    plural = "" if findings.samples == 1 else "s"
    sampled = f"; {findings.samples} sampled answer{plural} to a row, seed {findings.seed}" if findings.samples else ""
    return f"{len(findings.rows)} held-out rows ({branches}){sampled}"


def _policies(findings: EvaluationFindings) -> list[str]:
    head = ["policy", "answers", "branch", "reward", "95 % interval", "rows scored", "valid", "unscored", "tokens",
            "truncated"]  # fmt: skip
    table = [
        [each.label if name == ALL else "", each.mode if name == ALL else "", name, *_figures(group)]
        for each in findings.answered
        for name, group in each.groups.items()
    ]
    return _table(head, table, left=3)


def _figures(group: GroupOfRows) -> list[str]:
    shares = (group.valid, group.unscored, group.truncated)
    valid, unscored, truncated = (f"{share:.1%}" for share in shares)
    reward = group.reward
    return [
        _number(reward.value), _interval(reward), f"{reward.rows} of {reward.total}", valid, unscored,
        f"{group.tokens:.1f}", truncated,
    ]  # fmt: skip


def _differences(findings: EvaluationFindings) -> list[str]:
    head = ["B - A", "branch", "change", "95 % interval", "p", "better", "worse", "equal", "rows scored for both"]
    table = [
        [
            mode if name == ALL else "", name, _number(found.value, "+"), _interval(found, "+"), _p(found),
            str(found.better), str(found.worse), str(found.equal), f"{found.rows} of {found.total}",
        ]
        for mode, by_branch in findings.differences.items()
        for name, found in by_branch.items()
    ]  # fmt: skip
    return [
        *_table(head, table, left=2),
        "",
        *(f"{mode}: {_verdict(by_branch[ALL], findings.least)}" for mode, by_branch in findings.differences.items()),
    ]


def _verdict(found: Difference, least: float) -> str:
    """Whether there is a difference, in a sentence."""
    if found.value is None or found.lacks(least):
        return "too few rows were scored for both, so that nothing is known about the difference."
    if found.interval is None:
        every = "all rows that were scored for both have equal rewards" if not found.better + found.worse else (
            "without two rows of different changes there is no interval"
        )  # fmt: skip
        return f"no difference is shown: {every}."
    if not found.is_shown:
        return "no difference is shown: the interval includes 0."
    return (
        f"B is {'better' if found.value > 0 else 'worse'} than A by {abs(found.value):.3f}: the interval excludes 0."
    )


def _notes(findings: EvaluationFindings) -> list[str]:
    means: list[Mean] = [group.reward for each in findings.answered for group in each.groups.values()]
    means += [found for by_branch in findings.differences.values() for found in by_branch.values()]
    lines = [
        "Intervals and p: Student's t over rows. A row counts once, with the mean reward of its answers.",
        "A row of which fewer than half of the answers could be scored is left out, on both sides of a comparison.",
    ]
    if any(mean.is_few and mean.interval is not None for mean in means):
        lines.append(f"{FEW} fewer than {FEW_ROWS} rows: too few to rely on.")
    for each in findings.answered:
        if each.missing:
            reasons = ", ".join(f"{reason} {count}" for reason, count in each.missing.items())
            lines.append(f"{each.label} {each.mode}: answers that could not be scored: {reasons}")
    if findings.lacking:
        share = f"`min_valid_reward_fraction`: {findings.least:.0%}"
        lines += ["", f"TOO FEW SCORED, expected {share} of the rows:", *(f"  {each}" for each in findings.lacking)]
    return lines


def _number(value: float | None, sign: str = "") -> str:
    return UNKNOWN if value is None else f"{value:{sign}z.3f}"


def _interval(mean: Mean, sign: str = "") -> str:
    if mean.interval is None:
        return UNKNOWN
    low, high = (_number(each, sign) for each in mean.interval)
    return f"{low} to {high}{FEW if mean.is_few else ''}"


def _p(found: Difference) -> str:
    if found.p is None:
        return UNKNOWN
    return "<0.001" if found.p < 0.001 else f"{found.p:.3f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Columns of equal width. The first `left` ones begin at the same place, the others end there."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
