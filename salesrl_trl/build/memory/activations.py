"""Activations, and the log-probs of the loss, in bytes.

Sources, by their releases:

- transformers 5: `models/qwen2/modeling_qwen2.py`, which the decoders of Llama, Mistral and Qwen3 share.
- PyTorch: autograd keeps the inputs that a product needs for its gradient. `aten/src/ATen/autocast_mode.cpp` keeps the
  16-bit copy of a float32 weight until the outermost autocast ends, and casts an activation for each layer anew.
- PEFT 0.21: `tuners/lora/layer.py`. An adapter casts its input.
- TRL 1.16: `GRPOTrainer._get_per_token_logps_and_entropies` never has the logits. `kernels/chunked_logprob.py` goes
  over the vocabulary in tiles, with gradients in float32.
"""

from salesrl_trl.build.memory.setup import Setup
from salesrl_trl.build.memory.shape import ModelShape

TILE_TOKENS, TILE_VOCABULARY = 4096, 32_768
"""A tile of logits: TRL's `TOKEN_CHUNK_SIZE` and `_CHUNKED_LOGPROB_CHUNK_SIZE`."""


def layer_activations(shape: ModelShape, setup: Setup) -> float:
    """What autograd keeps of one block's forward pass, for a pass with gradients.

    Bytes of a token, with c bytes in a product and r in the residual stream (the weights' format). Widths: h hidden,
    f of the MLP, q of the queries, S tokens of a row. Keys and values are repeated to q where a mask is given
    (`sdpa_attention.py`), and padding always gives one. Shared prompts have none in 16 bits.

    - norms, two: 4h for the float32 input of the square. All weights in training: r h for the product with the norm's
      weight, and the inputs of the linear layers, c h once or, as autocast casts for each layer anew, 5 c h together.
    - attention: 4 c q for queries, keys, values and output, 4 for each head, c S for the mask; eager: its weights.
    - MLP: 3 c f for gate, its activation and up; all weights in training: c f more, the input of down.
    - experts that are one weight: the same in that weight's format, because autocast does not cast for a grouped
      product (`integrations/moe.py`), and for each visited expert a copy of its output, and of its input if it is
      trained. Of a shared expert the output and its product with the gate.
    - adapters: each casts its own input, c wide, with a mask of 1 byte under dropout.
    """
    computed, stream = setup.compute_bytes, setup.weight_bytes
    hidden, query, heads = shape.hidden, shape.query, shape.heads
    length = setup.prompt_tokens + setup.completion_tokens
    inner = (3 if setup.lora else 4) * (computed * shape.intermediate + (stream - computed) * shape.routed_width)
    if shape.routed_width:
        inner += (1 if setup.lora else 2) * stream * hidden * shape.routed
        inner += 2 * computed * hidden * (shape.intermediate > shape.routed_width)
    norms = 2.0 * (4 * hidden + 4)
    if not setup.lora:
        norms += 2 * stream * hidden + (2 if stream == computed else 5) * computed * hidden
    attention = 4 * computed * query + 4 * heads + computed * length
    if setup.group is not None and computed == 2:
        attention = 2 * computed * (query + shape.key_value) + 4 * heads
    if setup.eager_attention:
        attention += (4 + computed) * heads * length
    if shape.norms_heads:
        attention += (4 if setup.lora else 4 + stream) * (query + shape.key_value)
    adapted = 0.0
    if setup.lora:
        assert shape.adapters is not None
        adapted = (computed + setup.lora_dropout) * shape.adapters.inputs
    return setup.tokens * (norms + attention + inner + adapted)


def saved_activations(shape: ModelShape, setup: Setup) -> float:
    """What is kept from the forward pass to the backward pass: of each block, the last norm and its hidden states.

    With gradient checkpointing (`GradientCheckpointingLayer`) a block keeps its input, else `layer_activations`.
    """
    block = (
        setup.tokens * setup.weight_bytes * shape.hidden if setup.checkpointing else layer_activations(shape, setup)
    )
    last = setup.tokens * shape.hidden * (4 + setup.weight_bytes * (1 if setup.lora else 2))
    return shape.layers * block + last


def working_activations(shape: ModelShape, setup: Setup) -> float:
    """More than the saved ones, while one block's backward pass runs.

    With gradient checkpointing its activations. In the MLP's product: three gradients of width f, less the input of
    down, which is done with; two gradients of the residual stream; one weight's gradient, in 16 bits and its format.
    In eager attention's softmax, when what the MLP kept is done with: the gradients of its result and of its input,
    both in float32, and of the weights in the products' format.
    """
    again = layer_activations(shape, setup) if setup.checkpointing else 0.0
    widths = (3 if setup.lora else 2) * setup.compute_bytes * shape.intermediate
    if setup.eager_attention:
        length = setup.prompt_tokens + setup.completion_tokens
        weights = (4 + 4 * (setup.compute_bytes == 2) + setup.compute_bytes) * shape.heads * length
        widths = max(widths, weights - (3 if setup.lora else 4) * setup.compute_bytes * shape.intermediate)
    number = 0 if setup.lora else 2 + setup.weight_bytes * (setup.weight_bytes != setup.compute_bytes)
    return again + setup.tokens * (widths + 2 * setup.weight_bytes * shape.hidden) + number * shape.largest


def activations_without_gradients(shape: ModelShape, setup: Setup, tokens: int) -> float:
    """One block's forward pass: three widths of the MLP, two of the residual stream, the norm's output."""
    widths = 3 * setup.compute_bytes * shape.intermediate
    return tokens * (widths + (2 * setup.weight_bytes + setup.compute_bytes) * shape.hidden)


def logits(setup: Setup, tokens: int) -> float:
    """One tile of logits: the log-probs and entropies of so many completion tokens (`ChunkedLogProbFunction`)."""
    return min(tokens, TILE_TOKENS) * TILE_VOCABULARY * float(setup.compute_bytes)


def head_gradients(shape: ModelShape, setup: Setup) -> float:
    """More than a tile of logits, in the backward pass of the log-probs: gradients of the hidden states and of a
    trained head, in float32 and in their own format."""
    inputs = setup.predicted_tokens * shape.hidden * (4 + setup.weight_bytes)
    return inputs + (0.0 if setup.lora else shape.embedding * (4 + 2 * (setup.weight_bytes == 2)))
