"""All methods with equal splits, weights, clients and local work, and each with settings that were
chosen for it on validation images. docs/benchmark.md has the tables and what they say.

    python compare.py --benchmark              (make benchmark: trains what is missing; hours)
    python compare.py --benchmark mine.py      a file of your own, beside the others' records
    python compare.py --benchmark mine.py --tune mu=0.01,0.1,1

At the end every method's personal models are fine-tuned. The first split of each kind and the
first seed choose: first the rate, then the method's own parameter, by the accuracy before
fine-tuning. While the first or the last value is best, the next one beyond it is tried, too.
CIFAR-100 chooses the rate alone, and takes own parameters from Dirichlet. Both are chosen again by
the accuracy after fine-tuning: from the first choice on to the best neighbour in one of them, until
none is better.
"""

import argparse
import itertools
import json
import math
import pathlib
from typing import NamedTuple

import numpy as np

import baselines
import common
from fl import records

from . import planning, ranks, report, training

EQUAL = ["--client-test=0.25", "--client-val=0.125", "--model=cifarnet", "--transform=normalize",
         "--epochs=1", "--batch-size=20", "--momentum=0"]
EPOCHS = 1, 3, 10, 30  # of fine-tuning
FINE_TUNE = f"--fine-tune={','.join(map(str, EPOCHS))}"
FEW = [*EQUAL, "--clients=20", "--fraction=0.5", "--rounds=40", "--eval-every=40"]
CIFAR10 = [*FEW, "--dataset=cifar10", "--limit=6400"]
KINDS = {"two classes": [*CIFAR10, "--split=classes", "--per-client=2"],
         "Dirichlet": [*CIFAR10, "--split=dirichlet-classes", "--alpha=0.3"],
         "iid": [*CIFAR10, "--split=iid"],
         "CIFAR-100": [*FEW, "--dataset=cifar100", "--limit=6400", "--split=dirichlet-classes",
                       "--alpha=0.1"],
         "100 clients": [*EQUAL, "--dataset=cifar10", "--limit=12800", "--clients=100",
                         "--fraction=0.1", "--rounds=200", "--eval-every=200", "--split=classes",
                         "--per-client=2"]}
SPLITS = 3  # of each kind
RESULTS = planning.HERE / "results" / "benchmark"  # what is known of all runs: KIND.json
TO = "local", "fedavg"  # the methods of the paired differences
PART = "fine-tuned"  # of report.PARTS, what is compared
BEFORE = "personal", "global"  # measured before fine-tuning, with settings chosen before it
TRIANGLE = {"ahead": " ▲", "behind": " ▼"}

# Fine-tuning makes fedavg-ft and fedprox-ft of fedavg and fedprox. "twice": two local epochs a
# round, as many as those methods have that train two models.
METHODS = {name: name for name in planning.METHODS if not name.endswith("-ft")} | {
    "local-twice": "local", "fedavg-twice": "fedavg"}
FIXED = {"local-twice": {"epochs": 2}, "fedavg-twice": {"epochs": 2}}
ONLY = {"100 clients": ("local", "local-twice", "fedavg", "fedavg-twice", "fedprox", "scaffold",
                        "fedper", "fedrep", "ditto", "superfed-mm")}
LIKE = {"CIFAR-100": "Dirichlet"}  # before fine-tuning only the rate is chosen


class Grid(NamedTuple):
    """Ascending values of a parameter. Those of `first` are tried; while the first or the last of
    all that were tried is the best, the next of `below` or `above` is, too."""

    parameter: str
    first: tuple
    below: tuple = ()
    above: tuple = ()

    @property
    def values(self):
        """All values that can be tried, in ascending order."""
        return *self.below[::-1], *self.first, *self.above

    def near(self, settings):
        """Returns settings with the next lower and the next higher value."""
        at = self.values.index(settings[self.parameter])
        return [settings | {self.parameter: self.values[i]}
                for i in (at - 1, at + 1) if 0 <= i < len(self.values)]


