"""The simulation of a training run's load: its completions, its findings about services, and the texts that it hides.

The services are the embedded ones, or a server on loopback with one fault. Figures come by hand from the deck: of 24
completions 13 are clean, 2 duplicate, and one of each other variant.
"""

import itertools
import json
import logging
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from support.seconds import check_seconds

from salesrl_trl.judged.parsing import parse_action
from salesrl_trl.launch import train
from salesrl_trl.launch.data.sources import load_drafts, load_rows
from salesrl_trl.launch.preflight import simulation
from salesrl_trl.launch.preflight.made_up import (
    DEFAULT_MIX,
    VARIANTS,
    Completion,
    actions,
    batches,
    cases_of,
)
from salesrl_trl.launch.preflight.simulation import findings_of, hints, main, mix_of, report_text
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

SCRIPT = Path(__file__).parents[3] / "scripts" / "simulate_training_rewards.py"
BRANCHES = ("fairness", "hallucination")
KEY = "sk-test-41c07d9e"
SMALL = ("--prompts_per_step", "2", "--num_generations", "12")
QUICK = ("--outage_patience_s", "0", "--max_attempts", "1", "--hedge_fraction", "0", *SMALL)


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
    seen = {name: set() for name in VARIANTS}
    for action in (*demo, *own):
        for variant, cases in cases_of(action).items():
            parsed = map(parse_action, cases)
            seen[variant] |= {"" if isinstance(case, Action) else case.reason for case in parsed}
    assert seen == REASONS


def test_an_action_asks_what_the_customer_asked_last_that_says_something():
    made = actions(row("What does the piano course cost?", "ok"), None, 8, random.Random(0))
    assert {action["rewritten_query"] for action in made} == {"What does the piano course cost?"}
    assert actions(row("?"), None, 1, random.Random(0))[0]["rewritten_query"] == "the price of the course"


def dealt(seed=0, steps=1, generations=8, variants="", prompts_per_step=6):
    rows = load_rows("demo", "train", BRANCHES, 50)
    drafts = {each.row_id: actions for each, actions in load_drafts()}
    sizes = {"prompts": prompts_per_step, "generations": generations, "seed": seed}
    return list(itertools.islice(batches(rows, drafts, mix=mix_of(variants), **sizes), steps))


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
    assert counts == {**dict.fromkeys(VARIANTS, 2), "clean": 26, "duplicate": 4}


def test_duplicates_of_a_group_are_equal_clean_completions_differ_and_every_case_has_its_turn():
    # All 50 rows' drafts have at least 8 combinations: 4 drafts of 3 fields, mostly 2 values or more each.
    for variant, texts in (("duplicate", 1), ("clean", 8)):
        assert len({made.text for made in dealt(variants=variant, prompts_per_step=1)[0]}) == texts
    cases = cases_of(dict.fromkeys(DEFAULT_FORMAT.fields, "a"))["emoji"]
    batch = dealt(variants="emoji", prompts_per_step=1, generations=len(cases))[0]
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
    assert [text.split(":")[0] for text in findings_of(pairs)] == ["injection"] * told


def test_equal_rewards_missing_references_and_hollow_answers_are_findings():
    assert findings_of([pair("clean", ok(each)) for each in (0.1, 0.2)]) == []
    assert findings_of([pair("clean", ok(0.5))] * 8)[0].startswith("all 8 judged completions have the same")
    alone = [pair("clean", ok(0.1, reference=None)), pair("clean", ok(0.2))]
    assert findings_of(alone) == ["rag_32b gave no reference for 1 of 2 judged completions."]
    hollow = [pair("clean", invalid("hollow_answer")), *[pair("clean", ok(each)) for each in (0.1, 0.2)]]
    assert findings_of(hollow) == ["rag_8b answered 1 of 3 actions with a text that says nothing."]


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
    return simulation.SimulatedStep([Completion(0, "clean", "")] * len(rewards), list(rewards), report)


