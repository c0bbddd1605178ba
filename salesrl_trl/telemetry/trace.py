"""The run as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing.

Owns the file's format and size, and the track of each span. The file is a valid JSON array after every write, so that
the trace of a run that was cut off can be read.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import errno
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from salesrl_trl.timing import PHASES_TRACK, Span

REWARDS_PROCESS = 100_000
"""Number of the process with the tracks of a rank's rewards: this plus the rank."""
STEPS_TRACK = "steps"
"""Track with one span for each step."""
_TAIL = b"\n]\n"


class TraceWriter:
    """Writes spans of all ranks into one file.

    Each rank is a process of the trace, with a track of phases and a track of steps. A second process has tracks for
    each place in a batch of rewards.

    Args:
        path (`Path`):
            The file. An existing file is replaced.
        max_bytes (`int`):
            Largest size. Spans beyond it are left out, with a note in the trace.
        origin (`float`):
            Time at which the trace begins, in seconds, on the scale that all ranks share.
    """

    def __init__(self, path: Path, max_bytes: int, origin: float) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._tracks: Counter[int] = Counter()  # by process
        self._places: dict[tuple[int, str], tuple[int, int]] = {}
        self._names: dict[str, str] = {}
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
                The rank of these spans.
            spans (`Iterable[Span]`):
                In any order.
            clock_offset (`float`, *optional*, defaults to `0.0`):
                Seconds to add to the rank's `time.perf_counter`, for the scale that all ranks share.

        Raises:
            `OSError`: the file can't be written. Its content is as before.
        """
        events: list[str] = []
        for span in spans:
            process, track = self._place(rank, span.track, events)
            name = self._names.get(span.name) or self._names.setdefault(span.name, _json(span.name))
            started, seconds = span.started + clock_offset - self._origin, span.seconds
            failed = ',"cname":"terrible","args":{"failed":true}' if span.failed else ""
            # without json.dumps, which takes five times as long: a step has hundreds of spans
            events.append(
                f'{{"name":{name},"ph":"X","pid":{process},"tid":{track},"ts":{started * 1e6:.1f},'
                f'"dur":{seconds * 1e6:.1f}{failed}}}'
            )
        self._append(events)

    def close(self) -> None:
        """Close the file. It is complete after every write."""
        self._file.close()

    def _place(self, rank: int, track: str, events: list[str]) -> tuple[int, int]:
        known_place = self._places.get((rank, track))
        if known_place is None:
            known_place = self._places[rank, track] = self._new_place(rank, track, events)
        return known_place

    def _new_place(self, rank: int, track: str, events: list[str]) -> tuple[int, int]:
        process = rank if track in (PHASES_TRACK, STEPS_TRACK) else REWARDS_PROCESS + rank
        number = self._tracks[process]
        self._tracks[process] += 1
        title = f"rank {rank}" if process == rank else f"rank {rank}: rewards and other threads"
        if number == 0:
            events.append(_about("process_name", process, 0, name=title))
            events.append(_about("process_sort_index", process, 0, sort_index=process))
        events.append(_about("thread_name", process, number, name=track))
        events.append(_about("thread_sort_index", process, number, sort_index=number))
        return process, number

    def _append(self, events: list[str]) -> None:
        if self.full or not events:
            return
        position = self._file.tell() - len(_TAIL)
        between = b"\n" if self._empty else b",\n"
        content = between + ",\n".join(events).encode()
        if position + len(content) > self._max_bytes:
            self.full = True
            content = between + _FULL.encode()
        self._replace_tail(position, content + _TAIL)
        self._empty = False

    def _replace_tail(self, position: int, content: bytes) -> None:
        """Write from `position` on. Where the disk is full, leave the file as it was."""
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


_FULL = '{"name":"the trace is full","ph":"i","s":"g","pid":0,"tid":0,"ts":0}'


def _about(event: str, process: int, track: int, **arguments: str | int) -> str:
    return _json({"name": event, "ph": "M", "pid": process, "tid": track, "args": arguments})


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
