"""Vectors for texts, from any OpenAI-compatible embeddings endpoint.

Owns the wire format and what counts as an embedding. The transport owns retries, time-outs and limits.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from salesrl_trl.errors import BadServiceResponse
from salesrl_trl.reward.service.http import HttpClient
from salesrl_trl.reward.service.reply import read_json
from salesrl_trl.reward.service.transport import Transport

SERVICE = "embedding"
"""The service's name in errors and reason codes."""
MAX_BODY_BYTES = 32 * 1024 * 1024
"""Largest answer of the embedding service: 256 texts of 4,096 figures are 23 MB at 22 characters a figure."""


class _EmbeddingBody(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    index: int
    embedding: list[FiniteFloat] = Field(min_length=1, fail_fast=True)


class _EmbeddingsBody(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    data: list[_EmbeddingBody] = Field(fail_fast=True)


class Embedder:
    """Makes vectors from texts, through any OpenAI-compatible `POST {base_url}/embeddings`.

    Args:
        base_url (`str`):
            Address before `/embeddings`, `/v1` included: `"http://127.0.0.1:8000/v1"`.
        model (`str`):
            The model's name there.
        api_key (`str`, *optional*):
            Sent as a bearer token.
        dimension (`int`, *optional*):
            Figures in a vector. The first answer decides when not given.
    """

    def __init__(self, base_url: str, model: str, *, api_key: str | None = None, dimension: int | None = None) -> None:
        self.model = model
        self.identity = f"{model} at {base_url.rstrip('/')}"
        self.dimension = dimension
        self._http = HttpClient(SERVICE, base_url, api_key=api_key, max_body_bytes=MAX_BODY_BYTES)

    async def embed(self, texts: Sequence[str], transport: Transport) -> NDArray[np.float32]:
        """Embed all texts in one request.

        Args:
            texts (`Sequence[str]`):
                At least one, none of them empty.
            transport (`Transport`):
                Sends the request.

        Returns:
            `NDArray[np.float32]` of shape (texts, dimension): vectors of length 1, in the order of the texts.

        Raises:
            `ServiceError`: no vectors, or not those that were asked for.
        """
        body = {"model": self.model, "input": list(texts), "encoding_format": "float"}

        async def attempt() -> NDArray[np.float32]:
            return self._read(await self._http.post("/embeddings", body), len(texts))

        return await transport.call(attempt)

    async def aclose(self) -> None:
        """Close the running loop's connections. The next call opens new ones."""
        await self._http.aclose()

    def _read(self, content: bytes, count: int) -> NDArray[np.float32]:
        try:
            entries = _EmbeddingsBody.model_validate(read_json(content)).data
        except ValueError as error:
            faults = error.error_count() if isinstance(error, ValidationError) else 1
            raise _bad_response(f"a body of {len(content)} bytes that has {faults} faults") from None
        if sorted(entry.index for entry in entries) != list(range(count)):
            raise _bad_response(f"{len(entries)} embeddings that are not one for each of {count} texts")
        dimension = self.dimension or len(entries[0].embedding)
        found = {len(entry.embedding) for entry in entries}
        if found != {dimension}:
            raise _bad_response(f"embeddings of {sorted(found)} figures where {dimension} were expected")
        vectors = np.array([entry.embedding for entry in sorted(entries, key=lambda entry: entry.index)])
        directions = _directions(vectors)
        self.dimension = dimension
        return directions


def _directions(vectors: NDArray[np.float64]) -> NDArray[np.float32]:
    """The vectors at length 1, same shape (count, dimension). Raises `BadServiceResponse` for one of zeros."""
    largest = np.abs(vectors).max(axis=1, keepdims=True)  # (count, 1)
    if not largest.all():
        raise _bad_response("an embedding of zeros, which has no direction")
    scaled = vectors / largest  # first, so that no square overflows
    directions: NDArray[np.float64] = scaled / np.linalg.norm(scaled, axis=1, keepdims=True)
    return directions.astype(np.float32)


def _bad_response(got: str) -> BadServiceResponse:
    return BadServiceResponse(
        f"{SERVICE} answered with {got}. Expected {{data: [{{index, embedding: [finite figures]}}]}}. Check its "
        "address and the model's name.",
        code=f"{SERVICE}_bad_response",
    )
