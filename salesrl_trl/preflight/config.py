"""The stage `config`: settings that depend on each other or on files. Those alone are checked in `config/`."""

from pathlib import Path

from salesrl_trl.build.checks.attention import choose_attention
from salesrl_trl.build.checks.folders import earlier_start
from salesrl_trl.build.checks.model import check_weights
from salesrl_trl.build.checks.reward import check_stand_ins
from salesrl_trl.build.plan import Plan
from salesrl_trl.checkpoint.whole import find
from salesrl_trl.config.ranges import LORA, check_ranges
from salesrl_trl.config.sizes import check_evaluation
from salesrl_trl.data.faster_disk import copied
from salesrl_trl.data.sources import check_source, is_file
from salesrl_trl.demo.policy import PROMPT_STYLE
from salesrl_trl.demo.vision import FOLDER as VISION_FOLDER
from salesrl_trl.errors import ConfigError, ModelNotFoundError
from salesrl_trl.preflight.stage import Findings
from salesrl_trl.types import DEFAULT_FORMAT


class ConfigStage:
    """Branches, checkpoint, prompt, rubrics, weights and keys, and the model's configuration."""

    name = "config"
    needs: tuple[str, ...] = ()

    def run(self, plan: Plan) -> Findings:
        config, training, findings = plan.config, plan.config.training, Findings()
        _copy_data(plan, findings)
        config.telemetry.check_branches(training.branches)
        resumed = find(
            training.resume_from_checkpoint,
            training.output_dir,
            with_digests=training.local_process_index == 0,
            without_manifest=training.allow_changed_resume,
        )
        training.resume_from_checkpoint = None if resumed is None else str(resumed)
        if training.held_out_eval:
            check_evaluation(training, training.world_size)
        _check_small_policy(plan)
        if Path(config.policy_path) == VISION_FOLDER and not VISION_FOLDER.is_dir():
            raise ModelNotFoundError(
                f"there is no {VISION_FOLDER} here, the small policy that reads pictures. Expected it to be taught "
                f"before, in two minutes. Run `python -m salesrl_trl.demo.vision {VISION_FOLDER}`."
            )
        if config.model.use_peft:
            check_ranges(config.model, LORA)
        for source in config.data.own_sources:
            check_source(source)
        notes = check_stand_ins(config.reward, training.branches, next(iter(config.data.own_sources), None))
        _ = plan.reward, plan.model_config  # raise if they do not work
        check_weights(Path(config.policy_path).expanduser())
        micro_batch = training.per_device_train_batch_size * training.world_size
        findings.figures["processes"] = training.world_size
        findings.figures["completions_a_step"] = micro_batch * training.gradient_accumulation_steps
        notes += earlier_start(training.output_dir, resumes=training.resume_from_checkpoint is not None)
        model = config.model
        model.attn_implementation, attention = choose_attention(
            model.attn_implementation,
            training.device,
            in_16_bits=training.bf16 or training.fp16,
            model=plan.model_config,
        )
        for note in (*notes, *filter(None, [attention])):
            findings.note(note)
        steps, warm_up = training.max_steps, training.warmup_steps
        if 0 < steps <= warm_up:
            findings.note(f"`warmup_steps` is {warm_up:g} and `max_steps` {steps}: the learning rate is never reached")
        return findings


def _copy_data(plan: Plan, findings: Findings) -> None:
    """Read rows from copies, if `data_copy_dir` is set."""
    data = plan.config.data
    for name in ("dataset", "eval_dataset"):
        path = getattr(data, name)
        if data.data_copy_dir is not None and path is not None and is_file(path):  # not `demo`, and none on the hub
            setattr(data, name, str(copied(Path(path), Path(data.data_copy_dir))))
            findings.note(f"`{name}` is read from {getattr(data, name)}, a copy of {path}")


def _check_small_policy(plan: Plan) -> None:
    """Raise unless the prompt works, and prompts the small policy, if it is used, as it was taught."""
    prompt, action_format = plan.prompt, plan.config.reward.action_format()
    if plan.config.model.model_name_or_path is not None or (
        prompt == PROMPT_STYLE and action_format == DEFAULT_FORMAT
    ):
        return
    given = f"`prompt_style` is {prompt!r}" if isinstance(prompt, str) else "`prompt_template` is given"
    raise ConfigError(
        f"{given if prompt != PROMPT_STYLE else '`action_fields` is given'}, but the small demo policy is taught "
        f"with {PROMPT_STYLE!r} and the usual fields. Give `model_name_or_path`, or set `prompt_style: "
        f"{PROMPT_STYLE}` and neither `prompt_template` nor `action_fields`."
    )
