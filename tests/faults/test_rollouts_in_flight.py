"""Services that fail, and a run that is told to stop, while rollouts are ahead."""

import asyncio
import gc
import itertools
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from support.keyed import make_calling_policy
from support.loopback import ANSWER, Services, action, build_reward
from support.scripted import ScriptedTrainer, build_trainer, default_rows, steps_of
from support.seconds import until
from transformers import TrainerCallback

from salesrl_trl.errors import RunStopped
from salesrl_trl.names import STALENESS

TEXTS = tuple(action(query=f"n{number}n") for number in range(400))
"""Actions that no cache answers."""
HANGS_S = 60.0
CALL = '<tool_call>\n{"name": "look", "arguments": {"word": "up"}}\n</tool_call>'
SKIPPED = "failures/skipped_update"


class Hanging(Services):
    """Services whose judge hangs from `hangs.set()` until `let_go.set()`."""

    def __init__(self, server):
        super().__init__(server)
        self.hangs = threading.Event()
        self.asked_to_hang = threading.Event()
        self.let_go = threading.Event()
        self.tools_hang = threading.Event()

    async def look(self, word: str) -> str:
        """Looks a word up.

        Args:
            word: The word.

        Returns:
            What was found.
        """
        if self.tools_hang.is_set():
            self.asked_to_hang.set()
            await asyncio.sleep(HANGS_S)
        return "found"

    def _respond(self, name, request):
        if name == "judge" and self.hangs.is_set():
            self.asked_to_hang.set()
            self.let_go.wait(HANGS_S)
        return super()._respond(name, request)


class Conversing(ScriptedTrainer):
    """Every completion calls a tool first."""

    def _generate_single_turn(self, prompt_ids, images, fields, group, *args, **kwargs):
        if self._made.tokens is not None:
            return self._made.tokens(prompt_ids, group)
        ids, _ = super()._generate_single_turn(prompt_ids)
        for place, prompt in enumerate(self._tokenizer.batch_decode(prompt_ids)):
            if "<tool_response>" not in prompt:
                ids[place] = [*self._tokenizer(CALL)["input_ids"], self._tokenizer.eos_token_id]
        return ids, None


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
def services(httpserver):
    services = Hanging(httpserver)
    yield services
    services.let_go.set()


@pytest.fixture
def trainer_of(tiny, services, tmp_path):
    built = []

    def build(out="run", **given):
        rows, policy = default_rows(), tiny
        if given.pop("converses", False):
            policy = make_calling_policy(tmp_path / "caller", max_position_embeddings=4096)
            own = {"kind": Conversing, "tools": [services.look], "max_completion_length": 512}
            given = {**own, **given}
        reward = build_reward(services.url, rows, invalid_action_reward=0.0, deadline_s=90.0, timeout_s=90.0)
        defaults = {"beta": 0.0, "rollout_lookahead": 2, "max_steps": 12}
        built.append(build_trainer(policy, reward, TEXTS, rows, tmp_path / out, **{**defaults, **given}))
        return built[-1]

    services.judge_by(lambda system, user: {"candidate": len(user) * 7 % 100 / 100 if "n1" in user else 0.2,
                                            "reference": 0.5, "reason": "fine"})  # fmt: skip
    yield build
    services.let_go.set()
    for trainer in built:
        trainer.finish()  # may have been before


