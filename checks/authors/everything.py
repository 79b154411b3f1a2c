"""All comparisons with the authors' code: results/authors.json, and the page results/authors.md
made from it.

    python checks/authors/everything.py CLONES            takes the folder with the clones
                                                         (`make authors CLONES=folder` does so, too)
    python checks/authors/everything.py CLONES feddyn     only prints the part of this script
    python checks/authors/everything.py                   makes the page from the record again

The clones, each under its repository's name:

    for name in vaseline555/SuPerFed huangtiansheng/fedslr CharlieDinh/pFedMe litian96/ditto \\
        alpemreacar/FedDyn pliang279/LG-FedAvg lgcollins/FedRep IBM/FedMA
    do git -C folder clone https://github.com/$name; done
"""

import json
import pathlib
import platform
import sys
import textwrap
import time

import check  # first: it makes our files importable

# isort: split
import torch

RECORD = check.ROOT / "results" / "authors.json"
PAGE = check.ROOT / "results" / "authors.md"


def measure(clones, names):
    """Runs the scripts of these names, prints their tables, and returns the record."""
    record = {"python": platform.python_version(), "torch": str(torch.__version__), "scripts": {}}
    for name in names:
        script, start = check.script(name), time.perf_counter()
        lines = check.compared(script, clones)
        for line in lines:
            line.update({key: float(f"{line[key]:.2g}") for key in ("difference", "bound")})
        record["scripts"][name] = dict(repository=script.REPOSITORY, commits=script.COMMITS,
                                       lines=lines)
        seconds = time.perf_counter() - start
        print(f"\n{script.REPOSITORY or 'PyTorch'}, {seconds:.0f} s\n{check.table(lines)}",
              flush=True)
    return record


def wrapped(text):
    """Paragraphs and list items of at most 100 columns."""
    parts = [" ".join(part.split()) for part in text.strip().split("\n\n")]
    return "\n\n".join(textwrap.fill(part, 100, break_long_words=False, break_on_hyphens=False)
                       for part in parts) + "\n"


def page(record):
    scripts = record["scripts"].values()
    lines = [line for part in scripts for line in part["lines"]]
    equal = [line for line in lines if line["because"] is None]
    ours = [part for part in scripts if not part["repository"]]
    with_pytorch = [line for part in ours for line in part["lines"] if line["because"] is None]
    largest = max(line["difference"] for line in equal)
    text = "# The same numbers as the authors' code\n\n" + wrapped(f"""
This page is made by `make authors CLONES=folder`. Edit checks/authors/everything.py, not the page.

We ran the authors' programs from {len(scripts) - len(ours)} repositories beside our files, with the
same weights, minibatches, random draws and sampled clients, and compared the numbers.

**Result.** In {len(equal)} comparisons ({len(with_pytorch)} with PyTorch's SGD) the two programs
agree up to rounding: they differ by at most {largest:.0e}. In the other {len(lines) - len(equal)}
they differ on purpose. There the table names the choice (D1, D2, ...) that explains it; the
docstring of our file or method states it.

**Not compared.** We found no authors' code for PersFL's two stages, Psi-Net and FedSpa. We did not
compare `centralised`, fine-tuning, FedMA's training and APFL's learnt alpha.

**Repeat it.** Clone the repositories into one folder (checks/authors/everything.py has the
commands). Then run `make authors CLONES=folder`, which takes two minutes and needs neither GPU nor
data. `.venv/bin/python checks/authors/everything.py folder superfed` compares one repository.

**How it works.** Our program runs first, as a user would run it, on a small synthetic data set, and
its random draws are recorded. Then their program, at the commit that this page names, runs with
these draws. None of their code is in our repository.

**The tables.** *Difference* is the largest difference between two numbers. Below epsilon * steps *
n * size it counts as rounding: epsilon is 2.2e-16, n the number of terms in the longest sum of a
step, and size the largest number compared, at least 1. Dividing a result by a small number enlarges
the bound by that factor. The bound ignores later steps' amplification of errors. [The
record](../results/authors.json) lists all rounds, steps and bounds. *Changed there* names what we
replaced to make their program run; "float32 reads float64" means that this word is replaced in
their files.

We computed in float64, with Python {record["python"]} and PyTorch {record["torch"]}.
""")
    for name, part in record["scripts"].items():
        text += f"\n## {part['repository'] or 'PyTorch, for FedAvg and FedAvgM'}\n\n"
        about = check.script(name).__doc__
        if part["commits"]:
            commits = " and ".join(commit[:10] for commit in part["commits"])
            about = f"We ran commit{'s' * (len(part['commits']) > 1)} {commits}. {about}"
        stubs = sorted({line["stubs"] for line in part["lines"] if line["stubs"]})
        if stubs:
            about += "\n\nChanged there: " + ". In other comparisons: ".join(stubs) + "."
        text += wrapped(about) + "\n|what|difference|\n|---|---|\n"
        for line in part["lines"]:
            choice = f", {line['because']}" if line["because"] else ""
            choice = choice if check.sound(line) else f"{choice}, **not explained**"
            text += f"|{line['what']}|{line['difference']:.0e}{choice}|\n"
    return text


def main(clones=None, *names):
    if clones:
        record = measure(pathlib.Path(clones).resolve(), names or check.SCRIPTS)
    if clones and not names:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    if not names:
        record = json.loads(RECORD.read_text())
        PAGE.write_text(page(record))
    lines = [line for part in record["scripts"].values() for line in part["lines"]]
    raise SystemExit(not all(map(check.sound, lines)))


if __name__ == "__main__":
    main(*sys.argv[1:])
