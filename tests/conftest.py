"""What must be decided before torch and Triton are imported."""

import os

# Workers share the cores: a second OpenMP thread in each only spins.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tests.unchecked import unchecked  # noqa: F401 - a fixture
