"""The vLLM engines that replays share, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engines.vllm.real.copying_connector import UnalignedConnector
from tests.engines.vllm.real.rig import Rig, prompts
from tests.replays.replay import Run


class Arriving(UnalignedConnector):
    """Whole blocks, whose bytes arrive a step after they were asked for."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        whole, _ = super(UnalignedConnector, self).get_num_new_matched_tokens(request, num_computed_tokens)
        return whole, whole > 0


def build(name: str, models: Callable[[str], Path], files: Path) -> Any:
    """The engine of this name."""
    if name == "vllm_offload":
        from tests.engines.vllm.real.offloading import Tiers

        return Tiers(models("llama"), files)
    if name == "vllm_states":
        from tests.engines.vllm.real.test_left_out import STATES

        return Rig(models("falcon_h1"), **STATES)
    transfer = {
        "kv_connector": "Arriving", "kv_role": "kv_both", "kv_connector_module_path": __name__,
    }  # fmt: skip
    return Rig(models("llama"), num_gpu_blocks_override=60, kv_transfer_config=transfer)


def rig_of(engine: Any) -> Rig:
    """The engine's rig."""
    found = getattr(engine, "rig", engine)
    assert isinstance(found, Rig)
    return found


def worker_connector() -> Any:
    """The connector of the worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


def lost_from_device(rig: Rig, prompt: list[int]) -> None:
    """Serve a prompt and give its blocks to others, so that it has to be loaded."""
    rig.generate([prompt], 2)
    assert rig.llm.reset_prefix_cache()
    rig.generate(prompts(8, seed=4), 2)
    assert rig.llm.reset_prefix_cache()
    rig.settle()
    rig.found.clear()


def receive_under_way(rig: Rig, run: Run, request: str, prompt: list[int]) -> Callable[[], None]:
    """Start a request whose KV is being received; returns what lets it land, of which nobody is told."""
    lost_from_device(rig, prompt)
    connector, in_flight = worker_connector(), list[Any]()
    run.patch.setattr(connector, "_copy", in_flight.extend, raising=False)
    run.patch.setattr(connector, "get_finished", lambda *_: (None, None), raising=False)
    rig.start({request: prompt})
    rig.step(3)
    assert in_flight
    connector._arrived.clear()
    return lambda: type(connector)._copy(connector, in_flight)
