"""Rollouts ahead of the step that trains on them: how old they are, which prompts come when, and what is logged."""

import asyncio
import functools
import json
import re
import zlib
from collections import Counter
from dataclasses import replace

import pytest
import torch
from support.keyed import WORDS, SaveAt, judge, keyed_rows
from support.loopback import Services, action
from support.scripted import build_trainer, loopback_reward, steps_of
from transformers import AutoModelForCausalLM, TrainerCallback

from salesrl_trl.config.quick_evaluations import QuickEvalSettings
from salesrl_trl.errors import RunStopped
from salesrl_trl.judged.parsing import parse_action
from salesrl_trl.names import (
    EQUAL,
    REFILLED,
    REWARD_EXPOSED,
    REWARD_HIDDEN,
    STALENESS,
    STALENESS_MAX,
    Phase,
    time_of,
)
from salesrl_trl.trainer import SalesGRPOTrainer
from salesrl_trl.types import DEFAULT_BRANCHES, Reward

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-5


class Watched(SalesGRPOTrainer):
    """Keeps the weights and prompts of each launch in training, and what was trained on."""

    def __init__(self, *args, **kwargs):
        self.launches, self.micro_batches, self.weights_after = [], [], {}
        super().__init__(*args, **kwargs)
        self.add_callback(_Weights(self))
        self.components.reward.score = functools.partial(self._scored, self.components.reward.score)

    async def _scored(self, score, sample, stages):
        return await score(sample, stages)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self.model.training:
            self.launches.append({
                "step": self.state.global_step,
                "model": plain_copy(self.model),
                "prompts": self._tokenizer.batch_decode(prompt_ids, skip_special_tokens=True),
            })  # fmt: skip
        completions, logprobs = self._completions(prompt_ids, *args, **kwargs)
        if self.model.training:
            self.launches[-1]["completions"] = [tuple(ids) for ids in completions]
        return completions, logprobs

    def _completions(self, *args, **kwargs):
        return super()._generate_single_turn(*args, **kwargs)

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        if self.model.training:
            rows = zip(inputs["completion_ids"].tolist(), inputs["completion_mask"].sum(1).tolist(), strict=True)
            self.micro_batches.append({
                "step": self.state.global_step,
                "prompts": self._tokenizer.batch_decode(inputs["prompt_ids"], skip_special_tokens=True),
                "completions": [tuple(ids[:length]) for ids, length in rows],
                "inputs": inputs,
                "loss": loss.item(),
            })  # fmt: skip
        return loss

    def launch_of(self, batch):
        """The launch that a micro-batch's completions are of."""
        (index,) = {
            index
            for index, launch in enumerate(self.launches)
            if set(batch["completions"]) <= set(launch["completions"])
        }
        return index

    def trained_on(self):
        """Of every completion that was trained on: the step, the launch, and the prompt."""
        launch_of = {ids: index for index, launch in enumerate(self.launches) for ids in launch["completions"]}
        for batch in self.micro_batches:
            for prompt, ids in zip(batch["prompts"], batch["completions"], strict=True):
                yield batch["step"], launch_of[ids], prompt


class Scripted(Watched):
    """Every completion of training is another one; those of evaluations are all the same."""

    def _completions(self, prompt_ids, *args, **kwargs):
        launch = len(self.launches)
        texts = [
            action(query=f"l{launch}p{place} " + " ".join(WORDS[: 1 + (launch + 3 * place) % len(WORDS)]))
            if self.model.training
            else action(query="evaluation")
            for place in range(len(prompt_ids))
        ]
        return [[*self._tokenizer(text)["input_ids"], self._tokenizer.eos_token_id] for text in texts], None


class _Weights(TrainerCallback):
    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **_):
        self.trainer.weights_after[state.global_step] = vector(self.trainer.model)

    on_train_begin = on_step_end


