"""Completions under way between two generations of one engine."""

from concurrent.futures import CancelledError
from types import SimpleNamespace

import pytest

from salesrl_trl.generation.partial import PartialEngine


class Engine:
    """Like vLLM's: each request takes the steps that its prompt says."""

    def __init__(self):
        self.left, self.salts, self.count, self.is_broken = {}, {}, 0, False

    def add_request(self, request_id, prompt, params):
        self.left[request_id], self.salts[request_id] = prompt["steps"], prompt["cache_salt"]
        return f"{request_id}-inside"

    def step(self):
        if self.is_broken:
            raise InterruptedError
        outputs = []
        for request_id in [*self.left]:
            self.left[request_id] -= 1
            is_over = not self.left[request_id]
            outputs.append(
                SimpleNamespace(
                    request_id=request_id, finished=is_over, outputs=[SimpleNamespace(token_ids=[int(request_id)])]
                )
            )
            if is_over:
                del self.left[request_id]
        return outputs

    def abort_request(self, request_ids):
        for request_id in request_ids:
            del self.left[request_id]


@pytest.fixture
def llm():
    engine = Engine()

    def enqueue(prompts, sampling_params, use_tqdm):
        for prompt in prompts:
            engine.add_request(str(engine.count), prompt, sampling_params)
            engine.count += 1

    return SimpleNamespace(llm_engine=engine, enqueue=enqueue, reset_prefix_cache=lambda: "reset")


def begin(partial, *steps):
    """A batch of completions that take so many steps, and the places of those that are finished, as they come."""
    places = []
    requests = partial.begin([{"steps": each} for each in steps], "params", lambda place, ids: places.append(place))
    return requests, places


def test_a_batch_is_left_when_few_are_unfinished_and_finished_beside_the_next(llm):
    partial = PartialEngine(llm, 2)
    first, told = begin(partial, 9, 1, 2, 8)
    assert told == [1, 2] and llm.llm_engine.left == {"0": 7, "3": 6}
    second, told_second = begin(partial, 1, 3, 5, 7)  # two in all may be left
    assert told == [1, 2, 3] and told_second == [0, 1, 2] and set(llm.llm_engine.left) == {"0", "7"}
    assert [output.outputs[0].token_ids for output in first.result()] == [[0], [1], [2], [3]]
    assert second.result()[3].request_id == "7" and told_second == [0, 1, 2, 3]


def test_requests_of_others_are_answered_and_finish_these_too(llm):
    partial, engine = PartialEngine(llm, 1), llm.llm_engine
    requests, told = begin(partial, 1, 3)
    engine.add_request("90", {"steps": 4}, "params")
    outputs = [output for _ in range(4) for output in engine.step()]
    assert {output.request_id for output in outputs} == {"90"} and told == [0, 1]
    assert len(requests.result()) == 2


def test_prefixes_are_cached_between_two_pushes_and_the_cache_is_emptied_where_nothing_is_under_way(llm):
    partial = PartialEngine(llm, 1)
    with partial.pushing():
        assert llm.reset_prefix_cache() == "reset"
    begin(partial, 1, 3)
    with partial.pushing():
        assert llm.reset_prefix_cache() is False
    begin(partial, 1, 1)
    assert llm.reset_prefix_cache() == "reset"
    assert llm.llm_engine.salts == {"0": "1", "1": "1", "2": "2", "3": "2"}


def test_a_small_batch_does_not_wait_for_what_a_large_one_has_left(llm):
    partial = PartialEngine(llm, 2)
    begin(partial, 1, 9, 1, 9)
    small, _ = begin(partial, 2, 1)
    assert small.result()[0].request_id == "4" and set(llm.llm_engine.left) == {"1", "3"}


def test_a_batch_that_is_given_up_or_interrupted_leaves_the_engine_to_the_others(llm):
    partial, engine = PartialEngine(llm, 2), llm.llm_engine
    kept, _ = begin(partial, 1, 6)
    dropped, told = begin(partial, 1, 1, 1, 9)
    dropped.give_up()
    with pytest.raises(CancelledError):
        dropped.result()
    engine.is_broken = True
    with pytest.raises(InterruptedError):
        begin(partial, 1, 4)
    engine.is_broken = False
    assert set(engine.left) == {"1"} and told == [0, 1, 2]
    assert [output.request_id for output in kept.result()] == ["0", "1"]


def test_what_an_engine_that_is_gone_has_left_is_given_up_without_another_error(llm):
    requests, _ = begin(PartialEngine(llm, 2), 1, 6)
    llm.llm_engine.abort_request = lambda ids: ids[len(ids)]  # raises
    requests.give_up()
    with pytest.raises(CancelledError):
        requests.result()
