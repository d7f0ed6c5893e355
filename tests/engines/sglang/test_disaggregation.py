"""What a prefill server sends along, and what a decode server compares."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_kernels.layout import RECORD_WORDS
from canary_obs.copy_records.spliced_records import SplicedRecords
from canary_obs.engines.sglang.disaggregation import _NOWHERE, TransferHooks
from canary_obs.engines.sglang.spliced_buffers import _SPLICED, _component_of, _records_for
from canary_obs.engines.sglang.transfer_order import TransferOrder
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.errors import UnsupportedEngine

TABLE = torch.arange(40, dtype=torch.int32).view(4, 10)


class Arrivals:
    """An observer with a record for each slot: its number, four times."""

    def __init__(self) -> None:
        self.arrived: list[tuple[str, list[int], bool]] = []
        self.before: list[tuple[str, list[int]]] = []  # compared before something was written over them
        self.faults: list[str] = []
        self.peers: list[str] = []
        self.requests: list[str] = []

    def records_of(self, group: str, slots: Any) -> Any:
        return slots[:, None].expand(-1, RECORD_WORDS)

    def received(
        self, group: str, slots: Any, records: Any = None, peer: str = "", request: str = ""
    ) -> None:
        self.peers.append(peer)
        self.requests.append(request)
        if records is not None:
            assert records.tolist() == [[slot] * RECORD_WORDS for slot in slots.tolist()]
        self.arrived.append((group, slots.tolist(), records is not None))

    def before_load(self, group: str, slots: Any) -> None:
        self.before.append((group, slots.tolist()))

    def invalidated(self, group: str, slots: Any) -> None:
        self.arrived.append((group, slots.tolist(), False))

    def fault(self, part: str, error: Exception) -> None:
        self.faults.append(part)


def group(own: Any = None, window: int | None = None, page: int = 1, ratio: int = 1) -> Any:
    view, allocator = SimpleNamespace(window=window), SimpleNamespace(page_size=page)
    return SimpleNamespace(own_slots=own, ratio=ratio, view=view, allocator=allocator, by_row=None)


def states() -> Any:
    """A group of states, whose allocator has no pages."""
    view = SimpleNamespace(window=None, num_slots=12)
    by_row = torch.zeros(4, dtype=torch.int32)
    return SimpleNamespace(own_slots=None, ratio=1, view=view, allocator=SimpleNamespace(), by_row=by_row)


def request(first: int = 0, length: int = 6, host: str = "127.0.0.1", state: int | None = None) -> Any:
    held = None if state is None else torch.tensor(state)
    return SimpleNamespace(
        kv=SimpleNamespace(holds_kv=True, req_pool_idx=2, cache_protected_len=first, mamba_pool_idx=held),
        origin_input_ids=[1] * length,
        extend_end=length, bootstrap_host=host, bootstrap_port=8998, rid="asked",
    )  # fmt: skip


def server(role: str, spliced: dict[str, SplicedRecords], sent: list[Any]) -> Any:
    pool = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=TABLE))
    queue = SimpleNamespace(_commit_transfer_to_req=lambda given: sent.append(given))
    before = SimpleNamespace(
        _pre_alloc=lambda *given: given[-1], _send_kv_metadata=lambda *given, **_: sent.append(given[-1])
    )
    return SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=pool), server_args=SimpleNamespace(disaggregation_mode=role),
        send_kv_chunk=lambda req, last_chunk=False: sent.append(req), disagg_decode_transfer_queue=queue,
        disagg_decode_prealloc_queue=before,
        **({_SPLICED: spliced} if spliced else {}),
    )  # fmt: skip


def hooks(role: str, spliced: dict[str, SplicedRecords], groups: dict[str, Any]) -> tuple[Any, Any, Any]:
    observer, sent = Arrivals(), list[Any]()
    scheduler = server(role, spliced, sent)
    made = TransferHooks(scheduler, groups, observer, TransferOrder())  # type: ignore[arg-type]
    made.wrap(MethodPatches())
    return scheduler, observer, made


def records() -> SplicedRecords:
    return SplicedRecords(40, 1, torch.device("cpu"))


def test_records_leave_with_the_kv_and_are_compared_when_it_is_there() -> None:
    spliced = {"full": records()}
    prefill, _, _ = hooks("prefill", spliced, {"full": group()})
    prefill.send_kv_chunk(request(), last_chunk=True)
    decode, observer, made = hooks("decode", spliced, {"full": group()})
    decode.disagg_decode_transfer_queue._commit_transfer_to_req(SimpleNamespace(req=request(first=2)))
    assert observer.arrived == [("full", [22, 23, 24, 25], True)]
    assert observer.peers == ["127.0.0.1:8998"]
    assert observer.requests == ["asked"]
    assert (made.compared, made.without) == (4, 0)
    # What came for the two that were cached here is not kept for the next request in their slots.
    assert not spliced["full"].take(torch.arange(40))[1].any()


def test_records_are_filled_with_the_last_chunk() -> None:
    """What the chunks before it leave with goes without them: all of them go with the last one."""
    spliced = {"full": records()}
    prefill, _, _ = hooks("prefill", spliced, {"full": group()})
    for last in (False, True):
        prefill.send_kv_chunk(request(), last)
        assert spliced["full"].take(torch.arange(20, 26))[1].tolist() == [last] * 6


def test_no_record_goes_with_bytes_of_another_computation() -> None:
    """SGLang sends a chunk, and then its tree has the same tokens of another request, computed apart."""
    spliced = {"full": records()}
    prefill, observer, _ = hooks("prefill", spliced, {"full": group()})
    asked = request()
    asked.start_send_idx = 4
    prefill.send_kv_chunk(asked)
    table, same = TABLE[2].clone(), request()
    try:
        TABLE[2, 2:4] = torch.tensor([30, 31])
        prefill.send_kv_chunk(asked, last_chunk=True)
        assert spliced["full"].take(torch.tensor([20, 21, 30, 31, 24, 25]))[1].tolist() == [1, 1, 0, 0, 1, 1]
        # Its records may not have left when another request is sent these slots.
        prefill.send_kv_chunk(same, last_chunk=True)
        assert spliced["full"].take(torch.tensor([20, 30, 31]))[1].tolist() == [1, 0, 0]
        observer.records_of = lambda _, slots: slots[:, None].expand(-1, RECORD_WORDS) + 100
        prefill.send_kv_chunk(same, last_chunk=True)
        assert spliced["full"].take(torch.tensor([20, 30, 31]))[1].all(), "they hold something else by now"
    finally:
        TABLE[2] = table


def test_the_record_of_another_computation_with_the_same_bytes_is_as_good() -> None:
    spliced = {"full": records()}
    prefill, observer, _ = hooks("prefill", spliced, {"full": group()})
    observer.records_of = lambda _, slots: (slots % 10)[:, None].expand(-1, RECORD_WORDS) + 1
    asked = request()
    asked.start_send_idx = 4
    prefill.send_kv_chunk(asked)
    table = TABLE[2].clone()
    try:
        TABLE[2, 2:4] = torch.tensor([32, 34])  # the first with the bytes of the slot that was sent, 22
        prefill.send_kv_chunk(asked, last_chunk=True)
        assert spliced["full"].take(torch.tensor([20, 21, 32, 34, 24]))[1].tolist() == [1, 1, 1, 0, 1]
    finally:
        TABLE[2] = table


def test_of_runs_of_tokens_those_that_are_whole_were_sent() -> None:
    spliced = {"full": records(), "c4": records()}
    groups = {"full": group(page=4), "c4": group(page=4, ratio=4)}
    prefill, _, _ = hooks("prefill", spliced, groups)
    prefill.send_kv_chunk(request(length=9), last_chunk=True)
    decode, observer, _ = hooks("decode", spliced, groups)
    decode.disagg_decode_transfer_queue._commit_transfer_to_req(
        SimpleNamespace(req=request(first=4, length=9))
    )
    assert observer.arrived == [("full", [24, 25, 26, 27, 28], True), ("c4", [6], True)]


def test_only_the_window_was_sent() -> None:
    own = torch.zeros(40, dtype=torch.int64)
    own[20:26] = torch.arange(1, 7)
    spliced = {"full": records(), "swa": records()}
    groups = {"full": group(), "swa": group(own, window=4)}
    prefill, _, _ = hooks("prefill", spliced, groups)
    prefill.send_kv_chunk(request(), last_chunk=True)
    decode, observer, _ = hooks("decode", spliced, groups)
    decode.disagg_decode_transfer_queue._commit_transfer_to_req(SimpleNamespace(req=request()))
    assert observer.arrived == [
        ("full", [20, 21, 22, 23, 24, 25], True), ("swa", [1, 2, 3], False), ("swa", [4, 5, 6], True),
    ]  # fmt: skip


def test_the_page_in_which_a_window_begins_was_sent_whole() -> None:
    """A decode server with a prefix cache may hand its first tokens to another request."""
    own = torch.arange(40) - 19
    spliced = {"swa": SplicedRecords(40, 4, torch.device("cpu"))}
    groups = {"swa": group(own, window=4, page=4)}
    prefill, _, _ = hooks("prefill", spliced, groups)
    prefill.send_kv_chunk(request(length=9), last_chunk=True)
    decode, observer, _ = hooks("decode", spliced, groups)
    decode.disagg_decode_transfer_queue._commit_transfer_to_req(SimpleNamespace(req=request(length=9)))
    assert observer.arrived == [("swa", [1, 2, 3, 4], False), ("swa", [5, 6, 7, 8, 9], True)]


@pytest.mark.parametrize(("host", "spliced"), [(_NOWHERE, True), ("127.0.0.1", False)])
def test_what_comes_without_records_gets_a_baseline(host: str, spliced: bool) -> None:
    sent = {"full": records()} if spliced else {}
    if spliced:
        sent["full"].fill(torch.arange(40), torch.ones((40, RECORD_WORDS), dtype=torch.int64))  # old ones
    decode, observer, made = hooks("decode", sent, {"full": group()})
    decode.disagg_decode_transfer_queue._commit_transfer_to_req(SimpleNamespace(req=request(host=host)))
    assert observer.arrived == [("full", [20, 21, 22, 23, 24, 25], False)]
    assert observer.peers == ["" if host == _NOWHERE else f"{host}:8998"]
    assert (made.compared, made.without) == (0, 6)


def test_nothing_is_known_of_the_pages_that_are_to_arrive() -> None:
    """They come whole: what lay after the prompt's end is overwritten as well."""
    own = torch.zeros(40, dtype=torch.int64)
    own[8:16] = torch.arange(16, 24)
    groups = {"full": group(page=8), "swa": group(own, window=4, page=8), "c4": group(page=8, ratio=4)}
    decode, observer, _ = hooks("decode", {}, groups)
    slots = torch.arange(8, 19)
    assert decode.disagg_decode_prealloc_queue._pre_alloc(None, slots) is slots
    assert observer.arrived == [
        ("full", list(range(8, 24)), False), ("swa", list(range(16, 24)), False), ("c4", [2, 3, 4, 5], False),
    ]  # fmt: skip
    assert observer.before == [arrived[:2] for arrived in observer.arrived]


