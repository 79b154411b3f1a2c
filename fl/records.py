"""Records of runs: result.json as it is written and read, and whether it is of the arguments that
are wanted.

In memory `record["rounds"]` is a list with a row (a dict) for each round. On the disk it is two
tables of columns, which pandas.DataFrame takes as they are:

    "rounds": {"seconds": [0.52, 0.49, ...], "bytes_up": 80000, ...}
    "evaluations": {"round": [5, 10, ...], "global/top1": [0.31, ...], ...}

`rounds` has what is known of rounds 1, 2, ...; a number in place of a list is that of each round.
`evaluations` has the rounds in which run.log was called, and its "global/top1" is a row's
row["global"]["top1"]. A null stands for what a round does not have, and for a measure that is not
finite. "final" stands for a list, such as accuracies by user, that is in the record's `final`.
Seconds are rounded to .01, and measures to eight digits. Those in `final` and `best` have all.
"""

import json
import math
import pathlib

from torch.utils._pytree import tree_map

from .machine import refuse
from .splits import unused

# what the record has of every round, and what it can have without run.log
EVERY_ROUND = ("round", "seconds", "bytes_up", "bytes_down", "images", "evaluation_seconds",
               "top1")
SHOWN = {"global": ("top1", "top5", "loss", "ece"),  # what is printed of an evaluated round
         "personal": ("mean", "std", "worst_decile", "val_mean")}
IN_FINAL = "final"
# flags that change nothing in the rounds
FREE = ("out", "resume", "plot", "parallel", "engine", "data_dir", "save_clients", "tensorboard",
        "fine_tune", "fine_tune_lr")


def at(folder):
    """Returns the path of a run's record: FOLDER/result.json, or FOLDER.json, as under results/,
    where most runs have left nothing else."""
    inside, alone = folder / "result.json", folder.with_name(folder.name + ".json")
    return alone if alone.exists() and not inside.exists() else inside


def read(path):
    """Returns the record in the file `path`, with a row for each round. Refuses a file that is no
    record."""
    try:
        record = json.loads(pathlib.Path(path).read_bytes())
        if not isinstance(record["rounds"], list):  # before, the disk had rows, too
            record["rounds"] = rows(record["rounds"], record.pop("evaluations"), record["final"])
            if record["status"] == "diverged" and record["rounds"]:
                record["rounds"][-1]["diverged"] = True
        record["args"]["seed"], record["final"], record["environment"]["sources"]  # all have them
    except FileNotFoundError:
        refuse(f"there is no record {path}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as problem:
        refuse(f"{path} can't be read as a record ({type(problem).__name__}); move it elsewhere")
    return record


def text(record):
    """Returns what is written to result.json: the record with columns, a line for each list."""
    whole = {}
    for name, value in record.items():
        whole |= columns(value, record["final"]) if name == "rounds" else {name: value}
    return in_lines(whole) + "\n"


def columns(history, final):
    """Returns {"rounds": table, "evaluations": table} of a list of rows. final: the record's."""
    every = [{name: row[name] for name in EVERY_ROUND if name in row} for row in history]
    others, known = {*EVERY_ROUND[1:], "diverged"}, flat(final)
    measured = [flat({name: z for name, z in row.items() if name not in others})
                for row in history]
    measured = [{name: IN_FINAL if isinstance(z, list) and known.get(name) == z else z
                 for name, z in row.items()} for row in measured]
    if len({frozenset(row) for row in every}) > 1:  # not every round was measured
        for row, more in zip(every, measured):
            more |= {name: row.pop(name) for name in EVERY_ROUND[5:] if name in row}
    rounds, evaluations = table(every), table([row for row in measured if len(row) > 1])
    del rounds["round"]
    rounds.setdefault("seconds", [])
    for name in ("bytes_up", "bytes_down", "images"):
        if len(set(rounds.get(name, ()))) == 1:
            rounds[name] = rounds[name][0]
    return {"rounds": rounds, "evaluations": evaluations}


def rows(rounds, evaluations, final):
    """Returns a row for each round, from the tables of `columns`."""
    n, known = len(rounds["seconds"]), flat(final)
    lists = {name: z if isinstance(z, list) else [z] * n for name, z in rounds.items()}
    found = cut({"round": list(range(1, n + 1)), **lists})
    for measured in cut(evaluations):
        row = found[measured["round"] - 1]
        for path, value in measured.items():
            *parts, name = path.split("/")
            inner = row
            for part in parts:
                inner = inner.setdefault(part, {})
            in_final = value == IN_FINAL and isinstance(known.get(path), list)
            inner[name] = known[path] if in_final else value  # or it is a text of the method
    return found


def measures(record):
    """Returns {round: {"global/top1": value, ...}} of a record that was read, with the digits that
    the disk has. Seconds are no measure."""
    tables = columns(record["rounds"], {})
    return {row["round"]: {name: z for name, z in flat(row).items()
                           if name not in ("seconds", "evaluation_seconds")}
            for row in rows(tables["rounds"], tables["evaluations"], {})}


def unlike(record, args, but=()):
    """Returns the names in `args`, a parser's (a dict), that have another value in the record.
    A flag that the record lacks is newer: it was None, False or 0. Not compared are the names
    `but`, flags that change no result or that the split does not use, and the device."""
    then, now = record["args"], json.loads(json.dumps(args, default=str))
    skipped = {*FREE, "device", *unused(now["split"]), *but}
    return [name for name, value in now.items() if name not in skipped
            and (then[name] != value if name in then else value)]


def table(some):
    """Returns {name: a value for each row}, rounded, None where a row has none."""
    names = dict.fromkeys(["round", *(name for row in some for name in row)])
    return {name: [rounded(name, row.get(name)) for row in some] for name in names}


def rounded(name, tree):
    """Returns a number or nested lists and dicts with the digits that a record keeps of floats."""
    if isinstance(tree, float):
        return round(tree, 2) if name.endswith("seconds") else float(f"{tree:.8g}")
    return tree_map(lambda z: rounded(name, z), tree) if isinstance(tree, list | dict) else tree


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
    try:
        return json.dumps(tree, separators=(",", ":"), allow_nan=False)
    except ValueError:
        finite = tree_map(lambda z: None if isinstance(z, float) and not math.isfinite(z)
                          else z, tree)
        return json.dumps(finite, separators=(",", ":"))
