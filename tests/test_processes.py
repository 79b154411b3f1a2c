"""Two processes under torchrun: what ends them, and what they refuse. That they give the bits of
one process is tested in test_matrix.py."""

import json
import signal

import filelock
import pytest
import torch

import baselines
import fl.machine
from conftest import HERE, ended, equal, refused, run, small, torchrun

BEGIN = f"import sys; sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent)!r}]\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ended_in_round_2_they_go_on_as_one_process(number, toy, tmp_path):
    """Ctrl-C reaches all processes, kill -9 the first. One line at most says how to go on. One
    process resumes the run to the bits of one that nothing happened to."""
    (tmp_path / "dying.py").write_text(BEGIN + f"""
import os, common
train = common.Federation.train
def dying(self, client_update, S, t, **options):
    if t == 1 and ({number} == {int(signal.SIGINT)} or os.environ["RANK"] == "0"):
        os.kill(os.getpid(), {number})
    return train(self, client_update, S, t, **options)
common.Federation.train = dying
import processes
""")
    argv, parts = ["--method", "scaffold", *small(toy), "--rounds", "2"], tmp_path / "parts"
    process = torchrun(tmp_path, [["baselines", *argv, "--out", str(parts)]],
                       tmp_path / "dying.py")
    code, _, error = ended(process)
    line = "interrupted; the same command with --resume goes on from round 2\n"
    assert code and error.count(line) == error.count("interrupted") == (number == signal.SIGINT)
    assert json.loads((parts / "result.json").read_text())["environment"]["processes"] == 2
    record, state = run(baselines, [*argv, "--resume"], parts)
    assert [now["processes"] for now in record["environment"]["resumed"]] == [1]
    assert equal(state, run(baselines, argv, tmp_path / "whole")[1])


def test_what_is_refused_is_refused_by_the_first_process_alone(toy, tmp_path):
    """The other ends without an error, so that torchrun does not end all before it has said why. A
    folder in use is left as it is by both."""
    (tmp_path / "refused.py").write_text(BEGIN + """
import contextlib, io, json, os, fedavg
*caught, last = json.load(open(sys.argv[1]))
for argv in caught:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            fedavg.main(argv)
    except SystemExit as stop:
        line = json.dumps([os.environ["RANK"], stop.code, said.getvalue()])
        os.write(1, f"{line}\\n".encode())
fedavg.main(last)
""")
    argv = small(toy)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "state.pt").write_text("another run's")
    lock = filelock.FileLock(tmp_path / "used" / ".lock")
    lock.acquire()
    code, out, error = ended(torchrun(tmp_path, [
        [*argv, "--lr", "0"], [*argv, "--device", "cuda:0"],
        [*argv, "--out", str(tmp_path / "used")]], tmp_path / "refused.py"))
    lock.release()
    said = sorted(json.loads(line) for line in out.splitlines() if line.startswith("["))
    assert [(rank, code) for rank, code, _ in said] == [("0", 2)] * 2 + [("1", None)] * 2, error
    assert [text.count("error: ") for *_, text in said] == [1, 1, 0, 0]
    assert "cuda:0 is one GPU for 2 processes" in said[0][2] + said[1][2]
    assert code and error.count("is writing to") == 1
    assert sorted(path.name for path in (tmp_path / "used").iterdir()) in (
        [".lock", "state.pt"], ["state.pt"])
    assert (tmp_path / "used" / "state.pt").read_text() == "another run's"


def test_variables_of_other_programs(monkeypatch, capsys):
    """Some schedulers set RANK: this is one process. A WORLD_SIZE without torchrun is refused, or
    the program would wait for processes that never come."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert fl.machine.is_main_process()
    assert fl.machine.join_processes(torch.device("cpu")) == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(capsys, "unset WORLD_SIZE RANK", fl.machine.world_size)
