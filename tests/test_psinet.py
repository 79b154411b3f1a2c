import pathlib
import re
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import baselines
import common
import fl.models
import psinet
from byhand import column, spy
from conftest import QUICK, refused, run
from papers import psinet_depth, psinet_softmax

# all nodes take part
TINY = [*QUICK, "--limit", "200", "--clients", "5", "--fraction", "1", "--model", "tiny",
        "--momentum", "0.9", "--lr", "0.05", "--groups", "5", "--depth", "conv2"]
SMALL = [*TINY, "--split", "classes", "--per-client", "2"]
NORMS = ["none", "bn", "gn"]
X = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(1)).double()


def tiny(channels, classes):
    """Three convolutions and two linear layers for 32x32 pixels: small, so that the tests are
    quick, and without dead units."""
    network = nn.Sequential(OrderedDict(
        conv1=nn.Conv2d(channels, 6, 3), pool1=nn.MaxPool2d(4), tanh1=nn.Tanh(),
        conv2=nn.Conv2d(6, 10, 3), pool2=nn.MaxPool2d(2), tanh2=nn.Tanh(),
        conv3=nn.Conv2d(10, 10, 1), pool3=nn.MaxPool2d(2), tanh3=nn.Tanh(),
        flatten=nn.Flatten(), fc1=nn.Linear(10, 15), tanh4=nn.Tanh(), fc2=nn.Linear(15, classes)))
    network.start = fl.models.pytorch_default
    return network


@pytest.fixture(autouse=True)
def with_tiny(monkeypatch):
    monkeypatch.setitem(common.MODELS, "tiny", tiny)


def psi(model="tiny", groups=5, depth="conv2", norm="gn", shape=(3, 32, 32), classes=10):
    args = SimpleNamespace(model=model, groups=groups, depth=depth, norm=norm, batchnorm=None,
                           no_dropout=False)
    return psinet.GroupedNet(args, shape, classes)


def start(net, seed=0):
    """Omega [d], whose weights and statistics all differ from those that training starts with."""
    rng = np.random.default_rng(seed)
    Omega = net.with_statistics(net.init(rng)).double()
    Omega[: net.d] += 0.05 * torch.from_numpy(rng.normal(size=net.d))
    Omega[net.d :] = 1.5 * Omega[net.d :] + 0.1 * torch.from_numpy(rng.random(sum(net.sizes_r)))
    return Omega


def batch(x, y, padding=0):
    """A minibatch, to which as many images are added as padding, with label 0."""
    x = torch.cat([x, torch.full((padding, *x.shape[1:]), 9.0).double()])
    y = torch.tensor([*y, *[0] * padding])
    mask = torch.arange(len(y)) < len(y) - padding
    return common.Batch(x, y, mask.double(), torch.zeros(0))


# The structure


@pytest.mark.parametrize("groups", [0, 1])
def test_one_group_without_norm_and_no_groups_are_the_plain_network(groups):
    net, plain = psi("vgg9", groups, None, "none"), common.Net("vgg9", (3, 32, 32), 10)
    assert net.tensors == plain.tensors and not net.sizes_r
    w, x = plain.init(np.random.default_rng(0)), X[:2].float()
    assert torch.equal(w, net.init(np.random.default_rng(0)))
    torch.testing.assert_close(net(w, x), plain(w, x), atol=1e-5, rtol=1e-5)


def convolution(inputs, outputs):
    """Weights and biases of 3x3 kernels."""
    return 9 * inputs * outputs + outputs


def test_parameters_by_hand():
    """Ten groups; widths are rounded up to multiples of 10. Weights and biases, a scale and a shift
    per normed channel."""
    # conv5 sees all of 128 channels, conv6 26; fc1 4 x 4 pixels of 26 channels
    layers = [(3, 32), (32, 64), (64, 128), (128, 128), (128, 260), (26, 260)]
    full = (26 * 16 * 520 + 520) + (52 * 520 + 520) + (52 * 10 + 10)
    d = sum(convolution(*layer) for layer in layers) + full
    assert psi("vgg9", 10, None, "none").d == d == 846_642
    below, channels = 32 + 64 + 128 + 128, 32 + 64 + 128 + 128 + 2 * 260
    for norm, running in (("gn", below), ("bn", channels)):
        net = psi("vgg9", 10, None, norm)
        assert (net.d, sum(net.sizes_r)) == (d + 2 * channels, 2 * running)
    # in images of 32x32 one pixel is left
    layers = [(3, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 260), (26, 260),
              (26, 520), *[(52, 520)] * 5]
    d = sum(convolution(*layer) for layer in layers)
    d += 2 * (52 * 520 + 520) + 52 * 100 + 100
    norms = 64 + 64 + 128 + 128 + 256 + 2 * 260 + 6 * 520
    assert psi("vgg16", 10, None, "gn", classes=100).d == d + 2 * norms


