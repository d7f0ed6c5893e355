"""Every kind of model in one process, and two of them split into a prefill and a decode process."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from canary_obs.reference_engine.disaggregated.cluster import Cluster
from canary_obs.reference_engine.disaggregated.decode import DecodeSide
from canary_obs.reference_engine.disaggregated.prefill import PrefillSide
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.settings import MODELS, tiny, with_model
from canary_obs.reference_engine.traffic import Traffic, scaled_traffic
from tests.reference_engine.two_engines import ranks
from tests.soak.instrumented import BATCH, SIZES, Instrumented, KindReport

PAIRS = {  # two processes; their model
    "disaggregated": "llama", "disaggregated_sparse": "mla_sparse", "disaggregated_swa": "swa",
    "disaggregated_compressed": "compressed", "disaggregated_speculative": "speculative",
}  # fmt: skip
KINDS = (*MODELS, *PAIRS)
CROWD = 3  # times the usual arrivals: prompts wait to be handed over, where a storm finds them
SLOWEST = 20_000  # checks per second that a loaded machine still makes
Sizes = dict[str, int]


def soak(kind: str, checks: int, seed: int = 1, sizes: Sizes | None = None) -> list[KindReport]:
    """Run one kind until this many records were checked; a report for each of its processes."""
    sizes = SIZES if sizes is None else sizes
    if kind not in PAIRS:
        return [_alone(kind, checks, seed, sizes)]
    patience = 240 + checks / SLOWEST
    with tempfile.TemporaryDirectory() as folder, ranks(1, 1, Path(folder), patience) as pair:
        return pair.run(half, kind=kind, checks=checks, seed=seed, sizes=sizes)


def _alone(model: str, checks: int, seed: int, sizes: Sizes) -> KindReport:
    engine = Engine(with_model(tiny(seed=seed, **sizes), model))
    instrumented = Instrumented(engine, engine.abort, seed)
    traffic = _load(engine, seed)
    while instrumented.records_checked < checks:
        for _ in range(BATCH):
            traffic.advance(engine)
            instrumented.disturb(request.id for request in engine.unfinished)
            if engine.has_work():
                engine.step()
    return instrumented.finish(model)


def half(cluster: Cluster, *, kind: str, checks: int, seed: int, sizes: Sizes) -> KindReport:
    """One process of the pair: both go on until they have checked this many records together."""
    engine = cluster.engine(with_model(tiny(seed=seed, **sizes), PAIRS[kind]))
    if cluster.prefills:
        return _prefill(cluster.prefill_side(engine), checks, seed).finish(f"{kind}: prefill")
    return _decode(cluster.decode_side(engine), checks, seed + 1).finish(f"{kind}: decode")


def _prefill(side: PrefillSide, checks: int, seed: int) -> Instrumented:
    engine = side.engine
    instrumented, traffic = Instrumented(engine, side.abort, seed), _load(engine, seed, crowd=CROWD)
    while _together(instrumented.records_checked) < checks:
        for _ in range(BATCH):
            traffic.advance(side)
            held = [one.offer.id for one in side._held]
            instrumented.disturb([*held, *(request.id for request in engine.unfinished)])
            side.step()
    while side.has_work():
        side.step()
    side.close()
    return instrumented


def _decode(side: DecodeSide, checks: int, seed: int) -> Instrumented:
    engine = side.engine
    instrumented = Instrumented(engine, side.abort, seed)
    while _together(instrumented.records_checked) < checks:
        for _ in range(BATCH):
            instrumented.disturb(request.id for request in engine.unfinished)
            side.step()
    while side.has_work():
        side.step()
    return instrumented


def _together(checked: int) -> int:
    """The sum over both processes: each makes one exchange per step, so both are at the same step here."""
    total = torch.tensor([checked])
    dist.all_reduce(total)
    return int(total)


def _load(engine: Engine, seed: int, crowd: int = 1) -> Traffic:
    usual = scaled_traffic(engine.config.max_context, engine.config.max_running)
    return Traffic(replace(usual, arrivals=crowd * usual.arrivals), seed)
