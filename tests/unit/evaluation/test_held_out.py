"""The evaluations of held-out rows, in lines and in a file."""

import json
import logging
import math
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from transformers import TrainerControl, TrainerState

from salesrl_trl.launch import train
from salesrl_trl.launch.evaluation.held_out import HeldOut
from salesrl_trl.types import EvaluatedCompletion


@pytest.fixture
def evaluate(tmp_path, caplog):
    """Evaluations of two rows with two completions each: a step, the mean reward, the rewards of the completions."""
    caplog.set_level(logging.INFO, logger="salesrl_trl")
    drained = []
    callback, names = HeldOut(), SimpleNamespace(functions={}, has_actions=True)
    callback.connect(SimpleNamespace(
        args=SimpleNamespace(branches=("fairness",), output_dir=tmp_path, held_out_examples=1), parts=(),
        reward_loop=SimpleNamespace(reward=SimpleNamespace(names=names)), run_control=SimpleNamespace(is_spent=False),
        ledger=SimpleNamespace(drain_evaluated=drained.pop), trl=SimpleNamespace(num_generations_eval=2),
    ))  # fmt: skip

    def evaluated(step, reward, rewards=(math.nan,) * 4, persistent=False, wrote=(), name="", data=None):
        state = TrainerState(global_step=step, is_world_process_zero=True, max_steps=20)
        figures = {"eval_reward": reward, "eval_reward/fairness": reward, "eval_outcome/invalid_action": 0.25}
        state.log_history = [{**figures, f"eval{name}_runtime": 1.0}]
        drained.append((rewards, wrote))
        args = SimpleNamespace(dataloader_persistent_workers=persistent)
        callback.on_evaluate(args, state, TrainerControl(), eval_dataloader=data)

    def begin(step):
        state = TrainerState(global_step=step, is_world_process_zero=True)
        callback.on_train_begin(SimpleNamespace(), state, TrainerControl())

    evaluated.begin, evaluated.callback = begin, callback
    return evaluated


def test_the_first_evaluation_is_set_beside_the_last(evaluate, caplog, tmp_path):
    evaluate(0, 0.25, (0.0, 0.0, 0.5, 0.5))
    evaluate(10, 0.5)
    evaluate(20, 0.75, (0.4, 0.6, 0.8, math.nan))
    assert caplog.text.count("held-out before (step 0)") == 1  # once the last step is done
    # The rows gained 0.5 and 0.3: standard deviation 0.1 x sqrt(2), of two rows 0.1
    assert "held-out mean reward changed by +0.400 ± 0.100 (standard error, row by row)" in caplog.text
    written = json.loads((tmp_path / "held_out.json").read_text())
    assert written[2] == {"step": 20, "reward": 0.75, "valid_actions": 0.75}  # of one branch no figure of its own
    evaluate.begin(0)
    evaluate(10, 0.25)
    evaluate(20, 0.75)
    assert "held-out first  (step 10): reward=0.25 valid_actions=0.75" in caplog.messages


def test_datasets_by_name_have_a_line_each(evaluate, caplog, tmp_path):
    evaluate(0, 0.25, (0.0, 0.0, 0.5, 0.5), name="_maths")
    assert "[HeldOut@0] maths: reward=0.25 valid_actions=0.75" in caplog.messages
    assert not (tmp_path / "held_out.json").exists()


def test_an_evaluation_of_the_last_step_is_not_made_twice(evaluate, monkeypatch):
    """The one at the end of a run would ask the services for the same figures."""
    training = SimpleNamespace(mode="full", held_out_eval=True, output_dir="", resume_from_checkpoint=None)
    training.load_best_model_at_end = training.push_to_hub = False
    trainer = MagicMock()
    trainer.components.parts, trainer.state.global_step = [evaluate.callback], 20
    monkeypatch.setattr(train, "collect_seldom", lambda: None)
    monkeypatch.setattr(train.signals, "handed_to", lambda _: nullcontext())

    def made():
        train._train(SimpleNamespace(training=training), trainer, MagicMock(), asks_first=False)
        return trainer.evaluate.call_count

    evaluate(10, 0.5)
    assert made() == 1
    evaluate(20, 0.5)
    assert made() == 1
    training.load_best_model_at_end = True  # then it is of other weights
    assert made() == 2
    training.load_best_model_at_end = False
    evaluate.begin(20)  # a resume: other ranks have not read the file
    assert made() == 3


