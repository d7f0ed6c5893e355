"""This host: versions, settings, files, the socket."""

from __future__ import annotations

import os
import socket
import stat
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from canary_obs import __version__
from canary_obs.cli.doctor.finding import Findings
from canary_obs.config import PREFIX, CanaryConfig, ClientConfig, ServiceConfig, load
from canary_obs.errors import ConfigurationError
from canary_obs.transport.endpoint import Endpoint, check_folder_owner, parse_endpoint
from canary_obs.transport.keys import engine_keys, service_keys

_ENGINES = {"vllm": "canary_obs.engines.vllm.versions", "sglang": "canary_obs.engines.sglang.versions"}
_SERVICE_MODULES = ("fastapi", "uvicorn", "prometheus_client", "opentelemetry", "structlog")
_CONNECT_SECONDS = 1.0


def examine_host(findings: Findings) -> None:
    """Everything that needs no service."""
    _examine_versions(findings)
    with findings.refusals("settings"):
        canary, service = load(CanaryConfig), load(ServiceConfig)
        load(ClientConfig)
        given = sorted(name for name in os.environ if name.startswith(PREFIX))
        findings.fine("settings", f"read: {', '.join(given) or 'all are defaults'}")
        _examine_files(findings, service)
        _examine_endpoint(findings, canary, service)


def _examine_versions(findings: Findings) -> None:
    python = ".".join(map(str, sys.version_info[:3]))
    findings.fine("versions", f"canary_obs {__version__}, Python {python}")
    missing = [name for name in _SERVICE_MODULES if find_spec(name) is None]
    if missing:
        findings.warning(
            "versions", f"a service cannot run here: {', '.join(missing)} not installed",
            "Where the service is to run: pip install 'canary-obs[serve]'.",
        )  # fmt: skip
    if find_spec("torch") is None:
        findings.warning(
            "versions", "no engine can be protected here: torch is not installed",
            "In the engine's environment: pip install 'canary-obs[vllm]'; a service alone needs none.",
        )  # fmt: skip
    for engine in _ENGINES:
        try:
            version = metadata.version(engine)
        except metadata.PackageNotFoundError:
            continue
        supported = _supported(engine)
        if ".".join(version.split(".")[:2]) in supported or version in supported:
            findings.fine("versions", f"{engine} {version} is among the versions tested")
        else:
            findings.problem(
                "versions", f"{engine} {version} was not tested; tested are {', '.join(supported)}",
                "Install one of these, or a newer canary_obs.",
            )  # fmt: skip


def _supported(engine: str) -> tuple[str, ...]:
    """The releases that an adapter was tested with, without importing the engine."""
    if engine == "vllm":
        from canary_obs.engines.vllm.versions import V1_VERSIONS

        return V1_VERSIONS
    from canary_obs.engines.sglang.versions import VERSIONS

    return VERSIONS


def _examine_files(findings: Findings, config: ServiceConfig) -> None:
    with findings.refusals("tokens"):
        if config.tokens_file:
            _check_private(config.tokens_file)
            findings.fine("tokens", f"{config.tokens_file} is readable by nobody else")
    for name in ("log_file", "state_file"):
        path = getattr(config, name)
        if path and not os.access(path if Path(path).exists() else Path(path).parent, os.W_OK):
            findings.problem(
                "files", f"{PREFIX}{name.upper()}={path!r} cannot be written by this user",
                "Name a file in a folder that the service may write.",
            )  # fmt: skip


def _check_private(path: str) -> None:
    remedy = f"Run: chmod 600 {path}"
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
        raise ConfigurationError("tokens_file", path, rule, "Name a TOML file of tokens.") from None
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        rule = f"others may read it, or the group may write it (mode {stat.S_IMODE(mode):04o})"
        raise ConfigurationError("tokens_file", path, rule, remedy)


def _examine_endpoint(findings: Findings, canary: CanaryConfig, service: ServiceConfig) -> None:
    with findings.refusals("endpoint"):
        keyed = engine_keys(canary) is not None or service_keys(service) is not None
        endpoint = parse_endpoint(service.endpoint, keyed=keyed)
        check_folder_owner(endpoint)
        if endpoint.path is None:
            findings.fine("endpoint", f"{service.endpoint}{', with keys' if keyed else ''}")
        elif _listens(endpoint):
            findings.fine("endpoint", f"a service listens at {service.endpoint}")
        else:
            findings.problem(
                "endpoint", f"no service listens at {service.endpoint}: engines here would be degraded",
                f"Start `canary-obs serve` as the engines' user, or set {PREFIX}ENDPOINT to its address.",
            )  # fmt: skip


def _listens(endpoint: Endpoint) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_CONNECT_SECONDS)
        try:
            probe.connect(str(endpoint.path))
        except OSError:
            return False
    return True
