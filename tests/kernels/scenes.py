"""Random scenes for the operations: consistent records of some requests, then damage, as tensors."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace

import torch

from canary_kernels import layout
from canary_kernels.buffers import GroupBuffers, RowBatch, allocate_buffers
from canary_kernels.checks import Backend
from canary_kernels.layout import CHAIN_ANCHOR, Phase, Reason, Unverified
from tests.oracles import records as oracle

STEP = 7
TRITON_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_MAX_TOKEN = (1 << 31) - 1
CHAINS = {"chain": None, "first chain": 0, "second chain": 1}  # kind of damage -> its position; None = any


def device_of(backend: Backend) -> str:
    """The reference runs on the CPU, the kernels on the GPU when there is one."""
    return TRITON_DEVICE if backend is Backend.TRITON else "cpu"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """CPU tensors before an operation."""

    records: torch.Tensor
    batch: RowBatch

    def oracle(self) -> tuple[oracle.Group, oracle.Batch]:
        """The same scene as plain Python."""
        plain = {
            field.name: value.tolist()
            if isinstance(value := getattr(self.batch, field.name), torch.Tensor)
            else value
            for field in fields(self.batch)
            if field.init
        }
        group = oracle.Group([oracle.Record.unpack(words) for words in self.records.tolist()])
        return group, oracle.Batch(**plain)

    def buffers(self, backend: Backend, lane_rows: int = 512) -> GroupBuffers:
        """Fresh buffers that hold the scene's records."""
        clock = torch.full((1,), STEP, dtype=torch.int64, device=device_of(backend))
        buffers = allocate_buffers(self.records.shape[0], clock, lane_rows)
        buffers.records.copy_(self.records)
        return buffers

    def batch_on(self, backend: Backend) -> RowBatch:
        """The batch where the backend's buffers lie."""
        moved = {
            field.name: value.to(device_of(backend))
            for field in fields(self.batch)
            if isinstance(value := getattr(self.batch, field.name), torch.Tensor)
        }
        return replace(self.batch, **moved)


