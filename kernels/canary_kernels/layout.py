"""The bytes, described once: record, violation row, counters. Nothing here imports torch or Triton."""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """When a check ran. HIT: before a forward reads slots that joined a request, or that were copied."""

    HEAD = 0
    TAIL = 1
    SWEEP = 2
    PATROL = 3
    HIT = 4


class Reason(IntEnum):
    """Which check failed; one per violation row."""

    CHAIN = 0
    POSITION = 1
    TOKEN = 2
    KV_DATA = 3
    WRITE_TOKEN = 4
    WRITE_POSITION = 5
    UNWRITTEN = 6
    LOST_WRITE = 7
    RECORD = 8
    LOST_LOAD = 9


class Part(IntEnum):
    """What the failed check read; IDENTITY is the record itself, K and V are KV bytes."""

    IDENTITY = 0
    K = 1
    V = 2


class Plane(IntEnum):
    """What a layer's words of one part are: the elements, or what turns them into numbers."""

    DATA = 0
    SCALES = 1


class RecordState(IntEnum):
    """The life of a record: EMPTY, PENDING between head and tail, COMPLETE.

    Without history: ADOPTED = no fingerprint either; BASELINE = fingerprinted when first seen, so that later
    damage is seen; AWAITED = its bytes are on their way, and what lies there until they arrive is nothing.
    """

    EMPTY = 0
    PENDING = 1
    COMPLETE = 2
    ADOPTED = 3
    BASELINE = 4
    AWAITED = 5


class Unverified(IntEnum):
    """Why a slot that came up for a check could not be checked; BASELINE = its bytes were, its links not."""

    ADOPTED = 0
    PENDING = 1
    NO_FINGERPRINT = 2
    BASELINE = 3


class RealData(IntEnum):
    """How many 32-bit words of each layer and part a fingerprint covers."""

    NONE = 0
    PARTIAL = 1
    ALL = 2


# Record: int64 [num_slots, RECORD_WORDS], 32 bytes, one memory sector.
# IDENTITY holds, from its low bits: the token (32), the state, the position, the record's check of itself.
# The check makes the folds of IDENTITY and CHAIN equal. A record of all zero bytes is EMPTY, and sound.
RECORD_WORDS = 4
RECORD_BYTES = 8 * RECORD_WORDS
IDENTITY, CHAIN, FINGERPRINT_K, FINGERPRINT_V = range(RECORD_WORDS)
STATE_BITS, POSITION_BITS, CHECK_BITS = 3, 24, 5
STATE_MASK = (1 << STATE_BITS) - 1
MAX_POSITION = (1 << POSITION_BITS) - 1
STATE_AND_POSITION_MASK = (1 << (STATE_BITS + POSITION_BITS)) - 1  # of the high 32 bits
TOKEN_MASK = (1 << 32) - 1  # of IDENTITY
# Bit i of a word counts for bit i % CHECK_BITS of its fold: these shifts add up all 64.
FOLD_SHIFTS = (40, 20, 10, 5)
PARTIAL_WORDS = 4
# Words of plane p are numbered from p * PLANE_WORDS in the whole model's layer, whatever the shard holds.
PLANE_WORDS = 1 << 24

# Lane: one (phase, reason) of a group. Lane counters are the violation counters.
NUM_PHASES, NUM_REASONS, NUM_UNVERIFIED = len(Phase), len(Reason), len(Unverified)
NUM_LANES = NUM_PHASES * NUM_REASONS

# Violation log: int64 [NUM_LANES, lane_rows, ROW_WORDS]. Event n (from 0) of a lane lies in row 0 when
# n == 0 (the first is kept for ever), else in row 1 + (n - 1) % (lane_rows - 1) (the latest are kept).
# ROW_EVENT stores n + 1, so a row of zeros was never written. ROW_STEP stores the clock: step << TICK_BITS
# | tick. A row is written at most once per clock value, so that launches never tear each other's rows.
TICK_BITS = 20
ROW_WORDS = 8
(ROW_EVENT, ROW_STEP, ROW_SLOT, ROW_POSITION, ROW_REQUEST, ROW_PART, ROW_EXPECTED, ROW_ACTUAL) = range(
    ROW_WORDS
)
NO_REQUEST = -1

