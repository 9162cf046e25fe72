"""Train objectives for the same number of steps, evaluate all of them in the same way, and write one table.

    python -m experiments.compare                       all objectives, one seed: one to five hours on a laptop CPU
    python -m experiments.compare --objectives clm,mlm,clm:0.5+mlm:0.5 --data book.txt --seeds 1,2,3
    python -m experiments.compare --objectives clm,mlm --pairs tests/pairs.jsonl --budgets 1200,8000
    python -m experiments.compare --objectives mlm --sweep mask_rate=.15,.3,.4 --seeds 1,2,3
    python -m experiments.compare --objectives bart --sweep bart_noise=mask,infill+permute      a + stands for a comma

A row is an objective, or a mixture such as clm:0.5+mlm:0.5, of which each figure is of the first member that has it; in
a sweep, a row for each value. Each is trained with its own defaults, once for each seed and budget, in a folder under
out_dir/runs. A finished run with the same settings and text is used again, and an interrupted one is resumed, so the
same command goes on where it was stopped. If the files that train have changed since, the last lines of the report name
the runs; if those that measure have changed, the figures are measured again. Flags that are not listed below are
train.py's. One of only some objectives, as --mask_rate, goes to those.
"""
import contextlib
import csv
import itertools
import json
import math
import os
import statistics
import sys
import zlib
from collections import namedtuple
from pathlib import Path

from data import Flag, check_sizes, fail, open_corpus
from experiments import evaluate
from experiments.common import MEASURING, checksums, parse_with_train_flags, read_json, training_files, write_json
from experiments.evaluate import HOLE_LENGTHS, METRICS, Metric
from experiments.figures import draw_curves
from experiments.score import check_pairs, choose_scored, read_pairs, score_pairs, share_and_error
import train
from objectives import OBJECTIVES
from run import SHARED_FLAGS, VERSION, checkpoint_path, flag_specs, get_config, get_members, load_checkpoint, load_run
from run import member_weights, parse, run_program, to_words
import torch
from tqdm import tqdm

FLAGS = {
    "objectives": Flag("", "names or mixtures, with commas between; default: all, or the first with --sweep's setting"),
    "seeds": Flag("1", "separated by commas; all runs with the same seed have the same initial weights and data"),
    "budgets": Flag("1000", "numbers of steps, separated by commas; each is a separate run with its own schedule"),
    "data": Flag("stdlib", "corpus; the probes run only on stdlib, since they need Python files"),
    "sweep": Flag("", "a setting of train.py and its values, as in mask_rate=.1,.15,.3"),
    "pairs": Flag("", "file of minimal pairs, as experiments.score reads it: also print the share of right ones"),
    "baseline": Flag("", "row that is subtracted from the others; default: the first"),
    "tasks_only": Flag(False, "measure only losses and each objective's own task, in less time"),
    "out_dir": Flag("out/compare", "folder of tables, pictures and runs"),
}
# flags of train.py that this program sets
RESERVED = {"objective", "seed", "data", "out_dir", "resume", "max_iters", "max_passes"}
SUMMARY = {                                     # columns of the first table
    "bits": Metric("left to right", 3),
    **{f"hole_{m}": Metric(f"hole of {m} bytes", 2) for m in HOLE_LENGTHS},
    "task": Metric("own task", 3),
}
REST = {key: METRICS[key] for key in ("loss", "task_baseline", "left_by_filling", "replaced_auc", "probe", "passages",
                                      "typos_corrected", "tflop", "seconds")}       # of the second table
STUDENT_T_975 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}    # {number of seeds: quantile}
N_EVALUATIONS = 5                               # of a run without --eval_interval; each also saves the run


# ---- which runs there are
# row: of the table; argv: flags of train.py that give the settings hp; code: {file: checksum} of the files that train
Run = namedtuple("Run", "row hp argv folder code")


