"""From a row to the chat messages that the policy reads, by a template.

A template is Jinja. Its text is the user message. The text in `{% block system %}`, which is optional, is the system
message. White space around both is dropped. The packaged ones are in the folder `templates` beside this module.
"""

import functools
import traceback
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

import jinja2
import jinja2.meta
import jinja2.sandbox

from salesrl_trl.data.files import nearest_file, read_small, unreadable
from salesrl_trl.errors import ConfigError, nearest
from salesrl_trl.types import DEFAULT_FORMAT, Prompt, SalesRow

SYSTEM = "system"  # the only block that a template may have
CONTENT_FIELDS = ("context", "conversation", "prompt", "columns")
"""The conversation as text, one line per turn, and as a list of turns; the row's prompt, as it gives it; its further
columns. A template uses one of them."""
FIELDS = (*CONTENT_FIELDS, "branch", "documents", "row_id", "tenant_id", "contact_id", "account_id", "message_id",
          "action_fields")  # fmt: skip
"""Variables of a template: the row's fields, and the names of the action's fields."""

_WITHOUT_SYSTEM = "{% extends template %}{% block system %}{% endblock %}"
_ENVIRONMENT = jinja2.sandbox.ImmutableSandboxedEnvironment(
    undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


class PromptTemplate:
    """Makes the chat messages of a row. `name` is the template's file, for messages. Raises `ConfigError` if the text
    is no Jinja, uses an unknown variable or block, or has no conversation."""

    def __init__(self, source: str, name: str, action_fields: Sequence[str]) -> None:
        self._name = name
        self._action_fields = tuple(action_fields)
        try:
            tree = _ENVIRONMENT.parse(source.rstrip())
            self._template = _ENVIRONMENT.from_string(source.rstrip())
            self._user = _ENVIRONMENT.from_string(_WITHOUT_SYSTEM)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{name}, line {error.lineno} is no Jinja: {error.message}. Correct the line.") from None
        self._check(tree)

    def messages(self, row: SalesRow) -> list[dict[str, str]]:
        """The row's prompt, perhaps with a system message. Raises `ConfigError` if the template fails on it."""
        fields = {name: getattr(row, name) for name in FIELDS[:-1]} | {FIELDS[-1]: self._action_fields}
        try:
            system = self._system(fields).strip()
            user = self._user.render(fields, template=self._template).lstrip()
        except Exception as error:
            # a filter may raise anything, and may quote a customer: only Jinja's words are told
            said = f": {error.message}" if isinstance(error, jinja2.UndefinedError) else ""
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
            where = f", line {lines[-1]}" if lines else ""
            raise ConfigError(
                f"{self._name}{where} does not work for row {row.row_id!r} ({type(error).__name__}{said}). A row has "
                f"{', '.join(FIELDS)}; a turn of `conversation` has `role` and `content`."
            ) from None
        if not user.strip():
            raise ConfigError(f"{self._name} leaves the user message of row {row.row_id!r} empty. Expected a text.")
        messages = [{"role": "user", "content": user}]
        return [{"role": "system", "content": system}, *messages] if system else messages

    def _system(self, fields: Mapping[str, object]) -> str:
        block = self._template.blocks.get(SYSTEM)
        try:
            return "" if block is None else "".join(block(self._template.new_context(dict(fields))))
        except Exception:
            _ENVIRONMENT.handle_exception()  # raises it again, with the lines of the template in its traceback

    def _check(self, tree: jinja2.nodes.Template) -> None:
        for block in tree.find_all(jinja2.nodes.Block):
            if block.name != SYSTEM:
                raise ConfigError(
                    f"{self._name}, line {block.lineno} has a block {block.name!r}. Expected `block {SYSTEM}` alone: "
                    "all other text is the user message."
                )
        used = jinja2.meta.find_undeclared_variables(tree) - _ENVIRONMENT.globals.keys()
        for name in sorted(used - set(FIELDS)):
            line = min(node.lineno for node in tree.find_all(jinja2.nodes.Name) if node.name == name)
            raise ConfigError(
                f"{self._name}, line {line} uses {name!r}, which no row has.{nearest(name, FIELDS)} Expected some of: "
                f"{', '.join(FIELDS)}."
            )
        if not used & set(CONTENT_FIELDS):
            raise ConfigError(
                f"{self._name} never shows the conversation, so that every prompt would be the same. Expected "
                "`{{ context }}`, or turns of `conversation`, `prompt` or `columns`, in it."
            )


def read_template(path: Path | str, action_fields: Sequence[str]) -> PromptTemplate:
    """A template from its file. Raises `ConfigError` if the file is not there, is not UTF-8, or is no template."""
    file = Path(path).expanduser()
    try:
        return PromptTemplate(read_small(file), str(path), action_fields)
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
