"""What a tokenizer's parser reads of a turn of the policy, and how deeply values in it may be nested."""

from types import MethodType
from typing import Any

from salesrl_trl.ground.texts import encodable

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


def parse_response(self: Any, ids: list[int], *args: object, **kwargs: object) -> dict[str, Any]:
    if str(self.decode(ids)).count(str(self.eos_token)) > MOST_ENDS:
        raise ValueError("the turn has more ends than are sampled")
    try:
        message = type(self).parse_response(self, ids, *args, **kwargs)
    except Exception as error:  # `RecursionError`, or whatever a template's parser raises for a policy's text
        raise ValueError(f"the turn can't be read: {type(error).__name__}") from error
    if not isinstance(message, dict) or is_deep(message):
        raise ValueError("the turn is empty or nested too deeply")
    return encodable(message, "a turn of the policy")