def plan_runs(flags, rest, crc):  # crc: of the corpus -> [Run]; fails if train.py would refuse the flags of one
    setting, _, values = flags.sweep.partition("=")
    if flags.sweep and not (setting in flag_specs().keys() - RESERVED - {"device"} and all(values.split(","))):
        fail(f"--sweep {flags.sweep}: is not a setting of train.py with its values. Try mask_rate=.1,.15,.3")
    names = [to_objective(word) for word in flags.objectives.replace(" ", "").split(",") if word]
    owners = [name for name, objective in OBJECTIVES.items() if setting in objective.flags]
    names = names or owners[:1] or list(OBJECTIVES)
    given = parse(rest)
    owned = {flag for name in names for flag in own_flags(name)}
    runs = []
    for steps, seed, name, value in itertools.product(flags.budgets.split(","), flags.seeds.split(","), names,
                                                      values.split(",")):
        read = {flag: word for flag, word in given.items() if flag not in owned - own_flags(name)}
        interval = max(1, int(steps) // N_EVALUATIONS) if steps.isdecimal() else steps
        argv = ["--objective", name, "--max_iters", steps, "--seed", seed, "--data", flags.data]
        argv += to_words({"eval_interval": interval} | read)
        row = name.replace(",", "+")
        if setting:
            value = to_value(setting, value)
            argv += to_words({setting: value})
            row += f" {setting}={value}"
        hp = get_config(argv)
        hp.checkpoint = None                    # the weights of --init_from, which train.main loads again
        runs.append(Run(row, hp, argv, run_folder(hp, crc, flags.out_dir), checksums(training_files(name))))
    return runs


def own_flags(name):  # an objective or a mixture -> the names of flags that not all objectives have
    return {flag for part in member_weights(name) for flag in OBJECTIVES[part].flags}


def to_objective(word):  # "clm:0.5+mlm:0.5", a row of a table -> "clm:0.5,mlm:0.5", as train.py has it
    if ":" in word and "+" not in word:
        fail(f"--objectives {word}: has a weight, but is not a mixture, which is one row. Try clm:0.5+mlm:0.5")
    return word.replace("+", ",")


def to_value(setting, word):  # of --sweep -> value of a flag
    default = flag_specs()[setting].default
    if isinstance(default, bool):
        if word not in ("True", "False"):
            fail(f"--sweep {setting}={word}: is on or off. Try {setting}=True,False")
        return word == "True"
    return word.replace("+", ",") if isinstance(default, str) else word             # numbers may be written 1e+1


def run_folder(hp, crc, out_dir):  # settings, checksum of the corpus -> folder of the run
    settings = read_settings(hp)
    if hp.init_from:                            # weights count, wherever they lie
        settings["init_from"] = zlib.crc32(Path(checkpoint_path(hp.init_from)).read_bytes())
    tag = zlib.crc32(json.dumps([VERSION, [crc], settings], sort_keys=True).encode())
    objective = hp.objective.replace(",", "+").replace(":", "_")
    return os.path.join(out_dir, "runs", f"{objective}-{hp.max_iters}-seed{hp.seed}-{tag:08x}")


def read_settings(hp):  # -> {flag: value} of those that the objective reads
    """Without the device, since a run may be resumed on another one, and without the interval of evaluations."""
    names = (SHARED_FLAGS | own_flags(hp.objective)) - {"device", "eval_interval"}
    return {flag: value for flag, value in vars(hp).items() if flag in names}


def check_flags(flags, runs, source, pairs):  # fails if something would fail after the first training
    for run in runs:
        check_sizes([source], max(m.n for m in get_members(run.hp)), run.hp.block_size)
        scored = choose_scored(get_members(run.hp))
        if pairs and scored:
            check_pairs(pairs, scored.objective, run.hp)
    if len(source["val"]) < 256:                # evaluations read windows of up to 256 bytes
        fail(f"--data {flags.data}: {len(source['val'])} bytes to validate on are too few. Try more text")
    # otherwise the runs would be read as text
    if os.path.isdir(flags.data) and Path(flags.out_dir).resolve().is_relative_to(Path(flags.data).resolve()):
        fail(f"--out_dir {flags.out_dir}: lies inside the corpus {flags.data}. Try a folder outside it")
    rows = [*dict.fromkeys(run.row for run in runs)]
    if flags.baseline and flags.baseline not in rows:
        fail(f"--baseline {flags.baseline}: is not a row. Try one of {', '.join(rows)}")
    try:
        os.makedirs(flags.out_dir, exist_ok=True)
    except OSError as e:
        fail(f"--out_dir {flags.out_dir}: cannot be written to ({e.strerror}). Try another folder")


# ---- a run: train it, measure it
def has_weights(run):
    return os.path.exists(os.path.join(run.folder, "ckpt.pt"))


def is_finished(run):
    return has_weights(run) and load_checkpoint(os.path.join(run.folder, "ckpt.pt"))["step"] == run.hp.max_iters


def train_run(run, label, steps_left):  # steps_left: of all runs, with this one -> False if the run diverged
    """Resumes an interrupted run. code.json has a checksum of each file that trains, or 0 if it changed meanwhile."""
    path = os.path.join(run.folder, "code.json")
    os.makedirs(run.folder, exist_ok=True)
    if not has_weights(run):                    # best.pt may be left of a run killed before its first ckpt.pt
        Path(run.folder, "best.pt").unlink(missing_ok=True)
    old = read_json(path) if has_weights(run) else run.code
    write_json(path, {file: crc if old.get(file) == crc else 0 for file, crc in run.code.items()})
    print(f"{label}: training, logged in {run.folder}/log.txt", flush=True)
    out = sys.stdout                            # not that of train, which is a file
    printed = []

    def estimate(record):                       # prints once how long all trainings will take at this run's speed
        if record.get("split") == "train" and record["step"] and not printed:
            seconds = record["seconds"] / (record["step"] + 1) * (steps_left - record["step"])
            printed.append(seconds)
            tqdm.write(f"{label}: about {math.ceil(seconds / 60)} min of training left, and the evaluations", file=out)
    argv = [*run.argv, "--out_dir", run.folder, *(["--resume"] if has_weights(run) else [])]
    with open(os.path.join(run.folder, "log.txt"), "a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        try:
            exit_code = train.main(argv, with_sample=False, on_record=estimate)
        except FloatingPointError as e:
            print(f"{label}: {e}", file=sys.stderr)
            return False
        except KeyboardInterrupt:
            print(f"stopped, saved in {run.folder}. The same command resumes it", file=sys.stderr)
            raise
    if exit_code:                               # stopped by another signal
        sys.exit(exit_code)
    return True


def read_figures(run, flags):  # -> what is saved of an earlier measurement, if possible by the files of now, or {}
    names = ["figures.json", *(["tasks.json"] if flags.tasks_only else [])]
    saved = [read_json(os.path.join(run.folder, name)) for name in names]
    return max(saved, key=lambda figures: (figures.get("code") == MEASURING, len(figures)))


def measure_run(run, flags, text, probes, pairs, label):  # -> {metric: number}
    """Uses saved figures if the files that measure are the same. If the weights are deleted, uses those of older files,
    and keeps their names in "old"."""
    def up_to_date(saved, name, compute):       # name: of the file
        if saved.get("code") != MEASURING and has_weights(run):
            print(f"{label}: measuring {name}", flush=True)
            saved = {"code": MEASURING, **compute()}
            write_json(os.path.join(run.folder, name), saved)
        if not saved:
            print(f"{label}: no {name}, since the weights are deleted", flush=True)
        return saved | {"old": [file for file in MEASURING if saved and saved["code"].get(file) != MEASURING[file]]}
    name = "tasks.json" if flags.tasks_only else "figures.json"
    metrics = up_to_date(read_figures(run, flags), name, lambda: evaluate.measure_run(
        run.folder, run.hp.device, text, probes, flags.tasks_only))
    member = choose_scored(get_members(run.hp))
    if pairs and member:
        def score():
            model, hp, _ = load_run(os.path.join(run.folder, "ckpt.pt"), run.hp.device, "float32")
            points, kind = score_pairs(model, member.objective, hp, pairs, seed=1)
            return {"points": points, "pairs": statistics.fmean(points), "score": kind.partition(",")[0]}
        name = f"pairs-{zlib.crc32(repr(pairs).encode()):08x}.json"
        scores = up_to_date(read_json(os.path.join(run.folder, name)), name, score)
        metrics = metrics | scores | {"old": metrics["old"] + scores["old"]}
    return metrics


# ---- tables of rows {name: {seed: metrics}}, where metrics {metric: number} are empty if the run diverged
def values_by_seed(seeds, metric):  # {seed: metrics} -> {seed: number}, of the seeds that have one
    return {seed: metrics[metric] for seed, metrics in seeds.items() if metrics.get(metric) is not None}


def is_bound(seeds):  # are the bits left to right an upper bound?
    return bool(values_by_seed(seeds, "bound")) and not values_by_seed(seeds, "left_to_right")


def with_sides(rows):  # -> the same; the name of a row whose holes are filled from the left says so
    left = {name for name, seeds in rows.items()
            if values_by_seed(seeds, "left_4") and not values_by_seed(seeds, "infill_4")}
    return {f"{name} (left side)" if name in left else name: seeds for name, seeds in rows.items()}


def markdown(lines):  # [[heading, ...], [cell, ...], ...] -> str
    lines = [f"| {' | '.join(line)} |" for line in lines]
    lines.insert(1, "|---" * (lines[0].count("|") - 1) + "|")
    return "\n".join(lines) + "\n"


def make_table(rows, metrics):  # -> Markdown: a column for each metric that a row has, means ± standard errors
    columns = [["", *rows]]
    for key, metric in metrics.items():
        cells = []
        for seeds in rows.values():
            values = [*values_by_seed(seeds, key).values()]
            mean = f"{statistics.fmean(values):.{metric.digits}f}" if values else ""
            error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
            bound = "<= " if mean and key == "bits" and is_bound(seeds) else ""
            cells.append(bound + mean + (f" ± {error:.{metric.digits}f}" if error is not None else ""))
        if any(cells):
            columns.append([metric.heading, *cells])
    seeds_of = [" ".join(f"{seed}" if metrics else f"{seed} diverged" for seed, metrics in seeds.items())
                for seeds in rows.values()]
    return markdown([*zip(*columns, ["seeds", *seeds_of])])


def difference(a, b):  # {seed: number} each -> mean of a - b over common seeds, half of its 95% interval; or None
    values = [value - b[seed] for seed, value in a.items() if seed in b]
    if len(values) < 2:
        return None
    half = STUDENT_T_975.get(len(values), 2.3) * statistics.stdev(values) / len(values) ** 0.5
    return statistics.fmean(values), half


def tasks_of(seeds):  # -> {what the own task is}
    return {*values_by_seed(seeds, "task_heading").values()}


def difference_table(rows, baseline):  # -> Markdown: each row minus the baseline, or "" without two seeds
    """A bound is not subtracted from bits, nor a figure of one task from that of another."""
    others = [name for name in rows if name != baseline]
    columns = [["", *(f"{name} - {baseline}" for name in others)]]
    for key, metric in SUMMARY.items():
        kind = {"bits": is_bound, "task": tasks_of}.get(key, lambda seeds: None)
        cells = []
        for name in others:
            found = difference(values_by_seed(rows[name], key), values_by_seed(rows[baseline], key))
            is_alike = kind(rows[name]) == kind(rows[baseline])
            cells.append("{:+.{n}f} ± {:.{n}f}".format(*found, n=metric.digits) if found and is_alike else "")
        if any(cells):
            columns.append([metric.heading, *cells])
    return markdown([*zip(*columns)]) if len(columns) > 1 else ""


def pairs_table(rows, baseline):  # -> Markdown: the share of minimal pairs that a row gets right, or ""
    points = {name: {seed: torch.tensor(p).double() for seed, p in values_by_seed(seeds, "points").items()}
              for name, seeds in rows.items()}  # {row: {seed: (N,)}}
    lines = [["", "right pairs", f"minus {baseline}", "score", "seeds"]]
    for name, by_seed in points.items():
        if by_seed:
            both = [p - points[baseline][seed] for seed, p in by_seed.items() if seed in points[baseline]]
            minus = "{:+.3f} ± {:.3f}".format(*share_and_error(torch.stack(both))) if both and name != baseline else ""
            share = "{:.3f} ± {:.3f}".format(*share_and_error(torch.stack([*by_seed.values()])))
            [kind, *_] = values_by_seed(rows[name], "score").values()
            lines.append([name, share, minus, kind, " ".join(map(str, by_seed))])
    return markdown(lines) if len(lines) > 1 else ""


def report(budgets, references, baseline):  # {steps: {row: {seed: metrics}}} -> Markdown
    rows = budgets[max(budgets)]
    tasks = {}                                  # {task: {row: None}}
    for name, seeds in rows.items():
        for heading in tasks_of(seeds):
            tasks.setdefault(heading, {})[name] = None
    own_tasks = "".join(f"- own task of {', '.join(names)}: {heading}\n" for heading, names in tasks.items())
    note = "Means over seeds ± their standard errors."
    if max(map(len, rows.values())) == 1:
        note = ("With one seed, differences of less than 0.05 bits from left to right and of 0.1 to 0.3 bits in holes "
                "mean nothing (\"Errors\" in docs/RESULTS.md). Try --seeds 1,2,3")
    text = [f"After {max(budgets)} steps: bits per byte of held-out text, fewer are better; <= is diffusion's upper "
            f"bound. {note}\n", make_table(with_sides(rows), SUMMARY), own_tasks]
    parts = {"Differences with 95% intervals, paired by seed (Student's t):\n": difference_table(rows, baseline),
             "Minimal pairs: the share whose better text has the higher score (by chance 0.5), ± its standard error "
             "over pairs and seeds; differences are paired by pair and seed:\n": pairs_table(rows, baseline),
             "The rest (\"Glossary\" in docs/RESULTS.md; the .csv has more):\n": make_table(rows | references, REST)}
    for steps in sorted(budgets)[:-1]:
        parts[f"After {steps} steps:\n"] = make_table(with_sides(budgets[steps]), SUMMARY)
    for title, table in parts.items():
        text += [title, table] if table else []
    return "\n".join(text)


def settings_report(runs):  # -> Markdown: the settings that the rows do not share
    settings = {run.row: read_settings(run.hp) for run in runs}
    flags = [flag for flag in flag_specs() if flag not in RESERVED]
    differing = [flag for flag in flags if len({str(each.get(flag)) for each in settings.values()}) > 1]
    hp = runs[0].hp
    text = f"Corpus: {' '.join(hp.data)}. Model: {hp.n_layer} layers of width {hp.n_embd}, if not said below.\n"
    for row, each in settings.items():
        words = [f"{flag} {each[flag]}" for flag in differing if flag in each]
        text += f"- {row}: {', '.join(words)}\n" if words else ""
    return text


def changes_report(runs, rows):  # -> Markdown: the runs and figures that are older than the files of now, or ""
    changed = {}                                # {files: {folder of a run: None}}
    for run in runs:
        old = read_json(os.path.join(run.folder, "code.json"))
        files = [file for file, crc in run.code.items() if old.get(file) != crc]
        metrics = rows[run.hp.max_iters][run.row][run.hp.seed]
        for verb, names in ("trained", files), ("measured", [*dict.fromkeys(metrics.get("old", []))]):
            if names:
                changed.setdefault(f"{verb} before {', '.join(names)} changed", {})[os.path.basename(run.folder)] = None
    text = "".join(f"- {what}: {', '.join(folders)}\n" for what, folders in changed.items())
    return text and ("\nOlder than the files of now, which is harmless if the change was, such as a new objective. To "
                     f"train a run again, delete its folder.\n{text}")


def write_curves(budgets, path):
    with open(path, "w", encoding="utf-8", newline="") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow(["row", "steps", "seed", "metric", "value"])
        for steps, rows in sorted(budgets.items()):
            for name, metric in itertools.product(rows, ["task", *METRICS, "pairs"]):
                for seed, value in values_by_seed(rows[name], metric).items():
                    writer.writerow([name, steps, seed, metric, f"{value:.6g}"])


def main(argv=None):  # -> exit code
    flags, rest = parse_with_train_flags("python -m experiments.compare", __doc__, FLAGS, RESERVED, argv)
    [source] = open_corpus([flags.data])
    runs = plan_runs(flags, rest, source["crc"])
    pairs = read_pairs(flags.pairs) if flags.pairs else []
    check_flags(flags, runs, source, pairs)
    to_train = {run.folder: run for run in runs if not is_finished(run) and not read_figures(run, flags)}
    probes = {}
    if flags.data == "stdlib" and not flags.tasks_only:
        probes = {"probe": evaluate.byte_probe(256), "passages": evaluate.package_probe(256)}
    budgets = {}                                # {steps: {row: {seed: metrics}}}
    for i, run in enumerate(runs):
        label = f"[{i + 1}/{len(runs)}] {run.row}, {run.hp.max_iters} steps, seed {run.hp.seed}"
        steps_left = sum(each.hp.max_iters for each in to_train.values())
        is_trained = to_train.pop(run.folder, None) is None or train_run(run, label, steps_left)
        metrics = measure_run(run, flags, source["val"], probes, pairs, label) if is_trained else {}
        budgets.setdefault(run.hp.max_iters, {}).setdefault(run.row, {})[run.hp.seed] = metrics
        print(f"{label}: {'validation loss {loss:.4f} nats'.format(**metrics) if metrics else 'diverged'}", flush=True)
    references = evaluate.probe_references(runs[0].hp, probes) if probes else {}
    text = report(budgets, references, flags.baseline or runs[0].row)
    text += f"\n{settings_report(runs)}{changes_report(runs, budgets)}"
    path = os.path.join(flags.out_dir, f"sweep-{flags.sweep.partition('=')[0]}" if flags.sweep else "compare")
    Path(path + ".md").write_text(text, "utf-8")
    write_curves(budgets, path + ".csv")
    print(f"\nwritten: {path}.md, {path}.csv, {draw_curves(path + '.csv', path + '.png')}\n\n{text}", end="")
    all_seeds = [seeds for rows in budgets.values() for seeds in rows.values()]
    return 0 if any(any(seeds.values()) for seeds in all_seeds) else 1


if __name__ == "__main__":
    run_program(main)
