import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import grad

import common
import fedavg
import superfed
from conftest import QUICK, killed, paths, pixels, refused, run, same, softmax_gradient

SAME = [*QUICK, "--momentum", "0.9"]
SMALL = [*QUICK, "--model", "mnistnet", "--rounds", "4", "--start", "0.5", "--lr", "0.05"]
BOTH = [(mix, version) for mix in ("model", "layer") for version in ("paper", "official")]


def federation(argv):
    return common.Federation(superfed.arguments(argv))


def unit(z):
    """The gradient of ||z||; 0 at 0."""
    return z / np.linalg.norm(z) if z.any() else z


def local_start(fed, seed, k=0):
    """w^l_0, or with --own-start client k's."""
    return fed.net.init(common.stream(seed, "initialisation", 0, k + 1))


def by_hand(argv, first, eta, mu=0.0, nu=0.0, momentum=0.0, official=False, own_start=False, epochs=2):
    """Rounds with full batches of softmax regression (12 weights, 3 biases), in float64: w^f [15], W^l [K, 15].

    first: the first round of Phase II, from 0; eta: a function of the round. Every gradient is written out.
    """
    fed = federation(argv)
    w_f = fed.initial_weights().double().numpy()
    W_l = [local_start(fed, 0, k if own_start else 0).double().numpy() for k in range(fed.K)]
    paired = np.array([1.0] * 12 + [0.0 if official else 1.0] * 3)
    for t in range(fed.args.rounds):
        sent, sizes = [], []
        for k in fed.sample(t):
            draws = common.stream(0, "algorithm", t, int(k)).random((epochs, 1)).astype(np.float32)
            f, l, u_f, u_l = w_f, W_l[k], 0, 0
            for e in range(epochs):
                lam = float(draws[e, 0]) if t >= first else 0.0
                g = softmax_gradient((1 - lam * paired) * f + lam * paired * l, *pixels(fed, fed.split.train[k]))
                a, b = paired * f, paired * l
                cos = unit(a) @ unit(b)
                pull = nu * 2 * cos if t >= first else 0.0  # of nu cos^2, by cos
                if official:
                    near = (1 - lam) * np.concatenate([unit((f - w_f)[:12]), unit((f - w_f)[12:])])
                else:
                    near = 2 * (f - w_f)
                g_f = (1 - lam * paired) * g + mu * near + pull * (unit(b) - cos * unit(a)) / np.linalg.norm(a)
                g_l = lam * paired * g + pull * (unit(a) - cos * unit(b)) / np.linalg.norm(b)
                u_f, u_l = momentum * u_f + g_f, momentum * u_l + g_l
                f, l = f - eta(t) * u_f, l - eta(t) * u_l
            W_l[k] = l
            sent.append(f)
            sizes.append(len(fed.split.train[k]))
        w_f = np.average(sent, axis=0, weights=sizes)
    return w_f, np.array(W_l)


@pytest.fixture
def toy_argv(toy):
    return ["--dataset", toy, "--model", "linear", "--split", "dirichlet-classes", "--alpha", "9", "--clients", "3",
            "--fraction", "0.7", "--rounds", "4", "--epochs", "2", "--batch-size", "0", "--lr", "0.3", "--device", "cpu"]


@pytest.mark.parametrize("own_start", [False, True])
@pytest.mark.parametrize("official", [False, True])
def test_four_rounds_by_hand(official, own_start, toy_argv, tmp_path):
    """L*R = 2: Phase I has the rounds 0 and 1 here; the official code's, which count from 1, only the first."""
    argv = [*toy_argv, "--client-test", "0.2"]
    eta = (lambda t: 0.3 * 0.995 ** (t + 1)) if official else (lambda t: 0.3)
    w_f, W_l = by_hand(argv, 1 if official else 2, eta, mu=0.2, nu=1.5, momentum=0.9, official=official, own_start=own_start)
    more = ["--mu", "0.2", "--nu", "1.5", "--momentum", "0.9", "--start", "0.5", "--as", "official" if official else "paper"]
    more += ["--own-start"] * own_start
    _, state = run(superfed, [*argv, *more], tmp_path)
    np.testing.assert_allclose(state["w_f"].numpy(), w_f, atol=5e-6)
    np.testing.assert_allclose(state["w_l"].numpy(), W_l, atol=5e-6)


