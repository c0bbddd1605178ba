"""A run whose budget is spent in the middle ends resumable, and goes on with a larger limit."""

import logging

import pytest
from support.loopback import action

from salesrl_trl.errors import RunStopped
from salesrl_trl.judged.budget import CALLS, Budget, Limit
from salesrl_trl.names import HELD_OUT_FILE, SPENT_FILE
from salesrl_trl.reward.remote import RemoteReward

MOST, FOR_ALL_STEPS = 34, 72
STEPS = 8
TEXTS = tuple(action(query=f"q{number}") for number in range(400))


@pytest.fixture
def run(tiny, services, tmp_path):
    """Train with a limit of calls: `run(most)`. Returns the trainer, and the error that ends it."""
    from support.scripted import build_trainer, default_rows, loopback_reward

    started = []

    def start(most, *, resumed=False, in_a_process=False):
        rows = default_rows()
        chain = loopback_reward(services, rows)
        limit = Limit(name="max_calls", kind=CALLS, most=most)
        chain.budget = Budget(tmp_path / SPENT_FILE, [limit])
        for name, each in chain._transports().items():
            each.count_by(chain.budget.quota(name))
        trainer = build_trainer(
            tiny, RemoteReward(chain) if in_a_process else chain, TEXTS, rows, tmp_path, max_steps=STEPS,
            held_out_eval=resumed,
        )  # fmt: skip
        started.append(trainer)
        try:
            trainer.train(resume_from_checkpoint=resumed)
        except RunStopped as error:
            trainer.finish()
            return trainer, error
        return trainer, None

    yield start
    for each in started:
        each.finish()


def test_a_run_ends_at_its_limit_and_goes_on_with_a_larger_one(run, services, tmp_path, caplog):
    caplog.set_level(logging.INFO)

    def requests():
        return sum(map(len, services.asked.values()))

    _, error = run(MOST, in_a_process=True)
    assert str(error) == (
        f"the budget is spent: {MOST} calls were spent; reached: `max_calls` {MOST}. A checkpoint was saved; resume "
        f"with a larger limit and --resume_from_checkpoint {tmp_path / 'checkpoint-4'}."
    )
    assert requests() == MOST
    assert "| spent 33 calls" in caplog.text

    caplog.clear()
    trainer, error = run(FOR_ALL_STEPS, resumed=True)
    assert error is None
    steps = [each["step"] for each in trainer.state.log_history if "reward" in each]
    assert steps == [*range(1, STEPS + 1)]  # the step that was not scored came again
    assert f"| spent {requests()} calls |" in caplog.text
    at_end = pytest.raises(RunStopped, match=r"reached: `max_calls` 72\. All steps are done and saved, but not ")
    with at_end, trainer.components.stopping.ending():
        trainer.evaluate()
        trainer.components.stopping.raise_if_asked()
    assert requests() == FOR_ALL_STEPS
    assert "[HeldOut@8] discarded: the budget ended when " in caplog.text
    assert not (tmp_path / HELD_OUT_FILE).exists()
    assert (tmp_path / f"checkpoint-{STEPS}").is_dir()  # with `save_strategy: no`

    trainer, error = run(FOR_ALL_STEPS + 60, resumed=True)
    assert error is None
    assert requests() == FOR_ALL_STEPS  # all steps are done
    trainer.evaluate()
    assert (tmp_path / HELD_OUT_FILE).exists()
