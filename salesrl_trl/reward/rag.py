"""The RAG service's client.

Owns the wire format of both endpoints. Retries, timeouts and limits are the transport's.
"""

from typing import Any

import httpx2
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from salesrl_trl.errors import BadServiceResponse
from salesrl_trl.reward.transport import Transport
from salesrl_trl.types import Action, Answer, Passage, SalesRow


class _PassageBody(BaseModel):
    model_config = ConfigDict(extra="ignore")
    id: str
    text: str
    score: float = Field(allow_inf_nan=False)


class _AnswerBody(BaseModel):
    model_config = ConfigDict(extra="ignore")
    answer: str
    passages: list[_PassageBody]
    took_ms: float = Field(ge=0, allow_inf_nan=False)


class RagClient:
    """Asks the policy-driven "8B" endpoint and the frozen "32B" reference endpoint.

    The HTTP client is made at the first call, on the event loop that makes it.

    Args:
        base_url (`str`):
            Address before `/v1/rag/...`, for example `"http://127.0.0.1:8801"`.
        score_threshold (`float`):
            Passages below this normalised score in [0, 1] are left out.
        top_k (`int`):
            Most passages to retrieve.
        transport_8b (`Transport`):
            Limits for the 8B endpoint.
        transport_32b (`Transport`):
            Limits for the 32B endpoint.
        api_key (`str`, *optional*):
            Sent as a bearer token.
    """

    def __init__(
        self,
        base_url: str,
        *,
        score_threshold: float,
        top_k: int,
        transport_8b: Transport,
        transport_32b: Transport,
        api_key: str | None = None,
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._limits = {"score_threshold": score_threshold, "top_k": top_k}
        self._transports = {"8b": transport_8b, "32b": transport_32b}
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client: httpx2.AsyncClient | None = None

    async def chat_8b(self, row: SalesRow, action: Action) -> Answer:
        """Answer from the policy's action. Raises `ServiceError`."""
        body = {
            "tenant_id": row.tenant_id,
            "contact_id": row.contact_id,
            "account_id": row.account_id,
            "message_id": row.message_id,
            "context": row.context,
            "user_profile": action.user_profile,
            "rewritten_query": action.rewritten_query,
            "history_summary": action.history_summary,
        }
        return await self._ask("8b", body)

    async def chat_32b(self, row: SalesRow) -> Answer:
        """The frozen reference's answer from the raw conversation. Raises `ServiceError`."""
        return await self._ask("32b", {"context": row.context})

    async def aclose(self) -> None:
        """Close the connections. The next call opens new ones."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _ask(self, endpoint: str, body: dict[str, Any]) -> Answer:
        transport = self._transports[endpoint]

        async def attempt() -> Answer:
            response = await self._http().post(f"/v1/rag/{endpoint}", json={**body, **self._limits})
            response.raise_for_status()
            return _read_answer(response.content, transport.service)

        return await transport.call(attempt)

    def _http(self) -> httpx2.AsyncClient:
        if self._client is None:
            # Timeouts are the transport's; redirects are not followed, so that no customer text leaves the host.
            self._client = httpx2.AsyncClient(
                base_url=self._base_url,
                headers=self._headers,
                timeout=None,
                follow_redirects=False,
                trust_env=False,
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            )
        return self._client


def _read_answer(content: bytes, service: str) -> Answer:
    try:
        body = _AnswerBody.model_validate_json(content)
    except ValidationError as error:
        raise BadServiceResponse(
            f"{service} answered with a body of {len(content)} bytes that has {error.error_count()} faults. Expected "
            "{answer, passages: [{id, text, score}], took_ms}.",
            code=f"{service}_bad_response",
        ) from None
    passages = tuple(Passage(id=item.id, text=item.text, score=item.score) for item in body.passages)
    return Answer(text=body.answer, passages=passages, took_ms=body.took_ms)
