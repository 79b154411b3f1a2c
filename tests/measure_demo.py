"""How much the demo's numbers depend on seed, threads and precision: results/demo.json, which README quotes.

    python tests/measure_demo.py     (24 runs; half an hour of one core)

The commands of `make demo`, without plots; seed and split-seed 0, 1, 2, one and two threads, fp32 and bf16.
"""

import itertools
import json
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).parent.parent
SPREAD = {"seed": (0, 1, 2), "precision": ("fp32", "bf16"), "parallel": (1, 2)}


def measured(mix, seed, precision, parallel):
    """One run's command and final accuracies."""
    out = HERE / "runs" / "measure-demo" / f"{mix}-{seed}-{precision}-{parallel}"
    command = (f"superfed.py --dataset shapes --mix {mix} --seed {seed} --split-seed {seed} --precision {precision} "
               f"--parallel {parallel} --device cpu")
    if not (out / "result.json").exists():
        subprocess.run([sys.executable, *command.split(), "--out", out], cwd=HERE, stdout=subprocess.DEVNULL, check=True)
    record = json.loads((out / "result.json").read_text())
    final = record["final"]
    return {"command": command, "personal": final["personal"]["mean"], "global": final["global"]["top1"],
            "split": record["split"]["fingerprint"], "seconds": sum(row["seconds"] for row in record["rounds"])}


def main():
    result = {}
    for mix in ("model", "layer"):
        runs = [measured(mix, *values) for values in itertools.product(*SPREAD.values())]
        result[mix] = {name: {"mean": statistics.mean(values), "least": min(values), "most": max(values)}
                       for name in ("personal", "global") for values in [[run[name] for run in runs]]}
        result[mix]["runs"] = runs
        for name in ("personal", "global"):
            print(f"{mix} mixing, {name:>8}: {result[mix][name]}")
    (HERE / "results" / "demo.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
