"""Translates settings into arguments for rollouts, scoring, forward passes and the colocated engine, and into reasons
why a feature is unavailable."""

import functools
from collections.abc import Callable, Mapping, Sequence

from accelerate import Accelerator
from accelerate.logging import get_logger
from torch import nn
from transformers import PreTrainedModel

from salesrl_trl.config.checks import check
from salesrl_trl.config.training import SalesGRPOConfig
from salesrl_trl.config.trl_settings import compares_with_sampler, reshaped_sampling
from salesrl_trl.errors import ConfigError
from salesrl_trl.reward.scorer import RewardNames
from salesrl_trl.rollout.buffer import BufferPolicy, policy_of
from salesrl_trl.rollout.in_flight import parts
from salesrl_trl.rollout.model_passes import Passes
from salesrl_trl.rollout.normaliser import MICRO_BATCHES, TOKENS, UNITS, Normaliser
from salesrl_trl.shared_prompts.shared_attention import HALVES
from salesrl_trl.shared_prompts.shared_passes import PassSettings, SharedPrompts
from salesrl_trl.update.correction import NORMALIZED, CorrectionAtStep, SamplerCorrection
from salesrl_trl.update.ledger import Ledger
from salesrl_trl.update.run_control import highest

logger = get_logger(__name__)

SAMPLING_HINTS = (
    "Check `vllm_engine_kwargs` (`dtype`) and a server's `--logprobs-mode processed_logprobs`; raising "
    "`max_sampling_logp_difference` only hides it."
)


def first(reasons: Mapping[str, object]) -> str | None:
    """The first reason that applies."""
    return next((reason for reason, holds in reasons.items() if holds), None)


def check_rewards(args: SalesGRPOConfig, inside_trl: str | None, answered: Sequence[bool], names: RewardNames) -> None:
    """Raise `ConfigError` if rollouts cannot be ahead, or reference rewards are unavailable. `inside_trl`: why TRL's
    scoring generates. `answered`: as in `Hooks.reward_answered`."""
    ahead, share = args.most_lookahead, args.hybrid_reference_weight
    expected = "so TRL sets up the tools when it scores a batch. Expected `rollout_lookahead: 0`."
    check(not inside_trl or not ahead, f"`rollout_lookahead` is {ahead} with tools, but {inside_trl}, {expected}")
    named, expected = ", ".join(names.functions) or "a reward model", "Expected a `SalesReward` alone"
    has_reference = not share or (list(answered) == [True] and bool(names.components))
    found = f"`hybrid_reference_weight` is {share} with {named}"
    check(has_reference, f"{found}. {expected}: other rewards lack a reference.")


def check_pictures_ahead(args: SalesGRPOConfig, reads_pictures: bool) -> None:
    """Reject a lookahead without old log-probs. `reads_pictures`: whether TRL's engine processes images."""
    effect = "but transformers returns no log-probs. Expected `use_vllm: true`, or `rollout_lookahead: 0`."
    is_possible = not (reads_pictures and args.most_lookahead) or args.use_vllm
    check(is_possible, f"a vision policy is trained with a lookahead, {effect}")


def check_alone(tools: str | None, is_played: bool, has_rollout_func: bool, reason: str | None) -> None:
    """Raise `ConfigError` if episodes cannot be played, or else if a partner cannot answer the policy. `reason`: why
    conversations cannot run independently."""
    name, effect = "`partner`", "cannot answer conversations independently"
    expected = "Expected one of them: each answers the policy."
    if is_played:
        name, effect = "a function with `@per_episode`", "cannot ask the policy for turns"
        expected = "Expected it alone: the episode queries the policy and calls its tools itself."
    given = tools if is_played or tools == "an environment" else None
    given = given or ("a `rollout_func`" if has_rollout_func else None)
    check(given is None, f"{name} is given with {given}. {expected}")
    check(reason is None, f"{name} {effect}, because {reason}.")


def normaliser_of(args: SalesGRPOConfig, has_entropy_bonus: bool, has_aux_loss: bool) -> Normaliser:
    can_rescale = args.deepspeed_plugin is None and not has_entropy_bonus and not has_aux_loss
    if not can_rescale and args.steps_per_generation % args.gradient_accumulation_steps:
        why = "DeepSpeed's gradients" if args.deepspeed_plugin is not None else "a loss with additional terms"
        effect = "each part keeps its full weight if completions fail, so these are not weighted equally"
        logger.info(f"an update uses parts of several generation batches, and {why} cannot be rescaled: {effect}")
    return Normaliser(args.loss_type, can_rescale=can_rescale)


def sampling_warnings(args: SalesGRPOConfig) -> list[str]:
    """Warnings about settings that weight tokens unexpectedly."""
    reshaped = ", ".join(reshaped_sampling(args))
    if not args.use_vllm or not reshaped or not compares_with_sampler(args):
        return []
    effect = "so the importance ratios of vLLM's log-probs are off by the truncated probability mass."
    remedy = "`vllm_importance_sampling_correction: false` disables the ratios."
    return [f"completions are sampled with {reshaped}, {effect} {remedy}"]


