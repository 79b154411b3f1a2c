"""Compares methods on the same images and split, with the same model, initial weights, sampled
clients, rounds, epochs, minibatches and rate. docs/compare.md lists exceptions. --benchmark FILE
tunes your method on CIFAR-10 and shows it beside all others: docs/benchmark.md.

    python compare.py --methods fedavg,fedper,docs/lastlayer.py --seeds 3 --out runs/three
    python compare.py --methods all --jobs 2                 (make compare: the embedded images)
    python compare.py --methods fedavg,a=fedprox,b=fedprox --set a.mu=0.01 --set b.mu=1

A method is one of this repository (see --methods), or a file of your own with arguments(argv) and
main(argv).
"""

import argparse
import contextlib
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

from tqdm import tqdm

import baselines
import common
import fl.training
from comparing.report import (
    about_split,
    draw,
    flag,
    flags,
    lines,
    main_table,
    paired_table,
    table,
    write_table,
)
from fl.run import FREE, numbers
from fl.run import SHARED as SOURCES

HERE = pathlib.Path(__file__).resolve().parent

# What all methods share unless the command line says otherwise. All other flags of the groups
# "data" and "training" of `python fedavg.py --help` are shared, too, with common.py's defaults.
SHARED = dict(dataset="shapes", split="shards", clients=20, per_client=4, client_val=0.1,
              client_test=0.2, model="cnn", transform="normalize", fraction=0.5, rounds=30,
              epochs=1, batch_size=10, lr=0.02, momentum=0.9)
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
    """Returns SGD's settings without momentum. If other methods have momentum, the rate is 5/2 of
    theirs, our choice: momentum .9 lets a step grow to 10 eta."""
    return {"momentum": 0, "lr": round(shared.lr * (5 / 2 if shared.momentum else 1), 6)}


def everybody(shared):
    """Returns settings with all clients in fewer rounds, which train as many clients in all."""
    rounds = max(1, round(shared.rounds * shared.fraction))
    return {"fraction": 1, "rounds": rounds,
            "eval_every": max(1, int(shared.eval_every * shared.fraction))}


# A method's own values of shared settings, and why it has them.
NO_MOMENTUM = "the paper's clients have no momentum"
OWN = {
    "fedslr": (plain, "the authors' clients have no momentum"),
    "scaffold": (plain, NO_MOMENTUM),
    "per-fedavg": (plain, NO_MOMENTUM),
    "centralised": (lambda shared: plain(shared) | everybody(shared),
                    "with the others' momentum and rate it learns almost nothing; it has all "
                    "clients' images in every round"),
    "fedavgm": (lambda shared: plain(shared) | {"beta": 0.9},
                "momentum is at the server, not at the clients"),
    "pfedme": (lambda shared: plain(shared) | {"lr": 0.067, "theta_lr": plain(shared)["lr"]},
               f"{NO_MOMENTUM}; lr = 1/lambda: in the first round a step sets w_k to theta_k; "
               "theta_lr is the rate of SGD"),
    "fedma": (lambda shared: {"rounds": max(1, round(shared.rounds / 2))},
              "in a round it trains once for each layer, where others train once"),
    "persfl": (lambda shared: plain(shared) | everybody(shared) | {"distill_epochs": 2},
               "no momentum, as in the file; all clients take part in every round; after the last "
               "one distillation follows, of two epochs, fewer than in the file"),
}
RATES = ("lr", "momentum")  # what --set may change although it is shared
OURS = ("seed", "out", "resume", "plot", "runs")  # what this program sets itself


class Method(NamedTuple):
    name: str
    method: str  # one of METHODS, or a file as it was given
    file: pathlib.Path
    argv: list  # its flags but --seed and --out
    args: dict  # all arguments, parsed
    own: dict  # its values of shared settings
    why: str  # and why


# --------------------------------------------------------------------------------------------------
# What is to be trained. Errors in the command line are refused here; the others by the run.


