"""What a forward's view shows of each group, asked once for all forwards that show the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from canary_obs.engine_api.views import GroupStep, StepView
from canary_obs.runtime.device.state import DeviceState, Group


class Shown(NamedTuple):
    """Groups of a view: known ones in its order."""

    steps: Mapping[str, GroupStep]  # of the view
    parts: tuple[GroupStep, ...]  # the values of that
    groups: tuple[tuple[Group, Tensor], ...]  # each with its new slots, which checks are launched for
    slots: tuple[Tensor, ...]  # these slots
    # Number of each group, its new slots, and of how many of them a layer is looked at: not what launches.
    owed: tuple[tuple[int, int, int], ...]
    compared: tuple[int, ...]  # numbers of the groups of whose entries the scheduler knows


def groups_of(view: StepView, state: DeviceState) -> Shown:
    """What a view shows of the groups of this rank."""
    known = [(state.by_name[name], step) for name, step in view.groups.items() if name in state.by_name]
    new = [(group, step.out_slots.shape[0]) for group, step in known]
    owed = [(group.index, count, group.layers.share_of(count)) for group, count in new]
    own = [(group.index, step.tokens) for group, step in known]
    compared = tuple([index for index, tokens in own if tokens is None or tokens.known_lens is not None])
    groups = [(group, view.groups[group.name].out_slots) for group in state.named(view.groups)]
    slots = tuple(slots for _, slots in groups)
    return Shown(view.groups, tuple(view.groups.values()), tuple(groups), slots, tuple(owed), compared)
