"""The web application over a hub."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from canary_obs import __version__
from canary_obs.config import ServiceConfig
from canary_obs.errors import ConfigurationError
from canary_obs.hub.hub import Hub
from canary_obs.service.auth import AuthMiddleware
from canary_obs.service.context import AppContext, Dependencies
from canary_obs.service.event_stream import EventStream
from canary_obs.service.fleet import SweepFollower
from canary_obs.service.problems import install_problem_handlers
from canary_obs.service.rate_limiter import RateLimiter
from canary_obs.service.route_policy import RoutePolicy
from canary_obs.service.routes import (
    acknowledgements,
    canary,
    console,
    drills,
    events,
    heal,
    incidents,
    page,
    probes,
    session,
    sweeps,
)
from canary_obs.service.schemas import components, document_scopes
from canary_obs.service.sessions import SessionStore
from canary_obs.service.sign_in import AttemptLimiter, SignIn
from canary_obs.service.token_store import TokenStore
from canary_obs.telemetry.exposition import Exposition
from canary_obs.telemetry.prometheus import HubCollector
from canary_obs.vocabulary import State

_ROUTES = (
    probes, canary, acknowledgements, drills, heal, events, incidents, sweeps, session, console, page,
)  # fmt: skip
ROUTERS = tuple(routes.router for routes in _ROUTES)


class CanaryApp(FastAPI):
    """FastAPI whose OpenAPI document also has the response schemas and the scope of each operation."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        if not self.openapi_schema:
            document = super().openapi()
            document.setdefault("components", {}).setdefault("schemas", {}).update(components())
            document_scopes(document, with_tokens=self.state.with_tokens)
        assert self.openapi_schema is not None
        return self.openapi_schema


def create_app(
    hub: Hub,
    config: ServiceConfig | None = None,
    *,
    token_store: TokenStore | None = None,
    dependencies: Dependencies | None = None,
) -> FastAPI:
    """The web application. Raises ConfigurationError for unusable tokens, or a wide bind without any."""
    config = hub.config if config is None else config
    token_store = TokenStore(config) if token_store is None else token_store
    dependencies = Dependencies() if dependencies is None else dependencies

    def on_tokens(error: ConfigurationError | None) -> None:
        if error is None:
            hub.recovered("tokens_file")
        else:
            hub.fault("tokens_file", error, State.DEGRADED)

    token_store.report_to(on_tokens)
    sessions = SessionStore(config.session_seconds, dependencies.clock)
    limiter = AttemptLimiter(dependencies.clock)
    sign_in = SignIn(token_store=token_store, sessions=sessions, limiter=limiter)
    event_stream = EventStream(hub)
    hub.subscribe(event_stream)
    # FastAPI's documentation pages load scripts from a CDN. /openapi.json is a route of ours, with a scope.
    app = CanaryApp(title="canary_obs", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.with_tokens = not token_store.empty
    app.state.context = AppContext(
        hub=hub,
        config=config,
        event_stream=event_stream,
        metrics=Exposition(
            HubCollector(hub, dependencies.log_dropped, dependencies.exports, dependencies.devices)
        ),
        listening=dependencies.listening,
        sign_in=sign_in,
        sweep_follower=SweepFollower(hub),
        audit=dependencies.audit,
    )
    for router in ROUTERS:
        app.include_router(router)
    install_problem_handlers(app)
    writes = RateLimiter(config.orders_per_minute)
    app.add_middleware(AuthMiddleware, RoutePolicy(ROUTERS), sign_in, writes, dependencies.audit)
    return app
