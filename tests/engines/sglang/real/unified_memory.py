"""What unified memory asks of a machine with CUDA: attention that reads it, in plain torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engines.sglang.real import stand_ins, streams

SETTINGS: dict[str, Any] = {"enable_unified_memory": True, "attention_backend": "triton"}


def install(patch: pytest.MonkeyPatch) -> None:
    """SGLang's torch backend under the name of its Triton backend, which takes seconds per step there."""
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    stand_ins.attention()
    native: Any = TorchNativeAttnBackend

    class Reading(native):  # type: ignore[misc]
        """Translates the request table, which names slots by virtual numbers, for each layer."""

        def __init__(self, runner: Any) -> None:
            super().__init__(runner)
            self._pool, self._requests = runner.token_to_kv_pool, runner.req_to_token_pool
            self._allocator = runner.token_to_kv_pool_allocator
            self.token_to_kv_pool = _Marking(self._pool)

        def init_forward_metadata(self, batch: Any) -> None:
            written: Tensor | None = batch.out_cache_loc_virtual
            self.swa_out_cache_loc = (
                self._pool.translate_loc_from_full_to_swa(written)
                if self.use_sliding_window_kv_pool and written is not None
                else None
            )

        def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, *more: Any, **named: Any) -> Any:
            return self._read(super().forward_extend, q, k, v, layer, *more, **named)

        def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, *more: Any, **named: Any) -> Any:
            return self._read(super().forward_decode, q, k, v, layer, *more, **named)

        def _read(self, method: Any, q: Any, k: Any, v: Any, layer: Any, *more: Any, **named: Any) -> Any:
            table, layers = self._requests.req_to_token.long(), getattr(self._pool, "layers_mapping", None)
            own = (
                self._pool.translate_loc_from_full_to_swa(table)
                if layers is not None and layers[layer.layer_id][1]
                else self._allocator.translate_kv_loc(table)
            )
            self.req_to_token_pool = SimpleNamespace(req_to_token=own)
            return method(q, k, v, layer, *more, **named)

    patch.setitem(attention_registry.ATTENTION_BACKENDS, "triton", Reading)
    patch.setattr(torch.cuda, "current_stream", streams.Stream)  # what moves wait for with overlapping loops


class _Marking:
    """A pool whose writes are marked as of physical slots, which a unified pool asks for."""

    layers_mapping = None  # the request table is translated already

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def set_kv_buffer(self, layer: Any, loc: Any, *more: Any) -> None:
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        self._pool.set_kv_buffer(layer, KVWriteLoc(loc.loc, loc.swa_loc, physical=True), *more)
