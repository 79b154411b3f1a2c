"""compare.py: what it shares, skips, resumes, refuses and writes."""

import csv
import hashlib
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
from comparing import planning, report, training, tuning
from conftest import refused
from fl import records

HERE = planning.HERE
OWN = str(HERE / "docs" / "lastlayer.py")
SMALL = ["--model", "mnistnet", "--clients", "4", "--split", "iid", "--device", "cpu"]
MINE = """import baselines
def arguments(argv):
    return baselines.arguments(['--method=local', *argv])
def main(argv=None):
    baselines.main(['--method=local', *argv])
"""


@pytest.fixture
def go(toy, tmp_path, monkeypatch):
    """Compares methods on the small data set and returns the records. Runs are done in this
    process; go.trained has their folders, with "+" if resumed; go.code is the exit code. Nothing is
    drawn, but by go.draw."""
    class Here:
        def __init__(self, argv, one_thread):
            file, *argv = argv
            out = next(word.removeprefix("--out=") for word in argv if word.startswith("--out="))
            out = str(pathlib.Path(out).relative_to(go.out))
            go.trained.append(out + "+" if "--resume" in argv else out)
            go.before(file)
            try:
                common.load_file(file).main(argv)
                self.code = 0
            except SystemExit as stop:
                self.code = stop.code

        def ended(self):
            return True

        def result(self):
            return self.code, "what it said"

    def go(methods, *more):
        go.trained = []
        go.code = compare.main(["--methods", methods, "--dataset", toy, *SMALL, "--rounds", "2",
                                "--eval-every", "1", "--out", str(go.out), *more])
        return {str(path.parent.relative_to(go.out)): records.read(path)
                for path in go.out.rglob("result.json")}

    monkeypatch.setattr(training, "Child", Here)
    go.out, go.draw, go.before = tmp_path / "out", report.draw, lambda file: None
    monkeypatch.setattr(report, "draw", lambda *_: None)  # it takes longer than all else
    return go


def plan(*argv):
    return planning.plan(*compare.arguments(["--methods", *argv]))


def written(path, text):
    """Writes a method's file, which may have been loaded with another text."""
    path.write_text(text)
    return str(path)


def altered(path, old, new):
    """docs/lastlayer.py with another text."""
    text = pathlib.Path(OWN).read_text()
    assert old in text
    return written(path, text.replace(old, new))


def test_a_method_may_have_a_path_and_a_tuple_among_its_flags(go, tmp_path):
    """Its record, which has them as JSON does, is its own: nothing is trained a second time."""
    mine = written(tmp_path / "mine.py", """import pathlib, baselines, common
def arguments(argv):
    parser = common.parser(__doc__)
    parser.add_argument('--weights', type=pathlib.Path, default=pathlib.Path('here'))
    parser.add_argument('--two', default=(1, 2))
    return common.parse(parser, {}, argv)
def main(argv=None):
    args = arguments(argv)
    federation = common.Federation(args)
    baselines.local(federation, common.Run(__file__, federation), args)
""")
    go(mine, "--seeds", "1")
    assert go.trained == ["mine/0+"]
    go(mine, "--seeds", "1")
    assert not go.trained


