"""litian96/ditto: whole rounds through its trainer. TensorFlow 1 is replaced by a stub, and its
model by one in PyTorch.

    python checks/authors/ditto.py CLONE
"""

import itertools
import shlex
import sys
import types
from unittest import mock

import check  # first: it makes our files importable

# isort: split
import torch
from torch import nn

import baselines

NAME, COMMITS = "ditto", ("26d9b29a62f3872dcdf071be08e897607c283bb4",)
FLAGS = shlex.split("--fraction 0.5 --rounds 4 --epochs 2 --batch-size 4 --lr 0.1 --momentum 0 "
                    "--method ditto")
# .8 are trained on: 12, 9, 11 and 10 images, 3 minibatches each, since there all clients take as
# many steps
SIZES = (15, 12, 14, 13)
STUBS = "TensorFlow; the model; loaders; evaluation"


def learner(first, lr):
    """What its trainer wants of a model: weights as a list of arrays, and a step of SGD that
    returns the gradient, too."""
    net = check.put(check.Small(), first)

    def get():
        return [p.detach().numpy().copy() for p in net.parameters()]

    def put(weights):
        check.put(net, check.vector([torch.as_tensor(w) for w in weights]))

    def step(batch):
        loss = nn.functional.cross_entropy(net(batch[0]), batch[1])
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for p, g in zip(net.parameters(), gradients):
                p -= lr * g
        return [g.numpy() for g in gradients], 0.0, get()

    return types.SimpleNamespace(get_params=get, set_params=put, solve_sgd=step,
                                 get_loss=lambda data: 0.0, close=lambda: None)


def theirs(load, run, pull):
    """Their Server after the rounds of our run."""
    fed, module, rounds = run.fed, load("flearn.trainers_MTL.ditto"), iter(run.S)
    settings = dict.fromkeys(("q", "seed", "dynamic_lam", "num_corrupted", "gradient_clipping",
                              "median", "k_norm", "krum", "mkrum", "boosting", "random_updates"), 0)
    settings.update(  # its rounds are one more than num_rounds
        learning_rate=fed.args.lr, model_params=(), num_rounds=len(run.S) - 1, local_iters=6,
        batch_size=4, clients_per_round=2, eval_every=1000, dataset="check", lam=pull, sampling=1)
    users, queues = list(range(fed.K)), run.queue()
    data = {k: {"x": fed.split.train[k], "y": fed.split.train[k]} for k in users}
    they = module.Server(settings, lambda *_: learner(run.first[0], fed.args.lr),
                         (users, [], data, data))

    def batches(own, *_):
        k = next(k for k in users if own["x"] is fed.split.train[k])
        return (run.batch(index) for index in itertools.chain(*queues[k]))

    def select(**_):
        S = next(rounds)
        return S, [they.clients[k] for k in S]

    with mock.patch.object(module, "gen_batch", batches):
        they.select_clients = select
        they.train()
    return they


def compare(folder):
    lines = []
    with check.program(folder, ["tensorflow"]) as load:
        for pull in (0.5, 2.0):
            flags = [*FLAGS, "--ditto-lambda", str(pull)]
            run = check.ours(baselines, flags, check.small_data(SIZES))
            they, state = theirs(load, run, pull), run.states[-1]
            of_clients = [check.vector(v) for v in they.local_models]
            for what, a, b in (("w", check.vector(they.global_model), state["w"]),
                               ("v of all clients", of_clients, state["V"])):
                name = f"Ditto, lambda {pull:g}: {what}"
                lines.append(check.row(name, a, b, run, stubs=STUBS))
    return lines


if __name__ == "__main__":
    check.main(sys.modules[__name__], sys.argv)
