"""From prompts to completions: the protocol for generation engines (`Sampler`), and TRL's own behind it."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import compress
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from transformers import GenerationConfig, PreTrainedModel
from trl.trainer.utils import pad

from salesrl_trl.ground.process import patched
from salesrl_trl.ground.texts import encodable
from salesrl_trl.telemetry.completion_record import Call

if TYPE_CHECKING:
    from salesrl_trl.generation.vllm import SalesVLLMGeneration


class Finished(Protocol):
    """Called for each finished completion, from any thread, with its place in the batch and its token ids, which in a
    conversation include tool results.

    `messages`: the conversation; without them the completion is the decoded token ids. `failed`: reason code if a tool
    failed, which leaves the completion unscored. `columns`: extra columns for its reward; a resume with
    `save_rollouts` only restores those in the sixth list of `Sampled.generated`.
    """

    def __call__(
        self,
        place: int,
        token_ids: Sequence[int],
        messages: Sequence[Mapping[str, object]] | None = None,
        failed: str | None = None,
        columns: Mapping[str, object] | None = None,
    ) -> None: ...


Tokens = tuple[list[list[int]], list[list[float]] | None]
"""Token ids of B completions, and the sampler's log-probs, or `None`."""
TokenSource = Callable[[list[list[int]], int], Tokens]
"""From token ids of B prompts, and the number of completions per prompt, to `Tokens`. Prompts are already repeated for
each of their completions."""

SAMPLING_FLAGS = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
)
"""Fields of transformers' `GenerationConfig` that only apply to sampling."""
SAMPLING_KWARGS = frozenset({"temperature", "top_p", "top_k", "min_p", "n", "best_of"})
"""Keys of `generation_kwargs` dropped for greedy decoding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """Completions of a batch, as returned by TRL's `_generate`."""

    generated: tuple[Any, ...]  # eight lists, each of length B or empty
    metrics: Mapping[str, list[float]] = field(default_factory=dict)
    """TRL's metrics of this generation, logged with the step that trains on the batch."""
    tokens: int = 0  # prompt and completion tokens on all ranks, as counted by TRL
    calls: Sequence[Sequence[Call]] = ()  # of B conversations, if recorded
    versions: Sequence[Sequence[int] | None] = ()
    """Of each completion's tokens (`generation.turns`), 0 for those of others; `None` if the engine reports none."""
    failures: Sequence[str | None] = ()  # why B conversations are excluded from training, if they are
    seats: Sequence[Any] = ()  # of B conversations with environments: `agents.environments.Seat`

    @property
    def prompt_ids(self) -> list[list[int]]:
        return self.generated[0]  # type: ignore[no-any-return]

    @property
    def completion_ids(self) -> list[list[int]]:
        return self.generated[1]  # type: ignore[no-any-return]

    @property
    def completions(self) -> list[str | list[dict[str, object]]]:
        return self.generated[3]  # type: ignore[no-any-return]

    @property
    def logprobs(self) -> list[list[float]] | None:
        return self.generated[4]  # type: ignore[no-any-return]

    def own_versions(self, place: int) -> list[int]:
        """The versions of a completion's tokens which the policy wrote; empty if unreported."""
        masks = self.generated[2]
        versions = (self.versions[place] if self.versions else None) or ()
        return [*versions] if masks is None else [*compress(versions, masks[place])]

    def padded(self, pad_token_id: int, multiple: int | None, device: torch.device) -> dict[str, torch.Tensor]:
        """Prompts and completions padded as by TRL: `prompt_ids`, `prompt_mask` (B, P), `completion_ids`,
        `completion_mask` and, if given, `tool_mask` and `sampling_per_token_logps` (B, C). Without images."""
        tensors: dict[str, torch.Tensor] = {}
        for name, sequences, side in (
            ("prompt", self.prompt_ids, "left"),
            ("completion", self.completion_ids, "right"),
        ):
            ids = [torch.tensor(sequence) for sequence in sequences]
            for kind, columns, value in (("ids", ids, pad_token_id), ("mask", [*map(torch.ones_like, ids)], 0)):
                rows = pad(columns, padding_value=value, padding_side=side, pad_to_multiple_of=multiple)
                tensors[f"{name}_{kind}"] = rows.to(device)
        if (tool_mask := self.generated[2]) is not None:  # 0 for tokens written by tools or environments
            masks = [torch.tensor(mask) for mask in tool_mask]
            tensors["tool_mask"] = pad(masks, padding_value=1, pad_to_multiple_of=multiple).to(device)
        if self.logprobs is not None:
            logps = [torch.tensor([math.nan if each is None else each for each in row]) for row in self.logprobs]
            tensors["sampling_per_token_logps"] = pad(logps, 0.0, pad_to_multiple_of=multiple).to(device)
        return tensors


class Upstream(Protocol):
    """The parts of TRL available to your own sampler."""

    temperature: float
    max_completion_length: int
    eos_token_ids: tuple[int, ...]

    def generate(self, prompts: Sequence[object], tokens: TokenSource | None = None) -> Sampled:
        """TRL's `_generate`: encodes B prompts, generates one completion for each, decodes and measures. `tokens`
        replaces TRL's engines."""

    def model(self) -> PreTrainedModel:
        """The current policy, without the wrappers of distributed training."""

    def step(self) -> int:
        """The number of optimizer steps done; the weights change with each."""


