"""SGLang on several GPUs, or other pools there: `python -m tests.gpu.sglang_ranks --tp 2 --output FILE`.

An engine in processes of its own, as in production, serves prompts without a canary, with one, and with one
that injects faults, in each group in turn. Every rank has to say what it has checked, to report nothing
without a fault, and to miss none of them. On a CPU the engine has the hooks of GPUs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from canary_obs.bench.environment import environment
from canary_obs.bench.sglang_engine import CHAIN, engine_settings
from canary_obs.cli.bench_report import write_json
from canary_obs.config import ServiceConfig
from canary_obs.demo.in_process_vllm import LLAMA, SHAPES
from canary_obs.engines.sglang.states import STATE
from canary_obs.hub.hub import Hub
from canary_obs.hub.ranks import violations_of
from canary_obs.records import Snapshot
from canary_obs.transport.listener import ZmqListener
from canary_obs.vocabulary import Phase
from tests.engines.sglang.real.traffic import prompts
from tests.gpu.sglang_models import MODELS

ROOT = Path(__file__).parents[2]
ON_GPUS = torch.cuda.is_available()
# Draft models of one layer, whose weights are drawn like the target's: algorithm, and what differs in theirs.
DRAFTS: dict[str, tuple[str, dict[str, Any]]] = {
    "standalone": ("STANDALONE", {}),
    "eagle": ("EAGLE", {"architectures": ["LlamaForCausalLMEagle"]}),
    "eagle3": ("EAGLE3", {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": None}),
    # DeepSeek's layer for the next tokens.
    "mtp": ("EAGLE", {"architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 1}),
}
PERTURB = "real_kv_used=0.1,real_kv_post_forward=0.1,real_kv_unused_cache=0.1,req_to_token=0.05"
# With EAGLE, flipped bits have ended SGLang 0.5.16: an index outside the vocabulary, probably of a NaN.
PERTURB_EAGLE = "req_to_token=0.2"
_TOKENS, _ROUNDS, _REQUESTS = 48, 4, 12
_POOL = 2048  # tokens; all prompts and answers are 4000, so that slots are used again


def serve(folder: Path, settings: dict[str, Any]) -> None:
    """The engine's process: answers of all prompts to `answers.json`, with sums of what is said of them.

    With a hierarchical cache the prompts come twice: of the first ones, the KV is on the host by then.
    """
    if not ON_GPUS:
        from canary_obs.engines.sglang import adapter
        from tests.engines.sglang.real import linear_attention, stand_ins, streams

        stand_ins.install()
        stand_ins.attention()
        stand_ins.attention_over_data()
        streams.install()
        linear_attention.install()
        adapter.concurrent = lambda device: True
        multiprocessing.set_start_method("fork", force=True)  # the processes of its ranks have them, too
        multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[method-assign,assignment]
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(
        model_path=str(folder), max_running_requests=8, chunked_prefill_size=256, context_length=2048,
        max_total_tokens=_POOL, watchdog_timeout=1e6, **(engine_settings(on_gpu=ON_GPUS) | settings),
    )  # fmt: skip
    sampling = {"max_new_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}
    found: list[list[int]] = []
    said = Counter[str]()
    for seed in list(range(_ROUNDS)) * (1 + bool(settings.get("enable_hierarchical_cache"))):
        asked = list(prompts(_REQUESTS, seed, longest=280).values())
        answers = engine.generate(input_ids=asked, sampling_params=[dict(sampling) for _ in asked])
        found += [list(answer["output_ids"]) for answer in answers]
        for meta in (answer["meta_info"] for answer in answers):
            said["loaded"] += (meta.get("cached_tokens_details") or {}).get("host", 0)
            said["verifications"] += meta.get("spec_verify_ct", 0)
    (folder / "answers.json").write_text(json.dumps({"ids": found} | said), "utf-8")
    engine.shutdown()


def run(
    model: dict[str, Any], settings: dict[str, Any], mode: str, group: str = "", drafts: str | None = None
) -> dict[str, Any]:
    """One engine from its start to its end: its answers, what it loaded, and each rank's last word.

    `group`: that faults are injected into; empty = none are. `drafts`: of DRAFTS.
    """
    with TemporaryDirectory(prefix="kvc") as name:
        folder, endpoint = Path(name), f"ipc://{name}/s.sock"
        (folder / "config.json").write_text(json.dumps(model), "utf-8")
        if drafts is not None:
            own: dict[str, Any] = {"num_hidden_layers": 1}
            for kinds in ("layer_types", "mlp_layer_types"):
                own |= {kinds: model[kinds][-1:]} if kinds in model else {}
            draft = folder / "draft"
            draft.mkdir()
            (draft / "config.json").write_text(json.dumps(model | own | DRAFTS[drafts][1]), "utf-8")
            settings = settings | {"speculative_draft_model_path": str(draft)}
        hub = Hub(ServiceConfig(endpoint=endpoint))
        listener = ZmqListener(endpoint, hub)
        canary = {"KV_CANARY_MODE": mode, "KV_CANARY_ENDPOINT": endpoint, "KV_CANARY_SWEEP_INTERVAL": "16"}
        canary["KV_CANARY_VERIFY_ON_HIT"] = "true"
        if group:
            canary |= {"KV_CANARY_PERTURB": perturb(settings), "KV_CANARY_PERTURB_GROUP": group}
            canary["KV_CANARY_PERTURB_ENABLED"] = "true"
        cores = "|".join(str(core % (os.cpu_count() or 1)) for core in range(processes(settings)))
        offline = {"HF_HUB_OFFLINE": "1"} if ON_GPUS else {"SGLANG_CPU_OMP_THREADS_BIND": cores}
        command = [sys.executable, "-m", __spec__.name, "--serve", name, "--settings", json.dumps(settings)]
        try:
            subprocess.run(
                command, env=os.environ | canary | offline, cwd=ROOT, check=True, stdout=sys.stderr
            )
        finally:
            listener.close()
        answers = json.loads((folder / "answers.json").read_text("utf-8"))
        ranks = {rank.identity.rank: said(rank.snapshot) for rank in hub.ranks() if rank.snapshot}
        return {"answers": answers.pop("ids"), "ranks": ranks} | answers


def perturb(settings: dict[str, Any]) -> str:
    """Faults to inject into an engine with these settings."""
    return PERTURB_EAGLE if settings.get("speculative_algorithm") in ("EAGLE", "EAGLE3") else PERTURB


def processes(settings: dict[str, Any]) -> int:
    """Schedulers of an engine with these settings."""
    replicas = 1 if settings.get("enable_dp_attention") else int(settings["dp_size"])
    return replicas * int(settings["tp_size"]) * int(settings.get("pp_size", 1))


def said(snapshot: Snapshot) -> dict[str, Any]:
    """What a rank has checked and found."""
    phases = Phase.HEAD, Phase.HIT, Phase.SWEEP, Phase.PATROL
    return {
        "device": snapshot.identity.device,
        "state": snapshot.state.value,
        "reasons": list(snapshot.state_reasons),
        "groups": {
            name: {
                "verified": {phase.value: group.verified[phase] for phase in (Phase.HEAD, Phase.TAIL)},
                "hashed": {phase.value: group.hashed[phase] for phase in phases},
            }
            for name, group in snapshot.groups.items()
        },
        "violations": violations_of(snapshot),
        "observer_faults": sum(snapshot.observer_faults.values()),
        "injected": {
            mode.value: {
                "detected": count.detected, "masked": count.masked, "missed": count.missed, "open": count.open
            }
            for mode, count in snapshot.perturbations.items() if count.injected
        },
    }  # fmt: skip


def problems(clean: dict[int, Any], faulty: dict[str, dict[int, Any]], ranks: int) -> list[str]:
    """What is not as it has to be. `faulty`: by the group that faults were injected into."""
    runs = clean, *faulty.values()
    found = [f"{len(each)} of {ranks} ranks have reported" for each in runs if len(each) != ranks]
    for rank, one in clean.items():
        if one["violations"] or one["observer_faults"] or one["state"] not in ("ok", "degraded"):
            found.append(f"rank {rank} without faults: {one}")
        for name, group in one["groups"].items():
            # A request has one state, without a prefix that a head could verify, in one forward of 16.
            verified, least = group["verified"], 100 if name == STATE else 5_000
            if (verified["tail"] if name == STATE else min(verified.values())) < least:
                found.append(f"rank {rank} has verified {group['verified']} in {name}")
            if not min(group["hashed"].values()):
                found.append(f"rank {rank} has hashed {group['hashed']} in {name}")
    for name, said_of in faulty.items():
        for rank, one in said_of.items():
            if not one["injected"] or one["observer_faults"]:
                found.append(f"rank {rank} with faults in {name}: {one}")
            for mode, count in one["injected"].items():
                if count["missed"]:
                    found.append(f"rank {rank} has missed {count['missed']} of {mode} in {name}")
    return found


def main() -> int:
    """Exit code 1 = a rank is silent, has reported without a fault, or has missed one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--dp-attention", action="store_true", help="the tensor ranks' attention, by --dp")
    parser.add_argument("--shape", choices=(*SHAPES, *MODELS), default="small" if ON_GPUS else "tiny")
    parser.add_argument(
        "--hierarchical", nargs="?", const="write_through", choices=("write_through", "write_back"),
        help="a cache in host memory, too, with this policy; on GPUs",
    )  # fmt: skip
    parser.add_argument("--drafts", choices=tuple(DRAFTS), help="a draft model of this kind; on GPUs")
    parser.add_argument(
        "--strategy", choices=("extra_buffer", "no_buffer"),
        default="extra_buffer" if ON_GPUS else "no_buffer",
        help="how SGLang keeps states of the prefix cache; on a CPU it has no extra buffers",
    )  # fmt: skip
    parser.add_argument("--attention", default=None, help="SGLang's attention backend")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.hierarchical and not ON_GPUS:
        parser.error("--hierarchical needs a GPU: on a CPU SGLang 0.5.23 copies KV by other methods")
    if given.drafts and not ON_GPUS:
        parser.error("--drafts needs a GPU: on a CPU SGLang drafts with stand-ins (test_drafts_on_gpus.py)")
    if given.serve is not None:
        serve(given.serve, given.settings)
        return 0
    settings: dict[str, Any] = {"tp_size": given.tp, "dp_size": given.dp}
    if given.pp > 1:
        settings["pp_size"] = given.pp
    if given.hierarchical:
        settings |= {"enable_hierarchical_cache": True, "hicache_write_policy": given.hierarchical}
    if given.drafts:
        settings |= CHAIN | {"speculative_algorithm": DRAFTS[given.drafts][0]}
    if given.dp_attention:
        settings["enable_dp_attention"] = True
    if given.attention:
        settings["attention_backend"] = given.attention
    if given.shape == "states":
        settings |= {"max_mamba_cache_size": 64, "mamba_radix_cache_strategy": given.strategy}
        settings |= {"mamba_track_interval": 64} if given.strategy == "extra_buffer" else {}
        settings |= {"disable_overlap_schedule": True} if given.strategy == "no_buffer" else {}
    model = MODELS[given.shape][ON_GPUS] if given.shape in MODELS else LLAMA | SHAPES[given.shape]
    if given.drafts == "eagle3":  # it reads the outputs of three layers, of which four are too few
        model = model | {"num_hidden_layers": 8}
    drafts = given.drafts
    plain, checked = (run(model, settings, mode, drafts=drafts) for mode in ("none", "log"))
    groups = {name: None for one in checked["ranks"].values() for name in one["groups"]}
    perturbed = {name: run(model, settings, "log", name, drafts)["ranks"] for name in groups}
    wrong = problems(checked["ranks"], perturbed, processes(settings))
    if given.hierarchical and not checked["loaded"]:
        wrong.append("no KV came back from the host")
    accepted, most = None, CHAIN["speculative_num_draft_tokens"]
    if given.drafts:
        accepted = round(sum(map(len, checked["answers"])) / max(checked["verifications"], 1), 2)
        if accepted <= 1 if given.drafts == "standalone" else accepted >= most:
            wrong.append(f"{accepted} tokens per verification: a {given.drafts} model's are accepted or not")
    result = {
        "environment": environment(),
        "plan": settings | {"shape": given.shape, "drafts": drafts, "perturb": perturb(settings)},
        # On GPUs a sum's order may depend on what else is in a batch, and so may an answer.
        "answers": {
            "equal": sum(map(list.__eq__, plain["answers"], checked["answers"])),
            "of": len(plain["answers"]),
        },
        "loaded": checked["loaded"],
        "tokens_per_verification": accepted,
        "clean": checked["ranks"],
        "perturbed": perturbed,
        "problems": wrong,
    }
    write_json(given.output, result)
    print(json.dumps(result, indent=1))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
