"""huangtiansheng/fedslr: FedSLR and the methods that it compares with, whole rounds through its
train_* functions; ResNet-18.

    python checks/authors/fedslr.py CLONE
"""

import os
import shlex
import sys
import types

import check  # first: it makes our files importable

# isort: split
import torch
from torch import nn

import baselines
import common
import fedslr
import fl.models

NAME, COMMITS = "fedslr", ("35dc740caac562b212288c3bf58106f416a391fb",)
FLAGS = shlex.split("--fraction 0.5 --rounds 3 --epochs 2 --batch-size 4 --lr 0.1 --momentum 0 "
                    "--lr-decay 0.9")
SIZES = (15, 11, 20, 12)  # of these .8 are trained on
EQUAL = (14, 14, 14, 14)
DECAY = ["--weight-decay", "0.001"]
STUBS = "evaluation; float32 reads float64"


class Model(nn.Module):
    """With what FedSLR treats differently: a kernel, normalisation, a matrix."""

    start = staticmethod(fl.models.pytorch_default)

    def __init__(self, channels=1, classes=3):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, 4, 3, bias=False), nn.GroupNorm(2, 4)
        self.linear = nn.Linear(36, classes, bias=False)

    def forward(self, x):
        x = torch.max_pool2d(torch.relu(self.norm1(self.conv1(x))), 2)
        return self.linear(x.flatten(1))


def theirs(load, run, method, make, start, phases=(0,), **settings):
    """Their method's variables after the rounds of our run."""
    general, methods, fed = load("utils_general"), load("utils_methods"), run.fed
    data = types.SimpleNamespace(
        n_client=fed.K, dataset="check", client_x=fed.split.train, client_y=fed.split.train,
        client_test_x=fed.split.test, client_test_y=fed.split.test)
    for name in ("results", "model"):
        os.makedirs(name, exist_ok=True)
    with check.coin_flips(general, methods, run, phases):
        return check.local_variables(
            getattr(methods, method), data_obj=data, act_prob=0.5, learning_rate=fed.args.lr,
            batch_size=fed.args.batch_size, epoch=fed.args.epochs, com_amount=len(run.S),
            test_per=1000, weight_decay=fed.args.weight_decay, model_func=make, init_model=start,
            sch_step=1, sch_gamma=1, device="cpu", lr_decay_per_round=fed.args.lr_decay, **settings)


def rows(parts):
    """What all clients keep, one vector a client."""
    return [check.vector(part) for part in parts]


def compare_fedslr(load, line):
    """w, gamma and p with unequal sizes, from both starts of p."""
    low_rank, eta_g = 0.01, 10.0
    flags = [*FLAGS, *DECAY, "--lambda", str(low_rank), "--mu", "0.01", "--eta-g", str(eta_g)]

    def make():
        args = types.SimpleNamespace(method="FedSLR")
        return load("utils_models").construct_mask_model(Model(), args)

    for start, because in (("zero", None), ("copy", None), ("zero", "fedslr D1")):
        run = check.ours(fedslr, [*flags, "--p-start", start], check.small_data(SIZES), Model)
        first, w = make(), check.put(Model(), run.first[0])
        for name, parameter in first.named_parameters():
            layer, part = name.split(".")
            value = getattr(getattr(w, layer), "bias" if part.endswith("bias") else "weight")
            # p is 0 for normalisation
            zero = part.startswith("p") and (layer == "norm1" or start == "zero" and not because)
            parameter.data.copy_(0 * value if zero else value)
        end = theirs(load, run, "train_fedSLR", make, first, (0, 1), alpha_coef=1 / eta_g,
                     sparse_threshold=0.01, rank_threshold=low_rank, save_models=False)
        state = run.states[-1]
        if because:
            line("FedSLR: p of all clients, from a copy of w there, from 0 here", run,
                 rows(end.local_p), state["p"], because=because)
            continue
        largest = max(torch.linalg.matrix_norm(fedslr.pi(state["w"][where].view(shape)), 2)
                      for _, where, shape in run.fed.net.tensors if len(shape) > 1)
        # l.7: roots of numbers that are at least the threshold squared
        quotient = float(1 + largest / (low_rank * eta_g))
        name, own = f"FedSLR, p from {start}: ", rows(end.local_p)
        line(name + "w", run, check.vector(end.cld_model_w), state["w"], enlarged=quotient)
        line(name + "gamma of all clients", run, rows(end.local_dual_variables_mu), state["gamma"],
             enlarged=quotient)
        line(name + "p of all clients", run, own, state["p"], enlarged=quotient)
        line(name + "numbers in w, by its ranks", run, [float(end.comm_param_num_array[-1])],
             [float(state["size"])])
        line(name + "which of p are 0", run, [p != 0 for p in own], [state["p"] != 0])


