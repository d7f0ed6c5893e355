"""The command `canary-obs`. Refusals are one line on standard error and exit code 2."""

from __future__ import annotations

import contextlib
import os
import sys

import typer

from canary_obs.cli.bench import bench
from canary_obs.cli.demo import demo
from canary_obs.cli.incident import incident
from canary_obs.cli.keys import keys
from canary_obs.cli.metrics import metrics
from canary_obs.cli.serve import serve
from canary_obs.cli.settings import settings
from canary_obs.config import PREFIX, SETTING_NAMES
from canary_obs.errors import ConfigurationError, KVCacheViolation, UnsupportedEngine

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)
for command in (demo, serve, settings, metrics, keys):
    app.command()(command)
app.add_typer(bench, name="bench")
app.add_typer(incident, name="incident")


def main() -> None:
    """Run the command line."""
    try:
        app()
    except KVCacheViolation as violation:
        sys.stderr.write(f"KVCacheViolation: {violation}\n")
        sys.exit(1)
    except (ConfigurationError, UnsupportedEngine) as error:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # full, closed, or none at all
            sys.stderr.write(f"error: {_named_as_given(error)}\n")
            sys.stderr.flush()
        sys.exit(2)


def _named_as_given(error: ConfigurationError | UnsupportedEngine) -> str:
    """The message; a setting that came from the environment is named by its variable."""
    if isinstance(error, ConfigurationError):
        variable = f"{PREFIX}{error.setting.upper()}"
        if error.setting in SETTING_NAMES and variable in os.environ:
            return str(ConfigurationError(variable, error.value, error.rule, error.remedy))
    return str(error)
