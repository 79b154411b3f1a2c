"""FedSLR. Huang, Shen, Sun, Lin, Tao, "Fusion of Global and Local Knowledge for Personalized
Federated Learning", TMLR 2023, arXiv 2302.11051. Algorithm 2 is reconstructed from the text.

    python fedslr.py --dataset cifar10    Table 1, Non-IID; the paper: GKR .8752, mixed .9530
    --model cnn: ours .7449 and .9130     results/fedslr/cifar10-cnn-1000-rounds

All share w (GKR, global knowledge); lambda lowers its rank. Client i keeps p_i; mu makes it sparse.
"gkr" tests w on i's images, "personal" w + p_i (mixed). docs/fedslr.md explains D7, D8 and these:

    D1  Line 1: p_i starts at 0, in resnet18 at w^0's kernels and matrices (authors' code).
    D2  Line 3 rounds C*M down (authors' code: each joins with probability C). Line 7: plain means.
    D3  Lines 13, 20: weight decay adds 1e-3 times w or p_i to g. eta is --lr times .998^t.
    D4  Line 19 keeps w^t fixed. "personal" tests w^{t+1} + p_i of all clients, not of S_t alone.
    D5  Line 7 shrinks matrices and (by pi) kernels, no vectors. Line 20 shrinks all of p_i.
    D6  Per matrix the server sends min(rows*columns, rank*(rows+columns)) weights; a client w_i.

f_i: client i's loss; w_l: layer l of w; [d]: a model's d weights. Phase II runs before line 15.

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
"""

from types import SimpleNamespace as State

import torch

import common


def first_p(net, args, w):
    """Returns p_i of line 1: 0, or w^0's kernels and matrices, with 0 elsewhere (D1)."""
    places = matrix_places(net)
    in_matrices = net.per_weight([float(l in places) for l in range(len(net.shapes))])
    return in_matrices * w if args.p_start == "copy" else torch.zeros_like(w)  # l.1


def soft(x, tau):
    """Returns sign(x) * max(|x| - tau, 0): x's entries move towards 0 by tau and stop at 0."""
    return x - x.clamp(-tau, tau)


def local_training(net, args):
    """Returns client_update(w, gamma, p, epochs, eta): lines 8-15 and 17-20 for one client.
    `epochs` yields E passes over its images, each cut into minibatches b (common.Epochs)."""
    decay = args.weight_decay * net.decayed  # [d], as in fedavg.py (D3)

    @common.step  # on a GPU it runs for all clients at once, or as a CUDA graph
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
        w_t = w  # l.9: Phase I; w is w^t
        for minibatches in epochs:  # l.10
            for b in minibatches:  # l.11: step_w does lines 12-14
                w = step_w(w, gamma, w_t, b, eta)
        # l.17: Phase II, with other shuffling
        for minibatches in epochs.again(epochs=args.fusion_epochs, order=1):
            for b in minibatches:  # l.18: step_p does lines 19 and 20
                p = step_p(p, w_t, b, eta)
        return w, p  # l.15: w_i goes to the server; p_i stays

    return client_update


def dimensions(shape):
    """Returns how many outputs n, inputs c and pixels k1 x k2 a kernel of this shape has. A matrix
    [n, c] is like a kernel of 1 x 1 pixel."""
    if len(shape) > 4:
        common.refuse(f"a parameter has the shape {[*shape]}; FedSLR takes kernels and matrices")
    return (*shape, 1, 1)[:4]


def pi(kernel):
    """Returns a kernel as a matrix: [n, c, k1, k2] -> [n*k1, c*k2]. A matrix stays as it is."""
    n, c, k1, k2 = dimensions(kernel.shape)
    return kernel.reshape(n, c, k1, k2).transpose(1, 2).reshape(n * k1, c * k2)


def pi_inverse(matrix, shape):
    """Returns the kernel of the given shape whose pi is the matrix."""
    n, c, k1, k2 = dimensions(shape)
    return matrix.reshape(n, k1, c, k2).transpose(1, 2).reshape(shape)


