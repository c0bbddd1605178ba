"""A BM25 index over a knowledge base, for Chinese and English. `rag_app` searches with it.

`language` cuts text into words, bm25s scores documents. The index is never changed, so threads may share it.
"""

import logging
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from salesrl_trl.data.files import Document
from salesrl_trl.demo.services.language import words
from salesrl_trl.errors import DataError
from salesrl_trl.types import Passage

BM25_K1 = 0.9
"""Saturation of a repeated word: Anserini's default for short passages, such as entries of a knowledge base."""
BM25_B = 0.4  # share of the length correction: Anserini's default for short passages


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

    Raises `DataError` for no documents, or none with a word in it.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        import bm25s  # only here: it imports numba, and an installed JAX, which takes a GPU's memory

        logging.getLogger("bm25s").setLevel(logging.NOTSET)  # its import sets DEBUG
        self._documents = tuple(documents)
        tokens = [words(f"{document.title}\n{document.text}", overlapping=True) for document in self._documents]
        if not any(tokens):
            raise DataError("got no document with a word in it, expected a knowledge base; give one with text")
        self._bm25 = bm25s.BM25(method="lucene", k1=BM25_K1, b=BM25_B)
        self._bm25.index(tokens, show_progress=False)
        self._bm25.scores["indices"] = self._bm25.scores["indices"].astype(np.intp)  # np.add.at takes half as long
        frequencies = Counter(token for document in tokens for token in set(document))
        self._idf = {token: self._idf_of(frequency) for token, frequency in frequencies.items()}
        self._unseen_idf = self._idf_of(0)

    def __len__(self) -> int:
        return len(self._documents)

    def _idf_of(self, frequency: int) -> float:
        return math.log(1 + (len(self) - frequency + 0.5) / (frequency + 0.5))

    def search(self, query: str, top_k: int, score_threshold: float) -> tuple[Passage, ...]:
        """At most `top_k` passages with at least that score in [0, 1], best first. Equal scores keep the order of the
        knowledge base. Empty when no document shares a token with the query."""
        tokens = words(query, overlapping=True)
        known = [token for token in tokens if token in self._idf]
        if top_k < 1 or not known:
            return ()
        bound = sum(self._idf.get(token, self._unseen_idf) for token in tokens)
        raw = self._bm25.get_scores(known)  # (N,)
        places = np.flatnonzero(raw)
        scores = np.minimum(raw[places] / np.float32(bound), 1.0)  # (found,)
        if top_k < len(scores):  # a sort of all would take longer than the rest
            best = scores >= np.partition(scores, -top_k)[-top_k]
            places, scores = places[best], scores[best]
        order = np.argsort(-scores, kind="stable")[:top_k]
        order = order[scores[order] >= score_threshold]
        found = [(self._documents[place], score) for place, score in zip(places[order], scores[order], strict=True)]
        return tuple(Passage(id=document.id, text=document.text, score=float(score)) for document, score in found)
