"""schemathesis: responses to valid and invalid requests conform to the OpenAPI document."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from canary_obs.config import ServiceConfig
from canary_obs.hub.hub import Hub
from canary_obs.records import Violations
from canary_obs.service.app import create_app
from tests.service.conftest import FakeRank
from tests.service.fakes import violation

HUB = Hub(ServiceConfig(snapshot_stale_seconds=3600.0, orders_per_minute=100_000))
# Without its hello the hub knows no groups, so that it accepts any group name.
RANK = FakeRank(HUB, sends_hello=False)
RANK.send(Violations(identity=RANK.identity, rows=tuple(violation(slot) for slot in range(5))))
APP = create_app(HUB)
APP.state.context.event_stream.close()  # streams of events end at once
schema = schemathesis.openapi.from_asgi("/openapi.json", APP, headers={"Host": "127.0.0.1"})


@schema.parametrize()
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
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


# With tokens the document also has the scope of each operation, and the responses 401, 403 and 429.
TOKEN = "schema-0123456789abcdef"
GUARDED = create_app(HUB, ServiceConfig(token=TOKEN, orders_per_minute=100_000))
GUARDED.state.context.event_stream.close()
guarded = schemathesis.openapi.from_asgi(
    "/openapi.json", GUARDED, headers={"Host": "127.0.0.1", "Authorization": f"Bearer {TOKEN}"}
)


@guarded.parametrize()
@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_responses_conform_to_the_schema_with_tokens(case):
    case.call_and_validate(headers={"Host": "127.0.0.1", "Authorization": f"Bearer {TOKEN}"})