def test_the_table_is_that_of_the_records(go, capsys, monkeypatch):
    monkeypatch.setattr(report, "draw", go.draw)
    found = go(f"local,fedavg,{OWN},persfl", "--seeds", "2", "--set", "lastlayer.mix=0.25",
               "--set", "persfl.distill-epochs=1")
    names = "fedavg", "lastlayer", "local", "persfl"
    assert sorted(found) == [f"{name}/{seed}" for name in names for seed in range(2)]
    assert len({r["split"]["fingerprint"] for r in found.values()}) == 1 and go.code == 0
    mix = {name: r["args"]["mix"] for name, r in found.items() if "mix" in r["args"]}
    assert mix == {"lastlayer/0": 0.25, "lastlayer/1": 0.25}
    rows = {row["method"]: row for row in csv.DictReader(open(go.out / "compare.csv"))}
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
    sent = 2 * 2 * 2 * 4 * found["fedavg/0"]["parameters"]  # 2 rounds, 2 clients, up and down
    assert float(rows["fedavg"]["MB_sent_mean"]) == pytest.approx(sent / 1e6)
    page, printed = (go.out / "compare.md").read_text(), capsys.readouterr().out
    for line in page.splitlines():
        assert not line.startswith("|") or line in printed
    assert "all clients take part in every round; after the last one" in page
    assert "| `--mix=0.25` |" in page
    for name in ("curves", "clients"):
        assert (go.out / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert "<svg" in (go.out / f"{name}.svg").read_text()
        assert (go.out / f"{name}.pdf").read_bytes()[:5] == b"%PDF-"
    runs = list(csv.DictReader(open(go.out / "runs.csv")))
    assert len(runs) == 8
    for row in runs:
        final = found[f"{row['method']}/{row['seed']}"]["final"]
        assert float(row["personal"]) == final["personal"]["mean"]
    gain = (np.mean([found[f"fedavg/{s}"]["final"]["personal"]["mean"] for s in range(2)])
            - np.mean([found[f"local/{s}"]["final"]["personal"]["mean"] for s in range(2)]))
    assert float(rows["fedavg"]["gain_over_local"]) == pytest.approx(gain)


def test_all_share_what_is_shared(go):
    """But for what OWN says: the same arguments, and as many clients trained in all."""
    found = go("fedavg,persfl,fedslr", "--seeds", "1", "--lr", "0.03", "--momentum", "0.9")
    args = {name: r["args"] for name, r in found.items()}
    assert (args["fedslr/0"]["lr"], args["fedslr/0"]["momentum"]) == (0.075, 0)
    assert (args["persfl/0"]["fraction"], args["persfl/0"]["rounds"]) == (1, 1)
    apart = {"fedavg/0": {"out"}, "fedslr/0": {"out", "lr", "momentum"}, "persfl/0": {
        "out", "lr", "momentum", "fraction", "rounds", "eval_every"}}
    no_effect = {"alpha", "per_client", "mu"}  # on this split; each has a mu of another meaning
    for name, keys in apart.items():
        both = set(args[name]) & set(args["fedavg/0"])
        differ = {key for key in both if args[name][key] != args["fedavg/0"][key]}
        assert len(both) > 25 and differ <= keys | no_effect


def test_what_is_done_is_kept_and_what_was_interrupted_goes_on(go, tmp_path, capsys):
    mine = written(tmp_path / "mine.py", MINE)
    go(f"fedavg,{mine}", "--seeds", "1")
    assert go.trained == ["fedavg/0+", "mine/0+"]
    go(f"fedavg,{mine}", "--seeds", "2")
    assert go.trained == ["fedavg/1+", "mine/1+"]
    record = go.out / "fedavg" / "1" / "result.json"
    finished = record.read_text()
    record.write_text(finished.replace('"status": "finished"', '"status": "unfinished"'))
    go("fedavg", "--seeds", "2")
    assert go.trained == ["fedavg/1+"]
    words = "has a record with --lr 0.02, now it is 0.1; use another NAME, or another --out"
    refused(capsys, words, go, "fedavg", "--lr", "0.1")
    words = "has a record with --rounds 2, now it is 1; use another NAME, or another --out"
    refused(capsys, words, go, "fedavg", "--rounds", "1")
    assert not go.trained


def test_a_finished_run_goes_on_to_more_rounds(go, capsys):
    """It is then the run that had as many from its beginning. A method whose rounds are fixed, and
    another --eval-every, refuse in one line."""
    long = go("local,scaffold", "--seeds", "1", "--rounds", "4")
    go.out = go.out.with_name("short")
    go("local,scaffold", "--seeds", "1", "--rounds", "2")
    found = go("local,scaffold", "--seeds", "1", "--rounds", "4")
    assert go.trained == ["local/0+", "scaffold/0+"]
    for name, record in found.items():
        assert len(record["rounds"]) == 4 and record["final"] == long[name]["final"]
        assert [row["personal"]["mean"] for row in record["rounds"]] == [
            row["personal"]["mean"] for row in long[name]["rounds"]]
    go("local,scaffold", "--seeds", "1", "--rounds", "4")
    assert not go.trained
    words = "has a record with --eval-every 1, now it is 2"
    refused(capsys, words, go, "local", "--seeds", "1", "--rounds", "8", "--eval-every", "2")
    go("fedavg-ft", "--seeds", "1", "--rounds", "2")
    with pytest.raises(SystemExit):
        go("fedavg-ft", "--seeds", "1", "--rounds", "4")
    assert "clients fine-tune after the last round" in capsys.readouterr().err


def test_an_unfinished_run_of_another_version_of_a_source_file_is_trained_anew(go, capsys):
    """A finished one counts."""
    go("fedavg", "--seeds", "1")
    path = go.out / "fedavg" / "0" / "result.json"
    record = json.loads(path.read_text())
    record["environment"]["sources"]["common.py"] = "0" * 64
    path.write_text(json.dumps(record))
    go("fedavg", "--seeds", "1")
    assert not go.trained
    path.write_text(json.dumps(record | {"status": "unfinished"}))
    go("fedavg", "--seeds", "1")
    assert go.trained == ["fedavg/0"] and "common.py changed" in capsys.readouterr().out
    assert (go.out / "fedavg" / "0" / "result.previous.json").exists()


def test_a_run_of_another_version_of_an_imported_file_is_trained_anew(go, tmp_path, capsys):
    """One that changes while others train ends the comparison."""
    helper = tmp_path / "a_helper.py"
    mine = altered(tmp_path / "own.py", "import common\n", "import a_helper\nimport common\n")
    helper.write_text("SCALE = 1.0\n")
    go(mine, "--seeds", "1")
    go(mine, "--seeds", "1")
    assert not go.trained
    helper.write_text("SCALE = -1.0\n")
    found = go(mine, "--seeds", "1")
    assert go.trained == ["own/0"]
    assert "a_helper.py changed; trained anew" in capsys.readouterr().out
    digest = hashlib.sha256(helper.read_bytes()).hexdigest()
    assert found["own/0"]["environment"]["sources"]["a_helper.py"] == digest

    # a file of the same name that is not imported
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a_helper.py").write_text("SCALE = 5.0\n")
    init = tmp_path / "b" / "net.py"
    init.write_text("from fl.models import MODELS\nNet = MODELS['mnistnet']\n")
    argv = ["--set", "own.lr=0.01", "--model", f"{init}:Net", "--out", str(tmp_path / "b" / "out")]
    go.out = tmp_path / "b" / "out"
    go(mine, "--seeds", "1", *argv)
    go(mine, "--seeds", "1", *argv)
    assert not go.trained
    go.out = tmp_path / "out"

    go.before = lambda file: helper.write_text(f"SCALE = {len(go.trained)}.0\n")
    with pytest.raises(SystemExit):
        go(mine, "--seeds", "3")
    assert "a_helper.py changed meanwhile; repeat the command" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["method", "model", "split"])
