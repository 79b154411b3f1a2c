"""The papers' tables and ours: trains what is missing, resumes what was stopped, writes the pages.

    python -m papers                                 trains what is missing, most valuable first
    python -m papers --list                          prints a line for each table: what is done
    python -m papers --list --verbose --only fedslr  prints every cell and its command
    python -m papers --only superfed-1 --seeds 3     trains one table, with three seeds
    python -m papers --scale 0.1 --budget 30m        trains a tenth of the rounds, for 30 minutes
    python -m papers --tables                        rebuilds the pages from the records alone

The tables are data, in tables/, with a file for each paper. A cell has a published value, a
command, and the measure that is read from the command's record. Cells and tables share runs. Seed s
means `--seed s --split-seed s`. PersFL's and FedAvgM's tables are means of five runs (--seeds 5).
--only also takes a run of a table: superfed-1/superfed-cifar10-mix-model.

A record is results/TABLE/RUN/SEED/result.json, where TABLE is the first table that needs the run.
With --scale 0.1 it is under results/scale-0.1/. A record counts if its arguments are those of the
command. It is stale if the algorithm's numbers have changed since (records.NUMBERS,
tests/test_golden.py): the pages then say so, and the next run replaces it.

A run with --only, --scale or --budget is a trial: the pages stay as they are until --tables. --only
also divides the work between two machines. To merge their results, copy the folder results/ of one
over that of the other, and rebuild the pages.
"""

import argparse
import functools
import hashlib
import importlib
import itertools
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
from typing import NamedTuple

import torch

import common
import fl.training
from fl.run import FREE, SHARED, numbers
from fl.splits import renamed

from . import fedavg, fedavgm, fedslr, figures, persfl, psinet, reading, superfed

HERE = pathlib.Path(__file__).resolve().parent.parent
RESULTS = HERE / "results"

# A new paper goes to the end: a record lies in the folder of the first table that needs its run.
PAPERS = {"superfed": superfed, "psinet": psinet, "fedavgm": fedavgm, "fedslr": fedslr,
          "persfl": persfl, "fedavg": fedavg}
TABLES = {t.name: t for paper in PAPERS.values() for t in paper.TABLES}
SETTINGS = {name: flags for paper in PAPERS.values() for name, flags in paper.SETTINGS.items()}

# --------------------------------------------------------------------------------------------------
# 1. Runs and their records


class Cell(NamedTuple):
    table: str
    row: str
    column: str
    published: str
    commands: tuple
    measure: str


def cells(name):
    t = TABLES[name]
    for row, values in t.rows.items():
        for column, published in zip(t.columns, values):
            if published != "-":
                commands, measure = t.cell(row, column)
                commands = (commands,) if isinstance(commands, str) else tuple(commands)
                yield Cell(name, row, column, published, commands, measure)


@functools.cache
def runs():
    """command -> the cells that are read from its record."""
    found = {}
    for cell in itertools.chain(*map(cells, TABLES)):
        for command in cell.commands:
            found.setdefault(command, []).append(cell)
    return found


def short(command):
    """Returns a run's name: its command without `obvious`."""
    symbols = {"--fraction": "C", "--epochs": "E", "--batch-size": "B"}
    obvious = "baselines.py", "--dataset", "--method", "--no-prune", "@superfed", "--target"
    words = [symbols.get(w, w) for w in command.split() if w not in obvious]
    return "-".join(word.removesuffix(".py").lstrip("-@") for word in words)


def place(command):
    """Returns the folder of a run's records, under results/: <table>/<name>."""
    return f"{runs()[command][0].table}/{short(command)}"


def folder(command, scale=1.0):
    """Returns the folder that holds a folder for each seed."""
    return (RESULTS if scale == 1 else RESULTS / f"scale-{scale:g}") / place(command)


def written_out(command):
    return re.sub(r"@([\w-]+)", lambda match: SETTINGS[match.group(1)], command)


