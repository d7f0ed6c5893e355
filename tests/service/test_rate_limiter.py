from __future__ import annotations

from canary_obs.service.rate_limiter import RateLimiter

SECOND = 1_000_000_000


class Clock:
    """Nanoseconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 5 * SECOND

    def __call__(self) -> int:
        return self.now


def test_a_minutes_worth_at_once_then_evenly_spaced():
    clock = Clock()
    limiter = RateLimiter(3, clock)
    assert [limiter.acquire("a") for _ in range(5)] == [0.0, 0.0, 0.0, 20.0, 20.0]
    clock.now += 15 * SECOND
    assert limiter.acquire("a") == 5.0
    clock.now += 5 * SECOND
    assert [limiter.acquire("a"), limiter.acquire("a")] == [0.0, 20.0]


def test_unused_requests_do_not_accumulate_beyond_a_minute():
    clock = Clock()
    limiter = RateLimiter(7, clock)
    assert [limiter.acquire("a") for _ in range(7)] == [0.0] * 7
    clock.now += 3600 * SECOND
    assert [limiter.acquire("a") > 0 for _ in range(8)] == [False] * 7 + [True]


def test_every_token_has_its_own_limit():
    limiter = RateLimiter(1, Clock())
    assert (limiter.acquire("a"), limiter.acquire("b"), limiter.acquire(None)) == (0.0, 0.0, 0.0)
    assert limiter.acquire("a") == limiter.acquire(None) == 60.0
