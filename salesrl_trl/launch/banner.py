"""The banner: lines about the parts of a run at its start, and the lines at its end."""

import os
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer

from salesrl_trl.agents.partner import Partner
from salesrl_trl.config.rollouts import why_not_partial
from salesrl_trl.demo.packaged import CASSETTE
from salesrl_trl.ground.own_code import code
from salesrl_trl.ground.process import installed
from salesrl_trl.launch.checks.dataset import template_name
from salesrl_trl.launch.checks.model import generation_config_of
from salesrl_trl.launch.checks.reward import MEANINGLESS
from salesrl_trl.launch.data.formats import ROWS
from salesrl_trl.launch.data.prompts import PROMPT_STYLES
from salesrl_trl.launch.data_config import DataConfig, DatasetSource
from salesrl_trl.launch.judge_config import PartnerSettings
from salesrl_trl.launch.memory_estimate import parameter_count
from salesrl_trl.launch.reward_config import ReplaySettings, RewardConfig
from salesrl_trl.launch.settings import RunConfig
from salesrl_trl.names import LOG_FILE
from salesrl_trl.parts.run_banner import TOGETHER, budget_text, hub_lines, record_line, shown, training_lines
from salesrl_trl.types import CUSTOMER, SalesRow

_PACKAGES = ("trl", "transformers", "torch", "accelerate", "peft", "deepspeed")


def banner(config: RunConfig, rows: Sequence[Sequence[SalesRow]], notes: Sequence[str] = ()) -> list[str]:
    """The lines of the banner. `rows`: training and held-out rows. `notes`: findings of the checks."""
    data, reward, training = config.data, config.reward, config.training
    names = (*_PACKAGES, "vllm") if training.use_vllm else _PACKAGES
    is_partial = training.use_vllm and not why_not_partial(training, bool(reward.tools), reads_pictures=False)
    partial = training.partial_rollouts if is_partial else 0.0
    budget = reward.budget(Path(training.output_dir))
    versions = [f"{name} {version}" for name in names if (version := installed(name)) is not None]
    lines = [
        *_policy(config),
        *(("rows", _rows(source, rows)) for source in data.sources),
        ("prompt", _prompt(data, reward)),
        *training_lines(training, training.max_staleness, training.refill_groups, partial),
        *(("reward", path) for path in reward.reward_funcs),
        *(("tool", path) for path in reward.tools),
        *([("partner", _partner(partner))] if (partner := reward.parsed_partner()) else []),
        *([("replay", _replay(replay))] if (replay := reward.parsed_replay()) else []),
        *([("RAG service", _rag(reward))] if reward.uses_rag else []),
        *([("judge", _judge(reward))] if reward.uses_services else []),
        *([("budget", budget_text(budget))] if budget is not None else []),
        *(("stage", stage) for stage in reward.reward_stages),
        ("devices", device_line(training.device, training.world_size)),
        ("versions", ", ".join((f"salesrl_trl {code()}", *versions, f"Python {platform.python_version()}"))),
        record_line(training),
        *hub_lines(training),
        ("output", f"{training.output_dir} ({LOG_FILE} has this output)"),
        *(("note", note) for note in notes),
    ]
    return shown(lines)


def closing_lines(output_dir: str, *, saves_policy: bool, notes: Sequence[str]) -> list[str]:
    """The last lines of a successful run. Repeats the checks' `notes` about meaningless scores."""
    saved = f"the policy is in {output_dir}; " if saves_policy else ""
    lines = [f"{saved}its metrics as a page: salesrl report {output_dir}"]
    return [f"[Run] {line}" for line in (*lines, *(note for note in notes if MEANINGLESS in note))]


