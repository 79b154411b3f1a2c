"""Statistics over many methods: Holm's correction, and mean ranks with a critical difference
(Demsar 2006, "Statistical Comparisons of Classifiers over Multiple Data Sets", JMLR)."""

import math

import numpy as np
from scipy import stats


def holm(p):
    """Returns p-values [n], corrected so that all of them below .05 are wrong together with
    probability .05 at most (Holm 1979)."""
    order, corrected, largest = np.argsort(p), np.empty(len(p)), 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p) - place) * p[i]))
        corrected[i] = largest
    return corrected


def mean_ranks(scores):
    """Returns each method's rank (1: the highest score; ties get their mean rank), averaged over
    the blocks. scores: [blocks, methods]."""
    return stats.rankdata(-np.asarray(scores), axis=1).mean(0)


def critical_difference(methods, blocks):
    """Returns by how much two methods' mean ranks must differ (Nemenyi's test at .05)."""
    q = stats.studentized_range.ppf(0.95, methods, np.inf) / math.sqrt(2)
    return q * math.sqrt(methods * (methods + 1) / (6 * blocks))
