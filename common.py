"""What every algorithm here needs and no paper's pseudocode contains.

Read from top to bottom, or jump:

    1. Random streams             stream
    2. Splits                     split_clients and one function per scheme
    3. Models                     Net, MODELS: functions of one flat vector w of d numbers
    4. Transforms                 TRANSFORMS: uint8 images -> what a model sees
    5. Training and evaluation    Federation: its clients' minibatches, one step function, all measures
    6. Arguments                  parser, parse

Images come from datasets.py, the loop over the rounds (common.Run) and the record from records.py, gradients (common.grad) and
what makes training fast from engine.py. To follow an algorithm, read Run.rounds (records.py) and Federation.sample, train,
one_by_one, plan and train_alone (5).

Shapes in comments: d numbers in a model, K clients, m of them sampled in a round, N images, B images in a minibatch,
H x W pixels, C channels. Global measures are taken on the data set's central test images; personal ones on each
client's own test images.
"""

import argparse
import functools
import hashlib
import importlib.util
import os
import pathlib
import sys
from math import ceil
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._pytree import tree_map

import engine
import plots
from datasets import DATASETS, limit_images, load_data
from engine import grad, is_main_process, now, refuse, vmapped  # noqa: F401 (these three lines are also for algorithms' files)
from plots import drawing  # noqa: F401
from records import Run, without_clients, without_nan  # noqa: F401

# ---------------------------------------------------------------------------------------------------------------------
# 1. Random streams

STREAMS = ("split", "initialisation", "sampling", "order", "augmentation", "algorithm")


def stream(seed, purpose, round=0, client=0, nth=0):
    """A numpy Generator for one purpose, so that what a client draws depends on nothing else that is drawn.

    purpose: one of STREAMS. nth tells apart several streams of a client in one round. The same numbers give the same stream on
    every device and for every --parallel.
    """
    return np.random.default_rng([seed, STREAMS.index(purpose) + 1000 * nth, round, client])


# ---------------------------------------------------------------------------------------------------------------------
# 2. Splits
#
# A scheme takes (labels [n] of the training images, classes, rng, args) and returns an array of image numbers for each client.
# split_clients then shuffles each client's images, and cuts them into training, validation and test images.


class Split(NamedTuple):
    """Per client, numbers of the images it trains, validates and tests on (numbers of Data.images)."""

    train: list
    val: list
    test: list

    def fingerprint(self):
        """Equal for equal splits: a hash over all lists, in the order of the clients."""
        digest = hashlib.sha256()
        for part in self:
            for index in part:
                digest.update(np.int64(len(index)).tobytes() + index.astype(np.int64).tobytes())
        return digest.hexdigest()[:16]


def split_clients(data, args):
    """The Split that args.split, args.clients, args.client_test, args.client_val and args.split_seed ask for.

    Without client_test a client's test images are central ones (matched_test). With the split natural they are those that the
    data set's array client_test names, where it has that array. Every client gets at least one training image, and one
    validation and one test image where those are asked for; otherwise the split is refused.
    """
    rng = stream(args.split_seed, "split")
    labels = data.labels[: data.n_train]
    elsewhere = ":" in args.split  # a user's own: path/to/file.py:function
    if args.clients > data.n_train and "clients" not in unused(args.split) and not elsewhere:
        refuse(f"{data.n_train} training images can't be split among {args.clients} clients; use fewer --clients")
    if args.client_test + args.client_val >= 1:
        refuse("--client-test and --client-val leave nothing to train on; their sum must be below 1")
    if args.split == "fedslr" and (args.client_test or args.client_val):  # a client's training and test images could share some
        refuse("--split fedslr may give a client an image twice; use --client-test 0 --client-val 0")
    tests_of = data.test_owner if args.split == "natural" else None
    test_share = args.client_test if tests_of is None else 0
    deal = find("split", args.split, SPLITS)
    if elsewhere:
        owned = own_split(deal, labels, data.classes, rng, args)
    else:
        owned = split_natural(data) if args.split == "natural" else deal(labels, data.classes, rng, args)
    split = Split([], [], [])
    for k, index in enumerate(owned):
        index, n = rng.permutation(index), len(index)
        n_train = int((1 - test_share - args.client_val) * n + 1e-9)
        n_test = int(test_share * n + 1e-9) if args.client_val else n - n_train
        train, val, test = np.split(index, [n_train, n - n_test])
        if not len(train) or (args.client_val and not len(val)) or (test_share and not len(test)):
            hints = []
            if args.split == "natural" or elsewhere:
                hints += ["--client-test 0"] if test_share else []
                hints += ["--client-val 0"] if args.client_val else []
            else:
                hints += ["fewer --clients"]
                hints += ["a larger --alpha"] if "dirichlet" in args.split else []
                hints += [f"a smaller --client-{part}" for part, share in (("test", test_share), ("val", args.client_val))
                          if share and not len(train)]
            refuse(f"--split {args.split} leaves client {k} with {n} images: {len(train)} to train on, {len(val)} to validate, "
                   f"{len(test)} to test; use {', '.join(hints)} or more images")
        if tests_of is not None:
            test = data.n_train + np.flatnonzero(tests_of == k)
        elif not test_share:
            test = matched_test(labels[index], data, rng)
        if not len(test):
            refuse(f"client {k} gets no central test images: none has its classes, or each of its classes has less than a hundredth "
                   f"of its images; use {'a smaller --alpha' if args.split == 'fedslr' else '--client-test'}")
        for part, numbers in zip(split, (train, val, test)):
            part.append(numbers)
    return split


def matched_test(labels, data, rng, size=100):
    """Central test images with the class shares of `labels`: floor(share * size) of each class, or all (FedSLR, B.1).

    Without replacement within a client; different clients' may overlap. Shares below 1/size add nothing.
    """
    pools, counts = by_class(data.labels[data.n_train :], data.classes, rng), np.bincount(labels, minlength=data.classes)
    return np.concatenate([pool[: int(n / len(labels) * size + 1e-9)] for pool, n in zip(pools, counts)]) + data.n_train


def by_class(labels, classes, rng):
    """Per class, the numbers of its images in random order."""
    return [rng.permutation(np.flatnonzero(labels == c)) for c in range(classes)]


def split_iid(labels, classes, rng, args):
    """Shuffled and cut into equal parts (McMahan et al. 2017, section 3: IID). What remains is not used."""
    n = len(labels) // args.clients
    return list(rng.permutation(len(labels))[: n * args.clients].reshape(args.clients, n))


def split_shards(labels, classes, rng, args):
    """Sorted by label, cut into K*s shards of equal size, s random shards each (McMahan et al. 2017, section 3). What remains is
    not used."""
    shards = args.clients * args.per_client
    size = len(labels) // shards
    if not size:
        refuse(f"{len(labels)} training images don't make {shards} shards; use fewer --clients or a smaller --per-client")
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")][: shards * size].reshape(shards, size)
    return list(order[rng.permutation(shards)].reshape(args.clients, -1))


def split_dirichlet(labels, classes, rng, args):
    """Equal sizes; a client's class shares are q ~ Dir(alpha * p), p = 1/classes (Hsu et al. 2019, section 3).

    alpha is the paper's: each class has the concentration alpha/classes. alpha = 0 is one random class per client. No image is
    dealt twice. When a class is used up, its share goes to the client's other classes; if q is 0 for these, q is drawn again
    over them. The paper does not say this. The last clients get what is left.
    """
    pools = by_class(labels, classes, rng)
    n = len(labels) // args.clients
    owned = []
    for k in range(args.clients):
        left = np.array([len(pool) for pool in pools])
        if args.alpha == 0:
            able = np.flatnonzero(left >= n)
            if not len(able):
                refuse(f"--alpha 0 gives client {k} one class, but no class has {n} images left; change --clients so that "
                       "the images per client divide the images per class")
            count = np.bincount([rng.choice(able)], minlength=classes) * n
        else:
            q = rng.dirichlet(np.full(classes, args.alpha / classes))
            count = np.zeros(classes, np.int64)
            while (need := n - count.sum()) > 0:
                open_ = left > count
                if q[open_].sum() < 1e-12:  # the shares of some classes, re-normalised, are Dirichlet again
                    q = np.zeros(classes)
                    q[open_] = rng.dirichlet(np.full(open_.sum(), args.alpha / classes))
                share = np.where(open_, q, 0)
                count = np.minimum(count + whole_numbers(share / share.sum() * need), left)
        owned.append(np.concatenate([pool[:c] for pool, c in zip(pools, count)]))
        pools = [pool[c:] for pool, c in zip(pools, count)]
    return owned


def whole_numbers(values):
    """Rounds values [n] up or down so that their (whole) sum stays: the largest fractions go up."""
    low = np.floor(values).astype(int)
    low[np.argsort(low - values, kind="stable")[: int(round(values.sum() - low.sum()))]] += 1
    return low


