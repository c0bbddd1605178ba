"""Train in an environment of the package `verifiers`, by its name: rows, turns, tools and rubric are its own.

    VERIFIERS_ENV=gsm8k-v1 VERIFIERS_PYTHON=/path/to/its/venv/bin/python python examples/verifiers_environment.py

verifiers 0.4 pins `openai<3` and `mcp==2.0.0`, so it runs in a process with an interpreter of its own: install
verifiers, the environment and `uv` there. This file is both: the trainer, and, run by that interpreter, the process
that plays. Each line which that process reads is an episode to play against the policy's endpoint, and each line that
it writes is a result.
"""

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys

ENVIRONMENT = os.environ.get("VERIFIERS_ENV", "gsm8k-v1")
TASKSET = json.loads(os.environ.get("VERIFIERS_TASKSET", "{}"))  # its settings, e.g. {"game": "Hangman-v0"}
PYTHON = os.environ.get("VERIFIERS_PYTHON", sys.executable)
MODEL = os.environ.get("MODEL", "Qwen/Qwen3-0.6B")
MOST_ROWS = 1000
LINE_BYTES = 1 << 24


class Player:
    """The process that plays, on the event loop of the episodes."""

    def __init__(self):
        self.process, self.numbers, self.waiting = None, itertools.count(), {}
        self.starting = asyncio.Lock()

    async def play(self, client, row):
        async with self.starting:
            if self.process is None or self.process.returncode is not None:
                self.process = await asyncio.create_subprocess_exec(
                    PYTHON, __file__, "play", stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=LINE_BYTES
                )
                self.reading = asyncio.create_task(self.read(self.process))
        number, result = next(self.numbers), asyncio.get_running_loop().create_future()
        self.waiting[number] = result
        asked = {"number": number, "task": row["task"], "url": str(client.base_url), "key": client.api_key}
        self.process.stdin.write(json.dumps(asked).encode() + b"\n")
        try:
            played = await result
        finally:
            del self.waiting[number]
        if played["error"]:
            raise RuntimeError(played["error"])  # not a number: the episode is excluded
        return played["reward"]

    async def read(self, process):
        async for line in process.stdout:
            played = json.loads(line)
            if (result := self.waiting.get(played["number"])) and not result.done():
                result.set_result(played)
        await process.wait()
        for result in self.waiting.values():
            if not result.done():
                result.set_exception(ConnectionError("the environment's process has ended"))


def build_env():
    """In the other process: the taskset's own environment, whose roles are all played by the policy."""
    from verifiers.v1.configs.env import agent_config_fields
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    taskset, role = {"id": ENVIRONMENT, **TASKSET}, {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    roles = agent_config_fields(resolve_env_config({"taskset": {**taskset}}))
    return load_environment(resolve_env_config({"taskset": taskset, **dict.fromkeys(roles, role)}))


def list_rows():
    for task in itertools.islice(build_env().taskset, MOST_ROWS):
        prompt = task.data.prompt or ""
        text = prompt if isinstance(prompt, str) else " ".join(str(message.content) for message in prompt)
        print(json.dumps({"prompt": [{"role": "user", "content": text}], "task": task.data.idx}))


async def play_all(results):
    import verifiers.v1 as vf

    env, running = build_env(), set()
    tasks = {task.data.idx: task for task in itertools.islice(env.taskset, MOST_ROWS)}

    async def played(asked):
        reward, error, variable = None, None, f"POLICY_KEY_{asked['number']}"
        os.environ[variable] = asked["key"]
        try:
            client = vf.EvalClientConfig(base_url=asked["url"], api_key_var=variable)
            episode = await env.run_episode(tasks[asked["task"]], vf.ModelContext(model="policy", client=client))
            failed = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            reward = sum(trace.reward for trace in episode.traces)
            if failed or not episode.ok:
                error = failed[0].type if failed else "not ok"  # its message may quote texts
        except Exception as raised:
            error = type(raised).__name__
        finally:
            del os.environ[variable]
        results.write(json.dumps({"number": asked["number"], "reward": reward, "error": error}) + "\n")
        results.flush()

    async with env.serving():
        while line := await asyncio.to_thread(sys.stdin.readline):
            running.add(task := asyncio.create_task(played(json.loads(line))))
            task.add_done_callback(running.discard)


def train():
    from datasets import Dataset

    from salesrl_trl import SalesGRPOConfig, SalesGRPOTrainer, per_episode

    player = []

    @per_episode
    async def environment(client, row):
        player[:] = player or [Player()]
        return await player[0].play(client, row)

    listed = subprocess.run([PYTHON, __file__, "rows"], stdout=subprocess.PIPE, check=True, text=True)
    rows = Dataset.from_list([json.loads(line) for line in listed.stdout.splitlines()])
    config = SalesGRPOConfig(
        "runs/verifiers", max_steps=6, max_completion_length=512, logging_steps=1, report_to="none"
    )
    trainer = SalesGRPOTrainer(MODEL, environment, config, rows)
    trainer.train()
    trainer.finish()


if __name__ == "__main__":
    if sys.argv[1:] == ["rows"]:
        list_rows()
    elif sys.argv[1:] == ["play"]:
        with contextlib.redirect_stdout(sys.stderr):  # the environment's output isn't the result
            asyncio.run(play_all(sys.__stdout__))
    else:
        train()
