import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import common
import fedavg
import superfed
from byhand import BARE, FLAGS, World, close, spy
from conftest import HERE, QUICK, run

sys.path.append(str(HERE.parent / "checks" / "authors"))
import superfed_v1 as authors

SMALL = [*QUICK, "--model", "mnistnet", "--rounds", "4", "--start", "0.5", "--lr", "0.05"]


def federation(argv):
    return common.Federation(superfed.arguments(argv))


def unit(z):
    """The gradient of ||z||; 0 at 0."""
    return z / np.linalg.norm(z) if z.any() else z


def by_hand(world, first, eta, mu, nu, momentum, official, own_start):
    """Returns w^f [15] and W^l [K, 15] after rounds of two full batches, in float64. first: the
    first round of Phase II, from 0. Every gradient is written out."""
    init = [world.fed.net.init(common.stream(0, "initialisation", 0, k * own_start + 1))
            for k in range(3)]
    w_f, W_l = world.w, [w.double().numpy() for w in init]
    paired = np.array([1.0] * 12 + [0.0 if official else 1.0] * 3)
    for t, S in enumerate(world.S):
        sent = []
        for k in S:
            draws = common.stream(0, "algorithm", t, k).random((2, 1)).astype(np.float32)
            f, l, u_f, u_l = w_f, W_l[k], 0, 0
            for e in range(2):
                lam = float(draws[e, 0]) if t >= first else 0.0
                g = world.gradient((1 - lam * paired) * f + lam * paired * l, k)
                a, b = paired * f, paired * l
                cos = unit(a) @ unit(b)
                pull = nu * 2 * cos if t >= first else 0.0  # of nu cos^2, by cos
                near = 2 * (f - w_f)
                if official:
                    near = (1 - lam) * np.concatenate([unit((f - w_f)[:12]), unit((f - w_f)[12:])])
                cos_by_a = (unit(b) - cos * unit(a)) / np.linalg.norm(a)
                cos_by_b = (unit(a) - cos * unit(b)) / np.linalg.norm(b)
                g_f = (1 - lam * paired) * g + mu * near + pull * cos_by_a
                g_l = lam * paired * g + pull * cos_by_b
                u_f, u_l = momentum * u_f + g_f, momentum * u_l + g_l
                f, l = f - eta(t) * u_f, l - eta(t) * u_l
            W_l[k] = l
            sent.append(f)
        w_f = world.mean(sent, S)
    return w_f, np.array(W_l)


@pytest.mark.parametrize("official, own_start", [(False, False), (False, True), (True, False)])
def test_five_rounds_by_hand(official, own_start, toy, tmp_path, capsys):
    """L*R = 2.5: Phase I has the rounds 0, 1 and 2; the authors', whose code counts from 1, has
    only the first, with eta * .995^r."""
    argv = ["--dataset", toy, *FLAGS, "--rounds", "5", "--batch-size", "0", "--momentum", "0.9"]
    w_f, W_l = by_hand(World(federation(argv)), 1 if official else 3,
                       lambda t: 0.3 * 0.995 ** (t + 1) if official else 0.3,
                       0.2, 1.5, 0.9, official, own_start)
    argv += ["--mu", "0.2", "--nu", "1.5", "--start", "0.5", *["--own-start"] * own_start]
    record, state = run(authors if official else superfed, argv, tmp_path)
    close(state, w_f=w_f, w_l=W_l)
    assert record["bytes_up"] == record["bytes_down"] == 5 * 2 * 4 * 15  # clients, bytes, weights
    begin = f"phases  Phase II begins with round {2 if official else 4}\n"  # counted from 1
    assert begin in capsys.readouterr().out


@pytest.mark.parametrize("mix", ["model", "layer"])
def test_without_phase_two_mu_and_nu_it_is_fedavg_bit_for_bit(mix, toy, tmp_path):
    argv = ["--dataset", toy, *FLAGS]
    a, w = run(fedavg, argv, tmp_path / "a")
    b, state = run(superfed, [*argv, "--mix", mix, "--start", "1", "--mu", "0"], tmp_path / "b")
    assert torch.equal(w["w"], state["w_f"])
    assert all(a["final"][part] == b["final"][part] for part in ("global", "personal"))


