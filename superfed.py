"""SuPerFed: personalised federated learning in the subspace between two models. Hahn, Jeong, Lee, "Subspace Learning for
Personalized Federated Optimization", 2021, arXiv 2109.07628v1.

    python superfed.py --dataset cifar10 --mix model     (Table 1, row SuPerFed-MM; published: global top-1 .4535)
    python superfed.py --dataset cifar10 --mix layer     (Table 1, row SuPerFed-LM; published: global top-1 .4706)

What to expect: accuracies on CIFAR-10, 200 rounds, means of seeds 0 and 1. Training: 96 to 111 min, beside other runs.

    mixing   global   personal   personal@test   records
    model    .4676    .8590      .8676           results/superfed-1/superfed-cifar10-mix-model
    layer    .4863    .8678      .8684           results/superfed-1/superfed-cifar10-mix-layer

There are two models of one shape: w^f, the federated model, travels; w^l_k, the local model of client k, stays. Client
k's personal model is their mixture W_k(lambda) = (1-lambda) w^f + lambda w^l_k. "global" is w^f on the central test images.
"personal" is W_k(lambda) on client k's own test images, mean over the clients, with the lambda of D12. personal@test has the
lambda that is best on the test images, as in the paper. fedavg.py says how to read [d], [m, d], net and grad.

The paper's Algorithm 1, in our words; docs/superfed.md says which lines are restored. K clients, n_k training images of client
k, CE: cross-entropy. Phase I trains w^f alone. Phase II begins with t = L*R (L: --start). Line numbers are the paper's, in
ClientUpdate plus 10. Lines 7a and 18a have no number there. The paper's other lines end loops, or are lost.

    Server
     1   choose w^f_0 and w^l_0 with different random seeds
     2   give every client k a copy of w^l_0: w^l_k = w^l_0
     4   for each round t = 0, 1, ..., R-1:
     5       S_t = max(C*K, 1) random clients
     6       for each client k in S_t, in parallel:
     7           w^f_k = ClientUpdate(k, w^f_t)
     7a      w^f_{t+1} = sum over k in S_t of n_k/n * w^f_k,   n = sum over k in S_t of n_k
    ClientUpdate(k, w^f)
    11   download w^f from the server
    12   w^g = w^f, frozen
    13   for each of E local epochs:
    14       cut the client's training images into minibatches of size B
    15       for each minibatch b:
    16           lambda ~ U(0,1), one for the model (Model Mixing) or each layer (Layer Mixing); if t < L*R: lambda = nu = 0
    17           W = (1-lambda) w^f + lambda w^l_k
    18           loss = CE(W; b) + nu * cos^2(w^f, w^l_k) + mu * ||w^f - w^g||^2,   cos(p, q) = <p, q> / (||p|| ||q||)      (3)
    18a          (w^f, w^l_k) = (w^f, w^l_k) - eta * gradient of loss
    23   keep w^l_k, return w^f to the server

Choices, in full in docs/superfed.md. "Officially": in the authors' code for v1. --as official follows it in D1, D2, D4 only.

    D1  Line 18: the official last term is mu * (1-lambda) * the sum over tensors of ||w^f - w^g||, not squared.
    D2  Lines 17 and 18: officially biases have no w^l. They are never mixed, and no part of the cosine.
    D3  Line 2: w^l starts alike for all clients. --own-start: each has a seed of its own, as in the authors' later code.
    D4  Line 16: Phase II is t >= L*R, t from 0 (our reading). Officially t >= int(L*R) - 1, and round t has eta * .995^(t+1).
    D5  Model Mixing: L .4 (CIFAR-100 .5), mu, nu: official. Layer Mixing: L .8, by CIFAR-10's Table 3; the same mu and nu.
    D6  Layer Mixing: a bias shares the lambda of its layer. The cosine is one for the whole model in both schemes.
    D7  Line 18a: SGD has momentum 0.9, as the paper's text says. Its buffers start each round at 0. There is no weight decay.
    D8  CIFAR's split: a client has two random shards. Officially CIFAR-10's clients have one of five fixed pairs of classes.
    D9  Line 14: the last, smaller minibatch is used, in tests too. Officially it is dropped.
    D10  ECE is over all of a client's test images. Officially it is a mean over minibatches of 20.
    D11  All clients are evaluated, with the newest w^f. Officially with the w^f that the client got or trained last.
    D12  "personal": one lambda of 0, .1, ..., 1 for all: least training loss (--client-val: best validation accuracy).
    D13  Line 5: C*K is rounded down. With --unseen N it is C*(K-N).
    D14  --unseen N: N clients take no part in line 5. Afterwards each does lines 11 to 23 once, in Phase II, also with L = 1.
    D15  Line 7a: n_k counts training images. Officially it counts test images too: the same n_k/n, up to rounding.
    D16  Line 18a: for every minibatch. In our copy lines 20 and 21, behind that loop, are empty: perhaps it stood there.
"""

