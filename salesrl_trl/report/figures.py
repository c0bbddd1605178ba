"""The numbers of the report, from a run's records.

Owns every mean, share and total. Pure. A figure that the run did not log is `None`.
"""

import itertools
import math
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from salesrl_trl.evaluation.pareto import pareto_front
from salesrl_trl.names import (
    FAILURE_REASONS,
    SKIPPED_UPDATE,
    STEP_SECONDS,
    Phase,
    Stage,
    kl_of,
    outcome_of,
    slowest_of,
    stage_of,
    time_of,
)
from salesrl_trl.report.records import QuickEval, Run
from salesrl_trl.reward.parsing import INVALID_REASONS
from salesrl_trl.types import Outcome

POLICY, SERVICES, OTHERS = "the policy", "services", "others"
"""The sources of failures. `OTHERS`: the run itself, an error in code, or a reason code of the user's own reward."""
_SERVICE_REASON = re.compile("(rag_8b|rag_32b|judge)_.+|no_passages|no_reference|deadline")
EDGE_SHARE = 0.1
"""Share of the steps at each end whose mean stands for the start or the end. A single step is mostly noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTime:
    """A phase's share of the steps: `PhaseTime(name="generation", seconds=1.2, share=0.4)`."""

    name: str
    """One of `names.Phase`."""
    seconds: float
    """Mean per step, in seconds."""
    share: float
    """Share of the time of all steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTime:
    """Seconds of a reward stage over a step's completions; `None` if not logged."""

    name: str
    """One of `names.Stage`."""
    p50: float | None
    """Median, mean over the steps."""
    p95: float | None
    """95th percentile, mean over the steps."""
    most: float | None
    """Longest of the run."""
    slowest: float | None
    """In the slowest reward of a step, mean over the steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A figure's mean over the first and over the last steps."""

    first: float
    """Mean over the first `over` logged steps."""
    last: float
    """Mean over the last `over` logged steps."""
    over: int
    """Logged steps in each of the two means."""
    of: int
    """Logged steps in all."""


def mean(values: Collection[float]) -> float | None:
    """The mean; `None` without values."""
    return statistics.fmean(values) if values else None


def change(series: Mapping[int, float]) -> Change | None:
    """A figure at the start and at the end of the run; `None` if it was never logged."""
    values = list(series.values())
    if not values:
        return None
    over = max(1, int(EDGE_SHARE * len(values)))
    return Change(
        first=statistics.fmean(values[:over]), last=statistics.fmean(values[-over:]), over=over, of=len(values)
    )


def share_of_steps(run: Run, tag: str) -> float | None:
    """Seconds of a tag over all steps, as a share of the time of these steps; `None` if one was not logged."""
    part, whole = run.of(tag), run.of(STEP_SECONDS)
    total = sum(whole.values())
    if not part or total <= 0:
        return None
    return sum(seconds for step, seconds in part.items() if step in whole) / total


def phases(run: Run) -> tuple[PhaseTime, ...]:
    """The phases that took time, in their order; empty if step times were not logged."""
    found = []
    for name in Phase:
        share = share_of_steps(run, time_of(name))
        if share:
            step_s = statistics.fmean(run.of(STEP_SECONDS).values())
            found.append(PhaseTime(name=name, seconds=share * step_s, share=share))
    return tuple(found)


def stages(run: Run) -> tuple[StageTime, ...]:
    """The reward stages with a logged figure: the package's own, then the user's in alphabetical order."""
    logged = {match[1] for tag in run.series if (match := re.fullmatch(slowest_of("(.+)"), tag))}
    found = (
        StageTime(
            name=name,
            p50=mean(run.of(stage_of(name, "p50")).values()),
            p95=mean(run.of(stage_of(name, "p95")).values()),
            most=max(run.of(stage_of(name, "max")).values(), default=None),
            slowest=mean(run.of(slowest_of(name)).values()),
        )
        for name in dict.fromkeys((*Stage, *sorted(logged)))
    )
    return tuple(each for each in found if (each.p50, each.p95, each.most, each.slowest) != (None,) * 4)


def share_in_band(run: Run, branch: str) -> float | None:
    """Share of steps with the KL in the branch's band; `None` without a band or a KL."""
    each = mean(run.of(kl_of(branch, "_in_band")).values())
    whole = list(run.of(kl_of(branch, "_share_in_band")).values())
    return each if each is not None or not whole else whole[-1]


