"""The papers' tables: the data; reproduce.py's runner with a stand-in for the training; its pages."""

import hashlib
import importlib
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
import time
import types

import numpy as np
import pytest
from conftest import refused

import datasets
import reproduce
from tables import reading, table
from tables.quick import Claim

COMMANDS = list(reproduce.runs())

# A second transcription of the papers, by hand, from their texts and not from tables/.
PUBLISHED = """
superfed-1 | FedAvg, CIFAR-10 top-1 = 47.09; APFL, CIFAR-100 top-5 = 47.67; SuPerFed-LM, CIFAR-10 top-5 = 90.07
superfed-1 | SuPerFed-MM, CIFAR-100 top-1 = 17.62; FedProx-LU, CIFAR-10 personal = ?
superfed-2 | FedAvg, EMNIST top-1 = 76.67; SuPerFed-MM, TinyImageNet top-1 = 9.09; SuPerFed-LM, TinyImageNet top-5 = 25.10
superfed-2 | FedProx, EMNIST top-5 = 98.32
superfed-3 | L=0.0, LM top-1 = 33.61; L=0.4, MM top-5 = 89.87; L=0.9, LM top-1 = 48.06; L=0.7, MM top-1 = 47.02
superfed-3 | L=0.8, LM top-5 = 90.07; L=0.3, MM personal = ?
superfed-figure-2 | MM mu=0.01, nu=2 = 84.80; LM mu=0.01, nu=2 = 88.10; MM mu=1, nu=0 = 58.20; LM mu=0, nu=1 = 87.30
superfed-figure-2 | LM mu=1 global, nu=0 = 10.89
psinet-norm | FedAvg, top-1 = 84.13; FedAvg + BN, top-1 = 85.46; FedAvg + GN, top-1 = 83.34; Psi-Net, top-1 = 88.26
psinet-groups | FedAvg, top-1 = 65.32; G=10, top-1 = 68.23; G=20, top-1 = 68.17; G=100, top-1 = 67.23
psinet-depth | conv6 (C3-2), top-1 = 89-90
psinet-epochs | Psi-Net E=1, top-1 = 89.96; FedMA E=150, top-1 = 87.53; FedProx E=20, top-1 = 85.32
psinet-epochs | Psi-Net E=150, top-1 = 88.29
psinet-classes | FedAvg, 10x30 = 61; Psi-Net, 10x100 = 70; Psi-Net, 10x50 = 68
fedavgm-headline | FedAvg, top-1 = 30.1; FedAvgM, top-1 = 76.9
fedslr-1 | FedSLR (mixed), CIFAR-100 Non-IID = 82.19; Local, TinyImageNet IID = 3.86; FedDyn, CIFAR-10 IID = 92.61
fedslr-1 | FedRep, CIFAR-100 IID = 15.36; Ditto, TinyImageNet Non-IID = 58.30
fedslr-2 | FedAvg (*), CIFAR-10 GB = 893.92; FedSLR (GKR), TinyImageNet 10^6 = 5.34; SCAFFOLD, CIFAR-100 GB = 1787.83
fedslr-2 | FedSLR (mixed), CIFAR-10 10^6 = 3.96; FedRep, TinyImageNet GB = 885.78
fedslr-3 | lambda=1e-5, GKR GB = 819.44; lambda=1e-3, mixed 10^6 = 2.24; lambda=5e-4, mixed acc = 80.10
fedslr-4 | mu=1e-4, mixed std = 0.79; mu=5e-3, mixed acc = 81.82; mu=1e-2, mixed 10^6 = 5.56
fedslr-5 | eta_g=2, GKR GB = 894.06; eta_g=100, mixed acc = 78.33; eta_g=20, GKR 10^6 = 5.16
fedslr-6 | epochs=1, GKR acc = 58.20; epochs=4, mixed acc = 82.20; epochs=2, GKR acc = 64.51
fedslr-7 | mu=1e-3, mixed = 37.14; mu=1e-4, mixed = 44.16; mu=1e-5, mixed = 44.54
fedslr-8 | lambda=1e-3, GKR = 54.26; lambda=1e-4, GKR = 64.22; lambda=1e-5, GKR = 63.63
fedslr-9 | lambda=0, ms = 10.98; lambda=1e-3, ms = 6.53; lambda=5e-5, 10^6 = 6.56
persfl-2 | User 0, PersFL DS-3 = 94.5; User 9, Per-FedAvg DS-3 = 72.7; User 6, FedAvg DS-1 = 35.8; Avg, pFedMe DS-2 = 59.2
persfl-2 | SD, FedPer DS-3 = 7.9; User 4, FedPer DS-1 = 76.1
persfl-3 | User 2, FedAvg DS-1 = 88; User 7, pFedMe DS-3 = 98; Avg, PersFL DS-1 = 98.6; SD, FedAvg DS-1 = 1.7
persfl-3 | User 5, Per-FedAvg DS-2 = 86.8
persfl-4 | User 0, CIFAR-10 DS-1 final = 84.5; User 9, CIFAR-10 DS-2 optimal = 58.8; SD, MNIST DS-2 final = 1.2
persfl-4 | Avg, CIFAR-10 DS-3 final = 81.6
persfl-5 | User 0, CIFAR-10 DS-1 T = 12.2; User 5, MNIST DS-3 lambda = 0.05; User 4, CIFAR-10 DS-2 lambda = 0.75
persfl-5 | User 8, MNIST DS-2 T = 3.4
persfl-6 | User 6, CIFAR-10 DS-2 PersFL-GD = 57.9; Avg, MNIST DS-1 PersFL-GD = 98.7; SD, CIFAR-10 DS-3 PersFL-GD = 7.4
persfl-6 | User 9, MNIST DS-3 PersFL-GD = 99.8
persfl-7 | pFedMe, CIFAR-10 DS-2 = 1000; FedAvg, CIFAR-10 DS-3 = 100; PersFL, MNIST DS-2 = 25
persfl-7 | Per-FedAvg, CIFAR-10 DS-3 = 1000
fedavg-1 | 2NN C=0.0, IID B=inf = 1455; 2NN C=0.1, IID B=10 = 87; 2NN C=0.2, non-IID B=inf = 1528; 2NN C=1.0, non-IID B=10 = 380
fedavg-1 | CNN C=0.5, IID B=inf = 164; CNN C=0.0, non-IID B=10 = 956; CNN C=1.0, IID B=10 = 16; 2NN C=0.5, IID B=10 = 75
fedavg-2 | FedSGD E=1 B=inf, IID = 626; FedAvg E=5 B=10, IID = 20; FedAvg E=5 B=10, non-IID = 229; FedAvg E=20 B=inf, non-IID = 672
fedavg-2 | FedAvg E=1 B=50, IID = 65
fedavg-3 | FedSGD, 0.8 = 3750; FedAvg, 0.8 = 280; FedAvg, 0.85 = 2000; FedSGD, 0.82 = 6600
"""


