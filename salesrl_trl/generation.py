"""vLLM inside the trainer: the engine options TRL does not pass through, and the weight push on a CPU.

Owns what differs from TRL's `VLLMGeneration`; when to generate and what to do with a completion stay TRL's and the
trainer's. vLLM is imported only while an engine is built, so that this module costs nothing without it.
"""

import contextlib
import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import trl.generation.vllm_generation as upstream_vllm
import trl.trainer.grpo_trainer as upstream_trainer
from transformers import PreTrainedModel
from trl.generation.vllm_generation import VLLMGeneration


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


_MOST_REQUESTS = 1024
"""In flight to a server: as many sequences as vLLM's generates at once by default, on the GPUs where it is most."""


class SalesVLLMGeneration(VLLMGeneration):
    """TRL's vLLM generation with engine options, and with a weight push that works on a CPU.

    Changes two things only, and adds `streamed`:
    - `_init_vllm` builds the engine with `engine_options` beside TRL's own arguments, and lets the client of a server
      keep as many connections as it has requests in flight;
    - `sync_weights` on a CPU reloads all weights through the worker, because vLLM's CPU backend repacks parameters
      after loading and TRL's parameter-by-parameter push then fails.

    Args:
        engine_options (`dict[str, Any]`):
            From `engine_kwargs`.
        kwargs:
            TRL's own.
    """

    def __init__(self, *args: Any, engine_options: dict[str, Any], **kwargs: Any) -> None:
        self.engine_options = engine_options
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        stock = upstream_vllm.LLM

        @functools.wraps(stock)
        def build(**kwargs: Any) -> Any:
            return stock(**{**kwargs, **self.engine_options})

        with _replaced(upstream_vllm, "LLM", build):
            super()._init_vllm()
        if self.mode == "server" and self.accelerator.is_main_process:
            client = self.vllm_client
            client.session.get_adapter(client.base_url).init_poolmanager(1, _MOST_REQUESTS)

    def sync_weights(self) -> None:
        """Push the training weights into vLLM and drop its prefix cache."""
        if self.mode != "colocate" or self.accelerator.device.type != "cpu":
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
                engine.
            size (`int`):
                Completions of this process. Under tensor parallelism every process of a group generates those of all;
                others' are not told.
        """
        with self._served(finished) if self.mode == "server" else self._stepped(finished, size):
            yield

    @contextlib.contextmanager
    def _served(self, finished: Callable[[int, Sequence[int]], None]) -> Iterator[None]:
        """TRL asks a server for all completions in one request, which is answered when the last one is finished; here
        each is a request of its own. The server batches them all the same."""
        ask = self.vllm_client.generate

        def one_by_one(
            prompts: list[list[int]],
            features: list[Any] | None = None,
            n: int = 1,
            generation_kwargs: dict[str, Any] | None = None,
            **sampling: Any,
        ) -> dict[str, Any]:
            def one(place: int) -> dict[str, Any]:
                prompt, sample = divmod(place, n)
                further = dict(generation_kwargs or {})
                if further.get("seed") is not None:
                    further["seed"] += sample  # as vLLM seeds the samples of a prompt
                chosen = None if features is None else [features[prompt]]
                return ask([prompts[prompt]], features=chosen, n=1, generation_kwargs=further, **sampling)  # type: ignore[no-any-return]

            outputs: list[Any] = [None] * (len(prompts) * n)
            for place, output in _as_completed(one, len(outputs), _MOST_REQUESTS):
                outputs[place] = output
                finished(place, output["completion_ids"][0])
            merged: dict[str, Any] = {
                name: None if outputs[0][name] is None else [output[name][0] for output in outputs]
                for name in outputs[0]
            }
            return {**merged, "prompt_ids": merged["prompt_ids"][::n]}

        with _replaced(self.vllm_client, "generate", one_by_one):
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

        with _replaced(engine, "add_request", noted), _replaced(engine, "step", told):
            yield


@contextlib.contextmanager
def vllm_engine_options(options: dict[str, Any]) -> Iterator[None]:
    """While active, a `GRPOTrainer` under construction builds `SalesVLLMGeneration` with these engine options."""
    build = functools.partial(SalesVLLMGeneration, engine_options=options)
    with _replaced(upstream_trainer, "VLLMGeneration", build):
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


def _as_completed(call: Callable[[int], Any], count: int, limit: int) -> Iterator[tuple[int, Any]]:
    """What `call` returns of each number below `count`, as it comes, `limit` at a time. Threads are daemons: where one
    fails, or this thread is interrupted, nobody waits for the others."""
    numbers, results = deque(range(count)), queue.SimpleQueue[tuple[int, Any, Exception | None]]()

    def work() -> None:
        with contextlib.suppress(IndexError):  # none left
            while True:
                number = numbers.popleft()
                try:
                    results.put((number, call(number), None))
                except Exception as error:  # raised in the thread that waits
                    results.put((number, None, error))

    for _ in range(min(count, limit)):
        threading.Thread(target=work, daemon=True).start()
    try:
        for _ in range(count):
            number, output, error = results.get()
            if error is not None:
                raise error
            yield number, output
    finally:
        numbers.clear()


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
