"""The examples of docs/: a method and a network of one's own."""

import pathlib

import numpy as np
import torch

import baselines
import common
import fedavg
from conftest import QUICK, federation, pixels, run, softmax_gradient

HERE = pathlib.Path(fedavg.__file__).parent
lastlayer = common.load_file(HERE / "docs" / "lastlayer.py")


def test_two_rounds_by_hand(toy, tmp_path):
    """One full-batch step per client and round. The model has one layer, so that all of it is
    interpolated: lambda = .25."""
    argv = ["--dataset", toy, "--model", "linear", "--split", "iid", "--clients", "4",
            "--fraction", "0.5", "--batch-size", "0", "--lr", "0.5", "--rounds", "2",
            "--device", "cpu"]
    fed = federation(argv)
    w = fed.initial_weights().double().numpy()
    V = np.tile(w, (4, 1))
    for t in range(2):
        S = fed.sample(t)
        starts = {k: 0.75 * w + 0.25 * V[k] for k in S}
        for k in S:
            V[k] = starts[k] - 0.5 * softmax_gradient(starts[k], *pixels(fed, fed.split.train[k]))
        n = [len(fed.split.train[k]) for k in S]
        w = np.average(V[S], 0, n)
    _, state = run(lastlayer, [*argv, "--mix", "0.25"], tmp_path)
    np.testing.assert_allclose(state["w"].numpy(), w, atol=2e-6)
    np.testing.assert_allclose(state["V"].numpy(), V, atol=2e-6)


def test_its_ends_are_fedavg_and_fedper(tmp_path):
    argv = [*QUICK, "--model", "mnistnet", "--momentum", "0"]
    _, w = run(fedavg, argv, tmp_path / "fedavg")
    _, w_0 = run(lastlayer, [*argv, "--mix", "0"], tmp_path / "0")
    torch.testing.assert_close(w_0["w"], w["w"])
    fedper, _ = run(baselines, ["--method", "fedper", *argv], tmp_path / "fedper")
    record, _ = run(lastlayer, [*argv, "--mix", "1"], tmp_path / "1")
    found, want = (one["final"]["personal"]["per_client"] for one in (record, fedper))
    assert found == want


def test_the_network_of_docs_trains(tmp_path):
    """Every tensor of it moves, in a run with both files."""
    argv = [*QUICK, "--limit", "400", "--model", f"{HERE}/docs/mynet.py:MyNet"]
    fed = federation(argv)
    _, state = run(lastlayer, argv, tmp_path)
    moved = (state["w"] != fed.initial_weights()).split(fed.net.sizes)
    assert len(state["w"]) == 10_122 and all(part.any() for part in moved)
