"""Follow the chain over each request's own tokens, on the device or from host lists."""

from canary_kernels.digest.op import (
    DigestMemory,
    FedTokens,
    TokenLists,
    extend_chains,
    follow_inputs,
    follow_lists,
)

__all__ = ["DigestMemory", "FedTokens", "TokenLists", "extend_chains", "follow_inputs", "follow_lists"]
