from __future__ import annotations

from canary_obs.plurals import counted


def test_one_is_not_many():
    assert [counted(count, "slot") for count in (0, 1, 2)] == ["0 slots", "1 slot", "2 slots"]
