"""The order of a rejudging: settings, the record, verdicts, comparison, the new record."""

import dataclasses
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import stamina

from salesrl_trl.build.assembly import addresses, budget_of, build_services
from salesrl_trl.build.checks.reward import check_judges, read_reward
from salesrl_trl.build.checks.rows import own_records, training_records
from salesrl_trl.build.settings import parse_part
from salesrl_trl.config import DataConfig, RewardConfig
from salesrl_trl.config.reward import SALES
from salesrl_trl.data.sources import check_rows
from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.process import make_private
from salesrl_trl.names import Stage
from salesrl_trl.recording.reader import Recorded, as_json, open_record, record_files, recorded
from salesrl_trl.recording.schema import rank_of, record_file
from salesrl_trl.recording.trail import Trail
from salesrl_trl.recording.writer import add_verdicts, judge_columns
from salesrl_trl.rejudge.answers import RecordedRag
from salesrl_trl.rejudge.comparison import Baseline, Judgement, Pair, ScoreChange, advantages, changes
from salesrl_trl.reward.cache import AnswerStore
from salesrl_trl.reward.chain import SalesReward
from salesrl_trl.reward.reward_loop import RewardLoop
from salesrl_trl.run.tools import exit_code_of, strict_json
from salesrl_trl.types import Outcome, Reward, SalesRow

AT_ONCE = 256
"""Completions that are begun together. The judge's own limits hold beside it."""
DESCRIPTION = (
    "Judge a recorded run again, by other settings than its own: another judge, rubrics or weights. Says how much "
    "rewards and advantages would have changed. Answers come from the record. Takes every setting of a recipe; those "
    "that are not given are the run's own."
)


@dataclass
class RejudgeConfig:
    """The settings that a rejudging adds to those of a run."""

    output: str | None = field(
        default=None, metadata={"help": "folder for a record with the new verdicts and rewards, for `--replay`"}
    )
    json: bool = field(default=False, metadata={"help": "one JSON object on stdout"})


def main(argv: Sequence[str] | None = None) -> int:
    """Rejudge and print. Returns the exit code."""
    stamina.instrumentation.set_on_retry_hooks([])
    given = sys.argv[1:] if argv is None else argv
    return exit_code_of(given, lambda: _prepared(given))


def _prepared(argv: Sequence[str]) -> Callable[[], int]:
    run, settings = _run_of(argv)
    own, data, reward, others = parse_part(
        settings,
        (RejudgeConfig, DataConfig, RewardConfig),
        usage="%(prog)s RUN [--output FOLDER] [--json] [--SETTING VALUE ...]",
        description=DESCRIPTION,
    )
    reward = dataclasses.replace(reward, replay=None, reference_cache="")
    scale = {"True": "group", "False": "none"}.get(str(others.scale_rewards), str(others.scale_rewards))
    baseline = Baseline(scale, others.hybrid_reference_weight)
    completions = [*recorded(run, "train")]
    branches = sorted({each.branch for each in completions})
    rows = check_rows(training_records(data, own_records(data)), branches, data.max_train_rows)
    _check(own, run, completions, rows, reward)
    functions = reward.reward_funcs or [SALES]
    weights = [*map(float, others.reward_weights or [1.0] * len(functions))]

    def work() -> int:
        found = [
            (of_all_functions(each, new, weights), trail)
            for each, (new, trail) in zip(completions, rejudged(reward, completions, rows, branches), strict=True)
        ]
        pairs = [_pair(each, new) for each, (new, _) in zip(completions, found, strict=True)]
        compared = changes(pairs, baseline)
        if own.output is not None:
            new = advantages(pairs, [each.after for each in pairs], baseline)
            write(run, Path(own.output).expanduser(), completions, found, new)
        print(strict_json([dataclasses.asdict(each) for each in compared]) if own.json else text_of(compared))
        return 0

    return work


def _run_of(argv: Sequence[str]) -> tuple[Path, list[str]]:
    """The run, and the settings: those of its recipe first."""
    given = [*argv]
    if given[:1] in (["-h"], ["--help"]):
        return Path(), given
    if not given or given[0].startswith("-"):
        raise ConfigError("no run is named. Expected its output folder first: RUN [--SETTING VALUE ...].")
    run = Path(given.pop(0)).expanduser()
    recipe = run / "config.yaml"
    own = ["--config", str(recipe)] if recipe.is_file() and "--config" not in given else []
    return run, [*own, *given]


def _check(
    own: RejudgeConfig, run: Path, completions: Sequence[Recorded], rows: Sequence[SalesRow], reward: RewardConfig
) -> None:
    if reward.reward_funcs and SALES not in reward.reward_funcs:
        raise ConfigError(
            f"`reward_funcs` is {reward.reward_funcs}, functions of your own alone. Expected `{SALES}` among them: "
            "the packaged reward is what is judged again."
        )
    unknown = sorted({each.row for each in completions} - {row.row_id for row in rows})
    if not completions:
        raise ConfigError(f"the record of {run} has no completion of training. Expected some.")
    if unknown:
        raise ConfigError(
            f"{len(unknown)} rows of the record are not in the dataset, such as {unknown[0]!r}. Expected the dataset "
            "of the run: give its `--dataset`."
        )
    if own.output is not None and record_files(Path(own.output).expanduser()):
        raise ConfigError(f"`--output` is {own.output!r}, which has a record already. Expected another folder.")


