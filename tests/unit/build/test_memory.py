"""The estimate of memory: counted figures, activations as autograd keeps them, and every change in its direction."""

import dataclasses
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from trl import ModelConfig, get_peft_config

from benchmarks.memory import Row, estimate_of, figures_of, settings_of
from salesrl_trl.errors import ConfigError
from salesrl_trl.launch import software
from salesrl_trl.launch.checks.outcome import Findings, StageVerdict
from salesrl_trl.launch.memory import estimate as cards
from salesrl_trl.launch.memory.estimate import (
    SCORING,
    Estimate,
    Moment,
    advice,
    estimate,
    moment_bytes,
    saved_activations,
)
from salesrl_trl.launch.memory.shape import (
    Engine,
    Setup,
    Sharding,
    adapters_of,
    model_shape,
    parameter_count,
    setup_of,
    shape_of,
)
from salesrl_trl.launch.plan import Plan
from salesrl_trl.launch.preflight import memory
from salesrl_trl.launch.settings import parse
from salesrl_trl.telemetry.device import GIB
from salesrl_trl.update.weights import spare_casts

ROOT = Path(__file__).parents[3]
PASSED, NOTED, FAILED, SKIPPED = StageVerdict
LORA = ModelConfig(use_peft=True, lora_r=8, lora_dropout=0.0, lora_target_modules=["q_proj", "v_proj"])
WIDTHS = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
SEVEN = {"vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
         "num_attention_heads": 28, "num_key_value_heads": 4}  # fmt: skip


MIXED = {"num_experts_per_tok": 2, "num_experts": 8, "moe_intermediate_size": 80, "head_dim": 16}
DENSE = Qwen2Config(**WIDTHS)
MIXTURES = (
    Qwen2MoeConfig(**WIDTHS, **MIXED, shared_expert_intermediate_size=96),
    Qwen3MoeConfig(**WIDTHS, **MIXED),
    MixtralConfig(**WIDTHS, num_local_experts=8),
)


def shape_with_adapters(config):
    with torch.device("meta"):
        plain, adapted = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    return dataclasses.replace(shape_of(plain), adapters=adapters_of(adapted, LORA))


def setup(**given):
    settings = {
        "micro_batch": 8, "micro_batches": 8, "rollouts": 64, "prompt_tokens": 512, "completion_tokens": 512,
        "checkpointing": True, "weight_bytes": 2, "autocast": True, "optim": "adamw_torch_fused", "lora": True,
        "lora_dropout": False, "has_reference": True,
    }  # fmt: skip
    return Setup(**{**settings, **given})


FULL = setup(lora=False, weight_bytes=4)
ENGINE = Engine(share=0.6, sleeps=False, number_bytes=2, processes=1, length=1024)


@pytest.fixture(scope="module")
def seven():
    return shape_with_adapters(Qwen2Config(**SEVEN))


