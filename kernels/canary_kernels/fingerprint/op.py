"""Entry points of fingerprint: do the bytes of a slot still hash to what its record says?"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

import torch

from canary_kernels.buffers import COMPARISON_ROW
from canary_kernels.checks import (
    Backend,
    KernelArgumentError,
    check_buffers,
    check_slots,
    keep_launch,
    launched_again,
)
from canary_kernels.fingerprint import reference

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from torch import Tensor

    from canary_kernels.buffers import GroupBuffers
    from canary_kernels.fingerprint.plan import FingerprintPlan
    from canary_kernels.layout import Phase


@functools.cache
def _kernel() -> ModuleType:
    """Triton is imported on first use."""
    return importlib.import_module("canary_kernels.fingerprint.kernel")


@functools.cache
def _cpu() -> ModuleType:
    """numba is imported, and all compiled, on first use."""
    return importlib.import_module("canary_kernels.fingerprint.cpu")


def complete_slots(backend: Backend, buffers: GroupBuffers, plan: FingerprintPlan, slots: Tensor) -> None:
    """Fingerprint the PENDING records among slots (integers [n]; -1 = skip) and make them COMPLETE.

    Logs LOST_WRITE where a replaced record's fingerprints still hold. Records in other states are left alone.
    """
    if launched_again(buffers.cache, complete_slots, plan, slots):
        return
    _check(backend, buffers, plan, slots)
    if backend is Backend.NUMBA:
        _cpu().complete_slots(buffers, plan, slots)
        return
    if backend is Backend.TORCH:
        reference.complete_slots(buffers, plan, slots)
        return
    launch = _kernel().complete_slots(buffers, plan, slots)
    if launch is not None:
        keep_launch(buffers.cache, complete_slots, launch, plan, slots)


def baseline_slots(backend: Backend, buffers: GroupBuffers, plan: FingerprintPlan, slots: Tensor) -> None:
    """Fingerprint the ADOPTED records among slots (integers [n], each once; -1 = skip): they become BASELINE.

    Without coverage they stay ADOPTED. Records in other states are left alone.
    """
    _check(backend, buffers, plan, slots)
    if backend is Backend.NUMBA:
        _cpu().baseline_slots(buffers, plan, slots)
        return
    if backend is Backend.TORCH:
        reference.baseline_slots(buffers, plan, slots)
        return
    _kernel().baseline_slots(buffers, plan, slots)


def baseline_range(backend: Backend, buffers: GroupBuffers, plan: FingerprintPlan, slots: range) -> None:
    """`baseline_slots` for slots that follow one another (step 1; out of range = skip): no list on a GPU."""
    if backend is Backend.TRITON:
        _check_memory(backend, buffers, plan)
        _kernel().baseline_range(buffers, plan, slots)
        return
    listed = torch.arange(slots.start, max(slots.start, slots.stop), device=buffers.records.device)
    baseline_slots(backend, buffers, plan, listed)


def compare_slots(
    backend: Backend, buffers: GroupBuffers, plan: FingerprintPlan, slots: Tensor, phase: Phase,
    *, of_forward: bool = False,
) -> None:  # fmt: skip
    """Compare COMPLETE and BASELINE records among slots (integers [n]; -1 = skip) with the bytes.

    Logs KV_DATA, and RECORD at HEAD, PATROL and HIT, where nothing verifies these slots. Without coverage,
    counts NO_FINGERPRINT. PATROL and HIT count runs, PATROL also ADOPTED and PENDING, as verify elsewhere.
    of_forward: no other such comparison of these buffers is under way. Few slots then take less time.
    """
    work = compare_slots, phase, of_forward
    if launched_again(buffers.cache, work, plan, slots):
        return
    _check(backend, buffers, plan, slots)
    if backend is Backend.NUMBA:
        _cpu().compare_slots(buffers, plan, slots, phase)
        return
    if backend is Backend.TORCH:
        reference.compare_slots(buffers, plan, slots, phase)
        return
    row = COMPARISON_ROW if of_forward else None
    launch = _kernel().compare_slots(buffers, plan, slots, phase, row=row)
    if launch is not None:
        keep_launch(buffers.cache, work, launch, plan, slots)


def compare_range(
    backend: Backend,
    buffers: GroupBuffers,
    plan: FingerprintPlan,
    slots: range,
    phase: Phase,
) -> None:
    """`compare_slots` for slots that follow one another (out of range = skip): on a GPU no list is made.

    Raises KernelArgumentError for a step other than 1.
    """
    if slots.step != 1:
        raise KernelArgumentError(f"slots is {slots}; the rule is a step of 1; give a list to compare_slots")
    if backend is Backend.TRITON:
        _check_memory(backend, buffers, plan)
        _kernel().compare_range(buffers, plan, slots, phase)
        return
    listed = torch.arange(slots.start, max(slots.start, slots.stop), device=buffers.records.device)
    compare_slots(backend, buffers, plan, listed, phase)


def range_comparison(
    backend: Backend, buffers: GroupBuffers, plan: FingerprintPlan, phase: Phase, stream: torch.Stream | None
) -> Callable[[range], None]:
    """`compare_range`, checked and compiled now, so that each call is little more than its launches.

    stream: where a GPU runs it; buffers and plan belong to it alone. Compiling counts as one run of PATROL.
    """
    if backend is Backend.TRITON:
        _check_memory(backend, buffers, plan)
        compare: Callable[[range], None] = _kernel().range_comparison(buffers, plan, phase, stream)
        return compare
    return functools.partial(_compare_in, backend, buffers, plan, phase)


def _compare_in(
    backend: Backend, buffers: GroupBuffers, plan: FingerprintPlan, phase: Phase, slots: range
) -> None:
    compare_range(backend, buffers, plan, slots, phase)


def hash_slots(backend: Backend, plan: FingerprintPlan, slots: Tensor) -> Tensor:
    """int64 [n, 2]: fingerprints of K and V as the bytes are now. slots: integers [n]; -1 hashes to 0."""
    if backend is Backend.TORCH:
        return reference.hash_slots(plan, slots)
    room = _cpu() if backend is Backend.NUMBA else _kernel()
    hashes: Tensor = room.hash_slots(plan, slots)
    return hashes


def _check(backend: Backend, buffers: GroupBuffers, plan: FingerprintPlan, slots: Tensor) -> None:
    check_slots(buffers, slots=slots)
    _check_memory(backend, buffers, plan)


def _check_memory(backend: Backend, buffers: GroupBuffers, plan: FingerprintPlan) -> None:
    check_buffers(backend, buffers)
    if buffers.cache.get(_check_memory) is plan:
        return
    if plan.num_slots is not None and plan.num_slots < buffers.num_slots:
        raise KernelArgumentError(
            f"the buffers have {buffers.num_slots} slots and a KV source has room for {plan.num_slots}; the "
            "rule is memory for every slot that has a record; correct num_slots or the source's strides"
        )
    buffers.cache[_check_memory] = plan
