"""The methods of baselines.py: what holds for all of them, identities, and rounds by hand in numpy.
FedSpa and FedMA: test_baselines_more.py."""

import functools
import pathlib
import re
import tempfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import baselines
import common
import fedavg
import fl.data
import fl.records
import fl.shapes
from byhand import BARE, FLAGS, World, close, evaluated
from conftest import QUICK, refused, run, softmax_gradient

SMALL = [*QUICK, "--model", "mnistnet", "--lr", "0.03", "--momentum", "0.9", "--rounds", "3",
         "--eval-every", "1"]
PAGE = pathlib.Path(baselines.__file__).parent / "docs" / "baselines.md"


@pytest.fixture(autouse=True)
def small_images(monkeypatch):
    """In place of the embedded data set: 400 training and 100 test images of 8x8 pixels, a pattern
    per class and noise. For them mnistnet is 192-100-10 with d = 20,310."""
    rng = np.random.default_rng(4)
    labels, patterns = np.arange(500) % 10, rng.integers(0, 128, (10, 8, 8, 3))
    images = (patterns[labels] + rng.integers(0, 128, (500, 8, 8, 3))).astype(np.uint8)
    monkeypatch.setattr(fl.shapes, "shapes",
                        lambda: (images[:400], labels[:400], images[400:], labels[400:]))
    monkeypatch.setitem(fl.data.DATASETS, "shapes", (8, 8, 3, 10))


def federation(method, argv):
    return common.Federation(baselines.arguments(["--method", method, *argv]))


def go(method, argv, out):
    """A run of one method: its record and its last state."""
    return run(baselines, ["--method", method, *argv], out)


@pytest.fixture
def toy_argv(toy):
    return ["--dataset", toy, *FLAGS]


@pytest.fixture
def world(toy_argv):
    return World(federation("local", toy_argv))


@pytest.fixture
def models(monkeypatch):
    return evaluated(monkeypatch)


# The texts: docstrings and the page


def test_the_index_names_every_method_and_the_page_has_a_heading_for_it():
    index = re.findall(r"^    ([a-z-]+) +([a-z_]+) +[A-Z].*\.$", baselines.__doc__, re.M)
    assert index == [(name, method.__name__) for name, method in baselines.METHODS.items()]
    heads = re.findall(r"^## (.*)", PAGE.read_text(), re.M)
    names = [name for head in heads for name in re.findall(r"`([a-z-]+)`", head)]
    assert names == list(baselines.METHODS)


# By hand: two of three clients of different sizes in a round, with two epochs of minibatches of 5


def test_local_by_hand(world, toy_argv, tmp_path):
    W = np.stack([world.w] * 3)
    for t, S in enumerate(world.S):
        for k in S:
            W[k] = world.descend(W[k], k, t, momentum=0.5)
    record, state = go("local", [*toy_argv, "--momentum", "0.5"], tmp_path)
    close(state, W=W)
    assert record["bytes_up"] == record["bytes_down"] == 0


def test_centralised_by_hand(world, toy_argv, tmp_path):
    """C*E = .7 * 2 = 1.4: an epoch in each round, of all three clients' images."""
    w, P = world.w, np.concatenate(world.fed.split.train)
    for t in range(3):
        w = world.descend(w, 0, t, epochs=1, images=P)
    close(go("centralised", toy_argv, tmp_path)[1], w=w)


def test_fedprox_by_hand(world, toy_argv, tmp_path, models):
    """mu/2 times the square has the gradient mu (w - w_t); the fine-tuned models start at w_T and
    know nothing of mu."""
    w = world.w
    for t, S in enumerate(world.S):
        w = world.mean([world.descend(w, k, t, lambda v, *b: softmax_gradient(v, *b)
                                      + 0.7 * (v - w)) for k in S], S)
    argv = [*toy_argv, "--mu", "0.7"]
    _, state = go("fedprox", argv, tmp_path / "fedprox")
    close(state, w=w)
    assert torch.equal(models[-1], state["w"])
    _, tuned = go("fedprox-ft", [*argv, "--finetune-epochs", "3"], tmp_path / "fedprox-ft")
    assert torch.equal(tuned["w"], state["w"])
    close({"v": models[-1]}, v=[world.descend(w, k, 3, epochs=3) for k in range(3)])


