"""The papers' tables: the data, the runner (with a stand-in for the training), the pages, and
repeating a record."""

import functools
import hashlib
import importlib
import json
import re
import shlex
import shutil
import subprocess
import types

import numpy as np
import pytest

import common
import fl.shapes
from conftest import QUICK, federation, refused, saved
from fl import records
from papers import __main__ as reproduce
from papers import again, pages, reading, runs, superfed_unseen, table

COMMANDS = list(runs.commands())

# A second transcription of the papers, by hand, from their texts and not from papers/.
PUBLISHED = """
superfed-1 | FedAvg, CIFAR-10 top-1 = 47.09; APFL, CIFAR-100 top-5 = 47.67
superfed-1 | SuPerFed-LM, CIFAR-10 top-5 = 90.07
superfed-2 | FedAvg, EMNIST top-1 = 76.67; SuPerFed-MM, TinyImageNet top-1 = 9.09
superfed-2 | SuPerFed-LM, TinyImageNet top-5 = 25.10
superfed-3 | L=0.0, LM top-1 = 33.61; L=0.4, MM top-5 = 89.87; L=0.9, LM top-1 = 48.06
superfed-figure-2 | MM mu=0.01, nu=2 = 84.80; LM mu=0.01, nu=2 = 88.10; MM mu=1, nu=0 = 58.20
psinet-norm | FedAvg, top-1 = 84.13; FedAvg + BN, top-1 = 85.46; FedAvg + GN, top-1 = 83.34
psinet-groups | FedAvg, top-1 = 65.32; G=10, top-1 = 68.23; G=20, top-1 = 68.17
psinet-depth | conv6 (C3-2), top-1 = 89-90
psinet-epochs | Psi-Net E=1, top-1 = 89.96; FedMA E=150, top-1 = 87.53; FedProx E=20, top-1 = 85.32
psinet-classes | FedAvg, 10x30 = 61; Psi-Net, 10x100 = 70; Psi-Net, 10x50 = 68
fedavgm-headline | FedAvg, top-1 = 30.1; FedAvgM, top-1 = 76.9
fedslr-1 | FedSLR (mixed), CIFAR-100 Non-IID = 82.19; Local, TinyImageNet IID = 3.86
fedslr-1 | FedDyn, CIFAR-10 IID = 92.61
fedslr-2 | FedAvg (*), CIFAR-10 GB = 893.92; FedSLR (GKR), TinyImageNet 10^6 = 5.34
fedslr-2 | SCAFFOLD, CIFAR-100 GB = 1787.83
fedslr-3 | lambda=1e-5, GKR GB = 819.44; lambda=1e-3, mixed 10^6 = 2.24
fedslr-3 | lambda=5e-4, mixed acc = 80.10
fedslr-4 | mu=1e-4, mixed std = 0.79; mu=5e-3, mixed acc = 81.82; mu=1e-2, mixed 10^6 = 5.56
fedslr-5 | eta_g=2, GKR GB = 894.06; eta_g=100, mixed acc = 78.33; eta_g=20, GKR 10^6 = 5.16
fedslr-6 | epochs=1, GKR acc = 58.20; epochs=4, mixed acc = 82.20; epochs=2, GKR acc = 64.51
fedslr-7 | mu=1e-3, mixed = 37.14; mu=1e-4, mixed = 44.16; mu=1e-5, mixed = 44.54
fedslr-8 | lambda=1e-3, GKR = 54.26; lambda=1e-4, GKR = 64.22; lambda=1e-5, GKR = 63.63
fedslr-9 | lambda=0, ms = 10.98; lambda=1e-3, ms = 6.53; lambda=5e-5, 10^6 = 6.56
persfl-2 | User 0, PersFL DS-3 = 94.5; User 9, Per-FedAvg DS-3 = 72.7; User 6, FedAvg DS-1 = 35.8
persfl-3 | User 2, FedAvg DS-1 = 88; User 7, pFedMe DS-3 = 98; Avg, PersFL DS-1 = 98.6
persfl-4 | User 0, CIFAR-10 DS-1 final = 84.5; User 9, CIFAR-10 DS-2 optimal = 58.8
persfl-4 | SD, MNIST DS-2 final = 1.2
persfl-5 | User 0, CIFAR-10 DS-1 T = 12.2; User 5, MNIST DS-3 lambda = 0.05
persfl-5 | User 4, CIFAR-10 DS-2 lambda = 0.75
persfl-6 | User 6, CIFAR-10 DS-2 PersFL-GD = 57.9; Avg, MNIST DS-1 PersFL-GD = 98.7
persfl-6 | SD, CIFAR-10 DS-3 PersFL-GD = 7.4
persfl-7 | pFedMe, CIFAR-10 DS-2 = 1000; FedAvg, CIFAR-10 DS-3 = 100; PersFL, MNIST DS-2 = 25
fedavg-1 | 2NN C=0.0, IID B=inf = 1455; 2NN C=0.1, IID B=10 = 87; 2NN C=0.2, non-IID B=inf = 1528
fedavg-2 | FedSGD E=1 B=inf, IID = 626; FedAvg E=5 B=10, IID = 20; FedAvg E=5 B=10, non-IID = 229
fedavg-3 | FedSGD, 0.8 = 3750; FedAvg, 0.8 = 280; FedAvg, 0.85 = 2000; FedSGD, 0.82 = 6600
"""


