"""The floor of a step, by calculation: decoding at the speed of the GPU's memory, passes at its measured peak.

With the weights W that decoding multiplies (all layers and the head), the bytes k of a token's keys and values,
prompts of P tokens and completions of l tokens:

- decoding: (steps * 2 W + k * sum over completions of (P l + l^2 / 2)) / `READ`; each step reads all weights, and each
  token the keys and values before it;
- steps: the longest completion of a batch that is waited for, or (sum of l) / `slots` where rollouts are ahead and all
  slots are busy all the time;
- prefill and passes: 2 W operations a token forward, 2 W backward (4 W where all weights are trained), 2 W more with
  gradient checkpointing. A prompt counts once for its group, and the head for completions alone. Attention: 4 h
  operations for each pair of tokens and layer, as often. All of it / `MULTIPLY`.

Rewards, the optimizer, the push and the host take no time. Standard library alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

READ = 4.0e12
"""Bytes a second that an H200 reads; it copies 4.3e12 (read and written)."""
MULTIPLY = 790e12
"""Operations a second of a large matrix product in bfloat16 on an H200."""


class Floor(NamedTuple):
    """Seconds of a step."""

    weights: float  # decoding reads the weights
    cache: float  # decoding reads keys and values
    prefill: float
    passes: float

    @property
    def step(self) -> float:
        return sum(self)


def floor(
    config: Mapping[str, Any], batches: Sequence[Sequence[int]], prompt: int, *, group: int = 8, slots: int = 0,
    full: bool = False, checkpointing: bool = True,
) -> Floor:  # fmt: skip
    """The mean floor of a step.

    Args:
        config (`Mapping[str, Any]`):
            The model's `config.json`, of Qwen2's or Llama's shape.
        batches (`Sequence[Sequence[int]]`):
            Tokens of each completion, for each step.
        prompt (`int`):
            Tokens of a prompt, with its template.
        slots (`int`):
            Completions that decode at the same time while all slots are busy; 0 for batches that are waited for.
        full (`bool`):
            All weights are trained, not an adapter.
    """
    hidden, layers, heads = (config[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    kept = config["num_key_value_heads"] * hidden // heads
    body = layers * (2 * hidden * hidden + 2 * hidden * kept + 3 * hidden * config["intermediate_size"])
    head = hidden * config["vocab_size"]
    steps, tokens, pairs, prompts = 0.0, 0, 0.0, 0
    for lengths in batches:
        steps += sum(lengths) / slots if slots else max(lengths)
        tokens += sum(lengths)
        pairs += sum(prompt * length + length**2 / 2 for length in lengths)
        prompts += len(lengths) // group * prompt
    passed = 2 * (body * (tokens + prompts) + head * tokens) + 4 * hidden * layers * (pairs + prompts * prompt / 2)
    first = 2 * body * prompts + 4 * hidden * layers * prompts * prompt / 2
    seconds = (
        steps * 2 * (body + head) / READ,
        pairs * 2 * 2 * layers * kept / READ,
        first / MULTIPLY,
        passed * (2 + full + checkpointing) / MULTIPLY,
    )
    return Floor(*(each / len(batches) for each in seconds))


def told(config: Mapping[str, Any], batches: Sequence[Sequence[int]], prompt: int, **given: Any) -> str:
    """Both floors in words."""
    lines = []
    for name, slots in (("waited for", 0), ("always 1.5 batches in the engine", len(batches[0]) * 3 // 2)):
        found = floor(config, batches, prompt, slots=slots, **given)
        parts = ", ".join(f"{part} {seconds:.3g}" for part, seconds in found._asdict().items())
        lines.append(f"floor, {name}: {found.step:.3g} s a step ({parts})")
    return "\n".join(lines)
