"""A trainer with reward functions of a user's own: against stock TRL, and where they fail."""

import itertools
import re
import threading
from contextlib import closing

import pytest
import torch
from datasets import Dataset, IterableDataset
from seams.own_reward import shortness
from support.loopback import row
from support.scripted import length, settings, steps_of
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.data.rows import parse_row
from salesrl_trl.errors import ConfigError, DataError, FunctionError, ServiceUnavailable, TooFewRewardsError
from salesrl_trl.launch.assembly import open_reward
from salesrl_trl.launch.data.sources import prompt_dataset
from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.record.reader import open_record, record_file, recorded
from salesrl_trl.record.view import queries
from salesrl_trl.record.view.record_index import Index
from salesrl_trl.reward.functions import per_completion, per_group
from salesrl_trl.reward.reward_funcs import RewardFuncs
from salesrl_trl.service.transport import Transport
from salesrl_trl.telemetry.completion_record import Judged
from salesrl_trl.trainer import SalesGRPOTrainer
from salesrl_trl.types import Reward

KINDS = ["short", "long"] * 8
ROWS = [
    {"prompt": [{"role": "user", "content": f"Question {place}"}], "kind": kind, "answer": str(place % 3)}
    for place, kind in enumerate(KINDS)
]
OURS = ("loss", "grad_norm", "reward", "reward_std", "frac_reward_zero_std", "entropy", "completions/mean_length")


async def answered(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric, **kwargs):
    log_extra("asked", list(answer))
    log_metric("steps_so_far", trainer_state.global_step)
    return [(len(ids) + int(each)) % 5 / 5 for ids, each in zip(completion_ids, answer, strict=True)]


def for_short_ones(completions, kind, **kwargs):
    """Does not apply to some prompts, as with several tasks."""
    return [len(each[0]["content"]) % 3 if of == "short" else None for each, of in zip(completions, kind, strict=True)]


@per_completion
async def words(prompt, completion, answer):
    text = completion[0]["content"]
    return Reward.scored(len(text.split()) % 4 / 4, letters=len(text) / 10)


@per_group
def order(prompt, completions):
    ranked = sorted(str(each) for each in completions)
    return [ranked.index(str(each)) / len(ranked) for each in completions]


def run(policy, kind, config, functions, folder, rows=ROWS, **given):
    """The log lines of a trainer's steps."""
    more = {name: given.pop(name) for name in ("reward_processing_classes", "eval_dataset") if name in given}
    usual = {"max_steps": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4}
    bits = {"shared_prompts": "off"} if config is SalesGRPOConfig else {}  # without: but for rounding
    args = config(**settings(folder, **{"beta": 0.0, **usual, "max_completion_length": 16, **bits, **given}))
    dataset = rows if isinstance(rows, IterableDataset) else Dataset.from_list(rows)
    trainer = kind(str(policy), functions, args, dataset, **more)
    trainer.train()
    if isinstance(trainer, SalesGRPOTrainer):
        trainer.finish()
    return trainer, steps_of(trainer)


def same(ours, stock, names=OURS):
    assert len(ours) == len(stock) > 0
    for name in (*names, *(name for name in stock[0] if name.startswith("rewards/"))):
        assert [line[name] for line in ours] == [line[name] for line in stock], name


@pytest.mark.parametrize(
    ("functions", "given"),
    [
        (length, {}),
        ([length, answered], {"reward_weights": [2.0, 0.5]}),
        ([for_short_ones, length], {}),
        ([words, order], {"scale_rewards": "batch"}),
        ([length, answered], {"multi_objective_aggregation": "normalize_then_sum", "log_completions": True}),
    ],
    ids=["one", "weighed, async", "not for all", "by completion and by group", "normalised"],
)
def test_two_names_changed_the_run_is_stock_trls_to_the_bit(tiny, tmp_path, functions, given):
    _, stock = run(tiny, GRPOTrainer, GRPOConfig, functions, tmp_path / "stock", **given)
    _, ours = run(tiny, SalesGRPOTrainer, SalesGRPOConfig, functions, tmp_path / "ours", **given)
    same(ours, stock)
    assert [line.get("steps_so_far") for line in ours] == [line.get("steps_so_far") for line in stock]
    assert all(line["outcome/ok"] == 1.0 for line in ours)
    if functions == [words, order]:
        assert all(line["rewards/words/letters"] > 0 for line in ours)


