"""lgcollins/FedRep: FedRep and FedPer, whole rounds of its script main_fedrep.py.

    python checks/authors/fedrep.py CLONE
"""

import shlex
import sys
import types
from unittest import mock

import check  # first: it makes our files importable

# isort: split
import numpy as np

import baselines

NAME, COMMITS = "fedrep", ("d82e62982e107bb3322541604f059c0ff28bd289",)
FLAGS = shlex.split("--fraction 0.5 --rounds 4 --batch-size 4 --lr 0.1 --momentum 0.5 "
                    "--weight-decay 0.0001 --personal 1")
METHODS = {"fedrep": ["--epochs", "2", "--body-epochs", "2"], "fedper": ["--epochs", "2"]}
SIZES = (15, 11, 20, 12)  # of these .8 are trained on
EQUAL = (15, 15, 15, 15)
ABSENT = ["pandas", "models.test", "models.language_utils", "FedProx"]
STUBS = "data; evaluation; pandas; language_utils"
# what clients keep at first shares its memory with the global model
ALIAS = "=net_glob.state_dict()[key]"


class Decayed(check.Small):
    """Its weight decay leaves biases out."""

    decayed = "conv1.weight", "fc1.weight", "fc2.weight"


def theirs(load, run, method, dataset):
    """The personal models of all clients after the rounds of our run."""
    fed, owner = run.fed, run.owner()
    phases = (1, 0) if method == "fedrep" else (0,)  # the head comes first
    queues, body = run.queue(phases), getattr(fed.args, "body_epochs", 1)
    args = types.SimpleNamespace(
        gpu=-1, num_users=fed.K, dataset=dataset, alg=method, load_fed="n", epochs=len(run.S) + 20,
        frac=0.5, m_tr=500, m_ft=500, test_freq=1000, save_every=1000, lr=fed.args.lr, local_bs=4,
        local_updates=10**6, local_ep=fed.args.epochs + (body if method == "fedrep" else 0),
        local_rep_ep=body)
    model = check.put(check.Small(), run.first[0])
    keys = {layer: [layer + ".weight", layer + ".bias"] for layer in ("conv1", "fc1", "fc2")}
    # the first three are global
    model.weight_keys = [keys["conv1"], keys["fc1"], [], keys["fc2"]]
    leaf = {str(k): {"x": own.tolist(), "y": own.tolist()} for k, own in enumerate(fed.split.train)}

    def loader(images, **_):
        numbers = images.dataset["x"] if dataset == "femnist" else images.idxs
        k = owner[int(numbers[0])]
        minibatches = [index for _ in phases for index in queues[k].popleft()]
        return check.Given(minibatches, run.batch, run.per_epoch(k))

    def get_data(_):
        return None, None, dict(enumerate(own.copy() for own in fed.split.train)), {}

    with (
        mock.patch.object(load("utils.options"), "args_parser", lambda: args),
        mock.patch.multiple(load("utils.train_utils"), get_model=lambda _: model, get_data=get_data,
                            read_data=lambda *_: (list(leaf), [], leaf, leaf)),
        mock.patch.object(load("models.Update"), "DataLoader", loader),
        mock.patch.object(np.random, "choice", run.choices()),
    ):
        end = check.script_variables("main_fedrep.py")
    shared = end.net_glob.state_dict()
    return [check.vector({**shared, **{key: end.w_locals[k][key] for key in keys["fc2"]}})
            for k in range(fed.K)]


def compare(folder):
    lines = []

    def line(load, method, dataset, sizes, name="", because=None, stubs=STUBS):
        flags = [*FLAGS, *METHODS[method], "--method", method]
        run = check.ours(baselines, flags, check.small_data(sizes), Decayed)
        what = f"{'FedRep' if method == 'fedrep' else 'FedPer'}{name}: models of all clients"
        lines.append(check.row(what, theirs(load, run, method, dataset), check.with_layer(run, -1),
                               run, because=because, stubs=stubs))

    cloned = STUBS + "; one .clone() added"
    with check.program(folder, ABSENT, [(ALIAS, ALIAS + ".clone()")]) as load:
        for method in METHODS:
            line(load, method, "mnist", EQUAL, stubs=cloned)
            line(load, method, "femnist", SIZES, ", weighted as for LEAF", stubs=cloned)
        line(load, "fedrep", "mnist", SIZES, ", plain mean there", "fedrep D3", cloned)
    with check.program(folder, ABSENT) as load:
        line(load, "fedrep", "femnist", SIZES, ", first heads share memory there", "fedrep D4")
    return lines


if __name__ == "__main__":
    check.main(sys.modules[__name__], sys.argv)
