"""From the announcement of a load to its arrival; with a real connector: real/test_connectors.py."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from canary_obs.engine_api.loads import ArrivedBlocks, LoadedBlocks
from canary_obs.engines.toolkit.later import Later
from canary_obs.engines.vllm.connector_loads import ConnectorLoads
from canary_obs.engines.vllm.groups import VllmGroup
from canary_obs.engines.vllm.loaded_blocks import loaded_blocks, rows_of
from canary_obs.engines.vllm.pool_events import Loaded, LoadTokens
from tests.engines.vllm.taken_copies import taken
from tests.oracles.records import digest_of, signed

SIZE = 4


def group(name: str, number: int, size: int = SIZE, *, states: bool = False) -> VllmGroup:
    view: Any = SimpleNamespace(name=name)
    return VllmGroup(number=number, num_blocks=64, block_size=size, view=view, layers=(), states=states)


class Recorder:
    """The hooks that loads call; of arrivals, the slots that have arrived."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.before: list[tuple[str, list[int]]] = []  # compared before a load
        self.arrived: ArrivedBlocks | None = None
        self.expected: ArrivedBlocks | None = None
        self.tokens: torch.Tensor | None = None  # that a load is to bring
        self.copied: Sequence[torch.Event] = ()
        self._slots: dict[tuple[str, str], torch.Tensor] = {}

    def invalidated(self, group: str, slots: torch.Tensor) -> None:
        self.calls.append(("invalidated", group, slots.tolist()))

    def before_load(self, group: str, slots: torch.Tensor) -> None:
        self.before.append((group, slots.tolist()))

    def load_begun(self, load: str, group: str, blocks: LoadedBlocks) -> None:
        self._slots[load, group], self.expected, self.tokens = blocks.slots, blocks.expected, blocks.tokens
        self.copied = blocks.copied
        self.calls.append(("begun", group, blocks.slots.flatten().tolist()))

    def load_ended(self, load: str, group: str, arrived: ArrivedBlocks) -> None:
        self.arrived = arrived
        slots = self._slots.pop((load, group))
        edges = zip(slots, arrived.first, arrived.stop, strict=True)
        found = [row[first:stop] for row, first, stop in edges]
        self.calls.append(("ended", group, torch.cat(found).tolist()))

    def load_failed(self, load: str) -> None:
        self.calls.append(("failed", load))

    def load_dropped(self, load: str) -> None:
        self.calls.append(("dropped", load))

    def take(self) -> list[tuple[Any, ...]]:
        calls, self.calls = self.calls, []
        return calls


def output(new: dict[str, int] | None = None, cached: dict[str, int] | None = None, ended: str = "") -> Any:
    """A scheduler output; values are tokens computed before."""
    cached = cached or {}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=count) for name, count in (new or {}).items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=list(cached.values())
        ),
        finished_req_ids=set(ended),
        preempted_req_ids=None,
    )


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def loads() -> ConnectorLoads:
    return ConnectorLoads([group("full", 0)], torch.device("cpu"))


def act_on(loads: ConnectorLoads, given: Any, events: tuple[Loaded, ...], recorder: Recorder) -> None:
    """A scheduler output, and what the runner submits."""
    loads.begin_step(given, events, recorder)
    loads.begin_due(recorder)


