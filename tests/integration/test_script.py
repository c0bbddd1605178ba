"""A script of a user's own, with the two names of TRL changed, has what a recipe has."""

import logging

import pytest
from datasets import Dataset
from support.scripted import settings, steps_of

from salesrl_trl import Budget, Limit, Price, Transport, per_completion
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.errors import RunStopped
from salesrl_trl.recording.reader import recorded
from salesrl_trl.trainer import SalesGRPOTrainer

ROWS = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Question {place}"}]} for place in range(16)])


def length(completions, **kwargs):
    return [len(each[0]["content"]) % 17 / 17 for each in completions]


def train(policy, folder, resume=None, reward=length, **given):
    usual = {"beta": 0.0, "max_completion_length": 8, "max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    args = SalesGRPOConfig(**settings(folder, **{**usual, **given}))
    trainer = SalesGRPOTrainer(str(policy), reward, args, train_dataset=ROWS)
    try:
        trainer.train(resume_from_checkpoint=resume)
    finally:
        trainer.finish()
    return trainer


def test_a_resume_says_from_where_and_its_own_steps_between_lines_and_checkpoints_hold(tiny, tmp_path, caplog):
    train(tiny, tmp_path)
    with caplog.at_level(logging.INFO, logger="salesrl_trl"):
        later = train(tiny, tmp_path, resume=True, max_steps=8, logging_steps=2, save_steps=3)
    assert "going on from checkpoint-2, step 2 of 8" in caplog.text
    assert [line["step"] for line in steps_of(later)] == [1, 2, 4, 6, 8]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (2, 3, 6, 8)]


def test_the_first_entry_of_the_log_is_trls_and_a_resume_has_its_own_optimizer_and_rates(tiny, tmp_path, caplog):
    first = train(tiny, tmp_path, lr_scheduler_type="linear")
    assert {"loss", "reward"} <= first.state.log_history[0].keys()
    longer = train(tiny, tmp_path, resume=True, max_steps=4, optim="sgd", lr_scheduler_type="linear")
    # 1e-2 x (4 - step) / 4. The checkpoint has that of its last step, 0
    assert [line["learning_rate"] for line in steps_of(longer)[2:]] == pytest.approx([5e-3, 2.5e-3])
    assert "the optimizer begins anew" in caplog.text


def test_a_script_has_a_banner_and_a_record_that_goes_on_after_a_resume(tiny, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="salesrl_trl"):
        train(tiny, tmp_path, max_steps=3, record=True, report_to="tensorboard")
        banner = [record.getMessage() for record in caplog.records if record.getMessage().startswith("[Run]")]
        train(tiny, tmp_path / "other", rollout_lookahead=1, max_staleness=3)
        train(tiny, tmp_path, resume=str(tmp_path / "checkpoint-2"), max_steps=4, record=True)
    assert "Training report" in (tmp_path / "report.html").read_text()
    assert "Steps done             3\n" in (tmp_path / "report.txt").read_text()
    assert not (tmp_path / "other/report.html").exists() and "report       off: it is made of" in caplog.text
    names = [line.split()[1] for line in banner]
    assert names == ["reward", "step", "rollouts", "branch", "budget", "record", "report", "quiet", "output"]
    assert f"length: at {__file__}" in banner[0]
    # two prompts of two completions a step; step 3 of the first run is gone, and was done again
    assert [each.step for each in recorded(tmp_path)] == [step for step in (1, 2, 3, 4) for _ in range(4)]
    assert "record       off: no completion is kept" in caplog.text
    assert "`max_staleness` has no effect" in caplog.text and "groups that are scored first" not in caplog.text
    train(tiny, tmp_path, max_steps=1, record=True)  # another run in this folder
    train(tiny, tmp_path, resume=str(tmp_path / "checkpoint-4"), max_steps=6, record=True)
    assert [each.step for each in recorded(tmp_path)] == [step for step in (5, 6) for _ in range(4)]
    assert "is of another run than the record in" in caplog.text
    assert not (tmp_path / "other/record").exists()


def test_a_report_that_can_not_be_written_ends_no_run_and_is_told(tiny, tmp_path, caplog):
    (tmp_path / "report.html").mkdir(parents=True)
    with caplog.at_level(logging.INFO, logger="salesrl_trl"):
        assert train(tiny, tmp_path, report_to="tensorboard").state.global_step == 2
    assert "no report could be written (IsADirectoryError)" in caplog.text


def judged(folder, most):
    budget = Budget(folder / "budget.json", [Limit(name="max_calls", kind="calls", most=most)])
    quota = budget.quota("my_judge", Price(prompt_token=1e-3))
    transport = Transport(
        "my_judge", max_concurrency=4, attempt_timeout_s=9, max_attempts=2, hedge_fraction=0, quota=quota
    )

    @per_completion(transport=transport)
    async def by_judge(completion):
        with transport.bill() as bill:
            bill.count(10, 5)
        return len(completion[0]["content"]) % 17

    return by_judge


def test_a_script_ends_at_the_limit_of_its_budget_and_goes_on_with_a_larger_one(tiny, tmp_path, caplog):
    with pytest.raises(RunStopped, match=r"the budget is spent: 9 calls, .* reached: `max_calls` 9"):
        train(tiny, tmp_path, reward=judged(tmp_path, 9), max_steps=4)  # four calls a step: the third is not scored
    with caplog.at_level(logging.INFO, logger="salesrl_trl"):
        later = train(tiny, tmp_path, resume=True, reward=judged(tmp_path, 100), max_steps=4)
    assert "budget       max_calls 100; spent in this folder so far: 9 calls" in caplog.text
    # nine calls, and two steps of four; ten tokens of 0.001 US dollars each
    assert steps_of(later)[-1]["budget/calls"] == 17
    assert steps_of(later)[-1]["budget/usd"] == pytest.approx(0.17)
