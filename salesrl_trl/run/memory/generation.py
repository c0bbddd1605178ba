"""The memory for generation, in bytes: vLLM 0.31 in the process of training, or transformers' `generate`."""

from salesrl_trl.run.memory.setup import Setup
from salesrl_trl.run.memory.shape import GIB, ModelShape

PROFILED_TOKENS = 4096
"""Tokens of the batch with which TRL's vLLM measures its working memory (`max_num_batched_tokens`)."""


def generation(shape: ModelShape, setup: Setup, card_gib: float, generating: bool) -> dict[str, float]:
    """The memory for generation, by part.

    vLLM takes its share of the card (`gpu_worker.determine_available_memory`): weights, the working memory of its
    largest batch, and the KV cache, which gets the rest. In training the working memory is PyTorch's again. Asleep
    (level 2) it holds none. Without vLLM: the KV cache of transformers' `generate`, and its logits in float32.
    """
    if setup.engine is not None:
        if setup.engine.sleeps and not generating:
            return {}
        kept, working = _engine_weights(shape, setup), _engine_work(shape, setup)
        cache = max(0.0, setup.engine.share * card_gib * GIB - kept - working)
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
    cache = generation(shape, setup, card_gib, True).get("vLLM KV cache", 0.0)
    return cache / (setup.engine.length * _token_cache(shape, setup.engine.number_bytes) / setup.engine.processes)


def _token_cache(shape: ModelShape, number_bytes: int) -> float:
    """Keys and values of one token, in all layers."""
    return 2.0 * shape.layers * shape.key_value * number_bytes


def _engine_weights(shape: ModelShape, setup: Setup) -> float:
    assert setup.engine is not None
    return shape.parameters * setup.engine.number_bytes / setup.engine.processes


def _engine_work(shape: ModelShape, setup: Setup) -> float:
    """The profiled batch: hidden states and the MLP's two widths, and logits of every sequence, thrice in float32."""
    assert setup.engine is not None
    rows = min(setup.rollouts * setup.engine.processes, PROFILED_TOKENS)
    block = PROFILED_TOKENS * (4 * shape.hidden + 3 * shape.intermediate) * setup.engine.number_bytes
    return (block + rows * shape.vocabulary * 12) / setup.engine.processes
