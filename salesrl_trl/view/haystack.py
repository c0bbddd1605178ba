"""Texts to look for a word in.

Owns a file without a name, which is gone with the process. A scan of it finds words of any length in any language; an
index of trigrams finds none of two Chinese characters, and takes several times the room.
"""

import mmap
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Iterable

_END = b"\xff"
"""After each text. No UTF-8 has it, so no word is found across two texts."""
_KEPT_SEARCHES = 8


class Haystack:
    """Texts by number, from 0. Upper and lower case are the same. Not to be used by two threads at a time."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as this object
        self._starts = array("Q")
        self._end = 0
        self._searches: dict[str, bytearray] = {}

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, texts: Iterable[str]) -> None:
        """Put texts at the end: all, or none where the disk takes no more."""
        bodies = [text.lower().encode(errors="replace") + _END for text in texts]
        self._file.seek(self._end)
        self._file.write(b"".join(bodies))
        self._file.flush()
        for body in bodies:
            self._starts.append(self._end)
            self._end += len(body)

    def find(self, word: str) -> bytearray:
        """Where a word is.

        Args:
            word (`str`):
                Not empty.

        Returns:
            `bytearray`: 1 for each text that has it, else 0, by number. It is this object's own: not to be changed.
        """
        word = word.lower()
        found = self._searches.pop(word, None) or bytearray()
        known, starts = len(found), self._starts
        found.extend(bytes(len(starts) - known))
        if len(found) > known:
            self._scan(word.encode(errors="replace"), known, found)
        self._searches[word] = found  # the latest is the last
        while len(self._searches) > _KEPT_SEARCHES:
            del self._searches[next(iter(self._searches))]
        return found

    def _scan(self, word: bytes, first: int, found: bytearray) -> None:
        starts = self._starts
        with mmap.mmap(self._file.fileno(), self._end, access=mmap.ACCESS_READ) as content:
            number, last = first, len(starts) - 1
            while (at := content.find(word, starts[number])) >= 0:
                if number < last and at >= starts[number + 1]:  # a common word needs no search of its place
                    number = bisect_right(starts, at, number) - 1
                found[number] = 1
                if number == last:
                    return
                number += 1

    def close(self) -> None:
        """Give the file back."""
        self._file.close()
