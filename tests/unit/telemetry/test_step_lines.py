"""The lines of a step, and of an epoch."""

import logging
import re
import subprocess
from collections import Counter
from types import SimpleNamespace

import pytest
from support.forked import COLD_PYTHON
from transformers import TrainerControl, TrainerState

from salesrl_trl import names
from salesrl_trl.names import Phase
from salesrl_trl.parts.step_lines import EpochTotals, StepLine, step_line
from salesrl_trl.telemetry.logs import hide_lines
from salesrl_trl.wiring import part

BRANCHES = ("fairness", "hallucination")
LOGS = {
    "reward": 0.4,
    "reward/fairness": 0.5,
    "reward/hallucination": None,
    "outcome/invalid_action": 0.125,
    "time/reward_exposed_s": 0.26,
}


def connected(part, failures=None, log=None, providers=()):
    """A part as a trainer of these branches connects it."""
    ledger = SimpleNamespace(failures=lambda _: failures or {}, batches=lambda _: 6)
    reward = SimpleNamespace(names=SimpleNamespace(providers=providers, services=("judge",), has_actions=True))
    args = SimpleNamespace(world_size=2, branches=("fairness", "tone") if isinstance(part, EpochTotals) else BRANCHES)
    loop = SimpleNamespace(reward=reward)
    part.connect(SimpleNamespace(args=args, reward_loop=loop, ledger=ledger, trl=SimpleNamespace(log=log)))
    return part


def outcomes(**shares):
    return {f"outcome/{name}": share for name, share in shares.items()}


HALF = outcomes(ok=0.5, invalid_action=0.25, judge_invalid=0.125, infra=0.125)
EQUAL = "| failures none | every group has equal rewards: nothing to learn from"
LINES = {
    "whole": (
        LOGS, {"not_json": 8, "judge_timeout": 1},
        "[Step 3/60] reward fairness=0.50 hallucination=n/a | valid actions 88% | "
        "failures judge_timeout=1 not_json=8 | 1.2 s, waited 0.26 s for rewards",
    ),
    "loss and KL": ({**LOGS, "loss": -0.01234, "kl": 0.0301}, {}, "hallucination=n/a | loss -0.012, KL 0.03 | valid"),
    "answers": (HALF, {"hollow_answer": 2}, "| scored 75%, 25.0% of all as invalid | failures hollow_answer=2 |"),
    # one of many is not rounded to all is well
    "one failed": (outcomes(invalid_action=0, judge_invalid=0, infra=1 / 512), {"a": 1}, "| scored >99% | failures"),
    "equal": ({**LOGS, "frac_reward_zero_std": 1.0}, {}, EQUAL),
}  # fmt: skip
"""Figures, failures, and what the line says of them. Those of answers come without actions."""


@pytest.mark.parametrize("name", LINES)
def test_a_step_line_says(name):
    logs, failures, said = LINES[name]
    are_actions = "scored" not in said
    assert said in step_line(3, 60, logs, BRANCHES, Counter(failures), 1.25, are_actions=are_actions)


def test_the_only_branch_is_not_named_and_some_difference_teaches():
    line = step_line(3, 60, {"reward/all": 0.5, "frac_reward_zero_std": 0.9}, ("all",), {}, 1.25)
    assert line.startswith("[Step 3/60] reward 0.50 | valid") and "nothing to learn" not in line


def test_a_line_names_the_rank_where_there_are_several(caplog, monkeypatch):
    line = "[RANK 0] `refill_groups` has no effect here"  # as accelerate's loggers begin each
    logger = logging.getLogger("salesrl_trl.wiring.components")
    for processes in ("1", "2"):
        monkeypatch.setenv("WORLD_SIZE", processes)
        hide_lines()
        logger.warning(line)
    assert caplog.messages == [line.removeprefix("[RANK 0] "), line]


