"""The same run by one process and by two under torchrun: equal up to rounding for every algorithm."""

import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import filelock
import numpy as np
import pytest
import torch

import baselines
import common
import engine
import fedavg
from conftest import QUICK, refused, run

HERE = pathlib.Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
SOME = [*QUICK, "--split", "dirichlet-classes", "--alpha", "1", "--client-val", "0.2", "--fraction", "0.4"]  # 3 of 8, unequal

COMMANDS = {  # an algorithm joins by a line
    "fedavg": ["fedavg", *SOME],
    "fedavg, one client": ["fedavg", *SOME, "--fraction", "0.1"],  # one of the processes has nobody to train
    "fedavg, target": ["fedavg", *SOME, "--target", "0.01"],  # stops after the first round of two
    "fedavgm": ["fedavgm", *SOME, "--model", "cnn", "--transform", "scale"],
    "superfed, model": ["superfed", *SOME, "--mix", "model"],
    "superfed, layer": ["superfed", *SOME, "--mix", "layer"],
    "fedslr": ["fedslr", *SOME, "--model", "cnn"],
    "persfl": ["persfl", *SOME, "--model", "mnistnet", "--fraction", "1"],
    "psinet": ["psinet", *SOME, "--model", "vgg9", "--limit", "200", "--prune"],
    **{f"{method}, one client": ["baselines", "--method", method, *more, *SOME, "--model", "mnistnet", "--batch-size", "10",
                                 "--epochs", "2", "--fraction", "0.1"] for method, *more in (
        ["fedma"], ["fedspa"], ["scaffold", "--option", "I"], ["per-fedavg"])},
    **{method: ["baselines", "--method", method, *SOME, "--model", "mnistnet", "--epochs", "2"] for method in baselines.METHODS},
}


