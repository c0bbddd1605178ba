"""Generation through TRL's trainer: batches run on the engine loop, with TRL's `_generate` around them."""

import copy
import functools
from asyncio import AbstractEventLoop
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import start_event_loop_in_daemon

from salesrl_trl.generation import sampler
from salesrl_trl.generation.engine_loop import CompletionTasks, Prompt, Rounds, TaskBatch, TurnLoop
from salesrl_trl.ground.process import patched
from salesrl_trl.rollout.several_sequences import SEQUENCES, log_probs, sequences_of
from salesrl_trl.types import Example
from salesrl_trl.update.run_control import highest


@dataclass(frozen=True, slots=True)
class Begun:
    """The `Handle` of a batch in progress."""

    trainer: GRPOTrainer
    batch: TaskBatch
    sample: Callable[[], sampler.Sampled]
    is_ready: bool

    def result(self) -> sampler.Sampled:
        trainer, batch = self.trainer, self.batch
        with batch.cancelled_by_errors():
            if batch.by_new_weights and trainer.use_vllm and trainer.state.global_step != trainer._last_loaded_step:
                trainer.vllm_generation.sync_weights()
                trainer._last_loaded_step = trainer.state.global_step
            batch.loop.run(batch)
            return self.sample()

    def give_up(self) -> None:
        self.batch.cancel()


class TRLEngine:
    """TRL's engine, on which conversations run their turns."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer
        self.functions: Sequence[Callable[..., object]] = trainer.tools  # including environments' methods
        self.chat_template: str | None = trainer.chat_template
        self.most_turns: int = trainer.max_tool_calling_iterations  # turns after which tools may be called
        self.has_logprobs: bool = trainer.use_vllm
        args, reward = trainer.args, trainer.components.reward_loop.reward
        self.keeps_records = bool(args.record)
        talks = bool(trainer.tools or trainer.partner) and args.vllm_mode == "colocate" and not args.most_lookahead
        self._in_rounds: bool = talks and (reward.is_replay or args.parsed_record()[2])

    @functools.cached_property
    def loop(self) -> TurnLoop:
        trainer = self._trainer
        if trainer.use_vllm and not self._in_rounds:
            return trainer.vllm_generation.loop
        most = functools.partial(highest, device=trainer.accelerator.device) if trainer.args.is_sharded else int
        return Rounds(trainer._generate_single_turn, most)

    @functools.cached_property
    def tools_loop(self) -> AbstractEventLoop:
        """The event loop for tools: TRL's, which exists if any function is async, or a new one."""
        if (loop := getattr(self._trainer, "async_loop", None)) is None:
            _, loop, ready = start_event_loop_in_daemon(name="tools")
            ready.wait()
        return loop

    @functools.cached_property
    def thread_tokenizer(self) -> PreTrainedTokenizerBase:
        """A copy for threads."""
        return copy.deepcopy(self._trainer._tokenizer)

    @property
    def form(self) -> Mapping[str, Any]:
        """The remaining fields of `agents.chat_turns.ChatForm`."""
        trainer = self._trainer
        in_process = trainer.use_vllm and trainer.vllm_mode == "colocate"
        engine = trainer.vllm_generation.llm.llm_engine.model_config if in_process else None
        return {
            "kwargs": trainer.chat_template_kwargs, "ends": frozenset(trainer.eos_token_ids),
            "most_completion": trainer.max_completion_length,
            "most_tokens": engine.max_model_len if engine else trainer.model.config.max_position_embeddings,
        }  # fmt: skip

    def encode(self, prompts: Sequence[object]) -> sampler.Encoded:
        return sampler.Encoded(*self._trainer._tokenize_prompts(copy.deepcopy(list(prompts))))

    def begin(
        self, batch: TaskBatch, encoded: sampler.Encoded, sample: Callable[[], sampler.Sampled], ahead: bool
    ) -> sampler.Handle:
        """Begin a batch on its loop, after pushing changed weights as TRL does; a collective. `sample` is called once
        it is finished. `ahead`: training continues before that."""
        trainer = self._trainer
        batch.ahead = ahead
        with batch.cancelled_by_errors():
            if not isinstance(batch.loop, Rounds):
                with patched(trainer.vllm_generation, "batch", batch):
                    trainer._generate_single_turn(*encoded, self.group())
            else:
                prompts = [Prompt(prompt_token_ids=ids) for ids in encoded.ids]
                batch.begin(prompts, [None] * len(prompts))
                batch.loop.run(batch)

        return Begun(trainer, batch, sample, is_ready=not (ahead and batch.may_be_left))  # on all ranks alike

    def sample(self, prompts: Sequence[object], made: sampler.Made) -> sampler.Sampled:
        """TRL's own `_generate` around precomputed results; a collective. Its metrics are kept with the completions
        and logged when these are trained on."""
        trainer, measured = self._trainer, defaultdict[str, list[float]](list)
        was_training, seen = trainer.model.training, trainer.state.num_input_tokens_seen
        rollout_func = trainer.rollout_func if made.rollout is None else lambda *_: dict(made.rollout or {})
        try:
            with (
                patched(trainer, "_metrics", {**trainer._metrics, "train" if was_training else "eval": measured}),
                patched(trainer, "_made", made),
                patched(trainer, "rollout_func", rollout_func),
            ):
                generated = GRPOTrainer._generate(trainer, list(prompts))
            tokens_seen = trainer.state.num_input_tokens_seen - seen
        finally:
            trainer.state.num_input_tokens_seen = seen
            trainer.model.train(was_training)  # transformers' continuous batching leaves it in training mode
        measured.pop("num_tokens")
        if (images := generated[6]) is not None:  # processors reject the `None` of rows without images
            generated = (*generated[:6], [image or [] for image in images], *generated[7:])
        return sampler.Sampled(generated=generated, metrics=measured, tokens=tokens_seen)

    def resume_until(self, is_enough: Callable[[], object]) -> None:
        """Decode what earlier runs of a colocated vLLM left unfinished, until a condition holds."""
        loop: Any = self.loop
        while loop.under_way and not is_enough():
            loop.step()

    def group(self) -> int:
        """Completions per prompt in the current mode, training or evaluation."""
        trainer = self._trainer
        return trainer.num_generations if trainer.model.training else trainer.num_generations_eval

    def sums(self, mine: Mapping[str, float]) -> dict[str, float]:
        """Sums over all ranks, which must use the same names; a collective."""
        accelerator = self._trainer.accelerator
        table = torch.tensor([*mine.values()], dtype=torch.float32, device=accelerator.device)
        return dict(zip(mine, accelerator.reduce(table, reduction="sum").tolist(), strict=True))

    def take_environments(self, prepared: type, rewards_of: Callable[[type], object]) -> tuple[Any, ...]:
        """TRL's environments, by name: factories, instances and tools. TRL gets `prepared` in their place, and for
        each class with a reward the function `rewards_of` it."""
        trainer = self._trainer
        factories, instances = trainer.environment_factories, trainer._environment_pool
        kinds = dict.fromkeys(type(probe) for [probe] in instances.values() if hasattr(probe, "get_reward"))
        trainer.reward_funcs[len(trainer.reward_funcs) - len(kinds) :] = map(rewards_of, kinds)
        trainer.environment_factories = dict.fromkeys(factories, prepared)
        trainer._environment_pool = {name: [] for name in factories}
        return factories, instances, trainer._env_tools

    def use_environments(self, names: Sequence[str | None]) -> None:
        """Encode and parse the next batch with the tools of these environments, one per conversation."""
        self._trainer._batch_environments = [*names]


