"""Train every objective for equally many steps and run the same evaluations, those of evaluate.py, on all of them.

    python -m experiments.compare                       all objectives, one seed: one to five hours on a laptop CPU
    python -m experiments.compare --budgets 100         minutes: too short to conclude anything
    python -m experiments.compare --budgets 500,1000,2000,4000,8000 --objectives clm,mlm --seeds 1,2,3
    python -m experiments.compare --sweep mask_rate=.1,.15,.3,.4 --objectives mlm --seeds 1,2,3
    python -m experiments.compare --sweep bart_noise=mask,infill+permute    a + inside a value stands for a comma
    python -m experiments.compare --sweep replay=scratch,0,.05      continual pre-training on C++ headers after Python;
                                                                    scratch: on C++ headers alone
    python -m experiments.compare --sweep start=none,clm,mlm --first_steps 8000     what another objective's weights are
                                                                                    worth as a start

Every objective has its own defaults: rotation, bart and contrastive other batches, bart no n-grams, some another
--attn_scale or --mask_rate. Each cell of a table is a run of train.py, in a folder named after its settings and its
text: a finished run is not trained again, an interrupted one is resumed, other settings make another run. Its metrics
are kept in its folder, in measured.json; delete that file to measure again. Tables show the largest budget; the last
table, curves.csv and the picture show all. Infilling, replaced bytes and drafts are measured in rows of at least 128
positions; in shorter rows than the default, as bart's, the texts around holes and the noisy texts are shorter, too.
Flags that are not listed below are train.py's, such as --n_layer 6.
"""
import contextlib
import csv
import functools
import itertools
import json
import os
import statistics
import sys
import time
import zlib
from argparse import Namespace
from dataclasses import dataclass

# isort: off  data silences a warning of torch's, and so comes before it
from data import Flag, check_sizes, error_reason, fail, open_corpus
from experiments import bench, evaluate
from experiments.flags import parse_with_train_flags
import train
from objectives import OBJECTIVES, get_objective
from run import SETTINGS, VERSION, build, flag_specs, get_config, load_checkpoint, load_run
from run import preserve_torch_state, run_program
import torch
from tqdm import tqdm

FLAGS = {
    "objectives": Flag("", "separated by commas; without it all, or the first that has the setting of --sweep"),
    "seeds": Flag("1", "separated by commas; all runs of one seed start from equal weights and read the same places"),
    "budgets": Flag("1000", "numbers of steps, separated by commas; each is a separate run with its own schedule"),
    "data": Flag("stdlib", "corpus; the probe runs on stdlib only, since its labels come from Python source"),
    "new_data": Flag("", "second corpus, for --sweep replay; without it the C++ headers that come with torch"),
    "sweep": Flag("", "a setting and its values, as in mask_rate=.1,.15,.3"),
    "first_steps": Flag(0, "for --sweep start: steps of the runs to start from; 0: as many again", 0, 1 << 40),
    "out_dir": Flag("out/compare", "folder of tables, pictures and runs"),
}
# flags of train.py that are set here
RESERVED = {"objective", "seed", "data", "out_dir", "resume", "max_iters", "max_passes", "eval_interval", "init_from"}
EVAL_VERSION = 6                                # raise it when an evaluation changes: finished runs are measured again
CPP_HEADERS = os.path.join(torch.__path__[0], "include")
MIN_HELD_OUT = 4096                                 # held-out bytes that the evaluations need


@dataclass(frozen=True)
class Metric:
    heading: str
    digits: int
    more_is_better: bool | None = None          # None: neither


