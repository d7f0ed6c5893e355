"""Write the records of new tokens, check the forward's inputs, and take records back."""

from canary_kernels.write.op import reset_slots, write_identities

__all__ = ["reset_slots", "write_identities"]
