"""From settings to the engine that vLLM compiles, and whether it compiles one.

Owns this decision. Imports no vLLM, so that the banner may ask. `generation.compiled` owns the folder.
"""

import torch

from salesrl_trl.config.training import SalesGRPOConfig
from salesrl_trl.generation import compiled


def starts_eager(args: SalesGRPOConfig, model: str) -> bool:
    """Whether the colocated engine starts without compilation and CUDA graphs.

    Args:
        args (`SalesGRPOConfig`):
            Settings.
        model (`str`):
            Folder or hub name of the policy.
    """
    if args.vllm_enforce_eager is not None:
        return args.vllm_enforce_eager
    if args.device.type == "cpu":
        return True
    return args.compiled is not None and not compiled.has_engine(args.compiled, compiled_engine(args, model))


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
        "number_format": [args.vllm_dtype, args.bf16, args.fp16],
        "max_model_length": args.vllm_max_model_length,
        "sequences": args.per_device_train_batch_size * parallel * args.steps_per_generation,  # as TRL counts them
        "tensor_parallel_size": parallel,
        "sleep_mode": args.vllm_enable_sleep_mode,
        "implementation": args.vllm_model_impl,
        "further": args.parsed_engine_kwargs(),
        "device": torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else args.device.type,
    }
