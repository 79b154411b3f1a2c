import functools
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import baselines
import common
import fedavg
import fedslr
import fl.records
import fl.training
from byhand import FLAGS, World, close
from conftest import QUICK, refused, run, softmax_gradient
from papers import fedslr_factors, fedslr_ranks

SMALL = [*QUICK, "--model", "mnistnet", "--split", "iid", "--limit", "200", "--lr", "0.1",
         "--lr-decay", "0.998"]


def federation(argv):
    return common.Federation(fedslr.arguments(argv))


def layered(channels, classes, size):
    """Kernels of many forms, for 8x8 pixels: with stride and padding, per channel, inside a module
    and without padding, a matrix with a bias."""
    last = nn.Conv2d(6, 8, 3, bias=False)
    return nn.Sequential(OrderedDict(
        first=nn.Conv2d(channels, 6, 5, 2, 2), norm=nn.GroupNorm(2, 6), relu1=nn.ReLU(),
        apart=nn.Conv2d(6, 6, 3, 1, 1, groups=6, bias=False), relu2=nn.ReLU(),
        inner=nn.Sequential(OrderedDict(last=last, relu=nn.ReLU())),
        flatten=nn.Flatten(), fc=nn.Linear(32, classes)))


@pytest.fixture
def net(monkeypatch):
    """The model `layered`. Its matrices are by hand 6*5 x 3*5, 6*3 x 1*3, 8*3 x 6*3, 4 x 32."""
    monkeypatch.setitem(common.MODELS, "layered", layered)
    return common.Net("layered", (3, 8, 8), 4)


def drawn(net):
    return torch.from_numpy(np.random.default_rng(3).normal(0, 0.2, net.d))


# Proximal operators


def test_soft_thresholding_against_its_optimality_condition():
    """u minimises tau*|u| + (u-x)^2/2 if and only if x - u is in tau * the subdifferential of
    |u|."""
    x = torch.from_numpy(np.random.default_rng(0).normal(size=1000))
    u = fedslr.soft(x, 0.7)
    at_zero = u == 0
    assert 100 < at_zero.sum() < 900 and (x[at_zero].abs() <= 0.7).all()
    torch.testing.assert_close((x - u)[~at_zero], 0.7 * u.sign()[~at_zero])
    assert fedslr.soft(torch.tensor([-3.0, -0.5, 0.0, 0.5, 3.0]), 1.0).tolist() == [-2, 0, 0, 0, 2]


def matrix(kernel):
    """pi, element by element."""
    n, m, k1, k2 = (*kernel.shape, 1, 1)[:4]
    kernel = np.asarray(kernel).reshape(n, m, k1, k2)
    return np.array([[kernel[o, i, a, b] for i in range(m) for b in range(k2)]
                     for o in range(n) for a in range(k1)])


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (3, 2, 1, 1), (4, 1, 3, 3), (5, 7)])
def test_a_kernel_becomes_a_matrix_and_back(shape):
    kernel = torch.arange(float(np.prod(shape))).view(shape)
    found = fedslr.pi(kernel)
    np.testing.assert_array_equal(found.numpy(), matrix(kernel))
    assert torch.equal(fedslr.pi_inverse(found, shape), kernel)


@pytest.mark.parametrize("shrink", [fedslr.shrink, fedslr.shrink_on_gpu])
def test_the_nuclear_prox_against_its_optimality_condition(shrink, net, monkeypatch):
    """(V - W)/tau = U1 V1' + Z with W = U1 S V1', U1'Z = 0, Z V1 = 0 and no singular value of Z
    above 1. In several threads, too."""
    monkeypatch.setattr(fedslr, "shrink", shrink)
    v, tau = drawn(net), 0.9
    w, ranks = fedslr.prox_nuclear(net, v, tau)
    left = iter(ranks.tolist())
    for _, where, shape in net.tensors:
        if len(shape) == 1:
            assert torch.equal(w[where], v[where])
            continue
        W, V = matrix(w[where].view(shape)), matrix(v[where].view(shape))
        U, s, Vh = np.linalg.svd(W, full_matrices=False)
        r = int((s > 1e-9).sum())
        Z = (V - W) / tau - U[:, :r] @ Vh[:r]
        assert r == next(left) and np.linalg.norm(Z, 2) <= 1 + 1e-7
        np.testing.assert_allclose(U[:, :r].T @ Z, 0, atol=1e-7)
        np.testing.assert_allclose(Z @ Vh[:r].T, 0, atol=1e-7)
    assert [*left] == [] and 0 < ranks.sum() < 15 + 3 + 18 + 4
    in_threads = fedslr.prox_nuclear(net, v, tau, fl.training.pool(2))
    assert torch.equal(in_threads[0], w) and torch.equal(in_threads[1], ranks)


