"""PersFL: personalised federated learning by distillation from each user's optimal teacher, from Divi, Farrukh, Celik,
"Unifying Distillation with Personalization in Federated Learning", 2021, arXiv 2105.15191.

    python persfl.py --runs 5                              (Table 2, DS-1; published: PersFL 81.9 +- 4.9, FedAvg 45 +- 5.1)
    python persfl.py --runs 5 --split dirichlet-classes    (Table 2, DS-2; published: PersFL 59.6 +- 1.7, FedAvg 48.7 +- 2)
    python persfl.py --runs 5 --split lognormal            (Table 2, DS-3; published: PersFL 82.3 +- 7.2, FedAvg 46.6 +- 9.4)

Ours of DS-1 and DS-2, seed 0, 11 and 10 minutes on two cores; results/MEASURED.md has all six:
    results/persfl-2/persfl-cifar10-split-classes/0: PersFL 0.7388, FedAvg 0.5163
    results/persfl-2/persfl-cifar10-split-dirichlet-classes/0: PersFL 0.5874, FedAvg 0.5207

The same with --dataset mnist is Table 3, with --teacher final the columns FedAvg of Table 4, with --soft ce the columns
PersFL-GD of Table 6. Published numbers are means and standard deviations over users.

All models have one shape: G, the global one of FedAvg; O_k, the G of some round, which is user k's teacher; A_k, user k's
own, the student. "global" is G on the central test images. "personal" is measured on every user's own test images, in the last
row of the record with A_k, in earlier rows with G. T is the temperature and E_G the number of rounds, --rounds. Stage 2 is part
of the last round; a run stopped there does that whole round anew. The last row also has
    personal@fedavg, personal@lambda=0           the same with G, and with O_k fine-tuned without distillation
    personal@val, personal@test                  the same with the A_k that --select val and --select test choose
    users                                        lists over users: accuracies, T and lambda, the teacher's round
    students                                     each user's accuracy with every pair of `grid`, on validation (val) and test
                                                 images
    unseen                                       all of this for the new users of --unseen

The paper's Algorithm 1, in our words (K users, n_k training images of user k, n of all; G(b), A(b) and O_k(b) are logits):

    Stage 1, the teachers
     1  choose G_1;  l'_k = infinity for every user k
     2  for each round e = 1, ..., E_G:
     3      for each user k, who is sent G_e:
     4          l_k = mean cross-entropy of G_e on k's validation images
     5          if l_k < l'_k:
     6              l'_k = l_k,  O_k = G_e
     7      G_{e+1} = sum over k of n_k/n * w_k,  w_k = G_e after E_L epochs of SGD on k's training images (FedAvg)
    Stage 2, every user k by itself, for every (T, lambda) of the grid
     8  A = O_k
     9  for each of E local epochs:
    10      for each minibatch b of k's training images, with labels y_b:
    11          s_b = softmax(O_k(b) / T)
    12          hard = CE(y_b, softmax(A(b)));  soft = KL(s_b || softmax(A(b) / T)), in PersFL-GD CE(s_b, softmax(A(b) / T))
    13          loss = (1-lambda) * hard + lambda * T^2 * soft                                          (3), PersFL-GD (7)
    14          A = A - eta * gradient of loss
    15  A_k = the A of the best pair (T, lambda)

Deviations. The authors' code for the two stages is not available. Of their code for the baselines a part is (pFedMe and
Per-FedAvg), with the logs of its runs. Effects are not measured unless stated.
    D1  Lines 4 to 6: the candidates are the models that users are sent, G_1 (untrained) to G_{E_G}, as in section 4.1 users
        store them "before updating the local version". The model that the last round makes is no candidate; only --teacher
        final sends it to the users. The words below (2), the model "learned in" each round, mean the opposite: it would be a
        candidate and G_1 not. This matters to users whose teacher is the last candidate: 31 of 50 in DS-2 of MNIST (11 with
        the images of D9), 13 of 50 in DS-2 of CIFAR-10, at most 6 of 50 elsewhere. Section 4.1 says once that users choose by
        accuracy; the algorithm and (2) say by loss, as here.
    D2  Line 7: the paper leaves FedAvg open; its (4) weighs users alike. Here n_k/n as in McMahan et al., in DS-1 the same.
    D3  Lines 7, 9, 10 and 14: eta, the minibatch size B, the epochs E_L of Stage 1 and E of Stage 2, and any momentum are
        unknown. (Names as in section 4.3; the algorithm writes E_L for Stage 2's epochs.) In the authors' code for the
        baselines B is 20 or 128. Chosen here: B=20, eta=.05, E_L=1, E=10, no momentum, no weight decay (it would draw students
        with lambda=1 away from O_k, against D7). The choice was made in a few short runs, of which there are no records, by
        accuracies on validation images: FedAvg on DS-2 of CIFAR-10 had .39 after 9 rounds (B=128, eta=.1: .30 after 15), and
        on DS-1 of MNIST .89 after 50. No setting that was tried gives all of FedAvg's published columns.
    D4  Lines 10 and 12: images are shuffled again in every epoch. The loss of a minibatch is a mean over its images and a sum
        over classes; the authors' reduction is unknown, and PyTorch's default would make the soft loss ten times smaller.
        Images are scaled to [0, 1]. The authors' may have been normalised: DS-2's generator does so (D9), but the baselines'
        code for DS-1 shows no scaling at all. On DS-1 of MNIST, in five runs with --transform normalize, FedAvg has .914,
        PersFL .952 and the mean lambda is .045. With scaled images these are .893, .939 and .08; published are .920, .986 and
        .035. A higher eta on scaled images has a similar effect (results/LOG.md).
    D5  Line 12: (3) writes KL(A, O), line 20 of the paper's algorithm KL(s, A). The cross-entropy beside it has the same order
        in both places: prediction and target in (3), target and prediction in the algorithm. So in both the teacher is the
        target. This KL is the CE less the entropy of s_b, which does not depend on A: PersFL and PersFL-GD have the same
        gradients. What Table 6 reports between them (59.6 and 58.2 on DS-2 of CIFAR-10) must then come from something else:
        chance, another order or reduction, another grid.
    D6  Line 15: (3) takes the pair of least training loss. That would always be lambda=1, whose loss is 0 at A = O_k, and the
        paper says that 1 was never best (here it is for one of 300 users). It does not say what was used instead; its appendix
        shows test accuracies. Here a user takes the pair whose student is most accurate on its validation images, of equals
        the first in GRID; --select test takes its test images. Students that diverged aren't chosen.
    D7  The grid is not printed. That T is in {1, 5, 25} and lambda in {0, .25, .5, .75, 1} is inferred from the averages in
        Table 5 and the appendix. With lambda=1 a student starts at O_k and should stay there, since the gradient is 0 but for
        rounding. But rounding errors grow in training: at our eta they changed one user's accuracy by up to 15 points (DS-1 of
        MNIST; 10 on DS-3).
    D8  FedAvg's column is the G after E_G rounds. With --teacher final (Table 4) this G is every user's teacher and all
        students start from it; the table's caption speaks of the start alone, section 5.3 and the authors' README of the
        teacher. For DS-3 of CIFAR-10 and DS-2 of MNIST the paper trained FedAvg's column twice as long as Stage 1 (Table 7);
        which of the two models Table 4 has is not said.
    D9  Users share the data sets' training images. The paper's counts include the test images, but in the authors' logs the
        users' test images in DS-1 and DS-2 of CIFAR-10 add up to 10,000 and 10,003, a fifth of the training images. In DS-1 of
        MNIST the authors' users have 600 images each: --limit 6000, which takes the same 6,000 in every run.
        DS-1 gives a user equally many images of its 4 classes; in the paper users have the same total but "may have [...] a
        different number of samples per class".
        DS-2 draws the users' shares of each class from Dir(.9, ..., .9), as the authors' generator and the paper's first words
        about it do; its words on the prior and on small alpha, and its citation, mean a draw per user. The generator takes
        class 0's size for every class; here every class has its own. It also moves, mirrors and normalises training images, of
        which the paper says nothing. --augment-once --transform normalize does so once, to all images, as if the generator's
        output had been stored: then five runs on MNIST have FedAvg .857 and PersFL .879 (published .855, .880; with neither
        flag .944, .956), but a mean lambda of .315 (.51).
        In DS-3 user k has classes k and k+1, as in pFedMe's generator, and users share all training images; amounts are
        log-normal (mu 0, sigma 2), as in the paper. In the authors' logs CIFAR-10's users have 229 to 1,457 test images, 5,727
        in all, a fifth of 28,600 instead of 50,000. On MNIST sizes differ far more here than there; the generator probably
        added a random 300 to 600 to its log-normal amounts and doubled the sums.
    D10  Section 6 describes without an experiment how new users may join. With --unseen N the last N users train in no round.
        Each chooses its teacher among the G of all rounds and then does Stage 2. In the paper the server would have stored all
        these G; here a new user compares them round by round, as the others do. (The paper's other way, the final G as the new
        user's teacher, is --teacher final.)
    D11  --runs 5 is 5 runs, each with a split and a seed of its own, and averages them user by user, as the tables do.
        Standard deviations are over users, of these averages, with divisor K-1. The authors' DS-3 of CIFAR-10 has the same
        sizes in all five; here each run draws its own, which should bring the users' averages closer together.
    D12  The network for CIFAR-10: the paper has "two 2-D convolutional layers separated by a MaxPool layer", and 400, 120 and
        84 neurons. 400 is what its first fully connected layer gets, and only if the second convolution is pooled, too, as in
        the authors' code for the baselines and here.
"""

