"""Trains a model to decide when a leak is acted on, and says whether it beats the rules on pods it has not seen.

    bench-leaks --side even --features even.csv
    HIGHWATER_TRACE=... HIGHWATER_LEAK_CASES=... bench-leaks --side odd --features odd.csv
    train.py even.csv [odd.csv] [--out MODEL]

It sees what the rules see, at the minutes in which these could act (`src/features.rs`), in first lives, and acts at the
first of them that it scores high enough. It is trained on the even side: made lives and processes recorded on a GPU.
Whatever else is in that table, the public trace and the public reports, is dropped: nobody allows to ship what comes of it.
Model, features and mark are chosen there too, by how they do on pods left out of the fit, five folds. The odd side is
scored once, by the model chosen.

A leak is right if the first act comes after its onset and at least ten minutes before its end, a healthy life if there is
none. Intervals hold 95 % of 2,000 draws of pods. The model beats the rules if the whole interval of the difference in
balanced accuracy is above 0, on made lives and on those of makes and leaks that training has not seen.
"""

import argparse
import csv
import pickle
import time
from array import array

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import QuantileTransformer

LEAD = 600  # seconds before the end in which an act is too late
MOST = 40  # minutes of a life that a model is fitted on, evenly chosen
FOLDS = 5
DRAWS = 2000
SEED = 20
BEFORE = 10  # columns that are no evidence
TRAINED = ("Synthetic", "LeakSynthetic", "LeakSlow", "Recorded")
GROUPS = {
    "made": ("Synthetic", "LeakSynthetic", "LeakSlow"),
    "made, held back from training": ("Unseen", "LeakUnseen"),
    "recorded on a GPU": ("Recorded",),
    "trace, host": ("TraceHost", "LeakHost"),
    "trace, device (swaps models)": ("TraceGpu", "LeakGpu"),
    "rows of public reports": ("Rows",),
}


