"""The scripts of checks/authors, without the authors' code: a stand-in of a few lines has the
interface of each repository and learns nothing. The script must run to its end, notice that, and
give the lines that are in results/authors.json."""

import importlib
import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "checks" / "authors"))

import baselines
import check
import everything

RECORD = json.loads((ROOT / "results" / "authors.json").read_text())

COIN_FLIPS = """
import numpy as np, torch, utils_general
get_acc_loss = None
def one_round(data, clients):
    chosen = np.flatnonzero(np.random.uniform(size=data.n_client) <= 0.5)
    x, y = next(iter(utils_general.data.DataLoader(clients[chosen[0]], batch_size=4)))
    assert len(x) == len(y) and len(chosen) == 2
"""

MAIN_SCRIPT = """
import copy, numpy as np, models.Update
from utils.options import args_parser
from utils.train_utils import get_model
from models.test import test_img_local_all
args, net_glob = args_parser(), get_model(None)
net_local_list = [copy.deepcopy(net_glob) for _ in range(args.num_users)]
w_locals = {k: net.state_dict() for k, net in enumerate(net_local_list)}
for round in range(args.epochs):
    k = np.random.choice(range(args.num_users), 2, replace=False)[0]
"""

STAND_INS = {
    "feddyn": [{
        "utils_general.py": "data = Dataset = get_acc_loss = None\nmax_norm = 10",
        "utils_methods.py": COIN_FLIPS + """
def train_FedDyn(data_obj, init_model, **_):
    one_round(data_obj, data_obj.clnt_x)
    avg_model, d = init_model, sum(p.numel() for p in init_model.parameters())
    all_model, cld_mdl_param, local_param_list = init_model, np.zeros(d), np.zeros((4, d))
def train_SCAFFOLD(data_obj, init_model, **_):
    avg_model, d = init_model, sum(p.numel() for p in init_model.parameters())
    state_param_list = np.zeros((5, d))
def train_FedProx(data_obj, init_model, **_):
    avg_model = init_model
"""}],
    "fedslr": [{
        "utils_general.py": "data = Dataset = get_acc_loss = None",
        "utils_models.py": """
import torch
class Part(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        for name, p in layer.named_parameters():
            for part in "wp":
                own = torch.nn.Parameter(p.detach().clone())
                setattr(self, part + "_bias" * (name == "bias"), own)
def construct_mask_model(model, args):
    return torch.nn.ModuleDict({name: Part(layer) for name, layer in model.named_children()})
class client_model(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.classes = 10 if name == "Resnet18" else 100
        self.w = torch.nn.Parameter(torch.zeros(11_173_952 + 512 * (self.classes - 10)))
    def forward(self, x):
        return self.w[0] * torch.ones(len(x), self.classes)
""",
        "utils_methods.py": COIN_FLIPS + """
def split(model, word):
    return {name: p for name, p in model.named_parameters() if word in name}
def train_fedSLR(data_obj, init_model, **_):
    one_round(data_obj, data_obj.client_x)
    cld_model_w, comm_param_num_array = split(init_model, ".w"), [0]
    local_p, local_dual_variables_mu = [split(init_model, ".p")] * 4, [cld_model_w] * 4
def train_FedAvg(init_model, **_):
    avg_model = init_model
    ditto_params = [torch.cat([p.flatten() for p in init_model.parameters()])] * 4
def train_standalone(init_model, **_):
    local_ws = [dict(init_model.named_parameters())] * 4
def train_FedRep(init_model, **_):
    g_param = g_param_temp = split(init_model, "conv")
    p_params = [split(init_model, "fc")] * 4
def train_LGFedAvg(init_model, **_):
    g_param, p_params = split(init_model, "fc"), [split(init_model, "conv")] * 4
def train_apfl(init_model, **_):
    avg_model, vs = init_model, [dict(init_model.named_parameters())] * 4
def train_SCAFFOLD(init_model, **_):
    avg_model, d = init_model, sum(p.numel() for p in init_model.parameters())
    state_params_diffs = np.zeros((5, d))
"""}],
    "superfed": [{
        "src/client.py": """
import copy, torch
DataLoader = None
class Client:
    def __init__(self, id, data, device):
        self.data, self.model = data, None
    def __len__(self):
        return len(self.data)
    def setup(self, batch_size, **_):
        n = int(len(self) * 0.8)
        self.training, self.test = torch.utils.data.random_split(self.data, [n, len(self) - n])
        self.loader = DataLoader(self.training, batch_size=batch_size, shuffle=True, drop_last=True)
    def client_evaluate(self):
        return [[sum(len(x) for x, y in self.test_dataloader)] * 11] * 3
""",
        "src/server.py": """
import copy
from src.models import MNISTConvNet
from src.client import Client
cpu_count = None
class Server:
    def __init__(self, writer, args):
        self.model = MNISTConvNet("", 1, args.hidden_channels, args.num_hiddens, args.num_classes)
        self.optimizer = self.optim_config = self.criterion = None
    def sample_clients(self):
        pass
    def setup_clients(self, **settings):
        for client in self.clients:
            client.setup(**settings)
    def transmit_model(self):
        for client in self.clients:
            client.model = copy.deepcopy(self.model)
    def train_federated_model(self):
        x, y = next(iter(self.clients[self.sample_clients()[0]].loader))
        assert len(x) == len(y)
""",
        "src/models.py": """
import torch
class Layer(torch.nn.Module):
    def __init__(self, out, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(out * size))
        self.bias = torch.nn.Parameter(torch.zeros(out))
        self.weight1 = torch.nn.Parameter(torch.zeros(out * size))
class MNISTConvNet(torch.nn.Module):
    def __init__(self, name, channels, hidden, units, classes):
        super().__init__()
        self.classes, h = classes, hidden
        self.conv1, self.conv2 = Layer(h, channels * 25), Layer(2 * h, h * 25)
        self.conv3 = Layer(h, 2 * h * 4)
        self.fc1, self.fc2 = Layer(units, h), Layer(classes, units)
    def forward(self, x):
        return torch.zeros(len(x), self.classes)
""",
        "src/utils.py": """
import torch
def accuracy(output, target, topk):
    return torch.zeros(2)
"""}, {
        "src/algorithm.py": """
import torch, numpy as np
initiate_model = None
def superfed_update(identifier, args, model, criterion, dataset, optimizer, lr, start_mix):
    x, y = next(iter(torch.utils.data.DataLoader(dataset)))
    assert len(x) == len(y) and 0 < np.random.uniform(0.0, 1.0) < 1
""",
        "src/models/layers.py": """
import torch
class LinesConv(torch.nn.Conv2d):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.weight_local = torch.nn.Parameter(torch.zeros_like(self.weight))
class LinesLinear(torch.nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.weight_local = torch.nn.Parameter(torch.zeros_like(self.weight))
"""}],
    "pfedme": [{
        f"FLAlgorithms/servers/{name}.py": f"""
import copy, types
read_data = read_user_data = None
class {server}:
    def __init__(self, device, dataset, algorithm, model, batch_size, **settings):
        self.model, self.users, self.rounds = model[0], [], settings["num_glob_iters"]
        for k in range(len(read_data(dataset)[0])):
            user = types.SimpleNamespace(model=copy.deepcopy(model[0]))
            user.optimizer = types.SimpleNamespace(step=lambda: None)
            user.local_model = list(user.model.parameters())
            self.users.append(user)
            assert len(read_user_data(k, None, dataset)) == 3
    def train(self):
        for _ in range(self.rounds):
            if {first}:
                self.selected = self.select_users()
            for user in self.users if not {first} else self.selected:
                x, y = user.get_next_train_batch()
                user.optimizer.step()
            if not {first}:
                self.selected = self.select_users()
""" for name, server, first in (("serverpFedMe", "pFedMe", False),
                                ("serverperavg", "PerAvg", True))}],
    "ditto": [{
        "flearn/trainers_MTL/ditto.py": """
gen_batch = None
class Server:
    def __init__(self, params, learner, dataset):
        self.client_model, self.clients = learner(), dataset[0]
        self.rounds = params["num_rounds"] + 1
        self.global_model = self.client_model.get_params()
        self.local_models = [self.client_model.get_params() for _ in self.clients]
        self.data = dataset[2]
    def train(self):
        batches = [gen_batch(self.data[k], 4, 6) for k in self.clients]
        for t in range(self.rounds):
            for k in self.select_clients(round=t, num_clients=2)[0]:
                self.client_model.set_params(self.local_models[k])
                gradients, loss, weights = self.client_model.solve_sgd(next(batches[k]))
"""}],
    "lgfedavg": [{
        "main_lg.py": MAIN_SCRIPT, "utils/options.py": "args_parser = None",
        "utils/train_utils.py": "get_data = get_model = None", "models/__init__.py": "",
        "models/Update.py": "DataLoader = None",
        "models/test.py": "test_img_local_all = test_img_avg_all = None"}],
    "fedrep": [{
        "main_fedrep.py": MAIN_SCRIPT, "utils/options.py": "args_parser = None",
        "utils/train_utils.py": "get_data = get_model = read_data = None", "models/__init__.py": "",
        "models/Update.py": "DataLoader = None"}],
    "fedma": [{
        "matching/pfnm.py": """
import numpy as np
from lapsolver import solve_dense
def match_layer(weights, sigma_inv, mean_prior, sigma_inv_prior, gamma, it):
    rows, columns = solve_dense(np.eye(12))
    precision = (len(weights) + 1) * np.ones(weights[0].shape)
    return [list(columns)] * len(weights), sum(weights), precision
"""}],
}