METRICS = {                                     # columns of the first table, in order
    "loss": Metric("own loss", 3),
    "left_to_right": Metric("left to right", 3, False),
    "bound": Metric("bound", 3, False),
    "old_before": Metric("old corpus before", 3),
    "old": Metric("old corpus after", 3, False),
    "new": Metric("new corpus", 3, False),
    **{f"left_{m}": Metric(f"left {m}", 2, False) for m in evaluate.HOLE_LENGTHS},
    **{f"infill_{m}": Metric(f"infill {m}", 2, False) for m in evaluate.HOLE_LENGTHS},
    **{f"infill_{m}_as_{n}": Metric(f"infill {m}, asked as {n}", 2, False) for m, n in evaluate.OTHER_MODE.items()},
    "probe": Metric("probe of byte classes", 3, True),
    "passages": Metric("probe of packages", 3, True),
    "replaced_auc": Metric("replaced bytes, AUC", 3, True),
    "bytes_per_pass": Metric("bytes per pass", 2),
    "targets_per_row": Metric("targets per row", 1),
    "tflop": Metric("TFLOP", 2),
    "seconds": Metric("seconds", 0),
}
# columns of the second table: the metrics of a run's task
TASK_HEADINGS = {"task": "model", "task_baseline": "baseline", "ends": "ends by itself",
                 "held_out": "held-out text", "distinct": "distinct lines",
                 "held_out_distinct": "of held-out text"}
# drawn dashed in the panel of the other metric
DASHED = {"bound": "left_to_right", **{f"left_{m}": f"infill_{m}" for m in evaluate.HOLE_LENGTHS}}


# ---- cells: which runs there are

@dataclass
class Cell:
    """A run to train and to measure."""
    table: str                                  # name of the table, the picture and the curves that it appears in
    row: str
    hp: Namespace
    argv: list                                  # train.py's flags
    first_argv: list | None = None              # those of the run from whose weights it starts


def plan_cells(flags, rest):  # -> [Cell]
    """Fails on a flag or a setting that train.py would refuse, before anything runs."""
    setting, _, values = flags.sweep.partition("=")
    values = values.split(",") if setting else [""]
    owners = objectives_with(setting)
    names = flags.objectives.split(",") if flags.objectives else (owners[:1] or list(OBJECTIVES))
    check_sweep(flags, rest, setting, values, owners)
    check_objectives(names, setting, owners)
    budgets = parse_ints("budgets", flags.budgets, 1, flag_specs()["max_iters"].high, "500,1000")
    seeds = parse_ints("seeds", flags.seeds, 0, flag_specs()["seed"].high, "1,2,3")
    grid = dict.fromkeys(itertools.product(budgets, seeds, names, values))          # each once
    cells = []
    for steps, seed, name, value in grid:
        shared = ["--seed", seed, *rest]
        argv = [*shared, *cell_flags(name, steps), "--data", flags.data]
        first_argv = None
        if setting == "replay":                 # the same steps again, on the new corpus
            if value != "scratch":
                first_argv = argv
            argv = [*shared, *cell_flags(name, steps), "--data", *replay_sources(flags, value)]
        elif setting == "start":
            if value != "none":
                first_steps = str(flags.first_steps or steps)
                first_argv = [*shared, *cell_flags(value, first_steps), "--data", flags.data]
                get_config(first_argv)          # fails now on flags that this objective does not have
        elif setting:
            is_text = isinstance(flag_specs()[setting].default, str)                # 1e+1 is a number
            argv += [f"--{setting}", value.replace("+", ",") if is_text else value]
        table = f"sweep-{setting}-{name}" if setting else "compare"
        cells.append(Cell(table, value or name, get_config(argv), argv, first_argv))
    return cells


def objectives_with(setting):  # -> names of the objectives that have the setting; [] if it is one that all share
    if setting == "replay":                     # forgetting is measured in bits per byte
        return [name for name, objective in OBJECTIVES.items() if objective.bpb in ("loss", "causal")]
    return [name for name, objective in OBJECTIVES.items() if setting in objective.flags]


def check_sweep(flags, rest, setting, values, owners):  # fails on a sweep that train.py's flags do not allow
    if setting and any(word.partition("=")[0] in (f"--{setting}", f"--no-{setting}") for word in rest):
        fail(f"--{setting}: is what --sweep sets. Try without it")
    if flags.first_steps and setting != "start":
        fail("--first_steps: is for --sweep start. Try without it")
    takes_value = {name for name, flag in flag_specs().items() if not isinstance(flag.default, bool)}
    # the device is no part of a run's name
    known = owners or setting == "start" or setting in takes_value - RESERVED - {"device"}
    if flags.sweep and not (all(values) and known):
        fail(f"--sweep {flags.sweep}: wants a setting of train.py's, replay or start, and values, as in "
             "mask_rate=.1,.15,.3")
    for name in values if setting == "start" else []:
        if name != "none" and name not in OBJECTIVES:
            fail(f"--sweep start={name}: unknown. Try none, or some of {','.join(OBJECTIVES)}")