import json
import pathlib
import sys
from types import SimpleNamespace as State

import numpy as np
import torch
from torch.func import vmap

import common

# DS-1 of CIFAR-10, and below what differs elsewhere. Users, images: section 5; rounds: Table 7; the rest is our choice (D3).
DEFAULTS = dict(split="classes", per_client=4, alpha=0.9, clients=10, client_val=0.2, client_test=0.2, fraction=1.0, rounds=50,
                epochs=1, batch_size=20, lr=0.05, model="cifarnet")  # D3, D4, D9, D12
BY_DATASET = {
    "mnist": dict(model="mnistnet"),
    ("cifar10", "dirichlet-classes"): dict(rounds=25),
    ("cifar10", "lognormal"): dict(per_client=2),
    ("mnist", "classes"): dict(rounds=100, limit=6000),
    ("mnist", "dirichlet-classes"): dict(rounds=25),
    ("mnist", "lognormal"): dict(rounds=100, per_client=2),
    # ours, for a quick look
    "shapes": dict(rounds=10, epochs=2, distill_epochs=5),
}
GRID = [(T, lam) for T in (1, 5, 25) for lam in (0, 0.25, 0.5, 0.75, 1)]  # D7; the first is fine-tuning


def client_step(net, args):
    """FedAvg's, for one user and one minibatch."""

    def step(client, batch, eta):
        w, u = client  # [d] weights, [d] momentum
        g = common.grad(lambda w: common.cross_entropy(net(w, batch.x), batch))(w)  # [d]
        return common.sgd(args, w, u, g, eta, net.decayed)  # l.7: w - eta * u, u = momentum * u + g + decay * w

    return step


