"""Triton's kernels run in its interpreter where there is no GPU."""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.interpreter import quicken

    quicken()
