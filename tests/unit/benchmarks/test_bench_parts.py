"""Parts of the bench of slow rewards: its service is as slow whoever asks in whatever order, every arm generates as
much, arms take their turns, and figures are what they say."""

import asyncio
import itertools
import json
import math
import random
import sys
import time
import urllib.request
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from benchmarks import engine, functions, pipeline, service, start
from benchmarks.lengths import completion_tokens, fix_lengths, fix_server_lengths
from benchmarks.service import GENERATIONS
from benchmarks.vllm_server import vllm_server
from salesrl_trl.names import Phase
from salesrl_trl.reward.functions import RewardFunction
from salesrl_trl.reward.stage_times import TimeRange

# The service


def test_a_latency_depends_on_prompt_sample_and_stage_alone():
    asked = list(itertools.product(range(40), range(GENERATIONS), ("rag", "judge")))
    first = {each: service.latency_s(*each, 2.0) for each in asked}
    random.Random(1).shuffle(asked)
    random.seed(2)  # what else is drawn in the meantime does not matter
    assert {each: service.latency_s(*each, 2.0) for each in asked} == first
    assert len(set(first.values())) == len(asked)
    assert all(service.latency_s(*each, 1.0) == pytest.approx(first[each] / 2) for each in asked)
    # log-normal: of 640 draws the median is off by 0.01, and 68 % lie within a standard deviation
    logs = sorted(math.log(each / 2.0) for each in first.values())
    assert logs[320] == pytest.approx(0.0, abs=0.05)
    assert sum(abs(each) < service.SPREAD for each in logs) / 640 == pytest.approx(0.683, abs=0.06)


def ask(url, path, **body):
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def test_the_service_deals_each_prompts_samples_out_once_and_scores_them_the_same_in_any_order():
    rows = [row for row in (3, 4) for _ in range(2 * GENERATIONS)]  # twice: an arm after another
    random.Random(0).shuffle(rows)
    with service.service() as url:
        samples = {row: [] for row in rows}
        for row in rows:
            samples[row].append(ask(url, "/rag", row=row)["sample"])
        for dealt in samples.values():
            assert dealt == [*range(GENERATIONS), *range(GENERATIONS)]
        places = [(row, sample) for row in (3, 4) for sample in range(GENERATIONS)]
        scores = {place: ask(url, "/judge", row=place[0], sample=place[1])["score"] for place in places}
        for place in reversed(places):
            assert ask(url, "/judge", row=place[0], sample=place[1])["score"] == scores[place]
        assert len(set(scores.values())) == len(places)
        for medians_s in ((0.3, 0.0), (0.0, 0.3)):  # as slow as it was told last
            service.set_medians(url, medians_s)
            for call, median_s in zip(service.CALLS, medians_s, strict=True):
                started = time.perf_counter()
                ask(url, f"/{call}", row=1, sample=2)
                assert time.perf_counter() - started >= service.latency_s(1, 2, call, median_s)


def test_a_length_depends_on_prompt_and_sample_alone():
    prompts = [[7, 8, number] for number in range(200)]
    lengths = [completion_tokens(prompt, sample, 256) for prompt in prompts for sample in range(GENERATIONS)]
    random.seed(2)
    assert [
        completion_tokens(tuple(prompt), sample, 256) for prompt in prompts for sample in range(GENERATIONS)
    ] == lengths
    assert min(lengths) == 64
    assert max(lengths) == 256
    # of an exponential of mean 85.3, cut off at 192
    assert sum(lengths) / len(lengths) == pytest.approx(64 + 85.3 * (1 - math.exp(-192 / 85.3)), abs=6)


def test_a_block_counts_whole_rounds_of_waiting_and_of_prompts():
    for ahead, steps in itertools.product((0, 1, 2, 4), (1, 2, 3, 5)):
        before, counted, after = pipeline.window(ahead, steps)
        assert counted % steps == 0
        assert not ahead or counted % (ahead + 1) == 0
        assert (2 * (ahead + 1) if ahead else steps) <= counted <= 2 * (ahead + 1) * steps
        assert (before, after) == (ahead + 1, ahead)


