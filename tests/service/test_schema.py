"""schemathesis: responses to valid and invalid requests conform to the OpenAPI document."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from canary_obs.config import ServiceConfig
from canary_obs.hub.hub import Hub
from canary_obs.records import Violations
from canary_obs.service.app import create_app
from canary_obs.service.route_policy import TokenScope
from tests.service.api_cases import Api, answers_to, never_done, write_tokens
from tests.service.conftest import FakeRank
from tests.service.fakes import violation

CASES = 80  # with each scope; `make fuzz` asks 5000 times, and .ci/nightly does so with fresh seeds


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    return Api(write_tokens(tmp_path_factory.mktemp("api") / "tokens.toml"))


@pytest.mark.parametrize("scope", TokenScope)
def test_every_answer_to_a_scope_is_described(api, scope):
    answers = answers_to(api, scope, CASES, seed=1)
    assert answers.total() >= CASES
    assert not any(status >= 500 for _, status in answers)
    assert never_done(api, scope, answers) == []


# Without tokens the document has neither scopes nor the responses 401, 403 and 429.
HUB = Hub(ServiceConfig(snapshot_stale_seconds=3600.0, orders_per_minute=100_000))
RANK = FakeRank(HUB, sends_hello=False)
RANK.send(Violations(identity=RANK.identity, rows=(violation(3),)))
APP = create_app(HUB)
APP.state.context.event_stream.close()  # streams of events end at once
schema = schemathesis.openapi.from_asgi("/openapi.json", APP, headers={"Host": "127.0.0.1"})


@schema.parametrize()
@settings(max_examples=5, derandomize=True, suppress_health_check=list(HealthCheck))
def test_responses_conform_to_the_schema(case):
    case.call_and_validate(headers={"Host": "127.0.0.1"})


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