@pytest.mark.parametrize("name", runs.TABLES)
def test_published_values_are_the_papers(name):
    ours = {f"{cell.row}, {cell.column}": cell.published for cell in runs.cells(name)}
    lines = (line.split(" | ") for line in PUBLISHED.strip().splitlines())
    entries = [entry for table, line in lines if table == name for entry in line.split("; ")]
    papers = dict(entry.rsplit(" = ", 1) for entry in entries)
    assert papers.items() <= ours.items()
    known = [value for value in ours.values() if value != "?"]
    assert len(papers) >= min(3, len(known))
    assert all(reading.number(value) is not None or value == "89-90" for value in known)


def test_averages_in_the_transcription_are_those_of_its_rows():
    """PersFL's Avg rows are means of the users above them, up to rounding to one digit."""
    for name in ("persfl-2", "persfl-3", "persfl-4", "persfl-6"):
        t = runs.TABLES[name]
        for column in t.columns:
            users = [float(values[column]) for row, values in t.rows.items()
                     if row.startswith("User")]
            assert abs(sum(users) / 10 - float(t.rows["Avg"][column])) < 0.11, (name, column)


# The commands


def test_every_command_parses_and_no_two_mean_the_same():
    seen = {}
    for command in COMMANDS:
        args = runs.arguments(command)
        args = {name: value for name, value in args.items() if name != "eval_every"}
        meaning = command.split()[0], repr(sorted(args.items()))
        assert seen.setdefault(meaning, command) == command
        assert args["dataset"] in ("cifar10", "cifar100", "mnist", "emnist", "tinyimagenet")


def test_commands_say_what_their_cells_are():
    """The paper's setting of a row and a column is in the arguments."""
    def run(table, row, column):
        command, measure = runs.TABLES[table].cell(row, column)
        return runs.arguments(command), measure

    def check(cell, measure, **wanted):
        args, found = run(*cell)
        assert found == measure and wanted.items() <= args.items(), cell

    check(("superfed-1", "SuPerFed-LM", "CIFAR-100 top-5"), "global/top5", dataset="cifar100",
          mix="layer", rounds=300)
    check(("superfed-3", "L=0.4", "MM personal"), "personal@test/mean", start=0.4, rounds=200)
    check(("superfed-figure-4", "MM E=20", "B=4"), "personal@test/mean", epochs=20, batch_size=4,
          rounds=100, mu=0.01, nu=2)
    check(("psinet-groups", "G=100", "top-1"), "global/top1", groups=100, model="vgg16",
          per_client=50, clients=10)
    check(("fedslr-1", "FedAvg", "TinyImageNet IID"), "personal/mean", split="iid",
          model="resnet18", rounds=1000, fraction=0.1, momentum=0, client_test=0.2)
    check(("fedslr-2", "FedSLR (GKR)", "CIFAR-10 10^6"), "numbers/gkr")
    check(("fedslr-5", "eta_g=20", "GKR 10^6"), "numbers/gkr")
    check(("fedslr-5", "eta_g=20", "mixed 10^6"), "numbers/mixed", eta_g=20, lambda_=1e-4, mu=1e-3,
          epochs=2)
    check(("fedslr-6", "epochs=3", "GKR acc"), "gkr/mean", epochs=3, dataset="cifar100",
          split="fedslr")
    check(("persfl-2", "User 7", "FedAvg DS-3"), "personal/per_client/7", rounds=100,
          split="lognormal", per_client=2)
    check(("persfl-3", "SD", "PersFL DS-1"), "users/PersFL/SD", rounds=100, model="mnistnet",
          limit=6000)
    commands, _ = runs.TABLES["fedavgm-figure-5"].cell("FedAvgM E=5 C=0.1", "alpha=0.05")
    for args in map(runs.arguments, commands):
        assert args["beta"] > 0 and args["rounds"] == 10_000
        assert (args["alpha"], args["epochs"], args["fraction"]) == (0.05, 5, 0.1)


@pytest.mark.parametrize("cell, wanted", [
    (("fedavg-1", "2NN C=0.0", "non-IID B=inf"), ("2nn", "shards", 0, 1, 0, 1, 0, [0.97], 8556)),
    (("fedavg-1", "CNN C=0.5", "IID B=10"), ("mnistcnn", "iid", 0.5, 5, 10, 1, 0, [0.99], 36)),
    (("fedavg-2", "FedAvg E=20 B=50", "non-IID"),
     ("mnistcnn", "shards", 0.1, 20, 50, 1, 0, [0.99], 852)),
    (("fedavg-3", "FedSGD", "0.82"), ("tfcnn", "iid", 0.1, 1, 0, 0.9934, 0, [0.8, 0.82], 6600)),
    (("fedavg-3", "FedAvg", "0.85"),
     ("tfcnn", "iid", 0.1, 5, 50, 0.99, 0, [0.8, 0.82, 0.85], 2000))])
