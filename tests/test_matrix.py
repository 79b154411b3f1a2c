"""Each command of commands.py is trained once, and that run is compared with

- the numbers in results/golden.json,
- a run that was stopped after its first round and went on by --resume: equal bits,
- two processes under torchrun, which train some of the commands: equal bits,
- the GPU's ways on a GPU that is pretended (pretend.py): equal up to rounding.

    python tests/test_matrix.py     writes results/golden.json anew, and says what has changed

Committed records count whatever the code does today, so golden.json is what must see a change.
Other CPUs, and other versions of torch, round differently: on emulated ones (AVX2, SSE4) numbers
differed by a tenth of the tolerances at most.
"""

import contextlib
import importlib
import io
import json
import pathlib
import shutil
import sys
import tempfile

import filelock
import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

import fl.gpu
import fl.records
import fl.run
import pretend
from commands import COMMANDS, TWO
from conftest import ended, equal, run, same, saved, torchrun

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "results" / "golden.json"

# How far a number may be off, as a share of the number or of its tensor's norm. Larger: the small
# tensors that FedSLR's thresholds leave, and half precision.
TOLERANCE = 3e-5
LARGER = {("fedslr", "state gamma"): 2e-2, ("fedslr", "state p"): 1e-2,
          ("fedavg, bf16", "state w"): 5e-4, ("fedavg, bf16", "loss"): 1e-4}
MEASURES = 0.03  # of accuracies and the algorithm's own measures, on a few images


