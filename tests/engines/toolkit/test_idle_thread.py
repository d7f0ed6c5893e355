from __future__ import annotations

import threading
from contextlib import nullcontext

from canary_obs.engines.toolkit import idle_thread as idle_module
from canary_obs.engines.toolkit.idle_thread import IdleThread


def test_busy_is_asked_under_the_lock_and_kept_to() -> None:
    """A step that comes between the question and the lock must not be met half way."""
    lock, called = threading.Lock(), threading.Event()
    answers, held = [True, True, *[False] * 9], []

    def busy() -> bool:
        held.append(lock.locked())
        return answers[len(held) - 1] if len(held) <= len(answers) else True

    def idle() -> bool:
        assert len(held) > 2
        called.set()
        return False

    thread = IdleThread(lock, idle, nullcontext, busy)
    thread.last_step = 1.0
    thread.start()
    assert called.wait(30.0)
    thread.stop()
    assert all(held)
    assert thread.raised is None
    assert not lock.locked()


class Script:
    """In place of the thread's pauses: looks at told times, the device busy or not, a step before or not."""

    def __init__(self, looks: list[tuple[float, bool]], steps: list[float]) -> None:
        self._looks, self._steps = iter(looks), steps
        self.now, self.busy = 1000.0, False
        self.thread: IdleThread | None = None

    def wait(self, pause: float) -> bool:
        look = next(self._looks, None)
        if look is None:
            return True
        self.now, self.busy = 1000.0 + look[0], look[1]
        assert self.thread is not None
        self.thread.last_step = max(1000.0 + step for step in self._steps if step <= look[0])
        return False


def calls(monkeypatch, looks: list[tuple[float, bool]], steps: list[float]) -> list[float]:
    """The looks at which `idle` was called."""
    script, called = Script(looks, steps), []

    def idle() -> bool:
        called.append(round(script.now - 1000.0, 3))
        return True

    thread = script.thread = IdleThread(threading.Lock(), idle, nullcontext, lambda: script.busy)
    monkeypatch.setattr(idle_module.time, "monotonic", lambda: script.now)
    monkeypatch.setattr(thread, "_stop", script)
    thread._run()
    assert thread.raised is None
    return called


def test_right_after_a_long_forward_it_waits_for_the_next_step(monkeypatch) -> None:
    """The device was busy to the end of a prefill: it has to rest for as long as the engine has to."""
    looks = [(0.2, True), (0.22, True), (0.24, False), (0.26, False), (0.28, False), (0.30, False)]
    assert calls(monkeypatch, looks, [0.0]) == [0.28, 0.3]


def test_its_own_work_does_not_make_it_wait(monkeypatch) -> None:
    looks = [(0.1, False), (0.101, True), (0.121, False), (0.122, False)]
    assert calls(monkeypatch, looks, [0.0]) == [0.1, 0.121, 0.122]


def test_after_another_step_it_waits_again(monkeypatch) -> None:
    looks = [(0.1, False), (0.14, True), (0.2, True), (0.22, False), (0.26, False)]
    assert calls(monkeypatch, looks, [0.0, 0.13]) == [0.1, 0.26]
