"""The trainer: TRL's `GRPOTrainer` with a handful of hooks overridden.

Owns the wiring between TRL and this package and no arithmetic of its own.
"""

import contextlib
import copy
import functools
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather, gather_object
from datasets import Dataset
from torch.utils.data import Sampler as DatasetSampler
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from salesrl_trl.checkpoint.identity import Identity, check_identity, identity_of, rows_of, weights_of, write_identity
from salesrl_trl.checkpoint.under_way import load_under_way, save_under_way
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.errors import (
    ConfigError,
    ServiceError,
    ServiceUnavailable,
)
from salesrl_trl.evaluation.answers import Processes, Row
from salesrl_trl.evaluation.held_out import HeldOut
from salesrl_trl.evaluation.quick import QuickEvaluator
from salesrl_trl.evaluation.record import QuickEvalSettings
from salesrl_trl.evaluation.sample import sample
from salesrl_trl.generation.requests import Requests
from salesrl_trl.generation.sampler import (
    Background,
    Finished,
    Sampled,
    Sampler,
    Streamed,
    TokenSource,
    Upstream,
    WholeBatch,
    why_not_streamed,
)
from salesrl_trl.generation.vllm import engine_kwargs, has_tied_head, vllm_dtype, vllm_engine_options
from salesrl_trl.kl.branched import BranchedKL
from salesrl_trl.kl.law import KLLaw
from salesrl_trl.kl.penalty import BranchPenalty, loss_mask
from salesrl_trl.kl.reference import Reference, reference_wanted
from salesrl_trl.names import (
    Phase,
    StartUp,
)
from salesrl_trl.replaced import replaced
from salesrl_trl.reward.base import BatchedReward
from salesrl_trl.reward.batch import BatchResult
from salesrl_trl.reward.desk import RewardDesk
from salesrl_trl.reward.figures import (
    encode,
    encode_report,
)
from salesrl_trl.rollout.greedy import GreedySubject, ScoredBatch
from salesrl_trl.rollout.groups import ScoredGroups
from salesrl_trl.rollout.pipeline import Pipeline, Rollout
from salesrl_trl.rollout.prompt_order import OrderByEpoch
from salesrl_trl.rollout.staleness import correction_sums
from salesrl_trl.telemetry.instruments import DEFAULT_TRACED_STEPS, Instruments, InstrumentSettings
from salesrl_trl.telemetry.layout import ScalarLayout
from salesrl_trl.telemetry.logs import LeaveOut, show_lines
from salesrl_trl.telemetry.step_lines import StepLine, take_over_the_console
from salesrl_trl.types import Outcome, Reward
from salesrl_trl.update.advantages import hybrid_advantages
from salesrl_trl.update.callbacks import SkipAndStop
from salesrl_trl.update.ledger import Ledger
from salesrl_trl.update.run_control import RunControl
from salesrl_trl.update.stop_notice import watched
from salesrl_trl.update.weights import WeightChange, WeightCheck, logp_difference, raise_adapters

logger = get_logger(__name__)
_PLAIN_LOGGER = logging.getLogger(__name__)  # for lines that look like those of callbacks, without a rank

# Upstream warns of a row that could not be scored with its prompt and completion: customers' text.
_UNSCORABLE_WARNING = LeaveOut("All reward functions returned None")
_UPSTREAM_LOGGER = logging.getLogger("trl.trainer.grpo_trainer")

_PENDING = Reward(outcome=Outcome.INFRA, value=None, reason="pending")
"""Stands for a reward that has not come in yet, while the advantages of other groups are computed."""
STOPPED = "stopped"
"""Reason code of completions that were given up because the run was told to stop."""
_NO_TOOLS = (
    "`{}` does not work with this trainer: completions are generated before TRL has set up the tools that they would "
    "call. Expected a policy without tools. Leave it out, or use TRL's own `GRPOTrainer`."
)