def split_dirichlet_classes(labels, classes, rng, args, balance=False):
    """Each class is dealt to the clients in shares ~ Dir(alpha, ..., alpha), so that sizes differ, as PersFL's DS-2. (The
    generator that PersFL names takes from every class as many images as the shares of class 0 are.)

    balance: a client that already holds N/K images gets nothing of the classes still to be dealt.
    Drawn again until every client has at least 10 images, as FedMA does, but at most 1000 times.
    """
    least = 10
    if args.clients * least > len(labels):
        refuse(f"--split {args.split} gives {least} images at least to a client; use fewer --clients than {args.clients}")
    for _ in range(1000):
        owned = [[] for _ in range(args.clients)]
        for pool in by_class(labels, classes, rng):
            share = rng.dirichlet(np.full(args.clients, max(args.alpha, 1e-300)))
            if balance:
                share = share * [sum(map(len, parts)) < len(labels) / args.clients for parts in owned]
                share = share / max(share.sum(), 1e-300)
            cuts = (share.cumsum()[:-1] * len(pool)).astype(int)
            for k, part in enumerate(np.split(pool, cuts)):
                owned[k].append(part)
        owned = [np.concatenate(parts) for parts in owned]
        if min(map(len, owned)) >= least:
            return owned
    refuse(f"--split {args.split} with --alpha {args.alpha:g} left some client fewer than {least} images in 1000 draws; "
           "use a larger --alpha or fewer --clients")


