import itertools
import pathlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common
import fedavg
import fl.records
import persfl
from conftest import equal, killed, refused, run, same, saved
from papers import persfl_users

SMALL = ["--dataset", "shapes", "--limit", "400", "--clients", "4", "--model", "mnistnet",
         "--rounds", "3", "--epochs", "1", "--transform", "scale", "--batch-size", "20",
         "--lr", "0.05", "--lr-decay", "1", "--distill-epochs", "2", "--distill-lr", "0.05",
         "--device", "cpu"]


PAIRS = list(itertools.product((1, 5, 25), (0, 0.25, 0.5, 0.75, 1)))  # the paper's grid


def federation(argv):
    return common.Federation(persfl.arguments(argv))


def students(fed, O, S=None, distil=None):
    """All students of Stage 2 for these teachers."""
    S = fed.everyone if S is None else S
    return fed.train(distil or persfl.distillation(fed.net, fed.args), S, fed.args.rounds,
                     own=[O], shared=[torch.tensor(0.05)], epochs=fed.args.distill_epochs)


# Stage 2: one student, one minibatch


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


class Linear:
    """3 classes, 4 features, no bias; w [12]."""

    d, device = 12, "cpu"

    def __call__(self, w, x):
        return x.flatten(1) @ w.view(3, 4).T


ONE = torch.tensor(1.0).double()  # eta, eta'


def flags(soft="kl"):
    return SimpleNamespace(soft=soft)


def students_step(args, grid):
    """The step inside of persfl.distillation, which may start from any student."""
    steps = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "step", lambda function: steps.append(function) or function)
        persfl.distillation(Linear(), args, grid)
    return steps[0]


def drawn(masked=0):
    """A random student, teacher and minibatch."""
    rng = np.random.default_rng(5)
    A, O = (torch.tensor(rng.normal(0, 2, 12)) for _ in range(2))
    n = 6 + masked
    x, y = torch.tensor(rng.normal(0, 1, (n, 4))), torch.tensor(rng.integers(0, 3, n))
    mask = torch.tensor([1.0] * 6 + [0.0] * masked).double()
    return A, O, common.Batch(x, y, mask, torch.zeros(0))


def step(soft, T, lam, masked=0):
    """The student after one step with eta' = 1."""
    A, O, b = drawn(masked)
    after, = students_step(flags(soft), [(T, lam)])(A[None], O, b, ONE)
    return after


def loss_by_hand(A, O, x, y, T, lam, soft):
    """(3) and (7), word by word."""
    z, v = x @ A.reshape(3, 4).T, x @ O.reshape(3, 4).T
    s, a = softmax(v / T), softmax(z / T)
    hard = -np.log(softmax(z)[np.arange(len(y)), y]).mean()
    terms = s * np.log(s / a) if soft == "kl" else -s * np.log(a)
    return (1 - lam) * hard + lam * T**2 * terms.sum(1).mean()


@pytest.mark.parametrize("soft", ["kl", "ce"])
@pytest.mark.parametrize("T, lam", PAIRS)
def test_the_gradient_is_that_of_the_papers_loss(soft, T, lam):
    """Central differences of a loss written in numpy; the step is A - gradient. Rows behind the
    mask count for nothing."""
    A, O, b = drawn(masked=2)
    after = step(soft, T, lam, masked=2).numpy()
    A, O, x, y = A.numpy(), O.numpy(), b.x[:6].numpy(), b.y[:6].numpy()
    h, slope = 1e-5, np.zeros(12)
    for i in range(12):
        up, down = (loss_by_hand(A + sign * h * np.eye(12)[i], O, x, y, T, lam, soft)
                    for sign in (1, -1))
        slope[i] = (up - down) / (2 * h)
    np.testing.assert_allclose(A - after, slope, atol=1e-6 * T**2)


def test_lambda_zero_is_fedavgs_update_whatever_the_teacher_and_the_temperature():
    A, O, b = drawn()
    w = fedavg.local_training(Linear(), flags())(A, [[b, b]], ONE)
    for T in (1.0, 25.0):
        one_step, found = students_step(flags(), [(T, 0.0)]), A[None]
        for _ in range(2):
            found = one_step(found, O, b, ONE)
        torch.testing.assert_close(found[0], w, atol=1e-12, rtol=0)
    assert (w - A).norm() > 0.1


