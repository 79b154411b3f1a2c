"""compare.py: what it shares, skips, resumes, refuses and writes."""

import csv
import json
import pathlib
import re
import signal
import subprocess
import sys
from concurrent.futures import CancelledError

import numpy as np
import pytest

import common
import compare
import fedavg
from conftest import refused

HERE = pathlib.Path(fedavg.__file__).parent
OWN = str(HERE / "docs" / "lastlayer.py")
MINE = "import fedavg\ndef main(argv=None):\n    fedavg.main(argv)\n"


@pytest.fixture
def go(toy, tmp_path, monkeypatch):
    """Compares methods on the small data set. Runs are done in this process; go.trained has their folders, and "+" if resumed."""
    def train(argv, *_):
        file, *argv = argv
        out = next(word.removeprefix("--out=") for word in argv if word.startswith("--out="))
        go.trained.append(str(pathlib.Path(out).relative_to(go.out)) + "+" * ("--resume" in argv))
        try:
            common.load_file(file).main(argv)
        except SystemExit as stop:
            return stop.code, ""
        return 0, ""

    def go(methods, *more):
        go.trained = []
        compare.main(["--methods", methods, "--dataset", toy, "--model", "mnistnet", "--clients", "4", "--split", "iid", "--rounds", "2", "--device",
                      "cpu", "--eval-every", "1", "--out", str(tmp_path / "out"), *more])
        return {str(path.parent.relative_to(tmp_path / "out")): json.loads(path.read_text())
                for path in (tmp_path / "out").rglob("result.json")}

    monkeypatch.setattr(compare, "train", train)
    go.out = tmp_path / "out"
    return go


def test_a_method_may_have_a_path_and_a_tuple_among_its_flags(go, tmp_path):
    """Its record, which has them as JSON does, is its own: nothing is trained a second time."""
    mine = tmp_path / "mine.py"
    mine.write_text("import pathlib, baselines, common\n"
                    "def main(argv=None):\n"
                    "    parser = common.parser(__doc__)\n"
                    "    parser.add_argument('--weights', type=pathlib.Path, default=pathlib.Path('here'))\n"
                    "    parser.add_argument('--two', default=(1, 2))\n"
                    "    args = common.parse(parser, {}, argv)\n"
                    "    federation = common.Federation(args)\n"
                    "    baselines.local_training(federation, common.Run(__file__, federation), args)\n")
    go(str(mine), "--seeds", "1")
    assert go.trained == ["mine/0+"]
    go(str(mine), "--seeds", "1")
    assert not go.trained


def test_the_table_is_that_of_the_records(go, capsys):
    records = go(f"local,fedavg,{OWN},persfl", "--seeds", "2", "--set", "lastlayer.mix=0.25", "--set", "persfl.distill-epochs=1")
    assert sorted(records) == [f"{name}/{seed}" for name in ("fedavg", "lastlayer", "local", "persfl") for seed in range(2)]
    assert len({r["split"]["fingerprint"] for r in records.values()}) == 1
    assert {name: r["args"]["mix"] for name, r in records.items() if "mix" in r["args"]} == {"lastlayer/0": 0.25, "lastlayer/1": 0.25}
    rows = {row["method"]: row for row in csv.DictReader(open(go.out / "compare.csv"))}
    assert list(rows) == sorted(rows, key=lambda name: -float(rows[name]["personal_mean"]))
    for name, row in rows.items():
        finals = [records[f"{name}/{seed}"]["final"] for seed in range(2)]
        clients = np.array([final["personal"]["per_client"] for final in finals])  # [seeds, K]; the worst tenth of 4 is one
        wanted = {"personal": clients.mean(1), "worst_tenth": clients.min(1)}
        wanted["validation"] = [final["personal"]["val_mean"] for final in finals]
        if name != "local":
            wanted["global"] = [final["global"]["top1"] for final in finals]
        for title, values in wanted.items():
            assert float(row[f"{title}_mean"]) == pytest.approx(np.mean(values))
            assert float(row[f"{title}_std"]) == pytest.approx(abs(np.diff(values)[0]) / 2**0.5)
    assert rows["local"]["global_mean"] == "" and float(rows["local"]["MB_sent_mean"]) == 0
    d = records["fedavg/0"]["parameters"]
    assert float(rows["fedavg"]["MB_sent_mean"]) == pytest.approx(2 * 2 * 2 * 4 * d / 1e6)  # 2 rounds, 2 clients, up and down
    page, printed = (go.out / "compare.md").read_text(), capsys.readouterr().out
    for line in page.splitlines():
        assert not line.startswith("|") or line in printed
    assert "all clients take part in every round; distillation" in page and "`--set lastlayer.mix=0.25`" in page
    for name in ("curves", "clients"):
        assert (go.out / f"{name}.png").read_bytes()[:4] == b"\x89PNG" and "<svg" in (go.out / f"{name}.svg").read_text()


