"""The tree of cached prefixes, against a model that forgets nothing."""

from __future__ import annotations

from hypothesis import given, strategies as st

from canary_obs.healing.lineage import Lineage


def chain(tokens: list[int]) -> list[bytes]:
    """Keys of each prefix; each names all of its tokens."""
    return [bytes(tokens[: number + 1]) for number in range(len(tokens))]


PREFIXES = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(st.lists(st.tuples(PREFIXES, st.booleans()), max_size=40), PREFIXES)
def test_descendants_are_all_that_is_cached_and_goes_on_from_a_prefix(
    steps: list[tuple[list[int], bool]], root: list[int]
) -> None:
    cached: set[bytes] = set()
    lineage = Lineage(lambda key: key in cached)
    for tokens, stays in steps:
        keys = chain(tokens)
        if stays:
            cached.update(keys)
            lineage.follow(keys, len(keys))
        else:
            cached.discard(keys[-1])
    found = set(lineage.descendants([bytes(root)]))
    expected = {key for key in cached if key.startswith(bytes(root))}
    assert expected <= found
    assert all(key.startswith(bytes(root)) for key in found)


def test_a_prefix_that_is_not_cached_keeps_what_goes_on_from_it() -> None:
    cached = {b"abc", *(bytes([number]) for number in range(50))}
    lineage = Lineage(lambda key: key in cached)
    lineage.follow([b"a", b"ab", b"abc"], 3)
    for number in range(50):
        lineage.follow([bytes([number])], 1)
    assert set(lineage.descendants([b"a"])) == {b"a", b"ab", b"abc"}


def test_memory_stays_within_twice_of_what_is_cached() -> None:
    cached: set[bytes] = set()
    lineage = Lineage(lambda key: key in cached)
    for number in range(2000):
        keys = [number.to_bytes(4, "big") + bytes([depth]) for depth in range(8)]
        cached = set(keys)
        lineage.follow(keys, 8)
    assert len(lineage) <= 4 * len(cached)
    assert set(keys) <= set(lineage.descendants([keys[0]]))


def test_what_is_known_already_is_not_walked_again() -> None:
    lineage = Lineage(lambda key: True)
    keys = chain([1, 2, 3])
    lineage.follow(keys, 3)

    class Once(list[bytes]):
        reads = 0

        def __getitem__(self, place):  # type: ignore[no-untyped-def]
            Once.reads += 1
            return super().__getitem__(place)

    lineage.follow(Once(keys), 3)
    assert Once.reads == 1


def test_a_prefix_that_ends_within_a_block() -> None:
    lineage = Lineage(lambda key: True)
    lineage.follow([b"a", b"ab"], 2)
    lineage.extend(b"a", b"a+")
    lineage.extend(None, b"+")
    assert set(lineage.descendants([b"a"])) == {b"a", b"ab", b"a+"}
    assert lineage.descendants([b"+"]) == [b"+"]
