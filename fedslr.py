"""FedSLR. Huang, Shen, Sun, Lin, Tao, "Fusion of Global and Local Knowledge for Personalized Federated Learning", TMLR 2023.

    command                                                      GKR    mixed  time    record
    python fedslr.py --dataset cifar10                           .8752  .9530          published; we ran 20 of its 1,000 rounds
    python fedslr.py --dataset cifar10 --model cnn --rounds 60   .5289  .8342  12 min  results/fedslr/cifar10-cnn-lambda-1e-4

w, the "global knowledge representation" (GKR), is one model for all clients. lambda lowers its rank. p_i is client i's own. mu
makes it sparse. w + p_i is client i's mixed model. Accuracies: "gkr" of w, "personal" of the mixed models, both means over
clients, on their own test images (D7); "global" of w, on all central test images.

Algorithm 2, restored. Of Algorithm 1's lines the text names 7, 14 and 20: here 7, 9 to 14, and 20. (4) to (7): equations. M
clients, a share C in a round; f_i: i's loss; pi(w_l): layer l as a matrix; ||.||_*: sum of singular values; eta_g: step size.

     1  choose w^0; for each client i: gamma_i = 0, p_i = 0 or a copy of w^0
     2  for each round t = 0, 1, ..., T-1:
     3      S_t = max(C*M, 1) random clients
     4      for each client i in S_t, in parallel:
     5          w_i = ClientUpdate(i, w^t)
     6          gamma_i = gamma_i + (w^t - w_i) / eta_g                                                      (5)
     7      v = mean over S_t of w_i - eta_g * mean over all M clients of gamma_i
            w^{t+1} = argmin over w of lambda*eta_g * sum over layers l of ||pi(w_l)||_* + ||w - v||^2 / 2   (6)
     8  ClientUpdate(i, w^t):
     9      Phase I: w = w^t
    10      for each of E local epochs:
    11          for each minibatch b:
    12              g = gradient of f_i(w; b)
    13              h = g - gamma_i + (w - w^t) / eta_g      gradient of (4): f_i(w) - <gamma_i, w> + ||w - w^t||^2 / (2*eta_g)
    14              w = w - eta * h
    15      w_i = w goes to the server
    16      gamma_i = gamma_i + (w^t - w_i) / eta_g, the client's copy of line 6                             (5)
    17      Phase II: for each fusion epoch:
    18          for each minibatch b:
    19              g = gradient by p_i of f_i(w^t + p_i; b)
    20              p_i = soft(p_i - eta * g, eta*mu)                                                        (7)

Choices that change a number, in full in docs/fedslr.md. How to read the code: fedavg.py.
    D1  Line 1: p_i = 0, but with resnet18, mobilenet a copy of w^0's kernels and matrices (authors' code: and biases).
    D2  Line 3: C*M is rounded down; authors' code: each client takes part with probability C. Line 7: clients count alike.
    D3  Lines 13, 20: weight decay adds 1e-3 * w or p_i to g (value: authors' code). eta times .998 each round (the paper).
    D4  Line 19: w^t stays as it is. "personal" is w^{t+1} + p_i, for all clients, also those not in S_t.
    D5  Line 7's argmin shrinks weights of convolutions and linear layers; the rest stays as in v. Line 20 shrinks all of p_i.
    D6  Numbers sent: down w^t, each pi(w_l) as min(rows*columns, rank*(rows+columns)); up all numbers of w_i.
    D7  A client's test images: floor(100*share) central ones of each class; share: of the class in its images. Paper: 100.
    D8  A client's class shares: Dirichlet, .1 per class. A used-up class is dealt out again. Images are moved, mirrored.
"""

import os
import pathlib
import statistics
from types import SimpleNamespace as State

import torch
import torch.nn.functional as F

import common


def soft(x, tau):
    """sign(x) * max(|x| - tau, 0): moves each number of x towards 0 by tau, and stops at 0."""
    return x - x.clamp(-tau, tau)


def pi(kernel):
    """A kernel of n outputs, c inputs and k1 x k2 pixels as a matrix: [n, c, k1, k2] -> [n*k1, c*k2]. [n, c] stays."""
    n, c, k1, k2 = (*kernel.shape, 1, 1)[:4]  # a matrix: as a kernel of 1 x 1 pixel
    return kernel.reshape(n, c, k1, k2).transpose(1, 2).reshape(n * k1, c * k2)


