"""What the project was asked for, row by row, and what shows each: every setting, command, script, metric, recipe and
test named here is there.

The rows are those of the four systems that the project began from. A row whose command or test goes is a row that is
lost: whoever moves one changes its entry here, and gives the old word a line in `build/coming_from.yaml`.
"""

import subprocess
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from salesrl_trl.__main__ import COMMANDS
from salesrl_trl.ground.command_line import parser_of
from salesrl_trl.launch.coming_from import answer
from salesrl_trl.launch.presets import FOLDER as PRESETS
from salesrl_trl.launch.settings_help import settings
from salesrl_trl.names import FIGURES

ROOT = Path(__file__).parents[2]
Check = Callable[[], bool]


def there(path: str) -> bool:
    """A file; with `::NAME`, a test of it."""
    file, _, test = path.partition("::")
    return (ROOT / file).is_file() and (not test or f"def {test}(" in (ROOT / file).read_text("utf-8"))


def setting(name: str) -> bool:
    """A setting of this package, of TRL or of transformers."""
    return name in every_setting()


@cache
def every_setting() -> set[str]:
    from peft import LoraConfig  # noqa: F401  (ModelConfig has its settings)
    from trl import GRPOConfig, ModelConfig

    return settings().keys() | {*GRPOConfig.__dataclass_fields__, *ModelConfig.__dataclass_fields__}


def command(name: str, option: str = "--help") -> bool:
    """`salesrl NAME` with this option."""
    is_there = name in COMMANDS and find_spec(COMMANDS[name][0]) is not None
    return is_there and (option == "--help" or option in parser_of(name).format_help())


def metric(tag: str) -> bool:
    return tag in {figure.tag for figure in FIGURES}


def recipe(name: str, key: str, value: object = ...) -> bool:
    """A recipe or preset that sets a setting, to this value where one is given."""
    file = next(file for file in (ROOT / f"recipes/{name}.yaml", PRESETS / f"{name}.yaml") if file.is_file())
    found = yaml.safe_load(file.read_text("utf-8"))
    found |= found.get("sales_chain") or {}
    return key in found and (value is ... or found[key] == value)


def word(name: str, leads_to: str, value: object = None) -> bool:
    """A name of another system, or of earlier versions, that is answered."""
    return leads_to in answer(name, value, {})


def says(path: str, *texts: str) -> bool:
    text = " ".join((ROOT / path).read_text("utf-8").split())
    return all(each in text for each in texts)


def is_script(path: str) -> bool:
    """A script that the shell or Python can read."""
    file = ROOT / path
    if file.suffix == ".py":
        compile(file.read_text("utf-8"), path, "exec")
        return True
    return subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0


def of(check: Callable[..., bool], *entries: object) -> list[Check]:
    """The check of each entry: its argument, or a tuple of its arguments."""
    return [partial(check, *(entry if isinstance(entry, tuple) else (entry,))) for entry in entries]