def shrink(v_l, tau):
    """Returns line 7's w_l for one kernel or matrix v_l, the argmin of tau * ||pi(w_l)||_* +
    ||w_l - v_l||^2 / 2, and the rank of pi(w_l). ||.||_* is the sum of the singular values."""
    if v_l.is_cuda:
        return shrink_on_gpu(v_l, tau)
    U, s, Vh = torch.linalg.svd(pi(v_l).double(), full_matrices=False)
    s = soft(s, tau)  # l.7: singular values up to tau become 0, so the rank falls
    return pi_inverse((U * s) @ Vh, v_l.shape).to(v_l), (s > 0).sum()


def prox_nuclear(net, v, tau, map=map):
    """Returns line 7's w [d], and the ranks [L] of its kernels and matrices. map: Python's map, or
    one that uses several threads."""
    if not v.isfinite().all():
        return v, full_ranks(net)  # a run that diverged; SVDs of such matrices fail
    parts = [part.view(shape) for part, shape in zip(v.split(net.sizes), net.shapes)]
    layers, ranks = matrix_places(net), []  # D5
    for l, (w_l, rank) in zip(layers, map(lambda l: shrink(parts[l], tau), layers)):
        parts[l] = w_l
        ranks.append(rank)
    return torch.cat([part.flatten() for part in parts]), torch.stack(ranks)


def matrix_places(net):
    """Returns [L]: the places of w's kernels and matrices among its tensors. The others are
    vectors: biases, and what normalisations scale and shift by."""
    return [l for l, (name, _, shape) in enumerate(net.tensors) if net.is_kernel(name, shape)]


def size_in_factors(net, ranks):
    """Returns how many weights the server sends for a w whose pi(w_l) have these ranks [L]: a
    matrix whole or as two factors, whichever takes fewer (D6)."""
    sizes = list(net.sizes)
    for l, rank in zip(matrix_places(net), ranks.tolist()):
        n, c, k1, k2 = dimensions(net.shapes[l])
        rows, columns = n * k1, c * k2
        sizes[l] = min(rows * columns, rank * (rows + columns))
    return sum(sizes)


def main(argv=None):
    args = arguments(argv)
    federation = common.Federation(args)
    run = common.Run(__file__, federation)
    net, M = federation.net, federation.K
    client_update = local_training(net, args)

    w_0 = federation.initial_weights()  # l.1: w^0, [d]
    state = State(w=w_0, ranks=full_ranks(net), size=net.d,  # size: of w^t as sent (D6)
                  gamma=federation.per_client(torch.zeros_like(w_0)),  # l.1: [M, d], dual variables
                  p=federation.per_client(first_p(net, args, w_0)))  # l.1 (D1): [M, d]
    for t in run.rounds(state, clients=lambda S: state.w + state.p[S]):  # l.2
        m = max(int(args.fraction * M + 1e-9), 1)  # l.3 (D2)
        S = federation.sample(t, m)  # l.3: [m]
        w_t = state.w.expand(m, -1)  # [m, d]
        # for each client of S, train calls client_update with its rows of `own`, its epochs and
        # what is shared. state.p.of(S) is state.p[S], each row fetched only when needed
        w_i, p_i = federation.train(client_update, S, t, shared=[federation.eta(t)],
                                    own=[w_t, state.gamma.of(S), state.p.of(S)])  # l.4-5: [m, d]
        for j, i in enumerate(S):  # one by one, to save memory
            state.gamma[i] += 1 / args.eta_g * (state.w - w_i[j])  # l.6, l.16: one copy serves both
        v = w_i.mean(0) - args.eta_g * (state.gamma.sum(0) / M)  # l.7: not weighted (D2): [d]
        del w_i
        tau = args.lambda_ * args.eta_g  # l.7
        state.w, state.ranks = prox_nuclear(net, v, tau, federation.training.map)  # l.7
        state.p[S] = p_i  # p_i stays with client i
        del p_i
        run.sent(up=m * net.d, down=m * state.size)  # w_i up, w^t down (D6)
        state.size = size_in_factors(net, state.ranks)
        if run.evaluates():
            run.log(federation.evaluate(state.w), **measures(federation, state))
    return run.record()