def steps(folder):
    return [each["step"] for each in json.loads((folder / "held_out.json").read_text())]


def test_another_training_has_evaluations_of_its_own_and_a_resumed_one_those_before_it(evaluate, caplog, tmp_path):
    for step in (0, 10, 20):
        evaluate(step, 0.25)
    evaluate.begin(0)
    evaluate(0, 0.5)
    assert steps(tmp_path) == [0]
    evaluate(0, 0.5, (0.25, 0.75, 0.5, math.nan))
    for step in (10, 15):
        evaluate(step, 0.6)
    for process in range(2):  # the second one is resumed too
        evaluate.begin(10)  # from its checkpoint: step 15 will come again
        evaluate(10, 0.7)
        assert steps(tmp_path) == [0, 10], process
    evaluate(20, 0.75, (0.75, 0.75, 0.75, 0.75))
    assert steps(tmp_path) == [0, 10, 20]
    # Since step 0 each row gained 0.25: of the second one half of the completions were scored
    assert caplog.messages[-1] == "held-out mean reward changed by +0.250 ± 0.000 (standard error, row by row)"


def test_a_file_that_can_not_be_read_ends_no_resume(evaluate, caplog, tmp_path):
    (tmp_path / "held_out.json").write_text('[{"step": 0, "rew')
    evaluate.begin(10)
    assert "held_out.json can't be read (JSONDecodeError)" in caplog.text
    evaluate(10, 0.5)
    assert steps(tmp_path) == [10]


def test_examples_show_what_the_policy_wrote_first_and_last(evaluate, caplog):
    prompt = [{"role": "user", "content": "seller: Hello!\ncustomer: And the price?"}]
    answers = [
        EvaluatedCompletion(prompt, [{"role": "assistant", "content": text}], reward)
        for text, reward in (("Python", 0.25), ("no", 0.0), ("Python price", None), ("other", 1.0))
    ]
    evaluate(0, 0.25, wrote=answers[:2])
    evaluate(20, 0.5, wrote=answers[2:])
    assert [line for line in caplog.messages if "example" in line or "    " in line] == [
        "held-out example 1: seller: Hello! | customer: And the price?",
        "    before reward=0.25 Python",
        "    after  reward=n/a Python price",
    ]


def test_rows_that_services_left_without_a_score_are_not_compared(evaluate, caplog):
    evaluate(0, 0.25, (0.25, 0.25, 0.5, 0.5))
    evaluate(20, 0.5, (0.5, 0.5, math.nan, math.nan))
    assert "[HeldOut@20] reward=0.50 valid_actions=0.75; 2 of 4 completions were scored" in caplog.text
    changed = "held-out mean reward changed by +0.250, over the 1 of 2 rows scored both times"
    assert caplog.messages[-1] == changed  # of one row there is no standard error
    evaluate.begin(0)
    evaluate(0, 0.25, (math.nan, math.nan, 0.5, 0.5))
    evaluate(20, -0.25, (0.5, -0.25, math.nan, math.nan))
    assert caplog.messages[-1] == "held-out: none of 2 rows was scored both times, so the change is unknown"


def test_rows_that_fill_up_the_last_batch_of_several_processes_are_not_counted(evaluate, caplog):
    rows = SimpleNamespace(dataset=range(2))
    evaluate(0, 0.25, (0.25, 0.25, 0.5, math.nan, 0.25, 0.25), data=rows)
    assert "; 3 of 4 completions were scored" in caplog.text
    assert len(evaluate.callback._evaluations[0].rows) == 2


def test_rows_in_another_order_are_not_compared(evaluate, caplog):
    """Workers that stay keep TRL's sampler, which shuffles anew for each evaluation."""
    evaluate(0, 0.25, (0.0, 0.0, 0.5, 0.5), persistent=True)
    evaluate(20, 0.75, (1.0, 1.0, 0.5, 0.5), persistent=True)
    assert caplog.messages[-1] == "held-out mean reward changed by +0.500"
