"""A prefill and a decode scheduler of SGLang, whose KV goes over NIXL: one of them, as a program.

    python -m tests.engines.sglang.real.separated prefill|decode PLAN

PLAN is JSON: `Plan`. Both are given the same requests. The result is written as JSON: `Outcome`.
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

from canary_obs.vocabulary import Part
from tests.engines.sglang.real import host_memory, stand_ins, streams
from tests.engines.sglang.real.planted import flip_bit
from tests.engines.sglang.real.rig import Rig
from tests.engines.sglang.real.traffic import prompts

TOKENS = 8
_SECONDS = 240.0
_ROOM = 1000


class Plan(msgspec.Struct, kw_only=True):
    """What both processes are to do."""

    model: str  # a folder
    port: int
    folder: str  # where outcomes are written
    settings: dict[str, Any] = {}
    damaged: list[str] = []  # groups of which a slot is damaged before it is sent, after sound requests
    requests: int = 6


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
    violations: list[Found]  # all of them
    state: list[str]
    compared: int
    without: int
    damaged: dict[str, tuple[str, int]]  # by group, its request and the position in its prompt


def prompts_of(plan: Plan) -> dict[str, list[int]]:
    """Of the sound requests: beginnings alike, some longer than a chunk of a prefill."""
    return prompts(plan.requests, longest=200)


def main(role: str, plan: Plan) -> None:
    """Run one role until its requests are done."""
    _nixl_on_cpu()
    if role == "prefill":
        _start_bootstrap(plan.port)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    host_memory.install()
    rig = Rig(
        Path(plan.model), disaggregation_mode=role, disaggregation_transfer_backend="nixl",
        disaggregation_bootstrap_port=plan.port, host="127.0.0.1", disable_radix_cache=role == "decode",
        hicache_io_backend="direct", hicache_mem_layout="layer_first", **plan.settings,
    )  # fmt: skip
    (Path(plan.folder) / f"{role}.up").touch()
    _run(rig, role, plan, prompts_of(plan))
    sound, sound_state = _found(rig), _state(rig)
    damaged: dict[str, tuple[str, int]] = {}
    if plan.damaged:
        if role == "prefill":
            _damage_before_sending(rig, list(plan.damaged), damaged)
        _run(rig, role, plan, prompts(len(plan.damaged), seed=1, longest=200))
    transfer = rig.adapter.transfer
    assert transfer is not None
    outcome = Outcome(
        answers=rig.answers, sound=sound, sound_state=sound_state, violations=_found(rig), state=_state(rig),
        compared=transfer.compared, without=transfer.without, damaged=damaged,
    )  # fmt: skip
    (Path(plan.folder) / f"{role}.json").write_bytes(msgspec.json.encode(outcome))


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
            name, prompt, TOKENS, bootstrap_host="127.0.0.1", bootstrap_port=plan.port,
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
    pool = rig.runner.token_to_kv_pool

    def send_kv_chunk(req: Any, *more: Any, **named: Any) -> Any:
        if groups and named.get("last_chunk", more[0] if more else False):
            name = groups.pop()
            place = len(req.origin_input_ids) - 3
            slot = int(rig.table[req.kv.req_pool_idx, place])
            own = rig.adapter._by_name[name].own_slots
            part = pool if not hasattr(pool, "full_kv_pool") else getattr(pool, f"{name}_kv_pool")
            damaged[name] = str(req.rid), place
            flip_bit(part, Part.K, 1, slot if own is None else int(own[slot]))
        return send(req, *more, **named)

    rig.scheduler.send_kv_chunk = send_kv_chunk


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


def _start_bootstrap(port: int) -> None:
    """In a server the HTTP process starts it: where the two sides find each other."""
    from sglang.srt.managers.scheduler import Scheduler

    kind: Any = Scheduler
    original = kind.init_disaggregation

    def init_disaggregation(self: Any) -> Any:
        from sglang.srt.managers.disagg_service import start_disagg_service

        self.bootstrap_service = start_disagg_service()
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
        KV_CANARY_TRANSFER_RECORDS=os.environ.get("KV_CANARY_TRANSFER_RECORDS", "true"),
    )  # fmt: skip
    streams.install()
    stand_ins.install()
    code = 1
    try:
        main(sys.argv[1], msgspec.json.decode(Path(sys.argv[2]).read_bytes(), type=Plan))
        code = 0
    except BaseException:  # noqa: BLE001 - printed; the process ends with it below
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # SGLang's threads of a transfer never end, and Python would wait for them
