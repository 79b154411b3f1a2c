import json
import pathlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import baselines
import common
import fedavg
import fedavgm
import fl.run
from conftest import QUICK, federation, killed, paths, pixels, run, same, softmax_gradient
from papers import fedavg_figure_1, fedavg_how_often

TOY = ["--model", "linear", "--momentum", "0", "--lr", "0.5", "--rounds", "1", "--epochs", "1",
       "--batch-size", "0", "--client-test", "0.2", "--device", "cpu"]
SKEWED = ["--split", "dirichlet-classes", "--alpha", "5", "--clients", "4"]


def test_two_rounds_by_hand_with_unequal_clients(toy, tmp_path):
    """Two of four clients with different n_k, others in each round; two local epochs of full-batch
    descent, averaged with n_k/n."""
    argv = ["--dataset", toy, *TOY, *SKEWED, "--fraction", "0.5", "--epochs", "2", "--rounds", "2"]
    fed = federation(argv)
    w_t, sampled = fed.initial_weights().double().numpy(), [fed.sample(t) for t in range(2)]
    assert not np.array_equal(*sampled)
    for S in sampled:
        sizes, total = [len(fed.split.train[k]) for k in S], np.zeros_like(w_t)
        assert len(S) == 2 and sizes[0] != sizes[1]
        for k, n in zip(S, sizes):
            w = w_t
            for _ in range(2):
                w = w - 0.5 * softmax_gradient(w, *pixels(fed, fed.split.train[k]))
            total += n * w
        w_t = total / sum(sizes)
    _, state = run(fedavg, argv, tmp_path / "out")
    np.testing.assert_allclose(state["w"].numpy(), w_t, atol=1e-6)


def test_all_clients_with_one_full_batch_are_one_step_of_gradient_descent(toy, tmp_path):
    argv = ["--dataset", toy, *TOY, *SKEWED, "--fraction", "1"]
    fed = federation(argv)
    w0 = fed.initial_weights().double().numpy()
    x, y = pixels(fed, np.concatenate(fed.split.train))
    _, state = run(fedavg, argv, tmp_path / "out")
    want = w0 - 0.5 * softmax_gradient(w0, x, y)
    np.testing.assert_allclose(state["w"].numpy(), want, atol=1e-6)


@pytest.mark.parametrize("momentum, decay", [(0, 0), (0.9, 0.01)])
def test_one_client_is_centralised_sgd(momentum, decay, toy, tmp_path):
    """K = 1 with minibatches of 7 over 48 images, against torch.optim.SGD. In baselines.py clients
    have momentum .9, which starts anew every round, and weight decay."""
    argv = ["--dataset", toy, *TOY, "--clients", "1", "--split", "iid", "--batch-size", "7",
            "--epochs", "2", "--rounds", "2", "--momentum", str(momentum),
            "--weight-decay", str(decay), "--lr-decay", "0.5"]
    fed = federation(argv)
    w = fed.initial_weights()
    model = torch.nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.copy_(w[:12].view(3, 4))
        model.bias.copy_(w[12:])
    for t in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5 * 0.5**t,
                                    momentum=momentum, weight_decay=decay)
        epochs, *_ = fed.plan(0, fed.split.train[0], t, 2)
        cuts = range(7, 48, 7)
        for index in (part for epoch in epochs for part in np.split(epoch, cuts)):
            x, y = pixels(fed, index)
            optimizer.zero_grad()
            z = model(torch.tensor(x, dtype=torch.float32))
            F.cross_entropy(z, torch.tensor(y)).backward()
            optimizer.step()
    module, more = (baselines, ["--method", "fedavg"]) if momentum else (fedavg, [])
    _, state = run(module, [*more, *argv], tmp_path / "out")
    want = torch.cat([model.weight.detach().flatten(), model.bias.detach()])
    torch.testing.assert_close(state["w"], want, atol=2e-6, rtol=0)