def test_the_least_and_the_largest_penalty_and_what_is_not_finite(net):
    """Without a penalty, matrices stay as they are, with all their ranks; zeros stay zeros, and so
    does what is shrunk away. A v that is not finite comes back, so that the run ends as
    diverged."""
    v = drawn(net)
    w, ranks = fedslr.prox_nuclear(net, v, 0.0)
    torch.testing.assert_close(w, v, atol=1e-6, rtol=1e-5)
    full = [15, 3, 18, 4]
    assert ranks.tolist() == fedslr.full_ranks(net).tolist() == full
    for start, tau in ((v, 100.0), (torch.zeros_like(v), 0.1)):
        w, ranks = fedslr.prox_nuclear(net, start, tau)
        inside = [w[where] for _, where, shape in net.tensors if len(shape) > 1]
        assert not torch.cat(inside).any() and not ranks.any()
    for bad in (torch.nan, torch.inf):
        v[7] = bad
        w, ranks = fedslr.prox_nuclear(net, v, 0.9)
        torch.testing.assert_close(w, v, atol=0, rtol=0, equal_nan=True)
        assert ranks.tolist() == full


# Rounds by hand


def shrink(A, tau):
    U, s, Vh = np.linalg.svd(A, full_matrices=False)
    return (U * np.maximum(s - tau, 0)) @ Vh


def soft(x, tau):
    return np.sign(x) * np.maximum(np.abs(x) - tau, 0)


@pytest.mark.parametrize("copy", [False, True])
def test_three_rounds_by_hand(copy, toy, tmp_path):
    """Minibatches of 5, eta = .5 * .9^t, weight decay .01; two epochs of Phase I and three of Phase
    II, which shuffles otherwise. Clients that were not sampled have a mixed model, too."""
    lam, mu, eta_g = 0.02, 0.03, 4.0
    argv = ["--dataset", toy, *FLAGS, "--fusion-epochs", "3", "--lr", "0.5", "--lr-decay", "0.9",
            "--weight-decay", "0.01", "--lambda", str(lam), "--mu", str(mu), "--eta-g", str(eta_g),
            "--p-start", "copy" if copy else "zero"]
    world = World(federation(argv))
    fed, w = world.fed, world.w
    gamma, p = np.zeros((3, 15)), np.zeros((3, 15))
    p[:, :12] = copy * w[:12]  # biases start at 0
    for t, S in enumerate(world.S):
        eta, ends = 0.5 * 0.9**t, []
        for k in S:
            u = w
            for b in world.minibatches(k, t):
                u = u - eta * (softmax_gradient(u, *b) + 0.01 * u - gamma[k] + (u - w) / eta_g)
            ends.append(u)
            gamma[k] = gamma[k] + (w - u) / eta_g
            for b in world.minibatches(k, t, 3, order=1):
                g = softmax_gradient(w + p[k], *b) + 0.01 * p[k]
                p[k] = soft(p[k] - eta * g, eta * mu)
        v = np.mean(ends, axis=0) - eta_g * gamma.mean(0)
        w = np.r_[shrink(v[:12].reshape(3, 4), lam * eta_g).ravel(), v[12:]]
    record, state = run(fedslr, argv, tmp_path)
    close(state, w=w, gamma=gamma, p=p)
    assert 0 < (p == 0).sum() < p.size
    assert state["ranks"].tolist() == [np.linalg.matrix_rank(w[:12].reshape(3, 4), 1e-9)] == [2]
    mixed = fed.evaluate_clients(state["w"] + state["p"])
    for name in ("per_client", "loss"):
        assert record["final"]["personal"][name] == pytest.approx(mixed[name])


# Counting