def student_step(net, args, grid=GRID):
    """Stage 2's body, for the students of one user, one for each pair (T, lambda) of the grid, and one minibatch."""
    T, lam = torch.tensor(grid, dtype=torch.float, device=net.decayed.device).T  # [pairs] each

    def step(user, batch, eta):
        A, u, O = user  # [pairs, d] weights, [pairs, d] momentum, [d] their teacher
        v = net(O, batch.x)  # [B, classes]: the teacher sees a minibatch once

        def loss(A, T, lam):
            z = net(A, batch.x)  # [B, classes]
            log_s, log_a = (v / T).log_softmax(1), (z / T).log_softmax(1)  # l.11: log s_b
            hard = common.cross_entropy(z, batch)  # l.12
            soft = (log_s.exp() * (log_s * (args.soft == "kl") - log_a)).sum(1)  # l.12: [B] (D5)
            soft = (soft * batch.mask).sum() / batch.mask.sum().clamp(min=1)  # D4
            return (1 - lam) * hard + lam * T**2 * soft  # l.13

        g = vmap(common.grad(loss))(A, T, lam)  # l.14: [pairs, d]
        return *common.sgd(args, A, u, g, eta, net.decayed), O  # l.14: A - eta * u

    return step


def validation_losses(federation, w):
    """Mean cross-entropy of the model w [d] on every user's validation images: [K]."""
    own = federation.split.val
    index = torch.from_numpy(np.concatenate(own)).to(federation.device)
    user = torch.from_numpy(np.repeat(np.arange(len(own)), [len(i) for i in own])).to(federation.device)
    return common.score(federation.logits(w, index), federation.labels[index], user, len(own))["loss"]


def distil(federation, step, O, args):
    """Stage 2: the students of all users and all pairs of GRID, side by side; O [K, d] -> A [K, 15, d]."""
    A = O[:, None].repeat(1, len(GRID), 1)  # l.8
    eta = torch.tensor(args.distill_lr, device=federation.device)
    S = np.arange(len(O))
    A, *_ = federation.train(step, (A, torch.zeros_like(A), O), S, args.rounds, eta, epochs=args.distill_epochs)  # l.9-10
    return A


def choose(accuracy):
    """accuracy [m, 15] of each user's students, nan if it diverged -> [m], each user's best; the first of equals."""
    return np.nan_to_num(accuracy, nan=-1).argmax(1)  # l.15 (D6)