from math import ceil
from types import SimpleNamespace as State

import numpy as np
import torch

import common


def mix(w_f, w_l, lam):
    """W(lambda) of one client, w_l [d], or of m clients, w_l [m, d]. w_f [d]. lam: a number, or one for each weight, [d]."""
    return (1 - lam) * w_f + lam * w_l


def cosine(w_f, w_l):
    return (w_f * w_l).sum() / (w_f.norm() * w_l.norm())  # one for the whole model (D6)


def loss_3(net, w_f, w_l, w_g, lam, nu, mu, b):
    """Equation (3), for one client and one minibatch b. w_f, w_l, w_g [d]. lam: see mix."""
    W = mix(w_f, w_l, lam)  # l.17
    squared_distance = (w_f - w_g).square().sum()
    CE, cos = common.cross_entropy(net(W, b.x), b), cosine(w_f, w_l)
    return CE + nu * cos**2 + mu * squared_distance  # l.18


def client_step(net, args):
    """step: lines 16 to 18a, for one client and one minibatch b."""
    client_loss = official_loss(net) if args.as_ == "official" else loss_3  # D1, D2
    layer = net.layer_of if args.mix == "layer" else 0  # [d]: each weight's place in b.draw (D6); Model Mixing: 0 for all

    def step(client, b, eta, phase_two, w_g):
        w_f, w_l, u_f, u_l = client  # [d] each: weights w^f and w^l_k, and their momentum
        lam, nu = phase_two * b.draw[layer], phase_two * args.nu  # l.16: lam [d], or a number (D6); phase_two is 0 or 1

        def loss(w_f, w_l):
            return client_loss(net, w_f, w_l, w_g, lam, nu, args.mu, b)

        g_f, g_l = common.grad(loss, argnums=(0, 1))(w_f, w_l)  # l.18a: gradient of loss, by w^f and by w^l_k (D16)
        w_f, u_f = common.sgd(args, w_f, u_f, g_f, eta, net.decayed)  # l.18a: w^f - eta * u', u' = momentum * u_f + g_f (D7)
        w_l, u_l = common.sgd(args, w_l, u_l, g_l, eta, net.decayed)  # l.18a: w^l_k in the same way
        return w_f, w_l, u_f, u_l

    return step


def client_update(federation, step, S, t, phase_two_from, w_f, w_l):
    """ClientUpdate in round t for the clients k of S. phase_two_from: the first t of Phase II. w_f [d]: the server's w^f. w_l
    [K, d]: the w^l_k of all clients. Returns the trained w^f_k and w^l_k, [m, d] each."""
    w_f_k, w_l_k = w_f.expand(len(S), -1), w_l[S]  # l.11: w^f; and the w^l_k that k kept: [m, d] each
    w_g = w_f  # l.12: frozen, since `step` makes new tensors
    u_f, u_l = torch.zeros_like(w_l_k), torch.zeros_like(w_l_k)  # momentum (D7)
    eta = learning_rate(federation, t)  # D4: the decay
    phase_two = torch.tensor(float(t >= phase_two_from), device=federation.device)  # l.16: 0 if t < L*R (D4)

    def draw(rng, steps):
        return rng.random((steps, len(federation.net.layers)))  # l.16: a row is b.draw; Model Mixing uses its first number

    # federation.train does for each client k of S, at once or one after the other:
    #   for epoch in range(E):                             l.13
    #     for b in minibatches(shuffled(images of k), B):  l.14-15 (D9)
    #       client = step(client, b, eta, phase_two, w_g)  l.16-18, l.18a
    w_f_k, w_l_k, _, _ = federation.train(step, (w_f_k, w_l_k, u_f, u_l), S, t, eta, phase_two, w_g, draw=draw)
    return w_f_k, w_l_k  # l.23


