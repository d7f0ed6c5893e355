"""An engine that cannot be protected: says so, in the log and to the service."""

from __future__ import annotations

import logging

from canary_obs.config import CanaryConfig

log = logging.getLogger("canary_obs")


def refuse(reason: str, config: CanaryConfig | None = None) -> None:
    """Log why there is no canary."""
    log.error("canary_obs: this engine is not protected: %s", reason)