def test_what_a_node_of_vgg9_has_by_hand():
    """A node with 4 of 10 groups: 104 of 260 channels, 208 of 520 neurons, 4 of 10 logits. Channels
    in and out; conv5 sees all channels, conv6 those of its group."""
    lower = (3, 32), (32, 64), (64, 128), (128, 128)
    upper, full = ((128, 104), (26, 104)), ((26 * 16, 208), (52, 208), (52, 4))
    weights = sum(9 * a * b + 3 * b for a, b in lower + upper)  # with norms
    weights += sum(a * b + b for a, b in full)
    net, has = psi("vgg9", 10, None), torch.zeros(1, 10, dtype=torch.bool)
    has[0, [1, 2, 5, 9]] = True
    entries = net.entries(has)[0]
    assert entries[: net.d].sum() == weights and entries[net.d :].sum() == 2 * (32 + 64 + 256)


def test_groups_have_their_own_initial_scale():
    """vgg16 asks for He's normal over the fan out: 2 / (9 * 512) in the plain network, a tenth of
    the fan in a group. vgg9 asks for PyTorch's uniform, in +-1/sqrt(fan in of a group), as does a
    network without `start`."""
    net = psi("vgg16", 10, None, "gn")
    w = net.init(np.random.default_rng(0))
    std = {name: float(w[s].std()) for name, s, _ in net.tensors}
    for name, variance in (("conv2-1", 2 / (9 * 128)), ("conv3-2", 2 / (9 * 256)),  # sees all
                           ("conv4-2", 20 / (9 * 512))):
        assert std[name + ".weight"] == pytest.approx(variance**0.5, rel=0.05)
    net, without, named = (psi("vgg9", 10, None, "gn") for _ in range(3))
    del without.module.start, named.module.start
    named.module.add_module("start", nn.Identity())  # a layer of this name
    for one in (net, without, named):
        w = one.init(np.random.default_rng(0))
        most = {name: float(w[s].abs().max()) for name, s, _ in one.tensors}
        for name, fan in (("conv4", 9 * 128), ("conv5", 9 * 128), ("conv6", 9 * 26),
                          ("fc1", 26 * 16), ("fc2", 52)):
            for part in (".weight", ".bias"):
                assert 0.95 * fan**-0.5 < most[name + part] <= fan**-0.5 * (1 + 1e-6)


# Pruned nodes


class Pruned(nn.Module):
    """tiny with `n` of its 5 groups, as a node would build it that has no others: ordinary layers,
    and a branch for each group."""

    NAMES = {0: "conv1", 1: "conv1-norm"}, {0: "conv2", 1: "conv2-norm", 4: "conv3",
                                            5: "conv3-norm", 9: "fc1", 11: "fc2"}

    def __init__(self, n, norm):
        super().__init__()
        after = {"none": nn.Identity, "bn": nn.BatchNorm2d, "gn": lambda c: nn.GroupNorm(1, c)}
        self.trunk = nn.Sequential(
            nn.Conv2d(3, 6, 3), after["none" if norm == "none" else "bn"](6), nn.MaxPool2d(4),
            nn.Tanh())
        self.branches = nn.ModuleList(nn.Sequential(
            nn.Conv2d(6, 2, 3), after[norm](2), nn.MaxPool2d(2), nn.Tanh(),
            nn.Conv2d(2, 2, 1), after[norm](2), nn.MaxPool2d(2), nn.Tanh(),
            nn.Flatten(), nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)) for _ in range(n))
        self.double()

    def forward(self, x):
        x = self.trunk(x)
        return torch.cat([branch(x) for branch in self.branches], 1)

    def own(self, state, groups):
        """Returns what these groups have of a whole network's state dict, by the names here."""
        found = {}
        for key, z in self.state_dict().items():
            room, *where, part = key.split(".")
            name = self.NAMES[room == "branches"][int(where[-1])]
            whole = state[f"{name}.{part}"]
            if room == "branches" and whole.dim():
                whole = whole.unflatten(0, (5, -1))[groups[int(where[0])]]
            assert whole.shape == z.shape
            found[key] = whole
        return found


