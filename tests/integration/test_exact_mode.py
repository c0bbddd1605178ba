"""Without lookahead a run is stock TRL's: the same completions, rewards, advantages, losses, gradients and weights, to
the last bit; and but for rounding where micro-batches are trained on in another order.

Run as a program it compares both trainers around one vLLM engine, which a test here starts in a process of its own:

    python tests/integration/test_exact_mode.py POLICY OUT
"""

import asyncio
import functools
import gc
import json
import re
import sys
import threading
import time
import zlib
from collections import Counter
from pathlib import Path

import pytest
import torch
from pytest_httpserver import HTTPServer
from support.forked import done_on_vllm
from support.keyed import WORDS, judge, keyed_rows, make_tiny_policy
from support.loopback import BAD, Services, action, any_action, build_reward
from support.scripted import Gradients, Scripted, settings, steps_of
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.ground.fencing import read_sections
from salesrl_trl.launch.data.sources import build_dataset
from salesrl_trl.trainer import SalesGRPOTrainer
from salesrl_trl.types import DEFAULT_BRANCHES

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-5
"""Relative to the norm, or of a figure: sums in another order, in float32."""
GATE_S = 4.0
"""What a verdict that is held back waits at most. Only where the code is broken it waits so long."""
TIMES = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")


def text_of(number):
    """A numbered action, one in eight of them none, no two equal, of different lengths."""
    words = " ".join(WORDS[: 1 + zlib.crc32(f"{number}".encode()) % len(WORDS)])
    return f"{BAD} {number} {words}" if number % 8 == 5 else action(query=f"{words} n{number}n")


def number_of(text):
    return int(re.search(r"n(\d+)n|hello (\d+)", text).group(0).strip("n").removeprefix("hello "))


TEXTS = tuple(text_of(number) for number in range(256))


class GatedServices(Services):
    """Services whose verdict on an action may be held back: `hold` is called with its text, beside other requests."""

    def __init__(self, server):
        super().__init__(server)
        self.hold = lambda text: None
        self.first_asked = {}
        self.judge_by(judge)

    def _respond(self, name, request):
        self.first_asked.setdefault(name, time.monotonic())
        if name == "judge":
            self.hold(read_sections(request.json["messages"][1]["content"])["action"])
        return super()._respond(name, request)


class Recorded:
    """Keeps what a trainer has generated, scored and trained on."""

    def __init__(self, *args, **kwargs):
        self.generations, self.micro_batches = [], []
        super().__init__(*args, **kwargs)
        self.gradients = Gradients(self).found

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.generations.append({name: value.clone() for name, value in output.items() if torch.is_tensor(value)})
        return output

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        ids = inputs["completion_ids"]
        self.micro_batches.append({
            "step": self.state.global_step,
            "texts": self._tokenizer.batch_decode(ids, skip_special_tokens=True),
            "prompts": self._tokenizer.batch_decode(inputs["prompt_ids"], skip_special_tokens=True),
            "advantages": inputs["advantages"].tolist(),
            "loss": loss.item(),
        })  # fmt: skip
        return loss


class Ours(Recorded, SalesGRPOTrainer):
    """Generates by itself."""


class Stock(Recorded, GRPOTrainer):
    """Generates by itself."""


class ScriptedOurs(Recorded, Scripted, SalesGRPOTrainer):
    """Writes `TEXTS`."""


class ScriptedStock(Recorded, Scripted, GRPOTrainer):
    """Writes `TEXTS`."""


