"""Data sets, splits and transforms, against numbers derived here or given in the papers."""

import argparse
import hashlib
import json
import os
import pathlib
import pickle
import struct
import subprocess
import sys
import time
import urllib.error

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

import common
import fedavg
import fl.data
import fl.formats
import fl.shapes
import fl.splits
import fl.transforms
from conftest import QUICK, federation, images, refused, run

CPU = ["--device", "cpu"]
SHAPES = ["--dataset", "shapes", *CPU]


# Data sets


def test_shapes_is_balanced_deterministic_and_not_given_away_by_colour():
    x, y, u, v = fl.shapes.shapes()
    found = hashlib.sha256(np.concatenate([x, u])).hexdigest()[:16]
    assert found == "5d775d6546944dd5", "this CPU, or this NumPy, makes other images"
    assert x.shape == (10_000, 32, 32, 3) and u.shape == (2_000, 32, 32, 3) and x.dtype == np.uint8
    assert set(np.bincount(y)) == {1000} and set(np.bincount(v)) == {200}
    one, again = (fl.shapes.shapes.__wrapped__(500, 10) for _ in range(2))  # past the cache
    assert all(np.array_equal(a, b) for a, b in zip(one, again))
    # the mean colour of an image, the best that a classifier blind to form could use, says next to
    # nothing about its class
    mean, other = x.mean((1, 2)), u.mean((1, 2))
    centres = np.stack([mean[y == c].mean(0) for c in range(10)])
    guess = ((other[:, None] - centres) ** 2).sum(-1).argmin(1)
    assert (guess == v).mean() < 0.2


def test_npz_by_path_and_by_name(tmp_path, monkeypatch):
    given = images()
    monkeypatch.setitem(fl.data.DATASETS, "cifar10", (8, 8, 3, 4))
    np.savez(tmp_path / "mine.npz", **given)
    np.savez(tmp_path / "cifar10.npz", **given)
    for name in (str(tmp_path / "mine.npz"), "cifar10"):
        data = fl.data.load_data(name, tmp_path)
        assert (data.n_train, data.classes, data.images.shape) == (40, 4, (60, 8, 8, 3))
        assert np.array_equal(data.images[:40], given["x_train"])
        assert np.array_equal(data.labels[40:], given["y_test"])
    assert fl.data.load_data(str(tmp_path / "mine.npz")).name == "mine"


def write_idx(path, array):
    with open(path, "wb") as file:
        file.write(struct.pack(">HBB" + "I" * array.ndim, 0, 8, array.ndim, *array.shape))
        file.write(array.astype(np.uint8).tobytes())


@pytest.mark.parametrize("name, folder, pattern, classes", [
    ("emnist", "EMNIST", "emnist-byclass-{}-{}-idx{}-ubyte", 62),
    ("mnist", "MNIST", "{}-{}-idx{}-ubyte", 10),
])
def test_emnist_and_mnist_in_their_own_file_format(name, folder, pattern, classes, tmp_path):
    """Small files of the official format, read by torchvision without a download."""
    raw = tmp_path / folder / "raw"
    raw.mkdir(parents=True)
    rng, wanted = np.random.default_rng(1), {}
    for part, n in (("train", 4 * classes), ("test", classes)):
        x, y = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8), np.arange(n) % classes
        wanted[part] = (x, y)
        short = {"train": "train", "test": "test" if name == "emnist" else "t10k"}[part]
        write_idx(raw / pattern.format(short, "images", 3), x)
        write_idx(raw / pattern.format(short, "labels", 1), y)
    data = fl.data.load_data(name, tmp_path)
    assert (data.n_train, data.classes) == (4 * classes, classes)
    order = np.arange(4 * classes)  # as stored: EMNIST stays transposed, too
    if name == "mnist":  # by class and file name: class 2 has 12.png, 2.png, 22.png, 32.png
        order = sorted(order, key=lambda i: (i % 10, f"{i}.png"))
    assert np.array_equal(data.images[: data.n_train, :, :, 0], wanted["train"][0][order])
    assert np.array_equal(data.labels[: data.n_train], wanted["train"][1][order])
    assert np.array_equal(data.labels[data.n_train :], wanted["test"][1])


@pytest.mark.parametrize("name, labels", [("cifar10", "labels"), ("cifar100", "fine_labels")])
def test_cifar_is_sorted_by_class_and_file_name(name, labels, tmp_path, monkeypatch):
    """Small files of the official format; their checksums replace the official ones."""
    kind = getattr(torchvision.datasets, name.upper())
    monkeypatch.setitem(fl.data.DATASETS, name, (32, 32, 3, 3))
    folder = tmp_path / kind.base_folder
    folder.mkdir()
    rng, first = np.random.default_rng(1), {}

    def write(files, c):
        lists = []
        for file in files:
            grey = rng.integers(0, 256, len(c))
            names = [f"{z:02}_s.png" for z in rng.permutation(99)[: len(c)]]
            first.setdefault("test" in file, []).extend(zip(c, names, grey))
            content = pickle.dumps({"data": np.repeat(grey[:, None], 3072, 1).astype(np.uint8),
                                    labels: c, "filenames": names})
            (folder / file).write_bytes(content)
            lists.append([file, hashlib.md5(content).hexdigest()])
        return lists

    monkeypatch.setattr(kind, "train_list", write(["train_1", "train_2"], [2, 0, 1, 1, 0, 2]))
    monkeypatch.setattr(kind, "test_list", write(["test"], [1, 2, 0]))
    content = pickle.dumps({kind.meta["key"]: ["a", "b", "c"]})
    (folder / kind.meta["filename"]).write_bytes(content)
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": hashlib.md5(content).hexdigest()})
    data = fl.data.load_data(name, tmp_path)
    wanted = sorted(first[False]) + sorted(first[True])
    assert data.labels.tolist() == [c for c, _, _ in wanted] and data.n_train == 12
    assert data.images[:, 5, 7, 1].tolist() == [grey for _, _, grey in wanted]


def test_tiny_imagenet_in_its_official_layout(tmp_path, monkeypatch):
    """Class folders with JPEGs, and validation images with a list of annotations. The second time
    it is read from the .npz made of them."""
    monkeypatch.setitem(fl.data.DATASETS, "tinyimagenet", (64, 64, 3, 3))
    root = tmp_path / "tiny-imagenet-200"
    wnids = ["n02", "n01", "n03"]
    (root / "val" / "images").mkdir(parents=True)
    (root / "wnids.txt").write_text("\n".join(wnids) + "\n")
    notes = []
    for i, wnid in enumerate(wnids):
        train = root / "train" / wnid / "images"
        train.mkdir(parents=True)
        for j in range(2):
            grey = 40 * i + 10 * j
            Image.new("RGB", (64, 64), (grey, grey, grey)).save(train / f"{wnid}_{j}.JPEG")
        grey = Image.new("L", (64, 64), 40 * i)  # without colours, as some of them are
        grey.save(root / "val" / "images" / f"val_{i}.JPEG")
        notes.append(f"val_{i}.JPEG\t{wnid}\t0\t0\t62\t62")
    (root / "val" / "val_annotations.txt").write_text("\n".join(notes) + "\n")
    data = fl.data.load_data("tinyimagenet", tmp_path)
    assert data.images.shape == (9, 64, 64, 3) and data.n_train == 6 and data.classes == 3
    brightness = data.images.mean((1, 2, 3)).round()  # in the order of the names: n01, n02, n03
    assert brightness.tolist() == [40, 50, 0, 10, 80, 90, 0, 40, 80]
    assert data.labels.tolist() == [0, 0, 1, 1, 2, 2, 1, 0, 2]
    for file in root.rglob("*.JPEG"):
        file.unlink()
    assert fl.data.load_data("tinyimagenet", tmp_path).fingerprint() == data.fingerprint()


