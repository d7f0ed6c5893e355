"""What a look at an installation finds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

import msgspec

from canary_obs.errors import ConfigurationError


class Grade(StrEnum):
    """UNKNOWN = it could not be looked at; a thing that was not looked at is never fine."""

    FINE = "fine"
    WARNING = "warning"
    UNKNOWN = "unknown"
    PROBLEM = "problem"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    topic: str
    grade: Grade
    text: str
    remedy: str | None = None


class Findings:
    """Collects findings, in the order in which things are looked at."""

    def __init__(self) -> None:
        self.all: list[Finding] = []

    def fine(self, topic: str, text: str) -> None:
        """It is as it should be."""
        self.all.append(Finding(topic=topic, grade=Grade.FINE, text=text))

    def warning(self, topic: str, text: str, remedy: str) -> None:
        """It works, and less than it could."""
        self.all.append(Finding(topic=topic, grade=Grade.WARNING, text=text, remedy=remedy))

    def unknown(self, topic: str, text: str, remedy: str) -> None:
        """It could not be looked at."""
        self.all.append(Finding(topic=topic, grade=Grade.UNKNOWN, text=text, remedy=remedy))

    def problem(self, topic: str, text: str, remedy: str) -> None:
        """It does not work, or nobody checks what should be checked."""
        self.all.append(Finding(topic=topic, grade=Grade.PROBLEM, text=text, remedy=remedy))

    @contextmanager
    def refusals(self, topic: str) -> Iterator[None]:
        """A setting that is refused inside is a problem with its own remedy."""
        try:
            yield
        except ConfigurationError as error:
            value = "" if error.value is None else f"={error.value!r}"
            text = f"{error.setting}{value}: {error.rule}"
            if all(found.text != text for found in self.all):  # several parts read the same setting
                self.problem(topic, text, error.remedy)
