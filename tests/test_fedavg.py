import json
import pathlib

import numpy as np
import pytest
import torch

import baselines
import fedavg
import fedavgm
import fedslr
import fl.run
import superfed
from byhand import BARE, FLAGS, World, close, spy
from conftest import federation, killed, pixels, run, same, softmax_gradient
from papers import fedavg_figure_1, fedavg_how_often


def test_three_rounds_by_hand(toy, tmp_path):
    """Of clients with different n_k, and eta halved in each round."""
    argv = ["--dataset", toy, *FLAGS, "--lr-decay", "0.5"]
    world = World(federation(argv))
    w = world.w
    for t, S in enumerate(world.S):
        w = world.mean([world.descend(w, k, t, eta=0.3 * 0.5**t) for k in S], S)
    _, state = run(fedavg, argv, tmp_path)
    close(state, w=w)


@pytest.mark.parametrize("momentum, decay", [(0, 0), (0.9, 0.01)])
def test_one_client_is_centralised_sgd(momentum, decay, toy, tmp_path):
    """K = 1, in fedavg.py and in the method centralised. In baselines.py clients have momentum .9,
    which starts anew every round, and weight decay. (checks/authors has torch.optim.SGD.)"""
    argv = ["--dataset", toy, *BARE, "--clients", "1", "--split", "iid", "--fraction", "1",
            "--momentum", str(momentum), "--weight-decay", str(decay), "--lr-decay", "0.5"]
    world = World(federation(argv))
    w = world.w
    for t in range(3):
        w = world.descend(w, 0, t, lambda w, *b: softmax_gradient(w, *b) + decay * w,
                          eta=0.3 * 0.5**t, momentum=momentum)
    runs = [(baselines, "--method", "fedavg"), (baselines, "--method", "centralised")]
    for i, (module, *more) in enumerate([*runs, *[(fedavg,)] * (not momentum)]):
        close(run(module, [*more, *argv], tmp_path / str(i))[1], w=w)


def test_seeds(toy, tmp_path):
    """--seed changes the run but not the split; --split-seed the split but not the initial weights
    or the sampled clients."""
    flags = {"a": [], "again": [], "seed": ["--seed", "1"], "split": ["--split-seed", "1"]}
    argv = ["--dataset", toy, *FLAGS]
    a, again, seed, split = ((*run(fedavg, [*argv, *more], tmp_path / name),
                              federation([*argv, *more])) for name, more in flags.items())
    assert torch.equal(a[1]["w"], again[1]["w"]) and a[0]["final"] == again[0]["final"]
    assert not torch.equal(a[1]["w"], seed[1]["w"])
    assert not torch.equal(a[2].initial_weights(), seed[2].initial_weights())
    assert a[0]["split"] == seed[0]["split"]
    assert a[0]["split"]["fingerprint"] != split[0]["split"]["fingerprint"]
    assert torch.equal(a[2].initial_weights(), split[2].initial_weights())
    assert all(np.array_equal(a[2].sample(t), split[2].sample(t)) for t in range(9))
    assert any(not np.array_equal(a[2].sample(t), seed[2].sample(t)) for t in range(9))