# Counters: int64 [COUNTER_WORDS] per group, monotonic.
COUNT_VIOLATIONS = 0  # + lane(phase, reason)
COUNT_RUNS = COUNT_VIOLATIONS + NUM_LANES  # + phase: launches that finished a check of this phase
COUNT_VERIFIED = COUNT_RUNS + NUM_PHASES  # + phase: slots whose record was checked
COUNT_HASHED = COUNT_VERIFIED + NUM_PHASES  # + phase: slots whose bytes were compared with their record
COUNT_UNVERIFIED = COUNT_HASHED + NUM_PHASES  # + phase * NUM_UNVERIFIED + Unverified: slots met, not checked
COUNT_WRITTEN = COUNT_UNVERIFIED + NUM_PHASES * NUM_UNVERIFIED  # identities written
COUNT_COMPLETED = COUNT_WRITTEN + 1  # fingerprints stored, records made COMPLETE
COUNT_WRITE_RUNS = COUNT_COMPLETED + 1
COUNT_COMPLETE_RUNS = COUNT_WRITE_RUNS + 1
COUNT_BASELINES = COUNT_COMPLETE_RUNS + 1  # ADOPTED records given a fingerprint, made BASELINE
COUNT_BASELINE_RUNS = COUNT_BASELINES + 1
# + RecordState, of ADOPTED, BASELINE and AWAITED: records left in this state by what takes baselines.
COUNT_CENSUS = COUNT_BASELINE_RUNS + 1
# Every slot given to a byte check, padding included, is counted once: as hashed or completed, or here.
COUNT_UNHASHED = COUNT_CENSUS + len(RecordState)  # + phase: slots given, not compared
COUNT_UNCOMPLETED = COUNT_UNHASHED + NUM_PHASES  # slots given to the fingerprinting that were not PENDING
COUNT_LAYER_CHECKED = COUNT_UNCOMPLETED + 1  # new slots of which one layer was compared with before the write
COUNT_LAYER_LEFT_OUT = COUNT_LAYER_CHECKED + 1  # new slots given to that check, and not compared
# At the tail, every request given with what the scheduler knows of it: its tokens were compared, or left out.
COUNT_TOKENS_COMPARED = COUNT_LAYER_LEFT_OUT + 1
COUNT_TOKENS_LEFT_OUT = COUNT_TOKENS_COMPARED + 1
# Slots that arrived with a load: their bytes were compared with what was sent, or nothing is known of that.
COUNT_LOADS_COMPARED = COUNT_TOKENS_LEFT_OUT + 1
COUNT_LOADS_LEFT_OUT = COUNT_LOADS_COMPARED + 1
COUNTER_WORDS = 128
# What a scheduler knows must lie less than this many tokens behind the forward, or it is left out as stale.
KNOWN_LAG = 64

CHAIN_ANCHOR = 0x243F6A8885A308D3


def fold(word: int) -> int:
    """The exclusive or of a word's pieces of CHECK_BITS bits."""
    folded = unsigned(word)
    for shift in FOLD_SHIFTS:
        folded ^= folded >> shift
    return folded & ((1 << CHECK_BITS) - 1)


def sealed(identity: int, chain: int = 0) -> int:
    """IDENTITY with the check that belongs to it and to a chain; `identity` without one. As int64."""
    folded = fold(identity ^ chain)
    # Bits 60 to 63 count for bits 0 to 3 of the fold, bit 59 for bit 4.
    return signed(identity | folded << 60 | folded >> 4 << 59)


def identity_of(token: int, position: int, state: RecordState, chain: int = 0) -> int:
    """IDENTITY of a record, with its check, as int64."""
    return sealed(token & 0xFFFFFFFF | (position << STATE_BITS | int(state)) << 32, chain)


def lane(phase: Phase, reason: Reason) -> int:
    """Index of a lane in the counters and in the violation log."""
    return int(phase) * NUM_REASONS + int(reason)


def signed(value: int) -> int:
    """An unsigned 64-bit value as the int64 that tensors store."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def unsigned(value: int) -> int:
    """An int64 as the unsigned 64-bit value the mathematics is written in."""
    return value & ((1 << 64) - 1)


# Changes of state, by exclusive or: they carry damage along, where a new check would hide it.
PENDING_TO_COMPLETE = sealed((RecordState.PENDING ^ RecordState.COMPLETE) << 32)
ADOPTED_TO_BASELINE = sealed((RecordState.ADOPTED ^ RecordState.BASELINE) << 32)
COMPLETE_TO_BASELINE = sealed((RecordState.COMPLETE ^ RecordState.BASELINE) << 32)