def test_a_step_waited_for_what_its_slowest_completion_waited_for():
    steps = [
        step(ok(rag_8b=1.0, rag_32b=1.5, judge=2.0), ok(rag_8b=3.0, rag_32b=1.0, judge=1.0)),
        step(ok(rag_8b=1.0, rag_32b=1.5, judge=2.0), invalid("empty")),
    ]
    # The first step's slowest way is 3 + 1 s, its 32B answer was there before; the second's 1 + 0.5 + 2 s.
    assert simulation.waited_for(steps) == {"rag_8b": 4.0, "rag_32b": 0.5, "judge": 3.0}


def test_a_summary_adds_up_steps_and_names_those_that_training_would_skip():
    steps = [step(ok(0.2), ok(0.6), calls=3, slots=9), step(failed("deadline"), failed("deadline"), calls=4, slots=12)]
    summary = simulation.summarise(steps, 0.5, RewardConfig())
    assert summary["skipped_steps"] == [2]
    assert summary["least_scored"] == 0
    clean = summary["variants"]["clean"]  # (0.2 + 0.6) / 2 of those with a number
    assert (clean["count"], clean["scored"], clean["mean_reward"]) == (4, 0.5, pytest.approx(0.4))
    assert clean["outcomes"] == {"ok": 2, "infra:deadline": 2}
    assert (summary["services"]["judge"]["calls"], summary["services"]["judge"]["slots"]) == (7, 12)
    assert summary["judges"]["judge"]["usd"] == 0.5
    assert summary["calls_saved"] == {"answers": 2, "references": 4}
    assert "reward_deadline_s" in summary["hints"][0]
    table = [line.split() for line in report_text(summary, 2, 0.5).splitlines()]
    assert ["judge", "4", "0", "0", "0.5000"] in table  # 2 x 2 verdicts, no tokens, dollars
    assert ["clean", "4", "0.40", "ok", "2,", "infra:deadline", "2"] in table


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


