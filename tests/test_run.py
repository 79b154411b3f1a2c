"""The record, the state on disk, resuming, interruption, divergence, plots: what records.Run promises."""

import json
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import baselines
import common
import engine
import fedavg
import fedavgm
import persfl
import psinet
import records
import superfed
from conftest import QUICK, federation, killed, refused, run, same

HERE = pathlib.Path(fedavg.__file__).parent
GLOBAL = {"top1", "top5", "loss", "ece", "mce"}
PERSONAL = {"mean", "weighted_mean", "std", "worst_decile", "top5", "loss", "ece", "mce"}


def test_the_record(tmp_path):
    record, _ = run(fedavg, [*QUICK, "--rounds", "5", "--eval-every", "2"], tmp_path)
    assert {"algorithm", "args", "environment", "split", "parameters", "rounds", "final", "best", "bytes_up", "bytes_down", "seconds_per_round",
            "peak_memory_mb", "diverged"} <= set(record)
    assert record["algorithm"] == "fedavg" and record["diverged"] is False and record["args"]["fraction"] == 0.5
    assert record["parameters"] == 94_186 and record["bytes_up"] == record["bytes_down"] == 5 * 4 * 4 * 94_186  # 5 rounds, 4 clients, 4 bytes
    assert record["split"]["clients"] == 8 and record["split"]["sizes"] == [38] * 8 and len(record["split"]["fingerprint"]) == 16
    rounds = record["rounds"]
    assert [row["round"] for row in rounds] == [1, 2, 3, 4, 5] and all(row["seconds"] > 0 for row in rounds)
    assert [row["round"] for row in rounds if "global" in row] == [2, 4, 5]  # every second, and the last
    assert record["seconds_per_round"] == np.median([row["seconds"] for row in rounds]) and record["peak_memory_mb"] > 50
    assert [row["round"] for row in rounds if row.get("evaluation_seconds", 0) > 0] == [2, 4, 5]
    for row in rounds[1::2]:
        assert row["personal"]["mean"] <= row["personal"]["top5"] <= 1
        assert set(row["global"]) == GLOBAL and set(row["personal"]) == PERSONAL
    assert set(record["final"]["global"]) == GLOBAL | {"round"} and set(record["final"]["personal"]) == PERSONAL | {"round", "per_client"}
    assert record["final"]["global"] == {**rounds[4]["global"], "round": 5}
    assert record["best"]["global"]["top1"] == max(rounds[i]["global"]["top1"] for i in (1, 3, 4))
    assert record["best"]["personal"]["mean"] == max(rounds[i]["personal"]["mean"] for i in (1, 3, 4))
    assert np.mean(record["final"]["personal"]["per_client"]) == pytest.approx(record["final"]["personal"]["mean"])
    assert 0 <= record["final"]["global"]["top1"] <= record["final"]["global"]["top5"] <= 1
    environment = record["environment"]
    assert environment["torch"] == torch.__version__ and set(environment["sources"]) == {"fedavg.py", *records.SHARED}
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in environment["sources"].values())
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("module, more", [(fedavg, ["--momentum", "0.9"]), (fedavgm, ["--model", "cnn", "--transform", "scale", "--beta", "0.9", "--lr", "0.02"])])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(module, more, tmp_path):
    """Killed in the middle of round 4, after the evaluation of round 2: rounds 3 and 4 are done again."""
    argv = [*QUICK, "--rounds", "6", "--eval-every", "2", *more]
    whole, state = run(module, argv, tmp_path / "whole")
    killed(module, argv, tmp_path / "parts", lambda t, _: t == 3)
    assert len(json.loads((tmp_path / "parts" / "result.json").read_text())["rounds"]) == 2
    parts, resumed = run(module, [*argv, "--resume", "--parallel", "3"], tmp_path / "parts")
    assert set(state) == set(resumed) and all(torch.equal(state[name], resumed[name]) for name in state)
    assert same(whole, parts)


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedma"])
def test_a_finished_run_goes_on_with_more_rounds(method, tmp_path):
    """2 rounds and then 2 more give the bits of 4. The second round, as the last of 2, was evaluated."""
    module, own = (fedavg, []) if method == "fedavg" else (baselines, ["--method", method])
    argv = [*QUICK, *own, "--eval-every", "4"]
    whole, state = run(module, [*argv, "--rounds", "4"], tmp_path / "whole")
    run(module, [*argv, "--rounds", "2"], tmp_path / "parts")
    parts, longer = run(module, [*argv, "--rounds", "4", "--resume"], tmp_path / "parts")
    assert set(state) == set(longer) and all(torch.equal(state[name], longer[name]) for name in state)
    assert parts["args"]["rounds"] == 4 and parts["status"] == "finished"
    for name in ("global", "personal"):
        assert parts["rounds"][1].pop(name)
    assert same(whole, {**parts, "best": whole["best"]})


