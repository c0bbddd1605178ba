"""From settings to the arguments of rollouts and their scoring.

Owns this mapping, and the warnings about settings that do not suit each other. Checks nothing that needs a model.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

from accelerate.logging import get_logger

from salesrl_trl.config.checks import check
from salesrl_trl.config.sampling import compares_with_sampler, reshaped_sampling
from salesrl_trl.config.training import SalesGRPOConfig
from salesrl_trl.names import LEFT_OUT
from salesrl_trl.rollout.groups import parts
from salesrl_trl.rollout.normaliser import TOKENS, UNITS, Normaliser

logger = get_logger(__name__)
Settings = TypeVar("Settings", bound=Any)

NO_TOOLS = (
    "{} calls tools that TRL was not given: completions are generated before TRL asks for them. Expected `tools` or "
    "an `environment_factory` of the trainer. Give them, or use a plain `GRPOConfig`."
)


def settings_of(kind: type[Settings], args: SalesGRPOConfig, **others: object) -> Settings:
    """A part's settings: a dataclass whose fields have names of `args`, and others that are given. So a new setting of
    such a part is a field of `args` and a field of that dataclass."""
    taken = {field.name: getattr(args, field.name) for field in fields(kind) if field.name not in others}
    made: Settings = kind(**taken, **others)
    return made


def check_rewards(args: SalesGRPOConfig, tools: str | None, answered: Sequence[bool]) -> None:
    """Raise `ConfigError` where rollouts can't be ahead, or no reward of a reference is there. `tools` and `answered`:
    as in `Hooks`."""
    ahead, share = args.rollout_lookahead, args.hybrid_reference_weight
    check(
        tools is None or not ahead,
        f"`rollout_lookahead` is {ahead} with {tools}: TRL sets up each completion's tools when it scores the batch "
        "before. Expected `rollout_lookahead: 0`.",
    )
    check(
        not share or list(answered) == [True],
        f"`hybrid_reference_weight` is {share} with several rewards. Expected a `SalesReward` alone: no other reward "
        "has a reference.",
    )


def normaliser_of(args: SalesGRPOConfig, has_entropy_bonus: bool, has_aux_loss: bool) -> Normaliser:
    """What makes up for failed completions. Says once what it can't do."""
    can_rescale = args.deepspeed_plugin is None and not has_entropy_bonus and not has_aux_loss
    if args.leaves_out_failed and not can_rescale and args.steps_per_generation % args.gradient_accumulation_steps:
        why = "DeepSpeed's gradients" if args.deepspeed_plugin is not None else "a loss with further terms"
        logger.info(
            f"an update has parts of several generation batches, and {why} can't be rescaled: where completions "
            "failed, each of these parts counts as if none had, and not each completion as much as any other"
        )
    return Normaliser(args.loss_type, can_rescale=can_rescale, has_bonus=has_entropy_bonus)


def sampling_warnings(args: SalesGRPOConfig) -> list[str]:
    """Warnings about settings that leave tokens out of the loss, or give them unexpected weights."""
    warnings = []
    if args.rollout_lookahead and args.use_vllm and args.vllm_importance_sampling_mode.endswith("_mask"):
        warnings.append(
            f"`rollout_lookahead` is {args.rollout_lookahead} with `vllm_importance_sampling_mode: "
            f"{args.vllm_importance_sampling_mode}`, which leaves tokens out of the loss if the policy's probability "
            f"of them has changed much: see `{LEFT_OUT}`. `token_truncate` keeps them, with bounded weights."
        )
    reshaped = ", ".join(reshaped_sampling(args))
    if args.use_vllm and reshaped and compares_with_sampler(args):
        warnings.append(
            f"completions are sampled with {reshaped}. vLLM's log-probs are those of the reshaped distribution, "
            "so the importance ratios, which weigh the loss of each token, are wrong by the part that is left out. "
            "`vllm_importance_sampling_correction: false` uses no ratios."
        )
    return warnings


def why_not_divisible(args: SalesGRPOConfig, whole_batch: str | None) -> str | None:
    """The first reason why advantages need all rewards, or why the batch has one part; `None` if there is none.
    `whole_batch`: why rewards come for a whole batch at once."""
    size = args.per_device_train_batch_size
    places = parts(size * args.steps_per_generation, size, args.num_generations)
    several = args.gradient_accumulation_steps > args.steps_per_generation and UNITS.get(args.loss_type) == TOKENS
    reasons = {
        str(whole_batch): whole_batch is not None,
        "a micro-batch and a group share no border before the batch's end, so that it has one part":
            len(places) <= 1,
        "`scale_rewards: batch` divides by the spread of all rewards": args.scale_rewards == "batch",
        "`hybrid_reference_weight` is scaled by the spread of all rewards; not with `scale_rewards: none`":
            bool(args.hybrid_reference_weight) and args.scale_rewards != "none",
        f"`multi_objective_aggregation` is {args.multi_objective_aggregation}, which needs all rewards":
            args.multi_objective_aggregation != "sum_then_normalize",
        "a completion that fails later would be in the normaliser: DeepSpeed's gradients can't be rescaled":
            args.leaves_out_failed and args.deepspeed_plugin is not None,
        f"`loss_type` {args.loss_type} divides by the tokens of a generation batch, and an update has several":
            args.leaves_out_failed and several,
    }  # fmt: skip
    return next((reason for reason, is_there in reasons.items() if is_there), None)


def sampling_hints(args: SalesGRPOConfig, has_tied_head: bool) -> str:
    """Possible reasons for a difference between the log-probs of vLLM and of the trainer."""
    hints = "Check `vllm_engine_kwargs` (`dtype`) and a server's `--logprobs-mode processed_logprobs`; a raised "
    hints += "`max_sampling_logp_difference` only hides it."
    if reshaped_sampling(args):
        hints = f"Its log-probs are of what {', '.join(reshaped_sampling(args))} leaves. {hints}"
    tied = "The output head is tied to the embedding: on a CPU use an untied model. "
    return tied + hints if has_tied_head else hints
