"""Compares a run with faults with one without, request by request, and adds rounds to a file of rows."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from tests.engines.vllm.heal.serve import Listing, Served

# In all rounds of a row.
_SAME = ("runner", "policy", "seed", "vllm", "device", "dtype", "asynchronous", "drafts")


def round_of(clean: Served, again: Served, faulty: Served, disturbed: Served | None = None) -> dict[str, Any]:
    """The numbers that count, of answers that have been judged.

    `again`: without faults under the policy, which ought to equal `clean`. `disturbed`: likewise, with
    false findings that are healed.
    """
    wrong = {name for name, answer in faulty.answers.items() if answer.wrong_from is not None}
    errors = {name for name, answer in faulty.answers.items() if answer.error is not None}
    delivered, listed = wrong - errors, set(faulty.listed)
    late = [one for one in delivered & listed if _first_wrong(faulty, one) < _from(faulty, one)]
    after = {name: _wrong_after(faulty, name) for name in wrong & listed}
    cured = {name for name in delivered & listed if _is_listed_before(faulty, name)}
    return {
        "rounds": 1,
        "requests": len(clean.answers),
        "faults": dict(sorted(faulty.planted.items())),
        "steps_to_detection": dict(sorted(faulty.found_after.items())),
        "damages": faulty.damages,
        "damages_unknown": faulty.unknown,
        "unknown_causes": faulty.causes,
        "wrong_delivered": len(delivered),
        "wrong_delivered_after_detection": {
            name: _story(faulty, name) for name in sorted(delivered & listed) if any(after[name])
        },
        "wrong_by_a_later_fault": sorted(name for name in cured if not any(after[name])),
        "wrong_tokens_after_detection": sum(sum(late) for late in after.values()),
        "wrong_tokens_before_detection": sum(len(late) - sum(late) for late in after.values()),
        "ended_after_wrong_tokens": len(wrong & errors),
        "wrong_not_listed": {name: _story(faulty, name) for name in sorted(delivered - listed)},
        "wrong_before_first_output": sorted(late),
        "right_but_different": _nearly_right(faulty),
        "right_but_different_not_listed": sorted(_nearly_right(faulty).keys() - listed),
        "correct_listed": len((listed - wrong - errors) & set(clean.answers)),
        "listed": len(listed),
        "listed_derived": sum(all(one.derived for one in own) for own in faulty.listed.values()),
        "ended_with_error": len(errors),
        "heals": faulty.heals,
        "healing_limited": [] if faulty.limited is None else [faulty.limited],
        "recomputed_tokens": faulty.scheduled - clean.scheduled,
        "drafts_accepted": faulty.accepted,
        "median_latency_ms": [[_median(one) for one in (clean, again, faulty)]],
        "seconds": [[round(one.seconds, 1) for one in (clean, again, faulty)]],
        "steps": [[one.steps for one in (clean, again, faulty)]],
        "differing_without_faults": sum(
            right.tokens != again.answers[name].tokens for name, right in clean.answers.items()
        ),
        "heals_without_faults": sum(again.heals.values()),
        "listed_without_faults": len(clean.listed) + len(again.listed),
        "observer_faults": faulty.faults,
    } | ({} if disturbed is None else _control(disturbed))


def _control(disturbed: Served) -> dict[str, Any]:
    """What comes of the actions alone: nothing is damaged, so that no answer may be wrong."""
    wrong = {name for name, answer in disturbed.answers.items() if answer.wrong_from is not None}
    return {
        "control_heals": disturbed.heals,
        "control_wrong": {name: _story(disturbed, name) for name in sorted(wrong)},
        "control_right_but_different": _nearly_right(disturbed),
    }


def _nearly_right(served: Served) -> dict[str, float]:
    """Answers that differ and are not wrong, by rounding or by a small damage.

    Of each the largest lead of a token that was not taken.
    """
    return {
        name: round(max(answer.behind), 6)
        for name, answer in sorted(served.answers.items())
        if answer.behind and answer.wrong_from is None
    }


def passed(row: dict[str, Any]) -> bool:
    """Whoever is wrong is listed, and nobody is without a fault; `protect` lets nothing wrong leave.

    Nor does `repair`. A run that came to a limit made a dry run from then on: it does not pass.
    """
    protects = row["policy"] in ("protect", "repair")
    return not (
        row["wrong_not_listed"] or row["wrong_before_first_output"] or row["differing_without_faults"]
        or row["listed_without_faults"] or row["heals_without_faults"] or row["observer_faults"]
        or (protects and row["wrong_tokens_after_detection"]) or row["healing_limited"]
        or row.get("control_wrong")
    )  # fmt: skip


def row_in(file: Path, runner: str, policy: str) -> dict[str, Any] | None:
    """The row of a runner and a policy; None = the file has none."""
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    return next((row for row in rows if (row["runner"], row["policy"]) == (runner, policy)), None)


def add_round(file: Path, row: dict[str, Any]) -> None:
    """Add the numbers of a round to its row: counts are summed, lists go on."""
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    kept = next((one for one in rows if all(one[key] == row[key] for key in ("runner", "policy"))), None)
    if kept is None:
        rows.append(row)
    else:
        for key, value in row.items():
            if key not in _SAME:
                kept[key] = _sum(kept[key], value)
    file.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


def _sum(first: Any, second: Any) -> Any:
    if not isinstance(first, dict):
        return first + second
    return {
        key: _sum(first[key], second[key]) if key in first and key in second else {**first, **second}[key]
        for key in sorted({*first, *second})
    }


def _wrong_after(faulty: Served, name: str) -> list[bool]:
    """By wrong token that was delivered: whether all damage that can have made it wrong was found by then.

    A request that was cured of one damage may read another one, planted since and not found yet.
    """
    first, sent, listings = _first_wrong(faulty, name), faulty.answers[name].sent, faulty.listed[name]
    return [
        any(one.step <= step for one in listings)
        and not any(_unknown(one, step, at) and _planted(one, sent[first]) for one in listings)
        for at, step in enumerate(sent)
        if at >= first
    ]


def _story(faulty: Served, name: str) -> dict[str, Any]:
    """What one has to know to find out why: steps of its first and last wrong token, and its listings."""
    answer, first = faulty.answers[name], _first_wrong(faulty, name)
    listings = faulty.listed.get(name, [])
    return {
        "wrong_steps": [answer.sent[first], answer.sent[-1]],
        "behind": [round(gap, 4) for gap in answer.behind[first : first + 3]],
        "listed": [[one.step, one.planted, one.first_output, one.reason] for one in listings],
    }


def _unknown(listing: Listing, step: int, token: int) -> bool:
    return listing.step > step and (listing.first_output or 0) <= token


def _planted(listing: Listing, step: int) -> bool:
    return listing.planted is not None and listing.planted <= step


def _is_listed_before(faulty: Served, name: str) -> bool:
    """Whether the request was listed before the last wrong token was delivered, or with it."""
    sent = faulty.answers[name].sent[_first_wrong(faulty, name) :]
    return bool(sent) and any(one.step <= sent[-1] for one in faulty.listed[name])


def _first_wrong(faulty: Served, name: str) -> int:
    first = faulty.answers[name].wrong_from
    assert first is not None
    return first


def _from(served: Served, name: str) -> int:
    return min(one.first_output or 0 for one in served.listed[name])


def _median(served: Served) -> float:
    return round(1e3 * statistics.median(answer.seconds for answer in served.answers.values()), 1)
