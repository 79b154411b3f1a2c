"""Two small rounds of every algorithm and method end with the numbers in results/golden.json.

    python tests/test_golden.py     writes results/golden.json anew, and says what has changed

Committed records count whatever the code does today, so this is the test that must see a change.
Other CPUs, and other versions of torch, round differently: on emulated ones (AVX2, SSE4) numbers
differed by a tenth of the tolerances at most.
"""

import contextlib
import importlib
import io
import json
import pathlib
import sys
import tempfile

import numpy as np
import pytest
from bits import MORE
from torch.utils._pytree import tree_leaves

import common
from conftest import run
from test_processes import COMMANDS as OTHERS

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "results" / "golden.json"
COMMANDS = OTHERS | MORE

# How far a number may be off, as a share of the number or of its tensor's norm. Larger: the small
# tensors that FedSLR's thresholds leave, and half precision.
TOLERANCE = 3e-5
LARGER = {("fedslr", "state gamma"): 2e-2, ("fedslr", "state p"): 1e-2,
          ("fedavg, bf16", "state w"): 5e-4, ("fedavg, bf16", "loss"): 1e-4}
MEASURES = 0.03  # of accuracies and the algorithm's own measures, on a few images


def algorithm(name):
    module, *argv = COMMANDS[name]
    return argv[1] if module == "baselines" else module


def described(x):
    """The norm of a tensor or number, and its projections on two fixed vectors."""
    x = np.asarray(x, dtype=float).ravel()
    angles = np.arange(x.size)
    return [np.linalg.norm(x), x @ np.cos(angles), x @ np.sin(angles)]


def numbers_of(name, out):
    """Trains a command in this process: {what: a few numbers}."""
    module, *argv = COMMANDS[name]
    record, state = run(importlib.import_module(module), [*argv, "--parallel", "1"], out)
    found = {f"state {key}": described(z) for key, z in state.items() if z is not None}
    for part, measures in record["final"].items():
        values = [z for z in tree_leaves(measures) if isinstance(z, int | float)]
        found[f"mean of {part}"] = [np.mean(values)] if values else []
        if part in ("global", "personal"):
            found[f"loss, {part}"] = [measures["loss"]]
    found["sent"] = [record["bytes_up"], record["bytes_down"]]
    return {key: [float(f"{z:.10g}") for z in values] for key, values in found.items()}


def differences(name, now, then):
    """What is not equal within the tolerance."""
    def equal(key):
        a, b = now.get(key), then.get(key)
        if a is None or b is None or len(a) != len(b):
            return False
        scale, share = max(map(abs, b), default=0), LARGER.get((name, key.split(",")[0]), TOLERANCE)
        limit = MEASURES * max(1, scale) if key.startswith("mean") else share * scale
        return np.allclose(a, b, rtol=0, atol=limit)

    return [key for key in sorted({**now, **then}) if not equal(key)]


@pytest.mark.parametrize("name", COMMANDS)
def test_numbers_have_not_changed(name, tmp_path):
    wrong = differences(name, numbers_of(name, tmp_path), json.loads(GOLDEN.read_text())[name])
    assert not wrong, (
        f"`{' '.join(COMMANDS[name])}` ends with other numbers than those in results/golden.json: "
        f"{', '.join(wrong)}. If this change is wanted, run `python tests/test_golden.py`, which "
        f"writes the file, repeat the records of {algorithm(name)} (python -m papers --again), and "
        "add a line to CHANGELOG.md.")


def test_every_file_that_trains_is_compared():
    files = {path.stem for path in ROOT.glob("*.py") if "common.Run(__file__" in path.read_text()}
    assert files == {module for module, *_ in COMMANDS.values()} and "fedavg" in files
    assert json.loads(GOLDEN.read_text()).keys() == COMMANDS.keys()


# Half precision rounds more than these, and a node of Psi-Net has one minibatch here.
UNSEEN = [("fedavg, bf16", "rate"), ("fedavg, bf16", "order"), ("psinet", "order"),
          ("psinet, all groups", "order"), ("psinet, FedAvg with BatchNorm", "order")]


@pytest.mark.parametrize("name, change", [
    pytest.param(name, change, marks=[pytest.mark.slow] * (name not in ("fedavg", "fedprox")))
    for name in COMMANDS for change in ("rate", "seed", "order", "sign")
    if (name, change) not in UNSEEN])
def test_a_change_is_seen(name, change, tmp_path, monkeypatch):
    """A rate that is 10 % larger, another seed, another order of the images, another sign."""
    module, *argv = COMMANDS[name]
    rate = importlib.import_module(module).arguments(argv).lr
    more = {"rate": ["--lr", str(1.1 * rate)], "seed": ["--seed", "1"]}
    monkeypatch.setitem(COMMANDS, name, [module, *argv, *more.get(change, [])])
    stream, cross_entropy = common.stream, common.cross_entropy
    if change == "order":
        monkeypatch.setattr(common, "stream", lambda seed, purpose, *which: stream(
            seed + (purpose == "order"), purpose, *which))
    if change == "sign":
        monkeypatch.setattr(common, "cross_entropy", lambda *args: -cross_entropy(*args))
    then = json.loads(GOLDEN.read_text())[name]
    assert differences(name, numbers_of(name, tmp_path), then)


def main():
    then = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    now, changed = {}, set()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        for i, name in enumerate(COMMANDS):
            now[name] = numbers_of(name, pathlib.Path(folder, str(i)))
            if name in then and not differences(name, now[name], then[name]):
                now[name] = then[name]  # so that small differences do not add up
            elif name in then:
                changed.add(algorithm(name))
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(z)}" for name, z in now.items())
    GOLDEN.write_text(f"{{\n{lines}\n}}\n")
    for which in sorted(changed):
        print(f"changed: {which}; add a line to CHANGELOG.md")
    print(f"{GOLDEN}: {len(now)} commands, {len(now.keys() - then.keys())} of them new")


if __name__ == "__main__":
    sys.exit(main())
