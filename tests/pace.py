"""How fast this machine is just now: what limits of processor time are scaled by."""

from __future__ import annotations

import time

# The least that `_text_of_samples` takes of a quiet core of the machine that the limits were measured on.
_QUIET_SECONDS = 0.033
_SAMPLES = 8_000


def _text_of_samples() -> str:
    """Work like that of the service: strings, numbers and dictionaries."""
    by_name: dict[str, list[str]] = {}
    for number in range(_SAMPLES):
        labels = {"rank": str(number % 64), "group": "full", "value": repr(number / 7)}
        text = ",".join(f'{name}="{value}"' for name, value in labels.items())
        by_name.setdefault(f"name_{number % 100}", []).append(text)
    return "\n".join("\n".join(lines) for lines in by_name.values())


def slowdown() -> float:
    """By what this machine is slower than the one that limits are meant for, at least 1.

    Cores of a shared machine run at half of their speed and less while others use their siblings and
    caches, and processor time counts that, too.
    """
    return max(1.0, min(_seconds() for _ in range(7)) / _QUIET_SECONDS)


def _seconds() -> float:
    started = time.thread_time()
    _text_of_samples()
    return time.thread_time() - started
