"""The service: whether it answers, to whom, and with which release."""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime
from typing import Any

from canary_obs import __version__
from canary_obs.cli.doctor.finding import Findings
from canary_obs.cli.exit_codes import CommandFailed
from canary_obs.cli.service_client import ServiceClient

_SKEW_SECONDS = 5.0


def examine_service(findings: Findings, client: ServiceClient) -> dict[str, Any] | None:
    """The service's status; None where it does not answer with it."""
    try:
        ready = client.request("GET", "/readyz", accepted=(503,))
        if ready.status == 503:
            findings.problem(
                "service", f"{client.url} takes no engines: {ready.content['detail']}", "Restart it."
            )
        status: dict[str, Any] = client.get("/canary/status")
        document = client.get("/openapi.json")
    except CommandFailed as failed:
        findings.problem("service", str(failed), "Until then nobody hears what engines find.")
        return None
    findings.fine("service", f"{client.url} answers, state {status['state']}")
    _examine_release(findings, status["version"])
    _examine_clock(findings, client)
    if "securitySchemes" not in document.get("components", {}):
        findings.warning(
            "tokens", "the service has no token: everybody who reaches it may operate it",
            "Set KV_CANARY_TOKEN or KV_CANARY_TOKENS_FILE for it, and --token-file here.",
        )  # fmt: skip
    return status


def _examine_release(findings: Findings, version: str) -> None:
    if version == __version__:
        findings.fine("versions", f"the service runs the same release, {version}")
    else:
        findings.problem(
            "versions", f"the service runs canary_obs {version}, this command {__version__}",
            "Run one release everywhere: messages of another one are refused.",
        )  # fmt: skip


def _examine_clock(findings: Findings, client: ServiceClient) -> None:
    before = time.time()
    date = client.date()
    if date is None:
        findings.unknown("clock", "the service sends no Date", "Compare `date -u` on both hosts.")
        return
    skew = parsedate_to_datetime(date).timestamp() - before
    if abs(skew) > _SKEW_SECONDS:
        findings.problem(
            "clock", f"this host and the service's differ by {skew:.0f} s",
            "Let both follow NTP (chronyc tracking): times in logs and traces will not match.",
        )  # fmt: skip
    else:
        findings.fine("clock", "this host and the service's agree to 5 s")