def test_records_of_what_is_cached_here_replace_nobodys() -> None:
    """Of tokens that HiCache has yet to load the request table names slots that were another request's."""
    spliced = {"full": records(), "swa": records()}
    groups = {"full": group(page=2), "swa": group(window=4, page=2)}
    decode, observer, _ = hooks("decode", spliced, groups)
    sent = list[Any]()
    table, window = torch.tensor([3, 4, 5]).numpy(), torch.tensor([6, 7]).numpy()
    queue = decode.disagg_decode_prealloc_queue
    for cached in (4, 0):
        given = [None, table, window]
        queue._send_kv_metadata(None, None, 2, given, decode_prefix_len=cached)
        sent.append([pages if pages is None else pages.tolist() for pages in given])
    assert sent == [[None, [0, 0, 5], [6, 7]], [None, [3, 4, 5], [6, 7]]]
    assert table.tolist() == [3, 4, 5], "SGLang's own"
    assert observer.faults == []


def test_a_request_has_one_state_which_goes_along_whole() -> None:
    """Also where the first tokens are cached here: then SGLang sends it all the same."""
    spliced = {"full": records(), "state": _records_for(states())}
    groups = {"full": group(), "state": states()}
    prefill, _, _ = hooks("prefill", spliced, groups)
    prefill.send_kv_chunk(request(state=7), last_chunk=True)
    decode, observer, made = hooks("decode", spliced, groups)
    allocating, queue = decode.disagg_decode_prealloc_queue, decode.disagg_decode_transfer_queue
    allocating._pre_alloc(request(state=7), torch.tensor([22, 23]))
    assert observer.before == [("full", [22, 23]), ("state", [7])]
    assert observer.arrived == [("full", [22, 23], False), ("state", [7], False)]
    pages = [torch.tensor([2, 3]).numpy(), torch.tensor([7]).numpy()]
    allocating._send_kv_metadata(None, None, 1, pages, decode_prefix_len=1)
    assert [each.tolist() for each in pages] == [[0, 3], [7]]
    observer.arrived.clear()
    queue._commit_transfer_to_req(SimpleNamespace(req=request(first=2, state=7)))
    assert observer.arrived == [("full", [22, 23, 24, 25], True), ("state", [7], True)]
    assert (made.compared, made.without) == (5, 0)
    queue._commit_transfer_to_req(SimpleNamespace(req=request(state=7)))
    assert observer.arrived[-1] == ("state", [7], False), "what came is used once"
    prefill.send_kv_chunk(request(state=7), last_chunk=True)
    queue._commit_transfer_to_req(SimpleNamespace(req=request(host=_NOWHERE, state=7)))
    assert observer.arrived[-1] == ("state", [7], False), "nothing was sent"
    before = len(observer.arrived)
    queue._commit_transfer_to_req(SimpleNamespace(req=request(length=0)))
    assert len(observer.arrived) == before, "it has none"
    assert observer.faults == []


