"""Runs the exercises of docs/*.md with three seeds, and checks that their answers hold.

    python checks/exercises.py               all; five minutes; writes results/exercises.json
    python checks/exercises.py superfed-1    exercise 1 of docs/superfed.md; writes nothing

The commands are read from the pages; --seed, --split-seed, --device cpu and --out are added. An
exercise may change a line of a file: it says so in a block "diff", and the commands below that
block run with the changed line. For each exercise with commands there is a function here with its
name. It gets what the commands left. It gives the numbers of the answer's table, and whether the
answer holds.
"""

import contextlib
import importlib
import io
import json
import pathlib
import re
import shlex
import sys
import tempfile
from types import SimpleNamespace
from typing import NamedTuple

import torch

HERE = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))

import common
import psinet
from docs.build import sections
from fl import records

PAGES = ("fedavg", "fedavgm", "superfed", "psinet", "fedslr", "persfl")
SEEDS = (0, 1, 2)
RECORD = HERE / "results" / "exercises.json"


class Exercise(NamedTuple):
    title: str
    text: str
    runs: list  # (command, change), in the order of the page; change: (line, new line), or None


def exercises():
    """{"fedavg-1": Exercise, ...} of all pages."""
    found = {}
    for page in PAGES:
        text = dict(sections((HERE / "docs" / f"{page}.md").read_text(), 2)).get("Exercises", "")
        for heading, body in sections(text, 3)[1:]:
            number, title = heading.split(". ", 1)
            before, *changed = re.split(r"^```diff\n", body, flags=re.M)
            runs = [(command, None) for command in commands(before)]
            for part in changed:
                diff, after = part.split("```\n", 1)
                change = tuple(re.search(rf"^{sign} *(.*)$", diff, re.M)[1]
                               for sign in (r"-", r"\+"))
                runs += [(command, change) for command in commands(after)]
            found[f"{page}-{number}"] = Exercise(title, body, runs)
    return found


def commands(text):
    return re.findall(r"^    (python .*)$", text, re.M)


def module(file, change, folder):
    """The module of an algorithm's file; with a change, of a copy in a folder in which one line is
    another."""
    if not change:
        return importlib.import_module(file.removesuffix(".py"))
    text = (HERE / file).read_text()
    assert text.count(change[0]) == 1, f"{file} has {text.count(change[0])} times: {change[0]}"
    (folder / file).write_text(text.replace(*change))
    return common.load_file(folder / file)


def carry_out(command, change, seed, folder):
    """Runs a command; what it left: its record, its state, and what it printed."""
    (_, file, *flags), out, printed = shlex.split(command), folder / "out", io.StringIO()
    folder.mkdir()
    with contextlib.redirect_stdout(printed):
        main = module(file, change, folder).main
        main([*flags, "--seed", str(seed), "--split-seed", str(seed), "--device", "cpu",
              "--out", str(out)])
    state = torch.load(out / "state.pt", weights_only=True)["state"]
    return SimpleNamespace(record=records.read(out / "result.json"),
                           printed=printed.getvalue(), **state)


# What the checks ask for


def top1(run):
    return run.record["final"]["global"]["top1"]


def apart(x, y):
    """The largest difference between two models' weights."""
    return (x - y).abs().max().item()


def w_0(run, client=0):
    """The initial weights of a run, [d]; client=1: SuPerFed's w^l_0."""
    args = SimpleNamespace(**run.record["args"])
    images = (3, 32, 32), 10  # of shapes
    net = (psinet.GroupedNet(args, *images) if run.record["algorithm"] == "psinet"
           else common.Net(args.model, *images))
    return net.init(common.stream(args.seed, "initialisation", 0, client))


def yes(same):
    return "yes" if same else "no"


def megabytes(run):
    return f"{run.record['bytes_up'] / 1e6:.2f}"


# One function for each exercise: what its commands left -> the numbers of its table, and whether
# the answer holds


def fedavg_1(one_start, alone, two_starts):
    accuracies = [top1(run) for run in (alone, one_start, two_starts)]
    names = ("one network alone", "average, one start", "average, two starts")
    numbers = {name: f"{accuracy:.4f}" for name, accuracy in zip(names, accuracies)}
    return numbers, accuracies[2] < accuracies[0] < accuracies[1]


