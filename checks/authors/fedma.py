"""This compares the matching of units, not the training. A case has 4 clients with 12 units of 20
weights each. Agreement is the sum of the inner products of all matched units. With more noise than
signal the programs can end in different local optima."""

import logging
import sys
import types

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

import baselines
import check

REPOSITORY, COMMITS = "IBM/FedMA", ("4b586a5a22002dc955d025b890bc632daa3c01c7",)
CHANGED = "lapsolver; float32 reads float64"
CLIENTS, UNITS, NUMBERS = 4, 12, 20
NO_GROWTH = 1e-30  # gamma, so small that no unit stays without a counterpart (D1)


def theirs(load, V, gamma):
    """Their order of the units of each client, None where the layer grew; the layer; how many units
    it has. FedMA's settings: the prior has mean 0 and sigma 1, and so has the noise."""
    one, units = np.ones(NUMBERS), [v.copy() for v in V]
    match_layer = load("matching.pfnm").match_layer
    assignment, total, precision = match_layer(units, [one] * CLIENTS, 0 * one, one, gamma, 5)
    order = None
    if len(total) == UNITS:
        order = np.argsort(np.array(assignment), 1)  # assignment[j][unit of j] is the global unit
    return order, total / precision, len(total)


def match(V):
    return baselines.match(torch.as_tensor(V)).numpy()


def in_order(V, order):
    return np.stack([v[o] for v, o in zip(V, order)])


def agreement(V, order):
    """What matching makes large: the sum of the inner products of all pairs of counterparts."""
    return (in_order(V, order).sum(0) ** 2).sum() - (V**2).sum()


def compare(line, folder):
    rng = np.random.default_rng(0)
    # an order is made of sums of NUMBERS products, over 6 sweeps
    sums = dict(steps=6 * CLIENTS, longest=NUMBERS)
    logging.disable(logging.CRITICAL)
    sys.modules["lapsolver"] = types.SimpleNamespace(solve_dense=linear_sum_assignment)
    with check.program(folder, changed=[("float32", "float64")]) as load:
        easy = [[], [], [], []]
        for _ in range(20):  # the same units in another order, with some noise
            base = 2 * rng.standard_normal((UNITS, NUMBERS))
            V = np.stack([rng.permutation(base) + 0.3 * rng.standard_normal(base.shape)
                          for _ in range(CLIENTS)])
            order, layer, _ = theirs(load, V, gamma=7)
            mine = match(V)
            for part, z in zip(easy, (order, mine, layer, in_order(V, mine).mean(0))):
                part.append(torch.as_tensor(z))
        order, mine, layer, mean = easy
        line("matching, 20 cases with counterparts: the orders", order, mine, **sums)
        line("matched layer, the prior's pull undone",
             [z * (CLIENTS + 1) / CLIENTS for z in layer], mean, **sums)
        line("matched layer, pulled to the prior there", layer, mean, because="fedma D3", **sums)
        base = rng.standard_normal((50, 1, UNITS, NUMBERS))
        noisy = base + 2 * rng.standard_normal((50, CLIENTS, UNITS, NUMBERS))
        ours = [agreement(V, match(V)) for V in noisy]
        found = [agreement(V, theirs(load, V, NO_GROWTH)[0]) for V in noisy]
        same = sum(np.isclose(ours, found, rtol=1e-9))
        line(f"matching, 50 cases with more noise: agreement, relative ({same} the same)",
             np.ones(50), np.array(ours) / found, because="fedma D2", **sums)
        line("matching, 10 cases with more noise: units of the layer",
             [float(theirs(load, V, 7)[2]) for V in noisy[:10]], [float(UNITS)] * 10,
             because="fedma D1", **sums)
    del sys.modules["lapsolver"]
    logging.disable(logging.NOTSET)
