"""Services that fail, a run that is told to stop, and two ranks that see different things, while rollouts are ahead.

Run as a program it is one of two ranks, started by a test here:

    python -m torch.distributed.run --nproc_per_node 2 tests/faults/test_rollouts_in_flight.py POLICY OUT
"""

import asyncio
import gc
import itertools
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from pytest_httpserver import HTTPServer
from support.loopback import ANSWER, Services, action, build_reward
from support.ranks import run_ranks
from support.scripted import ScriptedTrainer, build_trainer, default_rows
from support.seconds import check_seconds
from transformers import TrainerCallback

from salesrl_trl.errors import RunStopped, TooFewRewardsError
from salesrl_trl.evaluation.record import QuickEvalSettings
from salesrl_trl.names import STALENESS, Phase, time_of
from salesrl_trl.reward.scoring import missing
from salesrl_trl.types import Outcome, Reward

TEXTS = tuple(action(query=f"n{number}n") for number in range(400))
"""Actions that no cache answers."""
HANGS_S = 60.0
SKIPPED = "failures/skipped_update"


class Hanging(Services):
    """Services whose judge hangs from the time it is told to until it is let go."""

    def __init__(self, server):
        super().__init__(server)
        self.hangs = threading.Event()
        self.asked_to_hang = threading.Event()
        self.let_go = threading.Event()

    def _respond(self, name, request):
        if name == "judge" and self.hangs.is_set():
            self.asked_to_hang.set()
            self.let_go.wait(HANGS_S)
        return super()._respond(name, request)


class AtStep(TrainerCallback):
    """Does something when a step begins, and keeps the weights after each."""

    def __init__(self, **acts):
        self.acts = {int(name.removeprefix("at_")): act for name, act in acts.items()}
        self.weights = {}

    def on_step_begin(self, args, state, control, **_):
        self.acts.pop(state.global_step, lambda: None)()

    def on_step_end(self, args, state, control, model, **_):
        self.weights[state.global_step] = torch.cat([each.detach().flatten() for each in model.parameters()])

    def moved(self, step):
        return not torch.equal(self.weights[step], self.weights[step - 1])


@pytest.fixture
def server():
    """One that can be stopped and started again at the same address."""
    with HTTPServer(host="127.0.0.1", port=0, threaded=True) as server:
        yield server


@pytest.fixture
def services(server):
    services = Hanging(server)
    yield services
    services.let_go.set()


@pytest.fixture
def trainer_of(tiny, services, tmp_path):
    built = []

    def build(limits=None, deadline_s=90.0, out="run", **given):
        rows = default_rows()
        reward = build_reward(
            services.url, rows, invalid_action_reward=0.0, deadline_s=deadline_s, timeout_s=90.0, limits=limits
        )
        defaults = {"beta": 0.0, "rollout_lookahead": 2, "references_ahead": True, "max_steps": 12}
        built.append(build_trainer(tiny, reward, TEXTS, rows, tmp_path / out, **{**defaults, **given}))
        return built[-1]

    services.judge_by(lambda system, user: {"candidate": len(user) * 7 % 100 / 100 if "n1" in user else 0.2,
                                            "reference": 0.5, "reason": "fine"})  # fmt: skip
    yield build
    services.let_go.set()
    for trainer in built:
        trainer.finish()  # may have been before


