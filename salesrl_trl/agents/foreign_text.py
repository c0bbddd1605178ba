"""Text of tools and agents that the policy reads.

Owns the marks that the result of a tool and the message of an agent may not contain, because they open or end turns.
`chat_turns` applies it to agents, `trainer` to tools.
"""

import functools
import logging
import re
from typing import Any

from salesrl_trl.ground.fencing import make_nonce, neutralise
from salesrl_trl.ground.texts import encodable
from salesrl_trl.rollout.turn_parser import is_deep

logger = logging.getLogger(__name__)
_tell = functools.cache(logger.warning)  # each line once

_TAG = re.compile(r"<[^\s<>]{1,64}>|\[/?[A-Z_]{2,64}\]")  # a mark of a chat template that need not be a token
_NAMED = re.compile(r"(?i)</?(?!\w*turn)[a-z_]+>")  # prompts name it, e.g. `<think>`


class ForeignText:
    """Spaces out the marks of one model and its chat template, as `fencing` does for a judge."""

    def __init__(self, tokenizer: Any, template: str | None) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        tags = _TAG.findall(str(template or getattr(tokenizer, "chat_template", "")))
        marks = dict.fromkeys(tags, False) | {
            token.content: token.special for token in added if len(token.content) > 1
        }
        self._spaced, nonce = dict[str, str](), make_nonce()
        for mark, is_special in marks.items():
            if (text := neutralise(mark, nonce)) != mark or is_special:  # the fence may not know its form
                self._spaced[mark] = text if text != mark else f"{mark[0]} {mark[1:]}"
        turns = [mark for mark in self._spaced if marks[mark] or not _NAMED.fullmatch(mark)]
        self._all, self._turns = (
            re.compile("|".join(map(re.escape, sorted(some, key=len, reverse=True))) or r"(?!)")
            for some in (self._spaced, turns)
        )

    def message(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message without the marks that open or end a turn; from a tool, without any."""
        if is_deep(message):
            message = {**message, "content": "{'error': 'The result is nested too deeply.'}"}
        text = encodable(message, f"a message of the role {message['role']}")
        made: dict[str, Any] = self.without(text, self._all if message["role"] == "tool" else self._turns)
        if made != text:
            _tell("marks of the model's turns in results of tools or messages of agents are spaced out")
        return made

    def without(self, value: Any, marks: re.Pattern[str] | None = None) -> Any:
        """A value of JSON, without marks in its texts: by default those that open or end a turn."""
        marks = marks or self._turns
        if isinstance(value, str):
            return marks.sub(lambda mark: self._spaced[mark[0]], value)
        if isinstance(value, dict):
            return {self.without(name, marks): self.without(each, marks) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return (list if isinstance(value, list) else tuple)(self.without(each, marks) for each in value)
        return value
