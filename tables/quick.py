"""The claims of reproduce.py --quick: which method is better, by short runs on the embedded data set."""

from typing import NamedTuple

from tables.psinet import PLAIN


class Claim(NamedTuple):
    paper: str
    words: str
    more: tuple  # (command or several of which the best counts, measure)
    less: tuple


SKEWED = ("fedavgm.py --dataset shapes --limit 4000 --split dirichlet-hsu --client-test 0 "
          "--fraction 0.25 --rounds 60 --eval-every 20 --alpha")
FEDAVG = "fedavg.py --dataset shapes", "personal/mean"
MM, LM = "superfed.py --dataset shapes --mix model", "superfed.py --dataset shapes --mix layer"
EVEN = MM, "lambdas/5/mean"
FEDSLR = "fedslr.py --dataset shapes --limit 6000"
AS_FEDSLR = ("fedavg.py --dataset shapes --limit 6000 --split fedslr --alpha 0.1 --client-test 0 --rounds 20 --batch-size 20 "
             "--lr 0.05 --lr-decay 0.998 --momentum 0 --weight-decay 1e-3", "personal/mean")
PERSFL = "persfl.py --dataset shapes --limit 3000"
GROUPED = "psinet.py --dataset shapes --limit 3000"
FEDAVGM_WINS = [f"{SKEWED} 1 --lr {lr} --beta {beta}" for lr, beta in ((0.01, 0.9), (0.03, 0.7))]
FEDAVG_LOSES = [f"{SKEWED} 1 --lr {lr} --beta 0" for lr in (0.03, 0.1)]
CLAIMS = [
    Claim("SuPerFed", "Model Mixing is better for its clients than FedAvg (Table 1)", (MM, "personal/mean"), FEDAVG),
    Claim("SuPerFed", "Layer Mixing is better for its clients than FedAvg (Table 1)", (LM, "personal/mean"), FEDAVG),
    Claim("SuPerFed", "an even mixture is better than the local model alone (Figure 2)", EVEN, (MM, "lambdas/10/mean")),
    Claim("SuPerFed", "an even mixture is better than the global model alone (Figure 2)", EVEN, (MM, "lambdas/0/mean")),
    Claim("FedAvgM", "FedAvg is better on equal clients, alpha 100, than on skewed ones, alpha 1 (Figure 3)",
          ([c.replace("--alpha 1", "--alpha 100") for c in FEDAVG_LOSES], "global/top1"), (FEDAVG_LOSES, "global/top1")),
    Claim("FedAvgM", "on skewed clients FedAvgM is better than FedAvg (Figure 5)",
          (FEDAVGM_WINS, "global/top1"), (FEDAVG_LOSES, "global/top1")),
    Claim("Psi-Net", "the method is better than FedAvg without groups and norms (normalisation ablation)",
          (GROUPED, "global/top1"), (GROUPED + PLAIN, "global/top1")),
    Claim("FedSLR", "the mixed model is better for its clients than the low-rank global model (Table 1, Non-IID)",
          (FEDSLR, "personal/mean"), (FEDSLR, "gkr/mean")),
    Claim("FedSLR", "the low-rank global model is better for the clients than FedAvg's (Table 1, Non-IID)",
          (FEDSLR, "gkr/mean"), AS_FEDSLR),
    Claim("FedSLR", "the full model takes more numbers than the low-rank one (Table 2)",
          (FEDSLR, "parameters"), (FEDSLR, "numbers/gkr")),
    Claim("PersFL", "PersFL is better for its users than FedAvg (Table 2)",
          (PERSFL, "users/PersFL/Avg"), (PERSFL, "users/FedAvg/Avg")),
]
