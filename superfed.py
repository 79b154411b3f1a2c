"""SuPerFed: personalised federated learning in the subspace between two models. Hahn, Jeong, Lee,
"Subspace Learning for Personalized Federated Optimization", 2021, arXiv 2109.07628v1.

    python superfed.py --dataset cifar10 --mix model    Table 1, SuPerFed-MM (--mix layer: -LM)

    mixing  global (paper)  personal  personal@test  200 rounds, means of three seeds
    model   .4675  (.454)   .8660     .8737          results/superfed-1/superfed-cifar10-mix-model
    layer   .4881  (.471)   .8726     .8741          results/superfed-1/superfed-cifar10-mix-layer

The server averages w^f, the federated model. The local model w^l_k, of the same shape, stays with
client k, whose personal model is W_k(lambda) = (1-lambda) w^f + lambda w^l_k. "global" tests w^f on
central images. "personal" tests W_k on k's test images with D12's lambda, "personal@test" with the
lambda best on test images, as in the paper. Lines have the paper's numbers; 7a, C8a are ours. L is
the share of rounds before Phase II. See docs/superfed.md for D1 to D15, fedavg.py for the notation.

    Server
      1  choose w^f_0 and w^l_0 with different random seeds
      2  give every client k a copy of w^l_0: w^l_k = w^l_0
      4  for each round t = 0, 1, ..., R-1:
      5      S_t = max(C*K, 1) random clients
      6      for each client k in S_t, in parallel:
      7          w^f_k = ClientUpdate(k, w^f_t)
     7a      w^f_{t+1} = sum over k in S_t of n_k/n * w^f_k,   n = sum over k in S_t of n_k
    ClientUpdate(k, w^f)
     C1  download w^f from the server
     C2  w^g = w^f, frozen
     C3  for each of E local epochs:
     C4      cut the client's training images into minibatches of size B
     C5      for each minibatch b:
     C6          lambda ~ U(0,1), one or one per layer; if t < L*R (Phase I): lambda = nu = 0
     C7          W = (1-lambda) w^f + lambda w^l_k
     C8          loss = CE(W; b) + nu * cos^2(w^f, w^l_k) + mu * ||w^f - w^g||^2      (3)
    C8a          (w^f, w^l_k) = (w^f, w^l_k) - eta * gradient of loss
    C13  keep w^l_k, return w^f to the server

    D1  Line C8: the authors' code takes mu * (1-lambda) * sum over tensors of ||w^f - w^g||.
    D2  Lines C7, C8: officially (in that code) biases are neither mixed nor part of the cosine.
    D3  Line 2: all w^l_k have one seed; with --own-start each has its own (KDD 2022's code).
    D4  Line C6: Phase II is t >= L*R, officially t >= int(L*R) - 1. Their eta: lr * .995^(t+1).
    D5  Model Mixing's mu, nu, L are official. Layer Mixing's L = .8 is inferred from Table 3.
    D6  In Layer Mixing a bias shares its layer's lambda. The cosine is over the whole model.
    D7  Line C8a: momentum is .9 (paper's text); its buffer starts a round at 0; no weight decay.
    D8  A client holds two random shards, officially one of five fixed pairs of classes (CIFAR-10).
    D9  Line C4: the last, smaller minibatch is used, also in tests. Officially it is dropped.
    D10  ECE (calibration error) uses a client's whole test set, officially minibatches of 20.
    D11  All clients are evaluated with the newest w^f, officially with the w^f they last held.
    D12  "personal" uses the lambda in 0, .1, ..., 1 that minimises the clients' mean training loss.
    D13  Line 5: C*K is rounded down.
    D14  Line 7a: n_k counts training images. Officially it counts test images, too.
    D15  Line C8a: we step for every minibatch. The paper's step may be in lost lines C10, C11."""

from math import ceil
from types import SimpleNamespace as State

import numpy as np
import torch

import common


def mix(w_f, w_l, lam):
    """Returns W(lambda). w_f: [d]; w_l: [d] or [m, d]; lam: a number, or one per weight [d]."""
    return (1 - lam) * w_f + lam * w_l


def cosine(w_f, w_l):
    return (w_f * w_l).sum() / (w_f.norm() * w_l.norm())  # over the whole model (D6)


