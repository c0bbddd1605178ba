"""What components use of TRL's trainer: makes its `Hooks`. Overrides nothing: `trainer`, its only user, does."""

import contextlib
import copy
import functools
import time
from asyncio import run_coroutine_threadsafe
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import RLock
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
from accelerate.logging import get_logger
from transformers import Trainer
from trl import GRPOTrainer
from trl.chat_template_utils import parse_response
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import start_event_loop_in_daemon

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.data.datasets_of_users import with_ids
from salesrl_trl.errors import DataError, ServiceError
from salesrl_trl.generation.conversations import Ask, AskedTurns, Conversations, GivenUp, Turn
from salesrl_trl.generation.partial import PartialRequests
from salesrl_trl.generation.requests import Requests, given_up_if_interrupted
from salesrl_trl.generation.sampler import (
    Begun,
    Finished,
    Handle,
    Sampled,
    Tokens,
    TokenSource,
    logps_arguments,
)
from salesrl_trl.ground.patched import patched
from salesrl_trl.kl.penalty import BranchPenalty
from salesrl_trl.names import EPISODE_FIGURES, episode_figure, tool_figure, traffic_of
from salesrl_trl.reward.reward_loop import RewardColumn
from salesrl_trl.rollout.in_flight import Rollout
from salesrl_trl.rollout.rollout_scoring import Output
from salesrl_trl.telemetry.completion_record import CompletionRecord
from salesrl_trl.telemetry.timeline import Timeline
from salesrl_trl.types import Example
from salesrl_trl.update.step_snapshot import StepSnapshot
from salesrl_trl.wiring.components import Components
from salesrl_trl.wiring.hooks import Hooks
from salesrl_trl.wiring.part import layer

T = TypeVar("T")

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Talked:
    """A conversation that has ended."""

    first: Turn
    loop: tuple[Any, ...]  # what TRL's `_tool_call_loop` returns for it: lists of one entry, and counts
    notes: Any  # `ConversationNotes`


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """An episode that has ended."""

    ends: Sequence[Any]  # `Sequenced`: its sequences. The first trains.
    completion: list[Any]  # the messages of that one, behind its first prompt
    reward: dict[str, Any]  # as a row keeps it
    calls: int
    notes: Any  # `ConversationNotes`


