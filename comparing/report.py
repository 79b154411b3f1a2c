"""The tables and figures of comparisons: means and spreads, paired differences, Markdown, LaTeX,
CSV. docs/compare.md explains every column.

records: for each method the list of its records, in the same order of splits and seeds.
"""

import csv
import functools
import itertools
import json
import pathlib
import re
import statistics
from typing import NamedTuple

import numpy as np

import common
from fl.records import FREE

from . import ranks
from .planning import flags


def personal(r):
    """Returns a record's personal measures, {} if there are none."""
    return r["final"].get("personal", {})


def fine_tuned(r):
    """Returns the personal measures after that number of --fine-tune's epochs, 0 included, which
    the run's validation images choose, or after the most, if there are none; {} without the flag.
    """
    after = r["final"].get("fine_tuned", [])
    if not after or "val_mean" not in after[0]:
        return after[-1] if after else {}
    return max([{"epochs": 0, **personal(r)}, *after], key=lambda z: z["val_mean"])


PARTS = {"personal": personal, "fine-tuned": fine_tuned}  # what methods can be compared by
MEASURES = {  # title: its value in a record
    "global": lambda r: r["final"].get("global", {}).get("top1"),
    "personal": lambda r: personal(r).get("mean"),
    "worst tenth": lambda r: personal(r).get("worst_decile"),
    "fine-tuned": lambda r: fine_tuned(r).get("mean"),
    "its worst tenth": lambda r: fine_tuned(r).get("worst_decile"),
    "validation": lambda r: personal(r).get("val_mean"),
    "local epochs": lambda r: r.get("local_epochs"),
    "extra epochs": lambda r: fine_tuned(r).get("epochs"),
    "MB sent": lambda r: None if r["bytes_up"] is None  # the method does not call run.sent
    else (r["bytes_up"] + r["bytes_down"]) / 1e6,
    "s per round": lambda r: r["seconds_per_round"],
    "minutes": lambda r: sum(row["seconds"] + row.get("evaluation_seconds", 0)
                             for row in r["rounds"]) / 60,
}
GAIN, RANK = "gain over Local", "mean rank"
DIGITS = {"local epochs": 1, "extra epochs": 1, "MB sent": 1, "s per round": 2,
          "minutes": 1}  # others: 3
COLUMNS = [*list(MEASURES)[:6], GAIN, RANK, "rounds", *list(MEASURES)[6:], "own"]
STYLES = [{"color": f"C{i}", "linestyle": style} for style in ("-", "--", ":", "-.")
          for i in range(7)]  # common.drawing has 7 colours


class Paired(NamedTuple):
    """A difference of two methods' accuracies, of one of PARTS."""

    mean: float
    interval: tuple  # of 95 %; None for one pair of runs
    order: str  # ahead, behind, inconclusive; "" without an interval. A * is from `mark`
    p: float  # that the difference is 0; None without an interval


def report(records, methods, args, shared):
    """Writes and prints the tables, and draws the figures. Returns the exit code, 1 if all runs
    diverged."""
    part, out = "fine-tuned" if shared.fine_tune else "personal", pathlib.Path(args.out)
    rows = table(records, methods, args.against, shared, part)
    text = page(rows, records, methods, args, shared)
    (out / "compare.md").write_text(text, encoding="utf-8")
    (out / "compare.tex").write_text(latex(rows, records[methods[0].name][0], args),
                                     encoding="utf-8")
    write_csv(rows, records, out)
    if any(row["personal"] for row in rows):
        draw(rows, records, shared, out)
    common.say(f"{text}\ntable   {out}/compare.md, compare.tex, compare.csv, runs.csv")
    if all(row["diverged"] == row["runs"] for row in rows):
        common.say("all runs diverged: try a smaller --lr")
        return 1
    return 0


