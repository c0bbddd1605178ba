"""A local vector store in place of a RAG service: documents beside their embeddings, in a LanceDB table.

Owns the table's layout, the text that is embedded for a question, and how a distance becomes a score. The module
`embedding` owns how vectors are asked for. `scripts/build_vector_store.py` reads files of documents.

LanceDB is optional, so it is imported when a store is made and not with this module. It brings pandas, a daemon thread
and a second of start-up, but neither numba nor llvmlite, which make vLLM fail.
"""

import asyncio
import datetime
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from salesrl_trl.errors import ConfigError, ServiceError
from salesrl_trl.reward.rag.embedding import Embedder
from salesrl_trl.reward.service.per_event_loop import PerLoop
from salesrl_trl.reward.service.transport import Transport
from salesrl_trl.types import Action, Answer, Passage, RequestIds

if TYPE_CHECKING:  # comes with LanceDB
    import pyarrow as pa  # type: ignore[import-untyped]

TABLE = "knowledge"
"""The table's name inside the store's folder."""
MODEL_KEY = b"embedding_model"
"""Entry of the table's metadata: the model that made its vectors. A table without it is taken to fit."""

QUERY_WEIGHT = 3
"""How often the text that is embedded for an action holds its query. It holds the other fields once. The embedded
service counts alike."""
MAX_TEXT_CHARS = 6_000
"""Length of an embedded question, in characters: within the 8,192 tokens that common models take, in Chinese too."""
SEARCHES_AT_ONCE = 4
"""Searches under way at the same time, in each event loop. A table without an index is read anew by each of them: 16
at once took 2 GB for 20,000 documents of 1,024 figures, and were slower than one after the other."""

NOTHING_FOUND = {
    "zh": "很抱歉，我没有查到相关资料，暂时无法回答这个问题。",
    "en": "I'm sorry, I found nothing about this, so I can't answer the question yet.",
}
"""The answer without passages, by language. The embedded service says the same."""

_HAN = r"\u3400-\u9fff\uf900-\ufaff"
_HAN_CHARACTER = re.compile(rf"[{_HAN}]")
_OTHER_WORD = re.compile(rf"(?:(?![{_HAN}])[^\W\d_])+")
_LANCE_ERRORS = (RuntimeError, ValueError, OSError)
"""Errors of LanceDB for a table that is gone, damaged or of another form."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredDocument:
    """One entry of the store."""

    id: str
    """Unique in the store: `"zh-python-price"`."""
    text: str
    """The words that a customer may get."""
    title: str = ""
    """Embedded before the text, never part of an answer."""
    tenant_id: str = ""
    """The organisation that owns it; empty if all may read it."""

    @property
    def embedded_text(self) -> str:
        """The text that its vector is made from."""
        return f"{self.title}\n{self.text}" if self.title else self.text


class VectorStoreRag:
    """Answers with the nearest document's own words. A `RagBackend`.

    Both questions go to the same embedding service and the same table. Each has a transport of its own, so that the
    traffic figures tell them apart. A run searches the table as it was when the store was opened, without later
    changes.

    If a request names its tenant and the table has a column `tenant_id`, only that tenant's documents and those with
    an empty `tenant_id` are searched. Otherwise all are.

    Args:
        path (`Path` or `str`):
            The folder that `scripts/build_vector_store.py` wrote. Another table needs the columns `id` and `text`
            (strings) and `vector` (32-bit floats, a fixed number), and may have `tenant_id` (string). No value may be
            null. Its scores are as exact as its index.
        embedding_base_url (`str`):
            Address before `/embeddings`, `/v1` included.
        embedding_model (`str`):
            The model's name there: the one that the table was made with.
        transport_8b (`Transport`):
            Limits for embedding the policy's questions. Its service is named `SERVICE`.
        transport_32b (`Transport`):
            Limits for embedding the reference's questions. Its service is named `SERVICE`.
        api_key (`str`, *optional*):
            Sent to the embedding service as a bearer token.
        max_text_chars (`int`, *optional*, defaults to `MAX_TEXT_CHARS`):
            Longer questions are cut to so many characters: actions at the end, conversations at the beginning.

    Raises:
        `ConfigError`: LanceDB is missing, or there is no table that could be searched with this model.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        embedding_base_url: str,
        embedding_model: str,
        transport_8b: Transport,
        transport_32b: Transport,
        api_key: str | None = None,
        max_text_chars: int = MAX_TEXT_CHARS,
    ) -> None:
        snapshot = _examine(_folder(path), embedding_model)
        self._embedder = Embedder(embedding_base_url, embedding_model, api_key=api_key, dimension=snapshot.dimension)
        self._tables: PerLoop[_OpenTable] = PerLoop(partial(_OpenTable, snapshot))
        self._max_text_chars = max_text_chars
        self.transports = {"rag_8b": transport_8b, "rag_32b": transport_32b}
        self.identity = f"{snapshot.identity}, {self._embedder.identity}, {max_text_chars} characters"

    async def chat_8b(
        self, context: str, action: Action, score_threshold: float, top_k: int, *, ids: RequestIds
    ) -> Answer:
        """Answer from the action; see `RagBackend`. The conversation is not looked at.

        The embedded text has a line for each part: the query `QUERY_WEIGHT` times, then the other fields. Empty parts
        are left out.
        """
        parts = [action.query] * QUERY_WEIGHT + action.others
        text = "\n".join(part for part in parts if part.strip())[: self._max_text_chars]
        vector = await self._embedder.embed([text], self.transports["rag_8b"])
        return await self._answer(action.query, vector[0], score_threshold, top_k, ids)

    async def chat(self, context: str, score_threshold: float, top_k: int, *, ids: RequestIds) -> Answer:
        """Answer from the conversation as it is; see `RagBackend`."""
        vector = await self._embedder.embed([context[-self._max_text_chars :]], self.transports["rag_32b"])
        return await self._answer(context, vector[0], score_threshold, top_k, ids)

    async def aclose(self) -> None:
        """Close the running loop's connections and its table. The next call opens new ones."""
        await self._embedder.aclose()
        table = self._tables.pop()
        if table is not None:
            table.close()

    async def _answer(
        self, question: str, vector: NDArray[np.float32], score_threshold: float, top_k: int, ids: RequestIds
    ) -> Answer:
        """`took_ms` covers the search and the wait for its turn, not the embedding."""
        started = time.perf_counter()
        rows = await self._tables.get().nearest(vector, top_k, ids.tenant_id)
        took_ms = (time.perf_counter() - started) * 1000
        passages = tuple(passage for passage in map(_passage, rows) if passage.score >= score_threshold)
        text = passages[0].text if passages else NOTHING_FOUND["zh" if _is_chinese(question) else "en"]
        return Answer(text=text, passages=passages, took_ms=took_ms)


