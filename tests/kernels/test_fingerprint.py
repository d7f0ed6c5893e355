"""Fingerprints of every layout against the oracle; what they must see, add up to, and give back."""

import dataclasses
import random

import pytest
import torch
from hypothesis import given, settings, strategies as st

from canary_kernels.buffers import RowBatch, allocate_buffers, source_from_tensor
from canary_kernels.checks import Backend, KernelArgumentError
from canary_kernels.fingerprint import (
    baseline_range,
    baseline_slots,
    compare_range,
    compare_slots,
    complete_slots,
    hash_slots,
    locate,
    plan_fingerprint,
)
from canary_kernels.layout import (
    PARTIAL_WORDS,
    PLANE_WORDS,
    Part,
    Phase,
    Plane,
    RealData,
    Reason,
    lane,
    unsigned,
)
from canary_kernels.write import write_identities
from tests.kernels import pools
from tests.kernels.scenes import STEP, assert_same, device_of
from tests.oracles import records as oracle
from tests.sizes import sized

COVERED = [RealData.PARTIAL, RealData.ALL]
PARTS = Part.K, Part.V


def expected_hash(pool, slot, coverage=RealData.ALL):
    """Fingerprints of one slot by the oracle, unsigned."""
    words = PARTIAL_WORDS if coverage is RealData.PARTIAL else None
    hashes = []
    for part in PARTS:
        layers = {
            layer: bytes(view[slot].flatten().tolist())
            for (held, layer), view in pool.bytes.items()
            if held is part
        }
        scales = {
            layer: bytes(view[slot].flatten().tolist())
            for (held, layer), view in pool.scales.items()
            if held is part
        }
        beside = oracle.fingerprint(scales, first_word=PLANE_WORDS, max_words=words)
        hashes.append((oracle.fingerprint(layers, max_words=words) + beside) & oracle.MASK)
    return tuple(hashes)


def hashes_of(backend, plan, slots):
    listed = torch.tensor(slots, dtype=torch.int64, device=device_of(backend))
    return [tuple(map(unsigned, pair)) for pair in hash_slots(backend, plan, listed).tolist()]


@pytest.mark.parametrize("backend", list(Backend))
@pytest.mark.parametrize("coverage", COVERED)
@pytest.mark.parametrize("layout", pools.LAYOUTS + pools.SCALED)
def test_hash_equals_the_oracle(layout, coverage, backend):
    pool = layout(device_of(backend))
    plan = plan_fingerprint(pool.sources, coverage, device_of(backend))
    slots = [0, 5, pools.SLOTS - 1, 17, 5]
    assert hashes_of(backend, plan, slots) == [expected_hash(pool, slot, coverage) for slot in slots]
    assert plan.num_slots == pools.SLOTS


@pytest.mark.parametrize("backend", list(Backend))
def test_hash_skips_negative_slots_and_empty_lists(backend):
    pool = pools.separate(device_of(backend))
    plan = plan_fingerprint(pool.sources, RealData.ALL, device_of(backend))
    assert hashes_of(backend, plan, [-1, 3]) == [(0, 0), expected_hash(pool, 3)]
    assert hashes_of(backend, plan, []) == []
    nothing = plan_fingerprint(pool.sources, RealData.NONE, device_of(backend))
    assert hashes_of(backend, nothing, [3]) == [(0, 0)]


@pytest.mark.parametrize("layout", pools.LAYOUTS)
def test_bytes_covered(layout):
    pool = layout("cpu")
    every = sum(source.slot_bytes for source in pool.sources)
    some = sum(min(source.slot_bytes, 4 * PARTIAL_WORDS) for source in pool.sources)
    assert plan_fingerprint(pool.sources, RealData.ALL, "cpu").bytes_per_slot == every
    assert plan_fingerprint(pool.sources, RealData.PARTIAL, "cpu").bytes_per_slot == some
    assert plan_fingerprint(pool.sources, RealData.NONE, "cpu").bytes_per_slot == 0


def test_regular_pools_are_one_gather():
    for layout, stacks in ((pools.together, 1), (pools.separate, 6), (pools.interleaved, 2)):
        (view,) = plan_fingerprint(layout("cpu").sources, RealData.ALL, "cpu").views
        assert len(view.stacks) == stacks


