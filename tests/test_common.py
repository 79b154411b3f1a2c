"""Streams, flags, measures and what clients keep, against numbers derived here."""

import io
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common
import comparing.training
import fedavg
from conftest import QUICK, federation, refused, saved

CPU = ["--device", "cpu"]
SHAPES = ["--dataset", "shapes", *CPU]


def test_help_names_the_paper_s_symbols_and_the_defaults(capsys):
    with pytest.raises(SystemExit) as stop:
        fedavg.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    for words in ("C, share of the clients", "E (E_L in PersFL), local epochs",
                  "B, local minibatch", "eta, local learning rate", "K, clients in all",
                  "(default: 2000)"):
        assert words in text


def test_streams_are_independent():
    seen = {tuple(common.stream(*key).integers(0, 2**62, 2)) for key in
            [(s, p, t, k) for s in (0, 1) for p in common.STREAMS for t in (0, 1) for k in (0, 1)]}
    assert len(seen) == 2 * len(common.STREAMS) * 4


# Measures


def test_calibration_by_hand():
    """Seven images, 15 bins. p = .50 (right), .52 (wrong): both in (7/15, 8/15]. p = 1 (right,
    right, wrong): the last bin. p = .65 (wrong) is in (9/15, 10/15], and so is its upper edge, p =
    2/3 (right)."""
    p = torch.tensor([0.50, 0.52, 1.0, 1.0, 1.0, 0.65, 2 / 3], dtype=torch.double)
    logits = torch.stack([p.clamp(max=1 - 1e-15).log(), (1 - p).clamp(min=1e-15).log()], 1)
    logits[0] = 0.0
    logits[6] = torch.tensor([2.0, 1.0]).double().log()  # whose p * 15 is 10, to the last bit
    y = torch.tensor([0, 1, 0, 0, 1, 1, 0])
    # sum of p - number right, per bin
    gaps = [abs(1.02 - 1), abs(3 - 2), abs(0.65 + 2 / 3 - 1)]
    one = common.score(logits, y, torch.zeros(7, dtype=torch.long), 1)
    assert one["ece"].item() == pytest.approx(sum(gaps) / 7, abs=1e-9)
    assert one["mce"].item() == pytest.approx(max(gaps[0] / 2, gaps[1] / 3, gaps[2] / 2), abs=1e-9)
    assert one["top1"].item() == pytest.approx(4 / 7)


def test_measures_per_group_are_those_of_the_group_alone():
    torch.manual_seed(0)
    logits, y = torch.randn(200, 12), torch.randint(0, 12, (200,))
    group = torch.randint(0, 3, (200,))
    together = common.score(logits, y, group, 3)
    for g in range(3):
        z, t = logits[group == g], y[group == g]
        alone = common.score(z, t, torch.zeros(len(t), dtype=torch.long), 1)
        for name in together:
            assert together[name][g].item() == pytest.approx(alone[name][0].item(), abs=1e-12)
        top5 = np.mean([label in row.topk(5).indices for row, label in zip(z, t)])
        assert alone["top5"].item() == pytest.approx(top5)
        loss = torch.nn.functional.cross_entropy(z.double(), t).item()
        assert alone["loss"].item() == pytest.approx(loss)