def expand(command, **own):
    """Returns the words after `python`; own: further flags."""
    more = [(f"--{name.replace('_', '-')}", str(value)) for name, value in own.items()]
    return [*shlex.split(written_out(command)), *itertools.chain(*more)]


@functools.cache
def arguments(command):
    """Returns all arguments that a command means."""
    file, *flags = expand(command)
    return vars(importlib.import_module(file.removesuffix(".py")).arguments(flags))


@functools.cache
def device():
    """Returns the name of the device at hand, as in records."""
    return fl.training.device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


@functools.cache
def load(path, stamp):
    """Returns a record; stamp: when it was written."""
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        common.refuse(f"{path} can't be read as a record; move it elsewhere")


class Result(NamedTuple):
    """One seed of one run, its record and its state."""

    command: str
    seed: int
    scale: float
    path: pathlib.Path  # its folder
    state: str  # done, diverged, interrupted, stale, other arguments, missing
    record: dict  # None if missing

    @property
    def sound(self):
        return self.state in ("done", "diverged")

    @property
    def ended(self):
        """Returns how the run ended, even if its record is stale."""
        how = {"finished": "done", "diverged": "diverged"}
        return how.get(self.record["status"], "interrupted")

    @property
    def wanted(self):
        return max(1, round(self.scale * arguments(self.command)["rounds"]))


# What may differ between a record and its command. Seeds and rounds are compared by themselves.
# --precision has another default on a GPU, and the pages name bf16.
NOT_COMPARED = (*FREE, "device", "precision", "eval_every", "seed", "split_seed", "rounds")


def result(command, seed, scale=1.0):
    path = folder(command, scale) / str(seed)
    if not (path / "result.json").exists():
        return Result(command, seed, scale, path, "missing", None)
    record = load(path / "result.json", (path / "result.json").stat().st_mtime_ns)
    r = Result(command, seed, scale, path, "", record)
    then, now = renamed(record["args"]), arguments(command)
    unlike = (*NOT_COMPARED, *common.unused(now["split"]))
    now = {name: value for name, value in now.items() if name not in unlike}
    now |= {"seed": seed, "split_seed": seed, "rounds": r.wanted}
    if any(then.get(name, value) != value for name, value in now.items()):
        return r._replace(state="other arguments")
    stale = record["environment"].get("numbers", 0) != numbers(record["algorithm"])
    return r._replace(state="stale" if stale else r.ended)


def resumable(r):
    """Returns whether a run can be resumed with today's sources, on this device."""
    if r.state != "interrupted":
        return r.state == "missing"  # its record was never written, but its state may have been
    then, precision = r.record["environment"], arguments(r.command).get("precision")
    files = r.command.split()[0], *SHARED
    return (then["device"] == device() and r.record["args"].get("precision") == precision
            and all(hashlib.sha256((HERE / name).read_bytes()).hexdigest()
                    == then["sources"].get(name) for name in files))


def bf16(r):
    return r.record["args"].get("precision") == "bf16"


def results(command, scale):
    """Every seed that is there."""
    seeds = [path.parent.name for path in folder(command, scale).glob("*/result.json")]
    return [result(command, seed, scale) for seed in sorted(map(int, filter(str.isdigit, seeds)))]


def scales():
    names = [path.name.removeprefix("scale-") for path in RESULTS.glob("scale-[0-9]*")]
    return [1.0, *sorted(map(float, names), reverse=True)]


def argv(r):
    """Returns the words after `python` for this run."""
    rounds = {"rounds": r.wanted} if r.scale != 1 else {}
    return expand(r.command, **rounds, seed=r.seed, split_seed=r.seed,
                  out=os.path.relpath(r.path, HERE))


