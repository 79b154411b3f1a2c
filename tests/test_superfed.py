import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import grad

import common
import fedavg
import fl.records
import superfed
from conftest import HERE, QUICK, pixels, run, softmax_gradient

sys.path.append(str(HERE.parent / "checks" / "authors"))
import superfed_v1 as authors

SAME = [*QUICK, "--momentum", "0"]
SMALL = [*QUICK, "--model", "mnistnet", "--rounds", "4", "--start", "0.5", "--lr", "0.05"]
def federation(argv):
    return common.Federation(superfed.arguments(argv))


def unit(z):
    """The gradient of ||z||; 0 at 0."""
    return z / np.linalg.norm(z) if z.any() else z


def local_start(fed, seed, k=0):
    """w^l_0, or with --own-start client k's."""
    return fed.net.init(common.stream(seed, "initialisation", 0, k + 1))


def by_hand(argv, first, eta, mu=0.0, nu=0.0, momentum=0.0, official=False, own_start=False,
            epochs=2):
    """Returns w^f [15] and W^l [K, 15] after rounds with full batches of softmax regression (12
    weights, 3 biases), in float64.

    first: the first round of Phase II, from 0; eta: a function of the round. Every gradient is
    written out.
    """
    fed = federation(argv)
    w_f = fed.initial_weights().double().numpy()
    W_l = [local_start(fed, 0, k * own_start).double().numpy() for k in range(fed.K)]
    paired = np.array([1.0] * 12 + [0.0 if official else 1.0] * 3)
    for t in range(fed.args.rounds):
        sent, sizes = [], []
        for k in fed.sample(t):
            draws = common.stream(0, "algorithm", t, int(k)).random((epochs, 1)).astype(np.float32)
            f, l, u_f, u_l = w_f, W_l[k], 0, 0
            x, y = pixels(fed, fed.split.train[k])
            for e in range(epochs):
                lam = float(draws[e, 0]) if t >= first else 0.0
                g = softmax_gradient((1 - lam * paired) * f + lam * paired * l, x, y)
                a, b = paired * f, paired * l
                cos = unit(a) @ unit(b)
                pull = nu * 2 * cos if t >= first else 0.0  # of nu cos^2, by cos
                if official:
                    near = (1 - lam) * np.concatenate([unit((f - w_f)[:12]), unit((f - w_f)[12:])])
                else:
                    near = 2 * (f - w_f)
                cos_by_a = (unit(b) - cos * unit(a)) / np.linalg.norm(a)
                cos_by_b = (unit(a) - cos * unit(b)) / np.linalg.norm(b)
                g_f = (1 - lam * paired) * g + mu * near + pull * cos_by_a
                g_l = lam * paired * g + pull * cos_by_b
                u_f, u_l = momentum * u_f + g_f, momentum * u_l + g_l
                f, l = f - eta(t) * u_f, l - eta(t) * u_l
            W_l[k] = l
            sent.append(f)
            sizes.append(len(fed.split.train[k]))
        w_f = np.average(sent, axis=0, weights=sizes)
    return w_f, np.array(W_l)


@pytest.fixture
def toy_argv(toy):
    return ["--dataset", toy, "--model", "linear", "--split", "dirichlet-classes", "--alpha", "9",
            "--clients", "3", "--fraction", "0.7", "--rounds", "4", "--epochs", "2",
            "--batch-size", "0", "--lr", "0.3", "--device", "cpu"]


@pytest.mark.parametrize("official, own_start", [(False, False), (False, True), (True, False)])
def test_four_rounds_by_hand(official, own_start, toy_argv, tmp_path):
    """L*R = 2: Phase I has the rounds 0 and 1; the authors', whose code counts from 1, has only the
    first."""
    argv = [*toy_argv, "--client-test", "0.2"]
    eta = (lambda t: 0.3 * 0.995 ** (t + 1)) if official else (lambda t: 0.3)
    w_f, W_l = by_hand(argv, 1 if official else 2, eta, mu=0.2, nu=1.5, momentum=0.9,
                       official=official, own_start=own_start)
    more = ["--mu", "0.2", "--nu", "1.5", "--momentum", "0.9", "--start", "0.5"]
    more += ["--own-start"] * own_start
    _, state = run(authors if official else superfed, [*argv, *more], tmp_path)
    np.testing.assert_allclose(state["w_f"].numpy(), w_f, atol=5e-6)
    np.testing.assert_allclose(state["w_l"].numpy(), W_l, atol=5e-6)