def split_classes(labels, classes, rng, args):
    """s random classes per client and equal sizes (Psi-Net's "N x c"; PersFL's DS-1, FedPer's).

    Classes are given out evenly: the next client takes those that the fewest clients have, ties at random.
    """
    if args.per_client > classes:
        refuse(f"--per-client {args.per_client}: there are only {classes} classes")
    holders = np.zeros(classes, int)
    chosen = []
    for _ in range(args.clients):
        chosen.append(np.lexsort((rng.random(classes), holders))[: args.per_client])
        holders[chosen[-1]] += 1
    pools = by_class(labels, classes, rng)
    n = min(len(pool) // h for pool, h in zip(pools, holders) if h)
    if not n:
        refuse(f"{args.clients} clients with {args.per_client} classes each need more images than some class has")
    start = np.zeros(classes, int)
    owned = []
    for mine in chosen:
        owned.append(np.concatenate([pools[c][start[c] : start[c] + n] for c in mine]))
        start[mine] += n
    return owned


def split_lognormal(labels, classes, rng, args):
    """s labels per client, k, k+1, ... (mod classes), in amounts from a log-normal with mu = 0, sigma = 2, as PersFL's DS-3.

    A class's images are divided among its holders in proportion to log-normal draws, after 10 for each of them. pFedMe's
    generator, which PersFL seems to have used, adds 300 to 600 images to each amount and so is far more even.
    """
    least = 10
    if args.per_client > classes:
        refuse(f"--per-client {args.per_client}: there are only {classes} classes")
    owned = [[] for _ in range(args.clients)]
    for c, pool in enumerate(by_class(labels, classes, rng)):
        holders = [k for k in range(args.clients) for j in range(args.per_client) if (k + j) % classes == c]
        if len(pool) < least * len(holders):
            refuse(f"class {c} has {len(pool)} images for {len(holders)} clients, {least} each at least; use fewer --clients")
        if holders:
            share = rng.lognormal(0, 2, len(holders))
            sizes = least + (share / share.sum() * (len(pool) - least * len(holders))).astype(int)
            for k, part in zip(holders, np.split(pool, sizes.cumsum())):
                owned[k].append(part)
    return [np.concatenate(parts) for parts in owned]


def split_semantic(labels, classes, rng, args):
    """Clusters of classes that no two clusters share; clients of random size within a cluster (SuPerFed, appendix A).

    62 classes (EMNIST): 5 clusters of 2 digits, 5 or 6 capital and 5 or 6 small letters; sizes uniform in [100, 800).
    Otherwise (Tiny ImageNet): 10 clusters of random classes, equally many but for the last; sizes in [100, 400). What
    remains of a cluster when the next client doesn't fit, or when at most 100 images are left, is not used. K is what
    comes out.
    """
    if classes == 62:
        groups, clusters, largest = [range(10), range(10, 36), range(36, 62)], 5, 800
    else:
        groups, clusters, largest = [range(classes)], min(10, classes), 400
    cluster = np.empty(classes, int)
    for group in groups:
        size = len(group) // clusters
        cluster[rng.permutation(group)] = np.minimum(np.arange(len(group)) // size, clusters - 1)
    owned = []
    for j in range(clusters):
        pool = rng.permutation(np.flatnonzero(cluster[labels] == j))
        while len(pool) > 100 and len(pool) >= (n := rng.integers(100, largest)):
            owned.append(pool[:n])
            pool = pool[n:]
    if not owned:
        refuse("--split semantic needs more than 100 images in some cluster of classes")
    return owned


def split_fedslr(labels, classes, rng, args):
    """Equal sizes; class shares ~ Dir(alpha, ..., alpha) per client; a class that is used up is refilled (FedSLR's code).

    alpha is per class (the paper's 0.1). Refilling means that clients can share images and some images are never used. The
    authors deal image by image to random clients, we deal client by client. So an image is less often twice with one client: 6
    to 29 images, all 100 clients together, and 128 to 213 there. Their sizes are 499 and once 599, not 500 (a rounded logarithm).
    """
    if args.alpha == 0:
        refuse("--split fedslr needs --alpha above 0")
    pools = by_class(labels, classes, rng)
    n = len(labels) // args.clients
    owned = []
    for _ in range(args.clients):
        count = rng.multinomial(n, rng.dirichlet(np.full(classes, args.alpha)))
        parts = []
        for c, need in enumerate(count):
            while need > len(pools[c]):
                parts.append(pools[c])
                need -= len(pools[c])
                pools[c] = rng.permutation(np.flatnonzero(labels == c))
            parts.append(pools[c][:need])
            pools[c] = pools[c][need:]
        owned.append(np.concatenate(parts))
    return owned


def own_split(deal, labels, classes, rng, args):
    """What a split from elsewhere gives, as a list of arrays. Refuses what is no array of image numbers for each client."""
    name, images = args.split, len(labels)
    try:
        owned = deal(labels, classes, rng, args)
        owned = [np.asarray(index) for index in owned] if isinstance(owned, (list, tuple, np.ndarray)) else []
    except Exception as problem:  # whatever the function does
        refuse(f"--split {name} fails: {type(problem).__name__}: {engine.first_line(problem)}")
    if not owned:
        refuse(f"--split {name} gives no list with an array of image numbers for each client")
    for k, index in enumerate(owned):
        if not index.size:
            refuse(f"--split {name} gives client {k} no images")
        if index.ndim != 1 or index.dtype.kind not in "iu" or index.min() < 0 or index.max() >= images:
            refuse(f"--split {name} gives client {k} something else than an array of image numbers from 0 to {images - 1}")
        if len(np.unique(index)) < len(index):
            refuse(f"--split {name} gives client {k} an image twice: it could be trained on and tested on")
    return [index.astype(np.int64) for index in owned]


def split_natural(data):
    """Each image to the client that it belongs to (users, writers, hospitals): the data set's array client_train."""
    if data.owner is None:
        refuse(f"--split natural wants an array client_train in the .npz, each training image's client; {data.name} has none")
    return [np.flatnonzero(data.owner == k) for k in range(data.owner.max() + 1)]  # images_for: no client without images


USED_BY = {  # arguments and the splits that they are for; semantic and natural find their own clients
    "clients": ("iid", "shards", "dirichlet", "dirichlet-classes", "classes", "lognormal", "fedslr", "fedma"),
    "per_client": ("shards", "classes", "lognormal"), "alpha": ("dirichlet", "dirichlet-classes", "fedslr", "fedma"),
}
SPLITS = {
    "iid": split_iid, "shards": split_shards, "dirichlet": split_dirichlet, "dirichlet-classes": split_dirichlet_classes,
    "classes": split_classes, "lognormal": split_lognormal, "semantic": split_semantic, "fedslr": split_fedslr,
    "fedma": functools.partial(split_dirichlet_classes, balance=True),  # FedMA's hetero-dir
    "natural": split_natural,  # the only one that takes the Data
}


def unused(split):
    """The arguments that a split has no use for."""
    return [name for name, splits in USED_BY.items() if split in SPLITS and split not in splits]


def setting(record):
    """The data set and the split of a record, for titles of figures."""
    args, split = record["args"], record["args"]["split"]
    size = f", {args['per_client']} each" if split in USED_BY["per_client"] else ""
    size = rf", $\alpha$ = {args['alpha']:g}" if split in USED_BY["alpha"] else size
    return f"{record['data']['name']}, {record['split']['clients']} clients, split: {split}{size}"


# ---------------------------------------------------------------------------------------------------------------------
# 3. Models
#
# A model is written once, as a function model(m, x, classes) -> logits that asks m, a Weights, for its layers in the order in
# which x [B,C,H,W] passes them. Net reads off its table of tensors, and evaluates it for any flat vector w. No model here has
# anything but weights: normalisation is by groups, so that w is all there is to send and to average. (psinet.py puts batchnorm
# in, and averages the running statistics, too.)


INITS = "uniform", "normal", "truncated", "constant"


class Weights:
    """Hands a model its tensors: zeros while Net reads the table of them, views of w afterwards.

    parts: (name, tensor) in the order of the table. route: how the convolutions of many clients at once are computed: "conv", or
    as products with "patches".
    """

    def __init__(self, parts=None, route="conv"):
        self.parts, self.route = parts, route
        self.table = []  # (name, shape, initial distribution)

    def take(self, name, shape, init):
        """A tensor of the model. name: "LAYER.weight" or "LAYER.bias". init: how its first values are drawn: ("uniform", bound)
        in +-bound; ("normal", deviation); ("truncated", deviation), a normal without draws beyond two; ("constant", value).
        conv and linear take two such pairs, the weight's and the bias's."""
        if self.parts is not None:
            known, part = next(self.parts, ("nothing more", None))
            if known != name:
                refuse(f"the model asks for {name}, where it asked for {known} when it was built; its layers may not depend on x")
            return part.view(shape)
        if not (isinstance(init, tuple) and len(init) == 2 and init[0] in INITS):
            raise RuntimeError(f"the init of {name} is {init!r}; it must be (KIND, number), KIND one of {', '.join(INITS)}; of conv "
                               "and linear two such pairs, (weight's, bias's)")
        if min(shape) < 1:
            raise RuntimeError(f"{name} would be empty")
        layer, layers = name.rsplit(".", 1)[0], [known.rsplit(".", 1)[0] for known, _, _ in self.table]
        if name in (known for known, _, _ in self.table) or (layer in layers and layers[-1] != layer):
            raise RuntimeError(f"{name} comes a second time, or apart from the other tensors of its layer; if you need a tensor "
                               "twice, ask for it once, by m.take")
        self.table.append((name, shape, init))
        return torch.zeros(shape)

    def conv(self, name, x, out, kernel, stride=1, padding=0, groups=1, init=None, bias=True):
        if not isinstance(kernel, int):
            raise TypeError(f"the kernel of {name} is {kernel!r}; kernels are square: give one whole number")
        shape = (out, x.shape[1] // groups, kernel, kernel)
        weight, offset = init or default_init(shape)
        weight = self.take(name + ".weight", shape, weight)
        offset = self.take(name + ".bias", (out,), offset) if bias else None
        if self.route == "patches" and groups == 1 and vmapped():
            return engine.conv_by_patches(x, weight, offset, stride, padding)
        return F.conv2d(x, weight, offset, stride, padding, 1, groups)

    def linear(self, name, x, out, init=None, bias=True, groups=1):
        shape = (out, x.shape[1] // groups)
        weight, offset = init or default_init(shape)
        weight = self.take(name + ".weight", shape, weight)
        offset = self.take(name + ".bias", (out,), offset) if bias else None
        if groups == 1:
            return F.linear(x, weight, offset)
        y = torch.einsum("bgi,goi->bgo", x.unflatten(1, (groups, -1)), weight.unflatten(0, (groups, -1))).flatten(1)
        return y + offset if bias else y

    def groupnorm(self, name, x, groups=2):
        scale = self.take(name + ".weight", x.shape[1:2], ("constant", 1.0))
        return F.group_norm(x, groups, scale, self.take(name + ".bias", x.shape[1:2], ("constant", 0.0)))

    def running_batchnorm(self, name, x, running=None, mask=None):
        """BatchNorm of x [B,C,H,W], and the next running statistics. running [2,C]: means and variances, at first 0 and 1.

        mask [B]: given in training, 1 for real images. Their statistics normalise x, and move the running ones a tenth of the
        way, as PyTorch's default does. Without mask the running statistics normalise x.
        """
        scale = self.take(name + ".weight", x.shape[1:2], ("constant", 1.0))
        shift = self.take(name + ".bias", x.shape[1:2], ("constant", 0.0))
        if running is None:
            running = torch.stack([torch.zeros_like(scale), torch.ones_like(scale)])
        precision, x = x.dtype, x.to(running.dtype)
        if mask is not None and not vmapped() and mask.all() and x[:, 0].numel() > 1:  # PyTorch's own is fast
            new = running.clone()
            return F.batch_norm(x, *new, scale.to(x.dtype), shift.to(x.dtype), training=True).to(precision), new
        mean, var = running
        if mask is not None:
            mask, pixels = mask.to(x.dtype), x.shape[2:].numel()
            real, count = mask[:, None] / mask.sum().clamp(min=1), (mask.sum() * pixels).clamp(min=2)
            own_var, own_mean = torch.var_mean(x, (2, 3), correction=0)  # [B, C]: of each image; then of all real ones
            mean = (real * own_mean).sum(0)
            var = (real * (own_var + (own_mean - mean) ** 2)).sum(0)
            running = 0.9 * running + 0.1 * torch.stack([mean, var * count / (count - 1)])
        factor = scale * (var + 1e-5).rsqrt()
        return (x * factor[:, None, None] + (shift - mean * factor)[:, None, None]).to(precision), running


def default_init(shape):
    """PyTorch's: weights and biases uniform in +-1/sqrt(fan in)."""
    bound = float(np.prod(shape[1:])) ** -0.5
    return ("uniform", bound), ("uniform", bound)


def xavier_normal(out, fan_in, kernel=1):
    """Glorot and Bengio 2010: variance 2 / (fan in + fan out); biases 0."""
    return ("normal", (2 / ((out + fan_in) * kernel**2)) ** 0.5), ("constant", 0.0)


def he_normal(out, kernel):
    """He et al. 2015, over the fan out: variance 2 / fan out; biases 0."""
    return ("normal", (2 / (out * kernel**2)) ** 0.5), ("constant", 0.0)


class Net:
    """logits = net(w, x): a model as a function of one flat vector w [d].

    tensors: (name, slice of w, shape) in the order of w. layers: (name, slice of w). w holds the layers one after the other,
    and of each layer the weight, then the bias: first_layers(N) and last_layers(N) are slices of w.
    layer_of [d]: the number of each coordinate's layer. decayed [d]: 1 where weight decay acts. weights: the Weights that
    collect names and shapes.
    Refuses images [C,H,W] of a size that the model can't take.
    """

    def __init__(self, name, shape, classes, device="cpu", weights=None):
        self.name, self.model, self.classes, self.device, self.route = name, find("model", name, MODELS), classes, device, "conv"
        weights = weights or Weights()
        try:
            if getattr(self.model, "__module__", None) != __name__:
                check_model(self.model, shape, classes, device)
            self.model(weights, torch.zeros(1, *shape), classes)
            if not weights.table:
                raise RuntimeError("it asks for no weights; see the models in common.py")
        except Exception as problem:  # whatever a model from elsewhere does
            known = isinstance(problem, (RuntimeError, ValueError, TypeError, AttributeError))
            why = engine.first_line(problem) if known else f"{type(problem).__name__}: {engine.first_line(problem)}"
            refuse(f"--model {name} can't be built for images of {shape[1]}x{shape[2]} with {shape[0]} channels: {why}")
        self.sizes = [int(np.prod(s)) for _, s, _ in weights.table]
        self.d = sum(self.sizes)
        ends = np.cumsum(self.sizes).tolist()
        self.tensors = [(name, slice(end - size, end), shape)
                        for (name, shape, _), size, end in zip(weights.table, self.sizes, ends)]
        self.names, self.inits = [name for name, _, _ in weights.table], [init for _, _, init in weights.table]
        spans = {}  # "conv1": the slices of its weight and bias, which lie side by side
        for name, where, _ in self.tensors:
            spans.setdefault(name.rsplit(".", 1)[0], []).append(where)
        self.layers = [(name, slice(parts[0].start, parts[-1].stop)) for name, parts in spans.items()]
        only = getattr(self.model, "decayed", None)
        self.decayed = self.per_weight([float(only is None or name in only) for name, _, _ in self.tensors])

    @functools.cached_property
    def layer_of(self):
        """Made when it is asked for: it is twice as large as the model."""
        sizes = torch.tensor([where.stop - where.start for _, where in self.layers])
        return torch.arange(len(sizes)).repeat_interleave(sizes).to(self.device)

    def first_layers(self, N):
        """The slice of w with the first N layers; a normalisation counts as one."""
        return slice(0, self.borders(N)[N])

    def last_layers(self, N):
        """The slice of w with the last N layers."""
        return slice(self.borders(N)[-1 - N], self.d)

    def borders(self, N):
        """Where each layer begins in w, and d behind the last. Refuses a model with fewer than N layers."""
        if N > len(self.layers):
            refuse(f"{N} layers are wanted of the model {self.name}, which has only {len(self.layers)}")
        return [*(where.start for _, where in self.layers), self.d]

    def per_weight(self, values):
        """[d]: a number for each tensor, repeated for all of its weights."""
        return torch.tensor(values).repeat_interleave(torch.tensor(self.sizes)).to(self.device)

    def __call__(self, w, x):
        """w [d], x [B,C,H,W] -> logits [B, classes], computed in the precision of x and given in that of w."""
        weights = Weights(zip(self.names, w.to(x.dtype).split(self.sizes)), self.route)
        return self.model(weights, x, self.classes).to(w.dtype)

    def init(self, rng):
        """Initial weights [d], drawn on the CPU from a numpy Generator, the same for every device."""
        parts = []
        for z, (kind, scale) in zip(self.sizes, self.inits):
            if kind == "uniform":
                part = rng.uniform(-scale, scale, z)
            elif kind == "normal":
                part = rng.normal(0, scale, z)
            elif kind == "truncated":  # a normal whose draws beyond two standard deviations are drawn again
                part = rng.normal(0, scale, z)
                while (far := np.abs(part) > 2 * scale).any():
                    part[far] = rng.normal(0, scale, far.sum())
            else:
                part = np.full(z, scale)
            parts.append(part)
        return torch.from_numpy(np.concatenate(parts).astype(np.float32)).to(self.device)


def with_part(w, part, V):
    """The model w [d] with each client's own weights V [m, ...] in the slice `part`: [m, d]."""
    W = w.repeat(len(V), 1)
    W[:, part] = V
    return W


def cnn(m, x, classes):
    """SuPerFed's five-layer CNN (its Table 4): 109,022 weights for EMNIST, 94,186 and 140,356 for CIFAR-10 and CIFAR-100,
    181,416 for Tiny ImageNet.

    Pooling comes before ReLU: the same result, and ReLU has fewer numbers. Xavier initialisation, as its code.
    """
    if x.shape[2:] not in ((28, 28), (32, 32), (64, 64)):
        raise ValueError("it is made for 28x28, 32x32 and 64x64; resnet18, mnistnet and 2nn take nearly any size")
    pool, kernel = (3 if x.shape[2] == 64 else 2), (3 if x.shape[2] == 32 else 2)
    x = F.relu(F.max_pool2d(m.conv("conv1", x, 32, 5, init=xavier_normal(32, x.shape[1], 5)), pool))
    x = F.relu(F.max_pool2d(m.conv("conv2", x, 64, 5, init=xavier_normal(64, 32, 5)), pool))
    x = F.relu(F.max_pool2d(m.conv("conv3", x, 32, kernel, init=xavier_normal(32, 64, kernel)), pool))
    x = F.relu(m.linear("fc1", x.flatten(1), 512, init=xavier_normal(512, 32)))
    return m.linear("fc2", x, classes, init=xavier_normal(classes, 512))


def local_response_norm(x, radius=4, alpha=0.001 / 9, beta=0.75):
    """TensorFlow's lrn with bias 1: x / (1 + alpha * sum of x^2 over the 2*radius+1 nearest channels)^beta.

    PyTorch's divides alpha by the number of channels. The sum is a product with a band matrix: a 1x1 convolution.
    """
    channel = torch.arange(x.shape[1], device=x.device)
    band = ((channel[:, None] - channel[None, :]).abs() <= radius).to(x.dtype)
    return x * (1 + alpha * F.conv2d(x * x, band[:, :, None, None])) ** -beta


def tfcnn(m, x, classes):
    """McMahan et al.'s CIFAR CNN, from the TensorFlow tutorial: 1,068,298 weights with 24x24 images and 10 classes.

    Its initial values are the tutorial's, from memory: truncated normals, biases 0, 0.1, 0.1, 0.1, 0.
    """
    def start(std, bias):
        return ("truncated", std), ("constant", bias)

    # with ceil_mode, pooling pads as TensorFlow's SAME does
    x = F.relu(F.max_pool2d(m.conv("conv1", x, 64, 5, padding=2, init=start(0.05, 0.0)), 3, 2, ceil_mode=True))
    x = F.relu(m.conv("conv2", local_response_norm(x), 64, 5, padding=2, init=start(0.05, 0.1)))
    x = F.max_pool2d(local_response_norm(x), 3, 2, ceil_mode=True)
    x = F.relu(m.linear("fc3", x.flatten(1), 384, init=start(0.04, 0.1)))
    x = F.relu(m.linear("fc4", x, 192, init=start(0.04, 0.1)))
    return m.linear("out", x, classes, init=start(1 / 192, 0.0))


tfcnn.decayed = ("fc3.weight", "fc4.weight")


def cifarnet(m, x, classes):
    """PersFL's CifarNet: 62,006 weights with 32x32x3 images and 10 classes."""
    x = F.relu(F.max_pool2d(m.conv("conv1", x, 6, 5), 2))
    x = F.relu(F.max_pool2d(m.conv("conv2", x, 16, 5), 2))
    x = F.relu(m.linear("fc1", x.flatten(1), 120))
    x = F.relu(m.linear("fc2", x, 84))
    return m.linear("fc3", x, classes)


def mnistnet(m, x, classes):
    """PersFL's network for MNIST: 784-100-10, 79,510 weights."""
    return m.linear("fc2", F.relu(m.linear("fc1", x.flatten(1), 100)), classes)


def two_nn(m, x, classes):
    """2nn, McMahan et al.'s for MNIST: two hidden layers of 200, 199,210 weights. Its initial values are PyTorch's."""
    x = F.relu(m.linear("fc1", x.flatten(1), 200))
    return m.linear("fc3", F.relu(m.linear("fc2", x, 200)), classes)


def mnistcnn(m, x, classes):
    """McMahan et al.'s CNN for MNIST: 1,663,370 weights, which it has only with padding. Its initial values are PyTorch's."""
    x = F.relu(F.max_pool2d(m.conv("conv1", x, 32, 5, padding=2), 2))
    x = F.relu(F.max_pool2d(m.conv("conv2", x, 64, 5, padding=2), 2))
    return m.linear("fc2", F.relu(m.linear("fc1", x.flatten(1), 512)), classes)


def resnet18(m, x, classes):
    """ResNet-18 with GroupNorm(2), as FedSLR's.

    Up to 32x32: a 3x3 stem and a last layer without bias, 11,173,952 weights for 10 classes, 11,220,032 for 100.
    Larger: torchvision's, its 7x7 stem with pooling, its initial weights and a bias, 11,279,112 weights for 200 classes.
    """
    small = x.shape[2] <= 32

    def conv(name, x, width, kernel, stride, padding=0):
        return m.conv(name, x, width, kernel, stride, padding, bias=False, init=None if small else he_normal(width, kernel))

    if small:
        x = F.relu(m.groupnorm("norm1", conv("conv1", x, 64, 3, 1, 1)))
    else:
        x = F.max_pool2d(F.relu(m.groupnorm("norm1", conv("conv1", x, 64, 7, 2, 3))), 3, 2, 1)
    for stage, width in enumerate((64, 128, 256, 512)):
        for block in range(2):
            name, stride = f"stage{stage + 1}.{block + 1}", 2 if stage and not block else 1
            y = F.relu(m.groupnorm(name + ".norm1", conv(name + ".conv1", x, width, 3, stride, 1)))
            y = m.groupnorm(name + ".norm2", conv(name + ".conv2", y, width, 3, 1, 1))
            if stride != 1:
                x = m.groupnorm(name + ".norm3", conv(name + ".shortcut", x, width, 1, stride))
            x = F.relu(x + y)
    return m.linear("fc", x.mean((2, 3)), classes, bias=not small)


def vgg9(m, x, classes):
    """VGG-9 as in FedMA, without its dropout: 3,491,530 weights with 32x32x3 images and 10 classes."""
    for i, (width, pool) in enumerate(((32, 0), (64, 1), (128, 0), (128, 1), (256, 0), (256, 1))):
        x = m.conv(f"conv{i + 1}", x, width, 3, padding=1)
        x = F.relu(F.max_pool2d(x, 2) if pool else x)
    x = F.relu(m.linear("fc1", x.flatten(1), 512))
    x = F.relu(m.linear("fc2", x, 512))
    return m.linear("fc3", x, classes)


def vgg16(m, x, classes):
    """VGG-16 (Simonyan and Zisserman 2015, configuration D) for 32x32 images, with fully connected layers of 512."""
    for stage, (width, depth) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))):
        for i in range(depth):
            x = m.conv(f"conv{stage + 1}-{i + 1}", x, width, 3, padding=1, init=he_normal(width, 3))
            x = F.relu(F.max_pool2d(x, 2) if i == depth - 1 else x)
    x = F.relu(m.linear("fc1", x.flatten(1), 512, init=he_normal(512, 1)))
    x = F.relu(m.linear("fc2", x, 512, init=he_normal(512, 1)))
    return m.linear("fc3", x, classes)


def mobilenet(m, x, classes):
    """MobileNetV1 (Howard et al. 2017) for 32x32 images: no stride in the stem, GroupNorm(2) in place of BatchNorm."""
    x = F.relu(m.groupnorm("norm1", m.conv("conv1", x, 32, 3, 1, 1, bias=False)))
    plan = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))
    for i, (width, stride) in enumerate(plan):
        name = f"block{i + 1}"
        x = m.conv(name + ".depthwise", x, x.shape[1], 3, stride, 1, groups=x.shape[1], bias=False)
        x = F.relu(m.groupnorm(name + ".norm1", x))
        x = F.relu(m.groupnorm(name + ".norm2", m.conv(name + ".pointwise", x, width, 1, bias=False)))
    return m.linear("fc", x.mean((2, 3)), classes)