def loss_3(net, w_f, w_l, w_g, lam, nu, mu, b):
    """Returns the loss (3) of one client on one minibatch b. w_f, w_l, w_g: [d]."""
    W = mix(w_f, w_l, lam)  # l.C7
    squared_distance = (w_f - w_g).square().sum()
    CE, cos = common.cross_entropy(net(W, b.x), b), cosine(w_f, w_l)
    return CE + nu * cos**2 + mu * squared_distance  # l.C8


def local_training(net, args):
    """Returns client_update(w_f, w_l, epochs, eta, phase_two), ClientUpdate for one client."""
    sgd = common.sgd(args, net.decayed)  # with --momentum (D7)
    client_loss = official_loss(net) if args.as_ == "official" else loss_3  # D1, D2
    layer = net.layer_of if args.mix == "layer" else 0  # [d]: each weight's layer (D6)

    @common.step
    def mixed_step(w_f, w_l, u_f, u_l, w_g, b, eta, phase_two):  # [d] each; phase_two is 0 or 1
        lam, nu = phase_two * b.draw[layer], phase_two * args.nu  # l.C6: b.draw ~ U(0,1)

        def loss(w_f, w_l):
            return client_loss(net, w_f, w_l, w_g, lam, nu, args.mu, b)

        gradient_f, gradient_l = common.grad(loss, argnums=(0, 1))(w_f, w_l)
        w_f, u_f = sgd(w_f, u_f, gradient_f, eta)  # l.C8a: w^f - eta * gradient (D15)
        w_l, u_l = sgd(w_l, u_l, gradient_l, eta)  # l.C8a: w^l_k
        return w_f, w_l, u_f, u_l

    def client_update(w_f, w_l, epochs, eta, phase_two):  # l.C1: w_f; w_l: k's own w^l_k
        w_g = w_f  # l.C2
        u_f, u_l = torch.zeros_like(w_f), torch.zeros_like(w_l)  # momentum (D7)
        for minibatches in epochs:  # l.C3-C4 (D9)
            for b in minibatches:  # l.C5: mixed_step does lines C6 to C8a
                w_f, w_l, u_f, u_l = mixed_step(w_f, w_l, u_f, u_l, w_g, b, eta, phase_two)
        return w_f, w_l  # l.C13: w^f goes to the server

    return client_update


def main(argv=None):
    args = arguments(argv)
    federation = common.Federation(args)
    run = common.Run(__file__, federation, fixed_rounds="Phase II begins at L*R")
    client_update = local_training(federation.net, args)
    phase_two_from = first_round_of_phase_two(args)  # L*R (D4)
    announce(run, phase_two_from)

    def draw(rng, steps):
        return rng.random((steps, len(federation.net.layers)))  # each row is one b.draw

    state = State(w_f=federation.initial_weights(),  # l.1: w^f_0, [d]
                  w_l=federation.per_client(local_start(federation)))  # l.1-2: w^l_k, [K, d] (D3)
    for t in run.rounds(state, model="w_f", clients="w_l"):  # l.4
        S = federation.sample(t)  # l.5: max(C*K, 1) random clients (D13)
        w_f, w_l = state.w_f.expand(len(S), -1), state.w_l[S]  # [m, d] each
        eta = learning_rate(federation, t)  # D4: the decay
        phase_two = torch.tensor(float(t >= phase_two_from), device=federation.device)  # t >= L*R?
        w_f_k, w_l_k = federation.train(client_update, S, t, own=[w_f, w_l],
                                        shared=[eta, phase_two], draw=draw)  # l.6-7: [m, d] each
        n_k = federation.n[S]  # [m]
        state.w_f = federation.mean(w_f_k, n_k)  # l.7a (D14): [d]
        if phase_two:
            state.w_l[S] = w_l_k  # l.C13: keep w^l_k. Phase I trains w^f alone
        run.sent(up=w_f_k.numel(), down=w_f_k.numel())
        if run.evaluates():
            run.log(federation.evaluate(state.w_f),
                    **personal_measures(federation, state, phase_two))
    show(run)
    return run.record()


# --------------------------------------------------------------------------------------------------
# Around it

