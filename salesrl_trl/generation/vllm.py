"""vLLM, in the trainer's process or as a server: what differs from TRL's `VLLMGeneration`.

vLLM is imported only while an engine is built, so that this module costs nothing without it.
"""

import contextlib
import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Semaphore
from types import SimpleNamespace
from typing import Any

import torch
import trl.generation.vllm_generation as upstream_vllm
import trl.trainer.grpo_trainer as upstream_trainer
from accelerate.utils import broadcast_object_list, is_peft_model
from accelerate.utils.other import get_free_port
from transformers import PreTrainedModel, ProcessorMixin
from trl.generation.vllm_generation import VLLMGeneration

from salesrl_trl.errors import ConfigError
from salesrl_trl.generation.conversations import (
    NO_TURN,
    AskedTurn,
    AskedTurns,
    Conversations,
    GivenUp,
    Turn,
)
from salesrl_trl.generation.merging import merged_beside, why_in_place
from salesrl_trl.generation.partial import PartialEngine, PartialRequests
from salesrl_trl.generation.requests import MOST_REQUESTS, Completions, Requests
from salesrl_trl.ground.patched import patched
from salesrl_trl.ground.process import allow_files

logger = logging.getLogger(__name__)

_ALONE = SimpleNamespace(is_main_process=True, process_index=0)
"""The only process: the members of `Accelerator` that TRL's `generate` reads before it asks a server."""
_Single = Callable[..., Completions]  # asks the server for the completion at a place, perhaps of further token ids
LINGER_S = 0.05
"""Seconds for which an engine with nothing to do waits for the next turn of conversations before training goes on."""