RATES = Grid("lr", (0.01, 0.03, 0.1, 0.3), (0.003, 0.001), (1, 3))
LAYERS = Grid("personal", (1, 2, 3), (), (4,))
START = Grid("start", (0.2, 0.4, 0.6), (0,), (0.8,))
OWN = {  # each method's own parameters; the rate is chosen with the middle value of the first
    "fedavgm": [Grid("beta", (0.7, 0.9, 0.97), (0.5, 0.3), (0.99,))],
    "superfed-mm": [START],
    "superfed-lm": [START],
    "psinet": [Grid("depth", ("conv2", "fc1", "fc2"))],
    "fedslr": [Grid("lambda", (1e-5, 1e-4, 1e-3), (1e-6, 1e-7), (1e-2,))],
    "persfl": [Grid("distill-lr", (0.015, 0.05, 0.15), (0.005,), (0.5,)),
               Grid("distill-epochs", (2, 5, 10), (1,), (20,))],
    "fedprox": [Grid("mu", (0.01, 0.1, 1), (0.001,), (10,))],
    "scaffold": [Grid("global-lr", (0.5, 1, 1.5), (0.25,), (2,))],
    "feddyn": [Grid("feddyn-alpha", (0.01, 0.1, 1), (0.001,), (10,))],
    "apfl": [Grid("apfl-alpha", (0.25, 0.5, 0.75), (0.1, 0.05), (0.9,))],
    "fedper": [LAYERS],
    "fedrep": [LAYERS],
    "lg-fedavg": [LAYERS],
    "ditto": [Grid("ditto-lambda", (0.01, 0.1, 1), (0.001,), (10,))],
    "pfedme": [Grid("pfedme-lambda", (5, 15, 50), (1.5, 0.5, 0.15), (150,))],
    "per-fedavg": [Grid("per-fedavg-alpha", (0.01, 0.03, 0.1), (0.003,), (0.3,))],
    "fedspa": [Grid("density", (0.25, 0.5, 0.75), (0.1,), (0.9, 0.95))],
    "fedma": [Grid("last-lr", (0.1, 0.3, 1), (0.03,), (3, 10))],
}


