"""What happens when something is wrong: tries it, and writes tests/faults.md, a table of what was
tried and what came of it.

    python tests/faults.py             all of it (a quarter of an hour on two cores)
    python tests/faults.py --inputs    only bad input (a minute); the other table stays as it is

Bad input is tried in this process. Signals and kills are sent to processes of their own, each at a
place in its second round: in training, in evaluation, while the state is written, while the record
is written. Then the run is resumed. The result must be that of a run that nothing happened to, bit
for bit.
"""

import argparse
import contextlib
import importlib
import io
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from PIL import Image

HERE = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(HERE), str(HERE / "tests")]
PAGE = HERE / "tests" / "faults.md"
QUICK = ("--dataset shapes --limit 400 --split iid --clients 8 --model mnistnet --fraction 0.5 "
         "--rounds 4 --epochs 1 --lr 0.01 --eval-every 1 --device cpu --parallel 1")

INPUTS = {
    "Numbers": [],
    "Names": """
        --dataset cifar11, --dataset '', --dataset none.npz, --dataset leaf:nowhere, --split nobody,
        --split dirichlet, --split dirichlet --alpha 0.3, --transform polish, --model lstm,
        --precision fp8, --precision tf32, --engine warp, --device meta, --device '',
        --optimiser adam, --round 3, --rounds, surplus, --out '', --out file.txt,
        --out file.txt/run""",
    "Splits": """
        --clients 401, --clients 400, --client-test 0.6 --client-val 0.5, --client-test 1,
        --client-test 0.999, --client-val 0.999, --split shards --per-client 51,
        --split dirichlet-hsu --alpha 0 --clients 3, --split dirichlet-hsu --alpha 0.01,
        --split dirichlet-hsu --alpha 10000 --dataset unequal.npz,
        --split dirichlet-classes --alpha 0, --split dirichlet-classes --alpha 0.0001,
        --split dirichlet-classes --clients 41,
        --split classes --per-client 11, --split classes --clients 100 --per-client 10,
        --split lognormal --per-client 11, --split lognormal --clients 100,
        --split fedslr --client-test 0 --alpha 0, --split fedslr,
        --split fedslr --client-test 0 --client-val 0.1, --split semantic --limit 500,
        --split natural, --split semantic --clients 5, --split iid --alpha 0.1,
        --split dirichlet-hsu --per-client 2, --split own.py:shared --client-test 0,
        --split own.py:shared, --split own.py:allowed --client-test 0, --split own.py:allowed,
        --split own.py:allowed --client-test 0 --client-val 0.1, --split own.py:spoils,
        --limit 5, --limit 10001, --limit 9, --limit-test 50, --limit-test 5, --limit-test 2001,
        --test-share 0.2, --resize 24, --classes 10, --classes 9""",
    "Models": """
        --model cnn --transform tensorflow, --model cnn --dataset small.npz,
        --model vgg16 --dataset small.npz, --model cifarnet --dataset small.npz,
        --model vgg9 --dataset tiny.npz, --model mymodels.py,
        --transform tensorflow --dataset small.npz, --model tfcnn --dataset tiny.npz""",
    "Other methods": """
        superfed.py --mu inf, superfed.py --mu -1, fedslr.py --momentum 0.9, fedslr.py --eta-g 0,
        fedavgm.py --beta 1.5""",
    "Data files": [], "Folders of images, and LEAF": [], "Folders and what lies in them": []}
INPUTS = {section: [line.strip() for line in text.split(",")] if text else []
          for section, text in INPUTS.items()}
for flag, values in {
    **dict.fromkeys(("rounds", "epochs", "clients", "per-client", "limit", "limit-test", "resize",
                     "classes", "parallel", "eval-every"), "0 -1 1.5"),
    "batch-size": "-1 1.5 many", "lr": "0 -1 nan inf x", "lr-decay": "0 1.1 nan",
    "fraction": "-0.1 1.1 nan", "momentum": "-0.1 1.1", "weight-decay": "-1 inf",
    "alpha": "-1 inf nan", "client-test": "-0.1 1.1", "client-val": "-0.1 1.1",
    "test-share": "-0.1 1.1", "seed": "-1 4294967296 x", "split-seed": "-1",
}.items():
    INPUTS["Numbers"] += [f"--{flag} {value}" for value in values.split()]
