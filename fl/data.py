"""Data sets: load_data returns a Data by its name, or from a .npz, a folder of images or LEAF's
JSON. formats.py reads the files, shapes.py makes those of `shapes`; each is imported when it is
needed."""

import hashlib
import os
import pathlib
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from .machine import first_line, one_at_a_time, refuse, when_interrupted
from .transforms import window


class Data(NamedTuple):
    """images [N,H,W,C] (uint8 or float32) and labels [N] int64. The first n_train are for
    training, the last n_val for validation; those between are the central test images.

    owner [n_train]: the client of each training image, where the data set says so; test_owner: the
    client of each test image. names: of the classes. notes: lines for the user.
    """

    name: str
    images: np.ndarray
    labels: np.ndarray
    n_train: int
    classes: int
    owner: np.ndarray | None = None
    test_owner: np.ndarray | None = None
    n_val: int = 0
    names: tuple = ()
    notes: tuple = ()

    @property
    def central(self):
        """Returns the numbers of the central test images."""
        return np.arange(self.n_train, len(self.images) - self.n_val)

    @property
    def validation(self):
        """Returns the numbers of the data set's own validation images."""
        return np.arange(len(self.images) - self.n_val, len(self.images))

    def fingerprint(self):
        digest = hashlib.sha256(np.ascontiguousarray(self.images))
        digest.update(np.ascontiguousarray(self.labels))
        return digest.hexdigest()[:16]


ARRAYS = ("x_train", "y_train", "x_test", "y_test", "x_val", "y_val", "client_train", "client_test",
          "classes")
DATASETS = {  # height, width, channels, classes
    "cifar10": (32, 32, 3, 10), "cifar100": (32, 32, 3, 100), "mnist": (28, 28, 1, 10),
    "emnist": (28, 28, 1, 62), "tinyimagenet": (64, 64, 3, 200), "shapes": (32, 32, 3, 10),
}

# --------------------------------------------------------------------------------------------------
# 1. A data set by its name


def images_for(args, rng):
    """Returns the Data of --dataset, with --limit, --limit-test and --augment-once, which uses rng.
    """
    when_interrupted()  # decoding can take minutes
    data = load_data(args.dataset, args.data_dir, args.resize, args.test_share, args.classes)
    if args.limit or args.limit_test:
        data = limit_images(data, args.limit, args.limit_test, args.split == "natural")
    return augment_once(data, rng) if args.augment_once else data


def load_data(name, folder="data", resize=None, test_share=None, classes=None):
    """Returns the Data of `name`: one of DATASETS, the path of a .npz or of a folder of images, or
    leaf:FOLDER. Refuses what is missing, broken or inconsistent.

    folder/NAME.npz is used if it exists; otherwise torchvision downloads into the folder. resize,
    test_share, classes: as the flags.
    """
    from . import formats

    path, known = pathlib.Path(name), DATASETS.get(name)
    is_folder = name and os.path.isdir(path) and not known
    if known and classes not in (None, known[-1]):
        refuse(f"--classes {classes}: {name} has {known[-1]} classes; leave it out")
    if resize and not is_folder:
        refuse("--resize is for a folder of images; leave it out")
    try:
        if name.startswith("leaf:"):
            path = pathlib.Path(name[5:])
            arrays = formats.read_leaf(path)
        elif is_folder:
            arrays = formats.read_folder(path, resize)
        else:
            path = path if name.endswith(".npz") else pathlib.Path(folder) / f"{name}.npz"
            there = name.endswith(".npz") or path.exists()
            arrays = formats.read_npz(path) if there else fetch(name, path)
    except OSError as problem:
        refuse(f"--dataset {name} can't be read: {problem.strerror}")
    title = path.stem if path.suffix == ".npz" else path.resolve().name
    data = make_data(title, path if path.exists() else name, arrays, test_share, classes)
    found = (*data.images.shape[1:], data.classes)
    if known not in (None, found):
        words = ["{}x{}x{} in {} classes".format(*of) for of in (found, known)]
        refuse(f"{path} holds images of {words[0]}, {name} has {words[1]}; give a data set of your "
               "own another name")
    return data


