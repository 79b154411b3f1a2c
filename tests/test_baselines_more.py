"""Ditto, pFedMe, Per-FedAvg, FedSpa and FedMA: their identities, and what happens within a round,
by hand."""

import itertools
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad
from torch.utils._pytree import tree_map

import baselines
import common
from conftest import QUICK, pixels, refused, softmax_gradient
from fl.state import Rows
from test_baselines import fedavgs, federation, go, small_images  # noqa: F401

SMALL = [*QUICK, "--model", "mnistnet", "--epochs", "2", "--lr", "0.05"]
UNEVEN = [*SMALL, "--split", "dirichlet-classes", "--alpha", "1"]  # clients of different sizes


# Identities


def test_per_fedavg_with_inner_step_0_is_fedavg(tmp_path):
    """With one minibatch in an epoch, b' is every second epoch, of the same images."""
    full = [*UNEVEN, "--batch-size", "0", "--momentum", "0.9", "--weight-decay", "0.01"]
    _, a = fedavgs(*full)
    argv = [*full, "--per-fedavg-alpha", "0", "--epochs", "4"]
    _, b = go("per-fedavg", argv, tmp_path / "b")
    torch.testing.assert_close(a["w"], b["w"], atol=1e-6, rtol=1e-5)


def test_fedspa_with_density_1_is_fedavg(tmp_path):
    argv = [*UNEVEN, "--momentum", "0.9", "--weight-decay", "0.01"]
    a, w = fedavgs(*argv)
    b, state = go("fedspa", [*argv, "--density", "1"], tmp_path / "b")
    torch.testing.assert_close(w["w"], state["w"], atol=1e-6, rtol=1e-5)
    assert state["M"].all() and a["bytes_up"] == b["bytes_up"] == b["bytes_down"]
    assert a["final"]["personal"]["mean"] == b["final"]["personal"]["mean"]


@pytest.mark.parametrize("epochs", ["1", "2"])
def test_ditto_with_lambda_0_is_local_and_its_global_model_fedavg(epochs, tmp_path):
    """With equal sizes, since Ditto's mean is unweighted; --personal-epochs changes v_k alone."""
    _, a = fedavgs(*SMALL)
    _, b = go("local", [*SMALL, "--epochs", epochs], tmp_path / "b")
    argv = [*SMALL, "--ditto-lambda", "0", "--personal-epochs", epochs]
    _, c = go("ditto", argv, tmp_path / "c")
    torch.testing.assert_close(a["w"], c["w"], atol=1e-6, rtol=1e-5)
    assert torch.equal(b["W"], c["V"])
    _, d = go("ditto", [*SMALL, "--ditto-lambda", "1"], tmp_path / "d")
    assert torch.equal(c["w"], d["w"]) and not torch.allclose(c["V"], d["V"], atol=1e-4)


# Small numbers: the method's function with a model, minibatches and a round that are made here


class Function(nn.Module):
    """A function of its weights, as one vector, and of x."""

    def __init__(self, function, *shapes):
        super().__init__()
        self.function = function
        self.parts = nn.ParameterList(torch.zeros(shape) for shape in shapes)

    def forward(self, x):
        return self.function(torch.cat([part.flatten() for part in self.parts]), x)


class Minibatches(list):
    """One epoch; epochs.again(order=1) and the like are the same."""

    def again(self, **options):
        return self


