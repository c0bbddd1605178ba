"""A real browser without a window, which a test opens pages in, types and clicks: Chromium, by its DevTools protocol
over a pipe. `CHROMIUM` names the program; else it is that of the path. Where there is none, `program()` is `None`.
"""

import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from itertools import count
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NEEDED = "needs Chromium: `apt install chromium`, or its file in CHROMIUM"
WAIT_S = 30.0
KEYS = {"Enter": ("Enter", 13, "\r"), "Escape": ("Escape", 27, ""), "ArrowDown": ("ArrowDown", 40, "")}
FLAGS = ("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-extensions",
         "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--mute-audio",
         "--hide-scrollbars", "--no-startup-window",
         "--disable-features=SpareRendererForSitePerProcess,RenderDocument",
         "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")  # fmt: skip
"""The last one: no name of the network is found, so that a page which needs one fails."""


def program():
    """The browser's file."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def why_skipped():
    """Why tests of a page are skipped; `None` where they run, or have to: `BROWSER_REQUIRED`, as in CI."""
    return None if program() or os.environ.get("BROWSER_REQUIRED") else NEEDED


class Tab:
    """One page. Its methods wait until what they ask for is done."""

    def __init__(self, to, answers):
        self._to, self._answers, self._ids, self._buffer, self._session = to, answers, count(1), b"", None
        self.problems = []
        """Errors and warnings of the page: exceptions, what its policy refused, failed requests."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method, **params):
        """A command of the protocol; its result."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            got = self._read()
            if got.get("id") == number:
                assert "error" not in got, (method, got)
                return got["result"]
            self._note(got)

    def _read(self):
        while b"\0" not in self._buffer:
            assert select.select([self._answers], [], [], WAIT_S)[0], "the browser says nothing"
            more = os.read(self._answers, 1 << 20)
            assert more, "the browser has ended"
            self._buffer += more
        one, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(one)

    def _note(self, event):
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(event["params"]["exceptionDetails"])[:600])
        if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] in ("error", "warning"):
            self.problems.append(event["params"]["entry"]["text"])

    def open(self, url):
        """Go to an address."""
        self.send("Page.navigate", url=url)

    def value(self, script):
        """What an expression of JavaScript gives."""
        told = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def wait(self, script, why=""):
        """Wait until an expression is true, and give its value."""
        end, pause = time.monotonic() + WAIT_S, 0.01
        while (value := self.value(script)) in (None, False, "", 0):  # an element is {}
            assert time.monotonic() < end, (why or script, self.problems, self.value("document.body.innerText")[:2000])
            time.sleep(pause)
            pause = min(1.5 * pause, 0.1)
        return value

    def text(self, selector="main"):
        """What an element shows."""
        return self.value(f"document.querySelector({json.dumps(selector)})?.innerText ?? null")

    def click(self, selector):
        """A click of the mouse in the middle of an element."""
        place = self.wait(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null; "
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect(); "
            "return [b.x + Math.min(b.width, 60) / 2, b.y + Math.min(b.height, 20) / 2]; })()",
            selector,
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def type(self, text):
        """Text into what has the focus."""
        self.send("Input.insertText", text=text)

    def press(self, key):
        """A key, by its name or its character."""
        name, code, text = KEYS.get(key, (key, ord(key.upper()[0]), key))
        given = {"key": name, "windowsVirtualKeyCode": code}
        self.send("Input.dispatchKeyEvent", type="keyDown", **given, **({"text": text} if text else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", **given)

    def choose(self, selector, value):
        """An option of a list of choices."""
        self.wait(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return false; "
            f"e.value = {json.dumps(value)}; e.dispatchEvent(new Event('change', {{bubbles: true}})); "
            "return e.value !== ''; })()"
        )

    def accessible(self):
        """What a screen reader gets: role and name of everything that it is told of."""
        nodes = [node for node in self.send("Accessibility.getFullAXTree")["nodes"] if not node.get("ignored")]
        return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes]

    def size(self, width, height):
        """Of the window, in its pixels."""
        size = {"width": width, "height": height}
        self.send("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=False)


@contextmanager
def browser():
    """A [`Tab`] of a browser of its own."""
    assert program(), NEEDED
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    high = [fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (theirs_in, theirs_out)]

    def third_and_fourth():
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    with tempfile.TemporaryDirectory() as home:
        flags = [*FLAGS, f"--user-data-dir={home}", "--lang=en-US", "--accept-lang=en-US"]
        if os.geteuid() == 0:  # its sandbox refuses root
            flags.append("--no-sandbox")
        with open(Path(home) / "stderr", "wb") as said:
            process = subprocess.Popen(
                [program(), *flags], stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                preexec_fn=third_and_fourth, pass_fds=(3, 4), env={**os.environ, "HOME": home, "LANG": "en-US"},
            )  # fmt: skip
        for each in (theirs_in, theirs_out, *high):
            os.close(each)
        try:
            tab = Tab(ours_out, ours_in)
            yield tab
            tab._session = None
            tab.send("Browser.close")
            process.wait(WAIT_S)
        finally:
            process.kill()
            process.wait()
            os.close(ours_out)
            os.close(ours_in)
