"""From settings to the way in which the colocated vLLM engine starts, and to the engine that it compiles.

Owns this decision. Imports no vLLM, so that the banner may ask. `generation.compiled` owns the folder.
"""

from enum import Enum

import torch

from salesrl_trl.config.training import SalesGRPOConfig

GRAPHS_ALONE = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""vLLM's `compilation_config` for CUDA graphs of whole decoding steps, and no compiler."""


class Start(Enum):
    """What an engine makes at its start."""

    EAGER = "eager"
    GRAPHS = "with CUDA graphs, and compiles nothing"
    COMPILED = "compiled, with CUDA graphs"


def engine_start(args: SalesGRPOConfig) -> Start:
    """What the colocated engine makes at its start."""
    eager = args.parsed_engine_kwargs().get("enforce_eager")
    if eager is None:
        return Start.EAGER if args.device.type == "cpu" else Start.GRAPHS
    return Start.EAGER if eager else Start.COMPILED


def compiled_engine(args: SalesGRPOConfig, model: str) -> dict[str, object]:
    """The settings that vLLM compiles an engine for. With others it compiles again.

    Args:
        args (`SalesGRPOConfig`):
            Settings.
        model (`str`):
            Folder or hub name of the policy.
    """
    parallel = args.vllm_tensor_parallel_size
    return {
        "model": model,
        "number_format": [args.bf16, args.fp16],
        "max_model_length": args.vllm_max_model_length,
        "sequences": args.per_device_train_batch_size * parallel * args.steps_per_generation,  # as TRL counts them
        "tensor_parallel_size": parallel,
        "sleep_mode": args.vllm_enable_sleep_mode,
        "implementation": args.vllm_model_impl,
        "further": args.parsed_engine_kwargs(),
        "device": torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else args.device.type,
    }