def test_all_share_what_is_shared(go):
    """But for what OWN says: the same arguments, and as many clients trained in all."""
    records = go("fedavg,persfl,fedslr", "--seeds", "1", "--lr", "0.03", "--momentum", "0.9")
    args = {name: r["args"] for name, r in records.items()}
    assert (args["fedslr/0"]["lr"], args["fedslr/0"]["momentum"]) == (0.075, 0)
    assert (args["persfl/0"]["fraction"], args["persfl/0"]["rounds"]) == (1, 1)
    apart = {"fedavg/0": {"out"}, "persfl/0": {"out", "lr", "momentum", "fraction", "rounds", "eval_every"}, "fedslr/0": {"out", "lr", "momentum"}}
    no_effect = {"alpha", "per_client"}  # on this split
    for name, keys in apart.items():
        both = set(args[name]) & set(args["fedavg/0"])
        assert len(both) > 25 and {key for key in both if args[name][key] != args["fedavg/0"][key]} <= keys | no_effect


def test_what_is_done_is_kept_and_what_was_interrupted_goes_on(go, tmp_path, capsys):
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    go(f"fedavg,{mine}", "--seeds", "1")
    assert go.trained == ["fedavg/0+", "mine/0+"]
    go(f"fedavg,{mine}", "--seeds", "2")
    assert go.trained == ["fedavg/1+", "mine/1+"]
    record = go.out / "fedavg" / "1" / "result.json"
    record.write_text(record.read_text().replace('"status": "finished"', '"status": "interrupted"'))
    go("fedavg", "--seeds", "2")
    assert go.trained == ["fedavg/1+"]
    refused(capsys, "has a record with --lr 0.02, now it is 0.1; use another NAME, or another --out", go, "fedavg", "--lr", "0.1")
    refused(capsys, "has a record with --rounds 2, now it is 3", go, "fedavg", "--rounds", "3")
    assert not go.trained


def test_a_run_of_another_version_is_trained_anew(go, tmp_path, capsys):
    own = tmp_path / "own.py"
    own.write_text(pathlib.Path(OWN).read_text())
    go(str(own), "--seeds", "1")
    own.write_text(pathlib.Path(OWN).read_text() + "\n# another version\n")
    common.load_file.cache_clear()
    go(str(own), "--seeds", "1")
    assert go.trained == ["own/0"] and "own.py changed" in capsys.readouterr().out
    assert (go.out / "own" / "0" / "result.previous.json").exists()


def test_other_splits_are_refused(go, tmp_path, capsys):
    """A method that moves an image from one client to another."""
    mine = tmp_path / "mine.py"
    mine.write_text(pathlib.Path(OWN).read_text().replace("    run = ", "    a, b = federation.whole_split.train[:2]\n    a[0], b[0] = b[0], a[0]\n    run = "))
    with pytest.raises(SystemExit):
        go(f"fedavg,{mine}", "--seeds", "1")
    assert "fedavg, seed 0 and mine, seed 0 do not have the same images or split" in capsys.readouterr().err
    assert not (go.out / "compare.md").exists()