def test_without_phase_two_only_the_proximal_term_is_left(toy_argv, tmp_path):
    w, _ = by_hand(toy_argv, 4, lambda t: 0.3, mu=0.4)
    argv = [*toy_argv, "--start", "1", "--mu", "0.4", "--momentum", "0"]
    record, state = run(superfed, argv, tmp_path)
    np.testing.assert_allclose(state["w_f"].numpy(), w, atol=2e-6)
    assert "lambdas" not in record["rounds"][-1]  # personal is w^f, as in FedAvg


@pytest.mark.parametrize("mix", ["model", "layer"])
def test_without_phase_two_mu_and_nu_it_is_fedavg_bit_for_bit(mix, tmp_path):
    a, w = run(fedavg, SAME, tmp_path / "a")
    argv = [*SAME, "--mix", mix, "--start", "1", "--mu", "0", "--nu", "0"]
    b, state = run(superfed, argv, tmp_path / "b")
    assert torch.equal(w["w"], state["w_f"])
    for part in ("global", "personal"):
        assert a["final"][part] == b["final"][part]


# One client's steps


def small(mix="model", mu=0.0, nu=0.0, decay=0.0):
    """Returns a network with two layers, its client_update without momentum, a client's w^f and
    w^l, and two minibatches with their lambdas, in float64."""
    net, rng = common.Net("mnistnet", (1, 2, 2), 3), np.random.default_rng(0)
    args = SimpleNamespace(mix=mix, mu=mu, nu=nu, momentum=0.0, weight_decay=decay)
    w_f, w_l = (torch.from_numpy(rng.normal(0, 0.3, net.d)) for _ in range(2))

    def batch():
        lam = torch.from_numpy(rng.uniform(0.2, 0.8, 2 if mix == "layer" else 1))
        x = torch.from_numpy(rng.random((6, 1, 2, 2)))
        return common.Batch(x, torch.arange(6) % 3, torch.ones(6).double(), lam)

    return net, superfed.local_training(net, args), w_f, w_l, batch(), batch()


def gradients(client_update, w_f, w_l, *batches, phase_two=1.0):
    """Returns what the last of these minibatches subtracts from w^f and w^l at eta = 1, and both
    before it."""
    shared = torch.tensor(1.0).double(), torch.tensor(phase_two).double()
    before = client_update(w_f, w_l, [batches[:-1]], *shared)
    after = client_update(w_f, w_l, [batches], *shared)
    return before[0] - after[0], before[1] - after[1], *before


@pytest.mark.parametrize("mix", ["model", "layer"])
def test_gradient_against_a_numerical_derivative_of_equation_3(mix):
    """On the second minibatch, when w^f has moved away from w^g."""
    net, client_update, w_g, w_l, first, b = small(mix, mu=0.7, nu=1.3)
    g_f, g_l, w_f, w_l = gradients(client_update, w_g, w_l, first, b)
    sizes, layers = [400, 100, 300, 3], [0, 0, 1, 1]  # weights and biases of 4-100 and 100-3

    def objective(w_f, w_l):
        mixed = []
        for i, (f, l) in enumerate(zip(w_f.split(sizes), w_l.split(sizes))):
            lam = float(b.draw[layers[i] if mix == "layer" else 0])
            mixed.append((1 - lam) * f + lam * l)
        hidden = F.relu(b.x.flatten(1) @ mixed[0].view(100, 4).T + mixed[1])
        loss = F.cross_entropy(hidden @ mixed[2].view(3, 100).T + mixed[3], b.y)
        cos_squared = (w_f @ w_l) ** 2 / (w_f @ w_f) / (w_l @ w_l)
        return loss + 1.3 * cos_squared + 0.7 * ((w_f - w_g) ** 2).sum()

    rng = np.random.default_rng(5)
    for _ in range(10):
        v = torch.from_numpy(rng.normal(size=net.d)) / net.d**0.5
        h = 1e-5 * v
        slopes = ((objective(w_f + h, w_l) - objective(w_f - h, w_l)) / 2e-5,
                  (objective(w_f, w_l + h) - objective(w_f, w_l - h)) / 2e-5)
        assert float(g_f @ v) == pytest.approx(float(slopes[0]), abs=1e-8)
        assert float(g_l @ v) == pytest.approx(float(slopes[1]), abs=1e-8)