class TRLAccess(GRPOTrainer):
    """TRL's trainer, with what the components may use of it."""

    args: SalesGRPOConfig
    components: Components
    updates: bool
    _timeline: Timeline
    _tokens: TokenSource | None = None  # generates in place of TRL's engines
    _talked: "Sequence[Talked] | None" = None  # what conversations became, while TRL asks for their tool calls
    _names_rows = False
    _last_loaded_step: int
    _chat_form: Any = None  # of episodes
    _has_told_rewritten = False
    _vision: Mapping[str, Any] = MappingProxyType({})  # what the processor made of the last prompts' pictures
    _loss_inputs: dict[str, Any] | None = None  # the micro-batch whose loss TRL computes
    _logs: dict[str, Any]
    beta: float | BranchPenalty

    def _hooks(self) -> Hooks:
        return Hooks(
            model=self.model,
            ref_model=self.ref_model,
            step=lambda: self.state.global_step,
            last_step=lambda: self.state.max_steps,
            accelerator=self.accelerator,
            is_deepspeed=self.is_deepspeed_enabled,
            updates=self.updates,
            engine=self.vllm_generation if self.use_vllm else self.generation_config,
            has_rollout_func=self.rollout_func is not None,
            tool_names=[each.__name__ for each in self.tools],
            tools="an environment" if self.environment_factories is not None else "tools" if self.tools else None,
            tokenizer=self._tokenizer,
            eos_token_ids=self.eos_token_ids,
            chat_template=self.chat_template,
            reward_weights=self.reward_weights.tolist(),
            reward_names=self.reward_func_names,
            reward_answered=[isinstance(function, RewardColumn) for function in self.reward_funcs],
            group=lambda: self.num_generations if self.model.training else self.num_generations_eval,
            reward_arguments=lambda: {"trainer_state": self.state},
            has_entropy_bonus=self._entropy_bonus_enabled,
            has_aux_loss=self.aux_loss_enabled,
            num_generations_eval=self.num_generations_eval,
            generate=self._sample,
            ask=self._ask_vllm,
            converse=self._converse,
            try_tools=lambda: run_coroutine_threadsafe(
                self._agents.tried(self._standalone_tools), self._tools_loop
            ).result(),
            play=self._play,
            go_on=self._go_on,
            reads_pictures=self._is_vlm,
            logps_of=self._logps_of,
            score=self._score,
            advantages=lambda: self._logs["advantages"],
            set_aside=self._set_aside,
            drop_gradients=self._drop_gradients,
            save=lambda folder: self.save_model(str(folder), _internal_call=True),  # pushes to no hub
            log=functools.partial(Trainer.log, self),
            callbacks=self.callback_handler,
            eval_dataset=self._named(self.eval_dataset, "held-out"),
            position=lambda: (self._step, self._buffered_inputs is not None),
            capture=lambda: StepSnapshot(
                self.state, self.optimizer, self.lr_scheduler, self.components.kl, (self._step, self._buffered_inputs)
            ),
            restore=self._restore,
        )

    def _restore(self, snapshot: StepSnapshot) -> None:
        self._step, self._buffered_inputs = snapshot.restore()
        self._metrics["train"].clear()  # of the step that is undone
        self.components.passes.forget()
        self.components.normaliser.forget()

    def _drop_gradients(self) -> None:
        if self.accelerator.scaler is not None:
            with contextlib.suppress(RuntimeError):  # clipping has done it
                self.accelerator.unscale_gradients()  # else the scaler refuses a step in which it saw no gradient
        self.optimizer.zero_grad(set_to_none=True)

    def _named(self, rows: object, name: str) -> object:
        """A dataset as the record names its rows, if there is one."""
        return with_ids(rows, name) if self._names_rows else rows

    def _check_size(self, rows: int) -> None:
        prompts = self.args.generation_batch_size // self.num_generations
        if rows < prompts:
            raise DataError(
                f"the training dataset has {rows or 'too few'} rows, and a generation batch takes {prompts} prompts: "
                "no step can be done. Expected as many rows. Add some, or lower `per_device_train_batch_size` or "
                "`gradient_accumulation_steps`."
            )

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _sample(self, prompts: Sequence[object], tokens: TokenSource | None = None) -> Sampled:
        """TRL's own `_generate`. Its measurements go with the completions, to be logged when these train."""
        was_training, seen = self.model.training, self.state.num_input_tokens_seen
        measured: dict[str, list[float]] = defaultdict(list)
        metrics = {**self._metrics, self._mode: measured}
        try:
            with patched(self, "_metrics", metrics), patched(self, "_tokens", tokens):
                generated = super()._generate(list(prompts))
            tokens_seen = self.state.num_input_tokens_seen - seen
        finally:
            self.state.num_input_tokens_seen = seen
            self.model.train(was_training)  # transformers' continuous batching leaves it in training
        measured.pop("num_tokens")
        vision: Mapping[str, Any] = {}
        if (images := generated[6]) is not None:  # `None` for a row without any, which processors refuse
            generated = (*generated[:6], [image or [] for image in images], *generated[7:])
            vision = self._vision
        return Sampled(generated=generated, metrics=measured, tokens=tokens_seen, vision=vision)

    def _ask_vllm(self, prompts: Sequence[object], finished: Finished) -> Requests | PartialRequests:
        """Push changed weights, as TRL's `_generate` does, and ask for completions without waiting for all."""
        with self.vllm_generation.begun(finished) as begun:
            self._generate_single_turn(*self._tokenize_prompts(copy.deepcopy(list(prompts))), self.num_generations)
        [requests] = begun
        return requests

    def _converse(self, prompts: Sequence[object], finished: Finished, ahead: bool) -> Handle:
        """Begin conversations: of each the first turn, then TRL's own loop over its tool calls, in its own thread."""
        prompts = list(prompts)
        copies: list[Any] = copy.deepcopy(prompts)
        ids, images, fields = self._tokenize_prompts(copies)
        calls = self._agents.of(self.components.parts).begin_calls(each.__name__ for each in self.tools)
        trainer = self._one_conversation

        def talk(place: int, first: Turn, ask: Ask) -> Talked:
            talked = trainer.talk(place, copies[place], ids[place], first, ask, calls)
            if not batch.is_given_up:
                _, [completion], [completion_ids], *_ = talked.loop
                finished(place, completion_ids, completion, talked.notes.failed)
            return talked

        batch = Conversations(len(ids), talk, self._turns(), end_calls=lambda: calls.cut_off("given_up"))
        sample = functools.partial(self._sample_talks, prompts, calls)
        return self._begin(batch, ids, images, fields, ahead, sample)

    @functools.cached_property
    def _agents(self) -> Any:
        """The layer of tools and episodes, loaded where one is given."""
        return layer("agents.agents_part", "`tools` or `@per_episode`")

    @functools.cached_property
    def _one_conversation(self) -> "_OneConversation":
        return _OneConversation(self)

    @functools.cached_property
    def _tools_loop(self) -> Any:
        """The event loop on which tools run: TRL has one if any of its functions is async."""
        if (loop := getattr(self, "async_loop", None)) is None:
            _, loop, ready = start_event_loop_in_daemon(name="tools")
            ready.wait()
        return loop

    def _try_tools(self) -> Mapping[str, float | ServiceError]:
        ended: dict[str, float | ServiceError] = run_coroutine_threadsafe(
            self._agents.tried(self._standalone_tools), self._tools_loop
        ).result()
        return ended

    def _turns(self) -> AskedTurns:
        return self.vllm_generation.turns if self.use_vllm else AskedTurns()

    def _begin(
        self, batch: Conversations[T], ids: list[list[int]], images: Any, fields: Any, ahead: bool,
        sample: Callable[[Sequence[T]], Sampled],
    ) -> Handle:  # fmt: skip
        group = self.num_generations if self.model.training else self.num_generations_eval
        with given_up_if_interrupted(batch.give_up):
            if self.use_vllm:
                with self.vllm_generation.conversing(batch, ahead=ahead):
                    self._generate_single_turn(ids, images, fields, group)
            else:
                self._generate_in_rounds(batch, ids, images, fields, group)
        # on all ranks alike: they measure together
        return Begun(functools.partial(self._end, batch, sample), batch.give_up, is_ready=not self.use_vllm)

    def _generate_in_rounds(
        self, batch: Conversations[Any], ids: list[list[int]], images: Any, fields: Any, group: int
    ) -> None:
        """With transformers: the turns of all conversations that go on are generated together, as by TRL."""
        completion_ids: Sequence[list[int]] = [[]] * len(ids)
        logprobs: list[list[float]] | None = None
        if not batch.are_episodes:
            completion_ids, logprobs = self._generate_single_turn(ids, images, fields, group)
        for place, own in enumerate(completion_ids):
            batch.begin(place, (own, None if logprobs is None else logprobs[place]))
        while not batch.is_over:
            batch.wait(lambda: batch.is_waiting)
            if not (turns := sorted(batch.turns.take(), key=lambda turn: turn.place)):
                continue
            completion_ids, logprobs = self._generate_single_turn([turn.ids for turn in turns], None, {}, 1)
            for number, turn in enumerate(turns):
                turn.answer.set_result((completion_ids[number], None if logprobs is None else logprobs[number]))

    def _go_on(self) -> None:
        """Generate the turns that conversations have asked for, unless the engine's weights are older than ours."""
        if self.use_vllm and self.state.global_step == self._last_loaded_step:
            self.vllm_generation.go_on()

    def _end(self, batch: Conversations[T], sample: Callable[[Sequence[T]], Sampled]) -> Sampled:
        """Wait for the ends of all conversations of a batch; a collective. Turns are generated by the weights of now,
        so that none is older than the rest of its batch."""
        with given_up_if_interrupted(batch.give_up):
            if self.use_vllm:
                if self.state.global_step != self._last_loaded_step:
                    self.vllm_generation.sync_weights()
                    self._last_loaded_step = self.state.global_step
                self.vllm_generation.go_on(batch)
            return sample(batch.results())

    def _sample_talks(self, prompts: Sequence[object], calls: Any, talked: Sequence["Talked"]) -> Sampled:
        """TRL's `_generate` around conversations that have ended, and the figures of their tools over all ranks."""

        def first_turns(ids: list[list[int]], group: int) -> Tokens:
            turns = [each.first for each in talked]
            logprobs = [logps for _, logps in turns if logps is not None]
            return [own for own, _ in turns], logprobs or None

        with patched(self, "_talked", talked):
            sampled = self._sample(prompts, first_turns)
        traffic = run_coroutine_threadsafe(self._agents.drain_traffic(self.tools), self._tools_loop).result()
        mine = {tool_figure(name, each): count for name, of in calls.counts.items() for each, count in of.items()}
        mine |= {traffic_of(name, each): count for name, of in traffic.items() for each, count in of.items()}
        figures = self._over_ranks(mine)
        for name in calls.counts:
            figures[tool_figure(name, "seconds")] /= max(figures[tool_figure(name, "calls")], 1.0)
        records = [each.notes.record for each in talked if each.notes.record is not None]
        return replace(
            sampled,
            metrics={**sampled.metrics, **{name: [value] for name, value in figures.items()}},
            spans=[span for each in talked for span in each.notes.spans],
            calls=[record.calls for record in records],
        )

    def _over_ranks(self, mine: Mapping[str, float]) -> dict[str, float]:
        """Sums over all ranks, which have the same names; a collective."""
        table = torch.tensor([*mine.values()], dtype=torch.float32, device=self.accelerator.device)
        return dict(zip(mine, self.accelerator.reduce(table, reduction="sum").tolist(), strict=True))

    def _play(self, rows: Sequence[Example], finished: Finished, ahead: bool) -> Handle:
        """Begin an episode with each row: the user's function asks for all its turns, by the endpoint."""
        components, prompts = self.components, [row["prompt"] for row in rows]
        agents, episode = self._agents.of(components.parts), cast("Any", components.reward)
        ids, images, fields = self._tokenize_prompts(copy.deepcopy(prompts))
        if self._chat_form is None:  # the template and the limits of TRL's own loop over tools
            in_process = self.use_vllm and self.vllm_mode == "colocate"
            engine = self.vllm_generation.llm.llm_engine.model_config if in_process else None
            form = self._agents.ChatForm.of(
                copy.deepcopy(self._tokenizer), self.chat_template, kwargs=self.chat_template_kwargs,
                ends=frozenset(self.eos_token_ids), most_completion=self.max_completion_length,
                most_tokens=engine.max_model_len if engine else self.model.config.max_position_embeddings,
            )  # fmt: skip
            self._chat_form = replace(form, tokenizer=_Locked(form.tokenizer))
        form = self._chat_form

        playing = agents.begin_episodes()

        def talk(place: int, first: Turn, ask: Ask) -> Played:
            notes = self._agents.ConversationNotes(track=f"episode {place}")

            def turn(prefix: list[int]) -> Turn:
                began = time.perf_counter()
                own = ask(place, prefix)
                notes.end_turn(began)
                return own

            calls = self._agents.AgentCalls(form, turn)
            with agents.endpoint.open(calls) as key:
                row = copy.deepcopy(rows[place])
                future = components.reward_loop.call(episode.play, agents.endpoint.address, key, row)
                reward = playing.reward(episode, future, lambda: calls.idle_s)
            if calls.is_full:
                reward = episode.named_full(reward)
            if calls.error is not None or batch.is_given_up:
                raise calls.error or GivenUp
            if ends := calls.ends():
                completion = ends[0].messages[ends[0].prompt_messages :]
            else:  # a row has a token at least: one that does not train
                completion = [{"role": "assistant", "content": ""}]
                none = self._agents.Sequenced(
                    messages=completion, tools=None, before=None, prompt_messages=0, prompt_ids=ids[place],
                    ids=[self._tokenizer.eos_token_id], mask=[0], logprobs=[0.0] if self.use_vllm else None,
                )  # fmt: skip
                ends = [none]
                if reward.value is not None:
                    reward = episode.without_number("no_turn", "has not asked the policy for a turn")
            plain = self._agents.kept(reward)
            finished(place, ends[0].ids, completion, columns={self._agents.PLAYED: plain})
            return Played(ends=ends, completion=completion, reward=plain, calls=len(calls.answered), notes=notes)

        batch = Conversations(
            len(rows), talk, self._turns(), are_episodes=True, end_calls=lambda: playing.cut_off("given_up")
        )
        return self._begin(batch, ids, images, fields, ahead, functools.partial(self._sample_episodes, prompts))

    def _sample_episodes(self, prompts: Sequence[object], played: Sequence["Played"]) -> Sampled:
        """TRL's `_generate` around episodes that have ended, as of a `rollout_func`, and their figures."""
        trained = [each.ends[0] for each in played]
        logprobs = [each.logprobs for each in trained if each.logprobs is not None]
        output = {
            "prompt_ids": [each.prompt_ids for each in trained],
            "completion_ids": [each.ids for each in trained],
            "logprobs": logprobs or None,
            "env_mask": [each.mask for each in trained],
            self._agents.PLAYED: [each.reward for each in played],
        }
        with patched(self, "rollout_func", lambda *_: output):
            sampled = self._sample(prompts)
        generated = (*sampled.generated[:3], [each.completion for each in played], *sampled.generated[4:])
        sizes = [[end.sampled for end in each.ends] for each in played]
        mine = {
            "calls": sum(each.calls for each in played), "rewritten": sum(len(size) > 1 for size in sizes),
            "untrained": sum(sum(size[1:]) for size in sizes), "sampled": sum(map(sum, sizes)),
        }  # fmt: skip
        calls, rewritten, untrained, every = self._over_ranks(mine).values()
        if rewritten and not self._has_told_rewritten:
            self._has_told_rewritten = True
            logger.warning(
                f"{rewritten:.0f} episodes of a batch are several sequences: they have rewritten their history, or "
                f"asked beside it. Of each the sequence with most tokens trains: {untrained:.0f} of {every:.0f} "
                "tokens do not. `episodes/rewritten` and `episodes/untrained` go on counting"
            )
        figures = dict(zip(EPISODE_FIGURES, (calls, rewritten, untrained / max(every, 1.0)), strict=True))
        metrics = {episode_figure(name): [value] for name, value in figures.items()}
        spans = [span for each in played for span in each.notes.spans]
        return replace(sampled, generated=generated, metrics={**sampled.metrics, **metrics}, spans=spans)

    def _score(self, rollout: Rollout) -> Output:
        """TRL's own method. Its figures and tables are kept only when all rewards are in."""
        mode = rollout.mode
        before = (self._metrics[mode], self._logs)
        output: Output = super()._generate_and_score_completions(rollout.inputs)
        if not rollout.is_complete:
            self._metrics[mode], self._logs = before
        elif not self.components.policy.weight_check.is_done and self.vllm_generation.temperature == self.temperature:
            # not of an evaluation, which answers greedily
            self.components.policy.weight_check.check(output, self._logps_of)
        return output

    def _logps_of(self, output: Mapping[str, Any]) -> torch.Tensor:
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            arguments = logps_arguments(output, self.args.per_device_train_batch_size)
            return self._get_per_token_logps_and_entropies(self.model, **arguments)[0]

    @contextlib.contextmanager
    def _with_fewer_micro_batches(self, factor: float) -> Iterator[None]:
        """While active, TRL divides a loss by so many times fewer micro-batches, but for the router's."""
        if factor == 1:  # an evaluation has no micro-batches
            yield
            return
        with (
            patched(self, "current_gradient_accumulation_steps", self.current_gradient_accumulation_steps / factor),
            patched(self, "router_aux_loss_coef", self.router_aux_loss_coef / factor),
        ):
            yield

    @contextlib.contextmanager
    def _set_aside(self) -> Iterator[None]:
        """While active, the policy evaluates, one answer a prompt. Figures and tables of others stay as they are."""
        was_training = self.model.training
        self.model.eval()
        try:
            with (
                patched(self, "num_generations_eval", 1),
                patched(self, "_metrics", {**self._metrics, "eval": defaultdict(list)}),
                patched(self, "_logs", copy.deepcopy(self._logs)),
            ):
                yield
        finally:
            self.model.train(was_training)


