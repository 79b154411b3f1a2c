"""compare.py --benchmark: what it chooses, trains, reads and refuses; the committed tables."""

import json
import re

import pytest

import compare
import fl.plots
from comparing import benchmark, planning, training
from conftest import refused
from fl import records
from invented import Child


def kind(monkeypatch, tmp_path, title="iid", *argv):
    """A Kind of which nothing is known."""
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path / "results")
    return benchmark.Kind(title, benchmark.arguments([*argv, "--out", str(tmp_path / "out")]))


def learn(kind, name, accuracy, tuned=None):
    """Has every run of the grid give accuracy(settings), and after fine-tuning tuned(settings),
    until nothing is missing. Returns the settings in the order in which they were asked for, and
    the choice: by `accuracy`, or by `tuned` if it is given."""
    asked = []
    while True:
        chosen, missing = kind.choose(name, benchmark.PART if tuned else "personal")
        if not missing:
            return asked, chosen
        for settings in missing:
            value = accuracy(settings)
            run = {"diverged": value is None, "final": {"personal": {"val_mean": value}}}
            if tuned and name in kind.chosen["personal"]:
                run["final"]["fine_tuned"] = [{"epochs": 1, "val_mean": tuned(settings)}]
            kind.known[name][benchmark.key(settings, 0, 0)] = run
            asked.append(settings)


def test_the_rate_is_chosen_first_and_then_the_own_parameter(monkeypatch, tmp_path):
    k = kind(monkeypatch, tmp_path)

    def accuracy(settings):
        return 0.5 - abs(settings["lr"] - 0.03) - (settings["ditto-lambda"] == 1)

    asked, chosen = learn(k, "ditto", accuracy)
    assert [s["lr"] for s in asked] == [0.01, 0.03, 0.1, 0.3] + [0.03] * 3
    assert [s["ditto-lambda"] for s in asked] == [0.1] * 4 + [0.01, 1, 0.001]  # 0.1 is known
    assert chosen == {"lr": 0.03, "ditto-lambda": 0.001}  # of equal ones the first


def test_beyond_an_edge_values_are_tried_while_the_edge_is_best(monkeypatch, tmp_path):
    k = kind(monkeypatch, tmp_path)
    asked, chosen = learn(k, "local", lambda s: s["lr"])
    assert [s["lr"] for s in asked] == [0.01, 0.03, 0.1, 0.3, 1, 3] and chosen == {"lr": 3}
    asked, chosen = learn(k, "fedavg", lambda s: {0.01: 0.4}.get(s["lr"], 0.3))
    assert [s["lr"] for s in asked] == [0.01, 0.03, 0.1, 0.3, 0.003] and chosen == {"lr": 0.01}
    # no layer of its own is FedAvg, so that nothing lies below 1
    asked, chosen = learn(k, "fedper", lambda s: (s["lr"] == 0.1) / s["personal"])
    assert chosen == {"lr": 0.1, "personal": 1} and len(asked) == 4 + 2


def test_a_second_parameter_is_chosen_after_the_first(monkeypatch, tmp_path):
    asked, chosen = learn(kind(monkeypatch, tmp_path), "persfl", lambda s: (
        s["distill-lr"] + (s["lr"] == 0.03) + s.get("distill-epochs", 0)))
    assert chosen == {"distill-lr": 0.5, "lr": 0.03, "distill-epochs": 20}
    assert [s.get("distill-epochs") for s in asked] == [None] * 7 + [2, 5, 10, 20]


def test_after_fine_tuning_the_rate_is_chosen_again_from_neighbour_to_neighbour(
        monkeypatch, tmp_path):
    k = kind(monkeypatch, tmp_path, "CIFAR-100")
    asked, chosen = learn(k, "local", lambda s: -abs(s["lr"] - 0.1), lambda s: 0.9 - s["lr"])
    rates = [s["lr"] for s in asked]
    assert rates == [0.01, 0.03, 0.1, 0.3] + [0.1, 0.03, 0.3] + [0.01, 0.003, 0.001]
    assert chosen == {"lr": 0.001} and k.choose("local", "personal") == ({"lr": 0.1}, [])
    # no neighbour is better, and one that has diverged is known
    asked, chosen = learn(k, "fedavg", lambda s: s["lr"] if s["lr"] < 0.3 else None, lambda s: 0.9)
    assert chosen == {"lr": 0.1} and [s["lr"] for s in asked[4:]] == [0.1, 0.03]


def test_after_fine_tuning_the_own_parameter_is_chosen_again_with_the_rate(monkeypatch, tmp_path):
    k = kind(monkeypatch, tmp_path)
    asked, chosen = learn(k, "psinet", lambda s: -abs(s["lr"] - 0.1) + (s["depth"] == "fc2"),
                          lambda s: {"conv2": 4, "fc1": 2, "fc2": 0}[s["depth"]]
                          - abs(s["lr"] - 0.3))
    tuned = [(s["lr"], s["depth"]) for s in asked[6:]]  # 4 rates and 2 depths choose before it
    assert tuned == [(0.1, "fc2"), (0.03, "fc2"), (0.3, "fc2"), (0.1, "fc1"),
                     (0.03, "fc1"), (0.3, "fc1"), (0.1, "conv2"),
                     (0.03, "conv2"), (0.3, "conv2"), (1, "conv2")]
    assert chosen == {"lr": 0.3, "depth": "conv2"}


