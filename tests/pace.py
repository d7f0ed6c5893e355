"""Limits of processor time on machines whose cores are slower from one second to the next."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

# What `_text_of_samples` takes of a quiet core of the machine that the limits were measured on.
_QUIET_SECONDS = 0.0195
_SAMPLES = 8_000


def _text_of_samples() -> str:
    """Work like that of the service: strings, numbers and dictionaries."""
    by_name: dict[str, list[str]] = {}
    for number in range(_SAMPLES):
        labels = {"rank": str(number % 64), "group": "full", "value": repr(number / 7)}
        text = ",".join(f'{name}="{value}"' for name, value in labels.items())
        by_name.setdefault(f"name_{number % 100}", []).append(text)
    return "\n".join("\n".join(lines) for lines in by_name.values())


def quiet_seconds(work: Callable[[], object], repeats: int) -> float:
    """This thread's processor time for `work`, as on a quiet core.

    Cores of a shared machine run at half of their speed and less while others use their siblings and caches,
    and processor time counts that, too. So each time is taken in proportion to plain work right after.
    """
    return (
        statistics.median(_seconds(work) / _seconds(_text_of_samples) for _ in range(repeats))
        * _QUIET_SECONDS
    )


def slowdown() -> float:
    """By what this machine is slower just now than the one that limits are meant for, at least 1."""
    return max(1.0, statistics.median(_seconds(_text_of_samples) for _ in range(7)) / _QUIET_SECONDS)


def _seconds(work: Callable[[], object]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started
