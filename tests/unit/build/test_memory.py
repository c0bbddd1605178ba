"""The estimate of memory against measured runs, and what the stage `memory` makes of it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM, Qwen2Config

from benchmarks.common import SHAPES
from benchmarks.memory import Row, estimate_of, figures_of, settings_of
from salesrl_trl.demo.packaged import packaged_tokenizer
from salesrl_trl.errors import ConfigError
from salesrl_trl.launch import memory_estimate, software
from salesrl_trl.launch.checks.outcome import Findings, StageVerdict
from salesrl_trl.launch.memory_estimate import Estimate, Moment, Setup, estimate, moment_bytes
from salesrl_trl.launch.plan import Plan
from salesrl_trl.launch.preflight import memory
from salesrl_trl.launch.settings import parse
from salesrl_trl.telemetry.device import GIB

ROOT = Path(__file__).parents[3]
PASSED, NOTED, FAILED, SKIPPED = StageVerdict


@pytest.fixture
def weigh(tmp_path):
    def weigh(row, card_gib=80.0, **settings):
        args, model = settings_of(row, torch.device("cpu"), tmp_path)
        args.bf16 = row.bf16_passes  # a CPU's settings have none
        for name, value in settings.items():
            setattr(args, name, value)
        setup = Setup(training=args, model=model, shape=figures_of(row.shape, model), card_gib=card_gib,
                      prompt_tokens=512, dtype=row.dtype, optim=args.optim.value)  # fmt: skip
        return estimate(setup)

    return weigh


def test_a_model_s_size_is_one_process_s_to_find_out(tiny, monkeypatch):
    """Under ZeRO-3 transformers splits each model over all processes as it is built, which waits for the others. The
    banner is written by one. Here there is no process group: splitting would raise."""
    expected = sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(tiny).parameters())
    monkeypatch.setattr("transformers.modeling_utils.is_deepspeed_zero3_enabled", lambda: True)
    assert memory_estimate.parameter_count(str(tiny), None, False) == expected


def test_vllm_has_its_share_and_gives_it_back_asleep(weigh):
    row = Row("7b", lora=True)
    engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.5,
              "vllm_max_model_length": 1024, "vllm_enable_sleep_mode": False}  # fmt: skip
    alone, beside = weigh(row), weigh(row, **engine)
    asleep = weigh(row, **{**engine, "vllm_enable_sleep_mode": True})
    [generation] = [moment.parts for moment in beside.moments if moment.name == "generation"]
    assert sum(gib for part, gib in generation.items() if part.startswith("vLLM")) == pytest.approx(40.0)
    assert asleep.needed_gib == pytest.approx(max(alone.needed_gib, sum(generation.values())))
    # 28 layers x 2 x 512 numbers x 2 bytes = 56 KiB a token
    assert beside.sequences == pytest.approx(generation["vLLM KV cache"] * GIB / (1024 * 56 * 1024), rel=1e-3)
    tight = weigh(row, **{**engine, "vllm_gpu_memory_utilization": 0.15})
    assert not tight.starts_engine and not tight.fits


@pytest.fixture
def stage(tiny, monkeypatch, tmp_path):
    def run(needed_gib, *, used_gib=0.0, sequences=None, arguments=()):
        def weighed(setup):
            parts = {"weights": needed_gib, "activations": setup.kept_gib}
            moments = (Moment(name="optimizer step", parts=parts),)
            return Estimate(card_gib=setup.card_gib, moments=moments, sequences=sequences, kept_gib=setup.kept_gib)

        monkeypatch.setattr(memory_estimate, "estimate", weighed)
        monkeypatch.setattr(software, "card_here", lambda device: software.Card("a card", 80.0, used_gib))
        given = ["--model_name_or_path", str(tiny), "--prompt_template", "compact", "--output_dir", str(tmp_path)]
        given += ["--vllm_max_model_length", "256", "--max_completion_length", "48", "--use_peft", "true"]
        findings = Findings()
        memory.check_memory(Plan(parse([*given, *arguments], ROOT / "recipes/debug.yaml")), findings)
        return findings

    return run


@pytest.mark.parametrize(
    ("asked", "verdict", "text"),
    [
        ({"needed_gib": 60}, PASSED, None),
        ({"needed_gib": 60, "arguments": ("--kept_activations_gib", "30")}, NOTED, "because 30 would not fit"),
        ({"needed_gib": 84}, NOTED, "needs about 84.0 GiB (optimizer step, ±10%); the GPU has 80.0."),
        ({"needed_gib": 90}, FAILED, "needs about 90.0 GiB (optimizer step, ±10%); the GPU has 80.0."),
        ({"needed_gib": 90, "arguments": ("--use_peft", "false")}, NOTED, "needs about 90.0 GiB"),
        ({"needed_gib": 60, "sequences": 0.5}, FAILED, "does not fit the weights and one completion of full length"),
        ({"needed_gib": 60, "used_gib": 40}, FAILED, "but 40.0 are already in use"),
    ],
)
def test_a_run_hears_whether_it_fits(stage, asked, verdict, text):
    found = stage(**asked)
    assert found.verdict is verdict
    assert text is None or text in found.items[0].text
    assert found.figures["needed_gib"] == asked["needed_gib"]


def test_no_weights_are_trained_in_mode_rollouts_so_none_have_to_fit_in_float32(stage):
    found = stage(90, arguments=("--use_peft", "false", "--dtype", "bfloat16", "--mode", "rollouts"))
    assert (found.verdict, found.items) == (SKIPPED, [])


def test_a_model_of_another_kind_has_no_estimate_and_its_run_goes_on(stage, monkeypatch):
    def other_kind(*_):
        with torch.device("meta"):
            return MambaForCausalLM(MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64))

    monkeypatch.setattr("salesrl_trl.launch.preflight.memory.empty_model", other_kind)
    assert stage(60).verdict is SKIPPED


@pytest.mark.parametrize(
    ("optim", "each"),
    [
        ("adamw_torch_8bit", 2 + 1 / 32), ("adafactor", 0), ("rmsprop", 4), ("rmsprop_bnb_8bit", 1 + 1 / 32),
        ("paged_lion_32bit", 4), ("ademamix", 12), ("paged_ademamix_32bit", 12), ("paged_ademamix_8bit", 3 + 1 / 32),
    ],
)  # fmt: skip
def test_an_optimizer_has_so_many_moments_of_so_many_bits(optim, each):
    assert moment_bytes(optim, 4) == each


def test_kept_activations_need_as_much_as_no_checkpointing_or_a_share_of_it(weigh):
    def size(compiled=False, **row):
        made = weigh(Row("7b", lora=True, **row), torch_compile=compiled)
        [moment] = [moment for moment in made.moments if "backward" in moment.name]
        return moment.parts["activations"]

    assert size(kept=99) == pytest.approx(size(checkpointing=False))
    assert size() < size(kept=2) < size(kept=8) < size(checkpointing=False)
    assert size(kept=8, compiled=True) == size()
    assert size(kept=8, attention="eager") == size(attention="eager")


def test_activations_are_kept_unless_weights_would_be_rounded_for_them(tmp_path):
    args, model = settings_of(Row("1.5b", lora=False, kept=99), torch.device("cpu"), tmp_path)
    args.bf16 = True
    setup = Setup(training=args, model=model, shape=figures_of("1.5b", model), card_gib=50.0,
                  prompt_tokens=512, dtype="float32", optim="adamw_torch_fused")  # fmt: skip
    assert not estimate(setup).fits
    exact = setup.weighed("float32", "adamw_torch_fused")
    assert exact.fits and exact.kept_gib == 0
    assert args.kept_activations_gib == 99  # another format, which is tried next, may fit with them
    assert replace(setup, card_gib=200.0).weighed("float32", "adamw_torch_fused").kept_gib == 99


def test_an_evaluation_has_its_own_batch(weigh):
    def scoring(**given):
        [moment] = [moment for moment in weigh(Row("7b", lora=True), **given).moments if "without" in moment.name]
        return moment.parts["activations"]

    small, large = (scoring(held_out_eval=True, per_device_eval_batch_size=size) for size in (64, 128))
    assert large == pytest.approx(2 * small)


@pytest.mark.parametrize(
    ("row", "used_gib"),
    [
        (Row("0.5b", lora=True), 3.66),
        (Row("0.5b", lora=True, checkpointing=False), 18.77),
        (Row("0.5b", lora=False, dtype="float32"), 14.37),
        (Row("0.5b", lora=False, dtype="float32", checkpointing=False), 35.81),
        (Row("0.5b", lora=False, dtype="float32", bf16_passes=False), 15.79),
        (Row("1.5b", lora=True), 5.63),
        (Row("1.5b", lora=False, dtype="float32"), 35.69),
        (Row("7b", lora=True), 17.04),
        (Row("7b", lora=True, checkpointing=False), 33.97),
        (Row("7b", lora=False, dtype="float32", reference=False), 131.74),
        (Row("0.5b", lora=True, attention="eager"), 5.83),
        (Row("7b", lora=True, attention="eager"), 18.03),
        (Row("0.5b", lora=True, shared=True), 3.01),
        (Row("0.5b", lora=False, dtype="float32", shared=True), 13.13),
        (Row("7b", lora=True, shared=True), 16.83),
        (Row("7b", lora=False, dtype="float32", reference=False, shared=True), 131.31),
        (Row("7b", lora=True, completion=4096), 24.79),
        (Row("7b", lora=True, completion=4096, shared=True), 26.22),
        (Row("7b", lora=True, completion=4096, batch=1), 17.72),
    ],
    ids=lambda each: f"{each.name}, {each.tokens}" if isinstance(each, Row) else "",
)
def test_an_estimate_is_within_ten_percent_of_what_an_h200_used(row, used_gib, tmp_path):
    args, model = settings_of(row, torch.device("cpu"), tmp_path)
    args.bf16 = row.bf16_passes  # a CPU's settings have none
    assert estimate_of(row, args, model, 140.0).needed_gib == pytest.approx(used_gib, rel=0.1)


@pytest.mark.parametrize(
    ("gib", "preset", "own", "found"),
    [
        (22.4, "24gb", (), "does not fit the weights and one completion of full length"),
        (22.4, "24gb", ("--use_vllm", "false"), "(passes without gradients, ±10%); the GPU has 22.4"),
        (74.5, "80gb", (), None),
    ],
)
def test_7b_with_completions_of_4096_tokens_is_refused_on_24_gb_before_it_is_loaded(
    gib, preset, own, found, tmp_path, monkeypatch
):
    Qwen2Config(**SHAPES["7b"], architectures=["Qwen2ForCausalLM"], dtype="bfloat16").save_pretrained(tmp_path)
    packaged_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(software, "card_here", lambda device: software.Card("a card", gib, 0.0))
    given = ["--model_name_or_path", str(tmp_path), "--preset", preset, "--max_completion_length", "4096"]
    given += ["--vllm_max_model_length", "8192", "--output_dir", str(tmp_path / "run"), "--bf16", "true", *own]
    findings = Findings()
    memory.check_memory(Plan(parse(given, ROOT / "recipes/full.yaml")), findings)
    assert findings.verdict is (PASSED if found is None else FAILED), findings
    assert found is None or found in findings.items[0].text


def weigh_on(card_gib, *, exact_gib, rounded_gib):
    """An estimate by figures alone: for float32 weights, and for stochastic rounding."""

    def weighed(dtype, optim):
        gib = {"float32": exact_gib, "bfloat16": rounded_gib}[dtype]
        return Estimate(card_gib=card_gib, moments=(Moment(name="x", parts={"weights": gib}),), sequences=None)

    return SimpleNamespace(weighed=weighed)


ROOMY = weigh_on(80.0, exact_gib=40.0, rounded_gib=20.0)
LARGE = weigh_on(140.0, exact_gib=197.0, rounded_gib=112.0)
ROUNDING = "bf16_stochastic_round=True"


@pytest.fixture
def settle(monkeypatch):
    """The number format, whether the optimizer was set to round, and the line for the banner."""

    def choose(weigh=ROOMY, has_torchao=False, dtype="bfloat16", lora=False, optim="adamw_torch_fused", **given):
        settings = {"bf16": True, "fp16": False, "optim_args": None, "deepspeed_plugin": None, **given}
        training = SimpleNamespace(**settings, optim=SimpleNamespace(value=optim))
        training.is_sharded = training.deepspeed_plugin is not None
        config = SimpleNamespace(model=SimpleNamespace(dtype=dtype, use_peft=lora), training=training)
        plan = SimpleNamespace(config=config, dtype=None)
        monkeypatch.setattr(memory, "is_torchao_available", lambda: has_torchao)
        note = memory.settle_precision(plan, weigh)
        return plan.dtype, training.optim_args == ROUNDING and given.get("optim_args") is None, note

    return choose


@pytest.mark.parametrize(
    ("given", "dtype", "rounds"),
    [
        ({}, "float32", False),
        ({"dtype": "auto"}, "float32", False),
        ({"dtype": "float16"}, "float32", False),
        ({"weigh": None}, "float32", False),
        ({"dtype": "float32", "weigh": LARGE}, "float32", False),  # asked for: tried
        ({"deepspeed_plugin": "ZeRO", "weigh": LARGE}, "bfloat16", False),
        ({"deepspeed_plugin": "ZeRO", "bf16": False}, "float32", False),  # a CPU
        ({"lora": True, "weigh": LARGE}, "bfloat16", False),
        ({"weigh": LARGE, "has_torchao": True}, "bfloat16", True),
        ({"has_torchao": True}, "float32", False),  # the exact one first
        ({"weigh": LARGE, "optim": "adafactor"}, "float32", False),  # what it takes is not known
        ({"weigh": LARGE, "optim": "adamw_torch_8bit", "optim_args": ROUNDING}, "bfloat16", False),
        ({"optim": "adamw_torch_8bit", "optim_args": "block_size=256"}, "float32", False),
    ],
)
def test_trained_weights_are_in_16_bits_only_where_no_update_is_lost(settle, given, dtype, rounds):
    *chosen, note = settle(**given)
    assert chosen == [dtype, rounds]
    assert (note is None) == (dtype == given.get("dtype", "bfloat16") and not rounds)  # said where it is not as set


@pytest.mark.parametrize("rounds", [True, False])
def test_where_nothing_fits_it_says_what_was_got_and_what_helps(settle, rounds):
    weigh = LARGE if rounds else weigh_on(140.0, exact_gib=197.0, rounded_gib=150.0)
    remedy = "with torchao .*" * rounds + "LoRA .*DeepSpeed .*`dtype: float32`"
    with pytest.raises(ConfigError, match=rf"in float32 needs about 197 GiB .* and the GPU has 140.*{remedy}"):
        settle(weigh)
