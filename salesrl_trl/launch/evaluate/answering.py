"""The policies of an evaluation: their settings, their common rows, and their answers."""

import contextlib
import copy
import gc
import json
import logging
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import PeftModel
from transformers import set_seed

from salesrl_trl.data.files import read_yaml
from salesrl_trl.demo.packaged import PACKAGED
from salesrl_trl.demo.services.launcher import EmbeddedServices
from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.command_line import given
from salesrl_trl.launch.assembly import open_reward
from salesrl_trl.launch.data.prompts import FittingPrompts
from salesrl_trl.launch.evaluate.findings import GREEDY, LABELS, EvaluationFindings, Scored, findings_of, modes
from salesrl_trl.launch.evaluation.quick import spread
from salesrl_trl.launch.kept import collect_seldom, keep_freed_memory
from salesrl_trl.launch.plan import Plan, build_instruments, build_trainer, load_policy, overlaid
from salesrl_trl.launch.preflight.runner import prepare
from salesrl_trl.launch.recipes import FULL
from salesrl_trl.launch.settings import RunConfig, parse
from salesrl_trl.names import RUN_FILE, SETTINGS_FILE, Phase, StartUp
from salesrl_trl.reward.reward_loop import RewardLoop, warm_up
from salesrl_trl.telemetry.instruments import Instruments
from salesrl_trl.types import Example

if TYPE_CHECKING:
    from salesrl_trl.trainer import SalesGRPOTrainer

logger = logging.getLogger(__name__)

CONFIG, ADAPTER = "config.json", "adapter_config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedPolicy:
    """A policy before it is loaded."""

    name: str  # as given: a folder or a model id
    path: str | None  # folder or id of the model, or of an adapter's base; `None` for the recipe's policy
    adapter: Path | None = None


def policy_of(name: str) -> EvaluatedPolicy:
    """The policy in a folder, or by model id. Raises `ConfigError` if there is none, or an adapter lacks its base."""
    folder = Path(name).expanduser()
    if (folder / ADAPTER).is_file():
        base = _read(folder / ADAPTER).get("base_model_name_or_path")
        if not isinstance(base, str):
            raise ConfigError(f"`--policy` is {name!r}, whose {ADAPTER} lacks `base_model_name_or_path`. Add it.")
        return EvaluatedPolicy(name=name, path=base, adapter=folder)
    looks_local = name.startswith(("/", ".", "~")) or name.count("/") > 1 or folder.is_dir()
    if looks_local and not (folder / CONFIG).is_file():
        inside = sorted({str(file.parent) for name in (CONFIG, ADAPTER) for file in folder.glob(f"*/{name}")})
        state = f"a folder without {CONFIG} and {ADAPTER}" if folder.is_dir() else "which does not exist"
        near = f" It contains policies: {' or '.join(inside)}." if inside else ""
        expected = "Expected a run's `output_dir`, its `best`, a checkpoint, or another saved policy"
        raise ConfigError(f"`--policy` is {name!r}, {state}. {expected}.{near}")
    return EvaluatedPolicy(name=name, path=name)


def recipe_of(policies: Sequence[str]) -> Path:
    """The settings of the run that trained a policy, preferring the last policy; else those of the full recipe."""
    folders = [Path(name).expanduser().absolute() for name in reversed(policies)]
    places = [place for folder in folders if folder.is_dir() for place in (folder, folder.parent)]
    return next((p / SETTINGS_FILE for p in places if all((p / f).is_file() for f in (SETTINGS_FILE, RUN_FILE))), FULL)


def settings_of(argv: Sequence[str], policies: Sequence[EvaluatedPolicy], recipe: Path) -> RunConfig:
    """The settings of the policies' run. If the recipe names no model and a policy is not the small one, the settings
    for named models apply. This process uses the batch size of all of the run's processes. Its replay only applies if
    the command line names it."""
    argv = [*_batch_of_all(Path(given(argv, "config") or recipe)), *argv]
    config = parse(argv, recipe)
    if config.reward.replay is not None and given(argv, "replay") is None:
        config.reward = replace(config.reward, replay=None)
        logger.info("ignoring the run's `replay`: services score the answers (`--replay RUN` replays rewards)")
    paths = [policy.path for policy in policies if policy.path is not None]
    others = [path for path in paths if _shape(Path(path).expanduser()) != _shape(PACKAGED)]  # not of the small policy
    if config.model.model_name_or_path is None and others:
        return parse([*argv, "--model_name_or_path", others[0]], recipe)
    return config


