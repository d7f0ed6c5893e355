"""Separates findings of what was put back since from those of new damage."""

from __future__ import annotations

from collections import OrderedDict

from canary_kernels import layout
from canary_obs.records import Violation
from canary_obs.runtime.device.state import Group

_REMEMBERED = 1024  # blocks


class PutBack:
    """Blocks that are as recorded again, each with the checks that had failed by then.

    On a GPU rows are read some steps after their check: damage that was met by several may be put back
    before the last row of it comes.
    """

    def __init__(self) -> None:
        self._failed: OrderedDict[tuple[str, int], list[int]] = OrderedDict()  # by lane of the group's log

    def note(self, group: Group, block: int) -> None:
        """The block was put back just now. Waits for the device."""
        lanes = group.buffers.counters[layout.COUNT_VIOLATIONS :][: layout.NUM_LANES].tolist()
        self._failed[group.name, block] = lanes
        self._failed.move_to_end((group.name, block))
        if len(self._failed) > _REMEMBERED:
            self._failed.popitem(last=False)

    def is_earlier(self, group: str, block: int, row: Violation) -> bool:
        """Whether the row is of a check of the block from before it was put back."""
        failed = self._failed.get((group, block))
        if failed is None:
            return False
        lane = layout.lane(layout.Phase(row.phase.code), layout.Reason(row.reason.code))
        return row.event <= failed[lane]
