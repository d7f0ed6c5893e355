"""The Grafana dashboards, as code."""

import warnings

with warnings.catch_warnings():
    # Version 1 on purpose: every Grafana since 9 reads it from a file; version 2 needs 13 and its API.
    warnings.filterwarnings("ignore", "Prefer using dashboardv2", DeprecationWarning)
    from grafana_foundation_sdk.builders import dashboard, prometheus  # noqa: F401
