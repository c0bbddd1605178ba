"""Numbers, names and languages of the report: rounding, units, and how a text becomes Chinese."""

import json
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

from salesrl_trl.ground.texts import NOT_KNOWN, number

NAME_CHARS = 40  # longest name that is shown. A reason code is a few words. A longer name came from elsewhere.


def shown(name: str, most: int = NAME_CHARS) -> str:
    """A name from a file: printable, on one line and not too long. The page puts it in as text."""
    text = "".join(char if char.isprintable() else "?" for char in name)
    return text if len(text) <= most else f"{text[: most - 1]}…"


figure = partial(number, form=".3g")  # three significant digits, `0.0512`; `n/a` for `None`


def percent(value: float | None) -> str:
    """`62 %`, and `0.4 %` below 10 %."""
    if value is None:
        return NOT_KNOWN
    return f"{100 * value:.1f} %" if 0 < value < 0.0995 else f"{100 * value:.0f} %"


def seconds(value: float | None) -> str:
    """`80.5 ms`, `0.25 s`, `12.3 s`, `4 min 5 s`, `2 h 10 min`."""
    if value is None:
        return NOT_KNOWN
    if value < 0.1:
        return f"{1000 * value:.3g} ms" if value else "0 s"
    if value < 99.95:
        return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(value / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def count(value: float) -> str:
    """`1,204`. With one decimal if it is no whole number, for example a mean over ranks."""
    return f"{value:,.0f}" if abs(value - round(value)) < 0.05 else f"{value:,.1f}"


def plural(many: float, noun: str) -> str:
    """`1 step`, `120 steps`."""
    return f"{count(many)} {noun}{'' if many == 1 else 's'}"


LANGUAGES = ("en", "zh")


def in_language(text: str, language: str) -> str:
    """A text of the report in one of `LANGUAGES`. `assets/report_zh.json` has the patterns: English to Chinese, with
    `{}` for what changes, which is looked up too. A name or a number has no pattern and stays."""
    say = partial(in_language, language=language)
    if language == "en":
        return text
    if text.endswith(".") and ". " not in text:
        return f"{say(text[:-1])}。"
    for pattern, translation in _patterns():
        if match := pattern.fullmatch(text):
            return translation.format(*map(say, match.groups()))
    for separator, other in (("; ", "；"), (". ", "。"), (", ", "，")):
        if separator in text:
            return other.join(map(say, text.split(separator)))
    return text


def translated(value: Any, language: str) -> Any:
    """A JSON value with its texts in a language."""
    if isinstance(value, str):
        return in_language(value, language)
    if isinstance(value, dict):
        return {name: translated(part, language) for name, part in value.items()}
    return [translated(part, language) for part in value] if isinstance(value, list | tuple) else value


@cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    """The patterns, those with the most words of their own first. `{}` is no list of sentences with `;`, and none
    with commas in a pattern that begins with it: their parts are looked up by themselves."""
    entries = json.loads((Path(__file__).parent / "assets" / "report_zh.json").read_text("utf-8"))
    patterns = []
    for text, chinese in sorted(entries.items(), key=lambda entry: -len(entry[0].replace("{}", ""))):
        first, *others = map(re.escape, text.split("{}"))
        hole = "([^;]+?)" if first else "((?:[^;,]|,(?! ))+?)"
        patterns.append((re.compile(hole.join([first, *others])), chinese))
    return patterns
