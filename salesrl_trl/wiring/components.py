"""The components of a trainer: built before TRL's own, then connected to it through `Hooks`. Defines the order of
construction and what happens when a run fails. Never holds the trainer."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from transformers import TrainerCallback

from salesrl_trl.checkpoint.keeper import Keeper, why_not_kept
from salesrl_trl.config import SalesGRPOConfig, rollouts
from salesrl_trl.config.checks import from_fields
from salesrl_trl.config.quick_evaluations import QuickEvalSettings
from salesrl_trl.config.trl_settings import load_sampler
from salesrl_trl.data.branches import Branches
from salesrl_trl.generation.sampler import Sampled, Sampler, TRLSampler, Upstream
from salesrl_trl.kl.branched import BranchedKL
from salesrl_trl.kl.law import KLLaw
from salesrl_trl.names import Phase, StartUp
from salesrl_trl.reward.figures import RewardFigures
from salesrl_trl.reward.reward_funcs import RewardFuncs
from salesrl_trl.rollout.buffer import BufferPolicy
from salesrl_trl.rollout.pipeline import Pipeline
from salesrl_trl.rollout.rollout_launcher import Launcher
from salesrl_trl.rollout.rollout_scoring import RolloutScoring, ScoringSettings
from salesrl_trl.telemetry.instruments import Instruments, InstrumentSettings, StepMarks
from salesrl_trl.telemetry.logs import hide_lines, show_lines
from salesrl_trl.telemetry.timeline import phased
from salesrl_trl.update.ledger import Ledger
from salesrl_trl.update.run_control import MAX_OUTAGE_S, RunControl
from salesrl_trl.update.stopping import Stopping
from salesrl_trl.wiring.part import Part, connect_parts
from salesrl_trl.wiring.policy import Policy, Reference
from salesrl_trl.wiring.trl_access import Hooks

logger = get_logger(__name__)


class Components:
    """The components of one trainer, and the `PartContext` of its parts. `instruments` default to phases, heartbeats,
    and a trace of the first 50 steps. `kl_law` replaces the KL controller set in `args`. `gets_adapter`: TRL will add
    an adapter to the model."""

    def __init__(
        self, rewards: RewardFuncs, args: SalesGRPOConfig, instruments: Instruments | None, kl_law: KLLaw | None,
        train_dataset: object, gets_adapter: bool, parts: Sequence[Part] = (),
    ) -> None:  # fmt: skip
        show_lines()
        hide_lines()
        self.args = args
        self._rewards = rewards
        self._own_parts = parts
        self.parts: list[Part] = []  # built-in parts, then the user's; filled once TRL's trainer is built
        self.reward_loop = rewards.reward_loop
        reward = self.reward = self.reward_loop.reward
        self._rows: Any = train_dataset
        self.branches = Branches.of_data(args.branches, train_dataset)
        args.branches = [*self.branches.names]
        settings = InstrumentSettings(trace_steps=range(1, 51))
        self.instruments = instruments or Instruments(settings, args.device, Path(args.output_dir))
        self.instruments.details[Phase.REWARD_WAIT] = self.reward_loop.status
        self.instruments.details[Phase.EVALUATION] = lambda: self.reward_loop.status(self._who_generates())
        self.instruments.details[Phase.GENERATION] = self._who_generates
        self.timeline = self.instruments.timeline
        targets, law = args.kl_targets(), args.kl_settings.law_of(kl_law)
        self.kl = BranchedKL(targets, law, args.kl_settings.windows, args.kl_penalty()) if targets else None
        self.policy = Policy(args, self.kl is not None, gets_adapter)
        self.figures = RewardFigures(args.branches, reward.names)
        lines = {"baseline": args.hybrid_reference_weight, "refill": args.refill_groups}
        further = [line for line, setting in lines.items() if setting]
        own = [name for part in parts for name in part.figure_names]
        self.ledger = Ledger(self.figures, with_kl=bool(targets), further=further, own=own)
        self.run_control = from_fields(RunControl, args, max_outage_s=MAX_OUTAGE_S)
        self.keeper = Keeper(args, self.kl, self.run_control, self.parts)

    def connect(
        self, trl: Hooks, sampler: Callable[[Upstream], Sampler] | None, quick_eval: QuickEvalSettings | None,
        policy: BufferPolicy | None = None,
    ) -> list[TrainerCallback]:  # fmt: skip
        """Build what uses TRL's methods. Returns the run's callbacks, in order. `sampler` creates a custom engine."""
        self.trl, args = trl, self.args
        # 1. reject settings and rewards incompatible with TRL's arguments
        own = sampler or load_sampler(args.sampler)
        inside_trl = self._why_inside_trl(trl, own is not None)
        rollouts.check_rewards(args, inside_trl, trl.reward_answered, self.reward.names)
        size = args.per_device_train_batch_size * args.steps_per_generation
        # 2. stopping, the reference, and preparation of both models
        self.stopping = Stopping(run_control=self.run_control, trl=trl, can_undo=not trl.is_deepspeed)
        model = trl.model()
        self.reference = Reference(model, trl.ref_model)
        if self.reference.has_adapter and not trl.is_deepspeed:
            self.policy.raise_adapters(model)
        for warning in (*args.machine_notes, *rollouts.sampling_warnings(args)):
            logger.warning(warning)
        # 3. rollouts, and their order
        rollouts.check_pictures_ahead(args, trl.reads_pictures and own is None)
        self._connect_rollouts(trl, own, inside_trl)
        at_once = self._rewards.why_at_once(args.num_generations, size, inside_trl and trl.tools)
        # a function may score a whole batch before zero-variance groups are known
        answers_alone = all(trl.reward_answered) and not inside_trl
        talks = trl.tools is not None or self.reward.is_played
        self.pipeline.buffer.policy = rollouts.buffer_policy_of(
            args, policy, lambda: rollouts.why_in_turn(args, talks, trl.reads_pictures)
            or why_not_kept(self._rows), at_once, None if answers_alone else at_once,
        )  # fmt: skip
        self.normaliser = rollouts.normaliser_of(args, trl.has_entropy_bonus, trl.has_aux_loss)
        in_trls_order = rollouts.why_in_trls_order(args, trl.has_entropy_bonus, trl.has_aux_loss)
        reason = in_trls_order or at_once or rollouts.why_not_divisible(args)
        if self.pipeline.buffer.chooses:
            reason = "groups are chosen individually, and a step begins once all of its groups are scored"
        self.in_groups = args.scored_groups_first and reason is None
        if args.scored_groups_first and reason is not None:
            logger.info(f"off: `scored_groups_first`, because {reason}")
        # 4. the model computations of an update, and their phases
        self.passes = rollouts.passes_of(args, trl.accelerator, model, self.ledger, in_trls_order)
        trl.accelerator.backward = phased(self.timeline, Phase.BACKWARD, trl.accelerator.backward)
        if args.use_vllm:
            engine: Any = trl.engine
            engine.steps_done = trl.step
            engine.sync_weights = phased(self.timeline, Phase.WEIGHT_PUSH, engine.sync_weights)
            engine.settle = phased(self.timeline, Phase.GENERATION, engine.settle)
        else:
            self.policy.weight_check.skip("transformers generates with the trainer's own model")
        # 5. the parts
        self.recorded_weights: Mapping[str, float] = self._rewards.recorded_weights
        self.quick_eval = quick_eval
        connect_parts(self, self.parts, self._own_parts)
        return [
            self.stopping,
            StepMarks(self.instruments, self._begin, self.step_is_over, self.pipeline.forget),
            *self.parts,
        ]

    def _who_generates(self) -> str:
        if words := next(filter(None, (part.busy_with() for part in self.parts)), None):
            return words
        if self.args.use_vllm:
            return f"vLLM generates{' on its server' if self.args.vllm_mode == 'server' else ''}"
        return f"{self.args.sampler or 'transformers'} generates on the {self.args.device.type.upper()}, without vLLM"

    def _why_inside_trl(self, trl: Hooks, has_own_engine: bool) -> str | None:
        """Why generation happens inside TRL's scoring; `None` if it does not, e.g. without tools."""
        args = self.args
        if trl.tools is None and not self.reward.is_played:
            return None
        splits = args.use_vllm and args.vllm_mode == "colocate" and args.vllm_tensor_parallel_size > 1
        reason = rollouts.first({
            "`sampler` is a custom engine, which generates whole batches": has_own_engine,
            "the policy's processor encodes the images of a whole batch": trl.reads_pictures,
            "tensor parallelism generates a batch across processes": splits,
            "`rollout_func` generates whole batches": trl.tools == "an environment" and trl.has_rollout_func,
        })  # fmt: skip
        if self.reward.is_played or trl.partner is not None:
            rollouts.check_alone(trl.tools, self.reward.is_played, trl.has_rollout_func, reason)
        if reason is not None:
            logger.info(f"off: independent turns of conversations with tools, because {reason}")
        return reason

    def _connect_rollouts(
        self, trl: Hooks, build: Callable[[Upstream], Sampler] | None, inside_trl: str | None
    ) -> None:
        args = self.args
        is_served = bool(args.use_vllm) and args.vllm_mode == "server"
        self.sampler = self._sampler(trl, build, inside_trl is not None)
        self.least_lookahead = int(is_served or self.partial_rollouts > 0)
        # Tokenizers are not thread-safe: a copy decodes a server's completions while prompts are encoded.
        decoder = copy.deepcopy(trl.tokenizer) if is_served else trl.tokenizer
        plays = self.reward.is_played or trl.partner is not None or trl.tools == "an environment"
        launcher = from_fields(Launcher, self, decoder=decoder, inside_trl=inside_trl is not None, plays=plays)
        self.pipeline = Pipeline(
            launcher, window=args.window, lookahead=args.rollout_lookahead, most_lookahead=args.most_lookahead,
            seed=args.seed,
        )  # fmt: skip
        self.keeper.buffer = self.pipeline.buffer
        weights, answered = trl.reward_weights, trl.reward_answered
        settings = from_fields(ScoringSettings, args, branches=self.branches, weights=weights, answered=answered)
        correction, device = rollouts.correction_of(args, self.ledger), trl.accelerator.device
        self.scoring = from_fields(RolloutScoring, self, correction=correction, settings=settings, device=device)

    def _sampler(self, trl: Hooks, build: Callable[[Upstream], Sampler] | None, inside_trl: bool) -> Sampler:
        args = self.args
        talks = bool(trl.tool_names or trl.partner or self.reward.is_played)  # an environment may lack tools
        templates = ("response_template", "response_schema")
        parses = any(getattr(trl.tokenizer, name, None) is not None for name in templates)
        whole = rollouts.first({  # why completions cannot be reported individually
            "`sampler` is a custom engine": build is not None,
            "transformers generates a whole batch at once": not args.use_vllm,
            "`rollout_func` generates a whole batch at once": trl.has_rollout_func,
            "the tokenizer's response template parses a whole batch at once": parses,
        })  # fmt: skip
        self.partial_rollouts = 0.0  # `partial_rollouts`, if effective
        if args.partial_rollouts:
            reason = whole or rollouts.why_not_partial(args, talks, trl.reads_pictures)
            if reason is None:
                self.partial_rollouts = args.partial_rollouts
                trl.engine.loop.most_unfinished = args.most_unfinished
                self.reward_loop.meanwhile = phased(self.timeline, Phase.GENERATION, trl.resume_until)
            elif args.most_lookahead:  # otherwise the settings already logged it
                logger.info(f"`partial_rollouts` is ignored here, because {reason}")
        if self.reward.is_played:
            return TRLSampler(trl, trl.engine)  # used only to check the engine's weights
        if trl.tools is not None and not inside_trl:
            return TRLSampler(trl, trl.engine, trl.converse)
        if build is not None:
            return build(trl)
        if whole is not None:
            logger.info(f"off: starting a completion's reward as soon as it is finished, because {whole}")
        return TRLSampler(trl, trl.engine, trl.ask if whole is None else None)

    def _begin(self) -> None:
        trl, (micro_step, has_batch) = self.trl, self.trl.position()
        if trl.is_deepspeed:  # it steps the optimizer inside `backward`
            engine = trl.accelerator.deepspeed_engine_wrapped.engine
            engine.step = phased(self.timeline, Phase.OPTIMIZER, engine.step)
        self.pipeline.restart(micro_step, trl.step(), has_batch, self.keeper.drain_rollouts())
        self.keeper.restore_parts()

    def check_sampler(self, prompts: Sequence[object]) -> Sampled:
        """Sample a completion for each prompt, and check vLLM's weights. Raises `WeightSyncError` if they differ from
        those being trained; a collective."""
        sampled = self.sampler.start(prompts, lambda *_, **__: None, ahead=False).result()
        with self.trl.accelerator.autocast():  # a model gets its own autocast only when training starts
            self.trl.check_weights(self.trl.padded(sampled))
        return sampled

    def end_kl_step(self, kl: BranchedKL, mode: str) -> None:
        """Record the KL of a step or evaluation batch over all ranks; a collective. A step's moves coefficients."""
        trl = self.trl
        totals = trl.accelerator.reduce(kl.drain_sums(mode), reduction="sum").tolist()
        betas, shares = kl.control.betas, kl.control.shares
        if mode == "train":
            kl.end_step(totals, trl.step() + 1, is_logged=trl.accelerator.is_main_process)
        self.ledger.record_kl(mode, totals, betas, shares, kl.control)

    def step_is_over(self) -> None:
        for part in self.parts:
            part.after_step(self.trl.step())

    def log_line(self, mode: str) -> dict[str, float]:
        figures = self.ledger.flush(mode)
        for part in self.parts:
            figures |= part.figures(mode)
        if mode == "train":
            figures |= self.instruments.figures(self.trl.accelerator)
        return figures

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context of a run. If it fails, keeps measurements and saves a checkpoint. Raises the reason for a stop."""
        self.instruments.start(self.trl.accelerator.is_main_process)
        self.timeline.begin(StartUp.PREPARE)
        try:
            with self.stopping.watched():
                try:
                    yield
                except BaseException as error:
                    last = self.stopping.save_after(error)
                    if last is error:
                        raise
                    raise last from error
            if self.run_control.error is not None:
                raise self.run_control.error
        except BaseException:
            self.pipeline.forget()
            self.reward_loop.stopped = None  # an evaluation may follow
            self.instruments.close()
            for part in self.parts:
                part.end_run()
            raise

    def forget_run(self) -> None:
        self.pipeline.forget()
        self.scoring.forget()
        self.passes.forget()
        self.normaliser.forget()
        if self.kl is not None:
            self.kl.forget_sums()
        self.ledger.clear()
        self.run_control.restart()
        self.stopping.forget()
        for part in self.parts:
            part.end_run()
        self.reward_loop.stopped = None

    def close(self) -> None:
        self.pipeline.forget()
        self.reward_loop.close()
        self.instruments.close()
        for part in self.parts:
            part.close()
