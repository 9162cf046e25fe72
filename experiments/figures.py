"""Draw the pictures of the pages: training rows, and results.

    pip install matplotlib && python -m experiments.figures         a row of every objective, and who attends to whom
    python -m experiments.figures --objectives clm,mlm,span,mdlm --columns 15 --out docs/rows-short.png
    python -m experiments.figures --objectives clm,hybrid,mlm --curves out/compare/compare.csv --out holes.png

The rows are made by the objectives' own code. --curves draws bits per byte over the length of a hole.
"""
import csv
import itertools
import statistics
import textwrap
from collections import namedtuple

from data import EOT, MASK, PAD, SENTINEL, Flag, fail, from_bytes, make_rng
from experiments.common import parse_own_flags
from experiments.evaluate import HOLE_LENGTHS
from model import can_attend
from objectives import IGNORE_INDEX, OBJECTIVES
from run import explain_symbols, get_config, get_members, run_program, to_symbol
import torch

T = 32
FLAGS = {
    "out": Flag("docs/rows.png", "file to draw into"),
    "objectives": Flag("", "separated by commas; without it all"),
    "columns": Flag(T, "positions of a row; with fewer, the letters are larger, and the legend is shorter", 8, 64),
    "curves": Flag("", "curves.csv of compare"),
    "steps": Flag(1000, "with --curves: steps of the runs"),
    "labels": Flag("", "with --curves: what the picture calls the objectives, separated by commas"),
    "title": Flag("bytes in a hole", "with --curves: of the picture"),
}
B = 8
TEXT = b"if cat.sat(mat):\n    cat.nap()\nelse: cat.walk(home)\nreturn cat, mat, home\n"
READ, TARGET, SPECIAL, LABEL, NO_LOSS = "#dde8f5", "#f9e3c8", "#c9b6e4", "#cfe8cf", "white"
COLORS = {READ: "input", TARGET: "target", SPECIAL: "special id", LABEL: "label, a number for the row",
          NO_LOSS: "no loss"}
MORE_COLORS = "gold", "darkviolet", "lime", "navy", "black", "silver", "darkgreen"          # after the ten of tab10
CIRCLED = "STIXGeneral"                         # the only font of matplotlib with letters in circles
# lines: list of (title, cells, color); a cell is an id, or the text of a label. mask (T, T): who attends to whom
Row = namedtuple("Row", "title lines mask")


def prefix_of(batch, b):
    return int(torch.as_tensor(batch["prefix"]).expand(B)[b])


def attention_of(batch, b):  # -> (T, T) bool
    q = torch.arange(batch["inp"].size(-1))
    return batch["mask"][b] if "mask" in batch else can_attend(q[:, None], q, prefix_of(batch, b))


def lines_of(batch, b):  # -> [(title, cells, color)]
    inp = batch["inp"][b].flatten().tolist()
    lines = [("inp", inp, READ)]
    for key in ("tgt", "future_tgt"):
        if key in batch:
            tgt = batch[key][b].reshape(len(inp), -1)                               # (T, 1), or (T, n - 1)
            for k, ids in enumerate(tgt.unbind(1)):
                lines.append((key if tgt.size(1) == 1 else f"{key} {k}", ids.tolist(), TARGET))
    if "labels" in batch:
        lines.append(("label", [str(i) for i in batch["labels"][b].flatten().tolist()], LABEL))
    return lines


def kind_of(batch, b):  # -> the kind of attention, and the mode or CLS that the row starts with, or None
    attention = {0: "causal", batch["inp"].size(-1): "bidirectional"}.get(prefix_of(batch, b), "prefix LM")
    first = int(batch["inp"][b].flatten()[0])
    return attention, first if MASK < first < SENTINEL else None


def interest(batch, b):  # -> a tuple: more different special ids are better, then a label other than 0, then fewer PADs
    ids = batch["inp"][b].flatten()
    special = {i for i in ids.tolist() if i >= PAD or i == EOT} - {PAD}
    has_label = "labels" in batch and bool(batch["labels"][b].any())
    return len(special), has_label, -int((ids == PAD).sum())


def rows_of(name, T=T):  # -> [Row]: one of each kind, the most interesting first
    argv = ["--objective", name, "--device", "cpu", "--batch_size", str(B)]
    if "span_mean" in OBJECTIVES[name].flags:   # short spans, so that a row of 32 has several
        argv += ["--span_mean", "3"]
    hp = get_config(argv)
    hp.block_size = T
    [member] = get_members(hp)
    x = from_bytes(TEXT[:member.n]).long().expand(B, -1)
    batch = member.objective.corrupt(x, make_rng("rows"), hp)
    kinds = {}                                  # {kind: number of its row}
    for b in sorted(range(B), key=lambda b: interest(batch, b), reverse=True):
        kinds.setdefault(kind_of(batch, b), b)
    rows = []
    for b in kinds.values():
        title = f"{name}, another kind of row" if rows else f"{name}: {member.objective.help}"
        rows.append(Row(title, lines_of(batch, b), attention_of(batch, b)))
    return rows


