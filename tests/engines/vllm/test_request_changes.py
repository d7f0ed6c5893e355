"""What a worker shows of scheduler outputs: who begins, ends and gets blocks; nothing where nobody does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.engine_api.requests import ChangedRequests
from canary_obs.engines.vllm.adapter import VllmAdapter
from canary_obs.engines.vllm.follows_requests import FollowsRequests
from canary_obs.engines.vllm.request_changes import RequestChanges


class Shown(list[ChangedRequests]):
    step = 7
    follows_readers = False

    def __init__(self) -> None:
        super().__init__()
        self.overhead = {"adapter": 0.0}

    def requests_changed(self, shown: ChangedRequests) -> None:
        self.append(shown)


def group(number: int = 0, size: int = 4, *, states: bool = False) -> Any:
    view = SimpleNamespace(name=f"g{number}")
    return SimpleNamespace(states=states, number=number, block_slots=size, block_size=size, view=view)


def output(*new: Any, cached: Any = (), finished: Any = (), preempted: Any = (), **more: Any) -> Any:
    """`cached`: name, new blocks or None, computed, whether it resumed; `emitted`: by name, so far."""
    names = [name for name, *_ in cached]
    emitted = more.pop("emitted", {})
    scheduled = dict.fromkeys([*(one.req_id for one in new), *names], 1) | more.pop("scheduled", {})
    return SimpleNamespace(
        scheduled_new_reqs=list(new), finished_req_ids=set(finished), preempted_req_ids=set(preempted),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=names, new_block_ids=[blocks for _, blocks, _, _ in cached],
            num_computed_tokens=[computed for _, _, computed, _ in cached],
            num_output_tokens=[emitted.get(name, 0) for name in names],
            resumed_req_ids={name for name, _, _, resumed in cached if resumed},
        ),
        num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens=more.pop("drafts", {}), kv_cache_block_copies=more.pop("copies", None),
    )  # fmt: skip


def new(name: str, *blocks: list[int], computed: int = 0, prompt: int = 6, **more: Any) -> Any:
    return SimpleNamespace(
        req_id=name, block_ids=blocks, num_computed_tokens=computed, prompt_token_ids=[5] * prompt,
        **({"prefill_token_ids": None} | more),
    )  # fmt: skip


@pytest.fixture
def changes() -> RequestChanges:
    return RequestChanges([group()], rewrites=False)


def test_a_step_that_changes_nothing_shows_nothing(changes: RequestChanges) -> None:
    shown = Shown()
    changes.report(output(new("a", [1, 2], computed=4), scheduled={"a": 2}), {}, shown)
    changes.report(output(cached=[("a", None, 6, False)]), {}, shown)
    changes.report(output(cached=[("a", ([3],), 8, False)]), {}, shown)
    (begun, grown) = shown
    (change,) = begun.changed
    assert (change.begins, change.prompt, change.computed) == (True, 6, 4)
    added = change.added["0"]
    assert (added.blocks.tolist(), added.first, added.joined) == ([1, 2], 0, 1)
    assert list(zip(*grown.grown["0"], strict=True)) == [("a", 3, 2, 8)]
    assert not grown.changed


def test_what_is_deferred_is_shown_once_with_the_forward_before_it(changes: RequestChanges) -> None:
    shown = Shown()
    changes.defer(output(new("a", [1, 2], computed=4), scheduled={"a": 2}), {"a": 2}, shown)
    assert not shown
    shown.step = 8  # its forward has begun
    changes.settle()
    changes.settle()
    (begun,) = shown
    assert (begun.step, [change.request for change in begun.changed]) == (7, ["a"])
    assert begun.changed[0].added["0"].joined == 1, "half of what it begins with is loaded"
    changes.report(output(cached=[("a", ([3],), 8, False)]), {}, shown)
    assert shown[1].step is None


class Follower(FollowsRequests):
    def __init__(self, requests: RequestChanges, *, inputs_persist: bool = True) -> None:
        self.requests, self.inputs_persist = requests, inputs_persist
        self.cached_blocks: Any = SimpleNamespace(due=False)
        self._forwards: Any = SimpleNamespace(number=0)
        loads = SimpleNamespace(landing=(), failed=())
        self._block_changes: Any = SimpleNamespace(written=(), loads=loads)

    def _follow(self, output: Any, observer: Any) -> None:
        self._show_changes(output, {}, observer)


Follower.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


LATE = 8  # outputs whose changes are shown together


def served(follower: Follower, shown: Shown, outputs: Any) -> None:
    """Steps with a forward each, whose hooks are called in order."""
    for step, each in enumerate(outputs, shown.step):
        shown.step = step
        follower.follow_output(each, shown)
        shown.step = step + 1  # the forward begins
        VllmAdapter.end_step(follower, shown)  # type: ignore[arg-type]


@pytest.mark.parametrize("by", ["enough of them", "a finding", "an output without a forward"])
def test_changes_are_shown_together_and_in_order_with_the_forwards_before_them(
    changes: RequestChanges, by: str
) -> None:
    follower, shown = Follower(changes), Shown()  # type: ignore[abstract]
    begun = [output(new("a", [1])), output(new("b", [2], [3], computed=4))]
    ends = output(finished=["a"], cached=[("b", None, 5, False)], scheduled={"b": 1})
    steady = output(cached=[("b", None, 6, False)])
    served(follower, shown, [*begun, ends])
    assert not shown
    follower.requests.went_on(steady)
    if by == "enough of them":
        served(follower, shown, [output(new(f"c{number}", [9])) for number in range(LATE - 3)])
    elif by == "a finding":
        follower.show_requests()
    else:
        follower.follow_output(output(preempted=["b"], scheduled={}), shown)
    names = [[change.request for change in one.changed] for one in shown]
    assert [one.step for one in shown[:3]] == [7, 8, 9]
    assert names[:3] == [["a"], ["b"], []]
    assert shown[2].ended == {"a": None}, "it was not in the forward before"
    assert len(shown) == {"enough of them": LATE, "a finding": 3, "an output without a forward": 4}[by]
    shown.clear()
    follower.show_requests()
    assert not shown


def test_who_reads_damage_is_shown_in_the_same_step(changes: RequestChanges) -> None:
    follower, shown = Follower(changes), Shown()  # type: ignore[abstract]
    served(follower, shown, [output(new("a", [1]))])
    shown.follows_readers = True
    served(follower, shown, [output(new("b", [2]))])
    assert [one.step for one in shown] == [7, 8]


def test_what_one_had_when_it_began_is_shown_though_its_list_has_grown(changes: RequestChanges) -> None:
    """V1's runner goes on with the lists of the output."""
    follower, shown = Follower(changes), Shown()  # type: ignore[abstract]
    begun, back = new("a", [1]), ([5, 6],)
    served(follower, shown, [output(begun), output(cached=[("a", back, 8, True)])])
    begun.block_ids[0].append(2)
    back[0].append(7)
    follower.show_requests()
    held = [one.changed[0].added["0"].blocks.tolist() for one in shown]
    assert held == [[1], [5, 6]]


