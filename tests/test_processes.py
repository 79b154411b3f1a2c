"""A run by one process and by two under torchrun: equal up to rounding for every algorithm."""

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
import fedavg
import fl.training
from conftest import QUICK, refused, run

HERE = pathlib.Path(__file__).parent
SOME = [*QUICK, "--split", "dirichlet-classes", "--alpha", "1", "--client-val", "0.2",
        "--fraction", "0.4"]  # 3 of 8, unequal
ONE = ["--model", "mnistnet", "--batch-size", "10", "--epochs", "2", "--fraction", "0.1"]

STATES = "state.pt", "state-1.pt"

COMMANDS = {  # an algorithm joins by a line
    "fedavg": ["fedavg", *SOME],
    # one of the processes has nobody to train
    "fedavg, one client": ["fedavg", *SOME, "--fraction", "0.1"],
    # stops after the first round of two
    "fedavg, target": ["fedavg", *SOME, "--target", "0.01"],
    "fedavgm": ["fedavgm", *SOME, "--model", "cnn", "--transform", "scale"],
    "superfed, model": ["superfed", *SOME, "--mix", "model"],
    "superfed, layer": ["superfed", *SOME, "--mix", "layer"],
    "fedslr": ["fedslr", *SOME, "--model", "cnn"],
    "persfl": ["persfl", *SOME, "--model", "mnistnet", "--fraction", "1"],
    "psinet": ["psinet", *SOME, "--model", "vgg9", "--limit", "200", "--prune"],
    **{f"{method}, one client": ["baselines", "--method", method, *more, *SOME, *ONE]
       for method, *more in (["fedma"], ["fedspa"], ["scaffold", "--option", "I"], ["per-fedavg"])},
    **{method: ["baselines", "--method", method, *SOME, "--model", "mnistnet", "--epochs", "2"]
       for method in baselines.METHODS},
}


