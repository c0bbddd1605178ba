"""The memory of a training process at each moment of a step, by parts, in GiB.

Owns the moments: arithmetic over `ModelShape` and `Setup`. `states`, `activations` and `generation` own the parts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from salesrl_trl.build.memory import activations, states
from salesrl_trl.build.memory.generation import generation, sequences
from salesrl_trl.build.memory.setup import Setup
from salesrl_trl.build.memory.shape import ModelShape
from salesrl_trl.telemetry.device import GIB

CONTEXT_GIB = 0.75
"""CUDA's context and kernels: 0.74 GiB in use beside PyTorch's on an H200 in every row of `benchmarks.memory`."""
CHANNELS_GIB = 0.5
"""NCCL's channels, with several processes."""
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
    - `evaluation`: a batch of evaluated completions without gradients, which may be larger than a micro-batch;
    - `log-probs of the reference`: whole generation batches with shared prompts.
    """
    kept = {
        "weights": states.weights(shape, setup),
        "master weights": states.masters(shape, setup),
        "optimizer states": states.optimizer_states(shape, setup),
        "reference model": states.reference(shape, setup),
    }
    gradient = states.gradients(shape, setup)
    before = gradient if setup.micro_batches > 1 else 0.0  # those of the micro-batches before
    saved = activations.saved_activations(shape, setup)
    copied = 2.0 * shape.linear * (setup.autocast and setup.weight_bytes == 4)
    at_once = copied * (not setup.sharding.splits_weights)
    all_copies, held_copies = at_once * (not setup.lora), at_once * (not setup.checkpointing)
    tile = activations.logits(setup, setup.predicted_tokens)
    embedding = shape.embedding * setup.weight_bytes * (not setup.lora)
    training: dict[str, dict[str, float]] = {
        "forward": {
            "gradients": before,
            "activations": saved,
            "16-bit copies of weights": max(all_copies, held_copies),
            "log-probs of the loss": tile,
        },
        "backward of the head": {
            "gradients": before,
            "activations": saved,
            "16-bit copies of weights": held_copies,
            "log-probs of the loss": tile + activations.head_gradients(shape, setup),
        },
        "backward of a layer": {
            "gradients": before + embedding * shape.is_tied,
            "activations": saved + activations.working_activations(shape, setup),
            "16-bit copies of weights": held_copies or copied / shape.layers,
        },
        "end of backward": {"gradients": gradient + embedding * (1 + shape.is_tied)},
        "optimizer step": {"gradients": gradient, "optimizer's working memory": states.optimizer_work(shape, setup)},
    }
    buffers = {"communication buffers": states.communication(shape, setup)}
    kept_in_training = {**kept, **buffers, **generation(shape, setup, card_gib, False)}
    moments = [_moment(name, {**kept_in_training, **parts}, setup) for name, parts in training.items()]
    moments.append(_moment("generation", {**kept, **generation(shape, setup, card_gib, True)}, setup))
    evaluated = setup.evaluated * (setup.prompt_tokens + setup.completion_tokens)
    passes = {
        "evaluation": (evaluated, setup.evaluated * setup.completion_tokens),
        "log-probs of the reference": (setup.scored_tokens, setup.scored_tokens),
    }
    for name, (tokens, predicted) in passes.items():
        without_gradients = {
            "activations": activations.activations_without_gradients(shape, setup, tokens),
            "16-bit copies of weights": all_copies,
            "log-probs of the loss": activations.logits(setup, predicted),
        }
        if tokens:
            moments.append(_moment(name, {**kept_in_training, **without_gradients}, setup))
    return Estimate(card_gib=card_gib, moments=tuple(moments), sequences=sequences(shape, setup, card_gib))


def _moment(name: str, parts: Mapping[str, float], setup: Setup) -> Moment:
    inside = {part: each / GIB for part, each in parts.items() if each}
    context = CONTEXT_GIB + CHANNELS_GIB * (setup.processes > 1)
    fragments = FRAGMENTS * sum(gib for part, gib in inside.items() if not part.startswith("vLLM"))
    return Moment(name=name, parts={**inside, "CUDA context": context, "fragmentation": fragments})
