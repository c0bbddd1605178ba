"""Failed completions are out of the loss: the gradient is that of the same batch without them.

The expected gradient is stock TRL's for the rows that are left of all ranks and micro-batches, as one batch. Where
TRL takes a mean of means, it is the mean of the parts that have something left: of micro-batches with bnpo, of
generation batches with losses of tokens. As a program it is one of two ranks, and makes the same updates.
"""

import asyncio
import json
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
from support.ranks import of_one_machine, run_ranks
from support.scripted import Gradients, ScriptedTrainer, build_trainer, build_upstream_trainer, default_rows, steps_of
from transformers import AutoTokenizer

from salesrl_trl import per_completion
from salesrl_trl.launch.data.sources import build_dataset
from salesrl_trl.names import SKIPPED_UPDATE
from salesrl_trl.rollout.normaliser import UNITS

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 2e-6  # with AVX-512, which adds in another order, 1.03e-6 was seen. A wrong factor is 0.26 or more
BETA = 0.2
LAUNCH_LIMIT_S = 300
ROWS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "ref_per_token_logps")
FAIL, LATE = "FAIL", "LATE"
"""First words of completions that fail, and of those whose reward comes when another group has been trained on."""
SCORED = ("price a", "refund data", "course b", "evening online")
NO_REWARD = tuple(f"{FAIL} {each}" for each in "abde")
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
    """Keeps the gradient of its update before clipping, and TRL's micro-batches as they reach the loss."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.micro_batches, self.gradients = [], Gradients(self).found
        self.generated = self.accelerator.process_index * 2 * GROUP
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():  # away from the reference
            for weight in self.model.parameters():
                weight += 0.1 * torch.randn(weight.shape, generator=generator)

    def _compute_loss(self, model, inputs):
        if model.training:
            self.micro_batches.append({**inputs})
        return super()._compute_loss(model, inputs)


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
        "max_steps": 1, "optim": "sgd", "beta": BETA, "loss_type": loss_type, "min_valid_reward_fraction": 0.0,
        "max_grad_norm": 0.0, "kl_log_ratio_clamp": 0.0, "learning_rate": 0.0,
        "scored_groups_first": False, **ARMS[arm], **given,
    }  # fmt: skip
    held_out = build_dataset(default_rows()[:2], "compact")
    trainer = build_trainer(
        policy, length, texts, default_rows() * 4, out, Recorded, eval_dataset=held_out, **given_all
    )
    return trainer


def update(policy, out, loss_type, arm, texts=TEXTS, **given):
    """Train one update. Returns what was kept of it."""
    trainer = _trainer(policy, out, loss_type, arm, texts, **given)
    trainer.train()
    trainer.finish()
    [logs] = steps_of(trainer)
    weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    return {"gradient": trainer.gradients[0], "logs": logs, "micro_batches": trainer.micro_batches, "weights": weights}


@pytest.fixture(scope="module")
def stock(tiny, tmp_path_factory):
    """TRL's own loss."""
    return build_upstream_trainer(
        tiny, lambda **_: [0.0], (), tmp_path_factory.mktemp("stock"), beta=BETA, per_device_train_batch_size=2
    )


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny)


@pytest.fixture(scope="module")
def two_ranks(tiny, tmp_path_factory):
    """The updates of two ranks, by loss type and arm."""
    out = tmp_path_factory.mktemp("ranks")
    run_ranks(of_one_machine(), (__file__, tiny, out), out, LAUNCH_LIMIT_S)

    def found(loss_type, arm):
        return [torch.load(out / f"{loss_type}, {arm}, {rank}.pt") for rank in range(2)]

    return found


def without_failed(stock, tokenizer, ranks, loss_type, arm):
    """The gradient, the loss and the tokens of what is left, by stock TRL."""
    stock.model.load_state_dict(ranks[0]["weights"])
    stock.loss_type = stock.args.loss_type = loss_type
    stock.current_gradient_accumulation_steps = stock.args.steps_per_generation = 1
    stock.model.train()
    stock.model.zero_grad()
    if UNITS[loss_type] == "micro-batches":
        parts = [[batch] for rank in ranks for batch in rank["micro_batches"]]
    else:
        generations = 2 if UNITS[loss_type] == "tokens" and arm == "4, two generation batches" else 1
        size = len(ranks[0]["micro_batches"]) // generations
        parts = [
            [batch for rank in ranks for batch in rank["micro_batches"][first * size :][:size]]
            for first in range(generations)
        ]
    left = [[each for batch in part if (each := left_of(batch, tokenizer))] for part in parts]
    batches = [joined(part) for part in left if part]
    losses = []
    for batch in batches:
        items = batch["completion_mask"].sum()
        loss = stock._compute_loss(stock.model, {**batch, "num_items_in_batch": items}) / len(batches)
        loss.backward()
        losses.append(loss.item())
    tokens = sum(batch["completion_mask"].sum().item() for batch in batches)
    return torch.cat([weight.grad.flatten() for weight in stock.model.parameters()]), sum(losses), tokens


