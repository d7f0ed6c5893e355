"""Sign-in with a token: cookie sessions, their end, and the protection of their write requests."""

from __future__ import annotations

import pytest

from canary_obs.config import ServiceConfig
from canary_obs.records import Pause
from canary_obs.service.app import create_app
from canary_obs.service.context import Dependencies
from canary_obs.service.sessions import IDLE_SECONDS, SESSIONS_PER_TOKEN
from canary_obs.service.sign_in import ATTEMPTS_PER_MINUTE
from tests.service.conftest import bearer, check_problem, client_of

READER, ONCALL, DRILLER, SCRAPER = (f"{name}-0123456789abcdef" for name in ("read", "oncall", "drill", "scr"))
TOKENS = f"""
[reader]
token = "{READER}"
scopes = ["read"]
[oncall]
token = "{ONCALL}"
scopes = ["read", "operate"]
[driller]
token = "{DRILLER}"
scopes = ["read", "operate", "inject"]
[prometheus]
token = "{SCRAPER}"
scopes = ["scrape"]
"""
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
HOST = "canary.example:9464"
COOKIE = "kv_canary_session_9464"


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def events():
    return []


@pytest.fixture
def app(hub, rank, events, clock, tmp_path):
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS)
    path.chmod(0o600)
    config = ServiceConfig(host="0.0.0.0", tokens_file=str(path), session_seconds=7200.0)
    return create_app(hub, config, dependencies=Dependencies(audit=events.append, clock=clock))


@pytest.fixture
def browser(app):
    """A client that keeps cookies, as browsers do."""
    with client_of(app, f"http://{HOST}") as client:
        yield client


def sign_in(client, token=ONCALL, **options):
    return client.post("/console/session", json={"token": token}, **options)


def csrf(client):
    return {"X-CSRF-Token": client.get("/console/session").json()["csrf"]}


# The page without a session.


@pytest.mark.parametrize(
    ("path", "target"), [("/", "sign-in"), ("/incidents/abc", "../sign-in?next=incidents/abc")]
)
def test_a_browser_without_a_session_is_sent_to_the_sign_in_page(browser, path, target):
    answer = browser.get(path, headers=BROWSER)
    assert (answer.status_code, answer.headers["location"]) == (303, target)
    page = browser.get("/sign-in", headers=BROWSER)
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert 'type="password"' in page.text


def test_programs_still_get_401(browser):
    check_problem(browser.get("/"), 401)
    check_problem(browser.get("/canary/status", headers=BROWSER), 401)
    check_problem(browser.get("/", headers=bearer("wrong") | {"Accept": "application/json"}), 401)
    assert browser.get("/", headers=bearer(READER)).status_code == 200


# Sign-in.


def test_a_token_opens_a_session(browser):
    answer = sign_in(browser)
    assert answer.status_code == 200
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"{COOKIE}=")
    attributes = {part.strip().lower() for part in cookie.split(";")[1:]}
    assert attributes == {"httponly", "samesite=strict", "path=/", "max-age=7200"}
    assert ONCALL not in cookie + answer.text
    assert browser.get("/", headers=BROWSER).status_code == 200
    assert browser.get("/canary/status").status_code == 200
    session = browser.get("/console/session").json()
    assert (session["token"], session["scopes"]) == ("oncall", ["operate", "read"])


def test_behind_tls_the_cookie_is_secure(app):
    with client_of(app, "https://canary.example") as client:
        cookie = sign_in(client).headers["set-cookie"]
    assert "; secure" in cookie.lower()
    assert cookie.startswith("kv_canary_session=")


def test_an_unknown_token_opens_none(browser, events):
    answer = sign_in(browser, "oncall-0123456789abcdeF")
    check_problem(answer, 401, "unknown-token")
    assert "set-cookie" not in answer.headers
    check_problem(browser.get("/canary/status"), 401)
    assert [(event.route, event.token, event.status) for event in events] == [("/console/session", None, 401)]


def test_the_console_needs_the_scope_read(browser):
    document = check_problem(sign_in(browser, SCRAPER), 403, "missing-scope")
    assert document["needed"] == "read"
    check_problem(browser.get("/canary/status"), 401)


@pytest.mark.parametrize("body", [b"", b"{}", b'{"token":1}', b'{"token":"a","more":1}'])
def test_a_malformed_sign_in_is_422(browser, body):
    answer = browser.post("/console/session", content=body, headers={"content-type": "application/json"})
    check_problem(answer, 422, "invalid-request")


def test_attempts_are_limited_by_address(browser, events, clock):
    for _ in range(ATTEMPTS_PER_MINUTE):
        check_problem(sign_in(browser, "wrong"), 401, "unknown-token")
    refused = sign_in(browser)  # the right one, too: else guessing would go on
    check_problem(refused, 429, "too-many-attempts")
    assert int(refused.headers["retry-after"]) >= 1
    assert len(events) == ATTEMPTS_PER_MINUTE  # what is limited cannot fill the log
    clock.now += 60.0
    assert sign_in(browser).status_code == 200


