from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common
import fedavg
import fedavgm
from conftest import QUICK, federation, pixels, run, softmax_gradient

SAME = [*QUICK, "--model", "cnn", "--transform", "scale", "--split", "dirichlet-hsu",
        "--alpha", "1", "--weight-decay", "0", "--momentum", "0", "--batch-size", "20",
        "--lr", "0.05", "--client-test", "0"]


@pytest.mark.parametrize("form", ["nesterov", "plain"])
def test_without_momentum_it_is_fedavg(form, tmp_path):
    a, w = run(fedavg, SAME, tmp_path / "a")
    b, wv = run(fedavgm, [*SAME, "--beta", "0", "--server-momentum", form], tmp_path / "b")
    torch.testing.assert_close(w["w"], wv["w"], atol=1e-6, rtol=0)
    assert a["split"] == b["split"]
    assert a["final"]["global"]["loss"] == pytest.approx(b["final"]["global"]["loss"], abs=1e-5)


@pytest.mark.parametrize("form", ["nesterov", "plain"])
def test_two_rounds_by_hand(form, toy, tmp_path):
    """One full-batch step per client and round, beta .9: every number from the definitions, in
    float64."""
    argv = ["--dataset", toy, "--model", "linear", "--transform", "scale", "--batch-size", "0",
            "--lr", "0.5", "--weight-decay", "0", "--rounds", "2", "--split", "dirichlet-classes",
            "--alpha", "5", "--clients", "4", "--fraction", "0.5", "--device", "cpu"]
    fed = federation([*argv, "--client-test", "0"])
    w = fed.initial_weights().double().numpy()
    v = np.zeros_like(w)
    for t in range(2):
        sampled = fed.sample(t)
        n = np.array([len(fed.split.train[k]) for k in sampled])
        assert len(set(n)) > 1
        gradients = [softmax_gradient(w, *pixels(fed, fed.split.train[k])) for k in sampled]
        updates = [0.5 * gradient for gradient in gradients]  # w - w_k
        dw = sum(n_k * update for n_k, update in zip(n, updates)) / n.sum()
        v = 0.9 * v + dw
        w = w - (dw + 0.9 * v if form == "nesterov" else v)
    _, state = run(fedavgm, [*argv, "--beta", "0.9", "--server-momentum", form], tmp_path / "out")
    np.testing.assert_allclose(state["w"].numpy(), w, atol=2e-6)
    np.testing.assert_allclose(state["v"].numpy(), v, atol=2e-6)


def test_first_step_is_one_plus_beta_times_as_long(tmp_path):
    """At the first round v = dw, so Nesterov's step is (1 + beta) dw."""
    one = [*SAME, "--rounds", "1"]
    w0 = federation(one).initial_weights()
    _, plain = run(fedavgm, [*one, "--beta", "0"], tmp_path / "a")
    _, nesterov = run(fedavgm, [*one, "--beta", "0.7"], tmp_path / "b")
    torch.testing.assert_close(nesterov["w"] - w0, 1.7 * (plain["w"] - w0), atol=1e-6, rtol=1e-4)


def test_weight_decay_acts_on_the_hidden_fully_connected_kernels_alone():
    net = common.Net("tfcnn", (3, 24, 24), 10)
    decayed = {name for name, span, _ in net.tensors if net.decayed[span].all()}
    assert decayed == {"fc3.weight", "fc4.weight"}
    assert net.decayed.sum() == 2304 * 384 + 384 * 192
    assert common.Net("cnn", (3, 32, 32), 10).decayed.all()

    w = net.init(common.stream(0, "initialisation"))
    b = common.Batch(torch.rand(4, 3, 24, 24), torch.arange(4), torch.ones(4), torch.zeros(0))
    ends = []
    for decay in (0.0, 0.004):
        args = SimpleNamespace(momentum=0.0, weight_decay=decay)
        ends.append(fedavgm.local_training(net, args)(w, [[b]], torch.tensor(1.0)))
    torch.testing.assert_close(ends[0] - ends[1], 0.004 * w * net.decayed, atol=1e-6, rtol=0)


def test_the_default_pair_is_the_one_that_learns():
    args = fedavgm.arguments(["--dataset", "cifar10"])
    found = args.lr, args.beta, args.alpha, args.fraction, args.rounds
    assert found == (0.0003, 0.99, 0.1, 0.05, 10_000)
