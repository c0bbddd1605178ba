"""Reward metrics: from each rank's completions to a log line's sums, and the tables exchanged between ranks."""

import math
from collections.abc import Sequence

import torch

from salesrl_trl import names
from salesrl_trl.names import BRANCH, Stage
from salesrl_trl.reward.batch import BatchReport
from salesrl_trl.reward.scorer import RewardNames
from salesrl_trl.service.transport import TRAFFIC
from salesrl_trl.telemetry.perf import StepAggregates, percentile
from salesrl_trl.types import REFERENCE, Outcome, Reward, missing

VALUE = names.reward_of(BRANCH)
REFERENCE_REWARD = "reference_reward"
"""Column with the reward of the reference answer, for the hybrid baseline. Not logged as a metric."""
BRANCH_ID = "branch_id"  # column with the index into the branch names


def values_of(reward: Reward, components: Sequence[str] = ()) -> dict[str, float | None]:
    """Each metric's value for one completion, by tag. The metric is the mean over completions whose value is not
    `None`, per branch if the tag contains `{branch}`."""
    part, is_ok = reward.components.get, reward.outcome is Outcome.OK
    return {
        VALUE: reward.value,
        names.reference_of(BRANCH): part(REFERENCE),
        **{names.outcome_of(outcome): float(reward.outcome is outcome) for outcome in Outcome},
        names.REFERENCE_MISSING: float(part(REFERENCE) is None) if is_ok else None,
        names.RIGHT_DOCUMENT: part("right_document"),
        **{names.component_of(name, BRANCH): part(name) for name in components},
    }


FIRST, SECOND = "shown first", "shown second"
"""Scores of candidates shown in that position. Not logged; `names.POSITION_GAP` is the difference of their means."""


