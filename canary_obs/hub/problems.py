"""What went wrong in the service, or was sent to it: counted, and in the verdict until acknowledged."""

from __future__ import annotations

from collections import Counter

from canary_obs.errors import WireError
from canary_obs.hub.message_check import InvalidMessage
from canary_obs.vocabulary import InvalidCause, State

LOG_SECONDS = 60.0  # per cause, so that a peer cannot fill the disk


class Problems:
    """Not thread-safe: the hub holds its lock around every call. Times are the hub's clock."""

    def __init__(self) -> None:
        self.undecodable = 0
        self.faults: Counter[str] = Counter()  # by part of the service
        self._invalid: Counter[InvalidCause] = Counter()
        self._logged: dict[InvalidCause, tuple[float, int]] = {}  # when, and the count then
        self._unacknowledged: dict[str, tuple[State, str]] = {}  # by part of the service

    @property
    def invalid(self) -> dict[str, int]:
        """Messages whose values cannot be, by every cause."""
        return {cause.value: self._invalid[cause] for cause in InvalidCause}

    def add_undecodable(self, error: WireError) -> None:
        """A frame could not be decoded."""
        self.undecodable += 1
        text = f"undecodable frames: {self.undecodable}, the last: {error}"
        self._unacknowledged["wire"] = State.DEGRADED, text

    def add_fault(self, part: str, error: Exception, state: State) -> None:
        """A part of the service failed."""
        self.faults[part] += 1
        text = f"the service failed: {part}: {type(error).__name__}: {error}"
        self._unacknowledged[part] = state, text

    def end_fault(self, part: str) -> None:
        """The part works again."""
        self._unacknowledged.pop(part, None)

    def add_invalid(self, error: InvalidMessage, sender: str, now: float) -> str | None:
        """A message was refused; returns the line to log, None = this cause was logged just now."""
        self._invalid[error.cause] += 1
        text = f"messages refused: {self._invalid.total()}, the last of {sender}: {error}"
        self._unacknowledged["messages"] = State.DEGRADED, text
        count = self._invalid[error.cause]
        logged_at, logged = self._logged.get(error.cause, (float("-inf"), 0))
        if now - logged_at < LOG_SECONDS:
            return None
        self._logged[error.cause] = now, count
        left_out = f" ({count - logged - 1} more since the last such line)" if count - logged > 1 else ""
        return f"a message of {sender} was refused: {error}{left_out}"

    def acknowledge(self) -> None:
        """An operator has seen them."""
        self._unacknowledged.clear()

    def verdicts(self) -> list[tuple[State, str]]:
        """The state that each problem leaves at best, and its reason."""
        return list(self._unacknowledged.values())