class Toy:
    """One client with given minibatches, on which every call of train goes; also the run."""

    K, everyone, device = 1, np.arange(1), torch.device("cpu")
    eta, per_client = common.Federation.eta, common.Federation.per_client

    def __init__(self, function, shapes, w, batches, T=1):
        self.net = common.Net("toy", (1, 1, 1), 3, build=lambda: Function(function, *shapes))
        self.w, self.T, self.all_rows = w, T, []
        self.epochs = Minibatches([[common.Batch(x, y, torch.ones(len(y), dtype=w.dtype), None)
                                    for x, y in batches]])
        self.n = torch.tensor([float(sum(len(y) for _, y in batches))], dtype=w.dtype)

    def run(self, method, args):
        self.args = args
        method(self, self, args)

    def initial_weights(self):
        return self.w

    def sample(self, t):
        return np.arange(1)

    def train(self, client_update, S, t, own, shared=(), epochs=None):
        result = client_update(*(z[0] for z in own), self.epochs, *shared)
        return tree_map(lambda z: z[None], result)

    def rounds(self, state, model="w", clients=None):
        self.state = state
        yield from range(self.T)

    def sent(self, up, down):
        pass

    def evaluates(self):
        return True

    def evaluate(self, w):
        pass

    def evaluate_clients(self, W):
        return {"model": (W(np.arange(1)) if callable(W) else W)[0]}

    def log(self, global_, personal, **more):
        self.personal, self.more = personal["model"], more


def settings(argv):
    return baselines.arguments([*argv, "--momentum", "0"])


def two_layers(w, x):
    """4-5-3 with tanh, so that it has all derivatives."""
    hidden = torch.tanh(x @ w[:20].view(5, 4).T + w[20:25])
    return hidden @ w[25:40].view(3, 5).T + w[40:]


def three_minibatches():
    rng = np.random.default_rng(3)
    w = torch.from_numpy(rng.normal(0, 0.7, 43))
    return w, [(torch.from_numpy(rng.normal(size=(n, 4))), torch.from_numpy(rng.integers(0, 3, n)))
               for n in (6, 5, 7)]


def test_per_fedavgs_step_by_hand_in_float64():
    """Of three minibatches the third is a b that no b' follows. Then the personal model."""
    w, batches = three_minibatches()
    argv = ["--method", "per-fedavg", "--lr", "0.5", "--per-fedavg-alpha", "0.25",
            "--weight-decay", "0.125"]
    toy = Toy(two_layers, [(43,)], w, batches)
    toy.run(baselines.per_fedavg, settings(argv))

    def loss(w, i):
        x, y = batches[i]
        return F.cross_entropy(two_layers(w, x), y) + 0.125 / 2 * (w @ w)

    z = w - 0.25 * grad(loss)(w, 0)
    new = w - 0.5 * grad(loss)(z, 1)
    torch.testing.assert_close(toy.state.w, new, atol=1e-8, rtol=0)
    mean = sum(len(batches[i][1]) * grad(loss)(new, i) for i in range(3)) / 18
    torch.testing.assert_close(toy.personal, new - 0.25 * mean, atol=1e-8, rtol=0)


def test_per_fedavg_restores_w_before_the_second_step():
    """Two minibatches, inner step 1, outer step 0.5, of the loss |w - y|^2 / 2: z = w - (w - y_1),
    g = z - y_2."""
    argv = ["--method", "per-fedavg", "--lr", "0.5", "--per-fedavg-alpha", "1"]
    assert_quadratic(argv, baselines.per_fedavg, [3.0, 7.0], "w", 10 - 0.5 * (3 - 7))


def squared_distance(logits, batch):
    return 0.5 * (logits - batch.y).square().sum()


def assert_quadratic(argv, method, targets, field, expected):
    """A model of one weight, 10 at first, whose loss on a minibatch is (w - target)^2 / 2."""
    batches = [(torch.zeros(1, 1).double(), torch.tensor([y]).double()) for y in targets]
    toy = Toy(lambda w, x: w, [(1,)], torch.tensor([10.0]).double(), batches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "cross_entropy", squared_distance)
        argv = [*argv, "--batch-size", "1", "--epochs", str(len(targets))]
        toy.run(method, settings(argv))
    value = getattr(toy.state, field)
    found = float(value.all if isinstance(value, Rows) else value)
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("steps", [1, 3, 100])
def test_pfedmes_inner_problem_against_its_closed_form(steps):
    """The least of (theta - y)^2 / 2 + lambda/2 (theta - w)^2 is p = (y + lambda w) / (1 + lambda),
    and each step brings theta nearer by the factor 1 - eta_p (1 + lambda). Two minibatches: theta
    goes on where it was."""
    lam, eta, eta_p, beta, w, theta = 3.0, 0.25, 0.0625, 2.0, 10.0, 10.0
    for y in (2.0, -4.0):
        p = (y + lam * w) / (1 + lam)
        theta = p + (1 - eta_p * (1 + lam)) ** steps * (theta - p)
        w = w - eta * lam * (w - theta)
    argv = ["--method", "pfedme", "--lr", str(eta), "--theta-lr", str(eta_p),
            "--theta-steps", str(steps), "--pfedme-lambda", str(lam), "--pfedme-beta", str(beta)]
    assert_quadratic(argv, baselines.pfedme, [2.0, -4.0], "Theta", theta)
    assert_quadratic(argv, baselines.pfedme, [2.0, -4.0], "w", -10 + beta * w)