def build(kind, policy, url, output_dir, rows=8, **given):
    """A trainer of any kind with the same settings, the same reward and the same weights."""
    is_ours = issubclass(kind, SalesGRPOTrainer)
    rows = keyed_rows(DEFAULT_BRANCHES * (rows // 2))
    defaults = {"beta": 0.0, "per_device_train_batch_size": 4, "max_steps": 4, "learning_rate": 1e-2}
    if is_ours:
        defaults |= {"held_out_eval": False, "scored_groups_first": False, "kl_log_ratio_clamp": 0.0}
        defaults |= {"shared_prompts": "off"}  # to the last bit
    else:
        for name in ("scored_groups_first", "rollout_lookahead", "vllm_engine_kwargs"):
            given.pop(name, None)
    trainer = kind(
        AutoModelForCausalLM.from_pretrained(policy),
        build_reward(url, rows, invalid_action_reward=0.0, deadline_s=60.0, timeout_s=60.0),
        (SalesGRPOConfig if is_ours else GRPOConfig)(**settings(output_dir, **{**defaults, **given})),
        train_dataset=build_dataset(rows, "compact"),
        eval_dataset=build_dataset(rows, "compact"),
        processing_class=AutoTokenizer.from_pretrained(policy),
    )
    trainer.texts = TEXTS
    return trainer


def finish(trainer):
    """Close what the reward has open; TRL's trainer has no such end."""
    if isinstance(trainer, SalesGRPOTrainer):
        trainer.finish()
    else:
        asyncio.run_coroutine_threadsafe(trainer.reward_funcs[0].aclose(), trainer.async_loop).result()


def assert_the_same_figures(ours, stock, tolerance=0.0, among=None):
    """Everything that TRL logs at each step, at the same step, but for times."""
    assert len(steps_of(ours)) == len(steps_of(stock))
    for mine, theirs in zip(steps_of(ours), steps_of(stock), strict=True):
        names = set(theirs) - set(TIMES)
        assert names <= set(mine)
        for name in sorted(names if among is None else {each for each in names if each.startswith(among)}):
            if tolerance and theirs[name] is not None:
                wanted = pytest.approx(theirs[name], rel=tolerance, abs=tolerance)
            else:
                wanted = theirs[name]
            assert mine[name] == wanted, (mine["step"], name)


def assert_identical(ours, stock):
    """To the last bit."""
    assert len(ours.generations) == len(stock.generations) > 0
    for mine, theirs in zip(ours.generations, stock.generations, strict=True):
        for name, value in theirs.items():
            assert torch.equal(mine[name], value), name
    assert ours.micro_batches == stock.micro_batches
    for mine, theirs in zip(ours.gradients, stock.gradients, strict=True):
        assert torch.equal(mine, theirs)
    for (name, mine), theirs in zip(ours.model.named_parameters(), stock.model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    assert_the_same_figures(ours, stock)
    assert len(ours._logs["advantages"]) == len(stock._logs["advantages"])
    for name in ("prompt", "completion", "advantages"):
        assert list(ours._logs[name]) == list(stock._logs[name])
    assert {name: list(each) for name, each in ours._logs["rewards"].items()} == {
        name: list(each) for name, each in stock._logs["rewards"].items()
    }


def relative(mine, theirs):
    return ((mine - theirs).norm() / theirs.norm().clamp(min=1e-12)).item()


def weights_of(trainer):
    return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])


@pytest.fixture
def gated(httpserver):
    return GatedServices(httpserver)


@pytest.fixture
def trained(gated, tmp_path):
    """Build and train; `begin` is called with the trainer before."""
    built = []

    def run(kind, policy, begin=lambda trainer: None, **given):
        built.append(build(kind, policy, gated.url, tmp_path / f"run{len(built)}", **given))
        begin(built[-1])
        torch.manual_seed(7)  # building a model may draw
        built[-1].train()
        return built[-1]

    yield run
    for trainer in built:
        finish(trainer)


ARRANGEMENTS = {
    "one_micro_batch": {"loss_type": "grpo"},
    "four_micro_batches": {"loss_type": "dr_grpo", "gradient_accumulation_steps": 4},
    "two_updates_a_generation": {"gradient_accumulation_steps": 1, "steps_per_generation": 2},
    "two_iterations": {"gradient_accumulation_steps": 2, "num_iterations": 2},
    # TRL shuffles later epochs otherwise than we do, so without it. Three generation batches an epoch, of which an
    # update has two: the epoch's last one is short
    "epochs": {
        "rows": 6,
        "shuffle_dataset": False,
        "max_steps": 6,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 2,
    },
}


@pytest.mark.usefixtures("any_text_is_an_action")
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_with_transformers_completions_and_so_everything_else_are_stock_trls(trained, tiny, arrangement):
    given = {"rows": 32, "max_completion_length": 16, "per_device_train_batch_size": 2, **ARRANGEMENTS[arrangement]}
    ours, stock = (trained(kind, tiny, **given) for kind in (Ours, Stock))
    assert len({str(each["completion_ids"].tolist()) for each in ours.generations}) == len(ours.generations)
    assert_identical(ours, stock)
    # what is compared is not nothing: there were advantages, at all but a step or two, and gradients
    assert sum(gradient.norm() > 1e-3 for gradient in ours.gradients) >= len(ours.gradients) / 2
    assert any(any(batch["advantages"]) for batch in ours.micro_batches)


# Groups that are scored are trained on first

FOUR_GROUPS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "rows": 32,
               "scored_groups_first": True, "optim": "sgd", "learning_rate": 1.0, "max_steps": 2}  # fmt: skip
"""Eight completions a generation batch: four groups of two, each of them a micro-batch."""
GENERATION = 8
SAME_FIGURES = ("reward", "rewards/", "reward_std", "frac_reward_zero_std", "completions/", "num_tokens", "loss",
                "grad_norm", "epoch", "learning_rate")  # fmt: skip


