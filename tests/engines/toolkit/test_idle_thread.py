from __future__ import annotations

import threading
from contextlib import nullcontext

from canary_obs.engines.toolkit import idle_thread as idle_module
from canary_obs.engines.toolkit.idle_thread import IdleThread


def test_busy_is_asked_under_the_lock_and_respected() -> None:
    """Without the lock a step could start right after the answer."""
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
    """Replaces the thread's pauses: polls at given times, with the device busy or not, after given steps."""

    def __init__(self, polls: list[tuple[float, bool]], steps: list[float]) -> None:
        self._polls, self._steps = iter(polls), steps
        self.now, self.busy = 1000.0, False
        self.thread: IdleThread | None = None

    def wait(self, pause: float) -> bool:
        poll = next(self._polls, None)
        if poll is None:
            return True
        self.now, self.busy = 1000.0 + poll[0], poll[1]
        assert self.thread is not None
        self.thread.last_step = max(1000.0 + step for step in self._steps if step <= poll[0])
        return False


def calls(monkeypatch, polls: list[tuple[float, bool]], steps: list[float]) -> list[float]:
    """Times of the polls that called `idle`."""
    script, called = Script(polls, steps), []

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
    """The device was busy until the end of a prefill: it must be quiet as long as the engine must be."""
    polls = [(0.2, True), (0.22, True), (0.24, False), (0.26, False), (0.28, False), (0.30, False)]
    assert calls(monkeypatch, polls, [0.0]) == [0.28, 0.3]


def test_its_own_work_does_not_make_it_wait(monkeypatch) -> None:
    polls = [(0.1, False), (0.101, True), (0.121, False), (0.122, False)]
    assert calls(monkeypatch, polls, [0.0]) == [0.1, 0.121, 0.122]


def test_after_another_step_it_waits_again(monkeypatch) -> None:
    polls = [(0.1, False), (0.14, True), (0.2, True), (0.22, False), (0.26, False)]
    assert calls(monkeypatch, polls, [0.0, 0.13]) == [0.1, 0.26]