@pytest.mark.parametrize("layout", pools.LAYOUTS)
def test_every_single_bit_flip_is_seen_and_located(layout):
    pool, rng = layout("cpu"), random.Random(1)
    plan = plan_fingerprint(pool.sources, RealData.ALL, "cpu")
    for part, layer in pool.bytes:
        slot = rng.randrange(pools.SLOTS)
        (stored,) = hashes_of(Backend.TORCH, plan, [slot])
        view = pool.bytes[part, layer][slot]
        byte, bit = rng.randrange(view.numel()), rng.randrange(8)
        place = torch.unravel_index(torch.tensor(byte), view.shape)
        view[place] ^= 1 << bit
        (current,) = hashes_of(Backend.TORCH, plan, [slot])
        assert current[part - 1] != stored[part - 1]
        assert current[2 - part] == stored[2 - part]
        change = locate(plan, part, slot, stored[part - 1], current[part - 1])
        assert change is not None
        assert (change.layer, change.part, change.word) == (layer, part, byte // 4)
        (head_bytes,) = {s.head_bytes for s in pool.sources if (s.part, s.layer) == (part, layer)}
        assert change.head == byte // 4 * 4 // head_bytes
        assert change.original ^ change.current == 1 << (byte % 4 * 8 + bit)
        view[place] ^= 1 << bit


def test_locate_gives_back_any_overwritten_word():
    pool, rng = pools.separate("cpu"), random.Random(2)
    plan = plan_fingerprint(pool.sources, RealData.ALL, "cpu")
    for _ in range(40):
        part, layer, slot, word = (
            rng.choice(PARTS),
            rng.randrange(3),
            rng.randrange(pools.SLOTS),
            rng.randrange(12),
        )
        words = pool.bytes[part, layer][slot].view(torch.int32).view(-1)
        (stored,) = hashes_of(Backend.TORCH, plan, [slot])
        original = int(words[word])
        words[word] = rng.randrange(-(1 << 31), 1 << 31)
        (current,) = hashes_of(Backend.TORCH, plan, [slot])
        change = locate(plan, part, slot, stored[part - 1], current[part - 1])
        assert (change.layer, change.word, change.original) == (layer, word, original & 0xFFFFFFFF)


def test_locate_does_not_explain_two_changed_words():
    pool = pools.separate("cpu")
    plan = plan_fingerprint(pool.sources, RealData.ALL, "cpu")
    (stored,) = hashes_of(Backend.TORCH, plan, [4])
    pool.bytes[Part.K, 0][4] ^= 1
    (current,) = hashes_of(Backend.TORCH, plan, [4])
    assert locate(plan, Part.K, 4, stored[0], current[0]) is None


@pytest.mark.parametrize("backend", list(Backend))
@pytest.mark.parametrize("coverage", COVERED)
def test_shards_add_up_over_heads_and_layers(backend, coverage):
    pool = pools.together(device_of(backend))
    whole = hashes_of(backend, plan_fingerprint(pool.sources, coverage, device_of(backend)), [3, 9])
    shards = []
    for layers in ([0], [1, 2]):
        for head in range(2):
            sources = [
                source_from_tensor(view[:, head : head + 1].view(torch.float32), part, layer, head_start=head)
                for (part, layer), view in pool.bytes.items()
                if layer in layers
            ]
            plan = plan_fingerprint(sources, coverage, device_of(backend))
            shards.append(hashes_of(backend, plan, [3, 9]))
    added = [tuple(sum(h[i][k] for h in shards) & oracle.MASK for k in range(2)) for i in range(2)]
    assert added == whole


@pytest.mark.parametrize("backend", list(Backend))
def test_shards_with_scales_add_up_over_heads(backend):
    pool = pools.separate_scales(device_of(backend))
    whole = hashes_of(backend, plan_fingerprint(pool.sources, RealData.ALL, device_of(backend)), [3, 9])
    shards = []
    for first, stop in ((0, 1), (1, 3)):
        sources = [
            source_from_tensor(view[:, first:stop], part, layer, first, plane)
            for plane, views in ((Plane.DATA, pool.bytes), (Plane.SCALES, pool.scales))
            for (part, layer), view in views.items()
        ]
        plan = plan_fingerprint(sources, RealData.ALL, device_of(backend))
        shards.append(hashes_of(backend, plan, [3, 9]))
    assert [tuple(sum(h[i][k] for h in shards) & oracle.MASK for k in range(2)) for i in range(2)] == whole


def test_scales_by_hand():
    data = torch.tensor([1, 2, 3, 4], dtype=torch.uint8).view(1, 1, 4)
    scale = torch.tensor([0.5]).view(1, 1, 1)  # 0x3F000000
    sources = [
        source_from_tensor(data, Part.K, 7),
        source_from_tensor(scale, Part.K, 7, plane=Plane.SCALES),
    ]
    plan = plan_fingerprint(sources, RealData.ALL, "cpu")
    words = oracle.word_key(0) * 0x04030201 + oracle.word_key(1 << 24) * 0x3F000000
    assert hashes_of(Backend.TORCH, plan, [0]) == [(oracle.layer_key(7) * words & oracle.MASK, 0)]
    assert plan.bytes_per_slot == 8


@pytest.mark.parametrize("layout", pools.SCALED)
def test_a_flipped_scale_is_seen_and_said_to_be_one(layout):
    pool, rng = layout("cpu"), random.Random(3)
    plan = plan_fingerprint(pool.sources, RealData.ALL, "cpu")
    for plane, views in ((Plane.DATA, pool.bytes), (Plane.SCALES, pool.scales)):
        for part, layer in views:
            slot = rng.randrange(pools.SLOTS)
            (stored,) = hashes_of(Backend.TORCH, plan, [slot])
            view = views[part, layer][slot]
            head, byte, bit = rng.randrange(view.shape[0]), rng.randrange(view.shape[1]), rng.randrange(8)
            view[head, byte] ^= 1 << bit
            (current,) = hashes_of(Backend.TORCH, plan, [slot])
            change = locate(plan, part, slot, stored[part - 1], current[part - 1])
            assert (change.layer, change.part, change.plane, change.head) == (layer, part, plane, head)
            assert change.word == (head * view.shape[1] + byte) // 4
            assert change.original ^ change.current == 1 << (byte % 4 * 8 + bit)


def random_group(rng, hashes):
    """Records in every state; some PENDING ones hold their slot's own fingerprints as the witness."""
    records = []
    for own in hashes:
        state = rng.randrange(6)
        known = rng.choice([own, own, (own[0] ^ 1, own[1]), (own[0], own[1] ^ 1 << 63), (0, 0)])
        chain = rng.getrandbits(64) if state else 0
        token, position = (rng.randrange(1 << 31), rng.randrange(1 << 20)) if state else (0, 0)
        error = rng.choice([0, 0, 0, 1 << rng.randrange(5)]) if state else 0
        records.append(oracle.Record(token, position, state, chain, known if state else (0, 0), error))
    return oracle.Group(records)


def buffers_of(backend, group, lane_rows=512):
    clock = torch.full((1,), STEP, dtype=torch.int64, device=device_of(backend))
    buffers = allocate_buffers(len(group.records), clock, lane_rows)
    buffers.records.copy_(torch.tensor([record.pack() for record in group.records]))
    return buffers


@pytest.mark.parametrize("backend", list(Backend))
@settings(max_examples=sized(25, 8))
@given(
    layout=st.sampled_from([pools.together, pools.unequal, pools.odd_bytes, pools.latent]),
    coverage=st.sampled_from(list(RealData)),
    phase=st.sampled_from(["complete", "baseline", *Phase]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    rng=st.randoms(use_true_random=False),
)
def test_complete_baseline_and_compare(backend, layout, coverage, phase, dtype, rng):
    pool = layout(device_of(backend))
    plan = plan_fingerprint(pool.sources, coverage, device_of(backend))
    none = coverage is RealData.NONE
    own = [(0, 0) if none else expected_hash(pool, slot, coverage) for slot in range(pools.SLOTS)]
    group = random_group(rng, own)
    slots = rng.sample(range(pools.SLOTS), rng.randrange(pools.SLOTS)) + [-1] * rng.randrange(3)
    rng.shuffle(slots)
    listed = torch.tensor(slots, dtype=dtype, device=device_of(backend))
    check_slots(backend, group, plan, listed, phase, [own[slot] for slot in slots], covered=not none)


def check_slots(backend, group, plan, listed, phase, hashes, *, covered=True):
    """Do one phase for the listed slots, by a kernel and by the oracle; both leave the same."""
    buffers, slots = buffers_of(backend, group), listed.tolist()
    if phase == "complete":
        complete_slots(backend, buffers, plan, listed)
        group.complete(slots, hashes, covered=covered)
    elif phase == "baseline":
        baseline_slots(backend, buffers, plan, listed)
        group.baseline(slots, hashes, covered=covered)
    else:
        compare_slots(backend, buffers, plan, listed, phase)
        group.compare(slots, hashes, covered, phase)
    assert_same(buffers, group)


def every_record(hashes, error):
    """A record in every state, with fingerprints equal, unequal in either part, and zero."""
    records = []
    for place, own in enumerate(hashes[: 6 * 4]):
        state = place % 6
        known = [own, (own[0] ^ 1, own[1]), (own[0], own[1] ^ 1 << 63), (0, 0)][place // 6]
        flaw = error if state else 0
        chain, fingerprints = (place + 1, known) if state else (0, (0, 0))
        token, position = (place, place + 7) if state else (0, 0)
        records.append(oracle.Record(token, position, state, chain, fingerprints, flaw))
    return oracle.Group(records)


@pytest.mark.parametrize("backend", list(Backend))
@pytest.mark.parametrize("phase", ["complete", "baseline", *Phase])
@pytest.mark.parametrize("error", [0, 4])
def test_every_state_in_every_phase(backend, phase, error):
    pool = pools.unequal(device_of(backend))
    plan = plan_fingerprint(pool.sources, RealData.ALL, device_of(backend))
    own = [expected_hash(pool, slot) for slot in range(pools.SLOTS)]
    group = every_record(own, error)
    listed = torch.arange(len(group.records), dtype=torch.int32, device=device_of(backend))
    check_slots(backend, group, plan, listed, phase, own[: len(group.records)])


@pytest.mark.parametrize("backend", list(Backend))
@pytest.mark.parametrize(("phase", "layout"), [(Phase.PATROL, pools.separate), (Phase.SWEEP, pools.unequal)])
def test_a_range_is_compared_as_the_list_of_it(backend, layout, phase, monkeypatch):
    from canary_kernels.fingerprint import kernel

    monkeypatch.setattr(kernel, "SCRATCH_SLOTS", 8)
    pool = layout(device_of(backend))
    plan = plan_fingerprint(pool.sources, RealData.ALL, device_of(backend))
    own = [expected_hash(pool, slot) for slot in range(pools.SLOTS)]
    group = random_group(random.Random(5), own)
    buffers = buffers_of(backend, group)
    # Twice: compiled, then started directly. Of the last, most is beyond the pool, or ahead of it.
    last = pools.SLOTS + 20
    for slots in (range(pools.SLOTS), range(3, 4), range(1, 9), range(0), range(5, 2), range(-4, last)):
        compare_range(backend, buffers, plan, slots, phase)
        hashes = [own[slot] if 0 <= slot < pools.SLOTS else (0, 0) for slot in slots]
        group.compare(list(slots), hashes, True, phase)
    assert_same(buffers, group)


@pytest.mark.parametrize("backend", list(Backend))
@pytest.mark.parametrize("layout", [pools.separate, pools.unequal])
def test_a_range_gets_the_baselines_of_the_list_of_it(backend, layout):
    pool = layout(device_of(backend))
    plan = plan_fingerprint(pool.sources, RealData.ALL, device_of(backend))
    own = [expected_hash(pool, slot) for slot in range(pools.SLOTS)]
    group = random_group(random.Random(7), own)
    buffers = buffers_of(backend, group)
    for slots in (range(3, 4), range(0), range(1, 9), range(-4, pools.SLOTS + 20)):
        baseline_range(backend, buffers, plan, slots)
        within = [slot for slot in slots if 0 <= slot < pools.SLOTS]
        group.baseline(within, [own[slot] for slot in within], True)
    assert group.counts["baselines"] > 0
    assert_same(buffers, group)


@pytest.mark.parametrize("backend", list(Backend))
def test_a_range_with_gaps_is_refused(backend):
    pool = pools.separate(device_of(backend))
    plan = plan_fingerprint(pool.sources, RealData.ALL, device_of(backend))
    group = random_group(random.Random(5), [(0, 0)] * pools.SLOTS)
    buffers = buffers_of(backend, group)
    for slots in (range(0, 8, 2), range(8, 0, -1)):
        with pytest.raises(KernelArgumentError, match=r"the rule is a step of 1"):
            compare_range(backend, buffers, plan, slots, Phase.PATROL)
    assert_same(buffers, group)


@pytest.mark.parametrize("backend", list(Backend))
def test_lists_longer_than_the_scratch(backend, monkeypatch):
    from canary_kernels.fingerprint import kernel

    monkeypatch.setattr(kernel, "SCRATCH_SLOTS", 8)
    pool = pools.unequal(device_of(backend))
    plan = plan_fingerprint(pool.sources, RealData.ALL, device_of(backend))
    group = random_group(random.Random(3), [expected_hash(pool, slot) for slot in range(pools.SLOTS)])
    buffers = buffers_of(backend, group)
    slots = list(range(pools.SLOTS))
    compare_slots(backend, buffers, plan, torch.tensor(slots, device=device_of(backend)), Phase.PATROL)
    group.compare(slots, [expected_hash(pool, slot) for slot in slots], True, Phase.PATROL)
    assert_same(buffers, group)


def test_long_lists_are_hashed_in_chunks(monkeypatch):
    from canary_kernels.fingerprint import reference

    pool = pools.separate("cpu")
    plan = plan_fingerprint(pool.sources, RealData.ALL, "cpu")
    whole = hashes_of(Backend.TORCH, plan, list(range(pools.SLOTS)))
    monkeypatch.setattr(reference, "_CHUNK_BYTES", 3 * plan.bytes_per_slot)
    assert hashes_of(Backend.TORCH, plan, list(range(pools.SLOTS))) == whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"part": Part.IDENTITY}, "part K or V"),
        ({"layer": -1}, "indices >= 0"),
        ({"element_bytes": 5}, "element_bytes dividing band_bytes"),
        ({"band_bytes": 10, "element_bytes": 2}, "band_bytes head_bytes"),
        ({"tile_size": 2}, "tile_size page_size"),
        ({"tile_stride": -4}, "strides >= 0"),
        ({"page_stride": 0}, "sizes >= 1"),
        ({"head_start": 1, "head_bytes": 6, "element_bytes": 6}, "multiple of 4"),
        ({"head_start": 1 << 24}, "planes overlap"),
    ],
)
def test_wrong_sources_are_refused(change, message):
    source = dataclasses.replace(pools.separate("cpu").sources[0], **change)
    with pytest.raises(ValueError, match=message):
        plan_fingerprint([source], RealData.ALL, "cpu")