@pytest.mark.parametrize("norm", NORMS)
def test_a_pruned_network_has_the_logits_and_the_update_of_the_masked_one(norm):
    """Six steps of SGD with momentum and weight decay on a network without the groups 0,
    2 and 3, with a softmax over its four classes. Padding has label 0, which the node lacks."""
    net, groups, classes = psi(norm=norm), [1, 4], [2, 3, 8, 9]
    Omega = start(net)
    pruned = Pruned(2, norm)
    pruned.load_state_dict(pruned.own(net.state_dict(Omega), groups))
    has = torch.tensor([[False, True, False, False, True]])
    entries = net.entries(has)[0]
    assert entries[: net.d].sum() == sum(z.numel() for z in pruned.parameters())
    assert torch.equal(entries, (net.group == -1) | (net.group == 1) | (net.group == 4))
    with torch.no_grad():
        torch.testing.assert_close(net(Omega, X)[:, classes], pruned.eval()(X))

    own = torch.isin(torch.arange(10), torch.tensor(classes))
    data = [(X[:4], [2, 9, 8, 3], 0), (X[4:], [9, 2], 2), (X[1:5], [3, 3, 8, 2], 1)]
    args = SimpleNamespace(momentum=0.9, weight_decay=0.01)
    after = psinet.local_training(net, args)(
        Omega, own, [[batch(*b) for b in data]] * 2, torch.tensor(0.1, dtype=torch.double))
    parts, u = [*pruned.train().parameters()], 0
    for x, y, _ in data * 2:
        loss = F.cross_entropy(pruned(x), torch.tensor([classes.index(c) for c in y]))
        with torch.no_grad():
            w = nn.utils.parameters_to_vector(parts)
            g = torch.cat([z.flatten() for z in torch.autograd.grad(loss, parts)])
            u = 0.9 * u + g + 0.01 * w
            nn.utils.vector_to_parameters(w - 0.1 * u, parts)
    found = pruned.own(net.state_dict(after), groups)
    for key, z in pruned.state_dict().items():
        if not key.endswith("num_batches_tracked"):
            torch.testing.assert_close(found[key], z, atol=1e-9, rtol=1e-9)
    assert (after - Omega)[entries].norm() > 0.5
    with torch.no_grad():
        torch.testing.assert_close(net(after, X)[:, classes], pruned.eval()(X))


def first(net, seed=0):
    """Omega at the start of a run: means 0 and variances 1."""
    statistics = [float("var" in name) for name in net.running for _ in net.constants[name]]
    return torch.cat([net.init(common.stream(seed, "initialisation")), torch.tensor(statistics)])


def test_groups_are_averaged_over_their_owners_and_nobody_else_changes_them(tmp_path, monkeypatch):
    """Node i returns 1 + i everywhere; 3 of 5 are sampled. Sizes differ: averages weigh by n_i.
    Node i has the classes i and i + 1, and one or two of the groups {0, 1}, {2, 3}, ..."""
    calls = spy(monkeypatch, lambda own, S: 0 * own[0] + 1 + column(S))
    argv = [*SMALL, "--split", "lognormal", "--rounds", "1", "--fraction", "0.6", "--norm", "bn",
            "--seed", "1"]
    record, state = run(psinet, argv, tmp_path)
    net, n = psi(norm="bn"), np.array(record["split"]["sizes"])
    start, own, (call,) = first(net, 1), [{0}, {0, 1}, {1}, {1, 2}, {2}], calls
    assert len(set(n)) > 1 and len(call.S) == 3 and call.S != [0, 1, 2]
    assert torch.equal(call.own[0], start.expand(3, -1))
    found = [set(row.nonzero()[:, 0].tolist()) for row in call.own[1]]  # classes of G_i
    assert found == [{2 * g + j for g in own[i] for j in (0, 1)} for i in call.S]
    stays = []
    for group in range(-1, 5):
        nodes = [i for i in call.S if group in {-1, *own[i]}]
        stays += [group] * (not nodes)
        for part in slice(net.d), slice(net.d, None):  # weights, running statistics
            inside = net.group[part] == group
            assert inside.any()
            want = 1 + np.average(nodes, weights=n[nodes]) if nodes else start[part][inside]
            found = state["Omega"][part][inside]
            np.testing.assert_allclose(found, want, rtol=1e-5 if nodes else 0)
    assert {3, 4} <= set(stays)
    # a group: weights, biases, BatchNorm's scales, shifts, means and variances
    shared, group = 27 * 6 + 6 + 4 * 6, 54 * 2 + 2 + 8 + 2 * 2 + 2 + 8 + 2 * 3 + 3 + 3 * 2 + 2
    sent = 4 * (3 * shared + sum(len(own[i]) for i in call.S) * group)
    assert record["bytes_up"] == record["bytes_down"] == sent