@runtime_checkable
class Handle(Protocol):
    """A generation in progress."""

    @property
    def is_ready(self) -> bool:
        """Whether `result` returns at once."""

    def result(self) -> Sampled:
        """Wait for all completions. Called once."""

    def give_up(self) -> None:
        """Discard the result."""


@runtime_checkable
class Sampler(Protocol):
    """A generation engine."""

    def start(self, prompts: Sequence[object], finished: Finished, *, ahead: bool) -> Handle:
        """Generate, or begin to generate, one completion for each of B prompts in the dataset's format. Call
        `finished` with each completion as it finishes to start its reward before the rest is generated. `ahead`: the
        trainer does other work before it asks for the result."""

    def greedily(self) -> AbstractContextManager[None]:
        """While active, decoding is greedy."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The `Handle` of a finished generation."""

    sampled: Sampled
    is_ready = True

    def result(self) -> Sampled:
        return self.sampled

    def give_up(self) -> None:
        pass


ready = Ready  # the name used by custom engines


Start = Callable[[Sequence[object], Finished, bool], Handle]
"""Begins a batch whose completions or conversations are reported as they finish (`engine_loop`). It may still run
while the trainer trains."""


class TRLSampler:
    """TRL's own engine. Without `begin` it generates a whole batch at once, and reports no completion earlier."""

    def __init__(
        self, trl: Upstream, owner: "SalesVLLMGeneration | GenerationConfig", begin: Start | None = None
    ) -> None:
        self._trl, self._owner, self._begin = trl, owner, begin

    def start(self, prompts: Sequence[object], finished: Finished, *, ahead: bool) -> Handle:
        return Ready(self._trl.generate(prompts)) if self._begin is None else self._begin(prompts, finished, ahead)

    @contextlib.contextmanager
    def greedily(self) -> Iterator[None]:
        if isinstance(self._owner, GenerationConfig):
            flags = SAMPLING_FLAGS & vars(self._owner).keys()  # transformers warns about each one set
            with contextlib.ExitStack() as stack:
                for name, value in {**dict.fromkeys(flags), "do_sample": False}.items():
                    stack.enter_context(patched(self._owner, name, value))
                yield
            return
        kwargs = {name: value for name, value in self._owner.generation_kwargs.items() if name not in SAMPLING_KWARGS}
        with patched(self._owner, "temperature", 0.0), patched(self._owner, "generation_kwargs", kwargs):
            yield


VISION_FIELDS = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip
"""What TRL passes to the model besides tokens if a batch has images."""


def logps_arguments(batch: Mapping[str, torch.Tensor], batch_size: int) -> dict[str, Any]:
    """Arguments of TRL's `_get_per_token_logps_and_entropies` for a batch padded by TRL, possibly with
    `VISION_FIELDS`. `batch_size`: completions per forward pass."""
    ids, mask = (
        torch.cat((batch[f"prompt_{kind}"], batch[f"completion_{kind}"]), dim=1) for kind in ("ids", "mask")
    )  # each (B, P + T)
    sizes = {"logits_to_keep": batch["completion_ids"].size(1), "batch_size": batch_size}
    vision = {name: batch[name] for name in VISION_FIELDS if name in batch}
    return {"input_ids": ids, "attention_mask": mask, **sizes, **vision}


MOST_ENDS = 16  # end tokens in one turn. Parsers need seconds for a thousand: worse than quadratic time
MOST_NESTED = 64  # levels of lists and dicts. Copying and templates hit `RecursionError` at a few hundred


def is_deep(value: object) -> bool:
    """Whether lists and dicts are nested too deeply to copy and write. Not recursive itself."""
    level: dict[int, Any] = {0: [value]}
    for _ in range(MOST_NESTED):
        inner = (each.values() if isinstance(each, dict) else each for each in level.values())
        level = {id(one): one for each in inner for one in each if isinstance(one, dict | list | tuple)}
    return bool(level)


def guard_parser(tokenizer: Any) -> None:
    """Make a tokenizer and its copies raise `ValueError` for unparsable turns, which TRL then treats as text."""
    tokenizer.parse_response = MethodType(parse_response, tokenizer)


def parse_response(self: Any, ids: list[int], *args: object, **kwargs: object) -> dict[str, object]:
    if str(self.decode(ids)).count(str(self.eos_token)) > MOST_ENDS:
        raise ValueError("the turn has more end tokens than can be sampled")
    try:
        message = type(self).parse_response(self, ids, *args, **kwargs)
    except Exception as error:  # `RecursionError`, or anything a parser raises for the policy's text
        raise ValueError(f"the turn cannot be parsed: {type(error).__name__}") from error
    if not isinstance(message, dict) or is_deep(message):
        raise ValueError("the turn is empty or nested too deeply")
    return encodable(message, "a turn of the policy")


class Encoded(NamedTuple):
    ids: list[list[int]]
    images: list[object] | None
    fields: Mapping[str, object]  # the processor's outputs besides tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """Precomputed results that TRL's `_generate` would otherwise compute."""

    encoded: Encoded | None = None
    tokens: TokenSource | None = None  # instead of TRL's engines
    talked: tuple[object, ...] | None = None  # result for `_tool_call_loop`
    rollout: Mapping[str, object] | None = None  # result for `rollout_func`
