"""Caches whose entries are not those of one token each: compressed ones (DeepSeek-V4), and pooled ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

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


def entry_tokens(runner: Any, specs: Sequence[Any], block_size: int, kernel_block_size: int) -> int:
    """Tokens of each entry of a group's layers: 1, or more where entries can be followed.

    Raises UnsupportedEngine where they cannot: a record needs all tokens of its entry when that is written.
    """
    counts = {tokens_per_entry(spec) for spec in specs}
    if counts == {1}:
        return 1
    ratio = counts.pop()
    obstacles = {
        "blocks that it does not divide": counts or not isinstance(ratio, int) or block_size % ratio,
        "a block table of other blocks": kernel_block_size != block_size,
        "the V2 model runner": hasattr(runner, "block_tables"),
        "a GPU": runner.device.type != "cpu",
        "asynchronous scheduling": getattr(runner, "use_async_scheduling", False),
        "speculative decoding": runner.speculative_config is not None,
        "a KV connector": getattr(runner.vllm_config, "kv_transfer_config", None) is not None,
    }
    if met := [text for text, there in obstacles.items() if there]:
        raise UnsupportedEngine(
            f"it keeps an entry per {ratio} tokens, which is not followed with {', '.join(met)}"
        )
    return int(ratio)


class LayerKind(NamedTuple):
    """What sets layers of one of vLLM's groups apart. Plain ones sort first."""

    entry: Any  # tokens per entry; 0 = one, as in plain ones
    compressing: bool = False  # what a compressor keeps of tokens
    indexer: bool = False  # of sparse attention's indexer


def checked_alike(layers: Iterable[str], kind_of: Callable[[str], LayerKind]) -> list[list[str]]:
    """The layers of one group, apart by their kinds."""
    found: dict[LayerKind, list[str]] = {}
    for name in layers:
        found.setdefault(kind_of(name), []).append(name)
    return [found[kind] for kind in sorted(found)]
