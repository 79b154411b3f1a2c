"""The tables' cells, the commands behind them, and the commands' records under results/."""

import functools
import importlib
import itertools
import pathlib
import re
import shlex
from typing import NamedTuple

import common
from fl import records

from . import fedavg, fedavgm, fedslr, persfl, psinet, superfed

HERE = pathlib.Path(__file__).resolve().parent.parent
RESULTS = HERE / "results"

# A new paper goes to the end: a record lies in the folder of the first table that needs its run.
PAPERS = {"superfed": superfed, "psinet": psinet, "fedavgm": fedavgm, "fedslr": fedslr,
          "persfl": persfl, "fedavg": fedavg}
TABLES = {t.name: t for paper in PAPERS.values() for t in paper.TABLES}
SETTINGS = {name: flags for paper in PAPERS.values() for name, flags in paper.SETTINGS.items()}


class Cell(NamedTuple):
    table: str
    row: str
    column: str
    published: str
    commands: tuple
    measure: str


def cells(name):
    """Yields the Cells of a table."""
    t = TABLES[name]
    for row, values in t.rows.items():
        for column, published in values.items():
            if published != "-":
                commands, measure = t.cell(row, column)
                commands = (commands,) if isinstance(commands, str) else tuple(commands)
                yield Cell(name, row, column, published, commands, measure)


@functools.cache
def commands():
    """Returns {command: the Cells that are read from its record}."""
    found = {}
    for cell in itertools.chain(*map(cells, TABLES)):
        for command in cell.commands:
            found.setdefault(command, []).append(cell)
    return found


def place(command):
    """Returns the folder of a run's records, under results/: <table>/<its command without what is
    obvious>."""
    symbols = {"--fraction": "C", "--epochs": "E", "--batch-size": "B"}
    obvious = "baselines.py", "--dataset", "--method", "--no-prune", "--target"
    words = [symbols.get(w, w) for w in command.split() if w not in obvious]
    name = "-".join(word.removesuffix(".py").lstrip("-@") for word in words)
    return f"{commands()[command][0].table}/{name}"


def folder(command, scale=1.0):
    """Returns the folder that holds a record, or a folder, for each seed."""
    return (RESULTS if scale == 1 else RESULTS / f"scale-{scale:g}") / place(command)


def written_out(command):
    """Returns the command with SETTINGS' flags in place of @names."""
    return re.sub(r"@([\w-]+)", lambda match: SETTINGS[match.group(1)], command)


def parsed(words):
    """Returns all arguments (a dict) of the command `words`, by the parser of its file."""
    file, *flags = words
    if pathlib.Path(file).is_absolute():  # not of this repository
        return vars(common.load_file(file).arguments(flags))
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    return vars(module.arguments(flags))


@functools.cache
def arguments(command):
    """Returns all arguments that a command of the tables means."""
    return parsed(shlex.split(written_out(command)))


class Result(NamedTuple):
    """One seed of one run."""

    command: str
    seed: int
    scale: float
    path: pathlib.Path  # the folder in which it is trained
    wanted: int  # how many rounds it shall have
    state: str  # done, diverged, interrupted, other arguments, missing
    record: dict  # None if missing

    @property
    def ended(self):
        return self.state in ("done", "diverged")

    @property
    def bf16(self):
        return self.record["args"].get("precision") == "bf16"

    @property
    def argv(self):
        """Returns the words after `python`, without --out."""
        rounds = ["--rounds", str(self.wanted)] if self.scale != 1 else []
        seeds = ["--seed", str(self.seed), "--split-seed", str(self.seed)]
        return [*shlex.split(written_out(self.command)), *rounds, *seeds]


@functools.cache
def load(path, changed):
    """Returns the record at `path`; changed: when it was written."""
    return records.read(path)


def result(command, seed, scale=1.0):
    """Returns the Result of a command and a seed, with the record if there is one."""
    path, args = folder(command, scale) / str(seed), arguments(command)
    rounds = max(1, round(scale * args["rounds"]))
    file = records.at(path)
    if not file.exists():
        return Result(command, seed, scale, path, rounds, "missing", None)
    record = load(file, file.stat().st_mtime_ns)
    state = {"finished": "done", "diverged": "diverged"}.get(record["status"], "interrupted")
    wanted = args | {"seed": seed, "split_seed": seed, "rounds": rounds}
    # --precision has another default on a GPU, and the pages name bf16
    if records.unlike(record, wanted, but=("precision", "eval_every")):
        state = "other arguments"
    return Result(command, seed, scale, path, rounds, state, record)


def results(command, scale):
    """Returns the Results of all seeds that are there."""
    here = folder(command, scale)
    found = [*here.glob("*.json"), *(path.parent for path in here.glob("*/result.json"))]
    seeds = {int(path.stem) for path in found if path.stem.isdigit()}
    return [result(command, seed, scale) for seed in sorted(seeds)]


def scales():
    """Returns the scales under results/, the largest first."""
    names = [path.name.removeprefix("scale-") for path in RESULTS.glob("scale-[0-9]*")]
    return [1.0, *sorted(map(float, names), reverse=True)]


def chosen(only):
    """Returns the commands of the tables and runs whose names begin with one of the words `only`,
    up to a - or a /. Without words it returns all."""
    def fits(name):
        return not only or any(re.match(re.escape(word) + r"(?![^/-])", name) for word in only)

    return [command for command, read in commands().items()
            if fits(place(command)) or any(fits(cell.table) for cell in read)]
