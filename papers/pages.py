"""The pages under results/: README.md, whose text is in overview.md, and for each paper <paper>.md
and <paper>-runs.md. They depend on the records alone."""

import functools
import pathlib
from typing import NamedTuple

import common

from . import figures, reading, runs
from .runs import PAPERS, TABLES, cells


class Shown(NamedTuple):
    """What a cell shows: one command's records at one scale."""

    results: list
    mean: float  # in the papers' unit; None if the record does not have it
    std: float  # over seeds; None for one
    short: bool  # fewer rounds than wanted
    notes: list  # rounds, if not all; diverged; half precision; settings tried

    @property
    def note(self):
        return f" [{', '.join(self.notes)}]" if self.notes else ""


def view(command, measure, scale):
    """Returns a Shown of the seeds that are done, or else of those that diverged; None without any.
    """
    ended = [r for r in runs.results(command, scale) if r.ended]
    done = [r for r in ended if r.state == "done"]
    use = done or ended
    if not use:
        return None
    of = runs.arguments(command)["rounds"]
    n = min(of if reading.on_target(r.record) else len(r.record["rounds"]) for r in use)
    notes = []
    if n < of:
        notes.append(f"{n} of {of} rounds")
    if len(done) < len(ended):
        notes.append(f"{len(ended) - len(done)} of {len(ended)} diverged")
    if any(r.bf16 for r in use):
        notes.append("bf16")
    values = [reading.last(r.record, measure) for r in done]
    return Shown(use, *reading.combine(values, measure), n < of, notes)


@functools.cache
def shown(cell):
    """Returns what a cell shows: the best of its commands, at the largest scale at which a run has
    ended. None without any."""
    for scale in runs.scales():
        found = [view(command, cell.measure, scale) for command in cell.commands]
        found = [s for s in found if s]
        if found:
            best = max(found, key=lambda s: reading.goodness(s.mean, cell.measure))
            if len(cell.commands) > 1:
                best.notes.append(f"{len(found)} of {len(cell.commands)} settings tried")
            return best


def counts(name):
    """Returns how many cells of each kind a table has, in the order of the overview's columns."""
    every = [*cells(name)]
    found = [shown(cell) for cell in every]
    short, empty = sum(s.short for s in found if s), found.count(None)
    return {"cells": len(every), "one user's": sum(cell.row.startswith("User") for cell in every),
            "not published": sum(cell.published == "?" for cell in every),
            "done": len(every) - short - empty, "short": short, "empty": empty}


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


def head(*titles):
    return [line(*titles), line(*["---"] * len(titles))]


HOW_TO_READ = """How to read a cell:

- `47.06 / 48.31 ± 2.08 (2)`: the paper has 47.06. We have 48.31 after the last round. It is the
  mean over 2 seeds, and 2.08 is their standard deviation. A seed sets the split and the initial
  weights. Accuracies are in per cent.
- `?`: the paper's number is lost in our copy, or the paper only draws it. `-`: the paper has no
  such cell. `·`: not run.
- **!**: ours differs from the paper's by more than the standard deviation. Only runs of full length
  and with two seeds or more are judged.
- `[40 of 200 rounds]`: our run is shorter than the paper's. `[bf16]`: it was computed in half
  precision. `[3 of 4 settings tried]`: we show the best of those 3."""
RUNS_ARE = """The runs that made the numbers of [the tables]({paper}.md). The command is for seed 0;
for seed s add `--seed s --split-seed s`. Minutes are for one seed, with evaluation.
`python -m papers --again RECORD` repeats one and compares the results.
`python -m papers --list --only {paper}` also shows the runs that are missing.
"""


def pages(paper):
    """Returns the text of <paper>.md and <paper>-runs.md."""
    mine = [t for t in TABLES.values() if t.name.startswith(f"{paper}-")]
    found = [shown(cell) for t in mine for cell in cells(t.name)]
    made = {s.results[0].path: s.results for s in found if s}
    title = PAPERS[paper].TITLE
    links = (f"[The code](../{paper}.py). [About it](../docs/{paper}.md). "
             f"[All papers](README.md). [Our {len(made)} runs]({paper}-runs.md).")
    text = [f"# {title}", "", links, "", HOW_TO_READ]
    for t in mine:
        text += table_lines(t)
    runs_text = [f"# {title}: our runs", "", RUNS_ARE.format(paper=paper),
                 *head("python ...", "seeds", "rounds", "device", "minutes"),
                 *map(run_line, made.values())]
    return "\n".join(text) + "\n", "\n".join(runs_text) + "\n"


def table_lines(t):
    """Returns one table in Markdown."""
    here = {(cell.row, cell.column): cell for cell in cells(t.name)}
    text = ["", f"## {t.name}", "", f"**{t.title}.** {t.note}".strip(), ""]
    if (runs.RESULTS / f"{t.name}.svg").exists():
        text += [f"![{t.title}]({t.name}.svg)", ""]
    text += head("", *t.columns)
    for row in t.rows:
        text.append(line(row, *(cell_text(here.get((row, column))) for column in t.columns)))
    explained = {key for cell in here.values() if shown(cell)
                 for key in ("All", cell.row, f"{cell.row}/{cell.column}")}
    sentences = [f"- {key.replace('/', ', ')}: {why}" for key, why in t.why.items()
                 if key in explained]
    if sentences:
        text += ["", "Why ours are as they are:", "", *sentences]
    return text


def cell_text(cell):
    """Returns a cell as the pages print it. cell: None if the paper has none."""
    if not cell:
        return "-"
    s = shown(cell)
    if not s:
        return f"{cell.published} / ·"
    mark = " **!**" if differs(cell, s) else ""
    return f"{cell.published} / {ours(cell, s)}{mark}{s.note}"


def run_line(found):
    """Returns one run in Markdown, with all its seeds."""
    first, where = found[0], found[0].path.parent.relative_to(runs.RESULTS)
    command = runs.written_out(first.command)
    if first.scale != 1:
        command += f" --rounds {first.wanted}"
    if first.bf16:
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
    found = {name: counts(name) for name in TABLES}
    kinds = next(iter(found.values()))
    text = head("table", "in the paper", *kinds)
    for name, of in found.items():
        link = f"[{name}]({name.split('-')[0]}.md#{name})"
        text.append(line(link, TABLES[name].title, *of.values()))
    text.append(line("all", "", *(sum(of[kind] for of in found.values()) for kind in kinds)))
    template = pathlib.Path(__file__).with_name("overview.md").read_text(encoding="utf-8")
    return template.replace("{table}", "\n".join(text))


def draw(t):
    """Draws the figure of a table, if it has one and a run."""
    found = [(cell, shown(cell)) for cell in cells(t.name)] if t.draw else []
    found = [(cell, s) for cell, s in found if s and s.mean is not None]
    if found:
        paper = PAPERS[t.name.split("-")[0]].TITLE.split(",")[0]
        title = f"Our runs of {paper}, {t.title}"
        figures.draw(t.draw, runs.RESULTS / f"{t.name}.png", title, found)


def rebuild():
    """Draws the figures and writes the pages."""
    for t in TABLES.values():
        draw(t)
    texts = {"README": overview()}
    for paper in PAPERS:
        texts[paper], texts[f"{paper}-runs"] = pages(paper)
    for name, text in texts.items():
        (runs.RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    common.say(f"pages   {runs.RESULTS / 'README.md'} and two for each paper")
