import pathlib
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import grad

import common
import fedavg
import psinet
from conftest import QUICK, federation, killed, paths, refused, run, same
from tables import psinet_softmax

# all nodes take part
TINY = [*QUICK, "--clients", "5", "--fraction", "1", "--model", "tiny", "--transform", "scale", "--momentum", "0.9", "--lr", "0.05",
        "--groups", "5", "--depth", "conv2"]
SMALL = [*TINY, "--split", "classes", "--per-client", "2"]


def tiny(m, x, classes):
    """Three convolutions and two fully connected layers; small, so that the tests are quick, and without dead units."""
    x = torch.tanh(F.max_pool2d(m.conv("conv1", x, 6, 3), 4))
    x = torch.tanh(F.max_pool2d(m.conv("conv2", x, 10, 3), 2))
    x = torch.tanh(F.max_pool2d(m.conv("conv3", x, 10, 1), 2))
    x = torch.tanh(m.linear("fc1", x.flatten(1), 15))
    return m.linear("fc2", x, classes)


@pytest.fixture(autouse=True)
def with_tiny(monkeypatch):
    monkeypatch.setitem(common.MODELS, "tiny", tiny)


def psi(model="tiny", groups=5, depth="conv2", norm="gn", enter="all", shape=(3, 32, 32), classes=10, **more):
    args = SimpleNamespace(model=model, groups=groups, depth=depth, norm=norm, enter=enter)
    return psinet.PsiNet(args, shape, classes, **more)


def every(net):
    """G_i of a network with all of its groups."""
    return torch.arange(net.s)


def macs(net, shape=(3, 32, 32)):
    """Multiplications for one image."""
    fed = SimpleNamespace(images=torch.zeros(1, *shape), transform=lambda x: x)
    return float(psinet.multiplications(fed, {net.s: (net, None)}, torch.ones(1, net.s, dtype=torch.bool)))


def start(net, seed=0):
    """Weights and running statistics, all different from those that training starts with."""
    rng = np.random.default_rng(seed)
    w = net.init(rng).double() + 0.05 * torch.from_numpy(rng.normal(size=net.d))
    return w, net.r_0.double() * 1.5 + 0.1 * torch.from_numpy(rng.random(len(net.group_r)))


X = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(1)).double()
ALL = ["none", "bn", "gn"]


def some_batch(x=X, y=None):
    return common.Batch(x, torch.arange(len(x)) if y is None else y, torch.ones(len(x)).double(), torch.zeros(0))


# The structure


@pytest.mark.parametrize("model, groups, norm", [
    ("vgg9", 1, "none"), ("vgg16", 1, "none"), ("vgg9", 0, "none"), ("mobilenet", 0, "gn")])
def test_one_group_without_norm_and_no_groups_are_the_plain_network(model, groups, norm):
    """MobileNet has a norm of its own: without groups and with GroupNorm it is the plain one."""
    net, plain = psi(model, groups, None, norm), common.Net(model, (3, 32, 32), 10)
    assert net.tensors == plain.tensors and not len(net.group_r)
    w, x = plain.init(np.random.default_rng(0)), X[:2].float()
    assert torch.equal(w, net.init(np.random.default_rng(0)))
    torch.testing.assert_close(net(w, x), plain(w, x), atol=1e-5, rtol=1e-5)


