"""How the quick defaults for `shapes` were chosen: each method with a few rates, or values of a
parameter of its own.

    python checks/tune_shapes.py [NAME ...]    (all: 45 minutes; a finished run is not run again)

No image of `shapes` is used. The runs see 12,000 images that fl.data.shapes draws from another
seed, split by another seed, in place of the data set. So the accuracies below are on validation
images, whatever the records call them: global on 2,000 images, personal on those that each client
held out. Prints the table of docs/shapes.md. Records: runs/tune/.
"""

import argparse
import contextlib
import importlib
import io
import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(HERE))
import fl.data
from fl import records

RUNS = HERE / "runs" / "tune"
GLOBAL, PERSONAL = "global", "personal"
RATES = ["--batch-size 20 --lr .02 --lr-decay 1", "--batch-size 20 --lr .05 --lr-decay 1",
         "--batch-size 10 --lr .03 --lr-decay .95", "--batch-size 10 --lr .02 --lr-decay .95"]
MOMENTA = ["--momentum .9 --lr .02", "--momentum 0 --lr .02", "--momentum 0 --lr .05"]
METHODS = {  # command, the measure that the method is for, what was tried
    "fedavg": ("fedavg --eval-every 5", GLOBAL,
               [f"--batch-size 10 --lr {lr} --lr-decay .95" for lr in (".05", ".1", ".2")]),
    "superfed, model": ("superfed --mix model", PERSONAL, RATES),
    "superfed, layer": ("superfed --mix layer", PERSONAL, RATES),
    "fedavgm": ("fedavgm --rounds 15", GLOBAL, ["--lr .05 --beta .9", "--lr .02 --beta .9"]),
    "fedslr": ("fedslr --rounds 15 --lambda 2e-3", PERSONAL, ["--lr .1", "--lr .05"]),
    "psinet": ("psinet --rounds 10", GLOBAL, ["--lr .02", "--lr .05"]),
    "persfl": ("persfl --rounds 10 --eval-every 2", PERSONAL, ["--lr .05", "--lr .02"]),
    "centralised": ("baselines --method centralised", GLOBAL,
                    [*MOMENTA, "--momentum .9 --lr .005"]),
    "scaffold": ("baselines --method scaffold", GLOBAL, MOMENTA),
    "feddyn": ("baselines --method feddyn --rounds 15", GLOBAL, MOMENTA),
    "per-fedavg": ("baselines --method per-fedavg --rounds 15", PERSONAL, MOMENTA),
    "pfedme": ("baselines --method pfedme --rounds 15", PERSONAL,
               ["--lr .02 --theta-lr .02", "--lr .03 --theta-lr .03"]),
}


def train(name, words):
    """The record of one run; seeds and images are not those of any page."""
    out = RUNS / name / words.replace("--", "").replace(" ", "_")
    record = out / "result.json"
    if not record.exists() or (records.read(record)["status"]
                               not in ("finished", "diverged")):
        file, *argv = METHODS[name][0].split()
        argv += [*words.split(), "--dataset", "shapes", "--data-dir", RUNS, "--seed", 1,
                 "--split-seed", 1, "--out", out]
        # a diverged run is a result, too
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            importlib.import_module(file).main([*map(str, argv)])
    return records.read(record)


def accuracy(row, measure):
    return row[measure]["top1" if measure == GLOBAL else "mean"]


def main(argv):
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("names", nargs="*", metavar="NAME", help=f"{'; '.join(METHODS)}")
    names = p.parse_args(argv).names
    for name in names:
        if name not in METHODS:
            p.error(f"no {name!r}; names are {'; '.join(METHODS)}")
    RUNS.mkdir(parents=True, exist_ok=True)
    arrays = dict(zip(("x_train", "y_train", "x_test", "y_test"), fl.data.shapes(seed=1)))
    # taken in place of the data set: see fl.data.load_data
    np.savez(RUNS / "shapes.npz", **arrays)
    print("| method | measure | settings tried | accuracy after half of the rounds "
          "| after all | best here |\n|---|---|---|---|---|---|")
    for name in names or METHODS:
        _, measure, grid = METHODS[name]
        reached, remark = {}, {}
        for words in grid:
            record = train(name, words)
            rows = [row for row in record["rounds"] if measure in row]
            if not rows:
                print(f"| {name} | {measure} | `{words}` | | | diverged at once |", flush=True)
                continue
            half = next(row for row in rows if 2 * row["round"] >= rows[-1]["round"])
            reached[words] = accuracy(half, measure), accuracy(rows[-1], measure)
            if record["diverged"]:
                remark[words] = f"diverged after round {rows[-1]['round']}"
        best = max(reached, key=lambda words: reached[words][1])
        for words, (half, last) in reached.items():
            mark = remark.get(words, "yes" * (words == best))
            print(f"| {name} | {measure} | `{words}` | {half:.3f} | {last:.3f} | {mark} |",
                  flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
