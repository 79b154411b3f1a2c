"""PersFL: personalised federated learning by distillation. Divi, Farrukh, Celik, "Unifying Distillation with Personalization
in Federated Learning", 2021, arXiv 2105.15191.

    python persfl.py --runs 5                              (Table 2, DS-1; published: FedAvg .450, PersFL .819)
    python persfl.py --runs 5 --split dirichlet-classes    (Table 2, DS-2; published: FedAvg .487, PersFL .596)
    python persfl.py --runs 5 --split lognormal            (Table 2, DS-3; published: FedAvg, 100 rounds, .466, PersFL .823)

DS-1: a user has 4 classes, all users have equally many images. DS-2: each class is dealt out in random Dirichlet(.9) shares.
DS-3: each class is divided between 2 users in log-normal shares. The table has users' mean accuracies on CIFAR-10, 5 runs:

    split   rounds   FedAvg   fine-tuned   PersFL   minutes a run   records
    DS-1    50       .5068    .6846        .7186    8 to 14         results/persfl-2/persfl-cifar10-split-classes
    DS-2    25       .5024    .5068        .5817    8 to 14         results/persfl-2/persfl-cifar10-split-dirichlet-classes
    DS-3    50       .3791    .8859        .8918    9 to 25         results/persfl-2/persfl-cifar10-split-lognormal

G is FedAvg's global model. User k's teacher O_k is the G that suits user k best. User k's own model A_k is a student of O_k.
lambda weighs the teacher's answers, softened by the temperature T, against the labels. "fine-tuned": a student with lambda = 0.
"global" is G on the central test images. "personal" is on each user's own test images: A_k in the last round, G before.

The paper's Algorithm 1, in our words. Ours: "choose G_1", line 13's loop, 9 to 11 (the paper's are `end`s). K users
have n_k training images, n in all. A_k(b), O_k(b): logits. CE: cross-entropy. fedavg.py says how to read [d], net and grad.

     1  Stage 1, users and server together: find the teachers
     2  choose G_1;  l'_k = infinity for every user k
     3  for each round e = 1, ..., E_G:
     4      for each user k, who is sent G_e:
     5          l_k = mean cross-entropy of G_e on user k's validation images
     6          if l_k < l'_k:
     7              l'_k = l_k
     8              O_k = G_e
     9          w_k = G_e after E_L epochs of SGD on user k's training images
    10      G_{e+1} = sum over k of n_k/n * w_k
    11  with --teacher final (Table 4):  O_k = G_{E_G+1} for every user k
    12  Stage 2, every user alone: distil from the teachers
    13  for each pair (T, lambda) of the grid, lines 14 to 22:  A_k = O_k at first. User k keeps the best of its students A_k
    14  for each user k:
    15      cut user k's training images into minibatches of size B
    16      for each of E local epochs:
    17          for each minibatch b, with labels y_b:
    18              loss = (1-lambda) * hard + lambda * T^2 * soft                      (3); PersFL-GD: (7)
    19              hard = CE(y_b, softmax(A_k(b)))
    20              soft = KL(s_b || softmax(A_k(b) / T));                              PersFL-GD: CE(s_b, softmax(A_k(b) / T))
    21              s_b = softmax(O_k(b) / T)
    22              w = w - eta' * gradient of loss, for the weights w of A_k

Choices that change a number. docs/persfl.md has each in full.

    D1  Lines 5 to 8: the candidates are what users are sent, G_1 (untrained) to G_{E_G}. G_{E_G+1} is no candidate.
    D2  Line 10: the weights n_k/n are McMahan et al.'s. The paper's objective (4) weighs users alike; its FedAvg may, too.
    D3  Ours: B = 20, eta (line 9) = eta' (line 22) = .05, E_L = 1, E = 10 (line 16; the paper: E_L), no momentum.
    D4  Line 15: in every epoch, shuffled; the paper cuts once. Pixels in [0, 1]. Line 20: sum over classes, mean over images.
    D5  Line 20: KL(teacher || student); (3) has it in the other order. PersFL and PersFL-GD then have the same gradients.
    D6  Line 13: best on validation images; on a tie the first. The paper's (3), least training loss, gives lambda = 1 (loss 0).
    D7  Line 13: each pair starts at O_k. 15 pairs, by Table 5; T does nothing with lambda 0 or 1: 11 students (above: 15).
    D8  Line 11: with --teacher final all students start at, and learn from, G_{E_G+1}.
    D9  Only the training images are dealt out (the paper counts all). In DS-1 classes are even. The authors' own splits differ.
    D10  --unseen N: the last N users train in no round, but choose a teacher and do Stage 2 (section 6).
    D11  --runs 5: five seeds and splits, averaged user by user. Standard deviations are over users, with divisor K-1.
    D12  CIFAR-10's network also pools after its second convolution, as the authors' baselines do.
"""

