"""The rewards of generation batches: awaited, aggregated over all ranks, and passed to TRL's loss. `train_on` and
`evaluate` begin a batch, TRL's scoring inside them requests `rewards`, and `next_micro_batches` returns scored groups
first."""

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from accelerate import PartialState
from accelerate.logging import get_logger
from accelerate.utils import gather, gather_object, reduce
from torch.nn.functional import pad

from salesrl_trl.data.branches import Branches
from salesrl_trl.errors import ConfigError, FunctionError
from salesrl_trl.kl.penalty import FAILED, loss_mask
from salesrl_trl.names import (
    BASELINE_FALLBACK,
    SINGLE_SCORED,
    SKIPPED_UPDATE,
    STALENESS,
    STALENESS_MAX,
    TURNOVER,
    Phase,
)
from salesrl_trl.reward.batch import NOTHING_SCORED, BatchResult, Completion, completion_text
from salesrl_trl.reward.figures import REFERENCE_REWARD, VALUE, RewardFigures
from salesrl_trl.reward.reward_loop import RewardLoop
from salesrl_trl.rollout.in_flight import AT_ONCE, Order, Rollout, ScoredGroups, parts
from salesrl_trl.rollout.pipeline import Pipeline
from salesrl_trl.rollout.several_sequences import SEQUENCES, sequences_of
from salesrl_trl.telemetry.instruments import Instruments
from salesrl_trl.types import EvaluatedCompletion, Example, Outcome, Reward
from salesrl_trl.update.advantages import hybrid_advantages, partly_scored
from salesrl_trl.update.correction import OLD, RATIO, SAMPLED, SamplerCorrection
from salesrl_trl.update.ledger import Ledger
from salesrl_trl.update.run_control import RunControl, on_any_rank

logger = get_logger(__name__)

Output = dict[str, torch.Tensor]  # TRL's output for a generation batch: tensors of shape (B, ...) and scalars

_PENDING = Reward(outcome=Outcome.INFRA, value=None, reason="pending")
"""Placeholder for a pending reward while other groups' advantages are computed."""
PARTLY_SCORED = "partly_scored"
"""Reason code if a function scored other completions of the group but not this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletedBatch:
    """A generation batch whose rewards have all arrived."""

    rollout: Rollout  # its `result` has this rank's rewards, by place
    advantages: torch.Tensor | None
    """Shape (B,), only for training. Reading it synchronises with the device."""
    update: int  # optimizer steps done


class TRLScoring(Protocol):
    def score(self, rollout: Rollout) -> Output: ...
    def advantages(self) -> MutableSequence[float]: ...


class LooksOn(Protocol):
    def on_batch(self, batch: CompletedBatch) -> Mapping[str, float]:
        """May use collectives. Returns metrics, equal on all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringSettings:
    """Settings for scoring a batch. `SalesGRPOConfig` documents those of the same name."""

    branches: Branches
    num_generations: int
    per_device_train_batch_size: int
    hybrid_reference_weight: float
    weights: Sequence[float]
    answered: Sequence[bool]
    """For each reward function: whether the package calls it. TRL runs reward models and environments' rewards."""
    scale_rewards: str
    held_out_examples: int