def prox_nuclear(net, v, tau):
    """The proximal operator: argmin over w of tau * sum over layers l of ||pi(w_l)||_* + ||w - v||^2 / 2. Returns w [d], and
    the ranks [L] of the pi(w_l)."""
    parts, ranks = list(v.split(net.sizes)), []  # a part for each of the model's tensors
    for place, _, _ in matrices(net):  # D5
        shape = net.tensors[place][2]
        U, s, Vh = svd(pi(parts[place].view(shape)))  # l.7: of layer l, pi(v_l) = U diag(s) Vh
        s = soft(s, tau)  # l.7: singular values up to tau become 0, so the rank falls
        parts[place] = pi_inverse((U * s) @ Vh, shape).to(v).flatten()
        ranks.append((s > 0).sum())
    return torch.cat(parts), torch.stack(ranks)


def phase_one(net, args):
    """Lines 12-14, for one client and one minibatch b."""
    decay = args.weight_decay * net.decayed  # [d] (D3)

    def step(client, b, eta, w_t):
        w, gamma = client  # [d] each; gamma stays as it is

        def loss(w):
            return common.cross_entropy(net(w, b.x), b)

        g = common.grad(loss)(w)  # l.12
        h = g - gamma + 1 / args.eta_g * (w - w_t) + decay * w  # l.13 (D3)
        return w - eta * h, gamma  # l.14

    return step


def phase_two(net, args):
    """Lines 19 and 20, for one client and one minibatch b."""
    decay = args.weight_decay * net.decayed  # [d] (D3)

    def step(p, b, eta, w_t):
        def loss(p):
            return common.cross_entropy(net(w_t + p, b.x), b)

        g = common.grad(loss)(p)  # l.19 (D4)
        return soft(p - eta * (g + decay * p), eta * args.mu)  # l.20 (D3, D5)

    return step


def main(argv=None):
    args = arguments(argv)
    federation = common.Federation(args)
    run = common.Run(__file__, federation)
    net, M = federation.net, federation.K
    step_w, step_p = phase_one(net, args), phase_two(net, args)

    w_0 = federation.initial_weights()  # l.1: w^0, [d]
    state = State(w=w_0, ranks=full_ranks(net), numbers=net.d, gamma=federation.per_client(torch.zeros_like(w_0)),
                  p=federation.per_client(first_p(net, args, w_0)))  # l.1 (D1): gamma, p [M, d]. numbers: how many w^t has (D6)
    for t, S in run.rounds(state):  # l.2-4: S_t by Federation.sample, [m] (D2)
        eta, w_t = federation.eta(t), state.w
        # Phase I. federation.train does for each client i of S (client: its w and gamma_i), at once or one after the other:
        #   for epoch in range(E):                             l.10
        #     for b in minibatches(shuffled(images of i), B):  l.11
        #       client = step_w(client, b, eta, w_t)           l.12-14
        w = w_t.expand(len(S), -1)  # l.9: [m, d]
        # state.gamma.of(S) is state.gamma[S], but a client's row is fetched only when its turn comes
        w_i = federation.train(step_w, (w, state.gamma.of(S)), S, t, eta, w_t)[0]  # l.5, l.8, l.15: w alone, [m, d]
        for j, i in enumerate(S):  # one by one, to save memory
            state.gamma[i] += 1 / args.eta_g * (w_t - w_i[j])  # l.6, l.16
        gamma_mean = federation.sum(state.gamma) / M  # l.7: of all M clients
        v = federation.mean(w_i) - args.eta_g * gamma_mean  # l.7: not weighted (D2): [d]
        del w_i  # frees memory
        state.w, state.ranks = prox_nuclear(net, v, args.lambda_ * args.eta_g)  # l.7
        # Phase II is a part of line 5. It stands behind line 7 here. It uses w^t, not w^{t+1}, so the result is the same.
        # Its loops are as above, with the images in another order (order=1): l.18-20
        state.p[S] = federation.train(step_p, state.p.of(S), S, t, eta, w_t, epochs=args.fusion_epochs, order=1)  # l.17
        run.sent(up=len(S) * net.d, down=len(S) * state.numbers)  # w_i up, w^t down (D6)
        state.numbers = count_factors(net, state.ranks)  # D6
        if run.evaluates():
            run.log(federation.evaluate(state.w), **measures(run, state, t))
    finish(run, state)


# ---------------------------------------------------------------------------------------------------------------------
# Around it

# Table 1, Non-IID, all three data sets
DEFAULTS = dict(split="fedslr", alpha=0.1, clients=100, client_test=0.0, fraction=0.1, rounds=1000, epochs=2,  # D7, D8
                batch_size=20, lr=0.1, lr_decay=0.998, weight_decay=1e-3, model="resnet18", transform="fedslr", eval_every=20)
