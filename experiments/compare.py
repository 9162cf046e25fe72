"""Train every objective for the same number of steps, and evaluate all of them in the same way (evaluate.py).

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
measured_tasks.json); delete that file to measure the run again. The tables show the largest budget. The last table,
curves.csv and the picture show all budgets. If rows have fewer than 128 positions, holes, replaced bytes and some tasks
are not measured.
Flags that are not listed below are train.py's, such as --n_layer 6.
"""
import contextlib
import csv
import functools
import itertools
import json
import math
import os
import statistics
import sys
import zlib
from argparse import Namespace
from dataclasses import dataclass

from data import Flag, check_sizes, fail, open_corpus
from experiments import bench, evaluate
from experiments.flags import parse_with_train_flags
import train
from objectives import OBJECTIVES
from run import SETTINGS, VERSION, build, flag_specs, for_inference, get_config, get_members, load_checkpoint, load_run
from run import parse, run_program
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
    "out_dir": Flag("out/compare", "folder of tables, pictures and runs"),
}
# flags of train.py that this program sets
RESERVED = {"objective", "seed", "data", "out_dir", "resume", "max_iters", "max_passes", "eval_interval", "init_from"}
EVAL_VERSION = 12                               # raise it when an evaluation changes: finished runs are measured again


@dataclass(frozen=True)
class Metric:
    heading: str
    digits: int
    unit: str = ""
    more_is_better: bool | None = None          # None: neither more nor less is better

    def __str__(self):
        return f"{self.heading} ({self.unit})" if self.unit else self.heading


BITS = "bits/byte"
METRICS = {                                     # columns of the first table, in order
    "loss": Metric("own loss", 3, "nats"),
    "left_to_right": Metric("left to right", 3, BITS, False),
    "left_by_filling": Metric("left to right by filling", 2, BITS, False),
    "bound_there": Metric("bound, the same windows", 2, BITS),
    "bound": Metric("bound", 3, BITS, False),
    "old_before": Metric("old corpus before", 3, BITS),
    "old": Metric("old corpus after", 3, BITS, False),
    "new": Metric("new corpus", 3, BITS, False),
    **{f"left_{m}": Metric(f"left {m}", 2, BITS, False) for m in evaluate.HOLE_LENGTHS},
    **{f"infill_{m}": Metric(f"infill {m}", 2, BITS, False) for m in evaluate.HOLE_LENGTHS},
    **{f"ended_{m}": Metric(f"infill {m} and its end", 2, BITS, False) for m in evaluate.HOLE_LENGTHS},
    "probe": Metric("probe of byte classes", 3, "balanced accuracy", True),
    "passages": Metric("probe of packages", 3, "balanced accuracy", True),
    "replaced_auc": Metric("replaced bytes", 3, "AUC", True),
    "typos_first": Metric("typos ranked first", 3, "share", True),
    "typos_corrected": Metric("typos corrected", 3, "share", True),
    "typos_damaged": Metric("right bytes changed", 3, "per 128 bytes", False),
    "replaced_left": Metric("replaced bytes left", 3, "share", False),
    "tflop": Metric("training", 2, "TFLOP"),
    "seconds": Metric("training", 0, "seconds"),
}
TASK_METRICS = {                                # columns of the second table
    "task_heading": Metric("its task (baseline)", 0),
    "task": Metric("model", 3, more_is_better=True),
    "task_baseline": Metric("baseline", 3),
    "ends": Metric("holes that the model ends", 3, "share"),
    "distinct": Metric("distinct lines", 3, "share"),
}
RANKED = {key: metric for key, metric in METRICS.items() if metric.more_is_better is not None}
STUDENT_T_975 = 12.7, 4.3, 3.2, 2.8, 2.6, 2.4, 2.4, 2.3, 2.3             # for 2, 3, ... seeds


# ---- cells: which runs there are
@dataclass
class Cell:
    """A run to train and to measure."""
    table: str                                  # file name of the table and the picture in which it appears
    row: str                                    # the objective, or in a sweep "mask_rate=.3"
    hp: Namespace
    argv: list                                  # flags of train.py
    first_argv: list | None = None              # flags of the run from whose weights this one starts


