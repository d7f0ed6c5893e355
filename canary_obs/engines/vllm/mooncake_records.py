"""Records that go from prefill to decode workers with Mooncake's transfers, by their `transfer_id`.

Mooncake returns nothing to the router. The prefill worker's answer, by which it reports a transfer as made,
has room for more: a decode worker that does not know of it skips it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from canary_obs.copy_records.sent_records import GroupShare, Seals, SentRecords
from canary_obs.engine_api.observer import Observer
from canary_obs.engines.toolkit.guarded import guarded
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.groups import VllmGroup
from canary_obs.engines.vllm.received_blocks import BlockFoldsOnHost, TransferRecords
from canary_obs.engines.vllm.sent_blocks import PARAMETER, SENT_ATTRIBUTE, Expected, Sent, each_metadata

_MOST = 1 << 14  # transfers; bounds the memory for those that are never made
_METADATA = "MooncakeConnectorMetadata"
_NEEDED = "send_kv_to_decode", "_xfer_resp_decoder", "reqs_need_send"  # of its worker


class _Answer(msgspec.Struct):
    """What is read of a prefill worker's answer: sealed records by the decode engine's name of a request."""

    kv_canary: dict[str, str] = {}


class _Sending(NamedTuple):
    """A prompt that will be sent: its folds by group, and its blocks by group number once it has ended."""

    request: str  # the prefill engine's name
    tokens: int
    folds: dict[str, BlockFoldsOnHost]
    blocks: Mapping[int, Sequence[int]]


class _Pull(NamedTuple):
    """What a decode worker has asked for."""

    engine: str
    transfer: str
    host: str
    blocks: tuple[list[int], ...]  # by group number


class MooncakeRecords:
    """Follows one MooncakeConnector of a worker, in either role."""

    def __init__(
        self,
        groups: Sequence[VllmGroup],
        transfers: TransferRecords,
        observer: Observer,
        seals: Seals,
        instance: str,
    ) -> None:
        self._groups = groups
        self._transfers, self._observer, self._seals, self._instance = transfers, observer, seals, instance
        self._engine, self._numbers, self._ranks = "", tuple[int, ...](), 1
        self._waiting: Collection[str] = ()  # transfers that the worker is still to send
        self._sent: Sequence[Sent] = ()
        self._sending: dict[str, _Sending] = {}  # by transfer
        self._pulls: dict[str, _Pull] = {}  # by request
        self._came: dict[str, list[str]] = {}  # by request: of each prefill worker

    def wrap(self, patches: MethodPatches, connector: Any) -> bool:
        """Add records to what this connector's worker answers, and read those that come.

        False = not with this version of it: what is received is unverified.
        """
        worker, numbers = connector.connector_worker, getattr(connector, "_kv_cache_config", None)
        self._ranks = getattr(worker, "tp_size", 1)
        numbers = getattr(numbers, "transfer_group_ids", None)
        if numbers is None or not all(hasattr(worker, name) for name in _NEEDED):
            return False
        self._engine, self._numbers = str(connector.engine_id), tuple(numbers)
        self._waiting = worker.reqs_need_send
        patches.wrap(worker, "send_kv_to_decode", self._around_send)
        patches.set(worker, "_xfer_resp_decoder", _Reader(worker._xfer_resp_decoder, self._keep))
        return True

    # The prefill worker ----------------------------------------------------------------------------

    def follow(self, output: Any) -> None:
        """What a scheduler output says is sent and received from now on."""
        self._sent = [each for each in getattr(output, SENT_ATTRIBUTE, ()) if each.transfer]
        for request in output.finished_req_ids:
            self._pulls.pop(request, None)
            self._came.pop(request, None)
        for metadata in each_metadata(output.kv_connector_metadata):
            if type(metadata).__name__ == _METADATA:
                for transfer, blocks in metadata.reqs_to_send.values():
                    if blocks and transfer in self._sending:
                        ended = self._by_number(blocks)
                        self._sending[transfer] = self._sending[transfer]._replace(blocks=ended)
                for transfer in metadata.reqs_not_processed:
                    self._sending.pop(transfer, None)
                for pulls in metadata.reqs_to_recv.values():
                    for request, pull in pulls.items():
                        self._follow_pull(request, pull)

    def end_forward(self) -> None:
        """The records of what the forward has written are complete: take the folds of what is sent."""
        sent, self._sent = self._sent, ()
        try:
            for each in sent:
                folds = {group.view.name: self._transfers.folds(group, each) for group in self._groups}
                found = {name: fold for name, fold in folds.items() if fold is not None}
                self._sending[each.transfer] = _Sending(each.request, each.tokens, found, {})
                while len(self._sending) > _MOST:
                    del self._sending[next(iter(self._sending))]
        except Exception as error:  # noqa: BLE001 - what is sent is unverified at the receiver
            self._observer.fault("announce", error)

    def _by_number(self, blocks: Sequence[Sequence[int]]) -> dict[int, list[int]]:
        return {number: list(own) for number, own in zip(self._numbers, blocks, strict=True)}

    def _around_send(self, original: Callable[..., Any]) -> Callable[..., Any]:
        async def send_kv_to_decode(identity: bytes, sock: Any, meta: Any, *args: Any, **kwargs: Any) -> Any:
            transfers = {request: transfer for request, (transfer, _) in meta.req_blocks.items()}
            guarded(self._observer, "announce", self._note_readers, meta)
            return await original(identity, _Socket(sock, self, transfers), meta, *args, **kwargs)

        return send_kv_to_decode

    def _note_readers(self, meta: Any) -> None:
        self._transfers.readers.note(getattr(meta, "remote_tp_size", 1) // self._ranks)

    def answer(self, data: bytes, transfers: Mapping[str, str]) -> bytes:
        """An answer with the records of the requests whose transfer it reports as made."""
        try:
            said = msgspec.msgpack.decode(data)
            sealed = {}
            for request in said.get("ok_reqs") or ():
                sending = self._sending.get(transfers[request])
                if sending is not None and sending.blocks:
                    sealed[request] = self._seals.seal(self._records(transfers[request], sending))
            return msgspec.msgpack.encode(said | {PARAMETER: sealed}) if sealed else data
        except Exception as error:  # noqa: BLE001 - what is sent is unverified at the receiver
            self._observer.fault("announce", error)
            return data

    def _records(self, transfer: str, sending: _Sending) -> SentRecords:
        shares = defaultdict[int, dict[str, GroupShare]](dict)  # by place
        for group in self._groups:
            folds, blocks = sending.folds.get(group.view.name), sending.blocks.get(group.number)
            if folds is None or not blocks:
                continue
            for place, (own, found) in enumerate(self._transfers.shares(group, folds)):
                of_blocks = [found.get(block) for block in blocks]
                shares[place][group.view.name] = msgspec.structs.replace(own, folds=of_blocks)
        return SentRecords(self._engine, transfer, sending.tokens, list(shares.values()), self._instance)

    def left(self, requests: Collection[str]) -> None:
        """These prompts were sent, or nobody came in time; records of what can still be sent stay."""
        ended = [name for name, each in self._sending.items() if each.request in requests]
        for transfer in ended:
            if transfer not in self._waiting:
                del self._sending[transfer]

    # The decode worker -----------------------------------------------------------------------------

    def _follow_pull(self, request: str, pull: Any) -> None:
        if any(pull.local_block_ids):
            blocks = self._by_number(pull.local_block_ids)
            ordered = tuple(blocks.get(number, []) for number in range(max(blocks) + 1))
            host = urlsplit(pull.remote_bootstrap_addr).hostname or ""
            self._pulls[request] = _Pull(pull.remote_engine_id, pull.transfer_id, host, ordered)

    def _keep(self, came: Mapping[str, str]) -> None:
        """On the connector's thread, before it reports these requests as received."""
        for request, text in came.items():
            self._came.setdefault(request, []).append(text)
        while len(self._came) > _MOST:
            del self._came[next(iter(self._came))]

    def arrived(self, finished: Iterable[str], failed: Collection[str]) -> None:
        """The receives of these requests are complete; blocks of those that did not fail can be compared."""
        for request in finished:
            pull, came = self._pulls.pop(request, None), self._came.pop(request, [])
            if pull is not None and request not in failed:
                opened = [self._seals.open(text, pull.host, pull.engine, pull.transfer) for text in came]
                records = _joined([each for each in opened if each is not None])
                peer = f"{records.instance}@{pull.host}" if records and records.instance else pull.host
                self._transfers.expect(Expected(request, pull.blocks, peer, records))


