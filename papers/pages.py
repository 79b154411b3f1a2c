"""The pages under results/: README.md, and for each paper <paper>.md and <paper>-runs.md. They
depend on the records alone."""

import functools
from typing import NamedTuple

import common

from . import figures, reading, runs
from .runs import PAPERS, TABLES, bf16, cells


class Shown(NamedTuple):
    """What a cell shows: one command's records at one scale."""

    results: list
    mean: float  # in the papers' unit; None if the record does not have it
    std: float  # over seeds; None for one
    short: bool  # fewer rounds than wanted
    note: str  # rounds, if not all; diverged; half precision; settings tried


def view(command, measure, scale):
    """Returns a Shown of the finished seeds. Where there are none, of the interrupted or else of
    the diverged ones; None without any."""
    found = [r for r in runs.results(command, scale) if r.state != "other arguments"]
    for state in ("done", "interrupted", "diverged"):
        use = [r for r in found if r.state == state]
        if use:
            break
    else:
        return None
    of = runs.arguments(command)["rounds"]
    n = min(of if reading.on_target(r.record) else len(r.record["rounds"]) for r in use)
    diverged = sum(r.state == "diverged" for r in found)
    notes = []
    if n < of:
        notes.append(f"{n} of {of} rounds")
    if diverged:
        notes.append(f"{diverged} of {len(found)} diverged")
    if any(map(bf16, use)):
        notes.append("bf16")
    values = [reading.last(r.record, measure) for r in use if r.state != "diverged"]
    return Shown(use, *reading.combine(values, measure), n < of, ", ".join(notes))


@functools.cache
def shown(cell):
    """Returns what a cell shows: the best of its commands, at the largest scale at which a run has
    ended, or else at the largest at which one was interrupted. None without any run."""
    interrupted = None
    for scale in runs.scales():
        found = [view(command, cell.measure, scale) for command in cell.commands]
        found = [s for s in found if s]
        if found:
            best = max(found, key=lambda s: reading.goodness(s.mean, cell.measure))
            if len(cell.commands) > 1:
                tried = f"{len(found)} of {len(cell.commands)} settings tried"
                best = best._replace(note=f"{best.note}, {tried}" if best.note else tried)
            if best.results[0].ended:
                return best
            interrupted = interrupted or best
    return interrupted


def counts(name):
    """Counts a table's cells: all, of these one user's, and those without a published number; then
    those with all rounds, with fewer, without a result."""
    every = [*cells(name)]
    found = [shown(cell) for cell in every]
    users = sum(cell.row.startswith("User") for cell in every)
    lost = sum(cell.published == "?" for cell in every)
    fewer, none = sum(s.short for s in found if s), found.count(None)
    return len(found), users, lost, len(found) - fewer - none, fewer, none


def ours(cell, s):
    """Returns our number as the pages print it."""
    if s.mean is None and s.results[0].state == "diverged":
        return "diverged"
    if s.mean is None:
        return "not reached" if cell.measure.startswith("rounds_to") else "not recorded"
    spread = "" if s.std is None else f" ± {reading.digits(s.std, cell.measure)}"
    return f"{reading.digits(s.mean, cell.measure)}{spread} ({len(s.results)})"


def differs(cell, s):
    """Returns whether ours is further from the paper's number than its standard deviation. Only
    full runs with several seeds are judged."""
    published = reading.number(cell.published)
    user = cell.row.startswith("User")  # a user k here isn't the paper's user k
    known = published is not None and s.std is not None
    return known and not s.short and not user and abs(s.mean - published) > s.std


def line(*words):
    return "| " + " | ".join(map(str, words)) + " |"


OVERVIEW = """# The papers' tables, and ours

`python -m papers --tables` writes this page, and two pages for each paper, from the records in
this folder. Don't edit them. `make reproduce` runs what is missing.

A cell is one number of a table. *one user's*: one of PersFL's ten users, whose cells say no more
than their means, since our user k has other images than the paper's. *not published*: the number is
lost in our copy of the paper, or only drawn there. *done*: our run has as many rounds as the
paper's (for Psi-Net this number is our guess), with one seed or more. *short*: it has fewer.
*empty*: not run.

Other runs are in folders of their own, and the papers' pages in [docs](../docs/) quote them:
`fedslr` (a small CNN; ResNet-18), `fedavg-starts`, `fedavg-beyond`, `fedavgm-seeds`,
`superfed-own-start`, `superfed-local`, `superfed-official`, `psinet-softmax`, `psinet-bn`,
`persfl-normalize`, `persfl-local`, `precision`, and [comparisons of
methods](../docs/compare.md): `compare`, `benchmark`.
[LOG.md](LOG.md) lists what was tried without success.
"""
NOT_HERE = """
What the papers describe and no cell above has:

| in the paper | here |
| --- | --- |
| SuPerFed: unseen clients (abstract) | `python -m papers.superfed_unseen`; no number in the text |
| Psi-Net: MobileNetV1 | not here: our copy has no numbers of it |
| Psi-Net: total variance of layers | `python -m papers.psinet_depth`; not run on CIFAR-10 |
| FedSLR: LPGD, GPGD, S+LR, LR+LR, S+S | not here: discussed without a number |
| FedSLR: ResNet-18 | 20 of 1,000 rounds on [its page](../docs/fedslr.md); the rest takes a GPU |
| PersFL: users who join later | not here: no number in the paper |
| PersFL: Figures 3 to 8, lambda and T | drawn only; our records have all students' accuracies |
| PersFL: fairness (5.2) | the rows SD of its tables, and [claims.md](../docs/claims.md#persfl) |
| FedAvgM: E = 5, C = .4 | cells of its figures; not run, since E = 1, C = .05 already takes hours |
| EMNIST (SuPerFed) | not here: we could not get its images; `--dataset FILE.npz` takes them |
"""
HOW_TO_READ = """How to read a cell:

- `47.06 / 48.31 ± 2.08 (2)`: the paper has 47.06. We have 48.31 after the last round. It is the
  mean over 2 seeds, and 2.08 is their standard deviation. A seed sets the split and the initial
  weights. Accuracies are in per cent.
- `?`: the paper's number is lost in our copy, or the paper only draws it. `-`: the paper has no
  such cell. `·`: not run.
- **!**: ours differs from the paper's by more than the standard deviation. Only runs of full length
  and with two seeds or more are judged.
- `[40 of 200 rounds]`: our run is shorter than the paper's. `[bf16]`: it was computed in half
  precision. `[3 of 4 settings tried]`: we show the best of those 3.
"""
RUNS_ARE = """The runs that made the numbers of [the tables]({paper}.md). The command is for seed 0;
for seed s add `--seed s --split-seed s`. Minutes are for one seed, with evaluation.
`python -m papers --again RECORD` repeats one and compares the results.
`python -m papers --list --only {paper}` also shows the runs that are missing.
"""


