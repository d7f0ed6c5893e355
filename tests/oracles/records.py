"""Records in plain loops over plain integers, written from docs/architecture.md, not from the kernels."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

MASK = (1 << 64) - 1
ANCHOR = 0x243F6A8885A308D3
EMPTY, PENDING, COMPLETE, ADOPTED, BASELINE, AWAITED = range(6)
HEAD, TAIL, SWEEP, PATROL, HIT = range(5)
(
    CHAIN, POSITION, TOKEN, KV_DATA, WRITE_TOKEN, WRITE_POSITION, UNWRITTEN, LOST_WRITE, RECORD, LOST_LOAD
) = range(10)  # fmt: skip
NO_HISTORY = {ADOPTED: "adopted", AWAITED: "adopted", BASELINE: "baseline", PENDING: "pending"}
NO_REQUEST = -1


def finalize(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def mix64(token, position):
    mixed = token * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019
    return finalize(mixed & MASK)


def digest_of(tokens):
    """The chain over tokens from position 0, unsigned."""
    return (ANCHOR + sum(mix64(token, position) for position, token in enumerate(tokens))) & MASK


def word_key(i):
    return finalize(((i + 1) * 0x9E3779B97F4A7C15) & MASK) | 1


def layer_key(layer):
    return finalize(((layer + 1) * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & MASK) | 1


def fingerprint(layers, first_word=0, max_words=None):
    """Fingerprint of {layer: bytes of one slot}; words at or past max_words are left out."""
    total = 0
    for layer, data in layers.items():
        padded = bytes(data) + bytes(-len(data) % 4)
        for i in range(len(padded) // 4):
            word = first_word + i
            if max_words is None or word < max_words:
                value = int.from_bytes(padded[4 * i : 4 * i + 4], "little")
                total += layer_key(layer) * word_key(word) * value
    return total & MASK


def signed(value):
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


_ALIKE = [sum(1 << i for i in range(first, 64, 5)) for first in range(5)]


def fold(word):
    """Bit i of a word counts for bit i % 5."""
    return sum(((word & bits).bit_count() & 1) << place for place, bits in enumerate(_ALIKE))


_CHECKS = {fold(check << 59): check for check in range(32)}


def check_of(identity, chain):
    """Bits 59 to 63 of IDENTITY: those for which the record's words have equal folds."""
    return _CHECKS[fold(identity) ^ fold(chain)]


@dataclass
class Record:
    token: int = 0
    position: int = 0
    state: int = EMPTY
    chain: int = 0  # unsigned
    fingerprints: tuple[int, int] = (0, 0)  # unsigned
    error: int = 0  # of the stored check: which of its bits are not as they should be

    @classmethod
    def unpack(cls, words):
        identity, chain = words[0] & MASK, words[1] & MASK
        token = identity & 0xFFFFFFFF
        return cls(
            token=token - (1 << 32) if token >> 31 else token,
            position=identity >> 35 & 0xFFFFFF,
            state=(identity >> 32) & 7,
            chain=chain,
            fingerprints=(words[2] & MASK, words[3] & MASK),
            error=identity >> 59 ^ check_of(identity & (1 << 59) - 1, chain),
        )

    def pack(self):
        identity = (self.token & 0xFFFFFFFF) | ((self.position << 3 | self.state) << 32)
        identity |= (check_of(identity, self.chain) ^ self.error) << 59
        return [signed(word) for word in (identity, self.chain, *self.fingerprints)]

    @property
    def flaw(self):
        """By how much the folds of the record's words differ; 0 = its check holds."""
        return fold(self.error << 59)


