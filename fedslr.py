"""FedSLR: one low-rank model for all clients plus a sparse one for each, from Huang, Shen, Sun, Lin, Tao, "Fusion of Global and
Local Knowledge for Personalized Federated Learning", TMLR 2023.

    python fedslr.py --dataset cifar10        (Table 1, CIFAR-10, Non-IID; published: GKR .8752, mixed .9530)
    python fedslr.py --dataset cifar100       (Table 1, CIFAR-100, Non-IID; published: GKR .6422, mixed .8219)

Ours on a CPU, with --model cnn --rounds 60 --lambda 1e-3 instead of ResNet-18, 1000 rounds and 1e-4 (seed 0, 7 minutes):
    results/fedslr/cifar10-cnn: GKR 0.4976, mixed 0.8242

Models of one shape: w, the server's, the paper's "global knowledge representation" (GKR), whose kernels are matrices of low
rank; p_i, the sparse personal component of client i, which never leaves it; and their sum w + p_i, the mixed model. "global"
is w on the central test images; "gkr" the same w on each client's own test images, which is what the paper's tables call GKR;
"personal" is the mixed model w + p_i on client i's own test images. With the default --client-test 0 these are drawn from the
central ones with the client's class shares. `numbers` counts what the two models take, `ranks` are those of w's matrices,
`latency` is Table 9's. Rounds count from 0 here, from 1 in what the program prints.

The paper's Algorithm 2, which is Algorithm 1 with a random sample of the clients in each round, in our words; our copy of the
paper has lost the listings and the formulas, which are restored from its text and the authors' code. M clients (K in the code,
where m are sampled), f_i the loss of client i; pi makes a matrix of n*k1 rows and c*k2 columns from a kernel of n outputs, c
inputs and k1 x k2 pixels; ||.||_* is the sum of the singular values; soft(x, tau) = sign(x) * max(|x| - tau, 0).

    Server
     1  choose w^0; for every client i: gamma_i = 0, p_i = 0
     2  for each round t = 0, 1, ..., T-1:
     3      S_t = C*M random clients
     4      for each client i in S_t, in parallel:
     5          w_i = ClientUpdate(i, w^t)
     6          gamma_i = gamma_i + (w^t - w_i) / eta_g, here and at the client; the others' gamma_i stay                 (5)
     7      v = (mean over S_t of w_i) - eta_g * (mean over all M clients of gamma_i)
     8      w^{t+1} = argmin over w of lambda*eta_g * sum over layers l of ||pi(w_l)||_* + ||w - v||^2 / 2                (6)
                    = v with soft(s, lambda*eta_g) in place of the singular values s of every pi(v_l)
    ClientUpdate(i, w^t)
     9  Phase I: from w = w^t, for each of E local epochs, for each minibatch b:
    10      w = w - eta * gradient of  f_i(w; b) - <gamma_i, w> + ||w - w^t||^2 / (2 eta_g)                               (4)
    11  w_i = w
    12  Phase II: for each fusion epoch, for each minibatch b:
    13      p_i = soft(p_i - eta * gradient by p_i of f_i(w^t + p_i; b), eta*mu)                                          (7)
    14  keep gamma_i and p_i, return w_i to the server
    Algorithm 3 (--memory-efficient): the server keeps only the mean of all gamma_i, and its line 6 adds to this mean the
    changes of gamma_i for i in S_t, summed and divided by M. Every client keeps its own gamma_i, which line 10 needs. (In this
    program all of them lie in one machine all the same; the saving is the server's.)

Deviations. "Official" is the authors' code (github huangtiansheng/fedslr). Effects are not measured unless stated. "Does not
say" means: in what is left of our copy.
    D1  Line 1: the paper does not say where p_i starts. Here it is 0. Officially it is a copy of w^0, but for GroupNorm's
        scales and shifts, so that the mixed model starts at twice w^0; --p-start copy copies kernels and matrices, no biases.
        Measured (CIFAR-10, --model cnn, which has no normalisation): a copy diverges in the first round, with --lr .03 in the
        7th; from 0 it learns with both (results/fedslr). With ResNet-18's GroupNorm it is not measured.
        Where w becomes 0, too (Table 7's lambda = 10), no layer passes anything on, and p_i hardly moves: use --p-start copy
        there.
    D2  Line 3: officially every client tosses a coin with C, again if none comes. Here C*M clients as the paper says, rounded
        down.
    D3  Lines 10 and 13: the paper's weight decay is part of "the local solver". As officially, 1e-3 * w is added to the
        gradient of line 10 and 1e-3 * p_i to that of line 13, and eta is multiplied by .998 every round. T = 1000 is the
        official default; the paper does not say.
    D4  Line 13 trains p_i beside w^t, the model at the start of the round (Remark 3; officially too). "personal" uses w^{t+1},
        for all clients; a client that was never sampled has the p_i of line 1, as officially.
    D5  Line 8: biases and the scales and shifts of GroupNorm are no matrices and aren't shrunk, as officially; the paper names
        kernels and matrices only. Line 13 shrinks all of p_i, as (7) does.
    D6  Counting. A matrix counts as the smaller of rows*columns and rank*(rows+columns), the mixed model as w and the
        non-zeros of p_i. A round sends m w_i up, dense, and m w^t down, counted so: w^0 to w^{T-1}, officially w^1 to w^T. In
        the paper's Table 2 the uplink and 893.92 GB are those of ResNet-18 for 10 classes (11,173,952 weights) for every data
        set; the downlink seems to be each network's own. Here both are each network's own.
    D7  A client's test images are floor(100 * share) of each class, or all there are, as officially; that is fewer than the
        paper's 100 (about 98 on CIFAR-10). With --split iid Tiny ImageNet's clients get too few in this way: use --client-test
        .2, with which they train on .8 of their images; officially they are tested on up to 500. Tiny ImageNet's pixels are
        standardised by the training images' values, officially by .5 and .5. Whether published numbers are of the last or of
        the best round is not known. `best` is for personal; the table printed at the end has GKR's best round, too.
    D8  Appendix A.2; lpgd and gpgd have neither gamma_i nor the quadratic term. lpgd: line 8's argmin with lambda*eta follows
        every step of line 10, and the server takes the plain mean. A mean of low-rank matrices isn't of low rank: ranks are
        recorded as full, and all bytes counted dense (the w_i that go up are of low rank, in which the appendix sees a gain).
        gpgd: the plain mean, then line 8's argmin with lambda*eta_g; the paper's step size is lost.
    D9  Appendix A.3, s+s: line 8 is soft(v, lambda*eta_g) for the same kernels and matrices, and what it leaves is counted as
        p_i is: non-zeros alone, without their positions; the ranks of w are not computed, but recorded as full. S+LR and
        LR+LR, which the paper calls too slow, are not offered.
    D10  Data and model. alpha = .1 is per class, as officially; the paper cites Hsu et al., whose .1 is .1/classes per class.
        A class that is used up is dealt out again, as officially, so that clients share images. The paper has ResNet-18 with
        GroupNorm; the number of its groups, 2, a last layer without bias (up to 32x32), flip and crop are the official code's.
        Evaluated every 20th round, officially every 5th: `best` chooses among fewer.
"""

