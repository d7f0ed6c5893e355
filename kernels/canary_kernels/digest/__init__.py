"""Follow the chain over each request's own tokens, on the device or from host lists."""

from canary_kernels.digest.op import extend_chains, extend_runs, follow_inputs, follow_lists, one_by_one
from canary_kernels.digest.steps import DigestMemory, InputTokens, TokenLists

__all__ = [
    "DigestMemory",
    "InputTokens",
    "TokenLists",
    "extend_chains",
    "extend_runs",
    "follow_inputs",
    "follow_lists",
    "one_by_one",
]