class SalesVLLMGeneration(VLLMGeneration):
    """TRL's vLLM generation, with engine options, single requests to a server, and a weight push on a CPU.

    - Beside TRL's arguments the engine gets `engine_options` (from `config.engine`). Every process has a client of the
      server, with as many connections as it has requests in flight.
    - With `partial`, the engine in this process has completions under way while training goes on.
    - While `streamed`, `begun` or `answered` is active, `generate` asks a server for completions one by one.
    - `sync_weights` waits for the server's answers first, so that each completion is sampled by one policy. On a CPU,
      and for an engine that quantises, it reloads all weights through the worker: parameters are repacked after
      loading, so that TRL's push of single ones fails. An adapter is merged beside its base.
    """

    vllm_client: Any
    enable_sleep_mode: bool
    processing_class: Any = None
    partial: PartialEngine | None = None
    _merges_beside = False

    def __init__(self, *args: object, engine_options: Mapping[str, object], **kwargs: object) -> None:
        self.engine_options = engine_options
        self._collect: Callable[[_Single, int], Completions] | None = None  # asks for so many completions, one by one
        self._waits = True
        self._under_way: list[Requests] = []
        self._slots = Semaphore(MOST_REQUESTS)
        self.turns = AskedTurns()
        self._params: Any = None  # vLLM's sampling parameters of the last batch
        super().__init__(*args, **kwargs)
        if is_peft_model(self.model):
            reason = why_in_place(self.model, self._dist.fsdp_version)
            self._merges_beside = reason is None
            if reason is not None and self.accelerator.is_main_process:
                logger.warning(
                    f"off: the push to vLLM merges the adapter beside its base, because {reason}. TRL merges it into "
                    "the base and subtracts it again: the base drifts by rounding, and the reference of the KL with it"
                )

    def _init_vllm(self) -> None:
        stock = upstream_vllm.LLM

        @functools.wraps(stock)
        def build(**kwargs: object) -> object:
            return stock(**{**kwargs, **self.engine_options})

        # Without a named port, TRL takes the first free one of a short list. Two runs that start together would take
        # the same one. A launcher of several processes has named a port.
        if os.environ.get("MASTER_PORT", "").strip().lower() in ("", "0", "auto"):
            os.environ["MASTER_PORT"] = str(get_free_port())
        if self.enable_sleep_mode and self.accelerator.device.type == "cpu":
            self.enable_sleep_mode = False
            logger.warning("off: `vllm_enable_sleep_mode`, because it is memory of a GPU that a sleeping vLLM frees")
        with patched(upstream_vllm, "LLM", build):
            super()._init_vllm()
        if self.mode == "server":
            addresses = [self.vllm_client.base_url if self.accelerator.is_main_process else None]
            broadcast_object_list(addresses)
            if not self.accelerator.is_main_process:
                self.vllm_client = upstream_vllm.VLLMClient(addresses[0], connection_timeout=self.server_timeout)
            allow_files(2 * MOST_REQUESTS)
            client = self.vllm_client
            client.session.get_adapter(client.base_url).init_poolmanager(1, MOST_REQUESTS)

    def sync_weights(self) -> None:
        """Push the training weights into vLLM and drop its caches. The base of an adapter is not written."""
        with contextlib.ExitStack() as stack:
            if self._merges_beside:
                stack.enter_context(merged_beside(self.model))
            if self.partial is not None:
                stack.enter_context(self.partial.pushing())
            self._push()

    def _push(self) -> None:
        if self.mode == "server":
            self._push_to_server()
            return
        if self.accelerator.device.type != "cpu" and "quantization" not in self.engine_options:
            super().sync_weights()
            self._forget_pictures()
            return
        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        worker = self.llm.llm_engine.model_executor.driver_worker
        worker = getattr(worker, "worker", worker)
        pack_tied_weights_again(worker.model_runner.model)
        worker.reload_weights(weights_iterator=self._iter_named_params())
        self.llm.reset_prefix_cache()
        self._forget_pictures()

    def _push_to_server(self) -> None:
        self.settle()
        for _ in range(MOST_REQUESTS):  # no turn of a conversation passes either
            self._slots.acquire()
        try:
            self.accelerator.wait_for_everyone()
            super().sync_weights()
            if self._reads_pictures and self.accelerator.is_main_process:
                self.vllm_client.session.post(f"{self.vllm_client.base_url}/reset_encoder_cache").raise_for_status()
            self.accelerator.wait_for_everyone()  # no process asks before the weights are there
        finally:
            self._slots.release(MOST_REQUESTS)

    @property
    def _reads_pictures(self) -> bool:
        return isinstance(self.processing_class, ProcessorMixin)

    def _forget_pictures(self) -> None:
        """Drop what the vision tower made of pictures with the weights before. TRL drops the texts' cache alone."""
        if self._reads_pictures:
            self.llm.llm_engine.reset_encoder_cache()

    @contextlib.contextmanager
    def streamed(self, finished: Callable[[int, Sequence[int]], None], size: int) -> Iterator[None]:
        """While active, report each completion as soon as it is finished. `finished` is called with its place in the
        batch and its token ids: between two steps of a colocated engine, or from another thread with a server. `size`:
        completions of this process. Those that tensor parallelism generates for others are not reported."""
        if self.mode != "server":
            with self._stepped(lambda place, output: finished(place, output.outputs[0].token_ids), size):
                yield
            return
        with patched(self, "_collect", lambda single, count: self._request(single, count, finished).result()):
            yield

    @contextlib.contextmanager
    def begun(self, finished: Callable[[int, Sequence[int]], None]) -> Iterator[list[Requests | PartialRequests]]:
        """While active, `generate` asks the server, or the `partial` engine, for this process's completions and
        returns none of them. `finished` is called as in `streamed`. Yields the requests, for `answered`."""
        begun: list[Requests | PartialRequests] = []
        if (partial := self.partial) is not None:

            def begin_here(prompts: Sequence[Any], sampling_params: Any, **_: object) -> list[Any]:
                begun.append(partial.begin(prompts, sampling_params, finished))
                return []

            with patched(self.llm, "generate", begin_here):
                yield begun
            return

        def begin(single: _Single, count: int) -> Completions:
            begun.append(self._request(single, count, finished))
            return {"prompt_ids": [], "completion_ids": [], "logprobs": [], "logprob_token_ids": []}

        with patched(self, "_collect", begin), patched(self, "_waits", False):
            yield begun

    @contextlib.contextmanager
    def answered(self, requests: Requests | PartialRequests) -> Iterator[None]:
        """While active, `generate` returns the completions of these requests."""
        is_here = isinstance(requests, PartialRequests)
        owner, name = (self.llm, "generate") if is_here else (self, "_collect")
        with patched(owner, name, lambda *_, **__: requests.result()):
            yield

    @contextlib.contextmanager
    def conversing(self, batch: Conversations[Any], *, ahead: bool) -> Iterator[None]:
        """While active, `generate` begins each conversation of the batch when its first turn is there, and returns the
        first turns, or with a server and for episodes nothing. In this process it returns when all conversations are
        over; with `ahead` as soon as none of them, nor of those before, has a turn to generate. `go_on` goes on."""
        if self.mode != "server":
            ahead = ahead and not self.enable_sleep_mode  # its memory is freed between two generations

            def first(place: int, output: Any) -> None:
                ask = functools.partial(self.turns.ask, batch, params=self._params)
                batch.begin(place, NO_TURN if output is None else _turn_of(output), ask)

            def has_turns() -> bool:
                self.turns.changed.wait_for(lambda: len(self.turns) or batch.is_over, LINGER_S if ahead else None)
                return bool(len(self.turns))

            with self._stepped(first, len(batch), has_turns, batch.are_episodes):
                yield
            return

        def begin(single: _Single, count: int) -> Completions:
            def turn(place: int, ids: list[int]) -> Turn:
                with self._slots:
                    return _answer_of(single(place, ids))

            def asked(place: int) -> Completions:
                output = single(place)
                batch.begin(place, _answer_of(output), turn)
                return output

            if batch.are_episodes:
                for place in range(count):
                    batch.begin(place, NO_TURN, turn)
            else:
                self._request(asked, count, lambda *_: None)
            return {"prompt_ids": [], "completion_ids": [], "logprobs": [], "logprob_token_ids": []}

        with patched(self, "_collect", begin), patched(self, "_waits", False):
            yield

    def go_on(self, batch: Conversations[Any] | None = None) -> None:
        """Generate the turns that conversations have asked for, those of all batches together. With a `batch`: until
        its conversations are over."""
        if self.mode == "server" or self.partial is not None:
            if batch is not None:
                batch.wait(lambda: batch.is_over)
            return

        def keeps_going() -> bool:
            if batch is not None:
                self.turns.changed.wait_for(lambda: bool(len(self.turns)) or batch.is_over)
            return bool(len(self.turns))

        engine = self.llm.llm_engine
        with self._stepped(lambda *_: None, 0, keeps_going):
            while engine.has_unfinished_requests():
                engine.step()

    def settle(self) -> None:
        """Wait until the server has answered all requests of this process."""
        while self._under_way:
            self._under_way[-1].join()
            self._under_way.pop()

    def generate(
        self, prompts: list[list[int]], images: list[Any] | None, num_generations: int, profiler: object = None
    ) -> tuple[Any, ...]:
        """TRL's `generate`. In this process vLLM makes no texts: TRL reads none, and they hold small models up; and
        there is one token for each picture. Where completions are reported, each process asks a server for its own,
        one request each: TRL's one request for all is answered when the last is finished."""
        if self._collect is None:
            if self.mode == "server":
                return super().generate(prompts, images, num_generations, profiler)  # type: ignore[no-any-return]
            has_stop = "stop" in self.generation_kwargs  # of strings, which vLLM looks for in its texts
            texts = {} if has_stop else {"detokenize": False}
            seen = prompts
            if images is not None:
                seen = [one_token_each(ids, self.processing_class.image_token_id) for ids in prompts]
            with patched(self, "generation_kwargs", {**texts, **self.generation_kwargs}):
                generated = super().generate(seen, images, num_generations, profiler)
            if images is not None:
                check_expanded(generated[0], prompts)
            return generated  # type: ignore[no-any-return]
        first = self.accelerator.process_index * len(prompts)
        samples = [place % num_generations for place in range(first, first + len(prompts))]
        collect, send = self._collect, self.vllm_client.generate

        def ask(*, prompts: list[list[int]], **request: Any) -> Completions:
            return collect(_single(send, samples, prompts, **request), len(prompts))

        with (
            patched(self.vllm_client, "generate", ask),
            patched(self, "accelerator", _ALONE),
            patched(upstream_vllm, "gather_object", lambda value: value),
            patched(upstream_vllm, "broadcast_object_list", lambda value, from_process: value),
        ):
            return super().generate(prompts, images, 1, profiler if self._waits else None)  # type: ignore[no-any-return]

    def _request(self, single: _Single, count: int, finished: Callable[[int, Sequence[int]], None]) -> Requests:
        self._under_way = [earlier for earlier in self._under_way if earlier.in_flight]
        taken = {earlier.lane for earlier in self._under_way}
        lane = next(number for number in itertools.count() if number not in taken)
        requests = Requests(single, count, finished, self._slots, lane)
        self._under_way.append(requests)
        return requests

    @contextlib.contextmanager
    def _stepped(
        self,
        finished: Callable[[int, Any], None],
        size: int,
        has_turns: Callable[[], bool] | None = None,
        are_episodes: bool = False,
    ) -> Iterator[None]:
        """Watches `add_request` and `step` of the engine: `LLM.generate` adds all requests in order, then steps until
        nothing is unfinished. `finished` gets place and output of each of them. With `has_turns`, which may wait, the
        turns that conversations ask for are added meanwhile. Their outputs go to the conversations alone. With
        `are_episodes` no request is added: `finished` gets its place at once, and `None`."""
        first = 0
        if self.tensor_parallel_size > 1:
            first = torch.distributed.get_rank(group=self.tp_group) * size
        engine = self.llm.llm_engine
        add_request, step, has_unfinished = engine.add_request, engine.step, engine.has_unfinished_requests
        places: dict[str, int] = {}
        turns: dict[str, AskedTurn] = {}
        adding: list[AskedTurn] = []

        def add_watched(request_id: str, prompt: object, params: object, *args: object, **kwargs: object) -> object:
            if adding:
                turns[request_id] = adding.pop()
            else:
                places[request_id] = len(places) - first
                self._params = params
                if are_episodes:  # nothing is generated before one asks
                    finished(places[request_id], None)
                    return request_id
            return add_request(request_id, prompt, params, *args, **kwargs)

        def step_watched() -> object:
            outputs = step()
            for output in outputs:
                if output.request_id in turns:
                    if output.finished:
                        turns.pop(output.request_id).answer.set_result(_turn_of(output))
                elif output.finished and 0 <= (place := places[output.request_id]) < size:
                    finished(place, output)
            return [output for output in outputs if output.request_id in places] if has_turns else outputs

        def has_unfinished_watched() -> bool:
            assert has_turns is not None
            while True:
                for turn in self.turns.take():
                    adding.append(turn)
                    prompt = {"prompt_token_ids": turn.ids}
                    self.llm.enqueue([prompt], turn.params.clone(), use_tqdm=False)
                if has_unfinished():
                    return True
                with self.turns.changed:
                    if not has_turns():
                        return False

        with contextlib.ExitStack() as stack:
            stack.enter_context(patched(engine, "add_request", add_watched))
            stack.enter_context(patched(engine, "step", step_watched))
            if has_turns is not None:
                stack.enter_context(patched(engine, "has_unfinished_requests", has_unfinished_watched))
            try:
                yield
            except BaseException:  # an interruption: these requests would finish in the next generation
                with contextlib.suppress(Exception):  # the engine may be gone: the first error is the one to raise
                    engine.abort_request([*places, *turns])
                for turn in (*turns.values(), *adding):
                    turn.answer.set_exception(GivenUp())
                raise


