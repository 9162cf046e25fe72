"""Evaluations of a trained model. Each is the same for all objectives for which it makes sense.

An evaluation takes (model, objective, hp, text), where text (M,) holds held-out bytes on the CPU, and returns {metric:
number} without the metrics that the objective does not define. All models read across the ends of documents, except for
the loss, the bits from left to right and the bound, which training has logged under its own --doc_mask.

N windows of n bytes; a bytes left of a middle of m bytes; C width, V outputs of the byte head; K classes, L layers
"""
import bz2
import itertools
import json
import keyword
import lzma
import math
import os
import statistics
import tokenize
from collections import namedtuple

from data import EOT, MASK, from_bytes, make_rng, read_stdlib, read_windows, sample_windows, to_bytes
from experiments.bench import count_flops
from experiments.score import score_by_filling
import sample
import train
from model import norm
from objectives import IGNORE_INDEX, N_BYTES, frame_prompt
from run import COMPRESSED_BYTES, EVAL_ROWS, Member, get_members, load_run
import torch
import torch.nn.functional as F
from tqdm import tqdm

HOLE_LENGTHS = 4, 16, 64                        # bytes to infill
ROWS = 64                                       # windows of most evaluations, and rows of a forward pass
MIDDLE_BYTES = 4096                             # bytes to infill, for each length of a hole
PROMPT = 32                                     # bytes of a prompt
CHAIN_WINDOWS = 16                              # windows filled byte by byte; few, since each byte costs a pass
MIN_BLOCK = 128                                 # positions that infilling, replaced bytes and written lines need
CLASSES = {"NAME": 2, "STRING": 3, "FSTRING": 3, "COMMENT": 4, "NUMBER": 5, "OP": 6}        # of tokens; a keyword is 1


def windows(text, n, count, key):  # (M,) uint8 -> (count, n) long
    corpus = [dict(weight=1.0, text=text)]
    source, offset = sample_windows(corpus, "text", n, count, make_rng(f"compare,{key}"))
    return read_windows(corpus, "text", source, offset, n)


# ---- bits per byte of a middle
def infill_logits(model, objective, hp, x, a, m):  # x (N, n) -> (N, m, V) for bytes a .. a + m - 1
    """Predicts each byte of the middle, given both sides and the middle's bytes before it, in the objective's own
    format. By the chain rule, the nats of all bytes add up to those of the middle. If a model writes the end of a hole,
    that is predicted too: (N, m + 1, V)."""
    left, middle, right = x.split((a, m, x.size(1) - a - m), dim=1)
    fill = objective.uses.get("fill")
    if fill:                                    # pass i reads the first i bytes of the middle
        logits = []
        for i in range(m):
            masks = torch.full_like(middle[:, i:], MASK)
            row = torch.cat((left, middle[:, :i], masks, right), dim=1)
            logits.append(sample.fill_logits(model, row, fill)[:, a + i])
        return torch.stack(logits, dim=1)
    infill = objective.uses["infill"]
    prompts = [infill.prompt(pieces, m, hp) for pieces in zip(left.tolist(), right.tolist())]
    row = middle.new_tensor([ids for ids, _ in prompts])
    ended = F.pad(middle, (0, 1), value=infill.stop_ids[0])
    return target_logits(model, objective, hp, row, prompts[0][1], ended)


def left_logits(model, objective, hp, x, a, m):  # the same, given only the left side
    row, P = frame_prompt(x[:, :a], objective.uses["continue"])
    return target_logits(model, objective, hp, row, P, x[:, a:a + m])


def target_logits(model, objective, hp, prompts, P, middle):  # (N, n), their prefix, (N, m) -> (N, m, V)
    row = torch.cat((prompts, middle[:, :-1]), dim=1)           # the last id predicts nothing here
    positions = objective.numbering(row, row.new_full((len(row),), P), hp) if objective.numbering else None
    h = model(row, P, positions=positions)
    return model.logits(h[:, -middle.size(1):])