@pytest.mark.parametrize("methods, more, words", [
    ("fedavg,fedfoo", [], "there is no method fedfoo"),
    ("fedavg,nosuch.py", [], "there is no file"),
    ("", [], "--methods is empty"),
    ("fedavg", ["--set", "mu=0.1"], "--set mu=0.1: say NAME.PARAMETER=VALUE"),
    ("fedavg", ["--set", "fedavg"], "--set fedavg: say NAME.PARAMETER=VALUE"),
    ("fedprox", ["--set", "fedprox.mu(=1"], "unrecognized arguments: --mu(=1"),
    ("fedavgm", ["--set", "fedavgm.target=0.8"], "stops at an accuracy (target=[0.8]), others don't"),
    ("fedavg,fedavg", [], "the name fedavg is taken; give fedavg another one: NAME=fedavg"),
    ("local=fedprox", [], "the name local is taken; give fedprox another one: NAME=fedprox"),
    ("../a=fedavg", [], "there is no method ../a=fedavg"),
    ("_a=fedavg", [], "there is no method _a=fedavg"),
    ("a=", [], "there is no method a="),
    ("a=superfed-mm", ["--set", "a.mix=layer"], "mix is what makes the method superfed-mm"),
    ("a=fedprox", ["--set", "fedprox.mu=1"], "--methods has no fedprox; its names are a"),
    ("a=fedprox", ["--set", "a.mu=1", "--set", "a.mu=.1"], "it is set twice"),
    ("fedavg", ["--alpha", "0.1"], "--split iid has no use for --alpha; leave it out, or take --split dirichlet-classes or "),
    ("a=fedprox", ["--set", "a.density=.5"], "fedprox has no density; it is for fedspa"),
    ("apfl", ["--set", "apfl.personal=1"], "apfl has no personal; it is for fedper, fedrep, lg-fedavg"),
    (str(HERE / "engine.py"), [], "has no main(argv)"),
    ("fedavg", ["--set", "fedprox.mu=1"], "--methods has no fedprox"),
    ("fedavg", ["--set", "fedavg.mu=1"], "--set fedavg.mu=1: unrecognized arguments: --mu=1"),
    ("fedprox", ["--set", "fedprox.mu=-1"], "--set fedprox.mu=-1: argument --mu: -1 must be at least 0"),
    ("fedprox", ["--set", "fedprox.rounds=5"], "all methods share rounds; use --rounds"),
    ("superfed-mm", ["--set", "superfed-mm.mix=layer"], "mix is what makes the method superfed-mm"),
    ("fedavg", ["--batch", "5"], "unrecognized arguments: --batch 5"),
    ("fedavg", ["--seed", "5"], "--seeds says how many"),
    ("fedavg", ["--seeds", "0"], "must be at least 1"),
    ("fedavg", ["--set", "fedavg.seed=5"], "--seed is this program's own"),
    ("fedavg,all", [], "the name fedavg is taken"),
    ("fedavg", ["--out", str(HERE / "docs")], "holds files of this repository"),
    ("fedavg", ["--out", str(HERE)], "holds files of this repository"),
    ("fedavg,persfl", ["--dataset", "mnist", "--split", "classes"], "makes 6000 of --limit None, which all methods share; to give it to all: --limit 6000"),
    ("fedavg,persfl", ["--client-val", "0"], "--methods: persfl: users choose their teachers on validation images"),
])
def test_bad_input(methods, more, words, go, capsys):
    refused(capsys, words, go, methods, *more)
    assert not go.trained and not go.out.exists()


def test_a_file_that_changes_what_is_shared_is_refused(go, tmp_path, capsys):
    mine = tmp_path / "mine.py"
    mine.write_text(MINE.replace("(argv)", '([*argv, "--epochs=2"])'))
    refused(capsys, "makes 2 of --epochs 1, which all methods share", go, str(mine))
    mine.write_text(MINE.replace("(argv)", '([*argv, "--target=0.5"])'))
    common.load_file.cache_clear()
    refused(capsys, "mine.py stops at an accuracy (target=[0.5])", go, str(mine))
    mine.with_name("fedavg.py").write_text("main = print")
    refused(capsys, "the name fedavg is taken", go, str(mine.with_name("fedavg.py")))
    mine.with_name("bare.py").write_text("def main(): pass")
    refused(capsys, "bare.py has no main(argv); see docs/extend.md", go, str(mine.with_name("bare.py")))
    mine.with_name("broken.py").write_text("def main(argv:")
    refused(capsys, "broken.py can't be loaded: SyntaxError", go, str(mine.with_name("broken.py")))
    mine.with_name("slip.py").write_text("def main(argv): parse(argv)")
    refused(capsys, "slip: its main fails: NameError: name 'parse' is not defined", go, str(mine.with_name("slip.py")))
    mine.with_name("idle.py").write_text("def main(argv): pass")
    refused(capsys, "idle: its main calls no common.Federation(args)", go, str(mine.with_name("idle.py")))


def test_a_file_may_import_Federation_by_its_name(tmp_path):
    """Nothing is trained when the file's arguments are asked for."""
    mine = tmp_path / "mine.py"
    text = pathlib.Path(OWN).read_text().replace("import common\n", "import common\nfrom common import Federation\n")
    mine.write_text(text.replace("common.Federation(args)", "Federation(args=args)"))
    assert [method.name for method in compare.plan(*compare.arguments(["--methods", f"{mine},fedper"]))] == ["mine", "fedper"]


def test_all_and_files_of_ones_own():
    methods = compare.plan(*compare.arguments(["--methods", f"all,{OWN}"]))
    assert [method.name for method in methods] == [*compare.METHODS, "lastlayer"]