def arguments(argv):
    """Returns this file's arguments and the shared ones."""
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
                   help="how many, from seed 0 on (default: 3)")
    p.add_argument("--split-seeds", type=common.positive_int, default=1, metavar="N",
                   help="train every seed on N splits, from --split-seed on (default: 1)")
    p.add_argument("--against", type=lambda word: word.split(","), default=[], metavar="A,B,...",
                   help="for paired differences (default: best, and local)")
    p.add_argument("--set", action="append", default=[], metavar="NAME.PARAMETER=VALUE",
                   help="as fedprox.mu=0.1")
    p.add_argument("--tune", action="append", default=[], metavar="[NAME.]PARAMETER=A,B,...",
                   help="lr=0.01,0.1 (of each method) or fedprox.mu=0.1,1: choose the value on "
                        "validation images, with the first seed and split")
    p.add_argument("--jobs", type=common.positive_int, default=1,
                   help="runs at a time; on a CPU with one thread each. Each holds the images and "
                        "its clients' states in memory of its own")
    p.add_argument("--out", default="runs/compare",
                   help="folder of all that is written (default: runs/compare)")
    args, rest = p.parse_known_args(argv)
    if not args.out:
        p.error("--out is empty; name a folder, or leave it out")
    for word in rest:
        if word.partition("=")[0] in ("--seed", "--resume", "--plot"):
            p.error(f"{word} is not for comparisons: --seeds says how many, runs are resumed, and "
                    "figures are drawn")
    shared = common.parser(__doc__, **SHARED, eval_every=None)
    if unknown := shared.parse_known_args(rest)[1]:
        p.error(f"unrecognized arguments: {' '.join(unknown)}; a method's own parameter is --set "
                "NAME.PARAMETER=VALUE")
    shared = common.parse(shared, BY_DATASET, rest)
    args.points = shared.eval_every is None
    if args.points:  # at least ten on a curve
        shared.eval_every = max(1, shared.rounds // 10)
    if args.against and args.seeds * args.split_seeds == 1:
        p.error("--against: one run of each method gives no interval; use --seeds 2 or more")
    return args, shared


def functions(file):
    """Returns the function `arguments` of a method's file."""
    module = common.load_file(file)
    found = [getattr(module, name, None) for name in ("arguments", "main")]
    if not all(inspect.isfunction(f) and inspect.signature(f).parameters for f in found):
        common.refuse(f"--methods: {file} must have arguments(argv) and main(argv); see "
                      "docs/extend.md")
    return found[0]


def parsed(arguments, argv, what, file):
    """Returns what a method's arguments(argv) makes of its flags; its refusal becomes ours."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            made, why = arguments(argv), ""
        except SystemExit as end:
            own = end.code if isinstance(end.code, str) else "its arguments(argv) ends"
            made, why = None, said.getvalue().partition("error: ")[2].strip() or own
        except Exception as problem:  # whatever the file does
            line = fl.training.first_line(problem)
            made, why = None, f"its arguments(argv) fails: {type(problem).__name__}: {line}"
    if not why and not isinstance(made, argparse.Namespace):
        why = "its arguments(argv) does not return what common.parse returns; see docs/extend.md"
    if why:
        why = why.replace("(see --help)", f"(see {shell([str(file), '--help'])})")
        common.refuse(f"{what}: {why}")
    return json.loads(json.dumps(vars(made), default=str))  # as a record has them


def shell(argv):
    """Returns argv for a shell. A file elsewhere is told where common.py is."""
    elsewhere = pathlib.Path(argv[0]).resolve().parent != HERE
    path = f"PYTHONPATH={shlex.quote(str(HERE))} " if elsewhere else ""
    return f"{path}python {shlex.join(argv)}"


def named(args):
    """Yields (name, method) of --methods: fedprox, strong=fedprox, path/to/mine.py, ..."""
    for word in filter(None, map(str.strip, args.methods.split(","))):
        if given := re.fullmatch(r"([^\W_][\w-]*)=(.+)", word):  # NAME is a folder, too
            yield given.groups()
        elif word == "all":
            yield from ((method, method) for method in METHODS)
        else:
            yield word if word in METHODS else pathlib.Path(word).stem, word


def plan(args, shared, option="--set"):
    """Returns the Methods of --methods with --set or --tune."""
    sets, found = [], {}
    for word in args.set:
        if not (given := re.fullmatch(r"([^.=]+)\.([^.=]+)(=.*)?", word, re.S)):
            common.refuse(f"{option} {word}: say NAME.PARAMETER=VALUE")
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
        function = functions(file)
        own, why = OWN.get(method, (lambda _: {}, ""))
        own = own(shared)
        wanted = settings | own
        if args.points:
            wanted["eval_every"] = max(1, wanted["rounds"] // 10)
        mine = [word for whose, word in sets if whose == name]
        for word in mine:
            refuse_foreign(name, method, word, words, settings)
        argv = [*words, *flags(wanted), *(f"--{word}" for word in mine)]
        what = f"--methods: {name}" + f", {option} {name}.{', '.join(mine)}" * bool(mine)
        made = parsed(function, argv, what, file)
        # of the shared settings, --set changes RATES alone (refuse_foreign)
        given = {word.partition("=")[0].replace("-", "_") for word in mine}
        if method == "pfedme" and "pfedme_lambda" in given and "lr" not in given:
            argv.append(f"--lr={1 / made['pfedme_lambda']:.3g}")  # OWN says why
            made = parsed(function, argv, what, file)
            given.add("lr")
        for key in settings:
            if key not in given and made.get(key) != wanted[key]:
                way_out = f"; to give it to all: {flag(key)} {made.get(key)}"
                common.refuse(f"--methods: {file} makes {made.get(key)} of {flag(key)} "
                              f"{wanted[key]}, which all methods share"
                              + way_out * (wanted[key] is None))
        if made.get("target"):
            common.refuse(f"--methods: {file} stops at an accuracy (target={made['target']}), "
                          f"others don't; use --set {name}.target without a value")
        found[name] = Method(name, method, file, argv, made, own, why)
    if not found:
        common.refuse("--methods is empty")
    parameters = [(name, word.partition("=")[0]) for name, word in sets]
    for (name, word), parameter in zip(sets, parameters):
        if name not in found:
            common.refuse(f"--set {name}.{word}: --methods has no {name}; its names are "
                          f"{', '.join(found)}")
        if parameters.count(parameter) > 1:
            common.refuse(f"{option} {name}.{word}: it is set twice")
    return list(found.values())


def refuse_foreign(name, method, word, words, settings):
    """Refuses --set NAME.WORD if the parameter is not the method's own; words: the flags that make
    the method."""
    key = word.partition("=")[0]
    why = (f"{key} is what makes the method {method}" if f"--{key}" in words else
           f"--{key} is this program's own; see python compare.py --help" if key in OURS else
           f"all methods share {key}; use --{key}"
           if key.replace("-", "_") in settings and key not in RATES else "")
    if why:
        common.refuse(f"--set {name}.{word}: {why}")


def check_folder(out):
    """Refuses to write among this repository's own files, except under results/."""
    inside = [out.resolve(), *out.resolve().parents]
    if HERE in inside and HERE / "results" not in inside and shutil.which("git"):
        files = ["git", "-C", HERE, "ls-files", "--", inside[0]]
        if subprocess.run(files, capture_output=True).stdout:
            common.refuse(f"--out {out} holds files of this repository; use another folder, or "
                          "results or one below it")


# --------------------------------------------------------------------------------------------------
# Training, and --tune


def record(method, folder):
    """Returns a method's record in a folder, or None. Refuses one with other settings."""
    try:
        found = json.loads((folder / "result.json").read_text())
        then, _, sources = found["args"], found["status"], found["environment"]["sources"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as problem:
        common.refuse(f"{folder}/result.json can't be read as a record ({type(problem).__name__}); "
                      "move it elsewhere")
    then, no_part = common.renamed(then), (*FREE, *common.unused(method.args["split"]))
    earlier = next(iter(sources), "") == method.file.name  # removed flags don't count
    for name in {**method.args, **({} if earlier else then)}:
        was, now = then.get(name), method.args.get(name)
        unused = name not in then and not now  # a flag that the file got later
        if was != now and not unused and name not in (*no_part, "seed", "device"):
            common.refuse(f"{folder} has a record with {flag(name)} {was}, now it is {now}; use "
                          "another NAME, or another --out")
    return found


def changed(method, record):
    """Returns what has changed since a record was made: a method's results (records.NUMBERS), a
    user's files, or any source file of a run that is to be resumed."""
    then, own = record["environment"], [] if method.method in METHODS else [method.file]
    own += [pathlib.Path(name.rpartition(":")[0])
            for name in (method.args["model"], method.args["split"]) if ".py:" in name]
    folders = {path.resolve().parent for path in own}
    own += [pathlib.Path(method.args["init"])] if method.args.get("init") else []
    files = {path.name: [path] for path in own if path.name in then["sources"]}
    for name in then["sources"]:  # imported from one of the folders
        if name not in (*SOURCES, method.file.name, *files):
            files[name] = [path for folder in folders if (path := folder / name).exists()]
    if record["status"] not in ("finished", "diverged"):
        files = {**{name: [HERE / name] for name in then["sources"]},
                 method.file.name: [method.file], **{name: z for name, z in files.items() if z}}
    found = [name for name, paths in files.items() if paths and not any(
        path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == then["sources"].get(name)
        for path in paths)]
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
    """Runs argv in a process of its own. Returns its exit code and the last line of its error."""
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


class Job(NamedTuple):
    label: str
    method: Method
    folder: pathlib.Path


def job(method, seed, split, args, shared):
    """Returns the Job of method, seed and split."""
    at, several = shared.split_seed + split, f", split {shared.split_seed + split}"
    folder = pathlib.Path(args.out, method.name, *[f"split{at}"] * (split > 0), str(seed))
    method = method._replace(argv=[*method.argv, f"--split-seed={at}", f"--seed={seed}"],
                             args=method.args | {"split_seed": at})
    return Job(f"{method.name}{several * (args.split_seeds > 1)}, seed {seed}", method, folder)


def train_all(wanted, args, shared, bar):
    """Trains those of the Jobs that are missing, --jobs at a time. Returns a record for each."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    todo, children, prints = [], Children(), {}
    for run in wanted:
        if (at := run.method.args["split_seed"]) not in prints:
            # downloads, or refuses, once, before several runs do
            data = common.images_for(shared, common.stream(at, "split", 1))
            split = common.split_clients(data, shared, common.stream(at, "split"))
            prints[at] = data.fingerprint(), split.fingerprint()
        found = record(run.method, run.folder)
        stale = found and changed(run.method, found)
        if found and not stale and split_of(found) != prints[at]:
            same = found["data"]["fingerprint"] == prints[at][0]
            common.refuse(f"{run.folder} has a record of "
                          f"{'another split' if same else 'other images'} than {shared.dataset} "
                          "has now; use another --out")
        if stale:
            common.say(f"{run.label}: {', '.join(stale)} changed; trained anew, the record "
                       "becomes result.previous.json")
        if stale or not found or found["status"] not in ("finished", "diverged"):
            argv = [str(run.method.file), *run.method.argv, f"--out={run.folder}"]
            todo.append((run, argv + ["--resume"] * (not stale)))
    bar.total -= len(wanted) - len(todo)  # what is done says nothing about the time that is left
    bar.refresh()
    with ThreadPoolExecutor(args.jobs) as pool:
        try:
            one_thread = args.jobs > 1 and shared.device == "cpu"  # on a GPU clients train at once
            runs = {pool.submit(train, argv, one_thread, children): (run, argv)
                    for run, argv in todo}
            for done in as_completed(runs):
                (run, argv), (code, said) = runs[done], done.result()
                if code not in (0, 3):  # 3: diverged, which is a result
                    command = "" if code == 2 else f" ({shell(argv)})"
                    common.refuse(f"{run.label}: {said}{command}")
                found = record(run.method, run.folder)
                if not found:
                    common.refuse(f"{run.method.file} has trained nothing; does it end with  "
                                  'if __name__ == "__main__": main()  ?')
                if found["status"] not in ("finished", "diverged"):
                    common.refuse(f"{run.label}: {run.method.file} has left the loop over "
                                  "run.rounds before its end; see docs/extend.md")
                if split_of(found) != prints[run.method.args["split_seed"]]:
                    common.refuse(f"{run.label}: {run.method.file} has not kept the images or the "
                                  "split that all share: it can't be compared")
                bar.update()
                bar.n += bar.disable  # without a terminal, `update` counts nothing
                left = f"{bar.total - bar.n} to go"
                common.say(f"{run.label}: {'diverged' if code else 'done'}, {left}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            children.stop()
            raise
    found = [record(run.method, run.folder) for run in wanted]
    for run, what in zip(wanted, found):
        if stale := changed(run.method, what):
            common.refuse(f"{run.label}: {', '.join(stale)} changed meanwhile; repeat the command")
    return found


def split_of(record):
    """Returns fingerprints of images and split."""
    return record["data"]["fingerprint"], record["split"]["fingerprint"]


def tuning(methods, args, shared):
    """Returns [(the --set words, the Job)] for each point of each method's grid."""
    grids, points = {method.name: {} for method in methods}, []
    if args.tune and not shared.client_val:
        common.refuse("--tune chooses on validation images: --client-val must be above 0")
    for word in sorted(args.tune, key=lambda word: "." in word.partition("=")[0]):  # NAME.* wins
        given = re.fullmatch(r"(?:([^.=]+)\.)?([^.=]+)=(.+)", word)
        if not given or given[1] not in (None, *grids):
            common.refuse(f"--tune {word}: say PARAMETER=A,B,... or NAME.PARAMETER=A,B,...; the "
                          f"names are {', '.join(grids)}")
        for method in [m for m in methods if given[1] in (None, m.name)]:
            # of pFedMe's two rates theta_lr is that of SGD
            theta = given[2] == "lr" and not given[1] and method.method == "pfedme"
            grids[method.name]["theta-lr" if theta else given[2]] = given[3].split(",")
    for method, grid in zip(methods, grids.values()):
        for values in itertools.product(*grid.values()) if grid else ():
            chosen = [f"{key}={value}" for key, value in zip(grid, values)]
            words = [f"{method.name}.{word}" for word in chosen]
            mine = [word for word in args.set if word.partition(".")[0] == method.name]
            alone = {"methods": f"{method.name}={method.method}", "set": mine + words}
            tried, = plan(argparse.Namespace(**vars(args) | alone), shared, "--tune")
            run = job(tried, 0, 0, args, shared)
            folder = pathlib.Path(args.out, "tune", method.name, ",".join(chosen), "0")
            points.append((words, run._replace(label=" ".join(words), folder=folder)))
    return points


def tune(grid, args, shared, out, bar):
    """Trains the grid, writes tune.md, and adds each method's best point to --set."""
    best, rows = {}, []
    for (words, run), r in zip(grid, train_all([run for _, run in grid], args, shared, bar)):
        name, value = run.method.name, r["final"].get("personal", {}).get("val_mean")
        if value is None and not r["diverged"]:
            common.refuse(f"--tune: {name} measures no accuracy on validation images")
        rows.append([name, " ".join(word.partition(".")[2] for word in words),
                     "diverged" if r["diverged"] else f"{value:.4f}", ""])
        if not r["diverged"] and value > best.get(name, (-1,))[0]:
            best[name] = value, words, run, rows[-1]
    if lost := [run.method.name for _, run in grid if run.method.name not in best]:
        common.refuse(f"--tune: all runs of {lost[0]} diverged; try other values")
    for name, (_, words, run, row) in best.items():
        row[3] = "chosen"
        args.set += words
        if not (out / name / "0").exists():  # it is the first run of the comparison, too
            shutil.copytree(run.folder, out / name / "0")
    text = ("# Settings chosen on validation images\n\nThe mean accuracy on the clients' "
            f"validation images after the last round, with seed 0 and split {shared.split_seed}. "
            "The best is chosen; of equal ones the first.\n")
    found = lines(["method", "setting", "validation", "choice"], rows)
    (out / "tune.md").write_text("\n".join([text, *found, ""]), encoding="utf-8")
    common.say("\n".join([*found, ""]))


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--benchmark"]:
        from comparing import benchmark  # which imports this file

        return benchmark.main(argv[1:])
    args, shared = arguments(argv)
    out, methods = pathlib.Path(args.out), plan(args, shared)
    names = [method.name for method in methods]
    if unknown := [name for name in args.against if name not in names]:
        common.refuse(f"--against: --methods has no {unknown[0]}; its names are {', '.join(names)}")
    grid = tuning(methods, args, shared)
    check_folder(out)
    runs = args.seeds * args.split_seeds
    with tqdm(total=len(grid) + len(methods) * runs, unit="run", disable=None) as bar:
        if grid:
            tune(grid, args, shared, out, bar)
            methods = plan(args, shared)
        wanted = [job(m, seed, split, args, shared) for split in range(args.split_seeds)
                  for seed in range(args.seeds) for m in methods]
        found = train_all(wanted, args, shared, bar)
    records = {name: found[i::len(names)] for i, name in enumerate(names)}
    rows = table(records, methods, args, shared)
    write_table(rows, records, methods, shared, args, out)
    if any(row["personal"] for row in rows):
        draw(rows, records, shared, out)
    common.say("\n".join(lines(*main_table(rows))))
    if paired_table(rows)[1]:
        common.say("\n".join(["", *lines(*paired_table(rows)), ""]))
    common.say(f"split   {about_split(records[rows[0]['method']][0])}")
    common.say(f"table   {out}/compare.md, compare.tex, compare.csv, runs.csv")
    if all(row["diverged"] == row["runs"] for row in rows):
        common.say("all runs diverged: try a smaller --lr")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