def table(records, methods, against, shared, part="personal"):
    """Returns a row for each method, the best first: its name, runs, how many diverged, its rounds
    and own settings, of each measure its spreads() or None, and its paired() difference to each
    method of `against`. bold: the best one, and those whose difference to it is inconclusive.
    part: of PARTS, what orders the methods and is paired."""
    rows = []
    for method in methods:
        finished = [r for r in records[method.name] if not r["diverged"]]
        runs = len(records[method.name])
        row = {"method": method.name, "part": part, "runs": runs, "diverged": runs - len(finished),
               "rounds": method.args["rounds"], "own": own_settings(method, shared)}
        rows.append(row | {title: measured(finished, title) for title in MEASURES})
    rows.sort(key=lambda row: row[part][0] if row[part] else -1, reverse=True)
    best, local = rows[0]["method"], next((m.name for m in methods if m.method == "local"), None)
    references = dict.fromkeys(against or filter(None, (best, local)))
    for row in rows:
        to = {name: None if name in (None, row["method"]) else
              paired(records[row["method"]], records[name], part)
              for name in {*references, best, local}}
        row["against"] = {name: to[name] for name in references}
        row[GAIN], row["to best"] = to[local], to[best]
    mark(rows)
    for row in rows:
        pair = row["against"].get(best, row["to best"])
        row["bold"] = bool(row[part]) and (
            row["method"] == best or bool(pair) and pair.order not in ("ahead", "behind", ""))
    found = ranks_over_splits(records, part)
    for row in rows:
        row[RANK] = found.get(row["method"])
    return rows


def ranks_over_splits(records, part="personal"):
    """Returns {method: its mean rank over the splits, by the mean accuracy of its seeds}, of the
    methods with a result on each split; {} for one split."""
    by_split = {}
    for name, runs in records.items():
        for r in runs:
            if not r["diverged"] and PARTS[part](r):
                at = by_split.setdefault(r["args"]["split_seed"], {})
                at.setdefault(name, []).append(MEASURES[part](r))
    names = [name for name in records if all(name in at for at in by_split.values())]
    if len(by_split) < 2 or len(names) < 2:
        return {}
    scores = [[np.mean(at[name]) for name in names] for at in by_split.values()]
    return dict(zip(names, ranks.mean_ranks(scores).tolist()))


def mark(rows):
    """Adds a * to each order of `against` that Holm's correction over the table's pairs of methods
    makes inconclusive."""
    p = {frozenset((row["method"], name)): pair.p for row in rows
         for name, pair in row["against"].items() if pair and pair.interval}
    corrected = dict(zip(p, ranks.holm([*p.values()])))
    for row in rows:
        for name, pair in row["against"].items():
            if pair and pair.order in ("ahead", "behind") and (
                    corrected[frozenset((row["method"], name))] > 0.05):
                row["against"][name] = pair._replace(order=f"{pair.order}*")


def own_settings(method, shared):
    """Returns the flags of a method's settings that are not the shared ones, and of those that OWN
    or --set gives it; of a user's file, all of its own."""
    all_share = json.loads(json.dumps(vars(shared), default=str))
    no_part = (*FREE, *common.unused(shared.split), "seed", "split_seed", "device", "eval_every")
    own = {}
    for key, value in method.args.items():
        if key in all_share:
            shown = value != all_share[key]
        else:
            shown = method.method.endswith(".py") or key.rstrip("_") in method.own
        if shown and key not in no_part:
            whole = isinstance(value, float) and value.is_integer()
            own[key] = int(value) if whole else value
    return flags(own)


def measured(runs, title):
    """Returns the spreads() of one of MEASURES over runs; None if none has it."""
    found = [(value, r["args"]["split_seed"]) for r in runs
             if not r["diverged"] and (value := MEASURES[title](r)) is not None]
    return spreads(*zip(*found)) if found else None


def spreads(values, splits):
    """Returns the mean, the standard deviation between seeds (within a split), and that between
    the splits' means; None where there is one seed, or one split."""
    groups = [[value for value, at in zip(values, splits) if at == split] for split in set(splits)]
    within = [np.var(group, ddof=1) for group in groups if len(group) > 1]
    return (float(np.mean(values)), float(np.mean(within) ** 0.5) if within else None,
            float(np.std([np.mean(group) for group in groups], ddof=1)) if groups[1:] else None)


def paired(runs, others, part="personal"):
    """Returns the Paired difference over equal splits, seeds and clients; None without a pair.

    The interval is a percentile bootstrap of 10,000 samples. Each draws runs and, within each
    split, clients, because both vary. A split's seeds get the same clients, because a client's
    difference is similar with every seed.
    """
    by_split = {}
    for pair in zip(runs, others):
        if not any(r["diverged"] or not PARTS[part](r) for r in pair):
            a, b = (np.array(PARTS[part](r)["per_client"]) for r in pair)
            by_split.setdefault(pair[0]["args"]["split_seed"], []).append(a - b)
    if not by_split:
        return None
    splits = [np.array(D) for D in by_split.values()]  # [runs, K] each
    mean = float(np.concatenate([D.mean(1) for D in splits]).mean())
    if sum(map(len, splits)) == 1:
        return Paired(mean, None, "", None)
    sampled = []
    for counts, weights in draws(tuple(D.shape for D in splits)):
        means = [drawn / D.shape[1] @ D.T for drawn, D in zip(counts, splits)]
        sampled.append((weights * np.concatenate(means, 1)).sum(1))
    sampled = np.concatenate(sampled)
    low, high = map(float, np.percentile(sampled, [2.5, 97.5]))
    order = "ahead" if low > 0 else "behind" if high < 0 else "inconclusive"
    tail = 1 + min((sampled <= 0).sum(), (sampled >= 0).sum())  # 1: no sample proves p = 0
    return Paired(mean, (low, high), order, float(min(1, 2 * tail / (1 + len(sampled)))))