@pytest.mark.parametrize("T", [1, 5, 25])
def test_with_lambda_one_a_student_stays_at_its_teacher(T):
    _, O, b = drawn()
    for soft in ("kl", "ce"):
        distil = persfl.distillation(Linear(), flags(soft), [(T, 1)])
        torch.testing.assert_close(distil(O, [[b]], ONE)[0], O, atol=T**2 * 1e-14, rtol=0)


def test_distil_goes_through_all_minibatches_and_keeps_its_teacher():
    """Two epochs for two pairs of the grid: each student as by its own steps."""
    args, grid = flags(), [(5, 0.75), (1, 0.25)]
    _, O, b = drawn()
    other = b._replace(x=b.x.flip(1))
    found = persfl.distillation(Linear(), args, grid)(O, [[b, other], [other]], ONE / 10)
    for i, pair in enumerate(grid):
        one_step, A = students_step(args, [pair]), O[None]
        for minibatch in (b, other, other):
            A = one_step(A, O, minibatch, ONE / 10)
        torch.testing.assert_close(found[i], A[0], atol=1e-12, rtol=0)
    assert found.shape == (2, 12) and min((A - O).norm() for A in found) > 0.01


def test_the_grid_has_a_student_for_each_pair_of_the_paper():
    """At lambda 0 and 1 (tests above) a student is the same for every T: one stands for all, that
    of T = 1."""
    assert len(persfl.GRID) == 11
    assert {(1 if lam in (0, 1) else T, lam) for T, lam in PAIRS} == set(persfl.GRID)
    first = [pair for pair in PAIRS if pair in persfl.GRID]
    assert first == persfl.GRID  # the first if tied is the first of the 15 pairs


# Stage 2: all students


def random_teachers(fed):
    streams = (common.stream(9, "initialisation", 0, k) for k in range(fed.K))
    return torch.stack([fed.net.init(rng) for rng in streams])


def test_students_side_by_side_are_each_trained_on_their_users_images():
    """Against a loop over users and pairs; a user's students see the same minibatches; lambda 0 and
    1 as derived above."""
    fed = federation(SMALL)
    O = random_teachers(fed)
    kept = O.clone()
    A = students(fed, O)
    assert A.shape == (4, 11, fed.net.d) and torch.equal(O, kept)
    for k in (0, 3):
        w = students(fed, O[k : k + 1], [k], fedavg.local_training(fed.net, fed.args))
        at = map(persfl.GRID.index, ((1, 0), (1, 1), (5, 0.75)))
        tuned, same, mixed = (A[k, i] for i in at)
        torch.testing.assert_close(tuned, w[0], atol=1e-6, rtol=0)  # lambda 0: fine-tuning of O_k
        torch.testing.assert_close(same, O[k], atol=1e-5, rtol=0)  # lambda 1: O_k itself
        alone = persfl.distillation(fed.net, fed.args, [(5, 0.75)])
        w = students(fed, O[k : k + 1], [k], alone)
        torch.testing.assert_close(mixed, w[0, 0], atol=1e-6, rtol=0)
        assert len({float(A[k, i].norm()) for i in range(11)}) == 11


# Stage 1


def noting_g(monkeypatch, losses=common.Federation.losses):
    """The G_e of all rounds, filled in while a run goes on."""
    sent = []
    monkeypatch.setattr(common.Federation, "losses",
                        lambda fed, w, images: sent.append(w) or losses(fed, w, images))
    return sent


def test_the_earliest_of_the_least_losses_wins(tmp_path, monkeypatch):
    """Losses are given, a row per round. User 0: a tie of rounds 2 and 4; 1: falling; 2: rising; 3:
    a tie from the start."""
    rows = iter(torch.tensor([[3, 9, 1, 5], [1, 7, 2, 5], [2, 5, 3, 5], [1, 3, 4, 5]]).double())
    sent = noting_g(monkeypatch, lambda *_: next(rows))
    record, state = run(persfl, [*SMALL, "--rounds", "4"], tmp_path)
    assert state["round_of_O"].tolist() == [2, 4, 1, 1]
    assert state["l_prime"].tolist() == [1, 3, 1, 5]
    assert record["rounds"][-1]["users"]["teacher's round"] == [2, 4, 1, 1]
    for k, e in enumerate((2, 4, 1, 1)):
        assert torch.equal(state["O"][k], sent[e - 1])
    assert torch.equal(sent[0], federation(SMALL).initial_weights())
    assert not torch.equal(state["G"], sent[3])


