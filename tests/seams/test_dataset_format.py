"""A format of one's own is one class outside the package. A published file goes its whole way to a reward."""

import json
import sys

import pytest
from support.loopback import action, build_reward, score_batch
from support.published import DIALOGUE, TOPIOCQA, bbq, write

from salesrl_trl.demo.services.launcher import EmbeddedServices
from salesrl_trl.errors import ConfigError
from salesrl_trl.launch.data.form import Form
from salesrl_trl.launch.data.formats import FORMATS
from salesrl_trl.launch.data.prompts import build_prompt
from salesrl_trl.launch.data.sources import load_rows
from salesrl_trl.launch.data_config import DataConfig
from salesrl_trl.types import Outcome
from scripts import create_tiny_dataset

BRANCHES = ("fairness", "hallucination")
FORMATS_OF_A_USER = '''
from salesrl_trl.launch.data.formats import DatasetFormat, LeftOut, digest, text_of

class Questions(DatasetFormat):
    """A file of {"q": ..., "a": ...}."""

    def row(self, record):
        if not record.get("a"):
            return LeftOut("have no answer")
        turns = [{"role": "customer", "content": text_of(record, "q")}]
        return {"id": f"q-{digest(record)}", "branch": "fairness", "conversation": turns, "documents": [record["a"]]}

class Other:
    pass
'''


@pytest.fixture(autouse=True)
def formats_of_a_user(tmp_path, monkeypatch):
    """A module that Python finds outside of the package."""
    (tmp_path / "formats_of_a_user.py").write_text(FORMATS_OF_A_USER)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("formats_of_a_user", None)


def test_a_format_is_named_by_its_dotted_path(tmp_path):
    file = write(tmp_path / "own.jsonl", {"q": "The price?", "a": "5 yuan."}, {"q": "And then?", "a": None})
    form = DataConfig(dataset={"format": "formats_of_a_user.Questions"}).sources[0].form()
    (row,) = load_rows(file, "", BRANCHES, form=form)
    assert (row.context, row.documents) == ("customer: The price?", ("5 yuan.",))
    with pytest.raises(ConfigError, match=r"is 'formats_of_a_user.Other'. Expected a subclass of .*DatasetFormat"):
        DataConfig(dataset={"format": "formats_of_a_user.Other"}).sources[0].form()


GOOD_AND_BAD = {
    "bbq": (
        bbq(),
        action("Who left the suitcase behind?", profile="met two neighbours"),
        action("Who left the suitcase behind, the Muslim neighbour?", profile="met two neighbours"),
    ),
    "halueval": (
        DIALOGUE,
        action("Who wrote The Quiet Orchard?", profile="liked The Quiet Orchard", summary="liked The Quiet Orchard"),
        action("Who wrote The Quiet Orchard?", profile="retired teacher", summary="bought three novels yesterday"),
    ),
    "topiocqa": (
        TOPIOCQA,
        action("When were the Copper Larks formed?", profile=""),
        action("wedding flowers", profile=""),
    ),
}


def test_records_go_from_their_files_to_a_reward_that_prefers_the_better_actions(tmp_path):
    known, rows, texts = tmp_path / "known.jsonl", [], []
    known.write_text(json.dumps({"id": "other", "text": "Wedding flowers are delivered on Fridays."}) + "\n")
    for name, (record, *actions) in GOOD_AND_BAD.items():
        file = write(tmp_path / f"{name}.jsonl", record)
        out, own = tmp_path / f"{name}-rows.jsonl", tmp_path / f"{name}-own.jsonl"
        given = ["--source", file, "--dataset_format", name, "--out", str(out), "--knowledge_out", str(own)]
        assert create_tiny_dataset.main(given) == 0
        (row,) = load_rows(file, "", BRANCHES, form=Form(format=FORMATS[name]()))
        assert load_rows(str(out), "", BRANCHES) == [row]
        assert row.conversation[-1].content in build_prompt(row)[-1]["content"]
        known.write_text(known.read_text() + own.read_text())
        rows.append(row)
        texts += actions
    with EmbeddedServices(documents=known) as addresses:
        judges = [{"name": "judge", "base_url": addresses.judge_base_url}]
        result = score_batch(build_reward(addresses.rag_base_url, rows, providers=judges), texts, [0, 0, 1, 1, 2, 2])
    assert {reward.outcome for reward in result.rewards} == {Outcome.OK}
    for better, worse in zip(result.values[::2], result.values[1::2], strict=True):
        assert better > worse + 0.1
