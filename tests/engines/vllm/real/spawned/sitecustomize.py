"""Run by Python as it starts, where this folder is on its path: ranks of the V2 runner interpret its kernels.

vLLM spawns them, and asks Triton for a driver when it is imported.
"""

from tests.engines.vllm.real.interpreted import stand_in_driver

stand_in_driver()