@pytest.mark.parametrize("L, R, first, official", [
    (0.4, 200, 80, 79), (0.8, 200, 160, 159), (0.5, 5, 3, 1), (0.29, 100, 29, 27),
    (0.07, 100, 7, 6), (0, 5, 0, 0), (1, 5, 5, 4)])
def test_the_first_round_of_phase_two(L, R, first, official):
    """ceil(L*R), from 0; in the authors' code int(L*R) - 1. In float64 .29 * 100 is below 29 and
    .07 * 100 is above 7. With L = 1 the last round of the authors' code is in Phase II."""
    args = SimpleNamespace(start=L, rounds=R)
    assert superfed.first_round_of_phase_two(args) == first
    assert authors.first_round_of_phase_two(args) == official


@pytest.mark.parametrize("mix, phase_two", [("model", 1.0), ("layer", 1.0), ("layer", 0.0)])
def test_a_step_against_a_numerical_derivative_of_equation_3(mix, phase_two):
    """On the second minibatch of 4-100-3, when w^f has moved away from w^g, with a weight decay of
    .1. In Phase I lambda and nu are 0, and w^l only decays."""
    net, rng = common.Net("mnistnet", (1, 2, 2), 3), np.random.default_rng(0)
    args = SimpleNamespace(mix=mix, mu=0.7, nu=1.3, momentum=0.0, weight_decay=0.1)
    w_g, w_l = (torch.from_numpy(rng.normal(0, 0.3, net.d)) for _ in range(2))
    first, b = (common.Batch(torch.from_numpy(rng.random((6, 1, 2, 2))), torch.arange(6) % 3,
                             torch.ones(6).double(), torch.from_numpy(rng.uniform(0.2, 0.8, 2)))
                for _ in range(2))
    client_update = superfed.local_training(net, args)
    shared = torch.tensor(1.0).double(), torch.tensor(phase_two).double()  # eta = 1
    w_f, w_l = client_update(w_g, w_l, [[first]], *shared)
    after = client_update(w_g, w_l, [[first, b]], *shared)
    start = client_update(w_g, w_l, [[first]], *shared)
    g_f, g_l = (before - end for before, end in zip(start, after))
    w_f, w_l = start

    def objective(w_f, w_l):
        mixed = []
        for i, (f, l) in enumerate(zip(*(w.split([400, 100, 300, 3]) for w in (w_f, w_l)))):
            lam = phase_two * float(b.draw[i // 2 if mix == "layer" else 0])
            mixed.append((1 - lam) * f + lam * l)
        hidden = F.relu(b.x.flatten(1) @ mixed[0].view(100, 4).T + mixed[1])
        loss = F.cross_entropy(hidden @ mixed[2].view(3, 100).T + mixed[3], b.y)
        cos_squared = (w_f @ w_l) ** 2 / (w_f @ w_f) / (w_l @ w_l)
        decay = 0.05 * (w_f @ w_f + w_l @ w_l)
        return loss + phase_two * 1.3 * cos_squared + 0.7 * ((w_f - w_g) ** 2).sum() + decay

    for _ in range(10):
        v = torch.from_numpy(rng.normal(size=net.d)) / net.d**0.5
        h = 1e-5 * v
        slopes = ((objective(w_f + h, w_l) - objective(w_f - h, w_l)) / 2e-5,
                  (objective(w_f, w_l + h) - objective(w_f, w_l - h)) / 2e-5)
        assert float(g_f @ v) == pytest.approx(float(slopes[0]), abs=1e-8)
        assert float(g_l @ v) == pytest.approx(float(slopes[1]), abs=1e-8)


def test_every_minibatch_has_its_own_lambdas_one_for_each_layer(tmp_path, monkeypatch):
    calls = spy(monkeypatch, lambda own, S: own)
    run(superfed, [*SMALL, "--model", "cnn", "--rounds", "1"], tmp_path)
    drawn, again = calls[0].options["draw"], np.random.default_rng(0)
    assert np.array_equal(drawn(np.random.default_rng(0), 7), again.random((7, 5)))


# Evaluation


@pytest.mark.parametrize("share, part", [(0.0, "train"), (0.2, "val")])
def test_each_choice_of_lambda(share, part):
    """W is lambda. On the images for the choice the loss is least at .2 and .4, the accuracy best
    at .3 and .7; on test images it is best at .6. The smaller lambda of a tie is taken. Each client
    has 5 training, 4 validation and 2 test images."""

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
    else:
        assert found["personal"] == {**by_accuracy, "per_client": [0.3]}
    assert found["lambdas"][2] == by_loss and found["lambdas"][3] == by_accuracy
    assert found["personal@test"]["lambda"] == 0.6 and found["personal@test"]["mean"] == 0.8
    grid = [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1]
    assert [at["lambda"] for at in found["lambdas"]] == grid
    assert all("per_client" not in at for at in found["lambdas"])


def test_a_run_measures_and_draws_the_mixtures(tmp_path, monkeypatch, capsys):
    """Lambda is chosen by the loss on as many training images of a client as it has test images.
    lambdas.png: 11 points with bars. curves.png: the line at the start of Phase II."""
    from matplotlib import pyplot

    figures, close = [], pyplot.close
    monkeypatch.setattr(pyplot, "close", lambda figure: (figures.append(figure), close(figure)))
    argv = [*SMALL, "--limit", "200", "--mix", "layer"]
    record, state = run(superfed, [*argv, "--plot", "--eval-every", "1"], tmp_path / "a")
    fed, final = federation(argv), record["final"]
    images = [train[: len(test)] for train, test in zip(fed.split.train, fed.split.test)]
    assert {len(index) for index in images} == {5}
    for lam, at in zip(np.arange(11) / 10, final["lambdas"]):
        W = (1 - lam) * state["w_f"] + lam * state["w_l"]
        found, train = fed.evaluate_clients(W), fed.evaluate_clients(W, images)
        found.update(train_loss=train["loss"], train_mean=train["mean"])
        for name in ("mean", "std", "loss", "ece", "mce", "train_loss", "train_mean"):
            assert at[name] == pytest.approx(found[name], abs=1e-6)
    best = min(final["lambdas"], key=lambda at: at["train_loss"])
    assert final["personal"]["lambda"] == best["lambda"]
    assert f", {best['lambda']:g}: {best['mean']:.3f}" in capsys.readouterr().out
    phases, *_, lambdas = figures
    x, y = lambdas.axes[0].containers[0].lines[0].get_data()
    assert np.allclose(x, np.arange(11) / 10)
    assert np.allclose(y, [at["mean"] for at in final["lambdas"]])
    std = np.array([at["std"] for at in final["lambdas"]])
    bars = np.array(lambdas.axes[0].containers[0].lines[2][0].get_segments())[:, :, 1]
    ends = np.stack([(y - std).clip(min=0), (y + std).clip(max=1)], 1)  # accuracies are in [0, 1]
    assert (y < std).any() and np.allclose(bars, ends)
    for axis, key in zip(phases.axes, ("top1", "loss")):
        curve, _, start = axis.lines  # global, personal
        assert np.allclose(curve.get_ydata(), [row["global"][key] for row in record["rounds"]])
        assert list(start.get_xdata()) == [2.5, 2.5]  # rounds 1 and 2 are Phase I


def test_layers_that_share_their_lambda_are_noted(toy, tmp_path, capsys):
    (tmp_path / "net.py").write_text("""
import torch
class Net(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.p = torch.nn.ParameterList([torch.randn(9, 4), torch.randn(classes, 9)])
    def forward(self, x):
        return x.flatten(1) @ self.p[0].T @ self.p[1].T
""")
    run(superfed, ["--dataset", toy, *BARE, "--split", "iid", "--mix", "layer", "--model",
                   f"{tmp_path}/net.py:Net"], tmp_path)
    said = capsys.readouterr().out
    assert "several layers' weights, which share one lambda, are in p" in said


def test_without_phase_two_there_is_nothing_to_draw_of_it(toy, tmp_path, capsys):
    argv = ["--dataset", toy, *BARE, "--split", "iid", "--plot", "--start", "1"]
    record, _ = run(superfed, argv, tmp_path)
    assert "lambdas" not in record["rounds"][-1]  # personal is w^f, as in FedAvg
    said = capsys.readouterr().out
    assert "phases  no Phase II" in said and "which share one lambda" not in said
    assert (tmp_path / "curves.svg").exists() and not (tmp_path / "lambdas.png").exists()
