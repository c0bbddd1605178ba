"""Settings that cannot work are refused with what was got, what was expected and what to do."""

import copy
import dataclasses
import inspect
import io
import json
import math
import pickle
import re
import typing
from contextlib import nullcontext
from datetime import timedelta
from enum import Enum
from types import SimpleNamespace, UnionType

import pytest
import torch
import yaml
from accelerate import Accelerator
from transformers import Qwen2Config

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.config.checks import Range, entry_of, load_object
from salesrl_trl.config.rollouts import (
    correction_of,
    sampling_warnings,
    why_in_trls_order,
    why_in_turn,
    why_not_divisible,
)
from salesrl_trl.config.training import KLSettings, RecordSettings
from salesrl_trl.config.trl_settings import clip_of, reshaped_sampling
from salesrl_trl.errors import ConfigError
from salesrl_trl.judged.budget import CALLS, USD, Limit
from salesrl_trl.kl.branched import WindowSettings
from salesrl_trl.kl.law import AdaptiveLaw
from salesrl_trl.kl.penalty import PenaltySettings
from salesrl_trl.launch.checks import model as model_checks
from salesrl_trl.launch.data_config import DataConfig
from salesrl_trl.launch.judge_config import JudgeModeSettings, JudgeProviderConfig
from salesrl_trl.launch.reward_config import RagSettings, RewardConfig
from salesrl_trl.launch.settings import TelemetryConfig


def training(**kwargs):
    defaults = {"output_dir": "unused", "use_cpu": True, "bf16": False, "num_generations": 4}
    defaults["branches"] = ["fairness", "hallucination"]
    return SalesGRPOConfig(**{**defaults, "per_device_train_batch_size": 8, **kwargs})


