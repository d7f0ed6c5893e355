"""Prefill and decode schedulers of SGLang, whose KV goes over NIXL: one side of them, as a program.

    python -m tests.engines.sglang.real.separated prefill|decode PLANS

PLANS is JSON: a list of `Plan`, each of a pair of its own, one after another. Both sides are given the same
requests. The results are written as JSON: `Outcome`.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.vocabulary import Part
from tests.engines.sglang.real import deepseek_v4, host_memory, index_keys, stand_ins, streams
from tests.engines.sglang.real.planted import flip_bit
from tests.engines.sglang.real.rig import Rig
from tests.engines.sglang.real.traffic import prompts

_SECONDS = 240.0
# Of DeepSeek-V4: SGLang sends the states of each request, and has room for more than run.
_STATES = {"num_req_slots": 32, "c4_state_pool_size": 256, "c128_state_pool_size": 32 * 128}
_ROOM = 1000


class Plan(msgspec.Struct, kw_only=True):
    """What both processes are to do with one pair."""

    model: str  # a folder
    port: int
    folder: str  # where the outcome is written
    settings: dict[str, Any] = {}
    pools: str = ""  # "compressed": those of DeepSeek-V4; "keys": those of DeepSeek-V3.2
    retracting: bool = False  # the decode server takes requests back, and copies them to the host
    tokens: int = 8  # of each answer; more = more requests are decoded together, and one can be taken back
    damaged: list[str]  # groups of which a slot is damaged before it is sent, after sound requests


class Found(msgspec.Struct, kw_only=True, frozen=True):
    """One violation."""

    group: str
    reason: str
    phase: str
    part: str | None
    slot: int
    position: int | None
    peer: str | None
    request: str | None


class Outcome(msgspec.Struct, kw_only=True):
    """What one of them says: after the sound requests, and at its end."""

    answers: dict[str, list[int]]
    sound: list[Found]
    sound_state: list[str]  # and its reasons
    violations: list[Found]  # of what was damaged before it was sent
    taken_back_damaged: list[Found]  # of what was damaged in the host's memory
    state: list[str]
    compared: int
    without: int
    damaged: dict[str, tuple[str, int]]  # by group, its request and the position in its prompt
    taken_back: int  # slots that came back from the host with a record
    taken_back_without: int
    copy_damaged: list[tuple[str, int]]  # a group's slot that came back from the host damaged
    port: int


def prompts_of() -> dict[str, list[int]]:
    """Of the sound requests: beginnings alike, some longer than a chunk of a prefill."""
    return prompts(6, longest=200)


def main(role: str, plans: list[Plan]) -> None:
    """Run one role of each pair until its requests are done."""
    _nixl_on_cpu()
    _start_bootstraps(role)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    host_memory.install()
    for plan in plans:
        _pair(role, plan)


def _pair(role: str, plan: Plan) -> None:
    patches = MethodPatches()
    if plan.pools == "compressed":
        deepseek_v4.add_pools(patches.set, **_STATES)
    elif plan.pools == "keys":
        index_keys.add_index_keys(patches.set)
    rig = Rig(
        Path(plan.model), disaggregation_mode=role, disaggregation_transfer_backend="nixl",
        disaggregation_bootstrap_port=plan.port, host="127.0.0.1", disable_radix_cache=role == "decode",
        hicache_io_backend="direct", hicache_mem_layout="layer_first", **plan.settings,
    )  # fmt: skip
    (Path(plan.folder) / f"{role}.up").touch()
    _retract(plan.retracting)
    _run(rig, role, plan, prompts_of())
    sound, sound_state = _found(rig), _state(rig)
    _retract(False)
    damaged: dict[str, tuple[str, int]] = {}
    if role == "prefill":
        _damage_before_sending(rig, list(plan.damaged), damaged)
    _run(rig, role, plan, prompts(len(plan.damaged) + 2, seed=1, longest=200))
    sent = len(_found(rig))
    copy_damaged: list[tuple[str, int]] = []
    if plan.retracting:
        _retract(True)
        if role == "decode":
            _damage_copy(rig, copy_damaged)
        _run(rig, role, plan, prompts(6, seed=2, longest=200))
    transfer, retracted = rig.adapter.transfer, rig.adapter.retracted
    assert transfer is not None
    assert retracted is not None
    outcome = Outcome(
        answers=rig.answers, sound=sound, sound_state=sound_state, violations=_found(rig)[:sent],
        taken_back_damaged=_found(rig)[sent:], state=_state(rig), port=plan.port, damaged=damaged,
        compared=transfer.compared, without=transfer.without, taken_back=retracted.compared,
        taken_back_without=retracted.without, copy_damaged=copy_damaged,
    )  # fmt: skip
    (Path(plan.folder) / f"{role}.json").write_bytes(msgspec.json.encode(outcome))
    rig.close()
    patches.restore()


def _retract(retracting: bool) -> None:
    """SGLang's own switch, which it reads when it starts: every third batch gives requests back."""
    from sglang.srt.managers import scheduler

    scheduler.TEST_RETRACT = retracting


