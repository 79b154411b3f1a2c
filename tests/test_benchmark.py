"""compare.py --benchmark: what it chooses, trains, reads and refuses; the committed tables."""

import json
import re

import pytest

import compare
from comparing import benchmark, planning, training
from conftest import refused
from fl import records
from invented import Child


def kind(monkeypatch, tmp_path, title="iid", *argv):
    """A Kind of which nothing is known."""
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path / "results")
    return benchmark.Kind(title, benchmark.arguments([*argv, "--out", str(tmp_path / "out")]))


def learn(kind, name, accuracy):
    """Has every run of the grid give accuracy(settings), until nothing is missing. Returns the
    settings in the order in which they were asked for, and the choice."""
    asked = []
    while True:
        chosen, missing = kind.choose(name)
        if not missing:
            return asked, chosen
        for settings in missing:
            value = accuracy(settings)
            run = {"diverged": value is None, "final": {"personal": {"val_mean": value}}}
            kind.known[name][benchmark.key(settings, 0, 0)] = run
            asked.append(settings)


def test_the_rate_is_chosen_first_and_then_the_own_parameter(monkeypatch, tmp_path):
    k = kind(monkeypatch, tmp_path)

    def accuracy(settings):
        return 0.5 - abs(settings["lr"] - 0.03) - (settings["ditto-lambda"] == 1)

    asked, chosen = learn(k, "ditto", accuracy)
    assert [s["lr"] for s in asked] == [0.01, 0.03, 0.1, 0.3] + [0.03] * 3
    assert [s["ditto-lambda"] for s in asked] == [0.1] * 4 + [0.01, 1, 0.001]  # 0.1 is known
    assert chosen == {"lr": 0.03, "ditto-lambda": 0.01}  # of equal ones the first


def test_beyond_an_edge_one_more_value_is_tried(monkeypatch, tmp_path):
    k = kind(monkeypatch, tmp_path)
    asked, chosen = learn(k, "local", lambda s: s["lr"])
    assert [s["lr"] for s in asked] == [0.01, 0.03, 0.1, 0.3, 1] and chosen == {"lr": 1}
    asked, chosen = learn(k, "fedavg", lambda s: {0.01: 0.4}.get(s["lr"], 0.3))
    assert [s["lr"] for s in asked] == [0.01, 0.03, 0.1, 0.3, 0.003] and chosen == {"lr": 0.01}
    # fine-tuning for no epoch is none, so that nothing lies below 1
    asked, chosen = learn(k, "fedavg-ft", lambda s: (s["lr"] == 0.1) / s["finetune-epochs"])
    assert chosen == {"lr": 0.1, "finetune-epochs": 1} and len(asked) == 4 + 2


def test_what_diverges_is_not_chosen_unless_everything_does(monkeypatch, tmp_path):
    k = kind(monkeypatch, tmp_path)
    assert learn(k, "local", lambda s: None if s["lr"] > 0.01 else 0.1)[1] == {"lr": 0.01}
    assert learn(k, "centralised", lambda s: None)[1]["lr"] in benchmark.RATES


def test_pfedme_gets_the_rate_of_its_sgd_and_the_step_that_compare_gives_it(monkeypatch, tmp_path):
    k = kind(monkeypatch, tmp_path)
    method, = k.methods({"pfedme": {"pfedme-lambda": 5, "theta-lr": 0.03}})
    assert (method.args["lr"], method.args["theta_lr"]) == (0.2, 0.03)
    asked, _ = learn(k, "pfedme", lambda s: s["theta-lr"])
    assert {s["theta-lr"] for s in asked[:5]} == {0.01, 0.03, 0.1, 0.3, 1}


def test_every_point_of_every_grid_is_a_command_that_the_method_takes(monkeypatch, tmp_path):
    k = kind(monkeypatch, tmp_path)
    grids = {name: benchmark.OWN.get(name, ("lr", benchmark.RATES)) for name in planning.METHODS}
    for i in range(6):  # the i-th value of each, all at once
        points = {name: {parameter: values[i]} for name, (parameter, values) in grids.items()
                  if len(values) > i and values[i] is not None}
        for method in k.methods(points) if points else ():
            (parameter, value), = points[method.name].items()
            made = method.args[parameter.replace("-", "_") + "_" * (parameter == "lambda")]
            assert made == value and type(made) is type(value) or float(made) == float(value)