def test_fedavgs_commands_have_the_papers_setting_and_grid(cell, wanted):
    commands, measure = runs.TABLES[cell[0]].cell(*cell[1:])
    found = [runs.arguments(command) for command in commands]
    step = 1 / 6 if wanted[0] == "2nn" else 1 / 3  # the paper's two grids
    assert np.diff(np.log10([args["lr"] for args in found])) == pytest.approx([step] * 2, abs=0.003)
    names = ("model", "split", "fraction", "epochs", "batch_size", "lr_decay", "momentum", "target",
             "rounds")
    for args in found:
        assert tuple(args[name] for name in names) == wanted
        assert args["clients"] == 100 and args["client_test"] == 0
        assert float(measure.removeprefix("rounds_to/")) in args["target"]


# Facts of the papers' experiments, by hand: FILE DATASET FLAGS | what is the default
SETTINGS = """
fedavg mnist | model=mnistcnn transform=centre rounds=1000 batch_size=10 lr_decay=1.0 target=[0.99]
fedavg cifar10 | model=tfcnn transform=tensorflow rounds=2000 batch_size=50 lr_decay=0.99
fedavg cifar10 | split=iid clients=100 fraction=0.1 epochs=5 client_test=0 target=[0.8,0.82,0.85]
fedavg mnist --target | target=[]
fedavg cifar100 | target=[] split=iid clients=100
fedavgm cifar10 | lr=0.0003 beta=0.99 alpha=0.1 fraction=0.05 rounds=10000 split=dirichlet-hsu
superfed cifar10 --mix model | rounds=200 clients=100 fraction=0.1 start=0.4 split=shards
superfed cifar10 --mix layer | start=0.8 per_client=2 epochs=10 batch_size=20 lr=0.01
superfed cifar100 | rounds=300 start=0.5 mu=0.01 nu=2.0 weight_decay=0.0 client_test=0.2
superfed emnist | rounds=100 fraction=0.01 start=0.4 split=semantic lr_decay=1.0 momentum=0.9
superfed tinyimagenet | rounds=500 fraction=0.03 start=0.4 split=semantic model=cnn
psinet cifar10 | model=vgg9 rounds=100 split=classes per_client=4 clients=10 groups=10 norm=gn
psinet cifar100 | model=vgg16 rounds=200 per_client=50 epochs=1 batch_size=64 fraction=1.0
psinet cifar100 | lr=0.01 momentum=0.9 weight_decay=0.0001
fedslr cifar10 | rounds=1000 clients=100 fraction=0.1 epochs=2 fusion_epochs=1 batch_size=20
fedslr cifar100 | lr=0.1 lr_decay=0.998 weight_decay=0.001 momentum=0.0 lambda_=0.0001 mu=0.001
fedslr tinyimagenet | alpha=0.1 client_test=0.0 split=fedslr model=resnet18 transform=fedslr
fedslr tinyimagenet | p_start=copy rounds=1000 eta_g=10.0
fedslr tinyimagenet --model cnn | p_start=zero
persfl cifar10 | rounds=50 per_client=4 limit=None model=cifarnet alpha=0.9 clients=10
persfl cifar10 --split dirichlet-classes | rounds=25 client_val=0.2 client_test=0.2 fraction=1.0
persfl cifar10 --split lognormal | rounds=50 per_client=2 model=cifarnet
persfl mnist | rounds=100 per_client=4 limit=6000 model=mnistnet
persfl mnist --split unequal-classes | rounds=100 per_client=4 limit=6000
persfl mnist --split dirichlet-classes | rounds=25 limit=None
persfl mnist --split lognormal | rounds=100 per_client=2 limit=None
persfl mnist --rounds 7 | rounds=7
baselines cifar10 --method fedavg-ft | rounds=200 clients=100 fraction=0.1 split=shards per_client=2
baselines cifar100 --method ditto | rounds=300 epochs=10 batch_size=20 lr=0.01 momentum=0.9
baselines emnist --method fedavg | rounds=100 fraction=0.01 split=semantic model=cnn
baselines tinyimagenet --method fedma | rounds=500 fraction=0.03 split=semantic
"""


@pytest.mark.parametrize("line", SETTINGS.strip().splitlines())
def test_the_settings_are_the_papers(line):
    command, settings = line.split(" | ")
    file, argv = command.split(" ", 1)
    args = runs.arguments(f"{file}.py --dataset {argv}")
    names = [word.partition("=")[0] for word in settings.split()]
    assert " ".join(f"{name}={args[name]}".replace(", ", ",") for name in names) == settings


