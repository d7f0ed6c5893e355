"""The compiled kernels against the reference, word for word, on what the oracle's scenes leave out."""

import ast
import dataclasses
import os
import random
import shutil
from pathlib import Path

import numba
import pytest
import torch
from hypothesis import given, settings, strategies as st

from canary_kernels import layout, native
from canary_kernels.buffers import GroupBuffers
from canary_kernels.checks import Backend
from canary_kernels.fingerprint import compare_slots, complete_slots, hash_slots, plan_fingerprint
from canary_kernels.layout import Phase, RealData
from canary_kernels.verify import verify_list, verify_rows
from canary_kernels.write import write_identities
from tests.kernels import pools
from tests.kernels.scenes import Scene, random_scene

BOTH = Backend.TORCH, Backend.NUMBA


def everything(buffers: GroupBuffers) -> list[torch.Tensor]:
    return [buffers.records, buffers.counters, buffers.violations]


def assert_equal(first: GroupBuffers, second: GroupBuffers) -> None:
    for one, other in zip(everything(first), everything(second), strict=True):
        assert torch.equal(one, other)


def crowded_scene(seed: int, slots: int) -> Scene:
    """A damaged scene folded into a few slots, so that requests share slots to read and to write."""
    scene = random_scene(seed, damage=0.1, longest=12)

    def folded(values: torch.Tensor) -> torch.Tensor:
        return torch.where((values < 0) | (values == 10**6), values, values % slots)

    table, out = folded(scene.batch.slot_table), folded(scene.batch.out_slots)
    batch = dataclasses.replace(scene.batch, slot_table=table, out_slots=out)
    chosen = random.Random(seed).sample(range(len(scene.records)), slots)
    return Scene(records=scene.records[chosen], batch=batch)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), lane_rows=st.sampled_from([2, 3, 8]))
def test_steps_leave_the_very_words_of_the_reference(seed, lane_rows):
    """Slots written twice, rings that wrap, several launches and forwards at one clock and at others."""
    pool = pools.separate("cpu")
    plan = plan_fingerprint(pool.sources, RealData.ALL, "cpu")
    scene = crowded_scene(seed, pools.SLOTS)
    own = hash_slots(Backend.TORCH, plan, torch.arange(pools.SLOTS))
    scene.records[::2, layout.FINGERPRINT_K :] = own[::2]  # what replaces these is a lost write
    both = [scene.buffers(backend, lane_rows) for backend in BOTH]
    listed = torch.tensor([*range(pools.SLOTS), 3, -1, 3, 10**6])
    positions, previous = listed % 7, listed - 1
    for clock in (0, 0, 5):
        for backend, buffers in zip(BOTH, both, strict=True):
            buffers.clock.fill_(clock)
            batch = scene.batch_on(backend)
            compare_slots(backend, buffers, plan, batch.out_slots, Phase.HEAD)
            write_identities(backend, buffers, batch)
            verify_rows(backend, buffers, batch, Phase.HEAD)
            complete_slots(backend, buffers, plan, batch.out_slots)
            verify_rows(backend, buffers, batch, Phase.TAIL)
            verify_list(backend, buffers, listed, positions, previous, Phase.SWEEP)
            compare_slots(backend, buffers, plan, listed, Phase.PATROL)
        assert_equal(*both)
        pool.bytes[layout.Part.K, 1][7][0, 5] ^= 1


@pytest.mark.parametrize("make", pools.LAYOUTS)
@pytest.mark.parametrize("coverage", [RealData.ALL, RealData.PARTIAL])
def test_hashes_of_slots_listed_in_any_way(make, coverage):
    plan = plan_fingerprint(make("cpu").sources, coverage, "cpu")
    every_second = torch.arange(2 * pools.SLOTS)[::2] % pools.SLOTS  # not contiguous
    assert torch.equal(
        hash_slots(Backend.NUMBA, plan, every_second), hash_slots(Backend.TORCH, plan, every_second)
    )


def test_slots_without_memory_hash_to_nothing():
    plan = plan_fingerprint(pools.separate("cpu").sources, RealData.ALL, "cpu")
    assert hash_slots(Backend.NUMBA, plan, torch.tensor([-1, pools.SLOTS, 1 << 60])).tolist() == [[0, 0]] * 3


