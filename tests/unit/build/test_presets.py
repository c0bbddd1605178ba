"""Presets lie between the recipe and the command line, and a model that a preset names fits its card."""

import json
from pathlib import Path

import pytest
from check_gpu_memory import main

from salesrl_trl.errors import ConfigError
from salesrl_trl.launch.presets import PRESETS
from salesrl_trl.launch.reward_config import Attempts
from salesrl_trl.launch.settings import parse

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes/full.yaml"
QWEN = {
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True},
    "3B": {"hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36, "num_attention_heads": 16,
           "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True},
    "7B": {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": False},
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    def write(size):
        config = {"model_type": "qwen2", "dtype": "bfloat16", "max_position_embeddings": 32_768, **QWEN[size]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return write


@pytest.fixture
def weighed(model, capsys, monkeypatch):
    def weigh(size, card, *arguments):
        monkeypatch.setattr("salesrl_trl.launch.preflight.memory.is_torchao_available", lambda: True)
        asked = ["--model_name_or_path", model(size), "--card", card, "--prompt_tokens", "1024", "--json"]
        code = main([*asked, *arguments])
        return code, json.loads(capsys.readouterr().out)

    return weigh


def test_a_preset_wins_over_the_recipe_and_the_command_line_over_both():
    config = parse(["--preset", "80gb", "fast_rollout", "--temperature", "0.7"], RECIPE)
    training = config.training
    assert (training.per_device_train_batch_size, training.num_generations) == (6, 3)
    assert (training.temperature, training.learning_rate) == (0.7, 1e-3)  # that of the small policy stays
    assert config.model.use_peft
    first, second, _ = config.notes
    assert first.startswith("preset 80gb: use_peft True, ")
    assert second.startswith("preset fast_rollout: ")
    assert (config.reward.judge_timeout_s, config.reward.parsed_attempts()) == (6, Attempts(rag=3, judge=1))


@pytest.mark.parametrize(
    "given", [["--preset", "48gb"], ["--preset=48gb"], ["--preset", "24gb", "48gb"], ["--preset"]]
)
def test_an_unknown_preset_is_told_with_those_that_exist(given):
    with pytest.raises(ConfigError, match=r"names (48gb|nothing)\. Expected some of: 141gb, 24gb, 40gb, 80gb, dual_"):
        parse(given, RECIPE)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_works_with_every_recipe(name):
    for recipe in (ROOT / "recipes").glob("*.yaml"):
        if (name, recipe.stem) == ("hosted_judge", "own"):  # whose functions ask no judge
            with pytest.raises(ConfigError, match="`judge_meter` is set, but no judge scores here"):
                parse(["--preset", name], recipe)
        else:
            parse(["--preset", name], recipe)


@pytest.mark.parametrize(
    ("card", "size", "presets"),
    [
        ("24gb", "3B", ["24gb"]),
        ("40gb", "7B", ["40gb"]),
        ("80gb", "7B", ["80gb", "fast_rollout"]),
        ("141gb", "7B", ["141gb"]),
        ("141gb", "1.5B", ["141gb"]),
    ],
)
def test_the_model_of_a_preset_fits_its_card(weighed, card, size, presets):
    code, found = weighed(size, card, "--preset", *presets)
    assert (code, found["fits"]) == (0, True), found["moments"]
    assert found["vllm_sequences"] >= 8
    assert found["needed_gib"] > 0.4 * found["card"]["gib"]  # and the card is not far too large
    trained = "all weights" if card == "141gb" else "LoRA"
    assert trained in found["run"]
    assert ("weights in float32" in found["run"]) == (size == "1.5B")


@pytest.mark.parametrize(
    ("card", "given", "preset", "text"),
    [
        # 0.35 of the card are 13.0 GiB, and the weights that vLLM has 14.2
        ("40gb", ["--use_peft", "true"], "40gb", "It fits with `--preset 40gb`"),
        ("24gb", ["--preset", "24gb"], "40gb", "It fits a 40gb GPU with `--preset 40gb`"),
        ("40gb", ["--use_peft", "false"], "141gb", "It fits a 141gb GPU with `--preset 141gb`"),
    ],
)
def test_what_does_not_fit_as_it_is_set_is_told_with_the_preset_that_does(
    weighed, model, capsys, card, given, preset, text
):
    code, found = weighed("7B", card, *given)
    assert (code, found["fits"], found["preset"]["name"]) == (3, False, preset)
    main(["--model_name_or_path", model("7B"), "--card", card, "--prompt_tokens", "1024", *given])
    shown = capsys.readouterr().out
    assert "It doesn't fit with these settings." in shown
    assert text in shown


def test_a_card_that_there_is_not_ends_the_script_with_one_message(capsys):
    assert main(["--card", "eighty"]) == 2
    assert "`card` is 'eighty'. Expected a size" in capsys.readouterr().err
