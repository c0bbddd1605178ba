"""`python -m salesrl_trl.launch.evaluate` as a user has it: two policies, the embedded services, rows of the demo."""

import gc
import json
import logging
import math
import shutil
import statistics
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from salesrl_trl.demo.packaged import PACKAGED, SEARCH_POLICY
from salesrl_trl.launch.evaluate import __main__ as evaluate
from salesrl_trl.launch.evaluate import answering
from salesrl_trl.launch.kept import collect_as_usual
from salesrl_trl.launch.recipes import RECIPES
from salesrl_trl.trainer import SalesGRPOTrainer

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = 8


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Evaluates. Returns the exit code, the figures of the file and what was printed."""
    monkeypatch.setenv("SALESRL_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def evaluated(*arguments):
        options = ["--use_vllm", "false", "--reward_process", "false", "--rows", str(ROWS), "--output", "figures.json"]
        code = evaluate.main([*options, "--max_train_rows", "8", *map(str, arguments)])
        return code, json.loads((folder / "figures.json").read_text()), capfd.readouterr().out

    before = logging.root.handlers[:]
    yield evaluated
    logging.root.handlers[:] = before
    collect_as_usual()
    gc.collect()
    gc.freeze()  # as tests/conftest.py has left it


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory):
    """The packaged policy with weights that were moved at random."""
    folder = tmp_path_factory.mktemp("policies") / "spoilt"
    shutil.copytree(PACKAGED, folder)
    weights, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in sorted(weights):
        noise = torch.randn(weights[name].shape, generator=generator)
        weights[name] = weights[name] + weights[name].std() * noise.to(weights[name].dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """An adapter of the packaged policy that changes nothing, as LoRA begins."""
    folder = tmp_path_factory.mktemp("policies") / "adapter"
    policy = AutoModelForCausalLM.from_pretrained(PACKAGED)
    get_peft_model(policy, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder)
    return folder


def test_a_spoilt_policy_is_worse_on_the_same_rows(run, spoilt):
    code, figures, shown = run("--policy", PACKAGED, spoilt, "--samples", "2")
    assert code == 0
    assert len(figures["rows"]) == ROWS
    assert {row["branch"] for row in figures["rows"]} == {"fairness", "hallucination"}
    for mode in ("greedy", "sampled"):
        changes = [row["rewards"]["B"][mode] - row["rewards"]["A"][mode] for row in figures["rows"]]
        found = figures["differences"][mode]["all"]
        assert found["value"] == pytest.approx(statistics.fmean(changes))
        reach = 2.365 * statistics.stdev(changes) / math.sqrt(ROWS)  # the tabled t for 7 degrees of freedom
        assert found["interval"][1] == pytest.approx(found["value"] + reach, abs=1e-3)
        assert (found["better"], found["worse"]) == (sum(c > 1e-9 for c in changes), sum(c < -1e-9 for c in changes))
        assert f"{mode}: B is worse than A by {-found['value']:.3f}: the interval excludes 0." in shown
    first, second = figures["figures"][0], figures["figures"][2]
    assert (first["policy"], second["policy"]) == ("A", "B")
    assert first["branches"]["all"]["valid"] > 0.8 > second["branches"]["all"]["valid"]
    assert sorted(each.name for each in Path().iterdir()) == ["figures.json"]  # no run and no checkpoint


def test_equal_policies_give_equal_answers_also_where_one_is_an_adapter(run, adapter, monkeypatch):
    """Sampling has the same seeds for both. The first one's trainer is gone before the second one is built: the end of
    its engine would take the process groups of the next engine."""

    def trainers():
        return sum(issubclass(type(each), SalesGRPOTrainer) for each in gc.get_objects())

    def counted():
        free()
        left.append(trainers())

    gc.unfreeze()  # an engine of another test hid that test's trainer from the count
    free, left, before = answering._free, [], trainers()
    monkeypatch.setattr(answering, "_free", counted)
    code, figures, shown = run("--policy", PACKAGED, adapter, "--samples", "1")
    assert code == 0
    assert all(row["rewards"]["A"] == row["rewards"]["B"] for row in figures["rows"])
    assert len({row["rewards"]["A"]["sampled"] for row in figures["rows"]}) > 1
    assert figures["figures"][0]["branches"] == figures["figures"][2]["branches"]
    assert len(left) == 2 and max(left) <= before  # those of other tests
    assert "sampled: no difference is shown: all rows scored for both have equal rewards." in shown


def test_a_tool_works_for_both_policies(run):
    alike = (SEARCH_POLICY, SEARCH_POLICY)
    code, figures, _ = run("--config", RECIPES["search"], "--policy", *alike, "--samples", "0", "--bf16", "false",
                           "--max_completion_length", "200")  # fmt: skip
    assert code == 0
    assert all(row["rewards"]["A"] == row["rewards"]["B"] for row in figures["rows"])
    assert max(row["rewards"]["A"]["greedy"] for row in figures["rows"]) > 0.5  # an answer from what was found


def test_where_nothing_can_be_scored_there_is_no_number_and_the_exit_code_says_so(run):
    late = ("--reward_deadline_s", "0.0001", "--warm_up_services", "false")
    code, figures, _ = run("--samples", "0", *late)
    assert code == 1
    assert all(row["rewards"] == {"A": {"greedy": None}} for row in figures["rows"])
    assert figures["figures"][0]["missing"] == {"deadline": ROWS}
