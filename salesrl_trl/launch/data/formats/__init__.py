"""Formats of published datasets, and what each of their records becomes: the interface, and the packaged ones.

A format of your own is a class outside of the package.
"""

from salesrl_trl.launch.data.formats.dataset_format import DatasetFormat, LeftOut
from salesrl_trl.launch.data.formats.published import BBQ, HaluEval, QReCC, TopiOCQA

ROWS = "rows"  # records that have this package's columns already
FORMATS: dict[str, type[DatasetFormat]] = {"bbq": BBQ, "halueval": HaluEval, "qrecc": QReCC, "topiocqa": TopiOCQA}
"""The packaged formats by their names as `format` of `dataset`."""

__all__ = ["BBQ", "FORMATS", "ROWS", "DatasetFormat", "HaluEval", "LeftOut", "QReCC", "TopiOCQA"]
