"""The methods of baselines.py: what holds for all of them, identities, and rounds by hand in numpy.
More on ditto, pfedme, per-fedavg, fedspa and fedma: test_baselines_more.py."""

import functools
import pathlib
import re
import tempfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import baselines
import common
import fedavg
import fedslr
import fl.data
import fl.records
import fl.training
from conftest import QUICK, eager, equal, on_a_gpu, pixels, refused, run, softmax_gradient
from papers import runs
from papers import superfed as superfed_tables

MINIBATCHES = ["--model", "mnistnet", "--batch-size", "4", "--momentum", "0.9", "--lr", "0.05",
               "--eval-every", "1"]
SMALL = [*QUICK, "--model", "mnistnet", "--lr", "0.03", "--momentum", "0.9", "--rounds", "3",
         "--eval-every", "1"]
PAGE = pathlib.Path(baselines.__file__).parent / "docs" / "baselines.md"
METHODS = [*([method] for method in baselines.METHODS), ["scaffold", "--option", "I"],
           ["apfl", "--adaptive"]]


@pytest.fixture(autouse=True)
def small_images(monkeypatch):
    """In place of the embedded data set: 400 training and 100 test images of 8x8 pixels, a pattern
    per class and noise. For them mnistnet is 192-100-10 with d = 20,310."""
    rng = np.random.default_rng(4)
    labels, patterns = np.arange(500) % 10, rng.integers(0, 128, (10, 8, 8, 3))
    images = (patterns[labels] + rng.integers(0, 128, (500, 8, 8, 3))).astype(np.uint8)
    monkeypatch.setattr(fl.data, "shapes",
                        lambda: (images[:400], labels[:400], images[400:], labels[400:]))
    monkeypatch.setitem(fl.data.DATASETS, "shapes", (8, 8, 3, 10))


def federation(method, argv):
    return common.Federation(baselines.arguments(["--method", method, *argv]))


def go(method, argv, out):
    """A run of one method: its record and its last state."""
    return run(baselines, ["--method", method, *argv], out)


@functools.cache
def fedavgs(*argv):
    """The record and the state of FedAvg with momentum, which several methods must reproduce."""
    with tempfile.TemporaryDirectory() as out:
        return go("fedavg", argv, pathlib.Path(out))


@pytest.fixture
def seen(monkeypatch):
    """What any run sees and makes: its federation, sampled clients, initial weights, evaluated
    models. Two switches: together, to train as on a GPU, and poison, which changes all images and
    labels that no client trains on."""
    seen = SimpleNamespace(together=False, poison=False, fed=None, sampled=[], start=[], models=[])

    class Watched(common.Federation):
        def __init__(self, args):
            super().__init__(args)
            seen.fed = self
            if seen.together:
                on_a_gpu(self)
            if seen.poison:
                trained_on = np.concatenate(self.split.train)
                held = np.setdiff1d(np.arange(len(self.data.images)), trained_on)
                images, labels = self.data.images.copy(), self.data.labels.copy()
                images[held] = 255 - images[held]
                labels[held] = (labels[held] + 1) % self.data.classes
                self.data = self.data._replace(images=images, labels=labels)
                self.images, self.labels = torch.from_numpy(images), torch.from_numpy(labels)

        def sample(self, t):
            seen.sampled.append(super().sample(t).tolist())
            return super().sample(t)

        def initial_weights(self):
            seen.start.append(super().initial_weights())
            return super().initial_weights()

        def evaluate_clients(self, W, images=None):
            everyone = self.everyone
            W_all = W(everyone) if callable(W) else W if torch.is_tensor(W) else W[everyone]
            seen.models.append(W_all.clone())
            return super().evaluate_clients(W, images)

    monkeypatch.setattr(common, "Federation", Watched)
    monkeypatch.setattr(fl.training, "capture", eager)
    return seen


@pytest.fixture
def toy_argv(toy):
    """Three clients of different sizes, two in a round; three rounds of three full batches."""
    return ["--dataset", toy, "--model", "linear", "--split", "dirichlet-classes", "--alpha", "9",
            "--clients", "3", "--fraction", "0.7", "--rounds", "3", "--epochs", "3",
            "--batch-size", "0", "--lr", "0.3", "--momentum", "0", "--eval-every", "1",
            "--device", "cpu"]


# The texts: docstrings and the page


def test_the_index_names_every_method_and_the_page_has_a_heading_for_it():
    index = re.findall(r"^    ([a-z-]+) +([a-z_]+) +[A-Z].*\.$", baselines.__doc__, re.M)
    assert index == [(name, method.__name__) for name, method in baselines.METHODS.items()]
    heads = re.findall(r"^## (.*)", PAGE.read_text(), re.M)
    names = [name for head in heads for name in re.findall(r"`([a-z-]+)`", head)]
    assert names == list(baselines.METHODS)


