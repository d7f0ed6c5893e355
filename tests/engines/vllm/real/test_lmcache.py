"""LMCache in a real vLLM, with tiers in memory, on a disk and in shared files: loads are compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from canary_obs.engines.vllm.runner_v2 import V2Adapter
from canary_obs.vocabulary import Phase, Reason, State
from tests.engines.vllm.real.rig import Rig, prompts
from tests.engines.vllm.real.stored_prompts import DATA, LOST, StoredPrompts

LOADED = 192  # tokens of a prompt: three chunks of 64; LMCache keeps whole ones
TIERS = "memory", "disk", "files"


class Cache(StoredPrompts):
    """The engine, and what LMCache's tiers hold."""

    def __init__(self, model: Path) -> None:
        from tests.engines.vllm.real.host_lmcache import TRANSFER

        more = {"kv_transfer_config": TRANSFER, "disable_hybrid_kv_cache_manager": True}
        super().__init__(Rig(model, num_gpu_blocks_override=120, **more))

    @property
    def engine(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._lmcache_engine.lmcache_engine

    @property
    def records(self) -> Any:
        (records,) = self.rig.adapter.connector.lmcaches
        return records

    def tier(self, name: str) -> Any:
        at = {"memory": "LocalCPUBackend", "disk": "LocalDiskBackend", "files": "RemoteBackend"}[name]
        return self.engine.storage_manager.storage_backends[at]

    def settle(self) -> None:
        """So do those of LMCache."""
        disk, remote = self.tier("disk").disk_worker, self.tier("files")
        deadline = time.monotonic() + 30
        while disk.put_tasks or remote.put_tasks:
            assert time.monotonic() < deadline
            time.sleep(0.005)  # LMCache gives nothing to wait for
        super().settle()

    def lose_above(self, tier: str) -> None:
        """What the tiers above this one hold: it is loaded from here."""
        if tier != "memory":
            self.tier("memory").clear()
        if tier == "files":
            self.tier("disk").dict.clear()

    def keep(self, first: Callable[[], None], tier: str) -> None:
        kept = set(self.tier("memory").hot_cache)
        first()
        self.chunks = [key for key in self.tier("memory").hot_cache if key not in kept]
        self.forget()
        self.lose_above(tier)

    def close(self) -> None:
        """End the engine, and what LMCache does not; its own shutdown aborts the process at times."""
        self.engine.storage_manager.close()
        self.rig.close()


@pytest.fixture(scope="module")
def cache(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cache]:
    from tests.engines.vllm.real.host_lmcache import environment, install

    folders = [tmp_path_factory.mktemp(name) for name in ("disk", "files")]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(*folders).items():
            patch.setenv(name, value)
        install(patch.setattr)
        made = Cache(models("llama"))
        yield made
        made.close()


def test_a_clean_storm_is_compared_and_answers_the_same(cache: Cache) -> None:
    asked = prompts(12)
    first = cache.rig.generate(asked, 8)
    for tier in TIERS:
        cache.forget()
        cache.lose_above(tier)
        assert cache.rig.generate(asked, 8) == first
    compared, left_out = cache.loads()
    assert compared > 1000
    assert left_out == 0
    assert cache.rig.settle() == []
    assert cache.rig.canary.verdict() == (State.OK, ())


@pytest.mark.parametrize("tier", TIERS)
def test_what_was_stored_is_what_is_loaded(cache: Cache, tier: str) -> None:
    assert cache.served(lambda _: None, tier) == set()
    assert (cache.compared, cache.left_out) == (LOADED, 0)
    assert cache.again == cache.first


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-77] ^= 64
    path.write_bytes(data)


def in_last(cache: Cache, tier: str) -> Any:
    """The prompt's second chunk, as this tier keeps it."""
    key = cache.chunks[1]
    if tier == "memory":
        return cache.tier("memory").hot_cache[key].tensor
    if tier == "disk":
        return Path(cache.tier("disk").dict[key].path)
    return Path(cache.records._named(key).path)


@pytest.mark.parametrize("tier", TIERS)
def test_a_byte_that_flips_in_a_tier_is_found(cache: Cache, tier: str) -> None:
    def damage(cache: Cache) -> None:
        kept = in_last(cache, tier)
        if tier == "memory":
            kept[1, -1, 3, 5] += 1
        else:
            flip(kept)

    assert cache.served(damage, tier) == {DATA}
    assert (cache.compared, cache.left_out) == (LOADED, 0)