# --------------------------------------------------------------------------------------------------
# Around it

# The settings of Table 1, Non-IID, for all three data sets
DEFAULTS = dict(split="fedslr", alpha=0.1, clients=100, client_test=0.0, fraction=0.1,
                rounds=1000, epochs=2, batch_size=20, lr=0.1, lr_decay=0.998, weight_decay=1e-3,
                model="resnet18", transform="fedslr", eval_every=20)
BY_DATASET = {
    # ours, for a quick look
    "shapes": dict(rounds=20, epochs=1, clients=20, fraction=0.5, model="cnn", lr=0.05,
                   transform="normalize", eval_every=5, lambda_=2e-3),
}


def arguments(argv):
    parser = common.parser(__doc__, **DEFAULTS)
    group = parser.add_argument_group("FedSLR")
    group.add_argument("--lambda", dest="lambda_", type=common.nonnegative, default=1e-4,
                       help="lambda, the low-rank penalty")
    group.add_argument("--mu", type=common.nonnegative, default=1e-3, help="mu, the L1 penalty")
    group.add_argument("--eta-g", type=common.positive, default=10.0,
                       help="eta_g, the proximal step size; 1/eta_g is FedDyn's alpha")
    group.add_argument("--fusion-epochs", type=common.nonnegative_int, default=1,
                       help="epochs of Phase II")
    group.add_argument("--p-start", choices=("zero", "copy"),
                       help="p_i of line 1: 0, or a copy of w^0 (D1; default: copy with resnet18, "
                          "else zero)")
    args = common.parse(parser, BY_DATASET, argv)
    args.p_start = args.p_start or ("copy" if args.model == "resnet18" else "zero")  # D1
    if args.momentum:
        common.refuse("FedSLR has no momentum; use --momentum 0")
    return args


def shrink_on_gpu(v_l, tau):
    """Returns what `shrink` returns, from the eigenvalues of A A^T, which a GPU computes faster
    than A's SVD. A is pi(v_l) or its transpose, whichever has fewer rows."""
    A = pi(v_l).double()
    wide = A if A.shape[0] <= A.shape[1] else A.T
    squares, U = torch.linalg.eigh(wide @ wide.T)
    s = squares.clamp(min=0).sqrt()  # the singular values
    shrunk_s = soft(s, tau)
    shrunk = (U * (shrunk_s / s.clamp(min=1e-300))) @ (U.T @ wide)
    shrunk = shrunk if wide is A else shrunk.T
    return pi_inverse(shrunk, v_l.shape).to(v_l), (shrunk_s > 0).sum()


def full_ranks(net):
    """Returns [L]: the largest ranks that the pi(w_l) can have."""
    shapes = [pi(torch.empty(net.shapes[l], device="meta")).shape for l in matrix_places(net)]
    return torch.tensor([min(shape) for shape in shapes], device=net.device)


def measures(federation, state):
    """Returns the GKR's and the mixed models' sizes and results on test images, and w's ranks."""
    nonzeros = [float(state.p[i].count_nonzero()) for i in federation.everyone]
    mixed = state.size + torch.tensor(nonzeros, dtype=torch.double)  # [M]
    std = float(mixed.std()) if len(mixed) > 1 else 0.0
    names = [federation.net.names[l].removesuffix(".weight") for l in matrix_places(federation.net)]
    return {
        "personal": federation.evaluate_clients(lambda S: state.w + state.p[S]),  # D4
        "gkr": common.without_clients(federation.evaluate_clients(state.w)),
        "numbers": {"gkr": state.size, "mixed": float(mixed.mean()), "mixed_std": std},
        "ranks": dict(zip(names, state.ranks.tolist())),
    }


if __name__ == "__main__":
    main()
