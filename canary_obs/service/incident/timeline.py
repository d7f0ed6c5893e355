"""When it happened, as far as is known: written, last good check, damage, detection, page, acknowledged."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from canary_obs.hub.incidents import Incident
from canary_obs.hub.sweep_records import SweepRecord
from canary_obs.service.incident.facts import Facts, lead_of
from canary_obs.vocabulary import Phase, Reason, SweepStatus

# Checks of these compare bytes with what was recorded earlier: the damage may be older than the step.
_OF_BYTES = frozenset({Reason.KV_DATA, Reason.RECORD})


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the timeline. `time_ns` and `step` None = not known."""

    what: str
    text: str
    time_ns: int | None = None
    step: int | None = None


def timeline_of(incident: Incident, sweeps: Iterable[SweepRecord]) -> tuple[Moment, ...]:
    """The incident's moments in order; what is not known is said to be unknown."""
    facts = lead_of(incident)
    if facts is None:
        return ()
    good = _last_good(facts, sweeps)
    return (
        _written(facts),
        good,
        _damage(facts, good),
        _detection(facts),
        Moment(
            what="page",
            text="sent by Alertmanager, not by this service: when is not known here",
        ),
        *_acknowledged(incident),
    )


def _written(facts: Facts) -> Moment:
    step = facts.written_step
    if step is None:
        known = facts.evidence is not None and facts.evidence.writes_known
        why = "no write of the slot was seen" if known else "not known: writes of slots are not recorded"
        return Moment(what="written", text=why)
    return Moment(what="written", text=f"the slot's last write before the finding, in step {step}", step=step)


def _last_good(facts: Facts, sweeps: Iterable[SweepRecord]) -> Moment:
    identity, row = facts.event.identity, facts.row
    best: tuple[int, str, int] | None = None
    for sweep in sweeps:
        for rank in sweep.ranks:
            progress = rank.progress
            if rank.key != identity.key or progress is None or progress.status is not SweepStatus.PASSED:
                continue
            ended = progress.started_ns + round(progress.seconds * 1e9)
            covers = progress.data and row.group in progress.groups and progress.step <= row.step
            if covers and ended < row.time_ns and (best is None or ended > best[0]):
                best = ended, sweep.id, progress.step
    if best is None:
        return Moment(what="last good check", text="not known: no sweep of this group that passed is kept")
    text = f"sweep {best[1]} of the whole prefix cache passed, bytes included"
    return Moment(what="last good check", text=text, time_ns=best[0], step=best[2])


def _damage(facts: Facts, good: Moment) -> Moment:
    row, written = facts.row, facts.written_step
    if row.reason not in _OF_BYTES:
        return Moment(what="damage", text=f"in step {row.step} or shortly before it", step=row.step)
    since = [f"its write in step {written}"] if written is not None else []
    # Only a slot that was there already was looked at by the sweep.
    if good.step is not None and written is not None and written < good.step:
        since = [f"the sweep in step {good.step}"]
    text = f"between {since[0]} and step {row.step}" if since else f"not later than step {row.step}"
    return Moment(what="damage", text=text)


def _detection(facts: Facts) -> Moment:
    row = facts.row
    phase = {
        Phase.HEAD: "before the forward", Phase.TAIL: "after the forward", Phase.SWEEP: "by a sweep",
        Phase.PATROL: "by the patrol", Phase.HIT: "before a cached slot was read",
    }[row.phase]  # fmt: skip
    text = f"{phase}, in step {row.step} ({row.reason.value})"
    return Moment(what="detection", text=text, time_ns=row.time_ns, step=row.step)


def _acknowledged(incident: Incident) -> tuple[Moment, ...]:
    made = [one for one in incident.acknowledgements if one.undone_ns is None]
    if not made:
        text = "yes" if incident.acknowledged else "not yet"
        return (Moment(what="acknowledged", text=text),)
    return tuple(
        Moment(
            what="acknowledged",
            text=f"by {one.by or 'an operator without a name'}" + (f": {one.comment}" if one.comment else ""),
            time_ns=one.time_ns,
        )
        for one in made
    )
