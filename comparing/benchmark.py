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

import baselines
import common
from fl import records

from . import planning, ranks, report, training

EQUAL = ["--dataset=cifar10", "--limit=6400", "--clients=20", "--client-test=0.25",
         "--client-val=0.125", "--model=cifarnet", "--transform=normalize", "--fraction=0.5",
         "--rounds=40", "--eval-every=40", "--epochs=1", "--batch-size=20", "--momentum=0"]
KINDS = {"two classes": ["--split=classes", "--per-client=2"],
         "Dirichlet": ["--split=dirichlet-classes", "--alpha=0.3"],
         "iid": ["--split=iid"]}
SPLITS = 3  # of each kind
RESULTS = planning.HERE / "results" / "benchmark"  # what is known of all runs: KIND.json
TO = "local", "fedavg-ft"  # the methods of the paired differences

# Ascending values. The first and the last are tried only if the value beside them is the best of
# the others; None is no value.
RATES = 0.003, 0.01, 0.03, 0.1, 0.3, 1
OWN = {  # each method's own parameter; the rate is chosen with the middle one of its values
    "fedavgm": ("beta", (0.5, 0.7, 0.9, 0.97, 0.99)),
    "superfed-mm": ("start", (None, 0.2, 0.4, 0.6, 0.8)),
    "superfed-lm": ("start", (None, 0.2, 0.4, 0.6, 0.8)),
    "psinet": ("depth", (None, "conv2", "fc1", "fc2", None)),
    "fedslr": ("lambda", (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)),
    "persfl": ("distill-lr", (0.005, 0.015, 0.05, 0.15, 0.5)),
    "fedavg-ft": ("finetune-epochs", (None, 1, 3, 10, 30)),
    "fedprox": ("mu", (0.001, 0.01, 0.1, 1, 10)),
    "fedprox-ft": ("mu", (0.001, 0.01, 0.1, 1, 10)),
    "scaffold": ("global-lr", (0.25, 0.5, 1, 1.5, 2)),
    "feddyn": ("feddyn-alpha", (0.001, 0.01, 0.1, 1, 10)),
    "apfl": ("apfl-alpha", (0.1, 0.25, 0.5, 0.75, 0.9)),
    "fedper": ("personal", (None, 1, 2, 3, 4)),
    "fedrep": ("personal", (None, 1, 2, 3, 4)),
    "lg-fedavg": ("personal", (None, 1, 2, 3, 4)),
    "ditto": ("ditto-lambda", (0.001, 0.01, 0.1, 1, 10)),
    "pfedme": ("pfedme-lambda", (1.5, 5, 15, 50, 150)),
    "per-fedavg": ("per-fedavg-alpha", (0.003, 0.01, 0.03, 0.1, 0.3)),
    "fedspa": ("density", (0.1, 0.25, 0.5, 0.75, 0.9)),
    "fedma": ("last-lr", (0.03, 0.1, 0.3, 1, 3)),
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
    args.mine = planning.name_of(args.file) if args.file else None
    if args.mine in planning.METHODS:
        p.error(f"{args.file}: the benchmark has a {args.mine}; give the file another name")
    args.own = dict(OWN)
    if args.tune:
        parameter, _, values = args.tune.partition("=")
        values = values.split(",")
        if not (parameter and all(values)):
            p.error(f"--tune {args.tune}: say PARAMETER=A,B,...")
        args.own[args.mine] = parameter, (None, *values, None)
    return args


class Kind:
    """One kind of split: its settings, and the runs that are known.

    known: method -> {the run's settings: what report.py needs of its record}
    """

    def __init__(self, title, args):
        self.title, self.args = title, args
        name = title.replace(" ", "-").lower()
        self.committed, self.out = RESULTS / f"{name}.json", f"{args.out}/{name}"
        self.flags = [*EQUAL, *KINDS[title]]
        place = [f"--data-dir={args.data_dir}", *([f"--device={args.device}"] * bool(args.device))]
        self.shared = planning.share([*self.flags, *place])
        there = self.committed.exists()
        committed = json.loads(self.committed.read_text())["methods"] if there else {}
        self.known = {name: committed.get(name, {}) for name in (*planning.METHODS, args.mine)
                      if name}

    def methods(self, settings):
        """Returns the Methods of settings {method: {parameter: value}}."""
        methods = (f"{name}={self.args.file}" if name == self.args.mine else name
                   for name in settings)
        sets = [f"{name}.{word}" for name in settings for word in words(settings[name])]
        return planning.plan(",".join(methods), sets, self.shared)

    def known_run(self, name, settings, split=0, seed=0):
        """Returns what is known of a run, None if nothing."""
        return self.known[name].get(key(settings, split, seed))

    def runs(self, name, seeds):
        """Returns what is known of a method's runs with its chosen settings, on all splits."""
        settings, _ = self.choose(name)
        return [self.known_run(name, settings, split, seed)
                for split in range(SPLITS) for seed in range(seeds)]

    def train(self, wanted):
        """Trains the runs (method, settings, split, seed) of a list."""
        jobs = []
        for name, settings, split, seed in wanted:
            method, = self.methods({name: settings})
            folder = pathlib.Path(self.out, name, key(settings, split, seed))
            jobs.append(training.job(method, seed, self.shared.split_seed + split, folder,
                                     f"{self.title}, {name}, {folder.name}"))
        found = training.train_all(jobs, self.args.jobs, self.shared)
        for (name, *run), r in zip(wanted, found):
            self.known[name][key(*run)] = brief(r)
        if not self.args.file:
            r = found[0]
            about = {"settings": self.flags, "data": r["data"]["name"],
                     "images": r["data"]["fingerprint"], "environment": r["environment"]}
            text = records.in_lines({**about, "methods": self.known})
            self.committed.parent.mkdir(parents=True, exist_ok=True)
            part = self.committed.with_suffix(".part")
            part.write_text(text + "\n", encoding="utf-8")
            part.replace(self.committed)

    def choose(self, name):
        """Returns a method's chosen settings, and a list of those to be trained before they are
        known."""
        grids, settings = [(baselines.SGD_RATE.get(name, "lr"), RATES)], {}
        if own := self.args.own.get(name):
            grids.append(own)
            settings[own[0]] = own[1][(len(own[1]) - 1) // 2]
        for parameter, values in grids:
            points = [None if z is None else settings | {parameter: z} for z in values]
            settings, missing = self.best(name, points)
            if missing:
                return settings, missing
        return settings, []

    def best(self, name, points):
        """Returns that of the points with the best validation accuracy, and a list of those to be
        trained before it is known."""
        def accuracy(i):
            run = self.known_run(name, points[i])
            return -1 if run["diverged"] else run["final"]["personal"]["val_mean"]

        def missing(places):
            return [points[i] for i in places if not self.known_run(name, points[i])]

        places, last = range(1, len(points) - 1), len(points) - 1
        if not missing(places):
            best = max(places, key=accuracy)
            beyond = [i for i in (0, last) if abs(best - i) == 1 and points[i] is not None]
            places = [best, *beyond]
        if left := missing(places):
            return None, left
        return points[max(places, key=accuracy)], []

    def finished(self, name, seeds):
        return not self.choose(name)[1] and all(self.runs(name, seeds))

    def seeds(self, names):
        """Returns how many seeds all these methods have, up to --seeds."""
        return max((n for n in range(1, self.args.seeds + 1)
                    if names and all(self.finished(name, n) for name in names)), default=0)

    def rows(self):
        """Returns report.table() of all methods that are finished, with as many seeds as all of
        them have; [] if none is."""
        names = [name for name in self.known if self.finished(name, 1)]
        if not names:
            return []
        seeds = self.seeds(names)
        return report.table({name: self.runs(name, seeds) for name in names},
                            self.methods({name: self.choose(name)[0] for name in names}),
                            [name for name in TO if name in names], self.shared)


def mean_ranks(kinds):
    """Returns a sentence on the mean ranks of the methods that are finished on all kinds."""
    names = [name for name in kinds[0].known if all(kind.finished(name, 1) for kind in kinds)]
    runs = {name: [r | {"args": {"split_seed": f"{kind.title} {r['args']['split_seed']}"}}
                   for kind in kinds for r in kind.runs(name, kind.seeds(names))]
            for name in names}
    found, splits = report.ranks_over_splits(runs), SPLITS * len(kinds)
    if not found:
        return ""
    ordered = ", ".join(f"{name} {rank:.1f}" for name, rank in
                        sorted(found.items(), key=lambda pair: pair[1]))
    return (f"Mean ranks over {splits} splits: {ordered}. Two methods differ if their ranks do by "
            f"{ranks.critical_difference(len(found), splits):.1f} or more (Nemenyi's test, .05).")


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
    return {"args": {name: r["args"][name] for name in ("split_seed", "seed")},
            "split": r["split"]["fingerprint"], "diverged": r["diverged"], "final": final,
            "bytes_up": r["bytes_up"], "bytes_down": r["bytes_down"],
            "seconds_per_round": r["seconds_per_round"],
            "rounds": [{"seconds": round(60 * report.MEASURES["minutes"](r), 2)}]}


def table(rows, grids=OWN):
    """Returns a kind's table in Markdown. Differences that are not 0 after Holm's correction are
    bold. * marks a parameter at an end of its grid."""
    others = [f"minus {name}" for name in rows[0]["against"]]
    found = [["method", "personal", *others, "worst tenth", "global", "MB sent", "minutes",
              "own settings"]]
    found.append(["---"] * len(found[0]))
    for row in rows:
        means = [report.cell(title, row[title] and row[title][:1])
                 for title in ("personal", "worst tenth", "global", "MB sent", "minutes")]
        differences = [f"**{text}**" if order in ("ahead", "behind") else text
                       for text, order in map(report.difference, row["against"].values())]
        parameter, values = grids.get(row["method"], ("", ()))
        values = [z for z in values if z is not None]
        at_end = {f"--{parameter}={z}" for z in values[:1] + values[-1:]} & {*row["own"]}
        own = report.cell("own", row["own"]) + "*" * bool(at_end)
        found.append([report.name(row), means[0], *differences, *means[1:], own])
    return [f"|{'|'.join(line)}|" for line in found]


def draw(kinds, path):
    """Draws the methods' differences from Local and their intervals, one panel per kind."""
    tallest = max(map(len, kinds.values()))
    with common.drawing(path, 1, len(kinds), (4.6 * len(kinds), 1.2 + 0.27 * tallest)) as axes:
        for axis, (title, rows) in zip(np.atleast_1d(axes), kinds.items()):
            shown = [row for row in rows[::-1] if row["against"].get(TO[0])]
            for y, row in enumerate(shown):
                mean, interval, order, _ = row["against"][TO[0]]
                order = "inconclusive" if order.endswith("*") else order
                colour = {"ahead": "C2", "behind": "C1"}.get(order, "C6")
                axis.plot(mean, y, "o", color=colour, label=order)
                if interval:
                    axis.plot(interval, [y, y], color=colour)
            axis.axvline(0, color="C6", linewidth=1)
            axis.set_yticks(range(len(shown)), [row["method"] for row in shown])
            axis.set(title=title, xlabel="personal accuracy minus Local's")


def main(argv):
    args = arguments(argv)
    kinds = [Kind(title, args) for title in KINDS]
    names = list(planning.METHODS)
    if args.file:  # no more seeds than the other methods have
        others = [k.seeds([name for name in names if k.finished(name, 1)]) for k in kinds]
        args.seeds, names = max(others) or args.seeds, [args.mine]
    for seed, kind in itertools.product(range(args.seeds), kinds):  # a seed of all kinds first
        while points := [(name, settings, 0, 0) for name in names
                         for settings in kind.choose(name)[1]]:
            kind.train(points)
        runs = [(name, kind.choose(name)[0], split, seed) for split in range(SPLITS)
                for name in names]
        if missing := [run for run in runs if not kind.known_run(*run)]:
            kind.train(missing)
    rows = {kind.title: found for kind in kinds if (found := kind.rows())}
    text = "\n\n".join("\n".join([f"## {title}", "", *table(found, args.own)])
                       for title, found in rows.items()) + f"\n\n{mean_ranks(kinds)}"
    folder = pathlib.Path(args.out) if args.file else RESULTS
    (folder / "benchmark.md").write_text(text + "\n", encoding="utf-8")
    draw(rows, folder / "benchmark.png")
    common.say(f"{text}\n\ntable   {folder}/benchmark.md, benchmark.png")
    return 0
