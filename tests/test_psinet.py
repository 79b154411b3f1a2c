import pathlib
import re
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad

import common
import fedavg
import fl.models
import fl.training
import psinet
from conftest import QUICK, killed, paths, refused, run, same
from papers import psinet_depth, psinet_softmax

# all nodes take part
TINY = [*QUICK, "--clients", "5", "--fraction", "1", "--model", "tiny", "--transform", "scale",
        "--momentum", "0.9", "--lr", "0.05", "--groups", "5", "--depth", "conv2"]
SMALL = [*TINY, "--split", "classes", "--per-client", "2"]
NORMS = ["none", "bn", "gn"]
X = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(1)).double()


def tiny(channels, classes):
    """Three convolutions and two fully connected layers for 32x32 pixels; small, so that the tests
    are quick, and without dead units."""
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


def psi(model="tiny", groups=5, depth="conv2", norm="gn", shape=(3, 32, 32), classes=10, s=None):
    args = SimpleNamespace(model=model, groups=groups, depth=depth, norm=norm, batchnorm=None,
                           no_dropout=False)
    return psinet.GroupedNet(args, shape, classes, s=s)


def every(net):
    """G_i of a network with all of its groups."""
    return torch.arange(net.s)


def macs(net, shape=(3, 32, 32)):
    """Multiplications for one image."""
    fed = SimpleNamespace(images=torch.zeros(1, *shape), transform=lambda x: x)
    one = psinet.multiplications(fed, {net.s: net}, torch.ones(1, net.s, dtype=torch.bool))
    return float(one)


def start(net, seed=0):
    """Weights and running statistics, all different from those that training starts with."""
    rng = np.random.default_rng(seed)
    w = net.init(rng).double() + 0.05 * torch.from_numpy(rng.normal(size=net.d))
    return w, net.r_0.double() * 1.5 + 0.1 * torch.from_numpy(rng.random(len(net.group_r)))


def some_batch(x=X, y=None):
    y = torch.arange(len(x)) if y is None else y
    return common.Batch(x, y, torch.ones(len(x)).double(), torch.zeros(0))


# The structure


@pytest.mark.parametrize("model, groups", [("vgg9", 1), ("vgg16", 1), ("vgg9", 0)])
def test_one_group_without_norm_and_no_groups_are_the_plain_network(model, groups):
    net, plain = psi(model, groups, None, "none"), common.Net(model, (3, 32, 32), 10)
    assert net.tensors == plain.tensors and not len(net.group_r)
    w, x = plain.init(np.random.default_rng(0)), X[:2].float()
    assert torch.equal(w, net.init(np.random.default_rng(0)))
    torch.testing.assert_close(net(w, x), plain(w, x), atol=1e-5, rtol=1e-5)


def convolution(inputs, outputs, kernel=3):
    """Weights and biases."""
    return kernel**2 * inputs * outputs + outputs


def test_parameters_by_hand():
    """Ten groups; widths are rounded up to multiples of 10. Weights and biases, a scale and a shift
    per normed channel."""
    shared = [(3, 32), (32, 64), (64, 128), (128, 128), (128, 256)]
    lower = sum(convolution(*layer) for layer in shared)
    # conv6 sees all of 256 channels; fc1 4 x 4 pixels of 26 channels
    upper = convolution(256, 260) + (26 * 16 * 520 + 520) + (52 * 520 + 520) + (52 * 10 + 10)
    channels = 32 + 64 + 128 + 128 + 256  # of BatchNorm
    assert psi("vgg9", 10, "conv6", "none").d == lower + upper == 1_380_230
    net = psi("vgg9", 10, "conv6", "gn")
    assert net.d == lower + upper + 2 * (channels + 260) and len(net.group_r) == 2 * channels
    assert len(psi("vgg9", 10, "conv6", "bn").group_r) == 2 * (channels + 260)
    # the default: conv5 has groups of outputs, conv6 is the first with groups of inputs, too
    lower -= convolution(128, 256)
    upper += convolution(128, 260) + convolution(26, 260) - convolution(256, 260)
    assert psi("vgg9", 10, None, "none").d == lower + upper == 846_642

    shared = [(3, 64), (64, 64), (64, 128), (128, 128), (128, 256)]
    upper = [(256, 260), (26, 260), (26, 520), *[(52, 520)] * 5]
    d = sum(convolution(*layer) for layer in shared + upper)
    d += 2 * (52 * 520 + 520) + 52 * 100 + 100  # in images of 32x32 one pixel is left
    norms = 64 + 64 + 128 + 128 + 256 + 2 * 260 + 6 * 520
    assert psi("vgg16", 10, None, "gn", classes=100).d == d + 2 * norms


def test_multiplications_by_hand():
    conv1 = 30 * 30 * 27 * 6
    assert macs(psi()) == conv1 + 5 * 5 * 54 * 10 + 2 * 2 * 2 * 10 + 2 * 15 + 3 * 10
    # 2 of the 5 groups
    assert macs(psi(s=2)) == conv1 + 5 * 5 * 54 * 4 + 2 * 2 * 2 * 4 + 2 * 6 + 3 * 4


