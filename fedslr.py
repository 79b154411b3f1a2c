"""FedSLR. Huang, Shen, Sun, Lin, Tao, "Fusion of Global and Local Knowledge for Personalized
Federated Learning", TMLR 2023, arXiv 2302.11051. Algorithm 2 is reconstructed from the text.

    python fedslr.py --dataset cifar10    Table 1, Non-IID (published: GKR .8752, mixed .9530)
    with --model cnn we reach .7449 and .9130: results/fedslr/cifar10-cnn-1000-rounds

All clients share w, the "global knowledge representation" (GKR); lambda lowers its rank. p_i stays
with client i; mu makes it sparse. "gkr" tests w on i's test images (D7), "personal" w + p_i
(mixed), "global" w on the test set. docs/fedslr.md explains D1-D8; see fedavg.py for the notation.

     1  choose w^0; for each client i: gamma_i = 0, p_i = 0 or a copy of w^0
     2  for each round t = 0, 1, ..., T-1:
     3      S_t = max(C*M, 1) of the M clients, at random
     4      for each client i in S_t, in parallel:
     5          w_i = ClientUpdate(i, w^t)
     6          gamma_i = gamma_i + (w^t - w_i) / eta_g                                          (5)
     7      v = mean over S_t of w_i - eta_g * mean over all M clients of gamma_i                (6)
            w^{t+1} = argmin over w of lambda*eta_g * sum over l of ||pi(w_l)||_* + ||w - v||^2 / 2
     8  ClientUpdate(i, w^t):
     9      Phase I: w = w^t
    10      for each of E local epochs:
    11          for each minibatch b:
    12              g = gradient of the loss f_i(w; b)
    13              h = g - gamma_i + (w - w^t) / eta_g, the gradient of the paper's (4)
    14              w = w - eta * h
    15      send w_i = w to the server
    16      gamma_i = gamma_i + (w^t - w_i) / eta_g, the client's copy of line 6             (5)
    17      Phase II: for each fusion epoch:
    18          for each minibatch b:
    19              g = gradient of f_i(w^t + p_i; b) with respect to p_i
    20              p_i = soft(p_i - eta * g, eta*mu)                                        (7)

    D1  Line 1: p_i = 0; with resnet18 a copy of w^0's kernels and matrices (authors' code).
    D2  Line 3 rounds C*M down; the authors' clients join with probability C. Line 7 is unweighted.
    D3  Lines 13, 20: weight decay adds 1e-3 times w or p_i to g. eta is --lr times .998^t.
    D4  Line 19 keeps w^t fixed. "personal" tests w^{t+1} + p_i of all clients, not of S_t alone.
    D5  Line 7 shrinks matrices, and kernels as matrices (by pi), no vectors; line 20 all of p_i.
    D6  Per layer the server sends min(rows*columns, rank*(rows+columns)) weights; clients send w_i.
    D7  A client tests on floor(100 * its class proportion) central images of each class.
    D8  Class proportions follow Dir(.1); used-up classes are dealt again; images shift and flip."""

from types import SimpleNamespace as State

import torch

import common


def soft(x, tau):
    """Returns sign(x) * max(|x| - tau, 0): x's entries move towards 0 by tau and stop at 0."""
    return x - x.clamp(-tau, tau)


def pi(kernel):
    """Returns a kernel of n outputs, c inputs and k1 x k2 pixels as a matrix: [n, c, k1, k2] ->
    [n*k1, c*k2]. A matrix [n, c] stays as it is."""
    n, c, k1, k2 = (*kernel.shape, 1, 1)[:4]  # a matrix is like a kernel of 1 x 1 pixel
    return kernel.reshape(n, c, k1, k2).transpose(1, 2).reshape(n * k1, c * k2)


def prox_nuclear(net, v, tau, map=map):
    """Returns line 7's w [d] and the ranks [L] of its pi(w_l). w is the argmin of tau * sum over
    layers l of ||pi(w_l)||_* + ||w - v||^2 / 2, where ||.||_* is the sum of the singular values."""
    if not v.isfinite().all():
        return v, full_ranks(net)  # a run that diverged; SVDs of such matrices fail
    parts, layers = list(v.split(net.sizes)), matrices(net)  # parts: one for each tensor of w

    def shrink(layer):
        place, shape = layer[0], net.tensors[layer[0]][2]
        U, s, Vh = torch.linalg.svd(pi(parts[place].view(shape)).double(), full_matrices=False)
        s = soft(s, tau)  # singular values up to tau become 0, so the rank falls
        return pi_inverse((U * s) @ Vh, shape).to(v).flatten(), (s > 0).sum()

    found = list(map(shrink, layers))  # D5
    for (place, *_), (part, _) in zip(layers, found):
        parts[place] = part
    return torch.cat(parts), torch.stack([rank for _, rank in found])


