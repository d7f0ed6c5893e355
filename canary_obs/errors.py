"""The errors that canary_obs raises; each carries its fields, and its message names the remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from canary_obs.records import Violation


class CanaryError(Exception):
    """Base of every error raised by canary_obs."""


class ConfigurationError(CanaryError):
    """A setting was refused. The message names setting, value, rule and remedy."""

    def __init__(self, setting: str, value: object, rule: str, remedy: str) -> None:
        self.setting, self.value, self.rule, self.remedy = setting, value, rule, remedy
        super().__init__(f"{setting}={value!r}: {rule}. {remedy}")

    def __reduce__(self) -> tuple[type[ConfigurationError], tuple[str, object, str, str]]:
        return type(self), (self.setting, self.value, self.rule, self.remedy)


class UnknownSetting(ConfigurationError):
    """No setting has this name. What it was set to is not shown: it may be a misspelt secret."""

    def __str__(self) -> str:
        return f"{self.setting}: {self.rule}. {self.remedy}"


class AddressInUse(ConfigurationError):
    """Another program has the port or the endpoint; it may be free later."""


class UnsupportedEngine(CanaryError):
    """The engine, its version or one of its settings is not supported; nothing was attached."""


class EngineContractError(CanaryError):
    """An adapter passed something that contradicts what it showed at attach."""


class WireError(CanaryError):
    """A message could not be decoded: wrong version, wrong schema, or not a message of canary_obs."""


class QuarantineRefused(CanaryError):
    """Without this block the engine could not serve every request that it accepts."""


class RepairRefused(CanaryError):
    """Which word of a slot changed, and to what, is not known for certain."""


def describe(violation: Violation) -> str:
    """The fields of a violation as name=value, without those that it does not have."""
    return ", ".join(
        f"{name}={value}"
        for name, value in (
            ("reason", violation.reason.value),
            ("phase", violation.phase.value),
            ("group", violation.group),
            ("part", violation.part.value if violation.part else None),
            ("slot", violation.slot),
            ("slots", violation.slots if violation.slots > 1 else None),
            ("position", violation.position),
            ("request", violation.request or "none (no running request holds the slot)"),
            ("step", violation.step),
            ("expected", violation.expected),
            ("actual", violation.actual),
        )
        if value is not None
    )


class KVCacheViolation(CanaryError):
    """Raised on the engine thread in mode `raise`, with every violation known at that moment."""

    def __init__(self, violations: tuple[Violation, ...]) -> None:
        self.violations = violations
        more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
        super().__init__(
            f"KV cache violation: {describe(violations[0])}{more}. The slot does not hold what was recorded "
            "for it; stop using this KV cache, and find out what else wrote or freed the slot"
        )
