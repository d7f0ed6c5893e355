"""Who read an incident's damage, in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from canary_obs.hub.taint_store import Taint


def note_of(tainted: Sequence[Taint]) -> str:
    """How far the list of readers can be trusted; "no request" is said only when that is known."""
    if not tainted:
        return "No rank has reported which requests read the damaged slots."
    causes = dict.fromkeys(taint.cause for taint in tainted if taint.cause is not None)
    readers = {(taint.identity.key, one.request) for taint in tainted for one in taint.requests}
    count = f"{len(readers) or 'No'} request{'s' * (len(readers) != 1)}"
    known = f"{count} read damage since the last good check, or KV computed from it"
    return f"{known}; there may be more: {'; '.join(causes)}." if causes else f"{known}; no other has."
