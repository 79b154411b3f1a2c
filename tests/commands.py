"""The commands of the matrix: each algorithm and method, and each way through its code, on a few
bundled images. tests/test_matrix.py and checks/bits.py train them. An algorithm joins by a line.
"""

import baselines

SOME = ["--dataset", "shapes", "--limit", "400", "--limit-test", "200", "--clients", "8",
        "--fraction", "0.4", "--rounds", "2", "--epochs", "1", "--lr", "0.01", "--lr-decay", "1",
        "--batch-size", "20", "--transform", "scale", "--device", "cpu", "--split",
        "dirichlet-classes", "--alpha", "1", "--client-val", "0.2"]  # 3 of 8 clients, unequal
ONE = ["--model", "mnistnet", "--batch-size", "10", "--epochs", "2", "--fraction", "0.1"]
ALL = [*SOME, "--fraction", "1", "--model", "cnn"]
PSINET = ["psinet", *SOME, "--limit", "200", "--limit-test", "100"]

COMMANDS = {
    "fedavg": ["fedavg", *SOME],
    # under torchrun one of the processes has nobody to train
    "fedavg, one client": ["fedavg", *SOME, "--fraction", "0.1"],
    # stops after the first round of two
    "fedavg, target": ["fedavg", *SOME, "--target", "0.01"],
    "fedavg, augmented": ["fedavg", *SOME, "--transform", "tensorflow", "--model", "tfcnn"],
    "fedavg, bf16": ["fedavg", *ALL, "--precision", "bf16"],
    "fedavgm": ["fedavgm", *SOME, "--model", "cnn"],
    "superfed, model": ["superfed", *SOME, "--mix", "model"],
    "superfed, layer": ["superfed", *SOME, "--mix", "layer", "--fine-tune", "1,3"],
    "superfed, own start": ["superfed", *ALL, "--start", "0", "--own-start"],
    "fedslr": ["fedslr", *SOME, "--model", "cnn"],
    "persfl": ["persfl", *SOME, "--model", "mnistnet", "--fraction", "1"],
    "persfl, last teacher": ["persfl", *ALL, "--model", "mnistnet", "--teacher", "final",
                             "--soft", "ce"],
    "psinet": [*PSINET, "--model", "vgg9"],
    "psinet, all groups": [*PSINET, "--model", "cnn", "--no-prune"],
    "psinet, FedAvg with BatchNorm": [*PSINET, "--model", "cnn", "--groups", "0", "--norm", "bn"],
    "fedavg, momentum": ["baselines", "--method", "fedavg", *SOME, "--momentum", "0.9"],
    **{f"{method}, one client": ["baselines", "--method", method, *more, *SOME, *ONE]
       for method, *more in (["fedma"], ["fedspa"], ["scaffold", "--option", "I"], ["per-fedavg"])},
    **{method: ["baselines", "--method", method, *SOME, "--model", "mnistnet", "--epochs", "2"]
       for method in baselines.METHODS if method != "fedavg"},
}

# Those that two processes train, too: every way through the code that knows processes
TWO = ["fedavg", "fedavg, one client", "fedavg, target", "superfed, layer", "fedslr",
       "persfl, last teacher", "psinet, all groups", "scaffold", "fedavg-ft", "fedma", "fedspa",
       "local", "centralised"]
