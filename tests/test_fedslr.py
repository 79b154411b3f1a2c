from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import common
import fedavg
import fedslr
import fl.records
import fl.training
from conftest import QUICK, pixels, refused, run, softmax_gradient
from papers import fedslr_factors, fedslr_ranks

SMALL = [*QUICK, "--model", "mnistnet", "--split", "iid", "--transform", "scale", "--lr", "0.1",
         "--lr-decay", "0.998", "--parallel", "1"]


def federation(argv):
    return common.Federation(fedslr.arguments(argv))


@pytest.fixture
def toy_argv(toy):
    """Softmax regression of three clients of different sizes, two of which are sampled; full
    batches."""
    return ["--dataset", toy, "--model", "linear", "--transform", "scale", "--clients", "3",
            "--split", "dirichlet-classes", "--alpha", "9", "--client-test", "0.2",
            "--fraction", "0.7", "--rounds", "4", "--batch-size", "0", "--lr", "0.5",
            "--device", "cpu"]


def layered(channels, classes, size):
    """Kernels of many forms, for 8x8 pixels: with stride and padding, per channel, inside a module
    and without padding, a matrix with a bias."""
    last = nn.Conv2d(6, 8, 3, bias=False)
    return nn.Sequential(OrderedDict(
        first=nn.Conv2d(channels, 6, 5, 2, 2), norm=nn.GroupNorm(2, 6), relu1=nn.ReLU(),
        apart=nn.Conv2d(6, 6, 3, 1, 1, groups=6, bias=False), relu2=nn.ReLU(),
        inner=nn.Sequential(OrderedDict(last=last, relu=nn.ReLU())),
        flatten=nn.Flatten(), fc=nn.Linear(32, classes)))


def sizes_of(net):
    """Returns the rows and columns of a network's matrices."""
    zeros = np.zeros(net.d)
    return [matrix(zeros[where].reshape(shape)).shape for _, where, shape in net.tensors
            if len(shape) > 1]


@pytest.fixture
def net(monkeypatch):
    """The model `layered`. Its matrices are by hand 6*5 x 3*5, 6*3 x 1*3, 8*3 x 6*3, 4 x 32."""
    monkeypatch.setitem(common.MODELS, "layered", layered)
    net = common.Net("layered", (3, 8, 8), 4)
    assert sizes_of(net) == [(30, 15), (18, 3), (24, 18), (4, 32)]
    return net


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


def test_the_nuclear_prox_against_its_optimality_condition(net):
    """(V - W)/tau = U1 V1' + Z with W = U1 S V1', U1'Z = 0, Z V1 = 0 and no singular value of Z
    above 1. In several threads, too."""
    v, tau = torch.from_numpy(np.random.default_rng(1).normal(0, 0.2, net.d)), 0.9
    w, ranks = fedslr.prox_nuclear(net, v, tau)
    at = 0
    for _, where, shape in net.tensors:
        if len(shape) == 1:
            assert torch.equal(w[where], v[where])
            continue
        W, V = matrix(w[where].view(shape)), matrix(v[where].view(shape))
        U, s, Vh = np.linalg.svd(W, full_matrices=False)
        r = int((s > 1e-12).sum())
        Z = (V - W) / tau - U[:, :r] @ Vh[:r]
        assert ranks[at] == r and np.linalg.norm(Z, 2) <= 1 + 1e-9
        np.testing.assert_allclose(U[:, :r].T @ Z, 0, atol=1e-9)
        np.testing.assert_allclose(Z @ Vh[:r].T, 0, atol=1e-9)
        at += 1
    assert at == 4 and 0 < sum(ranks.tolist()) < 15 + 3 + 18 + 4
    in_threads = fedslr.prox_nuclear(net, v, tau, fl.training.pool(2))
    assert torch.equal(in_threads[0], w) and torch.equal(in_threads[1], ranks)


