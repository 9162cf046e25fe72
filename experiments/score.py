"""How many bits per byte does a trained model need for a text?

    python -m experiments.score --file book.txt                     the latest run under out/
    python -m experiments.score --file book.txt --out_dir out/mdlm --seed 2
    python -m experiments.score --file book.txt --out_dir out/clm_.5+mlm_.5 --objective mlm

The number of bits is exact for models that write from left to right, and for models that fill MASKs when they fill them
from left to right. For diffusion an upper bound is printed too. The standard library's compressors are printed for
comparison. All models read across the ends of documents, even if they were trained with --doc_mask.

n bytes, T = block_size positions of the model, V outputs of the byte head
"""
import math

from data import MASK, Flag, fail, from_bytes, make_rng
from experiments.flags import parse_own_flags
import sample
from objectives import N_BYTES, OBJECTIVES, add_weights, find_use
from run import DEVICE_FLAGS, get_members, load_run, newest_run, run_program
from train import compressor_bits
import torch
import torch.nn.functional as F
from tqdm import tqdm

FLAGS = {
    "file": Flag("", "file to score"),
    "out_dir": Flag("", "run folder or checkpoint file of the model; without it the latest run under out/"),
    "objective": Flag("", "member of a mixture to use; without it the first that defines a probability of a text"),
    "seed": Flag(1, "random seed of the masks for an upper bound", 0, 2 ** 31),
    "device": DEVICE_FLAGS["device"],
    "dtype": Flag("float32", DEVICE_FLAGS["dtype"].help, choices=DEVICE_FLAGS["dtype"].choices),
}
MAX_ROWS = 64                                   # maximum number of rows of a forward pass
FILLED_BYTES = 8192                             # maximum number of bytes to score by filling: one row for each byte
BOUND_GROUPS = 4                                # number of batches for the bound of a window
BOUND_ROWS = 4                                  # number of rows of such a batch


@torch.inference_mode()
def score_exact(model, data, T, stride):  # (n,) uint8 -> bits, left to right
    """Scores a text in windows. A window scores `stride` bytes, and holds up to T bytes before its last byte. For T = 4
    and stride = 2, these are the windows of a text of 8 bytes, with the scored bytes in brackets:

        0 [1 2]     0 1 2 [3 4]     2 3 4 [5 6]     4 5 6 [7]

    With stride = T, the first byte that a window scores has one byte of context. The first byte of the text counts as 8
    bits."""
    bits = 8.0
    for first in tqdm(range(1, len(data), stride), disable=None, leave=False):      # first: the first scored byte
        end = first + stride
        start = max(0, end - 1 - T)
        x = data[start:end].long().to(model.embed.weight.device)[None]              # (1, n + 1)
        logits = model.logits(model(x[:, :-1], 0))[0, :, :N_BYTES]                  # (n, 256)
        nats = F.cross_entropy(logits, x[0, 1:], reduction="none")                  # (n,), of bytes start + 1 and on
        bits += float(nats[first - start - 1:].cpu().double().sum()) / math.log(2)
    return bits


