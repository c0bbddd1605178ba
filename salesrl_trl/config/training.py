"""Settings of training: branches, their KL, rollouts, vLLM. Owns the additions to TRL's `GRPOConfig`."""

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

KL_SETTINGS = "settings"  # an entry of `branch_kl` that is no branch
FIXED = "fixed"  # a law by which the coefficients stay
COOLDOWN = "cooldown_steps"  # an entry of `law_settings` that is no argument of the law: it holds for every law
_SWITCH: dict[str, Any] = {"true": True, "false": False}  # texts of a command line

_CLAMP = Range(0, LARGEST_CLAMP, "the ratio times the estimate grows as e^(2 * clamp), which overflows above 44")


@dataclass(frozen=True, kw_only=True)
class KLSettings:
    """`branch_kl.settings`, checked."""

    estimator: Annotated[str, ESTIMATORS] = "k3"
    """`k1`, `k2` or `k3`, as in http://joschu.net/blog/kl-approx.html. TRL has k3. Without `use_bias_correction_kl` k1
    has no gradient; with it k2 has another one than the KL's."""
    clamp: Annotated[float, _CLAMP] = 10.0
    """Log-ratio in nats, up to 40: beyond, the penalty is linear. 0 is TRL's own formula, which overflows at 88."""
    update_steps: Count = 5
    """Optimizer steps in a window: a branch's KL is measured over a window before its coefficient moves."""
    law: str | None = None
    """Dotted path of a class that moves the coefficients instead of the packaged law: see `kl.law.KLLaw`. `fixed`
    moves nothing: each branch's KL is still compared with its band in the logs."""
    law_settings: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the law. The packaged one has `max_step`: the largest factor of a change, 2 by default.
    `cooldown_steps` holds for every law: optimizer steps after a change that no window includes, 0 by default."""

    def __post_init__(self) -> None:
        check_value(f"law_settings.{COOLDOWN}", self.law_settings.get(COOLDOWN, 0), NumberOrNone)

    @property
    def windows(self) -> WindowSettings:
        """The windows in which a branch's KL is measured."""
        return WindowSettings(update_steps=self.update_steps, cooldown_steps=self.law_settings.get(COOLDOWN, 0))

    def law_of(self, law_object: KLLaw | None = None) -> KLLaw | None:
        """The law that moves the coefficients; `None` if they stay. `law_object` takes the place of the settings' law.
        Raises `ConfigError` for a law that can't work, and for settings that the law does not have."""
        arguments = {name: value for name, value in self.law_settings.items() if name != COOLDOWN}
        law = law_object
        if law_object is not None or self.law == FIXED:
            check(
                (law_object is None or self.law is None) and not arguments,
                "the KL's law is an object or `fixed`, and by `law` or `law_settings` of `branch_kl.settings` too. "
                "Expected one.",
            )
        elif self.law is None:
            check_names("branch_kl.settings.law_settings", arguments, ("max_step", COOLDOWN))
            law = AdaptiveLaw(**arguments)
        else:
            make = cast(Callable[..., KLLaw], load_object(self.law, "branch_kl.settings.law"))
            try:
                law = make(**arguments)
            except TypeError as error:
                raise ConfigError(
                    f"the KL's law {self.law} can't be made with `law_settings: {arguments}`: {error}. Expected a "
                    "class, and its keyword arguments."
                ) from error
        if law is not None:
            check_law(law)
        return law


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """`record`, checked."""

    gib: Positive = 4.0
    filter: str | None = None

    @property
    def clean(self) -> Callable[[str], str] | None:
        """The function of `filter`. Raises `ConfigError` if it makes no text of one."""
        if self.filter is None:
            return None
        clean = cast("Callable[[str], str]", load_object(self.filter, "record.filter"))
        try:
            check(isinstance(clean("a text"), str), f"`record.filter` {self.filter!r} returns no text. Expected one.")
        except TypeError as error:
            raise ConfigError(f"`record.filter` {self.filter!r} takes no text: {error}. Expected one.") from error
        return clean


