"""How long the viewer takes over a large record, and how much memory its server needs.

    python -m benchmarks.view [--completions 100000] [--record FOLDER] [--json FILE]

Serves a synthetic record as users do, in a process of its own. Prints the time until the page is there and until the
whole record is read, the time of each filter, and the most memory. With Chromium installed, also the time until a
browser shows the first step and the first completion. Imports no torch.
"""

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.browser import browser, program  # noqa: E402
from support.synthetic_record import make_record  # noqa: E402

ROUNDS = 7
FILTERS: dict[str, dict[str, str]] = {
    "none": {},
    "branch and outcome": {"branch": "fairness", "outcome": "invalid_action"},
    "reason": {"reason": "rag_8b_timeout"},
    "provider and reward": {"provider": "judge-b", "reward_min": "0.4", "reward_max": "0.6"},
    "largest advantage": {"order": "advantage_high"},
    "judge took longest": {"order": "judge_s_high"},
    "page 2 of the lowest rewards": {"order": "reward_low", "after": "0.0~40"},
    "text, English": {"text": "discount"},
    "text, Chinese": {"text": "吉他"},
    "text, one letter": {"text": "e"},
    "text and all others": {
        "text": "价格",
        "branch": "fairness",
        "outcome": "ok",
        "reward_min": "0.2",
        "mode": "train",
    },
}


class Server:
    """The viewer in a process of its own."""

    def __init__(self, run: Path) -> None:
        self.began = time.perf_counter()
        line = [sys.executable, "-m", "salesrl_trl.record.view", str(run)]
        self.process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        address = urlsplit(self.url)
        self._path, self._connection = address.path, http.client.HTTPConnection(address.netloc, timeout=60)

    def ask(self, path: str, **params: str) -> Any:
        """An answer: JSON, or the page."""
        self._connection.request("GET", f"{self._path}{path}?{urlencode(params)}")
        answer = self._connection.getresponse()
        body = answer.read()
        assert answer.status == 200, body
        return json.loads(body) if path else body

    def peak_mib(self) -> float:
        """The most memory that its process has held."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    def end(self) -> None:
        """As Ctrl-C does."""
        self._connection.close()
        self.process.send_signal(2)
        self.process.communicate(timeout=30)


def taken_ms(work: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    began = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - began)


def measure(run: Path) -> dict[str, Any]:
    """All figures of one record."""
    server = Server(run)
    try:
        server.ask("")
        page_s = time.perf_counter() - server.began
        while (state := server.ask("api/state"))["reading"]:
            time.sleep(0.05)
        read_s = time.perf_counter() - server.began
        filters = {}
        for name, params in FILTERS.items():
            times = [taken_ms(lambda params=params: server.ask("api/list", **params)) for _ in range(ROUNDS)]
            filters[name] = {"first_ms": times[0], "median_ms": statistics.median(times), "most_ms": max(times)}
        others = {name: statistics.median(taken_ms(lambda name=name: server.ask(f"api/{name}")) for _ in range(ROUNDS))
                  for name in ("state", "overview", "compare")}  # fmt: skip
        opened = in_browser(server.url) if program() else {}
        return {
            "completions": state["runs"][0]["many"], "page_s": page_s, "read_s": read_s, **opened, "filters": filters,
            "others_ms": others, "peak_mib": server.peak_mib(),
        }  # fmt: skip
    finally:
        server.end()


def in_browser(url: str) -> dict[str, float]:
    """Seconds until a browser shows the first step, and the first completion."""
    shown = {"opened_steps_s": ("#overview", "tbody th a"), "opened_list_s": ("#list", ".items a.open")}
    figures = {}
    with browser() as tab:
        for name, (address, selector) in shown.items():
            tab.open("about:blank")
            began = time.perf_counter()
            tab.open(url + address)
            tab.wait(f"document.querySelector('{selector}') !== null")
            figures[name] = time.perf_counter() - began
    return figures


def told(figures: dict[str, Any]) -> str:
    """The figures for a terminal."""
    lines = [f"{figures['completions']:,} completions", "", f"{'filter':<30} {'first':>8} {'median':>8} {'most':>8}"]
    for name, each in figures["filters"].items():
        lines.append(f"{name:<30} {each['first_ms']:5.0f} ms {each['median_ms']:5.0f} ms {each['most_ms']:5.0f} ms")
    lines += ["", *(f"{name + ', median':<30} {value:5.0f} ms" for name, value in figures["others_ms"].items()), ""]
    names = {
        "page_s": "command to page served", "read_s": "command to record read",
        "opened_steps_s": "browser opens the steps", "opened_list_s": "browser opens the list",
    }  # fmt: skip
    lines += [f"{name:<30} {figures[key]:5.2f} s" for key, name in names.items() if key in figures]
    return "\n".join([*lines, f"{'memory of the server, peak':<30} {figures['peak_mib']:5.0f} MiB"])


def main(argv: list[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=100_000)
    parser.add_argument("--record", type=Path, help="a run's folder, in place of a synthetic one")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(args.record or make_record(Path(folder) / "run", args.completions))
    print(told(figures))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
