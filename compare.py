"""Compares methods on the same images and split, with the same model, initial weights, sampled
clients, rounds, epochs, minibatches and rate. docs/compare.md lists the exceptions.

    python compare.py --methods fedavg,fedper,docs/lastlayer.py --seeds 3 --out runs/three
    python compare.py --methods all --jobs 2                 (make compare: the embedded images)
    python compare.py --methods fedavg,a=fedprox,b=fedprox --set a.mu=0.01 --set b.mu=1

A method is one of this repository (see --methods), or a file of your own with arguments(argv) and
main(argv). docs/compare.md has the rest.
"""

import argparse
import contextlib
import csv
import hashlib
import inspect
import io
import itertools
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

import baselines
import common
from records import FREE, numbers

HERE = pathlib.Path(__file__).resolve().parent

# What all methods share unless the command line says otherwise. All other flags of the groups
# "data" and "training" of `python fedavg.py --help` are shared, too, with their defaults.
SHARED = dict(dataset="shapes", split="shards", clients=20, per_client=4, client_val=0.1,
              client_test=0.2, model="cnn", transform="normalize", fraction=0.5, rounds=30,
              epochs=1, batch_size=10, lr=0.02, momentum=0.9, eval_every=5)
BY_DATASET = {"shapes": dict(lr_decay=0.95)}  # for 30 rounds; after 200 no rate would be left

# A file, and the flags that make the method. --target without a number lets FedAvg run on.
METHODS = {
    "fedavg": "fedavg.py --target", "fedavgm": "fedavgm.py",
    "superfed-mm": "superfed.py --mix model", "superfed-lm": "superfed.py --mix layer",
    "psinet": "psinet.py", "fedslr": "fedslr.py", "persfl": "persfl.py",
    **{name: f"baselines.py --method {name}" for name in baselines.METHODS},
    "fedma": "baselines.py --method fedma --common-start",  # from the w_0 of all others
}


def plain(shared):
    """SGD without momentum, at 5/2 of the others' rate if they have momentum. 5/2 is our choice,
    between 1 and 10: with momentum .9 a step can grow to 10 times eta."""
    return {"momentum": 0, "lr": round(shared.lr * (5 / 2 if shared.momentum else 1), 6)}


def everybody(shared):
    """All clients in every round, but fewer rounds, so that as many clients are trained in all."""
    rounds, every = (max(1, round(number * shared.fraction))
                     for number in (shared.rounds, shared.eval_every))
    return {"fraction": 1, "rounds": rounds, "eval_every": every}


# What a method has of its own although the others share it: the settings, and why.
FROM_MEMORY = "the paper's clients, from memory, have no momentum"
OWN = {
    "fedslr": (plain, "the authors' clients have no momentum"),
    "scaffold": (plain, FROM_MEMORY),
    "per-fedavg": (plain, FROM_MEMORY),
    "centralised": (lambda shared: plain(shared) | everybody(shared),
                    "with the others' momentum and rate it learns almost nothing; it has all "
                    "clients' images in every round"),
    "fedavgm": (lambda shared: plain(shared) | {"beta": 0.9},
                "momentum is at the server, not at the clients"),
    "pfedme": (lambda shared: plain(shared) | {"lr": 0.067, "theta_lr": plain(shared)["lr"]},
               f"{FROM_MEMORY}; lr = 1/lambda: in the first round a step sets w_k to theta_k; "
               "theta_lr is the rate of SGD"),
    "fedma": (lambda shared: {"rounds": max(1, round(shared.rounds / 2))},
              "in a round it trains once for each layer, where others train once"),
    "persfl": (lambda shared: plain(shared) | everybody(shared) | {"distill_epochs": 2},
               "no momentum, as in the file; all clients take part in every round; distillation "
               "comes on top, in the last one, with two epochs in place of the file's five"),
}
RATES = ("lr", "momentum")  # what --set may change although it is shared
OURS = ("seed", "out", "resume", "plot")  # what this program says to each run


