"""vLLM's compressors of DeepSeek-V4: where their entries and the states that they keep of tokens lie."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from canary_kernels.buffers import KVSource
from canary_obs.errors import UnsupportedEngine
from canary_obs.kv_locations.split_pages import SplitPages

# Bytes of an entry, and of an index key -> of its scales, and of those that only pad them.
_SCALES = {584: (8, 1), 132: (4, 0)}
_VALUE = 0.75


def keeps_compressor_states(runner: Any, name: str) -> bool:
    """Whether the layer of this name is what a compressor keeps of each token until its entry is written."""
    layer = runner.compilation_config.static_forward_context[name]
    return any(base.__name__ == "CompressorStateCache" for base in type(layer).__mro__)


def keeps_compressed_keys(runner: Any, name: str) -> bool:
    """Whether the layer of this name is an indexer's cache of keys that stand for several tokens each."""
    layer = runner.compilation_config.static_forward_context[name]
    return any(base.__name__ == "DeepseekV4IndexerCache" for base in type(layer).__mro__)


def is_of_indexer(name: str) -> bool:
    """Whether vLLM's name is that of an indexer's keys, or of its compressor's states."""
    return ".indexer." in f".{name}."


def compressed_by(runner: Any, name: str) -> int:
    """Tokens of the entries that the compressor with these states writes."""
    layer = runner.compilation_config.static_forward_context[name]
    return int(_compressor(runner, "state_cache", layer).compress_ratio)


def entry_sources(runner: Any, name: str, page_size: int, number: int) -> tuple[KVSource, ...]:
    """Of a layer's entries or index keys, `page_size` in each block, reported under this layer number.

    Raises UnsupportedEngine where the compressor that fills them writes something else.
    """
    cache = runner.compilation_config.static_forward_context[name].kv_cache
    scales = _SCALES.get(cache.shape[-1])
    if scales is None or not _is_paged(cache, page_size) or cache.dtype is not torch.uint8:
        raise UnsupportedEngine(
            f"the entries of {name} lie in shape {tuple(cache.shape)} of {cache.dtype}: not packed blocks of "
            f"{page_size} entries"
        )
    writes = CompressorWrites(runner, _compressor(runner, "k_cache_prefix", name))
    split = SplitPages(
        name=f"the entries of {name}", pages=cache.view(cache.shape[0], -1), page_size=page_size,
        data_bytes=cache.shape[-1] - scales[0], scale_bytes=scales[0], padding=scales[1],
    )  # fmt: skip
    return split.sources(number, writes.write_entry)


def state_sources(runner: Any, name: str, page_size: int, number: int) -> tuple[KVSource, ...]:
    """Of what a compressor keeps of each token, reported under this layer number; raises as above."""
    layer = runner.compilation_config.static_forward_context[name]
    cache = layer.kv_cache
    if not _is_paged(cache, page_size):
        raise UnsupportedEngine(
            f"the states of {name} lie in shape {tuple(cache.shape)} with strides {cache.stride()}: not "
            f"blocks of {page_size} tokens, one row each"
        )
    writes = CompressorWrites(runner, _compressor(runner, "state_cache", layer))
    pages = cache.view(cache.shape[0], -1).view(torch.uint8)
    split = SplitPages(
        name=f"the states of {name}", pages=pages, page_size=page_size,
        data_bytes=pages.shape[1] // page_size, scale_bytes=0,
    )  # fmt: skip
    return split.sources(number, writes.write_state)


def _is_paged(cache: Tensor, page_size: int) -> bool:
    return cache.dim() == 3 and cache.shape[1] == page_size and cache[0].is_contiguous()


def _compressor(runner: Any, attribute: str, value: Any) -> Any:
    """The compressor with this attribute. Raises UnsupportedEngine if it is not one, or not on a CPU."""
    if runner.device.type != "cpu":
        raise UnsupportedEngine(
            "it is filled by a compressor of DeepSeek-V4, whose layout was confirmed on a CPU only: a write "
            "to confirm it was not tried on a GPU"
        )
    found = [each for each in runner.model.modules() if _has(each, attribute, value)]
    if len(found) != 1:
        raise UnsupportedEngine(f"{len(found)} compressors write it: nobody confirms its layout")
    return found[0]


def _has(module: Any, attribute: str, value: Any) -> bool:
    own = getattr(module, attribute, None)
    return (
        hasattr(module, "compress_ratio")
        and hasattr(module, "state_cache")
        and (own == value if isinstance(value, str) else own is value)
    )


class CompressorWrites:
    """Writes of made-up tokens through one compressor's own forward, at the first positions of a request."""

    def __init__(self, runner: Any, compressor: Any) -> None:
        self._device, self._compressor = runner.device, compressor
        self._rotary = _rotary_of(runner, compressor)
        cache: Tensor = compressor.state_cache.kv_cache
        blocks = -(-int(compressor.compress_ratio) // cache.shape[1])
        # What a run leaves on its way to an entry must not lie where states are.
        self._scratch = torch.zeros((blocks, *cache.shape[1:]), dtype=cache.dtype, device=cache.device)

    def write_state(self, slot: int) -> None:
        """One token, which completes no run."""
        self._run([slot], [-1])

    def write_entry(self, slot: int) -> None:
        """All tokens of a run; the last one writes the entry."""
        count = int(self._compressor.compress_ratio)
        cache, kept = self._compressor.state_cache, self._compressor.state_cache.kv_cache
        cache.kv_cache = self._scratch
        try:
            self._run(list(range(count)), [-1] * (count - 1) + [slot])
        finally:
            cache.kv_cache = kept

    def _run(self, states: list[int], entries: list[int]) -> None:
        from vllm.models.deepseek_v4.compressor import CompressorMetadata

        compressor, count = self._compressor, len(states)
        cache: Tensor = compressor.state_cache.kv_cache
        blocks = torch.arange(cache.shape[0], dtype=torch.int32, device=self._device)
        given = CompressorMetadata(
            block_table=blocks[None], slot_mapping=self._longs(states), block_size=cache.shape[1],
            token_to_req_indices=torch.zeros(count, dtype=torch.int32, device=self._device),
        )  # fmt: skip
        metadata = {
            compressor.state_cache.prefix: given,
            compressor.k_cache_prefix: SimpleNamespace(slot_mapping=self._longs(entries)),
        }
        scores = torch.full((count, cache.shape[2]), _VALUE, dtype=torch.float32, device=self._device)
        with _forward_with(metadata):
            compressor(scores, self._longs(list(range(count))), self._rotary)

    def _longs(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _rotary_of(runner: Any, compressor: Any) -> Any:
    """The rotation that the attention layer of a compressor calls it with."""
    for module in runner.model.modules():
        if getattr(module, "compressor", None) is compressor and hasattr(module, "rotary_emb"):
            return module.rotary_emb
        indexer = getattr(module, "indexer", None)
        if indexer is not None and getattr(indexer, "compressor", None) is compressor:
            return module.indexer_rotary_emb
    raise UnsupportedEngine("no attention layer has the compressor that writes it")


@contextmanager
def _forward_with(metadata: dict[str, Any]) -> Iterator[None]:
    from vllm.forward_context import override_forward_context

    with override_forward_context(SimpleNamespace(attn_metadata=metadata)):
        yield
