"""Keeps numba's libraries from ending the start of a second vLLM engine in a process."""

from __future__ import annotations

import sys


def keep_modules_readable() -> None:
    """Let another vLLM engine start in this process after numba was loaded here; idempotent.

    vLLM's CPU platform reads `__dict__` of every attribute of every module. llvmlite's library object
    resolves any name to a function of the library, and that answer makes the engine's start fail.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    if ffi is not None and hasattr(ffi.lib, "_fntab"):
        ffi.lib._fntab.setdefault("__dict__", {})