def test_an_interrupted_run_may_end_sooner(tmp_path, capsys):
    """Killed in the fourth of 6 rounds, after the evaluation of round 2, and resumed with 3: the bits of a run of 3 rounds."""
    argv = [*QUICK, "--eval-every", "2"]
    whole, state = run(fedavg, [*argv, "--rounds", "3"], tmp_path / "whole")
    killed(fedavg, [*argv, "--rounds", "6"], tmp_path / "parts", lambda t, _: t == 3)
    again = ["--resume", "--out", str(tmp_path / "parts")]
    refused(capsys, "belongs to --rounds 6, this run has 2: 2 are done", fedavg.main, [*argv, "--rounds", "2", *again])
    parts, sooner = run(fedavg, [*argv, "--rounds", "3", "--resume"], tmp_path / "parts")
    assert torch.equal(state["w"], sooner["w"]) and same(whole, parts) and parts["args"]["rounds"] == 3


@pytest.mark.parametrize("module, own, why", [
    (superfed, [], "Phase II begins at L*R"), (persfl, ["--fraction", "1", "--client-val", "0.2"], "Stage 2 follows the last round"),
    (baselines, ["--method", "fedavg-ft"], "clients fine-tune after the last round"), (baselines, ["--method", "fedspa"], "the masks' pace")])
def test_more_rounds_are_refused_where_their_number_matters(module, own, why, tmp_path, capsys):
    argv = [*QUICK, *own, "--limit", "160", "--client-test", "0.2", "--rounds", "1", "--out", str(tmp_path)]
    module.main(argv)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        module.main([*argv, "--rounds", "2", "--resume"])
    error = capsys.readouterr().err
    assert f"belongs to --rounds 1, this run has 2: {why}" in error and error.count("\n") == 1


def test_resuming_a_run_that_was_stopped_in_its_first_round_leaves_the_record_before_it(tmp_path):
    """A finished run, another one in its folder that is interrupted in round 1, and that one resumed."""
    finished, _ = run(fedavg, QUICK, tmp_path)
    with pytest.raises(SystemExit):
        killed(fedavg, [*QUICK, "--seed", "1"], tmp_path, lambda t, _: os.kill(os.getpid(), signal.SIGTERM))
    assert json.loads((tmp_path / "result.json").read_text())["rounds"] == []
    run(fedavg, [*QUICK, "--seed", "1", "--resume"], tmp_path)
    assert json.loads((tmp_path / "result.previous.json").read_text()) == finished


def test_a_method_may_record_tensors_and_have_a_path_among_its_flags(tmp_path):
    argv = [*QUICK, "--out", str(tmp_path)]
    parser = common.parser(None)
    parser.add_argument("--mine", type=pathlib.Path, default=pathlib.Path("here"))
    for more in ([], ["--resume"]):
        federation = common.Federation(common.parse(parser, {}, [*argv, *more]))
        made, state = common.Run(__file__, federation), SimpleNamespace(w=federation.initial_weights())
        for _ in made.rounds(state):
            if made.evaluates():
                made.log(federation.evaluate(state.w), mine=torch.tensor([1.5, 2]), other=np.float32(3))
        record = json.loads((tmp_path / "result.json").read_text())
        assert record["status"] == "finished" and record["args"]["mine"] == "here"
        assert record["final"]["mine"] == [1.5, 2] and record["final"]["other"] == 3