def _check_branches(setting: str, names: list[str]) -> None:
    check(len(set(names)) == len(names), f"`{setting}` is {names}. Expected each name once.")


def _check_passes(setting: str, value: str) -> None:
    check(
        bool(re.fullmatch("auto|off|[1-9][0-9]*", value)),
        f"`{setting}` is {value!r}. Expected auto, off, or the most tokens of a pass: a whole number of 1 or more. In "
        "YAML put off in quotes.",
    )


@takes_former_names
@dataclass
class SalesGRPOConfig(GRPOConfig):
    """TRL's `GRPOConfig`, with the settings that `SalesGRPOTrainer` adds."""

    branches: Annotated[list[str], _check_branches] = field(default_factory=list)
    """Branch names that a row may have. Defaults to those in the dataset's column `branch`, or to one branch `all`
    without this column. In recipes: `["fairness", "hallucination"]`, and each needs a rubric."""
    branch_kl: dict[str, object] | str | None = None
    """Branch to KL coefficient and target band in nats per token, for example `{"fairness": {"beta": 0.1, "low": 0.02,
    "high": 0.06}}`. `beta_min` and `beta_max` bound the coefficient: a hundredth and a hundred times `beta`. Without
    `low` and `high` it is fixed. A branch that is not named has the fixed coefficient `beta`. `settings` beside the
    branches holds for all: `{"settings": {"estimator": "k2", "law": "fixed"}}`. Without any coefficient there is no
    reference model."""
    hybrid_reference_weight: Share = 0.0
    """w in [0, 1]. A group's baseline is (1 - w) times its mean reward, plus w times the reward of the 32B endpoint's
    answer. 0 is GRPO. A group without a reference has w = 0, and is counted."""
    sampler: str | None = None
    """Dotted path of a class that generates instead of TRL's engines, with `use_vllm: false`.
    `salesrl_trl.generation.sampler.Sampler` describes such a class."""
    compile_cache_dir: str | None = None
    """One folder for the compiled code of vLLM, torch, Triton, FlashInfer and CUDA, so that later starts load it.
    `auto` is `compiled` in the package's cache folder (`SALESRL_CACHE_DIR`). Without it each library uses its own
    place."""
    vllm_engine_kwargs: dict[str, object] | str | None = None
    """Arguments of `vllm.LLM` for a colocated engine, for example `{"enforce_eager": true}`. They replace TRL's.
    Without `enforce_eager` a CPU is eager, and a GPU captures CUDA graphs and compiles nothing; `false` compiles too,
    a minute at the first start. Without `load_format` weights are made up (`dummy`) where the first push sets every
    one. `quantization` takes `fp8_per_channel`, `fp8_per_tensor` or `fp8_per_block` on a GPU: each push quantises the
    weights anew, and the importance ratio corrects for the difference."""
    max_sampling_logp_difference: Limit = 0.5
    """Largest mean absolute difference between vLLM's and the trainer's log-probs of the first batch, in nats. Above
    it the run stops: vLLM samples from other weights. Usual are 0.002 in float32 and 0.01 in bf16."""
    min_valid_reward_fraction: Share = 0.5
    """Smallest share of scored completions in a generation batch. A batch below it does not move the policy."""
    max_skipped_generations: Count = 3
    """Skipped batches in a row after which the run saves a checkpoint and stops with the reason. At its last step two
    are enough, and so is an hour since the first of them."""
    rollout_lookahead: NumberOrNone = 0
    """Optimizer steps that rollouts may be ahead of training: so many later steps are generated and scored meanwhile.
    0 is on-policy, with TRL's own results. A higher number hides slow rewards; the rollouts' weights are up to so many
    steps old, and importance ratios correct for that."""
    max_rollout_lookahead: NumberOrNone = 0
    """Above 0 the run chooses its lookahead itself, at most this one, from `rollout_lookahead` on: the least number
    with which training hardly waits for rewards. It is measured all the time. 0 keeps `rollout_lookahead`."""
    max_staleness: NumberOrNone = 0
    """Above the lookahead: the most optimizer steps between the weights that sampled a group and the step that trains
    on it. A step then trains on the first whole groups that are scored, and on any that can't wait. Every row still
    comes once an epoch. 0, or the lookahead, keeps the order of rows."""
    refill_groups: NumberOrNone = 0
    """Above 0: a group whose rewards are all equal, which teaches nothing, is replaced by a group of another row,
    drawn at random. In a step at most so many times as many groups are generated beside those that it trains on."""
    partial_rollouts: LessThan1 = 0.0
    """Above 0: the largest share of a batch's completions that vLLM in the training process may leave unfinished when
    training goes on, and finishes beside the next batch. It needs a `rollout_lookahead`. Their later tokens, and these
    tokens' log-probs, come from later weights."""
    scored_groups_first: bool = True
    """Whether to train on micro-batches with scored groups while other rewards are missing. The update is the same;
    only the order of its micro-batches differs. It is off for losses that depend on this order."""
    shared_prompts: Annotated[str, _check_passes] = "auto"
    """`auto` sends the prompt of a group through the model once, and leaves out old log-probs where the pass that
    trains gives the same ones. The first use is compared with TRL's own passes. A number is the most tokens of a pass:
    1 is one micro-batch a pass, which takes the least memory. `off` makes TRL's own passes. docs/background/exactness.md#shared-prompts has
    more."""
    save_rollouts: bool = False
    """Whether checkpoints hold the rollouts in flight, so that a resumed run with a lookahead generates none again."""
    allow_changed_resume: bool = False
    """Whether to resume a checkpoint of other rows, branches, first weights or another order of prompts. Prompts may
    then come twice or not at all."""
    record: dict[str, object] | str | None = None
    """Whether to keep what became of every completion in `OUTPUT_DIR/record`, customers' texts included. `true`, or
    `{gib: 4, filter: my_package.privacy.mask}`: the largest size of each process's file, beyond which the oldest steps
    go, and the dotted path of a function from text to text that every text goes through."""
    held_out_examples: int = 0
    """Held-out conversations that are shown at the end, with what the policy wrote before and after training. They
    quote customers."""
    held_out_eval: bool | None = None
    """Whether to evaluate on the held-out rows before the first step. The recipes also do so after the last one.
    Defaults to `True` in recipes, else to `False`."""
    reward_process: bool | None = None
    """Whether the rewards run in a process of their own, where they take no time of vLLM's and of training. Reward
    functions then have to be importable. Defaults to `True` for the packaged reward of a recipe on a GPU."""
    mode: Annotated[str, RUN_MODES] = "train"
    """Extent of a recipe. `rollouts` generates and scores as in training, without passes, update and evaluation.
    `rewards` scores made-up completions, without a model, as `preflight --stage judge --load 5` does."""

    def __post_init__(self) -> None:
        self.shared_prompts = str(self.shared_prompts)
        self.record = _SWITCH.get(str(self.record).lower(), self.record)
        check_settings(self)
        trl_settings.check_numbers(self)
        check_url("vllm_server_base_url", self.vllm_server_base_url)
        self._settle()
        sums_first = self.multi_objective_aggregation == "sum_then_normalize"
        check(
            self.hybrid_reference_weight == 0 or sums_first,
            "`hybrid_reference_weight` is more than 0 with `multi_objective_aggregation: normalize_then_sum`, which "
            "has no group baseline. Expected `sum_then_normalize`.",
        )
        self.kl_settings.law_of()
        check(
            not self.kl_targets() or self.kl_settings.estimator != "k1" or self.use_bias_correction_kl,
            "the estimator k1 of `branch_kl` has no effect with `use_bias_correction_kl: false`: its gradient is zero "
            "on average. Expected the correction, or k2 or k3.",
        )
        check(
            self.sampler is None or not self.use_vllm,
            "`sampler` is given with `use_vllm: true`, so that vLLM would start beside it. Expected one of them: set "
            "`use_vllm: false`.",
        )
        check(
            not self.refill_groups or (self.hybrid_reference_weight == 0 and sums_first),
            "`refill_groups` with `hybrid_reference_weight`, or with `multi_objective_aggregation: "
            "normalize_then_sum`: a group of equal rewards may teach there. Expected one of the two.",
        )
        check(
            self.max_staleness == 0 or self.max_staleness >= self.most_lookahead,
            "`max_staleness` is below the steps that rollouts are ahead. Expected 0, or at least as many. Raise it, "
            "or lower the lookahead.",
        )
        trl_settings.load_sampler(self.sampler)
        self.parsed_record()
        self.is_introduced = False
        """Whether a banner has said what the run consists of."""
        self.beside = dict[str, object]()
        """Settings of the run that are not the trainer's, by names such as `reward.max_calls`, for trackers."""

    def _settle(self) -> None:
        """Settle what depends on the machine and on other settings, and check what follows from that."""
        if self.mode != "train":  # nothing is evaluated or saved
            self.held_out_eval, self.save_strategy = False, "no"
        self.compiled = trl_settings.compile_folder(self.compile_cache_dir)
        if self.compiled is not None:  # before the device is asked for: CUDA's driver reads its variable then
            trl_settings.compile_into(self.compiled)
        self.eval_on_start: bool = self.eval_on_start or bool(self.held_out_eval)
        args: Any = self  # mypy does not know the fields of transformers
        args.use_cpu, args.bf16, args.fp16, self.machine_notes = settle(args.use_cpu, args.bf16, args.fp16)
        args.dataloader_pin_memory = args.dataloader_pin_memory and not args.use_cpu
        if args.hub_private_repo is None:  # the hub's own default is public
            args.hub_private_repo = True
        check(
            self.lr_scheduler_type not in ("reduce_lr_on_plateau", "greedy"),
            f"`lr_scheduler_type` is {self.lr_scheduler_type}, which lowers the rate when a loss no longer falls. "
            "Expected a schedule of steps, such as cosine.",
        )
        try:
            super().__post_init__()
        except (ValueError, TypeError) as error:
            raise ConfigError(f"the settings do not work: {error}") from error
        self.machine_notes += trl_settings.keep_folders(args.report_to)
        if self.device.type == "cpu":  # not "cpu:1", for which torch can't load an optimizer's state
            self.__dict__["_setup_devices"] = type(self.device)("cpu")
        # One process trains on one GPU. With several visible, transformers would split batches by DataParallel.
        self._n_gpu: int = min(self._n_gpu, 1)
        check(
            self.use_vllm or not self.use_transformers_continuous_batching or not (self.bf16 or self.fp16),
            "`use_transformers_continuous_batching` with `bf16` or `fp16` turns the weights in training into 16 bits, "
            "where most updates are lost. Expected `use_vllm: true`, or neither of the two.",
        )
        trl_settings.check_sampling(self, self.parsed_engine_kwargs(), self.most_lookahead)
        is_colocated, is_unsaved = self.use_vllm and self.vllm_mode == "colocate", self.save_strategy == "no"
        reasons = {
            "`use_vllm` is false": "" if self.use_vllm else "vllm_.*|max_sampling_logp_difference",
            "`vllm_mode` is colocate": "vllm_(server|group)_.*" * is_colocated,
            "`save_strategy` is no": "save_(steps|total_limit|only_model)|load_best_.*" * is_unsaved,
            "`rollout_lookahead` is 0": "" if self.most_lookahead else "max_staleness|partial_rollouts",
        }
        self.machine_notes += without_effect(self, reasons) * (self.mode == "train")

    def to_dict(self) -> dict[str, object]:
        """The settings as trackers get them: without keys."""
        return cast(dict[str, object], without_keys({**super().to_dict(), **self.beside}))

    @property
    def pass_tokens(self) -> int | None:
        """The number of `shared_prompts`. `None` with `auto` and `off`."""
        return int(self.shared_prompts) if self.shared_prompts not in ("auto", "off") else None

    @property
    def window(self) -> int:
        """Micro-steps between two generation batches."""
        return self.steps_per_generation * self.num_iterations  # type: ignore[no-any-return]

    @property
    def most_unfinished(self) -> int:
        """Completions of a process that a generation may leave unfinished (`partial_rollouts`)."""
        size = self.per_device_train_batch_size * self.steps_per_generation if self.most_lookahead else 0
        return int(self.partial_rollouts * size)

    @property
    def arrangement(self) -> list[int]:
        """Figures that decide which completions of a generation batch belong to a micro-step."""
        return [self.world_size, self.per_device_train_batch_size, self.steps_per_generation, self.num_iterations]

    @property
    def is_sharded(self) -> bool:
        """Whether DeepSpeed or FSDP splits the policy's training over processes."""
        return self.deepspeed_plugin is not None or bool(self.fsdp) or has_fsdp()

    def kl_targets(self) -> dict[str, KLTarget]:
        """Coefficient and band of every branch, in the order of `branches`; empty if all coefficients are 0. Raises
        `ConfigError` for targets that can't work."""
        by_branch = structure("branch_kl", self.branch_kl or {}, dict)
        by_branch = {name: entry for name, entry in by_branch.items() if name != KL_SETTINGS}
        branches = self.branches or list(by_branch) or [ALL]  # without rows the branches are not known yet
        unknown = sorted(set(by_branch) - set(branches))
        check(
            not unknown,
            f"`branch_kl` names {', '.join(unknown)}. Expected some of: {', '.join(branches)}. Name your branches in "
            "it, or give `--branch_kl {} --beta 0.05` for one coefficient.",
        )
        check(
            not self.beta or not self.branches or set(by_branch) != set(branches),
            f"`beta` is {self.beta} and `branch_kl` names every branch, so that `beta` has no effect. Expected one of "
            "them: leave out `beta`, or give `--branch_kl {}` for one coefficient.",
        )
        targets = dict[str, KLTarget]()
        for branch in branches:
            path = f"branch_kl.{branch}"
            targets[branch] = entry_of(path, KLTarget, by_branch.get(branch, {"beta": self.beta}))
            check_range(f"{path}.beta", targets[branch].beta, TRAINING["beta"])
        return targets if any(target.beta for target in targets.values()) else {}

    @property
    def kl_settings(self) -> KLSettings:
        """What holds for the KL of every branch."""
        by_branch = structure("branch_kl", self.branch_kl or {}, dict)
        return entry_of("branch_kl.settings", KLSettings, by_branch.get(KL_SETTINGS))

    def kl_penalty(self) -> PenaltySettings:
        """The estimator of a token's KL, and its weight in the loss."""
        return PenaltySettings(
            estimator=self.kl_settings.estimator,
            clamp=self.kl_settings.clamp,
            bias_correction=self.use_bias_correction_kl,
            level=self.importance_sampling_level,
            off_policy=self.most_lookahead > 0,
        )

    @property
    def most_lookahead(self) -> int:
        """The most optimizer steps that rollouts may be ahead of training."""
        return max(self.rollout_lookahead, self.max_rollout_lookahead)

    def parsed_record(self) -> tuple[float, Callable[[str], str] | None]:
        """The largest size of a process's record in GiB, and the filter of recorded texts."""
        settings = entry_of("record", RecordSettings, {} if self.record in (None, *_SWITCH.values()) else self.record)
        return settings.gib, settings.clean

    def parsed_engine_kwargs(self) -> dict[str, object]:
        """`vllm_engine_kwargs` as Python values, without those that are null."""
        options = structure("vllm_engine_kwargs", self.vllm_engine_kwargs or {}, dict)
        return {name: value for name, value in options.items() if value is not None}
