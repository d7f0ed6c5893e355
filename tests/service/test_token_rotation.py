"""An edited tokens file takes effect in a running service; one that cannot be used changes nothing."""

from __future__ import annotations

import logging
import os

import pytest

from canary_obs.config import ServiceConfig
from canary_obs.service.app import create_app
from canary_obs.service.auth import SignedIn
from canary_obs.service.sessions import COOKIE
from canary_obs.service.token_store import TokenStore
from canary_obs.vocabulary import State
from tests.service.conftest import client_of

OLD, NEW, OTHER = "old-token-4f1c99aa", "new-token-77b20d1e", "another-token-5512cd"


def table(token, *scopes, name="oncall"):
    return f'[{name}]\ntoken = "{token}"\nscopes = {list(scopes or ("read", "operate"))}\n'


@pytest.fixture
def tokens(tmp_path):
    """The tokens file; `tokens(text)` replaces it, as editors and Kubernetes do."""
    path = tmp_path / "tokens.toml"

    def replace(text, mode=0o600):
        new = tmp_path / "new"
        new.write_text(text)
        new.chmod(mode)
        os.replace(new, path)

    replace.path = path
    replace(table(OLD) + table(OTHER, name="other"))
    return replace


@pytest.fixture
def app(hub, rank, tokens):
    return create_app(hub, ServiceConfig(host="0.0.0.0", tokens_file=str(tokens.path)))


@pytest.fixture
def client(app):
    with client_of(app) as found:
        yield found


def status(client, token):
    return client.get("/canary/status", headers={"Authorization": f"Bearer {token}"}).status_code


def test_a_replaced_token_is_refused_and_the_new_one_accepted(client, tokens, caplog):
    assert (status(client, OLD), status(client, NEW)) == (200, 401)
    with caplog.at_level(logging.WARNING, "canary_obs"):
        tokens(table(NEW) + table(OTHER, name="other"))
        assert (status(client, OLD), status(client, NEW), status(client, OTHER)) == (401, 200, 200)
    (line,) = caplog.messages
    assert str(tokens.path) in line
    assert "oncall, other" in line
    assert NEW not in line


def test_a_file_that_is_written_in_place_takes_effect(client, tokens):
    tokens.path.write_text(table(NEW, "read") + "\n")
    assert (status(client, OLD), status(client, NEW)) == (401, 200)


def test_a_session_ends_with_its_token_and_no_other_does(app, client, tokens):
    def sign_in(token):
        assert client.post("/console/session", json={"token": token}).status_code == 200
        return {"headers": {"Cookie": f"{COOKIE}={client.cookie(COOKIE)}"}}

    gone, kept = sign_in(OLD), sign_in(OTHER)
    with client_of(app) as bare:
        assert [bare.get("/canary/status", **each).status_code for each in (gone, kept)] == [200, 200]
        tokens(table(NEW) + table(OTHER, name="other"))
        assert [bare.get("/canary/status", **each).status_code for each in (gone, kept)] == [401, 200]
        tokens(table(OLD) + table(OTHER, name="other"))
        assert bare.get("/canary/status", **gone).status_code == 401, "it has ended for good"


def test_scopes_that_were_taken_away_are_gone(client, tokens):
    order = {"headers": {"Authorization": f"Bearer {OLD}"}}
    assert client.post("/canary/pause", **order).status_code == 202
    tokens(table(OLD, "read"))
    assert client.post("/canary/resume", **order).status_code == 403


def test_what_is_open_ends_with_the_token_that_opened_it(app, tokens):
    """Event streams ask `lasts` again and again, those of programs, with a token in their header, too."""
    sign_in = app.state.context.sign_in
    store = sign_in.token_store
    streams = {
        token: SignedIn(store.authenticate(f"Bearer {token}"), None, sign_in) for token in (OLD, OTHER)
    }
    assert all(stream.lasts() for stream in streams.values())
    tokens(table(NEW) + table(OTHER, name="other"))
    assert not streams[OLD].lasts(), "another token under the same name is another one"
    assert streams[OTHER].lasts()
    tokens(table(NEW) + table(OTHER, "scrape", name="other"))
    assert not streams[OTHER].lasts(), "it may no longer read"


BAD = {
    "no TOML": (lambda tokens: tokens("oncall = ["), "TOMLDecodeError"),
    "a scope that does not exist": (lambda tokens: tokens(table(NEW, "root")), "root"),
    "a token that can be guessed": (lambda tokens: tokens(table("change-me-change-me")), "placeholder"),
    "readable by all": (lambda tokens: tokens(table(NEW), 0o644), "mode 0644"),
    "no token at all": (lambda tokens: tokens(""), "contains no token"),
    "gone": (lambda tokens: tokens.path.unlink(), "No such file"),
}


@pytest.mark.parametrize(("spoil", "reason"), BAD.values(), ids=BAD)
def test_a_file_that_cannot_be_used_changes_nothing_and_is_told(client, hub, tokens, caplog, spoil, reason):
    with caplog.at_level(logging.ERROR, "canary_obs"):
        spoil(tokens)
        assert [status(client, token) for token in (OLD, OTHER, NEW, OLD)] == [200, 200, 401, 200]
    (line,) = caplog.messages
    assert reason in line
    assert "remain valid" in line
    assert NEW not in line
    assert hub.counts().faults == {"tokens_file": 1}
    state, reasons = hub.verdict()
    assert state is State.DEGRADED
    assert any("tokens_file" in text and reason in text for text in reasons)
    tokens(table(NEW))
    assert [status(client, token) for token in (OLD, NEW)] == [401, 200]
    assert hub.verdict()[0] is State.OK, "a file that can be used again ends it"
    assert hub.counts().faults == {"tokens_file": 1}


def test_the_token_of_the_environment_stays(tokens):
    store = TokenStore(ServiceConfig(token=NEW, tokens_file=str(tokens.path)))
    tokens(table(OLD, "inject"))
    assert store.authenticate(f"Bearer {NEW}").name == "default"
    assert store.authenticate(f"Bearer {OTHER}") is None
    tokens(table(NEW))  # the environment's, under another name
    assert store.authenticate(f"Bearer {NEW}").name == "default"
    assert store.authenticate(f"Bearer {OLD}").scopes == {"inject"}, "that file was refused"
