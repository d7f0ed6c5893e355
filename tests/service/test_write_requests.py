"""Every order is written down with who gave it, and nobody gives too many."""

from __future__ import annotations

import pytest

from canary_obs.config import ServiceConfig
from canary_obs.records import Pause
from canary_obs.service.app import create_app
from canary_obs.service.context import Dependencies
from tests.service.conftest import bearer, check_problem, client_of

READER, WRITER = "reader-0123456789abcdef", "writer-0123456789abcdef"
TOKENS = f"""
[prometheus]
token = "{READER}"
scopes = ["read"]
[oncall]
token = "{WRITER}"
scopes = ["operate"]
"""


@pytest.fixture
def orders():
    return []


@pytest.fixture
def guarded(hub, rank, orders, tmp_path):
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS)
    config = ServiceConfig(token="single", tokens_file=str(path), orders_per_minute=4)
    with client_of(create_app(hub, config, around=Dependencies(audit=orders.append))) as client:
        yield client


def told(order):
    return order.method, order.route, order.path, order.scope, order.token, order.status


def test_every_order_is_written_down_with_its_giver_and_its_outcome(guarded, rank, orders):
    rank.finishes = False
    sweep = guarded.post("/canary/sweep", headers=bearer(WRITER))
    guarded.delete(sweep.headers["location"], headers=bearer("single"))
    guarded.post("/canary/pause", headers=bearer("single"))
    guarded.post("/canary/sweep", content=b"{bad", headers=bearer(WRITER))
    guarded.post("/canary/acknowledge", headers=bearer(READER))
    place = sweep.headers["location"]
    assert [told(order) for order in orders] == [
        ("POST", "/canary/sweep", "/canary/sweep", "operate", "oncall", 202),
        ("DELETE", "/canary/sweeps/{sweep_id}", place, "operate", "default", 200),
        ("POST", "/canary/pause", "/canary/pause", "operate", "default", 202),
        ("POST", "/canary/sweep", "/canary/sweep", "operate", "oncall", 422),
        ("POST", "/canary/acknowledge", "/canary/acknowledge", "operate", "prometheus", 403),
    ]
    assert [order.location for order in orders] == [place, None, None, None, None]
    assert {order.client for order in orders} == {"127.0.0.1"}
    assert [order.time_ns for order in orders] == sorted(order.time_ns for order in orders)
    assert all(order.seconds >= 0 for order in orders)
    assert READER not in str(orders)
    assert WRITER not in str(orders)


def test_reading_and_strangers_are_not_written_down(guarded, orders):
    for path in ("/metrics", "/canary/status", "/canary/sweeps", "/healthz", "/nowhere"):
        guarded.get(path, headers=bearer("single"))
    guarded.post("/nowhere", headers=bearer("single"))
    # Whoever has no token must not be able to fill the disk.
    check_problem(guarded.post("/canary/sweep", headers=bearer("wrong")), 401)
    assert orders == []


def test_an_order_that_fails_is_written_down_too(guarded, hub, orders, monkeypatch):
    def fail():
        raise RuntimeError("broken")

    monkeypatch.setattr(hub, "pause", fail)
    check_problem(guarded.post("/canary/pause", headers=bearer("single")), 500)
    assert [told(order)[-2:] for order in orders] == [("default", None)]


def test_without_tokens_the_giver_is_nobody(hub, rank, orders):
    with client_of(create_app(hub, around=Dependencies(audit=orders.append))) as client:
        client.post("/canary/resume")
    assert [told(order)[-2:] for order in orders] == [(None, 202)]


def test_too_many_orders_are_refused_and_reach_no_rank(guarded, rank, orders):
    statuses = [guarded.post("/canary/pause", headers=bearer(WRITER)).status_code for _ in range(4)]
    assert statuses == [202] * 4
    refused = guarded.post("/canary/pause", headers=bearer(WRITER))
    check_problem(refused, 429, "too-many-orders")
    assert 1 <= int(refused.headers["retry-after"]) <= 15
    assert rank.received.count(Pause()) == 4
    assert orders[-1].status == 429
    assert guarded.post("/canary/pause", headers=bearer("single")).status_code == 202


def test_reading_is_not_limited_and_refusals_cost_nothing(guarded):
    for _ in range(10):
        assert guarded.get("/metrics", headers=bearer(READER)).status_code == 200
        check_problem(guarded.post("/canary/pause", headers=bearer(READER)), 403, "missing-scope")
