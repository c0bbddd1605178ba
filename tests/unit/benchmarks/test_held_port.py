"""The port of a server that benches and tests start."""

import socket

import pytest
import torch

from benchmarks.vllm_server import held_port


def test_a_held_port_is_free_for_the_server_that_is_told_its_number_and_for_no_other_program():
    with held_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="already in use"):
            other.bind(("127.0.0.1", port))
        with pytest.raises(ConnectionRefusedError):  # until the server listens
            socket.create_connection(("127.0.0.1", port))
        store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True)
        with socket.create_connection(("127.0.0.1", store.port)):
            pass
