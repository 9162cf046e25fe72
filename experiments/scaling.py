"""Does the loss fall predictably with size, or with training? A power law, fitted to the smaller runs, predicts the
largest.

    python -m experiments.compare --objectives clm --sweep n_embd=32,48,64,96,128
    python -m experiments.scaling --curves out/compare/sweep-n_embd-clm.csv             sizes, all of --steps
    python -m experiments.compare --objectives clm --budgets 500,1000,2000,8000
    python -m experiments.scaling --curves out/compare/curves.csv                       numbers of steps, of --objective

Reads bits per byte (left to right) and FLOPs of the forward and backward passes (without Newton-Schulz), means over
seeds. It fits bits = a FLOPs^-b to all runs but the largest (the form of Kaplan et al. 2020), from five on also
bits = floor + a FLOPs^-b (the form of Hoffmann et al. 2022), and prints how far each is off for the largest. A law of
sizes holds for its number of steps alone, one of steps for its size; each run has its own learning-rate schedule.
"""
import csv
import math
import statistics

# isort: off  data silences a warning of torch's, and so comes before it
from data import Flag, error_reason, fail
from experiments.compare import markdown
from experiments.flags import parse_own_flags
from run import run_program

FLAGS = {
    "curves": Flag("", "table of compare's, .csv: curves.csv, or of --sweep n_embd or n_layer"),
    "steps": Flag(1000, "of the runs of a table of sizes", 1, 1 << 40),
    "objective": Flag("clm", "row of a table of objectives"),
}
FLOORS = [i / 1000 for i in range(8000)]        # candidates, in bits per byte
MIN_RUNS = 4                                    # three to fit, one to predict
MIN_RUNS_FLOOR = 5                              # a third parameter needs a fourth point


def read_runs(path, steps, objective):  # -> what the runs differ in, [(TFLOPs, bits per byte, its value)], sorted
    values = {}                                 # {value: {metric: [number of each seed]}}
    try:
        with open(path, encoding="utf-8", newline="") as f:
            head, *lines = csv.reader(f)
        over = "steps" if head[0] == "objective" else head[0]
        if over not in ("n_embd", "n_layer", "steps"):
            fail(f"--curves {path}: compares {over[:40]}, not sizes. Try a table of --sweep n_embd=32,48,64,96,128")
        for name, n, _, metric, number in lines:
            if over == "steps" and name == objective:
                values.setdefault(n, {}).setdefault(metric, []).append(float(number))
            if over != "steps" and int(n) == steps:
                values.setdefault(name, {}).setdefault(metric, []).append(float(number))
        runs = [(statistics.fmean(metrics["tflop"]), statistics.fmean(metrics["left_to_right"]), value)
                for value, metrics in values.items()]
    except OSError as e:
        fail(f"--curves {path}: cannot be read ({error_reason(e)}). Try a .csv that compare wrote")
    except (ValueError, IndexError, KeyError, csv.Error):
        fail(f"--curves {path}: cannot be read (no table with FLOPs and bits). Try a .csv that compare wrote")
    of = objective if over == "steps" else f"{steps} steps"
    if len({x for x, _, _ in runs}) < len(runs):
        fail(f"--curves {path}: has runs of equal FLOPs. Try runs that differ")
    if len(runs) < MIN_RUNS:
        fail(f"--curves {path}: holds {len(runs)} values of {over} of {of}, {MIN_RUNS} are needed. Try more of them, "
             f"or --{'objective' if over == 'steps' else 'steps'}")
    if not all(0 < x < math.inf and 0 < bits < math.inf for x, bits, _ in runs):
        fail(f"--curves {path}: holds FLOPs or bits that are not positive numbers. Try without these runs")
    return over, sorted(runs)


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
    flags = parse_own_flags("python -m experiments.scaling", __doc__, FLAGS, argv)
    if not flags.curves:
        fail("--curves: is missing. Try --curves out/compare/sweep-n_embd-clm.csv")
    over, runs = read_runs(flags.curves, flags.steps, flags.objective)
    points = [(x, bits) for x, bits, _ in runs]
    laws = {"power law": fit(points[:-1], [0.0])}
    if len(points) >= MIN_RUNS_FLOOR:
        laws["with a floor"] = fit(points[:-1], FLOORS)
    rows = [[over, "TFLOP", "bits per byte", *laws]]
    for x, bits, value in runs:
        rows.append([value, f"{x:.3g}", f"{bits:.3f}", *(f"{predict(law, x):.3f}" for law in laws.values())])
    print(markdown(rows))
    x, bits = points[-1]
    for name, law in laws.items():
        floor, a, b = law
        print(f"{name}: {floor:.3f} + {a:.3f} TFLOP^{-b:.3f}; the largest run, which it was not fitted to, is "
              f"{bits - predict(law, x):+.3f} bits per byte off")
    return 0


if __name__ == "__main__":
    run_program(main)