def plan_cells(flags, rest):  # -> [Cell]
    """Fails before anything runs if train.py would refuse the flags of a run."""
    setting, _, values = flags.sweep.partition("=")
    known = setting in {"replay", "start", *flag_specs()} - RESERVED - {"device"}   # runs are not named by device
    if flags.sweep and not (known and all(values.split(","))):
        fail(f"--sweep {flags.sweep}: is not a setting of train.py, replay or start with its values. Try "
             "mask_rate=.1,.15,.3")
    names = choose_objectives(flags.objectives, setting)
    cells = []
    grid = itertools.product(flags.budgets.split(","), flags.seeds.split(","), names, values.split(","))
    for steps, seed, name, value in grid:
        shared = ["--seed", seed, *rest]
        own = ["--objective", name, "--max_iters", steps, "--eval_interval", steps]
        argv = [*shared, *own, "--data", flags.data]
        first_argv = None
        if setting == "replay":                 # the same number of steps on each of the two corpora
            if value != "scratch":
                first_argv = argv
            argv = [*shared, *own, "--data", *replay_sources(flags, value)]
        elif setting == "start" and value != "none":
            first_steps = str(flags.first_steps or steps)
            first_argv = [*shared, "--objective", value, "--max_iters", first_steps, "--eval_interval", first_steps,
                          "--data", flags.data]
            get_members(get_config(first_argv))                 # fails if this objective does not have these flags
        elif setting not in ("", "start"):
            if isinstance(flag_specs()[setting].default, str):
                value = value.replace("+", ",")             # not in numbers, such as 1e+1
            argv += [f"--{setting}", value]
        table = f"sweep-{setting}-{name}" if setting else "compare"
        row = f"{setting}={value}" if setting else name
        cells.append(Cell(table, row, get_config(argv), argv, first_argv))
    return cells


def choose_objectives(given, setting):  # --objectives, the setting that is swept or "" -> [name]
    if setting == "replay":                     # its table compares bits per byte
        owners = [name for name, objective in OBJECTIVES.items() if objective.bpb]
        if given and not set(given.split(",")) <= set(owners):
            fail(f"--objectives {given}: replay is measured in bits per byte. Try {','.join(owners)}")
    else:
        owners = [name for name, objective in OBJECTIVES.items() if setting in objective.flags]
    if given:
        return given.split(",")
    return owners[:1] or list(OBJECTIVES)


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
def train_run(argv, crcs, out_dir):  # -> folder of the finished run with these flags, or None if it diverged
    """Skips a finished run and resumes an interrupted one."""
    hp = get_config(argv)
    folder = os.path.join(out_dir, "runs", run_name(hp, crcs))
    if os.path.exists(os.path.join(folder, "ckpt.pt")):
        if load_checkpoint(folder)["step"] == hp.max_iters:
            return folder
        argv = [*argv, "--resume"]
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "log.txt"), "a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        code = train.main([*argv, "--out_dir", folder], with_sample=False)
    if code > 1:                                # stopped by a signal
        print(f"stopped, saved in {folder}. The same command resumes it")
        sys.exit(code)
    return None if code else folder


def run_name(hp, crcs):  # settings, checksums of the corpora -> name of the run's folder
    """Depends only on settings that the objective reads. If a default of another objective changes, the run keeps its
    name. The device is left out, since a run may be resumed on another one."""
    groups = [*SETTINGS.values(), *(m.objective.flags for m in get_members(hp))]
    names = {flag for group in groups for flag in group} - {"device"}
    settings = {flag: value for flag, value in vars(hp).items() if flag in names}
    tag = zlib.crc32(json.dumps([VERSION, crcs, settings], sort_keys=True).encode())
    return f"{hp.objective}-{hp.max_iters}-seed{hp.seed}-{tag:08x}"


