"""What SGLang's drafts ask of a machine with CUDA: attention over trees in plain torch, small kernels.

Those kernels are SGLang's own, of its Triton branch for XPUs, in plain Python or in Triton's interpreter:
TRITON_INTERPRET=1 must be set before Triton is imported.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.engines.sglang.real import plain_kernels, stand_ins

_BRANCHING = (
    "sglang.kernels.ops.speculative.spec_tree", "sglang.kernels.ops.speculative.cache_locs",
    "sglang.kernels.ops.speculative.reconstruct_tree", "sglang.srt.speculative.eagle_utils",
    "sglang.srt.speculative.spec_utils", "sglang.srt.speculative.eagle_worker_v2",
)  # fmt: skip


def install() -> None:
    """For the rest of this process; idempotent. Call before the first scheduler that drafts is built."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("drafts need TRITON_INTERPRET=1 before Triton is imported")
    if "sgl_kernel" not in sys.modules:
        speculative = stand_ins.stand_in("sgl_kernel"), stand_ins.stand_in("sgl_kernel.speculative")
        speculative[1].reconstruct_indices_from_tree_mask = _reconstruct
    for name in _BRANCHING:
        module: Any = importlib.import_module(name)
        module._is_xpu = True
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    factory: Any = DraftBackendFactory
    native: Any = TorchNativeAttnBackend
    factory.create_decode_backend = lambda self: _Steps(
        self.draft_model_runner, self.topk, self.speculative_num_steps
    )
    factory.create_draft_extend_backend = lambda self: native(self.draft_model_runner)
    from sglang.srt.models.mimo_v2_nextn import MiMoV2MTP

    several: Any = MiMoV2MTP
    several.set_embed_and_head = _share
    plain_kernels.install()
    stand_ins.attention()
    if not hasattr(native.forward_extend, "draws"):
        native.forward_extend = _verifying(native.forward_extend)


def overlap(monkeypatch: Any) -> None:
    """Let the next batch be launched before the scheduler knows this one's drafts, as on GPUs."""
    from sglang.srt.arg_groups import speculative_hook

    from tests.engines.sglang.real import streams

    streams.install()
    monkeypatch.setattr(speculative_hook, "_disable_overlap_schedule_for_cpu", lambda _: None)


def _share(self: Any, embed: Any, head: Any) -> None:
    """As MiMo-V2's draft models do, which wait for a GPU besides."""
    self.model.embed_tokens.weight, self.lm_head.weight = embed, head


def _reconstruct(
    mask: Tensor, lens: Tensor, positions: Tensor, index: Tensor, child: Tensor, sibling: Tensor, count: int,
    width: int,
) -> None:  # fmt: skip
    """SGLang takes this from its compiled kernels: the links of trees whose ancestors are known."""
    trees = mask.view(count, width, width).bool().tolist()
    for number, tree in enumerate(trees):
        above = [[node for node in range(own) if tree[own][node]] for own in range(width)]
        parents = [max(nodes) if nodes else -1 for nodes in above]
        for node in range(width):
            place = number * width + node
            children = [other for other in range(node + 1, width) if parents[other] == node]
            same = [other for other in range(node + 1, width) if parents[other] == parents[node] >= 0]
            positions[place] = len(above[node]) + int(lens[number])
            index.view(-1)[place] = place
            child.view(-1)[place] = children[0] if children else -1
            sibling.view(-1)[place] = same[0] if same else -1


def _verifying(method: Any) -> Any:
    """`forward_extend` that knows verification and the extension of drafts."""

    def forward_extend(
        self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *more: Any, **named: Any
    ) -> Any:
        mode = batch.forward_mode
        if not (mode.is_target_verify() or mode.is_draft_extend_v2()):
            return method(self, q, k, v, layer, batch, *more, **named)
        _store(self, layer, batch, k, v)
        return _attend(self, q, layer, *_of_trees(self, batch))

    forward_extend.draws = True  # type: ignore[attr-defined]
    forward_extend.joins = True  # type: ignore[attr-defined]
    return forward_extend


def _of_trees(backend: Any, batch: Any) -> tuple[list[Tensor], list[Tensor | None]]:
    """Per request: the slots read, and the mask [new tokens, slots]; None = each sees those before it."""
    table, rows = backend.req_to_token_pool.req_to_token, batch.req_pool_indices.tolist()
    slots, masks, at = list[Tensor](), list[Tensor | None](), 0
    verifies = batch.forward_mode.is_target_verify()
    width = int(batch.spec_info.draft_token_num) if verifies else 0
    custom = getattr(batch.spec_info, "custom_mask", None) if verifies else None
    for row, length in zip(rows, batch.seq_lens.tolist(), strict=True):
        total = length + width
        slots.append(table[row, :total].long())
        masks.append(None if custom is None else custom[at : at + width * total].view(width, total).bool())
        at += width * total
    return slots, masks


def _store(backend: Any, layer: Any, batch: Any, keys: Tensor, values: Tensor) -> None:
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    backend.token_to_kv_pool.set_kv_buffer(
        layer, KVWriteLoc(batch.out_cache_loc, backend.swa_out_cache_loc), keys, values
    )


def _attend(
    backend: Any, query: Tensor, layer: Any, slots: list[Tensor], masks: list[Tensor | None]
) -> Tensor:
    """Attention of equally many new tokens per request, the last of its slots.

    A layer with a sliding window may have slots of its own.
    """
    width = query.shape[0] // len(slots)
    heads = query.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
    keys = backend.token_to_kv_pool.get_key_buffer(layer.layer_id)
    values = backend.token_to_kv_pool.get_value_buffer(layer.layer_id)
    layers, window = getattr(backend.token_to_kv_pool, "layers_mapping", None), layer.sliding_window_size
    found = []
    for number, (own, mask) in enumerate(zip(slots, masks, strict=True)):
        before = own.shape[0] - width
        if mask is None:
            mask = torch.ones(width, own.shape[0]).tril(before).bool()
        if window is not None and window > -1:
            mask = mask & torch.ones(width, own.shape[0]).triu(before - window).bool()
        if layers is not None and layers[layer.layer_id][1]:
            own = backend.token_to_kv_pool.translate_loc_from_full_to_swa(own).long()
        part = heads[number * width : (number + 1) * width].movedim(1, 0)
        key, value = (cache[own].movedim(1, 0).to(part.dtype) for cache in (keys, values))
        out = scaled_dot_product_attention(
            part[None], key[None], value[None], attn_mask=mask, scale=layer.scaling, enable_gqa=True
        )[0]
        found.append(out.movedim(0, 1))
    return torch.cat(found).reshape(query.shape[0], -1)


class _Steps:
    """The steps of one drafting: step i of branch b reads its request's slots, and b's of steps up to i."""

    def __init__(self, runner: Any, branches: int, steps: int) -> None:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        self.attn_backends = []
        for step in range(steps - 1):
            made: Any = TorchNativeAttnBackend(runner)
            made.forward_decode = types.MethodType(_branching(branches, steps, step), made)
            self.attn_backends.append(made)

    def init_forward_metadata(self, batch: Any) -> None:
        """Nothing is planned."""


def _branching(branches: int, steps: int, step: int) -> Any:
    def forward_decode(self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *_: Any, **__: Any) -> Any:
        _store(self, layer, batch, k, v)
        table, slots = self.req_to_token_pool.req_to_token, list[Tensor]()
        for row, length in zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True):
            for branch in range(branches):
                first = length + branch * steps
                own = table[row, first : first + step + 1]
                slots.append(torch.cat([table[row, :length], own]).long())
        return _attend(self, q, layer, slots, [None] * len(slots))

    return forward_decode