@dataclass
class Group:
    """One group's records, counters by name, and violation rows by (phase, reason)."""

    records: list[Record]
    counts: Counter = field(default_factory=Counter)
    rows: dict = field(default_factory=lambda: defaultdict(list))

    def report(self, phase, reason, slot, position, request, part, expected, actual):
        self.counts["violations", phase, reason] += 1
        self.rows[phase, reason].append((slot, position, request, part, signed(expected), signed(actual)))

    def record(self, slot):
        return self.records[slot] if 0 <= slot < len(self.records) else None

    def write(self, batch):
        for r in batch.live():
            prefix = batch.prefix_lens[r]
            chain = self.chain_start(batch, r, prefix)
            # The last record before them tells the chain, unless this very forward writes it.
            linked = batch.digests is not None or prefix == 0
            if not linked:
                origin = batch.slot(r, prefix - 1)
                linked = self.record(origin) is None or origin not in batch.out_slots
            for j in range(batch.extend_lens[r]):
                t, position = batch.token_starts[r] + j, prefix + j
                token, slot = batch.input_ids[t], batch.out_slots[t]
                self.check_inputs(batch, r, t, position)
                old = self.record(slot)
                if old is not None and not linked:
                    self.records[slot] = Record(state=ADOPTED)
                    self.counts["written"] += 1
                elif old is not None:
                    witness = old.fingerprints if old.state == COMPLETE and old.token != token else (0, 0)
                    self.records[slot] = Record(token, position, PENDING, chain, witness)
                    self.counts["written"] += 1
                chain = (chain + mix64(token, position)) & MASK
        self.counts["write_runs"] += 1

    def chain_start(self, batch, r, prefix):
        if prefix == 0:
            return ANCHOR
        if batch.digests is not None:
            return batch.digests[r] & MASK
        before = self.record(batch.slot(r, prefix - 1))
        if before is None:
            return ANCHOR
        return (before.chain + mix64(before.token, prefix - 1)) & MASK

    def check_inputs(self, batch, r, t, position):
        slot, token = batch.out_slots[t], batch.input_ids[t]
        if batch.positions[t] != position:
            self.report(HEAD, WRITE_POSITION, slot, position, r, 0, position, batch.positions[t])
        if batch.expected_ids is not None and batch.expected_ids[t] not in (-1, token):
            self.report(HEAD, WRITE_TOKEN, slot, position, r, 0, batch.expected_ids[t], token)

    def verify_rows(self, batch, phase):
        for r in batch.live():
            prefix, start = batch.prefix_lens[r], batch.starts[r]
            for position in range(start, prefix + (batch.extend_lens[r] if phase != HEAD else 0)):
                previous = batch.slot(r, position - 1) if position > start else -1
                self.verify(batch.slot(r, position), position, previous, r, phase)
            asked = phase == HEAD or batch.extend_lens[r] == 0
            if asked and batch.digests is not None and prefix > 0:
                slot = batch.slot(r, prefix - 1)
                last = self.record(slot)
                if last is not None and (last.state, last.position, last.flaw) == (COMPLETE, prefix - 1, 0):
                    found = (last.chain + mix64(last.token, prefix - 1)) & MASK
                    if found != batch.digests[r] & MASK:
                        self.report(phase, TOKEN, slot, prefix - 1, r, 0, batch.digests[r], found)
        if phase == TAIL and batch.known_lens is not None:
            self.verify_known(batch)
        self.counts["runs", phase] += 1

    def verify_known(self, batch):
        for r in range(len(batch.rows)):
            known, prefix, record = batch.known_lens[r], batch.prefix_lens[r], None
            stop = min(prefix + batch.extend_lens[r], len(batch.slot_table[0]) * batch.page_size)
            if r in batch.live() and 0 < known <= stop and known > prefix - 64:
                slot = batch.slot(r, known - 1)
                record = self.record(slot)
            if record is None or (record.state, record.position, record.flaw) != (COMPLETE, known - 1, 0):
                self.counts["tokens_left_out"] += 1
                continue
            self.counts["tokens_compared"] += 1
            found = (record.chain + mix64(record.token, known - 1)) & MASK
            if found != batch.known_digests[r] & MASK:
                self.report(TAIL, WRITE_TOKEN, slot, known - 1, r, 0, batch.known_digests[r], found)

    def verify_list(self, slots, positions, previous, phase):
        for slot, position, before in zip(slots, positions, previous, strict=True):
            if slot >= 0:
                self.verify(slot, position, before, NO_REQUEST, phase)
        self.counts["runs", phase] += 1

    def verify(self, slot, position, previous, request, phase):
        record, before = self.record(slot), self.record(previous)
        state = -1 if record is None else record.state
        if record is not None and record.flaw:
            self.report(phase, RECORD, slot, position, request, 0, 0, record.flaw)
        elif state in (-1, EMPTY, 6, 7) or (state == PENDING and phase != HEAD):
            self.report(phase, UNWRITTEN, slot, position, request, 0, COMPLETE, state)
        elif state in NO_HISTORY:
            cause = "pending" if state == AWAITED and phase == HEAD else NO_HISTORY[state]
            self.counts["unverified", phase, cause] += 1
        else:
            self.counts["verified", phase] += 1
            expected = record.chain
            if position == 0:
                expected = ANCHOR
            elif before is not None and before.state == COMPLETE and not before.flaw:
                expected = (before.chain + mix64(before.token, position - 1)) & MASK
            if record.position != position:
                self.report(phase, POSITION, slot, position, request, 0, position, record.position)
            elif record.chain != expected:
                self.report(phase, CHAIN, slot, position, request, 0, expected, record.chain)

    def complete(self, slots, hashes, covered):
        for slot, new in zip(slots, hashes, strict=True):
            record = self.record(slot)
            if record is not None and record.state == PENDING:
                if covered and any(record.fingerprints) and record.fingerprints == tuple(new):
                    position, witness = record.position, record.fingerprints[0]
                    self.report(TAIL, LOST_WRITE, slot, position, NO_REQUEST, 1, witness, new[0])
                record.state, record.fingerprints = COMPLETE, tuple(new)  # damage stays damage: see `error`
                self.counts["completed"] += 1
            else:
                self.counts["uncompleted"] += 1
        self.counts["complete_runs"] += 1

    def arrive(self, slot, position, size, copies, now, unchanged):
        """A block of `size` slots was loaded; copies: pairs that may have been sent; unchanged: 0 to 2."""
        self.counts["loads" if copies else "loads_left_out"] += size
        self.counts["hashed" if copies else "unhashed", HEAD] += size
        if tuple(now) in copies:
            return True
        for part in (0, 1):
            place = slot, position, NO_REQUEST, part + 1
            if not copies:
                if unchanged[part] == 2:
                    self.report(HEAD, LOST_LOAD, *place, now[part], now[part])
                continue
            right = [now[which] in [copy[which] for copy in copies] for which in (0, 1)]
            if not right[part] or (part == 0 and all(right)):
                reason = LOST_LOAD if unchanged[part] else KV_DATA
                self.report(HEAD, reason, *place, copies[0][part], now[part])
        return False

    def baseline(self, slots, hashes, covered):
        for slot, new in zip(slots, hashes, strict=True):
            record = self.record(slot)
            if record is not None and covered and record.state == ADOPTED and not record.flaw:
                record.state, record.fingerprints = BASELINE, tuple(new)
                self.counts["baselines"] += 1
            if record is not None and not record.flaw and record.state in (ADOPTED, BASELINE, AWAITED):
                self.counts["census", record.state] += 1
        self.counts["baseline_runs"] += 1

    def compare(self, slots, hashes, covered, phase):
        for slot, now in zip(slots, hashes, strict=True):
            record = self.record(slot)
            state = EMPTY if record is None else record.state
            if state not in (COMPLETE, BASELINE) or record.flaw or not covered:
                self.counts["unhashed", phase] += 1
            if record is not None and record.flaw:
                if phase in (HEAD, PATROL, HIT):
                    self.report(phase, RECORD, slot, record.position, NO_REQUEST, 0, 0, record.flaw)
            elif state in (COMPLETE, BASELINE) and covered:
                self.counts["hashed", phase] += 1
                for part, (stored, found) in enumerate(zip(record.fingerprints, now, strict=True), 1):
                    if stored != found:
                        place = slot, record.position, NO_REQUEST, part
                        self.report(phase, KV_DATA, *place, stored, found)
            elif state in (COMPLETE, BASELINE):
                self.counts["unverified", phase, "no_fingerprint"] += 1
            elif state in NO_HISTORY and phase == PATROL:
                self.counts["unverified", phase, NO_HISTORY[state]] += 1
        if phase in (PATROL, HIT):
            self.counts["runs", phase] += 1


@dataclass
class Batch:
    """A RowBatch as lists."""

    slot_table: list
    page_size: int
    rows: list
    starts: list
    prefix_lens: list
    extend_lens: list
    token_starts: list
    digests: list | None
    input_ids: list
    positions: list
    out_slots: list
    expected_ids: list | None
    known_lens: list | None = None
    known_digests: list | None = None

    def live(self):
        return [r for r, row in enumerate(self.rows) if 0 <= row < len(self.slot_table)]

    def slot(self, r, position):
        page = self.slot_table[self.rows[r]][position // self.page_size]
        return page * self.page_size + position % self.page_size
