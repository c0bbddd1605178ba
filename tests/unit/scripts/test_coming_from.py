"""docs/COMING_FROM.md has the table of names as it is."""

from scripts import make_coming_from as tool


def test_the_page_is_made_of_the_table():
    text = tool.PAGE.read_text("utf-8")
    assert tool.page(text) == text, "python scripts/make_coming_from.py"
