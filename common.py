"""What every algorithm here needs and no paper's pseudocode contains.

    1. Random streams             stream
    2. Training and evaluation    Federation: its clients, their minibatches, all measures
    3. Arguments                  parser, parse

`import common` also gives names of models.py (MODELS, Net), splits.py (who gets which images),
data_sets.py (images, transforms), records.py (Run: the rounds' loop and the record), engine.py
(step, grad) and plots.py. To follow an algorithm, read Run.rounds (records.py), and
Federation.sample, train, one_by_one, plan and batch, and Epochs here.

Shapes in comments: d weights in a model, K clients, m of them sampled in a round, B images in a
minibatch, H x W pixels, C channels. Global measures are taken on the data set's central test
images, personal ones on each client's own test images.
"""

import functools
import math
import os
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map

import fl.data
import fl.splits
import fl.training
from fl.data import DATASETS, images_for, load_data
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
from fl.models import MODELS
from fl.net import Net, find, load_file, with_part
from fl.plots import drawing, setting, spread
from fl.run import Rows, Run, without_clients, without_nan
from fl.splits import (  # some for others' files
    SPLITS,
    USED_BY,
    Split,
    renamed,
    split_clients,
    unused,
)
from fl.training import grad, is_main_process, now, refuse, say, step
from fl.transforms import DRAWS, TRANSFORMS

# --------------------------------------------------------------------------------------------------
# 1. Random streams

STREAMS = "split", "initialisation", "sampling", "order", "augmentation", "algorithm"


def stream(seed, purpose, round=0, client=0, nth=0):
    """Returns a numpy Generator for one purpose, since what a client draws must depend on no other
    draw. Equal arguments give equal streams on every device and for every --parallel.

    purpose: one of STREAMS. nth tells apart several streams of a client in one round.
    """
    return np.random.default_rng([seed, STREAMS.index(purpose) + 1000 * nth, round, client])


# --------------------------------------------------------------------------------------------------
# 2. Training and evaluation


def cross_entropy(logits, batch):
    """Mean cross-entropy over the batch's real images: logits [B, classes] -> scalar."""
    loss = F.cross_entropy(logits, batch.y, reduction="none")
    return (loss * batch.mask).sum() / batch.mask.sum().clamp(min=1)


def sgd(args, decayed=None):
    """Returns the step of SGD, a function: sgd(w, u, gradient, eta) -> w, u.

    The new u is the gradient, plus momentum * u with --momentum and decay * w with --weight-decay.
    Then w becomes w - eta * u. w, u, gradient: [..., d]. eta: a tensor of one number. decayed
    [d]: 1 where the decay acts; None if the gradient includes it.
    """

    def descend(w, u, gradient, eta):
        # one to three passes through memory; one formula would need eight
        u = torch.add(gradient, u, alpha=args.momentum) if args.momentum else gradient
        if args.weight_decay and decayed is not None:
            u = torch.addcmul(u, decayed, w, value=args.weight_decay)
        return torch.addcmul(w, eta, u, value=-1), u

    return descend


class Batch(NamedTuple):
    """One client's minibatch: images x [B, C, H, W], labels y [B], mask [B] (0 for padding, else
    1), draw [...] (the algorithm's own random numbers; see Federation.train)."""

    x: torch.Tensor
    y: torch.Tensor
    mask: torch.Tensor
    draw: torch.Tensor


class Plan(NamedTuple):
    """What a client does in a call of train: arrays over its epochs."""

    index: np.ndarray  # [epochs, n] numbers of its n images, in their order in each epoch
    uniform: np.ndarray  # [epochs, n, DRAWS] draws from [0, 1) for the transform of each
    draw: np.ndarray  # [epochs, steps, ...] for the algorithm: a row for each minibatch