def test_every_completion_of_a_batch_gets_its_own_length():
    class Sampling:
        seed = None

        def clone(self):
            return Sampling()

    class Engine:
        def generate(self, prompts, sampling_params, use_tqdm):
            assert not use_tqdm
            return [(each.max_tokens, each.ignore_eos, each.seed) for each in sampling_params]

    engine = Engine()
    fix_lengths(engine, 256)
    rows = [[1, 2], [3], [1, 2], [3], [1, 2]]
    told = engine.generate([{"prompt_token_ids": ids} for ids in rows], sampling_params=Sampling(), use_tqdm=False)
    samples = [0, 0, 1, 1, 2]
    wanted = [completion_tokens(ids, sample, 256) for ids, sample in zip(rows, samples, strict=True)]
    assert told == [(length, True, None) for length in wanted]
    fix_lengths(engine := Engine(), 256, seeded=True)
    told = engine.generate([{"prompt_token_ids": ids} for ids in rows], sampling_params=Sampling(), use_tqdm=False)
    assert told == [(length, True, sample) for length, sample in zip(wanted, samples, strict=True)]


# Its figures


def made_between(first, last, *waits):
    """A batch whose rewards were made then, and waited for in those stretches."""
    batch = RewardFunction(lambda completions: completions).batch([{"prompt": ""}])
    batch.times, batch.waits = TimeRange(first, last), list(waits)
    return batch


@pytest.mark.parametrize(
    ("waits", "hidden"),
    [
        ([], 1.0),
        ([(10.0, 20.0)], 0.0),
        ([(5.0, 30.0)], 0.0),
        ([(30.0, 31.0)], 1.0),
        ([(19.0, 25.0)], 0.9),
        ([(12.0, 13.0), (19.0, 25.0)], 0.8),  # 1 s and 1 s of 10
    ],
)
def test_what_is_hidden_is_the_part_of_the_makespan_that_nobody_waited_for(waits, hidden):
    assert pipeline.hidden_share(made_between(10.0, 20.0, *waits)) == pytest.approx(hidden)


def test_of_rewards_that_took_no_time_no_share_is_hidden():
    assert math.isnan(pipeline.hidden_share(made_between(None, 0.0)))
    assert math.isnan(pipeline.hidden_share(made_between(10.0, 10.0)))


ARM = {"step_s_median": 6.0, "step_s_mean": 6.5, "ratio": 1.0, "hidden": 0.0, "reward_failures": 0,
       "completion_tokens": 15.4, "step_s": [6.0, 6.0, 7.5], "peak_gib": 2.5,
       "phases_s": {"forward": 1.0, "backward": 2.25, "logging": 0.001}}  # fmt: skip
FIGURES = {
    "shape": "tiny",
    "device": "cpu",
    "latency_s": [1.5, 0.8],
    "prompt_tokens": 40,
    "arms": {
        "stock": ARM,
        "lookahead_2": {**ARM, "step_s_mean": 3.25, "ratio": 0.5, "hidden": 0.987, "reward_failures": 3},
        "floor": {**ARM, "step_s_mean": 2.5},
    },
    "floor_s": 2.5,
    "instruments_share": 0.0012,
}


def test_the_table_has_a_line_for_each_arm_and_one_for_the_floor():
    title, head, stock, ahead, floor, phases, share = pipeline.table(FIGURES).splitlines()
    assert title == "cpu, tiny, prompts of 40 tokens, rewards of 1.5 s + 0.8 s"
    assert stock.split() == ["stock", "6.00", "6.50", "1.000", "0%", "0", "15", "2.5"]
    assert ahead.split() == ["lookahead_2", "6.00", "3.25", "0.500", "99%", "3", "15", "2.5"]
    assert len({len(line) for line in (head, stock, ahead, floor)}) == 1
    assert phases.strip() == "forward 1.00, backward 2.25"
    assert share == "of the floor's 2.50 s in the instruments: 0.12%"


def test_the_table_does_without_a_floor():
    arms = {arm: figures for arm, figures in FIGURES["arms"].items() if arm != "floor"}
    lines = pipeline.table({**FIGURES, "arms": arms, "floor_s": None, "instruments_share": None}).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["stock", "lookahead_2"]


class Made:
    """In place of the trainers: a block of an arm takes as many seconds as its latencies and its number say."""

    blocks = ()

    def __init__(self, args, url, scratch, servers):
        Made.blocks = []

    def block(self, arm, latency, tokens, steps):
        assert tokens == 40
        self.blocks.append((arm, *latency, steps))
        seconds = sum(latency) + len(self.blocks)
        return {"step_s": [seconds, seconds + 1.0], "hidden": [0.25, 0.75], "failures": [1], "lengths": [10.0, 20.0],
                "peak_gib": [1.5], "phases": [[0.0] * len(Phase)]}  # fmt: skip

    def instruments_share(self):
        return 0.001

    def close(self):
        self.blocks.append("closed")


