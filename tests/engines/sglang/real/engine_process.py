"""Answers of an SGLang `Engine`, whose scheduler runs in a process of its own, written to a file as JSON.

With the setting `alone`: of a scheduler in this process, which starts in a third of the time. With
`gpus_hooks`: with the hooks and views that a GPU's forwards are checked with.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

from canary_obs.engines.sglang import adapter
from tests.engines.sglang.real import streams
from tests.engines.sglang.real.rig import DEFAULTS, Rig
from tests.engines.sglang.real.stand_ins import attention, attention_over_data
from tests.engines.sglang.real.traffic import prompts


def main(model: str, result: str, rounds: str, settings: str) -> None:
    """Engine settings are JSON, in addition to the tests' defaults."""
    given = json.loads(settings)
    if "alone" in given:
        _alone(Path(model), Path(result), int(rounds))
        return
    if given.pop("gpus_hooks", False):
        adapter.concurrent = lambda device: True
    if given.get("enable_dp_attention"):
        streams.install()
        attention()
        attention_over_data()
    from sglang.srt.entrypoints.engine import Engine

    # SGLang spawns its processes, each of which imports all of it: these are forked.
    # Those of test_server.py are spawned.
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[method-assign,assignment]
    engine = Engine(model_path=model, **(DEFAULTS | given))
    found: list[Any] = []
    sampling = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
    for seed in range(int(rounds)):
        asked = list(prompts(12, seed, longest=280).values())
        answers = engine.generate(input_ids=asked, sampling_params=sampling)
        found += [answer["output_ids"] for answer in answers]
    _write(Path(result), found)
    sys.stdin.readline()
    engine.shutdown()


def _alone(model: Path, result: Path, rounds: int) -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    rig = Rig(model)
    found = [rig.generate(prompts(12, seed, longest=280), 24) for seed in range(rounds)]
    _write(result, [answer for answers in found for answer in answers.values()])
    sys.stdin.readline()
    os._exit(0)  # its threads would hold Python up


def _write(result: Path, answers: list[Any]) -> None:
    """Whole at once: the test reads the file as soon as it is there."""
    unfinished = result.with_suffix(".part")
    unfinished.write_text(json.dumps(answers), "utf-8")
    unfinished.replace(result)


if __name__ == "__main__":
    main(*sys.argv[1:])
