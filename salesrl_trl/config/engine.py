"""From settings to the colocated vLLM engine: how it starts, what it compiles, and its options.

The banner asks too, so vLLM is imported only where options are made. `generation.vllm` hands them to vLLM, and
`generation.compiled` owns the folder of compiled code.
"""

from enum import Enum

import torch
from transformers import PreTrainedModel

from salesrl_trl.config.training import SalesGRPOConfig
from salesrl_trl.errors import ConfigError

GRAPHS_ALONE = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""vLLM's `compilation_config` for CUDA graphs of whole decoding steps, and no compiler."""
_FOR_SERVERS_TOO = {"enforce_eager", "enable_prefix_caching", "enable_chunked_prefill", "dtype"}
"""Options that a server decides for itself, without harm: a recipe may hold them for another `vllm_mode`."""


class Start(Enum):
    """What an engine makes at its start."""

    EAGER = "eager"
    GRAPHS = "with CUDA graphs, and compiles nothing"
    COMPILED = "compiled, with CUDA graphs"


def engine_start(args: SalesGRPOConfig) -> Start:
    eager = args.parsed_engine_kwargs().get("enforce_eager")
    if eager is None:
        return Start.EAGER if args.device.type == "cpu" else Start.GRAPHS
    return Start.EAGER if eager else Start.COMPILED


def _sequences(args: SalesGRPOConfig) -> int:
    """Completions that the engine generates at once: TRL's number, and those that are left of the batch before."""
    of_trl: int = args.per_device_train_batch_size * args.vllm_tensor_parallel_size * args.steps_per_generation
    return of_trl + args.most_unfinished


def compiled_engine(args: SalesGRPOConfig, model: str) -> dict[str, object]:
    """The settings that vLLM compiles an engine for: with others it compiles again. `model`: folder or hub name."""
    parallel = args.vllm_tensor_parallel_size
    return {
        "model": model,
        "number_format": [args.bf16, args.fp16],
        "max_model_length": args.vllm_max_model_length,
        "sequences": _sequences(args),
        "tensor_parallel_size": parallel,
        "sleep_mode": args.vllm_enable_sleep_mode,
        "implementation": args.vllm_model_impl,
        "further": args.parsed_engine_kwargs(),
        "device": torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else args.device.type,
    }


def engine_options(args: SalesGRPOConfig, model: PreTrainedModel) -> dict[str, object]:
    """Arguments of `vllm.LLM` beside those of TRL, for this policy as it was loaded. Raises `ConfigError` if options
    of a colocated engine are given for a server."""
    from salesrl_trl.generation.merging import pushes_all_weights

    extra = args.parsed_engine_kwargs()
    own = extra.keys() - _FOR_SERVERS_TOO
    if args.use_vllm and args.vllm_mode == "server" and own:
        raise ConfigError(
            f"`vllm_engine_kwargs` sets {', '.join(sorted(own))} of the colocated engine. With `vllm_mode: server` "
            "give it to the server's command line."
        )
    start = engine_start(args)
    group = args.process_index // args.vllm_tensor_parallel_size
    in_training = "bfloat16" if args.bf16 else "float16" if args.fp16 else str(model.dtype).removeprefix("torch.")
    options: dict[str, object] = {
        "enforce_eager": start is Start.EAGER,
        # random until the first push, which TRL always makes before the first generation
        "load_format": "dummy" if pushes_all_weights(model) else "auto",
        "dtype": in_training,
        # equal within a group of tensor-parallel ranks; TRL takes the rank alone, whatever the run's seed
        "seed": args.seed * 1000 + group,
    }
    if args.most_unfinished:
        options["max_num_seqs"] = _sequences(args)
    if start is Start.GRAPHS:
        options["compilation_config"] = GRAPHS_ALONE
    return options | extra
