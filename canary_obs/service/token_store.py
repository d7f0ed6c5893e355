"""Bearer tokens with names and scopes, read again when their file changes. Only digests are kept."""

from __future__ import annotations

import hmac
import logging
import os
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated

import msgspec
from msgspec import Meta

from canary_obs.binding import TOKEN_REMEDY, check_bind, weakness_of
from canary_obs.config import PREFIX, ServiceConfig
from canary_obs.errors import ConfigurationError
from canary_obs.service.route_policy import TokenScope
from canary_obs.transport.keys import file_version

log = logging.getLogger("canary_obs")
DEFAULT_NAME = "default"  # of KV_CANARY_TOKEN
# INJECT is granted only to named tokens, in the tokens file.
DEFAULT_SCOPES = (TokenScope.READ, TokenScope.OPERATE)

# The group may read: that is how Kubernetes lets a container read a mounted secret (fsGroup).
_FORBIDDEN = stat.S_IRWXO | stat.S_IWGRP | stat.S_IXGRP

_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
_Secret = Annotated[str, Meta(pattern=r"^[\x21-\x7e]{16,512}$")]


class Grant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of the tokens file."""

    token: _Secret
    scopes: Annotated[tuple[TokenScope, ...], Meta(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sent a request; `name` None = the service runs without tokens."""

    name: str | None
    scopes: frozenset[TokenScope]


ANONYMOUS = Caller(name=None, scopes=frozenset(DEFAULT_SCOPES))


Callers = dict[bytes, Caller]  # by SHA-256 of the token


class TokenStore:
    """All accepted tokens. Without any, every caller is ANONYMOUS. Not thread-safe: one event loop uses it.

    The file is looked at whenever somebody is to be recognised. One that cannot be used changes nothing.
    """

    def __init__(self, config: ServiceConfig) -> None:
        """Raises ConfigurationError for an unusable tokens file, or for a wide bind without any token."""
        check_bind(config.host, config.token, config.tokens_file)
        self._path, self._single = config.tokens_file, config.token.strip()  # as secrets are often mounted
        if (
            self._single and (weakness := weakness_of(self._single)) is not None
        ):  # others on loopback call, too
            log.warning("canary_obs: %sTOKEN can be guessed: %s. %s", PREFIX, weakness, TOKEN_REMEDY)
        self._on_change: Callable[[ConfigurationError | None], None] = lambda _error: None
        self._version = file_version(self._path) if self._path else ()
        self._callers = self._accepted()

    def report_to(self, on_change: Callable[[ConfigurationError | None], None]) -> None:
        """Call with the reason when the changed file cannot be used, and with None when one can be."""
        self._on_change = on_change

    @property
    def empty(self) -> bool:
        """Whether there are no tokens."""
        return not self._callers

    def authenticate(self, authorization: str) -> Caller | None:
        """The caller with this Authorization header, None = unknown. Takes the same time for every token."""
        self._follow_file()
        if self.empty:
            return ANONYMOUS
        scheme, _, token = authorization.partition(" ")
        # ASGI servers decode headers as latin-1: encode them back to the bytes that were sent.
        found = self._find(token.strip().encode("latin-1"))
        return self._callers[found] if found is not None and scheme.lower() == "bearer" else None

    def find(self, token: str) -> bytes | None:
        """The digest of an accepted token, None = unknown. Takes the same time for every token."""
        self._follow_file()
        return self._find(token.strip().encode("utf-8", "replace"))

    def caller(self, digest: bytes) -> Caller | None:
        """Whose token has this digest; None = no accepted one."""
        self._follow_file()
        return self._callers.get(digest)

    def accepts(self, caller: Caller) -> bool:
        """Whether a caller recognised before would be now, by the same token and with the same scopes."""
        self._follow_file()
        return self.empty or any(kept is caller for kept in self._callers.values())

    def remove(self, name: str) -> None:
        """Accept a token no longer, nor the sessions that were opened with it."""
        self._callers = {digest: caller for digest, caller in self._callers.items() if caller.name != name}

    def _find(self, token: bytes) -> bytes | None:
        digest, found = sha256(token).digest(), None
        for known in self._callers:
            if hmac.compare_digest(known, digest):
                found = known
        return found

    def _follow_file(self) -> None:
        if not self._path or (version := file_version(self._path)) == self._version:
            return
        self._version = version  # before reading, so that a bad file is reported once
        try:
            found = self._accepted()
        except ConfigurationError as error:
            log.error("canary_obs: %s; the tokens read before remain valid", error)
            self._on_change(error)
            return
        # A caller that is as before stays the same object: `accepts`.
        before = self._callers
        self._callers = {key: before[key] if before.get(key) == new else new for key, new in found.items()}
        names = ", ".join(sorted(str(caller.name) for caller in found.values()))
        log.warning("canary_obs: %s has changed; the tokens are now those of %s", self._path, names)
        self._on_change(None)

    def _accepted(self) -> Callers:
        callers: Callers = {}
        if self._single:
            _add(callers, DEFAULT_NAME, Grant(token=self._single, scopes=DEFAULT_SCOPES), self._path)
        for name, grant in _read(self._path).items() if self._path else ():
            _add(callers, name, grant, self._path)
        return callers


def _add(callers: Callers, name: str, grant: Grant, path: str) -> None:
    digest = sha256(grant.token.encode()).digest()
    if digest in callers or name in {caller.name for caller in callers.values()}:
        rule = f"{name!r} has the name or the token of another entry ({DEFAULT_NAME!r} is {PREFIX}TOKEN)"
        raise _refusal(path, rule, "Give every entry a name and a token of its own.")
    callers[digest] = Caller(name=name, scopes=frozenset(grant.scopes))


def _read(path: str) -> Mapping[str, Grant]:
    try:
        content = tomllib.loads(_text_of(path))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else type(error).__name__
        raise _refusal(path, f"cannot be read: {reason}", "Name a readable TOML file.") from None
    remedy = '[NAME] token = "16 or more visible characters" scopes = ["read", "operate", "inject"]'
    try:
        grants = msgspec.convert(content, dict[_Name, Grant])
    except msgspec.ValidationError as error:
        raise _refusal(path, str(error), f"Write tables like {remedy}.") from None
    for name, grant in grants.items():
        if (weakness := weakness_of(grant.token)) is not None:
            raise _refusal(path, f"{name!r}: {weakness}", TOKEN_REMEDY)
    if not grants:
        raise _refusal(path, "contains no token", f"Add {remedy}, or remove the setting.")
    return grants


def _text_of(path: str) -> str:
    # Without O_NONBLOCK, opening a named pipe would block the start until another process writes to it.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise _refusal(path, "is not a file", "Name a readable TOML file.")
        if mode & _FORBIDDEN:
            rule = f"has mode {stat.S_IMODE(mode):04o}; others must not read it, nor the group write it"
            raise _refusal(path, rule, f"Run: chmod 600 {path}")
        return file.read().decode()


def _refusal(path: str, rule: str, remedy: str) -> ConfigurationError:
    return ConfigurationError("tokens_file", path, rule, remedy)