def test_the_least_and_the_largest_penalty(net):
    """Without a penalty, matrices stay as they are, with all their ranks; zeros stay zeros, and so
    does what is shrunk away."""
    v = net.init(np.random.default_rng(0))
    w, ranks = fedslr.prox_nuclear(net, v, 0.0)
    torch.testing.assert_close(w, v, atol=1e-6, rtol=1e-5)
    assert ranks.tolist() == fedslr.full_ranks(net).tolist() == [15, 3, 18, 4]
    for start, tau in ((v, 100.0), (torch.zeros_like(v), 0.1)):
        w, ranks = fedslr.prox_nuclear(net, start, tau)
        inside = [w[where] for _, where, shape in net.tensors if len(shape) > 1]
        assert not torch.cat(inside).any() and not ranks.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_nuclear_prox_does_not_hide_what_is_not_finite(bad, net):
    """It gives such a v back, with full ranks, so that the run ends as diverged."""
    v = torch.from_numpy(np.random.default_rng(1).normal(0, 0.2, net.d))
    v[7] = bad
    w, ranks = fedslr.prox_nuclear(net, v, 0.9)
    torch.testing.assert_close(w, v, atol=0, rtol=0, equal_nan=True)
    assert ranks.tolist() == [15, 3, 18, 4]


# Rounds by hand


def shrink(A, tau):
    U, s, Vh = np.linalg.svd(A, full_matrices=False)
    return (U * np.maximum(s - tau, 0)) @ Vh


def soft(x, tau):
    return np.sign(x) * np.maximum(np.abs(x) - tau, 0)


def low(w, tau):
    """The nuclear prox of a 3x4 matrix and three biases."""
    return np.concatenate([shrink(w[:12].reshape(3, 4), tau).ravel(), w[12:]])


def by_hand(argv, lam, mu, eta_g, copy):
    """Four rounds in float64: two epochs of Phase I and three of Phase II, eta = .5 * .9^t, weight
    decay .01."""
    fed = federation(argv)
    w = fed.initial_weights().double().numpy()
    gamma, p = np.zeros((3, 15)), np.zeros((3, 15))
    if copy:
        p[:, :12] = w[:12]
    for t in range(4):
        eta, S, ends = 0.5 * 0.9**t, fed.sample(t), []
        old_gamma = gamma.copy()
        for k in S:
            data = pixels(fed, fed.split.train[k])
            u = w
            for _ in range(2):
                g = softmax_gradient(u, *data) + 0.01 * u
                u = u - eta * (g - old_gamma[k] + (u - w) / eta_g)
            ends.append(u)
            gamma[k] = old_gamma[k] + (w - u) / eta_g
            for _ in range(3):
                g = softmax_gradient(w + p[k], *data) + 0.01 * p[k]
                p[k] = soft(p[k] - eta * g, eta * mu)
        w = low(np.mean(ends, axis=0) - eta_g * gamma.mean(0), lam * eta_g)
    return w, gamma, p


@pytest.mark.parametrize("copy", [False, True])
def test_four_rounds_by_hand(copy, toy_argv, tmp_path):
    w, gamma, p = by_hand(toy_argv, 0.02, 0.03, 4.0, copy)
    own = ["--lambda", "0.02", "--mu", "0.03", "--eta-g", "4", "--p-start",
           "copy" if copy else "zero", "--lr-decay", "0.9", "--weight-decay", "0.01",
           "--epochs", "2", "--fusion-epochs", "3"]
    record, state = run(fedslr, [*toy_argv, *own], tmp_path)
    for name, expected in (("w", w), ("gamma", gamma), ("p", p)):
        np.testing.assert_allclose(state[name].numpy(), expected, atol=5e-6)
    assert 0 < (p == 0).sum() < p.size and len(set(record["split"]["sizes"])) > 1
    assert state["ranks"].tolist() == [np.linalg.matrix_rank(w[:12].reshape(3, 4), 1e-9)] == [2]


class Lists(list):
    """The epochs of Phase I, as lists of minibatches; `again` returns those of Phase II."""

    def again(self, **options):
        self.asked = options
        return self.fusion


