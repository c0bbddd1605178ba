"""TRL's trainer as it generates: batches begin on the engine loop, and TRL's `_generate` runs around them."""

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from trl import GRPOTrainer
from trl.trainer.utils import start_event_loop_in_daemon

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.generation.engine_loop import CompletionTasks, Rounds, TaskBatch
from salesrl_trl.generation.sampler import (
    Begun,
    Encoded,
    Finished,
    Handle,
    Made,
    Sampled,
    TokenSource,
    ToolsOf,
    TurnAccess,
)
from salesrl_trl.ground.process import patched
from salesrl_trl.types import Example
from salesrl_trl.update.run_control import highest
from salesrl_trl.wiring.components import Components
from salesrl_trl.wiring.part import AGENTS


class TRLGeneration(GRPOTrainer):
    args: SalesGRPOConfig
    components: Components
    updates: bool
    _made = Made()  # what exists already, while TRL's `_generate` runs around it
    _last_loaded_step: int

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _sample(self, prompts: Sequence[object], tokens: TokenSource | None = None) -> Sampled:
        return self._sample_made(prompts, Made(tokens=tokens))

    def _sample_made(self, prompts: Sequence[object], made: Made) -> Sampled:
        """TRL's own `_generate`. Its measurements go with the completions, to be logged when these train."""
        was_training, seen = self.model.training, self.state.num_input_tokens_seen
        measured: dict[str, list[float]] = defaultdict(list)
        rollout_func = self.rollout_func if made.rollout is None else lambda *_: dict(made.rollout or {})
        try:
            with (
                patched(self, "_metrics", {**self._metrics, self._mode: measured}),
                patched(self, "_made", made),
                patched(self, "rollout_func", rollout_func),
            ):
                generated = super()._generate(list(prompts))
            tokens_seen = self.state.num_input_tokens_seen - seen
        finally:
            self.state.num_input_tokens_seen = seen
            self.model.train(was_training)  # transformers' continuous batching leaves it in training
        measured.pop("num_tokens")
        if (images := generated[6]) is not None:  # `None` for a row without any, which processors refuse
            generated = (*generated[:6], [image or [] for image in images], *generated[7:])
        return Sampled(generated=generated, metrics=measured, tokens=tokens_seen)

    def _stream(self, prompts: Sequence[object], finished: Finished, ahead: bool) -> Handle:
        encoded, loop = self._encode(prompts), self.vllm_generation.loop
        batch = CompletionTasks(len(prompts), loop, finished)

        def sample() -> Sampled:
            turns = batch.results()
            logprobs = [turn.logprobs for turn in turns if turn.logprobs is not None]
            tokens = [turn.ids for turn in turns], logprobs or None
            return self._sample_made(prompts, Made(encoded=encoded, tokens=lambda *_: tokens))

        return self._begin(batch, encoded, sample, ahead)

    def _encode(self, prompts: Sequence[object]) -> Encoded:
        return Encoded(*self._tokenize_prompts(copy.deepcopy(list(prompts))))

    def _begin(self, batch: TaskBatch[Any], encoded: Encoded, sample: Callable[[], Sampled], ahead: bool) -> Handle:
        """Begin a batch on its loop, with changed weights as by TRL. `sample` is called when it is over."""
        batch.ahead = ahead
        group = self.num_generations if self.model.training else self.num_generations_eval
        with batch.cancelled_by_errors():
            if self.use_vllm:
                with patched(self.vllm_generation, "batch", batch):
                    self._generate_single_turn(*encoded, group)
            else:
                prompts = [{"prompt_token_ids": ids} for ids in encoded.ids]
                batch.begin(prompts, [None] * len(prompts))
                batch.loop.run(batch)

        def end() -> Sampled:
            with batch.cancelled_by_errors():
                if batch.by_new_weights and self.use_vllm and self.state.global_step != self._last_loaded_step:
                    self.vllm_generation.sync_weights()
                    self._last_loaded_step = self.state.global_step
                batch.loop.run(batch)
                return sample()

        return Begun(end, batch.cancel, is_ready=not (ahead and batch.may_be_left))  # on all ranks alike

    def _go_on(self) -> None:
        """Generate the turns that conversations have asked for, unless the engine's weights are older than ours."""
        if self.use_vllm and self.state.global_step == self._last_loaded_step:
            self.vllm_generation.loop.resume()

    def _over_ranks(self, mine: Mapping[str, float]) -> dict[str, float]:
        """Sums over all ranks, which have the same names; a collective."""
        table = torch.tensor([*mine.values()], dtype=torch.float32, device=self.accelerator.device)
        return dict(zip(mine, self.accelerator.reduce(table, reduction="sum").tolist(), strict=True))

    def _converse(self, prompts: Sequence[object], finished: Finished, ahead: bool) -> Handle:
        handle: Handle = self._agents.converse(self._turn_access, prompts, finished, ahead)
        return handle

    def _play(self, rows: Sequence[Example], finished: Finished, ahead: bool) -> Handle:
        handle: Handle = self._agents.play(self._turn_access, rows, finished, ahead)
        return handle

    @property
    def _agents(self) -> Any:
        return next(part for part in self.components.parts if part.name == AGENTS)

    @functools.cached_property
    def _tools_loop(self) -> Any:
        """The event loop on which tools run: TRL has one if any of its functions is async."""
        if (loop := getattr(self, "async_loop", None)) is None:
            _, loop, ready = start_event_loop_in_daemon(name="tools")
            ready.wait()
        return loop

    @functools.cached_property
    def _turn_access(self) -> TurnAccess:
        in_process = self.use_vllm and self.vllm_mode == "colocate"
        engine = self.vllm_generation.llm.llm_engine.model_config if in_process else None
        most = functools.partial(highest, device=self.accelerator.device) if self.args.is_sharded else int
        return TurnAccess(
            loop=self.vllm_generation.loop if self.use_vllm else Rounds(self._generate_single_turn, most),
            encode=self._encode, begin=self._begin, sample=self._sample_made, sums=self._over_ranks, tools=self.tools,
            tools_of=self._tools_of, tools_loop=self._tools_loop, tokenizer=copy.deepcopy(self._tokenizer),
            template=self.chat_template, form={
                "kwargs": self.chat_template_kwargs, "ends": frozenset(self.eos_token_ids),
                "most_completion": self.max_completion_length,
                "most_tokens": engine.max_model_len if engine else self.model.config.max_position_embeddings,
            },
            most_turns=self.max_tool_calling_iterations, has_logprobs=self.use_vllm,
            keeps_records=bool(self.args.record),
        )  # fmt: skip

    def _tools_of(self, place: int) -> ToolsOf:
        if self.environment_factories is None:
            return ToolsOf(self.tools, self._standalone_tools)
        name = self._batch_environments[place]  # TRL has made these for the batch
        own = [*self._sync_tool_dicts[place].values(), *self._async_tool_dicts[place].values()]
        return ToolsOf(self._env_tools[name], own)
