"""A batch whose requests come, go, swap places and come back: digests as the chain over their own tokens."""

import random

import numpy as np
import torch

from canary_kernels.hashing import chain_of
from canary_obs.engines.vllm.device_digests import InputDigests

SEATS, WIDTH = 4, 64
CPU = torch.device("cpu")


def chain(tokens, count):
    return int(chain_of(torch.tensor(tokens[:count], dtype=torch.int64))[count])


def step(digests, names, lists, computed, scheduled, host=None):
    """One step; `host` = what the runner's host lists hold, where that differs from the truth."""
    tokens = np.array([(host or lists)[name] for name in names], dtype=np.int32)
    ends = np.array([computed[name] for name in names])
    counts = np.array([scheduled[name] for name in names])
    digests.seat(names, tokens, ends, counts)
    fed = [token for name in names for token in lists[name][computed[name] :][: scheduled[name]]]
    starts = torch.tensor([0, *counts.cumsum()], dtype=torch.int32)
    ids = torch.tensor([*fed, 3, 3], dtype=torch.int32)
    return digests.follow(ids, starts, torch.tensor(ends, dtype=torch.int32)).tolist()


def test_any_batches():
    draw = random.Random(1)
    digests = InputDigests(SEATS, CPU)
    lists = {str(i): [draw.randrange(1000) for _ in range(WIDTH)] for i in range(7)}
    computed = dict.fromkeys(lists, 0)
    names, checked = [], 0
    for _ in range(400):
        if not names or draw.random() < 0.3:
            names = draw.sample(list(lists), draw.randrange(1, SEATS + 1))
        for name in names:
            if draw.random() < 0.05:  # preempted: back to what the prefix cache holds of it
                computed[name] = draw.randrange(computed[name] + 1)
            if computed[name] > WIDTH - 8 or draw.random() < 0.05:  # ended, and another one of that name came
                digests.forget([name])
                lists[name], computed[name] = [draw.randrange(1000) for _ in range(WIDTH)], draw.randrange(9)
        scheduled = {name: draw.choice((1, 1, 1, 5)) for name in names}
        found = step(digests, names, lists, computed, scheduled)
        assert found == [chain(lists[name], computed[name]) for name in names]
        computed |= {name: computed[name] + scheduled[name] for name in names}
        checked += len(names)
    assert checked > 600


def test_a_request_that_goes_on_needs_no_host_list():
    digests = InputDigests(SEATS, CPU)
    lists = {"a": list(range(WIDTH)), "b": list(range(7, 7 + WIDTH))}
    unknown = {name: [-1] * WIDTH for name in lists}
    step(digests, ["a", "b"], lists, {"a": 0, "b": 0}, {"a": 3, "b": 2})
    assert step(digests, ["b", "a"], lists, {"a": 3, "b": 2}, {"a": 1, "b": 1}, unknown) == [
        chain(lists["b"], 2),
        chain(lists["a"], 3),
    ]
    assert step(digests, ["a"], lists, {"a": 4}, {"a": 1}, unknown) == [chain(lists["a"], 4)]


def test_other_inputs_than_the_requests_own_give_another_digest():
    digests = InputDigests(SEATS, CPU)
    lists = {"a": list(range(WIDTH)), "b": list(range(7, 7 + WIDTH))}
    step(digests, ["a"], {"a": lists["b"]}, {"a": 0}, {"a": 3})
    assert step(digests, ["a"], lists, {"a": 3}, {"a": 1}) == [chain(lists["b"], 3)]