def why_not_divisible(args: SalesGRPOConfig) -> str | None:
    """The first reason why advantages need all rewards or the batch is indivisible, else `None`."""
    size = args.per_device_train_batch_size
    places = parts(size * args.steps_per_generation, size, args.num_generations)
    several = args.gradient_accumulation_steps > args.steps_per_generation and UNITS.get(args.loss_type) == TOKENS
    return first({
        "the batch can't be split: no micro-batch except the last one ends where a group ends":
            len(places) <= 1,
        "`scale_rewards: batch` divides by the spread of all rewards": args.scale_rewards == "batch",
        "`hybrid_reference_weight` is scaled by the spread of all rewards; not with `scale_rewards: none`":
            bool(args.hybrid_reference_weight) and args.scale_rewards != "none",
        f"`multi_objective_aggregation` is {args.multi_objective_aggregation}, which needs all rewards":
            args.multi_objective_aggregation != "sum_then_normalize",
        "a completion that fails later would stay in the normaliser: DeepSpeed's gradients cannot be rescaled":
            args.deepspeed_plugin is not None,
        f"`loss_type` {args.loss_type} divides by the tokens of a generation batch, and an update spans several":
            several,
    })  # fmt: skip


def why_in_turn(args: SalesGRPOConfig, talks: bool, reads_pictures: bool) -> str | None:
    """The first reason why groups cannot be chosen individually (`max_staleness`), else `None`. `talks`: whether
    completions are conversations with tools, or episodes."""
    size = args.per_device_train_batch_size * args.steps_per_generation
    reasons = {
        "conversations of a batch are collected together": talks,
        "pictures of a batch are encoded together": reads_pictures,
        "a group spans two processes": size % args.num_generations,
        "sequences are split over processes": getattr(args, "parallelism_config", None) is not None,
    }
    return first(reasons)


def why_not_partial(args: SalesGRPOConfig, talks: bool, reads_pictures: bool) -> str | None:
    """The first reason why an engine cannot leave completions unfinished (`partial_rollouts`), else `None`. `talks`:
    as in `why_in_turn`."""
    reasons = {
        "a vLLM server keeps generating while the run trains": args.vllm_mode == "server",
        "`rollout_lookahead` is 0": not args.most_lookahead,
        "the share amounts to less than one completion per process": not args.most_unfinished,
        "`vllm_enable_sleep_mode` frees the engine's memory between two generations": args.vllm_enable_sleep_mode
        and args.device.type != "cpu",
        "tensor parallelism generates a batch across processes": args.vllm_tensor_parallel_size > 1,
        "turns of conversations already join the running batch": talks,
        "pictures of a batch are encoded together": reads_pictures,
    }
    return first(reasons)


def why_in_trls_order(args: SalesGRPOConfig, entropy_bonus: bool, aux_loss: bool) -> str | None:
    """The first reason why an update depends on the order or micro-batches of its completions; `None` if another order
    than TRL's is allowed. `entropy_bonus` and `aux_loss`: whether the loss has these terms."""
    return first({
        "`num_iterations` is above 1, so batches are trained on repeatedly": args.num_iterations > 1,
        "an update uses part of a generation batch (`steps_per_generation`)":
            args.gradient_accumulation_steps % args.steps_per_generation != 0,
        f"`loss_type` {args.loss_type} weights completions by micro-batch":
            UNITS.get(args.loss_type) == MICRO_BATCHES,
        "`top_entropy_quantile` compares the tokens of a micro-batch": args.top_entropy_quantile != 1.0,
        "the entropy bonus is computed per micro-batch": entropy_bonus,
        "the router's auxiliary loss is computed per micro-batch": aux_loss,
    })  # fmt: skip


def passes_of(
    args: SalesGRPOConfig, accelerator: Accelerator, model: nn.Module, ledger: Ledger, in_trls_order: str | None
) -> Passes:
    """The forward passes of one trainer. `model`: the policy, without the wrappers of distributed training.
    `in_trls_order`: from `why_in_trls_order`."""
    reasons = {
        "`torch_compile` compiles the model for TRL's batches": args.torch_compile,
        "sequences are split over processes": getattr(args, "parallelism_config", None) is not None,
        "`neftune_noise_alpha` adds noise to each sequence that depends on its length": args.neftune_noise_alpha,
    }
    of_all = functools.partial(highest, device=accelerator.device)
    weight = next(model.parameters())
    is_half_on_gpu = weight.is_cuda and (args.bf16 or args.fp16 or weight.dtype in HALVES)
    settings = PassSettings(
        is_on=args.shared_prompts != "off", reason=first(reasons), autocast=accelerator.autocast,
        most_tokens=args.pass_tokens, highest=of_all if args.is_sharded else int, highest_of_all=of_all,
    )  # fmt: skip
    prompts = SharedPrompts(model, settings)
    if prompts.is_on and in_trls_order is not None:
        logger.info(f"TRL's shuffle may separate a prompt's completions, because {in_trls_order}")
    most, weights = 1 if args.is_sharded else args.pass_tokens, sum(each.numel() for each in model.parameters())
    return Passes(
        prompts, most, weights, is_light=args.gradient_checkpointing and is_half_on_gpu,
        correction=correction_at_step(args, ledger), in_order=prompts.is_on and in_trls_order is None,
    )  # fmt: skip


