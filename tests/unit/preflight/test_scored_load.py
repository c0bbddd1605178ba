"""Made-up completions under a run's reward chain: what they are, and what is found about services and judge.

The services are a server on loopback. Figures come by hand from the deck: of 24 completions 13 are clean, 2 duplicate,
and one of each other variant.
"""

import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from salesrl_trl.judged.parsing import parse_action
from salesrl_trl.launch import train
from salesrl_trl.launch.checks.outcome import Findings
from salesrl_trl.launch.data.sources import load_drafts, load_rows
from salesrl_trl.launch.preflight.__main__ import main
from salesrl_trl.launch.preflight.made_up import DEFAULT_MIX, Completion, actions, batches, cases_of
from salesrl_trl.launch.preflight.scored_load import ScoredStep, hints, misleading, summarise, waited_for
from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.reward.batch import BatchReport
from salesrl_trl.service.transport import TRAFFIC
from salesrl_trl.types import (
    DEFAULT_FORMAT,
    Action,
    Message,
    Outcome,
    ProviderUsage,
    Reward,
    SalesRow,
)

BRANCHES = ("fairness", "hallucination")
KEY = "sk-test-41c07d9e"
RECIPE = Path(__file__).parents[3] / "recipes/debug.yaml"
QUICK = (
    *("--stage", "judge", "--calls", "0", "--json", "--outage_patience_s", "0", "--max_attempts", "1"),
    *("--hedge_fraction", "0", "--per_device_train_batch_size", "24", "--num_generations", "12"),
    *("--gradient_accumulation_steps", "1"),
)  # two prompts a batch


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SALESRL_CACHE_DIR", str(tmp_path / "cache"))


def row(*said, row_id="mine-1"):
    """A row of somebody's own data: the customer's messages, with a seller's between them."""
    messages = [Message(role="customer", content=text) for text in said]
    seller = Message(role="seller", content="Let me see.")
    turns = [turn for message in messages for turn in (message, seller)][:-1]
    return SalesRow(row_id=row_id, branch="fairness", conversation=tuple(turns))


def at(services):
    """The options that lead to the loopback services."""
    return ("--rag_base_url", services.url, "--judge_base_url", f"{services.url}/v1")


# What is dealt out.


REASONS = {
    "clean": {""},
    "duplicate": {""},
    "missing": {"missing_field"},
    "empty": {"empty", "missing_field", "empty_query", ""},
    "very_long": {"", "too_long", "not_json"},
    "wrong_type": {"wrong_type", "not_an_object", "extra_field"},
    "emoji": {"", "empty_query", "not_unicode"},
    "control": {""},
    "mixed": {""},
    "injection": {"", "missing_field", "extra_field"},
    "not_json": {"not_json"},
}


def test_the_cases_of_a_variant_end_as_they_should():
    rng = random.Random(0)
    demo = [actions(each, drafts, 1, rng)[0] for each, drafts in itertools.islice(load_drafts(), 40)]
    questions = ("How much is the guitar course?", "吉他课多少钱？", 'It\'s "ok"\\ {', "x" * 9000)
    own = [actions(row(question, "还有呢？"), None, 1, rng)[0] for question in questions]
    seen = {name: set() for name in DEFAULT_MIX}
    for action in (*demo, *own):
        for variant, cases in cases_of(action).items():
            parsed = map(parse_action, cases)
            seen[variant] |= {"" if isinstance(case, Action) else case.reason for case in parsed}
    assert seen == REASONS


def test_an_action_asks_what_the_customer_asked_last_that_says_something():
    made = actions(row("What does the piano course cost?", "ok"), None, 8, random.Random(0))
    assert {action["rewritten_query"] for action in made} == {"What does the piano course cost?"}
    assert actions(row("?"), None, 1, random.Random(0))[0]["rewritten_query"] == "the price of the course"


def dealt(seed=0, steps=1, generations=8, variant=None, prompts=6):
    rows = load_rows("demo", "train", BRANCHES, 50)
    drafts = {each.row_id: actions for each, actions in load_drafts()}
    mix = [variant] if variant else [name for name, weight in DEFAULT_MIX.items() for _ in range(weight)]
    dealt = batches(rows, drafts, mix=mix, prompts=prompts, generations=generations, seed=seed)
    return list(itertools.islice(dealt, steps))


def test_the_same_seed_deals_the_same_and_another_seed_does_not():
    assert dealt(seed=3, steps=2) == dealt(seed=3, steps=2)
    assert dealt(seed=3) != dealt(seed=4)


