"""Datasets of anybody's: the branch of each row, the columns that they may not have, and ids of their rows."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from datasets import Dataset

from salesrl_trl.errors import ConfigError, DataError
from salesrl_trl.types import ALL, Example

COLUMN = "branch"  # of a dataset


@dataclass(frozen=True, slots=True)
class Branches:
    """The names of branches. The column `COLUMN` says which one a row belongs to."""

    names: tuple[str, ...]

    @classmethod
    def of_data(cls, names: Sequence[str], dataset: object) -> "Branches":
        """The branches of a run: the `names` of the settings, or without them those in the training rows. Raises
        `ConfigError` if a row's branch is none of the names, or there are several names and no column."""
        values: list[str] | None = None
        if isinstance(dataset, Dataset) and COLUMN in dataset.column_names:
            values = [str(value) for value in dataset.unique(COLUMN)]
        branches = cls(tuple(names or sorted(values or [ALL])))
        for value in values or ():
            branches.of({COLUMN: value})
        if values is None and isinstance(dataset, Dataset) and len(dataset):
            branches.of(dataset[0])
        return branches

    def of(self, example: Example) -> str:
        """The branch of a row. Raises `ConfigError` if it is none of the names, or the row does not say it."""
        if COLUMN not in example and len(self.names) == 1:
            return self.names[0]
        if COLUMN not in example:
            raise ConfigError(
                f"`branches` is {', '.join(self.names)}, and the dataset has no column {COLUMN!r}. "
                f"It has: {', '.join(example)}. Expected the branch of each row. Add the "
                "column, or name one branch."
            )
        branch = str(example[COLUMN])
        if branch not in self.names:
            raise ConfigError(
                f"a row's column {COLUMN!r} is {branch!r}. Expected one of `branches`: "
                f"{', '.join(self.names)}. Correct the column, or add the branch."
            )
        return branch

    def of_rows(self, dataset: Dataset) -> list[str]:
        if COLUMN not in dataset.column_names:
            return [self.names[0]] * len(dataset)
        return [self.of({COLUMN: value}) for value in dataset[COLUMN]]

    def ids(self, rows: Sequence[Example]) -> list[int]:
        """The number of each row's branch."""
        return [self.names.index(self.of(row)) for row in rows]


TAKEN = ("prompts", "completions", "trainer_state", "log_extra", "log_metric")  # TRL's names for what functions get


def check_not_taken(columns: Collection[str], taken: Collection[str] = TAKEN) -> None:
    """Raise `DataError` for a column that has a name by which functions get something else."""
    if both := {*taken} & {*columns}:
        raise DataError(f"the rows have the column `{min(both)}`, a name that the trainer needs. Rename it.")


def with_ids(dataset: object, name: str = "row") -> object:
    """A dataset of anybody's with the column `id`, as the record names its rows: `row-17` for the place 17. One that
    has the column, or is a stream, stays as it is. Of a dictionary all datasets."""
    if isinstance(dataset, dict):
        return {key: with_ids(part, f"{name}-{key}") for key, part in dataset.items()}
    if not isinstance(dataset, Dataset) or "id" in dataset.column_names:
        return dataset
    return dataset.add_column("id", [f"{name}-{place}" for place in range(len(dataset))])