@pytest.mark.parametrize("lora", [True, False], ids=["LoRA", "all weights"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("config", [DENSE, *MIXTURES], ids=lambda config: config.model_type)
def test_activations_are_what_autograd_keeps(lora, dtype, config):
    model, shape = AutoModelForCausalLM.from_config(config, dtype=dtype), shape_with_adapters(config)
    if lora:
        from peft import get_peft_model

        adapted = get_peft_model(model, get_peft_config(LORA))
        adapted.enable_input_require_grads()
        spare_casts(adapted, "cpu")
    kept, parameters = {}, {each.untyped_storage().data_ptr() for each in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address comes twice
        return tensor

    ids, mask = torch.arange(192).reshape(4, 48), torch.ones(4, 48, dtype=torch.long)
    mask[0, :5] = 0
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        model.train().model(input_ids=ids, attention_mask=mask, use_cache=False)
    run = setup(
        micro_batch=4, prompt_tokens=16, completion_tokens=32, weight_bytes=dtype.itemsize, lora=lora,
        checkpointing=False,
    )  # fmt: skip
    copies = 2 * shape.linear if dtype == torch.float32 else 0  # of autocast
    to_the_loss = run.tokens * shape.hidden * run.weight_bytes  # which is not computed here
    found = saved_activations(shape, run) + copies - to_the_loss
    # what an adapter itself computes is not counted: its rank is an eighth of this model's width
    rel = 0.03 if config is DENSE else 0.07
    assert sum(size for size, _ in kept.values()) == pytest.approx(found, rel=rel)


def test_a_model_s_size_is_one_process_s_to_find_out(tiny, monkeypatch):
    """Under ZeRO-3 transformers splits each model over all processes as it is built, which waits for the others. The
    banner is written by one. Here there is no process group: splitting would raise."""
    expected = sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(tiny).parameters())
    monkeypatch.setattr("transformers.modeling_utils.is_deepspeed_zero3_enabled", lambda: True)
    model_shape.cache_clear()
    assert parameter_count(str(tiny), None, False) == expected


@pytest.mark.parametrize(
    ("run", "part", "each"),
    [
        (FULL, "weights", 4),
        (FULL, "gradients", 4),
        (FULL, "optimizer states", 8),
        (FULL, "reference model", 4),
        (setup(lora=False, optim="adamw_torch_8bit"), "optimizer states", 2 + 1 / 32),
        (dataclasses.replace(FULL, processes=2), "gradients", 8),  # DDP's buckets
        (setup(lora=False, sharding=Sharding.ZERO2, processes=4), "master weights", 1),
        (setup(lora=False, sharding=Sharding.ZERO2, processes=4), "optimizer states", 2),
        (setup(lora=False, sharding=Sharding.ZERO3, processes=4), "weights", 0.5),
        (setup(lora=False, sharding=Sharding.ZERO3, processes=4), "reference model", 0.5),
        (dataclasses.replace(FULL, sharding=Sharding.FSDP, processes=4), "weights", 1),
    ],
)
def test_states_are_so_many_bytes_a_parameter(seven, run, part, each):
    [moment] = [moment for moment in estimate(seven, run, 80.0).moments if moment.name == "optimizer step"]
    assert moment.parts[part] * GIB == pytest.approx(seven.parameters * each, rel=1e-3)


def test_vllm_has_its_share_and_gives_it_back_asleep(seven):
    engine = Engine(share=0.5, sleeps=False, number_bytes=2, processes=1, length=1024)
    alone, beside = estimate(seven, setup(), 80.0), estimate(seven, setup(engine=engine), 80.0)
    asleep = estimate(seven, setup(engine=dataclasses.replace(engine, sleeps=True)), 80.0)
    [generation] = [moment.parts for moment in beside.moments if moment.name == "generation"]
    assert sum(gib for part, gib in generation.items() if part.startswith("vLLM")) == pytest.approx(40.0)
    assert asleep.peak.total_gib == pytest.approx(max(alone.needed_gib, sum(generation.values())))
    # 28 layers x 2 x 512 numbers x 2 bytes = 56 KiB a token
    assert beside.sequences == pytest.approx(generation["vLLM KV cache"] * GIB / (1024 * 56 * 1024), rel=1e-3)
    tight = estimate(seven, setup(engine=dataclasses.replace(engine, share=0.15)), 80.0)
    assert not tight.starts_engine
    assert not tight.fits


@pytest.mark.parametrize(
    ("run", "card_gib", "first"),
    [
        (dataclasses.replace(FULL, checkpointing=False, engine=ENGINE), 80.0, "`gradient_checkpointing: true`"),
        (
            setup(micro_batch=1, engine=dataclasses.replace(ENGINE, sleeps=True)),
            20.0,
            "`vllm_gpu_memory_utilization: ",
        ),
        # Of 37.25 GiB, 0.35 are 13.0, and the weights in 16 bits are 14.2. Eight completions of 4096 tokens of 56 KiB
        # are 1.75 more, and vLLM's batch works in 0.7: 16.7 GiB, which 0.45 has.
        (setup(micro_batch=1, engine=dataclasses.replace(ENGINE, share=0.35, length=4096)), 37.25, "ion: 0.45`"),
        (setup(micro_batch=1, evaluated=64), 17.0, "`per_device_eval_batch_size: "),
        (
            setup(**{"group": 8, "parameters": 10**10}, checkpointing=False, pass_tokens=20_000),
            80.0,
            "shared_prompts: 1",
        ),
        (dataclasses.replace(FULL, micro_batch=1), 80.0, "`optim: adamw_torch_8bit`"),
        (dataclasses.replace(FULL, micro_batch=1, weight_bytes=2), 60.0, "`use_peft: true`"),
        (
            dataclasses.replace(FULL, micro_batch=1, weight_bytes=2, sharding=Sharding.ZERO2, processes=8),
            40.0,
            "use_p",
        ),
    ],
    ids=["activations", "generation", "no start", "evaluation", "long passes", "states", "states in 16 bits", "ZeRO"],
)
def test_advice_begins_with_what_helps_at_the_fullest_moment(seven, run, card_gib, first):
    assert not estimate(seven, run, card_gib).fits
    steps = advice(seven, run, card_gib)
    assert first in steps[0]
    given = " ".join(steps)
    for is_on, setting in (
        (run.checkpointing, "gradient_checkpointing"), (run.lora, "use_peft"), (run.lora, "adamw_torch_8bit"),
        (run.engine is None, "vllm_"), (run.group is None, "shared_prompts"), (run.evaluated < 2, "eval_batch_size"),
        (run.micro_batch == 1, "per_device_train_batch_size"), (run.sharding.level >= 2, "ZeRO-2"),
    ):  # fmt: skip
        assert not (is_on and setting in given)


def test_advice_ends_where_it_fits_or_says_that_nothing_is_enough(seven):
    assert advice(seven, setup(), 10.0)[-1] == "more cards or a larger one, or a smaller model"
    batch, fits = advice(seven, dataclasses.replace(FULL, lora=True, weight_bytes=2), 18.5)
    assert batch.startswith("`per_device_train_batch_size: ") and fits.startswith("then about 1")


def test_a_7b_with_lora_fits_a_card_of_40_gb_as_its_preset_is(seven):
    engine = Engine(share=0.5, sleeps=True, number_bytes=2, processes=1, length=2048)
    run = setup(micro_batch=4, micro_batches=12, rollouts=48, prompt_tokens=1792, completion_tokens=256, engine=engine)
    assert estimate(seven, run, cards.named_card("40gb").gib).fits


SHARED = {"group": 8, "parameters": 10**10, "prompt_tokens": 1024, "completion_tokens": 256}


@pytest.mark.parametrize(
    ("given", "tokens", "scored"),
    [
        ({"group": None}, 8 * 1280, 0),
        ({}, 8 * 1280, 16_384),  # as TRL's own
        ({"parameters": 10**11}, 1024 + 8 * 256, 16_384),  # two of them are far more than fill a GPU
        ({"parameters": 10**8, "checkpointing": False}, 8 * 1280, 16_384),  # no more than TRL's own
        ({"parameters": 10**8}, 16_384, 16_384),  # where a token takes little memory
        ({"parameters": 10**8, "weight_bytes": 4, "autocast": False}, 8 * 1280, 16_384),
        ({"pass_tokens": 1}, 1024 + 8 * 256, 1024 + 8 * 256),
        ({"pass_tokens": 10**6, "sharding": Sharding.ZERO3}, 1024 + 8 * 256, 8 * (1024 + 8 * 256)),
        ({"has_reference": False}, 8 * 1280, 0),
    ],
)
def test_a_pass_has_as_many_tokens_as_its_settings_say(seven, given, tokens, scored):
    run = setup(**{**SHARED, **given})
    assert (run.tokens, run.scored_tokens) == (tokens, scored)


def test_the_settings_of_a_run_say_whether_prompts_are_shared(tmp_path):
    def group(**given):
        row = Row("tiny", lora=True, shared=True)
        args, model = settings_of(dataclasses.replace(row, **given), torch.device("cpu"), tmp_path)
        return setup_of(args, model, figures_of("tiny", model), 100, dtype="float32").group

    assert group() == 8
    assert [group(shared=False), group(attention="eager"), group(compiled=True)] == [None] * 3


@pytest.fixture
def stage(tiny, monkeypatch, tmp_path):
    """Runs the stage `memory` for a card of 80 GiB, with an estimate and a driver that say what the test wants."""

    def run(needed_gib, *, used_gib=0.0, sequences=None, arguments=()):
        def weighed(shape, setup, card_gib):
            moments = (Moment(name="optimizer step", parts={"weights": needed_gib}),)
            return Estimate(card_gib=card_gib, moments=moments, sequences=sequences)

        rows = {"query-gpu": f"{used_gib * 1024}", "query-compute": f"{used_gib * 1024}, 41, python"}
        monkeypatch.setattr(f"{cards.__name__}.estimate", weighed)
        monkeypatch.setattr(f"{cards.__name__}.card_here", lambda device: cards.Card("a card", 80.0, "GPU-1"))

        def ask(command, **_):
            said = next(rows[name] for name in rows if any(name in word for word in command))
            return SimpleNamespace(returncode=0, stdout=said)

        monkeypatch.setattr(software.subprocess, "run", ask)
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
        ({"needed_gib": 84}, NOTED, "takes about 84.0 GiB (optimizer step), and the card has 80.0. The run"),
        ({"needed_gib": 90}, FAILED, "takes about 90.0 GiB (optimizer step), and the card has 80.0."),
        ({"needed_gib": 90, "arguments": ("--use_peft", "false")}, NOTED, "It is tried all the same, because `dtype`"),
        ({"needed_gib": 60, "sequences": 0.5}, FAILED, "room for 0.5 completions of full length"),
        ({"needed_gib": 60, "used_gib": 40}, FAILED, "40.0 are in use now, by python (41) 40.0 GiB"),
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

    monkeypatch.setattr("salesrl_trl.launch.memory.shape.empty_model", other_kind)
    model_shape.cache_clear()
    found = stage(60)
    model_shape.cache_clear()
    assert found.verdict is SKIPPED
    assert "mamba has no number for num_attention_heads" in found.skipped


@pytest.mark.parametrize(
    ("said", "used", "names"),
    [
        ("[N/A]", None, []),
        (subprocess.TimeoutExpired("nvidia-smi", 20), None, []),
        ("1024", 1.0, ["tool, with a comma"]),
    ],
)
def test_a_driver_that_does_not_say_what_is_used_ends_no_run(monkeypatch, said, used, names):
    def ask(command, **_):
        if isinstance(said, Exception):
            raise said
        return SimpleNamespace(returncode=0, stdout=said if "memory.used" in command[2] else f"{said}, 7, {names}")

    names = names[0] if names else ""
    monkeypatch.setattr(software.subprocess, "run", ask)
    card = cards.Card("a card", 80.0, "GPU-1")
    assert cards.used_gib(card) == used
    assert cards.users(card) == (f"{names} (7) 1.0 GiB" if names else "")


def test_vllm_wants_room_for_its_own_longest_completion(tiny, tmp_path):
    given = ["--model_name_or_path", str(tiny), "--prompt_template", "compact", "--output_dir", str(tmp_path)]
    plan = Plan(parse(["--use_vllm", "true", *given], None))
    positions = AutoConfig.from_pretrained(tiny).max_position_embeddings
    assert memory.Scales(plan, 80.0, prompt_tokens=8).setup(None).engine.length == positions
    plan.config.training.vllm_max_model_length = 128
    assert memory.Scales(plan, 80.0, prompt_tokens=8).setup(None).engine.length == 128


@pytest.mark.parametrize(
    ("optim", "each"),
    [
        ("adamw_torch_4bit", 1 + 1 / 32), ("adafactor", 0), ("rmsprop", 4), ("rmsprop_bnb_8bit", 1 + 1 / 32),
        ("paged_lion_32bit", 4), ("ademamix", 12), ("paged_ademamix_32bit", 12), ("paged_ademamix_8bit", 3 + 1 / 32),
    ],
)  # fmt: skip
def test_an_optimizer_has_so_many_moments_of_so_many_bits(optim, each):
    assert moment_bytes(optim, 4) == each


def test_an_evaluation_has_the_log_probs_of_its_own_batch(seven):
    run = setup(micro_batch=1, evaluated=64, completion_tokens=512)
    parts = {moment.name: moment.parts["log-probs of the loss"] * GIB for moment in estimate(seven, run, 80.0).moments
             if "log-probs of the loss" in moment.parts}  # fmt: skip
    assert parts[SCORING] == 4096 * 32_768 * 2  # 64 x 512 tokens in tiles of 4096


@pytest.mark.parametrize(
    ("row", "used_gib"),
    [
        (Row("0.5b", lora=True), 3.66),
        (Row("0.5b", lora=True, checkpointing=False), 18.77),
        (Row("0.5b", lora=True, attention="eager"), 5.83),
        (Row("0.5b", lora=False, dtype="float32"), 14.37),
        (Row("0.5b", lora=False, dtype="float32", checkpointing=False), 35.81),
        (Row("0.5b", lora=False, dtype="float32", bf16_passes=False), 15.79),
        (Row("1.5b", lora=True), 5.63),
        (Row("1.5b", lora=False, dtype="float32"), 35.69),
        (Row("7b", lora=True), 17.04),
        (Row("7b", lora=True, checkpointing=False), 33.97),
        (Row("7b", lora=True, attention="eager"), 18.03),
        (Row("7b", lora=False, dtype="float32", reference=False), 131.74),
    ],
    ids=lambda each: each.name if isinstance(each, Row) else "",
)
def test_an_estimate_is_within_ten_percent_of_what_an_h200_used(row, used_gib, tmp_path):
    args, model = settings_of(row, torch.device("cpu"), tmp_path)
    args.bf16 = row.bf16_passes  # a CPU's settings have none
    assert estimate_of(row, args, model, 140.0).needed_gib == pytest.approx(used_gib, rel=0.1)


# The number format of the weights in training, by the memory that is free.


def weigh_on(card_gib, *, exact_gib, rounded_gib):
    """An estimate by figures alone: for float32 weights, and for stochastic rounding."""

    def weigh(dtype, optim):
        gib = {"float32": exact_gib, "bfloat16": rounded_gib}[dtype]
        return Estimate(card_gib=card_gib, moments=(Moment(name="x", parts={"weights": gib}),), sequences=None)

    return weigh


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


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"weigh": LARGE}, r"LoRA .*DeepSpeed .*`pip install torchao`.*`dtype: float32`.*check_gpu_memory"),
        ({"weigh": LARGE, "dtype": "float16", "has_torchao": True}, "`dtype: bfloat16`, for which torchao"),
        ({"weigh": weigh_on(140.0, exact_gib=197.0, rounded_gib=150.0)}, r"full.yaml\); or `dtype: float32`"),
    ],
)
def test_where_nothing_fits_it_says_what_was_got_and_what_helps(settle, given, remedy):
    with pytest.raises(ConfigError, match=rf"in float32 takes about 197 GiB, .* and the card has 140.*{remedy}"):
        settle(**given)
