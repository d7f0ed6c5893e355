"""Requests join, leave, swap places and return: each digest is the chain over its request's own tokens."""

import random

import numpy as np
import torch

from canary_kernels.hashing import chain_of
from canary_obs.engines.toolkit.device_digests import InputDigests

REQUESTS, WIDTH = 4, 64
CPU = torch.device("cpu")


def chain(tokens, count):
    return int(chain_of(torch.tensor(tokens[:count], dtype=torch.int64))[count])


def followed(digests, count, *tensors):
    launch, result = digests.following(count, *tensors)
    launch()
    return result.tolist()


def step(digests, names, lists, computed, scheduled, host=None):
    """One step; `host` replaces the contents of the runner's host lists."""
    tokens = np.array([(host or lists)[name] for name in names], dtype=np.int32)
    ends = np.array([computed[name] for name in names])
    counts = np.array([scheduled[name] for name in names])
    digests.set_batch(names, tokens, ends, counts)
    fed = [token for name in names for token in lists[name][computed[name] :][: scheduled[name]]]
    starts = torch.tensor([0, *counts.cumsum()], dtype=torch.int32)
    ids = torch.tensor([*fed, 3, 3], dtype=torch.int32)
    return followed(digests, len(names), ids, starts, torch.tensor(ends, dtype=torch.int32))


def test_any_batches():
    draw = random.Random(1)
    digests = InputDigests(REQUESTS, CPU)
    lists = {str(i): [draw.randrange(1000) for _ in range(WIDTH)] for i in range(7)}
    computed = dict.fromkeys(lists, 0)
    names, checked = [], 0
    for _ in range(400):
        if not names or draw.random() < 0.3:
            names = draw.sample(list(lists), draw.randrange(1, REQUESTS + 1))
        for name in names:
            if draw.random() < 0.05:  # preempted: restarts after what the prefix cache holds
                computed[name] = draw.randrange(computed[name] + 1)
            if computed[name] > WIDTH - 8 or draw.random() < 0.05:  # ended; a new one has its name
                digests.forget([name])
                lists[name], computed[name] = [draw.randrange(1000) for _ in range(WIDTH)], draw.randrange(9)
        scheduled = {name: draw.choice((1, 1, 1, 5)) for name in names}
        found = step(digests, names, lists, computed, scheduled)
        assert found == [chain(lists[name], computed[name]) for name in names]
        computed |= {name: computed[name] + scheduled[name] for name in names}
        checked += len(names)
    assert checked > 600


def test_a_request_that_continues_needs_no_host_list():
    digests = InputDigests(REQUESTS, CPU)
    lists = {"a": list(range(WIDTH)), "b": list(range(7, 7 + WIDTH))}
    unknown = {name: [-1] * WIDTH for name in lists}
    step(digests, ["a", "b"], lists, {"a": 0, "b": 0}, {"a": 3, "b": 2})
    assert step(digests, ["b", "a"], lists, {"a": 3, "b": 2}, {"a": 1, "b": 1}, unknown) == [
        chain(lists["b"], 2),
        chain(lists["a"], 3),
    ]
    assert step(digests, ["a"], lists, {"a": 4}, {"a": 1}, unknown) == [chain(lists["a"], 4)]


def test_other_inputs_than_the_requests_own_give_another_digest():
    digests = InputDigests(REQUESTS, CPU)
    lists = {"a": list(range(WIDTH)), "b": list(range(7, 7 + WIDTH))}
    step(digests, ["a"], {"a": lists["b"]}, {"a": 0}, {"a": 3})
    assert step(digests, ["a"], lists, {"a": 3}, {"a": 1}) == [chain(lists["b"], 3)]


DRAFTS = 3


def test_counts_of_the_host_that_run_ahead_of_rejected_drafts():
    draw = random.Random(2)
    digests = InputDigests(REQUESTS, CPU, DRAFTS)
    lists = {str(i): [draw.randrange(1000) for _ in range(40 * WIDTH)] for i in range(REQUESTS)}
    names = list(lists)
    right, ahead, fed = dict.fromkeys(names, 0), dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    unknown = np.full((REQUESTS, 1), -1, dtype=np.int32)
    for number in range(300):
        names = draw.sample(names, REQUESTS)
        rejected = {name: draw.randrange(DRAFTS + 1) if fed[name] > DRAFTS else 0 for name in names}
        # The host learns one step later how many drafts of the last step were rejected.
        computed = {name: ahead[name] + fed[name] for name in names}
        right = {name: right[name] + fed[name] - rejected[name] for name in names}
        for name in names:
            lists[name][right[name] : right[name] + rejected[name]] = [draw.randrange(1000)] * rejected[name]
        fed = {name: draw.choice((1, 1 + DRAFTS)) for name in names}
        digests.set_batch(names, unknown, *(np.array([of[name] for name in names]) for of in (computed, fed)))
        ids = [token for name in names for token in lists[name][right[name] :][: fed[name]]]
        starts = np.cumsum([0, *(fed[name] for name in names)], dtype=np.int32)
        prefixes = torch.tensor([right[name] for name in names], dtype=torch.int32)
        ids = torch.tensor(ids, dtype=torch.int32)
        found = followed(digests, len(names), ids, torch.from_numpy(starts), prefixes)
        assert found == [chain(lists[name], right[name]) for name in names], number
        ahead = right
