"""Fixtures for all tests."""

import tempfile
from pathlib import Path

import filelock
import pytest
import torch
from hypothesis import HealthCheck, settings
from pytest_httpserver import HTTPServer
from support.seconds import TookTooLong

WARM_START_STEPS = 40
"""Enough for some valid actions."""

# What an example takes says how busy the machine is.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def make_httpserver(httpserver_listen_address):
    """pytest-httpserver's server, answering requests beside each other as real services do."""
    host, port = httpserver_listen_address
    with HTTPServer(host=host or "127.0.0.1", port=port or 0, threaded=True) as server:
        yield server


@pytest.fixture(scope="session")
def policy_path(request):
    """A warm-started small policy, made once and kept in pytest's cache until what decides it changes."""
    from salesrl_trl.demo import policy

    folder = request.config.cache.mkdir("policies")
    path = folder / policy._policy_folder(WARM_START_STEPS, 0).name
    with filelock.FileLock(f"{path}.lock"):  # for all processes of a test run
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=folder) as made:
                policy.make_policy(Path(made) / "policy", WARM_START_STEPS, seed=0)
                (Path(made) / "policy").rename(path)  # whole, or not there
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A policy of random weights, as small as can be."""
    from support.keyed import make_tiny_policy

    return make_tiny_policy(tmp_path_factory.mktemp("tiny") / "policy")


@pytest.fixture(scope="module")
def one_thread():
    """Threads cost more than they bring on tensors this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.flaky(reruns=2, only_rerun=[TookTooLong.__name__]))
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
