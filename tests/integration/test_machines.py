"""Two machines and a server: three network namespaces on one host, joined by a bridge, none of which reaches another's
loopback addresses. `accelerate launch` starts a process in each of the first two.

As a program it is a recipe's process, or the server:

    python tests/integration/test_machines.py SETTINGS...
    python tests/integration/test_machines.py server OUT
"""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate, chain, pairwise, repeat
from operator import or_
from pathlib import Path

import pytest
from support.forked import NAMESPACE, Program

from salesrl_trl.launch.process import begin_run

ROOT = Path(__file__).parents[2]
FIRST, SECOND, SERVER = (f"10.79.0.{number}" for number in (1, 2, 3))
SLOW_S, LOST_S, PORT = 3.0, 5, 8000
GIVEN = {
    "use_cpu": True, "rollout_lookahead": 0, "held_out_eval": False, "quick_eval_steps": 0, "record": False,
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "report_to": "none", "save_total_limit": 1,
    "warmup_steps": 0,
}  # fmt: skip
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def machines():
    """Names of three network namespaces."""
    names = [f"salesrl-{os.getpid()}-{number}" for number in range(3)]
    hub = names[2]
    commands = [f"netns add {name}" for name in names] + [f"-n {hub} link add br0 type bridge"]
    for number, name in enumerate(names[:2], start=1):
        commands += [f"link add e0 netns {name} type veth peer name v{number} netns {hub}"]
        commands += [f"-n {hub} link set v{number} master br0 up", f"-n {name} addr add 10.79.0.{number}/24 dev e0"]
        commands += [f"-n {name} link set e0 up"]
    commands += [f"-n {hub} addr add {SERVER}/24 dev br0", f"-n {hub} link set br0 up"]
    commands += [f"-n {name} link set lo up" for name in names]
    try:
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)
        yield names
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs network namespaces: {getattr(error, 'stderr', None) or error}")
    finally:
        for name in names if shutil.which("ip") else ():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def start(machine, words, out, log):
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    own = {NAMESPACE: machine, "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "e0", "RES_OPTIONS": "timeout:1 attempts:1"}
    with (out / log).open("w") as stderr:
        return Program(
            [*map(str, words)], env={**os.environ, **own}, cwd=out, stdout=subprocess.DEVNULL, stderr=stderr
        )


@pytest.fixture
def launch(machines, tmp_path):
    """Start this file's recipe on some machines with `accelerate launch`. Their stderr is in `N.txt`."""
    started = []

    def launched(ranks, config="two_machines", **given):
        for rank, machine in enumerate(ranks):
            words = ["-m", "accelerate.commands.launch", "--config_file", ROOT / f"accelerate_configs/{config}.yaml"]
            words += ["--num_machines", len(ranks), "--num_processes", len(ranks), "--machine_rank", rank]
            words += ["--main_process_port", 29511]
            words += ["--main_process_ip", FIRST if len(ranks) > 1 else "127.0.0.1", __file__]
            words += [part for name, value in (GIVEN | given).items() for part in (f"--{name}", str(value).lower())]
            log = f"{machine}.txt"
            started.append(start(machines[machine], [*words, "--output_dir", tmp_path / "run"], tmp_path, log))
        return started[-len(ranks) :]

    yield launched
    for each in started:
        each.kill()
        each.wait()


def steps_of(out):
    path = out / "run/steps.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def until(condition, limit_s):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_slow_machine_is_waited_for_and_a_server_gets_the_shards_of_both(launch, machines, tmp_path):
    server = start(machines[2], [__file__, "server", tmp_path], tmp_path, "server.txt")
    try:
        url = f"http://{SERVER}:{PORT}"
        given = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "save_steps": 1, "max_steps": 4}
        for each in launch((0, 1), "fsdp2", **given):
            assert each.wait(timeout=120) == 0, (tmp_path / "0.txt").read_text()[-4000:]
    finally:
        server.kill()
        server.wait()
    steps = steps_of(tmp_path)
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert [step["share"] for step in steps] == [pytest.approx(0.5, abs=0.01)] * 4  # of the weights, by FSDP2
    # the server samples from what was pushed: at this learning rate earlier weights would be off
    assert max(step["sampling/sampling_logp_difference/mean"] for step in steps) < 1e-4
    assert steps[-1]["time/checkpoint_s"] > 0
    pushed = json.loads((tmp_path / "pushed.json").read_text())
    # Adam changes weights from the first gradient on; a step whose groups all have one reward has none
    has_moved = [*accumulate((step["grad_norm"] > 0 for step in steps[:3]), or_)]
    assert pushed["from"] == FIRST and has_moved[-1]
    assert [one != other for one, other in pairwise(pushed["digests"])] == has_moved
    assert len(pushed["asked"]) == 2  # each machine asks for its own completions
    assert steps[2]["step_time"] > 0.8 * SLOW_S  # the first machine has waited for the second one's disk
    # on a shared disk either machine may be the one that removes an old checkpoint
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-4"]


