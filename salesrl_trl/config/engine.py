"""From settings to the options of the colocated vLLM engine.

Owns the mapping. `generation.vllm` hands the options to vLLM.
"""

from transformers import PreTrainedModel

from salesrl_trl.config.compiling import GRAPHS_ALONE, Start, engine_start
from salesrl_trl.config.training import SalesGRPOConfig
from salesrl_trl.errors import ConfigError
from salesrl_trl.generation.vllm import pushes_all_weights

_FOR_SERVERS_TOO = {"enforce_eager", "enable_prefix_caching", "enable_chunked_prefill", "dtype"}
"""Options that a server decides for itself, without harm: a recipe may hold them for another `vllm_mode`."""


def engine_options(args: SalesGRPOConfig, model: PreTrainedModel) -> dict[str, object]:
    """Arguments of `vllm.LLM` beside those of TRL, for this policy as it was loaded.

    Raises:
        `ConfigError`: options of a colocated engine are given for a server.
    """
    given = args.parsed_engine_kwargs()
    own = given.keys() - _FOR_SERVERS_TOO
    if args.use_vllm and args.vllm_mode == "server" and own:
        raise ConfigError(
            f"`vllm_engine_kwargs` sets {', '.join(sorted(own))} of the colocated engine. With `vllm_mode: server` "
            "give it to the server's command line."
        )
    start = engine_start(args)
    process = args.process_index // args.vllm_tensor_parallel_size
    on_cpu = args.device.type == "cpu"
    in_training = "bfloat16" if args.bf16 else "float16" if args.fp16 else str(model.dtype).removeprefix("torch.")
    options: dict[str, object] = {
        "enforce_eager": start is Start.EAGER,
        # random until the first push, which TRL always makes before the first generation
        "load_format": "dummy" if pushes_all_weights(model, on_cpu) else "auto",
        "dtype": in_training,
        # equal within a group of tensor-parallel ranks; TRL takes the rank alone, whatever the run's seed
        "seed": args.seed * 1000 + process,
    }
    if start is Start.GRAPHS:
        options["compilation_config"] = GRAPHS_ALONE
    return options | given
