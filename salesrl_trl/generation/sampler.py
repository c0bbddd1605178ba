"""From prompts to completions: the protocol of a generation engine (`Sampler`), and TRL's own engines behind it."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
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
    """Told of each completion when it is finished, from any thread: of its place in the batch, and its token ids, in a
    conversation those of tools' results too.

    `messages` are those of a conversation; without them the completion is the text of the token ids. `failed` is the
    reason code of a conversation whose tool failed: it gets no reward. `columns` are what its row has for its reward
    beside the dataset's columns; a resume with `save_rollouts` has those of the sixth list of `Sampled.generated`
    alone.
    """

    def __call__(
        self,
        place: int,
        token_ids: Sequence[int],
        messages: Sequence[object] | None = None,
        failed: str | None = None,
        columns: Mapping[str, object] | None = None,
    ) -> None: ...


Tokens = tuple[list[list[int]], list[list[float]] | None]
"""Token ids of B completions, and the sampler's log-probs of them, or `None` if it gives none."""
TokenSource = Callable[[list[list[int]], int], Tokens]
"""From token ids of B prompts, and the number of completions of each prompt, to `Tokens`. A prompt is repeated for
each of its completions, so that each of the B has one."""

SAMPLING_FLAGS = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
)
"""Of transformers' `GenerationConfig`; they have no meaning without sampling."""
SAMPLING_KWARGS = frozenset({"temperature", "top_p", "top_k", "min_p", "n", "best_of"})
"""Of `generation_kwargs`; greedy sampling leaves them out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """Completions of one batch, as TRL's `_generate` returns them."""

    generated: tuple[Any, ...]  # eight lists. Each has length B, or is empty.
    metrics: Mapping[str, list[float]] = field(default_factory=dict)
    """TRL's figures of this generation. Logged with the step that trains on the batch."""
    tokens: int = 0  # tokens of prompts and completions on all ranks, as TRL counts them
    calls: Sequence[Sequence[Call]] = ()  # of B conversations, where they are recorded

    @property
    def prompt_ids(self) -> list[list[int]]:
        return self.generated[0]  # type: ignore[no-any-return]

    @property
    def completion_ids(self) -> list[list[int]]:
        return self.generated[1]  # type: ignore[no-any-return]

    @property
    def completions(self) -> list[Any]:
        return self.generated[3]  # type: ignore[no-any-return]

    @property
    def logprobs(self) -> list[list[float]] | None:
        return self.generated[4]  # type: ignore[no-any-return]

    def padded(self, pad_token_id: int, multiple: int | None, device: torch.device) -> dict[str, torch.Tensor]:
        """Prompts and completions as TRL pads them: `prompt_ids`, `prompt_mask` (B, P), `completion_ids`,
        `completion_mask` and, if given, `tool_mask` and `sampling_per_token_logps` (B, C). Without pictures."""
        tensors: dict[str, torch.Tensor] = {}
        for name, sequences, side in (
            ("prompt", self.prompt_ids, "left"),
            ("completion", self.completion_ids, "right"),
        ):
            ids = [torch.tensor(sequence) for sequence in sequences]
            for kind, columns, value in (("ids", ids, pad_token_id), ("mask", [*map(torch.ones_like, ids)], 0)):
                rows = pad(columns, padding_value=value, padding_side=side, pad_to_multiple_of=multiple)
                tensors[f"{name}_{kind}"] = rows.to(device)
        if (tool_mask := self.generated[2]) is not None:  # 0 where a tool or an environment wrote
            masks = [torch.tensor(mask) for mask in tool_mask]
            tensors["tool_mask"] = pad(masks, padding_value=1, pad_to_multiple_of=multiple).to(device)
        if self.logprobs is not None:
            logps = [torch.tensor(logprob) for logprob in self.logprobs]
            tensors["sampling_per_token_logps"] = pad(logps, 0.0, pad_to_multiple_of=multiple).to(device)
        return tensors


class Upstream(Protocol):
    """The parts of TRL that a sampler of your own may use."""

    temperature: float
    max_completion_length: int
    eos_token_ids: tuple[int, ...]

    def generate(self, prompts: Sequence[object], tokens: TokenSource | None = None) -> Sampled:
        """TRL's `_generate`: encodes B prompts, generates one completion for each, decodes and measures. `tokens`
        takes the place of TRL's engines."""

    def model(self) -> PreTrainedModel:
        """The current policy, without the wrappers of distributed training."""

    def step(self) -> int:
        """The number of optimizer steps done. The weights change with it."""


@runtime_checkable
class Handle(Protocol):
    """A generation that was started."""

    @property
    def is_ready(self) -> bool:
        """Whether `result` returns at once."""

    def result(self) -> Sampled:
        """Wait for all completions. Called once."""

    def give_up(self) -> None:
        """Drop the result: nobody will ask for it."""


