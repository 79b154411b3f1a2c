"""Figures in the papers' forms.

`draw` calls one of the functions below it with the path of the picture, its title, and a list of
(cell, shown). shown: what pages.py shows of the cell, and as its `note` what is not as in the
paper, such as fewer rounds. A figure that needs a whole run takes that of the first seed.
"""

import contextlib
import re

import numpy as np

import common

from . import reading, settings

WORDS = {"MM": "Model Mixing", "LM": "Layer Mixing", "LU": "fine-tuned",
         **{name: f"${name}$" for name in "BCEGL"},
         **{name: rf"$\{name}$" for name in ("alpha", "beta", "eta", "lambda", "mu", "nu")}}


def words(text):
    """A row's or column's name as in print: mu=0.01 is $\\mu$ = 0.01."""
    return re.sub(r"\b[A-Za-z]+\b", lambda m: WORDS.get(m[0], m[0]), text).replace("=", " = ")


def draw(figure, path, title, found):
    """The title names the data set and the split if all cells share them, and so with the note."""
    title, notes = words(title), {shown.note for _, shown in found}
    if len(notes) == 1:
        found = [(cell, shown._replace(notes=[])) for cell, shown in found]
        title += notes.pop().replace(" [", "\n[")
    shared = {common.setting(shown.results[0].record) for _, shown in found}
    if len(shared) == 1:
        title += "\n" + shared.pop()
    figure(path, title, found)


@contextlib.contextmanager
def panels(path, title, n, columns, size):
    """n axes, at most `columns` in a row, of a size in inches each."""
    lines, columns = -(-n // columns), min(n, columns)
    whole = max(8, size[0] * columns), size[1] * lines
    with common.drawing(path, lines, columns, whole, title) as axes:
        axes = list(np.ravel(axes))
        for axis in axes[n:]:
            axis.remove()
        yield axes[:n]


def lambdas(path, title, found):
    """Accuracy over lambda, a panel for each combination; dashed: the paper's best accuracy."""
    found = [(cell, shown) for cell, shown in found if "global" not in cell.row]
    with panels(path, title, len(found), 2, (4.6, 3)) as axes:
        for axis, (cell, shown) in zip(axes, found):
            at = reading.final(shown.results[0].record)["lambdas"]
            x, mean, std = (np.array([point[key] for point in at])
                            for key in ("lambda", "mean", "std"))
            axis.plot(x, mean, marker="o", label="mean over clients")
            axis.fill_between(x, (mean - std).clip(0), (mean + std).clip(max=1), alpha=0.15,
                              label="std over clients")
            if published := reading.number(cell.published):
                axis.axhline(published / 100, color="black", linestyle="--", linewidth=1.2,
                             label=r"the paper, best $\lambda$")
            axis.set(title=words(f"{cell.row}, {cell.column}") + shown.note, ylim=(0, 1))
            axis.set_xlabel(r"$\lambda$ (0: $w^f$, 1: $w^\ell_k$)")
        axes[0].set_ylabel("accuracy of personal models")


def rounds(path, title, found):
    """The global model over the rounds; dotted: Phase II begins; dashed: the paper's accuracy."""
    measures = {"top1": "accuracy"}
    if any(cell.column == "loss" for cell, _ in found):
        measures["loss"] = "loss"
    found = [(cell, shown) for cell, shown in found if cell.measure == "global/top1"]
    with panels(path, title, len(measures), 2, (6.5, 4.8)) as axes:
        for axis, (key, measure) in zip(axes, measures.items()):
            known = {}  # FedProx and FedProx-LU have one global model
            for cell, shown in found:
                record, method = shown.results[0].record, words(cell.row.replace("-", " "))
                x, y = reading.curve(record, "global", key)
                if y in known:
                    known[y].set_label(f"{method}, {known[y].get_label()}")
                    continue
                column = "" if "top-1" in cell.column else f" {words(cell.column)}"
                known[y], = axis.plot(x, y, label=method + column + shown.note)
                colour = known[y].get_color()
                if record["args"].get("start"):
                    begins = record["args"]["start"] * record["args"]["rounds"] + 0.5
                    axis.axvline(begins, color=colour, linestyle=":",
                                 label=f"{method}: Phase II begins")
                if key == "top1" and (published := reading.number(cell.published)):
                    axis.axhline(published / 100, color=colour, linestyle="--", linewidth=1.2)
            axis.set(xlabel="round", ylabel=f"{measure} of the global model")
            axis.set_ylim(bottom=0)
        if any(reading.number(cell.published) for cell, _ in found):
            axes[0].plot([], [], color="gray", linestyle="--", linewidth=1.2, label="the paper")


def columns(path, title, found):
    """Accuracy over alpha, eta or eta/(1-beta): a panel for each E and C, a line for each method,
    alpha or beta."""
    where, over = {}, r"$\eta$"
    for cell, shown in found:
        line, panel = cell.row.split(" ", 1)
        at = {name: float(value) for name, value in settings(cell.row, cell.column).items()}
        x = at["eta"] if "eta" in at else at["alpha"] or 0.01
        if "beta" in at:
            x, over = x / (1 - at["beta"]), r"$\eta$$\,/\,(1-\beta)$"
        where.setdefault(panel, {}).setdefault(line, []).append((x, shown.mean / 100, shown.note))
    if max(len(points) for lines in where.values() for points in lines.values()) == 1:
        return  # nothing to draw a line through
    with panels(path, title, len(where), 3, (4.8, 4)) as axes:
        for axis, (panel, lines) in zip(axes, where.items()):
            notes = set()
            for line, points in lines.items():
                x, y, note = zip(*points)
                axis.plot(x, y, marker="o", label=words(line))
                notes |= {*note}
            about = notes.pop() if len(notes) == 1 else " [rounds, settings: see the table]"
            axis.set(title=words(panel) + about, xscale="log", ylim=(0, 1), xlabel=over)
            if "eta" not in at:
                axis.set(xlabel=r"$\alpha$: alike to unlike clients", xlim=(150, 0.007))
                axis.set_xticks([100, 10, 1, 0.1, 0.01], ["100", "10", "1", "0.1", "0"])
        axes[0].set_ylabel("accuracy of the global model")


def clients(path, title, found):
    """A violin of the clients' accuracies for each method."""
    with panels(path, title, 1, 1, (8, 4)) as (axis,):
        records = [shown.results[0].record for _, shown in found]
        axis.violinplot([record["final"]["personal"]["per_client"] for record in records],
                        showmedians=True)
        names = [(cell.row + shown.note).replace(" ", "\n") for cell, shown in found]
        axis.set_xticks(range(1, len(found) + 1), names)
        axis.set(ylabel="accuracy of a client")


def users(path, title, found):
    """A panel for each data set, in it a bar for each user and split."""
    where = {}
    for cell, shown in found:
        data, split = cell.column.split()
        where.setdefault(data, {}).setdefault(split + shown.note, []).append(shown.mean)
    with panels(path, title, len(where), 1, (9, 3.2)) as axes:
        for axis, (data, heights) in zip(axes, where.items()):
            for i, (split, values) in enumerate(heights.items()):
                axis.bar(np.arange(len(values)) + (i - 1) * 0.27, values, 0.25, label=split)
            axis.set(title=data, xlabel="user", ylabel="round of the teacher,\nmean over seeds",
                     xticks=range(len(values)))