def _turn_of(output: Any) -> Turn:
    """A finished output of vLLM. Log-probs are those of the sampled tokens, as TRL takes them."""
    logprobs, _ = upstream_vllm.extract_logprobs([output])
    return list(output.outputs[0].token_ids), None if logprobs is None else [token[0] for token in logprobs[0]]


def _answer_of(output: Completions) -> Turn:
    """The same, of a server's answer to one prompt."""
    [ids], logprobs = output["completion_ids"], output["logprobs"]
    return list(ids), None if logprobs is None else [token[0] for token in logprobs[0]]


def _single(
    send: Callable[..., Completions],
    samples: Sequence[int],
    prompts: Sequence[list[int]],
    *,
    features: Sequence[object] | None,
    generation_kwargs: Mapping[str, Any],
    **sampling: object,
) -> _Single:
    """Single requests out of one for many prompts; with token ids, for what follows on these. `send` is
    `VLLMClient.generate`, and the other arguments are its own. `samples` has by place the number of the completion
    among those of its prompt."""

    def ask(place: int, ids: list[int] | None = None) -> Completions:
        further = dict(generation_kwargs)
        if further.get("seed") is not None:
            further["seed"] += samples[place]  # as vLLM seeds the samples of a prompt
        chosen = None if features is None else [features[place]]
        return send([ids or prompts[place]], features=chosen, generation_kwargs=further, **sampling)

    return ask


