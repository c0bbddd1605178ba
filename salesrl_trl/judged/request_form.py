"""What one provider takes of a request, as far as its replies have shown: fields, and the schema of a verdict.

Pure but for the lines that say what was learnt. `provider` sends the requests.
"""

import logging
from collections import deque
from collections.abc import Collection, Mapping

logger = logging.getLogger(__name__)

OTHER_NAME = {"max_completion_tokens": "max_tokens"}
"""The name by which servers of an older form know a field."""
WINDOW = 32  # latest schema replies that are looked at
FEWEST = 16  # replies that are looked at before half of them, without a verdict by the schema alone, give it up
TRY_AGAIN = 128
"""Requests by text after which one goes by schema again; twice as many each time that it does not work."""


class RequestForm:
    """Which fields a provider gets. `formats`: its `response_format`.

    A field that the provider refuses is left out of all later requests, or goes by its other name. With `auto`, the
    schema is given up when the provider refuses it, or when half of its latest replies, of `FEWEST` at least, had no
    verdict by schema and one by text. It comes back when a later try works.
    """

    def __init__(self, name: str, formats: str = "auto") -> None:
        self.learnt: list[str] = []  # a line for each thing that a setting can fix for good
        self._name = name
        self._formats = formats
        self._left_out: dict[str, str | None] = {}  # by its name, the name that it goes by
        self._replies: deque[bool] = deque(maxlen=WINDOW)
        self._is_schema_off = formats == "text"
        self._by_text = 0  # requests since the schema was given up
        self._try_again = TRY_AGAIN
        self._is_trying = False

    def of(self, body: Mapping[str, object]) -> dict[str, object]:
        """The request's fields that are sent."""
        if not self._left_out and "max_tokens" not in body:
            return dict(body)
        names = {name: self._left_out.get(name, name) for name in body}
        if "max_tokens" in body and names["max_tokens"]:  # of `extra_body`
            names["max_completion_tokens"] = None
        return {other: body[name] for name, other in names.items() if other is not None}

    def leave_out(self, refused: Collection[str]) -> bool:
        """A request was refused for these of its fields. Returns whether the same request has another form now."""
        fields = {name for name in refused if name not in ("model", "messages", "response_format")}
        by_other = {other: name for name, other in OTHER_NAME.items()}
        for field in sorted(fields):
            name = field if field not in self._left_out.values() else by_other[field]
            instead = OTHER_NAME.get(field)
            if self._left_out.get(name, name) != field:
                continue  # another request has shown it
            self._left_out[name] = self._left_out[field] = instead
            goes = f"it goes as `{instead}` from now on" if instead else "it is left out from now on"
            fix = f"`extra_body: {{{instead}: ...}}`" if instead else f"`extra_body` without `{field}`"
            self._learn(f"takes no `{field}`: {goes}", "`temperature: null`" if field == "temperature" else fix)
        if "response_format" in refused and self._formats == "auto" and not self._is_schema_off:
            self._give_up("it refuses `response_format`")
        return bool(fields)

    def goes_by_schema(self) -> bool:
        """Whether the next request asks for the schema."""
        if not self._is_schema_off or self._formats == "text":
            return not self._is_schema_off
        self._by_text += 1
        self._is_trying = self._is_trying or self._by_text >= self._try_again
        return self._by_text % self._try_again == 0

    def record_schema(self, *, worked: bool) -> None:
        """A request by schema gave a verdict, or only the same by text did."""
        self._replies.append(worked)
        failed = self._replies.count(False)
        if worked and self._is_schema_off:
            self._is_schema_off, self._try_again = False, TRY_AGAIN
            self._replies.clear()
            logger.info(f"judge {self._name}: `response_format` works again; from here on by schema")
        elif self._is_schema_off:  # this one was on its way when the schema was given up, or tries it again
            if self._is_trying:
                self._by_text, self._try_again, self._is_trying = 0, 2 * self._try_again, False
        elif len(self._replies) >= FEWEST and 2 * failed >= len(self._replies):
            self._give_up(f"{failed} of {len(self._replies)} replies had no verdict by `response_format`")

    def _give_up(self, why: str) -> None:
        self._is_schema_off, self._by_text, self._is_trying = True, 0, False
        self._replies.clear()
        fix = "`response_format: text`"
        self._learn(f"is asked for verdicts by text, because {why}", fix)

    def _learn(self, what: str, fix: str) -> None:
        line = f"judge {self._name} {what}"
        line += f". {fix} in its entry of `judge_providers` says so for good" if fix else ""
        logger.info(line)
        self.learnt.append(line)
