"""The record, the state on disk, resuming, interruption, divergence, plots: what fl.run.Run
promises."""

import importlib.machinery
import json
import os
import pathlib
import platform
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import baselines
import common
import fedavg
import fl.data
import fl.formats
import fl.machine
import fl.own_method
import fl.provenance
import fl.run
import fl.state
import persfl
import psinet
import superfed
from conftest import QUICK as SOME
from conftest import ended, equal, federation, killed, refused, run, same, small, write_every_round
from fl.provenance import SHARED
from fl.records import read

HERE = pathlib.Path(fedavg.__file__).parent
QUICK = [*SOME, "--model", "mnistnet"]
GLOBAL = {"top1", "top5", "loss", "ece", "mce"}
PERSONAL = {"mean", "weighted_mean", "std", "worst_decile", "top5", "loss", "ece", "mce"}


def test_the_record(tmp_path):
    """main returns it, too, with a row for each round."""
    main = fedavg.main([*QUICK, "--rounds", "5", "--eval-every", "2", "--out", str(tmp_path)])
    record = read(tmp_path / "result.json")
    assert [row["round"] for row in main["rounds"]] == [1, 2, 3, 4, 5]
    assert json.loads(json.dumps(main["final"])) == record["final"]
    assert record["algorithm"] == "fedavg" and record["args"]["fraction"] == 0.5
    assert record["diverged"] is False and record["parameters"] == 308_310
    # 5 rounds, 4 clients, 4 bytes
    assert record["bytes_up"] == record["bytes_down"] == 5 * 4 * 4 * 308_310
    split = record["split"]
    assert split["clients"] == 8 and split["sizes"] == [38] * 8 and len(split["fingerprint"]) == 16
    rounds = record["rounds"]
    assert [row["round"] for row in rounds] == [1, 2, 3, 4, 5]
    assert all(row["seconds"] >= 0 for row in rounds)
    evaluated = [2, 4, 5]  # every second round, and the last
    assert [row["round"] for row in rounds if "global" in row] == evaluated
    measured = [row["round"] for row in rounds if "evaluation_seconds" in row]
    assert measured == evaluated and record["peak_memory_mb"] > 50
    median = np.median([row["seconds"] for row in rounds])
    assert record["seconds_per_round"] == pytest.approx(median, abs=0.01)
    for row in rounds[1::2]:
        assert row["personal"]["mean"] <= row["personal"]["top5"] <= 1
        assert set(row["global"]) == GLOBAL and set(row["personal"]) == PERSONAL
    final, best = record["final"], record["best"]
    assert final["global"] == pytest.approx({**rounds[4]["global"], "round": 5}, rel=1e-7)
    assert set(final["personal"]) == PERSONAL | {"round", "per_client"}
    for part, name in (("global", "top1"), ("personal", "mean")):
        most = max(rounds[t - 1][part][name] for t in evaluated)
        assert best[part][name] == pytest.approx(most, rel=1e-7)
    assert np.mean(final["personal"]["per_client"]) == pytest.approx(final["personal"]["mean"])
    assert 0 <= final["global"]["top1"] <= final["global"]["top5"] <= 1
    environment = record["environment"]
    assert environment["torch"] == torch.__version__
    assert set(environment["sources"]) == {"fedavg.py", *SHARED}
    assert all(re.fullmatch("[0-9a-f]{64}", z) for z in environment["sources"].values())
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("module, more", [(baselines, ["--method", "ditto"]), (fedavg, [])])
def test_the_records_command_makes_the_run_again(module, more, tmp_path):
    out = tmp_path / "a folder"
    argv = [*more, *QUICK, "--split", "iid", "--rounds", "3", "--eval-every", "1"]
    killed(module, argv, out, lambda t, _: t == 2)
    first, _ = run(module, [*argv, "--resume"], out)
    file, *words = shlex.split(first["command"])
    assert file == pathlib.Path(module.__file__).name and "argv" not in first["args"]
    again = module.main(words)
    assert again["command"] == first["command"] and again["final"] == first["final"]
    assert {**again["args"], "resume": True} == first["args"]


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedma"])
def test_a_finished_run_goes_on_with_more_rounds(method, tmp_path):
    """2 rounds and then 2 more give the bits of 4. The second round, as the last of 2, was
    evaluated."""
    module, own = (fedavg, []) if method == "fedavg" else (baselines, ["--method", method])
    argv = [*QUICK, *own, "--eval-every", "4"]
    whole, state = run(module, [*argv, "--rounds", "4"], tmp_path / "whole")
    run(module, [*argv, "--rounds", "2"], tmp_path / "parts")
    parts, longer = run(module, [*argv, "--rounds", "4", "--resume"], tmp_path / "parts")
    assert equal(state, longer)
    assert parts["args"]["rounds"] == 4 and parts["status"] == "finished"
    for name in ("global", "personal"):
        assert parts["rounds"][1].pop(name)
    assert same(whole, {**parts, "best": whole["best"]})


def test_an_interrupted_run_may_end_sooner(tmp_path, capsys):
    """Killed in the third of 6 rounds, after the evaluation of round 2, and resumed with 3: the
    bits of a run of 3 rounds."""
    argv, parts = [*QUICK, "--eval-every", "2"], tmp_path / "parts"
    whole, state = run(fedavg, [*argv, "--rounds", "3"], tmp_path / "whole")
    killed(fedavg, [*argv, "--rounds", "6"], parts, lambda t, _: t == 2)
    words = "belongs to --rounds 6, this run has 1: 2 are done"
    again = [*argv, "--rounds", "1", "--resume", "--out", str(parts)]
    refused(capsys, words, fedavg.main, again)
    record, sooner = run(fedavg, [*argv, "--rounds", "3", "--resume"], parts)
    assert equal(state, sooner) and same(whole, record) and record["args"]["rounds"] == 3


@pytest.mark.parametrize("module, own, why", [
    (superfed, [], "Phase II's start, L*R, depends on R"),
    (persfl, ["--fraction", "1", "--client-val", "0.2", "--split", "iid"],
     "Stage 2 follows the last round"),
    (baselines, ["--method", "fedavg-ft"], "clients fine-tune after the last round"),
    (baselines, ["--method", "fedspa"], "the masks' pace")])
def test_more_rounds_are_refused_where_their_number_matters(module, own, why, tmp_path, capsys):
    argv = [*QUICK, *own, "--limit", "160", "--client-test", "0.2", "--rounds", "1",
            "--out", str(tmp_path)]
    module.main(argv)
    words = f"belongs to --rounds 1, this run has 2: {why}"
    with pytest.raises(SystemExit):
        module.main([*argv, "--rounds", "2", "--resume"])
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_method_may_record_tensors_and_have_a_path_among_its_flags(tmp_path):
    argv = [*QUICK, "--out", str(tmp_path)]
    parser = common.parser(None)
    parser.add_argument("--mine", type=pathlib.Path, default=pathlib.Path("here"))
    for more in ([], ["--resume"]):
        federation = common.Federation(common.parse(parser, {}, [*argv, *more]))
        made = common.Run(__file__, federation)
        state = SimpleNamespace(w=federation.initial_weights())
        for _ in made.rounds(state):
            if made.evaluates():
                own = {"mine": torch.tensor([1.5, 2]), "other": np.float32(3)}
                made.log(federation.evaluate(state.w), **own)
        record = read(tmp_path / "result.json")
        assert record["status"] == "finished" and record["args"]["mine"] == "here"
        assert record["final"]["mine"] == [1.5, 2] and record["final"]["other"] == 3


