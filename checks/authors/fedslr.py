"""FedSLR runs with clients of different sizes. Its factors are compared by their number of
parameters. The other methods are those of its `train.py`. Where it averages clients equally and we
weight by n_k, clients have equal sizes. Its coin flips are set to choose our sampled clients
(fedslr D2)."""

import os
import types

import torch
from torch import nn

import baselines
import check
import common
import fedslr
import fl.models

REPOSITORY, COMMITS = "huangtiansheng/fedslr", ("35dc740caac562b212288c3bf58106f416a391fb",)
CHANGED = "evaluation; float32 reads float64"
FLAGS = ("--fraction 0.5 --rounds 3 --epochs 2 --batch-size 4 --lr 0.1 --momentum 0 "
         "--lr-decay 0.9 ")
DECAY = " --weight-decay 0.001 "
SIZES = (15, 11, 20, 12)  # of these .8 are trained on
EQUAL = (14, 14, 14, 14)


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
    train, test = run.fed.split.train, run.fed.split.test
    for name in ("results", "model"):
        os.makedirs(name, exist_ok=True)
    data = dict(client_x=train, client_y=train, client_test_x=test, client_test_y=test)
    return check.method_variables(
        load, run, method, data, phases, epoch=run.fed.args.epochs, test_per=1000, model_func=make,
        init_model=start, sch_step=1, sch_gamma=1, device="cpu", **settings)


def rows(parts):
    """What all clients keep, one vector a client."""
    return [check.vector(part) for part in parts]


def compare_fedslr(load, line):
    """w, gamma and p with unequal sizes, from both starts of p."""
    low_rank, eta_g = 0.01, 10.0
    flags = FLAGS + DECAY + f"--lambda {low_rank} --mu 0.01 --eta-g {eta_g} --p-start "

    def make():
        args = types.SimpleNamespace(method="FedSLR")
        return load("utils_models").construct_mask_model(Model(), args)

    for start, because in (("zero", None), ("copy", None), ("zero", "fedslr D1")):
        run = check.ours(fedslr, flags + start, check.small_data(SIZES), Model)
        first, w, state = make(), run.model(Model()), run.state
        for name, parameter in first.named_parameters():
            layer, part = name.split(".")
            value = getattr(getattr(w, layer), "bias" if part.endswith("bias") else "weight")
            # p is 0 for normalisation
            zero = part.startswith("p") and (layer == "norm1" or start == "zero" and not because)
            parameter.data.copy_(0 * value if zero else value)
        end = theirs(load, run, "train_fedSLR", make, first, (0, 1), alpha_coef=1 / eta_g,
                     sparse_threshold=0.01, rank_threshold=low_rank, save_models=False)
        own = rows(end.local_p)
        if because:
            line("FedSLR: p of all clients, from a copy of w there, from 0 here", own, state["p"],
                 run, because=because)
            continue
        largest = max(torch.linalg.matrix_norm(fedslr.pi(state["w"][where].view(shape)), 2)
                      for _, where, shape in run.fed.net.tensors if len(shape) > 1)
        # l.7: roots of numbers that are at least the threshold squared
        quotient, name = float(1 + largest / (low_rank * eta_g)), f"FedSLR, p from {start}: "
        for what, a, b in (("w", check.vector(end.cld_model_w), state["w"]),
                           ("gamma of all clients", rows(end.local_dual_variables_mu),
                            state["gamma"]), ("p of all clients", own, state["p"])):
            line(name + what, a, b, run, enlarged=quotient)
        line(name + "parameters in w, by its ranks", [float(end.comm_param_num_array[-1])],
             [float(state["size"])], run)
        line(name + "which of p are 0", [p != 0 for p in own], [state["p"] != 0], run)


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
        line(f"ResNet-18 for {classes} classes: logits", a, b, steps=21, **of_a_step)
        line(f"ResNet-18 for {classes} classes: gradient", of_other, g, steps=42, **of_a_step)


def compare_baselines(load, line):
    """The methods that its train.py offers besides."""

    def both(method, other, flags="", sizes=EQUAL, **settings):
        """Our run, its state, and their variables."""
        run = check.ours(baselines, FLAGS + flags + " --method " + method, check.small_data(sizes))
        end = theirs(load, run, other, check.Small, run.model(), **settings)
        return run, run.state, end

    run, state, end = both("fedavg", "train_FedAvg", DECAY + "--client-test 0.2", phases=(0, 0))
    line("FedAvg: w", check.vector(end.avg_model), state["w"], run)
    for pull, because in (("0", None), ("0.1", "ditto D2")):
        flags = DECAY + f"--ditto-lambda {pull} --personal-epochs 1"
        run, state, end = both("ditto", "train_FedAvg", flags, phases=(0, 0),
                               finetune_proximal=float(pull))
        line(f"Ditto, lambda {pull}: v of all clients", rows(end.ditto_params), state["V"], run,
             because=because)
    run, state, end = both("local", "train_standalone", DECAY, SIZES)
    line("Local: w of all clients", rows(end.local_ws), state["W"], run)
    name = "FedPer (called FedRep there)"
    run, state, end = both("fedper", "train_FedRep", DECAY + "--personal 2")
    shared = state["w"][: -state["V"][0].numel()]
    line(f"{name}: shared layers", check.vector(end.g_param), shared, run)
    line(f"{name}: shared layers as evaluated, a round old there", check.vector(end.g_param_temp),
         shared, run, because="fedper D2")
    line(f"{name}: layers that clients keep", rows(end.p_params), state["V"], run)
    run, state, end = both("lg-fedavg", "train_LGFedAvg", DECAY + "--personal 1", SIZES)
    line("LG-FedAvg: shared layers", check.vector(end.g_param), state["w"][state["V"][0].numel() :],
         run)
    line("LG-FedAvg: layers that clients keep", rows(end.p_params), state["V"], run)
    run, state, end = both("apfl", "train_apfl", "--apfl-alpha 0.5")
    line("APFL: w", check.vector(end.avg_model), state["w"], run)
    line("APFL: v of all clients", rows(end.vs), state["V"], run)
    run, state, end = both("apfl", "train_apfl", DECAY + "--apfl-alpha 0.5")
    line("APFL, with weight decay: v of all clients", rows(end.vs), state["V"], run,
         because="apfl D1")
    run, state, end = both("scaffold", "train_SCAFFOLD", DECAY, phases=(0, 0), n_minibatch=6)
    line("SCAFFOLD: x", check.vector(end.avg_model), state["x"], run)
    line("SCAFFOLD: all c_k and c", torch.as_tensor(end.state_params_diffs),
         [state["c_k"], state["c"]], run, enlarged=1 / (0.1 * 0.9**2))


def compare(line, folder):
    with check.program(folder, changed=[("float32", "float64")]) as load:
        for part in (compare_fedslr, compare_baselines, compare_resnet):
            part(load, line)
