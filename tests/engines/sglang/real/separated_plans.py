"""What the two sides of a pair of servers are told to do, and what they found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


class Plan(msgspec.Struct, kw_only=True):
    """What both processes are to do with one pair."""

    model: str  # a folder
    folder: str  # where the outcome is written
    backend: str = "nixl"
    settings: dict[str, Any] = {}
    pools: str = ""  # "compressed": those of DeepSeek-V4; "keys": those of DeepSeek-V3.2
    ranks: int = 1  # tensor ranks of the prefill side
    decode_ranks: int = 0  # and of the decode side; 0 = as many
    endpoint: str = "inproc"  # of the service that all ranks report to
    retracting: bool = False  # the decode server takes requests back, copies them, and one copy is damaged
    retracting_last: bool = False  # it takes back none but the last requests, of which no copy is damaged
    own_tree: bool = False  # the decode server has a prefix cache, and is asked the sound requests twice
    gpus_hooks: bool = False  # checks that follow the launch of a forward
    host_tier: bool = False  # the prefill server has one, is asked twice, and what lies there is damaged
    tokens: int = 8  # of each answer; more = more requests are decoded together, and one can be taken back
    damaged: list[str]  # groups of which a slot is damaged before it is sent, after sound requests
    last: list[dict[str, list[int]]] = []  # more requests; each of these begin when those before have ended

    def ranks_of(self, role: str) -> int:
        """Of one side."""
        return (self.decode_ranks if role == "decode" else 0) or self.ranks

    @property
    def damaged_rank(self) -> int:
        """Of the prefill side. Of latent KV, which all ranks hold, its first one sends to a narrower side."""
        return 0 if self.decode_ranks else self.ranks - 1

    def outcome(self, role: str, rank: int) -> Path:
        """Where a rank writes what it found."""
        return Path(self.folder) / f"{role}{rank}.json"


class Found(msgspec.Struct, kw_only=True, frozen=True):
    """One violation."""

    group: str
    reason: str
    phase: str
    part: str | None
    slot: int
    position: int | None
    peer: str | None
    request: str | None


class Outcome(msgspec.Struct, kw_only=True):
    """What one of them says: after the sound requests, and at its end."""

    answers: dict[str, list[int]]
    sound: list[Found]
    sound_state: list[str]  # and its reasons
    violations: list[Found]  # of what was damaged before it was sent
    last: list[Found]  # of what came after that
    state: list[str]
    compared: int
    without: int
    prompts: int  # tokens of the prompts that were sent
    damaged: dict[str, tuple[str, int]]  # by group, its request and the position in its prompt
    taken_back: int  # slots that came back from the host with a record
    taken_back_without: int
    drafts_restored: list[int]  # slots that came back to a server with drafts, those with their drafts' KV
    hits: dict[str, int]  # tokens found in its own cache, by group
    copy_damaged: list[tuple[str, int]]  # a group's slot that came back from the host damaged
    port: int
