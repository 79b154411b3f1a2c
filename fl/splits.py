"""Who gets which images: split_clients, and one function for each scheme of --split. A scheme takes
(labels [n] of the training images, classes, rng, args) and returns an array of image numbers for
each client; with `overlap = True` it may give an image to several clients."""

import functools
import hashlib
from typing import NamedTuple

import numpy as np

from .files import find, fresh
from .machine import first_line, refuse


class Split(NamedTuple):
    """For each client the numbers (in Data.images) of its training, validation and test images."""

    train: list
    val: list
    test: list

    def fingerprint(self):
        """Returns a hash over all lists, in the order of the clients."""
        digest = hashlib.sha256()
        for part in self:
            for index in part:
                digest.update(np.int64(len(index)).tobytes() + index.astype(np.int64).tobytes())
        return digest.hexdigest()[:16]

    def classes(self, labels):
        """Returns how many classes each client's training images have."""
        return [len(np.unique(labels[index])) for index in self.train]

    def owned(self, n):
        """Returns each client's images but central ones, which have numbers from n on."""
        own = [np.sort(np.concatenate(parts)) for parts in zip(*self)]
        return [index[index < n] for index in own]

    def measured(self, n):
        """Returns the same split, with n test images of all clients together if n is given."""
        m = [min(max(1, n // len(self.test)), len(i)) if n else len(i) for i in self.test]
        return self._replace(test=[i[np.arange(m) * len(i) // m] for i, m in zip(self.test, m)])


# --------------------------------------------------------------------------------------------------
# 1. From a scheme to a Split


def split_clients(data, args, rng):
    """Returns the Split that --split, --clients, --client-test and --client-val ask for."""
    validate(data, args)
    if args.split == "natural":
        owned = [np.flatnonzero(data.owner == k) for k in range(data.owner.max() + 1)]
    else:
        give = scheme(args.split) if args.split in SPLITS else own_split
        owned = give(data.labels[: data.n_train], data.classes, rng, args)
    parts = [cut(data, args, rng, k, index) for k, index in enumerate(owned)]
    return Split(*map(list, zip(*parts)))


def test_owner(data, args):
    """Returns each test image's client, where the data set says it and the split follows it."""
    return data.test_owner if args.split == "natural" else None


def validate(data, args):
    """Refuses what no draw can satisfy."""
    if args.split in USED_BY["clients"] and args.clients > data.n_train:
        refuse(f"{args.clients} --clients can't share {data.n_train} training images; use fewer")
    if args.split in ("classes", "unequal-classes", "lognormal") and args.per_client > data.classes:
        refuse(f"--per-client {args.per_client}: there are only {data.classes} classes; use fewer")
    if args.client_test * (test_owner(data, args) is None) + args.client_val >= 1:
        refuse("--client-test and --client-val leave nothing to train on; use a sum below 1")
    if getattr(scheme(args.split), "overlap", False) and (args.client_test or args.client_val):
        refuse(f"--split {args.split} may give an image twice, for training and for testing; use "
               "--client-test 0 --client-val 0")
    if args.split == "natural" and data.owner is None:
        refuse("--split natural wants an array client_train in the .npz, each training image's "
               f"client; {data.name} has none")


def cut(data, args, rng, k, index):
    """Returns the training, validation and test images of client k, from its images `index`.
    Without --client-test its test images are central ones, without --client-val its validation
    images are the data set's, if it has some (see matched)."""
    index, n, labels = rng.permutation(index), len(index), data.labels[index]
    named = test_owner(data, args)
    tests, vals = args.client_test * (named is None), args.client_val  # shares
    n_train = int((1 - tests - vals) * n + 1e-9)
    n_test = int(tests * n + 1e-9) if vals else n - n_train
    train, val, test = np.split(index, [n_train, n - n_test])
    if not len(train) or vals and not len(val) or tests and not len(test):
        fewer = "fewer --clients, " * (args.split in USED_BY["clients"])
        refuse(f"--split {args.split} leaves client {k} with {n} images: {len(train)} to train on, "
               f"{len(val)} to validate, {len(test)} to test; use {fewer}a smaller --client-test "
               f"{'and --client-val ' * (vals > 0)}or more images")
    if named is not None:
        test = data.n_train + np.flatnonzero(named == k)
    elif not tests:
        test = matched(labels, data, data.central, rng)
    if data.n_val and not vals:
        val = matched(labels, data, data.validation, rng)
    for kind, images, wanted in (("test", test, True), ("val", val, data.n_val)):
        if wanted and not len(images):
            remedy = "a smaller --alpha" if args.split == "fedslr" else f"--client-{kind} 0.2"
            refuse(f"client {k} gets no central {kind} images: none has its classes, or each of "
                   f"its classes has less than a hundredth of its images; use {remedy}")
    return train, val, test


def matched(labels, data, numbers, rng, size=100):
    """Returns some of `numbers`, in the class shares of `labels`: floor(share * size) of a class,
    or all it has (FedSLR, B.1). Two clients' may overlap. Shares below 1/size add nothing."""
    pools = by_class(data.labels[numbers], data.classes, rng)
    counts = np.bincount(labels, minlength=data.classes)
    return numbers[np.concatenate([pool[: int(n / len(labels) * size + 1e-9)]
                                   for pool, n in zip(pools, counts)])]


def own_split(labels, classes, rng, args):
    """Returns what a user's function gives, as a list of arrays of image numbers."""
    name, deal, holder = f"--split {args.split}", scheme(args.split), np.full(len(labels), -1)
    try:
        owned = fresh(lambda: deal(labels.copy(), classes, rng, args), args.split_seed)
        owned = [*map(np.asarray, owned)] if isinstance(owned, (list, tuple, np.ndarray)) else []
    except Exception as problem:  # whatever the function does
        refuse(f"{name} fails: {type(problem).__name__}: {first_line(problem)}")
    if not owned:
        refuse(f"{name} gives no list with an array of image numbers for each client")
    for k, index in enumerate(owned):
        numbers = index.ndim == 1 and index.size and index.dtype.kind in "iu"
        if not numbers or index.min() < 0 or index.max() >= len(labels) or (
                len(np.unique(index)) < len(index)):
            refuse(f"{name} must give client {k} at least one image, as an array of different "
                   f"image numbers from 0 to {len(labels) - 1}"
                   + "; np.flatnonzero(mask) gives those of a mask" * (index.dtype == bool))
        two = index[holder[index] >= 0]
        if len(two) and not getattr(deal, "overlap", False):
            refuse(f"{name} gives image {two[0]} to clients {holder[two[0]]} and {k}; if that is "
                   f"meant, write {name.rpartition(':')[2]}.overlap = True below the function")
        holder[index] = k
    return [index.astype(np.int64) for index in owned]


def remarks(split, data, args):
    """Returns what a user should know of a split, a line each."""
    notes, K, labels = [], len(split.train), data.labels[: data.n_train]
    if test_owner(data, args) is not None:
        notes.append("note    client_test names the clients' test images"
                     + "; --client-test is not used" * (args.client_test > 0))
    if data.n_val and args.client_val:
        notes.append("note    --client-val holds out clients' own images: x_val is not used")
    own = split.owned(data.n_train)
    if nobodys := data.n_train - len(np.unique(np.concatenate(own))):
        notes.append(f"note    {nobodys} of {data.n_train} training images go to no client")
    if args.split == "dirichlet-hsu" and args.alpha:
        counts = np.array([np.bincount(labels[index], minlength=data.classes) for index in own])
        whole = np.bincount(labels, minlength=data.classes)
        used_up = ((counts.cumsum(0) == whole) & (whole > 0)).any(1)[:-1]  # after each client
        if used_up.any():
            k, kinds = used_up.argmax() + 1, (counts > 0).sum(1)
            notes.append(f"note    a class is used up after {k} of {K} clients; the others get "
                         f"{kinds[k:].mean():.1f} classes on average, these {kinds[:k].mean():.1f}")
    return notes


# --------------------------------------------------------------------------------------------------
# 2. The schemes


def by_class(labels, classes, rng):
    """Returns the numbers of each class's images, in random order."""
    return [rng.permutation(np.flatnonzero(labels == c)) for c in range(classes)]


def split_iid(labels, classes, rng, args):
    """Shuffles the images and cuts them into equal parts (McMahan et al. 2017: IID). The remainder
    is not used."""
    n = len(labels) // args.clients * args.clients
    return list(rng.permutation(len(labels))[:n].reshape(args.clients, -1))


def split_shards(labels, classes, rng, args):
    """Sorts the images by label and cuts them into K*s equal shards, of which each client gets s
    random ones (McMahan et al. 2017, section 3). The remainder is not used."""
    shards, order = args.clients * args.per_client, rng.permutation(len(labels))
    if not (size := len(labels) // shards):
        refuse(f"{len(labels)} training images don't make {shards} shards; use fewer --clients or "
               "a smaller --per-client")
    order = order[np.argsort(labels[order], kind="stable")][: shards * size].reshape(shards, size)
    return list(order[rng.permutation(shards)].reshape(args.clients, -1))


def split_dirichlet_hsu(labels, classes, rng, args):
    """Gives clients equally many images, in class proportions q ~ Dir(alpha * p), where p are those
    of all images (Hsu et al. 2019, section 3); alpha = 0 gives each one random class. The share of
    a used-up class goes to the client's other classes; if q is 0 for all of them, q is drawn again
    over these (our choice). `remarks` reports used-up classes."""
    pools, sizes = by_class(labels, classes, rng), np.bincount(labels, minlength=classes)
    n, equal = len(labels) // args.clients, len(set(sizes)) == 1
    a = args.alpha / (len(labels) / np.maximum(sizes, 1e-300))  # alpha * p, exact for equal classes
    there, owned = sizes > 0, []
    for k in range(args.clients):
        left = np.array([len(pool) for pool in pools])
        if args.alpha == 0:
            able = np.flatnonzero(left >= n)
            if not len(able):
                refuse(f"--alpha 0 gives client {k} one class, but no class has {n} images left; "
                       "change --clients so that the images per client divide the images per class")
            p = None if equal else sizes[able] / sizes[able].sum()
            count = np.bincount([rng.choice(able, p=p)], minlength=classes) * n
        else:
            q, count = np.zeros(classes), np.zeros(classes, np.int64)
            q[there] = rng.dirichlet(a[there])
            while (need := n - count.sum()) > 0:
                open_ = left > count
                if q[open_].sum() < 1e-12:  # shares of some classes, normalised: again Dirichlet
                    q = np.zeros(classes)
                    q[open_] = rng.dirichlet(a[open_])
                share = np.where(open_, q, 0)
                share = share / share.sum() * need
                count = np.minimum(count + whole_numbers(share, None if equal else rng), left)
        owned.append(np.concatenate([pool[:c] for pool, c in zip(pools, count)]))
        pools = [pool[c:] for pool, c in zip(pools, count)]
    return owned


def whole_numbers(values, rng=None):
    """Returns values [n] rounded up or down, with the same (whole) sum. The largest fractions go
    up; with rng random ones do, so that no class gains at every client."""
    if rng:
        return np.diff(np.floor(values.cumsum().round(9) + rng.random()), prepend=0).astype(int)
    low = np.floor(values).astype(int)
    low[np.argsort(low - values, kind="stable")[: int(round(values.sum() - low.sum()))]] += 1
    return low


def split_dirichlet_classes(labels, classes, rng, args, balance=False):
    """Deals each class to the clients in shares ~ Dir(alpha, ..., alpha). Sizes differ. Most papers
    and libraries mean this by Dir(alpha), and it is PersFL's DS-2. Draws again until each client
    has 10 images, as FedMA's code does, but at most 1000 times. balance: a client that already
    holds N/K images gets nothing of the classes still to be dealt. If the others' shares are all 0
    (alpha near 0), theirs are drawn again (FedMA's code would divide by 0)."""
    least, alpha = 10, max(args.alpha, 1e-300)
    if args.clients * least > len(labels):
        refuse(f"--split {args.split} gives a client {least} images or more; use fewer --clients")
    for _ in range(1000):
        owned = [[] for _ in range(args.clients)]
        for pool in by_class(labels, classes, rng):
            share = rng.dirichlet(np.full(args.clients, alpha))
            if balance and len(pool):
                held = np.array([sum(map(len, parts)) for parts in owned])
                open_ = held < len(labels) / args.clients
                share[~open_] = 0
                if share.sum() < 1e-300:
                    share[open_] = rng.dirichlet(np.full(open_.sum(), alpha))
                share = share / share.sum()
            cuts = (share.cumsum()[:-1] * len(pool)).astype(int)
            for k, part in enumerate(np.split(pool, cuts)):
                owned[k].append(part)
        owned = [np.concatenate(parts) for parts in owned]
        if min(map(len, owned)) >= least:
            return owned
    refuse(f"--split {args.split} with --alpha {args.alpha:g} left some client fewer than {least} "
           "images in 1000 draws; use a larger --alpha or fewer --clients")


def split_classes(labels, classes, rng, args, unequal=False):
    """Gives each client s random classes, and all equally many images: equally many of each class
    (Psi-Net's "N x c"; FedPer's), or, with unequal, amounts by `shares` (PersFL's DS-1 may have
    such; these are ours). The next client takes the classes that the fewest clients have; ties are
    broken at random."""
    holders, chosen = np.zeros(classes, int), []
    for _ in range(args.clients):
        chosen.append(np.lexsort((rng.random(classes), holders))[: args.per_client])
        holders[chosen[-1]] += 1
    pools = by_class(labels, classes, rng)
    if not (n := min(len(pool) // h for pool, h in zip(pools, holders) if h)):
        refuse(f"{args.clients} clients with {args.per_client} classes each need more images than "
               "some class has; use fewer of either")
    has = np.array([np.isin(range(classes), mine) for mine in chosen])  # [K, classes]
    count = shares(has, n, rng, args) if unequal else has * n
    start, owned = np.zeros(classes, int), []
    for mine, number in zip(chosen, count):
        end = start + number
        owned.append(np.concatenate([pools[c][start[c] : end[c]] for c in mine]))
        start = end
    return owned


def shares(has, n, rng, args, least=10):
    """Returns how many images of each class each client gets: [K, classes]. has [K, classes] says
    which classes are its own, n how many images every class has at least for each of its holders. A
    client gets `least` of each, and of the rest amounts ~ Gamma(alpha), scaled until all clients
    have equally many and each class gives n-1 per holder (iterative proportional fitting). One of n
    is left out, since amounts are rounded."""
    if (rest := n - least - 1) < 1:
        refuse(f"--split unequal-classes gives each client {least} images or more of each of its "
               "classes; use fewer --clients or more images")
    share = np.maximum(rng.gamma(max(args.alpha, 1e-300), size=has.shape), 1e-9) * has
    for _ in range(10_000):
        share *= rest * has.sum(0) / np.maximum(share.sum(0), 1e-9)
        share *= (rest * has.sum(1) / share.sum(1))[:, None]
        if np.abs(share.sum(0) - rest * has.sum(0)).max() < 0.01:
            return has * least + np.array([whole_numbers(row) for row in share])
    refuse(f"--split unequal-classes with --alpha {args.alpha:g} finds no amounts that give all "
           "clients equally many images; use a larger --alpha")


def split_lognormal(labels, classes, rng, args):
    """Gives client k the s labels k, k+1, ... (mod classes), as PersFL's DS-3. Each holder of a
    class gets 10 of its images and a share of the rest, given by log-normal draws (mu = 0,
    sigma = 2). pFedMe's generator is far more even."""
    least, owned = 10, [[] for _ in range(args.clients)]
    for c, pool in enumerate(by_class(labels, classes, rng)):
        holders = [k for k in range(args.clients) if (c - k) % classes < args.per_client]
        if len(pool) < least * len(holders):
            refuse(f"class {c} has {len(pool)} images for {len(holders)} clients, {least} each at "
                   "least; use fewer --clients")
        if holders:
            share = rng.lognormal(0, 2, len(holders))
            sizes = least + (share / share.sum() * (len(pool) - least * len(holders))).astype(int)
            for k, part in zip(holders, np.split(pool, sizes.cumsum())):
                owned[k].append(part)
    return [np.concatenate(parts) for parts in owned]


def split_semantic(labels, classes, rng, args):
    """Puts each class into one cluster, and makes clients of random size within each cluster
    (SuPerFed, A). EMNIST's 62 classes make 5 clusters of 2 digits, 5 or 6 capital and 5 or 6 small
    letters, and clients of [100, 800) images. Others make 10 clusters of equally many random
    classes (the last gets the rest), and clients of [100, 400). A cluster's last images are
    unused: at most 100, or too few for the next client."""
    groups, clusters, largest = [range(classes)], min(10, classes), 400
    if classes == 62:
        groups, clusters, largest = [range(10), range(10, 36), range(36, 62)], 5, 800
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
        refuse("--split semantic needs more than 100 images in a cluster of classes; use more")
    return owned


def split_fedslr(labels, classes, rng, args):
    """Gives clients equally many images, in class proportions ~ Dir(alpha, ..., alpha). A used-up
    class is refilled, as in FedSLR's code, which deals image by image. So clients can
    share images, a client can hold an image twice, and some images are never used."""
    if args.alpha == 0:
        refuse("--split fedslr needs --alpha above 0")
    pools, n, owned = by_class(labels, classes, rng), len(labels) // args.clients, []
    there = np.unique(labels)
    for _ in range(args.clients):
        count = rng.multinomial(n, rng.dirichlet(np.full(len(there), args.alpha)))
        parts = []
        for c, need in zip(there, count):
            while need > len(pools[c]):
                again = rng.permutation(np.flatnonzero(labels == c))
                pools[c] = np.concatenate([pools[c], again])
            parts.append(pools[c][:need])
            pools[c] = pools[c][need:]
        owned.append(np.concatenate(parts))
    return owned


SPLITS = {
    "iid": split_iid, "shards": split_shards, "dirichlet-classes": split_dirichlet_classes,
    "dirichlet-hsu": split_dirichlet_hsu, "classes": split_classes, "lognormal": split_lognormal,
    "semantic": split_semantic, "fedslr": split_fedslr,
    "fedma": functools.partial(split_dirichlet_classes, balance=True),  # FedMA's hetero-dir
    "unequal-classes": functools.partial(split_classes, unequal=True),
    "natural": None,  # the data set says it
}
split_fedslr.overlap = True
USED_BY = {  # arguments, and the splits that they are for
    "clients": [name for name in SPLITS if name not in ("semantic", "natural")],  # find their own
    "per_client": ["shards", "classes", "unequal-classes", "lognormal"],
    "alpha": ["dirichlet-classes", "dirichlet-hsu", "unequal-classes", "fedslr", "fedma"],
}


def scheme(name):
    """Returns the function of --split NAME. Refuses an unknown or an ambiguous name."""
    if name == "dirichlet":
        refuse("--split dirichlet can mean two. dirichlet-classes, which most papers mean, deals "
               "each class in Dir(alpha) shares; dirichlet-hsu draws each client's class shares "
               "from Dir(alpha * p), p the classes' shares (Hsu et al.)")
    return find("split", name, SPLITS)


def unused(split):
    """Returns the arguments that a split does not use."""
    return [name for name, splits in USED_BY.items() if split in SPLITS and split not in splits]
