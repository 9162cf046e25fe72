"""Draw one row of every objective, as the functions that make the batches lay it out, into assets/rows.png:

    pip install matplotlib && python assets/rows.py
"""
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
from data import EOT, MASK, NAMES, PRE, from_bytes, generator  # noqa: E402
from model import Sizes, allow  # noqa: E402
from objectives import IGNORE, OBJECTIVES, electra_fakes, find_objective  # noqa: E402
from run import get_config  # noqa: E402
import matplotlib  # noqa: E402
import torch  # noqa: E402

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

T = 32
TEXT = b"if cat.sat(mat):\n    cat.nap()\nelse: cat.walk(home)\nreturn cat, mat, home\n"
READ, ASKED, SPECIAL, LABEL = "#dde8f5", "#f9e3c8", "#c9b6e4", "#cfe8cf"
LEGEND = [(READ, "read"), (ASKED, "asked for (loss)"), (SPECIAL, "special id"), (LABEL, "label, where it is read"),
          ("white", "no loss")]


def lines_of(name, batch, b, hp):  # -> [(title, ids, colour)] of row b
    inp = batch["inp"][b].reshape(-1)
    if name == "electra":
        torch.manual_seed(1)
        generator_ = OBJECTIVES[name]["heads"](Sizes(1, 4, 64), hp)["generator"]
        _, clean, fake = electra_fakes(generator_, batch)
        fake = 97 + fake % 26                   # an untrained generator writes anything: shown as letters
        seen = batch["inp"].scatter(1, batch["masked"], fake)[b]
        label = torch.zeros_like(inp).scatter(0, batch["masked"][b], (fake != clean).long()[b])
        return [("inp", inp, READ), ("tgt", batch["tgt"][b], ASKED), ("fake", seen, READ), ("label", 48 + label, LABEL)]
    out = [("inp", inp, READ)]
    if "tgt" in batch:
        out.append(("tgt", batch["tgt"][b], ASKED))
    for k in range(batch["tgt_far"].size(2) if "tgt_far" in batch else 0):
        out.append((f"tgt {k + 2}", batch["tgt_far"][b, :, k], ASKED))
    if "labels" in batch:                       # nsp's is read at CLS, rotation's names a position
        at = int(batch["labels"][b]) if name == "rotation" else 0
        label = torch.full_like(inp, IGNORE)
        label[at] = ord("1") if name == "rotation" else 48 + int(batch["labels"][b])
        out.append(("label", label, LABEL))
    return out


def draw_cell(axis, x, y, i, colour):
    fill = "white" if i == IGNORE else SPECIAL if i > 255 or i == EOT else colour
    axis.add_patch(plt.Rectangle((x, -y), 1, 1, fc=fill, ec="#cccccc", lw=0.5))
    if i == IGNORE:
        return
    text = NAMES[i].strip("<>").replace("extra_id_", "") if i in NAMES else {10: "\\n", 32: " "}.get(i, chr(i))
    if i not in NAMES and i != 10 and not 32 <= i < 127:        # a byte that cannot be drawn
        axis.add_patch(plt.Rectangle((x + 0.3, 0.25 - y), 0.4, 0.5, fc="none", ec="black", lw=0.7))
        return
    axis.text(x + 0.5, 0.5 - y, text, ha="center", va="center", fontsize=7 if len(text) < 2 else 5,
              family="DejaVu Sans Mono")


def rows_of(name):  # -> [(lines, prefix, width of the mask)], entry
    argv = ["--objective", name, "--device", "cpu", "--block_size", str(T), "--batch_size", "4"]
    hp = get_config(argv + ["--span_mean", "3"] * (name in ("span", "ul2")))        # more than one in so short a row
    entry, B = find_objective(hp), 4
    batch = entry["make"](from_bytes(TEXT[:entry["n"]]).long().expand(B, -1), generator("rows"), hp)
    telling = dict(hybrid=[3, 0], prefix=[2], fim=[b for b in range(B) if PRE in batch["inp"][b].tolist()][:1],
                   rotation=[b for b in range(B) if batch.get("labels", batch["inp"])[b].sum() > 0][:1])
    out = []
    for b in telling.get(name, [0]):
        P = batch["mask"]
        P = {"causal": 0, "bidirectional": T}[P] if isinstance(P, str) else int(P[b])
        out.append((lines_of(name, batch, b, hp), P, batch["inp"].size(-1)))
    return out, entry


def main():
    assert MASK in NAMES
    found = [(name, entry, row) for name in OBJECTIVES for rows, entry in [rows_of(name)] for row in rows]
    heights = [len(lines) + 0.9 for _, _, (lines, _, _) in found]
    figure, axes = plt.subplots(len(found), 2, figsize=(11, 0.3 * sum(heights)), width_ratios=[12, 1],
                                height_ratios=heights)
    before = None
    for (name, entry, (lines, P, width)), (row, grid) in zip(found, axes):
        for y, (title, ids, colour) in enumerate(lines):
            row.text(-0.4, 0.5 - y, title, ha="right", va="center", fontsize=6)
            for x, i in enumerate(ids.tolist()):
                draw_cell(row, x, y, i, colour)
        if width < len(lines[0][1]):            # two crops of one window
            row.plot([width, width], [1 - len(lines), 1], color="black", lw=2)
        row.set(xlim=(-2.5, T), ylim=(1 - len(lines), 1))
        title = f"{name}: {entry['help']}" if name != before else f"{name}: the other kind of row"
        row.set_title(title, fontsize=8, loc="left", pad=2)
        at = torch.arange(width)
        grid.imshow(allow(at[:, None], at, P), cmap="Blues", vmin=0, vmax=1.5, interpolation="nearest")
        for axis in (row, grid):
            axis.axis("off")
        before = name
    handles = [plt.Rectangle((0, 0), 1, 1, fc=colour, ec="#cccccc") for colour, _ in LEGEND]
    figure.legend(handles, [words for _, words in LEGEND], loc="upper center", ncol=len(LEGEND), fontsize=7,
                  frameon=False, title="at the right: who (down) sees whom (across)", title_fontsize=7)
    figure.tight_layout(h_pad=0.3, rect=(0, 0, 1, 1 - 1.2 / (sum(heights))))
    figure.savefig(os.path.join(HERE, "rows.png"), dpi=110)


main()
