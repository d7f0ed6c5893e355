"""What the ranks of a disaggregated engine do in tests: serve under a canary, and tell what it saw."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from canary_obs.attach import install_canary
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.errors import KVCacheViolation
from canary_obs.records import Snapshot, Violation
from canary_obs.reference_engine.cache.connector import FULL_SLOTS, WINDOW_SLOTS, entry_slots
from canary_obs.reference_engine.disaggregated.cluster import Cluster
from canary_obs.reference_engine.disaggregated.decode import DecodeSide
from canary_obs.reference_engine.disaggregated.messages import Grants, Offers
from canary_obs.reference_engine.disaggregated.regions import regions
from canary_obs.reference_engine.disaggregated.transfer import KVSender
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.scheduling.request import Sampling
from canary_obs.reference_engine.settings import tiny, with_model
from canary_obs.reference_engine.traffic import Traffic, scaled_traffic
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.vocabulary import State
from tests.reference_engine.workloads import account

Moves = Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]


class Truncated(KVSender):
    """The last four slots are not sent."""

    def moves(self, source, target) -> Moves:
        for layer, read, write in super().moves(source, target):
            yield layer, read[:-4], write[:-4]


class MissingLayer(KVSender):
    """The last layer is not sent."""

    def moves(self, source, target) -> Moves:
        return iter(list(super().moves(source, target))[:-1])


class Reordered(KVSender):
    """Two slots arrive in each other's place."""

    def moves(self, source, target) -> Moves:
        for layer, read, write in super().moves(source, target):
            swapped = write.copy()
            swapped[[1, 3]] = write[[3, 1]]
            yield layer, read, swapped


class Duplicated(KVSender):
    """One slot's bytes are sent twice, the second time in place of the next slot's."""

    def moves(self, source, target) -> Moves:
        for layer, read, write in super().moves(source, target):
            repeated = read.copy()
            repeated[3] = read[2]
            yield layer, repeated, write


class Misdirected(KVSender):
    """All slots land one page off."""

    def moves(self, source, target) -> Moves:
        slots = self._engine.config.num_slots
        for layer, read, write in super().moves(source, target):
            yield layer, read, (write + 1) % slots


class WrongSource(KVSender):
    """Other slots than the request's are read, records and all: an index off by one, before the transfer."""

    def send(self, source, granted) -> None:
        super().send({name: np.roll(slots, 1) for name, slots in source.items()}, granted)


class DamagedAtSource(KVSender):
    """One bit of the prefill pool flips after its forward, before it is read."""

    def send(self, source, granted) -> None:
        kv = self._engine.runner.pool.kv
        kv[1, 0, int(source[FULL_SLOTS][2])].view(torch.uint8).view(-1)[2] ^= 4
        super().send(source, granted)


class WithoutNumbering(KVSender):
    """Nothing of one numbering of slots is sent; the others are."""

    left_out = WINDOW_SLOTS

    def moves(self, source, target) -> Moves:
        found = regions(self._engine, self._engine.kv_heads)
        return (move for move in super().moves(source, target) if found[move[0]].numbering != self.left_out)


class NoWindows(WithoutNumbering):
    """KV of sliding-window layers is not sent."""


class NoEntries(WithoutNumbering):
    """Compressed entries and their index keys are not sent."""

    left_out = entry_slots(4)


class NoDraft(KVSender):
    """KV of the draft model's layers is not sent."""

    def moves(self, source, target) -> Moves:
        layers = len(self._engine.runner.pool.stores)
        return (move for move in super().moves(source, target) if move[0] < layers)


class DamagedWindow(KVSender):
    """One bit of a sliding-window layer flips in the prefill pool after its forward."""

    def send(self, source, granted) -> None:
        window = self._engine.runner.pool.window
        assert window is not None
        window.kv[0, 1, int(source[WINDOW_SLOTS][2])].view(torch.uint8).view(-1)[2] ^= 4
        super().send(source, granted)