def left_of(batch, tokenizer):
    """The rows of a micro-batch that did not fail, with the tokens that the policy wrote; `None` without any."""
    texts = tokenizer.batch_decode(batch["completion_ids"], skip_special_tokens=True)
    ends = batch["completion_ids"].eq(tokenizer.eos_token_id).long().argmax(dim=1, keepdim=True)
    mask = (torch.arange(batch["completion_ids"].size(1)) <= ends).long()
    kept = [row for row, text in enumerate(texts) if FAIL not in text]
    return {name: {**batch, "completion_mask": mask}[name][kept] for name in ROWS} if kept else None


def joined(batches):
    """One batch, padded as TRL's."""

    def below(name, left):
        width = max(each[name].size(1) for each in batches)
        rows = [row for each in batches for row in each[name]]
        sides = [(width - len(row), 0) if left else (0, width - len(row)) for row in rows]
        return torch.stack([torch.nn.functional.pad(row, side) for row, side in zip(rows, sides, strict=True)])

    columns = {name: below(name, name.startswith("prompt")) for name in ROWS if name != "advantages"}
    return {**columns, "advantages": torch.cat([each["advantages"] for each in batches])}


def gap(gradient, expected):
    return ((gradient - expected).double().norm() / expected.double().norm()).item()


def check(stock, tokenizer, ranks, loss_type, arm):
    expected, loss, tokens = without_failed(stock, tokenizer, ranks, loss_type, arm)
    gaps = [gap(each["gradient"], expected) for each in ranks]
    print(f"{loss_type} | {arm} | {len(ranks)} rank(s) | largest relative difference of the gradient {max(gaps):.1e}")
    assert expected.norm() > 1e-3
    assert max(gaps) <= TOLERANCE
    logs = ranks[0]["logs"]  # the mean over ranks
    assert logs["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-5)
    windows = [count for name, count in logs.items() if name.startswith("kl/") and name.endswith("_tokens")]
    assert sum(windows) == tokens


@pytest.mark.parametrize(("loss_type", "arm"), CELLS)
def test_the_gradient_is_that_of_the_same_batch_without_the_failed_completions(
    stock, tokenizer, tiny, tmp_path, loss_type, arm
):
    check(stock, tokenizer, [update(tiny, tmp_path, loss_type, arm)], loss_type, arm)


@pytest.mark.slow
@pytest.mark.parametrize(("loss_type", "arm"), CELLS_OF_TWO_RANKS)
def test_the_same_holds_over_two_ranks(stock, tokenizer, two_ranks, loss_type, arm):
    check(stock, tokenizer, two_ranks(loss_type, arm), loss_type, arm)


@pytest.mark.parametrize("arm", ["4, scored groups first", "4, two generation batches"])
def test_an_update_of_which_nothing_is_left_moves_nothing(tiny, tmp_path, arm):
    """Its gradient is dropped, so that neither momentum nor weight decay moves the policy."""
    found = update(tiny, tmp_path, "dapo", arm, texts=(f"{FAIL} a", f"{FAIL} price b"))
    assert found["gradient"] is None
    assert found["logs"]["loss"] == 0
    assert found["logs"]["entropy"] is None  # no mean over no token


def test_a_skipped_generation_batch_has_no_part_in_an_update_that_it_shares(tiny, tmp_path):
    arm, texts = "4, two generation batches", (*SCORED, *SCORED, *NO_REWARD, *NO_REWARD)
    skipped, left_out = (
        update(tiny, tmp_path, "grpo", arm, texts=texts, min_valid_reward_fraction=fraction) for fraction in (0.5, 0.0)
    )
    assert gap(skipped["gradient"], left_out["gradient"]) <= TOLERANCE
    assert skipped["logs"]["loss"] == pytest.approx(left_out["logs"]["loss"], rel=1e-5)
    assert skipped["logs"][SKIPPED_UPDATE] == 0.5


def test_an_evaluations_loss_is_that_of_its_batches_with_something_left(tiny, tmp_path):
    def loss(*texts):
        """Of an evaluation of two batches."""
        trainer = _trainer(tiny, tmp_path, "grpo", "1", texts)
        figures = trainer.evaluate()
        trainer.finish()
        return figures["eval_loss"]

    first, second = loss(*SCORED, *NO_REWARD), loss(*NO_REWARD, *SCORED)
    assert loss(*SCORED, *SCORED) == pytest.approx((first + second) / 2, rel=1e-5)
    assert loss(*NO_REWARD, *NO_REWARD) is None


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