class Gate:
    """Holds back verdicts on some places of each generation batch until `after` completions of it were trained on."""

    def __init__(self, held=(0, 1), after=6, patience_s=GATE_S):
        self._held, self._after, self._patience_s = held, after, patience_s
        self._changed = threading.Condition()
        self._trained = Counter()
        self.gave_up = False

    def see(self, trainer):
        """Learn of micro-batches as they are trained on."""
        compute_loss = trainer._compute_loss

        def seen(model, inputs):
            loss = compute_loss(model, inputs)
            with self._changed:
                self._trained.update(number_of(text) // GENERATION for text in trainer.micro_batches[-1]["texts"])
                self._changed.notify_all()
            return loss

        trainer._compute_loss = seen

    def __call__(self, text):
        batch, place = divmod(number_of(text), GENERATION)
        if place in self._held:
            with self._changed:
                self.gave_up |= not self._changed.wait_for(
                    lambda: self._trained[batch] >= self._after, self._patience_s
                )


def order_of(trainer):
    """By generation batch, the places in the order they were trained on, by micro-batch."""
    found = {}
    for batch in trainer.micro_batches:
        numbers = [number_of(text) for text in batch["texts"]]
        found.setdefault(numbers[0] // GENERATION, []).append([number % GENERATION for number in numbers])
    return found


def assert_equal_but_for_the_order(ours, stock):
    def samples(trainer):
        each = [
            (number_of(text), prompt, advantage)
            for batch in trainer.micro_batches
            for text, prompt, advantage in zip(batch["texts"], batch["prompts"], batch["advantages"], strict=True)
        ]
        return sorted(each)

    assert [number for number, *_ in samples(ours)] == list(range(len(samples(stock))))  # each one once
    for mine, theirs in zip(samples(ours), samples(stock), strict=True):
        assert mine[:2] == theirs[:2]
        assert mine[2] == pytest.approx(theirs[2], rel=TOLERANCE, abs=TOLERANCE)
    for mine, theirs in zip(ours.gradients, stock.gradients, strict=True):
        assert theirs.norm() > 1e-3
        assert relative(mine, theirs) < TOLERANCE
    assert relative(weights_of(ours), weights_of(stock)) < TOLERANCE
    assert_the_same_figures(ours, stock, tolerance=TOLERANCE, among=SAME_FIGURES)


@pytest.mark.parametrize(
    ("settings_of_it", "held", "last"),
    [
        ({}, (0, 1), [0, 1]),
        # two groups a micro-batch: a part has both
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, (3,), [0, 1, 2, 3]),
        # two micro-batches a group
        ({"num_generations": 4}, (0,), [0, 1, 2, 3]),
        # two generation batches an update: not with dapo, a mean over the tokens of each
        ({"gradient_accumulation_steps": 8, "steps_per_generation": 4, "loss_type": "grpo"}, (2,), [2, 3]),
    ],
)
def test_whole_groups_that_are_scored_come_first_and_the_update_is_the_same(
    trained, tiny, gated, settings_of_it, held, last
):
    given = {**FOUR_GROUPS, **settings_of_it}
    gated.hold = gate = Gate(held, after=GENERATION - len(last))
    ours = trained(ScriptedOurs, tiny, begin=gate.see, **given)
    gated.hold = lambda text: None
    stock = trained(ScriptedStock, tiny, **given)
    assert not gate.gave_up
    size = given["per_device_train_batch_size"]
    for places in order_of(ours).values():
        flat = [place for batch in places for place in batch]
        assert flat[-len(last) :] == last  # what was held back
        assert sorted(places) == [[*range(first, first + size)] for first in range(0, GENERATION, size)]
    assert_equal_but_for_the_order(ours, stock)


def test_hybrid_advantages_and_the_branches_kl_are_the_same_in_parts(trained, tiny, gated):
    given = {**FOUR_GROUPS, "beta": 0.1, "hybrid_reference_weight": 0.3, "scale_rewards": "none"}
    gated.hold = gate = Gate()
    parts = trained(ScriptedOurs, tiny, begin=gate.see, **given)
    gated.hold = lambda text: None
    whole = trained(ScriptedOurs, tiny, **{**given, "scored_groups_first": False})
    assert not gate.gave_up
    assert all(places[-1] == [0, 1] for places in order_of(parts).values())
    assert_equal_but_for_the_order(parts, whole)
    assert_the_same_figures(
        parts, whole, tolerance=TOLERANCE, among=("kl", "beta/", "outcome/", "failures/", "rollout")
    )
    for name in ("prompt", "completion", "advantages"):
        mine, theirs = list(parts._logs[name]), list(whole._logs[name])
        assert mine == (pytest.approx(theirs, rel=TOLERANCE, abs=TOLERANCE) if name == "advantages" else theirs)


def test_where_an_update_depends_on_the_order_nothing_is_trained_on_first(trained, tiny, gated):
    given = {**FOUR_GROUPS, "loss_type": "bnpo"}  # tests/unit/config has the other reasons
    gated.hold = gate = Gate(patience_s=0.2)
    ours = trained(ScriptedOurs, tiny, begin=gate.see, **given)
    gated.hold = lambda text: None
    stock = trained(ScriptedStock, tiny, **given)
    assert gate.gave_up
    assert_identical(ours, stock)


# With vLLM


class Streams:
    """When generation ended and when the 8B endpoint was first asked, of the first generation batch."""

    def __init__(self, services, trainer):
        self.services, self.ends = services, []
        generate = trainer._hooks.generate

        def timed(prompts):
            self.services.first_asked.clear()
            try:
                return generate(prompts)
            finally:
                self.ends.append((self.services.first_asked.get("8b"), time.monotonic()))

        trainer._hooks.generate = timed


@pytest.mark.slow
def test_with_vllm_a_run_is_stock_trls_and_rewards_start_while_others_are_generated(tmp_path):
    policy_path = make_tiny_policy(tmp_path / "policy", hidden_size=64)
    done_on_vllm(__file__, policy_path, tmp_path)
    told = json.loads((tmp_path / "told.json").read_text())
    for mine, theirs in zip(told["ours"]["micro_batches"], told["stock"]["micro_batches"], strict=True):
        assert mine.pop("loss") == pytest.approx(theirs.pop("loss"), rel=TOLERANCE, abs=TOLERANCE)
        assert mine == theirs
    assert told["weights_apart"] < TOLERANCE
    differences = [entry["sampling/sampling_logp_difference/mean"] for entry in told["ours"]["steps"]]
    assert max(differences) < 0.01  # both at a temperature of 0.6: 0.09 with one of them at 1
    assert any(any(batch["advantages"]) for batch in told["stock"]["micro_batches"])
    # the first of a batch's completions was asked about before the last one was there
    early = [asked is not None and asked < ended for asked, ended in told["streams"]]
    assert sum(early) >= len(early) / 2


def _compare_around_vllm(policy, out):
    import trl.generation.vllm_generation as upstream_vllm
    import trl.trainer.grpo_trainer as upstream_trainer

    from salesrl_trl.generation.vllm import SalesVLLMGeneration
    from salesrl_trl.ground.process import patched
    from salesrl_trl.judged import chain

    tokens = len(AutoTokenizer.from_pretrained(policy))
    given = {
        "rows": 32, "use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 256, "optim": "sgd",
        "learning_rate": 0.5, "max_completion_length": 48, "vllm_engine_kwargs": '{"seed": 0}',
        "vllm_gpu_memory_utilization": 0.3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "num_generations": 4, "temperature": 0.6,
        # a policy of random weights seldom ends by itself: one token in eight does it
        "generation_kwargs": {"stop_token_ids": list(range(16, tokens, 8))},
    }  # fmt: skip
    chain.parse_action = any_action
    told, weights = {}, {}
    for name, kind in (("ours", Ours), ("stock", Stock)):
        with HTTPServer(host="127.0.0.1", port=0, threaded=True) as server:
            services = GatedServices(server)
            if kind is Ours:
                trainer = build(kind, policy, services.url, out / name, **given)
                engine, streams = trainer.vllm_generation.llm, Streams(services, trainer)
            else:  # TRL's own push of weights does not work on a CPU
                options = {"seed": 0, "enforce_eager": True, "dtype": "float32"}
                ours = functools.partial(SalesVLLMGeneration, engine_options=options)
                same = functools.partial(lambda engine, *_, **__: engine, engine)
                with patched(upstream_vllm, "LLM", same), patched(upstream_trainer, "VLLMGeneration", ours):
                    trainer = build(kind, policy, services.url, out / name, **given)
            torch.manual_seed(7)
            trainer.train()
            finish(trainer)
        weights[name] = weights_of(trainer)
        told[name] = {"micro_batches": trainer.micro_batches, "steps": steps_of(trainer)}
        del trainer
        gc.collect()
    told["streams"] = streams.ends
    told["weights_apart"] = relative(weights["ours"], weights["stock"])
    (out / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    torch.set_num_threads(1)
    _compare_around_vllm(sys.argv[1], Path(sys.argv[2]))
