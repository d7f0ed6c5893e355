"""Linear attention on a CPU: SGLang has the gated delta rule and its convolution in Triton only."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

_CHUNK = 64  # tokens between two states that SGLang keeps for its prefix cache


def install() -> None:
    """Idempotent. Call after SGLang is imported."""
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.layers.attention.linear.kernels import gdn_triton
    from sglang.srt.models import qwen2_moe, qwen3_next

    gdn_backend.causal_conv1d_fn = _convolve_prompts
    gdn_backend.causal_conv1d_update = _convolve_tokens
    gdn_backend.fused_gdn_gating = _gates
    gdn_triton.chunk_gated_delta_rule = _delta_rule_of_prompts
    gdn_triton.TritonGDNKernel.packed_decode = _delta_rule_of_tokens
    for kind in (qwen3_next.RMSNormGated, qwen3_next.FusedRMSNormGated):
        kind.forward = _gated_norm
    qwen2_moe.fused_gate_sigmoid_mul_add = _add_shared_expert


def _convolved(window: Tensor, weight: Tensor, bias: Tensor | None, activation: Any) -> Tensor:
    found = functional.conv1d(
        window[None].float(),
        weight[:, None].float(),
        None if bias is None else bias.float(),
        groups=weight.shape[0],
    )[0]
    return functional.silu(found) if activation in ("silu", "swish", True) else found


def _convolve_prompts(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_states: Tensor, query_start_loc: Tensor,
    cache_indices: Any = None, has_initial_state: Any = None, activation: Any = "silu", **_: Any,
) -> Tensor:  # fmt: skip
    out, kept, starts = torch.empty_like(x), weight.shape[1] - 1, query_start_loc.tolist()
    for number, (start, stop) in enumerate(pairwise(starts)):
        state = conv_states[cache_indices[number]]
        before = state[:, -kept:] if bool(has_initial_state[number]) else torch.zeros_like(state[:, -kept:])
        window = torch.cat([before, x[:, start:stop]], 1)
        out[:, start:stop] = _convolved(window, weight, bias, activation).to(x.dtype)
        state[:, -kept:] = window[:, -kept:]
    return out


def _convolve_tokens(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None,
    conv_state_indices: Any = None, **_: Any,
) -> Tensor:  # fmt: skip
    out, kept = torch.empty_like(x), weight.shape[1] - 1
    for number in range(x.shape[0]):
        slot = int(conv_state_indices[number])
        if slot >= 0:
            window = torch.cat([conv_state[slot][:, -kept:], x[number][:, None]], 1)
            out[number] = _convolved(window, weight, bias, activation)[:, 0].to(x.dtype)
            conv_state[slot][:, -kept:] = window[:, -kept:]
    return out


def _gates(log_decay: Tensor, a: Tensor, b: Tensor, bias: Tensor, *_: Any, **__: Any) -> Any:
    decay = -log_decay.float().exp() * functional.softplus(a.float() + bias.float())
    return decay[None], b.float().sigmoid()[None]


def _delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """One sequence, token by token; `state` [heads, values, keys] in place. Also those kept on the way."""
    heads = value.shape[1]
    query, key = (
        functional.normalize(part.float(), dim=-1).repeat_interleave(heads // part.shape[1], 1)
        for part in (query, key)
    )
    out, current, kept = torch.empty_like(value), state.float(), list[Tensor]()
    for token in range(query.shape[0]):
        if token % _CHUNK == 0:
            kept.append(current.clone())
        current = current * decay[token].exp()[:, None, None]
        seen = torch.einsum("hvk,hk->hv", current, key[token])
        added = beta[token][:, None] * (value[token].float() - seen)
        current = current + added[:, :, None] * key[token][:, None]
        answer = torch.einsum("hvk,hk->hv", current, query[token] * query.shape[-1] ** -0.5)
        out[token] = answer.to(value.dtype)
    state.copy_(current.to(state.dtype))
    return out, kept


def _delta_rule_of_prompts(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, cu_seqlens: Tensor,
    initial_state_indices: Any = None, **_: Any,
) -> Any:  # fmt: skip
    out, kept, starts = torch.empty_like(v), list[Tensor](), cu_seqlens.tolist()
    for number, (start, stop) in enumerate(pairwise(starts)):
        part = slice(start, stop)
        state = initial_state[int(initial_state_indices[number])]
        tokens = [each[0, part] for each in (q, k, v, g, beta)]
        out[0, part], states = _delta_rule(*tokens, state)
        kept += states
    return out, None, torch.stack(kept)[None] if kept else None


def _delta_rule_of_tokens(
    _: Any, mixed_qkv: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor,  # noqa: N803
    ssm_states: Tensor, cache_indices: Any, num_v_heads: int, head_v_dim: int, **__: Any,
) -> Tensor:  # fmt: skip
    count, width = mixed_qkv.shape[0], ssm_states.shape[-1]
    values = num_v_heads * head_v_dim
    keys = (mixed_qkv.shape[1] - values) // 2
    decay, beta = _gates(A_log, a, b, dt_bias)
    out = mixed_qkv.new_zeros(1, count, num_v_heads, head_v_dim)
    for number in range(count):
        slot, one = int(cache_indices[number]), slice(number, number + 1)
        if slot >= 0:
            query, key, value = mixed_qkv[one].split([keys, keys, values], 1)
            parts = query.view(1, -1, width), key.view(1, -1, width), value.view(1, num_v_heads, head_v_dim)
            out[0, one], _kept = _delta_rule(*parts, decay[0, one], beta[0, one], ssm_states[slot])
    return out


def _gated_norm(self: Any, x: Tensor, z: Tensor | None = None) -> Tensor:
    before = getattr(self, "norm_before_gate", True)
    found = x.float() if z is None or before else x.float() * functional.silu(z.float())
    found = found * torch.rsqrt(found.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.float()
    if z is not None and before:
        found = found * functional.silu(z.float())
    return found.to(x.dtype)


def _add_shared_expert(x: Tensor, weight: Tensor, shared: Tensor, out: Tensor) -> None:
    out += (x.float() @ weight.float()).sigmoid()[:, None].to(out.dtype) * shared
