"""JSON bodies of write requests. Strict: a number is not a boolean, and an unknown member is an error."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from canary_obs.hub.commands import StartSweepRequest
from canary_obs.hub.rank_selection import RankSelection

RANKS_NAMED = 1024
Name = Annotated[str, Field(min_length=1, max_length=128)]
RankNumber = Annotated[int, Field(ge=0, le=65_535)]


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


class AcknowledgeBody(RankBody):
    """What was seen, and by whom; {} = everything that the service has received."""

    incident: Annotated[
        Name | None, Field(description="Only this incident; faults stay, and so do silent ranks.")
    ] = None
    up_to: Annotated[
        int | None, Field(ge=0, description="Number of the newest violation seen; default: all here.")
    ] = None
    by: Annotated[Name | None, Field(description="Who has seen it; default: the token's name.")] = None
    comment: Annotated[str | None, Field(min_length=1, max_length=2048)] = None


class SweepBody(RankBody):
    """What to sweep."""

    groups: Annotated[list[Name], Field(max_length=64, description="Groups to sweep; empty = all.")] = []
    data: Annotated[bool, Field(description="Compare KV bytes, not only the chain.")] = True
    unlocked_only: Annotated[bool, Field(description="Skip slots that running requests use.")] = False
    swa_resident_only: Annotated[
        bool, Field(description="Skip tokens that the sliding-window group has evicted.")
    ] = False

    @property
    def request(self) -> StartSweepRequest:
        """The sweep that is wanted."""
        return StartSweepRequest(
            selection=self.selection, groups=tuple(self.groups), data=self.data,
            unlocked_only=self.unlocked_only, swa_resident_only=self.swa_resident_only,
        )  # fmt: skip