# These are CIFAR-10's settings in Table 1; BY_DATASET has what differs elsewhere. K, R and momentum
# are the paper's. C, E, B, eta, and Model Mixing's mu, nu and L (in `arguments`), which our copy
# has lost, are from the official scripts. eval_every is ours.
DEFAULTS = dict(model="cnn", transform="scale", split="shards", per_client=2, client_test=0.2,  # D8
                clients=100, fraction=0.1, rounds=200, epochs=10, batch_size=20, lr=0.01,
                lr_decay=None, momentum=0.9, eval_every=10)
BY_DATASET = {
    "cifar100": dict(rounds=300),
    "emnist": dict(rounds=100, split="semantic", fraction=0.01),
    "tinyimagenet": dict(rounds=500, split="semantic", fraction=0.03),
    # ours, for a quick look
    "shapes": dict(rounds=30, epochs=1, batch_size=10, clients=20, fraction=0.5, per_client=4,
                   lr=0.02, transform="normalize", start=0.5, eval_every=5),
}
LAMBDAS = [i / 10 for i in range(11)]


def arguments(argv):
    parser = common.parser(__doc__, **DEFAULTS)
    group = parser.add_argument_group("SuPerFed")
    group.add_argument("--mix", choices=("model", "layer"), default="model",
                       help="one lambda for the model, or one per layer")
    group.add_argument("--mu", type=common.nonnegative, default=0.01,
                       help="mu, weight of the proximal term")
    group.add_argument("--nu", type=common.nonnegative, default=2.0,
                       help="nu, weight of the squared cosine in Phase II")
    group.add_argument("--start", type=common.fraction,
                       help="L, the share of rounds before Phase II; 1 leaves Phase II empty "
                            "(--as official: one round). Default: .5 on shapes; "
                            "elsewhere .8 with --mix layer, .4 with --mix model (CIFAR-100: .5)")
    group.add_argument("--as", dest="as_", choices=("paper", "official"), default="paper",
                       help="follow the paper, or the authors' code for v1, in D1, D2 and D4")
    group.add_argument("--own-start", action="store_true",
                       help="initialise each client's w^l with its own seed (D3)")
    args = common.parse(parser, BY_DATASET, argv)
    if args.start is None:
        of_model = 0.5 if args.dataset == "cifar100" else 0.4
        args.start = 0.8 if args.mix == "layer" else of_model  # D5
    if args.lr_decay is None:
        ours = 0.95 if args.dataset == "shapes" else 1.0
        args.lr_decay = 0.995 if args.as_ == "official" else ours  # D4
    return args


def local_start(federation):
    """Returns w^l_0 [d], the same for all clients; with --own-start a function that returns client
    k's own (D3)."""
    def initial(k):  # k + 1, since 0 is the stream of w^f_0
        return federation.net.init(common.stream(federation.args.seed, "initialisation", 0, k + 1))

    return initial if federation.args.own_start else initial(0)


def first_round_of_phase_two(args):
    """Returns Phase II's first t. 1e-9 absorbs floating-point error: .07 * 100 counts as 7."""
    start = args.start * args.rounds  # L*R
    return max(int(start) - 1, 0) if args.as_ == "official" else ceil(start - 1e-9)  # D4


def announce(run, first):
    """Notes the round in which Phase II begins, counted from 1, for the output and the plots."""
    if first < run.args.rounds:
        run.marks[first + 1] = "Phase II begins"
    run.federation.notes.append(f"phases  Phase II begins with round {first + 1}"
                                if first < run.args.rounds else "phases  no Phase II")


# What --as official changes: D1, D2, D4


def official_loss(net):
    """Returns the loss that the official code uses instead of loss_3."""
    in_w_l = with_local_weight(net, official=True)

    def loss(net, w_f, w_l, w_g, lam, nu, mu, b):
        W = mix(w_f, w_l, lam * in_w_l)  # D2
        distance = sum(z.norm() for z in ((1 - lam) * (w_f - w_g)).split(net.sizes))  # D1
        cos = cosine(in_w_l * w_f, in_w_l * w_l)  # D2
        return common.cross_entropy(net(W, b.x), b) + nu * cos**2 + mu * distance

    return loss


