"""Train every objective for the same number of steps, and evaluate all of them in the same way (evaluate.py).

    python -m experiments.compare --objectives clm,mlm,mdlm --data book.txt --seeds 1,2,3
    python -m experiments.compare                       all objectives, one seed: one to five hours on a laptop CPU
    python -m experiments.compare --objectives clm,mlm,clm:0.5+mlm:0.5 --pairs pairs.jsonl --seeds 1,2,3
    python -m experiments.compare --sweep mask_rate=.1,.15,.3,.4 --objectives mlm --seeds 1,2,3
    python -m experiments.compare --sweep bart_noise=mask,infill+permute    a + inside a value stands for a comma
    python -m experiments.compare --sweep replay=scratch,0,.05      pre-train on Python, then train on C++ headers with
                                                                    this share of Python; scratch: on headers alone
    python -m experiments.compare --sweep start=none,clm,mlm        start from the weights of another objective's run

Every objective is trained with its own defaults, once for each seed. A mixture such as clm:0.5+mlm:0.5 is one row, and
each figure is of its first member that has it. Finished runs with the same settings and text are used again, and
interrupted runs are resumed. Figures (measured.json, with --tasks_only measured_tasks.json) are measured again if the
code that measures has changed. If the code that trains has changed, a run is refused: use another --out_dir. The tables
show the largest budget first, curves.csv and the picture all. If rows have fewer than 128 positions, some figures are
missing. Flags that are not listed below are train.py's. One of only some objectives, as --mask_rate, goes to those.
"""
import contextlib
import csv
import itertools
import json
import math
import os
import statistics
import sys
import time
import zlib
from argparse import Namespace
from collections import namedtuple
from pathlib import Path

from data import Flag, check_sizes, fail, make_rng, open_corpus
from experiments import evaluate
from experiments.evaluate import BITS, HOLE_LENGTHS, METRICS, Metric
from experiments.common import measuring_checksum, parse_with_train_flags, read_code, read_json, to_words
from experiments.common import training_checksums, write_json
from experiments.score import check_pairs, choose_scored, read_pairs, score_pairs, share_and_error
import train
from objectives import OBJECTIVES
from run import SHARED_FLAGS, VERSION, flag_specs, get_config, get_members, load_checkpoint, load_run
from run import member_weights, parent_settings, parse, run_program
import torch
from tqdm import tqdm

FLAGS = {
    "objectives": Flag("", "names or mixtures, with commas between; default: all, or the first with --sweep's setting"),
    "seeds": Flag("1", "separated by commas; all runs with the same seed have the same initial weights and data"),
    "budgets": Flag("1000", "numbers of steps, separated by commas; each is a separate run with its own schedule"),
    "data": Flag("stdlib", "corpus; the probes run only on stdlib, since they need Python files"),
    "new_data": Flag(os.path.join(torch.__path__[0], "include"), "second corpus, for --sweep replay"),
    "sweep": Flag("", "a setting and its values, as in mask_rate=.1,.15,.3"),
    "first_steps": Flag(0, "for --sweep start: steps of the first run; 0: as many as of the second", 0),
    "pairs": Flag("", "file of minimal pairs, as experiments.score reads it: also print the share of right ones"),
    "baseline": Flag("", "row to subtract from each other row; default: every two of up to four rows"),
    "tasks_only": Flag(False, "measure only losses and each objective's own task, in less time"),
    "out_dir": Flag("out/compare", "folder of tables, pictures and runs"),
}
# flags of train.py that this program sets
RESERVED = {"objective", "seed", "data", "out_dir", "resume", "max_iters", "max_passes", "init_from"}
HOLE = "bits of a hole's bytes, given the text on both sides or, where the row says so, only the text before it"
LEFT_TO_RIGHT = "each byte from all bytes before it (--doc_mask: in its document); <= is diffusion's upper bound"
SUMMARY = {                                     # columns of the first table
    "bits": Metric("left to right", 3, "", False, LEFT_TO_RIGHT),
    **{key: METRICS[key] for key in ("old_before", "old", "new")},
    **{f"hole_{m}": Metric(f"hole of {m} bytes", 2, "", False, HOLE) for m in HOLE_LENGTHS},
    "task": Metric("own task", 3),
}
STUDENT_T_975 = {2: 12.7, 3: 4.3, 4: 3.2, 5: 2.8, 6: 2.6, 7: 2.4, 8: 2.4}           # {number of seeds: quantile}
TEXT_BITS = {"bits", "old_before", "old", "new"}                # of some objectives an upper bound
SUMMED_UP = {"left_to_right", "bound", *TEXT_BITS, *(f"infill_{m}" for m in HOLE_LENGTHS)}
REST = {key: metric for key, metric in METRICS.items() if key not in SUMMED_UP}                   # second table
N_COLUMNS = 8                                   # maximum number of columns of the second table
N_EVALUATIONS = 5                               # of a run without --eval_interval; each also saves the run


