import itertools
import pathlib

import numpy as np
import pytest
import torch

import common
import fl.records
import persfl
from byhand import FLAGS, World, close
from conftest import equal, killed, refused, run, same, saved
from papers import persfl_users

PAIRS = list(itertools.product((1, 5, 25), (0, 0.25, 0.5, 0.75, 1)))  # the paper's grid


@pytest.fixture
def argv(toy):
    """Three users of different sizes, minibatches of 5."""
    return ["--dataset", toy, *FLAGS, "--fraction", "1", "--client-val", "0.2", "--rounds", "6",
            "--epochs", "1", "--lr", "3", "--distill-epochs", "2",
            "--distill-lr", "0.5"]


def federation(argv):
    return common.Federation(persfl.arguments(argv))


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def logits(w, x):
    return x @ w[:12].reshape(3, 4).T + w[12:]


def test_the_grid_has_a_student_for_each_pair_of_the_paper():
    """At lambda 0 and 1 a student is the same for every T: one stands for all, that
    of T = 1."""
    assert len(persfl.GRID) == 11
    assert {(1 if lam in (0, 1) else T, lam) for T, lam in PAIRS} == set(persfl.GRID)
    first = [pair for pair in PAIRS if pair in persfl.GRID]
    assert first == persfl.GRID  # the first if tied is the first of the 15 pairs


@pytest.mark.parametrize("teacher", ["optimal", "final"])
@pytest.mark.parametrize("soft", ["kl", "ce"])
def test_both_stages_by_hand(soft, teacher, argv, tmp_path):
    """Choices are made on validation images alone; the first of the best students is kept. eta is
    so large that the teachers are of different rounds."""
    world = World(federation(argv))
    fed, G, l_prime, O, best_e = world.fed, world.w, [np.inf] * 3, [None] * 3, [0] * 3
    val, test = ([(fed.data.images[index].reshape(-1, 4) / 255, fed.data.labels[index])
                  for index in part] for part in (fed.split.val, fed.split.test))

    def accuracy(w, x, y):
        return (logits(w, x).argmax(1) == y).mean()

    for t in range(6):
        ends = []
        for k in range(3):
            x, y = val[k]
            loss = -np.log(softmax(logits(G, x))[np.arange(len(y)), y]).mean()
            if loss < l_prime[k]:
                l_prime[k], O[k], best_e[k] = loss, G, t + 1
            w = G
            for x, y in world.minibatches(k, t, 1):
                p = softmax(logits(w, x)) - np.eye(3)[y]
                w = w - 3 * np.r_[(p.T @ x).ravel(), p.sum(0)] / len(x)
            ends.append(w)
        G = world.mean(ends, [0, 1, 2])
    assert len({*best_e}) > 1 and min(best_e) < 6
    A, kept, on_val, on_test = [], [], [], []
    teachers = O if teacher == "optimal" else [G] * 3
    for k in range(3):
        students = []
        for T, lam in persfl.GRID:
            w = teachers[k]
            for x, y in world.minibatches(k, 6):
                z, v = logits(w, x), logits(teachers[k], x)
                # the gradients of both losses by the logits
                p = (1 - lam) * (softmax(z) - np.eye(3)[y]) + lam * T * (
                    softmax(z / T) - softmax(v / T))
                w = w - 0.5 * np.r_[(p.T @ x).ravel(), p.sum(0)] / len(x)
            students.append(w)
        on_val.append([accuracy(w, *val[k]) for w in students])
        on_test.append([accuracy(w, *test[k]) for w in students])
        kept.append(int(np.argmax(on_val[k])))  # the first
        A.append(students[kept[k]])
    record, state = run(persfl, [*argv, "--soft", soft, "--teacher", teacher], tmp_path)
    close(state, G=G, O=O, l_prime=l_prime, round_of_O=best_e, A=A, atol=2e-5)
    rows, on_test = record["rounds"], np.array(on_test)
    row, users = rows[-1], rows[-1]["users"]
    assert "users" not in rows[0]
    assert users["teacher's round"] == (best_e if teacher == "optimal" else [7] * 3)
    assert [*zip(users["T"], users["lambda"])] == [persfl.GRID[i] for i in kept]
    found = {"FedAvg": [accuracy(G, *own) for own in test], "fine-tuned": on_test[:, 0],
             "PersFL": on_test[[0, 1, 2], kept]}
    for name, values in found.items():
        assert users[name] == pytest.approx(values), name
    for k in range(3):
        assert row["students"]["val"][k] == pytest.approx(on_val[k])
        assert row["students"]["test"][k] == pytest.approx(on_test[k])
    assert record["final"]["personal"]["per_client"] == pytest.approx(found["PersFL"])
    for name, values in (("personal", found["PersFL"]), ("personal@fedavg", found["FedAvg"])):
        assert row[name]["mean"] == pytest.approx(np.mean(values)), name
        assert row[name]["std"] == pytest.approx(np.std(values, ddof=1)), name
    down = 3 * 4 * 15  # users, bytes, weights; the final teacher is sent once more
    assert rows[0]["bytes_up"] == rows[0]["bytes_down"] == row["bytes_up"] == down
    assert row["bytes_down"] == (1 + (teacher == "final")) * down


