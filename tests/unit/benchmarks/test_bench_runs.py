"""Each bench runs, at tiny sizes, and its figures are what they say."""

import copy
import importlib
import json
import os
import statistics
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from support.seconds import check_seconds
from torch.autograd import DeviceType
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks import sharding, view
from benchmarks.common import alone, kernels


@pytest.mark.parametrize(
    ("name", "updates", "rounds"), [pytest.param("kl", 2, 1, id="kl"), pytest.param("timing", 2, 2, id="timing")]
)
def test_a_bench_of_step_times_gives_the_median_of_its_rounds(name, updates, rounds, tmp_path, capsys, one_thread):
    out = tmp_path / "figures.json"
    words = ["--shape", "tiny", "--updates", str(updates), "--rounds", str(rounds), "--json", str(out)]
    importlib.import_module(f"benchmarks.{name}").main(words)
    figures = json.loads(out.read_text())
    assert len(figures["ratios"]) == rounds
    assert figures["ratio"] == statistics.median(figures["ratios"])
    assert f"ratio {figures['ratio']:.4f}" in capsys.readouterr().out
    if name == "kl":
        # one round is four blocks of two updates, of which the first is left out: two times for each arm
        assert {arm: [*map(len, each)] for arm, each in figures["seconds"].items()} == {"stock": [2], "branches": [2]}
        medians = figures["median_s"]
        assert figures["ratio"] == pytest.approx(medians["branches"] / medians["stock"])
    else:
        # measuring is some calls of Python: never nothing, and nowhere near a tenth of a second
        assert 0 < figures["own_s"] < 0.1
        assert figures["trace_bytes"] > 1000
        assert figures["mfu"] == {"perf/mfu_model": 0.0, "perf/mfu_step": 0.0}  # a CPU


ARMS = ("--arms", "stock", "exact", "lookahead_1", "floor")
AROUND_AN_ENGINE = {
    "pipeline": ("--device", "cpu", *ARMS, "--steps", "1", "--latency", "0.6", "0.3"),
    "functions": ("--forms", "sync", "--lookahead", "0", "2", "--rounds", "1", "--latency", "0.6"),
    "chains": ("--shape", "tiny", "--chains", "4", "--rounds", "1", "--batches", "2", "--latency", "0.2", "0.1"),
    "decoding": ("--arms", "graphs", "--tokens", "16"),
}
ONE_AFTER_ANOTHER = """
import importlib, json, sys
for name, words in json.loads(sys.argv[1]).items():
    importlib.import_module(f"benchmarks.{name}").main(words)
"""


