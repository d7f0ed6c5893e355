"""Write in Triton: what a forward is given for its new tokens, and whether that is as expected."""

from __future__ import annotations

import triton
import triton.language as tl

from canary_kernels import layout
from canary_kernels.jit import NUM_REASONS, report

HEAD = tl.constexpr(int(layout.Phase.HEAD))
TOKEN_REASON = tl.constexpr(int(layout.Reason.WRITE_TOKEN))
POSITION_REASON = tl.constexpr(int(layout.Reason.WRITE_POSITION))


@triton.jit
def load_new(input_ids, out_slots, positions, expected_ids, place, mask, HAS_EXPECTED: tl.constexpr):
    """int64: the new tokens, their slots, given positions, and what the oracle expects, if there is one."""
    token = tl.load(input_ids + place, mask=mask, other=0).to(tl.int32).to(tl.int64)
    slot = tl.load(out_slots + place, mask=mask, other=-1).to(tl.int64)
    given = tl.load(positions + place, mask=mask, other=0).to(tl.int64)
    wanted = token
    if HAS_EXPECTED:
        wanted = tl.load(expected_ids + place, mask=mask, other=-1).to(tl.int64)
    return token, slot, given, wanted


@triton.jit
def check_inputs(buffers, slot, position, given, token, wanted, request, mask, HAS_EXPECTED: tl.constexpr):
    """Compare the model's inputs with the positions that continue the chain and the oracle's tokens."""
    wrong = mask & (given != position)
    if tl.max(wrong.to(tl.int32)) > 0:
        lane = HEAD * NUM_REASONS + POSITION_REASON
        report(buffers, wrong, lane, slot, position, request, 0, position, given)
    if HAS_EXPECTED:
        wrong = mask & (wanted >= 0) & (wanted != token)
        if tl.max(wrong.to(tl.int32)) > 0:
            lane = HEAD * NUM_REASONS + TOKEN_REASON
            report(buffers, wrong, lane, slot, position, request, 0, wanted, token)
