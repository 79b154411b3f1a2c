"""Data sets as arrays: load_data by a name or the path of a .npz, and `shapes`, which is drawn and needs no file. TRANSFORMS: what
a model sees of an image."""

import functools
import hashlib
import os
import pathlib
import zipfile
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tqdm import tqdm

from engine import first_line, refuse


class Data(NamedTuple):
    """images [N,H,W,C] uint8 and labels [N] int64; the first n_train are for training, the others the central test.

    owner [n_train]: the client that each training image belongs to, where the data set says so. test_owner [N - n_train]: the
    client that each test image belongs to, where it says that, too.
    """

    name: str
    images: np.ndarray
    labels: np.ndarray
    n_train: int
    classes: int
    owner: np.ndarray | None = None
    test_owner: np.ndarray | None = None

    def fingerprint(self):
        digest = hashlib.sha256(np.ascontiguousarray(self.images))
        digest.update(np.ascontiguousarray(self.labels))
        return digest.hexdigest()[:16]


DATASETS = {  # height, width, channels, classes
    "cifar10": (32, 32, 3, 10), "cifar100": (32, 32, 3, 100), "mnist": (28, 28, 1, 10), "emnist": (28, 28, 1, 62),
    "tinyimagenet": (64, 64, 3, 200), "shapes": (32, 32, 3, 10),
}


def load_data(name, folder="data"):
    """A data set by its name (see DATASETS) or by the path of a .npz.

    FOLDER/NAME.npz is used if it exists; otherwise torchvision downloads into FOLDER. `shapes` needs no file.
    Refuses what is missing, broken or inconsistent.
    """
    path = pathlib.Path(name if name.endswith(".npz") else pathlib.Path(folder) / f"{name}.npz")
    if path.exists() or name.endswith(".npz"):
        arrays = read_npz(path)
    elif name == "shapes":
        arrays = shapes()
    elif name in DATASETS:
        try:
            arrays = read_tiny_imagenet(pathlib.Path(folder)) if name == "tinyimagenet" else read_torchvision(name, folder)
        except Exception as problem:  # torchvision's readers raise nearly anything on broken files
            refuse(f"could not get the data set {name}: {first_line(problem)}. Check the network and {folder}/, or make {path} with "
                   "x_train, y_train, x_test, y_test")
    else:
        refuse(f"no data set is called {name!r}: use one of {', '.join(DATASETS)}, or the path of a .npz")
    data = check_data(path.stem, path if path.exists() else name, *arrays)
    found, known = (*data.images.shape[1:], data.classes), DATASETS.get(name, None)
    if known not in (None, found):
        words = ["{}x{}x{} in {} classes".format(*of) for of in (found, known)]
        refuse(f"{path} holds images of {words[0]}, {name} has {words[1]}; give a data set of your own another name")
    return data


def check_data(name, source, x_train, y_train, x_test, y_test, client_train=None, client_test=None):
    """Joins the arrays to a Data; refuses shapes, types, labels and owners that can't be trained on."""
    joined = {}
    for part, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        if x.dtype != np.uint8:
            refuse(f"{source}: x_{part} holds {x.dtype}; save the images as uint8 from 0 to 255")
        if x.ndim not in (3, 4) or (x.ndim == 4 and x.shape[3] not in (1, 3)):
            refuse(f"{source}: x_{part} has the shape {x.shape}; it must be [n, height, width] or [n, height, width, 1 or 3]")
        if not x.size:
            refuse(f"{source}: x_{part} is empty")
        if y.dtype.kind not in "iu":
            refuse(f"{source}: y_{part} holds {y.dtype}; labels must be integers from 0 to classes - 1 (of names, "
                   "numpy.unique(y, return_inverse=True)[1] makes them)")
        if y.shape != x.shape[:1]:
            refuse(f"{source}: x_{part} has {len(x)} images, y_{part} the shape {y.shape}; there must be one label per image")
        joined[part] = (x.reshape(*x.shape[:3], -1), y.astype(np.int64))
    (x, y), (u, v) = joined["train"], joined["test"]
    if x.shape[1:] != u.shape[1:]:
        refuse(f"{source}: training images are {x.shape[1:]}, test images {u.shape[1:]}; they must have one size")
    if min(y.min(), v.min()) < 0:
        refuse(f"{source}: a label is negative; labels must be integers from 0 to classes - 1")
    classes = int(y.max()) + 1
    if v.max() >= classes:
        refuse(f"{source}: the test set has the label {v.max()}, the training set none above {classes - 1}")
    used = np.unique(y)
    if len(used) < classes:
        gap = np.flatnonzero(used != np.arange(len(used)))[0]
        refuse(f"{source}: labels go up to {classes - 1}, but no training image has the label {gap}; number the classes from 0")
    for part, labels, client in (("train", y, client_train), ("test", v, client_test)):
        if client is not None and (client.dtype.kind not in "iu" or client.shape != labels.shape):
            refuse(f"{source}: client_{part} is {client.dtype} of the shape {client.shape}; it must give an integer, its "
                   f"client, for each of the {len(labels)} images of x_{part}")
    if client_test is not None and client_train is None:
        refuse(f"{source} has client_test, but no client_train; it needs both, or neither")
    if client_train is not None and (client_train.min() or client_train.max() != len(np.unique(client_train)) - 1):
        refuse(f"{source}: client_train must number the clients 0, 1, 2, ... without gaps "
               "(numpy.unique(client_train, return_inverse=True)[1] does)")
    if client_test is not None and not np.array_equal(np.unique(client_test), np.unique(client_train)):
        refuse(f"{source}: client_test must give each client of client_train test images, and nobody else")
    owners = [None if client is None else client.astype(np.int64) for client in (client_train, client_test)]
    return Data(name, np.concatenate([x, u]), np.concatenate([y, v]), len(x), classes, *owners)


