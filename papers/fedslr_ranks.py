"""Prints the ranks of a run of fedslr.py, and draws ranks.png beside its record.

    python -m papers.fedslr_ranks runs/fedslr-shapes-0
"""

import pathlib

import common
from fl import records

from . import reading


def main(folder):
    path = records.at(pathlib.Path(folder))
    record = records.read(path)
    rows = [row for row in record["rounds"] if "gkr" in row]
    most = {name: max(row["ranks"][name] for row in rows) for name in rows[-1]["ranks"]}
    print("ranks   " + ", ".join(f"{name} {rank}" for name, rank in rows[-1]["ranks"].items()))
    t = [row["round"] for row in rows]
    with common.drawing(path.parent / "ranks.png", 1, 3, (15, 4.5),
                        f"FedSLR, {common.setting(record)}") as axes:
        for part, label, style in (("gkr", "GKR", "k--"), ("personal", "mixed", "k-")):
            axes[0].plot(*reading.curve(record, part, "mean"), style, label=label)
        for i, name in enumerate(most):  # there are seven colours
            axes[1].plot(t, [row["ranks"][name] / most[name] for row in rows],
                         ["-", "--", ":"][i // 7 % 3], label=name)
        axes[2].plot([row["round"] for row in record["rounds"]],
                     [row["bytes_down"] / 1e6 for row in record["rounds"]], "k-")
        for axis, label in zip(axes, ("accuracy, mean over clients", "rank / largest rank",
                                      "MB down per round")):
            axis.set(xlabel="round", ylabel=label, ylim=(0, None))


if __name__ == "__main__":
    main(reading.folders(__doc__)[0])