class TRLGeneration(TRLEngine):
    """Ways to generate a batch of rollouts."""

    agents: Any  # the part for tools and episodes, if any

    def generate(self, prompts: Sequence[object], tokens: sampler.TokenSource | None = None) -> sampler.Sampled:
        return self.sample(prompts, sampler.Made(tokens=tokens))

    def ask(self, prompts: Sequence[object], finished: sampler.Finished, ahead: bool) -> sampler.Handle:
        """Generate with vLLM, reporting each completion when it is finished."""
        encoded, loop = self.encode(prompts), self.loop
        batch = CompletionTasks(len(prompts), loop, finished)

        def sample() -> sampler.Sampled:
            turns = batch.results()
            logprobs = [turn.logprobs for turn in turns if turn.logprobs is not None]
            tokens = [turn.ids for turn in turns], logprobs or None
            sampled = self.sample(prompts, sampler.Made(encoded=encoded, tokens=lambda *_: tokens))
            return replace(sampled, versions=[turn.versions for turn in turns])

        return self.begin(batch, encoded, sample, ahead)

    def converse(self, prompts: Sequence[object], finished: sampler.Finished, ahead: bool) -> sampler.Handle:
        """Generate completions that may call tools."""
        return self.agents.converse(self, prompts, finished, ahead)

    def play(self, rows: Sequence[Example], finished: sampler.Finished, ahead: bool) -> sampler.Handle:
        """Play an episode with each row."""
        return self.agents.play(self, rows, finished, ahead)

    def go_on(self) -> None:
        """Generate the turns requested by conversations, unless the engine's weights are outdated."""
        trainer = self._trainer
        if trainer.use_vllm and trainer.state.global_step == trainer._last_loaded_step:
            self.loop.resume()

    def reward_arguments(self) -> Mapping[str, object]:
        """Arguments available to reward functions besides columns (`reward.scorer.TRL_ARGUMENTS`)."""
        return {"trainer_state": self._trainer.state}

    def behaviour_logps(self, sampled: sampler.Sampled) -> torch.Tensor:
        """Log-probs of completions under the current policy, for samplers that return none."""
        sequences = sequences_of(sampled)
        return self.logps_of({**self.padded(sampled), **({} if sequences is None else {SEQUENCES: sequences})})

    def logps_of(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Log-probs of a batch's completions under the current policy, shape (B, T)."""
        trainer = self._trainer
        with (
            torch.no_grad(),
            disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs),
        ):
            arguments = sampler.logps_arguments(batch, trainer.args.per_device_train_batch_size)
            passed = trainer._get_per_token_logps_and_entropies
            if SEQUENCES in batch:
                return log_probs(passed, batch[SEQUENCES], trainer.model, **arguments)[0]
            return passed(trainer.model, **arguments)[0]

    def padded(self, sampled: sampler.Sampled) -> dict[str, torch.Tensor]:
        args, pad_token_id = self._trainer.args, self._trainer._tokenizer.pad_token_id
        return sampled.padded(pad_token_id, args.pad_to_multiple_of, self._trainer.accelerator.device)