# ---- cells: which runs there are
# a run to train and to measure. table: name of the files in which it appears; row: the objective, or in a sweep
# "mask_rate=.3"; argv: flags of train.py; first_argv: those of the run from whose weights this one starts, or None
Cell = namedtuple("Cell", "table row hp argv first_argv")
Run = namedtuple("Run", "hp argv folder")       # settings, the flags of train.py that give them


def plan_cells(flags, rest):  # -> [Cell]
    """Fails before anything runs if train.py would refuse the flags of a run."""
    setting, _, values = flags.sweep.partition("=")
    for name, its_sweep in ("first_steps", "start"), ("new_data", "replay"):
        if getattr(flags, name) != FLAGS[name].default and setting != its_sweep:
            fail(f"--{name}: is only for --sweep {its_sweep}. Try without it")
    refused = RESERVED | {"device", "eval_interval"}            # runs are not named by device
    known = setting in {"replay", "start", *flag_specs()} - refused
    if flags.sweep and not (known and all(values.split(","))):
        fail(f"--sweep {flags.sweep}: is not a setting of train.py, replay or start with its values. Try "
             "mask_rate=.1,.15,.3")
    names = choose_objectives(flags.objectives, setting)
    donors = {to_objective(value) for value in values.split(",") if setting == "start" and value != "none"}
    given = parse(rest)
    owned = {flag for name in {*names} | donors for flag in own_flags(name)}

    def words(name, steps):  # the flags of train.py for this objective; it refuses those that no objective here has
        read = {flag: value for flag, value in given.items() if flag not in owned - own_flags(name)}
        interval = max(1, int(steps) // N_EVALUATIONS) if steps.isdecimal() else steps
        return ["--objective", name, "--max_iters", steps, *to_words({"eval_interval": interval} | read)]
    cells = []
    grid = itertools.product(flags.budgets.split(","), flags.seeds.split(","), names, values.split(","))
    for steps, seed, name, value in grid:
        own = [*words(name, steps), "--seed", seed]
        argv = [*own, "--data", flags.data]
        first_argv = None
        if setting == "replay":                 # the same number of steps on each of the two corpora
            if value != "scratch":
                first_argv = argv
            argv = [*own, "--data", *replay_sources(flags, value)]
        elif setting == "start" and value != "none":
            first_steps = str(flags.first_steps or steps)
            first_argv = [*words(to_objective(value), first_steps), "--seed", seed, "--data", flags.data]
            get_members(get_config(first_argv))                 # fails if this objective does not allow these flags
        elif setting not in ("", "start"):
            default = flag_specs()[setting].default
            if isinstance(default, bool) and value not in ("True", "False"):
                fail(f"--sweep {flags.sweep}: is on or off. Try {setting}=True,False")
            if isinstance(default, str):
                value = value.replace("+", ",")             # not in numbers, such as 1e+1
            argv += to_words({setting: value == "True" if isinstance(default, bool) else value})
        mixture = name.replace(",", "+")
        table = f"sweep-{setting}-{mixture.replace(':', '_')}" if setting else "compare"
        row = f"{setting}={value}" if setting else mixture
        cells.append(Cell(table, row, get_config(argv), argv, first_argv))
    return cells


def own_flags(name):  # an objective or a mixture -> the names of flags that not all objectives have
    return {flag for part in member_weights(name) for flag in OBJECTIVES[part].flags}


def to_objective(word):  # "clm:0.5+mlm:0.5", a row of a table -> "clm:0.5,mlm:0.5", as train.py has it
    if ":" in word and "+" not in word:
        fail(f"--objectives {word}: has a weight, but is not a mixture, which is one row. Try clm:0.5+mlm:0.5")
    return word.replace("+", ",")


def choose_objectives(given, setting):  # --objectives, the setting that is swept or "" -> [name or mixture]
    names = [to_objective(word) for word in given.replace(" ", "").split(",") if given]
    if setting == "replay":                     # its table compares bits per byte
        owners = [name for name, objective in OBJECTIVES.items() if objective.bpb]
        if not all(any(OBJECTIVES[part].bpb for part in member_weights(name)) for name in names):
            fail(f"--objectives {given}: replay is measured in bits per byte. Try {','.join(owners)}")
    else:
        owners = [name for name, objective in OBJECTIVES.items() if setting in objective.flags]
    return names or owners[:1] or list(OBJECTIVES)


def replay_sources(flags, value):  # -> values of --data: the new corpus, and a share of the old one
    try:
        share = 0.0 if value == "scratch" else float(value)
    except ValueError:
        share = 1.0                             # is refused, too
    if not 0 <= share < 1:
        fail(f"--sweep replay={value}: wants shares from 0 to below 1, or scratch. Try replay=scratch,0,.05,.25")
    new = f"{flags.new_data}:{1 - share:g}"
    return [new, f"{flags.data}:{share:g}"] if share else [new]


# ---- a cell: train it, measure it
def list_runs(cell, crcs, out_dir):  # cell, checksums of the corpora -> [Run], the last of which is measured
    """A run that starts from the weights of another one comes after it. Its settings are those that get_config returns
    as soon as the first run exists."""
    if not cell.first_argv:
        return [Run(cell.hp, cell.argv, run_folder(cell.hp, crcs, out_dir))]
    first_hp = get_config(cell.first_argv)
    first_folder = run_folder(first_hp, crcs[:1], out_dir)
    # not the block size and sharpness of the first run
    argv = [*cell.argv, "--block_size", str(cell.hp.block_size), "--attn_scale", str(cell.hp.attn_scale),
            "--init_from", first_folder]
    given = parse(argv)
    parent = parent_settings({"config": vars(first_hp), "step": first_hp.max_iters}, given)
    inherited = {name: value for name, value in parent.items() if name not in given}
    hp = Namespace(**vars(cell.hp) | inherited | {"init_from": first_folder})
    return [Run(first_hp, cell.first_argv, first_folder), Run(hp, argv, run_folder(hp, crcs, out_dir))]


def run_folder(hp, crcs, out_dir):  # settings, checksums of the corpora -> folder of the run
    tag = zlib.crc32(json.dumps([VERSION, crcs, read_settings(hp)], sort_keys=True).encode())
    objective = hp.objective.replace(",", "+").replace(":", "_")
    return os.path.join(out_dir, "runs", f"{objective}-{hp.max_iters}-seed{hp.seed}-{tag:08x}")


def read_settings(hp):  # -> {flag: value} of those that the objective reads
    """Without the device, since a run may be resumed on another one, and without the interval of evaluations."""
    names = (SHARED_FLAGS | own_flags(hp.objective)) - {"device", "eval_interval"}
    return {flag: value for flag, value in vars(hp).items() if flag in names}


def weights_of(run):
    return os.path.join(run.folder, "ckpt.pt")


def is_finished(run):
    return os.path.exists(weights_of(run)) and load_checkpoint(weights_of(run))["step"] == run.hp.max_iters


def check_runs(runs, code, flags):  # of list_runs; fails if one was trained by other code
    has_figures = bool(read_figures(runs[-1], flags))
    for run in runs:
        new = training_checksums(code, member_weights(run.hp.objective))
        old = read_json(os.path.join(run.folder, "code.json"))
        changed = [file for file in new if old.get(file, new[file]) != new[file]]
        if changed and (has_figures or os.path.exists(weights_of(run))):
            fail(f"{run.folder}: is older than {' and '.join(changed)}, so it differs from a run of today. Try another "
                 f"--out_dir, such as {flags.out_dir}-2, which keeps both")


def read_figures(run, flags):  # -> {"code": checksum, "metrics": {metric: number}}, or {}
    tasks = read_json(os.path.join(run.folder, "measured_tasks.json")) if flags.tasks_only else {}
    return tasks or read_json(os.path.join(run.folder, "measured.json"))


def train_run(run, code, label, on_record):  # -> whether the run is finished; False if it diverged
    """Skips a finished run and resumes an interrupted one."""
    if is_finished(run):
        return True
    argv = [*run.argv, "--out_dir", run.folder]
    if os.path.exists(weights_of(run)):
        argv.append("--resume")
    else:
        os.makedirs(run.folder, exist_ok=True)
        write_json(os.path.join(run.folder, "code.json"), training_checksums(code, member_weights(run.hp.objective)))
    print(f"{label}: training, logged in {run.folder}/log.txt", flush=True)
    with open(os.path.join(run.folder, "log.txt"), "a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        try:
            exit_code = train.main(argv, with_sample=False, on_record=on_record)
        except FloatingPointError as e:
            print(f"{label}: {e}", file=sys.stderr)
            return False
        except KeyboardInterrupt:
            print(f"stopped, saved in {run.folder}. The same command resumes it", file=sys.stderr)
            raise
    if exit_code:                               # stopped by another signal
        sys.exit(exit_code)
    return True


def run_cell(runs, flags, sources, probes, pairs, code, label, on_record):  # runs: of list_runs -> {metric: number}
    """Returns {} if a run diverged. Uses figures that the same code has measured before. If the weights are deleted, so
    that the run cannot be measured again, uses those of older code, with a note."""
    *first, run = runs
    saved = read_figures(run, flags)
    if not saved and not all(train_run(each, code, label, on_record) for each in runs):
        return {}
    version = measuring_checksum(code)
    if saved.get("code") != version and all(os.path.exists(weights_of(each)) for each in runs):
        print(f"{label}: measuring{'' if flags.tasks_only else ' (--tasks_only skips holes and probes)'}", flush=True)
        first_folder = first[0].folder if first else None
        metrics = evaluate.measure_run(run.folder, run.hp.device, sources, probes, flags.tasks_only, first_folder)
        saved = {"code": version, "metrics": metrics}
        write_json(os.path.join(run.folder, "measured_tasks.json" if flags.tasks_only else "measured.json"), saved)
    notes = []
    if saved.get("code") != version:
        notes.append("measured by older code, since the weights are deleted")
    return saved["metrics"] | {"notes": notes} | run_pairs(run, pairs, version, notes)


def run_pairs(run, pairs, version, notes):  # pairs: of read_pairs -> metrics: a point for each pair, and their mean
    """Scores a file of pairs once: the points are kept under its checksum."""
    member = choose_scored(get_members(run.hp))
    if not pairs or not member:
        return {}
    path = os.path.join(run.folder, f"pairs-{zlib.crc32(repr(pairs).encode()):08x}.json")
    saved = read_json(path)
    if saved.get("code") != version and os.path.exists(weights_of(run)):
        model, hp, _ = load_run(weights_of(run), run.hp.device, "float32")
        points, kind = score_pairs(model, member.objective, hp, pairs, seed=1)
        saved = {"code": version, "points": points, "pairs": statistics.fmean(points), "score": kind.partition(",")[0]}
        write_json(path, saved)
    if saved.get("code") != version:
        notes.append("minimal pairs of older code or none, since the weights are deleted")
    return saved


# ---- tables of rows {name: {seed: metrics}}, where metrics {metric: number} are empty if the run diverged
def values_by_seed(seeds, metric):  # {seed: metrics} -> {seed: number}, of the seeds that have one
    return {seed: metrics[metric] for seed, metrics in seeds.items() if metrics.get(metric) is not None}


def is_bound(seeds):  # are the bits left to right an upper bound?
    return bool(values_by_seed(seeds, "bound")) and not values_by_seed(seeds, "left_to_right")


def label(name, seeds, metric):  # the name of a row, and what else its figures of this metric are
    if metric.startswith("hole") and values_by_seed(seeds, "left_4") and not values_by_seed(seeds, "infill_4"):
        return f"{name} (left side)"
    return f"{name} (bound)" if metric == "bits" and is_bound(seeds) else name


def heading_of(metric):
    return f"{metric.heading} ({metric.unit})" if metric.unit else metric.heading


def markdown(rows):  # [[heading, ...], [cell, ...], ...] -> str
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return "\n".join(lines) + "\n"


def difference(a, b):  # {seed: number} each -> mean of a - b over the seeds that both have, half of its 95% interval
    pairs = [value - b[seed] for seed, value in a.items() if seed in b]
    if len(pairs) < 2:
        return 0.0, math.inf
    return statistics.fmean(pairs), STUDENT_T_975.get(len(pairs), 2.3) * statistics.stdev(pairs) / len(pairs) ** 0.5


def find_worse(values, more_is_better):  # {name: {seed: number}} -> names that are worse than the best one
    """Those whose interval of the difference from the best does not reach 0. Rows with one seed have no interval."""
    means = {name: statistics.fmean(by_seed.values()) for name, by_seed in values.items() if len(by_seed) > 1}
    if more_is_better is None or not means:
        return set()
    sign = -1 if more_is_better else 1
    best = min(means, key=lambda name: sign * means[name])
    found = {name: difference(values[name], values[best]) for name in means}
    return {name for name, (mean, half) in found.items() if sign * mean > half}


def stars_by_chance(n_rows, n_seeds):  # -> stars in a column of rows that differ by chance alone, on average
    """Simulates 2,000 columns. Chance also makes one row the best, so more than one star in 40 rows is expected."""
    x = torch.randn(2000, n_rows, n_seeds, generator=make_rng("stars"))
    pairs = x - x[range(2000), x.mean(2).argmin(1)][:, None]    # minus the best row
    is_worse = pairs.mean(2) > STUDENT_T_975.get(n_seeds, 2.3) * pairs.std(2) / n_seeds ** 0.5
    return float(is_worse.sum(1).float().mean())


def make_table(rows, metrics, n_columns=99):  # -> lines [[heading, ...], [cell, ...], ...], metrics without a column
    columns = [["", *rows]]
    left_out = []
    for key, metric in metrics.items():
        values = {name: values_by_seed(seeds, key) for name, seeds in rows.items()}
        bounds = {name for name, seeds in rows.items() if key in TEXT_BITS and is_bound(seeds)}
        if not any(values.values()):
            continue
        if len(columns) == n_columns - 1:
            left_out.append(key)
            continue
        worse = find_worse(values, metric.more_is_better) - bounds
        cells = []
        for name, by_seed in values.items():
            mean = f"{statistics.fmean(by_seed.values()):.{metric.digits}f}" if by_seed else ""
            error = f" ± {statistics.stdev(by_seed.values()):.{metric.digits}f}" if len(by_seed) > 1 else ""
            cells.append("<= " * (name in bounds and mean != "") + mean + error + "*" * (name in worse))
        columns.append([heading_of(metric), *cells])
    columns.append(["seeds"])
    for seeds in rows.values():
        columns[-1].append(" ".join(f"{seed}" if metrics else f"{seed} diverged" for seed, metrics in seeds.items()))
    return [*zip(*columns)], left_out


def first_table(rows):
    lines, _ = make_table({label(name, seeds, "hole"): seeds for name, seeds in rows.items()}, SUMMARY)
    return lines


def difference_lines(rows, baseline):  # -> lines of a table: every two of up to four rows, or all minus the baseline
    couples = [(name, baseline) for name in rows if name != baseline]
    if not baseline:
        couples = [(b, a) for a, b in itertools.combinations(rows, 2)] if len(rows) <= 4 else []
    columns = [["", *(f"{a} - {b}" for a, b in couples)]]
    for key, metric in SUMMARY.items():
        cells = []
        for a, b in couples:
            mean, half = difference(values_by_seed(rows[a], key), values_by_seed(rows[b], key))
            has_bound = key == "bits" and (is_bound(rows[a]) or is_bound(rows[b]))
            is_known = half < math.inf and not has_bound
            cells.append(f"{mean:+.{metric.digits}f} ± {half:.{metric.digits}f}" if is_known else "")
        if any(cells) and metric.more_is_better is not None:
            columns.append([heading_of(metric), *cells])
    return [*zip(*columns)] if len(columns) > 1 else []


def pairs_lines(rows):  # -> lines of a table: the share of minimal pairs that a row gets right
    points = {name: {seed: torch.tensor(p).double() for seed, p in values_by_seed(seeds, "points").items()}
              for name, seeds in rows.items()}  # {row: {seed: (N,)}}
    found = {name: share_and_error(torch.stack([*by_seed.values()])) for name, by_seed in points.items() if by_seed}
    best = max(found, key=found.get, default="")
    lines = [["", "right pairs", "less than the best row", "score", "seeds"]]
    for name, (share, error) in found.items():
        shared = points[name].keys() & points[best].keys() if name != best else []
        differences = [points[best][seed] - points[name][seed] for seed in shared]
        less = "{:.3f} ± {:.3f}".format(*share_and_error(torch.stack(differences))) if differences else ""
        [kind, *_] = values_by_seed(rows[name], "score").values()
        lines.append([name, f"{share:.3f} ± {error:.3f}", less, kind, " ".join(map(str, points[name]))])
    return lines if found else []


def explain(metrics, headings):  # {metric: Metric}, headings of a table -> a line for each kind of column
    kinds = {}                                  # {meaning: {heading: None}}
    for metric in metrics.values():
        if heading_of(metric) in headings and metric.meaning:
            kinds.setdefault(metric.meaning, {})[metric.heading.partition(":")[0]] = None
    return "".join(f"- {', '.join(names)}: {meaning}\n" for meaning, names in kinds.items())


def tables(rows, references, baseline="", curves="curves.csv"):  # -> Markdown
    first = first_table(rows)
    rest, left_out = make_table(rows | references, REST, N_COLUMNS)
    remarks = {}                                # {remark: {name: None}}
    for name, seeds in rows.items():
        for metrics in seeds.values():
            own = [f"own task: {metrics['task_heading']}"] if "task_heading" in metrics else []
            for remark in own + metrics.get("notes", []):
                remarks.setdefault(remark, {})[name] = None
    of_rows = "".join(f"- {', '.join(names)}: {remark}\n" for remark, names in remarks.items())
    note = ("With one seed, differences of less than 0.05 bits from left to right and 0.1 to 0.3 bits in holes mean "
            "nothing (\"Errors\" in docs/RESULTS.md). Try --seeds 1,2,3\n")
    n_seeds = max(map(len, rows.values()))
    if n_seeds > 1:
        chance = 0.0
        for key, metric in (SUMMARY | REST).items():
            n_rows = sum(bool(values_by_seed(seeds, key)) for seeds in rows.values())
            if n_rows > 1 and key not in left_out and metric.more_is_better is not None:
                chance += stars_by_chance(n_rows, n_seeds)
        note = ("Means over seeds ± their standard deviation. *: worse than the best of the column (95%, Student's t, "
                f"differences paired by seed). If all rows were equal, chance would give about {chance:.1f} stars. "
                "With two or three seeds, only large differences are found.\n")
    text = ["Bits per byte of held-out text, less is better. For the own task see below.\n", markdown(first),
            explain(SUMMARY, first[0]) + of_rows, note]
    further = {"Differences, with 95% intervals (paired by seed, Student's t)": difference_lines(rows, baseline),
               "Minimal pairs: the share whose better text has the higher score (by chance 0.5), ± its standard error "
               "over pairs and seeds; differences are paired by pair and by seed": pairs_lines(rows)}
    for title, lines in further.items():
        text += [f"{title}:\n", markdown(lines)] if lines else []
    text += ["The rest:\n", markdown(rest), explain(REST, rest[0])]
    if left_out:
        text.append(f"{curves} also has {', '.join(left_out)}.\n")
    return "\n".join(text)


def differing_settings(hps):  # {row: settings} -> Markdown: the settings that the rows do not share, or ""
    rows = {row: read_settings(hp) for row, hp in hps.items()}
    flags = [flag for flag in flag_specs() if flag not in RESERVED]
    differing = [flag for flag in flags if len({settings.get(flag) for settings in rows.values()}) > 1]
    text = "\nSettings that differ:\n\n"
    for row, settings in rows.items():
        words = [f"{flag} {settings[flag]}" for flag in differing if flag in settings]
        text += f"- {row}: {', '.join(words) or 'none of these'}\n"
    return text if differing else ""


# ---- the numbers and the picture: {budget: {row: {seed: metrics}}}
# xs: what is below the horizontal axis; lines {row: {x: [number of each seed]}}
Panel = namedtuple("Panel", "metric xlabel xs lines")


def write_curves(budgets, path, first_column):
    with open(path, "w", encoding="utf-8", newline="") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow([first_column, "steps", "seed", "metric", "value"])
        for steps, rows in sorted(budgets.items()):
            for name, metric in itertools.product(rows, ["task", *METRICS, "pairs"]):
                for seed, value in values_by_seed(rows[name], metric).items():
                    writer.writerow([name, steps, seed, metric, f"{value:.6g}"])


def make_panel(key, metric, budgets):  # -> Panel of a metric: over the steps, or over the rows of a single budget
    has_budgets = len(budgets) > 1
    lines = {}
    for steps, rows in sorted(budgets.items()):
        for row, seeds in rows.items():
            values = [*values_by_seed(seeds, key).values()]
            name = label(row, seeds, key)
            if values:
                lines.setdefault(name, {})[steps if has_budgets else name] = values
    return Panel(metric, "steps" if has_budgets else "", sorted(budgets) if has_budgets else [*lines], lines)


def draw_panels(panels, path, size=(4.2, 3.4), dpi=90, font=8):  # -> path, or the reason why there is no picture
    try:
        from matplotlib import colormaps, rc_context  # imported here because it is optional
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: pip install matplotlib, and the next run draws it"
    panels = [panel for panel in panels if panel.lines]
    if not panels:
        return "no picture: no metric to draw"
    rows = dict.fromkeys(name.partition(" (")[0] for panel in panels for name in panel.lines)       # without labels
    colors = dict(zip(rows, itertools.cycle([*colormaps["tab10"].colors, *colormaps["Dark2"].colors])))
    n_columns = min(3, len(panels))
    n_rows = math.ceil(len(panels) / 3)
    with rc_context({"font.size": font, "axes.titlesize": "medium"}):
        figure = Figure((size[0] * n_columns, size[1] * n_rows), layout="constrained")
        handles = {}                            # {row: its line} of lines that join two points
        for i, panel in enumerate(panels, 1):
            axis = figure.add_subplot(n_rows, n_columns, i)
            for name, line in panel.lines.items():
                row, has_label, _ = name.partition(" (")
                places = [panel.xs.index(x) for x in line]
                style = dict(color=colors[row], ls="--" if has_label else "-", lw=font / 6, marker="_", ms=font)
                [drawn] = axis.plot(places, [*map(statistics.fmean, line.values())], **style)
                handles |= {name: drawn} if len(line) > 1 else {}
                dots = [(place, value) for place, values in zip(places, line.values()) for value in values]
                axis.scatter(*zip(*dots), s=1.5 * font, alpha=0.7, linewidths=0, color=colors[row])    # seeds
            better = "more" if panel.metric.more_is_better else "less"
            axis.set(title=f"{panel.metric.heading} ({better} is better)", xlabel=panel.xlabel,
                     ylabel=panel.metric.unit or BITS, xlim=(-0.5, len(panel.xs) - 0.5))
            is_long = len("".join(map(str, panel.xs))) > 40
            axis.set_xticks(range(len(panel.xs)), panel.xs, rotation=45 * is_long, ha="right" if is_long else "center")
            axis.grid(alpha=0.3)
        if handles:
            figure.legend(handles.values(), handles, loc="outside right upper")
        figure.savefig(path, dpi=dpi)
    return path


# ---- the program
def make_estimator(runs):  # -> on_record of train.main, which prints once how long these runs will take
    out = sys.stdout                            # not that of train, which is a file
    printed = []

    def on_record(record):
        if record.get("split") == "train" and record["step"] and not printed:
            minutes = sum(run.hp.max_iters for run in runs) * record["seconds"] / (record["step"] + 1) / 60
            printed.append(f"{len(runs)} runs, about {math.ceil(minutes)} min, and the time to measure them")
            tqdm.write(printed[0], file=out)
    return on_record


def check_flags(flags, cells, sources, pairs):  # fails if something would fail after the first training
    for cell in cells:
        check_sizes(sources, max(m.n for m in get_members(cell.hp)), cell.hp.block_size)
        scored = choose_scored(get_members(cell.hp))
        if pairs and scored:
            check_pairs(pairs, scored.objective, cell.hp)
    for source in sources:
        corpus = source["name"]
        if len(source["val"]) < 256:            # evaluations read windows of up to 256 bytes
            fail(f"--data {corpus}: {len(source['val'])} bytes to validate on are too few. Try more text")
        # otherwise the runs would be read as text
        if os.path.isdir(corpus) and Path(flags.out_dir).resolve().is_relative_to(Path(corpus).resolve()):
            fail(f"--out_dir {flags.out_dir}: lies inside the corpus {corpus}. Try a folder outside it")
    rows = [*dict.fromkeys(cell.row for cell in cells)]
    if flags.baseline and (flags.baseline not in rows or "," not in flags.seeds):
        fail(f"--baseline {flags.baseline}: must be one of the rows {', '.join(rows)}, and needs two seeds. "
             "Try --seeds 1,2,3")


def main(argv=None):  # -> exit code
    flags, rest = parse_with_train_flags("python -m experiments.compare", __doc__, FLAGS, RESERVED, argv)
    setting = flags.sweep.partition("=")[0]
    cells = plan_cells(flags, rest)
    sources = open_corpus([flags.data, flags.new_data] if setting == "replay" else [flags.data])
    pairs = read_pairs(flags.pairs) if flags.pairs else []
    check_flags(flags, cells, sources, pairs)
    code = read_code()
    to_train = {}                               # {folder: run}
    runs_of = []
    for cell in cells:
        runs = list_runs(cell, [source["crc"] for source in sources], flags.out_dir)
        check_runs(runs, code, flags)
        runs_of.append(runs)
        if not read_figures(runs[-1], flags):
            to_train |= {run.folder: run for run in runs if not is_finished(run)}
    on_record = make_estimator([*to_train.values()])
    try:
        os.makedirs(flags.out_dir, exist_ok=True)
    except OSError as e:
        fail(f"--out_dir {flags.out_dir}: cannot be written to ({e.strerror}). Try another folder")
    probes = {}
    if flags.data == "stdlib" and not flags.tasks_only:
        probes = {"probe": evaluate.byte_probe(256), "passages": evaluate.package_probe(256)}
    results = {}                                # {table: {budget: {row: {seed: metrics}}}}
    steps = 0                                   # of the runs that this call has trained
    seconds = 0.0                               # that it took to train and measure them
    for i, (cell, runs) in enumerate(zip(cells, runs_of)):
        hp = cell.hp
        label = f"[{i + 1}/{len(cells)}] {cell.row}, {hp.max_iters} steps, seed {hp.seed}"
        start = time.perf_counter()
        metrics = run_cell(runs, flags, sources, probes, pairs, code, label, on_record)
        rows = results.setdefault(cell.table, {}).setdefault(hp.max_iters, {})
        rows.setdefault(cell.row, {})[hp.seed] = metrics
        outcome = f"validation loss {metrics['loss']:.4f} nats" if metrics else "diverged"
        trained = [to_train.pop(run.folder) for run in runs if run.folder in to_train]
        if trained:
            steps += sum(run.hp.max_iters for run in trained)
            seconds += time.perf_counter() - start
        if steps:
            minutes = sum(run.hp.max_iters for run in to_train.values()) * seconds / steps / 60
            outcome += f", about {minutes:.0f} min left"
        print(f"{label}: {', '.join([outcome, *metrics.get('notes', [])])}", flush=True)
    references = evaluate.probe_references(cells[0].hp, probes) if probes and not setting else {}
    for table, budgets in results.items():
        hps = {cell.row: runs[-1].hp for cell, runs in zip(cells, runs_of) if cell.table == table}
        models = sorted({f"{hp.n_layer} layers of width {hp.n_embd}" for hp in hps.values()})
        settings = differing_settings(hps)
        settings += f"\nCorpus: {flags.data}. Model: {' or '.join(models)}. Steps: {max(budgets)}.\n"
        write_report(os.path.join(flags.out_dir, table), budgets, flags, references, settings)
    if not pairs:
        print("\nTo compare grammar: the same command with --pairs FILE, such as --pairs docs/pairs-novel.jsonl")
    all_runs = [seeds for budgets in results.values() for rows in budgets.values() for seeds in rows.values()]
    return 0 if any(any(seeds.values()) for seeds in all_runs) else 1


def write_report(path, budgets, flags, references, settings=""):  # path: without the suffix
    rows = budgets[max(budgets)]
    setting = flags.sweep.partition("=")[0]
    curves = path + ".csv" if setting else os.path.join(os.path.dirname(path), "curves.csv")
    text = tables(rows, references, flags.baseline, os.path.basename(curves))
    for steps in sorted(budgets)[:-1]:
        rest, _ = make_table(budgets[steps], REST, N_COLUMNS)
        text += f"\nAfter {steps} steps:\n\n{markdown(first_table(budgets[steps]))}\n{markdown(rest)}"
    with open(path + ".md", "w", encoding="utf-8") as f:
        f.write(text + settings)
    write_curves(budgets, curves, setting or "objective")
    _, left_out = make_table(rows, REST, N_COLUMNS)
    panels = [make_panel(key, metric, budgets) for key, metric in (SUMMARY | REST).items()
              if metric.more_is_better is not None and key not in left_out]
    picture = draw_panels(panels, path + ".png")
    print(f"\nwritten: {path}.md, {curves}, {picture}\n\n{text}{settings}")


if __name__ == "__main__":
    run_program(main)