import os
import pathlib
import statistics
from types import SimpleNamespace as State

import torch
import torch.nn.functional as F

import common

# Table 1, Non-IID, all three data sets (D3).
DEFAULTS = dict(split="fedslr", alpha=0.1, clients=100, client_test=0.0, fraction=0.1, rounds=1000, epochs=2,  # D7, D10
                batch_size=20, lr=0.1, lr_decay=0.998, weight_decay=1e-3, model="resnet18", transform="fedslr", eval_every=20)
BY_DATASET = {
    # ours, for a quick look
    "shapes": dict(rounds=30, clients=20, fraction=0.5, model="cnn", transform="scale", eval_every=5, lambda_=5e-3),
}


def soft(x, tau):
    return x.sign() * (x.abs() - tau).clamp(min=0)


# Kernels as matrices


def pi(kernel):
    """[n, c, k1, k2] -> [n*k1, c*k2]; a matrix [n, c] stays."""
    n, c, k1, k2 = (*kernel.shape, 1, 1)[:4]
    return kernel.reshape(n, c, k1, k2).transpose(1, 2).reshape(n * k1, c * k2)


def pi_inverse(matrix, shape):
    n, c, k1, k2 = (*shape, 1, 1)[:4]
    return matrix.reshape(n, k1, c, k2).transpose(1, 2).reshape(shape)


