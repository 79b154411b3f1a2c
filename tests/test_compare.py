"""compare.py: what it shares, skips, resumes, refuses and writes."""

import csv
import io
import itertools
import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import common
import compare
from comparing import planning, ranks, report, training, tuning
from conftest import images, refused
from fl import records
from invented import Child, personal

HERE = planning.HERE
OWN = str(HERE / "docs" / "lastlayer.py")
SMALL = ["--model", "mnistnet", "--clients", "4", "--split", "iid", "--device", "cpu"]
MINE = """import baselines
def arguments(argv):
    return baselines.arguments(['--method=local', *argv])
def main(argv=None):
    baselines.main(['--method=local', *argv])
"""


def written(path, text):
    """Writes a method's file, which may have been loaded with another text."""
    path.write_text(text)
    return str(path)


def plan(methods, *argv):
    args, shared = compare.arguments(["--methods", methods, *argv])
    return planning.plan(args.methods, args.set, shared)


# One comparison, really trained


class Here:
    """In place of training.Child: trains in this process."""

    def __init__(self, argv, **more):
        file, *argv = argv
        common.load_file(file).main(argv)

    ended, result = (lambda self: True), (lambda self: (0, ""))


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Three methods with two seeds: the folder, the records, and what was printed."""
    out = tmp_path_factory.mktemp("compared")
    np.savez(out / "toy.npz", **images())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "Child", Here)
        terminal = io.TextIOWrapper(io.BytesIO(), "ascii")
        patch.setattr(sys, "stdout", terminal)
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        code = compare.main([
            "--methods", f"local,own={OWN},persfl", "--dataset", str(out / "toy.npz"), *SMALL,
            "--rounds", "2", "--eval-every", "1", "--seeds", "2", "--set", "own.mix=0.25",
            "--set", "persfl.distill-epochs=1", "--out", str(out / "out")])
        sys.stdout.flush()
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    found = {str(path.parent.relative_to(out / "out")): records.read(path)
             for path in out.rglob("result.json")}
    assert code == 0
    return out / "out", found, terminal.buffer.getvalue().decode("ascii")


def test_the_tables_are_those_of_the_records(compared):
    out, found, _ = compared
    assert sorted(found) == [f"{name}/{seed}" for name in ("local", "own", "persfl")
                             for seed in range(2)]
    assert len({r["split"]["fingerprint"] for r in found.values()}) == 1
    rows = {row["method"]: row for row in csv.DictReader(open(out / "compare.csv"))}
    assert list(rows) == sorted(rows, key=lambda name: -float(rows[name]["personal_mean"]))
    for name, row in rows.items():
        finals = [found[f"{name}/{seed}"]["final"] for seed in range(2)]
        # [seeds, K]; the worst tenth of 4 clients is one
        clients = np.array([final["personal"]["per_client"] for final in finals])
        wanted = {"personal": clients.mean(1), "worst_tenth": clients.min(1)}
        wanted["validation"] = [final["personal"]["val_mean"] for final in finals]
        if name != "local":
            wanted["global"] = [final["global"]["top1"] for final in finals]
        for title, values in wanted.items():
            assert float(row[f"{title}_mean"]) == pytest.approx(np.mean(values))
            std = float(row[f"{title}_std_seeds"])
            assert std == pytest.approx(abs(np.diff(values)[0]) / 2**0.5)
    assert rows["local"]["global_mean"] == "" and float(rows["local"]["MB_sent_mean"]) == 0
    sent = 2 * 2 * 2 * 4 * found["own/0"]["parameters"]  # 2 rounds, 2 clients, up and down
    assert float(rows["own"]["MB_sent_mean"]) == pytest.approx(sent / 1e6)
    own, local = (np.mean([found[f"{name}/{seed}"]["final"]["personal"]["mean"] for seed in (0, 1)])
                  for name in ("own", "local"))
    assert float(rows["own"]["gain_over_local"]) == pytest.approx(own - local)
    runs = list(csv.DictReader(open(out / "runs.csv")))
    assert len(runs) == 6
    for row in runs:
        final = found[f"{row['method']}/{row['seed']}"]["final"]
        assert float(row["personal"]) == final["personal"]["mean"]


def test_the_page_is_printed_and_names_settings_and_reasons(compared):
    """A terminal without ± shows a question mark."""
    out, found, printed = compared
    page = (out / "compare.md").read_text(encoding="utf-8")
    assert page.replace("±", "?") in printed and "±" in page
    assert found["own/0"]["args"]["mix"] == 0.25 and "| `--mix=0.25` |" in page
    assert f"- own is {OWN}." in page and "persfl is" not in page
    assert "all clients take part in every round; two epochs of" in page


def test_figures_are_in_three_formats(compared):
    for name in ("curves", "clients"):
        file = compared[0] / name
        assert file.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
        assert "<svg" in file.with_suffix(".svg").read_text()
        assert file.with_suffix(".pdf").read_bytes()[:5] == b"%PDF-"


# Comparisons of made-up runs


@pytest.fixture
def go(tmp_path, monkeypatch):
    """Compares methods and returns the records. go.trained: what was trained, with + if resumed;
    go.code: the exit code. Nothing is trained nor drawn."""
    np.savez(tmp_path / "toy.npz", **images())

    def go(methods, *more):
        Child.started = []
        try:
            go.code = compare.main(["--methods", methods, "--dataset", str(tmp_path / "toy.npz"),
                                    *SMALL, "--rounds", "2", "--eval-every", "1", "--seeds", "1",
                                    "--out", str(go.out), *more])
        finally:
            go.trained = [str(pathlib.Path(out).relative_to(go.out)) for out in Child.started]
        return {str(path.parent.relative_to(go.out)): records.read(path)
                for path in go.out.rglob("result.json")}

    for name in ("accuracy", "before", "started"):
        monkeypatch.setattr(Child, name, getattr(Child, name))
    monkeypatch.setattr(training, "Child", Child)
    monkeypatch.setattr(report, "draw", lambda *_: None)
    go.out, go.toy, go.trained = tmp_path / "out", tmp_path / "toy.npz", []
    return go


def edited(path, **more):
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | more))


def test_what_is_done_is_kept_and_what_was_interrupted_goes_on(go, tmp_path, capsys):
    mine = written(tmp_path / "mine.py", MINE)
    go(f"fedavg,{mine}")
    assert go.trained == ["fedavg/0+", "mine/0+"]
    go(f"fedavg,{mine}", "--seeds", "2", "--split-seeds", "2")
    assert go.trained == ["fedavg/1+", "mine/1+", *(
        f"{name}/split1/{seed}+" for seed in (0, 1) for name in ("fedavg", "mine"))]
    rows = list(csv.DictReader(open(go.out / "runs.csv")))
    assert {(row["split_seed"], row["seed"]) for row in rows} == {*itertools.product("01", "01")}
    assert "2 seeds on 2 splits" in (go.out / "compare.md").read_text()
    edited(go.out / "fedavg" / "1" / "result.json", status="unfinished")
    go("fedavg", "--seeds", "2")
    assert go.trained == ["fedavg/1+"]
    go("fedavg", "--rounds", "4")
    assert go.trained == ["fedavg/0+"]
    for argv, was in ((["--rounds", "4", "--lr", "0.1"], "--lr 0.02, now it is 0.1"),
                      (["--rounds", "1"], "--rounds 4, now it is 1"),
                      (["--rounds", "8", "--eval-every", "2"], "--eval-every 1, now it is 2")):
        words = f"has a record with {was}; use another NAME, or another --out"
        refused(capsys, words, go, "fedavg", *argv)
        assert not go.trained


def test_an_unfinished_run_of_another_version_of_a_source_file_is_trained_anew(go, capsys):
    """A finished one counts."""
    found = go("fedavg")
    path = go.out / "fedavg" / "0" / "result.json"
    environment = found["fedavg/0"]["environment"]
    environment["sources"]["common.py"], environment["commit"] = "0" * 64, "1f"
    edited(path, environment=environment)
    go("fedavg")
    assert not go.trained
    edited(path, status="unfinished")
    go("fedavg")
    assert go.trained == ["fedavg/0"] and "common.py changed" in capsys.readouterr().out
    assert (go.out / "fedavg" / "0" / "result.previous.json").exists()


def test_our_file_that_somebody_has_changed_counts(go, capsys, monkeypatch):
    """Ours as committed do not: a new version of them would train all methods anew."""
    path = go.out / "fedavg" / "0" / "result.json"
    environment = go("fedavg")["fedavg/0"]["environment"]
    environment["sources"] |= {"baselines.py": "0" * 64, "fl/net.py": "0" * 64}
    for name, commit in (None, "1f"), ("baselines.py", "1f"), ("fl/net.py", "1f"), (
            "baselines.py, fl/net.py", "1f+"):  # they were edited when the record was made
        edited(path, environment=environment | {"commit": commit})
        trained = ["fedavg/0"] if name else []
        monkeypatch.setattr(training, "changes", lambda files: {training.HERE / str(name)})
        go("fedavg")
        assert go.trained == trained
        assert (f"{name} changed; trained anew" in capsys.readouterr().out) == bool(name)


def test_equal_splits_are_noted(go, tmp_path, capsys):
    own = written(tmp_path / "deal.py", "import numpy as np\ndef deal(*_):\n"
                  "    return list(np.arange(40).reshape(4, 10))")
    note = "--split gives each client the same images for several --split-seeds"
    for split in f"{own}:deal", "iid":
        go.out = tmp_path / split[-3:]
        go("fedavg", "--split", split, "--split-seeds", "2")
        assert (note in capsys.readouterr().out) == (split != "iid")


@pytest.mark.parametrize("what", ["method", "import", "lazy", "model", "split"])
def test_a_run_of_another_version_of_a_users_file_is_trained_anew(go, tmp_path, capsys, what):
    text = {"method": MINE, "import": "import a_helper\n" + MINE,
            "lazy": MINE + "\ndef later():\n    import later_helper\n",
            "model": "import torch\nclass Net(torch.nn.Sequential):\n"
                     "    def __init__(self, classes):\n"
                     "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(192, classes))",
            "split": "import numpy as np\n"
                     "def Net(*_): return list(np.arange(40).reshape(4, 10))"}[what]
    path, helper = written(tmp_path / "own.py", text), tmp_path / (
        "later_helper.py" if what == "lazy" else "a_helper.py")
    helper.write_text("SCALE = 1.0\n")
    argv = ["fedavg", f"--{what}", f"{path}:Net"] if what in ("model", "split") else [path]
    for _ in range(2):
        found = go(*argv)
    assert not go.trained
    record, = found.values()
    changed = helper if what in ("import", "lazy") else tmp_path / "own.py"
    assert changed.name in record["environment"]["sources"]
    written(changed, changed.read_text() + "\n# another version\n")
    go(*argv)
    assert [name.rpartition("/")[2] for name in go.trained] == ["0"]
    assert f"{changed.name} changed; trained anew" in capsys.readouterr().out
    if what == "import":
        Child.before = lambda file: helper.write_text(f"SCALE = {len(Child.started)}.0\n")
        refused_late(capsys, "a_helper.py changed meanwhile; repeat the command", go, *argv,
                     "--seeds", "3")


def refused_late(capsys, words, call, *args):
    """As refused, after other words were printed."""
    with pytest.raises(SystemExit) as stop:
        call(*args)
    assert stop.value.code == 2 and words in capsys.readouterr().err


def test_finished_runs_can_be_fine_tuned_later(go, monkeypatch, tmp_path):
    """Then the order and the differences are those of the fine-tuned models."""
    monkeypatch.setattr(Child, "tuned", lambda args: 0.4 + 0.2 * (args.method == "local"))
    go("local,fedprox")
    go("local,fedprox", "--fine-tune", "1,3")
    assert go.trained == ["local/0+", "fedprox/0+"]
    go("local,fedprox", "--fine-tune", "1,3,10")
    assert go.trained == ["local/0+", "fedprox/0+"]
    go("local,fedprox", "--fine-tune", "1,3,10")
    assert not go.trained
    page = (go.out / "compare.md").read_text()
    assert "--fine-tune=1,3,10" in page and "| fedprox | -0.100 |" in page
    table = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    columns = [table[0].index(title) for title in ("personal", "fine-tuned", "extra epochs")]
    assert [table[1][i] for i in columns] == ["0.500", "0.600", "1.0"]
    assert [table[2][i] for i in columns] == ["0.500", "0.500", "0.0"]  # after 1, 3, 10: 0.4


def test_another_file_s_record_under_the_same_name_is_refused(go, tmp_path, capsys):
    """Its flags are the same. A file that calls one of ours has that one's record."""
    for name in ("one", "two"):
        written(tmp_path / f"{name}.py", pathlib.Path(OWN).read_text())
    go(f"own={tmp_path / 'one.py'}")
    words = "has a record of one.py, now it is two.py; use another NAME, or another --out"
    refused(capsys, words, go, f"own={tmp_path / 'two.py'}")
    found = go("strong=fedprox", "--set", "strong.mu=1")
    path = go.out / "strong" / "0" / "result.json"
    refused(capsys, "has a record with --mu 1", go, "strong=fedprox")
    assert found["strong/0"]["args"]["mu"] == 1
    refused(capsys, "has a record with --mix None, now it is 0.5", go, f"strong={OWN}")
    environment = found["strong/0"]["environment"]
    edited(path, environment=environment | {"sources": {"fedavg.py": ""}})
    go("strong=fedprox", "--set", "strong.mu=1")
    assert not go.trained