def test_a_run_of_another_version_of_a_users_file_is_trained_anew(go, tmp_path, capsys, what):
    own = {"method": "", "model": "import torch\nclass Net(torch.nn.Sequential):\n"
           "    def __init__(self, classes):\n"
           "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(4, classes))\n",
           "split": "import numpy as np\ndef Net(*_): return list(np.arange(40).reshape(4, 10))\n"}
    text = own[what] or pathlib.Path(OWN).read_text()
    path = written(tmp_path / "own.py", text)
    argv = [path] if what == "method" else ["fedavg", f"--{what}", f"{path}:Net"]
    go(*argv, "--seeds", "1")
    written(tmp_path / "own.py", text + "\n# another version\n")
    go(*argv, "--seeds", "1")
    assert [name.rpartition("/")[2] for name in go.trained] == ["0"]
    assert "own.py changed" in capsys.readouterr().out
    go(*argv, "--seeds", "1")
    assert not go.trained


def test_a_split_that_differs_from_run_to_run_is_refused(go, tmp_path, capsys):
    (tmp_path / "s.py").write_text("""import numpy as np
def mine(*_): return list(np.random.default_rng().permutation(40).reshape(4, 10))
""")
    with pytest.raises(SystemExit):
        go("fedavg,local", "--seeds", "1", "--split", f"{tmp_path}/s.py:mine")
    words = "has not had the images and the split that all share, so it can't be compared"
    assert words in capsys.readouterr().err and not (go.out / "compare.md").exists()


@pytest.mark.parametrize("own, code", [("", 2), ("OWN_MODEL = True\n", 0)])
def test_methods_with_other_numbers_of_parameters(go, tmp_path, capsys, own, code):
    """They are refused unless their file says that they have a model of their own."""
    mine = written(tmp_path / "mine.py", own + """import baselines, common
def arguments(argv):
    return baselines.arguments(['--method=local', *argv])
def main(argv=None):
    args = arguments(argv)
    args.model = 'linear'
    federation = common.Federation(args)
    args.model = 'mnistnet'
    baselines.local(federation, common.Run(__file__, federation), args)
""")
    if code:
        with pytest.raises(SystemExit) as stop:
            go(f"local,{mine}", "--seeds", "1")
        assert stop.value.code == code
        words = "mine, seed 0, has 15: only a method whose file says OWN_MODEL = True may"
        assert words in capsys.readouterr().err
    else:
        go(f"local,{mine}", "--seeds", "1")
        assert (go.out / "compare.md").exists()


@pytest.mark.parametrize("methods, more, words", [
    ("fedavg,fedfoo", "", "there is no method fedfoo"),
    ("fedavg,nosuch.py", "", "there is no file"),
    ("", "", "--methods is empty"),
    ("fedavg", "--set mu=0.1", "--set mu=0.1: say NAME.PARAMETER=VALUE"),
    ("fedavg", "--set fedavg", "--set fedavg: say NAME.PARAMETER=VALUE"),
    ("fedprox", "--set fedprox.mu(=1", "unrecognized arguments: --mu(=1"),
    ("fedavgm", "--set fedavgm.target=0.8", "stops at an accuracy (target=[0.8]), others don't"),
    ("fedavg,fedavg", "", "the name fedavg is taken; give fedavg another one: NAME=fedavg"),
    ("local=fedprox", "", "the name local is taken; give fedprox another one: NAME=fedprox"),
    ("../a=fedavg", "", "there is no method ../a=fedavg"),
    ("_a=fedavg", "", "there is no method _a=fedavg"),
    ("a=", "", "there is no method a="),
    ("a=superfed-mm", "--set a.mix=layer", "--mix is no parameter of superfed-mm alone"),
    ("a=fedprox", "--set fedprox.mu=1", "--methods has no fedprox; its names are a"),
    ("a=fedprox", "--set a.mu=1 --set a.mu=.1", "it is set twice"),
    ("fedavg", "--alpha 0.1", "--split iid has no use for --alpha"),
    ("a=fedprox", "--set a.density=.5", "fedprox has no density; it is for fedspa"),
    ("apfl", "--set apfl.personal=1", "apfl has no personal; it is for fedper, fedrep, lg-fedavg"),
    ("fedavg", "--set fedprox.mu=1", "--methods has no fedprox"),
    ("fedavg", "--set fedavg.mu=1", "--set fedavg.mu=1: fedavg has no mu; it is for fedprox"),
    ("fedprox", "--set fedprox.mu=-1", "fedprox.mu=-1: argument --mu: -1 must be at least 0"),
    ("fedprox", "--set fedprox.rounds=5", "--rounds is no parameter of fedprox alone"),
    ("fedavg", "--batch 5", "unrecognized arguments: --batch 5"),
    ("fedavg", "--seed 5", "--seeds says how many"),
    ("fedavg", "--seeds 0", "must be at least 1"),
    ("fedavg", "--set fedavg.seed=5", "--seed is no parameter of fedavg alone: all methods"),
    ("fedavg,all", "", "the name fedavg is taken"),
    ("fedavg", f"--out {HERE / 'docs'}", "holds files of this repository"),
    ("fedavg", f"--out {HERE}", "holds files of this repository"),
    ("fedavg,persfl", "--dataset mnist --split classes",
     "makes 6000 of --limit None, which all methods share; to give it to all: --limit 6000"),
    ("fedavg,persfl", "--client-val 0",
     "--methods: persfl: users choose their teachers on validation images"),
    ("fedprox", "--mu 1", "a method's own parameter is --set NAME.PARAMETER=VALUE"),
    ("fedprox", "--set fedprox.moo=1", "baselines.py --help"),
    ("fedavg,local", "--against fedprox", "--against: --methods has no fedprox; its names are "
     "fedavg, local"),
    ("fedavg,local", "--seeds 1 --against local", "one run of each method gives no interval"),
    ("fedprox", "--tune fedprox.moo=1,2", "--methods: fedprox, --tune fedprox.moo=1: unrecogni"),
    ("fedprox,fedavg", "--tune mu=1,2", "--methods: fedavg, --tune fedavg.mu=1: fedavg has no mu"),
    ("fedprox", "--tune fedavg.lr=1,2", "the names are fedprox"),
    ("fedprox", "--tune lr", "--tune lr: say PARAMETER=A,B,... or NAME.PARAMETER=A,B,..."),
    ("fedprox", "--tune fedprox.mu=1,x", "--tune fedprox.mu=x: argument --mu"),
    ("fedprox", "--tune fedprox.mu=1 --set fedprox.mu=2", "it is set twice"),
    ("fedprox", "--tune lr=.1,.2 --client-val 0", "--client-val must be above 0"),
])
def test_bad_input(methods, more, words, go, capsys):
    refused(capsys, words, go, methods, *more.split())
    assert not go.trained and not go.out.exists()


