"""What the tests of the algorithms share: a federation of a few images of 2x2 pixels, its rounds in
numpy, and a Federation.train that tells what it is given."""

from types import SimpleNamespace

import numpy as np
import torch

import common
from conftest import pixels, softmax_gradient

# Softmax regression (12 weights, 3 biases) of three clients of different sizes, two of which are
# in a round; three rounds of two epochs
BARE = ["--model", "linear", "--transform", "scale", "--clients", "3", "--fraction", "0.7",
        "--rounds", "3", "--epochs", "2", "--batch-size", "5", "--lr", "0.3", "--momentum", "0",
        "--client-test", "0.2", "--eval-every", "1", "--device", "cpu"]
FLAGS = [*BARE, "--split", "dirichlet-classes", "--alpha", "9"]


class World:
    """What a run sees: S of each round, (x, y) of each client, its n_k, and w_0, in numpy. Clients
    have different sizes, and others are sampled in other rounds."""

    def __init__(self, fed):
        self.fed, self.S = fed, [fed.sample(t).tolist() for t in range(fed.args.rounds)]
        self.data = [pixels(fed, index) for index in fed.split.train]
        self.n = np.array([len(y) for _, y in self.data])
        self.w = fed.initial_weights().double().numpy()
        assert len({*self.n}) == fed.K and (fed.m == fed.K or len({*map(tuple, self.S)}) > 1)

    def gradient(self, w, k):
        """That of all of client k's images."""
        return softmax_gradient(w, *self.data[k])

    def descend(self, w, k, t, gradient=softmax_gradient, epochs=2, eta=0.3, momentum=0.0, order=0,
                images=None):
        """SGD of client k in round t; gradient(w, x, y): that of a minibatch."""
        u = 0
        for x, y in self.minibatches(k, t, epochs, order, images):
            u = momentum * u + gradient(w, x, y)
            w = w - eta * u
        return w

    def minibatches(self, k, t, epochs=2, order=0, images=None):
        """(x, y) of client k's minibatches in round t, of all epochs."""
        images = self.fed.split.train[k] if images is None else images
        for index in self.fed.plan(k, images, t, epochs, order=order)[0]:
            for part in np.split(index, range(5, len(index), 5)):
                yield pixels(self.fed, part)

    def mean(self, ends, S):
        """The mean of the clients S, weighted by n_k."""
        return np.average(ends, axis=0, weights=self.n[S])


def close(state, atol=5e-6, **expected):
    """Asserts that a run's state, in float32, has these numbers."""
    for name, want in expected.items():
        np.testing.assert_allclose(state[name].numpy(), want, atol=atol, err_msg=name)


def spy(monkeypatch, replace=None):
    """Returns a list, to which each call of Federation.train adds what it is given and returns
    (end). replace(own, S) stands in for training."""
    calls, train = [], common.Federation.train

    def noting(fed, client_update, S, t, own, shared=(), **options):
        end = (replace([z[: len(S)] for z in own], S) if replace else
               train(fed, client_update, S, t, own=own, shared=shared, **options))
        calls.append(SimpleNamespace(fed=fed, S=[*map(int, S)], t=t, own=[z[: len(S)] for z in own],
                                     shared=shared, options=options, end=end))
        return end

    monkeypatch.setattr(common.Federation, "train", noting)
    return calls


def evaluated(monkeypatch):
    """Returns a list, to which each call of Federation.evaluate_clients adds its models [K, d]."""
    models, evaluate = [], common.Federation.evaluate_clients

    def noting(fed, W, images=None):
        all_of = W(fed.everyone) if callable(W) else W if torch.is_tensor(W) else W[fed.everyone]
        models.append(all_of.clone())
        return evaluate(fed, W, images)

    monkeypatch.setattr(common.Federation, "evaluate_clients", noting)
    return models


def column(S):
    """The clients' numbers as [m, 1]."""
    return torch.tensor(S, dtype=torch.float)[:, None]