MODELS = {f.__name__: f for f in (cnn, tfcnn, cifarnet, mnistnet, mnistcnn, resnet18, vgg9, vgg16, mobilenet)} | {"2nn": two_nn}


def check_model(model, shape, classes, device):
    """Raises what is wrong with a model from elsewhere: its logits must be those of its weights and of each image alone."""
    if isinstance(model, torch.nn.Module) or not callable(model) or isinstance(model, type):
        raise TypeError("it is an nn.Module, a class or no function; a model here is a function model(m, x, classes)")
    table, rng = Weights(), np.random.default_rng(0)
    model(table, torch.zeros(1, *shape), classes)
    w = [(name, torch.from_numpy(rng.normal(0, 0.1, size).astype(np.float32))) for name, size, _ in table.table]
    x = torch.from_numpy(rng.normal(0, np.arange(1, 9)[:, None, None, None], (8, *shape)).astype(np.float32))
    first, second, alone = (model(Weights(iter(w)), images, classes) for images in (x, x, x[:1]))

    def differ(a, b):
        return not (a - b).norm() <= 1e-4 * a.norm()

    if not torch.is_tensor(first):
        raise TypeError(f"it gives a {type(first).__name__}, not the logits, a tensor [B, classes]")
    if not first.isfinite().all():
        raise ValueError("its logits are not finite, with weights and pixels drawn at random")
    if first.shape != (8, classes):
        raise ValueError(f"its logits have the shape {tuple(first.shape)} for 8 images and {classes} classes")
    if first.requires_grad:
        raise ValueError("it trains tensors of its own, as an nn.Module does; all weights must come from m")
    if differ(first, second):
        raise ValueError("two calls on one batch differ; leave out dropout, all that is random, and what changes x in place")
    if differ(first[:1], alone):
        raise ValueError("an image's logits depend on the others in its batch, as with BatchNorm; use m.groupnorm")
    model(Weights((name, part.to(device)) for name, part in w), x[:1].to(device), classes)  # fails if it makes tensors elsewhere


