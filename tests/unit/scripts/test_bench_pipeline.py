"""The bench of slow rewards: its service is as slow whoever asks in whatever order, its figures are what they say, and
a small run of it has the order of times that all of this is about."""

import importlib.util
import itertools
import json
import math
import os
import random
import subprocess
import sys
import time
import urllib.request
from contextlib import nullcontext
from pathlib import Path

import pytest
from support.seconds import check_seconds

from salesrl_trl.reward.batch import RewardBatch
from salesrl_trl.reward.stages import TimeRange

SCRIPTS = Path(__file__).parents[3] / "scripts"
GENERATIONS = 8


@pytest.fixture(scope="module")
def bench():
    return loaded("bench_pipeline")


@pytest.fixture(scope="module")
def rewards():
    return loaded("bench_rewards")


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))  # it takes a part of another bench
        spec.loader.exec_module(module)
    return module


# The service


def test_a_latency_depends_on_prompt_sample_and_stage_alone(rewards):
    asked = list(itertools.product(range(40), range(GENERATIONS), ("/rag", "/judge")))
    first = {each: rewards.latency_s(*each, 2.0) for each in asked}
    random.Random(1).shuffle(asked)
    random.seed(2)  # what else is drawn in the meantime does not matter
    assert {each: rewards.latency_s(*each, 2.0) for each in asked} == first
    assert len(set(first.values())) == len(asked)
    assert all(rewards.latency_s(*each, 1.0) == pytest.approx(first[each] / 2) for each in asked)


def test_latencies_are_log_normal_around_their_median(rewards):
    logs = sorted(math.log(rewards.latency_s(row, 0, "/rag", 3.0) / 3.0) for row in range(2000))
    assert logs[1000] == pytest.approx(0.0, abs=0.05)  # of 2000 draws it is off by 0.01
    assert sum(abs(each) < rewards.SPREAD for each in logs) / 2000 == pytest.approx(0.683, abs=0.05)


def ask(url, path, **body):
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def test_the_service_deals_each_prompts_samples_out_once_and_scores_them_the_same_in_any_order(rewards):
    rows = [row for row in (3, 4) for _ in range(2 * GENERATIONS)]  # twice: an arm after another
    random.Random(0).shuffle(rows)
    with rewards.service() as url:
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


@pytest.mark.alone
def test_the_service_is_as_slow_as_it_was_told_last(rewards):
    def seconds(path):
        started = time.perf_counter()
        ask(url, path, row=1, sample=2)
        return time.perf_counter() - started

    with rewards.service() as url:
        for told in ((0.6, 0.0), (0.0, 0.6)):
            rewards.set_medians(url, told)
            for path, median_s in zip(("/rag", "/judge"), told, strict=True):
                wanted = rewards.latency_s(1, 2, path, median_s) if median_s else 0.0
                check_seconds(seconds(path), least=wanted, most=wanted + 0.3)


def test_a_length_depends_on_prompt_and_sample_alone(bench):
    prompts = [[7, 8, number] for number in range(200)]
    lengths = [bench.completion_tokens(prompt, sample, 256) for prompt in prompts for sample in range(GENERATIONS)]
    random.seed(2)
    assert [
        bench.completion_tokens(tuple(prompt), sample, 256) for prompt in prompts for sample in range(GENERATIONS)
    ] == lengths
    assert min(lengths) == 64
    assert max(lengths) == 256
    # of an exponential of mean 85.3, cut off at 192
    assert sum(lengths) / len(lengths) == pytest.approx(64 + 85.3 * (1 - math.exp(-192 / 85.3)), abs=6)


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize("ahead", [0, 1, 2, 4])
def test_a_block_counts_whole_rounds_of_waiting_and_of_prompts(bench, ahead, steps):
    before, counted, after = bench.window(ahead, steps)
    assert counted % steps == 0
    assert not ahead or counted % (ahead + 1) == 0
    assert counted >= (2 * (ahead + 1) if ahead else steps)
    assert counted <= 2 * (ahead + 1) * steps
    assert (before, after) == (ahead + 1, ahead)


