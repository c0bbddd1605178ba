"""vLLM, in the trainer's process or as a server.

Owns what differs from TRL's `VLLMGeneration`:

- engine options that TRL does not pass through;
- each completion is reported when it is finished;
- requests to a server go on in the background;
- prompts with pictures have one token for each picture;
- the weight push of an adapter (`generation.merging`), and that on a CPU.

Refuses to decide when to generate, and what to do with a completion. vLLM is imported only while an engine is built,
so that this module costs nothing without it.
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

from salesrl_trl.generation.merging import merged_beside, why_in_place
from salesrl_trl.generation.pictures import check_expanded, one_token_each
from salesrl_trl.generation.requests import MOST_REQUESTS, Completions, Requests
from salesrl_trl.ground.patched import replaced
from salesrl_trl.ground.process import allow_files

logger = logging.getLogger(__name__)


def engine_kwargs(
    *,
    enforce_eager: bool,
    load_format: str,
    dtype: str,
    seed: int,
    extra: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """The engine options that TRL 1.16 does not pass through, for `vllm.LLM`.

    `enforce_eager`: Skip compilation and CUDA graphs: the engine starts fast, and generates two to three times slower
    on a GPU. `load_format`: `"auto"` reads the checkpoint. `"dummy"` leaves the weights random until the first push,
    which TRL always makes before the first generation; see `pushes_all_weights`. `dtype`: number format of vLLM's
    weights and activations, for example `"bfloat16"`. `seed`: Seed of the sampler. TRL takes the rank alone, so two
    runs with different seeds would sample alike. `extra`: further `vllm.LLM` arguments. They replace all others, those
    of TRL too.
    """
    return {
        "enforce_eager": enforce_eager,
        "load_format": load_format,
        "dtype": dtype,
        "seed": seed,
        **(extra or {}),
    }


_ALONE = SimpleNamespace(is_main_process=True, process_index=0)
"""The only process: the members of `Accelerator` that TRL's `generate` reads before it asks a server."""
_Single = Callable[[int], Completions]
"""Asks the server for the completion at this place."""


