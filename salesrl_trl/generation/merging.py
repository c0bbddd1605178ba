"""Additions to TRL's weight push to vLLM. TRL merges an adapter into its base in place and subtracts it after the
push. In 16 bits both operations round, so the base drifts, although it is the KL's reference and the model that the
adapter will be loaded onto."""

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from salesrl_trl.ground.process import patched

WEIGHTS_A_CALL = 32  # of vLLM's `load_weights`, for which TRL makes a call each
_Place = tuple[torch.nn.Module, str]  # a layer with an adapter, and a parameter name of its base layer


@contextlib.contextmanager
def merged_beside(model: PeftModel, engine: torch.dtype | None = None) -> Iterator[None]:
    """While active, merging the adapter does not modify the base.

    Between `merge_adapter` and `unmerge_adapter`, `named_parameters` yields merged weights instead of base and adapter
    weights. Each is computed lazily by peft's own `merge` on float32 copies of its layer, then `dithered` once to the
    dtype of the `engine`, or the weight's if that is unknown. bitsandbytes 4-bit weights are requantised, as in peft.
    """
    merge, named_parameters = model.merge_adapter, model.named_parameters

    def merged(prefix: str = "", recurse: bool = True, **kwargs: bool) -> Iterator[tuple[str, torch.Tensor]]:
        return _merged(named_parameters(prefix, recurse, **kwargs), model, engine)

    with contextlib.ExitStack() as until_unmerged:

        def begin() -> None:
            merge(adapter_names=[])  # merges nothing, but raises peft's errors for models that cannot be merged
            until_unmerged.enter_context(patched(model, "named_parameters", merged))

        with patched(model, "merge_adapter", begin), patched(model, "unmerge_adapter", until_unmerged.close):
            yield


def why_in_place(model: torch.nn.Module, fsdp_version: int | None) -> str | None:
    """Why `merged_beside` does not work for a policy, else `None`. `fsdp_version`: 1 or 2 if FSDP shards it."""
    if fsdp_version == 1:
        return "FSDP1 stores many layers' weights in one flat tensor (FSDP2 does not)"
    if getattr(model, "is_quantized", False) and not getattr(model, "is_loaded_in_4bit", False):
        return "only bitsandbytes 4-bit quantised bases can be copied layer by layer"
    return None