def local_training(net, args):
    """Returns client_update(w, gamma, p, epochs, eta): lines 8-15 and 17-20 for one client."""
    decay = args.weight_decay * net.decayed  # [d] (D3)

    @common.step
    def step_w(w, gamma, w_t, b, eta):  # [d] each
        def loss(w):
            return common.cross_entropy(net(w, b.x), b)

        g = common.grad(loss)(w)  # l.12
        h = g - gamma + 1 / args.eta_g * (w - w_t) + decay * w  # l.13 (D3)
        return w - eta * h  # l.14

    @common.step
    def step_p(p, w_t, b, eta):  # [d] each
        def loss(p):
            return common.cross_entropy(net(w_t + p, b.x), b)

        g = common.grad(loss)(p)  # l.19 (D4)
        return soft(p - eta * (g + decay * p), eta * args.mu)  # l.20 (D3, D5)

    def client_update(w, gamma, p, epochs, eta):  # l.8
        w_t = w  # l.9: Phase I, w = w^t
        for minibatches in epochs:  # l.10
            for b in minibatches:  # l.11: step_w does lines 12-14
                w = step_w(w, gamma, w_t, b, eta)
        for minibatches in epochs(epochs=args.fusion_epochs, order=1):  # l.17: Phase II, reshuffled
            for b in minibatches:  # l.18: step_p does lines 19 and 20
                p = step_p(p, w_t, b, eta)
        return w, p  # l.15: w_i goes to the server; p_i stays

    return client_update


def main(argv=None):
    args = arguments(argv)
    federation = common.Federation(args)
    run = common.Run(__file__, federation)
    net, M = federation.net, federation.K
    client_update = local_training(net, args)

    w_0 = federation.initial_weights()  # l.1: w^0, [d]
    state = State(w=w_0, ranks=full_ranks(net), numbers=net.d,  # numbers: w^t's size (D6)
                  gamma=federation.per_client(torch.zeros_like(w_0)),  # l.1: [M, d]
                  p=federation.per_client(first_p(net, args, w_0)))  # l.1 (D1): [M, d]
    for t in run.rounds(state, clients=lambda S: state.w + state.p[S]):  # l.2
        S = federation.sample(t)  # l.3: max(C*M, 1) random clients (D2)
        w_t = state.w.expand(len(S), -1)  # [m, d]
        # state.p.of(S) is state.p[S], but a client's row is fetched only when its turn comes
        w_i, p_i = federation.train(client_update, S, t, shared=[federation.eta(t)],
                                    own=[w_t, state.gamma.of(S), state.p.of(S)])  # l.4-5: [m, d]
        for j, i in enumerate(S):  # one by one, to save memory
            state.gamma[i] += 1 / args.eta_g * (state.w - w_i[j])  # l.6, l.16: one copy serves both
        gamma_mean = federation.sum(state.gamma) / M  # of all M clients
        v = federation.mean(w_i) - args.eta_g * gamma_mean  # l.7: not weighted (D2): [d]
        del w_i
        tau = args.lambda_ * args.eta_g
        state.w, state.ranks = prox_nuclear(net, v, tau, federation.map)  # l.7
        state.p[S] = p_i  # l.20
        del p_i
        run.sent(up=len(S) * net.d, down=len(S) * state.numbers)  # w_i up, w^t down (D6)
        state.numbers = count_factors(net, state.ranks)  # D6
        if run.evaluates():
            run.log(federation.evaluate(state.w), **measures(federation, state))
    finish(run)
    return run.record()


# --------------------------------------------------------------------------------------------------
# Around it

# The settings of Table 1, Non-IID, for all three data sets
DEFAULTS = dict(split="fedslr", alpha=0.1, clients=100, client_test=0.0, fraction=0.1,  # D7, D8
                rounds=1000, epochs=2, batch_size=20, lr=0.1, lr_decay=0.998, weight_decay=1e-3,
                model="resnet18", transform="fedslr", eval_every=20)
BY_DATASET = {
    # ours, for a quick look
    "shapes": dict(rounds=20, epochs=1, clients=20, fraction=0.5, model="cnn", lr=0.05,
                   transform="normalize", eval_every=5, lambda_=2e-3),
}


def arguments(argv):
    parser = common.parser(__doc__, **DEFAULTS)
    own = parser.add_argument_group("FedSLR")
    own.add_argument("--lambda", dest="lambda_", type=common.nonnegative, default=1e-4,
                     help="lambda, the low-rank penalty")
    own.add_argument("--mu", type=common.nonnegative, default=1e-3, help="mu, the L1 penalty")
    own.add_argument("--eta-g", type=common.positive, default=10.0,
                     help="eta_g, the proximal step size; 1/eta_g is FedDyn's alpha")
    own.add_argument("--fusion-epochs", type=common.nonnegative_int, default=1,
                     help="epochs of Phase II")
    own.add_argument("--p-start", choices=("zero", "copy"),
                     help="p_i of line 1: 0, or a copy of w^0 (D1; default: copy with resnet18, "
                          "else zero)")
    args = common.parse(parser, BY_DATASET, argv)
    args.p_start = args.p_start or ("copy" if args.model == "resnet18" else "zero")  # D1
    if args.momentum:
        common.refuse("FedSLR has no momentum; use --momentum 0")
    return args


