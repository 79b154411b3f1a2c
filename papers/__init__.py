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
    rows: dict  # label -> published values, one for each column
    cell: object  # (row, column) -> (command, measure); of a list of commands the best counts
    rank: int  # 1 is run first
    note: str  # what one must know to read it
    why: dict  # "All", row or row/column -> why our numbers are as they are
    draw: object  # a function of figures.py, or None


def values_of(text):
    """{row: its values} of lines `row | values`."""
    lines = (line.split("|") for line in text.strip().splitlines())
    return {row.strip(): values.split() for row, values in lines}


def table(name, title, columns, text, cell, rank, note="", why=None, draw=None):
    """text: a line `row | values` for each row. A value is verbatim, or ? (lost in our copy), or -
    (not in the paper)."""
    if isinstance(columns, str):
        columns = columns.split()
    rows = values_of(text)
    assert all(len(values) == len(columns) for values in rows.values()), name
    return Table(name, title, columns, rows, cell, rank, note, why or {}, draw)


def pairs(*parts):
    """All combinations of the words between the bars: pairs("a|b", "x|y") is a x, a y, b x, b y."""
    return [" ".join(words) for words in itertools.product(*(part.split("|") for part in parts))]


def unknown(rows, columns):
    """A table's text where every value is lost: figures, mostly."""
    return "\n".join(f"{row} | {'? ' * columns}" for row in rows)
