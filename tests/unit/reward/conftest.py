"""A reward chain over loopback services."""

import asyncio

import pytest
from support.loopback import Services, build_reward, row


@pytest.fixture
def services(httpserver):
    return Services(httpserver)


@pytest.fixture
def score(services):
    """Score completions against the services, in an event loop of its own: `score([text], rows=..., **settings)`."""

    def run(completions, rows=None, indices=None, *, url=None, **settings):
        reward = build_reward(url or services.url, rows or [row()], **settings)

        async def once():
            try:
                return await reward(
                    prompts=[None] * len(completions), completions=completions, row=indices or [0] * len(completions)
                )
            finally:
                await reward.aclose()

        values = asyncio.run(once())
        assert values == [item.value for item in reward.last]
        return reward

    return run
