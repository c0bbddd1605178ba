"""The policy's prompts.

Owns the packaged prompts, and the form of demonstrations. Builds chat messages only: the
tokenizer's chat template turns them into tokens. `templates` turns a template into messages.
"""

import functools
import json
from importlib import resources
from pathlib import Path

from salesrl_trl.data.templates import PromptTemplate, read_template
from salesrl_trl.types import DEFAULT_FORMAT, Action, SalesRow

PROMPT_STYLES = ("instruct", "compact")
"""`instruct` explains the task to a general chat model. `compact` is the conversation alone, for a policy whose warm
start has taught it the format. There the instruction would be three quarters of the tokens."""


def template_path(style: str) -> Path:
    """The file of a packaged prompt.

    Raises:
        `ValueError`: for an unknown style.
    """
    if style not in PROMPT_STYLES:
        raise ValueError(f"prompt style {style!r} is unknown; expected one of {', '.join(PROMPT_STYLES)}")
    return Path(str(resources.files("salesrl_trl.data") / "templates" / f"{style}.jinja"))


@functools.cache
def packaged_template(style: str) -> PromptTemplate:
    """The packaged prompt of a style."""
    return read_template(template_path(style), DEFAULT_FORMAT.fields)


def build_prompt(row: SalesRow, prompt: str | PromptTemplate = "instruct") -> list[dict[str, str]]:
    """The policy's prompt for one row.

    `prompt`: one of `PROMPT_STYLES`, or a template of your own.

    Returns:
        `list[dict[str, str]]`: chat messages with `role` and `content`.

    Raises:
        `ValueError`: for an unknown style, or a template that does not work for the row.
    """
    return (packaged_template(prompt) if isinstance(prompt, str) else prompt).messages(row)


def action_text(action: Action) -> str:
    """The action as the policy learns to write it: one line of JSON, with the keys in their order."""
    return json.dumps(action.as_dict(), ensure_ascii=False)
