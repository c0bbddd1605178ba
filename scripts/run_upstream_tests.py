#!/usr/bin/env python3
"""Runs TRL's own tests of its GRPO trainer against this package's class, and reports what differs.

    python scripts/run_upstream_tests.py --trl CHECKOUT_OF_TRL --work FOLDER [-k EXPRESSION]

The file `tests/test_grpo_trainer.py` of the checkout runs three times with the TRL that is installed:

- stock: as it is;
- one name: `GRPOTrainer` is `SalesGRPOTrainer`;
- two names: `GRPOConfig` is `SalesGRPOConfig` too.

Models and datasets are stand-ins (`upstream_stand_ins`), so that no hub is needed. Nothing of the checkout is changed.
It takes up to 20 minutes on 2 cores. `--claim` writes the counts into benchmarks/log/README.md: nobody else does.

Exit code: 0 all that passes on stock passes with both, but for what is meant to differ; 1 something else does not; 2
wrong usage.
"""

import argparse
import functools
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from upstream_stand_ins import END_OF_MESSAGE, build

WAYS = {"stock": (), "one name": ("GRPOTrainer",), "two names": ("GRPOTrainer", "GRPOConfig")}
FILE = "test_grpo_trainer.py"
NAMES, RESULTS, HUBS = "UPSTREAM_TESTS_NAMES", "UPSTREAM_TESTS_RESULTS", "UPSTREAM_TESTS_HUBS"
PASSED = "passed"
_BARE = "TestGRPORolloutDispatch::test_generate_rollout_func_raises_when_required_keys_are_missing"
MEANT = {
    ("two names", "TestGRPOTrainer::test_warning_raised_all_rewards_none"),
    ("one name", "TestGRPOTrainer::test_prepare_input_called_with_correct_data"),
    ("one name", _BARE),
    ("two names", _BARE),
}
"""What passes on stock and is meant to fail here; benchmarks/log/README.md has the log with the reasons."""
CLAIM, CLAIMS = "| TRL's own tests pass |", Path(__file__).resolve().parents[1] / "benchmarks/log/README.md"
_losses: list[float] = []


def pytest_configure() -> None:
    """Inside pytest: note the losses of trainings. Tests of an older TRL ask for packages that the installed one no
    longer asks for."""
    from transformers import Trainer
    from transformers.trainer_utils import TrainOutput
    from trl import import_utils

    def asks_for(name: str) -> Callable[[], bool]:
        found = re.fullmatch(r"is_(\w+)_available", name)
        if found is None:
            raise AttributeError(name)
        return lambda: find_spec(found[1]) is not None

    import_utils.__getattr__ = asks_for
    train = Trainer.train

    @functools.wraps(train)
    def noted(self: Trainer, *args: Any, **kwargs: Any) -> TrainOutput:
        output = train(self, *args, **kwargs)
        _losses.append(output.training_loss)
        return output

    Trainer.train = noted


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Inside pytest: put this package's names in the place of TRL's."""
    from salesrl_trl import SalesGRPOConfig, SalesGRPOTrainer

    ours = {"GRPOTrainer": SalesGRPOTrainer, "GRPOConfig": SalesGRPOConfig}
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        for name in json.loads(os.environ[NAMES]):
            setattr(module, name, ours[name])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Inside pytest: the stand-ins that the test can do with."""
    asks_for_ids = isinstance(item, pytest.Function) and str(END_OF_MESSAGE) in inspect.getsource(item.function)
    os.chdir(Path(os.environ[HUBS]) / ("of_qwen" if asks_for_ids else "small"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Inside pytest: record a test's outcome."""
    if report.when != "call" and report.outcome == PASSED:
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    why = crash.message if crash is not None else str(report.longrepr or "")
    line = {"test": report.nodeid.split("::", 1)[1], "outcome": report.outcome, "why": why, "losses": str(_losses)}
    _losses.clear()
    with open(os.environ[RESULTS], "a") as file:
        file.write(json.dumps(line) + "\n")


def _outcomes(way: str, work: Path, expression: str) -> dict[str, dict[str, str]]:
    """Each test's outcome."""
    results = work / f"{way.replace(' ', '_')}.jsonl"
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", "-p", "run_upstream_tests"]
    command += ["-p", "no:cacheprovider", "-c", str(work / "pytest.ini"), "-k", expression, str(work / "tests" / FILE)]
    here = Path(__file__).resolve().parent
    environment = os.environ | {
        NAMES: json.dumps(WAYS[way]),
        RESULTS: str(results),
        HUBS: str(work / "hubs"),
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)]),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
        "MALLOC_MMAP_MAX_": "0",  # logits of a large vocabulary come and go: their memory is kept
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
    }
    with open(work / f"{way.replace(' ', '_')}.log", "w") as log:
        subprocess.run(command, cwd=work, env=environment, stdout=log, stderr=subprocess.STDOUT)
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    return {line["test"]: line for line in lines}