def test_parameters_by_hand():
    """Ten groups; widths are rounded up to multiples of 10. Weights and biases, a scale and a shift per normed channel."""
    lower = sum(9 * a * b + b for a, b in ((3, 32), (32, 64), (64, 128), (128, 128), (128, 256)))
    upper = (9 * 256 * 260 + 260) + (260 * 16 // 10 * 520 + 520) + (52 * 520 + 520) + (52 * 10 + 10)  # all of 256 channels in
    channels = 32 + 64 + 128 + 128 + 256  # of BatchNorm
    assert psi("vgg9", 10, "conv6", "none").d == lower + upper == 1_380_230
    net = psi("vgg9", 10, "conv6", "gn")
    assert net.d == lower + upper + 2 * (channels + 260) and len(net.group_r) == 2 * channels
    assert len(psi("vgg9", 10, "conv6", "bn").group_r) == 2 * (channels + 260)
    assert psi("vgg9", 10, "conv6", "none", "slice").d == lower + upper - 9 * 256 * 260 + 9 * 26 * 260
    # the default: conv5 has groups of outputs, conv6 is the first with groups of inputs too
    lower -= 9 * 128 * 256 + 256
    upper += (9 * 128 * 260 + 260) + (9 * 26 * 260 + 260) - (9 * 256 * 260 + 260)
    assert psi("vgg9", 10, None, "none").d == lower + upper == 846_642

    lower = sum(9 * a * b + b for a, b in ((3, 64), (64, 64), (64, 128), (128, 128), (128, 256)))
    upper = 9 * 256 * 260 + 260 + 9 * 26 * 260 + 260 + 9 * 26 * 520 + 520 + 5 * (9 * 52 * 520 + 520)
    upper += 2 * (52 * 520 + 520) + 52 * 100 + 100  # in images of 32x32 one pixel is left
    norms = 64 + 64 + 128 + 128 + 256 + 2 * 260 + 6 * 520
    assert psi("vgg16", 10, None, "gn", classes=100).d == lower + upper + 2 * norms

    widths = [32, 64, 128, 128, 256, 256, *[512] * 6, 1024, 1024]
    lower = 27 * 32 + sum(9 * a + a * b for a, b in zip(widths[:5], widths[1:6])) + 9 * 256  # block6.depthwise is still shared
    wide = [520] * 6 + [1030, 1030]
    upper = 256 * 520 + sum(9 * a + a // 10 * b for a, b in zip(wide, wide[1:])) + 103 * 10 + 10
    norms = 32 + sum(widths[:5]) + sum(widths[1:6]) + 256 + 520 + sum(a + b for a, b in zip(wide, wide[1:]))
    assert psi("mobilenet", 10, None, "gn").d == lower + upper + 2 * norms


def test_multiplications_by_hand():
    whole = 30 * 30 * 27 * 6 + 5 * 5 * 54 * 10 + 2 * 2 * 2 * 10 + 2 * 15 + 3 * 10
    assert macs(psi()) == whole
    assert macs(psi(s=2)) == 30 * 30 * 27 * 6 + 5 * 5 * 54 * 4 + 2 * 2 * 2 * 4 + 2 * 6 + 3 * 4  # 2 of the 5 groups


def test_a_pruned_network_s_parameters_and_multiplications_by_hand():
    """2 of 5 groups of tiny; 4 of 10 groups of VGG-9: 104 of 260 channels, 208 of 520 neurons, 4 of 10 logits."""
    tiny_s = (27 * 6 + 6 + 12) + (54 * 4 + 4 + 8) + (2 * 4 + 4 + 8) + (2 * 6 + 6) + (3 * 4 + 4)  # with norms
    assert psi(s=2).d == tiny_s and len(psi(s=2).group_r) == 12
    lower = ((3, 32, 32), (32, 64, 32), (64, 128, 16), (128, 128, 16))  # channels in and out, pixels
    upper = ((128, 104, 8), (26, 104, 8))  # conv5 sees all channels, conv6 those of its group
    full = ((26 * 16, 208), (52, 208), (52, 4))
    net = psi("vgg9", 10, None, "gn", s=4)
    assert net.d == sum(9 * a * b + 3 * b for a, b, _ in lower + upper) + sum(a * b + b for a, b in full)
    assert len(net.group_r) == 2 * (32 + 64 + 128 + 128)
    assert macs(net) == sum(9 * a * b * size**2 for a, b, size in lower + upper) + sum(a * b for a, b in full)
    widths = [32, 64, 128, 128, 256, 256, *[208] * 6, 412, 412]  # MobileNet: 4 of 10 groups of 520 and 1030 from block6 on
    d = 27 * 32 + 9 * 256 + 256 * 208 + sum(9 * a + a * b for a, b in zip(widths[:5], widths[1:6]))
    d += sum(9 * a + a // 4 * b for a, b in zip(widths[6:], widths[7:])) + 103 * 4 + 4
    assert psi("mobilenet", 10, None, "gn", s=4).d == d + 2 * (32 + sum(a + b for a, b in zip(widths, widths[1:])))


@pytest.mark.parametrize("enter", ["all", "slice"])
def test_the_network_against_an_explicit_loop_over_groups(enter):
    """Evaluation with running statistics: BatchNorm behind conv1; then each group alone, normed by itself."""
    net = psi(enter=enter)
    w, b = start(net)
    part = {name: w[s].view(shape) for name, s, shape in net.tensors}
    mean, var = b[:6], b[6:]

    def normalised(x, mean, var, name, own):
        x = (x - mean) / (var + 1e-5).sqrt()
        return x * part[name + ".weight"][own, None, None] + part[name + ".bias"][own, None, None]

    x = F.conv2d(X, part["conv1.weight"], part["conv1.bias"])
    x = torch.tanh(F.max_pool2d(normalised(x, mean[:, None, None], var[:, None, None], "conv1-norm", slice(6)), 4))
    logits = torch.zeros(6, 10).double()
    for g in range(5):
        two, three = slice(2 * g, 2 * g + 2), slice(3 * g, 3 * g + 3)
        y = x if enter == "all" else x[:, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)][g]]  # starts: 6g/5, rounded down
        for name, pool in (("conv2", 2), ("conv3", 2)):
            y = F.conv2d(y, part[name + ".weight"][two], part[name + ".bias"][two])
            m, v = y.mean((1, 2, 3), keepdim=True), y.var((1, 2, 3), correction=0, keepdim=True)
            y = torch.tanh(F.max_pool2d(normalised(y, m, v, name + "-norm", two), pool))
        y = torch.tanh(y.flatten(1) @ part["fc1.weight"][three].T + part["fc1.bias"][three])
        logits[:, two] = y @ part["fc2.weight"][two].T + part["fc2.bias"][two]
    torch.testing.assert_close(net(torch.cat([w, b]), X), logits)


@pytest.mark.parametrize("norm", ALL)
@pytest.mark.parametrize("model, enter", [("tiny", "all"), ("tiny", "slice"), ("mobilenet", "all")])
def test_a_logit_has_no_gradient_in_another_group(model, enter, norm):
    net = psi(model, 5, "conv2" if model == "tiny" else "block12", norm, enter)
    w, b = start(net)
    for mask in (None, torch.ones(2).double()):
        for c in (0, 7):
            g = grad(lambda w, c=c, mask=mask: net.forward(w, b, X[:2], every(net), mask)[0][:, c].sum())(w)
            assert not g[(net.group != c // 2) & (net.group >= 0)].any()
            assert g[net.group == c // 2].count_nonzero() > 20 and g[net.group == -1].count_nonzero() > 20


def test_groups_have_their_own_initial_scale():
    """vgg16 asks for He's normal over the fan out: 2 / (9 * 512) in the plain network, a tenth of the fan in a group."""
    net = psi("vgg16", 10, None, "gn")
    w = net.init(np.random.default_rng(0))
    std = {name: float(w[s].std()) for name, s, _ in net.tensors if name.endswith(".weight") and "norm" not in name}
    assert std["conv2-1.weight"] == pytest.approx((2 / (9 * 128)) ** 0.5, rel=0.05)
    assert std["conv3-2.weight"] == pytest.approx((2 / (9 * 256)) ** 0.5, rel=0.05)  # sees all
    assert std["conv4-2.weight"] == pytest.approx((20 / (9 * 512)) ** 0.5, rel=0.05)


# BatchNorm and its running statistics


def test_batchnorm_and_its_running_statistics_are_pytorchs():
    net = psi(groups=0, norm="bn")
    w, b = start(net)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 6, 3), torch.nn.BatchNorm2d(6), torch.nn.MaxPool2d(4), torch.nn.Tanh(), torch.nn.Conv2d(6, 10, 3),
        torch.nn.BatchNorm2d(10), torch.nn.MaxPool2d(2), torch.nn.Tanh(), torch.nn.Conv2d(10, 10, 1), torch.nn.BatchNorm2d(10),
        torch.nn.MaxPool2d(2), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(10, 15), torch.nn.Tanh(),
        torch.nn.Linear(15, 10),
    ).double()
    torch.nn.utils.vector_to_parameters(w, model.parameters())
    norms = [layer for layer in model if isinstance(layer, torch.nn.BatchNorm2d)]
    for layer, part in zip(norms, b.split([12, 20, 20])):
        layer.running_mean, layer.running_var = (z.clone() for z in part.view(2, -1))
    batch = some_batch()
    loss = F.cross_entropy(model(X), batch.y)
    loss.backward()

    def ours(w):
        logits, new_b = net.forward(w, b, X, every(net), batch.mask)
        return common.cross_entropy(logits, batch), new_b

    g, new_b = grad(ours, has_aux=True)(w)
    torch.testing.assert_close(g, torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(new_b, torch.cat([z for layer in norms for z in (layer.running_mean, layer.running_var)]))
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(net(torch.cat([w, new_b]), X), model(X))


def test_images_that_fill_up_do_not_count():
    net = psi(norm="bn")
    w, b = start(net)
    filled, mask = torch.cat([X[:4], 9 + X[4:]]), torch.tensor([1.0, 1, 1, 1, 0, 0]).double()
    few, few_b = net.forward(w, b, X[:4], every(net), torch.ones(4).double())
    many, many_b = net.forward(w, b, filled, every(net), mask)
    torch.testing.assert_close(many[:4], few)
    torch.testing.assert_close(many_b, few_b)
    assert not torch.equal(few_b, b)


# Pruned nodes


def sub(net, keep):
    """Which numbers of w and b a node with the groups `keep` has."""
    return ((group == -1) | torch.isin(group, torch.tensor(keep)) for group in (net.group, net.group_r))


@pytest.mark.parametrize("model, enter, norm", [
    *(("tiny", enter, norm) for enter in ("all", "slice") for norm in ALL), ("mobilenet", "all", "gn"), ("mobilenet", "all", "bn")])
def test_a_pruned_network_is_the_rest_of_the_whole_one(model, enter, norm):
    """The same logits of its classes, -1e9 for the others: a probability of 0. So its loss is over the logits that it has."""
    depth, keep = "conv2" if model == "tiny" else "block12", [1, 4]
    whole, part = (psi(model, 5, depth, norm, enter, s=s) for s in (None, 2))
    w, b = start(whole)
    own_w, own_b = sub(whole, keep)
    assert part.d == own_w.sum() and len(part.group_r) == own_b.sum()
    mask = torch.ones(4).double()
    full, full_b = whole.forward(w, b, X[:4], every(whole), mask)
    logits, new_b = part.forward(w[own_w], b[own_b], X[:4], torch.tensor(keep), mask)
    mine = [2, 3, 8, 9]
    torch.testing.assert_close(logits[:, mine], full[:, mine])
    torch.testing.assert_close(new_b, full_b[own_b])
    assert (logits[:, [0, 1, 4, 5, 6, 7]] == -1e9).all() and (logits.float().softmax(1)[:, [0, 5]] == 0).all()
    y = torch.tensor([2, 9, 8, 3])
    expected = torch.logsumexp(full[:, mine], 1) - full[range(4), y]
    batch = some_batch(X[:4], y)
    assert float(common.cross_entropy(logits, batch)) == pytest.approx(float(expected.mean()))
    # 0 isn't among its classes
    filled = batch._replace(y=torch.tensor([2, 9, 8, 0]), mask=torch.tensor([1.0, 1, 1, 0]).double())
    assert float(common.cross_entropy(logits, filled)) == pytest.approx(float(expected[:3].mean()))


def spy(monkeypatch, replace):
    """Replaces training; notes who is trained with what."""
    calls = []

    def train(self, step, start, S, t, eta, net):
        calls.append(SimpleNamespace(S=list(S), start=start))
        return replace(start, S)

    monkeypatch.setattr(common.Federation, "train", train)
    return calls


def test_groups_are_averaged_over_their_owners_and_nobody_else_changes_them(tmp_path, monkeypatch):
    """Node i returns w = i and b = 100 + i everywhere. Sizes differ: averages weigh by n_i."""

    def constant(start, S):
        i = torch.tensor(S)[:, None]
        return 0 * start[0] + i, 0 * start[1] + 100 + i, *start[2:]

    calls = spy(monkeypatch, constant)
    argv = [*SMALL, "--split", "lognormal", "--rounds", "1", "--clients", "4", "--per-client", "3", "--norm", "bn"]
    record, state = run(psinet, argv, tmp_path)
    net, n = psi(norm="bn"), np.array(record["split"]["sizes"])
    classes = [{0, 1, 2}, {1, 2, 3}, {2, 3, 4}, {3, 4, 5}]  # of the nodes; groups are {0, 1}, {2, 3}, ...
    has = [{0, 1}, {0, 1}, {1, 2}, {1, 2}]
    assert all({c // 2 for c in own} == groups for own, groups in zip(classes, has)) and len(set(n)) > 1
    assert [call.S for call in calls] == [[0, 1, 2, 3]] and calls[0].start[3].tolist() == [[0, 1], [0, 1], [1, 2], [1, 2]]
    first_w, first_b = net.init(common.stream(0, "initialisation")), net.r_0
    for group, nodes in ((-1, [0, 1, 2, 3]), (0, [0, 1]), (1, [0, 1, 2, 3]), (2, [2, 3])):
        mean = np.average(nodes, weights=n[nodes])
        assert (net.group == group).any() and (net.group_r == group).any()
        np.testing.assert_allclose(state["w"][net.group == group], mean, rtol=1e-5)
        np.testing.assert_allclose(state["r"][net.group_r == group], 100 + mean, rtol=1e-5)
    for group in (3, 4):  # nobody's
        assert torch.equal(state["w"][net.group == group], first_w[net.group == group])
        assert torch.equal(state["r"][net.group_r == group], first_b[net.group_r == group])
    own_w, own_b = sub(net, [0, 1])
    assert record["bytes_up"] == record["bytes_down"] == 4 * 4 * int(own_w.sum() + own_b.sum())
    assert record["rounds"][0]["macs"] == n.sum() * macs(psi(norm="bn", s=2))


def test_nodes_with_different_numbers_of_groups(tmp_path, monkeypatch):
    """They are trained apart; each gets the server's numbers of its own groups."""
    seen = []

    def keep(start, S):
        seen.extend((k, *(z[i] for z in start)) for i, k in enumerate(S))
        return (start[0] + 1, *start[1:])

    spy(monkeypatch, keep)
    argv = [*SMALL, "--split", "lognormal", "--rounds", "1", "--clients", "10", "--per-client", "3", "--groups", "2"]
    _, state = run(psinet, argv, tmp_path)
    net = psi(groups=2)
    w = net.init(common.stream(0, "initialisation"))
    assert sorted(node[0] for node in seen) == list(range(10)) and {len(node[4]) for node in seen} == {1, 2}
    for k, own, b, u, groups in seen:
        assert groups.tolist() == sorted({(k + j) % 10 // 5 for j in range(3)})
        own_w, _ = sub(net, groups.tolist())
        assert torch.equal(own, w[own_w]) and torch.equal(b, net.r_0) and not u.any()
    torch.testing.assert_close(state["w"], w + 1, atol=1e-5, rtol=0)


def test_a_node_leaves_other_groups_alone(tmp_path):
    """Real training of one node with the classes 0 and 1, group 0 of 5: the groups 1 to 4 keep their bits."""
    argv = [*SMALL, "--split", "lognormal", "--clients", "1", "--rounds", "1", "--norm", "bn"]
    net = psi(norm="bn")
    w = net.init(common.stream(0, "initialisation"))
    for prune in (False, True):
        _, state = run(psinet, [*argv, *["--no-prune"] * (not prune)], tmp_path / str(prune))
        for group, before, after in ((net.group, w, state["w"]), (net.group_r, net.r_0, state["r"])):
            assert torch.equal(before[group > 0], after[group > 0]) is prune
            for changed in (0, -1):
                assert not torch.equal(before[group == changed], after[group == changed])


ORDER = torch.tensor([3, 0, 4, 1, 2])


def permuted(norm):
    """A network, the same with its groups in ORDER, and the two maps of the latter's numbers: whose they are in the former."""
    net = psi(norm=norm)
    other = psi(norm=norm)
    other.M = net.M[ORDER]
    return net, other, *(torch.where(group < 0, group, ORDER[group]) for group in (other.group, other.group_r))


def reorder(z, group, name):
    """What group g has goes where group g is called g by `name`."""
    out = torch.empty_like(z)
    for g in range(-1, 5):
        out[name == g] = z[group == g]
    return out


@pytest.mark.parametrize("norm", ALL)
def test_the_order_of_a_nodes_groups_does_not_matter(norm):
    """A node with its groups, and M, in another order: its update, put back by the groups, is the one of the others' order."""
    net, other, name_w, name_b = permuted(norm)
    w, b = start(net)
    args = SimpleNamespace(momentum=0.9, weight_decay=0.01)
    batch, eta = some_batch(y=torch.tensor([2, 3, 9, 0, 2, 6])), torch.tensor(0.3).double()
    one = psinet.client_step(net, args)((w, b, 0 * w, every(net)), batch, eta)
    w_, b_ = reorder(w, net.group, name_w), reorder(b, net.group_r, name_b)
    assert not torch.equal(w, w_)
    torch.testing.assert_close(other(torch.cat([w_, b_]), X), net(torch.cat([w, b]), X))
    two = psinet.client_step(other, args)((w_, b_, 0 * w, every(net)), batch, eta)
    torch.testing.assert_close(reorder(two[0], name_w, net.group), one[0])
    torch.testing.assert_close(reorder(two[1], name_b, net.group_r), one[1])


@pytest.mark.parametrize("norm", ["gn", "bn"])
def test_a_node_with_permuted_groups_leaves_the_global_model_as_it_would_be(norm):
    """Real training of three nodes, the second pruned and with its groups in another order; then the average by the map."""
    args = psinet.arguments([*TINY, "--clients", "3", "--split", "dirichlet-classes", "--alpha", "5", "--batch-size", "40"])
    fed = common.Federation(args)
    fed.transform = lambda x, u=None: common.scale(x).double()
    net, other, name_w, name_b = permuted(norm)
    w, b = start(net)
    has = torch.ones(3, 5, dtype=torch.bool)
    has[1, [1, 4]] = False
    fed.eta = lambda t: torch.tensor(0.05).double()

    def updates(net, w, b, has):
        fed.net, networks = net, {}
        for s in (3, 5):
            part = psi(norm=norm, s=s)
            part.M = net.M
            networks[s] = part, psinet.client_step(part, args)
        w_i, b_i = psinet.local_updates(fed, networks, has, w, b, np.arange(3), 0)
        assert fed.net is net  # evaluation is the whole network's
        return w_i, b_i, *net.numbers_of(has)

    w_i, b_i, own_w, own_b = updates(net, w, b, has)
    back_w, back_b, back_own_w, back_own_b = updates(other, reorder(w, net.group, name_w), reorder(b, net.group_r, name_b), has[:, ORDER])
    for whole, own, back, own_, names, old in ((w_i, own_w, back_w, back_own_w, (name_w, net.group), w),
                                               (b_i, own_b, back_b, back_own_b, (name_b, net.group_r), b)):
        mixed, mixed_own, naive = whole.clone(), own.clone(), whole.clone()
        mixed[1], mixed_own[1], naive[1] = reorder(back[1], *names), reorder(own_[1], *names), back[1]
        n_i = fed.n.double()
        expected = psinet.aligned_average(fed, whole, own, n_i, old)
        torch.testing.assert_close(psinet.aligned_average(fed, mixed, mixed_own, n_i, old), expected)
        moved = (expected - old).abs()
        assert (moved > 1e-6).any() and torch.equal(whole[1][~own[1]], old[~own[1]])
        if len(names[0].unique()) > 1:  # with gn, all of b is shared
            assert (psinet.aligned_average(fed, naive, mixed_own, n_i, old) - expected).abs().max() > 0.01


# The federation


@pytest.mark.parametrize("model", ["tiny", "cnn"])
def test_without_groups_and_norm_it_is_fedavg_bit_for_bit(model, tmp_path):
    argv = [*QUICK, "--split", "dirichlet-classes", "--alpha", "1", "--model", model, "--transform", "scale",
            "--momentum", "0.9", "--weight-decay", "0.001", "--batch-size", "20",
            "--client-test", "0.2", "--fraction", "0.5"]
    a, w = run(fedavg, argv, tmp_path / "a")
    b, state = run(psinet, [*argv, "--groups", "0", "--norm", "none"], tmp_path / "b")
    assert len(set(a["split"]["sizes"])) > 1 and torch.equal(w["w"], state["w"])
    assert a["final"] == {part: b["final"][part] for part in ("global", "personal")}
    assert a["bytes_up"] == b["bytes_up"]


def test_with_all_owners_the_average_is_fedavgs():
    rng = np.random.default_rng(0)
    W, n = torch.from_numpy(rng.normal(size=(4, 9))), torch.tensor([5.0, 1, 2, 8])
    own = torch.ones(4, 9, dtype=torch.bool)
    average = psinet.aligned_average(SimpleNamespace(sum=lambda x, n: n @ x), W.float(), own, n, torch.zeros(9))
    np.testing.assert_allclose(average, np.average(W, axis=0, weights=[5, 1, 2, 8]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm", ALL)
@pytest.mark.parametrize("enter", ["all", "slice"])
def test_all_paths_agree(enter, norm):
    """Pruned nodes with other groups and of other sizes, in float64; nodes that finish early keep their state."""
    argv = [*TINY, "--split", "dirichlet-classes", "--alpha", "1", "--clients", "4", "--epochs", "1", "--batch-size", "20"]
    fed = common.Federation(psinet.arguments(argv))
    fed.transform = lambda x, u=None: common.scale(x).double()
    assert len({len(index) // 20 for index in fed.split.train}) > 1
    net = fed.net = psi(norm=norm, enter=enter, s=3)
    w, b = start(net)
    keep = torch.tensor([[0, 1, 2], [2, 3, 4], [0, 2, 4]])
    step = psinet.client_step(net, SimpleNamespace(momentum=0.9, weight_decay=0.001))
    nodes = (w.expand(3, -1), b.expand(3, -1), torch.zeros(3, net.d).double(), keep)
    ends = []
    for _ in paths(fed):
        ends.append(fed.train(step, nodes, [0, 1, 3], 0, torch.tensor(0.01).double()))
    assert (ends[0][0] - w).norm() > 0.01 and torch.equal(ends[0][3], keep)
    for end in ends[1:]:
        torch.testing.assert_close(ends[0][:3], end[:3], atol=1e-8, rtol=1e-8)


def test_multiplications_are_added_up_over_rounds_epochs_and_nodes(tmp_path, monkeypatch):
    """3 of 5 nodes of different sizes in a round, two epochs; the first round isn't evaluated."""
    spy(monkeypatch, lambda start, S: start)
    argv = [*TINY, "--split", "dirichlet-classes", "--alpha", "5", "--fraction", "0.6", "--rounds", "3", "--epochs", "2", "--eval-every", "2",
            "--no-prune"]
    record, state = run(psinet, argv, tmp_path)
    fed, n = common.Federation(psinet.arguments(argv)), np.array(record["split"]["sizes"])
    work = np.cumsum([2 * n[fed.sample(t)].sum() * macs(psi()) for t in range(3)])
    assert len(set(n)) > 1 and ["macs" in row for row in record["rounds"]] == [False, True, True]
    assert [row["macs"] for row in record["rounds"][1:]] == work[1:].tolist() and record["final"]["macs"] == work[2]


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path):
    argv = [*TINY, "--rounds", "4", "--eval-every", "2", "--split", "dirichlet", "--alpha", "3"]
    whole, a = run(psinet, argv, tmp_path / "whole")
    killed(psinet, argv, tmp_path / "cut", lambda t, _: t == 3)
    again, b = run(psinet, [*argv, "--resume"], tmp_path / "cut")
    assert torch.equal(a["w"], b["w"]) and torch.equal(a["r"], b["r"]) and len(b["r"]) == 12
    assert same(whole, again)


def test_evaluation_is_the_whole_model_on_running_statistics(tmp_path):
    argv = [*SMALL, "--rounds", "1", "--client-test", "0.2"]
    record, state = run(psinet, argv, tmp_path)
    fed, net = common.Federation(psinet.arguments(argv)), psi()
    z = torch.cat([state["w"], state["r"]])
    with torch.no_grad():
        logits = net(z, common.scale(fed.images[fed.data.n_train :]))
        own = net(z, common.scale(fed.images[fed.split.test[1]]))
    right = (own.argmax(1) == fed.labels[fed.split.test[1]]).float()
    labels = fed.labels[fed.data.n_train :]
    assert record["final"]["global"]["top1"] == pytest.approx(float((logits.argmax(1) == labels).float().mean()), abs=1e-6)
    assert record["final"]["global"]["loss"] == pytest.approx(float(F.cross_entropy(logits, labels)), abs=1e-4)
    assert record["final"]["personal"]["per_client"][1] == pytest.approx(float(right.mean()))
    assert (own > -1e6).all()


def test_what_is_printed(tmp_path, capsys):
    run(psinet, [*SMALL, "--rounds", "1"], tmp_path)
    text = capsys.readouterr().out
    assert "M       0: 0 1, 1: 2 3, 2: 4 5, 3: 6 7, 4: 8 9\n" in text
    assert re.search(r"nodes   \d/[\d.]+/2 of 5 groups", text) and "tiny in 5 groups from conv2 on" in text
    rows = [line.split() for line in text[text.index("groups  layer") :].splitlines()[1:6]]
    assert rows == [["conv1", "shared", "3", "6", "BatchNorm", "180"], ["conv2", "5", "6", "2", "GroupNorm", "570"],  # 6*27+6+12
                    ["conv3", "5", "2", "2", "GroupNorm", "50"], ["fc1", "5", "2", "3", "45"], ["fc2", "5", "3", "2", "40"]]


def test_the_table_in_the_file_is_what_a_run_prints():
    """Its first column but one are the layers of the default network; a line's end says what it stands for."""
    net, lines = psi("vgg9", 10, None), pathlib.Path(psinet.__file__).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if re.match(r"#     layer +groups", line))
    printed = [[str(cell) for cell in (*row[:5], f"{row[5]:,}") if cell != ""] for row in psinet.table(net)]
    assert [re.split(" {3,}l\\.", line)[0][1:].split() for line in lines[start + 1 : start + 10]] == printed
    assert sum(row[5] for row in psinet.table(net)) == net.d == 848_386


def test_the_table_of_mobilenet():
    """Its norms have names of their own, and a depthwise layer's output sees one channel."""
    rows = {row[0]: row[1:] for row in psinet.table(psi("mobilenet", 10, None))}
    assert rows["conv1"] == ("shared", 3, 32, "BatchNorm", 32 * 27 + 64)
    assert rows["block6.depthwise"] == ("shared", 1, 256, "BatchNorm", 9 * 256 + 512)
    assert rows["block6.pointwise"] == (10, 256, 52, "GroupNorm", 256 * 520 + 1040)
    assert rows["block7.depthwise"] == (10, 1, 52, "GroupNorm", 9 * 520 + 1040) and rows["fc"] == (10, 103, 1, "", 103 * 10 + 10)


@pytest.mark.parametrize("more, counts", [([], [1, 2]), (["--no-prune"], [5]), (["--groups", "0"], [1]), (["--groups", "1"], [1])])
def test_nodes_that_lack_a_groups_classes_do_without_it_unless_told_otherwise(more, counts):
    """Two of ten classes each, five groups of two classes; without groups, and in one, there is nothing to prune."""
    args = psinet.arguments([*SMALL, *more])
    assert args.prune is (more in ([], ["--groups", "1"]))
    fed = common.Federation(args, lambda _, *images: psinet.PsiNet(args, *images))
    has = psinet.groups_of_nodes(fed, args)
    for i, index in enumerate(fed.split.train):
        classes = set(fed.labels[index].tolist())
        groups = {c // 2 for c in classes} if not more else set(range(counts[0]))
        assert len(classes) == 2 and set(has[i].nonzero()[:, 0].tolist()) == groups
    assert set(has.sum(1).tolist()) <= set(counts)


@pytest.mark.parametrize("flags, words", [
    (["--groups", "4"], "divisor of 10"), (["--depth", "conv9"], "conv1"), (["--groups", "-1"], "at least 0")])
def test_refusals(flags, words, tmp_path, capsys):
    refused(capsys, words, psinet.main, [*SMALL, *flags, "--out", str(tmp_path)])


# Class preferences and total variance


def mlp(m, x, classes):
    return m.linear("two", F.relu(m.linear("one", x.flatten(1), 4)), classes)


def test_preferences_and_total_variance_by_hand(monkeypatch):
    """6 pixels - 4 neurons - 3 classes with a ReLU, in float64: the gradient of Z_c by an activation is its weight."""
    monkeypatch.setitem(common.MODELS, "mlp", mlp)
    net = psi("mlp", 0, None, "none", shape=(1, 2, 3), classes=3)
    rng = np.random.default_rng(3)
    images, labels = rng.random((30, 6)), np.arange(30) % 3
    z = net.init(rng).double()
    fed = SimpleNamespace(net=net, labels=torch.from_numpy(labels), data=SimpleNamespace(n_train=24),
                          images=torch.from_numpy(images), transform=lambda x: x.view(-1, 1, 2, 3))
    U, u, V = z[:24].view(4, 6).numpy(), z[24:28].numpy(), z[28:40].view(3, 4).numpy()
    A = np.maximum(images @ U.T + u, 0)
    P = np.array([[sum(A[n, i] * V[c, i] for n in range(24) if labels[n] == c) for c in range(3)] for i in range(4)])
    found = psinet.preferences(fed, z)
    assert list(found) == ["one"]
    np.testing.assert_allclose(found["one"], P)
    few = psinet.preferences(fed, z, images=2)["one"]
    np.testing.assert_allclose(few[1, 2], (A[2, 1] + A[5, 1]) * V[2, 1])

    assert float(psinet.total_variance(torch.tensor([[1.0, 3.0], [2.0, 2.0], [-1.0, 1.0]]))) == pytest.approx(
        # (.25, .75), (.5, .5), (-.5, .5): mean (1/12, 7/12)
        (np.hypot(2 / 12, 2 / 12) + np.hypot(5 / 12, 1 / 12) + np.hypot(7 / 12, 1 / 12)) / 3, abs=1e-6)


def two_convolutions(m, x, classes):
    x = F.relu(m.conv("one", x, 4, 1))
    x = F.relu(m.conv("two", x, 4, 1))
    return m.linear("three", x.flatten(1), classes)


def test_preferences_and_total_variance_with_groups_and_batchnorm_by_hand(monkeypatch):
    """2 channels - 4 - 4 in two groups - 4 classes in two groups, 6 pixels; the chain rule in numpy, in float64."""
    monkeypatch.setitem(common.MODELS, "two", two_convolutions)
    net = psi("two", 2, "two", "bn", shape=(2, 2, 3), classes=4)
    w, b = start(net, 4)
    rng = np.random.default_rng(3)
    images, labels = rng.random((20, 2, 2, 3)), np.arange(20) % 4
    fed = SimpleNamespace(net=net, labels=torch.from_numpy(labels), data=SimpleNamespace(n_train=16),
                          images=torch.from_numpy(images), transform=lambda x: x)
    found = psinet.preferences(fed, torch.cat([w, b]))
    part = {name: w[where].view(shape).numpy() for name, where, shape in net.tensors}
    U, V, W = part["one.weight"][:, :, 0, 0], part["two.weight"][:, :, 0, 0], part["three.weight"].reshape(4, 2, 6)
    means, variances = b.numpy().reshape(2, 2, 4).transpose(1, 0, 2)  # of the layers one and two
    slope = [part[f"{name}-norm.weight"] / np.sqrt(v + 1e-5) for name, v in zip(("one", "two"), variances)]
    P = {"one": np.zeros((4, 4)), "two": np.zeros((4, 4))}
    for x, c in zip(images[:16].reshape(16, 2, 6), labels):
        y = U @ x + part["one.bias"][:, None]
        A = np.maximum(slope[0][:, None] * (y - means[0][:, None]) + part["one-norm.bias"][:, None], 0)  # [4, 6]
        y = V @ A + part["two.bias"][:, None]
        B = np.maximum(slope[1][:, None] * (y - means[1][:, None]) + part["two-norm.bias"][:, None], 0)
        dB = np.zeros((4, 6))
        dB[2 * (c // 2) : 2 * (c // 2) + 2] = W[c]  # class c's group alone
        dA = V.T @ (dB * (B > 0) * slope[1][:, None])
        P["two"][:, c] += (B * dB).sum(1)
        P["one"][:, c] += (A * dA).sum(1)
    assert list(found) == ["one", "two"] and V.shape == (4, 4)
    for name, expected in P.items():
        np.testing.assert_allclose(found[name], expected, atol=1e-12)
        unit = expected / np.abs(expected).sum(1, keepdims=True)
        tv = np.mean([np.sqrt(((row - unit.mean(0)) ** 2).sum()) for row in unit])
        assert float(psinet.total_variance(found[name])) == pytest.approx(tv) and tv > 0.1
    assert (P["two"] == 0).sum() == 8 and (P["one"] != 0).all()


def test_preferences_of_channels_sum_over_their_pixels():
    """tiny without groups: by a numerical derivative along each channel's own activations (Z is scaled along A)."""
    net = psi(groups=0, norm="none", classes=6)
    w, _ = start(net)
    fed = SimpleNamespace(net=net, labels=torch.arange(6), data=SimpleNamespace(n_train=6), images=X, transform=lambda x: x)
    found = psinet.preferences(fed, w)
    assert {name: p.shape for name, p in found.items()} == {"conv1": (6, 6), "conv2": (10, 6), "conv3": (10, 6), "fc1": (15, 6)}
    part = {name: w[s].view(shape) for name, s, shape in net.tensors}

    def logits(scale):  # of conv1's channels
        x = torch.tanh(F.max_pool2d(F.conv2d(X, part["conv1.weight"], part["conv1.bias"]), 4)) * scale[:, None, None]
        for name in ("conv2", "conv3"):
            x = torch.tanh(F.max_pool2d(F.conv2d(x, part[name + ".weight"], part[name + ".bias"]), 2))
        x = torch.tanh(x.flatten(1) @ part["fc1.weight"].T + part["fc1.bias"])
        return x @ part["fc2.weight"].T + part["fc2.bias"]

    h = 1e-6 * torch.eye(6).double()
    for i in range(6):
        slope = (logits(1 + h[i]) - logits(1 - h[i])) / 2e-6
        np.testing.assert_allclose(found["conv1"][i], slope.diagonal(), atol=1e-7)


def test_the_depth_that_tv_suggests(tmp_path, capsys, monkeypatch):
    fixed = iter([0.2, 0.3, 0.9, 0.7])
    monkeypatch.setattr(psinet, "total_variance", lambda P: next(fixed))
    record, _ = run(psinet, [*SMALL, "--groups", "0", "--rounds", "1", "--tv"], tmp_path)
    assert record["final"]["tv"] == {"conv1": 0.2, "conv2": 0.3, "conv3": 0.9, "fc1": 0.7}
    assert "suggests --depth conv3" in capsys.readouterr().out and (tmp_path / "tv.png").stat().st_size > 5000


# The defaults: facts of the paper's experiments


def test_the_settings_are_the_papers():
    """Facts A2.5 and A2.6: 10x4 with VGG-9 for 100 rounds, 10x50 with VGG-16 for 200; the recipe of B13."""
    for dataset, model, c, rounds in (("cifar10", "vgg9", 4, 100), ("cifar100", "vgg16", 50, 200)):
        args = psinet.arguments(["--dataset", dataset])
        assert (args.model, args.split, args.clients, args.per_client, args.rounds) == (model, "classes", 10, c, rounds)
        assert (args.groups, args.norm, args.fraction, args.epochs) == (10, "gn", 1.0, 1)
        assert (args.lr, args.batch_size, args.momentum, args.weight_decay) == (0.01, 64, 0.9, 1e-4)
    assert psinet.DEPTH["vgg16"] == "conv3-2"


@pytest.mark.parametrize("argv, words", [
    (["--tv"], "use --groups 0"), (["--model", "cifarnet"], "give --depth LAYER"),
    (["--model", "tfcnn", "--depth", "fc3"], "can't be grouped"), (["--model", "resnet18", "--depth", "stage3"], "can't be grouped"),
])
def test_what_makes_no_sense_is_refused(argv, words, capsys):
    refused(capsys, words, psinet.arguments, ["--dataset", "shapes", *argv])


def test_without_groups_the_tutorials_network_keeps_its_weight_decay():
    args = psinet.arguments(["--dataset", "cifar10", "--model", "tfcnn", "--groups", "0", "--norm", "none"])
    plain = common.Net("tfcnn", (3, 24, 24), 10)
    assert torch.equal(psinet.PsiNet(args, (3, 24, 24), 10).decayed, plain.decayed) and plain.decayed.mean() < 1


def test_the_experiment_on_the_softmax_is_fedavg_but_for_the_softmax(tmp_path):
    """If nodes have all classes, it ends with the bits of --groups 0 --norm gn. Else other classes' biases get no gradient."""
    argv = ["--dataset", "shapes", "--limit", "200", "--rounds", "1", "--clients", "2", "--per-client", "10", "--device", "cpu"]
    _, want = run(psinet, [*argv, "--groups", "0", "--norm", "gn"], tmp_path / "psinet")
    _, plain = run(psinet_softmax, argv, tmp_path / "plain")
    assert torch.equal(want["w"], plain["w"])
    fed = federation([*argv, "--split", "classes", "--model", "cnn", "--client-test", "0"])
    step, w = psinet_softmax.client_step(fed.net, fed.args), fed.initial_weights()
    own = torch.tensor([1.0, 0, 1, 0, 1, 0, 1, 0, 1, 0])
    b = common.Batch(torch.rand(4, 3, 32, 32), torch.tensor([0, 2, 4, 6]), torch.ones(4), None)
    moved = step((w, torch.zeros_like(w), own), b, torch.tensor(0.1))[0] - w
    assert ((moved[-10:] != 0) == (own > 0)).all()  # the last layer's biases
