"""Images and labels as arrays: from a .npz, a folder of images, LEAF's JSON or torchvision.

Readers return a dict with some of ARRAYS. Files that can't be read are refused here; data.make_data
checks the rest. A record has the images' fingerprint, and so needs no hash of this file.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import pickle
import time
import zipfile
from collections import Counter
from math import isqrt

import numpy as np
from PIL import ExifTags, Image, ImageOps
from tqdm import tqdm

from .data import ARRAYS
from .machine import first_line, refuse

DECODED = 2  # another number has kept images be decoded anew
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp")

# --------------------------------------------------------------------------------------------------
# 1. A .npz, and what is kept as one


def read_npz(path):
    """Returns those of ARRAYS in a .npz. MedMNIST calls them train_images, train_labels, ..."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays, read = {}, set()
            for key in ARRAYS:  # if one can't be read, the refusal below names it
                also = {"x": f"{key[2:]}_images", "y": f"{key[2:]}_labels"}.get(key[0], key)
                if also != key and also in file and key in file:
                    refuse(f"{path} has both {key} and {also}; leave out one of them")
                for name in (also, key):
                    if name in file:
                        arrays[key] = np.asarray(file[name])  # bytes of a .zip
                        read.add(name)
            if others := [name for name in file if name not in read]:
                arrays["notes"] = [f"note    arrays that are not read: {', '.join(others)}; those "
                                   f"that may be: {', '.join(ARRAYS)}"]
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


