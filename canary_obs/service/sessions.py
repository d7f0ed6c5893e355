"""Browser sessions: a random id in a cookie, everything else in memory. A session ends with the process."""

from __future__ import annotations

import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from urllib.parse import urlsplit

from starlette.requests import cookie_parser

COOKIE = "kv_canary_session"
CSRF_HEADER = "x-csrf-token"
SESSIONS_PER_TOKEN = 16  # beyond it a new one ends the token's oldest
IDLE_SECONDS = 3600.0  # a session without requests ends after so long
_ID_BYTES = 32


@dataclass(slots=True, kw_only=True)
class Session:
    """One signed-in browser. Times are the store's clock, in seconds, but for `ends_ns`."""

    token: bytes  # digest of the token that it was opened with
    csrf: str  # repeated by its write requests in CSRF_HEADER
    ends_at: float
    ends_ns: int  # the same as wall time, for display
    used_at: float

    def permits_write(self, csrf: str) -> bool:
        """Whether a write request that repeats `csrf` comes from a page of ours."""
        return hmac.compare_digest(self.csrf.encode(), csrf.encode("latin-1", "replace"))


class SessionStore:
    """Open sessions by the digest of their id. Not thread-safe: one event loop uses it."""

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`seconds`: a session ends so long after its sign-in, used or not."""
        self.seconds, self._clock, self._wall_ns = seconds, clock, wall_ns
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()  # oldest first

    def open(self, token: bytes) -> tuple[str, Session]:
        """A new session for a token's digest; its id, which only the browser keeps."""
        now, session_id = self._clock(), secrets.token_urlsafe(_ID_BYTES)
        self._drop_ended()
        mine = [key for key, session in self._sessions.items() if session.token == token]
        for key in mine[: max(0, len(mine) - SESSIONS_PER_TOKEN + 1)]:
            del self._sessions[key]
        session = Session(
            token=token,
            csrf=secrets.token_urlsafe(_ID_BYTES),
            ends_at=now + self.seconds,
            ends_ns=self._wall_ns() + round(self.seconds * 1e9),
            used_at=now,
        )
        self._sessions[_digest(session_id)] = session
        return session_id, session

    def find(self, session_id: str) -> Session | None:
        """The open session with this id, which counts as used now; None = there is none."""
        session = self._sessions.get(_digest(session_id))
        if session is None or not self.is_open(session):
            return None
        session.used_at = self._clock()
        return session

    def is_open(self, session: Session) -> bool:
        """Whether it has neither ended by time nor by `close`."""
        now = self._clock()
        in_time = now < session.ends_at and now - session.used_at <= IDLE_SECONDS
        return in_time and any(kept is session for kept in self._sessions.values())

    def close(self, session: Session) -> None:
        """End a session; idempotent."""
        for key in [key for key, kept in self._sessions.items() if kept is session]:
            del self._sessions[key]

    def _drop_ended(self) -> None:
        for session in list(self._sessions.values()):
            if not self.is_open(session):
                self.close(session)


def cookie_name(host: str) -> str:
    """The cookie's name for a Host header. With its port: browsers do not keep ports apart."""
    try:
        port = urlsplit(f"//{host}").port
    except ValueError:
        port = None
    return COOKIE if port is None else f"{COOKIE}_{port}"


def session_id_of(cookies: str, host: str) -> str | None:
    """The session id in a Cookie header; None = there is none."""
    return cookie_parser(cookies).get(cookie_name(host))


def _digest(session_id: str) -> bytes:
    return sha256(session_id.encode("utf-8", "replace")).digest()
