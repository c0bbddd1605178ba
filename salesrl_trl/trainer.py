"""The trainer: overrides of TRL's `GRPOTrainer`, in the order in which TRL calls them; those that save and push the
policy are in `wiring.saving`. `wiring.trl_access` is the components' access to TRL.
"""

import copy
import functools
import inspect
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Sequence, Sized
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import Sampler as DatasetSampler
from transformers import PreTrainedModel, PrinterCallback, ProgressCallback, Trainer
from transformers.trainer_utils import TrainOutput
from trl import GRPOConfig, GRPOTrainer

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.config.quick_evaluations import QuickEvalSettings
from salesrl_trl.data.branches import check_not_taken, with_ids
from salesrl_trl.errors import ConfigError, DataError
from salesrl_trl.generation.sampler import Made, Sampler, Upstream, guard_parser
from salesrl_trl.ground.process import patched, warn_of_changes
from salesrl_trl.ground.texts import encodable
from salesrl_trl.kl.law import KLLaw
from salesrl_trl.kl.penalty import FAILED, BranchPenalty
from salesrl_trl.names import Phase
from salesrl_trl.reward.reward_funcs import RewardFunc, RewardFuncs, needs_loop
from salesrl_trl.rollout.buffer import BufferPolicy
from salesrl_trl.rollout.model_passes import unknown_logps
from salesrl_trl.rollout.normaliser import leave_out_empty
from salesrl_trl.rollout.pipeline import LoaderAhead
from salesrl_trl.rollout.reading_ahead import OrderByEpoch
from salesrl_trl.rollout.rollout_scoring import copied
from salesrl_trl.rollout.several_sequences import sequences_of
from salesrl_trl.telemetry.instruments import Instruments
from salesrl_trl.telemetry.logs import show_lines, tell
from salesrl_trl.telemetry.timeline import Timeline, phased
from salesrl_trl.wiring.components import Components
from salesrl_trl.wiring.part import Part, layer
from salesrl_trl.wiring.saving import SavingTrainer
from salesrl_trl.wiring.trl_access import Hooks

warn_of_changes()  # records the files imported so far

logger = logging.getLogger(__name__)
OWN_ARGUMENTS = ("instruments", "quick_eval", "kl_law", "sampler", "buffer_policy", "parts", "partner")