NEEDS = "must have arguments(argv) and main(argv); see docs/extend.md"


@pytest.mark.parametrize("text, words", [
    (MINE.replace("*argv])\ndef", '*argv, "--epochs=2"])\ndef'),
     "makes 2 of --epochs 1, which all methods share; to give it to all: --epochs 2"),
    (MINE.replace("return baselines.arguments(['--method=local', *argv])",
                  "args = baselines.arguments(['--method=local', *argv])\n"
                  "    args.target = [0.5]\n    return args"),
     "mine.py stops at an accuracy (target=[0.5])"),
    ("main = arguments = print", NEEDS),
    ("def main(argv): pass", NEEDS),
    ("def arguments(argv): pass", NEEDS),
    ("def arguments(): pass\ndef main(argv): pass", NEEDS),
    ("def arguments(argv): pass\ndef main(): pass", NEEDS),
    ("def main(argv:", "mine.py can't be loaded: SyntaxError"),
    ("def arguments(argv): parse(argv)\ndef main(argv): pass",
     "mine: its arguments(argv) fails: NameError: name 'parse' is not defined"),
    ("def arguments(argv): pass\ndef main(argv): pass",
     "mine: its arguments(argv) does not return what common.parse returns; see docs/extend.md"),
])
def test_a_file_that_is_no_method_or_changes_what_is_shared_is_refused(
        go, tmp_path, capsys, text, words):
    refused(capsys, words, go, written(tmp_path / "mine.py", text))


def test_the_name_of_a_method_of_this_repository_is_taken(go, tmp_path, capsys):
    path = written(tmp_path / "fedavg.py", MINE)
    refused(capsys, "the name fedavg is taken", go, path)


def test_all_and_files_of_ones_own():
    methods = plan(f"all,{OWN}")
    assert [method.name for method in methods] == [*planning.METHODS, "lastlayer"]


def test_every_method_takes_the_shared_settings():
    for method in plan("all", "--dataset", "cifar10"):
        assert not method.args.get("target"), "a run must not end at an accuracy"
        assert method.name == "psinet" or method.args["lr_decay"] == 1
    methods = {method.name: method.args for method in plan("all")}
    assert list(methods) == list(planning.METHODS) and len(methods) == 23
    for name in ("fedavg", "superfed-lm", "ditto", "psinet"):
        assert planning.SHARED.items() <= methods[name].items()
        assert methods[name]["lr_decay"] == 0.95


def test_a_parameter_without_a_default_is_given_by_set(tmp_path, capsys):
    """psinet.py does not know where to cut a model from elsewhere."""
    (tmp_path / "net.py").write_text("from fl.models import CNN")
    argv = ["psinet", "--model", f"{tmp_path}/net.py:CNN"]
    refused(capsys, "net.py:CNN has no default depth", plan, *argv)
    assert plan(*argv, "--set", "psinet.depth=fc")[0].args["depth"] == "fc"


@pytest.mark.parametrize("folder", ["compare", "compare-cifar10"])
def test_committed_tables_are_made_of_their_records_by_the_page_s_command(folder, tmp_path):
    """Settings, table and notes, to the last character. A record of other settings would be
    refused."""
    out = HERE / "results" / folder
    page = (HERE / "docs" / "compare.md").read_text().replace("\\\n", " ")
    command = re.search(rf"python compare.py (.* --out) runs/{folder}$", page, re.M)[1]
    args, shared = compare.arguments([*command.split(), f"results/{folder}"])
    methods = planning.plan(args, shared)
    found = {}
    for method in methods:
        jobs = [training.job(method, seed, split, args, shared)
                for split in range(args.split_seeds) for seed in range(args.seeds)]
        found[method.name] = [training.record(run._replace(folder=HERE / run.folder))
                              for run in jobs]
    prints = {training.prints_of(r) for runs in found.values() for r in runs}
    assert len(prints) == args.split_seeds
    rows = report.table(found, methods, args, shared)
    report.write_table(rows, found, methods, shared, args, tmp_path)
    for name in ("compare.md", "compare.tex", "compare.csv", "runs.csv"):
        assert (tmp_path / name).read_text() == (out / name).read_text()
    if folder == "compare-cifar10":
        assert "\n".join(report.lines(*report.paired_table(rows))) in page


def made_up(name, clients, rounds=2, val=0.5):
    """Records of a method: clients[split][seed] has the personal accuracies."""
    return [{"diverged": accuracies is None, "seconds_per_round": 1.0, "bytes_up": 1e6,
             "bytes_down": 1e6, "args": {"seed": seed, "split_seed": split, "rounds": rounds},
             "rounds": [{"seconds": 60, "evaluation_seconds": 30}, {"seconds": 30}],
             "final": {} if accuracies is None else {"personal": {
                 "mean": np.mean(accuracies), "worst_decile": min(accuracies), "val_mean": val,
                 "per_client": list(accuracies)}}}
            for split, seeds in enumerate(clients) for seed, accuracies in enumerate(seeds)]


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="pdflatex is not installed")
@pytest.mark.parametrize("folder", ["compare", "compare-cifar10"])
def test_a_paper_of_two_columns_takes_the_committed_table(folder, tmp_path):
    """LaTeX finds no error, and nothing is wider than the page."""
    for name in ("compare.tex", "curves.pdf"):
        shutil.copy(HERE / "results" / folder / name, tmp_path)
    packages = re.match("% needs (.*)", (tmp_path / "compare.tex").read_text())[1]
    (tmp_path / "paper.tex").write_text(
        rf"\documentclass[twocolumn]{{article}}{packages}\begin{{document}}\input{{compare}}"
        r"\end{document}")
    done = subprocess.run(["pdflatex", "-halt-on-error", "paper"], cwd=tmp_path, text=True,
                          capture_output=True)
    assert not done.returncode and "Overfull" not in done.stdout, done.stdout