@pytest.mark.parametrize("name", reproduce.TABLES)
def test_published_values_are_the_papers(name):
    ours = {f"{cell.row}, {cell.column}": cell.published for cell in reproduce.cells(name)}
    lines = [line.split(" | ")[1] for line in PUBLISHED.splitlines() if line.startswith(f"{name} | ")]
    papers = dict(entry.rsplit(" = ", 1) for line in lines for entry in line.split("; "))
    assert papers.items() <= ours.items()
    known = [value for value in ours.values() if value != "?"]
    assert len(papers) >= min(3, len(known))
    assert all(reading.number(value) is not None or value == "89-90" for value in known)


def test_averages_in_the_transcription_are_those_of_its_rows():
    """PersFL's Avg rows are means of the users above them, up to the rounding of 10 numbers with one digit."""
    for name in ("persfl-2", "persfl-3", "persfl-4", "persfl-6"):
        t = reproduce.TABLES[name]
        for i, column in enumerate(t.columns):
            users = [float(values[i]) for row, values in t.rows.items() if row.startswith("User")]
            assert abs(sum(users) / 10 - float(t.rows["Avg"][i])) < 0.11, (name, column)


# The commands


def test_every_command_parses_and_no_two_mean_the_same():
    seen = {}
    for command in COMMANDS:
        args = reproduce.arguments(command)
        meaning = command.split()[0], repr(sorted((k, v) for k, v in args.items() if k not in ("export", "eval_every")))
        assert seen.setdefault(meaning, command) == command
        assert args["dataset"] in ("cifar10", "cifar100", "mnist", "emnist", "tinyimagenet")