def test_commands_begin_on_the_embedded_data_set(tmp_path, monkeypatch):
    """One of each file, method and set of flags, made small, up to the first client's training."""
    class Begun(Exception):
        pass

    def train(*_, **__):
        raise Begun

    embedded = fl.shapes.shapes(200, 100)
    monkeypatch.setattr(fl.shapes, "shapes", lambda: embedded)
    monkeypatch.setattr(common.Federation, "train", train)
    monkeypatch.setattr(fl.provenance, "commit", lambda files: None)  # git is slow
    smaller = ["--dataset=shapes", "--limit=200", "--clients=10", "--rounds=2", "--batch-size=5",
               "--device=cpu", f"--out={tmp_path}"]
    kinds = {}
    for command in COMMANDS:
        file, *flags = shlex.split(runs.written_out(command))
        kind = [file, *(word for word in flags if word.startswith("--"))]
        kinds[(*kind, *re.findall(r"--(?:method|split|norm) \S+", command))] = flags
    assert len(kinds) > 40
    for (file, *_), flags in kinds.items():
        flags = [re.sub("resnet18|vgg16|vgg9", "cnn", word) for word in flags] + smaller
        if "--alpha" in flags and "--split" not in flags:
            flags += ["--split", "dirichlet-hsu"]  # fedavgm.py's default for cifar10
        if {"--per-client", "lognormal", "classes", "unequal-classes"} & {*flags}:
            flags += ["--per-client", "2"]
        if "--groups" in flags and "0" != flags[flags.index("--groups") + 1]:
            flags += ["--groups", "5"]  # of 10 classes
        if "--depth" in flags:
            flags += ["--model", "vgg9"]
        with pytest.raises(Begun):
            importlib.import_module(file.removesuffix(".py")).main(flags)


# The runner and the pages. A stand-in for the training has an accuracy of (seed + 40 + rounds) %.

ARGS = {"lr": 0.1, "rounds": 10, "split": "iid", "seed": 0, "split_seed": 0}

STAND_IN = """
import argparse, json, os, pathlib, signal, time
p = argparse.ArgumentParser()
for name, kind, default in (("lr", float, 0.1), ("rounds", int, 10), ("seed", int, 0),
                            ("split_seed", int, 0), ("split", str, "iid"), ("out", str, "")):
    p.add_argument("--" + name.replace("_", "-"), type=kind, default=default)
p.add_argument("--resume", action="store_true")
args = p.parse_args()
out, here = pathlib.Path(args.out), pathlib.Path(__file__).parent
out.mkdir(parents=True, exist_ok=True)
state = out / "state.pt"
done = int(state.read_text()) if args.resume and state.exists() else 0
with open(here / "log", "a") as log:
    log.write(f"{args.lr:g} {args.seed} from {done}\\n")
while done < args.rounds:
    time.sleep(DELAY)
    done += 1
    rows = [{"round": t + 1, "seconds": 90.0 if t == 0 and args.rounds == 3 else 6.0,
             "bytes_up": 8, "bytes_down": 8, "global": {"top1": (args.seed + 41 + t) / 100}}
            for t in range(done)]
    state.write_text(str(done))
    (out / "part").write_text(json.dumps({
        "algorithm": "stand_in", "status": "finished" if done == args.rounds else "unfinished",
        "command": "stand_in.py --out results/t-1/stand_in/0", "args": vars(args), "rounds": rows,
        "environment": {"device": "a device", "torch": "1", "sources": {"stand_in.py": ""}},
        "data": {"fingerprint": "a"}, "split": {"fingerprint": "b"},
        "final": {"global": rows[-1]["global"]}, "bytes_up": 0, "bytes_down": 0}))
    (out / "part").replace(out / "result.json")
"""


