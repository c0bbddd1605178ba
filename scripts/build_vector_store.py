#!/usr/bin/env python3
"""Embeds a knowledge base and writes it as a local vector store, for training without a RAG service.

    .venv/bin/python scripts/build_vector_store.py --documents knowledge.jsonl --out my_store \\
        --embedding-base-url http://127.0.0.1:8000/v1 --embedding-model my-model [--embedding-key-env MY_KEY]

Documents are JSON lines with `id`, `text`, and optionally `title` and `tenant_id`. All tenants may read a document
without a tenant. Needs the extra `vector-store`. Writes nothing before all documents are embedded.

Exit code: 0 written; 1 the embedding service failed; 2 wrong usage or documents; 130 interrupted.
"""

from salesrl_trl.ground.shutdown import end_tidily

if __name__ == "__main__":
    end_tidily()  # before the imports that take seconds

import argparse
import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from salesrl_trl.data.knowledge import load_documents
from salesrl_trl.data.rows import is_unicode
from salesrl_trl.errors import ConfigError, DataError, ServiceError
from salesrl_trl.ground.service_keys import find_key
from salesrl_trl.reward.rag.embedding import SERVICE, Embedder
from salesrl_trl.reward.rag.vector_store import StoredDocument, has_table, write_table
from salesrl_trl.reward.service.transport import Transport

EXIT_SERVICE = 1
EXIT_USAGE = 2

MAX_CONCURRENCY = 4
"""Requests at the same time. They keep a server with one GPU busy."""
REQUEST_TIMEOUT_S = 120.0
"""Seconds for one batch. A server that loads its model at the first request takes a minute."""
MAX_ATTEMPTS = 4


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    try:
        asyncio.run(build(options))
    except (ConfigError, DataError) as error:
        return failed(error, EXIT_USAGE)
    except ServiceError as error:
        return failed(error, EXIT_SERVICE)
    return 0


def failed(error: Exception, code: int) -> int:
    print(f"build_vector_store: {error}", file=sys.stderr)
    return code


async def build(options: argparse.Namespace) -> None:
    """Read, embed, write. Print the number of documents and the seconds."""
    documents = read_documents(options.documents)
    key = read_key(options.embedding_key_env)
    check_out(options.out, options.overwrite)
    embedder = Embedder(options.embedding_base_url, options.embedding_model, api_key=key)
    started = time.perf_counter()
    try:
        vectors = await embed_all([each.embedded_text for each in documents], embedder, options.batch_size)
    finally:
        await embedder.aclose()
    embedded = time.perf_counter()
    await write_table(options.out, documents, vectors, model=options.embedding_model)
    print(
        f"{len(documents)} documents of {vectors.shape[1]} figures each: embedded in {embedded - started:.1f} s, "
        f"written to {options.out} in {time.perf_counter() - embedded:.1f} s"
    )


async def embed_all(texts: Sequence[str], embedder: Embedder, batch_size: int) -> NDArray[np.float32]:
    """Vectors of shape (texts, dimension). The first batch that fails ends the others."""
    transport = Transport(
        SERVICE,
        max_concurrency=MAX_CONCURRENCY,
        attempt_timeout_s=REQUEST_TIMEOUT_S,
        max_attempts=MAX_ATTEMPTS,
        initial_concurrency=MAX_CONCURRENCY,
        hedge_fraction=0.0,  # nobody waits for the slowest batch
    )
    batches = [texts[start : start + batch_size] for start in range(0, len(texts), batch_size)]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(embedder.embed(batch, transport)) for batch in batches]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return np.concatenate([task.result() for task in tasks])


def read_documents(path: Path) -> list[StoredDocument]:
    """The documents in the form of the embedded service, with their tenants. Raises `DataError`."""
    documents = load_documents(path)
    lines = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    return [
        checked(StoredDocument(id=each.id, text=each.text, title=each.title, tenant_id=tenant_of(line)))
        for each, line in zip(documents, lines, strict=True)
    ]


def tenant_of(line: str) -> str:
    """The tenant of a document, from its line, which is a JSON object with an id."""
    entry = json.loads(line)
    tenant = entry.get("tenant_id") or ""
    if not isinstance(tenant, str):
        raise DataError(f"document {entry['id']!r}: `tenant_id` is no text; write one, or leave it out")
    return tenant


def checked(document: StoredDocument) -> StoredDocument:
    """Raise `DataError` for half a surrogate pair, which JSON can hold and UTF-8 cannot."""
    if not is_unicode("".join(dataclasses.astuple(document))):
        raise DataError(f"document {document.id!r}: holds half a surrogate pair; write the whole character")
    return document


def read_key(variable: str | None) -> str | None:
    """The key, as `find_key` reads it. Raises `ConfigError`; its message never holds the key."""
    if variable is None:
        return None
    key = find_key(variable) or ""
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError("--embedding-key-env names a variable without a key that a header can carry; export the key")
    return key


def check_out(out: Path, overwrite: bool) -> None:
    """Raise `ConfigError` unless a store may be written to the folder."""
    if has_table(out) and not overwrite:
        raise ConfigError(f"{out} holds a vector store already; give --overwrite, or another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out} can't be made a folder ({error.strerror}); choose another one") from error


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=Path, required=True, help="file of JSON lines")
    parser.add_argument("--out", type=Path, required=True, help="folder of the store")
    parser.add_argument("--embedding-base-url", type=_url, required=True, help="OpenAI-style address, /v1 included")
    parser.add_argument("--embedding-model", required=True, help="name of the model at that address")
    parser.add_argument("--embedding-key-env", help="environment variable that holds the key")
    parser.add_argument("--batch-size", type=_count, default=64, help="documents in one request (64)")
    parser.add_argument("--overwrite", action="store_true", help="replace the store in the folder")
    return parser.parse_args(arguments)


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or "@" in parts.netloc:
        raise argparse.ArgumentTypeError("expected an address such as http://127.0.0.1:8000/v1, without a key in it")
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 2048:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number from 1 to 2048")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
