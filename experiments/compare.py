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

Every objective has its own defaults. Each cell of a table is a run of train.py, in a folder named after its settings
and its text: a finished run is not trained again, an interrupted one is resumed, other settings make another run. Its
metrics are kept in its folder, in measured.json; delete that file to measure again. Tables show the largest budget; the
last table, curves.csv and the picture show all. Infilling and replaced bytes are measured in rows of at least 128
positions; in shorter rows than the default the texts around holes and the noisy texts are shorter, too.
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
from objectives import OBJECTIVES, get_members
from run import SETTINGS, VERSION, build, flag_specs, for_inference, get_config, load_checkpoint, load_run, run_program
import torch
from tqdm import tqdm

FLAGS = {
    "objectives": Flag("", "separated by commas; without it all, or the first that has the setting of --sweep"),
    "seeds": Flag("1", "separated by commas; all runs of one seed start from equal weights and read the same places"),
    "budgets": Flag("1000", "numbers of steps, separated by commas; each is a separate run with its own schedule"),
    "data": Flag("stdlib", "corpus; the probe runs on stdlib only, since its labels come from Python source"),
    "new_data": Flag(os.path.join(torch.__path__[0], "include"), "second corpus, for --sweep replay"),
    "sweep": Flag("", "a setting and its values, as in mask_rate=.1,.15,.3"),
    "first_steps": Flag(0, "for --sweep start: steps of the runs to start from; 0: as many again", 0),
    "out_dir": Flag("out/compare", "folder of tables, pictures and runs"),
}
# flags of train.py that are set here
RESERVED = {"objective", "seed", "data", "out_dir", "resume", "max_iters", "max_passes", "eval_interval", "init_from"}
EVAL_VERSION = 11                               # raise it when an evaluation changes: finished runs are measured again


@dataclass(frozen=True)
class Metric:
    heading: str
    digits: int
    more_is_better: bool | None = None          # None: neither


METRICS = {                                     # columns of the first table, in order
    "loss": Metric("own loss", 3),
    "left_to_right": Metric("left to right", 3, False),
    "left_by_filling": Metric("left to right by filling", 2, False),
    "bound_there": Metric("bound, the same windows", 2),
    "bound": Metric("bound", 3, False),
    "old_before": Metric("old corpus before", 3),
    "old": Metric("old corpus after", 3, False),
    "new": Metric("new corpus", 3, False),
    **{f"left_{m}": Metric(f"left {m}", 2, False) for m in evaluate.HOLE_LENGTHS},
    **{f"infill_{m}": Metric(f"infill {m}", 2, False) for m in evaluate.HOLE_LENGTHS},
    **{f"ended_{m}": Metric(f"infill {m} and its end", 2, False) for m in evaluate.HOLE_LENGTHS},
    "probe": Metric("probe of byte classes", 3, True),
    "passages": Metric("probe of packages", 3, True),
    "replaced_auc": Metric("replaced bytes, AUC", 3, True),
    "tflop": Metric("TFLOP", 2),
    "seconds": Metric("seconds", 0),
}
TASK_METRICS = {                                # columns of the second table
    "task_heading": Metric("its task (baseline)", 0),
    "task": Metric("model", 3, True),
    "task_baseline": Metric("baseline", 3),
    "ends": Metric("ends by itself", 3),
    "distinct": Metric("distinct lines", 3),
}
# those that have a better side
LEARNED = {key: metric for key, metric in METRICS.items() if metric.more_is_better is not None}
STUDENT_T_975 = 12.7, 4.3, 3.2, 2.8, 2.6, 2.4, 2.4, 2.3, 2.3             # for 2, 3, ... seeds


# ---- cells: which runs there are
@dataclass
class Cell:
    """A run to train and to measure."""
    table: str                                  # name of the table, the picture and the curves that it appears in
    row: str
    hp: Namespace
    argv: list                                  # train.py's flags
    first_argv: list | None = None              # those of the run from whose weights it starts