import itertools
import json
import pathlib
import sys
from math import ceil
from types import SimpleNamespace as State

import numpy as np
import torch
from torch.func import vmap

import common

# l.13: (T, lambda) of 11 students (D7)
GRID = [(1, 0), (1, 0.25), (1, 0.5), (1, 0.75), (1, 1), (5, 0.25), (5, 0.5), (5, 0.75), (25, 0.25), (25, 0.5), (25, 0.75)]


def client_step(net, args):
    """Stage 1's step of SGD, for one user and one minibatch b. (Stage 1's loop is in `main`, below.)"""

    def step(user, b, eta):
        w, u = user  # [d] weights, [d] momentum

        def loss(w):
            return common.cross_entropy(net(w, b.x), b)

        g = common.grad(loss)(w)  # [d]
        return common.sgd(args, w, u, g, eta, net.decayed)  # l.9: w - eta * u', u' = momentum * u + g + decay * w

    return step


def student_step(net, args, grid=GRID):
    """Stage 2's body, for one user and one minibatch b: a step of all of the user's students, one for each pair of the grid."""
    T, lam = torch.tensor(grid, dtype=torch.float, device=net.device).unbind(1)  # [11], [11]

    def step(user, b, eta):
        students, u, O = user  # [11, d] the students' weights, [11, d] momentum, [d] the teacher's; eta is eta'
        O_b = net(O, b.x)  # O_k(b): [B, classes]

        def loss(a, T, lam):  # of one student: its weights a [d], and two numbers
            A_b = net(a, b.x)  # A_k(b): [B, classes]
            log_s = (O_b / T).log_softmax(1)  # l.21: log s_b
            log_a = (A_b / T).log_softmax(1)
            difference = log_s - log_a if args.soft == "kl" else -log_a
            soft = (log_s.exp() * difference).sum(1)  # l.20: KL, or CE (D5): [B]
            soft = (soft * b.mask).sum() / b.mask.sum().clamp(min=1)  # the mean over b's images (D4); b.mask is 0 for padding
            hard = common.cross_entropy(A_b, b)  # l.19; takes logits
            return (1 - lam) * hard + lam * T**2 * soft  # l.18

        g = vmap(common.grad(loss))(students, T, lam)  # l.22: of each student with its own T and lambda, [11, d]
        students, u = common.sgd(args, students, u, g, eta, net.decayed)  # l.22: w - eta' * u'
        return students, u, O

    return step


def choose(accuracy):
    """Each user's best student, of equals the first: accuracy [K, 11], nan for a student that diverged -> [K]."""
    return np.nan_to_num(accuracy, nan=-1).argmax(1)


def stage_2(federation, run, O, args):
    """Every user alone, with its teacher O_k: O [K, d] -> all its students [K, 11, d], and A_k, the one it keeps [K, d]."""
    users, eta = np.arange(len(O)), torch.tensor(args.distill_lr, device=federation.device)
    step = with_progress(student_step(federation.net, args), federation, run)
    students = O[:, None].repeat(1, len(GRID), 1)  # l.13: each starts at O_k; `step` takes the students of all pairs at once
    # federation.train does for each user k, at once or one after the other:      l.14
    #     for epoch in range(E):                                                  l.16
    #         for b in minibatches(shuffled(training images), B):                 l.15, l.17 (D4)
    #             students, u, O = step((students, u, O), b, eta)                 l.18-22
    t = args.rounds  # a t that no round has, for an order of images that no round has
    start = students, torch.zeros_like(students), O
    students, *_ = federation.train(step, start, users, t, eta, epochs=args.distill_epochs)
    accuracy = accuracies(federation, students, getattr(federation.split, args.select))  # of --select's images: [K, 11] (D6)
    best = choose(accuracy)[federation.clients]  # l.13: the student that user k keeps, [K]
    return students, students[torch.arange(len(O)), torch.from_numpy(best)]


