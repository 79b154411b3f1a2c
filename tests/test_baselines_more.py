"""FedSpa and FedMA, by hand."""

import itertools
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

import baselines
import common
from byhand import FLAGS, World, close, evaluated, spy
from conftest import QUICK, refused, softmax_gradient
from test_baselines import federation, go, network, small_images  # noqa: F401

SMALL = [*QUICK, "--model", "mnistnet", "--epochs", "2", "--lr", "0.05"]


# FedSpa's masks


@pytest.mark.parametrize("density, counts", [
    (0.5, [150, 100, 149, 3]), (0.9, [320, 100, 300, 3]), (1.0, [400, 100, 300, 3])])
def test_erk_by_hand(density, counts):
    """4-100-3: d = 803, biases 103. (4 + 100) and (100 + 3) share what is left: .5: 299 is 150.2 +
    148.8; .9: 620 would be more than the 300 of the second layer, so that the first has 320."""
    net = common.Net("mnistnet", (1, 2, 2), 3)
    assert baselines.erdos_renyi_kernel(net, density).tolist() == counts


def test_fedspas_rounds_by_hand(toy, tmp_path, monkeypatch):
    """4-100-3 with density .5, minibatches of 5 and momentum. a = .4 drops the shares .4, .3 and .1
    of a mask in the rounds 0, 1 and 2."""
    models, argv = evaluated(monkeypatch), ["--dataset", toy, *FLAGS, "--model", "mnistnet"]
    world, sizes, counts = World(federation("fedspa", argv)), [400, 100, 300, 3], [150, 100, 149, 3]
    parts = [slice(end - size, end) for size, end in zip(sizes, np.cumsum(sizes))]

    def highest(score, counts):
        mask = np.zeros(803, bool)
        for part, count in zip(parts, counts):
            mask[part.start + np.argsort(-score[part], kind="stable")[:count]] = True
        return mask

    draws = (common.stream(0, "algorithm", 0, k).random((1, 803), np.float32)[0] for k in range(3))
    w, M = world.w, np.array([highest(draw, counts) for draw in draws])
    for (t, S), share in zip(enumerate(world.S), (0.4, 0.3, 0.1)):
        moves, left = [], [count - int(share * count + 1e-9) for count in counts]
        for k in S:
            w_k, u = M[k] * w, 0
            for b in world.minibatches(k, t):
                g = network(w_k, *b)
                u = 0.5 * u + M[k] * g
                w_k = w_k - 0.3 * u
            moves.append(w_k - M[k] * w)
            keep = highest(np.where(M[k], abs(w_k), -1), left)
            M[k] = highest(np.where(keep, np.inf, abs(g)), counts)
        w = w + world.mean(moves, S)
    argv += ["--density", "0.5", "--drop", "0.4", "--momentum", "0.5"]
    record, state = go("fedspa", argv, tmp_path)
    close({**state, "own": models[-1]}, M=M, w=w, own=M * w)
    assert len({*map(bytes, M)}) == 3
    assert record["bytes_up"] == record["bytes_down"] == 4 * 3 * 2 * sum(counts)


# FedMA


def shuffled(net, w, rng):
    """The same function with the hidden units in another order."""
    tensors = {name: w[part].view(shape).clone() for name, part, shape in net.tensors}
    names = [name for name, _ in net.layers]
    for name, following in zip(names, names[1:]):
        order = torch.from_numpy(rng.permutation(len(tensors[name + ".bias"])))
        for part in (".weight", ".bias"):
            tensors[name + part] = tensors[name + part][order]
        after = tensors[following + ".weight"]
        # [out, units before, what belongs to one]
        blocks = torch.stack(after.flatten(1).chunk(len(order), 1), 1)
        tensors[following + ".weight"] = blocks[:, order].reshape(after.shape)
    return torch.cat([z.flatten() for z in tensors.values()])


def returning(models):
    """Stands in for training: client k returns models[k] if it trains all layers, otherwise what it
    got."""
    return lambda own, S: (torch.stack([models[k] for k in S])
                           if own[0].shape[1] == len(models[0]) else own[0].clone())