def test_any_method_can_be_fine_tuned_at_the_end(world, toy_argv, tmp_path, models):
    """The global model as by fedavg-ft, then on with the images in another order; the clients' own
    models at a rate of their own. `images` are those of the rounds."""
    record, state = go("fedavg", [*toy_argv, "--fine-tune", "1,3"], tmp_path / "fedavg")
    one, three = models[-2:]
    go("fedavg-ft", toy_argv, tmp_path / "fedavg-ft")
    assert torch.equal(models[-1], one) and not torch.equal(one, three)
    w = [world.descend(w_k, k, 3, epochs=2, order=1) for k, w_k in enumerate(one.numpy())]
    close({"v": three}, v=w)
    tuned, sizes = record["final"]["fine_tuned"], record["split"]["sizes"]
    assert [z["epochs"] for z in tuned] == [1, 3] and len(tuned[1]["per_client"]) == 3
    assert [row["images"] for row in record["rounds"]] == [
        2 * sum(sizes[k] for k in S) for S in world.S]
    again, _ = go("fedavg", [*toy_argv, "--fine-tune", "1,3", "--resume"], tmp_path / "fedavg")
    assert again["final"] == record["final"]

    twice, _ = go("ditto", toy_argv, tmp_path / "ditto")  # it trains two models
    assert twice["local_epochs"] == 2 * record["local_epochs"]

    argv = [*toy_argv, "--fine-tune", "2", "--fine-tune-lr", "0.01"]
    _, state = go("local", argv, tmp_path / "local")
    w = [world.descend(w_k, k, 3, epochs=2, eta=0.01) for k, w_k in enumerate(state["W"].numpy())]
    close({"v": models[-1]}, v=w)


def test_fedavg_s_momentum_and_weight_decay_by_hand(world, toy_argv, tmp_path):
    """u, 0 at first in each round, becomes .5 u + gradient + .1 w."""
    w = world.w
    for t, S in enumerate(world.S):
        w = world.mean([world.descend(w, k, t, lambda v, *b: softmax_gradient(v, *b) + 0.1 * v,
                                      momentum=0.5) for k in S], S)
    argv = [*toy_argv, "--momentum", "0.5", "--weight-decay", "0.1"]
    close(go("fedavg", argv, tmp_path)[1], w=w)


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_scaffold_by_hand(option, momentum, world, toy_argv, tmp_path):
    """With momentum, the gradient of a step moves y by eta (1 + .9 + ...), a term for each step
    from there on; line 6 is the mean with those weights."""
    x, c, C = world.w, np.zeros(15), np.zeros((3, 15))
    for t, S in enumerate(world.S):
        y, new = [], {}
        for k in S:
            visited = []

            def corrected(w, *b):
                visited.append(softmax_gradient(w, *b))
                return visited[-1] - C[k] + c

            y.append(world.descend(x, k, t, corrected, momentum=momentum))
            weights = np.cumsum(momentum ** np.arange(len(visited)))[::-1]
            new[k] = np.average(visited, axis=0, weights=weights)
            if option == "I":
                new[k] = world.gradient(x, k)
        x = x + 0.8 * (np.mean(y, axis=0) - x)
        c = c + 2 / 3 * np.mean([new[k] - C[k] for k in S], axis=0)
        for k in S:
            C[k] = new[k]
    more = ["--option", option, "--momentum", str(momentum), "--global-lr", "0.8"]
    record, state = go("scaffold", [*toy_argv, *more], tmp_path)
    close(state, x=x, c=c, c_k=C)
    # rounds, clients, bytes, y and c, weights
    assert record["bytes_up"] == record["bytes_down"] == 3 * 2 * 4 * 2 * 15