def write_stand_in(folder, delay=0):
    (folder / "stand_in.py").write_text(STAND_IN.replace("DELAY", str(delay)))


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A project with one table of two runs; the folder that it lies in."""
    write_stand_in(tmp_path)
    monkeypatch.setattr(runs, "HERE", tmp_path)
    monkeypatch.setattr(runs, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    paper = {"t": types.SimpleNamespace(TITLE="A paper")}
    t = table("t-1", "A table", "top-1", "A | 47.09\nB | ?", lambda row, column: (
        "stand_in.py" + " --lr 0.5" * (row == "B"), "global/top1"), 1, why={"B": "B is ours."})
    tables = {"t-1": t}
    for module in (runs, pages, reproduce):
        monkeypatch.setattr(module, "TABLES", tables)
    monkeypatch.setattr(pages, "PAPERS", paper)
    monkeypatch.setattr(runs, "arguments", lambda command: {
        **ARGS, "lr": 0.5 if "0.5" in command else 0.1})
    monkeypatch.setattr(runs, "parsed", lambda words: ARGS)
    fresh()
    yield tmp_path
    fresh()


def fresh():
    """As in a new process."""
    for cached in (runs.commands, runs.load, pages.shown):
        cached.cache_clear()


def go(words=""):
    fresh()
    return reproduce.main(words.split())


def add(t):
    """Adds a table."""
    runs.TABLES[t.name] = t
    fresh()


def written(folder):
    names = "README.md", "t.md", "t-runs.md"
    return "".join((folder / "results" / name).read_text() for name in names)


def page(folder):
    """The pages, rebuilt."""
    go("--tables")
    return written(folder)


def log(folder):
    return (folder / "log").read_text().splitlines() if (folder / "log").exists() else []


def record_of(folder, run="stand_in"):
    return folder / "results" / "t-1" / run / "0" / "result.json"


def change(path, **more):
    """Rewrites a record; more: its parts, or a function of a part."""
    record = json.loads(path.read_text())
    for name, part in more.items():
        record[name] = part(record[name]) if callable(part) else part
    path.write_text(json.dumps(record))


def make(folder, run="t-1/stand_in", seed=0, rounds=10, **more):
    """Writes a record as the stand-in would, but for some of its parts."""
    rows = [{"round": t + 1, "seconds": 6.0, "top1": 0.5, "global": {"top1": 0.5}}
            for t in range(rounds)]
    path = folder / "results" / run / str(seed) / "result.json"
    path.parent.mkdir(parents=True)
    record = {"algorithm": "stand_in", "status": "finished", "command": "stand_in.py", "args": ARGS,
              "rounds": rows, "environment": {"device": "a device", "sources": {}},
              "final": {"global": {"top1": 0.5}}, "bytes_up": 0, "bytes_down": 0,
              "data": {"fingerprint": "a"}, "split": {"fingerprint": "b"}} | more
    record["args"] = record["args"] | {"seed": seed, "split_seed": seed}
    path.write_text(json.dumps(record))


def test_what_is_missing_is_run_once_and_shown(small):
    text = page(small)
    assert "| A | 47.09 / · |" in text and "| B | ? / · |" in text and log(small) == []
    assert "B is ours." not in text
    assert "| [t-1](t.md#t-1) | A table | 2 | 0 | 1 | 0 | 0 | 2 |" in text
    assert go("--seeds 2") == 0
    assert sorted(log(small)) == [f"{lr} {seed} from 0" for lr in (0.1, 0.5) for seed in (0, 1)]
    # .50 and .51: mean 50.5, standard deviation .5 * sqrt(2) = .7071, less than 50.5 - 47.09
    text = written(small)
    assert "| A | 47.09 / 50.50 ± 0.71 (2) **!** |" in text
    assert "| B | ? / 50.50 ± 0.71 (2) |" in text and "\n- B: B is ours.\n" in text
    run = "| [`stand_in.py --lr 0.5`](t-1/stand_in-lr-0.5) | 0 1 | 10 | a device | 1.0 |"
    assert run in text and "| [t-1](t.md#t-1) | A table | 2 | 0 | 1 | 2 | 0 | 0 |" in text
    go("--seeds 2")
    assert len(log(small)) == 4 and not list(small.glob("results/**/state.pt"))
    add(table("t-2", "", "top-1", "User 0 | 40", lambda row, column: (
        ["stand_in.py", "stand_in.py --lr 0.5", "stand_in.py --lr 0.2"], "global/top1"), 1))
    wanted = "| User 0 | 40 / 50.50 ± 0.71 (2) [2 of 3 settings tried] |"  # no verdict on a user
    assert wanted in page(small)


def test_a_record_may_be_one_file_and_that_in_the_folder_is_newer(small):
    """The pages are a function of the records."""
    go()
    first = written(small)
    assert page(small) == first and "| A | 47.09 / 50.00 (1) |" in first
    one = record_of(small).parent.with_suffix(".json")
    one.write_text(records.text(json.loads(record_of(small).read_text())))
    change(record_of(small), final={"global": {"top1": 0.25}})
    assert "| A | 47.09 / 25.00 (1) |" in page(small) and "| B | ? / 50.00 (1) |" in written(small)
    shutil.rmtree(record_of(small).parent)
    assert "| A | 47.09 / 50.00 (1) |" in page(small) and go() == 0 and len(log(small)) == 2


@pytest.mark.parametrize("trial", ["--only t-1", "--scale 1e-1"])
def test_a_trial_leaves_the_pages_alone(small, trial, capsys):
    before = page(small)
    assert go(trial) == 0 and len(log(small)) == 2
    assert written(small) == before and "not rebuilt" in capsys.readouterr().out
    assert page(small) != before


def test_a_record_of_other_arguments_does_not_count(small, capsys):
    make(small, args=ARGS | {"lr": 0.2})
    assert "| A | 47.09 / · |" in page(small)
    capsys.readouterr()
    go("--list --only t-1")
    line = "  other arguments, 10 of 10 rounds: python stand_in.py --seed 0"
    assert line in capsys.readouterr().out
    record_of(small).with_name("state.pt").write_text("4")  # it is not resumed
    go("--only t-1/stand_in")
    assert "| A | 47.09 / 50.00 (1) |" in page(small) and log(small)[0] == "0.1 0 from 0"


def test_an_interrupted_run_goes_on_where_its_state_is(small):
    make(small, rounds=4, status="unfinished", final={"global": {"top1": 0.44}})
    assert "| A | 47.09 / · |" in page(small)  # only what has ended is shown
    record_of(small).with_name("state.pt").write_text("4")
    go("--only t-1/stand_in")
    assert log(small) == ["0.1 0 from 4", "0.5 0 from 0"]
    assert "| A | 47.09 / 50.00 (1) |" in page(small)


def test_ctrl_c_stops_the_tool_and_a_run_that_fails_is_named(small, capsys, monkeypatch):
    def call(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "call", call)
    assert go() == 130
    monkeypatch.setattr(subprocess, "call", lambda *_, **__: 2)
    assert go() == 1
    assert "failed  t-1/stand_in/0, exit code 2" in capsys.readouterr().out


def test_scaled_results_are_kept_apart_and_marked(small):
    go("--scale 0.3 --only t-1")
    assert len(list(small.glob("results/scale-0.3/t-1/*/0/result.json"))) == 2
    assert not (small / "results" / "t-1").exists()
    text = page(small)
    assert "| A | 47.09 / 43.00 (1) [3 of 10 rounds] |" in text
    run = "| [`stand_in.py --rounds 3`](scale-0.3/t-1/stand_in) | 0 | 3 | a device | 1.7 |"
    assert run in text  # 90 + 6 + 6 s
    assert "| [t-1](t.md#t-1) | A table | 2 | 0 | 1 | 0 | 2 | 0 |" in text
    make(small)
    assert "| A | 47.09 / 50.00 (1) |" in page(small)


@pytest.mark.parametrize("at_one, at_a_half, shown", [
    (None, None, "·"), ("unfinished", None, "·"), ("finished", "finished", "61.00 (1)"),
    ("unfinished", "finished", "62.00 (1) [5 of 10 rounds]"),
    ("unfinished", "diverged", "diverged [5 of 10 rounds, 1 of 1 diverged]"),
    ("diverged", "finished", "diverged [5 of 10 rounds, 1 of 1 diverged]"),
])
def test_which_run_a_cell_shows(small, at_one, at_a_half, shown):
    """The longest one that has ended."""
    for folder, status, top1 in (("", at_one, 0.61), ("scale-0.5/", at_a_half, 0.62)):
        if status:
            make(small, f"{folder}t-1/stand_in", rounds=10 if (folder, status) == ("", "finished")
                 else 5, status=status, final={"global": {"top1": top1}},
                 args=ARGS | {"rounds": 5 if folder else 10})
    assert f"| A | 47.09 / {shown} |" in page(small)


def test_rounds_to_a_target(small):
    """The fewest rounds count. A run that reached its target is not short; one that did not is said
    not to have."""
    runs.TABLES.pop("t-1")
    add(table("t-2", "Rounds", "rounds", "slow | 90\nfast | 30\nnever | 40",
              lambda row, column: ([f"stand_in.py --{row}", f"stand_in.py --{row} --lr 0.5"],
                                   "rounds_to/0.9"), 1))
    for words, lr, rounds_to, rounds in (
            ("slow", 0.1, 8.25, 9), ("slow-lr-0.5", 0.5, None, 10), ("fast-lr-0.5", 0.5, 2.75, 3),
            ("fast", 0.1, 5.5, 6), ("never", 0.1, None, 10)):
        make(small, f"t-2/stand_in-{words}", rounds=rounds, args=ARGS | {"lr": lr},
             rounds_to={"0.9": rounds_to})
    text = page(small)
    assert "| slow | 90 / 8.2 (1) [2 of 2 settings tried] |" in text
    assert "| fast | 30 / 2.8 (1) [2 of 2 settings tried] |" in text
    assert "| never | 40 / not reached [1 of 2 settings tried] |" in text
    assert [*pages.counts("t-2").values()] == [3, 0, 0, 3, 0, 0]


def test_records_of_two_machines_are_merged_and_half_precision_is_said(small, monkeypatch):
    """By copying. A record of a CPU counts on a GPU, whose default is another precision."""
    for name, lr, seed in (("stand_in", 0.1, 0), ("stand_in", 0.1, 1), ("stand_in-lr-0.5", 0.5, 0),
                           ("stand_in-lr-0.5", 0.5, 1)):
        precision = "bf16" if (lr, seed) == (0.5, 1) else "fp32"
        make(small, f"t-1/{name}", seed, args=ARGS | {"lr": lr, "precision": precision},
             final={"global": {"top1": (50 + seed) / 100}})
    usual = runs.arguments
    monkeypatch.setattr(runs, "arguments", lambda command: {**usual(command), "precision": "tf32"})
    go("--seeds 2")
    assert log(small) == [] and "| A | 47.09 / 50.50 ± 0.71 (2) **!** |" in written(small)
    assert "| B | ? / 50.50 ± 0.71 (2) [bf16] |" in written(small)


def test_the_list_runs_nothing(small, capsys):
    def listed(words):
        capsys.readouterr()
        go(words)
        return capsys.readouterr().out

    every = listed("--list --only t-1")
    assert "  missing: python stand_in.py --lr 0.5 --seed 0 --split-seed 0\n" in every
    assert "A: top-1 47.09" in every and "B: top-1 ?" in every
    make(small, "t-1/stand_in-lr-0.5", args=ARGS | {"lr": 0.5})
    assert "  done, 10 of 10 rounds: python stand_in.py --lr 0.5" in listed("--list --only t-1")
    line = listed("--list").split("\n")[1]
    assert " ".join(line.split()) == "t-1 2 1 0 1 2 1 A table" and log(small) == []


@pytest.mark.parametrize("words, why", [
    ("--only nothing", "no such table or run"), ("--scale 2", "at most 1"),
    ("--rounds 3", "--rounds belongs to --again"), ("--unknown", "unrecognized"),
    ("--again results/none.json", "there is no record")])
def test_refusals_are_one_line(small, capsys, words, why):
    refused(capsys, why, go, words)


@pytest.mark.parametrize("text", ['{"algorithm": ', "[]", "{}", '{"rounds": {"seconds": 1}}'])
def test_what_is_no_record_is_named(small, capsys, text):
    (small / "results" / "scale-old").mkdir(parents=True)
    record_of(small).parent.mkdir(parents=True)
    record_of(small).write_text(text)
    refused(capsys, f"{record_of(small)} can't be read as a record", go, "--list")


# Repeating a record


def repeated(small, capsys, monkeypatch, words=""):
    """Returns what --again prints of the record of stand_in."""
    monkeypatch.chdir(small)
    capsys.readouterr()
    assert go(f"--again {record_of(small)} {words}") == 0
    return capsys.readouterr().out


def test_a_repeated_run_is_compared_and_leaves_the_record_alone(small, capsys, monkeypatch):
    """Here the record is equal at first, and then differs: the stand-in has .41, .42, ..."""
    go("--only t-1/stand_in")
    before = record_of(small).read_bytes()
    out = repeated(small, capsys, monkeypatch)
    assert "again   python stand_in.py --out" in out and "runs/again/t-1/stand_in/0" in out
    assert re.search(r"round 10 +record +again\n", out)
    assert re.search(r"global/top1 +0.5 +0.5  equal\n", out)
    assert "10 rounds are in both records, 10 of them measured: all equal to the digit\n" in out
    assert record_of(small).read_bytes() == before
    assert (small / "runs/again/t-1/stand_in/0/result.json").exists()
    change(record_of(small), environment=lambda e: {**e, "torch": "0"}, data={"fingerprint": "c"},
           rounds=lambda rows: [{**row, "global": {"top1": 0.5 - (row["round"] > 3) / 8}}
                                for row in rows])
    out = repeated(small, capsys, monkeypatch)
    assert (small / "runs/again/t-1/stand_in/0-2/result.json").exists()
    assert re.search(r"global/top1 +0.375 +0.5  \+0.125\n", out)
    assert "measured: the first difference is round 1's global/top1\n" in out
    assert "fingerprint of the data: c then, a now\ntorch: 0 then, 1 now\n" in out
    assert "device" not in out


def test_a_part_of_a_run_is_repeated_with_the_runs_own_arguments(small, capsys, monkeypatch):
    make(small)
    write_stand_in(small, delay=0.3)
    out = repeated(small, capsys, monkeypatch, "--rounds 2")
    n = int(re.search(r"(\d+) rounds are in both records", out).group(1))
    assert 2 <= n < 10 and "final" not in out
    again_, = (small / "runs").rglob("result.json")
    assert json.loads(again_.read_text())["args"]["rounds"] == 10


@pytest.mark.parametrize("more, words", [
    (dict(args=lambda args: {**args, "lr": 7}), "was made with lr 7; its command now means 0.1"),
    (dict(command=None), "has no `command`, so it can't be run again"),
])
def test_a_record_that_today_means_something_else_is_refused(small, capsys, more, words):
    make(small)
    change(record_of(small), **more)
    refused(capsys, words, go, f"--again {record_of(small)}")
    assert log(small) == []


# Numbers from records


def test_users_are_averaged_over_seeds_before_their_deviation():
    """Two seeds of three users: averages .2, .4, .9; mean .5, deviation
    sqrt((.09 + .01 + .16) / 2)."""
    values = [[0.1, 0.5, 0.9], [0.3, 0.3, 0.9]]
    deviation = pytest.approx(100 * (0.26 / 2) ** 0.5)
    assert reading.combine(values, "users/PersFL/SD") == (deviation, None)
    assert reading.combine(values, "users/PersFL/Avg") == (pytest.approx(50), pytest.approx(0))


def test_measures_are_read_in_the_papers_units():
    users = {"PersFL": [0.25, 0.5], "T": [5, 25]}
    record = {"final": {"users": users, "personal@test": {"mean": 0.5}}, "rounds": [],
              "bytes_up": 2e9, "bytes_down": 3e9, "parameters": 11_000_000, "args": {"rounds": 7}}
    for measure, value in (("users/PersFL/1", 50), ("users/T/1", 25), ("personal@test/mean", 50),
                           ("bytes", 5), ("parameters", 11), ("2*parameters", 22),
                           ("args/rounds", 7)):
        assert reading.factor(measure) * reading.last(record, measure) == value
    for measure in ("users/PersFL/2", "latency/factorised_ms"):
        assert reading.last(record, measure) is None


def test_unseen_clients_take_no_part(tmp_path):
    """Of the eight, two rounds sample four of the other five each; Phase II is the second."""
    argv = [*QUICK, "--model", "mnistnet"]
    found = superfed_unseen.main(["--unseen", "3", *argv, "--start", "0.5", "--out", str(tmp_path)])
    unseen = json.loads((tmp_path / "unseen.json").read_text())["unseen"]
    start = federation(argv).net.init(common.stream(0, "initialisation", 0, 1))
    moved = (saved(tmp_path)["w_l"] != start).any(1)
    assert len(unseen) == 3 and not moved[unseen].any() and moved.sum() == 4
    assert len(found) == 2 + 11 and all(0 <= accuracy <= 1 for accuracy in found.values())


# What is committed


def test_committed_results_belong_to_runs():
    known = set(map(runs.place, runs.commands()))
    for name in runs.TABLES:
        for pattern in (f"{name}/*", f"scale-*/{name}/*"):
            for path in runs.RESULTS.glob(pattern):
                assert f"{path.parent.name}/{path.name}" in known, path
    for command in runs.commands():
        for scale in runs.scales():
            for r in runs.results(command, scale):
                assert r.state != "other arguments", r.path


@functools.cache
def committed_records():
    """Returns {path: record}."""
    paths = subprocess.run(["git", "-C", runs.HERE, "ls-files", "results"], capture_output=True,
                           text=True).stdout.split()
    if not paths:
        pytest.skip("no git checkout")
    texts = {path: (runs.HERE / path).read_text() for path in paths if path.endswith(".json")}
    return {path: records.read(runs.HERE / path) for path, text in texts.items()
            if '"evaluations": ' in text}


def test_every_committed_record_can_be_run_again_and_results_are_small():
    """Its command gives its arguments. SuPerFed's --as official is compared elsewhere."""
    assert len(committed_records()) > 400
    for path, record in committed_records().items():
        assert record["command"] and "--out" not in record["command"], path
        if "--as official" not in record["command"]:
            again.words_of(record, path)
    assert sum(path.stat().st_size for path in runs.RESULTS.rglob("*") if path.is_file()) < 12e6


