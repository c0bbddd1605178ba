"""One update for each `loss_type` in which completions fail, here or as one of two ranks. Kept of an update: its
gradient before clipping, its loss as logged, and TRL's micro-batches as they reach the loss, of this rank."""

import asyncio
import json
import os
import sys
import warnings
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from salesrl_trl import per_completion
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.launch.data.sources import build_dataset
from salesrl_trl.rollout.normaliser import UNITS
from support.scripted import ScriptedTrainer, default_rows, settings, steps_of

FAIL, LATE = "FAIL", "LATE"
"""First words of completions that fail, and of those whose reward comes when another group has been trained on."""
GROUP = 4
TEXTS = (
    "price a", f"{FAIL} course price refund data evening online teacher", "evening schedule b trial", "refund",
    f"{FAIL} a", "online python course", "nurse", f"{FAIL} teacher evening schedule",
    f"{LATE} price", f"{LATE} {FAIL} trial course online refund", f"{LATE} teacher b", f"{LATE} {FAIL} data",
    f"{FAIL} price", f"{FAIL} a b", f"{FAIL} refund trial data price", f"{FAIL} evening",
    "course", "refund schedule teacher data price", "evening a", "python data",
)  # fmt: skip
"""Groups of four: two fail in part, of which one is late, one fails as a whole, in one none does."""
ARMS = {
    "1": {},
    "4": {"gradient_accumulation_steps": 4},
    "4, one at a time": {"gradient_accumulation_steps": 16, "per_device_train_batch_size": 1},
    "4, scored groups first": {"gradient_accumulation_steps": 4, "scored_groups_first": True},
    "4, two generation batches": {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
}
ONE_OF_A_UNIT = ("grpo", "dapo", "bnpo")
CELLS = [(loss_type, arm) for arm in ARMS for loss_type in UNITS if arm == "4" or loss_type in ONE_OF_A_UNIT]
CELLS.remove(("bnpo", "4, scored groups first"))  # with bnpo nothing is
"""Loss types and arms. Where a factor comes from depends on the arm and on the loss's unit, of which each has one."""
CELLS_OF_TWO_RANKS = [
    ("grpo", "1"), ("bnpo", "1"), *((loss_type, "4") for loss_type in ONE_OF_A_UNIT), ("bnpo", "4, one at a time"),
    ("grpo", "4, scored groups first"), ("dapo", "4, scored groups first"), ("dapo", "4, two generation batches"),
]  # fmt: skip
"""Each unit and each arm. Over ranks, sums are taken before the factors, which are those of one rank; with the
micro-batches as they come, every unit's sum is among them."""
LATE_S = 5.0
"""Where nothing is trained on before, late rewards come all the same."""


class Recorded(ScriptedTrainer):
    """Keeps what the update is made of."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.micro_batches, self.gradient = [], None
        self.generated = self.accelerator.process_index * 2 * GROUP
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():  # away from the reference
            for weight in self.model.parameters():
                weight += 0.1 * torch.randn(weight.shape, generator=generator)
        self.add_callback(_Gradient(self))

    def _compute_loss(self, model, inputs):
        if model.training:
            self.micro_batches.append({**inputs})
        return super()._compute_loss(model, inputs)


class _Gradient(TrainerCallback):
    def __init__(self, trainer):
        self.trainer = trainer

    def on_pre_optimizer_step(self, *_, **__):
        grads = [weight.grad for weight in self.trainer.model.parameters()]
        self.trainer.gradient = torch.cat([grad.flatten() for grad in grads]) if None not in grads else None


def _trainer(policy, out, loss_type, arm, texts, **given):
    @per_completion(deadline_s=60.0)
    async def length(completion):
        text = completion[0]["content"]
        for _ in range(round(LATE_S / 0.01) if LATE in text and given_all["scored_groups_first"] else 0):
            if trainer.micro_batches:
                break
            await asyncio.sleep(0.01)
        if FAIL in text:
            raise ValueError  # of this completion alone: no breaker keeps others from being asked
        return float(len(text) % 7)

    given_all = {
        "num_generations": GROUP, "per_device_train_batch_size": GROUP, "per_device_eval_batch_size": GROUP,
        "max_steps": 1, "optim": "sgd", "beta": 0.2, "loss_type": loss_type, "min_valid_reward_fraction": 0.0,
        "max_grad_norm": 0.0, "kl_log_ratio_clamp": 0.0, "learning_rate": 0.0,
        "scored_groups_first": False, **ARMS[arm], **given,
    }  # fmt: skip
    trainer = Recorded(
        AutoModelForCausalLM.from_pretrained(policy),
        length,
        SalesGRPOConfig(**settings(out, **given_all)),
        train_dataset=build_dataset(default_rows() * 4, "compact"),
        eval_dataset=build_dataset(default_rows()[:2], "compact"),
        processing_class=AutoTokenizer.from_pretrained(policy),
    )
    trainer.texts = texts
    return trainer


def evaluated(policy, out, texts):
    """The figures of an evaluation of two batches."""
    trainer = _trainer(policy, out, "grpo", "1", texts)
    figures = trainer.evaluate()
    trainer.finish()
    return figures


def update(policy, out, loss_type, arm, texts=TEXTS, **given):
    """Train one update. Returns what was kept of it."""
    trainer = _trainer(policy, out, loss_type, arm, texts, **given)
    trainer.train()
    trainer.finish()
    [logs] = steps_of(trainer)
    weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    return {"gradient": trainer.gradient, "logs": logs, "micro_batches": trainer.micro_batches, "weights": weights}


def main(policy, out):
    rank = int(os.environ["RANK"])
    warnings.simplefilter("ignore")
    for loss_type, arm in CELLS_OF_TWO_RANKS:
        found = update(policy, Path(out, "run"), loss_type, arm, ddp_backend="gloo")
        torch.save(found, Path(out, f"{loss_type}, {arm}, {rank}.pt"))
    Path(out, f"rank{rank}.json").write_text(json.dumps({}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
