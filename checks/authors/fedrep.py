"""The whole script main_fedrep.py runs, up to its last round, which we leave out (fedrep D2). In
its code a client's first head shares memory with the global model, and changes with it (fedrep D4).
With a copy instead, both programs agree. For MNIST it averages clients equally, so clients have
equal sizes. For LEAF it weights by n_k, and clients have different sizes."""

import types

import baselines
import check

REPOSITORY, COMMITS = "lgcollins/FedRep", ("d82e62982e107bb3322541604f059c0ff28bd289",)
CHANGED = "data; evaluation; pandas; language_utils"
FLAGS = ("--fraction 0.5 --rounds 4 --batch-size 4 --lr 0.1 --momentum 0.5 --epochs 2 "
         "--weight-decay 0.0001 --personal 1 --method ")
METHODS = {"fedrep": "fedrep --body-epochs 2", "fedper": "fedper"}
SIZES = (15, 11, 20, 12)  # of these .8 are trained on
EQUAL = (15, 15, 15, 15)
ABSENT = ["pandas", "models.test", "models.language_utils", "FedProx"]
# what clients keep at first shares its memory with the global model
ALIAS = "=net_glob.state_dict()[key]"


class Decayed(check.Small):
    """Its weight decay leaves biases out."""

    decayed = "conv1.weight", "fc1.weight", "fc2.weight"


def theirs(load, run, method, dataset):
    """The personal models of all clients after the rounds of our run."""
    fed, model = run.fed, run.model()
    orders = (1, 0) if method == "fedrep" else (0,)  # the head comes first
    body = getattr(fed.args, "body_epochs", 1)
    args = types.SimpleNamespace(
        gpu=-1, num_users=fed.K, dataset=dataset, alg=method, load_fed="n", epochs=len(run.S) + 20,
        frac=0.5, m_tr=500, m_ft=500, test_freq=1000, save_every=1000, lr=fed.args.lr, local_bs=4,
        local_updates=10**6, local_ep=fed.args.epochs + (body if method == "fedrep" else 0),
        local_rep_ep=body)
    keys = {layer: [layer + ".weight", layer + ".bias"] for layer in ("conv1", "fc1", "fc2")}
    # the first three are global
    model.weight_keys = [keys["conv1"], keys["fc1"], [], keys["fc2"]]
    leaf = {str(k): {"x": own.tolist(), "y": own.tolist()} for k, own in enumerate(fed.split.train)}

    def numbers(images):
        return images.dataset["x"] if dataset == "femnist" else images.idxs

    def get_data(_):
        return None, None, dict(enumerate(own.copy() for own in fed.split.train)), {}

    end = check.script_variables(load, run, "main_fedrep.py", args,
                                 run.loader(numbers, orders, joined=True), get_data=get_data,
                                 get_model=lambda _: model,
                                 read_data=lambda *_: (list(leaf), [], leaf, leaf))
    shared = end.net_glob.state_dict()
    return [check.vector({**shared, **{key: end.w_locals[k][key] for key in keys["fc2"]}})
            for k in range(fed.K)]


def compare(line, folder):
    def both(load, name, method, dataset, sizes, **more):
        run = check.ours(baselines, FLAGS + METHODS[method], check.small_data(sizes), Decayed)
        line(f"{name}: models of all clients", theirs(load, run, method, dataset),
             check.with_layer(run, -1), run, **more)

    cloned = CHANGED + "; one .clone() added"
    with check.program(folder, ABSENT, [(ALIAS, ALIAS + ".clone()")]) as load:
        for name, method in (("FedRep", "fedrep"), ("FedPer", "fedper")):
            both(load, name, method, "mnist", EQUAL, stubs=cloned)
            both(load, f"{name}, weighted as for LEAF", method, "femnist", SIZES, stubs=cloned)
        both(load, "FedRep, plain mean there", "fedrep", "mnist", SIZES, because="fedrep D3",
             stubs=cloned)
    with check.program(folder, ABSENT) as load:
        both(load, "FedRep, first heads share memory there", "fedrep", "femnist", SIZES,
             because="fedrep D4")
