"""The demo's world: texts, courses and figures in YAML files, in both languages, and the code that assembles them."""

from pathlib import Path
from typing import Any

import yaml

LANGS = ("zh", "en")
COMMA = {"zh": "，", "en": ", "}


def read(name: str) -> dict[str, Any]:
    """The content of a YAML file of this folder."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # type: ignore[no-any-return]