def test_sources_that_repeat_heads_are_refused():
    source = pools.separate("cpu").sources[0]
    with pytest.raises(ValueError, match=r"repeats heads \[0, 1\]"):
        plan_fingerprint([source, source], RealData.ALL, "cpu")


def test_records_without_memory_behind_them_are_refused():
    plan = plan_fingerprint(pools.separate("cpu").sources, RealData.ALL, "cpu")
    buffers = allocate_buffers(pools.SLOTS + 1, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="33 slots and a KV source has room for 32"):
        complete_slots(Backend.TORCH, buffers, plan, torch.tensor([0]))


@pytest.mark.parametrize("backend", list(Backend))
def test_only_another_token_makes_equal_bytes_a_lost_write(backend):
    """With ALiBi or without rotation, K and V of a token are the same at every position."""
    device = device_of(backend)
    pool = pools.LAYOUTS[0](device)
    plan = plan_fingerprint(pool.sources, RealData.ALL, torch.device(device))
    buffers = allocate_buffers(plan.num_slots, torch.full((1,), STEP, dtype=torch.int64, device=device))
    table = torch.arange(8, device=device)[None]

    def forward(tokens, prefix):
        count = len(tokens)

        def column(*values):
            return torch.tensor(values, dtype=torch.int64, device=device)

        batch = RowBatch(
            slot_table=table, page_size=1, rows=column(0), starts=column(0), prefix_lens=column(prefix),
            extend_lens=column(count), token_starts=column(0, count), digests=column(0) if prefix else None,
            input_ids=column(*tokens), positions=column(*range(prefix, prefix + count)),
            out_slots=column(*range(count)),
        )  # fmt: skip
        write_identities(backend, buffers, batch)
        complete_slots(backend, buffers, plan, batch.out_slots)
        return int(buffers.counters[lane(Phase.TAIL, Reason.LOST_WRITE)])

    assert forward([5, 5, 6, 7], 0) == 0
    assert forward([5, 5, 6, 7], 3) == 0  # other positions
    assert forward([5, 8, 6, 9], 3) == 2  # slots 1 and 3 still hold the bytes of 5 and 7