def fetch(name, path):
    """Returns the arrays of a data set with a name; its files lie, or will lie, beside `path`."""
    if name not in DATASETS:
        refuse(f"no data set or folder is called {name!r}: use one of {', '.join(DATASETS)}, the "
               "path of a .npz or of a folder of images, or leaf:FOLDER (docs/extend.md)")
    from . import formats
    from .shapes import shapes

    try:
        if name == "shapes":
            return dict(zip(ARRAYS, shapes()))
        with one_at_a_time(path):
            if path.exists():  # another run has made it
                return formats.read_npz(path)
            if name == "tinyimagenet":
                return formats.read_tiny_imagenet(path)
            return formats.read_torchvision(name, path)
    except Exception as problem:  # torchvision's readers raise nearly anything on broken files
        refuse(f"could not get the data set {name}: {first_line(problem)}. Check the network and "
               f"{path.parent}/, or make {path} with {', '.join(ARRAYS[:4])}")


# --------------------------------------------------------------------------------------------------
# 2. From arrays to a Data


def make_data(name, source, arrays, test_share=None, classes=None):
    """Joins a reader's arrays into a Data. Refuses what can't be trained on."""
    parts = [part for part in ("train", "test", "val")
             if part == "train" or {f"x_{part}", f"y_{part}"} & {*arrays}]
    if missing := [f"{z}_{part}" for part in parts for z in "xy" if f"{z}_{part}" not in arrays]:
        refuse(f"{source} has no array {missing[0]}; it needs {', '.join(ARRAYS[:4])}")
    x = {part: check_images(source, f"x_{part}", arrays[f"x_{part}"]) for part in parts}
    y = {part: check_labels(source, part, len(x[part]), arrays[f"y_{part}"]) for part in parts}
    a = x["train"]
    for part, b in x.items():
        if (a.shape[1:], a.dtype) != (b.shape[1:], b.dtype):
            refuse(f"{source}: x_train holds {a.dtype} {a.shape[1:]}, x_{part} {b.dtype} "
                   f"{b.shape[1:]}; all images must have one size and type")
    names, said = (), np.asarray(arrays.get("classes", 0))
    if said.dtype.kind in "US" and said.ndim == 1:
        names, said = tuple(map(str, said)), np.array(len(said))
        if twice := [name for c, name in enumerate(names) if name in names[:c]]:
            refuse(f"{source}: the array classes names {twice[0]!r} twice; each class needs a name "
                   "of its own")
    if said.ndim or said.dtype.kind not in "iu":
        refuse(f"{source}: the array classes must be their number, or their names")
    n = count_classes(source, y, classes or int(said))
    owner, test_owner = check_owners(source, arrays, y)
    if not test_share and "test" not in parts:
        refuse(f"{source} has no test images; add x_test and y_test (in a folder of images: "
               "test/CLASS/), or hold out a share of the others by --test-share 0.2")
    if test_share and "test" in parts:
        refuse(f"{source} has test images; leave out --test-share")
    if test_share:
        held = hold_out(y["train"], owner, test_share)
        for z in (x, y):
            z["train"], z["test"] = z["train"][~held], z["train"][held]
        owner = None if owner is None else owner[~held]
    images, labels = (np.concatenate([z[part] for part in ("train", "test", "val") if part in z])
                      for z in (x, y))
    return Data(name, images, labels, len(y["train"]), n, owner, test_owner, len(y.get("val", ())),
                names, tuple(map(str, arrays.get("notes", ()))))


def check_images(source, key, x):
    """Returns the images as [n,H,W,C] of uint8, or of float32, where 65535 of uint16 is 1."""
    if x.dtype.newbyteorder("=") == np.uint16:  # either byte may come first
        x = x / np.float32(65535)
    if x.dtype.kind == "f":
        with np.errstate(over="ignore"):  # what becomes infinite is refused below
            x = x.astype(np.float32, copy=False)
    if x.dtype not in (np.uint8, np.float32):
        refuse(f"{source}: {key} holds {x.dtype}; save the images as uint8 (0 to 255), uint16 or "
               "float32")
    if x.ndim not in (3, 4) or x.ndim == 4 and x.shape[3] not in (1, 3):
        refuse(f"{source}: {key} has the shape {x.shape}; it must be [n, height, width] or [n, "
               "height, width, 1 or 3]")
    if not x.size:
        refuse(f"{source}: {key} is empty")
    if x.dtype == np.float32 and not np.isfinite(x).all():
        bad = np.flatnonzero(~np.isfinite(x).all(tuple(range(1, x.ndim))))
        refuse(f"{source}: {len(bad)} of {len(x)} images of {key} have NaN or infinite pixels, the "
               f"first is image {bad[0]}; mend these images, or leave them out")
    return x.reshape(*x.shape[:3], -1)


