from __future__ import annotations

import threading
from contextlib import nullcontext

from canary_obs.engines.vllm.idle import IdleThread


def test_busy_is_asked_under_the_lock_and_kept_to() -> None:
    """A step that comes between the question and the lock must not be met half way."""
    lock, called = threading.Lock(), threading.Event()
    answers, held = [True, True, False], []

    def busy() -> bool:
        held.append(lock.locked())
        return answers[len(held) - 1] if len(held) <= len(answers) else True

    def idle() -> bool:
        assert len(held) == len(answers)
        called.set()
        return False

    thread = IdleThread(lock, idle, nullcontext, busy)
    thread.last_step = 0.0
    thread.start()
    assert called.wait(30.0)
    thread.stop()
    assert all(held)
    assert thread.raised is None
    assert not lock.locked()
