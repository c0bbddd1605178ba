"""A run that stops and goes on from its checkpoint, and the same run without a stop."""

from functools import partial

import pytest
import torch
from peft import LoraConfig
from support.keyed import StopAt, betas_of, build_keyed, course_of
from transformers import TrainerCallback

from salesrl_trl.errors import ConfigError, RunStopped
from salesrl_trl.names import kl_of
from salesrl_trl.types import DEFAULT_BRANCHES
from salesrl_trl.update.ledger import kl_names

COOLDOWN = 1
SETTINGS = {"max_steps": 12, "kl_update_steps": 2, "kl_law_settings": {"cooldown_steps": COOLDOWN}}
STOP = 9
EVERY_STEP = {"save_strategy": "steps", "save_steps": 1}
"""A checkpoint of each step. From it a run goes on as from one that a stop left: it is saved at the same place."""
SHORT_EPOCHS = {**SETTINGS, "branches": DEFAULT_BRANCHES * 5}  # ten rows, two prompts a step: five steps an epoch


def in_a_window(state):
    return all(each["steps"] for each in state.values())


def before_a_cooldown(state):
    return any(each["cooldown"] == COOLDOWN for each in state.values())


def in_a_window_and_before_a_cooldown(state):
    one, other = state.values()
    return (one["steps"] > 0 and other["cooldown"] > 0) or (other["steps"] > 0 and one["cooldown"] > 0)


def between_windows(state):
    return all(each["steps"] == each["cooldown"] == 0 and each["law_state"] for each in state.values())


@pytest.fixture(scope="module")
def whole(train):
    course = train(**SETTINGS)
    assert len(course["after"]) == 12
    for branch in DEFAULT_BRANCHES:
        assert len(set(betas_of(course, branch))) >= 3  # two changes or more
    return course


@pytest.fixture(scope="module")
def short_epochs(train, tmp_path_factory):
    """A run, and the folder of its checkpoints."""
    out = tmp_path_factory.mktemp("short_epochs")
    return train(output_dir=out, **SHORT_EPOCHS, **EVERY_STEP), out


@pytest.fixture(scope="module")
def stopped(train, tmp_path_factory):
    """The checkpoint of a run that stopped after `STOP` steps."""
    out = tmp_path_factory.mktemp("stopped")
    train(StopAt(STOP), output_dir=out, **SETTINGS)
    return out / f"checkpoint-{STOP}"


@pytest.mark.parametrize(
    "situation", [in_a_window, before_a_cooldown, in_a_window_and_before_a_cooldown, between_windows]
)
def test_a_resumed_run_goes_the_very_same_way_as_one_that_did_not_stop(train, whole, tmp_path, situation):
    step = next(int(step) for step, state in whole["after"].items() if situation(state) and int(step) > 1)
    first = train(StopAt(step), output_dir=tmp_path, **SETTINGS)
    assert list(first["after"]) == [str(each) for each in range(1, step + 1)]
    second = train(resume_from=tmp_path / f"checkpoint-{step}", output_dir=tmp_path, **SETTINGS)
    assert list(second["after"]) == [str(each) for each in range(step + 1, 13)]
    # coefficients, windows under way and shares in band, to the last bit: the optimizer, the order of samples and so
    # the weights go on exactly
    assert {**first["after"], **second["after"]} == whole["after"]
    names = ("loss", "grad_norm", "reward", *kl_names(DEFAULT_BRANCHES))
    for a, b in zip([*first["steps"], *second["steps"]], whole["steps"], strict=True):
        assert {name: a[name] for name in names} == {name: b[name] for name in names}, a["step"]
    assert all(torch.equal(second["weights"][name], value) for name, value in whole["weights"].items())


def test_an_adapter_on_a_base_in_16_bits_resumes_the_very_same_way(train, tmp_path):
    """Though the run that did not stop has pushed 200 times more."""
    given = {"max_steps": 4, "kl_update_steps": 2, "lora": LoraConfig(target_modules="all-linear")}
    given |= {"dtype": torch.bfloat16, **EVERY_STEP}
    whole = train(output_dir=tmp_path, **given)
    second = train(resume_from=tmp_path / "checkpoint-3", **given)
    assert second["after"] == {at: state for at, state in whole["after"].items() if int(at) > 3}
    for name in ("loss", "grad_norm", *kl_names(DEFAULT_BRANCHES)):
        assert second["steps"][0][name] == whole["steps"][3][name], name
    assert all(torch.equal(second["weights"][name], value) for name, value in whole["weights"].items())