EQUAL = [*QUICK, "--epochs", "2", "--fraction", "1"]
UNEQUAL = [*EQUAL, "--split", "dirichlet-classes", "--alpha", "1"]
@pytest.mark.parametrize("more, minibatches, fastest", [
    ([], {1, 2}, "graphs"), (["--batch-size", "50"], {1}, "together"),
    (["--split", "iid", "--batch-size", "15"], {2}, "together")])
def test_all_paths_agree(more, minibatches, fastest, monkeypatch):
    """In float64. Clients of different sizes: some finish early, or their only minibatch is filled
    up; and clients of equal sizes with a smaller last minibatch."""
    fed = federation([*(EQUAL if "iid" in more else UNEQUAL), "--limit", "200", *more])
    assert len(set(fed.n.tolist())) == 1 if "iid" in more else len(set(fed.n.tolist())) > 4
    assert {-(-int(n) // fed.args.batch_size) for n in fed.n} == minibatches
    scale = common.TRANSFORMS["scale"](fed.data)
    fed.transform = lambda x, u=None: scale(x).double()
    client_update, S = fedavg.local_training(fed.net, fed.args), np.arange(8)
    w, eta = fed.initial_weights().double(), torch.tensor(0.05)
    found = {}
    for way in paths(fed, monkeypatch):
        found[way] = fed.train(client_update, S, 0, own=[w.expand(8, -1)], shared=[eta])
        taken = fastest if way == "together" else way
        assert fed.training.used == taken
    loop = found.pop("loop")
    for other in found.values():
        torch.testing.assert_close(other, loop, atol=1e-9, rtol=1e-9)
    assert (loop - w).norm() > 0.1


def test_bits_do_not_depend_on_how_many_clients_go_together(tmp_path):
    one, a = run(fedavg, [*UNEQUAL, "--parallel", "1"], tmp_path / "1")
    two, b = run(fedavg, [*UNEQUAL, "--parallel", "3"], tmp_path / "3")
    assert torch.equal(a["w"], b["w"]) and one["final"] == two["final"]


def test_a_client_does_the_same_whoever_trains_beside_it():
    fed = federation(UNEQUAL)
    client_update, w = fedavg.local_training(fed.net, fed.args), fed.initial_weights()
    shared = [torch.tensor(0.01)]
    alone = fed.train(client_update, [3], 5, own=[w[None]], shared=shared)
    beside = fed.train(client_update, [1, 3, 6], 5, own=[w.expand(3, -1)], shared=shared)
    assert torch.equal(alone[0], beside[1]) and not torch.equal(alone[0], w)


def test_seeds(tmp_path):
    """--seed changes the run but not the split; --split-seed the split but not the initial weights
    or the sampled clients."""
    flags = {"a": [], "again": [], "seed": ["--seed", "1"], "split": ["--split-seed", "1"]}
    a, again, seed, split = ((*run(fedavg, [*QUICK, *more], tmp_path / name),
                              federation([*QUICK, *more])) for name, more in flags.items())
    assert torch.equal(a[1]["w"], again[1]["w"]) and a[0]["final"] == again[0]["final"]
    assert not torch.equal(a[1]["w"], seed[1]["w"])
    assert not torch.equal(a[2].initial_weights(), seed[2].initial_weights())
    assert a[0]["split"] == seed[0]["split"]
    assert a[0]["split"]["fingerprint"] != split[0]["split"]["fingerprint"]
    assert torch.equal(a[2].initial_weights(), split[2].initial_weights())
    assert all(np.array_equal(a[2].sample(t), split[2].sample(t)) for t in range(9))
    assert any(not np.array_equal(a[2].sample(t), seed[2].sample(t)) for t in range(9))


@pytest.mark.parametrize("clients, fraction, m", [
    (100, 0.1, 10), (10, 0.05, 1), (50, 0.3, 15), (30, 1.0, 30), (10, 0.99, 9), (10, 0.0, 1),
    (100, 0.29, 29)])  # in floating-point numbers .29 * 100 is 28.999999999999996
def test_the_number_of_sampled_clients_is_c_times_k_rounded_down(clients, fraction, m):
    fed = federation(["--dataset", "shapes", "--limit", "1000", "--split", "iid", "--device", "cpu",
                      "--clients", str(clients), "--fraction", str(fraction)])
    draws = [fed.sample(t) for t in range(40)]
    assert all(len(set(S)) == m and S.min() >= 0 and S.max() < clients for S in draws)
    assert len(set(np.concatenate(draws))) >= min(clients, 20) * 0.8


def test_it_learns(tmp_path):
    """A few rounds of the demonstration, on fewer images: far above chance, which is .1."""
    argv = ["--dataset", "shapes", "--limit", "2000", "--rounds", "4", "--split", "iid",
            "--epochs", "3", "--clients", "4", "--fraction", "1", "--device", "cpu"]
    record, _ = run(fedavg, argv, tmp_path)
    assert record["final"]["global"]["top1"] > 0.5


# Its own paper: the defaults, the measure of its tables, its Figure 1


def test_defaults_are_tables_2_and_3():
    """The target of a data set that is not the paper's is none."""
    def arguments(*argv):
        return fedavg.arguments(["--dataset", *argv])

    for name, own in (("mnist", ("mnistcnn", "centre", 1000, 10, 1, [0.99])),
                      ("cifar10", ("tfcnn", "tensorflow", 2000, 50, 0.99, [0.8, 0.82, 0.85]))):
        args = arguments(name)
        assert own == (args.model, args.transform, args.rounds, args.batch_size, args.lr_decay,
                       args.target)
        assert (args.split, args.clients, args.fraction, args.epochs) == ("iid", 100, 0.1, 5)
        assert args.client_test == 0
        assert arguments(name, "--target").target == []
    others = ("cifar100", "emnist", "tinyimagenet", "shapes", "mine.npz")
    assert all(arguments(name).target == [] for name in others)


CURVE = [0.5, 0.9, 0.8, 0.96, 0.96, 0.98]  # best so far: .5 .9 .9 .96 .96 .98


@pytest.mark.parametrize("target, rounds", [
    (0.4, 1), (0.5, 1), (0.7, 1.5), (0.9, 2), (0.93, 3.5), (0.96, 4), (0.97, 5.5), (0.98, 6),
    (0.99, None)])
def test_rounds_to_a_target_by_hand(target, rounds):
    """Where the straight lines between the rounds of the monotone curve cross the target for the
    first time. Rounds without a measure do not count."""
    history = [{"round": t + 1, "top1": top1} for t, top1 in enumerate(CURVE)]
    found = fl.run.rounds_to(target, history)
    assert found == (rounds if rounds is None else pytest.approx(rounds))
    unmeasured = [{"round": 0}, *history, {"round": 7, "diverged": True}]
    assert fl.run.rounds_to(target, unmeasured) == found
    assert fl.run.rounds_to(target, []) is None


WITH_MOMENTUM = ["--model", "cnn", "--transform", "scale", "--beta", "0.5"]


@pytest.mark.parametrize("module, more", [(fedavg, []), (fedavgm, WITH_MOMENTUM)])
def test_a_run_stops_at_its_target(module, more, tmp_path):
    """At the first round whose accuracy is the target or more, which is then evaluated in full."""
    argv = [*QUICK, *more, "--lr", "0.05", "--split", "iid", "--client-test", "0", "--rounds", "6"]
    every, _ = run(module, [*argv, "--eval-every", "1"], tmp_path / "every")
    top1 = [row["global"]["top1"] for row in every["rounds"]]
    low, high = top1[0] / 2, max(top1[:4])
    last = next(t for t, value in enumerate(top1) if value >= high) + 1
    assert 1 < last < 6
    targets = ["--target", str(high), str(low), "--eval-every", "100"]
    record, state = run(module, [*argv, *targets], tmp_path / "target")
    whole, want = run(module, [*argv[:-1], str(last)], tmp_path / "whole")
    rounds = record["rounds"]
    assert [row["top1"] for row in rounds] == top1[:last] and record["status"] == "finished"
    assert [row["round"] for row in rounds if "global" in row] == [last]
    assert all(row["evaluation_seconds"] > 0 for row in rounds)
    assert record["final"] == whole["final"]
    assert all(torch.equal(state[name], want[name]) for name in want)
    assert list(record["rounds_to"]) == [f"{high:g}", f"{low:g}"]
    assert record["rounds_to"][f"{low:g}"] == 1
    assert last - 1 < record["rounds_to"][f"{high:g}"] <= last


def test_a_run_that_stopped_at_its_target_is_finished_and_others_go_on(tmp_path, capsys):
    argv = [*QUICK, "--lr", "0.05", "--rounds", "4", "--eval-every", "2"]
    never, _ = run(fedavg, [*argv, "--target", "1"], tmp_path / "never")
    assert len(never["rounds"]) == 4 and never["rounds_to"] == {"1": None}
    assert "target  1: not reached" in capsys.readouterr().out
    killed(fedavg, [*argv, "--target", "1"], tmp_path / "parts", lambda t, _: t == 3)
    parts, _ = run(fedavg, [*argv, "--target", "1", "--resume"], tmp_path / "parts")
    assert same(parts, never)
    first, _ = run(fedavg, [*argv, "--target", "0.01"], tmp_path / "at once")
    again, _ = run(fedavg, [*argv, "--target", "0.01", "--resume"], tmp_path / "at once")
    assert len(first["rounds"]) == 1 and again == first
    assert "target  0.01: after 1.0 rounds" in capsys.readouterr().out


def test_figure_1_is_the_loss_between_two_clients_models(toy, tmp_path, monkeypatch):
    """Softmax regression in numpy: two clients' full-batch descent from one start and from two, and
    the loss at theta = .5, 0 and 1."""
    monkeypatch.setattr(fedavg_figure_1, "SETTING", " ".join(["--dataset", toy, *TOY]))
    argv = ["--clients", "3", "--split", "iid", "--client-test", "0", "--epochs", "2"]
    record = fedavg_figure_1.main(argv, tmp_path)
    assert record == json.loads((tmp_path / "fedavg-figure-1.json").read_text())
    assert (tmp_path / "fedavg-figure-1.png").exists()
    fed, other = (federation(["--dataset", toy, *TOY, *argv, "--seed", seed]) for seed in "01")
    x, y = pixels(fed, np.arange(60))
    starts = [one.initial_weights().double().numpy() for one in (fed, other)]
    for name, pair in (("shared", (starts[0], starts[0])), ("different", starts)):
        ends = []
        for k, w in enumerate(pair):
            for _ in range(2):
                w = w - 0.5 * softmax_gradient(w, *pixels(fed, fed.split.train[k]))
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


def test_rounds_to_a_target_if_every_second_round_is_measured_by_hand():
    curve = (0.2, 0.9, 0.4, 0.6, 0.8, 0.8)
    history = [{"round": i + 1, "top1": top1} for i, top1 in enumerate(curve)]
    assert fedavg_how_often.every(1, 0.8, history) == [pytest.approx(1 + 6 / 7)]
    assert fedavg_how_often.every(2, 0.8, history) == [5, 2]  # of rounds 1, 3, 5; of 2, 4, 6


def test_the_page_has_figure_1s_numbers():
    root = pathlib.Path(fedavg.__file__).parent
    record = json.loads((root / "results" / "fedavg-figure-1.json").read_text())
    page, theta = (root / "docs" / "fedavg.md").read_text(), np.array(record["theta"])
    for name, loss in record["loss"].items():
        row = [f"{loss[np.abs(theta - at).argmin()]:.3f}".lstrip("0") for at in (1, 0, 0.5)]
        assert f"| {name} | {' | '.join(row)} |" in page