@pytest.mark.parametrize("scheduled", [4, 9])
def test_what_one_had_emitted_is_shown_though_it_has_emitted_more(
    changes: RequestChanges, scheduled: int
) -> None:
    """V2 is sent the scheduler's own list of a request that comes back, in the same process."""
    follower, shown = Follower(changes), Shown()  # type: ignore[abstract]
    tokens = [5] * 9  # three of them emitted
    back = new("a", [7], prefill_token_ids=tokens)
    outputs = [output(new("a", [1], prefill_token_ids=[5] * 6)), output(preempted=["a"], scheduled={"b": 1})]
    outputs += [output(back, scheduled={"a": scheduled}), output(preempted=["a"], scheduled={"b": 1})]
    served(follower, shown, outputs)
    tokens += [8] * 5
    follower.show_requests()
    assert [one.changed[0].emitted for one in shown if one.changed] == [None, 3]
    assert shown[-1].ended == {"a": 3 if scheduled == 4 else 4}


@pytest.mark.parametrize("fails", [False, True])
def test_what_waits_is_shown_before_the_last_findings_are_read(
    changes: RequestChanges, *, fails: bool
) -> None:
    """After the adapter was detached. What fails then is a fault, and the engine is restored."""
    follower, shown, done = Follower(changes), Shown(), list[str]()  # type: ignore[abstract]
    served(follower, shown, [output(new("a", [1]))])
    shown.fault = lambda part, error: done.append(f"{part}: {error}")  # type: ignore[attr-defined]
    if fails:
        changes.settle = lambda: {}["planted"]  # type: ignore[method-assign]
    own: Any = follower
    own._hooks = SimpleNamespace(last_output=None, observer=shown, stop=lambda: done.append("stopped"))
    own._patches = SimpleNamespace(restore=lambda: done.append("restored"))
    own.connector = SimpleNamespace(close=lambda: None)
    own._side_stream = SimpleNamespace(join=lambda: None)
    VllmAdapter.detach(own)
    VllmAdapter.detach(own)
    assert [one.step for one in shown] == ([] if fails else [7])
    assert done == ["stopped", *(["announce: 'planted'"] if fails else []), "restored", "restored"]


