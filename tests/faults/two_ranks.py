"""One of two ranks that see different things. It trains once for each case and writes what it noted."""

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path

import torch
from support.loopback import action, build_reward
from support.scripted import Gradients, ScriptedTrainer, build_trainer, default_rows, steps_of
from transformers import TrainerCallback

from salesrl_trl.config.quick_evaluations import QuickEvalSettings
from salesrl_trl.errors import RunStopped, TooFewRewardsError
from salesrl_trl.launch.evaluation.quick import QuickEvalPart
from salesrl_trl.names import REFILLED, Phase, time_of
from salesrl_trl.reward.functions import per_completion, reward_of
from salesrl_trl.reward.mixed import MixedReward
from salesrl_trl.types import Answer, Outcome, Reward, missing

HANGS_S = 60.0
LATE_S = 1.0
DEADLINE_S = 2.0
SKIPPED = "failures/skipped_update"
TEXTS = tuple(action(query=f"n{number}n") for number in range(400))
"""Actions that no cache answers."""
REFILL = {"refill_groups": 4, "max_steps": 6, "per_device_train_batch_size": 8}
SAVED = {**REFILL, "refill_groups": 1, "rollout_lookahead": 2, "save_strategy": "steps", "save_steps": 2}
EQUAL_TRAINED = "frac_reward_zero_std"
PARTS = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2, "rollout_lookahead": 0, "max_steps": 3,
         "optim": "sgd", "learning_rate": 1.0}  # fmt: skip


async def raises(*_, **__):
    """A backend with a fault in its code."""
    raise ValueError("a customer's words")


async def hangs_for_ever(*_, **__):
    """A backend that never answers, and goes on when it is cancelled."""
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(HANGS_S)


async def reference(*_, **__):
    return Answer(text="reference", passages=(), took_ms=0.0)


class OfARank(ScriptedTrainer):
    """Writes other completions on each rank, and keeps what it trained on."""

    def __init__(self, *args, **kwargs):
        self.order, self.samples, self.seconds = {}, [], []
        super().__init__(*args, **kwargs)
        self.add_callback(_Noted(self))
        self.gradients = Gradients(self).found
        self.waits, wait = False, self.components.reward_loop.wait

        def noted(*args):
            self.waits = True
            try:
                wait(*args)
            finally:
                self.waits = False

        self.components.reward_loop.wait = noted
        self.quick = []  # reasons in quick evaluations, on the main process
        for part in self.components.parts:
            if isinstance(part, QuickEvalPart):
                part._report = lambda evaluation, failed, is_kept: self.quick.append(dict(failed))

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