def bits_per_byte(logits, ids):  # (N, m or more, V), (N, m) -> float
    """The length of the middle is given, so the end of a hole costs nothing here (ended_bits counts it). The softmax is
    over the bytes that occur in a text, 1 to 255. An EOT in a window is not counted."""
    logits = logits[:, :ids.size(1), 1:N_BYTES].float()
    nats = F.cross_entropy(logits.flatten(0, 1), ids.flatten() - 1, ignore_index=EOT - 1)
    return float(nats) / math.log(2)


def ended_bits(logits, ids, stop_id):  # (N, m + 1, V), (N, m) -> float
    """Bits of the bytes and of the end, per byte. The end is stop_id or EOT."""
    logp = logits.float().log_softmax(-1)
    of_bytes = logp[:, :-1].gather(2, ids[..., None]).sum()
    of_end = logp[:, -1, list({stop_id, EOT})].logsumexp(1).sum()
    return -float(of_bytes + of_end) / math.log(2) / ids.numel()


def middle_logits(predict, model, objective, hp, x, a, m):  # predict: left_logits or infill_logits, in pieces of ROWS
    return torch.cat([predict(model, objective, hp, rows, a, m) for rows in x.split(ROWS)])


def eval_infilling(model, objective, hp, text):  # -> {left_m, infill_m, ended_m: bits per byte}
    """Bits per byte of the middle of held-out windows, given its left side and given both. Each m has 4096 bytes."""
    n = (min(hp.block_size, 256) - 16) // 2     # 120 bytes in rows of 256 positions or more
    out = {}
    for m in HOLE_LENGTHS:
        if m + 2 > n:
            continue
        predictors = {}
        if "continue" in objective.uses:
            predictors[f"left_{m}"] = left_logits
        if objective.uses.keys() & {"infill", "fill"}:
            predictors[f"infill_{m}"] = infill_logits
        x = windows(text, n, MIDDLE_BYTES // m, f"infill,{m}").to(hp.device)
        a = (n - m) // 2
        middle = x[:, a:a + m]
        for name, predict in predictors.items():
            logits = middle_logits(predict, model, objective, hp, x, a, m)
            out[name] = bits_per_byte(logits, middle)
            if logits.size(1) > m:
                out[f"ended_{m}"] = ended_bits(logits, middle, objective.uses["infill"].stop_ids[0])
    return out


def eval_filling_in_order(model, objective, hp, text):  # -> {left_by_filling: bits per byte}
    """Exact bits of a model that fills, by the chain rule. As in left to right, windows start without context."""
    fill = objective.uses.get("fill")
    if not fill:
        return {}
    n = sample.text_space(fill, hp.block_size)
    x = windows(text, n, CHAIN_WINDOWS, "chain")
    # score_by_filling counts 8 bits for the first byte, which it takes as given
    bits = [score_by_filling(model, row, n, fill) - 8 for row in x]
    return {"left_by_filling": statistics.fmean(bits) / (n - 1)}


# ---- replaced bytes
def eval_corruption(model, objective, hp, text):  # -> {replaced_auc}
    """Replaces a tenth of the bytes by random bytes of the text. How well do the model's scores separate them?

    The score is that of a head that marks bytes. Without such a head it is the nats of the byte, given the bytes
    around it while every eighth byte is masked, or given the bytes before it."""
    g = make_rng("compare,replaced")
    clean = windows(text, min(objective.n_bytes(hp.block_size, hp), hp.block_size, 256) - 2, ROWS, "corruption")
    other = text[torch.randint(0, len(text), clean.shape, generator=g)].long()
    is_replaced = (torch.rand(clean.shape, generator=g) < 0.1) & (other != clean)
    x = torch.where(is_replaced, other, clean).to(hp.device)
    mark = objective.uses.get("mark")
    fill = objective.uses.get("fill")
    if mark:
        score = mark(model, x)
    elif fill:
        logp = torch.stack([sample.masked_log_probs(model, row[None], fill, passes=8) for row in x])
        score = -logp.gather(2, x[..., None].cpu().clamp(min=1) - 1)[..., 0]        # logp (N, n, 255), of bytes 1..255
    elif objective.bpb in ("loss", "causal"):
        row = torch.cat((torch.full_like(x[:, :1], EOT), x[:, :-1]), dim=1)
        logits = model.logits(model(row, 0))[..., :N_BYTES]
        score = F.cross_entropy(logits.mT, x, reduction="none")
    else:
        return {}
    return {"replaced_auc": auc(score.cpu().flatten(), is_replaced.long().flatten())}


def auc(scores, labels):  # (N,), (N,) of 0 and 1 -> probability that a 1 scores above a 0
    """Counts pairs of a 1 and a 0 (Mann and Whitney 1947). A tie counts half. Returns .5 if a class is missing."""
    above = scores[labels == 1][:, None] - scores[labels == 0]
    return float((above.sign() + 1).double().mean()) / 2 if above.numel() else 0.5


# ---- tasks: what sample.py uses the model for, beside a trivial baseline; {} if the task cannot be measured
def eval_second_half(model, objective, hp, text):
    """Bits per byte of a window's second half, given the first. Baseline: the better of bz2 and lzma, on one stream."""
    n = hp.block_size // 2 - 2                  # leaves space for special ids around a prompt
    x = windows(text, 2 * n, 4 * ROWS, "halves").to(hp.device)
    stream = to_bytes(text[:COMPRESSED_BYTES])
    size = min(len(bz2.compress(stream)), len(lzma.compress(stream)))
    return {"task": bits_per_byte(middle_logits(left_logits, model, objective, hp, x, n, n), x[:, n:]),
            "task_baseline": 8 * size / len(stream)}


def eval_tokenizable_lines(model, objective, hp, text):
    """Share of the written bytes in lines that Python's tokenizer accepts, each line by itself. The model continues
    prompts of 32 bytes. Baseline: bytes drawn independently, each as often as in the text. A model that repeats one
    good line would reach 1, so `distinct` is the share of lines that differ from all earlier ones."""
    use = objective.uses.get("write") or objective.uses.get("continue_blocks")
    if not use or hp.block_size < MIN_BLOCK:
        return {}                               # not trained on rows that are mostly MASKs
    x = windows(text, objective.n_bytes(hp.block_size, hp), 2 * ROWS, "lines")      # some 500 lines
    written = write(model, objective, hp, use.order, x, make_rng("compare,written"))
    drawn = text[torch.randint(0, len(text), (len(x), 2000), generator=make_rng("compare,lines"))]
    score, distinct, _ = line_figures(written[:, PROMPT:])
    baseline, *_ = line_figures(drawn)
    return {"task": score, "task_baseline": baseline, "distinct": distinct}


def write(model, objective, hp, order, x, g, temperature=0.8, steps=64):  # windows (N, n) -> (N, n)
    """Keeps the first PROMPT bytes of each window and writes the rest: "left to right" at this temperature, in other
    orders by filling all MASKs in `steps` passes, with sample.py's default sampling."""
    n = x.size(1)
    ids = x[:, :PROMPT]
    if order == "left to right":
        row, prefix = frame_prompt(ids, objective.uses["continue"])
        written = sample.generate(model, row, n - PROMPT, hp.block_size, g, prefix, temperature=temperature)
        ids = torch.cat((ids, torch.stack(list(written), dim=1)), dim=1)
        return F.pad(ids, (0, n - ids.size(1)), value=EOT)      # shorter if all rows have ended
    sampling = sample.DIFFUSION | {"order": order}
    use = objective.uses.get("continue_blocks")
    if use:
        T = objective.n_bytes(hp.block_size, hp)
        rows = []
        for prompt in ids.tolist():
            written = sample.generate_blocks(model, prompt, n - PROMPT, T, use.length(hp), g, **sampling)
            rows.append(F.pad(ids.new_tensor([*prompt, *written]), (0, n), value=EOT)[:n])
        return torch.stack(rows)
    row = F.pad(ids, (0, n - PROMPT), value=MASK).to(hp.device)
    *_, ids = sample.unmask(model, row, g, objective.uses["fill"], steps, **sampling)
    return ids.cpu()


def line_figures(rows):  # (N, n) -> share of bytes in lines that tokenize, share of distinct lines, number of lines
    """Only of whole lines: leaves out the first and the last of each row, and lines of white space."""
    lines = []
    for row in rows.tolist():
        stripped = [line.strip() for line in bytes(row).split(b"\n")[1:-1]]
        lines += [line for line in stripped if line]
    n_good = sum(len(line) for line in lines if byte_classes(line) is not None)
    return n_good / max(1, sum(map(len, lines))), len(set(lines)) / max(1, len(lines)), len(lines)


def eval_infill_exact_match(model, objective, hp, text):
    """Share of holes of 4 bytes that are restored exactly. Writes up to 20 bytes and trims them, as sample.py does.
    Baseline: four spaces. `ends` is the share of holes in which the model itself ends the text."""
    if hp.block_size < MIN_BLOCK or not objective.uses["infill"].prompt:
        return {}
    half = min(80, hp.block_size // 2 - 48)
    results = []
    for row in windows(text, 2 * half, 2 * ROWS, "holes").tolist():
        left = row[:half - 2]
        middle = row[half - 2:half + 2]
        right = row[half + 2:]
        ids, P = objective.uses["infill"].prompt([left, right], 4, hp)
        [written], ended = sample.infill(model, objective, hp, ids, P, 1, 20, make_rng("holes"), temperature=0)
        trimmed = sample.trim_to_suffix(model, objective, hp, left, written, right)
        results.append((trimmed == middle, bytes(middle) == b"    ", ended))
    restored, blank, ends = (statistics.fmean(column) for column in zip(*results))
    return {"task": restored, "task_baseline": blank, "ends": ends}


def eval_repairs(model, objective, hp, text):
    """Edit distance from the repaired to the clean text, divided by that from the noisy text. Changing nothing: 1."""
    text = text.masked_fill(text == EOT, ord("\n"))             # a repaired text holds no EOT
    x = windows(text, objective.n_bytes(hp.block_size, hp), ROWS // 2, "repairs")
    batch = objective.corrupt(x, make_rng("compare,repairs"), hp)
    left = 0
    before = 0
    for b, clean in enumerate(x.tolist()):
        noisy = batch["inp"][b, :int(batch["prefix"][b]) - 1].tolist()              # without SEP
        clean = clean[:int((batch["tgt"][b] != IGNORE_INDEX).sum()) - 1]            # the targets end with EOT
        repaired = list(sample.repair(model, objective, noisy, hp, make_rng("unused"), temperature=0))
        left += edit_distance(repaired, clean)
        before += edit_distance(noisy, clean)
    return {"task": left / before, "task_baseline": 1.0} if before else {}


def edit_distance(a, b):  # -> minimum number of bytes to insert, delete or replace (Levenshtein)
    """row[j] is the distance between the first i bytes of a and the first j bytes of b."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        above = row
        row = [i]
        for j, y in enumerate(b, 1):
            deleted = above[j] + 1
            inserted = row[-1] + 1
            replaced = above[j - 1] + (x != y)
            row.append(min(deleted, inserted, replaced))
    return row[-1]


def make_typos(text, n, count):  # (M,) -> windows (count, n) with a typo each, clean windows, positions of the typos
    """A random lower-case letter with letters on both sides (if there is none, the first byte) becomes another one."""
    g = make_rng("compare,typos")
    clean = windows(text, n, count, "typos")
    is_letter = (clean >= ord("a")) & (clean <= ord("z"))
    is_inside = F.pad(is_letter.unfold(1, 3, 1).all(2), (1, 1))                     # with a letter on both sides
    typo = torch.rand(clean.shape, generator=g).where(is_inside, -1).argmax(1, keepdim=True)        # (count, 1)
    shift = torch.randint(1, 26, typo.shape, generator=g)
    letter = (clean.gather(1, typo) - ord("a") + shift) % 26 + ord("a")
    return clean.scatter(1, typo, letter), clean, typo


def eval_typos(model, objective, hp, text):
    """The share of windows whose typo is the most suspicious byte. Baseline: the byte that forms the two rarest pairs
    with its neighbours."""
    x, _, typo = make_typos(text, min(hp.block_size, 128), 4 * ROWS)
    marked = objective.uses["mark"](model, x.to(hp.device)).argmax(1, keepdim=True).cpu()
    pair_counts = torch.bincount(text[:-1].long() * 256 + text[1:].long(), minlength=1 << 16)
    counts = pair_counts[x[:, :-1] * 256 + x[:, 1:]]                                # (N, n - 1)
    rarest = (counts[:, :-1] + counts[:, 1:]).argmin(1, keepdim=True) + 1
    return {"task": float((marked == typo).float().mean()), "task_baseline": float((rarest == typo).float().mean())}


def fix(model, objective, hp, row, error_rate=0.0):  # list of bytes -> its edits, the corrected bytes
    edits = sample.suggest_edits(model, objective.uses["correct"], row, hp.block_size, error_rate=error_rate)
    return edits, sample.apply_edits(row, edits)


def eval_corrections(model, objective, hp, text):
    """Of windows of 128 bytes with one typo: the share that is restored exactly, for each kind of typo, and the mean of
    the kinds. Of the clean windows: the number of edits per byte."""
    if "correct" not in objective.uses:
        return {}
    restored = {}                               # {kind: [bool of each window]}
    n_edits = []
    for noisy, row, i in zip(*(t.tolist() for t in make_typos(text, 128, 2 * ROWS))):
        [i] = i
        letter = noisy[i]                       # another one than row[i]
        kinds = {"replaced": noisy, "missing": row[:i] + row[i + 1:], "extra": row[:i] + [letter] + row[i:],
                 "swapped": row[:i] + row[i + 1:i + 2] + row[i:i + 1] + row[i + 2:]}
        for kind, wrong in kinds.items():
            if wrong != row:                    # swapping two equal letters changes nothing
                _, fixed = fix(model, objective, hp, wrong)
                restored.setdefault(kind, []).append(fixed == row)
        edits, _ = fix(model, objective, hp, row)
        n_edits.append(len(edits))
    shares = {f"restored_{kind}": statistics.fmean(found) for kind, found in restored.items()}
    mean = statistics.fmean(shares.values())
    return shares | {"typos_restored": mean, "clean_edits": statistics.fmean(n_edits) / 128}


def eval_replaced(model, objective, hp, text):
    """Of windows in which 5% of the bytes are replaced by random printable ones: the edit distance from the corrected
    (error rate 5%) or repaired to the clean text, divided by that from the noisy text. Changing nothing: 1."""
    if not {"correct", "repair"} & objective.uses.keys():
        return {}
    g = make_rng("compare,replaced")
    clean = windows(text.masked_fill(text == EOT, ord("\n")), 128, ROWS, "replaced")            # as in eval_repairs
    noise = torch.randint(32, 127, clean.shape, generator=g)
    noisy = torch.where(torch.rand(clean.shape, generator=g) < 0.05, noise, clean)
    left = 0
    for row, wrong in zip(clean.tolist(), noisy.tolist()):
        if "correct" in objective.uses:
            _, fixed = fix(model, objective, hp, wrong, error_rate=0.05)
        else:
            fixed = [*sample.repair(model, objective, wrong, hp, make_rng("unused"), temperature=0)]
        left += edit_distance(fixed, row)
    return {"replaced_left": left / int((noisy != clean).sum())}


def eval_retrieval(model, objective, hp, text):
    """Share of 256 passages of which the first half is nearest to its own second half. Baseline: histograms of bytes
    in place of embeddings."""
    embed = objective.uses["search"].embed
    pairs = windows(text, hp.block_size // 2 * 2, 256, "recalls").unflatten(1, (2, -1))             # (256, 2, n)

    def recall(e):  # (256, 2, C) -> share
        e = F.normalize(e, dim=-1)
        nearest = (e[:, 0] @ e[:, 1].T).argmax(1)
        return float((nearest == torch.arange(256)).float().mean())
    embedded = torch.stack([embed(model, half.to(hp.device)).cpu() for half in pairs.unbind(1)], dim=1)
    histograms = torch.zeros(256, 2, 256).scatter_add(2, pairs, torch.ones(pairs.shape))
    return {"task": recall(embedded), "task_baseline": recall(histograms)}


def eval_accuracy(model, objective, hp, text):
    member = Member(objective, 1.0, objective.n_bytes(hp.block_size, hp))
    corpus = [dict(weight=1.0, text=text)]
    batches = [train.sample_batch(member, corpus, "text", EVAL_ROWS, f"answers,{i}", hp) for i in range(16)]
    _, figures = train.mean_loss(member, model, batches, hp)
    n_answers = 2 if "follow" in objective.uses else hp.block_size
    return {"task": figures["accuracy"], "task_baseline": 1 / n_answers} if "accuracy" in figures else {}


TASKS = {                                       # {mode: (what is measured, baseline in brackets; function)}
    "continue": ("bits per byte of the second half of a window (bz2 or lzma)", eval_second_half),
    "continue_blocks": ("share of written bytes in lines that tokenize (random bytes)", eval_tokenizable_lines),
    "fill": ("share of written bytes in lines that tokenize (random bytes)", eval_tokenizable_lines),
    "infill": ("share of holes of 4 bytes restored (four spaces)", eval_infill_exact_match),
    "repair": ("edit distance to the clean text, relative to the noisy text (no repair)", eval_repairs),
    "mark": ("share of typos marked as the most suspicious byte (rarest pairs of bytes)", eval_typos),
    "search": ("share of 256 passages whose other half is nearest (histograms of bytes)", eval_retrieval),
    "follow": ("share of rows answered correctly (chance)", eval_accuracy),
    "seam": ("share of rows answered correctly (chance)", eval_accuracy),
}


def eval_task(model, objective, hp, text):  # -> metrics of the objective's first use, with a heading in words
    mode = next(iter(objective.uses), "")
    if mode not in TASKS:
        return {}
    heading, evaluate = TASKS[mode]
    figures = evaluate(model, objective, hp, text)
    return {"task_heading": heading} | figures if figures else {}


# ---- a linear probe on frozen states: which kind of token does a byte belong to?
PROBE_TRAIN, PROBE_VAL, PROBE_TEST = range(3)
# x (N, n) bytes; label (N, n): classes of the probed bytes, elsewhere IGNORE_INDEX; part (N, n): one of PROBE_...
ProbeData = namedtuple("ProbeData", "x label part")


def byte_probe(n):  # -> ProbeData of windows of n bytes: the class of each byte
    """Reads the standard library. PROBE_TEST are the documents that data.py holds out. About 8,000 bytes of the others
    train the probe and select its layer."""
    special = {9: (PROBE_TEST, 9), 0: (PROBE_VAL, 3), 5: (PROBE_VAL, 3)}            # {i % 10: part, number of windows}
    rows = []
    for i, text in enumerate(read_stdlib().values()):
        classes = byte_classes(text)
        part, most = special.get(i % 10, (PROBE_TRAIN, 3))
        count = min(most, len(text) // n) if classes is not None else 0
        for k in range(count):                  # evenly spaced windows, which do not overlap
            start = (len(text) - n) * k // max(1, count - 1)
            rows.append((from_bytes(text[start:start + n]).long(), classes[start:start + n], torch.full((n,), part)))
    x, label, part = map(torch.stack, zip(*rows))
    rate = torch.where(part == PROBE_TEST, 0.4, 8000 / float((part != PROBE_TEST).sum()))
    chosen = torch.rand(label.shape, generator=make_rng("compare,positions")) < rate
    return ProbeData(x, label.where(chosen, IGNORE_INDEX), part)


def byte_classes(text):  # bytes -> (n,) long: the class of every byte; None where they are not tokens of Python
    """White space and tokens without a class have class 0. Takes only ASCII, where a column is a byte. Versions of
    Python agree, except that 3.12 and later refuse malformed numbers, <> and unbalanced braces, and accept a lone !."""
    if not text.isascii():
        return None
    lines = [line + "\n" for line in text.decode().split("\n")]
    starts = [0, *itertools.accumulate(map(len, lines))]
    labels = torch.zeros(len(text), dtype=torch.long)
    depth = 0                                   # of brackets: Python 3.12 and later accept a surplus closing one
    try:
        for token in tokenize.generate_tokens(iter(lines).__next__):
            kind = tokenize.tok_name[token.type].partition("_")[0]      # FSTRING_START, FSTRING_MIDDLE -> FSTRING
            # for a character such as $, Python before 3.12 gives an ERRORTOKEN, later versions a plain OP
            if kind == "ERRORTOKEN" or token.exact_type == tokenize.OP:
                return None
            if kind == "OP":
                depth += token.string in "([{"
                depth -= token.string in ")]}"
            if kind in CLASSES:
                first = starts[token.start[0] - 1] + token.start[1]
                end = starts[token.end[0] - 1] + token.end[1]
                labels[first:end] = 1 if keyword.iskeyword(token.string) else CLASSES[kind]
        return labels if depth == 0 else None
    except (SyntaxError, tokenize.TokenError):
        return None


def has_causal_rows(objective, hp):  # does no row of a batch read both ways?
    x = torch.ones(max(4, objective.min_rows), objective.n_bytes(hp.block_size, hp), dtype=torch.long)
    batch = objective.corrupt(x, make_rng("rows"), hp)
    return "mask" not in batch and not bool(torch.as_tensor(batch["prefix"]).any())


def layer_states(model, objective, hp, x):  # (N, n) -> (L, N, n, C): the output of each block, normalized
    """Reads windows in rows of at most block_size positions, with prefix 0 if the objective is causal, otherwise with
    prefix T. Reads the states with hooks, so that the model need not return them."""
    N, n = x.shape
    kept = []

    def keep(block, args, out):
        kept.append(norm(out).float().cpu())
    hooks = [block.register_forward_hook(keep) for block in model.blocks]
    row = x.reshape(-1, min(hp.block_size, n)).to(hp.device)
    prefix = 0 if has_causal_rows(objective, hp) else row.size(1)
    model(row, prefix)
    for hook in hooks:
        hook.remove()
    return torch.stack(kept).view(len(kept), N, n, -1)


def eval_probe(model, objective, hp, data):  # -> balanced accuracy of classifying bytes by their states
    is_probed = data.label != IGNORE_INDEX
    layers = []
    for rows in torch.arange(len(data.x)).split(ROWS):
        layers.append(layer_states(model, objective, hp, data.x[rows])[:, is_probed[rows]])
    return probe_accuracy(torch.cat(layers, dim=1), data.label[is_probed], data.part[is_probed])


def probe_accuracy(layers, y, part):  # layers (L, N, C), y (N,), part (N,) -> balanced accuracy
    """Fits a classifier for each layer on PROBE_TRAIN, chooses the layer on PROBE_VAL, returns its score on
    PROBE_TEST."""
    fit, val, test = (part == p for p in (PROBE_TRAIN, PROBE_VAL, PROBE_TEST))
    best_val = -1.0
    for x in layers:
        x = F.pad((x - x[fit].mean(0)) / (x[fit].std(0) + 1e-6), (0, 1), value=1.0)                 # 1 for the bias
        guess = (x @ fit_classifier(x[fit], y[fit], int(y.max()) + 1)).argmax(1)
        val_accuracy = balanced_accuracy(guess[val], y[val])
        if val_accuracy > best_val:
            best_val = val_accuracy
            accuracy = balanced_accuracy(guess[test], y[test])
    return accuracy


def fit_classifier(x, y, K, decay=1e-4):  # x (N, C), y (N,) -> weights (C, K) of logistic regression
    weight = len(y) / (K * torch.bincount(y, minlength=K).clamp(min=1))             # the same for each class in all
    W = torch.zeros(x.size(1), K, requires_grad=True)
    solver = torch.optim.LBFGS([W], max_iter=60, line_search_fn="strong_wolfe")

    def closure():
        solver.zero_grad()
        loss = F.cross_entropy(x @ W, y, weight=weight) + decay * W.square().sum()
        loss.backward()
        return loss
    solver.step(closure)                        # enables gradients, even under no_grad
    return W.detach()


def balanced_accuracy(guess, y):  # (N,), (N,) -> share of correct guesses in each class, averaged over the classes
    return statistics.fmean(float((guess[y == k] == k).float().mean()) for k in y.unique().tolist())


# ---- everything that compare measures
METRICS = (                                     # in the order of compare's .csv; docs/RESULTS.md explains them
    "loss", "task_baseline", "left_by_filling", "replaced_auc", "probe",
    "typos_restored", *(f"restored_{kind}" for kind in sample.KINDS.values()), "clean_edits", "replaced_left",
    "ends", "distinct",
    *(f"{side}_{m}" for side in ("left", "infill", "ended") for m in HOLE_LENGTHS),
    "left_to_right", "bound", "tflop", "seconds")


@torch.no_grad()
def measure(model, members, hp, text, probe, tasks_only=False):  # probe: ProbeData or None -> {metric: number}
    """Of several members, each metric is of the first one that has it."""
    evaluations = [eval_task]
    if hp.block_size >= MIN_BLOCK and not tasks_only:
        evaluations += [eval_infilling, eval_filling_in_order, eval_corruption, eval_corrections, eval_replaced]
    metrics = {}
    steps = [*itertools.product(members, evaluations)]
    for member, evaluation in tqdm(steps, desc="evaluations", disable=None, leave=False):
        if evaluation is not eval_task or "task" not in metrics:                    # all figures of a task are of one
            metrics = evaluation(model, member.objective, hp, text) | metrics
    if probe and 256 % min(hp.block_size, 256) == 0:            # its windows of 256 bytes can be cut into rows
        metrics["probe"] = eval_probe(model, members[0].objective, hp, probe)
    return metrics


def measure_run(folder, device, text, probe, tasks_only=False):  # -> {metric: number}
    model, hp, _ = load_run(os.path.join(folder, "ckpt.pt"), device, "float32")
    metrics = logged_metrics(folder, hp) | measure(model, get_members(hp), hp, text, probe, tasks_only)
    torch.cuda.empty_cache()                    # the next run asks how much memory is free
    return metrics


def logged_metrics(folder, hp):  # -> {metric: number} from metrics.jsonl and the settings, of the first member
    with open(os.path.join(folder, "metrics.jsonl"), "rb") as f:
        records = [record for record in map(json.loads, f) if record.get("split") == "val"]
    members = get_members(hp)
    last = records[-len(members):]
    metrics = {"loss": last[0]["loss"], "seconds": last[0]["seconds"]}
    for member, record in zip(members, last):
        if member.objective.bpb:
            metrics.setdefault("bound" if member.objective.bpb == "bound" else "left_to_right", record["bpb"])
    return metrics | {"tflop": count_flops(hp) * hp.accum * last[0]["step"] / 1e12}
