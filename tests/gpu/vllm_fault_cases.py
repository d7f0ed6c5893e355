"""Engines of `vllm_faults`, and the faults of the vLLM suite that are planted in each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from canary_obs.vocabulary import Part, Phase, Reason, State
from tests.engines.vllm.real import (
    forwards,
    perturbed,
    prefix_hits,
    stale,
    test_faults,
    test_positions,
    test_scheduler_faults,
    tokens,
)
from tests.engines.vllm.real.models import make_model
from tests.engines.vllm.real.rig import Rig, prompts
from tests.gpu.fault_verdicts import EngineFaults, Masked, Plant

_LINKS = {"chain", "position", "token", "unwritten"}


def garbled_prompt(rig: Rig, _: pytest.MonkeyPatch) -> None:
    with tokens.garbled_prompt(rig):
        rig.generate(prompts(1, seed=6), 2)
    assert "write_token" in tokens.reasons(rig)


def samples_exchanged(rig: Rig, _: pytest.MonkeyPatch) -> None:
    rig.start({"a": prompts(1, seed=7)[0], "b": prompts(1, seed=8)[0]}, 60)
    rig.step(6)
    assert rig.settle() == []
    for _attempt in range(20):
        if tokens.swap_samples(rig):
            break
        rig.step()
    else:
        raise Masked
    rig.step(3)
    assert "write_token" in tokens.reasons(rig)


def damaged_hit(rig: Rig, _: pytest.MonkeyPatch) -> None:
    found = prefix_hits.damaged(rig)
    assert found | {"seconds": 0} == prefix_hits.FOUND | {"seconds": 0}, found


def writes_left_out(rig: Rig, _: pytest.MonkeyPatch) -> None:
    rig.generate(prompts(8, seed=3), 4)
    assert rig.llm.reset_prefix_cache()
    test_positions.lose_writes(rig)
    assert (Phase.TAIL, Reason.LOST_WRITE) in rig.reasons()


def tables(change: Callable[[], Any], seed: int, steps: int, rig: Rig, _: pytest.MonkeyPatch) -> None:
    """What attention is given is not what the runner's table has."""
    found = stale.accused(rig, change(), seed, steps)
    assert set(found["reasons"]) & _LINKS, found
    assert found["state"] == "violated", found


