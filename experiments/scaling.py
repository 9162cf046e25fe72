"""Does the loss fall predictably with size? A power law, fitted to the smaller models, predicts the largest.

    python -m experiments.compare --objectives clm --sweep n_embd=32,48,64,96,128
    python -m experiments.scaling --curves out/compare/sweep-n_embd-clm.csv

Reads a table of compare's with one row for each size: bits per byte (left to right) and FLOPs of the forward and
backward passes (without Newton-Schulz), means over seeds, of the runs of --steps. It fits bits = a FLOPs^-b to all
sizes but the largest (the form of Kaplan et al. 2020), from five sizes on also bits = floor + a FLOPs^-b (the form of
Hoffmann et al. 2022), and prints how far each is off for the largest. All sizes take equally many steps, so the
exponent and the floor hold for that number of steps alone.
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
    "curves": Flag("", "table of compare's, .csv, from --sweep n_embd or n_layer"),
    "steps": Flag(1000, "of the runs", 1, 1 << 40),
}
FLOORS = [i / 1000 for i in range(8000)]        # candidates, in bits per byte
MIN_SIZES = 4                                   # three to fit, one to predict
MIN_SIZES_FLOOR = 5                             # a third parameter needs a fourth point


def read_sizes(path, steps):  # -> [(TFLOPs, bits per byte, size)], sorted
    values = {}                                 # {size: {metric: [value of each seed]}}
    try:
        with open(path, encoding="utf-8", newline="") as f:
            head, *lines = csv.reader(f)
        if head[0] not in ("n_embd", "n_layer"):
            fail(f"--curves {path}: compares {head[0][:40]}, not sizes. Try a table of --sweep n_embd=32,48,64,96,128")
        for size, n, _, metric, value in lines:
            if int(n) == steps:
                values.setdefault(size, {}).setdefault(metric, []).append(float(value))
        sizes = [(statistics.fmean(metrics["tflop"]), statistics.fmean(metrics["left_to_right"]), size)
                 for size, metrics in values.items()]
    except OSError as e:
        fail(f"--curves {path}: cannot be read ({error_reason(e)}). Try a .csv that compare wrote")
    except (ValueError, IndexError, KeyError, csv.Error):
        fail(f"--curves {path}: cannot be read (no table of sizes with FLOPs and bits). Try a .csv that compare wrote")
    if len({x for x, _, _ in sizes}) < len(sizes):
        fail(f"--curves {path}: has sizes of equal FLOPs. Try sizes that differ")
    if len(sizes) < MIN_SIZES:
        fail(f"--curves {path}: holds {len(sizes)} sizes of {steps} steps, {MIN_SIZES} are needed. Try more sizes, "
             "or --steps")
    if not all(0 < x < math.inf and 0 < bits < math.inf for x, bits, _ in sizes):
        fail(f"--curves {path}: holds FLOPs or bits that are not positive numbers. Try without these sizes")
    return sorted(sizes)


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
    sizes = read_sizes(flags.curves, flags.steps)
    points = [(x, bits) for x, bits, _ in sizes]
    laws = {"power law": fit(points[:-1], [0.0])}
    if len(points) >= MIN_SIZES_FLOOR:
        laws["with a floor"] = fit(points[:-1], FLOORS)
    rows = [["size", "TFLOP", "bits per byte", *laws]]
    for x, bits, size in sizes:
        rows.append([size, f"{x:.3g}", f"{bits:.3f}", *(f"{predict(law, x):.3f}" for law in laws.values())])
    print(markdown(rows))
    x, bits = points[-1]
    for name, law in laws.items():
        floor, a, b = law
        print(f"{name}: {floor:.3f} + {a:.3f} TFLOP^{-b:.3f}; the largest size, which it was not fitted to, is "
              f"{bits - predict(law, x):+.3f} bits per byte off")
    return 0


if __name__ == "__main__":
    run_program(main)
