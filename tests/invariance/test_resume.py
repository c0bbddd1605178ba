"""A run that stops and goes on from its checkpoint, and the same run without a stop."""

from functools import partial

import pytest
import torch
from peft import LoraConfig
from support.keyed import SaveAt, betas_of, build_keyed, course_of
from transformers import TrainerCallback

from salesrl_trl.errors import ConfigError, RunStopped
from salesrl_trl.types import DEFAULT_BRANCHES
from salesrl_trl.update.ledger import kl_names

COOLDOWN = 1
SETTINGS = {"max_steps": 12, "kl_update_steps": 2, "kl_law_settings": {"cooldown_steps": COOLDOWN}}
STOP = 9
SHORT_EPOCHS = {**SETTINGS, "branches": DEFAULT_BRANCHES * 5}  # ten rows, two prompts a step: five steps an epoch


def in_a_window_and_before_a_cooldown(state):
    one, other = state.values()
    return (one["steps"] > 0 and other["cooldown"] > 0) or (other["steps"] > 0 and one["cooldown"] > 0)


def between_windows(state):
    return all(each["steps"] == each["cooldown"] == 0 and each["law_state"] for each in state.values())


SITUATIONS = (in_a_window_and_before_a_cooldown, between_windows)


class Saves(TrainerCallback):
    """A checkpoint of each situation, one before `STOP`, and the last. From it a run goes on as from one that a stop
    left: it is saved at the same place."""

    def __init__(self, trainer):
        self.trainer, self.left = trainer, [*SITUATIONS]

    def on_step_end(self, args, state, control, **_):
        now = self.trainer.components.kl.control.state_dict()
        met = [each for each in self.left if state.global_step > 1 and each(now)]
        self.left = [each for each in self.left if each not in met]
        control.should_save |= bool(met) or state.global_step in (STOP - 1, 12)


