"""Time, trace and quick evaluations of real runs in this process: that they add up, disturb nothing, and survive what
ends a run."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from support.forked import Program
from support.loopback import VERDICT, chat_completion
from support.runs import check_times, scalars, spans
from support.scripted import DIFFERENT, steps_of
from support.seconds import check_seconds

from salesrl_trl.config.quick_evaluations import QuickEvalSettings
from salesrl_trl.names import (
    MFU_MODEL,
    MFU_STEP,
    REWARD_EXPOSED,
    REWARD_HIDDEN,
    REWARD_SECONDS,
    STEP_SECONDS,
    Phase,
    time_of,
)
from salesrl_trl.telemetry.instruments import Instruments, InstrumentSettings
from salesrl_trl.trainer import SalesGRPOTrainer

SLOW_VERDICT = chat_completion(json.dumps(VERDICT))
RUNNER = Path(__file__).parents[1] / "support/run_until_stopped.py"


@pytest.fixture
def instruments(tmp_path):
    def build(**settings):
        settings = {"trace_steps": range(1, 1000), "heartbeat_s": 0.0, **settings}
        return Instruments(InstrumentSettings(**settings), torch.device("cpu"), tmp_path / "run")

    return build


@pytest.mark.alone
def test_phases_sum_to_the_step_and_rewards_to_their_makespan(scripted_trainer, services, instruments, tmp_path):
    services.set("judge", SLOW_VERDICT, delay_s=0.3)
    trainer = scripted_trainer(DIFFERENT, instruments=instruments(), report_to="tensorboard", max_steps=6)
    trainer.train()
    for step, phases in enumerate(check_times(tmp_path / "run", 6), start=1):
        # rewards run from the end of generation, beside the reference's log-probs
        assert phases[Phase.REFERENCE_LOGPROBS] + phases[Phase.REWARD_WAIT] >= 0.28, step
        assert phases[Phase.EVALUATION] == phases[Phase.CHECKPOINT] == phases[Phase.WEIGHT_PUSH] == 0
    for logs in steps_of(trainer):
        assert logs[REWARD_SECONDS] >= 0.3
        check_seconds(abs(logs[REWARD_EXPOSED] - logs[time_of(Phase.REWARD_WAIT)]), most=0.02)
        check_seconds(abs(logs[REWARD_HIDDEN] - logs[time_of(Phase.REFERENCE_LOGPROBS)]), most=0.05)
        assert logs["time/judge_p50_s"] >= 0.3
        assert logs["time/rag_8b_p50_s"] <= logs["time/rag_8b_max_s"] < logs[REWARD_SECONDS]
        assert logs["perf/samples_per_s"] == pytest.approx(4 / logs[STEP_SECONDS], rel=1e-6)
        assert logs[MFU_MODEL] is logs[MFU_STEP] is None  # a CPU's peak is in no table
    keys = [set(logs) for logs in steps_of(trainer)]
    assert all(each == keys[0] for each in keys)


def test_an_evaluation_and_a_checkpoint_are_counted_as_such(scripted_trainer, services, instruments):
    trainer = scripted_trainer(
        DIFFERENT, instruments=instruments(), max_steps=2, eval_strategy="steps", eval_steps=1, save_strategy="steps",
        save_steps=1, num_generations_eval=2, per_device_eval_batch_size=4,
    )  # fmt: skip
    services.set("judge", SLOW_VERDICT, delay_s=0.4)
    trainer.train()
    first, second = steps_of(trainer)
    assert first["time/evaluation_s"] == first["time/checkpoint_s"] == 0
    assert second["time/evaluation_s"] >= 0.8  # what comes after an update; two batches of it wait 0.4 s each
    assert second["time/checkpoint_s"] > 0
    check_seconds(second["time/reward_wait_s"], most=0.8)  # that of training alone


def test_the_trace_has_a_track_for_each_reward_and_one_for_the_phases(
    scripted_trainer, services, instruments, tmp_path
):
    trainer = scripted_trainer(DIFFERENT, instruments=instruments(trace_steps=range(2, 4)), max_steps=5)
    trainer.train()
    trainer.finish()
    tracks = spans(tmp_path / "run")
    assert [each["name"] for each in tracks[0, "steps"]] == ["step 2", "step 3"]
    rewards = {name for pid, name in tracks if pid != 0}
    assert rewards == {f"reward {place}{what}" for place in range(4) for what in ("", " reference")}
    for place in range(4):
        chain = tracks[100_000, f"reward {place}"]
        assert [each["name"] for each in chain] == ["parse", "rag_8b", "judge"] * 2
        phases = [
            [each for each in tracks[0, "phases"] if each["name"] == name] for name in ("generation", "reward_wait")
        ]
        for each, generation, wait in zip((chain[:3], chain[3:]), *phases, strict=True):
            for span in each:
                assert generation["ts"] <= span["ts"]
                assert span["ts"] + span["dur"] <= wait["ts"] + wait["dur"]


def test_a_process_that_is_killed_leaves_trace_and_events(tiny, services, tmp_path):
    services.set("judge", SLOW_VERDICT, delay_s=0.2)
    given = {"model_name_or_path": tiny, "output_dir": tmp_path / "run", "report_to": "tensorboard"}
    given |= {"rag_base_url": services.url, "judge_base_url": f"{services.url}/v1"}
    with Program(
        [RUNNER, *(word for name, value in given.items() for word in (f"--{name}", value))],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            for line in process.stderr:
                if "[Step 3/" in line:
                    break
            time.sleep(0.1)  # into the next step
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(30)
    tracks = spans(tmp_path / "run")
    assert [each["name"] for each in tracks[0, "steps"]][:3] == ["step 1", "step 2", "step 3"]
    assert len(scalars(tmp_path / "run")[f"train/{STEP_SECONDS}"]) >= 3


QUICK = QuickEvalSettings(steps=2, rows=4, best="worst_branch")
UNSCRIPTED = {"kind": SalesGRPOTrainer, "max_completion_length": 12, "beta": 0.1, "num_generations_eval": 2}


def losses(trainer):
    return [(logs["loss"], logs["grad_norm"], logs["reward"], logs["kl"]) for logs in steps_of(trainer)]


def test_quick_evaluations_disturb_neither_training_nor_evaluation(scripted_trainer, services):
    """The same run, sampled from its own policy, with and without them: equal to the last bit."""
    runs = []
    for quick in (None, QUICK):
        torch.manual_seed(7)
        trainer = scripted_trainer(
            quick_eval=quick, **UNSCRIPTED, eval_strategy="steps", eval_steps=4, max_steps=4, seed=3
        )
        trainer.train()
        evaluated = next(each for each in trainer.state.log_history if "eval_reward" in each)
        timed = {key for key in evaluated if "time/" in key or "runtime" in key or "per_second" in key}
        timed |= {key for key in evaluated if "services/" in key or "cache/" in key}  # what one has asked before
        runs.append((losses(trainer), {k: v for k, v in evaluated.items() if k not in timed}, trainer))
    (plain, plain_eval, _), (with_quick, quick_eval, trainer) = runs
    assert with_quick == plain
    assert {k: str(v) for k, v in quick_eval.items()} == {k: str(v) for k, v in plain_eval.items()}
    logged = [entry for entry in trainer.state.log_history if "quick_eval/reward" in entry]
    assert [entry["step"] for entry in logged] == [2, 4]


def test_a_quick_evaluation_is_greedy_and_measures_the_kl(scripted_trainer, services, tmp_path):
    """At a rate of 0 the policy stays: twice the same answers, at a temperature at which samples never agree."""
    quick = QuickEvalSettings(steps=1, rows=4)
    trainer = scripted_trainer(
        quick_eval=quick, **UNSCRIPTED, temperature=5.0, max_steps=2, learning_rate=0.0, warmup_steps=0
    )
    asked = []
    result = trainer.components.reward_loop.result

    def listening(batch, completions):
        asked.append([str(each) for each in completions])
        return result(batch, completions)

    trainer.components.reward_loop.result = listening
    trainer.train()
    training, quick_answers = asked[0::2], asked[1::2]
    assert quick_answers[0] == quick_answers[1]
    assert training[0] != training[1]
    records = [json.loads(line) for line in (tmp_path / "run/quick_eval.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        for branch in record["branches"].values():
            assert branch["rows"] == 2
            assert branch["kl"] == pytest.approx(0.0, abs=1e-6)  # the policy is its reference
            assert branch["beta"] == 0.1
            assert 0 < branch["length"] <= 12
            assert 0 <= branch["truncated"] <= 1
