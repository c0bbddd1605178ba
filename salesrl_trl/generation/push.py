"""What a push of weights needs beside TRL's own: for a CPU, for engines that quantise, and for pictures."""

from typing import Any

import torch
from transformers import PreTrainedModel


def reload_all(llm: Any, weights: Any) -> None:
    """Load all weights through vLLM's worker, which repacks parameters after loading: TRL's push of single ones fails
    on a CPU, and for an engine that quantises."""
    worker = llm.llm_engine.model_executor.driver_worker
    worker = getattr(worker, "worker", worker)
    pack_tied_weights_again(worker.model_runner.model)
    worker.reload_weights(weights_iterator=weights)
    llm.reset_prefix_cache()


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