class _Locked:
    """An object whose methods one thread at a time calls. Threads share no tokenizer otherwise."""

    def __init__(self, shared: object) -> None:
        self._shared, self._lock = shared, RLock()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._shared, name)
        if not callable(value):
            return value

        @functools.wraps(value)
        def locked(*args: object, **kwargs: object) -> object:
            with self._lock:
                return value(*args, **kwargs)

        return locked


class _OneConversation:
    """TRL's trainer as it goes through one conversation after another: its own loop, on a copy of its attributes."""

    def __init__(self, trainer: TRLAccess) -> None:
        self._trainer = trainer
        self._tokenizer = _Locked(copy.deepcopy(trainer._tokenizer))
        self._loop = trainer._tools_loop

    def talk(self, place: int, prompt: Any, prompt_ids: list[int], first: Turn, ask: Ask, calls: Any) -> Talked:
        one, trainer = copy.copy(self._trainer), self._trainer
        notes = self._trainer._agents.ConversationNotes(
            track=f"conversation {place}", record=CompletionRecord() if trainer.args.record else None
        )
        notes.end_turn(calls.began)

        def turn(ids: list[list[int]], *_: object, **__: object) -> tuple[list[list[int]], list[list[float]] | None]:
            """An empty turn ends the conversation."""
            if notes.failed is not None:
                return [[]], None if first[1] is None else [[]]
            began = time.perf_counter()
            own, logps = ask(place, ids[0])
            notes.end_turn(began)
            return [own], None if logps is None else [logps]

        one._generate_single_turn = turn
        one._tokenizer = one.processing_class = self._tokenizer
        one.async_loop = self._loop
        tools, functions = trainer.tools, trainer._standalone_tools
        if trainer.environment_factories is not None:  # TRL has made these for the batch
            name = trainer._batch_environments[place]
            one._batch_environments, tools = [name], trainer._env_tools[name]
            functions = [*trainer._sync_tool_dicts[place].values(), *trainer._async_tool_dicts[place].values()]
        one._sync_tool_dicts, one._async_tool_dicts = [{}], [calls.of(functions, notes)]
        ids, logps = first
        message = parse_response(self._tokenizer, ids, prefix=prompt_ids, tools=tools)
        loop = GRPOTrainer._tool_call_loop(
            one, [prompt], [prompt_ids], [list(ids)], [[message]], None if logps is None else [list(logps)], None, {}
        )
        return Talked(first=first, loop=loop, notes=notes)
