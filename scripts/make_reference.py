"""Write the reference pages made from the source: settings, recipes, metrics, commands, API, verl's names, errors.

    python scripts/make_reference.py FOLDER

docs/conf.py calls this when the site is built. The pages aren't committed.
"""

import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import salesrl_trl.__main__ as command
from salesrl_trl.launch import settings_help
from salesrl_trl.launch.coming_from import Name
from salesrl_trl.launch.coming_from import names as foreign_names
from salesrl_trl.launch.presets import FOLDER, PRESETS
from salesrl_trl.launch.process import FAULTS, Sign
from salesrl_trl.launch.settings import ENVIRONMENT, SALES_CHAIN, SMALL_POLICY
from salesrl_trl.names import FIGURES
from scripts import make_api_page


def settings() -> str:
    """Every setting of a run by group, with its default."""
    parts = [
        "# Settings",
        "Every setting works in a recipe (`name: value`) and on the command line (`--name value`). `--help NAME` of "
        "recipes and commands prints the same text. TRL's and transformers' own settings work too.",
        "[Recipes and presets](recipes.md) shows which settings each of them changes.",
    ]
    for group, of in settings_help.GROUPS.items():
        rows = [each for each in settings_help.settings().values() if each.group == group]
        lines = [f"| {{setting}}`{row.name}` | {_cell(row.default, code=True)} | {_cell(row.text)} |" for row in rows]
        about = str(of["about"])
        parts += [f"## {group}", f"{about[:1].upper()}{about[1:]}.", _table(["setting", "default", "meaning"], lines)]
    return _page(parts)


def recipes() -> str:
    """What every recipe sets, with a column for each, and what every preset sets."""
    files = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))
    columns = {path.stem: _column(yaml.safe_load(path.read_text("utf-8"))) for path in files}
    defaults = {name: _cell(setting.default, code=True) for name, setting in settings_help.settings().items()}
    names = [*defaults, *sorted({name for column in columns.values() for name in column} - defaults.keys())]
    lines = []
    for name in names:
        if any(cells := [column.get(name, "") for column in columns.values()]):
            lines.append(f"| {' | '.join([f'`{name}`', defaults.get(name, ''), *cells])} |")
    parts = [
        "# Recipes and presets",
        "## Recipes",
        "What each file in `recipes/` sets. Where a cell is empty, the default applies. *small:* is for the built-in "
        "small policy, which a recipe trains if `model_name_or_path` isn't set. *sales:* is for the built-in reward "
        "pipeline and the demo's rows. `env.NAME` is an environment variable.",
        _table(["setting", "default", *columns], lines),
    ]
    return _page([*parts, *presets()])


def _column(recipe: dict[str, Any]) -> dict[str, str]:
    """The cells of a recipe's column by setting."""
    blocks = [(f"*{block.split('_')[0]}:* ", recipe.pop(block, {})) for block in (SALES_CHAIN, SMALL_POLICY)]
    environment = {f"env.{name}": value for name, value in recipe.pop(ENVIRONMENT, {}).items()}
    cells = defaultdict[str, list[str]](list)
    for mark, values in [("", recipe | environment), *blocks]:
        for name, value in values.items():
            cells[name].append(mark + _cell(settings_help.shown(value), code=True))
    return {name: "; ".join(cell) for name, cell in cells.items()}


def presets() -> Iterator[str]:
    """A table of the presets: what each file's first comment says that it is for, and what it sets."""
    yield "## Presets"
    yield (
        "A preset is an overlay of a recipe: `--preset 80gb fast_rollout` sets what both files in "
        "`salesrl_trl/launch/presets/` have. Later presets override earlier ones, and single settings on the command "
        "line override all presets. The start of a run lists what each preset changed."
    )
    lines = []
    for name in PRESETS:
        text = (FOLDER / f"{name}.yaml").read_text("utf-8")
        purpose = re.match(r"((?:# .+\n)+)", text)
        assert purpose is not None, name
        values = yaml.safe_load(text)
        values |= values.pop(SALES_CHAIN, {})
        of = ", ".join(f"`{setting}: {json.dumps(value)}`" for setting, value in values.items())
        use = re.sub("^# ", "", purpose[0], flags=re.MULTILINE)
        lines.append(f"| {{preset}}`{name}` | {_cell(use)} | {_cell(of)} |")
    yield _table(["preset", "for", "sets"], lines)