def test_feddyn_by_hand(world, toy_argv, tmp_path):
    w, g, h, alpha = world.w, np.zeros((3, 15)), np.zeros(15), 0.4
    for t, S in enumerate(world.S):
        theta = {k: world.descend(w, k, t, lambda v, *b: softmax_gradient(v, *b) - g[k]
                                  + alpha * (v - w)) for k in S}
        for k in S:
            g[k] = g[k] - alpha * (theta[k] - w)
        h = h - alpha * sum(theta[k] - w for k in S) / 3
        w = sum(theta.values()) / 2 - h / alpha
    record, state = go("feddyn", [*toy_argv, "--feddyn-alpha", "0.4"], tmp_path)
    close(state, w=w, h=h, G=g)
    loss = world.fed.evaluate(state["w"])["loss"]  # D2: the server's model
    assert record["final"]["global"]["loss"] == pytest.approx(loss)


@pytest.mark.parametrize("adaptive, eta", [(False, 0.3), (True, 0.3), (True, 30)])
def test_apfl_by_hand(adaptive, eta, world, toy_argv, tmp_path, models):
    """Adaptive: alpha moves once a round, on the first minibatch, before the steps; so not in a
    client's first round, in which its two models are equal. It stays in [0, 1]."""
    w, V, alpha = world.w, np.stack([world.w] * 3), np.full(3, 0.6)

    def mixed(k, w):
        return alpha[k] * V[k] + (1 - alpha[k]) * w

    for t, S in enumerate(world.S):
        ends = []
        for k in S:
            w_k = w
            if adaptive:
                g = softmax_gradient(mixed(k, w), *next(world.minibatches(k, t)))
                alpha[k] = np.clip(alpha[k] - eta * (V[k] - w) @ g, 0, 1)
            for b in world.minibatches(k, t):
                w_k = w_k - eta * softmax_gradient(w_k, *b)
                V[k] = V[k] - eta * alpha[k] * softmax_gradient(mixed(k, w_k), *b)
            ends.append(w_k)
        w = world.mean(ends, S)
    argv = [*toy_argv, "--apfl-alpha", "0.6", *["--adaptive"] * adaptive, "--lr", str(eta)]
    record, state = go("apfl", argv, tmp_path)
    close(state, alpha=alpha, w=w, V=V, atol=5e-6 if eta < 1 else 1e-3)
    assert (abs(alpha - 0.6).max() > 1e-3) == adaptive and (eta < 1 or {*alpha} & {0, 1})
    torch.testing.assert_close(models[-1], state["alpha"][:, None] * state["V"]
                               + (1 - state["alpha"][:, None]) * state["w"])
    assert record["final"]["apfl_alpha"] == pytest.approx(alpha.mean(), abs=1e-5)


def test_ditto_by_hand(world, toy_argv, tmp_path, models):
    """E = 2 and s = 3; v_k is pulled to the w of before the round. The mean is uniform, though
    sizes differ."""
    w, V, expected = world.w, np.stack([world.w] * 3), []
    for t, S in enumerate(world.S):
        ends = [world.descend(w, k, t, momentum=0.5) for k in S]
        for k in S:
            V[k] = world.descend(V[k], k, t, lambda v, *b: softmax_gradient(v, *b) + 0.7 * (v - w),
                                 epochs=3, momentum=0.5)
        w = np.mean(ends, axis=0)
        expected.append(V.copy())
    argv = [*toy_argv, "--momentum", "0.5", "--ditto-lambda", "0.7", "--personal-epochs", "3"]
    _, state = go("ditto", argv, tmp_path)
    close(state, w=w, V=V)
    close({"v": torch.stack(models)}, v=expected)


