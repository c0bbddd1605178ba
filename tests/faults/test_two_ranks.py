"""Two ranks that see different things, while rollouts are ahead.

As a program it is one of them: it trains once for each case and writes what it noted.
"""

import asyncio
import contextlib
import json
import os
import statistics
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from support.loopback import action, build_reward
from support.ranks import of_one_machine, run_ranks
from support.scripted import Gradients, ScriptedTrainer, build_trainer, default_rows, steps_of
from support.seconds import check_seconds

from salesrl_trl.config.quick_evaluations import QuickEvalSettings
from salesrl_trl.errors import RunStopped, TooFewRewardsError
from salesrl_trl.launch.evaluation.quick import QuickEvalPart
from salesrl_trl.names import REFILLED, STALENESS, STALENESS_MAX, Phase, time_of
from salesrl_trl.reward.functions import per_completion, reward_of
from salesrl_trl.reward.mixed import MixedReward
from salesrl_trl.types import Answer, Outcome, Reward, missing

LAUNCH_LIMIT_S = 240
HANGS_S = 60.0
LATE_S = 1.0
DEADLINE_S = 2.0
SKIPPED, INFRA = "failures/skipped_update", "outcome/infra"
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
        self.order, self.samples = {}, []
        super().__init__(*args, **kwargs)
        self.gradients = Gradients(self).found
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
            while trainer.trained < 3:
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
        weights = torch.cat([each.detach().flatten() for each in trainer.model.parameters()])
        report[name] = {
            "error": error,
            "steps": trainer.state.global_step,
            "log": steps_of(trainer),
            "reasons": sorted({each.reason for batch in batches for each in batch.rewards if each is not None}),
            "weights": weights.double().sum().item(),
            "quick": trainer.quick,
            "moments": {**moments, "ended": time.monotonic()},
            "order": list(trainer.order.values()),
            "samples": trainer.samples,
            "generated": trainer.generated,
            "gradients": [each[-20000:].tolist() for each in trainer.gradients if name in ("parts", "whole")],
        }
        trainer.finish()
    Path(out, f"rank{rank}.json").write_text(json.dumps(report))


def logged(rank, case, name):
    return [entry[name] for entry in rank[case]["log"]]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_that_see_different_things_do_the_same(tiny, tmp_path):
    arguments = (__file__, tiny, tmp_path)
    one, other = run_ranks(of_one_machine(), arguments, tmp_path, LAUNCH_LIMIT_S, OMP_NUM_THREADS="1")
    for name in one:
        assert one[name]["error"] == other[name]["error"], name
        assert one[name]["steps"] == other[name]["steps"], name
        assert len({frozenset(entry) for rank in (one, other) for entry in rank[name]["log"]}) == 1, name
        assert one[name]["weights"] == other[name]["weights"], name
    # one rank's rewards all fail: half of all are scored
    assert one["too_few"]["error"] == "TooFewRewardsError"
    assert logged(one, "too_few", SKIPPED) == logged(other, "too_few", SKIPPED) == [1, 1, 1]
    assert (tmp_path / "too_few" / f"checkpoint-{one['too_few']['steps']}" / "model.safetensors").is_file()
    # one of four is scored on rank 1
    assert one["enough"]["error"] is None
    assert logged(one, "enough", SKIPPED) == logged(other, "enough", SKIPPED) == [0] * 6
    assert logged(one, "enough", STALENESS) == [0, 1, 2, 2, 2, 2]
    assert one["enough"]["quick"] == [{"broken": 3}]  # of eight completions, four on each rank
    # each rank trains on those of its own groups that are in, and both wait for each other's
    groups = [rank["by_groups"] for rank in (one, other)]
    waited, batching = (logged(one, "by_groups", time_of(phase)) for phase in (Phase.REWARD_WAIT, Phase.BATCHING))
    assert max(waited) > 2 * max(batching[1:])  # means over ranks: one's rewards came late
    assert logged(one, "by_groups", STALENESS) == logged(other, "by_groups", STALENESS)
    assert sum(logged(one, "by_groups", STALENESS)) == pytest.approx(sum(min(step, 2) for step in range(10)))
    assert 2 < max(logged(one, "by_groups", STALENESS_MAX)) <= 5
    for rank, own in enumerate(groups):
        assert sorted(own["samples"]) == [200 * rank + number for number in range(80)]
        assert own["samples"] != sorted(own["samples"])
    assert groups[0]["order"] != groups[1]["order"]
    # what one rank replaces, the other generates too: all that they train on teaches
    for name in ("refilled", "refilled_at_once"):
        assert logged(one, name, EQUAL_TRAINED) == [0.0] * 6
        assert sum(logged(one, name, REFILLED)) > 0
    # where all groups in flight of one rank were equal, a run goes on with those of the other, and both generate alike
    for name, again in (("saved", 0), ("saved_rows", 16)):
        went_on = [rank["went_on" + name.removeprefix("saved").replace("_", "_with_")] for rank in (one, other)]
        assert went_on[0]["generated"] == went_on[1]["generated"] < one[name]["generated"] - 16 + again, name
        assert [len(own["samples"]) for own in went_on] == [8 * 4] * 2
    assert (tmp_path / "stderr0.txt").read_text().count("resuming with 2 rollouts in flight") == 2
    # of two functions one applies to half of each group on rank 1: that half counts for nothing, on both
    assert logged(one, "functions", INFRA) == logged(other, "functions", INFRA) == [0.25, 0.25]
    assert (one["functions"]["reasons"], other["functions"]["reasons"]) == ([""], [""])  # told apart later, by group
    assert {"of_rank_0", "rewards/numbered/part", "rewards/partly/mean"} <= set(other["functions"]["log"][0])
    # one rank is told to stop while both wait for rewards
    first, second = (rank["stopped"]["moments"] for rank in (one, other))
    assert one["stopped"]["error"] == "RunStopped"
    # the step whose rewards both gave up is undone
    assert first["said"].startswith("stopped by SIGTERM of another process after 1 steps.")
    assert second["said"].startswith("stopped by SIGTERM after 1 steps.")
    check_seconds(first["cut_off"] - second["asked"], most=2.0, what="until the other rank waited no more")
    assert max(first["ended"], second["ended"]) - second["asked"] < HANGS_S / 4
    # the backend raises on one rank; on the other it hangs and goes on when it is cancelled
    raised, hung = (rank["raised_and_hung"] for rank in (one, other))
    assert (raised["reasons"], hung["reasons"]) == (["raised_ValueError"], ["deadline"])
    for entry in (*raised["log"], *hung["log"]):
        assert (entry[INFRA], entry["reward"]) == (1.0, None)  # the other rank's are counted too
    grace_s = 1.0  # of a call that is cancelled
    seconds = [entry["step_time"] for entry in (*raised["log"], *hung["log"])]
    check_seconds(max(seconds), least=DEADLINE_S, most=DEADLINE_S + grace_s + 1.5)
    stderr = (tmp_path / "stderr0.txt").read_text()
    assert "raised ValueError at" in stderr
    assert "a customer's words" not in stderr
    # what a rank waits for the rewards of another is such a wait too, not work of its own: the mean is above a half
    assert statistics.median(logged(one, "one_late", time_of(Phase.REWARD_WAIT))) > 0.6 * LATE_S
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
            assert logged(rank, "parts", name) == pytest.approx(logged(rank, "whole", name), rel=1e-5, abs=1e-6), name


if __name__ == "__main__":
    main(*sys.argv[1:])
