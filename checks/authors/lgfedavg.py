"""pliang279/LG-FedAvg: whole rounds of its script main_lg.py.

    python checks/authors/lgfedavg.py CLONE
"""

import os
import pickle
import shlex
import sys
import types
from unittest import mock

import check  # first: it makes our files importable

# isort: split
import numpy as np
import torch

import baselines

NAME, COMMITS = "lgfedavg", ("7af0568b2cae88922ebeacc021b1679815092f4e",)
FLAGS = shlex.split("--fraction 0.5 --rounds 4 --epochs 2 --batch-size 4 --lr 0.1 --momentum 0.5 "
                    "--method lg-fedavg --personal 1")
SIZES = (15, 11, 20, 12)  # of these .8 are trained on
LAYERS = ["conv1", "fc1", "fc2"]


def theirs(load, run, order):
    """The personal models of all clients after the rounds of our run. order: how their model lists
    its layers, of which the last two are global."""
    fed, owner, queues = run.fed, run.owner(), run.queue()
    args = types.SimpleNamespace(
        gpu=-1, dataset="check", model="small", iid=False, num_users=fed.K, frac=0.5, local_ep=2,
        shard_per_user=2, results_save="check", load_fed="start", num_layers_keep=2,
        epochs=len(run.S) + 1, local_bs=4, lr=fed.args.lr)
    model = check.put(check.Small(), run.first[0])
    model.weight_keys = [[layer + ".weight", layer + ".bias"] for layer in order]
    folder = "save/check/small_iidFalse_num4_C0.5_le2/shard2/check/"
    os.makedirs(folder + "fed", exist_ok=True)
    # there FedAvg's model, from which it starts
    torch.save(model.state_dict(), folder + "fed/start")
    with open(folder + "dict_users.pkl", "wb") as file:
        pickle.dump((dict(enumerate(fed.split.train)), dict(enumerate(fed.split.test))), file)

    def loader(images, **_):
        k = owner[int(images.idxs[0])]
        return check.Given(queues[k].popleft(), run.batch, run.per_epoch(k))

    def local_measures(*_, return_all=False):
        return (np.zeros(fed.K), 0.0) if return_all else (0.0, 0.0)

    def mean_measures(net, *_, return_net=False):
        return (0.0, 0.0, net)[: 2 + return_net]

    with (
        mock.patch.object(load("utils.options"), "args_parser", lambda: args),
        mock.patch.multiple(load("utils.train_utils"), get_data=lambda _: (None,) * 4,
                            get_model=lambda _: model),
        mock.patch.object(load("models.Update"), "DataLoader", loader),
        mock.patch.object(np.random, "choice", run.choices()),
        mock.patch.multiple(load("models.test"), test_img_local_all=local_measures,
                            test_img_avg_all=mean_measures),
    ):
        return [check.vector(net) for net in check.script_variables("main_lg.py").net_local_list]


def compare(folder):
    lines, swapped = [], LAYERS[1:] + LAYERS[:1]
    with check.program(folder, ["pandas", "models.test"]) as load:
        run = check.ours(baselines, FLAGS, check.small_data(SIZES))
        mine = check.with_layer(run, 0)
        for name, order, because in (
            ("", LAYERS, None),
            (", layers listed as in its CNN for CIFAR", swapped, "lg-fedavg D1"),
        ):
            lines.append(check.row("LG-FedAvg: models of all clients" + name,
                                   theirs(load, run, order), mine, run, because=because,
                                   stubs="data; evaluation; pandas"))
    return lines


if __name__ == "__main__":
    check.main(sys.modules[__name__], sys.argv)
