"""What was skipped stands in the last lines of `scripts/test.sh`, and CI skips no page."""

import json
from types import SimpleNamespace

import pytest
from support import browser, skipped


def config_of(*reasons, **given):
    reports = [SimpleNamespace(longrepr=("test_a.py", 3, f"Skipped: {reason}")) for reason in reasons]
    reporter = SimpleNamespace(stats={"skipped": reports})
    return SimpleNamespace(pluginmanager=SimpleNamespace(get_plugin=lambda _: reporter), **given)


def test_the_last_run_tells_what_all_runs_skipped_and_how_to_have_it(monkeypatch, tmp_path, capsys):
    kept = tmp_path / "skipped"
    monkeypatch.setattr(skipped, "_given", {skipped.TO: str(kept), skipped.BEFORE: None})
    skipped.tell(config_of(browser.NEEDED, browser.NEEDED, "needs /dev/full"))
    skipped.tell(config_of(workerinput={}))  # a worker of pytest-xdist leaves the list alone
    assert (capsys.readouterr().out, json.loads(kept.read_text())) == ("", {browser.NEEDED: 2, "needs /dev/full": 1})
    monkeypatch.setattr(skipped, "_given", {skipped.TO: None, skipped.BEFORE: kept.read_text()})
    skipped.tell(config_of("needs /dev/full"))
    assert capsys.readouterr().out == (
        "test: skipped: 2 tests: needs /dev/full\n"
        "test: skipped: 2 tests: needs Chromium: `apt install chromium`, or its file in CHROMIUM\n"
    )


def test_a_run_without_the_script_adds_nothing_to_pytests_own_list(monkeypatch, capsys):
    monkeypatch.setattr(skipped, "_given", {skipped.TO: None, skipped.BEFORE: None})
    skipped.tell(config_of("needs /dev/full"))
    assert capsys.readouterr().out == ""


def test_without_a_browser_its_tests_are_skipped_and_fail_in_ci(monkeypatch):
    monkeypatch.setattr(browser, "program", lambda: None)
    monkeypatch.delenv("BROWSER_REQUIRED", raising=False)
    assert browser.why_skipped() == browser.NEEDED
    monkeypatch.setenv("BROWSER_REQUIRED", "1")
    assert browser.why_skipped() is None
    with pytest.raises(AssertionError, match="apt install chromium"), browser.browser():
        pass