@pytest.mark.parametrize("more, groups, classes", [
    ([], [[0, 1], [4]], [[0, 1, 2, 3], [8, 9]]), (["--no-prune"], [[*range(5)]] * 2, None),
    (["--groups", "0"], [[0], [0]], None), (["--groups", "1"], [[0], [0]], None)])
def test_nodes_that_lack_a_groups_classes_do_without_it_unless_told(more, groups, classes):
    """One node has the classes 1 and 2 of ten, the other class 9; five groups of two classes.
    Without groups, and in one, there is nothing to prune."""
    args = psinet.arguments([*SMALL, *more])
    fed = SimpleNamespace(K=2, device="cpu", data=SimpleNamespace(classes=10),
                          labels=torch.tensor([1, 9, 2]),
                          split=SimpleNamespace(train=[np.array([0, 2]), np.array([1])]))
    has, has_class = psinet.groups_of_nodes(fed, args)
    assert [row.nonzero()[:, 0].tolist() for row in has] == groups
    known = [row.nonzero()[:, 0].tolist() for row in has_class]
    assert known == (classes or [[*range(10)]] * 2)


# The federation


@pytest.mark.parametrize("momentum, decay", [("0.9", "0"), ("0", "0.001")])
def test_without_groups_and_norm_it_is_fedavg_bit_for_bit(momentum, decay, tmp_path):
    """With both, last bits differ: baselines.py adds the decay before the momentum."""
    argv = [*QUICK, "--limit", "200", "--split", "dirichlet-classes", "--alpha", "1", "--model",
            "tiny", "--momentum", momentum, "--weight-decay", decay, "--client-test", "0.2"]
    a, fedavg = run(baselines, ["--method", "fedavg", *argv], tmp_path / "a")
    b, state = run(psinet, [*argv, "--groups", "0", "--norm", "none"], tmp_path / "b")
    assert len(set(a["split"]["sizes"])) > 1 and torch.equal(fedavg["w"], state["Omega"])
    assert a["final"] == {part: b["final"][part] for part in a["final"]}
    assert a["bytes_up"] == b["bytes_up"]


def test_evaluation_is_the_whole_model_on_running_statistics(tmp_path, capsys):
    """model.pt is its state dict, with running statistics, and can be --init."""
    argv = [*SMALL, "--rounds", "1", "--client-test", "0.2"]
    record, state = run(psinet, argv, tmp_path)
    text = capsys.readouterr().out
    assert "tiny in 5 groups from conv2 on" in text
    assert re.search(r"\nnodes   1/[\d.]+/2 of 5 groups, \d+/[\d.]+/\d+ weights", text)
    fed, net = common.Federation(psinet.arguments(argv)), psi()
    module = net.build().eval()
    module.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    norm = dict(module.named_children())["conv1-norm"]
    assert torch.equal(torch.cat([norm.running_mean, norm.running_var]), state["Omega"][net.d :])
    assert not torch.equal(state["Omega"][net.d :], first(net)[net.d :])
    w = net.load(tmp_path / "model.pt")
    assert torch.equal(net.with_statistics(w), state["Omega"])
    central, own = np.arange(fed.data.n_train, len(fed.images)), fed.split.test[1]
    found = {}
    for index in (central, own):
        with torch.no_grad():
            logits, _ = module(fed.transform(fed.images[index]))
        right = (logits.argmax(1) == fed.labels[index]).float().mean()
        found[len(index)] = float(right), float(F.cross_entropy(logits, fed.labels[index]))
    top1, loss = found[len(central)]
    assert record["final"]["global"]["top1"] == pytest.approx(top1, abs=1e-6)
    assert record["final"]["global"]["loss"] == pytest.approx(loss, abs=1e-4)
    assert record["final"]["personal"]["per_client"][1] == pytest.approx(found[len(own)][0])