def train(r, deadline):
    """Runs or resumes one run; returns its exit code, or None when the time is up."""
    go_on = ["--resume"] * resumable(r)  # without it, the old record is put aside
    child = subprocess.Popen([sys.executable, *argv(r), *go_on], cwd=HERE)
    try:
        code = child.wait(max(0.1, deadline - time.monotonic()))
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as stopped:
        child.terminate()  # it writes its state
        child.wait()
        if isinstance(stopped, KeyboardInterrupt):
            raise
        return None
    if code in (0, 3):  # finished or diverged: nobody will resume it
        (r.path / "state.pt").unlink(missing_ok=True)
    return code


def by_value(found):
    """Returns the runs in the order in which they are trained: seed after seed, the most valuable
    table first, and the papers' own methods before those with which they are compared."""
    def key(r):
        rank = min(TABLES[cell.table].rank for cell in runs()[r.command])
        return r.seed, rank, r.command.startswith("baselines")

    return sorted(found, key=key)


def reproduce(found, budget):
    """Runs what is missing. Returns an exit code: 1 if a run failed."""
    deadline = time.monotonic() + (budget or float("inf"))
    todo, failed = by_value([r for r in found if not r.sound]), []
    fl.training.say(f"{len(found)} runs, {len(found) - len(todo)} of them done")
    for i, r in enumerate(todo):
        if time.monotonic() > deadline:
            break
        fl.training.say(f"\n{i + 1}/{len(todo)}  {r.path.relative_to(RESULTS)}: {r.state}")
        code = train(r, deadline)
        if code not in (None, 0, 3):
            failed.append(f"failed  {r.path.relative_to(RESULTS)}, exit code {code}")
    if time.monotonic() > deadline:
        fl.training.say("the time is up; the same command goes on from here")
    if failed:
        fl.training.say("\n".join(failed))
    return 1 if failed else 0


def show(found, verbose):
    """Prints a line for each table; verbose: also every run with its command, and the cells that
    are read from it."""
    here = {name: [r for r in found if any(cell.table == name for cell in runs()[r.command])]
            for name in TABLES}
    here = {name: some for name, some in here.items() if some}
    for name, some in here.items() if verbose else ():
        fl.training.say(f"{name}  {TABLES[name].title}")
        for r in some:
            rounds = f", {len(r.record['rounds'])} of {r.wanted} rounds" if r.record else ""
            fl.training.say(f"  {r.state}{rounds}: python {shlex.join(argv(r))}")
            mine = [c for c in runs()[r.command] if c.table == name and r.seed == 0]
            for row, own in itertools.groupby(mine, lambda cell: cell.row):
                own = ", ".join(f"{cell.column} {cell.published}" for cell in own)
                fl.training.say(f"      {row}: {own}")
    titles = "cells", "done", "short", "empty", "runs", "stale", "left"
    fl.training.say(f"{'table':<20}{''.join(f'{word:>6}' for word in titles)}  title")
    for name, some in here.items():
        stale, left = sum(r.state == "stale" for r in some), sum(not r.sound for r in some)
        row = "".join(f"{n:>6}" for n in (*counts(name), len(some), stale, left))
        fl.training.say(f"{name:<20}{row}  {TABLES[name].title}")
    left = sum(not r.sound for r in found)
    fl.training.say(f"\n{len(found)} different runs, {left} left")


# --------------------------------------------------------------------------------------------------
# 2. What a cell shows: its command's records, in the paper's unit


class Shown(NamedTuple):
    """What the pages say of a cell: one command's records at one scale."""

    results: list
    mean: float  # in the papers' unit; None if the record does not have it
    std: float  # over seeds; None for one
    short: bool  # fewer rounds than wanted
    note: str  # rounds, if not all; diverged; half precision; settings tried