def pending(trainer):
    """Tasks on the loop of the rewards. A loop that is closed has none."""
    if trainer.components.reward_loop._batches.loop.is_closed():
        return []

    async def under_way():
        await asyncio.sleep(0.1)  # what was cancelled ends
        return [str(task) for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    return asyncio.run_coroutine_threadsafe(under_way(), trainer.components.reward_loop._batches.loop).result(10)


def pending_rewards(trainer):
    return [task for task in pending(trainer) if any(name in task for name in ("_score", "wait_for", "_run_async"))]


def conversations_end():
    """Conversations that were given up end in a moment, and so do their threads."""
    until(lambda: not any(each.name == "conversation" for each in threading.enumerate()))


def assert_nothing_is_left(trainer, caplog):
    """No task of a reward is left when training has ended. Calls go on for the cache; none is left when the trainer is
    finished."""
    assert pending_rewards(trainer) == []
    assert trainer.components.reward_loop._open == {}
    trainer.finish()
    assert pending(trainer) == []
    gc.collect()
    for complaint in ("was destroyed but it is pending", "never retrieved"):
        assert complaint not in caplog.text


@pytest.mark.timeout(120)
def test_a_service_that_dies_under_rollouts_and_comes_back_costs_the_steps_that_it_was_away(
    trainer_of, services, caplog, monkeypatch
):
    monkeypatch.setattr("salesrl_trl.service.breaker.MAX_COOLDOWN_S", 0.3)

    def comes_back():
        services.set("8b", ANSWER)
        time.sleep(0.5)  # longer than the breaker pauses before it probes the service

    trainer = trainer_of(max_skipped_generations=8)
    steps = AtStep(at_3=lambda: services.set("8b", {}, status=503), at_6=comes_back)
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


BY_GROUPS = {"max_staleness": 4}
IN_PARTS = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}
CONVERSES = {"converses": True}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("given", "lookahead"),
    [(BY_GROUPS, 2), (IN_PARTS, 2), ({"gradient_accumulation_steps": 2, "num_iterations": 2}, 0), (CONVERSES, 2)],
    ids=["by_groups, ahead", "parts, ahead", "two_iterations", "tools, ahead"],
)  # fmt: skip
def test_a_run_that_is_told_to_stop_while_rewards_or_tools_hang_stops_with_a_checkpoint_to_go_on_from(
    trainer_of, services, caplog, given, lookahead
):
    given = {"rollout_lookahead": lookahead, "max_steps": 5, **given}
    trainer = trainer_of(**given)
    hangs = services.tools_hang if given.get("converses") else services.hangs
    trainer.add_callback(AtStep(at_2=hangs.set))
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
    assert 2 <= done <= 5  # a step whose rewards were given up is undone
    checkpoint = Path(trainer.args.output_dir) / f"checkpoint-{done}"
    assert (checkpoint / "model.safetensors").is_file()
    assert_nothing_is_left(trainer, caplog)
    conversations_end()
    hangs.clear()
    services.let_go.set()
    if done < 5:
        second = trainer_of(**given, out="second")
        second.train(resume_from_checkpoint=str(checkpoint))
        assert second.state.global_step == 5
        skipped = [entry[SKIPPED] for entry in steps_of(second) if entry["step"] > done]
        assert skipped[0] == 0
        assert set(skipped) <= {0, None}  # none, where an update has no generation batch of its own


WINDOWS = {"steps_per_generation": 2, "per_device_train_batch_size": 2}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("given", "per_batch"),
    [(IN_PARTS, 4), (WINDOWS, 2), (CONVERSES, 1)],
    ids=["while_rewards_hang", "inside_a_generation_batch", "while_tools_hang"],
)
def test_a_run_begun_again_after_an_interrupt_goes_the_way_of_a_fresh_one(
    trainer_of, services, caplog, given, per_batch
):
    """This happens in a notebook, where a trainer outlives Ctrl-C."""
    fresh, again = (trainer_of(**given, max_steps=4, out=out) for out in ("fresh", "again"))
    prompts = {trainer: noted_prompts(trainer) for trainer in (fresh, again)}
    fresh.train()

    def interrupt():
        if given is not WINDOWS:
            assert services.asked_to_hang.wait(60)
            time.sleep(0.3)  # so that it is the trainer that waits
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    hangs = services.tools_hang if given is CONVERSES else services.hangs
    again.add_callback(AtStep(at_1=interrupter.start if given is WINDOWS else hangs.set))
    if given is not WINDOWS:
        interrupter.start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            again.train()
    finally:
        signal.signal(signal.SIGINT, before)
    interrupter.join()
    assert pending_rewards(again) == []
    assert again.components.reward_loop._open == {}
    conversations_end()
    hangs.clear()
    services.let_go.set()
    prompts[again].clear()
    again.train()
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
    """A list that gets the prompts of every micro-batch of the training."""
    noted, loss = [], trainer._compute_loss

    def compute(model, inputs):
        noted.append(trainer._tokenizer.batch_decode(inputs["prompt_ids"], skip_special_tokens=True))
        return loss(model, inputs)

    trainer._compute_loss = compute
    return noted