def plan_cells(flags, rest):  # -> [Cell]; fails on what train.py would refuse, before anything runs
    setting, _, values = flags.sweep.partition("=")
    known = setting in {"replay", "start", *flag_specs()} - RESERVED - {"device"}   # device: in no run's name
    if flags.sweep and not (known and all(values.split(","))):
        fail(f"--sweep {flags.sweep}: wants a setting of train.py's, replay or start, and values, as in "
             "mask_rate=.1,.15,.3")
    owners = [name for name, objective in OBJECTIVES.items() if setting in objective.flags]
    if setting == "replay":                     # forgetting is measured in bits per byte
        owners = [name for name, objective in OBJECTIVES.items() if objective.bpb]
    names = flags.objectives.split(",") if flags.objectives else (owners[:1] or list(OBJECTIVES))
    if setting == "replay" and not set(names) <= set(owners):
        fail(f"--objectives {flags.objectives}: forgetting is measured in bits per byte. Try {','.join(owners)}")
    cells = []
    grid = itertools.product(flags.budgets.split(","), flags.seeds.split(","), names, values.split(","))
    for steps, seed, name, value in grid:
        shared = ["--seed", seed, *rest, "--data", flags.data]
        argv = [*shared, "--objective", name, "--max_iters", steps, "--eval_interval", steps]
        first_argv = None
        if setting == "replay":                 # the same steps again, on the new corpus
            if value != "scratch":
                first_argv = argv
            argv = [*argv, "--data", *replay_sources(flags, value)]
        elif setting == "start" and value != "none":
            first = str(flags.first_steps or steps)
            first_argv = [*shared, "--objective", value, "--max_iters", first, "--eval_interval", first]
            get_config(first_argv)              # fails now on flags that this objective does not have
        elif setting not in ("", "start"):
            is_text = isinstance(flag_specs()[setting].default, str)                # 1e+1 is a number
            argv += [f"--{setting}", value.replace("+", ",") if is_text else value]
        table = f"sweep-{setting}-{name}" if setting else "compare"
        cells.append(Cell(table, value or name, get_config(argv), argv, first_argv))
    return cells


def replay_sources(flags, value):  # -> what --data takes: the new corpus, and a share of the old one
    try:
        share = 0.0 if value == "scratch" else float(value)
    except ValueError:
        share = 1.0
    if not 0 <= share < 1:
        fail(f"--sweep replay={value}: wants shares from 0 to below 1, or scratch. Try replay=scratch,0,.05,.25")
    new = f"{flags.new_data}:{1 - share:g}"
    return [new, f"{flags.data}:{share:g}"] if share else [new]


# ---- a cell: train, measure
def train_cell(argv, crcs, out_dir):  # -> folder of the finished run of these flags, None where it diverged
    """Leaves a finished run as it is and resumes an interrupted one."""
    hp = get_config(argv)
    folder = os.path.join(out_dir, "runs", run_name(hp, crcs))
    if any(os.path.exists(os.path.join(folder, file)) for file in ("ckpt.pt", "best.pt")):
        if load_checkpoint(folder)["step"] == hp.max_iters:
            return folder
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
    groups = [*SETTINGS.values(), *(m.objective.flags for m in get_members(hp))]
    read = {flag for group in groups for flag in group} - {"device"}                # a run may be resumed on another
    settings = {flag: value for flag, value in vars(hp).items() if flag in read}
    tag = zlib.crc32(json.dumps([VERSION, crcs, settings], sort_keys=True).encode())
    return f"{hp.objective}-{hp.max_iters}-seed{hp.seed}-{tag:08x}"


def run_cell(cell, out_dir, sources, probes):  # corpora, {metric: ProbeData} -> {metric: number}, {} where it diverged
    crcs = [source["crc"] for source in sources]
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
    if os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            saved = json.load(f)
        if saved.get("eval_version") == EVAL_VERSION:
            return saved["metrics"]
    metrics = logged_metrics(folder) | measure(folder, cell.hp.device, sources[0]["val"], probes)
    if len(sources) == 2:                       # continual pre-training: all in the same windows
        old, new = validation_bits(folder, cell.hp.device, sources)
        metrics |= {"left_to_right": None, "old": old, "new": new}
        if first:
            metrics["old_before"] = validation_bits(first, cell.hp.device, sources)[0]
    torch.cuda.empty_cache()                    # the next run asks how much memory is free
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        json.dump({"eval_version": EVAL_VERSION, "metrics": metrics}, f)
    os.replace(path + ".tmp", path)
    return metrics


