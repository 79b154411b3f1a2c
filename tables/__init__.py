"""The papers' tables as data, one file a paper: published values, the commands that make ours, explanations.

A paper's file has three names that reproduce.py reads. TITLE is the paper. SETTINGS says what `@name` in its commands stands
for. TABLES lists its tables; a table's name begins with the name of the file. Beside the papers' files, reading.py gets numbers
from records, figures.py draws, and quick.py has the claims of --quick. A new paper is a new file here and its name in
reproduce.py's PAPERS.
"""

import itertools
from typing import NamedTuple

DATA = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "EMNIST": "emnist", "TinyImageNet": "tinyimagenet", "MNIST": "mnist"}


class Table(NamedTuple):
    name: str
    title: str
    columns: list
    rows: dict  # label -> published values, one for each column
    cell: object  # (row, column) -> (command, measure); of several commands in a list the best counts
    rank: int  # 1 is run first
    note: str  # what one must know to read it
    why: dict  # "All", row or row/column -> why our numbers are as they are
    draw: object  # a function of figures.py, or None
    base: object  # (row, column) -> the row and column whose rounds are divided by the cell's, the speed-up; or None


def values_of(text):
    """{row: its values} of lines `row | values`."""
    return {row.strip(): values.split() for row, values in (line.split("|") for line in text.strip().splitlines())}


def table(name, title, columns, text, cell, rank, note="", why=None, draw=None, base=None):
    """text: a line `row | values` for each row. A value is verbatim, or ? (lost in our copy), or - (not in the paper)."""
    if isinstance(columns, str):
        columns = columns.split()
    rows = values_of(text)
    assert all(len(values) == len(columns) for values in rows.values()), name
    return Table(name, title, columns, rows, cell, rank, note, why or {}, draw, base)


def pairs(*parts):
    """All combinations of the words between the bars: pairs("a|b", "x|y") is a x, a y, b x, b y."""
    return [" ".join(words) for words in itertools.product(*(part.split("|") for part in parts))]


def unknown(rows, columns):
    """A table's text where every value is lost: figures, mostly."""
    return "\n".join(f"{row} | {'? ' * columns}" for row in rows)