def test_arms_take_turns_and_figures_are_of_all_their_blocks(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pipeline, "Bench", Made)
    monkeypatch.setattr(pipeline, "service", nullcontext)
    out = tmp_path / "figures.json"
    arms = ["--arms", "floor", "lookahead_2", "stock", "exact", "--steps", "2"]
    pipeline.main(["--device", "cpu", *arms, "--latency", "2", "1", "--latency", "5", "3", "--json", str(out)])
    turns = ["stock", "exact", "floor", "lookahead_2", "floor", "exact", "stock"]
    assert set(Made.blocks[:2]) == {("stock", 0.0, 0.0, 0), ("exact", 0.0, 0.0, 0)}  # to warm up
    assert Made.blocks[2:9] == [(arm, 2.0, 1.0, 2) for arm in turns]
    assert Made.blocks[9:] == [*((arm, 5.0, 3.0, 2) for arm in turns), "closed"]
    figures = json.loads(out.read_text())
    # blocks 3 and 9 are stock's, of 3 s and their number
    assert figures["arms"]["stock"] == {
        "step_s_median": 9.5,
        "step_s_mean": 9.5,
        "ratio": 1.0,
        "hidden": 0.5,
        "reward_failures": 2,
        "completion_tokens": 15.0,
        "peak_gib": 1.5,
        "phases_s": dict.fromkeys(Phase, 0.0),
        "step_s": [6.0, 7.0, 12.0, 13.0],
    }
    assert figures["arms"]["lookahead_2"]["step_s"] == [9.0, 10.0]  # block 6
    assert figures["arms"]["lookahead_2"]["ratio"] == pytest.approx(9.5 / 9.5)
    assert set(figures["arms"]) == {"stock", "exact", "lookahead_2", "floor"}
    assert figures["floor_s"] == 9.5  # blocks 5 and 7: 8, 9, 10, 11
    assert figures["latency_s"] == [2.0, 1.0]
    assert [other["latency_s"] for other in figures["others"]] == [[5.0, 3.0]]
    assert capsys.readouterr().out.count("s in the instruments: 0.10%") == 2


class Client:
    """TRL's client of a server. The longer a completion is, the sooner it answers."""

    def __init__(self):
        self.asked = []

    def generate(self, prompts, n=1, generation_kwargs=None, max_tokens=16, top_p=1.0):
        assert (n, len(prompts), top_p) == (1, 1, 0.9)
        self.asked.append(generation_kwargs)
        time.sleep(0.2 / max_tokens)
        return {"prompt_ids": prompts, "completion_ids": [[7] * max_tokens], "logprobs": [[[-1.0]] * max_tokens]}


def test_a_server_is_asked_for_completions_of_those_lengths_whoever_asks():
    client, rows = Client(), [[1, 2], [3], [4]]
    fix_server_lengths(client, 256)
    shared = {"top_p": 0.9, "max_tokens": 99}
    at_once = client.generate(prompts=rows, n=4, generation_kwargs={"seed": 0, "min_p": 0.1}, **shared)
    assert at_once["prompt_ids"] == rows
    wanted = [completion_tokens(row, sample, 256) for row in rows for sample in range(4)]
    assert [len(ids) for ids in at_once["completion_ids"]] == wanted
    assert [len(logps) for logps in at_once["logprobs"]] == wanted
    one = client.generate(prompts=[[4]], generation_kwargs={"seed": 3, "min_p": 0.1}, **shared)
    assert one["completion_ids"] == at_once["completion_ids"][-1:]
    assert client.asked == [{"min_p": 0.1, "ignore_eos": True}] * 13


def test_a_server_that_does_not_start_is_reported_with_its_output(tmp_path, monkeypatch):
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\necho no such model >&2\nexit 1\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    with pytest.raises(RuntimeError, match="did not start: no such model"), vllm_server(tmp_path, tmp_path / "log"):
        raise AssertionError("it has no model")


def test_a_server_is_not_pushed_to_from_a_cpu(capsys):
    with pytest.raises(SystemExit):
        pipeline.main(["--device", "cpu", "--server", "1"])
    assert "needs two GPUs" in capsys.readouterr().err


# Functions of a user's own


