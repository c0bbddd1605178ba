"""The bench of the viewer, at its full size: what is promised of 100,000 completions."""

import json

import pytest

from benchmarks import view


@pytest.mark.bench
def test_a_hundred_thousand_completions_answer_open_and_fit(tmp_path, capsys):
    view.main(["--json", str(tmp_path / "figures")])
    figures = json.loads((tmp_path / "figures").read_text())
    assert figures["completions"] >= 100_000
    assert max(each["median_ms"] for each in figures["filters"].values()) < 200
    assert max(figures[name] for name in ("opened_steps_s", "opened_list_s") if name in figures) < 2
    assert figures["peak_mib"] < 300
    assert "largest disagreement" in capsys.readouterr().out
