"""Advice of the report: sentences about figures that are out of their usual range.

Owns the thresholds and the sentences. Pure: called by `report_page`.
"""

from collections.abc import Mapping

from salesrl_trl.names import DATA_LOADING_RATIO, REWARD_EXPOSED, Phase, time_of
from salesrl_trl.view.run_figures import (
    OTHERS,
    POLICY,
    SERVICES,
    failures_of,
    mean,
    share_in_band,
    share_of_steps,
    skipped_updates,
    stages,
)
from salesrl_trl.view.run_folder import Run
from salesrl_trl.view.wording import percent, plural, seconds, shown

MOST_ADVICE = 5
"""Most sentences of advice. Nobody reads a longer list."""
EXPOSED_SHARE = 0.3
"""Share of a step that waits for rewards. Above it, the wait costs more than any usual phase but generation."""
UNACCOUNTED_SHARE = 0.02
"""Share of a step outside of all phases. The trainer's own code between phases takes less."""
IN_BAND_SHARE = 0.5
"""Share of steps with the KL in its band. Below it, the controller does not reach the band, or there is none."""
FAILED_SHARE = 0.05
"""Share of failed completions. Below it, failures are chance. Above it, they usually have one cause."""
DATA_LOADING_SHARE = 0.05
"""Share of a step that loads data. Prompts are short texts, so that loading should take almost no time."""


def advice(run: Run) -> tuple[str, ...]:
    """Sentences of advice, the most costly problem first; empty if all figures are in their usual range."""
    checks = (_skipped, _unscored, _exposed, _outside, _invalid, _loading, _unmeasured)
    return tuple(sentence for check in checks if (sentence := check(run)))[:MOST_ADVICE]


def _skipped(run: Run) -> str:
    skipped = skipped_updates(run)
    if not skipped:
        return ""
    return (
        f"{plural(skipped, 'update')} {'was' if skipped == 1 else 'were'} skipped because too few completions could "
        "be scored: look at the failures below, and at the service behind the most frequent one."
    )


def _exposed(run: Run) -> str:
    # The phase is per step. The exposed makespan is per generation batch, which is usually the same.
    waited = share_of_steps(run, time_of(Phase.REWARD_WAIT))
    share = share_of_steps(run, REWARD_EXPOSED) if waited is None else waited
    if share is None or share <= EXPOSED_SHARE:
        return ""
    slow = max((stage for stage in stages(run) if stage.p95 is not None), key=lambda s: s.p95 or 0.0, default=None)
    cause = "" if slow is None else f" The slowest stage is {slow.name} (p95 {seconds(slow.p95)}): look there first."
    return f"Training waits for rewards during {percent(share)} of the step.{cause}"


def _outside(run: Run) -> str:
    shares = {branch: share for branch in run.branches if (share := share_in_band(run, branch)) is not None}
    far = [f"{shown(branch)} (in band {percent(share)})" for branch, share in shares.items() if share < IN_BAND_SHARE]
    if not far:
        return ""
    more = f" and {len(far) - 3} more" if len(far) > 3 else ""
    return (
        f"The KL lay outside its band for most of the run: {', '.join(far[:3])}{more}. Look whether beta stands at a "
        "bound, and whether the band can be reached at this learning rate (docs/KL.md)."
    )


def _invalid(run: Run) -> str:
    reasons, share = failures_of(run, POLICY)
    if share is None or share <= FAILED_SHARE:
        return ""
    return (
        f"{percent(share)} of the completions were no valid action{_mostly(reasons)}. That is the policy's doing: "
        "look at its prompt (docs/DATA.md), and whether `max_completion_length` cuts actions short."
    )


def _unscored(run: Run) -> str:
    sentences = []
    for source, cause, place in (
        (SERVICES, " because a service failed", "that service (docs/SERVICES.md)"),
        (OTHERS, "", "that reason code (docs/SERVICES.md), or at your own reward"),
    ):
        reasons, share = failures_of(run, source)
        if reasons and (share is None or share > FAILED_SHARE):
            what = "Completions" if share is None else f"{percent(share)} of the completions"
            sentences.append(
                f"{what} could not be scored{cause}{_mostly(reasons)}. That is no fault of the policy: look at "
                f"{place}."
            )
    return " ".join(sentences)


def _mostly(reasons: Mapping[str, float]) -> str:
    if not reasons:
        return ""
    worst, times = next(iter(reasons.items()))
    return f", mostly {shown(worst)} ({percent(times / sum(reasons.values()))} of these)"


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
