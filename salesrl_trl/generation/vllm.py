"""Differences from TRL's `VLLMGeneration`, for colocated vLLM and for servers."""

import contextlib
import functools
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import trl.generation.vllm_generation as upstream_vllm
from accelerate.utils import broadcast_object_list, is_peft_model
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from salesrl_trl.errors import ConfigError
from salesrl_trl.generation.engine_loop import MOST_REQUESTS, EngineLoop, Prompt, ServerLoop, TaskBatch
from salesrl_trl.generation.merging import load_all, merged_beside, why_in_place
from salesrl_trl.generation.turns import EngineLabels, ServerLabels
from salesrl_trl.ground.process import allow_files, is_in, patched

logger = logging.getLogger(__name__)

_ALONE = SimpleNamespace(is_main_process=True, process_index=0)
"""Stands for a single process: the members of `Accelerator` that TRL's `generate` reads before it queries a server."""
_NOTHING: dict[str, list[object]] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "logprob_token_ids": []}
"""What TRL receives instead of a server's response when a batch begins."""


class SalesVLLMGeneration(VLLMGeneration):
    """TRL's vLLM generation with engine options, a task loop, and a weight push of its own into a colocated engine.

    Every process has its own client for a server. While a `batch` is set, `generate` begins it on the `loop` and
    returns nothing. `sync_weights` first waits for the server's answers, so that each completion is sampled by one
    policy.
    """

    vllm_client: VLLMClient
    enable_sleep_mode: bool
    processing_class: PreTrainedTokenizerBase = None
    loop: EngineLoop | ServerLoop
    labels: EngineLabels | ServerLabels | None = None  # of the weights, if vLLM reports which ones sampled a token
    steps_done: Callable[[], int]  # the trainer's optimizer steps
    batch: TaskBatch | None = None
    _merges_beside, _engine_dtype = False, None  # the latter unknown for a server

    def __init__(self, *args: object, engine_options: Mapping[str, object], **kwargs: object) -> None:
        self.engine_options = engine_options
        super().__init__(*args, **kwargs)
        if is_peft_model(self.model):
            reason = why_in_place(self.model, self._dist.fsdp_version)
            self._merges_beside = reason is None
            if reason is not None and self.accelerator.is_main_process:
                logger.warning(
                    f"off: merging the adapter without modifying its base, because {reason}. TRL merges it into the "
                    "base and subtracts it again, so the base, and with it the KL's reference, drifts by rounding"
                )

    def _init_vllm(self) -> None:
        stock = upstream_vllm.LLM

        @functools.wraps(stock)
        def build(**kwargs: object) -> object:
            return stock(**{**kwargs, **self.engine_options})

        # vLLM only listens on the port seconds later, when it may be taken. This store listens at once, and torch lets
        # `multi_tenant` stores of one process share a listener. Launchers of several processes set a port.
        if self.mode != "server" and os.environ.get("MASTER_PORT", "").strip().lower() in ("", "0", "auto"):
            store = torch.distributed.TCPStore("localhost", 0, is_master=True, multi_tenant=True)  # type: ignore[attr-defined]
            os.environ["MASTER_PORT"] = str(store.port)
        if self.enable_sleep_mode and self.accelerator.device.type == "cpu":
            self.enable_sleep_mode = False
            logger.warning("off: `vllm_enable_sleep_mode`, because it only frees GPU memory")
        with patched(upstream_vllm, "LLM", build):
            super()._init_vllm()
        if self.mode != "server":
            from vllm.outputs import CompletionOutput

            self._engine_dtype = self.llm.llm_engine.model_config.dtype
            reports = hasattr(CompletionOutput, "weight_versions")  # from vLLM 0.33
            self.labels = labels = EngineLabels(self.llm.llm_engine) if reports else None
            self.loop = EngineLoop(self.llm, labels)
            return
        shared = ["", ""]  # the address, and a name for the weights if the server reports it
        if is_main := self.accelerator.is_main_process:
            address = self.vllm_client.base_url
            release = self.vllm_client._get(f"{address}/version").get("version")
            shared = [address, secrets.token_hex(4) if is_in(release, ">=0.33") else ""]
        broadcast_object_list(shared)
        if not is_main:
            self.vllm_client = upstream_vllm.VLLMClient(shared[0], connection_timeout=self.server_timeout)
        client = self.vllm_client
        self.labels = ServerLabels(client, shared[1]) if shared[1] else None
        allow_files(2 * MOST_REQUESTS)
        client.session.get_adapter(client.base_url).init_poolmanager(1, MOST_REQUESTS)
        self.loop = ServerLoop()

    def sync_weights(self) -> None:
        """Push the weights being trained into vLLM and reset its caches, without modifying an adapter's base."""
        with contextlib.ExitStack() as stack:
            # TRL asks for each parameter that FSDP2 shards, and an answer visits all modules (7 ms with 48 layers)
            stack.enter_context(patched(upstream_vllm, "is_peft_model", functools.cache(is_peft_model)))
            if self._merges_beside:
                stack.enter_context(merged_beside(self.model, self._engine_dtype))
            if isinstance(self.loop, ServerLoop):
                self.settle()
                stack.enter_context(self.loop.held())
                self.accelerator.wait_for_everyone()
                super().sync_weights()
                if self._reads_pictures and self.accelerator.is_main_process:
                    address = f"{self.vllm_client.base_url}/reset_encoder_cache"
                    self.vllm_client.session.post(address).raise_for_status()
                if self.labels is not None and self.accelerator.is_main_process:
                    self.labels.pushed(self.steps_done())
                self.accelerator.wait_for_everyone()  # no process sends requests before the weights have arrived
                return
            with self.loop.pushing():
                if self.enable_sleep_mode:
                    upstream_vllm.empty_cache()
                    self.llm.wake_up(tags=["weights"])
                    self._llm_weights_sleeping = False
                repacks = self.accelerator.device.type == "cpu" or "quantization" in self.engine_options
                load_all(self.llm, self._iter_named_params(), repacks, frees=self._dist.fsdp_version == 1)
            if self._reads_pictures:  # TRL only resets the prefix cache, not the encoder cache
                self.llm.llm_engine.reset_encoder_cache()
            if self.labels is not None:
                self.labels.pushed(self.steps_done())

    def settle(self) -> None:
        if isinstance(self.loop, ServerLoop):
            self.loop.settle()

    @property
    def _reads_pictures(self) -> bool:
        return isinstance(self.processing_class, ProcessorMixin)

    def generate(
        self, prompts: list[list[int]], images: list[object] | None, num_generations: int, profiler: object = None
    ) -> tuple[object, ...]:
        """TRL's `generate`, which begins a `batch` if there is one. A colocated vLLM does not detokenise, which TRL
        does not need and which slows small models down, and gets one token per image. Each process requests its own
        completions from a server one by one, whereas TRL's single request returns when the last is finished."""
        batch = self.batch
        if self.mode == "server":
            if batch is None:
                return super().generate(prompts, images, num_generations, profiler)  # type: ignore[no-any-return]
            return self._begin_on_server(batch, prompts, images, num_generations, profiler)
        has_stop = "stop" in self.generation_kwargs  # stop strings, which vLLM searches for in its texts
        texts = {} if has_stop else {"detokenize": False}
        seen = prompts
        if images is not None:
            seen = [one_token_each(ids, self.processing_class.image_token_id) for ids in prompts]
        with contextlib.ExitStack() as stack:
            flat = {} if batch is None else {"flat_logprobs": True}  # avoids an object per token
            stack.enter_context(patched(self, "generation_kwargs", {**texts, **self.generation_kwargs, **flat}))
            if batch is not None:
                stack.enter_context(patched(self.llm, "generate", self._begin))
            generated = super().generate(seen, images, num_generations, profiler)
        if images is not None:
            check_expanded(generated[0] if batch is None else batch.read, prompts)
        return generated  # type: ignore[no-any-return]

    def _begin(self, prompts: Sequence[Prompt], sampling_params: object, **_: object) -> list[object]:
        """Replaces `LLM.generate`. With tensor parallelism each rank generates its whole group's completions."""
        batch = self.batch
        assert batch is not None
        first = 0
        if self.tensor_parallel_size > 1:
            first = torch.distributed.get_rank(group=self.tp_group) * len(batch)
        batch.begin(prompts, [sampling_params] * len(prompts), first)
        self.loop.run(batch, ahead=batch.ahead and not self.enable_sleep_mode)  # sleeping frees the engine's memory
        if batch.is_over:
            batch.check()
        return []

    def _begin_on_server(
        self, batch: TaskBatch, prompts: list[list[int]], images: list[object] | None, group: int, profiler: object
    ) -> tuple[object, ...]:
        first = self.accelerator.process_index * len(prompts)
        send = self.vllm_client.generate if not isinstance(self.labels, ServerLabels) else self.labels.generate

        def begin(
            *, prompts: list[list[int]], features: list[object] | None, generation_kwargs: Mapping[str, Any],
            **request: object,
        ) -> dict[str, list[object]]:  # fmt: skip
            params = []
            for place in range(len(prompts)):
                further = dict(generation_kwargs)
                if further.get("seed") is not None:
                    further["seed"] += (first + place) % group  # as vLLM seeds a prompt's samples
                chosen = None if features is None else [features[place]]
                params.append((send, {**request, "features": chosen, "generation_kwargs": further}))
            batch.begin([{"prompt_token_ids": ids} for ids in prompts], params)
            self.loop.run(batch, ahead=batch.ahead)
            return _NOTHING

        with (
            patched(self.vllm_client, "generate", begin),
            patched(self, "accelerator", _ALONE),
            patched(upstream_vllm, "gather_object", _own),
            patched(upstream_vllm, "broadcast_object_list", _own),
        ):
            waits = None if batch.ahead else profiler
            return super().generate(prompts, images, 1, waits)  # type: ignore[no-any-return]


def _own(value: object, from_process: int = 0) -> object:
    return value


def one_token_each(ids: Sequence[int], image_token: int) -> list[int]:
    """A prompt with one token per image, which vLLM expands. TRL 1.16 passes a colocated vLLM a run of `image_token`
    for each, of which vLLM only replaces the first (huggingface/trl#6294)."""
    return [token for place, token in enumerate(ids) if not (place and ids[place - 1] == token == image_token)]


def check_expanded(seen: Sequence[Sequence[int]], meant: Sequence[Sequence[int]]) -> None:
    """Raise `ConfigError` unless vLLM sampled from the same prompts as used in training."""
    for place, (ids, expected) in enumerate(zip(seen, meant, strict=True)):
        if list(ids) != list(expected):
            raise ConfigError(
                f"vLLM expands prompt {place} with its images to {len(ids)} tokens, and the trainer to "
                f"{len(expected)}: completions would be trained on a different prompt. Expected the same processor on "
                "both sides, and a model with one run of image tokens per image. Remove `mm_processor_kwargs` from "
                "`vllm_engine_kwargs`, or set `use_vllm: false`."
            )