def test_without_phase_two_only_the_proximal_term_is_left(toy_argv, tmp_path):
    w, _ = by_hand(toy_argv, 4, lambda t: 0.3, mu=0.4)
    record, state = run(superfed, [*toy_argv, "--start", "1", "--mu", "0.4", "--momentum", "0"], tmp_path)
    np.testing.assert_allclose(state["w_f"].numpy(), w, atol=2e-6)
    assert "lambdas" not in record["rounds"][-1]  # personal is w^f, as in FedAvg


@pytest.mark.parametrize("mix", ["model", "layer"])
def test_without_phase_two_mu_and_nu_it_is_fedavg_bit_for_bit(mix, tmp_path):
    a, w = run(fedavg, SAME, tmp_path / "a")
    b, state = run(superfed, [*SAME, "--mix", mix, "--start", "1", "--mu", "0", "--nu", "0"], tmp_path / "b")
    assert torch.equal(w["w"], state["w_f"])
    for part in ("global", "personal"):
        assert a["final"][part] == b["final"][part]


# One client's step


def small(mix="model", version="paper", mu=0.0, nu=0.0, seed=0):
    """A step without momentum of a network with two layers, in float64; its net, w^f, w^l, w^g, and a batch with lambda."""
    net = common.Net("mnistnet", (1, 2, 2), 3)
    rng = np.random.default_rng(seed)
    w_f, w_l, w_g = (torch.from_numpy(rng.normal(0, 0.3, net.d)) for _ in range(3))
    lam = torch.from_numpy(rng.uniform(0.2, 0.8, 2 if mix == "layer" else 1))
    batch = common.Batch(torch.from_numpy(rng.random((6, 1, 2, 2))), torch.arange(6) % 3, torch.ones(6).double(), lam)
    step = superfed.client_step(net, SimpleNamespace(mix=mix, as_=version, mu=mu, nu=nu, momentum=0.0, weight_decay=0.0))
    return net, step, w_f, w_l, w_g, batch


def gradients(step, w_f, w_l, w_g, batch, phase_two=1.0):
    """What the step subtracts at eta = 1."""
    zero, one = torch.zeros_like(w_f), torch.tensor(1.0).double()
    new_f, new_l, _, _ = step((w_f, w_l, zero, zero), batch, one, torch.tensor(phase_two).double(), w_g)
    return w_f - new_f, w_l - new_l


@pytest.mark.parametrize("mix, version", BOTH)
def test_gradient_against_a_numerical_derivative_of_equation_3(mix, version):
    net, step, w_f, w_l, w_g, batch = small(mix, version, mu=0.7, nu=1.3)
    sizes, layers = [400, 100, 300, 3], [0, 0, 1, 1]  # weights and biases of the layers 4-100 and 100-3

    def objective(w_f, w_l):
        tensors = [z.split(sizes) for z in (w_f, w_l, w_g)]
        mixed, a, b, near = [], [], [], 0.0
        for i, (f, l, g) in enumerate(zip(*tensors)):
            lam = float(batch.draw[layers[i] if mix == "layer" else 0])
            shared = version == "official" and i in (1, 3)
            mixed.append(f if shared else (1 - lam) * f + lam * l)
            near += (1 - lam) * (f - g).norm() if version == "official" else ((f - g) ** 2).sum()
            if not shared:
                a, b = a + [f], b + [l]
        a, b = torch.cat(a), torch.cat(b)
        hidden = F.relu(batch.x.flatten(1) @ mixed[0].view(100, 4).T + mixed[1])
        loss = F.cross_entropy(hidden @ mixed[2].view(3, 100).T + mixed[3], batch.y)
        return loss + 1.3 * (a @ b) ** 2 / (a @ a) / (b @ b) + 0.7 * near

    g_f, g_l = gradients(step, w_f, w_l, w_g, batch)
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
    net, step, w_f, w_l, w_g, batch = small()
    g = grad(lambda w: common.cross_entropy(net(w, batch.x), batch))((1 - lam) * w_f + lam * w_l)
    g_f, g_l = gradients(step, w_f, w_l, w_g, batch._replace(draw=torch.tensor([lam]).double()))
    torch.testing.assert_close(g_f, (1 - lam) * g)
    torch.testing.assert_close(g_l, lam * g)


