"""Slots whose bytes several programs read: the same records, counters and rows as with one."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings, strategies as st

from canary_kernels.buffers import SHARED_SLOTS, allocate_buffers
from canary_kernels.checks import Backend
from canary_kernels.fingerprint import compare_slots, complete_slots, plan_fingerprint
from canary_kernels.fingerprint.outcome import sum_of_shares
from canary_kernels.fingerprint.shape import has_long_rows, split_of
from canary_kernels.layout import (
    COUNT_HASHED,
    IDENTITY,
    Phase,
    RealData,
    Reason,
    RecordState,
    identity_of,
    lane,
)
from tests.kernels import pools
from tests.kernels.scenes import TRITON_DEVICE, assert_same, device_of
from tests.kernels.test_fingerprint import buffers_of, expected_hash, random_group
from tests.sizes import sized


@pytest.fixture(scope="module", params=[pools.deep, pools.long])
def known(request):
    """A kind of pool, of many layers or of long rows, and the fingerprints of its slots by the oracle."""
    pool = request.param("cpu")
    return request.param, [expected_hash(pool, slot) for slot in range(pools.SLOTS)]


@pytest.fixture(scope="module", params=list(Backend))
def deep(request, known):
    """A backend, a pool and its plan, and the fingerprints of its slots."""
    kind, own = known
    pool = kind(device_of(request.param))
    return request.param, pool, plan_fingerprint(pool.sources, RealData.ALL, device_of(request.param)), own


@settings(max_examples=sized(20, 5))
@given(
    dtype=st.sampled_from([torch.int32, torch.int64]),
    of_forward=st.booleans(),
    rng=st.randoms(use_true_random=False),
)
def test_the_same_as_with_one_program(deep, dtype, of_forward, rng):
    backend, _, plan, own = deep
    group = random_group(rng, own)
    buffers = buffers_of(backend, group)
    for phase in (Phase.HEAD, None, Phase.HEAD):  # nothing of the first is left in the sums
        slots = rng.sample(range(pools.SLOTS), rng.randrange(1, 7)) + [-1] * rng.randrange(3)
        rng.shuffle(slots)
        assert split_of(plan, len(slots)) > 2
        hashes = [own[slot] for slot in slots]
        listed = torch.tensor(slots, dtype=dtype, device=device_of(backend))
        for _ in range(2 if listed.is_cuda else 1):  # then without being prepared
            if phase is None:
                complete_slots(backend, buffers, plan, listed)
                group.complete(slots, hashes, covered=True)
            else:
                compare_slots(backend, buffers, plan, listed, phase, of_forward=of_forward)
                group.compare(slots, hashes, True, phase)
    assert_same(buffers, group)
    apart = [row for key, row in buffers.cache.items() if isinstance(key, tuple) and key[0] == "shares"]
    assert not any(row.any() for row in (*buffers.shares, *apart))
    assert bool(apart) == (backend is Backend.TRITON and has_long_rows(plan) and not of_forward)


def test_a_flipped_bit_of_each_layer_is_found(deep):
    backend, pool, plan, _ = deep
    slots = torch.arange(2, device=device_of(backend))
    buffers = allocate_buffers(pools.SLOTS, torch.ones(1, dtype=torch.int64, device=device_of(backend)))
    buffers.records[:, IDENTITY] = identity_of(0, 0, RecordState.PENDING)
    complete_slots(backend, buffers, plan, slots)
    flipped = list(pool.bytes)[:: sized(1, 3) if backend is Backend.TRITON else 1]
    for found, (part, layer) in enumerate(flipped, 1):
        pool.bytes[part, layer][1][-1, -3] ^= 1 << 6
        compare_slots(backend, buffers, plan, slots, Phase.HEAD, of_forward=True)
        pool.bytes[part, layer][1][-1, -3] ^= 1 << 6
        assert int(buffers.counters[lane(Phase.HEAD, Reason.KV_DATA)]) == found
    assert int(buffers.counters[COUNT_HASHED + Phase.HEAD]) == 2 * len(flipped)


def test_how_many_programs_share_a_slot():
    deep = plan_fingerprint(pools.deep("cpu").sources, RealData.ALL, "cpu")
    few = plan_fingerprint(pools.separate("cpu").sources, RealData.ALL, "cpu")
    assert [split_of(deep, slots) for slots in (0, 1, SHARED_SLOTS, SHARED_SLOTS + 1)] == [1, 4, 4, 1]
    assert split_of(few, 1) == 1
    long = plan_fingerprint(pools.long("cpu").sources, RealData.ALL, "cpu")
    assert [split_of(long, slots) for slots in (0, 1, 200, SHARED_SLOTS, SHARED_SLOTS + 1)] == [
        1,
        10,
        5,
        4,
        1,
    ]
    assert has_long_rows(long)
    assert not has_long_rows(deep)
    assert split_of(plan_fingerprint([], RealData.NONE, "cpu"), 1) == 1


@triton.jit
def _shares_kernel(shares, wanted, parts, found):
    part = tl.program_id(1)
    ends, agreed, hash_k, hash_v = sum_of_shares(
        shares, tl.load(wanted + part) > 0, tl.load(parts + part * 2), tl.load(parts + part * 2 + 1)
    )
    if ends:
        tl.store(found, tl.where(agreed, hash_k * 0 + 1, hash_k * 0))
        tl.store(found + 1, hash_k)
        tl.store(found + 2, hash_v)


@pytest.mark.parametrize(
    ("wanted", "agreed"), [([1] * 8, 1), ([1] * 7 + [0], 0), ([0] + [1] * 7, 0), ([0] * 8, 0)]
)
def test_a_record_that_changes_meanwhile_is_left_out_and_the_sums_are_zero_again(wanted, agreed):
    parts = torch.randint(-(1 << 62), 1 << 62, (8, 2), device=TRITON_DEVICE)
    shares = torch.zeros(3, dtype=torch.int64, device=TRITON_DEVICE)
    for _ in range(3):
        found = torch.full((3,), -1, dtype=torch.int64, device=TRITON_DEVICE)
        _shares_kernel[1, 8](shares, torch.tensor(wanted, device=TRITON_DEVICE), parts, found)
        assert found.tolist() == [agreed, *parts.sum(0).tolist()]
        assert not shares.any()
