"""The numbers of the report, from a run's records, and advice: sentences about figures out of their usual range.

Owns every mean, share and total, and what advice looks at: `advice.toml` has the thresholds and the sentences. Pure:
called by `report_page`. A figure that the run did not log is `None`.
"""

import itertools
import math
import re
import statistics
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from salesrl_trl import names
from salesrl_trl.ground.row_statistics import mean
from salesrl_trl.judged.parsing import INVALID_REASONS
from salesrl_trl.record.view.run_folder import QuickEval, Run
from salesrl_trl.record.view.wording import percent, plural, seconds, shown
from salesrl_trl.types import Outcome

POLICY, SERVICES, OTHERS = "the policy", "services", "the reward itself"
"""The sources of failures. `OTHERS`: an error in code, a reason code of the user's own reward, or the run itself."""
_SERVICE_REASON = re.compile("(rag_8b|rag_32b|judge|tool)_.+|no_passages|no_reference|deadline")
_CALLS = re.compile(names.tool_figure("(.+)", "calls"))
EDGE_SHARE = 0.1
"""Share of the steps at each end whose mean stands for the start or the end. A single step is mostly noise."""

RISING, FEW = 1.05, 10  # a KL that rises still grows in the second half of a run by more than noise; too few steps


class PhaseTime(NamedTuple):
    """A phase of `names.Phase`, its mean seconds per step, its share of the time of all steps."""

    name: str
    seconds: float
    share: float


class StageTime(NamedTuple):
    """Seconds of a reward stage over a step's completions, `None` if not logged: median, 95th percentile and the
    stage's time in the slowest reward of a step, each a mean over the steps; and the longest of the run."""

    name: str
    p50: float | None
    p95: float | None
    longest: float | None
    slowest: float | None


class Change(NamedTuple):
    """A figure's mean over the first and over the last `over` logged steps, of `of` in all."""

    first: float
    last: float
    over: int
    of: int


def change(series: Mapping[int, float]) -> Change | None:
    """A figure at the start and at the end of the run; `None` if it was never logged."""
    values = list(series.values())
    if not values:
        return None
    over = max(1, int(EDGE_SHARE * len(values)))
    return Change(statistics.fmean(values[:over]), statistics.fmean(values[-over:]), over, len(values))


def share_of_steps(run: Run, tag: str) -> float | None:
    """Seconds of a tag over all steps, as a share of the time of these steps; `None` if one was not logged."""
    part, whole = run.of(tag), run.of(names.STEP_SECONDS)
    total = sum(whole.values())
    if not part or total <= 0:
        return None
    return sum(seconds for step, seconds in part.items() if step in whole) / total


def phases(run: Run) -> tuple[PhaseTime, ...]:
    """The phases that took time, in their order; empty if step times were not logged."""
    step_s = mean(run.of(names.STEP_SECONDS).values()) or 0.0
    shares = [(phase, share_of_steps(run, names.time_of(phase))) for phase in names.Phase]
    return tuple(PhaseTime(phase, share * step_s, share) for phase, share in shares if share)


def stages(run: Run) -> tuple[StageTime, ...]:
    """The reward stages with a logged figure: the package's own, then the user's in alphabetical order."""
    logged = {match[1] for tag in run.series if (match := re.fullmatch(names.slowest_of("(.+)"), tag))}
    times = (
        StageTime(
            name,
            mean(run.of(names.stage_of(name, "p50")).values()),
            mean(run.of(names.stage_of(name, "p95")).values()),
            max(run.of(names.stage_of(name, "max")).values(), default=None),
            mean(run.of(names.slowest_of(name)).values()),
        )
        for name in dict.fromkeys((*names.Stage, *sorted(logged)))
    )
    return tuple(stage for stage in times if any(stage[1:]))  # one that took no time at all was not there


def tools(run: Run) -> Iterator[tuple[str, list[float], float | None]]:
    """The tools of conversations: name; calls in a generation batch, of them failures and errors of the policy, means
    over the steps; mean seconds of a call."""
    for name in sorted(match[1] for tag in run.series if (match := _CALLS.fullmatch(tag))):
        *counts, times = (run.of(names.tool_figure(name, kind)) for kind in names.TOOL_FIGURES)
        total, spent = sum(counts[0].values()), sum(many * times.get(step, 0.0) for step, many in counts[0].items())
        yield name, [mean(series.values()) or 0.0 for series in counts], spent / total if total else None