FIRST, LAST = (
    Loaded(0, (7,), 0, 0, 4, "a"),
    Loaded(0, (9,), 1, 4, 7, "a"),
)  # seven tokens, the match ends in a block


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "with its forward"])
@pytest.mark.parametrize("given", ["in this process", "to another process", "unknown"])
def test_tokens_of_a_load_come_as_the_scheduler_sends_them(
    loads: ConnectorLoads, recorder: Recorder, given: str, waits: bool
) -> None:
    """In its process they are read when the load begins; what has gone to another one is read."""
    read: list[int] = []
    packed = np.arange(20, 24, dtype=np.int32).tobytes()
    later = Later[bytes](lambda: read.append(1) or (None if given == "unknown" else packed))  # type: ignore[func-returns-value]
    event = LoadTokens("a", packed if given == "to another process" else later)
    loads.begin_step(output(new={} if waits else {"a": 4}), (event, FIRST), recorder)
    assert (recorder.tokens is None) == (waits or given == "unknown")
    assert not (waits and read), "the copy is not submitted yet"
    loads.begin_due(recorder)
    if given == "unknown":
        assert recorder.tokens is None
        assert recorder.take() == [("begun", "full", [28, 29, 30, 31])], "its bytes are awaited all the same"
    else:
        assert recorder.tokens is not None
        assert recorder.tokens.tolist() == [[20, 21, 22, 23]]


def test_blocks_that_are_written_again_arrive_with_the_step(
    loads: ConnectorLoads, recorder: Recorder
) -> None:
    tokens = np.arange(9, dtype=np.int32).tobytes()
    loads.begin_step(output(new={"a": 9}), (), recorder)
    loads.rewritten("a: rewritten", [Loaded(0, (7,), 1, SIZE, 2 * SIZE, "a")], tokens, recorder)
    loads.copies.put("full", [7], SIZE, [[(1, 2)]])
    loads.end_step(recorder)
    assert recorder.take() == [("begun", "full", [28, 29, 30, 31]), ("ended", "full", [28, 29, 30, 31])]
    assert recorder.before == [("full", [28, 29, 30, 31])]
    assert recorder.arrived is not None
    assert recorder.arrived.sent.tolist() == [[[1, 2]]]
    assert loads.loaded_from == {}, "they were in the prefix cache"


def test_whole_blocks_are_awaited(loads: ConnectorLoads, recorder: Recorder) -> None:
    act_on(loads, output(), (FIRST, LAST), recorder)
    assert recorder.take() == [("begun", "full", [28, 29, 30, 31, 36, 37, 38, 39])]
    loads.end_step(recorder)
    assert recorder.take() == []
    act_on(loads, output(), (Loaded(0, (7,), 0, 2, 3, "b"),), recorder)
    assert recorder.take() == [("begun", "full", [28, 29, 30, 31])]


@pytest.mark.parametrize("next_call", ["its runner returned", "reported", "the next output"])
def test_a_load_that_a_request_waits_for_begins_once_its_copies_were_submitted(
    loads: ConnectorLoads, recorder: Recorder, next_call: str
) -> None:
    loads.begin_step(output(new={"b": 0}), (FIRST,), recorder)
    assert recorder.take() == []
    assert recorder.before == [("full", [28, 29, 30, 31])]
    loads.copies.put("full", [7], SIZE, [[(1, 2)]])  # its records are looked up then as well
    if next_call == "its runner returned":
        loads.begin_due(recorder)
    elif next_call == "reported":
        loads.reported([], [], [], recorder)
    else:
        loads.begin_step(output(), (), recorder)
    assert recorder.take() == [("begun", "full", [28, 29, 30, 31])]
    loads.reported(["a"], [], [], recorder)
    assert recorder.take() == [("ended", "full", [28, 29, 30, 31])]
    assert recorder.arrived is not None
    assert recorder.arrived.copies.tolist() == [1], "what was said of its copies is known"


@pytest.mark.parametrize("then", ["all of it arrives", "a block fails", "another copy was sent"])
def test_what_will_have_arrived_is_said_while_the_copies_are_made(
    loads: ConnectorLoads, recorder: Recorder, then: str
) -> None:
    loads.begin_step(output(), (FIRST, LAST), recorder)
    loads.copies.put("full", [7, 9], SIZE, [[(1, 2)], [(3, 4)]])
    loads.begin_due(recorder)
    assert recorder.expected is not None
    assert recorder.expected.sent.tolist() == [[[1, 2]], [[3, 4]]]
    if then == "another copy was sent":
        loads.copies.put("full", [7], SIZE, [[(5, 6)]])
    loads.reported(["a"], [], [9] if then == "a block fails" else [], recorder)
    assert (recorder.arrived is recorder.expected) == (then == "all of it arrives")
    assert recorder.arrived is not None
    assert recorder.arrived.copies.tolist() == ([1, 0] if then == "a block fails" else [1, 1])
    first = [5, 6] if then == "another copy was sent" else [1, 2]
    assert recorder.arrived.sent[0].tolist() == [first]
    assert loads._expected == {}


