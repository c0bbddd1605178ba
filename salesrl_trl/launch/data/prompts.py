"""From a row to the policy's prompt: its template, and its length in tokens.

A template is Jinja. Its text is the user message. The text in `{% block system %}`, which is optional, is the system
message. White space around both is dropped. The packaged ones are in the folder `templates`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
import jinja2.meta
import jinja2.sandbox

from salesrl_trl.data.files import nearest_file, unreadable
from salesrl_trl.errors import ConfigError, DataError
from salesrl_trl.types import DEFAULT_FORMAT, Prompt, SalesRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SYSTEM = "system"  # name of the block
CONTENT_FIELDS = ("context", "conversation", "prompt", "columns")
"""The conversation as text, one line per turn, and as a list of turns; the row's prompt, as it gives it; its further
columns. A template uses one of them."""
FIELDS = (*CONTENT_FIELDS, "branch", "documents", "row_id", "tenant_id", "contact_id", "account_id", "message_id",
          "action_fields")  # fmt: skip
"""Variables of a template: the row's fields, and the names of the action's fields."""

_ENVIRONMENT = jinja2.sandbox.ImmutableSandboxedEnvironment(
    undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


class PromptTemplate:
    """Makes the chat messages of a row. `name` is the template's file, for messages. Raises `ConfigError` if the text
    is no Jinja, or has no conversation."""

    def __init__(self, source: str, name: str, action_fields: Sequence[str]) -> None:
        self._name = name
        self._action_fields = tuple(action_fields)
        try:
            used = jinja2.meta.find_undeclared_variables(_ENVIRONMENT.parse(source.rstrip()))
            self._template = _ENVIRONMENT.from_string(source.rstrip())
            self._user = _ENVIRONMENT.from_string("{% extends template %}{% block system %}{% endblock %}")
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{name}, line {error.lineno} is no Jinja: {error.message}. Correct the line.") from None
        if not used & set(CONTENT_FIELDS):
            raise ConfigError(
                f"{name} never shows the conversation, so that every prompt would be the same. Expected "
                "`{{ context }}`, or turns of `conversation`, `prompt` or `columns`, in it."
            )

    def messages(self, row: SalesRow) -> list[dict[str, str]]:
        """The row's prompt, perhaps with a system message. Raises `ConfigError` if the template fails on it."""
        fields = {name: getattr(row, name) for name in FIELDS[:-1]} | {FIELDS[-1]: self._action_fields}
        block = self._template.blocks.get(SYSTEM)
        try:
            system = "" if block is None else "".join(block(self._template.new_context(dict(fields)))).strip()
            user = self._user.render(fields, template=self._template).lstrip()
        except Exception as error:  # a filter's may quote a customer: only Jinja's words are told
            said = f": {error.message}" if isinstance(error, jinja2.UndefinedError) else ""
            raise ConfigError(
                f"{self._name} does not work for row {row.row_id!r} ({type(error).__name__}{said}). A row has "
                f"{', '.join(FIELDS)}; a turn of `conversation` has `role` and `content`."
            ) from None
        if not user.strip():
            raise ConfigError(f"{self._name} leaves the user message of row {row.row_id!r} empty. Expected a text.")
        messages = [{"role": "user", "content": user}]
        return [{"role": "system", "content": system}, *messages] if system else messages


def read_template(path: Path | str, action_fields: Sequence[str]) -> PromptTemplate:
    """A template from its file. Raises `ConfigError` if the file is not there, is not UTF-8, or is no template."""
    file = Path(path).expanduser()
    try:
        return PromptTemplate(file.read_text("utf-8-sig"), str(path), action_fields)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the prompt template {path} can't be read ({unreadable(error)}).{nearest_file(path)} Expected a Jinja "
            "file in UTF-8. Correct `prompt_template`, or begin with a copy of "
            "salesrl_trl/launch/data/templates/instruct.jinja."
        ) from None


PROMPT_STYLES = ("instruct", "compact")
"""`instruct` explains the task to a general chat model. `compact` is the conversation alone, for a policy that was
taught the format before: the instruction would be three quarters of its tokens."""


@functools.cache
def packaged_template(style: str) -> PromptTemplate:
    """A packaged prompt. Raises `ValueError` for an unknown style."""
    if style not in PROMPT_STYLES:
        raise ValueError(f"prompt style {style!r} is unknown; expected one of {', '.join(PROMPT_STYLES)}")
    file = resources.files("salesrl_trl.launch.data") / "templates" / f"{style}.jinja"
    return read_template(str(file), DEFAULT_FORMAT.fields)


_ROLES = {"customer": "user", "seller": "assistant"}


def build_prompt(row: SalesRow, prompt: str | PromptTemplate | None = "instruct") -> Prompt:
    """The policy's prompt for one row. `prompt` is one of `PROMPT_STYLES`, or a template. `None` is the row's own
    prompt as it is, or without one its conversation as chat messages. Raises `ValueError` for an unknown style, or a
    template that does not work for the row."""
    if prompt is None:
        turns = [{"role": _ROLES[message.role], "content": message.content} for message in row.conversation]
        return turns if row.prompt is None else row.prompt
    return (packaged_template(prompt) if isinstance(prompt, str) else prompt).messages(row)


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
    template, texts without. The function raises `ConfigError` for prompts that the chat template refuses."""

    def count(prompts: Sequence[Prompt]) -> list[int]:
        lengths = []
        for batch in ([*prompts[at : at + BATCH_PROMPTS]] for at in range(0, len(prompts), BATCH_PROMPTS)):
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
        return lengths

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
    shortened: list[Prompt | None] = [None] * len(rows)
    for left_out in range(1, max(len(row.conversation) for row in rows)):
        open_rows = [at for at, row in enumerate(rows) if shortened[at] is None and left_out < len(row.conversation)]
        shorter = [
            build_prompt(dataclasses.replace(rows[at], conversation=rows[at].conversation[left_out:]), prompt)
            for at in open_rows
        ]
        for at, candidate, length in zip(open_rows, shorter, count(shorter), strict=True):
            shortened[at] = candidate if length <= tokens[at] else None
    return shortened
