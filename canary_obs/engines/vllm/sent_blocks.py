"""Records that go from prefill to decode engines with NIXL's transfers; in the scheduler's process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from canary_obs.config import CanaryConfig, load
from canary_obs.copy_records.record_files import read_key
from canary_obs.copy_records.sent_records import GroupShare, Seals, SentRecords
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.scheduler_reports import log_fault

PARAMETER = "kv_canary"  # of kv_transfer_params; routers and both servers pass it on
SENT_ATTRIBUTE = "kv_canary_sent"  # of SchedulerOutput: prompts that end in its step, and will be sent
EXPECTED_ATTRIBUTE = "kv_canary_expected"  # of SchedulerOutput: what is about to be received
_KNOWN = "_kv_canary_sent_records"  # of Scheduler: by request, of each share by group, with the blocks
_SEALS = "_kv_canary_seals"
_MOST = 1 << 14  # requests; bounds the memory for those that are never finished


class Sent(NamedTuple):
    """A request's blocks, by vLLM's group number, and the tokens in them."""

    request: str
    blocks: tuple[list[int], ...]
    tokens: int
    transfer: str = ""  # what names it at both engines, with Mooncake


class Expected(NamedTuple):
    """What a request will receive: the local blocks by vLLM's group number, from whom, and its records."""

    request: str
    blocks: tuple[list[int], ...]
    peer: str
    records: SentRecords | None  # None = none came, or they are not believed


class RankShare(NamedTuple):
    """What a rank has found of its heads, or a share of them, of one request's group: its folds by block."""

    share: GroupShare  # without folds
    number: int
    folds: dict[int, tuple[int, int] | None]


Found = dict[str, dict[str, RankShare]]  # by request and group, of one share of a rank's heads


class WorkerRecords:
    """Stands for a connector's worker metadata, which is in it, on the way to the scheduler.

    The folds are taken after it was made, and awaited when it is sent or read: the forward has ended by then.
    """

    def __init__(self, inner: Any, shares: list[Found]) -> None:
        self.inner = inner
        self.pending: Callable[[], list[Found]] | None = None
        self._shares = shares

    @property
    def shares(self) -> list[Found]:
        """Of each rank, or of each share of its heads."""
        pending, self.pending = self.pending, None
        if pending is not None:
            self._shares += pending()
        return self._shares

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerRecords, (self.inner, self.shares)

    def aggregate(self, other: Any) -> WorkerRecords:
        """Of two ranks."""
        theirs, shares = (other.inner, other.shares) if isinstance(other, WorkerRecords) else (other, [])
        inner = self.inner.aggregate(theirs) if self.inner and theirs else self.inner or theirs
        return WorkerRecords(inner, self.shares + shares)


def send_blocks(scheduler: Any, output: Any, metadata: Any) -> None:
    """Let the workers know whose blocks will be sent, and what those to receive should hold."""
    sent = []
    for name, count in output.num_scheduled_tokens.items():
        request = scheduler.requests[name]
        params = request.kv_transfer_params or {}
        computed = request.num_computed_tokens
        if params.get("do_remote_decode") and computed < request.num_prompt_tokens <= computed + count:
            blocks = scheduler.kv_cache_manager.get_block_ids(name)
            transfer = str(params.get("transfer_id") or "")
            sent.append(Sent(name, tuple(map(list, blocks)), int(request.num_prompt_tokens), transfer))
    if sent:
        setattr(output, SENT_ATTRIBUTE, tuple(sent))
    expected = tuple(_expected(scheduler, metadata))
    if expected:
        setattr(output, EXPECTED_ATTRIBUTE, expected)


def _expected(scheduler: Any, metadata: Any) -> list[Expected]:
    found = []
    receives = [each for own in each_metadata(metadata) for each in getattr(own, "reqs_to_recv", {}).items()]
    for name, received in receives:
        request, remote = scheduler.requests.get(name), getattr(received, "remote", None)
        if request is None or remote is None or not any(received.local_block_ids):
            continue
        text, records = (request.kv_transfer_params or {}).get(PARAMETER), None
        if text is not None:
            records = _seals(scheduler).open(text, remote.host, remote.engine_id, remote.request_id)
        peer = f"{records.instance}@{remote.host}" if records and records.instance else remote.host
        found.append(Expected(name, tuple(map(list, received.local_block_ids)), peer, records))
    return found