def test_changed_images_and_splits_are_refused(go, tmp_path, capsys):
    owned = tmp_path / "owned.npy"
    (tmp_path / "s.py").write_text("import numpy as np\n"
                                   f"def mine(*_): return list(np.load({str(owned)!r}))\n"
                                   "def other(*_): return list(np.random.default_rng()"
                                   ".permutation(40).reshape(4, 10))\n")
    np.save(owned, np.arange(40).reshape(4, 10))
    go("fedavg", "--split", f"{tmp_path}/s.py:mine")
    np.save(owned, np.arange(40).reshape(10, 4).T)
    refused(capsys, "has a record of another split than", go, "fedavg", "--split",
            f"{tmp_path}/s.py:mine")
    refused_late(capsys, "has not had the images and the split that all share, so it can't be "
                 "compared", go, "local", "--split", f"{tmp_path}/s.py:other")
    assert go.trained == ["local/0+"]
    go("apfl")
    arrays = dict(np.load(go.toy))
    np.savez(go.toy, **arrays | {"y_train": arrays["y_train"][::-1]})
    refused(capsys, "has a record of other images than", go, "apfl")


@pytest.mark.parametrize("status", [None, "unfinished"])
def test_a_file_that_trains_nothing_or_leaves_its_loop_is_refused(go, capsys, monkeypatch, status):
    """Such a program ends without an error."""
    class Ended(Child):
        def __init__(self, argv, **more):
            if status:
                super().__init__(argv, **more)
                edited(go.out / "local/0/result.json", status=status)

    monkeypatch.setattr(training, "Child", Ended)
    refused_late(capsys, "baselines.py has not trained all rounds; does it loop over run.rounds "
                 "without `break`, and end with", go, "local")