def main(argv=None):
    args = arguments(argv)
    federation = common.Federation(args)
    seen = clients_that_train(federation)  # all, but for --unseen (D14)
    run = common.Run(__file__, federation, fixed_rounds="Phase II begins at L*R")  # so --resume refuses other --rounds
    step = client_step(federation.net, args)
    phase_two_from = first_round_of_phase_two(run)  # l.16: L*R (D4)

    state = State(w_f=federation.initial_weights(),  # l.1: w^f_0, [d]
                  w_l=federation.per_client(local_start(federation)))  # l.1-2: w^l_0 for each client, [K, d] (D3)
    for t, S in run.rounds(state, among=seen):  # l.4-5: S_t by Federation.sample, [m] (D13)
        w_f_k, w_l_k = client_update(federation, step, S, t, phase_two_from, state.w_f, state.w_l)  # l.6-7: [m, d] each
        n_k = federation.n[S]  # [m]
        state.w_f = federation.mean(w_f_k, n_k)  # l.7a (D15): [d]
        if t >= phase_two_from:
            state.w_l[S] = w_l_k  # l.23: keep w^l_k. Phase I trains w^f alone
        run.sent(up=w_f_k.numel(), down=w_f_k.numel())
        if run.evaluates():
            run.log(federation.evaluate(state.w_f), **personal_measures(federation, step, seen, state, t, phase_two_from))
    show(run)


# ---------------------------------------------------------------------------------------------------------------------
# Around it

# Table 1, CIFAR-10, and what differs in the other columns of Tables 1 and 2. K and R are the paper's. C, E, B, eta, and Model
# Mixing's mu, nu and L (see `arguments`) are from the official scripts, since our copy has lost them. eval_every is ours.
DEFAULTS = dict(model="cnn", transform="scale", split="shards", per_client=2, client_test=0.2, clients=100, fraction=0.1,  # D8
                rounds=200, epochs=10, batch_size=20, lr=0.01, momentum=0.9, eval_every=10)
BY_DATASET = {
    "cifar100": dict(rounds=300),
    "emnist": dict(rounds=100, split="semantic", fraction=0.01),
    "tinyimagenet": dict(rounds=500, split="semantic", fraction=0.03),
    # ours, for a quick look
    "shapes": dict(rounds=30, epochs=1, batch_size=10, clients=20, fraction=0.5, per_client=4, lr=0.02, lr_decay=0.95,
                   transform="normalize", start=0.5, eval_every=5),
}
LAMBDAS = [i / 10 for i in range(11)]


def arguments(argv):
    parser = common.parser(__doc__, **DEFAULTS)
    group = parser.add_argument_group("SuPerFed")
    group.add_argument("--mix", choices=("model", "layer"), default="model", help="one lambda, or one per layer")
    group.add_argument("--mu", type=common.nonnegative, default=0.01, help="mu, weight of the proximal term")
    group.add_argument("--nu", type=common.nonnegative, default=2.0, help="nu, weight of the squared cosine in Phase II")
    group.add_argument("--start", type=common.fraction,
                       help="L, share of the rounds before Phase II. 1: no Phase II; with --as official the last round is "
                            "Phase II. Default: .8 with --mix layer; .4 with --mix model (CIFAR-100 .5); shapes always .5")
    group.add_argument("--as", dest="as_", choices=("paper", "official"), default="paper",
                       help="in D1, D2 and D4 follow the paper, or the authors' code for v1")
    group.add_argument("--own-start", action="store_true", help="every client's w^l starts from a seed of its own (D3)")
    group.add_argument("--unseen", type=common.nonnegative_int, default=0, help="clients that join only after the last round")
    args = common.parse(parser, BY_DATASET, argv)
    if args.as_ == "official":
        parser.set_defaults(lr_decay=0.995)  # D4; a --lr-decay on the command line stands
        args = common.parse(parser, {}, argv)
    if args.start is None:
        args.start = 0.8 if args.mix == "layer" else 0.5 if args.dataset == "cifar100" else 0.4  # D5
    return args


