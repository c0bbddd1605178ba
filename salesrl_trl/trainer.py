"""The trainer: TRL's `GRPOTrainer` with a handful of hooks overridden.

Owns the wiring between TRL and this package and no arithmetic of its own.
"""

import asyncio
import logging
from collections import Counter
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather, gather_object
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOTrainer

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.errors import ConfigError, ServiceError, ServiceUnavailable, TooFewRewardsError, WeightSyncError
from salesrl_trl.generation import engine_kwargs, has_tied_head, vllm_dtype, vllm_engine_options
from salesrl_trl.reward.chain import SalesReward
from salesrl_trl.telemetry.logs import LeaveOut
from salesrl_trl.telemetry.metrics import (
    SKIPPED_UPDATE,
    JudgeBias,
    Means,
    add_report,
    add_rewards,
    encode,
    encode_report,
    metric_names,
    report_names,
)
from salesrl_trl.types import Outcome

logger = get_logger(__name__)
_PLAIN_LOGGER = logging.getLogger(__name__)  # for lines that look like those of callbacks, without a rank

# Upstream warns of a row that could not be scored with its prompt and completion: customers' text.
_UNSCORABLE_WARNING = LeaveOut("All reward functions returned None")
_UPSTREAM_LOGGER = logging.getLogger("trl.trainer.grpo_trainer")

_LOGP_DIFFERENCE = "sampling/sampling_logp_difference/mean"


class SalesGRPOTrainer(GRPOTrainer):
    """GRPO against RAG services and a judge.

    Changes these things only:
    - `__init__`: vLLM gets the engine options TRL does not pass through, and TRL's warning of a row that could not be
      scored, which prints prompt and completion, is left out;
    - `_calculate_rewards`: counts outcomes by branch over all ranks, and decides whether enough was scored;
    - `_generate_and_score_completions`: checks the first weight push, and takes a skipped batch out of the loss;
    - `log`: adds the package's metrics, under the same keys at every step;
    - `warm_up` and `finish`, which TRL does not have, ask every service once and close the connections;
    - `train`: raises `TooFewRewardsError` when that is why training stopped.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            The policy.
        reward (`SalesReward`):
            The reward chain.
        args (`SalesGRPOConfig`):
            Settings.
        kwargs:
            `GRPOTrainer`'s own. The datasets hold the columns `prompt` and `row`.
    """

    args: SalesGRPOConfig

    def __init__(self, model: PreTrainedModel, reward: SalesReward, args: SalesGRPOConfig, **kwargs: Any) -> None:
        self._reward = reward
        self._report_names = report_names(reward.provider_names, reward.service_names)
        names = (*metric_names(args.branches), *self._report_names)
        self._means = {mode: Means(names) for mode in ("train", "eval")}
        self._bias = {mode: JudgeBias() for mode in ("train", "eval")}
        self._skipping = False
        self._skipped_in_a_row = 0
        self._stop_reason: str | None = None
        self._weights_checked = False
        self.failures: Counter[str] = Counter()
        """Reason code to count over the current logging interval, on all ranks."""
        _UPSTREAM_LOGGER.addFilter(_UNSCORABLE_WARNING)  # once: a logger takes the same filter no second time
        with vllm_engine_options(_engine_options(model, args)):
            super().__init__(model=model, reward_funcs=reward, args=args, **kwargs)
        self.add_callback(_SkipAndStop(self))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's `train`.

        Raises:
            `TooFewRewardsError`: after `max_skipped_generations` skipped in a row. A checkpoint was saved before.
            `WeightSyncError`: if vLLM samples from other weights than the ones in training.
        """
        output = super().train(*args, **kwargs)
        if self._stop_reason is not None:
            raise TooFewRewardsError(self._stop_reason)
        return output

    def warm_up(self) -> None:
        """Ask every service once, on every rank, before anything waits for them.

        Raises:
            `ServiceUnavailable`: the 8B endpoint, or every judge, did not answer; on all ranks alike.
        """
        told = asyncio.run_coroutine_threadsafe(self._reward.warm_up(), self.async_loop).result()
        unusable = [str(error) for error in self._reward.unusable(told)]
        figures = [result.code if isinstance(result, ServiceError) else result for result in told.values()]
        everywhere, failures = gather_object([figures]), gather_object(unusable)
        if self.accelerator.is_main_process:
            for name, *results in zip(told, *everywhere, strict=True):
                codes = sorted({result for result in results if isinstance(result, str)})
                _PLAIN_LOGGER.info(f"[WarmUp] {name}: {', '.join(codes) if codes else f'{max(results):.2f} s'}")
        if failures:
            raise ServiceUnavailable(
                f"the services did not pass their warm-up, so nothing could be scored: {failures[0]} Mend the "
                "service and launch again (`warm_up_services: false` leaves the check out)."
            )

    def finish(self) -> None:
        """Close the reward's connections, on the event loop they belong to. The trainer can't score after this."""
        asyncio.run_coroutine_threadsafe(self._reward.aclose(), self.async_loop).result()

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        mode = "train" if self.model.training else "eval"
        means = self._means[mode]
        branches = self.args.branches
        branch_ids = [branches.index(self._reward.branch_of(example["row"])) for example in inputs]
        table = encode(self._reward.last, branch_ids).to(self.accelerator.device)  # (B, 4)
        add_rewards(means, gather(table), branches)
        reasons = [reward.reason for reward in self._reward.last if reward.outcome is not Outcome.OK]
        self.failures.update(gather_object(reasons))
        report = encode_report(self._reward.take_report()).to(self.accelerator.device)  # (1, columns)
        add_report(means, self._bias[mode], gather(report), self._report_names)
        if mode == "train":
            scored = ~torch.isnan(rewards_per_func).all(dim=1)  # (world size x B,), the same on every rank
            self._decide(scored.float().mean().item())
        means.add(SKIPPED_UPDATE, float(self._skipping and mode == "train"), 1)
        if self.args.log_completions:
            self._log_components()
        return rewards_per_func

    def _log_components(self) -> None:
        """What each reward was made of, beside TRL's table of completions."""
        rewards = self._reward.last
        self._log_completion_extra("outcome", [reward.outcome.value for reward in rewards])
        self._log_completion_extra("reason", [reward.reason for reward in rewards])
        for name in self._reward.component_names:
            self._log_completion_extra(name, [reward.components.get(name) for reward in rewards])

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self._check_weights()
        if self._skipping and self.model.training:
            # No token counts: the loss and its gradient are zero under every normaliser.
            output["completion_mask"] = torch.zeros_like(output["completion_mask"])
            output["advantages"] = torch.zeros_like(output["advantages"])
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = "train" if self.model.training else "eval"
        if self._metrics[mode]:  # transformers also logs summaries, at which nothing was measured
            for name, value in {**self._means[mode].flush(), **self._bias[mode].flush()}.items():
                self._metrics[mode][name] = [value]
        super().log(logs, start_time)
        self.failures.clear()

    def _decide(self, scored_fraction: float) -> None:
        """Skip a batch of which too little was scored; ask for a stop after too many in a row."""
        wanted = self.args.min_valid_reward_fraction
        self._skipping = scored_fraction < wanted
        if not self._skipping:
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += 1
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.failures.most_common(5))
        logger.warning(
            f"skipping an update: {scored_fraction:.0%} of the completions could be scored, wanted {wanted:.0%} "
            f"({reasons})"
        )
        if self._skipped_in_a_row >= self.args.max_skipped_generations:
            self._stop_reason = (
                f"{self._skipped_in_a_row} generation batches in a row had fewer than {wanted:.0%} of their "
                f"completions scored. Failures in the last one: {reasons}. A checkpoint was saved; mend the service "
                "and go on with --resume_from_checkpoint DIR."
            )

    def _check_weights(self) -> None:
        """Stop a run whose first batch shows that vLLM does not have the training weights."""
        mode = "train" if self.model.training else "eval"
        seen = self._metrics[mode].get(_LOGP_DIFFERENCE)
        if self._weights_checked or not seen:
            return
        self._weights_checked = True
        limit = self.args.max_sampling_logp_difference
        if not seen[-1] <= limit:  # NaN stops too
            tied = has_tied_head(self.accelerator.unwrap_model(self.model))
            raise WeightSyncError(
                f"vLLM's log-probs differ from the trainer's by {seen[-1]:.3f} nats on average, expected at most "
                f"{limit:g}: it samples from other weights, or in another number format, than the ones in training. "
                + ("The output head is tied to the embedding: on a CPU use an untied model. " if tied else "")
                + "Check `vllm_dtype` and `vllm_engine_kwargs`; a raised `max_sampling_logp_difference` only hides it."
            )


