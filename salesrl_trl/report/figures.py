"""The numbers of the report and what they suggest, from a run's records.

Pure. Owns every mean, share and total, how they are told in words, and the thresholds of the advice. HTML and text
show the same figures because both take them from here. A figure that cannot be had is `None` here and words there.
"""

import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from salesrl_trl.evaluation.pareto import pareto_front
from salesrl_trl.names import (
    COMPUTE_RATIO,
    DATA_LOADING_RATIO,
    FAILURE_REASONS,
    GPU_PEAK,
    GPU_RESERVED,
    HOST_MEMORY,
    MFU_MODEL,
    MFU_STEP,
    REWARD,
    REWARD_EXPOSED,
    SAMPLES_PER_SECOND,
    SKIPPED_UPDATE,
    STEP_SECONDS,
    TOKENS_PER_SECOND,
    Phase,
    Stage,
    beta_of,
    kl_of,
    outcome_of,
    reference_of,
    reward_of,
    slowest_of,
    stage_of,
    time_of,
)
from salesrl_trl.report.records import HeldOut, QuickEval, Run
from salesrl_trl.reward.parsing import INVALID_REASONS
from salesrl_trl.types import Outcome

NOT_KNOWN = "n/a"
POLICY, SERVICES = "the policy", "services"
"""Whose failures there are."""
EDGE_SHARE = 0.1
"""Part of the steps at either end whose mean stands for the start and the end: one step alone is a throw of dice."""
NAME_CHARS = 40
"""Longest name that is shown. A reason code is a few words; whatever is longer came from elsewhere."""
MOST_ADVICE = 5
"""Sentences of advice at most: a longer list is a list of figures again."""
EXPOSED_SHARE = 0.3
"""Rewards that hold up this much of a step cost more than any other phase but generation usually does."""
UNACCOUNTED_SHARE = 0.02
"""The phases cover a step but for the trainer's own glue; more than 2 % is work that nobody measures."""
IN_BAND_SHARE = 0.5
"""A KL that is outside for most of the run: the controller does not reach the band, or nothing controls it."""
FAILED_SHARE = 0.05
"""One completion in twenty. Below it, failures are weather; above it, there is one cause to find."""
DATA_LOADING_SHARE = 0.05
"""Prompts are short texts: loading them should not be seen at all beside generation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTime:
    """A phase's part of the steps: `PhaseTime(name="generation", seconds=1.2, share=0.4)`."""

    name: str
    """One of `names.Phase`."""
    seconds: float
    """Mean per step, in seconds."""
    share: float
    """Of all steps' time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTime:
    """A stage of the rewards, in seconds over a step's completions; `None` for what was not logged."""

    name: str
    """One of `names.Stage`."""
    p50: float | None
    """Median, mean over the steps."""
    p95: float | None
    """95th percentile, mean over the steps."""
    most: float | None
    """Longest of the run."""
    slowest: float | None
    """In a step's slowest reward, mean over the steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A figure's mean over the first and over the last steps."""

    first: float
    """Mean over the first `over` logged steps."""
    last: float
    """Mean over the last `over` logged steps."""
    over: int
    """Logged steps in each mean."""
    of: int
    """Logged steps in all."""


def mean(values: Collection[float]) -> float | None:
    """The mean; `None` of nothing."""
    return statistics.fmean(values) if values else None


def change(series: Mapping[int, float]) -> Change | None:
    """A figure at the start and at the end of the run; `None` where it was never logged."""
    values = list(series.values())
    if not values:
        return None
    over = max(1, int(EDGE_SHARE * len(values)))
    return Change(
        first=statistics.fmean(values[:over]), last=statistics.fmean(values[-over:]), over=over, of=len(values)
    )


def share_of_steps(run: Run, tag: str) -> float | None:
    """Seconds of a tag over all steps as a share of these steps' time; `None` if either was not logged."""
    part, whole = run.of(tag), run.of(STEP_SECONDS)
    total = sum(whole.values())
    if not part or total <= 0:
        return None
    return sum(seconds for step, seconds in part.items() if step in whole) / total


