"""Settings are read once, and refused with value, rule and remedy."""

from __future__ import annotations

import pickle
from pathlib import Path

import msgspec
import pytest

from canary_obs.config import (
    CanaryConfig,
    ServiceConfig,
    load,
    masked,
)
from canary_obs.config_values import PatrolBudget, parse_patrol_budget, parse_perturb
from canary_obs.errors import ConfigurationError
from canary_obs.vocabulary import Mode, PerturbMode


def test_defaults_are_the_documented_ones() -> None:
    config = load(CanaryConfig, environ={})
    assert (config.mode, config.real_data, config.patrol_budget) == (Mode.LOG, "all", "1%")
    assert config.idle_sweep
    assert not config.reveal_tokens
    assert not config.checks_prefix_data
    assert load(CanaryConfig, environ={"KV_CANARY_MODE": "raise"}).checks_prefix_data
    service = load(ServiceConfig, environ={})
    assert (service.host, service.port) == ("127.0.0.1", 9464)


def test_flags_beat_environment_beats_file(tmp_path: Path) -> None:
    file = tmp_path / "canary.toml"
    file.write_text('mode = "raise"\nsweep_interval = 5\nrank = 7\n')
    environ = {"KV_CANARY_CONFIG": str(file), "KV_CANARY_SWEEP_INTERVAL": "6", "KV_CANARY_RANK": "8"}
    config = load(CanaryConfig, environ=environ, overrides={"rank": 9})
    assert (config.mode, config.sweep_interval, config.rank) == (Mode.RAISE, 6, 9)


def test_each_side_ignores_the_settings_of_the_other() -> None:
    environ = {"KV_CANARY_PORT": "1234", "KV_CANARY_MODE": "none", "PATH": "/bin"}
    assert load(CanaryConfig, environ=environ).mode is Mode.NONE
    assert load(ServiceConfig, environ=environ).port == 1234


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("KV_CANARY_MODE", "loud", "none or log or raise"),
        ("KV_CANARY_RANK", "-1", ">= 0"),
        ("KV_CANARY_RANK", "one", "int"),
        ("KV_CANARY_REAL_DATA", "some", "none or partial or all"),
        ("KV_CANARY_IDLE_SWEEP", "perhaps", "true or false"),
        ("KV_CANARY_LANE_ROWS", "1", ">= 2"),
        ("KV_CANARY_PATROL_BUDGET", "150%", "more than the whole"),
        ("KV_CANARY_PATROL_BUDGET", "fast", "a rate like 15GB/s"),
        ("KV_CANARY_PATROL_BUDGET", "-1GB/s", "not a budget"),
        ("KV_CANARY_PERTURB", "real_kv_used=2", "0 < probability <= 1"),
        ("KV_CANARY_PERTURB", "magic=0.5", "req_to_token"),
        ("KV_CANARY_PERTURB", "real_kv_used=0.5", "KV_CANARY_PERTURB_ENABLED"),
        ("KV_CANARY_INSTANCE", "a b", "regex"),
        ("KV_CANARY_CONFIG", "/no/such/file.toml", "readable TOML"),
    ],
)
def test_a_refusal_names_setting_value_and_remedy(variable: str, value: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(CanaryConfig, environ={variable: value})
    assert variable in str(caught.value)
    assert value in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("KV_CANARY_MDOE", "KV_CANARY_MDOE: no setting has this name. Did you mean KV_CANARY_MODE? Settings"),
        ("KV_CANARY_mode", "KV_CANARY_mode: no setting has this name. "),
        ("KV_CANARY_NOSUCH", "KV_CANARY_NOSUCH: no setting has this name. Settings are: "),
    ],
)
def test_an_unknown_variable_is_named_without_its_value(variable: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(CanaryConfig, environ={variable: "s3cret"})
    assert str(caught.value).startswith(message)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert "s3cret" not in f"{caught.value} {caught.value!r}"


def test_an_unknown_name_in_a_file_is_named_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('mdoe = "s3cret"\n')
    with pytest.raises(ConfigurationError) as caught:
        load(CanaryConfig, environ={"KV_CANARY_CONFIG": str(path)})
    assert str(caught.value).startswith(
        f"{path}: mdoe: no setting has this name. Did you mean KV_CANARY_MODE?"
    )


def test_a_wide_bind_without_a_token_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="only binds to loopback"):
        load(ServiceConfig, environ={"KV_CANARY_HOST": "0.0.0.0"})
    assert load(ServiceConfig, environ={"KV_CANARY_HOST": "0.0.0.0", "KV_CANARY_TOKEN": TOKEN}).token
    assert load(ServiceConfig, environ={"KV_CANARY_HOST": "::1"}).host == "::1"


TOKEN = "0123456789abcdef"


