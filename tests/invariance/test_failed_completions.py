"""Failed completions are out of the loss: the gradient is that of the same batch without them.

The expected gradient is stock TRL's for the rows that are left of all ranks and micro-batches, as one batch. With bnpo,
which is a mean over micro-batches, it is the mean over the rows that are left of each.
"""

import pytest
import torch
from support.failed_update import ARMS, FAIL, update
from support.ranks import ROOT, of_one_machine, run_ranks
from support.scripted import build_upstream_trainer
from transformers import AutoTokenizer

from salesrl_trl.rollout.normaliser import UNITS

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-6
BETA = 0.2
LAUNCH_LIMIT_S = 300
ROWS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "ref_per_token_logps")


@pytest.fixture(scope="module")
def stock(tiny_policy, tmp_path_factory):
    """TRL's own loss."""
    return build_upstream_trainer(
        tiny_policy, lambda **_: [0.0], (), tmp_path_factory.mktemp("stock"), beta=BETA, per_device_train_batch_size=2
    )


@pytest.fixture(scope="module")
def tokenizer(tiny_policy):
    return AutoTokenizer.from_pretrained(tiny_policy)


@pytest.fixture(scope="module")
def two_ranks(tiny_policy, tmp_path_factory):
    """The updates of two ranks, by loss type and arm."""
    out = tmp_path_factory.mktemp("ranks")
    run_ranks(of_one_machine(), (ROOT / "tests/support/failed_update.py", tiny_policy, out), out, LAUNCH_LIMIT_S)

    def found(loss_type, arm):
        return [torch.load(out / f"{loss_type}, {arm}, {rank}.pt") for rank in range(2)]

    return found


def without_failed(stock, tokenizer, ranks, loss_type):
    """The gradient and the loss of what is left, by stock TRL."""
    stock.model.load_state_dict(ranks[0]["weights"])
    stock.loss_type = stock.args.loss_type = loss_type
    stock.current_gradient_accumulation_steps = stock.args.steps_per_generation = 1
    stock.model.train()
    stock.model.zero_grad()
    batches = [each for rank in ranks for batch in rank["micro_batches"] if (each := left_of(batch, tokenizer))]
    if UNITS[loss_type] != "micro-batches":
        batches = [joined(batches)]
    losses = []
    for batch in batches:
        items = batch["completion_mask"].sum()
        loss = stock._compute_loss(stock.model, {**batch, "num_items_in_batch": items}) / len(batches)
        loss.backward()
        losses.append(loss.item())
    return torch.cat([weight.grad.flatten() for weight in stock.model.parameters()]), sum(losses)


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


def check(stock, tokenizer, ranks, loss_type, tolerance=TOLERANCE):
    expected, loss = without_failed(stock, tokenizer, ranks, loss_type)
    gaps = [gap(each["gradient"], expected) for each in ranks]
    print(f"{loss_type}: largest relative difference of the gradient {max(gaps):.1e}")
    assert expected.norm() > 1e-3
    assert max(gaps) <= tolerance
    # each rank's loss is its part of the whole: TRL logs the mean over ranks
    assert ranks[0]["logs"]["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-5)


LEAVING_OUT = [arm for arm in ARMS if arm != "as TRL"]


@pytest.mark.parametrize("arm", LEAVING_OUT)
@pytest.mark.parametrize("loss_type", UNITS)
def test_the_gradient_is_that_of_the_same_batch_without_the_failed_completions(
    stock, tokenizer, tiny_policy, tmp_path, loss_type, arm
):
    check(stock, tokenizer, [update(tiny_policy, tmp_path, loss_type, arm)], loss_type)


@pytest.mark.slow
@pytest.mark.parametrize("arm", LEAVING_OUT)
@pytest.mark.parametrize("loss_type", UNITS)
def test_the_same_holds_over_two_ranks(stock, tokenizer, two_ranks, loss_type, arm):
    check(stock, tokenizer, two_ranks(loss_type, arm), loss_type)