class _SkipAndStop(TrainerCallback):
    """Keeps a skipped batch from moving the policy by momentum, and ends a run that can't be scored.

    Under DeepSpeed the optimizer steps inside `backward`, before this: there the gradient of a skipped batch is zero,
    but momentum still moves the weights.
    """

    def __init__(self, trainer: SalesGRPOTrainer) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._trainer._skipping:
            self._trainer.optimizer.zero_grad(set_to_none=True)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._trainer._stop_reason is not None:
            control.should_save = True
            control.should_training_stop = True


def _engine_options(model: PreTrainedModel, args: SalesGRPOConfig) -> dict[str, Any]:
    extra = args.parsed_engine_kwargs()
    if args.use_vllm and args.vllm_mode == "server" and (extra or args.vllm_load_format != "auto"):
        raise ConfigError(
            "`vllm_load_format` and `vllm_engine_kwargs` set up the colocated engine. With `vllm_mode: server` give "
            "them to the server's command line."
        )
    process = args.process_index // args.vllm_tensor_parallel_size
    return engine_kwargs(
        enforce_eager=args.device.type == "cpu" if args.vllm_enforce_eager is None else args.vllm_enforce_eager,
        load_format=args.vllm_load_format,
        dtype=vllm_dtype(args.vllm_dtype, bf16=args.bf16, fp16=args.fp16, model_dtype=model.dtype),
        seed=args.seed * 1000 + process,  # a group of tensor-parallel ranks samples alike, every other one differently
        extra=extra,
    )