def write_npz(path, arrays):
    """Writes a .npz whole or not at all, and removes what a killed program has left."""
    for left in path.parent.glob(f"{path.name}.*.part"):
        with contextlib.suppress(OSError):  # its owner may be just done
            if time.time() - left.stat().st_mtime > 60:  # nobody writes it any more
                left.unlink()
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            np.savez(file, **arrays)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def kept(path, files, read):
    """Returns the arrays that read() makes of `files`. Keeps them as `path`, a .npz, and takes them
    from there until one of the files changes."""
    stats = [(str(file.relative_to(path.parent)), file.stat()) for file in files]
    key = repr([DECODED, *((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
                           for name, stat in stats)])  # cp -p keeps the first two
    key = hashlib.sha256(key.encode()).hexdigest()
    with contextlib.suppress(Exception), np.load(path) as there:  # none, or a broken one
        if there["files"] == key:
            return {name: there[name] for name in there if name != "files"}
    arrays = read()
    try:
        write_npz(path, {**arrays, "files": key})
    except OSError as problem:
        arrays["notes"] = [*arrays.get("notes", ()), f"note    {path} can't be written "
                           f"({problem.strerror}): each run reads the images anew"]
    return arrays


# --------------------------------------------------------------------------------------------------
# 2. A folder of images


def read_folder(root, resize=None):
    """Returns the images in ROOT/train/CLASS, ROOT/test/CLASS and, if it is there, ROOT/val/CLASS;
    or those in ROOT/CLASS, all for training. Classes are numbered in the order of their names."""
    def folders(home):
        return sorted(z.name for z in home.iterdir() if z.is_dir() and z.name[0] != ".")

    homes = {part: root / part for part in ("train", "test", "val") if (root / part).is_dir()}
    if homes and "train" not in homes:
        refuse(f"{root} has a folder {[*homes][0]}, but none called train; images lie in "
               "train/CLASS and test/CLASS, or all in CLASS")
    homes = homes or {"train": root}
    names, files, others = folders(homes["train"]), {}, []
    if homes["train"] != root:
        others = [root / name for name in folders(root) if name not in homes]
    for part, home in homes.items():
        files[part] = []
        for c, name in enumerate(names):
            for path in sorted((home / name).glob("[!.]*")):
                if path.suffix.lower() in SUFFIXES and path.is_file():  # a link may lead nowhere
                    files[part].append((path, c))
                else:
                    others.append(path)
        if strange := [name for name in folders(home) if name not in names]:
            refuse(f"{home / strange[0]}: {homes['train']} has no class of this name; name the "
                   "folders alike")
        if not files[part]:
            leaf = f"; for LEAF's JSON say leaf:{root}" * any(home.glob("*.json"))
            refuse(f"{home} has no images in folders; it wants a folder for each class with its "
                   f"images ({', '.join(SUFFIXES)}){leaf}")
    full = {c for _, c in files["train"]}
    if empty := [name for c, name in enumerate(names) if c not in full]:
        refuse(f"{homes['train'] / empty[0]} has no images (those in further folders are not "
               "read); remove the folder, or fill it")
    arrays = kept(root / f"images-{resize or 'whole'}.npz",
                  [path for rows in files.values() for path, _ in rows],
                  lambda: decode(files, resize))
    if others:
        arrays["notes"] = [*arrays.get("notes", []), f"note    {len(others)} files or folders in "
                           f"{root} are not read, such as {others[0].relative_to(root)}; images "
                           f"lie in a class's folder and end in {', '.join(SUFFIXES)}"]
    return {**arrays, "classes": np.array(names)}


def decode(files, resize=None):
    """Returns the arrays of images of one size; files: part -> [(path, class)]. resize scales each
    so that its shorter side has that many pixels, and cuts the longer one to as many. The images
    are grey if all files are, and have 16 bits if all have."""
    images, first, done = {}, None, Counter()
    for part, rows in files.items():
        images[part] = []
        for path, _ in tqdm(rows, f"decoding {part} images", leave=False, disable=None):
            try:
                x = pixels(path, resize, done)
            except Exception as problem:  # Pillow raises nearly anything on a broken file
                refuse(f"{path} can't be read as an image: {first_line(problem)}; replace or "
                       "remove it")
            one, like = first = first or (path, x)
            if x.shape[:2] != like.shape[:2]:
                (a, b), (c, d) = like.shape[:2], x.shape[:2]
                refuse(f"{one} has {b}x{a} pixels, {path} {d}x{c}; add --resize {min(a, b, c, d)}, "
                       "which scales and cuts all images to one size")
            if x.dtype != like.dtype:
                refuse(f"{one} is read as {like.dtype}, {path} as {x.dtype}; images must have 8 "
                       "bits, or all be grey with 16 (of colours only 8 are read)")
            images[part].append(x)
    colour = any(x.ndim == 3 for own in images.values() for x in own)
    notes = [f"note    {n} images {what}" for what, n in done.items() if n]
    arrays = {"notes": np.array(notes, str)}
    for part, rows in files.items():
        own = [np.stack([x] * 3, 2) if colour and x.ndim == 2 else x for x in images.pop(part)]
        arrays |= {f"x_{part}": np.stack(own), f"y_{part}": np.array([c for _, c in rows])}
    return arrays


def pixels(path, resize, done):
    """Returns a file's pixels, [height, width] or [height, width, 3], and counts in `done` what is
    done to them."""
    with Image.open(path) as image:
        done["have further pages, which are not read"] += getattr(image, "n_frames", 1) > 1
        done["are turned as their EXIF orientation says"] += (
            image.getexif().get(ExifTags.Base.Orientation, 1) != 1)
        white_is_0 = getattr(image, "tag_v2", {}).get(ExifTags.Base.PhotometricInterpretation) == 0
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        x = np.asarray(image).astype(np.uint16)
        image = Image.fromarray(65535 - x if white_is_0 else x)  # Pillow does it with 8 bits alone
    elif image.mode[0] in "IF":
        raise ValueError(f"it is of Pillow's mode {image.mode}, images must have 8 bits, or all be "
                         "grey with 16")
    else:
        mode = "L" if image.mode in ("1", "L", "LA") else "RGB"
        clear = image.convert("RGBA") if image.has_transparency_data else None
        if clear and clear.getchannel("A").getextrema()[0] < 255:
            done["are transparent in parts, which become white"] += 1
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), clear)
        image = image.convert(mode)
    return np.asarray(ImageOps.fit(image, (resize, resize)) if resize else image)


# --------------------------------------------------------------------------------------------------
# 3. LEAF


def read_leaf(root):
    """Returns ROOT/train/*.json and ROOT/test/*.json as LEAF makes them: x and y of each user. The
    users are the clients, in the order of their names. If test/ has the same users, they have test
    images of their own."""
    root = root / "data" if (root / "data" / "train").is_dir() else root
    files = {part: sorted((root / part).glob("*.json")) for part in ("train", "test")}
    for part, paths in files.items():
        if not paths:
            refuse(f"{root / part} has no .json files; leaf:FOLDER wants FOLDER/train/*.json and "
                   "FOLDER/test/*.json, as LEAF's preprocess.sh makes them")
    arrays = kept(root / "images-leaf.npz", [*files["train"], *files["test"]],
                  lambda: decode_leaf(files))
    (users, arrays["client_train"]), (others, test) = (
        np.unique(arrays.pop(f"client_{part}"), return_inverse=True) for part in files)
    if np.array_equal(users, others):
        return {**arrays, "client_test": test}
    both = len(np.intersect1d(users, others))
    why = "" if both else ", as LEAF's -t user divides them"
    return {**arrays, "notes": [*arrays.get("notes", ()), (
        f"note    {len(users)} users have training images, {len(others)} test images, {both} both"
        f"{why}: no client has test images of its own (-t sample gives them)")]}