@pytest.mark.parametrize("eval_every", ["1", "9"])
@pytest.mark.parametrize("change, said", [
    (lambda state: state.w.add_(1), "state.w was changed in place; write state.w = state.w + ..."),
    (lambda state: setattr(state, "late", state.w), "the loop adds late to `state`; set every name before run.rounds(state)"),
    (lambda state: setattr(state, "h", np.float64(0.5)), "state.h is a float64; keep tensors and Python's own numbers"),
    (lambda state: setattr(state, "h", [torch.zeros(2)]), "state.h is a list; keep tensors and Python's own numbers")])
def test_a_state_that_could_not_be_resumed_is_refused(change, said, eval_every, tmp_path, capsys):
    """At the first evaluation; or, when the run is interrupted in a round that has changed it, before the state is written."""
    argv = [*QUICK, "--rounds", "5", "--eval-every", eval_every, "--out", str(tmp_path)]

    def main(argv):
        federation = common.Federation(common.parse(common.parser("mine"), {}, argv))
        run, state = common.Run(__file__, federation), SimpleNamespace(w=federation.initial_weights(), h=0.0)
        for t, _ in run.rounds(state):
            change(state)
            if t == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if run.evaluates():
                run.log(federation.evaluate(state.w))

    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert said in capsys.readouterr().err
    assert not (tmp_path / "state.pt").exists()


def test_two_files_of_one_name_are_refused(tmp_path, capsys):
    (tmp_path / "fedavg.py").write_text("def mine(labels, classes, rng, args): return [[0, 1, 2], [3, 4, 5]]\n")
    argv = [*QUICK, "--split", f"{tmp_path}/fedavg.py:mine", "--client-test", "0", "--out", str(tmp_path / "out")]
    refused(capsys, "two files of this run are called fedavg.py", fedavg.main, argv)


def test_images_that_nobody_gets_are_counted(capsys):
    federation([*QUICK, "--limit", "330", "--clients", "8", "--client-test", "0.2"]).describe()
    said = capsys.readouterr().out
    assert "note    10 of 330 training images go to no client" in said and "own test images 8" in said
    federation([*QUICK, "--limit", "320", "--clients", "8", "--client-test", "0"]).describe()
    said = capsys.readouterr().out
    assert "go to no client" not in said and "central test images" in said


def test_resume_overwrites_no_record(tmp_path, capsys):
    """Not a finished one without its state, as under results/; one of an interrupted run is moved aside."""
    run(fedavg, QUICK, tmp_path)
    (tmp_path / "state.pt").unlink()
    before = (tmp_path / "result.json").read_bytes()
    refused(capsys, "leave out --resume", fedavg.main, [*QUICK, "--resume", "--plot", "--out", str(tmp_path)])
    assert (tmp_path / "result.json").read_bytes() == before
    interrupted = before.replace(b'"status": "finished"', b'"status": "interrupted"')
    (tmp_path / "result.json").write_bytes(interrupted)
    run(fedavg, [*QUICK, "--resume"], tmp_path)
    assert (tmp_path / "result.previous.json").read_bytes() == interrupted


def test_a_resumed_record_names_every_environment(tmp_path, monkeypatch):
    """Rounds keep the versions that they were done by, and a plot of a finished run changes none."""
    argv = [*QUICK, "--rounds", "4", "--eval-every", "2"]
    killed(fedavg, argv, tmp_path, lambda t, _: t == 3)
    then = json.loads((tmp_path / "result.json").read_text())["environment"]
    monkeypatch.setattr(platform, "python_version", lambda: "99")
    record, _ = run(fedavg, [*argv, "--resume"], tmp_path)
    assert {**record["environment"], "resumed": None} == {**then, "resumed": None}
    assert [now["python"] for now in record["environment"]["resumed"]] == ["99"]
    monkeypatch.setattr(platform, "python_version", lambda: "100")
    before = (tmp_path / "result.json").read_bytes()
    run(fedavg, [*argv, "--resume", "--plot"], tmp_path)
    assert (tmp_path / "result.json").read_bytes() == before