def test_layer_mixing_with_equal_lambdas_is_model_mixing():
    one, lam = small("model", mu=0.7, nu=1.3), torch.tensor([0.3]).double()
    two = small("layer", mu=0.7, nu=1.3)
    a = gradients(*one[1:5], one[5]._replace(draw=lam))
    b = gradients(*two[1:5], one[5]._replace(draw=lam.expand(2)))
    c = gradients(*two[1:5], one[5]._replace(draw=torch.tensor([0.3, 0.4]).double()))
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and not torch.equal(a[0], c[0])


def test_cosine_has_no_gradient_between_orthogonal_vectors():
    _, without, w_f, w_l, w_g, batch = small(nu=0.0)
    _, step, *_ = small(nu=5.0)
    orthogonal = w_l - (w_l @ w_f) / (w_f @ w_f) * w_f
    for other, equal in ((orthogonal, True), (w_l + w_f, False)):
        a, b = gradients(without, w_f, other, w_g, batch), gradients(step, w_f, other, w_g, batch)
        assert torch.allclose(a[0], b[0], atol=1e-12) is equal and torch.allclose(a[1], b[1], atol=1e-12) is equal


def test_phase_one_trains_the_federated_model_alone():
    net, step, w_f, w_l, w_g, batch = small("layer", mu=0.7, nu=1.3)
    g_f, g_l = gradients(step, w_f, w_l, w_g, batch, phase_two=0.0)
    assert not g_l.any()
    g = grad(lambda w: common.cross_entropy(net(w, batch.x), batch))(w_f)
    torch.testing.assert_close(g_f, g + 0.7 * 2 * (w_f - w_g))


@pytest.mark.parametrize("mix, version", BOTH)
def test_all_paths_agree(mix, version):
    argv = [*SMALL, "--split", "dirichlet-classes", "--alpha", "1", "--momentum", "0.9"]  # clients of different sizes
    fed = federation(argv)
    args = SimpleNamespace(mix=mix, as_=version, mu=0.1, nu=2.0, momentum=0.9, weight_decay=0.0)
    S, w = np.array([0, 2, 3, 7]), fed.initial_weights()
    w_l = torch.stack([fed.net.init(common.stream(1, "initialisation", 0, int(k))) for k in S])
    start = (w.expand(4, -1), w_l, torch.zeros_like(w_l), torch.zeros_like(w_l))
    assert len(set(fed.n[S].tolist())) > 1
    ends = []
    for _ in paths(fed):
        ends.append(fed.train(superfed.client_step(fed.net, args), start, S, 0, torch.tensor(0.05), torch.tensor(1.0), w,
                              draw=lambda rng, steps: rng.random((steps, 2 if mix == "layer" else 1))))
    for a, *others in zip(*ends):
        for b in others:
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


# Who keeps what


def spy(monkeypatch, replace=None):
    """Notes what every call of train gets and returns."""
    calls, train = [], common.Federation.train

    def noting(self, step, start, S, t, eta, phase_two, w_g, **more):
        end = replace(start, S) if replace else train(self, step, start, S, t, eta, phase_two, w_g, **more)
        calls.append(SimpleNamespace(S=list(S), t=t, eta=float(eta), phase_two=float(phase_two), w_g=w_g, start=start, end=end,
                                     draw=more["draw"]))
        return end

    monkeypatch.setattr(common.Federation, "train", noting)
    return calls