def torchrun(folder, commands, script=HERE / "processes.py"):
    """The commands, by two processes, which can't take the GPU or more threads: a Popen."""
    (folder / "commands.json").write_text(json.dumps(commands))
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         script, folder / "commands.json"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(both):
    """The exit code of torchrun, its output and its errors. A hang fails here."""
    out, error = both.communicate(timeout=600)
    return both.returncode, out, error


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All commands, done by two processes."""
    folder = tmp_path_factory.mktemp("two")
    commands = [[*argv, "--out", str(folder / name)] for name, argv in COMMANDS.items()]
    code, out, error = ended(torchrun(folder, commands))
    (folder / "stdout").write_text(out)
    assert code == 0, error[-3000:]
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_two_processes_equal_one(name, folder, tmp_path):
    module, *argv = COMMANDS[name]
    one, state = run(importlib.import_module(module), argv, tmp_path)
    two = json.loads((folder / name / "result.json").read_text())
    assert two["status"] == "finished" and two["environment"]["processes"] == 2
    for key in ("split", "parameters", "bytes_up", "bytes_down"):
        assert one[key] == two[key]
    parts = [torch.load(folder / name / file, weights_only=True)["state"] for file in STATES]
    for key, value in state.items():
        if not torch.is_tensor(value):
            continue
        together = parts[0][key]
        if value.dim() and len(value) == 8 and together.shape != value.shape:  # a row per client
            together = torch.empty_like(value)
            together[0::2], together[1::2] = parts[0][key], parts[1][key]  # those of its owner
        else:
            assert torch.equal(together, parts[1][key])  # the server's is the same everywhere
        torch.testing.assert_close(together, value, atol=1e-4, rtol=1e-3)
    for part in one["final"].keys() & {"global", "personal"}:
        for measure, value in one["final"][part].items():
            assert np.allclose(value, two["final"][part][measure], atol=0.02), (part, measure)


def test_only_one_process_prints_and_none_writes_a_second_record(folder):
    lines = (folder / "stdout").read_text().splitlines()
    assert sum(line.startswith("split ") for line in lines) == len(COMMANDS)
    assert sorted(path.name for path in (folder / "fedavg").iterdir()) == [
        "model.pt", "result.json", "state-1.pt", "state.pt"]


def test_a_folder_in_use_is_left_as_it_is_by_all_processes(folder, tmp_path):
    used = filelock.FileLock(folder / "fedavg" / ".lock")
    used.acquire()
    before = {path.name: path.stat().st_mtime_ns for path in (folder / "fedavg").iterdir()}
    commands = [[*COMMANDS["fedavg"], "--out", str(folder / "fedavg")]]
    code, _, error = ended(torchrun(tmp_path, commands))
    assert code and error.count("another run is writing to") == 1
    after = {path.name: path.stat().st_mtime_ns for path in (folder / "fedavg").iterdir()}
    assert before == after
    used.release()


def under_way(folder, argv):
    """Two processes that have written their states once."""
    both, wait = torchrun(folder, [["fedavg", *argv]]), time.time() + 120
    while (not (folder / "state-1.pt").exists() and time.time() < wait
           and both.poll() is None):
        time.sleep(0.1)
    return both


def test_interrupted_processes_leave_the_record_and_say_how_to_go_on(tmp_path):
    argv = [*SOME, "--rounds", "2000", "--eval-every", "2", "--out", str(tmp_path)]
    both = under_way(tmp_path, argv)
    both.terminate()
    code, out, _ = ended(both)
    record = json.loads((tmp_path / "result.json").read_text())
    assert code and record["status"] == "interrupted" and len(record["rounds"]) >= 2
    assert out.endswith("result.json; to go on: the same command with --resume\n")
    states = [torch.load(tmp_path / file, weights_only=True) for file in STATES]
    assert len(states[0]["history"]) == len(states[1]["history"]) >= 2


def test_a_dying_process_ends_the_run_and_resume_wants_as_many(tmp_path, capsys):
    argv = [*SOME, "--rounds", "200", "--eval-every", "2", "--out", str(tmp_path)]
    both = under_way(tmp_path, argv)
    found = subprocess.run(["pgrep", "-P", str(both.pid), "-f", "processes.py"],
                           capture_output=True, text=True)
    os.kill(int(found.stdout.split()[1]), signal.SIGKILL)
    code, _, error = ended(both)
    assert code and "SIGKILL" in error
    refused(capsys, "belongs to processes 2, this run has 1", fedavg.main, [*argv, "--resume"])
    # a new run: the states of both are put aside, or a later --resume could take them up
    fedavg.main([*argv, "--rounds", "1"])
    assert sorted(path.name for path in tmp_path.glob("state*")) == [
        "state-1.previous.pt", "state.previous.pt", "state.pt"]


def test_two_processes_resume_where_they_stopped(tmp_path):
    """Both die in round 4, after the evaluation of round 2."""
    whole = [*SOME, "--rounds", "6", "--eval-every", "2"]
    (tmp_path / "dying.py").write_text(
        f"import sys; sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent)!r}]\n"
        "import common\ntrain = common.Federation.train\n"
        "def dying(self, client_update, S, t, **options):\n"
        "    assert t != 3, 'dead'\n    return train(self, client_update, S, t, **options)\n"
        "common.Federation.train = dying\nimport processes\n")
    parts = ["fedavg", *whole, "--out", str(tmp_path / "parts")]
    code, _, error = ended(torchrun(tmp_path, [parts], tmp_path / "dying.py"))
    assert code and "dead" in error
    commands = [[*parts, "--resume"], ["fedavg", *whole, "--out", str(tmp_path / "whole")]]
    code, out, error = ended(torchrun(tmp_path, commands))
    assert code == 0 and "2 of 6 rounds are done" in out, error[-3000:]
    for file in STATES:
        a, b = (torch.load(tmp_path / way / file, weights_only=True)["state"]
                for way in ("parts", "whole"))
        assert torch.equal(a["w"], b["w"])
    # states of different rounds, as of two runs
    state = torch.load(tmp_path / "parts" / "state-1.pt", weights_only=True)
    state["history"].pop()
    torch.save(state, tmp_path / "parts" / "state-1.pt")
    code, out, error = ended(torchrun(tmp_path, commands[:1]))
    assert code and error.count("state.pt has another number of rounds than") == 1 and not out


def test_a_wrong_command_line_is_refused_by_the_first_process_alone(tmp_path):
    """The others end without an error, so that torchrun does not end all before it has said why."""
    for argv, why in ((["--lr", "0"], "--lr"), (["--clients", "1"], "2 processes for 1 client")):
        commands = [["fedavg", *QUICK, *argv, "--out", str(tmp_path / "out")]]
        code, _, error = ended(torchrun(tmp_path, commands))
        assert code and error.count("py: error: ") == error.count(why) == 1, error
        assert not (tmp_path / "out").exists()


def test_more_processes_than_clients_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(fl.training, "join_processes", lambda device: (0, 9))
    monkeypatch.setattr(common.dist, "barrier", lambda: None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit):
        common.Federation(common.parse(common.parser("test"), {}, QUICK))
    assert "9 processes for 8 clients" in capsys.readouterr().err


def test_a_rank_without_a_world_is_another_programs(monkeypatch):
    """Some schedulers set RANK: this is one process with all clients."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert fl.training.is_main_process()
    assert fl.training.join_processes(torch.device("cpu")) == (0, 1)
