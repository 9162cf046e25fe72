"""Does the loss fall predictably with compute? A power law, fitted to the smaller runs, predicts the largest.

    python -m experiments.compare --objectives clm --sweep n_embd=32,48,64,96,128
    python -m experiments.scaling --curves out/compare/sweep-n_embd-clm.csv

Reads what compare wrote: bits per byte (left to right) and training FLOPs of each run, means over seeds. Two laws are
fitted to all runs but the largest: bits = a FLOPs^-b (Kaplan et al. 2020), and bits = floor + a FLOPs^-b with a floor
that no compute gets below (Hoffmann et al. 2022). It prints how far each was off for the largest.
"""
import argparse
import csv
import math
import statistics

# isort: off  data silences a warning of torch's, and so comes before it
from data import Flag, fail
from experiments.compare import markdown
from run import check, make_parser, run_program

FLAGS = {
    "curves": Flag([], "tables of compare's, .csv"),
    "steps": Flag(0, "runs of so many steps alone; 0: all", 0, 1 << 40),
}
FLOORS = [i / 1000 for i in range(8000)]        # candidates, in bits per byte
MIN_RUNS = 4                                    # three to fit, one to predict


def read_runs(path, steps):  # -> [(TFLOPs, bits per byte, name)] of one table
    values = {}                                 # {(row, steps): {metric: [value of each seed]}}
    try:
        with open(path, encoding="utf-8", newline="") as f:
            for row, n, _, metric, value in list(csv.reader(f))[1:]:
                if not steps or int(n) == steps:
                    values.setdefault((row, n), {}).setdefault(metric, []).append(float(value))
    except (OSError, ValueError) as e:
        fail(f"--curves {path}: cannot be read ({e}). Try a .csv that compare wrote")
    runs = []
    for (row, n), metrics in values.items():
        if "left_to_right" in metrics:
            bits = statistics.fmean(metrics["left_to_right"])
            runs.append((statistics.fmean(metrics["tflop"]), bits, f"{row}, {n} steps"))
    return runs


def fit(points, floors):  # [(x, y)] -> floor, a, b of y = floor + a x^-b, least squares in log(y - floor)
    best = None
    best_error = math.inf
    for floor in floors:
        if floor >= min(y for _, y in points):
            break
        x = [math.log(x) for x, _ in points]
        y = [math.log(y - floor) for _, y in points]
        line = statistics.linear_regression(x, y)
        predicted = [floor + math.exp(line.intercept + line.slope * each) for each in x]
        error = sum((p - y) ** 2 for p, (_, y) in zip(predicted, points))
        if error < best_error:
            best = floor, math.exp(line.intercept), -line.slope
            best_error = error
    return best


def predict(law, x):
    floor, a, b = law
    return floor + a * x ** -b


def main(argv=None):  # -> exit code
    given = make_parser("python -m experiments.scaling", __doc__, {"flags": FLAGS}).parse_args(argv)
    values = {name: flag.default for name, flag in FLAGS.items()} | vars(given)
    flags = argparse.Namespace(**values)
    if not flags.curves:
        fail("--curves: is missing. Try --curves out/compare/sweep-n_embd-clm.csv")
    check(values, FLAGS)
    runs = sorted({run for path in flags.curves for run in read_runs(path, flags.steps)})
    if len({x for x, _, _ in runs}) < MIN_RUNS:
        fail(f"--curves: holds {len(runs)} runs with bits per byte from left to right, {MIN_RUNS} are needed")
    points = [(x, bits) for x, bits, _ in runs]
    power = fit(points[:-1], [0.0])
    floored = fit(points[:-1], FLOORS)
    rows = [["", "TFLOP", "bits per byte", "power law", "with a floor"]]
    for x, bits, name in runs:
        rows.append([name, f"{x:.3g}", f"{bits:.3f}", f"{predict(power, x):.3f}", f"{predict(floored, x):.3f}"])
    print(markdown(rows))
    for name, law in (("power law", power), ("with a floor", floored)):
        floor, a, b = law
        x, bits = points[-1]
        print(f"{name}: {floor:.3f} + {a:.3f} TFLOP^-{b:.3f}; the largest run, which it was not fitted to, is "
              f"{bits - predict(law, x):+.3f} bits per byte off")
    return 0


if __name__ == "__main__":
    run_program(main)
