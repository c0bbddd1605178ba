"""A part of one's own is one class outside of the package, handed to the trainer."""

import math

import pytest
from support.loopback import Services
from support.scripted import build_trainer, default_rows, loopback_reward, steps_of

from salesrl_trl import Part
from salesrl_trl.errors import ConfigError

FIGURE = "mine/best_so_far"


class BestSoFar(Part):
    """The best reward of all batches, through a resume."""

    figure_names = (FIGURE,)

    def __init__(self):
        self.best, self.told = -math.inf, []

    def connect(self, run):
        self.told.append(f"connected at {run.args.output_dir}")

    def begin(self, resumed, run_id):
        self.told.append(f"began {'again' if resumed else 'anew'}")

    def load_state_dict(self, state):
        self.best = state.get("best", -math.inf)

    def state_dict(self):
        return {"best": self.best}

    def on_batch(self, batch):
        if batch.rollout.is_trained_on:
            self.best = max([self.best, *batch.rollout.result.values])
        return {FIGURE: self.best} if batch.rollout.is_trained_on else {}

    def figures(self, mode):
        return {"mine/lines": 1.0}

    def after_step(self, step):
        if step not in self.told:  # transformers comes back to the last step
            self.told.append(step)

    def on_train_end(self, *_, **__):
        self.told.append("trained")

    def end_run(self):
        self.told.append("over")

    def close(self):
        self.told.append("closed")


@pytest.fixture
def trainer_of(tiny, httpserver, tmp_path):
    rows = default_rows()
    reward = loopback_reward(Services(httpserver), rows)

    def trainer_of(*parts, **given):
        return build_trainer(
            tiny, reward, ("a", "b", "c"), rows, tmp_path / "run", parts=parts, save_strategy="steps", save_steps=2,
            **given,
        )  # fmt: skip

    return trainer_of


def test_a_part_sees_each_batch_and_has_figures_in_each_line_and_a_state_in_checkpoints(trainer_of, tmp_path):
    first = BestSoFar()
    trainer = trainer_of(first, max_steps=3)
    trainer.train()
    trainer.finish()
    assert first.told == [f"connected at {tmp_path / 'run'}", "over", "began anew", 0, 1, 2, 3, "trained", "closed"]
    assert [set(entry) >= {FIGURE, "mine/lines"} for entry in steps_of(trainer)] == [True] * 3
    best = first.best

    second = BestSoFar()
    resumed = trainer_of(second, max_steps=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    resumed.finish()
    assert second.told[1:-1] == ["over", "began again", 2, 3, "trained"]
    assert second.best == best


def test_a_part_is_told_of_a_failure_and_two_of_one_name_are_refused(trainer_of):
    part = BestSoFar()

    class Fails(Part):
        def on_batch(self, batch):
            raise RuntimeError("mine")

    trainer = trainer_of(part, Fails(), max_steps=1)
    with pytest.raises(RuntimeError, match="mine"):
        trainer.train()
    assert part.told[-1] == "over"
    trainer.finish()
    with pytest.raises(ConfigError, match="two parts are named 'BestSoFar'"):
        trainer_of(BestSoFar(), BestSoFar())