# ---------------------------------------------------------------------------------------------------------------------
# 4. Transforms: uint8 images [n,H,W,C] and, in training, draws u [n,DRAWS] in [0,1) per image -> floats [n,C,h,w]
#
# scale, centre and tensorflow are such functions. normalize and fedslr make one for a data set. TRANSFORMS[name](data) does so for
# each name.
#
# The images stay channels-last in memory, which is what convolutions on CPUs and tensor cores are fastest with.


def scale(x, u=None):
    """To [0, 1], and nothing else (SuPerFed's code)."""
    return x.permute(0, 3, 1, 2).float() / 255


def centre(x, u=None):
    """To [-1/2, 1/2] (fedavg.py's for MNIST: docs/fedavg.md says why)."""
    return scale(x) - 0.5


def window(x, top, left, size, flip):
    """Per image, size = (h, w) pixels from row top [n] and column left [n], mirrored where flip [n]: [n,h,w,C]."""
    i, j = (torch.arange(length, device=x.device) for length in size)
    rows = top[:, None] + i  # [n, h]
    columns = left[:, None] + torch.where(flip[:, None], j.flip(0), j)  # [n, w]
    return x[torch.arange(len(x), device=x.device)[:, None, None], rows[:, :, None], columns[:, None, :]]


def augment_once(data, rng, pad=4):
    """The data set with every image, training and test, moved by up to `pad` pixels each way (0 comes in) and mirrored with
    probability 1/2, once and for all."""
    n, height, width, _ = data.images.shape
    top, left = torch.from_numpy(rng.integers(0, 2 * pad + 1, (2, n)))
    wide = F.pad(torch.from_numpy(data.images), (0, 0, pad, pad, pad, pad))
    images = window(wide, top, left, (height, width), torch.from_numpy(rng.random(n) < 0.5))
    return data._replace(images=images.numpy())


def images_for(args):
    """The Data of args.dataset, with args.limit and args.augment_once."""
    data = load_data(args.dataset, args.data_dir)
    if args.limit:
        clients = 0 if data.owner is None else data.owner.max() + 1
        data = limit_images(data, args.limit)
        if args.split == "natural" and clients and len(np.unique(data.owner)) < clients:
            refuse("--limit leaves a client of --split natural without images; use a larger one")
    return augment_once(data, stream(args.split_seed, "split", 1)) if args.augment_once else data


