"""`canary-obs tour`: a demo with one planted fault, seen from detection to its evidence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from canary_obs.cli.exit_codes import CommandFailed, ExitCode
from canary_obs.cli.output import print_rich, write_out
from canary_obs.cli.service_client import ServiceClient
from canary_obs.config import PREFIX
from canary_obs.engines.toolkit.service_process import free_port

START_SECONDS = 120.0  # compiling the checks, the first time on a machine
DETECT_SECONDS = 120.0
_POLL_SECONDS = 0.2
_WARM_UP = 200  # steps before the fault


def tour(
    pause: Annotated[float, typer.Option(min=0, max=60, help="Seconds between two chapters.")] = 2.0,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the load and the fault.")] = 7,
) -> None:
    """Run a small engine, damage one cached KV value on purpose, and follow what the canary makes of it."""
    import torch  # noqa: F401 - refused with its remedy before anything starts

    with tempfile.TemporaryDirectory(prefix="canary-tour-") as folder, _demo(Path(folder), seed) as client:
        _chapter("1. An engine serves, and every KV slot is checked", pause)
        _wait(client, {"ok", "degraded"}, START_SECONDS)
        _show_status(client)
        _chapter(
            "2. A bit of a cached K or V value flips: no error, no log of the engine, HTTP 200 goes on", pause
        )
        began = time.monotonic()
        _wait(client, {"violated"}, DETECT_SECONDS)
        write_out(
            f"   the service is violated; seen {time.monotonic() - began:.1f} s after the state above\n"
        )
        incident = _incident(client)
        _chapter("3. The fault: what was planted, and what was found", pause)
        _explain(client, incident)
        _chapter("4. The evidence, as `canary-obs incident show ID` prints it", pause)
        _show_bundle(client, incident)
        _chapter("5. A person has seen it", pause)
        client.post(
            "/canary/acknowledge", {"incident": incident, "by": "tour", "comment": "planted by the tour"}
        )
        write_out(f"   canary-obs ack {incident} --by tour -m 'planted by the tour'\n")
        _wait(client, {"ok", "degraded"}, DETECT_SECONDS)
        _show_status(client)
    write_out("\nThe same on your engine: docs/vllm.md, docs/sglang.md. What is checked: docs/checks.md.\n")


@contextmanager
def _demo(folder: Path, seed: int) -> Iterator[ServiceClient]:
    """A demo in a process of its own, with a service on a free port, ended with the block."""
    port = free_port()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    settings = {
        "ENDPOINT": f"ipc://{folder}/service.sock", "PERTURB_LIMIT": "1", "PERTURB_WARMUP": str(_WARM_UP),
        "LOG_FILE": f"{folder}/service.log",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "canary_obs", "demo", "--serve", "--port", str(port), "--seed", str(seed),
        "--perturb", "real_kv_used=0.05",
    ]  # fmt: skip
    with (folder / "demo.log").open("w") as log:
        process = subprocess.Popen(
            command, env=clean | {PREFIX + name: value for name, value in settings.items()},
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            client = ServiceClient(f"http://127.0.0.1:{port}", "", 10.0)
            _wait_for_service(client, process, folder / "demo.log")
            yield client
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_service(client: ServiceClient, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            client.get("/healthz")
        except CommandFailed:
            time.sleep(_POLL_SECONDS)
        else:
            return
    last = (log.read_text(errors="replace").splitlines() or ["it said nothing"])[-1]
    raise CommandFailed(ExitCode.FAILED, f"the demo did not start: {last}")


def _wait(client: ServiceClient, states: set[str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (state := client.get("/canary/status")["state"]) not in states:
        if time.monotonic() > deadline:
            raise CommandFailed(ExitCode.FAILED, f"the service is {state}, not {' or '.join(sorted(states))}")
        time.sleep(_POLL_SECONDS)


def _incident(client: ServiceClient) -> str:
    """The id of the incident, once its evidence has arrived."""
    deadline = time.monotonic() + DETECT_SECONDS
    while True:
        found = client.get("/canary/incidents")["incidents"]
        if found and client.get(f"/canary/incidents/{found[0]['id']}")["incident"]["evidence"]:
            return str(found[0]["id"])
        if time.monotonic() > deadline:
            raise CommandFailed(ExitCode.FAILED, "no evidence of the planted fault arrived")
        time.sleep(_POLL_SECONDS)


def _chapter(title: str, pause: float) -> None:
    time.sleep(pause)
    write_out(f"\n{title}\n")


def _show_status(client: ServiceClient) -> None:
    from canary_obs.cli.status import status_text

    print_rich(status_text(client.get("/canary/status")), width=120)


def _explain(client: ServiceClient, incident: str) -> None:
    found = client.get(f"/canary/incidents/{incident}")["incident"]
    event = found["first"][0]
    row = event["violation"]
    lines = [
        f"violation {event['number']}: the {row['reason']} check failed at {row['phase']}, "
        f"step {row['step']}",
        f"slot {row['slot']} of group {row['group']}, position {row['position']}, request {row['request']}",
    ]
    injected = _injected(client)
    if injected is not None:
        lines.append(injected)
    write_out("".join(f"   {line}\n" for line in lines))


def _injected(client: ServiceClient) -> str | None:
    totals: dict[str, Any] = client.get("/canary/status")["ranks"][0]["totals"] or {}
    for mode, count in totals.get("perturbations", {}).items():
        if count["injected"]:
            return (
                f"planted on purpose: {count['injected']} fault of kind {mode}; detected: {count['detected']}"
            )
    return None


def _show_bundle(client: ServiceClient, incident: str) -> None:
    from canary_obs.cli.incident_text import incident_text
    from canary_obs.telemetry.incident_bundle import bundle_of

    bundle = bundle_of(client.get(f"/canary/incidents/{incident}"))
    print_rich(incident_text(msgspec.structs.replace(bundle, ranks=())), width=120)
    for line in (
        "record = what was written when the slot was filled; found = what its bytes hash to now.",
        "One word changed: the fingerprint is invertible, so layer, head, element and value are known.",
        "neighbours = slots of the same page: damage that spreads would show there.",
    ):
        write_out(f"   {line}\n")
