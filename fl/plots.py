"""Figures: one style for all, and --plot's three. No result depends on this file, so records don't
name it among their sources."""

import contextlib
import pathlib

import numpy as np

from .machine import is_main_process, say
from .splits import USED_BY

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
STYLE = {  # of all figures. The colours are Okabe and Ito's, which the colour-blind tell apart
    "axes.prop_cycle": f"cycler('color', {COLOURS})", "font.size": 11, "axes.titlesize": 11,
    "figure.titlesize": 12, "mathtext.fontset": "stix", "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": "#E4E4E4",
    "lines.linewidth": 1.8, "lines.markersize": 4, "legend.frameon": False, "savefig.dpi": 300,
    "svg.hashsalt": "equal files for equal figures",
}


@contextlib.contextmanager
def drawing(path, rows=1, columns=1, size=(6, 3.5), title=""):
    """Yields axes, as pyplot.subplots returns them, then writes the figure to `path` (.png) and
    beside it as .svg. size: in inches. One legend below the axes shows all labels. Axes of rounds,
    users and clients have whole numbers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    with matplotlib.rc_context(STYLE):
        figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained")
        yield axes
        figure.suptitle(title)
        named = {label: line for axis in figure.axes
                 for line, label in zip(*axis.get_legend_handles_labels())}
        for axis in figure.axes:
            locator = axis.xaxis.get_major_locator()
            whole = axis.get_xlabel().split(",")[0] in ("round", "user", "client")
            if whole and isinstance(locator, ticker.MaxNLocator):
                locator.set_params(integer=True)
        if named:
            across = max(1, int(figure.get_figwidth() / (0.7 + 0.08 * max(map(len, named)))))
            figure.legend(named.values(), named, loc="outside lower center",
                          ncols=min(across, len(named)))
        if is_main_process():
            path = pathlib.Path(path)
            figure.savefig(path)
            figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
            say(f"plot    {path}, {path.with_suffix('.svg').name}")
        pyplot.close(figure)


def setting(record):
    """Returns the data set and the split of a record in words, for titles of figures."""
    args, split = record["args"], record["args"]["split"]
    size = f", {args['per_client']} each" if split in USED_BY["per_client"] else ""
    size = rf", $\alpha$ = {args['alpha']:g}" if split in USED_BY["alpha"] else size
    name, K = plain(record["data"]["name"]), record["split"]["clients"]
    return f"{name}, {K} clients, split: {plain(split)}{size}"


def plain(text):
    """Returns a user's text so that matplotlib reads no mathematics in it."""
    return text.replace("$", r"\$")


def spread(values):
    """Returns least/mean/most in few characters."""
    return f"{min(values)}/{np.mean(values):.1f}/{max(values)}".replace(".0/", "/")


def plot(record, data, split, out, marks):
    """Draws curves.png, clients.png and split.png (in the form of Hsu et al.'s Figure 1) into the
    folder out. marks: a round -> what begins with it."""
    words = setting(record)
    title = f"{record['algorithm']}, {words}, seed {record['args']['seed']}"
    title += "\n" + plain("/".join(out.parts[-2:]))
    with drawing(out / "curves.png", 1, 2, (10, 4), title) as axes:
        for part, key, where in (("global", "top1", "central test images"),
                                 ("personal", "mean", "mean and std over clients")):
            rows = [row for row in record["rounds"] if part in row]
            x, y = [row["round"] for row in rows], np.array([row[part][key] for row in rows])
            point = "o" if len(rows) == 1 else None  # a line through one evaluation can't be seen
            line, = axes[0].plot(x, y, marker=point, label=f"{part}, {where}" if rows else None)
            if part == "personal":
                std = np.array([row[part]["std"] for row in rows])
                axes[0].fill_between(x, (y - std).clip(0), (y + std).clip(max=1), alpha=0.15,
                                     color=line.get_color())
            axes[1].plot(x, [row[part]["loss"] for row in rows], marker=point)
        for axis in axes:
            for first in marks.keys() & set(range(1, len(record["rounds"]) + 1)):
                axis.axvline(first - 0.5, color="black", linestyle=":", label=marks[first])
        axes[0].set(xlabel="round", ylabel="accuracy", ylim=(0, 1))
        axes[1].set(xlabel="round", ylabel="loss")

    if personal := record["final"].get("personal"):
        accuracies = np.sort(personal["per_client"])
        with drawing(out / "clients.png", title=title) as axis:
            axis.plot(range(1, len(accuracies) + 1), accuracies, "o")
            axis.axhline(accuracies.mean(), color="black", linestyle="--",
                         label=f"mean {accuracies.mean():.4f}")
            axis.set(xlabel="client, in the order of accuracy", ylim=(None, 1.01),
                     ylabel="accuracy on the client's\nown test images")

    from matplotlib import colormaps

    classes, labels, K = data.classes, data.labels, len(split.train)
    shown = np.sort(np.random.default_rng(0).permutation(K)[:30])
    counts = np.array([np.bincount(labels[split.train[k]], minlength=classes) for k in shown])
    start = counts.cumsum(1) - counts
    kinds = f"\nclasses per client: {spread(split.classes(labels))} (least/mean/most)"
    some = f"\n30 of the {K} clients, drawn at random" if K > 30 else ""
    with drawing(out / "split.png", size=(6, 7), title=words + kinds + some) as axis:
        for c in range(classes):
            name = data.names[c] if data.names else f"class {c}"
            axis.barh(range(len(shown)), counts[:, c], left=start[:, c], height=0.9,
                      color=colormaps["viridis"](c / classes), edgecolor="white", linewidth=0.6,
                      label=plain(name) if classes <= 20 else None)
        axis.set(xlabel="training images, coloured by class", ylabel="client")
        axis.set_yticks(range(len(shown)), shown, fontsize=8)