def _batch_of_all(recipe: Path) -> list[str]:
    record = recipe.with_name(RUN_FILE)
    processes = _read(record).get("processes") if recipe.name == SETTINGS_FILE and record.is_file() else 1
    settings = read_yaml(recipe) if processes != 1 else None
    size = settings.get("per_device_train_batch_size") if isinstance(settings, dict) else None
    if not isinstance(size, int) or not isinstance(processes, int):
        return []
    return [f"--per_device_train_batch_size={size * processes}"]


def plans_of(config: RunConfig, policies: Sequence[EvaluatedPolicy], output_dir: str, rows: int | None) -> list[Plan]:
    """Run all checks that need no model. The plans have the same held-out rows, at most `rows`. Raises `SalesRLError`
    for an invalid setting, file or policy."""
    training = overlaid(config.training, "evaluation", {"output_dir": output_dir})
    if len(policies) > 1 and training.use_vllm and training.vllm_mode == "server":
        raise ConfigError("two policies need an engine each: set `vllm_mode: colocate` or `use_vllm: false`.")
    telemetry = replace(config.telemetry, quick_eval_steps=0, trace_steps="")
    plans = []
    for policy in policies:
        model = copy.copy(config.model)
        model.use_peft = False  # an untrained adapter changes nothing
        if policy.path is not None:
            model.model_name_or_path, model.model_revision = policy.path, None
        plan = prepare(replace(config, training=copy.copy(training), telemetry=telemetry, model=model))
        # as in training: 16-bit weights are rounded, and a run on a CPU does not round
        plan.dtype = model.dtype if training.bf16 or training.fp16 else "float32"
        plans.append(plan)
    held_out = common_rows([plan.held_out for plan in plans], rows)
    for plan in plans:
        plan.train, plan.held_out = plans[0].train, held_out
        plan.reward = plans[0].reward  # with connected tools
        del plan.datasets  # of the previous rows
    return plans


def common_rows(fitting: Sequence[FittingPrompts], count: int | None) -> FittingPrompts:
    """At most `count` held-out rows whose prompts fit all policies and are the same for all."""
    first = fitting[0]
    keys = [[json.dumps([row.row_id, f.prompts[at]]) for at, row in enumerate(f.rows)] for f in fitting]
    everywhere = set(keys[0]).intersection(*keys[1:])
    places = [place for place, key in enumerate(keys[0]) if key in everywhere]
    if not places:
        raise ConfigError("no held-out row has a prompt that fits all policies. Set `eval_dataset`.")
    branch_of = [first.rows[place].branch for place in places]
    branches = sorted({*branch_of})
    branch_ids = [*map(branches.index, branch_of)]
    chosen = sorted(spread(branch_ids, len(places) if count is None else count, len(branches), 1))
    return first.at(places[number] for number in chosen)


