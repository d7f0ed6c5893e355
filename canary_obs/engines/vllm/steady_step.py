"""Recognises the scheduler outputs that most steps of a decode have: nothing began, ended or was given."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from canary_kernels.buffers import KVSource
from canary_obs.engines.vllm.connector_loads import ConnectorLoads
from canary_obs.engines.vllm.pool_events import BlockEvent, Partial, Published, PublishedRun
from canary_obs.engines.vllm.prefix_hits import HITS_ATTRIBUTE
from canary_obs.engines.vllm.states import StateBlocks

_OF_BLOCKS = frozenset({int, Published, PublishedRun, Partial})  # events that no load comes with


class Change(Enum):
    """What a scheduler output brings, other than its numbers and its tokens."""

    NOTHING = 0
    GROWTH = 1  # requests that go on were given blocks, which other groups may have had
    OTHER = 2


class SteadyStep:
    """Of a step without changes nothing needs to be followed but its numbers and its tokens.

    What it asks is all that can change block lists, slots' bytes or the counts of hits. Of states StateBlocks
    knows. Scales, which may change without an output's saying so, are followed in every step.
    """

    def __init__(self, states: StateBlocks, loads: ConnectorLoads, scales: Sequence[KVSource]) -> None:
        self._loads, self._states = loads, states if states.groups else None
        self._followed = bool(scales)
        self._hits: Any = None  # the count in the last output that was followed

    def change(self, output: Any, events: Sequence[BlockEvent] | None) -> Change:
        """What there is to follow in this output, whose pool had these events."""
        cached, hits = output.scheduled_cached_reqs, output.__dict__.get(HITS_ATTRIBUTE)
        if (
            hits != self._hits  # by value: it may have come from another process
            or hits is None
            or events is None
            or output.scheduled_new_reqs
            or output.finished_req_ids
            or output.preempted_req_ids
            or output.new_block_ids_to_zero
            or output.kv_cache_block_copies
            or cached.resumed_req_ids
            or self._followed
            or self._loads.open
        ):
            return Change.OTHER
        given = cached.new_block_ids
        if not events and given.count(None) == len(given):
            goes_on = self._states is None or self._states.go_on(output)
            return Change.NOTHING if goes_on else Change.OTHER
        grows = self._states is None and _OF_BLOCKS.issuperset(map(type, events))
        return Change.GROWTH if grows else Change.OTHER

    def followed(self, output: Any) -> None:
        """This output was followed, whatever it had."""
        self._hits = getattr(output, HITS_ATTRIBUTE, None)
