"""schemathesis: responses to valid and invalid requests conform to the OpenAPI document."""

from __future__ import annotations

from pathlib import Path

import pytest

from canary_obs.hub.hub import Hub
from canary_obs.service.app import create_app
from canary_obs.service.route_policy import TokenScope
from tests.service.api_cases import Api, answers_to, never_done, write_tokens
from tests.sizes import sized

# With each scope; `make fuzz` asks 5000 times, and .ci/nightly does so with fresh seeds.
CASES = sized(80, 25)


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    return Api(write_tokens(tmp_path_factory.mktemp("api") / "tokens.toml"))


@pytest.mark.parametrize("scope", TokenScope)
def test_every_answer_to_a_scope_is_described(api, scope):
    answers = answers_to(api, scope, CASES, seed=1)
    assert answers.total() >= CASES
    assert not any(status >= 500 for _, status in answers)
    assert never_done(api, scope, answers) == []


@pytest.mark.slow
def test_responses_conform_to_the_schema():
    """Cases are made as they are collected, which takes seconds: here, and not with all other tests."""
    own = str(Path(__file__).with_name("schema_cases.py"))
    options = "-q --noconftest -p no:xdist -p no:cacheprovider -o timeout=0"  # the limit is this test's
    ended = pytest.main([*options.split(), "-p", "schemathesis.pytest.plugin", own])
    assert ended is pytest.ExitCode.OK


def test_every_route_documents_its_problems():
    document = create_app(Hub()).openapi()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            for status, answer in operation["responses"].items():
                if int(status) >= 400:
                    assert list(answer["content"]) == ["application/problem+json"], (path, method, status)


@pytest.mark.parametrize("name", ["StatusReport", "SweepRecord", "ViolationPage", "ProblemDocument"])
def test_responses_are_described(name):
    components = create_app(Hub()).openapi()["components"]["schemas"]
    assert components[name]["properties"]
