"""What becomes of injections is counted and logged, and so is why others were not made."""

from __future__ import annotations

import pytest

from canary_obs.records import Violation
from canary_obs.runtime.line_limit import LineLimit
from canary_obs.runtime.perturb.injection import Injection, Outcome
from canary_obs.runtime.perturb.injection_log import InjectionLog
from canary_obs.vocabulary import PerturbMode, Phase, Reason

SWAP = PerturbMode.NEXT_TOKEN_SWAP


def violation(**changes: object) -> Violation:
    fields: dict[str, object] = {
        "phase": Phase.TAIL, "reason": Reason.WRITE_TOKEN, "group": "full", "part": None, "step": 9,
        "event": 1, "slot": 4, "position": 2, "request": None, "expected": None, "actual": None,
        "lag_steps": 0, "time_ns": 2_000_000,
    }  # fmt: skip
    return Violation(**fields | changes)  # type: ignore[arg-type]


def swap(**changes: object) -> Injection:
    fields: dict[str, object] = {
        "mode": SWAP, "group": "full", "slot": 4, "position": 2, "step": 9, "time_ns": 1_000_000,
        "also": frozenset({("full", 4), ("full", 6), ("swa", 1)}), "following": frozenset({3, 8}),
        "detail": "with slot=6, position=7",
    }  # fmt: skip
    return Injection(**fields | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "detected", "explained"),
    [
        ({}, True, True),
        ({"slot": 6}, True, True),
        ({"group": "swa", "slot": 1}, True, True),
        ({"reason": Reason.TOKEN, "step": 10}, True, True),
        ({"group": "swa"}, False, False),
        ({"slot": 5}, False, False),
        ({"step": 8}, False, False),
        ({"reason": Reason.KV_DATA}, False, False),
        # What follows the wrong tokens does not continue them, wherever it lies.
        ({"reason": Reason.CHAIN, "slot": 30, "position": 3, "step": 10}, False, True),
        ({"reason": Reason.CHAIN, "slot": 31, "position": 8, "step": 10}, False, True),
        ({"reason": Reason.CHAIN, "slot": 31, "position": 8, "step": 8}, False, False),
        ({"reason": Reason.CHAIN, "slot": 4, "position": 2}, False, False),
        # Where the engine's digests follow its inputs, each later token continues the wrong one.
        ({"slot": 30, "position": 3, "step": 10}, False, True),
        ({"slot": 30, "position": 12, "step": 14}, False, True),
        ({"slot": 30, "position": 13, "step": 14}, False, False),
        ({"slot": 30, "position": None, "step": 14}, False, False),
        ({"reason": Reason.POSITION, "slot": 30, "position": 3}, False, False),
    ],
)
def test_what_a_swap_of_tokens_explains(changes: dict[str, object], detected: bool, explained: bool) -> None:
    row = violation(**changes)
    assert (swap().detected_by(row), swap().explains(row)) == (detected, explained)


@pytest.mark.parametrize("mode", list(PerturbMode))
def test_bytes_explain_bytes_and_links_links(mode: PerturbMode) -> None:
    injection = swap(mode=mode, following=frozenset())
    reasons = {reason for reason in Reason if injection.explains(violation(reason=reason))}
    links = {Reason.CHAIN, Reason.POSITION, Reason.UNWRITTEN, Reason.TOKEN, Reason.WRITE_TOKEN}
    known = {PerturbMode.REQ_TO_TOKEN: links, SWAP: {Reason.WRITE_TOKEN, Reason.TOKEN}}
    assert reasons == known.get(mode, {Reason.KV_DATA})


def test_each_injection_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    injections = InjectionLog((SWAP,), "rank 1 of vllm/default")
    injections.add(swap())
    injections.add(swap(slot=9, position=None, detail=""))
    start = "canary_obs: rank 1 of vllm/default: fault injected: mode=next_token_swap, step=9, group=full"
    assert caplog.messages == [
        f"{start}, slot=4, position=2, with slot=6, position=7",
        f"{start}, slot=9",
    ]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_skips_are_counted_by_reason_and_each_reason_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    injections = InjectionLog(
        (SWAP, PerturbMode.REAL_KV_USED), skip_limit=lambda: LineLimit(1, 10.0, lambda: now)
    )
    for step in range(4):
        injections.skip(SWAP, "full", step, "no pair")
    injections.skip(SWAP, "full", 4, "no group")
    injections.skip(PerturbMode.REAL_KV_USED, "full", 4, "no pair")
    now = 10.0
    injections.skip(SWAP, "full", 5, "no pair")
    start = "canary_obs: no fault injected: mode"
    assert caplog.messages == [
        f"{start}=next_token_swap, step=0, group=full: no pair",
        f"{start}=next_token_swap, step=4, group=full: no group",
        f"{start}=real_kv_used, step=4, group=full: no pair",
        f"{start}=next_token_swap, step=5, group=full: no pair (3 more since the last line were left out)",
    ]
    summary = injections.summary()
    assert summary["next_token_swap"]["skipped"] == {"no pair": 5, "no group": 1}  # type: ignore[index]
    assert summary["real_kv_used"]["skipped"] == {"no pair": 1}  # type: ignore[index]
    assert injections.injected == 0


def test_what_was_left_behind_detects_nothing() -> None:
    injections = InjectionLog((SWAP,))
    injections.add(swap())
    assert injections.match([violation(reason=Reason.CHAIN, slot=30, position=3, step=10)]) == []
    (found,) = injections.match([violation(slot=6)])
    assert (found.outcome, found.reason) == (Outcome.DETECTED, Reason.WRITE_TOKEN)
