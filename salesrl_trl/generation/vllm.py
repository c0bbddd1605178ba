"""vLLM, in the trainer's process or as a server: the engine options TRL does not pass through, completions that are
told of one by one, requests that go on in the background, and the weight push on a CPU.

Owns what differs from TRL's `VLLMGeneration`; when to generate and what to do with a completion stay TRL's and the
trainer's. vLLM is imported only while an engine is built, so that this module costs nothing without it.
"""

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from threading import Semaphore
from types import SimpleNamespace
from typing import Any

import torch
import trl.generation.vllm_generation as upstream_vllm
import trl.trainer.grpo_trainer as upstream_trainer
from accelerate.utils import broadcast_object_list
from accelerate.utils.other import get_free_port
from transformers import PreTrainedModel
from trl.generation.vllm_generation import VLLMGeneration

from salesrl_trl.generation.requests import MOST_REQUESTS, Requests
from salesrl_trl.process import allow_files
from salesrl_trl.replaced import replaced


def engine_kwargs(
    *,
    enforce_eager: bool,
    load_format: str,
    dtype: str,
    seed: int,
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The engine options TRL 1.16 does not pass through, for `vllm.LLM`.

    Args:
        enforce_eager (`bool`):
            Skip compilation and CUDA graphs: starts fast, generates two to three times slower on a GPU.
        load_format (`str`):
            `"auto"` reads the checkpoint. `"dummy"` leaves the weights random until the first push, which TRL always
            makes before the first generation.
        dtype (`str`):
            Number format of vLLM's weights and activations, for example `"bfloat16"`.
        seed (`int`):
            Seed of the sampler. TRL's is the rank alone, so two runs with different seeds would sample alike.
        extra (`dict`, *optional*):
            Further `vllm.LLM` arguments; they win over all others, TRL's own included.
    """
    return {
        "enforce_eager": enforce_eager,
        "load_format": load_format,
        "dtype": dtype,
        "seed": seed,
        **(extra or {}),
    }


_ALONE = SimpleNamespace(is_main_process=True, process_index=0)
"""Of a process's `Accelerator`, what TRL's `generate` reads where a server is asked."""


class SalesVLLMGeneration(VLLMGeneration):
    """TRL's vLLM generation with engine options, a server that is asked for each completion by itself, and a weight
    push that works on a CPU.

    Changes three things only, and adds `streamed`, `begun`, `answered` and `settle`:
    - `_init_vllm` builds the engine with `engine_options` beside TRL's own arguments, and gives every process a client
      of the server that keeps as many connections as it has requests in flight;
    - `generate` asks a server for completions one by one, from every process, while those are active;
    - `sync_weights` waits for the server's answers first, so that a completion is of one policy. On a CPU it reloads
      all weights through the worker, because vLLM's CPU backend repacks parameters after loading and TRL's
      parameter-by-parameter push then fails.

    Args:
        engine_options (`dict[str, Any]`):
            From `engine_kwargs`.
        kwargs:
            TRL's own.
    """

    vllm_client: Any

    def __init__(self, *args: Any, engine_options: dict[str, Any], **kwargs: Any) -> None:
        self.engine_options = engine_options
        self._ask: Callable[..., dict[str, Any]] | None = None
        self._waits = True
        self._under_way: list[Requests] = []
        self._slots = Semaphore(MOST_REQUESTS)
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        stock = upstream_vllm.LLM

        @functools.wraps(stock)
        def build(**kwargs: Any) -> Any:
            return stock(**{**kwargs, **self.engine_options})

        # Without a named port TRL takes the first free one of a short list, and two runs that start together take the
        # same. A launcher of several processes has named one.
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
        """Push the training weights into vLLM and drop its prefix cache."""
        if self.mode == "server":
            self.settle()
            super().sync_weights()
            self.accelerator.wait_for_everyone()  # nobody asks before the weights are there
            return
        if self.accelerator.device.type != "cpu":
            super().sync_weights()
            return
        worker = self.llm.llm_engine.model_executor.driver_worker
        worker = getattr(worker, "worker", worker)
        worker.reload_weights(weights_iterator=self._iter_named_params())
        self.llm.reset_prefix_cache()

    @contextlib.contextmanager
    def streamed(self, finished: Callable[[int, Sequence[int]], None], size: int) -> Iterator[None]:
        """While active, tell of each completion as soon as it is finished.

        Args:
            finished (`Callable[[int, Sequence[int]], None]`):
                Called with a completion's place in the batch and its token ids, in between two steps of a colocated
                engine; of a server, in another thread.
            size (`int`):
                Completions of this process. Under tensor parallelism every process of a group generates those of all;
                others' are not told.
        """
        with self._served(finished) if self.mode == "server" else self._stepped(finished, size):
            yield

    @contextlib.contextmanager
    def begun(self, finished: Callable[[int, Sequence[int]], None]) -> Iterator[list[Requests]]:
        """While active, `generate` asks the server for this process's completions and returns none of them: what was
        asked for is in the list that this yields, for `answered`.

        Args:
            finished (`Callable[[int, Sequence[int]], None]`):
                As of `streamed`; called from another thread.
        """
        begun: list[Requests] = []

        def ask(send: Any, samples: list[int], **request: Any) -> dict[str, Any]:
            begun.append(self._request(send, samples, finished, **request))
            return {"prompt_ids": [], "completion_ids": [], "logprobs": [], "logprob_token_ids": []}

        with replaced(self, "_ask", ask), replaced(self, "_waits", False):
            yield begun

    @contextlib.contextmanager
    def answered(self, requests: Requests) -> Iterator[None]:
        """While active, `generate` returns what came of these, once all of it is there."""
        with replaced(self, "_ask", lambda send, samples, **request: requests.result()):
            yield

    def settle(self) -> None:
        """Wait until the server has answered everything that any process asked it for; a collective."""
        while self._under_way:
            self._under_way[-1].join()
            self._under_way.pop()
        self.accelerator.wait_for_everyone()

    def generate(
        self, prompts: list[list[int]], images: list[Any] | None, num_generations: int, profiler: Any = None
    ) -> tuple[Any, ...]:
        """TRL's `generate`; of a server, where it is streamed, each process asks for its own completions.

        TRL gathers all prompts in the first process, whose one request is answered when the last completion is
        finished. Here each completion is a request of its own. The server batches them all the same.
        """
        if self._ask is None:
            return super().generate(prompts, images, num_generations, profiler)  # type: ignore[no-any-return]
        first = self.accelerator.process_index * len(prompts)
        samples = [place % num_generations for place in range(first, first + len(prompts))]
        with (
            replaced(self.vllm_client, "generate", functools.partial(self._ask, self.vllm_client.generate, samples)),
            replaced(self, "accelerator", _ALONE),
            replaced(upstream_vllm, "gather_object", lambda each: each),
            replaced(upstream_vllm, "broadcast_object_list", lambda each, from_process: each),
        ):
            return super().generate(prompts, images, 1, profiler if self._waits else None)  # type: ignore[no-any-return]

    def _request(
        self,
        send: Callable[..., dict[str, Any]],
        samples: list[int],
        finished: Callable[[int, Sequence[int]], None],
        *,
        prompts: list[list[int]],
        features: list[Any] | None,
        n: int,
        generation_kwargs: dict[str, Any],
        **sampling: Any,
    ) -> Requests:
        """Ask for one completion of each prompt, which is such a sample of it, by `VLLMClient.generate`."""

        def one(place: int) -> dict[str, Any]:
            further = dict(generation_kwargs)
            if further.get("seed") is not None:
                further["seed"] += samples[place]  # as vLLM seeds the samples of a prompt
            chosen = None if features is None else [features[place]]
            return send([prompts[place]], features=chosen, n=n, generation_kwargs=further, **sampling)

        self._under_way = [each for each in self._under_way if each.in_flight]
        taken = {each.lane for each in self._under_way}
        lane = next(number for number in itertools.count() if number not in taken)
        requests = Requests(one, len(prompts), finished, self._slots, lane)
        self._under_way.append(requests)
        return requests

    @contextlib.contextmanager
    def _served(self, finished: Callable[[int, Sequence[int]], None]) -> Iterator[None]:
        def ask(send: Any, samples: list[int], **request: Any) -> dict[str, Any]:
            return self._request(send, samples, finished, **request).result()

        with replaced(self, "_ask", ask):
            yield

    @contextlib.contextmanager
    def _stepped(self, finished: Callable[[int, Sequence[int]], None], size: int) -> Iterator[None]:
        """`LLM.generate` adds all its requests in order and then asks the engine for one step after another; both are
        listened to."""
        first = 0
        if self.tensor_parallel_size > 1:
            first = torch.distributed.get_rank(group=self.tp_group) * size
        engine = self.llm.llm_engine
        add_request, step = engine.add_request, engine.step
        places: dict[str, int] = {}

        def noted(request_id: str, *args: Any, **kwargs: Any) -> Any:
            places[request_id] = len(places) - first
            return add_request(request_id, *args, **kwargs)

        def told() -> Any:
            outputs = step()
            for output in outputs:
                if output.finished and 0 <= (place := places[output.request_id]) < size:
                    finished(place, output.outputs[0].token_ids)
            return outputs

        with replaced(engine, "add_request", noted), replaced(engine, "step", told):
            try:
                yield
            except BaseException:  # an interruption: the next generation would be told of these too
                with contextlib.suppress(Exception):  # of an engine that is gone: the first error is the one to tell
                    engine.abort_request(list(places))
                raise


@contextlib.contextmanager
def vllm_engine_options(options: dict[str, Any]) -> Iterator[None]:
    """While active, a `GRPOTrainer` under construction builds `SalesVLLMGeneration` with these engine options."""
    build = functools.partial(SalesVLLMGeneration, engine_options=options)
    with replaced(upstream_trainer, "VLLMGeneration", build):
        yield


def has_tied_head(model: PreTrainedModel) -> bool:
    """Whether the output head shares the input embedding's weights.

    vLLM's CPU backend leaves such a head at its initial values on `reload_weights` (seen with 0.31: a mean log-prob
    difference of 2.02 where an untied model has 0.002), so that every completion is noise.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and embedding is not None and head.weight is embedding.weight


def vllm_dtype(requested: str, *, bf16: bool, fp16: bool, model_dtype: torch.dtype | None) -> str:
    """The number format vLLM should sample in, so that it agrees with the training forward.

    Args:
        requested (`str`):
            `"auto"`, or a vLLM dtype that is returned as it is.
        bf16 (`bool`):
            Training runs under bf16 autocast.
        fp16 (`bool`):
            Training runs under fp16 autocast.
        model_dtype (`torch.dtype`, *optional*):
            Of the training weights; decides where neither flag is set.
    """
    if requested != "auto":
        return requested
    if bf16:
        return "bfloat16"
    if fp16:
        return "float16"
    return "auto" if model_dtype is None else str(model_dtype).removeprefix("torch.")