def read_npz(path):
    """x_train, y_train, x_test, y_test of a .npz file; then client_train and client_test, or None."""
    try:
        with np.load(path, allow_pickle=False) as file:
            names = ("x_train", "y_train", "x_test", "y_test")
            missing = [key for key in names if key not in file]
            if missing:
                refuse(f"{path} has no array {missing[0]}; it needs x_train, y_train, x_test and y_test")
            arrays = []
            for key in (*names, "client_train", "client_test"):  # if one can't be read, the refusal below names it
                arrays.append(file[key] if key in file else None)
            return arrays
    except FileNotFoundError:
        refuse(f"there is no file {path}")
    except Exception as problem:  # numpy, zipfile and zlib raise nearly anything on a broken file
        why = repr(problem)
        if not zipfile.is_zipfile(path):
            why = "it is none, or a part of one"
        elif "Object arrays" in why:
            why = f"{key} holds Python objects; images must have one size, and labels be integers"
        refuse(f"{path} can't be read as a .npz: {why}")


def read_torchvision(name, folder):
    """A data set of torchvision, downloaded into `folder` if it is not there. EMNIST is split by class, as stored."""
    import torchvision  # not above: it takes as long as all the other imports, and most runs do without

    kind = getattr(torchvision.datasets, name.upper())
    more = {"split": "byclass"} if name == "emnist" else {}
    parts = [kind(folder, train=train, download=True, **more) for train in (True, False)]
    return [np.asarray(array) for part in parts for array in (part.data, part.targets)]