def test_commands_say_what_their_cells_are():
    """The paper's setting of a row and a column is in the arguments."""
    def run(table, row, column):
        command, measure = reproduce.TABLES[table].cell(row, column)
        return reproduce.arguments(command), measure

    args, measure = run("superfed-1", "SuPerFed-LM", "CIFAR-100 top-5")
    assert (args["dataset"], args["mix"], args["rounds"], measure) == ("cifar100", "layer", 300, "global/top5")
    args, measure = run("superfed-3", "L=0.4", "MM personal")
    assert (args["start"], args["rounds"], measure) == (0.4, 200, "personal@test/mean")
    args, _ = run("superfed-figure-4", "MM E=20", "B=4")
    assert (args["epochs"], args["batch_size"], args["rounds"], args["mu"], args["nu"]) == (20, 4, 100, 0.01, 2)
    args, _ = run("psinet-groups", "G=100", "top-1")
    assert (args["groups"], args["model"], args["per_client"], args["clients"]) == (100, "vgg16", 50, 10)
    args, measure = run("fedslr-1", "FedAvg", "TinyImageNet IID")
    assert (args["split"], args["model"], args["rounds"], args["fraction"], args["momentum"], args["client_test"], measure) == (
        "iid", "resnet18", 1000, 0.1, 0, 0.2, "personal/mean")
    assert run("fedslr-2", "FedSLR (GKR)", "CIFAR-10 10^6")[1] == run("fedslr-5", "eta_g=20", "GKR 10^6")[1] == "numbers/gkr"
    args, measure = run("fedslr-5", "eta_g=20", "mixed 10^6")
    assert (args["eta_g"], args["lambda_"], args["mu"], args["epochs"], measure) == (20, 1e-4, 1e-3, 2, "numbers/mixed")
    args, _ = run("fedslr-6", "epochs=3", "GKR acc")
    assert (args["epochs"], args["dataset"], args["split"]) == (3, "cifar100", "fedslr")
    args, measure = run("persfl-2", "User 7", "FedAvg DS-3")
    assert (args["rounds"], args["split"], args["per_client"], measure) == (100, "lognormal", 2, "personal/per_client/7")
    args, measure = run("persfl-3", "SD", "PersFL DS-1")
    assert (args["rounds"], args["model"], args["limit"], measure) == (100, "mnistnet", 6000, "users/PersFL/SD")
    commands, _ = reproduce.TABLES["fedavgm-figure-5"].cell("FedAvgM E=5 C=0.1", "alpha=0.05")
    for args in map(reproduce.arguments, commands):
        assert (args["alpha"], args["epochs"], args["fraction"], args["rounds"]) == (0.05, 5, 0.1, 10_000) and args["beta"] > 0
    for table, row, column, want in (
            ("fedavg-1", "2NN C=0.0", "non-IID B=inf", ("2nn", "shards", 0, 1, 0, 1, 1, [0.97], 8556)),
            ("fedavg-1", "CNN C=0.5", "IID B=10", ("mnistcnn", "iid", 0.5, 5, 10, 1, 1, [0.99], 36)),
            ("fedavg-2", "FedAvg E=20 B=50", "non-IID", ("mnistcnn", "shards", 0.1, 20, 50, 1, 1, [0.99], 852)),
            ("fedavg-3", "FedSGD", "0.82", ("tfcnn", "iid", 0.1, 1, 0, 0.9934, 1, [0.8, 0.82], 6600)),
            ("fedavg-3", "FedAvg", "0.85", ("tfcnn", "iid", 0.1, 5, 50, 0.99, 1, [0.8, 0.82, 0.85], 2000))):
        commands, measure = reproduce.TABLES[table].cell(row, column)
        rates = [args["lr"] for args in map(reproduce.arguments, commands)]
        step = 1 / 6 if want[0] == "2nn" else 1 / 3  # the paper's two grids
        assert np.diff(np.log10(rates)) == pytest.approx([step, step], abs=0.003)
        for args in map(reproduce.arguments, commands):
            assert want == tuple(args[name] for name in "model split fraction epochs batch_size lr_decay".split()) + (
                1 - args["momentum"], args["target"], args["rounds"])
            assert args["clients"] == 100 and args["client_test"] == 0 and float(measure.removeprefix("rounds_to/")) in args["target"]
    both = [reproduce.TABLES[name].cell(*cell)[0] for name, cell in (("fedavg-1", ("CNN C=0.1", "IID B=10")), ("fedavg-2", ("FedAvg E=5 B=10", "IID")))]
    assert both[0] == both[1]  # one setting in two tables


def test_commands_run_on_the_embedded_data_set(tmp_path, monkeypatch):
    """One of each file and method, and 20 by a seeded draw: two rounds, everything made small."""
    images = datasets.shapes(200, 100)
    monkeypatch.setattr(datasets, "shapes", lambda: images)
    smaller = ["--dataset", "shapes", "--limit", "200", "--clients", "10", "--rounds", "2", "--epochs",
               "1", "--batch-size", "5", "--eval-every", "2", "--device", "cpu"]
    drawn = random.Random(0).sample(COMMANDS, len(COMMANDS))
    kinds = {(c.split()[0], (re.search(r"--method \S+", c) or [""])[0]): c for c in drawn}
    for i, command in enumerate(dict.fromkeys([*kinds.values(), *drawn[:20]])):
        out = tmp_path / str(i)
        out.mkdir()
        file, *flags = reproduce.expand(command, out)
        flags = [re.sub("resnet18|vgg16|vgg9", "cnn", word) for word in flags] + smaller
        if "--alpha" in flags and "--split" not in flags:
            flags += ["--split", "dirichlet"]  # fedavgm.py's default for cifar10
        flags += ["--per-client", "2"] * ("--per-client" in flags)
        flags += ["--distill-epochs", "1"] * (file == "persfl.py")
        if "--groups" in flags and "0" != flags[flags.index("--groups") + 1]:
            flags += ["--groups", "5"]  # of 10 classes
        if "--depth" in flags:
            flags += ["--model", "vgg9"]
        try:
            importlib.import_module(file.removesuffix(".py")).main(flags)
        except SystemExit as stop:
            assert stop.code == 3, command  # a rate that is too large for so little data
        record = json.loads((out / "result.json").read_text())
        assert record["status"] in ("finished", "diverged") and len(record["rounds"]) <= 2, command


