"""Fixtures for all tests."""

import asyncio
import atexit
import gc
import inspect
import logging
import os
import signal
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from pytest_httpserver import HTTPServer
from support import apart, forked, virtual_time
from support.loopback import Services
from support.seconds import TookTooLong

from salesrl_trl.launch.kept import remember_packages

LONG_FILES = (
    "test_launch.py", "test_vllm_server.py", "test_ranks.py", "test_exact_mode.py", "test_readme.py",
    "test_lookahead.py", "test_resume.py", "test_chain_faults.py", "test_bench_runs.py", "test_time_of_a_run.py",
    "test_kl_exactness.py", "test_rollouts_in_flight.py", "test_trainer.py", "test_failed_completions.py",
    "test_flops.py", "test_sigterm.py", "test_two_ranks.py", "test_examples.py",
)  # fmt: skip
"""They run first, so that no worker is still busy with one of them when the others are done."""

apart.begin()

# Until tests are collected: imported objects stay alive, and a collection over them takes seconds.
gc.disable()
remember_packages()

# Without a handler, werkzeug creates one if a request arrives between two phases of a test. That one would keep the
# stderr of that moment, and fail in a later test.
logging.getLogger("werkzeug").addHandler(logging.NullHandler())

# The duration of an example depends on the machine's load.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def make_httpserver(httpserver_listen_address):
    """pytest-httpserver's server, answering requests concurrently as real services do."""
    host, port = httpserver_listen_address
    with HTTPServer(host=host or "127.0.0.1", port=port or 0, threaded=True) as server:
        yield server


@pytest.fixture
def services(httpserver):
    """A RAG service and a judge on loopback, with answers set by the test."""
    return Services(httpserver)


@pytest.fixture(scope="session", autouse=True)
def _elsewhere(tmp_path_factory):
    os.chdir(tmp_path_factory.mktemp("elsewhere"))


@pytest.fixture(autouse=True)
def _process_as_it_was():
    """Restores log levels and environment variables, which a run sets for its whole process."""
    loggers = [logging.getLogger(name) for name in (None, "salesrl_trl", "salesrl_trl.demo")]
    levels, environment = [each.level for each in loggers], dict(os.environ)
    yield
    for each, level in zip(loggers, levels, strict=True):
        each.setLevel(level)
    if os.environ != environment:
        os.environ.clear()
        os.environ.update(environment)
    apart.check()


@pytest.fixture(scope="session")
def policy_path():
    """A policy that writes valid actions."""
    from salesrl_trl.demo.packaged import PACKAGED

    return PACKAGED


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A minimal policy with random weights."""
    from support.keyed import make_tiny_policy

    return make_tiny_policy(tmp_path_factory.mktemp("tiny") / "policy")


@pytest.fixture(scope="module")
def one_thread():
    """On tensors this small, threads cost more time than they save."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test that is a coroutine runs in virtual time, unless it uses `real_time`."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    run = asyncio.run if "real_time" in pyfuncitem.fixturenames else virtual_time.play
    run(pyfuncitem.obj(**given))
    return True


@pytest.fixture
def real_time():
    """For coroutines with threads, files and sockets, for which virtual time does not wait."""


def pytest_addoption(parser):
    parser.addoption("--durations-by-file", action="store_true", help="show the seconds of each file of tests")


def pytest_terminal_summary(terminalreporter, config):
    if not config.getoption("durations_by_file"):
        return
    seconds = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):  # warnings have none
                seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section("seconds by file")
    for name, taken in seconds.most_common():
        terminalreporter.write_line(f"{taken:7.1f}  {name}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs):
    """Workers are forked from one process that has imported everything. A GPU's driver may not survive a fork."""
    if not forked.HAS_GPU:
        for spec in specs:
            spec.python = forked.python()


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONG_FILES.index(item.path.name) if item.path.name in LONG_FILES else len(LONG_FILES))
    for item in items:
        item.add_marker(pytest.mark.flaky(reruns=2, only_rerun=[TookTooLong.__name__]))
    for item in items:
        if "gpu" in item.keywords and not forked.HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_collection_finish():
    """Hide imported modules from the garbage collector: each training collects, which takes 0.4 s longer with them."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config):
    gc.collect()
    gc.freeze()  # pytest collects ten times more
    atexit.register(gc.unfreeze)  # some modules warn at exit about objects that still exist
    apart.end()


@pytest.fixture
def heeds_signals():
    """Children of a test react to SIGHUP and SIGINT, even if tests run under `nohup` or in the background."""
    before = {each: signal.getsignal(each) for each in (signal.SIGHUP, signal.SIGINT)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if before[signal.SIGINT] is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for each, handler in before.items():
        signal.signal(each, handler)