def environment():
    """Without what would let a process of the tests take the GPU or more threads."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All commands, done by two processes."""
    folder = tmp_path_factory.mktemp("two")
    commands = [[*argv, "--out", str(folder / name)] for name, argv in COMMANDS.items()]
    (folder / "commands.json").write_text(json.dumps(commands))
    done = subprocess.run([*TORCHRUN, "2", HERE / "processes.py", folder / "commands.json"], env=environment(),
                          capture_output=True, text=True, timeout=600)
    (folder / "stdout").write_text(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_two_processes_equal_one(name, folder, tmp_path):
    module, *argv = COMMANDS[name]
    one, state = run(importlib.import_module(module), argv, tmp_path)
    two = json.loads((folder / name / "result.json").read_text())
    assert two["status"] == "finished" and two["environment"]["processes"] == 2
    for key in ("split", "parameters", "bytes_up", "bytes_down"):
        assert one[key] == two[key]
    parts = [torch.load(folder / name / f"state-{rank}-of-2.pt", weights_only=True)["state"] for rank in range(2)]
    for key, value in state.items():
        if not torch.is_tensor(value):
            continue
        if value.dim() and len(value) == 8 and parts[0][key].shape != value.shape:  # a row per client: those of its owner
            together = torch.empty_like(value)
            together[0::2], together[1::2] = parts[0][key], parts[1][key]
        else:
            together = parts[0][key]
            assert torch.equal(together, parts[1][key])  # what the server knows is the same everywhere
        torch.testing.assert_close(together, value, atol=1e-4, rtol=1e-3)
    for part in one["final"].keys() & {"global", "personal"}:
        for measure, value in one["final"][part].items():
            assert np.allclose(value, two["final"][part][measure], atol=0.02), (part, measure)


def test_only_one_process_prints_and_none_writes_a_second_record(folder):
    assert (folder / "stdout").read_text().count("\nsplit ") + (folder / "stdout").read_text().startswith("split ") == len(COMMANDS)
    assert sorted(path.name for path in (folder / "fedavg").iterdir()) == ["result.json", "state-0-of-2.pt", "state-1-of-2.pt"]


def test_a_folder_in_use_is_left_as_it_is_by_all_processes(folder, tmp_path):
    used = filelock.FileLock(folder / "fedavg" / ".lock")
    used.acquire()
    before = {path.name: path.stat().st_mtime_ns for path in (folder / "fedavg").iterdir()}
    (tmp_path / "commands.json").write_text(json.dumps([[*COMMANDS["fedavg"], "--out", str(folder / "fedavg")]]))
    done = subprocess.run([*TORCHRUN, "2", HERE / "processes.py", tmp_path / "commands.json"], env=environment(),
                          capture_output=True, text=True, timeout=120)
    assert done.returncode and "another run is writing to" in done.stderr
    assert before == {path.name: path.stat().st_mtime_ns for path in (folder / "fedavg").iterdir()}
    used.release()


def test_a_dying_process_ends_the_run_and_resume_wants_as_many(tmp_path, capsys):
    argv = [*SOME, "--rounds", "200", "--eval-every", "2", "--out", str(tmp_path)]
    (tmp_path / "commands.json").write_text(json.dumps([["fedavg", *argv]]))
    command = [*TORCHRUN, "2", str(HERE / "processes.py"), str(tmp_path / "commands.json")]
    both = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait = time.time() + 120
    while not (tmp_path / "state-1-of-2.pt").exists() and time.time() < wait and both.poll() is None:
        time.sleep(0.1)
    workers = subprocess.run(["pgrep", "-P", str(both.pid), "-f", "processes.py"], capture_output=True, text=True).stdout.split()
    os.kill(int(workers[1]), signal.SIGKILL)
    output, _ = both.communicate(timeout=90)  # a hang fails here
    assert both.returncode and "SIGKILL" in output
    refused(capsys, "belongs to a run with 2 processes, this one has 1", fedavg.main, [*argv, "--resume"])
    fedavg.main([*argv, "--rounds", "1"])  # a new run: the states of both are put aside, or a later --resume could take them up
    assert sorted(path.name for path in tmp_path.glob("state*")) == [
        "state-0-of-2.previous.pt", "state-1-of-2.previous.pt", "state.pt"]


def test_two_processes_resume_where_they_stopped(tmp_path):
    """Both die in round 4, after the evaluation of round 2."""
    whole = [*SOME, "--rounds", "6", "--eval-every", "2"]
    (tmp_path / "dying.py").write_text(
        f"import sys; sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent)!r}]\n"
        "import common, fedavg\ntrain = common.Federation.train\n"
        "def dying(self, step, clients, S, t, *shared, **options):\n"
        "    assert t != 3, 'dead'\n    return train(self, step, clients, S, t, *shared, **options)\n"
        f"common.Federation.train = dying\nfedavg.main({[*whole, '--out', str(tmp_path / 'parts')]!r})\n")
    died = subprocess.run([*TORCHRUN, "2", tmp_path / "dying.py"], env=environment(), capture_output=True, text=True, timeout=120)
    assert died.returncode and "dead" in died.stderr
    commands = [["fedavg", *whole, "--resume", "--out", str(tmp_path / "parts")], ["fedavg", *whole, "--out", str(tmp_path / "whole")]]
    (tmp_path / "commands.json").write_text(json.dumps(commands))
    done = subprocess.run([*TORCHRUN, "2", HERE / "processes.py", tmp_path / "commands.json"], env=environment(),
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "2 of 6 rounds are done" in done.stdout, done.stderr[-3000:]
    for rank in range(2):
        a, b = (torch.load(tmp_path / way / f"state-{rank}-of-2.pt", weights_only=True)["state"] for way in ("parts", "whole"))
        assert torch.equal(a["w"], b["w"])


def test_more_processes_than_clients_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(engine, "find_device", lambda name: (torch.device("cpu"), 0, 9))
    monkeypatch.setattr(common.dist, "barrier", lambda: None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit):
        common.Federation(common.parse(common.parser("test"), {}, QUICK))
    assert "9 processes for 8 clients" in capsys.readouterr().err


def test_a_rank_without_a_world_is_another_programs(monkeypatch):
    """Some schedulers set RANK: this is one process with all clients."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert engine.is_main_process() and engine.find_device("cpu")[1:] == (0, 1)


def test_the_process_that_says_why_ends_before_the_others(monkeypatch, capsys):
    """torchrun ends all processes when one has ended."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    waits = []
    monkeypatch.setattr(engine.time, "sleep", waits.append)
    with pytest.raises(SystemExit):
        engine.refuse("no")
    assert waits and waits[0] >= 5 and not capsys.readouterr().err