def test_every_method_takes_the_shared_settings():
    for method in compare.plan(*compare.arguments(["--methods", "all", "--dataset", "cifar10"])):
        assert not method.args.get("target"), "a run must not end at an accuracy"
    methods = compare.plan(*compare.arguments(["--methods", "all"]))
    assert [method.name for method in methods] == list(compare.METHODS) and len(methods) == 23
    for name in ("fedavg", "superfed-lm", "ditto", "psinet"):
        args = next(method.args for method in methods if method.name == name)
        assert {key: args[key] for key in compare.SHARED} == compare.SHARED and args["lr_decay"] == 0.95
    assert compare.plan(*compare.arguments(["--methods", "fedper", "--dataset", "cifar10"]))[0].args["lr_decay"] == 1


def test_a_parameter_without_a_default_is_given_by_set(tmp_path, capsys):
    """psinet.py does not know where to cut a model from elsewhere."""
    (tmp_path / "net.py").write_text('def mine(m, x, classes):\n    return m.linear("fc", m.conv("conv1", x, 8, 3).flatten(1), classes)\n')
    argv = ["--methods", "psinet", "--model", f"{tmp_path}/net.py:mine"]
    refused(capsys, "net.py:mine has no default depth; give --depth LAYER", lambda argv: compare.plan(*compare.arguments(argv)), argv)
    assert compare.plan(*compare.arguments([*argv, "--set", "psinet.depth=fc"]))[0].args["depth"] == "fc"


@pytest.mark.parametrize("folder", ["compare", "compare-cifar10"])
def test_committed_tables_are_made_of_their_records_by_the_page_s_command(folder, tmp_path):
    """Settings, table and notes, to the last character. A record of other settings would be refused."""
    out, page = HERE / "results" / folder, (HERE / "docs" / "compare.md").read_text().replace("\\\n", " ")
    command = re.search(rf"python compare.py (.* --out) runs/{folder}$", page, re.M)[1]
    args, shared = compare.arguments([*command.split(), f"results/{folder}"])
    methods = compare.plan(args, shared)
    records = {method.name: [compare.record(method, out / method.name / str(seed)) for seed in range(args.seeds)] for method in methods}
    assert len({(r["data"]["fingerprint"], r["split"]["fingerprint"]) for runs in records.values() for r in runs}) == 1
    compare.write_table(compare.table(records), records, methods, shared, args, tmp_path)
    for name in ("compare.md", "compare.csv"):
        assert (tmp_path / name).read_text() == (out / name).read_text()
    assert "\n".join(compare.lines(compare.table(records))) in page


def test_a_split_that_finds_its_own_clients():
    methods = compare.plan(*compare.arguments(["--methods", "fedavg,persfl", "--dataset", "mine.npz", "--split", "natural"]))
    assert not any(word.startswith("--clients") for method in methods for word in method.argv)