def measure(federation, numbers, A, G, e, select):
    """Measures of the students A of the users with these numbers, with a table of them; and the students they choose, [m, d].

    A [K, 15, d] and e [K], the rounds of the teachers, are all users'; G [d] is that after the last round.
    """
    rows = federation.rows(numbers)
    A, e = A[rows], federation.gather(e[rows], numbers)  # [m, 15, d], [m]

    def of(i):
        """The students numbered i, or i[k] of user k, as evaluate_clients wants them."""
        W = A[torch.arange(len(A)), i]
        return lambda S: W[np.searchsorted(rows, S)]

    models, best, students = {"fedavg": G, "lambda=0": of(0)}, {}, {}
    chosen = {}
    sound = federation.gather(A.isfinite().all(2).long(), numbers).cpu().numpy() > 0  # [m, 15]
    for part in ("val", "test"):
        images = getattr(federation.split, part)
        accuracy = np.array([federation.evaluate_clients(of(i), images, numbers)["per_client"] for i in range(len(GRID))]).T
        accuracy[~sound] = np.nan
        best[part], students[part] = choose(accuracy), accuracy.tolist()
        mine = np.searchsorted(numbers, federation.clients[rows])
        chosen[part] = A[torch.arange(len(A)), torch.from_numpy(best[part][mine])]  # [m, d]
        models[part] = of(torch.from_numpy(best[part][mine]))
    found = {name: federation.evaluate_clients(W, among=numbers) for name, W in models.items()}
    table = {
        "FedAvg": found["fedavg"]["per_client"], "fine-tuned": [pairs[0] for pairs in students["test"]],
        "PersFL": found[select]["per_client"], "T": [GRID[i][0] for i in best[select]],
        "lambda": [GRID[i][1] for i in best[select]], "teacher's round": e.tolist(),
    }
    short = {f"personal@{name}": common.without_clients(measures) for name, measures in found.items()}
    return {"personal": found[select], **short, "users": table, "grid": GRID, "students": students}, chosen[select]


def average(parts):
    """Of several runs' measures: the table of users, the mean over users, their standard deviation, students' accuracies."""
    table = {name: np.mean([part["users"][name] for part in parts], 0) for name in parts[0]["users"]}  # D11
    students = np.mean([part["students"]["test"] for part in parts], 0)  # [m, 15]
    return {
        "users": {name: z.tolist() for name, z in table.items()}, "mean": {name: z.mean() for name, z in table.items()},
        "std": {name: z.std(ddof=min(1, len(z) - 1)) for name, z in table.items()}, "students": students.tolist(),
    }


