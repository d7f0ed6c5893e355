"""Which part of the engine's KV fingerprints cover, by what the engine says that it has."""

from __future__ import annotations

from collections.abc import Iterable

from canary_obs.engine_api.views import KVAllocation
from canary_obs.records import GroupInfo
from canary_obs.vocabulary import State


class KVCoverage:
    """Computed once: it never changes."""

    def __init__(self, groups: Iterable[GroupInfo], allocation: KVAllocation | None) -> None:
        """Without `allocation` the groups are all that is known of the engine's KV."""
        self._layers = {group.name: group.layers for group in groups}
        self._allocation = allocation
        shown = sum(group.slot_bytes * group.slots for group in groups)
        covered = sum(group.protected_slot_bytes * group.slots for group in groups)
        self.bytes = shown if allocation is None else max(shown, allocation.bytes)
        self.ratio = covered / self.bytes if self.bytes else 0.0  # 0 to 1

    def reasons(self) -> list[tuple[State, str]]:
        """Layers and bytes that the engine has and the adapter does not show."""
        if self._allocation is None:
            text = "this engine does not say what KV it has: a layer that is not shown would not be noticed"
            return [(State.DEGRADED, text)]
        found = list(self._allocation.left_out)
        for names, expected in self._allocation.layers.items():
            held = sum(self._layers.get(name, 0) for name in names)
            if held < expected:
                found.append(
                    f"the model has {expected} layers with KV in {', '.join(names)}, the adapter shows {held}"
                )
        return [(State.DEGRADED, text) for text in found]