class SalesGRPOTrainer(GRPOTrainer):
    """GRPO against RAG services and a judge.

    Changes these things only:
    - `__init__`: vLLM gets the engine options TRL does not pass through, and TRL's warning of a row that could not be
      scored, which prints prompt and completion, is left out;
    - `_tool_call_loop`: refuses; so does `__init__`, where `tools` or an `environment_factory` are given;
    - `_get_train_sampler` and `_run_epoch`: an epoch's order of prompts is the same after a resume;
    - `get_batch_samples`, `_prepare_inputs`, `_generate`, `_get_per_token_logps_and_entropies`: rollouts are launched
      before the step that trains on them, and the reward of each completion starts when it is finished (`pipeline`);
      with `scored_groups_first`, groups that are scored are trained on while others are out;
    - `_calculate_rewards`: waits for rewards under way; counts outcomes by branch over all ranks, and decides whether
      enough was scored;
    - `_generate_and_score_completions`: checks the first weight push, marks each sample's branch, puts the reference's
      reward into the baseline, and takes a skipped batch out of the loss;
    - `_compute_loss`: where TRL reads `beta`, it meets the branches' penalty; what was measured is summed over ranks
      once per optimizer step and moves the coefficients;
    - `_get_per_token_logps_and_entropies`: hands that penalty the policy's log-probs;
    - `_save_optimizer_and_scheduler`, `_load_optimizer_and_scheduler`: the coefficients' state goes along, and the
      generation batch under way, and what the run is made of (`identity`), which `train` compares;
    - `_init_training_state`: micro-steps are counted on from where the run stands, so that generation batches begin
      where they did;
    - `log`: adds the package's metrics, under the same keys at every step; in place of transformers' print of all
      figures there are two lines a step, and a line for each evaluation of held-out rows (`callbacks`);
    - `_maybe_log_save_evaluate`: a quick evaluation after it, where one is due;
    - `training_step`, `evaluate`, `_save_checkpoint`, and those above: tell the instruments which phase of a step it
      is; so do vLLM's weight push and accelerate's `backward`;
    - `warm_up`, `request_stop` and `finish`, which TRL does not have, ask every service once, end a run early, and
      close the connections;
    - `train`: raises what training stopped for.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            The policy.
        reward (`BatchedReward`):
            The reward chain.
        args (`SalesGRPOConfig`):
            Settings.
        instruments (`Instruments`, *optional*):
            What is measured of the run. Phases, heartbeats, and a trace of the first 50 steps when not given.
        quick_eval (`QuickEvalSettings`, *optional*):
            Greedy evaluations every few steps on a sample of `eval_dataset`. None when not given.
        kl_law (`KLLaw`, *optional*):
            Moves the KL coefficients in place of the law that `args` sets.
        sampler (`Callable[[Upstream], Sampler]`, *optional*):
            Makes another generation engine than TRL's. A class, for example.
        kwargs:
            `GRPOTrainer`'s own. The datasets hold the columns `prompt` and `row`.
    """

    args: SalesGRPOConfig
    _logs: dict[str, Any]
    beta: float | BranchPenalty

    def __init__(
        self,
        model: PreTrainedModel,
        reward: BatchedReward,
        args: SalesGRPOConfig,
        instruments: Instruments | None = None,
        quick_eval: QuickEvalSettings | None = None,
        kl_law: KLLaw | None = None,
        sampler: Callable[[Upstream], Sampler] | None = None,
        **kwargs: Any,
    ) -> None:
        for name in ("tools", "environment_factory"):
            if kwargs.get(name):
                raise ConfigError(_NO_TOOLS.format(name))
        self._desk = RewardDesk(reward)
        self._reward = reward
        show_lines()
        self._instruments = instruments or Instruments(
            InstrumentSettings(trace_steps=DEFAULT_TRACED_STEPS), args.device, Path(args.output_dir)
        )
        self._instruments.details |= dict.fromkeys((Phase.REWARD_WAIT, Phase.EVALUATION), self._desk.status)
        self._timeline = self._instruments.timeline
        self._quick_eval: QuickEvaluator | None = None
        targets = args.kl_targets()
        banded = [branch for branch, target in targets.items() if target.has_band]
        law = args.kl_control_law(kl_law)
        self._kl = BranchedKL(targets, law, args.kl_windows(), args.kl_penalty()) if targets else None
        self._epoch = 0
        self._ledger = Ledger(
            args.branches,
            reward.names.providers,
            reward.names.services,
            reward.names.stages,
            with_kl=bool(targets),
            with_baseline=bool(args.hybrid_reference_weight),
        )
        self._run_control = RunControl(
            args.min_valid_reward_fraction, args.max_skipped_generations, reward.names.places
        )
        # The reference policy, or an adapter's base: the run is as long as it lasts about these weights
        has_base = bool(targets) or kwargs.get("peft_config") is not None or hasattr(model, "peft_config")
        self._first_weights = weights_of(model.named_parameters()) if has_base else None
        self._rollout: Rollout | None = None  # that TRL is at work on
        self._evaluated: Rollout | None = None  # the last one of an evaluation
        self._waiting: Rollout | None = None  # is trained on while some of its rewards are pending
        self._tokens: TokenSource | None = None  # generates in place of TRL's engines
        self._weight_check = WeightCheck(args.max_sampling_logp_difference)
        _UPSTREAM_LOGGER.addFilter(_UNSCORABLE_WARNING)  # once: a logger takes the same filter no second time
        with vllm_engine_options(_engine_options(model, args)), reference_wanted(args, bool(targets)):
            super().__init__(model=model, reward_funcs=self._desk, args=args, **kwargs)
        self.add_callback(SkipAndStop(self._run_control, self._drop_gradients, self._agree_to_stop))
        self.add_callback(_Steps(self))
        take_over_the_console(
            self,
            StepLine(args.branches, reward.names.providers, functools.partial(self._ledger.failures, "train")),
            HeldOut(args.branches, Path(args.output_dir), self._ledger.drain_eval_rewards, self.num_generations_eval),
            ScalarLayout(args.branches, banded, self.callback_handler.callbacks),
        )
        self.add_callback(
            WeightChange(self.accelerator, args.min_changed_weights, functools.partial(Trainer.log, self))
        )
        self._reference = Reference(self.model, self.ref_model)
        if self._reference.has_adapter and not self.is_deepspeed_enabled:
            raise_adapters(self.model, args.bf16 or args.fp16)
        self.accelerator.backward = self._phased(Phase.BACKWARD, self.accelerator.backward)
        for warning in args.sampling_warnings():
            logger.warning(warning)
        hindrance = args.why_not_divisible(self._entropy_bonus_enabled, self.aux_loss_enabled)
        self._divisible = args.scored_groups_first and _is_on("scored groups first", hindrance)
        self._sampler = self._build_sampler(sampler or args.sampler_class())
        # Threads share no tokenizer: completions of a server are decoded in another one than prompts are encoded in.
        is_served = self.use_vllm and args.vllm_mode == "server"
        decoder = copy.deepcopy(self.processing_class) if is_served else self.processing_class
        self.pipeline = Pipeline(
            self._sampler,
            self._desk,
            self._timeline,
            decode=functools.partial(decoder.decode, skip_special_tokens=True),
            window=self._window,
            lookahead=args.rollout_lookahead,
            references_ahead=args.references_ahead,
            behaviour_logps=self._behaviour_logps,
            record_span=self._instruments.record_generation,
        )
        if not self.use_vllm:
            self._weight_check.skip("transformers generates with the trainer's own model")
        else:
            generation = self.vllm_generation
            generation.sync_weights = self._phased(Phase.WEIGHT_PUSH, generation.sync_weights)
            generation.settle = self._phased(Phase.GENERATION, generation.settle)
        if quick_eval is not None and quick_eval.steps:
            self._quick_eval = self._quick_evaluator(quick_eval)

    def train(
        self, resume_from_checkpoint: str | os.PathLike[str] | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """TRL's `train`.

        Raises:
            `ConfigError`: the checkpoint is of other rows, branches or weights, or of another order of prompts.
            `TooFewRewardsError`: after `max_skipped_generations` skipped in a row. A checkpoint was saved before.
            `RunStopped`: after `request_stop`. A checkpoint was saved before.
            `WeightSyncError`: if vLLM samples from other weights than the ones in training.
        """
        self._start_over()  # first: a stop that is asked for from here on is this run's
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True  # TRL says that there is none
        self._identity = self._made_of()
        if isinstance(resume_from_checkpoint, str | os.PathLike):
            resume_from_checkpoint = os.fspath(resume_from_checkpoint)
            self._check_identity(Path(resume_from_checkpoint))
        self._instruments.start(self.accelerator.is_main_process)
        self._timeline.begin(StartUp.PREPARE)
        try:
            with watched(lambda: self._run_control.requested, self._told_of_a_stop):
                output = super().train(resume_from_checkpoint, *args, **kwargs)
        except BaseException:  # what was measured of the step that failed is not lost
            self._timeline.add(self._desk.unreported_spans())
            self.pipeline.forget()
            self._instruments.close()
            raise
        if self._run_control.error is not None:
            raise self._run_control.error
        return output

    def _made_of(self) -> Identity:
        dataset, rows = self.train_dataset, None
        if isinstance(dataset, Dataset):  # others can't be gone over twice
            rows = rows_of(dataset["prompt"], map(self._reward.branch_of, dataset["row"]))
        return identity_of(self.args, rows, self._first_weights)

    def _check_identity(self, checkpoint: Path) -> None:
        """Refuse a checkpoint of something else, on all ranks alike."""
        refused, notes = None, []
        try:
            notes = check_identity(checkpoint, self._identity, self.args.allow_changed_resume)
        except ConfigError as error:
            refused = str(error)
        refusals = [each for each in gather_object([refused]) if each is not None]
        if refusals:
            raise ConfigError(refusals[0])
        for note in notes:
            logger.warning(note)

    def _start_over(self) -> None:
        """Leave nothing of an earlier run in this one: it may have ended anywhere, by an interruption too."""
        self.pipeline.forget()
        self._rollout = None
        if self._kl is not None:
            self._kl.forget_sums()
        self._ledger.clear()
        for metrics in self._metrics.values():
            metrics.clear()
        for table in (*self._logs.values(), self._pending_extra_logs, self._pending_metrics):
            table.clear()
        self._current_train_step_time = 0.0
        if self.use_vllm:
            self._last_loaded_step = -1  # steps are counted anew, and weights have moved
        self._run_control.restart()
        self._desk.resume()

    def _init_training_state(self, *args, **kwargs):
        epochs, micro_steps = super()._init_training_state(*args, **kwargs)  # micro-steps of the epoch to go on with
        self._step = micro_steps  # TRL counts from 0, and epochs are whole windows: generation batches begin as before
        self._buffered_inputs = self._waiting = None
        return epochs, micro_steps

    @property
    def _window(self) -> int:
        """Micro-steps between two generation batches."""
        return self.args.steps_per_generation * self.num_iterations

    @property
    def _is_inside_a_window(self) -> bool:
        """Whether the next micro-step goes on with the generation batch under way."""
        return bool(self._step % self._window)

    @property
    def _arrangement(self) -> list[int]:
        """What decides which completions of a generation batch a micro-step has."""
        args = self.args
        batch = args.per_device_train_batch_size
        return [self.accelerator.num_processes, batch, args.steps_per_generation, self.num_iterations]

    def raise_if_stopped(self) -> None:
        """Raise `RunStopped` on all ranks where any was asked to stop after its last step; a collective."""
        self._agree_to_stop(self.state.global_step)
        if self._run_control.error is not None:
            raise self._run_control.error

    def request_stop(self, reason: str) -> None:
        """End training after the optimizer step under way, on all ranks, with a checkpoint. From a signal handler too.

        Nothing is waited for: completions that are not scored by now are missing, so that the step may be skipped.
        The other ranks are told at once (`stop_notice`), and wait for no reward either.

        Args:
            reason (`str`):
                What asked for it, for example `"SIGTERM"`.
        """
        self._run_control.requested = reason
        self._desk.cut_off(STOPPED)

    def _told_of_a_stop(self, reason: str) -> None:
        self.request_stop(f"{reason} of another process")

    def warm_up(self) -> None:
        """Ask every service once, on every rank, before anything waits for them.

        Raises:
            `ServiceUnavailable`: the 8B endpoint, or every judge, did not answer; on all ranks alike.
        """
        told: dict[str, float | ServiceError] = {}
        try:
            told = self._desk.warm_up()
            unusable = [str(error) for error in self._reward.unusable(told)]
        except ServiceError as error:  # of the reward process itself: the other ranks wait below
            unusable = [str(error)]
        figures = [result.code if isinstance(result, ServiceError) else result for result in told.values()]
        everywhere, failures = gather_object([figures]), gather_object(unusable)
        if self.accelerator.is_main_process and all(everywhere):
            for name, *results in zip(told, *everywhere, strict=True):
                codes = sorted({result for result in results if isinstance(result, str)})
                _PLAIN_LOGGER.info(f"[WarmUp] {name}: {', '.join(codes) if codes else f'{max(results):.2f} s'}")
        if failures:
            raise ServiceUnavailable(
                f"the services did not pass their warm-up, so nothing could be scored: {failures[0]} Mend the "
                "service and launch again (`warm_up_services: false` leaves the check out)."
            )

    def finish(self) -> None:
        """Close the reward's connections, on the event loop they belong to, and the instruments. The trainer can't
        score after this."""
        self.pipeline.forget()
        self._desk.close()
        self._instruments.close()

    def _phased(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as a phase of the step."""

        @functools.wraps(function)
        def phased(*args: Any, **kwargs: Any) -> Any:
            with self._timeline.phase(name):
                return function(*args, **kwargs)

        return phased

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        pull = super().get_batch_samples
        full = self.args.gradient_accumulation_steps  # an epoch's last step gets what is left
        with self._timeline.phase(Phase.DATA_LOADING):
            steps_left = self.state.max_steps - self.state.global_step
            return self.pipeline.next_update(
                self._epoch, epoch_iterator, lambda each: pull(each, full, device), steps_left
            )

    def _prepare_inputs(self, generation_batch):
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        self.pipeline.launch_due(self._step, self.state.global_step)
        inputs = super()._prepare_inputs(generation_batch)
        if self._waiting is None or self._waiting.groups is None:
            return inputs
        return self._next_micro_batch(self._waiting, self._waiting.groups)

    def _next_micro_batch(self, rollout: Rollout, groups: ScoredGroups) -> dict[str, Any]:
        """A micro-batch whose groups are scored. Where any rank has none, all ranks wait together."""
        while not groups.complete and self._on_any_rank(not groups.has_next):
            with self._timeline.phase(Phase.REWARD_WAIT):
                if not groups.has_next:
                    self._desk.wait(rollout.rewards, groups.pending)
                self.accelerator.wait_for_everyone()
            groups.release(self._score(rollout))
        micro_batch = groups.next()
        if groups.is_empty:
            self._waiting = None
        return micro_batch

    def training_step(self, *args, **kwargs):
        with self._timeline.phase(Phase.BATCHING):  # less the phases inside it
            loss = super().training_step(*args, **kwargs)
        self._run_control.record_micro_batch()
        if self.accelerator.sync_gradients:  # what comes until the step's end: clipping, the optimizer, the schedule
            self._timeline.begin(Phase.OPTIMIZER)
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self._timeline.phase(Phase.EVALUATION):
            return super().evaluate(*args, **kwargs)

    def _save_checkpoint(self, *args, **kwargs):
        with self._timeline.phase(Phase.CHECKPOINT):
            return super()._save_checkpoint(*args, **kwargs)

    def _build_sampler(self, build: Callable[[Upstream], Sampler] | None) -> Sampler:
        if build is not None:
            return build(
                Upstream(
                    generate=self._sample,
                    model=lambda: self.accelerator.unwrap_model(self.model),
                    step=lambda: self.state.global_step,
                    temperature=self.temperature,
                    max_completion_length=self.max_completion_length,
                    eos_token_ids=tuple(self.eos_token_ids),
                )
            )
        hindrance = why_not_streamed(
            use_vllm=self.use_vllm, has_rollout_func=self.rollout_func is not None, tokenizer=self._tokenizer
        )
        if not _is_on("rewards start as soon as a completion is finished", hindrance):
            return WholeBatch(self._sample, self.vllm_generation if self.use_vllm else self.generation_config)
        if self.args.vllm_mode == "server":
            return Background(self._sample, self.vllm_generation, self._ask_server)
        return Streamed(self._sample, self.vllm_generation)

    def _sample(self, prompts: Sequence[Any], tokens: TokenSource | None = None) -> Sampled:
        """TRL's own `_generate`. What it measures goes with the completions, to be logged when they are trained on."""
        was_training, mode, seen = self.model.training, self._mode, self.state.num_input_tokens_seen
        measured: dict[str, list[float]] = defaultdict(list)
        logged, self._metrics[mode], self._tokens = self._metrics[mode], measured, tokens
        try:
            generated = super()._generate(list(prompts))
            tokens_seen = self.state.num_input_tokens_seen - seen
        finally:
            self._metrics[mode], self._tokens = logged, None
            self.state.num_input_tokens_seen = seen
            self.model.train(was_training)  # transformers' continuous batching leaves it in training
        measured.pop("num_tokens")
        return Sampled(generated=generated, metrics=measured, tokens=tokens_seen)

    def _ask_server(self, prompts: Sequence[Any], finished: Finished) -> Requests:
        """Push the weights if they moved, as TRL's `_generate` does, and ask for completions without waiting."""
        with self.vllm_generation.begun(finished) as begun:
            self._generate_single_turn(*self._tokenize_prompts(copy.deepcopy(list(prompts))), self.num_generations)
        [requests] = begun
        return requests

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, *args, **kwargs):
        if self._tokens is not None:
            return self._tokens(prompt_ids, num_generations)
        return super()._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations, *args, **kwargs)

    def _generate(self, prompts):
        rollout = self._rollout
        assert rollout is not None
        assert rollout.sampled is not None
        measured, tokens = rollout.drain_metrics()
        metrics = self._metrics[self._mode]
        for name, values in measured.items():
            metrics[name].extend(values)
        self.state.num_input_tokens_seen += tokens
        metrics["num_tokens"] = [self.state.num_input_tokens_seen]
        return rollout.sampled.generated

    def _tool_call_loop(self, *args, **kwargs):
        raise ConfigError(_NO_TOOLS.format("a `rollout_func` that calls `_tool_call_loop`"))

    def _get_train_sampler(self, dataset: Dataset | None = None) -> DatasetSampler[int]:
        return OrderByEpoch(super()._get_train_sampler(dataset), lambda: self.pipeline.epoch)

    def _run_epoch(self, *args, epoch: int, train_dataloader, **kwargs):
        self._epoch = epoch
        self.pipeline.epoch_begins(train_dataloader)
        return super()._run_epoch(*args, epoch=epoch, train_dataloader=train_dataloader, **kwargs)

    def _rewards_so_far(self, rollout: Rollout, groups: ScoredGroups) -> torch.Tensor:
        """The rewards that are in, NaN for the rest, shape (world size x B, 1); a collective."""
        rewards = [_PENDING if reward is None else reward for reward in rollout.rewards.rewards]
        table = encode(rewards, self._branch_ids(rollout.inputs), self._reward.names.stages)  # (B, columns)
        settled = torch.tensor([[float(reward is not _PENDING)] for reward in rewards], dtype=torch.float64)
        gathered = gather(torch.cat((table, settled), dim=1).to(self.accelerator.device))  # (world size x B, ...)
        rollout.scored = gathered[:, :-1].cpu()
        values = gathered[:, 2:3].to(torch.float32)
        scored_fraction = (~torch.isnan(values)).float().mean().item()
        in_by_rank = gathered[:, -1].bool().view(-1, len(rewards)).cpu()  # (world size, B)
        groups.record(in_by_rank, self.accelerator.process_index, scored_fraction, self._run_control.wanted_fraction)
        return values

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rollout = self._rollout
        assert rollout is not None
        if rollout.groups is not None:
            rewards_so_far = self._rewards_so_far(rollout, rollout.groups)
            if not rollout.groups.complete:
                self._metrics["train"], self._logs = defaultdict(list), _copied(self._logs)  # logged when all are in
                self._timeline.begin(Phase.ADVANTAGES)
                return rewards_so_far
        with self._timeline.phase(Phase.REWARD_WAIT):
            result = rollout.result = self._desk.result(rollout.rewards, completions)
            with self._desk.answering(result):
                rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._timeline.begin(Phase.ADVANTAGES)
        mode = self._mode
        stages = self._reward.names.stages
        table = encode(result.rewards, self._branch_ids(inputs), stages).to(self.accelerator.device)  # (B, columns)
        rollout.scored = gather(table).cpu()  # (world size x B, columns)
        faulty = [reward for reward in result.rewards if reward.outcome is not Outcome.OK]
        failed = gather_object([(reward.reason, reward.value is None) for reward in faulty])
        self._ledger.record_rewards(mode, rollout.scored, (reason for reason, _ in failed))
        encoded = encode_report(result.report).to(self.accelerator.device)  # (1, columns)
        self._ledger.record_report(mode, gather(encoded).cpu())
        if mode == "train":
            report = result.report
            self._instruments.record_rewards(report.started, report.seconds, report.waits, report.spans)
            scored = ~torch.isnan(rewards_per_func).all(dim=1)  # (world size x B,), the same on every rank
            self._ledger.record_groups(scored, self.num_generations)
            missing = Counter(reason for reason, is_missing in failed if is_missing)
            skipped = self._run_control.record_batch(scored.float().mean().item(), missing)
            if skipped is not None:
                logger.warning(skipped)
        self._ledger.record_update(mode, is_skipped=self._run_control.is_skipping and mode == "train")
        if self.args.log_completions:
            self._log_components(result)
        return rewards_per_func

    def _branch_ids(self, inputs: list[dict[str, Any]]) -> list[int]:
        return [self.args.branches.index(self._reward.branch_of(example["row"])) for example in inputs]

    def _log_components(self, result: BatchResult) -> None:
        """What each reward was made of, beside TRL's table of completions."""
        rewards = result.rewards
        self._log_completion_extra("outcome", [reward.outcome.value for reward in rewards])
        self._log_completion_extra("reason", [reward.reason for reward in rewards])
        for name in self._reward.names.components:
            self._log_completion_extra(name, [reward.components.get(name) for reward in rewards])

    def _generate_and_score_completions(self, inputs):
        update = self.state.global_step
        if not self.model.training:
            self._evaluated = self.pipeline.evaluate(inputs, update)
            return self._score(self._evaluated)
        self._waiting = None
        rollout = self.pipeline.take(inputs, self._step, update)
        if self._divisible and self._weight_check.is_done:
            size = self.args.per_device_train_batch_size
            rollout.groups = ScoredGroups(len(inputs), size, self.num_generations)
        output = self._score(rollout)
        if rollout.groups is None or rollout.groups.complete:
            rollout.groups = None  # nothing to wait for: TRL's own way
        else:
            self._waiting = rollout
            rollout.groups.release(output)
        return output

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _score(self, rollout: Rollout) -> dict[str, Any]:
        """TRL's log-probs, advantages and figures of a generation batch.

        While the batch is trained on part by part and rewards are pending: without the figures, and with final
        advantages for scored groups alone.
        """
        mode = self._mode
        self._rollout, aside = rollout, (self._metrics[mode], self._logs)
        try:
            output = super()._generate_and_score_completions(rollout.inputs)
        finally:
            self._rollout = None
        is_complete = rollout.groups is None or rollout.groups.complete
        if not is_complete:
            self._metrics[mode], self._logs = aside
        if is_complete:
            self._check_weights(output)
            self._record_staleness(rollout, output)
        branch_ids = torch.tensor(self._branch_ids(rollout.inputs))  # (B,)
        output["branch_ids"] = branch_ids.to(self.accelerator.device, non_blocking=True)
        if rollout.behaviour_logps is not None:
            output["old_per_token_logps"] = rollout.behaviour_logps  # (B, C)
        if self.args.hybrid_reference_weight and mode == "train":
            output["advantages"] = self._hybrid_advantages(rollout, is_complete)
        if self._run_control.is_skipping and is_complete and mode == "train":
            # No token counts: the loss and its gradient are zero under every normaliser.
            output["completion_mask"] = torch.zeros_like(output["completion_mask"])
            output["advantages"] = torch.zeros_like(output["advantages"])
        self._timeline.end(Phase.ADVANTAGES)
        return output

    def _record_staleness(self, rollout: Rollout, output: dict[str, Any]) -> None:
        """How far behind the sampler's weights are, and what the correction for them does; a collective."""
        self._ledger.record_staleness(self._mode, self.state.global_step - rollout.step)
        ratio = output.get("importance_sampling_ratio")
        if ratio is None:
            return
        args = self.args
        clips = (args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max)
        sums = correction_sums(ratio, output["completion_mask"], args.vllm_importance_sampling_mode, *clips)
        self._ledger.record_correction(self._mode, *self.accelerator.reduce(sums, reduction="sum").tolist())

    def _hybrid_advantages(self, rollout: Rollout, is_complete: bool) -> torch.Tensor:
        """This rank's advantages against the hybrid baseline, shape (B,), in place of TRL's also in its table."""
        assert rollout.scored is not None
        values, references = rollout.scored.to(torch.float32)[:, [2, 4]].unbind(dim=1)  # each (world size x B,)
        weight = self.reward_weights[0].item()
        advantages, missing = hybrid_advantages(
            values * weight,
            references * weight,
            self.num_generations,
            self.args.hybrid_reference_weight,
            self.scale_rewards,
        )
        if is_complete:
            self._ledger.record_baselines(missing)
            logged = self._logs["advantages"]
            for index, advantage in enumerate(advantages.tolist(), start=len(logged) - len(advantages)):
                logged[index] = advantage
        size = len(rollout.inputs)
        first = self.accelerator.process_index * size
        return advantages[first : first + size].to(self.accelerator.device)

    def _compute_loss(self, model, inputs):
        if self.model.training:
            self._instruments.record_batch(inputs["prompt_mask"], inputs["completion_mask"])
        if self._kl is None:
            with self._timeline.phase(Phase.FORWARD):
                return super()._compute_loss(model, inputs)
        penalty = self._kl.penalty(inputs)
        with replaced(self, "beta", penalty), self._timeline.phase(Phase.FORWARD):
            loss = super()._compute_loss(model, penalty.inputs)
            self._kl.add(penalty)
        if self.accelerator.sync_gradients:
            self._follow_kl(self._kl)
        return loss

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        if isinstance(self.beta, BranchPenalty):
            logps, *others = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
            return self.beta.record_logps(logps), *others
        if torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        is_reference = self._reference.is_active(model)
        kept = {} if self._rollout is None else self._rollout.logps
        if is_reference in kept:  # TRL goes over the same batch again
            return kept[is_reference], None, None
        with self._timeline.phase(Phase.REFERENCE_LOGPROBS if is_reference else Phase.OLD_LOGPROBS):
            output = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if self._rollout is not None and self._rollout.groups is not None:
            kept[is_reference] = output[0]
        return output

    def _behaviour_logps(self, sampled: Sampled) -> torch.Tensor:
        device = self.accelerator.device
        return self._logps_of(sampled.padded(self._tokenizer.pad_token_id, self.pad_to_multiple_of, device))

    def _logps_of(self, output: Mapping[str, Any]) -> torch.Tensor:
        """Log-probs of a generation batch's completions under the policy as it is, shape (B, T)."""
        ids = torch.cat((output["prompt_ids"], output["completion_ids"]), dim=1)  # (B, P + T)
        attended = torch.cat((output["prompt_mask"], output["completion_mask"]), dim=1)  # (B, P + T)
        size, length = self.args.per_device_train_batch_size, output["completion_ids"].size(1)
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            return self._get_per_token_logps_and_entropies(self.model, ids, attended, length, batch_size=size)[0]

    def _follow_kl(self, kl: BranchedKL) -> None:
        """One optimizer step's KL over all ranks: the coefficients of the next step, and figures."""
        totals = self.accelerator.reduce(kl.drain_sums(), reduction="sum").tolist()
        mode, betas = "train" if self.model.training else "eval", kl.betas
        if mode == "train":
            kl.end_step(totals, self.state.global_step + 1, is_logged=self.accelerator.is_main_process)
        self._ledger.record_kl(mode, totals, betas, kl.control)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._kl is not None and self.args.should_save:
            self._kl.save(Path(output_dir))
        if self.args.should_save:
            write_identity(Path(output_dir), self._identity, self._is_inside_a_window)
        if self._is_inside_a_window and not self._run_control.is_skipping:
            under_way: Any = self._buffered_inputs  # inside a window there are some
            save_under_way(Path(output_dir), self.args.process_index, self._arrangement, under_way)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        if self._is_inside_a_window:
            self._go_on_inside_a_window(Path(checkpoint))
        if self._kl is not None:
            self._kl.load(Path(checkpoint))

    def _go_on_inside_a_window(self, checkpoint: Path) -> None:
        """With the generation batch of the checkpoint, as far as it was not trained on."""
        batches = load_under_way(checkpoint, self.args.process_index, self._arrangement, self.accelerator.device)
        if self._on_any_rank(batches is None):  # all alike: TRL generates where it has none, which is a collective
            logger.warning(
                f"{checkpoint} lies inside a generation batch whose completions it does not hold, or not for this "
                "number of processes and these batch sizes: they are generated anew, from the same prompts"
            )
        else:
            self._buffered_inputs = batches

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        with self._timeline.phase(Phase.LOGGING):
            self._log_with_figures(logs, start_time)

    def _log_with_figures(self, logs: dict[str, float], start_time: float | None) -> None:
        mode = "train" if self.model.training else "eval"
        if self._metrics[mode]:  # transformers also logs summaries, at which nothing was measured
            figures = self._ledger.flush(mode)
            if mode == "train":
                figures |= self._instruments.figures(self.accelerator)
            for name, value in figures.items():
                self._metrics[mode][name] = [value]
        is_a_step = mode == "train" and bool(self._metrics[mode])
        super().log(logs, start_time)
        failures = self._ledger.drain_failures(mode)
        if is_a_step and failures:
            # An entry of its own: the entry of a step has the same keys at every step, but new reasons may come.
            Trainer.log(self, {**failures})

    def _maybe_log_save_evaluate(self, *args, **kwargs):
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self._quick_eval is not None and self._run_control.error is None:
            self._quick_eval.evaluate_if_due(self.state.global_step)

    def _quick_evaluator(self, settings: QuickEvalSettings) -> QuickEvaluator:
        args, kl, ranks = self.args, self._kl, Processes()
        subject = GreedySubject(
            set_aside=self._set_aside_for_greedy_answers,
            score=self._score_greedy_answers,
            logps_of=self._logps_of,
            decode=lambda ids: self._tokenizer.batch_decode(ids, skip_special_tokens=True),
            branch_of=self._reward.branch_of,
            ends=frozenset({*self.eos_token_ids, self._tokenizer.pad_token_id}),
            batch_size=args.per_device_eval_batch_size,
            kl=args.kl_penalty(),
            betas=lambda: {} if kl is None else dict(zip(args.branches, kl.betas, strict=True)),
            save=lambda folder: self.save_model(str(folder), _internal_call=True),  # pushes to no hub
            log=functools.partial(Trainer.log, self),
        )
        return QuickEvaluator(
            subject,
            sample(self.eval_dataset, self._reward.branch_of, settings.rows, args.branches, ranks),
            branches=args.branches,
            settings=settings,
            output_dir=Path(args.output_dir),
            least_scored=args.min_valid_reward_fraction,
            ranks=ranks,
            timeline=self._timeline,
        )

    def _score_greedy_answers(self, rows: Sequence[Row]) -> ScoredBatch:
        output = self._generate_and_score_completions([dict(row) for row in rows])
        rollout = self._evaluated
        assert rollout is not None
        assert rollout.sampled is not None
        assert rollout.result is not None
        return ScoredBatch(
            output=output, completion_ids=rollout.sampled.completion_ids, rewards=rollout.result.rewards
        )

    @contextlib.contextmanager
    def _set_aside_for_greedy_answers(self) -> Iterator[None]:
        """While active, the policy is in evaluation mode, and each prompt has one answer of the likeliest tokens.
        The figures of other evaluations, and TRL's table of completions, stay as they are."""
        was_training = self.model.training
        self.model.eval()
        try:
            with (
                self._sampler.greedily(),
                self._ledger.aside("eval"),
                replaced(self, "num_generations_eval", 1),
                replaced(self, "_metrics", {**self._metrics, "eval": defaultdict(list)}),
                replaced(self, "_logs", copy.deepcopy(self._logs)),
            ):
                yield
        finally:
            self.model.train(was_training)

    def _agree_to_stop(self, step: int) -> None:
        """Stop after this step, which has just ended, where any rank was asked to; a collective."""
        if self._on_any_rank(self._run_control.requested is not None):
            self._run_control.stop(step)

    def _drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _on_any_rank(self, condition: bool) -> bool:
        """Whether it is true on any rank; a collective."""
        if self.accelerator.num_processes == 1:
            return condition
        return bool(gather(torch.tensor([condition], device=self.accelerator.device)).any())

    def _check_weights(self, output: dict[str, Any]) -> None:
        """Stop a run whose first batch shows that vLLM does not have the training weights; a collective."""
        check, sampled = self._weight_check, output.get("sampling_per_token_logps")
        if check.is_done or self.vllm_generation.temperature != self.temperature:
            return  # or an evaluation answers greedily
        if sampled is None:
            check.skip("these rollouts come without log-probs")
            return
        ours = output.get("old_per_token_logps")  # (B, T)
        if ours is None:  # nothing else needs them
            ours = self._logps_of(output)
        sums = logp_difference(ours, sampled, loss_mask(output))  # (3,)
        hints = ""
        if self.args.reshaped_sampling():
            hints = f"Its log-probs are of what {', '.join(self.args.reshaped_sampling())} leaves. "
        hints += "Check `vllm_dtype`, `vllm_engine_kwargs` and a server's `--logprobs-mode processed_logprobs`; "
        hints += "a raised `max_sampling_logp_difference` only hides it."
        if has_tied_head(self.accelerator.unwrap_model(self.model)):
            hints = f"The output head is tied to the embedding: on a CPU use an untied model. {hints}"
        check.see(self.accelerator.reduce(sums, reduction="sum"), hints)


