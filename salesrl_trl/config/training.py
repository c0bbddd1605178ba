"""Training settings added to TRL's `GRPOConfig`: branches and their KL, rollouts, vLLM."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

from trl import GRPOConfig

from salesrl_trl.config import trl_settings
from salesrl_trl.config.checks import (
    TRAINING,
    Count,
    LessThan1,
    Limit,
    NumberOrNone,
    Positive,
    Range,
    Share,
    check,
    check_names,
    check_range,
    check_settings,
    check_url,
    check_value,
    entry_of,
    load_object,
    structure,
    without_effect,
)
from salesrl_trl.config.keys import takes_former_names, without_keys
from salesrl_trl.config.trl_settings import RUN_MODES, has_fsdp, settle
from salesrl_trl.errors import ConfigError
from salesrl_trl.kl.branched import WindowSettings
from salesrl_trl.kl.law import AdaptiveLaw, KLLaw, KLTarget, check_law
from salesrl_trl.kl.penalty import ESTIMATORS, LARGEST_CLAMP, PenaltySettings
from salesrl_trl.types import ALL
from salesrl_trl.update.correction import BYPASS, MODES, CorrectionSettings

KL_SETTINGS = "settings"  # an entry of `branch_kl` that is not a branch
FIXED = "fixed"  # a controller that keeps the coefficients constant
COOLDOWN = "cooldown_steps"  # an entry of `law_settings` for every controller, not passed to it
_SWITCH: dict[str, Any] = {"true": True, "false": False}  # as texts on a command line

_CLAMP = Range(0, LARGEST_CLAMP, "the ratio times the estimate grows as e^(2 * clamp), which overflows above 44")


@dataclass(frozen=True, kw_only=True)
class KLSettings:
    """`branch_kl.settings`, validated."""

    estimator: Annotated[str, ESTIMATORS] = "k3"
    """`k1`, `k2` or `k3`, as in http://joschu.net/blog/kl-approx.html. TRL uses k3. Without `use_bias_correction_kl`
    the gradient of k1 is zero on average; with it, k2's is not the KL's."""
    clamp: Annotated[float, _CLAMP] = 10.0
    """Log-ratio in nats, at most 40, beyond which the penalty is linear. 0 selects TRL's formula, which overflows at
    88."""
    update_steps: Count = 5
    """Optimizer steps per window over which a branch's KL is measured before its coefficient changes."""
    law: str | None = None
    """Dotted path of a class that controls the coefficients instead of the built-in controller: see `kl.law.KLLaw`.
    `fixed` keeps them constant; logs still compare each branch's KL with its band."""
    law_settings: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the controller. The built-in one accepts `max_step`, the largest factor of a change
    (default 2). `cooldown_steps` applies to every controller: optimizer steps after a change excluded from windows
    (default 0)."""

    def __post_init__(self) -> None:
        check_value(f"law_settings.{COOLDOWN}", self.law_settings.get(COOLDOWN, 0), NumberOrNone)

    @property
    def windows(self) -> WindowSettings:
        """The windows over which a branch's KL is measured."""
        return WindowSettings(update_steps=self.update_steps, cooldown_steps=self.law_settings.get(COOLDOWN, 0))

    def law_of(self, law_object: KLLaw | None = None) -> KLLaw | None:
        """The controller of the coefficients; `None` if they are constant. `law_object` replaces the settings'
        controller. Raises `ConfigError` for an invalid controller or unknown settings of it."""
        arguments = {name: value for name, value in self.law_settings.items() if name != COOLDOWN}
        law = law_object
        if law_object is not None or self.law == FIXED:
            found = "the KL controller is an object or `fixed`, but `law` or `law_settings` of `branch_kl.settings`"
            is_alone = (law_object is None or self.law is None) and not arguments
            check(is_alone, f"{found} is set too. Expected one of them.")
        elif self.law is None:
            check_names("branch_kl.settings.law_settings", arguments, ("max_step", COOLDOWN))
            law = AdaptiveLaw(**arguments)
        else:
            make = cast(Callable[..., KLLaw], load_object(self.law, "branch_kl.settings.law"))
            try:
                law = make(**arguments)
            except TypeError as error:
                found = f"the KL controller {self.law} cannot be created with `law_settings: {arguments}`: {error}"
                raise ConfigError(f"{found}. Expected a class and its keyword arguments.") from error
        if law is not None:
            check_law(law)
        return law


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """`record`, validated."""

    gib: Positive = 4.0
    filter: str | None = None
    rounds: bool = False  # turns of conversations are generated in a fixed order, which a replay repeats

    @property
    def clean(self) -> Callable[[str], str] | None:
        """The function named by `filter`. Raises `ConfigError` unless it maps texts to texts."""
        if self.filter is None:
            return None
        clean = cast("Callable[[str], str]", load_object(self.filter, "record.filter"))
        try:
            check(isinstance(clean("a text"), str), f"`record.filter` {self.filter!r} must return a text.")
        except TypeError as error:
            raise ConfigError(f"`record.filter` {self.filter!r} must accept a text: {error}.") from error
        return clean