def read_tiny_imagenet(folder):
    """Tiny ImageNet in its official layout under `folder`/tiny-imagenet-200; its validation images are the test set.

    The decoded images are kept as tinyimagenet.npz, so that the 110,000 files are read only once.
    """
    root = folder / "tiny-imagenet-200"
    if not root.exists():
        import torchvision

        torchvision.datasets.utils.download_and_extract_archive(
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip", str(folder), md5="90528d7ca1a48142e341f4ef8d21d0de")

    def decode(path):
        return np.asarray(Image.open(path).convert("RGB"))

    label = {wnid: i for i, wnid in enumerate(sorted((root / "wnids.txt").read_text().split()))}
    train = [(path, label[wnid]) for wnid in label for path in sorted((root / "train" / wnid / "images").glob("*.JPEG"))]
    notes = [line.split("\t") for line in (root / "val" / "val_annotations.txt").read_text().splitlines()]
    test = [(root / "val" / "images" / note[0], label[note[1]]) for note in notes]
    if not test or len(set(np.bincount([y for _, y in train], minlength=len(label)))) != 1:
        raise ValueError(f"{root} is incomplete; remove it to download it again")
    arrays = []
    for name, part in (("training", train), ("test", test)):
        arrays += [np.stack([decode(path) for path, _ in tqdm(part, f"decoding {name} images", leave=False)]),
                   np.array([y for _, y in part])]
    with open(folder / "tinyimagenet.npz.part", "wb") as file:
        np.savez(file, **dict(zip(("x_train", "y_train", "x_test", "y_test"), arrays)))
    os.replace(folder / "tinyimagenet.npz.part", folder / "tinyimagenet.npz")
    return arrays


@functools.cache
def shapes(train=10_000, test=2_000, size=32, seed=0):
    """Ten classes of drawn shapes whose place, size, turn, colours, background and noise vary; no file needed.

    Disc, ring, square, triangle, plus, star, crescent, two discs, bars, half disc. Colour says nothing about the class.
    Of the test images, a linear classifier gets .577 right, the CNN of `--model cnn` .979 (tests/measure_shapes.py).
    """
    rng = np.random.default_rng([seed, 2026])
    n = train + test
    label = np.concatenate([rng.permutation(np.arange(train) % 10), rng.permutation(np.arange(test) % 10)])

    def uniform(low, high, *shape):
        return rng.uniform(low, high, (n, *shape)).astype(np.float32)

    axis = (np.arange(size, dtype=np.float32) + 0.5) / size * 2 - 1
    radius, angle = uniform(0.5, 0.8, 1, 1), uniform(-0.5, 0.5, 1, 1)
    right, down = uniform(-0.25, 0.25, 1, 1), uniform(-0.25, 0.25, 1, 1)
    ground, tilt, lighter = uniform(0.0, 0.6, 1, 1, 3), uniform(-0.2, 0.2, 2, 3), uniform(0.0, 0.6, 1, 1, 3)
    noise, loud = rng.standard_normal((n, size, size, 3), dtype=np.float32), uniform(0.02, 0.15, 1, 1, 1)

    def disc(u, v, r):
        return r - np.sqrt(u * u + v * v)

    def box(u, v, a, b):
        return np.minimum(a - np.abs(u), b - np.abs(v))

    inside = (  # positive inside of the shape, about a distance to its outline
        lambda u, v: disc(u, v, 0.9),
        lambda u, v: 0.2 - np.abs(disc(u, v, 0.75)),
        lambda u, v: box(u, v, 0.75, 0.75),
        lambda u, v: 0.5 - np.maximum(-v, np.abs(u) * 0.866 + v * 0.5),
        lambda u, v: np.maximum(box(u, v, 0.28, 0.95), box(u, v, 0.95, 0.28)),
        lambda u, v: 0.65 + 0.3 * np.cos(5 * np.arctan2(v, u)) - np.sqrt(u * u + v * v),
        lambda u, v: np.minimum(disc(u, v, 0.95), -disc(u - 0.45, v, 0.75)),
        lambda u, v: np.maximum(disc(u - 0.5, v, 0.42), disc(u + 0.5, v, 0.42)),
        lambda u, v: np.maximum(np.maximum(box(u - 0.62, v, 0.17, 0.8), box(u + 0.62, v, 0.17, 0.8)), box(u, v, 0.17, 0.8)),
        lambda u, v: np.minimum(disc(u, v + 0.4, 0.95), v + 0.4),
    )

    def draw(i):
        x, y = axis[None, None, :] - right[i], axis[None, :, None] - down[i]
        u = (x * np.cos(angle[i]) + y * np.sin(angle[i])) / radius[i]  # the shape's own axes, in which it has about the size 1
        v = (y * np.cos(angle[i]) - x * np.sin(angle[i])) / radius[i]
        depth = np.empty_like(u)
        for c, shape in enumerate(inside):
            depth[label[i] == c] = shape(u[label[i] == c], v[label[i] == c])
        cover = np.clip(depth * radius[i] * size / 2 + 0.5, 0, 1)[..., None]  # soft outline, one pixel wide
        back = ground[i] + axis[None, :, None, None] * tilt[i, None, None, 0] + axis[None, None, :, None] * tilt[i, None, None, 1]
        colour = back.mean((1, 2), keepdims=True) + lighter[i]  # of any hue, lighter than the ground
        return (np.clip(back + cover * (colour - back) + noise[i] * loud[i], 0, 1) * 255).astype(np.uint8)

    images = np.concatenate([draw(slice(start, start + 250)) for start in range(0, n, 250)])  # in parts, which is faster
    return images[:train], label[:train], images[train:], label[train:]


def limit_images(data, limit):
    """The data set with only `limit` training images, as many of each class as of the others while they last."""
    if limit > data.n_train:
        refuse(f"--limit {limit}: {data.name} has only {data.n_train} training images")
    if limit < data.classes:
        refuse(f"--limit {limit} leaves some of the {data.classes} classes empty")
    labels = data.labels[: data.n_train]
    rank = np.empty(data.n_train, int)  # of an image among those of its class
    for c in range(data.classes):
        own = np.flatnonzero(labels == c)
        rank[own] = np.arange(len(own))
    keep = np.concatenate([np.sort(np.argsort(rank, kind="stable")[:limit]), np.arange(data.n_train, len(data.images))])
    owner = None if data.owner is None else data.owner[keep[:limit]]
    return data._replace(images=data.images[keep], labels=data.labels[keep], n_train=limit, owner=owner)


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


def images_for(args, rng):
    """The Data of args.dataset, with args.limit and, drawn from rng, args.augment_once."""
    data = load_data(args.dataset, args.data_dir)
    if args.limit:
        clients = 0 if data.owner is None else data.owner.max() + 1
        data = limit_images(data, args.limit)
        if args.split == "natural" and clients and len(np.unique(data.owner)) < clients:
            refuse("--limit leaves a client of --split natural without images; use a larger one")
    return augment_once(data, rng) if args.augment_once else data


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