class _Noted(TrainerCallback):
    """The seconds of each step."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_begin(self, args, state, control, **_):
        self.began = time.monotonic()

    def on_step_end(self, args, state, control, **_):
        self.trainer.seconds.append(time.monotonic() - self.began)


def number_of(text):
    return int(json.loads(text)["rewritten_query"].strip("n"))


def main(policy, out):
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    rows = default_rows()

    async def fails(sample, stages):
        await asyncio.sleep(0)
        if rank == 1:
            return missing(Outcome.INFRA, "broken")
        return Reward(outcome=Outcome.OK, value=number_of(sample.text) * 37 % 101 / 100)

    async def mostly_fails(sample, stages):
        return await (soon if number_of(sample.text) % 4 == 0 else fails)(sample, stages)

    async def soon(sample, stages):
        return Reward(outcome=Outcome.OK, value=number_of(sample.text) * 37 % 101 / 100)

    async def late(sample, stages):
        if number_of(sample.text) % 8 // 2 == (0, 3)[rank]:
            while trainer.trained < 3:
                await asyncio.sleep(0.01)
        return await soon(sample, stages)

    async def now_and_then_late(sample, stages):
        """Some groups are in steps later than others, which ones differs from rank to rank."""
        began, group = trainer.state.global_step, number_of(sample.text) // 2
        while group % 5 == 1 + rank and trainer.state.global_step < min(began + 3, 8):
            await asyncio.sleep(0.01)
        await asyncio.sleep(LATE_S * (rank == began == 1))
        return await soon(sample, stages)

    async def mostly_equal(sample, stages):
        """Half of the groups on one rank, three of four on the other."""
        group = number_of(sample.text) // 2
        return await soon(sample, stages) if group % (2, 4)[rank] == 0 else Reward.scored(0.5)

    async def all_equal_on_one(sample, stages):
        """So that this rank has none left in flight, and the other all of its own."""
        return Reward.scored(0.5) if rank == 0 and trainer.state.global_step < 4 else await soon(sample, stages)

    async def one_late(sample, stages):
        if rank == 0 and number_of(sample.text) % 8 // 2 == 0:
            while not trainer.waits:
                await asyncio.sleep(0.01)
            await asyncio.sleep(LATE_S)
        return await soon(sample, stages)

    async def hangs(sample, stages):
        if trainer.state.global_step:
            Path(out, f"waits{rank}").touch()
            await asyncio.sleep(HANGS_S)
        return await soon(sample, stages)

    def cut_off(moments, really, reason):
        moments["cut_off"] = time.monotonic()
        really(reason)

    def kept(batches, begin, *given, **more):
        batches.append(begin(*given, **more))
        return batches[-1]

    def partly(completions, log_metric, **_):
        """Applies to all completions of rank 0, and on rank 1 to the second half of each group."""
        if rank == 0:
            log_metric("of_rank_0", 1.0)
        return [None if rank == 1 and place % 2 == 0 else 1.0 for place in range(len(completions))]

    @per_completion
    async def numbered(completion):
        return Reward.scored(number_of(completion[0]["content"]) * 37 % 101 / 100, **({"part": 0.5} if rank else {}))

    def stop_one():
        """Once both ranks wait for rewards."""
        while not all(Path(out, f"waits{each}").exists() for each in range(2)):
            time.sleep(0.05)
        moments["asked"] = time.monotonic()  # one clock for all processes of a machine
        trainer.request_stop("SIGTERM")

    cases = {
        "too_few": (fails, {"rollout_lookahead": 2, "min_valid_reward_fraction": 0.6, "max_steps": 9}),
        "enough": (
            mostly_fails,
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
        "by_groups": (
            now_and_then_late,
            {"rollout_lookahead": 2, "max_staleness": 5, "max_steps": 10, "per_device_train_batch_size": 8},
        ),
        "refilled": (mostly_equal, {**REFILL, "rollout_lookahead": 2}),
        "refilled_at_once": (mostly_equal, REFILL),
        "saved": (all_equal_on_one, {**SAVED, "save_rollouts": True}),
        "went_on": (all_equal_on_one, {**SAVED, "save_rollouts": True, "go_on_from": "saved"}),
        "saved_rows": (all_equal_on_one, SAVED),
        "went_on_with_rows": (all_equal_on_one, {**SAVED, "go_on_from": "saved_rows"}),
        "raised_and_hung": (None, {"max_steps": 2, "min_valid_reward_fraction": 0.0}),
        "functions": ([numbered, partly], {"max_steps": 2}),
        "stopped": (hangs, {"max_steps": 9}),
    }
    report = {}
    for name, (score, given) in cases.items():
        deadline_s = DEADLINE_S if name == "raised_and_hung" else 60.0
        reward = build_reward("http://127.0.0.1:9", rows, deadline_s=deadline_s)
        if isinstance(score, list):
            reward = MixedReward([reward_of(each) for each in score], [1.0] * len(score))
        elif score is None:
            reward._rag.chat_8b, reward._rag.chat = (raises, hangs_for_ever)[rank], reference
        else:
            reward.score = score
        given = {"beta": 0.0, "ddp_backend": "gloo", **given}
        before = given.pop("go_on_from", None)
        texts = TEXTS[200 * rank : 200 * rank + 200]
        trainer = build_trainer(policy, reward, texts, rows, Path(out, name), kind=OfARank, **given)
        error, moments = None, {}
        loop = trainer.components.reward_loop
        loop.cut_off = partial(cut_off, moments, loop.cut_off)
        loop.begin = partial(kept, batches := [], loop.begin)
        if name == "stopped" and rank == 1:
            threading.Thread(target=stop_one, daemon=True).start()
        try:
            trainer.train(None if before is None else str(Path(out, before, "checkpoint-2")))
        except (TooFewRewardsError, RunStopped) as raised:
            error, moments["said"] = type(raised).__name__, str(raised)
        steps = steps_of(trainer)
        names = (EQUAL_TRAINED, "reward", "reward_std", "loss", "grad_norm", "completions/mean_length", "num_tokens")
        weights = torch.cat([each.detach().flatten() for each in trainer.model.parameters()])
        report[name] = {
            "error": error,
            "steps": trainer.state.global_step,
            "keys": [sorted(entry) for entry in steps],
            "seconds": trainer.seconds,
            "reasons": sorted({each.reason for batch in batches for each in batch.rewards if each is not None}),
            "infra": [entry["outcome/infra"] for entry in steps],
            "rewards": [entry["reward"] for entry in steps],
            "skipped": [entry[SKIPPED] for entry in steps],
            "staleness": [entry["rollout/staleness"] for entry in steps],
            "oldest": [entry["rollout/staleness_max"] for entry in steps],
            "batching": [entry[time_of(Phase.BATCHING)] for entry in steps],
            "weights": weights.double().sum().item(),
            "waited": [entry[time_of(Phase.REWARD_WAIT)] for entry in steps],  # mean over ranks
            "quick": trainer.quick,
            "moments": {**moments, "ended": time.monotonic()},
            "order": list(trainer.order.values()),
            "samples": trainer.samples,
            "generated": trainer.generated,
            "gradients": [each[-20000:].tolist() for each in trainer.gradients if name in ("parts", "whole")],
            "refilled": [entry.get(REFILLED) for entry in steps],
            "figures": {each: [entry[each] for entry in steps] for each in names},
        }
        trainer.finish()
    Path(out, f"rank{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