def test_paired_differences_with_a_known_answer():
    """Clients differ far more than methods: only the pairs tell the methods apart. The standard
    error of a mean of independent differences is known; 1.96 of them are half an interval."""
    rng = np.random.default_rng(3)
    base = rng.uniform(0.3, 0.9, (2, 3, 400))  # [splits, seeds, K]
    noise = rng.normal(0, 0.1, base.shape)
    noise = (noise - noise.mean(2, keepdims=True)) * 0.1 / noise.std(2, keepdims=True)
    one, other = made_up("a", base + 0.02 + noise), made_up("b", base)
    mean, (low, high), word = report.paired(one, other)
    error = 0.1 / (6 * 400) ** 0.5
    assert mean == pytest.approx(0.02) and word == "ahead"
    assert (low + high) / 2 == pytest.approx(0.02, abs=2e-4)
    # a run that is drawn twice counts its clients twice: the sum of squared weights is 11/36, not
    # 6/36; two seeds of a split share the clients that are drawn, but their noise is independent
    assert high - low == pytest.approx(2 * 1.96 * error * (11 / 6) ** 0.5, rel=0.06)
    assert report.paired(other, one)[2] == "behind"
    assert report.paired(one, other) == report.paired(one, other)  # a fixed generator
    assert report.paired(one, one) == (0, (0, 0), "not decided")
    assert report.paired(one[:1], other[:1]) == (pytest.approx(0.02), None, "")


def test_the_interval_covers_what_clients_share_over_seeds_and_runs_over_clients():
    """Seeds with equal differences do not narrow it; nor do clients where whole runs differ."""
    clients, none = np.linspace(-0.1, 0.1, 101), np.zeros(101)
    alike = report.paired(made_up("a", [[clients] * 4]), made_up("b", [[none] * 4]))
    half = 1.96 * clients.std() / 101 ** 0.5
    assert alike[1] == (pytest.approx(-half, rel=0.05), pytest.approx(half, rel=0.05))
    shifted = [[none + shift for shift in (-0.1, 0.0, 0.1, 0.2)]]
    runs = report.paired(made_up("a", shifted), made_up("b", [[none] * 4]))
    assert runs[0] == pytest.approx(0.05) and runs[1][0] < 0 and runs[2] == "not decided"


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


def test_pairs_without_a_diverged_run():
    one = made_up("a", [[[0.5, 0.7], None, [0.6, 0.8]]])
    other = made_up("b", [[[0.4, 0.5], [0.0, 0.1], None]])
    assert report.paired(one, other) == (pytest.approx(0.15), None, "")
    assert report.paired(one[1:], other[1:]) is None


def test_the_two_spreads():
    """Two splits of two seeds each: .5 and .7, .8 and .8."""
    mean, seeds, splits = report.spreads([0.5, 0.7, 0.8, 0.8], [0, 0, 1, 1])
    assert (mean, splits) == (pytest.approx(0.7), pytest.approx(0.2 / 2**0.5))
    assert seeds == pytest.approx((0.02 / 2) ** 0.5)  # of the variances .02 and 0
    assert report.spreads([0.5, 0.7], [4, 4])[2] is None
    assert report.spreads([0.5, 0.7], [4, 5])[1] is None


def test_the_paper_s_table(tmp_path):
    """Best and not decided in bold, one behind is not; what LaTeX reads as a command is escaped."""
    methods = plan("local,my_net=fedavg,fedper,scaffold")
    args, shared = compare.arguments(["--methods", "x", "--split-seeds", "2", "--set",
                                      "fedper.lr=0.1"])
    level = np.array([0.6, 0.8, 0.7, 0.9])
    found = {"local": made_up("local", [[level - 0.2] * 3] * 2),
             "my_net": made_up("my_net", [[level, level + 0.01, level]] * 2),
             "fedper": made_up("fedper", [[level + 0.01, level, level]] * 2),
             "scaffold": made_up("scaffold", [[None] * 3] * 2)}
    for runs in found.values():
        for r in runs:
            r.update(data={"name": "sha_pes"}, environment={"device": "cpu"}, split={
                "clients": 4, "sizes": [9] * 4, "classes": [2, 3, 3, 4], "fingerprint": "f"})
            r["args"].update(split="shards", per_client=4)
    rows = report.table(found, methods, args, shared)
    assert [row["method"] for row in rows[2:]] == ["local", "scaffold"]
    assert [row["bold"] for row in rows] == [True, True, False, False]
    report.write_table(rows, found, methods, shared, args, tmp_path)
    text = (tmp_path / "compare.tex").read_text()
    assert r"my\_net & \textbf{0.753} $\pm$ 0.006 $\pm$ 0.000 & " in text
    assert r"local & 0.550 $\pm$" in text and "$+0.203$" in text
    assert r"sha\_pes, 4 clients" in text
    assert "2/3/4 classes per client" in text and "scaffold (6 of 6 diverged)" in text
    assert "between seeds $\\pm$ that between splits' means" in text
    assert r" & 2.0 & 2.0 & " in text  # MB and minutes
    for word in ("toprule", "midrule", "bottomrule", "includegraphics"):
        assert f"\\{word}" in text
    assert text.count("{") == text.count("}") and text.count("$") % 2 == 0
    assert re.search(r"^\| local \| -0\.20.* behind \|  \|$", (tmp_path / "compare.md").read_text(),
                     re.M)


