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


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "FROB")


def test_what_is_not_granted_is_refused_on_every_route_by_every_method(guarded):
    """Routes x methods x (nobody, a wrong token, each scope): what no rule allows is 401, 403 or 405."""
    paths = guarded.app.openapi()["paths"]
    guarded.app.state.context.event_stream.close()  # streams end at once
    callers = {None: {}, "wrong": bearer("wrong-0123456789abcdef")}
    callers |= {scope: bearer(secret) for scope, secret in SECRETS.items()}
    asked = 0
    for path, operations in paths.items():
        for method in METHODS:
            needed = operations.get(method.lower(), {}).get(SCOPE_EXTENSION)
            for caller, headers in callers.items():
                answer = guarded.request(method, path, headers=headers)
                check_granted(answer, needed, caller, sorted(operations))
                asked += 1
    assert asked == len(paths) * len(METHODS) * 6 > 1000


def check_granted(answer, needed, caller, methods):
    """Whether an answer is what a route's scope allows; `needed` None = the path has no such method."""
    where = (answer.request.method, answer.request.url.path, caller)
    known = isinstance(caller, TokenScope)
    included = (caller, needed) == (TokenScope.READ, TokenScope.SCRAPE)
    if needed == "none" or (known and (needed == caller or included)):
        signing_in = needed == "none" and answer.request.method == "POST"
        allowed = (200, 202, 204, 404, 409, 422) if not signing_in else (422,)
        assert answer.status_code in allowed, where
    elif not known:
        assert answer.status_code == 401, where
        assert answer.headers["www-authenticate"].startswith("Bearer"), where
    elif needed is None:
        assert answer.status_code == 405, where
        assert answer.headers["allow"] == ", ".join(methods).upper(), where
    else:
        assert answer.status_code == 403, where
        if answer.request.method != "HEAD":
            document = check_problem(answer, 403, "missing-scope")
            assert (document["needed"], document["granted"]) == (needed, [caller])
            assert f"token '{caller.value}' lacks the scope" in document["detail"]


@pytest.mark.parametrize(
    "path",
    ["/canary/status/", "//canary/status", "/canary//status", "/CANARY/STATUS", "/canary/%2e%2e/metrics",
     "/canary/status%00", "/canary/status;a=b", "/metrics/", "/docs", "/redoc", "/sign-in/"],
)  # fmt: skip
def test_a_spelling_of_a_path_that_is_no_route_serves_nobody(guarded, path):
    assert guarded.get(path).status_code == 401
    for secret in SECRETS.values():
        assert guarded.get(path, headers=bearer(secret)).status_code == 404


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