@functools.lru_cache(1)
def draws(shapes):
    """Returns the samples of the bootstrap, a thousand at a time, since all at once need more
    memory: how often each split draws its clients, and the runs' weights. shapes: the numbers of
    runs and clients of each split."""
    n, rng = sum(runs for runs, _ in shapes), np.random.default_rng(0)
    return [([rng.multinomial(K, [1 / K] * K, 1000).astype(np.int16) for _, K in shapes],
             rng.multinomial(n, [1 / n] * n, 1000) / n) for _ in range(10)]


def main_table(rows, but=()):
    """Returns titles and cells, without empty columns and those called `but`."""
    titles = [title for title in COLUMNS if title not in but and any(row[title] for row in rows)]
    return (["method", *("own settings" if title == "own" else title for title in titles)],
            [[name(row), *(cell(title, row[title]) for title in titles)] for row in rows])


def name(row):
    if not row["diverged"]:
        return row["method"]
    return f"{row['method']} ({row['diverged']} of {row['runs']} diverged)"


def cell(title, value):
    """Returns a row's value as the table shows it."""
    if not value:
        return ""
    if title == "own":
        return f"`{' '.join(value)}`"
    if title == "rounds":
        return str(value)
    if title == GAIN:
        return f"{value[0]:+.3f}"
    if title == RANK:
        return f"{value:.1f}"
    if title in DIGITS:
        return f"{value[0]:.{DIGITS[title]}f}"
    return " ± ".join(f"{z:.3f}" for z in value if z is not None)


def paired_table(rows):
    """Returns the titles and cells of the paired differences, if any."""
    return (["method", *(f"minus {name}" for name in rows[0]["against"])],
            [[row["method"], *(" ".join(difference(z)).strip() for z in row["against"].values())]
             for row in rows if any(row["against"].values())])


def difference(pair):
    """Returns a Paired as text: the mean with its interval, and the order."""
    if not pair:
        return "", ""
    text = f"{pair.mean:+.3f}"
    if pair.interval:
        text += f" [{pair.interval[0]:+.3f}, {pair.interval[1]:+.3f}]"
    return text, pair.order


def lines(titles, body):
    """Returns the lines of a table in Markdown."""
    return [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles),
            *(f"| {' | '.join(row)} |" for row in body)]


def about_split(record):
    """Returns a split's clients, images, classes as words."""
    split = record["split"]
    text = f"{split['clients']} clients with {common.spread(split['sizes'])} training images"
    if "classes" in split:  # older records lack them
        text += f" of {common.spread(split['classes'])} classes"
    return f"{text} (least/mean/most), fingerprint {split['fingerprint']}"


def about_runs(args):
    """Returns words on the means, on ± and on what --tune chose."""
    text = f"means over {count(args.seeds, 'seed')} on {count(args.split_seeds, 'split')}"
    between = ["between seeds"] * (args.seeds > 1)
    between += ["between splits' means"] * (args.split_seeds > 1)
    if between:
        text += f" ± the standard deviation {' ± that '.join(between)}"
    if args.tune:
        grids = (word.replace("=", " from ", 1).replace(",", ", ") for word in args.tune)
        text += (". Chosen for each method on validation images (first seed and split): "
                 + "; ".join(grids))
    return text


def about_differences(rows):
    text = f"Differences of the {rows[0]['part']} accuracy over equal splits, seeds and clients"
    if rows[0]["runs"] == 1:
        return f"{text}. One run of each method gives no interval, so nothing is decided."
    return (f"{text}, with 95 % bootstrap intervals over runs and clients. A method is ahead or "
            "behind if its interval excludes 0; *: not after Holm's correction over the table's "
            "pairs of methods.")


def about_ranks(rows, splits):
    """Returns words on the column of mean ranks, if there is one."""
    methods = sum(bool(row[RANK]) for row in rows)
    if not methods:
        return ""
    return (f" Mean ranks are over the {splits} splits; two methods differ if their ranks do by "
            f"{ranks.critical_difference(methods, splits):.1f} or more (Nemenyi's test, .05).")