def test_stage_one_is_fedavg_bit_for_bit(tmp_path):
    """Of users with different numbers of images."""
    same = [name for i, name in enumerate(SMALL)
            if "distill" not in name and "distill" not in SMALL[i - 1]]
    split = ["--split", "dirichlet-classes", "--alpha", "0.9"]
    _, a = run(persfl, [*SMALL, *split], tmp_path / "persfl")
    more = ["--fraction", "1", "--client-val", "0.2", "--client-test", "0.2", "--momentum", "0"]
    record, b = run(fedavg, [*same, *split, *more], tmp_path / "fedavg")
    assert torch.equal(a["G"], b["w"]) and len(set(record["split"]["sizes"])) == 4


# Choices


def test_a_user_chooses_the_first_of_its_best_pairs():
    accuracy = np.zeros((3, 11))
    accuracy[0, [0, 4, 10]] = 0.9
    accuracy[1, [10, 3]] = 0.7
    accuracy[2, 5] = 0.2
    chosen, _ = persfl.best_students(torch.zeros(3, 11, 1), accuracy)
    assert [persfl.GRID[i] for i in chosen] == [(1, 0), (1, 0.75), (5, 0.25)]


def noting(monkeypatch):
    """Every Stage 2: its teachers O and its students A."""
    calls, train = [], common.Federation.train

    def spy(self, client_update, S, t, own, **options):
        found = train(self, client_update, S, t, own=own, **options)
        if "epochs" in options:
            calls.append(SimpleNamespace(fed=self, O=own[0], A=found))
        return found

    monkeypatch.setattr(common.Federation, "train", spy)
    return calls


def test_the_measures_of_the_last_round(tmp_path, monkeypatch):
    calls = noting(monkeypatch)
    record, state = run(persfl, [*SMALL, "--eval-every", "1"], tmp_path)
    (call,) = calls
    row, fed = record["rounds"][-1], call.fed
    table, on_test = row["users"], row["students"]["test"]
    assert torch.equal(call.O, state["O"]) and "users" not in record["rounds"][0]

    def accuracy(w, k, part="test"):
        index = getattr(fed.split, part)[k]
        return (fed.logits(w, index).argmax(1).numpy() == fed.data.labels[index]).mean()

    for k in range(4):
        val = [accuracy(call.A[k, i], k, "val") for i in range(11)]
        best = val.index(max(val))
        assert (table["T"][k], table["lambda"][k]) == persfl.GRID[best]
        assert torch.equal(state["A"][k], call.A[k, best])
        assert table["PersFL"][k] == pytest.approx(accuracy(call.A[k, best], k))
        assert table["fine-tuned"][k] == pytest.approx(accuracy(call.A[k, 0], k))
        assert table["FedAvg"][k] == pytest.approx(accuracy(state["G"], k))
        assert row["students"]["val"][k] == pytest.approx(val)
        assert on_test[k][4] == pytest.approx(accuracy(state["O"][k], k))  # lambda = 1
    assert record["final"]["personal"]["per_client"] == table["PersFL"]
    mean = pytest.approx(np.mean(table["PersFL"]))
    assert row["personal"]["mean"] == row["personal@val"]["mean"] == mean
    assert row["personal@test"]["mean"] == pytest.approx(np.max(on_test, 1).mean())
    assert row["personal@fedavg"]["mean"] == pytest.approx(np.mean(table["FedAvg"]))
    assert row["personal@lambda=0"]["std"] == pytest.approx(np.std(table["fine-tuned"], ddof=1))