class Epochs:
    """The local epochs of one client: `for minibatches in epochs: for b in minibatches: ...`.

    epochs(epochs=2, order=1) returns the same, with two epochs and a new order of the images.
    clients: [(row, indices of its images)], more than one only in fl.training.WAYS' "together".
    options: those of Federation.plan.
    """

    def __init__(self, fed, clients, t, way="loop", **options):
        self.fed, self.clients, self.t, self.way, self.options = fed, clients, t, way, options

    def __call__(self, **options):
        return type(self)(self.fed, self.clients, self.t, self.way, **self.options | options)

    def __iter__(self):
        fed, B = self.fed, self.fed.args.batch_size
        for client in self.clients:
            plan = fed.plan(*client, self.t, **self.options)
            for index, uniform, draw in zip(*(torch.as_tensor(z, device=fed.device) for z in plan)):
                size = B or len(index)  # the last minibatch may have fewer images
                yield (fed.batch(*b) for b in zip(index.split(size), uniform.split(size), draw))

    def by(self, way, few=False, clients=None):
        """Returns these epochs, or those of `clients`, in another of fl.training.WAYS. few: two
        minibatches a client, the second as large as an epoch's last."""
        clients, options, B = clients or self.clients, self.options, self.fed.args.batch_size
        if few:
            options = options | {"epochs": 1 if 0 < B < len(clients[0][1]) else 2}
            clients = [(row, images[-B - (len(images) % B or B) :] if B else images)
                       for row, images in clients]
        kind = Epochs if way == "loop" else FilledEpochs
        return kind(self.fed, clients, self.t, way, **options)


class FilledEpochs(Epochs):
    """Epochs for CUDA graphs: minibatches are filled up to B images, so that all have one shape.
    With "together" they have a row for each client."""

    def __iter__(self):
        fed, wide = self.fed, []
        plans = [fed.plan(*client, self.t, **self.options) for client in self.clients]
        sizes = [min(fed.args.batch_size or math.inf, plan.index.shape[1]) for plan in plans]
        for (index, uniform, draw), size in zip(plans, sizes):
            (epochs, n), steps = index.shape, draw.shape[1]
            place = np.full((steps, max(fed.B, *sizes)), n)  # place in 0..n-1; n: padding
            place[:, :size].flat[:n] = np.arange(n)
            index, uniform = (np.append(z, np.zeros_like(z[:, :1]), 1)[:, place]
                              for z in (index, uniform))
            wide.append((index, uniform, draw, np.tile(np.float32(place < n), (epochs, 1, 1))))
        arrays = (np.stack(z, 2) if self.way == "together" else z[0] for z in zip(*wide))
        for epoch in zip(*(torch.as_tensor(z, device=fed.device) for z in arrays)):
            yield self.minibatches(*epoch)

    def minibatches(self, *epoch):
        for inputs in zip(*epoch):
            if self.fed.stop:
                raise SystemExit(self.fed.stop)
            yield fl.training.Filled(self.fed, self.way, inputs)