# The runner and the page, with a stand-in for the training: an accuracy of (seed + 40 + rounds) per cent

STAND_IN = """
import argparse, hashlib, json, pathlib, signal, sys, time
p = argparse.ArgumentParser()
for name, kind in (("lr", float), ("rounds", int), ("seed", int), ("split_seed", int), ("eval_every", int), ("out", str)):
    p.add_argument("--" + name.replace("_", "-"), type=kind, default={"lr": 0.1, "rounds": 10}.get(name, 0))
p.add_argument("--resume", action="store_true")
args = p.parse_args()
out, here = pathlib.Path(args.out), pathlib.Path(__file__).parent
out.mkdir(parents=True, exist_ok=True)
done = int((out / "state.pt").read_text()) if args.resume and (out / "state.pt").exists() else 0
with open(here / "log", "a") as log:
    log.write(f"{args.lr:g} {args.seed} from {done}\\n")
def write(status):
    top1 = (args.seed + 40 + done) / 100
    rows = [{"round": t + 1, "seconds": 90.0 if t == 0 and args.rounds == 3 else 6.0, "global": {"top1": top1}} for t in range(done)]
    names = ("stand_in.py", "common.py", "datasets.py", "engine.py", "records.py")
    sources = {n: hashlib.sha256((here / n).read_bytes()).hexdigest() for n in names}
    (out / "state.pt").write_text(str(done))
    (out / "result.json").write_text(json.dumps({
        "status": status, "args": vars(args), "environment": {"device": "a device", "sources": sources}, "rounds": rows,
        "final": {"global": {"top1": top1}}, "bytes_up": 0, "bytes_down": 0, "seconds_per_round": 6.0}))
def stop(*_):
    write("interrupted")
    sys.exit(130)
signal.signal(signal.SIGTERM, stop)
while done < args.rounds:
    time.sleep(DELAY)
    done += 1
write("finished")
"""


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A project with one table of two runs; the folder that it lies in."""
    (tmp_path / "stand_in.py").write_text(STAND_IN.replace("DELAY", "0"))
    for name in reproduce.SHARED:
        (tmp_path / name).write_text("")
    for name in ("HERE", "RESULTS", "RUNS"):
        monkeypatch.setattr(reproduce, name, tmp_path / {"HERE": "", "RESULTS": "results", "RUNS": "runs"}[name])
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(reproduce, "PAPERS", {"t": types.SimpleNamespace(TITLE="A paper")})
    t = table("t-1", "A table", "top-1", "A | 47.09\nB | ?",
              lambda row, column: ("stand_in.py" + " --lr 0.5" * (row == "B"), "global/top1"), 1, why={"B": "B is ours."})
    monkeypatch.setattr(reproduce, "TABLES", {"t-1": t})
    monkeypatch.setattr(reproduce, "arguments", lambda command: {"lr": 0.5 if "0.5" in command else 0.1, "rounds": 10})
    monkeypatch.setattr(reproduce, "device", lambda: "a device")
    fresh()
    yield tmp_path
    fresh()


def fresh():
    """As in a new process."""
    for cached in (reproduce.runs, reproduce.digest, reproduce.load, reproduce.seconds_per_round, reproduce.shown):
        cached.cache_clear()


def go(words=""):
    fresh()
    return reproduce.main(words.split())


def written(folder):
    return "".join((folder / "results" / name).read_text() for name in ("README.md", "t.md", "t-runs.md"))


def page(folder):
    """The pages, rebuilt."""
    go("--tables")
    return written(folder)


def log(folder):
    return (folder / "log").read_text().split("\n")[:-1] if (folder / "log").exists() else []


def test_what_is_missing_is_run_once_and_shown(small):
    assert "| A | 47.09 / · |" in page(small) and "| B | ? / · |" in page(small) and log(small) == []
    assert "B is ours." not in page(small) and "| [t-1](t.md#t-1) | A table | 2 | 0 | 0 | 2 |" in page(small)
    assert go("--seeds 2") == 0
    assert sorted(log(small)) == ["0.1 0 from 0", "0.1 1 from 0", "0.5 0 from 0", "0.5 1 from 0"]
    # accuracies .50 and .51: mean 50.5, standard deviation .5 * sqrt(2) = .7071; |50.5 - 47.09| = 3.41 is more than that
    assert "| A | 47.09 / 50.50 ± 0.71 (2) **!** |" in written(small) and "| B | ? / 50.50 ± 0.71 (2) |" in written(small)
    assert "| [`stand_in.py --lr 0.5`](t-1/stand_in-lr-0.5) | 0 1 | 10 | a device | 1.0 |  |" in written(small)
    assert "\n- B: B is ours.\n" in written(small) and "| [t-1](t.md#t-1) | A table | 2 | 2 | 0 | 0 |" in written(small)
    go("--seeds 2")
    assert len(log(small)) == 4 and not list(small.glob("results/**/state.pt"))


def test_the_page_is_a_function_of_the_records(small):
    go()
    first = written(small)
    assert page(small) == first and "| A | 47.09 / 50.00 (1) |" in first
    path = next(small.glob("results/t-1/stand_in/0/result.json"))
    path.write_text(path.read_text().replace('"final": {"global": {"top1": 0.5}}', '"final": {"global": {"top1": 0.25}}'))
    assert "| A | 47.09 / 25.00 (1) |" in page(small)
    assert "| B | ? / 50.00 (1) |" in page(small)


@pytest.mark.parametrize("trial", ["--only t-1", "--scale 1e-1", "--budget 1h"])
def test_a_trial_leaves_the_pages_alone(small, trial, capsys):
    before = page(small)
    assert go(trial) == 0
    assert len(log(small)) == 2 and written(small) == before and "not rebuilt" in capsys.readouterr().out
    assert page(small) != before


def test_results_of_other_sources_are_stale_until_accepted_or_run_again(small):
    go()
    (small / "common.py").write_text("# changed\n")
    assert "| A | 47.09 / 50.00 (1) [stale] |" in page(small) and page(small).count("| stale |") == 2
    go("--accept reviewed --only t-1/stand_in")
    assert "| stale |" not in written(small)  # both runs' names begin so
    entry = json.loads((small / "results" / "accepted.json").read_text())[0]
    assert entry["why"] == "reviewed" and set(entry["results"]) == {"t-1/stand_in/0", "t-1/stand_in-lr-0.5/0"}
    (small / "common.py").write_text("# changed again\n")
    assert page(small).count("| stale |") == 2
    assert len(log(small)) == 2
    go()
    assert len(log(small)) == 4 and "| stale |" not in written(small)


def test_acceptance_is_of_one_record(small):
    go()
    (small / "stand_in.py").write_text((small / "stand_in.py").read_text() + "# changed\n")
    go("--accept reviewed")
    path = next(small.glob("results/t-1/stand_in/0/result.json"))
    path.write_text(path.read_text().replace("0.5}}", "0.6}}"))
    assert "| A | 47.09 / 60.00 (1) [stale] |" in page(small) and page(small).count("| stale |") == 1


def test_a_result_that_is_gone_is_no_longer_accepted(small):
    go()
    (small / "common.py").write_text("# changed\n")
    go("--accept first --only t-1/stand_in")
    (small / "results/t-1/stand_in-lr-0.5/0/result.json").unlink()
    (small / "common.py").write_text("# changed again\n")
    go("--accept second")
    entries = json.loads((small / "results" / "accepted.json").read_text())
    assert [(entry["why"], list(entry["results"])) for entry in entries] == [("second", ["t-1/stand_in/0"])]


def test_a_record_of_other_arguments_does_not_count(small, capsys):
    go()
    path = next(small.glob("results/t-1/stand_in/0/result.json"))
    path.write_text(path.read_text().replace('"lr": 0.1', '"lr": 0.2'))
    assert "| A | 47.09 / · |" in page(small)
    go("--list --verbose")
    assert "  other arguments, 60 s: python stand_in.py --seed 0" in capsys.readouterr().out
    go()
    assert "| A | 47.09 / 50.00 (1) |" in page(small)


def test_a_budget_stops_a_run_which_then_goes_on_where_it_was(small):
    (small / "stand_in.py").write_text(STAND_IN.replace("DELAY", "0.2"))
    assert go("--only t-1/stand_in-lr-0.5 --budget 1s") == 0
    record = json.loads((small / "results/t-1/stand_in-lr-0.5/0/result.json").read_text())
    n = len(record["rounds"])
    assert record["status"] == "interrupted" and 0 < n < 10
    assert f"| B | ? / {40 + n}.00 (1) [{n} of 10 rounds] |" in page(small)
    go("--only t-1/stand_in-lr-0.5")
    assert log(small) == ["0.5 0 from 0", f"0.5 0 from {n}"] and "| B | ? / 50.00 (1) |" in page(small)


def test_ctrl_c_stops_the_run_and_the_tool(small, monkeypatch):
    (small / "stand_in.py").write_text(STAND_IN.replace("DELAY", "0.2"))
    popen = subprocess.Popen

    class Interrupted(popen):
        def wait(self, timeout=None):
            if not hasattr(self, "hit"):
                self.hit = True
                time.sleep(1)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    assert go() == 130
    monkeypatch.setattr(subprocess, "Popen", popen)
    assert len(log(small)) == 1 and len(list(small.glob("results/t-1/*/0/state.pt"))) == 1
    go()
    starts = [int(line.split()[-1]) for line in log(small)]
    assert len(starts) == 3 and sorted(starts)[:2] == [0, 0] and 0 < max(starts) < 10


def test_a_run_that_fails_is_named(small, capfd):
    (small / "stand_in.py").write_text("raise SystemExit(2)")
    assert go() == 1
    assert "failed  t-1/stand_in/0, exit code 2" in capfd.readouterr().out


def test_scaled_results_are_kept_apart_and_marked(small):
    go("--scale 0.3 --only t-1")
    assert len(list(small.glob("results/scale-0.3/t-1/*/0/result.json"))) == 2 and not (small / "results" / "t-1").exists()
    assert "| A | 47.09 / 43.00 (1) [3 of 10 rounds] |" in page(small)
    assert "| [`stand_in.py --rounds 3`](scale-0.3/t-1/stand_in) | 0 | 3 | a device | 1.7 |  |" in page(small)  # 90 + 6 + 6 s
    assert "| [t-1](t.md#t-1) | A table | 2 | 0 | 2 | 0 |" in page(small)
    go()
    assert "| A | 47.09 / 50.00 (1) |" in written(small) and "43.00" not in written(small)


def test_how_many_settings_the_best_is_of_is_said(small):
    reproduce.TABLES["t-2"] = table("t-2", "Another", "top-1", "User 0 | 40", lambda row, column: (
        ["stand_in.py", "stand_in.py --lr 0.5", "stand_in.py --lr 0.2"], "global/top1"), 1)
    go("--only t-1 --seeds 2")
    assert "| User 0 | 40 / 50.50 ± 0.71 (2) [2 of 3 settings tried] |" in page(small)  # and no verdict on a user


def test_rounds_to_a_target_are_shown_with_their_speed_up(small):
    """The fewest rounds count. A run that reached its target is not short; one that did not is said not to have."""
    def record(command, rounds_to, rounds):
        path = small / "results" / reproduce.place(command) / "0"
        path.mkdir(parents=True)
        rows = [{"round": t + 1, "seconds": 6.0, "top1": 0.5} for t in range(rounds)]
        sources = {name: hashlib.sha256((small / name).read_bytes()).hexdigest() for name in ("stand_in.py", *reproduce.SHARED)}
        (path / "result.json").write_text(json.dumps({
            "status": "finished", "args": {"lr": 0.5 if "0.5" in command else 0.1, "seed": 0, "split_seed": 0}, "rounds": rows, "final": {},
            "environment": {"device": "a device", "sources": sources}, "bytes_up": 0, "bytes_down": 0, "rounds_to": {"0.9": rounds_to}}))

    reproduce.TABLES.pop("t-1")
    reproduce.TABLES["t-2"] = table("t-2", "Rounds", "rounds", "slow | 90\nfast | 30\nnever | 40", lambda row, column: (
        [f"stand_in.py --{row}", f"stand_in.py --{row} --lr 0.5"], "rounds_to/0.9"), 1, base=lambda row, column: ("slow", column))
    fresh()
    for command, rounds_to, rounds in (("--slow", 8.25, 9), ("--slow --lr 0.5", None, 10), ("--fast --lr 0.5", 2.75, 3), ("--fast", 5.5, 6), ("--never", None, 10)):
        record(f"stand_in.py {command}", rounds_to, rounds)
    text = page(small)
    assert "| slow | 90 / 8.2 (1) [2 of 2 settings tried]; 1.0x / 1.0x |" in text
    assert "| fast | 30 / 2.8 (1) [2 of 2 settings tried]; 3.0x / 3.0x |" in text
    assert "| never | 40 / not reached [1 of 2 settings tried] |" in text
    assert reproduce.counts("t-2") == (3, 3, 0, 0)


def test_folders_of_two_machines_are_merged_by_copying(small):
    go("--only t-1/stand_in-lr-0.5")
    shutil.move(small / "results", small / "other")
    (small / "results").mkdir()
    go("--seeds 2")
    shutil.rmtree(small / "results/t-1/stand_in-lr-0.5/0")
    shutil.copytree(small / "other", small / "results", dirs_exist_ok=True)
    before = log(small)
    go("--seeds 2")
    assert log(small) == before and "| B | ? / 50.50 ± 0.71 (2) |" in page(small)


def test_records_of_a_cpu_count_on_a_gpu_and_half_precision_is_said(small, monkeypatch):
    go()
    for name, precision in (("stand_in", "fp32"), ("stand_in-lr-0.5", "bf16")):
        path = small / "results" / "t-1" / name / "0" / "result.json"
        record = json.loads(path.read_text())
        record["args"]["precision"] = precision
        path.write_text(json.dumps(record))
    usual = reproduce.arguments
    monkeypatch.setattr(reproduce, "arguments", lambda command: {**usual(command), "precision": "tf32"})
    before = log(small)
    go()
    assert log(small) == before and "| A | 47.09 / 50.00 (1) |" in page(small) and "| B | ? / 50.00 (1) [bf16] |" in page(small)
    assert page(small).count(" --precision bf16`") == 1


def test_a_run_interrupted_elsewhere_starts_anew(small, monkeypatch):
    """Its state can't be resumed on another kind of device."""
    folder = small / "results" / "t-1" / "stand_in" / "0"
    go("--only t-1/stand_in")
    record = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**record, "status": "interrupted", "rounds": record["rounds"][:4]}))
    (folder / "state.pt").write_text("4")
    monkeypatch.setattr(reproduce, "device", lambda: "another device")
    go("--only t-1/stand_in")
    assert log(small).count("0.1 0 from 0") == 2


