"""What a checkpoint can hold of rows in flight, and what of it fits a run with other settings."""

import copy
import datetime
import pickle

import pytest
import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import get_scheduler

from salesrl_trl.checkpoint.keeper import fitted, why_not_kept


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
        ({"steps": 18}, 0.0625, "goes on at 0.0625, by this run's schedule. By the checkpoint's it was 0.025"),
        ({"rate": 0.2}, 0.05, "goes on at 0.05"),
        ({"schedule": "constant_with_warmup"}, 0.1, "goes on at 0.1"),
        ({"optim": "sgd"}, 0.025, "the optimizer begins anew: the checkpoint's is of another kind"),
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