def test_every_completion_of_a_batch_gets_its_own_length(bench):
    class Sampling:
        def clone(self):
            return Sampling()

    class Engine:
        def generate(self, prompts, sampling_params, use_tqdm):
            assert not use_tqdm
            return [(each.max_tokens, each.ignore_eos) for each in sampling_params]

    engine = Engine()
    bench.fix_lengths(engine, 256)
    rows = [[1, 2], [3], [1, 2], [3], [1, 2]]
    told = engine.generate([{"prompt_token_ids": ids} for ids in rows], sampling_params=Sampling(), use_tqdm=False)
    samples = [0, 0, 1, 1, 2]
    wanted = [bench.completion_tokens(ids, sample, 256) for ids, sample in zip(rows, samples, strict=True)]
    assert told == [(length, True) for length in wanted]


# Its figures


def made_between(first, last, *waits):
    """A batch whose rewards were made then, and waited for in those stretches."""
    batch = RewardBatch([0], None, None, 1.0)
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
def test_what_is_hidden_is_the_part_of_the_makespan_that_nobody_waited_for(bench, waits, hidden):
    assert bench.hidden_share(made_between(10.0, 20.0, *waits)) == pytest.approx(hidden)


def test_of_rewards_that_took_no_time_no_share_is_hidden(bench):
    assert math.isnan(bench.hidden_share(RewardBatch([0], None, None, 1.0)))
    assert math.isnan(bench.hidden_share(made_between(10.0, 10.0)))


ARM = {"step_s_median": 6.0, "step_s_mean": 6.5, "ratio": 1.0, "hidden": 0.0, "reward_failures": 0,
       "completion_tokens": 15.4, "step_s": [6.0, 6.0, 7.5]}  # fmt: skip
FIGURES = {
    "shape": "tiny",
    "device": "cpu",
    "latency_s": [1.5, 0.8],
    "arms": {
        "stock": ARM,
        "lookahead_2": {**ARM, "step_s_mean": 3.25, "ratio": 0.5, "hidden": 0.987, "reward_failures": 3},
    },
    "floor_s": 2.5,
    "instruments_share": 0.0012,
}


def test_the_table_has_a_line_for_each_arm_and_one_for_the_floor(bench):
    title, head, stock, ahead, floor = bench.table(FIGURES).splitlines()
    assert title == "cpu, tiny, rewards of 1.5 s + 0.8 s"
    assert stock.split() == ["stock", "6.00", "6.50", "1.000", "0%", "0", "15"]
    assert ahead.split() == ["lookahead_2", "6.00", "3.25", "0.500", "99%", "3", "15"]
    assert len({len(line) for line in (head, stock, ahead)}) == 1
    assert floor.split()[:2] == ["floor", "2.50,"]
    assert floor.endswith("0.12%")


def test_the_table_does_without_a_floor(bench):
    lines = bench.table({**FIGURES, "floor_s": None, "instruments_share": None}).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["stock", "lookahead_2"]


class Made:
    """In place of the trainers: a block of an arm takes as many seconds as its latencies and its number say."""

    blocks = ()

    def __init__(self, args, url, scratch, servers):
        Made.blocks = []

    def block(self, arm, latency, steps):
        self.blocks.append((arm, *latency, steps))
        seconds = sum(latency) + len(self.blocks)
        return {"step_s": [seconds, seconds + 1.0], "hidden": [0.25, 0.75], "failures": [1], "lengths": [10.0, 20.0]}

    def instruments_share(self):
        return 0.001

    def close(self):
        self.blocks.append("closed")


def test_arms_take_turns_and_figures_are_of_all_their_blocks(bench, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "Bench", Made)
    monkeypatch.setattr(bench, "service", nullcontext)
    out = tmp_path / "figures.json"
    arms = ["--arms", "floor", "lookahead_2", "stock", "exact", "--steps", "2"]
    bench.main(["--device", "cpu", *arms, "--latency", "2", "1", "--latency", "5", "3", "--json", str(out)])
    turns = ["stock", "exact", "floor", "lookahead_2", "floor", "exact", "stock"]
    assert set(Made.blocks[:2]) == {("stock", 0.0, 0.0, 1), ("exact", 0.0, 0.0, 1)}  # to warm up
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
        "step_s": [6.0, 7.0, 12.0, 13.0],
    }
    assert figures["arms"]["lookahead_2"]["step_s"] == [9.0, 10.0]  # block 6
    assert figures["arms"]["lookahead_2"]["ratio"] == pytest.approx(9.5 / 9.5)
    assert set(figures["arms"]) == {"stock", "exact", "lookahead_2"}
    assert figures["floor_s"] == 9.5  # blocks 5 and 7: 8, 9, 10, 11
    assert figures["latency_s"] == [2.0, 1.0]
    assert [other["latency_s"] for other in figures["others"]] == [[5.0, 3.0]]
    assert capsys.readouterr().out.count("of it in the instruments 0.10%") == 2


