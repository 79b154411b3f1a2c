"""All methods on CIFAR-10 with equal splits, weights and clients, and each with settings that were
chosen for it on validation images. docs/benchmark.md has the tables and what they say.

    python compare.py --benchmark              (make benchmark: trains what is missing; hours)
    python compare.py --benchmark mine.py      a file of your own, beside the others' records
    python compare.py --benchmark mine.py --tune mu=0.01,0.1,1

The first split of each kind and the first seed choose: first the rate, then the method's own
parameter. If the first or the last value is best, the next one beyond it is tried, too.
"""

import argparse
import itertools
import json
import pathlib

import numpy as np
from tqdm import tqdm

import common
import compare
from fl.run import numbers

from . import report

EQUAL = ["--dataset=cifar10", "--limit=6400", "--clients=20", "--client-test=0.25",
         "--client-val=0.125", "--model=cifarnet", "--transform=normalize", "--fraction=0.5",
         "--rounds=40", "--eval-every=40", "--epochs=1", "--batch-size=20", "--momentum=0"]
KINDS = {"two classes": ["--split=classes", "--per-client=2"],
         "Dirichlet": ["--split=dirichlet-classes", "--alpha=0.3"],
         "iid": ["--split=iid"]}
SPLITS = 3  # of each kind
RESULTS = compare.HERE / "results" / "benchmark"  # what is known of all runs: KIND.json
TO = "local", "fedavg-ft"  # the methods of the paired differences

# Ascending. The outer two are tried if the value beside them is best; None is no value.
RATES = 0.003, 0.01, 0.03, 0.1, 0.3, 1
OWN = {  # a method's own parameter, whose middle value the choice of the rate uses
    "fedavgm": ("beta", 0.5, 0.7, 0.9, 0.97, 0.99),
    "superfed-mm": ("start", None, 0.2, 0.4, 0.6, 0.8),
    "superfed-lm": ("start", None, 0.2, 0.4, 0.6, 0.8),
    "psinet": ("depth", None, "conv2", "fc1", "fc2", None),
    "fedslr": ("lambda", 1e-6, 1e-5, 1e-4, 1e-3, 1e-2),
    "persfl": ("distill-lr", 0.005, 0.015, 0.05, 0.15, 0.5),
    "fedavg-ft": ("finetune-epochs", None, 1, 3, 10, 30),
    "fedprox": ("mu", 0.001, 0.01, 0.1, 1, 10),
    "fedprox-ft": ("mu", 0.001, 0.01, 0.1, 1, 10),
    "scaffold": ("global-lr", 0.25, 0.5, 1, 1.5, 2),
    "feddyn": ("feddyn-alpha", 0.001, 0.01, 0.1, 1, 10),
    "apfl": ("apfl-alpha", 0.1, 0.25, 0.5, 0.75, 0.9),
    "fedper": ("personal", None, 1, 2, 3, 4),
    "fedrep": ("personal", None, 1, 2, 3, 4),
    "lg-fedavg": ("personal", None, 1, 2, 3, 4),
    "ditto": ("ditto-lambda", 0.001, 0.01, 0.1, 1, 10),
    "pfedme": ("pfedme-lambda", 1.5, 5, 15, 50, 150),
    "per-fedavg": ("per-fedavg-alpha", 0.003, 0.01, 0.03, 0.1, 0.3),
    "fedspa": ("density", 0.1, 0.25, 0.5, 0.75, 0.9),
    "fedma": ("last-lr", 0.03, 0.1, 0.3, 1, 3),
}