def test_a_part_that_is_imported_late_names_no_rank_either(caplog, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(part, "built_in", lambda run: logging.getLogger("salesrl_trl.late").handlers)  # no parts
    part.connect_parts(SimpleNamespace(), [], [])
    logging.getLogger("salesrl_trl.late").warning("[RANK 0] no step changes a weight")
    assert caplog.messages == ["no step changes a weight"]


def test_average_and_eta_are_of_the_steps_after_the_first(caplog, monkeypatch):
    now = iter([0.0, 20.0, 23.0, 28.0])  # begun, and three lines: at 20 s, 23 s and 28 s
    monkeypatch.setattr("salesrl_trl.parts.step_lines.time.perf_counter", lambda: next(now))
    callback = connected(StepLine(), providers=("openai",))
    state = TrainerState(global_step=0, max_steps=12, is_world_process_zero=True)
    callback.on_train_begin(None, state, TrainerControl())
    with caplog.at_level(logging.INFO, logger="salesrl_trl"):
        for step, evaluation in ((1, 16.0), (2, 0.0), (3, 2.0)):
            state.global_step = step
            logs = {**LOGS, "time/step_s": 4.0, "time/evaluation_s": evaluation}
            callback.on_log(None, state, TrainerControl(), logs=logs)
    lines = [record.message for record in caplog.records[::2]]
    # 20 s, of which 16 s for the evaluation before it: 4 s, and eleven more to come
    assert "| 20.0 s, waited 0.26 s for rewards | avg 4.0 s, elapsed 0:20, ETA 0:44" in lines[0]
    assert "| 3.0 s, waited 0.26 s for rewards | avg 3.0 s, elapsed 0:23, ETA 0:30" in lines[1]
    # 3 s and 5 s, an evaluation on the way included: there will be more of them
    assert "| 5.0 s, waited 0.26 s for rewards | avg 4.0 s, elapsed 0:28, ETA 0:36" in lines[2]


@pytest.mark.parametrize(("is_main", "providers"), [(True, ("openai",)), (True, ()), (False, ("openai",))])
def test_a_line_comes_with_each_step_and_not_with_summaries_of_the_main_process(caplog, is_main, providers):
    callback = connected(StepLine(), providers=providers)
    state = TrainerState(global_step=1, max_steps=2, is_world_process_zero=is_main)
    judged = {"time/judge_s": 3.21, "judge/openai/verdicts": 0.5}  # means over six batches
    with caplog.at_level(logging.INFO, logger="salesrl_trl"):
        callback.on_train_begin(None, state, TrainerControl())
        callback.on_log(None, state, TrainerControl(), logs={**LOGS, **judged})
        callback.on_log(None, state, TrainerControl(), logs={"train_runtime": 3.0})
    of_judge = ["[Judge@step1] time=3.2s providers={'openai': 3}"] * len(providers)
    assert caplog.messages[1:] == of_judge * is_main
    assert [message.startswith("[Step 1/2]") for message in caplog.messages[:1]] == [True] * is_main


def test_a_service_whose_concurrency_bounds_the_step_is_named_once(caplog, monkeypatch):
    now = iter([0.0, 20.0, 40.0, 60.0, 80.0])  # begun, and four lines
    monkeypatch.setattr("salesrl_trl.parts.step_lines.time.perf_counter", lambda: next(now))
    callback, told = connected(StepLine()), []
    state = TrainerState(max_steps=4, is_world_process_zero=True)
    callback.on_train_begin(None, state, TrainerControl())
    # one step, six batches, two processes: three times as many seconds in each as a batch counts
    for waited, full_ms in ((0.9, 6000), (16.0, 3300), (16.0, 6000), (16.0, 6000)):
        caplog.clear()
        state.global_step += 1
        logs = {**LOGS, "time/reward_exposed_s": waited, "services/judge/full_ms": full_ms}
        with caplog.at_level(logging.INFO, logger="salesrl_trl"):
            callback.on_log(None, state, TrainerControl(), logs=logs)
        told.append([message for message in caplog.messages if message.startswith("[Limit]")])
    assert [len(each) for each in told] == [0, 0, 1, 0]  # hidden; queued in less than half of the step; the bound
    assert "judge: calls queued at its highest concurrency limit for 18.0 of 20.0 s" in told[2][0]


def test_an_epochs_totals_are_those_of_its_log_lines_and_start_over():
    failed, control, entries = Counter(), TrainerControl(), []
    callback = connected(EpochTotals(), failed, entries.append)
    state = TrainerState(global_step=4, num_input_tokens_seen=1_000_000)
    callback.on_train_begin(None, state, control)
    lines = [  # step, epoch, fairness, tokens so far, timeouts, share, GiB
        (5, 0.2, 0.5, 2e6, 1, 0.1, 70.0),
        (8, 1.0, 0.1, 3e6, 2, 0.5, 60.0),
        (9, 1.5, None, 3.5e6, 0, 0.5, None),
    ]
    for state.global_step, state.epoch, reward, tokens, timeouts, ratio, gib in lines:
        failed.clear()
        failed.update({"judge_timeout": timeouts} if timeouts else {})
        logs = {"reward": 0.5, "reward/fairness": reward, "reward/tone": None, "num_tokens": tokens,
                "time/step_s": 20.0, "time/generation_s": 15.0, "time/reward_wait_s": 5.0,
                "perf/compute_ratio": ratio, "memory/gpu_peak_gib": gib}  # fmt: skip
        callback.on_log(None, state, control, logs=logs)
        callback.on_log(None, state, control, logs={"failures/reason/judge_timeout": 1})  # an entry of its own
        if state.epoch >= 1:
            callback.on_epoch_end(None, state, control)
    # every rank logs the same: 4 steps, then 1; 2 M tokens, then 0.5; 0.5 in one step and 0.1 in three are 0.2
    totals = [entry for entry in entries if "epoch_totals/steps" in entry]
    seconds = {f"epoch_totals/time/{phase}_s": 0.0 for phase in Phase}
    unknown = {"perf/data_loading_ratio", "perf/mfu_step", *names.MEMORY} - {"memory/gpu_peak_gib"}
    # 0.1 of 20 s and 0.5 of 60 s are 32 s of 80
    assert totals[0] == seconds | {f"epoch_totals/{name}": None for name in unknown} | {
        "epoch_totals/perf/compute_ratio": pytest.approx(0.4), "epoch_totals/memory/gpu_peak_gib": 70.0,
        "epoch_totals/steps": 4, "epoch_totals/tokens": 2e6, "epoch_totals/failures": 3,
        "epoch_totals/reward/fairness": pytest.approx(0.2), "epoch_totals/reward/tone": None,
        "epoch_totals/time/step_s": 80, "epoch_totals/time/generation_s": 60, "epoch_totals/time/reward_wait_s": 20,
    }  # fmt: skip
    assert totals[1].keys() == totals[0].keys()
    assert (totals[1]["epoch_totals/steps"], totals[1]["epoch_totals/memory/gpu_peak_gib"]) == (1, None)
    assert [entry for entry in entries if entry not in totals] == [
        {"epoch_totals/failures/reason/judge_timeout": 3}  # in the first epoch alone
    ]


@pytest.mark.parametrize(
    ("before", "line"),
    [
        ("", r"\d\d:\d\d:\d\d step\n"),
        ("logging.basicConfig(level='INFO', format='mine: %(message)s');", "mine: step\n"),
    ],
    ids=["nothing set up", "logging of the program's own"],
)
def test_a_line_is_shown_once(before, line):
    script = (
        f"import logging; from salesrl_trl.telemetry.logs import show_lines; {before} show_lines(); show_lines();"
        "logging.getLogger('salesrl_trl.trainer').info('step')"
    )
    done = subprocess.run([COLD_PYTHON, "-c", script], capture_output=True, text=True, check=True)
    assert re.fullmatch(line, done.stderr)


def test_clients_lines_of_each_request_are_hidden_unless_the_program_has_set_their_level():
    script = (
        "import logging; from salesrl_trl.telemetry.logs import hide_lines; logging.basicConfig(level='INFO');"
        "logging.getLogger('openai').setLevel('INFO'); hide_lines();"
        "[logging.getLogger(name).info(name) for name in ('httpx', 'httpx2', 'openai', 'mine')];"
        "logging.getLogger('httpx').warning('httpx')"
    )
    done = subprocess.run([COLD_PYTHON, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["INFO:openai:openai", "INFO:mine:mine", "WARNING:httpx:httpx"]
