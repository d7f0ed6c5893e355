"""Counts the forwards that a worker is given, apart from the hooks that show them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

FORWARDS_ATTRIBUTE = "kv_canary_forwards"  # of SchedulerOutput: outputs with tokens so far, this one included


class ForwardCount:
    """Scheduler outputs with tokens that reached `execute_model` of a worker, or were sent to it.

    The scheduler numbers its outputs, so that one that came past the worker's method is counted by the next.
    """

    def __init__(self, names: Iterable[str]) -> None:
        """`names`: the groups that every forward writes, directly or by the drafting that follows it."""
        self.by_group = dict.fromkeys(names, 0)
        self.number = 0  # the scheduler's, of the newest output with tokens that was seen
        self.requests = 0  # with tokens in forwards, one by one
        self.under_way = False  # inside `execute_model`: its runner may still wait for another pipeline stage
        self._count = 0
        self._first: int | None = None  # the scheduler's number when our count was 0

    def around_execute_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the outermost method that a worker runs a scheduler output with."""

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.under_way = True
            try:
                if scheduler_output.total_num_scheduled_tokens:
                    self._count = count = self._count + 1
                    self.requests += len(scheduler_output.num_scheduled_tokens)
                    number = scheduler_output.__dict__.get(FORWARDS_ATTRIBUTE)
                    if number is not None and self._first is not None and number - self._first == count:
                        self.number = number  # as a rule, and without another call
                        for name in self.by_group:
                            self.by_group[name] = count
                    else:
                        self.note(scheduler_output)
                return original(scheduler_output, *args, **kwargs)
            finally:
                self.under_way = False

        return execute_model

    def note(self, output: Any) -> None:
        """Count by the output's number, too, if it has one; again for the same output, it changes nothing."""
        number = getattr(output, FORWARDS_ATTRIBUTE, None)
        if number is not None:
            self.number = number
            if self._first is None:
                self._first = number - max(1, self._count)
            self._count = max(self._count, number - self._first)
        for name in self.by_group:
            self.by_group[name] = self._count


def number_output(scheduler: Any, output: Any) -> None:
    """Give an output with tokens its number, which travels with it to every worker."""
    if output.total_num_scheduled_tokens:
        held = scheduler.__dict__
        held[FORWARDS_ATTRIBUTE] = output.__dict__[FORWARDS_ATTRIBUTE] = held.get(FORWARDS_ATTRIBUTE, 0) + 1