class Method(NamedTuple):
    name: str
    method: str  # one of METHODS, or a file as it was given
    file: pathlib.Path
    argv: list  # its flags but --seed and --out
    args: dict  # what the file makes of them


# --------------------------------------------------------------------------------------------------
# What is to be trained. Errors in the command line are refused here; the others by the run.


def arguments(argv):
    """This file's own arguments, and the shared settings."""
    about, examples, *_ = __doc__.split("\n\n")
    equal = (f"Settings that all methods share: {' '.join(flags(SHARED))}; for shapes also "
             f"{' '.join(flags(BY_DATASET['shapes']))}. These are flags, as are the others of the "
             "groups data, training and running in python fedavg.py --help.")
    equal = textwrap.fill(equal, 100, break_on_hyphens=False)
    p = common.Parser(description=about, epilog=f"{examples}\n\n{equal}", allow_abbrev=False,
                      formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--methods", required=True, metavar="A,B,...",
                   help=f"{', '.join(METHODS)}, all (of these), or a file of your own "
                        "(docs/extend.md); NAME=METHOD: under another name, to take part with "
                        "several settings")
    p.add_argument("--seeds", type=common.positive_int, default=3,
                   help="how many: 0, 1, 2, ... (default: 3); they share one split")
    p.add_argument("--set", action="append", default=[], metavar="NAME.PARAMETER=VALUE",
                   help="as fedprox.mu=0.1")
    p.add_argument("--jobs", type=common.positive_int, default=1,
                   help="runs at a time; on a CPU with one thread each")
    p.add_argument("--out", default="runs/compare",
                   help="folder of all that is written (default: runs/compare)")
    args, rest = p.parse_known_args(argv)
    if not args.out:
        p.error("--out is empty; name a folder, or leave it out")
    for word in rest:
        if word.partition("=")[0] in ("--seed", "--resume", "--plot"):
            p.error(f"{word} is not for comparisons: --seeds says how many, runs are resumed, and "
                    "figures are drawn")
    shared = common.parser(__doc__, **SHARED)
    if unknown := shared.parse_known_args(rest)[1]:
        p.error(f"unrecognized arguments: {' '.join(unknown)}; a method's own parameter is --set "
                "NAME.PARAMETER=VALUE")
    return args, common.parse(shared, BY_DATASET, rest)


def flags(settings):
    """{"batch_size": 20, "lambda_": .1, "augment_once": True, "limit": None, "target": []} ->
    ["--batch-size=20", "--lambda=0.1", "--augment-once"]"""
    given = {name: value for name, value in settings.items()
             if value is not None and value is not False and value != []}
    return [flag(name) if value is True else f"{flag(name)}={value}"
            for name, value in given.items()]


def flag(name):
    return f"--{name.strip('_').replace('_', '-')}"


def functions(file):
    """Returns a method's arguments and main."""
    module = common.load_file(file)
    found = [getattr(module, name, None) for name in ("arguments", "main")]
    if not all(inspect.isfunction(f) and inspect.signature(f).parameters for f in found):
        common.refuse(f"--methods: {file} must have arguments(argv) and main(argv); see "
                      "docs/extend.md")
    return found


