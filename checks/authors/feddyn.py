"""Its code divides FedDyn's alpha by n_k / mean n, and weights SCAFFOLD's c in the same way. Unless
the line says otherwise, we pass it equal n_k, though clients have different sizes. In SCAFFOLD
clients have equally many minibatches, and eta is constant, because its code divides by the first
round's eta."""

import os
from unittest import mock

import numpy as np
import torch

import baselines
import check

REPOSITORY, COMMITS = "alpemreacar/FedDyn", ("48a19fac440ef079ce563da8e0c2896f8256fef9",)
CHANGED = "evaluation; matplotlib; LEAF; float32 reads float64"
FLAGS = ("--fraction 0.5 --rounds 4 --epochs 2 --batch-size 4 --lr 0.1 --momentum 0 "
         "--lr-decay 0.9 --method ")
# of these .8 are trained on: 12, 8, 12 and 9 images, 3, 2, 3 and 3 minibatches
SIZES = (15, 11, 15, 12)
SAME_STEPS = (15, 12, 14, 13)  # 12, 9, 11 and 10 images, 3 minibatches each
# LEAF's language helpers are for text
ABSENT = ["matplotlib", "matplotlib.pyplot", "LEAF", "LEAF.utils_eval",
          "LEAF.utils_eval.language_utils", "LEAF.utils_eval.model_utils"]


def theirs(load, run, method, alike, **settings):
    """Their method's variables after the rounds of our run. alike: the clients' sizes are hidden
    from it."""
    own = run.fed.split.train
    data = dict(name="check", tst_x=None, tst_y=None, clnt_x=own,
                clnt_y=[np.zeros(10 if alike else len(part)) for part in own])
    os.makedirs("Output/check", exist_ok=True)
    return check.method_variables(load, run, method, data, print_per=1000, model_func=check.Small,
                                  init_model=run.model(), save_period=1000, **settings)


def compare(line, folder):
    def run_of(flags, sizes=SIZES):
        return check.ours(baselines, FLAGS + flags, check.small_data(sizes))

    with check.program(folder, ABSENT, [("float32", "float64")]) as load:
        run = run_of("feddyn --weight-decay 0.001 --feddyn-alpha 0.1")
        for name, alike, norm, because in (
            ("", True, 10, None),
            (", alpha divided by n_k / mean n", False, 10, "feddyn D1"),
            (", gradients clipped (to .1, not 10, so that it acts)", True, 0.1, "feddyn D1"),
        ):
            with mock.patch.object(load("utils_general"), "max_norm", norm):
                end = theirs(load, run, "train_FedDyn", alike, epoch=2, alpha_coef=0.1)
            w = torch.as_tensor(end.cld_mdl_param)
            line("FedDyn: w" + name, w, run.state["w"], run, because=because)
            if because is None:
                line("FedDyn: w, there that mean is evaluated", check.vector(end.all_model),
                     run.state["w"], run, because="feddyn D2")
                # theirs is the sum of theta_k - w, ours -alpha times it
                line("FedDyn: g_k of all clients", -0.1 * torch.as_tensor(end.local_param_list),
                     run.state["G"], run)
        # its c_k^+ divides by the first round's eta, so that eta must stay
        run = run_of("scaffold --lr-decay 1", SAME_STEPS)
        end = theirs(load, run, "train_SCAFFOLD", True, n_minibatch=6)
        line("SCAFFOLD: x", check.vector(end.avg_model), run.state["x"], run)
        line("SCAFFOLD: all c_k and c", torch.as_tensor(end.state_param_list),
             [run.state["c_k"], run.state["c"]], run, enlarged=1 / 0.1)
        run = run_of("fedprox --mu 0.5")
        end = theirs(load, run, "train_FedProx", False, epoch=2, mu=0.5)
        line("FedProx: w", check.vector(end.avg_model), run.state["w"], run)
