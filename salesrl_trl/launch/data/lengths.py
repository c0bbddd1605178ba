"""Prompts that are too long for the model, found before it is loaded.

Owns the count of every prompt's tokens, and the three rules for prompts above the limit. Refuses to decide the limit:
`launch.checks.dataset` does. Called by `launch.plan`.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import jinja2

from salesrl_trl.errors import ConfigError, DataError
from salesrl_trl.launch.data.templates import PromptTemplate, build_prompt
from salesrl_trl.types import Prompt, SalesRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Count = Callable[[Sequence[Prompt]], list[int]]  # prompts to their lengths in tokens

LONG_PROMPT_RULES = ("error", "drop", "truncate_oldest_turns")
"""Rules for a prompt above the limit: end the run, leave the row out, or leave its oldest turns out of the prompt."""
BATCH_PROMPTS = 1024
SHOWN_ROWS = 5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LengthLimit:
    """Most tokens of a prompt, the chat template's included."""

    tokens: int
    reason: str  # source of the figure: "`vllm_max_model_length` 320 less `max_completion_length` 64"


@dataclasses.dataclass(frozen=True, slots=True)
class FittingPrompts:
    """Rows whose prompts fit, and their prompts."""

    rows: list[SalesRow]
    prompts: list[Prompt]
    lengths: list[int]
    note: str | None = None  # line for the banner about rows or turns that were left out; `None` if there are none

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt; 0 without rows."""
        return max(self.lengths, default=0)

    def at(self, places: Iterable[int], note: str | None = None) -> "FittingPrompts":
        """Those at these places."""
        wanted = [*places]
        prompts, lengths = [self.prompts[place] for place in wanted], [self.lengths[place] for place in wanted]
        return FittingPrompts([self.rows[place] for place in wanted], prompts, lengths, note)


def token_counter(
    tokenizer: "PreTrainedTokenizerBase", chat_template_kwargs: Mapping[str, object] | None = None
) -> Count:
    """A function that counts tokens as TRL's `GRPOTrainer._tokenize_prompts` does: messages with the tokenizer's chat
    template, texts without. Equal prompts are tokenized once. The function raises `ConfigError` for prompts that the
    chat template refuses."""

    def count(prompts: Sequence[Prompt]) -> list[int]:
        keys = [json.dumps(prompt) for prompt in prompts]
        different = dict(zip(keys, prompts, strict=True))
        lengths = []
        distinct = list(different.values())
        for batch in (distinct[at : at + BATCH_PROMPTS] for at in range(0, len(distinct), BATCH_PROMPTS)):
            if isinstance(batch[0], str):
                lengths += [len(ids) for ids in tokenizer(batch, verbose=False)["input_ids"]]
                continue
            try:
                tokens = tokenizer.apply_chat_template(
                    conversation=batch,
                    add_generation_prompt=True,
                    tokenize=True,
                    return_dict=True,
                    tokenizer_kwargs={"verbose": False},  # `fit_prompts` reports long prompts
                    **(chat_template_kwargs or {}),
                )
            except jinja2.TemplateError as error:
                raise ConfigError(
                    f"the model's chat template refuses the prompts: {error.message}. Expected it to accept the roles "
                    f"{', '.join(message['role'] for message in batch[0])}. Give a `prompt_template` that suits it: "
                    "without a system message, for example."
                ) from None
            lengths += [len(ids) for ids in tokens["input_ids"]]
        by_key = dict(zip(different, lengths, strict=True))
        return [by_key[key] for key in keys]

    return count


def fit_prompts(
    rows: Sequence[SalesRow], prompt: str | PromptTemplate | None, count: Count, limit: LengthLimit | None, rule: str,
    name: str, picture_tokens: Callable[[SalesRow], int] | None = None,
) -> FittingPrompts:  # fmt: skip
    """The rows whose prompts fit. Messages name a row by its place, and the rows by `name`, such as `"training"`.
    `prompt` is a style or a template, as in `build_prompt`. `rule` is one of `LONG_PROMPT_RULES`. `picture_tokens`
    (from `picture_counter`) gives the tokens of a row's pictures, which are added to those of its text. Raises
    `DataError` for prompts of two kinds, for too long ones that the rule keeps, and if no row is left."""
    prompts = [build_prompt(row, prompt) for row in rows]
    texts = [row.row_id for row, made in zip(rows, prompts, strict=True) if isinstance(made, str)]
    if 0 < len(texts) < len(rows):
        raise DataError(
            f"the prompts of {len(texts):,} of {len(rows):,} {name} rows are texts, such as that of {texts[0]!r}, and "
            "those of the others messages. Expected one kind of prompt. Make all of them messages, for example."
        )
    extra = [0 if picture_tokens is None else picture_tokens(row) for row in rows]
    lengths = [text + more for text, more in zip(count(prompts), extra, strict=True)] if rows else []
    long = [] if limit is None else [index for index, length in enumerate(lengths) if length > limit.tokens]
    every = FittingPrompts(list(rows), prompts, lengths)
    if limit is None or not long:
        return every

    def excess(places: Sequence[int]) -> str:
        share = f"{len(places):,} of {len(rows):,} {name} rows"
        return f"{share} have prompts of more than {limit.tokens} tokens ({limit.reason})"

    def named(places: Sequence[int]) -> str:
        shown = ", ".join(f"row {index} ({lengths[index]} tokens)" for index in places[:SHOWN_ROWS])
        return shown + (f" and {len(places) - SHOWN_ROWS:,} more" if len(places) > SHOWN_ROWS else "")

    if rule == "error":
        raise DataError(
            f"{excess(long)}: {named(long)}. Expected room for prompt and completion. Shorten the rows, raise the "
            "limit, or set `long_prompts: drop` or `long_prompts: truncate_oldest_turns`."
        )
    if rule == "drop":
        fitting = sorted(set(range(len(rows))).difference(long))
        if not fitting:
            raise DataError(
                f"{excess(long)}: no row is left. Expected some that fit. Raise the limit, or shorten the rows."
            )
        return every.at(fitting, f"{excess(long)} and are left out (`long_prompts: drop`): {named(long)}.")
    text_limits = [limit.tokens - extra[index] for index in long]
    shortened = _without_oldest_turns([rows[index] for index in long], prompt, count, text_limits)
    if unfit := [index for index, short in zip(long, shortened, strict=True) if short is None]:
        raise DataError(
            f"{excess(unfit)} even with the last turn alone: {named(unfit)}. Shorten them, raise the limit, or set "
            "`long_prompts: drop`."
        )
    note = (
        f"{excess(long)} and lack their oldest turns (`long_prompts: truncate_oldest_turns`; services and judge still "
        f"see the whole conversation): {named(long)}."
    )
    short_prompts = [short for short in shortened if short is not None]
    for index, short, length in zip(long, short_prompts, count(short_prompts), strict=True):
        prompts[index], lengths[index] = short, length + extra[index]
    return FittingPrompts(list(rows), prompts, lengths, note)


def _without_oldest_turns(
    rows: Sequence[SalesRow], prompt: str | PromptTemplate | None, count: Count, tokens: Sequence[int]
) -> list[Prompt | None]:
    """Each row's prompt within its `tokens`, its oldest turns left out as need be; `None` if the last is too long."""
    fewest, most = [1] * len(rows), [len(row.conversation) for row in rows]  # left out; `most` would leave no turn
    shortened: list[Prompt | None] = [None] * len(rows)
    while open_rows := [index for index in range(len(rows)) if fewest[index] < most[index]]:
        middles = [(fewest[index] + most[index]) // 2 for index in open_rows]
        shorter = [
            build_prompt(dataclasses.replace(rows[index], conversation=rows[index].conversation[middle:]), prompt)
            for index, middle in zip(open_rows, middles, strict=True)
        ]
        for index, middle, candidate, length in zip(open_rows, middles, shorter, count(shorter), strict=True):
            if length <= tokens[index]:
                most[index], shortened[index] = middle, candidate
            else:
                fewest[index] = middle + 1
    return shortened