def _shape(folder: Path) -> Mapping[str, object]:
    config = _read(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    return {name: config.get(name) for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")}


def _read(path: Path) -> Mapping[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read as JSON ({type(error).__name__}).") from None
    if isinstance(content, dict):
        return content
    raise ConfigError(f"{path} contains a {type(content).__name__}. Expected an object of settings.")


def findings_of_all(
    plans: Sequence[Plan], policies: Sequence[EvaluatedPolicy], services: EmbeddedServices, samples: int
) -> EvaluationFindings:
    """Evaluate the policies one after another. They share the reward, so that identical calls are made once."""
    plan, wanted = plans[0], modes(samples)
    config, training = plan.config, plan.config.training
    collect_seldom()
    if training.device.type == "cpu":
        keep_freed_memory()
    with contextlib.ExitStack() as stack:
        instruments = stack.enter_context(contextlib.closing(build_instruments(config)))
        instruments.start(True)
        opened = open_reward(config.reward, training, plan.rows, plan.reward, services)
        reward_loop = stack.enter_context(contextlib.closing(RewardLoop(stack.enter_context(opened))))
        places = reward_loop.reward.names.places.items()
        logger.info("[Evaluate] " + "; ".join(f"{name}: {place}" for name, place in places))
        if config.reward.warm_up_services:
            with instruments.timeline.phase(StartUp.WARM_UP):
                warm_up(reward_loop)
        answers = [
            answers_of(plan_of_policy, policy.adapter, reward_loop, instruments, wanted, f"{label} ({policy.name})")
            for plan_of_policy, policy, label in zip(plans, policies, LABELS, strict=False)
        ]
    names = [policy.name for policy in policies]
    return findings_of(names, plan.held_out.rows, training.branches, wanted, answers, seed=training.seed)


def answers_of(
    plan: Plan, adapter: Path | None, reward_loop: RewardLoop, instruments: Instruments, wanted: Mapping[str, int],
    label: str,
) -> list[list[Scored]]:  # fmt: skip
    """A policy's answers to the plan's held-out rows, by mode; the answers to a row are adjacent."""
    plan.policy = load_policy(plan.config, plan.dtype)
    if adapter is not None:
        plan.policy = PeftModel.from_pretrained(plan.policy, adapter)
    trainer = build_trainer(plan, reward_loop, instruments)
    trainer.model.eval()
    try:
        with instruments.timeline.phase(Phase.EVALUATION):
            if trainer.args.use_vllm:
                trainer.components.check_sampler(plan.held_out.prompts[:1] * 4)
            ends = {*trainer.eos_token_ids, plan.tokenizer.pad_token_id}
            return [_answers(trainer, mode, samples, ends, label) for mode, samples in wanted.items()]
    finally:
        trainer.components.pipeline.forget()
        instruments.details.clear()  # they hold the trainer; its late end would end the next engine's groups
        plan.policy = None
        del trainer
        _free()


def _answers(trainer: "SalesGRPOTrainer", mode: str, samples: int, ends: Container[int], label: str) -> list[Scored]:
    args, components = trainer.args, trainer.components
    rows = [row for row in trainer.eval_dataset for _ in range(samples)]
    # vLLM batches by itself, so it gets as many as in training, for which the services' limits are set
    size = max(args.per_device_eval_batch_size, args.generation_batch_size if args.use_vllm else 0)
    size = max(size // samples, 1) * samples  # whole groups
    # outside of training, the model lacks autocast, which vLLM does not need
    computing = contextlib.nullcontext if args.use_vllm else trainer.accelerator.autocast
    scored: list[Scored] = []

    def batches() -> Iterator[list[Example]]:
        for number, first in enumerate(range(0, len(rows), size)):
            set_seed(args.seed + number)  # the same for every policy
            yield rows[first : first + size]

    with components.sampler.greedily() if mode == GREEDY else contextlib.nullcontext(), computing():
        for batch in components.pipeline.evaluations(batches(), 0, samples):
            rollout, _ = components.scoring.evaluate(batch, 0, samples)
            assert rollout.sampled is not None and rollout.result is not None
            scored += [
                Scored(reward, len(ids), not ids or ids[-1] not in ends)
                for ids, reward in zip(rollout.sampled.completion_ids, rollout.result.rewards, strict=True)
            ]
            logger.info(f"[Evaluate] {label} {mode}: {len(scored)} of {len(rows)} answers")
    return scored


def _free() -> None:
    """Free the memory of a policy and its engine. vLLM hides objects created before its engine from the garbage
    collector, and shares a memory pool for CUDA graphs between all engines of a process: the next engine could not
    capture into it once the previous graphs are gone."""
    gc.unfreeze()
    gc.collect()
    if not torch.cuda.is_available():
        return
    torch.cuda.empty_cache()
    from vllm.platforms import current_platform

    type(current_platform)._global_graph_pool = None
