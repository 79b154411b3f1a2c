"""Data, splits, models, transforms and measures of common.py, against numbers derived here or given in the papers."""

import struct
import urllib.error

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image

import common
import datasets
import engine
import fedavg
from conftest import federation, refused
from faults import images

CPU = ["--device", "cpu"]


# Data sets


def test_shapes_is_balanced_deterministic_and_not_given_away_by_colour():
    x, y, u, v = datasets.shapes()
    assert x.shape == (10_000, 32, 32, 3) and u.shape == (2_000, 32, 32, 3) and x.dtype == np.uint8
    assert set(np.bincount(y)) == {1000} and set(np.bincount(v)) == {200}
    again = datasets.shapes.__wrapped__()  # past the cache
    assert all(np.array_equal(a, b) for a, b in zip((x, y, u, v), again))
    # the mean colour of an image, the best that a classifier blind to form could use, says next to nothing of its class
    mean, other = x.mean((1, 2)), u.mean((1, 2))
    centres = np.stack([mean[y == c].mean(0) for c in range(10)])
    guess = ((other[:, None] - centres) ** 2).sum(-1).argmin(1)
    assert (guess == v).mean() < 0.2


def test_npz_by_path_and_by_name(tmp_path, monkeypatch):
    given = images()
    monkeypatch.setitem(datasets.DATASETS, "cifar10", (8, 8, 3, 4))
    np.savez(tmp_path / "mine.npz", **given)
    np.savez(tmp_path / "cifar10.npz", **given)
    for name in (str(tmp_path / "mine.npz"), "cifar10"):
        data = datasets.load_data(name, tmp_path)
        assert (data.n_train, data.classes, data.images.shape) == (40, 4, (60, 8, 8, 3))
        assert np.array_equal(data.images[:40], given["x_train"]) and np.array_equal(data.labels[40:], given["y_test"])
    assert datasets.load_data(str(tmp_path / "mine.npz")).name == "mine"


def test_grey_images_get_a_channel(tmp_path):
    given = images()
    np.savez(tmp_path / "grey.npz", **{**given, "x_train": given["x_train"][..., 0], "x_test": given["x_test"][..., 0]})
    assert datasets.load_data(str(tmp_path / "grey.npz")).images.shape == (60, 8, 8, 1)


