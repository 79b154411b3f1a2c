"""The papers' tables as data, with a file for each paper: published values, the commands that make
ours, and explanations.

runs.py reads three names of a paper's file. TITLE is the paper. SETTINGS says what `@name` in its
commands stands for. TABLES lists its tables; a table's name begins with the name of the file.
reading.py gets numbers from records, and figures.py draws. A new paper needs a new file here, and
its name in PAPERS in runs.py.
"""

import itertools
from typing import NamedTuple

DATA = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "EMNIST": "emnist",
        "TinyImageNet": "tinyimagenet", "MNIST": "mnist"}


class Table(NamedTuple):
    name: str
    title: str
    columns: list
    rows: dict  # row -> {column: published value}
    cell: object  # (row, column) -> (command, measure); of a list of commands the best counts
    rank: int  # 1 is run first
    note: str  # what one must know to read it
    why: dict  # "All", row or row/column -> why our numbers are as they are
    draw: object  # a function of figures.py, or None


def table(name, title, columns, text, cell, rank, note="", why=None, draw=None):
    columns = columns.split() if isinstance(columns, str) else columns
    rows = values_of(text, columns)
    return Table(name, title, columns, rows, cell, rank, note, why or {}, draw)


def values_of(text, columns):
    """Returns {row: {column: value}} of a line `row | values` for each row. A value is verbatim, or
    ? (lost in our copy), or - (not in the paper)."""
    lines = (line.split("|") for line in text.strip().splitlines())
    return {row.strip(): dict(zip(columns, values.split(), strict=True)) for row, values in lines}


def unknown(rows, columns):
    """Returns a table's text where every value is lost: figures, mostly."""
    return "\n".join(f"{row} | {'? ' * len(columns)}" for row in rows)


def pairs(*parts):
    """Returns all combinations: pairs("a|b", "x|y") is a x, a y, b x, b y."""
    return [" ".join(words) for words in itertools.product(*(part.split("|") for part in parts))]


def settings(*texts):
    """Returns {"E": "1", "C": "0.1"} of "FedAvg E=1", "C=0.1"."""
    return dict(word.split("=") for text in texts for word in text.split() if "=" in word)