def test_dittos_personal_step_by_hand():
    """v = 10; v -= .5 ((v - 4) + 2 (v - 10)) = 7; v -= .5 ((v - 6) + 2 (v - 10)) = 9.5. w: 10 -> 7
    -> 6.5."""
    argv = ["--method", "ditto", "--lr", "0.5", "--ditto-lambda", "2"]
    assert_quadratic(argv, baselines.ditto, [4.0, 6.0], "V", 9.5)
    assert_quadratic(argv, baselines.ditto, [4.0, 6.0], "w", 6.5)


# FedSpa's masks


@pytest.mark.parametrize("density, counts", [
    (0.5, [150, 100, 149, 3]), (0.9, [320, 100, 300, 3]), (1.0, [400, 100, 300, 3])])
def test_erk_by_hand(density, counts):
    """4-100-3: d = 803, biases 103. (4 + 100) and (100 + 3) share what is left: .5: 299 is 150.2 +
    148.8; .9: 620 would be more than the 300 of the second layer, so that the first has 320."""
    net = common.Net("mnistnet", (1, 2, 2), 3)
    assert baselines.erdos_renyi_kernel(net, density).tolist() == counts


def test_fedspas_rounds_by_hand():
    """Of 12 kernel weights 8 are active, and both biases; two rounds of two minibatches, whose
    losses are |w - y|^2 / 2. a = .5 drops 4 of the 8, then a/2 * (1 + cos(pi/2)) = a/2, 2 of
    them."""
    rng = np.random.default_rng(3)
    w = rng.normal(0, 3, 14).astype(np.float32)
    y = rng.normal(0, 9, (2, 14)).astype(np.float32)
    batches = [(torch.zeros(1, 1), torch.from_numpy(target)) for target in y]
    toy = Toy(lambda w, x: w, [(3, 4), (2,)], torch.from_numpy(w), batches, T=2)
    args = settings(["--method", "fedspa", "--lr", "0.125", "--density", str(10 / 14),
                     "--drop", "0.5", "--rounds", "2"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "cross_entropy", squared_distance)
        toy.run(baselines.fedspa, args)
    draw = common.stream(0, "algorithm", 0, 0).random((1, 14), np.float32)[0, :12]
    mask = np.isin(np.arange(14), [*np.argsort(draw)[4:], 12, 13])
    for dropped in (4, 2):
        trained, first = mask * w, mask * w - y[0]
        for target in y:
            g = trained - target  # at the masked weights, of all
            trained = trained - 0.125 * mask * g
        w = np.where(mask, trained, w)  # the others stay as they were
        active = np.flatnonzero(mask[:12])
        kept = active[np.abs(trained[active]).argsort()[dropped:]].tolist()
        rest = [i for i in range(12) if i not in kept]
        new, otherwise = (sorted(rest, key=lambda i: -abs(score[i]))[:dropped]
                          for score in (g, first))
        # the last minibatch matters; a mask moves
        assert set(new) != set(otherwise) and set(new) - set(active.tolist())
        mask = np.isin(np.arange(14), [*kept, *new, 12, 13])
    np.testing.assert_allclose(toy.state.w, w, rtol=1e-5)
    assert toy.state.M.all[0].tolist() == mask.tolist()
    np.testing.assert_allclose(toy.personal, mask * w, rtol=1e-5)


def test_fedspa_keeps_the_density_exactly_and_trains_active_weights_alone(tmp_path):
    argv = [*SMALL, "--rounds", "3", "--fraction", "1", "--momentum", "0.9"]
    seen, train = [], common.Federation.train

    def spy(self, client_update, S, t, own, shared):
        U, M = train(self, client_update, S, t, own, shared)
        seen.append((own[1], U))
        return U, M

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common.Federation, "train", spy)
        record, state = go("fedspa", [*argv, "--density", "0.3"], tmp_path)
    d = 20_310
    masks = torch.stack([mask.bool() for mask, _ in seen] + [state["M"]])  # [4, 8, d]
    assert (masks.sum(2) == round(0.3 * d)).all()
    parts = [part.sum(2) for part in masks.split([19_200, 100, 1000, 10], 2)]
    assert all((part == part[0, 0]).all() for part in parts)  # and so in every tensor
    assert not (masks[0, 0] == masks[0, 1]).all()
    assert all((masks[i] != masks[i + 1]).any(1).all() for i in range(3))
    for mask, U in seen:
        assert not U[mask == 0].any() and (U != 0).any(1).all()
    assert record["bytes_up"] == record["bytes_down"] == 4 * 3 * 8 * round(0.3 * d)


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
    """A train that gives client k models[k] in its first call, and whatever it got in later
    ones."""
    def train(self, client_update, S, t, own, shared, epochs, order):
        return torch.stack([models[k] for k in S]) if order == 0 else own[0].clone()

    return train