def phases(run: Run) -> tuple[PhaseTime, ...]:
    """The phases that took any time, in their order; empty where step times were not logged."""
    found = []
    for name in Phase:
        share = share_of_steps(run, time_of(name))
        if share:
            step_s = statistics.fmean(run.of(STEP_SECONDS).values())
            found.append(PhaseTime(name=name, seconds=share * step_s, share=share))
    return tuple(found)


def stages(run: Run) -> tuple[StageTime, ...]:
    """The reward stages of which anything was logged."""
    found = (
        StageTime(
            name=name,
            p50=mean(run.of(stage_of(name, "p50")).values()),
            p95=mean(run.of(stage_of(name, "p95")).values()),
            most=max(run.of(stage_of(name, "max")).values(), default=None),
            slowest=mean(run.of(slowest_of(name)).values()),
        )
        for name in Stage
    )
    return tuple(each for each in found if (each.p50, each.p95, each.most, each.slowest) != (None,) * 4)


def share_in_band(run: Run, branch: str) -> float | None:
    """Share of steps whose KL lay in the branch's band; `None` without a band or a KL."""
    each = mean(run.of(kl_of(branch, "_in_band")).values())
    whole = list(run.of(kl_of(branch, "_share_in_band")).values())
    return each if each is not None or not whole else whole[-1]


def band(run: Run, branch: str) -> tuple[float, float] | None:
    """The branch's band in nats per token, if it has one."""
    low, high = (list(run.of(kl_of(branch, kind)).values()) for kind in ("_low", "_high"))
    return (low[-1], high[-1]) if low and high else None


def interval(run: Run) -> int:
    """Steps between two logged ones: `logging_steps`. The most common gap, as a resume leaves another."""
    gaps = [later - earlier for earlier, later in itertools.pairwise(run.steps)]
    return statistics.mode(gaps) if gaps else 1


def failures(run: Run) -> dict[str, float]:
    """Failures of the whole run by reason, most frequent first. Each figure counts those since the one before."""
    tags = [tag for tag in run.series if tag.startswith(FAILURE_REASONS)]
    totals = {tag.removeprefix(FAILURE_REASONS): sum(run.of(tag).values()) for tag in tags}
    found = {reason: total for reason, total in totals.items() if total > 0}
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def failed_share(run: Run) -> float | None:
    """Share of completions that did not end well; `None` where outcomes were not logged."""
    ok = mean(run.of(outcome_of(Outcome.OK)).values())
    return None if ok is None else 1 - ok


def whose(reason: str) -> str:
    """Who failed: `POLICY`, by a completion that is no valid action, or `SERVICES`."""
    return POLICY if reason in INVALID_REASONS else SERVICES


def failures_of(run: Run, who: str) -> tuple[dict[str, float], float | None]:
    """The failures of the policy or of the services by reason, and the share of completions that ended so; `None`
    where outcomes were not logged."""
    failed = [outcome for outcome in Outcome if outcome is not Outcome.OK]
    outcomes = [outcome for outcome in failed if (outcome is Outcome.INVALID_ACTION) == (who == POLICY)]
    shares = [share for outcome in outcomes if (share := mean(run.of(outcome_of(outcome)).values())) is not None]
    found = {reason: times for reason, times in failures(run).items() if whose(reason) == who}
    return found, sum(shares) if shares else None


def skipped_updates(run: Run) -> float:
    """Updates that were left out because too little was scored: a mean per step, so times the logging interval."""
    return interval(run) * sum(run.of(SKIPPED_UPDATE).values())


def shown_evals(run: Run) -> tuple[QuickEval, ...]:
    """The quick evaluations that are compared with each other: those made in the way of the last one."""
    return tuple(each for each in run.quick_evals if each.mode == run.quick_evals[-1].mode)


def best_eval(evals: Sequence[QuickEval]) -> QuickEval | None:
    """The last that was marked best; where none is marked, the highest reward."""
    marked = [each for each in evals if each.best]
    scored = [each for each in evals if each.reward is not None]
    return marked[-1] if marked else max(scored, key=lambda each: each.reward or 0.0, default=None)