def test_processes_of_their_own(toy, tmp_path):
    """Two at a time, from another folder; --help trains nothing, and fits a screen."""
    argv = [sys.executable, HERE / "compare.py", "--methods", f"fedavg,{OWN}", "--dataset", toy, "--model", "mnistnet", "--clients", "4", "--split", "iid",
            "--rounds", "1", "--seeds", "1", "--jobs", "2", "--device", "cpu"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(path.parent.parent.name for path in (tmp_path / "runs/compare").rglob("result.json")) == ["fedavg", "lastlayer"]
    assert "| lastlayer | 0." in done.stdout
    done = subprocess.run([*argv[:2], "--help"], cwd=tmp_path / "runs", capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("\n") <= 40 and [path.name for path in (tmp_path / "runs").iterdir()] == ["compare"]


def test_changed_images_are_refused(go, toy, capsys):
    """The data set's file is another one than the finished records'."""
    go("fedavg", "--seeds", "1")
    arrays = dict(np.load(toy))
    np.savez(toy, **arrays | {"y_train": arrays["y_train"][::-1]})
    refused(capsys, "has a record of other images than", go, "fedavg", "--seeds", "1")
    assert not go.trained


def test_a_changed_split_is_refused(go, tmp_path, capsys):
    """Of a function that reads who owns which image from a file."""
    (tmp_path / "s.py").write_text(f"import numpy as np\ndef mine(*_): return list(np.load({str(tmp_path / 'owned.npy')!r}))\n")
    np.save(tmp_path / "owned.npy", np.arange(40).reshape(4, 10))
    go("fedavg", "--seeds", "1", "--split", f"{tmp_path}/s.py:mine")
    np.save(tmp_path / "owned.npy", np.arange(40).reshape(10, 4).T)
    refused(capsys, "has a record of another split than", go, "fedavg", "--seeds", "1", "--split", f"{tmp_path}/s.py:mine")
    assert not go.trained


def test_the_page_has_the_settings_that_were_used(go):
    """FedAvgM's own ones, of which --set changed one."""
    go("fedavgm", "--seeds", "1", "--set", "fedavgm.beta=0.5")
    assert "`--momentum=0 --lr=0.05 --beta=0.5`" in (go.out / "compare.md").read_text()


def test_a_file_that_trains_nothing_is_refused(go, tmp_path, monkeypatch, capsys):
    """Its last two lines are missing: the program ends at once, without a record."""
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    monkeypatch.setattr(compare, "train", lambda *_: (0, ""))
    refused(capsys, "has trained nothing; does it end with", go, str(mine), "--seeds", "1")


def test_a_method_that_leaves_its_loop_is_refused(go, tmp_path, capsys):
    mine = tmp_path / "mine.py"
    text = pathlib.Path(OWN).read_text()
    mine.write_text(text.replace("\n\n\nif __name__", "\n            if t == 1:\n                break\n\n\nif __name__"))
    assert mine.read_text() != text
    with pytest.raises(SystemExit) as stop:
        go(str(mine), "--seeds", "1")
    assert stop.value.code == 2 and "mine.py has left the loop over run.rounds before its end" in capsys.readouterr().err
    assert json.loads((go.out / "mine" / "0" / "result.json").read_text())["status"] == "unfinished"


def test_a_killed_run_is_not_explained_by_a_warning():
    child = "import os, signal, sys; print('a harmless warning', file=sys.stderr, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    assert compare.train(["-c", child], False, compare.Children()) == (-9, "exit code -9")


def test_a_method_without_personal_measures_has_empty_cells(go, tmp_path):
    mine = tmp_path / "mine.py"
    text = pathlib.Path(fedavg.__file__).read_text()
    mine.write_text(text.replace(", federation.evaluate_clients(state.w)", ""))
    assert mine.read_text() != text
    go(f"fedavg,{mine}", "--seeds", "1")
    row = next(line for line in (go.out / "compare.md").read_text().splitlines() if line.startswith("| mine |"))
    assert [not cell.strip() for cell in row.split("|")[2:5]] == [False, True, True]


def test_one_method_with_several_settings(go, tmp_path, capsys):
    bare = tmp_path / "bare.py"  # without the parameter
    bare.write_text(re.sub("    parser.add_argument.*", "", pathlib.Path(OWN).read_text()).replace("args.mix", "0.5"))
    records = go(f"fedprox, strong=fedprox,own={OWN}", "--seeds", "1", "--set", "strong.mu=1", "--set", "own.mix=0.25")
    assert {name: r["args"].get("mu") for name, r in records.items()} == {"fedprox/0": 0.01, "strong/0": 1, "own/0": None}
    page = (go.out / "compare.md").read_text()
    assert "- strong is fedprox." in page and f"- own is {OWN}." in page and "- fedprox is" not in page
    refused(capsys, "has a record with --mix None, now it is 0.5; use another NAME", go, f"strong={OWN}", "--seeds", "1")
    go(f"own={bare}", "--seeds", "1")
    assert go.trained == ["own/0"]  # anew, as of another version
    records = go("slow=scaffold", "--seeds", "1", "--lr", "0.1", "--momentum", "0.9")
    assert records["slow/0"]["args"]["lr"] == 0.25  # what it has of its own, as under its own name


def test_ways_to_misspell_an_own_parameter(go, capsys):
    refused(capsys, "a method's own parameter is --set NAME.PARAMETER=VALUE", go, "fedprox", "--mu", "1")
    refused(capsys, "baselines.py --help", go, "fedprox", "--set", "fedprox.moo=1")
    go("fedprox-ft", "--seeds", "1", "--set", "fedprox-ft.finetune_epochs=2")
    assert json.loads((go.out / "fedprox-ft/0/result.json").read_text())["args"]["finetune_epochs"] == 2


def test_after_an_error_nothing_is_trained_on(tmp_path):
    """The run that is being trained ends, and the next one is not begun."""
    children = compare.Children()
    child = children.start([sys.executable, "-c", "import time; time.sleep(60)"])
    children.stop()
    assert child.wait(30) == -signal.SIGTERM
    with pytest.raises(CancelledError):
        children.start([sys.executable, "-c", f"open({str(tmp_path / 'begun')!r}, 'w')"])
    assert not (tmp_path / "begun").exists()