def whats(lines):
    """The lines' names, without what was counted."""
    return [line["what"].split(" (")[0] for line in lines]


@pytest.mark.parametrize("name", STAND_INS)
def test_a_program_that_learns_nothing_is_noticed(name, tmp_path):
    script, folders = check.script(name), []
    for i, files in enumerate(STAND_INS[name]):
        folders.append(tmp_path / str(i))
        for path, text in files.items():
            (folders[-1] / path).parent.mkdir(parents=True, exist_ok=True)
            (folders[-1] / path).write_text(text)
    lines = check.compared(script, *folders)
    recorded = whats(RECORD["scripts"][name]["lines"])
    assert whats(lines) == recorded, "run make authors CLONES=folder again"
    assert not all(map(check.sound, lines)) and "NOT EXPLAINED" in check.table(lines)


def test_pytorchs_optimiser_is_the_other_side_of_fedavg_and_fedavgm():
    lines = check.compared(check.script("torch_sgd"))
    assert whats(lines) == whats(RECORD["scripts"]["torch_sgd"]["lines"])
    assert all(map(check.sound, lines))


def test_every_repository_has_a_script_and_a_stand_in():
    assert set(check.REPOSITORIES) == {*STAND_INS, "torch_sgd"} == set(RECORD["scripts"])
    for name in check.REPOSITORIES:
        script = check.script(name)
        assert script.NAME == name
        assert list(script.COMMITS) == RECORD["scripts"][name]["commits"]