def with_local_weight(net, official):
    """Returns [d]: 1 for each weight with a local copy in w^l; officially biases have none (D2)."""
    return net.per_weight([float(not (official and name.endswith("bias"))) for name in net.names])


def learning_rate(federation, t):
    """Returns eta of round t. The official code counts rounds from 1 (D4)."""
    return federation.eta(t + 1 if federation.args.as_ == "official" else t)


# Evaluation


def personal_measures(federation, state, phase_two):
    """Returns the measures of the personal models, which in Phase I are the global model."""
    if phase_two:
        return measure_mixtures(federation, state.w_f, state.w_l)  # D11
    return {"personal": federation.evaluate_clients(state.w_f)}


def measure_mixtures(federation, w_f, w_l):
    """Returns measures at all LAMBDAS and at chosen ones (D12). w_l is [K, d]."""
    split, args = federation.split, federation.args
    in_w_l = with_local_weight(federation.net, args.as_ == "official")
    chosen_on = "val" if args.client_val else "train"
    # each client uses as many training as test images
    images = [train[: len(test)] for train, test in zip(split.train, split.test)]
    found = []  # the measures at each lambda
    for lam in LAMBDAS:
        def mixtures(S, lam=lam):
            return mix(w_f, w_l[S], lam * in_w_l)  # [m, d]

        measures = federation.evaluate_clients(mixtures)  # D10; --client-val adds val_loss
        if not args.client_val:
            on_train = federation.evaluate_clients(mixtures, images)
            measures.update(train_mean=on_train["mean"], train_loss=on_train["loss"])
        found.append({"lambda": lam, **measures})
    by_loss = min(found, key=lambda measures: measures[f"{chosen_on}_loss"])
    by_accuracy = max(found, key=lambda measures: measures[f"{chosen_on}_mean"])
    if args.client_val:
        chosen, other, other_rule = by_accuracy, by_loss, "loss"
    else:
        chosen, other, other_rule = by_loss, by_accuracy, "accuracy"  # D12
    by_test = max(found, key=lambda measures: measures["mean"])
    short = common.without_clients
    half, zero = found[LAMBDAS.index(0.5)], found[0]
    return {"personal": chosen, f"personal@{chosen_on}-{other_rule}": short(other),
            "personal@test": short(by_test), "personal@lambda=0.5": short(half),
            "personal@lambda=0": short(zero), "lambdas": [short(one) for one in found]}


def show(run):
    """Prints the last round's choices of lambda; with --plot draws lambdas.png."""
    row = run.record()["rounds"][-1]
    if "lambdas" not in row:
        return
    columns = ("mean", "std", "loss", "ece", "mce")
    common.say(f"\n{'lambda':<28}{'':>8}" + "".join(f"{name:>10}" for name in columns))
    choices = [("personal", "smallest training loss"),
               ("personal@train-accuracy", "best training accuracy")]
    if run.args.client_val:
        choices = [("personal", "best validation accuracy"),
                   ("personal@val-loss", "smallest validation loss")]
    choices += [("personal@test", "best on test images"), ("personal@lambda=0.5", "fixed"),
                ("personal@lambda=0", "0: global, own images")]
    for choice, how in choices:
        values = "".join(f"{row[choice][name]:>10.4f}" for name in columns)
        common.say(f"{how:<28}{row[choice]['lambda']:>8}{values}")
    if run.args.plot:
        title = f"SuPerFed, {run.args.mix} mixing\n{common.setting(run.record())}"
        with common.drawing(run.out / "lambdas.png", size=(6, 4.2), title=title) as axis:
            mean, std = (np.array([at[key] for at in row["lambdas"]]) for key in ("mean", "std"))
            bars = np.minimum(std, [mean, 1 - mean])  # an accuracy is in [0, 1]
            axis.errorbar(LAMBDAS, mean, bars, capsize=3, marker="o", label=f"best {max(mean):.3f}")
            axis.set(xlabel=r"$\lambda$ (0: $w^f$, 1: $w^\ell_k$)",
                     ylabel="accuracy, mean and std over clients")
        common.say("lambdas.png: the clients' accuracy from the global model (lambda = 0) to their "
                   "local ones (1).")


if __name__ == "__main__":
    main()
