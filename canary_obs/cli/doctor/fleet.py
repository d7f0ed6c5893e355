"""The ranks: what of each is covered, what is not, and why."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from canary_obs.cli.doctor.finding import Findings
from canary_obs.cli.words import rank_of, share
from canary_obs.plurals import counted

_SKEW_SECONDS = 5.0
_NAMES_SHOWN = 8
# Part of a rank's reason -> remedy. The first that matches counts.
_REMEDIES = (
    (
        "violation",
        "Read `canary-obs incidents`, then `canary-obs incident show ID`; when it is known: ack.",
    ),
    ("which this engine has", "Start the missing ranks, or set their KV_CANARY_ENDPOINT to this service."),
    ("reports as the same rank", "Give each engine its own KV_CANARY_INSTANCE."),
    ("snapshot is", "Look whether the engine's process lives, and reaches the service's endpoint."),
    ("no message from the service", "Check KV_CANARY_ENDPOINT of that engine; restart the service."),
    ("paused", "Run `canary-obs resume`."),
    ("of KV bytes protected", "docs/vllm.md and docs/sglang.md name the pools without an adapter."),
    ("last sweep failed", "Run `canary-obs sweep --wait`; the engine's log has the reason."),
    ("last completed sweep", "Run `canary-obs sweep --wait`, or set KV_CANARY_BUSY_SWEEP=true."),
    ("oldest byte check", "Raise KV_CANARY_PATROL_BUDGET, or run `canary-obs sweep --wait`."),
    (
        "does not count its cached slots",
        "The engine's adapter cannot count them; docs/checks.md says which do.",
    ),
    ("the observer failed", "The engine's log has the traceback; report it, and restart that engine."),
    (
        "the service failed: tokens_file",
        "Until the file is right the tokens read before are accepted, also those that you took out of it.",
    ),
    ("is unverified", "docs/checks.md names the causes; baselines are taken in the background."),
)
_NO_ENGINE = "no engine is attached"
_OTHER_REMEDY = "docs/findings.md and the runbooks name this reason: `canary-obs export alerts --out DIR`."


def examine_fleet(findings: Findings, status: dict[str, Any]) -> None:
    """Everything that the service knows of its ranks."""
    ranks = [rank for rank in status["ranks"] if not rank["departed"]]
    # The service has reasons of its own, whether or not an engine is attached.
    _examine_reasons(findings, [reason for reason in status["reasons"] if reason != _NO_ENGINE])
    if not ranks:
        findings.problem(
            "ranks", "no engine is attached: nothing is checked",
            "Start the engine with KV_CANARY_MODE=log and this service's KV_CANARY_ENDPOINT.",
        )  # fmt: skip
        return
    findings.fine("ranks", f"{len(ranks)} attached")
    _grouped(findings, ranks, status["version"])
    _examine_coverage(findings, ranks)


def _examine_reasons(findings: Findings, reasons: list[str]) -> None:
    by_remedy: dict[str, list[str]] = defaultdict(list)
    for reason in reasons:
        remedy = next((text for part, text in _REMEDIES if part in reason), _OTHER_REMEDY)
        by_remedy[remedy].append(reason)
    for remedy, same in by_remedy.items():
        more = f" (and {len(same) - 1} more like it)" if len(same) > 1 else ""
        findings.problem("state", same[0] + more, remedy)


def _grouped(findings: Findings, ranks: list[dict[str, Any]], version: str) -> None:
    """One finding per kind of trouble, which names the ranks."""
    troubles: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for rank in ranks:
        who = rank["identity"]
        name = rank_of([who["engine"], who["instance"], who["rank"]])
        for trouble in _troubles_of(rank, version):
            troubles[trouble].append(name)
    for (topic, text, remedy), names in troubles.items():
        shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
        findings.warning(topic, f"{text}: {len(names)} of {counted(len(ranks), 'rank')} ({shown})", remedy)


def _troubles_of(rank: dict[str, Any], version: str) -> list[tuple[str, str, str]]:
    hello, snapshot, found = rank["hello"], rank["snapshot"], []
    if hello is not None:
        other = hello["versions"].get("canary_obs")
        if other not in (None, version):
            found.append(
                ("versions", f"canary_obs {other}, the service has {version}", "Run one release everywhere.")
            )
        settings = hello["settings"]
        if settings.get("reveal_tokens") == "True":
            found.append(("privacy", "token ids are shown", "Unset KV_CANARY_REVEAL_TOKENS."))
        if settings.get("perturb"):
            found.append(("faults", "faults are injected on purpose", "Unset KV_CANARY_PERTURB."))
        if settings.get("idle_sweep") == "False" and settings.get("busy_sweep") == "False":
            remedy = "Set KV_CANARY_BUSY_SWEEP=true, or sweep by a schedule: `canary-obs sweep --window`."
            found.append(("sweeps", "no sweep begins by itself", remedy))
    if snapshot is not None:
        if snapshot["mode"] == "none":
            found.append(("mode", "mode none: nothing is checked", "Set KV_CANARY_MODE=log."))
        if snapshot["patrol"] is None:
            found.append(("patrol", "the patrol is off", "Set KV_CANARY_PATROL_BUDGET=1%."))
    skew = rank["clock_skew_seconds"]
    if skew is not None and abs(skew) > _SKEW_SECONDS:
        found.append(
            ("clock", "its clock differs from the service's by more than 5 s", "Let its host follow NTP.")
        )
    return found


def _examine_coverage(findings: Findings, ranks: list[dict[str, Any]]) -> None:
    """By group: the share of its KV bytes that fingerprints cover, and what was met unverified."""
    slots: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    unverified: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for rank in ranks:
        for group in (rank["hello"] or {"groups": []})["groups"]:
            slots[group["name"]][0] += group["slots"] * group["protected_slot_bytes"]
            slots[group["name"]][1] += group["slots"] * group["slot_bytes"]
        for name, counters in ((rank["totals"] or {}).get("groups") or {}).items():
            for cause, count in counters["unverified"].items():
                unverified[name][cause] += count
    for name, (covered, every) in sorted(slots.items()):
        causes = ", ".join(f"{cause} {count}" for cause, count in unverified[name].items() if count)
        met = f"; met and not verified since attach: {causes}" if causes else ""
        text = f"group {name}: {share(covered, every)} of its KV bytes are fingerprinted{met}"
        if covered < every:
            remedy = "docs/checks.md names the layers and pools that no adapter shows."
            findings.warning("coverage", text, remedy)
        else:
            findings.fine("coverage", text)
