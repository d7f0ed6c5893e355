"""The web application over a hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI

from canary_obs import __version__
from canary_obs.config import ServiceConfig
from canary_obs.pipeline.hub import Hub
from canary_obs.service.auth import Gate, check_exposure
from canary_obs.service.desk import Desk
from canary_obs.service.problems import answer_with_problems
from canary_obs.service.routes import canary, incidents, page, probes, sweeps
from canary_obs.service.schemas import components
from canary_obs.telemetry.export_queue import ExportCounts
from canary_obs.telemetry.prometheus import HubCollector, registry_for


class CanaryApp(FastAPI):
    """FastAPI whose OpenAPI document also holds the answers' own schemas."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        if not self.openapi_schema:
            document = super().openapi()
            document.setdefault("components", {}).setdefault("schemas", {}).update(components())
        assert self.openapi_schema is not None
        return self.openapi_schema


def create_app(
    hub: Hub,
    config: ServiceConfig | None = None,
    *,
    log_dropped: Callable[[], int] = lambda: 0,
    exports: Callable[[], Mapping[str, ExportCounts]] = dict,
    listening: Callable[[], bool] = lambda: True,
) -> FastAPI:
    """The application. Raises ConfigurationError for a bind wider than loopback without a token."""
    config = hub.config if config is None else config
    check_exposure(config)
    # FastAPI's own documentation pages load scripts from elsewhere.
    app = CanaryApp(title="canary_obs", version=__version__, docs_url=None, redoc_url=None)
    app.state.desk = Desk(
        hub=hub,
        config=config,
        registry=registry_for(HubCollector(hub, log_dropped, exports)),
        listening=listening,
    )
    for routes in (probes, canary, incidents, sweeps, page):
        app.include_router(routes.router)
    answer_with_problems(app)
    app.add_middleware(Gate, token=config.token)
    return app
