"""Completions that a server is asked for one by one."""

import queue
import resource
import threading
import time
from concurrent.futures import CancelledError

import pytest
from support.seconds import check_seconds

from salesrl_trl.generation.requests import Requests
from salesrl_trl.ground.process import allow_files


def completion(place):
    """What TRL's client returns of one completion."""
    return {"prompt_ids": [[place]], "completion_ids": [[place, 7]], "logprobs": [[[-0.5]]], "logprob_token_ids": None}


def test_completions_are_told_of_as_they_are_ready_and_returned_in_their_order():
    gates, told = [threading.Event() for _ in range(4)], queue.SimpleQueue()

    def ask(place):
        assert gates[place].wait(10)
        return completion(place)

    requests = Requests(ask, 4, lambda *finished: told.put(finished), threading.Semaphore(4))
    for place in (2, 0, 3, 1):
        gates[place].set()
        assert told.get(timeout=10) == (place, [place, 7])
    assert requests.result() == {
        "prompt_ids": [[0], [1], [2], [3]],
        "completion_ids": [[0, 7], [1, 7], [2, 7], [3, 7]],
        "logprobs": [[[-0.5]]] * 4,
        "logprob_token_ids": None,
    }
    assert requests.started < requests.ended <= time.perf_counter()
    requests.join()
    assert told.empty()


@pytest.mark.parametrize("ends", ["by an error", "by an error of who is told", "by giving up"])
def test_nobody_waits_for_the_others_where_it_ends_early(ends):
    gate, begun = threading.Event(), []

    def ask(place):
        begun.append(place)
        if place == 1:
            if ends == "by an error":
                raise ValueError("the server said no")
            return completion(place)
        assert gate.wait(10)
        return completion(place)

    def finished(*_):
        if ends == "by an error of who is told":
            raise ValueError("nobody listens")

    requests = Requests(ask, 50, finished, threading.Semaphore(2))
    if ends == "by giving up":
        requests.give_up()
    started = time.monotonic()
    with pytest.raises(CancelledError if ends == "by giving up" else ValueError):
        requests.result()
    check_seconds(time.monotonic() - started, most=5)
    waits = threading.Thread(target=requests.join)
    waits.start()
    waits.join(0.2)
    assert waits.is_alive()  # for what is in flight
    gate.set()
    waits.join(10)
    assert not waits.is_alive()
    assert len(begun) <= 4  # what was not asked by then is not asked


def test_what_is_given_up_is_not_told_of():
    ready, gate, told = threading.Event(), threading.Event(), []

    def ask(place):
        assert (gate if place else ready).wait(10)
        return completion(place)

    def finished(place, _):
        told.append(place)
        requests.give_up()
        gate.set()

    requests = Requests(ask, 6, finished, threading.Semaphore(6))
    ready.set()
    with pytest.raises(CancelledError):
        requests.result()
    requests.join()
    assert told == [0]
    assert not requests.in_flight


@pytest.mark.parametrize(
    ("soft", "hard", "wanted"),
    [(1024, 4096, 2048), (1024, -1, 2048), (1024, 1500, 1500), (4096, 4096, None), (-1, -1, None), (2048, -1, None)],
)
def test_a_process_may_have_as_many_connections_as_the_machine_lets_it(monkeypatch, soft, hard, wanted):
    told = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: told.append((kind, limits)))
    allow_files(2048)
    assert told == ([] if wanted is None else [(resource.RLIMIT_NOFILE, (wanted, hard))])
