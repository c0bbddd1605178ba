"""The rewards of generation batches: awaited, counted over all ranks, and put where TRL's loss reads them.

Owns which rollout TRL is at work on, and the additions to its output for a batch. Refuses to generate (the pipeline),
to score a completion (the reward loop) and to compute the advantages of a loss (TRL).
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import PartialState
from accelerate.logging import get_logger
from accelerate.utils import gather, gather_object, reduce

from salesrl_trl.data.branches import Branches
from salesrl_trl.evaluation.held_out import Written
from salesrl_trl.kl.penalty import loss_mask
from salesrl_trl.names import Phase
from salesrl_trl.reward.batch import NOTHING_SCORED, BatchResult, Completion
from salesrl_trl.reward.figures import encode, encode_report
from salesrl_trl.reward.reward_loop import RewardLoop
from salesrl_trl.rollout.correction import OLD, RATIO
from salesrl_trl.rollout.groups import ScoredGroups
from salesrl_trl.rollout.normaliser import FAILED
from salesrl_trl.rollout.pipeline import Pipeline, Rollout
from salesrl_trl.rollout.record import batch_of
from salesrl_trl.rollout.staleness import correction_sums
from salesrl_trl.telemetry.instruments import Instruments
from salesrl_trl.types import NOT_APPLICABLE, Example, Outcome, Reward
from salesrl_trl.update.advantages import hybrid_advantages, partly_scored
from salesrl_trl.update.ledger import Ledger
from salesrl_trl.update.ranks import on_any_rank
from salesrl_trl.update.run_control import RunControl

logger = get_logger(__name__)

Output = dict[str, torch.Tensor]
"""TRL's output for a generation batch: tensors of shape (B, ...), and scalars."""

_PENDING = Reward(outcome=Outcome.INFRA, value=None, reason="pending")
"""Stands for a reward that has not come in yet, while the advantages of other groups are computed."""
PARTLY_SCORED = "partly_scored"
"""Reason of a completion to which a function applies for others of its group, and not for it."""
_VALUE, _REFERENCE_REWARD = 2, 4
"""Columns of `reward.figures.encode`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringSettings:
    """Settings for the scoring of a batch."""

    branches: Branches
    """Names of branches by id, and the branch of a row."""
    stages: Sequence[str]
    """Stages of the reward beside the package's own."""
    group: int
    """Completions of a prompt, in training."""
    micro_batch: int
    """Completions of a micro-batch."""
    hybrid_reference_weight: float
    """The reference's share of the baseline."""
    weights: Sequence[float]
    """TRL's weight of each reward function."""
    answered: Sequence[bool]
    """Of each reward function: whether the reward loop answers it. TRL runs models, and those of environments."""
    scale_rewards: str
    """TRL's setting: by what advantages are divided."""
    examples: int
    """Held-out conversations that are shown with what the policy wrote."""
    leaves_out_failed: bool
    """Whether failed completions are out of the loss. Else they are in it with an advantage of 0, as in TRL."""
    correction: tuple[str, float | None, float | None]
    """TRL's `vllm_importance_sampling_mode`, and its `_clip_min` and `_clip_max`."""