SPLITS = """
import numpy as np
def shared(labels, classes, rng, args):
    return np.arange(210), np.arange(200, 400)
def allowed(labels, classes, rng, args):
    return np.arange(210), np.arange(200, 400)
allowed.overlap = True
def spoils(labels, classes, rng, args):
    labels[:] = 0
    return np.array_split(rng.permutation(len(labels)), args.clients)
"""


def images(n=40, test=20, size=8, classes=4, **changes):
    """A good data set in a .npz, but for the changes; None: without that array."""
    rng = np.random.default_rng(0)
    x, u = (rng.integers(0, 256, (m, size, size, 3), dtype=np.uint8) for m in (n, test))
    arrays = {"x_train": x, "y_train": np.arange(n) % classes,
              "x_test": u, "y_test": np.arange(test) % classes, **changes}
    return {name: array for name, array in arrays.items() if array is not None}


def typed(function):
    """Good images of another type."""
    given = images()
    return images(**{key: function(given[key]) for key in ("x_train", "x_test")})


def medmnist(**changes):
    """Its names of the arrays; labels are [n, 1]."""
    arrays = {}
    for part, n in (("train", 40), ("val", 10), ("test", 20)):
        given = images(n)
        arrays[f"{part}_images"] = given["x_train"]
        arrays[f"{part}_labels"] = given["y_train"][:, None].astype(np.uint8)
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


FILES = {  # name: (what is wrong, arrays)
    "a-types.npz": ("training images are floats, test images bytes",
                    images(x_train=np.zeros((40, 8, 8, 3), np.float32))),
    "b-flat.npz": ("images are rows of numbers", images(x_train=np.zeros((40, 192), np.uint8))),
    "c-first.npz": ("channels come first", images(x_train=np.zeros((40, 3, 8, 8), np.uint8))),
    "d-sizes.npz": ("training and test images differ in size",
                    images(x_test=np.zeros((20, 9, 9, 3), np.uint8))),
    "e-none.npz": ("no training images", images(x_train=np.zeros((0, 8, 8, 3), np.uint8),
                                                y_train=np.zeros(0, int))),
    "f-flat.npz": ("images without pixels", images(x_train=np.zeros((40, 0, 8, 3), np.uint8))),
    "g-half.npz": ("labels are fractions", images(y_train=np.arange(40) / 2)),
    "h-words.npz": ("labels are words", images(y_train=np.array(["cat"] * 40))),
    "i-minus.npz": ("a label is negative", images(y_train=np.arange(40) % 4 - 1)),
    "j-fewer.npz": ("a label is missing", images(y_train=np.arange(39) % 4)),
    "k-onehot.npz": ("labels are one-hot", images(y_train=np.eye(4, dtype=int)[np.arange(40) % 4])),
    "l-gap.npz": ("a class has no images", images(y_train=np.array([0, 1, 3] * 13 + [0]))),
    "l-gap.npz --classes 4": ("the same, and `--classes 4`", None),
    "l-said.npz": ("the same, and an array `classes`",
                   images(y_train=np.array([0, 1, 3] * 13 + [0]), **{"classes_": np.array(4)})),
    "m-new.npz": ("a test label that training has not", images(y_test=np.arange(20) % 4 + 2)),
    "m-lacks.npz": ("no test image is of a class", images(y_test=np.arange(20) % 3)),
    "n-untested.npz": ("no test images", images(x_test=np.zeros((0, 8, 8, 3), np.uint8),
                                                y_test=np.zeros(0, int))),
    "o-array.npz": ("no y_test", images(y_test=None)),
    "o-arrays.npz": ("neither x_test nor y_test", images(x_test=None, y_test=None)),
    "o-arrays.npz --test-share 0.25": ("the same, and `--test-share 0.25`", None),
    "p-object.npz": ("images are Python objects",
                     images(x_train=np.array([[1], [2, 3]] * 20, dtype=object))),
    "q-owner.npz --split natural": ("client numbers are fractions",
                                    images(client_train=np.arange(40) / 2)),
    "r-owner.npz --split natural": ("a client number is missing",
                                    images(client_train=np.arange(39))),
    "s-owner.npz --split natural": ("client numbers have a gap",
                                    images(client_train=np.arange(40) % 3 * 2)),
    "s-owners.npz --split natural": ("test images are of other clients", images(
        client_train=np.arange(40) % 4, client_test=np.arange(20) % 4 + 4)),
    "t-few.npz --split natural": ("every client has one image", images(client_train=np.arange(40))),
    "cifar100.npz": ("named cifar100, but it is not", images()),
    "u-one.npz": ("one class", images(classes=1)),
    "v-alike.npz": ("all images are alike", images(x_train=np.full((40, 8, 8, 3), 9, np.uint8),
                                                   x_test=np.full((20, 8, 8, 3), 9, np.uint8))),
    "w-deep.npz": ("images are uint16", typed(lambda x: x.astype(np.uint16) * 257)),
    "w-float.npz": ("images are float64", typed(lambda x: x / 255)),
    "w-int.npz": ("images are int64", typed(lambda x: x.astype(np.int64))),
    "w-nan.npz": ("a pixel is NaN", spoilt(np.nan)),
    "w-inf.npz": ("a pixel is infinite", spoilt(np.inf)),
    "x-dead.npz --transform normalize": ("a channel is constant in training alone", dead(98)),
    "y-med.npz": ("MedMNIST's arrays", medmnist()),
    "y-med.npz --client-val 0.2": ("MedMNIST's arrays, and `--client-val 0.2`", None),
    "y-multi.npz": ("MedMNIST's multi-label", medmnist(train_labels=np.zeros((40, 14), int))),
}
FOLDERS = {  # what it is: command. prepare makes them
    "`train/CLASS/*.png` and `test/CLASS/*.png`": "pets", "`CLASS/*.png`": "pets/train",
    "the same, and `--test-share 0.25`": "pets/train --test-share 0.25",
    "images of unequal size": "unequal", "the same, and `--resize 8`": "unequal --resize 8",
    "a class without images": "hollow", "a class that only test/ has": "strange",
    "half an image": "cut", "no folder of images": "nothing", "LEAF's files, as a folder": "leaf",
    "LEAF's files": "leaf:leaf --split natural",
    "LEAF's files without an image of a class": "leaf:gap --split natural",
    "the same, and `--classes 4`": "leaf:gap --split natural --classes 4",
    "LEAF's files of text": "leaf:words --split natural", "no files of LEAF's": "leaf:pets",
}


