"""Tools and environments, with which TRL generates inside its own scoring: against stock TRL."""

import functools
from unittest.mock import patch

import pytest
from datasets import Dataset
from support.keyed import make_calling_policy
from support.scripted import padded_behind, settings, steps_of
from support.viewing import asked, served
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.record.reader import recorded
from salesrl_trl.record.replay import ReplayReward
from salesrl_trl.reward.functions import per_completion, reward_of
from salesrl_trl.trainer import SalesGRPOTrainer

CALL = '<tool_call>\n{"name": "add", "arguments": {"number": 3}}\n</tool_call>'
WRONG_CALL = CALL.replace("number", "other")
ROWS = [{"prompt": [{"role": "user", "content": f"What is {place} and 3?"}], "kind": "sums"} for place in range(4)]
SAME = ("loss", "reward", "reward_std", "completions/mean_length")


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    return make_calling_policy(tmp_path_factory.mktemp("caller") / "policy", max_position_embeddings=2048)


def add(number: int) -> int:
    """Adds three.

    Args:
        number: What three is added to.

    Returns:
        The sum.
    """
    return number + 3


class Counter:
    """An environment."""

    def reset(self, **row):
        self.count = 0
        return "Count."

    def add(self, number: int) -> int:
        """Counts.

        Args:
            number: How far.

        Returns:
            The count.
        """
        self.count += number
        return self.count


class Owner(Counter):
    """An environment with a reward of its own."""

    def get_reward(self) -> float:
        return float(self.count)


def turns(prompts, completions, **kwargs):
    """More for a conversation with more messages, and for a prompt that says more."""
    return [len(each) + len(str(prompt)) / 1000 for prompt, each in zip(prompts, completions, strict=True)]


@per_completion
async def last_words(completion):
    return 1.0 if completion[-1]["content"] == "Done!" else 0.0


def counted(environments, **kwargs):
    return [float(each.count) for each in environments]


def lines_of(kind, config, policy, folder, functions, rows=ROWS, own=None, **given):
    """The log lines of two steps, in which two of four completions call a tool, one of them in vain."""
    more = {"shared_prompts": "off", **(own or {})} if config is SalesGRPOConfig else {}
    more |= {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 256}
    args = config(**settings(folder, beta=0.0, max_steps=2, **more))
    trainer = kind(str(policy), functions, args, None if rows is None else Dataset.from_list(rows), **given)
    tokenizer = AutoTokenizer.from_pretrained(policy)

    def generate(input_ids, **kwargs):
        first = [CALL, WRONG_CALL, "None at all", "Done!"]
        texts = first if len(input_ids) == len(first) else ["Done!"] * len(input_ids)
        return padded_behind(input_ids, texts, tokenizer)

    with patch.object(trainer.model, "generate", side_effect=generate):
        trainer.train()
    if kind is SalesGRPOTrainer:
        trainer.finish()
    return steps_of(trainer)


class Asking:
    """An environment without tools: it has the prompts alone."""

    def reset(self, **row):
        return "What is the price?"


@pytest.mark.parametrize(
    ("functions", "rows", "given"),
    [
        ([turns, last_words], ROWS, {"tools": [add]}),
        ([counted, turns], None, {"environment_factory": Counter}),
        ([turns], None, {"environment_factory": Owner}),
        ([last_words], None, {"environment_factory": Asking}),
    ],
    ids=["tools", "an environment", "an environment with a reward", "an environment without tools"],
)
def test_two_names_changed_the_run_is_stock_trls_to_the_bit(caller, tmp_path, monkeypatch, functions, rows, given):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    stock = lines_of(
        GRPOTrainer, GRPOConfig, caller, tmp_path / "stock", [*functions], rows, **given
    )  # to which TRL adds
    ours = lines_of(SalesGRPOTrainer, SalesGRPOConfig, caller, tmp_path / "ours", functions, rows, **given)
    assert len(ours) == len(stock) == 2
    for name in (name for name in stock[0] if name in SAME or name.startswith(("rewards/", "tools/"))):
        assert [line[name] for line in ours] == [line[name] for line in stock], name
    if rows or counted in functions:
        assert [line["tools/call_frequency"] for line in ours] == [0.5, 0.5]
        assert [line["tools/failure_frequency"] for line in ours] == [0.5, 0.5]
    assert all(line["outcome/ok"] == 1.0 and line["loss"] != 0.0 for line in ours)


def test_calls_of_tools_are_recorded_replayed_and_seen(caller, tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    @functools.wraps(add)
    def gone(number):
        pytest.fail("a replay calls no tool")

    run = functools.partial(lines_of, SalesGRPOTrainer, SalesGRPOConfig, caller)
    first = run(tmp_path / "first", [last_words], tools=[add], own={"record": True})
    replay = ReplayReward(reward_of(last_words), tmp_path / "first", "fail")
    again = run(tmp_path / "again", replay, tools=[gone], own={"record": True})
    for lines in zip(first, again, strict=True):
        for name in ("loss", "reward", "tools/add/errors", "grad_norm"):
            assert lines[0][name] == lines[1][name] != 0.0, name
    assert all(line["outcome/ok"] == 1.0 for line in again)
    # the record: all turns, and the two calls with arguments and results, in both runs alike
    for folder in ("first", "again"):
        found = [*recorded(tmp_path / folder)]
        assert [each.turns and [message["role"] for message in each.turns] for each in found] == 2 * [
            ["assistant", "tool", "assistant"], ["assistant", "tool", "assistant"], None, None
        ]  # fmt: skip
        with served(tmp_path / folder) as viewer:
            viewer.index.refresh()
            called, wrong, plain, _ = (asked(viewer, "api/completion", id=f"0-0-{each.id}")[2] for each in found[:4])
        assert [message["content"] for message in called["turns"]] == ["", "6", "Done!"]
        names = ("service", "path", "request", "answer", "failure")
        assert [[call[name] for name in names] for call in called["calls"]] == [
            ["tool_add", "turn 1", '{"number":3}', "6", ""]
        ]
        [call] = wrong["calls"]
        assert call["request"] == '{"other":3}' and "unexpected keyword" in call["answer"] and call["failure"]
        assert (plain["turns"], plain["calls"]) == ([], [])