@pytest.fixture(scope="module")
def whole(tiny, services_url, tmp_path_factory):
    """What happened in a run without a stop, with its weights and the `folder` of its checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = build_keyed(tiny, services_url, folder, **SETTINGS)
    course = course_of(trainer, Saves(trainer))
    course |= {"weights": trainer.model.state_dict(), "folder": folder}
    assert len(course["after"]) == 12
    for branch in DEFAULT_BRANCHES:
        assert len(set(betas_of(course, branch))) >= 3  # two changes or more
    return course


def assert_it_went_on(second, whole, step):
    """To the last bit: coefficients, windows under way and shares in band; and so the optimizer, the order of samples
    and the weights too."""
    assert list(second["after"]) == [str(each) for each in range(step + 1, len(whole["after"]) + 1)]
    assert {**whole["after"], **second["after"]} == whole["after"]
    assert all(torch.equal(second["weights"][name], value) for name, value in whole["weights"].items())


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_resumed_run_goes_the_very_same_way_as_one_that_did_not_stop(train, whole, situation):
    step = next(int(step) for step, state in whole["after"].items() if situation(state) and int(step) > 1)
    second = train(resume_from=whole["folder"] / f"checkpoint-{step}", **SETTINGS)
    assert_it_went_on(second, whole, step)
    names = ("loss", "grad_norm", "reward", *kl_names(DEFAULT_BRANCHES))
    for a, b in zip(second["steps"], whole["steps"][step:], strict=True):
        assert {name: a[name] for name in names} == {name: b[name] for name in names}, a["step"]


def test_an_adapter_on_a_base_in_16_bits_resumes_the_very_same_way(train, tmp_path):
    """Though the run that did not stop has pushed three times as often."""
    given = {"max_steps": 4, "kl_update_steps": 2, "lora": LoraConfig(target_modules="all-linear")}
    given |= {"dtype": torch.bfloat16}
    whole = train(SaveAt(3), output_dir=tmp_path, **given)
    second = train(resume_from=tmp_path / "checkpoint-3", **given)
    assert_it_went_on(second, whole, 3)
    for name in ("loss", "grad_norm", *kl_names(DEFAULT_BRANCHES)):
        assert second["steps"][0][name] == whole["steps"][3][name], name


WINDOWS = {
    "two_updates_a_generation": (3, {"steps_per_generation": 2, "per_device_train_batch_size": 4}),
    "two_iterations": (1, {"num_iterations": 2}),
    # after four micro-steps, in the middle of the second batch
    "a_generation_begins_inside_an_update": (2, {"gradient_accumulation_steps": 2, "steps_per_generation": 3,
                                                 "per_device_train_batch_size": 4}),
}  # fmt: skip


@pytest.mark.parametrize("windows", WINDOWS)
def test_a_run_that_stops_inside_a_generation_batch_goes_on_with_that_very_batch(train, tmp_path, windows):
    step, settings = WINDOWS[windows]
    settings = {"max_steps": 6, "kl_update_steps": 2, **settings}
    whole = train(SaveAt(step), output_dir=tmp_path, **settings)
    assert_it_went_on(train(resume_from=tmp_path / f"checkpoint-{step}", **settings), whole, step)


def test_a_run_resumes_in_any_epoch(train, tmp_path):
    whole = train(SaveAt(5, 9), output_dir=tmp_path, **SHORT_EPOCHS)
    for step in (5, 9):  # an epoch's end, and within the second one
        assert_it_went_on(train(resume_from=tmp_path / f"checkpoint-{step}", **SHORT_EPOCHS), whole, step)


class Strike(TrainerCallback):
    """At this event of the step after `STOP`, once, a fault or a signal comes."""

    def __init__(self, event, strike):
        self.strikes = iter([strike])
        setattr(self, event, self.strike)

    def strike(self, args, state, control, **_):
        if state.global_step == STOP:
            next(self.strikes, lambda: None)()


def fault():
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("event", "kind", "saved"),
    [
        ("on_step_begin", "fault", STOP),
        ("on_step_begin", "signal", STOP),
        ("on_pre_optimizer_step", "fault", None),  # are the weights of this step, or of the next?
        ("on_pre_optimizer_step", "signal", STOP + 1),  # the optimizer does its work before the run ends
        ("on_log", "fault", STOP),
        ("on_log", "signal", STOP),
    ],
)
def test_a_run_that_is_cut_off_goes_on_from_its_last_whole_step_as_if_nothing_had_come(
    tiny, services_url, train, whole, tmp_path, event, kind, saved
):
    trainer = build_keyed(tiny, services_url, tmp_path, **SETTINGS, logging_steps=1)
    strike = fault if kind == "fault" else partial(trainer.request_stop, "SIGTERM")
    with pytest.raises(ZeroDivisionError if kind == "fault" else RunStopped) as ended:
        course_of(trainer, Strike(event, strike), resume_from=whole["folder"] / f"checkpoint-{STOP - 1}")
    checkpoints = [each.name for each in tmp_path.glob("checkpoint-*")]
    assert checkpoints == ([] if saved is None else [f"checkpoint-{saved}"])
    if saved is None:
        return
    said = ended.value.__notes__[-1] if kind == "fault" else str(ended.value)
    by = "ZeroDivisionError" if kind == "fault" else "SIGTERM"
    assert f"stopped by {by} after {saved} steps." in said
    assert_it_went_on(train(resume_from="auto", output_dir=tmp_path, **SETTINGS), whole, saved)


def test_a_run_that_has_finished_does_nothing_more(train, whole):
    again = []
    with pytest.raises(StopIteration):  # no step is in its course
        train(resume_from=True, output_dir=whole["folder"], text_of=lambda *_: again.append(1), **SETTINGS)
    assert again == []


def test_a_checkpoint_of_other_rows_is_refused_and_of_other_settings_is_not(train, whole):
    checkpoint = whole["folder"] / f"checkpoint-{STOP - 1}"
    with pytest.raises(ConfigError, match=r"training rows was 60 \(.*\), is 10 \("):
        train(resume_from=checkpoint, **SHORT_EPOCHS)
    train(resume_from=checkpoint, **{**SETTINGS, "max_steps": STOP})