def test_the_defaults_work():
    config = SalesGRPOConfig(use_cpu=True, report_to="none")
    assert config.generation_batch_size == 8
    assert config.branches == []  # those of the rows
    assert not config.eval_on_start
    assert training(held_out_eval=True).eval_on_start
    assert training(max_grad_norm=math.inf).max_grad_norm == math.inf  # no limit


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_generations": 3}, r"generation_batch_size \(8\) must be divisible by num_generations \(3\)"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}, "Expected a step-based schedule"),
        ({"refill_groups": 1, "hybrid_reference_weight": 0.5}, "zero-variance groups may be informative there"),
        ({"max_staleness": 1, "rollout_lookahead": 2}, "`max_staleness` is below the lookahead"),
        ({"branches": ["a", "a"]}, "each name once"),
        ({"kl_log_ratio_clamp": 50.0}, "at most 40: the ratio"),
        ({"kl_law_settings": {"max_step": 1.0}}, "`max_step` of `law_settings` is 1.0. Expected a number above 1"),
        (
            {"hybrid_reference_weight": 0.5, "multi_objective_aggregation": "normalize_then_sum"},
            "lacks a group baseline",
        ),
        ({"kl_estimator": "k1", "use_bias_correction_kl": False, "beta": 0.1}, "zero on average"),
        ({"branch_kl": "{"}, "`branch_kl` is not JSON"),
        ({"branch_kl": {"tone": {"beta": 0.1}}}, "names tone. Expected some of: fairness, hallucination"),
        ({"branch_kl": {"fairness": 0.1}}, r"`branch_kl\.fairness` is a float. Expected a mapping"),
        ({"branch_kl": {"fairness": {"low": 0.1, "high": 0.2}}}, r"`branch_kl\.fairness` lacks beta"),
        ({"branch_kl": {"fairness": {"beta": 0.1, "hig": 0.2}}}, r"an unknown 'hig'. Did you mean 'high'\?"),
        ({"branch_kl": {"fairness": {"beta": "1e-3"}}}, r"`branch_kl\.fairness\.beta` is '1e-3'.* write 1.0e-3"),
        ({"shared_prompts": 1.5}, "'1.5'. Expected auto, off, or the maximum tokens per forward pass, a whole number"),
        ({"generation_kwargs": {"temperature": 0.6}}, "has the temperature 0.6, but log-probs are computed at .* 1.0"),
        ({"use_vllm": True, "vllm_engine_kwargs": '{"logprobs_mode": "raw_logprobs"}'}, "mode 'raw_logprobs'"),
    ],
)
def test_a_training_setting_that_cannot_work_is_refused(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        training(**kwargs)


def test_weights_in_training_are_not_turned_into_16_bits(monkeypatch):
    monkeypatch.setattr("salesrl_trl.config.training.settle", lambda *_: (True, True, False, []))  # as on a GPU
    with pytest.raises(ConfigError, match="converts the trained weights to 16 bits"):
        training(use_transformers_continuous_batching=True)


def test_a_branch_that_is_not_named_has_the_coefficient_beta():
    targets = training(beta=0.2, branch_kl='{"hallucination": {"beta": 0.3, "low": 0.08, "high": 0.15}}').kl_targets()
    assert list(targets) == ["fairness", "hallucination"]
    assert (targets["fairness"].beta, targets["fairness"].has_band) == (0.2, False)
    assert (targets["hallucination"].beta, targets["hallucination"].high) == (0.3, 0.15)


def test_no_coefficient_is_no_kl():
    assert training(beta=0.0).kl_targets() == {}
    assert training(beta=0.0, branch_kl={"fairness": {"beta": 0.0}}).kl_targets() == {}
    assert len(training(beta=0.0, branch_kl={"fairness": {"beta": 0.1}}).kl_targets()) == 2


def test_settings_of_the_kl_reach_its_law_and_its_penalty():
    config = training(
        kl_update_steps=7,
        kl_law_settings={"cooldown_steps": 3, "max_step": 1.25},
        kl_estimator="k2",
        kl_log_ratio_clamp=5.0,
        use_bias_correction_kl=False,
        importance_sampling_level="sequence",
    )
    assert config.kl_settings.law_of() == AdaptiveLaw(max_step=1.25)
    assert config.kl_settings.windows == WindowSettings(update_steps=7, cooldown_steps=3)
    assert config.kl_penalty() == PenaltySettings(estimator="k2", clamp=5.0, bias_correction=False, level="sequence")
    assert training(kl_law="fixed").kl_settings.law_of() is None
    assert training(rollout_lookahead=1).kl_penalty().off_policy


BY_TOKENS = {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"}


@pytest.mark.parametrize(
    "given",
    [
        {"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.05}, {"repetition_penalty": 1.1},
        {"generation_kwargs": {"top_p": 0.8}}, {"generation_kwargs": {"logit_bias": {1: -5}}},
        {"vllm_structured_outputs_regex": "a+"},
    ],
    ids=lambda given: next(iter(given)),
)  # fmt: skip
def test_sampling_that_biases_every_ratio_is_refused_where_ratios_are_needed(given):
    """TRL compares log-probs over the whole vocabulary with vLLM's over what is left of it."""
    assert reshaped_sampling(training(**BY_TOKENS, **given))  # told, and no more
    with pytest.raises(ConfigError, match="does not correct for `rollout_lookahead`"):
        training(**BY_TOKENS, **given, rollout_lookahead=1)
    with pytest.raises(ConfigError, match="multiplied over a completion"):  # 0.9 a token is 7e-10 over 200 of them
        training(use_vllm=True, vllm_importance_sampling_mode="sequence_mask", **given)
    training(use_vllm=True, vllm_importance_sampling_correction=False, **given)
    training(**given, rollout_lookahead=1)  # without vLLM both sides are of the whole vocabulary


@pytest.mark.parametrize(
    ("correction", "mode", "is_refused", "ahead_too"),
    [
        ({}, "token_mask", False, True),
        ({"reject": {"token_k1": [0.5, 2.0]}}, "token_truncate", False, True),  # by token, as `token_mask`
        ({"reject": {"token_k3": 1.0, "seq_max_k2": 1.0}}, "token_truncate", True, True),
        ({"weights": "normalized"}, "token_truncate", False, True),
        ({"weights": "normalized"}, "sequence_mask", True, True),
        # TRL's mode by default, sequence_mask, bounds neither of these weights
        ({"weights": "bypass"}, None, False, True),
        ({"weights": "bypass", "reject": {"seq_mean_k1": [0.9, 1.1]}}, None, True, True),
        ({"weights": "none", "reject": {"token_k2": 1.0}}, None, False, True),
        ({"weights": "none"}, None, False, False),  # nothing uses the ratio
    ],
)
def test_what_combines_a_completion_s_biased_ratios_is_refused_and_nothing_else(
    correction, mode, is_refused, ahead_too
):
    given = {"use_vllm": True, "vllm_importance_sampling_mode": mode, "rollout_correction": correction, "top_p": 0.8}
    for lookahead, refused, words in (
        (0, is_refused, "multiplied over a completion"),
        (1, ahead_too, "does not correct for `rollout_lookahead`"),
    ):
        with pytest.raises(ConfigError, match=words) if refused else nullcontext():
            training(**given, rollout_lookahead=lookahead)
    warned = sampling_warnings(training(**given)) if not is_refused else [""]
    assert len(warned) == (correction != {"weights": "none"})


def test_a_lookahead_clips_the_ratio_to_the_sampler_unless_the_user_chose_and_says_so_once():
    def weights_of(lines, **given):
        config = training(use_vllm=True, **given)
        assert len([line for line in config.machine_notes if "with a lookahead" in line]) == lines
        return config.correction.mode, config.correction.weights

    for ahead in ({"rollout_lookahead": 2}, {"max_rollout_lookahead": 4}):
        assert weights_of(1, **ahead)[1] == "bypass"
        assert weights_of(1, **ahead, loss_type="sapo") == ("token_truncate", "bounded")
        assert weights_of(1, **ahead, importance_sampling_level="sequence") == ("token_truncate", "bounded")
        assert weights_of(1, **ahead, rollout_correction={"reject": {"token_k1": 2}}) == ("token_truncate", "bounded")
        assert weights_of(1, **ahead, vllm_importance_sampling_clip_max=2.0) == ("token_truncate", "bounded")
        assert weights_of(0, **ahead, rollout_correction={"weights": "none"})[1] == "none"
        assert weights_of(0, **ahead, vllm_importance_sampling_mode="sequence_mask") == ("sequence_mask", "bounded")
    assert weights_of(0, rollout_lookahead=0) == ("sequence_mask", "bounded")
    assert training(rollout_lookahead=2).correction is None


def test_the_clip_s_upper_bound_allows_what_epsilon_does_for_each_batch_since_the_sampler():
    for given, bound in (
        ({"rollout_lookahead": 1}, 0.44),
        ({"rollout_lookahead": 1, "max_rollout_lookahead": 2}, 0.728),
        ({"rollout_lookahead": 4, "epsilon": 0.1}, 0.61051),
        ({"rollout_lookahead": 2, "use_vllm": False}, 0.728),  # relative to the sampler as well
        ({"rollout_lookahead": 2, "epsilon_high": 0.2}, 0.2),
        ({"rollout_lookahead": 2, "rollout_correction": {"weights": "bypass"}}, 0.728),
        ({"rollout_lookahead": 2, "vllm_importance_sampling_mode": "token_truncate"}, None),
        ({"rollout_lookahead": 2, "loss_type": "sapo"}, None),
        # 0.2 is for both updates of a generation batch: two batches ahead
        ({"rollout_lookahead": 4, "steps_per_generation": 4, "gradient_accumulation_steps": 2}, 0.728),
        ({"rollout_lookahead": 4, "num_iterations": 2}, 0.728),
        ({"rollout_lookahead": 2, "steps_per_generation": 1, "gradient_accumulation_steps": 2}, 0.728),
        # without vLLM its settings have no effect
        ({"rollout_lookahead": 2, "use_vllm": False, "vllm_importance_sampling_mode": "token_mask"}, 0.728),
        # cispo's bound is that of the ratio itself, and sapo has none
        ({"rollout_lookahead": 2, "loss_type": "cispo", "rollout_correction": {"weights": "bypass"}}, None),
        ({"rollout_lookahead": 2, "loss_type": "sapo", "rollout_correction": {"weights": "bypass"}}, None),
        ({"rollout_correction": {"weights": "bypass"}}, None),
    ):
        config = training(**{"use_vllm": True, **given})
        assert clip_of(config) == (bound and pytest.approx(bound))
        lines = [line for line in config.machine_notes if line.startswith(f"`epsilon_high`: {bound or 0:.2f}, as")]
        assert len(lines) == (bound is not None and "epsilon_high" not in given)
        assert config.epsilon_high == given.get("epsilon_high")  # so that a copy with another lookahead chooses again


def saved(config):
    torch.save(config, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copy_of",
    [
        copy.deepcopy,
        saved,
        lambda config: pickle.loads(pickle.dumps(config)),
        lambda config: json.loads(json.dumps(config.to_dict())),
        lambda config: yaml.safe_load(yaml.safe_dump(config.to_dict())),
        lambda config: json.loads(json.dumps(dataclasses.asdict(config))),
        lambda config: yaml.safe_load(yaml.safe_dump(json.loads(config.to_json_string()))),
    ],
)
def test_a_correction_by_default_is_no_choice_in_a_copy_with_another_lookahead(copy_of):
    def copied(config, **changed):
        changed["generation_batch_size"] = None  # TRL derives it, and refuses it beside what it derived it from
        other = copy_of(config)
        return SalesGRPOConfig(**other | changed) if isinstance(other, dict) else dataclasses.replace(other, **changed)

    ahead, on_policy = (training(use_vllm=True, rollout_lookahead=number) for number in (2, 0))
    assert copied(on_policy, rollout_lookahead=2).correction == copied(ahead).correction == ahead.correction
    assert copied(ahead, rollout_lookahead=0).correction == on_policy.correction
    assert copied(ahead, loss_type="sapo").correction.weights == "bounded"
    assert copied(ahead, rollout_lookahead=0, vllm_importance_sampling_correction=False).correction is None
    chosen = training(use_vllm=True, rollout_lookahead=2, vllm_importance_sampling_mode="token_mask")
    assert copied(chosen, rollout_lookahead=0).correction.mode == "token_mask"
    chosen = training(use_vllm=True, rollout_lookahead=2, vllm_importance_sampling_mode="token_truncate")
    assert copied(chosen).correction.weights == "bounded"  # although the value is the default's


def test_trackers_and_yaml_get_values_that_they_know(tmp_path):
    """No type of the package is among the settings, so that a file of them is read without it."""
    config = training(use_vllm=True, rollout_lookahead=2)
    for settings in (vars(config), dataclasses.asdict(config)):
        flat = {name: value for name, value in settings.items() if isinstance(value, int | float | str | None)}
        assert not [value for value in flat.values() if type(value).__module__.startswith("salesrl_trl")]
        yaml.safe_dump({name: value for name, value in flat.items() if not isinstance(value, Enum)})
    tracker = Accelerator(log_with="tensorboard", project_dir=tmp_path, cpu=True)
    tracker.init_trackers("run", config={name: value for name, value in flat.items() if value is not None})
    tracker.end_training()
    [written] = tmp_path.rglob("*.yml")
    assert "salesrl_trl" not in written.read_text()


def test_a_correction_is_read_from_a_mapping_or_json_and_refused_without_vllms():
    given = {"weights": "none", "reject": {"seq_mean_k3": 0.01}}
    for each in (given, json.dumps(given)):
        correction = training(use_vllm=True, rollout_correction=each).correction
        assert (correction.weights, correction.reject) == ("none", {"seq_mean_k3": (-math.inf, 0.01)})
    with pytest.raises(ConfigError, match="which disables it"):
        training(use_vllm=True, vllm_importance_sampling_correction=False, rollout_correction=given)
    with pytest.raises(ConfigError, match="multiplied over a completion"):
        training(use_vllm=True, vllm_importance_sampling_mode="token_mask", top_p=0.8, rollout_correction=given)
    for wrong, words in (
        ({"weights": "clipped"}, "Expected one of: bounded, normalized, none, bypass"),
        ({"reject": {"seq_mean_k4": 1}}, "Did you mean 'seq_mean_k3'"),
        ({"reject": {"seq_mean_k1": 0.5}}, "Expected two ratios"),
    ):
        with pytest.raises(ConfigError, match=words):
            training(use_vllm=True, rollout_correction=wrong)


@pytest.mark.parametrize("given", [{"weights": "normalized"}, {"reject": {"token_k3": 0.1}}], ids=str)
def test_weights_of_single_tokens_are_refused_with_a_loss_that_multiplies_them(given):
    of_tokens = {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate", "loss_type": "vespo"}
    with pytest.raises(ConfigError, match="Expected `seq_` rejections, or another loss"):
        correction_of(training(**of_tokens, rollout_correction=given), None)
    correction_of(training(**of_tokens | {"loss_type": "cispo"}, rollout_correction=given), None)
    assert correction_of(training(**of_tokens, rollout_correction={"reject": {"seq_mean_k3": 0.1}}), None) is not None


@pytest.mark.parametrize(
    ("name", "value"), [("max", 0), ("max", -3.0), ("max", math.nan), ("max", "2"), ("min", -1.0)], ids=str
)
def test_bounds_of_weights_that_turn_the_loss_around_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"`vllm_importance_sampling_clip_{name}` is {value!r}. Expected a number"):
        training(use_vllm=True, **{f"vllm_importance_sampling_clip_{name}": value})


def test_a_temperature_alone_reshapes_nothing():
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "generation_kwargs": {"top_k": -1, "seed": 7, "stop": ["x"]}}
    config = training(use_vllm=True, rollout_lookahead=2, temperature=0.6, **neutral)
    assert reshaped_sampling(config) == []


PROVIDER = {"name": "a", "base_url": "http://judge/v1", "model": "m"}
PRICED = {**PROVIDER, "usd_per_million_prompt_tokens": 1.0}


@pytest.mark.parametrize(
    ("config", "kwargs", "message"),
    [
        (RewardConfig, {"action_fields": []}, "Expected at least one name"),
        (RewardConfig, {"action_fields": ["a", "a"]}, "each name once"),
        (RewardConfig, {"action_fields": ["query", "top_k"]}, "names top_k. Expected letters"),
        (RewardConfig, {"max_attempts": 0}, "`max_attempts`"),
        (RewardConfig, {"verbose": ["rags"]}, "`verbose` names 'rags'. Expected some of: completions, rag, scoring"),
        (RewardConfig, {"max_attempts": 1.5}, "`max_attempts` is 1.5. Expected a whole number"),
        (RewardConfig, {"max_attempts": '{"judges": 1}'}, "`max_attempts` has an unknown 'judges'. Did you"),
        (RewardConfig, {"max_usd": 1.0}, "no judge has a price. Set `usd_per_million_prompt_tokens`"),
        (RewardConfig, {"judge_providers": [{**PROVIDER, "max_usd": 1.0}]}, "is set without a price"),
        (RewardConfig, {"judge_providers": [{**PRICED, "max_usd": float("nan")}]}, r"\[a\].max_usd` is nan"),
        (RewardConfig, {"max_usd": float("inf"), "judge_providers": [PRICED]}, "`max_usd` is inf"),
        (RewardConfig, {"max_calls": 9, "reward_funcs": ["my.function"]}, "`sales`, `judge` or the tool `search`"),
        (SalesGRPOConfig, {"vllm_server_base_url": "http://user:pw@vllm"}, "`vllm_server_base_url` holds credentials"),
        (TelemetryConfig, {"trace_steps": "5"}, "`trace_steps` is '5'. Expected FIRST:LAST"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(config, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        config(**kwargs)


CLASSES = (
    *((kind, {}) for kind in (RewardConfig, TelemetryConfig, DataConfig, SalesGRPOConfig, RagSettings, KLSettings)),
    *((kind, {}) for kind in (JudgeModeSettings, RecordSettings)),
    (JudgeProviderConfig, PROVIDER),
)
WRONG = {int: (1.5, True, "2"), float: (True, "0.5"), bool: (1, "false")}


def wrong_values(hint):
    kinds = typing.get_args(hint) if typing.get_origin(hint) is UnionType else (hint,)
    plain, *limits = typing.get_args(kinds[0]) if typing.get_origin(kinds[0]) is typing.Annotated else kinds[:1]
    if str not in kinds:
        yield from ((value, "a whole number|a number|true or false") for value in WRONG.get(plain, ()))
    for limit in limits:
        if isinstance(limit, Range):
            outside = [limit.least - 1] * (limit.least > -1e9) + [limit.most + 1] * (limit.most < 1e9)
            yield from ((plain(value), re.escape(f"a number, {limit.text}")) for value in outside)
        elif isinstance(limit, tuple | dict) and plain is str:
            yield "of no such name", "one of: "


def test_a_value_that_a_type_does_not_allow_is_refused_with_what_is_expected():
    """Half a verdict would be one or none, and each text is a true switch."""
    seen = 0
    for kind, given in CLASSES:
        for name, hint in inspect.get_annotations(kind).items():
            for value, expected in wrong_values(hint):
                seen += 1
                with pytest.raises(ConfigError, match=rf"{name}` is {re.escape(repr(value))}\. Expected ({expected})"):
                    checked(kind, **given, **{name: value})
    assert seen > 120


def checked(kind, **given):
    return kind(**given) if kind.__name__.endswith("Config") else entry_of("setting", kind, given)


@pytest.mark.parametrize(
    "address",
    ["user:sk-1@host", "http://user:sk-1@host", "http://user:sk-1/@host", "http://sk-1:x/v1",
     "http://user:sk-1%40host", "http://host/v1?key=sk-1", "sk-1"],
)  # fmt: skip
def test_an_address_that_is_refused_is_not_shown(address):
    for setting in (
        {"rag_base_url": address},
        {"judge_base_url": address},
        {"judge_providers": [{**PROVIDER, "base_url": address}]},
        {"judge_providers": [{**PROVIDER, "name": f"{address} "}]},
    ):
        with pytest.raises(ConfigError) as caught:
            RewardConfig(**setting)
        assert "sk-1" not in str(caught.value)


@pytest.mark.parametrize(("text", "inside"), [("1:8", [1, 6, 7, 8]), ("100:", [100, 10**9]), ("7:7", [7]), ("", [])])
def test_the_steps_of_a_trace(text, inside):
    steps = TelemetryConfig(trace_steps=text).traced_steps()
    assert [step for step in (0, 1, 6, 7, 8, 50, 51, 99, 100, 10**9) if step in steps] == inside


TWO_GENERATIONS = {"gradient_accumulation_steps": 8, "steps_per_generation": 4}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, None),
        ({"steps_per_generation": 8}, "an update uses part"),
        ({"per_device_train_batch_size": 2, "num_generations": 8}, "the batch can't be split"),
        ({"num_iterations": 2}, "`num_iterations`"),
        ({"loss_type": "bnpo"}, "`loss_type` bnpo"),
        (TWO_GENERATIONS, "`loss_type` dapo divides by the tokens"),
        ({**TWO_GENERATIONS, "loss_type": "grpo"}, None),
        ({"scale_rewards": "batch"}, "`scale_rewards: batch`"),
        ({"hybrid_reference_weight": 0.5}, "`hybrid_reference_weight`"),
        ({"hybrid_reference_weight": 0.5, "scale_rewards": "none"}, None),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "`multi_objective_aggregation`"),
        ({"top_entropy_quantile": 0.2}, "`top_entropy_quantile`"),
        ({"entropy_bonus": True}, "the entropy bonus"),
        ({"aux_loss": True}, "the router's"),
    ],
)
def test_a_hindrance_to_training_on_scored_groups_first_is_named(given, reason):
    # 4 micro-batches of 4 completions, groups of 4: a border after each
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, **given}
    losses = {name: settings.pop(name, False) for name in ("entropy_bonus", "aux_loss")}
    args = training(**settings)
    told = why_in_trls_order(args, **losses) or why_not_divisible(args)
    assert told is None if reason is None else told.startswith(reason)


@pytest.mark.parametrize(
    ("given", "note"),
    [
        ({}, []),
        ({"save_strategy": "no", "load_best_model_at_end": True}, ["load_best_model_at_end, because `save_strategy`"]),
        ({"vllm_enable_sleep_mode": True, "vllm_mode": "server"}, ["vllm_mode, vllm_enable_sleep_mode, because"]),
        ({"use_vllm": True, "vllm_server_port": 1}, ["vllm_server_port, because `vllm_mode` is colocate"]),
    ],
)
def test_settings_without_effect_are_told(given, note):
    notes = [line for line in training(**given).machine_notes if line.startswith("without effect: ")]
    assert len(notes) == len(note) and all(map(str.__contains__, notes, note))


def test_a_dotted_path_brings_what_it_names_or_what_that_returns_for_arguments():
    assert load_object("salesrl_trl.errors.ConfigError", "kl_law") is ConfigError
    assert load_object("datetime.timedelta(1, hours=2)", "kl_law") == timedelta(1, hours=2)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("datetime.timedelta(days=1", r"does not work \('\(' was never closed"),
        ("datetime.timedelta(weeks=open('x'))", r"does not work \(malformed node"),
        ("datetime.timedelta(no=1)", r"does not work .*'no'"),
        ("datetime.timedelta(1).total_seconds", r"does not work"),
    ],
)
def test_a_path_that_leads_nowhere_says_where_it_ends(path, message):
    with pytest.raises(ConfigError, match=message):
        load_object(path, "kl_law")