@pytest.mark.bench
@pytest.mark.timeout(480)
def test_the_benches_around_an_engine_of_vllm(tmp_path):
    """In one process, not that of the tests: half of what each of them takes is the import of vLLM."""
    given = {name: [*words, "--json", str(tmp_path / name)] for name, words in AROUND_AN_ENGINE.items()}
    command = [sys.executable, "-c", ONE_AFTER_ANOTHER, json.dumps(given)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    check_rewards_that_nobody_waits_for_make_shorter_steps(json.loads((tmp_path / "pipeline").read_text()))
    check_a_function_called_beside_training_makes_shorter_steps(json.loads((tmp_path / "functions").read_text()))
    check_real_chains_ran_inside_and_beside_the_engines_process(json.loads((tmp_path / "chains").read_text()))
    rows = json.loads((tmp_path / "decoding").read_text())["rows"]
    assert [row["sequences"] for row in rows] == [64] * 3 + [96] * 3
    assert all(row[part] > 0 for row in rows for part in ("schedule", "launch", "update", "outputs"))
    for told in ("stock_sync", "lookahead_1", "4 chains inside the process", "4 chains beside the process"):
        assert told in done.stdout


def check_rewards_that_nobody_waits_for_make_shorter_steps(figures):
    assert figures["latency_s"] == [0.6, 0.3]
    stock, exact, ahead = (figures["arms"][name] for name in ("stock", "exact", "lookahead_1"))
    # two blocks of one step, and for a lookahead of one a block of two rounds of two
    assert [len(arm["step_s"]) for arm in (stock, exact, ahead)] == [2, 2, 4]
    assert [arm["reward_failures"] for arm in (stock, exact, ahead)] == [0, 0, 0]
    check_seconds(exact["step_s_median"], most=stock["step_s_median"])
    check_seconds(ahead["step_s_median"], most=exact["step_s_median"])
    check_seconds(figures["floor_s"], most=exact["step_s_median"])
    assert figures["floor_s"] > 0
    assert ahead["ratio"] == pytest.approx(ahead["step_s_mean"] / stock["step_s_mean"])
    assert stock["hidden"] < 0.1
    assert ahead["hidden"] > 0.5


def check_a_function_called_beside_training_makes_shorter_steps(figures):
    arms = figures["arms"]
    assert [*arms] == ["stock", "stock_sync", "sync/0", "sync/2"]
    assert [len(*arm["step_s"]) for arm in arms.values()] == [2, 2, 2, 6]
    assert [arm["failures"] for arm in arms.values()] == [0, 0, 0, 0]
    for name in ("stock_sync", "sync/0"):  # the same completions: the same rewards and losses as TRL's
        assert arms[name]["differences"]["reward"] == 0.0
        assert arms[name]["differences"]["loss"] < 1e-5
    check_seconds(arms["sync/2"]["mean_s"], most=0.75 * arms["stock"]["mean_s"])
    assert arms["sync/2"]["ratio"] == pytest.approx(arms["sync/2"]["mean_s"] / arms["stock"]["mean_s"])
    assert arms["stock"]["hidden"] is None
    assert arms["sync/0"]["hidden"] < 0.5 < arms["sync/2"]["hidden"]


def check_real_chains_ran_inside_and_beside_the_engines_process(figures):
    for arm in ("inside", "beside"):
        assert figures["arms"][arm]["failed"] == 0
        (block,) = figures["arms"][arm]["blocks"]
        assert block["ratio"] == pytest.approx(block["tokens_per_s_with"] / block["tokens_per_s_without"])
        assert block["chains_per_s"] > 0


@pytest.mark.bench
@pytest.mark.timeout(480)
def test_the_bench_of_conversations_with_a_customer_compares_slow_replies_with_instant_ones(
    tmp_path, monkeypatch, capsys
):
    for name, value in {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}.items():
        monkeypatch.setenv(name, value)
    words = ("--customer", "--arms", "ours_0", "--groups", "1", "--steps", "1", "--seconds", "0.5", "--tokens", "4")
    importlib.import_module("benchmarks.tools").main([*words, "--json", str(tmp_path / "figures.json")])
    figures = json.loads((tmp_path / "figures.ours_0.json").read_text())
    assert [*map(len, (figures["instant"], figures["slow"]))] == [1, 1]
    assert figures["slow_s"] >= 6 * 0.5  # the replies of a conversation come one after the other
    stock_s = figures["instant_s"] + 8 * 6 * 0.5  # as do those of stock TRL's conversations
    assert f"| stock, calculated | {figures['instant_s']:.2f} s | {stock_s:.2f} s |" in capsys.readouterr().out


def test_the_bench_of_memory_estimates_what_it_trains(tmp_path, capsys, one_thread):
    out = tmp_path / "figures.json"
    importlib.import_module("benchmarks.memory").main(["--shapes", "tiny", "--json", str(out)])
    lora, full, *shared = json.loads(out.read_text())["rows"]
    assert full["parts_gib"]["gradients"] > lora["parts_gib"]["gradients"] > 0
    assert [row["row"] for row in shared] == [f"{row['row']}, shared prompts" for row in (lora, full)]
    if not torch.cuda.is_available():
        assert "measures nothing" in capsys.readouterr().err


def test_a_row_of_the_bench_of_memory_that_fails_is_told_and_the_others_are_measured(monkeypatch, capsys):
    memory = importlib.import_module("benchmarks.memory")

    def measured(row):
        if row.batch == 1:
            raise ValueError("no room for vLLM")
        return {
            "row": row.name,
            "estimated_gib": 2.0,
            "moment": "a pass",
            "fits": True,
            "ran_out": False,
            "seconds": 1,
        }

    monkeypatch.setattr(memory, "measure", measured)
    rows = memory.main(["--long", "--shapes", "tiny"])["rows"]
    assert [row.get("failed") for row in rows][-2:] == ["ValueError: no room for vLLM", None]
    assert "on 24 GB: failed, ValueError: no room for vLLM" in capsys.readouterr().err


def test_a_row_of_the_bench_of_memory_counts_no_memory_but_its_own(monkeypatch):
    memory, processes = importlib.import_module("benchmarks.memory"), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(memory, "measure", os.getpid)
    monkeypatch.setattr(memory, "alone", lambda work, row: processes.append(alone(work)) or {"failed": "", "row": ""})
    memory.main(["--long", "--only", "24 GB"])
    assert len({*processes, os.getpid()}) == 7  # two rows of three shapes, and this process
    memory.check_empty(free=139 * 2**30, total=140 * 2**30)
    with pytest.raises(RuntimeError, match=r"36\.00 GiB of the GPU are in use before the row"):
        memory.check_empty(free=104 * 2**30, total=140 * 2**30)


def test_the_bench_of_a_push_finds_every_merged_weight_dithered():
    words = ["-m", "benchmarks.push", "--small", "--device", "cpu", "--without_vllm", "--repeats", "1"]
    told = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, check=True).stdout
    assert "exact: 14 merged weights pushed of 14 layers, 0 differ" in told
    assert "FAILED" not in told
    assert told.count('"0 of 3"') == 1