def local_start(federation):
    """w^l_0 [d], the same for all clients; with --own-start a function: client's number -> its own w^l_0 (D3)."""
    def initial(k):  # k + 1, since 0 is the stream of w^f_0
        return federation.net.init(common.stream(federation.args.seed, "initialisation", 0, k + 1))

    return initial if federation.args.own_start else initial(0)


# What --as official changes: D1, D2, D4


def official_loss(net):
    """What the official code has in place of loss_3."""
    in_w_l = with_local_weight(net, official=True)

    def loss(net, w_f, w_l, w_g, lam, nu, mu, b):
        W = mix(w_f, w_l, lam * in_w_l)  # D2
        distance = sum(z.norm() for z in ((1 - lam) * (w_f - w_g)).split(net.sizes))  # D1
        cos = cosine(in_w_l * w_f, in_w_l * w_l)  # D2
        return common.cross_entropy(net(W, b.x), b) + nu * cos**2 + mu * distance

    return loss


def with_local_weight(net, official):
    """[d]: 1 for each weight of w^f that is in w^l, too; officially biases are not (D2)."""
    return net.per_weight([float(not (official and name.endswith(".bias"))) for name, _, _ in net.tensors])


def learning_rate(federation, t):
    """eta in round t, which is round t+1 officially (D4)."""
    return federation.eta(t + 1 if federation.args.as_ == "official" else t)


def first_round_of_phase_two(run):
    """Phase II's first t, counted from 0. The run prints it and marks it in its plots, counted from 1. 1e-9: .07 * 100, which
    is 7.000000000000001, counts as 7."""
    args = run.args
    LR = args.start * args.rounds
    first = max(int(LR) - 1, 0) if args.as_ == "official" else ceil(LR - 1e-9)  # D4
    if first < args.rounds:
        run.marks[first + 1] = "Phase II begins"
        run.federation.notes.append(f"phases  Phase II begins with round {first + 1}")
    else:
        run.federation.notes.append("phases  no Phase II")
    return first


# Evaluation


def personal_measures(federation, step, seen, state, t, phase_two_from):
    """The record's measures of the personal models after round t. In Phase I they are the global model: lambda = 0."""
    if t >= phase_two_from:
        measures = measure_mixtures(federation, seen, state.w_f, lambda rows: state.w_l[rows])  # D11
    else:
        measures = {"personal": federation.evaluate_clients(state.w_f, among=seen)}  # D12
    if federation.args.unseen and t == federation.args.rounds - 1:
        measures["unseen"] = measure_unseen(federation, step, seen, state, phase_two_from)
    return measures


