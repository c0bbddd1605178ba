"""The run as a Chrome trace, to be opened in https://ui.perfetto.dev or chrome://tracing.

Owns the file's format, its size, and which track a span is drawn on. The file is a valid JSON array after every write,
so that a run that was cut off leaves a trace that can be read.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import errno
import json
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from salesrl_trl.timing import PHASES_TRACK, Span

REWARDS_PROCESS = 100_000
"""Added to a rank for the process under which its rewards' tracks stand."""
_TAIL = b"\n]\n"


class TraceWriter:
    """Writes spans of all ranks into one file.

    Each rank is a process of the trace with one track of phases and one of steps; each place in a batch of rewards has
    tracks of its own under a second process.

    Args:
        path (`Path`):
            The file. One that is there is replaced.
        max_bytes (`int`):
            Largest size. Spans beyond it are left out, and the trace says so.
        origin (`float`):
            Where the trace's time begins, on the scale that all ranks share, in seconds.
    """

    def __init__(self, path: Path, max_bytes: int, origin: float) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._tracks: dict[tuple[int, str], int] = {}
        self._origin = origin
        self._empty = True
        self.full = False
        """Whether spans were left out."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0)
        self._file.write(b"[" + _TAIL)

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, rank: int, spans: Iterable[Span], clock_offset: float = 0.0) -> None:
        """Add a rank's spans.

        Args:
            rank (`int`):
                Whose they are.
            spans (`Iterable[Span]`):
                In any order.
            clock_offset (`float`, *optional*, defaults to `0.0`):
                What to add to the rank's `time.perf_counter` for a scale that all ranks share, in seconds.

        Raises:
            `OSError`: it could not be written. The file holds what it held before.
        """
        events: list[dict[str, Any]] = []
        for span in spans:
            process, track = self._place(rank, span.track, events)
            event: dict[str, Any] = {"name": span.name, "ph": "X", "pid": process, "tid": track}
            event |= {
                "ts": round((span.started + clock_offset - self._origin) * 1e6, 1),
                "dur": round(span.seconds * 1e6, 1),
            }
            if span.failed:
                event |= {"cname": "terrible", "args": {"failed": True}}
            events.append(event)
        self._append(events)

    def close(self) -> None:
        """No more is written. The file is whole already."""
        self._file.close()

    def _place(self, rank: int, track: str, events: list[dict[str, Any]]) -> tuple[int, int]:
        process = rank if track in (PHASES_TRACK, STEPS_TRACK) else REWARDS_PROCESS + rank
        if (process, track) not in self._tracks:
            number = sum(1 for known, _ in self._tracks if known == process)
            title = f"rank {rank}" if process == rank else f"rank {rank}: rewards and other threads"
            if number == 0:
                events.append(_about("process_name", process, 0, name=title))
                events.append(_about("process_sort_index", process, 0, sort_index=process))
            self._tracks[process, track] = number
            events.append(_about("thread_name", process, number, name=track))
            events.append(_about("thread_sort_index", process, number, sort_index=number))
        return process, self._tracks[process, track]

    def _append(self, events: list[dict[str, Any]]) -> None:
        if self.full or not events:
            return
        lines = [json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() for event in events]
        position = self._file.tell() - len(_TAIL)
        content = (b"\n" if self._empty else b",\n") + b",\n".join(lines)
        if position + len(content) > self._max_bytes:
            self.full = True
            last = events[-1]
            note = {"name": "the trace is full", "ph": "i", "s": "g", "pid": 0, "tid": 0, "ts": last.get("ts", 0.0)}
            content = (b"\n" if self._empty else b",\n") + json.dumps(note, separators=(",", ":")).encode()
        self._replace_tail(position, content + _TAIL)
        self._empty = False

    def _replace_tail(self, position: int, content: bytes) -> None:
        """Write from `position` on, or leave the file as it was: what is full is the disk, not what it holds."""
        self._file.seek(position)
        try:
            written = self._file.write(content)
            if written != len(content):
                raise OSError(errno.ENOSPC, "no space left for the trace")
        except OSError:
            self._file.seek(position)
            self._file.write(_TAIL)
            self._file.truncate()
            raise


STEPS_TRACK = "steps"
"""One span for each step."""


def _about(what: str, process: int, track: int, **arguments: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": track, "args": arguments}