def test_a_full_disk(tmp_path, capsys):
    """While it is full the run goes on and says so; at the end it is a fault of the run. What was there stays, nothing half lies
    about, and when there is room again --resume writes it all."""
    for name, part in (("state.pt", "state.pt.part"), ("result.json", "result.json.part")):
        out, argv = tmp_path / name, [*QUICK, "--rounds", "4", "--eval-every", "1"]
        killed(fedavg, argv, out, lambda t, _: t == 2)
        before, write = (out / name).read_bytes(), records.Run.write

        def full(self, path, put, alone=False, part=part):
            if path.name + ".part" == part:
                (out / part).unlink(missing_ok=True)
                (out / part).symlink_to("/dev/full")
            write(self, path, put, alone)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
            patch.setattr(records.Run, "write", full)
            fedavg.main([*argv, "--resume", "--out", str(out)])
        said, error = capsys.readouterr()
        assert stop.value.code == 2 and "No space left on device; make room, and start again with --resume" in error and error.count("\n") == 1
        assert said.count("can't be written: No space left on device") == 2 and "finished after 4 of 4" in said
        assert (out / name).read_bytes() == before and not list(out.glob("*.part"))
        record, state = run(fedavg, [*argv, "--resume"], out)
        whole, want = run(fedavg, argv, out / "whole")
        assert torch.equal(state["w"], want["w"]) and same(record, whole)


def test_the_state_is_written_when_that_is_worth_it(tmp_path, monkeypatch):
    """A clock that lets every write take 40 seconds and every round 100: after the first, one in eight rounds."""
    seconds, put, begin, written = [0.0], records.Run.put_state, records.Run.begin_round, []

    def slow(self, part):
        written.append(len(self.kept.history))
        seconds[0] += 40
        put(self, part)

    monkeypatch.setattr(records.time, "monotonic", lambda: seconds[0])
    monkeypatch.setattr(records.Run, "put_state", slow)
    monkeypatch.setattr(records.Run, "begin_round", lambda self, t: (seconds.__setitem__(0, seconds[0] + 100), begin(self, t)))
    run(fedavg, [*QUICK, "--rounds", "21", "--eval-every", "1", "--limit", "40", "--clients", "2", "--per-client", "4"], tmp_path)
    assert written == [1, 8, 15, 21]  # 40 s are 5 % of 800, and 80 s of 1600; one second is always free
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json", "state.pt"]


def test_a_reader_who_has_seen_enough_does_not_end_the_run(tmp_path):
    argv = [sys.executable, HERE / "fedavg.py", *QUICK, "--rounds", "4", "--eval-every", "1", "--out", str(tmp_path)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(timeout=100) == 0
    record = json.loads((tmp_path / "result.json").read_text())
    assert record["status"] == "finished" and len(record["rounds"]) == 4


def test_what_only_unix_has_is_not_needed(tmp_path):
    """As on Windows: no fcntl, resource, pwd, grp, termios, and a C library that can't be opened by no name."""
    code = (f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
            "import torch, torchvision\nfor name in ('fcntl', 'resource', 'pwd', 'grp', 'termios', 'posix_ipc'): sys.modules[name] = None\n"
            "for name in [n for n in sys.modules if n.startswith('filelock')]: del sys.modules[name]\n"
            "import ctypes, os, warnings\nwarnings.simplefilter('ignore')\ndef missing(*_): raise TypeError\nctypes.CDLL = missing\n"
            "del os.sched_getaffinity\nimport fedavg\nfedavg.main(sys.argv[1:])\n")
    for more in ([], ["--resume"]):
        done = subprocess.run([sys.executable, "-c", code, *QUICK, "--out", str(tmp_path), *more], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "result.json").read_text())["peak_memory_mb"] is None


def test_divergence_is_recorded_and_the_last_finite_state_kept(tmp_path, capsys, monkeypatch):
    train = common.Federation.train

    def exploding(self, step, clients, S, t, *shared, **options):
        w, u = train(self, step, clients, S, t, *shared, **options)
        return (w * float("inf") if t == 3 else w), u

    monkeypatch.setattr(common.Federation, "train", exploding)
    argv = [*QUICK, "--rounds", "9", "--eval-every", "2"]
    with pytest.raises(SystemExit) as stop:
        fedavg.main([*argv, "--out", str(tmp_path / "a")])
    assert stop.value.code == 3 and "diverged" in capsys.readouterr().out
    record = json.loads((tmp_path / "a" / "result.json").read_text())
    assert record["diverged"] is True and record["rounds"][-1]["round"] == 4 and record["rounds"][-1]["diverged"] is True
    assert record["final"]["global"]["round"] == 2
    kept = torch.load(tmp_path / "a" / "state.pt", weights_only=True)
    assert kept["state"]["w"].isfinite().all() and len(kept["history"]) == 3


