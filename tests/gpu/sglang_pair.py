"""A prefill and a decode server of SGLang on one GPU, over NIXL: `python -m tests.gpu.sglang_pair`.

Both are engines in processes of their own. They serve prompts without a canary, with one, and with one that
injects faults on the prefill server, before it sends. Both have to say what they have checked, to report
nothing without a fault, and the decode server has to find faults in what arrives. On a CPU the engines have
the hooks of GPUs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from math import inf
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from canary_obs.bench.environment import environment
from canary_obs.bench.sglang_engine import engine_settings
from canary_obs.cli.bench_report import write_json
from canary_obs.config import ServiceConfig
from canary_obs.demo.in_process_vllm import LLAMA, SHAPES
from canary_obs.engines.sglang.untried import ROLES
from canary_obs.engines.toolkit.service_process import free_port
from canary_obs.hub.hub import Hub
from canary_obs.transport.listener import ZmqListener
from tests.engines.sglang.real.traffic import prompts
from tests.gpu.sglang_models import MODELS
from tests.gpu.sglang_ranks import ON_GPUS, ROOT, said

PERTURB = "real_kv_post_forward=0.8,real_kv_unused_cache=0.2"
_TOKENS, _ROUNDS, _REQUESTS = 24, 4, 12
_POOL = 2048  # tokens; all prompts and answers are 3000, so that slots are used again


def serve(folder: Path, role: str, settings: dict[str, Any], answered: int) -> None:
    """One server's process: its answers as one line to the pipe `answered`; ends with its input.

    Its prompts are sent when it has answers. The other server still asks it for their addresses.
    """
    if not ON_GPUS:
        from canary_obs.engines.sglang import adapter
        from tests.engines.sglang.real import host_memory, stand_ins, streams, transfer_backends

        stand_ins.install()
        host_memory.install()
        streams.install()
        transfer_backends.nixl_on_cpu()
        adapter.concurrent = lambda device: True
        multiprocessing.set_start_method("fork", force=True)
        multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[method-assign,assignment]
    from sglang.srt.entrypoints.engine import Engine

    if not ON_GPUS:
        settings["disable_radix_cache"] = role == "decode"
    port = settings["disaggregation_bootstrap_port"]
    engine = Engine(
        model_path=str(folder), max_running_requests=8, chunked_prefill_size=256, context_length=2048,
        max_total_tokens=_POOL, watchdog_timeout=1e6, disaggregation_mode=role,
        **(engine_settings(on_gpu=ON_GPUS) | {"mem_fraction_static": 0.2} | settings),
    )  # fmt: skip
    sampling = {"max_new_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}
    found: list[list[int]] = []
    for seed in range(_ROUNDS):
        asked = list(prompts(_REQUESTS, seed, longest=280).values())
        answers = engine.generate(
            input_ids=asked, sampling_params=[dict(sampling) for _ in asked],
            bootstrap_host=["127.0.0.1"] * len(asked), bootstrap_port=[port] * len(asked),
            bootstrap_room=[1 + seed * _REQUESTS + place for place in range(len(asked))],
        )  # fmt: skip
        found += [list(answer["output_ids"]) for answer in answers]
    with os.fdopen(answered, "w") as pipe:
        pipe.write(json.dumps(found) + "\n")
    sys.stdin.read()
    engine.shutdown()


def run(
    model: dict[str, Any], settings: dict[str, Any], mode: str, *, faults: bool = False
) -> dict[str, Any]:
    """A pair from its start to its end: the decode server's answers, and each server's last word."""
    with TemporaryDirectory(prefix="kvc") as name:
        folder, endpoint = Path(name), f"ipc://{name}/s.sock"
        (folder / "config.json").write_text(json.dumps(model), "utf-8")
        hub = Hub(ServiceConfig(endpoint=endpoint))
        listener = ZmqListener(endpoint, hub)
        given = settings | {"disaggregation_bootstrap_port": free_port()}
        started: dict[str, tuple[subprocess.Popen[bytes], IO[str]]] = {}
        try:
            for number, role in enumerate(ROLES):
                canary = {
                    "KV_CANARY_MODE": mode, "KV_CANARY_ENDPOINT": endpoint, "KV_CANARY_SWEEP_INTERVAL": "16",
                    "KV_CANARY_INSTANCE": role, "KV_CANARY_TRANSFER_RECORDS": "true",
                    "KV_CANARY_VERIFY_ON_HIT": "true", "HF_HUB_OFFLINE": "1",
                }  # fmt: skip
                if not ON_GPUS:
                    canary |= {"SGLANG_CPU_OMP_THREADS_BIND": str(number % (os.cpu_count() or 1))}
                    canary |= {"SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0"}  # waits for CUDA events
                if faults and role == "prefill":
                    canary |= {"KV_CANARY_PERTURB": PERTURB, "KV_CANARY_PERTURB_GROUP": "full"}
                    canary["KV_CANARY_PERTURB_ENABLED"] = "true"
                    canary["KV_CANARY_PATROL_BUDGET"] = "off"  # it would find them before they are sent
                started[role] = _started(name, role, given, canary)
            lines: dict[str, str] = {}
            while waiting := {pipe: role for role, (_, pipe) in started.items() if role not in lines}:
                for pipe in wait(list(waiting)):
                    lines[waiting[pipe]] = line = pipe.readline()
                    assert line, f"{waiting[pipe]} has ended without answers"
            _hear_all(hub)
            codes = []
            for process, _ in started.values():
                process.communicate(timeout=60)
                codes.append(process.returncode)
            assert codes == [0, 0], codes
        finally:
            for process, answered in started.values():
                process.kill()
                answered.close()
            listener.close()
        servers = {rank.identity.instance: said(rank.snapshot) for rank in hub.ranks() if rank.snapshot}
        found = Counter(
            f"{event.identity.instance} {event.violation.phase.value} {event.violation.reason.value}"
            + (" from its peer" if event.violation.peer else "")
            for event in hub.violations()
        )
        return {"answers": json.loads(lines["decode"]), "servers": servers, "found": found}


def _hear_all(hub: Hub) -> None:
    """Wait for what each server says after this."""
    begun = time.monotonic()
    while [rank for rank in hub.ranks() if (rank.snapshot_age or inf) > time.monotonic() - begun]:
        assert time.monotonic() < begun + 30, "a server is silent"
        time.sleep(0.05)


def _started(
    folder: str, role: str, settings: dict[str, Any], canary: dict[str, str]
) -> tuple[subprocess.Popen[bytes], IO[str]]:
    """A server's process, and its answers when it has them."""
    answered, write = os.pipe()
    command = [sys.executable, "-m", __spec__.name, "--serve", folder, "--role", role]
    command += ["--settings", json.dumps(settings), "--answered", str(write)]
    process = subprocess.Popen(
        command, env=os.environ | canary, cwd=ROOT, stdin=subprocess.PIPE, stdout=sys.stderr,
        pass_fds=[write],
    )  # fmt: skip
    os.close(write)
    return process, os.fdopen(answered)