@pytest.mark.parametrize("model", ["mnistnet", "cifarnet"])
def test_fedma_averages_permuted_copies_of_a_network_to_that_network(model, tmp_path, monkeypatch):
    rng = np.random.default_rng(1)
    arrays = {f"x_{part}": rng.integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
              for part in ("train", "test")}
    labels = np.arange(20) % 10
    np.savez(tmp_path / "few.npz", **arrays, y_train=labels, y_test=labels)
    argv = ["--dataset", str(tmp_path / "few.npz"), "--model", model, "--clients", "2",
            "--fraction", "1", "--rounds", "1", "--device", "cpu"]
    fed = federation("fedma", argv)
    w = fed.net.init(rng)
    copies = [shuffled(fed.net, w, rng) for _ in range(2)]
    x = fed.transform(fed.images[:20])
    logits = fed.net(w, x)
    for copy in copies:
        assert not torch.allclose(copy, w, atol=1e-3)
        torch.testing.assert_close(fed.net(copy, x), logits, atol=1e-5, rtol=1e-4)
    spy(monkeypatch, returning(copies))
    _, state = go("fedma", argv, tmp_path / "a")
    torch.testing.assert_close(state["w"], copies[0], atol=1e-7, rtol=0)
    torch.testing.assert_close(fed.net(state["w"], x), logits, atol=1e-5, rtol=1e-4)
    mean = sum(copies) / 2
    off = (fed.net(state["w"], x) - logits).abs().max()
    assert (fed.net(mean, x) - logits).abs().max() > 100 * off


def test_match_finds_the_least_squared_distance_of_two_clients_and_the_permutations_of_many():
    rng = np.random.default_rng(2)
    V = torch.from_numpy(rng.normal(size=(2, 5, 3)))

    def distance(a, b):
        return float((V[0][a] - V[1][b]).square().sum())

    order = baselines.match(V)
    best = min(distance(slice(None), list(p)) for p in itertools.permutations(range(5)))
    assert distance(order[0], order[1]) == pytest.approx(best)
    unit = torch.from_numpy(rng.normal(size=(20, 8)))
    orders = [rng.permutation(20) for _ in range(6)]
    V = torch.stack([unit[p] + 0.1 * torch.from_numpy(rng.normal(size=(20, 8))) for p in orders])
    for j, p in enumerate(baselines.match(V).numpy()):
        assert sorted(p) == list(range(20)) and (orders[j][p] == orders[0]).all()


def test_further_sweeps_come_closer_until_no_client_alone_can():
    V = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 4, 2)))

    def cost(order):
        W = torch.stack([v[list(own)] for v, own in zip(V, order)])
        return float((W - W.mean(0)).square().sum())

    end = baselines.match(V, sweeps=50).tolist()
    others = [[*end[:j], p, *end[j + 1 :]]
              for j in range(5) for p in itertools.permutations(range(4))]
    assert cost(end) < cost(baselines.match(V, sweeps=1).tolist()) - 1e-3
    assert cost(end) <= min(map(cost, others)) + 1e-9


def test_fedmas_last_layer_is_weighted_by_class_counts_and_the_others_are_not(tmp_path,
                                                                             monkeypatch):
    """All of client k's weights are k + 1. Sizes differ, so that the plain mean is not that by
    n_k."""
    argv = [*SMALL, "--rounds", "1", "--split", "dirichlet-classes", "--alpha", "0.1"]
    fed = federation("fedma", argv)
    S = fed.sample(0)
    assert abs(np.average(S + 1, weights=fed.n[S]) - (S + 1).mean()) > 0.1
    models = [torch.full((fed.net.d,), k + 1.0) for k in range(8)]
    spy(monkeypatch, returning(models))
    _, state = go("fedma", argv, tmp_path)
    counts = np.array([np.bincount(fed.data.labels[fed.split.train[k]], minlength=10)
                       for k in S])  # [4, 10]
    assert (counts.sum(0) == 0).any() and (counts.sum(0) > 0).any()  # some class is in no client
    expected = [np.average(S + 1, weights=c if c.any() else None) for c in counts.T]
    w = state["w"].numpy()
    np.testing.assert_allclose(w[:19_300], (S + 1).mean(), rtol=1e-6)
    last = np.repeat([expected], 100, 0).T
    np.testing.assert_allclose(w[19_300:20_300].reshape(10, 100), last, rtol=1e-6)
    np.testing.assert_allclose(w[20_300:], expected, rtol=1e-6)


