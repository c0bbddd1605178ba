"""From settings to the options of the colocated vLLM engine.

Owns the mapping. `generation.vllm` hands the options to vLLM.
"""

from transformers import PreTrainedModel

from salesrl_trl.config.compiling import GRAPHS_ALONE, Start, engine_start
from salesrl_trl.config.training import SalesGRPOConfig
from salesrl_trl.errors import ConfigError
from salesrl_trl.generation.vllm import engine_kwargs, pushes_all_weights, vllm_dtype


def engine_options(args: SalesGRPOConfig, model: PreTrainedModel) -> dict[str, object]:
    """Arguments of `vllm.LLM` beside those of TRL.

    Args:
        args (`SalesGRPOConfig`):
            Settings.
        model (`PreTrainedModel` or `PeftModel`):
            The policy, as it was loaded.

    Raises:
        `ConfigError`: options of a colocated engine are given for a server.
    """
    extra = args.parsed_engine_kwargs()
    if args.use_vllm and args.vllm_mode == "server" and (extra or args.vllm_load_format not in (None, "auto")):
        raise ConfigError(
            "`vllm_load_format` and `vllm_engine_kwargs` set up the colocated engine. With `vllm_mode: server` give "
            "them to the server's command line."
        )
    caching = {name: getattr(args, f"vllm_{name}") for name in ("enable_prefix_caching", "enable_chunked_prefill")}
    start = engine_start(args)
    if args.vllm_quantization is not None:
        extra = {"quantization": args.vllm_quantization, **extra}
    if start is Start.GRAPHS:
        extra = {"compilation_config": GRAPHS_ALONE, **extra}
    process = args.process_index // args.vllm_tensor_parallel_size
    on_cpu = args.device.type == "cpu"
    return engine_kwargs(
        enforce_eager=start is Start.EAGER,
        load_format=args.vllm_load_format or ("dummy" if pushes_all_weights(model, on_cpu) else "auto"),
        dtype=vllm_dtype(args.vllm_dtype, bf16=args.bf16, fp16=args.fp16, model_dtype=model.dtype),
        seed=args.seed * 1000 + process,  # equal within a group of tensor-parallel ranks
        extra={name: value for name, value in caching.items() if value is not None} | extra,
    )
