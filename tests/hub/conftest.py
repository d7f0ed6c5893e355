from __future__ import annotations

import pytest

from tests.hub.harness import Harness


@pytest.fixture
def harness():
    return Harness()