@torch.inference_mode()
def score_by_filling(model, data, T, use):  # (n,) uint8, a Fill -> bits, left to right
    """Scores a text with a model that fills MASKs, by the chain rule: predicts each byte from the bytes before it in
    its window, while it and all bytes after it are MASKs. A window holds up to T bytes and scores the last T / 2 of
    them, so that every byte has at least T / 2 bytes of context, except at the start of the text. For T = 4, these are
    the windows of a text of 8 bytes, with the scored bytes in brackets:

        0 [1 2]     1 2 [3 4]     3 4 [5 6]     4 5 6 [7]

    The first byte of the text counts as 8 bits."""
    bits = 8.0
    for first in tqdm(range(1, len(data), T // 2), disable=None, leave=False):      # first: the first scored byte
        end = min(first + T // 2, len(data))
        start = max(0, end - T)
        window = data[start:end].long().to(model.embed.weight.device)
        i = torch.arange(len(window), device=window.device)
        for scored in i[first - start:].split(MAX_ROWS):        # indices in the window; one row for each
            rows = window.where(i < scored[:, None], MASK)
            logits = sample.fill_logits(model, rows, use)[range(len(rows)), scored, :N_BYTES]
            nats = F.cross_entropy(logits.cpu().double(), window[scored].cpu(), reduction="sum")
            bits += float(nats) / math.log(2)
    return bits


@torch.inference_mode()
def score_bound(model, objective, data, hp, seed):  # (n,) uint8 -> upper bound in bits, its standard error
    """Adds up the objective's bound over disjoint windows. The bound of a window is the mean over BOUND_GROUPS batches,
    each of which corrupts BOUND_ROWS copies of the window; the numbers of masked bytes in the rows of a batch are
    stratified. The bounds of the windows are summed; the standard error is that of the sum."""
    g = make_rng(f"{seed},bound", hp.device)
    bits = 0.0
    variance = 0.0
    for x in tqdm(data.split(objective.n_bytes(hp.block_size, hp)), disable=None, leave=False):
        x = x.long().to(hp.device).expand(BOUND_ROWS, -1)
        means = []
        for _ in range(BOUND_GROUPS):
            batch = add_weights(objective.corrupt(x, g, hp))
            nats, _ = objective.loss(model, batch, hp)          # per byte
            means.append(float(nats) * x.size(1) / math.log(2))
        means = torch.tensor(means, dtype=torch.double)
        bits += float(means.mean())
        variance += float(means.var()) / BOUND_GROUPS
    return bits, variance ** 0.5


def has_probability(objective):  # does the objective define a probability of a text?
    return bool(objective.bpb or find_use(objective, "fill"))


def print_bits(bits, n, kind):
    print(f"{bits / n:.4f} bits per byte ({bits / n * math.log(2):.4f} nats), {kind}", flush=True)


def main(argv=None):  # -> exit code
    flags = parse_own_flags("python -m experiments.score", __doc__, FLAGS, argv)
    if not flags.file:
        fail("--file: is missing. Try --file book.txt")
    try:
        with open(flags.file, "rb") as f:
            data = from_bytes(f.read())
    except (OSError, ValueError) as e:          # ValueError: a path with a NUL in it
        fail(f"--file {flags.file}: cannot be read ({e}). Try another file")
    if not len(data):
        fail(f"--file {flags.file}: is empty. Try another file")
    path = flags.out_dir or newest_run()
    model, hp, ckpt = load_run(path, flags.device, flags.dtype)
    members = sample.choose_members(hp, flags.objective)
    m = next((m for m in members if has_probability(m.objective)), members[0])
    objective = m.objective
    if not has_probability(objective):
        able = ", ".join(name for name, other in OBJECTIVES.items() if has_probability(other))
        fail(f"--out_dir {path}: {objective.name} defines no probability of a text. Try a run of one of {able}")
    member = f", used as {objective.name}" if len(get_members(hp)) > 1 else ""
    sample.note(f"{ckpt['path']}: {hp.objective}{member}, step {ckpt['step']} of {hp.max_iters}")
    print(f"{len(data):,} bytes; compressors: {compressor_bits(data)}")
    T = hp.block_size
    if objective.bpb == "bound":
        bits, error = score_bound(model, objective, data, hp, flags.seed)
        print_bits(bits, len(data), f"{objective.name}'s upper bound, standard error {error / len(data):.4f}")
    elif objective.bpb:
        bits = score_exact(model, data, T, T // 2)
        print_bits(bits, len(data), f"left to right, windows of {T}, stride {T // 2}")
    fill = find_use(objective, "fill")
    if fill:
        size = sample.text_space(fill, T)
        data = data[:FILLED_BYTES]
        bits = score_by_filling(model, data, size, fill)
        print_bits(bits, len(data), f"left to right by filling MASKs, the first {len(data):,} bytes, "
                                    f"windows of {size}, stride {size // 2}")
    return 0


if __name__ == "__main__":
    run_program(main)