def test_the_list_runs_nothing(small, capsys):
    def listed(words):
        capsys.readouterr()
        go(words)
        return capsys.readouterr().out

    every = listed("--list --verbose")
    assert "missing, an unknown time: python stand_in.py --lr 0.5 --seed 0 --split-seed 0 --out " in every
    assert "A: top-1 47.09" in every and "B: top-1 ?" in every
    titles, line, *_ = listed("--list").split("\n")
    assert titles.split()[:8] == ["table", "cells", "done", "short", "empty", "runs", "stale", "left"]
    assert line.split()[:8] == ["t-1", "2", "0", "0", "2", "2", "0", "2"]
    assert log(small) == []
    go("--only t-1/stand_in-lr-0.5")
    every = listed("--list --verbose")  # both runs are of one kind: 10 rounds of 6 seconds
    assert "missing, 60 s: python stand_in.py" in every and "done, 0 s: python stand_in.py --lr 0.5" in every
    assert listed("--list").split("\n")[1].split() == "t-1 2 1 0 1 2 0 1 60 s A table".split()


def test_refusals_are_one_line(small, capsys):
    for words, why in (("--quick --list", "--quick goes with --seeds alone"), ("--only nothing", "no such table or run"), ("--budget soon", "must be like 90s"),
                       ("--budget 0m", "above 0"), ("--accept=", "wants a reason"), ("--scale 2", "at most 1"), ("--verbose", "belongs to --list"), ("--unknown", "unrecognized")):
        refused(capsys, why, go, words)