def check_labels(source, part, n, y):
    """Returns the labels of n images as [n] int64."""
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.ndim == 2 and len(y) == n:
        refuse(f"{source}: y_{part} has the shape {y.shape}; multi-label is not supported (one-hot "
               f"labels become classes by y_{part}.argmax(1))")
    if y.dtype.kind not in "iu":
        refuse(f"{source}: y_{part} holds {y.dtype}; labels must be integers from 0 to classes - 1")
    if y.shape != (n,):
        refuse(f"{source}: x_{part} has {n} images, y_{part} the shape {y.shape}; there must be "
               "one label per image")
    return y.astype(np.int64)


def count_classes(source, y, said):
    """Returns the number of classes: what the user says, else one more than the largest label."""
    trained, every = np.unique(y["train"]), np.unique(np.concatenate([*y.values()]))
    n = said or int(trained[-1]) + 1
    if every[0] < 0:
        refuse(f"{source}: a label is negative; labels must be integers from 0 to classes - 1, and "
               "images without one be left out")
    if every[-1] >= n:
        why = f"there are only {n} classes" if said else f"no training label is above {n - 1}"
        refuse(f"{source}: there is the label {every[-1]}, but {why}; if training images may lack "
               f"a class, say how many there are: --classes {every[-1] + 1}")
    if not said and len(trained) < n:
        gap = np.flatnonzero(trained != np.arange(len(trained)))[0]
        refuse(f"{source}: labels go up to {n - 1}, but no training image has the label {gap}; "
               f"number the classes from 0, or say how many there are: --classes {n}")
    return n


def check_owners(source, arrays, y):
    """Returns the client of each training image and of each test image, None where the data set
    does not say it. Refuses clients that are not numbered 0, 1, 2, ..."""
    train, test = (arrays.get(f"client_{part}") for part in ("train", "test"))
    for part, z in (("train", train), ("test", test)):
        n = len(y.get(part, ()))
        if z is not None and (z.dtype.kind not in "iu" or z.shape != (n,)):
            refuse(f"{source}: client_{part} is {z.dtype} of the shape {z.shape}; it must give an "
                   f"integer, its client, for each of the {n} images of x_{part}")
    if test is not None and train is None:
        refuse(f"{source} has client_test, but no client_train; it needs both, or neither")
    if train is not None and (train.min() or train.max() != len(np.unique(train)) - 1):
        refuse(f"{source}: client_train must number the clients 0, 1, 2, ... without gaps")
    if test is not None and not np.array_equal(np.unique(test), np.unique(train)):
        refuse(f"{source}: client_test must give each client of client_train test images, and "
               "nobody else; leave it out if that is not so")
    return [z if z is None else z.astype(np.int64) for z in (train, test)]


def hold_out(labels, owner, share):
    """Returns which images are held out [n]: a share of each class, the same in each run."""
    rng, held = np.random.default_rng(0), np.zeros(len(labels), bool)
    for c in np.unique(labels):
        own = np.flatnonzero(labels == c)
        held[rng.permutation(own)[: int(share * len(own) + 1e-9)]] = True
    if not held.any() or held.all():
        kind = "training" if held.all() else "testing"
        refuse(f"--test-share {share:g} leaves no images for {kind}; use another one")
    if owner is not None and len(np.unique(owner[~held])) < len(np.unique(owner)):
        refuse(f"--test-share {share:g} takes all images of a client; use a smaller one")
    return held


def limit_images(data, limit=None, limit_test=None, natural=False):
    """Returns the data set with `limit` training and `limit_test` test images, equally many of each
    class while they last. natural: equally many test images of each client, if the data set names
    their clients; refuses to leave a client without images."""
    def some(flag, n, groups, owner, kind):
        if n and n > len(groups):
            refuse(f"{flag} {n}: {data.name} has only {len(groups)} {kind} images")
        rank = np.empty(len(groups), int)  # of an image in its group
        for group in np.unique(groups):
            own = np.flatnonzero(groups == group)
            rank[own] = np.arange(len(own))
        chosen = np.sort(np.argsort(rank, kind="stable")[:n])
        if natural and owner is not None and len(np.unique(owner[chosen])) <= owner.max():
            refuse(f"{flag} leaves a client of --split natural without images; use a larger one")
        return chosen

    labels, owner, test_owner = data.labels[: data.n_train], data.owner, data.test_owner
    if limit and limit < len(np.unique(labels)):
        refuse(f"--limit {limit} leaves some of the {data.classes} classes empty")
    train = some("--limit", limit, labels, owner, "training")
    by_client = natural and test_owner is not None
    test = some("--limit-test", limit_test, test_owner if by_client else data.labels[data.central],
                test_owner, "test")
    keep = np.concatenate([train, data.n_train + test, data.validation])
    return data._replace(
        images=data.images[keep], labels=data.labels[keep], n_train=len(train),
        owner=None if owner is None else owner[train],
        test_owner=None if test_owner is None else test_owner[test])


