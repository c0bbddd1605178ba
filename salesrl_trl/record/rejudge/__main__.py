"""`python -m salesrl_trl.record.rejudge RUN [--SETTING VALUE ...]`.

Judges a recorded run again and reports how rewards and advantages would have changed. Exit code: 0; 2 for invalid
input; 3 for a failed service; 130 after Ctrl-C.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.command_line import ended, given, parser_of
from salesrl_trl.ground.texts import aligned
from salesrl_trl.launch.process import begin_run
from salesrl_trl.launch.settings_help import answer_help
from salesrl_trl.names import SETTINGS_FILE
from salesrl_trl.record.reader import recorded

if TYPE_CHECKING:
    from salesrl_trl.record.rejudge.rejudging import ScoreChange


def main(argv: Sequence[str] | None = None) -> int:
    """Rejudge and print. Returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    answer_help(arguments, own=parser_of("rejudge").format_help())
    return ended(arguments, lambda: _prepared(arguments))


def _prepared(argv: Sequence[str]) -> Callable[[], int]:
    """Read and check the settings and the record. The returned function judges, compares and prints."""
    run, arguments = _run_of(argv)

    # slow imports
    from salesrl_trl.launch.checks.dataset import own_records, rows_of
    from salesrl_trl.launch.data_config import DataConfig
    from salesrl_trl.launch.reward_config import RewardConfig
    from salesrl_trl.launch.services_plan import StepSettings
    from salesrl_trl.launch.settings import parse_part
    from salesrl_trl.record.rejudge.rejudging import changes, of_all_functions, rejudged
    from salesrl_trl.types import JUDGE, SALES

    data, reward, others = parse_part(arguments, (DataConfig, RewardConfig, StepSettings))
    reward = dataclasses.replace(reward, replay=None, verbose=[])  # without the drift monitor's second judge
    scale = {"True": "group", "False": "none"}.get(str(others.scale_rewards), str(others.scale_rewards))
    completions = [*recorded(run, "train")]
    rows = rows_of(own_records(data, reward), others.branches, None)  # any row the run may have drawn
    branches = others.branches or sorted({row.branch for row in rows})
    functions = reward.reward_funcs or [SALES]
    weights = [*map(float, others.reward_weights or [1.0] * len(functions))]
    unknown = sorted({completion.row for completion in completions} - {row.row_id for row in rows})
    if SALES not in functions and not reward.judges_answers:
        raise ConfigError(
            f"`reward_funcs` is {reward.reward_funcs}, only custom functions. Expected `{SALES}` or `{JUDGE}` among "
            "them: only the built-in reward can be judged again."
        )
    if not completions:
        raise ConfigError(f"the record of {run} does not contain training completions.")
    if unknown:
        raise ConfigError(
            f"{len(unknown)} rows of the record are not in the dataset, e.g. {unknown[0]!r}. Expected the run's "
            "dataset: pass its `--dataset`."
        )

    def work() -> int:
        judged = [
            of_all_functions(completion, new, weights, JUDGE if reward.judges_answers else SALES)
            for completion, new in zip(completions, rejudged(reward, completions, rows, branches), strict=True)
        ]
        print(text_of(changes(completions, judged, scale, others.hybrid_reference_weight)))
        return 0

    return work


def _run_of(argv: Sequence[str]) -> tuple[Path, list[str]]:
    arguments = [*argv]
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError("the run is not named. Expected its output folder first: RUN [--SETTING VALUE ...].")
    run = Path(arguments.pop(0)).expanduser()
    recipe = run / SETTINGS_FILE
    own = ["--config", str(recipe)] if recipe.is_file() and given(arguments, "config") is None else []
    return run, [*own, *arguments]


def text_of(compared: "Sequence[ScoreChange]") -> str:
    rows = [
        (
            change.branch, str(change.completions), f"{change.scored_before} → {change.scored_after}",
            f"{change.mean_before:.3f} → {change.mean_after:.3f}", f"{change.reward_correlation:.3f}",
            f"{change.advantage_correlation:.3f}", f"{change.sign_flips:.1%}",
        )
        for change in compared
    ]  # fmt: skip
    head = ("branch", "completions", "scored", "mean reward", "rewards", "advantages", "sign flips")
    legend = "scored, mean reward: before and after. rewards, advantages: correlation of before and after."
    return "\n".join([*aligned([head, *rows]), legend])


if __name__ == "__main__":
    begin_run(is_recipe=False)  # a signal ends it as Ctrl-C does
    sys.exit(main())
