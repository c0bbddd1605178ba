"""A trainer whose policy talks with a partner: what trains, what is recorded, and its replay."""

from unittest.mock import patch

import pytest
from datasets import Dataset
from support.keyed import make_calling_policy
from support.scripted import padded_behind, settings, steps_of
from support.talking import Scripted
from support.viewing import asked, served
from transformers import AutoTokenizer

from salesrl_trl.agents.partner import Reply
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.errors import BudgetSpent, ConfigError
from salesrl_trl.names import DIALOGUE_FIGURES, dialogue_figure
from salesrl_trl.record.reader import recorded
from salesrl_trl.record.replay import ReplayReward
from salesrl_trl.reward.functions import per_completion, reward_of
from salesrl_trl.trainer import SalesGRPOTrainer

ROWS = [
    {"prompt": [{"role": "user", "content": f"I need {place}."}], "most": 400 + 50 * place} for place in range(4)
]  # fmt: skip
OFFERS = ("600 yuan", "500 yuan", "400 yuan", "Hello")
CALL = '<tool_call>\n{"name": "add", "arguments": {"number": 3}}\n</tool_call>'


def add(number: int) -> int:
    """Adds three.

    Args:
        number: What three is added to.
    """
    return number + 3


def says(row, messages):
    offer = messages[-1]["content"].split()[0]
    if not offer.isdigit():
        return "How much?"
    if int(offer) <= row["most"]:
        return Reply(text="Agreed.", outcome={"end": "agreement", "price": float(offer), "price_share": 1.0})
    return Reply(text="No.", outcome={"end": "refusal"}) if len(messages) > 3 else "Too much."


def gone(row, messages):
    pytest.fail("a replay calls no partner")


@per_completion
async def price(completion):
    return completion[-1].get("outcome", {}).get("price", 0.0) / 600


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_calling_policy(tmp_path_factory.mktemp("policy") / "policy", max_position_embeddings=2048)


def run(policy, folder, reward, partner, tools=None, texts=OFFERS, resumed=None, **own):
    """The log lines of two steps, or of those after `resumed`. Each turn is the text at its place."""
    args = SalesGRPOConfig(
        **settings(folder, beta=0.0, max_steps=2, per_device_train_batch_size=4, num_generations=4,
                   max_completion_length=300, **own)
    )  # fmt: skip
    trainer = SalesGRPOTrainer(
        str(policy), reward, args, Dataset.from_list(ROWS), partner=partner, tools=tools, processing_class=None
    )
    tokenizer = AutoTokenizer.from_pretrained(policy)

    def generate(input_ids, **kwargs):
        left = len(input_ids)
        return padded_behind(
            input_ids, (texts if left == 4 else ["300 yuan", "700 yuan", "500 yuan"])[:left], tokenizer
        )

    with patch.object(trainer.model, "generate", side_effect=generate):
        trainer.train(resumed)
    trainer.finish()
    return steps_of(trainer)


@pytest.mark.parametrize("tools", [None, [add]], ids=["without tools", "with a tool"])
def test_conversations_train_are_recorded_replayed_and_seen(policy, tmp_path, monkeypatch, tools):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    texts = OFFERS if tools is None else (CALL, *OFFERS[1:])
    lines = run(policy, tmp_path / "first", price, Scripted(says), tools, texts, record=True)
    for line in lines:
        assert {dialogue_figure(name) for name in DIALOGUE_FIGURES} <= line.keys()
        ends = [line[dialogue_figure(name)] for name in ("agreement", "refusal", "length", "failed")]
        assert sum(ends) == 1
        assert line["dialogue/agreement"] > 0
        assert line["dialogue/turns"] > 1
        assert line["dialogue/tool_calls"] == (0.25 if tools else 0)
        assert line["tools/customer/calls"] == 4 * line["dialogue/turns"]
        assert line["loss"] != 0.0
        assert line["outcome/ok"] == 1.0
    replay = ReplayReward(reward_of(price), tmp_path / "first", "fail")
    again = run(policy, tmp_path / "again", replay, Scripted(gone), tools, texts, record=True)
    same = ["loss", "reward", "reward_std", "grad_norm", *map(dialogue_figure, DIALOGUE_FIGURES)]
    assert [[line[name] for name in same] for line in again] == [[line[name] for name in same] for line in lines]
    found = [*recorded(tmp_path / "again")]
    ended = max((each for each in found if each.turns[-1].get("outcome")), key=lambda each: len(each.turns))
    with served(tmp_path / "again") as viewer:
        viewer.index.refresh()
        shown = asked(viewer, "api/completion", id=f"0-0-{ended.id}")[2]
    assert len(shown["turns"]) == len(ended.turns) > 2
    assert shown["turns"][-1]["outcome"]["end"] in ("agreement", "refusal")
    assert {call["service"] for call in shown["calls"]} <= {"customer", "tool_add"}
    assert any(each.turns[-1].get("outcome", {}).get("end") == "agreement" for each in found)


@pytest.mark.parametrize(("error", "later"), [(OSError(), 0.25), (BudgetSpent("the limit is reached"), 0.0)])
def test_a_partners_failure_excludes_its_conversations_also_after_a_resume_but_a_limits_end_does_not(
    policy, tmp_path, monkeypatch, error, later
):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def fails(row, messages):
        if messages[-1]["content"] == "600 yuan":
            raise error
        return says(row, messages)

    saves = {"save_strategy": "steps", "save_steps": 1, "save_rollouts": True, "rollout_lookahead": 1}
    lines = run(policy, tmp_path, price, Scripted(fails), **saves)
    # the partner is back, and the second step's conversations were in flight
    lines += run(policy, tmp_path, price, Scripted(says), resumed=str(tmp_path / "checkpoint-1"), **saves)
    shares = [(line["dialogue/failed"], line["outcome/infra"]) for line in lines]
    assert shares == [(0.25, 0.25)] * (len(lines) - 1) + [(later, later)]


def test_a_partner_beside_a_rollout_func_is_rejected(policy, tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    args = SalesGRPOConfig(**settings(tmp_path, num_generations=4))
    with pytest.raises(ConfigError, match="`partner` is given with a `rollout_func`"):
        SalesGRPOTrainer(
            str(policy), price, args, Dataset.from_list(ROWS), partner=Scripted(says), rollout_func=lambda *_: {}
        )


def test_a_resumed_run_continues_as_an_uninterrupted_one(policy, tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    saves = {"save_strategy": "steps", "save_steps": 1, "save_rollouts": True}
    whole = run(policy, tmp_path, price, Scripted(says), **saves)
    again = run(policy, tmp_path, price, Scripted(says), resumed=str(tmp_path / "checkpoint-1"), **saves)
    for name in ("loss", "reward", *map(dialogue_figure, DIALOGUE_FIGURES)):
        assert again[-1][name] == whole[-1][name], name