def arguments(argv):
    about, examples, how = __doc__.split("\n\n")
    p = common.Parser(prog="compare.py --benchmark", allow_abbrev=False, description=about,
                      epilog=f"{examples}\n\n{how}",
                      formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("file", nargs="?", help="your own method (docs/extend.md)")
    p.add_argument("--tune", default="", metavar="PARAMETER=A,B,...",
                   help="a parameter of your own method, chosen as its rate is")
    p.add_argument("--seeds", type=common.positive_int, default=3,
                   help=f"how many on each of the {SPLITS} splits of a kind (default: 3)")
    p.add_argument("--jobs", type=common.positive_int, default=1,
                   help="runs at a time; on a CPU with one thread each")
    p.add_argument("--device", help="as in python fedavg.py --help")
    p.add_argument("--data-dir", default="data", help="as in python fedavg.py --help")
    p.add_argument("--out", default="runs/benchmark",
                   help="folder of the runs (default: runs/benchmark)")
    args = p.parse_args(argv)
    if not args.file and args.tune:
        p.error("--tune is for a file of your own; the other methods have their grids")
    key, _, values = args.tune.partition("=")
    if args.tune and not (key and all(values.split(","))):
        p.error(f"--tune {args.tune}: say PARAMETER=A,B,...")
    args.mine = pathlib.Path(args.file).stem if args.file else None
    if args.mine in compare.METHODS:
        p.error(f"{args.file}: the benchmark has a {args.mine}; give the file another name")
    args.own = dict(OWN)
    if args.tune:
        args.own[args.mine] = key, None, *values.split(","), None
    return args


class Kind:
    """One kind of split: its settings, and the runs that are known.

    known: method -> {"numbers": as in records.py, "runs": {the run's settings: what report.py needs
    of its record}}
    """

    def __init__(self, title, args):
        self.title, self.args, self.name = title, args, title.replace(" ", "-").lower()
        self.committed = RESULTS / f"{self.name}.json"
        self.options, self.shared = compare.arguments(
            ["--methods=local", f"--jobs={args.jobs}", *EQUAL, *KINDS[title],
             *[f"--device={args.device}"] * bool(args.device), f"--data-dir={args.data_dir}",
             f"--out={args.out}/{self.name}"])
        self.options.split_seeds = SPLITS
        self.known = {}
        if self.committed.exists():
            self.known = json.loads(self.committed.read_text())["methods"]
        self.known = {name: self.known[name] if name in self.known
                      and self.known[name]["numbers"] == numbers(algorithm(name))
                      else {"numbers": numbers(algorithm(name)), "runs": {}}
                      for name in (*compare.METHODS, *[args.mine] * bool(args.file))}

    def methods(self, settings):
        """Returns the Methods of settings {method: {parameter: value}}."""
        files = {name: f"{name}={self.args.file}" if name == self.args.mine else name
                 for name in settings}
        self.options.methods = ",".join(files.values())
        self.options.set = [f"{name}.{word}" for name in settings for word in words(settings[name])]
        return compare.plan(self.options, self.shared)

    def known_run(self, name, settings, split=0, seed=0):
        """Returns what is known of a run, None if nothing."""
        return self.known[name]["runs"].get(key(settings, split, seed))

    def train(self, wanted, bar):
        """Trains the runs (method, settings, split, seed) of a list."""
        jobs = []
        for name, settings, split, seed in wanted:
            method, = self.methods({name: settings})
            run = compare.job(method, seed, split, self.options, self.shared)
            folder = pathlib.Path(self.options.out, name, key(settings, split, seed))
            jobs.append(run._replace(label=f"{self.title}, {name}, {folder.name}", folder=folder))
        found = compare.train_all(jobs, self.options, self.shared, bar)
        for (name, *run), r in zip(wanted, found):
            self.known[name]["runs"][key(*run)] = brief(r)
        some = found[0]
        if not self.args.file:
            about = {"settings": [*EQUAL, *KINDS[self.title]], "data": some["data"]["name"],
                     "images": some["data"]["fingerprint"], "environment": some["environment"]}
            self.committed.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({**about, "methods": self.known}, indent=1)
            self.committed.write_text(text + "\n", encoding="utf-8")

    def choose(self, name):
        """Returns a method's settings chosen so far, and a list of those to be trained before
        the next choice."""
        own = self.args.own.get(name)
        settings = {own[0]: own[len(own) // 2]} if own else {}
        rate = "theta-lr" if name == "pfedme" else "lr"  # of its two rates that of SGD
        for parameter, *values in [(rate, *RATES), *[own] * bool(own)]:
            first, *inner, last = values
            tried = {value: settings | {parameter: value} for value in values if value is not None}

            def accuracy(value, tried=tried):
                r = self.known_run(name, tried[value])
                return -1 if r["diverged"] else r["final"]["personal"]["val_mean"]

            if missing := [tried[z] for z in inner if not self.known_run(name, tried[z])]:
                return settings, missing
            best = max(inner, key=accuracy)
            beyond = {inner[0]: first, inner[-1]: last}.get(best)
            if beyond is not None:
                if not self.known_run(name, tried[beyond]):
                    return settings, [tried[beyond]]
                best = max(best, beyond, key=accuracy)
            settings = tried[best]
        return settings, []

    def finished(self, name, seeds):
        settings, missing = self.choose(name)
        return not missing and all(self.known_run(name, settings, split, seed)
                                   for split in range(SPLITS) for seed in range(seeds))

    def left(self, name, seeds):
        """Estimates how many runs of a method are left."""
        points = len(RATES) - 2 + (len(self.args.own[name]) - 4 if name in self.args.own else 0)
        return max(points + SPLITS * seeds - 1 - len(self.known[name]["runs"]), 0)

    def seeds(self, names):
        """Returns how many seeds all these methods have, up to --seeds."""
        return max((n for n in range(1, self.args.seeds + 1)
                    if names and all(self.finished(name, n) for name in names)), default=0)

    def rows(self):
        """report.table() of all methods that are finished, with as many seeds as all of them have;
        [] if none is."""
        names = [name for name in self.known if self.finished(name, 1)]
        if not names:
            return []
        seeds = self.seeds(names)
        settings = {name: self.choose(name)[0] for name in names}
        records = {name: [self.known_run(name, settings[name], split, seed)
                          for split in range(SPLITS) for seed in range(seeds)] for name in names}
        self.options.seeds, self.options.against = seeds, [name for name in TO if name in names]
        return report.table(records, self.methods(settings), self.options, self.shared)


def algorithm(name):
    """What records.NUMBERS calls a method."""
    file, *options = compare.METHODS.get(name, name).split()
    return options[1] if file == "baselines.py" else pathlib.Path(file).stem


def words(settings):
    """{"pfedme-lambda": 15, "theta-lr": .1} -> ["pfedme-lambda=15", "theta-lr=0.1"]"""
    return [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in settings.items()]


def key(settings, split, seed):
    return ",".join([*words(settings), f"split={split}", f"seed={seed}"])


def brief(r):
    """Returns all report.py needs of r."""
    parts = {"global": ("top1",), "personal": ("mean", "worst_decile", "val_mean", "per_client")}
    final = {part: {name: np.round(measures[name], 5).tolist() for name in parts[part]
                    if name in measures}
             for part, measures in r["final"].items() if part in parts}
    seconds = sum(row["seconds"] + row.get("evaluation_seconds", 0) for row in r["rounds"])
    return {"args": {name: r["args"][name] for name in ("split_seed", "seed")},
            "split": r["split"]["fingerprint"], "diverged": r["diverged"], "final": final,
            "bytes_up": r["bytes_up"], "bytes_down": r["bytes_down"],
            "seconds_per_round": r["seconds_per_round"], "rounds": [{"seconds": round(seconds, 2)}]}


def table(rows, grids=OWN):
    """Returns a kind's table in Markdown. Differences whose interval excludes 0 are bold. * marks a
    parameter at an end of its grid."""
    (titles, body), (others, differences) = report.main_table(rows), report.paired_table(rows)
    to = {name: dict(zip(others[1:], cells)) for name, *cells in differences}
    order = ["method", "personal", *others[1:], "worst tenth", "global", "MB sent", "minutes",
             "own settings"]
    found = [order, ["---"] * len(order)]
    for row, cells in zip(rows, body):
        at = dict(zip(titles, cells)) | to.get(row["method"], {})
        for title in ("personal", "worst tenth", "global"):
            at[title] = at.get(title, "").partition(" ±")[0]
        for title in others[1:]:
            interval, end, word = at.get(title, "").partition("]")
            decided = word in (" ahead", " behind")
            at[title] = f"**{interval}]**" if decided else interval + end
        parameter, *values = grids.get(row["method"], ("",))
        values = [z for z in values if z is not None]
        ends = {f"--{parameter}={z}" for z in values[:1] + values[-1:]}
        if ends & {*at.get("own settings", "").strip("`").split()}:
            at["own settings"] += "*"
        found.append([at.get(title, "") for title in order])
    return [f"|{'|'.join(line)}|" for line in found]


def draw(kinds, path):
    """Draws the methods' differences from Local and their intervals, one panel per kind."""
    tallest = max(len(rows) for rows in kinds.values())
    with common.drawing(path, 1, len(kinds), (4.6 * len(kinds), 1.2 + 0.27 * tallest)) as axes:
        for axis, (title, rows) in zip(np.atleast_1d(axes), kinds.items()):
            shown = [row for row in rows[::-1] if row["against"].get(TO[0])]
            for y, row in enumerate(shown):
                mean, interval, word = row["against"][TO[0]]
                colour = {"ahead": "C2", "behind": "C1"}.get(word, "C6")
                axis.plot(mean, y, "o", color=colour, label=word)
                if interval:
                    axis.plot(interval, [y, y], color=colour)
            axis.axvline(0, color="C6", linewidth=1)
            axis.set_yticks(range(len(shown)), [row["method"] for row in shown])
            axis.set(title=title, xlabel="personal accuracy minus Local's")


def main(argv):
    args = arguments(argv)
    out = pathlib.Path(args.out)
    compare.check_folder(out)
    kinds = [Kind(title, args) for title in KINDS]
    names = [args.mine] if args.file else list(compare.METHODS)
    if args.file:  # no more seeds than the other methods have
        others = [k.seeds([name for name in compare.METHODS if k.finished(name, 1)]) for k in kinds]
        args.seeds = max(others) or args.seeds
    with tqdm(unit="run", disable=None) as bar:
        def train(kind, wanted):
            bar.total = bar.n + sum(k.left(name, args.seeds) for k in kinds for name in names)
            kind.train(wanted, bar)

        for seed, kind in itertools.product(range(args.seeds), kinds):  # a seed of all kinds first
            while points := [(name, settings, 0, 0) for name in names
                             for settings in kind.choose(name)[1]]:
                train(kind, points)
            runs = [(name, kind.choose(name)[0], split, seed) for split in range(SPLITS)
                    for name in names]
            if missing := [run for run in runs if not kind.known_run(*run)]:
                train(kind, missing)
    rows = {kind.title: found for kind in kinds if (found := kind.rows())}
    text = "\n\n".join("\n".join([f"## {title}", "", *table(found, args.own)])
                       for title, found in rows.items())
    folder = out if args.file else RESULTS
    (folder / "benchmark.md").write_text(text + "\n", encoding="utf-8")
    draw(rows, folder / "benchmark.png")
    common.say(f"{text}\n\ntable   {folder}/benchmark.md, benchmark.png")
    return 0

