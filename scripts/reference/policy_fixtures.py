# SPDX-License-Identifier: Apache-2.0
"""Makes tests/unit/objective/policy.json: made-up rollouts, and losses of a policy with their derivatives by each token's
log-probability, from the formulas in NumPy and in double. Run by hand:  python3 scripts/reference/policy_fixtures.py
A formula's derivative is compared with differences of the formula before it is written."""
import json
import os

import numpy as np

OUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "unit", "objective", "policy.json")
ROWS = ("grpo", "sapo", "gspo")  # the mean of a rollout, then of rollouts
MAX_LEN = 16
CASES = (("grpo", {}), ("bnpo", {}), ("dapo", {"high": 0.28}), ("dr_grpo", {}), ("gspo", {"low": 3e-2, "high": 4e-2}),
         ("cispo", {"high": 1.1}), ("sapo", {}), ("dro", {"beta": 0.1}), ("grpo", {"kl": 0.04}), ("dapo", {"kl": 0.1}),
         ("dapo", {"kl": 0.1, "k1": 1}), ("dapo", {"kl": 0.3, "ratio": 1}), ("grpo", {"dual": 1.5, "low": 0.1, "high": 0.1}),
         ("dapo", {"mismatch": "token", "max": 1.2, "drop": 0}), ("gspo", {"mismatch": "row", "max": 1.5, "drop": 1, "low": 0.1, "high": 0.1}))


def advantages(reward, group):
    reward, group = np.asarray(reward, float), np.asarray(group)
    a = np.zeros_like(reward)
    for g in set(group.tolist()):
        i = group == g
        a[i] = (reward[i] - reward[i].mean()) / (reward[i].std(ddof=1) + 1e-4)
    return a


def term(kind, lp, old, a, keys, held):
    """Terms of a rollout's tokens, which are minimised; held: what is under a stop-gradient."""
    low, high, d = keys.get("low", 0.2), keys.get("high", 0.2), lp - old
    r = np.exp(d)
    if kind in ("grpo", "bnpo", "dapo", "dr_grpo", "gspo"):
        r = np.full(len(lp), np.exp(d.mean())) if kind == "gspo" else r
        least = np.minimum(r * a, np.clip(r, 1 - low, 1 + high) * a)
        return -(np.maximum(least, keys["dual"] * a) if keys.get("dual") and a < 0 else least)
    if kind == "cispo":
        return -held * a * lp
    if kind == "sapo":
        tau = 1.0 if a > 0 else 1.05
        return -4 / tau / (1 + np.exp(-tau * (r - 1))) * a
    return -(lp * a - keys["beta"] / 2 * d * d)  # dro


def factor(row, keys):
    d = (row["old"] - row["sampler"])[row["mask"]]
    f = np.exp(d) if keys.get("mismatch") == "token" else np.full(len(d), np.exp(d.sum()))
    return np.where(f <= keys["max"], f, 0) if keys["drop"] else np.minimum(f, keys["max"])


def loss(kind, rows, keys, held):
    total, tokens = 0, sum(int(r["mask"].sum()) for r in rows)
    for r, h in zip(rows, held):
        m = r["mask"]
        t = term(kind, r["lp"][m], r["old"][m], r["advantage"], keys, h)
        if "mismatch" in keys:
            t = t * factor(r, keys)
        if "kl" in keys:
            d = r["ref"][m] - r["lp"][m]
            t = t + keys["kl"] * (-d if "k1" in keys else np.exp(d) - d - 1) * (np.exp(r["lp"][m] - r["old"][m]) if "ratio" in keys else 1)
        n = len(rows) * (int(m.sum()) if kind in ROWS else MAX_LEN) if kind in ROWS + ("dr_grpo",) else tokens
        total += t.sum() / n
    return total


def derivatives(kind, rows, keys, held):
    """Complex steps: no rounding of a difference. np.minimum and np.clip compare real parts first."""
    out = []
    for r in rows:
        g = np.zeros(len(r["lp"]))
        keep = r["lp"]
        for t in range(len(keep)):
            r["lp"] = keep.astype(complex)
            r["lp"][t] += 1e-30j
            g[t] = np.imag(loss(kind, rows, keys, held)) / 1e-30
        r["lp"] = keep
        out.append(g)
    return out


def main():
    rng, rows = np.random.default_rng(5), []
    for a, n in zip(advantages([1, 0, 0, 1, .5, .2], [0, 0, 0, 1, 1, 1]), (5, 9, 3, 7, 12, 4)):
        lp = -rng.exponential(1.2, n)
        rows.append({"lp": lp, "old": lp + rng.normal(0, .15, n), "ref": lp + rng.normal(0, .3, n), "sampler": lp + rng.normal(0, .1, n),
                     "mask": (rng.random(n) < .8) | (np.arange(n) == 0), "advantage": float(a)})
    cases = []
    for kind, keys in CASES:
        held = [np.minimum(np.exp((r["lp"] - r["old"])[r["mask"]]), keys.get("high", .2)) for r in rows]
        g, worst, h = derivatives(kind, rows, keys, held), 0, 1e-6
        for r, of in zip(rows, g):
            for t in range(len(of)):
                ends = []
                for side in (h, -h):
                    r["lp"][t] += side
                    ends.append(loss(kind, rows, keys, held))
                    r["lp"][t] -= side
                worst = max(worst, abs((ends[0] - ends[1]) / (2 * h) - of[t]))
        print(f"{kind:8} {keys} worst difference of a derivative {worst:.1e}")
        assert worst < 1e-8
        cases.append({"loss": kind, "keys": keys, "value": float(loss(kind, rows, keys, held)), "slopes": [list(map(float, s)) for s in g]})
    plain = [{k: v if k == "advantage" else [float(x) for x in v] for k, v in r.items()} for r in rows]
    os.makedirs(os.path.dirname(OUT), exist_ok=True)
    with open(OUT, "w") as f:
        json.dump({"max_len": MAX_LEN, "rollouts": plain, "cases": cases}, f)
        f.write("\n")


main()
