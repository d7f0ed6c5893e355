from __future__ import annotations

import pytest

from canary_obs.config import ServiceConfig
from canary_obs.errors import ConfigurationError
from canary_obs.service.route_policy import TokenScope
from canary_obs.service.token_store import ANONYMOUS, TokenStore

READER, WRITER = "reader-0123456789abcdef", "writer-0123456789abcdef"


@pytest.fixture
def written(tmp_path):
    def write(text: str) -> ServiceConfig:
        path = tmp_path / "tokens.toml"
        path.write_text(text)
        return ServiceConfig(host="0.0.0.0", tokens_file=str(path))

    return write


def table(name: str, token: str, *scopes: str) -> str:
    return f'[{name}]\ntoken = "{token}"\nscopes = {list(scopes)}\n'


def test_each_token_has_its_own_name_and_scopes(written):
    ring = TokenStore(
        written(table("prometheus", READER, "read") + table("oncall", WRITER, "operate", "inject"))
    )
    reader, writer = ring.caller(f"Bearer {READER}"), ring.caller(f"bearer {WRITER}")
    assert (reader.name, reader.scopes) == ("prometheus", {TokenScope.READ})
    assert (writer.name, writer.scopes) == ("oncall", {TokenScope.OPERATE, TokenScope.INJECT})
    for header in ("", READER, f"Basic {READER}", f"Bearer {READER}x", f"Bearer {READER[:-1]}", "Bearer"):
        assert ring.caller(header) is None


def test_the_single_token_reads_and_operates_and_stays_beside_the_file(written):
    config = written(table("prometheus", READER, "read"))
    ring = TokenStore(ServiceConfig(token="short-ü", tokens_file=config.tokens_file))
    single = ring.caller("Bearer " + "short-ü".encode().decode("latin-1"))
    assert (single.name, single.scopes) == ("default", {TokenScope.READ, TokenScope.OPERATE})
    assert ring.caller(f"Bearer {READER}").name == "prometheus"


def test_without_tokens_anybody_on_this_machine_reads_and_operates_but_does_not_inject():
    assert TokenStore(ServiceConfig()).caller("") is ANONYMOUS
    assert ANONYMOUS.scopes == {TokenScope.READ, TokenScope.OPERATE}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no token"),
        ("[x\n", "TOMLDecodeError"),
        (table("a b", READER, "read").replace("[a b]", '["a b"]'), "regex"),
        (table("a", "too-short", "read"), "regex"),
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
def test_a_file_that_cannot_be_used_is_refused_without_its_secrets(written, text, told):
    with pytest.raises(ConfigurationError) as caught:
        TokenStore(written(text))
    assert caught.value.setting == "tokens_file"
    assert told in str(caught.value)
    assert READER not in str(caught.value)
    assert "too-short" not in str(caught.value)


def test_the_single_tokens_name_is_taken(written):
    config = written(table("default", READER, "read"))
    with pytest.raises(ConfigurationError, match="KV_CANARY_TOKEN"):
        TokenStore(ServiceConfig(token=WRITER, tokens_file=config.tokens_file))
    assert TokenStore(config).caller(f"Bearer {READER}").name == "default"


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="No such file"):
        TokenStore(ServiceConfig(tokens_file=str(tmp_path / "none.toml")))
