"""Write the records of new tokens and check the forward's inputs."""

from canary_kernels.write.op import write_identities

__all__ = ["write_identities"]
