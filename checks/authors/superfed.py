"""The former (for version 1 of the paper) implements Model Mixing, the latter (the newest) Layer
Mixing. Ours is superfed_v1.py unless a line says otherwise. Clients have different sizes."""

import types
from collections import OrderedDict
from unittest import mock

import numpy as np
import torch
from torch import nn

import check
import common
import fl.models
import superfed
import superfed_v1

REPOSITORY = "vaseline555/SuPerFed"
COMMITS = ("ae1803b73af3ce319b980b698c884833e6e7cb3e",
           "55064b966817c9e728b400394771d2d901bb3281")
CHANGED = "loaders; matplotlib; .float() reads .double()"
FLAGS = "--fraction 0.5 --epochs 2 --batch-size 4 --lr 0.05 "
ONE_CLIENT = "--fraction 0 --rounds 1 --start 0 --mix layer --mu 0 --weight-decay 0.0001"
# .8 of each is a multiple of the minibatch: 12, 8, 16 and 12 images to train on
SIZES = (15, 10, 20, 15)
MORE_TEST = (15, 10, 21, 16)  # 21: 16 to train on and 5 to test on


class Narrow(nn.Sequential):
    """SuPerFed's CNN for 28x28 with an eighth of its channels, for speed."""

    start = staticmethod(fl.models.xavier_normal)

    def __init__(self, channels, classes):
        super().__init__(OrderedDict(
            conv1=nn.Conv2d(channels, 4, 5), pool1=nn.MaxPool2d(2), relu1=nn.ReLU(),
            conv2=nn.Conv2d(4, 8, 5), pool2=nn.MaxPool2d(2), relu2=nn.ReLU(),
            conv3=nn.Conv2d(8, 4, 2), pool3=nn.MaxPool2d(2), relu3=nn.ReLU(),
            flatten=nn.Flatten(), fc1=nn.Linear(4, 64), relu4=nn.ReLU(),
            fc2=nn.Linear(64, classes)))


def parts(net, w, local=False):
    """w [d] without its biases for local, as their weight1."""
    return torch.cat([w[..., where] for name, where, _ in net.tensors
                      if not (local and name.endswith(".bias"))], -1)


def names(model, local):
    return [name for name, _ in model.named_parameters() if name.endswith("weight1") == local]


def federated(model):
    return check.vector(model, names(model, False))


def theirs(load, run, rounds=None, drop_last=True):
    """Their Server after the first rounds of our run, or all."""
    client, server = load("src.client"), load("src.server")
    fed, args = run.fed, run.fed.args
    # our lambdas of Phase II, in the order in which their one thread asks for them
    first = max(int(args.start * args.rounds) - 1, 0)
    lambdas = iter([float(lam) for t, S in enumerate(run.S) if t >= first
                    for k in S for lam in run.draws[t, k, 0][:, 0]])
    settings = types.SimpleNamespace(
        model_name="MNISTConvNet", in_channels=1, hidden_channels=4, num_hiddens=64,
        num_classes=fed.data.classes, global_seed=0, device="cpu", lr=args.lr, data_path="",
        dataset="check", num_shards=0, iid=False, init_type="xavier", init_gain=1,
        init_seed=["0", "1"], C=args.fraction, K=fed.K, R=args.rounds, E=args.epochs,
        B=args.batch_size, L=args.start, mu=args.mu, beta=args.nu, p_lr=0, p_e=0)
    they = server.Server(None, settings)
    run.model(they.model, names(they.model, False))
    check.put(they.model, parts(fed.net, run.first[1], local=True), names(they.model, True))

    def loader(numbers, shuffle, **_):
        if not shuffle:
            return None  # the client's test images: not looked at
        k = next(k for k, own in enumerate(fed.split.train) if own is numbers)
        minibatches = [index for t, S in enumerate(run.S) if k in S for index in run.plans[t, k, 0]]
        return check.Given(minibatches, run.batch, run.per_epoch(k),
                           args.batch_size if drop_last else None)

    def cut(data, lengths):
        own = fed.split.train[data[0]], fed.split.test[data[0]]
        assert lengths == [len(part) for part in own], "another number of training images"
        return own

    with (
        mock.patch.object(client, "DataLoader", loader),
        mock.patch.object(torch.utils.data, "random_split", cut),
        mock.patch.object(np.random, "uniform", lambda *_: next(lambdas)),
        mock.patch.object(server, "cpu_count", lambda: 2),
        mock.patch.object(they, "sample_clients", lambda: run.S[they._round - 1]),
    ):
        they.clients = [client.Client(k, [k] * (len(own) + len(fed.split.test[k])), "cpu")
                        for k, own in enumerate(fed.split.train)]
        they.setup_clients(
            batch_size=args.batch_size, num_local_epochs=args.epochs, optimizer=they.optimizer,
            optim_config=they.optim_config, criterion=they.criterion, mu=args.mu, beta=args.nu)
        they.transmit_model()
        for they._round in range(1, (rounds or args.rounds) + 1):
            they.train_federated_model()
    return they