def view(command, measure, scale):
    """Returns a Shown of the finished seeds, else the interrupted, else the diverged."""
    found = [r for r in results(command, scale) if r.state != "other arguments"]
    use = next((some for how in ("done", "interrupted", "diverged")
                if (some := [r for r in found if r.ended == how])), None)
    if not use:
        return None
    of = arguments(command)["rounds"]
    n = min(of if reading.on_target(r.record) else len(r.record["rounds"]) for r in use)
    diverged = sum(r.ended == "diverged" for r in found)
    notes = [f"{n} of {of} rounds"] * (n < of)
    notes += [f"{diverged} of {len(found)} diverged"] * (diverged > 0)
    notes += ["bf16"] * any(map(bf16, use)) + ["stale"] * any(r.state == "stale" for r in use)
    values = [reading.last(r.record, measure) for r in use if r.ended != "diverged"]
    mean, std = reading.combine(values, measure)
    return Shown(use, mean, std, n < of, ", ".join(notes))


@functools.cache
def shown(cell):
    """Returns what a cell shows, or None: the best of several commands, at the largest of several
    scales. Interrupted runs come last."""
    options = []
    for scale in scales():
        found = [s for command in cell.commands if (s := view(command, cell.measure, scale))]
        if found:
            s = max(found, key=lambda s: reading.goodness(s.mean, cell.measure))
            tried = f"{len(found)} of {len(cell.commands)} settings tried"
            note = ", ".join(filter(None, [s.note, tried * (len(cell.commands) > 1)]))
            options.append(s._replace(note=note))
    return next((s for s in options if s.results[0].ended != "interrupted"),
                options[0] if options else None)


def counts(name):
    """Counts a table's cells: all, those with all rounds, with fewer, without a result."""
    found = [shown(cell) for cell in cells(name)]
    fewer, none = sum(s.short for s in found if s), found.count(None)
    return len(found), len(found) - fewer - none, fewer, none


def ours(cell, s):
    if s.mean is None:
        how = "not reached" if cell.measure.startswith("rounds_to") else "not recorded"
        return "diverged" if s.results[0].ended == "diverged" else how
    spread = "" if s.std is None else f" ± {reading.digits(s.std, cell.measure)}"
    return f"{reading.digits(s.mean, cell.measure)}{spread} ({len(s.results)})"


def differs(cell, s):
    """Returns whether ours is further from the paper's number than its standard deviation. Only
    full runs with several seeds are judged."""
    published = reading.number(cell.published)
    user = cell.row.startswith("User")  # a user k here isn't the paper's user k
    known = published is not None and s.std is not None
    return known and not s.short and not user and abs(s.mean - published) > s.std


# --------------------------------------------------------------------------------------------------
# 3. The pages under results/: README.md, and for each paper <paper>.md and <paper>-runs.md


def line(*words):
    return "| " + " | ".join(map(str, words)) + " |"


OVERVIEW = """# The papers' tables, and ours

`python -m papers --tables` writes this page, and two pages for each paper, from the records in
this folder. Don't edit them. `make reproduce` runs what is missing.

A cell is one number of a table. *done*: our run has as many rounds as the paper's (for Psi-Net this
number is our guess), with one seed or more. *short*: it has fewer. *empty*: not run.

Other runs are in folders of their own, and the papers' pages in [docs](../docs/) quote them:
`fedslr` (a small CNN; ResNet-18), `fedavg-starts`, `fedavg-beyond`, `fedavgm-seeds`,
`superfed-own-start`, `superfed-local`, `superfed-official`, `psinet-softmax`, `psinet-bn`,
`persfl-normalize`, `persfl-local`, `precision`, and [comparisons of
methods](../docs/compare.md): `compare`, `compare-plain` and `compare-cifar10`.
[LOG.md](LOG.md) lists what was tried without success.
"""
HOW_TO_READ = """How to read a cell:

- `47.06 / 48.31 ± 2.08 (2)`: the paper has 47.06. We have 48.31 after the last round. It is the
  mean over 2 seeds, and 2.08 is their standard deviation. A seed sets the split and the initial
  weights. Accuracies are in per cent.
- `?`: the paper's number is lost in our copy, or the paper only draws it. `-`: the paper has no
  such cell. `·`: not run.
- **!**: ours differs from the paper's by more than the standard deviation. Only runs of full length
  and with two seeds or more are judged.
- `[40 of 200 rounds]`: our run is shorter than the paper's. `[bf16]`: it was computed in half
  precision. `[stale]`: the algorithm's numbers have changed since the run. `[3 of 4 settings
  tried]`: we show the best of those 3.
"""
RUNS_ARE = """The runs that made the numbers of [the tables]({paper}.md). The command is for seed 0;
for seed s add `--seed s --split-seed s`. Minutes are for one seed, with evaluation. *stale*: the
algorithm's numbers have changed since the run ([CHANGELOG](../CHANGELOG.md)).
`python -m papers --list --verbose --only {paper}` also shows the runs that are missing.
"""