def matrices(net):
    """(number of the tensor, rows, columns of its pi) for everything that line 8 shrinks: L matrices."""
    shapes = [(i, (*shape, 1, 1)) for i, (_, _, shape) in enumerate(net.tensors) if len(shape) > 1]  # D5
    return [(i, n * k1, c * k2) for i, (n, c, k1, k2, *_) in shapes]


def in_matrices(net):
    """[d]: 1 for every weight that is in one of the matrices."""
    return net.per_weight([float(len(shape) > 1) for _, _, shape in net.tensors])


def full_ranks(net):
    return torch.tensor([min(rows, columns) for _, rows, columns in matrices(net)], device=net.decayed.device)  # [L]


def count(net, ranks):
    """Numbers in a model whose matrices have these ranks [L]: a matrix has the smaller of rows*columns and of its factors."""
    sizes = list(net.sizes)
    for (i, rows, columns), rank in zip(matrices(net), ranks.tolist()):
        sizes[i] = min(rows * columns, rank * (rows + columns))  # D6
    return sum(sizes)


def prox_nuclear(net, v, tau):
    """Line 8's argmin for lambda*eta_g = tau: w [d], and the ranks [L] of its matrices. Matrices of equal shape go as a batch.

    A = U diag(s) V' becomes A V diag(soft(s, tau)/s) V', in float64; V and s^2 are the eigenvectors and eigenvalues of A'A (of
    AA' if A is wide). An SVD in float32 takes as long on a CPU, with many times the rounding error. If tau = 0, singular values
    below 1e-8 of the largest are only rounding: whether they count towards the rank is chance.
    """
    parts, ranks, together = list(v.split(net.sizes)), {}, {}
    for i, rows, columns in matrices(net):
        together.setdefault((rows, columns), []).append(i)
    for (rows, columns), group in together.items():
        A = torch.stack([pi(parts[i].view(net.tensors[i][2])) for i in group])  # [b, rows, columns]
        tall = torch.nan_to_num(A if rows >= columns else A.mT, 0, 0, 0).double()
        squares, V = torch.linalg.eigh(tall.mT @ tall)
        s = squares.clamp(min=0).sqrt()  # [b, smaller side]
        shrunk = soft(s, tau)  # l.8
        low = (tall @ (V * (shrunk / s.clamp(min=1e-300))[:, None]) @ V.mT).to(A)
        low = (low if rows >= columns else low.mT) + (A - A)  # A - A: 0 or, where a run diverges, not a number
        for i, matrix, kept in zip(group, low, shrunk > 0):
            parts[i], ranks[i] = pi_inverse(matrix, net.tensors[i][2]).flatten(), kept.sum()
    return torch.cat(parts), torch.stack([ranks[i] for i in sorted(ranks)])


# The algorithm


def inverse_step(args):
    """1/eta_g; 0 for the alternatives that have neither gamma_i nor the quadratic term."""
    return 0.0 if args.variant in ("lpgd", "gpgd") else 1 / args.eta_g  # D8


