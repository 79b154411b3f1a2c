"""The papers' tables and ours: trains what is missing, resumes what was stopped, writes the pages.

    python -m papers                                trains what is missing, most valuable first
    python -m papers --list                         prints a line for each table: what is done
    python -m papers --list --only fedslr           also every run of these tables, its command
    python -m papers --only superfed-1 --seeds 3    trains one table, with three seeds
    python -m papers --scale 0.1                    trains a tenth of the rounds
    python -m papers --tables                       rebuilds the pages from the records alone
    python -m papers --again RECORD --rounds 20     repeats a record's first 20 rounds

The tables are data, with a file for each paper. A cell has a published value, a command, and the
measure that is read from the command's record. Cells and tables share runs. Seed s means `--seed s
--split-seed s`. PersFL's and FedAvgM's tables are means of five runs (--seeds 5). --only also takes
a run of a table: superfed-1/superfed-cifar10-mix-model.

A record is results/TABLE/RUN/SEED.json, or SEED/result.json where a run has just been trained.
TABLE is the first table that needs the run. With --scale 0.1 it is under results/scale-0.1/. A
record counts if its arguments are those of the command.

A run with --only or --scale is a trial: the pages stay as they are until --tables. --only also
divides the work between two machines. To merge their results, copy the folder results/ of one over
that of the other, and rebuild the pages.

--again runs a record's command in runs/again/ and prints both results side by side. RECORD is any
file under results/ or result.json of any run. With --rounds N it ends after N rounds (or the first
evaluation after them) and compares the rounds that both have.
"""

import argparse
import itertools
import os
import pathlib
import shlex
import signal
import subprocess
import sys

import common

from . import again, pages, runs
from .runs import TABLES


def train(r):
    """Runs one run, or resumes it if its state is there. Returns its exit code."""
    words = [*r.argv, "--out", os.path.relpath(r.path, runs.HERE)]
    state = r.path / "state.pt"
    if state.exists() and r.state in ("missing", "interrupted"):
        words.append("--resume")
    code = subprocess.call([sys.executable, *words], cwd=runs.HERE)
    if code in (0, 3):  # finished or diverged: nobody will resume it
        state.unlink(missing_ok=True)
    return code


def value(r):
    """Returns what the runs are sorted by: seed after seed, the most valuable table first, and the
    papers' own methods before those with which they are compared."""
    rank = min(TABLES[cell.table].rank for cell in runs.commands()[r.command])
    return r.seed, rank, r.command.startswith("baselines")


def reproduce(found):
    """Runs what is missing. Returns an exit code: 1 if a run failed."""
    todo, failed = sorted((r for r in found if not r.ended), key=value), []
    common.say(f"{len(found)} runs, {len(found) - len(todo)} of them done")
    for i, r in enumerate(todo):
        name = r.path.relative_to(runs.RESULTS)
        common.say(f"\n{i + 1}/{len(todo)}  {name}: {r.state}")
        code = train(r)
        if code not in (0, 3):
            failed.append(f"failed  {name}, exit code {code}")
    if failed:
        common.say("\n".join(failed))
    return 1 if failed else 0


def show(found, every):
    """Prints a line for each table; every: before it each run and the cells that are read from it.
    """
    here, read = {}, runs.commands()
    for name in TABLES:
        some = [r for r in found if any(cell.table == name for cell in read[r.command])]
        if some:
            here[name] = some
    for name, some in here.items() if every else ():
        common.say(f"{name}  {TABLES[name].title}")
        for r in some:
            rounds = f", {len(r.record['rounds'])} of {r.wanted} rounds" if r.record else ""
            common.say(f"  {r.state}{rounds}: python {shlex.join(r.argv)}")
            mine = [c for c in read[r.command] if c.table == name and r.seed == 0]
            for row, own in itertools.groupby(mine, lambda cell: cell.row):
                own = ", ".join(f"{cell.column} {cell.published}" for cell in own)
                common.say(f"      {row}: {own}")
    titles = "cells", "done", "short", "empty", "runs", "left"
    common.say(f"{'table':<20}{''.join(f'{word:>6}' for word in titles)}  title")
    for name, some in here.items():
        row = pages.counts(name) | {"runs": len(some), "left": sum(not r.ended for r in some)}
        numbers = "".join(f"{row[title]:>6}" for title in titles)
        common.say(f"{name:<20}{numbers}  {TABLES[name].title}")
    common.say(f"\n{len(found)} different runs, {sum(not r.ended for r in found)} left")


def run_command(argv):
    about, commands, details = __doc__.split("\n\n", 2)
    p = common.Parser(description=about, epilog=f"{commands}\n\n{details}",
                      formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", metavar="NAME", nargs="+",
                   help="tables or runs, by the beginnings of their names")
    p.add_argument("--seeds", type=common.positive_int, default=1,
                   help="seeds 0 to N-1 of each run (1)")
    p.add_argument("--scale", type=common.positive_fraction, default=1.0,
                   help="this share of the rounds; results are kept apart (1)")
    p.add_argument("--list", action="store_true", help="print what is done")
    p.add_argument("--tables", action="store_true", help="rebuild the pages alone")
    p.add_argument("--again", metavar="RECORD", type=pathlib.Path,
                   help="repeat a record's run in runs/again/, and compare the results")
    p.add_argument("--rounds", metavar="N", type=common.positive_int,
                   help="with --again: repeat only the first N rounds")
    args = p.parse_args(argv)
    if args.rounds and not args.again:
        p.error("--rounds belongs to --again; use --scale for a share of the rounds")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    if args.again:
        return again.repeat(args.again, args.rounds)
    commands = runs.chosen(args.only)
    if not commands:
        p.error(f"--only {' '.join(args.only)}: no such table or run; --list shows the tables")
    found = [runs.result(command, seed, args.scale) for seed in range(args.seeds)
             for command in commands]
    if args.list:
        show(found, bool(args.only))
        return 0
    code = 0 if args.tables else reproduce(found)
    if (args.only or args.scale != 1) and not args.tables:
        common.say("pages   not rebuilt after a part of the runs; --tables rebuilds them")
    else:
        pages.rebuild()
    return code


def main(argv=None):
    try:
        return run_command(argv)
    except KeyboardInterrupt:
        common.say("interrupted; the same command goes on from here")
        return 130


if __name__ == "__main__":
    sys.exit(main())