def count(n, word):
    return f"{n} {word}" + "s" * (n > 1)


def sizes(records):
    """Returns a sentence for each method with another number of parameters than most have."""
    found = {name: runs[0]["parameters"] for name, runs in records.items()}
    usual = statistics.mode(found.values())
    return [f"{name} has {n:,} parameters, most methods have {usual:,}."
            for name, n in found.items() if n != usual]


def write_csv(rows, records, out):
    """Writes compare.csv and runs.csv, without measures that no run has."""
    measured = [title for title in MEASURES if any(row[title] for row in rows)]
    titles = [title.replace(" ", "_") for title in measured]
    kinds = [f"{title}_{kind}" for title in titles for kind in ("mean", "std_seeds", "std_splits")]
    means = [["method", "rounds", "own_settings", "runs", "diverged", "gain_over_local", *kinds]]
    runs = [["method", "rounds", "own_settings", "split_seed", "seed", "diverged", *titles]]
    for row in rows:
        own = row["method"], row["rounds"], " ".join(row["own"])
        means.append([*own, row["runs"], row["diverged"], row[GAIN] and row[GAIN][0],
                      *itertools.chain(*(row[title] or [None] * 3 for title in measured))])
        for r in records[row["method"]]:
            found = [None if r["diverged"] else MEASURES[title](r) for title in measured]
            runs.append([*own, r["args"]["split_seed"], r["args"]["seed"], int(r["diverged"]),
                         *found])
    for name, body in (("compare.csv", means), ("runs.csv", runs)):
        with open(out / name, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(body)


def page(rows, records, methods, args, shared):
    """Returns compare.md."""
    some = records[methods[0].name][0]
    no_part = (*FREE, *common.unused(shared.split), "seed", "device")
    settings = {name: value for name, value in vars(shared).items()
                if name not in no_part or name.startswith("fine_tune")}
    parts = [f"# {len(rows)} methods on {some['data']['name']}",
             f"Settings that all share: `{' '.join(flags(settings))}`.",
             f"The {'split' if args.split_seeds == 1 else 'first split'}: {about_split(some)}.",
             f"Accuracies after the last round, without runs that diverged: {about_runs(args)}.\n"
             "docs/compare.md explains the columns. Times are those on "
             f"{some['environment']['device']}.{about_ranks(rows, args.split_seeds)}",
             "\n".join(lines(*main_table(rows)))]
    titles, body = paired_table(rows)
    if body:
        parts += [about_differences(rows), "\n".join(lines(titles, body))]
    notes = [f"- {m.name} is {m.method}." for m in methods if m.name != m.method]
    notes += [f"- {m.name}: {m.why}." for m in methods if m.why]
    notes += [f"- {note}" for note in sizes(records)]
    if notes:
        parts += ["What is not shared:", "\n".join(notes)]
    if any(row["personal"] for row in rows):  # otherwise nothing is drawn
        parts += ["![Learning curves](curves.svg)", "![Accuracies of the clients](clients.svg)"]
    return "\n\n".join(parts) + "\n"


def tex(text):
    """Returns text for LaTeX. Between dollars it is mathematics already."""
    parts = text.replace("`", "").replace("--", "").split("$")
    parts[::2] = [re.sub(r"[_&%#{}]", r"\\\g<0>", part) for part in parts[::2]]
    text = "$".join(parts).replace("±", r"$\pm$")
    return re.sub(r"(?<![\w.])[-+]\d+\.\d+", r"$\g<0>$", text)


def latex(rows, some, args):
    """Returns both tables and the figure in LaTeX."""
    about = f"{common.setting(some)}."
    if classes := some["split"].get("classes"):
        about = f"{about[:-1]}, {common.spread(classes)} classes per client (least/mean/most)."
    bold = f"Bold: the best {rows[0]['part']} accuracy"
    if rows[0]["runs"] > 1:
        bold += ", and those whose paired difference to it is inconclusive"
    titles, body = main_table(rows, but=("validation", "s per round"))
    body = [list(map(tex, line)) for line in body]
    for row, line in zip(rows, body):
        if row["bold"]:
            at = titles.index(row["part"])
            line[at] = re.sub(r"^[\d.]+", r"\\textbf{\g<0>}", line[at])
    caption = (f"{about} Accuracies after the last round: {about_runs(args)}. {bold}."
               + about_ranks(rows, args.split_seeds))
    text = ["% needs \\usepackage{array,booktabs,graphicx}",
            tabular("compare", caption, titles, body)]
    titles, body = paired_table(rows)
    if body:
        text.append(tabular("differences", f"{about_differences(rows)} {about}", titles,
                            [map(tex, line) for line in body]))
    if any(row["personal"] for row in rows):
        text.append(floating("figure", "fig:curves", "Learning curves: means and standard "
                             f"deviations over all runs. {about}",
                             r"\includegraphics[width=\linewidth]{curves.pdf}"))
    return "\n".join(text)


def tabular(label, caption, titles, body):
    """Returns a table in LaTeX, whose first column is a name."""
    last = r">{\raggedright\arraybackslash}p{0.2\linewidth}" if "own settings" in titles else "l"
    head, *body = [" & ".join(line) + r" \\" for line in (map(tex, titles), *body)]
    return floating("table", f"tab:{label}", caption,
                    r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
                    rf"\begin{{tabular}}{{l{'r' * (len(titles) - 2)}{last}}}",
                    r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}}")


