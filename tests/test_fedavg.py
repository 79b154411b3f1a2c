import numpy as np
import pytest
import torch

import common
import fedavg
from conftest import QUICK, federation, paths, pixels, run, softmax_gradient

TOY = ["--model", "linear", "--momentum", "0", "--lr", "0.5", "--rounds", "1", "--epochs", "1", "--batch-size", "0", "--device", "cpu"]


def test_one_round_by_hand_with_unequal_clients(toy, tmp_path):
    """Two of four clients with different n_k, two local epochs of full-batch descent, averaged with n_k/n."""
    argv = ["--dataset", toy, *TOY, "--split", "dirichlet-classes", "--alpha", "5", "--clients", "4", "--fraction", "0.5", "--epochs", "2"]
    fed = federation(argv)
    S = fed.sample(0)
    w0 = fed.initial_weights().double().numpy()
    sizes = [len(fed.split.train[k]) for k in S]
    assert len(S) == 2 and sizes[0] != sizes[1]
    total = np.zeros_like(w0)
    for k, n in zip(S, sizes):
        w = w0
        for _ in range(2):
            w = w - 0.5 * softmax_gradient(w, *pixels(fed, fed.split.train[k]))
        total += n * w
    _, state = run(fedavg, argv, tmp_path / "out")
    np.testing.assert_allclose(state["w"].numpy(), total / sum(sizes), atol=1e-6)


def test_all_clients_with_one_full_batch_are_one_step_of_gradient_descent(toy, tmp_path):
    argv = ["--dataset", toy, *TOY, "--split", "dirichlet-classes", "--alpha", "5", "--clients", "4", "--fraction", "1"]
    fed = federation(argv)
    w0 = fed.initial_weights().double().numpy()
    x, y = pixels(fed, np.concatenate(fed.split.train))
    _, state = run(fedavg, argv, tmp_path / "out")
    np.testing.assert_allclose(state["w"].numpy(), w0 - 0.5 * softmax_gradient(w0, x, y), atol=1e-6)


def test_one_client_is_centralised_sgd(toy, tmp_path):
    """K = 1 with minibatches of 7 over 48 images, momentum .9 that starts anew every round, against torch.optim.SGD."""
    argv = ["--dataset", toy, *TOY, "--clients", "1", "--split", "iid", "--batch-size", "7", "--epochs", "2", "--rounds", "2", "--momentum", "0.9",
            "--weight-decay", "0.01", "--lr-decay", "0.5"]
    fed = federation(argv)
    w = fed.initial_weights()
    model = torch.nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.copy_(w[:12].view(3, 4))
        model.bias.copy_(w[12:])
    for t in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5 * 0.5**t, momentum=0.9, weight_decay=0.01)
        for e in range(2):
            plan = fed.plan(0, fed.split.train[0], t, 2)
            for index, real in zip(plan.index[7 * e : 7 * e + 7], plan.mask[7 * e : 7 * e + 7]):
                x, y = pixels(fed, index[real])
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(torch.tensor(x, dtype=torch.float32)), torch.tensor(y)).backward()
                optimizer.step()
    _, state = run(fedavg, argv, tmp_path / "out")
    want = torch.cat([model.weight.detach().flatten(), model.bias.detach()])
    torch.testing.assert_close(state["w"], want, atol=2e-6, rtol=0)


def test_every_epoch_visits_every_image_once(toy):
    fed = federation(["--dataset", toy, *TOY, "--clients", "3", "--batch-size", "7", "--split", "iid"])
    plan = fed.plan(1, fed.split.train[1], 4, 3)
    assert plan.index.shape == (9, 7) and plan.mask.sum() == 48  # 16 images: minibatches of 7, 7, 2, three times
    for e in range(3):
        rows = slice(3 * e, 3 * e + 3)
        assert sorted(plan.index[rows][plan.mask[rows]]) == sorted(fed.split.train[1])
    assert not np.array_equal(plan.index[:3], plan.index[3:6])


UNEQUAL = [*QUICK, "--split", "dirichlet-classes", "--alpha", "1", "--momentum", "0.9", "--epochs", "2", "--fraction", "1"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))])
def test_all_paths_agree_for_unequal_clients(device):
    """Masks, smaller last minibatches and clients that finish early; in float64."""
    fed = federation([*UNEQUAL, "--device", device])
    assert len({len(index) for index in fed.split.train}) > 4
    fed.transform = lambda x, u: common.scale(x).double()
    step, S = fedavg.client_step(fed.net, fed.args), np.arange(8)
    w = fed.initial_weights().double().expand(8, -1)
    eta = torch.tensor(0.01, device=fed.device)
    results = []
    for _ in paths(fed):
        results.append(fed.train(step, (w, torch.zeros_like(w)), S, 0, eta))
    for one, *others in zip(*results):
        for other in others:
            torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)
    assert (results[0][0] - w).norm() > 0.1