@pytest.mark.parametrize("function", sorted({*baselines.METHODS.values()},
                                            key=lambda method: method.__name__))
def test_every_choice_has_a_few_lines_in_the_docstring_and_a_heading_on_the_page(function):
    name = function.__name__.replace("_", "-")
    choices = re.findall(r"^    (D\d+)  (.*(?:\n {8}.*)*)", function.__doc__, re.M)
    assert choices and all(text.count("\n") <= 2 for _, text in choices)
    headings = re.findall(rf"^### {name} (D\d+): ", PAGE.read_text(), re.M)
    assert headings == [number for number, _ in choices]


def test_numbers_in_the_page_s_tables_are_those_of_the_records():
    """Every row that links to a record; a method without a global model has an empty cell."""
    rows, titles = 0, None
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        link = re.search(r"\((\.\./results/[^)]*\.json)\)", line)
        if line.startswith("|") and "---" not in line and not link:
            titles = cells
        elif line.startswith("|") and link:
            record = fl.records.read(PAGE.parent / link.group(1))
            row, final = dict(zip(titles, cells, strict=True)), record["final"]
            assert row["rounds"] == str(len(record["rounds"]))
            assert row["personal, last"] == f"{final['personal']['mean']:.4f}"
            assert row["method"].strip("[").split("]")[0].split(",")[0] == record["algorithm"]
            assert ("seed 1" in row["method"]) == (record["args"]["seed"] == 1)
            in_the_end = f"{final['global']['top1']:.4f}" if "global" in final else ""
            assert row["global, last"] == in_the_end
            rows += 1
    assert rows > 8


# What holds for every method


@pytest.mark.parametrize("method", baselines.METHODS)
def test_every_method_sees_the_same_and_learns(method, tmp_path, seen):
    """Split, sampled clients and initial weights are the federation's; the record names the method,
    its measures and its bytes, in which d = 20,310 of two layers, of 19,300 and 1,010 weights."""
    argv = [*SMALL, "--per-client", "2"]
    fed = federation(method, argv)
    sampled, start = [fed.sample(t).tolist() for t in range(3)], fed.initial_weights()
    before = fed.evaluate_clients(start)["loss"]
    for found in (seen.sampled, seen.start, seen.models):
        found.clear()
    own = {"pfedme": ["--theta-lr", "0.02"], "ditto": ["--personal-epochs", "2"]}.get(method, [])
    record, state = go(method, [*argv, *own], tmp_path / method)
    assert record["status"] == "finished" and len(record["rounds"]) == 3
    assert record["args"]["method"] == record["algorithm"] == method
    assert record["split"]["fingerprint"] == fed.split_fingerprint
    assert seen.sampled == ([] if method == "centralised" else sampled)
    assert torch.equal(seen.start[0], start)
    assert len(start) == record["parameters"] == 20_310
    no_global = "local", "fedper", "fedrep", "lg-fedavg"
    assert ("global" in record["final"]) == (method not in no_global)
    assert all(z.isfinite().all() for z in state.values())
    assert seen.models[-3].shape[-1] == 20_310
    assert not torch.equal(seen.models[-3], seen.models[-1])
    assert record["final"]["personal"]["loss"] < before - 0.02
    sent = {"local": 0, "centralised": 0, "scaffold": 2 * 20_310, "fedper": 19_300,
            "fedrep": 19_300, "lg-fedavg": 1010, "fedspa": 20_310 / 2}.get(method, 20_310)
    back = 3 * sent  # in all rounds; fedma's first has no w to send
    if method == "fedma":
        back = 3 * (19_300 + 100) + 2 * 20_310
    # rounds, clients, bytes, weights
    assert record["bytes_up"] == 3 * 4 * 4 * sent and record["bytes_down"] == 4 * 4 * back


@pytest.mark.parametrize("method", METHODS, ids=" ".join)
def test_all_clients_at_once_agree_and_no_test_image_or_label_matters(method, toy_argv, tmp_path,
                                                                     seen):
    """Clients of different sizes, each with two minibatches in an epoch: all models that are
    evaluated, and the state."""
    (method, *more), argv = method, [*toy_argv, *MINIBATCHES, "--batch-size", "9",
                                     "--weight-decay", "0.001"]
    record, state = go(method, [*argv, *more], tmp_path / "loop")
    assert seen.fed.n.tolist() == [14, 18, 15]
    models, seen.models, seen.poison = seen.models, [], True
    poisoned, other = go(method, [*argv, *more], tmp_path / "poison")
    assert equal(state, other)
    assert all(torch.equal(a, b) for a, b in zip(models, seen.models, strict=True))
    assert poisoned["final"]["personal"]["loss"] != record["final"]["personal"]["loss"]
    seen.poison, seen.together, seen.models = False, True, []
    _, other = go(method, [*argv, *more], tmp_path / "together")
    assert seen.fed.training.used == "together" and not seen.fed.training.gave_up
    pairs = [(state[name], other[name]) for name in state]
    for want, found in [*pairs, *zip(models, seen.models, strict=True)]:
        torch.testing.assert_close(found, want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dataset, rounds, fraction, split", [
    ("cifar10", 200, 0.1, "shards"), ("cifar100", 300, 0.1, "shards"),
    ("emnist", 100, 0.01, "semantic"), ("tinyimagenet", 500, 0.03, "semantic")])