def test_only_the_federated_model_is_averaged_and_the_local_one_stays(tmp_path, monkeypatch):
    """Training is replaced: client k returns w^f = k and w^l = 1000 + k everywhere."""
    argv = [*SMALL, "--split", "dirichlet-classes", "--alpha", "1", "--rounds", "2", "--seed", "3"]

    def constant(start, S):
        k = torch.tensor(S, dtype=torch.float)[:, None]
        return k + 0 * start[0], 1000 + k + 0 * start[1], *start[2:]

    calls = spy(monkeypatch, constant)
    record, state = run(superfed, argv, tmp_path)
    first, last = calls
    n = np.array([len(index) for index in federation(argv).split.train])
    assert len(set(n[last.S])) > 1 and set(first.S) - set(last.S)
    torch.testing.assert_close(last.w_g, torch.full_like(last.w_g, n[first.S] @ first.S / n[first.S].sum()))
    torch.testing.assert_close(state["w_f"], torch.full_like(last.w_g, n[last.S] @ last.S / n[last.S].sum()))
    for k in range(8):  # round 1 is Phase I, and leaves w^l as it was
        fresh = local_start(federation(argv), 3)
        assert torch.equal(state["w_l"][k], torch.full_like(fresh, 1000 + k) if k in last.S else fresh)
    assert record["bytes_up"] == record["bytes_down"] == 2 * 4 * 4 * last.w_g.numel()  # 2 rounds, 4 clients, 4 bytes


@pytest.mark.parametrize("version, phases, decay", [("paper", [0, 0, 0, 1, 1], 1.0), ("official", [0, 1, 1, 1, 1], 0.995)])
def test_phases_and_learning_rate(version, phases, decay, tmp_path, monkeypatch):
    """L*R = 2.5: t >= 2.5 from 0; officially r >= int(2.5) from 1, with eta * .995^r."""
    calls, argv = spy(monkeypatch, lambda start, S: start), [*SMALL, "--rounds", "5", "--as", version]
    if version == "official":  # its own decay is a default
        i = argv.index("--lr-decay")
        del argv[i : i + 2]
    run(superfed, argv, tmp_path)
    assert [call.phase_two for call in calls] == phases
    np.testing.assert_allclose([call.eta for call in calls], [0.05 * decay**r for r in range(1, 6)], rtol=1e-6)


@pytest.mark.parametrize("L, R, first, official", [
    (0.4, 200, 80, 79), (0.8, 200, 160, 159), (0.5, 5, 3, 1), (0.29, 100, 29, 27), (0, 5, 0, 0), (1, 5, 5, 4)])
def test_the_first_round_of_phase_two(L, R, first, official):
    """ceil(L*R), from 0; officially int(L*R) - 1, and in float64 int(.29 * 100) is 28. With L = 1 the official last round is in Phase II."""
    for version, expected in (("paper", first), ("official", official)):
        run = SimpleNamespace(args=SimpleNamespace(as_=version, start=L, rounds=R), federation=SimpleNamespace(notes=[]), marks={})
        assert superfed.first_round_of_phase_two(run) == expected
        assert run.federation.notes[0].endswith(f"begins with round {expected + 1}" if expected < R else "no Phase II")


@pytest.mark.parametrize("own", [False, True])
def test_local_models_start_alike_and_other_than_the_federated_one(own, tmp_path, monkeypatch):
    calls = spy(monkeypatch, lambda start, S: start)
    run(superfed, [*SMALL, "--rounds", "1"] + ["--own-start"] * own, tmp_path)
    w_f, w_l = calls[0].start[:2]  # of the four clients of the first round
    assert torch.equal(w_f[0], w_f[1]) and not torch.equal(w_f[0], w_l[0])
    assert torch.equal(w_l[0], w_l[1]) is not own


def test_unseen_clients_are_not_the_last_of_the_split(tmp_path, monkeypatch):
    """Semantic splits give the last clients one cluster of classes."""
    calls = spy(monkeypatch, lambda start, S: start)
    seen = set()
    for seed in ("0", "1"):
        run(superfed, [*SMALL, "--rounds", "1", "--unseen", "3", "--split-seed", seed], tmp_path / seed)
        seen.add(tuple(calls[-1].S))
    assert len(seen) == 2