def test_a_pruned_network_s_parameters_and_multiplications_by_hand():
    """2 of 5 groups of tiny; 4 of 10 groups of VGG-9: 104 of 260 channels, 208 of 520 neurons, 4 of
    10 logits."""
    convolutions = (27 * 6 + 6 + 12) + (54 * 4 + 4 + 8) + (2 * 4 + 4 + 8)  # with norms
    assert psi(s=2).d == convolutions + (2 * 6 + 6) + (3 * 4 + 4)
    assert len(psi(s=2).group_r) == 12
    # channels in and out, pixels
    lower = ((3, 32, 32), (32, 64, 32), (64, 128, 16), (128, 128, 16))
    upper = ((128, 104, 8), (26, 104, 8))  # conv5 sees all channels, conv6 those of its group
    full = ((26 * 16, 208), (52, 208), (52, 4))
    net = psi("vgg9", 10, None, "gn", s=4)
    convolutions = sum(9 * a * b + 3 * b for a, b, _ in lower + upper)
    assert net.d == convolutions + sum(a * b + b for a, b in full)
    assert len(net.group_r) == 2 * (32 + 64 + 128 + 128)
    convolutions = sum(9 * a * b * size**2 for a, b, size in lower + upper)
    assert macs(net) == convolutions + sum(a * b for a, b in full)


def test_the_network_against_an_explicit_loop_over_groups():
    """Evaluation with running statistics: BatchNorm behind conv1; then each group alone, normed by
    itself."""
    net = psi()
    w, r = start(net)
    part = {name: w[s].view(shape) for name, s, shape in net.tensors}
    mean, var = (z[:, None, None] for z in (r[:6], r[6:]))

    def normalised(x, mean, var, name, own):
        x = (x - mean) / (var + 1e-5).sqrt()
        return (x * part[name + ".weight"][own, None, None]
                + part[name + ".bias"][own, None, None])

    x = F.conv2d(X, part["conv1.weight"], part["conv1.bias"])
    x = torch.tanh(F.max_pool2d(normalised(x, mean, var, "conv1-norm", slice(6)), 4))
    logits = torch.zeros(6, 10).double()
    for g in range(5):
        two, three, y = slice(2 * g, 2 * g + 2), slice(3 * g, 3 * g + 3), x
        for name in ("conv2", "conv3"):
            y = F.conv2d(y, part[name + ".weight"][two], part[name + ".bias"][two])
            m = y.mean((1, 2, 3), keepdim=True)
            v = y.var((1, 2, 3), correction=0, keepdim=True)
            y = torch.tanh(F.max_pool2d(normalised(y, m, v, name + "-norm", two), 2))
        y = torch.tanh(y.flatten(1) @ part["fc1.weight"][three].T + part["fc1.bias"][three])
        logits[:, two] = y @ part["fc2.weight"][two].T + part["fc2.bias"][two]
    torch.testing.assert_close(net(torch.cat([w, r]), X), logits)