def test_settings_are_superfeds_tables_and_fedavgs_row_has_them(dataset, rounds, fraction, split):
    """R, C, E, B, eta, momentum and K of each data set."""
    ours = runs.arguments(f"baselines.py --method fedavg-ft --dataset {dataset}")
    wanted = dict(rounds=rounds, fraction=fraction, split=split, clients=100, per_client=2,
                  epochs=10, batch_size=20, lr=0.01, momentum=0.9, model="cnn")
    assert wanted.items() <= ours.items()
    theirs = runs.arguments(superfed_tables.run("FedAvg", dataset))
    assert theirs == {**ours, "method": "fedavg"}


def test_records_do_not_meet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for method in ("local", "fedper"):
        baselines.main(["--method", method, *SMALL, "--rounds", "1"])
        assert (tmp_path / "runs" / f"baselines-{method}-shapes-0" / "result.json").exists()


# By hand: softmax regression on full batches, 12 weights and 3 biases; clients of different sizes,
# two of three in a round


def world(argv):
    """(S of each round, (x, y) of each client, n_k, w_0), and that sizes differ and someone is left
    out."""
    fed = federation("local", argv)
    S = [fed.sample(t).tolist() for t in range(fed.args.rounds)]
    data = [pixels(fed, index) for index in fed.split.train]
    n = np.array([len(y) for _, y in data])
    assert len(set(n)) > 1 and [len(clients) for clients in S] == [2, 2, 2]
    return S, data, n, fed.initial_weights().double().numpy()


def descend(w, gradient, steps=3, eta=0.3, momentum=0.0):
    u = 0
    for _ in range(steps):
        u = momentum * u + gradient(w)
        w = w - eta * u
    return w


def close(found, expected):
    np.testing.assert_allclose(found.numpy(), expected, atol=5e-6)


def test_local_by_hand(toy_argv, tmp_path):
    S, data, _, w = world(toy_argv)
    W = np.stack([w] * 3)
    for clients in S:
        for k in clients:
            W[k] = descend(W[k], lambda w: softmax_gradient(w, *data[k]), momentum=0.5)
    record, state = go("local", [*toy_argv, "--momentum", "0.5"], tmp_path)
    close(state["W"], W)
    assert record["bytes_up"] == record["bytes_down"] == 0


def test_centralised_by_hand(toy_argv, tmp_path):
    """C*E = .7 * 3 = 2.1: two epochs in each of three rounds, of all three clients' images."""
    _, data, _, w = world(toy_argv)
    x, y = (np.concatenate(parts) for parts in zip(*data))
    _, state = go("centralised", toy_argv, tmp_path)
    close(state["w"], descend(w, lambda w: softmax_gradient(w, x, y), steps=6))


def test_one_client_that_always_takes_part_is_centralised_sgd(tmp_path):
    argv = [*SMALL, "--clients", "1", "--split", "iid", "--fraction", "1", "--limit", "90",
            "--epochs", "2"]
    _, theirs = go("fedavg", argv, tmp_path / "fedavg")
    _, state = go("centralised", argv, tmp_path / "centralised")
    # FedAvg multiplies by n_k and divides by it again
    torch.testing.assert_close(theirs["w"], state["w"], atol=1e-6, rtol=0)


def test_fedprox_by_hand(toy_argv, tmp_path, seen):
    """mu/2 times the square has the gradient mu (w - w_t); the fine-tuned models start at w_T and
    know nothing of mu."""
    S, data, n, w = world(toy_argv)
    for clients in S:
        ends = [descend(w, lambda v: softmax_gradient(v, *data[k]) + 0.7 * (v - w))
                for k in clients]
        w = np.average(ends, axis=0, weights=n[clients])
    argv = [*toy_argv, "--mu", "0.7"]
    _, state = go("fedprox", argv, tmp_path / "fedprox")
    close(state["w"], w)
    close(seen.models[-1], w)
    _, tuned = go("fedprox-ft", [*argv, "--finetune-epochs", "2"], tmp_path / "fedprox-ft")
    assert torch.equal(tuned["w"], state["w"])
    close(seen.models[-1],
          [descend(w, lambda v: softmax_gradient(v, *own), steps=2) for own in data])


