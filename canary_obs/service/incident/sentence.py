"""One sentence about an incident, made of facts alone: it says less where less is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from canary_obs.hub.incidents import Incident
from canary_obs.service.incident.facts import Facts, lead_of
from canary_obs.slot_facts import ChangedWord
from canary_obs.vocabulary import Part, Phase, Plane, Reason, SlotState

_SHOWN = 3  # requests named in one sentence
_ID_LENGTH = 48
# Bits of an element and of its exponent; the sign is the highest bit.
_FORMATS = {
    "float64": (64, 11), "float32": (32, 8), "bfloat16": (16, 8), "float16": (16, 5),
    "float8_e4m3fn": (8, 4), "float8_e5m2": (8, 5),
}  # fmt: skip


def sentence_of(incident: Incident) -> str:
    """What the first finding of an incident says, as one sentence."""
    facts = lead_of(incident)
    return "No finding of this incident is kept." if facts is None else sentence(facts)


def sentence(facts: Facts) -> str:
    """What a finding says, as one sentence."""
    text = _SENTENCES[facts.row.reason](facts)
    return f"{text}{_following(facts)}."


def _position(facts: Facts) -> str:
    if facts.actual is None:
        return f"{_reads(facts)}, which holds another position"
    holds = f"{_reads(facts)}, which holds position {facts.actual}"
    if facts.others:
        return f"{holds} of {_named(facts.others)}: another request's context"
    if facts.is_foreign:
        return f"{holds} of a request that ran in step {facts.written_step}: another request's context"
    users = facts.users or ()
    if facts.reader is not None and users == (facts.reader,):
        return f"{holds} of the same request: its own context in the wrong place"
    also = tuple(user for user in users if user != facts.reader)
    if facts.reader in users and also:
        return f"{holds}; {_named(also)} {_verb(also, 'uses', 'use')} the slot too"
    return f"{holds}: not the context that belongs there"


def _chain(facts: Facts) -> str:
    reads = f"{_reads(facts)}, which does not continue the slot before it"
    if facts.others:
        verb = _verb(facts.others, "uses", "use")
        return f"{reads}: {_named(facts.others)} {verb} it, another request's context"
    if facts.is_foreign:
        return f"{reads}: it was written in step {facts.written_step}, another request's context"
    return f"{reads}: its context is not the one that was written for it"


def _unwritten(facts: Facts) -> str:
    row, reads = facts.row, _reads(facts)
    if row.slot < 0:
        who = _capital(facts.reader or "a request")
        return f"{who} reads a slot that does not exist ({row.slot}): never written"
    states = {
        SlotState.EMPTY.code: "which holds nothing that was written: stale or never filled",
        SlotState.PENDING.code: "whose forward never finished",
        SlotState.AWAITED.code: "whose bytes have not arrived yet",
    }
    found = facts.actual
    if found is None:
        return f"{reads}, which holds no finished write"
    return f"{reads}, {states.get(found, 'which holds no finished write, or does not exist')}"


def _token(facts: Facts) -> str:
    who = facts.reader or "a request"
    return f"{_capital(who)} starts on a recorded prefix that is not its tokens{_up_to(facts)}: wrong token"


def _write_token(facts: Facts) -> str:
    who = _capital(facts.reader or "a request")
    return f"{who} was computed with another token than the scheduler gave it{_up_to(facts)}: wrong token"


def _write_position(facts: Facts) -> str:
    row, who = facts.row, _capital(facts.reader or "a request")
    if row.slot < 0:
        lengths = "lengths outside of the slot table or of the forward"
        return f"{who} has {lengths}: wrong position, its prefix is {_known(facts.actual)}"
    given = f"{who} was given position {_known(facts.actual)} for position {_known(facts.expected)}"
    return f"{given} (slot {row.slot}, group {row.group}): wrong position"


def _lost_write(facts: Facts) -> str:
    row = facts.row
    part = "" if row.part is None else f" {_part(row.part)}"
    return f"The forward left the{part} bytes of {_slot(facts)} as they were before: the write was lost"


def _lost_load(facts: Facts) -> str:
    row = facts.row
    part = "" if row.part is None else f" {_part(row.part)}"
    return f"A load was reported complete and left the{part} bytes of {_slot(facts)} as they were before it"


def _kv_data(facts: Facts) -> str:
    if facts.changed:
        return _changed(facts, facts.changed[0])
    part = "bytes" if facts.row.part is None else f"{_part(facts.row.part)} bytes"
    text = f"The {part} of {_slot(facts)} changed after they were written"
    evidence = facts.evidence
    if evidence is None or evidence.slot.intact is None:
        return text
    if evidence.slot.intact:
        return f"{text}, and were as recorded again when they were read a second time"
    damaged = sum(neighbour.intact is False for neighbour in evidence.neighbours)
    if evidence.changed:  # known once, and written again before it could be read
        return text
    near = f", and so did {damaged} of {len(evidence.neighbours)} slots around it" if damaged else ""
    return f"{text}: more than one word{near}"


def _changed(facts: Facts, word: ChangedWord) -> str:
    bits = int(word.original or "0", 16) ^ int(word.current or "0", 16)
    plane = " scales" if word.plane is Plane.SCALES else ""
    where = f"{_part(word.part)}{plane}, layer {word.layer}, head {word.head}, element {word.element}"
    count = bits.bit_count()
    what = f"One bit{_bit_name(word, bits)}" if count == 1 else f"{count} bits of one word"
    return f"{what} of {_slot(facts)} changed after it was written ({where}): {_kind(count)}"


def _kind(bits: int) -> str:
    return "a bit flip" if bits == 1 else "one word was overwritten"


def _bit_name(word: ChangedWord, bits: int) -> str:
    if word.dtype not in _FORMATS or word.plane is Plane.SCALES or _FORMATS[word.dtype][0] > 32:
        return ""
    width, exponent = _FORMATS[word.dtype]
    bit = (bits.bit_length() - 1) % width
    if bit == width - 1:
        return " (the sign)"
    highest = width - 2
    if bit > highest - exponent:
        return f" (exponent bit {bit - (highest - exponent) - 1})"
    return f" (mantissa bit {bit})"


def _record(facts: Facts) -> str:
    row = facts.row
    return (
        f"The canary's own record of slot {row.slot} (group {row.group}) is damaged: nothing is known of the "
        f"slot's bytes, but memory next to them changed"
    )


_SENTENCES: Mapping[Reason, Callable[[Facts], str]] = {
    Reason.CHAIN: _chain, Reason.POSITION: _position, Reason.TOKEN: _token, Reason.KV_DATA: _kv_data,
    Reason.WRITE_TOKEN: _write_token, Reason.WRITE_POSITION: _write_position, Reason.UNWRITTEN: _unwritten,
    Reason.LOST_WRITE: _lost_write, Reason.LOST_LOAD: _lost_load, Reason.RECORD: _record,
}  # fmt: skip


def _reads(facts: Facts) -> str:
    row = facts.row
    at = "" if row.position is None else f" at position {row.position}"
    slot = f"slot {row.slot} (group {row.group})"
    if row.phase in (Phase.SWEEP, Phase.PATROL):
        return f"The prefix cache leads{at} to {slot}"
    return f"{_capital(facts.reader or 'a request')}{at} reads {slot}"


def _slot(facts: Facts) -> str:
    row = facts.row
    position = "" if row.position is None else f", position {row.position}"
    users = facts.users if facts.users is not None else ()
    used = f", used by {_named(users)}" if users else ""
    return f"slot {row.slot} (group {row.group}{position}{used})"


def _following(facts: Facts) -> str:
    more = facts.row.slots - 1
    return "" if more < 1 else f"; the next {'slot' if more == 1 else f'{more} slots'} likewise"


def _up_to(facts: Facts) -> str:
    return "" if facts.row.position is None else f" up to position {facts.row.position}"


def _named(requests: tuple[str, ...]) -> str:
    shown = [_short(request) for request in requests[:_SHOWN]]
    more = len(requests) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _short(request: str) -> str:
    # Clients choose ids: one must not fill the page.
    return request if len(request) <= _ID_LENGTH else f"{request[: _ID_LENGTH - 1]}…"


def _capital(who: str) -> str:
    return "A request" if who == "a request" else _short(who)


def _part(part: Part) -> str:
    return part.value.upper()


def _known(value: int | None) -> str:
    return "unknown" if value is None else str(value)


def _verb(names: tuple[str, ...], one: str, many: str) -> str:
    return one if len(names) == 1 else many