def test_records_go_with_the_component_that_this_sglang_has() -> None:
    """0.5.16 has DSA and SWA where 0.5.23 has BLOCK_SCALE and BLOCK_SCALE_SWA as well."""
    windows = group(window=4)
    newer = {name: name for name in ("MAMBA", "SWA", "DSA", "BLOCK_SCALE", "BLOCK_SCALE_SWA")}
    older = {name: name for name in ("MAMBA", "SWA", "DSA")}
    assert [_component_of(each, newer) for each in (group(), windows)] == ["BLOCK_SCALE", "BLOCK_SCALE_SWA"]
    assert [_component_of(each, older) for each in (group(), windows)] == ["DSA", "SWA"]
    windows.view.name = "swa"
    with pytest.raises(
        UnsupportedEngine, match="MAMBA as state, and records of group swa go with BLOCK_SCALE_SWA or SWA"
    ):
        _component_of(windows, {"MAMBA": 1})


def test_a_request_that_is_computed_anew_has_its_answer_sent_too() -> None:
    """Those it had before it was taken back; the token that comes along has no KV yet."""
    decode, observer, _ = hooks("decode", {}, {"full": group()})
    again = request(length=4)
    again.output_ids, again.pd_rebootstrap_in_progress = [7, 8], True
    queue = decode.disagg_decode_transfer_queue
    queue._commit_transfer_to_req(SimpleNamespace(req=again))
    again.output_ids, again.pd_rebootstrap_in_progress = [7, 8], False
    queue._commit_transfer_to_req(SimpleNamespace(req=again))
    assert observer.arrived == [("full", list(range(20, 26)), False), ("full", list(range(20, 24)), False)]


