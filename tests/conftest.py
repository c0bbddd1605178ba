"""Fixtures for all tests."""

import pytest
import torch
from pytest_httpserver import HTTPServer


@pytest.fixture(scope="session")
def make_httpserver(httpserver_listen_address):
    """pytest-httpserver's server, answering requests beside each other as real services do."""
    host, port = httpserver_listen_address
    with HTTPServer(host=host or "127.0.0.1", port=port or 0, threaded=True) as server:
        yield server


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
