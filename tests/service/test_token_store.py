from __future__ import annotations

import os

import pytest

from canary_obs.config import ServiceConfig
from canary_obs.errors import ConfigurationError
from canary_obs.service.route_policy import TokenScope, permits
from canary_obs.service.token_store import ANONYMOUS, TokenStore

READER, WRITER = "reader-0123456789abcdef", "writer-0123456789abcdef"


@pytest.fixture
def written(tmp_path):
    def write(text: str) -> ServiceConfig:
        path = tmp_path / "tokens.toml"
        path.write_text(text)
        path.chmod(0o600)
        return ServiceConfig(host="0.0.0.0", tokens_file=str(path))

    return write


def table(name: str, token: str, *scopes: str) -> str:
    return f'[{name}]\ntoken = "{token}"\nscopes = {list(scopes)}\n'


def test_each_token_has_its_own_name_and_scopes(written):
    store = TokenStore(
        written(table("prometheus", READER, "read") + table("oncall", WRITER, "operate", "inject"))
    )
    reader, writer = store.authenticate(f"Bearer {READER}"), store.authenticate(f"bearer {WRITER}")
    assert (reader.name, reader.scopes) == ("prometheus", {TokenScope.READ})
    assert (writer.name, writer.scopes) == ("oncall", {TokenScope.OPERATE, TokenScope.INJECT})
    for header in ("", READER, f"Basic {READER}", f"Bearer {READER}x", f"Bearer {READER[:-1]}", "Bearer"):
        assert store.authenticate(header) is None


def test_the_single_token_reads_and_operates_besides_those_of_the_file(written):
    config = written(table("prometheus", READER, "read"))
    store = TokenStore(ServiceConfig(token="short-ü", tokens_file=config.tokens_file))
    single = store.authenticate("Bearer " + "short-ü".encode().decode("latin-1"))
    assert (single.name, single.scopes) == ("default", {TokenScope.READ, TokenScope.OPERATE})
    assert store.authenticate(f"Bearer {READER}").name == "prometheus"


def test_a_token_that_can_be_guessed_is_reported_on_loopback(caplog):
    TokenStore(ServiceConfig(token="hunter2"))
    (record,) = caplog.records
    assert "KV_CANARY_TOKEN can be guessed: it needs 16 characters" in record.getMessage()
    assert "hunter2" not in record.getMessage()
    caplog.clear()
    TokenStore(ServiceConfig(token=READER))
    assert caplog.records == []


def test_without_tokens_local_callers_read_and_operate_but_do_not_inject():
    assert TokenStore(ServiceConfig()).authenticate("") is ANONYMOUS
    assert ANONYMOUS.scopes == {TokenScope.READ, TokenScope.OPERATE}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "contains no token"),
        ("[x\n", "TOMLDecodeError"),
        (table("a b", READER, "read").replace("[a b]", '["a b"]'), "regex"),
        (table("a", "too-short", "read"), "regex"),
        (table("a", "a" * 32, "read"), "'a': it needs 16 characters, 8 of them different"),
        (table("a", "Change-Me-0123456789abcdef", "read"), "'a': it must not be a placeholder"),
        (table("a", READER), "length >= 1"),
        (table("a", READER, "write"), "Invalid enum value 'write'"),
        ('[a]\ntoken = "' + READER + '"\n', "missing required field `scopes`"),
        (table("a", READER, "read") + "scope = 1\n", "unknown field `scope`"),
        (
            table("a", READER, "read") + table("b", READER, "operate"),
            "'b' has the name or the token of another",
        ),
    ],
)
def test_an_unusable_file_is_refused_without_its_secrets(written, text, message):
    with pytest.raises(ConfigurationError) as caught:
        TokenStore(written(text))
    assert caught.value.setting == "tokens_file"
    assert message in str(caught.value)
    assert READER not in str(caught.value)
    assert "too-short" not in str(caught.value)


def test_the_name_of_the_single_token_is_reserved(written):
    config = written(table("default", READER, "read"))
    with pytest.raises(ConfigurationError, match="KV_CANARY_TOKEN"):
        TokenStore(ServiceConfig(token=WRITER, tokens_file=config.tokens_file))
    assert TokenStore(config).authenticate(f"Bearer {READER}").name == "default"


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="No such file"):
        TokenStore(ServiceConfig(tokens_file=str(tmp_path / "none.toml")))


def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "tokens")
    with pytest.raises(ConfigurationError, match="is not a file"):
        TokenStore(ServiceConfig(tokens_file=str(tmp_path / "tokens")))


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o666, 0o620, 0o660, 0o601])
def test_a_file_that_others_can_read_or_change_is_refused(written, mode):
    config = written(table("a", READER, "read"))
    os.chmod(config.tokens_file, mode)
    with pytest.raises(ConfigurationError, match=f"has mode {mode:04o}.*chmod 600"):
        TokenStore(config)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440])
def test_the_group_may_read_as_it_does_in_kubernetes(written, mode):
    config = written(table("a", READER, "read"))
    os.chmod(config.tokens_file, mode)
    assert not TokenStore(config).empty


def test_white_space_around_the_single_token_does_not_count():
    store = TokenStore(ServiceConfig(token=f"{WRITER}\n"))
    assert store.authenticate(f"Bearer {WRITER}").name == "default"


def test_scraping_is_part_of_reading_and_nothing_else():
    def permitted(granted: TokenScope) -> set[TokenScope]:
        return {scope for scope in TokenScope if permits({granted}, scope)}

    assert permitted(TokenScope.READ) == {TokenScope.READ, TokenScope.SCRAPE}
    for scope in (TokenScope.SCRAPE, TokenScope.OPERATE, TokenScope.INJECT):
        assert permitted(scope) == {scope}