def test_fedavg_without_momentum_is_fedavg_py(tmp_path):
    argv = [*SMALL, "--momentum", "0", "--split", "dirichlet-classes", "--alpha", "1"]
    theirs, w = run(fedavg, argv, tmp_path / "fedavg")
    record, state = go("fedavg", argv, tmp_path / "baselines")
    assert torch.equal(w["w"], state["w"]) and record["final"] == theirs["final"]


def test_fedavg_s_momentum_and_weight_decay_by_hand(toy_argv, tmp_path):
    """u, 0 at first in each round, becomes .5 u + gradient + .1 w."""
    S, data, n, w = world(toy_argv)
    for clients in S:
        ends = [descend(w, lambda v: softmax_gradient(v, *data[k]) + 0.1 * v, momentum=0.5)
                for k in clients]
        w = np.average(ends, axis=0, weights=n[clients])
    argv = [*toy_argv, "--momentum", "0.5", "--weight-decay", "0.1"]
    _, state = go("fedavg", argv, tmp_path)
    close(state["w"], w)


@pytest.mark.parametrize("method", ["fedprox", "fedavg-ft"])
def test_without_mu_fedprox_is_fedavg_and_tuning_leaves_the_global_model_alone(method, tmp_path):
    theirs, w = fedavgs(*SMALL)
    argv = [*SMALL, *["--mu", "0"] * (method == "fedprox")]
    record, state = go(method, argv, tmp_path)
    assert torch.equal(w["w"], state["w"]) and record["bytes_up"] == theirs["bytes_up"]
    assert record["final"]["global"] == theirs["final"]["global"]
    ours, fedavg_s = ([row["personal"] for row in one["rounds"]] for one in (record, theirs))
    assert ours[:2] == fedavg_s[:2] and (ours[2] == fedavg_s[2]) == (method == "fedprox")


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_scaffold_by_hand(option, momentum, toy_argv, tmp_path):
    """With momentum, the gradient of step s of 3 moves y by eta (1 + .9 + ...): 2.71, 1.9, 1; line
    6 is the mean with those weights."""
    S, data, n, x = world(toy_argv)
    c, C = np.zeros(15), np.zeros((3, 15))
    weights = [1 + momentum + momentum**2, 1 + momentum, 1]
    for clients in S:
        y, new = [], {}
        for k in clients:
            visited = []

            def corrected(w):
                visited.append(softmax_gradient(w, *data[k]))
                return visited[-1] - C[k] + c

            y.append(descend(x, corrected, momentum=momentum))
            new[k] = np.average(visited, axis=0, weights=weights)
            if option == "I":
                new[k] = softmax_gradient(x, *data[k])
        x = x + 0.8 * (np.mean(y, axis=0) - x)
        c = c + 2 / 3 * np.mean([new[k] - C[k] for k in clients], axis=0)
        for k in clients:
            C[k] = new[k]
    more = ["--option", option, "--momentum", str(momentum), "--global-lr", "0.8"]
    record, state = go("scaffold", [*toy_argv, *more], tmp_path)
    for name, expected in (("x", x), ("c", c), ("c_k", C)):
        close(state[name], expected)
    # rounds, clients, bytes, y and c, weights
    assert record["bytes_up"] == record["bytes_down"] == 3 * 2 * 4 * 2 * 15


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_starts_as_fedavg_and_keeps_its_invariant(option, tmp_path):
    """Controls are 0 in the first round, and equal clients weigh the same; c is always the mean of
    all c_k."""
    argv = [*SMALL, "--rounds", "1"]
    _, theirs = fedavgs(*argv)
    _, state = go("scaffold", [*argv, "--option", option], tmp_path / "scaffold")
    torch.testing.assert_close(state["x"], theirs["w"], atol=1e-6, rtol=0)
    argv = [*SMALL, "--option", option, "--split", "dirichlet-classes", "--rounds", "5",
            "--momentum", "0"]
    _, state = go("scaffold", argv, tmp_path / "five")
    torch.testing.assert_close(state["c"], state["c_k"].mean(0), atol=1e-6, rtol=1e-4)
    assert state["c"].norm() > 0.1 and (state["c_k"].norm(dim=1) > 0).sum() > 4


def test_scaffold_s_option_1_is_the_mean_gradient_of_all_images(tmp_path, seen):
    """In minibatches of 7, 40 images a client, the last one smaller: after one round c_k is the
    gradient at w_0."""
    argv = [*SMALL, "--rounds", "1", "--batch-size", "7", "--option", "I"]
    _, state = go("scaffold", argv, tmp_path)
    fed = federation("scaffold", argv)
    k, w = seen.sampled[0][1], seen.start[0].clone().requires_grad_()
    a, b, c, d = w.split([19_200, 100, 1000, 10])
    x, y = (torch.from_numpy(z) for z in pixels(fed, fed.split.train[k]))
    x = x.float().view(-1, 8, 8, 3).permute(0, 3, 1, 2).flatten(1)
    logits = F.relu(x @ a.view(100, -1).T + b) @ c.view(10, 100).T + d
    F.cross_entropy(logits, y).backward()
    torch.testing.assert_close(state["c_k"][k], w.grad, atol=1e-6, rtol=1e-4)


