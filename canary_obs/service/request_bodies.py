"""JSON bodies of write requests. Strict: a number is not a boolean, and an unknown member is an error."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from canary_obs.hub.commands import StartSweepRequest
from canary_obs.hub.rank_selection import RankSelection
from canary_obs.hub.sweep_window import PATTERN
from canary_obs.vocabulary import HealPolicy

RANKS_NAMED = 1024
_SLOTS = 1 << 40


def _whole(value: object) -> object:
    # JSON Schema's integers: 3.0 is one.
    return int(value) if isinstance(value, float) and value.is_integer() else value


Name = Annotated[str, Field(min_length=1, max_length=128)]
RankNumber = Annotated[int, Field(ge=0, le=65_535), BeforeValidator(_whole)]
Slot = Annotated[int, Field(ge=0, le=_SLOTS), BeforeValidator(_whole)]
EventNumber = Annotated[int, Field(ge=0), BeforeValidator(_whole)]


class RankBody(BaseModel):
    """Which ranks a command is for; {} = every rank."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    engine: Annotated[Name | None, Field(description="Only ranks of this engine.")] = None
    instance: Annotated[Name | None, Field(description="Only ranks of this engine instance.")] = None
    ranks: Annotated[
        list[RankNumber], Field(max_length=RANKS_NAMED, description="Numbers of ranks; empty = all.")
    ] = []

    @property
    def selection(self) -> RankSelection:
        """The ranks that are meant."""
        return RankSelection(engine=self.engine, instance=self.instance, ranks=tuple(self.ranks))


class HealBody(RankBody):
    """A healing policy, blocks to bring back from quarantine, or both."""

    policy: Annotated[
        HealPolicy | None, Field(strict=False, description="The policy from now on; default: as it is.")
    ] = None
    release: Annotated[
        list[Slot],
        Field(max_length=RANKS_NAMED, description="Numbers of quarantined blocks to bring back."),
    ] = []
    release_all: Annotated[bool, Field(description="Bring all quarantined blocks back.")] = False


class AcknowledgeBody(RankBody):
    """What was seen, and by whom; {} = everything that the service has received."""

    incident: Annotated[
        Name | None, Field(description="Only this incident; faults stay, and so do silent ranks.")
    ] = None
    up_to: Annotated[
        EventNumber | None, Field(description="Number of the newest violation seen; default: all here.")
    ] = None
    by: Annotated[Name | None, Field(description="Who has seen it; default: the token's name.")] = None
    comment: Annotated[str | None, Field(min_length=1, max_length=2048)] = None


class SweepBody(RankBody):
    """What to sweep: on which ranks, which slots, how deep, how fast and until when."""

    groups: Annotated[list[Name], Field(max_length=64, description="Groups to sweep; empty = all.")] = []
    data: Annotated[bool, Field(description="Compare KV bytes, not only the chain.")] = True
    unlocked_only: Annotated[bool, Field(description="Skip slots that running requests use.")] = False
    used_only: Annotated[
        bool, Field(description="Only slots that running requests use; none with `unlocked_only`.")
    ] = False
    swa_resident_only: Annotated[
        bool, Field(description="Skip tokens that the sliding-window group has evicted.")
    ] = False
    request: Annotated[
        Name | None, Field(description="Only slots of this running request, as violations name it.")
    ] = None
    first_slot: Annotated[Slot | None, Field(description="Lowest slot to check.")] = None
    last_slot: Annotated[Slot | None, Field(description="Highest slot to check.")] = None
    budget_ms: Annotated[
        float | None, Field(gt=0, le=1000, description="Per engine step; default: the engine's setting.")
    ] = None
    deadline_seconds: Annotated[
        float | None, Field(gt=0, le=604_800, description="From its beginning; then ranks not done fail.")
    ] = None
    window: Annotated[
        str | None,
        Field(pattern=PATTERN, description="Hours of the day in UTC, as 22:00-05:30: it begins in them and"
              " is cancelled at their end."),
    ] = None  # fmt: skip

    @property
    def wanted(self) -> StartSweepRequest:
        """The sweep that is asked for."""
        return StartSweepRequest(
            selection=self.selection, groups=tuple(self.groups), data=self.data,
            unlocked_only=self.unlocked_only, used_only=self.used_only,
            swa_resident_only=self.swa_resident_only, request=self.request, first_slot=self.first_slot,
            last_slot=self.last_slot, budget_ms=self.budget_ms, deadline_seconds=self.deadline_seconds,
            window=self.window,
        )  # fmt: skip