def test_pfedme_by_hand(world, toy_argv, tmp_path, models):
    """Two steps of theta_k on each minibatch; both learning rates are .8 times the last round's.
    theta_k starts at w each time, also in a client's second round. Until it is sampled a client is
    evaluated with w_0."""
    w, theta, expected = world.w, np.stack([world.w] * 3), []
    for t, S in enumerate(world.S):
        ends, decay = [], 0.8**t
        for k in S:
            theta[k], w_k, u = w, w, 0
            for b in world.minibatches(k, t):
                for _ in range(2):
                    g = softmax_gradient(theta[k], *b) + 2.5 * (theta[k] - w_k)
                    theta[k] = theta[k] - 0.1 * decay * g
                u = 0.5 * u + 2.5 * (w_k - theta[k])
                w_k = w_k - 0.3 * decay * u
            ends.append(w_k)
        w = w + 1.6 * (world.mean(ends, S) - w)
        expected.append(theta.copy())
    argv = [*toy_argv, "--momentum", "0.5", "--lr-decay", "0.8", "--theta-lr", "0.1",
            "--theta-steps", "2", "--pfedme-lambda", "2.5", "--pfedme-beta", "1.6"]
    _, state = go("pfedme", argv, tmp_path)
    close(state, w=w, Theta=theta)
    close({"theta": torch.stack(models)}, theta=expected)