def parsed(arguments, argv, what, file):
    """Returns what a method's arguments(argv) makes of its flags; its refusal becomes ours."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            made, why = arguments(argv), ""
        except SystemExit as end:
            own = end.code if isinstance(end.code, str) else "its arguments(argv) ends"
            made, why = None, said.getvalue().partition("error: ")[2].strip() or own
        except Exception as problem:  # whatever the file does
            line = common.engine.first_line(problem)
            made, why = None, f"its arguments(argv) fails: {type(problem).__name__}: {line}"
    if not why and not isinstance(made, argparse.Namespace):
        why = "its arguments(argv) does not return what common.parse returns; see docs/extend.md"
    if why:
        why = why.replace("(see --help)", f"(see {shell([str(file), '--help'])})")
        common.refuse(f"{what}: {why}")
    return json.loads(json.dumps(vars(made), default=str))  # as a record has them


def shell(argv):
    """The command for a shell. A file from elsewhere is told where common.py is."""
    elsewhere = pathlib.Path(argv[0]).resolve().parent != HERE
    path = f"PYTHONPATH={shlex.quote(str(HERE))} " if elsewhere else ""
    return f"{path}python {shlex.join(argv)}"


def named(args):
    """(name, method) for each of --methods: fedprox, strong=fedprox, path/to/mine.py, ..."""
    for word in filter(None, map(str.strip, args.methods.split(","))):
        if given := re.fullmatch(r"([^\W_][\w-]*)=(.+)", word):  # it names a folder, too
            yield given.groups()
        elif word == "all":
            yield from ((method, method) for method in METHODS)
        else:
            yield word if word in METHODS else pathlib.Path(word).stem, word


def plan(args, shared):
    """The Methods that --methods and --set name."""
    sets, found = [], {}
    for word in args.set:
        if not (given := re.fullmatch(r"([^.=]+)\.([^.=]+)(=.*)?", word, re.S)):
            common.refuse(f"--set {word}: say NAME.PARAMETER=VALUE")
        name, parameter, value = given.groups("")
        sets.append((name, parameter.replace("_", "-") + value))
    no_part = (*OURS, *common.unused(shared.split))
    settings = {name: value for name, value in vars(shared).items() if name not in no_part}
    for name, method in named(args):
        if method in METHODS:
            file, *words = METHODS[method].split()
            file = HERE / file
        elif method.endswith(".py"):
            file, words = pathlib.Path(method).resolve(), []
        else:
            common.refuse(f"--methods: there is no method {method}; use a file.py, or one of "
                          f"{', '.join(METHODS)}")
        if name in found or name in METHODS and name != method:
            common.refuse(f"--methods: the name {name} is taken; give {method} another one: "
                          f"NAME={method}")
        function, _ = functions(file)
        wanted = settings | (OWN[method][0](shared) if method in OWN else {})
        mine = [word for whose, word in sets if whose == name]
        for word in mine:
            refuse_foreign(name, method, word, words, settings)
        argv = [*words, *flags(wanted), *(f"--{word}" for word in mine)]
        what = f"--methods: {name}" + f", --set {name}.{', '.join(mine)}" * bool(mine)
        made = parsed(function, argv, what, file)
        # of the shared settings --set changes RATES alone: refuse_foreign
        own = {word.partition("=")[0].replace("-", "_") for word in mine}
        for key in settings:
            if key not in own and made.get(key) != wanted[key]:
                way_out = f"; to give it to all: {flag(key)} {made.get(key)}"
                common.refuse(f"--methods: {file} makes {made.get(key)} of {flag(key)} "
                              f"{wanted[key]}, which all methods share"
                              + way_out * (wanted[key] is None))
        if made.get("target"):
            common.refuse(f"--methods: {file} stops at an accuracy (target={made['target']}), "
                          f"others don't; use --set {name}.target without a value")
        found[name] = Method(name, method, file, argv, made)
    if not found:
        common.refuse("--methods is empty")
    parameters = [(name, word.partition("=")[0]) for name, word in sets]
    for (name, word), parameter in zip(sets, parameters):
        if name not in found:
            common.refuse(f"--set {name}.{word}: --methods has no {name}; its names are "
                          f"{', '.join(found)}")
        if parameters.count(parameter) > 1:
            common.refuse(f"--set {name}.{word}: it is set twice")
    return list(found.values())


def refuse_foreign(name, method, word, words, settings):
    """Refuses --set NAME.WORD if the parameter is not the method's own; words: the flags that make
    the method."""
    key = word.partition("=")[0]
    if f"--{key}" in words:
        common.refuse(f"--set {name}.{word}: {key} is what makes the method {method}")
    if key in OURS:
        common.refuse(f"--set {name}.{word}: --{key} is this program's own; see python compare.py "
                      "--help")
    if key.replace("-", "_") in settings and key not in RATES:
        common.refuse(f"--set {name}.{word}: all methods share {key}; use --{key}")


def check_folder(out):
    """Refuses to write among this repository's own files, but under results/."""
    inside = [out.resolve(), *out.resolve().parents]
    if HERE in inside and HERE / "results" not in inside and shutil.which("git"):
        files = ["git", "-C", HERE, "ls-files", "--", inside[0]]
        if subprocess.run(files, capture_output=True).stdout:
            common.refuse(f"--out {out} holds files of this repository; use another folder, or "
                          "results or one below it")