@pytest.mark.parametrize(
    "case", ["known", "a block of no job", "a job of no event", "no job", "of the forward"]
)
def test_when_a_load_is_copied_is_said_if_it_is_known_of_all_of_it(
    loads: ConnectorLoads, recorder: Recorder, case: str
) -> None:
    tokens = LoadTokens("a", np.arange(7, dtype=np.int32).tobytes())
    loads.copies.ends.append(torch.Event("cpu"))  # of a load that has begun before
    loads.begin_due(recorder)
    new = {"a": 7} if case == "of the forward" else {}
    loads.begin_step(output(new=new), (tokens, FIRST, LAST), recorder)
    blocks = [7] if case == "a block of no job" else [7, 9]
    loads.copies.put("full", blocks, SIZE, [[(1, 2)]] * len(blocks))
    ends: list[torch.Event | None] = [torch.Event("cpu"), torch.Event("cpu")]
    if case == "a job of no event":
        ends[1] = None
    loads.copies.ends += [] if case == "no job" else ends
    loads.begin_due(recorder)
    assert list(recorder.copied) == (ends if case == "known" else [])
    assert loads.copies.ends == []


def test_of_a_load_of_which_nothing_is_known_nothing_is_said(
    loads: ConnectorLoads, recorder: Recorder
) -> None:
    act_on(loads, output(), (FIRST,), recorder)
    assert recorder.expected is None


@pytest.mark.parametrize("end", ["dropped", "failed"])
def test_what_was_said_of_a_load_that_never_arrived_is_forgotten(
    loads: ConnectorLoads, recorder: Recorder, end: str
) -> None:
    loads.begin_step(output(), (FIRST,), recorder)
    loads.copies.put("full", [7], SIZE, [[(1, 2)]])
    loads.begin_due(recorder)
    if end == "dropped":
        loads.begin_step(output(ended="a"), (), recorder)
    else:
        loads.reported(["a"], ["a"], [], recorder)
    assert loads._expected == {}


def test_a_load_of_the_forward_arrives_with_its_step(loads: ConnectorLoads, recorder: Recorder) -> None:
    loads.begin_step(output(new={"a": 7}), (FIRST, LAST), recorder)
    assert [hook for hook, _, _ in recorder.take()] == ["begun"]
    loads.end_step(recorder)
    assert recorder.take() == [("ended", "full", [28, 29, 30, 31, 36, 37, 38])]
    loads.end_step(recorder)
    assert recorder.take() == []


def test_what_the_forward_writes_gets_no_baseline(loads: ConnectorLoads, recorder: Recorder) -> None:
    # All seven were loaded; the last one is computed again.
    loads.begin_step(output(cached={"a": 6}), (FIRST, LAST), recorder)
    loads.end_step(recorder)
    assert recorder.take()[-1] == ("ended", "full", [28, 29, 30, 31, 36, 37])


def test_a_load_that_failed_is_computed_and_gets_no_baseline(
    loads: ConnectorLoads, recorder: Recorder
) -> None:
    act_on(loads, output(), (FIRST, LAST), recorder)
    recorder.take()
    loads.begin_step(output(new={"a": 0}), (), recorder)
    assert recorder.take() == [("ended", "full", [])]