def test_columns_that_are_views_with_gaps():
    scene = random_scene(11, damage=0.0)
    gapped = {
        name: torch.stack([column, torch.full_like(column, 77)], 1)[:, 0]
        for name in ("rows", "starts", "prefix_lens", "extend_lens", "token_starts", "input_ids", "positions")
        for column in [getattr(scene.batch, name)]
    }
    both = [scene.buffers(backend) for backend in BOTH]
    batch = dataclasses.replace(scene.batch, **gapped)
    for backend, buffers in zip(BOTH, both, strict=True):
        write_identities(backend, buffers, batch)
    batch.input_ids.add_(1)  # what was copied must not be taken for the engine's own memory
    for backend, buffers in zip(BOTH, both, strict=True):
        write_identities(backend, buffers, batch)
        verify_rows(backend, buffers, batch, Phase.TAIL)
    assert both[1].counters[layout.COUNT_WRITTEN] > 0
    assert_equal(*both)


def test_a_kernel_compiles_for_no_other_types():
    @native.kernel("int64(int64)")
    def doubled(value):
        return value + value

    assert doubled(21) == 42
    assert len(doubled.signatures) == 1
    with pytest.raises(TypeError):
        doubled("21")
    assert len(doubled.signatures) == 1


def test_the_cache_moves_to_where_it_can_be_written(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "wished"))
    wished = native.cache_folder()
    assert wished.parent == tmp_path / "wished"
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    in_the_way = tmp_path / "a file"
    in_the_way.touch()
    monkeypatch.setattr(native, "_NEXT_TO_SOURCES", in_the_way)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    assert native.cache_folder() == tmp_path / "own" / "canary_obs" / wished.name
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_the_way))
    assert native.cache_folder() is None

    @native.kernel("int64(int64)")
    def tripled(value):
        return 3 * value

    assert tripled(14) == 42


def test_each_version_of_numba_has_a_cache_of_its_own(monkeypatch, tmp_path):
    """Its files are called alike: environments that share a folder would replace each other's."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    mine = native.cache_folder()
    monkeypatch.setattr(numba, "__version__", "0.0.1")
    assert native.cache_folder() not in (mine, None)


def test_the_cache_is_keyed_by_all_that_is_compiled_and_by_nothing_else(monkeypatch, tmp_path):
    package = tmp_path / "canary_kernels"
    shutil.copytree(Path(native.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(native, "_PACKAGE", package)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    whole, keying = native.cache_folder(), set()
    for path in sorted(package.rglob("*.py")):
        before = path.read_bytes()
        path.write_bytes(before + b"#")
        if native.cache_folder() != whole:
            keying.add(path)
        path.write_bytes(before)
    assert keying == compiled_in(package)


def compiled_in(package):
    """What holds compiled code, and what that imports from its package when it runs."""
    found, todo = set(), list(package.glob("*/cpu*.py"))
    while todo:
        path = todo.pop()
        found.add(path)
        for statement in ast.parse(
            path.read_text(encoding="utf-8")
        ).body:  # the outermost: none for types only
            if isinstance(statement, ast.ImportFrom) and statement.module.startswith(package.name):
                module = package.parent.joinpath(*statement.module.split("."))
                wanted = [module, *(module / one.name for one in statement.names)]
                files = {one.with_suffix(".py") for one in wanted}
                todo += [one for one in files if one.exists() and one not in found]
    return found


def test_a_new_version_pushes_out_the_caches_used_least_recently(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    (tmp_path / "native-somebody-else's").mkdir()
    for age in range(6):
        old = tmp_path / f"native-{age:016x}"
        old.mkdir()
        (old / "kernel.nbc").touch()
        os.utime(old, (1e9 - age, 1e9 - age))
    mine = native.cache_folder()
    left = {folder.name for folder in tmp_path.iterdir()}
    assert left == {mine.name, "native-somebody-else's", *(f"native-{age:016x}" for age in range(3))}
    os.utime(mine, (1, 1))
    another = tmp_path / f"native-{7:016x}"
    another.mkdir()
    assert native.cache_folder() == mine
    assert mine.stat().st_mtime > 1e9  # in use again
    assert another.exists()  # nothing new, nothing pruned
