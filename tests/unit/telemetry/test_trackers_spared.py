"""No tracker ends a run: what is spared, and what is not."""

import os
from types import SimpleNamespace

import pytest
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback
from trl.extras.profiling import ProfilingContext

from salesrl_trl.config.trl_settings import keep_folders
from salesrl_trl.parts.trackers import TrackersPart


class Failing:
    def __init__(self, error):
        self.error = error

    def on_train_begin(self, *given, **named):
        raise self.error

    on_log = on_save = on_train_end = on_train_begin


class Tracker(Failing, TensorBoardCallback):
    pass


class OfAUser(Failing, TrainerCallback):
    pass


def part_of(names, callbacks):
    args = SimpleNamespace(report_to=names, kl_targets=dict)
    trl = SimpleNamespace(callbacks=SimpleNamespace(callbacks=callbacks))
    part = TrackersPart()
    part.connect(SimpleNamespace(args=args, trl=trl, figures=SimpleNamespace(words={"branch": ["all"]})))
    return part


@pytest.mark.parametrize("event", ["on_log", "on_save", "on_train_end"])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "https://user:key@host"), "Tracker can't be written (OSError: No space left on device)"),
        (ConnectionError("https://user:key@host"), "Tracker can't be written (ConnectionError)"),
        (RuntimeError("key"), "Tracker can't be written (RuntimeError)"),
    ],
)
def test_a_tracker_that_fails_is_told_once_without_its_text(caplog, event, error, said):
    callback = Tracker(error)
    part_of(["tensorboard"], [callback]).close()
    for _ in range(3):
        getattr(callback, event)(None, None, None, logs={})
    assert [record.getMessage() for record in caplog.records] == [f"{said}: it lacks entries. Training continues"]


def test_at_the_start_a_wrong_setting_ends_the_run_and_the_disk_does_not():
    full, wrong = Tracker(OSError(28, "")), Tracker(ValueError("no such key"))
    part_of(["tensorboard"], [full, wrong]).close()
    full.on_train_begin()
    with pytest.raises(ValueError, match="no such key"):
        wrong.on_train_begin()


def test_a_callback_of_a_users_own_ends_the_run():
    callback = OfAUser(OSError(28, ""))
    part_of(["tensorboard"], [callback]).close()
    with pytest.raises(OSError):
        callback.on_log()


def test_trls_profile_of_a_step_is_spared_until_the_trackers_are_closed(monkeypatch):
    monkeypatch.setattr(ProfilingContext, "_log_metrics", lambda context, seconds: 1 / 0)
    trackers = part_of(["mlflow"], [])
    with ProfilingContext("a step", ["mlflow"]):
        pass
    trackers.close()
    with pytest.raises(ZeroDivisionError), ProfilingContext("a step", ["mlflow"]):
        pass


def test_no_tracker_uploads_folders(monkeypatch):
    for name in ("HF_MLFLOW_LOG_ARTIFACTS", "COMET_LOG_ASSETS", "CLEARML_LOG_MODEL"):
        monkeypatch.setenv(name, "unset")  # so that the test's end restores it
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_LOG_MODEL", "checkpoint")
    monkeypatch.setenv("HF_MLFLOW_LOG_ARTIFACTS", "0")
    (note,) = keep_folders(["wandb", "mlflow"])
    assert note.startswith("off: WANDB_LOG_MODEL: it would also upload prompts and completions in flight")
    assert os.environ["WANDB_LOG_MODEL"] == "false" and "COMET_LOG_ASSETS" not in os.environ
    (note,) = keep_folders(["clearml"])  # which uploads by default
    assert note.startswith("off: CLEARML_LOG_MODEL") and keep_folders(["clearml"]) == []