@pytest.mark.parametrize("token", ["x", "change-me", "s3cret", TOKEN[:-1], "a" * 64, f" {TOKEN[:-1]}\n"])
def test_a_token_that_can_be_guessed_is_refused_beyond_loopback(token: str) -> None:
    with pytest.raises(ConfigurationError, match="beyond loopback it needs 16 characters") as caught:
        load(ServiceConfig, environ={"KV_CANARY_HOST": "0.0.0.0", "KV_CANARY_TOKEN": token})
    assert caught.value.setting == "KV_CANARY_TOKEN"
    assert token.strip() not in str(caught.value).replace("example", "") or len(token) == 1
    assert load(ServiceConfig, environ={"KV_CANARY_TOKEN": token}).token


@pytest.mark.parametrize("token", ["change-me-change-me-now", "password12345678", "YOUR_TOKEN_0123456789"])
def test_a_placeholder_is_refused_beyond_loopback(token):
    with pytest.raises(ConfigurationError, match="beyond loopback it must not be a placeholder") as caught:
        load(ServiceConfig, environ={"KV_CANARY_HOST": "0.0.0.0", "KV_CANARY_TOKEN": token})
    assert token not in str(caught.value)


def test_an_empty_line_is_no_token() -> None:
    for host in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(ConfigurationError, match="nothing but white space"):
            load(ServiceConfig, environ={"KV_CANARY_HOST": host, "KV_CANARY_TOKEN": "\n"})


def test_a_token_of_the_wrong_type_is_not_printed(tmp_path: Path) -> None:
    path = tmp_path / "canary.toml"
    path.write_text("token = [7245531]\n")
    with pytest.raises(ConfigurationError) as caught:
        load(ServiceConfig, environ={"KV_CANARY_CONFIG": str(path)})
    assert "7245531" not in str(caught.value)


def test_secrets_are_masked() -> None:
    shown = masked(load(ServiceConfig, environ={"KV_CANARY_TOKEN": "s3cret"}))
    assert shown["token"] == "***"
    assert "s3cret" not in str(shown)


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("1%", PatrolBudget(fraction=0.01)),
        ("0.5", PatrolBudget(fraction=0.5)),
        ("15GB/s", PatrolBudget(bytes_per_second=15e9)),
        ("2 MB/s", PatrolBudget(bytes_per_second=2e6)),
        ("off", PatrolBudget()),
        ("0", PatrolBudget()),
    ],
)
def test_patrol_budgets(text: str, budget: PatrolBudget) -> None:
    assert parse_patrol_budget(text) == budget


def test_perturb_modes() -> None:
    assert parse_perturb("real_kv_used=0.05, req_to_token=1") == {
        PerturbMode.REAL_KV_USED: 0.05,
        PerturbMode.REQ_TO_TOKEN: 1.0,
    }
    assert parse_perturb("") == {}


def test_an_error_survives_pickling_between_processes() -> None:
    error = ConfigurationError("a", 1, "rule", "remedy")
    rebuilt = error.__reduce__()[0](*error.__reduce__()[1])
    assert str(rebuilt) == str(error)


@pytest.mark.parametrize("text", ["inf", "1e308", "nan", "-1", "0"])
@pytest.mark.parametrize("name", ["SNAPSHOT_STALE_SECONDS", "STEP_TIMEOUT_SECONDS", "SWEEP_TIMEOUT_SECONDS"])
def test_a_time_out_is_finite(name, text):
    with pytest.raises(ConfigurationError, match=f"KV_CANARY_{name}"):
        load(ServiceConfig, environ={f"KV_CANARY_{name}": text})


@pytest.mark.parametrize("settings", [CanaryConfig, ServiceConfig])
def test_every_number_has_both_bounds_and_they_hold(settings) -> None:
    """A value that nobody means is refused at start, not met as an error or a state that never changes."""
    for field in msgspec.structs.fields(settings):
        for kind in _numbers(msgspec.inspect.type_info(field.type)):
            lowest = [bound for bound in (kind.ge, kind.gt) if bound is not None]
            highest = [bound for bound in (kind.le, kind.lt) if bound is not None]
            assert lowest, f"{field.name} has no lower bound"
            assert highest, f"{field.name} has no upper bound"
            for value in ("inf", "nan", "1e308", "9" * 30, repr(highest[0] * 2 + 1), repr(lowest[0] - 1)):
                with pytest.raises(ConfigurationError) as caught:
                    load(settings, environ={f"KV_CANARY_{field.name.upper()}": value})
                assert caught.value.setting == f"KV_CANARY_{field.name.upper()}"


def _numbers(kind):
    kinds = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    return [each for each in kinds if isinstance(each, msgspec.inspect.IntType | msgspec.inspect.FloatType)]


@pytest.mark.parametrize("text", ["1e308GB/s", "99999999999TB/s", "infGB/s", "nan%", "101%"])
def test_a_patrol_budget_that_nobody_means_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="patrol_budget"):
        parse_patrol_budget(text)


def test_an_address_that_no_browser_opens_is_refused_with_the_ones_that_are_taken() -> None:
    remedy = "Use an http:// or https:// address, or nothing"
    with pytest.raises(ConfigurationError, match=f"KV_CANARY_RUNBOOK_BASE='javascript:1'.*{remedy}"):
        load(ServiceConfig, environ={"KV_CANARY_RUNBOOK_BASE": "javascript:1"})