def test_what_is_no_record_is_named(small, capsys):
    (small / "results" / "scale-old").mkdir(parents=True)
    path = small / "results" / "t-1" / "stand_in" / "0" / "result.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"algorithm": ')
    refused(capsys, f"{path} can't be read as a record; move it elsewhere", go, "--list")


def test_the_most_valuable_run_is_first_and_then_the_shortest(small, monkeypatch):
    def cell(row, column):
        return (f"baselines.py {row}" if row == "A" else f"x.py {row}"), "bytes"

    reproduce.TABLES["t-0"] = table("t-0", "", "top-1", "A | 1\nB | 1\nC | 1", cell, 0)
    fresh()
    monkeypatch.setattr(reproduce, "estimate", lambda r: {"x.py B": 5, "x.py C": 4}.get(r.command))
    found = [reproduce.result(c, seed) for c in reproduce.runs() for seed in (1, 0)]
    order = [(r.command, r.seed) for r in reproduce.by_value(found)]
    assert order[:5] == [("x.py C", 0), ("x.py B", 0), ("baselines.py A", 0), ("stand_in.py", 0), ("stand_in.py --lr 0.5", 0)]
    assert {seed for _, seed in order[5:]} == {1}


def test_users_are_averaged_over_seeds_before_their_deviation():
    """Two seeds of three users: averages .2, .4, .9; mean .5, deviation sqrt((.09 + .01 + .16) / 2)."""
    values = [[0.1, 0.5, 0.9], [0.3, 0.3, 0.9]]
    assert reading.combine(values, "users/PersFL/SD") == (pytest.approx(100 * (0.26 / 2) ** 0.5), None)
    assert reading.combine(values, "users/PersFL/Avg") == (pytest.approx(50), pytest.approx(0))


