"""Every kernel compiles ahead of time for the GPUs it is meant for, also where there is none."""

import os
import subprocess
import sys

import pytest

_SCRIPT = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from canary_kernels.arrival import kernel as arrival
from canary_kernels.decode import kernel as decode
from canary_kernels.digest import kernel as digest
from canary_kernels.drafts import kernel as drafts
from canary_kernels.fingerprint import kernel as fingerprint
from canary_kernels.forward_start import kernel as forward_start
from canary_kernels.layer_write import kernel as layer_write
from canary_kernels.verify import kernel as verify
from canary_kernels.write import kernel as write, reset
from canary_obs.reference_engine.model import paged_attention

INTEGERS = {"num_slots", "lane_rows", "table_stride", "num_rows", "capacity", "num_requests", "num_listed"}
INTEGERS |= {"num_k", "num_sources", "stride", "key_stride", "value_stride", "slot_stride", "query_stride"}
INTEGERS |= {"width", "num_tokens", "state", "size", "own_stride", "ticks", "count", "with_rows", "baselines"}
INTEGERS |= {"last_slot", "tokens_stride", "added", "ahead"}
FLOATS = dict.fromkeys(("key", "value", "keys", "values", "query", "output"), "*bf16")
FLOATS |= {"mixed": "*fp32", "weights": "*fp32", "scale": "fp32"}
HEADS = {"GROUP": 4, "DIM": 128, "WIDTH": 128, "SPLITS": 16}
FULL = {
    "HAS_DATA": True, "FIRST": True, "LAST": True, "COUNTED": True, "LISTED": True, "SPLIT": False,
    "GEOMETRY": (2048,) * 6 + (0,), "PAGES": (1, 2048, 0, 1, 0, 1, 0, 1), "ALIGNMENT": 16, "BLOCK": 512,
}
STATES = FULL | {"GEOMETRY": (1 << 21,) * 6 + (0,), "PAGES": (1, 1 << 21, 0, 1, 0, 1, 0, 1), "SPLIT": True}
LAYER = {name: FULL[name] for name in ("GEOMETRY", "PAGES", "ALIGNMENT", "BLOCK")}
ODD = {
    "HAS_DATA": True, "FIRST": False, "LAST": False, "COUNTED": False, "LISTED": True, "SPLIT": True,
    "GEOMETRY": (24, 100, 2, 4, 96, 8, 50), "PAGES": (16, 1000, 12, 4, 60, 2, 1, 8),
    "ALIGNMENT": 2, "BLOCK": 128,
}
LONG = {"PAGE_SIZE": 16, "HAS_DIGESTS": False, "HAS_EXPECTED": True, "BLOCK": 256, "WIDE": 1024}
LONG |= {"AT_ONCE": 256, "ROOM": 1024}
ALONE = {"sums": None, "ATTEMPTS": 0}  # as on AMD
SHORT = {"PAGE_SIZE": 1, "HAS_DIGESTS": True, "HAS_EXPECTED": False, "BLOCK": 64, "WIDE": 64}
SHORT |= {"AT_ONCE": 64, "ROOM": 0}
ROWS = {"BLOCK": verify.BLOCK}
JOBS = [
    (verify.rows_kernel, {"PHASE": 0, "PAGE_SIZE": 16, "HAS_DIGESTS": True, "HAS_KNOWN": False, **ROWS}),
    (verify.rows_kernel, {"PHASE": 1, "PAGE_SIZE": 1, "HAS_DIGESTS": False, "HAS_KNOWN": True, **ROWS}),
    (verify.list_kernel, {"PHASE": 2, "BLOCK": verify.BLOCK}),
    (write.write_kernel, {**LONG, **ALONE}),
    (write.write_kernel, {**SHORT, **ALONE}),
    (reset.reset_kernel, {"BLOCK": 256}),
    (drafts.keep_kernel, {"AHEAD": 3, "LIMIT": 131072, "PAGE_SIZE": 16, "BLOCK": 256}),
    (drafts.keep_kernel, {"AHEAD": 0, "LIMIT": 131072, "PAGE_SIZE": 1, "BLOCK": 256}),
    (decode.decode_kernel, {"BLOCK": decode.BLOCK, "WINDOWED": False}),
    (decode.decode_kernel, {"BLOCK": decode.BLOCK, "WINDOWED": True}),
    (forward_start.start_kernel, {"BLOCK": forward_start.BLOCK}),
    (digest.lists_kernel, {"BLOCK": 1024}),
    (digest.inputs_kernel, {"BLOCK": 1024, "TAIL": 0, "ROOM": 0}),
    (digest.inputs_kernel, {"BLOCK": 1024, "TAIL": 3, "ROOM": 4}),
    (fingerprint.fingerprint_kernel, {"OP": 0, "PHASE": 1, **FULL}),
    (fingerprint.fingerprint_kernel, {"OP": 1, "PHASE": 1, **FULL}),
    (fingerprint.fingerprint_kernel, {"OP": 2, "PHASE": 3, **ODD}),
    (fingerprint.fingerprint_kernel, {"OP": 2, "PHASE": 3, **FULL, "LISTED": False}),
    (fingerprint.fingerprint_kernel, {"OP": 2, "PHASE": 0, **FULL, "SPLIT": True}),
    (fingerprint.fingerprint_kernel, {"OP": 1, "PHASE": 1, **STATES}),
    (fingerprint.fingerprint_kernel, {"OP": 2, "PHASE": 0, **STATES}),
    (layer_write.layer_kernel, {"CHECKING": 0, **LAYER}),
    (layer_write.layer_kernel, {"CHECKING": 1, **LAYER}),
    (arrival.arrival_kernel, {}),
    (arrival.weigh_kernel, {"CHUNK": arrival.CHUNK_SLOTS}),
    (arrival.keep_kernel, {"CHUNK": arrival.CHUNK_SLOTS}),
    (arrival.fold_kernel, {"CHUNK": arrival.CHUNK_SLOTS}),
    (paged_attention.store_kernel, {"HEADS": 8, "DIM": 128, "SIZE": 1024}),
    (paged_attention.attend_kernel, {**HEADS, "QUERIES": 16, "BLOCK": paged_attention.BLOCK, "WINDOW": 512}),
    (paged_attention.merge_kernel, HEADS),
]
backend, arch, warp, binary = sys.argv[1:]
if backend == "cuda":
    JOBS.append((write.write_kernel, {**LONG, "ATTEMPTS": 32}))