def test_a_method_that_changes_a_shared_setting_when_it_runs_is_refused(go, capsys, monkeypatch):
    class Changes(Child):
        def __init__(self, argv, **more):
            super().__init__(argv, **more)
            record = json.loads((go.out / "local/0/result.json").read_text())
            edited(go.out / "local/0/result.json", args=record["args"] | {"lr": 0.5})

    monkeypatch.setattr(training, "Child", Changes)
    refused_late(capsys, "baselines.py changes --lr after its arguments(argv), to 0.5; change it "
                 "there", go, "local")


def test_a_method_that_does_not_evaluate_its_last_round_is_refused(go, capsys, monkeypatch):
    class Early(Child):
        def __init__(self, argv, **more):
            super().__init__(argv, **more)
            path = go.out / "local/0/result.json"
            final = json.loads(path.read_text())["final"]
            edited(path, final=final | {"personal": {**final["personal"], "round": 1}})

    monkeypatch.setattr(training, "Child", Early)
    refused_late(capsys, "has last called run.log in round 1 of 2; ask run.evaluates() whether",
                 go, "local", "--rounds", "2")


def test_what_a_program_said_explains_its_end(go, capsys, monkeypatch):
    """A refusal's line, or else the command."""
    for rounds, code, end in ((2, 2, "wrong\n"), (3, 1, "wrong (python /")):
        monkeypatch.setattr(Child, "result", lambda self, code=code: (code, "wrong"))
        refused_late(capsys, f"local, seed 0: {end}", go, "local", "--rounds", str(rounds))


def test_the_exit_code_is_1_if_every_run_diverged(go, capsys, monkeypatch):
    """A method without personal measures has empty cells."""
    go("local,fedavg")
    path = go.out / "local/0/result.json"
    final = records.read(path)["final"]
    edited(path, final={"global": final["global"]})
    assert go("local,fedavg") and go.code == 0
    row = next(line for line in (go.out / "compare.md").read_text().splitlines()
               if line.startswith("| local |"))
    assert [not cell.strip() for cell in row.split("|")[2:5]] == [False, True, True]
    for name in ("local", "fedavg"):
        edited(go.out / name / "0/result.json", status="diverged", diverged=True)
    go("local,fedavg")
    assert go.code == 1 and "all runs diverged" in capsys.readouterr().out
    page = (go.out / "compare.md").read_text()
    assert "| fedavg (1 of 1 diverged) |" in page and "curves.svg" not in page