def main(argv=None):
    args = arguments(argv)
    if args.runs > 1:
        return repeat(args, argv)
    federation = common.Federation(args)
    seen, _ = seen_and_unseen(federation, args)  # the numbers of the users in Stage 1: all, but see D10
    run = common.Run(__file__, federation, fixed_rounds="Stage 2 follows the last round")  # so --resume refuses other --rounds
    step = client_step(federation.net, args)

    G, students = federation.initial_weights(), None  # l.2: G_1, [d]
    K = len(federation.clients)  # all users (of this process, if there are several)
    state = State(G=G, O=G.repeat(K, 1), l_prime=G.new_full((K,), torch.inf, dtype=torch.double),
                  round_of_O=G.new_zeros(K, dtype=torch.long), A=None)  # l.2: l' [K]; O [K, d] is G_1 until l.8
    for t, S in run.rounds(state, among=seen):  # l.1, l.3-4: Stage 1; S are all users that train, [m]
        e = t + 1
        l_k = validation_losses(federation, state.G)  # l.5: [K] (D1)
        better = l_k < state.l_prime  # l.6: [K]
        state.l_prime = torch.where(better, l_k, state.l_prime)  # l.7
        state.O = torch.where(better[:, None], state.G, state.O)  # l.8: [K, d]
        state.round_of_O = torch.where(better, e, state.round_of_O)  # l.8, for the record
        w = state.G.expand(len(S), -1)  # [m, d]
        w_k, _ = federation.train(step, (w, torch.zeros_like(w)), S, t, federation.eta(t))  # l.9: E_L is --epochs: [m, d]
        state.G = federation.mean(w_k, federation.n[S])  # l.10: G_{e+1}, [d] (D2)
        run.sent(up=w_k.numel(), down=K * len(state.G))
        if e == args.rounds:  # e = E_G; in the record Stage 2 is a part of this round
            O = teachers(run, state, args)  # state.O, or l.11: [K, d] (D8)
            students, state.A = stage_2(federation, run, O, args)  # l.12: Stage 2
        if run.evaluates():
            run.log(federation.evaluate(state.G), **measure(federation, state, students, args))
    last = run.record()["rounds"][-1]
    show([last], run.out, args)
    return last


# ---------------------------------------------------------------------------------------------------------------------
# Around it

# DS-1 of CIFAR-10, and below what differs elsewhere. Users, classes, shares, network: section 5. Rounds: Table 7. MNIST's 6,000
# images: the authors' logs. epochs, batch_size, lr: our choice (D3).
DEFAULTS = dict(split="classes", per_client=4, alpha=0.9, clients=10, client_val=0.2, client_test=0.2, fraction=1.0, rounds=50,
                epochs=1, batch_size=20, lr=0.05, model="cifarnet")  # D3, D12
BY_DATASET = {
    "mnist": dict(model="mnistnet"),
    ("cifar10", "dirichlet-classes"): dict(rounds=25),
    ("cifar10", "lognormal"): dict(per_client=2),
    ("mnist", "classes"): dict(rounds=100, limit=6000),  # D9
    ("mnist", "dirichlet-classes"): dict(rounds=25),
    ("mnist", "lognormal"): dict(rounds=100, per_client=2),
    # ours, for a quick look
    "shapes": dict(transform="normalize", rounds=15, epochs=2, distill_epochs=5),
}


