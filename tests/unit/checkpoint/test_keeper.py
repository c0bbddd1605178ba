"""What a checkpoint can hold of rows in flight, what of it fits a run with other settings, and what is refused."""

import copy
import datetime
import pickle

import pytest
import torch
from accelerate import PartialState
from datasets import Dataset
from support.scripted import sales_settings
from transformers import get_scheduler

from salesrl_trl.checkpoint.identity import check_identity, identity_of, rows_of, shape_of, weights_of, write_identity
from salesrl_trl.checkpoint.keeper import fitted, why_not_kept
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.errors import ConfigError
from salesrl_trl.names import IDENTITY_FILE


def test_rows_that_a_checkpoint_cannot_hold_leave_groups_in_order():
    day = datetime.date(2026, 11, 27)
    assert why_not_kept(Dataset.from_list([{"prompt": "a", "parts": [{"n": 1, "x": b"y"}], "none": None}])) is None
    assert "dates" in why_not_kept(Dataset.from_list([{"prompt": "a", "day": day}]))


def course(optim, schedule, steps, rate=0.1, states=None, at=0, **more):
    """An optimizer and its schedule after so many steps of `steps`, or with these states of an earlier start."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optim]([weight], lr=rate, **more)
    scheduler = get_scheduler(schedule, optimizer, num_warmup_steps=2, num_training_steps=steps)
    if states is not None:
        with fitted(optimizer, scheduler, at):
            optimizer.load_state_dict(copy.deepcopy(states[0]))
            scheduler.load_state_dict(copy.deepcopy(states[1]))
        at = 0
    for _ in range(at):
        weight.grad = torch.ones(2)
        optimizer.step()
        scheduler.step()
    return optimizer, scheduler


@pytest.mark.parametrize(
    ("given", "rate", "said"),
    [
        ({}, 0.025, None),  # 0.1 x (10 - 8) / (10 - 2)
        ({"steps": 18}, 0.0625, "continues at 0.0625, by this run's schedule; the checkpoint's was 0.025"),
        ({"rate": 0.2}, 0.05, "continues at 0.05"),
        ({"schedule": "constant_with_warmup"}, 0.1, "continues at 0.1"),
        ({"optim": "sgd"}, 0.025, "the optimizer state is reset: the checkpoint's is of another kind"),
        ({"weight_decay": 0.5}, 0.025, None),
    ],
    ids=["the same", "longer", "rate", "constant", "optimizer", "decay"],
)
def test_optimizer_and_schedule_go_on_as_far_as_they_fit_the_settings(caplog, given, rate, said):
    PartialState(cpu=True)
    first = course("adamw", "linear", 10, at=8)
    states = [each.state_dict() for each in first]
    settings = {"optim": "adamw", "schedule": "linear", "steps": 10, **given}
    optimizer, scheduler = course(**settings, states=states, at=8)
    [group] = optimizer.param_groups
    assert (group["lr"], scheduler.get_last_lr()) == (pytest.approx(rate), [group["lr"]])
    assert (said in caplog.text) if said else not caplog.records
    assert group["weight_decay"] == given.get("weight_decay", 0.0 if "optim" in given else 0.01)
    assert bool(optimizer.state) is ("optim" not in given)
    group["params"][0].grad = torch.ones(2)
    optimizer.step()  # another optimizer's state would lack what it needs
    pickle.dumps(scheduler.state_dict())
    if not given:
        assert scheduler.state_dict() == states[1]


PROMPTS = [[{"role": "user", "content": text}] for text in ("a", "b", "c")]
BRANCHES = ["fairness", "hallucination", "fairness"]
ROWS = rows_of(PROMPTS, BRANCHES)
TWO_STEPS = {"per_device_train_batch_size": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 1}


@pytest.fixture
def made_of(tmp_path):
    def build(rows=ROWS, weights="0123", shape="7 M", **given):
        return identity_of(SalesGRPOConfig(**sales_settings(tmp_path, **given)), rows, weights, shape)

    return build


@pytest.mark.parametrize(
    ("was", "now", "named"),
    [
        ({}, {"rows": rows_of(PROMPTS[:2], BRANCHES[:2])}, "training rows was 3 .*, is 2 "),
        ({}, {"rows": rows_of(PROMPTS, BRANCHES[::-1][1:] + BRANCHES[:1])}, "training rows was 3 "),
        ({}, {"branches": ["fairness"]}, "branches was fairness, hallucination, is fairness[.;]"),
        ({}, {"seed": 7}, "seed was 42, is 7"),
        ({}, {"per_device_train_batch_size": 8}, "prompts in a generation batch was 2, is 4"),
        ({}, {"num_iterations": 2}, "generation batches an optimizer step was 1, is 1/2"),
        ({}, {"shape": "8 M"}, "weights of the model was 7 M, is 8 M"),
        ({}, {"weights": "4567"}, "weights at the start was 0123, is 4567"),
        # the same four completions and an update for each two of them: one rank less may have them, not half way
        (TWO_STEPS, {**TWO_STEPS, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2,
                     "steps_per_generation": 4}, "was 1 x 2, 2 x 1, is 1 x 1, 4 x 1"),
    ],
)  # fmt: skip
def test_what_gives_other_prompts_or_another_reference_is_refused_by_name(made_of, tmp_path, was, now, named):
    write_identity(tmp_path, made_of(**was), inside_a_batch=True)
    assert check_identity(tmp_path, made_of(**was), allowed=False) is None
    with pytest.raises(ConfigError, match=named):
        check_identity(tmp_path, made_of(**now), allowed=False)
    told = check_identity(tmp_path, made_of(**now), allowed=True)
    assert named.split(" was ")[0].split("was")[0] in told


def test_other_settings_and_pieces_of_the_same_batch_are_no_difference(made_of, tmp_path):
    write_identity(tmp_path, made_of(), inside_a_batch=False)
    # a batch in two pieces; rows unknown, as where they can't be gone over twice
    now = TWO_STEPS | {"gradient_accumulation_steps": 2, "learning_rate": 0.5}
    assert check_identity(tmp_path, made_of(rows=None, **now), allowed=False) is None


def test_a_checkpoint_that_does_not_say_is_gone_on_from_and_that_is_told(made_of, tmp_path):
    assert "lacks made_of.json" in check_identity(tmp_path, made_of(), allowed=False)


@pytest.mark.parametrize("written", ["", '{"decides": {"seed"', "[]", "{}"])
def test_a_checkpoint_that_was_half_written_is_refused_in_a_line(made_of, tmp_path, written):
    (tmp_path / IDENTITY_FILE).write_text(written)
    with pytest.raises(ConfigError, match=r"made_of\.json is unreadable"):
        check_identity(tmp_path, made_of(), allowed=True)


def test_weights_are_the_same_in_another_format_and_other_ones_are_not():
    torch.manual_seed(0)
    weights = {"a": torch.randn(40, 30), "b": torch.randn(5), "c.lora_A": torch.randn(3)}
    known = weights_of(weights.items())
    assert weights_of((name, each.bfloat16()) for name, each in weights.items()) == known
    assert weights_of({**weights, "c.lora_A": torch.zeros(3)}.items()) == known
    assert weights_of({**weights, "b": weights["b"] * 1.01}.items()) != known


def test_the_shape_of_a_model_depends_on_names_and_sizes_alone():
    weights = {"a": torch.zeros(3, 4), "b": torch.ones(1000)}
    known = shape_of(weights.items())
    assert known.startswith("0.00 M (")
    assert shape_of((name, torch.rand_like(each).bfloat16()) for name, each in reversed(weights.items())) == known
    assert shape_of({"a": torch.zeros(4, 3), "b": weights["b"]}.items()) != known
    assert shape_of({"a": weights["a"], "c": weights["b"]}.items()) != known