BY_DATASET = {
    # ours, for a quick look
    "shapes": dict(rounds=20, epochs=1, clients=20, fraction=0.5, model="cnn", transform="normalize", lr=0.05, eval_every=5,
                   lambda_=2e-3),
}


def arguments(argv):
    parser = common.parser(__doc__, **DEFAULTS)
    own = parser.add_argument_group("FedSLR")
    own.add_argument("--lambda", dest="lambda_", type=common.nonnegative, default=1e-4, help="lambda, low-rank penalty")
    own.add_argument("--mu", type=common.nonnegative, default=1e-3, help="mu, sparse penalty")
    own.add_argument("--eta-g", type=common.positive, default=10.0, help="eta_g, proximal step size; 1/eta_g is FedDyn's alpha")
    own.add_argument("--fusion-epochs", type=common.nonnegative_int, default=1, help="epochs of Phase II")
    own.add_argument("--p-start", choices=("zero", "copy"),
                     help="p_i of line 1: 0, or a copy of w^0 (D1; unless given: copy with resnet18 and mobilenet, else zero)")
    own.add_argument("--export", metavar="FILE", help="write the last w as factors to FILE, and measure how fast it is")
    args = common.parse(parser, BY_DATASET, argv)
    args.p_start = args.p_start or ("copy" if args.model in ("resnet18", "mobilenet") else "zero")  # D1
    if args.momentum:
        common.refuse("FedSLR has no momentum; use --momentum 0")
    folder = pathlib.Path(args.export or "").parent
    if args.export and (pathlib.Path(args.export).is_dir() or not (folder.is_dir() and os.access(folder, os.W_OK))):
        common.refuse(f"--export {args.export} can't be written: a folder, in no folder, or in one that is not ours")
    return args


# Matrices


def matrices(net):
    """For each of a model's L kernels and matrices: its place among the model's tensors, and the rows and columns of its pi."""
    shapes = [(l, (*shape, 1, 1)) for l, (_, _, shape) in enumerate(net.tensors) if len(shape) > 1]
    return [(l, n * k1, c * k2) for l, (n, c, k1, k2, *_) in shapes]


def in_matrices(net):
    """[d]: 1 for each weight of a kernel or a matrix, else 0."""
    return net.per_weight([float(len(shape) > 1) for _, _, shape in net.tensors])


def full_ranks(net):
    """[L]: the largest ranks that the pi(w_l) can have."""
    return torch.tensor([min(rows, columns) for _, rows, columns in matrices(net)], device=net.device)


def first_p(net, args, w):
    """p_i of line 1: 0, or the kernels and matrices of w^0 and 0 for the rest (D1)."""
    return in_matrices(net) * w if args.p_start == "copy" else torch.zeros_like(w)


def pi_inverse(matrix, shape):
    """The kernel of the given shape whose pi is the matrix."""
    n, c, k1, k2 = (*shape, 1, 1)[:4]
    return matrix.reshape(n, k1, c, k2).transpose(1, 2).reshape(shape)


def svd(A):
    """U, s (rising), Vh in float64 with A = (U * s) @ Vh, by the eigenvalues s^2 of A.T @ A: faster than an SVD in float32, and
    more exact. Singular values below 1e-8 of the largest are only rounding. If a number in A is not finite, neither is the
    product, so that a run that diverges shows it.
    """
    if A.shape[0] < A.shape[1]:  # wide: by the transpose
        V, s, Uh = svd(A.mT)
        return Uh.mT, s, V.mT
    finite = torch.nan_to_num(A, 0, 0, 0).double()
    squares, V = torch.linalg.eigh(finite.mT @ finite)
    s = squares.clamp(min=0).sqrt()
    return finite @ (V / s.clamp(min=1e-300)) + torch.where(A.isfinite().all(), 0.0, torch.nan), s, V.mT


def count_factors(net, ranks):
    """Numbers in a model whose pi(w_l) have these ranks [L]: each counts whole, or as two factors if that is less."""
    sizes = list(net.sizes)
    for (l, rows, columns), rank in zip(matrices(net), ranks.tolist()):
        sizes[l] = min(rows * columns, rank * (rows + columns))  # D6
    return sum(sizes)


# Measuring and printing


