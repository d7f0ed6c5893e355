"""Prefill and decode schedulers of SGLang on different servers: one side of them, as a program.

    python -m tests.engines.sglang.real.separated prefill|decode PLANS

PLANS is JSON: a list of `Plan`, each of a pair of its own, one after another. Both sides are given the same
requests. The results are written as JSON: an `Outcome` of each rank.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from canary_obs.engines.sglang import adapter
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.toolkit.service_process import free_port
from tests.engines.sglang.real import (
    deepseek_v4,
    drafting,
    host_memory,
    index_keys,
    stand_ins,
    streams,
    tiers,
    transfer_backends,
)
from tests.engines.sglang.real.rig import Rig
from tests.engines.sglang.real.separated_faults import (
    count_restored_drafts,
    damage_before_sending,
    damage_copy,
    decode_together,
)
from tests.engines.sglang.real.separated_plans import Found, Outcome, Plan
from tests.engines.sglang.real.traffic import prompts
from tests.engines.vllm.real.server import wait_until

_SECONDS, _BETWEEN_POLLS = 900.0, 0.001
# Of DeepSeek-V4: SGLang sends the states of each request, and has room for more than run.
_STATES = {"num_req_slots": 32, "c4_state_pool_size": 256, "c128_state_pool_size": 32 * 128}
_ROOM = 1000


def prompts_of() -> dict[str, list[int]]:
    """Of the sound requests: beginnings alike, some longer than a chunk of a prefill."""
    return prompts(6, longest=200)


def main(role: str, plans: list[Plan]) -> None:
    """Run one role of each pair until its requests are done."""
    transfer_backends.install(role)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    host_memory.install()
    if any(plan.settings.get("speculative_algorithm") for plan in plans):
        drafting.install()
    # Several ranks before this process has threads; both sides in the same order.
    for plan in sorted(plans, key=lambda plan: -plan.ranks):
        if plan.ranks == 1:
            _Side(role, plan, 0).run()
            continue
        port, ranks = free_port(), range(plan.ranks_of(role))
        children = [_forked(role, plan, rank, port) for rank in ranks]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert codes == [0] * len(ranks)


def _forked(role: str, plan: Plan, rank: int, port: int) -> int:
    """The process of one rank, which ends when it has written what it found. They meet at the port."""
    child, ranks = os.fork(), plan.ranks_of(role)
    if not child:
        cores = os.cpu_count() or 1
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(each % cores) for each in range(ranks))
        _exit_after(lambda: _Side(role, plan, rank, tp_size=ranks, nccl_port=port).run())
    return child


class _Side:
    """One rank of one side of a pair."""

    def __init__(self, role: str, plan: Plan, rank: int, **settings: Any) -> None:
        self._role, self._plan, self._rank = role, plan, rank
        self._folder, self._deadline = Path(plan.folder), time.monotonic() + _SECONDS
        self._patches, self._prompts = MethodPatches(), 0
        if plan.pools == "compressed":
            deepseek_v4.add_pools(self._patches.set, **_STATES)
        elif plan.pools == "keys":
            index_keys.add_index_keys(self._patches.set)
        if plan.gpus_hooks:
            streams.install()
            self._patches.set(adapter, "concurrent", lambda device: True)
        os.environ["KV_CANARY_ENDPOINT"] = plan.endpoint
        os.environ["KV_CANARY_INSTANCE"] = role
        own: dict[str, Any] = {"disable_radix_cache": role == "decode" and not plan.own_tree}
        if role == "prefill" and plan.host_tier:
            own |= tiers.TIER | {"max_total_tokens": 400, "hicache_ratio": 10.0}
        if role == "decode":
            own["disaggregation_decode_enable_radix_cache"] = plan.own_tree
        self._port = self._agreed_port()
        self._rig = Rig(
            Path(plan.model), rank, disaggregation_mode=role, host="127.0.0.1",
            disaggregation_transfer_backend=plan.backend, disaggregation_bootstrap_port=self._port,
            **(tiers.COPIED_BY_INDEX | plan.settings | settings | own),
        )  # fmt: skip
        if rank == 0:
            (self._folder / f"{role}.up").touch()

    def run(self) -> None:
        """All requests; what was found is written."""
        plan, rig = self._plan, self._rig
        _retract(plan.retracting)
        self._ask(prompts_of())
        if plan.host_tier:
            self._push_out(5)
        if plan.own_tree or plan.host_tier:
            self._ask({f"{name} again": prompt for name, prompt in prompts_of().items()})
        sound, sound_state = _found(rig), self._state()
        _retract(False)
        damaged: dict[str, tuple[str, int]] = {}
        if self._role == "prefill" and self._rank == plan.damaged_rank:
            damage_before_sending(rig, list(plan.damaged), damaged)
        self._ask(prompts(len(plan.damaged) + 2, seed=1, longest=200))
        sent = len(_found(rig))
        copy_damaged: list[tuple[str, int]] = []
        _retract(plan.retracting or plan.retracting_last)
        if plan.retracting and self._role == "decode":
            damage_copy(rig, copy_damaged)
        drafts_restored = [0, 0]
        if plan.retracting_last and self._role == "decode":
            count_restored_drafts(rig, drafts_restored)
            decode_together(rig)
        if plan.host_tier:
            self._push_out(7)
            if self._role == "prefill":
                tiers.flip_in_host(rig, plan.damaged[-1])
            self._ask({f"{name} last": prompt for name, prompt in prompts_of().items()})
        for asked in plan.last:
            self._ask(asked)
        transfer, retracted = rig.adapter.transfer, rig.adapter.retracted
        assert transfer is not None
        assert retracted is not None
        copies = [retracted, *([] if rig.adapter.host_tier is None else [rig.adapter.host_tier])]
        outcome = Outcome(
            answers=rig.answers, sound=sound, sound_state=sound_state, violations=_found(rig)[:sent],
            last=_found(rig)[sent:], state=self._state(), port=self._port, damaged=damaged,
            compared=transfer.compared, without=transfer.without,
            taken_back=sum(each.compared for each in copies),
            taken_back_without=sum(each.without for each in copies), copy_damaged=copy_damaged,
            prompts=self._prompts, drafts_restored=drafts_restored, hits=rig.adapter.prefix_hits(),
        )  # fmt: skip
        plan.outcome(self._role, self._rank).write_bytes(msgspec.json.encode(outcome))
        rig.close()
        transfer_backends.end(rig.scheduler)
        self._patches.restore()

    def _push_out(self, seed: int) -> None:
        """Other requests take the slots of the prefill server's device."""
        for number in (seed, seed + 1):
            self._ask(prompts(3, seed=number, longest=200))

    def _agreed_port(self) -> int:
        """Of the addresses' server; chosen late, as any other process may take it."""
        file = self._folder / "port"
        if self._role == "prefill" and self._rank == 0:
            chosen = file.with_suffix(".chosen")
            chosen.write_text(str(free_port()), "utf-8")
            chosen.rename(file)
        wait_until(file.exists, _SECONDS)
        return int(file.read_text("utf-8"))

    def _state(self) -> list[str]:
        state, reasons = self._rig.canary.verdict()
        return [state.value, *reasons]

    def _ask(self, asked: dict[str, list[int]]) -> None:
        """The requests one after another, until both sides are done with them."""
        self._prompts += sum(len(prompt) for prompt in asked.values())
        # SGLang's first rank gives the others its requests, and the one that ends the loop.
        self._rig.run(self._script(asked) if self._rank == 0 else itertools.repeat(()))

    def _script(self, asked: dict[str, list[int]]) -> Iterator[Iterable[Any]]:
        from sglang.srt.managers.io_struct import ShutdownReq

        plan, rig, role = self._plan, self._rig, self._role
        room = _ROOM + len(rig.finished)
        requests = [
            rig.request(
                name, prompt, plan.tokens, bootstrap_host="127.0.0.1", bootstrap_port=self._port,
                bootstrap_room=room + number,
            )
            for number, (name, prompt) in enumerate(asked.items())
        ]  # fmt: skip
        while not (self._folder / "prefill.up").exists():  # it serves the addresses
            yield self._waiting()
        for request in requests:
            yield [request]
        names = set(asked)
        while not names <= rig.finished:
            yield self._waiting(names - rig.finished)
        last = requests[-1].rid
        (self._folder / f"{role}.{last}").touch()
        other = self._folder / f"{'decode' if role == 'prefill' else 'prefill'}.{last}"
        while not other.exists():  # the other side still reads what this one keeps
            yield self._waiting()
        yield from [()] * 3
        yield [ShutdownReq()]

    def _waiting(self, unfinished: Iterable[str] = ()) -> tuple[()]:
        """A turn without new requests. SGLang polls: the other side wants the cores, too."""
        assert time.monotonic() < self._deadline, sorted(unfinished)
        time.sleep(_BETWEEN_POLLS)
        return ()