def tensorflow(x, u=None, size=24):
    """The TensorFlow CIFAR tutorial's, used by McMahan et al.: a random 24x24 window, flip, brightness, contrast; per image
    mean 0 and standard deviation 1. Without u: the central window. Its ranges (+-63 of 255, 0.2 to 1.8) are from memory.
    """
    height, width = x.shape[1:3]
    if min(height, width) < size:
        raise ValueError(f"--transform tensorflow cuts out {size}x{size} pixels")
    if u is None:
        x = x[:, (height - size) // 2 :, (width - size) // 2 :][:, :size, :size].float()
    else:
        top, left = (u[:, 0] * (height - size + 1)).long(), (u[:, 1] * (width - size + 1)).long()
        x = window(x, top, left, (size, size), u[:, 2] < 0.5).float()
        x = x + 63 * (2 * u[:, 3, None, None, None] - 1)
        mean = x.mean((1, 2), keepdim=True)
        x = (x - mean) * (0.2 + 1.6 * u[:, 4, None, None, None]) + mean
    x = x - x.mean((1, 2, 3), keepdim=True)
    std = x.square().mean((1, 2, 3), keepdim=True).sqrt().clamp(min=x[0].numel() ** -0.5)
    return (x / std).permute(0, 3, 1, 2)


def normalize(data):
    """Channels to mean 0 and standard deviation 1 over the training images, and nothing else."""
    channels = range(data.images.shape[3])
    counts = np.stack([np.bincount(data.images[: data.n_train, :, :, c].ravel(), minlength=256) for c in channels], 1)
    values, share = np.arange(256)[:, None] / 255, counts / counts.sum(0)
    mean = (share * values).sum(0)
    std = np.sqrt((share * (values - mean) ** 2).sum(0)).clip(1e-6)

    @functools.cache
    def on(device):
        return torch.tensor(np.stack([mean, std]), dtype=torch.float32, device=device)

    def transform(x, u=None):
        return ((x.float() / 255 - on(x.device)[0]) / on(x.device)[1]).permute(0, 3, 1, 2)

    return transform


def fedslr(data):
    """FedSLR's: normalize; a flip with probability 1/2; and with probability 1/2 a random window after padding with 0, 4 pixels
    wide (8 for Tiny ImageNet). Its code normalises Tiny ImageNet by .5 and .5 instead.
    """
    normalized = normalize(data)
    size, pad = data.images.shape[1:3], 8 if data.images.shape[1] == 64 else 4

    def transform(x, u=None):
        x = normalized(x)
        if u is None:
            return x
        move = u[:, 1] < 0.5
        top, left = (torch.where(move, (u[:, i] * (2 * pad + 1)).long(), pad) for i in (2, 3))
        x = F.pad(x.permute(0, 2, 3, 1), (0, 0, pad, pad, pad, pad))
        return window(x, top, left, size, u[:, 0] < 0.5).permute(0, 3, 1, 2)

    return transform


TRANSFORMS = {"scale": lambda data: scale, "centre": lambda data: centre, "normalize": normalize,
              "tensorflow": lambda data: tensorflow, "fedslr": fedslr}
DRAWS = {"scale": 0, "centre": 0, "normalize": 0, "tensorflow": 5, "fedslr": 4}  # random numbers per training image


# ---------------------------------------------------------------------------------------------------------------------
# 5. Training and evaluation


class Batch(NamedTuple):
    """One client's minibatch: x [B,C,H,W], y [B], mask [B] (0 where a row only fills up), draw [...] (see train)."""

    x: torch.Tensor
    y: torch.Tensor
    mask: torch.Tensor
    draw: torch.Tensor


def cross_entropy(logits, batch):
    """Mean cross-entropy over the batch's real images: logits [B, classes] -> scalar."""
    loss = F.cross_entropy(logits, batch.y, reduction="none")
    return (loss * batch.mask).sum() / batch.mask.sum().clamp(min=1)


def sgd(args, w, u, g, eta, decayed=None):
    """A step of SGD with momentum:  u' = momentum * u + g + decay * w,  w' = w - eta * u'.  Returns w', u'.

    w, u, g: [..., d] weights, momentum and gradient. decayed [d]: 1 where --weight-decay acts; None if g has it already.
    One to three passes through memory; written as one formula it has eight.
    """
    u = torch.add(g, u, alpha=args.momentum) if args.momentum else g
    if args.weight_decay and decayed is not None:
        u = torch.addcmul(u, decayed, w, value=args.weight_decay)
    return torch.addcmul(w, eta, u, value=-1), u


class Plan(NamedTuple):
    """What one client does in one call of train: arrays over its steps."""

    index: np.ndarray  # [steps, B] numbers of images
    mask: np.ndarray  # [steps, B] False where a row only fills up the last minibatch of an epoch
    uniform: np.ndarray  # [steps, B, DRAWS] draws from [0, 1) for the transform
    draw: np.ndarray  # [steps, ...] for the algorithm


class Federation:
    """K clients and their images: split, sampled, trained and evaluated.

    With one process a client's row is its number, 0 .. K-1: skip the rest of this paragraph. Under torchrun the r-th of P
    processes trains the clients k with k mod P = r, on a device of its own. A client's row is its place among these. S are
    rows everywhere, `among` are numbers.
    clients [rows]: the numbers of this process's clients. n [rows]: n_k, how many training images each of them has. split: the
    Split by rows; whole_split: that of all clients, by numbers. net: the model.
    """

    only_arguments = False  # arguments_of sets it while it asks a file for its arguments

    def __init__(self, args, make_net=None):
        if self.only_arguments:
            raise Asked(args)
        self.args = args
        self.device, self.rank, self.processes = engine.find_device(args.device)
        if self.processes > 1 and int(os.environ["LOCAL_RANK"]):
            dist.barrier()  # the first process of each machine downloads and decodes, the others wait
        self.data = images_for(args)
        if self.processes > 1 and not int(os.environ["LOCAL_RANK"]):
            dist.barrier()
        self.whole_split = split_clients(self.data, args)
        if len(self.whole_split.train) < self.processes:
            refuse(f"{self.processes} processes for {len(self.whole_split.train)} clients; start at most one per client")
        self.images = torch.from_numpy(self.data.images).to(self.device)
        self.labels = torch.from_numpy(self.data.labels).to(self.device)
        self.K = len(self.whole_split.train)
        self.clients = np.arange(self.rank, self.K, self.processes)
        self.split = Split(*([part[k] for k in self.clients] for part in self.whole_split))
        self.n = torch.tensor([float(len(index)) for index in self.split.train], device=self.device)
        self.transform = TRANSFORMS[args.transform](self.data)
        try:
            seen = self.transform(self.images[:1])
        except ValueError as problem:
            refuse(f"{problem}, but {self.data.name} has {self.data.images.shape[1]}x{self.data.images.shape[2]}")
        self.net = (make_net or Net)(args.model, tuple(seen.shape[1:]), self.data.classes, self.device)
        self.stop = False  # set when the run is interrupted: workers give up
        self.notes = self.oddities()  # lines that `describe` prints below its own
        # sets vmap (all clients in one step?), map (Python's, or a thread pool's, which does several clients at once),
        # threads, and more, which engine.prepare lists
        engine.prepare(self)

    def oddities(self):
        """What a user should know of the images and their split: a line each."""
        data, notes = self.data, []
        if self.args.split == "natural" and data.test_owner is not None:
            notes.append("note    the clients' own test images are those that client_test names; --client-test is not used")
        dealt = np.unique(np.concatenate([index for part in self.whole_split for index in part]))
        if nobodys := data.n_train - (dealt < data.n_train).sum():
            notes.append(f"note    {nobodys} of {data.n_train} training images go to no client")
        if data.classes == 1:
            notes.append("warning all images are of one class: every model is right")
        if all(np.array_equal(x, data.images[0]) for x in data.images):
            notes.append("warning all images are alike: nothing can be learnt from them")
        return notes

    def describe(self):
        """Prints three lines on what is trained, images, split and model, and the notes."""
        K, C = self.K, self.args.fraction
        share = "all" if C == 1 else "one" if int(C * K + 1e-9) <= 1 else f"{C * 100:g} %"
        data, sizes = self.data, [len(index) for index in self.whole_split.train]
        held = [len(index) for index in self.whole_split.test]
        own = self.args.client_test or (self.args.split == "natural" and data.test_owner is not None)
        kinds = [len(np.unique(data.labels[index])) for index in self.whole_split.train]
        print(f"data    {data.name}: {data.n_train} training and {len(data.images) - data.n_train} central test images, "
              f"{data.classes} classes, {'x'.join(map(str, data.images.shape[1:]))}"
              + (", with client_train (for --split natural)" if data.owner is not None else ""))
        print(f"split   {self.args.split}: {K} client{'s' * (K > 1)}, {share} in a round, training images {spread(sizes)}, "
              f"{'own' if own else 'central'} test images {spread(held)}, classes {spread(kinds)} (least/mean/most), fingerprint "
              f"{self.whole_split.fingerprint()}")
        print(f"model   {self.net.name}: {self.net.d:,} weights in {self.args.precision} on {engine.device_name(self.device)}"
              + (f", {self.processes} processes" if self.processes > 1 else "")
              + (f", {self.threads} thread{'s' * (self.threads > 1)}" if self.threads else ""))
        for note in self.notes:
            print(note)

    def plot(self, record, out, marks):
        """Draws the figures of --plot into the folder out. marks: a round -> what begins with it."""
        plots.plot(record, setting(record), self.data, self.whole_split, out, marks)

    def sample(self, t, among=None):
        """S_t, the clients of round t: max(int(C*N), 1) of N, without replacement. N: all K, or those with the numbers `among`.
        Every process draws the same S_t, and gets the rows of those that are its own."""
        numbers = np.arange(self.K) if among is None else np.sort(among)
        m = max(int(self.args.fraction * len(numbers) + 1e-9), 1)  # 1e-9: .29 * 100 is 28.999999999999996
        S_t = stream(self.args.seed, "sampling", t).choice(numbers, m, replace=False)
        return np.flatnonzero(np.isin(self.clients, S_t))

    def initial_weights(self):
        """w [d], from the seed."""
        return self.net.init(stream(self.args.seed, "initialisation"))

    def eta(self, t):
        """The clients' learning rate in round t."""
        return torch.tensor(self.args.lr * self.args.lr_decay**t, device=self.device)

    def all_reduce(self, x):
        """The sum of a tensor over all processes; with one process, x itself."""
        return engine.all_reduce(x) if self.processes > 1 else x

    def sum(self, x, n=None):
        """The sum of x_k over the clients of all processes, x [m, ...] -> [...]; with n [m] of n_k x_k, x [m] or [m, d]."""
        return self.all_reduce(x.sum(0) if n is None else n @ x)

    def mean(self, x, n=None):
        """The mean of x_k over the clients of all processes, x [m, ...] -> [...]; with n [m] weighted by n_k, x [m] or [m, d]."""
        total = n.sum() if n is not None else torch.tensor(float(len(x)), device=self.device)
        return self.sum(x, n) / self.all_reduce(total)

    def gather(self, x, among=None):
        """The rows of all clients, or of the clients `among`, in the order of their numbers, from this process's x [rows, ...]."""
        if self.processes == 1:
            return x
        numbers = np.arange(self.K) if among is None else np.sort(among)
        whole = torch.zeros(self.K, *x.shape[1:], dtype=x.dtype, device=self.device)
        whole[self.clients[self.rows(numbers)]] = x.to(self.device)
        return self.all_reduce(whole)[numbers]

    def rows(self, among=None):
        """The rows of this process's clients among those with the given numbers; of all by default."""
        return np.arange(len(self.clients)) if among is None else np.flatnonzero(np.isin(self.clients, among))

    def per_client(self, x):
        """What every client keeps between rounds (see engine.Rows): a row each, x [...] for all, or x(k) for client number k."""
        def first(i):
            return x(int(self.clients[i])) if callable(x) else x

        return engine.Rows(self, first)

    # Training: the same step function, one client after the other or many at once

    def train(self, step, clients, S, t, *shared, epochs=None, draw=None, order=0, images=None, net=None):
        """Takes every client of S through its minibatches of round t, and returns what they come to, in the form of `clients`.

        step(client, batch, *shared) -> client is the algorithm, written for ONE client and ONE minibatch (a Batch): a pure
            function of tensors that keeps their shapes and types.
        clients: what the clients begin with, a tensor [m, ...] or nested tuples of such. V.of(S) can stand for V[S]: then rows
            are fetched one by one, when they are needed.
        shared: tensors that all clients see alike.
        epochs: E, by default --epochs.
        draw(rng, steps) -> [steps, ...]: the algorithm's own random numbers. step finds a row of them in batch.draw.
        order: calls of one round with the same order see the same minibatches, those with another order see others.
        images: for each client the numbers of the images to train on, by default its own training images.
        net: the network inside step, where it is not federation.net. Only the engine looks at it.

        A client's images are shuffled in every epoch. The last, smaller minibatch is trained on, too. A client with fewer
        minibatches than others stops earlier. Results do not depend on how many clients go at once, up to rounding under vmap.
        """
        epochs = self.args.epochs if epochs is None else epochs
        if not len(S) or not epochs:
            return clients
        images = images or [self.split.train[row] for row in S]
        plans = [self.plan(row, own, t, epochs, draw, order) for row, own in zip(S, images)]
        if self.vmap or self.device.type == "cuda":
            return engine.train(self, step, clients, plans, shared, net or self.net, max(1, self.args.rounds - t))
        return self.one_by_one(step, clients, plans, shared)

    def one_by_one(self, step, clients, plans, shared):
        """Each client by itself; on a CPU as many at once as there are threads."""
        def alone(i):
            return self.train_alone(step, tree_map(lambda z: z[i], clients), plans[i], shared)

        # filled row by row: torch.stack would hold all of it twice
        result = tree_map(lambda z: torch.empty(z.shape, dtype=z.dtype, device=z.device), clients)
        for i, client in enumerate(self.map(alone, range(len(plans)))):
            tree_map(lambda rows, row: rows[i].copy_(row), result, client)
        return result

    def plan(self, row, own, t, epochs, draw=None, order=0):
        """The Plan of the client in this row for round t, from its own random streams. own: the numbers of its images."""
        size = min(self.args.batch_size or len(own), len(own))
        shuffle, augment, algorithm = (stream(self.args.seed, purpose, t, int(self.clients[row]), order)
                                       for purpose in ("order", "augmentation", "algorithm"))
        shuffled = np.array([shuffle.permutation(own) for _ in range(epochs)], np.int64)  # [epochs, images]: anew in every epoch
        fill = (0, 0), (0, -len(own) % size)  # up to whole minibatches, with image 0, which mask leaves out
        index, mask = (np.pad(z, fill).reshape(-1, size) for z in (shuffled, np.ones_like(shuffled, bool)))
        uniform = augment.random((*index.shape, DRAWS[self.args.transform]), np.float32)
        own_draw = draw(algorithm, len(index)) if draw else np.zeros((len(index), 0))
        return Plan(index, mask, uniform, own_draw.astype(np.float32))

    def batch(self, index, mask, uniform, draw):
        """The Batch of the images numbered index [B], transformed with the random numbers uniform [B,DRAWS]. Of m clients at once:
        index [m,B], uniform [m,B,DRAWS]."""
        x = self.transform(self.images[index.flatten()], uniform.flatten(0, -2)).unflatten(0, index.shape)
        return Batch(x.bfloat16() if self.args.precision == "bf16" else x, self.labels[index], mask, draw)

    def train_alone(self, step, client, plan, shared):
        """One client: all minibatches of all epochs, one after the other, in the order of its plan."""
        index, mask, uniform, draw = (torch.as_tensor(z, device=self.device) for z in plan)
        for s, n in enumerate(plan.mask.sum(1)):  # n images: the last minibatch of an epoch may have fewer
            if self.stop:
                raise KeyboardInterrupt
            client = step(client, self.batch(index[s, :n], mask[s, :n].float(), uniform[s, :n], draw[s]), *shared)
        return client

    # Evaluation

    @torch.no_grad()
    def logits(self, w, index):
        """The model w [d] on the images numbered index [n], as for testing: [n, classes]."""
        index = torch.as_tensor(index, device=self.device)
        return torch.cat([self.net(w, self.transform(self.images[part])) for part in index.split(500)])

    def evaluate(self, w):
        """Global measures of the model w [d] on the central test images: top1, top5, loss, ece, mce."""
        labels = self.labels[self.data.n_train :]
        logits = self.logits(w, np.arange(self.data.n_train, len(self.data.images)))
        one = score(logits, labels, torch.zeros_like(labels), 1)
        return {name: float(value[0]) for name, value in one.items()}

    def evaluate_clients(self, W, images=None, among=None):
        """Personal measures: each client's model on its own test images. W: one model w [d] for all; or one for each client,
        [rows, d]; or a function: W(S) [m, d] are the models of the rows S.

        per_client: the accuracies, one for each client. Of these mean, std (divisor: clients - 1) and worst_decile (the mean of
        the worst tenth) are taken. weighted_mean: by test images. top5, loss, ece, mce: means over clients.
        val_mean, val_loss: mean and loss on validation images, with --client-val, unless `images` is given.
        images: for each row the numbers of the images to measure on, instead of the test images.
        among: the numbers of the clients that are evaluated, all by default.
        """
        here, models = self.rows(among), W if callable(W) else W.__getitem__
        own = [(images or self.split.test)[i] for i in here]
        index = np.concatenate([*own, np.zeros(0, np.int64)])  # the empty array: where this process has none of the clients
        n = torch.tensor([len(i) for i in own], dtype=torch.long, device=self.device)
        client = torch.arange(len(own), device=self.device).repeat_interleave(n)
        if not own:
            logits = torch.zeros(0, self.data.classes, device=self.device)
        elif torch.is_tensor(W) and W.dim() == 1:
            logits = self.logits(W, index)
        else:
            def alone(i):
                return self.logits(models(here[i : i + 1])[0], own[i])

            def in_turn():
                return torch.cat(list(self.map(alone, range(len(own)))))

            def together():
                return engine.logits_together(self, models, here, own, alone)

            logits = engine.guarded(self, "evaluation", None, together, in_turn) if self.vmap else in_turn()
        one = score(logits, self.labels[torch.as_tensor(index, device=self.device)], client, len(own))
        one = {name: self.gather(value, among) for name, value in one.items()}
        top1, n = one["top1"].cpu().numpy(), self.gather(n, among).cpu().numpy()
        worst = np.sort(top1)[: ceil(len(top1) / 10)]
        measures = {
            "mean": float(top1.mean()), "weighted_mean": float((top1 * n).sum() / n.sum()),
            "std": float(top1.std(ddof=1)) if len(top1) > 1 else 0.0, "worst_decile": float(worst.mean()),
            **{name: float(one[name].mean()) for name in ("top5", "loss", "ece", "mce")}, "per_client": top1.tolist(),
        }
        if self.args.client_val and images is None:
            on_val = self.evaluate_clients(W, self.split.val, among)
            measures.update(val_mean=on_val["mean"], val_loss=on_val["loss"])
        return measures


def score(logits, y, group, groups, bins=15):
    """Measures per group: logits [n, classes], y [n] and group [n] of 0..groups-1 -> name -> [groups], in float64.

    top1, top5 and loss (cross-entropy) are means over a group's images. Calibration as in Guo et al. 2017: the largest
    softmax probability p falls into the bin (i/15, (i+1)/15]; ece is the mean over images of their bin's |mean p -
    accuracy|, mce the largest such gap. All images of a group count at once, not minibatch by minibatch.
    """
    logits = logits.double()
    n = torch.bincount(group, minlength=groups).clamp(min=1)

    def mean(values):
        return torch.zeros(groups, dtype=torch.double, device=y.device).index_add_(0, group, values.double()) / n

    right = logits.topk(min(5, logits.shape[1])).indices == y[:, None]
    top, sure = right[:, 0].double(), logits.softmax(1).amax(1)
    cell = group * bins + ((sure * bins).ceil().long() - 1).clamp(0, bins - 1)
    count = torch.bincount(cell, minlength=groups * bins)
    gap = torch.zeros(groups * bins, dtype=torch.double, device=y.device).index_add_(0, cell, sure - top).abs()
    return {
        "top1": mean(top), "top5": mean(right.any(1)), "loss": mean(F.cross_entropy(logits, y, reduction="none")),
        "ece": gap.view(groups, bins).sum(1) / n, "mce": (gap / count.clamp(min=1)).view(groups, bins).amax(1),
    }


def spread(values):
    """least/mean/most, shortly."""
    return f"{min(values)}/{np.mean(values):.1f}/{max(values)}".replace(".0/", "/")


# ---------------------------------------------------------------------------------------------------------------------
# 6. Arguments


class Parser(argparse.ArgumentParser):
    def error(self, message):
        refuse(f"{message} (see --help)")


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):
        return action.help if action.default is None or action.default is False else super()._get_help_string(action)


