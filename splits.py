"""Who gets which images: split_clients, and one function for each scheme of --split.

A scheme takes (labels [n] of the training images, classes, rng, args) and returns an array of image
numbers for each client. split_clients then shuffles each client's images, and cuts them into
training, validation and test images.
"""

import functools
import hashlib
from typing import NamedTuple

import numpy as np

from engine import first_line, refuse
from models import find


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


def split_clients(data, args, rng):
    """The Split that args.split, args.clients, args.client_test, args.client_val and args.split_seed ask for.

    Without client_test a client's test images are central ones (matched_test). With the split natural they are those that the
    data set's array client_test names, where it has that array. Every client gets at least one training image, and one
    validation and one test image where those are asked for; otherwise the split is refused.
    """
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
        refuse(f"--split {name} fails: {type(problem).__name__}: {first_line(problem)}")
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
