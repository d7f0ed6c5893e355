"""Caches whose entries are not those of one token each: compressed ones (DeepSeek-V4), and pooled ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from canary_obs.errors import UnsupportedEngine


def tokens_per_entry(spec: Any) -> Any:
    """Of a layer's cache: more than 1 in compressed ones, a fraction where a token has several entries.

    1 for states, too, which have no entries of tokens (vLLM gives them -1).
    """
    found = getattr(spec, "tokens_per_state", getattr(spec, "compress_ratio", 1))
    return 1 if found == -1 else found


def check_an_entry_is_a_token(specs: Iterable[Any]) -> None:
    """Raises UnsupportedEngine for specs whose slot numbers are not those of tokens."""
    if counts := sorted({count for spec in specs if (count := tokens_per_entry(spec)) != 1}):
        tokens = ", ".join(map(str, counts))
        raise UnsupportedEngine(
            f"it keeps an entry per {tokens} tokens, so that its slots are not those of tokens"
        )


def checked_alike(
    layers: Sequence[str], keys: Collection[str], spec_of: Callable[[str], Any]
) -> list[list[str]]:
    """The layers of one group: plain ones, index keys, and those whose entries are not tokens."""
    others = {name for name in layers if tokens_per_entry(spec_of(name)) != 1}
    plain = [name for name in layers if name not in keys and name not in others]
    found = plain, [name for name in layers if name in keys and name not in others]
    return [own for own in (*found, [name for name in layers if name in others]) if own]
