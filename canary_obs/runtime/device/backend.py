"""Chooses and loads the kernels, once at attach."""

from __future__ import annotations

import importlib
import logging

import torch

from canary_kernels.checks import Backend
from canary_obs.errors import ConfigurationError

log = logging.getLogger("canary_obs")
_COMPILED = tuple(
    f"canary_kernels.{operation}.cpu" for operation in ("verify", "write", "fingerprint", "digest")
)


def choose_backend(name: str, device: torch.device) -> Backend:
    """The backend for a device; `auto` = Triton on GPUs, on CPUs numba or, where that fails, torch.

    Numba's kernels are compiled here, or loaded from their cache. Raises ConfigurationError if the named
    backend cannot run on the device.
    """
    on_cuda = device.type == "cuda"
    if name == "auto":
        if on_cuda:
            return Backend.TRITON
        return Backend.NUMBA if _compiles() else Backend.TORCH
    if on_cuda and name != "triton":
        raise ConfigurationError(
            "backend",
            name,
            f"the {name} backend runs on the CPU, and the KV is on a GPU",
            "Use triton or auto.",
        )
    if name == "numba":
        _load()
    return Backend(name)


def _compiles() -> bool:
    try:
        _load()
    except Exception as error:  # noqa: BLE001 - whatever ails the compiler, an engine starts without it
        log.warning("canary_obs: %s; the slower torch backend is used", error)
        return False
    return True


def _load() -> None:
    try:
        for module in _COMPILED:
            importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            "backend",
            "numba",
            f"numba can't be imported ({error})",
            "Install canary-obs[engine], or use torch, which takes about ten times as long per step.",
        ) from error