def run_cell(cell, flags, sources, probes):  # corpora, {metric: ProbeData} -> {metric: number}, {} if it diverged
    out_dir = flags.out_dir
    crcs = [source["crc"] for source in sources]
    argv = cell.argv
    first_folder = None
    if cell.first_argv:
        first_folder = train_run(cell.first_argv, crcs[:1], out_dir)
        if not first_folder:
            return {}
        argv = [*argv, "--init_from", first_folder]
        for name in {"block_size", "attn_scale"} - parse(argv).keys():              # not those of the first run
            argv += [f"--{name}", str(getattr(cell.hp, name))]
    folder = train_run(argv, crcs, out_dir)
    if not folder:
        return {}
    path = os.path.join(folder, "measured_tasks.json" if flags.tasks_only else "measured.json")
    if os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            saved = json.load(f)
        if saved.get("eval_version") == EVAL_VERSION:
            return saved["metrics"]
    metrics = logged_metrics(folder) | measure(folder, cell.hp.device, sources[0]["val"], probes, flags.tasks_only)
    if len(sources) == 2:                       # replay: runs with and without it are compared on the same windows
        old, new = validation_bits(folder, cell.hp.device, sources)
        metrics |= {"left_to_right": None, "old": old, "new": new}
        if first_folder:
            metrics["old_before"] = validation_bits(first_folder, cell.hp.device, sources)[0]
    torch.cuda.empty_cache()                    # the next run asks how much memory is free
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        json.dump({"eval_version": EVAL_VERSION, "metrics": metrics}, f)
    os.replace(path + ".tmp", path)             # a kill leaves no half file
    return metrics


@torch.no_grad()
def measure(folder, device, text, probes, tasks_only=False):  # -> {metric: number}
    model, hp, _ = load_run(os.path.join(folder, "ckpt.pt"), device, "float32")
    objective = get_members(hp)[0].objective
    evaluations = [evaluate.eval_task]
    if hp.block_size >= evaluate.MIN_BLOCK and not tasks_only:
        evaluations += [evaluate.eval_infilling, evaluate.eval_filling_in_order, evaluate.eval_corruption,
                        evaluate.eval_corrections]
    metrics = {}
    for evaluation in tqdm(evaluations, desc="evaluations", disable=None, leave=False):
        metrics |= evaluation(model, objective, hp, text)
    if 256 % min(hp.block_size, 256) == 0:      # the probes' windows of 256 bytes can be cut into rows
        metrics |= eval_probes(functools.partial(evaluate.layer_states, model, objective, hp), probes)
    return metrics


def eval_probes(features, probes):
    return {metric: evaluate.eval_probe(features, data) for metric, data in probes.items()}


def logged_metrics(folder):  # -> {metric: number} from metrics.jsonl and the settings
    with open(os.path.join(folder, "metrics.jsonl"), "rb") as f:
        records = [record for record in map(json.loads, f) if record.get("split") == "val"]
    last = next(record for record in records if record["step"] == records[-1]["step"])          # of the first source
    hp = Namespace(**load_checkpoint(folder)["config"] | {"dtype": "float32"})
    bits = "bound" if get_members(hp)[0].objective.bpb == "bound" else "left_to_right"
    loss = float("inf") if last["loss"] is None else last["loss"]       # JSON has no infinity
    tflop = bench.count_flops(hp) * hp.accum * last["step"] / 1e12
    return {"loss": loss, bits: last["bpb"], "seconds": last["seconds"], "tflop": tflop}


def validation_bits(folder, device, sources):  # -> [bits per byte of each source]
    model, hp, _ = load_run(os.path.join(folder, "ckpt.pt"), device, "float32")
    records, _ = train.evaluate(model, get_members(hp), sources, hp)
    return [record["bpb"] for record in records]


# ---- tables of rows {name: {seed: metrics}}, where metrics {metric: number} are empty if the run diverged
def values_by_seed(seeds, metric):  # {seed: metrics} -> {seed: number}, of the seeds that have one
    return {seed: metrics[metric] for seed, metrics in seeds.items() if metrics.get(metric) is not None}


def markdown(rows):  # [[heading, ...], [cell, ...], ...] -> str
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return "\n".join(lines) + "\n"