def test_the_earliest_of_the_least_losses_wins(argv, tmp_path, monkeypatch):
    """Losses are given, a row per round. User 0: a tie of rounds 2 and 4; 1: falling; 2: a tie from
    the start."""
    rows = iter(torch.tensor([[3, 9, 5], [1, 7, 5], [2, 5, 5], [1, 3, 5]]).double())
    monkeypatch.setattr(common.Federation, "losses", lambda *_: next(rows))
    _, state = run(persfl, [*argv, "--rounds", "4"], tmp_path)
    assert state["round_of_O"].tolist() == [2, 4, 1] and state["l_prime"].tolist() == [1, 3, 5]


def test_a_diverged_student_is_not_chosen_and_the_first_of_the_best_is(argv):
    accuracy = np.array([[0.2, np.nan, 0.3], [np.nan, 0.0, 0.0], [0.5, 0.5, np.nan]])
    students = torch.arange(9.0).view(3, 3, 1)
    best, A = persfl.best_students(students, accuracy)
    assert best.tolist() == [2, 1, 0] and A.tolist() == [[2.0], [4.0], [6.0]]
    fed = federation(argv)
    A = fed.initial_weights().repeat(3, 2, 1)  # [3 users, 2 students, d]
    A[1, 0, 7], A[2, 1, 7] = torch.inf, torch.nan
    found = np.isnan(persfl.accuracies(fed, A, fed.split.test))
    assert found.tolist() == [[False, False], [True, False], [False, True]]


def test_what_persfl_needs_is_said(capsys):
    refused(capsys, "all users take part", persfl.arguments, ["--fraction", "0.5"])
    refused(capsys, "use --client-val above 0", persfl.arguments, ["--client-val", "0"])
    refused(capsys, "neither momentum nor weight decay", persfl.arguments, ["--momentum", "0.9"])


def test_a_run_stopped_in_stage_2_repeats_it(argv, tmp_path):
    """Stopped at the start of Stage 2. What lies on the disk is Stage 1's state, and no users' own
    models; resumed, the run does Stage 2, and equals one that wasn't stopped."""
    argv, out = [*argv, "--eval-every", "9", "--save-clients"], tmp_path / "cut"
    whole, a = run(persfl, argv, tmp_path / "whole")
    killed(persfl, argv, out, lambda t, options: "epochs" in options)
    before = saved(out)
    assert before["A"] is None and torch.equal(before["G"], a["G"])
    assert not (out / "clients.pt").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common.Federation, "losses", None)  # Stage 1 is over
        again, b = run(persfl, [*argv, "--resume"], out)
        finished, c = run(persfl, [*argv, "--resume"], out)  # with nothing left to do
    own = torch.load(out / "clients.pt", weights_only=True)
    assert torch.equal(own["fc.weight"].flatten(1), b["A"][:, :12])
    assert equal(a, b) and equal(b, c) and finished["rounds"] == again["rounds"]
    assert same(whole, again)


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
    assert (tmp_path / "0" / "students-users.png").stat().st_size > 1000


def class_counts(split, draws):
    """[draws, 10 users, 10 classes] of 50,000 images. test_data.py has DS-1."""
    args, labels = persfl.arguments(["--split", split]), np.arange(50_000) % 10
    owned = [common.SPLITS[split](labels, 10, np.random.default_rng(i), args)
             for i in range(draws)]
    return np.array([[np.bincount(labels[index], minlength=10) for index in users]
                     for users in owned])


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


