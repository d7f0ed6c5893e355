"""Single bytes are located in every layout that engines use."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from canary_kernels.layout import Plane
from canary_obs.runtime.device.byte_address import locate_byte
from tests.kernels import pools


@pytest.mark.parametrize("layout", pools.LAYOUTS)
def test_every_byte_of_every_slot_is_the_one_of_the_layout(layout: Callable[[str], pools.Pool]) -> None:
    pool = layout("cpu")
    for source in pool.sources:
        views = pool.bytes if source.plane is Plane.DATA else pool.scales
        for slot in (0, 1, 2, 5, 13, pools.SLOTS - 1):
            expected = views[source.part, source.layer][slot].flatten().tolist()
            found = [locate_byte(source, slot, byte).read() for byte in range(source.slot_bytes)]
            assert found == expected
