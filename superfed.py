"""SuPerFed: personalised federated learning in the subspace between two models. Hahn, Jeong, Lee,
"Subspace Learning for Personalized Federated Optimization", 2021, arXiv 2109.07628v1.

    python superfed.py --dataset cifar10 --mix model    Table 1, SuPerFed-MM (--mix layer: -LM)

    mixing  global (paper)  personal  personal@test  200 rounds, means of three seeds
    model   .4675  (.454)   .8660     .8737          results/superfed-1/superfed-cifar10-mix-model
    layer   .4881  (.471)   .8726     .8741          results/superfed-1/superfed-cifar10-mix-layer

"global" tests w^f on central images, "personal" each client's W(lambda) on its own test images.
"personal@test" uses the lambda that scores best on the test images, as the paper does.
docs/superfed.md explains our choices, also some that belong to no line (D8, D10, D11, D14):

    D1  Line C8: the distance is squared; the authors' code sums (1-lambda) * norms over tensors.
    D2  Lines C7, C8 include biases; the authors' code leaves them out of mixture and cosine.
    D3  Line 2: all w^l_k start from the same weights; with --own-start each from its own.
    D4  Line C6: Phase II begins at t >= L*R (authors' code: int(L*R) - 1). C8a: eta is constant.
    D5  Model Mixing's mu, nu, L are the authors'. Layer Mixing's L = .8 is inferred from Table 3
        (CIFAR-10); its L elsewhere, and its mu and nu, are guesses.
    D6  Line C6: in Layer Mixing a bias shares its layer's lambda. Line C8: the cosine takes all w.
    D7  Line C8a: momentum is .9 (paper's text); its buffer u starts a round at 0; no weight decay.
    D9  Line C4: the last, smaller minibatch is used. The authors' code drops it.
    D12  All clients use the lambda of 0, .1, ..., 1 with the least mean training loss.
    D13  Line 5: C*K is rounded down.
    D15  Line C8a: we step for every minibatch. The paper's step may be in lost lines C10, C11.

[d]: a model's d weights; [m, d]: m clients' models; net(w, b.x): minibatch b's logits. K, C, eta,
L: --clients, --fraction, --lr, --start; n_k: k's image count. Line numbers are the paper's; ends of
loops are omitted. We added 7a, C8a and reconstructed C2, C6 to C8; 3, C10, C11 are lost.

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
    C8a          (w^f, w^l_k) = (w^f, w^l_k) - eta * gradient of loss, with momentum (D7)
    C13  keep w^l_k, return w^f to the server
"""

from math import ceil
from types import SimpleNamespace as State

import numpy as np
import torch

import common


def local_start(federation):
    """Returns w^l_0 [d], the same for all clients; with --own-start a function that returns client
    k's own (D3)."""
    def initial(k):  # k + 1, since 0 is the stream of w^f_0
        rng = common.stream(federation.args.seed, "initialisation", 0, k + 1)
        return federation.net.init(rng)  # l.1-2: w^l_0

    return initial if federation.args.own_start else initial(0)


def first_round_of_phase_two(args):
    """Returns Phase II's first t: the least t >= L*R. The 1e-9 absorbs floating-point error."""
    return ceil(args.start * args.rounds - 1e-9)  # l.C6 (D4): .07 * 100 counts as 7


def mix(w_f, w_l, lam):
    """Returns W(lambda). w_f: [d]; w_l: [d] or [m, d]; lam: a number, or one per weight [d]."""
    return (1 - lam) * w_f + lam * w_l  # l.C7 (D2)


def lambda_and_nu(b, layer, nu, phase_two):
    """Returns minibatch b's lambda and nu, both 0 in Phase I (phase_two = 0; in Phase II it is 1).
    b.draw has a number ~ U(0,1) for each layer. layer: each weight's layer [d], so that lambda is
    [d]; or 0: all weights use the first number."""
    return phase_two * b.draw[layer], phase_two * nu  # l.C6 (D6)


def cosine(w_f, w_l):
    return (w_f * w_l).sum() / (w_f.norm() * w_l.norm())  # over the whole model (D6)


def loss_3(net, w_f, w_l, w_g, lam, nu, mu, b):
    """Returns the loss (3) of one client on one minibatch b. w_f, w_l, w_g: [d]."""
    W = mix(w_f, w_l, lam)  # l.C7
    squared_distance = (w_f - w_g).square().sum()
    CE, cos = common.cross_entropy(net(W, b.x), b), cosine(w_f, w_l)
    return CE + nu * cos**2 + mu * squared_distance  # l.C8 (D1)