def test_a_waiting_request_gets_no_baseline_before_it_is_scheduled(
    loads: ConnectorLoads, recorder: Recorder
) -> None:
    act_on(loads, output(), (FIRST,), recorder)
    recorder.take()
    loads.begin_step(output(new={"b": 0}), (), recorder)
    loads.end_step(recorder)
    assert recorder.take() == []
    loads.begin_step(output(new={"a": 4}), (), recorder)
    assert recorder.take() == [("ended", "full", [28, 29, 30, 31])]
    loads.begin_step(output(cached={"a": 5}), (), recorder)
    assert recorder.take() == []


def test_a_request_that_ended_is_forgotten(loads: ConnectorLoads, recorder: Recorder) -> None:
    act_on(loads, output(), (FIRST,), recorder)
    recorder.take()
    loads.begin_step(output(ended="a"), (), recorder)
    assert recorder.take() == [("dropped", "a")]
    loads.begin_step(output(new={"a": 4}), (), recorder)
    loads.reported(["a"], [], [], recorder)
    assert recorder.take() == []


def test_a_step_that_failed_reports_no_arrival(loads: ConnectorLoads, recorder: Recorder) -> None:
    loads.begin_step(output(new={"a": 4}), (FIRST,), recorder)
    recorder.take()
    loads.begin_step(output(), (), recorder)
    loads.end_step(recorder)
    assert recorder.take() == [("dropped", "a")]


def test_a_reported_load_is_judged_before_its_request_is_scheduled(
    loads: ConnectorLoads, recorder: Recorder
) -> None:
    act_on(loads, output(), (FIRST, LAST), recorder)
    recorder.take()
    loads.reported(["other"], [], [], recorder)
    assert recorder.take() == []
    loads.reported(["a"], [], [], recorder)
    assert recorder.take() == [("ended", "full", [28, 29, 30, 31, 36, 37, 38])]
    loads.reported(["a"], [], [], recorder)
    loads.begin_step(output(new={"a": 6}), (), recorder)
    assert recorder.take() == []
    assert loads.loaded_from == {"a": 0}


def test_a_load_that_is_reported_as_failed_leaves_nothing(loads: ConnectorLoads, recorder: Recorder) -> None:
    act_on(loads, output(), (FIRST, LAST), recorder)
    recorder.take()
    loads.reported(["a"], ["a"], [], recorder)
    assert recorder.take() == [("failed", "a")]
    # When it is tried again, its tokens may be in the prefix cache: they are hits, and not loaded.
    loads.begin_step(output(new={"a": 4}), (), recorder)
    assert recorder.take() == []
    assert loads.loaded_from == {}


@pytest.mark.parametrize("with_the_step", [True, False])
def test_blocks_that_could_not_be_loaded_must_be_written(
    loads: ConnectorLoads, recorder: Recorder, with_the_step: bool
) -> None:
    act_on(loads, output(new={"a": 7} if with_the_step else {}), (FIRST, LAST), recorder)
    recorder.take()
    loads.reported([] if with_the_step else ["a"], [], [9], recorder)
    loads.end_step(recorder)
    ended, invalidated = ("ended", "full", [28, 29, 30, 31]), ("invalidated", "full", [36, 37, 38, 39])
    # A step that has read them is computed again: its own checks must not accuse it.
    assert recorder.take() == ([ended] if with_the_step else [ended, invalidated])
    loads.begin_step(output(), (), recorder)
    assert recorder.take() == ([invalidated] if with_the_step else [])
    # The next load of that block is another one.
    loads.begin_step(output(new={"b": 7}), (LAST._replace(request="b"),), recorder)
    loads.end_step(recorder)
    assert recorder.take()[-1] == ("ended", "full", [36, 37, 38])