def test_a_success_is_no_failed_attempt(browser):
    for _ in range(ATTEMPTS_PER_MINUTE + 1):
        assert sign_in(browser).status_code == 200


def test_a_foreign_page_cannot_sign_in(browser):
    check_problem(sign_in(browser, headers={"Origin": "http://evil.example"}), 403)


def test_without_tokens_there_is_nothing_to_sign_in_to(client, rank):
    check_problem(sign_in(client, "any"), 409, "no-tokens")
    session = client.get("/console/session").json()
    assert session == {
        "token": None, "scopes": ["operate", "read"], "csrf": None, "ends_ns": None, "drill_enabled": False,
    }  # fmt: skip
    assert client.get("/", headers=BROWSER).status_code == 200
    assert client.post("/canary/pause").status_code == 202


# Write requests of a session.


def test_a_session_writes_with_its_csrf_token_only(browser, rank, events):
    sign_in(browser)
    good = csrf(browser)
    for headers in ({}, {"X-CSRF-Token": "wrong"}, {"X-CSRF-Token": ""}):
        check_problem(browser.post("/canary/pause", headers=headers), 403, "csrf")
    assert Pause() not in rank.received
    assert browser.post("/canary/pause", headers=good).status_code == 202
    assert rank.received[-1] == Pause()
    pauses = [(event.token, event.status) for event in events if event.route == "/canary/pause"]
    assert pauses == [("oncall", 403)] * 3 + [("oncall", 202)]


def test_the_csrf_token_of_one_session_is_no_other_ones(app, browser):
    sign_in(browser)
    first = csrf(browser)
    with client_of(app, f"http://{HOST}") as other:
        sign_in(other)
        check_problem(other.post("/canary/pause", headers=first), 403, "csrf")


def test_scopes_and_limits_of_a_session_are_its_tokens(browser):
    sign_in(browser, READER)
    check_problem(browser.post("/canary/pause", headers=csrf(browser)), 403, "missing-scope")
    check_problem(browser.post("/canary/drill", headers=csrf(browser)), 403, "missing-scope")


def test_a_bearer_token_needs_no_csrf_token_and_wins_over_the_cookie(browser):
    sign_in(browser, READER)
    assert browser.post("/canary/pause", headers=bearer(ONCALL)).status_code == 202
    check_problem(browser.post("/canary/pause", headers=bearer("wrong") | csrf(browser)), 401)


# The end of a session.


def test_signing_out_ends_it_on_the_server(browser, events):
    sign_in(browser)
    kept = browser.cookie(COOKIE)
    check_problem(browser.delete("/console/session"), 403, "csrf")
    answer = browser.delete("/console/session", headers=csrf(browser))
    assert answer.status_code == 204
    assert "max-age=0" in answer.headers["set-cookie"].lower()
    check_problem(browser.get("/canary/status", headers={"Cookie": f"{COOKIE}={kept}"}), 401)
    assert [(event.method, event.token, event.status) for event in events] == [
        ("POST", "oncall", 200),
        ("DELETE", "oncall", 403),
        ("DELETE", "oncall", 204),
    ]


def test_it_ends_by_time_even_in_use(browser, clock):
    sign_in(browser)
    for _ in range(4):
        clock.now += 1790.0
        assert browser.get("/canary/status").status_code == 200
    clock.now += 41.0
    check_problem(browser.get("/canary/status"), 401)


def test_it_ends_when_unused(browser, clock):
    sign_in(browser)
    clock.now += IDLE_SECONDS + 1.0
    check_problem(browser.get("/canary/status"), 401)


def test_it_ends_with_its_token(browser, app):
    sign_in(browser)
    app.state.context.sign_in.token_store.remove("reader")
    assert browser.get("/canary/status").status_code == 200
    app.state.context.sign_in.token_store.remove("oncall")
    check_problem(browser.get("/canary/status"), 401)


def test_the_number_of_a_tokens_sessions_is_bounded(app, browser):
    sign_in(browser, READER)
    reader = browser.cookie(COOKIE)
    cookies = []
    for _ in range(SESSIONS_PER_TOKEN + 1):
        sign_in(browser)
        cookies.append(browser.cookie(COOKIE))
    with client_of(app, f"http://{HOST}") as bare:
        statuses = [
            bare.get("/canary/status", headers={"Cookie": f"{COOKIE}={cookie}"}).status_code
            for cookie in (*cookies, reader)
        ]
    assert statuses == [401] + [200] * (SESSIONS_PER_TOKEN + 1)


def test_a_stream_of_events_ends_with_its_session(app, browser, clock):
    sign_in(browser)
    clock.now += 7199.0
    sign_in(browser)  # keeps the first one's cookie out of the way

    def advance():
        clock.now += 7201.0

    app.state.context.event_stream.poll = advance  # the stream polls before and after its first frame
    answer = browser.get("/canary/events")
    assert answer.status_code == 200
    assert answer.text.startswith("retry:")