def random_scene(
    seed: int,
    *,
    page_size: int = 1,
    dtype: torch.dtype = torch.int64,
    damage: float = 0.05,
    only: str | None = None,
    longest: int = 40,
) -> Scene:
    """Some requests with prefixes in a paged pool, new tokens to write, and damage to anything at random.

    `only` = one damage of that kind instead: it shows what a fast path leaves out; many hide one another.
    """
    rng = random.Random(seed)
    requests = rng.randrange(6)
    prefix = [rng.choice([0, 1, rng.randrange(longest)]) for _ in range(requests)]
    extend = [rng.choice([0, 1, 1, rng.randrange(longest)]) for _ in range(requests)]
    width = -(-2 * longest // page_size)
    num_pages = 2 + (requests + 2) * width
    pages = rng.sample(range(num_pages), (requests + 2) * width)
    table = [pages[row * width : (row + 1) * width] for row in range(requests + 2)]
    rows = rng.sample(range(requests + 2), requests)
    tokens = [[rng.randint(0, _MAX_TOKEN) for _ in range(2 * longest)] for _ in range(requests)]
    records = [oracle.Record() for _ in range(num_pages * page_size)]
    digests, columns = [], {"input_ids": [], "positions": [], "out_slots": [], "expected_ids": []}
    for r in range(requests):
        chain = CHAIN_ANCHOR
        for p in range(prefix[r]):
            record = oracle.Record(
                tokens[r][p], p, oracle.COMPLETE, chain, (rng.getrandbits(64), rng.getrandbits(64))
            )
            records[table[rows[r]][p // page_size] * page_size + p % page_size] = record
            chain += oracle.mix64(tokens[r][p], p)
        digests.append(oracle.signed(chain))
        for p in range(prefix[r], prefix[r] + extend[r]):
            columns["input_ids"].append(tokens[r][p])
            columns["expected_ids"].append(rng.choice([-1, tokens[r][p]]))
            columns["positions"].append(p)
            columns["out_slots"].append(table[rows[r]][p // page_size] * page_size + p % page_size)
    starts = [rng.choice([0, rng.randrange(n + 1)]) for n in prefix]
    for record in records:  # what earlier requests left behind
        if record.state == oracle.EMPTY and rng.random() < 0.3:
            record.state, record.token, record.position = (
                oracle.COMPLETE,
                rng.randint(0, _MAX_TOKEN),
                rng.randrange(99),
            )
            record.fingerprints = rng.getrandbits(64), rng.choice([0, rng.getrandbits(64)])
    packed = [record.pack() for record in records]
    known_lens = [_known_len(rng, prefix[r], extend[r]) for r in range(requests)]
    chains = [oracle.digest_of(tokens[r][: max(0, known_lens[r])]) for r in range(requests)]
    known = {"known_lens": known_lens, "known_digests": [oracle.signed(chain) for chain in chains]}
    scene = {"table": table, "rows": rows, "digests": digests, **columns, **known}
    if only is None:
        _damage(rng, damage, scene, packed)
    else:
        _damage_once(rng, only, scene, packed)
    padding = rng.randrange(3)

    def column(values, fill=0):
        return torch.tensor(values + [fill] * padding, dtype=dtype)

    starts_of_tokens = [sum(extend[:r]) for r in range(requests + 1)]
    batch = RowBatch(
        slot_table=torch.tensor(table, dtype=dtype),
        page_size=page_size,
        rows=torch.tensor(rows, dtype=dtype),
        starts=torch.tensor(starts, dtype=dtype),
        prefix_lens=torch.tensor(prefix, dtype=dtype),
        extend_lens=torch.tensor(extend, dtype=dtype),
        token_starts=torch.tensor(starts_of_tokens, dtype=dtype),
        digests=torch.tensor(digests, dtype=torch.int64) if rng.random() < 0.7 else None,
        input_ids=column(scene["input_ids"]),
        positions=column(scene["positions"]),
        out_slots=column(scene["out_slots"], -1),
        expected_ids=column(scene["expected_ids"], -1) if rng.random() < 0.5 else None,
        **(
            {name: torch.tensor(scene[name], dtype=torch.int64) for name in known}
            if rng.random() < 0.7
            else {}
        ),
    )
    return Scene(records=torch.tensor(packed, dtype=torch.int64).view(-1, layout.RECORD_WORDS), batch=batch)


def _known_len(rng: random.Random, prefix: int, extend: int) -> int:
    """What a scheduler may know of a request: all tokens, all but the newest, few, nothing, too many."""
    whole = prefix + extend
    return rng.choice([whole, whole, prefix, rng.randrange(prefix + 1), -1, whole + 1])


def _damage(rng: random.Random, rate: float, scene: dict, packed: list) -> None:
    """Flip bits of records, redirect table cells, change inputs: each at the given rate."""
    for words in packed:
        if words[0] and rng.random() < rate:
            word = rng.randrange(len(words))
            words[word] = oracle.signed(words[word] ^ 1 << rng.randrange(63))
        elif words[0] and rng.random() < rate / 2:
            words[0] = oracle.signed(words[0] ^ rng.choice([1, 2, 3]) << 32)
        elif words[0] and rng.random() < rate:  # damage of the engine's making: the check holds
            words[:] = _other_record(rng, words)
    spots = [(cells, lambda: rng.choice([-1, 10**6, rng.randrange(len(packed))])) for cells in scene["table"]]
    spots += [
        (scene["rows"], lambda: rng.choice([-1, len(scene["table"])])),
        (scene["digests"], lambda: rng.getrandbits(62)),
        (scene["known_digests"], lambda: rng.getrandbits(62)),
        (scene["known_lens"], lambda: rng.randrange(90)),
        (scene["positions"], lambda: rng.randrange(99)),
        (scene["expected_ids"], lambda: rng.randint(0, _MAX_TOKEN)),
        (scene["out_slots"], lambda: rng.choice([-1, 10**6])),
    ]
    for values, other in spots:
        for index in range(len(values)):
            if rng.random() < rate:
                values[index] = other()


def _damage_once(rng: random.Random, kind: str, scene: dict, packed: list) -> None:
    """One change of a kind in one place, where there is such a place."""
    if kind in scene:
        if scene[kind]:
            index = rng.randrange(len(scene[kind]))
            scene[kind][index] = 0 if kind == "expected_ids" else scene[kind][index] ^ 1
        return
    live = [words for words in packed if words[1] and words[0] >> 32 & layout.STATE_MASK == oracle.COMPLETE]
    if (position := CHAINS.get(kind)) is not None:
        live = [words for words in live if oracle.Record.unpack(words).position == position]
    if not live:
        return
    words = rng.choice(live)
    if kind == "bit":
        word = rng.randrange(2)
        words[word] = oracle.signed(words[word] ^ 1 << rng.randrange(64))
        return
    record = oracle.Record.unpack(words)
    if kind in CHAINS:
        record.chain ^= 1 << rng.randrange(63)
    elif kind == "token":
        record.token ^= 1 << rng.randrange(31)
    elif kind == "position":
        record.position ^= 1 << rng.randrange(8)
    else:
        record.state = rng.choice([state for state in range(8) if state != record.state])
    words[:] = record.pack()


def _other_record(rng: random.Random, words: list[int]) -> list[int]:
    """A record like this one but for its chain, token, position or state."""
    record = oracle.Record.unpack(words)
    name = rng.choice(["chain", "token", "position", "state"])
    bits = {"chain": 63, "token": 31, "position": 8, "state": 3}
    setattr(record, name, getattr(record, name) ^ 1 << rng.randrange(bits[name]))
    return record.pack()


def counters_of(group: oracle.Group) -> list[int]:
    """An oracle's counts at the places the layout gives them."""
    places = {"written": layout.COUNT_WRITTEN, "completed": layout.COUNT_COMPLETED}
    places |= {"baselines": layout.COUNT_BASELINES, "baseline_runs": layout.COUNT_BASELINE_RUNS}
    places |= {"write_runs": layout.COUNT_WRITE_RUNS, "complete_runs": layout.COUNT_COMPLETE_RUNS}
    places["uncompleted"] = layout.COUNT_UNCOMPLETED
    places["tokens_compared"] = layout.COUNT_TOKENS_COMPARED
    places["tokens_left_out"] = layout.COUNT_TOKENS_LEFT_OUT
    places |= {"loads": layout.COUNT_LOADS_COMPARED, "loads_left_out": layout.COUNT_LOADS_LEFT_OUT}
    places |= {("census", int(state)): layout.COUNT_CENSUS + state for state in layout.RecordState}
    for phase in Phase:
        places["unhashed", phase] = layout.COUNT_UNHASHED + phase
        places["runs", phase] = layout.COUNT_RUNS + phase
        places["verified", phase] = layout.COUNT_VERIFIED + phase
        places["hashed", phase] = layout.COUNT_HASHED + phase
        for cause in Unverified:
            index = layout.COUNT_UNVERIFIED + phase * layout.NUM_UNVERIFIED + cause
            places["unverified", phase, cause.name.lower()] = index
        for reason in Reason:
            places["violations", phase, reason] = layout.COUNT_VIOLATIONS + layout.lane(phase, reason)
    counters = [0] * layout.COUNTER_WORDS
    for name, value in group.counts.items():
        counters[places[name]] = value
    return counters


def assert_same(buffers: GroupBuffers, group: oracle.Group) -> None:
    """Records, counters and logged rows are exactly the oracle's; events number each lane's rows from 1."""
    assert buffers.records.tolist() == [record.pack() for record in group.records]
    assert buffers.counters.tolist() == counters_of(group)
    for phase in Phase:
        for reason in Reason:
            log = buffers.violations[layout.lane(phase, reason)]
            rows = log[log.any(dim=1)].tolist()
            assert [row[layout.ROW_EVENT] for row in rows] == list(range(1, len(rows) + 1))
            assert all(row[layout.ROW_STEP] == STEP for row in rows)
            logged = sorted(tuple(row[layout.ROW_SLOT :]) for row in rows)
            assert logged == sorted(group.rows[phase, reason])
