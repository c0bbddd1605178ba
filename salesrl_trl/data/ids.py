"""Ids of rows, by which a record names them."""

from datasets import Dataset


def with_ids(dataset: object, name: str = "row") -> object:
    """A dataset of anybody's with the column `id`, as the record names its rows: `row-17` for the place 17. One that
    has the column, or is a stream, stays as it is. Of a dictionary all datasets."""
    if isinstance(dataset, dict):
        return {key: with_ids(part, f"{name}-{key}") for key, part in dataset.items()}
    if not isinstance(dataset, Dataset) or "id" in dataset.column_names:
        return dataset
    return dataset.add_column("id", [f"{name}-{place}" for place in range(len(dataset))])