class Table:
    """Lives, and the minutes of each in which an act may come."""

    def __init__(self, path, pools=None):
        lives, of, moments, evidence = {}, array("q"), array("d"), array("f")
        with open(path, newline="", encoding="utf-8") as file:
            rows = csv.reader(file)
            self.names = next(rows)[BEFORE:]
            for row in rows:
                if pools and row[2] not in pools:
                    continue
                life = lives.setdefault(row[0], (len(lives), row[1:BEFORE - 1]))[0]
                if row[BEFORE - 1]:
                    of.append(life)
                    moments.append(float(row[BEFORE - 1]))
                    evidence.extend(float(cell) if cell else np.nan for cell in row[BEFORE:])
        told = [row for _, row in lives.values()]
        number = lambda column: np.array([float(row[column]) if row[column] else np.nan for row in told])
        self.pod, self.pool = (np.array([row[column] for row in told]) for column in (0, 1))
        self.onset, self.end, self.rules = number(3), number(4), number(7)
        self.leaks = ~np.isnan(self.end)
        self.of, self.moment = np.array(of), np.array(moments)
        self.x = np.array(evidence, dtype=np.float32).reshape(len(moments), len(self.names))
        # A leak before its onset is a healthy pod.
        self.y = self.leaks[self.of] & (self.moment >= np.nan_to_num(self.onset)[self.of])
        self.acted = self.moment >= np.nan_to_num(self.rules, nan=np.inf)[self.of]

    def sample(self):
        """The minutes to fit on: of long lives one in so many."""
        minutes = np.bincount(self.of, minlength=len(self.pod))
        place = np.arange(len(self.of)) - (np.cumsum(minutes) - minutes)[self.of]
        return place % -(-minutes // MOST)[self.of] == 0

    def weights(self, rows):
        """Every life counts the same, however many its minutes; leaks in all as much as the others."""
        of, y = self.of[rows], self.y[rows]
        each = 1.0 / np.bincount(of, minlength=len(self.pod))[of]
        for kind in (y, ~y):
            each[kind] /= each[kind].sum()
        return each * len(y)

    def features(self, told):
        """The evidence; if `told`, also whether the rules have acted."""
        return np.column_stack([self.x, self.acted]) if told else self.x

    def first(self, score, mark):
        """When each life is first scored at least so high; not a number where it never is."""
        first = np.full(len(self.pod), np.inf)
        high = score >= mark
        np.minimum.at(first, self.of[high], self.moment[high])
        return np.where(np.isinf(first), np.nan, first)

    def right(self, act):
        """Which lives are judged rightly by acts at these times."""
        in_time = (act >= self.onset) & (self.end - act >= LEAD)
        return np.where(self.leaks, in_time, np.isnan(act))


def balanced(right, leaks):
    return (right[leaks].mean() + right[~leaks].mean()) / 2


def shown(table, act):
    right, leaks = table.right(act), table.leaks
    return f"{balanced(right, leaks):.3f} | {1 - right[~leaks].mean():.4f} | {right[leaks].mean():.3f}"


def candidates():
    yield "logistic regression", lambda: make_pipeline(
        SimpleImputer(add_indicator=True, keep_empty_features=True),
        QuantileTransformer(n_quantiles=200, output_distribution="normal", random_state=SEED),
        LogisticRegression(C=0.03, solver="newton-cholesky"))
    yield "100 boosted trees of 8 leaves", lambda: HistGradientBoostingClassifier(
        learning_rate=0.05, max_iter=100, max_leaf_nodes=8, min_samples_leaf=50, l2_regularization=1.0,
        early_stopping=False, random_state=SEED)


def fit(make, table, rows, told):
    model = make()
    step = f"{model.steps[-1][0]}__" if hasattr(model, "steps") else ""
    return model.fit(table.features(told)[rows], table.y[rows], **{f"{step}sample_weight": table.weights(rows)})


def left_out(make, table, told):
    """Scores of each minute by a model that has not seen its pod."""
    x, sample, score = table.features(told), table.sample(), np.zeros(len(table.of))
    for seen, unseen in GroupKFold(FOLDS, shuffle=True, random_state=SEED).split(x, groups=table.pod[table.of]):
        model = fit(make, table, seen[sample[seen]], told)
        score[unseen] = model.predict_proba(x[unseen])[:, 1]
    return score


def marks(table, score):
    """The mark of the best balanced accuracy, and the one at which no more healthy lives are acted on than by the rules."""
    tried = np.unique(np.quantile(score, np.linspace(0.02, 1.0, 400)))
    acts = [table.first(score, mark) for mark in tried]
    accuracy = [balanced(table.right(act), table.leaks) for act in acts]
    healthy = ~table.leaks
    wrong = np.array([(~np.isnan(act[healthy])).mean() for act in acts])
    best = int(np.argmax(accuracy))
    alike = int(np.argmax(wrong <= (~np.isnan(table.rules[healthy])).mean()))
    return {"best balanced accuracy": (tried[best], acts[best]), "as few false acts": (tried[alike], acts[alike])}


def compare(table, act, title):
    """Prints how rules and model do on each group of pools, with intervals by drawing pods."""
    print(f"\n## {title}\n")
    print("| lives | leaks, healthy | who | found in time | healthy lives acted on | balanced accuracy | accuracy |\n"
          "|---|---|---|---|---|---|---|")
    for group, pools in GROUPS.items():
        rows = np.isin(table.pool, pools)
        leaks = table.leaks[rows]
        if not leaks.any() or leaks.all():
            continue
        pods, of = np.unique(table.pod[rows], return_inverse=True)
        random = np.random.default_rng(SEED)
        drawn = np.array([np.bincount(random.integers(len(pods), size=len(pods)), minlength=len(pods))[of]
                          for _ in range(DRAWS)], dtype=np.float32)

        def mean(right, among):
            return drawn[:, among] @ right[among] / np.maximum(drawn[:, among].sum(axis=1), 1)

        def bounds(draws):
            return np.nanpercentile(draws, (2.5, 97.5))

        right = {"rules": table.right(table.rules)[rows].astype(float), "model": table.right(act)[rows].astype(float)}
        # Both are linear in what is right, so that this serves for the difference as well.
        right["model less rules"] = right["model"] - right["rules"]
        every = np.ones_like(leaks)
        for who, of_lives in right.items():
            found, alone = of_lives[leaks].mean(), of_lives[~leaks].mean()
            low, high = bounds((mean(of_lives, leaks) + mean(of_lives, ~leaks)) / 2)
            least, most = bounds(mean(of_lives, every))
            acted = -alone if who == "model less rules" else 1 - alone
            print(f"| {group} | {leaks.sum()}, {(~leaks).sum()} | {who} | {found:.3f} | {acted:.4f} | "
                  f"{(found + alone) / 2:.3f} ({low:.3f} to {high:.3f}) | "
                  f"{of_lives.mean():.3f} ({least:.3f} to {most:.3f}) |")


def cost(model, x):
    """Bytes of a model, and milliseconds of a core for one answer, the median of 200."""
    times = []
    for row in x[:200]:
        begin = time.process_time()
        model.predict_proba(row[np.newaxis])
        times.append(time.process_time() - begin)
    return len(pickle.dumps(model)), 1000 * float(np.median(times))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("even")
    parser.add_argument("odd", nargs="?")
    parser.add_argument("--out")
    args = parser.parse_args()
    even = Table(args.even, TRAINED)
    print(f"even side: {len(even.pod)} lives, {even.leaks.sum()} of them leaks, {len(even.of)} minutes", flush=True)
    print("\n| model | told what the rules did | balanced accuracy on pods left out | healthy lives acted on | found in "
          "time | found in time with as few false acts as the rules |\n|---|---|---|---|---|---|")
    tried = []
    for name, make in candidates():
        for told in (False, True):
            chosen = marks(even, left_out(make, even, told))
            best, alike = (act for _, act in chosen.values())
            accuracy = balanced(even.right(best), even.leaks)
            print(f"| {name} | {'yes' if told else 'no'} | {shown(even, best)} | "
                  f"{even.right(alike)[even.leaks].mean():.3f} |", flush=True)
            tried.append((accuracy, name, make, told, {title: mark for title, (mark, _) in chosen.items()}))
    print(f"| the rules | | {shown(even, even.rules)} | |")
    accuracy, name, make, told, chosen = max(tried, key=lambda one: one[0])
    model = fit(make, even, np.flatnonzero(even.sample()), told)
    size, answer = cost(model, even.features(told))
    print(f"\nchosen: {name}, {'told' if told else 'not told'} what the rules did: {size} bytes, {answer:.2f} ms an answer",
          flush=True)
    if args.out:
        with open(args.out, "wb") as file:
            pickle.dump({"model": model, "features": even.names, "told": told, "marks": chosen}, file)
    if args.odd:
        odd = Table(args.odd)
        score = model.predict_proba(odd.features(told))[:, 1]
        for title, mark in chosen.items():
            compare(odd, odd.first(score, mark), f"Odd side, mark {mark:.3f}: {title}")


if __name__ == "__main__":
    main()