def test_one_run_decides_nothing():
    methods = plan("local,fedavg,fedper")
    args, shared = compare.arguments(["--methods", "x", "--seeds", "1"])
    found = {name: made_up(name, [[[0.5, value]]])
             for name, value in (("local", 0.1), ("fedavg", 0.2), ("fedper", 0.3))}
    rows = report.table(found, methods, args, shared)
    assert [(row["method"], row["bold"]) for row in rows] == [
        ("fedper", True), ("fedavg", False), ("local", False)]
    assert report.paired_table(rows)[1][1] == ["fedavg", "-0.050", "+0.050"]
    assert "nothing is decided" in report.about_differences(rows)


def test_splits_and_seeds(go, monkeypatch):
    """The first split's runs are those of a comparison on one split, and the pairs are equal."""
    go("fedavg,local", "--seeds", "2")
    monkeypatch.setattr(report, "draw", go.draw)
    found = go("fedavg,local", "--seeds", "2", "--split-seeds", "2", "--against", "local")
    assert sorted(go.trained) == [f"{name}/split1/{seed}+" for name in ("fedavg", "local")
                                  for seed in range(2)]
    prints = {path: r["split"]["fingerprint"] for path, r in found.items()}
    assert len(set(prints.values())) == 2 and prints["fedavg/0"] == prints["local/1"]
    rows = list(csv.DictReader(open(go.out / "runs.csv")))
    assert {(row["split_seed"], row["seed"]) for row in rows} == set(
        itertools.product("01", repeat=2))
    page = (go.out / "compare.md").read_text()
    assert "| method | minus local |" in page and "2 seeds on 2 splits" in page


def test_rates_are_chosen_on_validation_images(go):
    """Each method's best on validation, whatever its test accuracy; the rest is kept."""
    options = ["--seeds", "2", "--tune", "lr=0.001,0.5", "--tune", "fedprox.mu=0.1,1"]
    found = go("fedavg,fedprox", *options)
    assert len(go.trained) == 2 + 4 + 2  # the chosen runs are seed 0 of the comparison
    for name in ("fedavg", "fedprox"):
        grid = {path: r for path, r in found.items() if path.startswith(f"tune/{name}/")}
        best = max(grid.values(), key=lambda r: r["final"]["personal"]["val_mean"])
        value = best["final"]["personal"]["val_mean"]
        assert len(grid) == 2 ** (1 + (name == "fedprox"))
        for seed in range(2):
            args = found[f"{name}/{seed}"]["args"]
            assert value == max(r["final"]["personal"]["val_mean"] for r in grid.values()
                                if (r["args"]["lr"], r["args"]["mu" if name == "fedprox" else "lr"])
                                == (args["lr"], args["mu" if name == "fedprox" else "lr"]))
    table = (go.out / "tune.md").read_text()
    assert table.count("| chosen |") == 2 and "| fedprox | lr=0.5 mu=1 | 0." in table
    words = "Chosen for each method on validation images (first seed and split): lr from 0.001, 0.5"
    assert words in (go.out / "compare.tex").read_text()
    go("fedavg,fedprox", *options)
    assert not go.trained


def grid(*argv):
    args, shared = compare.arguments(["--methods", *argv])
    return tuning.grid_of(planning.plan(args, shared), args, shared), args, shared


def test_a_grid_is_crossed_and_a_method_s_own_one_counts():
    points, args, _ = grid("a=pfedme,fedprox,local", "--set", "a.pfedme-lambda=30", "--tune",
                           "fedprox.lr=1", "--tune", "lr=2,3", "--tune", "fedprox.mu=4,5")
    assert [" ".join(words) for words, _ in points] == [
        "a.theta-lr=2", "a.theta-lr=3", "fedprox.lr=1 fedprox.mu=4", "fedprox.lr=1 fedprox.mu=5",
        "local.lr=2", "local.lr=3"]
    run = points[1][1]
    assert (run.method.args["theta_lr"], run.method.args["lr"]) == (3, 0.0333)  # lr: 1 / lambda
    method, = plan("pfedme", "--set", "pfedme.lr=0.5", "--set", "pfedme.pfedme-lambda=30")
    assert method.args["lr"] == 0.5  # but not if it is given
    assert run.method.args["pfedme_lambda"] == 30 and run.method.argv[-1] == "--seed=0"
    assert str(run.folder) == "runs/compare/tune/a/theta-lr=3/0"


def test_the_best_on_validation_images_is_chosen_not_the_best_on_test_images(
        tmp_path, monkeypatch, capsys):
    """Of equal ones the first. A run that diverged has lost; a method without one is refused."""
    points, args, shared = grid("fedavg", "--tune", "lr=1,2,3,4", "--out", str(tmp_path))
    found = [made_up("fedavg", [[[test]]], val=val)[0]
             for test, val in ((0.9, 0.5), (0.2, 0.7), (0.3, 0.7), (0.9, 0.0))]
    found[3].update(diverged=True, final={})
    monkeypatch.setattr(training, "train_all", lambda *_: found)
    for words, run in points:
        run.folder.mkdir(parents=True)
        (run.folder / "result.json").write_text(words[0])
    tuning.tune(points, args, shared)
    assert args.set == ["fedavg.lr=2"]
    assert (tmp_path / "fedavg" / "0" / "result.json").read_text() == "fedavg.lr=2"
    table = (tmp_path / "tune.md").read_text()
    assert "| fedavg | lr=2 | 0.7000 | chosen |" in table and "| lr=4 | diverged |  |" in table
    found[0]["final"] = {"global": {"top1": 0.5}}
    refused(capsys, "fedavg measures no accuracy on validation images", tuning.tune, points,
            args, shared)
    for r in found:
        r.update(diverged=True, final={})
    refused(capsys, "--tune: all runs of fedavg diverged; try other values", tuning.tune,
            points, args, shared)