def test_committed_records_were_made_by_the_commits_that_they_name():
    """Their source files are those of that commit, byte by byte."""
    def git(*words, **more):
        return subprocess.run(["git", "-C", str(runs.HERE), *words], capture_output=True, **more)

    if b"true" in git("rev-parse", "--is-shallow-repository").stdout:
        pytest.skip("not all of the git history")
    made = {}  # commit -> (name of a file, its digest)
    for record in committed_records().values():
        first = record["environment"]
        for environment in (first, *first.get("resumed", [])):
            made.setdefault(environment["commit"].rstrip("+"), set()).update(
                environment["sources"].items())
    wanted = {}  # git's name of a file -> its digest
    for commit, files in made.items():
        tree = git("ls-tree", "-r", commit, check=True, text=True).stdout.splitlines()
        tree = {path: blob for *_, blob, path in map(str.split, tree)}
        for name, digest in files:  # older records have the last part of a path, or an older one
            last = name.rpartition("/")[2]
            alike = [path for path in tree if path.rpartition("/")[2] == last]
            path = name if name in tree else min(alike, key=lambda path: path.count("/"))
            wanted[tree[path]] = digest
    assert wanted
    text = git("cat-file", "--batch", input="\n".join(wanted).encode(), check=True).stdout
    for blob, digest in wanted.items():
        line, text = text.split(b"\n", 1)
        name, _, size = line.decode().split()
        assert (name, hashlib.sha256(text[: int(size)]).hexdigest()) == (blob, digest)
        text = text[int(size) + 1 :]


def test_the_committed_pages_are_those_of_the_committed_records():
    """After a change: python -m papers --tables, and make docs."""
    def committed(name):
        return (runs.RESULTS / f"{name}.md").read_text()

    assert committed("README") == pages.overview()
    for paper in runs.PAPERS:
        assert (committed(paper), committed(f"{paper}-runs")) == pages.pages(paper), paper


def test_every_table_is_a_papers_and_every_explanation_a_cells():
    for name, t in runs.TABLES.items():
        assert name.split("-")[0] in runs.PAPERS
        cells = {f"{row}/{column}" for row in t.rows for column in t.columns}
        assert t.why.keys() <= {"All", *t.rows, *cells}