def arguments(argv):
    about, examples, how = __doc__.split("\n\n")
    p = common.Parser(prog="compare.py --benchmark", allow_abbrev=False, description=about,
                      epilog=f"{examples}\n\n{how}",
                      formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("file", nargs="?", help="your own method (docs/extend.md)")
    p.add_argument("--tune", default="", metavar="PARAMETER=A,B,...",
                   help="a parameter of your own method, chosen as its rate is")
    p.add_argument("--kinds", type=kinds, default=list(KINDS), metavar="A,B,...",
                   help=f"which of: {', '.join(KINDS)} (default: all)")
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
    if args.mine in METHODS or args.mine in planning.METHODS:
        p.error(f"{args.file}: the benchmark has a {args.mine}; give the file another name")
    args.own = dict(OWN)
    if args.tune:
        parameter, _, values = args.tune.partition("=")
        values = values.split(",")
        if not (parameter and all(values)):
            p.error(f"--tune {args.tune}: say PARAMETER=A,B,...")
        args.own[args.mine] = [Grid(parameter, tuple(values))]
    return args


def results_of(title):
    """Returns the file of a kind's known runs."""
    return RESULTS / f"{title.replace(' ', '-').lower()}.json"


def kinds(text):
    """An argparse type: the names of kinds of splits."""
    if unknown := [name for name in text.split(",") if name not in KINDS]:
        raise argparse.ArgumentTypeError(f"there is no kind {unknown[0]}; the kinds are "
                                         f"{', '.join(KINDS)}")
    return text.split(",")


class Kind:
    """One kind of split: its settings, and the runs that are known.

    known: method -> {the run's settings: what report.py needs of its record}
    chosen: part of report.PARTS -> {method: the settings with the best accuracy in that part}
    """

    def __init__(self, title, args):
        self.title, self.args = title, args
        self.committed = results_of(title)
        self.out = f"{args.out}/{self.committed.stem}"
        self.flags = KINDS[title]
        place = [f"--data-dir={args.data_dir}", *([f"--device={args.device}"] * bool(args.device))]
        self.shared = planning.share([*self.flags, *place])
        self.tuned = planning.share([*self.flags, FINE_TUNE, *place])
        found, like = (json.loads(path.read_text()) if path.exists() else {}
                       for path in (self.committed, results_of(LIKE.get(title, title))))
        committed, chosen = found.pop("methods", {}), found.pop("chosen", {})
        self.chosen = {part: chosen.get(part, {}) for part in report.PARTS}
        self.about = found  # settings, data, images (their fingerprint), environment
        self.given = like.get("chosen", {}).get("personal", {}) if title in LIKE else {}
        self.names = [*ONLY.get(title, METHODS), *filter(None, [args.mine])]
        self.known = {name: committed.get(name, {}) for name in self.names}

    def methods(self, settings, shared):
        """Returns the Methods of settings {method: {parameter: value}}."""
        of = METHODS | {self.args.mine: self.args.file}
        methods = (name if of[name] == name else f"{name}={of[name]}" for name in settings)
        sets = [f"{name}.{word}" for name in settings for word in words(settings[name])]
        return planning.plan(",".join(methods), sets, shared)

    def known_run(self, name, settings, split=0, seed=0):
        """Returns what is known of a run, None if nothing."""
        return self.known[name].get(key(settings, split, seed))

    def runs(self, name, seeds, part=PART):
        """Returns the finished_run of a method's chosen settings, on all splits."""
        settings, _ = self.choose(name, part)
        return [self.finished_run(name, settings, split, seed)
                for split in range(SPLITS) for seed in range(seeds)]

    def finished_run(self, name, settings, split=0, seed=0):
        """Returns what is known of a run that was fine-tuned, too, or has diverged, else None."""
        run = self.known_run(name, settings, split, seed)
        return run if run and (run["diverged"] or report.fine_tuned(run)) else None

    def train(self, wanted, shared):
        """Trains the runs (method, settings, split, seed) of a list. shared: self.shared, or
        self.tuned to fine-tune them, too."""
        data, jobs = common.images_for(self.shared, common.stream(0, "split", 1)), []
        if self.about.get("images") not in (None, data.fingerprint()):
            common.refuse(f"{self.title}: these are not the images of the known records, or have "
                          "another order; use those that `python fedavg.py --dataset "
                          f"{self.shared.dataset}` downloads")
        for name, settings, split, seed in wanted:
            method, = self.methods({name: settings}, shared)
            folder = pathlib.Path(self.out, name, key(settings, split, seed))
            jobs.append(training.job(method, seed, shared.split_seed + split, folder,
                                     f"{self.title}, {name}, {folder.name}"))
        found = training.train_all(jobs, self.args.jobs, shared)
        for (name, *run), r in zip(wanted, found):
            if not r["diverged"] and "val_mean" not in r["final"].get("personal", {}):
                common.refuse(f"{name} measures no personal models; have its loop call "
                              "run.log(federation.evaluate(w), federation.evaluate_clients(w))")
            self.known[name][key(*run)] = brief(r)
        self.about = {"settings": [*self.flags, FINE_TUNE], "data": found[0]["data"]["name"],
                      "images": data.fingerprint(), "environment": found[0]["environment"]}
        self.keep()

    def keep(self):
        """Writes the committed file, unless there is a file of a user's."""
        if not self.args.file:
            text = records.in_lines({**self.about, "chosen": self.chosen, "methods": self.known})
            self.committed.parent.mkdir(parents=True, exist_ok=True)
            part = self.committed.with_suffix(".part")
            part.write_text(text + "\n", encoding="utf-8")
            part.replace(self.committed)

    def choose(self, name, part=PART):
        """Returns the settings chosen by a method's accuracy in a part, and a list of those to be
        trained before they are known. A choice stays: on another CPU the runs that made it have
        slightly other values."""
        if name in self.chosen[part]:
            return self.chosen[part][name], []
        rates = RATES._replace(parameter=baselines.SGD_RATE.get(name, "lr"))
        settings, missing = (self.choose(name, "personal") if part == PART
                             else self.choose_all(name, rates))
        if not missing and part == PART:
            settings, missing = self.climb(name, settings, [rates, *self.args.own.get(name, ())])
        if not missing:
            self.chosen[part][name] = settings
        return settings, missing

    def choose_all(self, name, rates):
        """Returns choose() by the accuracy before fine-tuning."""
        if name in self.given:
            own, settings = [], {word: value for word, value in self.given[name].items()
                                 if word != rates.parameter}
        else:
            own = self.args.own.get(name, [])
            settings = FIXED.get(name, {}) | {grid.parameter: grid.first[(len(grid.first) - 1) // 2]
                                              for grid in own[:1]}
        for grid in (rates, *own):
            best, missing = self.best(name, settings, grid)
            if missing:
                return settings, missing
            settings = settings | {grid.parameter: best}
        return settings, []

    def validation(self, name, settings, part):
        """Returns the accuracy on validation images of a known run, -1 if it has diverged."""
        run = self.known_run(name, settings)
        return -1 if run["diverged"] else report.PARTS[part](run)["val_mean"]

    def climb(self, name, settings, grids):
        """Returns choose() by the accuracy after fine-tuning: from `settings` on to the best
        neighbour in one of these grids, until none is better."""
        while True:
            near = [settings, *itertools.chain(*(grid.near(settings) for grid in grids))]
            if missing := [point for point in near if not self.finished_run(name, point)]:
                return settings, missing
            best = max(near, key=lambda point: self.validation(name, point, PART))
            if best == settings:
                return settings, []
            settings = best

    def best(self, name, settings, grid):
        """Returns that value of a grid with the best validation accuracy, and a list of settings to
        be trained before it is known."""
        def accuracy(value):
            return self.validation(name, settings | {grid.parameter: value}, "personal")

        tried, below, above = list(grid.first), list(grid.below), list(grid.above)
        while True:
            points = [settings | {grid.parameter: value} for value in tried]
            if missing := [point for point in points if not self.known_run(name, point)]:
                return None, missing
            best = max(tried, key=accuracy)
            if best == tried[0] and below:
                tried.insert(0, below.pop(0))
            elif best == tried[-1] and above:
                tried.append(above.pop(0))
            else:
                return best, []

    def finished(self, name, seeds):
        return all(not self.choose(name, part)[1] and all(self.runs(name, seeds, part))
                   for part in report.PARTS)

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
        before, after = ({method.name: method for method in self.methods(
            {name: self.choose(name, part)[0] for name in names}, self.tuned)}
            for part in report.PARTS)
        rows = report.table({name: self.runs(name, seeds) for name in names}, [*after.values()],
                            [name for name in TO if name in names], self.tuned, PART)
        for row in rows:
            runs = self.runs(row["method"], seeds, "personal")
            row |= {title: report.measured(runs, title) for title in BEFORE}
            row["own before"] = report.own_settings(before[row["method"]], self.tuned)
        return rows


def mean_ranks(kinds):
    """Returns {method: its mean rank over the splits} of the kinds that have all methods, and a
    sentence on them; ({}, "") if there is none."""
    kinds = [kind for kind in kinds if kind.known.keys() >= METHODS.keys()
             and all(kind.finished(name, 1) for name in METHODS)]
    if not kinds:
        return {}, ""
    names = [name for name in kinds[0].known if all(kind.finished(name, 1) for kind in kinds)]
    runs = {name: [r | {"args": {"split_seed": f"{kind.title} {r['args']['split_seed']}"}}
                   for kind in kinds for r in kind.runs(name, kind.seeds(names))]
            for name in names}
    found, splits = report.ranks_over_splits(runs, PART), SPLITS * len(kinds)
    return found, (f"Two methods differ if their mean ranks over these {splits} splits do by "
                   f"{ranks.critical_difference(len(found), splits):.1f} or more (Nemenyi's test, "
                   ".05).")


def summary(rows, ranked):
    """Returns the table of all kinds in Markdown: fine-tuned accuracies, and in parentheses those
    before. A difference to fine-tuned FedAvg that is not 0 after Holm's correction is marked by a
    triangle. rows: {title: Kind.rows()}; ranked: {method: its mean rank}."""
    at = {title: {row["method"]: row for row in found} for title, found in rows.items()}
    names = dict.fromkeys(name for found in at.values() for name in found)
    found = [["method", *at, "mean rank"], ["---"] * (2 + len(at))]
    for name in sorted(names, key=lambda name: ranked.get(name, math.inf)):
        cells = []
        for row in (found_in.get(name) for found_in in at.values()):
            if not row or not row[PART]:
                cells.append("diverged" * bool(row))
                continue
            pair = row["against"].get(TO[1])
            order = TRIANGLE.get(pair.order if pair else "", "")
            cells.append(f"{row[PART][0]:.3f}{order} ({row['personal'][0]:.3f})")
        found.append([name, *cells, report.cell(report.RANK, ranked.get(name))])
    return [f"|{'|'.join(line)}|" for line in found]


def words(settings):
    """{"pfedme-lambda": 15, "theta-lr": .1} -> ["pfedme-lambda=15", "theta-lr=0.1"]"""
    return [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in settings.items()]


def key(settings, split, seed):
    return ",".join([*words(settings), f"split={split}", f"seed={seed}"])


def brief(r):
    """Returns all report.py needs of r."""
    def of(measures):
        names = "epochs", "top1", "mean", "worst_decile", "val_mean", "per_client"
        return {name: np.round(measures[name], 5).tolist() for name in names if name in measures}

    final = {part: of(r["final"][part]) for part in ("global", "personal") if part in r["final"]}
    if "fine_tuned" in r["final"]:
        final["fine_tuned"] = [of(measures) for measures in r["final"]["fine_tuned"]]
    return {"args": {name: r["args"][name] for name in ("split_seed", "seed")},
            "split": r["split"]["fingerprint"], "diverged": r["diverged"], "final": final,
            "bytes_up": r["bytes_up"], "bytes_down": r["bytes_down"],
            "seconds_per_round": r["seconds_per_round"],
            "local_epochs": r["local_epochs"],
            "rounds": [{"seconds": round(60 * report.MEASURES["minutes"](r), 2)}]}


def table(rows, grids=OWN):
    """Returns a kind's table in Markdown. A difference that is not 0 after Holm's correction is
    marked by a triangle, a parameter at an end of its grid and as much fine-tuning as there is by
    *. BEFORE's columns have the rate in parentheses, if it is another."""
    others = [f"minus {name}" for name in rows[0]["against"]]
    found = [["method", "personal", PART, *others, "its worst tenth", "global", "local epochs",
              "MB sent", "own settings"]]
    found.append(["---"] * len(found[0]))
    for row in rows:
        mean = {title: report.cell(title, row[title] and row[title][:1])
                for title in ("personal", PART, "its worst tenth", "global", "MB sent")}
        differences = [f"{text}{TRIANGLE.get(order, '')}"
                       for text, order in map(report.difference, row["against"].values())]
        ends = {word for grid in grids.get(row["method"], ())
                for word in (f"--{word}" for z in (grid.values[0], grid.values[-1])
                             for word in words({grid.parameter: z}))}
        own = report.cell("own", row["own"]) + "*" * bool(ends & {*row["own"]})
        if before := [word for word in row["own before"] if word not in row["own"]]:
            own += f" ({report.cell('own', before)} before)"
        rounds, more = row["local epochs"][0], row["extra epochs"][0]
        epochs = f"{rounds:.0f} + {more:.0f}" + "*" * (more == EPOCHS[-1])
        found.append([report.name(row), mean["personal"], mean[PART], *differences,
                      mean["its worst tenth"], mean["global"], epochs, mean["MB sent"], own])
    return [f"|{'|'.join(line)}|" for line in found]


def draw(kinds, path):
    """Draws the methods' differences from fine-tuned FedAvg: with their intervals after, and as
    open circles before they are fine-tuned. One panel per kind."""
    name, columns = TO[1], min(3, len(kinds))
    lines, tallest = math.ceil(len(kinds) / columns), max(map(len, kinds.values()))
    size = 4.6 * columns, lines * (1.2 + 0.27 * tallest)
    with common.drawing(path, lines, columns, size) as axes:
        axes = np.atleast_1d(axes).ravel()
        for axis in axes[len(kinds):]:
            axis.remove()
        for axis, (title, rows) in zip(axes, kinds.items()):
            reference = next((row[PART][0] for row in rows if row["method"] == name), 0)
            shown = [row for row in rows[::-1] if row[PART]]
            for y, row in enumerate(shown):
                mean, interval, order, _ = row["against"].get(name) or (0, None, "", None)
                order = "inconclusive" if order.endswith("*") else order
                colour = {"ahead": "C2", "behind": "C1"}.get(order, "C6")
                axis.plot(row["personal"][0] - reference, y, "o", color=colour, fillstyle="none")
                axis.plot(mean, y, "o", color=colour, label=order or None)
                if interval:
                    axis.plot(interval, [y, y], color=colour)
            axis.axvline(0, color="C6", linewidth=1)
            axis.set_yticks(range(len(shown)), [row["method"] for row in shown])
            axis.set(title=title, xlabel="accuracy minus fine-tuned FedAvg's")


def main(argv):
    args = arguments(argv)
    kinds = [Kind(title, args) for title in args.kinds]
    if args.file:  # no more kinds and seeds than the other methods have
        others = {kind: kind.seeds([name for name in kind.names if name != args.mine
                                    and kind.finished(name, 1)]) for kind in kinds}
        kinds = [kind for kind in kinds if others[kind]] or kinds
        args.seeds = max(others.values()) or args.seeds
    for seed, kind in itertools.product(range(args.seeds), kinds):  # a seed of all kinds first
        names = [args.mine] if args.file else kind.names
        for part, shared in zip(report.PARTS, (kind.shared, kind.tuned)):
            while points := [(name, settings, 0, 0) for name in names
                             for settings in kind.choose(name, part)[1]]:
                kind.train(points, shared)
            runs = [(name, kind.choose(name, part)[0], split)
                    for split in range(SPLITS) for name in names]
            if missing := [(*run, seed) for run in runs if not kind.finished_run(*run, seed)]:
                kind.train(missing, kind.tuned)
        kind.keep()
    rows = {kind.title: found for kind in kinds if (found := kind.rows())}
    ranked, sentence = mean_ranks(kinds)
    parts = {"All kinds": summary(rows, ranked), **{title: table(found, args.own)
                                                    for title, found in rows.items()}}
    text = "\n\n".join("\n".join([f"## {title}", "", *lines]) for title, lines in parts.items())
    text += f"\n\n{sentence}"
    folder = pathlib.Path(args.out) if args.file else RESULTS
    (folder / "benchmark.md").write_text(text + "\n", encoding="utf-8")
    draw(rows, folder / "benchmark.png")
    common.say(f"{text}\n\ntable   {folder}/benchmark.md, benchmark.png")
    return 0