def instrument_sends(patches: MethodPatches, scheduler: Any) -> None:
    """Follow what a scheduler's connector sends and receives; versions without a method send no records."""
    wraps = (
        (scheduler, "update_from_output", _around_update),
        (scheduler, "_connector_finished", _around_finished),
        (scheduler.connector, "build_connector_meta", _around_metadata),
    )
    for owner, name, make in wraps:
        if hasattr(owner, name):
            patches.wrap(owner, name, partial(make, scheduler))


def _around_metadata(scheduler: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Of the connector's `build_connector_meta`, which is given the output before its tokens are counted."""

    def build_connector_meta(output: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = original(output, *args, **kwargs)
        try:
            send_blocks(scheduler, output, metadata)
        except Exception as error:  # noqa: BLE001 - what is sent or received is unverified
            log_fault(scheduler, "send_blocks", error)
        return metadata

    return build_connector_meta


def _around_update(scheduler: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Of `update_from_output`, which ends requests before it asks the connector."""

    def update_from_output(scheduled: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        given = getattr(output, "kv_connector_output", None)
        records = getattr(given, "kv_connector_worker_meta", None)
        if given is not None and isinstance(records, WorkerRecords):
            given.kv_connector_worker_meta = records.inner
            try:
                _keep(scheduler, records.shares)
            except Exception as error:  # noqa: BLE001 - what is sent is unverified at the receiver
                log_fault(scheduler, "sent_records", error)
        return original(scheduled, output, *args, **kwargs)

    return update_from_output


def _keep(scheduler: Any, shares: Iterable[Found]) -> None:
    known, of_step = vars(scheduler).setdefault(_KNOWN, {}), dict[str, list[dict[str, RankShare]]]()
    for share in shares:
        for request, groups in share.items():
            of_step.setdefault(request, []).append(groups)
    known.update(of_step)  # a request that was preempted has other blocks now
    while len(known) > _MOST:
        del known[next(iter(known))]


def _around_finished(scheduler: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Of `_connector_finished`: what it returns goes to the decode engine."""

    def _connector_finished(request: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(request, *args, **kwargs)
        try:
            shares = vars(scheduler).get(_KNOWN, {}).pop(request.request_id, None)
            params = result[1]
            if shares and params and params.get("do_remote_prefill") and params.get("remote_block_ids"):
                params[PARAMETER] = _seals(scheduler).seal(_records(shares, request, params))
        except Exception as error:  # noqa: BLE001 - what is sent is unverified at the receiver
            log_fault(scheduler, "sent_records", error)
        return result

    return _connector_finished


def _records(found: list[dict[str, RankShare]], request: Any, params: dict[str, Any]) -> SentRecords:
    blocks = params["remote_block_ids"]
    shares = [
        {
            name: GroupShare(
                own.share.format,
                own.share.block_size,
                own.share.sources,
                [own.folds.get(block) for block in blocks[own.number]],
            )
            for name, own in groups.items()
        }
        for groups in found
    ]
    named = params["remote_engine_id"], params["remote_request_id"], int(request.num_prompt_tokens)
    return SentRecords(*named, shares, load(CanaryConfig).instance)


def _seals(scheduler: Any) -> Seals:
    seals = vars(scheduler).get(_SEALS)
    if seals is None:
        seals = Seals(read_key(load(CanaryConfig).copy_records_key_file))
        setattr(scheduler, _SEALS, seals)
    assert isinstance(seals, Seals)
    return seals


def each_metadata(metadata: Any) -> Iterator[Any]:
    """A connector's metadata of a step, and of the connectors that it is made of, in their order."""
    children = getattr(metadata, "metadata", None)
    if isinstance(children, tuple):  # a MultiConnector's
        for child in children:
            yield from each_metadata(child)
    elif metadata is not None:
        yield metadata