def front(evals: Sequence[QuickEval]) -> tuple[int, ...]:
    """Positions of the evaluations that no other beats in every branch."""
    return pareto_front([each.scores for each in evals])


def bins(steps: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """The steps in at most `most` groups of neighbours, all but the last of equal size."""
    size = max(1, math.ceil(len(steps) / most))
    return [tuple(steps[start : start + size]) for start in range(0, len(steps), size)]


def shown(name: str) -> str:
    """A name from a file as it may be shown: printable, on one line, not too long. HTML is escaped elsewhere."""
    text = "".join(char if char.isprintable() else "?" for char in name)
    return text if len(text) <= NAME_CHARS else f"{text[: NAME_CHARS - 1]}…"


def number(value: float | None, digits: int = 3) -> str:
    """`0.412`; `n/a` for nothing."""
    return NOT_KNOWN if value is None else f"{value:.{digits}f}"


def figure(value: float | None) -> str:
    """Three significant digits, `0.0512`; `n/a` for nothing."""
    return NOT_KNOWN if value is None else f"{value:.3g}"


def percent(value: float | None) -> str:
    """`62 %`, and `0.4 %` where whole per cents say too little."""
    if value is None:
        return NOT_KNOWN
    return f"{100 * value:.1f} %" if 0 < value < 0.0995 else f"{100 * value:.0f} %"


def seconds(value: float | None) -> str:
    """`80.5 ms`, `0.25 s`, `12.3 s`, `4 min 5 s`, `2 h 10 min`."""
    if value is None:
        return NOT_KNOWN
    if value < 0.1:
        return f"{1000 * value:.3g} ms" if value else "0 s"
    if value < 9.995:
        return f"{value:.2f} s"
    if value < 99.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(value / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def count(value: float) -> str:
    """`1,204`; with a digit behind the point where it is no whole number, as a mean over ranks may be."""
    return f"{value:,.0f}" if abs(value - round(value)) < 0.05 else f"{value:,.1f}"


def plural(many: float, one: str) -> str:
    """`1 step`, `120 steps`."""
    return f"{count(many)} {one}{'' if many == 1 else 's'}"


def summary(run: Run) -> tuple[tuple[str, str], ...]:
    """The main figures, as (what, how much) in words."""
    return (
        ("Steps done", _steps_done(run)),
        ("Wall time", _wall_time(run)),
        ("Mean step", _step_time(run)),
        ("Reward", _changed(run, REWARD)),
        *_branch_rows(run),
        ("Failures", _failure_total(run)),
        ("MFU", _mfu(run)),
        ("Accelerator at work", _compute(run)),
        ("Throughput", _throughput(run)),
        ("Memory", _memory(run)),
        ("Best quick evaluation", _best(run)),
        ("Held-out rows", _held_out(run.held_out)),
    )


def _steps_done(run: Run) -> str:
    if not run.steps:
        return "none was logged"
    every = interval(run)
    logged = "" if len(run.steps) == run.steps[-1] else f" ({len(run.steps)} logged, every {every})"
    return f"{run.steps[-1]:,}{logged}"


def _wall_time(run: Run) -> str:
    if run.seconds is None:
        return NOT_KNOWN
    first, last = run.seconds
    began = datetime.fromtimestamp(first, UTC).strftime("%Y-%m-%d %H:%M UTC")
    pauses = f"; {run.starts} starts, with the time between them" if run.starts > 1 else ""
    return f"{seconds(last - first)} from first to last event, from {began}{pauses}"


def _step_time(run: Run) -> str:
    times = run.of(STEP_SECONDS).values()
    if not times:
        return "step times were not logged"
    return f"{seconds(mean(times))} (shortest {seconds(min(times))}, longest {seconds(max(times))})"


def _changed(run: Run, tag: str) -> str:
    found = change(run.of(tag))
    if found is None:
        return "was not logged"
    if found.of == 1:
        return f"{number(found.first)} (one step)"
    each = "step" if found.over == 1 else f"{found.over} steps"
    return f"{number(found.first)} → {number(found.last)} (means of the first and the last {each})"


def _branch_rows(run: Run) -> Iterable[tuple[str, str]]:
    for branch in run.branches:
        yield f"Reward, {shown(branch)}", _branch_reward(run, branch)
    for branch in run.branches:
        yield f"KL in band, {shown(branch)}", _branch_kl(run, branch)


def _branch_reward(run: Run, branch: str) -> str:
    found, reference = change(run.of(reward_of(branch))), mean(run.of(reference_of(branch)).values())
    if found is None:
        return "was not logged"
    beside = "" if reference is None else f"; reference {number(reference)}"
    return f"{number(found.first)} → {number(found.last)}{beside}" if found.of > 1 else number(found.first) + beside


def _branch_kl(run: Run, branch: str) -> str:
    edges, share = band(run, branch), share_in_band(run, branch)
    betas = change(run.of(beta_of(branch)))
    beta = "" if betas is None else f"; beta {figure(betas.first)} → {figure(betas.last)}"
    if not run.of(kl_of(branch)):
        return f"no KL was logged{beta}"
    if share is None:
        return f"has no band; KL {figure(mean(run.of(kl_of(branch)).values()))} nats per token{beta}"
    where = "" if edges is None else f" in {edges[0]:g} to {edges[1]:g} nats per token"
    return f"{percent(share)} of the steps{where}{beta}"


def _failure_total(run: Run) -> str:
    if not failures(run) and (share := failed_share(run)) is not None:
        return "none" if share <= 0 else f"{percent(share)} of the completions; not counted by reason"
    told = [words for who in (POLICY, SERVICES) if (words := _failures_of(run, who))]
    return "; ".join(told) or "were not logged"


def _failures_of(run: Run, who: str) -> str:
    found, share = failures_of(run, who)
    if not found:
        return ""
    of = "" if share is None else f", {percent(share)} of the completions"
    return f"{count(sum(found.values()))} of {who}{of}, most often {shown(next(iter(found)))}"


def rate(run: Run, tag: str, *times: str) -> float | None:
    """A rate over the run: the mean of the steps' rates, each by the seconds it is about (the step's, if no `times`
    are named). A long step with an evaluation counts by its length, as it does in the run's own time."""
    rates, seconds = run.of(tag), [run.of(time) for time in times or (STEP_SECONDS,)]
    weights = {step: sum(each.get(step, 0.0) for each in seconds) for step in rates}
    total = sum(weights.values())
    return sum(rates[step] * weights[step] for step in rates) / total if total else mean(rates.values())


def _mfu(run: Run) -> str:
    model = rate(run, MFU_MODEL, time_of(Phase.FORWARD), time_of(Phase.BACKWARD))
    step = rate(run, MFU_STEP)
    if model is None and step is None:
        return f"{NOT_KNOWN} (the chip's peak is not known, or it was not logged)"
    return f"{percent(model)} while the model computes, {percent(step)} of the whole step"


def _compute(run: Run) -> str:
    share = rate(run, COMPUTE_RATIO)
    return "was not logged" if share is None else f"{percent(share)} of the step"


def _throughput(run: Run) -> str:
    tokens, samples = (rate(run, tag) for tag in (TOKENS_PER_SECOND, SAMPLES_PER_SECOND))
    if tokens is None and samples is None:
        return "was not logged"
    words = [f"{value:,.3g} {what}/s" if value < 1000 else f"{value:,.0f} {what}/s"
             for value, what in ((tokens, "tokens"), (samples, "samples")) if value is not None]  # fmt: skip
    return ", ".join(words)


def _memory(run: Run) -> str:
    kinds = (("GPU peak", GPU_PEAK), ("GPU reserved", GPU_RESERVED), ("host", HOST_MEMORY))
    words = [f"{what} {max(values):.1f} GiB" for what, tag in kinds if (values := run.of(tag).values())]
    return ", ".join(words) or "was not logged"


def _best(run: Run) -> str:
    best = best_eval(shown_evals(run))
    if best is None:
        return "no quick evaluation was made" if not run.quick_evals else "none has a reward"
    scores = ", ".join(f"{shown(branch)} {number(score)}" for branch, score in best.scores.items())
    return f"step {best.step}: reward {number(best.reward)}{f' ({scores})' if scores else ''}"


def _held_out(evaluations: Sequence[HeldOut]) -> str:
    if not evaluations:
        return "no held-out evaluation was written"
    told = [f"{number(each.figures.get(REWARD))} at step {each.step}" for each in (evaluations[0], evaluations[-1])]
    return f"reward {' → '.join(told if len(evaluations) > 1 else told[:1])}"


def advice(run: Run) -> tuple[str, ...]:
    """What to look at, the most costly first; empty where nothing stands out."""
    found = (
        _skipped(run), _unscored(run), _exposed(run), _outside(run), _invalid(run), _loading(run), _unmeasured(run)
    )  # fmt: skip
    return tuple(sentence for sentence in found if sentence)[:MOST_ADVICE]


def _skipped(run: Run) -> str:
    skipped = skipped_updates(run)
    if not skipped:
        return ""
    return (
        f"{plural(skipped, 'update')} {'was' if skipped == 1 else 'were'} skipped because too few completions could "
        "be scored: look at the failures below, and at the service behind the most frequent one."
    )


def _exposed(run: Run) -> str:
    # the phase is per step; the exposed part of the makespan is per generation batch, which only mostly is the same
    waited = share_of_steps(run, time_of(Phase.REWARD_WAIT))
    share = share_of_steps(run, REWARD_EXPOSED) if waited is None else waited
    if share is None or share <= EXPOSED_SHARE:
        return ""
    slow = max((each for each in stages(run) if each.p95 is not None), key=lambda each: each.p95 or 0.0, default=None)
    stage = "" if slow is None else f" The slowest stage is {slow.name} (p95 {seconds(slow.p95)}): look there first."
    return f"Training waits for rewards during {percent(share)} of the step.{stage}"


def _outside(run: Run) -> str:
    shares = {branch: share for branch in run.branches if (share := share_in_band(run, branch)) is not None}
    far = {branch: share for branch, share in shares.items() if share < IN_BAND_SHARE}
    if not far:
        return ""
    named = [f"{shown(branch)} (in band {percent(share)})" for branch, share in list(far.items())[:3]]
    more = f" and {len(far) - 3} more" if len(far) > 3 else ""
    return (
        f"The KL lay outside its band for most of the run: {', '.join(named)}{more}. Look whether beta stands at a "
        "bound, and whether the band can be reached at this learning rate (docs/KL.md)."
    )


def _invalid(run: Run) -> str:
    found, share = failures_of(run, POLICY)
    if share is None or share <= FAILED_SHARE:
        return ""
    return (
        f"{percent(share)} of the completions were no valid action{_mostly(found)}. That is the policy's doing: look "
        "at its prompt (docs/DATA.md), and whether `max_completion_length` cuts actions short."
    )


def _unscored(run: Run) -> str:
    found, share = failures_of(run, SERVICES)
    if not found or (share is not None and share <= FAILED_SHARE):
        return ""
    of = "Completions" if share is None else f"{percent(share)} of the completions"
    return (
        f"{of} could not be scored because a service failed{_mostly(found)}. That is no fault of the policy: look at "
        "that service (docs/SERVICES.md)."
    )


def _mostly(found: Mapping[str, float]) -> str:
    if not found:
        return ""
    worst, times = next(iter(found.items()))
    return f", mostly {shown(worst)} ({percent(times / sum(found.values()))} of these)"


def _loading(run: Run) -> str:
    ratio = mean(run.of(DATA_LOADING_RATIO).values())
    share = share_of_steps(run, time_of(Phase.DATA_LOADING)) if ratio is None else ratio
    if share is None or share <= DATA_LOADING_SHARE:
        return ""
    return f"Data loading takes {percent(share)} of the step: look at dataloader_num_workers and at the disk."


def _unmeasured(run: Run) -> str:
    share = share_of_steps(run, time_of(Phase.UNACCOUNTED))
    if share is None or share <= UNACCOUNTED_SHARE:
        return ""
    return f"{percent(share)} of the step belongs to no phase: look for work outside the phases, such as a callback."
