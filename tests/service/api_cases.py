"""Made-up requests to every route with a token of each scope: `python -m tests.service.api_cases 5000`.

schemathesis makes valid and invalid ones from the OpenAPI document, and validates the answers by it. Half of
the valid ones name an incident, a sweep and an acknowledgement that exist, or sign in with a right token.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import schemathesis
import typer
from hypothesis import HealthCheck, Phase, assume, given, seed as seeded, settings, strategies
from schemathesis.generation import GenerationMode

from canary_obs.config import ServiceConfig
from canary_obs.hub.acknowledgements import AcknowledgeRequest
from canary_obs.hub.commands import StartSweepRequest
from canary_obs.hub.hub import Hub
from canary_obs.records import Violations
from canary_obs.service.app import create_app
from canary_obs.service.context import Dependencies
from canary_obs.service.route_policy import SCOPE_EXTENSION, TokenScope, permits
from tests.service.conftest import FakeRank
from tests.service.fakes import violation

SECRETS = {scope: f"{scope.value}-0123456789abcdef" for scope in TokenScope}
Answers = Counter[tuple[str, int]]  # by operation, like "GET /metrics", and status


def write_tokens(path: Path) -> Path:
    """A tokens file with a token of each scope."""
    tables = (f'[{scope.value}]\ntoken = "{SECRETS[scope]}"\nscopes = ["{scope}"]\n' for scope in TokenScope)
    path.write_text("".join(tables))
    path.chmod(0o600)
    return path


def _minutes() -> Iterator[float]:
    # Between two requests passes a minute: failed sign-ins are answered, not limited.
    now = 0.0
    while True:
        yield (now := now + 61.0)


class Api:
    """A service without a network, with one rank that answers, two incidents and a sweep."""

    def __init__(self, tokens: Path) -> None:
        self.hub = Hub(ServiceConfig(snapshot_stale_seconds=3600.0))
        # Without its hello the hub knows no groups, so that it accepts any group name.
        self.rank = FakeRank(self.hub, sends_hello=False)
        self._find(3)
        self.hub.incidents.tick(float("inf"))
        self._find(4)
        config = ServiceConfig(tokens_file=str(tokens), orders_per_minute=100_000, drill_enabled=True)
        minutes = _minutes()
        self.app = create_app(self.hub, config, dependencies=Dependencies(clock=lambda: next(minutes)))
        self.app.state.context.event_stream.close()  # streams of events end at once
        schema: Any = schemathesis.openapi.from_asgi(
            "/openapi.json", self.app, headers=headers_of(TokenScope.READ)
        )
        self.operations = [found.ok() for found in schema.get_all_operations()]
        # Made once: it takes longer than a hundred requests.
        self.made_up = [
            (operation, mode, operation.as_strategy(generation_mode=mode))
            for operation in self.operations
            for mode in _modes(operation)
        ]

    def _find(self, slot: int) -> None:
        self.rank.send(Violations(identity=self.rank.identity, rows=(violation(slot),)))

    def name(self, operation: Any, case: Any) -> None:
        """Make a request name what exists."""
        parameters = case.path_parameters
        if "incident_id" in parameters:
            parameters["incident_id"] = self.hub.incidents.newest_first()[0].id
        if "sweep_id" in parameters:
            parameters["sweep_id"] = self.hub.start_sweep(StartSweepRequest()).id
        if "acknowledgement_id" in parameters:
            made = self.hub.acknowledge(AcknowledgeRequest())
            parameters["acknowledgement_id"] = made.id
        if "name" in parameters:
            parameters["name"] = "console.css"
        if operation.label == "POST /console/session":
            case.body = {"token": SECRETS[TokenScope.READ]}

    def scope_of(self, operation: Any) -> str:
        """What an operation requires; "none" = no token."""
        return str(operation.definition.raw[SCOPE_EXTENSION])


def headers_of(scope: TokenScope) -> dict[str, str]:
    return {"Host": "127.0.0.1", "Authorization": f"Bearer {SECRETS[scope]}"}


def answers_to(api: Api, scope: TokenScope, cases: int, seed: int) -> Answers:
    """The answers to at least so many requests with a scope's token, spread over all operations.

    Raises an error for the first one that is a 5xx, or that the document does not describe.
    """
    answers: Answers = Counter()
    while answers.total() < cases:
        share = max(1, (cases - answers.total()) // len(api.made_up))
        for operation, mode, made_up in api.made_up:
            named = _named(api, operation, made_up) if mode is GenerationMode.POSITIVE else made_up
            _ask(operation, named, scope, share, seed, answers)
        seed += 1
    return answers


def _named(api: Api, operation: Any, made_up: Any) -> Any:
    """Every other request, the first one among them, names what exists."""

    def name(case: Any, strange: bool) -> Any:
        if not strange:
            api.name(operation, case)
        return case

    return strategies.builds(name, made_up, strategies.booleans())


def _ask(operation: Any, made_up: Any, scope: TokenScope, cases: int, seed: int, answers: Answers) -> None:
    @seeded(seed)
    @settings(
        max_examples=cases, deadline=None, database=None, phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(made_up)
    def ask(case: Any) -> None:
        # In the address an empty list is nothing, and a list of one is that one: what is wrong would be lost.
        lost = [value for value in (case.query or {}).values() if value in ({}, None) or _short_list(value)]
        assume(not lost)
        answer = case.call(headers=headers_of(scope))
        answers[operation.label, answer.status_code] += 1
        case.validate_response(answer, headers=headers_of(scope))

    ask()


def _short_list(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) < 2


def _modes(operation: Any) -> tuple[GenerationMode, ...]:
    # Where nothing is given nothing can be wrong, but for the token, which a wrong request leaves out.
    given = operation.body or operation.query or operation.headers or operation.path_parameters
    return (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if given else (GenerationMode.POSITIVE,)


def never_done(api: Api, scope: TokenScope, answers: Answers) -> list[str]:
    """Operations that the scope allows and that never succeeded: nothing was learned of their answers."""
    allowed = [
        operation.label
        for operation in api.operations
        if (needed := api.scope_of(operation)) == "none" or permits([scope], TokenScope(needed))
    ]
    return [label for label in allowed if not any(answers[label, status] for status in (200, 202, 204))]


def main(
    cases: Annotated[int, typer.Argument(min=1, help="With each scope.")] = 5000,
    seed: Annotated[int | None, typer.Option(help="Of the requests; default: a fresh one.")] = None,
) -> None:
    """Ask with every scope; ends with a traceback at the first answer that must not be."""
    seed = secrets.randbelow(1 << 32) if seed is None else seed
    print(f"seed {seed}")
    with tempfile.TemporaryDirectory() as folder:
        api = Api(write_tokens(Path(folder) / "tokens.toml"))
        for scope in TokenScope:
            began = time.process_time()
            answers = answers_to(api, scope, cases, seed)
            statuses: Counter[int] = Counter()
            for (_, status), count in answers.items():
                statuses[status] += count
            text = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
            seconds = time.process_time() - began
            print(f"{scope}: {answers.total()} requests in {seconds:.0f} s of processor time; {text}")
            missing = never_done(api, scope, answers)
            assert missing == [], missing


if __name__ == "__main__":
    typer.run(main)
