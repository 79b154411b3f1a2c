from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common
import fedavg
import fedavgm
from byhand import FLAGS, World, close
from conftest import federation, run, softmax_gradient


@pytest.mark.parametrize("form", ["nesterov", "plain"])
def test_three_rounds_by_hand(form, toy, tmp_path):
    """beta = .9, decay .1, and eta halved in each round. With beta 0 and no decay it is FedAvg."""
    argv = ["--dataset", toy, *FLAGS, "--lr-decay", "0.5", "--server-momentum", form]
    world = World(federation([*argv[:-2]]))
    w, v = world.w, np.zeros(15)
    for t, S in enumerate(world.S):
        ends = [world.descend(w, k, t, lambda w, *b: softmax_gradient(w, *b) + 0.1 * w,
                              eta=0.3 * 0.5**t) for k in S]
        dw = w - world.mean(ends, S)
        v = 0.9 * v + dw
        w = w - (dw + 0.9 * v if form == "nesterov" else v)
    more = ["--beta", "0.9", "--weight-decay", "0.1"]
    _, state = run(fedavgm, [*argv, *more], tmp_path / "out")
    close(state, w=w, v=v)
    more = ["--beta", "0", "--weight-decay", "0"]
    _, state = run(fedavgm, [*argv, *more], tmp_path / "beta 0")
    _, theirs = run(fedavg, argv[:-2], tmp_path / "fedavg")
    torch.testing.assert_close(state["w"], theirs["w"], atol=1e-6, rtol=0)


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
