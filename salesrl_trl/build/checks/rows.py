"""The rows of a run by its settings: those to train on, and those to evaluate on.

Owns which source, split and part each of them is. `data` loads them.
"""

from collections.abc import Callable

from salesrl_trl.config import DataConfig
from salesrl_trl.data.form import Part, Records, part_of
from salesrl_trl.data.sources import load_records


def own_records(data: DataConfig) -> Records:
    """All records of `dataset`, of which a share may be held out. Raises `DataError` as `load_rows` does."""
    return load_records(data.dataset, data.train_split, data.form())


def training_records(data: DataConfig, own: Records) -> Records:
    """The records to train on, of those of `own_records`. Raises `DataError` if there are none."""
    return part_of(own, data.form(), Part.TRAINING if data.held_out_share else Part.ALL)


def held_out_records(data: DataConfig, own: Callable[[], Records]) -> Records:
    """The records to evaluate on: a share of `own_records`, or a source of their own. Raises as `own_records` does."""
    if data.held_out_share:
        return part_of(own(), data.form(), Part.HELD_OUT)
    return load_records(data.eval_dataset or data.dataset, data.eval_split, data.eval_form())