# --------------------------------------------------------------------------------------------------
# Training


def record(method, folder):
    """The record that a folder has of a method, or None. Refuses one of other settings."""
    try:
        found = json.loads((folder / "result.json").read_text())
        then, _, sources = found["args"], found["status"], found["environment"]["sources"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as problem:
        common.refuse(f"{folder}/result.json can't be read as a record ({type(problem).__name__}); "
                      "move it elsewhere")
    then, no_part = common.renamed(then), (*FREE, *common.unused(method.args["split"]))
    earlier = next(iter(sources), "") == method.file.name  # a version that had other flags, perhaps
    for name in {**method.args, **({} if earlier else then)}:
        was, now = then.get(name), method.args.get(name)
        unused = name not in then and not now  # a flag that the file got later
        if was != now and not unused and name not in (*no_part, "seed", "device"):
            common.refuse(f"{folder} has a record with {flag(name)} {was}, now it is {now}; use "
                          "another NAME, or another --out")
    return found


def changed(method, record):
    """What has changed since a record was made, in words: the numbers of a method of this
    repository, files of a user's own, or any source file of a run that is to be resumed."""
    then, own = record["environment"], [] if method.method in METHODS else [method.file]
    own += [pathlib.Path(name.rpartition(":")[0])
            for name in (method.args["model"], method.args["split"]) if ".py:" in name]
    own += [pathlib.Path(method.args["init"])] if method.args.get("init") else []
    files = {path.name: path for path in own if path.name in then["sources"]}
    if record["status"] not in ("finished", "diverged"):
        files = {**{name: HERE / name for name in then["sources"]}, method.file.name: method.file,
                 **files}
    found = [name for name, path in files.items() if not path.exists()
             or hashlib.sha256(path.read_bytes()).hexdigest() != then["sources"].get(name)]
    if then.get("numbers", 0) != numbers(record["algorithm"]):
        found.append(f"the numbers of {record['algorithm']}")
    return found


class Children:
    """The processes that train. After stop() there are none, and none is started."""

    def __init__(self):
        self.all, self.stopped, self.lock = [], False, threading.Lock()

    def start(self, command, **options):
        with self.lock:  # so that no child is started unseen while stop() ends the others
            if self.stopped:
                raise CancelledError
            self.all.append(subprocess.Popen(command, **options))
            return self.all[-1]

    def stop(self):
        with self.lock:
            self.stopped = True
            for child in self.all:
                child.terminate()


def train(argv, one_thread, children):
    """A run in a process of its own: its exit code and the last line of what it complained of."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    one = {"OMP_NUM_THREADS": "1"} if one_thread else {}
    child = children.start([sys.executable, *argv, *["--parallel=1"] * one_thread],
                           stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                           env={**os.environ, "PYTHONPATH": path, **one})
    said = child.communicate()[1].strip().splitlines()
    if child.returncode < 0 or not said:  # below 0: a signal ended it, which no line explains
        said = [f"exit code {child.returncode}"]
    return child.returncode, said[-1].rpartition("error: ")[2]


def stop(number, _):
    print("stopped; the same command goes on from here", file=sys.stderr)
    sys.exit(128 + number)


def train_all(methods, args, shared):
    """Trains what is missing, --jobs runs at a time. Returns {method: a record for each seed}."""
    todo, children = {}, Children()
    # once, before several runs would: downloads, and refusals
    data = common.images_for(shared, common.stream(shared.split_seed, "split", 1))
    split = common.split_clients(data, shared, common.stream(shared.split_seed, "split"))
    fingerprints = data.fingerprint(), split.fingerprint()
    places = {(method.name, seed): (method, pathlib.Path(args.out) / method.name / str(seed))
              for seed in range(args.seeds) for method in methods}
    for (name, seed), (method, folder) in places.items():
        found = record(method, folder)
        stale = found and changed(method, found)
        if found and not stale and split_of(found) != fingerprints:
            same = found["data"]["fingerprint"] == fingerprints[0]
            common.refuse(f"{folder} has a record of {'another split' if same else 'other images'} "
                          f"than {shared.dataset} has now; use another --out")
        if stale:
            common.say(f"{name}, seed {seed}: {', '.join(stale)} changed; trained anew, the record "
                       "becomes result.previous.json")
        if stale or not found or found["status"] not in ("finished", "diverged"):
            argv = [str(method.file), *method.argv, f"--seed={seed}", f"--out={folder}"]
            todo[name, seed] = argv + ["--resume"] * (not stale)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    with ThreadPoolExecutor(args.jobs) as pool:
        try:
            one_thread = args.jobs > 1 and shared.device == "cpu"  # on a GPU clients train at once
            runs = {pool.submit(train, argv, one_thread, children): run
                    for run, argv in todo.items()}
            for done in tqdm(as_completed(runs), total=len(runs), unit="run", disable=None):
                (name, seed), (code, said) = runs[done], done.result()
                if code not in (0, 3):  # 3: diverged, which is a result
                    command = "" if code == 2 else f" ({shell(todo[name, seed])})"
                    common.refuse(f"{name}, seed {seed}: {said}{command}")
                method, folder = places[name, seed]
                found = record(method, folder)
                if not found:
                    common.refuse(f"{method.file} has trained nothing; does it end with  "
                                  'if __name__ == "__main__": main()  ?')
                if found["status"] not in ("finished", "diverged"):
                    common.refuse(f"{name}, seed {seed}: {method.file} has left the loop over "
                                  "run.rounds before its end; see docs/extend.md")
                common.say(f"{name}, seed {seed}: {'diverged' if code else 'done'}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            children.stop()
            raise
    return {method.name: [record(*places[method.name, seed]) for seed in range(args.seeds)]
            for method in methods}


def split_of(record):
    """The fingerprints of its images and split."""
    return record["data"]["fingerprint"], record["split"]["fingerprint"]


# --------------------------------------------------------------------------------------------------
# The table and the figures

MEASURES = {  # title: of a finished run's record
    "global": lambda r: r["final"].get("global", {}).get("top1"),
    "personal": lambda r: r["final"].get("personal", {}).get("mean"),
    "worst tenth": lambda r: r["final"].get("personal", {}).get("worst_decile"),
    "validation": lambda r: r["final"].get("personal", {}).get("val_mean"),
    "MB sent": lambda r: (r["bytes_up"] + r["bytes_down"]) / 1e6,
    "s a round": lambda r: r["seconds_per_round"],
}
STYLES = [{"color": f"C{i}", "linestyle": style} for style in ("-", "--", ":", "-.")
          for i in range(7)]  # common.drawing has 7 colours


def table(records):
    """Returns a row for each method, the best personal models first: its name, seeds, how many
    diverged, and of each measure (mean, std) or None."""
    rows = []
    for name, runs in records.items():
        finished = [r for r in runs if not r["diverged"]]
        row = {"method": name, "seeds": len(runs), "diverged": len(runs) - len(finished)}
        for title, measure in MEASURES.items():
            values = [value for value in map(measure, finished) if value is not None]
            std = float(np.std(values, ddof=1)) if len(values) > 1 else None
            row[title] = (float(np.mean(values)), std) if values else None
        rows.append(row)
    return sorted(rows, key=lambda row: row["personal"][0] if row["personal"] else -1,
                  reverse=True)


def lines(rows):
    """The table in Markdown, without columns that are empty."""
    titles = [title for title in MEASURES if any(row[title] for row in rows)]
    yield f"| {' | '.join(['method', *titles])} |"
    yield "|" + "---|" * (len(titles) + 1)
    for row in rows:
        diverged = f" ({row['diverged']} of {row['seeds']} diverged)" * (row["diverged"] > 0)
        cells = [row["method"] + diverged]
        for title in titles:
            mean, std = row[title] or (None, None)
            digits = {"MB sent": 1, "s a round": 2}.get(title, 3)
            spread = f" ± {std:.3f}" if std is not None and digits == 3 else ""
            cells.append("" if mean is None else f"{mean:.{digits}f}{spread}")
        yield f"| {' | '.join(cells)} |"


def about_split(record):
    """Its clients, images, classes and fingerprint, in words."""
    split = record["split"]
    classes = f" of {common.spread(split['classes'])} classes" if "classes" in split else ""
    return (f"{split['clients']} clients with {common.spread(split['sizes'])} training images"
            f"{classes} (least/mean/most), fingerprint {split['fingerprint']}")


def write_table(rows, records, methods, shared, args, out):
    """compare.md and compare.csv."""
    some = next(iter(records.values()))[0]
    no_part = (*FREE, *common.unused(shared.split), "seed", "device")
    settings = {name: value for name, value in vars(shared).items() if name not in no_part}
    notes = [f"- {m.name} is {m.method}." for m in methods if m.name != m.method]
    for m in methods:
        if m.method in OWN:
            settings_of, why = OWN[m.method]
            mine = settings_of(shared)
            by_set = {key: m.args[key] for key in mine if m.args[key] != mine[key]}
            mine.update(by_set)
            notes.append(f"- {m.name}: {why}: `{' '.join(flags(mine))}`.")
        own = flags({key: value for key, value in m.args.items() if key not in vars(shared)})
        if own and m.method not in METHODS:
            notes.append(f"- {m.name} has settings of its own: `{' '.join(own)}`.")
    chosen = [f"- `--set {word}`" for word in args.set]
    seeds = f"{args.seeds} seed{'s' * (args.seeds > 1)}"
    text = f"""# {len(records)} methods on {some['data']['name']}

Settings that all share: `{' '.join(flags(settings))}`. The split: {about_split(some)}.

Accuracies are those after the last round: means over {seeds} ± the standard deviation over the
seeds, without runs that diverged. Global: of the server's model, on the central test images.
Personal: of each client's model, on its own test images, mean over the clients. Worst tenth: mean
over the tenth of the clients with the lowest accuracies. Validation (with --client-val): as
personal, on held-out images of each client, for choosing rates and parameters. MB sent: by all
clients and to them, in all rounds. s a round: median seconds of a round's training, without
fine-tuning and distillation, on {some['environment']['device']}.

"""
    text += "\n".join(lines(rows)) + "\n\n"
    if notes or chosen:
        text += "What is not shared:\n\n" + "\n".join([*notes, *chosen]) + "\n\n"
    if any(row["personal"] for row in rows):  # otherwise nothing is drawn
        text += "![Learning curves](curves.png)\n\n![Accuracies of the clients](clients.png)\n"
    (out / "compare.md").write_text(text, encoding="utf-8")
    with open(out / "compare.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        titles = [title.replace(" ", "_") for title in MEASURES]
        titles = [f"{title}_{what}" for title in titles for what in ("mean", "std")]
        writer.writerow(["method", "seeds", "diverged", *titles])
        for row in rows:
            cells = itertools.chain.from_iterable(row[title] or ("", "") for title in MEASURES)
            cells = ["" if cell is None else cell for cell in cells]
            writer.writerow([row["method"], row["seeds"], row["diverged"], *cells])


def curve(runs, part, key):
    """Returns the rounds [n], and the mean and std [n] of a measure over the finished runs; n is 0
    if it was not measured."""
    runs = [[row for row in r["rounds"] if part in row] for r in runs if not r["diverged"]]
    y = np.array([[row[part][key] for row in rows] for rows in runs])
    return np.array([row["round"] for row in runs[0]]), y.mean(0), y.std(0, ddof=min(1, len(y) - 1))


def draw(rows, records, shared, out):
    """curves.png and clients.png, and both as .svg."""
    rows = [row for row in rows if row["personal"]]  # the others diverged, or do not measure it
    some, names = records[rows[0]["method"]][0], [row["method"] for row in rows]
    styles = dict(zip(records, itertools.cycle(STYLES)))  # by the order of --methods
    title = f"{common.setting(some)}, {rows[0]['seeds']} seed{'s' * (rows[0]['seeds'] > 1)}"
    parts = (("global", "top1", "accuracy of the server's model"),
             ("personal", "mean", "mean accuracy of the clients' models"))
    both = f"{title}: mean and standard deviation over the seeds"
    with common.drawing(out / "curves.png", 1, 2, (11, 5.5), both) as axes:
        for axis, (part, key, label) in zip(axes, parts):
            for name in names:
                style = styles[name]
                x, mean, std = curve(records[name], part, key)
                # fewer rounds, each with more work; a line through one point can't be seen
                x = x * shared.rounds / records[name][0]["args"]["rounds"]
                axis.plot(x, mean, label=name, marker="o" if len(x) == 1 else None, **style)
                band = (mean - std).clip(0), (mean + std).clip(max=1)
                axis.fill_between(x, *band, alpha=0.15, color=style["color"], linewidth=0)
            axis.set(xlabel="round", ylabel=label, ylim=(0, 1))
    with common.drawing(out / "clients.png", 1, 1, (7, 1.6 + 0.3 * len(names)), title) as axis:
        finished = [[r for r in records[name] if not r["diverged"]] for name in names[::-1]]
        clients = [np.concatenate([r["final"]["personal"]["per_client"] for r in runs])
                   for runs in finished]
        axis.boxplot(clients, orientation="horizontal", patch_artist=True,
                     flierprops={"markersize": 2}, boxprops={"facecolor": "C5"},
                     medianprops={"color": "black"})
        axis.set_yticks(range(1, len(names) + 1), names[::-1])
        seen = [(row["global"][0], len(names) - i) for i, row in enumerate(rows) if row["global"]]
        axis.plot([x for x, _ in seen], [y for _, y in seen], "D", color="C1",
                  label="the server's model, on the central test images")
        axis.set(xlabel="accuracy on the client's own test images; boxes: clients, all seeds")


def main(argv=None):
    args, shared = arguments(argv)
    out = pathlib.Path(args.out)
    methods = plan(args, shared)
    check_folder(out)
    records = train_all(methods, args, shared)
    splits = {split_of(r): f"{name}, seed {seed}"
              for name, runs in records.items() for seed, r in enumerate(runs)}
    if len(splits) > 1:
        one, other = list(splits.values())[:2]
        common.refuse(f"{one} and {other} do not have the same images or split: they can't be "
                      "compared")
    rows = table(records)
    write_table(rows, records, methods, shared, args, out)
    if any(row["personal"] for row in rows):
        draw(rows, records, shared, out)
    common.say("\n".join(lines(rows)))
    common.say(f"split   {about_split(records[rows[0]['method']][0])}")
    common.say(f"table   {out}/compare.md, {out}/compare.csv")
    if all(row["diverged"] == row["seeds"] for row in rows):
        common.say("all runs diverged: try a smaller --lr")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