def test_limits_have_the_names_of_their_settings(tmp_path):
    own = {**PRICED, "max_calls": 5, "max_usd": 0.5}
    config = RewardConfig(max_calls=9, max_usd=2.0, judge_providers=[own, {**PROVIDER, "name": "b"}])
    assert config.budget(tmp_path).limits == (
        Limit(name="max_calls", kind=CALLS, most=9),
        Limit(name="max_usd", kind=USD, most=2.0),
        Limit(name="judge_providers[a].max_calls", kind=CALLS, most=5, service="judge_a"),
        Limit(name="judge_providers[a].max_usd", kind=USD, most=0.5, service="judge_a"),
    )
    assert RewardConfig().budget(tmp_path) is None
    for judge in ({**PROVIDER, "tokens_per_minute": 9}, {**PROVIDER, "requests_per_minute": 9}, PRICED):
        assert RewardConfig(judge_providers=[judge]).budget(tmp_path).limits == ()


@pytest.mark.parametrize(
    ("size", "given", "reason"),
    [
        (8, (False, False), None),
        (8, (True, False), "conversations"),
        (8, (False, True), "pictures"),
        (6, (False, False), "two processes"),
    ],
)
def test_groups_do_not_go_by_themselves_where_a_batch_is_one(size, given, reason):
    args = training()
    args.per_device_train_batch_size = size
    told = why_in_turn(args, *given)
    assert (told is None) == (reason is None)
    assert reason is None or reason in told