def test_test_images_do_not_influence_any_choice(tmp_path, monkeypatch):
    argv, start = [*SMALL, "--lr", "0.02"], common.Federation.__init__
    clean, a = run(persfl, argv, tmp_path / "clean")

    def poisoned(self, args, make_net=None):
        start(self, args)
        central = np.arange(self.data.n_train, len(self.data.images))
        spoilt = np.concatenate([*self.split.test, central])
        self.labels, self.images = self.labels.clone(), self.images.clone()
        self.labels[spoilt] = (self.labels[spoilt] + 1) % 10
        self.images[spoilt] = 255 - self.images[spoilt]

    monkeypatch.setattr(common.Federation, "__init__", poisoned)
    other, b = run(persfl, argv, tmp_path / "poisoned")
    assert all(torch.equal(a[name], b[name]) for name in ("G", "O", "l_prime", "round_of_O", "A"))
    old, new = clean["rounds"][-1], other["rounds"][-1]
    for name in ("T", "lambda", "teacher's round"):
        assert old["users"][name] == new["users"][name]
    assert old["students"]["val"] == new["students"]["val"]
    assert old["students"]["test"] != new["students"]["test"]


def test_a_diverged_student_is_not_chosen():
    accuracy = np.array([[0.2, np.nan, 0.3], [np.nan, 0.0, 0.0], [0.5, 0.5, np.nan]])
    assert persfl.best_students(torch.zeros(3, 3, 1), accuracy)[0].tolist() == [2, 1, 0]
    fed = federation(SMALL)
    A = fed.initial_weights().repeat(4, 2, 1)  # [4 users, 2 students, d]
    A[1, 0, 7], A[2, 1, 7] = torch.inf, torch.nan
    found = np.isnan(persfl.accuracies(fed, A, fed.split.test))
    assert found.tolist() == [[False, False], [True, False], [False, True], [False, False]]


def test_users_all_take_part(capsys):
    refused(capsys, "all users take part", persfl.arguments, ["--fraction", "0.5"])
    refused(capsys, "use --client-val above 0", persfl.arguments, ["--client-val", "0"])
    refused(capsys, "neither momentum nor weight decay", persfl.arguments, ["--momentum", "0.9"])


def test_the_final_teacher_is_the_last_global_model_for_all(tmp_path, monkeypatch):
    calls = noting(monkeypatch)
    record, state = run(persfl, [*SMALL, "--teacher", "final"], tmp_path)
    assert torch.equal(calls[0].O, state["G"].expand(4, -1))
    assert not any(torch.equal(O, state["G"]) for O in state["O"])
    rows = record["rounds"]
    assert rows[-1]["users"]["teacher's round"] == [4] * 4  # the G that a round 4 would begin with
    down = 4 * 4 * state["G"].numel()  # 4 users, 4 bytes
    assert (rows[0]["bytes_down"], rows[-1]["bytes_down"]) == (down, 2 * down)


def test_a_users_teacher_is_the_global_model_of_least_validation_loss(tmp_path, monkeypatch):
    """Among those of all rounds; eta is so large that the last is not the best for all."""
    sent, calls = noting_g(monkeypatch), noting(monkeypatch)
    argv = [*SMALL, "--rounds", "6", "--lr", "0.5", "--distill-epochs", "1"]
    record, state = run(persfl, argv, tmp_path)
    fed, found = federation(argv), []
    for k in range(4):
        index = fed.split.val[k]
        y = np.arange(len(index)), fed.data.labels[index]
        p = [softmax(fed.logits(w, index).double().numpy())[y] for w in sent]
        found.append(int(np.argmin([-np.log(z).mean() for z in p])))
        assert torch.equal(calls[0].O[k], sent[found[k]])
    rounds = record["rounds"][-1]["users"]["teacher's round"]
    assert len(sent) == 6 and rounds == [e + 1 for e in found]
    assert min(found) < 5 and len(set(found)) > 1


def test_two_runs_are_averaged_by_hand(tmp_path, capsys, monkeypatch):
    """Of two users. The last lines are the mean over users and their standard deviation."""
    runs = {str(seed): {"final": {
        "users": {"FedAvg": G, "PersFL": A, "T": T, "teacher's round": e},
        "students": {"test": np.full((2, 11), 0.5)}}} for seed, (G, A, T, e) in enumerate([
            ([0.2, 0.4], [0.5, 0.9], [1, 25], [3, 3]), ([0.4, 0.4], [0.7, 0.5], [5, 5], [1, 2])])}
    monkeypatch.setattr(fl.records, "read", lambda path: runs[path.parent.name])
    (tmp_path / "0").mkdir()
    persfl_users.main(tmp_path / "0", tmp_path / "1")
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["user", "FedAvg", "PersFL", "T", "teacher's", "round"]
    assert [line.split() for line in lines[:4]] == [
        ["0", "0.3000", "0.6000", "3.0000", "2.0000"],
        ["1", "0.4000", "0.7000", "15.0000", "2.5000"],
        ["mean", "0.3500", "0.6500", "9.0000", "2.2500"],
        ["std", "0.0707", "0.0707", "8.4853", "0.3536"]]  # a gap of two numbers / sqrt 2
    for name in ("students-users.png", "teachers-users.png"):
        assert (tmp_path / "0" / name).stat().st_size > 5000