def test_the_kl_to_an_adapters_base_is_the_same_after_300_pushes(train):
    """With a learning rate of 0, and a batch that is the same at each step."""
    course = train(
        max_steps=4, learning_rate=0.0, branches=DEFAULT_BRANCHES, dtype=torch.bfloat16,
        lora=LoraConfig(target_modules="all-linear", init_lora_weights=False),
        text_of=lambda prompt, step, place: f"{prompt[-20:]} {'price ' * place}",
    )  # fmt: skip
    for branch in DEFAULT_BRANCHES:
        first, *_, last = (entry[kl_of(branch)] for entry in course["steps"])
        assert abs(first) > 1e-3
        assert last == pytest.approx(first, rel=1e-6)  # the order of prompts changes sums


WINDOWS = {
    "two_updates_a_generation": {"steps_per_generation": 2, "per_device_train_batch_size": 4},
    "two_iterations": {"num_iterations": 2},
    "a_generation_begins_inside_an_update": {"gradient_accumulation_steps": 2, "steps_per_generation": 3,
                                             "per_device_train_batch_size": 4},
}  # fmt: skip


@pytest.mark.parametrize("windows", WINDOWS)
def test_a_run_that_stops_inside_a_generation_batch_goes_on_with_that_very_batch(train, tmp_path, windows):
    settings = {"max_steps": 6, "kl_update_steps": 2, **WINDOWS[windows]}
    whole = train(output_dir=tmp_path, **settings, **EVERY_STEP)
    for step in (1, 3):  # two updates a batch, or the second one's in the middle of a step: inside it
        second = train(resume_from=tmp_path / f"checkpoint-{step}", **settings)
        assert second["after"] == {at: state for at, state in whole["after"].items() if int(at) > step}
        assert all(torch.equal(second["weights"][name], value) for name, value in whole["weights"].items()), step


@pytest.mark.parametrize("step", [3, 5, 9])
def test_a_run_resumes_in_any_epoch(train, short_epochs, step):
    whole, out = short_epochs
    second = train(resume_from=out / f"checkpoint-{step}", **SHORT_EPOCHS)
    assert second["after"] == {at: state for at, state in whole["after"].items() if int(at) > step}
    assert all(torch.equal(second["weights"][name], value) for name, value in whole["weights"].items())


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
    tiny_policy, services_url, train, whole, tmp_path, event, kind, saved
):
    trainer = build_keyed(tiny_policy, services_url, tmp_path, **SETTINGS, logging_steps=1)
    strike = fault if kind == "fault" else partial(trainer.request_stop, "SIGTERM")
    with pytest.raises(ZeroDivisionError if kind == "fault" else RunStopped) as ended:
        course_of(trainer, Strike(event, strike))
    checkpoints = [each.name for each in tmp_path.glob("checkpoint-*")]
    assert checkpoints == ([] if saved is None else [f"checkpoint-{saved}"])
    if saved is None:
        return
    said = ended.value.__notes__[-1] if kind == "fault" else str(ended.value)
    by = "ZeroDivisionError" if kind == "fault" else "SIGTERM"
    assert f"stopped by {by} after {saved} steps." in said
    second = train(resume_from="auto", output_dir=tmp_path, **SETTINGS)
    assert list(second["after"]) == [str(each) for each in range(saved + 1, 13)]
    assert {**whole["after"], **second["after"]} == whole["after"]
    assert all(torch.equal(second["weights"][name], value) for name, value in whole["weights"].items())


def test_a_run_that_has_finished_does_nothing_more(train, whole, tmp_path):
    train(output_dir=tmp_path, **SETTINGS, save_strategy="steps", save_steps=12)
    again = []
    with pytest.raises(StopIteration):  # no step is in its course
        train(resume_from=True, output_dir=tmp_path, text_of=lambda *_: again.append(1), **SETTINGS)
    assert again == []


def test_a_checkpoint_of_other_rows_is_refused_and_of_other_settings_is_not(train, stopped, caplog):
    with pytest.raises(ConfigError, match=r"training rows was 60 \(.*\), is 10 \("):
        train(resume_from=stopped, **SHORT_EPOCHS)
    train(resume_from=stopped, **{**SETTINGS, "max_steps": STOP + 1})
