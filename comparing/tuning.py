"""--tune: trains each method with each point of its grid, and chooses by validation images."""

import itertools
import pathlib
import re
import shutil

import baselines
import common

from . import planning, training
from .report import MEASURES, lines


def grid_of(methods, args, shared):
    """Returns [(the --set words, the Job)] for each point of each method's grid."""
    grids, points = {method.name: {} for method in methods}, []
    if args.tune and not shared.client_val:
        common.refuse("--tune chooses on validation images: --client-val must be above 0")
    for word in sorted(args.tune, key=lambda word: "." in word.partition("=")[0]):  # NAME.* wins
        given = re.fullmatch(r"(?:([^.=]+)\.)?([^.=]+)=(.+)", word)
        if not given or given[1] not in (None, *grids):
            common.refuse(f"--tune {word}: say PARAMETER=A,B,... or NAME.PARAMETER=A,B,...; the "
                          f"names are {', '.join(grids)}")
        name, parameter, values = given.groups()
        for method in methods:
            own = parameter
            if name is None and parameter == "lr":  # that of each method's SGD
                own = baselines.SGD_RATE.get(method.method, "lr")
            if name in (None, method.name):
                grids[method.name][own] = values.split(",")
    for method in methods:
        grid = grids[method.name]
        for values in itertools.product(*grid.values()) if grid else ():
            chosen = [f"{key}={value}" for key, value in zip(grid, values)]
            words = [f"{method.name}.{word}" for word in chosen]
            mine = [word for word in args.set if word.partition(".")[0] == method.name]
            tried, = planning.plan(f"{method.name}={method.method}", mine + words, shared, "--tune")
            folder = pathlib.Path(args.out, "tune", method.name, ",".join(chosen), "0")
            run = training.job(tried, 0, shared.split_seed, folder, " ".join(words))
            points.append((words, run))
    return points


def tune(points, args, shared):
    """Trains the points, writes tune.md, and returns the --set words of each method's best one."""
    chosen, rows, out = {}, [], pathlib.Path(args.out)
    found = training.train_all([run for _, run in points], args.jobs, shared)
    for (words, run), r in zip(points, found):
        name, value = run.method.name, MEASURES["validation"](r)
        if value is None and not r["diverged"]:
            common.refuse(f"--tune: {name} measures no accuracy on validation images")
        rows.append([name, " ".join(word.partition(".")[2] for word in words),
                     "diverged" if r["diverged"] else f"{value:.4f}", ""])
        value = -1 if r["diverged"] else value
        if name not in chosen or value > chosen[name][0]:
            chosen[name] = value, words, run, rows[-1]
    for name, (value, _, run, row) in chosen.items():
        if value < 0:
            common.refuse(f"--tune: all runs of {name} diverged; try other values")
        values = [then[2] for then in rows if then[0] == name]
        if len(values) > 1 and len({*values}) == 1:
            common.say(f"note    all settings of {name} give {values[0]}: does it use them?")
        row[3] = "chosen"
        if not (out / name / "0").exists():  # it is the first run of the comparison, too
            part = out / name / "0.part"
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(run.folder, part)
            part.rename(out / name / "0")
    text = ("# Settings chosen on validation images\n\nThe mean accuracy on the clients' "
            f"validation images after the last round, with seed 0 and split {shared.split_seed}. "
            "The best is chosen; of equal ones the first.\n")
    page = lines(["method", "setting", "validation", "choice"], rows)
    (out / "tune.md").write_text("\n".join([text, *page, ""]), encoding="utf-8")
    common.say("\n".join([*page, ""]))
    return [word for _, words, *_ in chosen.values() for word in words]