def check_objectives(names, setting, owners):  # fails on an objective that does not exist, or lacks the setting
    for name in names:
        if name not in OBJECTIVES:
            fail(f"--objectives {name}: unknown. Try some of {','.join(OBJECTIVES)}")
        if owners and name not in owners and setting == "replay":
            fail(f"--objectives {name}: forgetting is measured in bits per byte. Try {','.join(owners)}")
        if owners and name not in owners:
            fail(f"--sweep {setting}: is no setting of {name}. Try --objectives {','.join(owners)}")


def cell_flags(objective, steps):
    return ["--objective", objective, "--max_iters", steps, "--eval_interval", steps]


def parse_ints(flag, text, low, high, example):  # "1,2" -> ["1", "2"]
    words = text.split(",")
    for word in words:
        if not (word.isascii() and word.isdigit() and low <= int(word) <= high):
            fail(f"--{flag} {text}: wants whole numbers from {low} to {high}, separated by commas. "
                 f"Try --{flag} {example}")
    return [str(int(word)) for word in words]


def replay_sources(flags, value):  # -> what --data takes: the new corpus, and a share of the old one
    new = flags.new_data or CPP_HEADERS
    share = 0.0 if value == "scratch" else replay_share(value)
    return [f"{new}:{1 - share:g}", f"{flags.data}:{share:g}"] if share else [f"{new}:1"]


def replay_share(value):
    with contextlib.suppress(ValueError):
        if 0 <= float(value) < 1:
            return float(value)
    fail(f"--sweep replay={value}: wants shares from 0 to below 1, or scratch. Try replay=scratch,0,.05,.25")


# ---- a cell: train, measure

@dataclass
class EvalData:
    """What all cells are evaluated on."""
    sources: list                               # the corpora
    text: torch.Tensor                          # (M,) held-out bytes of the first one
    probe: evaluate.ProbeData | None            # of Python's standard library alone, as the next
    passages: evaluate.PassageData | None


def train_cell(argv, crcs, out_dir):  # -> folder of the finished run of these flags, None where it diverged
    """Leaves a finished run as it is and resumes an interrupted one."""
    folder = os.path.join(out_dir, "runs", run_name(get_config(argv), crcs))
    max_iters = get_config(argv).max_iters
    begun = any(os.path.exists(os.path.join(folder, file)) for file in ("ckpt.pt", "best.pt"))
    step = load_checkpoint(folder)["step"] if begun else 0
    if begun and step == max_iters:
        return folder
    if step > max_iters:
        fail(f"{folder}: is a run of {max_iters} steps, but was trained up to step {step}. Try moving it elsewhere")
    if begun:
        argv = [*argv, "--resume"]
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "log.txt"), "a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        code = train.main([*argv, "--out_dir", folder], with_sample=False)
    if code > 1:                                # a signal
        print(f"stopped, saved in {folder}. The same command resumes it")
        sys.exit(code)
    return None if code else folder


def run_name(hp, crcs):  # settings, checksums of the corpora -> name of the run's folder
    """The settings that its objective reads: another default makes another run, another objective's does not."""
    read = {flag for group in SETTINGS.values() for flag in group} | set(get_objective(hp).flags)
    read -= {"device"}                          # a run may be resumed on another device, but not in another dtype
    settings = {flag: value for flag, value in vars(hp).items() if flag in read}
    tag = zlib.crc32(json.dumps([VERSION, crcs, settings], sort_keys=True).encode())
    return f"{hp.objective}-{hp.max_iters}-seed{hp.seed}-{tag:08x}"