def test_feddyn_by_hand(toy_argv, tmp_path):
    S, data, _, w = world(toy_argv)
    g, h, alpha = np.zeros((3, 15)), np.zeros(15), 0.4
    for clients in S:
        theta = {k: descend(w, lambda v: softmax_gradient(v, *data[k]) - g[k] + alpha * (v - w))
                 for k in clients}
        for k in clients:
            g[k] = g[k] - alpha * (theta[k] - w)
        h = h - alpha * sum(theta[k] - w for k in clients) / 3
        w = sum(theta.values()) / 2 - h / alpha
    record, state = go("feddyn", [*toy_argv, "--feddyn-alpha", "0.4"], tmp_path)
    for name, expected in (("w", w), ("h", h), ("G", g)):
        close(state[name], expected)
    assert record["bytes_up"] == record["bytes_down"] == 3 * 2 * 4 * 15
    fed = federation("feddyn", toy_argv)
    x, y = pixels(fed, np.arange(fed.data.n_train, len(fed.data.images)))
    logits = x @ w[:12].reshape(3, 4).T + w[12:]  # D2: the server's model
    loss = np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y])
    assert record["final"]["global"]["loss"] == pytest.approx(loss, abs=1e-5)


def test_feddyn_is_fedslr_without_its_low_rank_penalty(tmp_path):
    argv = [*SMALL, "--momentum", "0", "--split", "dirichlet-classes", "--alpha", "1",
            "--epochs", "2"]
    ours, state = go("feddyn", [*argv, "--feddyn-alpha", "0.2"], tmp_path / "feddyn")
    plain = ["--lambda", "0", "--eta-g", "5", "--lr-decay", "1", "--weight-decay", "0",
             "--transform", "scale", "--client-test", "0.2"]
    record, theirs = run(fedslr, [*argv, *plain], tmp_path / "fedslr")
    assert record["split"] == ours["split"]
    torch.testing.assert_close(state["w"], theirs["w"], atol=2e-5, rtol=0)
    torch.testing.assert_close(state["G"], theirs["gamma"], atol=2e-5, rtol=0)
    assert state["G"].norm() > 0.1


def test_feddyn_s_limit_is_fedavg_in_the_clients_but_not_in_the_server(toy_argv, tmp_path):
    """alpha -> 0: w is the mean of the theta_k plus the sum of all rounds' moves, over K."""
    S, data, _, w = world(toy_argv)
    moves = 0
    for clients in S:
        theta = [descend(w, lambda v: softmax_gradient(v, *data[k])) for k in clients]
        moves = moves + sum(theta) - 2 * w
        w = np.mean(theta, axis=0) + moves / 3
    _, state = go("feddyn", [*toy_argv, "--feddyn-alpha", "1e-6"], tmp_path)
    np.testing.assert_allclose(state["w"].numpy(), w, atol=2e-5)


def squares(logits, batch):
    return (logits - F.one_hot(batch.y, 3)).square().sum(1).mean() / 2


def test_on_quadratics_feddyn_and_scaffold_reach_the_joint_optimum_and_fedavg_does_not(
        toy_argv, tmp_path, monkeypatch):
    """Least squares on one-hot labels, two of four clients in a round. The optimum is lstsq's on
    all clients, each of which weighs the same; for FedAvg, in which all clients take part, as much
    as it has images. As many steps on all images together reach that."""
    monkeypatch.setattr(common, "cross_entropy", squares)
    argv = [*toy_argv, "--clients", "4", "--alpha", "2", "--fraction", "0.5", "--epochs", "10",
            "--rounds", "60", "--eval-every", "60", "--parallel", "1"]
    fed = federation("feddyn", argv)
    data = [pixels(fed, index) for index in fed.split.train]

    def off(name, field, weight, *more):
        """How far a method ends from the optimum for images that weigh weight(n_k)."""
        A = np.concatenate([np.c_[x, np.ones(len(x))] * weight(len(x)) ** 0.5 for x, _ in data])
        B = np.concatenate([np.eye(3)[y] * weight(len(y)) ** 0.5 for _, y in data])
        W = np.linalg.lstsq(A, B, rcond=None)[0]  # [5, 3]
        _, state = go(name, [*argv, *more], tmp_path / name)
        return np.abs(state[field].numpy() - np.concatenate([W[:4].T.ravel(), W[4]])).max()

    far = [off("feddyn", "w", lambda n: 1 / n, "--feddyn-alpha", "0.3"),
           off("scaffold", "x", lambda n: 1 / n),
           off("scaffold", "x", lambda n: 1 / n, "--option", "I"),
           off("centralised", "w", lambda n: 1, "--fraction", "1")]
    fedavg_s = off("fedprox", "w", lambda n: 1, "--mu", "0", "--fraction", "1")
    assert max(far) < 1e-2 < 5e-2 < fedavg_s, (far, fedavg_s)


