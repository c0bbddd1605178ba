"""What pages show exists: code compiles and imports; commands name files, presets and settings that there are.

tests/integration/test_readme.py runs the blocks that train.
"""

import ast
import json
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from support import english

from salesrl_trl.__main__ import COMMANDS
from salesrl_trl.config.keys import FORMER
from salesrl_trl.ground.shutdown import EXIT_FAILED, EXIT_RESUMABLE
from salesrl_trl.launch.presets import PRESETS
from salesrl_trl.launch.recipes import RECIPES
from salesrl_trl.launch.settings import PRESET, SettingsParser, all_kinds
from salesrl_trl.launch.settings_help import settings
from salesrl_trl.service import breaker, transport
from salesrl_trl.update.run_control import SKIPPED_AT_END

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "recipes/README.md", ROOT / "AGENTS.md", *(ROOT / "docs").rglob("*.md")])
PAGES = [page for page in PAGES if page.relative_to(ROOT).as_posix() not in english.GENERATED]
OPTIONS_OF_COMMANDS = {"train": set(), "preflight": {"stage", "load", "json", "calls"}}
OF_SETTINGS = {*OPTIONS_OF_COMMANDS, "evaluate", "rejudge"}
READ_FILES = re.compile(r"(?:recipes|accelerate_configs|scripts|examples|benchmarks|requirements)/[\w/.-]+\.\w+")


def blocks(page, *languages):
    found = re.findall(r"^( *)```(\w+)\n(.*?)^\1```", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [re.sub(f"^{indent}", "", body, flags=re.MULTILINE) for indent, kind, body in found if kind in languages]


def commands(page):
    """Commands of blocks, and of code within the text: a list of words each."""
    lines = [line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(
        r"`((?:accelerate launch|salesrl|scripts/|python -m|python scripts/)[^`]*)`", page.read_text("utf-8")
    )
    for line in lines:
        for part in re.split(r"\s(?:&&|\|)\s", line):
            if words := shlex.split(part, comments=True):
                yield words


@pytest.fixture(scope="module")
def known():
    of_accelerate = {word for action in launch_command_parser()._actions for word in action.option_strings}
    return SettingsParser(all_kinds()).keys | {PRESET, "config"}, of_accelerate


def unknown_of(words, settings, of_accelerate):
    """What a command names and nobody knows."""
    wrong = [word for word in words for path in READ_FILES.findall(word) if not (ROOT / path).exists()]
    words = list(words)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    if words[:2] == ["accelerate", "launch"]:
        end = next((n for n, word in enumerate(words) if word.endswith(".py") or word in ("-m", "...")), len(words))
        wrong += [word for word in words[2:end] if word.startswith("--") and word not in of_accelerate]
        words = words[end + 1 :]
        extra = set()
    elif words and words[0] == "salesrl" and len(words) > 1 and not words[1].startswith("-"):
        if words[1] not in COMMANDS and words[1] != "COMMAND":
            wrong.append(words[1])
        if words[1] not in OPTIONS_OF_COMMANDS:
            return wrong
        extra = OPTIONS_OF_COMMANDS[words[1]]
        wrong += [w for w in words[2:3] if re.fullmatch(r"[a-z_]+", w) and words[1] == "train" and w not in RECIPES]
    else:
        return wrong
    for place, word in enumerate(words):
        name = word.removeprefix("--").partition("=")[0].partition(".")[0]
        if word.startswith("--") and not {name, name.removeprefix("no_")} & (settings | extra | {"help"}):
            wrong.append(word)
        if word == "--preset":
            values = words[place + 1 :]
            values = values[: next((n for n, value in enumerate(values) if value.startswith("--")), len(values))]
            wrong += [value for value in values if value not in PRESETS and value not in ("NAME", "...")]
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_shows_exists(page, known):
    for words in commands(page):
        assert unknown_of(words, *known) == [], " ".join(words)
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("salesrl_trl"):
                missing = [alias.name for alias in node.names if not hasattr(import_module(node.module), alias.name)]
                assert missing == [], node.module
    for block in blocks(page, "yaml"):
        values = yaml.safe_load(block)
        if isinstance(values, dict) and not block.startswith(" "):
            assert [name for name in values if name not in known[0] or name in FORMER] == []
    for block in blocks(page, "json"):
        rest = block.strip()
        while rest:
            _, end = json.JSONDecoder().raw_decode(rest)
            rest = rest[end:].strip()


def test_a_wrong_command_is_found(known):
    for command, wrong in {
        "accelerate launch --num_machine 2 recipes/full.py": ["--num_machine"],
        "accelerate launch recipes/fall.py --preset 24gb 25gb": ["recipes/fall.py", "25gb"],
        "X=1 accelerate launch recipes/own.py --dataset rows.jsonl --reward_func x": ["--reward_func"],
        "salesrl trian": ["trian"],
        "salesrl train owns --max_steps 2 --rag.base_url x": ["owns"],
    }.items():
        assert unknown_of(command.split(), *known) == wrong


def test_the_timeline_of_an_outage_has_the_numbers_of_the_code_and_of_the_recipe():
    text = (ROOT / "docs/how-to/llm-judge.md").read_text("utf-8").split("**An outage during a run,**")[1]
    full = yaml.safe_load(RECIPES["full"].read_text("utf-8"))
    default = {name: setting.default for name, setting in settings().items()}
    for fact in (
        f"after {transport.RETRY_WAIT_INITIAL_S} s and {2 * transport.RETRY_WAIT_INITIAL_S} s (`max_attempts: 3`)",
        f"| {breaker.FAILURES_TO_OPEN} failures in a row |",
        f"after {breaker.COOLDOWN_S} s, then at doubling intervals up to {breaker.MAX_COOLDOWN_S:g} s",
        f"| {float(default['outage_patience_s']):g} s ({full['outage_patience_s']}) after the first",
        f"| {default['max_skipped_generations']} ({full['max_skipped_generations']}) skipped in a row",
        f"[exit code {EXIT_RESUMABLE}]",
        f"At the last step, {SKIPPED_AT_END} are enough, and the code is {EXIT_FAILED}",
    ):
        assert fact in text
    assert default["max_attempts"] == "3"


def test_committed_pages_stay_within_their_budget():
    assert sum(len(page.read_bytes()) for page in PAGES if (ROOT / "docs") in page.parents) <= 230_000


def test_habits_of_translated_english_stay_below_a_tenth_of_what_they_were():
    counts = english.counted(ROOT)  # 640 on pages, 1,900 in the package and 186 in scripts and examples at 5b1d9cb5
    most = {"pages": 64, "package": 190, "scripts": 60}
    assert {kind for kind in most if counts[kind].total() > most[kind]} == set()