class RewardFigures:
    """The metrics of one reward, identical on every rank. `of_reward` holds its names."""

    def __init__(self, branches: Sequence[str], of_reward: RewardNames | None = None) -> None:
        reward = of_reward or RewardNames()
        self.branches = branches
        self._parts = {"meter": reward.meter is not None, "groups": reward.judges_groups}
        self._stages = (*Stage, *reward.stages)
        self._components = [component for component in reward.components if component != REFERENCE]
        self._over_completions = [*values_of(missing(Outcome.INFRA, ""), self._components)]
        columns = (BRANCH_ID, REFERENCE_REWARD, *self._over_completions, *self._stages)
        self._columns = {name: place for place, name in enumerate(columns)}
        self._counts = (
            *(names.usage_of(provider, kind) for provider in reward.providers for kind in names.USAGE),
            *(names.traffic_of(service, kind) for service in reward.services for kind in (*TRAFFIC, "slots")),
            *map(names.saved_by, names.CACHES),
            *([names.JUDGED_SINGLY] if reward.judges_groups else []),
        )
        self.words: dict[str, Sequence[str]] = {
            "branch": branches,
            "stage": self._stages,
            "component": self._components,
            "provider": reward.providers,
            "service": reward.services,
            "count": (*TRAFFIC, "slots", names.OVERLOAD_SHARE),
            "figure": (),  # filled by quick evaluations
        }
        """Values for the placeholders in the tags of `names.FIGURES`."""
        of_the_chain = (
            names.REFERENCE_MISSING, names.RIGHT_DOCUMENT, names.POSITION_GAP,
            names.JUDGE_SECONDS, *names.of_branches(names.reference_of(BRANCH), branches).values(),
            *map(names.saved_by, names.CACHES),
            *(names.stage_of(stage, share) for stage in Stage for share in names.STAGE_SHARES),
        )  # fmt: skip
        self.not_logged = frozenset(of_the_chain if reward.functions and not reward.components else ())

    def names(self, further: Sequence[str] = ()) -> tuple[str, ...]:
        """Every tag on the ledger's line except the KL and the position gap. `further`: more parts of the line."""
        present = (part for part, is_there in self._parts.items() if is_there)
        return names.line_names({"rewards", *further, *present}, self.words)

    def column(self, table: torch.Tensor, name: str) -> torch.Tensor:
        """A column of a table from `encode`, shape (N,)."""
        return table[:, self._columns[name]]

    def encode(self, rewards: Sequence[Reward], branch_ids: Sequence[int]) -> torch.Tensor:
        """The completions' values as a table to gather: shape (B, columns), float64, NaN where absent."""
        rows = []
        for reward, branch_id in zip(rewards, branch_ids, strict=True):
            values = values_of(reward, self._components).values()
            seconds = [reward.seconds.get(stage) for stage in self._stages]
            row = (branch_id, reward.reference_value, *values, *seconds)
            rows.append([math.nan if number is None else number for number in row])
        return torch.tensor(rows, dtype=torch.float64).reshape(-1, len(self._columns))

    def add_rewards(self, aggregates: StepAggregates, table: torch.Tensor) -> None:
        """Add a table from `encode`, gathered from all ranks: shape (N, columns)."""
        branch_ids = self.column(table, BRANCH_ID)
        for tag in self._over_completions:
            values = self.column(table, tag)
            is_known = ~values.isnan()
            tags = {tag: is_known}
            if BRANCH in tag:
                by_branch = enumerate(names.of_branches(tag, self.branches).values())
                tags = {name: is_known & (branch_ids == branch_id) for branch_id, name in by_branch}
            for name, counts in tags.items():
                aggregates.add(name, values[counts].sum().item(), counts.sum().item())
        for stage in self._stages:  # percentiles of its duration over completions
            times = self.column(table, stage)
            measured = times[~times.isnan()].tolist()
            for name, share in names.STAGE_SHARES.items():
                aggregates.add(names.stage_of(stage, name), percentile(measured, share), int(bool(measured)))

    def encode_report(self, report: BatchReport) -> torch.Tensor:
        """A batch's report as a table to gather: shape (1, 6 + counts), float64."""
        used = ((name, kind, getattr(usage, kind)) for name, usage in report.usage.items() for kind in names.USAGE)
        counts = {
            **{names.usage_of(name, kind): number for name, kind, number in used},
            **{names.traffic_of(name, kind): kinds[kind] for name, kinds in report.traffic.items() for kind in kinds},
            **{names.saved_by(cache): report.cache_hits.get(cache, 0) for cache in names.CACHES},
            names.JUDGED_SINGLY: report.judged_singly,
        }
        counted = [float(counts.get(name, 0)) for name in self._counts]
        # count and sum of the scores of candidates shown first, then of those shown second
        by_place = ([each.score for each in report.records if each.candidate_first is at] for at in (True, False))
        positions = [figure for scores in by_place for figure in (len(scores), sum(scores))]
        row = [report.seconds, report.judge_seconds, *positions, *counted]
        return torch.tensor([row], dtype=torch.float64)

    def add_report(self, aggregates: StepAggregates, table: torch.Tensor) -> None:
        """Add gathered reports, shape (world size, columns): the slowest rank's seconds, and sums of the rest."""
        seconds, positions, counts = torch.split(table, [2, 4, len(self._counts)], dim=1)
        slowest = seconds.max(dim=0).values.tolist()
        for name, value in zip((names.REWARD_SECONDS, names.JUDGE_SECONDS), slowest, strict=True):
            aggregates.add(name, value, 1)
        first, of_first, second, of_second = positions.sum(dim=0).tolist()
        aggregates.add(FIRST, of_first, first)
        aggregates.add(SECOND, of_second, second)
        sums = dict(zip(self._counts, counts.sum(dim=0).tolist(), strict=True))
        for name, value in sums.items():
            aggregates.add(name, value, 1)
        for service in self.words["service"]:
            turned_away, sent = (sums[names.traffic_of(service, kind)] for kind in ("overloads", "sent"))
            aggregates.add(names.traffic_of(service, names.OVERLOAD_SHARE), turned_away, sent)