@pytest.mark.parametrize("adaptive", [False, True])
def test_apfl_by_hand(adaptive, toy_argv, tmp_path, seen):
    """Adaptive: alpha moves once a round, before the steps; so not in a client's first round, in
    which its two models are equal."""
    S, data, n, w = world(toy_argv)
    V, alpha = np.stack([w] * 3), np.full(3, 0.6)

    def at_mixture(k, w):
        return softmax_gradient(alpha[k] * V[k] + (1 - alpha[k]) * w, *data[k])

    for clients in S:
        ends = []
        for k in clients:
            w_k = w
            if adaptive:
                alpha[k] = np.clip(alpha[k] - 0.3 * (V[k] - w) @ at_mixture(k, w), 0, 1)
            for _ in range(3):
                w_k = w_k - 0.3 * softmax_gradient(w_k, *data[k])
                V[k] = V[k] - 0.3 * alpha[k] * at_mixture(k, w_k)
            ends.append(w_k)
        w = np.average(ends, axis=0, weights=n[clients])
    argv = [*toy_argv, "--apfl-alpha", "0.6", *["--adaptive"] * adaptive]
    record, state = go("apfl", argv, tmp_path)
    for name, expected in (("w", w), ("V", V), ("alpha", alpha)):
        close(state[name], expected)
    assert (abs(alpha - 0.6).max() > 1e-3) == adaptive
    close(seen.models[-1], alpha[:, None] * V + (1 - alpha[:, None]) * w)
    assert record["final"]["apfl_alpha"] == pytest.approx(alpha.mean(), abs=1e-6)


def test_apfl_learns_alpha_on_the_first_minibatch_of_the_round(tmp_path, monkeypatch):
    """One client of 90 images, B = 20: in each of two rounds one minibatch for alpha, which is the
    first of the five of training."""
    images, batch = [], common.Federation.batch

    def spy(self, index, *rest):
        images.append(sorted(index.tolist()))
        return batch(self, index, *rest)

    monkeypatch.setattr(common.Federation, "batch", spy)
    argv = [*SMALL, "--clients", "1", "--split", "iid", "--fraction", "1", "--limit", "90",
            "--rounds", "2", "--client-test", "0"]
    go("apfl", [*argv, "--adaptive"], tmp_path)
    assert [len(part) for part in images] == [20, 20, 20, 20, 20, 10] * 2
    assert images[0] == images[1] and images[6] == images[7] and images[0] != images[6]


def test_apfl_s_ends_are_fedavg_and_local(tmp_path, seen):
    """w is FedAvg's for every alpha; with alpha 0 the mixture is w, with alpha 1 it is local's
    model."""
    _, theirs = fedavgs(*SMALL)
    _, alone = go("local", SMALL, tmp_path / "local")
    for alpha, expected in (("0", theirs["w"].expand(8, -1)), ("1", alone["W"])):
        _, state = go("apfl", [*SMALL, "--apfl-alpha", alpha], tmp_path / alpha)
        assert torch.equal(state["w"], theirs["w"]) and torch.equal(seen.models[-1], expected)


def test_apfl_s_alpha_stays_between_0_and_1(toy_argv, tmp_path):
    _, state = go("apfl", [*toy_argv, "--adaptive", "--lr", "30", "--rounds", "6"], tmp_path)
    assert 0 <= state["alpha"].min() and state["alpha"].max() <= 1
    assert set(state["alpha"].tolist()) & {0.0, 1.0}


def test_ditto_by_hand(toy_argv, tmp_path, seen):
    """E = 3 and s = 2; v_k is pulled to the w of before the round. The mean is uniform, though
    sizes differ."""
    S, data, _, w = world(toy_argv)
    V, expected = np.stack([w] * 3), []
    for clients in S:
        ends = [descend(w, lambda w: softmax_gradient(w, *data[k]), momentum=0.5) for k in clients]
        for k in clients:
            V[k] = descend(V[k], lambda v: softmax_gradient(v, *data[k]) + 0.7 * (v - w), steps=2,
                           momentum=0.5)
        w = np.mean(ends, axis=0)
        expected.append(V.copy())
    argv = [*toy_argv, "--momentum", "0.5", "--ditto-lambda", "0.7", "--personal-epochs", "2"]
    _, state = go("ditto", argv, tmp_path)
    close(state["w"], w)
    close(torch.stack(seen.models), expected)
    close(state["V"], V)


