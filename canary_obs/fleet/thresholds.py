"""Thresholds of the verdicts; alerts/thresholds/fleet.toml has the same numbers with their reasons."""

from __future__ import annotations

SUSPECT_OBSERVED = 3
SUSPECT_EXPECTED = 0.1
SUSPECT_SCORE = 4.75
DECISIVE_SCORE = 15.0
PRIOR_FINDINGS = 0.5
PEER_FINDINGS = 3
XID_SCORE = 2.0
REMAP_SCORE = 1.0
LINK_SHARE = 0.9
RELEASE_GPUS = 3
RELEASE_SHARE = 0.02
RELEASE_SCORE = 3.0