def _damage_copy(rig: Rig, damaged: list[tuple[str, int]]) -> None:
    """A bit of a copy in host memory flips before it comes back."""
    allocator = rig.runner.token_to_kv_pool_allocator
    load = allocator.load_cpu_copy

    def load_cpu_copy(copy: Any, indices: Any, *more: Any, **named: Any) -> Any:
        if not damaged:
            copy[1][0].view(torch.uint8)[4] ^= 1
            damaged.append(("full", int(indices[4])))
        return load(copy, indices, *more, **named)

    allocator.load_cpu_copy = load_cpu_copy


def _found(rig: Rig) -> list[Found]:
    return [
        Found(
            group=item.group, reason=item.reason.value, phase=item.phase.value, slot=item.slot,
            part=None if item.part is None else item.part.value, position=item.position, peer=item.peer,
            request=item.request,
        )
        for item in rig.settle()
    ]  # fmt: skip


def _state(rig: Rig) -> list[str]:
    state, reasons = rig.canary.verdict()
    return [state.value, *reasons]


def _run(rig: Rig, role: str, plan: Plan, asked: dict[str, list[int]]) -> None:
    """The requests one after another, until both sides are done with them."""
    rig.run(_script(rig, role, plan, asked))


def _script(rig: Rig, role: str, plan: Plan, asked: dict[str, list[int]]) -> Iterator[Iterable[Any]]:
    folder, deadline = Path(plan.folder), time.monotonic() + _SECONDS
    room = _ROOM + len(rig.finished)
    requests = [
        rig.request(
            name, prompt, plan.tokens, bootstrap_host="127.0.0.1", bootstrap_port=plan.port,
            bootstrap_room=room + number,
        )
        for number, (name, prompt) in enumerate(asked.items())
    ]  # fmt: skip
    while not (folder / "prefill.up").exists():  # it serves the addresses
        assert time.monotonic() < deadline
        yield ()
    for request in requests:
        yield [request]
    names = set(asked)
    while not names <= rig.finished:
        assert time.monotonic() < deadline, sorted(names - rig.finished)
        yield ()
    last = requests[-1].rid
    (folder / f"{role}.{last}").touch()
    other = folder / f"{'decode' if role == 'prefill' else 'prefill'}.{last}"
    while not other.exists():  # the other side still reads what this one keeps
        assert time.monotonic() < deadline
        yield ()
    yield from [()] * 3