def test_two_steps_against_the_embedded_services(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"  # of what a recipe says of training, the load has the number of completions
    recipe.write_text("num_generations: 12\nlearning_rate: 1.0e-6\nuse_vllm: true\nhedge_fraction: 0.0\n")
    pasted = ["--branch_kl", '{"fairness": {"beta": 0.1, "low": 0.1, "high": 0.2}}', "--bf16", "true"]
    code = main(["--config", str(recipe), "--steps", "2", "--prompts_per_step", "4", "--json", *pasted])
    stdout, stderr = capsys.readouterr()
    told = stderr.splitlines()
    assert code == 0, told
    assert [line.split()[0] for line in told if "Step" in line] == ["[Step"] * 2
    assert [line.split("=")[0] for line in told if "Judge@" in line] == ["[Judge@step1] time", "[Judge@step2] time"]

    summary = json.loads(stdout)
    assert [each["count"] for each in summary["steps"]] == [48, 48]  # 4 rows x 12
    counts = {name: each["count"] for name, each in summary["variants"].items()}
    assert counts == {name: 4 * weight for name, weight in DEFAULT_MIX.items()}  # 96 are four decks of 24
    assert summary["variants"]["clean"]["outcomes"] == {"ok": 52}
    assert 0.3 < summary["variants"]["clean"]["mean_reward"] < 1
    for name in ("missing", "wrong_type", "not_json"):
        assert summary["variants"][name]["mean_reward"] == 0.0  # `invalid_action_reward`
    assert summary["findings"] == []
    assert (summary["skipped_steps"], summary["least_scored"]) == ([], 1)
    assert summary["services"]["rag_32b"]["calls"] == 8  # 2 x 4 different rows of 960
    assert summary["services"]["judge"]["calls"] == summary["judges"]["judge"]["verdicts"]
    assert summary["judges"]["judge"]["prompt_tokens"] > 0

    rows = load_rows("demo", "train", BRANCHES)
    texts = {message.content for each in rows for message in each.conversation}
    output = stdout + "\n".join(told)
    assert not any(text in output for text in texts)
    assert "rewritten_query" not in output


def test_a_recipe_in_its_mode_for_rewards_scores_batches_as_large_as_its_steps(services, capsys, monkeypatch):
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_LOGGING_LEVEL"):  # the recipe sets them
        monkeypatch.setenv(name, "1")
    package = logging.getLogger("salesrl_trl")
    argv = ["--mode", "rewards", "--log_level", "error", "--max_steps", "1", "--num_generations", "24", *at(services)]
    with pytest.raises(SystemExit) as ended:
        train.main(SCRIPT.parents[1] / "recipes/debug.yaml", argv)
    shown_from = package.level
    package.setLevel(logging.INFO)
    assert (ended.value.code, shown_from) == (0, logging.ERROR)
    assert capsys.readouterr().out.startswith("1 steps of 2 x 24 completions for 960 rows of demo")


def test_the_report_holds_texts_only_when_asked(services, capsys):
    options = (*at(services), *QUICK, "--steps", "1", "--variants", "clean,emoji,injection")
    assert main(options) == 0
    output = "".join(capsys.readouterr())
    assert "VERDICT good" in output
    for text in ("rewritten_query", "user_profile", "Perfect", services.url):
        assert text not in output
    assert main([*options, "--show-text"]) == 0
    shown = "".join(capsys.readouterr())
    assert "rewritten_query" in shown
    assert not any(character in shown for character in "\u202e\u200b\u0000")  # what a terminal would obey is spelt


def test_nothing_is_kept_after_a_run(services, tmp_path, capsys):
    options = (*at(services), *QUICK, "--steps", "1", "--variants", "clean")
    first = main(options), services.calls["8b"], services.calls["32b"]
    assert main(options) == first[0] == 0
    assert (services.calls["8b"], services.calls["32b"]) == (2 * first[1], 2 * first[2])
    assert not (tmp_path / "cache").exists()
    capsys.readouterr()


def test_a_service_that_fails_would_skip_the_steps(services, capsys, monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)
    services.set("8b", KEY, status=503)
    options = (*at(services), *QUICK, "--steps", "2", "--rag_api_key_env", "MY_KEY", "--judge_api_key_env", "MY_KEY")
    assert main([*options, "--warm_up_services", "false"]) == 3
    told = capsys.readouterr()
    # Two decks of 24: of each 17 to 20 are valid actions, none of which is scored; a few of the others are a number.
    assert "VERDICT bad: training would skip 2 of 2 steps: 1, 2" in told.out
    assert "HINT rag_8b:" in told.out
    assert "infra:rag_8b_http_503" in told.out
    assert main(options) == 3
    warned = capsys.readouterr()
    assert "the services did not pass their warm-up" in warned.err
    assert "VERDICT" not in warned.out
    assert KEY not in "".join((*told, *warned))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rag_base_url", "http://127.0.0.1:9"], "`rag_base_url`"),
        (["--steps", "0"], "`steps` is 0. Expected a number, at least 1."),
        (["--steps", "x"], "--steps"),
        (["--num_generations", "0"], "`num_generations` is 0"),
        (["--variants", "clean,rude"], "names ['rude']. Expected some of: clean,duplicate"),
        (["--variant", "clean"], "--variant (did you mean --variants?)"),
        (["--action_fields", "query"], "the simulation writes no other actions"),
        (["--dataset", "no.jsonl"], "there is no dataset file no.jsonl"),
        (["--judge_api_key_env", "NO_SUCH_KEY"], "NO_SUCH_KEY, which is not set"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_told_at_once_and_nothing_is_started(arguments, message, capsys):
    started = time.monotonic()
    assert main(arguments) == 2
    check_seconds(time.monotonic() - started, most=5)  # the embedded services alone take a second
    told = capsys.readouterr()
    assert message in told.err
    assert told.out == ""
