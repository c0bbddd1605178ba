"""A line while a phase lasts long: its name, its seconds, and what to look at.

Owns the thread and the advice (`advice.toml`). Only reads the training thread's state. `instruments` starts it.
"""

import logging
import math
import threading
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

ADVICE: dict[str, str] = tomllib.loads(Path(__file__).with_name("advice.toml").read_text(encoding="utf-8"))


@dataclass(eq=False)
class Heartbeat:
    """Logs a line about a phase that lasts: after `after_s`, then each time its seconds have doubled. `current`
    returns the phase of now and its seconds, `where` the text before it (`"step 3/100"`), `details` by phase more
    about it, and `sample` what the line says about the machine. Its thread calls them, once a second or more often."""

    current: Callable[[], tuple[str, float] | None]
    after_s: float
    where: Callable[[], str]
    details: dict[str, Callable[[], str]]
    sample: Callable[[], str] = str

    def __post_init__(self) -> None:
        self._machine = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        logged, next_s = "", 0.0  # the phase of the last line, and the seconds for the next line
        last_seconds = 0.0
        while not self._stopped.wait(min(self.after_s / 4, 1.0)):
            self._machine = self.sample()
            now = self.current()
            if now is None:
                continue
            name, seconds = now
            if name != logged or seconds < last_seconds:
                logged, next_s = name, self.after_s
            last_seconds = seconds
            if seconds >= next_s:
                self._log(name, seconds)
                next_s = self.after_s * 2 ** (math.floor(math.log2(seconds / self.after_s)) + 1)

    def _log(self, phase: str, seconds: float) -> None:
        try:
            logger.info(self.line(phase, seconds))
        except Exception as error:  # a fault in the details must not end the thread
            logger.warning(f"[Heartbeat] {phase} for {seconds:.0f} s ({type(error).__name__} while asking for more)")

    def line(self, phase: str, seconds: float) -> str:
        """`[Heartbeat] step 1/21: reward_wait for 12 s: of 64 completions 52 in judge. Look at: ...`"""
        more = self.details[phase]() if phase in self.details else ""
        detail = f": {more}" if more else ""
        advice = f". Look at: {ADVICE[phase]}" if phase in ADVICE else ""
        machine = f" ({self._machine})" if self._machine else ""
        return f"[Heartbeat] {self.where()}: {phase} for {seconds:.0f} s{machine}{detail}{advice}"
