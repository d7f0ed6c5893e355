"""Blocks that hold damage, or what was computed from it, until something else fills them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from canary_obs.engine_api.requests import AddedBlocks, Blocks, BlockTable
from canary_obs.runtime.taint.stored_blocks import NO_BLOCKS


class Watch:
    """Which damage a block holds, by numbering, and which lives go on filling blocks with it; 0 = none."""

    def __init__(self, blocks: Mapping[str, int]) -> None:
        """`blocks`: how many each numbering has."""
        self._sizes = dict(blocks)
        self._damage: dict[str, np.ndarray[tuple[int], np.dtype[np.int32]]] = {}
        self.carriers: dict[int, int] = {}  # by life that runs
        self._expected: dict[tuple[str, int], int] = {}  # by block into which damage came, for who gets it

    @property
    def active(self) -> bool:
        """Whether anything was ever followed: before that, nothing is allocated or looked up."""
        return bool(self._damage)

    def begin(self) -> None:
        """Allocate what is looked up from now on."""
        if not self._damage:
            self._damage = {name: np.zeros(size, dtype=np.int32) for name, size in self._sizes.items()}

    def at(self, table: str, block: int) -> int:
        """The damage that a block holds."""
        return int(self._damage[table][block]) if self._damage else 0

    def set(self, table: str, blocks: Blocks | int, damage: Blocks | int) -> None:
        """These blocks hold it."""
        self._damage[table][blocks] = damage

    def slots(self, damage: int, tables: Mapping[str, BlockTable]) -> dict[str, tuple[int, ...]]:
        """By group: the first slots of the blocks that hold it."""
        found = {name: np.flatnonzero(damaged == damage).tolist() for name, damaged in self._damage.items()}
        return {
            group: tuple(block * table.block_slots for block in found[table.name])
            for group, table in tables.items()
            if found.get(table.name)
        }

    def joined(self, table: str, added: AddedBlocks, copies: Blocks = NO_BLOCKS) -> list[int]:
        """Every damage in blocks that a request joins, and in copies that were loaded for it."""
        found = np.unique(self._damage[table][np.append(added.blocks[: added.joined], copies)])
        return found[found != 0].tolist()  # type: ignore[no-any-return]

    def fill(self, table: str, added: AddedBlocks, life: int, copies: Blocks = NO_BLOCKS) -> None:
        """A life fills the blocks that it did not join, but for `copies`: with damage, if it carries it."""
        kept = self._damage[table][copies]
        self._damage[table][added.blocks[added.joined :]] = self.carriers.get(life, 0)
        self._damage[table][copies] = kept

    def expect(self, table: str, block: int, damage: int) -> None:
        """Damage came from outside into a block, for a request that may only be shown later."""
        self._expected[table, block] = damage

    def arrived(self, table: str, added: AddedBlocks) -> list[int]:
        """Damages that came into blocks which a request got to fill: it reads what came, too."""
        if not self._expected:
            return []
        blocks = added.blocks[added.joined :].tolist()
        return [self._expected.pop((table, block)) for block in blocks if (table, block) in self._expected]

    def forget(self, damage: int) -> None:
        """A damage is not followed any more."""
        self.carriers = {life: one for life, one in self.carriers.items() if one != damage}
        self._expected = {place: one for place, one in self._expected.items() if one != damage}
        for damaged in self._damage.values():
            damaged[damaged == damage] = 0

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Lives have new numbers; all that carry damage are kept."""
        self.carriers = {numbers[life]: damage for life, damage in self.carriers.items()}