@pytest.mark.parametrize("mix", ["model", "layer"])
def test_every_minibatch_has_its_own_lambda_and_in_layer_mixing_every_layer(mix, tmp_path, monkeypatch):
    calls = spy(monkeypatch, lambda start, S: start)
    run(superfed, [*SMALL, "--model", "cnn", "--mix", mix, "--rounds", "1"], tmp_path)
    lam = calls[0].draw(np.random.default_rng(0), 2000)
    assert lam.min() >= 0 and lam.max() < 1 and lam.mean() == pytest.approx(0.5, abs=0.02) and lam.var() == pytest.approx(1 / 12, abs=0.01)
    assert lam.shape == (2000, 5)  # the CNN's layers; Model Mixing takes the first draw
    if mix == "layer":
        assert np.abs(np.corrcoef(lam.T) - np.eye(5)).max() < 0.1


def test_weight_decay_adds_to_both_gradients():
    net, step, w_f, w_l, w_g, batch = small()
    args = SimpleNamespace(mix="model", as_="paper", mu=0.0, nu=0.0, momentum=0.0, weight_decay=0.1)
    without, with_decay = (gradients(f, w_f, w_l, w_g, batch) for f in (step, superfed.client_step(net, args)))
    torch.testing.assert_close(with_decay[0] - without[0], 0.1 * w_f)
    torch.testing.assert_close(with_decay[1] - without[1], 0.1 * w_l)


def test_unseen_clients_join_after_the_last_round(tmp_path, monkeypatch, capsys):
    calls = spy(monkeypatch)
    record, state = run(superfed, [*SMALL, "--unseen", "3", "--start", "1", "--seed", "1"], tmp_path)
    assert [len(call.S) for call in calls] == [2, 2, 2, 2, 3]  # int(.5 * 5) of the five that take part, then the three
    last = calls[4]
    others = [k for k in range(8) if k not in last.S]
    assert len(others) == 5 and {k for call in calls[:4] for k in call.S} <= set(others)
    assert last.phase_two == 1 and torch.equal(last.w_g, state["w_f"])
    fed = federation([*SMALL, "--seed", "1"])
    fresh = local_start(fed, 1).expand(8, -1)
    assert torch.equal(state["w_l"], fresh) and torch.equal(last.start[1], fresh[last.S])
    unseen = record["rounds"][-1]["unseen"]
    assert len(unseen["personal"]["per_client"]) == 3 and len(record["final"]["personal"]["per_client"]) == 5
    assert record["final"]["unseen"] == unseen
    alone = np.array(fed.evaluate_clients(state["w_f"])["per_client"])  # lambda = 0 is the global model
    assert unseen["personal@lambda=0"]["mean"] == pytest.approx(alone[last.S].mean())
    assert record["final"]["personal"]["mean"] == pytest.approx(alone[others].mean())
    W_l = torch.zeros_like(fresh)
    W_l[last.S] = last.end[1]
    local = fed.evaluate_clients(W_l, among=last.S)  # lambda = 1 is what it trained
    assert unseen["lambdas"][10]["loss"] == pytest.approx(local["loss"], abs=1e-6)
    assert federation(SMALL).split.fingerprint() == record["split"]["fingerprint"]
    refused(capsys, "--unseen 8", superfed.main, [*SMALL, "--unseen", "8", "--out", str(tmp_path)])


@pytest.mark.parametrize("mix", ["model", "layer"])
def test_a_run_resumed_in_phase_two_equals_an_uninterrupted_one_bit_for_bit(mix, tmp_path):
    """Phase II begins with t = 2. Killed in t = 4, after the evaluation at the end of t = 2: t = 3 and 4 are done again."""
    argv = [*SMALL, "--rounds", "6", "--start", "0.34", "--eval-every", "3", "--mix", mix]
    whole, a = run(superfed, argv, tmp_path / "whole")
    killed(superfed, argv, tmp_path / "cut", lambda t, _: t == 4)
    again, b = run(superfed, [*argv, "--resume"], tmp_path / "cut")
    assert torch.equal(a["w_f"], b["w_f"]) and torch.equal(a["w_l"], b["w_l"])
    assert same(whole, again)


# Evaluation