def test_per_fedavg_by_hand(world, toy_argv, tmp_path, models):
    """Minibatches go two by two through the three epochs; one that is left over is not used. Then
    all clients' personal models, of which alpha stays."""
    w = world.w
    for t, S in enumerate(world.S):
        ends = []
        for k in S:
            w_k, u, minibatches = w, 0, world.minibatches(k, t, 3)
            for b, b_prime in zip(minibatches, minibatches):
                z = w_k - 0.4 * (softmax_gradient(w_k, *b) + 0.1 * w_k)
                u = 0.5 * u + softmax_gradient(z, *b_prime) + 0.1 * z
                w_k = w_k - 0.3 * 0.8**t * u
            ends.append(w_k)
        w = world.mean(ends, S)
    assert {-(-n // 5) * 3 % 2 for n in world.n} == {0, 1}
    argv = [*toy_argv, "--epochs", "3", "--momentum", "0.5", "--lr-decay", "0.8",
            "--weight-decay", "0.1", "--per-fedavg-alpha", "0.4"]
    _, state = go("per-fedavg", argv, tmp_path)
    close(state, w=w)
    close({"own": models[-1]}, own=[w - 0.4 * (world.gradient(w, k) + 0.1 * w) for k in range(3)])


# Personal layers


def network(w, x, y, trained=1.0):
    """Gradient of the loss of 4-100-3 softmax at w [803], in float64, with 0 where `trained` is
    0."""
    w = torch.tensor(w, requires_grad=True)
    a, b, c, d = w.split([400, 100, 300, 3])
    hidden = F.relu(torch.from_numpy(x) @ a.view(100, 4).T + b)
    F.cross_entropy(hidden @ c.view(3, 100).T + d, torch.from_numpy(y)).backward()
    return w.grad.numpy() * trained


@pytest.mark.parametrize("method", ["fedper", "fedrep", "lg-fedavg"])
def test_personal_layers_by_hand(method, toy_argv, tmp_path, models):
    """One hidden layer: 500 weights below, 303 above. Two epochs of all; fedrep's are two of the
    head, shuffled otherwise, and three of the body."""
    argv = [*toy_argv, "--model", "mnistnet"]
    world, above = World(federation(method, argv)), np.arange(803) >= 500
    own = ~above if method == "lg-fedavg" else above
    phases = [(2, 1, own), (3, 0, ~own)] if method == "fedrep" else [(2, 0, 1)]
    W = np.stack([world.w] * 3)  # all clients' models, as they are evaluated
    for t, S in enumerate(world.S):
        ends = {}
        for k in S:
            ends[k] = W[k]
            for epochs, order, trained in phases:
                ends[k] = world.descend(ends[k], k, t, lambda w, x, y: network(w, x, y, trained),
                                        epochs, order=order)
        weights = None if method == "lg-fedavg" else world.n[S]
        mean = np.average(list(ends.values()), axis=0, weights=weights)
        for k in range(3):
            W[k] = np.where(own, ends.get(k, W[k]), mean)
    argv = [*argv, *["--body-epochs", "3"] * (method == "fedrep")]
    record, state = go(method, argv, tmp_path)
    close({"models": models[-1], "V": state["V"]}, models=W, V=W[:, own])
    assert record["bytes_up"] == record["bytes_down"] == 3 * 2 * 4 * (~own).sum()
    assert np.abs(W[0] - W[1])[own].max() > 1e-3


def test_which_layers_are_personal(tmp_path):
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
    (tmp_path / "normed.py").write_text(
        "from torch import nn\nfrom torch.nn.utils.parametrizations import weight_norm as n\n"
        "model = nn.Sequential(nn.Conv2d(3, 2, 32), nn.Flatten(), n(nn.Linear(2, 10)))\n")
    assert personal("lg-fedavg", "--model", f"{tmp_path}/normed.py:model")[0] == 2 * 3 * 32**2 + 2
    assert personal("fedper", "--personal", "2")[:2] == (d - convolutions, convolutions)
    assert personal("fedper", "--personal", "0")[2:] == (d, note("no layer", 0, d))


def test_the_gradient_by_a_part_is_that_part_of_the_whole_gradient():
    """At the ends of w and at two cuts between layers, with a decay of .1."""
    net, rng = common.Net("cnn", (3, 32, 32), 10), np.random.default_rng(5)
    x = torch.from_numpy(rng.random((4, 3, 32, 32), np.float32))
    b = common.Batch(x, torch.arange(4), torch.ones(4), None)
    w = net.init(rng).requires_grad_()
    F.cross_entropy(net(w, b.x), b.y).backward()
    w, expected = w.detach(), (w.grad + 0.1 * w).detach()
    by_lower, by_upper = (baselines.gradient_of_part(net, i) for i in (0, 1))
    for cut in (0, net.layers[1][1].start, net.layers[-1][1].start, net.d):
        for gradient, part in ((by_lower, slice(0, cut)), (by_upper, slice(cut, net.d))):
            torch.testing.assert_close(gradient(w[:cut], w[cut:], b, 0.1), expected[part],
                                       atol=1e-6, rtol=1e-5)


# Identities, on 4-100-3 with momentum and weight decay


@functools.cache
def wanted(*argv):
    """The record and the state of a run that several methods must reproduce."""
    with tempfile.TemporaryDirectory() as out:
        return run(baselines, argv, pathlib.Path(out))


EQUAL = ["--split", "iid", "--clients", "4"]  # 12 images each
FULL = ["--batch-size", "0", "--epochs", "1"]


@pytest.mark.parametrize("method, flags, more", [
    ("fedprox", ["--mu", "0"], []), ("fedavg-ft", [], []), ("apfl", [], []),
    ("fedper", ["--personal", "0"], []), ("fedrep", ["--personal", "0", "--body-epochs", "2"], []),
    ("fedspa", ["--density", "1"], []), ("lg-fedavg", ["--personal", "0"], EQUAL),
    ("ditto", ["--ditto-lambda", "1", "--personal-epochs", "1"], EQUAL),
    ("scaffold", ["--rounds", "1"], [*EQUAL, "--rounds", "1"]),
    ("per-fedavg", ["--per-fedavg-alpha", "0", "--epochs", "2"], FULL)])
def test_it_is_fedavg(method, flags, more, toy, tmp_path, models):
    """w is FedAvg's, whatever is personal. lg-fedavg's, ditto's and scaffold's means are uniform.
    scaffold's controls are 0 at first. per-fedavg's b' is every second minibatch."""
    argv = ["--dataset", toy, *(BARE if "iid" in more else FLAGS), "--model", "mnistnet",
            "--momentum", "0.9", "--weight-decay", "0.01", *more]
    theirs, w = wanted("--method", "fedavg", *argv)
    record, state = go(method, [*argv, *flags], tmp_path)
    found = state["x" if method == "scaffold" else "w"]
    torch.testing.assert_close(found, w["w"], atol=1e-6, rtol=1e-5)
    assert record["bytes_up"] == theirs["bytes_up"] * (2 if method == "scaffold" else 1)
    if method in ("fedper", "fedrep", "lg-fedavg"):
        assert torch.equal(models[-1], found.expand(len(models[-1]), -1))


def test_fedavg_without_momentum_is_fedavg_py_bit_for_bit(toy_argv, tmp_path):
    theirs, w = run(fedavg, toy_argv, tmp_path / "fedavg")
    record, state = go("fedavg", toy_argv, tmp_path / "baselines")
    assert torch.equal(w["w"], state["w"]) and record["final"] == theirs["final"]


# What holds for every method


@pytest.mark.parametrize("method", baselines.METHODS)
def test_every_method_sees_the_same_and_learns(method, tmp_path, monkeypatch, models):
    """Split, sampled clients and initial weights are the federation's; the record names the method,
    its measures and its bytes, in which d = 20,310 of two layers, of 19,300 and 1,010 weights."""
    argv, sampled, sample = [*SMALL, "--per-client", "2"], [], common.Federation.sample
    fed = federation(method, argv)
    start = fed.initial_weights()
    before = fed.evaluate_clients(start)["loss"]
    monkeypatch.setattr(common.Federation, "sample", lambda fed, t: sampled.append(t)
                        or sample(fed, t))
    own = {"pfedme": ["--theta-lr", "0.02"], "ditto": ["--personal-epochs", "2"]}.get(method, [])
    record, state = go(method, [*argv, *own], tmp_path / method)
    assert record["status"] == "finished" and len(record["rounds"]) == 3
    assert record["args"]["method"] == record["algorithm"] == method
    assert record["split"]["fingerprint"] == fed.split_fingerprint
    assert sampled == ([] if method == "centralised" else [0, 1, 2])
    assert len(start) == record["parameters"] == 20_310
    no_global = "local", "fedper", "fedrep", "lg-fedavg"
    assert ("global" in record["final"]) == (method not in no_global)
    assert all(z.isfinite().all() for z in state.values())
    assert models[-1].shape[-1] == 20_310 and not torch.equal(models[-3], models[-1])
    assert record["final"]["personal"]["loss"] < before - 0.02
    sent = {"local": 0, "centralised": 0, "scaffold": 2 * 20_310, "fedper": 19_300,
            "fedrep": 19_300, "lg-fedavg": 1010, "fedspa": 20_310 / 2}.get(method, 20_310)
    back = 3 * sent  # in all rounds; fedma's first has no w to send
    if method == "fedma":
        back = 3 * (19_300 + 100) + 2 * 20_310
    # rounds, clients, bytes, weights
    assert record["bytes_up"] == 3 * 4 * 4 * sent and record["bytes_down"] == 4 * 4 * back


# Bad input


@pytest.mark.parametrize("method, flags, words", [
    ("fedper", ["--personal", "3"], "3"), ("fedavgm", [], "invalid choice: 'fedavgm'"),
    ("feddyn", ["--feddyn-alpha", "0"], "0 must be above 0"),
    ("apfl", ["--apfl-alpha", "1.1"], "1.1 must be"),
    ("per-fedavg", ["--batch-size", "0", "--epochs", "1"], "takes 2 minibatches"),
    ("fedprox", ["--density", "0.3"], "fedprox has no density; it is for fedspa"),
    ("fedavg-ft", ["--mu", "0.1"], "fedavg-ft has no mu; it is for fedprox, fedprox-ft"),
    ("scaffold", ["--theta-lr", "0.02"], "scaffold has no theta-lr; it is for pfedme"),
    ("fedspa", ["--density", "1e-5"], "use more")])
def test_bad_input_is_refused_in_one_line(method, flags, words, tmp_path, capsys):
    refused(capsys, words, go, method, [*SMALL, *flags], tmp_path)