def test_numbers_of_a_factorised_resnet_18_by_hand():
    """Rank 100, or full where that is less, everywhere: kernels of n outputs and m inputs are
    3n x 3m, shortcuts n x m."""
    net = common.Net("resnet18", (3, 32, 32), 10)
    kernels = [(3, 64, 3)] + [(64, 64, 3)] * 4
    for n in (128, 256, 512):
        kernels += [(n // 2, n, 3), (n, n, 3), (n // 2, n, 1), (n, n, 3), (n, n, 3)]
    sizes = [(n * k, m * k) for m, n, k in kernels] + [(10, 512)]
    scales = 2 * (64 * 5 + (128 + 256 + 512) * 5)  # a scale and a shift per channel
    assert sum(a * b for a, b in sizes) + scales == net.d == 11_173_952
    expected = scales + sum(min(a * b, min(100, a, b) * (a + b)) for a, b in sizes)
    full = fedslr.full_ranks(net)
    assert sorted(full.tolist()) == sorted(map(min, sizes)) and len(sizes) == 21
    assert fedslr.size_in_factors(net, full.clamp(max=100)) == expected == 2_297_664
    assert fedslr.size_in_factors(net, full) == net.d
    assert fedslr.size_in_factors(net, 0 * full) == scales


def test_what_a_run_sends_and_reports_and_its_factors(tmp_path, capsys):
    """Up dense; down w^0 dense, then what the ranks of the round before say. fedslr_factors writes
    the network of thin layers, and its times into the record."""
    argv = [*SMALL, "--rounds", "3", "--eval-every", "1", "--lambda", "0.02", "--seed", "3"]
    record, state = run(fedslr, [*argv, "--save-clients"], tmp_path)
    rows, numbers, w = record["rounds"], [308310], state["w"]
    for row in rows:
        r1, r2 = row["ranks"]["fc1"], row["ranks"]["fc2"]
        fc1, fc2 = min(307200, r1 * (100 + 3072)), min(1000, r2 * (10 + 100))
        numbers.append(fc1 + 100 + fc2 + 10)
        assert row["numbers"]["gkr"] == numbers[-1]
        assert (row["bytes_up"], row["bytes_down"]) == (4 * 4 * 308310, 4 * 4 * numbers[-2])
    assert 0 < numbers[-1] < 308310 and state["size"] == numbers[-1]
    found = (state["p"] != 0).sum(1).numpy() + numbers[-1]
    assert rows[-1]["numbers"]["mixed"] == pytest.approx(found.mean())
    assert rows[-1]["numbers"]["mixed_std"] == pytest.approx(found.std(ddof=1))
    fed = federation(argv)
    assert rows[-1]["global"] == pytest.approx(fed.evaluate(w), rel=1e-7)
    gkr = common.without_clients(fed.evaluate_clients(w))
    assert rows[-1]["gkr"] == pytest.approx(gkr, rel=1e-7)
    own = torch.load(tmp_path / "clients.pt", weights_only=True)["fc1.weight"]
    assert torch.equal(own, (w + state["p"])[:, :307200].view(8, 100, 3072))

    fedslr_factors.main([str(tmp_path)])
    assert "20 images take" in capsys.readouterr().out
    after = fl.records.read(tmp_path / "result.json")
    latency = after["final"].pop("latency")
    assert after == record and min(latency[name] for name in ("dense_ms", "factorised_ms")) > 0
    r = record["final"]["ranks"]["fc1"]
    thin = fedslr_factors.factorised(fed.net.build(), record["final"]["ranks"])
    weights = torch.load(tmp_path / "factors.pt", weights_only=True)
    assert weights["fc1.0.weight"].shape == (r, 3072) and weights["fc1.1.weight"].shape == (100, r)
    thin.load_state_dict(weights)
    x = fed.transform(fed.images[:5])
    torch.testing.assert_close(thin(x), fed.net(w, x), atol=1e-4, rtol=1e-4)
    run(fedslr, [*argv, "--save-clients", "--resume"], tmp_path)  # finished: the record stays
    assert fl.records.read(tmp_path / "result.json")["final"]["latency"] == latency


def test_the_script_prints_and_draws_the_ranks(tmp_path, capsys, monkeypatch):
    def row(round, gkr, mixed, rank):
        one, two = ({"mean": z, "std": 0.1, "worst_decile": 0.2, "loss": 1.5} for z in (gkr, mixed))
        return {"round": round, "gkr": one, "personal": two, "ranks": {"fc1": rank, "fc2": 3},
                "numbers": {"gkr": 1000 + rank, "mixed": 2000 + rank}, "bytes_down": 8}

    record = {"algorithm": "fedslr", "args": {"dataset": "shapes", "split": "iid", "seed": 0},
              "rounds": [row(1, 0.5, 0.6, 9), row(2, 0.4, 0.7, 5)], "final": {}}
    monkeypatch.setattr(fl.records, "read", lambda path: record)
    monkeypatch.setattr(common, "setting", lambda record: "a setting")
    fedslr_ranks.main(tmp_path)
    assert "ranks   fc1 5, fc2 3\n" in capsys.readouterr().out
    assert (tmp_path / "ranks.png").stat().st_size > 1000


SCALED = """
import torch
class Scaled(torch.nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((3, 1, 1), 1e-6))
        self.conv, self.fc = torch.nn.Conv2d(3, 4, 1), torch.nn.Linear(4, num_classes)
        self.norm = torch.nn.LayerNorm([4, 2, 2])
    def forward(self, x):
        return self.fc(self.norm(self.conv(x * self.scale)).mean((2, 3)))
"""


def test_vectors_with_more_axes_are_no_matrices(tmp_path):
    (tmp_path / "scaled.py").write_text(SCALED)
    net = common.Net(f"{tmp_path}/scaled.py:Scaled", (3, 2, 2), 2)
    w = net.init(np.random.default_rng(0))
    shrunk, ranks = fedslr.prox_nuclear(net, w, 1e-3)
    scale = net.names.index("scale")
    where = net.tensors[scale][1]
    assert len(ranks) == 2 and torch.equal(shrunk[where], w[where]) and w[where].all()
    assert baselines.erdos_renyi_kernel(net, 0.9)[scale] == 3  # all of it
    shapes = (1, 5), (5, 1), (1, 1), (3, 1, 1), (1, 4, 6), (2, 1, 3, 3), (7,)
    net = SimpleNamespace(tensors=[("", None, shape) for shape in shapes],
                          module=torch.nn.Identity(), owner=lambda name: "")
    net.is_kernel = functools.partial(common.Net.is_kernel, net)
    assert fedslr.matrix_places(net) == [0, 1, 2, 4, 5]


# The factorised network (papers/fedslr_factors.py)


@pytest.mark.parametrize("tau, pairs", [(0.0, []), (0.8, ["inner.last", "fc"]),
                                        (0.9, ["first", "inner.last", "fc"]),
                                        (100.0, ["first", "inner.last", "fc"])])
def test_the_network_rebuilt_from_its_factors(tau, pairs, net):
    """It has the same logits: dense for tau = 0, without any weight for 100. It has as many numbers
    as are counted, but for the kernels of single channels, which stay, and for rank 0, where it
    takes rank 1. A convolution goes along the rows first, with one half of the stride and of the
    padding each."""
    w, ranks = fedslr.prox_nuclear(net, drawn(net), tau)
    dense = net.build().double()
    dense.load_state_dict(net.state_dict(w))
    names = [net.names[i].removesuffix(".weight") for i in fedslr.matrix_places(net)]
    thin = fedslr_factors.factorised(dense, dict(zip(names, ranks.tolist())))
    x = torch.from_numpy(np.random.default_rng(4).normal(size=(5, 3, 8, 8)))
    torch.testing.assert_close(thin(x), net(w, x), atol=1e-10, rtol=1e-10)
    modules = dict(thin.named_modules())
    assert [name for name in ("first", "apart", "inner.last", "fc")
            if isinstance(modules[name], nn.Sequential)] == pairs
    expected = 4 + 6 + 2 * 6  # the biases of fc and first, GroupNorm
    sizes = (30, 15), (18, 3), (24, 18), (4, 32)
    for i, (r, (a, b)) in enumerate(zip(ranks.tolist(), sizes)):
        expected += a * b if i == 1 else min(a * b, max(r, 1) * (a + b))
    assert sum(z.numel() for z in thin.parameters()) == expected
    assert not any(isinstance(layer, nn.Sequential) for layer in (dense.first, dense.fc))
    if "first" in pairs:
        (one, two), r = thin.first, max(int(ranks[0]), 1)
        assert one.weight.shape == (r, 3, 1, 5) and two.weight.shape == (6, r, 5, 1)
        assert (one.stride, one.padding, one.bias) == ((1, 2), (0, 2), None)
        assert (two.stride, two.padding) == ((2, 1), (2, 0)) and torch.equal(two.bias, w[450:456])


def test_folders_without_a_finished_run_of_fedslr_are_refused(toy, tmp_path, capsys):
    def no(words):
        refused(capsys, words, fedslr_factors.main, [str(tmp_path)])

    no("there is no record")
    run(fedavg, ["--dataset", toy, *FLAGS, "--rounds", "1"], tmp_path)
    no("fedavg.py, finished; name the --out folder of a finished run of fedslr.py")
    record = fl.records.read(tmp_path / "result.json")
    (tmp_path / "result.json").write_text(fl.records.text({**record, "algorithm": "fedslr"}))
    (tmp_path / "model.pt").write_text("no weights")
    no("model.pt can't be read (UnpicklingError)")
