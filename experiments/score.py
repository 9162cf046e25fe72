"""How many bits per byte does a trained model need for a text?

    python -m experiments.score --file book.txt                     the latest run under out/, its latest weights
    python -m experiments.score --file book.txt --out_dir out/mdlm --seed 2
    python -m experiments.score --file book.txt --out_dir out/clm_.5+mlm_.5 --objective mlm
    python -m experiments.score --pairs blimp.jsonl                 minimal pairs: is the better text more probable?

The number of bits is exact for models that write from left to right, and for models that fill MASKs when they fill them
from left to right. For diffusion an upper bound is printed too. The standard library's compressors are printed for
comparison. All models read across the ends of documents, even if they were trained with --doc_mask.

--pairs reads BLiMP's .jsonl (sentence_good, sentence_bad, UID; Warstadt et al. 2020), or lines of two texts, the better
one first, with a tab between them. It prints the share of pairs whose better text has the higher score (a tie counts
half) and the standard error, where it is known. The score is the exact log-probability, left to right after an EOT (1
pass for each text); for diffusion the bound, an estimate (16 passes), although bounds need not be in the order of
probabilities; for other models that fill, the pseudo-log-likelihood (Salazar et al. 2020): each byte is masked alone (n
passes for n bytes).
"""
import codecs
import json
import math
import statistics

from data import EOT, MASK, Flag, fail, from_bytes, make_rng
from experiments.common import load_latest, parse_own_flags
import sample
from objectives import N_BYTES, OBJECTIVES, add_weights
from run import DEVICE_FLAGS, compressor_bits, get_members, newest_run, run_program
import torch
import torch.nn.functional as F
from tqdm import tqdm

