"""Which backend is chosen, and what is logged without numba."""

import sys

import pytest
import torch

from canary_kernels.checks import Backend
from canary_obs.errors import ConfigurationError
from canary_obs.runtime.device.backend import choose_backend

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "device", "backend"),
    [
        ("auto", CPU, Backend.NUMBA),
        ("numba", CPU, Backend.NUMBA),
        ("torch", CPU, Backend.TORCH),
        ("triton", CPU, Backend.TRITON),
        ("auto", CUDA, Backend.TRITON),
        ("triton", CUDA, Backend.TRITON),
    ],
)
def test_chosen(name, device, backend):
    assert choose_backend(name, device) is backend


@pytest.mark.parametrize("name", ["torch", "numba"])
def test_backends_of_the_cpu_are_refused_on_a_gpu(name):
    with pytest.raises(ConfigurationError, match="Use triton or auto"):
        choose_backend(name, CUDA)


def test_without_numba_auto_warns_and_uses_torch(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "canary_kernels.verify.cpu", None)
    assert choose_backend("auto", CPU) is Backend.TORCH
    assert "numba can't be imported" in caplog.text
    with pytest.raises(ConfigurationError, match=r"Install canary-obs\[engine\], or use torch"):
        choose_backend("numba", CPU)