class _Found(TypedDict):
    """A row that a search found."""

    id: str
    text: str
    _distance: float


def _passage(row: _Found) -> Passage:
    """With `score = max(0, cosine similarity)`, where LanceDB's distance is `1 - cosine similarity`."""
    return Passage(id=row["id"], text=row["text"], score=min(max(1.0 - row["_distance"], 0.0), 1.0))


def _is_chinese(text: str) -> bool:
    """Whether Chinese characters outnumber the words in other letters."""
    return len(_HAN_CHARACTER.findall(text)) > len(_OTHER_WORD.findall(text))


# The table


@dataclass(frozen=True, kw_only=True, slots=True)
class _Snapshot:
    """A table as it was at one moment."""

    folder: str
    version: int
    written: str
    """When that version was written, in UTC. A store that is deleted and built anew counts its versions anew."""
    dimension: int
    has_tenants: bool

    @property
    def identity(self) -> str:
        return f"{self.folder}/{TABLE} version {self.version} of {self.written}"


class _OpenTable:
    """A snapshot's table as one event loop uses it. It is opened by the first search."""

    def __init__(self, snapshot: _Snapshot) -> None:
        self._snapshot = snapshot
        self._slots = asyncio.Semaphore(SEARCHES_AT_ONCE)
        self._opening = asyncio.Lock()
        self._table: Any = None

    async def nearest(self, vector: NDArray[np.float32], top_k: int, tenant_id: str) -> list[_Found]:
        """At most `top_k` rows, nearest first. Raises `ServiceError`."""
        async with self._slots:
            try:
                return await self._search(vector, top_k, tenant_id)
            except _LANCE_ERRORS as error:
                raise ServiceError(  # LanceDB's own words may hold a tenant's name
                    f"the vector store at {self._snapshot.folder} could not be searched ({type(error).__name__}). "
                    f"Expected version {self._snapshot.version} of its table, as at the start: was it deleted?",
                    code="vector_store_failed",
                ) from None

    async def _search(self, vector: NDArray[np.float32], top_k: int, tenant_id: str) -> list[_Found]:
        table = await self._opened()
        query = table.vector_search(vector).distance_type("cosine").limit(top_k)
        query = query.select(["id", "text", "_distance"])
        if self._snapshot.has_tenants and tenant_id:
            query = query.where(_open_to(tenant_id))
        rows: list[_Found] = (await query.to_arrow()).to_pylist()
        return sorted(rows, key=lambda row: (row["_distance"], row["id"]))

    async def _opened(self) -> Any:
        async with self._opening:
            if self._table is None:
                connection = await _lancedb().connect_async(self._snapshot.folder)
                table = await connection.open_table(TABLE)
                await table.checkout(self._snapshot.version)
                self._table = table
            return self._table

    def close(self) -> None:
        if self._table is not None:
            self._table.close()