def test_bits_do_not_depend_on_how_many_clients_go_together(tmp_path):
    one, a = run(fedavg, [*UNEQUAL, "--parallel", "1"], tmp_path / "1")
    two, b = run(fedavg, [*UNEQUAL, "--parallel", "3"], tmp_path / "3")
    assert torch.equal(a["w"], b["w"]) and one["final"] == two["final"]


def test_a_client_does_the_same_whoever_trains_beside_it():
    fed = federation(UNEQUAL)
    step, w, eta = fedavg.client_step(fed.net, fed.args), fed.initial_weights(), torch.tensor(0.01)
    alone = fed.train(step, (w[None], torch.zeros_like(w)[None]), [3], 5, eta)[0]
    W = w.expand(3, -1)
    beside = fed.train(step, (W, torch.zeros_like(W)), [1, 3, 6], 5, eta)[0]
    assert torch.equal(alone[0], beside[1])


def test_seeds(tmp_path):
    """--seed changes the run but not the split; --split-seed the split but not the initial weights or the sampled clients."""
    runs = {}
    for name, more in {"a": [], "again": [], "seed": ["--seed", "1"], "split": ["--split-seed", "1"]}.items():
        runs[name] = (*run(fedavg, [*QUICK, *more], tmp_path / name), federation([*QUICK, *more]))
    a, again, seed, split = (runs[name] for name in ("a", "again", "seed", "split"))
    assert torch.equal(a[1]["w"], again[1]["w"]) and a[0]["final"] == again[0]["final"]
    assert not torch.equal(a[1]["w"], seed[1]["w"]) and not torch.equal(a[2].initial_weights(), seed[2].initial_weights())
    assert a[0]["split"] == seed[0]["split"] and a[0]["split"]["fingerprint"] != split[0]["split"]["fingerprint"]
    assert torch.equal(a[2].initial_weights(), split[2].initial_weights())
    assert all(np.array_equal(a[2].sample(t), split[2].sample(t)) for t in range(9))
    assert any(not np.array_equal(a[2].sample(t), seed[2].sample(t)) for t in range(9))


@pytest.mark.parametrize("clients, fraction, m", [(100, 0.1, 10), (10, 0.05, 1), (50, 0.3, 15), (30, 1.0, 30), (10, 0.99, 9), (10, 0.0, 1)])
def test_the_number_of_sampled_clients_is_c_times_k_rounded_down(clients, fraction, m):
    fed = federation(["--dataset", "shapes", "--limit", "1000", "--split", "iid", "--clients", str(clients), "--fraction", str(fraction), "--device", "cpu"])
    draws = [fed.sample(t) for t in range(40)]
    assert all(len(set(S)) == m and S.min() >= 0 and S.max() < clients for S in draws)
    assert len(set(np.concatenate(draws))) >= min(clients, 20) * 0.8


def test_it_learns(tmp_path):
    """Half a minute of the demonstration, on fewer images: far above chance."""
    argv = ["--dataset", "shapes", "--limit", "4000", "--rounds", "8", "--split", "iid", "--epochs", "3", "--clients", "4", "--fraction", "1", "--device", "cpu"]
    record, _ = run(fedavg, argv, tmp_path)
    assert record["final"]["global"]["top1"] > 0.5


def test_defaults_are_superfeds_table_1():
    """facts.md A1.5: R, C, E, B, eta, momentum and K of each data set."""
    want = {"cifar10": (200, 0.1, 100), "cifar100": (300, 0.1, 100), "emnist": (100, 0.01, None), "tinyimagenet": (500, 0.03, None)}
    for name, (rounds, fraction, clients) in want.items():
        args = common.parse(common.parser(fedavg.__doc__, **fedavg.DEFAULTS), fedavg.BY_DATASET, ["--dataset", name])
        assert (args.rounds, args.fraction, args.epochs, args.batch_size, args.lr, args.momentum) == (rounds, fraction, 10, 20, 0.01, 0.9)
        assert (args.split == "semantic") if clients is None else (args.clients == clients and args.split == "shards")