@pytest.fixture
def go(toy, tmp_path, monkeypatch):
    """Runs the benchmark on the small data set, whose runs are made up; go.trained has the
    folders."""
    def go(*argv):
        go.trained = Child.started = []
        return benchmark.main([*argv, "--device", "cpu", "--out", str(tmp_path / "out")])

    few = {name: planning.METHODS[name] for name in ("local", "fedavg", "fedavg-ft")}
    monkeypatch.setattr(planning, "METHODS", few)
    monkeypatch.setattr(training, "Child", Child)
    monkeypatch.setattr(Child, "started", [])
    monkeypatch.setattr(Child, "accuracy", lambda args: 0.5 + args.lr / 4 + args.seed / 100)
    go.draw, go.drawn = benchmark.draw, []
    monkeypatch.setattr(benchmark, "draw", lambda *given: go.drawn.append(given))
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(benchmark, "SPLITS", 2)
    monkeypatch.setattr(benchmark, "RATES", (None, 0.1, 0.2, None))
    monkeypatch.setattr(benchmark, "KINDS", {"iid": ["--split=iid"],
                                             "two classes": ["--split=classes", "--per-client=2"]})
    monkeypatch.setattr(benchmark, "EQUAL", [
        f"--dataset={toy}", "--model=linear", "--clients=3", "--client-test=0.3",
        "--client-val=0.2", "--rounds=1", "--eval-every=1", "--momentum=0",
        "--transform=normalize"])
    go.out, go.results = tmp_path / "out", tmp_path / "results"
    return go


def test_all_methods_then_more_seeds_then_one_of_ones_own(go, tmp_path, capsys):
    go("--seeds", "1")
    # local and fedavg: 2 rates, 1 further split; fedavg-ft: 2 more of its own parameter
    assert len(go.trained) == 2 * (3 + 3 + 5)
    page = (go.results / "benchmark.md").read_text()
    assert page.count("|fedavg-ft|") == 2 and "minus local" in page
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
    assert len(go.trained) == 2 * (2 + 3) and all("/mine/" in folder for folder in go.trained)
    assert (go.results / "benchmark.md").read_text() == again  # nobody else's numbers are touched
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith("|mine|")]
    assert len(rows) == 2 and printed.count("|local|") == 2
    go(str(mine), "--seeds", "3")  # the others have two
    assert not go.trained
    go.draw(*go.drawn[-1])
    assert (go.out / "benchmark.svg").read_text().count("<!-- mine -->") == 2


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


def test_the_page_has_the_tables_of_the_committed_runs(tmp_path):
    """Every row of docs/benchmark.md, to the last character, is computed from results/benchmark."""
    page = (planning.HERE / "docs" / "benchmark.md").read_text()
    kinds = [benchmark.Kind(title, benchmark.arguments([])) for title in benchmark.KINDS]
    kinds = [k for k in kinds if all(k.finished(name, 1) for name in planning.METHODS)]
    assert kinds
    for k in kinds:
        for line in benchmark.table(k.rows()):
            assert line in page
    ranks = benchmark.mean_ranks(kinds)
    assert ranks in (planning.HERE / "results" / "benchmark" / "benchmark.md").read_text()
    said = {"fedslr": "5.7 of 23", "apfl": "8.0", "fedrep": "8.1", "per-fedavg": "17.2"}
    assert all(f"{name} {z.split()[0]}" in ranks and f"{z})" in page for name, z in said.items())
    assert "do by 11.6 or more" in ranks and "must differ by 11.6" in page
    numbers = re.findall(r"^\|[a-z-]+[^|]*\|0\.\d+\|", page, re.M)
    assert len(numbers) == len(kinds) * len(planning.METHODS)  # no row of a method that left


def test_the_page_has_the_order_of_the_claims():
    """Each word of its first table is that of the paired difference."""
    page = (planning.HERE / "docs" / "benchmark.md").read_text()
    kinds = [benchmark.Kind(title, benchmark.arguments([])) for title in benchmark.KINDS]
    claims = re.findall(r"^\|\w.*`(.*)` is ahead of `(.*)`\|(.*)\|(.*)\|(.*)\|$", page, re.M)
    assert len(claims) == 7
    for *names, a, b, c in claims:
        for k, word in zip(kinds, (a, b, c)):
            runs = [[k.known_run(name, k.choose(name)[0], split, seed)
                     for split in range(benchmark.SPLITS)
                     for seed in range(k.seeds(planning.METHODS))] for name in names]
            assert benchmark.report.paired(*runs)[2] == word, (names, k.title)