class Federation:
    """K clients and their images: split, sampled, trained and evaluated.

    With one process a client's row is its number, 0 .. K-1: skip the rest of this paragraph. Under
    torchrun the r-th of P processes trains the clients k with k mod P = r, on a device of its own.
    A client's row is its place among these. S holds rows, `among` holds numbers.

    clients [rows]: the numbers of this process's clients. n [rows]: n_k, how many training images
    each of them has. split: the Split of these clients; whole_split: that of all. net: the model.
    """

    def __init__(self, args, make_net=None):
        self.args, self.device = args, fl.training.find_device(args.device)
        self.rank, self.processes = fl.training.join_processes(self.device)
        first = self.processes == 1 or not int(os.environ["LOCAL_RANK"])
        if not first:
            dist.barrier()  # the first process of each machine downloads and decodes; others wait
        self.data = images_for(args, stream(args.split_seed, "split", 1))
        if first and self.processes > 1:
            dist.barrier()
        self.whole_split = split_clients(self.data, args, stream(args.split_seed, "split"))
        self.K = len(self.whole_split.train)
        if self.K < self.processes:
            refuse(f"{self.processes} processes for {self.K} clients; start at most one per client")
        if "clients" in unused(args.split):
            args.clients = self.K  # for the record
        self.images = torch.from_numpy(self.data.images).to(self.device)
        self.labels = torch.from_numpy(self.data.labels).to(self.device)
        self.clients = np.arange(self.rank, self.K, self.processes)
        parts = self.whole_split.measured(args.limit_test)
        self.split = Split(*([part[k] for k in self.clients] for part in parts))
        self.n = torch.tensor([float(len(index)) for index in self.split.train], device=self.device)
        self.transform = TRANSFORMS[args.transform](self.data)
        before, hint = "{}x{}".format(*self.data.images.shape[1:3]), ""
        try:
            shape = tuple(self.transform(self.images[:1]).shape[1:])
        except ValueError as problem:
            refuse(f"{problem}, but {self.data.name} has {before}; use --transform normalize")
        if shape[1:] != self.data.images.shape[1:3]:
            hint = (f"; --transform {args.transform}, fedavg.py's default on cifar10, cuts "
                    f"{before} images so: --transform normalize leaves them whole")
        self.net = make_net(shape, self.data.classes, self.device) if make_net else Net(
            args.model, shape, self.data.classes, self.device, args.batchnorm, args.no_dropout,
            hint=hint, precision=args.precision)
        self.w_0 = None if args.init is None else self.net.load(args.init)
        self.notes = [*self.net.notes, *fl.data.remarks(self.data),  # for `describe`
                      *fl.splits.remarks(self.whole_split, self.data, args)]
        self.stop = 0  # the exit code when the run is interrupted; clients look at it
        self.all_rows = []  # every Rows
        # a GPU's minibatches are filled up to B images: all have one shape
        self.B = min(args.batch_size or len(self.labels), max(map(len, self.split.train)))
        gpu = self.device.type == "cuda"
        # images evaluated at once; fewer for a large model, since a CPU's cache is small
        self.part = 500 if gpu or self.net.d <= 500_000 else 100
        self.threads = 0 if gpu else args.parallel or fl.training.cores()
        self.map = fl.training.pool(self.threads)  # over items; on a CPU several at once
        # on a GPU: the way to try, the way in use, ways proved, why ways failed, CUDA graphs
        fast = "together" if self.net.d <= fl.training.SMALL else "graphs"
        self.way = fast if gpu and args.engine == "auto" else "loop"
        self.used, self.proved, self.failed, self.graphs = "loop", set(), [], {}
        if gpu:
            torch.cuda.reset_peak_memory_stats(self.device)  # of an earlier run in this process
        fl.training.keep_memory()

    def describe(self):
        """Prints one line each on images, split, model and training, then the notes."""
        data, args, K, m = self.data, self.args, self.K, self.m
        train, _, test = ([len(index) for index in part]
                          for part in self.whole_split.measured(args.limit_test))
        own = args.client_test or fl.splits.test_owner(data, args) is not None
        kinds = self.whole_split.classes(data.labels)
        say(f"data    {data.name}: {data.n_train} training and {len(data.central)} central test "
            f"images, {data.classes} classes, {'x'.join(map(str, data.images.shape[1:]))}"
            + f", {data.n_val} validation images" * (data.n_val > 0)
            + f", {data.images.dtype}" * (data.images.dtype != np.uint8)
            + ", with client_train (for --split natural)" * (data.owner is not None))
        say(f"split   {args.split}: {K} client{'s' * (K > 1)}, {'all' if m == K else m} in a round"
            f", training images {spread(train)}, {'own' if own else 'central'} test images "
            f"{spread(test)}, classes {spread(kinds)} (least/mean/most), fingerprint "
            f"{self.whole_split.fingerprint()}")
        say(f"model   {self.net.name}: {self.net.d:,} weights in {args.precision} on "
            f"{fl.training.device_name(self.device)}"
            + f", {self.processes} processes" * (self.processes > 1)
            + f", {self.threads} thread{'s' * (self.threads > 1)}" * (self.threads > 0))
        say(f"train   --transform {args.transform} --epochs {args.epochs} --batch-size "
            f"{args.batch_size} --lr {args.lr:g} --momentum {args.momentum:g}")
        for note in self.notes:
            say(note)

    @property
    def m(self):
        """How many clients a round has: max(C*K, 1), where C*K is rounded down."""
        return max(int(self.args.fraction * self.K + 1e-9), 1)  # .29 * 100 is 28.999999999999996

    def sample(self, t):
        """Returns this process's rows of S_t, the clients of round t: m of K, drawn without
        replacement. Every process draws the same S_t."""
        S_t = stream(self.args.seed, "sampling", t).choice(self.K, self.m, replace=False)
        return np.flatnonzero(np.isin(self.clients, S_t))

    def initial_weights(self):
        """w_0 [d]: those of --init, or drawn from the seed."""
        if self.w_0 is not None:
            return self.w_0
        return self.net.init(stream(self.args.seed, "initialisation"))

    def eta(self, t):
        """The clients' learning rate in round t."""
        return torch.tensor(self.args.lr * self.args.lr_decay**t, device=self.device)

    def all_reduce(self, x):
        """The sum of a tensor over all processes; with one process, x itself."""
        if self.processes > 1:
            x = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(x)
        return x

    def sum(self, x, n=None):
        """Sums x_k over the clients of all processes, x [m, ...] -> [...]. With n [m] it sums
        n_k x_k, x [m] or [m, d]."""
        return self.all_reduce(x.sum(0) if n is None else n @ x)

    def mean(self, x, n=None):
        """Averages x_k over the clients of all processes, x [m, ...] -> [...]. n [m] weights it
        by n_k, x [m] or [m, d]."""
        total = n.sum() if n is not None else torch.tensor(float(len(x)), device=self.device)
        return self.sum(x, n) / self.all_reduce(total)

    def gather(self, x, among=None):
        """Returns all clients' rows [K, ...], or those numbered `among`, in ascending order,
        on x's device. x: this process's [rows, ...]."""
        if self.processes == 1:
            return x
        numbers = np.arange(self.K) if among is None else np.sort(among)
        whole = x.new_zeros((self.K, *x.shape[1:]))
        whole[self.clients[self.rows(numbers)]] = x
        for part in [whole] if x.device == self.device else whole:  # row by row, to fit the device
            part.copy_(self.all_reduce(part.to(self.device)))
        return whole[numbers]

    def rows(self, among=None):
        """The rows of this process's clients, or of those among the given numbers."""
        known = self.clients if among is None else among
        return np.flatnonzero(np.isin(self.clients, known))

    def per_client(self, x):
        """Returns Rows: what every client keeps between rounds, a row each. At first it is x [...],
        or x(k) for client number k."""
        return Rows(self, x if callable(x) else lambda k: x)

    # Training

    def train(self, client_update, S, t, own, shared=(), epochs=None, draw=None, order=0,
              images=None):
        """What client_update(*own_k, epochs_k, *shared) returns for every client k of S, a row
        each.

        client_update is written for ONE client. It goes through its epochs and their minibatches
        (see Epochs), and does its work on each by a function with @common.step.

        own: tensors [m, ...]: a client gets its row of each. For Rows V, V.of(S) can stand for
        V[S]: then rows are fetched when they are needed.
        shared: tensors that are the same for all clients, such as eta.
        epochs: E, by default --epochs. order: calls with another order shuffle the images anew.
        draw(rng, steps) -> [steps, ...]: the algorithm's own random numbers; a minibatch finds its
        row in b.draw.
        images: for each client the numbers of the images to train on, by default its own.

        Results do not depend on how many clients go at once; on a GPU up to rounding.
        """
        epochs = self.args.epochs if epochs is None else epochs
        images = images or [self.split.train[row] for row in S]
        clients = [Epochs(self, [client], t, epochs=epochs, draw=draw, order=order)
                   for client in zip(S, images)]
        if not clients:  # other processes have all of S: tensors without rows, no epochs
            return client_update(*(z[[]] for z in own), Epochs(self, [], t), *shared)
        if self.device.type == "cuda" or self.way != "loop":
            return fl.training.train(self, client_update, own, clients, shared)
        return self.one_by_one(client_update, own, clients, shared)

    def one_by_one(self, client_update, own, clients, shared):
        """The plain loop over the clients; on a CPU as many at once as there are threads. clients:
        the Epochs of each."""
        def alone(i):
            return client_update(*(z[i] for z in own), clients[i], *shared)

        for i, found in enumerate(self.map(alone, range(len(clients)))):
            if not i:  # filled row by row: torch.stack would hold all of it twice
                results = tree_map(lambda z: z.new_empty((len(clients), *z.shape)), found)
            for rows, row in zip(tree_leaves(results), tree_leaves(found)):
                rows[i].copy_(row)
        return results

    def plan(self, row, own, t, epochs, draw=None, order=0):
        """The Plan of the client in this row for round t, from its own random streams. own: the
        numbers of its images, which are shuffled in every epoch."""
        shuffle, augment, algorithm = (
            stream(self.args.seed, purpose, t, int(self.clients[row]), order)
            for purpose in ("order", "augmentation", "algorithm"))
        size = min(self.args.batch_size or len(own), len(own))
        steps = math.ceil(len(own) / size)
        index = np.array([shuffle.permutation(own) for _ in range(epochs)], np.int64)
        shape = epochs, steps * size, DRAWS[self.args.transform]  # as if all minibatches were full
        uniform = augment.random(shape, np.float32)[:, : len(own)]
        own_draw = draw(algorithm, epochs * steps) if draw else np.zeros((epochs * steps, 0))
        own_draw = np.float32(own_draw).reshape(epochs, steps, *own_draw.shape[1:])
        return Plan(index, uniform, own_draw)

    def batch(self, index, uniform, draw, mask=None):
        """The Batch of the images numbered index [B], transformed with the random numbers uniform
        [B, DRAWS]. Of m clients at once: index [m, B], uniform [m, B, DRAWS]."""
        if self.stop:
            raise SystemExit(self.stop)
        x = self.transform(self.images[index.flatten()], uniform.flatten(0, -2))
        x = x.unflatten(0, index.shape)
        x = x.bfloat16() if self.args.precision == "bf16" else x
        mask = torch.ones(index.shape, device=self.device) if mask is None else mask
        return Batch(x, self.labels[index], mask, draw)

    # Evaluation

    def logits(self, w, index):
        """Returns w's logits [n, classes] on the images numbered index [n], unaugmented. Parts
        have about equal sizes: a part of 1 to 3 images would change the last bits."""
        parts = np.array_split(index, max(1, math.ceil(len(index) / self.part)))
        return torch.cat(list(self.map(functools.partial(self.logits_of_part, w), parts)))

    @torch.no_grad()
    def logits_of_part(self, w, index):
        if self.stop:
            raise SystemExit(self.stop)
        index = torch.as_tensor(index, device=self.device)
        return self.net(w, self.transform(self.images[index]))

    def evaluate(self, w):
        """Global measures of the model w [d] on the central test images: top1, top5, loss, ece,
        mce."""
        labels = self.labels[torch.as_tensor(self.data.central, device=self.device)]
        logits = self.logits(w, self.data.central)
        one = score(logits, labels, torch.zeros_like(labels), 1)
        return {name: float(value[0]) for name, value in one.items()}

    def evaluate_clients(self, W, images=None):
        """Personal measures: each client's model on its own test images. W: one model w [d] for
        all; or one for each client, [rows, d]; or a function: W(S) [m, d] are the models of the
        rows S.

        per_client: the accuracies, one for each client. mean, std (divisor: clients - 1) and
        worst_decile (the worst tenth's mean) are taken over these. weighted_mean: by test images.
        top5, loss, ece, mce: means over clients. val_mean, val_loss: mean and loss on validation
        images, if there are any and `images` is None.
        images: for each row the numbers of the images to measure on, instead of the test images.
        """
        own = images or self.split.test  # never empty: a process has at least one client
        sizes = torch.tensor([len(index) for index in own], device=self.device)
        client = torch.arange(len(own), device=self.device).repeat_interleave(sizes)
        index = np.concatenate(own)
        if torch.is_tensor(W) and W.dim() == 1:
            logits = self.logits(W, index)
        else:
            models = W if callable(W) else W.__getitem__

            def alone(i):
                return self.logits(models([i])[0], own[i])

            logits = torch.cat(list(self.map(alone, range(len(own)))))
        labels = self.labels[torch.as_tensor(index, device=self.device)]
        one = {name: self.gather(value)
               for name, value in score(logits, labels, client, len(own)).items()}
        top1, n = one["top1"].cpu().numpy(), self.gather(sizes).cpu().numpy()
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