class _Socket:
    """A worker's socket, for one decode worker's request."""

    def __init__(self, sock: Any, records: MooncakeRecords, transfers: Mapping[str, str]) -> None:
        self._sock, self._records, self._transfers = sock, records, transfers

    async def send_multipart(self, parts: Sequence[bytes]) -> Any:
        """With records in the last part."""
        *first, data = parts
        return await self._sock.send_multipart((*first, self._records.answer(data, self._transfers)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class _Reader:
    """Decodes a prefill worker's answers as before, and passes on the records in them."""

    def __init__(self, original: Any, keep: Callable[[Mapping[str, str]], None]) -> None:
        self._original, self._keep = original, keep
        self._decoder = msgspec.msgpack.Decoder(_Answer)

    def decode(self, data: bytes) -> Any:
        """What Mooncake's own decoder makes of it."""
        answer = self._original.decode(data)
        with suppress(msgspec.DecodeError):  # of another version: what comes is unverified
            self._keep(self._decoder.decode(data).kv_canary)
        return answer


def _joined(records: Sequence[SentRecords]) -> SentRecords | None:
    """Of all workers of a prefill engine; None = nothing was said."""
    if not records:
        return None
    shares = [share for each in records for share in each.shares]
    return msgspec.structs.replace(records[0], shares=shares)
