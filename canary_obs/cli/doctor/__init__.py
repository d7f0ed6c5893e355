"""`canary-obs doctor`."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.table import Table

from canary_obs.cli.doctor.finding import Findings, Grade
from canary_obs.cli.doctor.fleet import examine_fleet
from canary_obs.cli.doctor.host import examine_host
from canary_obs.cli.doctor.rules import examine_rules
from canary_obs.cli.doctor.service import examine_service
from canary_obs.cli.exit_codes import ExitCode, end_with
from canary_obs.cli.output import print_table, write_out
from canary_obs.cli.service_client import client_of
from canary_obs.cli.service_options import TokenFile, Url
from canary_obs.cli.words import plain
from canary_obs.plurals import counted

_COLOURS = {Grade.FINE: "green", Grade.WARNING: "yellow", Grade.UNKNOWN: "magenta", Grade.PROBLEM: "bold red"}
_CODES = {Grade.PROBLEM: ExitCode.BLIND, Grade.UNKNOWN: ExitCode.DEGRADED, Grade.WARNING: ExitCode.DEGRADED}


def doctor(
    url: Url = None,
    token_file: TokenFile = None,
    prometheus: Annotated[str | None, typer.Option(help="URL of the Prometheus that scrapes it.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look at this host, the service, its ranks and the alerts: what is wrong or not covered, and the remedy.

    Exits with 0 when all is fine, 5 with warnings or what could not be looked at, 4 with problems.
    """
    findings = Findings()
    examine_host(findings)
    with findings.refusals("service"):
        status = examine_service(findings, client_of(url, token_file))
        if status is not None:
            examine_fleet(findings, status)
    with findings.refusals("alerts"):
        examine_rules(findings, prometheus)
    if json:
        write_out(msgspec.json.format(msgspec.json.encode(findings.all)).decode() + "\n")
    else:
        _print(findings)
    grades = {found.grade for found in findings.all}
    end_with(next((_CODES[grade] for grade in _CODES if grade in grades), ExitCode.OK))


def _print(findings: Findings) -> None:
    table = Table("", "topic", "found", "remedy", show_lines=False)
    for found in findings.all:
        grade = plain(found.grade.value)
        grade.stylize(_COLOURS[found.grade])
        table.add_row(grade, plain(found.topic), plain(found.text), plain(found.remedy))
    print_table(table)
    worse = sum(found.grade is not Grade.FINE for found in findings.all)
    write_out(f"{counted(len(findings.all), 'thing')} looked at; to attend to: {worse}\n")