def test_the_accuracies_per_client_are_of_the_round_that_final_names(tmp_path, monkeypatch):
    """A round that is evaluated but then found to have diverged leaves nothing of itself in `final`."""
    evaluate = common.Federation.evaluate
    seen = []

    def failing(self, w):
        seen.append(w)
        return {**evaluate(self, w), **({"loss": float("nan")} if len(seen) == 2 else {})}

    monkeypatch.setattr(common.Federation, "evaluate", failing)
    with pytest.raises(SystemExit):
        fedavg.main([*QUICK, "--lr", "0.1", "--rounds", "6", "--eval-every", "2", "--out", str(tmp_path)])
    personal = json.loads((tmp_path / "result.json").read_text())["final"]["personal"]
    assert personal["round"] == 2 and np.mean(personal["per_client"]) == pytest.approx(personal["mean"])


def test_divergence_in_the_first_round_leaves_the_initial_state(tmp_path):
    """And neither the state nor the record of an earlier run in the same folder."""
    run(fedavg, QUICK, tmp_path)
    with pytest.raises(SystemExit) as stop:
        fedavg.main([*QUICK, "--lr", "1e30", "--out", str(tmp_path)])
    assert stop.value.code == 3 and json.loads((tmp_path / "result.json").read_text())["diverged"]
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    assert saved["history"] == [] and saved["args"]["lr"] == 1e30
    assert torch.equal(saved["state"]["w"], federation(QUICK).initial_weights())
    assert (tmp_path / "state.previous.pt").exists() and (tmp_path / "result.previous.json").exists()