def test_resume_overwrites_no_record(tmp_path):
    """That of an interrupted run without its state is moved aside. (faults.md has a finished one.)
    """
    run(fedavg, QUICK, tmp_path)
    (tmp_path / "state.pt").unlink()
    before = (tmp_path / "result.json").read_bytes()
    interrupted = before.replace(b'"status": "finished"', b'"status": "interrupted"')
    (tmp_path / "result.json").write_bytes(interrupted)
    run(fedavg, [*QUICK, "--resume"], tmp_path)
    assert (tmp_path / "result.previous.json").read_bytes() == interrupted


def test_a_resumed_record_names_every_environment(tmp_path, monkeypatch):
    """Rounds keep the versions that they were done by, and a plot of a finished run changes none.
    """
    argv = [*QUICK, "--rounds", "3", "--eval-every", "2"]
    killed(fedavg, argv, tmp_path, lambda t, _: t == 2)
    then = read(tmp_path / "result.json")["environment"]
    monkeypatch.setattr(platform, "python_version", lambda: "99")
    record, _ = run(fedavg, [*argv, "--resume"], tmp_path)
    assert {**record["environment"], "resumed": None} == {**then, "resumed": None}
    assert [now["python"] for now in record["environment"]["resumed"]] == ["99"]
    monkeypatch.setattr(platform, "python_version", lambda: "100")
    before = (tmp_path / "result.json").read_bytes()
    run(fedavg, [*argv, "--resume", "--plot"], tmp_path)
    assert (tmp_path / "result.json").read_bytes() == before


def full_disk(monkeypatch, *names):
    """Has the disk be full for files of these names."""
    write = fl.run.Run.write

    def full(self, name, put):
        if name in names:
            part = self.out / f"{name}.part"
            part.unlink(missing_ok=True)
            part.symlink_to("/dev/full")
        return write(self, name, put)

    monkeypatch.setattr(fl.run.Run, "write", full)


@pytest.mark.parametrize("name", ["state.pt", "model.pt", "result.json"])
def test_a_full_disk(name, tmp_path, capsys):
    """While it is full the run goes on and says so. At the end only a missing record is a fault.
    What was there stays, and when there is room again --resume writes it all."""
    argv, out = [*QUICK, "--rounds", "4", "--eval-every", "1"], tmp_path / "out"
    killed(fedavg, argv, out, lambda t, _: t == 2)
    before = (out / name).read_bytes() if (out / name).exists() else None
    with pytest.MonkeyPatch.context() as patch:
        write_every_round(patch)
        full_disk(patch, name)
        try:
            fedavg.main([*argv, "--resume", "--out", str(out)])
            code = 0
        except SystemExit as stop:
            code = stop.code
    said, error = capsys.readouterr()
    words = f"{name} can't be written: No space left on device"
    fault = name == "result.json"
    assert code == 2 * fault and error.count("\n") == fault == error.count(words)
    assert "finished after 4 of 4" in said
    times = 1 if name == "model.pt" else 2  # after round 3, and at the end
    assert said.count(words) == times and not list(out.glob("*.part"))
    assert ((out / name).read_bytes() if before else None) == before
    record, state = run(fedavg, [*argv, "--resume"], out)
    whole, want = run(fedavg, argv, out / "whole")
    assert equal(state, want) and same(record, whole) and (out / name).exists()


def test_a_disk_too_full_for_state_and_model(tmp_path, capsys, monkeypatch):
    """Then what was trained is lost: a fault, though the record is there."""
    full_disk(monkeypatch, "state.pt", "model.pt")
    with pytest.raises(SystemExit, match="2"):
        fedavg.main([*QUICK, "--rounds", "1", "--out", str(tmp_path)])
    assert capsys.readouterr().err.endswith(
        "model.pt can't be written: No space left on device; mend that, and run it again\n")
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_the_state_is_written_when_that_is_worth_it(tmp_path, monkeypatch):
    """A clock that lets every write take 40 seconds and every round 100: 40 s are a twentieth of
    the 800 s that must pass before the next."""
    seconds, put, sample, written = [0.0], fl.state.put, common.Federation.sample, []

    def slow(file, state, **more):
        written.append(len(more["history"]))
        seconds[0] += 40
        put(file, state, **more)

    def begins(self, *args):
        seconds[0] += 100
        return sample(self, *args)

    monkeypatch.setattr(fl.run.time, "monotonic", lambda: seconds[0])
    monkeypatch.setattr(fl.state, "put", slow)
    monkeypatch.setattr(common.Federation, "sample", begins)
    run(fedavg, [*QUICK, "--rounds", "21", "--eval-every", "30", "--limit", "40", "--clients", "2",
                 "--per-client", "4"], tmp_path)
    assert written == [1, 10, 19, 21]
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["model.pt", "result.json", "state.pt"]