CACHED = ("enable_prefix_caching", "enable_chunked_prefill")
CARDS = ("24gb", "40gb", "80gb", "141gb")
LOADER = ("dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_pin_memory")
ROWS: dict[str, list[Check]] = {
    "1": of(there, "tests/unit/test_timing.py"),
    "2": of(is_script, "scripts/test_rag_endpoints.py")
    + of(setting, "rag.base_url", "rag.top_k", "rag.score_threshold")
    + of(word, *((f"rag_{name}", f"rag.{name}") for name in ("base_url", "top_k", "score_threshold")))
    + of(there, "tests/unit/scripts/test_rag_tools.py"),
    "3": of(there, "tests/faults/test_chain_faults.py")
    + of(says, ("salesrl_trl/reward/batch.py", '"scoring"')),
    "4": of(setting, "num_generations", "temperature", "vllm_gpu_memory_utilization"),
    "5, 6": of(is_script, "scripts/test_rag_endpoints.py", "scripts/simulate_training_rewards.py")
    + of(says, ("scripts/test_rag_endpoints.py", "--quick")),
    "7": of(command, ("env", "--diff")) + of(there, "tests/unit/run/test_run_record.py"),
    "8": of(setting, "warm_up_services") + of(says, ("salesrl_trl/reward/reward_loop.py", "[WarmUp]")),
    "9": of(there, "tests/unit/telemetry/test_step_lines.py", "tests/unit/telemetry/test_heartbeat.py"),
    "10, 54": of(is_script, "scripts/create_tiny_dataset.py")
    + of(says, ("scripts/create_tiny_dataset.py", "--by_branch"))
    + of(word, ("data_copy_dir", "copy the file to the faster disk")),
    "11, 12": of(setting, "verbose", "held_out_eval", "quick_eval_steps")
    + of(says, ("salesrl_trl/reward/batch.py", '"rag"', '"completions"')),
    "13": of(recipe, ("hybrid", "hybrid_reference_weight", 0.3))
    + of(there, "tests/integration/test_hybrid_baseline.py"),
    "14": of(recipe, ("fast_load", "vllm_engine_kwargs", dict.fromkeys(CACHED, True)))
    + of(there, "tests/unit/config/test_engine.py::test_prefix_caching_and_chunked_prefill_arrive_in_the_engine")
    + of(word, *((f"vllm_{name}", "vllm_engine_kwargs") for name in (*CACHED, "load_format"))),
    "15, 50": of(says, ("salesrl_trl/launch/checks/environment.py", "shm")) + of(command, ("preflight", "--stage")),
    "16": of(is_script, "scripts/test_components.py")
    + of(there, "tests/unit/test_layering.py::test_modules_do_not_drag_in_what_they_do_not_need"),
    "17, 23": of(command, "preflight") + of(setting, "mode") + of(word, ("total_epochs", "mode: rollouts", 0)),
    "18, 19, 20": of(there, "recipes/debug.yaml", "recipes/fast_load.yaml", "benchmarks/start.py")
    + of(is_script, "scripts/warmup_model.py"),
    "21": of(there, "salesrl_trl/launch/catalogue.toml", "tests/unit/run/test_last_words.py"),
    "22": of(recipe, ("vision", "dataset")) + of(there, "tests/integration/test_pictures.py"),
    "24, 25, 26": of(recipe, ("dual", "branch_kl"))
    + of(there, "tests/unit/kl/test_penalty.py", "tests/unit/kl/test_branched.py")
    + of(metric, "kl/{branch}_in_band", "kl/{branch}_clamped"),
    "27": of(says, ("salesrl_trl/launch/banner.py", "end tokens")),
    "28": of(recipe, ("fast_rollout", "judge_timeout_s", 6), ("fast_rollout", "max_attempts")),
    "29, 30": of(there, "tests/unit/evaluation/test_quick.py", "tests/unit/evaluation/test_quick_record.py")
    + of(says, ("salesrl_trl/launch/evaluation/quick_record.py", "[QuickEval@", "[Pareto@")),
    "31, 32": of(recipe, ("full", "torch_compile")) + of(is_script, "scripts/install_flash_attn.sh"),
    "33, 34, 49": of(is_script, "scripts/check_gpu_memory.py")
    + of(recipe, *((name, "vllm_gpu_memory_utilization") for name in CARDS)),
    "35, N9": of(command, ("env", "--has"))
    + of(there, "tests/unit/ground/test_own_code.py")
    + of(says, ("salesrl_trl/launch/banner.py", "salesrl_trl {code()}"))
    + of(says, ("salesrl_trl/trainer.py", "warn_of_changes()")),
    "36-38": of(there, "tests/invariance/test_settings.py")
    + of(recipe, ("full", "gradient_checkpointing"), ("full", "torch_empty_cache_steps"), ("full", LOADER[0]))
    + of(setting, "bf16", *LOADER),
    "39, 40, N6": of(metric, "perf/mfu_model", "perf/mfu_step", "perf/compute_ratio", "perf/data_loading_ratio")
    + of(metric, "memory/gpu_peak_gib")
    + of(says, ("docs/reference/timing.md", "`epoch_totals/`", "`perf/compute_ratio`", "`memory/*`")),
    "41-43": of(setting, "resume_from_checkpoint", "quick_eval_best", "max_attempts")
    + of(there, "tests/invariance/test_resume.py", "tests/faults/test_sigterm.py"),
    "44, 56": of(there, "accelerate_configs/fsdp2.yaml", "accelerate_configs/zero3.yaml")
    + of(there, "tests/integration/test_launch.py"),
    "45": of(says, ("README.md", "batch size by memory", "pipeline parallel")),
    "46-48": of(there, "tests/unit/data/test_lengths.py", "tests/unit/build/test_banner.py")
    + of(setting, "log_level"),
    "51-53, 55": of(is_script, "scripts/supervise.sh")
    + of(there, "scripts/supervise.slurm", "scripts/supervise.service", "docs/how-to/look-at-completions.md")
    + of(says, ("docs/how-to/stop-and-resume.md", "tmux", "nohup"), ("docs/how-to/look-at-completions.md", "wandb")),
    "N1": of(
        word,
        ("actor_rollout_ref.rollout.load_format", "load_format: safetensors", "safetensors"),
        ("data.dataloader_num_workers", "dataloader_num_workers: 4", 4),
        ("algorithm.hybrid_grpo.weight", "hybrid_reference_weight: 0.5", 0.5),
        ("algorithm.hybrid_grpo.enable", "hybrid_reference_weight", True),
        ("debug.anything", "recipes/debug.yaml"),
        ("USE_TORCH_COMPILE", "torch_compile: true", True),
        ("PARETO_PRINT_SAMPLES", "quick_eval_rows: 8", 8),
        ("gpu_log_freq", "logging_steps"),
        ("flops_profile_freq", "perf/mfu_step"),
        ("monitor.anything", "logging_steps"),
        ("training.anything", "a setting of the same name"),
        ("memory_efficient_attention", "attn_implementation"),
        ("amp", "bf16"),
        ("reward_model.reward_kwargs.overlong_buffer_cfg.len", "soft_overlong_punishment"),
    ),
    "N2-N5": of(there, "recipes/own.py", "recipes/dual.py", "examples/rag_adapter.py", "tests/seams/test_rag.py")
    + of(there, "tests/unit/test_translate.py::test_a_parquet_of_verl_is_read_with_its_system_turn_and_its_columns")
    + of(setting, "rag", "reward_funcs"),
    "N7, N8": of(says, ("README.md", "no supervised training", "Ray")),
    "N10": of(there, "tests/unit/generation/test_sampler.py"),
    "B": of(setting, "rollout_lookahead", "max_rollout_lookahead", "record", "replay", "max_usd", "hedge_fraction")
    + of(setting, "judge_meter", "judge_mode", "tools", "shared_prompts")
    + of(command, "rejudge", "view", "evaluate", "report", "translate")
    + of(there, "tests/integration/test_episodes.py", "benchmarks/log/README.md"),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_what_shows_a_row_is_there(row):
    lost = [f"{check.func.__name__}{check.args}" for check in ROWS[row] if not check()]
    assert lost == []


def test_every_row_has_something_that_shows_it():
    numbers = set[str]()
    for part in ", ".join(ROWS).split(", "):
        first, _, last = part.partition("-")
        of_news = "N" * first.startswith("N")
        span = range(int(first.lstrip("N")), int((last or first).lstrip("N")) + 1) if part != "B" else []
        numbers |= {f"{of_news}{number}" for number in span}
    assert numbers == {*map(str, range(1, 57)), *(f"N{number}" for number in range(1, 11))}
    assert all(ROWS.values())
