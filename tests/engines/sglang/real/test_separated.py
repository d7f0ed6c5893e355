"""Prefill and decode apart: records arrive with the KV, and damage is found where it would be read."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from canary_obs.vocabulary import HOST_PEER
from tests.engines.sglang.real.deepseek_v4 import PAGE
from tests.engines.sglang.real.index_keys import PAGE as PAGE_OF_KEYS
from tests.engines.sglang.real.separated import Outcome, Plan, prompts_of

_ROOT = Path(__file__).parents[4]
ROLES = ("prefill", "decode")
pytestmark = pytest.mark.timeout(600)  # the first test runs all pairs


def _run(folder: Path, plans: list[Plan]) -> dict[str, list[Outcome]]:
    """Both processes to their ends: what each says, by plan."""
    given = folder / "plans.json"
    given.write_bytes(msgspec.json.encode(plans))
    command = [sys.executable, "-W", "ignore", "-m", "tests.engines.sglang.real.separated"]
    logs = {role: (folder / f"{role}.log").open("w") for role in ROLES}
    processes = [
        subprocess.Popen(
            [*command, role, str(given)], cwd=_ROOT, stdout=log, stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": f"{_ROOT}:{_ROOT}/kernels"},
        )
        for role, log in logs.items()
    ]  # fmt: skip
    try:
        _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for log in logs.values():
            log.close()
    failed = {role: (folder / f"{role}.log").read_text("utf-8")[-3000:] for role in ROLES}
    assert [process.returncode for process in processes] == [0, 0], failed
    return {role: [_outcome(Path(plan.folder) / f"{role}.json") for plan in plans] for role in ROLES}


def _outcome(file: Path) -> Outcome:
    return msgspec.json.decode(file.read_bytes(), type=Outcome)


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    """Until both have ended, or one of them has failed: the other would wait for it."""
    for process in itertools.islice(itertools.cycle(processes), 500):
        codes = [other.poll() for other in processes]
        if any(codes) or None not in codes:
            return
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:
            continue


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class Pair(NamedTuple):
    """What a pair is made of, and the groups of which a slot is damaged."""

    model: str
    page_size: int
    groups: list[str]
    pools: str = ""
    tokens: int = 8


PAIRS = {
    "plain": Pair("llama", 1, ["full"]),
    "windows": Pair("windows", 16, ["full", "swa"]),
    "latent": Pair("latent", 16, ["full"], tokens=24),
    "keys": Pair("latent", PAGE_OF_KEYS, ["full", "indexer"], "keys"),
    "compressed": Pair("windows", PAGE, ["swa", "c4", "c4_indexer", "c128"], "compressed"),
}


@pytest.fixture(scope="module")
def outcomes(
    models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Outcome]]:
    """By pair and role. All run in the same two processes: SGLang takes long to import."""
    root = tmp_path_factory.mktemp("pairs")
    plans = [
        Plan(
            model=str(models(pair.model)), port=_free_port(), folder=str(root / name), damaged=pair.groups,
            settings=_settings(pair), retracting=name == "latent", pools=pair.pools, tokens=pair.tokens,
        )
        for name, pair in PAIRS.items()
    ]  # fmt: skip
    for plan in plans:
        Path(plan.folder).mkdir()
    found = _run(root, plans)
    return {name: {role: found[role][index] for role in ROLES} for index, name in enumerate(PAIRS)}


def _settings(pair: Pair) -> dict[str, Any]:
    chunk = max(pair.page_size, 128)
    return {"page_size": pair.page_size, "chunked_prefill_size": chunk, "max_total_tokens": 2560}


@pytest.mark.parametrize("name", PAIRS)
def test_a_slot_that_was_damaged_before_it_was_sent(
    outcomes: dict[str, dict[str, Outcome]], make_rig: Callable[..., Any], name: str
) -> None:
    pair, found = PAIRS[name], outcomes[name]
    prefill, decode = found["prefill"], found["decode"]
    for outcome in found.values():
        assert outcome.sound == []
        told = [reason.partition(" ")[0] for reason in outcome.sound_state]
        # A share of the KV bytes, as of these pools states are not checked.
        assert told == (["degraded", told[1], "states"] if name == "compressed" else ["ok"])
    assert decode.compared > 500
    assert decode.without == 0
    alone = make_rig(pair.model, **_settings(pair)).generate(prompts_of(), pair.tokens)
    assert {request: decode.answers[request] for request in alone} == alone
    assert {len(answer) for answer in decode.answers.values()} == {pair.tokens}

    assert {item.group for item in decode.violations} == set(pair.groups)
    first = {item.group: item for item in reversed(decode.violations)}
    for group, item in first.items():
        assert (item.phase, item.reason, item.part) == ("head", "kv_data", "k")
        assert (item.request, item.position) == prefill.damaged[group]
        assert item.peer == f"127.0.0.1:{prefill.port}"
    assert {(item.group, item.reason, item.slot) for item in decode.violations} == {
        (group, "kv_data", item.slot) for group, item in first.items()
    }, "one slot of each, and found again"
    assert decode.state[0] == "violated"


def test_a_copy_that_was_damaged_while_its_request_was_taken_back(
    outcomes: dict[str, dict[str, Outcome]],
) -> None:
    decode = outcomes["latent"]["decode"]
    assert decode.taken_back > 100
    assert decode.taken_back_without == 0
    first = next(item for item in decode.taken_back_damaged if item.peer == HOST_PEER)
    assert [(first.group, first.slot)] == decode.copy_damaged
    assert (first.reason, first.phase, first.part) == ("kv_data", "head", "k")