def remarks(data):
    """Returns what a user should know of the images, a line each."""
    notes = [*data.notes]
    for kind, n in (("", len(data.images)), ("training ", data.n_train)):
        if all(np.array_equal(x, data.images[0]) for x in data.images[:n]):
            return [*notes, f"warning all {kind}images are alike: nothing can be learnt from them"]
    if data.classes == 1:
        notes.append("warning all images are of one class: every model is right")
    train = data.images[: data.n_train]
    for kind, part in ("test", data.central), ("validation", data.validation):
        others = data.images[part[0] : part[-1] + 1] if len(part) else train
        lows, tops = ([float(z) for z in (end(train), end(others))] for end in (np.min, np.max))
        centred = max(lows) >= 0 > min(lows) + max(tops) / 20  # the one alone, and not by rounding
        if max(tops) > 10 * min(tops) >= 0 or centred:
            notes.append(f"warning the pixels of the training images go from {lows[0]:g} to "
                         f"{tops[0]:g}, of the {kind} images from {lows[1]:g} to {tops[1]:g}: are "
                         "both scaled alike?")
    if data.images.nbytes < 2e9:  # a second's work; larger data sets are not looked through
        codes = [hash(x.tobytes()) for x in data.images]
        kept, tested, val = (codes[part] for part in (
            slice(data.n_train), slice(data.n_train, len(codes) - data.n_val),
            slice(len(codes) - data.n_val, None)))
        for a, b, words in ((tested, kept, "test images are training images"),
                            (val, kept, "validation images are training images"),
                            (val, tested, "validation images are test images")):
            seen = {*b}
            if both := sum(code in seen for code in a):
                notes.append(f"note    {both} of {len(a)} {words}, too")
        if 100 * (copies := len(kept) - len({*kept})) > len(kept):
            notes.append(f"note    {copies} of {len(kept)} training images are copies of others; "
                         "a client may test or validate on what it trains on")
        labels = {}  # of each different training image
        for code, label in zip(kept, data.labels):
            labels.setdefault(code, set()).add(int(label))
        if 100 * (twice := sum(len(labels[code]) > 1 for code in kept)) > len(kept):
            notes.append(f"note    {twice} of {len(kept)} training images are there again with "
                         "another label")
    height, width, channels = data.images.shape[1:]
    if height in (1, 3) and width > 3:
        notes.append(f"note    images are {height} pixel{'s' * (height > 1)} high, {width} wide "
                     f"and have {channels} channel{'s' * (channels > 1)}; if the {height} are "
                     "channels, save the arrays as [n, height, width, channels]")
    if data.images.dtype == np.float32 and (top := data.images.max()) > 50:
        notes.append(f"note    images are floats up to {top:g}, which --transform scale, centre "
                     "and half do not scale; divide them by 255, or use --transform normalize")
    white = 255 if data.images.dtype == np.uint8 else 1
    if data.images.min() >= 0 and (top := data.images.max() / white) < 1 / 8:
        notes.append(f"note    the brightest pixel has {top:.3g} of white, as 12-bit pixels in 16 "
                     "bits would; if that is your white, multiply the pixels, or use --transform "
                     "normalize")
    has, tested = (np.bincount(data.labels[part], minlength=data.classes)
                   for part in (slice(data.n_train), data.central))
    for lacking, kind in ((has == 0, "training"), ((has > 0) & (tested == 0), "test")):
        which = [str(dict(enumerate(data.names)).get(c, c)) for c in np.flatnonzero(lacking)]
        if which:
            notes.append(f"note    no {kind} image is of class {', '.join(which[:10])}"
                         + f" and {len(which) - 10} more" * (len(which) > 10))
    return notes


def augment_once(data, rng, pad=4):
    """Returns the data set with every image, training and test, moved by up to `pad` pixels each
    way (0 fills in) and mirrored with probability 1/2, once and for all."""
    n, height, width, _ = data.images.shape
    top, left = torch.from_numpy(rng.integers(0, 2 * pad + 1, (2, n)))
    wide = F.pad(torch.from_numpy(data.images), (0, 0, pad, pad, pad, pad))
    images = window(wide, top, left, (height, width), torch.from_numpy(rng.random(n) < 0.5))
    return data._replace(images=images.numpy())
