"""A run with conversations in flight ahead of its training is signalled on real vLLM, resumed, killed, and resumed."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import threading
import time
from pathlib import Path

import pytest
from support.forked import Program, killed_at_end
from support.providers import completion
from werkzeug import Response

from salesrl_trl.ground.shutdown import EXIT_RESUMABLE
from salesrl_trl.judged.budget import read_account

RECIPE = Path(__file__).parents[2] / "recipes/dialogue.py"
STEPS, PROMPTS, GROUP = 5, 2, 4
ANSWERS_AFTER_S = 0.3  # longer than vLLM waits for further turns before training begins
HANGS_S = 60.0
SETTINGS = {
    "reward_funcs": ["dialogue_rewards.deal", "dialogue_rewards.turns"], "reward_weights": [1.0, -0.02],
    "max_train_rows": STEPS * PROMPTS, "max_steps": STEPS, "rollout_lookahead": 2, "save_steps": 1,
    "per_device_train_batch_size": PROMPTS * GROUP, "gradient_accumulation_steps": 1, "num_generations": GROUP,
    "held_out_eval": False, "quick_eval_steps": 0, "report_to": "none", "resume_from_checkpoint": "auto",
}  # fmt: skip


ON_TRANSFORMERS = {"use_vllm": False}
"""vLLM lives in the process that is killed, so nothing of it is left to resume with."""
SHORT = {**ON_TRANSFORMERS, "rollout_lookahead": 0, "max_completion_length": 24, "partner": "customer"}
"""An undisturbed run in seconds. The order of rows depends on none of these."""


class CustomerModel:
    """A model that goes on four times, then buys, and counts its requests. It hangs while `answers` is not set."""

    def __init__(self, server):
        self.requests = self.in_flight = 0
        self.answers = threading.Event()
        self.answers.set()
        self._lock = threading.Lock()
        server.expect_request("/v1/models").respond_with_json({"data": [{"id": "m"}]})
        server.expect_request("/v1/chat/completions").respond_with_handler(self._answer)
        self.setting = {"base_url": server.url_for("/v1"), "model": "m", "max_calls": 10_000}

    def _answer(self, request):
        sold = len(json.loads(request.get_data())["messages"]) >= 7  # the role, the first message, five turns
        with self._lock:
            self.requests += 1
            self.in_flight += 1
        time.sleep(ANSWERS_AFTER_S)
        self.answers.wait(HANGS_S)
        with self._lock:
            self.in_flight -= 1
        said = {"reply": "Fine.", "decision": "accept" if sold else "continue", "price": 1 if sold else None}
        return Response(json.dumps(completion(json.dumps(said))), content_type="application/json")


@contextlib.contextmanager
def started(out, customer, **own):
    given = {**SETTINGS, "partner": customer.setting, "output_dir": str(out), **own}
    words = [part for name, value in given.items() for part in (f"--{name}", *_written(value))]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    process = Program([RECIPE, *words], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    with killed_at_end(process):
        yield process


def _written(value):
    values = value if isinstance(value, list) else [value]
    return [each if isinstance(each, str) else json.dumps(each) for each in values]


def ended_after(step, out, customer, number, **own):
    """Send a signal within the step after this one, while conversations are in flight. Returns the exit code."""
    with started(out, customer, **own) as process:
        said = []
        for line in process.stderr:
            said.append(line)
            if f"[Step {step}/" in line:
                break
        customer.answers.clear()
        while not customer.in_flight:
            assert process.poll() is None, "".join(said[-40:])
            time.sleep(0.01)
        os.killpg(process.pid, number)
        process.communicate(timeout=HANGS_S)
    customer.answers.set()
    return process.returncode


def finished(out, customer, **own):
    with started(out, customer, **own) as process:
        said = process.communicate(timeout=120)[1]
    assert process.returncode == 0, said[-4000:]


def rows_of(out):
    """The rows of each step in the order of the batch, from the record."""
    with contextlib.closing(sqlite3.connect(out / "record/rank-0.sqlite")) as record:
        assert record.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert record.execute("SELECT DISTINCT outcome FROM completions").fetchall() == [("ok",)]
        # on a busy machine a request is hedged, and the slower one cancelled
        failures = {failure for (failure,) in record.execute("SELECT DISTINCT failure FROM calls")}
        assert failures in ({""}, {"", "cancelled"})
        rows = record.execute("SELECT step, row FROM completions ORDER BY step, place").fetchall()
    assert len(rows) == STEPS * PROMPTS * GROUP
    return rows


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_ended_twice_with_conversations_in_flight_trains_each_row_once_in_the_same_order(tmp_path, httpserver):
    customer, whole, cut = CustomerModel(httpserver), tmp_path / "whole", tmp_path / "cut"
    finished(whole, customer, **SHORT)
    assert ended_after(1, cut, customer, signal.SIGTERM) == EXIT_RESUMABLE
    account = read_account(cut / "budget.json")  # counts requests of conversations that were given up, and no others
    assert account.taken["partner.max_calls"] == account.total("customer").calls >= customer.requests
    assert ended_after(2, cut, customer, signal.SIGKILL, **ON_TRANSFORMERS) == -signal.SIGKILL
    finished(cut, customer, **ON_TRANSFORMERS)
    rows = rows_of(cut)
    assert rows == rows_of(whole)
    assert len(set(rows)) == len({row for _, row in rows}) == STEPS * PROMPTS
    account = read_account(cut / "budget.json")
    assert account.total("customer").calls <= customer.requests <= account.taken["partner.max_calls"]
