"""Arbitrary datasets: the branch of each row, reserved column names, and row ids."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from datasets import Dataset

from salesrl_trl.errors import ConfigError, DataError
from salesrl_trl.types import ALL, Example

COLUMN = "branch"  # column of a dataset


@dataclass(frozen=True, slots=True)
class Branches:
    """The branch names. The column `COLUMN` assigns each row to one of them."""

    names: tuple[str, ...]

    @classmethod
    def of_data(cls, names: Sequence[str], dataset: object) -> "Branches":
        """A run's branches: the configured `names`, or by default those in the training rows. Raises `ConfigError` if
        a row's branch is unknown, or if there are several names but the column is absent."""
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
        """The branch of a row. Raises `ConfigError` if it is unknown or absent."""
        if COLUMN not in example and len(self.names) == 1:
            return self.names[0]
        if COLUMN not in example:
            raise ConfigError(
                f"`branches` is {', '.join(self.names)}, but the dataset lacks the column {COLUMN!r}. "
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
        """The index of each row's branch."""
        return [self.names.index(self.of(row)) for row in rows]


TAKEN = ("prompts", "completions", "trainer_state", "log_extra", "log_metric")  # TRL's argument names


def check_not_taken(columns: Collection[str], taken: Collection[str] = TAKEN) -> None:
    """Raise `DataError` for a column whose name is reserved for another argument of reward functions."""
    if both := {*taken} & {*columns}:
        raise DataError(f"the rows have the column `{min(both)}`, a name that the trainer reserves. Rename it.")


def with_ids(dataset: object, name: str = "row") -> object:
    """Add the column `id`, by which recordings identify rows, e.g. `row-17` for row 17. Datasets that have the column,
    and streams, are returned unchanged. A dictionary of datasets is processed recursively."""
    if isinstance(dataset, dict):
        return {key: with_ids(part, f"{name}-{key}") for key, part in dataset.items()}
    if not isinstance(dataset, Dataset) or "id" in dataset.column_names:
        return dataset
    return dataset.add_column("id", [f"{name}-{place}" for place in range(len(dataset))])