# What is asked for


BAD = """
fedavg,fedfoo     |                     | there is no method fedfoo
fedavg,nosuch.py  |                     | there is no file
,                 |                     | --methods is empty
fedavg            | --set mu=0.1        | --set mu=0.1: say NAME.PARAMETER=VALUE
fedprox           | --set fedprox.mu(=1 | unrecognized arguments: --mu(=1
fedavgm | --set fedavgm.target=0.8 | stops at an accuracy (target=[0.8]), others don't
fedavg,fedavg     |                     | the name fedavg is taken; give fedavg another one: NAME=
local=fedprox     |                     | the name local is taken; give fedprox another one: NAME=
../a=fedavg       |                     | there is no method ../a=fedavg
_a=fedavg         |                     | there is no method _a=fedavg
a=superfed-mm     | --set a.mix=layer   | --mix is no parameter of superfed-mm alone
a=fedprox         | --set fedprox.mu=1  | --methods has no fedprox; its names are a
a=fedprox         | --set a.mu=1 --set a.mu=.1 | it is set twice
fedavg            | --alpha 0.1         | --split iid has no use for --alpha
apfl | --set apfl.personal=1 | apfl has no personal; it is for fedper, fedrep, lg-fedavg
fedavg            | --set fedavg.mu=1   | --set fedavg.mu=1: fedavg has no mu; it is for fedprox
fedprox           | --set fedprox.mu=-1 | fedprox.mu=-1: argument --mu: -1 must be at least 0
fedprox           | --set fedprox.rounds=5 | --rounds is no parameter of fedprox alone
fedavg            | --set fedavg.seed=5 | --seed is no parameter of fedavg alone: all methods
fedprox           | --set fedprox.moo=1 | baselines.py --help
fedprox           | --mu 1     | a method's own parameter is --set NAME.PARAMETER=VALUE
fedavg            | --batch 5           | unrecognized arguments: --batch 5
fedavg            | --seed 5            | --seeds says how many
fedavg            | --seeds 0           | must be at least 1
fedavg            | --out=              | --out is empty; name a folder
fedavg            | --fine-tune-lr 0.1  | is the rate of --fine-tune E, which is not given
fedavg,persfl | --dataset mnist --split classes | makes 6000 of --limit None, which all methods
fedavg,persfl     | --client-val 0      | persfl: users choose their teachers on validation images
fedavg,local | --against fedprox --seeds 2 | --methods has no fedprox; its names are fedavg, local
fedavg,local      | --against local     | one run of each method gives no interval
fedprox  | --tune fedprox.moo=1,2 | --methods: fedprox, --tune fedprox.moo=1: unrecogni
fedprox,fedavg    | --tune mu=1,2       | --methods: fedavg, --tune fedavg.mu=1: fedavg has no mu
fedprox           | --tune fedavg.lr=1,2 | the names are fedprox
fedprox           | --tune fedprox.mu=1,x | --tune fedprox.mu=x: argument --mu
fedprox           | --tune fedprox.mu=1 --set fedprox.mu=2 | it is set twice
fedprox           | --tune lr=.1,.2 --client-val 0 | --client-val must be above 0
"""


@pytest.mark.parametrize("line", BAD.strip().splitlines())
def test_bad_input(line, go, capsys):
    methods, more, words = map(str.strip, line.split("|"))
    refused(capsys, words, go, methods, *more.split())
    assert not go.trained and not go.out.exists()


NEEDS = "must have arguments(argv) and main(argv); see docs/extend.md"


def test_a_folder_with_somebody_elses_compare_md_is_refused(tmp_path, capsys):
    written(tmp_path / "compare.md", "mine")
    refused(capsys, "no comparison wrote", compare.arguments,
            ["--methods", "local", "--out", str(tmp_path)])
    written(tmp_path / "runs.csv", "")
    compare.arguments(["--methods", "local", "--out", str(tmp_path)])


@pytest.mark.parametrize("text, words", [
    (MINE.replace("*argv])\ndef", '*argv, "--epochs=2"])\ndef'),
     "makes 2 of --epochs 1, which all methods share; to give it to all: --epochs 2"),
    (MINE.replace("return baselines.arguments(['--method=local', *argv])",
                  "args = baselines.arguments(['--method=local', *argv])\n"
                  "    args.target = [0.5]\n    return args"),
     "mine.py stops at an accuracy (target=[0.5])"),
    ("def main(argv): pass", NEEDS),
    ("def arguments(argv): pass", NEEDS),
    ("def main(argv:", "mine.py can't be loaded: SyntaxError"),
    ("from .other import x", "; a file is loaded alone: write `import a`"),
    ("def arguments(): pass\ndef main(argv): pass", "its arguments(argv) fails: TypeError"),
    ("def arguments(argv): parse(argv)\ndef main(argv): pass",
     "mine: its arguments(argv) fails: NameError: name 'parse' is not defined"),
    ("def arguments(argv): raise SystemExit\ndef main(argv): pass", "its arguments(argv) ends"),
    ("def arguments(argv): pass\ndef main(argv): pass",
     "mine: its arguments(argv) does not return what common.parse returns; see docs/extend.md"),
])
def test_a_file_that_is_no_method_or_changes_what_is_shared_is_refused(
        tmp_path, capsys, text, words):
    refused(capsys, words, plan, written(tmp_path / "mine.py", text))


