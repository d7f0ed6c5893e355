"""Which vLLM is refused, and what the refusal advises."""

from __future__ import annotations

import pytest

from canary_obs.engines.vllm.versions import V1_VERSIONS, V2_VERSIONS, check_version
from canary_obs.errors import UnsupportedEngine


@pytest.mark.parametrize("version", ["0.26.0", "0.31.0+cpu", "0.32.1.dev3"])
def test_every_build_of_a_tried_version_is_taken(version: str) -> None:
    check_version(version)
    check_version(version, V2_VERSIONS)


@pytest.mark.parametrize("version", ["0.33.0", "0.3.1", "1.31.0", "0.310.0", "0"])
@pytest.mark.parametrize("tried", [V1_VERSIONS, V2_VERSIONS])
def test_versions_nobody_has_tried_are_refused(version: str, tried: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedEngine) as caught:
        check_version(version, tried)
    assert str(caught.value) == (
        f"vLLM {version}: supported are {', '.join(tried)}; use a supported vLLM or a newer canary_obs"
    )


def test_a_version_tried_with_the_other_runner_only_names_the_switch() -> None:
    assert set(V2_VERSIONS) < set(V1_VERSIONS)
    check_version("0.29.0")
    with pytest.raises(UnsupportedEngine, match=r"0\.29\.0 with its V2 .* VLLM_USE_V2_MODEL_RUNNER=0"):
        check_version("0.29.0", V2_VERSIONS)