def fedavg_2(one, ten, one_5, ten_5):
    near, far = apart(one.w, ten.w), apart(one_5.w, ten_5.w)
    return ({"largest difference, E = 1": f"{near:.1e}", "E = 5": f"{far:.1e}"},
            near < 1e-6 and far > 1e-4)


def fedavg_3(one, five, few):
    runs = {"MB up, E = 1": one, "E = 5": five, "C = 0": few}
    sent = [run.record["bytes_up"] for run in runs.values()]
    return ({name: megabytes(run) for name, run in runs.items()},
            sent == [4 * 308_310 * 3 * m for m in (5, 5, 1)])


def fedavgm_1(fedavg, plain, nesterov):
    rounding = apart(fedavg.w, plain.w)
    numbers = {"largest difference, plain to FedAvg": f"{rounding:.1e}",
               "nesterov to plain": f"{apart(plain.w, nesterov.w):g}"}
    return numbers, 0 < rounding < 1e-5 and torch.equal(plain.w, nesterov.w)


def fedavgm_2(zero, plain, nesterov):
    steps = [(run.w - w_0(run)).norm() for run in (zero, plain, nesterov)]
    ratio, same = (steps[2] / steps[1]).item(), torch.equal(zero.w, plain.w)
    numbers = {"plain is as beta = 0": yes(same),
               "length of Nesterov's step / plain step": f"{ratio:.4f}"}
    return numbers, same and abs(ratio - 1.9) < 1e-4


def fedavgm_3(*runs):
    alphas = [run.record["args"]["alpha"] for run in runs]
    found = [float(re.search(r"classes \d+/([\d.]+)", run.printed)[1]) for run in runs]
    numbers = {f"classes, alpha = {alpha:g}": f"{mean:g}" for alpha, mean in zip(alphas, found)}
    return numbers, found[0] == 1 and found == sorted(found)


def superfed_1(without, with_):
    cos = []  # of w^f and w^l_k, mean over the clients that have trained
    for run in (without, with_):
        trained = (run.w_l != w_0(run, client=1)).any(1)
        cos.append(torch.cosine_similarity(
            run.w_l[trained].double(), run.w_f.double()[None]).mean().item())
    return ({"cos, nu = 0": f"{cos[0]:.4f}", "cos, nu = 2": f"{cos[1]:.4f}"},
            abs(cos[1]) < abs(cos[0]) / 2)


def superfed_2(fedavg, superfed, large_nu):
    same = torch.equal(fedavg.w, superfed.w_f), torch.equal(superfed.w_f, large_nu.w_f)
    return ({"w^f is FedAvg's w": yes(same[0]), "nu = 1000 changes any bit": yes(not same[1])},
            all(same))


def superfed_3(run):
    untouched = (run.w_l == w_0(run, client=1)).all(1).sum().item()
    up = [row["bytes_up"] / 1e6 for row in run.record["rounds"]]
    numbers = {"unchanged w^l of 20": str(untouched),
               "MB uploaded per round, Phase I": f"{up[0]:.2f}", "Phase II": f"{up[-1]:.2f}"}
    return numbers, 10 <= untouched <= 15 and len(set(up)) == 1


def persfl_1(run):
    final = run.record["final"]
    teacher = final["users"]["FedAvg"]
    same = {lam: sum(a[i] == o for a, o in zip(final["students"]["test"], teacher))
            for i, (T, lam) in enumerate(final["grid"]) if T == 1 and lam in (0, 1)}
    numbers = {"students as accurate as the teacher, of 10: lambda = 1": str(same[1]),
               "lambda = 0": str(same[0])}
    return numbers, same[1] == 10 > same[0]


def persfl_2(kl, ce):
    between, moved = apart(kl.A, ce.A), apart(kl.A, kl.O)
    of_kl, of_ce = (run.record["final"] for run in (kl, ce))
    listening = sum(lam > 0 for lam in of_kl["users"]["lambda"])
    agree = of_kl["students"] == of_ce["students"]  # the accuracies of all 11 students of each user
    numbers = {"users with lambda > 0": str(listening), "all accuracies agree": yes(agree)}
    numbers |= {"difference, KL to CE": f"{between:g}", "student to teacher": f"{moved:.3f}"}
    return numbers, listening > 0 and agree and between == 0 < moved