target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(warp))
for function, constants in JOBS:
    floats = FLOATS if function.fn.__module__ == paged_attention.__name__ else {}
    ranges = {"slots": "i32"} if constants.get("LISTED") is False else {}
    types = dict.fromkeys(INTEGERS, "i32") | floats | ranges | dict.fromkeys(constants, "constexpr")
    signature = {p.name: types.get(p.name, "*i64") for p in function.params}
    compiled = triton.compile(ASTSource(function, signature, constants), target=target)
    assert compiled.asm[binary], function
    if function is fingerprint.fingerprint_kernel and constants["BLOCK"] == 512 and backend == "cuda":
        assert "ld.global.v4.b32" in compiled.asm["ptx"], "bytes are not read in whole vectors"
    if constants.get("ATTEMPTS") and backend == "cuda":
        assert compiled.asm["ptx"].count("ld.volatile.global") > 1, "sums of other chunks are not read anew"
print(len(JOBS))
"""


@pytest.mark.parametrize(
    ("target", "jobs"), [(("cuda", "90", "32", "cubin"), 31), (("hip", "gfx942", "64", "hsaco"), 30)]
)
def test_kernels_compile_ahead_of_time(target, jobs):
    # A fresh process: this one may have been told to interpret.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _SCRIPT, *target],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, str(jobs)), done.stderr
