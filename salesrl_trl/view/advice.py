"""Advice of the report: sentences about figures that are out of their usual range.

Owns the thresholds and the sentences. Pure: called by `report_page`.
"""

import itertools
from collections.abc import Iterator, Mapping

from salesrl_trl import names
from salesrl_trl.view import run_figures as figures
from salesrl_trl.view.run_figures import OTHERS, POLICY, SERVICES, failures_of, mean, share_of_steps
from salesrl_trl.view.run_folder import Run
from salesrl_trl.view.wording import percent, plural, seconds, shown

MOST_ADVICE = 5  # most sentences of advice. Nobody reads a longer list.
EXPOSED_SHARE = 0.3
"""Share of a step that waits for rewards. Above it, the wait costs more than any usual phase but generation."""
UNACCOUNTED_SHARE = 0.02  # share of a step outside of all phases. The trainer's own code between phases takes less.
IN_BAND_SHARE = 0.5
"""Share of steps with the KL in its band. Below it, the controller does not reach the band, or there is none."""
FAILED_SHARE = 0.05
"""Share of failed completions. Below it, failures are chance. Above it, they usually have one cause."""
DATA_LOADING_SHARE = 0.05
"""Share of a step that loads data. Prompts are short texts, so that loading should take almost no time."""


def advice(run: Run) -> tuple[str, ...]:
    """Sentences of advice, the most costly problem first; empty if all figures are in their usual range."""
    return tuple(itertools.islice(_sentences(run), MOST_ADVICE))


def _sentences(run: Run) -> Iterator[str]:
    if skipped := figures.skipped_updates(run):
        yield (
            f"{plural(skipped, 'update')} {'was' if skipped == 1 else 'were'} skipped because too few completions "
            "could be scored: look at the failures below, and at the service behind the most frequent one."
        )
    unscored = []
    for source, cause, place in (
        (SERVICES, " because a service failed", "that service (docs/SERVICES.md)"),
        (OTHERS, "", "that reason code (docs/REWARDS.md, docs/SERVICES.md), or at your own reward"),
    ):
        reasons, share = failures_of(run, source)
        if reasons and (share is None or share > FAILED_SHARE):
            what = "Completions" if share is None else f"{percent(share)} of the completions"
            unscored.append(
                f"{what} could not be scored{cause}{_mostly(reasons)}. That is no fault of the policy: look at "
                f"{place}."
            )
    if unscored:
        yield " ".join(unscored)
    # The phase is per step. The exposed makespan is per generation batch, which is usually the same.
    waited = share_of_steps(run, names.time_of(names.Phase.REWARD_WAIT))
    share = share_of_steps(run, names.REWARD_EXPOSED) if waited is None else waited
    if share is not None and share > EXPOSED_SHARE:
        timed = (stage for stage in figures.stages(run) if stage.p95)
        slow = max(timed, key=lambda stage: stage.p95 or 0.0, default=None)
        cause = f" The slowest stage is {slow.name} (p95 {seconds(slow.p95)}): look there first." if slow else ""
        yield f"Training waits for rewards during {percent(share)} of the step.{cause}"
    shares = {branch: share for branch in run.branches if (share := figures.share_in_band(run, branch)) is not None}
    far = [f"{shown(branch)} (in band {percent(share)})" for branch, share in shares.items() if share < IN_BAND_SHARE]
    if far:
        more = f" and {len(far) - 3} more" if len(far) > 3 else ""
        yield (
            f"The KL lay outside its band for most of the run: {', '.join(far[:3])}{more}. Look whether beta stands "
            "at a bound, and whether the band can be reached at this learning rate (docs/KL.md)."
        )
    reasons, share = failures_of(run, POLICY)
    if share is not None and share > FAILED_SHARE:
        yield (
            f"{percent(share)} of the completions were no valid action{_mostly(reasons)}. That is the policy's doing: "
            "look at its prompt (docs/DATA.md), and whether `max_completion_length` cuts actions short."
        )
    ratio = mean(run.of(names.DATA_LOADING_RATIO).values())
    share = share_of_steps(run, names.time_of(names.Phase.DATA_LOADING)) if ratio is None else ratio
    if share is not None and share > DATA_LOADING_SHARE:
        yield f"Data loading takes {percent(share)} of the step: look at dataloader_num_workers and at the disk."
    share = share_of_steps(run, names.time_of(names.Phase.UNACCOUNTED))
    if share is not None and share > UNACCOUNTED_SHARE:
        yield (
            f"{percent(share)} of the step belongs to no phase: look for work outside the phases, such as a callback."
        )


def _mostly(reasons: Mapping[str, float]) -> str:
    if not reasons:
        return ""
    worst, times = next(iter(reasons.items()))
    return f", mostly {shown(worst)} ({percent(times / sum(reasons.values()))} of these)"
