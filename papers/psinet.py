"""Psi-Net's tables, and figures of the paper's later version, Fed2."""

from . import figures, settings, table

TITLE = "Yu et al. 2020, Heterogeneous Federated Learning (Psi-Net, later Fed2)"
SETTINGS = {  # the setting in which the paper compares methods, for files with other defaults
    "psinet": "--model vgg9 --split classes --per-client 4 --clients 10 --client-test 0 "
              "--fraction 1 --batch-size 64 --lr 0.01 --momentum 0.9 --weight-decay 1e-4 "
              "--transform fedslr",
}

CIFAR_10, CIFAR_100 = "psinet.py --dataset cifar10", "psinet.py --dataset cifar100"
PLAIN = " --groups 0 --norm none"  # FedAvg on the network without groups
PRUNED = " --prune"  # the default now; said since a record is named by its command


def norm(row, column):
    more = {"FedAvg": PLAIN, "FedAvg + BN": " --groups 0 --norm bn", "Psi-Net": PRUNED,
            "FedAvg + GN": " --groups 0 --norm gn", "Psi-Net (--no-prune)": " --no-prune"}
    return CIFAR_10 + more[row], "global/top1"


def epochs(row, column):
    rounds = {"Psi-Net E=1": 1000, "Psi-Net E=20": 60, "Psi-Net E=40": 50, "Psi-Net E=100": 15,
              "Psi-Net E=150": 13, "FedMA E=150": 10, "FedAvg E=20": 100, "FedProx E=20": 100}
    command = {"Psi-Net": CIFAR_10, "FedAvg": CIFAR_10 + PLAIN,
               "FedMA": "baselines.py --method fedma --dataset cifar10 @psinet",
               "FedProx": "baselines.py --method fedprox --dataset cifar10 @psinet"}[row.split()[0]]
    command += f" --epochs {settings(row)['E']} --rounds {rounds[row]}"
    if row == "FedProx E=20":
        command += " --mu 0.001"  # FedMA's value for its comparison
    return command, "global/top1"


def groups(row, column):
    more = {"FedAvg": PLAIN, "G=10": "", "G=20": " --groups 20", "G=100": " --groups 100"}
    return CIFAR_100 + more[row], "global/top1"


def depth(row, column):
    more = PRUNED if "C3-1" in row else f" --depth {row.split()[0]}"
    return CIFAR_10 + more, "global/top1"


def classes(row, column):
    own = "" if column == "10x50" else f" --per-client {column.removeprefix('10x')}"
    return CIFAR_100 + {"FedAvg": PLAIN, "Psi-Net": ""}[row] + own, "global/top1"


TABLES = [
    table("psinet-norm", "Normalisation (VGG-9, CIFAR-10, 10x4)", "top-1", """
    FedAvg               | 84.13
    FedAvg + BN          | 85.46
    FedAvg + GN          | 83.34
    Psi-Net              | 88.26
    Psi-Net (--no-prune) | ?
    """, norm, 1,
          "10x4 is 10 nodes with 4 classes each. A node has only the groups of its classes, with "
          "--no-prune all groups. Which of the two the paper's 88.26 is is lost (D6).", {
        "All": "Psi-Net and FedAvg + GN have all 100 rounds, the others 8 to 25. [Its "
               "page](../docs/psinet.md#what-was-measured) has 65 of FedAvg + BN. With "
               "--no-prune a node has all groups, and its softmax all classes: the two rows of "
               "Psi-Net are far apart. At equal rounds FedAvg without normalisation is last. In "
               "the paper it is not.",
    }, figures.rounds),
    table("psinet-groups", "Number of groups (VGG-16, CIFAR-100, 10x50)", "top-1", """
    FedAvg | 65.32
    G=10   | 68.23
    G=20   | 68.17
    G=100  | 67.23
    """, groups, 3, draw=figures.rounds),
    table("psinet-depth", "Where grouping starts (VGG-9, CIFAR-10)", "top-1", """
    conv3 (C2-1) | ?
    conv4 (C2-2) | ?
    conv5 (C3-1) | ?
    conv6 (C3-2) | 89-90
    fc1          | ?
    """, depth, 4,
          "Our notes of the paper say 89 to 90 for every start from C3-2 to C5-2. That network "
          "can't be our VGG-9, which has three stages. So the published number beside conv6 is "
          "another network's."),
    table("psinet-epochs", "Fed2: local epochs against FedMA, FedAvg and FedProx (VGG-9, CIFAR-10)",
          "top-1", """
    Psi-Net E=1   | 89.96
    Psi-Net E=20  | 89.10
    Psi-Net E=40  | 89.28
    Psi-Net E=100 | 88.10
    Psi-Net E=150 | 88.29
    FedMA E=150   | 87.53
    FedAvg E=20   | 86.29
    FedProx E=20  | 85.32
    """, epochs, 4,
          "From a figure of Fed2. Rounds are the figure's local epochs, read off its axis, divided "
          "by E. Its split is not stated; 10x4 is taken.", draw=figures.rounds),
    table("psinet-classes", "Fed2: classes per node (VGG-16, CIFAR-100)",
          "10x30 10x40 10x50 10x100", """
    FedAvg  | 61 64 65 66
    Psi-Net | 64 67 68 70
    """, classes, 3, "From a figure of Fed2. Its G is not stated.", draw=figures.rounds),
]
