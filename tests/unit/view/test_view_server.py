"""The viewer's server refuses what is not its own page on this machine, and its page is one file."""

import hashlib
import re
import subprocess
import sys
import zlib
from html import unescape

import pytest
from support.synthetic_record import Rank
from support.viewing import asked, served

from salesrl_trl.record.view import __main__ as command
from salesrl_trl.record.view.page import ASSETS, PREACT

RELEASED = "bdcbd9abdf2c77c5c45326eab42191e949222d479d0d5f69467387a77040cb55"


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "0.0.0.0", "[bad"]
)
def test_another_host_is_refused(viewer, host):
    """A page from elsewhere can have its own name lead to this machine. The browser then sends that name."""
    for path in ("", "api/state", "api/list"):
        status, _, body = asked(viewer, path, host=host)
        assert (status, "error" in body) == (403, True)
    for own in ("127.0.0.1", "localhost:80", "[::1]:1234", "LOCALHOST"):
        assert asked(viewer, "api/state", host=own)[0] == 200


def test_without_the_key_nothing_is_told(viewer):
    class Other:
        server_port, key = viewer.server_port, "A" * len(viewer.key)

    assert asked(Other, "api/state")[0] == asked(Other, "")[0] == 404
    assert len(viewer.key) >= 16


def test_nothing_can_be_written(viewer):
    methods = ("POST", "PUT", "DELETE", "OPTIONS")
    assert [asked(viewer, "api/state", method=method)[0] for method in methods] == [501] * 4


def test_questions_without_an_answer_have_a_status_and_a_message(viewer):
    for missing in ("0-0-99999", "../../etc", "7-0-1"):
        assert asked(viewer, "api/completion", id=missing)[0] == 404
    assert asked(viewer, "api/nothing")[0] == asked(viewer, "nothing")[0] == 404
    status, _, body = asked(viewer, "api/list", reward_min="much")
    assert status == 400 and "much" in body["error"]


def test_the_page_may_run_its_own_script_and_ask_its_own_server_alone(viewer):
    _, headers, html = asked(viewer, "")
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    policy = unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1])
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src 'self'" in policy and "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    # One script that runs and one style, both inside; no address but the empty picture of the tab.
    assert len(re.findall(r"<script>", html)) == len(re.findall(r"<style>", html)) == 1
    assert re.findall(r'(?:src|href)="([^"]*)"', html.partition("<script>")[0]) == ["data:,"]
    assert len(html) < 160_000


def test_the_vendored_library_is_the_released_file():
    content = (ASSETS / PREACT).read_bytes()
    assert hashlib.sha256(content).hexdigest() == RELEASED
    assert "MIT" in (ASSETS / "vendor/preact.LICENSE").read_text("utf-8")


def test_a_failure_is_told_to_the_page_and_the_next_look_goes_on(tmp_path):
    rank = Rank(tmp_path, 0)
    rank.add(prompt=rank.file.execute("INSERT INTO texts VALUES (7, x'', x'00')").lastrowid)  # no zlib
    with served(tmp_path) as viewer:
        for question in ({"path": "api/state"}, {"path": "api/completion", "id": "0-0-1"}):
            status, _, body = asked(viewer, **question)
            assert (status, body["error"].startswith("error: ")) == (500, True)
        rank.file.execute("UPDATE texts SET body = ?", (zlib.compress(b'"mended"'),))
        assert asked(viewer, "api/state")[0] == 200
        assert asked(viewer, "api/list", text="mended")[2]["total"] == 1
    rank.file.close()


def test_what_can_not_be_served_or_read_is_exit_code_2_with_one_line(viewer, tmp_path, capsys):
    Rank(tmp_path, 0).file.close()
    for words in (["--port", str(viewer.server_port)], ["--port", "99999"], [str(tmp_path / "nowhere")]):
        assert command.main([str(tmp_path), *words]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_the_command_serves_until_ctrl_c(two_runs):
    line = [sys.executable, "-m", "salesrl_trl.record.view", str(two_runs[0])]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        address = process.stdout.readline()
        process.send_signal(2)
        _, errors = process.communicate(timeout=30)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{16}/\n", address)
    assert (process.returncode, errors) == (0, "")