def compare_resnet(load, line):
    """Logits and gradients of ResNet-18 for 2 images of 32x32."""
    of_a_step = dict(longest=512 * 9)  # 512 channels of 3x3; 21 layers
    for classes, name in ((10, "Resnet18"), (100, "Cifar100_Resnet18")):
        net = common.Net("resnet18", (3, 32, 32), classes)
        w = net.init(common.stream(1, "initialisation")).double().requires_grad_()
        x, y = torch.rand(2, 3, 32, 32), torch.arange(2)
        other = check.put(load("utils_models").client_model(name).double(), w.detach())
        a, b = other(x), net(w, x)
        nn.functional.cross_entropy(a, y).backward()
        g = torch.autograd.grad(nn.functional.cross_entropy(b, y), w)[0]
        of_other = check.vector([p.grad for p in other.parameters()])
        line(f"ResNet-18 for {classes} classes: logits", None, a, b, steps=21, **of_a_step)
        line(f"ResNet-18 for {classes} classes: gradient", None, of_other, g, steps=42, **of_a_step)


def compare_baselines(load, line):
    """The methods that its train.py offers besides."""

    def run_of(*flags, sizes=EQUAL, module=baselines):
        return check.ours(module, [*FLAGS, *flags], check.small_data(sizes))

    def end_of(run, method, **settings):
        first = check.put(check.Small(), run.first[0])
        return theirs(load, run, method, check.Small, first, **settings)

    run = run_of("--method", "fedavg", *DECAY, "--client-test", "0.2")
    end = end_of(run, "train_FedAvg", phases=(0, 0))
    line("FedAvg: w", run, check.vector(end.avg_model), run.states[-1]["w"])
    for pull, because in (("0", None), ("0.1", "ditto D2")):
        run = run_of("--method", "ditto", "--ditto-lambda", pull, "--personal-epochs", "1", *DECAY)
        end = end_of(run, "train_FedAvg", phases=(0, 0), finetune_proximal=float(pull))
        line(f"Ditto, lambda {pull}: v of all clients", run, rows(end.ditto_params),
             run.states[-1]["V"], because=because)
    run = run_of("--method", "local", *DECAY, sizes=SIZES)
    end = end_of(run, "train_standalone")
    line("Local: w of all clients", run, rows(end.local_ws), run.states[-1]["W"])
    for name, method, theirs_, count, sizes in (
        ("FedPer (called FedRep there)", "fedper", "train_FedRep", "2", EQUAL),
        ("LG-FedAvg", "lg-fedavg", "train_LGFedAvg", "1", SIZES),
    ):
        run = run_of("--method", method, "--personal", count, *DECAY, sizes=sizes)
        end = end_of(run, theirs_)
        w, own = run.states[-1]["w"], run.fed.net.d - sum(p.numel() for p in end.g_param.values())
        shared = w[:-own] if method == "fedper" else w[own:]
        line(f"{name}: shared layers", run, check.vector(end.g_param), shared)
        if method == "fedper":
            line(f"{name}: shared layers as evaluated, a round old there", run,
                 check.vector(end.g_param_temp), shared, because="fedper D2")
        line(f"{name}: layers that clients keep", run, rows(end.p_params), run.states[-1]["V"])
    for decay, because in (("0", None), ("0.001", "apfl D1")):
        run = run_of("--method", "apfl", "--apfl-alpha", "0.5", "--weight-decay", decay)
        end = end_of(run, "train_apfl")
        name = "APFL" + ", with weight decay" * bool(because)
        if because is None:
            line(f"{name}: w", run, check.vector(end.avg_model), run.states[-1]["w"])
        line(f"{name}: v of all clients", run, rows(end.vs), run.states[-1]["V"], because=because)
    run = run_of("--method", "scaffold", *DECAY)
    end, state = end_of(run, "train_SCAFFOLD", phases=(0, 0), n_minibatch=6), run.states[-1]
    line("SCAFFOLD: x", run, check.vector(end.avg_model), state["x"])
    line("SCAFFOLD: all c_k and c", run, torch.as_tensor(end.state_params_diffs),
         [state["c_k"], state["c"]], enlarged=1 / (0.1 * 0.9**2))


def compare(folder):
    lines = []

    def line(what, run, theirs, mine, **more):
        lines.append(check.row(what, theirs, mine, run, stubs=STUBS, **more))

    with check.program(folder, changed=[("float32", "float64")]) as load:
        for part in (compare_fedslr, compare_baselines, compare_resnet):
            part(load, line)
    return lines


if __name__ == "__main__":
    check.main(sys.modules[__name__], sys.argv)