def phase_one(net, args):
    """Line 10, for one client and one minibatch."""
    decay = args.weight_decay * net.decayed  # [d] (D3)
    pull = inverse_step(args)

    def step(client, batch, eta, w_t):
        w, gamma = client  # [d] each
        g = common.grad(lambda w: common.cross_entropy(net(w, batch.x), batch))(w)  # [d]
        w = w - eta * (g - gamma + pull * (w - w_t) + decay * w)  # l.10
        if args.variant == "lpgd":
            w, _ = prox_nuclear(net, w, args.lambda_ * eta)  # D8
        return w, gamma

    return step


def phase_two(net, args):
    """Line 13, for one client and one minibatch."""
    decay = args.weight_decay * net.decayed  # [d] (D3)

    def step(p, batch, eta, w_t):
        g = common.grad(lambda p: common.cross_entropy(net(w_t + p, batch.x), batch))(p)  # [d] (D4)
        return soft(p - eta * (g + decay * p), eta * args.mu)  # l.13 (D5)

    return step


def server_step(net, args, v):
    """Line 8: v [d] -> w [d], the ranks [L] of its matrices, and how many numbers it takes."""
    tau = args.lambda_ * args.eta_g
    if args.variant == "lpgd":
        return v, full_ranks(net), net.d  # D8
    if args.variant == "s+s":
        w = soft(v, tau * in_matrices(net))  # D9
        return w, full_ranks(net), int((w != 0).sum())
    w, ranks = prox_nuclear(net, v, tau)  # l.8
    return w, ranks, count(net, ranks)  # D6


# The factorised model


def export(path, net, w, ranks):
    """Writes w [d] to a file; a matrix with more numbers than its factors as these: kernels [n, r, k1, 1] and [r, c, 1, k2]."""
    parts = {name: w[where].view(shape).cpu().clone() for name, where, shape in net.tensors}
    for (i, rows, columns), r in zip(matrices(net), ranks.tolist()):
        name, _, shape = net.tensors[i]
        n, c, k1, k2 = (*shape, 1, 1)[:4]
        if r * (rows + columns) < rows * columns:
            U, s, Vh = torch.linalg.svd(pi(parts[name]), full_matrices=False)
            tall, wide = U[:, :r] * s[:r].sqrt(), s[:r, None].sqrt() * Vh[:r]  # [n*k1, r], [r, c*k2]
            parts[name] = [tall.view(n, k1, r).transpose(1, 2)[..., None].contiguous(), wide.reshape(r, c, 1, k2)]
    torch.save({"model": net.name, "classes": net.classes, "tensors": parts}, path)


class Factorised(common.Weights):
    """logits = model(x) from a file of --export: each pair of factors is two layers, with r channels in between."""

    def __init__(self, path, device="cpu"):
        super().__init__()
        self.file = torch.load(path, map_location=device, weights_only=True)

    def __call__(self, x):
        return common.MODELS[self.file["model"]](self, x, self.file["classes"])

    def take(self, name, shape, init):
        part = self.file["tensors"][name]
        return part if torch.is_tensor(part) else torch.einsum("nrax,rcyb->ncab", *part).reshape(shape)

    def conv(self, name, x, out, kernel, stride=1, padding=0, groups=1, init=None, bias=True):
        part = self.file["tensors"][name + ".weight"]
        if torch.is_tensor(part) or groups > 1 or not len(part[1]):  # grouped, or of rank 0: multiplied out
            return super().conv(name, x, out, kernel, stride, padding, groups, init, bias)
        x = F.conv2d(x, part[1], None, (1, stride), (0, padding))  # [B, r, h, ...]
        return F.conv2d(x, part[0], self.take(name + ".bias", (out,), None) if bias else None, (stride, 1), (padding, 0))

    def linear(self, name, x, out, init=None, bias=True):
        part = self.file["tensors"][name + ".weight"]
        if torch.is_tensor(part):
            return super().linear(name, x, out, init, bias)
        offset = self.take(name + ".bias", (out,), None) if bias else None
        return F.linear(F.linear(x, part[1].flatten(1)), part[0].flatten(1), offset)


