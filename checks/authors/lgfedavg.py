"""The whole script main_lg.py runs, starting from our initial weights (lg-fedavg D2). Clients have
different sizes."""

import os
import pickle
import types
from unittest import mock

import numpy as np
import torch

import baselines
import check

REPOSITORY, COMMITS = "pliang279/LG-FedAvg", ("7af0568b2cae88922ebeacc021b1679815092f4e",)
CHANGED = "data; evaluation; pandas"
FLAGS = ("--fraction 0.5 --rounds 4 --epochs 2 --batch-size 4 --lr 0.1 --momentum 0.5 "
         "--method lg-fedavg --personal 1")
SIZES = (15, 11, 20, 12)  # of these .8 are trained on
LAYERS = ["conv1", "fc1", "fc2"]


def theirs(load, run, order):
    """The personal models of all clients after the rounds of our run. order: how their model lists
    its layers, of which the last two are global."""
    fed, model = run.fed, run.model()
    args = types.SimpleNamespace(
        gpu=-1, dataset="check", model="small", iid=False, num_users=fed.K, frac=0.5, local_ep=2,
        shard_per_user=2, results_save="check", load_fed="start", num_layers_keep=2,
        epochs=len(run.S) + 1, local_bs=4, lr=fed.args.lr)
    model.weight_keys = [[layer + ".weight", layer + ".bias"] for layer in order]
    folder = "save/check/small_iidFalse_num4_C0.5_le2/shard2/check/"
    os.makedirs(folder + "fed", exist_ok=True)
    torch.save(model.state_dict(), folder + "fed/start")  # there FedAvg's model
    with open(folder + "dict_users.pkl", "wb") as file:
        pickle.dump((dict(enumerate(fed.split.train)), dict(enumerate(fed.split.test))), file)

    def local_measures(*_, return_all=False):
        return (np.zeros(fed.K), 0.0) if return_all else (0.0, 0.0)

    def mean_measures(net, *_, return_net=False):
        return (0.0, 0.0, net)[: 2 + return_net]

    with mock.patch.multiple(load("models.test"), test_img_local_all=local_measures,
                             test_img_avg_all=mean_measures):
        end = check.script_variables(load, run, "main_lg.py", args,
                                     run.loader(lambda images: images.idxs),
                                     get_data=lambda _: (None,) * 4, get_model=lambda _: model)
    return [check.vector(net) for net in end.net_local_list]


def compare(line, folder):
    with check.program(folder, ["pandas", "models.test"]) as load:
        run = check.ours(baselines, FLAGS, check.small_data(SIZES))
        mine = check.with_layer(run, 0)
        line("LG-FedAvg: models of all clients", theirs(load, run, LAYERS), mine, run)
        line("LG-FedAvg: models of all clients, layers listed as in its CNN for CIFAR",
             theirs(load, run, LAYERS[1:] + LAYERS[:1]), mine, run, because="lg-fedavg D1")