def _prepare(checkout: Path, work: Path) -> None:
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(checkout / "tests", work / "tests")
    (work / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    low_priority\n    invariant\n")
    build(work / "hubs" / "small", checkout, with_ids_of_qwen=False)
    build(work / "hubs" / "of_qwen", checkout, with_ids_of_qwen=True)


def report(found: Mapping[str, Mapping[str, Mapping[str, str]]]) -> int:
    """Print the outcome of each way.

    Args:
        found (`Mapping`):
            By way and by test: its `outcome`, and `why`.

    Returns:
        `int`: the number of tests that pass on stock and not everywhere, without those that are meant to.
    """
    passing = [test for test, line in found["stock"].items() if line["outcome"] == PASSED]
    for way, lines in found.items():
        counts = Counter(line["outcome"] for line in lines.values())
        here = [test for test in passing if lines.get(test, {}).get("outcome") == PASSED]
        trained = [test for test in here if found["stock"][test]["losses"] != "[]"]
        same = sum(lines[test]["losses"] == found["stock"][test]["losses"] for test in trained)
        print(f"{way:10} {counts[PASSED]:4} pass, {counts['failed']} fail, {counts['skipped']} are skipped. Of the "
              f"{len(passing)} that pass on stock: {len(here)}. {len(trained)} of these train: {same} to stock's very "
              "loss")  # fmt: skip
    differing = {
        (way, test): lines.get(test, {}).get("why", "did not run")
        for way, lines in found.items()
        for test in passing
        if lines.get(test, {}).get("outcome") != PASSED
    }
    for (way, test), why in differing.items():
        meant = ", as it is meant to" if (way, test) in MEANT else ""
        print(f"differs with {way}{meant}: {test}\n    {why.splitlines()[0] if why else ''}")
    for test, line in found["stock"].items():
        if line["outcome"] != PASSED:
            print(f"left out, {line['outcome']} on stock: {test}\n    {line['why'].splitlines()[0][:150]}")
    return len(differing.keys() - MEANT)


def claim_of(found: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    """The words of benchmarks/log/README.md for these outcomes."""
    passing = [test for test, line in found["stock"].items() if line["outcome"] == PASSED]
    one, two = (
        sum(found[way].get(test, {}).get("outcome") == PASSED for test in passing) for way in ("one name", "two names")
    )
    return f"{one} of the {len(passing)} that pass on stock, with one name changed; {two} with two"


def main() -> int:
    """Run as a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, required=True, help="a checkout of TRL, with its tests")
    parser.add_argument("--work", type=Path, required=True, help="a folder for stand-ins and results; made anew")
    parser.add_argument("-k", default="", help="which tests, as in pytest")
    parser.add_argument(
        "--claim", action="store_true", help="write the counts of all tests into benchmarks/log/README.md"
    )
    given = parser.parse_args()
    if not (given.trl / "tests" / FILE).exists():
        parser.error(f"{given.trl} has no tests/{FILE}")
    if given.claim and given.k:
        parser.error("--claim is of all tests, without -k")
    _prepare(given.trl.resolve(), given.work.resolve())
    found = {way: _outcomes(way, given.work.resolve(), given.k) for way in WAYS}
    if given.claim:
        old = re.compile(rf"^{re.escape(CLAIM)} [^|]*", re.MULTILINE)
        CLAIMS.write_text(old.sub(f"{CLAIM} {claim_of(found)} ", CLAIMS.read_text(encoding="utf-8")), encoding="utf-8")
    return bool(report(found))


if __name__ == "__main__":
    sys.exit(main())
