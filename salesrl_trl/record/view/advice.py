"""Advice of the report: sentences about figures that are out of their usual range.

`advice.toml` has the thresholds and the sentences. Owns what is looked at. Pure: called by `report_page`.
"""

import itertools
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from salesrl_trl import names
from salesrl_trl.ground.row_statistics import mean
from salesrl_trl.record.view import run_figures as figures
from salesrl_trl.record.view.run_figures import OTHERS, POLICY, SERVICES, failures_of, share_of_steps
from salesrl_trl.record.view.run_folder import Run
from salesrl_trl.record.view.wording import percent, plural, seconds, shown

MOST_ADVICE = 5  # most sentences of advice. Nobody reads a longer list.
_ADVICE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def advice(run: Run) -> tuple[str, ...]:
    """Sentences of advice, the most costly problem first; empty if all figures are in their usual range."""
    return tuple(itertools.islice(_sentences(run), MOST_ADVICE))


def _sentence(name: str, share: float | None = None, **words: str) -> list[str]:
    """The sentence of this name, if the share is above its threshold."""
    entry = _ADVICE[name]
    is_due = share is not None and share > entry.get("above", 0.0)
    return [entry["text"].format(share=percent(share), **words)] if is_due else []


def _sentences(run: Run) -> Iterator[str]:
    skipped = figures.skipped_updates(run)
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
    timed = (stage for stage in figures.stages(run) if stage.p95)
    slow = max(timed, key=lambda stage: stage.p95 or 0.0, default=None)
    cause = f" The slowest stage is {slow.name} (p95 {seconds(slow.p95)}): look there first." if slow else ""
    yield from _sentence("exposed", waited, cause=cause)
    shares = ((branch, figures.share_once_reached(run, branch)) for branch in run.branches)
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