def test_a_source_that_can_be_none_is_refused():
    for name, source in (("dataset", ""), ("eval_dataset", ""), ("eval_dataset", {"path": ""})):
        with pytest.raises(ConfigError, match=rf"^`{name}(\.path)?` is "):
            DataConfig(**{name: source})


@pytest.mark.parametrize(
    ("variables", "message"),
    [({}, "this run is on a CPU"), ({"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, "the others' reference policies")],
)
def test_fsdp_that_would_train_something_else_is_refused(monkeypatch, variables, message):
    for name, value in {"ACCELERATE_USE_FSDP": "true", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: bool(variables))
    with pytest.raises(ConfigError, match=message):
        training(use_cpu=False)


@pytest.fixture
def card(monkeypatch):
    def have(capability, *installed):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        flash = {
            name: (lambda name=name: name in installed, *cards) for name, (_, *cards) in model_checks.FLASH.items()
        }
        monkeypatch.setattr(model_checks, "FLASH", flash)

    return have


@pytest.mark.parametrize(
    ("capability", "installed", "model", "chosen"),
    [
        ((9, 0), ("flash_attention_2", "flash_attention_3"), Qwen2Config(), "flash_attention_3"),
        ((8, 0), ("flash_attention_2", "flash_attention_3"), Qwen2Config(), "flash_attention_2"),
        ((9, 0), (), Qwen2Config(), "sdpa; scripts/install_flash_attn.sh installs"),
        ((7, 5), ("flash_attention_2",), Qwen2Config(), "sdpa; scripts/install_flash_attn.sh installs"),
        ((9, 0), ("flash_attention_2",), SimpleNamespace(), "eager; FlashAttention needs a GPU, 16 bits and"),
        (None, (), Qwen2Config(), "sdpa; FlashAttention needs a GPU, 16 bits and a supported model"),  # a CPU
    ],
)
def test_auto_takes_the_fastest_attention_that_is_there_and_says_why_it_is_no_faster_one(
    card, capability, installed, model, chosen
):
    card(capability, *installed)
    device = torch.device("cpu" if capability is None else "cuda")
    name, line = model_checks.choose_attention("auto", device, in_16_bits=capability is not None, model=model)
    assert line.startswith(f"attention: {chosen}")
    assert (name or "eager") == chosen.split(";")[0]


@pytest.mark.parametrize("asked", ["flash_attention_2", "sdpa", "eager", "me/my-kernel", None])
def test_a_named_attention_is_kept_and_none_is_left_to_transformers(card, asked):
    card((9, 0), "flash_attention_2", "flash_attention_3")
    assert model_checks.choose_attention(asked, torch.device("cuda"), in_16_bits=True, model=Qwen2Config())[0] == asked