def measure_mixtures(federation, clients, w_f, w_l_of):
    """Measures of `clients` (numbers), for each of LAMBDAS and for each choice (D12). w_f [d]; w_l_of(rows) [rows, d]."""
    split, args = federation.split, federation.args
    in_w_l = with_local_weight(federation.net, args.as_ == "official")
    chosen_on = "val" if args.client_val else "train"
    images = [train[: len(test)] for train, test in zip(split.train, split.test)]  # training images, as many as test images
    found = []  # the measures at each lambda
    for lam in LAMBDAS:
        def mixtures(rows):
            return mix(w_f, w_l_of(rows), lam * in_w_l)  # [rows, d]

        measures = federation.evaluate_clients(mixtures, among=clients)  # D10; with --client-val also val_mean and val_loss
        if not args.client_val:
            on_train = federation.evaluate_clients(mixtures, images, clients)
            measures.update(train_mean=on_train["mean"], train_loss=on_train["loss"])
        found.append({"lambda": lam, **measures})
    by_loss = min(found, key=lambda measures: measures[f"{chosen_on}_loss"])
    by_accuracy = max(found, key=lambda measures: measures[f"{chosen_on}_mean"])
    if args.client_val:
        chosen, other, other_rule = by_accuracy, by_loss, "loss"
    else:
        chosen, other, other_rule = by_loss, by_accuracy, "accuracy"
    by_test = max(found, key=lambda measures: measures["mean"])
    short = common.without_clients
    half, zero = found[LAMBDAS.index(0.5)], found[0]
    return {"personal": chosen, f"personal@{chosen_on}-{other_rule}": short(other), "personal@test": short(by_test),
            "personal@lambda=0.5": short(half), "personal@lambda=0": short(zero), "lambdas": [short(one) for one in found]}


def clients_that_train(federation):
    """The numbers of all clients except the --unseen ones, which are chosen at random (D14)."""
    K, unseen = federation.K, federation.args.unseen
    if unseen >= K:
        common.refuse(f"--unseen {unseen} leaves none of the {K} clients to train; use a smaller number")
    return np.sort(common.stream(federation.args.split_seed, "split", 2).permutation(K)[unseen:])


def measure_unseen(federation, step, seen, state, phase_two_from):
    """The unseen clients do ClientUpdate once, in Phase II. Their new w^l_k are measured with the server's w^f (D14)."""
    unseen = np.setdiff1d(np.arange(federation.K), seen)
    S = federation.rows(unseen)
    _, w_l_k = client_update(federation, step, S, federation.args.rounds, phase_two_from, state.w_f, state.w_l)
    w_l = dict(zip(S, w_l_k))
    return measure_mixtures(federation, unseen, state.w_f, lambda rows: torch.stack([w_l[row] for row in rows]))


def show(run):
    """Prints the last round's choices of lambda; with --plot draws lambdas.png."""
    history = run.record()["rounds"]
    row = history[-1]
    groups = [(name, row_of) for name, row_of in (("trained", row), ("unseen", row.get("unseen", {}))) if "lambdas" in row_of]
    for name, measures in groups:
        print(f"\n{name + ' clients, lambda':<28}{'lambda':>8}{'mean':>10}{'std':>10}{'loss':>10}{'ece':>10}{'mce':>10}")
        choices = [("personal", "smallest training loss"), ("personal@train-accuracy", "best training accuracy")]
        if run.args.client_val:
            choices = [("personal", "best validation accuracy"), ("personal@val-loss", "smallest validation loss")]
        for choice, how in (*choices, ("personal@test", "best on test images"), ("personal@lambda=0.5", "fixed"),
                            ("personal@lambda=0", "0: the global model")):
            values = "".join(f"{measures[choice][key]:>10.4f}" for key in ("mean", "std", "loss", "ece", "mce"))
            print(f"{how:<28}{measures[choice]['lambda']:>8}{values}")
    if run.args.plot and groups:
        title = f"SuPerFed, {run.args.mix} mixing\n{common.setting(run.record())}"
        with common.drawing(run.out / "lambdas.png", size=(6, 4.2), title=title) as axis:
            for name, measures in groups:
                mean, std = (np.array([at[key] for at in measures["lambdas"]]) for key in ("mean", "std"))
                bars = np.minimum(std, [mean, 1 - mean])  # an accuracy is in [0, 1]
                axis.errorbar(LAMBDAS, mean, bars, capsize=3, marker="o", label=f"{name} clients, best {max(mean):.3f}")
            axis.set(xlabel=r"$\lambda$ (0: $w^f$, 1: $w^\ell_k$)", ylabel="accuracy, mean and std over clients")
        print("lambdas.png: the clients' accuracy on the way from the global model (lambda = 0) to their local ones (1). "
              "curves.png: accuracy and loss, round by round.")


if __name__ == "__main__":
    main()