@torch.no_grad()
def milliseconds(model, x, repeats=50):
    """Median time of model(x)."""
    times = []
    for _ in range(repeats + 10):
        start = common.now(x.device)
        model(x)
        times.append(1000 * (common.now(x.device) - start))
    return round(statistics.median(times[10:]), 3)


def latency(federation, w, path):
    """Table 9's measure, for 20 test images: milliseconds of w as it is and as exported."""
    x = federation.transform(federation.images[federation.data.train :][:20])
    dense, factorised = (lambda x: federation.net(w, x)), Factorised(path, federation.device)
    return {"dense_ms": milliseconds(dense, x), "factorised_ms": milliseconds(factorised, x)}


# The run


def measure(federation, state):
    """Measures of the GKR and of the mixed model on the clients' images, and what they are made of."""
    gkr = federation.evaluate_clients(state.w)
    mixed = state.numbers + federation.gather((state.p.all != 0).sum(1).double())  # [K] (D6)
    std = float(mixed.std()) if federation.K > 1 else 0.0
    names = [federation.net.tensors[i][0].removesuffix(".weight") for i, _, _ in matrices(federation.net)]
    return {
        "personal": federation.evaluate_clients(lambda S: state.w + state.p[S]),  # D4
        "gkr": common.without_clients(gkr),
        "numbers": {"gkr": state.numbers, "mixed": float(mixed.mean()), "mixed_std": std},
        "ranks": dict(zip(names, state.ranks.tolist())),
    }


def show(run):
    """Prints the two models side by side and the ranks; with --plot draws ranks.png."""
    history = run.record()["rounds"]
    rows = [row for row in history if "gkr" in row]
    full = full_ranks(run.federation.net).tolist()
    columns = ("mean", "std", "worst_decile", "loss")
    print(f"\n{'model':<8}{'round':>8}" + "".join(f"{name:>14}" for name in (*columns, "10^6 numbers")))
    for name, part, model in (("GKR", "gkr", "gkr"), ("mixed", "personal", "mixed")):
        for row in (rows[-1], max(rows, key=lambda row: row[part]["mean"])):
            values = [*(row[part][key] for key in columns), row["numbers"][model] / 1e6]
            print(f"{name:<8}{row['round']:>8}" + "".join(f"{value:>14.4f}" for value in values))
    sent = sum(row["bytes_up"] + row["bytes_down"] for row in history) / 1e9
    print(f"sent    {sent:.2f} GB up and down in {len(history)} rounds")
    print("ranks   " + ", ".join(f"{name} {rank}/{most}" for (name, rank), most in zip(rows[-1]["ranks"].items(), full)))
    if "latency" in rows[-1]:
        print(f"export  {run.args.export}; " + "{dense_ms} ms dense, {factorised_ms} ms factorised, 20 images".format(
            **rows[-1]["latency"]))
    if not run.args.plot:
        return
    rounds = [row["round"] for row in rows]
    with common.drawing(run.out / "ranks.png", 1, 3, (15, 3.5)) as axes:
        for part, label in (("gkr", "GKR"), ("personal", "mixed")):
            axes[0].plot(rounds, [row[part]["mean"] for row in rows], label=label)
        for name, most in zip(rows[-1]["ranks"], full):
            shade = str(0.8 * list(rows[-1]["ranks"]).index(name) / len(full))  # the first layer is black
            axes[1].plot(rounds, [row["ranks"][name] / most for row in rows], color=shade, label=name)
        axes[2].plot([row["round"] for row in history], [row["bytes_down"] / 1e6 for row in history])
        for axis, label in zip(axes, ("accuracy, mean over clients", "rank / full rank", "MB down per round")):
            axis.set(xlabel="round", ylabel=label, ylim=(0, None))
        axes[0].legend()
        axes[1].legend(fontsize=5)