def between(kind, low, high=float("inf"), without_low=False):
    """An argparse type: a finite number in [low, high], or in (low, high]."""

    def parse_number(text):
        value = kind(text)
        if not (low < value <= high if without_low else low <= value <= high) or value == float("inf"):
            limits = f"{'above' if without_low else 'at least'} {low}" + (f" and at most {high}" if high < float("inf") else "")
            limits = "finite" if value == float("inf") == high else limits
            raise argparse.ArgumentTypeError(f"{text} must be {limits}")
        return value

    parse_number.__name__ = "number" if kind is float else "whole number"
    return parse_number


positive_int, nonnegative_int = between(int, 1), between(int, 0)
positive, nonnegative = between(float, 0, without_low=True), between(float, 0)
fraction, positive_fraction = between(float, 0, 1), between(float, 0, 1, without_low=True)


def parser(doc, **defaults):
    """The common flags, with an algorithm's defaults; the file adds its own flags in a group of its own."""
    about, command, *_ = (doc or "").split("\n\n") + [""]
    p = Parser(description=about, epilog=command, formatter_class=Help, allow_abbrev=False)
    g = p.add_argument_group("data (the same in every file)")
    g.add_argument("--dataset", default="cifar10",
                   help=f"{' '.join(DATASETS)}, or the path of a .npz; defaults of other flags depend on it (--dataset NAME --help)")
    g.add_argument("--data-dir", default="data", help="NAME.npz is taken from here if it exists, else downloads go here")
    g.add_argument("--limit", type=positive_int, help="use only this many training images, equally many of each class")
    g.add_argument("--augment-once", action="store_true",
                   help="move every image by up to 4 pixels each way and mirror half of them, once and for all")
    g.add_argument("--split", default="shards", metavar="NAME",
                   help=f"how the training images are given to the clients: {' '.join(SPLITS)}, or path/to/file.py:function "
                        "(docs/extend.md); natural: as the .npz says (its array client_train; client_test, if it is there, gives out "
                        "the test images)")
    g.add_argument("--alpha", type=nonnegative, default=1.0,
                   help="alpha of the Dirichlet splits: alpha/classes per class for dirichlet (Hsu et al.'s convention), alpha "
                        "per client for dirichlet-classes and fedma, alpha per class for fedslr; other splits refuse it")
    g.add_argument("--per-client", type=positive_int, default=2,
                   help="s, shards (--split shards) or classes (classes, lognormal) of a client; other splits refuse it")
    g.add_argument("--clients", type=positive_int, default=100,
                   help="K, clients in all (--split semantic and natural find their own)")
    g.add_argument("--client-test", type=fraction, default=0.2,
                   help="share of a client's images held out as its own test images; 0: it is tested on central test "
                        "images instead, drawn with its class shares")
    g.add_argument("--client-val", type=fraction, default=0.0,
                   help="share of a client's images held out for validation: the record then has val_mean and val_loss; "
                        "superfed.py and persfl.py also choose on these images")
    g.add_argument("--transform", default="scale", choices=TRANSFORMS,
                   help="of pixels. scale: to [0, 1]; centre: to [-1/2, 1/2]; normalize: each channel to mean 0 and deviation 1; "
                        "the others: a paper's")
    g = p.add_argument_group("training (the same in every file)")
    g.add_argument("--model", default="cnn", metavar="NAME",
                   help=f"the network: {' '.join(MODELS)}, or path/to/file.py:function (docs/extend.md)")
    g.add_argument("--fraction", type=fraction, default=0.1, help="C, share of the clients in a round; at least one is drawn")
    g.add_argument("--rounds", type=positive_int, default=100, help="T, R or E_G, rounds of communication")
    g.add_argument("--epochs", type=positive_int, default=1, help="E (E_L in PersFL), local epochs")
    g.add_argument("--batch-size", type=nonnegative_int, default=20, help="B, local minibatch; 0: all the client has")
    g.add_argument("--lr", type=positive, default=0.01, help="eta, local learning rate")
    g.add_argument("--lr-decay", type=positive_fraction, default=1.0, help="eta is multiplied by this every round")
    g.add_argument("--momentum", type=fraction, default=0.0, help="of local SGD; its buffer starts at 0 in every round")
    g.add_argument("--weight-decay", type=nonnegative, default=0.0,
                   help="adds this times w to the gradient (of tfcnn: for the kernels of its two hidden fully connected layers)")
    g = p.add_argument_group("running (the same in every file)")
    seed = between(int, 0, 2**32 - 1)
    g.add_argument("--seed", type=seed, default=0, help="of initial weights, sampled clients, order of images, augmentation")
    g.add_argument("--split-seed", type=seed, default=0,
                   help="of the split; also of --augment-once, and of superfed.py's --unseen")
    g.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1, ...")
    g.add_argument("--parallel", type=positive_int,
                   help="clients trained at once: threads on the CPU (default: its cores), one vmapped step on a GPU (default: "
                        "what is fastest and fits)")
    g.add_argument("--precision", choices=("fp32", "tf32", "bf16"),
                   help="of the models' products in training; weights, sums and evaluation are always fp32 (default: fp32 on "
                        "the CPU, tf32 on a GPU)")
    g.add_argument("--engine", choices=("auto", "loop"), default="auto",
                   help="loop: every client by itself (on the CPU in threads, see --parallel); auto: on a GPU the fastest that gives "
                        "what the loop gives, on the CPU the loop")
    g.add_argument("--eval-every", type=positive_int, default=5,
                   help="rounds between evaluations; the last is always evaluated")
    if "target" in defaults:  # of files that hand their global model to run.evaluates
        g.add_argument("--target", type=positive_fraction, nargs="*", metavar="TOP1",
                       help="measure the global model after every round; stop when its accuracy has reached all these")
    g.add_argument("--out", help="folder of the record (default: runs/<algorithm>-<dataset>-<seed>)")
    g.add_argument("--resume", action="store_true", help="continue the run whose state lies in the --out folder")
    g.add_argument("--plot", action="store_true", help="draw learning curves, accuracy per client and the split into --out")
    p.set_defaults(**defaults)
    return p


