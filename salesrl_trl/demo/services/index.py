"""A BM25 index over a knowledge base, for Chinese and English.

Owns the score of a passage. `language` cuts text into words. Refuses to know HTTP, actions, or the form of an answer.
The index is built once and never changed, so threads may share it.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from salesrl_trl.data.knowledge import Document
from salesrl_trl.demo.services.language import words
from salesrl_trl.errors import DataError
from salesrl_trl.types import Passage

BM25_K1 = 0.9
"""Saturation of a repeated word: Anserini's default for short passages, such as entries of a knowledge base."""
BM25_B = 0.4
"""Share of the length correction: Anserini's default for short passages."""

COMMON_SHARE = 1 / 8
"""A word in at least this share of the documents has its scores in a row over all documents. Adding a row costs a few
microseconds for 20,000 documents. Adding a list of an eighth of the documents costs as much. The share also bounds the
memory: there are at most 8 times as many rows as the average document has different words."""
GROUPS = 512
"""Number of groups of documents, for a quick search of the best. It was the quickest of 256, 512 and 1,024 at 20,000
documents. A search for this many passages or more reads every document's score."""
ROUNDING = 1e-6
"""Relative difference below which two scores may become equal after a division by a bound, in 32-bit floats."""
LEAST_SCORE = float(np.finfo(np.float32).tiny)
"""Positive, and below the raw score of every document with a word of the query."""


class KnowledgeIndex:
    """Finds the documents about a query.

    Of the `N` documents, `n_t` contain the token `t`, and `idf(t) = ln(1 + (N - n_t + 0.5) / (n_t + 0.5))`. A document
    `d` has `|d|` tokens, `a` on average. A token that is in the query `q` twice counts twice:

        raw(q, d)   = sum over t in q of idf(t) * tf(t, d) / (tf(t, d) + k1 * (1 - b + b * |d| / a))
        bound(q)    = sum over t in q of idf(t)
        score(q, d) = raw(q, d) / bound(q)                                                          in [0, 1)

    `bound` is the limit of the raw score when a document repeats every token of the query. It includes tokens that no
    document contains, with `n_t = 0`, so a query about another subject gets a low score for the few words it shares
    with the knowledge base. With the constants here a good passage scores 0.3 to 0.6: one mention gives half of `idf`.

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
        """Find passages, best first. Equal scores keep the order of the knowledge base.

        Args:
            query (`str`):
                Text of the query. A word that is in it twice counts twice.
            top_k (`int`):
                Most passages to return.
            score_threshold (`float`):
                Lowest score of a passage, in [0, 1], as the class docstring defines it.

        Returns:
            `tuple[Passage, ...]`: empty when no document shares a token with the query.
        """
        return self._search(words(query, overlapping=True), top_k, score_threshold)

    def search_many(
        self, queries: Iterable[str], top_k: int, score_threshold: float
    ) -> tuple[tuple[Passage, ...], ...]:
        """Find passages for each of several queries, as `search` does for one.

        This is quicker than one search after the other. All queries are cut into words before the first is scored, so
        the dictionary and the scores do not push each other out of the processor's cache.

        Args:
            queries (`Iterable[str]`):
                Texts of the queries.
            top_k (`int`):
                Most passages to return for a query.
            score_threshold (`float`):
                Lowest score of a passage, as in `search`.

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
    """The scores that each word adds to each document, from bm25s, in a form for quick sums.

    A word in many documents has a row over all documents. Any other word has a list of its documents. Both give the
    same sums to the last bit, because a row adds 0 to the other documents.

    Args:
        tokens (`Sequence[Sequence[str]]`):
            The words of each document.
    """

    def __init__(self, tokens: Sequence[Sequence[str]]) -> None:
        import bm25s  # only here: it imports numba, and an installed JAX, which takes a GPU's memory

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
        """Every word, with the number of documents that contain it."""
        return ((token, self._ends[number + 1] - self._ends[number]) for token, number in self._numbers.items())

    def sums(self, tokens: Iterable[str]) -> NDArray[np.float32]:
        """The raw score of every document, shape (D,). After the last document there are zeros."""
        sums = np.zeros(self._size, np.float32)
        for number in [self._numbers[token] for token in tokens if token in self._numbers]:
            if number in self._rows:
                sums += self._rows[number]
            else:
                entries = slice(self._ends[number], self._ends[number + 1])
                np.add.at(sums, self._holders[entries], self._values[entries])
        return sums


def _contenders(scores: NDArray[np.float32], top_k: int) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    """Positions, rising, and scores that may be among the `top_k` highest above 0.

    At least `top_k` scores reach the `top_k`-th highest of the groups' maxima. So lower scores, and groups with a
    lower maximum, are left out.
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
