"""What components use of TRL's trainer. They do not get the trainer itself."""

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
    """Values of TRL's trainer, and what it does for components."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        super().__init__(trainer)
        self.ref_model: torch.nn.Module | None = trainer.ref_model
        self.accelerator: Accelerator = trainer.accelerator
        self.is_deepspeed: bool = trainer.is_deepspeed_enabled
        self.updates: bool = trainer.updates  # whether steps change the policy
        self.engine: SalesVLLMGeneration | GenerationConfig = (
            trainer.vllm_generation if trainer.use_vllm else trainer.generation_config
        )  # the settings with which the policy itself generates
        self.has_rollout_func = trainer.rollout_func is not None
        has_environments = trainer.environment_factories is not None
        self.tools = "an environment" if has_environments else "tools" if trainer.tools else None
        """What completions may call while TRL generates them."""
        self.tool_names = [each.__name__ for each in trainer.tools]
        self.tokenizer: PreTrainedTokenizerBase = trainer._tokenizer
        self.eos_token_ids: tuple[int, ...] = tuple(trainer.eos_token_ids)
        self.temperature: float = trainer.args.temperature
        self.max_completion_length: int = trainer.args.max_completion_length
        self.reward_weights: Sequence[float] = trainer.reward_weights.tolist()
        self.reward_names: Sequence[str] = trainer.reward_func_names  # under which TRL logs these functions
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
        """Returns the micro-steps done, and whether a generation batch is there to go on with."""
        return self._trainer._step, self._trainer._buffered_inputs is not None

    def capture(self) -> StepSnapshot:
        trainer = self._trainer
        position = (trainer._step, trainer._buffered_inputs)
        return StepSnapshot(trainer.state, trainer.optimizer, trainer.lr_scheduler, trainer.components.kl, position)

    def restore(self, snapshot: StepSnapshot) -> None:
        trainer = self._trainer
        trainer._step, trainer._buffered_inputs = snapshot.restore()
        trainer._metrics["train"].clear()  # of the step that is undone
        trainer.components.passes.forget()
        trainer.components.normaliser.forget()

    def drop_gradients(self) -> None:
        """Set all gradients to `None`."""
        if self.accelerator.scaler is not None:
            with contextlib.suppress(RuntimeError):  # clipping has done it
                self.accelerator.unscale_gradients()  # else the scaler refuses a step in which it saw no gradient
        self._trainer.optimizer.zero_grad(set_to_none=True)

    def cut_off(self, reason: str) -> None:
        """End rewards and calls of tools that are out, with this reason code."""
        self._trainer.components.reward_loop.cut_off(reason)
        for part in self._trainer.components.parts:
            part.cancel(reason)

    def save_checkpoint(self) -> None:
        self._trainer._save_checkpoint(self._trainer.model, None)

    def save(self, folder: Path) -> None:
        self._trainer.save_model(str(folder), _internal_call=True)  # pushes to no hub

    def log(self, figures: Mapping[str, float | None]) -> None:
        """Add an entry to the log, without the figures that TRL gathers for a step."""
        Trainer.log(self._trainer, figures)

    def score(self, rollout: Rollout) -> Output:
        """TRL's own method. Its figures and tables are kept only when all rewards are in."""
        trainer, mode = self._trainer, rollout.mode
        before = (trainer._metrics[mode], trainer._logs)
        output: Output = GRPOTrainer._generate_and_score_completions(trainer, rollout.inputs)
        if not rollout.is_complete:
            trainer._metrics[mode], trainer._logs = before
        elif (
            not trainer.components.policy.weight_check.is_done
            and trainer.vllm_generation.temperature == trainer.temperature
        ):
            self.check_weights(output)  # not of an evaluation, which answers greedily
        return output

    def check_weights(self, output: Output) -> None:
        """Check that vLLM samples from the weights in training, by one of TRL's generation batches; a collective."""
        ours, sampled = output.get("old_per_token_logps"), output.get("sampling_per_token_logps")
        if ours is None and sampled is not None:
            ours = self.logps_of(output)
        self._trainer.components.policy.weight_check.check(ours, sampled, loss_mask(output))

    def advantages(self) -> MutableSequence[float]:
        """This column of TRL's table of completions, whose last rows are those of the batch."""
        return self._trainer._logs["advantages"]

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """While active, the policy evaluates, one answer a prompt. Figures and tables of others stay as they are."""
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
