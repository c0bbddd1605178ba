"""Engine options, and reports of single completions. The engine itself is in tests/integration."""

import os
import queue
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import trl.generation.vllm_generation as upstream_vllm
import trl.trainer.grpo_trainer as upstream_trainer
from transformers import ProcessorMixin

from salesrl_trl.errors import ConfigError
from salesrl_trl.generation import vllm
from salesrl_trl.generation.conversations import NO_TURN, AskedTurns, Conversations
from salesrl_trl.generation.vllm import SalesVLLMGeneration, vllm_engine_options


def bare(**members):
    """A generation without an engine."""
    generation = SalesVLLMGeneration.__new__(SalesVLLMGeneration)
    vars(generation).update(members)
    return generation


def test_trl_is_left_as_it_was_even_when_the_trainer_fails_to_build():
    stock = upstream_trainer.VLLMGeneration
    with pytest.raises(RuntimeError), vllm_engine_options(lambda: {"seed": 1}):
        assert upstream_trainer.VLLMGeneration is not stock
        raise RuntimeError
    assert upstream_trainer.VLLMGeneration is stock


@pytest.mark.parametrize("port", ["", "0", "12321"], ids=["none named", "any", "named"])
def test_the_engine_is_built_with_trls_arguments_and_ours_on_top(monkeypatch, port):
    seen = {}

    def engine(**kwargs):
        seen.update(kwargs)
        raise InterruptedError  # all that follows needs a model

    monkeypatch.setattr(upstream_vllm, "LLM", engine)
    generation = bare(
        engine_options={"enforce_eager": True, "seed": 5},
        mode="colocate", tensor_parallel_size=1, gpu_memory_utilization=0.5, max_model_length=64, max_num_seqs=4,
        enable_sleep_mode=True, model_impl="auto", trust_remote_code=False,
        model=SimpleNamespace(name_or_path="some/model"),
        accelerator=SimpleNamespace(
            num_processes=1, process_index=0, local_process_index=0, device=torch.device("cpu")
        ),
    )  # fmt: skip
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(InterruptedError):
        generation._init_vllm()
    assert upstream_vllm.LLM is engine
    assert (seen["model"], seen["max_num_seqs"], seen["logprobs_mode"]) == ("some/model", 4, "processed_logprobs")
    assert (seen["enforce_eager"], seen["seed"]) == (True, 5)
    assert not seen["enable_sleep_mode"]  # vLLM refuses it on a CPU
    # TRL would take 29500 while it is free, as every run that starts in the same moment
    assert (
        os.environ["MASTER_PORT"] == port if port == "12321" else os.environ["MASTER_PORT"] not in ("29500", "0", "")
    )


class Engine:
    """Takes a step for each list in `finishes` and finishes the requests at these places in it."""

    def __init__(self, finishes):
        self.asked = []
        self._finishes = list(finishes)
        self._open = {}

    def add_request(self, request_id, prompt, params, *, priority=0):
        self._open[len(self.asked)] = request_id
        self.asked.append((request_id, prompt, params, priority))
        return f"{request_id}-inside"

    def step(self):
        """The output of every open request so far. Its first token is its place."""
        now = self._finishes.pop(0)
        outputs = [
            SimpleNamespace(
                request_id=each, finished=place in now, outputs=[SimpleNamespace(token_ids=[place, 7], logprobs=None)]
            )
            for place, each in self._open.items()
        ]
        for place in now:
            del self._open[place]
        return outputs

    def abort_request(self, request_ids):
        self._open = {place: each for place, each in self._open.items() if each not in request_ids}

    def has_unfinished_requests(self):
        return bool(self._open)


def generation_on(engine, ranks=1):
    llm = SimpleNamespace(llm_engine=engine)
    return bare(llm=llm, mode="colocate", tensor_parallel_size=ranks, tp_group="the group")


def generate(engine, count, first_id=0):
    """As `LLM.generate` does; returns what it was given at each step."""
    added = [engine.add_request(str(first_id + index), f"p{index}", "params", priority=1) for index in range(count)]
    assert added == [f"{first_id + index}-inside" for index in range(count)]
    steps = []
    while engine.has_unfinished_requests():
        steps.append([output.request_id for output in engine.step() if output.finished])
    return steps


def test_a_completion_is_told_of_in_the_step_that_finishes_it():
    engine, told = Engine([[], [2], [0, 1]]), []
    step = engine.step
    engine.step = lambda: [told.append("step"), *step()][1:]
    with generation_on(engine).streamed(lambda *finished: told.append(finished), 3):
        steps = generate(engine, 3, first_id=40)  # ids go on from batch to batch
    assert told == ["step", "step", (2, [2, 7]), "step", (0, [0, 7]), (1, [1, 7])]
    assert steps == [[], ["42"], ["40", "41"]]  # the engine's caller sees what it would have seen
    assert engine.asked == [(str(40 + index), f"p{index}", "params", 1) for index in range(3)]