@pytest.mark.parametrize("share, part", [(0.0, "train"), (0.2, "val")])
def test_each_choice_of_lambda(share, part, monkeypatch):
    """W is lambda in the two paired weights. Images for the choice: loss least at .2 and .4, accuracy best at .3 and .7. Test images:
    accuracy best at .6. Of two equal ones the smaller lambda is taken. Each client has 5 training, 4 validation, 2 test images."""
    net = SimpleNamespace(per_weight=lambda _: torch.tensor([1.0, 1.0, 0.0]), tensors=[])
    numbers = {"train": [[10, 11, 12, 13, 14], [20, 21, 22, 23, 24]], "val": [[15, 16, 17, 18], [25, 26, 27, 28]],
               "test": [[30, 31], [40, 41]]}

    class Clients:
        args = SimpleNamespace(client_val=share, as_="paper")
        split = common.Split(**numbers)

        def evaluate_clients(self, W, images=None, among=None):
            models = W(np.array([1]))
            lam = round(float(models[0, 0]), 4)
            assert torch.equal(models, torch.tensor([[lam, lam, 0.0]])) and list(among) == [0, 1]
            of_choice = {"mean": 0.9 if lam in (0.3, 0.7) else 0.2, "loss": 0.5 if lam in (0.2, 0.4) else 2.0}
            if images is None:
                on_val = {f"val_{name}": value for name, value in of_choice.items()} if share else {}
                return {"mean": 0.8 if lam == 0.6 else 0.1, "std": lam, "loss": 9.0, "per_client": [lam], **on_val}
            assert not share and images == [[10, 11], [20, 21]]  # as many training images as there are test images
            return of_choice

    clients = Clients()
    clients.net = net
    found = superfed.measure_mixtures(clients, [0, 1], torch.zeros(3), lambda S: torch.ones(len(S), 3))
    by_loss = {"lambda": 0.2, f"{part}_mean": 0.2, f"{part}_loss": 0.5, "mean": 0.1, "std": 0.2, "loss": 9.0}
    by_accuracy = {"lambda": 0.3, f"{part}_mean": 0.9, f"{part}_loss": 2.0, "mean": 0.1, "std": 0.3, "loss": 9.0}
    if part == "train":  # saturated accuracies decide nothing
        assert found["personal"] == {**by_loss, "per_client": [0.2]} and found["personal@train-accuracy"] == by_accuracy
    else:
        assert found["personal"] == {**by_accuracy, "per_client": [0.3]} and found["personal@val-loss"] == by_loss
    assert found["personal@test"]["lambda"] == 0.6 and found["personal@test"]["mean"] == 0.8
    assert found["personal@lambda=0.5"]["std"] == 0.5 and found["personal@lambda=0"]["mean"] == 0.1
    assert [at["lambda"] for at in found["lambdas"]] == [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1]
    assert all("per_client" not in at for at in found["lambdas"])


def test_lambda_is_chosen_by_the_loss_on_training_images(tmp_path):
    """In a whole run: the loss and the accuracy of the mixtures on as many training images of a client as it has test images."""
    argv = [*SMALL, "--epochs", "3"]
    record, state = run(superfed, argv, tmp_path)
    fed, final = federation(argv), record["final"]
    images = [train[: len(test)] for train, test in zip(fed.split.train, fed.split.test)]
    assert {len(index) for index in images} == {10}
    found = [fed.evaluate_clients((1 - lam) * state["w_f"] + lam * state["w_l"], images) for lam in np.arange(11) / 10]
    losses, means = [[at[name] for at in found] for name in ("loss", "mean")]
    assert [at["train_loss"] for at in final["lambdas"]] == pytest.approx(losses, abs=1e-6)
    assert [at["train_mean"] for at in final["lambdas"]] == pytest.approx(means, abs=1e-6)
    assert final["personal"]["lambda"] == pytest.approx(np.argmin(losses) / 10)
    assert final["personal@train-accuracy"]["lambda"] == pytest.approx(np.argmax(means) / 10)
    assert final["personal@test"]["mean"] == max(at["mean"] for at in final["lambdas"])