def arguments(argv):
    parser = common.parser(__doc__, **DEFAULTS)
    own = parser.add_argument_group("FedSLR")
    own.add_argument("--lambda", dest="lambda_", type=common.nonnegative, default=1e-4, help="lambda, low-rank penalty")
    own.add_argument("--mu", type=common.nonnegative, default=1e-3, help="mu, sparse penalty")
    own.add_argument("--eta-g", type=common.positive, default=10.0, help="eta_g, proximal step size; 1/eta_g is FedDyn's alpha")
    own.add_argument("--fusion-epochs", type=common.nonnegative_int, default=1, help="epochs of Phase II")
    own.add_argument("--p-start", choices=("zero", "copy"), default="zero", help="p_i of line 1: 0, or a copy of w^0 (D1)")
    own.add_argument("--variant", choices=("fedslr", "lpgd", "gpgd", "s+s"), default="fedslr",
                     help="lpgd: (6) in every local step; gpgd: FedAvg, then (6); s+s: a sparse w (A.2, A.3; D8, D9)")
    own.add_argument("--memory-efficient", action="store_true", help="Algorithm 3: the server keeps the mean of gamma alone")
    own.add_argument("--export", metavar="FILE", help="write the last w as factors; the last round also times it")
    args = common.parse(parser, BY_DATASET, argv)
    if args.momentum:
        common.refuse("FedSLR has no momentum; use --momentum 0")
    if args.export and not os.access(pathlib.Path(args.export).parent, os.W_OK):
        common.refuse(f"--export {args.export} can't be written: no such folder, or not ours")
    return args


def main(argv=None):
    args = arguments(argv)
    federation = common.Federation(args)
    run = common.Run(__file__, args, federation)
    net, K, device = federation.net, federation.K, federation.device
    one, two, pull = phase_one(net, args), phase_two(net, args), inverse_step(args)

    w = federation.initial_weights()  # l.1: w^0, [d]
    p = in_matrices(net) * w if args.p_start == "copy" else torch.zeros_like(w)  # D1
    gamma = torch.zeros(net.d if pull else 1, device=device)  # l.1: [d]; where there is none (D8), a 0
    state = State(w=w, ranks=full_ranks(net), numbers=net.d, gamma=federation.per_client(gamma), gamma_mean=gamma,
                  p=federation.per_client(p))  # l.1: [K, d] each
    for t, S in run.rounds(state):  # l.2-3: S_t, [m] (D2)
        eta, w_t = federation.eta(t), state.w
        run.sent(up=len(S) * net.d, down=len(S) * state.numbers)  # D6
        start = (w_t.expand(len(S), -1), state.gamma[S])  # [m, d]
        w_i, gamma_i = federation.train(one, start, S, t, eta, w_t)  # l.4-5, l.9, l.11: [m, d]
        # phase=1: minibatches in an order of their own
        p_i = federation.train(two, state.p[S], S, t, eta, w_t, epochs=args.fusion_epochs, phase=1)  # l.12: [m, d]
        change = pull * (w_t - w_i) if pull else gamma_i  # [m, d]; where there is no gamma (D8), its 0
        state.gamma[S] = gamma_i + change  # l.6, l.14
        state.p[S] = p_i  # l.14
        if args.memory_efficient:
            state.gamma_mean = state.gamma_mean + federation.sum(change) / K  # Algorithm 3's l.6: [d]
        else:
            state.gamma_mean = federation.all_reduce(state.gamma.sum()) / K  # l.7: [d]
        v = federation.mean(w_i) - args.eta_g * state.gamma_mean  # l.7: [d]
        state.w, state.ranks, state.numbers = server_step(net, args, v)  # l.8
        if run.evaluates():
            measures = measure(federation, state)
            if args.export and t == args.rounds - 1 and common.is_main_process() and state.w.isfinite().all():
                export(args.export, net, state.w, state.ranks)
                measures["latency"] = latency(federation, state.w, args.export)
            run.log(federation.evaluate(state.w), **measures)
    if args.export and common.is_main_process():  # once more, for --resume of a finished run
        export(args.export, net, state.w, state.ranks)
    show(run)


if __name__ == "__main__":
    main()