def test_neither_a_reader_nor_what_only_unix_has_is_needed(toy, tmp_path):
    """As on Windows: no fcntl, resource, pwd, grp, termios, and a C library that can't be opened by
    no name. Nobody reads on after the first line (`| head -1`), and the run ends nevertheless."""
    code = f"""
import sys; sys.path.insert(0, {str(HERE)!r})
import torch, torchvision
for name in ("fcntl", "resource", "pwd", "grp", "termios", "posix_ipc"): sys.modules[name] = None
for name in [n for n in sys.modules if n.startswith("filelock")]: del sys.modules[name]
import ctypes, os, warnings
warnings.simplefilter("ignore")
def missing(*_): raise TypeError
ctypes.CDLL = missing
del os.sched_getaffinity
import fedavg
fedavg.main(sys.argv[1:])
fedavg.main([*sys.argv[1:], "--resume"])
"""
    process = subprocess.Popen([sys.executable, "-c", code, *small(toy), "--rounds", "4", "--out",
                                str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(timeout=100) == 0
    record = read(tmp_path / "result.json")
    assert record["peak_memory_mb"] is None
    assert record["status"] == "finished" and len(record["rounds"]) == 4


def test_divergence_is_recorded_and_the_last_finite_state_kept(tmp_path, capsys, monkeypatch):
    train = common.Federation.train

    def exploding(self, client_update, S, t, **options):
        w_k = train(self, client_update, S, t, **options)
        return w_k * float("inf") if t == 3 else w_k

    monkeypatch.setattr(common.Federation, "train", exploding)
    write_every_round(monkeypatch)
    argv = [*QUICK, "--rounds", "9", "--eval-every", "2", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as stop:
        fedavg.main(argv)
    words = "round 4: diverged, state.w is not finite; --resume would go on from round 4"
    assert stop.value.code == 3 and words in capsys.readouterr().out
    record = read(tmp_path / "result.json")
    last = record["rounds"][-1]
    assert record["diverged"] is True and last["round"] == 4 and last["diverged"] is True
    assert record["final"]["global"]["round"] == 2
    kept = torch.load(tmp_path / "state.pt", weights_only=True)
    assert kept["state"]["w"].isfinite().all() and len(kept["history"]) == 3


def test_the_accuracies_per_client_are_of_the_round_that_final_names(tmp_path, monkeypatch):
    """A round that is evaluated but then found to have diverged leaves nothing of itself in
    `final`."""
    evaluate, seen = common.Federation.evaluate, []

    def failing(self, w):
        seen.append(w)
        return {**evaluate(self, w), **({"loss": float("nan")} if len(seen) == 2 else {})}

    monkeypatch.setattr(common.Federation, "evaluate", failing)
    argv = [*QUICK, "--lr", "0.1", "--rounds", "6", "--eval-every", "2", "--out", str(tmp_path)]
    with pytest.raises(SystemExit):
        fedavg.main(argv)
    personal = read(tmp_path / "result.json")["final"]["personal"]
    assert personal["round"] == 2
    assert np.mean(personal["per_client"]) == pytest.approx(personal["mean"])


def test_divergence_in_the_first_round_leaves_no_state(tmp_path, capsys):
    """And neither the state nor the record of an earlier run in the same folder."""
    run(fedavg, QUICK, tmp_path)
    with pytest.raises(SystemExit) as stop:
        fedavg.main([*QUICK, "--lr", "1e30", "--out", str(tmp_path)])
    assert stop.value.code == 3 and "no state was written yet" in capsys.readouterr().out
    assert read(tmp_path / "result.json")["diverged"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model.previous.pt", "result.json", "result.previous.json", "state.previous.pt"]


def test_ctrl_c_amid_a_client_update(toy, tmp_path):
    """In a thread that trains a client, in round 4 of 6: one line says how to go on, the program
    ends at once with code 130, and --resume gives the bits of a run that was left alone."""
    argv = [*small(toy), "--rounds", "6", "--eval-every", "3", "--parallel", "2"]
    (tmp_path / "mine.py").write_text(f"""
import sys; sys.path.insert(0, {str(HERE)!r})
import pathlib, threading, time, common, fedavg, fl.run
fl.run.Run.cost = property(lambda run: 0.0, lambda run, seconds: None)  # writes every round
batch, plan = common.Federation.batch, common.Federation.plan
rounds = []
def noted(self, k, images, t, *more, **options):
    rounds.append(t)
    return plan(self, k, images, t, *more, **options)
def waiting(self, *given):
    if rounds[-1] == 3:
        assert threading.current_thread() is not threading.main_thread()
        pathlib.Path("now").touch()
        time.sleep(5)
    return batch(self, *given)
common.Federation.plan, common.Federation.batch = noted, waiting
fedavg.main(sys.argv[1:])
""")
    process = subprocess.Popen([sys.executable, "mine.py", *argv, "--out", "cut"], cwd=tmp_path,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "now").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    code, _, error = ended(process)
    line = "\ninterrupted; the same command with --resume goes on from round 4\n"
    assert (code, error) == (130, line)
    record, state = run(fedavg, [*argv, "--resume"], tmp_path / "cut")
    whole, want = run(fedavg, argv, tmp_path / "whole")
    assert equal(state, want) and same(record, whole)


def test_kill_9_at_any_moment(toy, tmp_path):
    """At a random moment after a state was written. Resumed, it has the bits of a run that was left
    alone."""
    argv, out = [*small(toy), "--rounds", "150", "--eval-every", "50"], tmp_path / "killed"
    argv += ["--method", "scaffold", "--parallel", "1"]
    process = subprocess.Popen([sys.executable, HERE / "baselines.py", *argv, "--out", str(out)],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (out / "state.pt").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.5))
    process.kill()
    process.communicate()
    record, state = run(baselines, [*argv, "--resume"], out)
    whole, want = run(baselines, argv, tmp_path / "whole")
    assert equal(state, want) and same(record, whole)


def test_a_loop_that_is_left_has_no_record(tmp_path, capsys):
    """By `break`. The state of the rounds before lies there."""
    fed = federation([*QUICK, "--limit", "80", "--clients", "4", "--out", str(tmp_path)])
    made, state = common.Run(fedavg.__file__, fed), SimpleNamespace(w=fed.initial_weights())
    for t in made.rounds(state):
        if t == 1:
            break
    refused(capsys, "the loop over run.rounds was left before its end (by `break`?)", made.record)
    assert read(tmp_path / "result.json")["status"] == "unfinished"


def test_plots(tmp_path):
    out = tmp_path / "no $^$ mathematics"
    run(fedavg, [*QUICK, "--plot"], out)
    for name in ("curves.png", "clients.png", "split.png"):
        assert (out / name).read_bytes()[:4] == b"\x89PNG"


def test_the_commit_is_recorded(tmp_path, monkeypatch):
    """With a plus for a file that isn't in it as it is: changed, new, ignored, or from elsewhere;
    other files don't matter."""
    if not shutil.which("git"):
        pytest.skip("no git")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))  # of no checkout around it
    here, mine = tmp_path / "here", tmp_path / "mine.py"
    here.mkdir()
    files = [here / name for name in ("records.py", "fedavg.py", "other.py")]
    for path in (mine, *files):
        path.write_text("one\n")
    monkeypatch.setattr(fl.provenance, "ROOT", here)
    assert fl.provenance.commit(files) is None  # no checkout

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", "-C", here, *who, *words], capture_output=True, text=True,
                              check=True)
        return done.stdout.strip()

    (here / ".gitignore").write_text("ignored.py\n")
    git("init", "-q"), git("add", "."), git("commit", "-q", "-m", "one")
    (here / "new.py").write_text("one\n"), (here / "ignored.py").write_text("one\n")
    files[2].write_text("two\n")
    head = git("rev-parse", "HEAD")
    assert fl.provenance.commit(files[:2]) == head
    for more in (files[2], here / "new.py", here / "ignored.py", mine):
        assert fl.provenance.commit([*files[:2], more]) == f"{head}+"


def test_the_record_has_the_file_of_a_model_from_elsewhere(toy, tmp_path):
    """And of one that psinet.py wraps. The file may say what a model is in any way that Python has.
    """
    (tmp_path / "mine.py").write_text("""from __future__ import annotations
import dataclasses
import functools
from torch import nn

@dataclasses.dataclass
class Width:
    hidden: int

def net(classes: int, width: Width):
    first, last = nn.Linear(4, width.hidden), nn.Linear(width.hidden, classes)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), last)

small = functools.partial(net, width=Width(5))
""")
    for module, more in ((fedavg, []), (psinet, ["--groups", "0"])):
        argv = ["--dataset", toy, "--model", f"{tmp_path}/mine.py:small", "--split", "iid",
                "--clients", "4", "--rounds", "1", "--device", "cpu", *more]
        record, _ = run(module, argv, tmp_path / module.__name__)
        sources = {f"{module.__name__}.py", "mine.py", *SHARED}
        assert set(record["environment"]["sources"]) == sources


def test_a_run_waits_for_another_that_downloads(tmp_path, capsys, monkeypatch):
    """And reads what that one has made. Here the other is this thread."""
    monkeypatch.setattr(fl.formats, "read_torchvision", lambda *_: pytest.fail("downloaded twice"))
    path, found, x = tmp_path / "cifar10.npz", [], np.zeros((20, 32, 32, 3), np.uint8)
    with fl.machine.one_at_a_time(path):
        thread = threading.Thread(target=lambda: found.append(fl.data.fetch("cifar10", path)))
        thread.start()
        while "another run gets cifar10" not in capsys.readouterr().out:
            time.sleep(0.01)
        assert not found
        np.savez(path, x_train=x, y_train=np.arange(20) % 10, x_test=x, y_test=np.arange(20) % 10)
    thread.join(10)
    assert found[0]["x_train"].shape == x.shape


