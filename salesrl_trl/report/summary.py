"""The main figures of the report, in words.

Owns their choice and order. Pure. A figure that the run did not log has words in its place.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from salesrl_trl.names import (
    COMPUTE_RATIO,
    GPU_PEAK,
    GPU_RESERVED,
    HOST_MEMORY,
    MFU_MODEL,
    MFU_STEP,
    REWARD,
    SAMPLES_PER_SECOND,
    STEP_SECONDS,
    TOKENS_PER_SECOND,
    Phase,
    beta_of,
    kl_of,
    reference_of,
    reward_of,
    time_of,
)
from salesrl_trl.report.figures import (
    OTHERS,
    POLICY,
    SERVICES,
    band,
    best_eval,
    change,
    failed_share,
    failures,
    failures_of,
    interval,
    mean,
    rate,
    share_in_band,
    shown_evals,
)
from salesrl_trl.report.records import HeldOutRecord, Run
from salesrl_trl.report.words import NOT_KNOWN, count, figure, number, percent, seconds, shown
from salesrl_trl.reward.service.account import Account


def summary(run: Run) -> tuple[tuple[str, str], ...]:
    """The main figures: (name, value in words)."""
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
        *([("Spent", spent(run.account))] if run.account.services else []),
    )


def spent(account: Account) -> str:
    """`1,500 calls, 0.42 USD; max_calls 1,500 of 1,500`. Processes that were killed may have used less than they
    held."""
    total = account.total()
    usd = f", {total.usd:,.2f} USD" if total.usd else ""
    limits = [f"{name} {account.taken[name]:,.6g} of {most:,.6g}" for name, most in account.most.items()]
    return "; ".join([f"{total.calls:,.0f} calls{usd}", *limits])


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
    counts = [words for who in (POLICY, SERVICES, OTHERS) if (words := _failures_of(run, who))]
    return "; ".join(counts) or "were not logged"


def _failures_of(run: Run, who: str) -> str:
    found, share = failures_of(run, who)
    if not found:
        return ""
    of = "" if share is None else f", {percent(share)} of the completions"
    return f"{count(sum(found.values()))} of {who}{of}, most often {shown(next(iter(found)))}"


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


def _held_out(evaluations: Sequence[HeldOutRecord]) -> str:
    if not evaluations:
        return "no held-out evaluation was written"
    rewards = [f"{number(each.figures.get(REWARD))} at step {each.step}" for each in (evaluations[0], evaluations[-1])]
    return f"reward {' → '.join(rewards if len(evaluations) > 1 else rewards[:1])}"
