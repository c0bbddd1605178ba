"""`salesrl WORD` is `python -m MODULE`: the same text, arguments and exit code."""

import os
import re
import subprocess
import sys
from pathlib import Path

from support.forked import COLD_PYTHON, python

import salesrl_trl
from salesrl_trl.__main__ import COMMANDS

QUICK_S = 60.0
HELP = """
import runpy, sys
modules, sys.argv = sys.argv[1:], ["", "--help"]
for module in modules:
    try:
        print("\\nOF", module)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        print("\\nENDS", end.code)
"""
SCRIPT = "import sys; from salesrl_trl.__main__ import main; sys.exit(main())"
PACKAGE = Path(salesrl_trl.__file__).parent
FILES = {word: PACKAGE.parent / module.replace(".", "/") for word, (module, _) in COMMANDS.items()}
THERE = [word for word, file in FILES.items() if file.with_suffix(".py").is_file() or (file / "__main__.py").is_file()]


def ended(*command, cwd=None):
    paths = {"PYTHONPATH": os.pathsep.join((str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")))}
    given = {"cwd": cwd, "env": os.environ | paths, "capture_output": True, "text": True, "timeout": QUICK_S}
    done = subprocess.run([COLD_PYTHON, *command], check=False, **given)
    return done.returncode, done.stdout, done.stderr


def salesrl(*arguments, cwd=None):
    return ended("-c", SCRIPT, *arguments, cwd=cwd)


def test_a_training_takes_the_recipe_that_is_named_first(tmp_path):
    train = [python(), "-m", COMMANDS["train"][0], "nowhere.yaml", "--max_steps", "1"]
    done = subprocess.run(train, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=QUICK_S)
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no recipe nowhere.yaml" in done.stderr


def test_the_process_becomes_the_command_s_and_finds_parts_in_the_working_folder(tmp_path):
    # A package of that name in the working folder is found first by `python -m`, and so it is by the word.
    mine = tmp_path / "salesrl_trl/launch"
    mine.mkdir(parents=True)
    for folder in (mine, mine.parent):
        (folder / "__init__.py").write_text("")
    (mine / "env.py").write_text("import os, sys; print(os.getpid(), *sys.argv[1:]); sys.exit(7)")
    code = f"import os; print(os.getpid(), flush=True); {SCRIPT}"
    exit_code, out, _ = ended("-P", "-c", code, "env", "--a", "b c", cwd=tmp_path)
    before, after = out.splitlines()
    assert (exit_code, after) == (7, f"{before} --a b c")


def test_help_lists_the_words_whose_modules_are_there():
    for given in (["--help"], []):
        code, out, err = salesrl(*given)
        assert (code, err) == (0, "")
        shown = re.findall(r"^  (\w+) .*\(python -m (\S+)\)$", out, flags=re.MULTILINE)
        assert shown == [(word, COMMANDS[word][0]) for word in THERE]
    assert {"train", "preflight", "report", "services", "env"} <= set(THERE)


def test_help_of_each_word_comes_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    modules = [module for module, _ in COMMANDS.values()]
    code, out, err = ended("-c", HELP, *modules, cwd=tmp_path)
    assert (code, err) == (0, "")
    assert re.findall(r"^OF (\S+)\nusage:", out, flags=re.MULTILINE) == modules
    assert re.findall(r"^ENDS (\S+)", out, flags=re.MULTILINE) == ["0"] * len(modules)


def test_a_word_without_its_module_is_not_offered():
    code = f"import salesrl_trl.__main__ as it; it.COMMANDS['absent'] = ('salesrl_trl.absent', ''); {SCRIPT}"
    assert "absent" not in ended("-c", code, "--help")[1]
    assert ended("-c", code, "absent")[0] == 2


def test_an_unknown_word_is_refused_with_the_nearest_one():
    told = f"salesrl: unknown command 'trian'. Did you mean 'train'? Expected one of: {', '.join(THERE)}.\n"
    assert salesrl("trian") == (2, "", told)
    code, out, err = salesrl("xyz")
    assert (code, out, "Did you mean" in err) == (2, "", False)


def test_the_command_brings_nothing_but_the_standard_library(monkeypatch):
    monkeypatch.setattr(sys, "executable", COLD_PYTHON)
    here = "print(*{name.split('.')[0] for name in sys.modules})"
    bare, ours = (set(ended("-c", f"import sys{more}; {here}")[1].split()) for more in ("", ", salesrl_trl.__main__"))
    assert ours - bare - sys.stdlib_module_names == {"salesrl_trl"}