@runtime_checkable
class Sampler(Protocol):
    """A generation engine."""

    def start(self, prompts: Sequence[object], finished: Finished, *, ahead: bool) -> Handle:
        """Generate one completion for each of B prompts, as the dataset has them, or begin to. `finished` may be
        called with each completion when it is finished: then its reward starts before the rest is generated. `ahead`:
        the trainer has other work before it asks for the result."""

    def greedily(self) -> AbstractContextManager[None]:
        """While active, the most likely token is always chosen."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The `Handle` of a generation that is over."""

    sampled: Sampled
    is_ready = True

    def result(self) -> Sampled:
        return self.sampled

    def give_up(self) -> None:
        pass


ready = Ready  # as engines of a user's own call it


Start = Callable[[Sequence[object], Finished, bool], Handle]
"""Begins a batch, whose completions or conversations are reported when they are finished (`engine_loop`). It may be
under way while the trainer trains."""


class TRLSampler:
    """TRL's own engine. Without `begin` it generates a whole batch at once: no completion is reported before."""

    def __init__(
        self, trl: Upstream, owner: "SalesVLLMGeneration | GenerationConfig", begin: Start | None = None
    ) -> None:
        self._trl, self._owner, self._begin = trl, owner, begin

    def start(self, prompts: Sequence[object], finished: Finished, *, ahead: bool) -> Handle:
        return Ready(self._trl.generate(prompts)) if self._begin is None else self._begin(prompts, finished, ahead)

    @contextlib.contextmanager
    def greedily(self) -> Iterator[None]:
        if isinstance(self._owner, GenerationConfig):
            flags = SAMPLING_FLAGS & vars(self._owner).keys()  # transformers warns about each that is set
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
"""What TRL hands to a model beside tokens, if a batch has pictures."""


def logps_arguments(batch: Mapping[str, torch.Tensor], batch_size: int) -> dict[str, object]:
    """Arguments of TRL's `_get_per_token_logps_and_entropies` for the completions of a batch that TRL padded, perhaps
    with some of `VISION_FIELDS`. `batch_size`: completions of a forward pass."""
    ids, mask = (
        torch.cat((batch[f"prompt_{kind}"], batch[f"completion_{kind}"]), dim=1) for kind in ("ids", "mask")
    )  # each (B, P + T)
    sizes = {"logits_to_keep": batch["completion_ids"].size(1), "batch_size": batch_size}
    vision = {name: batch[name] for name in VISION_FIELDS if name in batch}
    return {"input_ids": ids, "attention_mask": mask, **sizes, **vision}


MOST_ENDS = 16  # spelled in one turn. Parsers take seconds for a thousand: time grows faster than the square.
MOST_NESTED = 64  # levels of lists and dictionaries. Copies and templates fail with `RecursionError` at some hundreds.


def is_deep(value: object) -> bool:
    """Whether lists and dictionaries are nested too deeply to be copied and written. Not recursive itself."""
    level: dict[int, Any] = {0: [value]}
    for _ in range(MOST_NESTED):
        inner = (each.values() if isinstance(each, dict) else each for each in level.values())
        level = {id(one): one for each in inner for one in each if isinstance(one, dict | list | tuple)}
    return bool(level)


def guard_parser(tokenizer: Any) -> None:
    """Have a tokenizer, and its copies, raise `ValueError` for each turn that it can't read. TRL takes it as text."""
    tokenizer.parse_response = MethodType(parse_response, tokenizer)


def parse_response(self: Any, ids: list[int], *args: object, **kwargs: object) -> dict[str, object]:
    if str(self.decode(ids)).count(str(self.eos_token)) > MOST_ENDS:
        raise ValueError("the turn has more ends than are sampled")
    try:
        message = type(self).parse_response(self, ids, *args, **kwargs)
    except Exception as error:  # `RecursionError`, or whatever a template's parser raises for a policy's text
        raise ValueError(f"the turn can't be read: {type(error).__name__}") from error
    if not isinstance(message, dict) or is_deep(message):
        raise ValueError("the turn is empty or nested too deeply")
    return encodable(message, "a turn of the policy")


class Encoded(NamedTuple):
    ids: list[list[int]]
    images: list[object] | None
    fields: Mapping[str, object]  # what the processor makes beside tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """What exists before TRL's `_generate` runs around it, which would make it."""

    encoded: Encoded | None = None
    tokens: TokenSource | None = None  # in place of TRL's engines
    talked: tuple[object, ...] | None = None  # what `_tool_call_loop` is to return
    rollout: Mapping[str, object] | None = None  # what a `rollout_func` is to return


class ToolsOf(NamedTuple):
    schemas: list[object]  # as the chat template gets them
    functions: Sequence[Callable[..., object]]  # those that are called