def filled_table(names, metrics, describe, rows=None):  # describe: (name, metric) -> text of a cell -> Markdown
    """Has a line for each name and a column for each metric. Leaves out empty columns. With rows, the last column lists
    the seeds of each row."""
    columns = []
    for key, metric in metrics.items():
        cells = [describe(name, key) for name in names]
        if any(cells):
            columns.append([str(metric), *cells])
    if rows:
        columns.append(["seeds", *(describe_seeds(rows[name]) for name in names)])
    return markdown([*zip(["", *names], *columns)])


def describe_seeds(seeds):  # {seed: metrics} -> such as "1 2 diverged 3"
    return " ".join(f"{seed}" if metrics else f"{seed} diverged" for seed, metrics in seeds.items())


def mean_and_error(values, digits, error, sign=""):  # -> "mean ± error"; of a single value only the mean
    if not values:
        return ""
    if isinstance(values[0], str):              # a heading of a task, the same for all seeds
        return values[0]
    mean = f"{statistics.fmean(values):{sign}.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {error(values):.{digits}f}"


def standard_error(values):
    return statistics.stdev(values) / len(values) ** 0.5


def tables(rows):  # -> Markdown: all metrics, each objective's own task, differences from the first row
    def mean(name, metric):
        digits = (METRICS | TASK_METRICS)[metric].digits
        return mean_and_error([*values_by_seed(rows[name], metric).values()], digits, statistics.stdev)
    parts = ["Mean over seeds ± their standard deviation. The losses of different objectives are not comparable.\n",
             filled_table(rows, METRICS, mean, rows)]
    with_task = [name for name in rows if values_by_seed(rows[name], "task")]
    if with_task:
        parts += ["Each objective's own task, and what a trivial baseline reaches in it.\n",
                  filled_table(with_task, TASK_METRICS, mean)]
    return "\n".join([*parts, *differences(rows)])


def differences(rows):  # -> [Markdown], empty if fewer than two seeds have finished in the first row and another one
    first, *others = rows
    paired = {}
    for name in others:
        seeds = {seed: metrics for seed, metrics in rows[name].items() if metrics and rows[first].get(seed)}
        if len(seeds) > 1:
            paired[name] = seeds
    if not paired:
        return []

    def difference(name, metric):
        base = values_by_seed(rows[first], metric)
        values = values_by_seed(paired[name], metric)
        pairs = [value - base[seed] for seed, value in values.items() if seed in base]
        return mean_and_error(pairs, 3, standard_error, "+") if len(pairs) > 1 else ""
    n = min(map(len, paired.values()))
    t = STUDENT_T_975[min(n, len(STUDENT_T_975) + 1) - 2]
    text = (f"Difference from {first}, paired by seed: mean ± standard error over the seeds. The error does not "
            f"include the choice of the text. With {n} seeds, a difference that was chosen beforehand is significant "
            f"(95%) if it exceeds {t} standard errors. If nothing but chance differs, 1 comparison in 20 exceeds this, "
            "too.\n")
    return [text, filled_table(paired, RANKED, difference, paired)]


# ---- curves over the budgets: {budget: {row: {seed: metrics}}}
def row_names(budgets):
    return [*dict.fromkeys(name for rows in budgets.values() for name in rows)]


def mean_by_budget(budgets, name, metric):  # -> {budget: mean over the seeds}, of the budgets that have a value
    means = {}
    for steps, rows in sorted(budgets.items()):
        values = values_by_seed(rows.get(name, {}), metric)
        if values:
            means[steps] = statistics.fmean(values.values())
    return means


def budget_table(budgets):  # -> Markdown: in each cell, a value for every budget
    metrics = RANKED | {"task": Metric("its task, as above", 3)}

    def values(name, metric):
        means = mean_by_budget(budgets, name, metric)
        words = [f"{means[steps]:.{metrics[metric].digits}f}" if steps in means else "-" for steps in sorted(budgets)]
        return " ".join(words) if means else ""
    head = f"After {' '.join(map(str, sorted(budgets)))} steps, means over the seeds that finished:\n\n"
    return head + filled_table(row_names(budgets), metrics, values)