def metrics() -> str:
    """Every metric that this package logs beside TRL's own."""
    lines = [f"| {{metric}}`{_angled(figure.tag)}` | {_angled(_cell(figure.meaning))} |" for figure in FIGURES]
    text = (
        "Logged under `train/` beside TRL's own metrics, and under `eval/` as far as they describe completions. "
        "Words in angle brackets stand for a branch, stage or service. All ranks log the same names at every step."
    )
    return _page(["# Metrics", text, _table(["name", "meaning"], lines)])


def commands() -> str:
    """The `--help` of every command."""
    parts = ["# Command line", "`salesrl COMMAND` and `python -m salesrl_trl COMMAND` are the same."]
    for name in ("", *command.COMMANDS):
        words = [sys.executable, "-m", "salesrl_trl", *filter(None, [name]), "--help"]
        told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        parts += [f"## salesrl {name}".rstrip(), f"```text\n{told.strip()}\n```"]
    return _page(parts)


def troubleshooting() -> str:
    """Every fault that a failed run recognises, by title."""
    ordered = sorted(FAULTS, key=lambda fault: fault.title)
    parts = [
        "# Troubleshooting",
        "A run that fails ends with its final error summary: the error, its cause and what to do. The summary is also "
        "in `OUTPUT_DIR/run.log`. This page lists every recognised error. If a run hangs, the last `[Heartbeat]` line "
        "names the phase (see [Timing](timing.md)).",
        "\n".join(f"- [{fault.title}](#{_anchor(fault.title)})" for fault in ordered),
    ]
    for fault in ordered:
        steps = "\n".join(f"{number}. {step}" for number, step in enumerate(fault.remedies, 1))
        parts += [f"## {fault.title}", fault.cause, f"Recognised by: {'; '.join(map(_shown, fault.signs))}.", steps]
    return _page(parts)


def verl_names() -> str:
    """verl's settings, and the upper-case names of scripts, with what replaces each."""
    parts = [
        "# Names of verl and of scripts",
        "What verl's settings and upper-case names in scripts are called here. A recipe or command line with "
        "one of them is rejected with the name and value to use. [From verl](../start/from-verl.md) converts "
        "a whole configuration. Names of verl are given without `actor_rollout_ref.`; `*` stands for any text. Any "
        "other upper-case name is that of a setting in lower case: `LORA_R` is `lora_r`.",
    ]
    for system, title in (("verl", "verl"), ("upper case", "Upper-case names")):
        lines = [_foreign(name, line) for name, line in foreign_names().items() if line.system == system]
        parts += [f"## {title}", _table([title, "here", "note"], lines)]
    return _page(parts)


def _foreign(name: str, line: Name) -> str:
    here = ", ".join(f"`{setting}`" for setting in (line.here or line.see).split(", ") if setting)
    values = [f"`{there}` becomes `{value}`" for there, value in (line.values or {}).items() if there != value]
    notes = [*values, line.note, f"if `{line.when}` is on" if line.when else ""]
    return f"| `{name}` | {here or 'none'} | {_cell('; '.join(filter(None, notes)))} |"


def _anchor(title: str) -> str:
    return "".join(letter for letter in title.lower().replace(" ", "-") if letter.isalnum() or letter in "-_")


def _shown(sign: Sign) -> str:
    parts = {"error": sign.kind, "message": sign.text, "raised in": sign.where, "signal": sign.status}
    return ", ".join(f"{name} `{value}`" for name, value in parts.items() if value)


def _table(heads: list[str], lines: list[str]) -> str:
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *lines])


def _cell(text: str, *, code: bool = False) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return f"`{text}`" if code and text else text


def _angled(text: str) -> str:
    return text.replace("{", "<").replace("}", ">")


def _linked(text: str) -> str:
    """Help and messages name a page by its file, because they are also read in a terminal; here it is a link."""
    return re.sub(r"(?<![\w/`])docs/([\w/-]+\.md)\b(?!`)", r"[](../\1)", text)


def _page(parts: list[str]) -> str:
    return "\n\n".join(parts) + "\n"


def pages() -> Iterator[tuple[str, str]]:
    """Each page's file and text."""
    yield "settings.md", _linked(settings())
    yield "recipes.md", recipes()
    yield "metrics.md", metrics()
    yield "command-line.md", commands()
    yield "api.md", _linked(make_api_page.page())
    yield "verl-names.md", _linked(verl_names())
    yield "troubleshooting.md", _linked(troubleshooting())


def main(folder: Path) -> None:
    """Write the pages; a page that says what it said keeps its time, so that Sphinx doesn't read it again."""
    for name, text in pages():
        path = folder / name
        if not path.is_file() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