def test_a_signal_while_saving_waits_for_the_files_to_be_whole(tmp_path, monkeypatch):
    write = torch.save

    def interrupted(*args):
        write(*args)
        if interrupted.first:
            interrupted.first = False
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)

    interrupted.first = True
    monkeypatch.setattr(torch, "save", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as stop:
        fedavg.main([*QUICK, "--rounds", "6", "--eval-every", "2", "--out", str(tmp_path)])
    assert stop.value.code in (130, 143) and signal.getsignal(signal.SIGINT) is before
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "interrupted"
    assert len(torch.load(tmp_path / "state.pt", weights_only=True)["history"]) == 2


def test_a_record_has_no_number_that_json_has_not(tmp_path, monkeypatch):
    """As an algorithm's own measure can have."""
    log = records.Run.log
    monkeypatch.setattr(records.Run, "log", lambda self, *both: log(self, *both, own={"a": [float("nan"), 1.5], "b": float("-inf")}))
    fedavg.main([*QUICK, "--out", str(tmp_path)])
    record = json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)
    assert record["final"]["own"] == {"a": [None, 1.5], "b": None}


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interruption_writes_the_record_and_the_state(number, code, tmp_path):
    """A real process is interrupted in a late round, and resumed to the result of one that was left alone."""
    argv = [*QUICK, "--rounds", "40", "--eval-every", "20", "--out", str(tmp_path / "parts")]
    process = subprocess.Popen([sys.executable, HERE / "fedavg.py", *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "round 20" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(0.3)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "interrupted after" in out and "Traceback" not in err
    record = json.loads((tmp_path / "parts" / "result.json").read_text())
    assert record["status"] == "interrupted" and 20 <= len(record["rounds"]) < 40
    assert len(torch.load(tmp_path / "parts" / "state.pt", weights_only=True)["history"]) == len(record["rounds"])
    parts, state = run(fedavg, [*argv[:-2], "--resume"], tmp_path / "parts")
    whole, want = run(fedavg, argv[:-2], tmp_path / "whole")
    assert torch.equal(state["w"], want["w"]) and same(parts, whole)


def test_an_interruption_in_the_midst_of_a_vmapped_step_writes_the_state(tmp_path, monkeypatch):
    """The record and the state of the round before it, from which --resume goes on."""
    prepare, cross_entropy, records_log = engine.prepare, common.cross_entropy, records.Run.log

    def together(fed):
        prepare(fed)
        fed.vmap, fed.parallel, fed.map = True, None, map

    def interrupted(logits, b):
        if logged == [1, 2]:
            logged.append("interrupted")
            os.kill(os.getpid(), signal.SIGTERM)
        return cross_entropy(logits, b)

    def log(self, *measures, **more):
        logged.append(self.row["round"])
        return records_log(self, *measures, **more)

    logged = []
    monkeypatch.setattr(engine, "prepare", together)
    monkeypatch.setattr(common, "cross_entropy", interrupted)
    monkeypatch.setattr(records.Run, "log", log)
    argv = [*QUICK, "--rounds", "3", "--eval-every", "1"]
    with pytest.raises(SystemExit) as stop:
        fedavg.main([*argv, "--out", str(tmp_path / "parts")])
    assert stop.value.code == 143
    record = json.loads((tmp_path / "parts" / "result.json").read_text())
    assert record["status"] == "interrupted" and len(record["rounds"]) == 2
    parts, state = run(fedavg, [*argv, "--resume"], tmp_path / "parts")
    whole, want = run(fedavg, argv, tmp_path / "whole")
    torch.testing.assert_close(state["w"], want["w"])


def test_plots(tmp_path):
    run(fedavg, [*QUICK, "--plot"], tmp_path)
    for name in ("curves.png", "clients.png", "split.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"


def test_the_commit_is_recorded(tmp_path, monkeypatch):
    """With a plus for a file that isn't in it as it is: changed, new, ignored, or from elsewhere; other files don't matter."""
    if not shutil.which("git"):
        pytest.skip("no git")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))  # of no checkout around it
    here, mine = tmp_path / "here", tmp_path / "mine.py"
    here.mkdir()
    files = [here / name for name in ("records.py", "fedavg.py", "other.py")]
    for path in (mine, *files):
        path.write_text("one\n")
    monkeypatch.setattr(records, "__file__", str(files[0]))
    assert records.commit(files) is None  # no checkout

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", "-C", here, *who, *words], capture_output=True, text=True, check=True).stdout.strip()

    (here / ".gitignore").write_text("ignored.py\n")
    git("init", "-q"), git("add", "."), git("commit", "-q", "-m", "one")
    (here / "new.py").write_text("one\n"), (here / "ignored.py").write_text("one\n")
    files[2].write_text("two\n")
    head = git("rev-parse", "HEAD")
    assert records.commit(files[:2]) == head
    for more in (files[2], here / "new.py", here / "ignored.py", mine):
        assert records.commit([*files[:2], more]) == f"{head}+"


def test_the_record_has_the_file_of_a_model_from_elsewhere(toy, tmp_path):
    """And of one that psinet.py wraps. The file may say what a model is in any way that Python has."""
    (tmp_path / "mine.py").write_text("""from __future__ import annotations
import dataclasses
import functools

@dataclasses.dataclass
class Size:
    hidden: int

def net(m, x, classes, size):
    return m.linear("fc2", m.linear("fc1", x.flatten(1), size.hidden), classes)

small = functools.partial(net, size=Size(5))
""")
    for module, more in ((fedavg, []), (psinet, ["--groups", "0"])):
        argv = ["--dataset", toy, "--model", f"{tmp_path}/mine.py:small", "--split", "iid", "--clients", "4", "--rounds", "1", "--device", "cpu",
                *more]
        record, _ = run(module, argv, tmp_path / module.__name__)
        assert set(record["environment"]["sources"]) == {f"{module.__name__}.py", "mine.py", *records.SHARED}


def test_another_file_in_the_folder_is_no_state(tmp_path):
    """tables/fedslr.py exports factors to this name, beside a run's record."""
    (tmp_path / "state-factors.pt").write_bytes(b"")
    record, _ = run(fedavg, [*QUICK, "--rounds", "1", "--resume"], tmp_path)
    assert record["status"] == "finished"


def test_two_runs_in_one_folder_are_refused(tmp_path, capsys):
    """The second, while the first is under way; nothing of the first is touched, and the folder is free again afterwards."""
    argv = [*QUICK, "--out", str(tmp_path / "run")]
    fed = federation(argv)
    rounds = records.Run(fedavg.__file__, fed).rounds(SimpleNamespace(w=torch.zeros(2)))
    next(rounds)
    refused(capsys, "another run is writing to", fedavg.main, argv)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    rounds.close()
    fedavg.main(argv)


def readme_lines(first):
    """The block of code that begins with that line, in README.md or the pages on runs and on what one adds."""
    text = "".join((HERE / name).read_text() for name in ("README.md", "docs/run.md", "docs/extend.md"))
    return textwrap.dedent(text[text.index(f"    {first}\n") :].split("\n\n")[0])


def test_the_pages_lines_read_numbers_of_a_comparison(tmp_path):
    runs = [run(fedavg, [*QUICK, "--seed", str(seed)], tmp_path / str(seed))[0] for seed in range(3)]
    names = {}
    exec(readme_lines("import json, numpy").replace("runs/compare/fedavg", str(tmp_path)), names)
    assert names["last"] == [record["rounds"][1]["personal"]["mean"] for record in runs]
    assert names["clients"] == runs[0]["final"]["personal"]["per_client"] and names["curve"] == [(2, names["last"][0])]


def test_the_pages_lines_load_a_trained_model(tmp_path):
    """On all test images they give the run's own accuracy, which is above chance; --limit changes what normalize subtracts."""
    record, _ = run(fedavg, [*QUICK, "--limit", "1500", "--rounds", "4", "--lr", "0.05", "--transform", "normalize", "--split", "iid"], tmp_path)
    lines, names = readme_lines("import torch, types, common").replace("runs/fedavg-shapes-0", str(tmp_path)), {}
    exec(lines, names)
    assert names["logits"].shape == (5, 10)
    exec(lines.replace("data.images[:5]", "data.images[data.n_train:]"), names)
    right = names["logits"].argmax(1).numpy() == names["data"].labels[1500:]
    assert right.mean() == pytest.approx(record["final"]["global"]["top1"]) and right.mean() > 0.15


def test_the_pages_own_model_trains(tmp_path):
    """In every kind of file; the record names the model and the file."""
    (tmp_path / "mymodels.py").write_text(readme_lines("import torch.nn.functional as F"))
    model = f"{tmp_path}/mymodels.py:mine"
    for module, more in ((fedavg, []), (psinet, ["--depth", "conv1"]), (baselines, ["--method", "fedper"])):
        record, _ = run(module, [*QUICK, "--limit", "80", "--clients", "4", "--client-test", "0.2", "--rounds", "1", "--model", model, *more],
                        tmp_path / module.__name__)
        assert record["args"]["model"] == model and "mymodels.py" in record["environment"]["sources"]


def test_the_pages_own_split_is_taken(toy, tmp_path):
    """10,000 images in the ratio 1 : 2 : 3 : 4. The record names the file; another version of it does not go on."""
    file = tmp_path / "mysplits.py"
    file.write_text(readme_lines("import numpy as np"))
    argv = [*QUICK, "--limit", "10000", "--clients", "4", "--client-test", "0", "--rounds", "1", "--split", f"{file}:by_size", "--epochs", "1"]
    fed = federation(argv)
    assert [len(index) for index in fed.whole_split.train] == [1000, 2000, 3000, 4000] and fed.K == 4
    assert len(np.unique(np.concatenate(fed.whole_split.train))) == 10_000
    assert federation([*argv, "--split-seed", "1"]).whole_split.fingerprint() != fed.whole_split.fingerprint() == federation(argv).whole_split.fingerprint()
    record, _ = run(fedavg, [*argv, "--limit", "500"], tmp_path / "run")
    assert record["split"]["sizes"] == [50, 100, 150, 200] and "mysplits.py" in record["environment"]["sources"]


@pytest.mark.parametrize("words, said", [
    ("[[0, 1], [2, 1.5]]", "client 1 something else than an array of image numbers from 0 to 399"), ("[[0], []]", "client 1 no images"),
    ("[[0], [400]]", "client 1 something else"), ("[[-1], [2]]", "client 0 something else"), ("[[0, 0], [2]]", "client 0 an image twice"),
    ("[3, 4]", "client 0 something else"), ("None", "gives no list"), ("[]", "gives no list"), ("1 / 0", "fails: ZeroDivisionError"),
    ("[[[0], [1, 2]], [3]]", "fails: ValueError")])
def test_a_split_that_gives_no_image_numbers_is_refused(words, said, tmp_path, capsys):
    (tmp_path / "s.py").write_text(f"def mine(labels, classes, rng, args): return {words}\n")
    refused(capsys, said, fedavg.main, [*QUICK, "--client-test", "0", "--split", f"{tmp_path}/s.py:mine"])


OTHERS_MODELS = """
import torch, torch.nn.functional as F
norm, linear = torch.nn.BatchNorm2d(3, affine=False), torch.nn.Linear(12, 12)
module = torch.nn.Sequential(linear)
def end(m, x): return m.linear("fc", x.flatten(1), 3)
def dropout(m, x, classes): return end(m, F.dropout(x, 0.1))
def noise(m, x, classes): return end(m, x + 0.1 * torch.randn_like(x))
def batchnorm(m, x, classes): return end(m, norm(m.conv("conv", x, 3, 1)))
def functional(m, x, classes): return end(m, F.batch_norm(m.conv("conv", x, 3, 1), None, None, training=True))
def inside(m, x, classes): return end(m, linear(x.flatten(1).repeat(1, 3)))
def few(m, x, classes): return end(m, x)[:, :2]
def typo(m, x, classes): return m.dense("fc", x.flatten(1), 3)
def two(m, x): return end(m, x)
def pair(m, x, classes): return end(m, m.conv("conv", x, 3, (1, 1)))
def nothing(m, x, classes): end(m, x)
def nan(m, x, classes): return end(m, x) / 0
def depends(m, x, classes): return m.linear("dark" if x.sum() == 0 else "bright", x.flatten(1), 3)
def gauss(m, x, classes): return m.linear("fc", x.flatten(1), 3, init=(("gauss", 0.1), ("constant", 0.0)))
def single(m, x, classes): return m.linear("fc", x.flatten(1), 3, init=("normal", 0.1))
def running(m, x, classes): return end(m, m.batchnorm("bn", x))
"""


@pytest.mark.parametrize("model, words", [
    ("dropout", "two calls on one batch differ"), ("noise", "two calls on one batch differ"),
    ("batchnorm", "depend on the others in its batch"), ("functional", "depend on the others in its batch"),
    ("inside", "all weights must come from m"), ("module", "an nn.Module"), ("few", "the shape (8, 2)"), ("norm", "an nn.Module"),
    ("nothing", "gives a NoneType, not the logits"), ("nan", "not finite"), ("depends", "asks for bright.weight, where it asked for dark.weight"),
    ("gauss", "the init of fc.weight is ('gauss', 0.1)"), ("single", "the init of fc.weight is 'normal'"), ("running", "no attribute 'batchnorm'"),
    ("typo", "has no attribute 'dense'"), ("two", "two() takes 2 positional arguments"), ("nosuch", "has no function nosuch"), ("pair", "kernels are square"),
])
def test_models_that_are_not_functions_of_their_weights_are_refused(model, words, toy, tmp_path, capsys):
    (tmp_path / "others.py").write_text(OTHERS_MODELS)
    argv = ["--dataset", toy, "--clients", "4", "--split", "iid", "--out", str(tmp_path / "out"), "--device", "cpu"]
    refused(capsys, words, fedavg.main, [*argv, "--model", f"{tmp_path}/others.py:{model}"])


@pytest.mark.parametrize("model, words", [("nosuch.py:f", "there is no file nosuch.py"), ("cnn:f", "cnn is no .py file")])
def test_models_that_are_not_there_are_refused(model, words, capsys):
    refused(capsys, words, fedavg.main, [*QUICK, "--model", model])


def test_what_clients_keep_takes_a_row_for_each_client_or_one_for_all():
    fed = federation([*QUICK, "--clients", "8"])
    V = fed.per_client(torch.zeros(3))
    V[[1, 4]] = torch.tensor([1.0, 2, 3])
    V[[5]] = torch.tensor([[4.0, 5, 6]])
    V[7] = torch.tensor([7.0, 8, 9])
    want = torch.zeros(8, 3)
    want[1] = want[4] = torch.tensor([1.0, 2, 3])
    want[5], want[7] = torch.tensor([4.0, 5, 6]), torch.tensor([7.0, 8, 9])
    assert torch.equal(V.all, want)
    with pytest.raises(RuntimeError):
        V[[0, 1, 2]] = torch.ones(2, 3)
    assert torch.equal(V.all, want)
    for rows in fed.all_rows:
        rows.undo()
    assert not V.all.any()