def persfl_3(optimal, final):
    rounds = [set(run.record["final"]["users"]["teacher's round"]) for run in (optimal, final)]
    down = [run.record["bytes_down"] for run in (optimal, final)]
    teacher = torch.equal(optimal.O, w_0(optimal).expand_as(optimal.O))
    sent = {f"MB down, {name}": f"{number / 1e6:.2f}"
            for name, number in zip(("optimal", "final"), down)}
    numbers = {"teacher is G_1": yes(teacher), **sent}
    return numbers, (teacher and rounds == [{1}, {2}]
                     and down == [4 * 62_006 * 10, 2 * 4 * 62_006 * 10])


def fedslr_1(*runs):
    ranks = [run.record["final"]["ranks"] for run in runs]  # {layer: rank}, of each run
    lost = {name: ranks[0][name] - ranks[2][name] for name in ranks[0]}
    sums = [sum(of.values()) for of in ranks]
    numbers = [run.record["final"]["numbers"]["gkr"] for run in runs]
    columns = {"ranks": sums, "conv2": [of["conv2"] for of in ranks],
               "parameters in w": [f"{n:,}" for n in numbers]}
    holds = (sums[0] > sums[1] > sums[0] / 2 and sums[2] < sums[1] / 2
             and max(lost, key=lost.get) == "conv2")
    return {name: " / ".join(map(str, values)) for name, values in columns.items()}, holds


def fedslr_2(run):
    final, zero = run.record["final"], not run.p.any().item()
    of = [final[part]["mean"] for part in ("gkr", "personal")]
    return ({"all p_i are 0": yes(zero), "GKR": f"{of[0]:.4f}", "mixed": f"{of[1]:.4f}"},
            zero and of[0] == of[1])


def fedslr_3(fedslr, feddyn):
    gap, moved = apart(fedslr.w, feddyn.w), apart(fedslr.w, w_0(fedslr))
    return ({"largest difference": f"{gap:.1e}", "largest change since w^0": f"{moved:.1e}"},
            gap < 1e-6 and moved > 1e-3)


def psinet_1(five, ten):
    found = [re.search(r"nodes +([\d./]+) of (\d+) groups", run.printed) for run in (five, ten)]
    numbers = {f"groups of a node, G = {match[2]}": match[1] for match in found}
    least, _, most = map(float, found[0][1].split("/"))
    return numbers, 2 <= least <= most <= 4 and found[1][1] == "4/4/4"


def psinet_2(psinet_run, fedavg):
    same = torch.equal(psinet_run.Omega, fedavg.w) and top1(psinet_run) == top1(fedavg)
    return {"same weights, bit for bit": yes(same), "global": f"{top1(fedavg):.4f}"}, same


def psinet_3(pruned, whole):
    changed = []
    for run in (pruned, whole):
        net = psinet.GroupedNet(SimpleNamespace(**run.record["args"]), (3, 32, 32), 10)
        moved = run.Omega[: net.d] != w_0(run)
        changed.append(len(set(net.group[: net.d][moved].tolist()) - {-1}))
    numbers = {"groups that changed, --prune": str(changed[0]), "--no-prune": str(changed[1])}
    return numbers | {"MB up, --prune": megabytes(pruned),
                      "MB up, --no-prune": megabytes(whole)}, changed == [4, 10]


def table(rows):
    """The table of an exercise in Markdown: rows, {seed: {title of a column: number}}."""
    titles = ["seed", *next(iter(rows.values()))]
    lines = [titles, *([str(seed), *numbers.values()] for seed, numbers in rows.items())]
    head, *rest = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(titles), *rest])


def main(names):
    known, record = exercises(), {}
    for name in names or known:
        if name not in known:
            common.refuse(f"no exercise is called {name}; use one of {', '.join(known)}")
        if not known[name].runs:
            if names:
                print(f"{name}: nothing to run; the answer is on docs/{name.split('-')[0]}.md")
            continue
        rows, holds = {}, {}
        for seed in SEEDS:
            with tempfile.TemporaryDirectory() as folder:
                left = [carry_out(*run, seed, pathlib.Path(folder) / str(i))
                        for i, run in enumerate(known[name].runs)]
            rows[seed], holds[seed] = globals()[name.replace("-", "_")](*left)
        shown = {seed: numbers | {"holds": yes(holds[seed])} for seed, numbers in rows.items()}
        print(f"{name}: {known[name].title}\n\n{table(shown)}\n", flush=True)
        record[name] = {"runs": known[name].runs, "numbers": rows, "holds": holds}
    if not names:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(all(one["holds"].values()) for one in record.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