def train(name, out):
    """Trains a command. Its folder as it was after the first of two rounds is copied to OUT-1."""
    module, *argv = COMMANDS[name]
    save = fl.run.Run.save

    def saving(self):
        save(self)
        if self.status == "unfinished" and len(self.history) == 1:
            shutil.copytree(out, out.with_name(out.name + "-1"),
                            ignore=shutil.ignore_patterns(".lock"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fl.run.Run, "save", saving)
        return run(importlib.import_module(module), [*argv, "--parallel", "1"], out)


@pytest.fixture(scope="session")
def once(tmp_path_factory, worker_id):
    """once(name, make) returns a folder, for which make(folder) is called by one worker of all."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder if worker_id == "master" else folder.parent

    def once(name, make):
        out = folder / name
        with filelock.FileLock(f"{out}.once"):
            if not out.with_name(f"{name}.made").exists():
                shutil.rmtree(out, ignore_errors=True)
                make(out)
                out.with_name(f"{name}.made").touch()
        return out

    return once


@pytest.fixture(scope="session")
def one(once):
    """one(name) returns the folder of a command that one process has trained."""
    return lambda name: once(name, lambda out: train(name, out))


@pytest.fixture(scope="session")
def two(once):
    """two(name) returns the folder of a command that two processes have trained. They have trained
    those of TWO, one after the other."""
    def make(out):
        out.mkdir()
        commands = [[*COMMANDS[name], "--out", str(out / name)] for name in TWO]
        code, said, error = ended(torchrun(out, commands))
        (out / "said.json").write_text(json.dumps([code, said, error[-3000:]]))

    return lambda name="": once("two processes", make) / name


each = pytest.mark.parametrize("name", COMMANDS)


@each
def test_numbers_have_not_changed(name, one):
    wrong = differences(name, numbers_of(one(name)), json.loads(GOLDEN.read_text())[name])
    assert not wrong, (
        f"`{' '.join(COMMANDS[name])}` ends with other numbers than those in results/golden.json: "
        f"{', '.join(wrong)}. If this change is wanted, run `python tests/test_matrix.py`, which "
        f"writes the file, repeat the records of {algorithm(name)} (python -m papers --again), and "
        "add a line to CHANGELOG.md.")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "fedavg, target"])
def test_a_resumed_run_equals_an_uninterrupted_one(name, one, tmp_path):
    """Stopped after round 1, when the state was written. With other threads than before."""
    out, (module, *argv) = one(name), COMMANDS[name]
    shutil.copytree(out.with_name(f"{name}-1"), tmp_path / "cut")
    assert fl.records.read(tmp_path / "cut" / "result.json")["status"] == "unfinished"
    record, state = run(importlib.import_module(module), [*argv, "--resume", "--parallel", "2"],
                        tmp_path / "cut")
    assert equal(state, saved(out)) and same(record, fl.records.read(out / "result.json"))


@pytest.mark.parametrize("name", TWO)
def test_two_processes_equal_one(name, one, two):
    """Every process has the whole state, so that on a CPU they have the bits of one."""
    code, _, error = json.loads((two() / "said.json").read_text())
    assert code == 0, error
    record = fl.records.read(two(name) / "result.json")
    assert record["status"] == "finished" and record["environment"]["processes"] == 2
    assert equal(saved(two(name)), saved(one(name)))
    assert same(record, fl.records.read(one(name) / "result.json"))


def test_only_one_of_the_processes_prints_and_writes(two):
    _, said, _ = json.loads((two() / "said.json").read_text())
    lines = said.splitlines()
    assert sum(line.startswith("split ") for line in lines) == len(TWO)
    assert sorted(path.name for path in two("fedavg").iterdir()) == [
        "model.pt", "result.json", "state.pt"]


# How far a state on the pretended GPU may be from the loop's, as a share of the largest number. A
# rounding can decide a threshold, or a ReLU behind BatchNorm, otherwise.
NEAR = {"fedslr": 1e-2, "psinet, FedAvg with BatchNorm": 1e-3, "psinet, all groups": 1e-3}
# test_gpu.py has a run of these; one client's steps are those of several
ELSEWHERE = {"fedavg, bf16", "superfed, model", "superfed, own start", "persfl", "psinet",
             *(name for name, (module, *_) in COMMANDS.items()
               if module == "baselines" and name.endswith("one client"))}


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ELSEWHERE])
def test_the_gpus_ways_give_what_the_loop_gives(name, one, tmp_path):
    """Each step is captured, and what is repeated is what was captured."""
    (module, *argv), captured = COMMANDS[name], []
    with pretend.gpu() as operations, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fl.gpu, "capture", lambda *step: captured.append(step)
                      or operations.capture(*step))
        record, state = run(importlib.import_module(module), argv, tmp_path)
    assert captured and "slower" not in record["environment"]
    wanted, loop = saved(one(name)), fl.records.read(one(name) / "result.json")
    for key, z in wanted.items():
        if torch.is_tensor(z) and z.is_floating_point():
            gap = (state[key].double() - z.double()).abs().max()
            assert gap <= NEAR.get(name, 1e-5) * z.abs().max(), (key, float(gap))
    assert all(record[key] == loop[key] for key in ("split", "bytes_up"))


def test_every_file_that_trains_is_compared():
    files = {path.stem for path in ROOT.glob("*.py") if "common.Run(" in path.read_text()}
    assert files == {module for module, *_ in COMMANDS.values()} and "fedavg" in files
    assert json.loads(GOLDEN.read_text()).keys() == COMMANDS.keys()


# The golden numbers


def algorithm(name):
    module, *argv = COMMANDS[name]
    return argv[1] if module == "baselines" else module


def described(x):
    """Returns the norm of a tensor or number, and its projections on two fixed vectors."""
    x = np.asarray(x, dtype=float).ravel()
    angles = np.arange(x.size)
    return [np.linalg.norm(x), x @ np.cos(angles), x @ np.sin(angles)]


def numbers_of(out):
    """Returns {what: a few numbers} of the run in a folder."""
    record = fl.records.read(out / "result.json")
    found = {f"state {key}": described(z) for key, z in saved(out).items() if z is not None}
    for part, measures in record["final"].items():
        values = [z for z in tree_leaves(measures) if isinstance(z, int | float)]
        found[f"mean of {part}"] = [np.mean(values)] if values else []
        if part in ("global", "personal"):
            found[f"loss, {part}"] = [measures["loss"]]
    found["sent"] = [record["bytes_up"], record["bytes_down"]]
    return {key: [float(f"{z:.10g}") for z in values] for key, values in found.items()}


def differences(name, now, then):
    """Returns the names of what is not equal within the tolerance."""
    def equal(key):
        a, b = now.get(key), then.get(key)
        if a is None or b is None or len(a) != len(b):
            return False
        scale, share = max(map(abs, b), default=0), LARGER.get((name, key.split(",")[0]), TOLERANCE)
        limit = MEASURES * max(1, scale) if key.startswith("mean") else share * scale
        return np.allclose(a, b, rtol=0, atol=limit)

    return [key for key in sorted({**now, **then}) if not equal(key)]


def main():
    then = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    now, changed = {}, set()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        for name in COMMANDS:
            train(name, pathlib.Path(folder, name))
            now[name] = numbers_of(pathlib.Path(folder, name))
            if name in then and not differences(name, now[name], then[name]):
                now[name] = then[name]  # so that small differences do not add up
            elif name in then:
                changed.add(name)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(z)}" for name, z in now.items())
    GOLDEN.write_text(f"{{\n{lines}\n}}\n")
    for name in sorted(changed):
        print(f"changed: {name} ({algorithm(name)}); add a line to CHANGELOG.md")
    print(f"{GOLDEN}: {len(now)} commands, {len(now.keys() - then.keys())} of them new")


if __name__ == "__main__":
    sys.exit(main())