def test_with_a_plain_config_the_trainer_is_trls_own(tiny, tmp_path):
    functions = [answered, for_short_ones, words, order]
    _, stock = run(tiny, GRPOTrainer, GRPOConfig, functions, tmp_path / "stock")
    trainer, plain = run(tiny, SalesGRPOTrainer, GRPOConfig, functions, tmp_path / "plain")
    assert type(trainer) is GRPOTrainer
    assert [{**line, "step_time": 0} for line in plain] == [{**line, "step_time": 0} for line in stock]


def test_what_trls_own_trainer_has_no_place_for_is_refused_with_a_plain_config(tiny, tmp_path):
    class Mine(SalesGRPOTrainer):
        pass

    for kind, given in ((SalesGRPOTrainer, {"parts": ()}), (Mine, {})):
        with pytest.raises(ConfigError, match=r"Expected (a `SalesGRPOConfig`|one;)"):
            kind(str(tiny), length, GRPOConfig(**settings(tmp_path)), Dataset.from_list(ROWS), **given)


def test_the_record_names_rows_and_says_what_each_function_said_and_asked(tiny, tmp_path):
    """Of rows without ids, over two epochs; a failed completion says why, in words that quote nobody."""
    failing = itertools.cycle([True, False])
    limits = {"max_concurrency": 9, "attempt_timeout_s": 5.0, "max_attempts": 3, "hedge_fraction": 0.0}

    @per_completion(transport=Transport("grader", **limits))
    async def graded(prompt, completion):
        if next(failing):
            raise ServiceUnavailable("down", "grader_down")
        return Reward.scored(0.5, reason="well put", polite=1.0)

    @per_group(transport=Transport("ranker", **limits))
    async def ranked(prompt, completions):
        return [0.25] * len(completions)

    def raises(completions, answer, log_extra, **kwargs):
        log_extra("expected", answer)
        if answer[0] == "1":
            raise ValueError("the customer said: secret")
        return [None if each == "2" else 0.0 for each in answer]

    trainer, _ = run(
        tiny, SalesGRPOTrainer, SalesGRPOConfig, [graded, ranked, raises], tmp_path, ROWS[:4], max_steps=8,
        gradient_accumulation_steps=1, min_valid_reward_fraction=0.0, reward_weights=[1.0, 2.0, 1.0], record=True,
        eval_dataset=Dataset.from_list(ROWS[:1]), eval_strategy="steps", eval_steps=8,
    )  # fmt: skip
    found = [*recorded(tmp_path)]
    # 1. A row has one name.
    names = {each.row: each.step for each in found if each.mode == "train"}
    assert names.keys() == {f"row-{place}" for place in range(4)}
    assert all(step > 4 for step in names.values())  # the second epoch
    assert {each.row for each in found if each.mode == "eval"} == {"held-out-0"}
    # 2. What functions said, and why one said no number.
    by_answer = {ROWS[int(each.row[-1])]["answer"]: each for each in found if each.mode == "train"}
    zero, one, two = (by_answer[answer] for answer in "012")
    assert zero.verdicts["graded"] == Judged(candidate=0.5, reference=None, reason="well put", provider="")
    assert (zero.parts, zero.functions) == ({"graded/polite": 1.0}, {"graded": 0.5, "ranked": 0.25, "raises": 0.0})
    assert zero.reward == pytest.approx(1.0)
    assert zero.reason == ""
    assert zero.verdicts["expected"].reason == "0"
    assert re.fullmatch(r"raises raised ValueError at \S+test_own_functions.py:\d+", one.verdicts["raises"].reason)
    assert (one.reward, one.reason) == (None, "raises_raised_ValueError")
    assert two.verdicts["raises"].reason == "raises returned None"
    # 3. What was sent for each of them.
    with closing(Index([tmp_path])) as index:
        index.refresh()
        shown = queries.completion(index, {"id": f"0-0-{zero.id}"})
    assert shown["weights"] == {"graded": 1.0, "ranked": 2.0, "raises": 1.0}
    calls = sorted((call["service"], call["path"], call["failure"]) for call in shown["calls"])
    assert calls[:1] + calls[-1:] == [("grader", "", ""), ("ranker", "group", "")]
    assert {*calls[1:-1]} <= {("grader", "", "grader_down")}
    file = open_record(record_file(tmp_path, 0))
    assert not [text for [text] in file.execute("SELECT reason FROM verdicts") if "secret" in text]
    sent = dict(file.execute("SELECT service, count(*) FROM calls GROUP BY 1").fetchall())
    file.close()
    assert sent["ranker"] == len(found)  # one call for each group of 4, which each of the 4 has
    assert sent["grader"] > len(found)
    # 4. Figures are of what the task has.
    tags = trainer.state.log_history[0].keys()
    assert not [tag for tag in tags if re.search("judge_s|rag_|reference_missing|saved", tag)]