class RolloutScoring:
    """The way of a generation batch through TRL's scoring.

    Args:
        pipeline (`Pipeline`):
            Gives the rollouts.
        reward_loop (`RewardLoop`):
            Scores completions.
        ledger (`Ledger`), instruments (`Instruments`):
            Get the figures.
        run_control (`RunControl`):
            Decides whether a batch counts.
        settings (`ScoringSettings`):
            Sizes and weights.
        device (`torch.device`):
            Of collectives.
        score (`Callable[[Rollout], Output]`):
            TRL's own method over a whole generation batch. It asks back for `rewards_so_far`, and calls `record`.
        advantages (`Callable[[], MutableSequence[float]]`):
            Returns this column of TRL's table of completions. Its last rows are those of the batch.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        reward_loop: RewardLoop,
        ledger: Ledger,
        instruments: Instruments,
        run_control: RunControl,
        settings: ScoringSettings,
        device: torch.device,
        score: Callable[[Rollout], Output],
        advantages: Callable[[], MutableSequence[float]],
    ) -> None:
        self._pipeline = pipeline
        self._reward_loop = reward_loop
        self._ledger = ledger
        self._instruments = instruments
        self._timeline = instruments.timeline
        self._run_control = run_control
        self._settings = settings
        self._device = device
        self._score = score
        self._advantages = advantages
        self.rollout: Rollout | None = None
        """The rollout that TRL is at work on; `None` in between."""
        self._waiting: Rollout | None = None
        self.in_parts = False
        """Whether the generation batch in training was begun before all its rewards were in."""

    @property
    def current(self) -> Rollout:
        """The rollout that TRL is at work on."""
        assert self.rollout is not None
        return self.rollout

    def forget(self) -> None:
        """Forget the batch of an interrupted run."""
        self.rollout = self._waiting = None

    def train_on(
        self, inputs: list[Example], micro_step: int, update: int, in_groups: bool, in_order: bool = False
    ) -> Output:
        """The batch of these inputs for training.

        Args:
            inputs (`list[Example]`):
                B examples.
            micro_step (`int`), update (`int`):
                Micro-steps and optimizer steps done.
            in_groups (`bool`):
                Whether the batch is trained on part by part, scored groups first.
            in_order (`bool`):
                Whether a group's completions stay together when all are scored. Else TRL shuffles them.
        """
        self._waiting = None
        rollout, settings = self._pipeline.take(inputs, micro_step, update), self._settings
        groups = ScoredGroups(len(inputs), settings.micro_batch, settings.group)
        rollout.groups = groups if in_groups else None
        output = self._scored(rollout, update)
        self.in_parts = rollout.is_in_parts
        if rollout.is_complete and not in_order:
            rollout.groups = None  # nothing to wait for: TRL's own way
            return output
        groups.complete = rollout.is_complete
        rollout.groups, self._waiting = groups, rollout
        groups.release(output)
        return output

    def evaluate(self, inputs: list[Example], update: int, group: int | None = None) -> tuple[Rollout, Output]:
        """The batch of these inputs for an evaluation. `group`: as for the pipeline."""
        rollout = self._pipeline.evaluate(inputs, update, group)
        return rollout, self._scored(rollout, update)

    def next_micro_batches(self, in_trls_order: list[Output], update: int) -> list[Output]:
        """The micro-batch to train on, and those of the same batch that will come after it, as far as that is known.

        Args:
            in_trls_order (`list[Output]`):
                The same in TRL's order. Micro-batches of scored groups, or of whole groups, replace them.
            update (`int`):
                Optimizer steps done.
        """
        rollout = self._waiting
        if rollout is None or rollout.groups is None:
            return in_trls_order
        groups = rollout.groups
        while not groups.complete and on_any_rank(not groups.has_next, self._device):  # all ranks wait together
            with self._timeline.phase(Phase.REWARD_WAIT):
                if not groups.has_next:
                    self._reward_loop.wait(rollout.rewards, groups.pending)
                PartialState().wait_for_everyone()
            groups.release(self._scored(rollout, update))
        micro_batches = [groups.next(), *groups.following]
        if groups.is_empty:
            self._waiting = None
        return micro_batches

    def _scored(self, rollout: Rollout, update: int) -> Output:
        """TRL's output, with the branch of each sample, and without an effect if too little was scored."""
        self.rollout = rollout
        try:
            output = self._score(rollout)
        finally:
            self.rollout = None
        rollout.is_in_parts = rollout.is_in_parts or not rollout.is_complete
        is_skipped = self._run_control.is_skipping and rollout.is_complete and rollout.is_trained_on
        if rollout.is_trained_on and not is_skipped:
            self.leave_out_failed(rollout, output)
        if rollout.is_complete:
            self._record_staleness(rollout, output, update)
        output["branch_ids"] = torch.tensor(self._settings.branches.ids(rollout.inputs)).to(
            self._device, non_blocking=True
        )  # (B,)
        if rollout.behaviour_logps is not None:
            output[OLD] = rollout.behaviour_logps  # (B, C)
        if rollout.is_corrected_at_step:
            del output[OLD], output[RATIO]
        if self._settings.hybrid_reference_weight and rollout.is_trained_on:
            output["advantages"] = self._hybrid_advantages(rollout)
        if is_skipped:
            # No token counts: the loss and its gradient are zero under every normaliser.
            output["completion_mask"] = torch.zeros_like(output["completion_mask"])
            output["advantages"] = torch.zeros_like(output["advantages"])
            if self._settings.leaves_out_failed:  # an update that it shares with another batch is of that one alone
                output[FAILED] = torch.ones_like(output["completion_mask"][:, 0], dtype=torch.bool)
                output["num_items_in_batch"] = torch.zeros_like(output["num_items_in_batch"])
        self._timeline.end(Phase.ADVANTAGES)
        recorder = self._instruments.recorder
        if recorder is not None and rollout.is_complete:
            advantages = output["advantages"] if rollout.is_trained_on else None
            recorder.record(batch_of(rollout, advantages, update, self._settings.branches))
        return output

    def leave_out_failed(self, rollout: Rollout, output: Output) -> None:
        """Take failed completions out of TRL's output for a rollout: none of their tokens counts; a collective.

        `normaliser` makes up for them. It is told by `FAILED`: of a batch in parts always, else if one failed on any
        rank.
        """
        failed = rollout.failed  # (world size x B,)
        if not self._settings.leaves_out_failed or not (rollout.is_in_parts or failed.any()):
            return
        size = len(rollout.inputs)
        own = failed[PartialState().process_index * size :][:size]
        output["completion_mask"] = output["completion_mask"] * ~own[:, None]
        output[FAILED] = own
        if not rollout.is_in_parts:  # else tokens of other groups may still leave
            output["num_items_in_batch"] = gather(loss_mask(output).sum()).sum()

    def rewards_so_far(self, rollout: Rollout) -> torch.Tensor | None:
        """The rewards so far, NaN for the rest: shape (world size x B, functions). `None` when all are in. A
        collective."""
        groups = rollout.groups
        if groups is None:
            return None
        rewards = [_PENDING if reward is None else reward for reward in rollout.rewards.rewards]
        settled = torch.tensor([[float(reward is not _PENDING)] for reward in rewards], dtype=torch.float64)
        columns = BatchResult(rewards=tuple(rewards), report=NOTHING_SCORED).table(
            self._reward_loop.reward.names.functions
        )
        table = torch.cat((self._encode(rewards, rollout), torch.tensor(columns, dtype=torch.float64), settled), dim=1)
        gathered = gather(table.to(self._device))  # (world size x B, columns + functions + 1)
        width = len(columns[0])
        rollout.scored = gathered[:, : -1 - width].cpu()
        values = gathered[:, -1 - width : -1].to(torch.float32)
        values[partly_scored(values, rollout.group)] = torch.nan
        rollout.failed = torch.isnan(values).all(dim=1)  # and those that are not in: nobody trains on them yet
        scored_fraction = (~rollout.failed).float().mean().item()
        in_by_rank = gathered[:, -1].bool().view(-1, len(rewards)).cpu()  # (world size, B)
        groups.record(in_by_rank, PartialState().process_index, scored_fraction, self._run_control.wanted_fraction)
        return None if groups.complete else values

    def record(self, rollout: Rollout, rewards: torch.Tensor, completions: Sequence[Completion]) -> torch.Tensor:
        """Count the rewards of a batch over all ranks, and decide whether the batch counts; a collective.

        Args:
            rollout (`Rollout`):
                A rollout with a `result`.
            rewards (`torch.Tensor`):
                TRL's table of these rewards, shape (world size x B, functions).
            completions (`Sequence[Completion]`):
                What the policy wrote, on this rank.

        Returns:
            `torch.Tensor`: the table, with NaN in the whole row of a completion that counts for nothing.
        """
        assert rollout.result is not None
        rollout.completions = completions
        rewards = self._compared(rollout, rewards)
        rollout.failed = torch.isnan(rewards).all(dim=1)  # (world size x B,), the same on every rank
        if rollout.mode == "eval" and self._settings.examples:
            prompts = [example.get("prompt") for example in rollout.inputs]
            self._ledger.record_written("eval", map(Written, prompts, completions, rollout.result.values))
        result, mode = rollout.result, rollout.mode
        rollout.scored = gather(self._encode(result.rewards, rollout).to(self._device)).cpu()
        faulty = [reward for reward in result.rewards if reward.outcome is not Outcome.OK]
        rank = PartialState().process_index
        is_refused = self._run_control.is_refused([reward.reason for reward in faulty if reward.value is None])
        failed = gather_object([(reward.reason, reward.value is None, is_refused, rank) for reward in faulty])
        self._run_control.record_refusal(any(refused for *_, refused, _ in failed))  # as each rank's account had it
        self._ledger.record_rewards(mode, rollout.scored, (reason for reason, *_ in failed))
        self._ledger.record_report(mode, gather(encode_report(result.report).to(self._device)).cpu())
        if rollout.is_trained_on:
            report = result.report
            self._instruments.record_rewards(report.started, report.seconds, report.waits, report.spans)
            scored = ~rollout.failed
            self._ledger.record_groups(scored, self._settings.group)
            by_rank: dict[int, Counter[str]] = {}
            for reason, is_missing, _, of_rank in failed:
                by_rank.setdefault(of_rank, Counter()).update([reason] * is_missing)
            missing = sum(by_rank.values(), Counter[str]())
            # Completions to which no function applies did not fail.
            failing = {
                each: own for each, own in by_rank.items() if own.total() - own[NOT_APPLICABLE] == len(result.rewards)
            }
            warning = self._run_control.record_batch(scored.float().mean().item(), missing, failing)
            if warning is not None:
                logger.warning(warning)
        self._ledger.record_update(mode, is_skipped=self._run_control.is_skipping and rollout.is_trained_on)
        return rewards

    def _compared(self, rollout: Rollout, rewards: torch.Tensor) -> torch.Tensor:
        """The table without completions that can't be compared with their group. The rollout's rewards say the same:
        their values are what TRL's sum of the row is.

        Where there is one function and the reward loop answers it, nothing is changed.
        """
        settings = self._settings
        if settings.answered == [True]:
            return rewards
        assert rollout.result is not None
        local = rollout.result.rewards
        unscored = torch.tensor([float(reward.value is None) for reward in local], device=rewards.device)
        lost = gather(unscored).bool()  # (world size x B,): a function of theirs failed, or none applies
        rewards = torch.where(lost[:, None], torch.nan, rewards)
        partly = partly_scored(rewards, rollout.group)
        rewards = torch.where(partly[:, None], torch.nan, rewards)
        first = PartialState().process_index * len(local)
        own, own_partly = (each[first : first + len(local)].tolist() for each in (rewards, partly))
        weighed = [
            sum(weight * value for weight, value in zip(settings.weights, row, strict=True) if not math.isnan(value))
            for row in own
        ]
        rollout.result = replace(
            rollout.result,
            rewards=tuple(
                reward
                if reward.value is None
                else replace(reward, outcome=Outcome.INFRA, value=None, reason=PARTLY_SCORED)
                if is_partly
                else replace(reward, value=value)
                for reward, value, is_partly in zip(local, weighed, own_partly, strict=True)
            ),
        )
        return rewards

    def _record_staleness(self, rollout: Rollout, output: Mapping[str, torch.Tensor], update: int) -> None:
        """Record the age of the sampler's weights, and the effect of the correction for it; a collective."""
        self._ledger.record_staleness(rollout.mode, update - rollout.step)
        ratio = output.get(RATIO)
        if ratio is not None and not rollout.is_corrected_at_step:
            sums = correction_sums(ratio, output["completion_mask"], *self._settings.correction)
            self._ledger.record_correction(rollout.mode, *reduce(sums, "sum").tolist())

    def _hybrid_advantages(self, rollout: Rollout) -> torch.Tensor:
        """This rank's advantages against the hybrid baseline, shape (B,)."""
        assert rollout.scored is not None
        settings = self._settings
        table = rollout.scored.to(torch.float32) * settings.weights[0]
        values, references = table[:, _VALUE], table[:, _REFERENCE_REWARD]  # each (world size x B,)
        share, scale = settings.hybrid_reference_weight, settings.scale_rewards
        advantages, missing = hybrid_advantages(values, references, settings.group, share, scale)
        if rollout.is_complete:
            self._ledger.record_baselines(missing)
            logged = self._advantages()
            for index, advantage in enumerate(advantages.tolist(), start=len(logged) - len(advantages)):
                logged[index] = advantage
        size = len(rollout.inputs)
        first = PartialState().process_index * size
        return advantages[first : first + size].to(self._device)

    def _encode(self, rewards: Sequence[Reward], rollout: Rollout) -> torch.Tensor:
        ids = self._settings.branches.ids(rollout.inputs)
        return encode(rewards, ids, self._settings.stages)  # (B, columns)


def copied(logs: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of TRL's tables of completions. Additions to it leave the original as it is."""
    copies = {}
    for name, table in logs.items():
        copies[name] = copy.copy(table)
        if isinstance(table, dict):
            copies[name].update({column: copy.copy(values) for column, values in table.items()})
    return copies
