"""The write oracles detect wrong input tokens and positions at the head of their forward."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from canary_kernels.hashing import mix64_int
from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.scheduling.oracle import TokenOracle
from canary_obs.reference_engine.scheduling.request import Request, Sampling
from canary_obs.vocabulary import Phase, Reason
from tests.reference_engine.workloads import drain
from tests.runtime.conftest import MakeRig, Rig


@given(
    st.integers(0, 2**31), st.integers(0, 2**31), st.integers(0, 40), st.integers(0, 60), st.integers(0, 60)
)
def test_tokens_depend_on_seed_and_position_only(
    seed: int, prefix_seed: int, shared: int, start: int, size: int
) -> None:
    oracle = TokenOracle(seed=seed, prefix_seed=prefix_seed, shared=shared)
    by_hand = [
        ((mix64_int(prefix_seed if p < shared else seed, p) >> 8) & ((1 << 56) - 1)) % 256
        for p in range(start, start + size)
    ]
    assert oracle.tokens(start, start + size).tolist() == by_hand


def mocked(rig: Rig, seed: int, *, prompt: int = 40, answer: int = 20) -> Request:
    oracle = TokenOracle(seed=seed, prefix_seed=1, shared=16)
    sampling = Sampling(max_tokens=answer, oracle=oracle)
    return rig.engine.add_request(oracle.tokens(0, prompt), sampling)


def counted(rig: Rig) -> dict[Reason, int]:
    rig.canary.check_everything()
    violations = rig.canary.detach().groups["full"].violations
    return {reason: count for reason, count in violations[Phase.HEAD].items() if count}


def test_mock_traffic_is_clean_and_follows_the_oracle(make_rig: MakeRig) -> None:
    rig = make_rig()
    requests = [mocked(rig, seed) for seed in range(12)]
    drain(rig.engine)
    for seed, request in enumerate(requests):
        oracle = TokenOracle(seed=seed, prefix_seed=1, shared=16)
        assert np.array_equal(request.output, oracle.tokens(40, 60))
    assert rig.engine.statistics.prefix_hit_tokens >= 16
    assert counted(rig) == {}


def test_a_token_lost_in_the_engines_own_list_is_write_token(make_rig: MakeRig) -> None:
    rig = make_rig()
    request = mocked(rig, 5)
    rig.engine.step()
    rig.engine.step()
    rig.engine.step()
    request.tokens[request.length - 1] ^= 1  # the sampled token, before it is put through the model
    drain(rig.engine)
    # Afterwards the engine's own list agrees with what was recorded, so only the oracle can detect it.
    assert counted(rig) == {Reason.WRITE_TOKEN: 1}


def test_a_token_changed_on_its_way_to_the_model_is_write_token_and_token(make_rig: MakeRig) -> None:
    rig = make_rig()
    prepare = rig.engine.runner.prepare

    def garbled(plan: object) -> ForwardBatch:
        batch = prepare(plan)  # type: ignore[arg-type]
        if rig.canary.step == 3:
            batch.input_ids[0] ^= 1
        return batch

    vars(rig.engine.runner)["prepare"] = garbled
    mocked(rig, 5, answer=6)
    drain(rig.engine)
    found = counted(rig)
    assert found[Reason.WRITE_TOKEN] == 1
    assert found[Reason.TOKEN] >= 1


def test_a_drifted_position_is_write_position(make_rig: MakeRig) -> None:
    rig = make_rig()
    prepare = rig.engine.runner.prepare

    def drifted(plan: object) -> ForwardBatch:
        batch = prepare(plan)  # type: ignore[arg-type]
        if rig.canary.step == 3:
            batch.positions.add_(1)
        return batch

    vars(rig.engine.runner)["prepare"] = drifted
    mocked(rig, 5, answer=6)
    drain(rig.engine)
    assert counted(rig)[Reason.WRITE_POSITION] == 1