@torch.no_grad()
def measure(folder, device, text, probes):  # -> {metric: number}
    model, hp, _ = load_run(os.path.join(folder, "ckpt.pt"), device, "float32")
    objective = get_members(hp)[0].objective
    evaluations = [evaluate.eval_task]
    if hp.block_size >= evaluate.MIN_BLOCK:
        evaluations += [evaluate.eval_infilling, evaluate.eval_filling_in_order, evaluate.eval_corruption]
    metrics = {}
    for evaluate_one in tqdm(evaluations, desc="evaluations", disable=None, leave=False):
        metrics |= evaluate_one(model, objective, hp, text)
    if 256 % min(hp.block_size, 256) == 0:
        metrics |= eval_probes(functools.partial(evaluate.layer_states, model, objective, hp), probes)
    return metrics


def eval_probes(features, probes):
    return {metric: evaluate.eval_probe(features, data) for metric, data in probes.items()}


def logged_metrics(folder):  # -> {metric: number} that metrics.jsonl and the settings hold
    with open(os.path.join(folder, "metrics.jsonl"), "rb") as f:
        records = [r for r in map(json.loads, f) if r.get("split") == "val"]
    last = next(r for r in records if r["step"] == records[-1]["step"])             # of the first source
    hp = Namespace(**load_checkpoint(folder)["config"] | {"dtype": "float32"})
    bits = "bound" if get_members(hp)[0].objective.bpb == "bound" else "left_to_right"
    loss = float("inf") if last["loss"] is None else last["loss"]   # JSON has no infinity
    tflop = bench.count_flops(hp) * hp.accum * last["step"] / 1e12
    return {"loss": loss, bits: last["bpb"], "seconds": last["seconds"], "tflop": tflop}


def validation_bits(folder, device, sources):  # -> [bits per byte of each source]
    model, hp, _ = load_run(os.path.join(folder, "ckpt.pt"), device, "float32")
    records, _ = train.evaluate(model, get_members(hp), sources)
    return [record["bpb"] for record in records]


# ---- tables, of {row: {seed: metrics}}
def by_seed(seeds, metric):  # {seed: metrics} -> {seed: number}
    return {seed: metrics[metric] for seed, metrics in seeds.items() if metrics.get(metric) is not None}


def markdown(rows):  # [[cell of the head, ...], [cell, ...], ...] -> str
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return "\n".join(lines) + "\n"


def filled_table(names, metrics, describe, seeds=None):  # describe: (name of a row, metric) -> str -> Markdown
    """Empty columns are left out. seeds {name: {seed: metrics}}: for a last column."""
    columns = [[metric.heading, *(describe(name, key) for name in names)] for key, metric in metrics.items()]
    columns = [column for column in columns if any(column[1:])]
    if seeds:
        ran = [[f"{seed}" if found else f"{seed} diverged" for seed, found in seeds[name].items()] for name in names]
        columns.append(["seeds", *map(" ".join, ran)])
    return markdown([*zip(["", *names], *columns)])


def mean_and_error(values, digits, error, sign=""):  # -> "mean ± error", the mean alone of a single value; a text
    if not values or isinstance(values[0], str):
        return "".join(values[:1])
    mean = f"{statistics.fmean(values):{sign}.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {error(values):.{digits}f}"


def tables(rows):  # -> Markdown: what was learned, the tasks, differences from the first row
    first, *others = rows

    def mean(name, metric):
        digits = (METRICS | TASK_METRICS)[metric].digits
        return mean_and_error([*by_seed(rows[name], metric).values()], digits, statistics.stdev)

    def difference(name, metric):
        base = by_seed(rows[first], metric)
        pairs = [value - base[seed] for seed, value in by_seed(paired[name], metric).items() if seed in base]
        if len(pairs) < 2:
            return ""
        return mean_and_error(pairs, 3, lambda values: statistics.stdev(values) / len(values) ** 0.5, "+")
    parts = ["Bits per byte where nothing else is said; mean over seeds ± their standard deviation.\n",
             filled_table(rows, METRICS, mean, rows)]
    with_task = [name for name in rows if by_seed(rows[name], "task")]
    if with_task:
        parts.append(filled_table(with_task, TASK_METRICS, mean))
    paired = {}
    for name in others:
        paired[name] = {seed: found for seed, found in rows[name].items() if found and rows[first].get(seed)}
    paired = {name: seeds for name, seeds in paired.items() if len(seeds) > 1}
    if paired:
        n = min(map(len, paired.values()))
        clear = STUDENT_T_975[min(n, len(STUDENT_T_975) + 1) - 2]
        parts += [f"Difference from {first}, paired by seed, on the same held-out text: mean ± standard error over the "
                  f"runs; the error over texts comes on top. With {n} seeds a single difference, chosen beforehand, is "
                  f"significant (95%) from {clear} standard errors on; of 20 such differences one is so by chance.\n",
                  filled_table(paired, LEARNED, difference, paired)]
    return "\n".join(parts)


