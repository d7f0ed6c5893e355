"""Check that a forward wrote one layer: its bytes of the new slots must differ from those before."""

from canary_kernels.layer_write.op import WITNESSES, allocate_witness, check_layer, note_layer

__all__ = ["WITNESSES", "allocate_witness", "check_layer", "note_layer"]