def score(logits, y, group, groups, bins=15):
    """Returns each group's measures (name -> [groups], float64) from logits [n, classes], y [n] and
    group [n] in 0..groups-1.

    top1, top5 and loss (cross-entropy) are means over a group's images. Calibration as in Guo et
    al. 2017: the largest softmax probability p falls into the bin (i/15, (i+1)/15]; ece is the mean
    over images of their bin's |mean p - accuracy|, mce the largest such gap. All images of a group
    count at once, not minibatch by minibatch.
    """
    logits = logits.double()
    n = torch.bincount(group, minlength=groups).clamp(min=1)

    def total(values, where, size):
        zeros = torch.zeros(size, dtype=torch.double, device=y.device)
        return zeros.index_add_(0, where, values.double())

    right = logits.topk(min(5, logits.shape[1])).indices == y[:, None]
    top, sure = right[:, 0].double(), logits.softmax(1).amax(1)
    cell = group * bins + ((sure * bins).ceil().long() - 1).clamp(0, bins - 1)
    count = torch.bincount(cell, minlength=groups * bins)
    gap = total(sure - top, cell, groups * bins).abs()
    loss = F.cross_entropy(logits, y, reduction="none")
    return {"top1": total(top, group, groups) / n, "top5": total(right.any(1), group, groups) / n,
            "loss": total(loss, group, groups) / n, "ece": gap.view(groups, bins).sum(1) / n,
            "mce": (gap / count.clamp(min=1)).view(groups, bins).amax(1)}