# ---- curves over the budgets: {budget: {row: {seed: metrics}}}
def row_names(budgets):
    return [*dict.fromkeys(name for rows in budgets.values() for name in rows)]


def mean_by_budget(budgets, name, metric):  # -> {budget: mean over the seeds}, of the budgets that have one
    found = {steps: by_seed(rows.get(name, {}), metric) for steps, rows in sorted(budgets.items())}
    return {steps: statistics.fmean(values.values()) for steps, values in found.items() if values}


def budget_table(budgets):  # -> Markdown: a value at every budget
    metrics = LEARNED | {"task": Metric("its task, as above", 3)}

    def trend(name, metric):
        means = mean_by_budget(budgets, name, metric)
        words = [f"{means[n]:.{metrics[metric].digits}f}" if n in means else "-" for n in sorted(budgets)]
        return " ".join(words) if means else ""
    head = f"After {' '.join(map(str, sorted(budgets)))} steps, means over the seeds that finished:\n\n"
    return head + filled_table(row_names(budgets), metrics, trend)


def write_curves(budgets, path, first_column):
    """The numbers behind the tables and the picture, a line for each. A run that diverged has none."""
    with open(path, "w", encoding="utf-8", newline="") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow([first_column, "steps", "seed", "metric", "value"])
        for name in row_names(budgets):
            for steps, rows in sorted(budgets.items()):
                for seed, metrics in rows.get(name, {}).items():
                    for metric in [*METRICS, *TASK_METRICS]:
                        if isinstance(metrics.get(metric), (int, float)):
                            writer.writerow([name, steps, seed, metric, f"{metrics[metric]:.6g}"])


def draw_picture(budgets, path, xlabel="steps"):  # -> path, or why there is none
    """A panel for each metric that has a better side, over the budget; a line for each row, named at its end. More than
    twice the median of a panel in bits would hide the rest: not drawn, as the title says."""
    try:
        from matplotlib import colormaps  # here: it is optional
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: pip install matplotlib, and the next run draws it"
    colors = [*colormaps["tab10"].colors, *colormaps["Dark2"].colors]
    colors = dict(zip(row_names(budgets), itertools.cycle(colors)))
    panels = {key: {name: mean_by_budget(budgets, name, key) for name in colors} for key in LEARNED}
    panels = {key: lines for key, lines in panels.items() if any(lines.values())}
    across = max(1, min(3, len(panels)))
    down = max(1, math.ceil(len(panels) / 3))
    figure = Figure((4.7 * across, 3.6 * down))
    axes = figure.subplots(down, across, squeeze=False)
    for axis in axes.flat[len(panels):]:
        axis.axis("off")
    axis_of = dict(zip(panels, axes.flat))
    ends = {key: {} for key in panels}          # {metric: {name: (steps, value)}}
    for (key, lines), axis in zip(panels.items(), axes.flat):
        most = math.inf
        if not METRICS[key].more_is_better:
            most = 2 * statistics.median(value for means in lines.values() for value in means.values())
        for name, means in lines.items():
            points = [(steps, value) for steps, value in means.items() if value <= most]
            if points:
                axis.plot(*zip(*points), color=colors[name], marker="o", ms=3, lw=1)
                ends[key][name] = points[-1]
        better = "more" if METRICS[key].more_is_better else "less"
        left_out = "".join(f", without {name}" for name, means in lines.items() if means and name not in ends[key])
        axis.set_title(f"{METRICS[key].heading} ({better} is better{left_out})", fontsize=9)
        axis.set(xscale="log", xlabel=xlabel, ylabel="" if METRICS[key].more_is_better else "bits per byte")
        axis.set_xticks([*budgets], [f"{x:g}" for x in budgets])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    for key, axis in axis_of.items():
        low, high = axis.get_ylim()
        places = spread({name: value for name, (_, value) in ends[key].items()}, 0.06 * (high - low))
        for name, end in ends[key].items():
            line = dict(arrowstyle="-", lw=0.4, color=colors[name])
            axis.annotate(name, end, (1.04, places[name]), textcoords=("axes fraction", "data"), va="center",
                          fontsize=8, color=colors[name], arrowprops=line)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    return path