class Client:
    """TRL's client of a server, which answers the sooner the longer a completion is."""

    def __init__(self):
        self.asked = []

    def generate(self, prompts, n=1, generation_kwargs=None, max_tokens=16, top_p=1.0):
        assert (n, len(prompts), top_p) == (1, 1, 0.9)
        self.asked.append(generation_kwargs)
        time.sleep(0.5 / max_tokens)
        return {"prompt_ids": prompts, "completion_ids": [[7] * max_tokens], "logprobs": [[[-1.0]] * max_tokens]}


def test_a_server_is_asked_for_completions_of_those_lengths_whoever_asks():
    server = loaded("bench_server")
    client, rows = Client(), [[1, 2], [3], [4]]
    server.fix_server_lengths(client, lambda prompt, sample: 10 * sum(prompt) + sample)
    shared = {"top_p": 0.9, "max_tokens": 99}
    at_once = client.generate(prompts=rows, n=4, generation_kwargs={"seed": 0, "min_p": 0.1}, **shared)
    assert at_once["prompt_ids"] == rows
    assert [len(ids) for ids in at_once["completion_ids"]] == [*range(30, 34), *range(30, 34), *range(40, 44)]
    assert [len(logps) for logps in at_once["logprobs"]] == [len(ids) for ids in at_once["completion_ids"]]
    one = client.generate(prompts=[[4]], generation_kwargs={"seed": 3, "min_p": 0.1}, **shared)
    assert one["completion_ids"] == at_once["completion_ids"][-1:]
    assert client.asked == [{"min_p": 0.1, "ignore_eos": True}] * 13


def test_a_server_that_does_not_start_is_told_of_with_what_it_printed(tmp_path):
    server = loaded("bench_server")
    with pytest.raises(RuntimeError, match="did not start"), server.vllm_server(tmp_path, tmp_path / "log"):
        raise AssertionError("it has no model")


def test_a_server_is_not_pushed_to_from_a_cpu(bench, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--device", "cpu", "--server", "1"])
    assert "needs two GPUs" in capsys.readouterr().err


# For real


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(480)
def test_rewards_that_nobody_waits_for_make_shorter_steps(tmp_path):
    out = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPTS / "bench_pipeline.py"), "--device", "cpu", "--json", str(out)]
    command += ["--arms", "stock", "exact", "lookahead_2", "floor", "--steps", "1", "--latency", "1.0", "0.5"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(out.read_text())
    assert figures["latency_s"] == [1.0, 0.5]
    stock, exact, ahead = (figures["arms"][name] for name in ("stock", "exact", "lookahead_2"))
    # two blocks of one step, and for a lookahead of two a block of two rounds of three
    assert [len(arm["step_s"]) for arm in (stock, exact, ahead)] == [2, 2, 6]
    assert [arm["reward_failures"] for arm in (stock, exact, ahead)] == [0, 0, 0]
    check_seconds(exact["step_s_median"], most=stock["step_s_median"])
    check_seconds(ahead["step_s_median"], most=exact["step_s_median"])
    check_seconds(figures["floor_s"], most=exact["step_s_median"])
    assert figures["floor_s"] > 0
    assert ahead["ratio"] == pytest.approx(ahead["step_s_mean"] / stock["step_s_mean"])
    assert stock["hidden"] < 0.1
    assert ahead["hidden"] > 0.5
    assert "lookahead_2" in done.stdout


def test_the_bench_of_chains_reads_its_arguments(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # which importing it sets
    with pytest.raises(SystemExit) as ended:
        loaded("bench_chains").main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    for name in ("--chains", "--rounds", "--shape", "--json"):
        assert name in told