def write_idx(path, array):
    with open(path, "wb") as file:
        file.write(struct.pack(">HBB" + "I" * array.ndim, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes())


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
    data = datasets.load_data(name, tmp_path)
    assert (data.n_train, data.classes) == (4 * classes, classes)
    assert np.array_equal(data.images[: data.n_train, :, :, 0], wanted["train"][0])  # as stored: EMNIST stays transposed
    assert np.array_equal(data.labels[data.n_train :], wanted["test"][1])


def test_tiny_imagenet_in_its_official_layout(tmp_path, monkeypatch):
    """Class folders with JPEGs, validation images with a list of annotations; the second time from the .npz made of them."""
    monkeypatch.setitem(datasets.DATASETS, "tinyimagenet", (64, 64, 3, 3))
    root = tmp_path / "tiny-imagenet-200"
    wnids = ["n02", "n01", "n03"]
    (root / "val" / "images").mkdir(parents=True)
    (root / "wnids.txt").write_text("\n".join(wnids) + "\n")
    notes = []
    for i, wnid in enumerate(wnids):
        (root / "train" / wnid / "images").mkdir(parents=True)
        for j in range(2):
            Image.new("RGB", (64, 64), (40 * i + 10 * j,) * 3).save(root / "train" / wnid / "images" / f"{wnid}_{j}.JPEG")
        Image.new("L", (64, 64), 40 * i).save(root / "val" / "images" / f"val_{i}.JPEG")  # grey, as some of them are
        notes.append(f"val_{i}.JPEG\t{wnid}\t0\t0\t62\t62")
    (root / "val" / "val_annotations.txt").write_text("\n".join(notes) + "\n")
    data = datasets.load_data("tinyimagenet", tmp_path)
    assert data.images.shape == (9, 64, 64, 3) and data.n_train == 6 and data.classes == 3
    brightness = data.images.mean((1, 2, 3)).round()
    assert brightness.tolist() == [40, 50, 0, 10, 80, 90, 0, 40, 80]  # classes in the order of their names: n01, n02, n03
    assert data.labels.tolist() == [0, 0, 1, 1, 2, 2, 1, 0, 2]
    for file in root.rglob("*.JPEG"):
        file.unlink()
    assert datasets.load_data("tinyimagenet", tmp_path).fingerprint() == data.fingerprint()


def test_half_a_tiny_imagenet_and_garbage_are_refused(tmp_path, capsys):
    root = tmp_path / "tiny-imagenet-200"
    (root / "val").mkdir(parents=True)
    (root / "wnids.txt").write_text("n01\nn02\n")
    (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn01\n")
    (root / "train" / "n01" / "images").mkdir(parents=True)
    Image.new("RGB", (64, 64)).save(root / "train" / "n01" / "images" / "a.JPEG")
    refused(capsys, "is incomplete; remove it", fedavg.main, ["--dataset", "tinyimagenet", "--data-dir", str(tmp_path), *CPU])
    (root / "val" / "val_annotations.txt").write_text("no tab\n")
    refused(capsys, "could not get the data set tinyimagenet", fedavg.main, ["--dataset", "tinyimagenet", "--data-dir", str(tmp_path), *CPU])
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (raw / f"{part}-ubyte").write_bytes(b"garbage")
    refused(capsys, "could not get the data set mnist", fedavg.main, ["--dataset", "mnist", "--data-dir", str(tmp_path), *CPU])


def test_limit_takes_equally_many_of_each_class(tmp_path):
    data = datasets.Data("x", np.zeros((50, 2, 2, 1), np.uint8), np.array([0] * 30 + [1] * 8 + [2] * 2 + [0, 1] * 5), 40, 3)
    small = datasets.limit_images(data, 12)
    assert small.n_train == 12 and np.bincount(small.labels[:12]).tolist() == [5, 5, 2] and len(small.images) == 22


# Bad input: one line on stderr, exit code 2. Here is what tests/faults.md does not have (test_faults.py tries that)


@pytest.mark.parametrize("given, words", [
    (images(y_train=np.array([10**9] + [0] * 39)), "no training image has the label 1;"),
    (images(client_train=np.arange(40) - 1), "client_train must number the clients 0, 1, 2"),
    (images(client_train=np.array([10**18] + [0] * 39)), "client_train must number the clients 0, 1, 2"),
    (images(client_test=np.arange(20)), "has client_test, but no client_train"),
    (images(client_train=np.arange(40) % 4, client_test=np.arange(19) % 4), "for each of the 20 images of x_test"),
    (images(client_train=np.arange(40) % 4, client_test=np.arange(20) % 3), "must give each client of client_train test images"),
    (images(client_train=np.arange(40) % 4, client_test=np.arange(20) % 5), "must give each client of client_train test images"),
])
def test_bad_arrays_are_refused(given, words, tmp_path, capsys):
    np.savez(tmp_path / "bad.npz", **given)
    refused(capsys, words, fedavg.main, ["--dataset", str(tmp_path / "bad.npz"), *CPU])


def test_broken_files_are_refused(tmp_path, capsys):
    np.savez(tmp_path / "whole.npz", **images())
    np.savez_compressed(tmp_path / "small.npz", **images())
    damaged = bytearray((tmp_path / "small.npz").read_bytes())
    for place in range(300, 400):
        damaged[place] ^= 0xFF
    for content in ((tmp_path / "whole.npz").read_bytes()[:-30], damaged):
        (tmp_path / "part.npz").write_bytes(content)
        refused(capsys, "can't be read as a .npz", fedavg.main, ["--dataset", str(tmp_path / "part.npz"), *CPU])


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist", "emnist", "tinyimagenet"])
def test_without_network_a_download_is_refused(name, tmp_path, capsys, monkeypatch):
    def offline(*args, **more):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", offline)
    refused(capsys, f"{tmp_path}/{name}.npz", fedavg.main, ["--dataset", name, "--data-dir", str(tmp_path), *CPU])


SHAPES = ["--dataset", "shapes", *CPU]


def test_one_gpu_for_several_processes_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(capsys, "--device cuda:0 is one GPU for 2 processes; use --device cuda", engine.find_device, "cuda:0")


@pytest.mark.parametrize("argv, words", [
    ([*SHAPES, "--split", "dirichlet-classes", "--alpha", "0.001"], "use a larger --alpha or fewer --clients"),
    ([*SHAPES, "--split", "dirichlet-classes", "--alpha", "0"], "use a larger --alpha or fewer --clients"),
])
def test_a_small_alpha_is_refused(argv, words, capsys):
    refused(capsys, words, fedavg.main, argv)


def twins(m, x, classes):
    return m.linear("fc", F.relu(m.linear("fc", x.flatten(1), 8)), classes)


def apart(m, x, classes):
    scale = m.take("scale.a", (1,), ("constant", 1.0))
    return m.linear("fc", x.flatten(1) * scale, classes) + m.take("scale.b", (1,), ("constant", 0.0))


@pytest.mark.parametrize("model, words", [
    (twins, "fc.weight comes a second time"), (apart, "scale.b comes a second time, or apart"),
    (lambda m, x, classes: x.flatten(1)[:, :classes], "it asks for no weights"),
    (lambda m, x, classes: m.linear("fc", x.flatten(1), klasses), "name 'klasses' is not defined"),  # noqa: F821
])
def test_a_model_that_cant_be_built_is_refused(model, words, capsys, monkeypatch):
    monkeypatch.setitem(common.MODELS, "mine", model)
    refused(capsys, words, common.Net, "mine", (3, 8, 8), 4)


def test_help_names_the_paper_s_symbols_and_the_defaults(capsys):
    with pytest.raises(SystemExit) as stop:
        fedavg.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    for words in ("C, share of the clients", "E (E_L in PersFL), local epochs", "B, local minibatch", "eta, local learning rate", "K, clients in all", "(default: 2000)"):
        assert words in text


# Splits

LABELS = np.random.default_rng(5).permutation(np.arange(6000) % 10)


def split(scheme, seed=0, labels=LABELS, classes=10, **args):
    """What a scheme gives each client, before train and test images are told apart."""
    args = common.argparse.Namespace(**{"clients": 20, "per_client": 2, "alpha": 1.0, **args})
    return common.SPLITS[scheme](labels, classes, common.stream(seed, "split"), args)


def kinds(owned, labels=LABELS):
    return [len(np.unique(labels[index])) for index in owned]


@pytest.mark.parametrize("scheme", [name for name in common.SPLITS if name not in ("fedslr", "natural")])
def test_no_image_is_given_twice(scheme):
    owned = np.concatenate(split(scheme))
    assert len(np.unique(owned)) == len(owned) and owned.min() >= 0 and owned.max() < 6000


@pytest.mark.parametrize("scheme", ["iid", "shards", "dirichlet", "dirichlet-classes", "classes", "fedslr"])
def test_all_images_are_given(scheme):
    assert sum(map(len, split(scheme))) == 6000


@pytest.mark.parametrize("scheme", ["iid", "shards", "dirichlet", "classes", "fedslr"])
def test_balanced_schemes_give_equal_sizes(scheme):
    assert set(map(len, split(scheme))) == {300}


def test_shards():
    """600 images of a class are 4 shards of 150: two shards are at most two classes, and the pairs are random."""
    owned = split("shards")
    assert max(kinds(owned)) == 2
    pairs = {tuple(np.unique(LABELS[index])) for index in owned}
    assert len(pairs) > 10 and pairs != {tuple(np.unique(LABELS[index])) for index in split("shards", seed=1)}
    assert all(set(np.bincount(LABELS[index])) <= {0, 150, 300} for index in owned)


def test_hsus_dirichlet_has_the_papers_concentration():
    """q ~ Dir(alpha p), p = 1/10: variance p(1-p)/(alpha+1). With alpha per class it would be p(1-p)/(10 alpha+1)."""
    labels = np.repeat(np.arange(10), 100_000)
    for alpha in (1.0, 10.0):
        early = split("dirichlet", labels=labels, clients=2000, alpha=alpha)[:600]  # before any class runs out
        q = [np.bincount(labels[index], minlength=10) / 500 for index in early]
        assert np.var(q, axis=0).mean() == pytest.approx(0.09 / (alpha + 1), rel=0.1)


def test_alpha_zero_is_one_class_per_client_and_large_alpha_is_all():
    assert set(kinds(split("dirichlet", alpha=0))) == {1}
    assert len({int(LABELS[index][0]) for index in split("dirichlet", alpha=0)}) == 10
    assert all(set(np.bincount(LABELS[index])) <= {29, 30, 31} for index in split("dirichlet", alpha=1e6)[:15])
    assert np.mean(kinds(split("dirichlet", alpha=1e-4))) < 2  # underflows to one class, or what is left of another


@pytest.mark.parametrize("alpha", [1e-9, 1e-3, 0.05, 1.0, 100.0])
def test_dirichlet_ends_whatever_alpha_is(alpha):
    assert set(map(len, split("dirichlet", alpha=alpha, clients=100))) == {60}


def test_dirichlet_over_clients_is_unbalanced_and_no_client_is_left_empty():
    sizes = sorted(map(len, split("dirichlet-classes", alpha=0.5)))
    assert sizes[0] >= 10 and sizes[-1] > 2 * sizes[0]


def test_k_classes_each():
    """Ten clients with 4 of 10 classes: every class has 4 holders, and each gets 600/4 of it (PersFL's DS-1)."""
    owned = split("classes", clients=10, per_client=4)
    assert set(kinds(owned)) == {4}
    assert all(set(np.bincount(LABELS[index], minlength=10)) == {0, 150} for index in owned)


def test_lognormal_gives_two_neighbouring_labels_and_very_unequal_sizes():
    owned = split("lognormal", clients=10)
    for k, index in enumerate(owned):
        assert set(LABELS[index]) == {k, (k + 1) % 10}
    sizes = [len(index) for seed in range(20) for index in split("lognormal", seed=seed, clients=10)]
    assert min(sizes) >= 20 and max(sizes) > 1000


def test_natural_clients_are_those_of_the_file(tmp_path, capsys):
    owner = np.repeat([2, 0, 1], [25, 10, 5])
    np.savez(tmp_path / "hospitals.npz", **images(), client_train=owner)
    argv = ["--dataset", str(tmp_path / "hospitals.npz"), "--split", "natural", "--model", "mnistnet", *CPU]
    fed = common.Federation(common.parser("a\n\nb").parse_args(argv))
    assert fed.K == 3 and fed.n.tolist() == [8, 4, 20]
    for k in range(3):
        assert sorted([*fed.split.train[k], *fed.split.test[k]]) == np.flatnonzero(owner == k).tolist()
    fed = common.Federation(common.parser("a\n\nb").parse_args([*argv, "--limit", "38"]))
    assert fed.whole_split.train[1].max() < 38 and (fed.data.owner == np.delete(owner, [38, 39])).all()
    refused(capsys, "leaves a client of --split natural without images", fedavg.main, [*argv, "--limit", "35"])
    np.savez(tmp_path / "hospitals.npz", **images(), client_train=np.repeat([0, 1, 2], [25, 10, 5]))  # the last one loses all
    refused(capsys, "leaves a client of --split natural without images", fedavg.main, [*argv, "--limit", "35"])
    np.savez(tmp_path / "bytes.npz", **images(256), client_train=np.arange(256, dtype=np.uint8))
    argv[1] = str(tmp_path / "bytes.npz")
    assert common.Federation(common.parser("a\n\nb").parse_args([*argv, "--client-test", "0"])).K == 256
    refused(capsys, "use --client-test 0 or more images", fedavg.main, [*argv, "--client-test", "0.2"])


def test_natural_clients_test_on_their_own_images(tmp_path):
    """client_test, as LEAF has it: nothing of a client's training images is held out, whatever --client-test says."""
    owner, tester = np.repeat([2, 0, 1], [25, 10, 5]), np.array([0, 1, 1, 2] * 5)
    np.savez(tmp_path / "leaf.npz", **images(), client_train=owner, client_test=tester)
    argv = ["--dataset", str(tmp_path / "leaf.npz"), "--model", "mnistnet", *CPU]
    fed = common.Federation(common.parser("a\n\nb").parse_args([*argv, "--split", "natural", "--client-val", "0.2"]))
    for k in range(3):
        assert sorted([*fed.split.train[k], *fed.split.val[k]]) == np.flatnonzero(owner == k).tolist()
        assert fed.split.test[k].tolist() == (40 + np.flatnonzero(tester == k)).tolist()
    assert [len(val) for val in fed.split.val] == [2, 1, 5] and "client_test" in " ".join(fed.notes)
    fed = common.Federation(common.parser("a\n\nb").parse_args([*argv, "--split", "iid", "--clients", "4"]))
    assert max(map(max, fed.split.test)) < 40 and not fed.notes


def test_semantic_clusters_of_emnist():
    """5 clusters of 12, 12, 12, 12, 14 classes, each of 2 digits, 5 (6) capitals, 5 (6) small letters."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(62), 1000))
    owned = split("semantic", labels=labels, classes=62)
    sets = [frozenset(np.unique(labels[index])) for index in owned]
    clusters = []
    for classes in sorted(set(sets), key=len, reverse=True):
        if not any(classes <= cluster for cluster in clusters):
            clusters.append(classes)
    assert sorted(map(len, clusters)) == [12, 12, 12, 12, 14] and frozenset().union(*clusters) == set(range(62))
    for cluster in clusters:
        digits, capitals, small = (sum(a <= c < b for c in cluster) for a, b in ((0, 10), (10, 36), (36, 62)))
        assert digits == 2 and capitals == small == (len(cluster) - 2) / 2
    sizes = np.array(list(map(len, owned)))
    assert sizes.min() >= 100 and sizes.max() < 800 and sizes.mean() == pytest.approx(450, rel=0.1)


def test_semantic_clients_of_tiny_imagenet():
    """10 clusters of 20 classes; 390 clients of 252 images there, sizes uniform in [100, 400)."""
    labels = np.repeat(np.arange(200), 500)
    owned = split("semantic", labels=labels, classes=200)
    assert 365 < len(owned) < 430 and np.mean(list(map(len, owned))) == pytest.approx(250, rel=0.06)
    assert max(kinds(owned, labels)) == 20


def test_fedslr_refills_a_class_that_is_used_up():
    owned = split("fedslr", alpha=0.1)
    everything = np.concatenate(owned)
    assert len(np.unique(everything)) < 6000  # some images are used twice, others never
    q = [np.bincount(LABELS[index], minlength=10) / 300 for seed in range(20) for index in split("fedslr", seed=seed, alpha=0.1)]
    assert np.var(q, axis=0).mean() == pytest.approx(0.09 / (10 * 0.1 + 1), rel=0.15)  # Dir(.1, ..., .1): alpha per class


@pytest.mark.parametrize("scheme", [name for name in common.SPLITS if name not in ("fedslr", "natural")])
def test_clients_hold_out_what_they_are_asked_to(scheme):
    more = ["--clients", "10"] if scheme != "semantic" else []
    more += ["--alpha", "0.9"] if scheme in common.USED_BY["alpha"] else []
    fed = federation(["--dataset", "shapes", "--split", scheme, *more, "--client-test", "0.2", "--client-val", "0.2", *CPU])
    for train, val, test in zip(*fed.split):
        n = len(train) + len(val) + len(test)
        assert len(test) == int(0.2 * n) and len(train) == int(0.6 * n + 1e-9)
        assert len(np.unique(np.concatenate([train, val, test]))) == n
        assert max(np.concatenate([train, val, test])) < fed.data.n_train
    assert fed.n.tolist() == [len(index) for index in fed.split.train]


def test_five_hundred_images_are_split_400_to_100():
    fed = federation(["--dataset", "shapes", "--clients", "20", *CPU])
    assert {len(i) for i in fed.split.train} == {400} and {len(i) for i in fed.split.test} == {100} and not len(fed.split.val[0])


def test_fedslrs_clients_are_tested_on_central_images_alone():
    """It gives images out twice: test images cut from a client's own could be among its training images."""
    argv = ["--dataset", "shapes", "--split", "fedslr", "--clients", "20", "--alpha", "0.1", *CPU]
    fed = federation([*argv, "--client-test", "0"])
    assert all(len(train) == 500 and test.min() >= fed.data.n_train for train, test in zip(fed.split.train, fed.split.test))


def test_without_own_test_images_clients_get_central_ones_with_their_class_shares():
    fed = federation(["--dataset", "shapes", "--clients", "10", "--client-test", "0", "--split", "classes", "--per-client", "4", *CPU])
    for train, test in zip(fed.split.train, fed.split.test):
        assert len(train) == 1000 and test.min() >= fed.data.n_train and len(np.unique(test)) == 100
        assert np.array_equal(np.bincount(fed.data.labels[test], minlength=10) * 10, np.bincount(fed.data.labels[train], minlength=10))


def test_the_fingerprint_tells_splits_apart():
    a, b, c = (federation(["--dataset", "shapes", "--limit", "400", "--clients", "5", "--split-seed", s, "--lr", lr, *CPU]).split.fingerprint()
               for s, lr in (("0", "1"), ("0", "2"), ("1", "1")))
    assert a == b != c


def test_streams_are_independent():
    seen = {tuple(common.stream(*key).integers(0, 2**62, 2)) for key in
            [(s, p, t, k) for s in (0, 1) for p in common.STREAMS for t in (0, 1) for k in (0, 1)]}
    assert len(seen) == 2 * len(common.STREAMS) * 4


# Models


@pytest.mark.parametrize("model, shape, classes, d", [
    ("cnn", (1, 28, 28), 62, 109_022), ("cnn", (3, 32, 32), 10, 94_186), ("cnn", (3, 32, 32), 100, 140_356), ("cnn", (3, 64, 64), 200, 181_416),
    ("tfcnn", (3, 24, 24), 10, 1_068_298), ("tfcnn", (3, 32, 32), 10, 1_756_426), ("cifarnet", (3, 32, 32), 10, 62_006),
    ("mnistnet", (1, 28, 28), 10, 79_510), ("2nn", (1, 28, 28), 10, 199_210), ("mnistcnn", (1, 28, 28), 10, 1_663_370), ("resnet18", (3, 32, 32), 10, 11_173_952), ("resnet18", (3, 32, 32), 100, 11_220_032),
    ("resnet18", (3, 64, 64), 200, 11_279_112), ("vgg9", (3, 32, 32), 10, 3_491_530),
])
def test_parameter_counts(model, shape, classes, d):
    assert common.Net(model, shape, classes).d == d


@pytest.mark.parametrize("model", common.MODELS)
def test_a_model_is_a_function_of_its_flat_vector(model):
    """The table covers w without gaps, every weight has an influence, and batches do not mix."""
    shape = (1, 28, 28) if model == "mnistnet" else (3, 32, 32)
    net = common.Net(model, shape, 10)
    ends = [0] + [span.stop for _, span, _ in net.tensors]
    assert [span.start for _, span, _ in net.tensors] == ends[:-1] and ends[-1] == net.d
    assert all(int(np.prod(s)) == span.stop - span.start for _, span, s in net.tensors)
    assert [span.start for _, span in net.layers] == [0] + [span.stop for _, span in net.layers][:-1]
    assert all((net.layer_of[span] == i).all() for i, (_, span) in enumerate(net.layers))
    w = net.init(common.stream(0, "initialisation")).requires_grad_()
    x = torch.rand(3, *shape)
    logits = net(w, x)
    assert logits.shape == (3, 10)
    torch.testing.assert_close(logits[1:2], net(w, x[1:2]), atol=1e-4, rtol=1e-3)
    (gradient,) = torch.autograd.grad(logits.square().sum(), w)
    assert all(gradient[span].abs().max() > 0 for _, span, _ in net.tensors)


def test_cnn_is_superfeds_table_4():
    """Against the same five layers built from torch.nn, ReLU before the pooling as the paper draws it."""
    nn = torch.nn
    for shape, classes, pool, kernel in (((1, 28, 28), 62, 2, 2), ((3, 32, 32), 10, 2, 3), ((3, 64, 64), 200, 3, 2)):
        model = nn.Sequential(
            nn.Conv2d(shape[0], 32, 5), nn.ReLU(), nn.MaxPool2d(pool), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(pool),
            nn.Conv2d(64, 32, kernel), nn.ReLU(), nn.MaxPool2d(pool), nn.Flatten(), nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, classes),
        )
        net, x = common.Net("cnn", shape, classes), torch.rand(5, *shape)
        w = nn.utils.parameters_to_vector(model.parameters()).detach()
        torch.testing.assert_close(net(w, x), model(x).detach(), atol=1e-5, rtol=1e-4)


def test_resnet18_is_torchvisions_with_groupnorm():
    """For the large stem: the same spread at the start, and for the same weights the same logits."""
    model = torchvision.models.resnet18(num_classes=200, norm_layer=lambda width: torch.nn.GroupNorm(2, width))
    net, x = common.Net("resnet18", (3, 64, 64), 200), torch.rand(2, 3, 64, 64)
    w, w_0 = torch.empty(net.d), net.init(common.stream(3, "initialisation"))
    for name, span, _ in net.tensors:
        theirs = name.replace("norm1", "bn1").replace("norm2", "bn2").replace("norm3", "downsample.1").replace("shortcut", "downsample.0")
        if theirs.startswith("stage"):
            stage, block, rest = theirs.split(".", 2)
            theirs = f"layer{stage[5:]}.{int(block) - 1}.{rest}"
        with torch.no_grad():
            assert w_0[span].std().item() == pytest.approx(model.state_dict()[theirs].std().item(), rel=0.15, abs=1e-9), name
            w[span] = model.state_dict()[theirs].uniform_(-0.1, 0.1).flatten()
    torch.testing.assert_close(net(w, x), model(x).detach(), atol=1e-3, rtol=1e-3)


def test_local_response_norm_is_tensorflows():
    x = torch.randn(2, 11, 3, 3)
    want = torch.empty_like(x)
    for c in range(11):
        around = x[:, max(0, c - 4) : c + 5].square().sum(1)
        want[:, c] = x[:, c] / (1 + 0.001 / 9 * around) ** 0.75
    torch.testing.assert_close(common.local_response_norm(x), want)


@pytest.mark.parametrize("model, name, std", [
    ("cnn", "conv1.weight", (2 / ((32 + 3) * 25)) ** 0.5), ("cnn", "conv2.weight", (2 / ((64 + 32) * 25)) ** 0.5),
    ("cnn", "conv3.weight", (2 / ((32 + 64) * 9)) ** 0.5), ("cnn", "fc2.weight", (2 / (10 + 512)) ** 0.5),
    ("cnn", "fc1.weight", (2 / (512 + 32)) ** 0.5), ("cnn", "conv1.bias", 0.0),
    ("cifarnet", "fc1.weight", (1 / 400) ** 0.5 / 3**0.5), ("vgg16", "conv3-1.weight", (2 / (256 * 9)) ** 0.5), ("tfcnn", "fc3.weight", 0.04 * 0.8796),
])
def test_initial_weights_have_their_distribution(model, name, std):
    """Xavier normal, PyTorch's uniform, He's fan-out normal, a normal cut off at two deviations (std .8796 of the whole one's)."""
    net = common.Net(model, (3, 32, 32), 10)
    span = {n: s for n, s, _ in net.tensors}[name]
    w = net.init(common.stream(3, "initialisation"))[span]
    assert w.std().item() == pytest.approx(std, rel=0.03) and abs(w.mean().item()) < 0.03 * std + 1e-9
    if model == "tfcnn":
        assert w.abs().max() <= 2 * 0.04


# Transforms


def test_scale_and_centre():
    """A byte from 0 to 255 becomes a number from 0 to 1, or from -1/2 to 1/2; channels come first."""
    images = torch.tensor([[[[0, 255], [51, 102]]]], dtype=torch.uint8)  # one image of 1x2 pixels with 2 channels
    want = torch.tensor([[[[0.0, 0.2]], [[1.0, 0.4]]]])
    data = datasets.Data("x", images.numpy(), np.zeros(1), 1, 2)
    torch.testing.assert_close(common.TRANSFORMS["scale"](data)(images), want)
    torch.testing.assert_close(common.TRANSFORMS["centre"](data)(images, torch.zeros(1, 0)), want - 0.5)


def test_tensorflow_transform():
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(60, 190, (4, 32, 32, 3), dtype=np.uint8))
    centre = images[:, 4:28, 4:28].permute(0, 3, 1, 2).double()
    mean, std = centre.mean((1, 2, 3), keepdim=True), centre.std((1, 2, 3), keepdim=True, correction=0)
    torch.testing.assert_close(common.tensorflow(images).double(), (centre - mean) / std, atol=1e-4, rtol=1e-4)
    # draws: window at row int(.5*9)=4, column int(.99*9)=8, mirrored, brightness +31.5 (which mean 0 undoes), contrast 1.1
    u = torch.tensor([[0.5, 0.99, 0.2, 0.75, 0.5625]]).expand(4, -1)
    cut = images[:, 4:28, 8:32].flip(2).double()
    channel = cut.mean((1, 2), keepdim=True)
    want = (channel + (cut - channel) * 1.1).permute(0, 3, 1, 2)
    want = (want - want.mean((1, 2, 3), keepdim=True)) / want.std((1, 2, 3), keepdim=True, correction=0)
    torch.testing.assert_close(common.tensorflow(images, u).double(), want, atol=1e-4, rtol=1e-4)
    flat = common.tensorflow(torch.full((1, 32, 32, 3), 9, dtype=torch.uint8))
    assert flat.isfinite().all() and flat.abs().max() == 0