@pytest.mark.parametrize("module", [fedavg, fedavgm, superfed, fedslr, baselines])
def test_a_round_has_c_times_k_clients_rounded_down(module, tmp_path, monkeypatch):
    """At least one. In floating-point numbers .29 * 100 is 28.999999999999996. Nobody is sampled
    twice, and each client's turn comes."""
    x, y = np.zeros((200, 1, 1), np.uint8), np.arange(200) % 2
    np.savez(tmp_path / "few.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2])
    argv = ["--dataset", str(tmp_path / "few.npz"), "--model", "mnistnet", "--split", "iid",
            "--client-test", "0", "--clients", "100", "--eval-every", "99", "--device", "cpu",
            "--transform", "scale"]
    calls = spy(monkeypatch, lambda own, S: own[0] if len(own) == 1 else (own[0], own[-1]))
    for C, m, rounds in (("0.29", 29, "12"), ("0", 1, "1"), ("0.999", 99, "1")):
        more = ["--method", "fedprox"] * (module == baselines)
        run(module, [*more, *argv, "--fraction", C, "--rounds", rounds], tmp_path / C)
        assert len(calls) == int(rounds) and all(len({*call.S}) == m for call in calls)
        seen = {k for call in calls for k in call.S}
        assert seen <= {*range(100)} and (len(seen) > 90 or m == 1)
        calls.clear()


# Its own paper: the measure of its tables, its Figure 1


def history(*curve):
    return [{"round": t + 1, "top1": top1} for t, top1 in enumerate(curve)]


@pytest.mark.parametrize("target, rounds", [
    (0.4, 1), (0.5, 1), (0.7, 1.5), (0.9, 2), (0.93, 3.5), (0.96, 4), (0.97, 5.5), (0.98, 6),
    (0.99, None)])
def test_rounds_to_a_target_by_hand(target, rounds):
    """Where the straight lines between the rounds of the monotone curve cross the target for the
    first time. Rounds without a measure do not count."""
    rows = history(0.5, 0.9, 0.8, 0.96, 0.96, 0.98)  # best so far: .5 .9 .9 .96 .96 .98
    found = fl.run.rounds_to(target, rows)
    assert found == (rounds if rounds is None else pytest.approx(rounds))
    unmeasured = [{"round": 0}, *rows, {"round": 7, "diverged": True}]
    assert fl.run.rounds_to(target, unmeasured) == found
    assert fl.run.rounds_to(target, []) is None


def test_rounds_to_a_target_if_every_second_round_is_measured_by_hand():
    rows = history(0.2, 0.9, 0.4, 0.6, 0.8, 0.8)
    assert fedavg_how_often.every(1, 0.8, rows) == [pytest.approx(1 + 6 / 7)]
    assert fedavg_how_often.every(2, 0.8, rows) == [5, 2]  # of rounds 1, 3, 5; of 2, 4, 6


@pytest.mark.parametrize("module", [fedavg, fedavgm])
def test_a_run_stops_at_its_target(module, toy, tmp_path, capsys):
    """At the first round whose accuracy is the target or more, which is then evaluated in full.
    With --resume it is finished; a run that has not reached its target goes on."""
    argv = ["--dataset", toy, *FLAGS, "--rounds", "12", "--lr", "1", "--epochs", "1"]
    every, _ = run(module, argv, tmp_path / "every")
    top1 = [row["global"]["top1"] for row in every["rounds"]]
    last = top1.index(max(top1)) + 1
    low, high = min(top1) - 0.01, max(top1) - 0.01  # of 30 images
    assert low < high and 1 < last < 12
    argv += ["--eval-every", "100", "--target"]
    record, state = run(module, [*argv, str(high), str(low)], tmp_path / "target")
    rounds, until = record["rounds"], record["rounds_to"]
    assert [row["top1"] for row in rounds] == top1[:last] and record["status"] == "finished"
    assert [row["round"] for row in rounds if "global" in row] == [last]
    assert all("evaluation_seconds" in row for row in rounds)
    assert rounds[-1]["global"] == every["rounds"][last - 1]["global"]
    assert [*until] == [f"{high:g}", f"{low:g}"] and until[f"{low:g}"] == 1
    assert last - 1 < until[f"{high:g}"] <= last
    again, end = run(module, [*argv, str(high), str(low), "--resume"], tmp_path / "target")
    assert again == record and all(torch.equal(state[name], end[name]) for name in end)
    capsys.readouterr()
    never, _ = run(module, [*argv, "1"], tmp_path / "never")
    assert len(never["rounds"]) == 12 and never["rounds_to"] == {"1": None}
    assert "target  1: not reached" in capsys.readouterr().out
    killed(module, [*argv, "1"], tmp_path / "parts", lambda t, _: t == 3)
    parts, _ = run(module, [*argv, "1", "--resume"], tmp_path / "parts")
    assert same(parts, never)


def test_figure_1_is_the_loss_between_two_clients_models(toy, tmp_path, monkeypatch):
    """Softmax regression in numpy: two clients' full-batch descent from one start and from two, and
    the loss at theta = .5, 0 and 1."""
    monkeypatch.setattr(fedavg_figure_1, "SETTING", " ".join(["--dataset", toy, *BARE]))
    argv = ["--split", "iid", "--client-test", "0", "--batch-size", "0"]
    record = fedavg_figure_1.main(argv, tmp_path)
    assert record == json.loads((tmp_path / "fedavg-figure-1.json").read_text())
    assert (tmp_path / "fedavg-figure-1.png").exists()
    fed, other = (federation(["--dataset", toy, *BARE, *argv, "--seed", seed]) for seed in "01")
    x, y = pixels(fed, np.arange(60))
    starts = [one.initial_weights().double().numpy() for one in (fed, other)]
    for name, pair in (("shared", (starts[0], starts[0])), ("different", starts)):
        ends = []
        for k, w in enumerate(pair):
            for _ in range(2):
                w = w - 0.3 * softmax_gradient(w, *pixels(fed, fed.split.train[k]))
            ends.append(w)
        for theta in (0, 0.5, 1):
            w = theta * ends[0] + (1 - theta) * ends[1]
            z = x @ w[:12].reshape(3, 4).T + w[12:]
            loss = np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(60), y])
            at = np.abs(np.array(record["theta"]) - theta).argmin()
            assert record["theta"][at] == pytest.approx(theta)
            assert record["loss"][name][at] == pytest.approx(loss, abs=1e-5)
    assert len(record["theta"]) == 51
    assert (min(record["theta"]), max(record["theta"])) == pytest.approx((-0.2, 1.2))


def test_the_page_has_figure_1s_numbers():
    root = pathlib.Path(fedavg.__file__).parent
    record = json.loads((root / "results" / "fedavg-figure-1.json").read_text())
    page, theta = (root / "docs" / "fedavg.md").read_text(), np.array(record["theta"])
    for name, loss in record["loss"].items():
        row = [f"{loss[np.abs(theta - at).argmin()]:.3f}".lstrip("0") for at in (1, 0, 0.5)]
        assert f"| {name} | {' | '.join(row)} |" in page
