"""Which group has a block; with real engines: real/test_traps.py."""

from __future__ import annotations

from hypothesis import given, strategies as st

from canary_obs.engines.vllm.block_owners import BlockOwners

Steps = list[tuple[dict[int, set[int]], set[int]]]

BLOCKS = st.sets(st.integers(0, 7), max_size=3)
STEPS = st.lists(st.tuples(st.dictionaries(st.integers(0, 2), BLOCKS), BLOCKS), max_size=12)


def owners(*, empty: bool = True) -> BlockOwners:
    return BlockOwners(8, range(3), empty=empty)


def test_records_end_in_the_group_that_had_the_block() -> None:
    own = owners()
    assert own.give({0: {1, 2}, 1: {3}}, ()) == {}
    assert own.give({0: {3}, 1: {2}, 2: {4}}, ()) == {0: {2}, 1: {3}}
    assert own.give({0: {1, 3}}, ()) == {}


def test_a_block_of_which_nothing_is_known_may_have_records_in_every_other_group() -> None:
    own = owners(empty=False)
    assert own.give({1: {5}}, ()) == {0: {5}, 2: {5}}
    assert own.give({0: {5}}, ()) == {1: {5}}


def test_zeroed_bytes_end_the_records_of_their_owner() -> None:
    own = owners()
    own.give({0: {1}, 1: {2}}, ())
    assert own.give({1: {1}}, [1, 2, 7]) == {0: {1}, 1: {2}}
    assert own.give({}, [1]) == {1: {1}}
    assert owners(empty=False).give({}, [3]) == {0: {3}, 1: {3}, 2: {3}}


def test_nobody_has_the_null_block_or_what_is_none() -> None:
    """The tables with such numbers are found by the kernels."""
    own = owners(empty=False)
    assert own.give({0: {0, 8, -1}, 1: {0, 900}}, [0, 8, -1]) == {}
    assert own.give({}, [7]) == {0: {7}, 1: {7}, 2: {7}}


def test_one_group_alone_has_every_block() -> None:
    alone = BlockOwners(4, range(1), empty=True)
    assert alone.give({}, [2]) == {0: {2}}
    assert alone.foreign(0).tolist() == []


@given(steps=STEPS)
def test_no_records_are_left_where_another_group_writes(steps: Steps) -> None:
    """Each block has records in every group that has had it and whose records have not been said to end."""
    own, having = owners(), dict[int, int]()
    records: dict[int, set[int]] = {block: set() for block in range(8)}
    for assigned, zeroed in steps:
        taken = set[int]()
        for number, blocks in assigned.items():  # a block goes to one group
            assigned[number] = blocks - taken - {0}
            taken |= blocks
        for number, blocks in own.give(assigned, zeroed).items():
            for block in blocks:
                assert having[block] == number  # else a launch for nothing
                records[block].discard(number)
        assert not any(records[block] for block in zeroed)
        for number, blocks in assigned.items():
            for block in blocks:
                assert records[block] <= {number}
                records[block], having[block] = {number}, number
    for number in range(3):
        assert own.foreign(number).tolist() == [block for block in range(8) if having.get(block) != number]


def test_after_an_output_that_was_missed_a_block_may_be_anybodys() -> None:
    own = owners()
    own.give({0: {1, 2}}, ())
    own.forget()
    assert own.foreign(1).tolist() == []
    assert own.give({2: {1, 6}}, ()) == {0: {1, 6}, 1: {1, 6}}
    assert own.foreign(1).tolist() == [1, 6]