def test_client_update_by_hand(toy_argv):
    """Minibatches of different sizes. Phase II has its own epochs, in another order of images, and
    starts from the round's w^t."""
    flags = ["--mu", "0.03", "--eta-g", "4", "--weight-decay", "0.01", "--fusion-epochs", "2"]
    fed, rng = federation([*toy_argv, *flags]), np.random.default_rng(3)
    data = [(rng.random((n, 4)), rng.integers(0, 3, n)) for n in (5, 3, 4)]
    b = [common.Batch(torch.tensor(x).view(-1, 1, 2, 2), torch.tensor(y),
                      torch.ones(len(y)).double(), torch.zeros(0)) for x, y in data]
    w_t, gamma, p = rng.normal(0, 0.5, (3, 15))
    epochs = Lists([[b[0], b[1]], [b[2]]])
    epochs.fusion = [[b[2], b[0]], [b[1]]]
    client_update = fedslr.local_training(fed.net, fed.args)
    own, eta = map(torch.tensor, (w_t, gamma, p)), torch.tensor(0.5).double()
    w_i, p_i = client_update(*own, epochs, eta)
    w = w_t
    for x, y in data:
        w = w - 0.5 * (softmax_gradient(w, x, y) - gamma + (w - w_t) / 4 + 0.01 * w)
    for x, y in (data[2], data[0], data[1]):
        p = soft(p - 0.5 * (softmax_gradient(w_t + p, x, y) + 0.01 * p), 0.5 * 0.03)
    np.testing.assert_allclose(w_i.numpy(), w, atol=1e-8)
    np.testing.assert_allclose(p_i.numpy(), p, atol=1e-8)
    assert epochs.asked == {"epochs": 2, "order": 1}


def squares(logits, batch):
    return (logits - F.one_hot(batch.y, 3)).square().sum(1).mean() / 2


def test_phase_one_solves_the_regularised_problem(toy_argv, tmp_path, monkeypatch):
    """Least squares on one-hot labels, all clients in every round; the solution is a long proximal
    gradient run in numpy, which several local steps reach only with gamma_i."""
    monkeypatch.setattr(common, "cross_entropy", squares)
    lam, decay = 0.05, 0.15
    argv = [*toy_argv, "--alpha", "1", "--fraction", "1", "--rounds", "75", "--fusion-epochs", "0",
            "--lambda", str(lam), "--lr", "0.6", "--lr-decay", "1", "--weight-decay", str(decay),
            "--eval-every", "75", "--parallel", "1"]
    fed = federation(argv)
    data = [(np.c_[x, np.ones(len(x))], np.eye(3)[y])
            for x, y in (pixels(fed, index) for index in fed.split.train)]
    W = np.zeros((3, 5))  # weights and biases
    for _ in range(5000):
        g = np.mean([(W @ x.T - y.T) @ x / len(x) for x, y in data], axis=0)
        W = W - 0.3 * g - 0.3 * decay * W
        W = np.c_[shrink(W[:, :4], 0.3 * lam), W[:, 4]]
    expected = np.concatenate([W[:, :4].ravel(), W[:, 4]])
    assert 0 < np.linalg.matrix_rank(W[:, :4], 1e-9) < 3
    _, state = run(fedslr, [*argv, "--epochs", "12", "--eta-g", "3"], tmp_path)
    assert np.abs(state["w"].numpy() - expected).max() < 1e-4


# Who keeps what


def test_the_others_keep_what_they_have_and_all_count_alike(tmp_path, monkeypatch):
    """Client k, whatever its size, returns w_k = k and p_k = 100 + k everywhere."""
    calls = []

    def constant(self, client_update, S, t, own, shared):
        w_t, gamma, p = (z[: len(S)] for z in own)  # rows are fetched
        calls.append(SimpleNamespace(S=list(S), w_t=w_t, gamma=gamma, p=p))
        k = torch.tensor(S, dtype=torch.float)[:, None]
        return k + 0 * w_t, 100 + k + 0 * p

    monkeypatch.setattr(common.Federation, "train", constant)
    argv = [*SMALL, "--split", "dirichlet-classes", "--alpha", "1", "--seed", "3", "--lambda", "0",
            "--eta-g", "4", "--client-test", "0.2"]
    record, state = run(fedslr, argv, tmp_path)
    assert len(set(record["split"]["sizes"])) > 1
    assert len(calls) == 2 and calls[0].S != calls[1].S
    w = calls[0].w_t[0]
    gamma, p = torch.zeros(8, len(w)), torch.zeros(8)
    for call in calls:
        torch.testing.assert_close(call.w_t, w.expand(4, -1), atol=2e-3, rtol=0)
        torch.testing.assert_close(call.gamma, gamma[call.S], atol=2e-3, rtol=0)
        assert torch.equal(call.p, p[call.S][:, None].expand(4, len(w)))
        for k in call.S:
            gamma[k] = gamma[k] + (w - k) / 4
            p[k] = 100 + k
        w = sum(call.S) / 4 - 4 * gamma.sum(0) / 8
    torch.testing.assert_close(state["w"], w, atol=2e-3, rtol=0)
    torch.testing.assert_close(state["gamma"], gamma, atol=2e-3, rtol=0)
    assert torch.equal(state["p"], p[:, None].expand(8, len(w)))
    idle = set(range(8)) - set(calls[0].S) - set(calls[1].S)
    assert idle and not state["gamma"][list(idle)].any()


