"""Verify records: position, chain, state, digest."""

from canary_kernels.verify.op import verify_list, verify_rows

__all__ = ["verify_list", "verify_rows"]
