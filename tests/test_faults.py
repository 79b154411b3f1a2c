"""What happens when something is wrong: each command of the tables in tests/faults.md.

    python tests/test_faults.py     writes the last column of faults.md anew
"""

import contextlib
import importlib
import io
import json
import os
import pathlib
import re
import shlex
import shutil
import sys
import tempfile
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import images

PAGE = pathlib.Path(__file__).parent / "faults.md"
sys.path.insert(0, str(PAGE.parent.parent))
QUICK = ("--dataset shapes --limit 400 --split iid --clients 8 --model mnistnet --fraction 0.5 "
         "--rounds 2 --epochs 1 --lr 0.01 --eval-every 1 --device cpu --parallel 1")
SPLITS = """
import numpy as np
def shared(labels, classes, rng, args):
    return np.arange(210), np.arange(200, 400)
def allowed(labels, classes, rng, args):
    return np.arange(210), np.arange(200, 400)
allowed.overlap = True
def fails(labels, classes, rng, args):
    return 1 / 0
def forgets(labels, classes, rng, args):
    pass
def spoils(labels, classes, rng, args):
    labels[:] = 0
    return np.array_split(rng.permutation(len(labels)), args.clients)
"""


def typed(function):
    """Good images of another type."""
    given = images()
    return images(**{key: function(given[key]) for key in ("x_train", "x_test")})


def medmnist(**changes):
    """Its names of the arrays; labels are [n, 1]."""
    arrays = {}
    for part, n in (("train", 40), ("val", 10), ("test", 20)):
        arrays[f"{part}_images"] = images(40, n)[f"x_{part.replace('val', 'test')}"]
        arrays[f"{part}_labels"] = (np.arange(n) % 4)[:, None].astype(np.uint8)
    return arrays | changes


def spoilt(value):
    x = np.zeros((40, 8, 8, 3), np.float32)
    x[3, 2, 1, 0] = value
    return images(x_train=x, x_test=x[:1].repeat(20, 0) * 0)


def dead(test):
    """A channel is 100 in all training images, and in the test images 100 or `test`."""
    given = images()
    given["x_train"][..., 1], given["x_test"][..., 1] = 100, 100
    given["x_test"][0, 0, 0, 1] = test
    return given


FILES = {
    "a-types.npz": images(x_train=np.zeros((40, 8, 8, 3), np.float32)),
    "b-flat.npz": images(x_train=np.zeros((40, 192), np.uint8)),
    "c-first.npz": images(x_train=np.zeros((40, 3, 8, 8), np.uint8)),
    "d-sizes.npz": images(x_test=np.zeros((20, 9, 9, 3), np.uint8)),
    "e-none.npz": images(x_train=np.zeros((0, 8, 8, 3), np.uint8),
                         y_train=np.zeros(0, int)),
    "f-flat.npz": images(x_train=np.zeros((40, 0, 8, 3), np.uint8)),
    "g-half.npz": images(y_train=np.arange(40) / 2),
    "h-words.npz": images(y_train=np.array(["cat"] * 40)),
    "i-minus.npz": images(y_train=np.arange(40) % 4 - 1),
    "j-fewer.npz": images(y_train=np.arange(39) % 4),
    "k-onehot.npz": images(y_train=np.eye(4, dtype=int)[np.arange(40) % 4]),
    "l-gap.npz": images(y_train=np.array([0, 1, 3] * 13 + [0])),
    "l-said.npz": images(y_train=np.array([0, 1, 3] * 13 + [0]), **{"classes_": np.array(4)}),
    "l-names.npz": images(classes=2, classes_=np.array(["ant", "bee"])),
    "m-new.npz": images(y_test=np.arange(20) % 4 + 2),
    "m-lacks.npz": images(y_test=np.arange(20) % 3),
    "n-untested.npz": images(x_test=np.zeros((0, 8, 8, 3), np.uint8),
                             y_test=np.zeros(0, int)),
    "o-array.npz": images(y_test=None),
    "o-arrays.npz": images(x_test=None, y_test=None),
    "p-object.npz": images(x_train=np.array([[1], [2, 3]] * 20, dtype=object)),
    "q-owner.npz": images(client_train=np.arange(40) / 2),
    "r-owner.npz": images(client_train=np.arange(39)),
    "s-owner.npz": images(client_train=np.arange(40) % 3 * 2),
    "s-owners.npz": images(client_train=np.arange(40) % 4, client_test=np.arange(20) % 4 + 4),
    "t-few.npz": images(client_train=np.arange(40)),
    "cifar100.npz": images(),
    "u-one.npz": images(classes=1),
    "v-alike.npz": images(x_train=np.full((40, 8, 8, 3), 9, np.uint8),
                          x_test=np.full((20, 8, 8, 3), 9, np.uint8)),
    "v-trained.npz": images(x_train=np.full((40, 8, 8, 3), 9, np.uint8)),
    "v-first.npz": images(x_train=images()["x_train"][:, :3], x_test=images()["x_test"][:, :3]),
    "w-deep.npz": typed(lambda x: x.astype(np.uint16) * 257),
    "w-float.npz": typed(lambda x: x / 255),
    "w-unlike.npz": typed(lambda x: x / (1 if len(x) == 40 else 255)),
    "w-int.npz": typed(lambda x: x.astype(np.int64)),
    "w-nan.npz": spoilt(np.nan),
    "w-inf.npz": spoilt(np.inf),
    "w-huge.npz": typed(lambda x: x * 1e300),
    "w-signs.npz": typed(lambda x: x / 255 - (0.5 if len(x) == 40 else 0)),
    "w-seen.npz": images(x_test=images()["x_train"][:20]),
    "w-both.npz": images(test_images=images()["x_test"]),
    "x-dead.npz": dead(98),
    "y-med.npz": medmnist(),
    "y-multi.npz": medmnist(train_labels=np.zeros((40, 14), int)),
}


