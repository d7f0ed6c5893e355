"""Which SGLang is refused, and what the refusal advises."""

from __future__ import annotations

import pytest

from canary_obs.engines.sglang.versions import VERSIONS, check_version
from canary_obs.errors import UnsupportedEngine


@pytest.mark.parametrize("version", ["0.5.16", "0.5.23", "0.5.23+cpu", "0.5.23.post1"])
def test_every_build_of_a_tried_version_is_taken(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.5.15", "0.5.2", "0.5.24", "0.5.230", "0.6.0", ""])
def test_versions_nobody_has_tried_are_refused(version: str) -> None:
    with pytest.raises(UnsupportedEngine) as caught:
        check_version(version)
    assert str(caught.value) == (
        f"SGLang {version}: supported are {', '.join(VERSIONS)}; use a supported SGLang or a newer canary_obs"
    )
