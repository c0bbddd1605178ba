"""A BM25 index over a knowledge base, for Chinese and English.

Owns how text is cut into words, how a knowledge base file is read, and how a passage is scored. Knows nothing of HTTP,
of actions or of how an answer is written. The index is built once and never changed, so threads may share it.
"""

import json
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from salesrl_trl.data.text import unreadable
from salesrl_trl.errors import DataError
from salesrl_trl.types import Passage

try:
    import rjieba

    HAS_RJIEBA = True
except ImportError:  # no wheel for the platform: Chinese is cut into character bigrams instead
    HAS_RJIEBA = False

BM25_K1 = 0.9
"""Saturation of a repeated word. Anserini's default for short passages, which a knowledge base's entries are."""
BM25_B = 0.4
"""Share of the length correction. Anserini's default for short passages."""

COMMON_SHARE = 1 / 8
"""Share of the documents from which on a word's scores are kept as a row over all documents. Adding a row costs a few
microseconds for 20,000 documents, the same for every word; a list of an eighth of them costs as much. It also bounds
the memory: there are at most 8 times as many rows as the average document has different words."""
GROUPS = 512
"""How many groups the documents are dealt into to find the best: the quickest of 256, 512 and 1,024 at 20,000
documents. A search for this many passages or more looks at every document."""
ROUNDING = 1e-6
"""Relative difference below which two scores may become equal when both are divided by a bound, in 32-bit floats."""
LEAST_SCORE = float(np.finfo(np.float32).tiny)
"""Below the raw score of every document that holds a word of the query, and above 0."""