def pages(paper):
    """Returns the text of <paper>.md and <paper>-runs.md."""
    tables, made = [], {}
    for t in TABLES.values():
        if t.name.startswith(f"{paper}-"):
            found = {(cell.row, cell.column): (cell, shown(cell)) for cell in cells(t.name)}
            tables += table_lines(t, found)
            made |= {s.results[0].path: s.results for _, s in found.values() if s}
    title = PAPERS[paper].TITLE
    links = (f"[The code](../{paper}.py). [About it](../docs/{paper}.md). "
             f"[All papers](README.md). [Our {len(made)} runs]({paper}-runs.md).")
    text = [f"# {title}", "", links, "", HOW_TO_READ.strip(), *tables]
    runs_text = [f"# {title}: our runs", "", RUNS_ARE.format(paper=paper),
                 line("python ...", "seeds", "rounds", "device", "minutes"), line(*["---"] * 5),
                 *map(run_line, made.values())]
    return "\n".join(text) + "\n", "\n".join(runs_text) + "\n"


def table_lines(t, found):
    """Returns one table in Markdown. found: (row, column) -> (cell, what it shows or None)."""
    text = ["", f"## {t.name}", "", f"**{t.title}.** {t.note}".strip(), ""]
    if (runs.RESULTS / f"{t.name}.svg").exists():
        text += [f"![{t.title}]({t.name}.svg)", ""]
    text += [line("", *t.columns), line(*["---"] * (len(t.columns) + 1))]
    explained = set()
    for row in t.rows:
        words = []
        for column in t.columns:
            cell, s = found.get((row, column), (None, None))
            if s:
                mark, note = " **!**" * differs(cell, s), f" [{s.note}]" * bool(s.note)
                words.append(f"{cell.published} / {ours(cell, s)}{mark}{note}")
                explained |= {"All", row, f"{row}/{column}"}
            else:
                words.append(f"{cell.published} / ·" if cell else "-")
        text.append(line(row, *words))
    sentences = [f"- {key.replace('/', ', ')}: {why}" for key, why in t.why.items()
                 if key in explained]
    if sentences:
        text += ["", "Why ours are as they are:", "", *sentences]
    return text


def run_line(found):
    """Returns one run in Markdown, with all its seeds."""
    first, where = found[0], found[0].path.parent.relative_to(runs.RESULTS)
    command = runs.written_out(first.command)
    if first.scale != 1:
        command += f" --rounds {first.wanted}"
    if bf16(first):
        command += " --precision bf16"
    minutes = {}  # on each device
    for r in found:
        spent = sum(row["seconds"] + row.get("evaluation_seconds", 0) for row in r.record["rounds"])
        minutes.setdefault(r.record["environment"]["device"], []).append(spent / 60)
    means = (f"{sum(spent) / len(spent):.1f}" for spent in minutes.values())
    return line(f"[`{command}`]({where})", " ".join(str(r.seed) for r in found),
                min(len(r.record["rounds"]) for r in found), ", ".join(minutes), ", ".join(means))


def overview():
    """Returns the text of README.md, with a line for each table."""
    titles = ("table", "in the paper", "cells", "one user's", "not published", "done", "short",
              "empty")
    text = [OVERVIEW, line(*titles), line(*["---"] * len(titles))]
    found = {name: counts(name) for name in TABLES}
    for name, t in TABLES.items():
        text.append(line(f"[{name}]({name.split('-')[0]}.md#{name})", t.title, *found[name]))
    text.append(line("all", "", *map(sum, zip(*found.values()))))
    return "\n".join([*text, NOT_HERE])


def rebuild():
    """Draws the figures and writes the pages."""
    for t in TABLES.values():
        found = [(cell, shown(cell)) for cell in cells(t.name)] if t.draw else []
        found = [(cell, s, f" [{s.note}]" if s.note else "") for cell, s in found
                 if s and s.mean is not None]
        if found:
            title = f"Our runs of {PAPERS[t.name.split('-')[0]].TITLE.split(',')[0]}, {t.title}"
            figures.draw(t.draw, runs.RESULTS / f"{t.name}.png", title, found)
    (runs.RESULTS / "README.md").write_text(overview(), encoding="utf-8")
    for paper in PAPERS:
        for name, text in zip((paper, f"{paper}-runs"), pages(paper)):
            (runs.RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    common.say(f"pages   {runs.RESULTS / 'README.md'} and two for each paper")
