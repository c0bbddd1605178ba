"""Made-up completions under a run's reward chain, with services on loopback."""

import json
import random
import re
from pathlib import Path

import pytest

from salesrl_trl.judged.parsing import parse_action
from salesrl_trl.launch import train
from salesrl_trl.launch.data.sources import load_rows
from salesrl_trl.launch.preflight.__main__ import main
from salesrl_trl.launch.preflight.scored_load import INVALID, made_up
from salesrl_trl.types import Action

BRANCHES = ("fairness", "hallucination")
KEY = "sk-test-41c07d9e"
RECIPE = Path(__file__).parents[3] / "recipes/debug.yaml"
QUICK = (
    *("--config", str(RECIPE), "--stage", "judge", "--calls", "0", "--json"),
    *("--outage_patience_s", "0", "--max_attempts", "1"),
    *("--hedge_fraction", "0", "--per_device_train_batch_size", "24", "--num_generations", "12"),
    *("--gradient_accumulation_steps", "1"),
)  # two prompts a batch


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SALESRL_CACHE_DIR", str(tmp_path / "cache"))


def test_completions_are_actions_but_for_those_that_are_meant_to_be_none():
    row, rng = load_rows("demo", "train", BRANCHES, 1)[0], random.Random(0)
    made = [made_up(row, rng) for _ in range(400)]
    assert {text for text in made if not isinstance(parse_action(text), Action)} == {*INVALID}


@pytest.fixture
def load(services, capsys):
    """The exit code, the stage's report and stderr of a preflight with made-up completions."""

    def load(*arguments):
        code = main([*QUICK, "--rag_base_url", services.url, "--judge_base_url", f"{services.url}/v1", *arguments])
        told = capsys.readouterr()
        return code, json.loads(told.out)["stages"][0], told.err

    return load


def test_batches_have_the_size_of_a_step_and_show_and_keep_no_text(load, services, tmp_path, caplog):
    code, report, told = load("--load", "2")
    assert code == 0, report["findings"]
    assert [text.split("]")[0] for text in caplog.messages if "[Load" in text] == ["[Load 1/2", "[Load 2/2"]
    assert report["figures"]["least_scored"] == 1
    asked = dict(services.calls)
    assert asked["32b"] == 4 + 1  # 2 x 2 rows, and the warm-up
    assert load("--load", "2")[0] == 0
    assert services.calls["32b"] == 2 * asked["32b"] and not (tmp_path / "cache").exists()
    texts = {message.content for each in load_rows("demo", "train", BRANCHES) for message in each.conversation}
    output = told + caplog.text + json.dumps(report, ensure_ascii=False)
    assert not any(text in output for text in (*texts, "rewritten_query"))


def test_a_recipe_in_its_mode_for_rewards_scores_batches_as_large_as_its_steps(services, capsys, monkeypatch):
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_LOGGING_LEVEL"):  # the recipe sets them
        monkeypatch.setenv(name, "1")
    argv = ["--mode", "rewards", "--max_steps", "1", "--num_generations", "24", "--hedge_fraction", "0"]
    with pytest.raises(SystemExit) as ended:
        train.main(RECIPE, [*argv, "--rag_base_url", services.url, "--judge_base_url", f"{services.url}/v1"])
    assert ended.value.code == 0
    assert re.search(r"judge +(passed|noted)", capsys.readouterr().out)
    assert services.calls["32b"] == 2 + 1


def test_a_service_that_fails_would_skip_the_steps(load, services, monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)
    services.set("8b", KEY, status=503)
    keys = ("--rag_api_key_env", "MY_KEY", "--judge_api_key_env", "MY_KEY")
    code, report, told = load("--load", "2", "--warm_up_services", "false", *keys)
    texts = " ".join(finding["text"] for finding in report["findings"])
    assert code == 2 and "Training would skip 2 of 2 steps" in texts
    assert "infra:rag_8b_http_503" in texts
    assert KEY not in told + texts
    code, report, _ = load("--load", "2", *keys)
    assert code == 2 and "rag_8b" in report["findings"][-1]["text"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--load", "x"), "--load"),
        (
            ("--load", "1", "--action_fields", "query", "--prompt_template", "compact"),
            "made-up completions do not support",
        ),
        (("--load", "1", "--reward_funcs", "judge"), "made-up completions do not support"),
    ],
)
def test_bad_input_is_told(load, arguments, message):
    code, report, _ = load(*arguments)
    assert code == 2 and message in report["findings"][-1]["text"]