@pytest.mark.parametrize("threads", ["1", "3"])
def test_personal_measures(toy, threads):
    """Three clients with 5, 2 and 3 test images, whose accuracies can be read off a model that
    always says class 1."""
    argv = ["--dataset", toy, "--model", "linear", "--clients", "3", "--split", "iid", *CPU]
    fed = federation([*argv, "--parallel", threads])
    own = [np.flatnonzero(fed.data.labels[:60] == c) for c in range(3)]
    # accuracies .8, 0, 1/3
    test = [np.r_[own[1][:4], own[0][:1]], own[0][:2], np.r_[own[1][:1], own[2][:2]]]
    fed.split = fed.split._replace(test=test)
    w = torch.zeros(fed.net.d)
    w[12 + 1] = 5.0
    a = np.array([0.8, 0, 1 / 3])
    for W in (w, w.expand(3, -1), lambda S: w.expand(len(S), -1)):
        got = fed.evaluate_clients(W)
        assert got["per_client"] == pytest.approx(a) and got["mean"] == pytest.approx(a.mean())
        assert got["std"] == pytest.approx(a.std(ddof=1))
        assert got["weighted_mean"] == pytest.approx(5 / 10)
        assert got["worst_decile"] == pytest.approx(0)
    W = w.repeat(3, 1)
    W[1, 12:] = torch.tensor([5.0, 0, 0])  # client 1 has a model of its own, which says class 0
    assert fed.evaluate_clients(W)["per_client"] == pytest.approx([0.8, 1, 1 / 3])
    assert "val_mean" not in got
    fed.args.client_val = 0.1
    fed.split = fed.split._replace(val=[own[0][5:], own[0][5:], own[1][5:]])  # 0, 1, 1
    got = fed.evaluate_clients(W)
    assert got["per_client"] == pytest.approx([0.8, 1, 1 / 3])
    assert got["val_mean"] == pytest.approx(2 / 3)
    assert got["val_loss"] == pytest.approx(fed.evaluate_clients(W, fed.split.val)["loss"])
    assert "val_mean" not in fed.evaluate_clients(W, fed.split.test)
    assert fed.evaluate(w)["top1"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("S", [
    2, [2, 0], np.array([1, 2]), [], np.array([]), slice(1, None), torch.tensor([0, 2]),
    np.array([True, False, True]), range(2)])
def test_rows_are_picked_and_replaced_as_a_tensors_are(S):
    fed = federation([*SHAPES, "--limit", "30", "--clients", "3", "--split", "iid",
                      "--client-test", "0", "--model", "mnistnet"])
    first = torch.arange(6.0).view(3, 2)
    V, whole = fed.per_client(lambda k: first[k]), first.clone()
    at = S if np.size(S) else []
    assert torch.equal(V[S], whole[at])
    V[S], whole[at] = -V[S], -whole[at]
    assert torch.equal(V.all, whole)
    assert not torch.equal(whole, first) or np.size(S) == 0


def test_a_client_that_is_in_s_twice_has_one_row(capsys):
    fed = federation([*SHAPES, "--limit", "30", "--clients", "3", "--model", "mnistnet"])
    V = fed.per_client(torch.zeros(2))
    assert V[[1, 1]].shape == (2, 2)
    refused(capsys, "a client is in S twice", V.__setitem__, [1, 1], torch.ones(2))


def test_worst_decile_and_losses_by_hand(toy):
    """11 and 25 clients: the worst tenth is 1.1 and 2.5 clients, rounded up to 2 and 3. The model
    always says class 1, so a client's accuracy is its share of class 1."""
    for K, worst in ((11, 2), (25, 3)):
        fed = federation(["--dataset", toy, "--model", "linear", "--clients", str(K), "--split",
                          "iid", "--client-test", "0", *CPU])
        one, other = (np.flatnonzero(fed.data.labels[:60] == c) for c in (1, 0))
        right = np.arange(K) * 7 % K % 20  # of 20 images; in another order than the clients'
        test = [np.r_[one[:r], other[: 20 - r]] for r in right]
        fed.split = fed.split._replace(test=test, train=[index[: k + 1]
                                                         for k, index in enumerate(test)])
        w = torch.zeros(fed.net.d)
        w[12 + 1] = 5.0
        wanted = np.sort(right)[:worst].mean() / 20
        assert fed.evaluate_clients(w)["worst_decile"] == pytest.approx(wanted)
        # cross-entropies of the logits 0, 5, 0: -5 + log(2 + e^5) for class 1, else log(2 + e^5)
        log = np.log(2 + np.exp(5))
        train = [fed.data.labels[index] == 1 for index in fed.split.train]
        assert fed.losses(w).tolist() == pytest.approx([log - 5 * own.mean() for own in train])
        every = [log - 5 * r / 20 for r in right]
        assert fed.losses(w, test).tolist() == pytest.approx(every)


# What a method of one's own may get wrong: one line says so, and the exit code is 2


class Method:
    """A method of a few lines, whose parts can be replaced."""

    model, clients, epochs = "w", "v", None

    def step(self, w, b, eta):
        return w - eta * w

    def client_update(self, w, epochs, eta):
        step = common.step(self.step)
        for minibatches in epochs:
            for b in minibatches:
                w = step(w, b, eta)
        return w

    def own(self, state, S):
        return [state.w.expand(len(S), -1)]

    def state(self, fed):
        w = fed.initial_weights()
        return SimpleNamespace(w=w, v=fed.per_client(w), n=0)

    def keep(self, state, S, w_k):
        state.v[S] = w_k

    def log(self, run, everywhere, personal):
        run.log(everywhere, personal)

    def prepare(self, args):
        pass

    def sample(self, fed, t):
        return fed.sample(t)

    def images(self, fed, S):
        return None

    def average(self, w):
        return w

    def end(self, run, state):
        pass

    def main(self, argv):
        fed = federation([*argv, "--rounds", "2", "--eval-every", "1"])
        self.args, self.fed = fed.args, fed
        self.prepare(fed.args)
        run = common.Run(__file__, fed)
        state = self.state(fed)
        for t in run.rounds(state, model=self.model, clients=self.clients):
            S = self.sample(fed, t)
            w_k = fed.train(self.client_update, S, t, own=self.own(state, S), shared=[fed.eta(t)],
                            images=self.images(fed, S), epochs=self.epochs)
            self.keep(state, S, w_k)
            state.w = self.average(fed.n[S] @ w_k / fed.n[S].sum())
            if run.evaluates():
                self.log(run, fed.evaluate(state.w), fed.evaluate_clients(state.w))
        self.end(run, state)
        return run.record()


def forgets(self, *args):
    args[0] + 1


def draws(self, w, epochs, eta):
    return w + torch.rand(1)


def halves(self, w, epochs, eta):
    return w.mul_(0.5)


def cuts(self, w, epochs, eta):
    return w[: 1 + epochs.client % 2]


SLIPS = {
    "too few rows": (dict(own=lambda self, state, S: [state.w.expand(2, -1)]),
                     "federation.train: a tensor in `own` has 2 rows for 3 clients"),
    "the clients' state itself": (dict(own=lambda self, state, S: [state.v]),
                                  "a tensor in `own` has 6 rows for 3 clients"),
    "no return": (dict(client_update=forgets), "is `return` forgotten?"),
    "no return in a step": (dict(step=forgets), "returns nothing; is `return` forgotten?"),
    "a float": (dict(client_update=lambda self, w, epochs, eta: 0.5),
                "client_update returns a float, not tensors"),
    "in place": (dict(step=lambda self, w, b, eta: w.mul_(0.9)), "changes a tensor in place"),
    "the server's model in place": (dict(client_update=halves),
                                    "client_update changes a tensor in place"),
    "random numbers": (dict(client_update=draws), "client_update draws from torch's"),
    "other shapes": (dict(client_update=cuts),
                     "of torch.float32 for another; give all results one shape and type"),
    "random numbers of the server": (
        dict(keep=lambda self, state, S, w_k: state.v.__setitem__(S, w_k + np.random.rand())),
        "the loop draws from torch's, NumPy's or Python's generator"),
    "nobody": (dict(sample=lambda self, fed, t: fed.sample(t, 0)), "train: S is []"),
    "a client from the end": (dict(sample=lambda self, fed, t: np.array([-1, 1])),
                              "train: S is [-1, 1]; it needs a client, and numbers below 6"),
    "a mask": (dict(sample=lambda self, fed, t: torch.ones(6, dtype=torch.bool)),
               "train: S is a mask"),
    "a client that is not there": (dict(sample=lambda self, fed, t: np.array([6])),
                                   "train: S is [6]; it needs a client, and numbers below 6"),
    "images of all clients": (dict(images=lambda self, fed, S: fed.split.train),
                              "train: `images` has 6 rows for 3 clients"),
    "a client without images": (dict(images=lambda self, fed, S: [*fed.split.train[:2], []]),
                                "train: `images` has none for client"),
    "NumPy's noise": (dict(average=lambda self, w: w + torch.from_numpy(np.zeros(len(w)))),
                      "the loop makes state.w torch.float64, which began as torch.float32"),
    "rows of whole numbers": (
        dict(state=lambda self, fed: SimpleNamespace(w=fed.initial_weights(), n=0,
                                                     v=fed.per_client(torch.tensor(0))),
             keep=lambda self, state, S, w_k: state.v.__setitem__(S, w_k.norm(dim=1))),
        "rows[S] = x: x is torch.float32, but the rows are torch.int64"),
    "a dict as state": (dict(state=lambda self, fed: {"w": fed.initial_weights()}),
                        "run.rounds(state) takes a State(...)"),
    "a class as state": (dict(state=lambda self, fed: SimpleNamespace),
                         "run.rounds(state) takes a State(...)"),
    "a model of NumPy's numbers": (
        dict(clients=None, keep=lambda *_: None, state=lambda self, fed: SimpleNamespace(
            w=fed.initial_weights().double(), n=0)),
        "state.w is torch.float64, a model is torch.float32; use .float()"),
    "another rate": (dict(keep=lambda self, state, S, w_k: self.args.__setattr__("lr", 1.0)),
                     "args.lr has changed since Run was made, and the record has the old value"),
    "two names for one tensor": (
        dict(clients=None, state=lambda self, fed: SimpleNamespace(**dict.fromkeys(
            ("w", "best"), fed.initial_weights()))),
        "state.w and state.best share their memory, which they would not after --resume"),
    "an attribute of federation": (
        dict(keep=lambda self, state, S, w_k: setattr(self.fed, "u", w_k)),
        "the loop sets `u` on federation or its net, which --resume would not restore"),
    "masks of images": (dict(images=lambda self, fed, S: [
        np.ones(len(fed.split.train[k]), bool) for k in S]), "train: `images` has masks"),
    "no epochs": (dict(epochs=0), "train: epochs=0 trains nothing; it is a whole number, from 1"),
    "half an epoch": (dict(epochs=0.5), "train: epochs=0.5 trains nothing"),
    "test images in again": (
        dict(client_update=lambda self, w, epochs, eta: [
            w + len(z) for z in epochs.again(images=self.fed.split.test[epochs.client])][0]),
        "epochs.again: `images` has some that are nobody's for training or validation"),
    "a loss of no images": (
        dict(keep=lambda self, state, S, w_k: self.fed.losses(state.w, self.fed.split.val)),
        "losses: `images` has none for client 0; leave it out, or, if these are validation"),
    "accuracy of no images": (
        dict(keep=lambda self, state, S, w_k: self.fed.evaluate_clients(
            state.w, [*self.fed.split.test[:5], []])),
        "evaluate_clients: `images` has none for client 5"),
    "a number as row": (dict(state=lambda self, fed: fed.per_client(0.5)),
                        "per_client takes a tensor, or a function of k that gives one, not a flo"),
    "another share": (dict(prepare=lambda self, args: args.__setattr__("client_test", 0.3)),
                      "args.client_test has changed since Federation was made; set it before"),
    "a model after the end": (dict(end=lambda self, run, state: setattr(state, "w", 2 * state.w)),
                              "state.w has changed after the loop, and the models are written"),
    "measures at the end": (dict(end=lambda self, run, state: run.log(n=0.5)),
                            "run.log: the record is written; with run.rounds(..., more_follows="),
    "test images": (dict(images=lambda self, fed, S: [fed.split.test[k] for k in S]),
                    "train: `images` has some that are nobody's for training or validation"),
    "a tensor in args": (dict(prepare=lambda self, args: args.__setattr__("mine", torch.ones(2))),
                         "args.mine is a Tensor, which a record can't hold"),
    "weights as numbers": (dict(log=lambda self, run, a, b: run.sent(torch.ones(3), 3)),
                           "run.sent takes how many weights are sent, not a Tensor; write w.num"),
    "another tensor's gradient": (
        dict(step=lambda self, w, b, eta: w - common.grad(lambda x: w.sum())(w)),
        "common.grad: the function's value does not depend on its argument"),
    "a number as measures": (dict(log=lambda self, run, a, b: run.log(0.5)),
                             "run.log(global, personal) takes what evaluate returns, then"),
    "measures without accuracy": (dict(log=lambda self, run, a, b: run.log({"accuracy": 0.5})),
                                  "run.log(global, personal) takes what evaluate returns, then"),
    "a second loop": (dict(end=lambda self, run, state: [*run.rounds(state)]),
                      "a run has one loop over it"),
    "a list for rows": (dict(keep=lambda self, state, S, w_k: state.v.__setitem__(S, [*w_k])),
                        "rows[S] = x takes a tensor, not a list"),
    "rows of rows": (dict(keep=lambda self, state, S, w_k: state.v.__setitem__(S, state.v.of(S))),
                     "not a Sampled; rows[S] = other[T] copies rows of other Rows"),
    "a wrong model": (dict(model="W"), "run.rounds: `state` has no W; it has w, v, n"),
    "wrong clients": (dict(clients="V"), "run.rounds: `state` has no V; it has w, v, n"),
    "rows outside state": (
        dict(clients=None, keep=lambda *_: None, state=lambda self, fed: (
            fed.per_client(torch.zeros(2)), SimpleNamespace(w=fed.initial_weights()))[1]),
        "what federation.per_client returns must be in `state`"),
    "a late name": (dict(keep=lambda self, state, S, w_k: setattr(state, "h", 1.0)),
                    "the loop adds h to `state`; set every name before run.rounds(state)"),
    "a NumPy number": (dict(keep=lambda self, state, S, w_k: setattr(state, "n", np.float64(1))),
                       "state.n is a float64; keep tensors and Python's own numbers"),
    "a list": (dict(keep=lambda self, state, S, w_k: setattr(state, "n", [w_k])),
               "state.n is a list; keep tensors and Python's own numbers"),
    "swapped measures": (dict(log=lambda self, run, a, b: run.log(b, a)),
                         "run.log(global, personal) takes what evaluate returns, then"),
    "two globals": (dict(log=lambda self, run, a, b: run.log(a, a)),
                    "run.log(global, personal) takes what evaluate returns, then"),
    "a reserved name": (dict(log=lambda self, run, a, b: run.log(a, b, seconds=1.0)),
                        "run.log(seconds=...): the record has its own seconds"),
    "a name with a slash": (dict(log=lambda self, run, a, b: run.log(a, b, **{"a/b": 1.0})),
                            "the name a/b has a /"),
    "a set": (dict(log=lambda self, run, a, b: run.log(a, b, own={1})),
              "run.log can't record a set; give it tensors, numbers and texts"),
}


@pytest.mark.parametrize("name", [None, *SLIPS])
def test_slips_of_a_method(name, toy, tmp_path, capsys):
    argv = ["--dataset", toy, "--model", "linear", "--clients", "6", "--fraction", "0.5",
            "--split", "iid", *CPU, "--out", str(tmp_path / "out")]
    parts, words = SLIPS.get(name, ({}, ""))
    method = type("Mine", (Method,), parts)()
    if name is None:
        assert method.main(argv)["status"] == "finished"
        return
    with pytest.raises(SystemExit) as stop:
        method.main(argv)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and words in error and error.count("\n") == 1, error


def test_what_is_called_outside_of_the_loop(toy, tmp_path, capsys):
    fed = federation(["--dataset", toy, "--model", "linear", "--split", "iid", "--clients", "6",
                      *CPU, "--out", str(tmp_path)])
    run = common.Run(__file__, fed)
    refused(capsys, "run.log belong in the loop `for t in run.rounds(state)`", run.sent, 1, 1)
    refused(capsys, "BY_DATASET['lr'] is no dict", common.parse, common.parser(""), {"lr": 0.1}, [])
    refused(capsys, "BY_DATASET has 'cifar-10'", common.parse, common.parser(""),
            {"mnist": {}, "a.npz": {}, ("tests", "iid"): {}, ("cifar-10", "iid"): {}}, [])
    refused(capsys, "takes a dict second, as {}", common.parse, common.parser(""), [])
    parser = common.parser("", mu=0.01)
    parser.add_argument("--mu", type=float, default=0.5)
    refused(capsys, "the defaults say mu=0.01, and add_argument default=0.5", common.parse, parser,
            {}, [])
    for defaults, words in ({"fraction": 10}, "fraction=10: 10 must be at least 0 and at most 1"), (
            {"rounds": 0}, "rounds=0: 0 must be at least 1"):
        refused(capsys, f"the defaults say {words}", common.parse, common.parser("", **defaults),
                {}, [])
    parser = common.parser("", plot=True)
    parser.add_argument("--own", action="store_true", default=True)
    refused(capsys, "--own is True without being given, so nothing makes it False; use action=",
            common.parse, parser, {}, [])


def test_an_error_names_the_client_and_a_model_its_shape(toy):
    fed = federation(["--dataset", toy, "--model", "linear", "--split", "iid", "--clients", "6",
                      *CPU])
    w = fed.initial_weights()

    def client_update(w, epochs):
        return w / (1 if epochs.client < 4 else {}["nothing"])

    with pytest.raises(KeyError) as problem:
        fed.train(client_update, np.arange(6), 0, own=[w.expand(6, -1)])
    assert problem.value.__notes__ == ["(in client_update of client 4)"]
    for wrong, shape in ((w[:-1], "shape [14]"), (w.expand(6, -1), "shape [6, 15]"),
                         ([w], "type list")):
        with pytest.raises(ValueError, match=re.escape(f"is a tensor w [15], not of {shape}")):
            fed.evaluate(wrong)
    with pytest.raises(ValueError, match=re.escape("shape [6, 15]")):
        fed.evaluate_clients(lambda S: w.expand(6, -1))  # not the models of S


@pytest.mark.parametrize("said, wanted", [
    ("Traceback ...\nKeyError: 'no'\n(in client_update of client 3)\n",
     "KeyError: 'no' (in client_update of client 3)"),
    ("mine.py: error: S is []\n", "S is []"), ("", "exit code 1")])
def test_compare_py_repeats_the_error_and_the_client(said, wanted):
    child = object.__new__(comparing.training.Child)
    child.error, child.process = io.BytesIO(said.encode()), SimpleNamespace(wait=lambda: 1)
    assert child.result() == (1, wanted)


def test_features_are_what_enters_the_last_layer():
    fed = federation([*QUICK, "--model", "mnistnet"])
    w, x = fed.initial_weights(), fed.transform(fed.images[:3])
    logits, z = fed.net.features(w, x)
    tensors = {name: w[where].view(shape) for name, where, shape in fed.net.tensors}
    assert z.shape == (3, 100) and torch.equal(logits, fed.net(w, x))
    weight, bias = [*tensors.values()][-2:]
    torch.testing.assert_close(z @ weight.T + bias, logits)


def test_a_state_may_be_changed_in_place(toy, tmp_path):
    """A round that is not completed is forgotten, not taken back."""
    class InPlace(Method):
        def keep(self, state, S, w_k):
            state.v.all.mul_(2)
            state.n += 1

        def log(self, run, everywhere, personal):
            run.state.w += 1

    argv = ["--dataset", toy, "--model", "linear", "--clients", "6", "--fraction", "0.5",
            "--split", "iid", *CPU, "--lr-decay", "0.5", "--lr", "0.5"]
    InPlace().main([*argv, "--out", str(tmp_path)])
    w = w_0 = federation(argv).initial_weights()
    for eta in (0.5, 0.25):
        w = w - eta * w  # one minibatch an epoch; equal clients
        w = w + 1
    state = saved(tmp_path)
    torch.testing.assert_close(state["w"], w)
    assert state["n"] == 2 and torch.equal(state["v"], 4 * w_0.expand(6, -1))


@pytest.mark.parametrize("personal", [None, {"mean": 0.5, "loss": 1.0, "per_client": [0.5]}])
def test_measures_that_a_method_may_leave_out(personal, toy, tmp_path):
    """Personal ones alone, or none of the two."""
    class Own(Method):
        def log(self, run, everywhere, _):
            run.log(personal=personal, mine=2.5)

    record = Own().main(["--dataset", toy, "--model", "linear", "--clients", "6", "--split", "iid",
                         *CPU, "--out", str(tmp_path)])
    assert record["final"]["mine"] == 2.5 and "global" not in record["final"]
    assert ("personal" in record["final"]) == bool(personal)
