"""A recorded run judged again: the same judge changes nothing, another one what it should. The copy is a record."""

import itertools
import json
import math
import sqlite3
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.loopback import ACTION, BAD, action, build_reward, row
from support.planned import planned
from support.recordings import batch as recorded_batch
from support.recordings import entry
from support.recordings import write as record

from salesrl_trl.launch.checks.dataset import settle_held_out
from salesrl_trl.launch.data_config import DataConfig
from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.record.reader import record_file, recorded
from salesrl_trl.record.rejudge.__main__ import main, text_of
from salesrl_trl.record.rejudge.rejudging import (
    advantages,
    changes,
    correlation,
    of_all_functions,
    rejudged,
)
from salesrl_trl.reward.reward_loop import RewardLoop
from salesrl_trl.telemetry.completion_record import CompletionRecord
from salesrl_trl.types import Outcome, Reward, SalesRow
from salesrl_trl.update.advantages import hybrid_advantages

BRANCHES = ("fairness", "hallucination")
TEXTS = (ACTION, BAD, action("refund"), action("Python"))


def verdict(number):
    return {"candidate": number, "reference": 0.5, "reason": "as told"}


@pytest.fixture
def services(services):
    services.judge_by(lambda system, user: verdict(0.9 if "refund" in user else 0.3))
    return services


@pytest.fixture
def rows():
    return [row("r1", BRANCHES[0]), row("r2", BRANCHES[1])]


