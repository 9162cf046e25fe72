"""Does the loss fall predictably with the size of a model, or with the length of its training?

Fits a power law, bits per byte = floor + a TFLOP^-b, to all runs but the largest and predicts the largest, which is
the last row of the table. One column has floor 0 (Kaplan et al. 2020), the other the floor that fits best (Hoffmann
et al. 2022). Bits per byte are means over seeds. Each run has its own learning-rate schedule.

    python -m experiments.scaling --curves out/compare/sweep-n_embd-clm.csv             models of different sizes
    python -m experiments.scaling --curves out/compare/curves.csv                       different numbers of steps
"""
import csv
import math
import statistics

from data import Flag, fail
from experiments.compare import markdown
from experiments.flags import parse_own_flags
from run import run_program

FLAGS = {"curves": Flag("out/compare/curves.csv", "curves.csv, or the .csv of --sweep n_embd or n_layer"),
         "steps": Flag("1000", "with the .csv of a sweep: number of steps of the runs"),
         "objective": Flag("clm", "with curves.csv: objective of the runs")}


def read_runs(flags):  # -> [(TFLOP, bits per byte, row, steps)], sorted
    values = {}                                 # {(row, steps): {metric: [number of each seed]}}
    try:
        with open(flags.curves, encoding="utf-8", newline="") as f:
            head, *lines = csv.reader(f)
        for row, steps, _, metric, number in lines:
            is_chosen = row == flags.objective if head[0] == "objective" else steps == flags.steps
            if is_chosen:
                values.setdefault((row, steps), {}).setdefault(metric, []).append(float(number))
        return sorted((statistics.fmean(metrics["tflop"]), statistics.fmean(metrics["left_to_right"]), *key)
                      for key, metrics in values.items())
    except (OSError, ValueError, LookupError) as e:
        fail(f"--curves {flags.curves}: cannot be read ({e!r}). Try a .csv that compare wrote")


def fit(points, floors):  # [(x, y)] -> floor, a, b of y = floor + a x^-b
    """For each floor, log(y - floor) is linear in log x: fits a line by least squares. Returns the law with the
    smallest squared error of y."""
    laws = []
    for floor in floors:
        if floor < min(y for _, y in points):
            log_x = [math.log(x) for x, _ in points]
            log_y = [math.log(y - floor) for _, y in points]
            line = statistics.linear_regression(log_x, log_y)
            laws.append((floor, math.exp(line.intercept), -line.slope))
    return min(laws, key=lambda law: sum((predict(law, x) - y) ** 2 for x, y in points))


def predict(law, x):
    floor, a, b = law
    return floor + a * x ** -b


def main(argv=None):  # -> exit code
    runs = read_runs(parse_own_flags("python -m experiments.scaling", __doc__, FLAGS, argv))
    if len(runs) < 5:                           # four to fit three numbers, one to predict
        fail(f"--curves: holds {len(runs)} runs with this --objective or --steps, but 5 are needed. Try more runs")
    points = [(x, bits) for x, bits, *_ in runs[:-1]]
    laws = [fit(points, [0.0]), fit(points, [i / 1000 for i in range(8000)])]
    rows = [["", "steps", "TFLOP", "bits per byte", *(f"{c:.3f} + {a:.3f} TFLOP^{-b:.3f}" for c, a, b in laws)]]
    for x, bits, row, steps in runs:
        rows.append([row, steps, f"{x:.3g}", f"{bits:.3f}", *(f"{predict(law, x):.3f}" for law in laws)])
    print(markdown(rows), end="")
    return 0


if __name__ == "__main__":
    run_program(main)