@pytest.mark.parametrize("model", ["mnistnet", "cnn", "cifarnet", "vgg9"])
def test_fedma_averages_permuted_copies_of_a_network_to_that_network(model, tmp_path, monkeypatch):
    rng = np.random.default_rng(1)
    size = 16 if model == "vgg9" else 32
    arrays = {f"x_{part}": rng.integers(0, 256, (20, size, size, 3), dtype=np.uint8)
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
    monkeypatch.setattr(common.Federation, "train", returning(copies))
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
    monkeypatch.setattr(common.Federation, "train", returning(models))
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
    argv, calls = [*SMALL, "--model", "small", "--rounds", "1"], []
    train = common.Federation.train

    def spy(self, client_update, S, t, own, shared, epochs, order):
        end = train(self, client_update, S, t, own, shared, epochs=epochs, order=order)
        calls.append(SimpleNamespace(order=order, free=own[0], matched=own[1], end=end))
        return end

    monkeypatch.setattr(common.Federation, "train", spy)
    record, state = go("fedma", argv, tmp_path)
    net = federation("fedma", argv).net
    assert [call.order for call in calls] == [0, 1, 2, 3]
    for call, (_, layer) in zip(calls, net.layers):
        assert call.matched.shape == (4, layer.start)
        assert (call.matched == state["w"][: layer.start]).all()  # all clients' are the global ones
        for _, part in net.layers[call.order :]:
            here = slice(part.start - layer.start, part.stop - layer.start)
            assert (call.free[:, here] != call.end[:, here]).any(1).all()
    last, units = 10 * 5 + 10, 3 + 4 + 5
    assert record["bytes_up"] == 4 * 4 * net.d
    assert record["bytes_down"] == 4 * 4 * (net.d - last + units)  # no w at first


def test_fedmas_last_layer_and_own_starts_by_hand(toy, tmp_path):
    """Softmax regression is a last layer alone: 3 E = 6 full batches with the rate .3/10 and the
    decay .05. In the first round client k starts from the draw k + 1, in the second from w. The
    unit of a class: the mean by the clients' images of it."""
    argv = ["--dataset", toy, "--model", "linear", "--split", "dirichlet-classes", "--alpha", "9",
            "--clients", "3", "--fraction", "0.7", "--rounds", "2", "--epochs", "2",
            "--batch-size", "0", "--lr", "0.3", "--momentum", "0.5", "--device", "cpu"]
    fed = federation("fedma", argv)
    data = [pixels(fed, index) for index in fed.split.train]
    w = None
    for t in range(2):
        S, ends = fed.sample(t), []
        assert len(S) == 2
        for k in S:
            own = fed.net.init(common.stream(0, "initialisation", 0, int(k) + 1)).double().numpy()
            v, u = own if t == 0 else w, 0
            for _ in range(6):
                u = 0.5 * u + softmax_gradient(v, *data[k]) + 0.05 * v
                v = v - 0.03 * u
            ends.append(v)
        counts = np.array([np.bincount(data[k][1], minlength=3) for k in S])
        share = counts / counts.sum(0)  # [2, classes]
        # [2, 15]: 3 x 4 weights, 3 biases
        of_unit = np.concatenate([np.repeat(share, 4, 1), share], 1)
        w = (of_unit * ends).sum(0)
    argv += ["--last-decay", "0.05"]
    _, state = go("fedma", argv, tmp_path / "own")
    np.testing.assert_allclose(state["w"], w, atol=5e-6)
    _, other = go("fedma", [*argv, "--common-start"], tmp_path / "common")
    assert not np.allclose(other["w"], w, atol=1e-3)


def test_the_split_fedma_gives_nothing_to_a_client_that_has_its_share():
    """Classes are dealt one after the other. A client with N/K images gets nothing of a class but,
    as the last client, one by rounding."""
    labels = np.repeat(np.arange(10), 500)
    args = baselines.arguments(["--method", "fedma", "--clients", "16", "--split", "fedma",
                                "--alpha", "0.5"])
    most, spread = {}, {}
    for name in ("fedma", "dirichlet-classes"):
        owned = [common.SPLITS[name](labels, 10, np.random.default_rng(seed), args)
                 for seed in range(20)]
        assert all(np.array_equal(np.sort(np.concatenate(one)), np.arange(5000)) for one in owned)
        counts = np.array([np.bincount(labels[own], minlength=10)
                           for one in owned for own in one])  # [20 * 16, classes]
        before = counts.cumsum(1) - counts
        most[name], spread[name] = counts[before >= 5000 / 16].max(), counts.sum(1).std()
        assert counts.sum(1).min() >= 10
    assert most["fedma"] <= 1 < most["dirichlet-classes"]
    assert spread["fedma"] < 0.8 * spread["dirichlet-classes"]


@pytest.mark.parametrize("model", ["resnet18", "tfcnn"])
def test_fedma_refuses_what_is_no_chain(model, tmp_path, capsys):
    """tfcnn has a normalisation over neighbouring channels: its layers are a chain, but their units
    have an order."""
    refused(capsys, "use --model vgg9", go, "fedma", [*SMALL, "--model", model], tmp_path)


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


def test_fedma_refuses_layers_that_are_in_another_order_than_an_image_passes_them(
        tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(common.MODELS, "crossed", InAnotherOrder)
    refused(capsys, "use --model vgg9", go, "fedma", [*SMALL, "--model", "crossed"], tmp_path)


# Bad input


def test_per_fedavg_refuses_clients_with_too_few_minibatches(tmp_path, capsys):
    argv = [*SMALL, "--batch-size", "0", "--epochs"]
    go("per-fedavg", [*argv, "2"], tmp_path)
    refused(capsys, "takes 2 minibatches", go, "per-fedavg", [*argv, "1"], tmp_path)


@pytest.mark.parametrize("method, flags, words", [
    ("fedprox", ["--density", "0.3"], "fedprox has no density; it is for fedspa"),
    ("fedavg-ft", ["--mu", "0.1"], "fedavg-ft has no mu; it is for fedprox, fedprox-ft"),
    ("scaffold", ["--theta-lr", "0.02"], "scaffold has no theta-lr; it is for pfedme"),
])
def test_a_flag_of_another_method_is_refused(method, flags, words, capsys):
    argv = ["--method", method, "--dataset", "cifar10", *flags]
    refused(capsys, words, baselines.arguments, argv)


def test_fedspa_refuses_a_density_below_its_biases(tmp_path, capsys):
    refused(capsys, "use more", go, "fedspa", [*SMALL, "--density", "1e-5"], tmp_path)