def plain_copy(model):
    """The weights as they are, in a model whose forward nobody has replaced."""
    twin = AutoModelForCausalLM.from_config(model.config)
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def vector(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


@pytest.fixture
def services(httpserver):
    services = Services(httpserver)
    services.judge_by(judge)
    return services


@pytest.fixture
def trained(services, tiny, tmp_path):
    """Build and train."""
    built = []

    def run(kind=Scripted, rows=8, resume_from=None, save_at=(), **given):
        rows = keyed_rows(DEFAULT_BRANCHES * (rows // 2))
        given = {"beta": 0.0, "num_generations_eval": 1, "per_device_eval_batch_size": 4, **given}
        reward = loopback_reward(services, rows)
        trainer = build_trainer(tiny, reward, (), rows, tmp_path / f"run{len(built)}", kind, **given)
        built.append(trainer)
        trainer.add_callback(SaveAt(*save_at))
        torch.manual_seed(7)
        trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
        return trainer

    yield run
    for trainer in built:
        trainer.finish()


def assert_ages_are_as_logged(trainer, lookahead):
    """Of every rollout, by the weights themselves, at the step that first trains on it."""
    ages, seen = {}, set()
    for batch in trainer.micro_batches:
        index = trainer.launch_of(batch)
        if index in seen:
            continue
        seen.add(index)
        sampled = [
            step
            for step, weights in trainer.weights_after.items()
            if torch.equal(weights, vector(trainer.launches[index]["model"]))
        ]
        assert sampled == [trainer.launches[index]["step"]]
        ages.setdefault(batch["step"], []).append(batch["step"] - sampled[0])
    assert seen == set(range(len(trainer.launches)))  # nothing was generated that nobody trains on
    first = min(batch["step"] for batch in trainer.micro_batches) + 1
    for entry in steps_of(trainer)[first - 1 :]:
        told = ages.get(entry["step"] - 1)
        if told is None:
            assert entry.get(STALENESS) is None
            continue
        assert entry[STALENESS] == pytest.approx(sum(told) / len(told))
        assert entry[STALENESS_MAX] == max(told)
        assert max(told) <= lookahead
    return [max(each) for _, each in sorted(ages.items())]


ARRANGEMENTS = {
    "whole": ({"max_steps": 8}, 1),
    # three generation batches of two micro-batches an epoch: an update has two of them, and the epoch's last one
    "two_generations_an_update": ({"gradient_accumulation_steps": 4, "steps_per_generation": 2,
                                   "per_device_train_batch_size": 2, "rows": 6, "max_steps": 8}, 2),
    "iterations_over_updates": ({"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 3,
                                 "per_device_train_batch_size": 2, "max_steps": 9}, 6),
}  # fmt: skip


def prompts_by_generation_batch(trainer, micro_batches, first=0):
    """In order, the prompts of each generation batch's micro-batches, which TRL shuffles among themselves, from the
    trainer's micro-batch `first` on."""
    batches = trainer.micro_batches[first:]
    return [
        sorted(prompt for batch in batches[start : start + micro_batches] for prompt in batch["prompts"])
        for start in range(0, len(batches), micro_batches)
    ]


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_prompts_come_in_the_order_they_have_without_lookahead_also_after_any_checkpoint(trained, arrangement):
    """And rollouts are as old as is logged. A run goes on from inside a generation batch too, and with rollouts in
    flight: no prompt is lost or comes twice."""
    given, per_generation = ARRANGEMENTS[arrangement]
    runs = {
        ahead: trained(rollout_lookahead=ahead, save_at=(3, 5) if ahead == 2 else (), **given)
        for ahead in ((0, 2, 4) if arrangement == "whole" else (0, 2))
    }
    wanted = prompts_by_generation_batch(runs[0], per_generation)
    assert len(wanted) > 4
    for lookahead, trainer in runs.items():
        assert prompts_by_generation_batch(trainer, per_generation) == wanted, lookahead
        for mine, theirs in zip(trainer.micro_batches, runs[0].micro_batches, strict=True):
            assert (mine["step"], len(mine["prompts"])) == (theirs["step"], len(theirs["prompts"]))
        assert [entry["epoch"] for entry in steps_of(trainer)] == [entry["epoch"] for entry in steps_of(runs[0])]
        ages = assert_ages_are_as_logged(trainer, lookahead)
        if arrangement == "whole":
            assert ages == [min(step, lookahead) for step in range(8)]
            assert_figures_are_of_what_was_trained_on(trainer)
    whole = runs[2]
    steps = [batch["step"] for batch in whole.micro_batches]
    for step in (3, 5):  # an epoch's end is among them, and a place inside a batch where it has several updates
        checkpoint = f"{whole.args.output_dir}/checkpoint-{step}"
        second = trained(rollout_lookahead=2, **given, resume_from=checkpoint)
        assert [batch["step"] for batch in second.micro_batches] == [each for each in steps if each >= step]
        done = steps.index(step)
        rest = -done % per_generation  # micro-batches of the batch under way, which are the very same
        for mine, theirs in zip(second.micro_batches[:rest], whole.micro_batches[done:], strict=False):
            assert mine["completions"] == theirs["completions"], step
        ahead = prompts_by_generation_batch(second, per_generation, rest)
        assert ahead == prompts_by_generation_batch(whole, per_generation, done + rest), step
        if arrangement == "whole":  # it starts without a rollout at hand
            assert assert_ages_are_as_logged(second, 2) == [min(age, 2) for age in range(8 - step)]


def assert_figures_are_of_what_was_trained_on(trainer):
    """Under the same keys at every step."""
    logs, total = steps_of(trainer), 0
    assert [set(entry) for entry in logs] == [set(logs[0])] * 8
    for entry, batch in zip(logs, trainer.micro_batches, strict=True):
        lengths = [len(ids) for ids in batch["completions"]]
        assert entry["completions/mean_length"] == pytest.approx(sum(lengths) / len(lengths))
        assert (entry["completions/min_length"], entry["completions/max_length"]) == (min(lengths), max(lengths))
        texts = [trainer._tokenizer.decode(ids, skip_special_tokens=True) for ids in batch["completions"]]
        judged = [json.dumps(parse_action(text).as_dict(), ensure_ascii=False) for text in texts]
        rewards = [zlib.crc32(text.encode()) % 101 / 100 for text in judged]
        assert entry["reward"] == pytest.approx(sum(rewards) / len(rewards), rel=1e-4)
        total += sum(lengths) + batch["inputs"]["prompt_mask"].sum().item()
        assert entry["num_tokens"] == total


@pytest.mark.usefixtures("any_text_is_an_action")
def test_a_resumed_run_generates_what_the_one_without_a_stop_did(trained):
    given = {"max_steps": 6, "max_completion_length": 12}
    whole = trained(Watched, **given, save_at=(1, 4))
    for step in (1, 4):  # an epoch has four
        second = trained(Watched, **given, resume_from=f"{whole.args.output_dir}/checkpoint-{step}")
        wanted = [launch["completions"] for launch in whole.launches[step:]]
        assert [launch["completions"] for launch in second.launches] == wanted, step


def test_evaluations_in_between_change_nothing(trained):
    """`test_time_of_a_run.py` has this to the last bit, without lookahead."""
    given = {"rollout_lookahead": 2, "max_steps": 6, "optim": "sgd", "learning_rate": 1.0}
    without = trained(**given)
    trainer = trained(
        **given, eval_strategy="steps", eval_steps=2, quick_eval=QuickEvalSettings(steps=1, rows=4), eval_on_start=True
    )
    assert len([entry for entry in trainer.state.log_history if "eval_reward" in entry]) == 4
    assert [b["step"] for b in trainer.micro_batches] == [b["step"] for b in without.micro_batches]
    for mine, theirs in zip(steps_of(trainer), steps_of(without), strict=True):
        names = {
            name for name in theirs if not re.match(r"time/|perf/|memory/|step_time|services/|cache/|judge/", name)
        }
        for name in names:  # rows may be shuffled otherwise within a batch
            wanted = theirs[name]
            assert mine[name] == (wanted if wanted is None else pytest.approx(wanted, rel=1e-4, abs=1e-4)), name
    assert prompts_by_generation_batch(trainer, 1) == prompts_by_generation_batch(without, 1)
    assert ((vector(trainer.model) - vector(without.model)).norm() / vector(without.model).norm()) < TOLERANCE


@torch.no_grad()
def log_probs(model, inputs, temperature):
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    length = inputs["completion_ids"].shape[1]
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, inputs["completion_ids"][..., None])[..., 0]


class Slow(Scripted):
    """Every fifth group is scored some steps later than others."""

    async def _scored(self, score, sample, stages):
        launch, place = map(int, re.search(r"l(\d+)p(\d+)", sample.text).groups())
        number, began = 4 * launch + place // 2, max(launch - 3, 0)
        while number % 5 == 1 and self.state.global_step < min(began + 3 + number % 2, 10):
            await asyncio.sleep(0.01)
        return await score(sample, stages)


BY_GROUPS = {"rollout_lookahead": 2, "max_staleness": 5, "rows": 24, "per_device_train_batch_size": 8, "max_steps": 12}
"""Four prompts a step, six steps an epoch."""


@pytest.mark.parametrize("more", [{"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
                                  {"steps_per_generation": 2, "per_device_train_batch_size": 4, "max_steps": 24}],
                         ids=["accumulation", "two_updates_a_generation"])  # fmt: skip
def test_groups_that_are_in_are_trained_on_first_each_row_once_an_epoch_and_none_too_old(trained, more):
    trainer = trained(Slow, **{**BY_GROUPS, **more})
    updates, ages = more.get("steps_per_generation", 1), {}
    assert set(Counter(prompt for *_, prompt in trainer.trained_on()).values()) == {4}  # two in each epoch
    for step, launch, _ in trainer.trained_on():
        first = step - step % updates
        ages.setdefault(first, []).append(first - trainer.launches[launch]["step"])
    every = [age for own in ages.values() for age in own]
    if updates == 1:
        assert sum(every) == 8 * sum(min(step, 2) for step in range(12))  # as in order
    assert 2 < max(every) <= 5
    for step, own in ages.items():
        entry = steps_of(trainer)[step]
        assert (entry[STALENESS], entry[STALENESS_MAX]) == (pytest.approx(sum(own) / 8), max(own))
    moved = []
    for batch in trainer.micro_batches[::3]:  # ratios are to the policy that sampled each group
        for place, ids in enumerate(batch["completions"]):
            (launch,) = (launch for launch in trainer.launches if ids in launch["completions"])
            own = {name: batch["inputs"][name][place : place + 1] for name in (*PADDED, "old_per_token_logps")}
            mask, logps = own["completion_mask"].bool(), log_probs(launch["model"], own, trainer.temperature)
            torch.testing.assert_close(own["old_per_token_logps"][mask], logps[mask], rtol=1e-4, atol=1e-4)
            now = log_probs(trainer.model.eval(), own, trainer.temperature)
            moved.append(not torch.allclose(now[mask], logps[mask], atol=1e-2))
    assert sum(moved) > len(moved) / 2  # so that this could have been otherwise


PADDED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


@pytest.mark.parametrize("keeps", [True, False])
def test_a_run_whose_groups_go_by_themselves_goes_on_from_any_checkpoint_and_loses_no_row(trained, keeps):
    given = {**BY_GROUPS, "save_rollouts": keeps}
    whole = trained(Slow, **given, save_at=(5, 10))
    before = {ids for launch in whole.launches for ids in launch["completions"]}
    for step in (5, 10):
        done = [(launch, prompt) for at, launch, prompt in whole.trained_on() if at < step]
        second = trained(Scripted, **given, resume_from=f"{whole.args.output_dir}/checkpoint-{step}")
        assert {launch for launch, _ in done} > {*range(step)}  # some groups were not in, and others took their places
        prompts = Counter(prompt for _, prompt in done)
        for batch in second.micro_batches:
            prompts.update(batch["prompts"])
        assert set(prompts.values()) == {4}
        again = [ids for batch in second.micro_batches for ids in batch["completions"] if ids in before]
        launched = sum(len(launch["completions"]) for launch in second.launches)
        assert launched == 8 * (12 - step) - (8 * min(2, 12 - step) if keeps else 0)
        assert not keeps or len(again) >= 8 * min(2, 12 - step)


class Equal(Scripted):
    """One row of two, or of `teaches`, has rewards that differ."""

    teaches = 2

    async def _scored(self, score, sample, stages):
        if sample.row["row"] % self.teaches == 0:
            return await score(sample, stages)
        # functions whose numbers differ, and whose weighted sum does not: one may have no weight
        return replace(Reward.scored(0.5), by_function={"of no weight": float(sample.place)})

    def rows_trained_on(self):
        """The numbers of their rows by step."""
        rows = {}
        for batch in self.micro_batches:
            numbers = [int(re.search(r"Question (\d+)", prompt)[1]) for prompt in batch["prompts"]]
            rows.setdefault(batch["step"], []).extend(numbers)
        return rows


class AllEqual(Equal):
    teaches = 10**6


REFILL = {"refill_groups": 4, "rows": 24, "per_device_train_batch_size": 8, "max_steps": 12}


@pytest.mark.parametrize("more", [{"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2},
                                  {"rollout_lookahead": 2, "max_staleness": 5}])  # fmt: skip
def test_groups_of_equal_rewards_are_replaced_and_the_others_are_trained_on(trained, more):
    trainer = trained(Equal, **{**REFILL, **more})
    rows, lookahead = trainer.rows_trained_on(), more.get("rollout_lookahead", 0)
    assert [len(own) for own in rows.values()] == [8] * 12
    assert {row % 2 for own in rows.values() for row in own} == {0}
    of_the_first_epoch = Counter(row for step in range(6 + lookahead) for row in rows[step])
    assert {row for row, times in of_the_first_epoch.items() if times >= 2} == {*range(0, 24, 2)}
    ages = [trainer.launches[launch]["step"] - step for step, launch, _ in trainer.trained_on()]
    assert -max(lookahead, more.get("max_staleness", 0)) <= min(ages)
    assert [entry["frac_reward_zero_std"] for entry in steps_of(trainer)] == [0] * 12
    assert 0.2 < sum(entry[EQUAL] for entry in steps_of(trainer)) / 12 < 0.8
    generated = sum(len(launch["completions"]) for launch in trainer.launches)
    assert generated == 8 * 12 + 2 * sum(entry[REFILLED] for entry in steps_of(trainer))


def test_a_step_replaces_so_many_groups_and_no_more(trained):
    trainer = trained(AllEqual, **{**REFILL, "refill_groups": 1, "rollout_lookahead": 2, "max_steps": 6})
    entries = steps_of(trainer)
    assert min(entry[EQUAL] for entry in entries) > 0.7
    assert max(entry[REFILLED] for entry in entries) == 4
    assert [len(own) for own in trainer.rows_trained_on().values()] == [8] * 6


def test_a_step_has_waited_for_groups_too_that_turn_out_to_be_equal(trained):
    class SlowEqual(Equal):
        async def _scored(self, score, sample, stages):
            await asyncio.sleep(0.2 * (sample.row["row"] % 2))  # those that are equal
            return await super()._scored(score, sample, stages)

    entries = steps_of(trained(SlowEqual, **{**REFILL, "max_steps": 3}))
    for entry in entries:
        assert entry[REWARD_EXPOSED] == pytest.approx(entry[time_of(Phase.REWARD_WAIT)], abs=0.1)
        assert entry[REWARD_HIDDEN] >= 0
    assert sum(entry[REWARD_EXPOSED] for entry in entries) > 0.15  # a busy machine hides more


def test_a_group_with_a_failed_completion_is_not_replaced(trained):
    class Failing(Equal):
        async def _scored(self, score, sample, stages):
            return Reward.scored(0.5) if sample.place % 2 else Reward.missing("busy")

    trainer = trained(Failing, **{**REFILL, "max_steps": 3}, min_valid_reward_fraction=0.4)
    assert [(entry[REFILLED], entry[EQUAL]) for entry in steps_of(trainer)] == [(0, 0)] * 3


def test_a_step_that_is_told_to_stop_generates_none_in_place_of_equal_groups(trained):
    class Stopped(AllEqual):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            built.append(self)

        async def _scored(self, score, sample, stages):
            if self.state.global_step == 2 and sample.place >= 4:
                self.request_stop("SIGTERM")
                await asyncio.sleep(60)
            return await super()._scored(score, sample, stages)

    built = []
    with pytest.raises(RunStopped):
        trained(Stopped, **{**REFILL, "refill_groups": 1})
    assert [launch["step"] for launch in built[0].launches] == [0, 0, 1, 1, 2]


def test_a_run_that_replaces_groups_goes_on_from_a_checkpoint_and_loses_no_row(trained):
    given = {**REFILL, "rollout_lookahead": 2, "save_rollouts": True, "max_steps": 8}
    whole = trained(Equal, **given, save_at=(5,))
    second = trained(Equal, **given, resume_from=f"{whole.args.output_dir}/checkpoint-5")
    rows = whole.rows_trained_on()
    rows = {**{at: rows[at] for at in range(5)}, **second.rows_trained_on()}
    assert {row % 2 for own in rows.values() for row in own} == {0}
    assert {row for own in rows.values() for row in own} == {*range(0, 24, 2)}
