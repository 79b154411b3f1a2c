"""All comparisons with the authors' code: results/authors.json, and the page docs/authors.md made
from it.

    python checks/authors/everything.py CLONES      takes the folder with the clones
                                                   (`make authors CLONES=folder` does the same)
    python checks/authors/everything.py             makes the page from the record again

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
PAGE = check.ROOT / "docs" / "authors.md"
ABOUT = {
    "superfed": """
The former (for version 1 of the paper) implements Model Mixing, the latter (the newest) Layer
Mixing. Ours is superfed_v1.py unless a line says otherwise. Clients have different
sizes.""",
    "fedslr": """
FedSLR runs with clients of different sizes. Its factors are compared by their number of parameters.
The other methods are those of its `train.py`. Where it averages clients equally and we weight by
n_k, clients have equal sizes. Its coin flips are set to choose our sampled clients (fedslr D2).""",
    "pfedme": """
All its users take equally many minibatches in a round, and so do our clients, though their sizes
differ (pfedme D2).""",
    "ditto": """
Its code needs TensorFlow 1, which a stub replaces, and a PyTorch model replaces its model. The
trainer is theirs. Clients have different sizes, but equally many minibatches.""",
    "feddyn": """
Its code divides FedDyn's alpha by n_k / mean n, and weights SCAFFOLD's c in the same way. Unless
the line says otherwise, we pass it equal n_k, though clients have different sizes. In SCAFFOLD
clients have equally many minibatches, and eta is constant, because its code divides by the first
round's eta.""",
    "lgfedavg": """
The whole script main_lg.py runs, starting from our initial weights (lg-fedavg D2). Clients have
different sizes.""",
    "fedrep": """
The whole script main_fedrep.py runs, up to its last round, which we leave out (fedrep D2). In its
code a client's first head shares memory with the global model, and changes with it (fedrep D4).
With a copy instead, both programs agree. For MNIST it averages clients equally, so clients have
equal sizes. For LEAF it weights by n_k, and clients have different sizes.""",
    "fedma": """
This compares the matching of units, not the training. A case has 4 clients with 12 units of 20
weights each. Agreement is the sum of the inner products of all matched units. With more noise than
signal the programs can end in different local optima.""",
    "torch_sgd": """
The authors of FedAvg and FedAvgM have published no code. So we compare with PyTorch's optimiser
`torch.optim.SGD`, for the clients' steps and, with Nesterov momentum, for the server's step.
Clients have different sizes.""",
}


def measure(clones):
    record = {"python": platform.python_version(), "torch": str(torch.__version__), "scripts": {}}
    for name, repository in check.REPOSITORIES.items():
        script, start = check.script(name), time.perf_counter()
        lines = check.run(script, repository and clones / repository.split("/")[1])
        for line in lines:
            line.update({key: float(f"{line[key]:.2g}") for key in ("difference", "bound")})
        record["scripts"][name] = dict(repository=repository, commits=script.COMMITS, lines=lines)
        seconds = time.perf_counter() - start
        print(f"\n{repository or 'PyTorch'}, {seconds:.0f} s\n{check.table(lines)}", flush=True)
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
docstring of our file or method describes it.

**Not compared.** We found no authors' code for PersFL's two stages, Psi-Net and FedSpa. We did not
compare `centralised`, fine-tuning, FedMA's training and APFL's learnt alpha.

**Repeat it.** Clone the repositories into one folder (checks/authors/everything.py has the
commands). Then run `make authors CLONES=folder`, which takes two minutes and needs neither GPU nor
data. `.venv/bin/python checks/authors/superfed.py folder/SuPerFed` compares one repository.

**How it works.** Our program runs first, as a user would run it, on a small synthetic data set, and
its random draws are recorded. Then their program, at the commit that this page names, runs with
these draws. None of their code is in our repository.

**The tables.** *Difference* is the largest difference between two numbers. Below epsilon * steps *
n * size it counts as rounding: epsilon is 2^-52, n the number of terms in the longest sum of a
step, and size the largest number compared, at least 1. Dividing a result by a small number enlarges
the bound by that factor. The bound ignores later steps' amplification of errors. [The
record](../results/authors.json) lists all rounds, steps and bounds. *Changed there* names what we
replaced to make their program run; "float32 reads float64" means that this word is replaced in
their files.

We computed in float64, with Python {record["python"]} and PyTorch {record["torch"]}.
""")
    for name, part in record["scripts"].items():
        text += f"\n## {part['repository'] or 'PyTorch, for FedAvg and FedAvgM'}\n\n"
        about = ABOUT[name]
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


def main(argv):
    if len(argv) > 1:
        record = measure(pathlib.Path(argv[1]).resolve())
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    record = json.loads(RECORD.read_text())
    PAGE.write_text(page(record))
    lines = [line for part in record["scripts"].values() for line in part["lines"]]
    raise SystemExit(not all(map(check.sound, lines)))


if __name__ == "__main__":
    main(sys.argv)