def test_pfedme_by_hand(toy_argv, tmp_path, seen):
    """Three minibatches a round, with two steps of theta_k on each; both learning rates are .8
    times the last round's. theta_k starts at w each time, also in a client's second round. Until it
    is sampled a client is evaluated with w_0."""
    S, data, n, w = world(toy_argv)
    assert set(S[0]) & {*S[1], *S[2]}
    theta, expected = np.stack([w] * 3), []
    for t, clients in enumerate(S):
        ends, decay = [], 0.8**t
        for k in clients:
            theta[k] = w_k = w
            u = 0
            for _ in range(3):
                for _ in range(2):
                    g = softmax_gradient(theta[k], *data[k]) + 2.5 * (theta[k] - w_k)
                    theta[k] = theta[k] - 0.1 * decay * g
                u = 0.5 * u + 2.5 * (w_k - theta[k])
                w_k = w_k - 0.3 * decay * u
            ends.append(w_k)
        w = w + 1.6 * (np.average(ends, axis=0, weights=n[clients]) - w)
        expected.append(theta.copy())
    argv = [*toy_argv, "--momentum", "0.5", "--lr-decay", "0.8", "--theta-lr", "0.1",
            "--theta-steps", "2", "--pfedme-lambda", "2.5", "--pfedme-beta", "1.6"]
    _, state = go("pfedme", argv, tmp_path)
    close(state["w"], w)
    close(state["Theta"], theta)
    close(torch.stack(seen.models), expected)


def test_per_fedavg_by_hand(toy_argv, tmp_path, seen):
    """Two pairs of full batches a round, and a fifth that is not used. All clients' personal
    models, of which alpha stays."""
    S, data, n, w = world(toy_argv)

    def meta(w, k):
        return softmax_gradient(w - 0.4 * softmax_gradient(w, *data[k]), *data[k])

    for t, clients in enumerate(S):
        ends = [descend(w, lambda w: meta(w, k), steps=2, eta=0.3 * 0.8**t, momentum=0.5)
                for k in clients]
        w = np.average(ends, axis=0, weights=n[clients])
    argv = [*toy_argv, "--epochs", "5", "--momentum", "0.5", "--lr-decay", "0.8",
            "--per-fedavg-alpha", "0.4"]
    _, state = go("per-fedavg", argv, tmp_path)
    close(state["w"], w)
    close(seen.models[-1], [w - 0.4 * softmax_gradient(w, *own) for own in data])


# Personal layers


@pytest.mark.parametrize("method", ["fedper", "fedrep", "lg-fedavg"])
def test_without_personal_layers_it_is_fedavg(method, tmp_path, seen):
    """fedrep's head epochs then train nothing. lg-fedavg's mean is uniform, as is FedAvg's here,
    where sizes are equal."""
    argv = [*SMALL, "--epochs", "2"]
    theirs, w = fedavgs(*argv)
    body = ["--body-epochs", "2"] * (method == "fedrep")
    record, state = go(method, [*argv, "--personal", "0", *body], tmp_path / method)
    atol = 1e-6 if method == "lg-fedavg" else 0
    torch.testing.assert_close(state["w"], w["w"], atol=atol, rtol=0)
    assert torch.equal(seen.models[-1], state["w"].expand(8, -1))
    assert record["bytes_up"] == theirs["bytes_up"]


@pytest.mark.parametrize("method", ["fedper", "lg-fedavg"])
def test_with_nothing_but_personal_layers_it_is_local(method, tmp_path, seen):
    _, alone = go("local", SMALL, tmp_path / "local")
    record, _ = go(method, [*SMALL, "--personal", "2"], tmp_path / method)
    assert torch.equal(seen.models[-1], alone["W"]) and record["bytes_up"] == 0


def network(w, x, y, trained):
    """Gradient of the loss of 4-100-3 softmax at w [803], in float64, with 0 where `trained` is
    0."""
    w = torch.tensor(w, requires_grad=True)
    a, b, c, d = w.split([400, 100, 300, 3])
    hidden = F.relu(torch.from_numpy(x) @ a.view(100, 4).T + b)
    F.cross_entropy(hidden @ c.view(3, 100).T + d, torch.from_numpy(y)).backward()
    return w.grad.numpy() * trained


@pytest.mark.parametrize("method", ["fedper", "fedrep", "lg-fedavg"])
def test_personal_layers_by_hand(method, toy_argv, tmp_path, seen):
    """One hidden layer: 500 weights below, 303 above. Three epochs of all; fedrep's are three of
    the head, two of the body."""
    argv = [*toy_argv, "--model", "mnistnet"]
    S, data, n, w = world(argv)
    above = np.arange(803) >= 500
    own = ~above if method == "lg-fedavg" else above
    phases = [(3, own), (2, ~own)] if method == "fedrep" else [(3, 1)]
    W = np.stack([w] * 3)  # all clients' models, as they are evaluated
    for clients in S:
        ends = {}
        for k in clients:
            ends[k] = W[k]
            for steps, trained in phases:
                ends[k] = descend(ends[k], lambda w: network(w, *data[k], trained), steps=steps)
        weights = None if method == "lg-fedavg" else n[clients]
        mean = np.average(list(ends.values()), axis=0, weights=weights)
        for k in range(3):
            W[k] = np.where(own, ends.get(k, W[k]), mean)
    argv = [*argv, *["--body-epochs", "2"] * (method == "fedrep")]
    record, state = go(method, argv, tmp_path)
    close(seen.models[-1], W)
    close(state["V"], W[:, own])
    assert record["bytes_up"] == record["bytes_down"] == 3 * 2 * 4 * (~own).sum()
    assert np.abs(W[0] - W[1])[own].max() > 1e-3