def test_measures_are_read_in_the_papers_units():
    record = {"final": {"users": {"PersFL": [0.25, 0.5], "T": [5, 25]}, "personal@test": {"mean": 0.5}}, "rounds": [],
              "bytes_up": 2e9, "bytes_down": 3e9, "parameters": 11_000_000, "args": {"rounds": 7}}
    for measure, value in (("users/PersFL/1", 50), ("users/T/1", 25), ("personal@test/mean", 50), ("bytes", 5),
                           ("parameters", 11), ("2*parameters", 22), ("args/rounds", 7)):
        assert reading.factor(measure) * reading.last(record, measure) == value
    assert reading.last(record, "users/PersFL/2") is None and reading.last(record, "latency/factorised_ms") is None


def test_quick_says_who_wins(small, monkeypatch, capsys):
    five, two = ((f"stand_in.py --rounds {n}", "global/top1") for n in (5, 2))
    claims = [Claim("paper", "five rounds beat two", five, two), Claim("paper", "two beat five", two, five)]
    monkeypatch.setattr(reproduce, "CLAIMS", claims)
    assert go("--quick") == 1
    shown = capsys.readouterr().out
    assert "pass   45.00  42.00  paper: five rounds beat two" in shown and "FAIL   42.00  45.00  paper: two beat five" in shown
    assert "1 of 2 claims hold" in shown
    assert len(log(small)) == 2
    assert go("--quick --seeds 2") == 1
    shown = capsys.readouterr().out
    assert "pass   45.00  42.00   pass   46.00  43.00  paper: five" in shown and "1 of 2 claims hold; each of seeds 0 to 1" in shown
    assert len(log(small)) == 4