def test_what_diverges_is_not_chosen_unless_everything_does(monkeypatch, tmp_path):
    k = kind(monkeypatch, tmp_path)
    assert learn(k, "local", lambda s: None if s["lr"] > 0.01 else s["lr"])[1] == {"lr": 0.01}
    assert learn(k, "centralised", lambda s: None)[1] == {"lr": 0.001}


def test_pfedme_gets_the_rate_of_its_sgd_and_the_step_that_compare_gives_it(monkeypatch, tmp_path):
    k = kind(monkeypatch, tmp_path)
    method, = k.methods({"pfedme": {"pfedme-lambda": 5, "theta-lr": 0.03}}, k.tuned)
    assert [method.args[name] for name in ("lr", "theta_lr", "fine_tune_lr")] == [0.2, 0.03, 0.03]
    asked, _ = learn(k, "pfedme", lambda s: s["theta-lr"])
    assert {s["theta-lr"] for s in asked[:5]} == {0.01, 0.03, 0.1, 0.3, 1}


def test_every_end_of_every_grid_is_a_command_that_the_method_takes(monkeypatch, tmp_path):
    k = kind(monkeypatch, tmp_path)
    for end in (0, 1):
        points = {name: benchmark.FIXED.get(name, {}) | {
            grid.parameter: grid.values[end] for grid in benchmark.OWN.get(name, [benchmark.RATES])}
            for name in benchmark.METHODS}
        for method in k.methods(points, k.tuned):
            for parameter, value in points[method.name].items():
                made = method.args[parameter.replace("-", "_") + "_" * (parameter == "lambda")]
                assert made == value and type(made) is type(value) or float(made) == float(value)


@pytest.fixture
def go(toy, tmp_path, monkeypatch):
    """Runs the benchmark on the small data set, whose runs are made up; go.trained has the
    folders."""
    def go(*argv):
        go.trained = Child.started = []
        return benchmark.main([*argv, "--device", "cpu", "--out", str(tmp_path / "out")])

    few = {name: name for name in ("local", "fedavg", "fedprox")}
    monkeypatch.setattr(benchmark, "METHODS", few)
    monkeypatch.setitem(benchmark.OWN, "fedprox", [benchmark.Grid("mu", (0.1, 1))])
    monkeypatch.setattr(training, "Child", Child)
    monkeypatch.setattr(Child, "started", [])
    monkeypatch.setattr(Child, "accuracy", lambda args: 0.5 + args.lr / 4 + args.seed / 100)
    go.draw, go.drawn = benchmark.draw, []
    monkeypatch.setattr(benchmark, "draw", lambda *given: go.drawn.append(given))
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(benchmark, "SPLITS", 2)
    monkeypatch.setattr(benchmark, "RATES", benchmark.Grid("lr", (0.1, 0.2)))
    equal = [f"--dataset={toy}", "--model=linear", "--clients=3", "--client-test=0.3",
             "--client-val=0.2", "--rounds=1", "--eval-every=1", "--momentum=0",
             "--transform=normalize"]
    monkeypatch.setattr(benchmark, "KINDS", {
        "iid": [*equal, "--split=iid"],
        "two classes": [*equal, "--split=classes", "--per-client=2"]})
    go.out, go.results = tmp_path / "out", tmp_path / "results"
    return go


def test_all_methods_then_more_seeds_then_one_of_ones_own(go, tmp_path, capsys, monkeypatch):
    go("--seeds", "1")
    # 2 rates; fedprox: 1 more of its own parameter. The best of them goes on, a further split, and
    # the other rate goes on, and fedprox's other parameter
    assert len(go.trained) == 2 * (2 + 2 + 3 + 3 * 3 + 1)
    page = (go.results / "benchmark.md").read_text()
    assert page.count("|fedprox|") == 3 and "minus local" in page
    known = json.loads((go.results / "two-classes.json").read_text())
    assert known["methods"]["local"].keys() >= {"lr=0.1,split=0,seed=0"}
    go("--seeds", "2")
    assert len(go.trained) == 2 * 2 * 3  # kinds, splits, methods
    again = (go.results / "benchmark.md").read_text()
    assert again != page
    go("--seeds", "2")
    assert not go.trained and (go.results / "benchmark.md").read_text() == again
    mine = tmp_path / "mine.py"
    mine.write_text("import fedavg\n"
                    "def arguments(argv):\n    return fedavg.arguments(argv)\n"
                    "def main(argv=None):\n    fedavg.main(argv)\n")
    capsys.readouterr()
    go(str(mine), "--seeds", "2")
    assert len(go.trained) == 2 * (2 + 4 + 1) and all("/mine/" in folder for folder in go.trained)
    assert (go.results / "benchmark.md").read_text() == again  # nobody else's numbers are touched
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith("|mine|")]
    assert len(rows) == 3 and printed.count("|local|") == 3
    go(str(mine), "--seeds", "3")  # the others have two
    assert not go.trained
    monkeypatch.setitem(fl.plots.STYLE, "savefig.dpi", 50)  # quicker
    go.draw(*go.drawn[-1])
    assert (go.out / "benchmark.svg").read_text().count("<!-- mine -->") == 2