def rejudged(
    config: RewardConfig, completions: Sequence[Recorded], rows: Sequence[SalesRow], branches: Sequence[str]
) -> list[tuple[Reward, Trail]]:
    """The rewards of these completions by these settings, with what the judge said."""
    parts = read_reward(config, branches)
    check_judges(config, parts)
    places = {row.row_id: place for place, row in enumerate(rows)}
    with addresses(config) as urls, tempfile.TemporaryDirectory() as folder:
        budget = budget_of(config, Path(folder))  # the limits hold for this command alone
        _, judge = build_services(config, parts, *urls, budget=budget)
        rag = RecordedRag(completions, {row.row_id: row for row in rows})
        chain = SalesReward(
            rows, rag, judge, parts.scoring, stages=parts.stages, score_threshold=config.rag_score_threshold,
            top_k=config.rag_top_k, deadline_s=config.reward_deadline_s, action_format=config.action_format(),
            references=AnswerStore(), records=True,
        )  # fmt: skip
        chain.budget = budget
        reward_loop = RewardLoop(chain)
        found: list[tuple[Reward, Trail]] = []
        try:
            for first in range(0, len(completions), AT_ONCE):
                part = completions[first : first + AT_ONCE]
                batch = reward_loop.begin([{"row": places[each.row]} for each in part])
                result = reward_loop.result(batch, [each.text for each in part])
                trails = [stages.trail or Trail() for stages in batch.stages]
                found += zip(result.rewards, trails, strict=True)
        finally:
            reward_loop.close()
    return found


def of_all_functions(old: Recorded, new: Reward, weights: Sequence[float]) -> Reward:
    """The reward of several functions, of which the packaged one was judged again; the only one's as it is.

    Args:
        old (`Recorded`):
            The completion, with the numbers of all functions.
        new (`Reward`):
            Of the packaged function.
        weights (`Sequence[float]`):
            By function, in their order.
    """
    if len(weights) == 1:
        return new
    if old.reward is not None and not old.functions:
        raise ConfigError("the record has numbers of one reward function. Expected those of all in `reward_funcs`.")
    numbers = {**old.functions, SALES: new.value}
    is_known = old.reward is not None or all(each is not None for name, each in numbers.items() if name != SALES)
    if not old.functions or not is_known:  # another function failed: nobody knows its number now either
        return Reward(outcome=Outcome(old.outcome), value=None, reason=old.reason, by_function=old.functions)
    known = ((weight, each) for weight, each in zip(weights, numbers.values(), strict=True) if each is not None)
    return dataclasses.replace(
        new,
        value=None if new.value is None else sum(weight * each for weight, each in known),
        reference_value=None,
        components={**old.parts, **new.components},
        by_function=numbers,
    )


def _pair(completion: Recorded, new: Reward) -> Pair:
    return Pair(
        branch=completion.branch,
        batch=(completion.step, completion.batch),  # of all ranks
        group=completion.prompt_group,
        before=Judgement(completion.reward, completion.reference_reward),
        after=Judgement(new.value, new.reference_value),
    )


def write(
    run: Path,
    output: Path,
    completions: Sequence[Recorded],
    found: Sequence[tuple[Reward, Trail]],
    new: Sequence[float | None],
) -> None:
    """A copy of the record, with these rewards, verdicts and advantages in place of the recorded ones."""
    for number, path in enumerate(record_files(run)):
        copy = record_file(output, rank_of(path) or 0)
        copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_private(copy)
        with closing(open_record(path)) as old, closing(sqlite3.connect(copy)) as file:
            old.backup(file)
            with file:
                for each, (reward, trail), advantage in zip(completions, found, new, strict=True):
                    if each.file == number:
                        _replace(file, each, reward, trail, advantage)
    for name in ("config.yaml", "run.json"):
        if (run / name).is_file():
            shutil.copy(run / name, output / name)


def _replace(file: sqlite3.Connection, old: Recorded, reward: Reward, trail: Trail, advantage: float | None) -> None:
    again = {name: each for name, each in reward.seconds.items() if name not in (Stage.RAG_8B, Stage.RAG_32B)}
    values = {
        "outcome": reward.outcome.value,
        "reason": reward.reason,
        "reward": reward.value,
        "reference_reward": reward.reference_value,
        "parts": as_json(dict(reward.components)),
        "functions": as_json(dict(reward.by_function)),
        "seconds": as_json({**old.seconds, **again}),
        "advantage": advantage,
        **judge_columns(trail, reward.seconds),
    }
    columns = ", ".join(f"{name} = ?" for name in values)
    file.execute(f"UPDATE completions SET {columns} WHERE id = ?", (*values.values(), old.id))
    file.execute("DELETE FROM verdicts WHERE completion = ?", (old.id,))
    add_verdicts(file, old.id, trail.verdicts)


def text_of(compared: Sequence[ScoreChange]) -> str:
    """The comparison for people."""
    head = (
        f"{'branch':16}{'completions':>12}{'scored':>14}{'mean reward':>17}{'ranks':>8}{'advantages':>12}"
        f"{'moved by':>10}{'sign flips':>12}"
    )
    lines = [
        f"{each.branch:16}{each.completions:12d}{each.scored_before:7d}{each.scored_after:7d}"
        f"{each.mean_before:9.3f}{each.mean_after:8.3f}{each.rank_correlation:8.3f}{each.advantage_correlation:12.3f}"
        f"{each.mean_shift:10.3f}{each.sign_flips:12.1%}"
        for each in compared
    ]
    notes = (
        "scored, mean reward: before and after. ranks, advantages: Spearman's correlation of before and after.\n"
        "moved by: mean distance of advantages."
    )
    return "\n".join([head, *lines, notes])
