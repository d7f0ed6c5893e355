"""Seeded defects of tokens and of what they allow."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_CONFIG = "tests/test_config.py::"
_STORE = "tests/service/test_token_store.py::"
_GUESSED = _CONFIG + "test_a_token_that_can_be_guessed_is_refused_beyond_loopback"

BINDING = mutants(
    "canary_obs/binding.py",
    ("weakness_of(bare)) is not None", "weakness_of(token)) is not None", _GUESSED),
    (
        "        if word in plain:\n",
        "        if False:\n",
        "tests/test_config.py::test_a_placeholder_is_refused_beyond_loopback",
    ),
    ("or len(set(token)) < _VARIETY", "or False", _GUESSED),
    ("if token and not bare:", "if False:", _CONFIG + "test_an_empty_line_is_no_token"),
)

CONFIG = mutants(
    "canary_obs/config.py",
    (
        "Kept = Annotated[int, Meta(ge=1, le=1_000_000)]",
        "Kept = Annotated[int, Meta(ge=1)]",
        _CONFIG + "test_every_number_has_both_bounds_and_they_hold",
    ),
    ("HIDDEN if hidden else value", "value", _CONFIG + "test_a_token_of_the_wrong_type_is_not_printed"),
)

VALUES = mutants(
    "canary_obs/config_values.py",
    ("if rate > _FASTEST:", "if False:", _CONFIG + "test_a_patrol_budget_that_nobody_means_is_refused"),
)

FILES = mutants(
    "canary_obs/config.py",
    (
        "os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC",
        "os.O_WRONLY | os.O_NONBLOCK",
        "tests/cli/test_refusals.py::test_a_pipe_or_a_device_is_no_settings_file",
    ),
)

_ROTATION = "tests/service/test_token_rotation.py::"

STORE = mutants(
    "canary_obs/service/token_store.py",
    (
        "self._callers = {key: before[key] if before.get(key) == new else new for key, new in found.items()}",
        "self._callers = found | before",
        _ROTATION + "test_a_replaced_token_is_refused_and_the_new_one_accepted",
    ),
    (
        "            self._on_change(error)\n",
        "",
        _ROTATION + "test_a_file_that_cannot_be_used_changes_nothing_and_is_told",
    ),
    (
        "any(kept is caller for kept in self._callers.values())",
        "any(kept.name == caller.name for kept in self._callers.values())",
        _ROTATION + "test_what_is_open_ends_with_the_token_that_opened_it",
    ),
    (
        "if (weakness := weakness_of(grant.token)) is not None:",
        "if (weakness := None) is not None:",
        _STORE + "test_an_unusable_file_is_refused_without_its_secrets",
    ),
    (
        "config.token.strip()",
        "config.token",
        _STORE + "test_white_space_around_the_single_token_does_not_count",
    ),
    (
        "stat.S_IRWXO | stat.S_IWGRP | stat.S_IXGRP",
        "stat.S_IROTH",
        _STORE + "test_a_file_that_others_can_read_or_change_is_refused",
    ),
)

POLICY = mutants(
    "canary_obs/service/route_policy.py",
    (
        "_INCLUDED.get(needed) in granted",
        "TokenScope.READ in granted",
        _STORE + "test_scraping_is_part_of_reading_and_nothing_else",
    ),
)

ALL = BINDING + CONFIG + VALUES + FILES + STORE + POLICY
