"""FedSLR's tables and its Figure 3."""

from . import DATA, figures, pairs, settings, table, unknown

TITLE = ("Huang et al. 2023, Fusion of Global and Local Knowledge for Personalized Federated "
         "Learning (FedSLR)")
COMMON = ("--client-test 0 --fraction 0.1 --rounds 1000 --epochs 2 --batch-size 20 --lr 0.1 "
          "--lr-decay 0.998 --momentum 0 --weight-decay 1e-3 --model resnet18 --transform "
          "fedslr --eval-every 20")
# the settings in which the paper compares methods, for files with other defaults
SETTINGS = {"fedslr": f"--split fedslr --alpha 0.1 {COMMON}", "fedslr-iid": f"--split iid {COMMON}"}

MODEL = {"GKR": "gkr/mean", "mixed": "personal/mean", "FedSLR (GKR)": "gkr/mean",
         "FedSLR (mixed)": "personal/mean"}
OTHERS = {"LGFedAvg": "lg-fedavg", "Ditto": "ditto --ditto-lambda 0.1 --personal-epochs 1",  # B.2
          "FedDyn": "feddyn --feddyn-alpha 0.1", "APFL": "apfl --apfl-alpha 0.5"}
BOTH = pairs("GKR|mixed", "acc|GB|10^6")


def test_share(name, part):
    """Tiny ImageNet's IID clients are too small for shares of the central test images (D7)."""
    return " --client-test 0.2" if (name, part) == ("TinyImageNet", "IID") else ""


def run(name, part="Non-IID", more=""):
    iid = " --split iid" if part == "IID" else ""
    return f"fedslr.py --dataset {DATA[name]}{iid}{test_share(name, part)}{more}"


def table_1(row, column):
    name, part = column.split()
    if row in MODEL:
        return run(name, part), MODEL[row]
    method = OTHERS.get(row, row.lower())
    setting = "@fedslr-iid" if part == "IID" else "@fedslr"
    steps = " --lr 0.001 --per-fedavg-alpha 0.01" if row == "Per-FedAvg" else ""  # B.2
    more = f"{setting}{test_share(name, part)}{steps}"
    return f"baselines.py --method {method} --dataset {DATA[name]} {more}", "personal/mean"


def table_2(row, column):
    """A client's model: APFL's is two, FedSpa's half of one."""
    name, measure = column.split()
    command = table_1(row.replace(" (*)", ""), f"{name} Non-IID")[0]
    if measure == "GB":
        return command, "bytes"
    size = {"APFL": "2*parameters", "FedSpa": "0.5*parameters", "FedSLR (GKR)": "numbers/gkr",
            "FedSLR (mixed)": "numbers/mixed"}
    return command, size.get(row, "parameters")


def one_flag(row, column):
    """CIFAR-100 with one flag changed, which the row names."""
    flag, value = row.split("=")
    model, _, measure = column.partition(" ")
    more = f" --{flag.replace('_', '-')} {value}"
    if row in ("lambda=1e-4", "mu=1e-3", "eta_g=10", "epochs=2"):  # the default
        more = ""
    parts = {"": MODEL[model], "acc": MODEL[model], "GB": "bytes",
             "10^6": f"numbers/{model.lower()}", "std": "numbers/mixed_std",
             "ms": "latency/factorised_ms"}
    return run("CIFAR-100", more=more), parts[measure]


def table_7(row, column):
    mu = settings(row)["mu"]
    return run("CIFAR-100", more=f" --lambda 10 --mu {mu} --p-start copy"), "personal/mean"