def test_the_experiment_on_the_softmax_is_fedavg_but_for_the_softmax(tmp_path):
    """If nodes have all classes, it ends with the bits of --groups 0 --norm gn; else not. Of three
    images of classes 2, 0, 2 a node has two classes."""
    argv = ["--dataset", "shapes", "--limit", "200", "--rounds", "1", "--clients", "2", "--device",
            "cpu", "--model", "tiny", "--per-client"]
    for classes in (10, 5):
        out = tmp_path / str(classes)
        _, want = run(psinet, [*argv, str(classes), "--groups", "0", "--norm", "gn"], out / "a")
        _, found = run(psinet_softmax, [*argv, str(classes)], out / "b")
        assert torch.equal(want["Omega"], found["w"]) == (classes == 10)
    fed = SimpleNamespace(data=SimpleNamespace(classes=4), device="cpu",
                          labels=torch.tensor([2, 0, 2, 3]),
                          split=SimpleNamespace(train=[np.array([0, 1, 2]), np.array([3])]))
    own = psinet_softmax.own_classes(fed)
    assert own.tolist() == [[True, False, True, False], [False, False, False, True]]


# Class preferences and total variance: papers/psinet_depth.py


def test_total_variance_by_hand():
    """(.25, .75), (.5, .5), (-.5, .5): mean (1/12, 7/12)."""
    tv = psinet_depth.total_variance(torch.tensor([[1.0, 3.0], [2.0, 2.0], [-1.0, 1.0]]))
    lengths = np.hypot(2 / 12, 2 / 12), np.hypot(5 / 12, 1 / 12), np.hypot(7 / 12, 1 / 12)
    assert float(tv) == pytest.approx(np.mean(lengths), abs=1e-6)


