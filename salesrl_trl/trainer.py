"""The trainer: TRL's `GRPOTrainer` with overrides.

Owns the overrides, each of which says what it changes, and the bound callables of TRL that the rooms get. Code that
needs no TRL lies in the rooms; `wiring` builds them.
"""

import contextlib
import copy
import functools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import Sampler as DatasetSampler
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import TrainOutput
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.config.rollouts import NO_TOOLS
from salesrl_trl.config.schedule import follow
from salesrl_trl.errors import ConfigError
from salesrl_trl.evaluation.record import QuickEvalSettings
from salesrl_trl.generation.requests import Requests
from salesrl_trl.generation.sampler import Finished, Sampled, Sampler, TokenSource, Upstream, vision_fields
from salesrl_trl.hooks import Hooks
from salesrl_trl.kl.law import KLLaw
from salesrl_trl.kl.penalty import BranchPenalty
from salesrl_trl.names import Phase
from salesrl_trl.replaced import replaced
from salesrl_trl.reward.base import BatchedReward
from salesrl_trl.reward.desk import RewardDesk
from salesrl_trl.rollout.pipeline import Rollout
from salesrl_trl.rollout.prompt_order import OrderByEpoch
from salesrl_trl.rollout.scoring import Output, copied
from salesrl_trl.telemetry.instruments import Instruments
from salesrl_trl.telemetry.step_lines import take_over_the_console
from salesrl_trl.update.boundary import Boundary
from salesrl_trl.wiring import Wiring


