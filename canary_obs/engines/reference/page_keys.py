"""Keys of prefixes in whole pages, as the host tier computes them."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from canary_obs.reference_engine.cache.host_tier import KEY_BYTES
from canary_obs.reference_engine.cache.radix_cache import Tokens
from canary_obs.reference_engine.scheduling.request import Request


class PageKeys:
    """Those of a request are kept while it runs."""

    def __init__(self, page: int) -> None:
        self._page = page
        self._known: dict[int, tuple[Any, list[bytes]]] = {}  # by serial

    def of(self, request: Request, tokens: Tokens) -> list[bytes]:
        """Of a request with these tokens so far."""
        state, keys = self._known.setdefault(request.serial, (hasher(), []))
        return self._extend(state, keys, tokens)

    def list_of(self, tokens: Tokens) -> list[bytes]:
        """Of any tokens from position 0 on."""
        return self._extend(hasher(), [], tokens)

    def forget(self, request: Request) -> None:
        """It will not be asked for again."""
        self._known.pop(request.serial, None)

    def _extend(self, state: Any, keys: list[bytes], tokens: Tokens) -> list[bytes]:
        page = self._page
        for start in range(len(keys) * page, tokens.size - page + 1, page):
            state.update(tokens[start : start + page].tobytes())
            keys.append(state.digest())
        return keys


def hasher() -> Any:
    """Its digest is the key of all that was put in so far."""
    return blake2b(digest_size=KEY_BYTES)
