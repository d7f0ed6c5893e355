from __future__ import annotations

from canary_obs.service.rate_limiter import RateLimiter

SECOND = 1_000_000_000


class Clock:
    """Nanoseconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 5 * SECOND

    def __call__(self) -> int:
        return self.now


def test_a_minutes_worth_at_once_then_one_per_share():
    clock = Clock()
    limiter = RateLimiter(3, clock)
    assert [limiter.wait("a") for _ in range(5)] == [0.0, 0.0, 0.0, 20.0, 20.0]
    clock.now += 15 * SECOND
    assert limiter.wait("a") == 5.0
    clock.now += 5 * SECOND
    assert [limiter.wait("a"), limiter.wait("a")] == [0.0, 20.0]


def test_what_was_not_used_is_kept_for_a_minute_and_no_longer():
    clock = Clock()
    limiter = RateLimiter(7, clock)
    assert [limiter.wait("a") for _ in range(7)] == [0.0] * 7
    clock.now += 3600 * SECOND
    assert [limiter.wait("a") > 0 for _ in range(8)] == [False] * 7 + [True]


def test_every_name_has_its_own():
    limiter = RateLimiter(1, Clock())
    assert (limiter.wait("a"), limiter.wait("b"), limiter.wait(None)) == (0.0, 0.0, 0.0)
    assert limiter.wait("a") == limiter.wait(None) == 60.0