def test_which_layers_are_personal():
    """Of FedSLR's ResNet-18, FedRep's head and LG-FedAvg's shared layer are 512 x 10; of the CNN,
    512 x 10 + 10 and the three convolutions, Table 4's. A note says so."""
    def personal(*argv):
        args = baselines.arguments(["--method", *argv])
        net = common.Net(args.model, (3, 32, 32), 10)
        notes = []
        part = baselines.personal_layers(SimpleNamespace(net=net),
                                         SimpleNamespace(note=notes.append), args)
        return part.stop - part.start, part.start, net.d, *notes

    def note(layers, weights, d):
        return f"note    personal: {layers} ({weights:,} of {d:,} weights)"

    d, resnet = 94_186, ("--model", "resnet18")
    for method in ("fedper", "fedrep"):
        assert personal(method, *resnet)[:3] == (5120, 11_173_952 - 5120, 11_173_952)
        assert personal(method) == (5130, d - 5130, d, note("fc2", 5130, d))
    assert personal("lg-fedavg", *resnet)[:3] == (11_173_952 - 5120, 0, 11_173_952)
    first = 32 * 3 * 25 + 32
    convolutions = first + 64 * 32 * 25 + 64 + 32 * 64 * 9 + 32
    assert personal("lg-fedavg") == (convolutions, 0, d, note("conv1 to conv3", convolutions, d))
    assert personal("lg-fedavg", "--personal", "1")[:2] == (first, 0)
    assert personal("fedper", "--personal", "2")[:2] == (d - convolutions, convolutions)
    assert personal("fedper", "--personal", "0")[2:] == (d, note("no layer", 0, d))


@pytest.mark.parametrize("model", ["cnn", "resnet18"])
def test_the_gradient_by_a_part_is_that_part_of_the_whole_gradient(model):
    """At the ends of w and at two cuts between layers, with a decay of .1."""
    net, rng = common.Net(model, (3, 32, 32), 10), np.random.default_rng(5)
    x = torch.from_numpy(rng.random((4, 3, 32, 32), np.float32))
    b = common.Batch(x, torch.arange(4), torch.ones(4), None)
    w = net.init(rng).requires_grad_()
    F.cross_entropy(net(w, b.x), b.y).backward()
    w, expected = w.detach(), (w.grad + 0.1 * w).detach()
    by_lower, by_upper = baselines.gradients_of_parts(net)
    for cut in (0, net.layers[1][1].start, net.layers[-1][1].start, net.d):
        for gradient, part in ((by_lower, slice(0, cut)), (by_upper, slice(cut, net.d))):
            torch.testing.assert_close(gradient(w[:cut], w[cut:], b, 0.1), expected[part],
                                       atol=1e-6, rtol=1e-5)


def test_the_gradient_by_a_part_is_all_that_is_computed():
    """A model of two layers that notes whose weights' gradients are asked for."""
    noted = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, name):
            ctx.name = name
            return weight.clone()

        @staticmethod
        def backward(ctx, g):
            noted.append(ctx.name)
            return g, None

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(4, 5, bias=False), nn.Linear(5, 3, bias=False)

        def forward(self, x):
            for name, layer in self.named_children():
                x = torch.tanh(x.flatten(1) @ Noted.apply(layer.weight, name).T)
            return x

    net = common.Net("two", (1, 2, 2), 3, build=Two)
    w = net.init(np.random.default_rng(0))
    b = common.Batch(torch.ones(2, 1, 2, 2), torch.arange(2), torch.ones(2), None)
    for gradient, name in zip(baselines.gradients_of_parts(net), ("fc1", "fc2")):
        gradient(w[:20], w[20:], b, 0.0)
        assert noted == [name]
        noted.clear()


@pytest.mark.parametrize("argv", [["--method", "fedper", "--personal", "3"],
                                  ["--method", "fedavgm"], [],
                                  ["--method", "feddyn", "--feddyn-alpha", "0"],
                                  ["--method", "apfl", "--apfl-alpha", "1.1"]])
def test_bad_input_is_refused_in_one_line(argv, tmp_path, capsys):
    words = argv[-1].lstrip("-") if argv else ""
    refused(capsys, words, baselines.main, [*SMALL, *argv, "--out", str(tmp_path)])
