"""The memory for generation, in bytes: vLLM 0.31 in the process of training, or transformers' `generate`."""

from salesrl_trl.build.memory.setup import Setup
from salesrl_trl.build.memory.shape import ModelShape
from salesrl_trl.telemetry.device import GIB

PROFILED_TOKENS = 4096
"""Tokens of the batch with which TRL's vLLM measures its working memory (`max_num_batched_tokens`)."""


def generation(shape: ModelShape, setup: Setup, card_gib: float, generating: bool) -> dict[str, float]:
    """The memory for generation, by part.

    vLLM takes its share of the card (`gpu_worker.determine_available_memory`):

    - weights;
    - the working memory of its largest batch: hidden states, the MLP's two widths, logits of every sequence, thrice in
      float32. In training it is PyTorch's again.
    - the KV cache, which gets the rest.

    Asleep (level 2) it holds none. Without vLLM: the KV cache of transformers' `generate`, and its logits in float32.
    """
    if (engine := setup.engine) is not None:
        if engine.sleeps and not generating:
            return {}
        kept = shape.parameters * engine.number_bytes / engine.processes
        block = PROFILED_TOKENS * (4 * shape.hidden + 3 * shape.intermediate) * engine.number_bytes
        rows = min(setup.rollouts * engine.processes, PROFILED_TOKENS)
        working = (block + rows * shape.vocabulary * 12) / engine.processes
        cache = max(0.0, engine.share * card_gib * GIB - kept - working)
        return {"vLLM weights": kept, "vLLM KV cache": cache, "vLLM working memory": working * generating}
    if not (setup.generates and generating):
        return {}
    length = setup.prompt_tokens + setup.completion_tokens
    cache = setup.rollouts * length * _token_cache(shape, setup.compute_bytes)
    return {"KV cache": cache, "logits of generation": 2.0 * 4 * setup.rollouts * shape.vocabulary}


def sequences(shape: ModelShape, setup: Setup, card_gib: float) -> float | None:
    """Completions of full length for which vLLM's KV cache has room."""
    if setup.engine is None:
        return None
    cache = generation(shape, setup, card_gib, True)["vLLM KV cache"]
    return cache / (setup.engine.length * _token_cache(shape, setup.engine.number_bytes) / setup.engine.processes)


def _token_cache(shape: ModelShape, number_bytes: int) -> float:
    """Keys and values of one token, in all layers."""
    return 2.0 * shape.layers * shape.key_value * number_bytes
