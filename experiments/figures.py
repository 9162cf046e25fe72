"""Draw a row of every objective, as the functions that make the batches lay it out:

    pip install matplotlib && python -m experiments.figures

B rows, T positions
"""
from dataclasses import dataclass

# isort: off  data silences a warning of torch's, and so comes before it
from data import EOT, ID_NAMES, MASK, PAD, SENTINEL, Flag, error_reason, fail, from_bytes, make_rng
from experiments.flags import parse_own_flags
from model import can_attend
from objectives import IGNORE_INDEX, OBJECTIVES, get_objective
from run import get_config, run_program
import torch

FLAGS = {"out": Flag("assets/rows.png", "file to draw into")}
T = 32
B = 8
TEXT = b"if cat.sat(mat):\n    cat.nap()\nelse: cat.walk(home)\nreturn cat, mat, home\n"
READ, TARGET, SPECIAL, LABEL, NO_LOSS = "#dde8f5", "#f9e3c8", "#c9b6e4", "#cfe8cf", "white"
COLORS = {READ: "input", TARGET: "target", SPECIAL: "special id", LABEL: "label, a number for the row",
          NO_LOSS: "no loss"}
# what stands in a cell, where it is not the byte itself
SIGNS = {
    "MASK": "hides a byte", "CLS": "where a row is classified", "SEP": "ends a text", "EOT": "end of a document",
    "PRE": "starts a prefix", "SUF": "a suffix", "MID": "a middle", "PAD": "fills the row", "R": "short spans",
    "S": "a suffix follows", "X": "long spans", "0 1 2": "sentinels, one for each span",
    "␣": "space", "\\n": "newline", "x9f": "a byte without a character",
}
TARGETS = ("tgt", "future_tgt")                 # keys of a batch that hold targets


@dataclass
class Line:
    """A line of cells: one tensor of a row of the batch."""
    title: str
    ids: list
    color: str
    is_number: bool = False                     # labels are numbers, not ids


@dataclass
class Row:
    """A row of a batch, as it is drawn."""
    name: str
    title: str
    lines: list
    prefix: int
    width: int                                  # positions that attend to each other
    mask: object = None                         # (T, T) bool where the batch has one in place of the prefix


def sign(i):  # id -> what stands in its cell
    if i >= SENTINEL:
        return str(i - SENTINEL)
    if i in ID_NAMES:
        return ID_NAMES[i].strip("<>")
    if i == ord("\n"):
        return "\\n"
    if i == ord(" "):
        return "␣"
    return chr(i) if 32 < i < 127 else f"x{i:02x}"


def sign_in_legend(i):  # id -> the sign that stands for it in the legend, or None for a printable byte
    if i >= SENTINEL:
        return "0 1 2"
    if i in ID_NAMES or sign(i) in SIGNS:
        return sign(i)
    return "x9f" if len(sign(i)) > 1 else None


def lines_of(batch, b):  # -> [Line] of row b
    inp = batch["inp"][b].reshape(-1).tolist()
    lines = [Line("inp", inp, READ)]
    for key in TARGETS:
        if key not in batch:
            continue
        tgt = batch[key][b].reshape(len(inp), -1)                                   # (T, 1), or (T, n - 1)
        for k in range(tgt.size(1)):
            title = key if tgt.size(1) == 1 else f"{key} {k}"
            lines.append(Line(title, tgt[:, k].tolist(), TARGET))
    if "labels" in batch:
        lines.append(Line("label", batch["labels"][b].reshape(-1).tolist(), LABEL, is_number=True))
    return lines


def prefix_of(batch, b):
    return batch["prefix"] if isinstance(batch["prefix"], int) else int(batch["prefix"][b])


def kind_of(batch, b):  # -> the kind of attention, the control id that the row starts with or None
    """Rows of one kind look alike: one of each is drawn."""
    P = prefix_of(batch, b)
    width = batch["inp"].size(-1)
    attention = "prefix"
    if P in (0, width):
        attention = "causal" if P == 0 else "bidirectional"
    first = int(batch["inp"][b].flatten()[0])
    return attention, first if MASK < first < SENTINEL else None


def interest(batch, b):  # -> what is larger for a row that shows more
    """Kinds of special ids, a label that is not 0, a prefix near the middle, few PAD."""
    ids = batch["inp"][b].flatten()
    n_special = len({i for i in ids.tolist() if i >= PAD or i == EOT} - {PAD})
    has_label = "labels" in batch and bool(batch["labels"][b].any())
    P = prefix_of(batch, b)
    return n_special, has_label, min(P, len(ids) - P), -int((ids == PAD).sum())