def spread(values, gap):  # {name: value}, smallest distance -> {name: place near its value}
    names = sorted(values, key=values.get)
    places = [values[name] for name in names]
    for _ in range(100):
        for i in range(len(places) - 1):
            overlap = gap - (places[i + 1] - places[i])
            if overlap > 0:
                places[i] -= overlap / 2
                places[i + 1] += overlap / 2
    return dict(zip(names, places))


# ---- the program
def make_folder(path, corpora):  # fails where it cannot be made, or where what lies in it would be read as text
    for corpus in corpora:
        if os.path.isdir(corpus) and os.path.realpath(path).startswith(os.path.join(os.path.realpath(corpus), "")):
            fail(f"--out_dir {path}: lies inside the corpus {corpus}. Try a folder outside it")
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as e:
        fail(f"--out_dir {path}: cannot be written to ({e.strerror}). Try another folder")


def main(argv=None):  # -> exit code
    """Trains what is not finished, measures it, writes the tables. Ctrl-C saves the run in progress."""
    flags, rest = parse_with_train_flags("python -m experiments.compare", __doc__, FLAGS, RESERVED, argv)
    setting = flags.sweep.partition("=")[0]
    cells = plan_cells(flags, rest)
    corpora = [flags.data, flags.new_data] if setting == "replay" else [flags.data]
    sources = open_corpus(corpora)
    for cell in cells:
        check_sizes(sources, get_members(cell.hp)[0].n, cell.hp.block_size)
    make_folder(flags.out_dir, corpora)
    probes = {}
    if flags.data == "stdlib":
        probes = {"probe": evaluate.byte_probe(256), "passages": evaluate.package_probe(256)}
    found = {}                                  # {table: {budget: {row: {seed: metrics}}}}
    finished = 0
    for i, cell in enumerate(cells):
        hp = cell.hp
        metrics = run_cell(cell, flags.out_dir, sources, probes)
        rows = found.setdefault(cell.table, {}).setdefault(hp.max_iters, {})
        rows.setdefault(cell.row, {})[hp.seed] = metrics
        finished += bool(metrics)
        outcome = f"loss {metrics['loss']:.4f}" if metrics else "diverged"
        print(f"[{i + 1}/{len(cells)}] {cell.row}, {hp.max_iters} steps, seed {hp.seed}: {outcome}", flush=True)
    for table, budgets in found.items():
        references = {} if setting or not probes else probe_references(cells[0].hp, probes)
        write_report(os.path.join(flags.out_dir, table), budgets, setting, references)
    return 0 if finished else 1


@torch.no_grad()
def probe_references(hp, probes):  # -> {row: {"-": metrics}}: both probes without training
    hp = Namespace(**vars(hp) | {"device": "cpu", "dtype": "float32", "block_size": 256})
    objective = get_members(hp)[0].objective
    features = functools.partial(evaluate.layer_states, for_inference(build(hp)), objective, hp)
    bytes_alone = {"probe": evaluate.eval_probe(evaluate.byte_features, probes["probe"])}
    histogram = {"passages": evaluate.eval_probe(evaluate.histogram_features, probes["passages"])}
    return {"untrained model": {"-": eval_probes(features, probes)}, "five raw bytes": {"-": bytes_alone},
            "histogram of bytes": {"-": histogram}}


def write_report(path, budgets, setting, references):  # path without its ending
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


def over_values(budgets, setting):  # of one budget and rows that are numbers -> {number: {setting: {seed: metrics}}}
    """What the picture is drawn over, in place of the budget."""
    rows = budgets[max(budgets)]
    try:
        values = {float(name): seeds for name, seeds in rows.items()}
    except ValueError:
        return budgets
    if len(budgets) > 1 or len(values) < len(rows) or min(values) <= 0:             # the axis is logarithmic
        return budgets
    return {value: {setting: seeds} for value, seeds in sorted(values.items())}


if __name__ == "__main__":
    run_program(main)
