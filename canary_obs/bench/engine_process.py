"""An engine of a bench in a process of its own, as in production, asked line by line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Self

from canary_obs.errors import CanaryError

_END_SECONDS = 60


class EngineEnded(CanaryError):
    """An engine of the bench ended before its answer."""


class EngineProcess:
    """A process that runs one engine: a line of JSON is a request, and another one its answer."""

    def __init__(self, module: str, settings: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        """`module` is given its settings as JSON, and the descriptors of requests and answers.

        `environ` is added to this process's environment without KV_CANARY_*.
        """
        requests, own_requests = os.pipe()
        own_answers, answers = os.pipe()
        kept = {key: value for key, value in os.environ.items() if not key.startswith("KV_CANARY_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(settings), str(requests), str(answers)],
            env=kept | dict(environ), pass_fds=(requests, answers), stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
        )  # fmt: skip
        os.close(requests)
        os.close(answers)
        self._to = os.fdopen(own_requests, "w")
        self._from = os.fdopen(own_answers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self._to.close()
        self._from.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, what: str, seed: int) -> dict[str, Any]:
        """The answer to a request, once it has come. Raises EngineEnded."""
        print(json.dumps([what, seed]), file=self._to, flush=True)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next answer; the first one says that the engine has started. Raises EngineEnded."""
        line = self._from.readline()
        if not line:
            raise EngineEnded(f"an engine ended with {self._process.wait()} before its answer; see its log")
        found: dict[str, Any] = json.loads(line)
        return found