# Runs


def test_a_run_stopped_in_stage_2_repeats_it(tmp_path, monkeypatch):
    """Stopped at the start of Stage 2, after round 4 of 4. What lies on the disk is Stage 1's
    state, and no users' own models; resumed, the run does Stage 2, and equals one that wasn't
    stopped."""
    argv = [*SMALL, "--rounds", "4", "--eval-every", "9", "--save-clients"]
    sent = noting_g(monkeypatch)
    whole, a = run(persfl, argv, tmp_path / "whole")
    killed(persfl, argv, tmp_path / "cut", lambda t, options: "epochs" in options)
    before = saved(tmp_path / "cut")
    assert before["A"] is None and torch.equal(before["G"], a["G"]) and len(sent) == 8
    assert not (tmp_path / "cut" / "clients.pt").exists()
    again, b = run(persfl, [*argv, "--resume"], tmp_path / "cut")
    assert len(sent) == 8 and set(a) == {"G", "O", "l_prime", "round_of_O", "A"}
    assert equal(a, b)
    own = torch.load(tmp_path / "cut" / "clients.pt", weights_only=True)
    assert torch.equal(own["fc1.weight"].flatten(1), b["A"][:, :307200])
    finished, c = run(persfl, [*argv, "--resume"], tmp_path / "cut")  # with nothing left to do
    assert finished["rounds"] == again["rounds"] and equal(b, c)
    assert same(whole, again)


# The defaults: facts of the paper's experiments


@pytest.mark.parametrize("dataset, split, rounds, per_client, limit, model", [
    ("cifar10", "classes", 50, 4, None, "cifarnet"),
    ("cifar10", "dirichlet-classes", 25, 4, None, "cifarnet"),
    ("cifar10", "lognormal", 50, 2, None, "cifarnet"),
    ("mnist", "classes", 100, 4, 6000, "mnistnet"),
    ("mnist", "dirichlet-classes", 25, 4, None, "mnistnet"),
    ("mnist", "lognormal", 100, 2, None, "mnistnet")])
def test_the_settings_are_the_papers(dataset, split, rounds, per_client, limit, model):
    args = persfl.arguments(["--dataset", dataset, "--split", split])
    assert (args.rounds, args.per_client, args.limit) == (rounds, per_client, limit)
    assert (args.model, args.alpha) == (model, 0.9)
    assert (args.clients, args.fraction, args.client_val, args.client_test) == (10, 1, 0.2, 0.2)
    assert persfl.arguments(["--dataset", dataset, "--split", split, "--rounds", "7"]).rounds == 7


def balanced(tmp_path, per_class):
    """A .npz in the sizes of a data set: 1x1 pixels, ten classes."""
    y = np.arange(10 * per_class) % 10
    x, path = np.zeros((len(y), 1, 1), np.uint8), tmp_path / "d.npz"
    np.savez(path, x_train=x, y_train=y, x_test=x[:10], y_test=y[:10])
    return str(path)