def compare_first_version(load, line):
    data = dict(side=28, classes=5)
    run = check.ours(superfed_v1, FLAGS + "--rounds 5 --start 0.6 --nu 2 --mu 0.01",
                     check.small_data(SIZES, **data), Narrow)
    for rounds, what in ((2, "Phase I"), (5, "Phases I and II")):
        they, state = theirs(load, run, rounds), run.states[rounds - 1]
        own = [check.vector(client.model, names(client.model, True)) for client in they.clients]
        line(f"Model Mixing, {what}: w^f", federated(they.model), state["w_f"], run, rounds=rounds)
        line(f"Model Mixing, {what}: w^l of all clients", own,
             parts(run.fed.net, state["w_l"], local=True), run, rounds=rounds)
    # it holds what it got, or what it made of it
    k = next(k for k in range(run.fed.K) if k not in run.S[-1])
    line("w^f that evaluates clients not sampled last: their own there",
         federated(they.clients[k].model), run.state["w_f"], run, because="superfed D11")
    compare_measures(load, line, run, they)
    net, x = common.Net("cnn", (1, 28, 28), 62), torch.rand(4, 1, 28, 28)
    w = net.init(common.stream(1, "initialisation")).double()
    other = load("src.models").MNISTConvNet("", 1, 32, 512, 62)
    check.put(other, w, names(other, False))
    for m in other.modules():
        m.alpha = 0.0
    # 5 layers, 64 * 5 * 5
    line("the CNN for 28x28: logits", other(x), net(w, x), steps=5, longest=1600)
    for what, because, sizes, whose, size, drop_last in (
        ("the last, smaller minibatch used", None, SIZES, superfed_v1, 6, False),
        ("the last, smaller minibatch dropped there", "superfed D9", SIZES, superfed_v1, 6, True),
        ("n_k with test images there", "superfed D14", MORE_TEST, superfed_v1, 4, True),
        ("here superfed.py", "superfed D1, D2, D4", SIZES, superfed, 4, True),
    ):
        flags = FLAGS + f"--rounds 2 --start 0.5 --lr-decay 0.995 --batch-size {size}"
        run = check.ours(whose, flags, check.small_data(sizes, **data), Narrow)
        they = theirs(load, run, drop_last=drop_last)
        line(f"Model Mixing, {what}: w^f", federated(they.model), run.state["w_f"], run,
             because=because)