def steps_of(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def pending(trainer):
    """Tasks of rewards on the trainer's loop."""

    async def told():
        await asyncio.sleep(0.1)  # what was cancelled ends
        return [str(task) for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    return asyncio.run_coroutine_threadsafe(told(), trainer.async_loop).result(10)


def pending_rewards(trainer):
    return [task for task in pending(trainer) if any(name in task for name in ("_score", "settled", "_run_async"))]


def assert_nothing_is_left(trainer, caplog):
    """Of rewards when training has ended; of calls, which go on for the cache's sake, when the trainer is finished."""
    assert pending_rewards(trainer) == []
    assert trainer._reward._open == []
    trainer.finish()
    assert pending(trainer) == []
    gc.collect()
    for complaint in ("was destroyed but it is pending", "never retrieved"):
        assert complaint not in caplog.text


@pytest.mark.timeout(120)
@pytest.mark.parametrize("failure", ["http_503", "refused"])
@pytest.mark.parametrize("lookahead", [0, 2])
def test_a_service_that_dies_under_rollouts_and_comes_back_costs_the_steps_that_it_was_away(
    trainer_of, services, server, caplog, failure, lookahead
):
    port = server.port

    def dies():
        if failure == "http_503":
            services.set("8b", {}, status=503)
        else:
            server.stop()

    def comes_back():
        if failure == "http_503":
            services.set("8b", ANSWER)
        else:
            server.port = port
            server.start()
        time.sleep(2.5)  # the breaker probes a service that is down now and then

    trainer = trainer_of(rollout_lookahead=lookahead, max_skipped_generations=8)
    steps = AtStep(at_3=dies, at_6=comes_back)
    trainer.add_callback(steps)
    trainer.train()
    skipped = [entry[SKIPPED] for entry in steps_of(trainer)]
    assert len(skipped) == 12
    assert skipped[:3] == [0, 0, 0]
    assert 1 <= sum(skipped) <= 8
    assert skipped[-2:] == [0, 0]
    assert [set(entry) for entry in steps_of(trainer)] == [set(steps_of(trainer)[0])] * 12
    for step in range(2, 13):
        assert steps.moved(step) == (not skipped[step - 1]), step
    assert_nothing_is_left(trainer, caplog)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("lookahead", [0, 2, 4])
def test_a_service_that_stays_away_ends_the_run_with_a_checkpoint_and_nothing_left(
    trainer_of, services, caplog, lookahead
):
    trainer = trainer_of(rollout_lookahead=lookahead, max_skipped_generations=3)
    trainer.add_callback(AtStep(at_2=lambda: services.set("8b", {}, status=503)))
    with pytest.raises(TooFewRewardsError, match="3 generation batches in a row"):
        trainer.train()
    done = trainer.state.global_step
    assert 5 <= done <= 5 + lookahead  # rollouts that were scored before are trained on
    assert sum(entry[SKIPPED] for entry in steps_of(trainer)) == 3
    assert (Path(trainer.args.output_dir) / f"checkpoint-{done}" / "model.safetensors").is_file()
    assert_nothing_is_left(trainer, caplog)


ONE_SHOT = {}
IN_PARTS = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("given", [ONE_SHOT, IN_PARTS, {"gradient_accumulation_steps": 2, "num_iterations": 2}],
                         ids=["one_shot", "parts", "two_iterations"])  # fmt: skip
@pytest.mark.parametrize("lookahead", [0, 2])
def test_a_run_that_is_told_to_stop_while_rewards_hang_stops_with_a_checkpoint_to_go_on_from(
    trainer_of, services, caplog, given, lookahead
):
    given = {"rollout_lookahead": lookahead, "max_steps": 6, **given}
    trainer = trainer_of(**given)
    trainer.add_callback(AtStep(at_2=services.hangs.set))
    asked = []

    def stop():
        assert services.asked_to_hang.wait(60)
        time.sleep(0.3)  # so that it is the trainer that waits
        asked.append(time.monotonic())
        trainer.request_stop("SIGTERM")

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(RunStopped, match="stopped by SIGTERM"):
        trainer.train()
    seconds = time.monotonic() - asked[0]
    stopper.join()
    print(f"stopped {seconds:.2f} s after it was asked to")
    assert seconds < HANGS_S / 4
    done = trainer.state.global_step
    assert 2 < done <= 6
    checkpoint = Path(trainer.args.output_dir) / f"checkpoint-{done}"
    assert (checkpoint / "model.safetensors").is_file()
    assert_nothing_is_left(trainer, caplog)
    services.hangs.clear()
    services.let_go.set()
    if done < 6:
        second = trainer_of(**given, out="second")
        second.train(resume_from_checkpoint=str(checkpoint))
        assert second.state.global_step == 6
        skipped = [entry[SKIPPED] for entry in steps_of(second) if entry["step"] > done]
        assert skipped[0] == 0
        assert set(skipped) <= {0, None}  # none, where an update has no generation batch of its own


WINDOWS = {"steps_per_generation": 2, "per_device_train_batch_size": 2}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("given", [IN_PARTS, WINDOWS], ids=["while_rewards_hang", "inside_a_generation_batch"])
def test_a_run_begun_again_after_an_interrupt_goes_the_way_of_a_fresh_one(trainer_of, services, caplog, given):
    """As in a notebook, where a trainer outlives Ctrl-C."""
    fresh, again = (trainer_of(**given, max_steps=4, out=out) for out in ("fresh", "again"))
    prompts = {trainer: noted_prompts(trainer) for trainer in (fresh, again)}
    fresh.train()

    def interrupt():
        if given is IN_PARTS:
            assert services.asked_to_hang.wait(60)
            time.sleep(0.3)  # so that it is the trainer that waits
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    again.add_callback(AtStep(at_1=interrupter.start if given is WINDOWS else services.hangs.set))
    if given is IN_PARTS:
        interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        again.train()
    interrupter.join()
    assert pending_rewards(again) == []
    assert again._reward.open_batches == []
    services.hangs.clear()
    services.let_go.set()
    prompts[again].clear()
    again.train()
    per_batch = 4 if given is IN_PARTS else 2
    for trainer in (fresh, again):
        assert len(prompts[trainer]) == 4 * given.get("gradient_accumulation_steps", 1)
    wanted, seen = (
        [sorted(itertools.chain(*noted[first : first + per_batch])) for first in range(0, len(noted), per_batch)]
        for noted in (prompts[fresh], prompts[again])
    )
    assert seen == wanted
    for mine, theirs in zip(steps_of(again), steps_of(fresh), strict=True):
        assert set(mine) == set(theirs)
        assert [mine.get(name) for name in ("outcome/ok", STALENESS)] == [
            theirs.get(name) for name in ("outcome/ok", STALENESS)
        ]
    assert_nothing_is_left(again, caplog)


def noted_prompts(trainer):
    """A list to which the prompts of every micro-batch come that is trained on."""
    noted, loss = [], trainer._compute_loss

    def compute(model, inputs):
        noted.append(trainer._tokenizer.batch_decode(inputs["prompt_ids"], skip_special_tokens=True))
        return loss(model, inputs)

    trainer._compute_loss = compute
    return noted


@pytest.mark.timeout(120)
def test_a_run_stops_after_the_update_under_way_also_where_that_update_generates_nothing(trainer_of, services):
    """Four updates a generation batch: the stop is not put off to the next batch."""
    trainer = trainer_of(rollout_lookahead=0, per_device_train_batch_size=2, steps_per_generation=4, max_steps=12)
    trainer.add_callback(AtStep(at_5=lambda: trainer.request_stop("SIGTERM")))
    with pytest.raises(RunStopped):
        trainer.train()
    assert trainer.state.global_step == 6


@pytest.mark.timeout(120)
def test_a_run_that_is_told_to_stop_in_its_last_step_says_so(trainer_of, services):
    trainer = trainer_of(max_steps=3)
    trainer.add_callback(AtStep(at_2=lambda: trainer.request_stop("SIGTERM")))
    with pytest.raises(RunStopped):
        trainer.train()
    assert (Path(trainer.args.output_dir) / "checkpoint-3").is_dir()


# Two ranks

LATE_S = 2.0
PARTS = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2, "rollout_lookahead": 0, "max_steps": 3,
         "optim": "sgd", "learning_rate": 1.0}  # fmt: skip
LAUNCH_LIMIT_S = 240


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_that_see_different_things_do_the_same(tiny, tmp_path):
    launcher = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    one, other = run_ranks(launcher, (__file__, tiny, tmp_path), tmp_path, LAUNCH_LIMIT_S, OMP_NUM_THREADS="1")
    for name in one:
        assert one[name]["error"] == other[name]["error"], name
        assert one[name]["steps"] == other[name]["steps"], name
        assert len({tuple(keys) for rank in (one, other) for keys in rank[name]["keys"]}) == 1, name
        assert one[name]["weights"] == other[name]["weights"], name
    # one rank's rewards all fail: half of all are scored
    assert one["too_few"]["error"] == "TooFewRewardsError"
    assert one["too_few"]["skipped"] == other["too_few"]["skipped"] == [1, 1, 1]
    assert one["enough"]["error"] is None
    assert one["enough"]["skipped"] == other["enough"]["skipped"] == [0] * 6
    assert one["enough"]["staleness"] == [0, 1, 2, 2, 2, 2]
    assert one["enough"]["quick"] == [{"broken": 4}]  # of eight completions, four on each rank
    # one rank is told to stop while both wait for rewards
    first, second = (rank["stopped"]["moments"] for rank in (one, other))
    assert one["stopped"]["error"] == "RunStopped"
    assert first["said"].startswith("stopped by SIGTERM of another process after 2 steps.")
    assert second["said"].startswith("stopped by SIGTERM after 2 steps.")
    check_seconds(first["cut_off"] - second["asked"], most=2.0, what="until the other rank waited no more")
    assert max(first["ended"], second["ended"]) - second["asked"] < HANGS_S / 4
    # what a rank waits for the rewards of another is such a wait too, not work of its own: the mean is above a half
    assert statistics.median(one["one_late"]["waited"]) > 0.6 * LATE_S
    # rank 0 has its first group last, rank 1 its last one
    for last, rank in ((0, one), (3, other)):
        parts, whole = rank["parts"], rank["whole"]
        for order in parts["order"]:
            assert sorted(order) == [0, 1, 2, 3]
            assert order[-1] == last  # and neither waits for what is late on the other
        assert sorted(parts["samples"]) == sorted(whole["samples"])
        assert max(Counter(parts["samples"]).values()) == 1
        for mine, theirs in zip(parts["gradients"], whole["gradients"], strict=True):
            mine, theirs = torch.tensor(mine), torch.tensor(theirs)
            assert theirs.norm() > 1e-4
            assert (mine - theirs).norm() <= 1e-4 * theirs.norm()  # a micro-batch too few is off by 1e-1
        for name in ("reward", "reward_std", "loss", "grad_norm", "completions/mean_length", "num_tokens"):
            assert parts["figures"][name] == pytest.approx(whole["figures"][name], rel=1e-5, abs=1e-6), name


class OfARank(ScriptedTrainer):
    """Writes other completions on each rank, and keeps what it trained on."""

    def __init__(self, *args, **kwargs):
        self.order, self.samples, self.gradients = {}, [], []
        super().__init__(*args, **kwargs)
        self.add_callback(_Gradients(self))
        self.waits, wait = False, self._pipeline.wait

        def noted(*args):
            self.waits = True
            try:
                wait(*args)
            finally:
                self.waits = False

        self._pipeline.wait = noted
        self.quick = []  # reasons that quick evaluations told, on the main process
        if self._quick_eval is not None:
            self._quick_eval._report = lambda evaluation, failed, is_kept: self.quick.append(dict(failed))

    @property
    def trained(self):
        """Micro-batches of the step under way."""
        return len(self.order.get(self.state.global_step, ()))

    def _compute_loss(self, model, inputs):
        texts = self._tokenizer.batch_decode(inputs["completion_ids"], skip_special_tokens=True)
        numbers = [number_of(text) for text in texts]
        self.samples.extend(numbers)
        self.order.setdefault(self.state.global_step, []).append(numbers[0] % 8 // 2)
        return super()._compute_loss(model, inputs)


class _Gradients(TrainerCallback):
    def __init__(self, trainer):
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        gradients = [each.grad.flatten() for each in model.parameters() if each.grad is not None]
        if gradients:  # none of a batch that is skipped
            self.trainer.gradients.append(torch.cat(gradients)[-20000:].tolist())


def number_of(text):
    return int(json.loads(text)["rewritten_query"].strip("n"))


def _two_ranks(policy, out):
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    rows = default_rows()

    async def fails(index, completion, stages):
        await asyncio.sleep(0)
        if rank == 1:
            return missing(Outcome.INFRA, "broken", {})
        return Reward(outcome=Outcome.OK, value=number_of(completion) * 37 % 101 / 100)

    async def soon(index, completion, stages):
        return Reward(outcome=Outcome.OK, value=number_of(completion) * 37 % 101 / 100)

    async def late(index, completion, stages):
        if number_of(completion) % 8 // 2 == (0, 3)[rank]:
            while trainer.trained < 3:
                await asyncio.sleep(0.01)
        return await soon(index, completion, stages)

    async def one_late(index, completion, stages):
        if rank == 0 and number_of(completion) % 8 // 2 == 0:
            while not trainer.waits:
                await asyncio.sleep(0.01)
            await asyncio.sleep(LATE_S)
        return await soon(index, completion, stages)

    async def hangs(index, completion, stages):
        if trainer.state.global_step:
            Path(out, f"waits{rank}").touch()
            await asyncio.sleep(HANGS_S)
        return await soon(index, completion, stages)

    def cut_off(moments, really, reason):
        moments["cut_off"] = time.monotonic()
        really(reason)

    def stop_one():
        """Once both ranks wait for rewards."""
        while not all(Path(out, f"waits{each}").exists() for each in range(2)):
            time.sleep(0.05)
        moments["asked"] = time.monotonic()  # one clock for all processes of a machine
        trainer.request_stop("SIGTERM")

    cases = {
        "too_few": (fails, {"rollout_lookahead": 2, "min_valid_reward_fraction": 0.6, "max_steps": 9}),
        "enough": (
            fails,
            {
                "rollout_lookahead": 2,
                "min_valid_reward_fraction": 0.4,
                "max_steps": 6,
                "quick_eval": QuickEvalSettings(steps=6, rows=8),
            },
        ),
        "parts": (late, PARTS),
        "whole": (soon, {**PARTS, "scored_groups_first": False}),
        "one_late": (one_late, PARTS),
        "stopped": (hangs, {"max_steps": 9}),
    }
    told = {}
    for name, (score, given) in cases.items():
        reward = build_reward("http://127.0.0.1:9", rows)
        reward.score = score
        given = {"beta": 0.0, "references_ahead": False, "ddp_backend": "gloo", **given}
        texts = TEXTS[200 * rank : 200 * rank + 200]
        trainer = build_trainer(policy, reward, texts, rows, Path(out, name), kind=OfARank, **given)
        error, moments = None, {}
        reward.cut_off = partial(cut_off, moments, reward.cut_off)
        if name == "stopped" and rank == 1:
            threading.Thread(target=stop_one, daemon=True).start()
        try:
            trainer.train()
        except (TooFewRewardsError, RunStopped) as raised:
            error, moments["said"] = type(raised).__name__, str(raised)
        steps = steps_of(trainer)
        names = ("reward", "reward_std", "loss", "grad_norm", "completions/mean_length", "num_tokens")
        weights = torch.cat([each.detach().flatten() for each in trainer.model.parameters()])
        told[name] = {
            "error": error,
            "steps": trainer.state.global_step,
            "keys": [sorted(entry) for entry in steps],
            "skipped": [entry[SKIPPED] for entry in steps],
            "staleness": [entry["rollout/staleness"] for entry in steps],
            "weights": weights.double().sum().item(),
            "waited": [entry[time_of(Phase.REWARD_WAIT)] for entry in steps],  # mean over ranks
            "quick": trainer.quick,
            "moments": {**moments, "ended": time.monotonic()},
            "order": list(trainer.order.values()),
            "samples": trainer.samples,
            "gradients": trainer.gradients if name in ("parts", "whole") else [],
            "figures": {each: [entry[each] for entry in steps] for each in names},
        }
        trainer.finish()
    Path(out, f"rank{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    _two_ranks(*sys.argv[1:])
