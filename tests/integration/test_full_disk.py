"""A disk that fills during a training: `/dev/full` stands in the place of files that are being written."""

import os
from pathlib import Path

import pytest
from support.loopback import BAD, action
from transformers import TrainerCallback

from salesrl_trl.checkpoint.whole import newest

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


class Fills(TrainerCallback):
    """After the second step, every further byte of these files finds a full disk."""

    def __init__(self, folder):
        self.folder = folder

    def on_step_begin(self, args, state, control, **_):
        if state.global_step != 2:
            return
        tables = [self.folder / "completions" / f"completions_{step:05d}.parquet" for step in range(3, 6)]
        for path in (*self.folder.glob("runs/*/events.*"), self.folder / "held_out.new", *tables):
            path.unlink(missing_ok=True)
            path.symlink_to("/dev/full")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's writer
def test_a_full_disk_ends_no_training_before_the_checkpoint_that_decides(scripted_trainer, tmp_path, caplog, capfd):
    folder = tmp_path / "run"
    trainer = scripted_trainer(
        tuple(text for n in range(40) for text in (action(query=f"q{n}"), BAD)),
        max_steps=5, save_strategy="steps", save_steps=5, learning_rate=1e-9, report_to="tensorboard",
        log_completions=True, callbacks=[Fills(folder)],
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    trainer.finish()
    assert trainer.state.global_step == 5
    assert newest(folder) == folder / "checkpoint-5"
    told = [each.getMessage() for each in caplog.records if "can't be written" in each.getMessage()]
    # three steps fail alike: each file is told once
    assert [line.partition(" can't")[0] for line in told] == [
        "TensorBoard", "the table of completions", str(folder / "held_out.json"),
    ]  # fmt: skip
    assert all("No space left on device" in line for line in told[:2])
    assert "Traceback" not in capfd.readouterr().err
    assert os.readlink(folder / "held_out.new") == "/dev/full"  # it did meet it