def parse(p, by_dataset, argv=None):
    """Parses argv; by_dataset[DATASET] and then by_dataset[DATASET, SPLIT], where there are such, replace the defaults."""
    first = Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--dataset", default=p.get_default("dataset"))
    first.add_argument("--split")
    for name in USED_BY:
        first.add_argument(f"--{name}".replace("_", "-"))
    given = first.parse_known_args(argv)[0]
    p.set_defaults(**by_dataset.get(given.dataset, {}))
    p.set_defaults(**by_dataset.get((given.dataset, given.split or p.get_default("split")), {}))
    args = p.parse_args(argv)
    find("model", args.model, MODELS)  # refuses a name that nothing has
    find("split", args.split, SPLITS)
    for name in unused(args.split):
        if getattr(given, name):
            default = "" if given.split else " (the default here)"
            p.error(f"--split {args.split}{default} has no use for --{name.replace('_', '-')}; leave it out, or take "
                    f"--split {' or '.join(USED_BY[name])}")
    if args.out == "":
        p.error("--out is empty; name a folder, or leave it out")
    if args.precision is None:
        args.precision = "tf32" if args.device.startswith("cuda") else "fp32"
    if args.precision == "tf32" and not args.device.startswith("cuda"):
        p.error("--precision tf32 is for GPUs; use fp32 or bf16")
    return args


class Asked(Exception):
    """Federation's answer to arguments_of."""


def arguments_of(main, argv):
    """The arguments that an algorithm's main(argv) hands to Federation, which then raises them: nothing is read or trained."""
    Federation.only_arguments = True
    try:
        main(argv)
    except Asked as asked:
        return vars(asked.args[0])
    finally:
        Federation.only_arguments = False


@functools.cache
def load_file(path):
    """The module of a .py file anywhere, which may import what lies beside it; refuses what can't be loaded."""
    path = pathlib.Path(path)
    if path.suffix != ".py" or not path.is_file():
        refuse(f"there is no file {path}" if path.suffix == ".py" else f"{path} is no .py file")
    spec = importlib.util.spec_from_file_location(str(path), path)
    sys.modules[str(path)] = module = importlib.util.module_from_spec(spec)  # dataclasses look for it there
    sys.path.append(str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as problem:  # whatever the file does
        refuse(f"{path} can't be loaded: {type(problem).__name__}: {engine.first_line(problem)}")
    return module


def find(flag, name, known):
    """The function that --model NAME or --split NAME means: one of `known`, or one in a file, path/to/file.py:function."""
    path, colon, function = name.rpartition(":")
    if name in known:
        return known[name]
    if name.endswith(".py"):
        refuse(f"--{flag} {name} names no function; use {name}:FUNCTION")
    if not colon:
        refuse(f"--{flag} {name} is unknown; use one of {', '.join(known)}, or path/to/file.py:function")
    if not hasattr(load_file(path), function):
        refuse(f"--{flag} {name}: {path} has no function {function}")
    return getattr(load_file(path), function)
