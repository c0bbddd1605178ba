"""The memory of a training process at each moment of a step, by parts, in GiB.

Owns the moments: arithmetic over `ModelShape` and `Setup`. `states`, `activations` and `generation` own the parts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from salesrl_trl.run.memory.activations import evaluation_activations, head, saved_activations, working_activations
from salesrl_trl.run.memory.generation import generation, sequences
from salesrl_trl.run.memory.setup import Setup
from salesrl_trl.run.memory.shape import GIB, ModelShape
from salesrl_trl.run.memory.states import (
    communication,
    gradients,
    masters,
    optimizer_states,
    optimizer_work,
    reference,
    weights,
)

CONTEXT_GIB = 0.75
"""CUDA's context and kernels: 0.74 GiB in use beside PyTorch's on an H200 in every row of `benchmarks.memory`."""
FRAGMENTS = 0.04
"""Share of PyTorch's allocations that its allocator cannot use again when sizes change."""
NOT_IN_TENSORS = ("CUDA context", "fragmentation")


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """The memory at one moment of a step."""

    name: str
    parts: Mapping[str, float]
    """GiB by part; parts of 0 are left out."""

    @property
    def total_gib(self) -> float:
        return sum(self.parts.values())

    @property
    def tensors_gib(self) -> float:
        """What PyTorch has allocated: the total without context and fragments."""
        return sum(gib for part, gib in self.parts.items() if part not in NOT_IN_TENSORS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The memory of a process on one card."""

    card_gib: float
    moments: tuple[Moment, ...]
    sequences: float | None
    """Completions of full length for which vLLM's KV cache has room at once; `None` without vLLM in the process."""

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total_gib)

    @property
    def needed_gib(self) -> float:
        return self.peak.total_gib

    @property
    def starts_engine(self) -> bool:
        """Whether vLLM's share holds its weights and one completion of full length. Without it vLLM does not start."""
        return self.sequences is None or self.sequences >= 1

    @property
    def fits(self) -> bool:
        return self.needed_gib <= self.card_gib and self.starts_engine


Weigh = Callable[[str, str], Estimate]
"""The estimate for weights of a number format and an optimizer, by its name in transformers."""


def estimate(shape: ModelShape, setup: Setup, card_gib: float) -> Estimate:
    """The memory of a process that trains a model of this shape on a card of this size.

    The moments are those with a maximum of their own. The largest one decides:

    - `forward`: all activations are saved, autocast has a copy of every weight;
    - `backward of the head`: the gradients of the log-probs;
    - `backward of a layer`: with gradient checkpointing, its activations a second time;
    - `end of backward`: every gradient, and the embedding's twice;
    - `optimizer step`: every gradient and state;
    - `generation`: vLLM or the KV cache of transformers, beside weights and states;
    - `evaluation`: a batch of evaluated completions without gradients, which may be larger than a micro-batch.
    """
    kept = {
        "weights": weights(shape, setup),
        "master weights": masters(shape, setup),
        "optimizer states": optimizer_states(shape, setup),
        "reference model": reference(shape, setup),
    }
    gradient = gradients(shape, setup)
    before = gradient if setup.micro_batches > 1 else 0.0  # those of the micro-batches before
    saved = saved_activations(shape, setup)
    copies = setup.autocast and setup.weight_bytes == 4
    all_copies = 2 * shape.linear * (not setup.sharding.splits_weights) * copies * (not setup.lora)
    held_copies = 0.0 if setup.checkpointing else 2.0 * shape.linear * copies * (not setup.sharding.splits_weights)
    head_forward, head_backward = head(shape, setup)
    embedding = shape.embedding * setup.weight_bytes * (not setup.lora)
    buffers = communication(shape, setup)
    training: dict[str, dict[str, float]] = {
        "forward": {
            "gradients": before,
            "activations": saved,
            "16-bit copies of weights": max(all_copies, held_copies),
            "log-probs of the loss": head_forward,
        },
        "backward of the head": {
            "gradients": before,
            "activations": saved,
            "16-bit copies of weights": held_copies,
            "log-probs of the loss": head_backward,
        },
        "backward of a layer": {
            "gradients": before + embedding * shape.is_tied,
            "activations": saved + working_activations(shape, setup),
            "16-bit copies of weights": held_copies or 2 * shape.linear / shape.layers * copies,
        },
        "end of backward": {"gradients": gradient + embedding * (1 + shape.is_tied)},
        "optimizer step": {"gradients": gradient, "optimizer's working memory": optimizer_work(shape, setup)},
    }
    kept_in_training = {**kept, "communication buffers": buffers, **generation(shape, setup, card_gib, False)}
    moments = [_moment(name, {**kept_in_training, **parts}, setup) for name, parts in training.items()]
    moments.append(_moment("generation", {**kept, **generation(shape, setup, card_gib, True)}, setup))
    if setup.evaluated:
        without_gradients = {
            "activations": evaluation_activations(shape, setup),
            "16-bit copies of weights": all_copies,
            "log-probs of the loss": head_forward,
        }
        moments.append(_moment("evaluation", {**kept_in_training, **without_gradients}, setup))
    return Estimate(card_gib=card_gib, moments=tuple(moments), sequences=sequences(shape, setup, card_gib))


def _moment(name: str, parts: Mapping[str, float], setup: Setup) -> Moment:
    inside = {part: each / GIB for part, each in parts.items() if each}
    engine = sum(gib for part, gib in inside.items() if part.startswith("vLLM"))
    processes = 0.5 if setup.processes > 1 else 0.0  # NCCL's channels
    return Moment(
        name=name,
        parts={
            **inside,
            "CUDA context": CONTEXT_GIB + processes,
            "fragmentation": FRAGMENTS * (sum(inside.values()) - engine),
        },
    )
