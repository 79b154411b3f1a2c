"""Figures in the papers' forms.

A function gets the path of the picture and a list of (cell, shown, note). shown: what reproduce.py says of the cell. Where a
figure needs a whole run, it is that of the first seed. note: what is not as in the paper, for example fewer rounds.
"""

import contextlib

import common
from tables import reading


@contextlib.contextmanager
def panels(path, n, columns, size):
    """n axes, at most `columns` in a row, of a size in inches each."""
    lines, columns = -(-n // columns), min(n, columns)
    with common.drawing(path, lines, columns, (size[0] * columns, size[1] * lines)) as axes:
        axes = list(getattr(axes, "flat", [axes]))
        for axis in axes[n:]:
            axis.remove()
        yield axes
        axes[0].figure.tight_layout()


def lambdas(path, found):
    """Accuracy over lambda, a panel for each combination, titled with the global accuracy and the best personal one."""
    found = [entry for entry in found if "global" not in entry[0].row]
    with panels(path, len(found), 4, (3.5, 3)) as axes:
        for axis, (cell, shown, note) in zip(axes, found):
            measures = reading.final(shown.results[0].record)
            x, mean, std = zip(*[(at["lambda"], at["mean"], at["std"]) for at in measures["lambdas"]])
            axis.errorbar(x, mean, std, capsize=2, marker="o", markersize=3)
            title = f"{cell.row} {cell.column}{note}\nglobal {measures['global']['top1']:.3f}, best personal {max(mean):.3f}"
            axis.set(title=title, xlabel="λ", ylabel="clients' accuracy, mean ± std", ylim=(0, 1.05))


def rounds(path, found):
    """The global model over the rounds; a vertical line where Phase II begins."""
    keys = ("top1", "loss") if any(cell.column == "loss" for cell, _, _ in found) else ("top1",)
    curves = {f"{cell.row} {cell.column}{note}": s.results[0].record for cell, s, note in found if cell.column != "loss"}
    with panels(path, len(keys), 2, (6, 4)) as axes:
        for axis, key in zip(axes, keys):
            for label, record in curves.items():
                rows = [row for row in record["rounds"] if "global" in row]
                curve = axis.plot([row["round"] for row in rows], [row["global"][key] for row in rows], label=label)[0]
                if "start" in record["args"]:
                    axis.axvline(record["args"]["start"] * record["args"]["rounds"], color=curve.get_color(), linewidth=1)
            axis.set(xlabel="round", ylabel={"top1": "global accuracy", "loss": "global loss"}[key])
            axis.legend(fontsize=8)


def columns(path, found):
    """Accuracy over alpha, eta or eta/(1-beta): a panel for each E and C, a line for each method, alpha or beta."""
    where, name = {}, found[0][0].column.split("=")[0]
    for cell, shown, note in found:
        line, panel = cell.row.split(" ", 1)
        beta = float(line[5:]) if line.startswith("beta") else 0.0
        x = float(cell.column.split("=")[1]) / (1 - beta) or 0.01
        where.setdefault(panel, {}).setdefault(line, []).append((x, shown.mean, note))
    with panels(path, len(where), 3, (4.5, 3.5)) as axes:
        for axis, (panel, lines) in zip(axes, where.items()):
            for line, points in lines.items():
                x, y, notes = zip(*points)
                axis.plot(x, y, marker="o", label=line + notes[0])
            title = "η/(1-β)" if "beta" in found[0][0].row else {"eta": "η", "alpha": "α (0 stands at .01)"}[name]
            axis.set(title=panel, xscale="log", ylim=(0, 100), xlabel=title, ylabel="accuracy in per cent")
            if name == "alpha":
                axis.set_xlim(150, 0.008)
            axis.legend(fontsize=8)


def clients(path, found):
    """A violin of the clients' accuracies for each method."""
    with panels(path, 1, 1, (8, 4)) as (axis,):
        axis.violinplot([shown.results[0].record["final"]["personal"]["per_client"] for _, shown, _ in found], showmedians=True)
        axis.set_xticks(range(1, len(found) + 1), [cell.row + note for cell, _, note in found], fontsize=7)
        axis.set(ylabel="accuracy of a client")


def users(path, found):
    """A bar for each user and column."""
    heights = {}
    for cell, shown, note in found:
        heights.setdefault(cell.column + note, []).append(shown.mean)
    width = 0.8 / len(heights)
    with panels(path, 1, 1, (8, 4)) as (axis,):
        for i, (column, values) in enumerate(heights.items()):
            axis.bar([k + i * width for k in range(len(values))], values, width, align="edge", label=column)
        axis.set(xlabel="user", ylabel="round of its teacher, mean over seeds")
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncol=len(heights), fontsize=8)
