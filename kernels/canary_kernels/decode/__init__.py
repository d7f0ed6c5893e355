"""Keep what the checks of a decode read, and advance what is known of its requests' tokens."""

from canary_kernels.decode.op import keep_decode
from canary_kernels.decode.steps import DecodeMemory, DecodeStep, Known

__all__ = ["DecodeMemory", "DecodeStep", "Known", "keep_decode"]
