"""Builds the policy's prompt from a row, and limits its length in tokens.

A Jinja template renders the user message; its optional `{% block system %}` renders the system message. Both are
stripped. The built-in templates are in the folder `templates`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
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

CONTENT_FIELDS = ("context", "conversation", "prompt", "columns")
"""The conversation as text (a line per turn) and as a list of turns, the row's own prompt, and its other columns. A
template must use one of them."""
FIELDS = (*CONTENT_FIELDS, "branch", "documents", "row_id", "tenant_id", "contact_id", "account_id", "message_id",
          "action_fields")  # fmt: skip
"""Variables of a template: the row's fields, and the names of the action fields."""

_ENVIRONMENT = jinja2.sandbox.ImmutableSandboxedEnvironment(
    undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


class PromptTemplate:
    """Renders the chat messages of a row. `name`: the template's file, for errors. Raises `ConfigError` for invalid
    Jinja, or a template that does not use the conversation."""

    def __init__(self, source: str, name: str, action_fields: Sequence[str]) -> None:
        self._name = name
        self._action_fields = tuple(action_fields)
        try:
            used = jinja2.meta.find_undeclared_variables(_ENVIRONMENT.parse(source.rstrip()))
            self._template = _ENVIRONMENT.from_string(source.rstrip())
            self._user = _ENVIRONMENT.from_string("{% extends template %}{% block system %}{% endblock %}")
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{name}, line {error.lineno} is not valid Jinja: {error.message}.") from None
        if not used & set(CONTENT_FIELDS):
            expected = "Expected `{{ context }}`, `conversation`, `prompt` or `columns` in it."
            raise ConfigError(f"{name} never shows the conversation, so all prompts would be the same. {expected}")

    def messages(self, row: SalesRow) -> list[dict[str, str]]:
        """The row's prompt, optionally with a system message. Raises `ConfigError` if the template fails."""
        fields = {name: getattr(row, name) for name in FIELDS[:-1]} | {FIELDS[-1]: self._action_fields}
        block = self._template.blocks.get("system")
        try:
            system = "" if block is None else "".join(block(self._template.new_context(dict(fields)))).strip()
            user = self._user.render(fields, template=self._template).lstrip()
        except Exception as error:  # a filter's error may quote a customer, so only Jinja's own message is shown
            shown = f": {error.message}" if isinstance(error, jinja2.UndefinedError) else ""
            expected = f"A row has {', '.join(FIELDS)}; a turn of `conversation` has `role` and `content`."
            fault = f"({type(error).__name__}{shown})"
            raise ConfigError(f"{self._name} fails for row {row.row_id!r} {fault}. {expected}") from None
        if not user.strip():
            raise ConfigError(f"{self._name} renders an empty user message for row {row.row_id!r}.")
        messages = [{"role": "user", "content": user}]
        return [{"role": "system", "content": system}, *messages] if system else messages


def read_template(path: Path | str, action_fields: Sequence[str]) -> PromptTemplate:
    """Read a template file. Raises `ConfigError` if it does not exist, is not UTF-8, or is not a valid template."""
    file = Path(path).expanduser()
    try:
        return PromptTemplate(file.read_text("utf-8-sig"), str(path), action_fields)
    except (OSError, UnicodeDecodeError) as error:
        found = f"the prompt template {path} can't be read ({unreadable(error)}).{nearest_file(path)}"
        expected = "Expected a Jinja file in UTF-8, such as salesrl_trl/launch/data/templates/instruct.jinja."
        raise ConfigError(f"{found} {expected}") from None


PROMPT_STYLES = ("instruct", "compact", "few_shot")
"""`instruct` explains the task to a general chat model. `compact` only shows the conversation, for a policy that
already knows the format: the instruction would make up three quarters of the tokens."""


@functools.cache
def packaged_template(style: str) -> PromptTemplate:
    """A built-in prompt template. Raises `ValueError` for an unknown style."""
    if style not in PROMPT_STYLES:
        raise ValueError(f"prompt style {style!r} is unknown; expected one of {', '.join(PROMPT_STYLES)}")
    return read_template(Path(__file__).with_name("templates") / f"{style}.jinja", DEFAULT_FORMAT.fields)


CHAT_ROLES = {"customer": "user", "seller": "assistant"}


def build_prompt(row: SalesRow, prompt: str | PromptTemplate | None = "instruct") -> Prompt:
    """The policy's prompt for a row. `prompt` is one of `PROMPT_STYLES`, a template, or `None` for the row's own
    prompt, which defaults to its conversation as chat messages. Raises `ValueError` for an unknown style, or a
    template that fails for the row."""
    if prompt is None:
        turns = [{"role": CHAT_ROLES[message.role], "content": message.content} for message in row.conversation]
        return turns if row.prompt is None else row.prompt
    return (packaged_template(prompt) if isinstance(prompt, str) else prompt).messages(row)


Count = Callable[[Sequence[Prompt]], list[int]]  # maps prompts to their lengths in tokens

LONG_PROMPT_RULES = ("error", "drop", "truncate_oldest_turns")
"""Rules for a prompt that exceeds the limit: stop the run, drop the row, or drop its oldest turns from the prompt."""
SHOWN_ROWS = 5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LengthLimit:
    """Maximum length of a prompt in tokens, including the chat template."""

    tokens: int
    reason: str  # source of the limit: "`vllm_max_model_length` 320 minus `max_completion_length` 64"


@dataclasses.dataclass(frozen=True, slots=True)
class FittingPrompts:
    """Rows whose prompts fit, with their prompts."""

    rows: list[SalesRow]
    prompts: list[Prompt]
    lengths: list[int]
    note: str | None = None  # a line for the banner about dropped rows or turns, if any

    @property
    def longest(self) -> int:
        """Length of the longest prompt in tokens; 0 without rows."""
        return max(self.lengths, default=0)

    def at(self, places: Iterable[int], note: str | None = None) -> "FittingPrompts":
        """The rows at these indices."""
        wanted = [*places]
        prompts, lengths = [self.prompts[place] for place in wanted], [self.lengths[place] for place in wanted]
        return FittingPrompts([self.rows[place] for place in wanted], prompts, lengths, note)


def token_counter(
    tokenizer: "PreTrainedTokenizerBase", chat_template_kwargs: Mapping[str, object] | None = None
) -> Count:
    """A function that counts tokens like TRL's `GRPOTrainer._tokenize_prompts`: messages with the tokenizer's chat
    template, texts without. It raises `ConfigError` for prompts that the chat template rejects."""

    def count(prompts: Sequence[Prompt]) -> list[int]:
        lengths = []
        for batch in ([*prompts[at : at + 1024]] for at in range(0, len(prompts), 1024)):
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
                expected = f"Expected it to accept the roles {', '.join(message['role'] for message in batch[0])}"
                found = f"the model's chat template rejects the prompts: {error.message}"
                raise ConfigError(f"{found}. {expected}. Set a suitable `prompt_template`.") from None
            lengths += [len(ids) for ids in tokens["input_ids"]]
        return lengths

    return count


def fit_prompts(
    rows: Sequence[SalesRow], prompt: str | PromptTemplate | None, count: Count, limit: LengthLimit | None, rule: str,
    name: str, picture_tokens: Callable[[SalesRow], int] | None = None,
) -> FittingPrompts:  # fmt: skip
    """The rows whose prompts fit. Errors name a row by its index, and the rows by `name`, such as `"training"`.
    `prompt` is a style or a template, as in `build_prompt`. `rule` is one of `LONG_PROMPT_RULES`. `picture_tokens`
    (from `picture_counter`) counts the tokens of a row's pictures, which are added to those of its text. Raises
    `DataError` for a mix of texts and messages, for prompts that stay too long under the rule, and if no row is
    left."""
    prompts = [build_prompt(row, prompt) for row in rows]
    texts = [row.row_id for row, made in zip(rows, prompts, strict=True) if isinstance(made, str)]
    if 0 < len(texts) < len(rows):
        found = f"the prompts of {len(texts):,} of {len(rows):,} {name} rows are texts, such as that of {texts[0]!r}"
        raise DataError(f"{found}, and the others are messages. Expected one kind of prompt.")
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
        remedy = "Shorten the rows, raise the limit, or set `long_prompts` to `drop` or `truncate_oldest_turns`."
        raise DataError(f"{excess(long)}: {named(long)}. {remedy}")
    if rule == "drop":
        fitting = sorted(set(range(len(rows))).difference(long))
        if not fitting:
            raise DataError(f"{excess(long)}: no row is left. Raise the limit, or shorten the rows.")
        return every.at(fitting, f"{excess(long)} and are dropped (`long_prompts: drop`): {named(long)}.")
    text_limits = [limit.tokens - extra[index] for index in long]
    shortened = _without_oldest_turns([rows[index] for index in long], prompt, count, text_limits)
    if unfit := [index for index, short in zip(long, shortened, strict=True) if short is None]:
        raise DataError(f"{excess(unfit)} even with only the last turn: {named(unfit)}. Shorten or drop them.")
    whole = "services and judge still see the whole conversation"
    note = f"{excess(long)} and lose old turns (`long_prompts: truncate_oldest_turns`; {whole}): {named(long)}."
    short_prompts = [short for short in shortened if short is not None]
    for index, short, length in zip(long, short_prompts, count(short_prompts), strict=True):
        prompts[index], lengths[index] = short, length + extra[index]
    return FittingPrompts(list(rows), prompts, lengths, note)


def _without_oldest_turns(
    rows: Sequence[SalesRow], prompt: str | PromptTemplate | None, count: Count, tokens: Sequence[int]
) -> list[Prompt | None]:
    """Each row's prompt within `tokens`, without its oldest turns as needed; `None` if the last turn is too long."""
    shortened: list[Prompt | None] = [None] * len(rows)
    for left_out in range(1, max(len(row.conversation) for row in rows)):
        open_rows = [at for at, row in enumerate(rows) if shortened[at] is None and left_out < len(row.conversation)]
        cut = [dataclasses.replace(rows[at], conversation=rows[at].conversation[left_out:]) for at in open_rows]
        shorter = [build_prompt(row, prompt) for row in cut]
        for at, candidate, length in zip(open_rows, shorter, count(shorter), strict=True):
            shortened[at] = candidate if length <= tokens[at] else None
    return shortened