@pytest.mark.parametrize("why", ["the inputs change", "no forward"])
def test_changes_that_something_else_precedes_are_shown_at_once(changes: RequestChanges, why: str) -> None:
    follower = Follower(changes, inputs_persist=why != "the inputs change")  # type: ignore[abstract]
    shown = Shown()
    follower.follow_output(output(new("a", [1])), shown)
    VllmAdapter.end_step(follower, shown)  # type: ignore[arg-type]
    follower.show_requests()
    shown.clear()
    scheduled = {} if why == "no forward" else {"b": 1}
    follower.follow_output(output(finished=["a"], scheduled=scheduled), shown)
    assert [one.step for one in shown] == [None]


def test_an_output_that_gives_blocks_alone_adds_to_the_lists_at_once(changes: RequestChanges) -> None:
    changes.lists = lists = {"a": ([1],), "b": ([2],)}
    for blocks in (([3],), None, ([4, 5],)):
        changes.grow(output(cached=[("a", blocks, 8, False), ("b", ([7],), 8, False)]))
    assert lists == {"a": ([1, 3, 4, 5],), "b": ([2, 7, 7, 7],)}


def test_a_block_more_of_each_is_shown_in_columns(changes: RequestChanges) -> None:
    shown = Shown()
    changes.report(output(new("a", [1]), new("b", [2]), computed=4), {}, shown)
    for blocks in (([3],), None, ([4, 5],), ([6],)):
        changes.report(output(cached=[("a", blocks, 8, False), ("b", ([7],), 8, False)]), {}, shown)
    assert repr(shown).count("GrownBlocks") == 4
    assert changes.emitted("a") is not None


@pytest.mark.parametrize(("ahead", "computed"), [(False, 10), (True, 7)])
def test_drafts_whose_results_are_not_known_yet_are_not_computed(ahead: bool, computed: int) -> None:
    changes, shown = RequestChanges([group()], rewrites=True, ahead=ahead), Shown()
    changes.report(output(new("a", [1, 2]), scheduled={"a": 6}), {}, shown)
    drafted = {"drafts": {"a": [-1] * 3}, "scheduled": {"a": 4}}
    changes.report(output(cached=[("a", None, 6, False)], **drafted), {}, shown)
    changes.report(output(cached=[("a", ([3],), 10, False)], **drafted), {}, shown)
    assert list(zip(*shown[-1].grown["0"], strict=True)) == [("a", 3, 2, computed)]
    changes.report(output(cached=[("a", ([4, 5],), 10, False)], **drafted), {}, shown)
    assert [one.computed for one in shown[-1].changed] == [computed]