def show(rows, out, args):
    """Prints the tables of the last rounds of one or several runs; draws them, in the form of Figs. 2 and 3 to 8."""
    groups, first = {"user": average(rows)}, {"user": 0, "new user": len(rows[0]["users"]["T"])}
    if "unseen" in rows[0]:
        groups["new user"] = average([row["unseen"] for row in rows])
    for name, group in groups.items():
        titles = ["PersFL-GD" if title == "PersFL" and args.soft == "ce" else title for title in group["users"]]
        print(f"\n{name:<10}" + "".join(f"{title:>17}" for title in titles))
        users = dict(enumerate(zip(*group["users"].values()), first[name]))
        lines = {**users, "mean": group["mean"].values(), "std": group["std"].values()}
        for user, line in lines.items():
            values = [100 * z if i < 3 else z for i, z in enumerate(line)]
            print(f"{user:<10}" + "".join(f"{z:>17.2f}" for z in values))
    for name, group in groups.items() if args.plot else ():
        students = np.array(group["students"])  # [m, 15]
        columns, k = min(5, len(students)), first[name]
        lines = -(-len(students) // columns)
        path, size = out / f"students-{name.replace(' ', '-')}s.png", (3 * columns, 3 * lines)
        with common.drawing(path, lines, columns, size) as axes:
            for user, (axis, accuracies) in enumerate(zip(np.ravel(axes), students)):
                for T in sorted({T for T, _ in GRID}):
                    points = [(lam, a) for (at, lam), a in zip(GRID, accuracies) if at == T]
                    axis.plot(*zip(*points), marker="o", markersize=3, label=f"T={T}")
                axis.set(title=f"{name} {k + user}", xlabel="lambda", ylabel="" if user % columns else "test accuracy")
            axis.legend()
            axis.figure.tight_layout()
        with common.drawing(out / f"teachers-{name.replace(' ', '-')}s.png") as axis:
            axis.bar(k + np.arange(len(students)), group["users"]["teacher's round"])
            axis.set(xlabel=name, ylabel="round of its teacher", title=f"mean over {len(rows)} runs" if len(rows) > 1 else "")
    return groups


def arguments(argv):
    parser = common.parser(__doc__, **DEFAULTS)
    own = parser.add_argument_group("PersFL")
    own.add_argument("--soft", choices=("kl", "ce"), default="kl", help="the soft loss: kl is PersFL, ce PersFL-GD")
    own.add_argument("--teacher", choices=("optimal", "final"), default="optimal",
                     help="O_k: each user's best G, or the last one for all (Table 4)")
    own.add_argument("--select", choices=("val", "test"), default="val", help="the images on which a user chooses T and lambda")
    own.add_argument("--distill-epochs", type=common.positive_int, default=10, help="E, local epochs of Stage 2")  # D3
    own.add_argument("--distill-lr", type=common.positive, default=0.05, help="eta of Stage 2")  # D3
    own.add_argument("--unseen", type=common.nonnegative_int, default=0, help="users that join only after the last round")
    own.add_argument("--runs", type=common.positive_int, default=1, help="runs to average; run r adds r to both seeds")
    args = common.parse(parser, BY_DATASET, argv)
    if args.fraction < 1:
        common.refuse("all users take part in every round; use --fraction 1")
    if not args.client_val:
        common.refuse("users choose their teachers on validation images; use --client-val above 0")
    return args


def repeat(args, argv):
    """--runs: one run after the other, each with its own record, and average.json with the mean of them."""
    out = pathlib.Path(args.out or f"runs/persfl-{pathlib.Path(args.dataset).stem}-{args.seed}")
    rows = []
    for r in range(args.runs):
        own = {"runs": 1, "seed": args.seed + r, "split-seed": args.split_seed + r, "out": out / f"run-{r}"}  # D11
        rows.append(main([*argv, *(f"--{name}={value}" for name, value in own.items())]))
    print(f"\naverages of {args.runs} runs")
    averages = show(rows, out, args)
    if common.is_main_process():
        (out / "average.json").write_text(json.dumps(common.finite(averages), indent=1) + "\n")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = arguments(argv)
    if args.runs > 1:
        return repeat(args, argv)
    federation = common.Federation(args)
    K, net, device, rows = federation.K, federation.net, federation.device, len(federation.clients)
    if args.unseen >= K:
        common.refuse(f"--unseen {args.unseen} leaves none of the {K} users to train; use a smaller number")
    seen, unseen = np.split(np.arange(K), [K - args.unseen])
    run = common.Run(__file__, args, federation)
    step = client_step(net, args)

    G = federation.initial_weights()
    state = State(G=G, O=G.repeat(rows, 1), l=torch.full((rows,), torch.inf, dtype=torch.double, device=device),
                  e=torch.zeros(rows, dtype=torch.long, device=device))  # l.1: [d], [K, d], [K], [K] the rounds of the O_k
    for t, S in run.rounds(state, among=seen):  # l.2-3: round e = t + 1 (D10)
        l_k = validation_losses(federation, state.G)  # l.4: [K] (D1)
        better = l_k < state.l  # l.5
        state.l, state.e = torch.where(better, l_k, state.l), torch.where(better, t + 1, state.e)  # l.6
        state.O = torch.where(better[:, None], state.G, state.O)  # l.6
        eta = federation.eta(t)
        w = state.G.expand(len(S), -1)  # [m, d]
        w_k, _ = federation.train(step, (w, torch.zeros_like(w)), S, t, eta)  # l.7
        n_k = federation.n[S]  # [m]
        state.G = federation.mean(w_k, n_k)  # l.7 (D2)
        run.sent(up=w_k.numel(), down=rows * net.d)
        last = t + 1 == args.rounds
        if last:
            O = state.O if args.teacher == "optimal" else state.G.expand(rows, -1)  # [K, d] (D8)
            e = state.e if args.teacher == "optimal" else torch.full_like(state.e, args.rounds + 1)
            run.sent(up=0, down=rows * net.d * (args.teacher == "final"))  # D1
            A = distil(federation, student_step(net, args), O, args)  # l.8-14: [K, 15, d]
        if run.evaluates():
            measures = {"personal": federation.evaluate_clients(state.G, among=seen)}
            if last:
                measures, state.A = measure(federation, seen, A, state.G, e, args.select)
            if last and args.unseen:
                measures["unseen"], own = measure(federation, unseen, A, state.G, e, args.select)
                state.A = torch.cat([state.A, own])  # l.15: [K, d]
            run.log(federation.evaluate(state.G), **measures)
    row = run.record()["rounds"][-1]
    show([row], run.out, args)
    return row


if __name__ == "__main__":
    main()
