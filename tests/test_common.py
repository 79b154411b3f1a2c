"""Streams, flags, measures and what clients keep, against numbers derived here."""

import numpy as np
import pytest
import torch

import common
import fedavg
import fl.training
from conftest import federation, refused

CPU = ["--device", "cpu"]
SHAPES = ["--dataset", "shapes", *CPU]


def test_one_gpu_for_several_processes_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = "--device cuda:0 is one GPU for 2 processes; use --device cuda"
    refused(capsys, words, fl.training.find_device, "cuda:0")


def test_help_names_the_paper_s_symbols_and_the_defaults(capsys):
    with pytest.raises(SystemExit) as stop:
        fedavg.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    for words in ("C, share of the clients", "E (E_L in PersFL), local epochs",
                  "B, local minibatch", "eta, local learning rate", "K, clients in all",
                  "(default: 2000)"):
        assert words in text


def test_streams_are_independent():
    seen = {tuple(common.stream(*key).integers(0, 2**62, 2)) for key in
            [(s, p, t, k) for s in (0, 1) for p in common.STREAMS for t in (0, 1) for k in (0, 1)]}
    assert len(seen) == 2 * len(common.STREAMS) * 4


# Measures


def test_calibration_by_hand():
    """Six images, 15 bins. p = .50 (right), .52 (wrong): both in (7/15, 8/15]. p = 1 (right, right,
    wrong): the last bin. p = 2/3 (right) is the upper edge of (9/15, 10/15]."""
    p = torch.tensor([0.50, 0.52, 1.0, 1.0, 1.0, 2 / 3], dtype=torch.double)
    logits = torch.stack([p.clamp(max=1 - 1e-15).log(), (1 - p).clamp(min=1e-15).log()], 1)
    logits[0] = 0.0
    y = torch.tensor([0, 1, 0, 0, 1, 0])
    gaps = [abs(1.02 - 1), abs(3 - 2), abs(2 / 3 - 1)]  # sum of p - number right, per bin
    one = common.score(logits, y, torch.zeros(6, dtype=torch.long), 1)
    assert one["ece"].item() == pytest.approx(sum(gaps) / 6, abs=1e-9)
    assert one["mce"].item() == pytest.approx(max(gaps[0] / 2, gaps[1] / 3, gaps[2]), abs=1e-9)
    assert one["top1"].item() == pytest.approx(4 / 6)


def test_measures_per_group_are_those_of_the_group_alone():
    torch.manual_seed(0)
    logits, y = torch.randn(200, 12), torch.randint(0, 12, (200,))
    group = torch.randint(0, 3, (200,))
    together = common.score(logits, y, group, 3)
    for g in range(3):
        z, t = logits[group == g], y[group == g]
        alone = common.score(z, t, torch.zeros(len(t), dtype=torch.long), 1)
        for name in together:
            assert together[name][g].item() == pytest.approx(alone[name][0].item(), abs=1e-12)
        top5 = np.mean([label in row.topk(5).indices for row, label in zip(z, t)])
        assert alone["top5"].item() == pytest.approx(top5)
        loss = torch.nn.functional.cross_entropy(z.double(), t).item()
        assert alone["loss"].item() == pytest.approx(loss)


@pytest.mark.parametrize("threads", ["1", "3"])
def test_personal_measures(toy, threads):
    """Three clients with 5, 2 and 3 test images, whose accuracies can be read off a model that
    always says class 1."""
    argv = ["--dataset", toy, "--model", "linear", "--clients", "3", "--split", "iid", *CPU]
    fed = federation([*argv, "--parallel", threads])
    own = [np.flatnonzero(fed.data.labels[:60] == c) for c in range(3)]
    # accuracies .8, 0, 1/3
    test = [np.r_[own[1][:4], own[0][:1]], own[0][:2], np.r_[own[1][:1], own[2][:2]]]
    fed.split = fed.split._replace(test=test)
    w = torch.zeros(fed.net.d)
    w[12 + 1] = 5.0
    a = np.array([0.8, 0, 1 / 3])
    for W in (w, w.expand(3, -1), lambda S: w.expand(len(S), -1)):
        got = fed.evaluate_clients(W)
        assert got["per_client"] == pytest.approx(a) and got["mean"] == pytest.approx(a.mean())
        assert got["std"] == pytest.approx(a.std(ddof=1))
        assert got["weighted_mean"] == pytest.approx(5 / 10)
        assert got["worst_decile"] == pytest.approx(0)
    W = w.repeat(3, 1)
    W[1, 12:] = torch.tensor([5.0, 0, 0])  # client 1 has a model of its own, which says class 0
    assert fed.evaluate_clients(W)["per_client"] == pytest.approx([0.8, 1, 1 / 3])
    assert "val_mean" not in got
    fed.args.client_val = 0.1
    fed.split = fed.split._replace(val=[own[0][5:], own[0][5:], own[1][5:]])  # 0, 1, 1
    got = fed.evaluate_clients(W)
    assert got["per_client"] == pytest.approx([0.8, 1, 1 / 3])
    assert got["val_mean"] == pytest.approx(2 / 3)
    assert got["val_loss"] == pytest.approx(fed.evaluate_clients(W, fed.split.val)["loss"])
    assert "val_mean" not in fed.evaluate_clients(W, fed.split.test)
    assert fed.evaluate(w)["top1"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("S", [
    2, [2, 0], np.array([1, 2]), [], np.array([]), slice(1, None), torch.tensor([0, 2]),
    np.array([True, False, True]), range(2)])
def test_rows_are_picked_and_replaced_as_a_tensors_are(S):
    fed = federation([*SHAPES, "--limit", "30", "--clients", "3", "--split", "iid",
                      "--client-test", "0", "--model", "mnistnet"])
    first = torch.arange(6.0).view(3, 2)
    V, whole = fed.per_client(lambda k: first[k]), first.clone()
    at = S if np.size(S) else []
    assert torch.equal(V[S], whole[at])
    V[S], whole[at] = -V[S], -whole[at]
    assert torch.equal(V.all, whole)
    assert not torch.equal(whole, first) or np.size(S) == 0


@pytest.mark.parametrize("device, sizes", [("cpu", [(8, 3)]), ("cpu:0", [(3,)] * 8)])
def test_rows_of_all_processes_are_gathered_where_they_lie(device, sizes):
    """The first of two processes has the even clients. In the host's memory (here cpu, beside the
    device cpu:0) the rows of all clients may be more than the device has room for."""
    fed, sent = federation([*SHAPES, "--limit", "80", "--clients", "8", "--split", "iid"]), []
    fed.processes, fed.clients, fed.device = 2, np.arange(0, 8, 2), torch.device(device)
    fed.all_reduce = lambda x: sent.append(tuple(x.shape)) or 10 * x
    x = torch.arange(12.0).view(4, 3)
    whole = fed.gather(x)
    assert sent == sizes and torch.equal(whole[::2], 10 * x) and not whole[1::2].any()
    assert torch.equal(fed.gather(x[[1]], among=[5, 2]), whole[[2, 5]])
