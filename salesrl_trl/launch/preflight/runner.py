"""The stages and their order: `prepare` for a run, `examine` for a preflight."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from salesrl_trl.agents.customer import Persona
from salesrl_trl.checkpoint.identity import check_identity, identity_of, rows_of
from salesrl_trl.checkpoint.whole import find
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.config.checks import LORA, check, check_ranges, without_effect
from salesrl_trl.demo.packaged import POLICY_OF, PROMPT_STYLE, VISION_POLICY
from salesrl_trl.errors import ConfigError, ModelNotFoundError
from salesrl_trl.judged.judge_reward import needs_of
from salesrl_trl.launch.checks.dataset import check_pictures, check_prompts, check_splits, settle_held_out
from salesrl_trl.launch.checks.environment import check_environment, check_tokenizer
from salesrl_trl.launch.checks.model import choose_attention
from salesrl_trl.launch.checks.outcome import Findings, StageVerdict
from salesrl_trl.launch.checks.reward import check_stand_ins
from salesrl_trl.launch.data.sources import check_source
from salesrl_trl.launch.plan import Plan
from salesrl_trl.launch.preflight.memory import check_memory
from salesrl_trl.launch.preflight.services import JUDGE_STAGE, RAG_STAGE
from salesrl_trl.launch.preflight.stage import PreflightStage, StageReport, report_of
from salesrl_trl.launch.preflight.training import STEP_STAGE
from salesrl_trl.launch.settings import RunConfig
from salesrl_trl.reward.reward_funcs import check_weights
from salesrl_trl.types import CUSTOMER, DEFAULT_FORMAT, MCP, SALES


def prepare(config: RunConfig) -> Plan:
    """Run all stages of a run. Findings become notes of the plan. Raises a `SalesRLError` for the first failure."""
    plan = Plan(config)
    for stage in BEFORE_A_RUN:
        findings = Findings()
        stage.run(plan, findings)
        for finding in findings.items:
            if finding.is_failure:
                raise ConfigError(finding.message)
            plan.notes.append(finding.message)
    return plan


def chosen(wanted: Sequence[str], stages: Sequence[PreflightStage]) -> list[PreflightStage]:
    """All stages, or the wanted ones with those they require, in order. Raises `ConfigError` for an unknown name."""
    by_name = {stage.name: stage for stage in stages}
    if unknown := [name for name in wanted if name not in by_name]:
        raise ConfigError(f"`stage` is {', '.join(unknown)!r}. Expected some of: {', '.join(by_name)}.")
    needed = list(wanted or by_name)
    for name in needed:  # grows while it is walked
        needed += [other for other in by_name[name].needs if other not in needed]
    return [stage for stage in stages if stage.name in needed]


def examine(plan: Plan, stages: Sequence[PreflightStage], wanted: Sequence[str] = ()) -> Iterator[StageReport]:
    """Run the stages of `chosen` in order, and yield their reports. Stops at the first failure, and closes what the
    stages have opened. With `wanted`, reports only these stages and one that fails."""
    with plan.opened:
        for stage in stages:
            report = report_of(stage, plan)
            if not wanted or stage.name in wanted or report.verdict is StageVerdict.FAILED:
                yield report
            if report.verdict is StageVerdict.FAILED:
                return


def _check_sources(plan: Plan, findings: Findings) -> None:
    """Check the datasets, whose branches the other checks need."""
    config, training = plan.config, plan.config.training
    for source in config.data.sources:
        check_source(source.train_source[0])
        check_source(source.eval_source[0])
    findings.notes(map(settle_held_out, config.data.sources if plan.evaluates else ()))
    if not training.branches:  # the user's own task has those of its rows
        training.branches = plan.branches_of_rows
        training.kl_targets()


def _check_evaluation(args: SalesGRPOConfig, processes: int) -> None:
    """Raise `ConfigError` unless an evaluation batch consists of whole groups."""
    batch, group = args.per_device_eval_batch_size * processes, args.num_generations_eval or args.num_generations
    found = f"{batch} completions ({args.per_device_eval_batch_size} per device x {processes} processes)"
    expected = f"Expected whole groups of `num_generations_eval` {group}. Change it, or `per_device_eval_batch_size`."
    check(batch % group == 0, f"an evaluation batch has {found}. {expected}")


def _check_settings(plan: Plan, findings: Findings) -> None:
    """Check settings that depend on each other or on files. `config` checks single settings."""
    config, training, model, reward = plan.config, plan.config.training, plan.config.model, plan.config.reward
    is_first, is_changed = training.local_process_index == 0, training.allow_changed_resume
    folder, asked = training.output_dir, training.resume_from_checkpoint
    resumed = find(asked, folder, with_digests=is_first, without_manifest=is_changed)
    training.resume_from_checkpoint = None if resumed is None else str(resumed)
    config.telemetry.check_branches(training.branches)
    check_weights(training.reward_weights, len(reward.reward_funcs or [SALES]))
    if training.held_out_eval:
        _check_evaluation(training, training.world_size)
    _check_small_policy(plan)
    if model.use_peft:
        check_ranges(model, LORA)
    of_lora = {"`use_peft` is false": "" if model.use_peft else "lora_.*|use_(rslora|dora)"}
    of_rag = {"no RAG service is used": "" if reward.uses_rag else "rag"}
    of_judge = {"the built-in judge does not score": "" if reward.uses_services else "judge_.*"}
    findings.notes([*without_effect(model, of_lora), *without_effect(reward, of_rag | of_judge)])
    findings.notes(check_stand_ins(reward, training.branches, next(iter(config.data.own_sources), None)))
    if Path(config.policy_path) == VISION_POLICY and not VISION_POLICY.is_dir():
        remedy = "Create it with `python scripts/make_vision_policy.py`, which takes two minutes."
        raise ModelNotFoundError(f"{VISION_POLICY}, the small vision policy, does not exist. {remedy}")
    is_16_bit, kernel = bool(training.bf16 or training.fp16), model.attn_implementation
    model.attn_implementation, line = choose_attention(kernel, training.device, is_16_bit, plan.model_config)
    findings.notes([line])
    tools = plan.reward.tools  # reads all parts, and lists the tools of MCP servers
    if any(path.startswith(MCP) for path in reward.tools):
        findings.add(f"The policy's tools: {', '.join(tool.__name__ for tool in tools)}.")


def _check_small_policy(plan: Plan) -> None:
    """Raise `ConfigError` unless a small policy, if used, gets the prompt it was trained with."""
    prompt, is_usual = plan.prompt, plan.config.reward.rag_service.action_format == DEFAULT_FORMAT
    if Path(plan.config.policy_path) in POLICY_OF.values() or plan.config.model.model_name_or_path is not None:
        return
    if prompt is None:
        expected = "Expected the policy to train, e.g. `--model_name_or_path Qwen/Qwen2.5-0.5B-Instruct`."
        raise ConfigError(f"no model is named, and the built-in small policy only knows the demo. {expected}")
    if prompt != PROMPT_STYLE or not is_usual:
        needs = f"`prompt_template: {PROMPT_STYLE}` and the usual `rag.action_fields`"
        raise ConfigError(f"the small demo policy needs {needs}. Set these, or a `model_name_or_path`.")


def _check_data(plan: Plan, findings: Findings) -> None:
    """Check columns, branches, lengths and the number of rows, and that a checkpoint has the same rows."""
    config, training = plan.config, plan.config.training
    if (partner := config.reward.parsed_partner()) is not None and partner.kind == CUSTOMER:
        for row in (*plan.train_rows, *plan.held_out_rows):
            Persona.of(row.columns, f"row {row.row_id}")
    policy = config.model.model_name_or_path or "(the built-in small policy)"
    check_pictures([*plan.train_rows, *plan.held_out_rows], plan.processor is not None, policy)
    findings.notes(check_prompts([*plan.train_rows, *plan.held_out_rows], config.reward, plan.tokenizer))
    train, held_out = plan.train, plan.held_out
    needs = [one for scorer in plan.reward.functions.values() for one in scorer.names.needs]
    needs += needs_of(plan.reward.scoring) if config.reward.judges_answers else ()
    for dataset in filter(None, plan.datasets):
        for one in needs:
            one.check(dataset.column_names)
    records = [*plan.train_records, *plan.held_out_records]
    findings.notes([*(part.note for part in records), train.note, held_out.note])
    if training.resume_from_checkpoint is not None:  # the trainer logs allowed differences
        made_of = identity_of(training, rows_of(train.prompts, (row.branch for row in train.rows)))
        check_identity(Path(training.resume_from_checkpoint), made_of, training.allow_changed_resume)
    if config.telemetry.quick_eval_steps and len(held_out.rows) < training.world_size:
        count = f"{len(held_out.rows)} held-out rows for {training.world_size} processes"
        raise ConfigError(f"quick evaluations have {count}. Hold out more, or set `quick_eval_steps: 0`.")
    prompts = training.generation_batch_size // training.num_generations
    found = f"there are {len(train.rows)} training rows, but each step uses {prompts} prompts"
    remedy = "Add rows, or lower `per_device_train_batch_size` or `gradient_accumulation_steps`."
    check(training.mode != "train" or len(train.rows) >= prompts, f"{found}. {remedy}")
    check_splits(train.rows, held_out.rows, training.branches, findings)
    findings.figures["longest_prompt_tokens"] = max(train.longest, held_out.longest)
    findings.figures["limit_tokens"] = None if plan.limit is None else plan.limit.tokens


BEFORE_A_RUN = (
    PreflightStage("environment", (), (check_environment,)),
    PreflightStage("config", (), (_check_sources, _check_settings)),
    PreflightStage("data", ("config",), (_check_data,)),
    PreflightStage("tokenizer", ("config",), (check_tokenizer,)),
    PreflightStage("memory", ("config", "data"), (check_memory,)),
    RAG_STAGE,
    JUDGE_STAGE,
)
"""The stages of a run, in order of cost. None of them loads model weights."""
STAGES = (*BEFORE_A_RUN, STEP_STAGE)  # the stages of a preflight
