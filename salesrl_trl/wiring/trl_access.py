"""The components' access to TRL's trainer, which they never hold themselves."""

import contextlib
import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.trainer_callback import CallbackHandler
from trl import GRPOTrainer

from salesrl_trl.ground.process import patched
from salesrl_trl.kl.penalty import loss_mask
from salesrl_trl.reward.reward_loop import RewardColumn
from salesrl_trl.rollout.in_flight import Rollout
from salesrl_trl.rollout.rollout_scoring import Output
from salesrl_trl.update.stopping import StepSnapshot
from salesrl_trl.wiring.trl_generation import TRLGeneration

if TYPE_CHECKING:
    from salesrl_trl.generation.vllm import SalesVLLMGeneration  # imports vLLM, which takes seconds


class Hooks(TRLGeneration):
    """Values and operations of TRL's trainer."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        super().__init__(trainer)
        self.ref_model: torch.nn.Module | None = trainer.ref_model
        self.accelerator: Accelerator = trainer.accelerator
        self.is_deepspeed: bool = trainer.is_deepspeed_enabled
        self.updates: bool = trainer.updates  # whether steps change the policy
        self.engine: SalesVLLMGeneration | GenerationConfig = (
            trainer.vllm_generation if trainer.use_vllm else trainer.generation_config
        )  # or the policy's own generation settings
        self.has_rollout_func = trainer.rollout_func is not None
        self.partner = trainer.partner
        own = "tools" if trainer.tools else "a partner" if self.partner is not None else None
        self.tools = own if trainer.environment_factories is None else "an environment"
        """What completions may call while TRL generates them, if anything."""
        self.tool_names = [each.__name__ for each in trainer.tools]
        self.tokenizer: PreTrainedTokenizerBase = trainer._tokenizer
        self.eos_token_ids: tuple[int, ...] = tuple(trainer.eos_token_ids)
        self.temperature: float = trainer.args.temperature
        self.max_completion_length: int = trainer.args.max_completion_length
        self.reward_weights: Sequence[float] = trainer.reward_weights.tolist()
        self.reward_names: Sequence[str] = trainer.reward_func_names  # as logged by TRL
        self.reward_answered = [isinstance(function, RewardColumn) for function in trainer.reward_funcs]
        self.has_entropy_bonus: bool = trainer._entropy_bonus_enabled
        self.has_aux_loss: bool = trainer.aux_loss_enabled
        self.num_generations_eval: int = trainer.num_generations_eval
        self.reads_pictures: bool = trainer._is_vlm
        self.callbacks: CallbackHandler = trainer.callback_handler
        self.eval_dataset: object = trainer.eval_dataset

    def model(self) -> PreTrainedModel:
        """The policy, without the wrappers of distributed training."""
        return self.accelerator.unwrap_model(self._trainer.model)

    def step(self) -> int:
        return self._trainer.state.global_step

    def position(self) -> tuple[int, bool]:
        """The micro-steps done, and whether a generation batch is in progress."""
        return self._trainer._step, self._trainer._buffered_inputs is not None

    def capture(self) -> StepSnapshot:
        trainer = self._trainer
        position = (trainer._step, trainer._buffered_inputs)
        return StepSnapshot(trainer.state, trainer.optimizer, trainer.lr_scheduler, trainer.components.kl, position)

    def restore(self, snapshot: StepSnapshot) -> None:
        trainer = self._trainer
        trainer._step, trainer._buffered_inputs = snapshot.restore()
        trainer._metrics["train"].clear()  # belongs to the undone step
        trainer.components.passes.forget()
        trainer.components.normaliser.forget()

    def drop_gradients(self) -> None:
        """Set all gradients to `None`."""
        if self.accelerator.scaler is not None:
            with contextlib.suppress(RuntimeError):  # clipping already did it
                self.accelerator.unscale_gradients()  # otherwise the scaler rejects a step without gradients
        self._trainer.optimizer.zero_grad(set_to_none=True)

    def cut_off(self, reason: str) -> None:
        """Cancel pending rewards and tool calls, with this reason code."""
        self._trainer.components.reward_loop.cut_off(reason)
        for part in self._trainer.components.parts:
            part.cancel(reason)

    def save_checkpoint(self) -> None:
        self._trainer._save_checkpoint(self._trainer.model, None)

    def save(self, folder: Path) -> None:
        self._trainer.save_model(str(folder), _internal_call=True)  # without a push to the hub

    def log(self, figures: Mapping[str, float | None]) -> None:
        """Add a log entry, without the metrics that TRL collects for a step."""
        Trainer.log(self._trainer, figures)

    def score(self, rollout: Rollout) -> Output:
        """Calls TRL's own scoring. Keeps its metrics and tables only once all rewards have arrived."""
        trainer, mode = self._trainer, rollout.mode
        before = (trainer._metrics[mode], trainer._logs)
        output: Output = GRPOTrainer._generate_and_score_completions(trainer, rollout.inputs)
        if not rollout.is_complete:
            trainer._metrics[mode], trainer._logs = before
        elif (
            not trainer.components.policy.weight_check.is_done
            and trainer.vllm_generation.temperature == trainer.temperature
        ):
            self.check_weights(output)  # not for greedy evaluations
        return output

    def check_weights(self, output: Output) -> None:
        """Check on one of TRL's generation batches that vLLM samples from the weights being trained; a collective."""
        ours, sampled = output.get("old_per_token_logps"), output.get("sampling_per_token_logps")
        if ours is None and sampled is not None:
            ours = self.logps_of(output)
        self._trainer.components.policy.weight_check.check(ours, sampled, loss_mask(output))

    def advantages(self) -> MutableSequence[float]:
        """The advantages column of TRL's table of completions; its last rows are the batch's."""
        return self._trainer._logs["advantages"]

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """While active, the policy is in evaluation mode, one completion per prompt, with metrics and tables apart."""
        trainer, was_training = self._trainer, self._trainer.model.training
        trainer.model.eval()
        try:
            with (
                patched(trainer, "num_generations_eval", 1),
                patched(trainer, "_metrics", {**trainer._metrics, "eval": defaultdict(list)}),
                patched(trainer, "_logs", copy.deepcopy(trainer._logs)),
            ):
                yield
        finally:
            trainer.model.train(was_training)