def write_curves(budgets, path, first_column):
    """Writes the numbers behind the tables and the picture, one a line. A run that diverged has none."""
    with open(path, "w", encoding="utf-8", newline="") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow([first_column, "steps", "seed", "metric", "value"])
        for name in row_names(budgets):
            for steps, rows in sorted(budgets.items()):
                for seed, metrics in rows.get(name, {}).items():
                    for metric in [*METRICS, *TASK_METRICS]:
                        if isinstance(metrics.get(metric), (int, float)):
                            writer.writerow([name, steps, seed, metric, f"{metrics[metric]:.6g}"])


def draw_picture(budgets, path, xlabel="steps"):  # -> path, or the reason why there is no picture
    """Draws a panel for each metric of which more or less is better. In it, each row is a line over the budgets."""
    try:
        from matplotlib import colormaps  # imported here because it is optional
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: pip install matplotlib, and the next run draws it"
    palette = [*colormaps["tab10"].colors, *colormaps["Dark2"].colors]
    colors = dict(zip(row_names(budgets), itertools.cycle(palette)))
    panels = {key: {name: mean_by_budget(budgets, name, key) for name in colors} for key in RANKED}
    panels = {key: lines for key, lines in panels.items() if any(lines.values())}
    n_columns = max(1, min(3, len(panels)))
    n_rows = max(1, math.ceil(len(panels) / 3))
    figure = Figure((4.7 * n_columns, 3.6 * n_rows))
    axes = [*figure.subplots(n_rows, n_columns, squeeze=False).flat]
    for axis in axes[len(panels):]:
        axis.axis("off")
    for (key, lines), axis in zip(panels.items(), axes):
        ends = draw_lines(axis, METRICS[key], lines, colors)
        axis.set(xscale="log", xlabel=xlabel)
        axis.set_xticks([*budgets], [f"{x:g}" for x in budgets])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        name_lines(axis, ends, colors)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    return path


def draw_lines(axis, metric, lines, colors):  # lines {row: {steps: value}} -> {row: its last point (steps, value)}
    """Where less is better, values above twice the median are not drawn: they would flatten the other lines. The title
    names the rows that are left out completely."""
    highest = math.inf
    if not metric.more_is_better:
        highest = 2 * statistics.median(value for means in lines.values() for value in means.values())
    ends = {}
    for name, means in lines.items():
        points = [(steps, value) for steps, value in means.items() if value <= highest]
        if points:
            axis.plot(*zip(*points), color=colors[name], marker="o", ms=3, lw=1)
            ends[name] = points[-1]
    better = "more" if metric.more_is_better else "less"
    left_out = "".join(f", without {name}" for name, means in lines.items() if means and name not in ends)
    axis.set_title(f"{metric.heading} ({better} is better{left_out})", fontsize=9)
    axis.set(ylabel=metric.unit)
    return ends


def name_lines(axis, ends, colors):  # writes the name of each row at the end of its line
    low, high = axis.get_ylim()
    heights = spread({name: value for name, (_, value) in ends.items()}, 0.06 * (high - low))
    for name, end in ends.items():
        arrow = dict(arrowstyle="-", lw=0.4, color=colors[name])
        axis.annotate(name, end, (1.04, heights[name]), textcoords=("axes fraction", "data"), va="center",
                      fontsize=8, color=colors[name], arrowprops=arrow)


def spread(values, gap):  # {name: value}, smallest distance -> {name: height near its value}
    """In a hundred passes, moves apart neighbours whose distance is below `gap`, so that names do not overlap."""
    names = sorted(values, key=values.get)
    heights = [values[name] for name in names]
    for _ in range(100):
        for i in range(len(heights) - 1):
            overlap = gap - (heights[i + 1] - heights[i])
            if overlap > 0:
                heights[i] -= overlap / 2
                heights[i + 1] += overlap / 2
    return dict(zip(names, heights))