def local_training(net, args):
    """Returns client_update(w_f, w_l, epochs, eta, phase_two), ClientUpdate for one client.
    `epochs` yields E passes over its images, each cut into minibatches b (common.Epochs)."""
    sgd = common.sgd(args, net.decayed)  # u = gradient + momentum * u; w - eta * u (D7)
    layer = net.layer_of if args.mix == "layer" else 0  # [d] (D6), or one draw for all

    @common.step  # on a GPU it runs for all clients at once, or as a CUDA graph
    def mixed_step(w_f, w_l, u_f, u_l, w_g, b, eta, phase_two):  # [d] each; phase_two is 0 or 1
        lam, nu = lambda_and_nu(b, layer, args.nu, phase_two)  # l.C6

        def loss(w_f, w_l):
            return loss_3(net, w_f, w_l, w_g, lam, nu, args.mu, b)

        gradient_f, gradient_l = common.grad(loss, argnums=(0, 1))(w_f, w_l)
        w_f, u_f = sgd(w_f, u_f, gradient_f, eta)  # l.C8a: w^f - eta * u (D7, D15)
        w_l, u_l = sgd(w_l, u_l, gradient_l, eta)  # l.C8a: w^l_k; in Phase I its gradient is 0
        return w_f, w_l, u_f, u_l

    def client_update(w_f, w_l, epochs, eta, phase_two):  # l.C1: downloads w_f; w_l is its own
        w_g = w_f  # l.C2
        u_f, u_l = torch.zeros_like(w_f), torch.zeros_like(w_l)  # momentum (D7)
        for minibatches in epochs:  # l.C3-C4 (D9)
            for b in minibatches:  # l.C5: mixed_step does lines C6 to C8a
                w_f, w_l, u_f, u_l = mixed_step(w_f, w_l, u_f, u_l, w_g, b, eta, phase_two)
        return w_f, w_l  # l.C13: w^f goes to the server

    return client_update


def main(argv=None, federation=None, file=__file__):
    """federation, file: of a script that samples other clients (papers/superfed_unseen.py)."""
    federation = federation or common.Federation(arguments(argv))
    args = federation.args
    phase_two_from = first_round_of_phase_two(args)  # the first t >= L*R
    run = common.Run(file, federation, fixed_rounds="Phase II's start, L*R, depends on R",
                     marks={phase_two_from + 1: "Phase II begins"})  # counted from 1
    run.note(f"phases  Phase II begins with round {phase_two_from + 1}"
             if phase_two_from < args.rounds else "phases  no Phase II")
    if args.mix == "layer" and (odd := federation.net.several()):
        run.note(f"note    several layers' weights, which share one lambda, are in "
                 f"{odd[0] or 'the root module'}")
    client_update = local_training(federation.net, args)

    def draw(rng, steps):
        return rng.random((steps, len(federation.net.layers)))  # l.C6: a row is one b.draw

    state = State(w_f=federation.initial_weights(),  # l.1: w^f_0, [d]
                  w_l=federation.per_client(local_start(federation)))  # l.2 (D3): w^l_k, [K, d]

    def at_chosen_lambda(S):  # for --fine-tune; in Phase I lambda is 0
        return mix(state.w_f, state.w_l[S], run.row["personal"].get("lambda", 0))

    for t in run.rounds(state, model="w_f", clients="w_l", personal=at_chosen_lambda):  # l.4
        m = max(int(args.fraction * federation.K + 1e-9), 1)  # l.5 (D13)
        S = federation.sample(t, m)  # l.5: [m]
        w_f, w_l = state.w_f.expand(len(S), -1), state.w_l[S]  # [m, d] each
        eta = federation.eta(t)
        phase_two = torch.tensor(float(t >= phase_two_from), device=federation.device)  # l.C6
        # train calls client_update for each client of S, with its rows of `own`, its epochs and
        # what is shared; draw supplies each minibatch's b.draw
        w_f_k, w_l_k = federation.train(client_update, S, t, own=[w_f, w_l],
                                        shared=[eta, phase_two], draw=draw)  # l.6-7: [m, d] each
        n_k = federation.n[S]  # [m]
        state.w_f = n_k @ w_f_k / n_k.sum()  # l.7a: [d]
        state.w_l[S] = w_l_k  # l.C13: keep w^l_k
        run.sent(up=w_f_k.numel(), down=w_f_k.numel())
        if run.evaluates():
            if phase_two:
                personal = measure_mixtures(federation, state.w_f, state.w_l)
            else:
                personal = {"personal": federation.evaluate_clients(state.w_f)}  # lambda = 0
            run.log(federation.evaluate(state.w_f), **personal)
    show(run)
    return run.record()