def _policy(config: RunConfig) -> list[tuple[str, str]]:
    """The policy with its size, and the end tokens of the tokenizer and the generation settings."""
    model, (path, revision, trusted) = config.model, config.policy_source
    name = model.model_name_or_path or "the built-in small policy (your own: --model_name_or_path NAME)"
    trained = f"LoRA of rank {model.lora_r}" if model.use_peft else "all weights"
    size = parameter_count(*config.policy_source) / 1e6
    tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trusted)
    generation = generation_config_of(path, revision)
    ids = None if generation is None else generation.eos_token_id
    ends = dict.fromkeys([tokenizer.eos_token_id, *([ids] if isinstance(ids, int) else ids or [])])
    tokens = ", ".join(
        f"{repr(tokenizer.convert_ids_to_tokens(end))[1:-1]} ({end})" for end in ends if end is not None
    )
    return [("policy", f"{name}, {size:,.2f} M parameters; trained: {trained}"), ("end tokens", tokens)]


def _rows(source: DatasetSource, rows: Sequence[Sequence[SalesRow]]) -> str:
    """The numbers of rows of a dataset. If there are several, its name prefixes their ids."""
    name, of_format = source.name, "" if source.entry.format == ROWS else f" ({source.entry.format})"
    train, held_out = (Counter(row.row_id.partition(":")[0] if name else "" for row in part)[name] for part in rows)
    share = f" ({train / len(rows[0]):.0%})" if name else ""
    return f"{train} of {source.entry.path}{of_format} to train on{share}, {held_out} held out"


def _prompt(data: DataConfig, reward: RewardConfig) -> str:
    prompt = template_name(data, reward)
    if prompt is None or prompt in PROMPT_STYLES:
        prompt = f"{f'built-in, {prompt}' if prompt else 'of the rows'} (your own: --prompt_template FILE)"
    if not reward.uses_services:
        return prompt
    return f"{prompt}; rubrics: {f'of {reward.rubric_dir}, then built-in' if reward.rubric_dir else 'built-in'}"


def _partner(partner: PartnerSettings) -> str:
    if partner.kind != CUSTOMER:
        return f"{partner.kind}, your own" + (f", up to {partner.max_turns} turns" if partner.max_turns else "")
    how = (
        f"{partner.model} at {partner.base_url}" if partner.is_model else "by rules (a model: --partner.base_url URL)"
    )
    return f"{partner.kind}, {how}, up to {partner.max_turns or Partner.max_turns} turns"


def _rag(reward: RewardConfig) -> str:
    rag = reward.rag_service
    over = rag.knowledge_file or "the demo's course catalogue (your own: --rag.base_url http://HOST:PORT)"
    return rag.client or rag.base_url or f"embedded, over {over}"


def _judge(reward: RewardConfig) -> str:
    providers, times = reward.judges.providers, reward.judging.orders_of_groups
    orders = f"; {TOGETHER}, in {times} orders" if times else ""
    if providers:
        names = [f"{provider.name}: " if reward.judges.are_several else "" for provider in providers]
        places = [f"{provider.model} at {provider.base_url}" for provider in providers]
        return ", ".join(map("".join, zip(names, places, strict=True))) + orders
    yours = "--judge_providers.base_url http://HOST:PORT/v1 --judge_providers.model NAME"
    return (reward.judges.own or f"embedded, made for the demo (your own: {yours})") + orders


def _replay(replay: ReplaySettings) -> str:
    record = "the built-in record" if replay.run == CASSETTE else f"the record of {replay.run}"
    return f"rewards from {record}; for other completions: on_miss {replay.on_miss}"


def device_line(device: torch.device, processes: int) -> str:
    """`2 processes, NVIDIA H200 (140 GiB) each`, or the CPU's cores, threads and memory."""
    several = f"{processes} processes" if processes > 1 else "1 process"
    if device.type == "cpu":
        gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
        return f"{several} on the CPU: {cores} cores, {threads} threads each; {gib:.0f} GiB of memory"
    if device.type != "cuda":
        return f"{several} on {device.type}"
    properties = torch.cuda.get_device_properties(device)
    return f"{several}, {properties.name} ({properties.total_memory / 2**30:.0f} GiB) each"