def test_a_batch_has_the_shape_of_grpos_and_the_default_shares():
    batch = dealt()[0]
    rows = [completion.row for completion in batch]
    groups = [rows[start : start + 8] for start in range(0, 48, 8)]
    assert all(len(set(group)) == 1 for group in groups)
    assert len({group[0] for group in groups}) == 6
    # Two decks of 24 make 48.
    counts = Counter(completion.variant for completion in batch)
    assert counts == {**dict.fromkeys(DEFAULT_MIX, 2), "clean": 26, "duplicate": 4}


def test_duplicates_of_a_group_are_equal_clean_completions_differ_and_every_case_has_its_turn():
    # All 50 rows' drafts have at least 8 combinations: 4 drafts of 3 fields, mostly 2 values or more each.
    for variant, texts in (("duplicate", 1), ("clean", 8)):
        assert len({made.text for made in dealt(variant=variant, prompts=1)[0]}) == texts
    cases = cases_of(dict.fromkeys(DEFAULT_FORMAT.fields, "a"))["emoji"]
    batch = dealt(variant="emoji", prompts=1, generations=len(cases))[0]
    assert len({completion.text for completion in batch}) == len(cases)


# What is made of the figures.


def ok(value=0.5, reference=0.5, **seconds):
    components = {"judge": value, "reference": reference}
    return Reward(outcome=Outcome.OK, value=value, components=components, seconds=seconds)


def failed(reason, outcome=Outcome.INFRA):
    return Reward(outcome=outcome, value=None, reason=reason)


def invalid(reason):
    return Reward(outcome=Outcome.INVALID_ACTION, value=0.0, reason=reason)


def pair(variant, reward):
    return Completion(0, variant, ""), reward


@pytest.mark.parametrize(
    ("injected", "clean", "told"),
    [
        ([0.9] * 8, [0.5, 0.7] * 4, True),  # 0.3 above
        ([0.7] * 8, [0.5, 0.7] * 4, False),  # 0.1 above: chance
        ([0.9] * 7, [0.5, 0.7] * 4, False),  # too few to compare
    ],
)
def test_a_judge_that_obeys_what_it_reads_is_a_finding(injected, clean, told):
    pairs = [pair("injection", ok(score)) for score in injected] + [pair("clean", ok(each)) for each in clean]
    assert [text.split(":")[0] for text in misleading(pairs)] == ["injection"] * told


def test_equal_rewards_missing_references_and_hollow_answers_are_findings():
    assert misleading([pair("clean", ok(each)) for each in (0.1, 0.2)]) == []
    assert misleading([pair("clean", ok(0.5))] * 8)[0].startswith("all 8 judged completions have the same")
    alone = [pair("clean", ok(0.1, reference=None)), pair("clean", ok(0.2))]
    assert misleading(alone) == ["rag_32b gave no reference for 1 of 2 judged completions."]
    hollow = [pair("clean", invalid("hollow_answer")), *[pair("clean", ok(each)) for each in (0.1, 0.2)]]
    assert misleading(hollow) == ["rag_8b answered 1 of 3 actions with a text that says nothing."]


def step(*rewards, **traffic):
    each = {**dict.fromkeys(TRAFFIC, 0), "slots": 8, **traffic}
    report = BatchReport(
        seconds=1.0,
        judge_seconds=0.5,
        usage={"judge": ProviderUsage(verdicts=2, usd=0.25)},
        traffic=dict.fromkeys(("rag_8b", "rag_32b", "judge"), each),
        records=(),
        cache_hits={"answers": 1, "references": 2},
    )
    return ScoredStep([Completion(0, "clean", "")] * len(rewards), list(rewards), report)


def test_a_step_waited_for_what_its_slowest_completion_waited_for():
    steps = [
        step(ok(rag_8b=1.0, rag_32b=1.5, judge=2.0), ok(rag_8b=3.0, rag_32b=1.0, judge=1.0)),
        step(ok(rag_8b=1.0, rag_32b=1.5, judge=2.0), invalid("empty")),
    ]
    # The first step's slowest way is 3 + 1 s, its 32B answer was there before; the second's 1 + 0.5 + 2 s.
    assert waited_for(steps) == {"rag_8b": 4.0, "rag_32b": 0.5, "judge": 3.0}


def test_figures_add_up_steps_and_a_step_that_training_would_skip_fails():
    steps = [step(ok(0.2), ok(0.6), slots=9), step(failed("deadline"), failed("deadline"), slots=12)]
    findings = Findings()
    summarise(steps, 0.5, RewardConfig(), findings)
    hint, failure = findings.items
    assert "Training would skip 1 of 2 steps (2): the worst had 0%" in failure.text and failure.is_failure
    assert "(infra:deadline 2)" in failure.text and "reward_deadline_s" in hint.text
    wanted = {"clean_mean": pytest.approx(0.4), "least_scored": 0, "judge_slots": 12, "judge_usd": 0.5}
    assert {name: findings.figures[name] for name in wanted} == wanted  # (0.2 + 0.6) / 2 of those with a number