def arguments(argv):
    parser = common.parser(__doc__, **DEFAULTS)
    group = parser.add_argument_group("PersFL (--rounds is E_G; --epochs E_L and --lr eta of Stage 1; --momentum of both)")
    group.add_argument("--soft", choices=("kl", "ce"), default="kl", help="the soft loss: kl is PersFL, ce PersFL-GD")
    group.add_argument("--teacher", choices=("optimal", "final"), default="optimal",
                       help="O_k: each user's best G, or the last one for all (Table 4)")
    group.add_argument("--select", choices=("val", "test"), default="val", help="images by which a user chooses (T, lambda)")
    group.add_argument("--distill-epochs", type=common.positive_int, default=10, help="E of line 16, epochs of Stage 2")  # D3
    group.add_argument("--distill-lr", type=common.positive, default=0.05, help="eta', the rate of Stage 2")  # D3
    group.add_argument("--unseen", type=common.nonnegative_int, default=0, help="users that join only after the last round")
    group.add_argument("--runs", type=common.positive_int, default=1, help="runs to average; run r adds r to both seeds")
    args = common.parse(parser, BY_DATASET, argv)
    if args.fraction < 1:
        common.refuse("all users take part in every round; use --fraction 1")
    if max(args.seed, args.split_seed) + args.runs > 2**32:
        common.refuse(f"--runs {args.runs} makes a seed larger than {2**32 - 1}; use a smaller --seed or --split-seed")
    if not args.client_val:
        common.refuse("users choose their teachers on validation images; use --client-val above 0")
    return args


def seen_and_unseen(federation, args):
    """The numbers of the users that train in Stage 1, and of those that join only for Stage 2."""
    if args.unseen >= federation.K:
        common.refuse(f"--unseen {args.unseen} leaves none of the {federation.K} users to train; use a smaller number")
    return np.split(np.arange(federation.K), [federation.K - args.unseen])


def repeat(args, argv):
    """--runs: one run after the other, each with its own record, and average.json with the mean of them."""
    argv = sys.argv[1:] if argv is None else argv
    out = pathlib.Path(args.out or f"runs/persfl-{pathlib.Path(args.dataset).stem}-{args.seed}")
    rows = []
    for r in range(args.runs):
        new = {"runs": 1, "seed": args.seed + r, "split-seed": args.split_seed + r, "out": out / f"run-{r}"}  # D11
        rows.append(main([*argv, *(f"--{name}={value}" for name, value in new.items())]))
    print(f"\naverages of {args.runs} runs")
    averages = show(rows, out, args)
    if common.is_main_process():
        (out / "average.json").write_text(json.dumps(common.without_nan(averages), indent=1) + "\n")


def validation_losses(federation, w):
    """Mean cross-entropy of the model w [d] on each user's validation images: [K]."""
    images = federation.split.val  # of each user
    index = torch.from_numpy(np.concatenate(images)).to(federation.device)
    user = torch.from_numpy(np.repeat(np.arange(len(images)), list(map(len, images)))).to(federation.device)
    return common.score(federation.logits(w, index), federation.labels[index], user, len(images))["loss"]  # l.5


def teachers(run, state, args):
    """O_k of every user: [K, d]. --teacher final: the last G, which all users are sent."""
    if args.teacher == "optimal":
        return state.O
    run.sent(up=0, down=state.O.numel())
    return state.G.expand(len(state.O), -1)  # l.11


def accuracies(federation, students, images):
    """Of every user's students [K, 11, d] on the images numbered images[k]: [K, 11], nan for a student that diverged."""
    found = [federation.evaluate_clients(W, images)["per_client"] for W in students.unbind(1)]  # [11, K]
    sound = federation.gather(students.isfinite().all(2).long()).cpu().numpy() > 0  # [K, 11]
    return np.where(sound, np.array(found).T, np.nan)


def with_progress(step, federation, run):
    """Stage 2's step, which counts its minibatches in the run's bar. Where many users train in one step, as on a GPU, nothing
    can be counted, and the line printed here is all."""
    args = federation.args
    minibatches = args.distill_epochs * sum(ceil(len(i) / (args.batch_size or len(i))) for i in federation.split.train)
    run.bar.write(f"stage 2  {federation.K} users, {len(GRID)} students each, {args.distill_epochs} epochs")
    count = itertools.count(1)  # several threads may count

    def counting(user, b, eta):
        done = next(count)
        if done % ceil(minibatches / 100) == 0:
            run.bar.set_postfix_str(f"stage 2: {100 * done // minibatches} %")
        return step(user, b, eta)

    return step if federation.vmap else counting


