"""What is handed out is nobody else's until it is given back."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st

from canary_obs.runtime.device.pinned_space import PinnedSpace


def test_a_piece_has_the_shape_and_dtype_that_are_asked_for() -> None:
    space = PinnedSpace(64, pinned=False)
    for shape, dtype in (((2, 3), torch.int32), ((1,), torch.int64), ((5,), torch.uint8)):
        piece = space.take(torch.empty(shape, dtype=dtype))
        assert piece is not None
        assert (piece.shape, piece.dtype) == (shape, dtype)
    assert space.take(torch.empty(1, dtype=torch.uint8)) is None  # pieces begin at multiples of 16


def test_there_is_room_for_as_much_as_it_has() -> None:
    space = PinnedSpace(64, pinned=False)
    assert space.take(torch.empty(9, dtype=torch.int64)) is None
    for _ in range(3):
        assert space.take(torch.empty(8, dtype=torch.int64)) is not None
        space.give_back()


@given(steps=st.lists(st.integers(1, 9) | st.none(), max_size=40))
def test_no_piece_is_handed_out_twice(steps: list[int | None]) -> None:
    space, out = PinnedSpace(80, pinned=False), list[tuple[torch.Tensor, int]]()
    for number, length in enumerate(steps):
        if length is None:
            if out:
                del out[0]
                space.give_back()
        elif (piece := space.take(torch.empty(length, dtype=torch.int64))) is not None:
            out.append((piece.fill_(number), number))
        assert all(piece.unique().tolist() == [number] for piece, number in out)
    while out:  # then all of it is free
        del out[0]
        space.give_back()
    assert space.take(torch.empty(10, dtype=torch.int64)) is not None