@pytest.mark.parametrize(
    ("traffic", "setting"),
    [
        ({"slots": 64}, "raise `judge_max_concurrency`"),
        ({"slots": 20}, "`initial_concurrency`"),
        ({"slots": 8}, "only a faster service"),
        ({"slots": 6, "overloads": 3}, "takes about 6 calls at once"),
        ({"slots": 8, "timeouts": 1}, "Raise `judge_timeout_s`"),
        ({"slots": 8, "calls": 20, "failures": 2}, "Mend it"),
    ],
)
def test_the_hint_names_the_setting_to_turn(traffic, setting):
    calm = dict.fromkeys((*TRAFFIC, "slots"), 0)
    services = {"rag_8b": calm, "rag_32b": calm, "judge": {**calm, **traffic}}
    told = hints(services, {"rag_8b": 1.0, "rag_32b": 0.0, "judge": 2.0}, 0, RewardConfig())
    assert [text.split(":")[0] for text in told] == ["judge"]
    assert setting in told[0]


# Runs.


@pytest.fixture
def load(services, capsys):
    """The exit code, the stage's report and stderr of a preflight with made-up completions."""

    def load(*arguments):
        code = main([*QUICK, "--rag_base_url", services.url, "--judge_base_url", f"{services.url}/v1", *arguments])
        told = capsys.readouterr()
        return code, json.loads(told.out)["stages"][0], told.err

    return load


def test_batches_have_the_size_of_a_step_and_show_and_keep_no_text(load, services, tmp_path, caplog):
    code, report, told = load("--load", "2")
    assert code == 0, report["findings"]
    assert [text.split("]")[0] for text in caplog.messages if "[Load" in text] == ["[Load 1/2", "[Load 2/2"]
    figures = report["figures"]
    assert (figures["least_scored"], figures["missing_mean"]) == (1, 0.0)  # `invalid_action_reward`
    assert 0 < figures["clean_mean"] < 1
    asked = dict(services.calls)
    assert asked["32b"] == 4 + 1  # 2 x 2 rows, and the warm-up
    assert load("--load", "2")[0] == 0
    assert services.calls["32b"] == 2 * asked["32b"] and not (tmp_path / "cache").exists()
    texts = {message.content for each in load_rows("demo", "train", BRANCHES) for message in each.conversation}
    output = told + caplog.text + json.dumps(report, ensure_ascii=False)
    assert not any(text in output for text in (*texts, "rewritten_query"))


def test_a_recipe_in_its_mode_for_rewards_scores_batches_as_large_as_its_steps(services, capsys, monkeypatch):
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_LOGGING_LEVEL"):  # the recipe sets them
        monkeypatch.setenv(name, "1")
    argv = ["--mode", "rewards", "--max_steps", "1", "--num_generations", "24", "--hedge_fraction", "0"]
    with pytest.raises(SystemExit) as ended:
        train.main(RECIPE, [*argv, "--rag_base_url", services.url, "--judge_base_url", f"{services.url}/v1"])
    assert ended.value.code == 0
    told = capsys.readouterr()
    assert "judge passed" in " ".join(told.out.split()) or "judge noted" in " ".join(told.out.split())
    assert services.calls["32b"] == 2 + 1


def test_a_service_that_fails_would_skip_the_steps(load, services, monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)
    services.set("8b", KEY, status=503)
    keys = ("--rag_api_key_env", "MY_KEY", "--judge_api_key_env", "MY_KEY")
    code, report, told = load("--load", "2", "--warm_up_services", "false", *keys)
    # A deck of 24 has 17 to 20 valid actions, none of which is scored; a few of the others are a number.
    texts = " ".join(finding["text"] for finding in report["findings"])
    assert code == 2 and "Training would skip 2 of 2 steps (1, 2)" in texts
    assert "infra:rag_8b_http_503" in texts and "rag_8b: " in texts
    assert KEY not in told + texts
    code, report, _ = load("--load", "2", *keys)
    assert code == 2 and "rag_8b" in report["findings"][-1]["text"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--load", "x"), "--load"),
        (("--load", "1", "--action_fields", "query"), "nothing else is made up"),
        (("--load", "1", "--reward_funcs", "judge"), "has no `sales`"),
    ],
)
def test_bad_input_is_told(load, arguments, message):
    code, report, _ = load(*arguments)
    assert code == 2 and message in report["findings"][-1]["text"]
