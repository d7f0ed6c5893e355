"""Write and verify against the oracle: the same records, counters and violations from every backend."""

import torch
from hypothesis import given, settings, strategies as st

from canary_kernels.checks import Backend
from canary_kernels.layout import Phase
from canary_kernels.verify import verify_list, verify_rows
from canary_kernels.write import write_identities
from tests.kernels.scenes import assert_same, device_of, random_scene

BACKENDS = st.sampled_from(list(Backend))
SHAPES = {"page_size": st.sampled_from([1, 4, 16, 64]), "dtype": st.sampled_from([torch.int32, torch.int64])}
SEEDS = st.integers(0, 2**32)


@settings(max_examples=60, deadline=None)
@given(backend=BACKENDS, seed=SEEDS, phase=st.sampled_from([Phase.HEAD, Phase.TAIL]), **SHAPES)
def test_verify_rows(backend, seed, phase, page_size, dtype):
    scene = random_scene(seed, page_size=page_size, dtype=dtype)
    group, batch = scene.oracle()
    buffers = scene.buffers(backend)
    verify_rows(backend, buffers, scene.batch_on(backend), phase)
    group.verify_rows(batch, phase)
    assert_same(buffers, group)


@settings(max_examples=60, deadline=None)
@given(backend=BACKENDS, seed=SEEDS, **SHAPES)
def test_write_identities(backend, seed, page_size, dtype):
    scene = random_scene(seed, page_size=page_size, dtype=dtype)
    group, batch = scene.oracle()
    buffers = scene.buffers(backend)
    write_identities(backend, buffers, scene.batch_on(backend))
    group.write(batch)
    assert_same(buffers, group)


@settings(max_examples=60, deadline=None)
@given(backend=BACKENDS, seed=SEEDS, data=st.data())
def test_verify_list(backend, seed, data):
    scene = random_scene(seed)
    group, batch = scene.oracle()
    listed = []
    for r in batch.live():
        for position in range(batch.prefix_lens[r]):
            previous = batch.slot(r, position - 1) if position else -1
            listed.append((batch.slot(r, position), position, previous))
    listed += data.draw(
        st.lists(st.tuples(st.integers(-1, 500), st.integers(0, 90), st.integers(-1, 500)), max_size=8)
    )
    columns = [torch.tensor([row[i] for row in listed], dtype=torch.int64) for i in range(3)]
    buffers = scene.buffers(backend)
    verify_list(backend, buffers, *(column.to(device_of(backend)) for column in columns), Phase.SWEEP)
    group.verify_list(*(column.tolist() for column in columns), Phase.SWEEP)
    assert_same(buffers, group)
