"""Single bytes are located in every layout that engines use."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from canary_kernels.buffers import Sharding
from canary_kernels.layout import Plane
from canary_obs.engine_api.views import GroupView
from canary_obs.runtime.device.byte_address import locate_byte, read_slot
from tests.kernels import pools
from tests.kernels.test_sharding import PAGE, PAGES, of_rank, whole


@pytest.mark.parametrize("layout", pools.LAYOUTS)
def test_every_byte_of_every_slot_is_the_one_of_the_layout(layout: Callable[[str], pools.Pool]) -> None:
    pool = layout("cpu")
    for source in pool.sources:
        views = pool.bytes if source.plane is Plane.DATA else pool.scales
        for slot in (0, 1, 2, 5, 13, pools.SLOTS - 1):
            expected = views[source.part, source.layer][slot].flatten().tolist()
            found = [locate_byte(source, slot, byte).read() for byte in range(source.slot_bytes)]
            assert found == expected


def test_bytes_of_slots_that_are_spread_over_ranks_are_read_on_their_own_rank() -> None:
    cache, sharding = whole("cpu"), Sharding(ranks=2, rank=1, interleave=4)
    sources = of_rank(cache, sharding)
    for source in sources:
        memory = cache[source.part, source.layer]
        for slot in (4, 7, 12, 2 * PAGE + 5):
            expected = memory[slot // (2 * PAGE), slot % (2 * PAGE)].flatten()
            assert read_slot(source, slot).equal(expected)
        with pytest.raises(IndexError, match="slot 8 lies on another rank than 1"):
            locate_byte(source, 8, 0)
    view = GroupView(name="full", num_slots=PAGES * 2 * PAGE, page_size=2 * PAGE, sources=sources)
    assert view.slot_bytes * view.num_slots == sum(source.tensor.nbytes for source in sources)
