"""The names at the door: each is there, and asking for one brings no other."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from support.forked import COLD_PYTHON

import salesrl_trl

LEAST_OF = 5
ALLOWED_S = 0.05


def in_a_new_interpreter(code):
    done = subprocess.run([COLD_PYTHON, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", salesrl_trl._MODULES)
def test_a_name_is_that_of_its_module(name):
    value = getattr(salesrl_trl, name)
    assert value is getattr(import_module(f"salesrl_trl.{salesrl_trl._MODULES[name]}"), name)
    # `contextmanager` keeps the name and module of what it wraps, too
    assert (value.__name__, value.__module__) == (name, f"salesrl_trl.{salesrl_trl._MODULES[name]}")


def test_type_checkers_see_the_same_names_from_the_same_modules():
    tree = ast.parse(Path(salesrl_trl.__file__).read_text("utf-8"))
    imports = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "salesrl_trl" in str(node.module)
    ]
    seen = {alias.asname: (alias.name, node.module) for node in imports for alias in node.names}
    assert seen == {name: (name, f"salesrl_trl.{module}") for name, module in salesrl_trl._MODULES.items()}


def test_the_names_are_listed_and_another_one_is_refused():
    assert set(salesrl_trl.__all__) <= set(dir(salesrl_trl))
    assert len(salesrl_trl.__all__) == len(set(salesrl_trl.__all__))
    with pytest.raises(AttributeError, match="module 'salesrl_trl' has no attribute 'Nonsense'"):
        salesrl_trl.Nonsense  # noqa: B018


def test_the_package_alone_brings_no_other_package_and_costs_milliseconds():
    code = """
import sys, time
before, start = set(sys.modules), time.process_time()
import salesrl_trl
print(time.process_time() - start, *sorted({name.split(".")[0] for name in set(sys.modules) - before}))
"""
    runs = [in_a_new_interpreter(code).split() for _ in range(LEAST_OF)]
    brought = set(runs[0][1:]) - sys.stdlib_module_names
    assert brought == {"salesrl_trl"}
    # CPU seconds, so that a busy machine does not count: about 0.005, and the least of a few runs
    assert min(float(seconds) for seconds, *_ in runs) <= ALLOWED_S


def test_names_that_need_no_torch_bring_none():
    names = "SalesReward, RewardConfig, Transport, Judge, TimingContext, ServiceError, load_rows, open_reward"
    code = f"import sys; from salesrl_trl import {names}; print(sorted({{'torch', 'trl'}} & set(sys.modules)))"
    assert in_a_new_interpreter(code).strip() == "[]"