class SalesVLLMGeneration(VLLMGeneration):
    """TRL's vLLM generation, with engine options, single requests to a server, and a weight push on a CPU.

    Changes three methods, and adds `streamed`, `begun`, `answered` and `settle`:

    - `_init_vllm` builds the engine with `engine_options` beside TRL's own arguments. Every process gets a client of
      the server, with as many connections as it has requests in flight.
    - While `streamed`, `begun` or `answered` is active, `generate` asks a server for completions one by one, from
      every process.
    - `sync_weights` waits for the server's answers first, so that each completion is sampled by one policy. On a CPU,
      and for an engine that quantises, it reloads all weights through the worker: parameters are repacked or
      quantised after loading, so that TRL's push of single ones fails. An adapter is merged beside its base.

    `engine_options`: from `engine_kwargs`.
    """

    vllm_client: Any
    processing_class: Any = None
    _merges_beside = False

    def __init__(self, *args: object, engine_options: Mapping[str, object], **kwargs: object) -> None:
        self.engine_options = engine_options
        self._collect: Callable[[_Single, int], Completions] | None = None  # asks for so many completions, one by one
        self._waits = True
        self._under_way: list[Requests] = []
        self._slots = Semaphore(MOST_REQUESTS)
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
        with replaced(upstream_vllm, "LLM", build):
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
        with merged_beside(self.model) if self._merges_beside else contextlib.nullcontext():
            self._push()

    def _push(self) -> None:
        if self.mode == "server":
            self.settle()
            super().sync_weights()
            if self._reads_pictures and self.accelerator.is_main_process:
                self.vllm_client.session.post(f"{self.vllm_client.base_url}/reset_encoder_cache").raise_for_status()
            self.accelerator.wait_for_everyone()  # no process asks before the weights are there
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
        worker.reload_weights(weights_iterator=self._iter_named_params())
        self.llm.reset_prefix_cache()
        self._forget_pictures()

    @property
    def _reads_pictures(self) -> bool:
        return isinstance(self.processing_class, ProcessorMixin)

    def _forget_pictures(self) -> None:
        """Drop what the vision tower made of pictures with the weights before. TRL drops the texts' cache alone."""
        if self._reads_pictures:
            self.llm.llm_engine.reset_encoder_cache()

    @contextlib.contextmanager
    def streamed(self, finished: Callable[[int, Sequence[int]], None], size: int) -> Iterator[None]:
        """While active, report each completion as soon as it is finished.

        `finished`: called with a completion's place in the batch and its token ids. With a colocated engine it is
        called between two steps; with a server, from another thread. `size`: Completions of this process. Under tensor
        parallelism every process of a group generates those of the whole group. Those of other processes are not
        reported.
        """
        if self.mode != "server":
            with self._stepped(finished, size):
                yield
            return
        with replaced(self, "_collect", lambda single, count: self._request(single, count, finished).result()):
            yield

    @contextlib.contextmanager
    def begun(self, finished: Callable[[int, Sequence[int]], None]) -> Iterator[list[Requests]]:
        """While active, `generate` asks the server for the completions of this process and returns none of them.

        `finished`: as in `streamed`. Called from another thread.

        Yields:
            `list[Requests]`: the requests, for `answered`.
        """
        begun: list[Requests] = []

        def begin(single: _Single, count: int) -> Completions:
            begun.append(self._request(single, count, finished))
            return {"prompt_ids": [], "completion_ids": [], "logprobs": [], "logprob_token_ids": []}

        with replaced(self, "_collect", begin), replaced(self, "_waits", False):
            yield begun

    @contextlib.contextmanager
    def answered(self, requests: Requests) -> Iterator[None]:
        """While active, `generate` waits for these requests and returns their completions."""
        with replaced(self, "_collect", lambda single, count: requests.result()):
            yield

    def settle(self) -> None:
        """Wait until the server has answered all requests of all processes; a collective."""
        while self._under_way:
            self._under_way[-1].join()
            self._under_way.pop()
        self.accelerator.wait_for_everyone()

    def generate(
        self, prompts: list[list[int]], images: list[Any] | None, num_generations: int, profiler: object = None
    ) -> tuple[Any, ...]:
        """TRL's `generate`, with one token for each picture in this process. Where completions are reported, each
        process asks a server for its own completions.

        TRL gathers all prompts in the first process. Its one request is answered when the last completion is finished.
        Here each completion is a request of its own. The server batches them all the same.
        """
        if self._collect is None:
            if self.mode == "server" or images is None:
                return super().generate(prompts, images, num_generations, profiler)  # type: ignore[no-any-return]
            token = self.processing_class.image_token_id
            shortened = [one_token_each(ids, token) for ids in prompts]
            generated = super().generate(shortened, images, num_generations, profiler)
            check_expanded(generated[0], prompts)
            return generated  # type: ignore[no-any-return]
        first = self.accelerator.process_index * len(prompts)
        samples = [place % num_generations for place in range(first, first + len(prompts))]
        collect, send = self._collect, self.vllm_client.generate

        def ask(*, prompts: list[list[int]], **request: Any) -> Completions:
            return collect(_single(send, samples, prompts, **request), len(prompts))

        with (
            replaced(self.vllm_client, "generate", ask),
            replaced(self, "accelerator", _ALONE),
            replaced(upstream_vllm, "gather_object", lambda each: each),
            replaced(upstream_vllm, "broadcast_object_list", lambda each, from_process: each),
        ):
            return super().generate(prompts, images, 1, profiler if self._waits else None)  # type: ignore[no-any-return]

    def _request(self, single: _Single, count: int, finished: Callable[[int, Sequence[int]], None]) -> Requests:
        self._under_way = [each for each in self._under_way if each.in_flight]
        taken = {each.lane for each in self._under_way}
        lane = next(number for number in itertools.count() if number not in taken)
        requests = Requests(single, count, finished, self._slots, lane)
        self._under_way.append(requests)
        return requests

    @contextlib.contextmanager
    def _stepped(self, finished: Callable[[int, Sequence[int]], None], size: int) -> Iterator[None]:
        """`LLM.generate` adds all its requests in order, and then asks the engine for one step after another. Both
        methods are watched."""
        first = 0
        if self.tensor_parallel_size > 1:
            first = torch.distributed.get_rank(group=self.tp_group) * size
        engine = self.llm.llm_engine
        add_request, step = engine.add_request, engine.step
        places: dict[str, int] = {}

        def add_watched(request_id: str, *args: object, **kwargs: object) -> object:
            places[request_id] = len(places) - first
            return add_request(request_id, *args, **kwargs)

        def step_watched() -> object:
            outputs = step()
            for output in outputs:
                if output.finished and 0 <= (place := places[output.request_id]) < size:
                    finished(place, output.outputs[0].token_ids)
            return outputs

        with replaced(engine, "add_request", add_watched), replaced(engine, "step", step_watched):
            try:
                yield
            except BaseException:  # an interruption: these requests would finish in the next generation
                with contextlib.suppress(Exception):  # the engine may be gone: the first error is the one to raise
                    engine.abort_request(list(places))
                raise


