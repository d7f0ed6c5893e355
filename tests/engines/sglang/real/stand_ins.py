"""What SGLang asks of a machine with CUDA before it starts on a CPU: stand-ins, put in place before it."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import torch


class _Absent(types.ModuleType):
    """A module that has every name, each as an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


def install() -> None:
    """Idempotent. Call before SGLang is imported; vLLM cannot be used in the same process."""
    if "sglang" in sys.modules:
        return
    # torchvision's wheels want CUDA builds of torch. That it is absent is cached before it is stood in for.
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()
    inner = ("", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional")
    for name in (*inner, ".io", ".ops"):
        stand_in("torchvision" + name)
    stand_in("vllm")
    stand_in("vllm._custom_ops").rotary_embedding = _rotary_embedding


def stand_in(name: str) -> Any:
    """A module of this name that has every name, put where imports find it."""
    module = sys.modules[name] = _Absent(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, module)
    return module


def _rotary_embedding(
    positions: Any, query: Any, key: Any, head_size: int, cos_sin_cache: Any, is_neox: bool
) -> None:
    """SGLang's fallback on a CPU takes this from vLLM."""
    cos, sin = (part[:, None] for part in cos_sin_cache[positions.flatten()].float().chunk(2, -1))
    width = 2 * cos.shape[-1]
    for tensor in (query, key):
        if tensor is None:
            continue
        heads = tensor.view(positions.numel(), -1, head_size)
        rotated = heads[..., :width].float()
        first, second = rotated.chunk(2, -1) if is_neox else (rotated[..., ::2], rotated[..., 1::2])
        parts = first * cos - second * sin, second * cos + first * sin
        joined = torch.cat(parts, -1) if is_neox else torch.stack(parts, -1).flatten(-2)
        heads[..., :width] = joined.to(tensor.dtype)


def attention() -> None:
    """What SGLang's torch backend lacks. Idempotent.

    It has no way for MLA, whose absorbed form runs there, reads layers with a sliding window at the slots
    of the full ones.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    absorbed = handlers.AttnForwardMethod.MLA
    handlers.AttentionBackendRegistry.register("torch_native", lambda attention, batch: absorbed)
    for name in ("forward_extend", "forward_decode"):
        method = getattr(TorchNativeAttnBackend, name)
        if not hasattr(method, "joins"):
            setattr(TorchNativeAttnBackend, name, _joining(_translating(method)))


def attention_over_data() -> None:
    """What ranks lack whose attention is parallel over data.

    SGLang takes its own functions for CPUs on some only. Its torch backend has no length for the requests
    that pad their batches.
    """
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value = lambda self: 1  # type: ignore[method-assign]
    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        setattr(GroupCoordinator, name, getattr(GroupCoordinator, "_" + name))


def _joining(method: Any) -> Any:
    """The method with the rotary parts, which MLA hands in apart, joined to the others."""

    def joined(
        self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True,
        q_rope: Any = None, k_rope: Any = None, **_: Any,
    ) -> Any:  # fmt: skip
        if q_rope is not None:
            q, k = torch.cat([q, q_rope], -1), torch.cat([k, k_rope], -1)
        return method(self, q, k, v, layer, batch, save_kv_cache)

    joined.joins = True  # type: ignore[attr-defined]
    return joined


def _translating(method: Any) -> Any:
    """The method, given a request table of window slots for a layer with a window."""

    def translated(self: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        pool, requests = self.token_to_kv_pool, self.req_to_token_pool
        layers = getattr(pool, "layers_mapping", None)
        if not self.use_sliding_window_kv_pool or layers is None or not layers[layer.layer_id][1]:
            return method(self, q, k, v, layer, *args, **kwargs)
        table = pool.translate_loc_from_full_to_swa(requests.req_to_token.long())
        self.req_to_token_pool = types.SimpleNamespace(req_to_token=table)
        try:
            return method(self, q, k, v, layer, *args, **kwargs)
        finally:
            self.req_to_token_pool = requests

    return translated