def test_every_difference_of_the_record_is_rounding_or_has_its_choice():
    lines = [line for part in RECORD["scripts"].values() for line in part["lines"]]
    assert lines and all(map(check.sound, lines))
    for line in lines:
        if line["because"]:
            name, *choices = line["because"].replace(",", "").split()
            own = name in ("superfed", "fedslr", "fedavgm")  # a file, or a function of baselines.py
            text = importlib.import_module(name).__doc__ if own else baselines.METHODS[name].__doc__
            assert choices and all(f"    {choice}  " in text for choice in choices), line["because"]


def test_the_readme_quotes_the_record():
    text = " ".join((ROOT / "README.md").read_text().split())
    for name, title in (("superfed", "SuPerFed"), ("fedslr", "FedSLR"), ("pfedme", "pFedMe")):
        lines = RECORD["scripts"][name]["lines"]
        largest = max(line["difference"] for line in lines if not line["because"])
        assert f"{largest:.0e} for {title}" in text


def test_the_page_is_made_from_the_record_and_has_at_most_1800_words():
    page = (ROOT / "docs" / "authors.md").read_text()
    assert page == everything.page(RECORD) and len(page.split()) <= 1800


def test_a_commit_is_taken_out_of_a_clone_and_a_clone_without_it_is_refused(tmp_path, capsys):
    def git(*words):
        me = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", tmp_path, *me, *words], check=True, capture_output=True)

    git("init")
    (tmp_path / "a.py").write_text("then")
    git("add", "-A")
    git("commit", "-m", "one")
    command = ["git", "-C", tmp_path, "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    (tmp_path / "a.py").write_text("now")
    with check.source(tmp_path, commit, "a/b") as folder:
        assert (folder / "a.py").read_text() == "then"
    with pytest.raises(SystemExit), check.source(tmp_path, "0" * 40, "a/b"):
        pass
    assert "git clone https://github.com/a/b" in capsys.readouterr().err