_HAN = r"\u3400-\u9fff\uf900-\ufaff"
_RUN = re.compile(rf"(?P<han>[{_HAN}]+)|\d+(?:[.:/]\d+)*|(?:(?![{_HAN}])[^\W\d_])+(?:'[a-z]+|\+\+|#)?")
_INVISIBLE = re.compile(r"[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
_LONG_GAP = re.compile(r"([^\w\s]{64})[^\w\s]+")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_SENTENCE = re.compile(r".+?(?:[。！？!?]|\.(?=\s|$)|$)", re.DOTALL)
_ES_PLURAL = re.compile(r"(?:ss|sh|ch|x)es$")
_PLURAL = re.compile(r"[a-z]{2}[a-hj-rtv-z]s$")

_ENGLISH_STOP_WORDS = """
    a about after again all also am an and any are as at be because been before but by can could d did do does for
    from get got had has have he her here hers him his how i if in into is it it's its just let ll m may me might
    more most my no nor not now of off ok on once only or other our ours out over please re s same she should so some
    such t than thank thanks that that's the their them then there these they this those to too under until up us ve
    very was we were what when where which while who whom why will with would yes you your yours hi hello i'm i'd
    i've i'll you're don't can't what's there's
"""
_CHINESE_STOP_WORDS = """
    的 了 是 在 我 有 和 就 不 人 都 一 一个 上 也 很 到 说 要 去 你 会 着 没有 看 好 自己 这 那 吗 呢 吧 啊 呀
    哦 嗯 您 他 她 它 我们 你们 您们 他们 什么 怎么 怎么样 怎样 哪 哪个 哪些 哪里 哪儿 多少 几 请问 请 问 谢谢
    你好 您好 与 及 或 或者 而 但 但是 因为 所以 如果 对 对于 把 被 让 给 从 向 往 为 为了 以 可以 能 能够 还
    还是 还有 又 再 只 才 最 更 太 这个 那个 这些 那些 这样 那样 这门 那门 里 中 下 后 前 时 时候 之 其 等 个
    位 些 点 地 得 过 来 用 想 嘛 啦 咱们 有没有 是不是 能不能 可不可以 一下 一些 有点
"""
STOP_WORDS = frozenset((_ENGLISH_STOP_WORDS + _CHINESE_STOP_WORDS).split())
"""Words that say nothing about the subject. They are neither indexed nor searched for, so they move no score."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One entry of the knowledge base."""

    id: str
    """Unique in the knowledge base: `"zh-python-price"`."""
    text: str
    """What may be told to a customer."""
    title: str = ""
    """Indexed with the text, never part of an answer."""


def normalise(text: str) -> str:
    """Lower-case text in one Unicode form (NFKC), without invisible characters or thousands separators."""
    # to normalise a run of combining marks takes its square
    folded = unicodedata.normalize("NFKC", _LONG_GAP.sub(r"\1", text))
    visible = _INVISIBLE.sub("", folded).replace("\u2019", "'")  # the typographic apostrophe
    return _THOUSANDS.sub("", visible).lower()


def words(text: str, *, overlapping: bool = False) -> list[str]:
    """Cut text into lower-case words, stop words left out.

    Args:
        text (`str`):
            Chinese, English or both.
        overlapping (`bool`, *optional*, defaults to `False`):
            Also give the shorter words inside a longer Chinese one, so that a search for the part finds the whole.

    Returns:
        `list[str]`: in the order of the text. English plurals are folded into the singular, figures stay whole.
    """
    found = (word for run in _RUN.finditer(normalise(text)) for word in _cut_run(run, overlapping))
    return [word for word in found if word not in STOP_WORDS]


def _cut_run(run: re.Match[str], overlapping: bool) -> Iterator[str]:
    if run["han"] is None:
        yield _singular(run[0])
    elif not HAS_RJIEBA:
        yield from bigrams(run[0])
    else:
        yield from rjieba.cut_for_search(run[0]) if overlapping else rjieba.cut(run[0])


def bigrams(run: str) -> list[str]:
    """Every pair of neighbours in a run of Chinese characters; a lone character stands for itself."""
    return [run[start : start + 2] for start in range(max(len(run) - 1, 1))]


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
    """The sentences of a text, without the space around them; the text itself where none ends."""
    return [sentence.strip() for sentence in _SENTENCE.findall(text) if sentence.strip()] or [text.strip()]


def load_documents(path: Path | str) -> tuple[Document, ...]:
    """Read a knowledge base: JSON lines with `id`, `text` and optionally `title`; other keys are left alone.

    Raises:
        `DataError`: if the file cannot be read or is empty, or a line is no such object or repeats an id.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        fault = unreadable(error)
        raise DataError(f"cannot read the knowledge base {path}: {fault}; give a UTF-8 file of JSON lines") from error
    documents: dict[str, Document] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            document = _read_document(line, f"{path}, line {number}")
            if document.id in documents:
                raise DataError(f"{path}, line {number}: id {document.id!r} stands twice; make every id unique")
            documents[document.id] = document
    if not documents:
        raise DataError(f"{path}: got no documents, expected at least one JSON line; add one")
    return tuple(documents.values())


def _read_document(line: str, where: str) -> Document:
    expected = 'expected {"id": "...", "text": "...", "title": "..."}'
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: got no JSON, {expected}; write one object a line") from error
    if not isinstance(entry, dict):
        raise DataError(f"{where}: got a JSON {type(entry).__name__}, {expected}; write one object a line")
    return Document(
        id=_text_field(entry, "id", where, expected),
        text=_text_field(entry, "text", where, expected),
        title=_text_field({"title": ""} | entry, "title", where, expected, required=False),
    )


def _text_field(entry: dict[str, Any], name: str, where: str, expected: str, required: bool = True) -> str:
    value = entry.get(name)
    if not isinstance(value, str) or (required and not value.strip()):
        got = "an empty text" if isinstance(value, str) else type(value).__name__
        raise DataError(f"{where}: got {got} for {name!r}, {expected}; correct the line")
    return value


class KnowledgeIndex:
    """Finds the documents that speak of a query.

    With `idf(t) = ln(1 + (N - n_t + 0.5) / (n_t + 0.5))` for a token that `n_t` of the `N` documents hold, a document
    `d` of `|d|` tokens, `a` on average, and a query `q` whose tokens count as often as they stand in it:

        raw(q, d)   = sum over t in q of idf(t) * tf(t, d) / (tf(t, d) + k1 * (1 - b + b * |d| / a))
        bound(q)    = sum over t in q of idf(t)
        score(q, d) = raw(q, d) / bound(q)                                                          in [0, 1)

    `bound` is the score of a document that holds every token of the query without end. A token that no document holds
    is part of it with `n_t = 0`: a query about something else does not reach 1 on the few words it shares with the
    knowledge base. With the constants here a good passage scores 0.3 to 0.6, since one mention gives half of `idf`.

    Args:
        documents (`Sequence[Document]`):
            The knowledge base.

    Raises:
        `DataError`: for no documents, or none with a word in it.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        self._documents = tuple(documents)
        tokens = [words(f"{document.title}\n{document.text}", overlapping=True) for document in self._documents]
        if not any(tokens):
            raise DataError("got no document with a word in it, expected a knowledge base; give one with text")
        self._table = _ScoreTable(tokens)
        self._idf = {token: self._idf_of(frequency) for token, frequency in self._table.frequencies()}
        self._unseen_idf = self._idf_of(0)

    def __len__(self) -> int:
        return len(self._documents)

    def _idf_of(self, frequency: int) -> float:
        return math.log(1 + (len(self) - frequency + 0.5) / (frequency + 0.5))

    def search(self, query: str, top_k: int, score_threshold: float) -> tuple[Passage, ...]:
        """Find passages, best first; the order of the knowledge base decides between equals.

        Args:
            query (`str`):
                What to look for. A word that stands in it twice counts twice.
            top_k (`int`):
                The most passages to give.
            score_threshold (`float`):
                The least score of a passage, in [0, 1], on the scale of the class docstring.

        Returns:
            `tuple[Passage, ...]`: empty when no document shares a token with the query.
        """
        return self._search(words(query, overlapping=True), top_k, score_threshold)

    def search_many(
        self, queries: Iterable[str], top_k: int, score_threshold: float
    ) -> tuple[tuple[Passage, ...], ...]:
        """Find passages for each of several queries, as `search` does for one.

        It is quicker than a search for each: all queries are cut into words before the first is scored, so that the
        dictionary and the scores do not push each other out of the processor's cache.

        Args:
            queries (`Iterable[str]`):
                What to look for.
            top_k (`int`):
                The most passages to give for a query.
            score_threshold (`float`):
                The least score of a passage, as in `search`.

        Returns:
            `tuple[tuple[Passage, ...], ...]`: one entry per query, in the order of the queries.
        """
        cut = [words(query, overlapping=True) for query in queries]
        return tuple(self._search(tokens, top_k, score_threshold) for tokens in cut)

    def _search(self, tokens: list[str], top_k: int, score_threshold: float) -> tuple[Passage, ...]:
        if top_k < 1 or not any(token in self._idf for token in tokens):
            return ()
        bound = sum(self._idf.get(token, self._unseen_idf) for token in tokens)
        found, raw = _contenders(self._table.sums(tokens), top_k)
        scores = np.minimum(raw / bound, 1.0)  # (found,)
        order = np.argsort(-scores, kind="stable")[:top_k]
        order = order[scores[order] >= score_threshold]
        return tuple(map(self._passage, found[order].tolist(), scores[order].tolist()))

    def _passage(self, position: int, score: float) -> Passage:
        document = self._documents[position]
        return Passage(id=document.id, text=document.text, score=score)


class _ScoreTable:
    """What each word adds to the raw score of each document: bm25s's figures, laid out to be added up quickly.

    A word that many documents hold has a row over all documents, any other a list of those that hold it. Both give the
    same sums to the last bit, since a row adds 0 to the rest.

    Args:
        tokens (`Sequence[Sequence[str]]`):
            The words of each document.
    """

    def __init__(self, tokens: Sequence[Sequence[str]]) -> None:
        import bm25s  # here alone: it brings numba, and JAX, which takes a GPU's memory, where that is installed

        bm25 = bm25s.BM25(method="lucene", k1=BM25_K1, b=BM25_B)
        bm25.index(tokens, show_progress=False)
        self._numbers = {token: number for token, number in bm25.vocab_dict.items() if token}
        self._ends = bm25.scores["indptr"].tolist()  # V + 1: word v's entries are those from [v] up to [v + 1]
        self._holders = bm25.scores["indices"].astype(np.intp)  # (entries,); with int32, np.add.at takes twice as long
        self._values = bm25.scores["data"]  # (entries,)
        self._size = math.ceil(len(tokens) / GROUPS) * GROUPS  # D: what the groups share equally
        common = np.flatnonzero(np.diff(self._ends) >= COMMON_SHARE * len(tokens))
        self._rows = {number: self._row(number) for number in common.tolist()}

    def _row(self, number: int) -> NDArray[np.float32]:
        row = np.zeros(self._size, np.float32)
        entries = slice(self._ends[number], self._ends[number + 1])
        row[self._holders[entries]] = self._values[entries]
        return row

    def frequencies(self) -> Iterator[tuple[str, int]]:
        """Every word with how many documents hold it."""
        return ((token, self._ends[number + 1] - self._ends[number]) for token, number in self._numbers.items())

    def sums(self, tokens: Iterable[str]) -> NDArray[np.float32]:
        """The raw score of every document, shape (D,); after the last document, zeros."""
        sums = np.zeros(self._size, np.float32)
        for number in [self._numbers[token] for token in tokens if token in self._numbers]:
            if number in self._rows:
                sums += self._rows[number]
            else:
                entries = slice(self._ends[number], self._ends[number + 1])
                np.add.at(sums, self._holders[entries], self._values[entries])
        return sums


def _contenders(scores: NDArray[np.float32], top_k: int) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    """Positions, rising, and scores of all that may be among the `top_k` highest above 0.

    At least `top_k` scores reach the `top_k`-th highest of the groups' maxima. So a score below it is left out, and a
    group whose maximum lies below it is not looked into.
    """
    grid = scores.reshape(-1, GROUPS)
    maxima = grid.max(axis=0)  # (GROUPS,)
    least = LEAST_SCORE
    if top_k < GROUPS:
        least = max(least, float(np.partition(maxima, -top_k)[-top_k]) * (1 - ROUNDING))
    groups = np.flatnonzero(maxima >= least)
    kept = grid[:, groups]
    rows, columns = np.nonzero(kept >= least)
    return rows * GROUPS + groups[columns], kept[rows, columns]
