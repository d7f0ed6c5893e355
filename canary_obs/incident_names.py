"""Names of incidents, which the rank that finds damage gives: its log and the service use the same."""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime

NAMES_KEPT = 16  # by a rank: as many of the names it gave last go along with its findings
_NAME = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}", re.ASCII)


def new_name(time_ns: int) -> str:
    """A name that no other incident has: UTC time to the second, and a random part.

    time_ns: as time.time_ns() has it.
    """
    stamp = datetime.fromtimestamp(time_ns / 1e9, UTC).strftime("%Y%m%dT%H%M%SZ")
    return f"{stamp}-{secrets.token_hex(3)}"


def is_name(text: str) -> bool:
    """Whether `new_name` could have given it."""
    return _NAME.fullmatch(text) is not None