@pytest.mark.parametrize("number", [20, 2])
def test_preferences_with_groups_batchnorm_and_pooling_by_hand(number, monkeypatch):
    """2 channels - 4 - 4 in two groups - 4 classes in two groups; pooling leaves 2 of 6 pixels; the
    chain rule in numpy. Each class has 4 images; the first two are taken, or all."""
    def two_convolutions(channels, classes):
        layers = nn.Sequential(OrderedDict(
            one=nn.Conv2d(channels, 4, 1), relu1=nn.ReLU(), pool=nn.AvgPool2d((1, 3)),
            two=nn.Conv2d(4, 4, 1), relu2=nn.ReLU(), flatten=nn.Flatten(),
            three=nn.Linear(8, classes)))
        layers.start = fl.models.pytorch_default
        return layers

    monkeypatch.setitem(common.MODELS, "model", two_convolutions)
    net = psi("model", 2, "two", "bn", (2, 2, 3), 4)
    module = net.build().double().eval()
    module.load_state_dict(net.state_dict(start(net, 4)))
    rng = np.random.default_rng(3)
    images, labels = rng.random((16, 2, 2, 3)), np.arange(16) % 4
    found = psinet_depth.preferences(module, lambda x: x, torch.from_numpy(images),
                                     torch.from_numpy(labels), 4, number)
    part = {name: z.numpy() for name, z in module.state_dict().items()}
    U, V = part["one.weight"][:, :, 0, 0], part["two.weight"][:, :, 0, 0]
    W = part["three.weight"].reshape(4, 2, 2)

    def normalised(name, y):
        norm = name + "-norm."
        slope = part[norm + "weight"] / np.sqrt(part[norm + "running_var"] + 1e-5)
        y = slope[:, None] * (y - part[norm + "running_mean"][:, None])
        return slope[:, None], y + part[norm + "bias"][:, None]

    P = {"one": np.zeros((4, 4)), "two": np.zeros((4, 4))}
    for x, c in [*zip(images.reshape(16, 2, 6), labels)][: 4 * number]:
        _, y = normalised("one", U @ x + part["one.bias"][:, None])
        A = np.maximum(y, 0).reshape(4, 2, 3).mean(2)  # [4, 2]
        slope, y = normalised("two", V @ A + part["two.bias"][:, None])
        B = np.maximum(y, 0)
        dB = np.zeros((4, 2))
        dB[2 * (c // 2) : 2 * (c // 2) + 2] = W[c]  # class c's group alone
        dA = V.T @ (dB * (B > 0) * slope)
        P["two"][:, c] += (B * dB).sum(1)
        P["one"][:, c] += (A * dA).sum(1)
    assert list(found) == ["one", "two"] and V.shape == (4, 4)
    for name, expected in P.items():
        np.testing.assert_allclose(found[name], expected, atol=1e-12)
    assert (P["one"] != 0).all() and (P["two"] != 0).any()


def test_the_depth_that_tv_suggests(tmp_path, capsys, monkeypatch):
    """The middle of .2 and .9 is .55, which conv3 is the first to reach. A finished run without
    groups is needed."""
    refused(capsys, "there is no record", psinet_depth.main, tmp_path)
    fixed = iter([0.2, 0.3, 0.9, 0.7])
    monkeypatch.setattr(psinet_depth, "total_variance", lambda P: next(fixed))
    argv = [*SMALL, "--rounds", "1"]
    run(psinet, [*argv, "--groups", "0", "--norm", "bn"], tmp_path)
    tv, depth = psinet_depth.main(tmp_path)
    assert tv == {"conv1": 0.2, "conv2": 0.3, "conv3": 0.9, "fc1": 0.7} and depth == "conv3"
    assert "suggests --depth conv3" in capsys.readouterr().out
    assert (tmp_path / "tv.png").stat().st_size > 1000
    run(psinet, argv, tmp_path / "grouped")
    refused(capsys, "use psinet.py --groups 0", psinet_depth.main, tmp_path / "grouped")


TWICE = "class Twice(nn.Sequential):\n    def forward(self, x): return super().forward(x) * 2\n"


@pytest.mark.parametrize("argv, words", [
    (["--groups", "4"], "divisor of 10"), (["--depth", "conv9"], "it has conv1, conv2"),
    (["--groups", "-1"], "at least 0"),
    (["--model", "cifarnet", "--depth"], "give --depth LAYER"),
    (["--model", "tfcnn", "--depth", "fc3"], "it has lrn1, a LocalResponseNorm"),
    (["--model", "resnet18", "--depth", "layer3"], "can't be cut into groups"),
    (["--model", "tfcnn", "--groups", "0"], "can't be cut into groups"),
    # with dropout, groups of its own, layers inside of layers, a forward of its own
    ("nn.Sequential(nn.Flatten(), nn.Linear(3072, 10), nn.Dropout())", "a Dropout"),
    ("nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.Flatten(), nn.Linear(5400, 10))", "a Conv2d"),
    ("nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)))", "a Sequential"),
    ("nn.Sequential(nn.Conv2d(3, 6, 32), nn.Flatten(2), nn.Flatten(), nn.Linear(6, 10))",
     "1, a Flatten"),
    ("Twice(nn.Flatten(), nn.Linear(3072, 10))", "can't be cut into groups"),
    ("nn.Sequential(nn.Conv2d(3, 10, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())",
     "its last layer with weights, 0, is not nn.Linear"),
    ("nn.Sequential(nn.Flatten(), a := nn.ReLU(), nn.Linear(3072, 10), a)", "a layer twice"),
    ("nn.Sequential(nn.Flatten(), a := nn.Linear(3072, 10)); "
     "model.register_forward_pre_hook(lambda m, x: (2 * x[0],))", "it has a hook"),
    ("nn.Sequential(nn.Flatten(), a := nn.Linear(3072, 10)); "
     "a.register_full_backward_hook(lambda *_: None)", "1 has a hook"),
])
def test_what_makes_no_sense_is_refused(argv, words, tmp_path, capsys):
    if isinstance(argv, str):
        (tmp_path / "mine.py").write_text(f"from torch import nn\n{TWICE}\nmodel = {argv}\n")
        argv = ["--model", f"{tmp_path}/mine.py:model", "--depth", "1", "--no-dropout"]
    argv = [*SMALL, *argv] if argv[-1] != "--depth" else ["--dataset", "shapes", *argv[:-1]]
    refused(capsys, words, psinet.main, [*argv, "--out", str(tmp_path / "out")])


def test_numbers_in_the_file_and_on_the_page():
    """The table above PsiNet, and how large VGG-9 is in ten groups and without."""
    net, plain = psi("vgg9", 10, None), psi("vgg9", 0, None)
    rows = re.findall(r"^# +(\w+) +(?:shared|10) .*?([\d,]+)   l\.",
                      pathlib.Path(psinet.__file__).read_text(), re.M)
    found = {}
    for name, where, _ in net.tensors:
        layer = name.rpartition(".")[0].removesuffix("-norm")
        found[layer] = found.get(layer, 0) + where.stop - where.start
    assert {layer: int(n.replace(",", "")) for layer, n in rows} == found and len(rows) == 9
    page = (pathlib.Path(psinet.__file__).parent / "docs" / "psinet.md").read_text()
    text, has = " ".join(page.split()), torch.arange(10)[None] < 4
    weights = net.entries(has)[0, : net.d]
    assert f"VGG-9 in ten groups has {net.d:,} weights (without groups {plain.d:,})" in text
    assert f"a node with four of these groups {weights.sum():,}." in text
