from __future__ import annotations

import pytest
from fastapi import APIRouter

from canary_obs.config import ServiceConfig
from canary_obs.hub.hub import Hub
from canary_obs.records import StartSweep
from canary_obs.service.app import ROUTERS, create_app
from canary_obs.service.route_policy import SCOPE_EXTENSION, RoutePolicy, TokenScope
from tests.service.conftest import bearer, check_problem, client_of

SECRETS = {scope: f"{scope.value}-0123456789abcdef" for scope in TokenScope}


@pytest.fixture
def guarded(hub, rank, tmp_path):
    tables = [f'[{scope.value}]\ntoken = "{SECRETS[scope]}"\nscopes = ["{scope}"]\n' for scope in TokenScope]
    path = tmp_path / "tokens.toml"
    path.write_text("".join(tables))
    path.chmod(0o600)
    app = create_app(hub, ServiceConfig(host="0.0.0.0", tokens_file=str(path), drill_enabled=True))
    with client_of(app, "http://canary.example") as client:
        yield client


def test_every_route_declares_its_scope():
    document = create_app(Hub()).openapi()
    declared = {
        (method.upper(), path): operation[SCOPE_EXTENSION]
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert len(declared) > 12
    assert {route for route, scope in declared.items() if scope == "none"} == {
        ("GET", "/healthz"),
        ("GET", "/readyz"),
        ("GET", "/sign-in"),
        ("GET", "/console/assets/{name}"),
        ("POST", "/console/session"),
    }
    for (method, path), scope in declared.items():
        own_session = path == "/console/session"
        assert method == "GET" or scope in ("operate", "inject") or own_session, path


def test_a_route_without_a_scope_is_refused_at_start():
    undeclared = APIRouter()

    @undeclared.get("/undeclared")
    async def answer() -> str:
        return "never"

    with pytest.raises(ValueError, match=r"/undeclared.*declares no scope"):
        RoutePolicy([*ROUTERS, undeclared])


def test_a_route_outside_the_policy_is_not_served(hub):
    app = create_app(hub)
    app.add_api_route("/late", lambda: "never")
    with client_of(app) as client:
        check_problem(client.get("/late"), 404)


def test_each_scope_grants_its_own_routes_and_no_other(guarded):
    operations = guarded.app.openapi()["paths"].items()
    guarded.app.state.context.event_stream.close()  # streams end at once
    routes = [(method, path, methods[method]) for path, methods in operations for method in methods]
    for method, path, operation in routes:
        for scope, secret in SECRETS.items():
            answer = guarded.request(method.upper(), path, headers=bearer(secret))
            included = (scope, operation[SCOPE_EXTENSION]) == (TokenScope.READ, TokenScope.SCRAPE)
            if included or operation[SCOPE_EXTENSION] in (scope, "none"):
                assert answer.status_code in (200, 202, 204, 404, 409, 422), path
            else:
                document = check_problem(answer, 403, "missing-scope")
                assert (document["needed"], document["granted"]) == (operation[SCOPE_EXTENSION], [scope])
                assert f"token '{scope.value}' lacks the scope" in document["detail"]


def test_a_refused_write_request_reaches_no_rank(guarded, rank):
    check_problem(
        guarded.post("/canary/sweep", headers=bearer(SECRETS[TokenScope.READ])), 403, "missing-scope"
    )
    assert not any(isinstance(command, StartSweep) for command in rank.received)
    assert guarded.post("/canary/sweep", headers=bearer(SECRETS[TokenScope.OPERATE])).status_code == 202


def test_the_document_states_the_scope_of_each_operation_where_tokens_are_set(guarded, hub):
    operation = guarded.app.openapi()["paths"]["/canary/sweep"]["post"]
    assert operation["security"] == [{"bearer": ["operate"]}]
    assert {"401", "403"} <= operation["responses"].keys()
    assert guarded.app.openapi()["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    plain = create_app(hub).openapi()
    assert "security" not in plain["paths"]["/canary/sweep"]["post"]
    assert "401" not in plain["paths"]["/canary/sweep"]["post"]["responses"]
    assert "responses" in plain["paths"]["/healthz"]["get"]
