"""Provides what every algorithm here needs and no paper's pseudocode contains. In the order of a
round, Federation samples clients (sample), trains them (train, one_by_one; Epochs yields one
client's minibatches) and evaluates models (evaluate, evaluate_clients). The algorithms also call
step and grad (fl/training.py) and Run, which loops over rounds and writes the record (fl/run.py).

Shapes in comments: d weights in a model, K clients, m of them sampled in a round, B images in a
minibatch, H x W pixels, C channels. Global measures use the data set's central test images,
personal measures each client's own test images.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map

import fl.data
import fl.net
import fl.splits
import fl.training
from fl.data import images_for
from fl.files import load_file
from fl.flags import (
    Parser,
    fraction,
    nonnegative,
    nonnegative_int,
    parse,
    parser,
    positive,
    positive_fraction,
    positive_int,
)
from fl.machine import find_device, now, refuse, say
from fl.measures import score
from fl.models import MODELS
from fl.net import Net
from fl.plots import drawing, setting, spread
from fl.run import Run, without_clients
from fl.splits import SPLITS, USED_BY, Split, split_clients, unused, whole_numbers
from fl.state import Rows
from fl.training import form_of, grad, may_look, models_of, step, training_on
from fl.transforms import DRAWS, TRANSFORMS

STREAMS = "split", "initialisation", "sampling", "order", "augmentation", "algorithm"


def stream(seed, purpose, round=0, client=0, nth=0):
    """Returns a numpy Generator for one purpose, so that what a client draws does not depend on any
    other draw. Equal arguments give equal streams on every device and for any --parallel.

    purpose: one of STREAMS. nth distinguishes several streams of a client in one round."""
    return np.random.default_rng([seed, STREAMS.index(purpose) + 1000 * nth, round, client])


class Federation:
    """K clients and their images: split, sampled, trained and evaluated.

    n [K]: n_k, how many training images each client has. split: for each client the indices of its
    images. net: the model; net(w, x) returns logits. images, labels: of the whole data set.
    training: how clients are spread over threads, processes and a GPU.
    """

    def __init__(self, args, make_net=None):
        """make_net(shape [C, H, W], classes, device): the model; by default that of --model."""
        self.args, self.device = args, find_device(args.device)
        self.training = training_on(self.device, args)
        with self.training.one_after_the_other():  # the first process downloads and decodes
            self.data = images_for(args, stream(args.split_seed, "split", 1))
        dealt = split_clients(self.data, args, stream(args.split_seed, "split"))
        self.split, self.split_fingerprint = dealt.measured(args.limit_test), dealt.fingerprint()
        self.K, self.everyone = len(dealt.train), np.arange(len(dealt.train))
        self.n = torch.tensor([float(len(index)) for index in dealt.train], device=self.device)
        self.images = torch.from_numpy(self.data.images).to(self.device)
        self.labels = torch.from_numpy(self.data.labels).to(self.device)
        self.transform = TRANSFORMS[args.transform](self.data)
        try:
            shape = tuple(self.transform(self.images[:1]).shape[1:])  # [C, H, W]
        except ValueError as problem:
            size = "x".join(map(str, self.data.images.shape[1:3]))
            refuse(f"{problem}, but {self.data.name} has {size}; use --transform normalize")
        make_net = make_net or fl.net.default(args, self.data)
        self.net = make_net(shape, self.data.classes, self.device)
        self.w_0 = None if args.init is None else self.net.load(args.init)
        self.training.begin(self.net.d, max(map(len, dealt.train)))
        self.notes = [*self.net.notes, *fl.data.remarks(self.data),  # one line each, printed
                      *fl.splits.remarks(dealt, self.data, args)]
        self.all_rows = []  # every Rows that per_client has made
        self.dealt = np.concatenate([*dealt.train, *dealt.val])  # images that `train` accepts
        self.passed = []  # how many images each minibatch of this round has had

    def initial_weights(self):
        """Returns w_0 [d]: the weights of --init, or random ones from the seed."""
        if self.w_0 is not None:
            return self.w_0
        return self.net.init(stream(self.args.seed, "initialisation"))

    def per_client(self, x):
        """Returns Rows [K, ...], what each client k keeps between rounds. A row starts as x, or as
        x(k) if x is a function."""
        rows = Rows(self.K, x if callable(x) else lambda k: x, self.device, self.all_rows)
        self.all_rows.append(rows)
        return rows

    # Sampling

    @property
    def m(self):
        """How many clients a round samples: max(C*K, 1), where C*K is rounded down."""
        return max(int(self.args.fraction * self.K + 1e-9), 1)  # .29 * 100 is 28.999999999999996

    def sample(self, t, m=None):
        """Returns S_t [m], m random clients of round t (by default self.m) in ascending order."""
        fl.training.check_clients(self.everyone, self.K, t)
        rng = stream(self.args.seed, "sampling", t)
        return np.sort(rng.choice(self.K, self.m if m is None else m, replace=False))

    def eta(self, t):
        """Returns the clients' learning rate in round t, --lr * --lr-decay^t, as a tensor."""
        return torch.tensor(self.args.lr * self.args.lr_decay**t, device=self.device)

    # Training

    def train(self, client_update, S, t, own, shared=(), epochs=None, draw=None, order=0,
              images=None):
        """Returns what client_update(*own_k, epochs_k, *shared) returns for every client k of S: a
        tensor or a tuple of tensors, with a row for each client.

        client_update is written for ONE client. It loops over its epochs and their minibatches
        (see Epochs), and does its work on each minibatch in a function decorated with
        @common.step.

        own: tensors [m, ...], of which each client gets its row. For Rows V, V.of(S) may replace
        V[S]: each row is then fetched only when its client's turn comes.
        shared: what is the same for all clients, such as eta. Pass changing numbers as tensors.
        epochs: E, by default --epochs. order: a different order reshuffles the images.
        draw(rng, steps) -> [steps, ...]: the algorithm's own random numbers; a minibatch finds its
        row in b.draw.
        images: for each client the indices of the images to train on, by default its own.

        Results do not depend on how many clients train at once (on a GPU up to rounding).
        """
        fl.training.check_clients(S, self.K, t, own, images)
        epochs = self.args.epochs if epochs is None else epochs
        images = [self.split.train[k] for k in S] if images is None else images
        clients = [Epochs(self, int(k), i, t, epochs, draw, order) for k, i in zip(S, images)]
        return self.training.train(self, client_update, own, clients, shared)

    def one_by_one(self, client_update, own, clients, shared):
        """Returns what `train` returns, from one call of client_update for each client, several of
        them at once on a CPU. clients: the Epochs of each client."""
        def alone(i):
            try:
                return client_update(*(z[i] for z in own), clients[i], *shared)
            except Exception as problem:  # Python 3.11 and later print the note below
                client = getattr(clients[i], "client", "?")
                problem.__notes__ = [f"(in client_update of client {client})"]
                raise

        results = form = None
        for i, found in self.training.each(alone, len(clients)):
            form = form_of(found, form)
            if results is None:  # filled row by row, since torch.stack would hold all rows twice
                results = tree_map(lambda z: z.new_empty((len(clients), *z.shape)), found)
            for rows, row in zip(tree_leaves(results), tree_leaves(found)):
                rows[i].copy_(row.detach())
        return results

    def plan(self, k, images, t, epochs, draw=None, order=0):
        """Returns what client k does in round t, from its own random streams: `index` [epochs, n],
        the indices of its n images, in a new order in each epoch; `uniform` [epochs, n, DRAWS],
        random in [0, 1), for each image's transform; `draws` [epochs, minibatches, ...]."""
        shuffle, augment, algorithm = (stream(self.args.seed, purpose, t, k, order)
                                       for purpose in ("order", "augmentation", "algorithm"))
        size = min(self.args.batch_size or len(images), len(images))
        steps = math.ceil(len(images) / size)
        index = np.array([shuffle.permutation(images) for _ in range(epochs)], np.int64)
        shape = epochs, steps * size, DRAWS[self.args.transform]  # drawn for full minibatches
        uniform = augment.random(shape, np.float32)[:, : len(images)]
        draws = draw(algorithm, epochs * steps) if draw else np.zeros((epochs * steps, 0))
        return index, uniform, np.float32(draws).reshape(epochs, steps, *np.shape(draws)[1:])

    def batch(self, index, uniform, draw, mask=None):
        """Returns the Batch of the images index [B], transformed with the random numbers uniform
        [B, DRAWS]. For m clients at once index is [m, B], and uniform [m, B, DRAWS]."""
        x = self.transform(self.images[index.flatten()], uniform.flatten(0, -2))
        x = x.unflatten(0, index.shape)
        x = x.bfloat16() if self.args.precision == "bf16" else x
        mask = torch.ones(index.shape, device=self.device) if mask is None else mask
        return Batch(x, self.labels[index], mask, draw)

    # Evaluation

    def logits(self, w, index):
        """Returns w's logits [n, classes] on the images index [n], without augmentation. index is
        cut into about equal parts, since parts of 1 to 3 images would round differently."""
        parts = np.array_split(index, max(1, math.ceil(len(index) / self.training.part)))
        return self.training.stacked(lambda i: self.logits_of_part(w, parts[i]), parts)

    @torch.no_grad()
    def logits_of_part(self, w, index):
        index = torch.as_tensor(index, device=self.device)
        return self.net(w, self.transform(self.images[index]))

    def evaluate(self, w):
        """Returns the global measures of the model w [d], on the central test images: top1, top5,
        loss, ece, mce."""
        labels = self.labels[torch.as_tensor(self.data.central, device=self.device)]
        logits = self.logits(w, self.data.central)
        one = score(logits, labels, torch.zeros_like(labels), 1)
        return {name: float(value[0]) for name, value in one.items()}

    def evaluate_clients(self, W, images=None):
        """Returns the personal measures of each client's model on its own test images. W: one
        model w [d] for all clients; or one for each, [K, d]; or a function: W(S) [m, d] are the
        models of the clients S.

        per_client: the accuracies, one for each client. mean, std (divisor: clients - 1) and
        worst_decile (the worst tenth's mean) summarise these; weighted_mean weights them by numbers
        of test images. top5, loss, ece, mce: means over clients. val_mean, val_loss: mean and loss
        on validation images, if there are any and `images` is None.
        images: for each client the indices of the images to measure on, instead of its test images.
        """
        own = self.split.test if images is None else images
        fl.training.check_images(own, range(self.K), "evaluate_clients")
        if torch.is_tensor(W) and W.dim() == 1:
            logits = self.logits(W, np.concatenate(own))
        else:
            of = models_of(W, len(own))
            logits = self.training.stacked(lambda k: self.logits(of([k]).squeeze(0), own[k]), own)
        n, one = np.array([*map(len, own)]), self.score_by_client(logits, own)
        top1 = one["top1"].cpu().numpy()
        measures = {
            "mean": float(top1.mean()), "weighted_mean": float((top1 * n).sum() / n.sum()),
            "std": float(top1.std(ddof=1)) if len(top1) > 1 else 0.0,
            "worst_decile": float(np.sort(top1)[: math.ceil(len(top1) / 10)].mean()),
            **{name: float(one[name].mean()) for name in ("top5", "loss", "ece", "mce")},
            "per_client": top1.tolist(),
        }
        if images is None and (self.args.client_val or self.data.n_val):
            on_val = self.evaluate_clients(W, self.split.val)
            measures.update(val_mean=on_val["mean"], val_loss=on_val["loss"])
        return measures

    def fine_tuned(self, W, epochs, eta, order=0):
        """Returns each client's model, W [K, >= d], after `epochs` more epochs of SGD on its own
        training images, at the rate eta, with --momentum and --weight-decay. W[:, net.d:] holds no
        weights and is unchanged. Calls with another order shuffle the images anew."""
        descent = sgd(self.args, self.net.decayed)

        @step
        def sgd_step(w, u, rest, b, eta):  # [d] weights, [d] momentum
            def loss(w):
                return cross_entropy(self.net(torch.cat([w, rest]), b.x), b)
            return *descent(w, u, grad(loss)(w), eta), rest

        def client_update(w, rest, epochs, eta):
            u = torch.zeros_like(w)
            for minibatches in epochs:
                for b in minibatches:
                    w, u, rest = sgd_step(w, u, rest, b, eta)
            return torch.cat([w, rest])

        own = [W[:, : self.net.d], W[:, self.net.d :]]
        return self.train(client_update, self.everyone, self.args.rounds, own, [eta], epochs,
                          order=order)

    def losses(self, w, images=None):
        """Returns the loss of w [d] on each client's training images (or images[k]), [K]."""
        images = self.split.train if images is None else images
        fl.training.check_images(images, range(self.K), "losses")
        return self.score_by_client(self.logits(w, np.concatenate(images)), images)["loss"]

    def score_by_client(self, logits, images):
        client = torch.from_numpy(self.everyone.repeat([*map(len, images)])).to(self.device)
        labels = self.labels[torch.as_tensor(np.concatenate(images), device=self.device)]
        return score(logits, labels, client, self.K)


