"""Published datasets for a policy that answers directly, from their files to the judge's message and to the scores."""

import asyncio
import json
import math

import pytest
from support.keyed import make_tiny_policy
from support.published import DIALOGUE, QA, SUMMARIZATION, bbq, write
from support.scripted import ScriptedTrainer, settings
from transformers import AutoModelForCausalLM, AutoTokenizer

from salesrl_trl import judge_reward
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.config.quick_evaluations import QuickEvalSettings
from salesrl_trl.ground.fencing import read_sections
from salesrl_trl.launch.data.sources import prompt_dataset
from salesrl_trl.launch.preflight.runner import prepare
from salesrl_trl.launch.recipes import FULL
from salesrl_trl.launch.settings import parse


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), max_position_embeddings=1024)


@pytest.fixture
def plan(tmp_path, policy, services):
    """The plan of a run on BBQ and HaluEval, by its settings."""
    records = [
        bbq(at, question_index=str(at), context_condition=condition, label=label, note="mine")
        for at, (condition, label) in enumerate([("ambig", 1), ("disambig", 2)] * 8)
    ]
    own = write(tmp_path / "bbq.jsonl", *records)
    others = write(tmp_path / "halueval.json", QA, DIALOGUE, SUMMARIZATION)
    entries = [
        {"path": own, "format": "bbq", "held_out_share": 0.5},
        {"path": others, "format": "halueval", "branch": "truth", "eval": others},
    ]
    given = {"dataset": json.dumps(entries), "reward_funcs": "judge", "judge_base_url": f"{services.url}/v1"}
    given |= {"model_name_or_path": str(policy), "output_dir": str(tmp_path / "run"), "rubric_dir": str(tmp_path)}
    (tmp_path / "truth.txt").write_text("Is it true?")
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    offline = ["--use_cpu", "--use_vllm", "false", "--warm_up_services", "false", "--max_completion_length", "16"]
    return prepare(parse([*words, *offline], FULL))


def test_a_record_goes_from_its_file_through_a_run_of_two_datasets_to_the_judges_message(plan, services):
    rows = {row.row_id: row for row in plan.train.rows}
    row = next(row for name, row in rows.items() if name.startswith("bbq:") and row.columns["label"] == 2)
    assert plan.train.prompts[plan.train.rows.index(row)] == row.prompt
    data = prompt_dataset(plan.train.prompts, plan.train.rows, for_functions=True)
    asked = [example for example in data if example["id"] == row.row_id or example["branch"] == "truth"]
    assert {example["note"] for example in asked} == {"mine", None}
    services.judge_by(lambda system, user: {"candidate": 1.0, "reference": 1.0, "reason": ""})
    reward = judge_reward(
        {"fairness": "F", "truth": "T"}, judge_base_url=f"{services.url}/v1", judge_model="m", max_attempts=1
    )

    async def scored():
        try:
            return await reward.score_all(asked, ["(C) The Hindu neighbour"] * len(asked))
        finally:
            await reward.aclose()

    assert [each.value for each in asyncio.run(scored()).rewards] == [1.0] * 4
    messages = [read_sections(request.json["messages"][1]["content"]) for request in services.asked["judge"][-4:]]
    of_bbq = next(message for message in messages if message["branch"] == "fairness")
    assert "(A) The Muslim neighbour\n(B) Not known\n(C) The Hindu neighbour" in of_bbq["conversation"]
    assert (of_bbq["documents"], of_bbq["reference_answer"]) == ("The Hindu neighbour",) * 2
    truths = {message["reference_answer"]: message for message in messages if message["branch"] == "truth"}
    assert QA["knowledge"] in truths["Lisbon"]["conversation"] and truths["Lisbon"]["documents"] == QA["knowledge"]


def test_an_evaluation_logs_bbqs_scores_also_quickly(plan, policy, tmp_path):
    train, held_out = plan.train, plan.held_out
    args = settings(tmp_path, max_steps=1, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4,
                    beta=0.0, num_generations_eval=1)  # fmt: skip
    trainer = ScriptedTrainer(
        AutoModelForCausalLM.from_pretrained(policy),
        lambda completions, **_: [0.5] * len(completions),
        SalesGRPOConfig(**args),
        train_dataset=prompt_dataset(train.prompts, train.rows, for_functions=True),
        eval_dataset=prompt_dataset(held_out.prompts, held_out.rows, len(train.rows), for_functions=True),
        processing_class=AutoTokenizer.from_pretrained(policy),
        quick_eval=QuickEvalSettings(steps=1, rows=8),
    )
    trainer.texts = ("(C)",)
    trainer.train()
    (line,) = (line for line in trainer.state.log_history if "eval_bbq_unread" in line)
    # (C) is never right in an ambiguous context, and always in a disambiguated one. No stereotype is about it
    expected = {
        "accuracy_ambig": 0.0,
        "accuracy_disambig": 1.0,
        "bias_ambig": -1.0,
        "bias_disambig": -1.0,
        "unread": 0.0,
    }
    for kind, value in expected.items():
        assert line[f"eval_bbq_{kind}"] == value
    (quick,) = (line for line in trainer.state.log_history if "quick_eval/reward" in line)
    assert quick["quick_eval/bbq_accuracy_disambig"] == quick["quick_eval/fairness/bbq_accuracy_disambig"] == 1.0
    assert quick["quick_eval/truth/bbq_accuracy_disambig"] is None
    (kept,) = json.loads((tmp_path / "held_out.json").read_text())
    assert kept["bbq_bias_ambig"] == -1.0
    trainer.texts = ("It is hard.",)
    metrics = trainer.evaluate()
    assert trainer.state.log_history[-1]["eval_bbq_unread"] == 1.0
    assert {trainer.state.log_history[-1][f"eval_bbq_{kind}"] for kind in expected if kind != "unread"} == {None}
    assert not any(isinstance(value, float) and math.isnan(value) for value in metrics.values())
    trainer.finish()