def test_two_runs_in_one_folder_are_refused(tmp_path, capsys):
    """The second, while the first is under way; nothing of the first is touched, and the folder is
    free again afterwards."""
    argv = [*QUICK, "--out", str(tmp_path / "run")]
    fed = federation(argv)
    rounds = fl.run.Run(fedavg.__file__, fed).rounds(SimpleNamespace(w=torch.zeros(2)))
    next(rounds)
    refused(capsys, f"another run (process {os.getpid()}) is writing to", fedavg.main, argv)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    rounds.close()
    fedavg.main(argv)


# What the pages show


def lines_of(first):
    """The block of code that begins with that line, in README.md, docs/run.md or docs/extend.md."""
    pages = ("README.md", "docs/run.md", "docs/extend.md")
    text = "".join((HERE / name).read_text() for name in pages)
    return textwrap.dedent(text[text.index(f"    {first}\n") :].split("\n\n")[0])


def test_the_pages_lines_read_numbers_of_a_comparison(tmp_path):
    runs = [run(fedavg, [*QUICK, "--seed", str(seed)], tmp_path / str(seed))[0]
            for seed in range(3)]
    names = {}
    exec(lines_of("import json, numpy").replace("runs/compare/fedavg", str(tmp_path)), names)
    assert names["last"] == [record["final"]["personal"]["mean"] for record in runs]
    assert names["clients"] == runs[0]["final"]["personal"]["per_client"]


def test_the_pages_lines_load_a_trained_model(tmp_path):
    """The global one has the record's accuracy on the central test images, client 3's on its own.
    """
    argv = [*QUICK, "--limit", "1500", "--rounds", "4", "--lr", "0.05", "--transform", "normalize",
            "--method", "ditto", "--save-clients"]
    record, _ = run(baselines, argv, tmp_path)
    lines = lines_of("import json, torch, common").replace("runs/fedavg-shapes-0", str(tmp_path))
    for a, b, wanted in (("[:500]", "", record["final"]["global"]["top1"]), (
            "data.central[:500]", "split.test[3]", record["final"]["personal"]["per_client"][3])):
        names = {}
        exec(lines.replace(a, b), names)
        if "split" in b:
            z_3 = {name: z[3] for name, z in torch.load(tmp_path / "clients.pt").items()}
            names["model"].load_state_dict(z_3)
            x, y = names["x"], names["federation"].labels[names["test"]]
            names["accuracy"] = (names["model"](x).argmax(1) == y).float().mean()
        assert names["accuracy"].item() == pytest.approx(wanted, abs=1e-6) and wanted > 0.15


def test_the_pages_own_model_trains(tmp_path):
    """In every kind of file; the record names the model and the file."""
    (tmp_path / "mymodels.py").write_text(lines_of("from torch import nn"))
    model = f"{tmp_path}/mymodels.py:Mine"
    for module, more in ((fedavg, []), (psinet, ["--depth", "0"]),
                         (baselines, ["--method", "fedper"])):
        argv = [*QUICK, "--limit", "80", "--clients", "4", "--client-test", "0.2", "--rounds", "1"]
        record, _ = run(module, [*argv, "--model", model, *more], tmp_path / module.__name__)
        assert record["args"]["model"] == model
        assert "mymodels.py" in record["environment"]["sources"]


def test_the_pages_own_split_is_taken(tmp_path):
    """10,000 images in the ratio 1 : 2 : 3 : 4. The record names the file."""
    file = tmp_path / "mysplits.py"
    file.write_text(lines_of("import numpy as np"))
    argv = [*QUICK, "--limit", "10000", "--clients", "4", "--client-test", "0", "--rounds", "1",
            "--split", f"{file}:by_size", "--epochs", "1"]
    split = federation(argv).split
    assert [len(index) for index in split.train] == [1000, 2000, 3000, 4000]
    assert len(np.unique(np.concatenate(split.train))) == 10_000
    again, other = (federation([*argv, "--split-seed", seed]).split for seed in ("0", "1"))
    assert again.fingerprint() == split.fingerprint() != other.fingerprint()
    record, _ = run(fedavg, [*argv, "--limit", "500"], tmp_path / "run")
    assert record["split"]["sizes"] == [50, 100, 150, 200]
    assert "mysplits.py" in record["environment"]["sources"]


def test_a_loop_may_record_what_every_client_keeps(tmp_path, capsys):
    """Rows become a list over all clients; single numbers are printed."""
    def main(out):
        fed = federation([*QUICK, "--limit", "80", "--clients", "4", "--out", str(tmp_path / out)])
        run = common.Run(fedavg.__file__, fed)
        state = SimpleNamespace(w=fed.initial_weights(), s=fed.per_client(torch.tensor(1.0)))
        for _ in run.rounds(state):
            state.s[[1]] = torch.tensor(0.5)
            if run.evaluates() and out != "silent":
                run.log(s=state.s, sum=float(state.s.sum()))
        return run.record()

    assert not main("silent")["final"]
    assert "no round has called run.log" in capsys.readouterr().out
    record = main("a")
    assert record["rounds"][-1]["s"] == record["final"]["s"] == [1.0, 0.5, 1.0, 1.0]
    assert "sum 3.5" in capsys.readouterr().out