@pytest.mark.parametrize("norm", NORMS)
def test_a_logit_has_no_gradient_in_another_group(norm):
    net = psi(norm=norm)
    w, r = start(net)
    for mask in (None, torch.ones(2).double()):
        for c in (0, 7):
            g = grad(lambda w: net.forward(w, r, X[:2], every(net), mask)[0][:, c].sum())(w)
            assert not g[(net.group != c // 2) & (net.group >= 0)].any()
            assert g[net.group == c // 2].count_nonzero() > 20
            assert g[net.group == -1].count_nonzero() > 20


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


# BatchNorm and its running statistics


@pytest.mark.parametrize("vmapped", [False, True])
def test_batchnorm_and_its_running_statistics_are_pytorchs(vmapped, monkeypatch):
    """In a plain loop on a CPU, which uses PyTorch's function, and by our formula."""
    monkeypatch.setattr(fl.training.STEPS, "vmapped", vmapped, raising=False)
    net = psi(groups=0, norm="bn")
    w, r = start(net)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.MaxPool2d(4), nn.Tanh(),
        nn.Conv2d(6, 10, 3), nn.BatchNorm2d(10), nn.MaxPool2d(2), nn.Tanh(),
        nn.Conv2d(10, 10, 1), nn.BatchNorm2d(10), nn.MaxPool2d(2), nn.Tanh(),
        nn.Flatten(), nn.Linear(10, 15), nn.Tanh(), nn.Linear(15, 10)).double()
    nn.utils.vector_to_parameters(w, model.parameters())
    norms = [layer for layer in model if isinstance(layer, nn.BatchNorm2d)]
    for layer, part in zip(norms, r.split([12, 20, 20])):
        layer.running_mean, layer.running_var = (z.clone() for z in part.view(2, -1))
    batch = some_batch()
    F.cross_entropy(model(X), batch.y).backward()

    def ours(w):
        logits, next_r = net.forward(w, r, X, every(net), batch.mask)
        return common.cross_entropy(logits, batch), next_r

    g, next_r = common.grad(ours, has_aux=True)(w)
    torch.testing.assert_close(g, torch.cat([p.grad.flatten() for p in model.parameters()]))
    wanted = [z for layer in norms for z in (layer.running_mean, layer.running_var)]
    torch.testing.assert_close(next_r, torch.cat(wanted))
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(net(torch.cat([w, next_r]), X), model(X))


def test_images_that_fill_up_do_not_count():
    net = psi(norm="bn")
    w, r = start(net)
    filled = torch.cat([X[:4], 9 + X[4:]])
    mask = torch.tensor([1.0, 1, 1, 1, 0, 0]).double()
    few, few_r = net.forward(w, r, X[:4], every(net), torch.ones(4).double())
    many, many_r = net.forward(w, r, filled, every(net), mask)
    torch.testing.assert_close(many[:4], few)
    torch.testing.assert_close(many_r, few_r)
    assert not torch.equal(few_r, r)


# Pruned nodes


def sub(net, keep):
    """Which numbers of w and r a node with the groups `keep` has."""
    return ((group == -1) | torch.isin(group, torch.tensor(keep))
            for group in (net.group, net.group_r))


@pytest.mark.parametrize("norm", NORMS)
def test_a_pruned_network_is_the_rest_of_the_whole_one(norm):
    """The same logits of its classes, -1e9 for the others: a probability of 0. So its loss is over
    the logits that it has."""
    keep, (whole, part) = [1, 4], (psi(norm=norm, s=s) for s in (None, 2))
    w, r = start(whole)
    own_w, own_r = sub(whole, keep)
    assert part.d == own_w.sum() and len(part.group_r) == own_r.sum()
    mask = torch.ones(4).double()
    full, full_r = whole.forward(w, r, X[:4], every(whole), mask)
    logits, next_r = part.forward(w[own_w], r[own_r], X[:4], torch.tensor(keep), mask)
    mine = [2, 3, 8, 9]
    torch.testing.assert_close(logits[:, mine], full[:, mine])
    torch.testing.assert_close(next_r, full_r[own_r])
    assert (logits[:, [0, 1, 4, 5, 6, 7]] == -1e9).all()
    assert (logits.float().softmax(1)[:, [0, 5]] == 0).all()
    y = torch.tensor([2, 9, 8, 3])
    expected = torch.logsumexp(full[:, mine], 1) - full[range(4), y]
    batch = some_batch(X[:4], y)
    assert float(common.cross_entropy(logits, batch)) == pytest.approx(float(expected.mean()))
    # an image that fills up has label 0, which is not among its classes
    filled = batch._replace(y=torch.tensor([2, 9, 8, 0]),
                            mask=torch.tensor([1.0, 1, 1, 0]).double())
    mean = float(expected[:3].mean())
    assert float(common.cross_entropy(logits, filled)) == pytest.approx(mean)


def spy(monkeypatch, replace):
    """Replaces training by replace(own, S), which returns w and r; notes who is trained with
    what."""
    calls = []

    def train(self, update, S, t, own, shared):
        calls.append(SimpleNamespace(S=list(S), own=own))
        return replace(own, S)

    monkeypatch.setattr(common.Federation, "train", train)
    return calls


def test_groups_are_averaged_over_their_owners_and_nobody_else_changes_them(tmp_path, monkeypatch):
    """Node i returns w = i and r = 100 + i everywhere. Sizes differ: averages weigh by n_i."""

    def constant(own, S):
        i = torch.tensor(S)[:, None]
        return 0 * own[0] + i, 0 * own[1] + 100 + i

    calls = spy(monkeypatch, constant)
    argv = [*SMALL, "--split", "lognormal", "--rounds", "1", "--clients", "4", "--per-client", "3",
            "--norm", "bn"]
    record, state = run(psinet, argv, tmp_path)
    net, n = psi(norm="bn"), np.array(record["split"]["sizes"])
    # of the nodes; groups are {0, 1}, {2, 3}, ...
    classes, has = [{0, 1, 2}, {1, 2, 3}, {2, 3, 4}, {3, 4, 5}], [{0, 1}, {0, 1}, {1, 2}, {1, 2}]
    assert all({c // 2 for c in own} == groups for own, groups in zip(classes, has))
    assert len(set(n)) > 1 and [call.S for call in calls] == [[0, 1, 2, 3]]
    assert calls[0].own[2].tolist() == [[0, 1], [0, 1], [1, 2], [1, 2]]
    first_w, first_r = net.init(common.stream(0, "initialisation")), net.r_0
    for group, nodes in ((-1, [0, 1, 2, 3]), (0, [0, 1]), (1, [0, 1, 2, 3]), (2, [2, 3])):
        mean = np.average(nodes, weights=n[nodes])
        assert (net.group == group).any() and (net.group_r == group).any()
        np.testing.assert_allclose(state["w"][net.group == group], mean, rtol=1e-5)
        np.testing.assert_allclose(state["r"][net.group_r == group], 100 + mean, rtol=1e-5)
    for group in (3, 4):  # nobody's
        assert torch.equal(state["w"][net.group == group], first_w[net.group == group])
        assert torch.equal(state["r"][net.group_r == group], first_r[net.group_r == group])
    own_w, own_r = sub(net, [0, 1])
    sent = 4 * 4 * int(own_w.sum() + own_r.sum())
    assert record["bytes_up"] == record["bytes_down"] == sent
    assert record["rounds"][0]["macs"] == n.sum() * macs(psi(norm="bn", s=2))


def test_nodes_with_different_numbers_of_groups(tmp_path, monkeypatch):
    """They are trained apart; each gets the server's numbers of its own groups."""
    seen = []

    def keep(own, S):
        seen.extend((k, *(z[i] for z in own)) for i, k in enumerate(S))
        return own[0] + 1, own[1]

    spy(monkeypatch, keep)
    argv = [*SMALL, "--split", "lognormal", "--rounds", "1", "--clients", "10", "--per-client", "3",
            "--groups", "2"]
    _, state = run(psinet, argv, tmp_path)
    net = psi(groups=2)
    w = net.init(common.stream(0, "initialisation"))
    assert sorted(node[0] for node in seen) == list(range(10))
    assert {len(node[3]) for node in seen} == {1, 2}
    for k, own, r, groups in seen:
        assert groups.tolist() == sorted({(k + j) % 10 // 5 for j in range(3)})
        own_w, _ = sub(net, groups.tolist())
        assert torch.equal(own, w[own_w]) and torch.equal(r, net.r_0)
    torch.testing.assert_close(state["w"], w + 1, atol=1e-5, rtol=0)


def test_a_node_leaves_other_groups_alone(tmp_path):
    """Real training of one node with the classes 0 and 1, group 0 of 5: the groups 1 to 4 keep
    their bits."""
    argv = [*SMALL, "--split", "lognormal", "--clients", "1", "--rounds", "1", "--norm", "bn"]
    net = psi(norm="bn")
    w = net.init(common.stream(0, "initialisation"))
    for prune in (False, True):
        _, state = run(psinet, [*argv, *["--no-prune"] * (not prune)], tmp_path / str(prune))
        for group, before, after in ((net.group, w, state["w"]),
                                     (net.group_r, net.r_0, state["r"])):
            assert torch.equal(before[group > 0], after[group > 0]) is prune
            for changed in (0, -1):
                assert not torch.equal(before[group == changed], after[group == changed])


ORDER = torch.tensor([3, 0, 4, 1, 2])


def with_order(net, M):
    """The same network with its groups in another order: M(g) is row g."""
    net.M = net.constants["M"] = M
    return net


def permuted(norm):
    """A network, the same with its groups in ORDER, and the two maps of the latter's numbers: whose
    they are in the former."""
    net, other = psi(norm=norm), psi(norm=norm)
    names = [torch.where(group < 0, group, ORDER[group]) for group in (other.group, other.group_r)]
    return net, with_order(other, net.M[ORDER]), *names


def reorder(z, group, name):
    """What group g has goes where group g is called g by `name`."""
    out = torch.empty_like(z)
    for g in range(-1, 5):
        out[name == g] = z[group == g]
    return out


@pytest.mark.parametrize("norm", NORMS)
def test_the_order_of_a_nodes_groups_does_not_matter(norm):
    """A node with its groups, and M, in another order: its update, put back by the groups, is the
    one of the others' order."""
    net, other, name_w, name_r = permuted(norm)
    w, r = start(net)
    args = SimpleNamespace(momentum=0.9, weight_decay=0.01)
    epochs = [[some_batch(y=torch.tensor([2, 3, 9, 0, 2, 6]))]]
    eta = torch.tensor(0.3).double()
    one = psinet.local_training(net, args)(w, r, every(net), epochs, eta)
    w_, r_ = reorder(w, net.group, name_w), reorder(r, net.group_r, name_r)
    assert not torch.equal(w, w_)
    torch.testing.assert_close(other(torch.cat([w_, r_]), X), net(torch.cat([w, r]), X))
    two = psinet.local_training(other, args)(w_, r_, every(net), epochs, eta)
    torch.testing.assert_close(reorder(two[0], name_w, net.group), one[0])
    torch.testing.assert_close(reorder(two[1], name_r, net.group_r), one[1])


@pytest.mark.parametrize("norm", ["gn", "bn"])
def test_a_node_with_permuted_groups_leaves_the_global_model_as_it_would_be(norm):
    """Real training of three nodes, the second pruned and with its groups in another order; then
    the average by the map."""
    args = psinet.arguments([*TINY, "--clients", "3", "--split", "dirichlet-classes",
                             "--alpha", "5", "--batch-size", "40"])
    fed = common.Federation(args)
    fed.transform = lambda x, u=None: common.TRANSFORMS["scale"](fed.data)(x).double()
    fed.eta = lambda t: torch.tensor(0.05).double()
    net, other, name_w, name_r = permuted(norm)
    w, r = start(net)
    has = torch.ones(3, 5, dtype=torch.bool)
    has[1, [1, 4]] = False

    def updates(net, w, r, has):
        fed.net = net
        update = {s: psinet.local_training(with_order(psi(norm=norm, s=s), net.M), args)
                  for s in (3, 5)}
        w_i, r_i = psinet.local_updates(fed, update, has, w, r, np.arange(3), 0)
        return w_i, r_i, *net.masks_of(has)

    w_i, r_i, own_w, own_r = updates(net, w, r, has)
    back_w, back_r, back_own_w, back_own_r = updates(
        other, reorder(w, net.group, name_w), reorder(r, net.group_r, name_r), has[:, ORDER])
    n_i = fed.n.double()
    for whole, own, back, back_own, names, old in (
        (w_i, own_w, back_w, back_own_w, (name_w, net.group), w),
        (r_i, own_r, back_r, back_own_r, (name_r, net.group_r), r),
    ):
        mixed, mixed_own, naive = whole.clone(), own.clone(), whole.clone()
        mixed[1], naive[1] = reorder(back[1], *names), back[1]
        mixed_own[1] = reorder(back_own[1], *names)
        expected = psinet.aligned_average(fed, whole, own, n_i, old)
        found = psinet.aligned_average(fed, mixed, mixed_own, n_i, old)
        torch.testing.assert_close(found, expected)
        assert ((expected - old).abs() > 1e-6).any()
        assert torch.equal(whole[1][~own[1]], old[~own[1]])
        if len(names[0].unique()) > 1:  # with gn, all of r is shared
            off = psinet.aligned_average(fed, naive, mixed_own, n_i, old) - expected
            assert off.abs().max() > 0.01


# The federation


@pytest.mark.parametrize("model", ["tiny", "cnn"])
def test_without_groups_and_norm_it_is_fedavg_bit_for_bit(model, tmp_path):
    argv = [*QUICK, "--split", "dirichlet-classes", "--alpha", "1", "--model", model,
            "--transform", "scale", "--momentum", "0.9", "--weight-decay", "0.001",
            "--batch-size", "20", "--client-test", "0.2", "--fraction", "0.5"]
    a, w = run(fedavg, argv, tmp_path / "a")
    b, state = run(psinet, [*argv, "--groups", "0", "--norm", "none"], tmp_path / "b")
    assert len(set(a["split"]["sizes"])) > 1 and torch.equal(w["w"], state["w"])
    assert a["final"] == {part: b["final"][part] for part in ("global", "personal")}
    assert a["bytes_up"] == b["bytes_up"]


def test_with_all_owners_the_average_is_fedavgs():
    rng = np.random.default_rng(0)
    W, n = torch.from_numpy(rng.normal(size=(4, 9))), torch.tensor([5.0, 1, 2, 8])
    own, fed = torch.ones(4, 9, dtype=torch.bool), SimpleNamespace(sum=lambda x, n: n @ x)
    average = psinet.aligned_average(fed, W.float(), own, n, torch.zeros(9))
    expected = np.average(W, axis=0, weights=[5, 1, 2, 8])
    np.testing.assert_allclose(average, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("B", ["20", "60"])
@pytest.mark.parametrize("norm", NORMS)
def test_all_ways_of_training_agree(norm, B, monkeypatch):
    """Pruned nodes with other groups, of other sizes and, with B = 20, with other numbers of
    minibatches, in float64."""
    argv = [*TINY, "--split", "dirichlet-classes", "--alpha", "1", "--clients", "4",
            "--epochs", "1", "--batch-size", B]
    fed, S = common.Federation(psinet.arguments(argv)), np.array([0, 1, 3])
    fed.transform = lambda x, u=None: common.TRANSFORMS["scale"](fed.data)(x).double()
    sizes = [len(fed.split.train[i]) for i in S]
    steps = {-(-n // int(B)) for n in sizes}
    assert len(set(sizes)) == 3 and (len(steps) > 1) == (B == "20")
    net = fed.net = psi(norm=norm, s=3)
    w, r = start(net)
    keep = torch.tensor([[0, 1, 2], [2, 3, 4], [0, 2, 4]])
    update = psinet.local_training(net, SimpleNamespace(momentum=0.9, weight_decay=0.001))
    own, eta, ends = [w.expand(3, -1), r.expand(3, -1), keep], torch.tensor(0.01).double(), []
    for way in paths(fed, monkeypatch):
        ends.append(fed.train(update, S, 0, own=own, shared=[eta]))
        assert fed.used == ("graphs" if way == "together" and B == "20" else way)
    loop, *others = ends
    assert (loop[0] - w).norm() > 0.01
    for end in others:
        torch.testing.assert_close(end, loop, atol=1e-8, rtol=1e-8)


def test_multiplications_are_added_up_over_rounds_epochs_and_nodes(tmp_path, monkeypatch):
    """3 of 5 nodes of different sizes in a round, two epochs; the first round isn't evaluated."""
    spy(monkeypatch, lambda own, S: own[:2])
    argv = [*TINY, "--split", "dirichlet-classes", "--alpha", "5", "--fraction", "0.6",
            "--rounds", "3", "--epochs", "2", "--eval-every", "2", "--no-prune"]
    record, state = run(psinet, argv, tmp_path)
    fed, n = common.Federation(psinet.arguments(argv)), np.array(record["split"]["sizes"])
    work = np.cumsum([2 * n[fed.sample(t)].sum() * macs(psi()) for t in range(3)])
    rows = record["rounds"]
    assert len(set(n)) > 1 and ["macs" in row for row in rows] == [False, True, True]
    assert [row["macs"] for row in rows[1:]] == work[1:].tolist()
    assert record["final"]["macs"] == work[2]


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path):
    argv = [*TINY, "--rounds", "4", "--eval-every", "2", "--split", "dirichlet-classes",
            "--alpha", "3"]
    whole, a = run(psinet, argv, tmp_path / "whole")
    killed(psinet, argv, tmp_path / "cut", lambda t, _: t == 3)
    again, b = run(psinet, [*argv, "--resume"], tmp_path / "cut")
    assert torch.equal(a["w"], b["w"]) and torch.equal(a["r"], b["r"]) and len(b["r"]) == 12
    assert same(whole, again)


def test_evaluation_is_the_whole_model_on_running_statistics(tmp_path):
    """model.pt is its state dict, with running statistics."""
    argv = [*SMALL, "--rounds", "1", "--client-test", "0.2"]
    record, state = run(psinet, argv, tmp_path)
    fed, net = common.Federation(psinet.arguments(argv)), psi()
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    module = net.build().eval()
    module.load_state_dict(saved)
    running = saved["conv1-norm.running_mean"], saved["conv1-norm.running_var"]
    assert torch.equal(torch.cat(running), state["r"]) and not torch.equal(state["r"], net.r_0)
    with torch.no_grad():
        logits, _ = module(fed.transform(fed.images[fed.data.n_train :]))
        own, _ = module(fed.transform(fed.images[fed.split.test[1]]))
    right = (own.argmax(1) == fed.labels[fed.split.test[1]]).float()
    labels, final = fed.labels[fed.data.n_train :], record["final"]
    top1 = float((logits.argmax(1) == labels).float().mean())
    assert final["global"]["top1"] == pytest.approx(top1, abs=1e-6)
    loss = float(F.cross_entropy(logits, labels))
    assert final["global"]["loss"] == pytest.approx(loss, abs=1e-4)
    assert final["personal"]["per_client"][1] == pytest.approx(float(right.mean()))
    assert (own > -1e6).all()


def test_what_is_printed(tmp_path, capsys):
    run(psinet, [*SMALL, "--rounds", "1"], tmp_path)
    text = capsys.readouterr().out
    assert "M       0: 0 1, 1: 2 3, 2: 4 5, 3: 6 7, 4: 8 9\n" in text
    assert re.search(r"nodes   \d/[\d.]+/2 of 5 groups", text)
    assert "tiny in 5 groups from conv2 on" in text
    rows = [line.split() for line in text[text.index("groups  layer") :].splitlines()[1:6]]
    assert rows == [["conv1", "shared", "3", "6", "BatchNorm", "180"],  # 6*27+6+12
                    ["conv2", "5", "6", "2", "GroupNorm", "570"],
                    ["conv3", "5", "2", "2", "GroupNorm", "50"],
                    ["fc1", "5", "2", "3", "45"], ["fc2", "5", "3", "2", "40"]]


def test_the_table_in_the_file_is_what_a_run_prints():
    """The table of the default network; a line's end says what it stands for."""
    net = psi("vgg9", 10, None)
    lines = pathlib.Path(psinet.__file__).read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if re.match(r"#     layer +groups", line))
    rows = list(psinet.table(net))
    printed = [[str(cell) for cell in (*row[:5], f"{row[5]:,}") if cell != ""] for row in rows]
    written = [re.split(" {3,}l\\.", line)[0][1:].split() for line in lines[first + 1 : first + 10]]
    assert written == printed and sum(row[5] for row in rows) == net.d == 848_386


@pytest.mark.parametrize("more, counts", [([], [1, 2]), (["--no-prune"], [5]),
                                          (["--groups", "0"], [1]), (["--groups", "1"], [1])])
def test_nodes_that_lack_a_groups_classes_do_without_it_unless_told_otherwise(more, counts):
    """Two of ten classes each, five groups of two classes; without groups, and in one, there is
    nothing to prune."""
    args = psinet.arguments([*SMALL, *more])
    assert args.prune is (more in ([], ["--groups", "1"]))
    fed = common.Federation(args, lambda *images: psinet.GroupedNet(args, *images))
    has = psinet.groups_of_nodes(fed, args)
    for i, index in enumerate(fed.split.train):
        classes = set(fed.labels[index].tolist())
        groups = {c // 2 for c in classes} if not more else set(range(counts[0]))
        assert len(classes) == 2 and set(has[i].nonzero()[:, 0].tolist()) == groups
    assert set(has.sum(1).tolist()) <= set(counts)


# Class preferences and total variance: papers/psinet_depth.py


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def network(model, monkeypatch, *args, **named):
    """A network of psinet.py, in float64, as papers/psinet_depth.py sees it."""
    def build(channels, classes):
        layers = nn.Sequential(OrderedDict(model(channels, classes)))
        layers.start = fl.models.pytorch_default
        return layers

    monkeypatch.setitem(common.MODELS, "model", build)
    net = psi("model", *args, **named)
    w, r = start(net, 4)
    module = net.build().double().eval()
    module.load_state_dict(net.state_dict(torch.cat([w, r])))
    return module


def test_preferences_and_total_variance_by_hand(monkeypatch):
    """6 pixels - 4 neurons - 3 classes with a ReLU: the gradient of Z_c by an activation is its
    weight."""
    def mlp(channels, classes):
        return dict(flatten=nn.Flatten(), one=nn.Linear(6, 4), relu=nn.ReLU(),
                    two=nn.Linear(4, classes))

    module = network(mlp, monkeypatch, 0, None, "none", (1, 2, 3), 3)
    rng = np.random.default_rng(3)
    images, labels = rng.random((24, 6)), np.arange(24) % 3
    z = flat(module).numpy()
    U, u, V = z[:24].reshape(4, 6), z[24:28], z[28:40].reshape(3, 4)
    A = np.maximum(images @ U.T + u, 0)
    P = np.array([[sum(A[n, i] * V[c, i] for n in range(24) if labels[n] == c) for c in range(3)]
                  for i in range(4)])
    of_images = (lambda x: x.view(-1, 1, 2, 3)), torch.from_numpy(images), torch.from_numpy(labels)
    found = psinet_depth.preferences(module, *of_images, 3)
    assert list(found) == ["one"]
    np.testing.assert_allclose(found["one"], P)
    few = psinet_depth.preferences(module, *of_images, 3, number=2)["one"]
    np.testing.assert_allclose(few[1, 2], (A[2, 1] + A[5, 1]) * V[2, 1])

    # (.25, .75), (.5, .5), (-.5, .5): mean (1/12, 7/12)
    tv = psinet_depth.total_variance(torch.tensor([[1.0, 3.0], [2.0, 2.0], [-1.0, 1.0]]))
    lengths = np.hypot(2 / 12, 2 / 12), np.hypot(5 / 12, 1 / 12), np.hypot(7 / 12, 1 / 12)
    assert float(tv) == pytest.approx(np.mean(lengths), abs=1e-6)


def test_preferences_and_total_variance_with_groups_and_batchnorm_by_hand(monkeypatch):
    """2 channels - 4 - 4 in two groups - 4 classes in two groups, 6 pixels; the chain rule in
    numpy."""
    def two_convolutions(channels, classes):
        return dict(one=nn.Conv2d(channels, 4, 1), relu1=nn.ReLU(), two=nn.Conv2d(4, 4, 1),
                    relu2=nn.ReLU(), flatten=nn.Flatten(), three=nn.Linear(24, classes))

    module = network(two_convolutions, monkeypatch, 2, "two", "bn", (2, 2, 3), 4)
    rng = np.random.default_rng(3)
    images, labels = rng.random((16, 2, 2, 3)), np.arange(16) % 4
    found = psinet_depth.preferences(module, lambda x: x, torch.from_numpy(images),
                                     torch.from_numpy(labels), 4)
    part = {name: z.numpy() for name, z in module.state_dict().items()}
    U, V = part["one.weight"][:, :, 0, 0], part["two.weight"][:, :, 0, 0]
    W = part["three.weight"].reshape(4, 2, 6)

    def normalised(name, y):
        norm = name + "-norm."
        slope = part[norm + "weight"] / np.sqrt(part[norm + "running_var"] + 1e-5)
        y = slope[:, None] * (y - part[norm + "running_mean"][:, None])
        return slope[:, None], y + part[norm + "bias"][:, None]

    P = {"one": np.zeros((4, 4)), "two": np.zeros((4, 4))}
    for x, c in zip(images.reshape(16, 2, 6), labels):
        _, y = normalised("one", U @ x + part["one.bias"][:, None])
        A = np.maximum(y, 0)  # [4, 6]
        slope, y = normalised("two", V @ A + part["two.bias"][:, None])
        B = np.maximum(y, 0)
        dB = np.zeros((4, 6))
        dB[2 * (c // 2) : 2 * (c // 2) + 2] = W[c]  # class c's group alone
        dA = V.T @ (dB * (B > 0) * slope)
        P["two"][:, c] += (B * dB).sum(1)
        P["one"][:, c] += (A * dA).sum(1)
    assert list(found) == ["one", "two"] and V.shape == (4, 4)
    for name, expected in P.items():
        np.testing.assert_allclose(found[name], expected, atol=1e-12)
        unit = expected / np.abs(expected).sum(1, keepdims=True)
        tv = np.mean([np.sqrt(((row - unit.mean(0)) ** 2).sum()) for row in unit])
        assert float(psinet_depth.total_variance(found[name])) == pytest.approx(tv) and tv > 0.1
    assert (P["two"] == 0).sum() == 8 and (P["one"] != 0).all()


def test_preferences_of_channels_sum_over_their_pixels(monkeypatch):
    """tiny without groups: by a numerical derivative along each channel's own activations (Z is
    scaled along A)."""
    def layers(channels, classes):
        return tiny(channels, classes).named_children()

    module = network(layers, monkeypatch, 0, None, "none", classes=6)
    found = psinet_depth.preferences(module, lambda x: x, X, torch.arange(6), 6)
    shapes = {name: p.shape for name, p in found.items()}
    assert shapes == {"conv1": (6, 6), "conv2": (10, 6), "conv3": (10, 6), "fc1": (15, 6)}
    part = dict(module.named_parameters())

    def logits(scale):  # of conv1's channels
        x = F.max_pool2d(F.conv2d(X, part["conv1.weight"], part["conv1.bias"]), 4)
        x = torch.tanh(x) * scale[:, None, None]
        for name in ("conv2", "conv3"):
            x = F.conv2d(x, part[name + ".weight"], part[name + ".bias"])
            x = torch.tanh(F.max_pool2d(x, 2))
        x = torch.tanh(x.flatten(1) @ part["fc1.weight"].T + part["fc1.bias"])
        return x @ part["fc2.weight"].T + part["fc2.bias"]

    h = 1e-6 * torch.eye(6).double()
    for i in range(6):
        slope = (logits(1 + h[i]) - logits(1 - h[i])).detach() / 2e-6
        np.testing.assert_allclose(found["conv1"][i], slope.diagonal(), atol=1e-7)


def test_the_depth_that_tv_suggests(tmp_path, capsys, monkeypatch):
    """The middle of .2 and .9 is .55, which conv3 is the first to reach."""
    fixed = iter([0.2, 0.3, 0.9, 0.7])
    monkeypatch.setattr(psinet_depth, "total_variance", lambda P: next(fixed))
    argv = [*SMALL, "--groups", "0", "--rounds", "1", "--norm", "bn"]
    run(psinet, argv, tmp_path / "run")
    tv, depth = psinet_depth.main(tmp_path / "run")
    assert tv == {"conv1": 0.2, "conv2": 0.3, "conv3": 0.9, "fc1": 0.7} and depth == "conv3"
    assert "suggests --depth conv3" in capsys.readouterr().out
    assert (tmp_path / "run" / "tv.png").stat().st_size > 5000


def test_the_depth_needs_a_finished_run_without_groups(tmp_path, capsys):
    refused(capsys, "there is no record", psinet_depth.main, tmp_path)
    run(psinet, [*SMALL, "--rounds", "1"], tmp_path)
    refused(capsys, "use psinet.py --groups 0", psinet_depth.main, tmp_path)


# The defaults: facts of the paper's experiments


def test_the_settings_are_the_papers():
    """Facts A2.5 and A2.6: 10x4 with VGG-9 for 100 rounds, 10x50 with VGG-16 for 200; the recipe of
    B13."""
    for dataset, own in (("cifar10", dict(model="vgg9", per_client=4, rounds=100)),
                         ("cifar100", dict(model="vgg16", per_client=50, rounds=200))):
        wanted = dict(split="classes", clients=10, groups=10, norm="gn", fraction=1.0, epochs=1,
                      lr=0.01, batch_size=64, momentum=0.9, weight_decay=1e-4, **own)
        assert wanted.items() <= vars(psinet.arguments(["--dataset", dataset])).items()
    assert psinet.DEPTH["vgg16"] == "conv3-2"


@pytest.mark.parametrize("argv, words", [
    (["--groups", "4"], "divisor of 10"), (["--depth", "conv9"], "it has conv1, conv2"),
    (["--groups", "-1"], "at least 0"), (["--model", "cifarnet"], "give --depth LAYER"),
    (["--model", "tfcnn", "--depth", "fc3"], "it has lrn1, a LocalResponseNorm"),
    (["--model", "resnet18", "--depth", "layer3"], "can't be cut into groups"),
    (["--model", "tfcnn", "--groups", "0"], "can't be cut into groups"),
])
def test_what_makes_no_sense_is_refused(argv, words, tmp_path, capsys):
    if "--model" in argv:
        argv = ["--dataset", "shapes", "--device", "cpu", *argv]
    else:
        argv = [*SMALL, *argv]
    refused(capsys, words, psinet.main, [*argv, "--out", str(tmp_path)])


@pytest.mark.parametrize("file, words", [
    ("nn.Sequential(nn.Flatten(), nn.Linear(3072, 10), nn.Dropout())", "a Dropout"),
    ("nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.Flatten(), nn.Linear(5400, 10))", "a Conv2d"),
    ("nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)))", "a Sequential"),
    ("Twice(nn.Flatten(), nn.Linear(3072, 10))", "can't be cut into groups"),
])
def test_other_networks_that_are_no_chain_are_refused(file, words, tmp_path, capsys):
    """With dropout, with groups of its own, with layers inside of layers, with a forward of its
    own."""
    twice = "class Twice(nn.Sequential):\n    def forward(self, x): return super().forward(x) * 2\n"
    (tmp_path / "mine.py").write_text(f"from torch import nn\n{twice}\nmodel = {file}\n")
    argv = [*SMALL, "--model", f"{tmp_path}/mine.py:model", "--depth", "1", "--no-dropout"]
    refused(capsys, words, psinet.main, [*argv, "--out", str(tmp_path / "out")])


def test_the_experiment_on_the_softmax_is_fedavg_but_for_the_softmax(tmp_path):
    """If nodes have all classes, it ends with the bits of --groups 0 --norm gn; else not. Of three
    images of classes 2, 0, 2 a node has two classes."""
    argv = ["--dataset", "shapes", "--limit", "200", "--rounds", "1", "--clients", "2", "--device",
            "cpu", "--per-client"]
    for classes in (10, 5):
        out = tmp_path / str(classes)
        _, want = run(psinet, [*argv, str(classes), "--groups", "0", "--norm", "gn"], out / "a")
        _, found = run(psinet_softmax, [*argv, str(classes)], out / "b")
        assert torch.equal(want["w"], found["w"]) == (classes == 10)
    fed = SimpleNamespace(data=SimpleNamespace(classes=4), device="cpu",
                          labels=torch.tensor([2, 0, 2, 3]),
                          split=SimpleNamespace(train=[np.array([0, 1, 2]), np.array([3])]))
    own = psinet_softmax.own_classes(fed)
    assert own.tolist() == [[True, False, True, False], [False, False, False, True]]


def test_numbers_of_the_page():
    """How large VGG-9 is in ten groups, without groups, and with four of them."""
    page = (pathlib.Path(psinet.__file__).parent / "docs" / "psinet.md").read_text()
    text, node = " ".join(page.split()), psi("vgg9", 10, None, s=4)
    whole, plain = psi("vgg9", 10, None).d, psi("vgg9", 0, None).d
    assert f"VGG-9 in ten groups has {whole:,} weights (without groups {plain:,})" in text
    assert f"has {node.d:,} weights and {len(node.group_r)} running statistics" in text
    assert len(page.split()) <= 2500