TABLES = [
    table("fedslr-1", "Table 1: accuracy",
          pairs("CIFAR-10|CIFAR-100|TinyImageNet", "IID|Non-IID"), """
    SCAFFOLD       | 91.33 82.91  66.68 59.48  43.13 34.11
    FedDyn         | 92.61 90.14  68.68 64.29  43.52 38.02
    FedAvg         | 90.25 82.89  61.92 55.78  35.17 30.56
    FedSLR (GKR)   | 91.73 87.52  66.40 64.22  41.32 35.13
    Per-FedAvg     | 89.57 91.55  57.10 63.73  34.41 37.52
    LGFedAvg       | 38.32 81.35  12.96 49.90   5.34 35.68
    FedRep         | 89.28 93.41  15.36 60.42   5.48 46.42
    Ditto          | 89.16 94.39  59.36 78.67  34.78 58.30
    APFL           | 75.11 87.11  30.99 61.14  20.16 48.02
    Local          | 38.30 82.17  10.97 47.99   3.86 34.28
    FedSpa         | 88.31 93.19  48.00 73.87  30.39 53.76
    FedSLR (mixed) | 89.72 95.30  64.95 82.19  38.20 59.13
    """, table_1, 1,
          "A number is the mean over the clients of their accuracy on their own test images, "
          "also for methods with one model. FedRep is the method of its own paper here. "
          "FedSLR's code trains body and head jointly under that name, which is fedper here."),
    table("fedslr-2", "Table 2: communication and size",
          pairs("CIFAR-10|CIFAR-100|TinyImageNet", "GB|10^6"), """
    FedAvg (*)     |  893.92 11.17   893.92 11.17   893.92 11.17
    SCAFFOLD       | 1787.83 11.17  1787.83 11.17  1787.83 11.17
    FedSLR (GKR)   |  626.89  3.51   722.60  5.54   730.00  5.34
    APFL           |  893.92 22.35   893.92 22.35   893.92 22.35
    FedSpa         |  446.96  5.59   446.96  5.59   446.96  5.59
    LG-FedAvg      |    0.41 11.17     4.08 11.17     8.13 11.17
    FedRep         |  893.51 11.17   889.84 11.17   885.78 11.17
    FedSLR (mixed) |  626.89  3.96   722.60  6.69   730.00  7.59
    """, table_2, 2,
          "GB is what all clients send and receive in all rounds. 10^6 is how many million "
          "numbers a client's model has. The paper does not state its units, nor that this is "
          "Non-IID; both are inferred. For CIFAR-100 and Tiny ImageNet dense models, and what "
          "FedSLR sends up, seem to be counted with the size of CIFAR-10's network; what FedSLR "
          "sends down with that of the data set's own (D6 in docs/fedslr.md)."),
    table("fedslr-3", "Table 3: low-rank penalty, CIFAR-100", BOTH, """
    lambda=1e-5 | 63.63 819.44 7.33  81.89 819.44 8.54
    lambda=5e-5 | 64.27 770.39 6.56  81.20 770.39 7.83
    lambda=1e-4 | 64.22 722.60 5.54  82.19 722.60 6.69
    lambda=5e-4 | 61.81 568.43 3.09  80.10 568.43 4.04
    lambda=1e-3 | 54.26 498.20 1.27  74.33 498.20 2.24
    """, one_flag, 3),
    table("fedslr-4", "Table 4: sparse penalty, CIFAR-100", pairs("mixed", "acc|GB|10^6|std"), """
    mu=1e-4 | 79.15 720.60 8.50 0.79
    mu=5e-4 | 81.78 722.60 7.12 0.65
    mu=1e-3 | 82.19 722.60 6.69 0.56
    mu=5e-3 | 81.82 722.60 5.78 0.17
    mu=1e-2 | 80.81 720.60 5.56 0.08
    """, one_flag, 3,
          "std is over clients. mu can change neither the GKR nor the GB, so 720.60 is probably "
          "a misprint."),
    table("fedslr-5", "Table 5: proximal step, CIFAR-100", BOTH, """
    eta_g=2   | 60.74 894.06 10.65  80.37 894.06 12.36
    eta_g=10  | 64.22 722.60  5.54  82.19 722.60  6.69
    eta_g=20  | 61.02 668.94  5.16  80.60 668.94  6.15
    eta_g=100 | 58.69 559.88  2.99  78.33 559.88  3.90
    """, one_flag, 3),
    table("fedslr-6", "Table 6: local epochs, CIFAR-100", pairs("GKR|mixed", "acc"), """
    epochs=1 | 58.20 78.82
    epochs=2 | 64.51 81.46
    epochs=3 | 63.86 81.97
    epochs=4 | 64.17 82.20
    """, one_flag, 3,
          "An epoch has 25 steps. Two epochs are Table 1's setting, for which Table 1 prints "
          "64.22 and 82.19."),
    table("fedslr-7", "Table 7: the personal component alone (lambda = 10), CIFAR-100", "mixed", """
    mu=1e-3 | 37.14
    mu=1e-4 | 44.16
    mu=1e-5 | 44.54
    """, table_7, 4),
    table("fedslr-8", "Table 8: the GKR alone, CIFAR-100", "GKR", """
    lambda=1e-3 | 54.26
    lambda=1e-4 | 64.22
    lambda=1e-5 | 63.63
    """, one_flag, 3,
          "The GKR does not depend on p, so these are Table 3's runs."),
    table("fedslr-9", "Table 9: latency of the GKR, 20 images, CIFAR-100", "10^6 ms", """
    lambda=0    | 11.17 10.98
    lambda=1e-5 |  7.33 10.12
    lambda=5e-5 |  6.56  9.30
    lambda=1e-4 |  5.54  9.24
    lambda=5e-4 |  3.09  7.62
    lambda=1e-3 |  1.27  6.53
    """, lambda row, column: one_flag(row, f"GKR {column}"), 5,
          "The paper's times are of a Tesla M60. Ours are measured after a run, by `python -m "
          "papers.fedslr_factors FOLDER`, where FOLDER is the folder of the run's record."),
    table("fedslr-figure-3", "Figure 3: accuracy by client, CIFAR-100, Non-IID", "mean",
          unknown(("FedAvg", "SCAFFOLD", "FedDyn", "Ditto", "FedSpa", "FedSLR (mixed)"), ["mean"]),
          lambda row, column: table_1(row, "CIFAR-100 Non-IID"), 1,
          "The paper shows violins. Which data set they are of is lost in our copy.",
          draw=figures.clients),
]
