"""The rows of a run by its settings: those to train on, and those to evaluate on.

Owns which source, split and part each of them is. `data` loads them.
"""

from salesrl_trl.config import DataConfig
from salesrl_trl.data.form import Part, Records, part_of
from salesrl_trl.data.sources import load_records


def training_records(data: DataConfig) -> Records:
    """The records to train on. Raises `DataError` as `load_rows` does."""
    form = data.form()
    part = Part.TRAINING if data.held_out_share else Part.ALL
    return part_of(load_records(data.dataset, data.train_split, form), form, part)


def held_out_records(data: DataConfig) -> Records:
    """The records to evaluate on. Raises `DataError` as `load_rows` does."""
    form = data.eval_form()
    if data.held_out_share:
        return part_of(load_records(data.dataset, data.train_split, form), form, Part.HELD_OUT)
    return load_records(data.eval_dataset or data.dataset, data.eval_split, form)