def problems(clean: dict[str, Any], faulty: dict[str, Any]) -> list[str]:
    """What is not as it has to be."""
    said_by = [sorted(each["servers"]) for each in (clean, faulty)]
    found = [f"{servers} have reported" for servers in said_by if servers != sorted(ROLES)]
    for role, one in clean["servers"].items():
        if one["violations"] or one["observer_faults"] or one["state"] not in ("ok", "degraded"):
            found.append(f"{role} without faults: {one}")
        for name, group in one["groups"].items():
            if min(group["verified"].values()) < 1_000:
                found.append(f"{role} has verified {group['verified']} in {name}")
            if role == "decode" and group["hashed"]["head"] < 1_000:
                found.append(f"of {name} {group['hashed']['head']} slots were compared as they arrived")
    injected = faulty["servers"].get("prefill", {}).get("injected", {})
    flips = sum(injected.get("real_kv_post_forward", {}).values())
    arrived = faulty["found"].get("decode head kv_data from its peer", 0)
    if not flips or arrived < flips / 2:  # SGLang sends other slots than some of them lie in
        found.append(f"of {flips} flips {arrived} were reported as they arrived: {faulty['found']}")
    for role, one in faulty["servers"].items():
        if one["observer_faults"]:
            found.append(f"{role} with faults: {one}")
        for mode, count in one["injected"].items():
            if count["missed"]:
                found.append(f"{role} has missed {mode}: {count}")
    return found


def main() -> int:
    """Print what was found; 1 if anything is not as it has to be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=(*SHAPES, *MODELS), default="small" if ON_GPUS else "tiny")
    parser.add_argument("--attention", default=None, help="SGLang's attention backend")
    parser.add_argument("--backend", default="nixl")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--answered", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        serve(given.serve, given.role, given.settings, given.answered)
        return 0
    settings: dict[str, Any] = {"disaggregation_transfer_backend": given.backend}
    if given.attention:
        settings["attention_backend"] = given.attention
    model = MODELS[given.shape][ON_GPUS] if given.shape in MODELS else LLAMA | SHAPES[given.shape]
    plain, checked = (run(model, settings, mode) for mode in ("none", "log"))
    perturbed = run(model, settings, "log", faults=True)
    wrong = problems(checked, perturbed)
    equal = sum(map(list.__eq__, plain["answers"], checked["answers"]))
    result = {
        "environment": environment(), "plan": settings | {"shape": given.shape, "perturb": PERTURB},
        "answers": {"equal": equal, "of": len(plain["answers"])},
        "clean": checked["servers"], "perturbed": perturbed["servers"], "found": perturbed["found"],
        "problems": wrong,
    }  # fmt: skip
    write_json(given.output, result)
    print(json.dumps(result, indent=1))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