def share_in_band(run: Run, branch: str) -> float | None:
    """Share of steps with the KL in the branch's band; `None` without a band or a KL."""
    by_step = mean(run.of(names.kl_of(branch, "_in_band")).values())
    of_run = list(run.of(names.kl_of(branch, "_share_in_band")).values())
    return by_step if by_step is not None or not of_run else of_run[-1]


def share_once_reached(run: Run, branch: str) -> float | None:
    """The share of steps in band since the KL first reached the band's lower edge: it begins at 0, and rises. `None`
    while it rises still, and without a band or a KL."""
    edges, kl, inside = band(run, branch), run.of(names.kl_of(branch)), run.of(names.kl_of(branch, "_in_band"))
    if edges is None or not inside:
        return share_in_band(run, branch)
    reached = next((step for step, value in kl.items() if value >= edges[0]), None)
    if reached is not None:
        return mean([value for step, value in inside.items() if step >= reached])
    late = change(dict([*kl.items()][len(kl) // 2 :]))
    return None if late is None or late.of < FEW or late.last >= RISING * late.first else 0.0


def band(run: Run, branch: str) -> tuple[float, float] | None:
    """The branch's band in nats per token, if it has one."""
    low, high = (list(run.of(names.kl_of(branch, kind)).values()) for kind in ("_low", "_high"))
    return (low[-1], high[-1]) if low and high else None


def interval(run: Run) -> int:
    """Steps between two logged ones: `logging_steps`. It is the most common gap, because a resume leaves another."""
    return statistics.mode([later - earlier for earlier, later in itertools.pairwise(run.steps)] or [1])


def failures(run: Run) -> dict[str, float]:
    """Failures of the whole run by reason, most frequent first. A figure counts the failures since the last figure."""
    tags = [tag for tag in run.series if tag.startswith(names.FAILURE_REASONS)]
    totals = {tag.removeprefix(names.FAILURE_REASONS): sum(run.of(tag).values()) for tag in tags}
    counted = [(reason, times) for reason, times in totals.items() if times > 0]
    return dict(sorted(counted, key=lambda item: (-item[1], item[0])))


def failed_share(run: Run) -> float | None:
    """Share of completions with another outcome than `OK`; `None` if outcomes were not logged."""
    ok = mean(run.of(names.outcome_of(Outcome.OK)).values())
    return None if ok is None else 1 - ok


def source_of(reason: str) -> str:
    """The source of a failure: `POLICY`, with a completion that is no valid action, `SERVICES`, or `OTHERS`."""
    if reason in INVALID_REASONS:
        return POLICY
    return SERVICES if _SERVICE_REASON.fullmatch(reason) else OTHERS


def failures_of(run: Run, source: str) -> tuple[dict[str, float], float | None]:
    """The failures of one source by reason, and their share of all completions; `None` if outcomes were not logged.
    Services and others have the same outcomes, so their reasons divide the share."""
    of_policy = source == POLICY
    outcomes = (Outcome.INVALID_ACTION,) if of_policy else (Outcome.JUDGE_INVALID, Outcome.INFRA)
    means = [mean(run.of(names.outcome_of(outcome)).values()) for outcome in outcomes]
    shares = [share for share in means if share is not None]
    alike = {reason: times for reason, times in failures(run).items() if (source_of(reason) == POLICY) == of_policy}
    own = {reason: times for reason, times in alike.items() if source_of(reason) == source}
    part = sum(own.values()) / sum(alike.values()) if alike else 1.0
    return own, part * sum(shares) if shares else None


def skipped_updates(run: Run) -> float:
    """Number of skipped updates. The figure is a mean per step, so it is multiplied by the logging interval."""
    return interval(run) * sum(run.of(names.SKIPPED_UPDATE).values())


def shown_evals(run: Run) -> tuple[QuickEval, ...]:
    """The quick evaluations with the same way of sampling as the last one. Only these are compared."""
    return tuple(evaluation for evaluation in run.quick_evals if evaluation.mode == run.quick_evals[-1].mode)


def best_eval(evals: Sequence[QuickEval]) -> QuickEval | None:
    """The last evaluation that is marked as best. If none is marked, the one with the highest reward."""
    marked = [evaluation for evaluation in evals if evaluation.best]
    scored = [evaluation for evaluation in evals if evaluation.reward is not None]
    return marked[-1] if marked else max(scored, key=lambda evaluation: evaluation.reward or 0.0, default=None)


def bins(steps: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """The steps in at most `most` groups of neighbours. All but the last group have the same size."""
    size = max(1, math.ceil(len(steps) / most))
    return [tuple(steps[start : start + size]) for start in range(0, len(steps), size)]


def rate(run: Run, tag: str, *times: str) -> float | None:
    """A rate over the run: the mean of the steps' rates, weighted by time, so that a long step has a large weight.
    `times` are the tags of the seconds that the rate is about; without them it is about the whole step."""
    rates, seconds = run.of(tag), [run.of(time) for time in times or (names.STEP_SECONDS,)]
    weights = {step: sum(series.get(step, 0.0) for series in seconds) for step in rates}
    total = sum(weights.values())
    return sum(rates[step] * weights[step] for step in rates) / total if total else mean(rates.values())


MOST_ADVICE = 5  # most sentences of advice. Nobody reads a longer list.
_ADVICE = tomllib.loads(Path(__file__).with_name("advice.toml").read_text("utf-8"))


def advice(run: Run) -> tuple[str, ...]:
    """Sentences of advice, the most costly problem first; empty if all figures are in their usual range."""
    return tuple(itertools.islice(_sentences(run), MOST_ADVICE))


def _sentence(name: str, share: float | None = None, **words: str) -> list[str]:
    """The sentence of this name, if the share is above its threshold."""
    entry = _ADVICE[name]
    is_due = share is not None and share > entry.get("above", 0.0)
    return [entry["text"].format(share=percent(share), **words)] if is_due else []


def _sentences(run: Run) -> Iterator[str]:
    skipped = skipped_updates(run)
    were = "was" if skipped == 1 else "were"
    yield from _sentence("skipped", skipped, updates=plural(skipped, "update"), were=were)
    unscored = []
    for source, name in ((SERVICES, "services"), (OTHERS, "others")):
        reasons, share = failures_of(run, source)
        if reasons:
            what = "Completions" if share is None else f"{percent(share)} of the completions"
            unscored += _sentence(name, 1.0 if share is None else share, what=what, mostly=_mostly(reasons))
    yield from [" ".join(unscored)] * bool(unscored)
    # The phase is per step. The exposed makespan is per generation batch, which is usually the same.
    waited = share_of_steps(run, names.time_of(names.Phase.REWARD_WAIT))
    waited = share_of_steps(run, names.REWARD_EXPOSED) if waited is None else waited
    timed = (stage for stage in stages(run) if stage.p95)
    slow = max(timed, key=lambda stage: stage.p95 or 0.0, default=None)
    cause = f" The slowest stage is {slow.name} (p95 {seconds(slow.p95)}): look there first." if slow else ""
    yield from _sentence("exposed", waited, cause=cause)
    shares = ((branch, share_once_reached(run, branch)) for branch in run.branches)
    least = 1 - _ADVICE["out_of_band"]["above"]
    far = {branch: share for branch, share in shares if share is not None and share < least}
    said = [f"{shown(branch)} (in band {percent(share)})" for branch, share in far.items()]
    more = f" and {len(said) - 3} more" if len(said) > 3 else ""
    yield from _sentence("out_of_band", float(bool(far)), branches=f"{', '.join(said[:3])}{more}")
    reasons, share = failures_of(run, POLICY)
    yield from _sentence("invalid", share, mostly=_mostly(reasons))
    ratio = mean(run.of(names.DATA_LOADING_RATIO).values())
    loading = share_of_steps(run, names.time_of(names.Phase.DATA_LOADING)) if ratio is None else ratio
    yield from _sentence("loading", loading)
    yield from _sentence("unaccounted", share_of_steps(run, names.time_of(names.Phase.UNACCOUNTED)))


def _mostly(reasons: Mapping[str, float]) -> str:
    if not reasons:
        return ""
    worst, times = next(iter(reasons.items()))
    return f", mostly {shown(worst)} ({percent(times / sum(reasons.values()))} of these)"