def _check_branches(setting: str, names: list[str]) -> None:
    check(len(set(names)) == len(names), f"`{setting}` is {names}. Expected each name once.")


def _check_passes(setting: str, value: str) -> None:
    expected = "Expected auto, off, or the maximum tokens per forward pass, a whole number. In YAML, quote off."
    check(bool(re.fullmatch("auto|off|[1-9][0-9]*", value)), f"`{setting}` is {value!r}. {expected}")


@takes_former_names
@dataclass
class SalesGRPOConfig(GRPOConfig):
    """TRL's `GRPOConfig` with the additional settings of `SalesGRPOTrainer`."""

    branches: Annotated[list[str], _check_branches] = field(default_factory=list)
    """Branch names allowed in rows: tasks or domains with their own rubric, metrics and KL coefficient. Defaults to
    those in the dataset's column `branch`, or to a single branch `all` without this column. In recipes: `["fairness",
    "hallucination"]`, each of which needs a rubric."""
    branch_kl: dict[str, object] | str | None = None
    """KL coefficient and target band in nats per token by branch, e.g. `{"fairness": {"beta": 0.1, "low": 0.02,
    "high": 0.06}}`. `beta_min` and `beta_max` bound the coefficient (default: a hundredth and a hundred times `beta`).
    Without `low` and `high` it is constant. Unlisted branches use the constant coefficient `beta`. The entry
    `settings` applies to all branches: `{"settings": {"estimator": "k2", "law": "fixed"}}`. Without any coefficient no
    reference model is loaded."""
    hybrid_reference_weight: Share = 0.0
    """w in [0, 1]. A group's baseline is (1 - w) times its mean reward plus w times the reward of the 32B endpoint's
    answer. 0 is GRPO. Groups without a reference use w = 0 and are counted."""
    sampler: str | None = None
    """Dotted path of a class that generates instead of TRL's engines; requires `use_vllm: false`. Its interface is
    `salesrl_trl.generation.sampler.Sampler`."""
    compile_cache_dir: str | None = None
    """Folder for code compiled by vLLM, torch, Triton, FlashInfer and CUDA, reused by later starts. `auto` is
    `compiled` in the package's cache folder (`SALESRL_CACHE_DIR`). By default each library uses its own cache."""
    vllm_engine_kwargs: dict[str, object] | str | None = None
    """Arguments of `vllm.LLM` for a colocated engine, e.g. `{"enforce_eager": true}`, which override TRL's. By default
    CPUs run eagerly, and GPUs capture CUDA graphs without compiling; `enforce_eager: false` also compiles, for a
    minute at the first start. `load_format` defaults to `dummy` if the first push sets every weight. `quantization`
    accepts `fp8_per_channel`, `fp8_per_tensor` or `fp8_per_block` on a GPU: each push requantises the weights, and the
    importance ratio corrects for the difference."""
    max_sampling_logp_difference: Limit = 0.5
    """Largest allowed mean absolute difference between vLLM's and the trainer's log-probs of the first batch, in nats.
    Above it the run stops, because vLLM samples from other weights. Typical values are 0.002 in float32 and 0.01 in
    bf16."""
    min_valid_reward_fraction: Share = 0.5
    """Minimum share of scored completions in a generation batch. Batches below it are skipped."""
    max_skipped_generations: Count = 3
    """Consecutive skipped batches after which the run saves a checkpoint and stops with the reason. Two suffice at the
    last step, as does an hour since the first of them."""
    rollout_lookahead: NumberOrNone = 0
    """Optimizer steps that rollouts may be ahead of training: this many later steps are generated and scored
    meanwhile. 0 is on-policy, with TRL's own results. Higher numbers hide slow rewards; rollouts then come from
    weights up to this many steps old, which the correction accounts for."""
    max_rollout_lookahead: NumberOrNone = 0
    """Above 0: automatic lookahead up to this number, starting at `rollout_lookahead`: the run continuously measures
    and uses the smallest number with which training hardly waits for rewards. 0 keeps `rollout_lookahead`."""
    max_staleness: NumberOrNone = 0
    """Above the lookahead: the maximum number of optimizer steps between the weights that sampled a group and the step
    that trains on it. Each step then trains on the first complete groups to be scored, and on any that cannot wait.
    Every row is still used once per epoch. 0, or the lookahead, keeps the row order."""
    refill_groups: NumberOrNone = 0
    """Above 0: zero-variance groups, whose rewards are all equal, are replaced by groups of randomly drawn rows. Each
    step generates at most this many replacements per group that it trains on."""
    vllm_importance_sampling_mode: Annotated[str, MODES] | None = None
    """TRL's bounded importance weights: `token_truncate` with a lookahead, else TRL's `sequence_mask`. No effect with
    `weights: bypass`."""
    rollout_correction: dict[str, object] | str | None = None
    """Changes these weights: `weights` is `bounded`, `normalized`, `none` or `bypass`, the default with a lookahead
    and a clipped loss unless these weights or their bounds are set (it also widens `epsilon_high`); `reject` masks
    tokens or completions by verl's names, e.g. `{"seq_mean_k1": [0.99, 1.01]}`. See docs/how-to/slow-rewards.md."""
    partial_rollouts: LessThan1 = 0.0
    """Above 0: the largest share of a batch's completions that a colocated vLLM may leave unfinished when training
    continues, and finishes along with the next batch. Requires a `rollout_lookahead`. Their later tokens, with their
    log-probs, are sampled from later weights."""
    scored_groups_first: bool = True
    """Whether to train on micro-batches with scored groups while other rewards are pending. The update is the same;
    only the order of its micro-batches differs. Disabled for losses that depend on this order."""
    shared_prompts: Annotated[str, _check_passes] = "auto"
    """`auto` sends a group's prompt through the model once, and skips computing old log-probs if the training forward
    pass yields the same ones. Its first use is compared with TRL's own passes. A number limits the tokens per pass: 1
    means one micro-batch per pass, which needs the least memory. `off` uses TRL's own passes. See
    docs/background/exactness.md."""
    kept_activations_gib: Annotated[float, Range(0)] = 0.0
    """Above 0, with `gradient_checkpointing`: as many of the last layers as fit, at least one, keep their activations
    instead of recomputing them (selective activation checkpointing). Passes over several micro-batches may shrink."""
    save_rollouts: bool = False
    """Whether checkpoints include the rollouts in flight, so that a resumed run need not regenerate them."""
    allow_changed_resume: bool = False
    """Whether to resume checkpoints with other rows, branches, initial weights or another prompt order. Prompts may
    then be repeated or skipped."""
    record: dict[str, object] | str | None = None
    """Whether to record every completion and its reward in `OUTPUT_DIR/record`, including customers' texts. `true`, or
    `{gib: 4, filter: my_package.privacy.mask}`: the maximum size of each process's file, beyond which the oldest steps
    are deleted, and the dotted path of a text-to-text function applied to every text. `rounds: true` makes
    conversations repeatable: vLLM generates each turn of a batch together, without a lookahead."""
    held_out_examples: int = 0
    """Number of held-out conversations shown at the end, with the policy's answers before and after training. They
    quote customers."""
    held_out_eval: bool | None = None
    """Whether to evaluate on the held-out rows before the first step; recipes also do so after the last one. Defaults
    to `True` in recipes, else `False`."""
    reward_process: bool | None = None
    """Whether rewards run in a separate process, so that they do not slow down vLLM and training. Reward functions
    must then be importable. Defaults to `True` for a recipe's built-in reward on a GPU."""
    mode: Annotated[str, RUN_MODES] = "train"
    """What a recipe runs. `rollouts` generates and scores as in training, without forward and backward passes, updates
    and evaluation. `rewards` scores made-up completions, without a model, as `preflight --stage judge --load 5`
    does."""

    def __post_init__(self) -> None:
        self.shared_prompts = str(self.shared_prompts)
        self.record = _SWITCH.get(str(self.record).lower(), self.record)
        check_settings(self)
        trl_settings.check_numbers(self)
        check_url("vllm_server_base_url", self.vllm_server_base_url)
        self._settle()
        sums_first = self.multi_objective_aggregation == "sum_then_normalize"
        other, has_hybrid = "`multi_objective_aggregation: normalize_then_sum`", self.hybrid_reference_weight > 0
        effect = f"{other}, which lacks a group baseline. Expected `sum_then_normalize`."
        check(not has_hybrid or sums_first, f"`hybrid_reference_weight` is above 0 with {effect}")
        self.kl_settings.law_of()
        effect = "the gradient of the estimator k1 of `branch_kl` is zero on average. Expected true, or k2 or k3."
        is_effective = self.kl_settings.estimator != "k1" or self.use_bias_correction_kl
        check(not self.kl_targets() or is_effective, f"with `use_bias_correction_kl: false`, {effect}")
        remedy = "so vLLM would start too. Expected one of them: set `use_vllm: false`."
        check(self.sampler is None or not self.use_vllm, f"`sampler` is given with `use_vllm: true`, {remedy}")
        effect = f"or {other}: zero-variance groups may be informative there. Expected one of the two."
        is_possible = not self.refill_groups or (sums_first and not has_hybrid)
        check(is_possible, f"`refill_groups` is set with `hybrid_reference_weight` {effect}")
        is_possible = self.max_staleness == 0 or self.max_staleness >= self.most_lookahead
        check(is_possible, "`max_staleness` is below the lookahead. Expected 0, or at least the lookahead.")
        trl_settings.load_sampler(self.sampler)
        *_, in_rounds = self.parsed_record()
        check(not in_rounds or not self.most_lookahead, "`record.rounds` needs `rollout_lookahead: 0`.")
        self.is_introduced = False
        """Whether a banner has already described the run."""
        self.beside = dict[str, object]()
        """The run's other settings, by names such as `reward.max_calls`, for trackers."""

    def _settle(self) -> None:
        """Resolve settings that depend on the machine or on other settings, and check the result."""
        if self.mode != "train":  # neither evaluates nor saves
            self.held_out_eval, self.save_strategy = False, "no"
        self.compiled = trl_settings.compile_folder(self.compile_cache_dir)
        if self.compiled is not None:  # before querying the device, when CUDA's driver reads its variable
            trl_settings.compile_into(self.compiled)
        self.eval_on_start: bool = self.eval_on_start or bool(self.held_out_eval)
        args: Any = self  # mypy does not know transformers' fields
        args.use_cpu, args.bf16, args.fp16, self.machine_notes = settle(args.use_cpu, args.bf16, args.fp16)
        args.dataloader_pin_memory = args.dataloader_pin_memory and not args.use_cpu
        trl_settings.follow_renames(args)
        if args.hub_private_repo is None:  # the hub defaults to public
            args.hub_private_repo = True
        schedule, follows_loss = self.lr_scheduler_type, ("reduce_lr_on_plateau", "greedy")
        expected = "which depends on the loss. Expected a step-based schedule, e.g. cosine."
        check(schedule not in follows_loss, f"`lr_scheduler_type` is {schedule}, {expected}")
        mode, self.vllm_importance_sampling_mode = self.vllm_importance_sampling_mode, trl_settings.mode_of(self)
        try:  # TRL checks the mode in use
            super().__post_init__()
        except (ValueError, TypeError) as error:
            raise ConfigError(f"the settings are invalid: {error}") from error
        self.vllm_importance_sampling_mode = mode
        self.machine_notes += [*trl_settings.settle_correction(self), *trl_settings.keep_folders(args.report_to)]
        if self.device.type == "cpu":  # not "cpu:1", for which torch cannot load optimizer states
            self.__dict__["_setup_devices"] = type(self.device)("cpu")
        # One process trains on one GPU; with several visible, transformers would use DataParallel.
        self._n_gpu: int = min(self._n_gpu, 1)
        is_converted = self.use_transformers_continuous_batching and (self.bf16 or self.fp16) and not self.use_vllm
        effect = "converts the trained weights to 16 bits, which loses most updates"
        expected = f"{effect}. Expected `use_vllm: true`, or neither of the two."
        check(not is_converted, f"`use_transformers_continuous_batching` with `bf16` or `fp16` {expected}")
        trl_settings.check_sampling(self, self.parsed_engine_kwargs(), self.most_lookahead)
        is_colocated, saves = self.use_vllm and self.vllm_mode == "colocate", self.save_strategy != "no"
        reasons = {
            "`use_vllm` is false": "" if self.use_vllm else trl_settings.OF_VLLM,
            "`vllm_mode` is colocate": "vllm_(server|group)_.*" if is_colocated else "",
            "`save_strategy` is no": "" if saves else "save_(steps|total_limit|only_model)|load_best_.*",
            "`rollout_lookahead` is 0": "" if self.most_lookahead else "max_staleness|partial_rollouts",
        }
        self.machine_notes += without_effect(self, reasons) if self.mode == "train" else []

    def to_dict(self) -> dict[str, object]:
        """The settings for trackers, without keys."""
        return cast(dict[str, object], without_keys({**super().to_dict(), **self.beside}))

    @property
    def correction(self) -> CorrectionSettings | None:
        """The correction by vLLM's log-probs; `None` without it."""
        is_on = self.use_vllm and self.vllm_importance_sampling_correction
        return trl_settings.correction_of(self) if is_on else None

    @property
    def pass_tokens(self) -> int | None:
        """The number in `shared_prompts`; `None` for `auto` and `off`."""
        return int(self.shared_prompts) if self.shared_prompts not in ("auto", "off") else None

    @property
    def window(self) -> int:
        """Micro-steps between two generation batches."""
        return self.steps_per_generation * self.num_iterations  # type: ignore[no-any-return]

    @property
    def most_unfinished(self) -> int:
        """Completions per process that a generation may leave unfinished (`partial_rollouts`)."""
        size = self.per_device_train_batch_size * self.steps_per_generation if self.most_lookahead else 0
        return int(self.partial_rollouts * size)

    @property
    def arrangement(self) -> list[int]:
        """Numbers that determine which completions of a generation batch belong to a micro-step."""
        return [self.world_size, self.per_device_train_batch_size, self.steps_per_generation, self.num_iterations]

    @property
    def is_sharded(self) -> bool:
        """Whether DeepSpeed or FSDP shards the policy's training."""
        return self.deepspeed_plugin is not None or bool(self.fsdp) or has_fsdp()

    def kl_targets(self) -> dict[str, KLTarget]:
        """Coefficient and band of every branch, in the order of `branches`; empty if all coefficients are 0. Raises
        `ConfigError` for invalid targets."""
        by_branch = structure("branch_kl", self.branch_kl or {}, dict)
        by_branch = {name: entry for name, entry in by_branch.items() if name != KL_SETTINGS}
        branches = self.branches or list(by_branch) or [ALL]  # the branches are unknown until there are rows
        unknown, every = sorted(set(by_branch) - set(branches)), ", ".join(branches)
        remedy = "Name your branches in it, or set `--branch_kl {} --beta 0.05` for one coefficient."
        check(not unknown, f"`branch_kl` names {', '.join(unknown)}. Expected some of: {every}. {remedy}")
        is_ignored = self.beta and self.branches and set(by_branch) == set(branches)
        remedy = "Set only one of them: remove `beta`, or set `--branch_kl {}` for a single coefficient."
        check(not is_ignored, f"`beta` is {self.beta} and `branch_kl` names every branch. {remedy}")
        targets = dict[str, KLTarget]()
        for branch in branches:
            path = f"branch_kl.{branch}"
            targets[branch] = entry_of(path, KLTarget, by_branch.get(branch, {"beta": self.beta}))
            check_range(f"{path}.beta", targets[branch].beta, TRAINING["beta"])
        return targets if any(target.beta for target in targets.values()) else {}

    @property
    def kl_settings(self) -> KLSettings:
        """KL settings common to all branches."""
        by_branch = structure("branch_kl", self.branch_kl or {}, dict)
        return entry_of("branch_kl.settings", KLSettings, by_branch.get(KL_SETTINGS))

    def kl_penalty(self) -> PenaltySettings:
        """The per-token KL estimator and its weight in the loss."""
        given = self.correction
        bound = given.high if given is not None and given.weights == BYPASS else None
        return PenaltySettings(
            estimator=self.kl_settings.estimator,
            clamp=self.kl_settings.clamp,
            bias_correction=self.use_bias_correction_kl,
            level=self.importance_sampling_level,
            off_policy=self.most_lookahead > 0,
            bound=math.log(bound) if bound else math.inf,
        )

    @property
    def most_lookahead(self) -> int:
        """The maximum number of optimizer steps that rollouts may be ahead of training."""
        return max(self.rollout_lookahead, self.max_rollout_lookahead)

    def parsed_record(self) -> tuple[float, Callable[[str], str] | None, bool]:
        """The maximum size of a process's record in GiB, the filter for recorded texts, and `rounds`."""
        settings = entry_of("record", RecordSettings, {} if self.record in (None, *_SWITCH.values()) else self.record)
        return settings.gib, settings.clean, settings.rounds

    def parsed_engine_kwargs(self) -> dict[str, object]:
        """`vllm_engine_kwargs` as Python values, without null ones."""
        options = structure("vllm_engine_kwargs", self.vllm_engine_kwargs or {}, dict)
        return {name: value for name, value in options.items() if value is not None}