def test_a_huge_sparse_penalty_leaves_the_gkr_alone(tmp_path):
    argv = [*SMALL, "--mu", "1e6", "--p-start", "copy", "--fraction", "1"]
    record, state = run(fedslr, argv, tmp_path)
    row, numbers = record["rounds"][-1], state["size"]
    assert not state["p"].any()
    assert row["personal"] == pytest.approx(row["gkr"], abs=1e-6)  # images together or by client
    assert row["numbers"] == {"gkr": numbers, "mixed": numbers, "mixed_std": 0}


@pytest.mark.parametrize("start", ["zero", "copy"])
def test_clients_that_were_never_sampled_have_the_first_p(start, tmp_path):
    """With copy: kernels and matrices of w^0, without biases. Their mixed model is w + p_i all the
    same."""
    argv = [*SMALL, "--rounds", "1", "--p-start", start]
    record, state = run(fedslr, [*argv, "--save-clients"], tmp_path)
    fed = federation(argv)
    idle = sorted(set(range(8)) - set(fed.sample(0)))
    first = fed.initial_weights() if start == "copy" else torch.zeros(fed.net.d)
    first[307200:307300], first[308300:] = 0, 0  # biases
    assert len(idle) == 4 and first.any() == (start == "copy")
    for k in range(8):
        assert torch.equal(state["p"][k], first) == (k in idle)
    index = fed.split.test[idle[0]]
    right = fed.logits(state["w"] + first, index).argmax(1).numpy() == fed.data.labels[index]
    assert record["final"]["personal"]["per_client"][idle[0]] == pytest.approx(right.mean())
    saved = torch.load(tmp_path / "clients.pt", weights_only=True)
    mixed = (state["w"] + state["p"])[:, :307200]
    assert torch.equal(saved["fc1.weight"], mixed.view(8, 100, 3072))


def test_a_diverging_run_ends_as_diverged_and_has_no_factors(tmp_path, capsys):
    argv = [*SMALL, "--model", "cifarnet", "--lr", "1e30", "--lr-decay", "1"]
    with pytest.raises(SystemExit) as ended:
        run(fedslr, argv, tmp_path)
    assert ended.value.code == 3
    refused(capsys, "fedslr.py, diverged", fedslr_factors.main, [str(tmp_path)])


# Counting


RANK_100 = 2_297_664  # numbers in a ResNet-18 for 10 classes whose matrices have rank 100 at most