# ---- drawing
def cell(i, color):  # an id or the text of a label -> its text, its color
    if isinstance(i, str):
        return i, color
    if i == IGNORE_INDEX:
        return "", NO_LOSS
    return to_symbol(i).replace(" ", "␣"), SPECIAL if i >= PAD or i == EOT else color


def legend_texts(rows, is_short=False):  # -> lines of text that explain every symbol in the rows; only one if short
    symbols = "".join(cell(i, color)[0] for row in rows for _, ids, color in row.lines for i in ids)
    text = f"{explain_symbols(symbols)}, ␣ space".replace(",", "  ")
    if is_short:
        return [text]
    last = "at the right: which position (down) attends to which (across)"
    if any(len(row.lines[0][1]) > len(row.mask) for row in rows):
        last = "black line: two texts that do not attend to each other   " + last
    return [*textwrap.wrap(text, 110), last]


def draw_row(axis, row, rectangle, columns, size):  # size: of letters, in points
    for y, (title, ids, color) in enumerate(row.lines):
        axis.text(-0.4, 0.5 - y, title, ha="right", va="center", fontsize=0.8 * size)
        for x, i in enumerate(ids):
            text, its_color = cell(i, color)
            axis.add_patch(rectangle((x, -y), 1, 1, fc=its_color, ec="#cccccc", lw=0.5))
            axis.text(x + 0.5, 0.5 - y, text, ha="center", va="center", fontsize=size if text.isascii() else size + 2,
                      family=["DejaVu Sans Mono", "DejaVu Sans", CIRCLED])
    for x in range(len(row.mask), len(row.lines[0][1]), len(row.mask)):             # between two contrastive texts
        axis.plot([x, x], [1 - len(row.lines), 1], color="black", lw=2)
    axis.set(xlim=(-columns / 8, columns), ylim=(1 - len(row.lines), 1))
    axis.set_title(row.title, fontsize=size, loc="left", pad=2)


def draw(rows, path, columns=T):
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError:
        fail("matplotlib is not installed. Try: pip install matplotlib")
    is_short = columns < T
    width, size, gap, head = (7, 13, 1.4, 1.9) if is_short else (11, 8, 0.9, 3.2)   # size: points; gap, head: lines
    heights = [len(row.lines) + gap for row in rows]
    figure = Figure((width, 0.3 * (sum(heights) + head)))
    axes = figure.subplots(len(rows), 2, squeeze=False, width_ratios=[10 if is_short else 12, 1], height_ratios=heights)
    for row, (left, right) in zip(rows, axes):
        draw_row(left, row, Rectangle, columns, size)
        right.imshow(row.mask.tolist(), cmap="Blues", vmin=0, vmax=1.5, interpolation="nearest")
        left.axis("off")
        right.axis("off")
    axes[0][1].set_title("attention" if is_short else "", fontsize=size - 3, pad=2)
    used = {cell(i, color)[1] for row in rows for _, ids, color in row.lines for i in ids}
    names = {color: name for color, name in COLORS.items() if color in used}
    figure.legend([Rectangle((0, 0), 1, 1, fc=color, ec="#cccccc") for color in names], names.values(),
                  loc="upper center", ncol=len(names), fontsize=size - 1, frameon=False)
    share = 0.3 / figure.get_figheight()        # height of a line, as a share of the figure
    for k, text in enumerate(legend_texts(rows, is_short)):
        figure.text(0.5, 1 - share * (1.2 + 0.55 * k), text, ha="center", va="top", fontsize=size - 1.5,
                    family=["DejaVu Sans", CIRCLED])
    figure.tight_layout(h_pad=0.3, rect=(0, 0, 1, 1 - share * head))
    figure.savefig(path, dpi=1000 / width if is_short else 110)


# ---- results: pictures of a curves.csv, which compare writes
# xs: below the horizontal axis; lines: {row: {x: [number of each seed]}}; dashed: some of the rows; marks: {x: number}
Panel = namedtuple("Panel", "title xlabel ylabel xs lines dashed marks")


def read_curves(path):  # -> {(row, steps, metric): [number of each seed]}
    curves = {}
    with open(path, encoding="utf-8", newline="") as f:
        for name, steps, _, metric, value in [*csv.reader(f)][1:]:
            curves.setdefault((name, int(steps), metric), []).append(float(value))
    return curves


def bits_panel(curves, title, xlabel, points):  # points: {x: (steps, metric, metric of rows without the first one)}
    lines = {}
    dashed = set()                              # rows that are drawn by the second metric
    for name in dict.fromkeys(name for name, *_ in curves):
        for x, (steps, *metrics) in points.items():
            found = [metric for metric in metrics if (name, steps, metric) in curves]
            if found:
                lines.setdefault(name, {})[x] = curves[name, steps, found[0]]
                if found[0] != metrics[0]:
                    dashed.add(name)
    return Panel(f"{title} (lower is better)", xlabel, "bits/byte", [*points], lines, dashed, {})