def test_a_curve_has_ten_points():
    """Of methods with fewer rounds, too, unless --eval-every is given."""
    for method in plan("fedavg,persfl,fedma", "--rounds", "40"):
        assert method.args["rounds"] // method.args["eval_every"] >= 10
    for method in plan("fedavg,fedma", "--rounds", "40", "--eval-every", "20"):
        assert method.args["eval_every"] == 20


def test_a_split_that_finds_its_own_clients():
    for method in plan("fedavg,persfl", "--dataset", "mine.npz", "--split", "natural"):
        assert not any(word.startswith("--clients") for word in method.argv)


def test_processes_of_their_own(toy, tmp_path):
    """Two at a time, from another folder. If nobody reads what is printed (`| head -1`), all is
    trained nevertheless. --help trains nothing, and fits a screen."""
    argv = [sys.executable, HERE / "compare.py", "--methods", f"fedavg,{OWN}", "--dataset", toy,
            *SMALL, "--rounds", "1", "--seeds", "1", "--jobs", "2"]
    head = subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    head.stdout.close()
    assert b"Traceback" not in head.stderr.read() and head.wait() == 0
    found = (tmp_path / "runs/compare").rglob("result.json")
    assert sorted(path.parent.parent.name for path in found) == ["fedavg", "lastlayer"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "| lastlayer | 0." in done.stdout, done.stderr
    done = subprocess.run([*argv[:2], "--help"], cwd=tmp_path / "runs", capture_output=True,
                          text=True)
    assert done.returncode == 0 and done.stdout.count("\n") <= 40
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["compare"]


def test_a_terminal_without_the_plus_minus_sign_shows_the_table(go, monkeypatch):
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, "ascii"))
    go("fedavg", "--seeds", "2")
    assert re.search(r"\| fedavg \| 0\.\d+ \? 0\.\d+ \|", terminal.getvalue().decode("ascii"))
    assert "±" in (go.out / "compare.md").read_text(encoding="utf-8")


def test_the_exit_code_is_1_if_every_run_diverged(go, capsys, monkeypatch):
    monkeypatch.setattr(report, "draw", go.draw)
    go("fedavg,fedprox", "--seeds", "1", "--lr", "1e30", "--momentum", "0")
    assert go.code == 1 and "all runs diverged" in capsys.readouterr().out
    page = (go.out / "compare.md").read_text()
    assert "| fedavg (1 of 1 diverged) |" in page and "curves.svg" not in page
    assert not (go.out / "curves.png").exists()


@pytest.mark.parametrize("methods", [OWN, f"fedavg,{OWN}"])
def test_the_printed_command_of_a_method_elsewhere_finds_common(methods):
    *_, method = plan(methods)
    command = planning.shell([str(method.file), *method.argv])
    assert command.startswith(f"PYTHONPATH={HERE} python {OWN} --dataset=shapes ")
    assert planning.shell([str(HERE / "fedavg.py")]) == f"python {HERE / 'fedavg.py'}"


def test_changed_images_are_refused(go, toy, capsys):
    """The data set's file is another one than the finished records'."""
    go("fedavg", "--seeds", "1")
    arrays = dict(np.load(toy))
    np.savez(toy, **arrays | {"y_train": arrays["y_train"][::-1]})
    refused(capsys, "has a record of other images than", go, "fedavg", "--seeds", "1")
    assert not go.trained


def test_a_changed_split_is_refused(go, tmp_path, capsys):
    """Of a function that reads who owns which image from a file."""
    owned = tmp_path / "owned.npy"
    (tmp_path / "s.py").write_text("import numpy as np\n"
                                   f"def mine(*_): return list(np.load({str(owned)!r}))\n")
    argv = ["fedavg", "--seeds", "1", "--split", f"{tmp_path}/s.py:mine"]
    np.save(owned, np.arange(40).reshape(4, 10))
    go(*argv)
    np.save(owned, np.arange(40).reshape(10, 4).T)
    refused(capsys, "has a record of another split than", go, *argv)
    assert not go.trained


def test_the_page_has_the_settings_that_were_used(go):
    """FedAvgM's own ones, of which --set changed one."""
    go("fedavgm", "--seeds", "1", "--set", "fedavgm.beta=0.5")
    assert "| `--lr=0.05 --momentum=0 --beta=0.5` |" in (go.out / "compare.md").read_text()


def test_a_file_that_trains_nothing_is_refused(go, tmp_path, capsys):
    """Its last two lines are missing: the program ends at once, without a record."""
    mine = written(tmp_path / "mine.py", MINE.replace("    baselines.main(", "    print("))
    with pytest.raises(SystemExit) as stop:
        go(mine, "--seeds", "1")
    assert stop.value.code == 2 and "mine.py has not trained all rounds; does it loop over " in (
        capsys.readouterr().err)


def test_a_method_that_leaves_its_loop_is_refused(go, tmp_path, capsys):
    mine = altered(tmp_path / "mine.py", "    return run.record()",
                   "        if t == 1:\n            break")
    with pytest.raises(SystemExit) as stop:
        go(mine, "--seeds", "1")
    words = "mine.py has not trained all rounds; does it loop over run.rounds without `break`"
    assert stop.value.code == 2 and words in capsys.readouterr().err
    assert json.loads((go.out / "mine/0/result.json").read_text())["status"] == "unfinished"