def run_cell(cell, out_dir, data):  # -> {metric: number}, {} where the run diverged
    crcs = [source["crc"] for source in data.sources]
    argv = cell.argv
    first = None
    if cell.first_argv:
        first = train_cell(cell.first_argv, crcs[:1], out_dir)
        if not first:
            return {}
        argv = [*argv, "--init_from", first]
        for name in ("block_size", "batch_size", "attn_scale"):                     # else the first run's count
            argv += [f"--{name}", str(getattr(cell.hp, name))]
    folder = train_cell(argv, crcs, out_dir)
    if not folder:
        return {}
    path = os.path.join(folder, "measured.json")
    saved = {}
    if os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            saved = json.load(f)
    if saved.get("eval_version") == EVAL_VERSION:
        return saved["metrics"]
    metrics = logged_metrics(folder) | measure(folder, data)
    if len(data.sources) == 2:                  # continual pre-training: all in the same windows
        old, new = validation_bits(folder, data.sources)
        metrics |= {"left_to_right": None, "old": old, "new": new}
        if first:
            metrics["old_before"] = validation_bits(first, data.sources)[0]
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        json.dump({"eval_version": EVAL_VERSION, "metrics": metrics}, f)
    os.replace(path + ".tmp", path)
    return metrics


@torch.no_grad()
def measure(folder, data):  # -> {metric: number}; on the CPU, wherever the run was trained
    """A bar on a terminal, elsewhere a line for each evaluation: together they take minutes."""
    model, hp, _ = load_run(os.path.join(folder, "ckpt.pt"), "cpu", "float32")
    bar = tqdm(list_evaluations(hp, data), disable=None, leave=False, unit="evaluation", dynamic_ncols=True)
    metrics = {}
    for name, evaluate_one in bar:
        bar.set_description(f"measuring {name}")
        begin = time.perf_counter()
        metrics |= evaluate_one(model)
        if bar.disable:
            print(f"measured {name} in {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    return metrics


def list_evaluations(hp, data):  # -> [(name, function: model -> {metric: number})] of a run
    """A function returns nothing for what an objective does not define."""
    objective = get_objective(hp)
    text = data.text
    out = []
    if hp.block_size >= evaluate.MIN_BLOCK:
        out.append(("infilling", lambda model: evaluate.eval_infilling(model, objective, hp, text)))
        out.append(("replaced bytes", lambda model: evaluate.eval_corruption(model, objective, hp, text)))
        out.append(("drafts", lambda model: evaluate.eval_drafts(model, objective, hp, text)))
    if objective.uses:
        task = evaluate.TASKS[type(objective.uses[0])]
        out.append(("task", lambda model: measure_task(task, model, objective, hp, text)))
    if data.probe and 256 % min(hp.block_size, 256) == 0:
        def probe(model):
            features = functools.partial(evaluate.layer_states, model, objective, hp)
            return evaluate.eval_probe(features, data.probe) | evaluate.eval_passages(features, data.passages)
        out.append(("probe", probe))
    return out


def measure_task(task, model, objective, hp, text):  # -> the metrics of TASK_HEADINGS, and the task in words
    figures = task.evaluate(model, objective, hp, text)
    if not figures:
        return {}
    score = figures.pop("score")
    baseline = figures.pop("baseline")
    return figures | {"task": score, "task_baseline": baseline, "task_heading": task.heading}


def logged_metrics(folder):  # -> {metric: number} that metrics.jsonl and the settings hold
    with open(os.path.join(folder, "metrics.jsonl"), "rb") as f:
        records = [r for r in map(json.loads, f) if r.get("split") == "val"]
    last = next(r for r in records if r["step"] == records[-1]["step"])             # of the first source
    hp = Namespace(**load_checkpoint(folder)["config"] | {"dtype": "float32"})
    bits = "bound" if get_objective(hp).bpb == "bound" else "left_to_right"
    return {"loss": last["loss"], bits: last["bpb"], "targets_per_row": last["targets"] * hp.block_size,
            "seconds": last["seconds"], "tflop": bench.count_flops(hp) * hp.accum * last["step"] / 1e12}


def validation_bits(folder, sources):  # -> [bits per byte of each source]
    model, hp, _ = load_run(os.path.join(folder, "ckpt.pt"), "cpu", "float32")
    validation = train.validation_list(get_objective(hp), sources, hp)
    return [record["bpb"] for record in train.evaluate(model, validation, hp)]


# ---- tables

def by_seed(seeds, metric):  # {seed: metrics} -> {seed: number}
    return {seed: metrics[metric] for seed, metrics in seeds.items() if metrics.get(metric) is not None}


def mean_and_error(values, digits, error, sign=""):  # -> "mean ± error", the mean alone of a single value
    if not values:
        return ""
    mean = f"{statistics.fmean(values):{sign}.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {error(values):.{digits}f}"


def markdown(rows):  # [[cell of the head, ...], [cell, ...], ...] -> str
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return "\n".join(lines) + "\n"


def metric_table(rows, describe):  # {row: {seed: metrics}}, (seeds, metric) -> str -> Markdown without empty columns
    columns = [metric for metric in METRICS if any(describe(seeds, metric) for seeds in rows.values())]
    if not columns:
        return ""
    out = [["", *(METRICS[metric].heading for metric in columns), "seeds"]]
    for name, seeds in rows.items():
        ran = [str(seed) if metrics else f"{seed} diverged" for seed, metrics in seeds.items()]
        out.append([name, *(describe(seeds, metric) for metric in columns), " ".join(ran)])
    return markdown(out)


def task_table(rows):  # {row: {seed: metrics}} -> Markdown without empty columns
    headings, figures = {}, {}
    for name, seeds in rows.items():
        for metrics in seeds.values():
            if "task_heading" in metrics:
                headings[name] = metrics["task_heading"]
                figures[name] = [mean_and_error([*by_seed(seeds, column).values()], 3, statistics.stdev)
                                 for column in TASK_HEADINGS]
    if not headings:
        return ""
    filled = [any(column) for column in zip(*figures.values())]
    out = [["", "its task (baseline)", *itertools.compress(TASK_HEADINGS.values(), filled)]]
    for name, heading in headings.items():
        out.append([name, heading, *itertools.compress(figures[name], filled)])
    return markdown(out)


def standard_error(values):
    return statistics.stdev(values) / len(values) ** 0.5


STUDENT_T_975 = 12.7, 4.3, 3.2, 2.8, 2.6, 2.4, 2.4, 2.3, 2.3             # Student's t for 2, 3, ... seeds


def tables(rows):  # {row: {seed: metrics}} -> Markdown: what was learned, the tasks, differences from the first row
    first, *others = rows

    def spread(seeds, metric):
        return mean_and_error([*by_seed(seeds, metric).values()], METRICS[metric].digits, statistics.stdev)

    def difference(seeds, metric):
        base = by_seed(rows[first], metric)
        pairs = [value - base[seed] for seed, value in by_seed(seeds, metric).items() if seed in base]
        if len(pairs) < 2 or METRICS[metric].more_is_better is None:
            return ""
        return mean_and_error(pairs, 3, standard_error, "+")

    parts = ["Bits per byte where nothing else is said; mean over seeds ± their standard deviation.\n",
             metric_table(rows, spread), task_table(rows)]
    paired = {}
    for name in others:
        both = {seed: metrics for seed, metrics in rows[name].items() if metrics and rows[first].get(seed)}
        if len(both) > 1:
            paired[name] = both
    if paired:
        n = min(map(len, paired.values()))
        clear = STUDENT_T_975[min(n, len(STUDENT_T_975) + 1) - 2]
        parts += [f"Difference from {first}, paired by seed, on the same held-out text: mean ± standard error over the "
                  f"runs; the error over texts comes on top. With {n} seeds a single difference, chosen beforehand, is "
                  f"significant (95%) from {clear} standard errors on; of 20 such differences one is so by chance.\n",
                  metric_table(paired, difference)]
    return "\n".join(part for part in parts if part)


# ---- curves over the budgets: {budget: {row: {seed: metrics}}}

def row_names(budgets):
    return [*dict.fromkeys(name for rows in budgets.values() for name in rows)]


def mean_by_budget(budgets, name, metric):  # -> {budget: mean over the seeds}, of the budgets that have one
    means = {}
    for steps, rows in sorted(budgets.items()):
        values = by_seed(rows.get(name, {}), metric).values()
        if values:
            means[steps] = statistics.fmean(values)
    return means


def budget_table(budgets):  # -> Markdown: a value at every budget; "" where there is but one
    names = row_names(budgets)
    steps = sorted(budgets)
    columns = [["", *names]]
    for key, metric in (METRICS | {"task": Metric("its task, as above", 3, True)}).items():
        means = [mean_by_budget(budgets, name, key) for name in names]
        if metric.more_is_better is None or not any(means):
            continue
        column = [metric.heading]
        for found in means:
            words = [f"{found[n]:.{metric.digits}f}" if n in found else "-" for n in steps]
            column.append(" ".join(words) if found else "")
        columns.append(column)
    if len(steps) < 2 or len(columns) < 2:
        return ""
    head = f"After {' '.join(map(str, steps))} steps, means over the seeds that finished:\n\n"
    return head + markdown([*zip(*columns)])


def write_curves(budgets, path, first_column):
    """The numbers behind the tables and the picture, a line for each. A run that diverged has none."""
    with open(path, "w", encoding="utf-8", newline="") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow([first_column, "steps", "seed", "metric", "value"])
        for name in row_names(budgets):
            for steps, rows in sorted(budgets.items()):
                for seed, metrics in rows.get(name, {}).items():
                    for metric in [*METRICS, *TASK_HEADINGS]:
                        if metrics.get(metric) is not None:
                            writer.writerow([name, steps, seed, metric, f"{metrics[metric]:.6g}"])


def draw_picture(budgets, path):  # -> path, or why there is none
    """A panel for each metric that has a better side, over the budget; a line for each row, dashed for what shares its
    panel with another metric. More than 8 bits per byte, which is worse than no model, would hide the rest: not
    drawn."""
    try:
        import matplotlib  # here: it is optional
    except ImportError:
        return "no picture: pip install matplotlib, and the next run draws it"
    matplotlib.use("Agg")
    from matplotlib import pyplot
    names = row_names(budgets)
    looks = line_styles(len(names), matplotlib.colormaps["tab20"].colors)
    panels = {}                                 # {metric: [(metric drawn, look, means)]}
    for key, metric in METRICS.items():
        if metric.more_is_better is None:
            continue
        for name, look in zip(names, looks):
            means = {steps: mean for steps, mean in mean_by_budget(budgets, name, key).items() if mean < 8}
            if means:
                panels.setdefault(DASHED.get(key, key), []).append((key, look, means))
    if not panels:
        return "no picture: nothing to draw"
    across = min(4, len(panels) + 1)            # the last panel holds the names
    down = len(panels) // 4 + 1
    figure, axes = pyplot.subplots(down, across, figsize=(4 * across, 3 * down), squeeze=False)
    for (panel, lines), axis in zip(panels.items(), axes.flat):
        for key, look, means in lines:
            axis.plot([*means], [*means.values()], "-" if key == panel else "--", **look)
        better = "more" if METRICS[panel].more_is_better else "less"
        dashed = [METRICS[key].heading for key in dict.fromkeys(key for key, *_ in lines) if key != panel]
        note = f"; dashed: {', '.join(dashed)}" if dashed else ""
        axis.set_title(f"{METRICS[panel].heading} ({better} is better{note})", fontsize=8)
        axis.set_xscale("log")
        axis.set_xticks([*budgets], [*budgets])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    rest = axes.flat[len(panels):]
    for name, look in zip(names, looks):
        rest[0].plot([], [], label=name, **look)
    rest[0].legend(ncols=2, loc="center", frameon=False)
    for axis in rest:
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
    return path


def line_styles(n, colors):  # tab20's 20 colors -> [keyword arguments of plot], all different up to 60 lines
    """The ten dark colors of tab20 first, then the light ones."""
    order = [*colors[::2], *colors[1::2]]
    return [dict(color=order[i % 20], marker="ovs"[i // 20 % 3], ms=4, lw=1) for i in range(n)]


# ---- the program

def check_folders(flags):
    """Fails where results cannot be kept or would be read as text, or where the text can be read only once."""
    if flags.data == "-" or flags.new_data == "-":
        fail("--data -: every run reads the text anew. Try a file")
    if os.path.isfile(flags.out_dir):
        fail(f"--out_dir {flags.out_dir}: is a file. Try another name")
    for folder in (flags.data, flags.new_data):
        if not os.path.isdir(folder):
            continue
        if os.path.commonpath(map(os.path.realpath, (folder, flags.out_dir))) == os.path.realpath(folder):
            fail(f"--out_dir {flags.out_dir}: lies inside the corpus {folder}. Try a folder outside it")


def make_folder(path):  # fails where it cannot be written to
    try:
        os.makedirs(path, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError("not writable")
    except OSError as e:
        fail(f"--out_dir {path}: cannot be written to ({error_reason(e)}). Try another folder")


def open_sources(flags, cells):  # -> the corpora; fails where they are too short for a cell or an evaluation
    names = [flags.data]
    if flags.sweep.startswith("replay="):
        names.append(flags.new_data or CPP_HEADERS)
    sources = open_corpus(names)
    n = len(sources[0]["val"])
    if n < MIN_HELD_OUT:
        fail(f"--data {flags.data}: has {n} bytes to validate on, the evaluations need {MIN_HELD_OUT}. Try more text")
    for cell in cells:
        cut = [source | {"train": source["train"][:cell.hp.train_bytes or None]} for source in sources]
        check_sizes(cut, get_objective(cell.hp).n_bytes(cell.hp.block_size, cell.hp), cell.hp.block_size)
    return sources


@preserve_torch_state()
def main(argv=None):  # -> exit code
    """Trains what is not finished, measures it, writes the tables. Ctrl-C saves the run in progress."""
    argv = sys.argv[1:] if argv is None else argv
    flags, rest = parse_with_train_flags("python -m experiments.compare", __doc__, FLAGS, RESERVED, argv)
    setting = flags.sweep.partition("=")[0]
    cells = plan_cells(flags, rest)
    check_folders(flags)
    sources = open_sources(flags, cells)
    make_folder(flags.out_dir)
    probe = passages = None
    if flags.data == "stdlib":
        probe = evaluate.probe_data(256)
        passages = evaluate.passage_data(256)
    data = EvalData(sources, sources[0]["val"], probe, passages)
    found = {}                                  # {table: {budget: {row: {seed: metrics}}}}
    finished = 0
    for i, cell in enumerate(cells):
        hp = cell.hp
        metrics = run_cell(cell, flags.out_dir, data)
        rows = found.setdefault(cell.table, {}).setdefault(hp.max_iters, {})
        rows.setdefault(cell.row, {})[hp.seed] = metrics
        finished += bool(metrics)
        outcome = f"loss {metrics['loss']:.4f}" if metrics else "diverged"
        print(f"[{i + 1}/{len(cells)}] {cell.row}, {hp.max_iters} steps, seed {hp.seed}: {outcome}", flush=True)
    for table, budgets in found.items():
        references = {} if setting or not data.probe else probe_references(cells[0].hp, data)
        write_report(os.path.join(flags.out_dir, table), budgets, setting, references)
    return 0 if finished else 1


@torch.no_grad()
def probe_references(hp, data):  # -> {row: {"-": metrics}}: both probes without training
    hp = Namespace(**vars(hp) | {"device": "cpu", "dtype": "float32", "block_size": 256})
    features = functools.partial(evaluate.layer_states, build(hp), get_objective(hp), hp)
    untrained = evaluate.eval_probe(features, data.probe) | evaluate.eval_passages(features, data.passages)
    return {"untrained model": {"-": untrained},
            "five raw bytes": {"-": evaluate.eval_probe(evaluate.byte_features, data.probe)},
            "histogram of bytes": {"-": evaluate.eval_passages(evaluate.histogram_features, data.passages)}}


def write_report(path, budgets, setting, references):  # path without its ending
    rows = budgets[max(budgets)] | references
    text = "\n".join(part for part in (tables(rows), budget_table(budgets)) if part)
    with open(path + ".md", "w", encoding="utf-8") as f:
        f.write(text)
    curves = path + ".csv" if setting else os.path.join(os.path.dirname(path), "curves.csv")
    write_curves(budgets, curves, setting or "objective")
    print(f"\n{path}.md, {curves}, {draw_picture(budgets, path + '.png')}\n\n{text}")


if __name__ == "__main__":
    run_program(main)
