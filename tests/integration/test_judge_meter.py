"""The meter over the judge in a run: a judge that likes a word, and a second one that does not."""

import json
import logging
import os
import random
import re
import signal

import psutil
import pytest
from support.loopback import action, chat_completion

from salesrl_trl.errors import JudgeAlarm
from salesrl_trl.names import BY_SECOND_JUDGE
from salesrl_trl.record.reader import recorded

BATCH, STEPS, ONSET = 16, 35, 15
BOTH = [{"name": name, "base_url": "", "model": name} for name in ("first", "second")]


def texts():
    """From `ONSET` on more and more completions have the word."""
    lot = random.Random(1)
    for step in range(STEPS):
        for place in range(BATCH):
            has_it = lot.random() < min(max((step - ONSET) / 10, 0.0), 0.8)
            yield action(query=f"course {step} {place}" + " online" * has_it)


def judge(request, *, second_works=True):
    """The first judge gives 0.4 more for the word. Otherwise both agree, but for noise of 0.05."""
    body = request.json
    user, is_second = body["messages"][-1]["content"], body["model"] == "second"
    if is_second and not second_works:
        return 500, {}
    found = re.search(r"course \d+ \d+( online)?", user)  # the warm-up has none
    written = found[0] if found else "the warm-up"  # not `user`: its fences have a new nonce in each request
    lot = random.Random(f"{body['model']} {written}")
    score = random.Random(written).choice((0.2, 0.4)) + lot.uniform(-0.08, 0.08) + 0.1
    score += 0.4 * (found is not None and found[1] is not None and not is_second)
    return 200, chat_completion(json.dumps({"candidate": score, "reference": 0.5, "reason": "fine"}))


@pytest.fixture
def run(tiny, services, tmp_path, caplog):
    """Train by the first judge, with the meter and these of its settings. Returns the trainer, and what was logged."""
    from support.scripted import build_trainer, default_rows

    from salesrl_trl.launch.assembly import judge_reward

    def train(meter, functions=(), verbose=(), second_works=True, resumed=None, before=lambda _: None, **given):
        def respond(request):
            before(request)
            return judge(request, second_works=second_works)

        services.functions["judge"] = respond
        reward = judge_reward(
            judge_providers=[{**one, "base_url": f"{services.url}/v1"} for one in BOTH],
            judge_meter={"second": "second", "share": 0.25, **meter},
            verbose=[*verbose],
            max_attempts=1,
            hedge_fraction=0.0,
        )
        trainer = build_trainer(
            tiny, [reward, *functions], tuple(texts()), default_rows(), tmp_path / "run", num_generations=8,
            per_device_train_batch_size=BATCH, logging_steps=5, **{"max_steps": STEPS, **given},
        )  # fmt: skip
        try:
            with caplog.at_level(logging.INFO):
                trainer.train(resume_from_checkpoint=resumed)
        finally:
            trainer.finish()
        return trainer, caplog.text

    return train


def asked(services, model):
    return [request for request in services.asked["judge"] if request.json["model"] == model]


def test_a_word_that_the_second_judge_does_not_like_is_told_without_what_was_written(run, services):
    trainer, told = run({})
    lines = [line for line in told.splitlines() if "[Judge]" in line]
    assert lines and "a phrase is in" in lines[0] and "online" not in told
    last = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    assert last["judge_meter/alarms"] >= 1
    # The calls: at most a quarter of the first judge's, and the warm-up of each.
    assert 0 < len(asked(services, "second")) <= 0.25 * BATCH * STEPS


def test_the_run_stops_at_an_alarm_and_quotes_where_it_may_with_a_reward_process_too(run, caplog):
    with pytest.raises(JudgeAlarm, match="a phrase is in"):
        run({"on_alarm": "stop"}, verbose=("completions",), reward_process=True)
    assert "online'" in caplog.text


def test_a_second_judge_that_fails_costs_no_reward_and_gives_no_number(run, services):
    called = []

    def own(completions, **_):
        called.extend(completions)
        return [0.0] * len(completions)

    trainer, told = run({"on_alarm": "stop"}, functions=[own], second_works=False, max_steps=ONSET)
    assert len(called) == BATCH * ONSET  # nobody but the judge scores for the meter
    assert trainer.state.global_step == ONSET and "[Judge]" not in told
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert {entry["judge_meter/agreement/fairness"] for entry in steps} == {None}
    assert {entry["outcome/ok"] for entry in steps} == {1.0}
    assert asked(services, "second")


def test_after_an_alarm_whole_batches_are_of_the_second_judge_through_a_killed_process_and_a_resume(
    run, services, tmp_path
):
    killed = []

    def kill(request):  # the reward process, once batches are the second judge's
        if request.json["model"] == "second" and len(asked(services, "second")) > 0.25 * BATCH * STEPS and not killed:
            killed.append(
                next(one for one in psutil.Process().children() if "salesrl_trl.reward.remote" in one.cmdline())
            )
            os.kill(killed[0].pid, signal.SIGKILL)

    # At step 15 an evaluation takes 16 of the texts.
    common = {
        "record": True, "eval_strategy": "steps", "eval_steps": 15, "save_strategy": "steps", "save_steps": 30,
        "rollout_lookahead": 1,
    }  # fmt: skip
    trainer, told = run({"on_alarm": "second_judge"}, before=kill, reward_process=True, **common)
    [line] = [line for line in told.splitlines() if "the second judge scores new batches" in line]
    since = int(re.search(r"the alarm in step (\d+),", line)[1])
    assert killed and ONSET < since < 30
    # The record has the judge of each verdict: one in a step. What was in flight at the alarm has the first one.
    judges = {}
    for one in recorded(tmp_path / "run"):
        judges.setdefault((one.mode, one.step), set()).add(one.verdicts["judge"].provider)
    assert {step: judges["train", step] for step in range(1, STEPS + 1)} == {
        step: {"first" if step <= since + 1 else "second"} for step in range(1, STEPS + 1)
    }
    # Evaluations have one judge before and after it, so that they can be compared.
    assert judges["eval", 15] == judges["eval", 30] == {"second"}
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry[BY_SECOND_JUDGE] for entry in steps[:3]] == [0.0] * 3 and steps[-1][BY_SECOND_JUDGE] == 1.0
    assert {frozenset(entry) for entry in steps} == {frozenset(steps[0])}

    # A resume goes on with it, unless the setting is another one now.
    for on_alarm, provider, words in (
        ("second_judge", "second", f"since the alarm in step {since}, the second judge"),
        ("warn", "first", "the first judge scores rewards again"),
    ):
        checkpoint = str(tmp_path / "run" / "checkpoint-30")
        _, told = run({"on_alarm": on_alarm}, resumed=checkpoint, **{**common, "eval_strategy": "no"})
        assert words in told.rpartition("resuming from")[2]
        judges = {one.verdicts["judge"].provider for one in recorded(tmp_path / "run", "train") if one.step > 30}
        assert judges == {provider}
