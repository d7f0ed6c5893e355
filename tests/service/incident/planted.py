"""Kinds of faults planted in a real engine, and what an incident's sentence has to say of each."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import torch

from canary_kernels import layout
from canary_obs.attach import install_canary
from canary_obs.hub.hub import Hub
from canary_obs.reference_engine import settings
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.traffic import Traffic, scaled_traffic
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import CANARY, SEED, Stage
from tests.fault_cases.table import collected
from tests.links import OneThreadLink

STEPS = 120
LATER = 8  # steps after the first finding, for evidence to arrive


def damage_record(stage: Stage) -> None:
    """One bit of the canary's own record of a slot in use."""

    def harm(slots: torch.Tensor) -> None:
        assert stage.canary is not None
        group = stage.canary.state.by_name["full"]
        group.buffers.records[slots[3], layout.CHAIN] ^= 1 << 20

    stage.damage(harm)


_CASES = collected()
_DAMAGED_RECORD = FaultCase(title="", place="", story="", reports=(), plant=damage_record)
KINDS = {
    "bit_flip": r"One bit.* of slot \d+ \(group full, position 3, used by r.*\) changed .* a bit flip\.",
    "row_mix_up": r"(r\d+) at position \d+ reads slot \d+ \(group full\), which holds position \d+ of (r\d+)"
    r": another request's context",
    "tombstone_reuse": r"r\d+ .*reads (slot \d+|a slot that does not exist).*never (filled|written)\.",
    "lost_write": r"The forward left the K bytes of slot \d+ \(group full, position \d+.*the write was lost",
    "swapped_inputs": r"r\d+ was computed with another token than the scheduler gave it .*wrong token",
    "chunk_positions": r"r\d+ was given position 0 for position [1-9]\d* \(slot .*wrong position",
    "damaged_record": r"The canary's own record of slot \d+ \(group full\) is damaged",
}


def case_of(kind: str) -> FaultCase:
    """The planted fault; without a title where no known class of faults is like it."""
    return _DAMAGED_RECORD if kind == "damaged_record" else replace(_CASES[kind])


def plant(kind: str, hub: Hub) -> str:
    """Run an engine, an instance of this name, with a fault in it; the id of the hub's incident."""
    case = case_of(kind)
    torch.manual_seed(SEED)
    sizes = {name: value for name, value in case.engine.items() if name != "model"}
    model = str(case.engine.get("model", "llama"))
    engine = Engine(settings.with_model(settings.tiny(seed=SEED, **sizes), model))
    stage = Stage(engine)
    if case.furnish is not None:
        case.furnish(stage)
    stage.trust_every_free()
    case.plant(stage)
    link = OneThreadLink(capacity=1 << 20)
    config = msgspec.structs.replace(CANARY, write_history=True, instance=kind)
    stage.canary = canary = install_canary(engine, config, link=link)
    canary.mark_ready()
    traffic = Traffic(scaled_traffic(engine.config.max_context, engine.config.max_running), SEED)
    left = None
    while engine.statistics.steps < STEPS and left != 0:
        traffic.advance(engine)
        engine.step()
        while (message := link.next_message(0.0)) is not None:
            hub.ingest(message, link.send_command)
        found = [one for one in hub.incidents.newest_first() if one.instance == kind]
        left = left - 1 if left is not None else LATER if found else None
    canary.detach()
    return found[0].id