def _single(
    send: Callable[..., Completions],
    samples: Sequence[int],
    prompts: Sequence[list[int]],
    *,
    features: Sequence[object] | None,
    generation_kwargs: Mapping[str, Any],
    **sampling: object,
) -> _Single:
    """Single requests out of one for many prompts.

    `send`: `VLLMClient.generate`. `samples`: by place, the number of the completion among those of its prompt.
    `prompts`, `features`, `generation_kwargs`, `sampling`: arguments of `VLLMClient.generate`.
    """

    def ask(place: int) -> Completions:
        further = dict(generation_kwargs)
        if further.get("seed") is not None:
            further["seed"] += samples[place]  # as vLLM seeds the samples of a prompt
        chosen = None if features is None else [features[place]]
        return send([prompts[place]], features=chosen, generation_kwargs=further, **sampling)

    return ask


@contextlib.contextmanager
def vllm_engine_options(options: Callable[[], Mapping[str, object]]) -> Iterator[None]:
    """While active, a `GRPOTrainer` under construction builds `SalesVLLMGeneration` with these engine options."""

    def build(*args: Any, **kwargs: Any) -> SalesVLLMGeneration:
        return SalesVLLMGeneration(*args, engine_options=options(), **kwargs)

    with replaced(upstream_trainer, "VLLMGeneration", build):
        yield


def has_tied_head(model: PreTrainedModel) -> bool:
    """Whether the output head shares the input embedding's weights.

    On `reload_weights`, vLLM's CPU backend leaves such a head at its initial values, so that every completion is
    noise. With vLLM 0.31 the mean log-prob difference was 2.02, against 0.002 of an untied model.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and embedding is not None and head.weight is embedding.weight


def pushes_all_weights(model: PreTrainedModel, on_cpu: bool) -> bool:
    """Whether the trainer's push sets every weight of a colocated engine.

    TRL pushes parameters. So a model with saved buffers, such as a router's bias, keeps those that the engine has. A
    quantised engine quantises its weights while it reads them. A vision tower over random weights stays wrong after
    the push: of a Qwen2.5-VL on a CPU, log-probs were off by 0.72 nats, and by 1e-6 over the checkpoint's weights.

    `on_cpu`: whether the engine runs on a CPU, where a tied head is not set (`has_tied_head`).
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    is_whole = parameters.issuperset(model.state_dict())
    if (
        getattr(model, "is_quantized", False)
        or getattr(getattr(model, "config", None), "vision_config", None) is not None
    ):
        return False
    return is_whole and not (on_cpu and has_tied_head(model))


def vllm_dtype(requested: str, *, bf16: bool, fp16: bool, model_dtype: torch.dtype | None) -> str:
    """The number format in which vLLM should sample, so that it agrees with the training forward pass.

    `requested`: `"auto"`, or a vLLM dtype that is returned as it is. `bf16`: Training runs under bf16 autocast.
    `fp16`: Training runs under fp16 autocast. `model_dtype`: number format of the training weights. It decides if
    neither flag is set.
    """
    if requested != "auto":
        return requested
    if bf16:
        return "bfloat16"
    if fp16:
        return "float16"
    return "auto" if model_dtype is None else str(model_dtype).removeprefix("torch.")