def pages(paper):
    """Returns the text of <paper>.md and <paper>-runs.md, which depend on the records alone."""
    tables, made = [], {}
    for t in (t for t in TABLES.values() if t.name.startswith(f"{paper}-")):
        found = {(cell.row, cell.column): (cell, shown(cell)) for cell in cells(t.name)}
        tables += table_lines(t, found)
        made |= {s.results[0].path: s.results for _, s in found.values() if s}
    stale = sum(any(r.state == "stale" for r in seeds) for seeds in made.values())
    title, these = PAPERS[paper].TITLE, f"[Our {len(made)} runs]({paper}-runs.md)"
    links = (f"[The code](../{paper}.py). [About it](../docs/{paper}.md). "
             f"[All papers](README.md). {these}" + f", {stale} of them stale" * (stale > 0) + ".")
    text = [f"# {title}", "", links, "", HOW_TO_READ.strip(), *tables]
    titles = "python ...", "seeds", "rounds", "device", "minutes", ""
    runs_text = [f"# {title}: our runs", "", RUNS_ARE.format(paper=paper), line(*titles),
                 line(*["---"] * 6), *map(run_line, made.values())]
    return "\n".join(text) + "\n", "\n".join(runs_text) + "\n"


def speed_up(t, found, cell, s):
    """Returns the speed-up in rounds over t.base's cell: the paper's / ours."""
    of, base = found.get(t.base and t.base(cell.row, cell.column), (None, None))
    if not (base and base.mean and s.mean):
        return ""
    theirs = reading.number(of.published) / reading.number(cell.published)
    return f"; {theirs:.1f}x / {base.mean / s.mean:.1f}x"


def table_lines(t, found):
    """One table in Markdown. found: (row, column) -> (cell, what it shows or None)."""
    text = ["", f"## {t.name}", "", f"**{t.title}.** {t.note}".strip(), ""]
    text += [f"![{t.title}]({t.name}.png)", ""] * (RESULTS / f"{t.name}.png").exists()
    text += [line("", *t.columns), line(*["---"] * (len(t.columns) + 1))]
    reasons = []
    for row in t.rows:
        words = []
        for cell, s in (found.get((row, column), (None, None)) for column in t.columns):
            if s:
                mark, note = " **!**" * differs(cell, s), f" [{s.note}]" * bool(s.note)
                speed = speed_up(t, found, cell, s)
                words.append(f"{cell.published} / {ours(cell, s)}{mark}{note}{speed}")
                reasons += ["All", row, f"{row}/{cell.column}"]
            else:
                words.append(f"{cell.published} / ·" if cell else "-")
        text.append(line(row, *words))
    sentences = [f"- {key.replace('/', ', ')}: {why}" for key, why in t.why.items()
                 if key in reasons]
    return [*text, *["", "Why ours are as they are:", ""] * bool(sentences), *sentences]