def test_a_machine_whose_peer_is_lost_ends_with_one_message_and_resumes_alone(launch, machines, tmp_path):
    given = {"use_vllm": False, "save_steps": 2, "ddp_timeout": LOST_S}
    first, second = launch((0, 1), max_steps=400, **given)
    until(lambda: any(step["step"] >= 3 for step in steps_of(tmp_path)), 60)
    # Nothing says goodbye, as when a machine loses its power. It is the first one, which has the processes' store.
    subprocess.run(["ip", "-n", machines[0], "link", "set", "e0", "down"], check=True)
    lost = time.monotonic()
    pids = subprocess.run(["ip", "netns", "pids", machines[0]], check=True, capture_output=True, text=True).stdout
    for pid in pids.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    assert second.wait(timeout=LOST_S + 50) not in (0, None)
    assert first.wait(timeout=5) != 0
    took, told = time.monotonic() - lost, (tmp_path / "1.txt").read_text()
    assert "Processes timed out waiting for each other" in told.split("What to do, in this order:")[0], told[-4000:]
    assert "If a machine is unreachable, rerun the command on all machines" in told
    print(f"lost: the other machine ended {took:.0f} s later, with `ddp_timeout` {LOST_S}")

    [alone] = launch((1,), max_steps=400, resume_from_checkpoint="auto", **given)
    assert alone.wait(timeout=60) != 0
    assert "or multiply `gradient_accumulation_steps` by 2; or" in (tmp_path / "1.txt").read_text()
    step = max(int(path.name.rpartition("-")[2]) for path in (tmp_path / "run").glob("checkpoint-*"))
    more = {"gradient_accumulation_steps": 2, "resume_from_checkpoint": "auto", "max_steps": step + 2}
    [alone] = launch((1,), **given | more)
    assert alone.wait(timeout=60) == 0, (tmp_path / "1.txt").read_text()[-4000:]
    assert f"resuming from checkpoint-{step}, step {step} of {step + 2}" in (tmp_path / "1.txt").read_text()


# The programs


