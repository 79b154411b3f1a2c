"""Compares methods on the same images and split, with the same model, initial weights, sampled
clients, rounds, epochs, minibatches and rate. docs/compare.md lists exceptions. --benchmark FILE
tunes your method on CIFAR-10 and shows it beside all others: docs/benchmark.md.

    python compare.py --methods fedavg,fedper,docs/lastlayer.py --seeds 3 --out runs/three
    python compare.py --methods all --jobs 2                 (make compare: the bundled images)
    python compare.py --methods fedavg,a=fedprox,b=fedprox --set a.mu=0.01 --set b.mu=1

A method is one of this repository (see --methods), or a file of your own with arguments(argv) and
main(argv).
"""

import argparse
import itertools
import pathlib
import sys
import textwrap

import common
from comparing import benchmark, report
from comparing.planning import BY_DATASET, METHODS, SHARED, flags, plan, share
from comparing.training import job, train_all
from comparing.tuning import grid_of, tune
from fl.machine import when_interrupted


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
    there = [pathlib.Path(args.out, name).exists() for name in ("compare.md", "runs.csv")]
    if there == [True, False]:  # as in docs/
        p.error(f"--out {args.out} has a compare.md that no comparison wrote; use another --out")
    for word in rest:
        if word.partition("=")[0] in ("--seed", "--resume", "--plot"):
            p.error(f"{word} is not for comparisons: --seeds says how many, runs are resumed, and "
                    "figures are drawn")
    shared = share(rest)
    if args.against and args.seeds * args.split_seeds == 1:
        p.error("--against: one run of each method gives no interval; use --seeds 2 or more")
    return args, shared


def jobs(methods, args, shared):
    """Returns the Jobs of a comparison: every method with every seed on every split."""
    found = []
    for split, seed, method in itertools.product(range(args.split_seeds), range(args.seeds),
                                                 methods):
        at, folder = shared.split_seed + split, pathlib.Path(args.out, method.name)
        if split:
            folder /= f"split{at}"
        label = f"{method.name}, split {at}" if args.split_seeds > 1 else method.name
        found.append(job(method, seed, at, folder / str(seed), f"{label}, seed {seed}"))
    return found


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--benchmark"]:
        return benchmark.main(argv[1:])
    args, shared = arguments(argv)
    methods = plan(args.methods, args.set, shared)
    names = [method.name for method in methods]
    if unknown := [name for name in args.against if name not in names]:
        common.refuse(f"--against: --methods has no {unknown[0]}; its names are {', '.join(names)}")
    if points := grid_of(methods, args, shared):
        methods = plan(args.methods, args.set + tune(points, args, shared), shared)
    found = train_all(jobs(methods, args, shared), args.jobs, shared)
    records = {name: found[i::len(names)] for i, name in enumerate(names)}
    return report.report(records, methods, args, shared)


if __name__ == "__main__":
    when_interrupted(lambda: "the same command goes on from here")
    sys.exit(main())