def small(channels, classes, size):
    """Two convolutions and two linear layers, for 8x8 pixels."""
    return nn.Sequential(OrderedDict(
        conv1=nn.Conv2d(channels, 3, 3), pool1=nn.MaxPool2d(2), relu1=nn.ReLU(),
        conv2=nn.Conv2d(3, 4, 2), relu2=nn.ReLU(), flatten=nn.Flatten(),
        fc1=nn.Linear(16, 5), relu3=nn.ReLU(), fc2=nn.Linear(5, classes)))


def test_fedma_freezes_what_is_matched_and_trains_the_rest(tmp_path, monkeypatch):
    monkeypatch.setitem(common.MODELS, "small", small)
    argv, calls = [*SMALL, "--model", "small", "--rounds", "1"], spy(monkeypatch)
    record, state = go("fedma", argv, tmp_path)
    net = federation("fedma", argv).net
    assert [call.options["order"] for call in calls] == [0, 1, 2, 3]
    for l, (call, (_, layer)) in enumerate(zip(calls, net.layers)):
        free, matched = call.own
        assert matched.shape == (4, layer.start)
        assert (matched == state["w"][: layer.start]).all()  # all clients' are the global ones
        for _, part in net.layers[l:]:
            here = slice(part.start - layer.start, part.stop - layer.start)
            assert (free[:, here] != call.end[:, here]).any(1).all()
    last, units = 10 * 5 + 10, 3 + 4 + 5
    assert record["bytes_up"] == 4 * 4 * net.d
    assert record["bytes_down"] == 4 * 4 * (net.d - last + units)  # no w at first


def test_fedmas_last_layer_and_own_starts_by_hand(toy, tmp_path):
    """Softmax regression is a last layer alone: 3 E = 6 epochs with the rate .3/10 and the decay
    .05. In the first round client k starts from the draw k + 1, in the second from w. The unit of a
    class: the mean by the clients' images of it."""
    argv = ["--dataset", toy, *FLAGS, "--rounds", "2", "--momentum", "0.5"]
    world, w = World(federation("fedma", argv)), None
    for t, S in enumerate(world.S):
        ends = []
        for k in S:
            own = world.fed.net.init(common.stream(0, "initialisation", 0, k + 1)).double().numpy()
            ends.append(world.descend(own if t == 0 else w, k, t, lambda v, *b: 0.05 * v
                                      + softmax_gradient(v, *b), 6, 0.03, 0.5))
        counts = np.array([np.bincount(world.data[k][1], minlength=3) for k in S])
        share = counts / counts.sum(0)  # [2, classes]
        # [2, 15]: 3 x 4 weights, 3 biases
        of_unit = np.concatenate([np.repeat(share, 4, 1), share], 1)
        w = (of_unit * ends).sum(0)
    argv += ["--last-decay", "0.05"]
    close(go("fedma", argv, tmp_path / "own")[1], w=w)
    _, other = go("fedma", [*argv, "--common-start"], tmp_path / "common")
    assert not np.allclose(other["w"], w, atol=1e-3)


class InAnotherOrder(nn.Module):
    """Layers a, b, c, d, of which b and c have one shape; an image passes c before b."""

    def __init__(self, channels, classes, size):
        super().__init__()
        self.a = nn.Linear(channels * size[0] * size[1], 6)
        self.b, self.c, self.d = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, classes)

    def forward(self, x):
        for layer in (self.a, self.c, self.b):
            x = layer(x.flatten(1)).relu()
        return self.d(x)


@pytest.mark.parametrize("model", ["resnet18", "tfcnn", "crossed"])
def test_fedma_refuses_what_is_no_chain(model, tmp_path, monkeypatch, capsys):
    """tfcnn has a normalisation over neighbouring channels: its layers are a chain, but their units
    have an order. An image passes the layers of `crossed` in another order than they are in."""
    monkeypatch.setitem(common.MODELS, "crossed", InAnotherOrder)
    refused(capsys, "use --model vgg9", go, "fedma", [*SMALL, "--model", model], tmp_path)
