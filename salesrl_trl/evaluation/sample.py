"""The held-out rows of quick evaluations: the same all through a run, spread evenly over branches and processes.

Owns the choice of rows.
"""

from collections.abc import Sequence

from datasets import Dataset

from salesrl_trl.data.branches import Branches
from salesrl_trl.errors import ConfigError
from salesrl_trl.evaluation.answers import Ranks
from salesrl_trl.types import Example


def sample(dataset: object, rows: int, branches: Branches, ranks: Ranks) -> list[Example]:
    """This rank's rows.

    `dataset`: the trainer's `eval_dataset`, which may be anything that TRL takes. `rows`: number of rows on all ranks
    together. Each rank has at least one. `branches`: Say which branch a row belongs to.

    Raises:
        `ConfigError`: there are no held-out rows, or fewer than processes.
    """
    if not isinstance(dataset, Dataset):
        raise ConfigError(
            f"a quick evaluation takes its rows from `eval_dataset`, which is {type(dataset).__name__}. "
            "Expected a dataset. Give one, or set `quick_eval_steps: 0`."
        )
    branch_ids = [branches.names.index(branch) for branch in branches.of_rows(dataset)]
    chosen = spread(branch_ids, rows, len(branches.names), ranks.count)
    if not chosen:
        raise ConfigError(
            f"a quick evaluation has {len(branch_ids)} held-out rows for {ranks.count} processes. Expected one for "
            "each. Hold out more, or set `quick_eval_steps: 0`."
        )
    share = len(chosen) // ranks.count
    return [dataset[place] for place in chosen[ranks.index * share : (ranks.index + 1) * share]]


def spread(branch_ids: Sequence[int], rows: int, branches: int, processes: int) -> list[int]:
    """Places of the rows to evaluate: the first of each branch in turn.

    `branch_ids`: Branch of each held-out row. `processes`: Processes that share the work.

    Returns:
        `list[int]`: equally many for each process, and at least one. With too few rows: all of them, less the rest of
        that division.
    """
    by_branch = [[place for place, each in enumerate(branch_ids) if each == branch] for branch in range(branches)]
    turns = max((len(each) for each in by_branch), default=0)
    chosen = [each[turn] for turn in range(turns) for each in by_branch if turn < len(each)]
    return chosen[: min(max(rows, processes), len(chosen)) // processes * processes]