def rows_of(name):  # -> [Row]: one of each kind, the one with most special ids first
    argv = ["--objective", name, "--device", "cpu", "--block_size", str(T), "--batch_size", str(B)]
    if "span_mean" in OBJECTIVES[name].flags:   # more than one span in so short a row
        argv += ["--span_mean", "3"]
    hp = get_config(argv)
    objective = get_objective(hp)
    x = from_bytes(TEXT[:objective.n_bytes(T, hp)]).long().expand(B, -1)
    batch = objective.corrupt(x, make_rng("rows"), hp)
    best = {}                                   # {kind: row}
    for b in range(B):
        kind = kind_of(batch, b)
        if kind not in best or interest(batch, b) > interest(batch, best[kind]):
            best[kind] = b
    rows = []
    for b in sorted(best.values(), key=lambda b: interest(batch, b), reverse=True):
        title = f"{name}, another kind of row" if rows else f"{name}: {objective.help}"
        mask = batch["mask"][b] if "mask" in batch else None
        rows.append(Row(name, title, lines_of(batch, b), prefix_of(batch, b), batch["inp"].size(-1), mask))
    return rows


# ---- drawing

def cell(line, i):  # -> its text, its color
    if line.is_number:
        return str(i), line.color
    if i == IGNORE_INDEX:
        return "", NO_LOSS
    return sign(i), SPECIAL if i >= PAD or i == EOT else line.color


def draw_row(axis, row, rectangle):
    for y, line in enumerate(row.lines):
        axis.text(-0.4, 0.5 - y, line.title, ha="right", va="center", fontsize=6)
        for x, i in enumerate(line.ids):
            text, color = cell(line, i)
            axis.add_patch(rectangle((x, -y), 1, 1, fc=color, ec="#cccccc", lw=0.5))
            size = 7 if len(text) < 2 else 5
            axis.text(x + 0.5, 0.5 - y, text, ha="center", va="center", fontsize=size, family="DejaVu Sans Mono")
    n = len(row.lines[0].ids)
    for x in range(row.width, n, row.width):    # several texts in one row, which do not attend to each other
        axis.plot([x, x], [1 - len(row.lines), 1], color="black", lw=2)
    axis.set(xlim=(-4, T), ylim=(1 - len(row.lines), 1))
    axis.set_title(row.title, fontsize=8, loc="left", pad=2)


def draw_mask(axis, row):
    i = torch.arange(row.width)
    mask = can_attend(i[:, None], i, row.prefix) if row.mask is None else row.mask
    axis.imshow(mask.tolist(), cmap="Blues", vmin=0, vmax=1.5, interpolation="nearest")


def legend_texts(rows):  # -> lines of text that name every sign in the rows
    found = set()
    for row in rows:
        for line in row.lines:
            if not line.is_number:
                found |= {sign_in_legend(i) for i in line.ids if i != IGNORE_INDEX}
    words = [f"{text}: {meaning}" for text, meaning in SIGNS.items() if text in found]
    half = (len(words) + 1) // 2
    return ["   ".join(words[:half]), "   ".join(words[half:]),
            "black line: two texts that do not attend to each other   at the right: which position (down) attends to "
            "which (across)"]


def draw(rows, path):
    try:
        import matplotlib
    except ImportError:
        fail("matplotlib is not installed. Try: pip install matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot
    heights = [len(row.lines) + 0.9 for row in rows]
    head = 3.2                                  # the legend
    figure, axes = pyplot.subplots(len(rows), 2, figsize=(11, 0.3 * (sum(heights) + head)), width_ratios=[12, 1],
                                   height_ratios=heights)
    for row, (left, right) in zip(rows, axes):
        draw_row(left, row, pyplot.Rectangle)
        draw_mask(right, row)
        left.axis("off")
        right.axis("off")
    handles = [pyplot.Rectangle((0, 0), 1, 1, fc=color, ec="#cccccc") for color in COLORS]
    figure.legend(handles, COLORS.values(), loc="upper center", ncol=len(COLORS), fontsize=7, frameon=False)
    share = 0.3 / figure.get_figheight()        # of a line of the legend
    for k, text in enumerate(legend_texts(rows)):
        figure.text(0.5, 1 - share * (1.2 + 0.55 * k), text, ha="center", va="top", fontsize=6.5)
    figure.tight_layout(h_pad=0.3, rect=(0, 0, 1, 1 - share * head))
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as e:          # ValueError: no such format
        fail(f"--out {path}: cannot be written ({error_reason(e)}). Try another folder, or a name that ends with .png")
    pyplot.close(figure)


def main(argv=None):
    flags = parse_own_flags("python -m experiments.figures", __doc__, FLAGS, argv)
    draw([row for name in OBJECTIVES for row in rows_of(name)], flags.out)
    print(flags.out)
    return 0


if __name__ == "__main__":
    run_program(main)