def test_tensorboard_gets_every_measure_or_is_missed_in_one_line(tmp_path, capsys, monkeypatch):
    written = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            written.append((str(folder), purge_step))

        def flush(self):
            pass

        def add_scalar(self, name, value, number):
            written.append((name, value, number))

    argv = [*QUICK, "--limit", "80", "--clients", "4", "--eval-every", "1", "--tensorboard"]
    module = types.ModuleType("tensorboard")
    module.__spec__, module.SummaryWriter = importlib.machinery.ModuleSpec("t", None), SummaryWriter
    for name in ("tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, module)
    record, _ = run(fedavg, argv, tmp_path)
    assert written[0] == (str(tmp_path), 1)
    (tmp_path / "events.out.tfevents.1.host.2.0").touch()
    for _ in range(2):
        run(fedavg, argv, tmp_path)
    assert [path.name for path in tmp_path.glob("events*")] == [
        "events.out.tfevents.1.host.2.previous.0"]
    for row in record["rounds"]:
        assert ("global/top1", row["global"]["top1"], row["round"]) in written
        assert ("personal/mean", row["personal"]["mean"], row["round"]) in written
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    refused(capsys, "pip install tensorboard", fedavg.main, [*argv, "--out", str(tmp_path / "no")])


def test_threads_are_a_few_items_ahead():
    """While the first is slow no more than four others are made. Work may ask for all items of
    something else, and the threads don't wait for each other."""
    each, made = federation([*QUICK, "--parallel", "2"]).training.each, []

    def work(i):
        made.append(i)
        if i == 0:
            time.sleep(0.5)
        return i, [*each(lambda j: j + 1, 3)]

    first, *others = each(work, 20)
    assert first[0] == 0 and sorted(made) == [*range(20)]
    assert [i for i, _ in [first, *others]] == [i for _, (i, _) in [first, *others]] == [*range(20)]
    assert all(inner == [(0, 1), (1, 2), (2, 3)] for _, (_, inner) in [first, *others])
    made.clear()
    found = each(work, 20)
    next(found)
    assert len(made) <= 6
    assert [i for i, _ in found] == [*range(1, 20)]


def test_a_resumed_run_leaves_no_model_of_an_earlier_round(tmp_path):
    argv = [*QUICK, "--limit", "80", "--clients", "4", "--rounds", "2"]
    run(fedavg, argv, tmp_path)
    first = (tmp_path / "model.pt").read_bytes()
    killed(fedavg, [*argv, "--rounds", "4", "--resume"], tmp_path, lambda t, _: t == 2)
    assert not (tmp_path / "model.pt").exists()
    run(fedavg, [*argv, "--rounds", "4", "--resume"], tmp_path)
    assert (tmp_path / "model.pt").read_bytes() != first


# What a loop keeps outside of its state

OWN = """
import collections, functools, itertools, random
from types import SimpleNamespace as State
import numpy as np, torch, tqdm
import common, fedavg
SEEN, TOTAL = {}, 0
class Memory:
    norms = []
def clients():
    while True:
        yield 1
def keeps(x, all_x=[]):
    all_x.append(x)
    return x
def main(argv):
    args = common.parse(common.parser(""), {}, argv)
    federation = common.Federation(args)
    run = common.Run(__file__, federation)
    net, rng = federation.net, np.random.default_rng(0)
    update = fedavg.local_training(net, args)
    w_0 = federation.initial_weights()
    state = State(w=w_0, n=0)
    BEFORE
    for t in LOOP:
        S = federation.sample(t)
        w = federation.train(update, S, t, own=[state.w.expand(len(S), -1)],
                             shared=[federation.eta(t)]).mean(0)
        EACH
        state.w = w
        if run.evaluates():
            run.log(federation.evaluate(state.w))
    return run.record()
if __name__ == "__main__":
    main(None)
"""
KEPT = {  # before the loop, in it, what is named
    "a NumPy generator": ("", "w = w + 0 * float(rng.standard_normal())", "rng"),
    "a stream": ("mine = common.stream(0, 'algorithm')", "mine.integers(3)", "mine"),
    "a torch generator": ("g = torch.Generator()", "w = w + 0 * torch.rand(1, generator=g)", "g"),
    "Python's generator": ("g = random.Random(0)", "g.random()", "g"),
    "an iterator": ("order = itertools.count()", "next(order)", "order"),
    "a function's iterator": ("order = clients()", "next(order)", "order"),
    "a momentum": ("v = torch.zeros(net.d)", "v = 0.9 * v + state.w - w", "v"),
    "a momentum in place": ("v = torch.zeros(net.d)", "v += state.w - w", "v"),
    "a number": ("best = 0.0", "best = max(best, float(w.norm()))", "best"),
    "a conditional number": ("scale = 1", "scale = 2 if t == 1 else scale; w = scale * w",
                             "scale"),
    "a nonlocal number": ("n = 0\n    def adds():\n        nonlocal n\n        n += 1", "adds()",
                          "n"),
    "a deque": ("last = collections.deque(maxlen=3)", "last.append(w)", "last"),
    "a list of tensors": ("last = [w_0, w_0]", "last[t % 2] = w", "last"),
    "an array": ("counts = np.zeros(9)", "counts[S] += 1", "counts"),
    "an object": ("server = Memory()", "server.v = w", "server"),
    "a helper's object": ("import own_helper; server = own_helper.Server()", "server.v = w",
                          "server"),
    "a class": ("", "Memory.norms = [*Memory.norms, 1.0]", "Memory"),
    "an object whose class holds itself": (
        "class Server(Memory):\n        def __init__(self):\n            super().__init__()\n"
        "    server = Server()", "server.v = w", "server"),
    "a helper's variable": ("import own_helper", "own_helper.N = t", "N"),
    "a dict of the file": ("", "SEEN[t] = w", "SEEN"),
    "a default argument": ("", "keeps(w)", "keeps"),
    "a function's attribute": ("update.n = 0", "update.n += 1", "update"),
    "an optimizer": ("u = w_0.clone().requires_grad_(); opt = torch.optim.SGD([u], lr=0.1)",
                     "u.grad = state.w - w; opt.step()", "opt"),
    "a client's update": ("sgd = update; update = lambda w, epochs, eta: (SEEN.update("
                          "{epochs.client: 1}), sgd(w, epochs, eta))[1]", "", "SEEN"),
    "the first model": ("v = state.v = 1 * w_0", "w = w + 0 * v", "v"),
}


def test_what_a_function_holds_of_the_first_state_is_refused(tmp_path, capsys):
    """As FedProx's anchor, made once, would; a copy is meant."""
    hold = "sgd, a = update, {}; update = lambda w, *more: sgd(w, *more) + 0 * a"
    with pytest.raises(SystemExit):
        of_its_own(tmp_path, hold.format("w_0"), "")
    assert "the loop calls update, which holds state.w as it was before" in capsys.readouterr().err
    of_its_own(tmp_path, hold.format("w_0.clone()"), "")


def test_a_file_that_is_edited_while_it_runs_repeats_no_round(tmp_path, capsys, monkeypatch):
    """The run is that of the file as it was."""
    monkeypatch.delenv("REPEATED_ROUND")
    record = of_its_own(tmp_path, "", "open(__file__, 'a').write('1 / 0')")
    assert record["status"] == "finished"
    assert capsys.readouterr().out.count("has changed while it runs, so round 2 is not") == 1


def of_its_own(tmp_path, before, each, loop="run.rounds(state)", seed=0, more=()):
    path = tmp_path / "own.py"
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "own_helper.py").write_text("N = 0\nclass Server:\n    pass\n")
    sys.modules.pop("own_helper", None)
    sys.path[:] = [name for name in sys.path if "what_resume" not in name]  # of earlier calls
    path.write_text(OWN.replace("BEFORE", before).replace("EACH", each).replace("LOOP", loop))
    return common.load_file(path).main([*QUICK, "--model", "2nn", "--seed", str(seed),
                                        "--out", str(tmp_path / "out"), *more])


@pytest.mark.parametrize("name", KEPT)
def test_what_resume_would_begin_anew_is_refused(name, tmp_path, capsys):
    before, each, what = KEPT[name]
    words = "reads" if name == "the first model" else "changes"
    with pytest.raises(SystemExit) as stop:
        of_its_own(tmp_path, before, each)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and f"the loop {words} {what}, which" in error, error


