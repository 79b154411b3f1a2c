"""The authors of FedAvg and FedAvgM have published no code. So we compare with PyTorch's optimiser
`torch.optim.SGD`, for the clients' steps and, with Nesterov momentum, for the server's step.
Clients have different sizes."""

import torch
from torch import nn

import baselines
import check
import fedavg
import fedavgm

REPOSITORY, COMMITS, CHANGED = None, (), ""
FLAGS = ("--fraction 0.5 --rounds 4 --epochs 2 --batch-size 4 --lr 0.05 --client-test 0.2 "
         "--momentum 0 ")
SIZES = (15, 11, 20, 12)  # of these .8 are trained on


def theirs(run, **server):
    """w after the rounds of our run: the server's step is the optimiser's along the mean of w_t -
    w_k, weighted by n_k."""
    args, model, clients = run.fed.args, run.model(), run.fed.split.train
    step = torch.optim.SGD(model.parameters(), lr=1.0, **server)
    for t, S in enumerate(run.S):
        w, n = check.vector(model), sum(len(clients[k]) for k in S)
        total = torch.zeros_like(w)
        for k in S:
            own = check.put(check.Small(), w)
            local = torch.optim.SGD(own.parameters(), lr=args.lr * args.lr_decay**t,
                                    momentum=args.momentum, weight_decay=args.weight_decay)
            for index in run.plans[t, k, 0]:
                x, y = run.batch(index)
                local.zero_grad()
                nn.functional.cross_entropy(own(x), y).backward()
                local.step()
            total += len(clients[k]) / n * (w - check.vector(own))
        sizes = [p.numel() for p in model.parameters()]
        for p, part in zip(model.parameters(), total.split(sizes)):
            p.grad = part.view(p.shape)
        step.step()
    return check.vector(model)


def compare(line):
    def both(what, module, flags="", because=None, **server):
        with check.double():
            run = check.ours(module, FLAGS + flags, check.small_data(SIZES))
            line(what, theirs(run, **server), run.state["w"], run, because=because)

    both("FedAvg: w", fedavg)
    both("FedAvg, momentum .9, weight decay, eta falling: w", baselines,
         "--method fedavg --momentum 0.9 --weight-decay 0.001 --lr-decay 0.9")
    nesterov = "--beta 0.9"
    both("FedAvgM, Nesterov's momentum .9: w", fedavgm, nesterov, momentum=0.9, nesterov=True)
    both("FedAvgM, --server-momentum plain: w", fedavgm, nesterov + " --server-momentum plain",
         momentum=0.9)
    both("FedAvgM, plain there, Nesterov's here: w", fedavgm, nesterov, "fedavgm D7", momentum=0.9)
