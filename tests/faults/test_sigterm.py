"""A scheduler ends a run with SIGTERM while its rewards hang."""

import itertools
import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from support.forked import Program, killed_at_end
from support.holding import HOLDS
from support.loopback import Services
from support.run_until_stopped import PROMPTS, STEPS
from support.seconds import check_seconds

from salesrl_trl.ground.shutdown import EXIT_RESUMABLE

RUNNER = Path(__file__).parents[1] / "support/run_until_stopped.py"
COMPLETIONS = 4
"""Completions of a step."""
SCORED_STEPS = 4
WARM_UP = 1
"""Judge calls before the first step."""
HANGS_S = 60.0
ENDS_WITHIN_S = 30.0


class Hanging(Services):
    """Services whose judge hangs from the first completion after `SCORED_STEPS` until `let_go.set()`."""

    def __init__(self, server):
        super().__init__(server)
        self.let_go = threading.Event()
        self.hanging = 0
        self._numbers = itertools.count(-WARM_UP)

    def _respond(self, name, request):
        if name == "judge" and next(self._numbers) >= SCORED_STEPS * COMPLETIONS and not self.let_go.is_set():
            self.hanging += 1
            self.let_go.wait(HANGS_S)
        return super()._respond(name, request)


@pytest.fixture
def services(httpserver):
    services = Hanging(httpserver)
    yield services
    services.let_go.set()


@contextmanager
def started(settings):
    """The runner, in a process group of its own, as a scheduler starts it."""
    process = Program(
        [RUNNER, *(part for name, value in settings.items() for part in (f"--{name}", value))],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with killed_at_end(process):
        yield process


def trained(out):
    """Each micro-batch: the number of optimizer steps before it, and its prompts."""
    return [json.loads(line) for line in (out / "trained.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.timeout(240)
def test_a_run_that_gets_sigterm_while_rewards_hang_ends_at_once_and_is_gone_on_with(
    tiny, tmp_path, services, monkeypatch
):
    """With rewards in a process of their own. `test_rollouts_in_flight.py` stops runs without one."""
    monkeypatch.setenv("SALESRL_CACHE_DIR", str(tmp_path))
    first, second = tmp_path / "first", tmp_path / "second"
    settings = {
        "model_name_or_path": str(tiny),
        "rag_base_url": services.url,
        "judge_base_url": f"{services.url}/v1",
        "reward_process": "true",
    }
    with started({**settings, "output_dir": str(first)}) as process:
        said = []
        for line in process.stderr:
            said.append(line)
            if f"[Step {SCORED_STEPS}/{STEPS}]" in line:
                break
        assert process.poll() is None, "".join(said)
        while services.hanging <= COMPLETIONS:  # the next step waits for those, and a later one for others
            assert process.poll() is None
            time.sleep(0.02)
        below = psutil.Process(process.pid).children(recursive=True)
        assert len([each for each in below if each.name() != "tee"]) == 1
        asked = time.monotonic()
        os.killpg(process.pid, signal.SIGTERM)
        said.append(process.communicate(timeout=ENDS_WITHIN_S)[1])
        print(f"ended {time.monotonic() - asked:.1f} s after SIGTERM")
    output = "".join(said)
    done = SCORED_STEPS  # the one under way is given up, and its prompts come again
    assert process.returncode == EXIT_RESUMABLE, output
    assert f"RunStopped: stopped by SIGTERM after {done} steps" in output
    assert "Traceback" not in output, output
    psutil.wait_procs(below, timeout=ENDS_WITHIN_S)
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in below)
    checkpoint = first / f"checkpoint-{done}"
    assert (checkpoint / "model.safetensors").is_file()
    assert services.hanging > COMPLETIONS  # rollouts were in flight that nobody trained on
    assert [batch["done"] for batch in trained(first)][:done] == list(range(done))
    services.let_go.set()
    with started({**settings, "output_dir": str(second), "resume_from_checkpoint": str(checkpoint)}) as process:
        output = process.communicate(timeout=60)[1]
    assert process.returncode == 0, output
    assert "skipping an update" not in output
    steps = [batch["done"] for out in (first, second) for batch in trained(out)]
    assert steps == list(range(STEPS))
    prompts = Counter(prompt for out in (first, second) for batch in trained(out) for prompt in batch["prompts"])
    assert len(prompts) == PROMPTS
    assert set(prompts.values()) == {COMPLETIONS * STEPS // PROMPTS}


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("function", "reward_process"),
    [("spins", "false"), ("blocks_a_pool", "false"), ("blocks", "true")],
)
def test_a_run_whose_reward_function_never_gives_its_thread_back_ends_within_seconds_of_a_signal(
    tiny, tmp_path, function, reward_process
):
    settings = {
        "model_name_or_path": str(tiny),
        "output_dir": str(tmp_path / "run"),
        "reward_funcs": f"support.holding.{function}",
        "reward_process": reward_process,
    }
    with started(settings) as process:
        assert any(HOLDS in line for line in process.stderr)
        asked = time.monotonic()
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=ENDS_WITHIN_S)[1]
        seconds = time.monotonic() - asked
    assert process.returncode == EXIT_RESUMABLE, output
    assert "RunStopped: stopped by SIGTERM" in output
    assert "Traceback" not in output, output
    shown = f"in {function}" if reward_process == "true" else f"{function} at "
    assert (shown in output) is (function != "blocks_a_pool")  # that holds up no event loop
    check_seconds(seconds, most=15.0, what="after SIGTERM")