def _open_to(tenant_id: str) -> object:
    """The condition on rows. An expression, not SQL: a tenant's name is data, and could close the quotes around it."""
    from lancedb.expr import col, lit

    return (col("tenant_id") == lit(tenant_id)) | (col("tenant_id") == lit(""))


def _examine(folder: str, model: str) -> _Snapshot:
    """The newest version of the table, checked."""
    lancedb = _lancedb()
    if not has_table(folder):
        raise ConfigError(
            f"{folder} holds no vector store. Expected a folder with a table {TABLE!r} in it. Build one with "
            "scripts/build_vector_store.py."
        )
    try:
        table = lancedb.connect(folder).open_table(TABLE)
        latest = max(table.list_versions(), key=lambda each: int(each["version"]))
        schema = table.schema
    except _LANCE_ERRORS as error:
        raise ConfigError(
            f"the vector store at {folder} cannot be opened ({type(error).__name__}: {error}). Build it again with "
            "scripts/build_vector_store.py --overwrite."
        ) from error
    _check_model(folder, schema, model)
    return _Snapshot(
        folder=folder,
        version=latest["version"],
        written=latest["timestamp"].astimezone(datetime.UTC).isoformat(),
        dimension=_dimension(folder, schema),
        has_tenants="tenant_id" in schema.names,
    )


def _check_model(folder: str, schema: "pa.Schema", model: str) -> None:
    made_with = (schema.metadata or {}).get(MODEL_KEY, model.encode()).decode()
    if made_with != model:
        raise ConfigError(
            f"the vector store at {folder} was made with the embedding model {made_with!r}. Expected {model!r}: the "
            "vectors of two models can't be compared. Name that model, or build the store again."
        )


def _dimension(folder: str, schema: "pa.Schema") -> int:
    types = {field.name: field.type for field in schema}
    dimension = getattr(types.get("vector"), "list_size", None)  # only lists of one length have it
    if dimension is None or not {"id", "text"} <= types.keys():
        columns = ", ".join(f"{name}: {kind}" for name, kind in types.items())
        raise ConfigError(
            f"the vector store at {folder} has the columns {columns}. Expected id and text, strings, and vector, a "
            "list of 32-bit floats of fixed length. Build it with scripts/build_vector_store.py."
        )
    return int(dimension)


def has_table(path: Path | str) -> bool:
    """Whether a store's folder holds a table already. Does not need LanceDB."""
    return (Path(_folder(path)) / f"{TABLE}.lance").is_dir()


async def write_table(
    path: Path | str, documents: Sequence[StoredDocument], vectors: NDArray[np.float32], *, model: str
) -> None:
    """Write a store's table. It replaces the one that may be there, which stays for the runs that have it open.

    The index keeps all vectors in memory and compares every one, so a search is exact: 4 ms for 20,000 documents of
    1,024 figures, against 80 ms without an index.

    Args:
        path (`Path` or `str`):
            The store's folder, which is made where it is missing.
        documents (`Sequence[StoredDocument]`):
            At least one.
        vectors (`NDArray[np.float32]` of shape (documents, dimension)):
            The vector of each document, at length 1.
        model (`str`):
            The embedding model that made them.

    Raises:
        `ConfigError`: LanceDB is missing, or the folder cannot be written to.
    """
    lancedb = _lancedb()
    from lancedb.index import IvfFlat

    try:
        connection = await lancedb.connect_async(_folder(path))
        mode = "overwrite" if has_table(path) else "create"
        table = await connection.create_table(TABLE, _rows(documents, vectors, model), mode=mode)
        await table.create_index("vector", config=IvfFlat(distance_type="cosine", num_partitions=1))
        table.close()
    except _LANCE_ERRORS as error:
        raise ConfigError(
            f"no vector store can be written to {path} ({type(error).__name__}: {error}). Expected a folder with "
            "room and the right to write. Choose another one."
        ) from error


def _rows(documents: Sequence[StoredDocument], vectors: NDArray[np.float32], model: str) -> object:
    """The table's content. Tenants have a column where there are any."""
    import pyarrow as pa

    dimension = vectors.shape[1]
    columns = {"id": pa.array([each.id for each in documents]), "text": pa.array([each.text for each in documents])}
    if any(each.tenant_id for each in documents):
        columns["tenant_id"] = pa.array([each.tenant_id for each in documents])
    columns["vector"] = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), dimension)
    fields = [pa.field(name, column.type, nullable=False) for name, column in columns.items()]
    return pa.table(columns, schema=pa.schema(fields, metadata={MODEL_KEY: model.encode()}))


def _folder(path: Path | str) -> str:
    """Absolute, since LanceDB takes some short names for an address of its cloud."""
    return str(Path(path).expanduser().resolve())


def _lancedb() -> ModuleType:
    try:
        import lancedb
    except ImportError as error:
        raise ConfigError(
            "a vector store needs LanceDB, which is not installed. Expected the extra `vector-store`: "
            '`pip install "salesrl_trl[vector-store]"`.'
        ) from error
    return lancedb
