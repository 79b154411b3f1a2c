"""What the tests share: a small data set, a linear model, a quick way to a federation and to a
finished run."""

import json
import os
import pathlib
import subprocess
import sys
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent / part) for part in ("", "checks")]

import common
import fl.gpu
import fl.models
import fl.plots
import fl.records
import fl.run
import pretend
from pretend import eager

os.environ["REPEATED_ROUND"] = ""  # a process more for each run of a user's method

# a product with another number of threads is rounded otherwise, and some tests compare bits
torch.set_num_threads(1)
fl.plots.STYLE["savefig.dpi"] = 50  # quicker

QUICK = ["--dataset", "shapes", "--limit", "400", "--limit-test", "100", "--clients", "8",
         "--fraction", "0.5", "--rounds", "2", "--epochs", "1", "--lr", "0.01", "--lr-decay", "1",
         "--batch-size", "20", "--transform", "scale", "--device", "cpu"]


def linear(channels, classes, size):
    """Softmax regression: small enough to be computed by hand."""
    fc = nn.Linear(channels * size[0] * size[1], classes)
    model = nn.Sequential(OrderedDict(flatten=nn.Flatten(), fc=fc))
    model.start = fl.models.pytorch_default
    return model


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The path of a .npz with 60 training and 30 test images of 2x2 grey pixels in 3 classes;
    --model linear takes them."""
    monkeypatch.setitem(common.MODELS, "linear", linear)
    rng = np.random.default_rng(7)
    arrays = {f"x_{part}": rng.integers(0, 256, (n, 2, 2), dtype=np.uint8)
              for part, n in (("train", 60), ("test", 30))}
    arrays.update({f"y_{part}": np.arange(n) % 3 for part, n in (("train", 60), ("test", 30))})
    np.savez(tmp_path / "toy.npz", **arrays)
    return str(tmp_path / "toy.npz")


def small(toy):
    """The flags of a run of seconds in a process of its own, which need not make `shapes`."""
    return ["--dataset", toy, "--model", "mnistnet", "--transform", "scale", "--split", "iid",
            "--clients", "4", "--client-test", "0.2", "--fraction", "0.5", "--epochs", "1", "--lr",
            "0.01", "--device", "cpu"]


def federation(argv, **defaults):
    """A Federation from a command line."""
    return common.Federation(common.parse(common.parser("test", **defaults), {}, argv))


def on_a_gpu(fed, way="together"):
    """Returns the federation, which from now on trains as on a GPU, at first in the given way."""
    fed.training = pretend.Training(fed.device, fed.args, pretend.ways_from(way))
    fed.training.begin(fed.net.d, max(map(len, fed.split.train)))
    return fed


def paths(fed, monkeypatch):
    """Sets a federation to each way of training, the loop, which is the specification, first."""
    monkeypatch.setattr(fl.gpu, "capture", eager)
    for way in reversed(fl.gpu.WAYS):
        on_a_gpu(fed, way)
        yield way
        assert not fed.training.gave_up, fed.training.gave_up


def run(module, argv, out):
    """Runs an algorithm's main in this process; returns its record and its saved state."""
    module.main([*argv, "--out", str(out)])
    return fl.records.read(out / "result.json"), saved(out)


def saved(out):
    """Returns the state in a run's folder."""
    return torch.load(out / "state.pt", weights_only=True)["state"]


def write_every_round(patch):
    """Has runs write their state after every round, however long that takes."""
    patch.setattr(fl.run.Run, "cost", property(lambda run: 0.0, lambda run, seconds: None),
                  raising=False)


def killed(module, argv, out, when):
    """A run that dies at the first call of Federation.train for which when(t, options) is true, at
    t = 0 the first round. It has written its state after every round."""

    class Killed(Exception):
        pass

    train = common.Federation.train

    def dying(self, client_update, S, t, **options):
        if when(t, options):
            raise Killed
        return train(self, client_update, S, t, **options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(common.Federation, "train", dying)
        write_every_round(patch)
        module.main([*argv, "--out", str(out)])


def torchrun(folder, commands, script=HERE / "processes.py"):
    """The commands ([["fedavg", "--rounds", "2"], ...]), by two processes, which can't take the GPU
    or more threads: a Popen."""
    (folder / "commands.json").write_text(json.dumps(commands))
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         script, folder / "commands.json"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process):
    """Returns a process's exit code, its output and its errors. A hang fails here."""
    out, error = process.communicate(timeout=600)
    return process.returncode, out, error


def equal(a, b):
    """Whether two saved states have the same bits."""
    return a.keys() == b.keys() and all(
        torch.equal(z, b[name]) if torch.is_tensor(z) else z == b[name] for name, z in a.items())


def same(a, b):
    """Two records, but for what differs between any two runs."""
    for record in (a, b):
        for row in record["rounds"]:
            row.update(seconds=0, evaluation_seconds=0)
        for name in ("seconds_per_round", "peak_memory_mb", "environment", "command"):
            record.pop(name)
        for name in fl.records.FREE:
            record["args"].pop(name, None)
    return a == b


def refused(capsys, words, call, *args, **named):
    """The call ends as a wrong command line does: one line on stderr, with these words, nothing on
    stdout, and exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        call(*args, **named)
    out, error = capsys.readouterr()
    assert (stop.value.code == 2 and "error:" in error and words in error
            and error.count("\n") == 1), error
    assert not out, out


def softmax_gradient(w, x, y, classes=3):
    """d/dw of the mean cross-entropy of softmax regression in float64; w = [weights (classes x
    features), biases]."""
    features = x.shape[1]
    weight, bias = w[: classes * features].reshape(classes, features), w[classes * features :]
    z = x @ weight.T + bias
    p = np.exp(z - z.max(1, keepdims=True))
    p = p / p.sum(1, keepdims=True) - np.eye(classes)[y]
    return np.concatenate([(p.T @ x).ravel(), p.sum(0)]) / len(x)


def pixels(fed, index):
    """What --transform scale makes of images, in float64: [n, features]; and their labels."""
    return fed.data.images[index].reshape(len(index), -1) / 255, fed.data.labels[index]


def images(n=40, test=20, size=8, classes=4, **changes):
    """A good data set in a .npz, but for the changes; None: without that array."""
    rng = np.random.default_rng(0)
    x, u = (rng.integers(0, 256, (m, size, size, 3), dtype=np.uint8) for m in (n, test))
    arrays = {"x_train": x, "y_train": np.arange(n) % classes,
              "x_test": u, "y_test": np.arange(test) % classes, **changes}
    return {name: array for name, array in arrays.items() if array is not None}