def test_the_name_of_a_method_of_this_repository_is_taken(tmp_path, capsys):
    path = written(tmp_path / "fedavg.py", MINE)
    refused(capsys, "the name fedavg is taken", plan, path)


def test_every_method_takes_the_shared_settings():
    for method in plan("all", "--dataset", "cifar10"):
        assert not method.args.get("target"), "a run must not end at an accuracy"
        assert method.name == "psinet" or method.args["lr_decay"] == 1
    methods = {method.name: method.args for method in plan(f"all,{OWN}")}
    assert list(methods) == [*planning.METHODS, "lastlayer"] and len(methods) == 24
    for name in ("fedavg", "superfed-lm", "ditto", "psinet"):
        assert planning.SHARED.items() <= methods[name].items()
        assert methods[name]["lr_decay"] == 0.95


def test_what_is_shared_differs_only_where_the_page_says_so():
    """As many clients train in all. Under another name a method keeps what it has of its own."""
    args = {method.name: method.args for method in plan(
        "fedavg,persfl,fedslr,slow=scaffold", "--split", "iid", "--lr", "0.03", "--momentum",
        "0.9")}
    assert (args["fedslr"]["lr"], args["fedslr"]["momentum"]) == (0.075, 0)
    assert (args["persfl"]["fraction"], args["persfl"]["rounds"]) == (1, 15)
    assert args["slow"]["lr"] == 0.075
    apart = {"fedslr": {"lr", "momentum"},
             "persfl": {"lr", "momentum", "fraction", "rounds", "eval_every"}}
    no_effect = {"alpha", "per_client", "mu", "argv"}  # a mu of another meaning
    for name, keys in apart.items():
        both = set(args[name]) & set(args["fedavg"])
        differ = {key for key in both if args[name][key] != args["fedavg"][key]}
        assert len(both) > 25 and differ <= keys | no_effect


def test_a_method_s_own_parameters(tmp_path, capsys):
    """psinet.py does not know where to cut a model from elsewhere; underscores may be hyphens; a
    file's arguments are as in a record."""
    (tmp_path / "net.py").write_text("from fl.models import CNN")
    argv = ["psinet", "--model", f"{tmp_path}/net.py:CNN"]
    refused(capsys, "net.py:CNN has no default depth", plan, *argv)
    assert plan(*argv, "--set", "psinet.depth=fc")[0].args["depth"] == "fc"
    for word in ("finetune_epochs", "finetune-epochs"):
        method, = plan("fedprox-ft", "--set", f"fedprox-ft.{word}=2")
        assert method.args["finetune_epochs"] == 2
    mine = written(tmp_path / "mine.py", """import pathlib, common
def arguments(argv):
    parser = common.parser(__doc__)
    parser.add_argument('--weights', type=pathlib.Path, default=pathlib.Path('here'))
    parser.add_argument('--two', default=(1, 2))
    return common.parse(parser, {}, argv)
main = arguments
""")
    method, = plan(mine)
    assert (method.args["weights"], method.args["two"]) == ("here", [1, 2])
    for method in plan("fedavg,persfl", "--dataset", "mine.npz", "--split", "natural"):
        assert not any(word.startswith("--clients") for word in method.argv)
    assert planning.shell([mine, "--a"]) == f"PYTHONPATH={HERE} python {mine} --a"
    assert planning.shell([str(HERE / "fedavg.py")]) == f"python {HERE / 'fedavg.py'}"


def test_a_curve_has_ten_points():
    """Of methods with fewer rounds, too, unless --eval-every is given."""
    for method in plan("fedavg,persfl,fedma", "--rounds", "40"):
        assert method.args["rounds"] // method.args["eval_every"] >= 10
    for method in plan("fedavg,fedma", "--rounds", "40", "--eval-every", "20"):
        assert method.args["eval_every"] == 20


# --tune


def grid(methods, *argv):
    args, shared = compare.arguments(["--methods", methods, *argv])
    methods = planning.plan(args.methods, args.set, shared)
    return tuning.grid_of(methods, args, shared), args, shared


def test_a_grid_is_crossed_and_a_method_s_own_one_counts():
    points, *_ = grid("a=pfedme,fedprox,local", "--set", "a.pfedme-lambda=30", "--tune",
                      "fedprox.lr=1", "--tune", "lr=2,3", "--tune", "fedprox.mu=4,5")
    assert [" ".join(words) for words, _ in points] == [
        "a.theta-lr=2", "a.theta-lr=3", "fedprox.lr=1 fedprox.mu=4", "fedprox.lr=1 fedprox.mu=5",
        "local.lr=2", "local.lr=3"]
    run = points[1][1]
    assert (run.method.args["theta_lr"], run.method.args["lr"]) == (3, 0.0333)  # lr: 1 / lambda
    method, = plan("pfedme", "--set", "pfedme.lr=0.5", "--set", "pfedme.pfedme-lambda=30")
    assert method.args["lr"] == 0.5  # but not if it is given
    assert run.method.args["pfedme_lambda"] == 30 and "--seed=0" in run.method.argv
    assert str(run.folder) == "runs/compare/tune/a/theta-lr=3/0"