@pytest.fixture
def run(services, rows, tmp_path):
    loop = RewardLoop(build_reward(services.url, rows, records=True, invalid_action_reward=0.0))
    batch = loop.begin([{"row": 0}] * 4 + [{"row": 1}] * 4)
    result = loop.result(batch, TEXTS * 2)
    loop.close()
    entries = [
        entry(place, text, reward, row=rows[place // 4].row_id, branch=BRANCHES[place // 4], prompt="p",
              prompt_group=place // 4, record=stages.completion_record)
        for place, (text, reward, stages) in enumerate(zip(TEXTS * 2, result.rewards, batch.stages, strict=True))
    ]  # fmt: skip
    record(tmp_path / "run", [recorded_batch(1, entries)])
    return tmp_path / "run"


def config(services, **given):
    urls = {"rag_base_url": "http://127.0.0.1:9", "judge_base_url": f"{services.url}/v1"}
    return RewardConfig(**urls, **given)


def test_the_same_judge_changes_nothing_and_no_answer_is_asked_for_again(services, rows, run, caplog):
    completions = [*recorded(run)]
    asked = services.calls
    with caplog.at_level("INFO"):
        found = rejudged(config(services, judge_mode="group"), completions, rows, BRANCHES)
    assert "ignoring `judge_mode: group`: each completion is judged again by its own call" in caplog.text
    assert [reward.value for reward in found] == [each.reward for each in completions]
    assert {name: services.calls[name] - asked[name] for name in ("8b", "32b")} == {"8b": 0, "32b": 0}


def test_another_judge_changes_what_it_should(services, rows, run):
    completions = [*recorded(run)]
    services.judge_by(lambda system, user: 500 if "Python price" in user else verdict(0.6))
    found = rejudged(config(services, max_attempts=1), completions, rows, BRANCHES)
    assert [reward.value for reward in found] == [None, 0.0, 0.6, 0.6] * 2


def test_the_new_numbers_stand_among_those_of_other_functions(services, rows, run):
    """The reward is 1 x the packaged one + 2 x a function of the user's own, which failed for the second completion
    and does not apply to the third."""
    before = [0.3, 0.0, None, 0.9]
    own = [0.25, None, None, 0.5]
    whole = [0.8, None, None, 1.9]
    with closing(sqlite3.connect(record_file(run, 0))) as file, file:
        for place in range(8):
            numbers = json.dumps({"sales": before[place % 4], "own": own[place % 4]})
            given = (numbers, whole[place % 4], "ok" if whole[place % 4] else "infra", f"was {place % 4}", place + 1)
            columns = ", ".join(f"{name} = ?" for name in ("functions", "reward", "outcome", "reason"))
            file.execute(f"UPDATE completions SET {columns} WHERE id = ?", given)
    completions = [*recorded(run)]
    services.judge_by(lambda system, user: verdict(0.6))
    judged = rejudged(config(services), completions, rows, BRANCHES)
    assert [reward.value for reward in judged[:4]] == [0.6, 0.0, 0.6, 0.6]
    found = [of_all_functions(old, new, [1.0, 2.0]) for old, new in zip(completions, judged, strict=True)]
    # 0.6 + 2 x 0.25; nobody knows the failed number; nor whether it failed or did not apply; 0.6 + 2 x 0.5
    assert [reward.value for reward in found[:4]] == [pytest.approx(1.1), None, None, pytest.approx(1.6)]
    assert [reward.reason for reward in found[1:3]] == ["was 1", "was 2"]


def test_a_judge_without_a_rag_service_judges_its_completions_again(services):
    known = {"prompt": "How do I get a refund?", "columns": {"reference": "Ask."}}
    rows = [SalesRow(row_id=f"r{n}", branch="all", **known) for n in (1, 2)]
    judge = {"judge_base_url": f"{services.url}/v1", "judge_model": "m"}
    settings = RewardConfig(reward_funcs=["judge"], cache_answers=False, **judge)
    completions = [SimpleNamespace(row=f"r{n}", text=text) for n, text in ((1, "refund"), (2, "no idea"), (1, " "))]
    found = rejudged(settings, completions, rows, ["all"])
    assert [reward.value for reward in found] == [0.9, 0.9, 0.0]  # the prompt asks for a refund
    assert [reward.components.get("reference") for reward in found] == [0.5, 0.5, None]


def test_other_weights_are_applied_to_the_same_verdicts(services, rows, run):
    weights = {"fairness": {"judge": 0.5, "retrieval": 0.5}, "hallucination": {"judge": 1.0}}
    completions = [*recorded(run)]
    found = rejudged(config(services, branch_reward_weights=weights), completions, rows, BRANCHES)
    first = completions[0].parts
    assert found[0].value == pytest.approx(0.5 * first["judge"] + 0.5 * first["retrieval"])
    assert found[4].value == completions[4].reward


def groups(rewards, size=4):
    return [
        SimpleNamespace(branch=BRANCHES[n // size % 2], step=1, batch=0, prompt_group=n // size, reward=reward,
                        reference_reward=None) for n, reward in enumerate(rewards)
    ]  # fmt: skip


def test_advantages_are_those_of_training():
    """`tests/unit/update` has those against TRL's own."""
    of = groups([1.0, 0.0, 0.5, None, 1.0, 1.0, 1.0])
    shuffled = [3, 4, 0, 6, 1, 2, 5]  # of several files
    for scale, weight in itertools.product(("group", "batch", "none"), (0.0, 0.5)):
        found = advantages([of[n] for n in shuffled], [of[n].reward for n in shuffled], [0.25] * 7, scale, weight)
        rewards = torch.tensor([1.0, 0.0, 0.5, torch.nan, 1.0, 1.0, 1.0, torch.nan], dtype=torch.float64)
        expected, _ = hybrid_advantages(rewards, torch.full((8,), 0.25, dtype=torch.float64), 4, weight, scale)
        assert found == [None if place == 3 else pytest.approx(expected[place].item()) for place in shuffled]
    rewards = [completion.reward for completion in of]
    assert advantages(of, rewards, [None] * 7, "none")[:4] == [0.5, -0.5, 0.0, None]


def test_rewards_correlate_by_branch_and_flips_are_counted():
    new = [Reward(outcome=Outcome.OK, value=value) for value in (0.1, 0.2, 0.3, 0.4, 0.4, 0.3, 0.2, 0.1)]
    same, reverse, both = changes(groups([0.1, 0.2, 0.3, 0.4] * 2), new, "none")
    assert (same.branch, same.reward_correlation, same.sign_flips) == ("fairness", pytest.approx(1.0), 0.0)
    assert (reverse.reward_correlation, reverse.sign_flips) == (pytest.approx(-1.0), 1.0)
    assert both.completions == 8
    assert correlation([1, 2, 2, 4], [2, 4, 4, 8]) == pytest.approx(1.0)
    assert correlation([1, 2, 3, 4], [2, 1, 4, 3]) == pytest.approx(0.6)
    assert math.isnan(correlation([1, 1], [1, 2]))
    assert "hallucination" in text_of([same, replace(reverse, reward_correlation=math.nan), both])


def test_the_rows_are_those_of_the_run_whichever_it_drew_and_held_out(services, tmp_path, capsys):
    """The record has a row of each file, and of one branch alone. A column `row` is no number of a row."""
    entries = []
    for name, branch in (("a", "tone"), ("b", "tone"), ("c", "price")):
        lines = ({"prompt": f"{name} {at}?", "branch": branch, "row": "mine", "label": at} for at in range(40))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
        entries.append({"path": str(tmp_path / f"{name}.jsonl"), "rows": 5})
    data, reward = DataConfig(dataset=entries), config(services, reward_funcs=["judge"])
    for source in data.sources:
        settle_held_out(source)  # as at the start of a run
    rows = planned(data, reward).train_rows
    drawn = [row for row in rows if row.branch == "tone"]
    entries_of_record = [
        entry(place, "refund", 0.5, row=row.row_id, branch=row.branch, prompt=str(row.prompt), prompt_group=place,
              record=CompletionRecord())
        for place, row in enumerate(drawn)
    ]  # fmt: skip
    record(tmp_path / "run", [recorded_batch(1, entries_of_record)])
    (tmp_path / "rubrics").mkdir()
    for branch in ("tone", "price"):
        (tmp_path / "rubrics" / f"{branch}.txt").write_text("Judge it.")
    judges = [{"name": name, "base_url": f"{services.url}/v1", "model": name} for name in ("first", "second")]
    given = {"dataset": entries, "reward_funcs": ["judge"], "judge_providers": judges}
    given |= {"judge_meter": {"second": "second"}, "rubric_dir": str(tmp_path / "rubrics")}
    given["branch_reward_weights"] = {"price": {"judge": 2.0}}
    (tmp_path / "run" / "config.yaml").write_text(json.dumps(given))
    assert main([str(tmp_path / "run")]) == 0, capsys.readouterr().err
    asked = [request.json for request in services.asked["judge"]]
    asked = [request for request in asked if "max_tokens" not in request]  # without the check of the names
    assert {request["model"] for request in asked} == {"first"}  # not that of the meter
    judged = "\n".join(json.dumps(request) for request in asked)
    assert all(str(row.prompt) in judged for row in drawn) and len(drawn) == len(asked) == 10


def test_what_is_missing_is_told(tmp_path, capsys):
    assert main([]) == 2
    assert main([str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "the run is not named" in told
    assert "lacks a record" in told
