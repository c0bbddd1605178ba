"""Settings without keys, for records and logs. Owns what the name of a key is. Needs no torch.

Called by `env`, `run.run_record`, `launch.building` and `config.training`.
"""

import json
import re
from collections.abc import Mapping
from enum import Enum

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET = re.compile(
    r"(api|access|auth|bearer|client|private|refresh|secret|session)(keys?|tokens?)|key|token|secrets?|bearer|jwt"
    r"|password|passphrase|passwd|pwd|pass|auth|authorization|credentials?|cookies?"
)
"""The last word of a key's name, perhaps with the word before it."""
_USER = re.compile(r"(?<=//)[^/\s]+@")
"""The part of an address that may hold a password: of a proxy, for example."""
_IN_A_QUERY = re.compile(r"(?<=[?&;])([^=&;#\s]+)=[^&;#\s]+")
_NO_SECRETS = ("eos_token", "pad_token", "bos_token")


def is_secret(name: str) -> bool:
    """Whether the name of a setting, a header or an environment variable is that of a key: `OPENAI_API_KEY_2`,
    `x-api-key`, `accessToken`. `max_tokens` is none."""
    words = [word.lower() for word in _WORD.findall(name)][-2:]
    return name not in _NO_SECRETS and any(map(_SECRET.fullmatch, ["".join(words), *words[-1:]]))


def without_keys(value: object) -> object:
    """A setting's value as plain data. Entries of mappings that hold a key are left out, in JSON too. In addresses
    there are asterisks for user and password, and for a key in the query."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {
            str(name): without_keys(entry)
            for name, entry in value.items()
            if not entry or isinstance(entry, bool) or not is_secret(str(name))  # a setting without a value stays
        }
    if isinstance(value, list | tuple):
        return [without_keys(entry) for entry in value]
    if isinstance(value, str) and (plain := from_json(value)) is not value:
        shown = without_keys(plain)
        return value if shown == plain else json.dumps(shown)
    if not isinstance(value, str):
        return value
    return _IN_A_QUERY.sub(lambda pair: f"{pair[1]}=***" if is_secret(pair[1]) else pair[0], _USER.sub("***@", value))


def from_json(text: str) -> object:
    """The structure in a text that is one, or the text."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
