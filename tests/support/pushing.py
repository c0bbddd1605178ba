"""The push of weights to vLLM, into an engine that only takes them."""

import hashlib
from contextlib import nullcontext
from types import SimpleNamespace

import torch

from salesrl_trl.generation.engine_loop import ServerLoop
from salesrl_trl.generation.vllm import SalesVLLMGeneration

GPU, CPU, SERVER = "an engine on a GPU", "an engine on a CPU", "a server"
"""The ways of a push: vLLM's model's `load_weights`, the worker's `reload_weights`, and the stream to a server."""


def llm_of(load_weights=None, reload_weights=None):
    """Stands for vLLM's `LLM`: what a push uses of it."""
    runner = SimpleNamespace(model=SimpleNamespace(load_weights=load_weights, modules=list))
    worker = SimpleNamespace(model_runner=runner, reload_weights=reload_weights)
    engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))
    return SimpleNamespace(llm_engine=engine, reset_prefix_cache=lambda: None)


def generation_of(model, way=GPU, take=lambda name, weight: None, fsdp_version=None):
    """Our generation of a policy, without vLLM. `take` is called with the name and the tensor of each weight that the
    engine gets."""

    class Generation(SalesVLLMGeneration):
        def _init_vllm(self):
            """No engine."""

    def take_all(weights):
        for name, weight in weights:
            take(name, weight)

    plugin = SimpleNamespace(fsdp_version=fsdp_version) if fsdp_version else None
    accelerator = SimpleNamespace(
        device=torch.device("cuda" if way == GPU else "cpu"), is_main_process=True, wait_for_everyone=lambda: None,
        state=SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=plugin),
    )  # fmt: skip
    made = Generation(model, accelerator, None, engine_options={}, mode="server" if way == SERVER else "colocate")
    made.llm = llm_of(take_all, lambda weights_iterator: take_all(weights_iterator))
    made.loop = ServerLoop() if way == SERVER else SimpleNamespace(pushing=nullcontext)
    made.vllm_client = SimpleNamespace(
        update_named_params=lambda metadata, weights: take_all(weights), reset_prefix_cache=lambda: None
    )
    return made


def pushed(model, way=GPU, **given):
    """What the engine gets: a copy of each weight, by its name."""
    got = {}
    generation_of(model, way, lambda name, weight: got.update({name: weight.detach().clone()}), **given).sync_weights()
    return got


def digest_of(parameters):
    """A digest of the bits of named tensors."""
    digest = hashlib.sha256()
    for name, weight in parameters:
        digest.update(name.encode())
        digest.update(weight.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