class SalesGRPOTrainer(SavingTrainer):
    """TRL's `GRPOTrainer` for slow rewards that may fail. Accepts the same arguments.

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`):
            The policy, or its id.
        reward_funcs (`RewardFunc` or `list[RewardFunc]`, *optional*):
            As in TRL: functions, reward models or their ids. Also a `SalesReward`, and functions with
            `@per_completion` or `@per_group`, whose rewards start before the whole batch is generated; or a single
            `@per_episode` function, an agent that queries the policy.
        args (`SalesGRPOConfig`):
            Settings. With a plain `GRPOConfig`, or without one, you get TRL's own trainer.
        instruments (`Instruments`, *optional*):
            Measurements of the run. Defaults to phases, heartbeats, and a trace of the first 50 steps.
        quick_eval (`QuickEvalSettings`, *optional*):
            Greedy evaluations every few steps on a sample of `eval_dataset`. Defaults to none.
        kl_law (`KLLaw`, *optional*):
            Controls the KL coefficients, instead of the controller set in `args`.
        sampler (`Callable[[Upstream], Sampler]`, *optional*):
            Creates a generation engine to use instead of TRL's, e.g. a class.
        buffer_policy (`BufferPolicy`, *optional*):
            Chooses the groups that a step trains on, instead of `max_staleness` and `refill_groups`. Subclass
            `ByArrival` for your own.
        parts (`Sequence[Part]`, *optional*):
            Your own parts, added after those enabled by the settings.
        partner (`Partner`, *optional*):
            Answers the policy's turns, so that completions are whole conversations.
        more, kwargs:
            Further arguments of `GRPOTrainer`. A `SalesReward` requires the dataset column `row`.
    """

    updates = True  # whether steps change the policy
    train_dataset: Dataset
    eval_dataset: Dataset
    beta: float | BranchPenalty
    environments: list[Any] | None
    _timeline: Timeline
    _logs: dict[str, Any]
    _made = Made()  # precomputed results, while TRL's `_generate` runs around them
    _loss_inputs: dict[str, object] | None = None  # the micro-batch whose loss TRL is computing
    _last_loaded_step: int

    def __new__(
        cls, model: object = None, reward_funcs: object = None, args: object = None, *more: object, **given: object
    ) -> Any:
        """Returns TRL's own trainer if `args` is a plain `GRPOConfig` or `None`."""
        if cls is not SalesGRPOTrainer or model is None or isinstance(args, SalesGRPOConfig):
            return super().__new__(cls)  # called without a model when copied
        functions = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        if given.keys() & {*OWN_ARGUMENTS} or any(map(needs_loop, functions)):
            raise ConfigError(
                f"{', '.join(OWN_ARGUMENTS)}, a `RewardLoop` and `@per_episode` functions require a "
                "`SalesGRPOConfig`, and `args` is a plain `GRPOConfig` or `None`. Expected a `SalesGRPOConfig`."
            )
        show_lines()
        logger.info("plain `GRPOConfig`: using TRL's own trainer, without this package's features")
        return GRPOTrainer(model, reward_funcs, args, *more, **given)  # Python does not call `__init__` below for it

    def __init__(
        self, model: str | PreTrainedModel, reward_funcs: RewardFunc | Sequence[RewardFunc] | None = None,
        args: GRPOConfig | None = None, *more: object, instruments: Instruments | None = None,
        quick_eval: QuickEvalSettings | None = None, kl_law: KLLaw | None = None,
        sampler: Callable[[Upstream], Sampler] | None = None, buffer_policy: BufferPolicy | None = None,
        parts: Sequence[Part] = (), partner: object | None = None, **kwargs: object,
    ) -> None:  # fmt: skip
        if not isinstance(args, SalesGRPOConfig):
            raise ConfigError("`args` is not a `SalesGRPOConfig`. Expected one; TRL's trainer uses `GRPOConfig`.")
        named = inspect.signature(GRPOTrainer.__init__).bind(self, model, None, args, *more, **kwargs).arguments
        if not args.branches:  # they are set from this trainer's rows, and must not leak into another trainer
            args = copy.copy(args)
        has_more = named.get("environment_factory") is not None
        remote = layer("reward.remote").RemoteReward if args.reward_process else None
        records = bool(args.record)
        rewards = RewardFuncs.of(reward_funcs, args.reward_weights, remote, has_more=has_more, records=records)
        rows, has_adapter = named.get("train_dataset"), named.get("peft_config") is not None
        columns = None if has_more or named.get("rollout_func") else getattr(rows, "column_names", None)
        rewards.check(columns, args.num_generations, args.per_device_train_batch_size * args.steps_per_generation)
        check_not_taken(getattr(rows, "column_names", None) or ())
        components = self.components = Components(rewards, args, instruments, kl_law, rows, has_adapter, parts)
        self._timeline = components.timeline
        self._epoch, self.partner = 0, partner
        with components.policy.building(model):
            super().__init__(model, [*rewards.functions], args, *more, **kwargs)  # TRL may append to the list
        if (args.record or components.reward.is_replay) and not has_more:  # an environment may not accept the column
            self.train_dataset = with_ids(self.train_dataset)
            self.eval_dataset = with_ids(self.eval_dataset, "held-out")
        self.data_collator = functools.partial(encodable, source="a batch of the dataset")
        self.__dict__.update(
            evaluate=phased(self._timeline, Phase.EVALUATION, self.evaluate),
            _save_checkpoint=phased(self._timeline, Phase.CHECKPOINT, self._save_checkpoint),
        )
        guard_parser(self._tokenizer)
        for stock in (PrinterCallback, ProgressCallback):  # they print all 200 metrics of a step, and a progress bar
            self.remove_callback(stock)
        self._hooks = Hooks(self)
        for callback in components.connect(self._hooks, sampler, quick_eval, buffer_policy):
            self.add_callback(callback)

    def train(
        self, resume_from_checkpoint: str | os.PathLike[str] | bool | None = None, *args: object, **kwargs: object
    ) -> TrainOutput:
        """Checks the checkpoint, keeps the measurements of a failed step, and raises the reason for a stop.

        Raises:
            `ConfigError`: the checkpoint has other rows, branches, weights, or another prompt order.
            `TooFewRewardsError`: `max_skipped_generations` in a row were skipped. A checkpoint was saved.
            `RunStopped`: `request_stop` was called. A checkpoint was saved.
            `WeightSyncError`: vLLM samples from weights other than those being trained.
        """
        if self.args.process_index == 0:
            warn_of_changes()
        if isinstance(self.train_dataset, Sized):
            self._check_size(len(self.train_dataset))
        self.components.forget_run()  # first of all: any stop requested from here on is meant for this run
        for table in (*self._metrics.values(), *self._logs.values(), self._pending_extra_logs, self._pending_metrics):
            table.clear()
        self._current_train_step_time = 0.0
        self._last_loaded_step = -1  # steps restart from 0, and weights have changed
        with self.components.running():
            identity = self.components.policy.identity_of(self.train_dataset, self.components.branches)
            resumed = self.components.keeper.begin(resume_from_checkpoint, identity, self.model.name_or_path)
            for part in self.components.parts:
                part.begin(resumed, self.components.keeper.run)
            starts = self.args.eval_on_start and resumed is None  # a resumed run was evaluated at its start
            with patched(self.args, "eval_on_start", starts):
                return super().train(resumed, *args, **kwargs)

    def _init_training_state(self, max_steps, *args, **kwargs):
        """Continues counting micro-steps, so that generation batches begin where they did. Intervals of logging,
        evaluation and saving come from the settings, not from the checkpoint as in transformers."""
        epochs, micro_steps = super()._init_training_state(max_steps, *args, **kwargs)  # of the epoch being resumed
        self._step, self._buffered_inputs = micro_steps, None  # TRL counts from 0; epochs are whole windows
        self.state.compute_steps(self.args, max_steps)
        self.components.keeper.report(self.state)
        return epochs, micro_steps

    def _check_size(self, rows: int) -> None:
        prompts = self.args.generation_batch_size // self.num_generations
        if rows < prompts:
            raise DataError(
                f"the training dataset has {rows or 'too few'} rows, but a generation batch needs {prompts} prompts: "
                "no step can be done. Expected at least as many rows. Add some, or lower "
                "`per_device_train_batch_size` or `gradient_accumulation_steps`."
            )

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def request_stop(self, reason: str) -> None:
        """End training on all ranks, with a checkpoint. `reason`: who asked. May be called from a signal handler."""
        self.components.stopping.request(reason)

    def finish(self) -> None:
        """Close the reward's connections and the instruments. The trainer cannot score afterwards."""
        self.components.close()

    def _get_train_sampler(self, dataset: Dataset | None = None) -> DatasetSampler[int]:
        """Orders prompts by seed and epoch alone; TRL loses the order when resuming after the first epoch."""
        return OrderByEpoch(super()._get_train_sampler(dataset), self.components.pipeline.updates)

    def _run_epoch(self, *args, epoch: int, train_dataloader, **kwargs):
        """Lets the pipeline read prompts beyond the end of this epoch. Does nothing after the last step."""
        if self.state.global_step >= self.state.max_steps:  # when a finished run is resumed
            self.control.should_training_stop = True
            return
        self._epoch = epoch
        self.components.pipeline.updates.dataloader = train_dataloader
        return super()._run_epoch(*args, epoch=epoch, train_dataloader=train_dataloader, **kwargs)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """Prefetches micro-batches of later steps, also across epochs. Rejects a stream too short for one step."""
        pull = super().get_batch_samples
        full = self.args.gradient_accumulation_steps  # an epoch's last step gets the remainder
        steps_left = self.state.max_steps - self.state.global_step
        with self._timeline.phase(Phase.DATA_LOADING):
            update = self.components.pipeline.next_update(
                self._epoch, epoch_iterator, lambda iterator: pull(iterator, full, device), steps_left
            )
        if not update[0] and not self.state.global_step:
            self._check_size(0)
        return update

    def training_step(self, *args, **kwargs):
        """Marks the phases around forward and backward. Rescales the gradient if completions failed late."""
        with self._timeline.phase(Phase.BATCHING):  # excluding nested phases
            loss = super().training_step(*args, **kwargs)
        normaliser, control = self.components.normaliser, self.components.run_control
        is_last = self.accelerator.sync_gradients
        loss = normaliser.end(loss, self.model.parameters(), is_last=is_last)
        control.record_micro_batch()
        if is_last and normaliser.is_empty:
            control.drain_moves()
        if is_last:  # until the step's end: clipping, the optimizer, the schedule
            self._timeline.begin(Phase.OPTIMIZER)
        return loss

    def _prepare_inputs(self, generation_batch):
        """Generates due rollouts. Then a scored micro-batch replaces the next one in order."""
        components, step = self.components, self.state.global_step
        if not self.model.training:
            batch = super()._prepare_inputs(generation_batch)
            components.normaliser.begin_evaluation(batch)
            return batch
        # 1. start generation before waiting for the current batch's last rewards
        components.pipeline.launch_due(self._step, step)
        # 2. TRL's next micro-batch; at the start of a generation batch, TRL scores it
        batch = super()._prepare_inputs(generation_batch)
        following = (self._buffered_inputs or [])[self._step % self.args.steps_per_generation + 1 :]
        # 3. a micro-batch with scored groups replaces it
        batches = components.scoring.next_micro_batches([batch, *following], step)
        # 4. the update's size without failed completions, and the forward passes it shares
        size, is_last = self.current_gradient_accumulation_steps, self.accelerator.sync_gradients
        components.normaliser.begin(batches, size, is_last=is_last, in_parts=components.scoring.in_parts)
        return components.passes.begin(batches, size, is_last=is_last)

    def _generate_and_score_completions(self, inputs):
        """Scores the rollout of these inputs, which may already be in flight."""
        components, step = self.components, self.state.global_step
        if not self.model.training:
            return components.scoring.evaluate(inputs, step, for_loss=True)[1]
        in_groups = components.in_groups and components.policy.weight_check.is_done
        return components.scoring.train_on(inputs, self._step, step, in_groups, components.passes.in_order)

    def _generate(self, prompts):
        """Returns the rollout's completions, which already exist unless TRL's scoring generates."""
        rollout, launcher = self.components.scoring.current, self.components.pipeline.launcher
        sampled = rollout.sampled or launcher.generate_inside(rollout, prompts, self.environments)
        if seats := sampled.seats:
            self.environments, prompts[:] = [seat.environment for seat in seats], [seat.prompt for seat in seats]
        measured, tokens = rollout.drain_metrics()
        metrics = self._metrics[rollout.mode]
        for name, values in measured.items():
            metrics[name].extend(values)
        self.state.num_input_tokens_seen += tokens
        metrics["num_tokens"] = [self.state.num_input_tokens_seen]
        return sampled.generated

    def _tokenize_prompts(self, prompts):
        return self._made.encoded or super()._tokenize_prompts(prompts)

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, *args, **kwargs):
        if self._made.tokens is not None:
            return self._made.tokens(prompt_ids, num_generations)
        return super()._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations, *args, **kwargs)

    def _tool_call_loop(self, *args, **kwargs):
        """Returns the finished conversations. Rejects tools that TRL was not given."""
        if not self.tools:
            raise ConfigError(
                "a `rollout_func` calls tools that TRL was not given: completions are generated before TRL asks for "
                "them. Expected the trainer's `tools` or `environment_factory`."
            )
        return self._made.talked or super()._tool_call_loop(*args, **kwargs)

    def _get_tool_suffix_ids(self, tool_messages):
        """Neutralises marks with which a tool's result could open a turn, also for rewards and the record."""
        foreign = self._hooks.agents.foreign
        for message in tool_messages:
            message.update(foreign.message(message))
        return super()._get_tool_suffix_ids(tool_messages)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        """Waits for the batch's rewards, or uses those available while the batch is trained on in parts."""
        of_trl = functools.partial(super()._calculate_rewards, inputs, prompts, completions, completion_ids_list)
        rewards, result = self.components.scoring.rewards(completions, of_trl)
        if result is None:  # logged once all have arrived
            self._metrics["train"], self._logs = defaultdict(list), copied(self._logs)
            return rewards
        names = self.components.reward.names.components if self.args.log_completions else None
        has_branch = any("branch" in reward.columns for reward in result.rewards)  # a function logs its own
        if names is not None and len(self.components.branches.names) > 1 and not has_branch:
            self._log_completion_extra("branch", [self.components.branches.of(row) for row in inputs])
        result.log(self._log_completion_extra, self._log_metric, names)
        return rewards

    def _compute_loss(self, model, inputs):
        """Substitutes the per-branch penalty for TRL's `beta`. Its sums over all ranks move the coefficients."""
        components, metrics, kl = self.components, self._metrics[self._mode], self.components.kl
        # 1. advantages and coefficients compensate for failed completions
        factor, recorded = components.normaliser.factor, {name: len(values) for name, values in metrics.items()}
        if factor != 1:
            inputs = {**inputs, "advantages": inputs["advantages"] * factor}
        penalty = None if kl is None else kl.penalty(inputs, factor)
        inputs = inputs if penalty is None else penalty.inputs
        # 2. TRL's loss, with our penalty instead of its own
        beta = patched(self, "beta", self.beta if penalty is None else penalty)
        with beta, patched(self, "_loss_inputs", inputs), self._timeline.phase(Phase.FORWARD):
            loss = super()._compute_loss(model, inputs)
            if kl is not None and penalty is not None:
                kl.add(penalty, self._mode)
        if FAILED in inputs:
            leave_out_empty(metrics, recorded)
        # 3. a step's KL moves the next step's coefficients; an interrupted step leaves `sync_gradients` False
        if kl is not None and (self.accelerator.sync_gradients or not self.model.training):
            components.end_kl_step(kl, self._mode)
        # 4. trained lengths, for FLOPs; at the end of a generation batch, TRL's importance sampling metrics
        if self.model.training:
            passes = components.passes
            components.instruments.record_batch(inputs["prompt_mask"], inputs["completion_mask"], passes.has_prompt)
            if (self._step + 1) % self.args.steps_per_generation == 0:
                for name, value in passes.drain_correction(components.run_control.is_skipping).items():
                    metrics[name][-1] = value
        return loss

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        """Sends a group's prompt through the model once. Caches log-probs while TRL repeats a batch."""
        components, inputs = self.components, self._loss_inputs
        upstream = super()._get_per_token_logps_and_entropies
        if inputs is not None:
            logps, *others = components.passes.log_probs(inputs, upstream, model, *args, **kwargs)
            return self.beta.record_logps(logps) if isinstance(self.beta, BranchPenalty) else logps, *others
        is_reference, rollout = components.reference.is_active(model), components.scoring.rollout
        if rollout is not None and is_reference in rollout.logps:
            return rollout.logps[is_reference], None, None
        if components.passes.leave_out_old(rollout, is_reference, components.policy.weight_check.is_done):
            return unknown_logps(*args), None, None
        with self._timeline.phase(Phase.REFERENCE_LOGPROBS if is_reference else Phase.OLD_LOGPROBS):
            sequences = sequences_of(None if rollout is None else rollout.sampled)
            output = components.passes.log_probs(None, upstream, model, *args, sequences=sequences, **kwargs)
        if rollout is not None and rollout.groups is not None:
            rollout.logps[is_reference] = output[0]
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the package's metrics, with the same keys at every step."""
        with self._timeline.phase(Phase.LOGGING):
            mode = self._mode
            is_measured = bool(self._metrics[mode])  # False for transformers' summaries
            if is_measured:
                self._metrics[mode] |= {name: [value] for name, value in self.components.log_line(mode).items()}
            has_table = self.log_completions and is_measured
            try:
                with patched(self, "log_completions", has_table):
                    super().log(logs, start_time)
            except Exception as error:
                if not has_table or self._metrics[mode]:  # TRL clears them before writing the table
                    raise
                tell("the table of completions", error)
            failures = self.components.ledger.drain_failures(mode)
            if mode == "train" and is_measured and failures:
                # A separate entry, because new reasons may appear and a step's keys must not change.
                Trainer.log(self, {**failures})

    def evaluation_loop(self, dataloader, *args, metric_key_prefix="eval", **kwargs):
        """Generates later batches while rewards are pending. The loss excludes batches without a scored completion."""
        dataloader = LoaderAhead(dataloader, self.components.pipeline, self.state.global_step)
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        name = f"{metric_key_prefix}_loss"
        if name in output.metrics:
            output.metrics[name] = self.components.normaliser.loss_of_evaluation(output.metrics[name])
        return output

    def _maybe_log_save_evaluate(self, *args, **kwargs):
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self.components.run_control.error is None:
            self.components.step_is_over()
        self.components.stopping.settle()


class RolloutTrainer(SalesGRPOTrainer):
    """The trainer of `mode: rollouts`: generates and scores as in training, without updates or optimizer state."""

    updates = False

    def training_step(self, model, inputs, *_, **__):
        with self._timeline.phase(Phase.BATCHING):  # excluding nested phases
            model.train()
            self._prepare_inputs(inputs)
            self._step += 1
        if self.accelerator.sync_gradients:
            self._timeline.begin(Phase.OPTIMIZER)
        return torch.zeros((), device=self.accelerator.device)
