"""Signing in: a token is exchanged for a session, with a limit of failed attempts."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from canary_obs.config import PREFIX
from canary_obs.service.problems import Problem
from canary_obs.service.rate_limiter import RateLimiter
from canary_obs.service.route_policy import TokenScope, permits
from canary_obs.service.sessions import Session, SessionStore
from canary_obs.service.token_store import Caller, TokenStore

ATTEMPTS_PER_MINUTE = 10  # failed ones, per address
ALL_ATTEMPTS_PER_MINUTE = 120  # failed ones, over all addresses
_ADDRESSES_KEPT = 1024


class AttemptLimiter:
    """Failed attempts per address and over all of them; the memory for addresses is bounded."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock_ns = lambda: int(clock() * 1e9)
        self._all = RateLimiter(ALL_ATTEMPTS_PER_MINUTE, self._clock_ns)
        self._by_address: OrderedDict[str, RateLimiter] = OrderedDict()

    def seconds_left(self, address: str) -> float:
        """Seconds until this address may try again; 0.0 = now."""
        limiter = self._by_address.get(address)
        return max(self._all.seconds_left(None), limiter.seconds_left(None) if limiter else 0.0)

    def add_failure(self, address: str) -> None:
        """Count a failed attempt."""
        self._all.acquire(None)
        limiter = self._by_address.setdefault(address, RateLimiter(ATTEMPTS_PER_MINUTE, self._clock_ns))
        self._by_address.move_to_end(address)
        limiter.acquire(None)
        if len(self._by_address) > _ADDRESSES_KEPT:
            self._by_address.popitem(last=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignIn:
    """Opens and checks sessions against the tokens that are accepted now."""

    token_store: TokenStore
    sessions: SessionStore
    limiter: AttemptLimiter

    def open(self, token: str, address: str) -> tuple[str, Session, Caller]:
        """Session id, session and caller for a token. Raises Problem."""
        if self.token_store.empty:
            detail = f"the service has no tokens, so there is nothing to sign in to; {PREFIX}TOKEN sets one"
            raise Problem(409, "no-tokens", detail)
        if seconds := math.ceil(self.limiter.seconds_left(address)):
            detail = (
                f"too many failed attempts; retry in {seconds} s (limit: {ATTEMPTS_PER_MINUTE} per minute)"
            )
            raise Problem(429, "too-many-attempts", detail, retry_after=seconds)
        digest = self.token_store.find(token)
        caller = None if digest is None else self.token_store.caller(digest)
        if digest is None or caller is None:
            self.limiter.add_failure(address)
            raise Problem(
                401, "unknown-token", "no token of the service is equal to this one; check it for typos"
            )
        if not permits(caller.scopes, TokenScope.READ):
            detail = (
                f"token {caller.name!r} lacks the scope 'read', which the console needs; use another token"
            )
            raise Problem(403, "missing-scope", detail, needed="read", granted=sorted(caller.scopes))
        session_id, session = self.sessions.open(digest)
        return session_id, session, caller

    def find(self, session_id: str) -> tuple[Session, Caller] | None:
        """An open session and its caller; None = it has ended, or its token is no longer accepted."""
        session = self.sessions.find(session_id)
        if session is None:
            return None
        caller = self.token_store.caller(session.token)
        if caller is None:
            self.sessions.close(session)
            return None
        return session, caller

    def is_open(self, session: Session) -> bool:
        """Whether a session found before is still open and its token accepted."""
        return self.sessions.is_open(session) and self.token_store.caller(session.token) is not None
