"""All comparisons with the authors' code: results/authors.json, and the page docs/authors.md made from it.

    python tests/authors/everything.py CLONES      the folder with the clones; `make authors CLONES=folder` does the same
    python tests/authors/everything.py             makes the page from the record again

The clones, each under its repository's name:

    for name in vaseline555/SuPerFed huangtiansheng/fedslr CharlieDinh/pFedMe litian96/ditto alpemreacar/FedDyn \\
        pliang279/LG-FedAvg lgcollins/FedRep IBM/FedMA; do git -C folder clone https://github.com/$name; done
"""

import json
import pathlib
import platform
import sys
import time

import check
import torch

RECORD, PAGE = check.ROOT / "results" / "authors.json", check.ROOT / "docs" / "authors.md"
ABOUT = {
    "superfed": """
Both versions of SuPerFed's code are here. The first, of the paper's version 1, has Model Mixing. The newest has Layer Mixing.
Our side runs with `--as official`, but for the line that says otherwise. Clients have different sizes.""",
    "fedslr": """
FedSLR runs with clients of different sizes. Its factors are compared through the numbers that they take. The other methods are
those of its `train.py`. Where it takes a plain mean of the clients and we weight by n_k, clients have equal sizes. Its coin
flips are set to our clients (fedslr D2). In Ditto the pull is switched off with lambda 0.""",
    "pfedme": """
All of its users take the same number of minibatches in a round. So our clients have different sizes, but equally many
minibatches (pfedme D2).""",
    "ditto": """
Its code wants TensorFlow 1. TensorFlow is replaced by nothing, and its model by one in PyTorch, with the interface that its
trainer uses. The trainer is theirs. Clients have different sizes, but equally many minibatches.""",
    "feddyn": """
Its code divides FedDyn's alpha by n_k / mean n, and weights SCAFFOLD's c in the same way. Where the line does not say so, it is
told equal counts, though clients have different sizes. In SCAFFOLD clients have equally many minibatches, and eta stays: its
code divides by the eta of the first round.""",
    "lgfedavg": """
The whole script main_lg.py runs, from the weights of our first round (lg-fedavg D2). Clients have different sizes.""",
    "fedrep": """
The whole script main_fedrep.py runs, up to its last round, which we leave out (fedrep D2). In its code a client's first head
shares memory with the global model, and changes with it (fedrep D4). With a copy in that line both programs agree. For MNIST it
takes a plain mean of the clients, so that clients have equal sizes. For LEAF it weights by n_k, and clients have different
sizes.""",
    "fedma": """
The matching of units is compared, not the training. A case has 4 clients with 12 units of 20 numbers each. Agreement is the sum
of the inner products of all matched units. With more noise than signal, the two programs end in different local optima.""",
    "torch_sgd": """
The authors of FedAvg and FedAvgM have published no code. So the other side is PyTorch's optimiser `torch.optim.SGD`: for the
clients' steps, and with its Nesterov momentum for the server's step. Clients have different sizes.""",
}


def measure(clones):
    record = {"python": platform.python_version(), "torch": str(torch.__version__), "scripts": {}}
    for name, repository in check.REPOSITORIES.items():
        script, start = check.script(name), time.perf_counter()
        lines = check.run(script, repository and clones / repository.split("/")[1])
        for line in lines:
            line.update(difference=float(f"{line['difference']:.2g}"), bound=float(f"{line['bound']:.2g}"))
        record["scripts"][name] = {"repository": repository, "commits": script.COMMITS, "lines": lines}
        print(f"\n{repository or 'PyTorch'}, {time.perf_counter() - start:.0f} s\n{check.table(lines)}", flush=True)
    return record


def page(record):
    scripts = record["scripts"].values()
    lines = [line for part in scripts for line in part["lines"]]
    equal = [line for line in lines if line["because"] is None]
    with_pytorch = [line for part in scripts if not part["repository"] for line in part["lines"] if line["because"] is None]
    largest = max(line["difference"] for line in equal)
    text = f"""# The same numbers as the authors' code

This page is made by `make authors CLONES=folder`. Do not edit it: edit tests/authors/everything.py.

**What was done.** {len(record["scripts"]) - 1} repositories of authors were run beside ours. Both programs got the same
weights, the same minibatches, the same random draws and the same sampled clients. Then their numbers were compared.

**What was found.** In {len(equal)} comparisons ({len(with_pytorch)} with PyTorch's SGD) the two programs agree up to rounding. The largest difference is {largest:.0e}.
In the other {len(lines) - len(equal)} the numbers differ on purpose. The last column names the choice (D1, D2, ...) that
explains the difference. Each choice is in the docstring of the file or method.

**What was not compared.** PersFL's two stages, Psi-Net and FedSpa: we found no code of their authors. Not compared either:
`centralised`, fine-tuning, FedMA's training, APFL's learnt alpha.

**How you can repeat it.** Clone the repositories into one folder (the commands are at the top of tests/authors/everything.py).
Then:

    make authors CLONES=folder

It takes about two minutes, and it needs no GPU and no data. One repository alone:
`.venv/bin/python tests/authors/superfed.py folder/SuPerFed`.

**How it works.** First our program runs, as you would run it, on a small made-up data set. What it draws is written down. Then
their program runs with these draws. Their files are taken from the commit that the page names. No line of their code is in our
repository.

**How to read the tables.**

- *rounds*: rounds of communication. Nothing stands here when single functions are compared.
- *steps*: minibatches that one client trained on, at most. For a single function: its layers or sums, one after the other.
- *difference*: the largest difference between two numbers.
- *bound*: what rounding can explain: epsilon * steps * n * size. epsilon is 2^-52. n is the number of terms in the longest sum
  of a step. size is the largest number compared, and at least 1. Where a result is divided by a small number, the bound is
  larger by that. The bound is computed, not fitted. It does not count that later steps can enlarge an error.
- *why*: "rounding", or the choice that explains the difference.
- *changed there*: what of their program was replaced so that it could run. "float32 reads float64" means: the word in their
  files is replaced, so that both programs compute in 64 bits.

Computed in float64, with Python {record["python"]} and PyTorch {record["torch"]}.
"""
    for name, part in record["scripts"].items():
        title = part["repository"] or "PyTorch, for FedAvg and FedAvgM"
        text += f"\n## {title}\n"
        if part["commits"]:
            text += "\nCommit " + " and ".join(commit[:10] for commit in part["commits"]) + ".\n"
        text += ABOUT[name] + "\n"
        stubs = sorted({line["stubs"] for line in part["lines"] if line["stubs"]})
        if stubs:
            text += "\nChanged there: " + ". Or: ".join(stubs) + ".\n"
        text += "\n| what | rounds | steps | difference | bound | why |\n|---|---|---|---|---|---|\n"
        for line in part["lines"]:
            why = (line["because"] or "rounding") if check.sound(line) else "**not explained**"
            text += f"| {line['what']} | {line['rounds'] or ''} | {line['steps']} | {line['difference']:.0e} | "
            text += f"{line['bound']:.0e} | {why} |\n"
    return text


def main(argv):
    if len(argv) > 1:
        RECORD.write_text(json.dumps(measure(pathlib.Path(argv[1]).resolve()), indent=1) + "\n")
    record = json.loads(RECORD.read_text())
    PAGE.write_text(page(record))
    raise SystemExit(not all(check.sound(line) for part in record["scripts"].values() for line in part["lines"]))


if __name__ == "__main__":
    main(sys.argv)
