"""/canary/heal: what is done about damage."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Request, Response

from canary_obs.hub.ranks import rank_name
from canary_obs.records import SetHealing
from canary_obs.service.context import context_of
from canary_obs.service.query_parameters import AS_DECLARED
from canary_obs.service.request_bodies import HealBody
from canary_obs.service.route_policy import TokenScope, requires
from canary_obs.service.schemas import HealingReport, RankHealing, Reached, documented, reply

router = APIRouter(prefix="/canary", tags=["healing"])


@router.get("/heal", openapi_extra=requires(TokenScope.READ), responses=documented(HealingReport, 200))
async def healing(request: Request) -> Response:
    """The policy of every rank, what keeps it from being followed, its quarantine and its actions so far."""
    ranks = tuple(
        RankHealing(
            rank=rank_name(rank.identity.key),
            status=rank.snapshot.healing,
            actions={} if rank.totals is None else rank.totals.heals,
        )
        for rank in context_of(request).hub.ranks()
        if rank.snapshot is not None and rank.snapshot.healing is not None
    )
    return reply(HealingReport(ranks=ranks))


@router.post(
    "/heal",
    status_code=202,
    responses=documented(Reached, 202, 404, 422, 503),
    openapi_extra=requires(TokenScope.OPERATE),
    dependencies=AS_DECLARED,
)
async def heal(request: Request, body: Annotated[HealBody, Body()]) -> Response:
    """Choose a policy for every rank, or for some, and bring blocks back from quarantine.

    `off` ends healing at once; another policy is followed from the engine's next step on. A limit that was
    reached is lifted.
    """
    release = () if body.release_all else tuple(body.release) or None
    command = SetHealing(policy=body.policy, release=release)
    keys = context_of(request).hub.send_command(command, body.selection)
    return reply(Reached(ranks=len(keys), reached=tuple(map(rank_name, keys))), 202)