def test_blocks_are_compared_with_copies_that_nothing_else_was_written_into(
    loads: ConnectorLoads, recorder: Recorder
) -> None:
    def compared(event: Loaded, filled: int, computed: int | None) -> bool:
        loads.begin_step(output(new={} if computed is None else {"a": computed}), (event,), recorder)
        loads.copies.put("full", event.blocks, filled, [[(5, 6)]], "prefill-1@host")
        loads.reported(["a"] if computed is None else [], [], [], recorder)
        loads.end_step(recorder)
        assert recorder.arrived is not None
        assert taken(loads.copies) == {}, "taken"
        loads.begin_step(output(ended="a"), (), recorder)
        found = int(recorder.arrived.copies[0])
        assert recorder.arrived.sent[0, :found].tolist() == [[5, 6]] * found
        assert recorder.arrived.peer == "prefill-1@host"
        return found == 1

    assert compared(FIRST, 4, 4)
    assert not compared(FIRST, 4, 3)  # the forward computes the last token again
    assert compared(FIRST, 4, None)
    assert compared(LAST, 4, None)  # it travels whole, and nothing else was written
    assert not compared(LAST, 4, 7)
    assert compared(LAST, 3, 7)
    assert not compared(FIRST._replace(start=2), 4, None)  # it held tokens of its own


@pytest.mark.parametrize("end", ["dropped", "failed", "another group's"])
def test_what_is_known_of_a_load_that_never_arrived_is_forgotten(recorder: Recorder, end: str) -> None:
    """Else the next load of its blocks, of which nothing is known, would be compared with that copy."""
    loads = ConnectorLoads([group("full", 0), group("swa", 1)], torch.device("cpu"))
    loads.begin_step(output(), (FIRST,), recorder)
    loads.copies.put("full", FIRST.blocks, 4, [[(5, 6)]])
    if end == "dropped":
        loads.begin_step(output(ended="a"), (), recorder)
        loads.copies.put("full", FIRST.blocks, 4, [[(5, 6)]])  # submitted all the same
    elif end == "failed":
        loads.reported(["a"], ["a"], [], recorder)
        loads.begin_step(output(new={"a": 0}), (), recorder)
    else:
        loads.begin_step(output(new={"c": 4}), (FIRST._replace(group=1, request="c"),), recorder)
        loads.end_step(recorder)
    loads.begin_step(output(new={"b": 4}), (FIRST._replace(request="b"),), recorder)
    loads.end_step(recorder)
    assert recorder.arrived is not None
    assert recorder.arrived.copies.tolist() == [0]
    assert taken(loads.copies) == {}


def test_blocks_from_several_peers_name_none(loads: ConnectorLoads, recorder: Recorder) -> None:
    loads.begin_step(output(), (FIRST, LAST), recorder)
    loads.copies.put("full", FIRST.blocks, 4, [[(5, 6)]], "one@host")
    loads.copies.put("full", LAST.blocks, 3, [[(7, 8)]], "two@host")
    loads.reported(["a"], [], [], recorder)
    assert recorder.arrived is not None
    assert recorder.arrived.peer == ""
    assert recorder.arrived.copies.tolist() == [1, 1]


def test_blocks_are_to_hold_the_tokens_of_their_request() -> None:
    tokens, own = np.arange(10, 17, dtype=np.int32), group("full", 0)
    blocks = loaded_blocks(rows_of([FIRST, LAST], own), own, tokens.tobytes())
    assert blocks.tokens is not None
    assert blocks.positions is not None
    assert blocks.chains is not None
    assert blocks.tokens.tolist() == [[10, 11, 12, 13], [14, 15, 16, 0]]
    assert blocks.positions.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    expected = [signed(digest_of(range(10, 10 + count))) for count in range(8)]
    assert blocks.chains.flatten().tolist() == expected
    assert loaded_blocks(rows_of([FIRST], own), own, None).tokens is None


def test_blocks_that_a_window_has_left_are_not_loaded(loads: ConnectorLoads, recorder: Recorder) -> None:
    run = Loaded(0, (0, 7, 0, 9), 2, 8, 23, "a")
    rows = rows_of([run], group("full", 0))
    assert [column.tolist() for column in rows] == [[7, 9], [3, 5], [0, 0], [4, 3]]
    loads.begin_step(output(new={"a": 23}), (run,), recorder)
    assert loads.loaded_from == {"a": 12}
    loads.end_step(recorder)
    assert recorder.take()[-1] == ("ended", "full", [28, 29, 30, 31, 36, 37, 38])
    assert rows_of([run, run], group("full", 0)).blocks.tolist() == [7, 9, 7, 9]