@pytest.mark.parametrize("width", [8, 11])
def test_fedslr_transform(width):
    """Standardised channels; a flip below .5; below .5 a window of the image padded with zeros, after normalisation."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (50, 8, width, 3), dtype=np.uint8)
    data = datasets.Data("x", images, np.arange(50) % 2, 40, 2)
    transform = common.fedslr(data)
    z = transform(torch.from_numpy(images[:40])).numpy()
    assert np.abs(z.mean((0, 2, 3))).max() < 1e-5 and np.abs(z.std((0, 2, 3)) - 1).max() < 1e-5
    assert np.array_equal(common.normalize(data)(torch.from_numpy(images[:40])).numpy(), z)
    u = torch.tensor([[0.1, 0.9, 0.5, 0.5], [0.9, 0.1, 0.0, 0.99], [0.9, 0.9, 0.0, 0.0]])
    flipped, moved, plain = transform(torch.from_numpy(images[:3]), u).numpy()
    assert np.array_equal(flipped, z[0][:, :, ::-1]) and np.array_equal(plain, z[2])
    want = np.zeros((3, 8, width), np.float32)
    want[:, 4:, : width - 4] = z[1][:, :4, 4:]  # the window's corner lies 4 rows above and 4 columns right of the image's
    assert np.array_equal(moved, want)


def test_augment_once_moves_and_mirrors_images_for_good():
    """Pixels of value 1 to 54 tell where an image was moved: each of the 81 ways and their mirror images occur."""
    argv = [*SHAPES, "--limit", "1000", "--augment-once"]
    images = np.tile(np.arange(1, 55, dtype=np.uint8).reshape(1, 6, 9, 1), (5000, 1, 1, 1))
    data = datasets.Data("x", images, np.arange(5000) % 2, 4000, 2)
    changed = common.augment_once(data, np.random.default_rng(0))
    wide = np.pad(images[0, :, :, 0], 4)
    windows = [wide[i : i + 6, j : j + 9] for i in range(9) for j in range(9)]
    ways = [way.tobytes() for window in windows for way in (window, window[:, ::-1])]
    counts = np.bincount([ways.index(image.tobytes()) for image in changed.images], minlength=162)
    assert changed.images.shape == images.shape and abs(counts / 5000 * 162 - 1).max() < 0.8 and counts.min() > 0
    assert abs(counts[::2].sum() - 2500) < 150 and np.array_equal(changed.labels, data.labels)
    plain, a, b, other = (federation(words).images for words in (argv[:-1], argv, argv, [*argv, "--split-seed", "1"]))
    assert torch.equal(a, b) and not torch.equal(a, other) and not torch.equal(a, plain)


def test_augmentation_comes_from_the_clients_own_stream():
    argv = ["--dataset", "shapes", "--limit", "400", "--clients", "5", "--model", "tfcnn", "--transform", "tensorflow", *CPU]
    a, b = federation(argv), federation([*argv, "--seed", "1"])
    own = np.arange(20)
    same, again, *others = (fed.plan(k, own, t, 1).uniform for fed, k, t in ((a, 2, 7), (a, 2, 7), (a, 3, 7), (a, 2, 8), (b, 2, 7)))
    assert np.array_equal(same, again) and not any(np.array_equal(same, other) for other in others)


# Measures


def test_calibration_by_hand():
    """Six images, 15 bins. p = .50 (right), .52 (wrong): both in (7/15, 8/15]. p = 1 (right, right, wrong): the last bin.
    p = 2/3 (right) is the upper edge of (9/15, 10/15]."""
    p = torch.tensor([0.50, 0.52, 1.0, 1.0, 1.0, 2 / 3], dtype=torch.double)
    logits = torch.stack([p.clamp(max=1 - 1e-15).log(), (1 - p).clamp(min=1e-15).log()], 1)
    logits[0] = 0.0
    y = torch.tensor([0, 1, 0, 0, 1, 0])
    gaps = [abs(1.02 - 1), abs(3 - 2), abs(2 / 3 - 1)]  # sum of p - number right, per bin
    one = common.score(logits, y, torch.zeros(6, dtype=torch.long), 1)
    assert one["ece"].item() == pytest.approx(sum(gaps) / 6, abs=1e-9)
    assert one["mce"].item() == pytest.approx(max(gaps[0] / 2, gaps[1] / 3, gaps[2]), abs=1e-9)
    assert one["top1"].item() == pytest.approx(4 / 6)


def test_measures_per_group_are_those_of_the_group_alone():
    torch.manual_seed(0)
    logits, y, group = torch.randn(200, 12), torch.randint(0, 12, (200,)), torch.randint(0, 3, (200,))
    together = common.score(logits, y, group, 3)
    for g in range(3):
        mine = group == g
        alone = common.score(logits[mine], y[mine], torch.zeros(int(mine.sum()), dtype=torch.long), 1)
        for name in together:
            assert together[name][g].item() == pytest.approx(alone[name][0].item(), abs=1e-12)
        assert alone["top5"].item() == pytest.approx(np.mean([t in row.topk(5).indices for row, t in zip(logits[mine], y[mine])]))
        assert alone["loss"].item() == pytest.approx(torch.nn.functional.cross_entropy(logits[mine].double(), y[mine]).item())


def test_personal_measures(toy):
    """Three clients with 5, 2 and 3 test images, whose accuracies can be read off a model that always says class 1."""
    fed = federation(["--dataset", toy, "--model", "linear", "--clients", "3", "--split", "iid", *CPU])
    own = [np.flatnonzero(fed.data.labels[:60] == c) for c in range(3)]
    test = [np.concatenate([own[1][:4], own[0][:1]]), own[0][:2], np.concatenate([own[1][:1], own[2][:2]])]  # .8, 0, 1/3
    fed.split = fed.split._replace(test=test)
    w = torch.zeros(fed.net.d)
    w[12 + 1] = 5.0
    a = np.array([0.8, 0, 1 / 3])
    for W in (w, w.expand(3, -1)):
        got = fed.evaluate_clients(W)
        assert got["per_client"] == pytest.approx(a) and got["mean"] == pytest.approx(a.mean()) and got["std"] == pytest.approx(a.std(ddof=1))
        assert got["weighted_mean"] == pytest.approx(5 / 10) and got["worst_decile"] == pytest.approx(0)
    W = w.repeat(3, 1)
    W[1, 12:] = torch.tensor([5.0, 0, 0])
    for fed.vmap in (False, True):
        assert fed.evaluate_clients(W)["per_client"] == pytest.approx([0.8, 1, 1 / 3])
    assert "val_mean" not in got
    fed.args.client_val, fed.split = 0.1, fed.split._replace(val=[own[0][5:], own[0][5:], own[1][5:]])
    for fed.vmap in (False, True):
        got = fed.evaluate_clients(W)
        assert got["per_client"] == pytest.approx([0.8, 1, 1 / 3]) and got["val_mean"] == pytest.approx(2 / 3)
        assert got["val_loss"] == pytest.approx(fed.evaluate_clients(W, fed.split.val)["loss"])
        assert "val_mean" not in fed.evaluate_clients(W, fed.split.test)
    assert fed.evaluate(w)["top1"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("S", [2, [2, 0], np.array([1, 2]), [], np.array([]), slice(1, None), torch.tensor([0, 2]), np.array([True, False, True]), range(2)])
def test_rows_are_picked_and_replaced_as_a_tensors_are(S):
    fed = federation(["--dataset", "shapes", "--limit", "30", "--clients", "3", "--split", "iid", "--client-test", "0", "--model", "mnistnet", *CPU])
    first = torch.arange(6.0).view(3, 2)
    V, whole = fed.per_client(lambda k: first[k]), first.clone()
    at = S if np.size(S) else []
    assert torch.equal(V[S], whole[at])
    V[S], whole[at] = -V[S], -whole[at]
    assert torch.equal(V.all, whole) and not torch.equal(whole, first) or np.size(S) == 0
