"""Where the service may listen, and which token it needs there."""

from __future__ import annotations

import ipaddress

from canary_obs.errors import ConfigurationError

HIDDEN = "***"  # in place of a secret
_LENGTH, _VARIETY = 16, 8  # of a token, at least: characters, and different ones
# As letters and digits only: `change-me` counts as well.
_PLACEHOLDERS = "changeme", "changethis", "password", "placeholder", "replaceme", "yourtoken", "secrettoken"
TOKEN_REMEDY = "Use what `openssl rand -hex 32` prints."


def check_bind(
    host: str, token: str, tokens_file: str, *, host_label: str = "host", token_label: str = "token"
) -> None:
    """Raise ConfigurationError for a host beyond loopback without a token, or with a poor one."""
    bare = token.strip()
    if token and not bare:
        raise ConfigurationError(token_label, HIDDEN, "contains nothing but white space", TOKEN_REMEDY)
    if is_loopback(host):
        return
    if not bare and not tokens_file:
        rule = "without a token the service only binds to loopback"
        remedy = "Set KV_CANARY_TOKEN or KV_CANARY_TOKENS_FILE, or bind to 127.0.0.1."
        raise ConfigurationError(host_label, host, rule, remedy)
    if bare and (weakness := weakness_of(bare)) is not None:
        rule = f"beyond loopback {weakness}"
        raise ConfigurationError(token_label, f"{HIDDEN} ({len(bare)} characters)", rule, TOKEN_REMEDY)


def weakness_of(token: str) -> str | None:
    """The rule that a token breaks which can be guessed; None = it breaks none."""
    if len(token) < _LENGTH or len(set(token)) < _VARIETY:
        return f"it needs {_LENGTH} characters, {_VARIETY} of them different"
    plain = "".join(filter(str.isalnum, token.lower()))
    for word in _PLACEHOLDERS:
        if word in plain:
            return f"it must not be a placeholder such as {word!r}"
    return None


def is_loopback(host: str) -> bool:
    """Whether a host name or address stays on this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