# Matrices


def matrices(net):
    """Returns [L] triples, one for each kernel or matrix: its place among the model's tensors, and
    its pi's rows and columns."""
    shapes = [(l, (*shape, 1, 1)) for l, (_, _, shape) in enumerate(net.tensors) if len(shape) > 1]
    return [(l, n * k1, c * k2) for l, (n, c, k1, k2, *_) in shapes]


def full_ranks(net):
    """Returns [L]: the largest ranks that the pi(w_l) can have."""
    ranks = [min(rows, columns) for _, rows, columns in matrices(net)]
    return torch.tensor(ranks, device=net.device)


def first_p(net, args, w):
    """Returns p_i of line 1: 0, or w^0's kernels and matrices, with 0 elsewhere (D1)."""
    in_matrices = net.per_weight([float(len(shape) > 1) for _, _, shape in net.tensors])
    return in_matrices * w if args.p_start == "copy" else torch.zeros_like(w)


def pi_inverse(matrix, shape):
    """Returns the kernel of the given shape whose pi is the matrix."""
    n, c, k1, k2 = (*shape, 1, 1)[:4]
    return matrix.reshape(n, k1, c, k2).transpose(1, 2).reshape(shape)


def count_factors(net, ranks):
    """Returns how many weights are sent for a model whose pi(w_l) have these ranks [L]. A matrix is
    sent whole or as two factors, whichever takes fewer."""
    sizes = list(net.sizes)
    for (l, rows, columns), rank in zip(matrices(net), ranks.tolist()):
        sizes[l] = min(rows * columns, rank * (rows + columns))  # D6
    return sum(sizes)


# Measuring and printing


def measures(federation, state):
    """Returns the GKR's and the mixed models' sizes and results on test images, and w's ranks."""
    nonzeros = [float(state.p[i].count_nonzero()) for i in federation.rows()]
    mixed = torch.tensor(nonzeros, dtype=torch.double, device=state.w.device)
    mixed = state.numbers + federation.gather(mixed)  # [M]
    std = float(mixed.std()) if len(mixed) > 1 else 0.0
    net = federation.net
    names = [net.names[l].removesuffix(".weight") for l, _, _ in matrices(net)]
    return {
        "personal": federation.evaluate_clients(lambda S: state.w + state.p[S]),  # D4
        "gkr": common.without_clients(federation.evaluate_clients(state.w)),
        "numbers": {"gkr": state.numbers, "mixed": float(mixed.mean()), "mixed_std": std},
        "ranks": dict(zip(names, state.ranks.tolist())),
    }


def finish(run):
    """Prints both models' results and the ranks; with --plot draws ranks.png."""
    history, full = run.record()["rounds"], full_ranks(run.federation.net).tolist()
    rows = [row for row in history if "gkr" in row]
    columns = ("mean", "std", "worst_decile", "loss")
    titles = "".join(f"{name:>14}" for name in (*columns, "10^6 numbers"))
    common.say(f"\n{'model':<12}{'round':>8}{titles}")
    for name, part, model in (("GKR", "gkr", "gkr"), ("mixed", "personal", "mixed")):
        best = max(rows, key=lambda row: row[part]["mean"])
        for when, row in (("last", rows[-1]), ("best", best)):
            values = [*(row[part][key] for key in columns), row["numbers"][model] / 1e6]
            common.say(f"{name + ', ' + when:<12}{row['round']:>8}"
                       + "".join(f"{value:>14.4f}" for value in values))
    ranks = rows[-1]["ranks"]
    common.say("ranks   " + ", ".join(f"{name} {rank}/{most}"
                                      for (name, rank), most in zip(ranks.items(), full)))
    if not run.args.plot:
        return
    rounds, title = [row["round"] for row in rows], f"FedSLR, {common.setting(run.record())}"
    with common.drawing(run.out / "ranks.png", 1, 3, (15, 4.5), title) as axes:
        for part, label, style in (("gkr", "GKR", "k--"), ("personal", "mixed", "k-")):
            axes[0].plot(rounds, [row[part]["mean"] for row in rows], style, label=label)
        for i, (name, most) in enumerate(zip(ranks, full)):  # there are seven colours
            axes[1].plot(rounds, [row["ranks"][name] / most for row in rows],
                         ["-", "--", ":"][i // 7 % 3], label=name)
        bytes_down = [row["bytes_down"] / 1e6 for row in history]
        axes[2].plot([row["round"] for row in history], bytes_down, "k-")
        labels = "accuracy, mean over clients", "rank / full rank", "MB down per round"
        for axis, label in zip(axes, labels):
            axis.set(xlabel="round", ylabel=label, ylim=(0, None))


if __name__ == "__main__":
    main()
