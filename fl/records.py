"""Records of runs: result.json as it is written and read, and whether it is of the arguments that
are wanted.

In memory `record["rounds"]` is a list with a row (a dict) for each round. On the disk it is two
tables of columns, which pandas.DataFrame takes as they are:

    "rounds": {"round": [1, 2, ...], "seconds": [0.52, ...], "bytes_up": 80000, ...}
    "evaluations": {"round": [5, 10, ...], "global/top1": [0.31, ...], ...}

`rounds` has what is known of every round. A number in place of a list is that of each round.
`evaluations` has the rounds in which run.log was called. "global/top1" is row["global"]["top1"]. A
null stands for what a round does not have, or for a measure that is not finite.
"""

import json
import pathlib

import numpy as np
from torch.utils._pytree import tree_map

from .splits import unused
from .training import refuse

# what the record has of every round, and what it can have without run.log
EVERY_ROUND = "round", "seconds", "bytes_up", "bytes_down", "evaluation_seconds", "top1"
# flags that change no result
FREE = "out", "resume", "plot", "parallel", "engine", "data_dir", "save_clients", "tensorboard"


def at(folder):
    """Returns the path of the record of a run: FOLDER.json, as under results/ where a run has left
    nothing else, or FOLDER/result.json."""
    one = folder.with_name(folder.name + ".json")
    return one if one.exists() else folder / "result.json"


def read(path):
    """Returns the record in the file `path`, with a row for each round. Refuses a file that is no
    record."""
    try:
        record = json.loads(pathlib.Path(path).read_bytes())
        record["rounds"] = rows(record["rounds"], record.pop("evaluations", {}))
        if record["status"] == "diverged" and record["rounds"]:
            record["rounds"][-1]["diverged"] = True
        record["args"]["seed"], record["final"], record["environment"]["sources"]  # every file's
    except FileNotFoundError:
        refuse(f"there is no record {path}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        refuse(f"{path} can't be read as a record ({type(problem).__name__}); move it elsewhere")
    return record


def text(record):
    """Returns what is written to result.json: the record with columns, a line for each list."""
    parts = ((columns(value) if name == "rounds" else {name: value}).items()
             for name, value in record.items())
    return in_lines(dict(item for part in parts for item in part)) + "\n"


def columns(history):
    """Returns {"rounds": table, "evaluations": table} of a list of rows. Seconds are rounded to
    .01, and bytes that are the same in every round become one number."""
    every = [{name: round(row[name], 2) if name.endswith("seconds") else row[name]
              for name in EVERY_ROUND if name in row} for row in history]
    others = {*EVERY_ROUND, "diverged"} - {"round"}
    measured = [flat({name: z for name, z in row.items() if name not in others})
                for row in history]
    rounds = table(every)
    for name in ("bytes_up", "bytes_down"):
        if len(set(rounds.get(name, ()))) == 1:
            rounds[name] = rounds[name][0]
    return {"rounds": rounds, "evaluations": table([row for row in measured if len(row) > 1])}


def rows(rounds, evaluations):
    """Returns a row for each round, from the tables of `columns`, or from rows, which records had
    before."""
    if isinstance(rounds, list):
        return rounds
    n = len(rounds["round"])
    lists = {name: z if isinstance(z, list) else [z] * n for name, z in rounds.items()}
    found = {row["round"]: row for row in cut(lists)}
    for measured in cut(evaluations):
        row = found[measured.pop("round")]
        for path, value in measured.items():
            *parts, name = path.split("/")
            inner = row
            for part in parts:
                inner = inner.setdefault(part, {})
            inner[name] = value
    return list(found.values())


def unlike(record, args, but=()):
    """Returns the names in `args`, a parser's (a dict), that have another value in the record.
    A flag that the record lacks is newer: it was None, False or 0. Not compared are the names
    `but`, flags that change no result or that the split does not use, and the device."""
    then, now = record["args"], json.loads(json.dumps(args, default=str))
    skipped = {*FREE, "device", *unused(now["split"]), *but}
    return [name for name, value in now.items() if name not in skipped
            and (then[name] != value if name in then else value)]


def table(some):
    """Returns {name: a value for each row}, None where a row has none."""
    names = dict.fromkeys(["round", *(name for row in some for name in row)])
    return {name: [row.get(name) for row in some] for name in names}


def cut(lists):
    """Returns the rows of a table of lists, each with what is not None."""
    names, values = list(lists), zip(*lists.values(), strict=True)
    return [{name: z for name, z in zip(names, row) if z is not None} for row in values]


def flat(tree, prefix=""):
    """Returns {"a/b": value} of nested dicts."""
    found = {}
    for name, z in tree.items():
        found |= flat(z, f"{prefix}{name}/") if isinstance(z, dict) else {f"{prefix}{name}": z}
    return found


def in_lines(tree, indent=""):
    """Returns a tree as JSON with a line for each value of a dict. Infinity and NaN become null."""
    if isinstance(tree, dict) and tree:
        inner = indent + " "
        lines = (f"{inner}{json.dumps(str(name))}: {in_lines(value, inner)}"
                 for name, value in tree.items())
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    tree = tree_map(lambda z: None if isinstance(z, float) and not np.isfinite(z) else z, tree)
    return json.dumps(tree, separators=(",", ":"))
