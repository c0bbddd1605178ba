"""Words and sentences of Chinese and English text.

Owns the cutting of text into words, and the words that carry no content. The index and the rubric call it. Refuses to
score anything.
"""

import re
import tomllib
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import rjieba

_HAN = r"\u3400-\u9fff\uf900-\ufaff"
_RUN = re.compile(rf"(?P<han>[{_HAN}]+)|\d+(?:[.:/]\d+)*|(?:(?![{_HAN}])[^\W\d_])+(?:'[a-z]+|\+\+|#)?")
_INVISIBLE = re.compile(r"[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
_LONG_GAP = re.compile(r"([^\w\s]{64})[^\w\s]+")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_SENTENCE = re.compile(r".+?(?:[。！？!?]|\.(?=\s|$)|$)", re.DOTALL)
_ES_PLURAL = re.compile(r"(?:ss|sh|ch|x)es$")
_PLURAL = re.compile(r"[a-z]{2}[a-hj-rtv-z]s$")

_LISTS = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
STOP_WORDS, GENERIC_WORDS = (frozenset(_LISTS[name].split()) for name in ("stop", "generic"))


def normalise(text: str) -> str:
    """Lower-case text in one Unicode form (NFKC), without invisible characters or thousands separators."""
    # normalising a run of combining marks takes time that grows with its square
    folded = unicodedata.normalize("NFKC", _LONG_GAP.sub(r"\1", text))
    visible = _INVISIBLE.sub("", folded).replace("\u2019", "'")  # the typographic apostrophe
    return _THOUSANDS.sub("", visible).lower()


def words(text: str, *, overlapping: bool = False) -> list[str]:
    """Lower-case words of Chinese or English text, without stop words, plurals as singulars, figures whole.
    `overlapping` adds the shorter words inside a longer Chinese one, so that a search for a part finds the whole."""
    cut = (word for run in _RUN.finditer(normalise(text)) for word in _cut_run(run, overlapping))
    return [word for word in cut if word not in STOP_WORDS]


def _cut_run(run: re.Match[str], overlapping: bool) -> Iterator[str]:
    if run["han"] is None:
        yield _singular(run[0])
    else:
        yield from rjieba.cut_for_search(run[0]) if overlapping else rjieba.cut(run[0])


def _singular(word: str) -> str:
    word = word.removesuffix("'s")
    if _ES_PLURAL.search(word):
        return word[:-2]
    return word[:-1] if _PLURAL.search(word) else word


def is_chinese(text: str) -> bool:
    """Whether Chinese characters outnumber the words in other letters: `"customer: Python 课程多少钱"` is Chinese."""
    runs = list(_RUN.finditer(text))
    chinese = sum(len(run["han"]) for run in runs if run["han"])
    return chinese > sum(run["han"] is None for run in runs)


def sentences(text: str) -> list[str]:
    """The sentences of a text, stripped. A text without sentences is returned whole."""
    return [sentence.strip() for sentence in _SENTENCE.findall(text) if sentence.strip()] or [text.strip()]