def floating(kind, label, caption, *body):
    return "\n".join([rf"\begin{{{kind}*}}[t]", r"\centering\small",
                      rf"\caption{{{tex(caption)}}}", rf"\label{{{label}}}", *body,
                      rf"\end{{{kind}*}}", ""])


def draw(rows, records, shared, out):
    """Draws curves and clients: .png, .svg and, untitled, .pdf."""
    rows = [row for row in rows if row["personal"]]  # the others diverged, or do not measure it
    finished = {row["method"]: [r for r in records[row["method"]] if not r["diverged"]]
                for row in rows}
    styles = dict(zip(records, itertools.cycle(STYLES)))  # by the order of --methods
    title = f"{common.setting(finished[rows[0]['method']][0])}, {count(rows[0]['runs'], 'run')}"
    both = f"{title}: mean and standard deviation over the runs"
    with common.drawing(out / "curves.png", 1, 2, (11, 5.5), both) as axes:
        for axis, part, key, label in (
                (axes[0], "global", "top1", "accuracy of the server's model"),
                (axes[1], "personal", "mean", "mean accuracy of the clients' models")):
            for row in rows:
                style = styles[row["method"]]
                x, mean, std = curve(finished[row["method"]], part, key)
                # fewer rounds, each with more work; a line through one point can't be seen
                x = x * shared.rounds / row["rounds"]
                point = "o" if len(x) == 1 else None
                axis.plot(x, mean, label=row["method"], marker=point, **style)
                band = (mean - std).clip(0), (mean + std).clip(max=1)
                axis.fill_between(x, *band, alpha=0.15, color=style["color"], linewidth=0)
            axis.set(xlabel="round", ylabel=label, ylim=(0, 1))
    with common.drawing(out / "clients.png", 1, 1, (7, 1.6 + 0.3 * len(rows)), title) as axis:
        clients = [np.concatenate([r["final"]["personal"]["per_client"] for r in runs])
                   for runs in finished.values()]
        axis.boxplot(clients[::-1], orientation="horizontal", patch_artist=True,
                     flierprops={"markersize": 2}, boxprops={"facecolor": "C5"},
                     medianprops={"color": "black"})
        axis.set_yticks(range(1, len(rows) + 1), [*finished][::-1])
        seen = [(row["global"][0], len(rows) - i) for i, row in enumerate(rows) if row["global"]]
        axis.plot([x for x, _ in seen], [y for _, y in seen], "D", color="C1",
                  label="the server's model, on the central test images")
        axis.set(xlabel="accuracy on the client's own test images; boxes: clients, all runs")
    from matplotlib import rc_context

    for name, figure in (("curves.pdf", axes[0].figure), ("clients.pdf", axis.figure)):
        figure.suptitle("")  # a paper has captions for titles, and wants no Type 3 fonts
        with rc_context({"pdf.fonttype": 42}):
            figure.savefig(out / name, metadata={"CreationDate": None})


def curve(runs, part, key):
    """Returns the rounds [n], and the mean and std [n] of a measure over runs; n is 0 if it was not
    measured."""
    rounds = [{row["round"] for row in r["rounds"] if part in row} for r in runs]
    rounds = set.intersection(*rounds)  # a run that went on has its old last round, too
    measured = [[row for row in r["rounds"] if row["round"] in rounds] for r in runs]
    y = np.array([[row[part][key] for row in rows] for rows in measured])
    return (np.array([row["round"] for row in measured[0]]), y.mean(0),
            y.std(0, ddof=min(1, len(y) - 1)))