@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
def test_the_end_points_share_the_gradient_of_the_mixture(lam):
    net, client_update, w_f, w_l, _, b = small()
    w = (1 - lam) * w_f + lam * w_l
    g = grad(lambda w: common.cross_entropy(net(w, b.x), b))(w)
    b = b._replace(draw=torch.tensor([lam]).double())
    g_f, g_l, *_ = gradients(client_update, w_f, w_l, b)
    torch.testing.assert_close(g_f, (1 - lam) * g)
    torch.testing.assert_close(g_l, lam * g)


def test_layer_mixing_with_equal_lambdas_is_model_mixing():
    found, (_, _, w_f, w_l, first, b) = [], small()
    for mix, lam in (("model", [0.3]), ("layer", [0.3, 0.3]), ("layer", [0.3, 0.4])):
        client_update, draw = small(mix, mu=0.7, nu=1.3)[1], torch.tensor(lam).double()
        batches = first._replace(draw=draw), b._replace(draw=draw)
        found.append(gradients(client_update, w_f, w_l, *batches))
    model, same, other = found
    assert torch.equal(model[0], same[0]) and torch.equal(model[1], same[1])
    assert not torch.equal(model[0], other[0]) and not torch.equal(model[1], other[1])


def test_cosine_has_no_gradient_between_orthogonal_vectors():
    _, without, w_f, w_l, _, b = small(nu=0.0)
    with_it = small(nu=5.0)[1]
    orthogonal = w_l - (w_l @ w_f) / (w_f @ w_f) * w_f
    for other, equal in ((orthogonal, True), (w_l + w_f, False)):
        found = (gradients(update, w_f, other, b)[:2] for update in (without, with_it))
        for one, two in zip(*found):
            assert torch.allclose(one, two, atol=1e-12) is equal


def test_phase_one_trains_the_federated_model_alone():
    net, client_update, w_g, w_l, first, b = small("layer", mu=0.7, nu=1.3)
    g_f, g_l, w_f, _ = gradients(client_update, w_g, w_l, first, b, phase_two=0.0)
    assert not g_l.any() and not torch.equal(w_f, w_g)
    g = grad(lambda w: common.cross_entropy(net(w, b.x), b))(w_f)
    torch.testing.assert_close(g_f, g + 0.7 * 2 * (w_f - w_g))


def test_weight_decay_adds_to_both_gradients():
    _, without, w_f, w_l, _, b = small()
    with_it = small(decay=0.1)[1]
    plain, decayed = (gradients(update, w_f, w_l, b) for update in (without, with_it))
    torch.testing.assert_close(decayed[0] - plain[0], 0.1 * w_f)
    torch.testing.assert_close(decayed[1] - plain[1], 0.1 * w_l)


# Who keeps what


def spy(monkeypatch, train=lambda own, S: own):
    """Replaces Federation.train by train(own, S), and notes what every call gets."""
    calls = []

    def noting(self, client_update, S, t, own, shared, draw):
        eta, phase_two = map(float, shared)
        calls.append(SimpleNamespace(S=list(S), eta=eta, phase_two=phase_two, own=own, draw=draw))
        return train(own, S)

    monkeypatch.setattr(common.Federation, "train", noting)
    return calls