def test_the_best_on_validation_images_is_chosen(tmp_path, monkeypatch, capsys):
    """Whatever its accuracy on test images; of equal ones the first. A run that diverged has lost;
    a method without validation is refused."""
    points, args, shared = grid("fedavg", "--tune", "lr=1,2,3,4", "--out", str(tmp_path))
    found = [made_up("fedavg", [[[test]]], val=val)[0]
             for test, val in ((0.9, 0.5), (0.2, 0.7), (0.3, 0.7), (0.9, 0.0))]
    found[3].update(diverged=True, final={})
    monkeypatch.setattr(training, "train_all", lambda *_: found)
    for words, run in points:
        run.folder.mkdir(parents=True)
        (run.folder / "result.json").write_text(words[0])
    assert tuning.tune(points, args, shared) == ["fedavg.lr=2"]
    assert (tmp_path / "fedavg" / "0" / "result.json").read_text() == "fedavg.lr=2"
    table = (tmp_path / "tune.md").read_text()
    assert "| fedavg | lr=2 | 0.7000 | chosen |" in table and "| lr=4 | diverged |  |" in table
    assert "note" not in capsys.readouterr().out
    monkeypatch.setattr(training, "train_all", lambda *_: [found[1], found[1]])
    tuning.tune(points[:2], args, shared)
    assert "note    all settings of fedavg give 0.7000" in capsys.readouterr().out
    monkeypatch.setattr(training, "train_all", lambda *_: found)
    found[0]["final"] = {"global": {"top1": 0.5}}
    refused(capsys, "fedavg measures no accuracy on validation images", tuning.tune, points,
            args, shared)
    for r in found:
        r.update(diverged=True, final={})
    refused(capsys, "--tune: all runs of fedavg diverged; try other values", tuning.tune,
            points, args, shared)


def test_chosen_settings_are_those_of_the_comparison(go):
    """The chosen run is its first one."""
    Child.accuracy = lambda args: 1 - args.lr - abs(args.mu or 0)
    options = ["--seeds", "2", "--tune", "lr=0.5,0.25", "--tune", "fedprox.mu=0.1,0.2"]
    found = go("fedavg,fedprox", *options)
    assert len(go.trained) == 2 + 4 + 2
    for seed in range(2):
        args = found[f"fedprox/{seed}"]["args"]
        assert (args["lr"], args["mu"]) == (0.25, 0.1)
        assert found[f"fedavg/{seed}"]["args"]["lr"] == 0.25
    words = "Chosen for each method on validation images (first seed and split): lr from 0.5, 0.25"
    assert words in (go.out / "compare.tex").read_text()
    assert "| `--lr=0.25 --mu=0.1` |" in (go.out / "compare.md").read_text()
    go("fedavg,fedprox", *options)
    assert not go.trained


# Numbers


def made_up(name, clients, val=0.5):
    """Records of a method: clients[split][seed] has the personal accuracies."""
    return [{"diverged": accuracies is None, "seconds_per_round": 1.0, "bytes_up": 1e6,
             "bytes_down": 1e6, "args": {"seed": seed, "split_seed": split}, "parameters": 10,
             "rounds": [{"seconds": 60, "evaluation_seconds": 30}, {"seconds": 30}],
             "final": {} if accuracies is None else {"personal": personal(accuracies, val)}}
            for split, seeds in enumerate(clients) for seed, accuracies in enumerate(seeds)]


def test_paired_differences_with_a_known_answer():
    """Clients differ far more than methods: only the pairs tell the methods apart. The standard
    error of a mean of independent differences is known; 1.96 of them are half an interval."""
    rng = np.random.default_rng(3)
    base = rng.uniform(0.3, 0.9, (2, 3, 400))  # [splits, seeds, K]
    noise = rng.normal(0, 0.1, base.shape)
    noise = (noise - noise.mean(2, keepdims=True)) * 0.1 / noise.std(2, keepdims=True)
    one, other = made_up("a", base + 0.02 + noise), made_up("b", base)
    mean, (low, high), word, p = report.paired(one, other)
    error = 0.1 / (6 * 400) ** 0.5
    assert mean == pytest.approx(0.02) and word == "ahead"
    assert (low + high) / 2 == pytest.approx(0.02, abs=2e-4)
    # a run that is drawn twice counts its clients twice: the sum of squared weights is 11/36, not
    # 6/36; two seeds of a split share the clients that are drawn, but their noise is independent
    assert high - low == pytest.approx(2 * 1.96 * error * (11 / 6) ** 0.5, rel=0.06)
    two, others = one[:2], other[:2]
    assert report.paired(others, two)[2] == "behind"
    assert report.paired(two, others) == report.paired(two, others)  # a fixed generator
    assert report.paired(two, two) == (0, (0, 0), "inconclusive", 1)
    assert report.paired(one[:1], other[:1]) == (pytest.approx(0.02), None, "", None)


def test_the_interval_covers_what_clients_share_over_seeds_and_runs_over_clients():
    """Seeds with equal differences do not narrow it; nor do clients where whole runs differ."""
    clients, none = np.linspace(-0.1, 0.1, 101), np.zeros(101)
    alike = report.paired(made_up("a", [[clients] * 4]), made_up("b", [[none] * 4]))
    half = 1.96 * clients.std() / 101 ** 0.5
    assert alike[1] == (pytest.approx(-half, rel=0.05), pytest.approx(half, rel=0.05))
    shifted = [[none + shift for shift in (-0.1, 0.0, 0.1, 0.2)]]
    runs = report.paired(made_up("a", shifted), made_up("b", [[none] * 4]))
    assert runs[0] == pytest.approx(0.05) and runs[1][0] < 0 and runs[2] == "inconclusive"


@pytest.mark.slow
@pytest.mark.parametrize("of_runs, of_clients, noise, covered",
                         [(0, 0.05, 0.05, 0.96), (0.02, 0.05, 0.05, 0.92), (0.05, 0, 0, 0.74)])
def test_how_often_the_interval_covers_the_truth(of_runs, of_clients, noise, covered):
    """docs/compare.md's shares of 400 simulated comparisons: one split, three seeds, 20 clients."""
    rng, hits = np.random.default_rng(0), 0
    for _ in range(400):
        D = (rng.normal(0, of_runs, (1, 3, 1)) + rng.normal(0, of_clients, (1, 1, 20))
             + rng.normal(0, noise, (1, 3, 20)))
        low, high = report.paired(made_up("a", D), made_up("b", np.zeros_like(D)))[1]
        hits += low <= 0 <= high
    assert hits / 400 == pytest.approx(covered, abs=0.005)