def band(run: Run, branch: str) -> tuple[float, float] | None:
    """The branch's band in nats per token, if it has one."""
    low, high = (list(run.of(kl_of(branch, kind)).values()) for kind in ("_low", "_high"))
    return (low[-1], high[-1]) if low and high else None


def interval(run: Run) -> int:
    """Steps between two logged ones: `logging_steps`. It is the most common gap, because a resume leaves another
    gap."""
    gaps = [later - earlier for earlier, later in itertools.pairwise(run.steps)]
    return statistics.mode(gaps) if gaps else 1


def failures(run: Run) -> dict[str, float]:
    """Failures of the whole run by reason, most frequent first. A figure counts the failures since the last figure."""
    tags = [tag for tag in run.series if tag.startswith(FAILURE_REASONS)]
    totals = {tag.removeprefix(FAILURE_REASONS): sum(run.of(tag).values()) for tag in tags}
    found = {reason: total for reason, total in totals.items() if total > 0}
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def failed_share(run: Run) -> float | None:
    """Share of completions with another outcome than `OK`; `None` if outcomes were not logged."""
    ok = mean(run.of(outcome_of(Outcome.OK)).values())
    return None if ok is None else 1 - ok


def whose(reason: str) -> str:
    """The source of a failure: `POLICY`, with a completion that is no valid action, `SERVICES`, or `OTHERS`."""
    if reason in INVALID_REASONS:
        return POLICY
    return SERVICES if _SERVICE_REASON.fullmatch(reason) else OTHERS


def failures_of(run: Run, who: str) -> tuple[dict[str, float], float | None]:
    """The failures of the policy, the services or the others by reason, and their share of all completions; `None` if
    outcomes were not logged. Services and others have the same outcomes, so their reasons divide the share."""
    failed = [outcome for outcome in Outcome if outcome is not Outcome.OK]
    outcomes = [outcome for outcome in failed if (outcome is Outcome.INVALID_ACTION) == (who == POLICY)]
    shares = [share for outcome in outcomes if (share := mean(run.of(outcome_of(outcome)).values())) is not None]
    alike = {reason: times for reason, times in failures(run).items() if (whose(reason) == POLICY) == (who == POLICY)}
    found = {reason: times for reason, times in alike.items() if whose(reason) == who}
    part = sum(found.values()) / sum(alike.values()) if alike else 1.0
    return found, part * sum(shares) if shares else None


def skipped_updates(run: Run) -> float:
    """Number of skipped updates. The figure is a mean per step, so it is multiplied by the logging interval."""
    return interval(run) * sum(run.of(SKIPPED_UPDATE).values())


def shown_evals(run: Run) -> tuple[QuickEval, ...]:
    """The quick evaluations with the same way of sampling as the last one. Only these are compared."""
    return tuple(each for each in run.quick_evals if each.mode == run.quick_evals[-1].mode)


def best_eval(evals: Sequence[QuickEval]) -> QuickEval | None:
    """The last evaluation that is marked as best. If none is marked, the one with the highest reward."""
    marked = [each for each in evals if each.best]
    scored = [each for each in evals if each.reward is not None]
    return marked[-1] if marked else max(scored, key=lambda each: each.reward or 0.0, default=None)


def front(evals: Sequence[QuickEval]) -> tuple[int, ...]:
    """Positions of the evaluations on the Pareto front of the branches' scores."""
    return pareto_front([each.scores for each in evals])


def bins(steps: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """The steps in at most `most` groups of neighbours. All but the last group have the same size."""
    size = max(1, math.ceil(len(steps) / most))
    return [tuple(steps[start : start + size]) for start in range(0, len(steps), size)]


def rate(run: Run, tag: str, *times: str) -> float | None:
    """A rate over the run: the mean of the steps' rates, weighted by time. So a long step has a large weight.

    Args:
        run (`Run`):
            The records.
        tag (`str`):
            Tag of the rate.
        times (`str`, *optional*):
            Tags of the seconds that the rate is about. The step's seconds when not given.
    """
    rates, seconds = run.of(tag), [run.of(time) for time in times or (STEP_SECONDS,)]
    weights = {step: sum(each.get(step, 0.0) for each in seconds) for step in rates}
    total = sum(weights.values())
    return sum(rates[step] * weights[step] for step in rates) / total if total else mean(rates.values())
