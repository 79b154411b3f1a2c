"""FedAvg's rounds until a target, if not every round is measured.

    python -m papers.fedavg_how_often       prints them, and draws results/fedavg-how-often.svg

The runs in results/fedavg-beyond measured the accuracy after every round, and went on beyond the
target. So what every k-th round alone would have shown can be counted afterwards.
"""

import numpy as np

import common
from fl import records
from fl.run import rounds_to

from .runs import RESULTS

RUNS = RESULTS / "fedavg-beyond"
DRAWN = {"IID clients": "2nn-iid-C-0.1/0.json", "non-IID clients": "2nn-shards-C-0.1/0.json"}


def every(k, target, history):
    """Returns the rounds until the target for each of the k ways to keep every k-th round of a
    record's history: [k]."""
    return [rounds_to(target, history[first::k]) for first in range(k)]


def draw(histories, target, path):
    """Draws best-so-far curves. histories: a title -> the rounds of a record."""
    with common.drawing(path, 1, 2, (11, 4.2), "2NN, $E$ = 1, $B$ = 10, $C$ = .1, seed 0") as axes:
        for axis, (title, history) in zip(axes, histories.items()):
            t, top1 = (np.array([row[name] for row in history]) for name in ("round", "top1"))
            axis.plot(t, top1, color="#BBBBBB", linewidth=0.8, label="after each round")
            for label, kept in (("each round", slice(0, None)),
                                ("rounds 10, 30, 50, ...", slice(9, None, 20))):
                axis.plot(t[kept], np.maximum.accumulate(top1[kept]),
                          label=f"best so far, {label} measured")
            axis.axhline(target, color="black", linestyle="--", linewidth=1, label="target")
            axis.set(title=title, xlabel="round", ylabel="accuracy on the test images",
                     ylim=(0.93, 0.98))


def main():
    for path in sorted(RUNS.rglob("*.json")):
        record = records.read(path)
        target = min(record["args"]["target"])
        print(f"{path.relative_to(RUNS).with_suffix('')}, rounds until {target:g}")
        for k in (1, 5, 20, 50):
            rounds = every(k, target, record["rounds"])
            print(f"    every {k:>2}: mean {np.mean(rounds):7.1f}, {min(rounds):7.1f} to "
                  f"{max(rounds):7.1f}")
    draw({title: records.read(RUNS / name)["rounds"] for title, name in DRAWN.items()}, 0.97,
         RESULTS / "fedavg-how-often.png")


if __name__ == "__main__":
    main()
