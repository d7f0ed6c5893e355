"""Each operation of the OpenAPI document, as schemathesis asks it; test_schema.py has pytest run them."""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, settings

from canary_obs.config import ServiceConfig
from canary_obs.hub.hub import Hub
from canary_obs.records import Violations
from canary_obs.service.app import create_app
from tests.service.conftest import FakeRank
from tests.service.fakes import violation

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