def compare_measures(load, line, run, they):
    """Loss, accuracy and ECE of a client's mixtures on 20 images, in minibatches of 4, at 11
    lambdas."""
    client, fed = they.clients[0], run.fed
    # a minibatch has one class or two
    labels = fed.data.labels[fed.data.n_train :]
    index = fed.data.n_train + np.argsort(labels, kind="stable")
    five = list(index.reshape(5, 4))
    client.test_dataloader, client.test_data = check.Given(five * 11, run.batch, 5), index
    measured = torch.tensor(client.client_evaluate())  # losses, accuracies, eces
    x, y = run.batch(index)
    w_f, w_l = (torch.zeros(fed.net.d) for _ in range(2))
    weights = dict(client.model.named_parameters())
    for name, where, _ in fed.net.tensors:
        w_f[where] = weights[name].detach().flatten()
        # a bias is its own partner
        w_l[where] = weights[name.replace("weight", "weight1")].detach().flatten()
    single, whole, logits = [], [], []
    for lam in superfed.LAMBDAS[::-1]:
        z = fed.net(superfed.mix(w_f, w_l, lam), x)
        measures = common.score(z, y, torch.arange(20) // 4, 5)
        single += [[float(measures[name].mean()) for name in ("loss", "top1", "ece")]]
        whole.append(float(common.score(z, y, torch.zeros_like(y), 1)["ece"][0]))
        for m in client.model.modules():
            m.alpha = lam
        logits.append((client.model(x), z))
    sums = dict(steps=5, longest=1600)
    line("logits at 11 lambdas", [a for a, _ in logits], [b for _, b in logits], **sums)
    # a mean over the 11 * 20 images; ECE's bins have edges in float32 there
    line("loss, top-1 and ECE, minibatch by minibatch", measured, torch.tensor(single).T, **sums)
    line("ECE over all images here, a mean over minibatches there", measured[2],
         torch.tensor(whole), because="superfed D10", **sums)
    z = logits[0][1]
    top5 = common.score(z, y, torch.zeros_like(y), 1)["top5"]
    line("top-5", load("src.utils").accuracy(z, y, (1, 5))[1].double(), top5, steps=1, longest=20)


def compare_layer_mixing(load, line, name, because=None):
    """The steps of one client in one round, by their superfed_update; it has a weight decay of
    1e-4."""
    run = check.ours(superfed_v1, FLAGS + ONE_CLIENT, check.small_data(SIZES, classes=5))
    algorithm, layers = load("src.algorithm"), load("src.models.layers")
    model, (k,), net = check.Small(classes=5), run.S[0], run.fed.net
    model.conv1 = layers.LinesConv(1, 4, 3)
    model.fc1, model.fc2 = layers.LinesLinear(36, 8), layers.LinesLinear(8, 5)
    local = [n + "_local" for n in net.names if n.endswith("weight")]
    run.model(model, net.names)
    check.put(model, parts(net, run.first[1], local=True), local)
    lambdas = iter(run.draws[0, k, 0].flatten().tolist())
    args = types.SimpleNamespace(mu=0, nu=run.fed.args.nu, B=4, E=2, device="cpu",
                                 algorithm="superfed-lm")

    def loader(*_, **__):
        return check.Given(run.plans[0, k, 0], run.batch, run.per_epoch(k))

    with (
        mock.patch.object(torch.utils.data, "DataLoader", loader),
        mock.patch.object(algorithm, "initiate_model", lambda *_: None),
        mock.patch.object(np.random, "uniform", lambda *_: next(lambdas)),
    ):
        algorithm.superfed_update(0, args, model, nn.CrossEntropyLoss, None, torch.optim.SGD,
                                  run.fed.args.lr * 0.995, True)
    line(f"Layer Mixing{name}: w^f", check.vector(model, net.names), run.state["w_f"], run,
         because=because)
    line(f"Layer Mixing{name}: w^l", check.vector(model, local),
         parts(net, run.state["w_l"][k], local=True), run, because=because)


def compare(line, first, newest):
    drawing = ["matplotlib", "matplotlib.pyplot"]
    with check.program(first, drawing, [(".float()", ".double()")]) as load:
        compare_first_version(load, line)
    for name, because, changed in ((", with 1e-6 in the cosine there", "superfed D6", []),
                                   ("", None, [(".add(1e-6)", "")])):
        with check.program(newest, [*drawing, "src.dataset"], changed) as load:
            compare_layer_mixing(load, line, name, because)
