"""How much the demo's numbers depend on seed and precision: results/demo.json, which README quotes.

    python tests/measure_demo.py    (12 runs of about 100 s; what is finished is not run again)

The commands of `make demo` without plots, for seeds 0 to 2 in fp32 and bf16. There is one split, as
in compare.py (--split-seed 0). Any number of threads gives the same bits (tests/test_run.py).
"""

import json
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).parent.parent
RUNS = [(seed, precision) for precision in ("fp32", "bf16") for seed in range(3)]


def measured(mix, seed, precision):
    """One run's command and final accuracies."""
    out = HERE / "runs" / "measure-demo" / f"{mix}-{seed}-{precision}"
    command = (f"superfed.py --dataset shapes --mix {mix} --seed {seed} --precision {precision} "
               "--parallel 1 --device cpu")
    if not (out / "result.json").exists():
        subprocess.run([sys.executable, *command.split(), "--out", out],
                       cwd=HERE, stdout=subprocess.DEVNULL, check=True)
    record = json.loads((out / "result.json").read_text())
    assert record["status"] == "finished", f"{out} is not finished; remove it to run it again"
    return {"command": command, "personal": record["final"]["personal"]["mean"],
            "global": record["final"]["global"]["top1"],
            "split": record["split"]["fingerprint"], "environment": record["environment"],
            "minutes": sum(row["seconds"] for row in record["rounds"]) / 60}


def lines(result):
    """README's rows: mean and range over the runs."""
    for mix, runs in result.items():
        cells = []
        for name in ("personal", "global"):
            values = [run[name] for run in runs]
            cells.append(f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        yield f"| {mix.capitalize()} Mixing | {' | '.join(cells)} |"


def main():
    result = {mix: [measured(mix, *values) for values in RUNS] for mix in ("model", "layer")}
    (HERE / "results" / "demo.json").write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(lines(result)))


if __name__ == "__main__":
    main()