FLAGS = {
    "file": Flag("", "file to score"),
    "pairs": Flag("", "file of minimal pairs, in place of --file"),
    "out_dir": Flag("", "run folder (its ckpt.pt) or checkpoint file; without it the latest run under out/"),
    "objective": Flag("", "member of a mixture to use; without it the first that defines a probability of a text"),
    "seed": Flag(1, "random seed of the masks for an upper bound", 0, 2 ** 31),
    "device": DEVICE_FLAGS["device"],
    "dtype": Flag("float32", DEVICE_FLAGS["dtype"].help, choices=DEVICE_FLAGS["dtype"].choices),
}
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
    """As score_exact with stride T / 2, by the chain rule: predicts each byte from the bytes before it in its window,
    while it and all bytes after it are MASKs, so that a window holds only T bytes with those that it scores. For T = 4:

        0 [1 2]     1 2 [3 4]     3 4 [5 6]     4 5 6 [7]
    """
    bits = 8.0
    for first in tqdm(range(1, len(data), T // 2), disable=None, leave=False):      # first: the first scored byte
        end = min(first + T // 2, len(data))
        start = max(0, end - T)
        window = data[start:end].long().to(model.embed.weight.device)
        i = torch.arange(len(window), device=window.device)
        for scored in i[first - start:].split(sample.MAX_ROWS):  # indices in the window; one row for each
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
    for x in tqdm(data.split(objective.n_bytes(hp.block_size, hp)), disable=None, leave=False, delay=1):
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


def read_pairs(path):  # -> [(UID, better text, worse text)]; the texts are bytes
    pairs = []
    text = sample.read_text("pairs", f"FILE:{path}").removeprefix(codecs.BOM_UTF8)
    for i, line in enumerate(text.splitlines(), 1):
        try:
            if path.endswith(".jsonl"):
                pair = json.loads(line)
                pairs.append((str(pair["UID"]), pair["sentence_good"].encode(), pair["sentence_bad"].encode()))
            else:
                good, bad = line.split(b"\t")
                pairs.append(("all pairs", good, bad))
        except (ValueError, LookupError, TypeError, AttributeError):
            fail(f"--pairs {path}: line {i} is not a pair. Try the formats that experiments.score --help describes")
    if not pairs:
        fail(f"--pairs {path}: holds no pair. Try another file")
    return pairs


def exact_scores(model, x):  # bytes (N, n) -> log-probabilities (N,), left to right after an EOT
    logits = model.logits(model(F.pad(x, (1, -1), value=EOT), 0))[..., :N_BYTES]    # (N, n, 256)
    return -F.cross_entropy(logits.mT, x, reduction="none").cpu().double().sum(1)


def pseudo_scores(model, x, use):  # bytes (N, n), a Fill -> pseudo-log-likelihoods (N,)
    logp = torch.stack([sample.masked_log_probs(model, text[None], use, passes=len(text)) for text in x])
    return logp.gather(2, x[..., None].cpu() - 1).sum((1, 2))                       # logp (N, n, 255), of bytes 1..255


def has_probability(objective):  # does the objective define a probability of a text?
    return bool(objective.bpb or "fill" in objective.uses)


def choose_scored(members):  # -> the first member that defines a probability of a text, or None
    return next((m for m in members if has_probability(m.objective)), None)


def check_pairs(pairs, objective, hp):  # fails if a text does not fit into a row
    size = min(hp.block_size, objective.n_bytes(hp.block_size, hp))                 # maximum number of bytes of a text
    if not objective.bpb:
        size = sample.text_space(objective.uses["fill"], hp.block_size)
    if not all(0 < len(text) <= size and EOT not in text for pair in pairs for text in pair[1:]):
        fail(f"--pairs: a text is empty, contains a NUL or is longer than {size} bytes. Try other texts")


@torch.inference_mode()
def score_pairs(model, objective, hp, pairs, seed):  # -> [1, 0.5 or 0 for each pair], how the texts are scored
    if objective.bpb == "bound":
        score = lambda x: torch.tensor([-score_bound(model, objective, text, hp, seed)[0] for text in x])
        kind = f"{objective.name}'s bound, estimated in {BOUND_GROUPS * BOUND_ROWS} passes for each text"
    elif objective.bpb:
        score = lambda x: exact_scores(model, x)
        kind = "exact log-probability, left to right after an EOT, 1 pass for each text"
    else:
        score = lambda x: pseudo_scores(model, x, objective.uses["fill"])
        kind = "pseudo-log-likelihood, n passes for a text of n bytes"
    texts = [text for pair in pairs for text in pair[1:]]
    scores = sample.map_texts(lambda x: score(x).tolist(), texts, hp.device)
    return [(scores[good] > scores[bad]) + (scores[good] == scores[bad]) / 2 for _, good, bad in pairs], kind


def mean_and_error(values):  # -> mean, its standard error, or 0 if the values show none: a single one, or all equal
    return statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0


def format_mean(mean, error, digits=3, sign=""):  # sign "+": of a difference. An error of 0 means that it is not known
    return f"{mean:{sign}.{digits}f}" + (f" ± {error:.{digits}f}" if error else "")


def format_share(points, sign=""):  # of score_pairs, or differences, of several seeds (S, N) -> mean ± standard error
    """Each pair is averaged over the seeds. The error is that of the mean over pairs and that of the mean over seeds,
    added in quadrature. With one seed, it is that over pairs alone. Pairs that all have the same points, as a single
    pair does, or those of a share of 0 or 1, do not show it."""
    by_pair = points.mean(0)
    variance = by_pair.var(correction=0) / len(by_pair)
    if len(points) > 1:
        variance += points.mean(1).var() / len(points)
    error = float(variance) ** 0.5 if by_pair.min() < by_pair.max() else 0
    return format_mean(float(points.mean()), error, sign=sign)


def print_pairs(pairs, points, kind):  # a line for each UID and one for all pairs
    groups = {}
    for (uid, *_), point in zip(pairs, points):
        groups.setdefault(uid, []).append(point)
    groups["all pairs"] = points                # also in a file without UIDs
    print(f"share of pairs whose better text has the higher score, ± its standard error, if it is known: {kind}")
    for uid, group in groups.items():
        share = format_share(torch.tensor([group], dtype=torch.double))
        print(f"{len(group):7,} pairs  {share:22s}  {uid}")


def print_bits(bits, n, kind):
    print(f"{bits / n:.4f} bits per byte ({bits / n * math.log(2):.4f} nats), {kind}", flush=True)


def main(argv=None):  # -> exit code
    flags = parse_own_flags("python -m experiments.score", __doc__, FLAGS, argv)
    if bool(flags.pairs) == bool(flags.file):
        fail("--file: give either --file or --pairs. Try --file book.txt")
    pairs = read_pairs(flags.pairs) if flags.pairs else []
    data = from_bytes(b"" if pairs else sample.read_text("file", f"FILE:{flags.file}"))
    path = flags.out_dir or newest_run()
    model, hp, _ = load_latest(path, flags.device, flags.dtype)
    members = [m for m in get_members(hp) if flags.objective in ("", m.objective.name)]
    if not members:
        fail(f"--objective {flags.objective}: the run was trained as {hp.objective}. Try without it")
    objective = (choose_scored(members) or members[0]).objective
    if not has_probability(objective):
        able = ", ".join(name for name, other in OBJECTIVES.items() if has_probability(other))
        fail(f"--out_dir {path}: {objective.name} defines no probability of a text. Try a run of one of {able}")
    if len(get_members(hp)) > 1:
        sample.note(f"used as {objective.name}")
    if pairs:
        check_pairs(pairs, objective, hp)
        points, kind = score_pairs(model, objective, hp, pairs, flags.seed)
        print_pairs(pairs, points, kind)
        return 0
    print(f"{len(data):,} bytes; compressors: {compressor_bits(data)}")
    T = hp.block_size
    if objective.bpb == "bound":
        bits, error = score_bound(model, objective, data, hp, flags.seed)
        print_bits(bits, len(data), f"{objective.name}'s upper bound, standard error {error / len(data):.4f}")
    elif objective.bpb:
        bits = score_exact(model, data, T, T // 2)
        print_bits(bits, len(data), f"left to right, windows of {T}, stride {T // 2}")
    fill = objective.uses.get("fill")
    if fill:
        size = sample.text_space(fill, T)
        data = data[:FILLED_BYTES]
        bits = score_by_filling(model, data, size, fill)
        print_bits(bits, len(data), f"left to right by filling MASKs, the first {len(data):,} bytes, "
                                    f"windows of {size}, stride {size // 2}")
    return 0


if __name__ == "__main__":
    run_program(main)
