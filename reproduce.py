"""The papers' tables and ours: runs what is missing, continues what was stopped, and writes the pages under results/.

    python reproduce.py                                   run what is missing, most valuable first; then rebuild the pages
    python reproduce.py --list                            a line for each table: what is done, and how long the rest takes here
    python reproduce.py --list --verbose --only fedslr    every cell and its command
    python reproduce.py --only superfed-1 --seeds 3       one table (or a run of it: superfed-1/superfed-cifar10-mix-model)
    python reproduce.py --scale 0.1 --budget 30m          a tenth of the rounds, kept apart; stops in time, continues later
    python reproduce.py --tables                          rebuild the pages alone, from the results there are
    python reproduce.py --accept "why" --only fedavgm     stale results stand for today's sources; the reason is kept
    python reproduce.py --quick                           who beats whom, on the embedded data set, in about 20 minutes

The tables are data, in tables/: a file a paper. A cell has a published value, a command and what is read from its record. Cells
and tables share runs. Seed s is `--seed s --split-seed s`. PersFL's and FedAvgM's tables are means of five runs: --seeds 5.

A run's record is results/TABLE/RUN/SEED/result.json, where TABLE is the first table that needs the run. With --scale 0.1 it is
under results/scale-0.1/. A record counts if today's source files made it with the command's arguments. A record of other source
files is stale: the pages say so, and the next run replaces it. --accept makes stale records count (accepted.json).

With --only, --scale or --budget a run is a trial: the pages stay as they are until --tables. Two machines can share the work by
--only. To merge, copy one's results/ over the other's and rebuild the pages.
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
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

import torch

import common
import engine
from records import FREE, SHARED
from tables import fedavg, fedavgm, fedslr, figures, persfl, psinet, reading, superfed
from tables.quick import CLAIMS

HERE = pathlib.Path(__file__).parent
RESULTS, RUNS = HERE / "results", HERE / "runs"

# A new paper goes to the end: a run's record lies in the folder of the first table that needs it.
PAPERS = {"superfed": superfed, "psinet": psinet, "fedavgm": fedavgm, "fedslr": fedslr, "persfl": persfl, "fedavg": fedavg}
TABLES = {t.name: t for paper in PAPERS.values() for t in paper.TABLES}
SETTINGS = {name: flags for paper in PAPERS.values() for name, flags in paper.SETTINGS.items()}

# ---------------------------------------------------------------------------------------------------------------------
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
                yield Cell(name, row, column, published, (commands,) if isinstance(commands, str) else tuple(commands), measure)


@functools.cache
def runs():
    """command -> the cells that are read from its record."""
    found = {}
    for cell in itertools.chain(*map(cells, TABLES)):
        for command in cell.commands:
            found.setdefault(command, []).append(cell)
    return found


def short(command):
    """A run's name: its command without the obvious."""
    symbols = {"--fraction": "C", "--epochs": "E", "--batch-size": "B"}
    obvious = ("baselines.py", "--dataset", "--method", "@export", "--no-prune", "@superfed", "--target")
    words = [symbols.get(w, w) for w in command.split() if w not in obvious]
    return "-".join(word.removesuffix(".py").lstrip("-@") for word in words)


def place(command):
    """Where a run's records are, under results/: <table>/<name>."""
    return f"{runs()[command][0].table}/{short(command)}"


def folder(command, scale=1.0):
    """Where the seeds of a run are."""
    return (RESULTS if scale == 1 else RESULTS / f"scale-{scale:g}") / place(command)


def written_out(command):
    return re.sub(r"@([\w-]+)", lambda match: SETTINGS[match.group(1)], command)