def prepare(folder):
    """The files that the inputs name."""
    for name, (_, arrays) in FILES.items():
        if arrays:
            arrays = {key.rstrip("_"): array for key, array in arrays.items()}
            np.savez(folder / name.split()[0], **arrays)
    np.savez(folder / "small.npz", **images())
    np.savez(folder / "tiny.npz", **images(size=1))
    labels = np.repeat([0, 1, 2, 3], (300, 60, 30, 10))
    np.savez(folder / "unequal.npz", **images(400, y_train=labels))
    (folder / "empty.npz").write_bytes(b"")
    (folder / "text.npz").write_text("no zip")
    whole = (folder / "small.npz").read_bytes()
    (folder / "cut.npz").write_bytes(whole[: len(whole) // 2])
    middle = bytes(b ^ 255 for b in whole[3000:3100])
    (folder / "damaged.npz").write_bytes(whole[:3000] + middle + whole[3100:])
    (folder / "file.txt").write_text("a file")
    (folder / "own.py").write_text(SPLITS)
    for name in ("pets", "unequal", "hollow", "strange", "cut"):
        for part, n in (("train", 40), ("test", 20)):
            for i, x in enumerate(images(n)["x_train"]):
                place = folder / name / part / "abcd"[i % 4]
                place.mkdir(parents=True, exist_ok=True)
                x = x.repeat(2, 0) if name == "unequal" and i == 5 else x
                Image.fromarray(x).save(place / f"{i:02}.png")
    (folder / "hollow" / "train" / "e").mkdir()
    (folder / "strange" / "test" / "e").mkdir()
    half = folder / "cut" / "train" / "a" / "00.png"
    half.write_bytes(half.read_bytes()[:50])
    (folder / "nothing").mkdir()
    for name in ("leaf", "gap", "words"):
        for part in ("train", "test"):
            given = images()
            x = given["x_train"][..., 0].reshape(4, 10, 64) / 256
            y = np.where(given["y_train"] == 2, 1 if name == "gap" else 2, given["y_train"])
            data = {f"f{k}": {"x": x[k].tolist(), "y": y[10 * k : 10 * k + 10].tolist()}
                    for k in range(4)}
            if name == "words":
                data["f1"]["x"] = ["to be or not to be"] * 10
            (folder / name / part).mkdir(parents=True)
            content = {"users": [*data], "num_samples": [10] * 4, "user_data": data}
            (folder / name / part / "all.json").write_text(json.dumps(content))


def attempt(line, folder, out=None):
    """Runs `[FILE.py] FLAGS` in this process, in the folder: (exit code, stdout, stderr)."""
    words = shlex.split(line)
    module = words.pop(0).removesuffix(".py") if words and words[0].endswith(".py") else "fedavg"
    before = [] if out is None else ["--out", str(out)]
    clients = ["--clients", "8"] if "--split natural" in line or "--split semantic" in line else []
    quick = QUICK.replace("--clients 8 ", "") if clients else QUICK
    if re.search(r"\.npz|--dataset (?!shapes)", line):  # these have 40 images
        quick = quick.replace("--limit 400 ", "")
    quick = shlex.split(quick)
    stdout, stderr, here, code = io.StringIO(), io.StringIO(), os.getcwd(), 0
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            importlib.import_module(module).main([*quick, *before, *words])
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException as problem:  # what must not happen
        code = f"traceback: {problem!r}"
    finally:
        os.chdir(here)
    return code, stdout.getvalue(), stderr.getvalue()


def broken_folders(folder):
    """(what is wrong, command) where a run's folder is in order but for one thing."""
    sound = folder / "sound"
    attempt("", folder, sound)

    def copy(name, change):
        shutil.copytree(sound, folder / name)
        change(folder / name)
        return str(folder / name)

    def flip(path):
        data = bytearray(path.read_bytes())
        for i in range(len(data) // 2, len(data) // 2 + 20):
            data[i] ^= 255
        path.write_bytes(data)

    def change_state(**changes):
        def change(out):
            saved = torch.load(out / "state.pt", weights_only=True)
            saved |= {name: of(saved[name]) for name, of in changes.items()}
            torch.save(saved, out / "state.pt")
        return change

    state, record = "state.pt", "result.json"
    yield "nothing there", "--resume --out new"
    for what, flags in (("another learning rate", "--lr 0.02"), ("more rounds", "--rounds 3"),
                        ("another seed", "--seed 1"), ("another split", "--split-seed 1"),
                        ("another batch size", "--batch-size 5"),
                        ("another model", "--model cifarnet")):
        yield f"the state is of {what}", f"{flags} --resume --out {sound}"
    fewer = copy("m1", lambda out: None)
    yield "the state is of fewer rounds", f"--rounds 5 --resume --out {fewer}"
    yield "the state is another file's", f"baselines.py --method fedprox --resume --out {sound}"
    for what, name, change in (
        ("the state is empty", "s1", lambda out: (out / state).write_bytes(b"")),
        ("the state is cut off", "s2",
         lambda out: (out / state).write_bytes((out / state).read_bytes()[:5000])),
        ("bytes of the state are damaged", "s3", lambda out: flip(out / state)),
        ("the state is text", "s4", lambda out: (out / state).write_text("text")),
        ("the state is a folder", "s5",
         lambda out: ((out / state).unlink(), (out / state).mkdir())),
        ("the state is of another version of common.py", "s6",
         change_state(environment=lambda e: {**e, "sources": {**e["sources"], "common.py": "0"}})),
        ("the state is of other images", "s7", change_state(data=lambda s: "0" * 16)),
        ("the state is of a split that was drawn otherwise", "s8",
         change_state(split=lambda s: "0" * 16)),
        ("the state is gone, the record is finished", "s9", lambda out: (out / state).unlink()),
        ("the state is that of two processes", "s10",
         change_state(environment=lambda e: {**e, "processes": 2})),
        ("the record is empty", "r1", lambda out: (out / record).write_text("")),
        ("the record is cut off", "r2",
         lambda out: (out / record).write_text((out / record).read_text()[:100])),
        ("the record is other JSON", "r3", lambda out: (out / record).write_text("[]")),
        ("the record is gone", "r4", lambda out: (out / record).unlink()),
        ("the record is an empty object", "r5", lambda out: (out / record).write_text("{}")),
        ("a half-written state lies beside the state", "p1",
         lambda out: (out / "state.pt.part").write_text("half")),
    ):
        yield what, f"--resume --out {copy(name, change)}"
    yield "an earlier run lies there", f"--out {copy('e1', lambda out: None)}"
    full = folder / "full"
    full.mkdir()
    (full / "state.pt.part").symlink_to("/dev/full")
    yield "the disk is full when the state is first written", f"--out {full}"


def outcome(code, out, err, folder):
    """What came of it, in words; and whether it is as it should be: one line and nothing else, or a
    run that ends."""
    def clean(text):
        text = text.replace(str(folder) + "/", "").replace(str(folder), ".")
        return re.sub(r"^\S+: error: ", "", text)

    shown = ("warning", "note", "resume", "kept", "disk", "memory", "engine")
    lines = [line for line in out.splitlines() if line.startswith(shown)]
    if code == 2:
        one = err.count("\n") == 1 and "error: " in err and (not out or "disk" in out)
        return "refused: " + clean(err.strip()), one
    if code == 3:
        return "diverged", "diverged" in out and not err
    words = "; ".join(dict.fromkeys(map(clean, lines)))
    right = code == 0 and not err.strip() and "finished after" in out
    return f"runs{': ' if words else ''}{words}", right


def try_inputs(folder):
    """[(section, input, what happens, whether that is right)]"""
    rows = []
    prepare(folder)
    for section, lines in INPUTS.items():
        cases = [(f"`{line}`", line) for line in lines]
        if section == "Data files":
            cases = [(what, f"--dataset {name}".replace("cifar100.npz", "cifar100 --data-dir ."))
                     for name, (what, _) in FILES.items()]
            cases += [(f"{what} instead of a .npz", f"--dataset {name}.npz") for what, name in (
                ("an empty file", "empty"), ("text", "text"), ("half a file", "cut"),
                ("damaged bytes", "damaged"))]
        if section == "Folders of images, and LEAF":
            cases = [(what, f"--dataset {name}") for what, name in FOLDERS.items()]
        if section == "Folders and what lies in them":
            cases = broken_folders(folder)
        for i, (what, line) in enumerate(cases):
            out = None if "--out" in line else folder / "runs" / f"{section[:4]}-{i}"
            result, right = outcome(*attempt(line, folder, out), folder)
            rows.append((section, what, result, right))
    return rows


# Signals and kills

# One method of each kind: one model; rows that are kept; two passes in a round; rows, and a vector
# of the server
KINDS = {**{name: f"{name}.py {QUICK}" for name in ("fedavg", "superfed", "fedslr")},
         "scaffold": f"baselines.py --method scaffold {QUICK}"}
SIGNALS = {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM,
           "the terminal is closed": getattr(signal, "SIGHUP", signal.SIGTERM),
           "kill -9": getattr(signal, "SIGKILL", signal.SIGTERM)}
POINTS = ("in training", "in evaluation", "while the state is written",
          "while the record is written")


def child(point, number, line):
    """Runs a command in which the signal comes at that place in round 2."""
    import common
    import fl.run

    if number == SIGNALS["the terminal is closed"]:
        signal.signal(number, signal.SIG_DFL)  # nohup, if it started this, has set it aside
    module, *argv = shlex.split(line)
    module = importlib.import_module(module.removesuffix(".py"))
    now = {"round": 0, "sent": False}

    def send():
        if now["round"] == 2 and not now["sent"]:
            now["sent"] = True
            os.kill(os.getpid(), number)

    def before(owner, name, do):
        usual = getattr(owner, name)

        def watched(*args, **named):
            do(*args)
            return usual(*args, **named)

        setattr(owner, name, watched)

    before(common.Federation, "sample", lambda fed, t: now.update(round=t + 1))
    if point == "in training":
        before(common.Federation, "batch", lambda *_: send())
    elif point == "in evaluation":
        before(common.Federation, "evaluate", lambda *_: send())
    else:
        write = fl.run.Run.write
        file = "state.pt" if "state" in point else "result.json"

        def in_two_parts(run, path, put, **named):
            def half(whole):
                if now["round"] == 2 and path.name == file:
                    whole.write(b"half")
                    whole.flush()
                    send()
                    whole.seek(0)
                put(whole)

            return write(run, path, half, **named)

        fl.run.Run.write = in_two_parts
    module.main(argv)


def try_kills(folder, kinds=KINDS, signals=SIGNALS, points=POINTS):
    """[(kind, signal, place, what happens, whether nothing was lost)]"""
    cases = [(kind, name, point, folder / kind / f"{name} {point}".replace(" ", "-"))
             for kind in kinds for name in signals for point in points]

    def start(case):
        kind, name, point, out = case
        command = [sys.executable, __file__, "--child", point, str(int(SIGNALS[name])),
                   f"{KINDS[kind]} --out {out}"]
        return subprocess.run(command, capture_output=True, text=True, timeout=600)

    with ThreadPoolExecutor(os.cpu_count()) as together:
        ends = list(together.map(start, cases))
    rows, want = [], {}
    for (kind, name, point, out), done in zip(cases, ends):
        if kind not in want:
            attempt(KINDS[kind], folder, folder / kind / "whole")
            whole = torch.load(folder / kind / "whole" / "state.pt", weights_only=True)
            want[kind] = whole["state"]
        try:
            status = json.loads((out / "result.json").read_text())["status"]
            rounds = len(torch.load(out / "state.pt", weights_only=True)["history"])
            code, *_ = attempt(KINDS[kind] + " --resume", folder, out)
            have = torch.load(out / "state.pt", weights_only=True)["state"]
            same = all(torch.equal(z, have[key]) if torch.is_tensor(z) else z == have[key]
                       for key, z in want[kind].items())
            ended = done.returncode != 0 and "Traceback" not in done.stderr
            right = ended and code == 0 and same and rounds >= 1
            left = (f"record: {status}; resumed from round {rounds}; result "
                    f"{'the same' if same else 'ANOTHER'}")
        except Exception as problem:
            right, left = False, f"LOST: {problem!r} {done.stderr[-300:]}"
        rows.append((kind, name, point, f"exit code {done.returncode}; {left}", right))
    return rows


def tables(rows, kills):
    text = [f"""# What happens when something is wrong

`python tests/faults.py` makes this page. It tries {len(rows)} bad or unusual inputs, and signals
and kills at four places of a run.

## Input

Every command is `python fedavg.py {QUICK}`, with the flags in the table added (without `--limit`
for other data, without `--clients` for the splits natural and semantic). The files' names are in
tests/faults.py. A refused input gives one line on stderr, nothing on stdout, and exit code 2.

Under `torchrun` one process of all says the line. Then torchrun adds about 40 lines of its own,
which end with `ChildFailedError`: it does so for every process whose exit code is not 0, and has no
option against it. The line with `error:` above them is ours.
"""]
    for section in INPUTS:
        text += [f"### {section}\n", "| input | what happens |", "|---|---|"]
        text += [f"| {what} | {result} |".replace("\n", " ")
                 for part, what, result, _ in rows if part == section] + [""]
    return "\n".join(text) + "\n" + kills


def kill_table(rows):
    text = ["## Signals and kills", "", "Each comes in round 2 of 4. Then the run is resumed. "
            '"The same" means: the same weights as without it, bit for bit.', "",
            "| methods | what comes | when | what happens |", "|---|---|---|---|"]
    alike = {}  # methods with which the same happens
    for kind, *what, _ in rows:
        alike.setdefault(tuple(what), []).append(kind)
    text += [f"| {', '.join(kinds)} | {' | '.join(what)} |" for what, kinds in alike.items()]
    return "\n".join(text) + "\n"


def main(argv):
    if argv[:1] == ["--child"]:
        return child(argv[1], int(argv[2]), argv[3])
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--inputs", action="store_true", help="only bad input")
    args = p.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name).resolve()
        rows = try_inputs(folder)
        old = PAGE.read_text() if PAGE.exists() else ""
        kills = [] if args.inputs else try_kills(folder)
        wrong = [row[:-1] for row in (*rows, *kills) if not row[-1]]
        table = kill_table(kills) if kills else old[old.find("## Signals and kills") :]
        PAGE.write_text(tables(rows, table))
    for row in wrong:
        print("WRONG ", *row, sep=" | ")
    print(f"{len(rows)} inputs, {len(kills)} signals and kills, {len(wrong)} wrong; see "
          f"{PAGE.relative_to(HERE)}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