def measure(federation, state, students, args):
    """A round's personal measures; with the students of Stage 2, [K, 11, d], also those that docs/persfl.md names."""
    seen, unseen = seen_and_unseen(federation, args)
    if students is None:
        return {"personal": federation.evaluate_clients(state.G, among=seen)}
    accuracy = {part: accuracies(federation, students, getattr(federation.split, part)) for part in ("val", "test")}  # [K, 11]
    best = {part: choose(accuracy[part]) for part in accuracy}  # [K]; that of --select is line 13's choice again
    models = {"fedavg": state.G, "lambda=0": students[:, 0]}
    for part in best:
        models[part] = students[torch.arange(len(students)), torch.from_numpy(best[part][federation.clients])]
    rounds = federation.gather(state.round_of_O).cpu().numpy()
    if args.teacher == "final":
        rounds = np.full(federation.K, args.rounds + 1)  # a further round would begin with this G

    def of(users):
        """The measures of the users with these numbers."""
        found = {name: federation.evaluate_clients(W, among=users) for name, W in models.items()}
        pairs = [GRID[i] for i in best[args.select][users]]
        table = {"FedAvg": found["fedavg"]["per_client"], "fine-tuned": accuracy["test"][users, 0].tolist(),
                 "PersFL": found[args.select]["per_client"], "T": [T for T, _ in pairs], "lambda": [lam for _, lam in pairs],
                 "teacher's round": rounds[users].tolist()}
        short = {f"personal@{name}": common.without_clients(measures) for name, measures in found.items()}
        return {"personal": found[args.select], **short, "users": table, "grid": GRID,
                "students": {part: accuracy[part][users].tolist() for part in accuracy}}

    return {**of(seen), "unseen": of(unseen)} if args.unseen else of(seen)


def average(parts):
    """Of several runs' measures: the table of users, the mean over users, their standard deviation, students' accuracies."""
    table = {name: np.mean([part["users"][name] for part in parts], 0) for name in parts[0]["users"]}  # D11
    students = np.mean([part["students"]["test"] for part in parts], 0)  # [m, 11]
    return {
        "users": {name: column.tolist() for name, column in table.items()},
        "mean": {name: column.mean() for name, column in table.items()},
        "std": {name: column.std(ddof=min(1, len(column) - 1)) for name, column in table.items()},
        "students": students.tolist(),
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
        table = {**users, "mean": group["mean"].values(), "std": group["std"].values()}
        for user, line in table.items():
            values = [100 * value if i < 3 else value for i, value in enumerate(line)]
            print(f"{user:<10}" + "".join(f"{value:>17.2f}" for value in values))
    for name, group in groups.items() if args.plot else ():
        students = np.array(group["students"])  # [m, 11]
        columns, k = min(5, len(students)), first[name]
        plot_rows = -(-len(students) // columns)
        path, size = out / f"students-{name.replace(' ', '-')}s.png", (3 * columns, 3 * plot_rows)
        with common.drawing(path, plot_rows, columns, size, "accuracy of the students, by $\\lambda$ and $T$") as axes:
            for user, (axis, accuracy) in enumerate(zip(np.ravel(axes), students)):
                for T in sorted({T for T, _ in GRID}):  # at lambda 0 and 1 one student stands for every T
                    points = sorted((lam, a) for (at, lam), a in zip(GRID, accuracy) if at == T or lam in (0, 1))
                    axis.plot(*zip(*points), marker="o", label=f"$T$ = {T}")
                axis.set(title=f"{name} {k + user}", xlabel=r"$\lambda$", ylabel="" if user % columns else "test accuracy")
        with common.drawing(out / f"teachers-{name.replace(' ', '-')}s.png") as axis:
            axis.bar(k + np.arange(len(students)), group["users"]["teacher's round"])
            axis.set(xlabel=name, ylabel="round of its teacher", title=f"mean over {len(rows)} runs" if len(rows) > 1 else "")
    return groups


if __name__ == "__main__":
    main()
