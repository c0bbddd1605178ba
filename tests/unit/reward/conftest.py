"""A reward chain over loopback services."""

import pytest
from support.loopback import Services, build_reward, row, score_batch


@pytest.fixture
def services(httpserver):
    return Services(httpserver)


@pytest.fixture
def score(services):
    """Score completions against the services, in an event loop of its own: `score([text], rows=..., **settings)`."""

    def run(completions, rows=None, indices=None, *, url=None, **settings):
        reward = build_reward(url or services.url, rows or [row()], **settings)
        score_batch(reward, completions, indices)
        return reward

    return run
