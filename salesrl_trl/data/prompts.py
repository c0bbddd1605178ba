"""All text the policy is prompted with.

Owns the wording and the shape of prompts and of the demonstrations beside them. It builds chat messages and nothing
else: the tokenizer's chat template turns them into tokens.
"""

import json

from salesrl_trl.types import Action, SalesRow

ACTION_FIELDS = ("user_profile", "rewritten_query", "history_summary")
"""The action's keys, in the order the policy is taught to write them."""

_INSTRUCTION = """\
You help a sales assistant answer its customers from a knowledge base. Read the conversation and write one JSON \
object with exactly these three keys, each a string in the customer's language:
- "user_profile": what matters about the customer's needs. Leave out age, gender, ethnicity, religion, health, family \
and origin: they must not steer the offer.
- "rewritten_query": the customer's last question, able to stand alone as a search query: name the product and the \
topic.
- "history_summary": what was said before, in one sentence. Only what was really said.
Write the JSON object and nothing else."""

PROMPT_STYLES = ("instruct", "compact")
"""`instruct` explains the task to a general chat model; `compact` is the bare conversation, for a policy whose
warm start has taught it the format (the instruction would be three quarters of its tokens)."""


def build_prompt(row: SalesRow, style: str = "instruct") -> list[dict[str, str]]:
    """The policy's prompt for one row.

    Args:
        row (`SalesRow`):
            The conversation to answer.
        style (`str`, *optional*, defaults to `"instruct"`):
            One of `PROMPT_STYLES`.

    Returns:
        `list[dict[str, str]]`: chat messages with `role` and `content`.

    Raises:
        `ValueError`: for an unknown style.
    """
    if style == "compact":
        return [{"role": "user", "content": row.context}]
    if style == "instruct":
        return [
            {"role": "system", "content": _INSTRUCTION},
            {"role": "user", "content": f"Conversation:\n{row.context}"},
        ]
    raise ValueError(f"prompt style {style!r} is unknown; expected one of {', '.join(PROMPT_STYLES)}")


def action_text(action: Action) -> str:
    """The action as the policy is taught to write it: one line of JSON, keys in the order of `ACTION_FIELDS`."""
    return json.dumps({name: getattr(action, name) for name in ACTION_FIELDS}, ensure_ascii=False)
