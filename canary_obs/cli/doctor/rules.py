"""Prometheus: whether it scrapes the service and has the rules."""

from __future__ import annotations

from typing import Any

from canary_obs.cli.doctor.finding import Findings
from canary_obs.cli.exit_codes import CommandFailed
from canary_obs.cli.service_client import ServiceClient
from canary_obs.plurals import counted

_GROUPS = {"kv-canary-blind", "kv-canary-damage", "kv-canary-debt", "kv-canary-recording"}
_JOB = "kv-canary"


def examine_rules(findings: Findings, prometheus: str | None) -> None:
    """Ask Prometheus, where its URL is given."""
    if prometheus is None:
        findings.unknown(
            "alerts", "nobody asked Prometheus for its rules", "Give --prometheus http://HOST:9090."
        )
        return
    client = ServiceClient(prometheus, "", 10.0)
    try:
        rules: Any = client.get("/api/v1/rules")["data"]["groups"]
        targets: Any = client.get("/api/v1/targets", state="active")["data"]["activeTargets"]
    except (CommandFailed, KeyError, TypeError) as error:
        text = str(error) if isinstance(error, CommandFailed) else "it does not answer as Prometheus"
        findings.problem(
            "alerts", f"Prometheus at {prometheus}: {text}", "Check --prometheus; without it nobody pages."
        )
        return
    loaded = {group["name"] for group in rules}
    if missing := sorted(_GROUPS - loaded):
        findings.problem(
            "alerts", f"rule groups are not loaded: {', '.join(missing)}",
            "Run `canary-obs export alerts --out DIR`, and name DIR/rules/*.yml in rule_files.",
        )  # fmt: skip
    else:
        findings.fine("alerts", "all rule groups are loaded")
    own = [target for target in targets if target["labels"].get("job") == _JOB]
    down = [target for target in own if target["health"] != "up"]
    if not own:
        findings.problem(
            "scrape", f"Prometheus has no target of the job {_JOB}",
            "Copy the scrape job of `canary-obs export compose --out DIR`: prometheus/prometheus.yml.",
        )  # fmt: skip
    elif down:
        why = down[0].get("lastError") or "no reason given"
        text = f"down: {len(down)} of {counted(len(own), 'target')}: {why}"
        findings.problem(
            "scrape", text, "Give Prometheus a token with the scope scrape, and the right address."
        )
    else:
        findings.fine("scrape", f"{counted(len(own), 'target')} up")