def test_other_groups_lose_what_a_load_overwrites(recorder: Recorder) -> None:
    loads = ConnectorLoads([group("full", 0), group("swa", 1)], torch.device("cpu"))
    loads.begin_step(output(new={"a": 4}), (Loaded(1, (2,), 0, 0, 4, "a"),), recorder)
    assert recorder.take() == [("invalidated", "full", [8, 9, 10, 11]), ("begun", "swa", [8, 9, 10, 11])]
    loads.end_step(recorder)
    assert recorder.take() == [("ended", "swa", [8, 9, 10, 11])]


def test_layers_of_a_draft_have_bytes_of_their_own_in_the_same_blocks(recorder: Recorder) -> None:
    """As all that vLLM keeps in one of its groups."""
    loads = ConnectorLoads([group("full", 0), group("draft", 0), group("swa", 1)], torch.device("cpu"))
    act_on(loads, output(), (FIRST,), recorder)
    slots = [28, 29, 30, 31]
    assert recorder.take() == [
        ("invalidated", "swa", slots), ("begun", "full", slots),
        ("invalidated", "swa", slots), ("begun", "draft", slots),
    ]  # fmt: skip


def test_other_groups_lose_what_lies_in_the_same_blocks_also_with_others_of_their_own_size(
    recorder: Recorder,
) -> None:
    groups = [group("full", 0), group("wide", 1, 2 * SIZE), group("state", 2, SIZE, states=True)]
    loads = ConnectorLoads(groups, torch.device("cpu"))
    act_on(loads, output(), (Loaded(0, (7,), 0, 0, 4, "a"), Loaded(2, (0, 9), 0, 0, 8, "a")), recorder)
    assert recorder.take() == [
        ("invalidated", "wide", list(range(56, 64))), ("invalidated", "state", [7]),
        ("begun", "full", [28, 29, 30, 31]),
        ("invalidated", "full", [36, 37, 38, 39]), ("invalidated", "wide", list(range(72, 80))),
        ("begun", "state", [9]),
    ]  # fmt: skip
    assert ("state", [9]) in recorder.before


STATE = Loaded(0, (0, 9), 0, 0, 2 * SIZE, "a")


@pytest.fixture
def states() -> ConnectorLoads:
    return ConnectorLoads([group("state", 0, states=True)], torch.device("cpu"))


def test_a_state_has_arrived_when_its_load_is_reported(states: ConnectorLoads, recorder: Recorder) -> None:
    act_on(states, output(), (STATE,), recorder)
    assert recorder.take() == [("begun", "state", [9])]
    states.reported(["a"], [], [], recorder)
    assert recorder.take() == [("ended", "state", [9])]
    assert recorder.arrived is not None
    assert recorder.arrived.copies.tolist() == [0], "nothing is known of what was sent"


@pytest.mark.parametrize(("computed", "arrived"), [(2 * SIZE, [9]), (2 * SIZE - 1, [])])
def test_a_state_that_the_forward_goes_on_with_is_not_taken_for_loaded(
    states: ConnectorLoads, recorder: Recorder, computed: int, arrived: list[int]
) -> None:
    act_on(states, output(new={"a": computed}), (STATE,), recorder)
    states.end_step(recorder)
    assert recorder.take() == [("begun", "state", [9]), ("ended", "state", arrived)]


def test_a_state_that_could_not_be_loaded_must_be_written(states: ConnectorLoads, recorder: Recorder) -> None:
    act_on(states, output(), (STATE,), recorder)
    states.reported(["a"], [], [9], recorder)
    assert recorder.take() == [("begun", "state", [9]), ("ended", "state", []), ("invalidated", "state", [9])]