def test_a_reward_model_among_functions_and_a_streamed_dataset(tiny, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny)
    model.config.num_labels, model.config.pad_token_id = 1, 0
    kind = AutoModelForSequenceClassification.from_config(model.config)
    folder = tmp_path / "judge"
    kind.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    rows = Dataset.from_list(ROWS).to_iterable_dataset()
    functions = [str(folder), length, for_short_ones]
    held_out = {"a": Dataset.from_list(ROWS[:2])}
    found = {
        name: run(tiny, kind, config, functions, tmp_path / name, rows, eval_dataset=held_out)[1]
        for name, kind, config in (("stock", GRPOTrainer, GRPOConfig), ("ours", SalesGRPOTrainer, SalesGRPOConfig))
    }
    same(found["ours"], found["stock"])
    assert all(line["outcome/ok"] == 1.0 for line in found["ours"])
    assert found["ours"][0]["reward/all"] == pytest.approx(found["ours"][0]["reward"], rel=1e-6)


def test_branches_come_from_the_column_branch(tiny, tmp_path):
    rows = [{**row, "branch": row["kind"]} for row in ROWS]
    given = {"rows": rows, "branch_kl": {"long": {"beta": 0.3}, "short": {"beta": 0.1}}}
    trainer, lines = run(tiny, SalesGRPOTrainer, SalesGRPOConfig, length, tmp_path, **given)
    assert trainer.args.branches == ["long", "short"]
    config = SalesGRPOConfig(**settings(tmp_path))
    SalesGRPOTrainer(str(tiny), length, config, Dataset.from_list(ROWS)).finish()
    assert config.branches == []  # the next trainer's rows may have others
    assert {"reward/long", "kl/long", "beta/short"} <= lines[0].keys()
    with pytest.raises(ConfigError, match=r"column 'branch' is 'long'. Expected one of `branches`: short"):
        run(tiny, SalesGRPOTrainer, SalesGRPOConfig, length, tmp_path, rows=rows, branches=["short"])
    with pytest.raises(ConfigError, match=r"lacks the column 'branch'. It has: prompt, kind, answer"):
        run(tiny, SalesGRPOTrainer, SalesGRPOConfig, length, tmp_path, branches=["short", "long"])


def partly_broken(completions, **kwargs):
    """Every group has one completion without a number."""
    return [None if place % 4 == 0 else length([each])[0] for place, each in enumerate(completions)]


def test_the_calls_of_an_evaluation_are_out_together_and_its_figures_are_trls(tiny, tmp_path):
    rows, batches = Dataset.from_list(ROWS[:7]), 4  # 7 rows with 2 completions, in batches of 4: the last is half full
    met = threading.Barrier(batches, timeout=60)

    def meets(completions, **kwargs):
        met.wait()  # raises, unless all calls are out at once
        return length(completions)

    def evaluated(kind, config, function, folder):
        given = {"per_device_eval_batch_size": 4, "num_generations": 4, "num_generations_eval": 2, "beta": 0.1}
        args = config(**settings(folder, **{"max_completion_length": 16, "per_device_train_batch_size": 4, **given}))
        trainer = kind(str(tiny), function, args, Dataset.from_list(ROWS), rows)
        torch.manual_seed(1)
        return trainer.evaluate()

    stock = evaluated(GRPOTrainer, GRPOConfig, length, tmp_path / "stock")
    ours = evaluated(SalesGRPOTrainer, SalesGRPOConfig, meets, tmp_path / "ours")
    assert ours["eval_outcome/ok"] == 1.0
    names = [name for name in stock if not re.search("second|time|rewards/|kl", name)]
    assert "eval_reward_std" in names and "eval_loss" in names
    assert {name: ours[name] for name in names} == pytest.approx({name: stock[name] for name in names}, rel=1e-5)


