"""Python compiled for the CPU by numba: the decorator with its cache, loads and stores at addresses."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
from numba import types
from numba.extending import intrinsic

_PACKAGE = Path(__file__).parent
_NEXT_TO_SOURCES = _PACKAGE / "__pycache__"
_FOLDER_PREFIX, _DIGEST_LENGTH = "native-", 16
# All that compiled code consists of. numba looks at the file of the kernel alone, not at what it calls.
_COMPILED = ("*/cpu*.py", "frames.py", "hashing.py", "layout.py", "native.py", "native_records.py")
_FOLDERS_KEPT = 4  # by last use: environments that share ~/.cache keep theirs, those of old versions go


def kernel(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function now, for this signature only, or take it from the cache; it runs without the GIL.

    Called with other types it raises TypeError: nothing compiles while an engine is serving.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        options = {"nogil": True, "error_model": "numpy"}
        folder = cache_folder()
        # A full disk is no reason to do without.
        with contextlib.suppress(OSError), _caching_in(folder):
            return numba.njit(signature, cache=folder is not None, **options)(function)
        return numba.njit(signature, **options)(function)

    return decorate


# Compiled into whatever kernel calls it.
piece = numba.njit(nogil=True, error_model="numpy")


def cache_folder() -> Path | None:
    """Where compiled kernels are kept; None = nowhere, so every process compiles them again.

    Under NUMBA_CACHE_DIR if that is set, else next to the sources, else under XDG_CACHE_HOME or ~/.cache: the
    first that can be written. The last part of its name is a digest of what is compiled and of numba's
    version; a new one pushes out those that were used least recently.
    """
    wanted = os.environ.get("NUMBA_CACHE_DIR")
    own = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    bases = [Path(wanted)] if wanted else [_NEXT_TO_SOURCES, Path(own) / "canary_obs"]
    for base in bases:
        folder = base / f"{_FOLDER_PREFIX}{_digest()}"
        with contextlib.suppress(OSError):
            fresh = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                os.utime(folder)
                if fresh:
                    _prune(base)
                return folder
    return None


def _prune(base: Path) -> None:
    """Of the caches in a folder, keep the few last used. A process that starts on another compiles again."""
    cached = base.glob(_FOLDER_PREFIX + "[0-9a-f]" * _DIGEST_LENGTH)
    # Another process may prune at the same time.
    with contextlib.suppress(OSError):
        for folder in sorted(cached, key=lambda one: one.stat().st_mtime_ns, reverse=True)[_FOLDERS_KEPT:]:
            shutil.rmtree(folder, ignore_errors=True)


def _digest() -> str:
    # numba's files of all its versions have the same names: two that share a folder replace each other's.
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(path for pattern in _COMPILED for path in _PACKAGE.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:_DIGEST_LENGTH]


@contextlib.contextmanager
def _caching_in(folder: Path | None) -> Iterator[None]:
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = before if folder is None else str(folder)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


def _loader(element: Any, result: Any) -> Any:
    """An intrinsic (address, index): element `index` of the integers that lie at the address, as 64 bits."""

    def code(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        address, index = arguments
        elements = builder.inttoptr(address, context.get_value_type(element).as_pointer())
        value = builder.load(builder.gep(elements, [index]))
        return context.cast(builder, value, element, result)

    def typed(typingctx: Any, address: Any, index: Any) -> Any:  # noqa: ARG001
        return result(types.int64, types.int64), code

    return intrinsic(typed)


load_int64 = _loader(types.int64, types.int64)
load_int32 = _loader(types.int32, types.int64)
load_uint32 = _loader(types.uint32, types.uint64)
load_uint8 = _loader(types.uint8, types.uint64)


@intrinsic
def store_int64(typingctx: Any, address: Any, index: Any, value: Any) -> Any:  # noqa: ARG001
    """(address, index, value): set element `index` of the int64 that lie at the address."""

    def code(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        address, index, value = arguments
        elements = builder.inttoptr(address, context.get_value_type(types.int64).as_pointer())
        builder.store(value, builder.gep(elements, [index]))

    return types.void(types.int64, types.int64, types.int64), code