def test_names_of_files():
    """A dot would end the name in --set; a name that the program makes is one that it takes."""
    for file, name in (("a/mine.v2.py", "mine_v2"), ("_mine.py", "mine")):
        assert planning.name_of(file) == name
        assert [*planning.named(f"{name}={file}")] == [*planning.named(file)] == [(name, file)]


def test_holms_correction_and_ranks():
    """By hand: .005 * 4, .01 * 3, .03 * 2, and .04, which is no smaller than the one before. The
    critical difference of 4 methods on 14 data sets is Demsar's."""
    assert ranks.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert ranks.mean_ranks([[0.9, 0.8, 0.8], [0.5, 0.6, 0.7]]).tolist() == [2, 2.25, 1.75]
    assert ranks.critical_difference(4, 14) == pytest.approx(1.25, abs=0.005)


def test_a_table_marks_what_holms_correction_makes_inconclusive():
    """Of a and b, both ahead of c, only a's lead remains: p is .04 * 2 for b's."""
    def row(name, *p):
        return {"method": name, "against": {"c": report.Paired(0.1, (0, 1), "ahead", *p)}}

    rows = [row("a", 0.001), row("b", 0.06), {"method": "c", "against": {"c": None}}]
    report.mark(rows)
    assert [r["against"]["c"].order for r in rows[:2]] == ["ahead", "ahead*"]
    # the same pair twice, as a minus c and c minus a, counts once
    rows = [row("a", 0.03), {"method": "c", "against": {
        "a": report.Paired(-0.1, (-1, 0), "behind", 0.03)}}]
    report.mark(rows)
    assert [*rows[0]["against"].values(), *rows[1]["against"].values()][1].order == "behind"


def test_mean_ranks_over_splits():
    """a is first on one split and second on the other, b the reverse, c third; d lacks a split."""
    runs = {"a": made_up("a", [[[0.9]], [[0.5]]]), "b": made_up("b", [[[0.8]], [[0.6]]]),
            "c": made_up("c", [[[0.1], [0.3]], [[0.2], [0.2]]]),
            "d": made_up("d", [[[0.95]], [None]])}
    assert report.ranks_over_splits(runs) == {"a": 1.5, "b": 1.5, "c": 3}
    assert report.ranks_over_splits({name: found[:1] for name, found in runs.items()}) == {}


def test_pairs_without_a_diverged_run():
    one = made_up("a", [[[0.5, 0.7], None, [0.6, 0.8]]])
    other = made_up("b", [[[0.4, 0.5], [0.0, 0.1], None]])
    assert report.paired(one, other) == (pytest.approx(0.15), None, "", None)
    assert report.paired(one[1:], other[1:]) is None


def test_the_two_spreads():
    """Two splits of two seeds each: .5 and .7, .8 and .8."""
    mean, seeds, splits = report.spreads([0.5, 0.7, 0.8, 0.8], [0, 0, 1, 1])
    assert (mean, splits) == (pytest.approx(0.7), pytest.approx(0.2 / 2**0.5))
    assert seeds == pytest.approx((0.02 / 2) ** 0.5)  # of the variances .02 and 0
    assert report.spreads([0.5, 0.7], [4, 4])[2] is None
    assert report.spreads([0.5, 0.7], [4, 5])[1] is None


def test_a_curve_is_of_the_rounds_that_were_measured():
    """Rounds 2 and 4 of two runs: .2 and .4, .6 and .6."""
    rows = [[{"round": t, "personal": {"mean": z}} if z else {"round": t} for t, z in
             enumerate(values, 1)] for values in ((None, 0.2, None, 0.6), (None, 0.4, None, 0.6))]
    x, mean, std = report.curve([{"rounds": some} for some in rows], "personal", "mean")
    assert x.tolist() == [2, 4] and mean == pytest.approx([0.3, 0.6])
    assert std == pytest.approx([0.1 * 2**0.5, 0])
    assert len(report.curve([{"rounds": rows[0]}], "global", "top1")[0]) == 0


def test_a_network_of_another_size_is_said():
    runs = {name: made_up(name, [[[0.5]]]) for name in ("a", "b", "c")}
    assert report.sizes(runs) == []
    runs["b"][0]["parameters"] = 12345
    assert report.sizes(runs) == ["b has 12,345 parameters, most methods have 10."]


def test_the_paper_s_table():
    """Best and inconclusive in bold, one behind is not; LaTeX's commands are escaped."""
    methods = plan("local,my_net=fedavg,fedper,scaffold")
    args, shared = compare.arguments(["--methods", "x", "--split-seeds", "2"])
    level = np.array([0.6, 0.8, 0.7, 0.9])
    found = {"local": made_up("local", [[level - 0.2] * 3] * 2),
             "my_net": made_up("my_net", [[level, level + 0.01, level]] * 2),
             "fedper": made_up("fedper", [[level + 0.01, level, level]] * 2),
             "scaffold": made_up("scaffold", [[None] * 3] * 2)}
    some = found["local"][0]
    some.update(data={"name": "sha_pes"}, environment={"device": "cpu"}, split={
        "clients": 4, "sizes": [9] * 4, "classes": [2, 3, 3, 4], "fingerprint": "f"})
    some["args"].update(split="shards", per_client=4)
    rows = report.table(found, methods, args.against, shared)
    assert [row["method"] for row in rows[2:]] == ["local", "scaffold"]
    assert [row["bold"] for row in rows] == [True, True, False, False]
    text = report.latex(rows, some, args)
    assert r"my\_net & \textbf{0.753} $\pm$ 0.006 $\pm$ 0.000 & " in text
    assert r"local & 0.550 $\pm$" in text and "$+0.203$" in text
    assert r"sha\_pes, 4 clients" in text and r" & 2.0 & 2.0 & " in text  # MB and minutes
    assert "2/3/4 classes per client" in text and "scaffold (6 of 6 diverged)" in text
    page = report.page(rows, found, methods, args, shared)
    assert re.search(r"^\| local \| -0\.20.* behind \|  \|$", page, re.M)


