"""What the tests share: a small data set, a linear model, a quick way to a federation and to a finished run."""

import json
import pathlib
import sys

import numpy as np
import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import common  # noqa: E402

TIMES = {"seconds": 0, "evaluation_seconds": 0}  # what differs between equal rounds
QUICK = ["--dataset", "shapes", "--limit", "400", "--clients", "8", "--per-client", "2", "--fraction", "0.5", "--rounds", "2", "--epochs", "1",
         "--lr", "0.01", "--device", "cpu"]


def linear(m, x, classes):
    """Softmax regression: small enough to be computed by hand."""
    return m.linear("fc", x.flatten(1), classes)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The path of a .npz with 60 training and 30 test images of 2x2 grey pixels in 3 classes; --model linear takes them."""
    monkeypatch.setitem(common.MODELS, "linear", linear)
    rng = np.random.default_rng(7)
    arrays = {f"x_{part}": rng.integers(0, 256, (n, 2, 2), dtype=np.uint8) for part, n in (("train", 60), ("test", 30))}
    arrays.update({f"y_{part}": np.arange(n) % 3 for part, n in (("train", 60), ("test", 30))})
    np.savez(tmp_path / "toy.npz", **arrays)
    return str(tmp_path / "toy.npz")


def federation(argv, **defaults):
    """A Federation from a command line."""
    return common.Federation(common.parse(common.parser("test", **defaults), {}, argv))


class Conv(dict):
    """Ways that need no tuning: all clients together, convolutions as such."""

    def __contains__(self, step):
        return True


class Seen(dict):
    """Graphs are made when shapes come again; here they are taken to have come before."""

    def __contains__(self, key):
        return True

    def __missing__(self, key):
        return None


def paths(fed):
    """Sets a federation to each way of training, the loop, which is the specification, first."""
    ways = {"loop": {}, "vmap": {"vmap": True}, "vmap in parts": {"vmap": True, "parallel": 3},
            "replayed": {"vmap": True, "graphs": True}, "patches": {"vmap": True, "route": "patches"}}
    for way, settings in ways.items():
        fed.net.route = settings.pop("route", "conv")
        vars(fed).update({"vmap": False, "graphs": False, "parallel": None, "ways": Conv(), "replays": Seen(), **settings})
        yield way


def run(module, argv, out):
    """Runs an algorithm's main in this process; returns its record and its saved state."""
    module.main([*argv, "--out", str(out)])
    return json.loads((out / "result.json").read_text()), torch.load(out / "state.pt", weights_only=True)["state"]


def softmax_gradient(w, x, y, classes=3):
    """d/dw of the mean cross-entropy of softmax regression in float64; w = [weights (classes x features), biases]."""
    features = x.shape[1]
    weight, bias = w[: classes * features].reshape(classes, features), w[classes * features :]
    z = x @ weight.T + bias
    p = np.exp(z - z.max(1, keepdims=True))
    p = p / p.sum(1, keepdims=True) - np.eye(classes)[y]
    return np.concatenate([(p.T @ x).ravel(), p.sum(0)]) / len(x)


def pixels(fed, index):
    """What --transform scale makes of images, in float64: [n, features]; and their labels."""
    return fed.data.images[index].reshape(len(index), -1) / 255, fed.data.labels[index]
