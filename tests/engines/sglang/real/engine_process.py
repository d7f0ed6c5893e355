"""Answers of an SGLang `Engine`, whose scheduler runs in a process of its own, written to a file as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.engines.sglang.real.rig import DEFAULTS
from tests.engines.sglang.real.traffic import prompts


def main(model: str, result: str, rounds: str, settings: str) -> None:
    """Engine settings are JSON, in addition to the tests' defaults."""
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(model_path=model, **(DEFAULTS | json.loads(settings)))
    found: list[Any] = []
    sampling = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
    for seed in range(int(rounds)):
        asked = list(prompts(12, seed, longest=280).values())
        answers = engine.generate(input_ids=asked, sampling_params=sampling)
        found += [answer["output_ids"] for answer in answers]
    Path(result).write_text(json.dumps(found), "utf-8")
    sys.stdin.readline()
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
