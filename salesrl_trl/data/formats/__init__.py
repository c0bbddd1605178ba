"""Formats of published datasets, and what each of their records becomes.

- `dataset_format`: the interface of a format. A format of your own is a class outside of the package.
- `published`: the packaged formats.

Owns which text is the conversation, which branch a record belongs to, and what the judge is shown. Refuses to read
files and to know a setting.
"""

from salesrl_trl.data.formats.dataset_format import DatasetFormat, LeftOut
from salesrl_trl.data.formats.published import BBQ, HaluEval, QReCC, TopiOCQA

ROWS = "rows"
"""Records that have this package's columns already."""
FORMATS: dict[str, type[DatasetFormat]] = {"bbq": BBQ, "halueval": HaluEval, "qrecc": QReCC, "topiocqa": TopiOCQA}
"""The packaged formats by their names in `dataset_format`."""

__all__ = ["BBQ", "FORMATS", "ROWS", "DatasetFormat", "HaluEval", "LeftOut", "QReCC", "TopiOCQA"]