def test_a_truncated_file_that_lmcache_takes_for_whole_is_found(cache: Cache) -> None:
    """The rest is what its buffer held before."""

    def truncate(cache: Cache) -> None:
        path = in_last(cache, "disk")
        path.write_bytes(path.read_bytes()[:-4096])

    assert cache.served(truncate, "disk") == {DATA}


def test_a_truncated_file_that_lmcache_reports_is_computed_again(cache: Cache) -> None:
    def truncate(cache: Cache) -> None:
        path = in_last(cache, "files")
        path.write_bytes(path.read_bytes()[:-4096])

    found = cache.served(truncate, "files")
    if isinstance(cache.rig.adapter, V2Adapter):
        # vllm#49250: on the device it counts on from where it was, and computes tokens at wrong positions.
        assert (Phase.HEAD, Reason.POSITION) in found
        assert LOST not in found, "that block was reported"
        assert cache.again != cache.first
    else:
        assert found == set()
        assert cache.again == cache.first


@pytest.mark.parametrize("tier", TIERS)
def test_chunks_that_change_places_are_found(cache: Cache, tier: str) -> None:
    """As do those of another request."""

    def exchange(cache: Cache) -> None:
        one, other = cache.chunks[:2]
        if tier == "memory":
            kept = cache.tier("memory").hot_cache
            kept[one], kept[other] = kept[other], kept[one]
        elif tier == "disk":
            kept = cache.tier("disk").dict
            kept[one].path, kept[other].path = kept[other].path, kept[one].path
        else:
            paths = [Path(cache.records._named(key).path) for key in (one, other)]
            first, second = (path.read_bytes() for path in paths)
            paths[0].write_bytes(second)
            paths[1].write_bytes(first)

    assert cache.served(exchange, tier) == {DATA}


def test_a_layer_of_another_chunk_is_found(cache: Cache) -> None:
    def exchange(cache: Cache) -> None:
        one, other = (cache.tier("memory").hot_cache[key].tensor for key in cache.chunks[:2])
        one[:, 1] = other[:, 1]

    assert cache.served(exchange, "memory") == {DATA}


def test_a_load_that_copied_nothing_is_lost(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def skip(cache: Cache) -> None:
        monkeypatch.setattr(cache.engine.gpu_connector, "skip", True)

    assert cache.served(skip, "memory") == {LOST}


@pytest.mark.parametrize("way", ["another life", "lost", "forged", "another copy's", "stale"])
def test_only_records_that_can_be_believed_are_compared(cache: Cache, way: str) -> None:
    """Those of shared files, by another engine, or by this one before it was restarted."""

    def change(cache: Cache) -> None:
        stored = cache.records._stored
        stored._known.clear()
        paths = [Path(stored.record_file_of(cache.records._named(key).path)) for key in cache.chunks]
        for path, other in zip(paths, paths[1:] + paths[:1], strict=True):
            data = path.read_bytes()
            if way == "lost":
                path.unlink()
            elif way == "forged":
                path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            elif way == "another copy's":
                path.write_bytes(other.read_bytes())
        if way == "stale":  # the file was replaced, and what was said of it was not
            flip(in_last(cache, "files"))

    assert cache.served(change, "files") == ({DATA} if way == "stale" else set())
    believed = way in ("another life", "stale")
    assert (cache.compared, cache.left_out) == ((LOADED, 0) if believed else (0, LOADED))


@pytest.mark.parametrize("damaged", [False, True])
def test_a_chunk_that_reaches_over_a_cached_block_is_compared_there_too(cache: Cache, damaged: bool) -> None:
    """The block was computed again, with other last bits than those that were stored."""

    def compute_again(cache: Cache) -> None:
        weight = cache.rig.runner.model.model.embed_tokens.weight.data
        weight *= 1.001
        cache.rig.generate([cache.asked[:40]], 1)
        weight /= 1.001
        assert len(cache.rig.idle_blocks()) == 1
        if damaged:
            cache.tier("memory").hot_cache[cache.chunks[0]].tensor[1, -1, 3, 5] += 1

    assert cache.served(compute_again, "memory") == ({DATA} if damaged else set())
    assert (cache.compared, cache.left_out) == (LOADED, 0)
