"""SGLang's small Triton kernels over numbers and slots, run as the Python that they are written in.

Triton's interpreter takes milliseconds for an addition of two numbers, and most of the time of a draft.
"""

from __future__ import annotations

import importlib
import types
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_PLAIN = {
    "sglang.kernels.ops.speculative.spec_tree": (
        "sgl_build_tree_kernel_efficient_triton",
        "verify_tree_greedy_kernel_triton",
    ),
    "sglang.kernels.ops.speculative.cache_locs": (
        "assign_draft_cache_locs_contiguous",
        "assign_extend_cache_locs",
    ),
    "sglang.srt.mem_cache.allocation": ("assign_req_to_token_pool",),
}
_COMPARED = 4  # launches of each kernel in each process


def install() -> None:
    """For the rest of this process; idempotent."""
    for name, kernels in _PLAIN.items():
        module: Any = importlib.import_module(name)
        for kernel in kernels:
            given = getattr(module, kernel)
            if not isinstance(given, _Kernel):
                setattr(module, kernel, _Kernel(given))


@dataclass(frozen=True, slots=True)
class _Pointer:
    """Into the numbers of a tensor, from its first one on; several places at once as an array."""

    numbers: Any
    at: Any = 0

    def __add__(self, more: Any) -> _Pointer:
        return _Pointer(self.numbers, self.at + more)

    def __sub__(self, less: Any) -> _Pointer:
        return _Pointer(self.numbers, self.at - less)


class _Kernel:
    """A kernel that is launched as it was; the first launches are compared with those of the interpreter."""

    def __init__(self, given: Any) -> None:
        self._given, self._launches, self._program = given, 0, 0
        language = types.SimpleNamespace(
            program_id=lambda axis: self._program, arange=np.arange, load=_load, store=_store, sum=np.sum,
            cdiv=lambda count, size: -(-count // size), cast=lambda value, kind: kind.type(value),
        )  # fmt: skip
        code: Any = given.fn
        self._run = types.FunctionType(
            code.__code__, code.__globals__ | {"tl": language}, argdefs=code.__defaults__
        )

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*given: Any, **named: Any) -> None:
            self._launches += 1
            if self._launches > _COMPARED:
                self._launch(grid, given, named)
                return
            tensors = [value for value in (*given, *named.values()) if isinstance(value, torch.Tensor)]
            before = [tensor.clone() for tensor in tensors]
            self._launch(grid, given, named)
            after = [tensor.clone() for tensor in tensors]
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(old)
            self._given[grid](*given, **named)
            assert all(map(torch.equal, tensors, after)), self._given

        return launch

    def _launch(self, grid: tuple[int], given: tuple[Any, ...], named: dict[str, Any]) -> None:
        pointers = [_pointer(value) for value in given]
        more = {name: _pointer(value) for name, value in named.items()}
        for self._program in range(*grid):
            self._run(*pointers, **more)


def _pointer(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    size = value.untyped_storage().nbytes() // value.itemsize - value.storage_offset()
    return _Pointer(torch.as_strided(value, (size,), (1,)).numpy())


def _load(pointer: _Pointer, mask: Any = True, other: Any = 0) -> Any:
    at = np.where(mask, pointer.at, 0)
    assert (at >= 0).all()
    return np.where(mask, pointer.numbers[at], other).astype(pointer.numbers.dtype)[()]


def _store(pointer: _Pointer, value: Any, mask: Any = True) -> None:
    at, mask = np.broadcast_arrays(pointer.at, mask)
    assert (at[mask] >= 0).all()
    pointer.numbers[at[mask]] = np.broadcast_to(value, at.shape)[mask]
