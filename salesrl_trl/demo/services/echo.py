"""Returns each request's `X-Request-Id` with its reply, so that the client can match the two."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
MAX_ID_BYTES = 256
"""Longer ids are not returned."""


class EchoRequestId:
    """Middleware for an ASGI application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        named = [pair for pair in scope.get("headers", ()) if pair[0] == HEADER and len(pair[1]) <= MAX_ID_BYTES]

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *named]
            await send(message)

        await self._app(scope, receive, send_named if named else send)
