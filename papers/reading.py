"""Numbers from records, in the papers' units. A measure is a path in the record, like global/top1
or users/PersFL/Avg."""

import functools
import pickle
import statistics
import sys
from types import SimpleNamespace

import torch

import common
from fl import records


def number(text):
    try:
        return float(text)
    except ValueError:
        return None


def factor(measure):
    """By what a record's number is multiplied to be in the papers' unit: GB, millions, per cent."""
    if measure == "bytes":
        return 1e-9
    if measure.startswith("numbers") or measure.endswith("parameters"):
        return 1e-6
    as_it_is = ("ece", "loss", "rounds_to", "args/rounds", "users/T/", "users/lambda/",
                "users/teacher", "_ms")
    return 1 if any(word in measure for word in as_it_is) else 100


def digits(value, measure):
    if measure.startswith("rounds_to"):
        return f"{value:.1f}"
    if measure.endswith(("ece", "loss")):
        return f"{value:.3f}"
    return f"{value:.2f}"


def on_target(record):
    """Whether the run ended before its last round since its accuracy had reached every --target."""
    return bool(record.get("rounds_to")) and None not in record["rounds_to"].values()


def goodness(mean, measure):
    """By what the best of several settings is chosen: the fewest rounds, else the highest mean."""
    if mean is None:
        return -float("inf")
    return -mean if measure.startswith("rounds_to") else mean


def read(tree, measure):
    """What stands at a path; the whole list for Avg and SD; None if nothing does."""
    for word in measure.split("/"):
        if not isinstance(tree, list):
            tree = (tree or {}).get(word)
        elif word not in ("Avg", "SD"):
            tree = tree[int(word)] if int(word) < len(tree) else None
    return tree


def final(record):
    """Everything that a record says of the last evaluated round, and of the run."""
    rows = [row for row in record["rounds"] if "global" in row or "personal" in row] or [{}]
    sent = record["bytes_up"] + record["bytes_down"]
    return {**record, **rows[-1], **record["final"], "bytes": sent}


def last(record, measure):
    times, _, name = measure.rpartition("*")  # 2*parameters
    value = read(final(record), name)
    return float(times) * value if times and value is not None else value


def combine(values, measure):
    """Returns mean and standard deviation over seeds, in the papers' unit. SD: over users, of their
    averages over seeds."""
    if not values or None in values:
        return None, None
    if measure.endswith("/SD"):
        means = [statistics.mean(user) for user in zip(*values)]
        return factor(measure) * statistics.stdev(means), None
    values = [factor(measure) * (statistics.mean(v) if isinstance(v, list) else v) for v in values]
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None


def curve(record, part, name):
    """Returns the rounds in which a measure was taken, and its values."""
    rows = [row for row in record["rounds"] if part in row]
    return tuple(row["round"] for row in rows), tuple(row[part][name] for row in rows)


def folders(doc):
    """Returns the folders of the command line. Without any it ends, and prints doc."""
    if not sys.argv[1:] or sys.argv[1].startswith("-"):
        sys.exit(doc)
    return sys.argv[1:]


def trained(folder, algorithm, device=None, network=None):
    """Returns the record of a finished run of <algorithm>.py, its Federation, and its global model,
    an nn.Module. Refuses any other folder. network: in place of --model's, network(args, *images).
    """
    wanted = f"name the --out folder of a finished run of {algorithm}.py"
    record = records.read(folder / "result.json")
    if (record["algorithm"], record["status"]) != (algorithm, "finished"):
        common.refuse(f"{folder}: {record['algorithm']}.py, {record['status']}; {wanted}")
    try:
        weights = torch.load(folder / "model.pt", map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as problem:
        common.refuse(f"{folder}/model.pt can't be read ({type(problem).__name__}); {wanted}")
    args = SimpleNamespace(**record["args"] | {"init": None})
    args.device = device or args.device
    federation = common.Federation(args, network and functools.partial(network, args))
    module = federation.net.build().to(federation.device)
    module.load_state_dict(weights)
    return record, federation, module