class Epochs:
    """The local epochs of one client: `for minibatches in epochs: for b in minibatches: ...`, where
    each epoch shuffles the client's images and cuts them into minibatches b, each a Batch.

    epochs.again(epochs=2, order=1) returns two other epochs, which shuffle the images anew."""

    def __init__(self, fed, client, images, t, epochs, draw, order):
        self.fed, self.client, self.images, self.t = fed, client, images, t
        self.options, self.begun = {"epochs": epochs, "draw": draw, "order": order}, 0

    def again(self, images=None, **options):
        if images is not None:
            fl.training.check_images([images], [self.client], "epochs.again", self.fed.dealt)
        images = self.images if images is None else images
        return Epochs(self.fed, self.client, images, self.t, **self.options | options)

    def plan(self):
        return self.fed.plan(self.client, self.images, self.t, **self.options)

    def __iter__(self):
        self.begun += 1
        for index, uniform, draw in zip(*(torch.as_tensor(z, device=self.fed.device)
                                          for z in self.plan())):
            size = self.fed.args.batch_size or len(index)  # the last minibatch may have fewer
            yield (self.batch(*b) for b in zip(index.split(size), uniform.split(size), draw))

    def batch(self, index, uniform, draw):
        self.fed.passed.append(len(index))
        return self.fed.batch(index, uniform, draw)