def test_only_the_federated_model_is_averaged_and_the_local_one_stays(tmp_path, monkeypatch):
    """Training is replaced: client k returns w^f = k and w^l = 1000 + k everywhere."""
    argv = [*SMALL, "--split", "dirichlet-classes", "--alpha", "1", "--rounds", "2", "--seed", "3"]

    def constant(own, S):
        k = torch.tensor(S, dtype=torch.float)[:, None]
        return k + 0 * own[0], 1000 + k + 0 * own[1]

    calls = spy(monkeypatch, constant)
    record, state = run(superfed, argv, tmp_path)
    first, last = calls
    n = np.array([len(index) for index in federation(argv).split.train])
    assert len(set(n[last.S])) > 1 and set(first.S) - set(last.S)
    means = [n[call.S] @ call.S / n[call.S].sum() for call in calls]
    for w_f, mean in zip((*last.own[0], state["w_f"]), (*means[:1] * 4, means[1]), strict=True):
        torch.testing.assert_close(w_f, torch.full_like(w_f, mean))
    for k in range(8):
        fresh = local_start(federation(argv), 3)
        want = torch.full_like(fresh, 1000 + k) if k in first.S + last.S else fresh
        assert torch.equal(state["w_l"][k], want)
    d = state["w_f"].numel()
    assert record["bytes_up"] == record["bytes_down"] == 2 * 4 * 4 * d  # rounds, clients, bytes


@pytest.mark.parametrize("module, phases, decay", [
    (superfed, [0, 0, 0, 1, 1], 1.0), (authors, [0, 1, 1, 1, 1], 0.995)])
def test_phases_and_learning_rate(module, phases, decay, tmp_path, monkeypatch, capsys):
    """L*R = 2.5: t >= 2.5 from 0; in the authors' code r >= int(2.5) from 1, with eta * .995^r."""
    calls, argv = spy(monkeypatch), [*SMALL, "--rounds", "5"]
    if module == authors:  # its own decay is a default
        i = argv.index("--lr-decay")
        del argv[i : i + 2]
    run(module, argv, tmp_path)
    assert [call.phase_two for call in calls] == phases
    want = [0.05 * decay**r for r in range(1, 6)]
    np.testing.assert_allclose([call.eta for call in calls], want, rtol=1e-6)
    said = capsys.readouterr().out
    assert f"phases  Phase II begins with round {1 + phases.index(1)}\n" in said  # counted from 1


@pytest.mark.parametrize("L, R, first, official", [
    (0.4, 200, 80, 79), (0.8, 200, 160, 159), (0.5, 5, 3, 1), (0.29, 100, 29, 27),
    (0.07, 100, 7, 6), (0, 5, 0, 0), (1, 5, 5, 4)])
def test_the_first_round_of_phase_two(L, R, first, official):
    """ceil(L*R), from 0; in the authors' code int(L*R) - 1. In float64 .29 * 100 is below 29 and
    .07 * 100 is above 7. With L = 1 the last round of the authors' code is in Phase II."""
    args = SimpleNamespace(start=L, rounds=R)
    assert superfed.first_round_of_phase_two(args) == first
    assert authors.first_round_of_phase_two(args) == official


@pytest.mark.parametrize("own", [False, True])
def test_local_models_start_alike_and_other_than_the_federated_one(own, tmp_path, monkeypatch):
    calls = spy(monkeypatch)
    run(superfed, [*SMALL, "--rounds", "1"] + ["--own-start"] * own, tmp_path)
    w_f, w_l = calls[0].own  # of the four clients of the first round
    assert torch.equal(w_f[0], w_f[1]) and not torch.equal(w_f[0], w_l[0])
    assert torch.equal(w_l[0], w_l[1]) is not own