def _damage_before_sending(rig: Rig, groups: list[str], damaged: dict[str, tuple[str, int]]) -> None:
    """A bit of a slot that is sent flips, after the canary has fingerprinted it."""
    send = rig.scheduler.send_kv_chunk

    def send_kv_chunk(req: Any, *more: Any, **named: Any) -> Any:
        if groups and named.get("last_chunk", more[0] if more else False):
            group = rig.adapter._by_name[groups[-1]]
            place = (len(req.origin_input_ids) - 3) // group.ratio
            if group.ratio > 1:
                place -= 1  # the last one of a whole run
            if place >= 0:
                damaged[groups.pop()] = str(req.rid), place
                slot = int(rig.table[req.kv.req_pool_idx, place * group.ratio]) // group.ratio
                own = group.own_slots
                _flip_bit(
                    rig.runner.token_to_kv_pool, group.view.name, slot if own is None else int(own[slot])
                )
        return send(req, *more, **named)

    rig.scheduler.send_kv_chunk = send_kv_chunk


def _flip_bit(pool: Any, name: str, slot: int) -> None:
    if name.endswith("indexer"):
        keys = getattr(pool, "c4_indexer_kv_pool", pool)
        pages, size = keys.index_k_with_scale_buffer[0], int(keys.page_size)
        pages.view(torch.uint8)[slot // size, slot % size * index_keys.SIZE + 7] ^= 8
    elif hasattr(pool, "c4_kv_pool"):
        rows = getattr(pool, f"{name}_kv_pool")
        pages, size = rows.kv_buffer[1], int(rows.page_size)
        pages.view(torch.uint8)[slot // size, slot % size * 576 + 7] ^= 8
    else:
        flip_bit(getattr(pool, f"{name}_kv_pool", pool), Part.K, 1, slot)


def _nixl_on_cpu() -> None:
    """SGLang registers KV as VRAM: on a CPU it is DRAM."""
    import nixl._api as api

    agents = [kind for kind in vars(api).values() if isinstance(kind, type)]
    (agent,) = (kind for kind in agents if hasattr(kind, "register_memory"))
    for name, method in list(vars(agent).items()):
        if callable(method) and not name.startswith("__"):
            setattr(agent, name, _in_dram(method))


def _in_dram(method: Any) -> Any:
    def called(self: Any, *given: Any, **named: Any) -> Any:
        given = tuple(_dram(value) for value in given)
        return method(self, *given, **{name: _dram(value) for name, value in named.items()})

    return called


def _dram(value: Any) -> Any:
    return "DRAM" if isinstance(value, str) and value == "VRAM" else value


def _start_bootstraps(role: str) -> None:
    """In a server the HTTP process starts it: where the two sides find each other."""
    from sglang.srt.managers.scheduler import Scheduler

    if role != "prefill":
        return
    kind: Any = Scheduler
    original = kind.init_disaggregation

    def init_disaggregation(self: Any) -> Any:
        from sglang.srt.managers.disagg_service import start_disagg_service

        self.bootstrap_service = start_disagg_service()
        port = self.server_args.disaggregation_bootstrap_port
        deadline = time.monotonic() + _SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return original(self)
            except OSError:
                assert time.monotonic() < deadline, "SGLang's bootstrap server does not listen"

    kind.init_disaggregation = init_disaggregation


if __name__ == "__main__":
    os.environ.update(
        HF_HUB_OFFLINE="1", KV_CANARY_MODE="log", KV_CANARY_ENDPOINT="inproc", UCX_TLS="tcp,self,sm",
        TRITON_INTERPRET="1", TORCHDYNAMO_DISABLE="1",  # for the pools' kernels; before Triton is imported
        KV_CANARY_TRANSFER_RECORDS=os.environ.get("KV_CANARY_TRANSFER_RECORDS", "true"),
    )  # fmt: skip
    streams.install()
    stand_ins.install()
    code = 1
    try:
        main(sys.argv[1], msgspec.json.decode(Path(sys.argv[2]).read_bytes(), type=list[Plan]))
        code = 0
    except BaseException:  # noqa: BLE001 - printed; the process ends with it below
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # SGLang's threads of a transfer never end, and Python would wait for them
