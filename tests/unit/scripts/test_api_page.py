"""The reference pages that the site's build makes: complete, and without a link that leads nowhere."""

import re
from pathlib import Path

import pytest
import yaml

import salesrl_trl
from salesrl_trl.__main__ import COMMANDS
from salesrl_trl.launch.coming_from import names as foreign_names
from salesrl_trl.launch.presets import PRESETS
from salesrl_trl.launch.process import FAULTS
from salesrl_trl.launch.settings_help import settings, shown
from salesrl_trl.names import FIGURES
from scripts import make_reference

ROOT = Path(__file__).parents[3]
ENTRIES = {
    "api.md": [f"## {name}\n" for name in salesrl_trl._MODULES],
    "settings.md": [f"\n| {{setting}}`{name}` |" for name in settings()],
    "recipes.md": [f"\n| {{preset}}`{name}` |" for name in PRESETS],
    "metrics.md": [f"| {{metric}}`{figure.tag.replace('{', '<').replace('}', '>')}` |" for figure in FIGURES],
    "command-line.md": [f"## salesrl {name}\n\n```text\nusage: " for name in COMMANDS],
    "verl-names.md": [
        f"\n| `{name}` |" for name, line in foreign_names().items() if line.system in ("verl", "upper case")
    ],
    "troubleshooting.md": [f"## {fault.title}\n" for fault in FAULTS],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("reference")
    make_reference.main(made)
    return made


def test_every_entry_is_on_its_page_once(folder):
    assert sorted(path.name for path in folder.iterdir()) == sorted(ENTRIES)
    for name, entries in ENTRIES.items():
        text = (folder / name).read_text("utf-8")
        assert {entry: text.count(entry) for entry in entries} == dict.fromkeys(entries, 1), name


def test_a_second_build_writes_nothing_and_a_list_of_contents_leads_to_its_headings(folder):
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    make_reference.main(folder)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    text = (folder / "troubleshooting.md").read_text("utf-8")
    headings = {
        re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in re.findall(r"^## (.+)$", text, re.M)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) == headings


def test_the_table_of_recipes_has_each_value_in_their_files_and_no_other(folder):
    table = (folder / "recipes.md").read_text("utf-8").split("\n## ")[1]
    heads, _, *rows = ([cell.strip() for cell in line.split("|")] for line in table.splitlines() if line[:1] == "|")
    for recipe in sorted((ROOT / "recipes").glob("*.yaml")):
        place, found = heads.index(recipe.stem), {}
        for row in rows:
            for mark, value in re.findall(r"(?:\*(\w+):\* )?`([^`]+)`", row[place]):
                found[row[1].strip("`"), mark] = value
        values = yaml.safe_load(recipe.read_text("utf-8"))
        blocks = {mark: values.pop(name, {}) for mark, name in (("small", "small_policy"), ("sales", "sales_chain"))}
        blocks[""] = values | {f"env.{name}": value for name, value in values.pop("env", {}).items()}
        assert found == {(name, mark): shown(value) for mark in blocks for name, value in blocks[mark].items()}
