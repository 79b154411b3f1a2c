"""All methods for a short while on the same split, clients and initial weights of the embedded data set: one table, one plot.

    python tests/compare.py                  (make compare: 23 runs; those that are finished are not run again)

A smoke comparison, not a benchmark: one seed, 30 rounds (persfl: 15, in which all users take part), nothing tuned. Rates and
momentum are the same for all but where MORE says otherwise. Writes
results/compare.json and results/compare.png; the table in docs/compare.md is a copy of what it prints.
"""

import hashlib
import json
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(HERE))
import baselines  # noqa: E402
import common  # noqa: E402

SAME = ("--dataset shapes --limit 5000 --split shards --clients 20 --per-client 4 --client-val 0.1 --client-test 0.2 "
        "--fraction 0.5 --rounds 30 --epochs 1 --batch-size 20 --lr 0.02 --momentum 0.9 --weight-decay 0 --lr-decay 1 "
        "--model cnn --transform scale --eval-every 30")
MORE = {  # no momentum and larger rates where the papers have no momentum; all users in half the rounds for persfl
    "fedavgm": "--momentum 0 --beta 0.9", "fedslr": "--momentum 0 --lr 0.1", "scaffold": "--momentum 0 --lr 0.05",
    "feddyn": "--momentum 0 --lr 0.05", "pfedme": "--momentum 0 --lr 0.1 --theta-lr 0.05",
    "per-fedavg": "--momentum 0 --lr 0.1", "persfl": "--fraction 1 --rounds 15 --eval-every 15",
}
FILES = {"fedavg": "fedavg", "fedavgm": "fedavgm", "superfed-mm": "superfed --mix model", "superfed-lm": "superfed --mix layer",
         "psinet": "psinet --no-prune", "fedslr": "fedslr", "persfl": "persfl"}
METHODS = {**FILES, **{name: f"baselines --method {name}" for name in baselines.METHODS}}


def record(name):
    """The record of a method's run, which is done if it isn't there yet."""
    out, (file, *own) = HERE / "runs" / "compare" / name, METHODS[name].split()
    if (out / "result.json").exists():  # by today's files, or not at all
        made = json.loads((out / "result.json").read_text())["environment"]["sources"]
        if any(hashlib.sha256((HERE / path).read_bytes()).hexdigest() != digest for path, digest in made.items()):
            shutil.rmtree(out)
    argv = [f"{file}.py", *own, *SAME.split(), *MORE.get(name, "").split(), "--out", str(out), "--resume"]
    print(f"python {' '.join(argv[:-3])}", flush=True)
    code = subprocess.run([sys.executable, *argv], cwd=HERE, stdout=subprocess.DEVNULL).returncode
    if code not in (0, 3):  # 3: diverged, which is a result
        sys.exit(f"exit code {code}")
    return json.loads((out / "result.json").read_text())


def row(name, record):
    """What the table says of a run."""
    final = record["final"]
    personal = final.get("personal", {"mean": 0.0, "std": 0.0, "worst_decile": 0.0})  # diverged
    return {"method": name + " (diverged)" * record["diverged"], "global": final.get("global", {}).get("top1"),
            "personal": personal["mean"], "std": personal["std"], "worst_decile": personal["worst_decile"],
            "mb_per_round": (record["bytes_up"] + record["bytes_down"]) / len(record["rounds"]) / 1e6,
            "seconds_per_round": record["seconds_per_round"]}


def lines(rows):
    """The table in Markdown."""
    yield "| method | global | personal, mean | std | worst tenth | MB a round | s a round |"
    yield "|---|---|---|---|---|---|---|"
    for r in rows:
        top1 = "" if r["global"] is None else f"{r['global']:.3f}"
        yield (f"| {r['method']} | {top1} | {r['personal']:.3f} | {r['std']:.3f} | {r['worst_decile']:.3f} | "
               f"{r['mb_per_round']:.2f} | {r['seconds_per_round']:.2f} |")


def main():
    records = {name: record(name) for name in METHODS}
    assert len({r["split"]["fingerprint"] for r in records.values()}) == 1
    rows = sorted((row(name, r) for name, r in records.items()), key=lambda r: -r["personal"])
    some = records["fedavg"]
    result = {"settings": SAME, "more": MORE, "device": some["environment"]["device"],
              "split": some["split"]["fingerprint"], "rows": rows}
    (HERE / "results" / "compare.json").write_text(json.dumps(result, indent=1) + "\n")
    with common.drawing(HERE / "results" / "compare.png", size=(7, 6)) as axis:
        names = [r["method"] for r in rows if r["personal"]][::-1]
        axis.boxplot([records[name]["final"]["personal"]["per_client"] for name in names], orientation="horizontal")
        axis.set_yticks(range(1, len(names) + 1), names)
        seen = [(i + 1, r["global"]) for i, r in enumerate(r for r in rows[::-1] if r["personal"]) if r["global"] is not None]
        axis.plot([top1 for _, top1 in seen], [i for i, _ in seen], "x", color="black", label="global, on central test images")
        axis.set(xlabel="accuracy: boxes over the clients' own test images", xlim=(0, 1))
        axis.legend()
    print("\n".join(lines(rows)))


if __name__ == "__main__":
    main()