def test_records_of_runs_of_tokens_have_smaller_pages() -> None:
    """As many pages as the group's KV: SGLang sends both by the same page numbers."""
    runs = group(page=8, ratio=4)
    runs.view.num_slots, runs.allocator.device = 10, torch.device("cpu")
    sizes = {buffer.bytes // buffer.page_bytes for buffer in _records_for(runs).buffers}
    assert sizes == {5}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_request_without_kv_is_a_fault(role: str) -> None:
    """Nothing is said of the slots of others."""
    spliced = {"full": records()}
    found, observer, made = hooks(role, spliced, {"full": group()})
    asked = request()
    asked.kv.holds_kv = False
    if role == "prefill":
        found.send_kv_chunk(asked, last_chunk=True)
    else:
        found.disagg_decode_transfer_queue._commit_transfer_to_req(SimpleNamespace(req=asked))
    assert observer.faults == ["transfer"]
    assert observer.arrived == []
    assert (made.compared, made.without) == (0, 0)


def test_a_fault_of_the_canary_does_not_reach_the_engine() -> None:
    decode, observer, _ = hooks("decode", {}, {"full": group()})
    decode.disagg_decode_transfer_queue._commit_transfer_to_req(SimpleNamespace(req=None))
    assert observer.faults == ["transfer"]
