"""What components use of TRL's trainer: makes its `Hooks`. Overrides nothing: `trainer`, its only user, does."""

import contextlib
import copy
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import Trainer
from trl.models.utils import disable_gradient_checkpointing

from salesrl_trl.errors import DataError
from salesrl_trl.generation.sampler import logps_arguments
from salesrl_trl.ground.process import patched
from salesrl_trl.kl.penalty import BranchPenalty
from salesrl_trl.reward.reward_loop import RewardColumn
from salesrl_trl.rollout.in_flight import Rollout
from salesrl_trl.rollout.rollout_scoring import Output
from salesrl_trl.telemetry.timeline import Timeline
from salesrl_trl.update.stopping import StepSnapshot
from salesrl_trl.wiring.part import Hooks
from salesrl_trl.wiring.trl_generation import TRLGeneration


class TRLAccess(TRLGeneration):
    updates: bool
    _timeline: Timeline
    _loss_inputs: dict[str, object] | None = None  # the micro-batch whose loss TRL computes
    _logs: dict[str, Any]
    beta: float | BranchPenalty

    def _hooks(self) -> Hooks:
        return Hooks(
            model=self.model,
            ref_model=self.ref_model,
            step=lambda: self.state.global_step,
            accelerator=self.accelerator,
            is_deepspeed=self.is_deepspeed_enabled,
            updates=self.updates,
            engine=self.vllm_generation if self.use_vllm else self.generation_config,
            has_rollout_func=self.rollout_func is not None,
            tool_names=[each.__name__ for each in self.tools],
            tools="an environment" if self.environment_factories is not None else "tools" if self.tools else None,
            tokenizer=self._tokenizer,
            eos_token_ids=self.eos_token_ids,
            chat_template=self.chat_template,
            reward_weights=self.reward_weights.tolist(),
            reward_names=self.reward_func_names,
            reward_answered=[isinstance(function, RewardColumn) for function in self.reward_funcs],
            group=lambda: self.num_generations if self.model.training else self.num_generations_eval,
            reward_arguments=lambda: {"trainer_state": self.state},
            has_entropy_bonus=self._entropy_bonus_enabled,
            has_aux_loss=self.aux_loss_enabled,
            num_generations_eval=self.num_generations_eval,
            generate=self._sample,
            ask=self._stream,
            converse=self._converse,
            play=self._play,
            go_on=self._go_on,
            reads_pictures=self._is_vlm,
            logps_of=self._logps_of,
            score=self._score,
            advantages=lambda: self._logs["advantages"],
            set_aside=self._set_aside,
            drop_gradients=self._drop_gradients,
            save=lambda folder: self.save_model(str(folder), _internal_call=True),  # pushes to no hub
            log=functools.partial(Trainer.log, self),
            callbacks=self.callback_handler,
            eval_dataset=self.eval_dataset,
            position=lambda: (self._step, self._buffered_inputs is not None),
            capture=lambda: StepSnapshot(
                self.state, self.optimizer, self.lr_scheduler, self.components.kl, (self._step, self._buffered_inputs)
            ),
            restore=self._restore,
        )

    def _restore(self, snapshot: StepSnapshot) -> None:
        self._step, self._buffered_inputs = snapshot.restore()
        self._metrics["train"].clear()  # of the step that is undone
        self.components.passes.forget()
        self.components.normaliser.forget()

    def _drop_gradients(self) -> None:
        if self.accelerator.scaler is not None:
            with contextlib.suppress(RuntimeError):  # clipping has done it
                self.accelerator.unscale_gradients()  # else the scaler refuses a step in which it saw no gradient
        self.optimizer.zero_grad(set_to_none=True)

    def _check_size(self, rows: int) -> None:
        prompts = self.args.generation_batch_size // self.num_generations
        if rows < prompts:
            raise DataError(
                f"the training dataset has {rows or 'too few'} rows, and a generation batch takes {prompts} prompts: "
                "no step can be done. Expected as many rows. Add some, or lower `per_device_train_batch_size` or "
                "`gradient_accumulation_steps`."
            )

    def _score(self, rollout: Rollout) -> Output:
        """TRL's own method. Its figures and tables are kept only when all rewards are in."""
        mode = rollout.mode
        before = (self._metrics[mode], self._logs)
        output: Output = super()._generate_and_score_completions(rollout.inputs)
        if not rollout.is_complete:
            self._metrics[mode], self._logs = before
        elif not self.components.policy.weight_check.is_done and self.vllm_generation.temperature == self.temperature:
            # not of an evaluation, which answers greedily
            self.components.policy.weight_check.check(output, self._logps_of)
        return output

    def _logps_of(self, output: Mapping[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            arguments = logps_arguments(output, self.args.per_device_train_batch_size)
            return self._get_per_token_logps_and_entropies(self.model, **arguments)[0]

    @contextlib.contextmanager
    def _set_aside(self) -> Iterator[None]:
        """While active, the policy evaluates, one answer a prompt. Figures and tables of others stay as they are."""
        was_training = self.model.training
        self.model.eval()
        try:
            with (
                patched(self, "num_generations_eval", 1),
                patched(self, "_metrics", {**self._metrics, "eval": defaultdict(list)}),
                patched(self, "_logs", copy.deepcopy(self._logs)),
            ):
                yield
        finally:
            self.model.train(was_training)
