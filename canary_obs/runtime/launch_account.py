"""Adds up what forwards that show the same owe, so that a step pays for a number and not for each group."""

from __future__ import annotations

from canary_kernels import layout
from canary_obs.runtime.device.owed_slots import OwedSlots
from canary_obs.runtime.shown_groups import Shown


class LaunchAccount:
    """What was launched since it was last added to OwedSlots, which asks for it with each counter copy."""

    def __init__(self, owed: OwedSlots) -> None:
        self._owed = owed
        owed.before_copy.append(self.settle)
        self.shown: Shown | None = None  # by all forwards counted here
        self.compared = 0  # of them: the bytes that they overwrite were given to a comparison
        self.completed = 0  # of them: fingerprints and links of what they have written were launched
        self.requests = 0  # whose tokens are due a comparison, of all of them

    def begin(self, shown: Shown) -> None:
        """The next forward shows something else."""
        self.settle()
        self.shown = shown

    def settle(self) -> None:
        """Add what was counted to what the kernels must count."""
        shown, owed = self.shown, self._owed
        if shown is None or not (self.compared or self.completed or self.requests):
            return
        for group, slots, of_layer in shown.owed:
            owed.compared(group, layout.Phase.HEAD, slots * self.compared)
            owed.fingerprinted(group, slots * self.completed)
            owed.layer_checked(group, of_layer * self.completed)
        for group in shown.compared:
            owed.tokens_compared(group, self.requests)
        self.compared = self.completed = self.requests = 0