def holes_panel(curves, steps, title):
    points = {m: (steps, f"infill_{m}", f"left_{m}") for m in HOLE_LENGTHS}
    return bits_panel(curves, title, "bytes in the hole (dashed: only the left side is read)", points)


def tasks_panel(curves, steps, tasks):  # tasks: {row: what its own task is}. Those in bits are left to the other panels
    lines = {}
    marks = {}
    for name, task in tasks.items():
        if task and not task.startswith("bits"):
            x = name if task.startswith("share") else f"{name}\n(lower is better)"   # as an edit distance
            lines[name] = {x: curves[name, steps, "task"]}
            marks[x] = statistics.fmean(curves[name, steps, "task_baseline"])
    return Panel(f"own tasks, {steps} steps (x: baseline)", "", "share", [*marks], lines, set(), marks)


def curve_panels(path, tasks):  # of compare's .csv -> [Panel] of all rows
    curves = read_curves(path)
    budgets = sorted({steps for _, steps, _ in curves}) or [0]
    points = {steps: (steps, "left_to_right", "bound") for steps in budgets}
    panels = [bits_panel(curves, "left to right", "steps (dashed: upper bounds)", points),
              holes_panel(curves, budgets[-1], f"holes, {budgets[-1]} steps"),
              tasks_panel(curves, budgets[-1], tasks)]
    return [panel for panel in panels if panel.lines]


def draw_panels(panels, path, labels=None, size=(5, 4.2), font=9):  # -> path, or the reason why there is no picture
    try:
        from matplotlib import colormaps, rc_context  # imported here because it is optional
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: pip install matplotlib, and the next run draws it"
    if not panels:
        return "no picture: there is nothing to draw"
    # an objective has the same color in every picture, and other rows have the next ones
    rows = [*dict.fromkeys([*OBJECTIVES, *(row for panel in panels for row in panel.lines)])]
    colors = dict(zip(rows, itertools.cycle([*colormaps["tab10"].colors, *MORE_COLORS, *colormaps["tab20b"].colors])))
    with rc_context({"font.size": font, "axes.titlesize": "medium"}):
        figure = Figure((size[0] * len(panels), size[1]), layout="constrained")
        handles = {}                            # {row: its line}
        for axis, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
            for row, line in panel.lines.items():
                places = [panel.xs.index(x) for x in line]
                means = [*map(statistics.fmean, line.values())]
                [handles[row]] = axis.plot(places, means, "--_" if row in panel.dashed else "-_", color=colors[row],
                                           lw=font / 6, ms=font)
                dots = [(place, value) for place, values in zip(places, line.values()) for value in values]
                axis.scatter(*zip(*dots), s=1.5 * font, alpha=0.7, linewidths=0, color=colors[row])     # seeds
            axis.scatter([*map(panel.xs.index, panel.marks)], panel.marks.values(), s=2 * font, marker="x", color="k")
            axis.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel, xlim=(-0.5, len(panel.xs) - 0.5))
            axis.set_xticks(range(len(panel.xs)), panel.xs, rotation=90 if panel.marks else 0)
            axis.grid(alpha=0.3)
        drawn = [row for row in rows if row in handles]
        figure.legend([handles[row] for row in drawn], [(labels or {}).get(row, row) for row in drawn],
                      loc="outside right upper")
        figure.savefig(path, dpi=100)
    return path


def main(argv=None):  # -> exit code
    flags = parse_own_flags("python -m experiments.figures", __doc__, FLAGS, argv)
    names = flags.objectives.split(",") if flags.objectives else list(OBJECTIVES)
    if not set(names) <= set(OBJECTIVES):
        fail(f"--objectives {flags.objectives}: has an unknown name. Try some of {','.join(OBJECTIVES)}")
    if flags.labels and len(flags.labels.split(",")) != len(names):
        fail(f"--labels {flags.labels}: must have a label for each of {','.join(names)}")
    try:
        if flags.curves:
            labels = dict(zip(names, flags.labels.split(",") if flags.labels else names))
            curves = {key: values for key, values in read_curves(flags.curves).items() if key[0] in names}
            panel = holes_panel(curves, flags.steps, flags.title)
            if not panel.lines:
                fail(f"--curves {flags.curves}: has no such holes after {flags.steps} steps. Try another --steps")
            flags.out = draw_panels([panel], flags.out, labels, (10, 4.4), font=15)
        else:
            draw([row for name in names for row in rows_of(name, flags.columns)], flags.out, flags.columns)
    except (OSError, ValueError) as e:          # ValueError: unknown format
        fail(f"--out {flags.out}: cannot be drawn ({e}). Try another folder, a name with .png, or compare's .csv")
    print(flags.out)
    return 0


if __name__ == "__main__":
    run_program(main)