def correction_at_step(args: SalesGRPOConfig, ledger: Ledger) -> CorrectionAtStep | None:
    """Importance correction with log-probs of the training forward pass; `None` if TRL's own pass for old log-probs is
    needed: without vLLM's correction, with several updates per generation batch, or to normalise its weights."""
    settings = args.correction
    if settings is None or args.shared_prompts == "off" or args.gradient_accumulation_steps % args.window:
        return None
    return None if settings.weights == NORMALIZED else CorrectionAtStep(settings, ledger)


def correction_of(args: SalesGRPOConfig, ledger: Ledger) -> SamplerCorrection | None:
    """Importance correction where TRL computes old log-probs; `None` without vLLM's. VESPO multiplies weights."""
    given, found = args.correction, "`rollout_correction` normalizes or rejects tokens with `loss_type: vespo`"
    is_by_token = given and (given.weights == NORMALIZED or any(name.startswith("token") for name in given.reject))
    check(not is_by_token or args.loss_type != "vespo", f"{found}. Expected `seq_` rejections, or another loss.")
    return None if given is None else SamplerCorrection(given, ledger)


def buffer_policy_of(
    args: SalesGRPOConfig, policy: BufferPolicy | None, why_in_order: Callable[[], str | None],
    at_once: str | None, refilled_at_once: str | None,
) -> BufferPolicy:  # fmt: skip
    """The user's buffer `policy`, or the one enabled by the settings, if effective.

    `why_in_order`: returns why groups must be trained on in turn. `at_once`: why rewards arrive for a whole batch.
    `refilled_at_once`: the same for refilled groups.
    """
    least = args.most_lookahead
    fits = policy is None or policy.max_age >= least
    check(fits, f"`buffer_policy` has a `max_age` below the lookahead of {least} steps. Expected at least as many.")
    wishes = {"buffer_policy": at_once} if policy is not None else {}
    if policy is None and args.max_staleness > args.most_lookahead > 0:
        wishes["max_staleness"] = at_once
    if policy is None and args.refill_groups:
        wishes["refill_groups"] = refilled_at_once
    in_force = dict[str, int]()
    for name, whole_batch in wishes.items():
        if (reason := whole_batch or why_in_order()) is not None:
            logger.info(f"`{name}` is ignored here, because {reason}")
        elif policy is not None:
            return policy
        else:
            in_force[name] = getattr(args, name)
    return policy_of(args.most_lookahead, **in_force)


GRAPHS_ALONE = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""vLLM's `compilation_config` for CUDA graphs of whole decoding steps, without compiling."""
_FOR_SERVERS_TOO = {"enforce_eager", "enable_prefix_caching", "enable_chunked_prefill", "dtype"}
"""Options that a server decides itself; harmless, as a recipe may set them for another `vllm_mode`."""


def engine_options(args: SalesGRPOConfig, model: PreTrainedModel) -> dict[str, object]:
    """Arguments of `vllm.LLM` in addition to TRL's, for this loaded policy. Raises `ConfigError` if options of a
    colocated engine are given for a server."""
    from salesrl_trl.generation.merging import pushes_all_weights

    extra = args.parsed_engine_kwargs()
    own = extra.keys() - _FOR_SERVERS_TOO
    if args.use_vllm and args.vllm_mode == "server" and own:
        remedy = "With `vllm_mode: server`, pass it on the server's command line."
        raise ConfigError(f"`vllm_engine_kwargs` sets {', '.join(sorted(own))} of the colocated engine. {remedy}")
    eager, on_cpu = extra.get("enforce_eager"), args.device.type == "cpu"
    group = args.process_index // args.vllm_tensor_parallel_size
    in_training = "bfloat16" if args.bf16 else "float16" if args.fp16 else str(model.dtype).removeprefix("torch.")
    options: dict[str, object] = {
        "enforce_eager": on_cpu if eager is None else bool(eager),
        # random until the first push, which TRL always does before the first generation
        "load_format": "dummy" if pushes_all_weights(model) else "auto",
        "dtype": in_training,
        # equal within a group of tensor-parallel ranks; TRL uses the rank, regardless of the run's seed
        "seed": args.seed * 1000 + group,
    }
    if args.most_unfinished:  # TRL's concurrency plus the completions left from the previous batch
        of_trl = args.per_device_train_batch_size * args.vllm_tensor_parallel_size * args.steps_per_generation
        options["max_num_seqs"] = of_trl + args.most_unfinished
    if eager is None and not on_cpu:
        options["compilation_config"] = GRAPHS_ALONE
    return options | extra
