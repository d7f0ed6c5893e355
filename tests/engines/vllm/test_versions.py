"""Which vLLM is refused, and what the refusal advises."""

from __future__ import annotations

import pytest

from canary_obs.engines.vllm.versions import V1_VERSIONS, V2_VERSIONS, check_version
from canary_obs.errors import UnsupportedEngine


@pytest.mark.parametrize("version", ["0.26.0", "0.31.0+cpu", "0.32.1.dev3"])
def test_every_build_of_a_tried_version_is_taken(version: str) -> None:
    assert check_version(version) is None
    assert check_version(version, V2_VERSIONS) is None


@pytest.mark.parametrize("version", ["0.99.0", "1.31.0", "0.310.0rc1"])
@pytest.mark.parametrize("tried", [V1_VERSIONS, V2_VERSIONS])
def test_newer_versions_may_be_tried_and_are_named(version: str, tried: tuple[str, ...]) -> None:
    said = check_version(version, tried)
    assert said == f"vLLM {version} is newer than the versions that were tested, {', '.join(tried)}"


@pytest.mark.parametrize("version", ["0.25.1", "0.3.1", "0", "", "main", "0.dev1"])
@pytest.mark.parametrize("tried", [V1_VERSIONS, V2_VERSIONS])
def test_older_versions_and_what_is_no_version_are_refused(version: str, tried: tuple[str, ...]) -> None:
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