@pytest.mark.parametrize("per_class, train", [(5000, 3000), (600, 360)])
def test_ds_1(per_class, train, tmp_path):
    """4 classes; 3000/1000/1000 images of CIFAR-10's 50,000, 360/120/120 of 6,000 of MNIST's."""
    fed = federation(["--dataset", balanced(tmp_path, per_class), "--model", "mnistnet"])
    for parts in zip(*fed.split):
        assert [len(part) for part in parts] == [train, train // 3, train // 3]
        counts = np.bincount(fed.data.labels[np.concatenate(parts)], minlength=10)
        assert sorted(counts) == [0] * 6 + [per_class // 4] * 4  # every class has 4 holders, too
    assert len(np.unique(np.concatenate([i for part in fed.split for i in part]))) == 10 * per_class


def class_counts(split, draws):
    """[draws, 10 users, 10 classes] of 50,000 images."""
    args, labels = persfl.arguments(["--split", split]), np.arange(50_000) % 10
    owned = [common.SPLITS[split](labels, 10, np.random.default_rng(i), args)
             for i in range(draws)]
    return np.array([[np.bincount(labels[index], minlength=10) for index in users]
                     for users in owned])


def test_the_spread_of_ds_2_is_that_of_a_dirichlet_draw_per_class():
    """A user's share of a class is Beta(.9, 8.1): mean .1, variance .1*.9/10. Ten independent
    classes make a user's size."""
    counts = class_counts("dirichlet-classes", 30)
    assert (counts.sum(1) == 5000).all()
    assert counts.mean((0, 2)) == pytest.approx([500] * 10, rel=0.2)
    share = (0.1 * 0.9 / 10) ** 0.5
    assert counts.std() == pytest.approx(5000 * share, rel=0.08)
    assert counts.sum(2).std() == pytest.approx(10**0.5 * 5000 * share, rel=0.15)
    published = [  # test images, a fifth, of five runs
        1025, 743, 955, 633, 1279, 1493, 1341, 770, 1010, 754, 1059, 907, 1073, 1129, 591, 1878,
        770, 953, 841, 802, 1856, 761, 1796, 556, 986, 697, 1121, 710, 774, 745, 1130, 805, 767,
        1014, 705, 1342, 684, 1110, 898, 1548, 1073, 608, 1447, 832, 1654, 803, 1029, 818, 1086,
        653]
    assert counts.sum(2).std() / 5 == pytest.approx(np.std(published), rel=0.2)


def test_the_spread_of_ds_3_is_that_of_lognormal_draws_with_sigma_2():
    """Users u - 1 and u share class u; the log of the ratio of two draws is normal with variance
    2 * 2^2: half of the ratios lie within exp(+-.6745 * sqrt 8)."""
    counts, ratios = class_counts("lognormal", 40), []
    for c in range(10):
        two = counts[:, [c - 1, c], c]  # [draws, 2]
        assert (counts[:, :, c].sum(1) == two.sum(1)).all()
        assert (two >= 10).all() and (two.sum(1) >= 4998).all()
        ratios.append((two[:, 0] - 10 + 0.5) / (two[:, 1] - 10 + 0.5))
    inside = np.abs(np.log(ratios)) < 0.6745 * 8**0.5
    assert 0.42 < inside.mean() < 0.58 and 0.42 < (np.array(ratios) < 1).mean() < 0.58


# The numbers on docs/persfl.md (those of its rows that begin with a link are in test_pages.py)

HERE = pathlib.Path(persfl.__file__).parent
SPLITS = "classes", "dirichlet-classes", "lognormal"
FOLDERS = {f"{name}, DS-{i + 1}": f"results/persfl-{number}/persfl-{data}-split-{split}"
           for number, name, data in ((2, "CIFAR-10", "cifar10"), (3, "MNIST", "mnist"))
           for i, split in enumerate(SPLITS)}


def lines_of(header):
    """The cells of the table on docs/persfl.md whose header begins so, a list for each line."""
    lines = iter((HERE / "docs" / "persfl.md").read_text().splitlines())
    next(line for line in lines if line.startswith(header)), next(lines)
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]


def records(folder):
    return [fl.records.read(path) for path in sorted((HERE / folder).glob("*.json"))]


def by_seed(folder):
    """{seed: mean personal accuracy} of a folder's records."""
    return {record["args"]["seed"]: record["final"]["personal"]["mean"]
            for record in records(folder)}


def percent(values):
    return f"{100 * np.mean(values):.1f}"


def users_of(folder):
    return [record["final"]["users"] for record in records(folder)]


def test_the_page_says_which_rounds_the_teachers_are_from():
    for split, rounds, mean, least, last in lines_of("| split | rounds of Stage 1 | mean round"):
        found = [e for users in users_of(FOLDERS[split]) for e in users["teacher's round"]]
        assert [mean, least] == [f"{np.mean(found):.1f}", str(min(found))], split
        assert last == str(found.count(int(rounds))) and len(found) == 50, split


def test_the_page_says_what_ties_do():
    """Among the 11 students; the records have 15, of which the others are copies."""
    gained = []
    for split, count, of, *cells in lines_of("| split | users with a tie"):
        accuracies, lambdas, tied, best = ([], []), ([], []), 0, []
        for record in records(FOLDERS[split]):
            final = record["final"]
            columns = [final["grid"].index(list(pair)) for pair in persfl.GRID]
            val, test = (np.array(final["students"][part]) for part in ("val", "test"))
            best += [final["personal@test"]["mean"] - final["personal"]["mean"]]
            for k in range(10):
                top = [i for i in columns if val[k, i] == val[k, columns].max()]
                tied += len(top) > 1
                for end, i in enumerate((top[0], top[-1])):
                    accuracies[end].append(test[k, i])
                    lambdas[end].append(final["grid"][i][1])
        assert [int(count), int(of)] == [tied, len(lambdas[0])], split
        means = [f"{np.mean(z):.3f}".lstrip("0") for z in lambdas]
        assert cells == [*map(percent, accuracies), *means], split
        gained.append(f"{100 * np.mean(best):.1f}".removeprefix("0"))
    assert lines_of("| CIFAR-10, DS-1 | CIFAR-10, DS-2") == [gained]


def test_the_page_compares_persfl_with_fine_tuning_and_its_t_and_lambda_with_the_papers():
    published = {"T": (13.88, 15.16, 9.24, 1.08, 8.92, 1.48),
                 "lambda": (0.445, 0.675, 0.315, 0.035, 0.51, 0.005)}
    for i, (split, T, paper_T, lam, paper_lam) in enumerate(lines_of("| split | mean T |")):
        users = users_of(FOLDERS[split])
        assert T == f"{np.mean([run['T'] for run in users]):.1f}"
        assert float(lam) == round(np.mean([run["lambda"] for run in users]), 3)
        assert paper_T == f"{published['T'][i]:.1f}"
        assert float(paper_lam) == published["lambda"][i]
    for split, least, most, ahead in lines_of("| split | least | most |"):
        lead = [np.mean(run["PersFL"]) - np.mean(run["fine-tuned"])
                for run in users_of(FOLDERS[split])]
        assert [least, most] == [f"{100 * min(lead):.1f}", f"{100 * max(lead):.1f}"], split
        assert ahead == f"{sum(z > 1e-9 for z in lead)} of {len(lead)}", split


def test_the_page_compares_persfl_with_fedper_and_with_the_last_teacher():
    def both(split, link):
        """By seed: of the records that are linked, and PersFL's of the same seeds."""
        theirs, ours = by_seed(link.split("../")[1].rstrip(")")), by_seed(FOLDERS[split])
        return theirs, {seed: ours[seed] for seed in theirs}

    for split, runs, other, _, mine, _, ahead, link in lines_of("| split | runs | FedPer"):
        theirs, ours = both(split, link)
        assert int(runs) == len(theirs), split
        assert [other, mine] == [percent([*z.values()]) for z in (theirs, ours)], split
        assert ahead == f"{sum(ours[seed] > theirs[seed] for seed in theirs)} of {runs}", split
    for split, runs, last, _, optimal, _, link in lines_of("| split | runs | the last G"):
        found = both(split, link)
        assert int(runs) == len(found[0]), split
        assert [last, optimal] == [percent([*z.values()]) for z in found], split


def test_the_page_compares_persfl_with_training_alone():
    for split, runs, alone, tuned, mine, ahead, link in lines_of("| split | runs | Local"):
        folder, twins = link.split("../")[1].rstrip(")"), records(FOLDERS[split])
        local, ours = by_seed(folder), by_seed(FOLDERS[split])
        fine = {twin["args"]["seed"]: np.mean(twin["final"]["users"]["fine-tuned"])
                for twin in twins}
        means = [percent([found[seed] for seed in local]) for found in (local, fine, ours)]
        assert [runs, alone, tuned, mine] == [str(len(local)), *means], split
        assert ahead == f"{sum(ours[seed] > local[seed] for seed in local)} of {runs}", split
        for record in records(folder):
            args = record["args"]
            twin = next(z for z in twins if z["args"]["seed"] == args["seed"])
            epochs = twin["args"]["rounds"] + twin["args"]["distill_epochs"]
            assert record["split"] == twin["split"] and args["rounds"] == epochs