def prepare(folder):
    """Makes the files that the commands name."""
    for name, arrays in FILES.items():
        np.savez(folder / name, **{key.rstrip("_"): array for key, array in arrays.items()})
    np.savez(folder / "small.npz", **images())
    np.savez(folder / "tiny.npz", **images(size=1))
    labels = np.repeat([0, 1, 2, 3], (300, 60, 30, 10))
    np.savez(folder / "unequal.npz", **images(400, y_train=labels))
    (folder / "empty.npz").write_bytes(b"")
    (folder / "text.npz").write_text("no zip")
    with zipfile.ZipFile(folder / "raw.npz", "w") as file:
        for key in ("x_train", "y_train", "x_test", "y_test"):
            file.writestr(key, "no array")
    whole = (folder / "small.npz").read_bytes()
    (folder / "cut.npz").write_bytes(whole[: len(whole) // 2])
    middle = bytes(b ^ 255 for b in whole[3000:3100])
    (folder / "damaged.npz").write_bytes(whole[:3000] + middle + whole[3100:])
    (folder / "file.txt").write_text("a file")
    for name in ("own.py", "fedavg.py"):
        (folder / name).write_text(SPLITS)
    for name in ("pets", "unequal", "hollow", "strange", "cut", "link", "more"):
        for part in ("train", "test"):
            for i, x in enumerate(images()[f"x_{part}"]):
                place = folder / name / part / "abcd"[i % 4]
                place.mkdir(parents=True, exist_ok=True)
                x = x.repeat(2, 0) if name == "unequal" and i == 5 else x
                Image.fromarray(x).save(place / f"{i:02}.png")
    shutil.copytree(folder / "pets" / "train", folder / "untrained" / "training")
    shutil.copytree(folder / "pets" / "test", folder / "untrained" / "test")
    (folder / "hollow" / "train" / "e").mkdir()
    (folder / "more" / "validation").mkdir()
    (folder / "link" / "train" / "a" / "link.png").symlink_to("nowhere.png")
    (folder / "strange" / "test" / "e").mkdir()
    half = folder / "cut" / "train" / "a" / "00.png"
    half.write_bytes(half.read_bytes()[:50])
    (folder / "nothing").mkdir()
    for name in ("leaf", "gap", "words"):
        for part in ("train", "test"):
            given = images(40, 40)
            x = given[f"x_{part}"][..., 0].reshape(4, 10, 64) / 256
            y = np.where(given["y_train"] == 2, 1 if name == "gap" else 2, given["y_train"])
            data = {f"f{k}": {"x": x[k].tolist(), "y": y[10 * k : 10 * k + 10].tolist()}
                    for k in range(4)}
            if name == "words":
                data["f1"]["x"] = ["to be or not to be"] * 10
            (folder / name / part).mkdir(parents=True)
            content = {"users": [*data], "num_samples": [10] * 4, "user_data": data}
            (folder / name / part / "all.json").write_text(json.dumps(content))


def prepare_runs(folder):
    """Makes folders of finished runs, each in order but for one thing, which its name says."""
    attempt("--out sound", folder)
    for name, change in RUNS.items():
        shutil.copytree(folder / "sound", folder / name)
        change(folder / name)
    (folder / "full").mkdir()
    (folder / "full" / "state.pt.part").symlink_to("/dev/full")


def edit(name, of):
    """Returns a function that gives the state in a run's folder another part of this name."""
    def change(out):
        saved = torch.load(out / "state.pt", weights_only=True)
        torch.save({**saved, name: of(saved[name])}, out / "state.pt")

    return change


def damage(out):
    data = bytearray((out / "state.pt").read_bytes())
    middle = slice(len(data) // 2, len(data) // 2 + 20)
    data[middle] = bytes(b ^ 255 for b in data[middle])
    (out / "state.pt").write_bytes(data)


RUNS = {
    "fewer-rounds": lambda out: None, "earlier": lambda out: None,
    "state-empty": lambda out: (out / "state.pt").write_bytes(b""),
    "state-cut": lambda out: (out / "state.pt").write_bytes((out / "state.pt").read_bytes()[:5000]),
    "state-damaged": damage, "state-text": lambda out: (out / "state.pt").write_text("text"),
    "state-folder": lambda out: ((out / "state.pt").unlink(), (out / "state.pt").mkdir()),
    "state-older": edit("environment", lambda e: {**e, "sources": {**e["sources"],
                                                                   "common.py": "0"}}),
    "state-images": edit("data", lambda data: "0" * 16),
    "state-split": edit("split", lambda split: "0" * 16),
    "state-network": edit("network", lambda tensors: tensors[::-1]),
    "state-two": edit("environment", lambda e: {**e, "processes": 2}),
    "state-gone": lambda out: (out / "state.pt").unlink(),
    "record-empty": lambda out: (out / "result.json").write_text(""),
    "record-cut": lambda out: (out / "result.json").write_text(
        (out / "result.json").read_text()[:100]),
    "record-json": lambda out: (out / "result.json").write_text("[]"),
    "record-gone": lambda out: (out / "result.json").unlink(),
    "half": lambda out: (out / "state.pt.part").write_text("half"),
}


def attempt(command, folder):
    """Runs `[FILE.py] FLAGS` in this process, in the folder: (exit code, stdout, stderr)."""
    words, quick = shlex.split(command), QUICK
    module = words.pop(0).removesuffix(".py") if words and words[0].endswith(".py") else "fedavg"
    if "--split natural" in command or "--split semantic" in command:
        quick = quick.replace("--clients 8 ", "")
    if re.search(r"\.npz|--dataset (?!shapes)", command):  # these have 40 images
        quick = quick.replace("--limit 400 ", "")
    if "--out" not in command:
        out = tempfile.mkdtemp(dir=folder)
        quick += f" --out {out}"
    quick = shlex.split(quick)
    stdout, stderr, here, code = io.StringIO(), io.StringIO(), os.getcwd(), 0
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            importlib.import_module(module).main([*quick, *words])
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException as problem:  # what must not happen
        code = f"traceback: {problem!r}"
    finally:
        os.chdir(here)
    return code, stdout.getvalue(), stderr.getvalue()


def outcome(command, folder):
    """Returns what came of a command, in words. Asserts that it is one line and nothing else, or a
    run that ends."""
    code, out, error = attempt(command, folder)

    def clean(text):
        text = re.sub(r"\S*/tmp\w{8}", "OUT", text).replace(f"{folder}/", "")
        return re.sub(r"^\S+: error: ", "", text.replace(str(folder), ".")).replace("\n", " ")

    if code == 2:
        assert error.count("\n") == 1 and "error: " in error and (not out or "disk" in out), error
        return f"refused: {clean(error.strip())}"
    if code == 3:
        assert "diverged" in out and not error
        return "diverged"
    assert code == 0 and not error.strip() and "finished after" in out, (code, error)
    shown = ("warning", "note", "resume", "kept", "disk", "memory", "engine")
    lines = dict.fromkeys(clean(line) for line in out.splitlines() if line.startswith(shown))
    return ": ".join(["runs", *["; ".join(lines)] * bool(lines)])


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split(" | ")]


SECTIONS = {part.split("\n")[0]: [line for line in part.splitlines() if re.match(r"\| .*`", line)]
            for part in PAGE.read_text().split("\n## ")[1:]}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_command_gives_what_the_page_says(section, tmp_path):
    prepare(tmp_path)
    if "lies in them" in section:
        prepare_runs(tmp_path)
    found = {line: outcome(command_in(line), tmp_path) for line in SECTIONS[section]}
    assert {line: cells(line)[-1] for line in found} == found and found


def command_in(line):
    return re.search(r"`(.*?)`", line)[1]


def main():
    page = PAGE.read_text()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name).resolve()
        prepare(folder)
        prepare_runs(folder)
        for line in (line for lines in SECTIONS.values() for line in lines):
            first = line[: line.index("`", line.index("`") + 1) + 1]
            page = page.replace(f"{line}\n", f"{first} | {outcome(command_in(line), folder)} |\n")
    PAGE.write_text(page)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
