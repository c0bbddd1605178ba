"""The branch of each row: the value of a column of the dataset.

Owns this column, and the branch of all rows where the dataset has no such column. The trainer's parts, evaluations and
checkpoints ask it. Knows no KL and no rubric.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from datasets import Dataset

from salesrl_trl.errors import ConfigError
from salesrl_trl.types import ALL, Example

COLUMN = "branch"  # of a dataset


@dataclass(frozen=True, slots=True)
class Branches:
    """The names of branches, and the column that says which branch a row belongs to."""

    names: tuple[str, ...]
    column: str

    @classmethod
    def of_data(cls, names: Sequence[str], column: str, dataset: object) -> "Branches":
        """The branches of a run: the `names` of the settings, or without them those in the training rows. Raises
        `ConfigError` if a row's branch is none of the names, or there are several names and no column."""
        values: list[str] | None = None
        if isinstance(dataset, Dataset) and column in dataset.column_names:
            values = [str(value) for value in dataset.unique(column)]
        branches = cls(tuple(names or sorted(values or [ALL])), column)
        for value in values or ():
            branches.of({column: value})
        if values is None and isinstance(dataset, Dataset) and len(dataset):
            branches.of(dataset[0])
        return branches

    def of(self, example: Example) -> str:
        """The branch of a row. Raises `ConfigError` if it is none of the names, or the row does not say it."""
        if self.column not in example and len(self.names) == 1:
            return self.names[0]
        if self.column not in example:
            raise ConfigError(
                f"`branches` is {', '.join(self.names)}, and the dataset has no column {self.column!r}. "
                f"It has: {', '.join(example)}. Expected the branch of each row. Add the "
                "column, or name one branch."
            )
        branch = str(example[self.column])
        if branch not in self.names:
            raise ConfigError(
                f"a row's column {self.column!r} is {branch!r}. Expected one of `branches`: "
                f"{', '.join(self.names)}. Correct the column, or add the branch."
            )
        return branch

    def of_rows(self, dataset: Dataset) -> list[str]:
        if self.column not in dataset.column_names:
            return [self.names[0]] * len(dataset)
        return [self.of({self.column: value}) for value in dataset[self.column]]

    def ids(self, rows: Sequence[Example]) -> list[int]:
        """The number of each row's branch."""
        return [self.names.index(self.of(row)) for row in rows]
