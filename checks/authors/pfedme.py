"""All its users take equally many minibatches in a round, and so do our clients, though their sizes
differ (pfedme D2)."""

from collections import deque
from unittest import mock

import baselines
import check

REPOSITORY, COMMITS = "CharlieDinh/pFedMe", ("caf24b1f954d4381bd9b4d104ee7eff389e1489b",)
CHANGED = "loaders; evaluation; h5py"
FLAGS = "--fraction 0.5 --rounds 4 --epochs 2 --batch-size 4 --momentum 0 --method "
PFEDME = ("pfedme --lr 0.02 --pfedme-lambda 15 --theta-lr 0.03 --theta-steps 5 --pfedme-beta 1.5 "
          "--weight-decay ")
SIZES = (15, 12, 14, 13)  # .8 are trained on: 12, 9, 11 and 10 images, 3 minibatches each


def theirs(load, run, module, server, **settings):
    """Their server after the rounds of our run; user.theta is what its optimiser left, which
    pFedMe's users overwrite."""
    fed, args, turns = run.fed, run.fed.args, {"t": 0}
    module = load(f"FLAlgorithms.servers.{module}")
    data = [list(map(str, range(fed.K)))]

    def read_user(k, *_):
        return str(k), list(fed.split.train[k]), list(fed.split.test[k])

    with mock.patch.multiple(module, read_data=lambda *_: data, read_user_data=read_user):
        they = getattr(module, server)(
            "cpu", "check", server, (run.model(), "Mclr_CrossEntropy"), args.batch_size,
            num_glob_iters=args.rounds, num_users=len(run.S[0]), optimizer="SGD", times=0,
            **settings)
    queues = [deque() for _ in they.users]
    after = int(server == "PerAvg")  # its clients are selected before they train

    def select(*_):
        turns["t"] += 1
        return [they.users[k] for k in run.S[turns["t"] - 1]]

    def prepare(user, k, step):
        def batch():
            t = turns["t"] - after
            if k not in run.S[t]:  # pFedMe's users all train; what the others do is not used
                return run.batch(fed.split.train[k][:4])
            if not queues[k]:
                queues[k].extend(run.plans[t, k, 0])
            return run.batch(queues[k].popleft())

        def remembered(*values, **named):
            result = step(*values, **named)
            user.theta = check.vector(user.model)
            return result

        user.get_next_train_batch, user.optimizer.step = batch, remembered

    for k, user in enumerate(they.users):
        prepare(user, k, user.optimizer.step)
    they.select_users = select
    for name in ("evaluate", "evaluate_personalized_model", "evaluate_one_step", "save_results",
                 "save_model"):
        setattr(they, name, lambda: None)
    they.train()
    return they


def compare(line, folder):
    def both(flags, *server, **settings):
        run = check.ours(baselines, FLAGS + flags, check.small_data(SIZES))
        return run, theirs(load, run, *server, **settings)

    with check.program(folder, ["h5py"]) as load:
        for decay in ("0.001", "0"):
            run, they = both(PFEDME + decay, "serverpFedMe", "pFedMe", learning_rate=0.02, beta=1.5,
                             lamda=15, local_epochs=6, K=5, personal_learning_rate=0.03)
            theta, last = run.state["Theta"], run.S[-1]
            steps = 6 * run.steps()  # 5 of theta and one of w for a minibatch
            if decay == "0":
                line("pFedMe: w, without .001 * theta here", check.vector(they.model),
                     run.state["w"], run, steps=steps, because="pfedme D3")
                continue
            line("pFedMe: w", check.vector(they.model), run.state["w"], run, steps=steps)
            line("pFedMe: theta of the last round's clients",
                 [they.users[k].theta for k in last], theta[last], run, steps=steps)
            w_k = [check.vector(they.users[k].local_model) for k in last]
            line("pFedMe: theta, there w_k is evaluated by mistake", w_k, theta[last], run,
                 steps=steps, because="pfedme D6")
            line("pFedMe: theta of all clients; there all train in every round",
                 [user.theta for user in they.users], theta, run, steps=steps,
                 because="pfedme D1")
        run, they = both("per-fedavg --lr 0.05 --per-fedavg-alpha 0.1", "serverperavg", "PerAvg",
                         learning_rate=0.1, beta=0.05, lamda=0, local_epochs=3)
        line("Per-FedAvg, first order: w", check.vector(they.model), run.state["w"], run)