def _retract(retracting: bool) -> None:
    """SGLang's own switch, which it reads when it starts: every third batch gives requests back."""
    from sglang.srt.managers import scheduler

    scheduler.TEST_RETRACT = retracting


def _found(rig: Rig) -> list[Found]:
    return [
        Found(
            group=item.group, reason=item.reason.value, phase=item.phase.value, slot=item.slot,
            part=None if item.part is None else item.part.value, position=item.position, peer=item.peer,
            request=item.request,
        )
        for item in rig.settle()
    ]  # fmt: skip


def _exit_after(run: Callable[[], None]) -> None:
    """Run it, and end this process: SGLang's threads of a transfer never end, and Python would wait."""
    code = 1
    try:
        run()
        code = 0
    except BaseException:  # noqa: BLE001 - printed; the process ends with it below
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    os.environ.update(
        HF_HUB_OFFLINE="1", KV_CANARY_MODE="log", UCX_TLS="tcp,self,sm", MOONCAKE_PROTOCOL="tcp",
        TRITON_INTERPRET="1", TORCHDYNAMO_DISABLE="1",  # for the pools' kernels; before Triton is imported
        # A loaded machine: what SGLang takes for the other server's end would end requests.
        SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE="10000", SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT="3600",
        SGLANG_DISAGGREGATION_WAITING_TIMEOUT="3600", SGLANG_DISAGGREGATION_ENGINE_INIT_TIMEOUT="3600",
        KV_CANARY_TRANSFER_RECORDS=os.environ.get("KV_CANARY_TRANSFER_RECORDS", "true"),
    )  # fmt: skip
    streams.install()
    stand_ins.install()
    given = msgspec.json.decode(Path(sys.argv[2]).read_bytes(), type=list[Plan])
    _exit_after(lambda: main(sys.argv[1], given))