def serve(out):
    """What a trainer asks of vLLM's server, from the packaged policy of sums. Weights come over HTTP, not NCCL."""
    import torch
    from support.pushing import digest_of
    from transformers import AutoModelForCausalLM

    from salesrl_trl.demo.packaged import ARITHMETIC_POLICY

    torch.set_num_threads(1)
    model, lock = AutoModelForCausalLM.from_pretrained(ARITHMETIC_POLICY).eval(), threading.Lock()
    settings = {"model_config": {"logprobs_mode": "processed_logprobs"}}
    pushed = {"from": None, "digests": [], "asked": []}

    def completions(asked):
        [ids], torch_ids = asked["prompt"], torch.tensor(asked["prompt"])
        with lock:
            made = model.generate(
                torch_ids, attention_mask=torch.ones_like(torch_ids), do_sample=True, top_k=0,
                max_new_tokens=asked["max_tokens"], output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        new = made.sequences[0, len(ids) :].tolist()
        logps = [float(each[0].log_softmax(-1)[token]) for each, token in zip(made.logits, new, strict=True)]
        top = [{f"token_id:{token}": logp} for token, logp in zip(new, logps, strict=True)]
        logprobs = {"tokens": [*map(str, new)], "token_logprobs": logps, "top_logprobs": top}
        return {"choices": [{"prompt_token_ids": ids, "token_ids": new, "logprobs": logprobs}]}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, content):
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self.answer({"data": [{"id": "sums", "max_model_len": 128}], "vllm_config": settings})

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.path == "/weights":
                with lock:
                    model.load_state_dict(torch.load(io.BytesIO(body)), strict=False)
                    pushed["digests"].append(digest_of(model.named_parameters()))
                pushed["from"] = self.client_address[0]
            elif self.path == "/v1/completions":
                pushed["asked"] = sorted({*pushed["asked"], self.client_address[0]})
                self.answer(completions(json.loads(body)))
                return
            Path(out, "pushed.json").write_text(json.dumps(pushed))
            self.answer({})

        def log_message(self, *_):
            pass

    ThreadingHTTPServer((SERVER, PORT), Handler).serve_forever()


def run_recipe(argv):
    import torch
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from transformers import TrainerCallback
    from trl.generation import vllm_client, vllm_generation

    import salesrl_trl.trainer
    from salesrl_trl.checkpoint import keeper
    from salesrl_trl.config import trl_settings
    from salesrl_trl.launch.train import main
    from salesrl_trl.update import stopping

    torch.set_num_threads(1)
    rank, trainer = int(os.environ["RANK"]), salesrl_trl.trainer.SalesGRPOTrainer
    begin, whole, slow = trainer.__init__, keeper.whole, chain([SLOW_S], repeat(0))
    seen = Path(argv[argv.index("--output_dir") + 1]).parent / "seen"

    class Lines(TrainerCallback):
        def on_log(self, args, state, control, logs=None, model=None, **_):
            if rank == 0 and "loss" in logs:
                held = sum(getattr(each, "to_local", lambda each=each: each)().numel() for each in model.parameters())
                share = held / sum(each.numel() for each in model.parameters())
                with Path(args.output_dir, "steps.jsonl").open("a") as file:
                    file.write(json.dumps({"step": state.global_step, "share": share, **logs}) + "\n")

    def begun(self, *args, **given):
        begin(self, *args, **given)
        self.add_callback(Lines())

    def update_named_params(self, metadata, named_params):
        torch.save(dict(named_params), body := io.BytesIO())
        self._post(f"{self.base_url}/weights", data=body.getvalue())

    def listed(output_dir):
        found = whole(output_dir)
        if len(found) == 2 and rank == 1:
            seen.touch()
            time.sleep(next(slow))  # meanwhile the other machine removes the old one
        elif len(found) == 2 and int(os.environ["WORLD_SIZE"]) > 1:
            until(seen.exists, 30)
        return found

    def initialised(self, *args, **given):
        """accelerate has FSDP on GPUs alone, though PyTorch shards on CPUs, too."""
        initialise(self, *args, **given)
        if trl_settings.has_fsdp() and self._shared_state["distributed_type"] == DistributedType.MULTI_CPU:
            plugin = given.get("fsdp_plugin") or FullyShardedDataParallelPlugin()
            self._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)

    initialise, AcceleratorState.__init__ = AcceleratorState.__init__, initialised
    trl_settings._check_fsdp = lambda _: None
    trainer.__init__, keeper.whole = begun, listed
    stopping.PATIENCE = timedelta(seconds=2)
    vllm_client.VLLMClient.init_communicator = lambda *_, **__: None
    vllm_client.VLLMClient.update_named_params = update_named_params
    vllm_client.is_vllm_available = vllm_generation.is_vllm_available = lambda: True
    main(ROOT / "recipes/own.yaml", argv)


if __name__ == "__main__":
    if sys.argv[1] == "server":
        serve(sys.argv[2])
    else:
        begin_run()
        run_recipe(sys.argv[1:])