def test_a_user_whose_students_all_diverge_is_no_result(toy, tmp_path, capsys, monkeypatch):
    def accuracies(federation, students, images):
        return np.where(np.arange(len(students))[:, None] == 1, np.nan, np.ones((1, 11)))

    monkeypatch.setattr(persfl, "accuracies", accuracies)
    argv = ["--dataset", toy, *FLAGS, "--fraction", "1", "--client-val", "0.2"]
    with pytest.raises(SystemExit) as stop:
        persfl.main([*argv, "--out", str(tmp_path)])
    assert stop.value.code == 3
    assert "diverged, each student of a user is not finite" in capsys.readouterr().out
    record = fl.records.read(tmp_path / "result.json")
    assert record["diverged"] and len(record["rounds"]) == record["args"]["rounds"]


# The numbers on docs/persfl.md (those of its rows that begin with a link are in test_pages.py)

HERE = pathlib.Path(persfl.__file__).parent
PAGE = (HERE / "docs" / "persfl.md").read_text()
SPLITS = "classes", "dirichlet-classes", "lognormal"
FOLDERS = {f"{name}, DS-{i + 1}": f"results/persfl-{number}/persfl-{data}-split-{split}"
           for number, name, data in ((2, "CIFAR-10", "cifar10"), (3, "MNIST", "mnist"))
           for i, split in enumerate(SPLITS)}


def lines_of(header):
    """The cells of the table on docs/persfl.md whose header begins so, a list for each line."""
    lines = iter(PAGE.splitlines())
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


def test_the_page_tells_the_teachers_rounds_t_lambda_and_the_lead_over_fine_tuning():
    published = {"T": (13.88, 15.16, 9.24, 1.08, 8.92, 1.48),
                 "lambda": (0.445, 0.675, 0.315, 0.035, 0.51, 0.005)}
    for split, rounds, mean, least, last in lines_of("| split | rounds of Stage 1 | mean round"):
        found = [e for users in users_of(FOLDERS[split]) for e in users["teacher's round"]]
        assert [mean, least] == [f"{np.mean(found):.1f}", str(min(found))], split
        assert last == str(found.count(int(rounds))) and len(found) == 50, split
    for i, (split, T, paper_T, lam, paper_lam) in enumerate(lines_of("| split | mean T |")):
        users = users_of(FOLDERS[split])
        assert T == f"{np.mean([run['T'] for run in users]):.1f}"
        assert float(lam) == round(np.mean([run["lambda"] for run in users]), 3)
        assert [paper_T, float(paper_lam)] == [f"{published['T'][i]:.1f}", published["lambda"][i]]
    for split, least, most, ahead in lines_of("| split | least | most |"):
        lead = [np.mean(run["PersFL"]) - np.mean(run["fine-tuned"])
                for run in users_of(FOLDERS[split])]
        assert [least, most] == [f"{100 * min(lead):.1f}", f"{100 * max(lead):.1f}"], split
        assert ahead == f"{sum(z > 1e-9 for z in lead)} of {len(lead)}", split


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


def test_the_page_compares_persfl_with_others_of_the_same_seeds():
    """With FedPer, with the last teacher, and with training alone, for as many epochs."""
    for header in ("| split | runs | FedPer", "| split | runs | the last G",
                   "| split | runs | Local"):
        (title,) = (line for line in PAGE.splitlines() if line.startswith(header))
        titles = [cell.strip() for cell in title.strip("|").split("|")]
        for split, runs, other, *cells, link in lines_of(header):
            row = dict(zip(titles[3:], cells))
            folder, twins = link.split("../")[1].rstrip(")"), records(FOLDERS[split])
            theirs, ours = by_seed(folder), by_seed(FOLDERS[split])
            mine = next(row[name] for name in row if "PersFL, same" in name or "optimal" in name)
            assert runs == str(len(theirs)) and other == percent([*theirs.values()]), split
            assert mine == percent([ours[seed] for seed in theirs]), split
            if ahead := row.get("PersFL ahead in"):
                count = sum(ours[seed] > theirs[seed] for seed in theirs)
                assert ahead == f"{count} of {runs}", split
            if tuned := row.get("fine-tuned, same runs"):
                by = {twin["args"]["seed"]: twin for twin in twins}
                assert tuned == percent([np.mean(by[seed]["final"]["users"]["fine-tuned"])
                                         for seed in theirs]), split
                for record in records(folder):
                    twin = by[record["args"]["seed"]]
                    epochs = twin["args"]["rounds"] + twin["args"]["distill_epochs"]
                    assert record["split"] == twin["split"] and record["args"]["rounds"] == epochs