def expand(command, out, /, **own):
    """The words behind `python`, for a record in the folder `out`; own: further flags."""
    more = [word for name, value in (own | {"out": out}).items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [word.replace("{out}", str(out)) for word in shlex.split(written_out(command)) + more]


@functools.cache
def arguments(command):
    """All arguments that a command means: what its file hands to common.Federation."""
    file, *flags = expand(command, ".")
    return common.arguments_of(importlib.import_module(file.removesuffix(".py")).main, flags)


@functools.cache
def digest(name):
    return hashlib.sha256((HERE / name).read_bytes()).hexdigest() if (HERE / name).exists() else None


@functools.cache
def device():
    """The device at hand, as records name it."""
    return engine.device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


@functools.cache
def load(path, stamp):
    """A record and a mark of its bytes; stamp: when it was written."""
    text = path.read_bytes()
    try:
        return json.loads(text), hashlib.sha256(text).hexdigest()[:16]
    except ValueError:
        common.refuse(f"{path} can't be read as a record; move it elsewhere")


class Result(NamedTuple):
    """One seed of one run, and what its record is worth."""

    command: str
    seed: int
    scale: float
    path: pathlib.Path  # its folder
    state: str  # done, diverged, interrupted, stale, other arguments, missing
    record: dict  # None if missing
    mark: str

    @property
    def sound(self):
        return self.state in ("done", "diverged")

    @property
    def ended(self):
        """How the run itself ended, whatever its record is worth."""
        return {"finished": "done", "diverged": "diverged"}.get(self.record["status"], "interrupted")

    @property
    def wanted(self):
        return max(1, round(self.scale * arguments(self.command)["rounds"]))


# What may differ between a record and its command; seeds and rounds are compared by themselves. --precision has another default
# on a GPU; bf16 is said on the page.
NOT_COMPARED = (*FREE, "device", "precision", "eval_every", "seed", "split_seed", "rounds")


def has_arguments(record, command):
    """Whether a record is of the command's arguments. What it does not name counts as equal."""
    then, now = record["args"], arguments(command)
    return all(then.get(name, value) == value for name, value in now.items() if name not in NOT_COMPARED)


def result(command, seed, scale=1.0):
    path = folder(command, scale) / str(seed)
    if not (path / "result.json").exists():
        return Result(command, seed, scale, path, "missing", None, "")
    record, mark = load(path / "result.json", (path / "result.json").stat().st_mtime_ns)
    r = Result(command, seed, scale, path, "", record, mark)
    args, sources = record["args"], record["environment"]["sources"]
    own = {"seed": seed, "split_seed": seed, "rounds": r.wanted}
    same = has_arguments(record, command) and all(args.get(name, value) == value for name, value in own.items())
    if r.ended == "interrupted":  # it can be resumed only as and where it was begun
        same = same and args.get("precision") == arguments(command).get("precision") and record["environment"]["device"] == device()
    if not same:
        return r._replace(state="other arguments")
    today, key = {name: digest(name) for name in (*sources, *SHARED)}, str(path.relative_to(RESULTS))
    stands = any(entry["results"].get(key) == mark and today.items() <= entry["sources"].items() for entry in accepted())
    return r._replace(state=r.ended if sources == today or stands else "stale")


def bf16(r):
    return r.record["args"].get("precision") == "bf16"


def results(command, scale):
    """Every seed that is there."""
    seeds = [path.parent.name for path in folder(command, scale).glob("*/result.json")]
    return [result(command, seed, scale) for seed in sorted(int(name) for name in seeds if name.isdigit())]


def scales():
    return [1.0, *sorted((float(p.name[6:]) for p in RESULTS.glob("scale-[0-9]*")), reverse=True)]


def accepted():
    path = RESULTS / "accepted.json"
    return load(path, path.stat().st_mtime_ns)[0] if path.exists() else []


def accept(why, found):
    """Lets stale results stand for today's files: an entry in accepted.json, to be reviewed like any change. Results that are gone
    leave it."""
    stale = [r for r in found if r.state == "stale" and r.ended != "interrupted"]  # these can't be resumed by today's files
    marks = {str(r.path.relative_to(RESULTS)): r.mark for r in stale}
    sources = {name: digest(name) for r in stale for name in (*r.record["environment"]["sources"], *SHARED)}
    if marks:
        kept = [{**e, "results": {k: v for k, v in e["results"].items() if k not in marks and (RESULTS / k / "result.json").exists()}}
                for e in accepted()]
        entries = [e for e in kept if e["results"]] + [{"why": why, "sources": sources, "results": marks}]
        (RESULTS / "accepted.json").write_text(json.dumps(entries, indent=1) + "\n")
    print(f"accepted {len(marks)} stale results")


# Times


def kind(command):
    """Runs of one kind take equally long per round: the command without what only changes values."""
    values = r" --(lr|mu|nu|start|eta-g|rounds|soft|teacher|p-start|theta-lr|([\w-]+-)?(lambda|beta|alpha)) \S+| @export"
    return re.sub(values, "", command)


@functools.cache
def seconds_per_round():
    """kind -> seconds on this device, evaluation's share included, from records of any length."""
    known = {}
    for scale, command in itertools.product(scales(), runs()):
        for r in results(command, scale):
            if r.record and r.record["environment"]["device"] == device() and r.record["rounds"] and not bf16(r):
                known[kind(command)] = seconds(r.record) / len(r.record["rounds"])
    return known


def seconds(record):
    """What a run took, with evaluation where the record knows it."""
    return sum(row["seconds"] + row.get("evaluation_seconds", 0) for row in record["rounds"])


def estimate(r):
    """Seconds that a run still takes here, or None."""
    if r.sound:
        return 0.0
    one = seconds_per_round().get(kind(r.command))
    if one is None:
        return None
    return one * (r.wanted - (len(r.record["rounds"]) if r.state == "interrupted" else 0))


def spell(seconds):
    if seconds is None:
        return "an unknown time"
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def left(found):
    """How long the runs that are not done take here, in words."""
    times = [estimate(r) for r in found if not r.sound]
    unknown = times.count(None)
    known = [spell(sum(filter(None, times)))] * (unknown < len(times) or not times)
    return ", ".join(known + [f"{unknown} unknown"] * (unknown > 0))


# Running


def argv(r):
    """What stands behind `python` for this run."""
    rounds = {"rounds": r.wanted} if r.scale != 1 else {}
    return expand(r.command, os.path.relpath(r.path, HERE), **rounds, seed=r.seed, split_seed=r.seed)


def train(r, deadline=None):
    """Runs or resumes one run; returns its exit code, or None when the time is up."""
    go_on = ["--resume"] * (r.state not in ("stale", "other arguments"))  # without it, the old record is put aside
    child = subprocess.Popen([sys.executable, *argv(r), *go_on], cwd=HERE)
    try:
        code = child.wait(deadline and max(0.1, deadline - time.monotonic()))
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
    """Seed after seed; the most valuable first, the papers' own methods before those they compare with, then the shortest."""
    def key(r):
        rank, seconds = min(TABLES[cell.table].rank for cell in runs()[r.command]), estimate(r)
        return r.seed, rank, r.command.startswith("baselines"), float("inf") if seconds is None else seconds

    return sorted(found, key=key)


def reproduce(found, budget):
    """Runs what is missing. Returns an exit code: 1 if a run failed."""
    deadline = budget and time.monotonic() + budget
    todo, failed = by_value([r for r in found if not r.sound]), []
    print(f"{len(found)} runs, {len(found) - len(todo)} of them done; time left here: {left(found)}")
    for i, r in enumerate(todo):
        if deadline and time.monotonic() > deadline:
            break
        print(f"\n{i + 1}/{len(todo)}  {r.path.relative_to(RESULTS)}: {r.state}, {spell(estimate(r))}", flush=True)
        code = train(r, deadline)
        if code not in (None, 0, 3):
            failed.append(f"failed  {r.path.relative_to(RESULTS)}, exit code {code}")
    if deadline and time.monotonic() > deadline:
        print("the time is up; the same command goes on from here")
    print("\n".join(failed))
    return 1 if failed else 0


def show(found, verbose):
    """--list: a line for each table; verbose: every run with its command, and the cells that are read from it."""
    here = {name: [r for r in found if any(cell.table == name for cell in runs()[r.command])] for name in TABLES}
    here = {name: some for name, some in here.items() if some}
    for name, some in here.items() if verbose else ():
        print(f"{name}  {TABLES[name].title}")
        for r in some:
            rounds = f" in round {len(r.record['rounds'])} of {r.wanted}" if r.state == "interrupted" else ""
            print(f"  {r.state}{rounds}, {spell(estimate(r))}: python {shlex.join(argv(r))}")
            mine = [cell for cell in runs()[r.command] if cell.table == name and r.seed == 0]
            for row, own in itertools.groupby(mine, lambda cell: cell.row):
                print(f"      {row}: {', '.join(f'{cell.column} {cell.published}' for cell in own)}")
    titles = "".join(f"{word:>6}" for word in ("cells", "done", "short", "empty", "runs", "stale", "left"))
    print(f"{'table':<20}{titles}  {'time left':<22}title")
    for name, some in here.items():
        stale, to_run = sum(r.state == "stale" for r in some), sum(not r.sound for r in some)
        numbers = "".join(f"{n:>6}" for n in (*counts(name), len(some), stale, to_run))
        print(f"{name:<20}{numbers}  {left(some):<22}{TABLES[name].title}")
    to_run = sum(not r.sound for r in found)
    print(f"\n{len(found)} different runs, {to_run} left. Their time on {device()}: {left(found)}")


# ---------------------------------------------------------------------------------------------------------------------
# 2. What a cell shows: its command's records, in the paper's unit


class Shown(NamedTuple):
    """What the pages say of a cell: one command's records at one scale."""

    results: list
    mean: float  # in the papers' unit; None where it isn't in the record
    std: float  # over seeds; None for one
    short: bool  # fewer rounds than wanted
    note: str  # rounds, if not all; diverged; half precision; settings tried


def view(command, measure, scale):
    """Of the finished seeds; without one, of those interrupted; else of those that diverged."""
    found = [r for r in results(command, scale) if r.record and r.state != "other arguments"]
    use = next((some for how in ("done", "interrupted", "diverged") if (some := [r for r in found if r.ended == how])), None)
    if not use:
        return None
    of = arguments(command)["rounds"]
    n = min(of if reading.on_target(r.record) else len(r.record["rounds"]) for r in use)
    diverged = sum(r.ended == "diverged" for r in found)
    notes = [f"{n} of {of} rounds"] * (n < of) + [f"{diverged} of {len(found)} diverged"] * (diverged > 0)
    notes += ["bf16"] * any(map(bf16, use)) + ["stale"] * any(r.state == "stale" for r in use)
    if use[0].ended == "diverged":
        return Shown(use, None, None, n < of, ", ".join(notes))
    mean, std = reading.combine([reading.last(r.record, measure) for r in use], measure)
    return Shown(use, mean, std, n < of, ", ".join(notes))


@functools.cache
def shown(cell):
    """What a cell shows, or None. Of several commands: the best. Of several scales: the largest; interrupted runs come last."""
    options = []
    for scale in scales():
        found = [s for command in cell.commands if (s := view(command, cell.measure, scale))]
        if found:
            s = max(found, key=lambda s: reading.goodness(s.mean, cell.measure))
            tried = f"{len(found)} of {len(cell.commands)} settings tried"
            options.append(s._replace(note=", ".join(filter(None, [s.note, tried * (len(cell.commands) > 1)]))))
    return next((s for s in options if s.results[0].ended != "interrupted"), options[0] if options else None)


def counts(name):
    """A table's cells: how many in all, with all rounds, with fewer, without a result."""
    found = [shown(cell) for cell in cells(name)]
    some = [s for s in found if s]
    fewer = sum(s.short for s in some)
    return len(found), len(some) - fewer, fewer, len(found) - len(some)


def ours(cell, s):
    if s.mean is None:
        how = "not reached" if cell.measure.startswith("rounds_to") else "not recorded"
        return "diverged" if s.results[0].ended == "diverged" else how
    spread = "" if s.std is None else f" ± {reading.digits(s.std, cell.measure)}"
    return f"{reading.digits(s.mean, cell.measure)}{spread} ({len(s.results)})"


def differs(cell, s):
    """Whether ours is further from the paper's than the spread over seeds. Said of all rounds and of several seeds alone."""
    published = reading.number(cell.published)
    user = cell.row.startswith("User")  # a user k here isn't the paper's user k
    return not (published is None or s.std is None or s.short or user) and abs(s.mean - published) > s.std


# ---------------------------------------------------------------------------------------------------------------------
# 3. The pages under results/: README.md, and for each paper <paper>.md and <paper>-runs.md


def line(*words):
    return "| " + " | ".join(map(str, words)) + " |"


OVERVIEW = """# The papers' tables, and ours

`python reproduce.py --tables` writes this page, and two pages for each paper, from the records in this folder. Don't edit them.
`make reproduce` runs what is missing.

A cell is one number of a table. *done*: our run has as many rounds as the paper's (Psi-Net: as we guess), with one seed or more.
*short*: it has fewer.
*empty*: not run.

Other runs are in folders of their own. The papers' pages in [docs](../docs/) quote them: `fedslr` (a small CNN, 60 rounds;
ResNet-18), `fedavg-starts`, `fedavg-beyond`, `superfed-own-start`, `superfed-local`, `superfed-official`, `psinet-softmax`,
`persfl-normalize`, `persfl-local`, `precision`, and [comparisons of methods](../docs/compare.md), `compare`, `compare-plain` and
`compare-cifar10`. What was tried without success: [LOG.md](LOG.md).
"""
HOW_TO_READ = """How to read a cell:

- `47.06 / 48.31 ± 2.08 (2)`: the paper has 47.06. We have 48.31 after the last round. It is the mean over 2 seeds, and 2.08 is
  their standard deviation. A seed sets the split and the initial weights. Accuracies are in per cent.
- `?`: the paper's number is lost in our copy, or the paper only draws it. `-`: the paper has no such cell. `·`: not run.
- **!**: ours differs from the paper's by more than the standard deviation. It is said only of runs of full length and of two
  seeds or more.
- `[40 of 200 rounds]`: our run is shorter than the paper's. `[bf16]`: computed in half precision. `[stale]`: source
  files have changed since the run (see above). `[3 of 4 settings tried]`: we show the best of those 3.
"""
RUNS_ARE = """The runs that made the numbers of [the tables]({paper}.md). The command is for seed 0; for seed s add
`--seed s --split-seed s`. Minutes are for one seed, with evaluation. *stale*: source files have changed since the run, and
[accepted.json](accepted.json) does not let it stand. `python reproduce.py --list --verbose --only {paper}` also shows the runs that are
missing.
"""


def pages(paper):
    """The text of <paper>.md and <paper>-runs.md: functions of the records, of accepted.json and of today's source files."""
    tables, made = [], {}
    for t in (t for t in TABLES.values() if t.name.startswith(f"{paper}-")):
        found = {(cell.row, cell.column): (cell, shown(cell)) for cell in cells(t.name)}
        tables += table_lines(t, found)
        made |= {s.results[0].path: s.results for _, s in found.values() if s}
    stale = sum(any(r.state == "stale" for r in seeds) for seeds in made.values())
    title, links = PAPERS[paper].TITLE, f"[The code](../{paper}.py). [About it](../docs/{paper}.md). [All papers](README.md)."
    ours_are = (f"[Our {len(made)} runs]({paper}-runs.md), {stale} of them stale (stale: source files have changed since the run, "
                "and nobody has [shown](accepted.json) that this changes no number).")
    text = [f"# {title}", "", links, ours_are, "", HOW_TO_READ.strip(), *tables]
    runs_text = [f"# {title}: our runs", "", RUNS_ARE.format(paper=paper),
                 line("python ...", "seeds", "rounds", "device", "minutes", ""), line(*["---"] * 6), *map(run_line, made.values())]
    return "\n".join(text) + "\n", "\n".join(runs_text) + "\n"


def speed_up(t, found, cell, s):
    """How many times fewer rounds than the cell of t.base: the paper's and ours."""
    of, base = found.get(t.base(cell.row, cell.column), (None, None)) if t.base else (None, None)
    if not (base and base.mean and s.mean):
        return ""
    return f"; {reading.number(of.published) / reading.number(cell.published):.1f}x / {base.mean / s.mean:.1f}x"


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
                words.append(f"{cell.published} / {ours(cell, s)}{mark}{note}{speed_up(t, found, cell, s)}")
                reasons += ["All", row, f"{row}/{cell.column}"]
            else:
                words.append(f"{cell.published} / ·" if cell else "-")
        text.append(line(row, *words))
    if sentences := [f"- {key.replace('/', ', ')}: {why}" for key, why in t.why.items() if key in reasons]:
        text += ["", "Why ours are as they are:", "", *sentences]
    return text


def run_line(found):
    """One run in Markdown, of all its seeds."""
    first, where = found[0], found[0].path.parent.relative_to(RESULTS)
    command = written_out(first.command).replace("{out}/", "") + f" --rounds {first.wanted}" * (first.scale != 1)
    command += " --precision bf16" * bf16(first)
    seeds, rounds = " ".join(str(r.seed) for r in found), min(len(r.record["rounds"]) for r in found)
    minutes = statistics.mean(seconds(r.record) / 60 for r in found)
    stale = "stale" * any(r.state == "stale" for r in found)
    return line(f"[`{command}`]({where})", seeds, rounds, first.record["environment"]["device"], f"{minutes:.1f}", stale)


def overview():
    """The text of README.md: a line for each table."""
    text = [OVERVIEW, line("table", "in the paper", "cells", "done", "short", "empty"), line(*["---"] * 6)]
    numbers = {name: counts(name) for name in TABLES}
    for name, t in TABLES.items():
        text.append(line(f"[{name}]({name.split('-')[0]}.md#{name})", t.title, *numbers[name]))
    text.append(line("all", "", *map(sum, zip(*numbers.values()))))
    return "\n".join(text) + "\n"


def rebuild():
    """Draws the figures and writes the pages."""
    for t in (t for t in TABLES.values() if t.draw):
        found = [(cell, shown(cell)) for cell in cells(t.name)]
        found = [(cell, s, f" [{s.note}]" * bool(s.note)) for cell, s in found if s and s.mean is not None]
        if found:
            figures.draw(t.draw, RESULTS / f"{t.name}.png", f"{PAPERS[t.name.split('-')[0]].TITLE.split(',')[0]}, {t.title}", found)
    (RESULTS / "README.md").write_text(overview(), encoding="utf-8")
    for paper in PAPERS:
        for name, text in zip((paper, f"{paper}-runs"), pages(paper)):
            (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    print(f"pages   {RESULTS / 'README.md'} and two for each paper")


# ---------------------------------------------------------------------------------------------------------------------
# 4. Who beats whom, quickly


def quick(seeds):
    """Trains what the claims need into runs/quick/, and prints who beats whom. Returns an exit code: 1 if a claim fails."""
    @functools.cache
    def record(command, seed):
        out = RUNS / "quick" / str(seed) / short(command)
        words = expand(command, out, seed=seed, split_seed=seed)
        path, sources = out / "result.json", {name: digest(name) for name in (words[0], *SHARED)}
        kept = json.loads(path.read_text()) if path.exists() else None
        if kept and kept["status"] == "finished" and kept["environment"]["sources"] == sources and has_arguments(kept, command):
            return kept
        print(f"python {command} (seed {seed})", flush=True)
        code = subprocess.run([sys.executable, *words], cwd=HERE, stdout=subprocess.DEVNULL).returncode
        if code:
            common.refuse(f"this command ended with exit code {code}" + " (the run diverged)" * (code == 3))
        return json.loads(path.read_text())

    def value(commands, measure, seed):
        commands = [commands] if isinstance(commands, str) else commands
        return max(reading.combine([reading.last(record(command, seed), measure)], measure)[0] for command in commands)

    start, held = time.monotonic(), 0
    table = [[(value(*c.more, seed), value(*c.less, seed)) for c in CLAIMS] for seed in range(seeds)]
    print()
    for claim, pairs in zip(CLAIMS, zip(*table)):
        held += all(more > less for more, less in pairs)
        digits = 4 if max(more for more, _ in pairs) < 1 else 2  # millions of numbers, or per cent
        numbers = "   ".join(f"{'pass' if more > less else 'FAIL'}  {more:>6.{digits}f} {less:>6.{digits}f}" for more, less in pairs)
        print(f"{numbers}  {claim.paper}: {claim.words}")
    which = "seed 0" if seeds == 1 else f"each of seeds 0 to {seeds - 1}"
    print(f"\n{held} of {len(CLAIMS)} claims hold; {which}, embedded data set, {time.monotonic() - start:.0f} s")
    return 0 if held == len(CLAIMS) else 1


# ---------------------------------------------------------------------------------------------------------------------
# 5. The command line


def duration(text):
    """Seconds of 90s, 30m or 2h."""
    match = re.fullmatch(r"([\d.]+)([smh])", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text} must be like 90s, 30m or 2h")
    return common.positive(match.group(1)) * {"s": 1, "m": 60, "h": 3600}[match.group(2)]


def chosen(only):
    """The commands of the tables and runs whose names begin with one of the words `only`, at a - or a /; all without."""
    def fits(name):
        return not only or any(re.match(re.escape(word) + r"(?![^/-])", name) for word in only)

    return [command for command, read in runs().items() if fits(place(command)) or any(fits(cell.table) for cell in read)]


def run_command(argv):
    about, commands, details = __doc__.split("\n\n", 2)
    p = common.Parser(description=about, epilog=f"{commands}\n\n{details}",
                      formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", metavar="NAME", nargs="+", help="tables or runs, by the beginnings of their names")
    p.add_argument("--seeds", type=common.positive_int, default=1, help="seeds 0 to N-1 of each run, with --quick too (1)")
    p.add_argument("--scale", type=common.positive_fraction, default=1.0,
                   help="this share of the rounds; results are kept apart (1)")
    p.add_argument("--budget", type=duration, help="stop after this time: 90s, 30m, 2h")
    for name, text in (("--list", "what is done, a line for each table"),
                       ("--verbose", "with --list: every cell and its command"),
                       ("--tables", "rebuild the pages alone"),
                       ("--quick", "who beats whom, on the embedded data set")):
        p.add_argument(name, action="store_true", help=text)
    p.add_argument("--accept", metavar="WHY", help="let stale results stand for today's source files")
    args = p.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    if args.quick:
        others = (args.only, args.scale != 1, args.budget, args.list, args.tables, args.accept)
        if any(others):
            p.error("--quick goes with --seeds alone")
        return quick(args.seeds)
    commands = chosen(args.only)
    if not commands:
        p.error(f"--only {' '.join(args.only)}: no such table or run; --list shows the tables")
    if args.accept == "":
        p.error("--accept wants a reason")
    if args.verbose and not args.list:
        p.error("--verbose belongs to --list")
    if args.accept:
        accept(args.accept, [r for command in commands for s in scales() for r in results(command, s)])
    found = [result(command, seed, args.scale) for seed in range(args.seeds) for command in commands]
    if args.list:
        show(found, args.verbose)
        return 0
    code = 0 if args.tables or args.accept else reproduce(found, args.budget)
    if (args.only or args.budget or args.scale != 1) and not (args.tables or args.accept):
        print("pages   not rebuilt after a part of the runs; `python reproduce.py --tables` does it")
    else:
        rebuild()
    return code


def main(argv=None):
    try:
        return run_command(argv)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here")
        return 130


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends without a word under | head
    sys.exit(main())
