"""Pages of docs/ that scripts make: they say what the docstrings and tables say."""

from pathlib import Path

import pytest

from scripts import make_api_page as tool
from scripts import make_coming_from, make_metrics_table

PAGE = Path(__file__).parents[3] / "docs/API.md"


def test_the_page_is_made_of_the_docstrings_as_they_are():
    assert tool.page() == PAGE.read_text("utf-8"), "python scripts/make_api_page.py > docs/API.md"


@pytest.mark.parametrize("script", [make_coming_from, make_metrics_table])
def test_a_page_has_its_table_as_it_is(script):
    text = script.PAGE.read_text("utf-8")
    assert script.page(text) == text, f"python scripts/{script.__name__.rpartition('.')[2]}.py"