def decode_leaf(files):
    """Returns the arrays of LEAF's files; client_train and client_test hold the users' names."""
    arrays = {}
    for part, paths in files.items():
        x, y, users = [], [], []
        try:
            for path in tqdm(paths, f"reading {part}/*.json", leave=False, disable=None):
                content = json.loads(path.read_bytes())
                for user in dict.fromkeys(content["users"]):  # each once
                    own = content["user_data"][user]
                    if len(own["x"]) != len(own["y"]):
                        raise ValueError(f"user {user} has {len(own['x'])} images and "
                                         f"{len(own['y'])} labels")
                    rows = np.array(own["x"])
                    rows = rows if rows.dtype.kind in "iu" else rows.astype(np.float32)
                    if len(rows):
                        x.append(rows)
                    y += own["y"]
                    users += [user] * len(own["y"])
            x = np.concatenate(x)
        except (ValueError, KeyError, TypeError) as problem:
            refuse(f"{path} can't be read as images in LEAF's JSON (users, user_data, x, y): "
                   f"{type(problem).__name__}: {first_line(problem)}")
        for channels in (1, 3):  # rows of numbers are square images
            side = isqrt(x.shape[-1] // channels)
            if x.ndim == 2 and side * side * channels == x.shape[1]:
                x = x.reshape(len(x), side, side, channels)
                if channels == 3:
                    arrays["notes"] = np.array([f"note    LEAF's rows are read as {side}x{side} "
                                                "pixels, each with its 3 colours"])
        if x.dtype.kind in "iu" and x.min() >= 0 and x.max() < 256:
            x = x.astype(np.uint8)
        arrays |= {f"x_{part}": x, f"y_{part}": np.array(y), f"client_{part}": np.array(users)}
    return arrays


# --------------------------------------------------------------------------------------------------
# 4. Data sets with a name


def read_torchvision(name, path):
    """Returns a data set of torchvision, downloaded beside `path` if it is not there. EMNIST is
    split by class, as stored. The images of CIFAR and MNIST are sorted by class and file name, as
    those of our records, which came as PNG files; splits and --limit depend on the order."""
    import torchvision  # not above: it takes as long as all other imports, and most runs do without

    kind = getattr(torchvision.datasets, name.upper())
    more = {"split": "byclass"} if name == "emnist" else {}
    parts = [kind(path.parent, train=train, download=True, **more) for train in (True, False)]
    arrays = []
    for first, part in zip((0, len(parts[0])), parts):
        x, y, names = np.asarray(part.data), np.asarray(part.targets), None
        if name == "mnist":
            names = [f"{first + i}.png" for i in range(len(y))]
        elif name != "emnist":
            batches = part.train_list if part.train else part.test_list  # torchvision's, checked
            names = [file for batch, _ in batches for file in pickle.loads(pathlib.Path(
                part.root, part.base_folder, batch).read_bytes(), encoding="latin1")["filenames"]]
        order = slice(None) if names is None else np.lexsort((names, y))
        arrays += [x[order], y[order]]
    return dict(zip(ARRAYS, arrays))


def read_tiny_imagenet(path):
    """Returns Tiny ImageNet from its official layout, in tiny-imagenet-200 beside `path`. Its
    validation images are the test set. The decoded images are kept as `path`."""
    root = path.parent / "tiny-imagenet-200"
    if not root.exists():
        import torchvision

        torchvision.datasets.utils.download_and_extract_archive(
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip", str(path.parent),
            md5="90528d7ca1a48142e341f4ef8d21d0de")
    label = {wnid: c for c, wnid in enumerate(sorted((root / "wnids.txt").read_text().split()))}
    train = [(file, c) for wnid, c in label.items()
             for file in sorted((root / "train" / wnid / "images").glob("*.JPEG"))]
    notes = (root / "val" / "val_annotations.txt").read_text().splitlines()
    test = [(root / "val" / "images" / name, label[wnid])
            for name, wnid, *_ in (note.split("\t") for note in notes)]
    if not test or len(set(np.bincount([c for _, c in train], minlength=len(label)))) != 1:
        raise ValueError(f"{root} is incomplete; remove it to download it again")
    arrays = decode({"train": train, "test": test})
    write_npz(path, arrays)
    return arrays