# What is committed


def test_committed_results_belong_to_runs():
    known = set(map(reproduce.place, reproduce.runs()))
    for name in reproduce.TABLES:
        for path in [*reproduce.RESULTS.glob(f"{name}/*"), *reproduce.RESULTS.glob(f"scale-*/{name}/*")]:
            assert f"{path.parent.name}/{path.name}" in known, path
    for command in reproduce.runs():
        assert all(r.state != "other arguments" for s in reproduce.scales() for r in reproduce.results(command, s)), command


def test_committed_records_were_made_by_the_commits_that_they_name():
    """Their source files are those of that commit, byte by byte."""
    git = ["git", "-C", str(reproduce.HERE)]
    if not shutil.which("git") or not (reproduce.HERE / ".git").exists() or "true" in subprocess.run(
            [*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True).stdout:
        pytest.skip("no git checkout, or not all of it")
    made = set()
    for path in reproduce.RESULTS.rglob("result.json"):
        environment = json.loads(path.read_text())["environment"]
        for environment in (environment, *environment.get("resumed", [])):
            made |= {(environment["commit"].rstrip("+"), name, digest) for name, digest in environment["sources"].items()}
            assert all("/" not in name for name in environment["sources"])  # not of tables/
    assert made
    for commit, name, digest in made:
        tree = subprocess.run([*git, "ls-tree", "-r", "--name-only", commit], capture_output=True, check=True, text=True).stdout
        path = min((path for path in tree.split() if path.rpartition("/")[2] == name), key=lambda path: path.count("/"))
        file = subprocess.run([*git, "show", f"{commit}:{path}"], capture_output=True, check=True).stdout
        assert hashlib.sha256(file).hexdigest() == digest, (commit, path)


def test_the_committed_pages_are_those_of_the_committed_records_and_of_todays_source_files():
    """After a change of a source file: python reproduce.py --accept "why", if its records stand; then --tables, and make docs."""
    def committed(name):
        return (reproduce.RESULTS / f"{name}.md").read_text()

    assert committed("README") == reproduce.overview()
    for paper in reproduce.PAPERS:
        assert (committed(paper), committed(f"{paper}-runs")) == reproduce.pages(paper), paper


def test_no_page_is_larger_than_60_kb_even_when_every_run_is_made(monkeypatch):
    record = {"args": {}, "environment": {"device": "NVIDIA H200"}, "rounds": [{"seconds": 6e5}], "status": "finished"}

    def view(command, measure, scale):
        folder = reproduce.RESULTS / reproduce.place(command)
        seeds = [reproduce.Result(command, seed, 1.0, folder / str(seed), "stale", record, "") for seed in range(5)]
        return reproduce.Shown(seeds, 47.06, 1.25, False, "")

    monkeypatch.setattr(reproduce, "view", view)
    monkeypatch.setattr(reproduce, "scales", lambda: [1.0])
    monkeypatch.setattr(reproduce, "arguments", lambda command: {"rounds": 1})
    committed = [path.read_text() for path in reproduce.RESULTS.glob("*.md")]
    assert max(len(text.encode()) for text in [*committed, *itertools.chain(*map(reproduce.pages, reproduce.PAPERS))]) <= 60_000


def test_every_table_is_a_papers_and_every_explanation_a_cells():
    for name, t in reproduce.TABLES.items():
        assert name.split("-")[0] in reproduce.PAPERS
        assert t.why.keys() <= {"All", *t.rows, *(f"{row}/{column}" for row in t.rows for column in t.columns)}


def test_it_starts_as_a_program():
    program = [sys.executable, reproduce.HERE / "reproduce.py"]
    done = subprocess.run([*program, "--scale", "2"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("reproduce.py: error: argument --scale: 2 must be above 0")
    head = subprocess.Popen([*program, "--list", "--only", "psinet"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    head.stdout.close()
    assert head.stderr.read() == b""
