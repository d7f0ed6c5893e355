"""Lines beyond the rate are left out, and counted on the next one."""

from __future__ import annotations

from canary_obs.runtime.line_limit import LineLimit


def test_lines_beyond_the_limit_are_left_out_and_counted() -> None:
    now = 100.0
    limit = LineLimit(2, 10.0, lambda: now)
    assert [limit.next_line() for _ in range(5)] == ["", "", None, None, None]
    now = 109.9
    assert limit.next_line() is None
    now = 110.0
    assert limit.next_line() == " (4 more since the last line were left out)"
    assert [limit.next_line() for _ in range(2)] == ["", None]