@dataclass(eq=False, kw_only=True)
class RolloutScoring:
    pipeline: Pipeline
    reward_loop: RewardLoop
    figures: RewardFigures
    ledger: Ledger
    instruments: Instruments
    run_control: RunControl
    correction: SamplerCorrection | None
    settings: ScoringSettings
    device: torch.device
    trl: TRLScoring
    parts: "Sequence[LooksOn]"
    rollout: Rollout | None = field(default=None, init=False)  # the rollout TRL is processing, if any
    in_parts: bool = field(default=False, init=False)
    """Whether training on the current generation batch began before all its rewards arrived."""
    figure_columns: Sequence[str] = field(default=(), init=False)  # columns of held-out rows read by metrics
    _waiting: Rollout | None = field(default=None, init=False)
    _has_scored: bool = field(default=False, init=False)  # whether any completion of the run was scored

    @property
    def current(self) -> Rollout:
        assert self.rollout is not None
        return self.rollout

    def forget(self) -> None:
        self.rollout, self._waiting, self._has_scored = None, None, False

    def train_on(
        self, inputs: list[Example], micro_step: int, update: int, in_groups: bool, in_order: bool = False
    ) -> Output:
        """TRL's output for the batch of these B examples. `in_groups`: scored groups train first. `in_order`: a
        group's completions stay together once all are scored; otherwise TRL shuffles them."""
        self._waiting = None
        rollout, settings = self.pipeline.buffer.take(inputs, micro_step, update), self.settings
        shape = (len(inputs), settings.per_device_train_batch_size, settings.num_generations)
        order = self._recorded_order(parts(*shape), update) if in_groups else None
        groups = ScoredGroups(*shape, order or AT_ONCE)
        rollout.groups = groups if in_groups and (order is None or order.parts) else None
        is_repeated = rollout.is_in_parts = groups.complete
        output = self._scored(rollout, update)
        self.in_parts = rollout.is_in_parts
        if rollout.is_complete and not in_order and not is_repeated:
            rollout.groups = None  # nothing to wait for: use TRL's own order
            return output
        groups.complete = rollout.is_complete
        rollout.groups, self._waiting = groups, rollout
        groups.release(output)
        return output

    def evaluate(
        self, inputs: list[Example], update: int, group: int | None = None, *, for_loss: bool = False
    ) -> tuple[Rollout, Output]:
        """The evaluation batch of these inputs. `group`: as for the pipeline. `for_loss`: exclude failed completions,
        because TRL computes a loss from it."""
        rollout = self.pipeline.evaluate(inputs, update, group)
        output = self._scored(rollout, update)
        if for_loss:
            self._leave_out_failed(rollout, output)
        return rollout, output

    def next_micro_batches(self, in_trls_order: list[Output], update: int) -> list[Output]:
        """The micro-batch to train on, and the following ones of its batch, as far as known. Micro-batches of scored
        or whole groups replace those in TRL's order."""
        rollout = self._waiting
        if rollout is None or rollout.groups is None:
            return in_trls_order
        groups = rollout.groups
        while not groups.complete and on_any_rank(not groups.has_next, self.device):  # all ranks wait together
            with self.instruments.timeline.phase(Phase.REWARD_WAIT):
                if not groups.has_next:
                    self.reward_loop.wait([rollout.rewards], partial(rollout.rewards.has_settled, groups.pending))
                PartialState().wait_for_everyone()
            groups.release(self._scored(rollout, update))
        micro_batches = [groups.next(), *groups.following]
        if groups.is_empty:
            self._waiting = None
        return micro_batches

    def _scored(self, rollout: Rollout, update: int) -> Output:
        """TRL's output for a rollout, with the package's additions; for a batch in parts, as far as it is scored."""
        # 1. TRL: completions, their rewards (`rewards`), advantages, log-probs of the reference and old ones
        self.rollout = rollout
        try:
            output = self.trl.score(rollout)
        finally:
            self.rollout = None
        is_complete, is_trained_on, settings = rollout.is_complete, rollout.is_trained_on, self.settings
        rollout.is_in_parts = rollout.is_in_parts or not is_complete
        is_skipped = self.run_control.is_skipping and is_complete and is_trained_on
        correction = None if rollout.is_corrected_at_step or RATIO not in output else self.correction
        logps = output.get(OLD)
        if correction is not None:  # of all completions, scored or not, so that their order of arrival has no effect
            correction.apply_to_batch(output)
        # 2. exclude unscored completions from the loss
        if is_trained_on and not is_skipped:
            self._leave_out_failed(rollout, output)
        # 3. staleness, and the effect of the importance correction
        if is_complete:
            ages = gather(torch.tensor(rollout.ages(update), device=self.device))  # (world size x B, 2)
            known = ages[~ages.isnan().any(dim=1)].tolist()
            self.ledger.add(rollout.mode, STALENESS, sum(mean for mean, _ in known), len(known))
            self.ledger.add(rollout.mode, STALENESS_MAX, max((most for _, most in known), default=0.0), bool(known))
            if rollout.turnover:
                turnover = reduce(torch.tensor(rollout.turnover, device=self.device), "sum").tolist()
                for place, name in enumerate(TURNOVER):
                    self.ledger.add("train", name, turnover[2 * place], turnover[2 * place + 1])
            if correction is not None and logps is not None:
                correction.record(rollout.mode, correction.effect(output, logps))
        # 4. additional inputs of the loss: branches for the KL, the sampling policy's log-probs
        branch_ids = torch.tensor(settings.branches.ids(rollout.inputs))  # (B,)
        output["branch_ids"] = branch_ids.to(self.device, non_blocking=True)
        if (sequences := sequences_of(rollout.sampled)) is not None:
            output[SEQUENCES] = sequences.to(self.device)
        if (logps := rollout.behaviour_logps) is not None:  # groups from several batches may have another padded width
            output[OLD] = pad(logps, (0, output["completion_mask"].size(1) - logps.size(1)))  # (B, C)
        elif SAMPLED in output and RATIO not in output and self.pipeline.buffer.needs_logps:
            if output[SAMPLED].isnan().any():
                raise ConfigError(
                    "`sampler` returned a log-prob that is not a number. Expected all log-probs, or none."
                )
            output[OLD] = output[SAMPLED]
        if rollout.is_corrected_at_step:
            del output[OLD], output[RATIO]
        # 5. advantages relative to the reference's reward
        if settings.hybrid_reference_weight and is_trained_on:
            output["advantages"] = self._hybrid_advantages(rollout)
        # 6. a batch with too few rewards must not count under any normaliser
        if is_skipped:
            output["completion_mask"] = torch.zeros_like(output["completion_mask"])
            output["advantages"] = torch.zeros_like(output["advantages"])
            # an update shared with another batch only uses that one
            output[FAILED] = torch.ones_like(output["completion_mask"][:, 0], dtype=torch.bool)
            output["num_items_in_batch"] = torch.zeros_like(output["num_items_in_batch"])
        self.instruments.timeline.end(Phase.ADVANTAGES)
        # 7. observers: the record, the judge drift monitor
        if is_complete:
            advantages = output["advantages"] if is_trained_on else None
            batch = CompletedBatch(rollout=rollout, advantages=advantages, update=update)
            for part in self.parts:
                for name, value in part.on_batch(batch).items():
                    self.ledger.add(rollout.mode, name, value)
        return output

    def rewards(
        self, completions: Sequence[Completion], calculate: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, BatchResult | None]:
        """The rewards of the rollout that TRL is processing, shape (world size x B, functions), with NaN rows for
        excluded completions; and this rank's result. The result is `None` while some rewards are pending: their rows
        are NaN, and nothing is recorded. A collective. `calculate`: TRL's own method, which obtains the functions'
        numbers from the package."""
        rollout, groups = self.current, self.current.groups
        # 1. a batch in parts: the rewards available so far
        so_far = None if groups is None or groups.complete else self._rewards_so_far(rollout, groups)
        if so_far is not None:
            self.instruments.timeline.begin(Phase.ADVANTAGES)
            return so_far, None
        # 2. wait for all rewards, and let TRL request them
        with self.instruments.timeline.phase(Phase.REWARD_WAIT):
            result = self.reward_loop.result(rollout.rewards, completions)
            self.reward_loop.answer = result
            try:
                rewards = calculate()
            finally:
                self.reward_loop.answer = None
        self.instruments.timeline.begin(Phase.ADVANTAGES)
        # 3. exclude completions not comparable within their group
        rewards, result = self._compared(result, rewards, rollout.group)
        rollout.result, rollout.completions = result, completions
        rollout.failed = torch.isnan(rewards).all(dim=1)  # (world size x B,), the same on every rank
        # 4. metrics over all ranks, and whether the batch counts
        self._record(rollout, result)
        return rewards, result

    def _rewards_so_far(self, rollout: Rollout, groups: ScoredGroups) -> torch.Tensor | None:
        """The rewards available so far, NaN for the rest: shape (world size x B, functions). `None` once all have
        arrived."""
        rewards = [_PENDING if reward is None else reward for reward in rollout.rewards.rewards]
        functions = self.reward_loop.reward.names.functions
        numbers = BatchResult(rewards=tuple(rewards), report=NOTHING_SCORED).table(functions)
        is_in = [[float(reward is not _PENDING)] for reward in rewards]
        parts = [torch.tensor(columns, dtype=torch.float64) for columns in (numbers, is_in)]
        table = torch.cat((self._encode(rewards, rollout), *parts), dim=1).to(self.device)
        widths = [table.size(1) - len(numbers[0]) - 1, len(numbers[0]), 1]
        scored, values, is_in_everywhere = gather(table).split(widths, dim=1)  # each (world size x B, columns)
        rollout.scored, values = scored.cpu(), values.to(torch.float32)
        values[partly_scored(values, rollout.group)] = torch.nan
        rollout.failed = torch.isnan(values).all(dim=1)  # including pending ones, which are not trained on yet
        scored_fraction = (~rollout.failed).float().mean().item()
        in_by_rank = is_in_everywhere.bool().view(-1, len(rewards)).cpu()  # (world size, B)
        wanted = self.run_control.min_valid_reward_fraction
        groups.record(in_by_rank, PartialState().process_index, scored_fraction, wanted)
        return None if groups.complete else values

    def _compared(self, result: BatchResult, rewards: torch.Tensor, group: int) -> tuple[torch.Tensor, BatchResult]:
        """TRL's table without completions that are not comparable within their group, and this rank's matching
        rewards; a collective. Without effect for a single function called by the package."""
        if self.settings.answered == [True]:
            return rewards, result
        own = self._own(len(result.rewards))
        unscored = torch.tensor([float(reward.value is None) for reward in result.rewards], device=rewards.device)
        lost = gather(unscored).bool()  # (world size x B,): one of their functions failed, or none applies
        rewards = torch.where(lost[:, None], torch.nan, rewards)
        partly = partly_scored(rewards, group)
        rewards = torch.where(partly[:, None], torch.nan, rewards)
        compared = []
        for reward, row, is_partly in zip(result.rewards, rewards[own].tolist(), partly[own].tolist(), strict=True):
            if reward.value is not None and is_partly:
                reward = replace(reward, outcome=Outcome.INFRA, value=None, reason=PARTLY_SCORED)
            elif reward.value is not None:
                weighed = zip(self.settings.weights, row, strict=True)
                value = sum(weight * number for weight, number in weighed if not math.isnan(number))
                reward = replace(reward, value=value)
            compared.append(reward)
        return rewards, replace(result, rewards=tuple(compared))

    def _record(self, rollout: Rollout, result: BatchResult) -> None:
        """Record a batch's metrics over all ranks, and decide whether it counts; a collective."""
        mode, ledger, control = rollout.mode, self.ledger, self.run_control
        names = self.figure_columns
        if mode == "eval" and (self.settings.held_out_examples or names):
            prompts = [example.get("prompt") for example in rollout.inputs]
            read = [{name: example.get(name) for name in names} for example in rollout.inputs]
            texts, values = map(completion_text, rollout.completions), result.values
            ledger.written.extend(map(EvaluatedCompletion, prompts, rollout.completions, values, texts, read))
        rollout.scored = gather(self._encode(result.rewards, rollout).to(self.device)).cpu()
        faulty = [reward for reward in result.rewards if reward.outcome is not Outcome.OK]
        is_refused = control.is_refused_by_budget([reward.reason for reward in faulty if reward.value is None])
        mine = [(reward.reason, reward.value is None, is_refused, reward.breach) for reward in faulty]
        failed = gather_object(mine)
        reports = gather(self.figures.encode_report(result.report).to(self.device)).cpu()
        self._has_scored |= not rollout.failed.all().item()
        if not self._has_scored and failed and all(breach for *_, breach in failed):
            raise FunctionError(
                f"the reward function {failed[0][-1]} All {len(failed)} completions of the first batch failed this "
                "way, so nothing could be scored. Fix the function and launch again."
            )
        control.is_spent |= any(is_refused for *_, is_refused, _ in failed)  # as decided by each rank's account
        ledger.record_rewards(mode, rollout.scored, reports, (reason for reason, *_ in failed))
        if rollout.is_trained_on:
            report, scored = result.report, ~rollout.failed
            self.instruments.record_rewards(report.started, report.seconds, report.waits, report.spans)
            is_single = scored.view(-1, self.settings.num_generations).sum(dim=1) == 1  # (groups,)
            ledger.add("train", SINGLE_SCORED, is_single.sum().item(), len(is_single))
            missing = Counter(reason for reason, is_missing, *_ in failed if is_missing)
            warning = control.record_batch(scored.float().mean().item(), missing)
            if warning is not None:
                logger.warning(warning)
        ledger.add(mode, SKIPPED_UPDATE, float(control.is_skipping and rollout.is_trained_on))

    def _leave_out_failed(self, rollout: Rollout, output: Output) -> None:
        """Mask failed completions in TRL's output so that none of their tokens count; a collective. `FAILED` marks
        them for the normaliser: always for a batch in parts, otherwise if any rank has one."""
        failed = rollout.failed  # (world size x B,)
        if not (rollout.is_in_parts or failed.any()):
            return
        own = failed[self._own(len(rollout.inputs))]
        output["completion_mask"] = output["completion_mask"] * ~own[:, None]
        output[FAILED] = own
        if not rollout.is_in_parts:  # otherwise more groups' tokens may still be masked
            output["num_items_in_batch"] = gather(loss_mask(output).sum()).sum()

    def _hybrid_advantages(self, rollout: Rollout) -> torch.Tensor:
        assert rollout.scored is not None
        settings = self.settings
        values, references = (
            self.figures.column(rollout.scored, name).to(torch.float32) * settings.weights[0]
            for name in (VALUE, REFERENCE_REWARD)
        )  # each (world size x B,)
        share, scale = settings.hybrid_reference_weight, settings.scale_rewards
        advantages, missing = hybrid_advantages(values, references, settings.num_generations, share, scale)
        if rollout.is_complete:
            self.ledger.add("train", BASELINE_FALLBACK, missing.sum().item(), len(missing))
            logged = self.trl.advantages()
            for index, advantage in enumerate(advantages.tolist(), start=len(logged) - len(advantages)):
                logged[index] = advantage
        return advantages[self._own(len(rollout.inputs))].to(self.device)

    def _recorded_order(self, of: Sequence[range], update: int) -> Order | None:
        """In a replay, the recorded order of these parts; `None` if a rank has none. A collective in replays."""
        reward = self.reward_loop.reward
        if not reward.is_replay:
            return None
        recorded = reward.order_of(update + 1)
        order = None if recorded is None else Order(*recorded)
        if order is not None and order.parts and sorted(order.parts) != [part.start for part in of]:
            order = None  # from another batch size
        is_same = len({*gather_object([None if order is None else bool(order.parts)])}) == 1
        return order if is_same else None

    def _own(self, size: int) -> slice:
        first = PartialState().process_index * size
        return slice(first, first + size)

    def _encode(self, rewards: Sequence[Reward], rollout: Rollout) -> torch.Tensor:
        return self.figures.encode(rewards, self.settings.branches.ids(rollout.inputs))  # (B, columns)


def copied(logs: Mapping[str, object]) -> dict[str, object]:
    """A copy of TRL's tables of completions that can be extended without changing the original."""
    copies = {name: copy.copy(table) for name, table in logs.items()}
    for table in (table for table in copies.values() if isinstance(table, dict)):
        table.update({column: copy.copy(values) for column, values in table.items()})
    return copies
