"""The interface of a format: one record of a published dataset becomes one row, or is left out for a reason.

Example:

```python
class Questions(DatasetFormat):
    \"\"\"A file of {"q": ..., "a": ...}.\"\"\"

    def row(self, record):
        question, answer = text_of(record, "q"), text_of(record, "a")
        turns = [{"role": "customer", "content": question}]
        return {"id": f"q-{digest(record)}", "branch": "hallucination", "conversation": turns, "documents": [answer]}
```
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from salesrl_trl.data.rows import shape
from salesrl_trl.errors import DataError


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A sound record that makes no row."""

    reason: str
    """Completes "12 ...": `"have no known answer"`. Reasons are counted, so they hold nothing of a record's text."""


class DatasetFormat(ABC):
    """The form of a dataset's records."""

    answers_directly: bool = False
    """Whether the policy answers itself, without the packaged chain: rows need a `prompt`. The settings say it."""
    instructions: tuple[str, ...] = ()
    """The system messages that the format puts into its prompts, for the banner."""
    hidden: frozenset[str] = frozenset()
    """Fields of a record that do not become columns of its row. All others do, for reward functions."""

    @abstractmethod
    def row(self, record: Mapping[str, object]) -> dict[str, object] | LeftOut:
        """A record, field to value as the file has them, in the columns of this package.

        Returns:
            `dict[str, object]`: the columns of docs/DATA.md. `id` is the same each time and no other record's. `group`
            is equal for records that must not be parted into training and held-out rows.
            `LeftOut`: the record makes no row.

        Raises:
            `DataError`: the record is malformed. The message names the field, and never quotes it. The loader adds
                file and line.
        """


def text_of(record: Mapping[str, object], name: str, may_be_blank: bool = False) -> str:
    """A field that is a text, without blanks around it. Raises `DataError` if it is none, or blank."""
    value = record.get(name)
    if not isinstance(value, str) or not (may_be_blank or value.strip()):
        raise DataError(
            f"the field `{name}` is {shape(value)}. Expected a text{'' if may_be_blank else ', not blank'}"
        )
    return value.strip()


def number_of(record: Mapping[str, object], name: str) -> int:
    """A field that is a whole number, perhaps written as a text. Raises `DataError` if it is none."""
    value = record.get(name)
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise DataError(f"the field `{name}` is {shape(value)}. Expected a whole number")
    return value


def choice_of(record: Mapping[str, object], name: str, choices: Sequence[str]) -> str:
    """A field that is one of some texts. Raises `DataError` if it is none of them."""
    value = record.get(name)
    if not isinstance(value, str) or value not in choices:
        raise DataError(f"the field `{name}` is {shape(value)}. Expected one of: {', '.join(choices)}")
    return value


def digest(record: Mapping[str, object]) -> str:
    """Twelve characters that stand for the record's content: an id for records without one."""
    text = json.dumps(record, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:12]