class _Steps(TrainerCallback):
    """Tells the instruments where steps begin and end."""

    def __init__(self, trainer: SalesGRPOTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        trainer = self._trainer
        if trainer.is_deepspeed_enabled:  # its optimizer steps inside `backward`
            engine = trainer.accelerator.deepspeed_engine_wrapped
            engine.engine.step = trainer._phased(Phase.OPTIMIZER, engine.engine.step)
        if trainer._quick_eval is not None:
            trainer._quick_eval.run_begins(state.global_step)
        trainer.pipeline.restart(trainer._step, trainer.state.global_step, trainer._buffered_inputs is not None)
        trainer._instruments.record_model(trainer.accelerator.unwrap_model(trainer.model))
        trainer._timeline.end(StartUp.PREPARE)
        trainer._instruments.run_begins(state.global_step, state.max_steps)
        if trainer._quick_eval is not None:
            trainer._quick_eval.evaluate_if_due(state.global_step)  # where the run stopped before it had made one

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer._timeline.end(Phase.OPTIMIZER)
        self._trainer._instruments.step_ends()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer.pipeline.forget()
        self._trainer._timeline.stops()


def _is_on(feature: str, hindrance: str | None) -> bool:
    """Whether nothing hinders it. What does is logged once."""
    if hindrance is not None:
        logger.info(f"off: {feature}, because {hindrance}")
    return hindrance is None


def _copied(logs: dict[str, Any]) -> dict[str, Any]:
    """TRL's tables of completions, to be added to without a trace in these."""
    copies = {}
    for name, table in logs.items():
        copies[name] = copy.copy(table)
        if isinstance(table, dict):
            copies[name].update({column: copy.copy(values) for column, values in table.items()})
    return copies


def _engine_options(model: PreTrainedModel, args: SalesGRPOConfig) -> dict[str, Any]:
    extra = args.parsed_engine_kwargs()
    if args.use_vllm and args.vllm_mode == "server" and (extra or args.vllm_load_format != "auto"):
        raise ConfigError(
            "`vllm_load_format` and `vllm_engine_kwargs` set up the colocated engine. With `vllm_mode: server` give "
            "them to the server's command line."
        )
    process = args.process_index // args.vllm_tensor_parallel_size
    return engine_kwargs(
        enforce_eager=args.device.type == "cpu" if args.vllm_enforce_eager is None else args.vllm_enforce_eager,
        load_format=args.vllm_load_format,
        dtype=vllm_dtype(args.vllm_dtype, bf16=args.bf16, fp16=args.fp16, model_dtype=model.dtype),
        seed=args.seed * 1000 + process,  # a group of tensor-parallel ranks samples alike, every other one differently
        extra=extra,
    )
