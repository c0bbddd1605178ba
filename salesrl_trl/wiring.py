"""Everything beside TRL that a trainer works with, built and wired.

Owns the order in which the rooms are built, and which of them gets which. Owns no logic, and no trainer: TRL's part
comes as values and bound callables.

1. `Wiring` before TRL's trainer is built: all that needs settings alone.
2. `connect` when TRL's trainer is there: what generates and scores by TRL's own methods (`Hooks`).
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_callback import CallbackHandler

from salesrl_trl.checkpoint.identity import weights_of
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.config.rollouts import sampling_hints, sampling_warnings, scoring_settings, why_not_divisible
from salesrl_trl.evaluation.answers import Processes, Row
from salesrl_trl.evaluation.held_out import HeldOut
from salesrl_trl.evaluation.quick import QuickEvaluator
from salesrl_trl.evaluation.record import QuickEvalSettings
from salesrl_trl.evaluation.sample import sample
from salesrl_trl.generation.sampler import Ask, Generate, Sampled, Sampler, Upstream, trl_sampler, why_not_streamed
from salesrl_trl.generation.vllm import has_tied_head
from salesrl_trl.kl.branched import BranchedKL
from salesrl_trl.kl.law import KLLaw
from salesrl_trl.kl.reference import Reference
from salesrl_trl.names import Phase
from salesrl_trl.reward.base import BatchedReward
from salesrl_trl.reward.desk import RewardDesk
from salesrl_trl.rollout.greedy import GreedySubject, ScoredBatch
from salesrl_trl.rollout.pipeline import Pipeline, Rollout
from salesrl_trl.rollout.scoring import Output, Scoring
from salesrl_trl.telemetry.instruments import DEFAULT_TRACED_STEPS, Instruments, InstrumentSettings
from salesrl_trl.telemetry.layout import ScalarLayout
from salesrl_trl.telemetry.step_lines import StepLine
from salesrl_trl.telemetry.steps import StepMarks
from salesrl_trl.update.callbacks import SkipAndStop
from salesrl_trl.update.ledger import Ledger
from salesrl_trl.update.run_control import RunControl
from salesrl_trl.update.stopping import Stopping
from salesrl_trl.update.weights import WeightChange, WeightCheck, raise_adapters

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hooks:
    """TRL's trainer, as far as the rooms use it."""

    model: torch.nn.Module
    """The policy, with its adapter if there is one."""
    unwrapped: Callable[[], torch.nn.Module]
    """The policy without the wrappers of distributed training."""
    ref_model: torch.nn.Module | None
    """TRL's own copy of the reference policy."""
    step: Callable[[], int]
    """Optimizer steps done."""
    accelerator: Any
    """accelerate's `Accelerator`, which publishes no types."""
    is_deepspeed: bool
    """Whether DeepSpeed owns the optimizer."""
    engine: Any
    """What generates: TRL's `VLLMGeneration`, or transformers' `GenerationConfig`."""
    has_rollout_func: bool
    """Whether a `rollout_func` generates."""
    tokenizer: Any
    """The policy's tokenizer. transformers publishes no types."""
    processing_class: Any
    """TRL's, which decodes completions."""
    eos_token_ids: Sequence[int]
    """Tokens that end a completion."""
    temperature: float
    """Of sampling."""
    reward_weight: float
    """TRL's weight of the reward."""
    has_entropy_bonus: bool
    """Whether the loss has an entropy bonus."""
    has_aux_loss: bool
    """Whether the loss has the auxiliary loss of a mixture's router."""
    num_generations_eval: int
    """Completions of a held-out row."""
    generate: Generate
    """TRL's `_generate`."""
    ask: Ask
    """The same of a server, without waiting."""
    logps_of: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
    """Log-probs of a batch's completions under the policy as it is, shape (B, T)."""
    behaviour_logps: Callable[[Sampled], torch.Tensor]
    """The same of completions that were just sampled."""
    score: Callable[[Rollout], Output]
    """TRL's `_generate_and_score_completions`."""
    replace_advantages: Callable[[Sequence[float]], None]
    """In TRL's table of completions."""
    set_aside: Callable[[], AbstractContextManager[None]]
    """While active: evaluation mode, one completion a prompt, and TRL's figures stay as they are."""
    drop_gradients: Callable[[], None]
    """Sets all gradients to `None`."""
    save: Callable[[Path], None]
    """Writes the policy into a folder."""
    log: Callable[[Mapping[str, float | None]], None]
    """Adds an entry to the log, without what TRL gathers for a step."""
    callbacks: CallbackHandler
    """TRL's callbacks."""
    eval_dataset: Any
    """Held-out rows."""
    run_begins: Callable[[], None]
    """Called before the first step of a run."""