def _merged(
    parameters: Iterable[tuple[str, torch.Tensor]], model: torch.nn.Module, engine: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    adapters: set[torch.Tensor] = set()
    for layer in layers:
        adapters |= set(layer.parameters()).difference(layer.get_base_layer().parameters())
    places: dict[torch.Tensor, list[_Place]] = {}
    for layer in layers:
        for name, weight in layer.get_base_layer().named_parameters(recurse=False):
            has_bias = any(getattr(layer, "lora_bias", {"": True}).values())
            if getattr(layer, "parameter_name", name) == name and (name != "bias" or has_bias):
                places.setdefault(weight, []).append((layer, name))
    for name, parameter in parameters:
        if parameter in places:
            # peft adds a prefix for embeddings with trainable tokens, which TRL does not strip
            yield name.replace(".token_adapter", ""), _merged_weight(parameter, places[parameter], engine)
        elif parameter not in adapters:
            yield name, parameter


@torch.no_grad()
def _merged_weight(parameter: torch.Tensor, places: Sequence[_Place], engine: torch.dtype | None) -> torch.Tensor:
    """The parameter merged with the adapters of these layers, which are several if they share it."""
    copies: dict[torch.Tensor, torch.Tensor] = {}
    for layer, name in places:
        clone = _float32_module(layer, copies)
        clone.merge()  # in place: layers sharing the parameter share its copy, which ends up with all adapters
        merged: torch.Tensor = getattr(clone.get_base_layer(), name)
    merged = dithered(merged.detach(), (parameter.is_floating_point() and engine) or parameter.dtype)
    if isinstance(parameter, DTensor):
        return DTensor.from_local(merged, parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim)
    return merged


def dithered(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`weight` in bfloat16, rounded up or down by fixed thresholds; in other dtypes to the nearest. A base in 16 bits
    plus less than half a rounding step is the base again: the nearest would hide most of a young adapter from vLLM."""
    if (weight.dtype, dtype) != (torch.float32, torch.bfloat16):
        return weight.to(dtype)
    seeded = torch.Generator(weight.device).manual_seed(0)  # the same on all ranks and after a resume
    thresholds = torch.randint(1 << 16, weight.shape, generator=seeded, dtype=torch.int32, device=weight.device)
    return ((weight.contiguous().view(torch.int32) + thresholds) & -(1 << 16)).view(torch.float32).to(dtype)


def _float32_module(module: torch.nn.Module, copies: dict[torch.Tensor, torch.Tensor]) -> Any:
    """A module like this one over float32 copies of its weights, cached in `copies`: shared weights have one copy."""
    clone: Any = object.__new__(type(module))  # `copy.copy` would reinitialise a module sharded by FSDP2
    for name, value in vars(module).items():
        vars(clone)[name] = copy.copy(value) if isinstance(value, (list, dict)) else value
    for held in (clone._parameters, clone._buffers):
        for name, weight in held.items():
            if weight is not None:
                if weight not in copies:
                    copies[weight] = _float32_copy(weight)
                held[name] = copies[weight]
    for name, child in module._modules.items():
        clone._modules[name] = None if child is None else _float32_module(child, copies)
    return clone


def _float32_copy(weight: torch.Tensor) -> torch.Tensor:
    if not weight.is_floating_point():  # 4 bits: peft replaces it with a requantised one
        packed = copy.copy(weight)
        vars(packed).update(dict.fromkeys(vars(packed).keys() & {"module"}))  # bitsandbytes would change its layer
        return packed
    if isinstance(weight, DTensor):  # peft assigns merged weights to `data`, which sharded tensors ignore
        weight = weight.full_tensor()
    wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)
    return torch.nn.Parameter(wide, requires_grad=False)


def load_all(llm: Any, weights: Iterator[tuple[str, torch.Tensor]], repacks: bool, frees: bool) -> None:
    """Load all weights through vLLM's worker, which afterwards `repacks` its parameters. CPUs and quantising engines
    need this. `frees`: as with FSDP1, a weight is gone when the next is asked for."""
    worker = llm.llm_engine.model_executor.driver_worker
    worker = getattr(worker, "worker", worker)
    model = worker.model_runner.model
    if repacks:
        pack_tied_weights_again(model)
        worker.reload_weights(weights_iterator=weights)
    else:  # each call visits all modules (1.4 ms with 48 layers of vLLM 0.31), and some models hold all of its weights
        most = 1 if frees else WEIGHTS_A_CALL  # vLLM's Llama 4 collects a call's weights of the vision tower
        while first := list(itertools.islice(weights, 1)):  # popped, so that it isn't in memory during the whole call
            model.load_weights(itertools.chain(map(first.pop, [0]), itertools.islice(weights, most - 1)))
    llm.reset_prefix_cache()


def pack_tied_weights_again(model: torch.nn.Module) -> None:
    """Make vLLM's next reload repack a tied output head. On CPUs vLLM keeps a packed copy of each layer's weight and
    repacks the layers that receive weights. A tied head receives none, so its copy would be stale (vLLM 0.31:
    log-probs off by 2 nats). A layer that expects none is packed last."""
    owners: dict[int, torch.nn.Module] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is not None and owners.setdefault(id(weight), layer) is not layer and hasattr(layer, "cpu_linear"):
            from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

            get_layerwise_info(layer).load_numel_total = 0


def pushes_all_weights(model: PreTrainedModel) -> bool:
    """Whether the trainer's push sets every weight of a colocated engine. TRL only pushes parameters, not saved
    buffers such as a router's bias. Quantised engines quantise at load time. A vision tower initialised randomly stays
    wrong (Qwen2.5-VL on a CPU: log-probs off by 0.72 nats)."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return (
        parameters.issuperset(model.state_dict())
        and not getattr(model, "is_quantized", False)
        and getattr(getattr(model, "config", None), "vision_config", None) is None
    )