@pytest.mark.parametrize("mix", ["model", "layer"])
def test_every_minibatch_has_its_own_lambda_and_so_has_every_layer(mix, tmp_path, monkeypatch):
    calls = spy(monkeypatch)
    run(superfed, [*SMALL, "--model", "cnn", "--mix", mix, "--rounds", "1"], tmp_path)
    lam = calls[0].draw(np.random.default_rng(0), 2000)
    assert lam.min() >= 0 and lam.max() < 1
    assert lam.mean() == pytest.approx(0.5, abs=0.02)
    assert lam.var() == pytest.approx(1 / 12, abs=0.01)
    assert lam.shape == (2000, 5)  # the CNN's layers; Model Mixing takes the first draw
    if mix == "layer":
        assert np.abs(np.corrcoef(lam.T) - np.eye(5)).max() < 0.1


# Evaluation


@pytest.mark.parametrize("share, part", [(0.0, "train"), (0.2, "val")])
def test_each_choice_of_lambda(share, part, monkeypatch):
    """W is lambda. On the images for the choice the loss is least at .2
    and .4, the accuracy best at .3 and .7; on test images it is best at .6. The smaller lambda of a
    tie is taken. Each client has 5 training, 4 validation and 2 test images."""

    class Clients:
        args = SimpleNamespace(client_val=share)
        split = common.Split(train=[[10, 11, 12, 13, 14], [20, 21, 22, 23, 24]],
                             val=[[15, 16, 17, 18], [25, 26, 27, 28]], test=[[30, 31], [40, 41]])

        def evaluate_clients(self, W, images=None):
            models = W(np.array([1]))
            lam = round(float(models[0, 0]), 4)
            assert torch.equal(models, torch.full((1, 3), lam))
            of_choice = {"mean": 0.9 if lam in (0.3, 0.7) else 0.2,
                         "loss": 0.5 if lam in (0.2, 0.4) else 2.0}
            if images is not None:
                assert not share and images == [[10, 11], [20, 21]]  # as many as test images
                return of_choice
            on_val = {f"val_{name}": value for name, value in of_choice.items()} if share else {}
            mean = 0.8 if lam == 0.6 else 0.1
            return {"mean": mean, "std": lam, "loss": 9.0, "per_client": [lam], **on_val}

    w_l = torch.stack([torch.full((3,), torch.nan), torch.ones(3)])
    found = superfed.measure_mixtures(Clients(), torch.zeros(3), w_l)
    by_loss = {"lambda": 0.2, f"{part}_mean": 0.2, f"{part}_loss": 0.5,
               "mean": 0.1, "std": 0.2, "loss": 9.0}
    by_accuracy = {"lambda": 0.3, f"{part}_mean": 0.9, f"{part}_loss": 2.0,
                   "mean": 0.1, "std": 0.3, "loss": 9.0}
    if part == "train":  # saturated accuracies decide nothing
        assert found["personal"] == {**by_loss, "per_client": [0.2]}
        assert found["personal@train-accuracy"] == by_accuracy
    else:
        assert found["personal"] == {**by_accuracy, "per_client": [0.3]}
        assert found["personal@val-loss"] == by_loss
    assert found["personal@test"]["lambda"] == 0.6 and found["personal@test"]["mean"] == 0.8
    assert found["personal@lambda=0.5"]["std"] == 0.5
    assert found["personal@lambda=0"]["mean"] == 0.1
    grid = [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1]
    assert [at["lambda"] for at in found["lambdas"]] == grid
    assert all("per_client" not in at for at in found["lambdas"])


def test_lambda_is_chosen_by_the_loss_on_training_images(tmp_path):
    """In a whole run: the loss and the accuracy of the mixtures on as many training images of a
    client as it has test images."""
    argv = [*SMALL, "--epochs", "3"]
    record, state = run(superfed, argv, tmp_path)
    fed, final = federation(argv), record["final"]
    images = [train[: len(test)] for train, test in zip(fed.split.train, fed.split.test)]
    assert {len(index) for index in images} == {10}
    mixtures = ((1 - lam) * state["w_f"] + lam * state["w_l"] for lam in np.arange(11) / 10)
    found = [fed.evaluate_clients(W, images) for W in mixtures]
    losses, means = [[at[name] for at in found] for name in ("loss", "mean")]
    assert [at["train_loss"] for at in final["lambdas"]] == pytest.approx(losses, abs=1e-6)
    assert [at["train_mean"] for at in final["lambdas"]] == pytest.approx(means, abs=1e-6)
    assert final["personal"]["lambda"] == pytest.approx(np.argmin(losses) / 10)
    assert final["personal@train-accuracy"]["lambda"] == pytest.approx(np.argmax(means) / 10)
    assert final["personal@test"]["mean"] == max(at["mean"] for at in final["lambdas"])


