"""An evaluation as text: a table of the policies, a table of their difference, and what both mean.

`evaluation.jinja` has the words. Computes no figures. Called by `launch.evaluate.__main__`.
"""

from pathlib import Path

from salesrl_trl.ground.row_statistics import FEW_ROWS, Mean
from salesrl_trl.ground.texts import NOT_KNOWN, filled, number
from salesrl_trl.launch.evaluate.findings import ALL, LABELS, EvaluationFindings

FEW = "*"
_OF_POLICIES = ("policy", "answers", "branch", "reward", "95 % interval", "rows scored", "valid", "unscored", "tokens",
                "truncated")  # fmt: skip
_OF_CHANGES = ("B - A", "branch", "change", "95 % interval", "p", "better", "worse", "equal", "rows scored for both")


def text_of(findings: EvaluationFindings) -> str:
    """The whole text, with a line of what was scored too little to be judged."""
    answered = [
        (
            *((of.label, of.mode) if name == ALL else ("", "")), name, number(group.reward.value, "z.3f"),
            _interval(group.reward), f"{group.reward.rows} of {group.reward.total}", f"{group.valid:.1%}",
            f"{group.unscored:.1%}", f"{group.tokens:.1f}", f"{group.truncated:.1%}",
        )
        for of in findings.answered
        for name, group in of.groups.items()
    ]  # fmt: skip
    changes = [
        (
            mode if name == ALL else "", name, number(change.value, "+z.3f"), _interval(change, "+"),
            "<0.001" if change.p is not None and change.p < 0.001 else number(change.p),
            str(change.better), str(change.worse), str(change.equal), f"{change.rows} of {change.total}",
        )
        for mode, by_branch in findings.differences.items()
        for name, change in by_branch.items()
    ]  # fmt: skip
    means: list[Mean] = [group.reward for of in findings.answered for group in of.groups.values()]
    means += [change for by_branch in findings.differences.values() for change in by_branch.values()]
    groups = findings.answered[0].groups
    return filled(
        Path(__file__).with_name("evaluation.jinja"), findings=findings,
        policies=[*zip(LABELS, findings.policies, strict=False)],
        branches=", ".join(f"{name} {group.reward.total}" for name, group in groups.items() if name != ALL),
        answered=[_OF_POLICIES, *answered], changes=[_OF_CHANGES, *changes],
        is_few=any(mean.is_few and mean.interval is not None for mean in means), few=FEW, few_rows=FEW_ROWS,
    )  # fmt: skip


def _interval(mean: Mean, sign: str = "") -> str:
    if mean.interval is None:
        return NOT_KNOWN
    low, high = (number(end, f"{sign}z.3f") for end in mean.interval)
    return f"{low} to {high}{FEW if mean.is_few else ''}"
