"""Its code needs TensorFlow 1, which a stub replaces, and a PyTorch model replaces its model. The
trainer is theirs. Clients have different sizes, but equally many minibatches."""

import types
from unittest import mock

import torch
from torch import nn

import baselines
import check

REPOSITORY, COMMITS = "litian96/ditto", ("26d9b29a62f3872dcdf071be08e897607c283bb4",)
CHANGED = "TensorFlow; the model; loaders; evaluation"
FLAGS = ("--fraction 0.5 --rounds 4 --epochs 2 --batch-size 4 --lr 0.1 --momentum 0 --method ditto "
         "--ditto-lambda ")
SIZES = (15, 12, 14, 13)  # .8 are trained on: 12, 9, 11 and 10 images, 3 minibatches each


def learner(net, lr):
    """What its trainer wants of a model: weights as a list of arrays, and a step of SGD that
    returns the gradient, too."""
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
    users = list(range(fed.K))
    data = {k: {"x": fed.split.train[k], "y": fed.split.train[k]} for k in users}
    they = module.Server(settings, lambda *_: learner(run.model(), fed.args.lr),
                         (users, [], data, data))

    def batches(own, *_):  # called once, for all rounds
        k = next(k for k in users if own["x"] is fed.split.train[k])
        return (run.batch(index) for t, S in enumerate(run.S) if k in S
                for index in run.plans[t, k, 0])

    def select(**_):
        S = next(rounds)
        return S, [they.clients[k] for k in S]

    with mock.patch.object(module, "gen_batch", batches):
        they.select_clients = select
        they.train()
    return they


def compare(line, folder):
    with check.program(folder, ["tensorflow"]) as load:
        for pull in ("0.5", "2"):
            run = check.ours(baselines, FLAGS + pull, check.small_data(SIZES))
            they = theirs(load, run, float(pull))
            line(f"Ditto, lambda {pull}: w", check.vector(they.global_model), run.state["w"], run)
            line(f"Ditto, lambda {pull}: v of all clients",
                 [check.vector(v) for v in they.local_models], run.state["V"], run)
