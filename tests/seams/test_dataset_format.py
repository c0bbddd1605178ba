"""A format of one's own is one class outside the package. A published file goes its whole way to a reward."""

import pytest
from support.published import write

from salesrl_trl.errors import ConfigError
from salesrl_trl.launch.data.formats import DatasetFormat, LeftOut, digest, text_of
from salesrl_trl.launch.data.sources import load_rows
from salesrl_trl.launch.data_config import DataConfig

BRANCHES = ("fairness", "hallucination")


class Questions(DatasetFormat):
    """A file of {"q": ..., "a": ...}."""

    def row(self, record):
        if not record.get("a"):
            return LeftOut("have no answer")
        turns = [{"role": "customer", "content": text_of(record, "q")}]
        return {"id": f"q-{digest(record)}", "branch": "fairness", "conversation": turns, "documents": [record["a"]]}


class Other:
    """Is no format."""


def test_a_format_is_named_by_its_dotted_path(tmp_path):
    file = write(tmp_path / "own.jsonl", {"q": "The price?", "a": "5 yuan."}, {"q": "And then?", "a": None})
    form = DataConfig(dataset={"format": f"{__name__}.Questions"}).sources[0].form()
    (row,) = load_rows(file, "", BRANCHES, form=form)
    assert (row.context, row.documents) == ("customer: The price?", ("5 yuan.",))
    with pytest.raises(ConfigError, match=r"test_dataset_format.Other'. Expected a subclass of .*DatasetFormat"):
        DataConfig(dataset={"format": f"{__name__}.Other"}).sources[0].form()
