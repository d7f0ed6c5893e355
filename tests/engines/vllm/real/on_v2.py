"""Run as a program: tests of this folder on the V2 model runner. usage: on_v2.py TEST...

Its Triton kernels run in the interpreter, which has to be chosen before vLLM is imported.
"""

from __future__ import annotations

import os
import sys

import pytest

from tests.engines.vllm.real.interpreted import stand_in_driver

if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")  # on shared cores threads wait for each other
    stand_in_driver()
    own = ["-o", "filterwarnings=", "-p", "no:cacheprovider", "-p", "no:xdist", "-q"]
    ended = pytest.main([*own, *sys.argv[1:]])
    sys.stdout.flush()
    # An ordinary exit may crash: NIXL brings a libnl of its own, which ends the system's with it.
    os._exit(ended)