def flips_in_all_layers(rig: Rig, _: pytest.MonkeyPatch) -> None:
    """Two bits of each layer of each group, each in an idle block."""
    rig.generate(prompts(8), 4)
    draw = random.Random(3)
    for group in rig.adapter.vllm_groups:
        for layer in range(len(group.layers)):
            cache = rig.layer_cache(group.number, layer)
            integers = cache.view({2: torch.int16, 4: torch.int32}[cache.element_size()])
            for _place in range(2):
                block = draw.choice(rig.idle_blocks(group.number))
                place = (block, *(draw.randrange(size) for size in integers.shape[1:]))
                rig.found.clear()
                integers[place] ^= 1 << 9
                found = {(row.reason, row.slot // group.block_size) for row in rig.settle()}
                integers[place] ^= 1 << 9
                assert found == {(Reason.KV_DATA, block)}, (group.view.name, layer, found)


def scheduler_failure(owner: Any, name: str, rig: Rig, patch: pytest.MonkeyPatch) -> None:
    """The canary fails in the scheduler: nothing is accused, and the state is not `ok`."""
    patch.setattr(owner, name, test_scheduler_faults.fails)
    for _ in range(2):
        rig.generate(prompts(6), 4)
    assert rig.settle() == []
    assert rig.canary.verdict()[0] is not State.OK


def forwards_not_shown(rig: Rig, _: pytest.MonkeyPatch) -> None:
    for way, seen in forwards.tried(rig, 2).items():
        assert seen["state"] != State.OK, way
        assert seen["accused"] == [], way


def injections(rig: Rig, _: pytest.MonkeyPatch) -> None:
    """The canary's own, each mode in turn, with canaries that are attached anew."""
    perturbed.check(perturbed.tried(rig))


_SCHEDULER: dict[str, Plant] = {
    f"failure in the scheduler, {name}": partial(scheduler_failure, *where)
    for name, where in test_scheduler_faults.FAULTS.items()
}
_TABLES: dict[str, Plant] = {
    "attention gets two rows exchanged": partial(tables, lambda: stale.exchanged, 32, 2),
    "attention gets the tables of before": partial(tables, stale.Stale, 33, 12),
    "attention gets a mapping one slot off": partial(tables, lambda: stale.shifted, 34, 2),
}


def of_llama(folder: Path) -> EngineFaults:
    faults: dict[str, Plant] = {
        name.removeprefix("test_").replace("_", " "): _called(test)
        for name, test in vars(test_faults).items()
        if name.startswith("test_")
    }
    faults |= {
        "flips in all layers": flips_in_all_layers,
        "garbled prompt": garbled_prompt, "samples exchanged": samples_exchanged,
        "damaged block is hit": damaged_hit, "writes left out": writes_left_out,
    }  # fmt: skip
    own: dict[str, Plant] = {"forwards that are not shown": forwards_not_shown, "injections": injections}
    return EngineFaults(Rig(make_model(folder, "llama")), faults | _TABLES | _SCHEDULER | own)


def _called(test: Callable[..., object]) -> Plant:
    wants_patch = "monkeypatch" in test.__code__.co_varnames[: test.__code__.co_argcount]
    return lambda rig, patch: test(rig, patch) if wants_patch else test(rig)


@contextmanager
def _failures() -> Iterator[Any]:
    from tests.engines.vllm.real.failing_connector import FAILURES, Failures

    try:
        yield FAILURES
    finally:
        vars(FAILURES).update(vars(Failures(caches=FAILURES.caches)))


def ignored_failure(fail: str, rig: Rig, patch: pytest.MonkeyPatch) -> None:
    from tests.engines.vllm.real import test_failed_loads

    with _failures() as failures:
        test_failed_loads.test_a_failure_that_the_scheduler_ignores_is_found(rig, failures, fail, patch)


def freed_under_way(rig: Rig, _: pytest.MonkeyPatch) -> None:
    from tests.engines.vllm.real import test_failed_loads

    with _failures() as failures:
        test_failed_loads.test_a_receive_whose_blocks_were_freed_under_way_is_found(rig, failures)


def lost_load(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    """Reported complete, and nothing was copied."""
    from tests.engines.vllm.real import test_failed_loads
    from tests.engines.vllm.real.copying_connector import CopyingConnector

    prompt, _ = test_failed_loads.stored(rig, 65)
    patch.setattr(CopyingConnector, "_copy", lambda *_: None)
    rig.generate([prompt], 6)
    rig.settle()
    assert set(rig.reasons()) == {(Phase.HEAD, Reason.LOST_LOAD)}


def of_connector(folder: Path) -> EngineFaults:
    config = {
        "kv_connector": "FailingConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_module_path": "tests.engines.vllm.real.failing_connector",
    }  # fmt: skip
    rig = Rig(make_model(folder, "llama"), num_gpu_blocks_override=60, kv_transfer_config=config)
    return EngineFaults(rig, {
        "failed receive of a request ignored": partial(ignored_failure, "request"),
        "failed load of a block ignored": partial(ignored_failure, "block"),
        "blocks freed while a receive is under way": freed_under_way,
        "a load that copied nothing": lost_load,
    })  # fmt: skip


def of_offload(folder: Path) -> EngineFaults:
    from tests.engines.vllm.real import test_offloading as cases
    from tests.engines.vllm.real.offloading import Tiers

    tiers = Tiers(make_model(folder, "llama"), folder / "files")

    def without_rig(test: Callable[..., object], *given: Any) -> Plant:
        return lambda rig, patch: test(tiers, *given)

    changed = cases.test_a_changed_memory_tier_is_found
    return EngineFaults(tiers.rig, {
        "flips in the memory tier": without_rig(changed, cases.flip),
        "blocks exchanged in the memory tier": without_rig(changed, cases.exchange),
        "layers exchanged in the memory tier": without_rig(changed, cases.exchange_layer),
        "byte flipped in a file": without_rig(cases.test_a_byte_that_flips_in_a_file_is_found),
        "files exchanged": without_rig(cases.test_files_that_change_places_are_found, 3),
        "file replaced": without_rig(cases.test_a_stale_record_file_accuses_the_copy),
        # The last: it leaves no damaged files behind, from which others would be served.
        "clean loads from files": without_rig(cases.test_what_was_stored_is_what_is_loaded, True),
    })  # fmt: skip


def of_hybrid(folder: Path) -> EngineFaults:
    return EngineFaults(
        Rig(make_model(folder, "gemma3")), {"flips in all layers": flips_in_all_layers, **_TABLES}
    )


def of_states(folder: Path) -> EngineFaults:
    from tests.engines.vllm.real import test_states as cases

    rig = Rig(make_model(folder, "falcon_h1"), **(cases.STATES | {"max_model_len": 512}))

    def flipped(layer: int, part: Part) -> Plant:
        return lambda rig, patch: cases.test_a_flip_in_a_cached_state_is_found(rig, layer, part)

    faults = {
        f"flip in a cached state, layer {layer}, part {part}": flipped(layer, part)
        for layer in (0, 1)
        for part in (Part.K, Part.V)
    }
    prompt = prompts(1, seed=6)[0]
    running = {"flip in a running state": lambda rig, patch: cases.flipped_while_it_runs(rig, prompt)}
    return EngineFaults(rig, faults | running)


ENGINE_FAULTS: dict[str, Callable[[Path], EngineFaults]] = {
    "llama": of_llama, "connector": of_connector, "offload": of_offload, "hybrid": of_hybrid,
    "states": of_states,
}  # fmt: skip
