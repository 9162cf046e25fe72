"""Train every objective for the same number of steps, and evaluate all of them in the same way (evaluate.py).

    python -m experiments.compare --objectives clm,mlm,mdlm --data book.txt --seeds 1,2,3
    python -m experiments.compare                       all objectives, one seed: one to five hours on a laptop CPU
    python -m experiments.compare --budgets 100         minutes: too short to conclude anything
    python -m experiments.compare --budgets 500,1000,2000,4000,8000 --objectives clm,mlm --seeds 1,2,3
    python -m experiments.compare --sweep mask_rate=.1,.15,.3,.4 --objectives mlm --seeds 1,2,3
    python -m experiments.compare --sweep bart_noise=mask,infill+permute    a + inside a value stands for a comma
    python -m experiments.compare --sweep replay=scratch,0,.05      pre-train on Python, then on C++ headers with this
                                                                    share of Python; scratch: on C++ headers alone
    python -m experiments.compare --sweep start=none,clm,mlm --first_steps 8000     start from the weights of a run of
                                                                                    another objective

Every objective is trained with its own defaults. Each row of a table has a run of train.py for each seed. The folder of
a run is named after its settings and its text: a finished run is not trained again, an interrupted run is resumed, and
other settings make another run. The run's metrics are in measured.json in its folder (with --tasks_only in
measured_tasks.json); delete that file to measure the run again. The tables show the largest budget first; curves.csv
and the picture show all budgets. With one budget, the picture shows the bits of holes and the losses over
the steps. If rows have fewer than 128 positions, holes, replaced bytes and some tasks are not measured.
Flags that are not listed below are train.py's, such as --n_layer 6. One that only some of the objectives have, such as
--mask_rate, goes to those.
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
from dataclasses import dataclass
from pathlib import Path

from data import Flag, check_sizes, fail, open_corpus
from experiments import evaluate
from experiments.evaluate import BITS, HOLE_LENGTHS, METRICS, Metric
from experiments.flags import parse_with_train_flags, to_words
from experiments.runs import measuring_checksum, read_code, read_json, training_checksums, write_json
import train
from objectives import OBJECTIVES
from run import SETTINGS, SHARED_FLAGS, VERSION, flag_specs, get_config, get_members, load_checkpoint
from run import member_weights, parent_settings, parse, run_program
import torch
from tqdm import tqdm

FLAGS = {
    "objectives": Flag("", "names separated by commas; default: all, or the first that has the setting of --sweep"),
    "seeds": Flag("1", "separated by commas; all runs with the same seed have the same initial weights and data"),
    "budgets": Flag("1000", "numbers of steps, separated by commas; each is a separate run with its own schedule"),
    "data": Flag("stdlib", "corpus; the probes run only on stdlib, since they need Python files"),
    "new_data": Flag(os.path.join(torch.__path__[0], "include"), "second corpus, for --sweep replay"),
    "sweep": Flag("", "a setting and its values, as in mask_rate=.1,.15,.3"),
    "first_steps": Flag(0, "for --sweep start: steps of the first run; 0: as many as of the second", 0),
    "tasks_only": Flag(False, "measure only losses and each objective's own task, in less time"),
    "latex": Flag(False, "write the first table as a .tex file, too"),
    "out_dir": Flag("out/compare", "folder of tables, pictures and runs"),
}
# flags of train.py that this program sets
RESERVED = {"objective", "seed", "data", "out_dir", "resume", "max_iters", "max_passes", "init_from"}
RANKED = {key: metric for key, metric in METRICS.items() if metric.more_is_better is not None}
HOLE = "bits of a hole's bytes, given the text on both sides or, where the row says so, only the text before it"
SUMMARY = {                                     # columns of the first table
    "bits": Metric("left to right", 3, "", False, "each byte from all bytes before it; <= is diffusion's upper bound"),
    **{key: METRICS[key] for key in ("old_before", "old", "new")},
    **{f"hole_{m}": Metric(f"of {m}" if i else f"hole of {m} bytes", 2, "", False, HOLE)
       for i, m in enumerate(HOLE_LENGTHS)},
    "task": Metric("own task", 3),
}
STUDENT_T_975 = 12.7, 4.3, 3.2, 2.8, 2.6, 2.4, 2.4, 2.3, 2.3             # for 2, 3, ... seeds
SUMMED_UP = {"left_to_right", "bound", "old_before", "old", "new", *(f"infill_{m}" for m in HOLE_LENGTHS)}
REST = {key: metric for key, metric in METRICS.items() if key not in SUMMED_UP}                   # second table
N_CURVE = 5                                     # evaluations of a run, if there is one budget and no --eval_interval
ESTIMATE_SECONDS = 3.0                          # of training, before the time that all runs need is printed


# ---- cells: which runs there are
@dataclass
class Cell:
    """A run to train and to measure."""
    table: str                                  # file name of the table and the picture in which it appears
    row: str                                    # the objective, or in a sweep "mask_rate=.3"
    hp: Namespace
    argv: list                                  # flags of train.py
    first_argv: list | None = None              # flags of the run from whose weights this one starts


Run = namedtuple("Run", "hp argv folder")       # settings, the flags of train.py that give them, folder


def plan_cells(flags, rest):  # -> [Cell]
    """Fails before anything runs if train.py would refuse the flags of a run."""
    setting, _, values = flags.sweep.partition("=")
    refused = RESERVED | {"device", "eval_interval"}            # runs are not named by device
    known = setting in {"replay", "start", *flag_specs()} - refused
    if flags.sweep and not (known and all(values.split(","))):
        fail(f"--sweep {flags.sweep}: is not a setting of train.py, replay or start with its values. Try "
             "mask_rate=.1,.15,.3")
    names = choose_objectives(flags.objectives, setting)
    donors = {to_objective(value) for value in values.split(",") if setting == "start" and value != "none"}
    given = parse(rest)
    owned = {flag for name in {*names} | donors for flag in own_flags(name)}
    is_curve = not setting and "," not in flags.budgets         # its picture shows the losses over the steps

    def words(name, steps):  # the flags of train.py for this objective; it refuses those that no objective here has
        read = {flag: value for flag, value in given.items() if flag not in owned - own_flags(name)}
        interval = max(1, int(steps) // N_CURVE) if is_curve and steps.isdecimal() else steps
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
    argv = [*cell.argv, "--init_from", first_folder]
    for name in {"block_size", "attn_scale"} - parse(argv).keys():                  # not those of the first run
        argv += [f"--{name}", str(getattr(cell.hp, name))]
    given = parse(argv)
    parent = parent_settings({"config": vars(first_hp), "step": first_hp.max_iters}, given)
    hp = Namespace(**vars(cell.hp) | {"init_from": first_folder})
    for name in parent.keys() - given.keys():
        setattr(hp, name, parent[name])
    return [Run(first_hp, cell.first_argv, first_folder), Run(hp, argv, run_folder(hp, crcs, out_dir))]


def run_folder(hp, crcs, out_dir):  # settings, checksums of the corpora -> folder of the run
    """Depends only on settings that the objective reads. If a default of another objective changes, the run keeps its
    name. The device is left out, since a run may be resumed on another one, and so is the interval of evaluations."""
    groups = [*SETTINGS.values(), *(m.objective.flags for m in get_members(hp))]
    names = {flag for group in groups for flag in group} - {"device", "eval_interval"}
    settings = {flag: value for flag, value in vars(hp).items() if flag in names}
    tag = zlib.crc32(json.dumps([VERSION, crcs, settings], sort_keys=True).encode())
    objective = hp.objective.replace(",", "+").replace(":", "_")
    return os.path.join(out_dir, "runs", f"{objective}-{hp.max_iters}-seed{hp.seed}-{tag:08x}")


def weights_of(run):
    return os.path.join(run.folder, "ckpt.pt")


def is_finished(run):
    return os.path.exists(weights_of(run)) and load_checkpoint(weights_of(run))["step"] == run.hp.max_iters


def check_runs(runs, code, flags):  # runs: of list_runs
    """Fails if a run was trained by other code, or can neither be used nor trained."""
    has_figures = bool(read_figures(runs[-1], flags))
    for run in runs:
        new = training_checksums(code, member_weights(run.hp.objective))
        old = read_json(os.path.join(run.folder, "code.json"))
        changed = [file for file in new if old.get(file, new[file]) != new[file]]
        has_weights = os.path.exists(weights_of(run))
        has_best = os.path.exists(os.path.join(run.folder, "best.pt"))
        if changed and (has_figures or has_weights or has_best):
            fail(f"{run.folder}: is older than {' and '.join(changed)}, so it differs from a run of today. Try another "
                 f"--out_dir, such as {flags.out_dir}-2, which keeps both")
        if has_best and not has_weights and not has_figures:
            fail(f"{run.folder}: has best.pt, but neither ckpt.pt nor figures. Try to delete this folder: the same "
                 "command then trains the run again")


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
    if exit_code:                               # stopped by a signal
        print(f"stopped, saved in {run.folder}. The same command resumes it")
        sys.exit(exit_code)
    return True


def run_cell(cell, runs, flags, sources, probes, code, label, on_record):  # of list_runs -> {metric: number}
    """Returns {} if a run diverged. Figures that were measured before are used, if by the same code. Where the weights
    are deleted, so that a run cannot be measured again, they are used anyway, with a note."""
    *first, run = runs
    saved = read_figures(run, flags)
    if not saved:
        if first and not train_run(*first, code, f"{label}, its first run", on_record):
            return {}
        if not train_run(run, code, label, on_record):
            return {}
    checksum = measuring_checksum(code)
    if saved.get("code") != checksum and all(os.path.exists(weights_of(each)) for each in runs):
        advice = "" if flags.tasks_only else " (--tasks_only skips holes and probes)"
        print(f"{label}: measuring{advice}", flush=True)
        first_folder = first[0].folder if first else None
        metrics = evaluate.measure_run(run.folder, cell.hp.device, sources, probes, flags.tasks_only, first_folder)
        saved = {"code": checksum, "metrics": metrics}
        name = "measured_tasks.json" if flags.tasks_only else "measured.json"
        write_json(os.path.join(run.folder, name), saved)
    notes = []
    if not all(os.path.exists(os.path.join(each.folder, "code.json")) for each in runs):
        notes.append("trained by an unknown version of the code")
    if saved.get("code") != checksum:
        notes.append("measured by older code, and the weights are deleted")
    return saved["metrics"] | {"notes": notes}


# ---- tables of rows {name: {seed: metrics}}, where metrics {metric: number} are empty if the run diverged
def values_by_seed(seeds, metric):  # {seed: metrics} -> {seed: number}, of the seeds that have one
    return {seed: metrics[metric] for seed, metrics in seeds.items() if metrics.get(metric) is not None}


def sees_left_only(seeds):  # of holes
    return bool(values_by_seed(seeds, "left_4")) and not values_by_seed(seeds, "infill_4")


def is_bound(seeds):  # are the bits left to right an upper bound?
    return bool(values_by_seed(seeds, "bound")) and not values_by_seed(seeds, "left_to_right")


def markdown(rows):  # [[heading, ...], [cell, ...], ...] -> str
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return "\n".join(lines) + "\n"


def latex(rows):  # the same table for LaTeX
    escapes = {"<=": r"$\leq$", "±": r"$\pm$", "_": r"\_", "%": r"\%"}
    text = " \\\\\n".join(" & ".join(row) for row in rows)
    for character, escape in escapes.items():
        text = text.replace(character, escape)
    return f"\\begin{{tabular}}{{l{'r' * (len(rows[0]) - 1)}}}\n{text}\n\\end{{tabular}}\n"


def find_worse(values, more_is_better):  # {name: {seed: number}} -> names that are worse than the best one
    """The difference, a mean over the seeds that both have, exceeds its standard error by Student's t of 95%, which is
    about 2 for many seeds. Of rows that differ by chance alone, one in 20 is marked, or more if there are many rows."""
    means = {name: statistics.fmean(by_seed.values()) for name, by_seed in values.items() if by_seed}
    if more_is_better is None or not means:
        return set()
    best = values[max(means, key=means.get) if more_is_better else min(means, key=means.get)]

    def is_worse(name):
        pairs = [value - best[seed] for seed, value in values[name].items() if seed in best]
        if len(pairs) < 2:
            return False
        t = STUDENT_T_975[min(len(pairs), len(STUDENT_T_975) + 1) - 2]
        worse = statistics.fmean(pairs) * (-1 if more_is_better else 1)
        return worse > t * statistics.stdev(pairs) / len(pairs) ** 0.5
    return set(filter(is_worse, values))


def table(rows, metrics):  # -> [[heading, ...], [cell, ...], ...], without empty columns; the last one lists the seeds
    columns = [["", *rows]]
    for key, metric in metrics.items():
        values = {name: values_by_seed(seeds, key) for name, seeds in rows.items()}
        worse = find_worse(values, metric.more_is_better)
        cells = []
        for name, by_seed in values.items():
            mean = f"{statistics.fmean(by_seed.values()):.{metric.digits}f}" if by_seed else ""
            error = f" ± {statistics.stdev(by_seed.values()):.{metric.digits}f}" if len(by_seed) > 1 else ""
            bound = "<= " if mean and key == "bits" and is_bound(rows[name]) else ""
            cells.append(bound + mean + error + "*" * (name in worse and not bound))
        if any(cells):
            columns.append([str(metric), *cells])
    columns.append(["seeds"])
    for seeds in rows.values():
        columns[-1].append(" ".join(f"{seed}" if metrics else f"{seed} diverged" for seed, metrics in seeds.items()))
    return [*zip(*columns)]


def first_table(rows):
    names = [f"{name} (left side)" if sees_left_only(seeds) else name for name, seeds in rows.items()]
    return table(dict(zip(names, rows.values())), SUMMARY)


def explain(metrics, headings):  # {metric: Metric}, headings of a table -> a line for each kind of column
    kinds = {}                                  # {meaning: {heading: None}}
    for metric in metrics.values():
        if str(metric) in headings and metric.meaning:
            kinds.setdefault(metric.meaning, {})[metric.heading.partition(":")[0]] = None
    return "".join(f"- {', '.join(names)}: {meaning}\n" for meaning, names in kinds.items())


def tables(rows, references):  # -> Markdown: the first table, then the rest, with more rows for reference
    first = first_table(rows)
    rest = table(rows | references, REST)
    tasks = {}                                  # {heading: {name: None}}
    for name, seeds in rows.items():
        for heading in values_by_seed(seeds, "task_heading").values():
            tasks.setdefault(heading, {})[name] = None
    of_tasks = "".join(f"- own task of {', '.join(names)}: {heading}\n" for heading, names in tasks.items())
    note = ("With one seed, differences of less than 0.05 bits from left to right and 0.1 bits in holes mean nothing "
            "(\"Errors\" in docs/RESULTS.md). Try --seeds 1,2,3\n")
    if max(map(len, rows.values())) > 1:
        note = ("Means over seeds ± their standard deviation. *: worse than the best of the column (95%, Student's t, "
                "differences paired by seed). Two seeds show large differences alone; try five.\n")
    return "\n".join(["Bits per byte of held-out text, less is better. For the own task see below.\n", markdown(first),
                      explain(SUMMARY, first[0]) + of_tasks, note, "The rest:\n", markdown(rest),
                      explain(REST, rest[0])])


def differing_settings(cells):  # -> Markdown: the settings that the rows do not share, or ""
    flags = [flag for flag in flag_specs() if flag not in RESERVED | {"device", "eval_interval"}]
    read = {}                                   # {row: {flag: value}}
    for cell in cells:
        known = SHARED_FLAGS | own_flags(cell.hp.objective)
        read[cell.row] = {flag: getattr(cell.hp, flag) for flag in flags if flag in known}
    differing = [flag for flag in flags if len({settings.get(flag) for settings in read.values()}) > 1]
    text = "\nSettings that differ:\n\n"
    for row, settings in read.items():
        words = [f"{flag} {settings[flag]}" for flag in differing if flag in settings]
        text += f"- {row}: {', '.join(words) or 'none of these'}\n"
    return text if differing else ""


# ---- curves over the budgets: {budget: {row: {seed: metrics}}}
Panel = namedtuple("Panel", "metric xlabel lines dashed")        # lines {row: {x: value}}; dashed: rows


def lines_over(budgets, metric):  # {x: {row: {seed: metrics}}} -> {row: {x: mean over the seeds}}
    lines = {}
    for x, rows in sorted(budgets.items()):
        for name, seeds in rows.items():
            values = values_by_seed(seeds, metric).values()
            if values:
                lines.setdefault(name, {})[x] = statistics.fmean(values)
    return lines


def write_curves(budgets, path, first_column):
    """Writes the numbers behind the tables and the picture, one a line. A run that diverged has none."""
    with open(path, "w", encoding="utf-8", newline="") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow([first_column, "steps", "seed", "metric", "value"])
        for steps, rows in sorted(budgets.items()):
            for name, seed, metrics in [(name, *run) for name, seeds in rows.items() for run in seeds.items()]:
                for metric in ["task", *METRICS]:
                    if isinstance(metrics.get(metric), (int, float)):
                        writer.writerow([name, steps, seed, metric, f"{metrics[metric]:.6g}"])


def panels_of_runs(rows):  # -> [Panel]: bits over the length of a hole, losses over the steps
    losses = {}                                 # {step: {row: {seed: metrics}}}, without step 0
    for name, seed, metrics in [(name, *run) for name, seeds in rows.items() for run in seeds.items()]:
        for step, loss in metrics.get("curve", [])[1:]:
            losses.setdefault(step, {}).setdefault(name, {})[seed] = {"loss": loss}
    metric = Metric("validation loss, each in its own task", 3, "nats", False)
    return [holes_panel(rows), Panel(metric, "steps", lines_over(losses, "loss"), ())]


def holes_panel(rows):
    bits = {}                                   # {row: {length: mean over the seeds}}
    for m in HOLE_LENGTHS:
        for name, line in lines_over({m: rows}, f"hole_{m}").items():
            bits.setdefault(name, {}).update(line)
    left_only = {name for name, seeds in rows.items() if sees_left_only(seeds)}
    return Panel(Metric("holes; dashed: from the left side only", 2, BITS, False), "bytes of the hole", bits, left_only)


def draw_panels(panels, path, size=(4.7, 3.6), dpi=80, font=8):  # -> path, or the reason why there is no picture
    try:
        from matplotlib import colormaps, rc_context  # imported here because it is optional
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: pip install matplotlib, and the next run draws it"
    panels = [panel for panel in panels if max(map(len, panel.lines.values()), default=0) > 1]  # not of single dots
    if not panels:
        return "no picture: a line needs two points"
    names = dict.fromkeys(name for panel in panels for name in panel.lines)
    palette = [*colormaps["tab10"].colors, *colormaps["Dark2"].colors]
    colors = dict(zip(names, itertools.cycle(palette)))
    n_columns = min(3, len(panels))
    n_rows = math.ceil(len(panels) / 3)
    with rc_context({"font.size": font, "axes.titlesize": "medium"}):
        figure = Figure((size[0] * n_columns, size[1] * n_rows))
        axes = [*figure.subplots(n_rows, n_columns, squeeze=False).flat]
        for axis in axes[len(panels):]:
            axis.axis("off")
        for panel, axis in zip(panels, axes):
            ends = draw_lines(axis, panel, colors, font)
            ticks = []
            for x in sorted({x for line in panel.lines.values() for x in line}):
                if not ticks or x >= 1.25 * ticks[-1]:
                    ticks.append(x)
            axis.set_xscale("log")
            axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            name_lines(axis, ends, colors)
        figure.tight_layout()
        figure.savefig(path, dpi=dpi)
    return path


def draw_lines(axis, panel, colors, font):  # -> {row: the last point (x, value) of its line}
    """Where less is better, values above twice the median are not drawn: they would flatten the other lines. The title
    names the rows that are left out completely."""
    metric = panel.metric
    highest = math.inf
    if not metric.more_is_better:
        highest = 2 * statistics.median(value for line in panel.lines.values() for value in line.values())
    ends = {}
    for name, line in panel.lines.items():
        points = [(x, value) for x, value in line.items() if value <= highest]
        if points:
            style = "--" if name in panel.dashed else "-"
            axis.plot(*zip(*points), style, color=colors[name], marker="o", ms=3 * font / 8, lw=font / 8)
            ends[name] = points[-1]
    better = "more" if metric.more_is_better else "less"
    left_out = "".join(f", without {name}" for name, line in panel.lines.items() if line and name not in ends)
    title = f"{metric.heading} ({better} is better{left_out})"
    axis.set(title=title, xlabel=panel.xlabel, ylabel=metric.unit)
    return ends


def name_lines(axis, ends, colors):  # writes the name of each row at the end of its line
    low, high = axis.get_ylim()
    names = sorted(ends, key=lambda name: ends[name][1])
    heights = [ends[name][1] for name in names]
    for i in [*range(len(names) - 1)] * 100:    # moves neighbours apart, so that names do not overlap
        overlap = 0.06 * (high - low) - (heights[i + 1] - heights[i])
        if overlap > 0:
            heights[i] -= overlap / 2
            heights[i + 1] += overlap / 2
    for name, height in zip(names, heights):
        arrow = dict(arrowstyle="-", lw=0.4, color=colors[name])
        axis.annotate(name, ends[name], (1.04, height), textcoords=("axes fraction", "data"), va="center",
                      color=colors[name], arrowprops=arrow)


# ---- the program
def make_estimator(n_runs, n_steps):  # -> on_record of train.main; prints once how long these runs will take
    out = sys.stdout                            # where train prints to is a file
    first = []                                  # records

    def on_record(record):
        if record.get("split") != "train" or len(first) == 2:
            return
        seconds = record["seconds"] - first[0]["seconds"] if first else 0.0         # without the first step
        if not first or seconds >= ESTIMATE_SECONDS:
            first.append(record)
        if len(first) == 2:
            minutes = n_steps * seconds / (record["step"] - first[0]["step"]) / 60
            tqdm.write(f"{n_runs} runs, about {minutes:.0f} min, and the time to measure them", file=out)
            out.flush()
    return on_record


def main(argv=None):  # -> exit code
    """Trains what is not finished, measures it, writes the tables. Ctrl-C saves the run in progress. All refusals come
    before the first training."""
    flags, rest = parse_with_train_flags("python -m experiments.compare", __doc__, FLAGS, RESERVED, argv)
    setting = flags.sweep.partition("=")[0]
    cells = plan_cells(flags, rest)
    corpora = [flags.data, flags.new_data] if setting == "replay" else [flags.data]
    sources = open_corpus(corpora)
    crcs = [source["crc"] for source in sources]
    for cell in cells:
        check_sizes(sources, max(m.n for m in get_members(cell.hp)), cell.hp.block_size)
    for corpus in corpora:                      # otherwise the runs would be read as text
        if os.path.isdir(corpus) and Path(flags.out_dir).resolve().is_relative_to(Path(corpus).resolve()):
            fail(f"--out_dir {flags.out_dir}: lies inside the corpus {corpus}. Try a folder outside it")
    code = read_code()
    runs_of = [list_runs(cell, crcs, flags.out_dir) for cell in cells]
    for runs in runs_of:
        check_runs(runs, code, flags)
    # {folder: run} of the runs that this call will train
    to_train = {run.folder: run for runs in runs_of if not read_figures(runs[-1], flags) for run in runs
                if not is_finished(run)}
    on_record = make_estimator(len(to_train), sum(run.hp.max_iters for run in to_train.values()))
    os.makedirs(flags.out_dir, exist_ok=True)
    probes = {}
    if flags.data == "stdlib" and not flags.tasks_only:
        probes = {"probe": evaluate.byte_probe(256), "passages": evaluate.package_probe(256)}
    results = {}                                # {table: {budget: {row: {seed: metrics}}}}
    n_finished = 0
    steps = 0                                   # of the runs that this call has trained
    seconds = 0.0                               # that it took to train and measure them
    for i, (cell, runs) in enumerate(zip(cells, runs_of)):
        hp = cell.hp
        label = f"[{i + 1}/{len(cells)}] {cell.row}, {hp.max_iters} steps, seed {hp.seed}"
        start = time.perf_counter()
        metrics = run_cell(cell, runs, flags, sources, probes, code, label, on_record)
        rows = results.setdefault(cell.table, {}).setdefault(hp.max_iters, {})
        rows.setdefault(cell.row, {})[hp.seed] = metrics
        n_finished += bool(metrics)
        outcome = f"loss {metrics['loss']:.4f} nats of its own task" if metrics else "diverged"
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
        settings = "" if setting else differing_settings(cells)
        hp = cells[0].hp
        settings += f"\nCorpus: {flags.data}. Model: {hp.n_layer} layers of width {hp.n_embd}. Steps: {max(budgets)}.\n"
        write_report(os.path.join(flags.out_dir, table), budgets, setting, references, settings, flags.latex)
    return 0 if n_finished else 1


def write_report(path, budgets, setting, references, settings="", with_latex=False):  # path: without the suffix
    rows = budgets[max(budgets)]
    text = tables(rows, references)
    for steps in sorted(budgets)[:-1]:
        both = first_table(budgets[steps]), table(budgets[steps], REST)
        text += f"\nAfter {steps} steps:\n\n" + "\n".join(map(markdown, both))
    files = {path + ".md": text + settings} | ({path + ".tex": latex(first_table(rows))} if with_latex else {})
    for file, content in files.items():
        with open(file, "w", encoding="utf-8") as f:
            f.write(content)
    curves = path + ".csv" if setting else os.path.join(os.path.dirname(path), "curves.csv")
    write_curves(budgets, curves, setting or "objective")
    points = over_values(budgets, setting)
    if points is budgets and len(budgets) == 1:
        picture = draw_panels(panels_of_runs(rows), path + ".png", (5.5, 4.2), 110, 9)
    else:
        xlabel = "steps" if points is budgets else setting
        panels = [Panel(metric, xlabel, lines_over(points, key), ()) for key, metric in RANKED.items()]
        picture = draw_panels(panels, path + ".png")
    print(f"\nwritten: {', '.join(files)}, {curves}, {picture}\n\n{text}{settings}")


def over_values(budgets, setting):  # -> {value: {setting: {seed: metrics}}}, or budgets itself
    """With one budget, the horizontal axis of a sweep over numbers is the setting instead of the number of steps."""
    rows = budgets[max(budgets)]
    try:
        values = {float(name.partition("=")[2]): {setting: seeds} for name, seeds in rows.items()}
    except ValueError:                          # not numbers
        return budgets
    if len(budgets) > 1 or len(values) < len(rows) or min(values) <= 0:             # the axis is logarithmic
        return budgets
    return values


if __name__ == "__main__":
    run_program(main)