def run_line(found):
    """One run in Markdown, with all its seeds."""
    first, where = found[0], found[0].path.parent.relative_to(RESULTS)
    command = written_out(first.command) + f" --rounds {first.wanted}" * (first.scale != 1)
    command += " --precision bf16" * bf16(first)
    rows, minutes = [r.record["rounds"] for r in found], {}  # minutes: on each device
    for r in found:
        spent = sum(row["seconds"] + row.get("evaluation_seconds", 0) for row in r.record["rounds"])
        minutes.setdefault(r.record["environment"]["device"], []).append(spent / 60)
    means = (f"{sum(spent) / len(spent):.1f}" for spent in minutes.values())
    return line(f"[`{command}`]({where})", " ".join(str(r.seed) for r in found),
                min(map(len, rows)), ", ".join(minutes), ", ".join(means),
                "stale" * any(r.state == "stale" for r in found))


def overview():
    """Returns the text of README.md, with a line for each table."""
    titles = "table", "in the paper", "cells", "done", "short", "empty"
    text = [OVERVIEW, line(*titles), line(*["---"] * 6)]
    found = {name: counts(name) for name in TABLES}
    for name, t in TABLES.items():
        text.append(line(f"[{name}]({name.split('-')[0]}.md#{name})", t.title, *found[name]))
    text.append(line("all", "", *map(sum, zip(*found.values()))))
    return "\n".join(text) + "\n"


def rebuild():
    """Draws the figures and writes the pages."""
    for t in (t for t in TABLES.values() if t.draw):
        found = [(cell, s, f" [{s.note}]" * bool(s.note)) for cell in cells(t.name)
                 if (s := shown(cell)) and s.mean is not None]
        if found:
            title = f"Our runs of {PAPERS[t.name.split('-')[0]].TITLE.split(',')[0]}, {t.title}"
            figures.draw(t.draw, RESULTS / f"{t.name}.png", title, found)
    (RESULTS / "README.md").write_text(overview(), encoding="utf-8")
    for paper in PAPERS:
        for name, text in zip((paper, f"{paper}-runs"), pages(paper)):
            (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    fl.training.say(f"pages   {RESULTS / 'README.md'} and two for each paper")


# --------------------------------------------------------------------------------------------------
# 4. The command line


def duration(text):
    """Seconds of 90s, 30m or 2h."""
    match = re.fullmatch(r"([\d.]+)([smh])", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text} must be like 90s, 30m or 2h")
    return common.positive(match.group(1)) * {"s": 1, "m": 60, "h": 3600}[match.group(2)]


def chosen(only):
    """Returns the commands of the tables and runs whose names begin with one of the words `only`,
    up to a - or a /. Without words it returns all."""
    def fits(name):
        return not only or any(re.match(re.escape(word) + r"(?![^/-])", name) for word in only)

    return [command for command, read in runs().items()
            if fits(place(command)) or any(fits(cell.table) for cell in read)]


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
    p.add_argument("--budget", type=duration, help="stop after this time: 90s, 30m, 2h")
    for name, text in (("--list", "print what is done, a line for each table"),
                       ("--verbose", "with --list: every cell and its command"),
                       ("--tables", "rebuild the pages alone")):
        p.add_argument(name, action="store_true", help=text)
    args = p.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    commands = chosen(args.only)
    if not commands:
        p.error(f"--only {' '.join(args.only)}: no such table or run; --list shows the tables")
    if args.verbose and not args.list:
        p.error("--verbose belongs to --list")
    found = [result(command, seed, args.scale) for seed in range(args.seeds)
             for command in commands]
    if args.list:
        show(found, args.verbose)
        return 0
    code = 0 if args.tables else reproduce(found, args.budget)
    if (args.only or args.budget or args.scale != 1) and not args.tables:
        fl.training.say("pages   not rebuilt after a part of the runs; --tables rebuilds them")
    else:
        rebuild()
    return code


def main(argv=None):
    try:
        return run_command(argv)
    except KeyboardInterrupt:
        fl.training.say("interrupted; the same command goes on from here")
        return 130


if __name__ == "__main__":
    sys.exit(main())
