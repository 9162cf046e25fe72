"""Train objectives for the same number of steps, evaluate all of them in the same way, and write one table.

    python -m experiments.compare                       all objectives, one seed: one to five hours on a laptop CPU
    python -m experiments.compare --objectives clm,mlm,clm:0.5+mlm:0.5 --data book.txt --seeds 1,2,3
    python -m experiments.compare --objectives clm,mlm --pairs tests/pairs.jsonl --budgets 1200,8000
    python -m experiments.compare --objectives mlm --sweep mask_rate=.15,.3,.4 --seeds 1,2,3
    python -m experiments.compare --objectives bart --sweep bart_noise=mask,infill+permute      a + stands for a comma

A row is an objective, or a mixture such as clm:0.5+mlm:0.5, of which each figure is of the first member that has it; in
a sweep, a row for each value. Each is trained with its own defaults, once for each seed and budget, in a folder under
out_dir/runs. A finished run with the same settings, text and --data is used again, and an interrupted one is resumed.
The report also lists the runs of earlier commands in out_dir, if their other settings are those of this command. It
names runs that are older than the files that train; if those that measure have changed, the figures are measured again.
Flags that are not listed below are train.py's. One that only some objectives have, such as --mask_rate, goes to those.
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
from collections import namedtuple
from pathlib import Path

from data import Flag, UserError, check_sizes, fail, open_corpus
from experiments import evaluate
from experiments.common import MEASURING, checksums, parse_with_train_flags, read_json, training_files, write_json
from experiments.evaluate import METRICS
from experiments.figures import curve_panels, draw_panels
from experiments.score import check_pairs, choose_scored, format_mean, format_share, mean_and_error, read_pairs
from experiments.score import score_pairs
import train
from objectives import OBJECTIVES
from run import PATHS, SHARED_FLAGS, VERSION, checkpoint_path, flag_specs, get_config, get_members
from run import load_checkpoint, load_run, member_weights, parse, run_program, to_words
import torch

FLAGS = {
    "objectives": Flag("", "names or mixtures, with commas between; default: all"),
    "seeds": Flag("1", "separated by commas; all runs with the same seed have the same initial weights and data"),
    "budgets": Flag("1000", "numbers of steps, separated by commas; each is a separate run with its own schedule"),
    "data": Flag("stdlib", "corpus; the probe runs only on stdlib, since it needs Python files"),
    "sweep": Flag("", "a setting of train.py and its values, as in mask_rate=.1,.15,.3"),
    "pairs": Flag("", "file of minimal pairs, as experiments.score reads it: also print the share of correct pairs"),
    "baseline": Flag("", "row that is subtracted from the others; default: the first"),
    "tasks_only": Flag(False, "measure only losses and each objective's own task, in less time"),
    "out_dir": Flag("out/compare", "folder of tables, pictures and runs"),
}
# flags of train.py that this program sets
RESERVED = {"objective", "seed", "data", "out_dir", "resume", "max_iters", "max_passes"}
SUMMARY = {                                     # of the table: {heading: (digits, metrics, mark of the second one)}
    "left to right": (3, ["left_to_right", "bound"], "<= "),
    "hole of 4 bytes": (2, ["infill_4", "left_4"], "left: "),
    "hole of 64 bytes": (2, ["infill_64", "left_64"], "left: "),
    "typos restored": (2, ["typos_restored"], ""),
    "own task (baseline)": (3, ["task"], ""),
    "training, seconds": (1, ["seconds"], ""),
}
STUDENT_T_975 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}    # {number of seeds: quantile}


# ---- which runs there are
# row: of the table; argv: flags of train.py that give the settings hp; code: {file: checksum} of the files that train
Run = namedtuple("Run", "row hp argv folder code")


def plan_runs(flags, rest, crc):  # crc: of the corpus -> [Run]; fails if train.py would refuse the flags of one
    setting, _, values = flags.sweep.partition("=")
    settings = flag_specs().keys() - RESERVED - {"device", "eval_interval"}         # each value makes a run of its own
    if flags.sweep and not (setting in settings and all(values.split(","))):
        fail(f"--sweep {flags.sweep}: cannot be swept. Try mask_rate=.1,.15,.3")
    names = [to_objective(word) for word in flags.objectives.replace(" ", "").split(",") if word]
    names = names or list(OBJECTIVES)
    if not parse(rest).keys() <= SHARED_FLAGS.union(*map(own_flags, names)):
        get_config(["--objective", names[0], *rest])            # refuses a flag that no row reads
    runs = {}                                   # {folder: run}, so a value that is given twice counts once
    for steps, seed, name, value in itertools.product(flags.budgets.split(","), flags.seeds.split(","), names,
                                                      values.split(",")):
        run = plan_run(flags, rest, crc, name, steps, seed, to_value(setting, value) if setting else "")
        runs[run.folder] = run
    return [*runs.values()]


def plan_run(flags, rest, crc, name, steps, seed, value):  # value: of --sweep's setting -> Run
    read = {flag: word for flag, word in parse(rest).items() if flag in SHARED_FLAGS | own_flags(name)}
    interval = max(1, int(steps) // 5) if steps.isdecimal() else steps              # each evaluation also saves the run
    argv = ["--objective", name, "--max_iters", steps, "--seed", seed, "--data", flags.data]
    argv += to_words({"eval_interval": interval} | read)
    setting = flags.sweep.partition("=")[0]
    if setting:
        argv += to_words({setting: value})
    hp = get_config(argv)
    hp.checkpoint = None                        # the weights of --init_from, which train.main loads again
    row = name.replace(",", "+") + (f" {setting}={getattr(hp, setting)}" if setting else "")
    return Run(row, hp, argv, run_folder(hp, crc, flags.out_dir), checksums(training_files(name)))


def find_runs(flags, rest, crc):  # -> [Run]: the measured runs of the folder, also of earlier commands
    """Only those that this command would make with their objective, seed, steps and value of the sweep. Such a run has
    the same folder, whose name has a checksum of all settings and of the corpus."""
    runs = []
    for path in sorted(Path(flags.out_dir, "runs").glob("*/metrics.jsonl")):
        if read_figures(path.parent, flags):
            with open(path, encoding="utf-8") as f:
                config = json.loads(f.readline())["config"]
            words = config["objective"], str(config["max_iters"]), str(config["seed"])
            with contextlib.suppress(UserError):                # it has other settings, which exclude those of now
                run = plan_run(flags, rest, crc, *words, config.get(flags.sweep.partition("=")[0], ""))
                if os.path.basename(run.folder) == path.parent.name:
                    runs.append(run)
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
    may_have_commas = isinstance(default, str) and setting not in PATHS             # numbers may be written 1e+1
    return word.replace("+", ",") if may_have_commas else word


def run_folder(hp, crc, out_dir):  # settings, checksum of the corpus -> folder of the run
    settings = read_settings(hp)
    if hp.init_from:                            # weights count, wherever they lie
        settings["init_from"] = zlib.crc32(Path(checkpoint_path(hp.init_from)).read_bytes())
    tag = zlib.crc32(json.dumps([VERSION, [crc], settings], sort_keys=True).encode())
    objective = hp.objective.replace(",", "+").replace(":", "_")
    return os.path.join(out_dir, "runs", f"{objective}-{hp.max_iters}-seed{hp.seed}-{tag:08x}")


def read_settings(hp):  # -> {flag: value} of those that the objective reads
    """Without the device, on which a result should not depend, and without the interval of evaluations."""
    names = (SHARED_FLAGS | own_flags(hp.objective)) - {"device", "eval_interval"}
    return {flag: value for flag, value in vars(hp).items() if flag in names}


def check_flags(flags, runs, rows, source, pairs):  # fails if something would fail after the first training
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
    if flags.baseline and flags.baseline not in rows:
        fail(f"--baseline {flags.baseline}: is not a row. Try one of {', '.join(rows)}")
    try:
        os.makedirs(flags.out_dir, exist_ok=True)
    except OSError as e:
        fail(f"--out_dir {flags.out_dir}: cannot be written to ({e.strerror}). Try another folder")


# ---- a run: train it, measure it
def has_weights(run):
    return os.path.exists(os.path.join(run.folder, "ckpt.pt"))


def work_left(run, flags):  # -> number of steps to train, number of evaluations to make (0 or 1)
    figures = read_figures(run.folder, flags)
    steps = 0 if figures else run.hp.max_iters
    if steps and has_weights(run):
        steps -= load_checkpoint(os.path.join(run.folder, "ckpt.pt"))["step"]
    return steps, int(figures.get("code") != MEASURING)


def minutes_left(work, seconds):  # what work_left returned for all runs; (training, evaluation) of those that are done
    """At the speed of the runs that are done. Returns 0 if nothing is left, and if no such work has been done yet."""
    total = 0.0
    for amounts, spent in zip(zip(*work), zip(*seconds)):       # of training, then of evaluation
        done = sum(amounts[:len(spent)])
        left = sum(amounts[len(spent):])
        if left and not done:
            return 0
        total += left * sum(spent) / max(1, done)
    return math.ceil(total / 60)


def train_run(run, label):  # -> False if the run diverged
    """Resumes an interrupted run. code.json has a checksum of each file that trained its first steps."""
    os.makedirs(run.folder, exist_ok=True)
    if not has_weights(run):                    # best.pt may be left of a run killed before its first ckpt.pt
        Path(run.folder, "best.pt").unlink(missing_ok=True)
        write_json(os.path.join(run.folder, "code.json"), run.code)
    print(f"{label}: training, logged in {run.folder}/log.txt", flush=True)
    argv = ["--resume", "--device", run.hp.device] if has_weights(run) else run.argv
    with open(os.path.join(run.folder, "log.txt"), "a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        try:
            exit_code = train.main([*argv, "--out_dir", run.folder], with_sample=False)
        except FloatingPointError as e:
            print(f"{label}: {e}", file=sys.stderr)
            return False
        except KeyboardInterrupt:
            print(f"stopped, saved in {run.folder}. The same command resumes it", file=sys.stderr)
            raise
    if exit_code:                               # stopped by another signal
        sys.exit(exit_code)
    return True


def read_figures(folder, flags):  # -> what is saved of an earlier measurement, preferably by the current files, or {}
    names = ["figures.json", *(["tasks.json"] if flags.tasks_only else [])]
    saved = [read_json(os.path.join(folder, name)) for name in names]
    return max(saved, key=lambda figures: (figures.get("code") == MEASURING, len(figures)))


def pairs_path(run, pairs):
    return os.path.join(run.folder, f"pairs-{zlib.crc32(repr(pairs).encode()):08x}.json")


def measure_run(run, flags, text, probe, pairs, label):
    """Measures, unless the saved figures are of the current files. Without weights, older figures are kept."""
    def update(saved, path, compute):
        if saved.get("code") != MEASURING and has_weights(run):
            print(f"{label}: measuring {os.path.basename(path)}", flush=True)
            write_json(path, {"code": MEASURING, **compute()})

    def score():
        model, hp, _ = load_run(os.path.join(run.folder, "ckpt.pt"), run.hp.device, "float32")
        points, kind = score_pairs(model, member.objective, hp, pairs, seed=1)
        return {"points": points, "pairs": statistics.fmean(points), "score": kind.partition(",")[0]}
    path = os.path.join(run.folder, "tasks.json" if flags.tasks_only else "figures.json")
    update(read_figures(run.folder, flags), path, lambda: evaluate.measure_run(
        run.folder, run.hp.device, text, probe, flags.tasks_only))
    member = choose_scored(get_members(run.hp))
    if pairs and member:
        update(read_json(pairs_path(run, pairs)), pairs_path(run, pairs), score)


def read_metrics(run, flags, pairs):  # -> {metric: number}, {} if the run diverged
    metrics = read_figures(run.folder, flags)
    return metrics and metrics | read_json(pairs_path(run, pairs))


# ---- tables of rows {name: {seed: metrics}}, where metrics {metric: number} are empty if the run diverged
def values_by_seed(seeds, metric):  # {seed: metrics} -> {seed: number}, of the seeds that have one
    return {seed: metrics[metric] for seed, metrics in seeds.items() if metrics.get(metric) is not None}


def task_of(seeds):  # -> what the own task is, or ""
    return next(iter(values_by_seed(seeds, "task_heading").values()), "")


def find_figure(seeds, metrics):  # -> the first metric that the row has, or what its task is; {seed: number}
    for metric in metrics:
        values = values_by_seed(seeds, metric)
        if values:
            return task_of(seeds) if metric == "task" else metric, values
    return "", {}


def markdown(lines):  # [[heading, ...], [cell, ...], ...] -> str
    lines = [f"| {' | '.join(line)} |" for line in lines]
    lines.insert(1, "|---" * (lines[0].count("|") - 1) + "|")
    return "\n".join(lines) + "\n"


def make_table(rows):  # -> Markdown: a column for each figure that a row has, means ± standard errors
    columns = [["", *rows]]
    for heading, (digits, metrics, mark) in SUMMARY.items():
        cells = []
        for seeds in rows.values():
            kind, values = find_figure(seeds, metrics)
            cell = format_mean(*mean_and_error([*values.values()]), digits) if values else ""
            for baseline in [*values_by_seed(seeds, f"{metrics[0]}_baseline").values()][:1]:
                cell += f" ({baseline:.{digits}f})"
            cells.append(mark + cell if kind in metrics[1:] else cell)
        if any(cells):
            columns.append([heading, *cells])
    seeds_of = [" ".join(f"{seed}" if metrics else f"{seed} diverged" for seed, metrics in sorted(seeds.items()))
                for seeds in rows.values()]
    return markdown([*zip(*columns, ["seeds", *seeds_of])])


def difference(row, baseline, digits, metrics):  # {seed: metrics} each -> mean ± half of its 95% interval, or ""
    """Paired by seed. Subtracts only figures of the same metric and of the same task: no bound from bits."""
    kind, values = find_figure(row, metrics)
    other_kind, others = find_figure(baseline, metrics)
    both = [value - others[seed] for seed, value in values.items() if seed in others and kind == other_kind]
    if len(both) < 2:
        return ""
    mean, error = mean_and_error(both)
    return format_mean(mean, STUDENT_T_975.get(len(both), 2.3) * error, digits, "+")


def difference_table(rows, baseline):  # -> Markdown: each row minus the baseline, or "" without any difference
    others = [name for name in rows if name != baseline and baseline in rows]
    columns = [["", *(f"{name} - {baseline}" for name in others)]]
    for heading, (digits, metrics, _) in SUMMARY.items():
        cells = [difference(rows[name], rows[baseline], digits, metrics) for name in others]
        if any(cells):
            columns.append([heading.partition(" (")[0], *cells])
    lines = [line for line in zip(*columns) if any(line[1:])]
    return markdown(lines) if lines else ""


def pairs_table(rows, baseline):  # -> Markdown: the share of minimal pairs that a row gets right, or ""
    points = {name: {seed: torch.tensor(p).double() for seed, p in values_by_seed(seeds, "points").items()}
              for name, seeds in rows.items()}  # {row: {seed: (N,)}}
    lines = [["", "right pairs", f"minus {baseline}", "score", "seeds"]]
    for name, by_seed in points.items():
        if by_seed:
            b = points.get(baseline, {})
            both = [p - b[seed] for seed, p in by_seed.items() if seed in b]
            minus = format_share(torch.stack(both), "+") if both and name != baseline else ""
            share = format_share(torch.stack([*by_seed.values()]))
            kind = [*values_by_seed(rows[name], "score").values()][0]
            lines.append([name, share, minus, kind, " ".join(map(str, sorted(by_seed)))])
    return markdown(lines) if len(lines) > 1 else ""


def report(budgets, baseline, drawn):  # {steps: {row: {seed: metrics}}}, rows of the picture -> Markdown
    rows = budgets[max(budgets)]
    baseline = baseline or next(iter(rows))
    tasks = {}                                  # {task: {row: None}}
    for name, seeds in rows.items():
        tasks.setdefault(task_of(seeds) or "not measured", {})[name] = None
    own_tasks = "".join(f"- own task of {', '.join(names)}: {heading}\n" for heading, names in tasks.items())
    missing = [name for name in dict.fromkeys(itertools.chain(*budgets.values())) if name not in drawn]
    own_tasks += f"- not in the picture: {', '.join(missing)}\n" if missing else ""
    text = [f"After {max(budgets)} steps: bits per byte of held-out text, lower is better; <= is an upper bound, "
            "left: a hole of which only the left side is read. Means over seeds ± their standard errors. "
            "Without ±, the error is not known: try --seeds 1,2,3 (\"Errors\" in docs/RESULTS.md)\n",
            make_table(rows), own_tasks]
    parts = {"Differences with 95% intervals, paired by seed (Student's t):\n": difference_table(rows, baseline),
             "Minimal pairs: the share whose better text has the higher score (chance: 0.5), ± its standard error "
             "over pairs and seeds; differences are paired by pair and seed:\n": pairs_table(rows, baseline)}
    for steps in sorted(budgets)[:-1]:
        parts[f"After {steps} steps:\n"] = make_table(budgets[steps])
    for title, table in parts.items():
        text += [title, table] if table else []
    return "\n".join(text)


def settings_report(runs):  # -> Markdown: the settings that the rows do not share
    settings = {run.row: read_settings(run.hp) for run in runs}
    flags = [flag for flag in flag_specs() if flag not in RESERVED]
    differing = [flag for flag in flags if len({str(each.get(flag)) for each in settings.values()}) > 1]
    hp = next(iter(runs)).hp
    text = f"Corpus: {' '.join(hp.data)}. Model: {hp.n_layer} layers of width {hp.n_embd}, unless stated below.\n"
    for row, each in settings.items():
        words = [f"{flag} {each[flag]}" for flag in differing if flag in each]
        text += f"- {row}: {', '.join(words)}\n" if words else ""
    return text


def changes_report(runs, flags):  # -> Markdown: the runs that are older than the current files, or ""
    changed = {}                                # {names of files: [folder of a run]}
    for run in runs:
        figures = read_figures(run.folder, flags)
        code = read_json(os.path.join(run.folder, "code.json")) | figures.get("code", {})
        now = run.code | MEASURING if figures else run.code
        files = [file for file, crc in now.items() if code.get(file) != crc]
        if files:
            changed.setdefault(", ".join(files), []).append(os.path.basename(run.folder))
    text = "".join(f"- before {files} changed: {', '.join(folders)}\n" for files, folders in changed.items())
    return text and ("\nTrained or measured with older files, which is harmless if the change was, such as a new "
                     f"objective. To train a run again, delete its folder.\n{text}")


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
    listed = {run.folder: run for run in [*runs, *find_runs(flags, rest, source["crc"])]}.values()
    check_flags(flags, runs, [*dict.fromkeys(run.row for run in listed)], source, pairs)
    probe = evaluate.byte_probe(256) if flags.data == "stdlib" and not flags.tasks_only else None

    # train and measure
    work = [work_left(run, flags) for run in runs]
    seconds = []                                # of training and of evaluation, of each run that is done
    for i, run in enumerate(runs):
        label = f"[{i + 1}/{len(runs)}] {run.row}, {run.hp.max_iters} steps, seed {run.hp.seed}"
        begin = time.perf_counter()
        is_trained = work[i][0] == 0 or train_run(run, label)
        trained = time.perf_counter()
        if is_trained:
            measure_run(run, flags, source["val"], probe, pairs, label)
        seconds.append((trained - begin, time.perf_counter() - trained))
        metrics = read_metrics(run, flags, pairs)
        minutes = minutes_left(work, seconds)
        outcome = f"validation loss {metrics['loss']:.4f} nats" if metrics else "diverged"
        left = f", about {minutes} min left in all" if minutes else ""
        print(f"{label}: {outcome}{left}", flush=True)

    # report
    budgets = {}                                # {steps: {row: {seed: metrics}}}
    for run in listed:
        seeds = budgets.setdefault(run.hp.max_iters, {}).setdefault(run.row, {})
        seeds[run.hp.seed] = read_metrics(run, flags, pairs)
    path = os.path.join(flags.out_dir, f"sweep-{flags.sweep.partition('=')[0]}" if flags.sweep else "compare")
    write_curves(budgets, path + ".csv")
    tasks = {name: task_of(seeds) for name, seeds in budgets[max(budgets)].items()}
    panels = curve_panels(path + ".csv", tasks)
    picture = draw_panels(panels, path + ".png")
    text = report(budgets, flags.baseline, {name for panel in panels for name in panel.lines})
    text += f"\n{settings_report(listed)}{changes_report(listed, flags)}"
    Path(path + ".md").write_text(text, "utf-8")
    print(f"\nwritten: {path}.md, {path}.csv, {picture}\n\n{text}", end="")
    return 0 if any(budgets[run.hp.max_iters][run.row][run.hp.seed] for run in runs) else 1


if __name__ == "__main__":
    run_program(main)
