"""A live service with 64 ranks, which answer commands at once, and the command line in this process."""

from __future__ import annotations

import json

import pytest

from canary_obs.cli import run
from canary_obs.config import PREFIX, ServiceConfig
from canary_obs.records import Violations
from canary_obs.serve import ServiceThread
from canary_obs.transport.links import LocalLink
from tests.service.conftest import FakeRank
from tests.service.fakes import identity, snapshot, violation

RANKS = 64
TOKEN = "operate-0123456789abcdef"
DRILLS = "inject-0123456789abcdefg"


class Fleet:
    """A service over HTTP and its ranks."""

    def __init__(self, folder) -> None:
        self.tokens = tokens = folder / "tokens.toml"
        tokens.write_text(f'[drills]\ntoken = "{DRILLS}"\nscopes = ["inject"]\n')
        tokens.chmod(0o600)
        config = ServiceConfig(
            port=0, token=TOKEN, tokens_file=str(tokens), drill_enabled=True, snapshot_stale_seconds=600.0,
            orders_per_minute=100_000, log_file=str(folder / "log"),
        )  # fmt: skip
        self.service = ServiceThread(config, link=LocalLink())
        self.hub, self.url = self.service.hub, self.service.url
        self.ranks = [FakeRank(self.hub, who=identity(number)) for number in range(RANKS)]

    def damage(self, number: int, slot: int = 3) -> str:
        """A violation of one rank; the id of its incident."""
        rank = self.ranks[number]
        rank.send(Violations(identity=rank.identity, rows=(violation(slot),)))
        rank.send(snapshot(rank.identity, 9, violations=1))
        return self.hub.incidents.newest_first()[0].id


@pytest.fixture
def fleet(tmp_path):
    made = Fleet(tmp_path)
    yield made
    made.service.close()


@pytest.fixture
def cli(fleet, monkeypatch, capsys):
    """Runs a command line against the fleet: exit code, standard output, standard error."""
    for name, value in (("URL", fleet.url), ("TOKEN", TOKEN)):
        monkeypatch.setenv(PREFIX + name, value)
    monkeypatch.setenv("COLUMNS", "220")

    def invoke(line: str) -> tuple[int, str, str]:
        code = run(line.split())
        return code, *capsys.readouterr()

    return invoke


@pytest.fixture
def asked(cli):
    """The JSON of a command line that ends with this code."""

    def ask(line: str, code: int = 0):
        found, out, err = cli(f"{line} --json")
        assert found == code, err
        return json.loads(out)

    return ask