def test_the_end_points_of_the_grid_are_the_two_models(tmp_path):
    argv = [*SMALL, "--mix", "layer"]
    record, state = run(superfed, argv, tmp_path)
    fed, row = federation(argv), record["rounds"][-1]
    for at, W in ((0, state["w_f"]), (10, state["w_l"])):
        expected = fed.evaluate_clients(W)
        for name in ("mean", "std", "loss", "ece", "mce"):
            assert row["lambdas"][at][name] == pytest.approx(expected[name], abs=1e-6)
    assert record["final"]["personal@test"] == pytest.approx(row["personal@test"], rel=1e-7)


def test_plots(tmp_path, monkeypatch):
    """lambdas.png: 11 points with bars. curves.png: the line at the start of Phase II, and none
    without one."""
    from matplotlib import pyplot

    figures, close = [], pyplot.close
    monkeypatch.setattr(pyplot, "close", lambda figure: (figures.append(figure), close(figure)))
    run(superfed, [*SMALL, "--plot", "--eval-every", "1"], tmp_path / "a")
    phases, *_, lambdas = figures
    figures.clear()
    record = fl.records.read(tmp_path / "a" / "result.json")
    x, y = lambdas.axes[0].containers[0].lines[0].get_data()
    assert np.allclose(x, np.arange(11) / 10)
    assert np.allclose(y, [at["mean"] for at in record["final"]["lambdas"]])
    assert "shapes" in lambdas.get_suptitle() and "$w^f$" in lambdas.axes[0].get_xlabel()
    std = np.array([at["std"] for at in record["final"]["lambdas"]])
    bars = np.array(lambdas.axes[0].containers[0].lines[2][0].get_segments())[:, :, 1]
    ends = np.stack([(y - std).clip(min=0), (y + std).clip(max=1)], 1)  # accuracies are in [0, 1]
    assert (y < std).any() and np.allclose(bars, ends)
    for axis, key in zip(phases.axes, ("top1", "loss")):
        curve, _, start = axis.lines  # global, personal
        assert np.allclose(curve.get_ydata(), [row["global"][key] for row in record["rounds"]])
        assert list(start.get_xdata()) == [2.5, 2.5]  # rounds 1 and 2 are Phase I
    run(superfed, [*SMALL, "--plot", "--start", "1"], tmp_path / "b")
    assert all(len(axis.lines) == 2 for axis in figures[0].axes)
    assert (tmp_path / "b" / "curves.svg").exists()
    assert not (tmp_path / "b" / "lambdas.png").exists()


# The defaults: facts of the paper's experiments, data set by data set


@pytest.mark.parametrize("dataset, mix, R, K, C, L", [
    ("cifar10", "model", 200, 100, 0.1, 0.4), ("cifar10", "layer", 200, 100, 0.1, 0.8),
    ("cifar100", "model", 300, 100, 0.1, 0.5), ("emnist", "model", 100, None, 0.01, 0.4),
    ("tinyimagenet", "model", 500, None, 0.03, 0.4)])
def test_the_settings_are_the_papers(dataset, mix, R, K, C, L):
    args = superfed.arguments(["--dataset", dataset, "--mix", mix])
    assert (args.rounds, args.fraction, args.start) == (R, C, L)
    assert (args.epochs, args.batch_size, args.lr, args.lr_decay) == (10, 20, 0.01, 1)
    assert (args.momentum, args.weight_decay, args.mu, args.nu) == (0.9, 0, 0.01, 2)
    assert args.client_test == 0.2
    split = args.split, args.per_client, args.clients
    assert split == ("shards", 2, K) if K else args.split == "semantic"
    assert (args.model, args.transform) == ("cnn", "scale")