# What is committed


def test_the_committed_table_is_made_of_its_records_by_the_page_s_command(tmp_path):
    """Settings, table and notes, to the last character. A record of other settings would be
    refused."""
    out = HERE / "results" / "compare"
    page = (HERE / "docs" / "compare.md").read_text().replace("\\\n", " ")
    command = re.search(r"python compare.py (.* --out) runs/compare$", page, re.M)[1]
    args, shared = compare.arguments([*command.split(), str(out)])
    methods = planning.plan(args.methods, args.set, shared)
    runs = [training.record(run) for run in compare.jobs(methods, args, shared)]
    assert len(set(map(training.prints_of, runs))) == args.split_seeds
    found = {method.name: runs[i :: len(methods)] for i, method in enumerate(methods)}
    rows = report.table(found, methods, args.against, shared)
    assert report.page(rows, found, methods, args, shared) == (out / "compare.md").read_text()
    assert report.latex(rows, runs[0], args) == (out / "compare.tex").read_text()
    report.write_csv(rows, found, tmp_path)
    for name in ("compare.csv", "runs.csv"):
        assert (tmp_path / name).read_text() == (out / name).read_text()


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="pdflatex is not installed")
def test_a_paper_of_two_columns_takes_the_committed_table(tmp_path):
    """LaTeX finds no error, and nothing is wider than the page. An empty box is the figure."""
    text = (HERE / "results" / "compare" / "compare.tex").read_text()
    packages = re.match("% needs (.*)", text)[1]
    text = re.sub(r"\\includegraphics.*", r"\\rule{1cm}{1cm}", text)
    (tmp_path / "paper.tex").write_text(
        rf"\documentclass[twocolumn]{{article}}{packages}\begin{{document}}{text}\end{{document}}")
    done = subprocess.run(["pdflatex", "-halt-on-error", "paper"], cwd=tmp_path, text=True,
                          capture_output=True)
    assert not done.returncode and "Overfull" not in done.stdout, done.stdout


# Processes


def test_it_starts_as_a_program(tmp_path):
    """From another folder. If nobody reads what is printed (`| head -1`), all is trained
    nevertheless."""
    np.savez(tmp_path / "toy.npz", **images())
    head = subprocess.Popen(
        [sys.executable, HERE / "compare.py", "--methods", OWN, "--dataset", "toy.npz", *SMALL,
         "--rounds", "1", "--seeds", "1", "--jobs", "2"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    head.stdout.close()
    assert b"Traceback" not in head.stderr.read() and head.wait() == 0
    assert (tmp_path / "runs/compare/lastlayer/0/result.json").exists()
    assert "| lastlayer | 0." in (tmp_path / "runs/compare/compare.md").read_text()


def until(what, seconds=60):
    for _ in range(100 * seconds):
        if what():
            return True
        time.sleep(0.01)
    return False


def test_a_child_is_the_file_run_with_its_flags(tmp_path):
    """Whatever it says last on stderr explains its end, but for a signal's."""
    (tmp_path / "helper.py").write_text("ANSWER = 42")
    file = written(tmp_path / "it.py", """import importlib.util, os, signal, sys
import helper
if __name__ == "__main__" and importlib.util.find_spec("common"):
    more = os.environ.get("MORE")
    print(f"x.py: error: {sys.argv[1:]} {helper.ANSWER} {more}", file=sys.stderr, flush=True)
    if "kill" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(7)
""")
    for argv, more, end in ((["-a", "b"], {}, (7, "['-a', 'b'] 42 None")),
                            ([], {"MORE": "1"}, (7, "[] 42 1")),
                            (["kill"], {}, (-9, "exit code -9"))):
        child = training.Child([file, *argv], **more)
        assert until(child.ended) and child.result() == end


def test_the_others_end_after_an_error_and_if_compare_is_killed(tmp_path, capsys, monkeypatch):
    """Two at a time: one sleeps, the other fails, and the third does not begin. A program whose
    parent dies has the end of its standard input."""
    text = MINE.replace("import baselines\n", "").replace("):\n", "):\n    import baselines\n")
    for name, then in (("sleeps", "time.sleep(120)"), ("fails", "sys.exit(5)"), ("third", "")):
        written(tmp_path / f"{name}.py", text + f"""
import pathlib, os, sys, time
if __name__ == "__main__":
    pathlib.Path({str(tmp_path / name)!r}).write_text(str(os.getpid()))
    while not pathlib.Path({str(tmp_path / "sleeps")!r}).exists():
        time.sleep(0.01)
    {then}
""")
    np.savez(tmp_path / "toy.npz", **images())
    files = ",".join(str(tmp_path / f"{name}.py") for name in ("sleeps", "fails", "third"))
    started, start = [], training.Child.__init__
    monkeypatch.setattr(training.Child, "__init__", lambda self, *given, **more: (
        started.append(self), start(self, *given, **more))[0])
    refused_late(capsys, "fails, seed 0: exit code 5", compare.main, [
        "--methods", files, "--dataset", str(tmp_path / "toy.npz"), *SMALL, "--jobs", "2",
        "--seeds", "1", "--out", str(tmp_path / "out")])
    assert len(started) == 2 and all(child.ended() for child in started)
    assert not (tmp_path / "third").exists()
    (tmp_path / "sleeps").unlink()
    child = training.Child([tmp_path / "sleeps.py"])
    assert until((tmp_path / "sleeps").exists) and not child.ended()
    child.process.stdin.close()  # as the system does
    assert until(child.ended) and child.process.wait() == -signal.SIGTERM