@contextlib.contextmanager
def vllm_engine_options(options: Callable[[], Mapping[str, object]]) -> Iterator[None]:
    """While active, a `GRPOTrainer` under construction builds `SalesVLLMGeneration` with these engine options."""

    def build(*args: Any, **kwargs: Any) -> SalesVLLMGeneration:
        return SalesVLLMGeneration(*args, engine_options=options(), **kwargs)

    with patched(upstream_trainer, "VLLMGeneration", build):
        yield


def pack_tied_weights_again(model: torch.nn.Module) -> None:
    """Have vLLM's next reload pack a tied output head. For a CPU vLLM keeps a packed copy of each layer's weight, and
    a reload packs the layers whose weights come. A tied head's weight comes for the embedding alone, so its copy would
    be of the weights before (vLLM 0.31: log-probs were off by 2 nats). A layer that waits for none is packed last."""
    owners: dict[int, torch.nn.Module] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is not None and owners.setdefault(id(weight), layer) is not layer and hasattr(layer, "cpu_linear"):
            from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

            get_layerwise_info(layer).load_numel_total = 0


def pushes_all_weights(model: PreTrainedModel) -> bool:
    """Whether the trainer's push sets every weight of a colocated engine. TRL pushes parameters, so saved buffers,
    such as a router's bias, stay the engine's. A quantised engine quantises while it reads. A vision tower over random
    weights stays wrong: of a Qwen2.5-VL on a CPU, log-probs were off by 0.72 nats."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return (
        parameters.issuperset(model.state_dict())
        and not getattr(model, "is_quantized", False)
        and getattr(getattr(model, "config", None), "vision_config", None) is None
    )


def one_token_each(ids: Sequence[int], image_token: int) -> list[int]:
    """A prompt with one token for each picture, as vLLM wants it: vLLM puts in the picture's own tokens. TRL 1.16
    gives a colocated vLLM a run of `image_token` for each, of which vLLM replaces the first (huggingface/trl#6294)."""
    return [token for place, token in enumerate(ids) if not (place and ids[place - 1] == token == image_token)]


def check_expanded(seen: Sequence[Sequence[int]], meant: Sequence[Sequence[int]]) -> None:
    """Raise `ConfigError` unless vLLM sampled from the prompts that the policy is trained on."""
    for place, (ids, expected) in enumerate(zip(seen, meant, strict=True)):
        if list(ids) != list(expected):
            raise ConfigError(
                f"vLLM reads the pictures of prompt {place} as {len(ids)} tokens with the text, and the trainer as "
                f"{len(expected)}: completions would come from another prompt than they are trained on. Expected "
                "the same processor on both sides, and a model whose pictures are one run of image tokens each. Leave "
                "`mm_processor_kwargs` out of `vllm_engine_kwargs`, or set `use_vllm: false`."
            )