def test_what_is_measured_before_fine_tuning_has_the_rate_chosen_before_it(go, monkeypatch):
    monkeypatch.setattr(Child, "tuned", lambda args: 0.9 - args.lr / 2)
    go("--seeds", "1", "--kinds", "iid")
    page = (go.results / "benchmark.md").read_text()
    assert "|local|0.550|0.850||" in page and "|`--lr=0.1` (`--lr=0.2` before)|" in page
    assert "|local|0.850 (0.550)|" in page


def test_other_images_than_those_of_the_known_records_are_refused(go, capsys):
    go("--seeds", "1")
    for file in go.results.glob("*.json"):
        file.write_text(re.sub(r'"images": "...', '"images": "abc', file.read_text()))
    refused(capsys, "these are not the images of the known records", go, "--seeds", "2")
    assert not go.trained


def test_a_run_s_key_names_what_was_chosen(go):
    go("--seeds", "1")
    for file in go.results.glob("*.json"):
        for name, known in json.loads(file.read_text())["methods"].items():
            for key, r in known.items():
                words = dict(word.split("=") for word in key.split(","))
                folder = go.out / file.stem / name / key
                record = records.read(folder / "result.json")
                args = record["args"]
                assert args["lr"] == float(words["lr"])
                assert args["split_seed"] == r["args"]["split_seed"] == int(words["split"])
                assert r["final"]["personal"]["per_client"] == pytest.approx(
                    record["final"]["personal"]["per_client"], abs=1e-5)


@pytest.mark.parametrize("argv, words", [
    (["--tune", "mu=1,2"], "--tune is for a file of your own"),
    (["mine.py", "--tune", "mu"], "say PARAMETER=A,B,..."),
    (["mine.py", "--tune", "mu=1,,2"], "say PARAMETER=A,B,..."),
    (["local.py"], "the benchmark has a local"),
    (["nowhere.py"], "nowhere.py"),
    (["mine.txt"], "mine.txt"),
    (["--seeds", "0"], "--seeds"),
])
def test_bad_input(argv, words, go, capsys):
    refused(capsys, words, go, *argv)
    assert not go.trained


def test_compare_leads_here(capsys):
    with pytest.raises(SystemExit) as end:
        compare.main(["--benchmark", "--help"])
    assert end.value.code == 0 and "make benchmark" in capsys.readouterr().out


@pytest.fixture(scope="module")
def kinds():
    """The Kinds that the page has a table of."""
    found = [benchmark.Kind(title, benchmark.arguments([])) for title in benchmark.KINDS]
    return [k for k in found if all(k.finished(name, 1) for name in k.names)]


def test_the_page_has_the_tables_of_the_committed_runs(kinds):
    """Every row of docs/benchmark.md and of results/benchmark/benchmark.md, to the last character,
    is computed from results/benchmark/KIND.json."""
    page = (planning.HERE / "docs" / "benchmark.md").read_text()
    tables = (planning.HERE / "results" / "benchmark" / "benchmark.md").read_text()
    assert kinds
    rows = {k.title: k.rows() for k in kinds}
    ranked, sentence = benchmark.mean_ranks(kinds)
    lines = benchmark.summary(rows, ranked)
    assert "\n".join(lines) in page and "\n".join(lines) in tables
    assert all("\n".join(benchmark.table(found)) in tables for found in rows.values())
    assert tables.count("\n|") == len(lines) + sum(len(found) + 2 for found in rows.values())
    assert " ".join(sentence.split()) in " ".join(page.split()) and sentence in tables


def test_the_page_has_the_order_of_the_claims(kinds):
    """Each word of its table of claims is that of the paired difference, before → after."""
    page = (planning.HERE / "docs" / "benchmark.md").read_text()
    claims = re.findall(r"^\|\w.*`(.*)` is ahead of `(.*)`\|(.*)\|$", page, re.M)
    assert len(claims) == 7
    for *names, cells in claims:
        assert len(cells.split("|")) == len(kinds)
        for k, cell in zip(kinds, cells.split("|")):
            if not {*names} <= k.known.keys():
                assert cell == ""  # 100 clients has ten methods
                continue
            orders = []
            for part in benchmark.report.PARTS:
                runs = [k.runs(name, k.seeds(k.names), part) for name in names]
                orders.append(benchmark.report.paired(*runs, part).order)
            assert cell == " → ".join(dict.fromkeys(orders)), (names, k.title)