class DamagedEntry(KVSender):
    """One bit of a compressed entry flips in the prefill pool after its forward."""

    def send(self, source, granted) -> None:
        pool = self._engine.runner.pool.compressed[0]
        slot = int(source[entry_slots(pool.ratio)][2])
        pool.entries.rows[0, slot // pool.per_page, slot % pool.per_page, 0, 5] ^= 4
        super().send(source, granted)


class NoIndexKeys(KVSender):
    """Of sparse layers only the latent rows are sent."""

    def moves(self, source, target) -> Moves:
        layers = len(self._engine.runner.pool.stores)
        return (move for move in super().moves(source, target) if move[0] < layers)


SENDERS = {
    sender.__name__: sender
    for sender in (
        KVSender, Truncated, MissingLayer, Reordered, Duplicated, Misdirected, WrongSource, DamagedAtSource,
        NoIndexKeys, NoWindows, NoEntries, NoDraft, DamagedWindow, DamagedEntry,
    )
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Report:
    """What one rank saw."""

    outputs: dict[str, list[int]] = field(default_factory=dict)  # of finished requests, prompt included
    violations: list[Violation] = field(default_factory=list)
    first_steps: dict[str, int] = field(default_factory=dict)  # canary step of each request's first forward
    raised: bool = False
    final: Snapshot | None = None
    statistics: dict[str, int] = field(default_factory=dict)
    state: tuple[State, tuple[str, ...]] | None = None
    injections: dict[str, Any] | None = None


def prompts(count: int, shortest: int = 6, seed: int = 0) -> list[NDArray[np.int32]]:
    random = np.random.default_rng(seed)
    system = random.integers(0, 256, 20)
    return [
        np.concatenate([system[: 20 * (i % 2)], random.integers(0, 256, shortest + i)]).astype(np.int32)
        for i in range(count)
    ]


def samplings(count: int, max_tokens: int = 8) -> list[Sampling]:
    return [
        Sampling(max_tokens=max_tokens, temperature=float(i % 3 == 2), seed=i, stop_at_eos=False)
        for i in range(count)
    ]


def serve(
    cluster: Cluster,
    *,
    count: int = 1,
    sender: str | dict[str, str] = "KVSender",
    model: str = "llama",
    shortest: int = 6,
    engine: dict[str, object] | None = None,
    **canary: Any,
) -> Report:
    """Serve prompts through both halves, under a canary each (none with mode `none`).

    sender: of every engine that prefills, or by the name of each.
    """
    sizes = {
        name: value[not cluster.prefills] if isinstance(value, tuple) else value
        for name, value in (engine or {}).items()
    }
    runner = cluster.engine(with_model(tiny(**({"dtype": torch.float64} | sizes)), model))
    if not cluster.prefills and "decode_data" in canary:
        canary["real_data"] = canary["decode_data"]
    canary.pop("decode_data", None)
    settings = {"patrol_budget": "off", "idle_sweep": False} | canary
    watch = install_canary(runner, CanaryConfig(endpoint=IN_PROCESS, **settings))
    report = Report()
    if watch is not None:
        watch.mark_ready()
        watch.reporter.send_violations = report.violations.extend
        _note_first_steps(runner, watch, report)
    if cluster.prefills:
        many = not isinstance(sender, str)
        side = cluster.prefill_side(runner, SENDERS[sender[cluster.name] if many else sender])
        own = prompts(count, shortest, seed=sum(cluster.name.encode()) if many else 0)
        for number, (prompt, sampling) in enumerate(zip(own, samplings(count), strict=True)):
            side.add_request(prompt, sampling, f"{cluster.name}-{number}" if many else None)
        while side.has_work():
            side.step()
        side.close()
    else:
        _decode(cluster.decode_side(runner), report)
    vars(runner.runner).pop("forward", None)
    if watch is not None:
        report.violations += watch.counter_reader.drain(watch.step, 5.0)
        report.final = watch.detach()
    report.statistics = asdict(runner.statistics)
    return report


def traffic(cluster: Cluster, *, steps: int, model: str = "llama", **canary: Any) -> Report:
    """Load with evictions, preemptions and aborts on both halves; every record is checked at the end."""
    runner = cluster.engine(with_model(tiny(), model))
    watch = install_canary(runner, CanaryConfig(endpoint=IN_PROCESS, **canary))
    assert watch is not None
    watch.mark_ready()
    report = Report()
    watch.reporter.send_violations = report.violations.extend
    if cluster.prefills:
        side = cluster.prefill_side(runner)
        load = Traffic(scaled_traffic(runner.config.max_context, runner.config.max_running), seed=3)
        for _ in range(steps):
            load.advance(side)
            side.step()
        while side.has_work():
            side.step()
        side.close()
    else:
        random, taking = np.random.default_rng(5), cluster.decode_side(runner)
        while taking.has_work():
            taking.step()
            unfinished = runner.unfinished
            if unfinished and random.random() < 0.02:
                taking.abort(unfinished[random.integers(len(unfinished))].id)
    watch.check_everything()
    account(runner)
    if watch.injector is not None:
        report.injections = watch.injector.injections.summary()
    report.state = watch.verdict()
    report.final = watch.detach()
    report.statistics = asdict(runner.statistics)
    return report


def alone(count: int, model: str = "llama", shortest: int = 6) -> dict[str, list[int]]:
    """The same prompts through one engine."""
    engine = Engine(with_model(tiny(dtype=torch.float64), model))
    for prompt, sampling in zip(prompts(count, shortest), samplings(count), strict=True):
        engine.add_request(prompt, sampling)
    outputs = {}
    while engine.has_work():
        outputs |= {request.id: request.tokens[: request.length].tolist() for request in engine.step()}
    return outputs


def _decode(side: DecodeSide, report: Report) -> None:
    while side.has_work():
        try:
            finished = side.step()
        except KVCacheViolation as stopped:
            report.raised = True
            report.violations += stopped.violations
            _hear_out(side)
            return
        report.outputs |= {request.id: request.tokens[: request.length].tolist() for request in finished}


def _hear_out(side: DecodeSide) -> None:
    """The engine has stopped; its peer may end in peace."""
    while True:
        (source,) = side._sources
        received = [link.receive_message(Offers) for link in source.links]
        if received[0].closing:
            return
        for link in source.links:
            link.send_message(Grants(grants=[]))


def _note_first_steps(engine: Engine, watch: CanaryRuntime, report: Report) -> None:
    forward = engine.runner.forward

    def noting(batch: ForwardBatch) -> torch.Tensor:
        for request in batch.requests:
            report.first_steps.setdefault(request.id, watch.step + 1)
        return forward(batch)

    vars(engine.runner)["forward"] = noting