def measures(run, state, t):
    """Of the GKR and the mixed models on the clients' images, and what they are made of; with --export, at the end, times."""
    federation, export_to = run.federation, run.args.export
    nonzeros = torch.stack([(state.p[i] != 0).sum() for i in federation.rows()])
    mixed = state.numbers + federation.gather(nonzeros.double())  # [M]
    std = float(mixed.std()) if len(mixed) > 1 else 0.0
    names = [federation.net.tensors[l][0].removesuffix(".weight") for l, _, _ in matrices(federation.net)]
    result = {
        "personal": federation.evaluate_clients(lambda S: state.w + state.p[S]),  # D4
        "gkr": common.without_clients(federation.evaluate_clients(state.w)),
        "numbers": {"gkr": state.numbers, "mixed": float(mixed.mean()), "mixed_std": std},
        "ranks": dict(zip(names, state.ranks.tolist())),
    }
    if export_to and t == run.args.rounds - 1 and common.is_main_process() and state.w.isfinite().all():
        export(export_to, federation.net, state.w, state.ranks)
        result["latency"] = latency(federation, state.w, export_to)
    return result


def finish(run, state):
    """Prints the two models side by side and the ranks; writes --export's file, and with --plot ranks.png."""
    history, net = run.record()["rounds"], run.federation.net
    if run.args.export and common.is_main_process():  # once more, for --resume of a finished run
        export(run.args.export, net, state.w, state.ranks)
    rows = [row for row in history if "gkr" in row]
    full = full_ranks(net).tolist()
    columns = ("mean", "std", "worst_decile", "loss")
    print(f"\n{'model':<12}{'round':>8}" + "".join(f"{name:>14}" for name in (*columns, "10^6 numbers")))
    for name, part, model in (("GKR", "gkr", "gkr"), ("mixed", "personal", "mixed")):
        for when, row in (("last", rows[-1]), ("best", max(rows, key=lambda row: row[part]["mean"]))):
            values = [*(row[part][key] for key in columns), row["numbers"][model] / 1e6]
            print(f"{name + ', ' + when:<12}{row['round']:>8}" + "".join(f"{value:>14.4f}" for value in values))
    print("ranks   " + ", ".join(f"{name} {rank}/{most}" for (name, rank), most in zip(rows[-1]["ranks"].items(), full)))
    if times := rows[-1].get("latency"):
        print(f"export  {run.args.export}; {times['dense_ms']} ms dense, {times['factorised_ms']} ms factorised, 20 images")
    if not run.args.plot:
        return
    rounds = [row["round"] for row in rows]
    with common.drawing(run.out / "ranks.png", 1, 3, (15, 4.5), f"FedSLR, {common.setting(run.record())}") as axes:
        for part, label, style in (("gkr", "GKR", "k--"), ("personal", "mixed", "k-")):
            axes[0].plot(rounds, [row[part]["mean"] for row in rows], style, label=label)
        for i, (name, most) in enumerate(zip(rows[-1]["ranks"], full)):  # there are seven colours
            axes[1].plot(rounds, [row["ranks"][name] / most for row in rows], ["-", "--", ":"][i // 7 % 3], label=name)
        axes[2].plot([row["round"] for row in history], [row["bytes_down"] / 1e6 for row in history], "k-")
        for axis, label in zip(axes, ("accuracy, mean over clients", "rank / full rank", "MB down per round")):
            axis.set(xlabel="round", ylabel=label, ylim=(0, None))


# The factorised model


def export(path, net, w, ranks):
    """Writes w [d] to a file. A matrix whose two factors have fewer numbers is written as these: kernels [n, r, k1, 1] and
    [r, c, 1, k2]."""
    parts = {name: w[where].view(shape).cpu().clone() for name, where, shape in net.tensors}
    for (l, rows, columns), r in zip(matrices(net), ranks.tolist()):
        name, _, shape = net.tensors[l]
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
        return common.find("model", self.file["model"], common.MODELS)(self, x, self.file["classes"])

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
        x = F.linear(x, part[1].flatten(1))
        return F.linear(x, part[0].flatten(1), self.take(name + ".bias", (out,), None) if bias else None)


@torch.no_grad()
def latency(federation, w, path, repeats=50):
    """Table 9's measure: median milliseconds for 20 test images, of w as it is and as exported."""
    x = federation.transform(federation.images[federation.data.n_train :][:20])
    models = {"dense_ms": lambda x: federation.net(w, x), "factorised_ms": Factorised(path, federation.device)}
    result = {}
    for name, model in models.items():
        times = []
        for _ in range(repeats + 10):
            start = common.now(x.device)
            model(x)
            times.append(1000 * (common.now(x.device) - start))
        result[name] = round(statistics.median(times[10:]), 3)
    return result


if __name__ == "__main__":
    main()