def ended(child, seconds=30):
    """Waits for a training.Child."""
    for _ in range(100 * seconds):
        if child.ended():
            return child.result()
        time.sleep(0.01)
    raise AssertionError("it runs on")


def test_a_child_is_the_file_run_with_its_flags(tmp_path):
    """Whatever it says last on stderr explains its end, but for a signal's."""
    (tmp_path / "helper.py").write_text("ANSWER = 42")
    file = written(tmp_path / "it.py", """import importlib.util, os, signal, sys
import helper
if __name__ == "__main__" and importlib.util.find_spec("common"):
    print(f"x.py: error: {sys.argv[1:]} {helper.ANSWER}", file=sys.stderr, flush=True)
    if "kill" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(7)
""")
    assert ended(training.Child([file, "-a", "b"], False)) == (7, "['-a', 'b'] 42")
    assert ended(training.Child([file], True)) == (7, "['--parallel=1'] 42")
    killed = -signal.SIGKILL
    assert ended(training.Child([file, "kill"], False)) == (killed, f"exit code {killed:d}")


@pytest.mark.parametrize("how", ["error", "kill"])
def test_the_others_end_after_an_error_and_if_compare_is_killed(how, tmp_path):
    """Two at a time: one sleeps; the other fails, or the parent is killed by a signal that it can't
    see. The one that sleeps ends, and the third does not begin."""
    for name, then in (("sleeps", "time.sleep(120)"), ("waits", "time.sleep(120)"), ("third", "")):
        then = "sys.exit(5)" if (name, how) == ("waits", "error") else then
        lazily = MINE.replace("import baselines\n", "")
        lazily = lazily.replace("):\n", "):\n    import baselines\n")
        (tmp_path / f"{name}.py").write_text(lazily + f"""
import pathlib, os, sys, time
if __name__ == "__main__":
    path = pathlib.Path({str(tmp_path / name)!r})
    path.with_suffix(".part").write_text(str(os.getpid()))
    path.with_suffix(".part").rename(path)
    while not pathlib.Path({str(tmp_path / "sleeps")!r}).exists():
        time.sleep(0.01)
    {then}
""")
    files = ",".join(str(tmp_path / f"{name}.py") for name in ("sleeps", "waits", "third"))
    parent = subprocess.Popen([sys.executable, HERE / "compare.py", "--methods", files, "--jobs",
                               "2", "--seeds", "1", "--out", tmp_path / "out", "--device", "cpu"],
                              stderr=subprocess.PIPE, text=True)
    for name in ("sleeps", "waits"):
        while not (tmp_path / name).exists():
            assert parent.poll() is None or name == "waits"
            time.sleep(0.01)
    if how == "kill":
        parent.kill()
    error = parent.communicate(timeout=60)[1]
    assert parent.returncode == (-signal.SIGKILL if how == "kill" else 2)
    assert ("waits, seed 0: exit code 5" in error) == (how == "error")
    for name in ("sleeps", "waits"):
        assert gone(int((tmp_path / name).read_text())), name
    assert not (tmp_path / "third").exists()


def gone(pid, seconds=30):
    """Returns whether a process ends; one that nobody has waited for is a zombie, Z."""
    for _ in range(10 * seconds):
        stat = pathlib.Path(f"/proc/{pid}/stat")
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


def test_signals_are_as_before(go):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    go("fedavg", "--seeds", "1")
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_a_method_without_personal_measures_has_empty_cells(go, tmp_path):
    mine = altered(tmp_path / "mine.py", ", federation.evaluate_clients(models)", "")
    go(f"fedavg,{mine}", "--seeds", "1")
    lines = (go.out / "compare.md").read_text().splitlines()
    row = next(line for line in lines if line.startswith("| mine |"))
    assert [not cell.strip() for cell in row.split("|")[2:5]] == [False, True, True]


def test_one_method_with_several_settings(go, capsys):
    found = go(f"fedprox, strong=fedprox,own={OWN}", "--seeds", "1", "--set", "strong.mu=1",
               "--set", "own.mix=0.25")
    mu = {name: r["args"].get("mu") for name, r in found.items()}
    assert mu == {"fedprox/0": 0.01, "strong/0": 1, "own/0": None}
    page = (go.out / "compare.md").read_text()
    assert "- strong is fedprox." in page and f"- own is {OWN}." in page
    assert "- fedprox is" not in page
    words = "has a record with --mix None, now it is 0.5; use another NAME"
    refused(capsys, words, go, f"strong={OWN}", "--seeds", "1")
    words = "has a record with --mix 0.25, now it is 0.5; use another NAME"
    refused(capsys, words, go, f"own={OWN}", "--seeds", "1")
    found = go("slow=scaffold", "--seeds", "1", "--lr", "0.1", "--momentum", "0.9")
    assert found["slow/0"]["args"]["lr"] == 0.25  # what it has of its own, as under its own name


def test_another_file_s_record_under_the_same_name_is_refused(go, tmp_path, capsys):
    """Its flags are the same. A file that calls one of ours has that one's record."""
    for name in ("one", "two"):
        written(tmp_path / f"{name}.py", pathlib.Path(OWN).read_text())
    go(f"own={tmp_path / 'one.py'}", "--seeds", "1")
    words = "has a record of one.py, now it is two.py; use another NAME, or another --out"
    refused(capsys, words, go, f"own={tmp_path / 'two.py'}", "--seeds", "1")


def test_a_parameter_may_be_written_with_underscores(go):
    go("fedprox-ft", "--seeds", "1", "--set", "fedprox-ft.finetune_epochs=2")
    record = json.loads((go.out / "fedprox-ft/0/result.json").read_text())
    assert record["args"]["finetune_epochs"] == 2
