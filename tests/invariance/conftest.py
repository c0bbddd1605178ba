"""Training with services whose answers are deterministic."""

import pytest
from pytest_httpserver import HTTPServer
from support.keyed import build_keyed, course_of, judge
from support.loopback import Services


@pytest.fixture(scope="session")
def services_url():
    """One server per session, because runs shared by several tests need it too."""
    with HTTPServer(host="127.0.0.1", port=0, threaded=True) as server:
        services = Services(server)
        services.judge_by(judge)
        yield services.url


@pytest.fixture(scope="session")
def train(tiny, services_url, tmp_path_factory):
    """Train on one rank in this process. Returns the events from `course_of` and the final `weights`."""

    def run(*callbacks, output_dir=None, resume_from=None, text_of=None, **settings):
        output_dir = output_dir or tmp_path_factory.mktemp("run")
        trainer = build_keyed(tiny, services_url, output_dir, **settings)
        if text_of is not None:
            trainer.text_of = text_of
        course = course_of(trainer, *callbacks, resume_from=resume_from)
        return {**course, "weights": trainer.model.state_dict()}

    return run