def test_who_ends_and_comes_back(changes: RequestChanges) -> None:
    shown = Shown()
    changes.report(output(new("a", [1, 2]), scheduled={"a": 6}), {}, shown)
    changes.report(output(cached=[("a", None, 6, False)]), {}, shown)
    assert changes.emitted("a") == 2
    changes.report(output(preempted=["a"]), {}, shown)
    assert shown[-1].ended == {"a": 2}
    changes.report(output(cached=[("a", ([1, 7],), 4, True)]), {}, shown)
    (change,) = shown[-1].changed
    assert (change.begins, change.prompt, change.added["0"].joined) == (True, 6, 1)
    changes.report(output(cached=[("a", ([8, 9],), 8, False)]), {}, shown)
    (change,) = shown[-1].changed
    assert (change.begins, change.added["0"].first) == (False, 2)
    changes.report(output(finished=["a"]), {}, shown)
    assert shown[-1].ended == {"a": 4}
    assert changes.emitted("a") is None


def test_one_that_comes_back_has_emitted_what_it_computes_again(changes: RequestChanges) -> None:
    shown = Shown()
    changes.report(output(new("a", [1, 2]), scheduled={"a": 6}), {}, shown)
    changes.report(output(preempted=["a"]), {}, shown)
    changes.report(output(cached=[("a", ([7],), 0, True)], scheduled={"a": 4}, emitted={"a": 3}), {}, shown)
    assert [change.emitted for one in shown for change in one.changed] == [None, 3]
    assert changes.emitted("a") == 3
    changes.report(
        output(cached=[("a", ([8, 9],), 4, False)], scheduled={"a": 5}, emitted={"a": 3}), {}, shown
    )
    assert shown[-1].changed[0].emitted is None
    assert changes.emitted("a") == 4


def test_v2_is_sent_one_that_comes_back_as_if_it_were_new(changes: RequestChanges) -> None:
    shown = Shown()
    changes.report(output(new("a", [1, 2], prefill_token_ids=[5] * 6), scheduled={"a": 6}), {}, shown)
    changes.report(output(preempted=["a"]), {}, shown)
    changes.report(output(new("a", [7], prefill_token_ids=[5] * 9), scheduled={"a": 4}), {}, shown)
    assert [change.emitted for one in shown for change in one.changed] == [None, 3]
    assert changes.emitted("a") == 3


def test_blocks_that_a_connector_fills_are_not_joined(changes: RequestChanges) -> None:
    shown = Shown()
    changes.report(output(new("a", [1, 2, 3], computed=12)), {"a": 4}, shown)
    assert shown[0].changed[0].added["0"].joined == 1


def test_null_blocks_are_left_out_and_states_are_written_over_in_place() -> None:
    changes, shown = RequestChanges([group(), group(1, states=True)], rewrites=True), Shown()
    changes.report(output(new("a", [0, 0, 5], [9], computed=12)), {}, shown)
    assert shown[0].rewrites
    state = shown[0].changed[0].added["1"]
    assert (state.blocks.tolist(), state.first, state.joined) == ([9], 0, 1)
    added = shown[0].changed[0].added["0"]
    assert (added.blocks.tolist(), added.first, added.joined) == ([5], 2, 1)
    assert {name: table.rewritten for name, table in changes.tables.items()} == {"g0": False, "g1": True}


def test_the_copy_of_a_block_has_read_the_original(changes: RequestChanges) -> None:
    shown = Shown()
    changes.report(output(new("a", [1, 2], computed=6), copies=[(7, 2)]), {}, shown)
    own, original = shown[0].changed
    assert own.added["0"].blocks.tolist() == [1, 2]
    read = original.added["0"]
    assert (original.begins, read.blocks.tolist(), read.joined) == (False, [7], 1)


def test_drafted_tokens_count_as_refused(changes: RequestChanges) -> None:
    shown = Shown()
    changes.report(output(new("a", [1, 2]), scheduled={"a": 6}), {}, shown)
    step = output(cached=[("a", None, 6, False)], scheduled={"a": 3}, drafts={"a": [1, 2]})
    changes.report(step, {}, shown)
    assert changes.emitted("a") == 2