def test_kernels_are_summed_by_kind():
    def event(key, ms, device=DeviceType.CUDA):
        us = 1000 * ms
        return SimpleNamespace(
            key=key, device_type=device, self_device_time_total=us, count=1, is_user_annotation="##" in key
        )

    events = [event("nvjet_tst_64x8", 6), event("void cutlass::device_kernel<flash::FlashAttnFwdSm90>", 2)]
    events += [
        event("elementwise_kernel", 1),
        event("sm90_xmma_gemm", 2),
        event("aten::mm", 8, DeviceType.CPU),
        event("## a step ##", 11),
    ]
    # of two steps
    found = kernels(SimpleNamespace(key_averages=lambda: events), per=2)
    assert found == {"matrix products": 4.0, "attention": 1.0, "others": 0.5}


def test_the_bench_of_adapters_computes_the_same_with_casts_and_without(tmp_path, one_thread):
    out = tmp_path / "figures.json"
    importlib.import_module("benchmarks.adapters").main(["--shape", "tiny", "--tokens", "24", "--json", str(out)])
    figures = json.loads(out.read_text())
    assert figures["equal"] and min(figures["medians"].values()) > 0


def test_the_attention_of_other_trainers_arms_keeps_rows_apart(one_thread):
    from benchmarks.peers import packed_attention  # noqa: F401  makes `packed` known to transformers

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    config = Qwen2Config(**shape, num_attention_heads=4, num_key_value_heads=2)
    model = Qwen2ForCausalLM(config).eval()
    rows = [torch.randint(0, config.vocab_size, (length,)) for length in (5, 9, 3)]
    expected = torch.cat([model(input_ids=row[None]).logits[0] for row in rows])
    model.set_attn_implementation("packed")
    places = torch.cat([torch.arange(len(row)) for row in rows])[None]
    found = model(input_ids=torch.cat(rows)[None], position_ids=places, use_cache=False).logits[0]
    torch.testing.assert_close(found, expected)


@pytest.mark.bench
def test_the_bench_of_sharding_compares_the_steps_and_the_saved_weights_of_two_launches(tiny, tmp_path, one_thread):
    sharding.main(["--worker", "--shape", "tiny", "--steps", "2", "--model", str(tiny), "--out", str(tmp_path)])
    one = json.loads((tmp_path / "figures.json").read_text())
    saved = tmp_path / "saved"
    assert set(sharding.differences(one, one, (saved, saved)).values()) == {0.0}
    other = copy.deepcopy(one)
    other["steps"][1]["loss"] += 0.5
    found = sharding.differences(one, other, (tiny, saved))
    assert found["loss"] == 0.5
    assert found["weights"] > 1e-5  # two steps at a rate of 1e-4, of which the last one is smaller


@pytest.mark.bench
def test_a_hundred_thousand_completions_answer_open_and_fit(tmp_path, capsys):
    view.main(["--json", str(tmp_path / "figures")])
    figures = json.loads((tmp_path / "figures").read_text())
    assert figures["completions"] >= 100_000
    assert max(each["median_ms"] for each in figures["filters"].values()) < 200
    # without a browser there is none of them
    assert all(figures.get(name, 0) < 2 for name in ("opened_steps_s", "opened_list_s"))
    assert figures["peak_mib"] < 300
    assert "largest advantage" in capsys.readouterr().out