class SalesGRPOTrainer(GRPOTrainer):
    """GRPO against RAG services and a judge.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            The policy.
        reward (`BatchedReward` or `RewardDesk`):
            The reward chain: a `SalesReward`, or one in a process of its own; perhaps at its desk already.
        args (`SalesGRPOConfig`):
            Settings.
        instruments (`Instruments`, *optional*):
            Measurements of the run. Phases, heartbeats, and a trace of the first 50 steps when not given.
        quick_eval (`QuickEvalSettings`, *optional*):
            Greedy evaluations every few steps on a sample of `eval_dataset`. None when not given.
        kl_law (`KLLaw`, *optional*):
            Moves the KL coefficients in place of the law that `args` sets.
        sampler (`Callable[[Upstream], Sampler]`, *optional*):
            Makes another generation engine than TRL's. A class, for example.
        kwargs:
            Further arguments of `GRPOTrainer`. The datasets have the columns `prompt` and `row`.
    """

    args: SalesGRPOConfig
    _logs: dict[str, Any]
    beta: float | BranchPenalty

    def __init__(
        self,
        model: PreTrainedModel,
        reward: BatchedReward | RewardDesk,
        args: SalesGRPOConfig,
        instruments: Instruments | None = None,
        quick_eval: QuickEvalSettings | None = None,
        kl_law: KLLaw | None = None,
        sampler: Callable[[Upstream], Sampler] | None = None,
        **kwargs: object,
    ) -> None:
        """Gives vLLM the engine options that TRL does not pass through, and builds the rooms."""
        for name in ("tools", "environment_factory"):
            if kwargs.get(name):
                raise ConfigError(NO_TOOLS.format(name))
        rooms = self.rooms = Wiring(model, reward, args, instruments, kl_law, kwargs.get("peft_config") is not None)
        self._timeline = rooms.timeline
        self._tokens: TokenSource | None = None  # generates in place of TRL's engines
        self._vision: Mapping[str, Any] = {}  # what the processor made of the last prompts' pictures
        self._epoch = 0
        with rooms.building(model):
            super().__init__(model=model, reward_funcs=rooms.desk, args=args, **kwargs)
        for name, phase in (("evaluate", Phase.EVALUATION), ("_save_checkpoint", Phase.CHECKPOINT)):
            setattr(self, name, self._timeline.phased(phase, getattr(self, name)))
        take_over_the_console(self, *rooms.connect(self._hooks(), sampler, quick_eval))

    def _hooks(self) -> Hooks:
        return Hooks(
            model=self.model,
            unwrapped=lambda: self.accelerator.unwrap_model(self.model),
            ref_model=self.ref_model,
            step=lambda: self.state.global_step,
            accelerator=self.accelerator,
            is_deepspeed=self.is_deepspeed_enabled,
            engine=self.vllm_generation if self.use_vllm else self.generation_config,
            has_rollout_func=self.rollout_func is not None,
            tokenizer=self._tokenizer,
            pad_to_multiple_of=self.pad_to_multiple_of,
            eos_token_ids=self.eos_token_ids,
            reward_weight=self.reward_weights[0].item(),
            has_entropy_bonus=self._entropy_bonus_enabled,
            has_aux_loss=self.aux_loss_enabled,
            num_generations_eval=self.num_generations_eval,
            generate=self._sample,
            ask=self._ask_server,
            logps_of=self._logps_of,
            score=self._score,
            advantages=lambda: self._logs["advantages"],
            set_aside=self._set_aside,
            drop_gradients=lambda: self.optimizer.zero_grad(set_to_none=True),
            save=lambda folder: self.save_model(str(folder), _internal_call=True),  # pushes to no hub
            log=functools.partial(Trainer.log, self),
            callbacks=self.callback_handler,
            eval_dataset=self.eval_dataset,
            position=lambda: (self._step, self._buffered_inputs is not None),
            capture=lambda: Boundary(
                self.state, self.optimizer, self.lr_scheduler, self.rooms.kl, (self._step, self._buffered_inputs)
            ),
            restore=self._restore,
        )

    def _restore(self, boundary: Boundary) -> None:
        self._step, self._buffered_inputs = boundary.restore()
        self._metrics["train"].clear()  # of the step that is undone

    def train(
        self, resume_from_checkpoint: str | os.PathLike[str] | bool | None = None, *args: object, **kwargs: object
    ) -> TrainOutput:
        """Checks the checkpoint, keeps the measurements of a failed step, and raises the reason of a stop.

        Raises:
            `ConfigError`: the checkpoint is of other rows, branches or weights, or of another order of prompts.
            `TooFewRewardsError`: after `max_skipped_generations` skipped in a row. A checkpoint was saved before.
            `RunStopped`: after `request_stop`. A checkpoint was saved before.
            `WeightSyncError`: if vLLM samples from other weights than the ones in training.
        """
        self.rooms.forget_run()  # first: a stop that is asked for from here on is this run's
        for table in (*self._metrics.values(), *self._logs.values(), self._pending_extra_logs, self._pending_metrics):
            table.clear()
        self._current_train_step_time = 0.0
        self._last_loaded_step = -1  # steps are counted anew, and weights have moved
        with self.rooms.running(functools.partial(self._save_checkpoint, self.model, None)):
            resumed = self.rooms.keeper.begin(resume_from_checkpoint, self.train_dataset)
            starts = self.args.eval_on_start and resumed is None  # a run that goes on was evaluated at its start
            with replaced(self.args, "eval_on_start", starts):
                return super().train(resumed, *args, **kwargs)

    def _init_training_state(self, *args, **kwargs):
        """Counts micro-steps on from where the run stands: generation batches begin where they did."""
        epochs, micro_steps = super()._init_training_state(*args, **kwargs)  # micro-steps of the epoch to go on with
        self._step, self._buffered_inputs = micro_steps, None  # TRL counts from 0, and epochs are whole windows
        return epochs, micro_steps

    def request_stop(self, reason: str) -> None:
        """End training on all ranks, with a checkpoint. `reason`: what asked for it. From a signal handler too."""
        self.rooms.stopping.request(reason)

    def finish(self) -> None:
        """Close the reward's connections and the instruments. The trainer can't score after this."""
        self.rooms.close()

    def _get_train_sampler(self, dataset: Dataset | None = None) -> DatasetSampler[int]:
        """Orders prompts by seed and epoch alone: TRL forgets the order on a resume after the first epoch."""
        return OrderByEpoch(super()._get_train_sampler(dataset), lambda: self.rooms.pipeline.epoch)

    def _run_epoch(self, *args, epoch: int, train_dataloader, **kwargs):
        """Gives the pipeline the prompts that come when this epoch is over. After the last step nothing is done."""
        if self.state.global_step >= self.state.max_steps:  # of a finished run that is resumed
            self.control.should_training_stop = True
            return
        self._epoch = epoch
        self.rooms.pipeline.epoch_begins(train_dataloader)
        return super()._run_epoch(*args, epoch=epoch, train_dataloader=train_dataloader, **kwargs)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """Pulls micro-batches of later steps ahead, over an epoch's end too."""
        pull = super().get_batch_samples
        full = self.args.gradient_accumulation_steps  # an epoch's last step gets what is left
        steps_left = self.state.max_steps - self.state.global_step
        with self._timeline.phase(Phase.DATA_LOADING):
            return self.rooms.pipeline.next_update(
                self._epoch, epoch_iterator, lambda each: pull(each, full, device), steps_left
            )

    def _prepare_inputs(self, generation_batch):
        """Generates the rollouts that are due. Then a scored micro-batch replaces the next one in order."""
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        self.rooms.pipeline.launch_due(self._step, self.state.global_step)
        return self.rooms.scoring.next_micro_batch(super()._prepare_inputs(generation_batch), self.state.global_step)

    def _sample(self, prompts: Sequence[object], tokens: TokenSource | None = None) -> Sampled:
        """TRL's own `_generate`. Its measurements go with the completions, to be logged when these train."""
        was_training, seen = self.model.training, self.state.num_input_tokens_seen
        measured: dict[str, list[float]] = defaultdict(list)
        metrics = {**self._metrics, self._mode: measured}
        try:
            with replaced(self, "_metrics", metrics), replaced(self, "_tokens", tokens):
                generated = super()._generate(list(prompts))
            tokens_seen = self.state.num_input_tokens_seen - seen
        finally:
            self.state.num_input_tokens_seen = seen
            self.model.train(was_training)  # transformers' continuous batching leaves it in training
        measured.pop("num_tokens")
        return Sampled.of(generated, measured, tokens_seen, self._vision)

    def _ask_server(self, prompts: Sequence[object], finished: Finished) -> Requests:
        """Push changed weights, as TRL's `_generate` does, and ask for completions without waiting."""
        with self.vllm_generation.begun(finished) as begun:
            self._generate_single_turn(*self._tokenize_prompts(copy.deepcopy(list(prompts))), self.num_generations)
        [requests] = begun
        return requests

    def _tokenize_prompts(self, prompts):
        """Keeps what the processor makes of pictures, for log-probs of completions that are not scored yet."""
        ids, images, self._vision = super()._tokenize_prompts(prompts)
        return ids, images, self._vision

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, *args, **kwargs):
        """Lets another engine generate, if there is one."""
        if self._tokens is not None:
            return self._tokens(prompt_ids, num_generations)
        return super()._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations, *args, **kwargs)

    def _generate(self, prompts):
        """Returns the completions of the rollout, which exist already."""
        rollout = self.rooms.scoring.current
        assert rollout.sampled is not None
        measured, tokens = rollout.drain_metrics()
        metrics = self._metrics[rollout.mode]
        for name, values in measured.items():
            metrics[name].extend(values)
        self.state.num_input_tokens_seen += tokens
        metrics["num_tokens"] = [self.state.num_input_tokens_seen]
        return rollout.sampled.generated

    def _tool_call_loop(self, *args, **kwargs):
        """Refuses."""
        raise ConfigError(NO_TOOLS.format("a `rollout_func` that calls `_tool_call_loop`"))

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _generate_and_score_completions(self, inputs):
        """Scores the rollout of these inputs, which may have been launched before."""
        if not self.model.training:
            return self.rooms.scoring.evaluate(inputs, self.state.global_step)[1]
        in_groups = self.rooms.in_groups and self.rooms.weight_check.is_done
        return self.rooms.scoring.train_on(inputs, self._step, self.state.global_step, in_groups)

    def _score(self, rollout: Rollout) -> Output:
        """TRL's own method. Its figures and tables are kept only when all rewards are in."""
        mode = rollout.mode
        before = (self._metrics[mode], self._logs)
        output: Output = super()._generate_and_score_completions(rollout.inputs)
        if not rollout.is_complete:
            self._metrics[mode], self._logs = before
        elif not self.rooms.weight_check.is_done and self.vllm_generation.temperature == self.temperature:
            self.rooms.weight_check.check(output, self._logps_of)  # not of an evaluation, which answers greedily
        return output

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        """Waits for the rewards of the batch. While it is trained on part by part: takes those that are in."""
        rollout = self.rooms.scoring.current
        so_far = self.rooms.scoring.rewards_so_far(rollout)
        if so_far is not None:
            self._metrics["train"], self._logs = defaultdict(list), copied(self._logs)  # logged when all are in
            self._timeline.begin(Phase.ADVANTAGES)
            return so_far
        with self._timeline.phase(Phase.REWARD_WAIT):
            result = rollout.result = self.rooms.desk.result(rollout.rewards, completions)
            with self.rooms.desk.answering(result):
                rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._timeline.begin(Phase.ADVANTAGES)
        self.rooms.scoring.record(rollout, rewards, completions)
        if self.args.log_completions:
            for name, values in result.columns(self.rooms.reward.names.components).items():
                self._log_completion_extra(name, values)
        return rewards

    def _compute_loss(self, model, inputs):
        """Puts the penalty of the branches where TRL reads `beta`. Its sums over all ranks move the coefficients."""
        if self.model.training:
            self.rooms.instruments.record_batch(inputs["prompt_mask"], inputs["completion_mask"])
        kl = self.rooms.kl
        if kl is None:
            with self._timeline.phase(Phase.FORWARD):
                return super()._compute_loss(model, inputs)
        penalty = kl.penalty(inputs)
        with replaced(self, "beta", penalty), self._timeline.phase(Phase.FORWARD):
            loss = super()._compute_loss(model, penalty.inputs)
            kl.add(penalty)
        if self.accelerator.sync_gradients:
            self.rooms.end_kl_step(kl, self._mode)
        return loss

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        """Hands the policy's log-probs to the penalty. Keeps old and reference ones while TRL repeats a batch."""
        if isinstance(self.beta, BranchPenalty):
            logps, *others = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
            return self.beta.record_logps(logps), *others
        if torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        is_reference, rollout = self.rooms.reference.is_active(model), self.rooms.scoring.rollout
        if rollout is not None and is_reference in rollout.logps:
            return rollout.logps[is_reference], None, None
        with self._timeline.phase(Phase.REFERENCE_LOGPROBS if is_reference else Phase.OLD_LOGPROBS):
            output = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if rollout is not None and rollout.groups is not None:
            rollout.logps[is_reference] = output[0]
        return output

    def _logps_of(self, output: Mapping[str, Any]) -> torch.Tensor:
        """Log-probs of a generation batch's completions under the current policy, shape (B, T)."""
        ids = torch.cat((output["prompt_ids"], output["completion_ids"]), dim=1)  # (B, P + T)
        attended = torch.cat((output["prompt_mask"], output["completion_mask"]), dim=1)  # (B, P + T)
        size, length = self.args.per_device_train_batch_size, output["completion_ids"].size(1)
        pictures = vision_fields(output)
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            return self._get_per_token_logps_and_entropies(self.model, ids, attended, length, size, **pictures)[0]

    def training_step(self, *args, **kwargs):
        """Marks the phases of a step around its passes."""
        with self._timeline.phase(Phase.BATCHING):  # less the phases inside it
            loss = super().training_step(*args, **kwargs)
        self.rooms.run_control.record_micro_batch()
        if self.accelerator.sync_gradients:  # what comes until the step's end: clipping, the optimizer, the schedule
            self._timeline.begin(Phase.OPTIMIZER)
        return loss

    def _save_checkpoint(self, model, trial):
        """Saves beside the other checkpoints. A checkpoint takes its place when it is whole."""
        with self.rooms.stopping.held():
            self.rooms.keeper.save(self.state, functools.partial(super()._save_checkpoint, model, trial))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Adds the package's own files."""
        super()._save_optimizer_and_scheduler(output_dir)
        self.rooms.keeper.add_parts(Path(output_dir), self.state.global_step, self._step, self._buffered_inputs or [])

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads the package's own files."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._buffered_inputs = self.rooms.keeper.load_parts(Path(checkpoint), self._step)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the package's figures, under the same keys at every step."""
        with self._timeline.phase(Phase.LOGGING):
            mode = self._mode
            is_measured = bool(self._metrics[mode])  # False for the summaries of transformers
            if is_measured:
                self._metrics[mode] |= {name: [value] for name, value in self.rooms.figures(mode).items()}
            super().log(logs, start_time)
            failures = self.rooms.ledger.drain_failures(mode)
            if mode == "train" and is_measured and failures:
                # A separate entry: a step's entry has the same keys at every step, but new reasons may come.
                Trainer.log(self, {**failures})

    def _evaluate(self, *args, skip_scheduler=False, **kwargs):
        """Lets an adaptive learning rate follow evaluations that could be scored, and no others."""
        metrics = super()._evaluate(*args, skip_scheduler=True, **kwargs)
        follow(metrics, self.args, None if skip_scheduler else self.lr_scheduler)
        return metrics

    def _maybe_log_save_evaluate(self, *args, **kwargs):
        """Adds a quick evaluation when one is due."""
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self.rooms.run_control.error is None:
            self.rooms.evaluate_quickly()
        self.rooms.stopping.settle()

    @contextlib.contextmanager
    def _set_aside(self) -> Iterator[None]:
        """While active, the policy evaluates, one answer a prompt. Figures and tables of others stay as they are."""
        was_training = self.model.training
        self.model.eval()
        try:
            with (
                replaced(self, "num_generations_eval", 1),
                replaced(self, "_metrics", {**self._metrics, "eval": defaultdict(list)}),
                replaced(self, "_logs", copy.deepcopy(self._logs)),
            ):
                yield
        finally:
            self.model.train(was_training)
