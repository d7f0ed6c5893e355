"""Collects evidence: reads violated slots in stream order, a few at a time."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from canary_kernels import layout
from canary_kernels.fingerprint import Suspect, hash_slots, suspects
from canary_obs.records import CollectEvidence, Evidence, Identity, Violation
from canary_obs.runtime.device.byte_address import locate_byte
from canary_obs.runtime.device.delayed_device_host import DelayedDeviceHost
from canary_obs.runtime.device.state import DeviceState, Group
from canary_obs.runtime.evidence.history import SlotHistory
from canary_obs.runtime.evidence.slot_words import (
    BYTES_AT,
    HISTORY_AT,
    SLOT_WORDS,
    SUSPECTS,
    WORD_BYTES,
    Lead,
    changed_words,
    neighbours_of,
    slot_facts,
)
from canary_obs.slot_facts import request_name
from canary_obs.vocabulary import Part, Reason, SlotEventKind

READS_IN_FLIGHT = 4
MAX_QUEUED = 32
MAX_KEPT = 64
_FRESH_SECONDS = 30.0  # a slot that was read this recently is not read again
SlotKey = tuple[str, int]  # group, slot


@dataclass(slots=True, kw_only=True)
class _Reading:
    """One slot to be read, with the words that may have changed."""

    group: Group
    slot: int
    prompted: bool
    incidents: list[str] = field(default_factory=list)
    leads: list[Lead] = field(default_factory=list)
    second_read: bool = False  # of the words that explain a difference found by the first
    announcements: tuple[tuple[SlotEventKind, int], ...] = ()
    holders: tuple[str, ...] = ()

    @property
    def key(self) -> SlotKey:
        """Group and slot."""
        return self.group.name, self.slot


class EvidenceCollector:
    """Never waits for the device; queue and cache are bounded: slots beyond them are not read."""

    def __init__(
        self,
        state: DeviceState,
        history: SlotHistory,
        holders: Callable[[str, int], tuple[str, ...]],
        traceparent: Callable[[str], str | None],
        *,
        reveal_tokens: bool,
    ) -> None:
        self._state, self._history, self._holders = state, history, holders
        self._traceparent = traceparent
        self._reveal = reveal_tokens
        words = HISTORY_AT + SlotHistory.WORDS
        self._source = torch.zeros(words, dtype=torch.int64, device=state.clock.device)
        self._ring = DelayedDeviceHost(self._source, READS_IN_FLIGHT)
        self._queue: deque[_Reading] = deque()
        self._in_flight: dict[int, _Reading] = {}
        self._kept: OrderedDict[SlotKey, tuple[float, Evidence]] = OrderedDict()
        self._answers: list[Evidence] = []
        if state.clock.device.type == "cuda":
            # Compile the hash now rather than at the first violation.
            for group in state.groups:
                self._hash(group, group.slots_between(0, 1))

    @property
    def fixed_bytes(self) -> int:
        """Device bytes of the staging rows."""
        return self._source.nbytes * (1 + READS_IN_FLIGHT)

    @property
    def busy(self) -> bool:
        """Whether slots wait to be read or answers to be sent."""
        return bool(self._queue or self._in_flight or self._answers)

    def collect(self, found: list[Violation], step: int) -> None:
        """Begin to read violated slots, the first of each group, reason and part before the others."""
        categories: set[tuple[str, Reason, Part | None]] = set()
        first: list[Violation] = []
        others: list[Violation] = []
        for violation in found:
            seen = violation.group, violation.reason, violation.part
            (others if seen in categories else first).append(violation)
            categories.add(seen)
        for violation in (*first, *others):
            self._enqueue(violation.group, violation.slot, violation=violation)
        self._begin(step)

    def request(self, command: CollectEvidence) -> None:
        """Have `advance` return what was read at the slot's violation, else what is read now."""
        key = command.group, command.slot
        if (waiting := self._waiting(key)) is not None:
            waiting.incidents.append(command.incident)
        elif key in self._kept:
            self._answers.append(_for_incident(self._kept[key][1], command.incident))
        else:
            self._enqueue(*key, incident=command.incident)

    def advance(self, identity: Identity, step: int) -> list[Evidence]:
        """Decode reads that have arrived, begin queued ones; returns evidence to send."""
        answers, self._answers = self._answers, []
        self._begin(step)
        for sample in self._ring.poll():
            reading = self._in_flight.pop(sample.sequence)
            evidence = self._decode(reading, sample.values.tolist(), identity, sample.step)
            if self._needs_second_read(reading, evidence):
                continue
            self._keep(reading.key, evidence)
            answers += [_for_incident(evidence, name) for name in reading.incidents]
        return answers

    def with_holders(self, violation: Violation) -> Violation:
        """The violation; if it names no request, with the requests that use its slot now."""
        if violation.request is not None:
            return violation
        holders = self._holders(violation.group, violation.slot)
        return msgspec.structs.replace(violation, request=",".join(holders) or None)

    def with_traceparent(self, violation: Violation) -> Violation:
        """The violation with the trace context that its request came with, if that is known."""
        if violation.request is None or (found := self._traceparent(violation.request)) is None:
            return violation
        return msgspec.structs.replace(violation, traceparent=found)

    # The queue.

    def _enqueue(
        self, group: str, slot: int, *, violation: Violation | None = None, incident: str | None = None
    ) -> None:
        mine, kept = self._state.by_name.get(group), self._kept.get((group, slot))
        if mine is None or not 0 <= slot < mine.view.num_slots or self._waiting((group, slot)):
            return
        if incident is None and kept is not None and time.monotonic() - kept[0] < _FRESH_SECONDS:
            return
        if len(self._queue) >= MAX_QUEUED:
            return
        self._queue.append(
            _Reading(
                group=mine,
                slot=slot,
                prompted=violation is None,
                incidents=[] if incident is None else [incident],
                leads=[] if violation is None else self._leads_of(violation),
            )
        )

    def _waiting(self, key: SlotKey) -> _Reading | None:
        readings = (*self._queue, *self._in_flight.values())
        return next((reading for reading in readings if reading.key == key), None)

    def _leads_of(self, violation: Violation) -> list[Lead]:
        part, expected, actual = violation.part, violation.expected, violation.actual
        if violation.reason is not Reason.KV_DATA or part is None or expected is None or actual is None:
            return []
        return self._leads(violation.group, part, expected, actual)

    def _leads(self, group: str, part: Part, recorded: str, found: str) -> list[Lead]:
        plan, before, now = self._state.by_name[group].plan, int(recorded, 16), int(found, 16)
        explained = suspects(plan, layout.Part(part.code), before, now)[:SUSPECTS]
        difference = layout.unsigned(now - before)
        return [Lead(part=part, difference=difference, suspect=suspect) for suspect in explained]

    # Reading: launches only.

    def _begin(self, step: int) -> None:
        while self._queue and len(self._in_flight) < READS_IN_FLIGHT:
            reading = self._queue.popleft()
            self._read(reading)
            self._in_flight[self._ring.next_sequence] = reading
            self._ring.push(step, time.monotonic())

    def _read(self, reading: _Reading) -> None:
        group, source = reading.group, self._source
        slots = neighbours_of(group, reading.slot)
        start, stop, count = slots.start, slots.stop, len(slots)
        records, hashes = count * layout.RECORD_WORDS, count * SLOT_WORDS
        source[:records].view(count, -1).copy_(group.buffers.records[start:stop])
        source[records:hashes].view(count, -1).copy_(self._hash(group, group.slots_between(start, stop)))
        for number, lead in enumerate(reading.leads):
            at = BYTES_AT + number * WORD_BYTES
            self._read_word(lead.suspect, reading.slot, source[at : at + WORD_BYTES])
        reading.announcements = self._history.read(group, reading.slot, source[HISTORY_AT:])
        reading.holders = tuple(map(request_name, self._holders(group.name, reading.slot)))

    def _hash(self, group: Group, slots: Tensor) -> Tensor:
        return hash_slots(self._state.backend, group.plan, slots)

    def _read_word(self, suspect: Suspect, slot: int, into: Tensor) -> None:
        into.zero_()
        first = suspect.index * WORD_BYTES
        # The last word of an odd number of bytes is padded with zeros.
        for byte in range(first, min(first + WORD_BYTES, suspect.geometry.num_bytes)):
            address = locate_byte(suspect.source, slot, byte)
            into[byte - first].copy_(address.storage[address.offset])

    # Decoding.

    def _decode(self, reading: _Reading, words: list[int], identity: Identity, step: int) -> Evidence:
        slots = neighbours_of(reading.group, reading.slot)
        facts = {
            slot: slot_facts(reading.group, words, slots, slot, reveal_tokens=self._reveal) for slot in slots
        }
        slot = facts.pop(reading.slot)
        return Evidence(
            identity=identity,
            incident="",
            group=reading.group.name,
            step=step,
            time_ns=time.time_ns(),
            prompted=reading.prompted,
            slot=slot,
            changed=changed_words(reading.leads, slot, words),
            neighbours=tuple(facts.values()),
            history=self._history.events(reading.announcements, words[HISTORY_AT:]),
            writes_known=self._history.writes_known,
            holders=reading.holders,
        )

    def _needs_second_read(self, reading: _Reading, evidence: Evidence) -> bool:
        slot = evidence.slot
        if reading.second_read or evidence.changed or slot.intact is not False:
            return False
        leads = [
            lead
            for part, recorded in slot.recorded.items()
            if recorded != slot.found[part]
            for lead in self._leads(reading.group.name, part, recorded, slot.found[part])
        ]
        if not leads:
            return False
        reading.leads, reading.second_read = leads[:SUSPECTS], True
        self._queue.appendleft(reading)
        return True

    def _keep(self, key: SlotKey, evidence: Evidence) -> None:
        self._kept[key] = time.monotonic(), evidence
        self._kept.move_to_end(key)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)


def _for_incident(evidence: Evidence, incident: str) -> Evidence:
    return msgspec.structs.replace(evidence, incident=incident)