def test_numbers_of_a_factorised_resnet_18_by_hand():
    """Rank 100, or full where that is less, everywhere: kernels of n outputs and m inputs are
    3n x 3m, shortcuts n x m."""
    net = common.Net("resnet18", (3, 32, 32), 10)
    kernels = [(3, 64, 3)] + [(64, 64, 3)] * 4
    for n in (128, 256, 512):
        kernels += [(n // 2, n, 3), (n, n, 3), (n // 2, n, 1), (n, n, 3), (n, n, 3)]
    sizes = [(n * k, m * k) for m, n, k in kernels] + [(10, 512)]
    assert sorted(sizes_of(net)) == sorted(sizes) and len(sizes) == 21
    scales = 2 * (64 * 5 + (128 + 256 + 512) * 5)  # a scale and a shift per channel
    assert sum(a * b for a, b in sizes) + scales == net.d == 11_173_952
    expected = scales + sum(min(a * b, min(100, a, b) * (a + b)) for a, b in sizes)
    full = fedslr.full_ranks(net)
    assert fedslr.size_in_factors(net, full.clamp(max=100)) == expected == RANK_100 < net.d / 2
    assert fedslr.size_in_factors(net, full) == net.d
    assert fedslr.size_in_factors(net, 0 * full) == scales


def test_what_a_run_sends_and_reports(tmp_path):
    """Up dense; down w^0 dense, then what the ranks of the round before say."""
    argv = [*SMALL, "--rounds", "3", "--eval-every", "1", "--lambda", "0.02", "--seed", "3"]
    record, state = run(fedslr, argv, tmp_path)
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
    weights = w[:307200].view(100, -1), w[307300:308300].view(10, 100)
    for weight, r in zip(weights, state["ranks"]):
        s = np.linalg.svd(weight.double().numpy(), compute_uv=False)
        assert 0 < r < len(s) and s[r:].max() < 1e-5 < s[r - 1]
    fed = federation(argv)
    assert rows[-1]["global"] == pytest.approx(fed.evaluate(w), rel=1e-7)
    for part, W in (("gkr", w), ("personal", w + state["p"])):
        expected = common.without_clients(fed.evaluate_clients(W))
        assert rows[-1][part] == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("classes, size, dense", [
    (10, 32, 893.92), (100, 32, 897.60), (200, 64, 902.33)])
def test_table_2_s_closed_forms(classes, size, dense):
    """GB of 1000 rounds in which 10 clients get and send a whole ResNet-18, 4 bytes a weight. The
    paper has 893.92 for every data set."""
    d = common.Net("resnet18", (3, size, size), classes).d
    assert round(1000 * 10 * 2 * 4 * d / 1e9, 2) == dense


def test_the_script_prints_the_last_and_the_best_round_and_the_ranks(tmp_path, capsys):
    def row(round, gkr, mixed, rank):
        one, two = ({"mean": z, "std": 0.1, "worst_decile": 0.2, "loss": 1.5} for z in (gkr, mixed))
        return {"round": round, "gkr": one, "personal": two, "ranks": {"fc1": rank, "fc2": 3},
                "numbers": {"gkr": 1000 + rank, "mixed": 2000 + rank}, "bytes_down": 8}

    rows = [row(1, 0.5, 0.6, 9), row(2, 0.4, 0.7, 5)]
    record = {"algorithm": "fedslr", "args": {"dataset": "shapes", "split": "iid", "seed": 0},
              "rounds": rows, "final": {}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fl.records, "read", lambda path: record)
        patch.setattr(common, "setting", lambda record: "a setting")
        fedslr_ranks.main(tmp_path)
    _, *lines = capsys.readouterr().out.splitlines()
    found = [line.replace(",", "").split() for line in lines[:5]]
    assert found == [["GKR", "last", "2", "0.4000", "0.1000", "0.2000", "1.5000", "1005"],
                     ["GKR", "best", "1", "0.5000", "0.1000", "0.2000", "1.5000", "1009"],
                     ["mixed", "last", "2", "0.7000", "0.1000", "0.2000", "1.5000", "2005"],
                     ["mixed", "best", "2", "0.7000", "0.1000", "0.2000", "1.5000", "2005"],
                     ["ranks", "fc1", "5", "fc2", "3"]]
    assert (tmp_path / "ranks.png").stat().st_size > 5000


# The factorised network (papers/fedslr_factors.py)


def dense(net, w):
    """The network with the weights w [d] in float64."""
    module = net.build().double()
    module.load_state_dict(net.state_dict(w))
    return module


def ranks_by_name(net, ranks):
    names = [net.names[i].removesuffix(".weight") for i in fedslr.matrices(net)]
    return dict(zip(names, ranks.tolist()))


@pytest.mark.parametrize("tau, pairs", [(0.0, []), (0.8, ["inner.last", "fc"]),
                                        (0.9, ["first", "inner.last", "fc"]),
                                        (100.0, ["first", "inner.last", "fc"])])
def test_the_network_rebuilt_from_its_factors(tau, pairs, net):
    """It has the same logits: dense for tau = 0, without any weight for 100. It has as many numbers
    as are counted, but for the kernels of single channels, which stay, and for rank 0, where it
    takes rank 1."""
    v = torch.from_numpy(np.random.default_rng(3).normal(0, 0.2, net.d))
    w, ranks = fedslr.prox_nuclear(net, v, tau)
    module = dense(net, w)
    thin = fedslr_factors.factorised(module, ranks_by_name(net, ranks))
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
    assert not any(isinstance(layer, nn.Sequential) for layer in (module.first, module.fc))


def test_the_two_layers_of_a_convolution(net):
    """Along the rows first, with one half of the stride and of the padding each."""
    v = torch.from_numpy(np.random.default_rng(3).normal(0, 0.2, net.d))
    w, ranks = fedslr.prox_nuclear(net, v, 0.9)
    r = int(ranks[0])
    one, two = fedslr_factors.factorised(dense(net, w), ranks_by_name(net, ranks)).first
    assert one.weight.shape == (r, 3, 1, 5) and two.weight.shape == (6, r, 5, 1) and r > 0
    assert (one.stride, one.padding, one.bias) == ((1, 2), (0, 2), None)
    assert (two.stride, two.padding) == ((2, 1), (2, 0)) and torch.equal(two.bias, w[450:456])


def test_the_command_writes_the_factors_and_times_them(tmp_path, capsys):
    argv = [*SMALL, "--rounds", "3", "--lambda", "0.02"]
    before, state = run(fedslr, argv, tmp_path)
    fedslr_factors.main([str(tmp_path)])
    assert "20 images take" in capsys.readouterr().out
    after = fl.records.read(tmp_path / "result.json")
    latency = after["final"].pop("latency")
    assert after == before and set(latency) == {"dense_ms", "factorised_ms"}
    assert min(latency.values()) > 0
    fed, r = federation(argv), before["final"]["ranks"]["fc1"]
    thin = fedslr_factors.factorised(fed.net.build(), before["final"]["ranks"])
    weights = torch.load(tmp_path / "factors.pt", weights_only=True)
    assert weights["fc1.0.weight"].shape == (r, 3072) and weights["fc1.1.weight"].shape == (100, r)
    thin.load_state_dict(weights)
    x = fed.transform(fed.images[:5])
    torch.testing.assert_close(thin(x), fed.net(state["w"], x), atol=1e-4, rtol=1e-4)
    run(fedslr, [*argv, "--resume"], tmp_path)  # a finished run: the record stays
    assert fl.records.read(tmp_path / "result.json")["final"]["latency"] == latency


def test_folders_without_a_finished_run_of_fedslr_are_refused(tmp_path, capsys):
    def no(words):
        refused(capsys, words, fedslr_factors.main, [str(tmp_path)])

    no("there is no record")
    run(fedavg, [*SMALL, "--rounds", "1"], tmp_path)
    no("fedavg.py, finished; name the --out folder of a finished run of fedslr.py")
    record = fl.records.read(tmp_path / "result.json")
    (tmp_path / "result.json").write_text(fl.records.text({**record, "algorithm": "fedslr"}))
    (tmp_path / "model.pt").write_text("no weights")
    no("model.pt can't be read (UnpicklingError)")
    (tmp_path / "result.json").write_text("no record")
    no("result.json can't be read as a record (JSONDecodeError)")


# Arguments


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100", "tinyimagenet"])
def test_the_settings_are_the_papers(dataset):
    args = fedslr.arguments(["--dataset", dataset])
    assert (args.rounds, args.clients, args.fraction) == (1000, 100, 0.1)
    assert (args.epochs, args.fusion_epochs, args.batch_size) == (2, 1, 20)
    assert (args.lr, args.lr_decay, args.weight_decay, args.momentum) == (0.1, 0.998, 1e-3, 0)
    assert (args.lambda_, args.mu, args.eta_g) == (1e-4, 1e-3, 10)
    assert (args.alpha, args.client_test, args.split) == (0.1, 0, "fedslr")
    assert (args.model, args.transform, args.p_start) == ("resnet18", "fedslr", "copy")
    assert fedslr.arguments(["--dataset", dataset, "--model", "cnn"]).p_start == "zero"


@pytest.mark.parametrize("argv", [["--lambda", "-1"], ["--momentum", "0.9"]])
def test_bad_input_is_refused_in_one_line(argv, capsys):
    refused(capsys, argv[0], fedslr.arguments, argv)