class Wiring:
    """The rooms of one trainer.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            The policy.
        reward (`BatchedReward`):
            Scores completions.
        args (`SalesGRPOConfig`):
            Settings.
        instruments (`Instruments`, *optional*):
            What is measured of the run. Phases, heartbeats, and a trace of the first 50 steps when not given.
        kl_law (`KLLaw`, *optional*):
            Moves the KL coefficients in place of the law that `args` sets.
        gets_adapter (`bool`):
            Whether TRL will put an adapter on the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        reward: BatchedReward,
        args: SalesGRPOConfig,
        instruments: Instruments | None,
        kl_law: KLLaw | None,
        gets_adapter: bool,
    ) -> None:
        self.args = args
        self.reward = reward
        self.desk = RewardDesk(reward)
        self.instruments = instruments or Instruments(
            InstrumentSettings(trace_steps=DEFAULT_TRACED_STEPS), args.device, Path(args.output_dir)
        )
        self.instruments.details |= dict.fromkeys((Phase.REWARD_WAIT, Phase.EVALUATION), self.desk.status)
        self.timeline = self.instruments.timeline
        targets, law = args.kl_targets(), args.kl_control_law(kl_law)
        self.kl = BranchedKL(targets, law, args.kl_windows(), args.kl_penalty()) if targets else None
        self._banded = [branch for branch, target in targets.items() if target.has_band]
        self.ledger = Ledger(
            args.branches,
            reward.names.providers,
            reward.names.services,
            reward.names.stages,
            with_kl=bool(targets),
            with_baseline=bool(args.hybrid_reference_weight),
        )
        self.run_control = RunControl(
            args.min_valid_reward_fraction, args.max_skipped_generations, reward.names.places
        )
        self.weight_check = WeightCheck(args.max_sampling_logp_difference, sampling_hints(args, has_tied_head(model)))
        # The reference policy, or an adapter's base: the run is as long as it lasts about these weights
        has_base = bool(targets) or gets_adapter or hasattr(model, "peft_config")
        self.first_weights = weights_of(model.named_parameters()) if has_base else None

    def connect(self, trl: Hooks, sampler: Callable[[Upstream], Sampler] | None) -> None:
        """Build what works on TRL's own methods.

        Args:
            trl (`Hooks`):
                TRL's trainer.
            sampler (`Callable[[Upstream], Sampler]`, *optional*):
                Makes another generation engine than TRL's.
        """
        args = self.args
        self.stopping = Stopping(self.run_control, self.desk, trl.accelerator.device, trl.step)
        self.reference = Reference(trl.model, trl.ref_model)
        if self.reference.has_adapter and not trl.is_deepspeed:
            raise_adapters(trl.model, args.bf16 or args.fp16)
        for warning in sampling_warnings(args):
            logger.warning(warning)
        self.sampler = self._sampler(trl, sampler or args.sampler_class())
        # Threads share no tokenizer: completions of a server are decoded in another one than prompts are encoded in.
        decoder = copy.deepcopy(trl.processing_class) if self._is_served else trl.processing_class
        self.pipeline = Pipeline(
            self.sampler,
            self.desk,
            self.timeline,
            decode=functools.partial(decoder.decode, skip_special_tokens=True),
            window=args.window,
            lookahead=args.rollout_lookahead,
            references_ahead=args.references_ahead,
            behaviour_logps=trl.behaviour_logps,
            record_span=self.instruments.record_generation,
        )
        self.scoring = Scoring(
            self.pipeline,
            self.desk,
            self.ledger,
            self.instruments,
            self.run_control,
            scoring_settings(args, self.reward.names.stages, trl.reward_weight),
            trl.accelerator.device,
            score=trl.score,
            replace_advantages=trl.replace_advantages,
        )
        hindrance = why_not_divisible(args, trl.has_entropy_bonus, trl.has_aux_loss)
        self.in_groups = args.scored_groups_first and hindrance is None
        if args.scored_groups_first and hindrance is not None:
            logger.info(f"off: scored groups first, because {hindrance}")
        self._wrap_phases(trl)

    @property
    def _is_served(self) -> bool:
        return bool(self.args.use_vllm) and self.args.vllm_mode == "server"

    def _sampler(self, trl: Hooks, build: Callable[[Upstream], Sampler] | None) -> Sampler:
        if build is None:
            hindrance = why_not_streamed(
                use_vllm=self.args.use_vllm, has_rollout_func=trl.has_rollout_func, tokenizer=trl.tokenizer
            )
            return trl_sampler(trl.generate, trl.ask, trl.engine, is_served=self._is_served, hindrance=hindrance)
        return build(
            Upstream(
                generate=trl.generate,
                model=trl.unwrapped,
                step=trl.step,
                temperature=trl.temperature,
                max_completion_length=self.args.max_completion_length,
                eos_token_ids=tuple(trl.eos_token_ids),
            )
        )

    def _wrap_phases(self, trl: Hooks) -> None:
        trl.accelerator.backward = self.timeline.phased(Phase.BACKWARD, trl.accelerator.backward)
        if not self.args.use_vllm:
            self.weight_check.skip("transformers generates with the trainer's own model")
            return
        trl.engine.sync_weights = self.timeline.phased(Phase.WEIGHT_PUSH, trl.engine.sync_weights)
        trl.engine.settle = self.timeline.phased(Phase.GENERATION, trl.engine.settle)

    def callbacks(self, trl: Hooks, evaluate: Callable[[], None]) -> tuple[list[TrainerCallback], ...]:
        """The callbacks of a run.

        Args:
            trl (`Hooks`):
                TRL's trainer.
            evaluate (`Callable[[], None]`):
                Makes a quick evaluation where one is due.

        Returns:
            `tuple[list[TrainerCallback], ...]`: those that act first, those that print in place of transformers' own,
            and those that act behind them.
        """
        args, failures = self.args, functools.partial(self.ledger.failures, "train")
        first: list[TrainerCallback] = [
            SkipAndStop(self.run_control, trl.drop_gradients, self.stopping.agree),
            StepMarks(self.instruments, trl.run_begins, evaluate, self.pipeline.forget),
        ]
        printing: list[TrainerCallback] = [
            StepLine(args.branches, self.reward.names.providers, failures),
            HeldOut(args.branches, Path(args.output_dir), self.ledger.drain_eval_rewards, trl.num_generations_eval),
            ScalarLayout(args.branches, self._banded, trl.callbacks.callbacks),
        ]
        return first, printing, [WeightChange(trl.accelerator, args.min_changed_weights, trl.log)]

    def quick_evaluator(self, trl: Hooks, settings: QuickEvalSettings | None) -> QuickEvaluator | None:
        """Greedy evaluations every few steps, where there are any.

        Args:
            trl (`Hooks`):
                TRL's trainer.
            settings (`QuickEvalSettings`, *optional*):
                When and on how much.
        """
        if settings is None or not settings.steps:
            return None
        args, kl, ranks = self.args, self.kl, Processes()
        subject = GreedySubject(
            set_aside=trl.set_aside,
            score=self._score_greedy_answers(trl),
            logps_of=trl.logps_of,
            decode=lambda ids: trl.tokenizer.batch_decode(ids, skip_special_tokens=True),
            branch_of=self.reward.branch_of,
            ends=frozenset({*trl.eos_token_ids, trl.tokenizer.pad_token_id}),
            batch_size=args.per_device_eval_batch_size,
            kl=args.kl_penalty(),
            betas=lambda: {} if kl is None else dict(zip(args.branches, kl.betas, strict=True)),
            save=trl.save,
            log=trl.log,
        )
        return QuickEvaluator(
            subject,
            sample(trl.eval_dataset, self.reward.branch_of, settings.rows, args.branches, ranks),
            branches=args.branches,
            settings=settings,
            output_dir=Path(args.output_dir),
            least_scored=args.min_valid_reward_fraction,
            ranks=ranks,
            timeline=self.timeline,
        )

    def _score_greedy_answers(self, trl: Hooks) -> Callable[[Sequence[Row]], ScoredBatch]:
        def score(rows: Sequence[Row]) -> ScoredBatch:
            rollout, output = self.scoring.evaluate([dict(row) for row in rows], trl.step())
            assert rollout.sampled is not None and rollout.result is not None
            ids, rewards = rollout.sampled.completion_ids, rollout.result.rewards
            return ScoredBatch(output=output, completion_ids=ids, rewards=rewards)

        return score

    def forget_run(self) -> None:
        """Leave nothing of an earlier run in the next: it may have ended anywhere, by an interruption too."""
        self.pipeline.forget()
        self.scoring.forget()
        if self.kl is not None:
            self.kl.forget_sums()
        self.ledger.clear()
        self.run_control.restart()
        self.desk.resume()

    def close_failed_run(self) -> None:
        """A run has failed: nothing that was measured of the step that failed is lost."""
        self.timeline.add(self.desk.unreported_spans())
        self.pipeline.forget()
        self.instruments.close()

    def close(self) -> None:
        """Close the reward's connections and the instruments. Nothing can be scored after this."""
        self.pipeline.forget()
        self.desk.close()
        self.instruments.close()