# ---- the program
def main(argv=None):  # -> exit code
    """Trains what is not finished, measures it, writes the tables. Ctrl-C saves the run in progress."""
    flags, rest = parse_with_train_flags("python -m experiments.compare", __doc__, FLAGS, RESERVED, argv)
    setting = flags.sweep.partition("=")[0]
    cells = plan_cells(flags, rest)
    corpora = [flags.data, flags.new_data] if setting == "replay" else [flags.data]
    sources = open_corpus(corpora)
    for cell in cells:
        check_sizes(sources, get_members(cell.hp)[0].n, cell.hp.block_size)
    for corpus in corpora:                      # otherwise the runs would be read as text
        if os.path.isdir(corpus) and is_inside(flags.out_dir, corpus):
            fail(f"--out_dir {flags.out_dir}: lies inside the corpus {corpus}. Try a folder outside it")
    os.makedirs(flags.out_dir, exist_ok=True)
    probes = {}
    if flags.data == "stdlib" and not flags.tasks_only:
        probes = {"probe": evaluate.byte_probe(256), "passages": evaluate.package_probe(256)}
    results = {}                                # {table: {budget: {row: {seed: metrics}}}}
    n_finished = 0
    for i, cell in enumerate(cells):
        hp = cell.hp
        metrics = run_cell(cell, flags, sources, probes)
        rows = results.setdefault(cell.table, {}).setdefault(hp.max_iters, {})
        rows.setdefault(cell.row, {})[hp.seed] = metrics
        n_finished += bool(metrics)
        outcome = f"loss {metrics['loss']:.4f}" if metrics else "diverged"
        print(f"[{i + 1}/{len(cells)}] {cell.row}, {hp.max_iters} steps, seed {hp.seed}: {outcome}", flush=True)
    references = probe_references(cells[0].hp, probes) if probes and not setting else {}
    for table, budgets in results.items():
        write_report(os.path.join(flags.out_dir, table), budgets, setting, references)
    return 0 if n_finished else 1


def is_inside(path, folder):
    return os.path.realpath(path).startswith(os.path.join(os.path.realpath(folder), ""))


@torch.no_grad()
def probe_references(hp, probes):  # -> {row: {"-": metrics}}: what the probes find without training
    hp = Namespace(**vars(hp) | {"device": "cpu", "dtype": "float32", "block_size": 256})
    objective = get_members(hp)[0].objective
    features = functools.partial(evaluate.layer_states, for_inference(build(get_members(hp), hp)), objective, hp)
    bytes_alone = {"probe": evaluate.eval_probe(evaluate.byte_features, probes["probe"])}
    histogram = {"passages": evaluate.eval_probe(evaluate.histogram_features, probes["passages"])}
    return {"untrained model": {"-": eval_probes(features, probes)}, "five raw bytes": {"-": bytes_alone},
            "histogram of bytes": {"-": histogram}}


def write_report(path, budgets, setting, references):  # path: of the table and the picture, without the suffix
    text = tables(budgets[max(budgets)] | references)
    if len(budgets) > 1:
        text += "\n" + budget_table(budgets)
    with open(path + ".md", "w", encoding="utf-8") as f:
        f.write(text)
    curves = path + ".csv" if setting else os.path.join(os.path.dirname(path), "curves.csv")
    write_curves(budgets, curves, setting or "objective")
    points = over_values(budgets, setting)
    picture = draw_picture(points, path + ".png", "steps" if points is budgets else setting)
    print(f"\n{path}.md, {curves}, {picture}\n\n{text}")


def over_values(budgets, setting):  # -> {value: {setting: {seed: metrics}}}, or budgets itself
    """With one budget, the horizontal axis of a sweep over numbers is the setting instead of the number of steps."""
    rows = budgets[max(budgets)]
    try:
        values = {float(name.partition("=")[2]): seeds for name, seeds in rows.items()}
    except ValueError:                          # not numbers
        return budgets
    if len(budgets) > 1 or len(values) < len(rows) or min(values) <= 0:             # the axis is logarithmic
        return budgets
    return {value: {setting: seeds} for value, seeds in sorted(values.items())}


if __name__ == "__main__":
    run_program(main)