class Batch(NamedTuple):
    """One client's minibatch: images x [B, C, H, W], labels y [B], mask [B] (0 for padding, else
    1), draw [...] (the algorithm's own random numbers; see Federation.train)."""

    x: torch.Tensor
    y: torch.Tensor
    mask: torch.Tensor
    draw: torch.Tensor


def cross_entropy(logits, batch):
    """Returns the mean cross-entropy, a scalar, over the images that are not padding."""
    loss = F.cross_entropy(logits, batch.y, reduction="none")
    return (loss * batch.mask).sum() / batch.mask.sum().clamp(min=1)


def descend(w, eta, gradient):
    """Returns w - eta * gradient, in one pass through memory. w, gradient: [..., d]; eta: a scalar
    tensor."""
    return torch.addcmul(w, eta, gradient, value=-1)


def sgd(args, decayed=None):
    """Returns momentum_step(w, u, gradient, eta) -> w, u: SGD with --momentum and --weight-decay.

    The new u is gradient + momentum * u + decay * w; then w becomes w - eta * u. w, u, gradient:
    [..., d]. eta: a scalar tensor. decayed [d]: 1 where the decay applies; None if the
    gradient includes it.
    """

    def momentum_step(w, u, gradient, eta):
        # one to three passes through memory; one formula would need eight
        u = torch.add(gradient, u, alpha=args.momentum) if args.momentum else gradient
        if args.weight_decay and decayed is not None:
            u = torch.addcmul(u, decayed, w, value=args.weight_decay)
        return descend(w, eta, u), u

    return momentum_step