def test_a_slow_function_takes_the_same_times_and_gives_the_same_numbers_in_each_form(monkeypatch):
    rows, slept = [row for row in (0, 1) for _ in range(GENERATIONS)], []
    texts = [[{"role": "assistant", "content": f"text {place}"}] for place in range(len(rows))]
    calls = functions.Calls()
    calls.restart(2.0)
    made = calls.functions()
    assert tuple(made) == functions.FORMS

    async def noted(seconds):
        slept.append(seconds)

    monkeypatch.setattr(functions, "time", SimpleNamespace(sleep=slept.append))
    monkeypatch.setattr(functions, "asyncio", SimpleNamespace(sleep=noted, gather=asyncio.gather))

    async def scored(form):
        given = made[form]._function if isinstance(made[form], RewardFunction) else made[form]
        if form == "sync":
            return given(texts, row=rows)
        if form == "async":
            return await given(texts, row=rows)
        if form == "per_completion":
            return [await given(text, row) for text, row in zip(texts, rows, strict=True)]
        return [*await given(texts[:GENERATIONS], 0), *await given(texts[GENERATIONS:], 1)]

    wanted = sorted(service.latency_s(row, place, "judge", 2.0) for row in (0, 1) for place in range(GENERATIONS))
    for form in functions.FORMS:
        slept.clear()
        assert asyncio.run(scored(form)) == [functions.score(text) for text in texts]
        assert sorted(slept) == wanted, form


def test_every_turn_begins_with_stock_and_every_other_round_goes_backwards():
    turns = functions.turns(("sync", "per_group"), (0, 2), 2)
    assert turns[:2] == [["stock", "stock_sync", "sync/0", "sync/2"], ["stock", "per_group/0", "per_group/2"]]
    assert turns[2:] == [["stock", "per_group/2", "per_group/0"], ["stock", "sync/2", "sync/0", "stock_sync"]]


def test_functions_have_a_line_for_each_arm():
    plain = {"mean_s": 4.0, "ratio": 1.0, "exposed_s": None, "hidden_s": None, "hidden": None, "failures": 0}
    ahead = {**plain, "mean_s": 1.0, "ratio": 0.25, "exposed_s": 0.5, "hidden_s": 1.5, "hidden": 0.75, "failures": 3}
    off = dict.fromkeys(functions.COMPARED, 0.0) | {"loss": 2e-7}
    arms = {"stock": {**plain, "differences": None}, "sync/0": {**ahead, "differences": off}}
    title, head, *lines = functions.table({"latency_s": 3.0, "floor_s": 0.6, "arms": arms}).splitlines()
    assert title == "cpu, tiny, calls of 3 s; without them a step takes 0.60 s"
    assert lines[0].split() == ["stock", "4.00", "1.000", "-", "-", "-", "0", "-", "-"]
    assert lines[1].split() == ["sync/0", "1.00", "0.250", "0.50", "1.50", "75%", "3", "0.0e+00", "2.0e-07"]
    assert len({len(line) for line in (head, *lines)}) == 1


def test_the_difference_of_two_blocks_is_the_largest_of_a_step():
    step = dict.fromkeys(functions.COMPARED, 1.0)
    found = functions.differences([step, step, step], [{**step, "loss": 1.5}, {**step, "loss": 0.25}, step])
    assert found == {**dict.fromkeys(step, 0.0), "loss": 0.75}


# Starts and engines


def test_a_generations_seconds_are_without_the_weight_push_in_it():
    spans = [
        ("generation", 0, 9),
        ("generation", 10, 6),
        ("weight_push", 4, 1),
        ("weight_push", 11, 2),
        ("loss", 12, 1),
    ]
    trace = [{"name": name, "ph": "X", "ts": ts * 1e6, "dur": dur * 1e6} for name, ts, dur in spans]
    assert start.generation_s([{"name": "process_name", "ph": "M"}, *trace]) == 4.0
    found = {"stock": {"first_step_end_s": 8.0}, "warmup": {"wall_s": 3.0}, "kept": {"first_step_end_s": 2.0}}
    assert start.ratios(found) == {"kept/stock": 0.25}


def test_an_engines_rate_is_that_of_new_prompts_of_which_a_group_shares_one():
    pytest.importorskip("vllm")
    asked = []

    class Engine:
        def generate(self, prompts, settings, use_tqdm):
            asked.append([tuple(each["prompt_token_ids"]) for each in prompts])
            time.sleep(0.01)
            completion = SimpleNamespace(token_ids=[0] * settings.max_tokens)
            return [SimpleNamespace(outputs=[completion] * settings.n) for _ in prompts]

    found = engine.measure(Engine(), prompt=32, completion=4)
    for name, prompts, completions in (("alone", 1, 1), ("group", engine.PROMPTS, engine.PROMPTS * GENERATIONS)):
        assert found[f"{name}_tokens_per_s"] == pytest.approx(completions * 4 / found[f"{name}_s"])
        assert found[f"{name}_s"] >= 0.01
        rounds = [each for each in asked if len(each) == prompts]
        assert len(set(itertools.chain(*rounds))) == prompts * (engine.ROUNDS + 1)  # no prompt comes twice