# --------------------------------------------------------------------------------------------------
# Around it

# These are CIFAR-10's settings in Table 1; BY_DATASET has what differs elsewhere. K, R and momentum
# are the paper's. C, E, B, eta, transform, and Model Mixing's mu, nu and L (in `arguments`), which
# our copy has lost, are the authors' code's, where eta decays (D4). eval_every is ours.
DEFAULTS = dict(model="cnn", transform="scale", split="shards", per_client=2, client_test=0.2,
                clients=100, fraction=0.1, rounds=200, epochs=10, batch_size=20, lr=0.01,
                momentum=0.9, eval_every=10)
BY_DATASET = {
    "cifar100": dict(rounds=300),
    "emnist": dict(rounds=100, split="semantic", fraction=0.01),
    "tinyimagenet": dict(rounds=500, split="semantic", fraction=0.03),
    # ours, for a quick look
    "shapes": dict(rounds=30, epochs=1, batch_size=10, clients=20, fraction=0.5, per_client=4,
                   lr=0.02, lr_decay=0.95, transform="normalize", start=0.5, eval_every=5),
}


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
                       help="L, the share of rounds before Phase II; 1 leaves Phase II empty. "
                            "Default: .5 on shapes; elsewhere .8 with --mix layer, .4 with --mix "
                            "model (CIFAR-100: .5)")
    group.add_argument("--own-start", action="store_true",
                       help="initialise each client's w^l with its own seed (D3)")
    args = common.parse(parser, BY_DATASET, argv)
    if args.start is None:
        of_model = 0.5 if args.dataset == "cifar100" else 0.4
        args.start = 0.8 if args.mix == "layer" else of_model  # D5
    return args


LAMBDAS = [i / 10 for i in range(11)]  # D12


def at_lambda(federation, w_f, w_l, lam, images=None):
    """Returns the measures of all clients' W_k(lambda). w_f: [d]; w_l: [K, d]."""
    return federation.evaluate_clients(lambda S: mix(w_f, w_l[S], lam), images)


def measure_mixtures(federation, w_f, w_l):
    """Returns the measures of the personal models at all LAMBDAS, and at two of them (D12):
    `personal` is at the least training loss or, with --client-val, at the best validation accuracy,
    `personal@test` at the best test accuracy, as in the paper. w_l: [K, d]."""
    split, found = federation.split, []
    # each client uses as many training as test images
    images = [train[: len(test)] for train, test in zip(split.train, split.test)]
    for lam in LAMBDAS:
        measures = at_lambda(federation, w_f, w_l, lam)  # --client-val adds val_mean, val_loss
        if not federation.args.client_val:
            on_train = at_lambda(federation, w_f, w_l, lam, images)
            measures.update(train_mean=on_train["mean"], train_loss=on_train["loss"])
        found.append({"lambda": lam, **measures})
    if federation.args.client_val:
        chosen = max(found, key=lambda measures: measures["val_mean"])
    else:
        chosen = min(found, key=lambda measures: measures["train_loss"])
    by_test = max(found, key=lambda measures: measures["mean"])
    return {"personal": chosen, "personal@test": common.without_clients(by_test),
            "lambdas": [common.without_clients(measures) for measures in found]}


def show(run):
    """Prints the last round's accuracy at each lambda; with --plot draws lambdas.png."""
    lambdas = run.record()["final"].get("lambdas")
    if not lambdas:  # no Phase II
        return
    accuracies = (f"{at['lambda']:g}: {at['mean']:.3f}" for at in lambdas)
    common.say(f"lambda  {', '.join(accuracies)}")
    if run.args.plot:
        title = f"SuPerFed, {run.args.mix} mixing\n{common.setting(run.record())}"
        with common.drawing(run.out / "lambdas.png", size=(6, 4.2), title=title) as axis:
            mean, std = (np.array([at[key] for at in lambdas]) for key in ("mean", "std"))
            bars = np.minimum(std, [mean, 1 - mean])  # an accuracy is in [0, 1]
            axis.errorbar(LAMBDAS, mean, bars, capsize=3, marker="o", label=f"best {max(mean):.3f}")
            axis.set(xlabel=r"$\lambda$ (0: $w^f$, 1: $w^\ell_k$)",
                     ylabel="accuracy, mean and std over clients")


if __name__ == "__main__":
    main()