def test_one_missing_of_several_biases_no_advantage(tiny, tmp_path):
    functions, logs = [partly_broken, lambda completions, **_: [5.0] * len(completions)], []

    class Watched(SalesGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            logs.append(output["advantages"].view(-1, 4))
            return output

    _, lines = run(tiny, Watched, SalesGRPOConfig, functions, tmp_path)
    for advantages in logs:
        assert advantages[:, 0].tolist() == [0.0, 0.0]  # TRL would make it the worst, 5 less than nothing less
        assert advantages.sum(dim=1).tolist() == pytest.approx([0.0, 0.0], abs=1e-5)
    assert all(line["outcome/infra"] == 0.25 for line in lines)
    assert all(5.0 <= line["reward"] < 6.0 for line in lines)


def too_few(completions, **kwargs):
    return [0.5]


def test_a_function_that_is_always_wrong_ends_the_run_at_its_first_batch(tiny, tmp_path):
    said = rf"too_few \(at {__file__}:\d+\) returned 1 rewards for 8 completions. Expected one each"
    with pytest.raises(FunctionError, match=f"the reward function {said}.*All 8 completions of the first batch"):
        run(tiny, SalesGRPOTrainer, SalesGRPOConfig, [length, too_few], tmp_path, save_strategy="steps", save_steps=1)
    assert not [*tmp_path.glob("checkpoint-*")]


def test_a_function_that_was_right_once_is_a_failure_of_later_batches(tiny, tmp_path):
    calls = []

    def forgets(completions, **kwargs):
        calls.append(0)
        return length(completions)[: 8 if len(calls) == 1 else 1]

    with pytest.raises(TooFewRewardsError, match="forgets_wrong_length 8"):
        run(tiny, SalesGRPOTrainer, SalesGRPOConfig, forgets, tmp_path, max_steps=4)


@pytest.mark.parametrize("kind", ["steps", "epochs", "streamed"])
def test_rows_for_less_than_a_step_are_an_error(tiny, tmp_path, kind):
    rows = Dataset.from_list(ROWS[:3]).to_iterable_dataset() if kind == "streamed" else ROWS[:3]
    more = {"per_device_train_batch_size": 8, "num_generations": 2, "max_steps": -1 if kind == "epochs" else 2}
    with pytest.raises(DataError, match=r"has (3|too few) rows, but a generation batch needs 8 prompts: no step"):
        run(tiny, SalesGRPOTrainer, SalesGRPOConfig, length, tmp_path, rows, **more)


def test_a_function_that_fails_at_times_loses_no_step(tiny, tmp_path):
    calls = []

    def flaky(completions, **kwargs):
        calls.append(len(completions))
        if len(calls) == 2:
            raise ConnectionResetError
        return length(completions)

    _, lines = run(tiny, SalesGRPOTrainer, SalesGRPOConfig, flaky, tmp_path)
    assert [line["failures/skipped_update"] for line in lines] == [0.0, 1.0, 0.0]
    assert [line["outcome/infra"] for line in lines] == [0.0, 1.0, 0.0]
    assert len(lines) == 3
    assert all(0 < line["time/flaky_p50_s"] <= line["time/flaky_max_s"] for line in lines)


def test_a_group_that_lies_on_two_processes_and_a_column_that_is_not_there_are_refused_at_once(tiny, tmp_path):
    rewards = RewardFuncs.of(order, None, None)
    rewards.check(["prompt"], group=8, size=16)
    with pytest.raises(ConfigError, match="scores the 8 completions of a prompt jointly, but a process generates 4"):
        rewards.check(["prompt"], group=8, size=4)
    rewards.reward_loop.close()
    with pytest.raises(ConfigError, match=r"'words', which scores a completion, requires 'answer'.*: prompt, kind"):
        rows = [{name: each[name] for name in ("prompt", "kind")} for each in ROWS]
        run("/before/a/model/is/loaded", SalesGRPOTrainer, SalesGRPOConfig, words, tmp_path, rows)


def spoil(value):
    """Write into everything that is inside of an argument."""
    if isinstance(value, list):
        for part in value:
            spoil(part)
        value.append("SPOILT")
    elif isinstance(value, dict):
        for part in value.values():
            spoil(part)
        value |= dict.fromkeys((*value, "more"), "SPOILT")


def test_functions_that_write_into_their_arguments_change_nothing_for_others(tiny, tmp_path):
    """Neither what another function gets, nor the record, nor the next step over the same rows."""
    rows = [{**row, "facts": [{"place": str(at)}]} for at, row in enumerate(ROWS[:2])]
    seen = []

    def spoils(**arguments):
        scores = [0.0] * len(arguments.get("completions", ["one"]))
        for name in ("prompt", "prompts", "completion", "completions", "completion_ids", "facts"):
            spoil(arguments.get(name))
        return scores

    @per_completion
    def of_one(**arguments):
        return spoils(**arguments)[0]

    @per_group
    def of_a_group(**arguments):
        return spoils(**arguments)

    async def later(prompts, completions, facts, **others):
        return spoils(prompts=prompts, completions=completions, facts=facts)

    def reads(prompts, completions, facts, **others):
        seen.extend([prompts, completions, facts])
        return [len(str(each)) / 1000 for each in completions]

    functions = [spoils, of_one, of_a_group, later, reads]
    run(tiny, SalesGRPOTrainer, SalesGRPOConfig, functions, tmp_path, rows, record=True)
    found = [*recorded(tmp_path)]
    assert len(seen) == 9 and len(found) == 24
    assert "SPOILT" not in repr(seen) + repr(found)


def test_half_a_surrogate_pair_of_a_function_or_a_streamed_row_ends_no_run(tiny, tmp_path):
    half, whole = "half \ud83d", "half \ufffd"
    seen = []

    def logs(completions, note, log_extra, log_metric, **others):
        seen.extend(note)
        log_extra(half, [{half: [half]}] * len(completions))
        log_metric(half, 1.0)
        return [Reward.scored(place / 4, reason=half, **{half: 0.5}) for place in range(len(completions))]

    rows = [{**row, "prompt": [{"role": "user", "content": f"{place} {half}"}], "note": half} for place, row in
            enumerate(ROWS)]  # fmt: skip
    stream = IterableDataset.from_generator(lambda: iter(rows))
    given = {"record": True, "log_completions": True, "report_to": "tensorboard"}
    _, lines = run(tiny, SalesGRPOTrainer, SalesGRPOConfig, logs, tmp_path, stream, **given)
    assert {*seen} == {whole}
    assert [line[whole] for line in lines] == [1.0] * 3
    found = [*recorded(tmp_path)]
    assert len(found) == 24
    assert all(each.verdicts[whole].reason == str({whole: [whole]}) for each in found)
    assert {each.verdicts["logs"].reason for each in found} == {whole}


def test_a_column_may_have_any_name_but_those_of_trls_arguments(tiny, tmp_path):
    def reads(completions, **columns):
        assert (columns["self"], columns["cls"], columns["args"]) == (["a"] * 8, ["b"] * 8, ["c"] * 8)
        return [0.5] * len(completions)

    rows = [{**row, "self": "a", "cls": "b", "args": "c"} for row in ROWS]
    _, lines = run(tiny, SalesGRPOTrainer, SalesGRPOConfig, reads, tmp_path, rows)
    assert [line["reward"] for line in lines] == [0.5] * 3
    with pytest.raises(DataError, match="column `log_extra`, a name that the trainer reserves"):
        run(tiny, SalesGRPOTrainer, SalesGRPOConfig, reads, tmp_path, [{**row, "log_extra": 1} for row in ROWS])


# In a recipe, by their paths


def test_a_recipe_names_functions_by_their_paths_and_needs_no_service_then(tmp_path):
    rows = [row("r1"), row("r2")]
    training = SalesGRPOConfig(**settings(tmp_path), reward_weights=[0.5, 2.0])
    config = RewardConfig(reward_funcs=["seams.own_reward.shortness", "seams.own_reward.of_trl"])
    with open_reward(config, training, rows) as reward:
        assert (reward.names.functions, reward.names.services) == (
            {"shortness": "shortness", "of_trl": "of_trl"},
            ("shortness", "of_trl"),
        )
    assert not config.embeds_rag
    assert not config.embeds_judge
    with open_reward(RewardConfig(reward_funcs=["seams.own_reward.shortness"]), training, rows) as reward:
        assert reward is shortness


def test_functions_get_the_rows_further_columns():
    record = {"id": "a", "branch": "tone", "conversation": [{"role": "user", "content": "Hi"}], "level": 3}
    rows = [parse_row({**record, **more}, 0, (), "here") for more in ({}, {"level": 4, "gold": "x"})]
    built = prompt_dataset([[], []], rows, for_functions=True)
    assert built[0]["conversation"] == [{"role": "customer", "content": "Hi"}]
    assert (built["level"][:], built["gold"][:], built["id"][:]) == ([3, 4], [None, "x"], ["a", "a"])
