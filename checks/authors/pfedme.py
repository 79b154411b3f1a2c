"""CharlieDinh/pFedMe: pFedMe and first-order Per-FedAvg, whole rounds through its servers' train.

    python checks/authors/pfedme.py CLONE
"""

import shlex
import sys
from collections import deque
from unittest import mock

import check  # first: it makes our files importable

# isort: split
import baselines

NAME, COMMITS = "pfedme", ("caf24b1f954d4381bd9b4d104ee7eff389e1489b",)
FLAGS = shlex.split("--fraction 0.5 --rounds 4 --epochs 2 --batch-size 4 --momentum 0")
# .8 are trained on: 12, 9, 11 and 10 images, 3 minibatches each, since there all users take as many
# steps
SIZES = (15, 12, 14, 13)
PFEDME = [*FLAGS, *shlex.split("--method pfedme --lr 0.02 --pfedme-lambda 15 --theta-lr 0.03 "
                               "--theta-steps 5 --pfedme-beta 1.5")]
PER_FEDAVG = [*FLAGS, *shlex.split("--method per-fedavg --lr 0.05 --per-fedavg-alpha 0.1")]
STUBS = "loaders; evaluation; h5py"


def theirs(load, run, module, server, **settings):
    """Their server after the rounds of our run; user.theta is what its optimiser left, which
    pFedMe's users overwrite."""
    fed, args, turns = run.fed, run.fed.args, {"t": 0}
    module = load(f"FLAlgorithms.servers.{module}")
    data = [list(map(str, range(fed.K)))]

    def read_user(k, *_):
        return str(k), list(fed.split.train[k]), list(fed.split.test[k])

    with mock.patch.multiple(module, read_data=lambda *_: data, read_user_data=read_user):
        model = check.put(check.Small(), run.first[0]), "Mclr_CrossEntropy"
        they = getattr(module, server)(
            "cpu", "check", server, model, args.batch_size, num_glob_iters=args.rounds,
            num_users=len(run.S[0]), optimizer="SGD", times=0, **settings)
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


def compare(folder):
    lines = []

    def line(what, run, theirs, mine, **more):
        lines.append(check.row(what, theirs, mine, run, stubs=STUBS, **more))

    with check.program(folder, ["h5py"]) as load:
        for decay, because in (("0.001", None), ("0", "pfedme D3")):
            run = check.ours(baselines, [*PFEDME, "--weight-decay", decay],
                             check.small_data(SIZES))
            they = theirs(load, run, "serverpFedMe", "pFedMe", learning_rate=0.02, beta=1.5,
                          lamda=15, local_epochs=6, K=5, personal_learning_rate=0.03)
            name = "" if because is None else ", without .001 * theta here"
            state, last = run.states[-1], run.S[-1]
            steps = 6 * run.steps()  # 5 of theta and one of w for a minibatch
            line("pFedMe: w" + name, run, check.vector(they.model), state["w"], steps=steps,
                 because=because)
            if because is None:
                w_k = [check.vector(they.users[k].local_model) for k in last]
                line("pFedMe: theta of the last round's clients", run,
                     [they.users[k].theta for k in last], state["Theta"][last], steps=steps)
                line("pFedMe: theta, there w_k is evaluated by mistake", run, w_k,
                     state["Theta"][last], steps=steps, because="pfedme D6")
                line("pFedMe: theta of all clients; there all train in every round", run,
                     [user.theta for user in they.users], state["Theta"], steps=steps,
                     because="pfedme D1")
        run = check.ours(baselines, PER_FEDAVG, check.small_data(SIZES))
        they = theirs(load, run, "serverperavg", "PerAvg", learning_rate=0.1, beta=0.05, lamda=0,
                      local_epochs=3)
        line("Per-FedAvg, first order: w", run, check.vector(they.model), run.states[-1]["w"])
    return lines


if __name__ == "__main__":
    check.main(sys.modules[__name__], sys.argv)
