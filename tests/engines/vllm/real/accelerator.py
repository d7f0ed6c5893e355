"""Importing it lets Mooncake's worker ask which device it is on; a CPU build of PyTorch has no answer.

Workers that are processes of their own import it for `OfWorkers`, which vLLM gives them as an extension.
"""

from __future__ import annotations

import torch


class OfWorkers:
    """Adds nothing to a worker."""


torch.accelerator.current_device_index = lambda: 0
