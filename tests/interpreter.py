"""Triton's interpreter without what takes half of its time: a search of triton.language with each call.

Whenever a kernel starts, and whenever it calls another function, Triton looks through all of triton.language
for what it is to replace while the kernel runs. What it finds is the same each time, and nothing once it is
replaced. It also builds its table of types whenever it needs the NumPy type of one.
"""

from __future__ import annotations

import inspect
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_LANGUAGES = tl, tl.core
_replace_all, _type_of = interpreter._patch_lang, cache(interpreter._get_np_dtype)


def quicken() -> None:
    """Have all kernels of this process interpreted so. What they compute is the same; idempotent."""
    interpreter._patch_builtin = _replace_builtins
    interpreter._patch_lang = _replace_once
    interpreter._get_np_dtype = _numpy_type


def _numpy_type(kind: Any) -> np.dtype[Any]:
    element = kind.element_ty if isinstance(kind, tl.block_type) else kind
    return np.dtype(np.uint64) if isinstance(element, tl.pointer_type) else _type_of(element)


@cache
def _builtins(package: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member))


def _replace_builtins(package: Any, builder: Any, scope: Any) -> None:
    for name, member in _builtins(package):
        interpreter._patch_attr(package, name, member, builder, scope)


def _replace_once(function: FunctionType) -> Any:
    if any(tl.core.is_builtin(language.load) for language in _languages(function)):
        return _replace_all(function)
    return interpreter._LangPatchScope()  # a kernel that runs has called this function


@cache
def _languages(function: FunctionType) -> tuple[Any, ...]:
    """Those that Triton finds in its globals."""
    modules = (value for value in function.__globals__.values() if inspect.ismodule(value))
    return tuple({id(module): module for module in modules if module in _LANGUAGES}.values())
