"""Records of runs that never were, and the viewer's index of them."""

import pytest
from support.synthetic_record import make_record

from salesrl_trl.view.index import Index


@pytest.fixture(scope="session")
def two_runs(tmp_path_factory):
    """Two runs of 12 steps with 1,536 completions each and an evaluation of 128: the same rows, other completions. The
    first has hostile texts."""
    folder = tmp_path_factory.mktemp("runs")
    one = make_record(folder / "one", 1600, hostile=True)
    return one, make_record(folder / "other", 1600, seed=1, better=0.1)


@pytest.fixture(scope="session")
def both(two_runs):
    """The index of both."""
    index = Index(list(two_runs))
    index.refresh()
    yield index
    index.close()
