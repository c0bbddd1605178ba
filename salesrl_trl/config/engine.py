"""From settings to the options of the colocated vLLM engine.

Owns the mapping. `generation.vllm` hands the options to vLLM.
"""

from typing import Any

import torch

from salesrl_trl.config.training import SalesGRPOConfig
from salesrl_trl.errors import ConfigError
from salesrl_trl.generation.vllm import engine_kwargs, vllm_dtype


def engine_options(args: SalesGRPOConfig, model_dtype: torch.dtype | None) -> dict[str, Any]:
    """What `vllm.LLM` is built with beside TRL's own arguments.

    Args:
        args (`SalesGRPOConfig`):
            Settings.
        model_dtype (`torch.dtype`, *optional*):
            Of the policy's weights.

    Raises:
        `ConfigError`: options of a colocated engine are given for a server.
    """
    extra = args.parsed_engine_kwargs()
    if args.use_vllm and args.vllm_mode == "server" and (extra or args.vllm_load_format != "auto"):
        raise ConfigError(
            "`vllm_load_format` and `vllm_engine_kwargs` set up the colocated engine. With `vllm_mode: server` give "
            "them to the server's command line."
        )
    process = args.process_index // args.vllm_tensor_parallel_size
    return engine_kwargs(
        enforce_eager=args.device.type == "cpu" if args.vllm_enforce_eager is None else args.vllm_enforce_eager,
        load_format=args.vllm_load_format,
        dtype=vllm_dtype(args.vllm_dtype, bf16=args.bf16, fp16=args.fp16, model_dtype=model_dtype),
        seed=args.seed * 1000 + process,  # a group of tensor-parallel ranks samples alike, every other one differently
        extra=extra,
    )