@pytest.mark.parametrize(("rank", "places"), [(0, {0: 0, 1: 1}), (1, {2: 0, 3: 1}), (2, {4: 0, 5: 1})])
def test_under_tensor_parallelism_a_process_is_told_of_its_own_completions_alone(monkeypatch, rank, places):
    groups = []
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: groups.append(group) or rank)
    engine, told = Engine([[5, 0, 3], [1, 2, 4]]), {}

    def finished(place, token_ids):
        assert place not in told
        told[place] = token_ids[0]

    with generation_on(engine, ranks=3).streamed(finished, 2):
        generate(engine, 6)
    assert told == {place: global_place for global_place, place in places.items()}
    assert groups == ["the group"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_engine_is_left_as_it_was_also_when_a_generation_fails(fails):
    engine, told = Engine([[0]]), []
    add_request, step = engine.add_request, engine.step
    try:
        with generation_on(engine).streamed(lambda *finished: told.append(finished), 1):
            assert engine.step != step
            if fails:
                engine.add_request("7", "p", "params")
                raise InterruptedError
    except InterruptedError:
        assert fails
    assert (engine.add_request, engine.step) == (add_request, step)
    assert not engine.has_unfinished_requests()  # or the next generation would be told of it too
    generate(engine, 0)
    assert told == []


def completion(place):
    """What TRL's client returns of one completion."""
    return {"prompt_ids": [[place]], "completion_ids": [[place, 7]], "logprobs": [[[-0.5]]], "logprob_token_ids": None}


class Client:
    """TRL's client of a server that answers when it is told to."""

    def __init__(self):
        self.asked, self.gate = [], threading.Event()

    def generate(self, prompts, **request):
        self.asked.append((prompts, request))
        assert self.gate.wait(10)
        [prompt] = prompts
        return {**completion(prompt[0]), "logprob_token_ids": [[[1]]]}


class Process:
    """An `Accelerator` of the second of two processes. What it waits for is in a list."""

    process_index, num_processes, is_main_process = 1, 2, False

    def __init__(self):
        self.device, self.events = torch.device("cpu"), []

    def wait_for_everyone(self):
        self.events.append("everyone")


@pytest.fixture
def served(monkeypatch):
    """The generation of the second process; nothing may be gathered."""
    for name in ("gather_object", "broadcast_object_list"):
        monkeypatch.setattr(upstream_vllm, name, None)
    monkeypatch.setattr(vllm, "MOST_REQUESTS", 8)
    return bare(
        mode="server", vllm_client=Client(), accelerator=Process(), _collect=None, _under_way=[],
        temperature=0.7, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0, max_completion_length=5, logprobs=0,
        generation_kwargs={"seed": 30}, structured_outputs_regex=None, _waits=True,
        _slots=threading.Semaphore(8),
    )  # fmt: skip


PROMPTS = [[10], [10], [20], [20], [20], [20]]
"""Of the second process, where a group of four begins in the first one."""


def test_all_rollouts_together_have_no_more_requests_in_flight_than_may_be(served):
    served._slots = threading.Semaphore(3)
    for _ in range(2):
        with served.begun(lambda *_: None):
            served.generate(PROMPTS, None, 4)
    client, end = served.vllm_client, time.monotonic() + 5
    while len(client.asked) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(client.asked) == 3
    client.gate.set()
    served.settle()
    assert len(client.asked) == 2 * len(PROMPTS)


def test_only_waiting_for_a_server_is_profiled(served):
    entered = []

    @contextmanager
    def profiler():
        entered.append("waits")
        yield

    served.vllm_client.gate.set()
    with served.begun(lambda *_: None) as begun:
        served.generate(PROMPTS, None, 4, profiler())
    assert entered == []
    with served.answered(begun[0]):
        served.generate(PROMPTS, None, 4, profiler())
    assert entered == ["waits"]


def test_each_process_asks_a_server_for_its_own_completions_as_samples_of_their_groups(served):
    told = {}
    served.vllm_client.gate.set()
    with served.streamed(told.__setitem__, len(PROMPTS)):
        output = served.generate(PROMPTS, None, 4)
    assert output == (PROMPTS, [[10, 7]] * 2 + [[20, 7]] * 4, [[[-0.5]]] * 6, [[[1]]] * 6)
    assert told == dict(enumerate(output[1]))
    asked = sorted(
        (prompts[0][0], request["generation_kwargs"]["seed"]) for prompts, request in served.vllm_client.asked
    )
    assert asked == [(10, 32), (10, 33), (20, 30), (20, 31), (20, 32), (20, 33)]
    for _, request in served.vllm_client.asked:
        assert (request["n"], request["temperature"], request["max_tokens"]) == (1, 0.7, 5)
        assert request["features"] is None
    assert served.generation_kwargs == {"seed": 30}
    assert served.accelerator.process_index == 1  # all is as it was
    with pytest.raises(TypeError):  # not streamed, TRL gathers
        served.generate(PROMPTS, None, 4)


def test_episodes_ask_a_server_for_all_their_turns_and_nothing_is_asked_before(served):
    def talk(place, first, ask):
        assert first == NO_TURN
        ids = [100 + place]
        for _ in range(2):
            own, logprobs = ask(place, ids)
            assert logprobs == [-0.5]
            ids = [*ids, *own]
        return ids

    served.vllm_client.gate.set()
    batch = Conversations(len(PROMPTS), talk, AskedTurns(), are_episodes=True)
    with served.conversing(batch, ahead=True):
        assert served.generate(PROMPTS, None, 4)[1] == []
    served.go_on(batch)
    assert batch.results() == [[100 + place, *[100 + place, 7] * 2] for place in range(len(PROMPTS))]
    asked = sorted((prompts[0], request["temperature"]) for prompts, request in served.vllm_client.asked)
    assert asked == sorted(
        (ids, 0.7) for place in range(100, 100 + len(PROMPTS)) for ids in ([place], [place, place, 7])
    )


def test_weights_wait_for_the_turns_that_are_out_and_no_turn_is_asked_for_meanwhile(served, monkeypatch):
    pushing, pushed, client = threading.Event(), threading.Event(), served.vllm_client

    def push(self):
        pushing.set()
        assert pushed.wait(10)

    monkeypatch.setattr(upstream_vllm.VLLMGeneration, "sync_weights", push)
    batch = Conversations(
        len(PROMPTS), lambda place, _, ask: [ask(place, [1]), ask(place, [2])], AskedTurns(), are_episodes=True
    )
    with served.conversing(batch, ahead=True):
        served.generate(PROMPTS, None, 4)
    thread = threading.Thread(target=served.sync_weights)
    thread.start()
    assert not pushing.wait(0.2)  # six first turns are out
    client.gate.set()
    assert pushing.wait(10)
    asked = len(client.asked)
    time.sleep(0.1)
    assert len(client.asked) == asked
    pushed.set()
    thread.join(10)
    served.go_on(batch)
    assert len(client.asked) == 2 * len(PROMPTS)


def test_turns_of_episodes_are_sampled_as_their_own_batch_is():
    class Params(str):
        clone = str.__str__

    class Answering(Engine):
        def step(self):
            self._finishes = [list(self._open)]
            return super().step()

    engine, later = Answering([]), threading.Event()
    add = engine.add_request
    llm = SimpleNamespace(llm_engine=engine, enqueue=lambda prompts, params, use_tqdm: engine.add_request(
        f"turn {len(engine.asked)}", prompts[0], params))  # fmt: skip
    generation = bare(
        llm=llm, mode="colocate", tensor_parallel_size=1, turns=AskedTurns(), enable_sleep_mode=False, _params=None
    )

    def begin(name, talk, ahead):
        batch = Conversations(1, talk, generation.turns, are_episodes=True)
        with generation.conversing(batch, ahead=ahead):
            engine.add_request(f"first of {name}", "prompt", Params(name))
            while engine.has_unfinished_requests():
                assert engine.step() == []  # of the engine's caller there is nothing
        return batch

    def training(place, first, ask):
        ask(place, [1])
        assert later.wait(10)
        return ask(place, [2])

    def greedy(place, first, ask):
        later.set()
        return ask(place, [3])

    batches = [begin("training", training, ahead=True), begin("greedy", greedy, ahead=False)]
    for batch in batches:
        generation.go_on(batch)
        assert len(batch.results()) == 1
    assert engine.add_request == add
    asked = {prompt["prompt_token_ids"][0]: str(params) for _, prompt, params, _ in engine.asked}
    assert asked == {1: "training", 2: "training", 3: "greedy"}


def test_what_a_server_is_asked_for_comes_later_and_weights_wait_for_it(served, monkeypatch):
    events, told = served.accelerator.events, queue.SimpleQueue()
    monkeypatch.setattr(upstream_vllm.VLLMGeneration, "sync_weights", lambda self: events.append("push"))
    batches = []
    for _ in range(2):
        with served.begun(lambda *finished: told.put(finished)) as begun:
            assert served.generate(PROMPTS, None, 4) == ([], [], [], [])
        batches += begun
    assert [each.lane for each in batches] == [0, 1]
    assert told.empty()
    push = threading.Thread(target=served.sync_weights)
    push.start()
    push.join(0.2)
    assert push.is_alive()
    assert events == []
    served.vllm_client.gate.set()
    push.join(10)
    assert events == ["everyone", "push", "everyone"]
    assert told.qsize() == 2 * len(PROMPTS)  # without anybody asking for what came
    for requests in batches:
        with served.answered(requests):
            assert served.generate(PROMPTS, None, 4)[1] == [[10, 7]] * 2 + [[20, 7]] * 4
    with served.begun(lambda *_: None) as begun:
        served.generate(PROMPTS, None, 4)
    assert begun[0].lane == 0


def test_a_server_s_errors_come_where_its_answers_would_and_not_with_the_push(served, monkeypatch):
    monkeypatch.setattr(upstream_vllm.VLLMGeneration, "sync_weights", lambda self: None)
    monkeypatch.setattr(served.vllm_client, "asked", None)
    with served.begun(lambda *_: None) as begun:
        served.generate(PROMPTS, None, 4)
    served.sync_weights()
    with served.answered(begun[0]), pytest.raises(AttributeError):
        served.generate(PROMPTS, None, 4)


class Seeing(ProcessorMixin):
    """A processor without parts."""

    image_token_id = 9

    def __init__(self):
        pass


def seeing_generation(monkeypatch, seen_as):
    """A colocated engine whose prompts become what `seen_as` makes of them."""
    asked = []

    def generate(self, prompts, images, num_generations, profiler=None):
        asked.append((prompts, images))
        return [seen_as(ids) for ids in prompts], [], [], []

    monkeypatch.setattr(upstream_vllm.VLLMGeneration, "generate", generate)
    return bare(mode="colocate", processing_class=Seeing(), _collect=None, generation_kwargs={}), asked


def test_vllm_gets_one_token_for_each_picture_and_puts_in_the_others(monkeypatch):
    prompts, images = [[1, 9, 9, 9, 2, 9, 9, 3], [4, 5]], [["a", "b"], None]
    expanded = {(1, 9, 2, 9, 3): prompts[0], (4, 5): prompts[1]}
    generation, asked = seeing_generation(monkeypatch, lambda ids: expanded.get(tuple(ids), ids))
    generation.generate(prompts, images, 2)
    assert asked == [([[1, 9, 2, 9, 3], [4, 5]], images)]
    generation.generate(prompts, None, 2)
    assert asked[1] == (prompts, None)  # a text is left as it is


def test_a_vllm_that_reads_a_picture_as_other_tokens_is_refused(monkeypatch):
    generation, _ = seeing_generation(monkeypatch, lambda ids: [1, 9, 9, 2])
    with pytest.raises(ConfigError, match="prompt 0 as 4 tokens with the text, and the trainer as 5"):
        generation.generate([[1, 9, 9, 9, 2]], [["a"]], 1)


@pytest.mark.parametrize(("given", "makes"), [({}, False), ({"detokenize": True}, True), ({"stop": ["."]}, None)])
def test_vllm_makes_no_texts_unless_it_looks_for_strings_in_them(monkeypatch, given, makes):
    seen = []
    monkeypatch.setattr(upstream_vllm.VLLMGeneration, "generate", lambda self, *_: seen.append(self.generation_kwargs))
    generation = bare(mode="colocate", _collect=None, generation_kwargs=given)
    generation.generate([[1]], None, 1)
    assert seen[0].get("detokenize") is makes
    assert generation.generation_kwargs is given


def test_with_new_weights_vllm_forgets_what_the_vision_tower_made_of_pictures(monkeypatch):
    monkeypatch.setattr(upstream_vllm.VLLMGeneration, "sync_weights", lambda self: None)
    dropped = []
    for processor in (Seeing(), object()):
        engine = SimpleNamespace(reset_encoder_cache=lambda processor=processor: dropped.append(processor))
        accelerator, llm = SimpleNamespace(device=torch.device("cuda")), SimpleNamespace(llm_engine=engine)
        seen = {"processing_class": processor, "engine_options": {}}
        bare(mode="colocate", accelerator=accelerator, llm=llm, **seen).sync_weights()
    assert [type(each) for each in dropped] == [Seeing]


def test_an_engine_that_quantises_is_woken_and_reads_all_weights_anew():
    done = []
    generation = bare(
        mode="colocate", engine_options={"quantization": "fp8_per_channel"}, enable_sleep_mode=True,
        accelerator=SimpleNamespace(device=torch.device("cuda")),
        _iter_named_params=lambda: iter([("a", 1), ("b", 2)]),
    )  # fmt: skip
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(model=torch.nn.Module()),
        reload_weights=lambda weights_iterator: done.append(list(weights_iterator)),
    )
    executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))
    generation.llm = SimpleNamespace(
        llm_engine=SimpleNamespace(model_executor=executor), wake_up=lambda tags: done.append(tags),
        reset_prefix_cache=lambda: done.append("cache"),
    )  # fmt: skip
    generation.sync_weights()
    assert done == [["weights"], [("a", 1), ("b", 2)], "cache"]
    assert not generation._llm_weights_sleeping
