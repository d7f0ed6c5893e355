"""Faults at random moments in a real vLLM: bytes, table entries, the cache's mapping. And false findings."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from tests.engines.vllm.heal.false_findings import add_findings, false_finding
from tests.engines.vllm.real.rig import Rig

_TABLE_STEPS, _MAPPING_STEPS = 3, 8  # so long an entry stays wrong, at most


class Faults:
    """Draws one of all kinds; what changes the engine's tables is undone after some steps."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self._rig, self._draw = rig, random.Random(seed)
        self._block = 0  # of the fault planted last
        self._undo: list[tuple[int, Callable[[], None]]] = []  # step, and what to do then
        self.planted: Counter[str] = Counter()
        self.places: list[tuple[str, int, int]] = []  # kind, step, block
        self.last: dict[int, int] = {}  # by block: the step of the last one in it
        self.misled: dict[str, int] = {}  # by request: the step of the last wrong entry in its table
        self.kinds: dict[str, Callable[[int], bool]] = {
            "idle block, one word": lambda step: self._bytes(idle=True, words=1),
            "idle block, whole": lambda step: self._bytes(idle=True, words=None),
            "used block, one word": lambda step: self._bytes(idle=False, words=1),
            "used block, whole": lambda step: self._bytes(idle=False, words=None),
            "wrong table entry": self._table,
            "wrong cached mapping": self._mapping,
        }

    def plant(self, step: int) -> None:
        """One fault; a kind that finds no place now is another one's turn."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what is written to the cache has got its fingerprints
        for kind in self._draw.sample(sorted(self.kinds), len(self.kinds)):
            if self.kinds[kind](step):
                self.planted[kind] += 1
                self.places.append((kind, step, self._block))
                self.last[self._block] = step
                return

    def planted_in(self, block: int) -> int | None:
        """Step of the first fault in a block that was not found yet, else of the last; None = none."""
        return min((step for _, step, place in self.places if place == block), default=self.last.get(block))

    def settle(self, step: int | None) -> None:
        """Undo what is due; None = everything."""
        due = [undo for at, undo in self._undo if step is None or at <= step]
        self._undo = [] if step is None else [(at, undo) for at, undo in self._undo if at > step]
        for undo in due:
            undo()

    def _bytes(self, *, idle: bool, words: int | None) -> bool:
        rig, draw = self._rig, self._draw
        found = rig.idle_blocks() if idle else self._used()
        if not found:
            return False
        block = self._block = draw.choice(found)
        layers = rig.runner.kv_cache_config.kv_cache_groups[0].layer_names
        with rig.adapter.hooks.lock:
            cache = rig.layer_cache(0, draw.randrange(len(layers)))
            # Blocks are the first or the second dimension: the one with as many as the pool has.
            pool = rig.core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
            axis = next(number for number, size in enumerate(cache.shape) if size == pool)
            content = cache.select(axis, block)
            if words is None:
                content.copy_(torch.randn_like(content) * 4)
            else:
                place = tuple(draw.randrange(size) for size in content.shape)
                content[place] = draw.choice((-1, 1)) * draw.uniform(50, 5000)
        return True

    def _used(self) -> list[int]:
        """Blocks of running requests with tokens in them."""
        lists, size = self._lists(), self._rig.adapter.vllm_groups[0].block_size
        return [
            block.block_id
            for request in self._rig.core.scheduler.running
            for block in lists[request.request_id][: -(-request.num_computed_tokens // size)]
            if not block.is_null
        ]

    def _lists(self) -> dict[str, list[Any]]:
        """The blocks of each request."""
        manager = self._rig.core.scheduler.kv_cache_manager
        return manager.coordinator.single_type_managers[0].req_to_blocks  # type: ignore[no-any-return]

    def _table(self, step: int) -> bool:
        """An entry of a running request points to another block, for some steps or until it ends."""
        rig, draw = self._rig, self._draw
        size = rig.adapter.vllm_groups[0].block_size
        running = {one.request_id: one.num_computed_tokens for one in rig.core.scheduler.running}
        table, rows = rig.block_table()
        rows = {name: row for name, row in rows.items() if running.get(name, 0) >= size}
        if not rows:
            return False
        name = draw.choice(sorted(rows))
        row, column = rows[name], draw.randrange(running[name] // size)
        right, wrong = int(table[row, column]), self._other_block()
        if wrong == right:
            return False
        table[row, column] = self._block = wrong
        self.misled[name.rsplit("-", 1)[0]] = step

        def undo() -> None:
            table, rows = rig.block_table()
            # A request that has started again may own the other block by now.
            mine = self._lists().get(name, [])[column : column + 1]
            stays = name in rows and [block.block_id for block in mine] == [right]
            if stays and int(table[rows[name], column]) == wrong:
                table[rows[name], column] = right

        self._undo.append((step + draw.randint(1, _TABLE_STEPS), undo))
        return True

    def _other_block(self) -> int:
        """The block that a wrong entry points to."""
        return self._draw.randrange(1, self._rig.core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks)

    def _mapping(self, step: int) -> bool:
        """The cache finds a block by the hash of another one's tokens."""
        pool = self._rig.core.scheduler.kv_cache_manager.block_pool
        cache = pool.cached_block_hash_to_block
        cached = [block for block in pool.blocks if block.block_hash is not None and not block.is_null]
        if len(cached) < 2 or "get_one_block" in vars(cache):
            return False
        first, second = self._draw.sample(cached, 2)
        wanted, find = first.block_hash, cache.get_one_block

        def get_one_block(key: Any) -> Any:
            if key == wanted and second.block_hash is not None and find(key) is not None:
                return second
            return find(key)

        cache.get_one_block, self._block = get_one_block, second.block_id
        self._undo.append(
            (step + self._draw.randint(2, _MAPPING_STEPS), lambda: vars(cache).pop("get_one_block"))
        )
        return True


class FalseFindings(Faults):
    """Damages nothing: reports blocks of running requests, so that healing acts as it does on damage."""

    def __init__(self, rig: Rig, seed: int) -> None:
        super().__init__(rig, seed)
        self.kinds = {"none": self._report}

    def _report(self, step: int) -> bool:
        used = self._used()
        if used:
            self._block = self._draw.choice(used)
            slots = self._rig.adapter.vllm_groups[0].block_slots
            add_findings(self._rig.canary, [false_finding(self._block, slots)])
        return bool(used)
