"""Averages runs of persfl.py over seeds: prints accuracies by user, and draws students-users.png
like Figs. 3 to 8 into the first run's folder.

    python -m papers.persfl_users runs/persfl-cifar10-0 runs/persfl-cifar10-1
"""

import pathlib

import numpy as np

import persfl
from fl import records

from . import figures, reading


def main(*folders):
    paths = [records.at(pathlib.Path(folder)) for folder in folders]
    last = [records.read(path)["final"] for path in paths]
    users = {name: np.mean([part["users"][name] for part in last], 0)  # [K]
             for name in last[0]["users"]}
    students = np.mean([part["students"]["test"] for part in last], 0)  # [K, 11]
    K = len(students)
    print(f"{'user':<8}" + "".join(f"{name:>17}" for name in users))
    for user in range(K):
        print(f"{user:<8}" + "".join(f"{column[user]:>17.4f}" for column in users.values()))
    for name, of in (("mean", np.mean), ("std", lambda z: np.std(z, ddof=min(1, K - 1)))):
        print(f"{name:<8}" + "".join(f"{of(column):>17.4f}" for column in users.values()))
    title = "accuracy of the students, by $\\lambda$ and $T$"
    with figures.panels(paths[0].parent / "students-users.png", title, K, 5, (3, 3)) as axes:
        for user, (axis, accuracy) in enumerate(zip(axes, students)):
            for T in sorted({T for T, _ in persfl.GRID}):
                points = sorted((lam, a) for (of, lam), a in zip(persfl.GRID, accuracy)
                                if of == T or lam in (0, 1))  # all T share these
                axis.plot(*zip(*points), marker="o", label=f"$T$ = {T}")
            axis.set(title=f"user {user}", xlabel=r"$\lambda$",
                     ylabel="" if user % 5 else "test accuracy")


if __name__ == "__main__":
    main(*reading.folders(__doc__))
