"""FedAvg and FedAvgM, whose authors' code is not public: whole rounds beside PyTorch's own
optimiser, torch.optim.SGD, for the clients and, with Nesterov's momentum, for the server.

    python checks/authors/torch_sgd.py
"""

import shlex
import sys

import check  # first: it makes our files importable

# isort: split
import torch
from torch import nn

import fedavg
import fedavgm

NAME, COMMITS = "torch_sgd", ()
FLAGS = shlex.split("--fraction 0.5 --rounds 4 --epochs 2 --batch-size 4 --lr 0.05 "
                    "--client-test 0.2")
SIZES = (15, 11, 20, 12)  # of these .8 are trained on


def theirs(run, optimizer=torch.optim.SGD, **server):
    """w after the rounds of our run: the server's step is the optimiser's along the mean of w_t -
    w_k, weighted by n_k."""
    args, model, clients = run.fed.args, check.put(check.Small(), run.first[0]), run.fed.split.train
    step = optimizer(model.parameters(), lr=1.0, **server)
    for t, S in enumerate(run.S):
        w, n = check.vector(model), sum(len(clients[k]) for k in S)
        total = torch.zeros_like(w)
        for k in S:
            own = check.put(check.Small(), w)
            local = optimizer(own.parameters(), lr=args.lr * args.lr_decay**t,
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


def compare(optimizer=torch.optim.SGD):
    lines = []

    def line(what, module, *flags, because=None, **server):
        with check.double():
            run = check.ours(module, [*FLAGS, *flags], check.small_data(SIZES))
            lines.append(check.row(what, theirs(run, optimizer, **server), run.states[-1]["w"],
                                   run, because=because))

    line("FedAvg: w", fedavg, "--momentum", "0")
    line("FedAvg, momentum .9, weight decay, eta falling: w", fedavg, "--momentum", "0.9",
         "--weight-decay", "0.001", "--lr-decay", "0.9")
    beta, plain = ("--beta", "0.9"), ("--server-momentum", "plain")
    line("FedAvgM, Nesterov's momentum .9: w", fedavgm, *beta, momentum=0.9, nesterov=True)
    line("FedAvgM, --server-momentum plain: w", fedavgm, *beta, *plain, momentum=0.9)
    line("FedAvgM, plain there, Nesterov's here: w", fedavgm, *beta, momentum=0.9,
         because="fedavgm D7")
    return lines


if __name__ == "__main__":
    check.main(sys.modules[__name__], sys.argv)