@pytest.mark.parametrize("version", ["paper", "official"])
def test_the_end_points_of_the_grid_are_the_two_models(version, tmp_path):
    """At lambda = 1 the official code's personal models have the local weights and the federated biases."""
    argv = [*SMALL, "--mix", "layer", "--as", version]
    record, state = run(superfed, argv, tmp_path)
    fed, row = federation(argv), record["rounds"][-1]
    local = state["w_l"].clone()
    if version == "official":
        for a, b in ((307_200, 307_300), (308_300, 308_310)):  # the biases of 3072-100-10
            local[:, a:b] = state["w_f"][a:b]
    for at, W in ((0, state["w_f"]), (10, local)):
        expected = fed.evaluate_clients(W)
        for name in ("mean", "std", "loss", "ece", "mce"):
            assert row["lambdas"][at][name] == pytest.approx(expected[name], abs=1e-6)
    assert record["final"]["personal@test"] == row["personal@test"] and record["final"]["lambdas"] == row["lambdas"]


def test_plots(tmp_path, monkeypatch):
    """lambdas.png: 11 points with bars. curves.png: the line at the start of Phase II, and none without one."""
    from matplotlib import pyplot

    figures, close = [], pyplot.close
    monkeypatch.setattr(pyplot, "close", lambda figure: (figures.append(figure), close(figure)))
    run(superfed, [*SMALL, "--plot", "--eval-every", "1"], tmp_path / "a")
    phases, *_, lambdas = figures
    figures.clear()
    record = json.loads((tmp_path / "a" / "result.json").read_text())
    x, y = lambdas.axes[0].containers[0].lines[0].get_data()
    assert np.allclose(x, np.arange(11) / 10) and np.allclose(y, [at["mean"] for at in record["final"]["lambdas"]])
    assert "shapes" in lambdas.get_suptitle() and "$w^f$" in lambdas.axes[0].get_xlabel()
    std = np.array([at["std"] for at in record["final"]["lambdas"]])
    bars = np.array(lambdas.axes[0].containers[0].lines[2][0].get_segments())[:, :, 1]  # cut where an accuracy would leave [0, 1]
    assert (y < std).any() and np.allclose(bars, np.stack([(y - std).clip(min=0), (y + std).clip(max=1)], 1))
    for axis, key in zip(phases.axes, ("top1", "loss")):
        curve, _, start = axis.lines  # global, personal
        assert np.allclose(curve.get_ydata(), [row["global"][key] for row in record["rounds"]])
        assert list(start.get_xdata()) == [2.5, 2.5]  # rounds 1 and 2 are Phase I
    run(superfed, [*SMALL, "--plot", "--start", "1"], tmp_path / "b")
    assert all(len(axis.lines) == 2 for axis in figures[0].axes) and (tmp_path / "b" / "curves.svg").exists()
    assert not (tmp_path / "b" / "lambdas.png").exists()


# The defaults: facts of the paper's experiments, data set by data set


@pytest.mark.parametrize("dataset, mix, R, K, C, L", [
    ("cifar10", "model", 200, 100, 0.1, 0.4), ("cifar10", "layer", 200, 100, 0.1, 0.8),
    ("cifar100", "model", 300, 100, 0.1, 0.5), ("emnist", "model", 100, None, 0.01, 0.4),
    ("tinyimagenet", "model", 500, None, 0.03, 0.4)])
def test_the_settings_are_the_papers(dataset, mix, R, K, C, L):
    args = superfed.arguments(["--dataset", dataset, "--mix", mix])
    assert (args.rounds, args.fraction, args.start, args.epochs, args.batch_size, args.lr) == (R, C, L, 10, 20, 0.01)
    assert (args.momentum, args.weight_decay, args.mu, args.nu, args.client_test, args.lr_decay) == (0.9, 0, 0.01, 2, 0.2, 1)
    assert (args.split, args.per_client, args.clients) == ("shards", 2, K) if K else args.split == "semantic"
    assert (args.model, args.transform) == ("cnn", "scale")


def test_an_explicit_flag_goes_before_the_official_one():
    assert superfed.arguments(["--as", "official"]).lr_decay == 0.995
    assert superfed.arguments(["--as", "official", "--lr-decay", "1"]).lr_decay == 1
    assert superfed.arguments(["--mix", "layer", "--start", "0.25"]).start == 0.25