HIDDEN = {  # what only a round that is repeated in a new process shows
    "a generator without a seed": (
        "", "w = w + t * float(np.random.default_rng().normal())", "it gave another state.w"),
    "before the loop": ("state.v = torch.from_numpy(np.random.default_rng().random(9))", "",
                        "it began with another state.v"),
    "the number of rounds": ("", "w = w / vars(args)['rounds']", "it gave another state.w"),
    "a split": ("import os; run.identity['split'] = os.getpid()", "",
                "--split gives other clients in a new process; draw from rng"),
    "a name of the first round": ("", "v = w_0 if t == 0 else v + w; w = w + v",
                                  "UnboundLocalError"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_round_that_gives_another_result_in_a_new_process_is_refused(
        name, tmp_path, capsys, monkeypatch):
    before, each, what = HIDDEN[name]
    monkeypatch.delenv("REPEATED_ROUND")
    with pytest.raises(SystemExit) as stop:
        of_its_own(tmp_path, before, each)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "in a new process" in error, error
    assert what in error, error


@pytest.mark.parametrize("loop, before, words", [
    ("enumerate(LOOP)", "", "enumerate around run.rounds"),
    ("list(LOOP)", "", "list around run.rounds"),
    ("zip(\n            LOOP, [0.1, 0.2])", "", "zip around run.rounds"),
    ("itertools.islice(tqdm.tqdm(LOOP), 2)", "", "islice around run.rounds"),
    ("LOOP", "state.V = w_0.expand(8, -1)", "state.V repeats a part of its memory"),
    ("made()", "made = lambda: (yield from LOOP)", "write `for t in run.rounds(state)`"),
])
def test_a_loop_that_counts_on_its_own_or_an_expanded_state_is_refused(
        loop, before, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        of_its_own(tmp_path, *(z.replace("LOOP", "run.rounds(state)") for z in (before, "", loop)))
    assert stop.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("before, each, words", [
    ("", "w = w[None]", "the loop makes state.w [1, 656810], which began as [656810]"),
    ("state.V = federation.per_client(w_0)", "state.V = 1 * w", "replace its rows by state.V"),
    ("state.before = 1 * w_0", "state.before = w", "state.w and state.before share their memory"),
    ("", "federation.sample(S)", "t is a ndarray, and S a ndarray; give federation.sample(t)"),
    ("", "federation.train(update, t, S, own=[w])", "t is a ndarray, and S a int; give"),
    ("", "federation.evaluate_clients(w.expand(3, -1))", "W has 3 models for 8 clients; give"),
    ("", "federation.evaluate_clients(lambda S: torch.stack([w, 2 * w])[: len(S)])",
     "gives client 1 another model alone"),
    ("", "federation.images[S] //= 2", "federation.images has changed since"),
    ("", "federation.labels = 1 * federation.labels", "federation.labels has changed since"),
    ("", "before = state.w; state.w += w - before; w = state.w",
     "the loop changes state.w in place, and every other name for it"),
    ("", "federation.split.train[0] = S", "federation.split has changed since"),
    ("", "federation.everyone[:2] = [1, 0]", "federation.everyone has changed since"),
])
def test_slips_with_models_and_clients_are_refused(before, each, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        of_its_own(tmp_path, before, each)
    assert stop.value.code == 2 and words in capsys.readouterr().err


def test_clients_models_that_cannot_be_saved_are_refused_after_the_first_round(tmp_path, capsys):
    with pytest.raises(SystemExit):
        of_its_own(tmp_path, "args.save_clients = run.guard.given['save_clients'] = True; "
                   "state.V = federation.per_client(w_0[:9])", "assert t == 0",
                   "run.rounds(state, clients='V')")
    assert ("--save-clients needs the clients' whole models, [1, 656810] for the first one, but "
            "run.rounds was given [1, 9]") in capsys.readouterr().err


def test_what_is_noted_at_the_end(tmp_path, capsys):
    of_its_own(tmp_path / "a", "", "")
    assert "note    " not in capsys.readouterr().out
    of_its_own(tmp_path / "b", "", "run.sent(1, 1) if t else None; w = state.w")
    said = capsys.readouterr().out
    assert "note    run.sent was called in some rounds only" in said
    assert "note    no round has changed state.w" in said
    of_its_own(tmp_path / "c", "federation.train = lambda *_, own, **__: own[0]", "")
    assert "note    no client was trained by federation.train" in capsys.readouterr().out


def test_fine_tuning_is_no_call_of_the_loops(tmp_path, capsys):
    """It trains all clients, with its own number of epochs."""
    of_its_own(tmp_path, "", "", more=["--fine-tune", "3", "--epochs", "2"])
    of_its_own(tmp_path, "", "", more=["--fine-tune", "3,4", "--epochs", "2", "--resume"])
    said = capsys.readouterr().out
    assert said.count("epochs more") == 3 and "note    federation" not in said
    assert "note    no call" not in said


def test_clients_models_may_come_in_the_last_round(tmp_path):
    of_its_own(tmp_path, "args.save_clients = run.guard.given['save_clients'] = True; "
               "state.V = None", "state.V = w.repeat(8, 1) if t == 1 else None",
               "run.rounds(state, clients='V')")
    saved = torch.load(tmp_path / "out" / "clients.pt")
    assert {len(z) for z in saved.values()} == {8}


@pytest.mark.parametrize("name, value", [
    ("images", "federation.images // 2"), ("labels", "federation.labels.flip(0)"),
    ("split", "federation.split._replace(train=federation.split.val, val=federation.split.train)"),
    ("transform", "functools.partial(federation.transform)")])
def test_replaced_data_is_noted(name, value, tmp_path, capsys):
    before = f"federation.{name} = {value}"
    path = tmp_path / "own.py"
    path.write_text(OWN.replace("BEFORE", f"{before}; return common.Run(__file__, federation)"))
    run = common.load_file(path).main([*QUICK, "--client-val", "0.5", "--out", str(tmp_path)])
    assert [z.split(",")[0] for z in run.notes] == [f"note    federation.{name} has been replaced"]


@pytest.mark.parametrize("before, each, flags, words", [
    ("state.V = federation.per_client(w_0[:9])", "state.V[S[0]].copy_(w[:9])", [],
     "no round has changed state.V"),
    ("state.V = federation.per_client(w_0[:9])", "state.V[S] = state.V[S]", [],  # 1 * the same
     "no round has changed state.V"),
    ("", "if run.evaluates():\n            run.log(federation.evaluate(state.w))\n"
     "        state.w = w\n        continue", [],
     "a round changes state.w after run.evaluates(), so the measures are those of the one before"),
    ("sgd = update; update = lambda w, epochs, eta: sgd(w, list(epochs)[:1], eta)", "",
     ["--epochs", "3"], "client_update has used 160 of the 480 images of its epochs in one call"),
    ("sgd = update; update = lambda w, epochs, eta: sgd(sgd(w, epochs, eta), epochs, eta)", "", [],
     "client_update goes through `epochs` more than once, in one order of images; is its loop"),
    ("train = federation.train; federation.train = functools.partial(train, epochs=1)", "",
     ["--epochs", "3"], "no call of federation.train has had the 3 epochs of --epochs"),
    ("federation.sample = lambda t: np.array([1, 3, 3, 4])", "", [],
     "federation.train had client 3 twice in one S; rng.choice(K, m, replace=False) draws"),
    ("federation.sample = lambda t: federation.everyone", "", [],
     "federation.train had 8 clients in place of the 4 of --fraction"),
    ("run.targets = [0.01]", "", [], "no round has called run.stop_at_target, so --target does")])
def test_what_a_loop_leaves_out_is_noted(before, each, flags, words, tmp_path, capsys):
    record = of_its_own(tmp_path, before, each, more=flags)
    assert f"note    {words}" in (said := capsys.readouterr().out) and said.count("note ") == 1
    assert "rounds_to" not in record


def test_times_and_nans_in_the_state_are_no_second_result():
    x, odd = torch.tensor([torch.nan, 1.0]), fl.own_method.differing
    assert odd({"s": 0.5, "v": x, "n": x}, {"s": 0.7, "v": x + 1e-9, "n": x[:1]}) == ["n"]
    assert odd({"v": x}, {"v": x + 0.1}) == odd({"v": x}, {"v": x.nan_to_num()}) == ["v"]


def test_a_seed_that_the_loop_sets_is_refused_at_once(tmp_path, capsys):
    with pytest.raises(SystemExit):
        of_its_own(tmp_path, "", "torch.manual_seed(0); torch.rand(1)")
    assert "the loop draws from torch's" in capsys.readouterr().err


def test_what_is_trained_before_the_loop_counts_once(tmp_path, monkeypatch):
    """2 rounds with 4 of 8 clients are 1 epoch; all clients before the loop are another."""
    before = """federation.train(update, federation.everyone, 0, own=[w_0.expand(8, -1)],
                     shared=[federation.eta(0)])"""
    assert of_its_own(tmp_path / "a", "", "")["local_epochs"] == 1
    assert of_its_own(tmp_path / "b", before, "")["local_epochs"] == 2
    main, argv = common.load_file(tmp_path / "b" / "own.py").main, [*QUICK, "--model", "2nn"]
    main([*argv, "--rounds", "1", "--out", str(tmp_path / "c")])
    record = main([*argv, "--resume", "--out", str(tmp_path / "c")])
    assert record["local_epochs"] == 2


def test_only_minibatches_that_are_used_count(tmp_path):
    """Of each of four clients 20 of 40 images."""
    before = """def update(w, epochs, eta):
        for minibatches in epochs:
            for b in minibatches:
                return w + b.x.mean()"""
    rows = of_its_own(tmp_path, before, "")["rounds"]
    assert [row["images"] for row in rows] == [4 * 20] * 2


def test_a_number_that_begins_as_infinite_may_stay_so(tmp_path, capsys):
    before, each = "state.best, state.n = torch.tensor(torch.inf), 0.0", "state.n += 1"
    of_its_own(tmp_path / "a", before, each)
    with pytest.raises(SystemExit) as stop:
        of_its_own(tmp_path / "b", before, "state.n = state.n + float('inf')")
    assert stop.value.code == 3 and "state.n is not finite" in capsys.readouterr().out


def test_results_with_a_graph_of_autograd(tmp_path, capsys):
    """As torch.optim leaves them. What torch.inference_mode gives can't be trained."""
    plain = of_its_own(tmp_path / "a", "", "")
    with_graph = "sgd = update; update = lambda w, *z: sgd(w, *z).requires_grad_() * 1"
    assert of_its_own(tmp_path / "b", with_graph, "")["final"] == plain["final"]
    with pytest.raises(SystemExit):
        of_its_own(tmp_path / "c", "", "w = torch.inference_mode()(lambda: 1 * w)()")
    assert "state.w comes from torch.inference_mode, so it can't be" in capsys.readouterr().err


def test_args_of_argparse_alone_are_refused(tmp_path, capsys):
    path, argv = tmp_path / "own.py", [*QUICK, "--out", str(tmp_path / "out")]
    path.write_text(OWN.replace("    run = ", "    del args.argv\n    run = "))
    refused(capsys, "args are not those of common.parse(parser, BY_DATASET, argv), which seeds",
            common.load_file(path).main, argv)


def test_files_beside_one_in_the_checkout(tmp_path, monkeypatch):
    """Users keep their files there, too. Ours are none of theirs, but a run names those that theirs
    import."""
    monkeypatch.setattr(fl.files, "HERE", tmp_path)
    for name in "own", "helper", "fedavg", "common":
        (tmp_path / f"{name}.py").write_text("import common, fedavg, helper")
    (tmp_path / "fl").mkdir()
    (tmp_path / "fl" / "__init__.py").write_text("")
    path = tmp_path / "own.py"
    assert fl.files.beside(path) == {"helper": tmp_path / "helper.py"}
    found = fl.provenance.sources(path, SimpleNamespace(model="cnn", split="iid", init=None))
    assert found["helper.py"] == tmp_path / "helper.py" and found["fedavg.py"] == HERE / "fedavg.py"
    assert "psinet.py" not in found


def test_what_git_calls_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(fl.provenance, "ROOT", tmp_path)
    for name in "a b.py", "b.py":
        (tmp_path / name).write_text("1")
    for words in ("init", "add .", "-c user.name=n -c user.email=e commit -m m"):
        assert fl.provenance.git(*words.split())[0] == 0
    (tmp_path / "a b.py").write_text("2")
    files = [tmp_path / "a b.py", tmp_path / "b.py"]
    assert fl.provenance.changes(files) == {files[0]}


def test_args_rounds_in_a_file_beside(tmp_path, capsys):
    (tmp_path / "rate.py").write_text("def half(args):\n    return args.rounds / 2\n")
    path, argv = tmp_path / "own.py", [*QUICK, "--model", "2nn", "--out", str(tmp_path / "out")]
    path.write_text("import rate\n" + OWN.replace("BEFORE", "").replace("EACH", "").replace(
        "LOOP", "run.rounds(state)"))
    main = common.load_file(path).main
    main(argv)
    refused(capsys, "this run has 3: rate.py uses args.rounds", main,
            [*argv, "--rounds", "3", "--resume"])


def test_our_file_that_somebody_has_changed_is_theirs(monkeypatch, tmp_path):
    fed = federation([*QUICK, "--out", str(tmp_path)])
    for commit, ours in (None, True), ("1f", None), ("1f+", False):
        monkeypatch.setattr(fl.provenance, "commit", lambda files: commit)
        guard = fl.run.Run(fedavg.__file__, fed).guard
        assert getattr(guard, "ours", None) == ours
        assert isinstance(guard, fl.run.NoGuard) == (commit == "1f")


def test_rounds_2_and_3_and_the_last_two_are_repeated(tmp_path, monkeypatch):
    """Of a run with two rounds, these; of a run that is resumed, what is left. Measures are
    compared, too."""
    path, found = tmp_path / "own.py", []
    monkeypatch.delenv("REPEATED_ROUND")
    monkeypatch.setattr(fl.own_method.Guard, "repeat", lambda guard, n, first, folder: found.append(
        (n, bool(first), len(torch.load(folder / "state.pt", weights_only=True)["history"]),
         "global top1" in guard.found())))
    path.write_text(OWN.replace("BEFORE", "").replace("EACH", "").replace(
        "LOOP", "run.rounds(state)"))
    argv = [*QUICK, "--model", "2nn", "--eval-every", "5", "--out", str(tmp_path / "out")]
    main = common.load_file(path).main
    main(argv)
    assert found == [(2, True, 1, True)]
    main([*argv, "--rounds", "5"])
    assert found[1:] == [(3, True, 1, False), (5, True, 3, True)]
    main([*argv, "--rounds", "7", "--resume"])
    assert found[3:] == [(7, False, 5, True)]


def test_a_round_that_is_repeated_leaves_no_trace(tmp_path, capsys, monkeypatch):
    """In the record, the state and what is printed but one line. A file of a user's may be called
    as one of ours."""
    each = "state.n = state.n + 1; run.sent(1, 1); run.stop_at_target(w)"
    found = []
    for repeats in (True, False):
        path = tmp_path / str(repeats) / "psinet.py"
        path.parent.mkdir()
        path.write_text(OWN.replace("BEFORE", "").replace("EACH", each).replace(
            "LOOP", "run.rounds(state)"))
        if repeats:
            monkeypatch.delenv("REPEATED_ROUND")
        else:
            monkeypatch.setenv("REPEATED_ROUND", "")
        record = common.load_file(path).main([*QUICK, "--model", "2nn", "--out",
                                              str(path.parent)])
        state = torch.load(path.parent / "state.pt", weights_only=True)
        out = capsys.readouterr().out
        assert out.count("round 2 runs a second time") == repeats
        lines = [line.rsplit("|", 1)[0] for line in out.splitlines() if line.startswith("round ")]
        rows = [{name: z for name, z in row.items() if "seconds" not in name}
                for row in record["rounds"]]
        found.append((lines, rows, state["state"]["n"], state["state"]["w"].tolist()))
    assert found[0] == found[1] and found[0][2] == len(found[0][1])


def test_what_a_file_does_with_rounds(tmp_path):
    path = tmp_path / "own.py"
    for text, found in (
            ("for t in run.rounds(state):  # no list(run.rounds(s))\n    r['rounds']", (0, "", 0)),
            ("half(opt.rounds)", (1, "", 0)),
            ("for t in tqdm(run.rounds(state)): run.evaluates()", (0, "", 0)),
            ("for i, t in enumerate(made.rounds(s)): args.rounds", (1, "enumerate", 0)),
            ("if run.evaluates: pass", (0, "", 1))):
        path.write_text(text)
        assert fl.own_method.use_of_rounds(path) == found


def test_a_flag_that_a_method_cannot_read_is_refused(tmp_path, capsys):
    """But not where a function of another file may read it."""
    path, made = tmp_path / "own.py", "f = Federation(args); "
    for text, found in (
            (made, "rdmw"), (made + "sgd(args, net.decayed)", "rd"), (made + "f.eta(t)", "mw"),
            (made + "common.sgd(args)", "rdw"), (made + "go = common.sgd(args)", "rdmw"),
            (made + "go = common.sgd(args); go(w)", "rdw"), (made + "mine(x=args)", ""), ("", ""),
            ("Federation(a); a.momentum", "rdw"), (made + "args.lr; stream(args.seed)", "dmw"),
            ("def mine(a): pass\n" + made + "mine(args)", "rdmw"),
            (made + "{'momentum': 0}; getattr(a, 'lr_decay')", "rmw"),
            (made + "fedavg.local_training(net, args); f.eta(t)", "mw"),
            (f"from fedavg import local_training as go\n{made}go(net, args)", "rdmw"),
            (made + "baselines.local_sgd(net, args); f.eta(t)", "")):
        path.write_text(text)
        unread = fl.own_method.unread(path)
        assert [{"lr": "r", "lr_decay": "d"}.get(name, name[0]) for name in unread] == [*found]
    file = OWN.replace("BEFORE", "").replace("EACH", "").replace("LOOP", "run.rounds(state)")
    may = file.replace("fedavg.local", "baselines.local").replace("local_training", "local_sgd")
    for text, ends in (file, 2), (may.replace("import common, ", "import baselines, common, "), 0):
        path.write_text(text.replace("(update,", "(lambda w, epochs, eta: w,"))
        argv = [*QUICK, "--model", "2nn", "--momentum", "0.9", "--out", str(tmp_path / str(ends))]
        if ends:
            refused(capsys, "own.py does not read --momentum", common.load_file(path).main, argv)
        else:
            common.load_file(path).main(argv)


def test_a_file_that_names_args_rounds_is_resumed_with_as_many(tmp_path, capsys, monkeypatch):
    """Unless it says that nothing depends on them."""
    for made, ends in ("Run(__file__, federation)", 2), ('Run(__file__, federation, None, "")', 0):
        monkeypatch.setattr(sys.modules[__name__], "OWN", OWN.replace(
            "Run(__file__, federation)", made))
        folder = tmp_path / str(ends)
        of_its_own(folder, "half = args.rounds / 2", "")
        again = [*QUICK, "--model", "2nn", "--rounds", "3", "--resume", "--out", f"{folder}/out"]
        if ends:
            refused(capsys, "belongs to --rounds 2, this run has 3: own.py uses args.rounds",
                    common.load_file(folder / "own.py").main, again)
        else:
            assert len(common.load_file(folder / "own.py").main(again)["rounds"]) == 3


def test_a_loop_around_the_loop_is_watched(tmp_path, capsys):
    made = "scale = 1\n    def made():\n        for t in run.rounds(state):\n            yield t"
    with pytest.raises(SystemExit):
        of_its_own(tmp_path, made, "scale = 2 if t == 1 else scale; w = scale * w", "made()")
    assert "the loop changes scale, which" in capsys.readouterr().err


def test_a_state_that_the_last_evaluation_changes_is_not_continued(tmp_path, capsys, monkeypatch):
    """A run of three rounds would not evaluate the second."""
    monkeypatch.setattr(sys.modules[__name__], "OWN", OWN.replace(
        "run.log(", "state.n = 1; run.log("))
    of_its_own(tmp_path, "", "")
    refused(capsys, "as the last round it was evaluated, and this changed state.n",
            common.load_file(tmp_path / "own.py").main,
            [*QUICK, "--model", "2nn", "--rounds", "3", "--resume", "--out", f"{tmp_path}/out"])


def test_what_several_processes_agree_on_is_no_such_change(tmp_path, monkeypatch):
    """They replace each tensor by process 0's copy, after the round was measured."""
    monkeypatch.setattr(fl.training.Training, "same", lambda training, z: z.clone())
    argv = [*QUICK, "--model", "2nn", "--eval-every", "3", "--out", str(tmp_path)]
    assert len(fedavg.main([*argv, "--rounds", "2"])["rounds"]) == 2
    assert len(fedavg.main([*argv, "--rounds", "3", "--resume"])["rounds"]) == 3


def test_what_a_loop_may_use(tmp_path, capsys):
    """Names that it sets first, what it only reads, functions that cache, loops in it, tqdm."""
    before = """
    z, i, norm, v = 1, None, functools.cache(lambda k: k), torch.ones(3)
    bar, large = tqdm.tqdm(total=2, disable=True), np.zeros(2 * 10**6)
    def distance(x):
        return (x - w_0).norm() + norm(1)
    def models(S):
        return w.expand(len(S), -1)
"""
    each = """
        i, z = 0, [z for z in range(3)]
        for i in range(3):
            g = np.random.default_rng(i)
            g.random(len(z) + i)
        bar.n += len(large)
        w_0.norm() + v.sum() + distance(w) + norm(t)
        if t:
            z = z + z
        federation.evaluate_clients(models)
"""
    of_its_own(tmp_path, before, each, "tqdm.tqdm(run.rounds(state), disable=True)")


def test_what_is_drawn_before_the_loop_is_seeded(tmp_path):
    drawn = []
    for seed in (1, 1, 2):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        of_its_own(tmp_path, "state.n = float(torch.randn(1) + np.random.rand() + random.random())",
                   "", seed=seed)
        state = torch.load(tmp_path / "out" / "state.pt", weights_only=True)["state"]
        drawn.append(state["n"])
    assert drawn[0] == drawn[1] != drawn[2]


def test_what_a_loop_does_not_count_or_evaluate_is_said(tmp_path, capsys):
    record = of_its_own(tmp_path, "", "run.evaluates = lambda: t == 0")
    out = capsys.readouterr().out
    assert record["bytes_up"] is None and ", no run.sent has counted bytes\n" in out
    assert record["final"]["global"]["round"] == 1
    assert "note    `final` is not of the last round, in which" in out


def test_fine_tuning_that_diverges_is_said(tmp_path, capsys):
    argv = [*QUICK, "--limit", "80", "--clients", "4", "--fine-tune", "1", "--fine-tune-lr"]
    for lr in ("0.01", "1e30"):
        run(fedavg, [*argv, lr], tmp_path / lr)
        said = "1 epochs of fine-tuning diverge for some clients" in capsys.readouterr().out
        assert said == (lr == "1e30")


def test_a_flag_of_type_bool_is_refused(capsys):
    parser = common.parser("")
    parser.add_argument("--own", type=bool, default=False)
    refused(capsys, "--own has type=bool, to which every word is True", common.parse, parser, {},
            ["--own", "False"])
    parser = common.parser("")
    parser.add_argument("--client-momentum", dest="momentum")
    refused(capsys, "--momentum and --client-momentum both set args.momentum; give one another",
            common.parse, parser, {}, [])
