"""The launcher: what it prints, how it ends, and that no child outlives its parent."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.forked import COLD_PYTHON

from salesrl_trl.demo.services import launcher
from salesrl_trl.demo.services.__main__ import main
from salesrl_trl.demo.services.launcher import EmbeddedServices, ServiceAddresses
from salesrl_trl.errors import ServiceUnavailable
from salesrl_trl.ground import process

COMMAND = [sys.executable, "-m", "salesrl_trl.demo.services", "--rag-port=0", "--judge-port=0"]
WAIT_S = 15
"""Patience with a child, in seconds; its start takes about one."""


@pytest.fixture
def options(tmp_path):
    documents = tmp_path / "knowledge.jsonl"
    documents.write_text('{"id": "1", "text": "The course costs 3800 yuan."}', "utf-8")
    return [f"--documents={documents}"]


@pytest.fixture
def child(options):
    command = [*COMMAND, *options, "--exit-with-parent"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        yield child
        child.kill()


def read_addresses(child):
    return ServiceAddresses(**json.loads(child.stdout.readline()))


def port_of(addresses):
    return int(addresses.rag_base_url.rpartition(":")[2])


def refuses(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) != 0


def children():
    """Ids of this process's children, those that ended unnoticed among them."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


def test_services_start_once_stop_twice_start_again_and_leave_no_child(options):
    before = children()
    services = EmbeddedServices(arguments=options)
    addresses = services.start()
    assert services.start() == addresses
    assert not refuses(port_of(addresses))
    services.stop()
    services.stop()
    assert refuses(port_of(addresses))
    with services as addresses:
        assert not refuses(port_of(addresses))
    assert refuses(port_of(addresses))
    assert children() == before


def test_child_that_does_not_stop_is_killed(options, monkeypatch):
    monkeypatch.setattr(launcher, "TERMINATE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(sys, "executable", COLD_PYTHON)
    before = set(children().split())
    services = EmbeddedServices(arguments=options)
    port = port_of(services.start())
    (child,) = set(children().split()) - before
    os.kill(int(child), signal.SIGSTOP)  # deaf to SIGTERM, and to its closed stdin
    services.stop()
    assert set(children().split()) == before
    assert refuses(port)


def test_child_that_dies_is_an_error_with_its_last_words(tmp_path):
    services = EmbeddedServices(documents=tmp_path / "none.jsonl")
    said = r"exited, or did not listen.*Exit code 2.*cannot read the knowledge"
    with pytest.raises(ServiceUnavailable, match=said):
        services.start()


def test_signal_is_a_clean_stop_also_with_a_connection_open(child):
    with socket.create_connection(("127.0.0.1", port_of(read_addresses(child)))) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=WAIT_S)
    assert (child.returncode, out, err) == (0, b"", b"")


def test_killed_parent_takes_the_services_along_though_stdin_stays_open(options):
    # Another process may have inherited the writing end of stdin. Here the test itself holds it.
    script = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    command = [COLD_PYTHON, "-c", script, COLD_PYTHON, *COMMAND[1:], *options, "--exit-with-parent"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        port = port_of(read_addresses(parent))
        parent.kill()
        assert select.select([parent.stdout], [], [], WAIT_S)[0], "the services still run"
        assert parent.stdout.read() == b""  # the child held the writing end until it ended
        assert refuses(port)


def test_port_in_use_says_what_to_do(options, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([*options, f"--rag-port={port}", "--judge-port=0"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        f"error: cannot listen on 127.0.0.1 port {port} (Address already in use); "
        "choose another with --host, --rag-port or --judge-port (0 selects a free port)\n"
    )


def test_jax_that_bm25s_imports_in_the_services_sees_no_accelerator(tmp_path, options, monkeypatch):
    # A stand-in for JAX: what it sees is known when bm25s asks it for its first sorting, at import.
    seen = tmp_path / "seen.json"
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax/__init__.py").touch()
    (tmp_path / "jax/lax.py").write_text(
        "import json, os, pathlib\n"
        f"def top_k(*_): pathlib.Path({str(seen)!r}).write_text(json.dumps(dict(os.environ)))\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    command = [COLD_PYTHON, *COMMAND[1:], *options, "--exit-with-parent"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        read_addresses(child)
        environment = json.loads(seen.read_text())
        child.communicate(timeout=WAIT_S)
    assert {name: environment.get(name) for name in process.NO_ACCELERATOR} == process.NO_ACCELERATOR
