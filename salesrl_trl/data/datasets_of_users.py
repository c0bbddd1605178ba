"""Datasets of anybody's: the columns that they may not have, and the ids by which a record names their rows."""

from collections.abc import Collection

from datasets import Dataset

from salesrl_trl.errors import DataError

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