def test_half_a_tiny_imagenet_and_garbage_are_refused(tmp_path, capsys):
    def refuses(name, words):
        argv = ["--dataset", name, "--data-dir", str(tmp_path), *CPU]
        refused(capsys, words, fedavg.main, argv)

    root = tmp_path / "tiny-imagenet-200"
    (root / "val").mkdir(parents=True)
    (root / "wnids.txt").write_text("n01\nn02\n")
    (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn01\n")
    (root / "train" / "n01" / "images").mkdir(parents=True)
    Image.new("RGB", (64, 64)).save(root / "train" / "n01" / "images" / "a.JPEG")
    refuses("tinyimagenet", "is incomplete; remove it")
    (root / "val" / "val_annotations.txt").write_text("no tab\n")
    refuses("tinyimagenet", "could not get the data set tinyimagenet")
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (raw / f"{part}-ubyte").write_bytes(b"garbage")
    refuses("mnist", "could not get the data set mnist")


def test_limit_takes_equally_many_of_each_class():
    labels = np.array([0] * 30 + [1] * 8 + [2] * 2 + [0, 1] * 5)
    data = fl.data.Data("x", np.zeros((50, 2, 2, 1), np.uint8), labels, 40, 3)
    small = fl.data.limit_images(data, 12)
    assert small.n_train == 12 and len(small.images) == 22
    assert np.bincount(small.labels[:12]).tolist() == [5, 5, 2]


# Bad input: one line on stderr, exit code 2. What tests/faults.md has is tried by test_faults.py


@pytest.mark.parametrize("given, words", [
    (images(y_train=np.array([10**9] + [0] * 39)), "no training image has the label 1;"),
    (images(client_train=np.array([10**18] + [0] * 39)), "client_train must number the clients 0,"),
    (images(client_test=np.arange(20)), "has client_test, but no client_train"),
    (images(client_train=np.arange(40) % 4, client_test=np.arange(19) % 4),
     "for each of the 20 images of x_test"),
    (images(client_train=np.arange(40) % 4, client_test=np.arange(20) % 3),
     "must give each client of client_train test images"),
])
def test_bad_arrays_are_refused(given, words, tmp_path, capsys):
    np.savez(tmp_path / "bad.npz", **given)
    refused(capsys, words, fedavg.main, ["--dataset", str(tmp_path / "bad.npz"), *CPU])


def test_what_the_system_does_not_let_read_is_refused(tmp_path, capsys, monkeypatch):
    """A name that is too long, and a folder of somebody else's."""
    argv = ["--dataset", "long" * 99, "--data-dir", str(tmp_path), *CPU]
    refused(capsys, "can't be read: File name too long", fedavg.main, argv)

    def forbidden(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(pathlib.Path, "iterdir", forbidden)
    argv[1] = str(tmp_path)
    refused(capsys, f"--dataset {tmp_path} can't be read: Permission denied", fedavg.main, argv)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist", "emnist", "tinyimagenet"])
def test_without_network_a_download_is_refused(name, tmp_path, capsys, monkeypatch):
    def offline(*args, **more):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", offline)
    argv = ["--dataset", name, "--data-dir", str(tmp_path), *CPU]
    refused(capsys, f"{tmp_path}/{name}.npz", fedavg.main, argv)


# Splits

LABELS = np.random.default_rng(5).permutation(np.arange(6000) % 10)
ONCE = [name for name in common.SPLITS if name not in ("fedslr", "natural")]  # deal no image twice


def split(scheme, seed=0, labels=LABELS, classes=10, **args):
    """What a scheme gives each client, before train and test images are told apart."""
    args = argparse.Namespace(**{"clients": 20, "per_client": 2, "alpha": 1.0, **args})
    return common.SPLITS[scheme](labels, classes, common.stream(seed, "split"), args)


def kinds(owned, labels=LABELS):
    return [len(np.unique(labels[index])) for index in owned]


@pytest.mark.parametrize("scheme", [*ONCE, "fedslr"])
def test_which_images_a_scheme_gives(scheme):
    owned = split(scheme)
    every = np.concatenate(owned)
    assert every.min() >= 0 and every.max() < 6000
    assert scheme == "fedslr" or len(np.unique(every)) == len(every)
    assert scheme in ("lognormal", "semantic", "fedma", "unequal-classes") or len(every) == 6000
    if scheme in ("iid", "shards", "dirichlet-hsu", "classes", "fedslr"):
        assert set(map(len, owned)) == {300}


def test_shards():
    """600 images of a class are 4 shards of 150: two shards are at most two classes, and the pairs
    are random."""
    owned = split("shards")
    assert max(kinds(owned)) == 2
    pairs = {tuple(np.unique(LABELS[index])) for index in owned}
    others = {tuple(np.unique(LABELS[index])) for index in split("shards", seed=1)}
    assert len(pairs) > 10 and pairs != others
    assert all(set(np.bincount(LABELS[index])) <= {0, 150, 300} for index in owned)


def test_alpha_zero_is_one_class_per_client_and_large_alpha_is_all():
    assert set(kinds(split("dirichlet-hsu", alpha=0))) == {1}
    assert len({int(LABELS[index][0]) for index in split("dirichlet-hsu", alpha=0)}) == 10
    even = split("dirichlet-hsu", alpha=1e6)[:15]
    assert all(set(np.bincount(LABELS[index])) <= {29, 30, 31} for index in even)
    # underflows to one class, or what is left of another
    assert np.mean(kinds(split("dirichlet-hsu", alpha=1e-4))) < 2


@pytest.mark.parametrize("alpha", [1e-9, 1e-3, 0.05, 1.0, 100.0])
def test_dirichlet_ends_whatever_alpha_is(alpha):
    assert set(map(len, split("dirichlet-hsu", alpha=alpha, clients=100))) == {60}


def test_dirichlet_over_clients_is_unbalanced_and_no_client_is_left_empty():
    sizes = sorted(map(len, split("dirichlet-classes", alpha=0.5)))
    assert sizes[0] >= 10 and sizes[-1] > 2 * sizes[0]


def test_fedmas_full_clients_get_nothing_more():
    """Alpha near 0 deals a class of 600 to one client. N/K is 1,200: each of 5 clients gets two
    classes. Of 13 classes, of which the last three have no images, one client gets all."""
    for seed in range(5):
        owned = split("fedma", seed, clients=5, alpha=1e-6)
        assert [len(index) for index in owned] == [1200] * 5 and set(kinds(owned)) == {2}
    assert list(map(len, split("fedma", classes=13, clients=1))) == [6000]


def test_k_classes_each():
    """Ten clients with 4 of 10 classes: every class has 4 holders, and each gets 600/4 of it
    (PersFL's DS-1)."""
    owned = split("classes", clients=10, per_client=4)
    assert set(kinds(owned)) == {4}
    assert all(set(np.bincount(LABELS[index], minlength=10)) == {0, 150} for index in owned)


def test_k_classes_each_in_unequal_amounts():
    """As above, but a client has 10 or more of each of its classes and 149 * 4 in all (one image
    of 150 is kept back for rounding). A small alpha makes the amounts less equal."""
    spreads = []
    for alpha in (0.3, 100):
        owned = split("unequal-classes", clients=10, per_client=4, alpha=alpha)
        counts = np.array([np.bincount(LABELS[index], minlength=10) for index in owned])
        assert ((counts > 0).sum(1) == 4).all() and counts[counts > 0].min() >= 10
        assert set(counts.sum(1)) == {149 * 4} and counts.sum(0).max() <= 600
        assert len(np.unique(np.concatenate(owned))) == 149 * 4 * 10
        spreads.append(counts[counts > 0].std())
    assert spreads[0] > 5 * spreads[1] > 0
    with pytest.raises(SystemExit):
        split("unequal-classes", clients=500, per_client=4)  # 3 images of a class each


def test_lognormal_gives_two_neighbouring_labels_and_very_unequal_sizes():
    owned = split("lognormal", clients=10)
    for k, index in enumerate(owned):
        assert set(LABELS[index]) == {k, (k + 1) % 10}
    sizes = [len(index) for seed in range(20) for index in split("lognormal", seed, clients=10)]
    assert min(sizes) >= 20 and max(sizes) > 1000


def test_natural_clients_are_those_of_the_file(tmp_path, capsys):
    file, owner = tmp_path / "hospitals.npz", np.repeat([2, 0, 1], [25, 10, 5])
    np.savez(file, **images(), client_train=owner)
    argv = ["--dataset", str(file), "--split", "natural", "--model", "mnistnet", *CPU]
    fed = federation(argv)
    assert fed.K == 3 and fed.n.tolist() == [8, 4, 20]
    for k in range(3):
        own = [*fed.split.train[k], *fed.split.test[k]]
        assert sorted(own) == np.flatnonzero(owner == k).tolist()
    fed = federation([*argv, "--limit", "38"])
    assert fed.split.train[1].max() < 38
    assert (fed.data.owner == np.delete(owner, [38, 39])).all()
    few, words = [*argv, "--limit", "35"], "leaves a client of --split natural without images"
    refused(capsys, words, fedavg.main, few)
    last = np.repeat([0, 1, 2], [25, 10, 5])  # the last client loses all
    np.savez(file, **images(), client_train=last)
    refused(capsys, words, fedavg.main, few)
    np.savez(tmp_path / "bytes.npz", **images(256), client_train=np.arange(256, dtype=np.uint8))
    argv[1] = str(tmp_path / "bytes.npz")
    assert federation([*argv, "--client-test", "0"]).K == 256
    words = "use a smaller --client-test or more images"
    refused(capsys, words, fedavg.main, [*argv, "--client-test", "0.2"])


def test_natural_clients_test_on_their_own_images(tmp_path):
    """client_test, as LEAF has it: none of a client's training images is held out, whatever
    --client-test says."""
    owner, tester = np.repeat([2, 0, 1], [25, 10, 5]), np.array([0, 1, 1, 2] * 5)
    np.savez(tmp_path / "leaf.npz", **images(), client_train=owner, client_test=tester)
    argv = ["--dataset", str(tmp_path / "leaf.npz"), "--model", "mnistnet", *CPU]
    fed = federation([*argv, "--split", "natural", "--client-val", "0.2"])
    for k in range(3):
        own = [*fed.split.train[k], *fed.split.val[k]]
        assert sorted(own) == np.flatnonzero(owner == k).tolist()
        assert fed.split.test[k].tolist() == (40 + np.flatnonzero(tester == k)).tolist()
    assert [len(val) for val in fed.split.val] == [2, 1, 5] and "client_test" in " ".join(fed.notes)
    most = federation([*argv, "--split", "natural", "--client-val", "0.8"]).split  # .8 + .2 is 1
    assert [len(val) for val in most.val] == [8, 4, 20]
    fed = federation([*argv, "--split", "iid", "--clients", "4"])
    assert max(map(max, fed.split.test)) < 40 and not fed.notes


def test_semantic_clusters_of_emnist():
    """5 clusters of 12, 12, 12, 12 and 14 classes, each of 2 digits, 5 (6) capital and 5 (6) small
    letters."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(62), 1000))
    owned = split("semantic", labels=labels, classes=62)
    sets = [frozenset(np.unique(labels[index])) for index in owned]
    clusters = []
    for classes in sorted(set(sets), key=len, reverse=True):
        if not any(classes <= cluster for cluster in clusters):
            clusters.append(classes)
    assert sorted(map(len, clusters)) == [12, 12, 12, 12, 14]
    assert frozenset().union(*clusters) == set(range(62))
    for cluster in clusters:
        digits, capitals, small = (sum(a <= c < b for c in cluster)
                                   for a, b in ((0, 10), (10, 36), (36, 62)))
        assert digits == 2 and capitals == small == (len(cluster) - 2) / 2
    sizes = np.array(list(map(len, owned)))
    assert sizes.min() >= 100 and sizes.max() < 800
    assert sizes.mean() == pytest.approx(450, rel=0.1)


def test_semantic_clients_of_tiny_imagenet():
    """10 clusters of 20 classes. The paper has 390 clients with 252 images; our sizes are uniform
    in [100, 400)."""
    labels = np.repeat(np.arange(200), 500)
    owned = split("semantic", labels=labels, classes=200)
    assert 365 < len(owned) < 430
    assert np.mean(list(map(len, owned))) == pytest.approx(250, rel=0.06)
    assert max(kinds(owned, labels)) == 20


def test_fedslr_refills_a_class_that_is_used_up():
    owned = split("fedslr", alpha=0.1)
    assert len(np.unique(np.concatenate(owned))) < 6000  # some are used twice, others never
    q = [np.bincount(LABELS[index], minlength=10) / 300
         for seed in range(20) for index in split("fedslr", seed, alpha=0.1)]
    # Dir(.1, ..., .1): alpha per class
    assert np.var(q, axis=0).mean() == pytest.approx(0.09 / (10 * 0.1 + 1), rel=0.15)
    owned = split("fedslr", classes=12, alpha=0.1)  # two classes have no images to be refilled with
    assert set(map(len, owned)) == {300}


@pytest.mark.parametrize("scheme", ONCE)
def test_clients_hold_out_what_they_are_asked_to(scheme):
    more = ["--clients", "10"] if scheme != "semantic" else []
    more += ["--alpha", "0.9"] if scheme in common.USED_BY["alpha"] else []
    held = ["--client-test", "0.2", "--client-val", "0.2"]
    fed = federation([*SHAPES, "--split", scheme, *more, *held])
    for train, val, test in zip(*fed.split):
        n = len(train) + len(val) + len(test)
        assert len(test) == int(0.2 * n) and len(train) == int(0.6 * n + 1e-9)
        every = np.concatenate([train, val, test])
        assert len(np.unique(every)) == n and max(every) < fed.data.n_train
    assert fed.n.tolist() == [len(index) for index in fed.split.train]


def test_without_own_test_images_clients_get_central_ones_in_their_class_proportions():
    argv = [*SHAPES, "--clients", "10", "--client-test", "0", "--split", "classes"]
    fed = federation([*argv, "--per-client", "4"])
    for train, test in zip(fed.split.train, fed.split.test):
        assert len(train) == 1000 and test.min() >= fed.data.n_train and len(np.unique(test)) == 100
        of_test, of_train = (np.bincount(fed.data.labels[index], minlength=10)
                             for index in (test, train))
        assert np.array_equal(of_test * 10, of_train)


def test_a_split_is_drawn_from_its_stream_alone():
    """common.split_clients gives the Federation's split, for the same --split-seed."""
    argv = [*SHAPES, "--limit", "400", "--clients", "5", "--client-val", "0.2"]
    fed = federation([*argv, "--split-seed", "3", "--seed", "8"])
    again = common.split_clients(fed.data, fed.args, common.stream(3, "split"))
    other = common.split_clients(fed.data, fed.args, common.stream(8, "split"))
    assert again.fingerprint() == fed.split.fingerprint() != other.fingerprint()


# Transforms


def test_tensorflow_transform():
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(60, 190, (4, 32, 32, 3), dtype=np.uint8))

    def standardised(x):  # [n, C, H, W]: each image to mean 0 and deviation 1
        mean = x.mean((1, 2, 3), keepdim=True)
        return (x - mean) / x.std((1, 2, 3), keepdim=True, correction=0)

    def close(found, want):
        torch.testing.assert_close(found.double(), want, atol=1e-4, rtol=1e-4)

    centre = images[:, 4:28, 4:28].permute(0, 3, 1, 2).double()
    close(fl.transforms.tensorflow(images), standardised(centre))
    # draws: window at row int(.5*9)=4, column int(.99*9)=8, mirrored, brightness +31.5 (which
    # mean 0 undoes), contrast .2 + 1.6*.5625 = 1.1
    u = torch.tensor([[0.5, 0.99, 0.2, 0.75, 0.5625]]).expand(4, -1)
    cut = images[:, 4:28, 8:32].flip(2).double()
    channel = cut.mean((1, 2), keepdim=True)
    want = (channel + (cut - channel) * 1.1).permute(0, 3, 1, 2)
    close(fl.transforms.tensorflow(images, u), standardised(want))
    flat = fl.transforms.tensorflow(torch.full((1, 32, 32, 3), 9, dtype=torch.uint8))
    assert flat.isfinite().all() and flat.abs().max() == 0


@pytest.mark.parametrize("width", [8, 11])
def test_fedslr_transform(width):
    """Standardised channels; a flip below .5; below .5 a window of the image padded with zeros,
    after normalisation."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (50, 8, width, 3), dtype=np.uint8)
    data = fl.data.Data("x", images, np.arange(50) % 2, 40, 2)
    transform = fl.transforms.fedslr(data)
    z = transform(torch.from_numpy(images[:40])).numpy()
    assert np.abs(z.mean((0, 2, 3))).max() < 1e-5 and np.abs(z.std((0, 2, 3)) - 1).max() < 1e-5
    plain = fl.transforms.normalize(data)(torch.from_numpy(images[:40]))
    assert np.array_equal(plain.numpy(), z)
    u = torch.tensor([[0.1, 0.9, 0.5, 0.5], [0.9, 0.1, 0.0, 0.99], [0.9, 0.9, 0.0, 0.0]])
    flipped, moved, plain = transform(torch.from_numpy(images[:3]), u).numpy()
    assert np.array_equal(flipped, z[0][:, :, ::-1]) and np.array_equal(plain, z[2])
    want = np.zeros((3, 8, width), np.float32)
    # the window's corner lies 4 rows above and 4 columns to the right of the image's
    want[:, 4:, : width - 4] = z[1][:, :4, 4:]
    assert np.array_equal(moved, want)


def test_augment_once_moves_and_mirrors_images_for_good():
    """Pixels of value 1 to 54 tell where an image was moved: each of the 81 ways and their mirror
    images occur."""
    images = np.tile(np.arange(1, 55, dtype=np.uint8).reshape(1, 6, 9, 1), (5000, 1, 1, 1))
    data = fl.data.Data("x", images, np.arange(5000) % 2, 4000, 2)
    changed = fl.data.augment_once(data, np.random.default_rng(0))
    wide = np.pad(images[0, :, :, 0], 4)
    windows = [wide[i : i + 6, j : j + 9] for i in range(9) for j in range(9)]
    ways = [way.tobytes() for window in windows for way in (window, window[:, ::-1])]
    counts = np.bincount([ways.index(image.tobytes()) for image in changed.images], minlength=162)
    assert changed.images.shape == images.shape and np.array_equal(changed.labels, data.labels)
    assert abs(counts / 5000 * 162 - 1).max() < 0.8 and counts.min() > 0
    assert abs(counts[::2].sum() - 2500) < 150
    argv = [*SHAPES, "--limit", "1000"]
    plain, a, b, other = (federation([*argv, *more]).images for more in (
        [], ["--augment-once"], ["--augment-once"], ["--augment-once", "--split-seed", "1"]))
    assert torch.equal(a, b) and not torch.equal(a, other) and not torch.equal(a, plain)


# Splits that say what they are

HAM = np.repeat(np.arange(7), (6705, 1113, 1099, 514, 327, 142, 115))  # HAM10000's classes

# Of today's balanced data sets, by the version of before there were two names (1e9c188): labels
# LABELS, 20 clients (100 with K = 100), of dirichlet-hsu that of `dirichlet`
BEFORE = {
    ("iid", 20, 1, 0.2): "2889e5079673f091",
    ("shards", 100, 1, 0.2): "974f6e9d8ad8959c",
    ("dirichlet-hsu", 20, 0.3, 0.2): "421fd99bae9dd560",
    ("dirichlet-hsu", 20, 0, 0.2): "9ba0e995eab1cb56",
    ("dirichlet-classes", 20, 1, 0.2): "acac9a5b0db68e5e",
    ("classes", 20, 1, 0.2): "b3d98aac3e8c1bff",
    ("lognormal", 20, 1, 0.2): "c5a9b5b6f153ad61",
    ("semantic", 20, 1, 0.2): "c58aa98518f1f822",
    ("fedslr", 100, 0.1, 0): "43f0425f155341a9",
    ("fedma", 20, 0.5, 0.2): "5c8c4ff5e6dc6253",
}


@pytest.mark.parametrize("scheme, K, alpha, share", BEFORE)
def test_splits_of_balanced_data_are_those_of_before(scheme, K, alpha, share):
    labels = np.concatenate([LABELS, np.arange(600) % 10])
    data = fl.data.Data("x", np.zeros((6600, 1, 1, 1), np.uint8), labels, 6000, 10)
    args = argparse.Namespace(split=scheme, clients=K, alpha=alpha, client_test=share,
                                     client_val=share / 2, per_client=2, limit_test=None)
    split = common.split_clients(data, args, common.stream(0, "split"))
    assert split.fingerprint() == BEFORE[scheme, K, alpha, share]


def test_the_two_conventions_differ_as_the_literature_says(tmp_path, capsys):
    """alpha = .3, ten classes of 600 images, 20 clients. If each class is dealt in Dir(.3) shares,
    a client's share s is Beta(.3, 19 * .3), and it gets an image with probability min(600 s, 1).
    With Hsu's .03 per class a client's shares are Dir(.03), and it has 300 images."""
    rng = np.random.default_rng(0)
    s = rng.beta(0.3, 19 * 0.3, 100_000)
    seen = [np.mean(kinds(split("dirichlet-classes", seed, alpha=0.3))) for seed in range(20)]
    assert np.mean(seen) == pytest.approx(10 * np.minimum(600 * s, 1).mean(), abs=0.2)
    assert np.mean(seen) > 7.5
    q = rng.dirichlet([0.03] * 10, 10_000)
    seen = [np.mean(kinds(split("dirichlet-hsu", seed, alpha=0.3)[:8])) for seed in range(40)]
    assert np.mean(seen) == pytest.approx((300 * q > 0.5).sum(1).mean(), abs=0.3)
    assert np.mean(seen) < 3
    record, _ = run(fedavg, [*QUICK, "--split", "dirichlet-classes", "--model", "mnistnet",
                             "--alpha", "1"], tmp_path)
    fed = federation([*QUICK, "--split", "dirichlet-classes", "--alpha", "1"])
    own = [len(np.unique(fed.data.labels[index])) for index in fed.split.train]
    words = f"classes {min(own)}/{np.mean(own):.1f}/{max(own)} (least/mean/most)"
    assert record["split"]["classes"] == own
    assert words.replace(".0/", "/") in capsys.readouterr().out


def test_hsus_p_is_the_classes_shares_of_all_images():
    """HAM10000's seven classes, 67 % to 1 %. alpha = 10,000 is i.i.d., for the last clients, too;
    alpha = 1 has the variance p(1-p)/2 for the first clients."""
    p = np.bincount(HAM) / len(HAM)
    for K in (20, 100):
        owned = split("dirichlet-hsu", labels=HAM, classes=7, clients=K, alpha=1e4)
        q = np.stack([np.bincount(HAM[index], minlength=7) for index in owned])
        n = len(HAM) // K
        assert set(q.sum(1)) == {n}
        assert np.abs(q / n - p).sum(1).max() / 2 < (0.06 if K == 20 else 0.2)
        # as far from p as n random images, on average
        random = np.random.default_rng(0).multinomial(n, p, K)
        assert np.abs(q / n - p).sum(1).mean() <= np.abs(random / n - p).sum(1).mean()
    owned = [split("dirichlet-hsu", seed, labels=HAM, classes=7, clients=100, alpha=1.0)[:10]
             for seed in range(60)]
    q = np.array([np.bincount(HAM[index], minlength=7) for part in owned for index in part]) / 100
    assert np.allclose(q.mean(0), p, atol=0.04)
    assert np.allclose(q.var(0)[:3], (p * (1 - p) / 2)[:3], rtol=0.25)


def test_fractions_go_up_as_often_as_they_say():
    rng, values = np.random.default_rng(0), np.array([0.2, 3.7, 0.0, 1.6, 2.5])
    seen = np.array([fl.splits.whole_numbers(values, rng) for _ in range(4000)])
    assert (seen.sum(1) == 8).all() and np.allclose(seen.mean(0), values, atol=0.04)
    assert (np.abs(seen - values) < 1).all() and (seen[:, 2] == 0).all()


# A split of one's own

def test_a_split_of_ones_own_gets_a_copy_of_the_labels(tmp_path):
    (tmp_path / "own.py").write_text("def sorts(labels, classes, rng, args):\n    labels.sort()\n"
                                     "    return [range(200), range(200, 400)]\n")
    plain = federation([*QUICK, "--split", "iid"])
    fed = federation([*QUICK, "--split", f"{tmp_path}/own.py:sorts"])
    assert np.array_equal(fed.data.labels, plain.data.labels) and fed.K == 2


@pytest.mark.parametrize("array", ["[]", "[0, 0]", "[-1]", "[400]", "[0.5]", "[[0, 1]]", "3",
                                   "labels == 0"])
def test_a_split_gives_arrays_of_different_numbers(array, tmp_path, capsys):
    (tmp_path / "own.py").write_text(f"def deal(labels, classes, rng, args): return [[7], {array}]")
    words = "must give client 1 at least one image, as an array of different image numbers from 0 "
    words += "to 399" + "; np.flatnonzero(mask) gives those of a mask" * ("==" in array)
    refused(capsys, words, federation, [*QUICK, "--split", f"{tmp_path}/own.py:deal"])


# A folder of images


def folder_of(root, images, mode=None):
    """Writes images: "train/cat/1.png" -> array."""
    for name, image in images.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image, mode).save(root / name)
    return root


def tiles(n=1, size=(6, 6), seed=0, channels=(3,)):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (*size, *channels), dtype=np.uint8) for _ in range(n)]


def pets(folder):
    return folder_of(folder / "pets", {f"{part}/{name}/1.png": tiles()[0]
                                       for part in ("train", "test") for name in "ab"})


def test_a_folder_of_images_is_a_data_set(tmp_path, monkeypatch):
    """Classes in the order of their names; the mapping is in the record. The second time the images
    come from the .npz beside them, until a file changes."""
    a, b, c, d, e = tiles(5)
    root = folder_of(tmp_path / "pets", {
        "train/zebra/1.png": a, "train/zebra/2.PNG": b, "train/ant/9.png": c, "test/zebra/1.png": d,
        "test/ant/1.png": e})
    (root / "train" / "ant" / "notes.txt").write_text("no image")
    (root / "train" / "ant" / "._9.png").write_text("what macOS leaves")
    data = fl.data.load_data(str(root))
    assert (data.name, data.n_train, data.names) == ("pets", 3, ("ant", "zebra"))
    assert data.labels.tolist() == [0, 1, 1, 0, 1] and np.array_equal(data.images, [c, a, b, e, d])
    words = f"note    1 files or folders in {root} are not read, such as train/ant/notes.txt"
    assert words in data.notes[0]
    with monkeypatch.context() as patch:
        patch.setattr(Image, "open", lambda path: 1 / 0)
        assert fl.data.load_data(str(root)).fingerprint() == data.fingerprint()
        assert fl.data.load_data(str(root)).names == ("ant", "zebra")
    folder_of(root, {"train/ant/9.png": d})
    assert np.array_equal(fl.data.load_data(str(root)).images[0], d)
    time.sleep(0.01)  # a clock may tick 100 times a second
    path = root / "train" / "ant" / "9.png"  # another image of equal size and time
    before, content = path.stat(), path.read_bytes()
    Image.fromarray(np.zeros_like(d)).save(path)
    path.write_bytes(path.read_bytes().ljust(len(content), b" "))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (len(content), before.st_mtime_ns)
    assert not fl.data.load_data(str(root)).images[0].any()
    path.write_bytes(content)
    (root / "images-whole.npz").write_bytes(b"half of it")
    assert np.array_equal(fl.data.load_data(str(root)).images[0], d)
    assert fl.data.load_data(str(root), resize=4).images.shape[1:] == (4, 4, 3)
    assert {path.name for path in root.glob("*.*")} == {"images-whole.npz", "images-4.npz"}
    even = np.full((6, 6, 3), 77, np.uint8)
    Image.fromarray(even).save(root / "train" / "ant" / "10.jpg", quality=95)
    data = fl.data.load_data(str(root))  # sorted: 10.jpg before 9.png
    assert data.n_train == 4 and np.abs(data.images[0].astype(int) - even).max() <= 1
    record, _ = run(fedavg, ["--dataset", str(root), "--clients", "2", "--model", "mnistnet",
                             "--rounds", "1", *CPU], tmp_path / "out")
    assert record["data"]["classes"] == ["ant", "zebra"] and record["data"]["name"] == "pets"


def test_a_folder_that_cant_be_written_to(tmp_path, monkeypatch):
    root = pets(tmp_path)

    def full(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(np, "savez", full)
    fed = federation(["--dataset", str(root), "--clients", "1", "--split", "iid", "--client-test",
                      "0", "--model", "mnistnet", *CPU])
    assert len(fed.images) == 4 and not [*root.glob("images-*")]
    words = "can't be written (Read-only file system): each run reads the images anew"
    assert any(words in note for note in fed.notes)


def test_a_folder_without_test_images_holds_out_a_share_of_each_class(tmp_path, capsys):
    """12 images of a and 8 of b, a quarter of each: 3 and 2; for each --split-seed the same."""
    images = {f"{c}/{i:02}.png": np.full((6, 6, 3), 20 * i + j, np.uint8)
              for j, (c, n) in enumerate((("a", 12), ("b", 8))) for i in range(n)}
    root = folder_of(tmp_path / "pets", images)
    argv = ["--dataset", str(root), "--clients", "2", "--model", "mnistnet", "--split", "iid", *CPU]
    one, other = (federation([*argv, "--test-share", "0.25", "--split-seed", seed]).data
                  for seed in "01")
    assert np.bincount(one.labels[: one.n_train]).tolist() == [9, 6]
    assert np.bincount(one.labels[one.central]).tolist() == [3, 2]
    pixels = one.images[:, 0, 0, 0]
    assert len(set(pixels)) == 20 and np.array_equal(pixels % 20, one.labels)
    assert one.fingerprint() == other.fingerprint()
    refused(capsys, "leaves no images for testing", fedavg.main, [*argv, "--test-share", "0.01"])
    refused(capsys, "leaves no images for training", fedavg.main, [*argv, "--test-share", "1"])


def test_images_of_unequal_size_are_cut_by_resize(tmp_path):
    """4x4 from 4x8: the middle columns; from 8x8: every pixel is four equal ones; 4x4 stays."""
    wide, = tiles(1, (4, 8))
    small, flat = tiles(2, (4, 4), 1)
    large = small.repeat(2, 0).repeat(2, 1)
    root = folder_of(tmp_path / "pets", {"train/a/1.png": wide, "train/a/2.png": flat,
                                         "train/b/1.png": large, "test/a/1.png": flat})
    x = fl.data.load_data(str(root), resize=4).images
    assert np.array_equal(x[0], wide[:, 2:6]) and np.array_equal(x[1], flat)
    assert np.abs(x[2].astype(int) - np.asarray(Image.fromarray(large).resize((4, 4)))).max() <= 1


def test_grey_images_beside_others(tmp_path, capsys):
    """Beside one in colour they get three channels; beside one of 16 bits they are refused."""
    grey, = tiles(channels=())
    deep = np.random.default_rng(0).integers(0, 65536, (6, 6), dtype=np.uint16)
    files = ("train/a/1.png", "train/b/1.png", "test/a/1.png", "test/b/1.png")
    root = folder_of(tmp_path / "mixed", {**dict.fromkeys(files, grey), files[0]: tiles()[0]})
    assert np.array_equal(fl.data.load_data(str(root)).images[1], np.stack([grey] * 3, 2))
    root = folder_of(tmp_path / "both", {**dict.fromkeys(files, grey), files[0]: deep})
    words = "images must have 8 bits, or all be grey with 16"
    refused(capsys, f"is read as uint16, {root}/train/b/1.png as uint8; {words}",
            fl.data.load_data, str(root))
    root = folder_of(tmp_path / "float", {"train/a/1.tif": np.ones((6, 6), np.float32)})
    refused(capsys, words, fl.data.load_data, str(root), test_share=0.5)


DEEP = np.array([[0, 1, 255], [256, 4094, 4095]], np.uint16)
PHOTO, OTHER = tiles(2, (4, 6))
TURNED = Image.Exif()  # the camera was held upright: the file's rows are columns, from the right
TURNED[0x0112] = 6
WHITE = "are transparent in parts, which become white"


def tiff(order, black=1):
    """A TIFF by hand: a header, 7 entries and a strip of 2x3 pixels, at byte 98. black: 1 if 0 is
    black, 0 if it is white."""
    entries = [(256, 3), (257, 2), (258, 16), (262, black), (273, 98), (278, 2), (279, 12)]
    head = struct.pack(order + "2sHIH", b"MM" if order == ">" else b"II", 42, 8, len(entries))
    head += b"".join(struct.pack(order + "HHIHH", tag, 3, 1, value, 0) for tag, value in entries)
    return head + bytes(4) + DEEP.astype(order + "u2").tobytes()


def clear(mode, *pixels):
    """Three pixels: an opaque one; one of which a fifth shows, 255 - (255 - 100) / 5 = 224; a clear
    one."""
    image = Image.new(mode, (3, 1))
    image.putdata(pixels)
    if mode == "P":
        image.putpalette([100] * 9)
        image.info["transparency"] = bytes([255, 51, 0])
    return image


@pytest.mark.parametrize("suffix, save, want, note", [
    ("png", Image.fromarray(PHOTO[:, :, 0]).save, PHOTO[:, :, :1], None),
    ("tif", lambda path: path.write_bytes(tiff(">")), DEEP / 65535, None),
    ("tif", lambda path: path.write_bytes(tiff("<")), DEEP / 65535, None),
    ("tif", lambda path: path.write_bytes(tiff("<", 0)), (65535 - DEEP) / 65535, None),
    ("png", Image.fromarray(DEEP).save, DEEP / 65535, None),
    ("png", lambda path: Image.fromarray(PHOTO).save(path, exif=TURNED), np.rot90(PHOTO, -1),
     "are turned as their EXIF orientation says"),
    ("png", clear("RGBA", (100, 100, 100, 255), (100, 100, 100, 51), (100, 100, 100, 0)).save,
     [[[100] * 3, [224] * 3, [255] * 3]], WHITE),
    ("png", clear("LA", (100, 255), (100, 51), (100, 0)).save, [[[100], [224], [255]]], WHITE),
    ("png", clear("P", 0, 1, 2).save, [[[100] * 3, [224] * 3, [255] * 3]], WHITE),
    ("png", Image.new("RGBA", (3, 1), (1, 2, 3, 255)).save, [[[1, 2, 3]] * 3], None),
    ("tif", lambda path: Image.fromarray(PHOTO).save(
        path, save_all=True, append_images=[Image.fromarray(OTHER)]), PHOTO,
     "have further pages, which are not read")])
def test_what_a_file_becomes(suffix, save, want, note, tmp_path):
    """Decoded, and from the .npz beside it."""
    for name in ("train/a", "train/b", "test/a", "test/b"):
        (tmp_path / "files" / name).mkdir(parents=True)
        save(tmp_path / "files" / name / f"1.{suffix}")
    for _ in range(2):
        data = fl.data.load_data(str(tmp_path / "files"))
        want = np.reshape(want, (*np.shape(want)[:2], -1))
        np.testing.assert_allclose(data.images[0], want, 1e-6)
        assert [*data.notes] == [f"note    4 images {note}"] * bool(note)


def test_what_a_killed_program_was_writing_is_removed(tmp_path):
    root = pets(tmp_path)
    for name, age in (("old", 100), ("new", 0)):  # a program may still write the new one
        part = root / f"images-whole.npz.{name}.part"
        part.write_bytes(b"half of it")
        os.utime(part, (time.time() - age,) * 2)
    fl.data.load_data(str(root))
    assert [path.name for path in root.glob("*.part")] == ["images-whole.npz.new.part"]


# MedMNIST


def medmnist(path, labels=None, **more):
    """Its arrays: labels are [n, 1] bytes."""
    rng = np.random.default_rng(0)
    arrays = {}
    for part, n in (("train", 60), ("val", 40), ("test", 30)):
        arrays[f"{part}_images"] = rng.integers(0, 256, (n, 6, 6), dtype=np.uint8)
        arrays[f"{part}_labels"] = (np.arange(n) % 4)[:, None].astype(np.uint8)
    np.savez(path, **arrays | more)
    return arrays


def test_medmnists_file_is_read_as_it_is(tmp_path, capsys):
    """A client's validation images are the file's in its class proportions; 100 are asked for, and
    there are 10 of each class. With --client-val they are held out from its own instead."""
    arrays = medmnist(tmp_path / "blood.npz")
    argv = ["--dataset", str(tmp_path / "blood.npz"), "--model", "mnistnet", "--clients", "5",
            "--split", "classes", "--per-client", "2", "--rounds", "1", "--fraction", "1", *CPU]
    fed = federation(argv)
    data = fed.data
    assert (data.n_train, data.n_val, data.classes) == (60, 40, 4)
    assert data.images.shape == (130, 6, 6, 1) and data.central.tolist() == [*range(60, 90)]
    assert np.array_equal(data.images[60:90, :, :, 0], arrays["test_images"])
    assert np.array_equal(data.labels[90:], arrays["val_labels"][:, 0])
    for train, val in zip(fed.split.train, fed.split.val):
        assert val.min() >= 90 and len(np.unique(val)) == 20
        mine = np.bincount(data.labels[train], minlength=4) > 0
        assert np.bincount(data.labels[val], minlength=4).tolist() == (10 * mine).tolist()
    record, state = run(fedavg, argv, tmp_path / "out")
    logits = fed.net(state["w"], fed.transform(fed.images[90:]))
    right = (logits.argmax(1) == fed.labels[90:]).double()
    means = [right[val - 90].mean().item() for val in fed.split.val]
    assert record["final"]["personal"]["val_mean"] == pytest.approx(np.mean(means))
    fed = federation([*argv, "--client-val", "0.2"])
    assert max(map(max, fed.split.val)) < 60
    assert "note    --client-val holds out clients' own images: x_val is not used" in fed.notes


# LEAF


def leaf(root, train, test, scale=1.0):
    """Users' labels: {"f1": [0, 1]}. An image's pixels are all its label / 8, but the first: the
    user."""
    for part, users in (("train", train), ("test", test)):
        (root / part).mkdir(parents=True)
        for half in (0, 1):
            own = {name: users[name] for i, name in enumerate(users) if i % 2 == half}
            rows = {name: [[z * scale / 8 for z in (int(name[1:]), *[c] * 35)] for c in y]
                    for name, y in own.items()}
            content = {"users": [*own], "num_samples": [len(y) for y in own.values()],
                       "user_data": {name: {"x": rows[name], "y": y} for name, y in own.items()}}
            (root / part / f"data_{half}.json").write_text(json.dumps(content))
    return root


WRITERS = {"f3": [0, 2, 4, 4, 0], "f1": [0, 2, 2], "f2": [4, 4, 2, 0], "f7": [2, 0, 2]}
TESTS = {"f1": [2, 1], "f2": [4], "f3": [0, 3, 3], "f7": [0]}


def test_leafs_writers_are_clients_with_test_images_of_their_own(tmp_path):
    """The writers lack the digits 1 and 3: --classes says that there are five."""
    root = leaf(tmp_path / "femnist" / "data", WRITERS, TESTS).parent
    argv = ["--dataset", f"leaf:{root}", "--model", "mnistnet", "--rounds", "1", *CPU]
    fed = federation([*argv, "--classes", "5"])
    data = fed.data
    assert (fed.args.split, fed.K, data.classes) == ("natural", 4, 5)
    assert data.images.shape == (22, 6, 6, 1) and data.images.dtype == np.float32
    for k, name in enumerate(("f1", "f2", "f3", "f7")):
        for own, labels in ((fed.split.train[k], WRITERS[name]), (fed.split.test[k], TESTS[name])):
            assert sorted(data.labels[own]) == sorted(labels)
            assert (data.images[own, 0, 0] == int(name[1:]) / 8).all()
            assert (data.images[own, 1:, :, 0] == data.labels[own][:, None, None] / 8).all()
    assert torch.equal(fed.transform(fed.images), fed.images.permute(0, 3, 1, 2))  # not scaled
    assert "note    no training image is of class 1, 3" in fed.notes
    record, _ = run(fedavg, [*argv, "--classes", "5"], tmp_path / "out")
    assert record["split"]["clients"] == 4
    assert (root / "data" / "images-leaf.npz").exists()


def test_a_user_of_leaf_has_a_label_for_each_image(tmp_path, capsys):
    root = leaf(tmp_path, WRITERS, TESTS)
    path = next((root / "train").glob("*.json"))
    content = json.loads(path.read_text())
    user = content["users"][0]
    content["user_data"][user]["y"].append(0)
    path.write_text(json.dumps(content))
    refused(capsys, f"user {user} has ", fl.data.load_data, f"leaf:{root}")


def test_leafs_other_layouts(tmp_path):
    users = {"f1": [0, 1], "f2": [1, 0]}
    root = leaf(tmp_path / "others", users, {"f5": [0, 1]})  # LEAF's -t user: new writers
    data = fl.data.load_data(f"leaf:{root}")
    assert data.owner.tolist() == [0, 0, 1, 1] and data.test_owner is None
    assert ("2 users have training images, 1 test images, 0 both, as LEAF's -t user divides them"
            in " ".join(data.notes))
    data = fl.data.load_data(f"leaf:{root}")  # from the .npz
    assert "0 both" in " ".join(data.notes)
    root = leaf(tmp_path / "bytes", users, users, 8)
    for name in ("train", "test"):
        for path in (root / name).glob("*.json"):
            path.write_text(path.read_text().replace(".0", ""))
    assert fl.data.load_data(f"leaf:{root}").images.dtype == np.uint8
    root = leaf(tmp_path / "colours", users, {"f1": [0]})
    for path in root.rglob("*.json"):
        content = json.loads(path.read_text())
        for user in content["user_data"].values():
            user["x"] = [[*range(12)] for _ in user["x"]]
        path.write_text(json.dumps(content))
    data = fl.data.load_data(f"leaf:{root}")
    assert data.images[0].tolist() == np.arange(12).reshape(2, 2, 3).tolist()
    assert data.notes[0] == "note    LEAF's rows are read as 2x2 pixels, each with its 3 colours"
    assert "2 users have training images, 1 test images, 1 both: no client" in data.notes[1]


@pytest.mark.parametrize("classes", [np.array(6), np.array([*"abcdef"])])
def test_a_npz_can_say_how_many_classes_there_are(classes, tmp_path, capsys):
    file, y = str(tmp_path / "some.npz"), np.array([0, 1, 3] * 13 + [0])
    np.savez(file, **images(y_train=y), classes=classes)
    data = fl.data.load_data(file)
    assert data.classes == 6 and data.names == (tuple("abcdef") if classes.ndim else ())
    fed = federation(["--dataset", file, "--clients", "2", "--model", "mnistnet", *CPU])
    missing = "c, e, f" if classes.ndim else "2, 4, 5"
    assert f"note    no training image is of class {missing}" in fed.notes
    assert fl.data.load_data(file, classes=7).classes == 7
    refused(capsys, "there is the label 3, but there are only 3 classes", fl.data.load_data, file,
            classes=3)
    np.savez(file, **images(), classes=np.array([*"abca"]))
    refused(capsys, "the array classes names 'a' twice; each class needs a name of its own",
            fl.data.load_data, file)
    np.savez(file, **images(), classes=np.array([1.5, 2]))
    refused(capsys, "classes must be their number, or their names", fl.data.load_data, file)


# Pixels of other types


@pytest.mark.parametrize("dtype, top", [("uint8", 255), ("uint16", 65535), (">u2", 65535),
                                        ("float32", None), ("float64", None), ("float16", None)])
def test_pixels_of_all_types(dtype, top, tmp_path):
    """Integers are divided by their type's range, floats are taken as they are; normalize gives
    mean 0 and deviation 1."""
    rng = np.random.default_rng(0)
    draw = {"train": (40, 8, 8, 3), "test": (20, 8, 8, 3)}
    x = {part: rng.integers(0, top + 1, size).astype(dtype) if top else
         rng.normal(3, 2, size).astype(dtype) for part, size in draw.items()}
    np.savez(tmp_path / "some.npz", **images(x_train=x["train"], x_test=x["test"]))
    argv = ["--dataset", str(tmp_path / "some.npz"), "--clients", "2", "--model", "mnistnet", *CPU]
    whole = np.concatenate([*x.values()]).astype(np.float64) / (top or 1)
    mean, std = (getattr(whole[:40], name)((0, 1, 2)) for name in ("mean", "std"))
    kept = dtype if dtype == "uint8" else np.float32
    for name, want in (("scale", whole), ("centre", whole - 0.5), ("half", 2 * whole - 1),
                       ("normalize", (whole - mean) / std), ("fedslr", (whole - mean) / std)):
        fed = federation([*argv, "--transform", name])
        assert fed.data.images.dtype == kept
        z = fed.transform(fed.images)
        assert z.dtype == torch.float32
        np.testing.assert_allclose(z.permute(0, 2, 3, 1), want, rtol=1e-4, atol=1e-5)
    once = federation([*argv, "--augment-once"])
    assert once.data.images.dtype == kept


@pytest.mark.parametrize("dtype, top, test, note", [
    (np.float32, 255, 255, "note    images are floats up to 255, which --transform scale"),
    (np.float32, 9, 1, None), (np.float32, 0.2, 0.2, None), (np.uint8, 32, 32, None),
    (np.float32, 9, 0.5, "warning the pixels of the training images go from 0 to 9, of the test "
     "images from 0 to 0.5: are both scaled alike?"),
    (np.uint8, 1, 255, "warning the pixels of the training images go from 0 to 1, of the test"),
    # 31 of 255, and 12 bits in 16, are less than an eighth of white
    (np.uint8, 1, 1, "note    the brightest pixel has 0.00392 of white, as 12-bit"),
    (np.uint8, 31, 31, "note    the brightest pixel has 0.122 of white"),
    (np.float32, 4095 / 65535, 0.05, "note    the brightest pixel has 0.0625 of white")])
def test_what_is_noted_of_pixels(dtype, top, test, note):
    x = np.array([[0, 0], [0, top], [test, 0], [test, test]], dtype).reshape(4, 1, 2, 1)
    notes = fl.data.remarks(fl.data.Data("x", x, np.arange(4) % 2, 2, 2))
    assert [words[: len(note)] for words in notes] == [note] if note else not notes


def test_normalize_only_shifts_a_channel_that_is_constant_in_training():
    x = np.random.default_rng(0).integers(0, 256, (9, 4, 4, 2), dtype=np.uint8)
    x[:8, :, :, 1], x[8, :, :, 1] = 100, 98
    z = fl.transforms.normalize(fl.data.Data("x", x, np.zeros(9, int), 8, 2))(torch.from_numpy(x))
    assert z[:8, 0].std() > 0.9 and z[:8, 1].abs().max() < 1e-6
    torch.testing.assert_close(z[8, 1], torch.full((4, 4), -2 / 255))
    faint = (x * 1e-10).astype(np.float32)  # what is constant is so in proportion to the pixels
    data, faint = fl.data.Data("x", faint, np.zeros(9, int), 8, 2), torch.from_numpy(faint)
    torch.testing.assert_close(fl.transforms.normalize(data)(faint)[:8], z[:8])


@pytest.mark.parametrize("image", [0, 3])  # of training, and of test
def test_pixels_below_0_in_one_part(image):
    """Enlarging an image can overshoot by .04; -1/2 comes of another scale."""
    x = np.random.default_rng(0).random((5, 9, 9, 1), np.float32)
    x[image, 0, 0] = -0.04
    assert not fl.data.remarks(fl.data.Data("x", x, np.arange(5) % 2, 3, 2))
    x[image, 0, 0] = -0.5
    low = ("-0.5", "0.0")[image > 0], ("-0.5", "0.0")[image == 0]
    (words,) = fl.data.remarks(fl.data.Data("x", x, np.arange(5) % 2, 3, 2))
    assert words.startswith(f"warning the pixels of the training images go from {low[0]}")
    assert f"of the test images from {low[1]}" in words and words.endswith("both scaled alike?")


def test_validation_pixels_of_another_scale_are_noted():
    x = np.random.default_rng(0).random((6, 9, 9, 1), np.float32)
    x[5] = 30 * x[5]
    (words,) = fl.data.remarks(fl.data.Data("x", x, np.arange(6) % 2, 3, 2, n_val=1))
    assert "of the validation images from" in words and words.endswith("both scaled alike?")


def test_arrays_that_are_not_read_are_noted(tmp_path):
    np.savez(tmp_path / "mine.npz", **images(), test_client=np.zeros(20, int))
    (words,) = fl.data.load_data(str(tmp_path / "mine.npz")).notes
    assert words.startswith("note    arrays that are not read: test_client; those that may be:")


def test_test_images_that_are_training_images_are_counted():
    x = np.random.default_rng(0).integers(0, 256, (9, 4, 4, 1), dtype=np.uint8)
    x[[6, 8]] = x[[2, 2]]  # 8 is a validation image
    data = fl.data.Data("x", x, np.arange(9) % 2, 5, 2, n_val=1)
    assert fl.data.remarks(data) == ["note    1 of 3 test images are training images, too",
                                     "note    1 of 1 validation images are training images, too",
                                     "note    1 of 1 validation images are test images, too"]


def test_equal_images_of_several_classes_are_counted():
    def notes(other, n_train):
        x = np.random.default_rng(0).integers(0, 256, (300, 4, 4, 1), dtype=np.uint8)
        x[other] = x[0]
        return fl.data.remarks(fl.data.Data("x", x, np.arange(300) % 2, n_train, 2))

    assert notes(101, 150) == [
        "note    2 of 150 training images are there again with another label"]
    assert not notes(100, 150)  # with the same label
    assert notes(slice(2, 10, 2), 150) == [
        "note    4 of 150 training images are copies of others; a client may test or validate on "
        "what it trains on"]
    assert not notes(101, 250)  # less than a hundredth: some known data sets have as many


@pytest.mark.parametrize("shape, words", [
    ((3, 9, 1), "images are 3 pixels high, 9 wide and have 1 channel; if the 3 are channels, save "
     "the arrays as [n, height, width, channels]"),
    ((1, 9, 3), "images are 1 pixel high, 9 wide and have 3 channels; if the 1 are"),
    ((3, 3, 3), None), ((9, 3, 1), None), ((1, 1, 3), None)])
def test_channels_that_may_come_first_are_noted(shape, words):
    x = np.random.default_rng(0).integers(0, 256, (9, *shape), dtype=np.uint8)
    notes = fl.data.remarks(fl.data.Data("x", x, np.arange(9) % 2, 5, 2))
    assert [note[8 : 8 + len(words or "")] for note in notes] == [words] * bool(words)


def test_a_user_of_leaf_counts_once(tmp_path):
    root = leaf(tmp_path, WRITERS, TESTS)
    for path in (root / "train").glob("*.json"):
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | {"users": content["users"] * 2}))
    assert fl.data.load_data(f"leaf:{root}", classes=5).n_train == sum(map(len, WRITERS.values()))


def test_the_tensorflow_transform_counts_pixels_from_0_to_255():
    x = np.random.default_rng(0).integers(0, 256, (4, 30, 30, 3), dtype=np.uint8)
    for u in (None, torch.rand(4, 5)):
        a = fl.transforms.tensorflow(torch.from_numpy(x), u)
        b = fl.transforms.tensorflow(torch.from_numpy((x / 255).astype(np.float32)), u)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


# Bounds


def test_a_bound_on_test_images(tmp_path, capsys):
    """50 central ones, 5 of each class, and 50 of the 8 clients' own, 6 each."""
    argv = [*SHAPES, "--limit", "400", "--clients", "8", "--limit-test", "50"]
    whole, fed = federation(argv[:-2]), federation([*argv, "--client-test", "0.2"])
    assert np.bincount(fed.data.labels[fed.data.central]).tolist() == [5] * 10
    assert [len(test) for test in fed.split.test] == [6] * 8
    for train, test, all_train, all_test in zip(fed.split.train, fed.split.test,
                                                whole.split.train, whole.split.test):
        assert np.array_equal(train, all_train) and set(test) < set(all_test)
    fed = federation([*argv, "--client-test", "0"])
    assert {len(test) for test in fed.split.test} == {6} and fed.split.test[0].min() >= 400
    owner = dict(client_train=np.arange(40) % 4, client_test=np.arange(20) % 4)
    np.savez(tmp_path / "owned.npz", **images(**owner))
    argv = ["--dataset", str(tmp_path / "owned.npz"), "--split", "natural", "--model", "mnistnet",
            *CPU, "--limit-test"]
    fed = federation([*argv, "8"])
    assert len(fed.data.central) == 8 and [len(test) for test in fed.split.test] == [2] * 4
    assert all((fed.data.test_owner[test - 40] == k).all() for k, test in enumerate(fed.split.test))
    refused(capsys, "--limit-test leaves a client of --split natural without images", fedavg.main,
            [*argv, "3"])


def test_a_test_share_may_not_take_all_images_of_a_client(tmp_path, capsys):
    """Eight images in two classes; client 2 has one image, which .5 of each class takes or not."""
    x, y = np.zeros((8, 4, 4), np.uint8), np.arange(8) % 2
    x += np.arange(8, dtype=np.uint8)[:, None, None]
    path = tmp_path / "few.npz"
    for one in range(8):
        owner = np.arange(8) % 2
        owner[one] = 2
        np.savez(path, x_train=x, y_train=y, client_train=owner)
        try:
            data = fl.data.load_data(str(path), test_share=0.5)
        except SystemExit:
            assert "takes all images of a client" in capsys.readouterr().err
        else:
            assert set(data.owner) == {0, 1, 2}


def test_ctrl_c_while_decoding_is_one_line(tmp_path):
    root = pets(tmp_path)
    code = ("import os, signal, sys\nimport fedavg, fl.formats\n"
            "fl.formats.pixels = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
            "fedavg.main(['--dataset', sys.argv[1], '--device', 'cpu'])")
    done = subprocess.run([sys.executable, "-c", code, str(root)], capture_output=True, text=True,
                          cwd=pathlib.Path(__file__).parent.parent)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted\n")
    assert {path.name for path in root.iterdir()} == {"train", "test"}
