"""Evaluations of a trained model, the same for every objective that defines what they measure.

All read held-out text, a tensor (M,) of bytes. An evaluation (model, objective, hp, text) -> {metric: number} leaves
out the metrics that an objective does not define. A task, of which each objective has one, returns {"score",
"baseline"}, of the model and of a trivial rule; some add metrics of their own.
Where a model was trained with --doc_mask, all attend only within a document here, too.

N windows, n bytes of a window, a bytes left of a middle of m, C width, V outputs of the byte head, K classes, L layers
"""
import itertools
import keyword
import lzma
import math
import os
import statistics
import sysconfig
import token as token_kinds
import tokenize
from collections.abc import Callable
from dataclasses import dataclass

# isort: off  data silences a warning of torch's, and so comes before it
from data import COMPRESSED_BYTES, EOT, MASK, document_ids, from_bytes, make_rng, read_stdlib, read_windows
from data import sample_windows, to_bytes
import sample
import train
from model import norm
from objectives import EVAL_ROWS, IGNORE_INDEX, N_BYTES, Continue, Draft, Fill, Follow, Infill, Mark, Repair, Seam
from objectives import Search, auc, find_use, trained_use
import torch
import torch.nn.functional as F

HOLE_LENGTHS = 4, 16, 64                        # bytes to infill
OTHER_MODE = {4: 64, 64: 4}                     # a length, and one for which ul2 has another mode
ROWS = 64                                       # windows of an evaluation, or of a pass
MIDDLE_BYTES = 4096                             # bytes to infill of each length
REPLACED = 0.1                                  # share of bytes that are replaced
PROMPT = 32                                     # bytes of a prompt
MIN_BLOCK = 128                                 # positions that infilling, replaced bytes and written lines need
CLASSES = "space", "keyword", "name", "string", "comment", "number", "operator"


def windows(text, n, count, key):  # (M,) uint8 -> (count, n) long: windows without a NUL where there are any
    corpus = [dict(weight=1.0, text=text)]
    source, offset = sample_windows(corpus, "text", n, count, make_rng(f"compare,{key}"), single_document=True)
    return read_windows(corpus, "text", source, offset, n)


def doc_ids(row, hp):  # (N, T) -> (N, T), or None where the model was trained without document ids
    return document_ids(row) if hp.doc_mask else None


# ---- bits per byte of a middle

def infill_logits(model, objective, hp, x, a, m, expected=None):  # x (N, n) -> (N, m, V) for bytes a .. a + m - 1
    """In the objective's own format, each byte given both sides and the middle's bytes before it. By the chain rule
    their nats add up to a code length. None where the objective cannot fill a hole. expected: the length that the
    prompt is written for, m without it."""
    left = x[:, :a]
    middle = x[:, a:a + m]
    right = x[:, a + m:]
    fill_use = trained_use(objective, Fill, hp)
    if fill_use:                                # m passes, pass i with the middle's first i bytes in place
        logits = []
        for i in range(m):
            masks = torch.full_like(middle[:, i:], MASK)
            row = torch.cat((left, middle[:, :i], masks, right), dim=1)
            logits.append(sample.fill_logits(model, row, fill_use, hp.doc_mask)[:, a + i])
        return torch.stack(logits, dim=1)
    infill = trained_use(objective, Infill, hp)
    if not infill:
        return None
    prompts = [infill.prompt(pieces, expected or m, hp) for pieces in zip(left.tolist(), right.tolist())]
    rows = [ids for ids, _ in prompts]
    prefix = [P for _, P in prompts]
    return target_logits(model, objective, hp, rows, prefix, middle)


def left_logits(model, objective, hp, x, a, m):  # the same given the left side alone, or None
    use = trained_use(objective, Continue, hp)
    if not use:
        return None
    prompts = [[*use.before, *row, *use.after] for row in x[:, :a].tolist()]
    P = len(prompts[0]) if use.both_ways else 0
    return target_logits(model, objective, hp, prompts, [P] * len(x), x[:, a:a + m])


def target_logits(model, objective, hp, prompts, P, middle):  # N lists of one length, N numbers, (N, m) -> (N, m, V)
    row = torch.cat((torch.tensor(prompts), middle), dim=1)
    assert row.size(1) <= hp.block_size + 1, (row.shape, hp.block_size)
    row = row[:, :-1]                           # nothing is predicted from the last byte
    prefix = torch.tensor(P)
    positions = objective.positions(row, prefix, hp)
    h = model(row, prefix if P[0] else 0, doc_ids(row, hp), positions=positions)
    return model.logits(h[:, -middle.size(1):])


def bits_per_byte(logits, ids):  # (N, m, V), (N, m) -> float
    """Only bytes that occur in a text compete, 1..255. Some objectives end a hole with EOT (byte 0) and others with an
    id that is no byte: with EOT among the bytes only the first kind would pay for where it ends. EOT in a window
    does not count."""
    nats = F.cross_entropy(logits[..., 1:N_BYTES].float().flatten(0, 1), ids.flatten() - 1, ignore_index=EOT - 1)
    return float(nats) / math.log(2)


def eval_infilling(model, objective, hp, text):  # -> {left_m, infill_m, infill_m_as_n: bits per byte}
    """The middle of a held-out window, with as many bytes left as right of it; 4096 bytes in all for each m. The
    standard error over windows was 0.05 to 0.09 bits, of the difference of two models 0.01 to 0.05 (2,000 steps).
    infill_m_as_n: a hole of m bytes whose prompt asks for a hole of n bytes, where the objective has a mode for each
    (ul2)."""
    n = (hp.block_size - 16) // 2               # a row may hold the text twice
    out = {}
    for m in HOLE_LENGTHS:
        if m + 2 > n:
            continue
        x = windows(text, n, MIDDLE_BYTES // m, f"infill,{m}")
        a = (n - m) // 2
        out[f"left_{m}"] = middle_bits(left_logits, model, objective, hp, x, a, m)
        out[f"infill_{m}"] = middle_bits(infill_logits, model, objective, hp, x, a, m)
        other = OTHER_MODE.get(m)
        if other and reads_mode(objective, hp):
            out[f"infill_{m}_as_{other}"] = middle_bits(infill_logits, model, objective, hp, x, a, m, other)
    return {name: bits for name, bits in out.items() if bits is not None}


def middle_bits(predict, model, objective, hp, x, a, m, *expected):  # predict: left_logits or infill_logits
    """-> bits per byte of the middles of x (N, n), or None where predict has none."""
    bits = []
    for rows in x.split(ROWS):
        logits = predict(model, objective, hp, rows, a, m, *expected)
        if logits is None:
            return None
        bits.append(bits_per_byte(logits, rows[:, a:a + m]))
    return statistics.fmean(bits)


def reads_mode(objective, hp):  # -> does a prompt name the length of its hole (ul2)?
    infill = trained_use(objective, Infill, hp)
    if not infill:
        return False
    short, long = (infill.prompt([[1], [1]], m, hp) for m in OTHER_MODE)
    return short != long and len(short[0]) == len(long[0])


# ---- replaced bytes, drafts

def eval_corruption(model, objective, hp, text):  # -> {replaced_auc}
    """A tenth of the bytes is replaced by bytes of the text's own distribution. A byte's score is what a head that
    marks bytes gives it; without such a head it is the byte's nats: given the others while every eighth byte is
    masked, or given the bytes before it."""
    g = make_rng("compare,replaced")
    clean = windows(text, min(hp.block_size, 256) - 2, ROWS, "corruption")
    other = text[torch.randint(0, len(text), clean.shape, generator=g)].long()
    is_replaced = (torch.rand(clean.shape, generator=g) < REPLACED) & (other != clean)
    x = torch.where(is_replaced, other, clean)
    mark = find_use(objective, Mark)
    fill_use = trained_use(objective, Fill, hp)
    if mark:
        score = mark.predict(model, x)
    elif fill_use:
        score = torch.zeros(x.shape)
        part = torch.arange(x.size(1)) % 8
        for r in range(8):
            logits = sample.fill_logits(model, x.masked_fill(part == r, MASK), fill_use, hp.doc_mask)[..., :N_BYTES]
            score = torch.where(part == r, F.cross_entropy(logits.mT, x, reduction="none"), score)
    elif objective.bpb in ("loss", "causal") and trained_use(objective, Continue, hp):
        row = torch.cat((torch.full_like(x[:, :1], EOT), x[:, :-1]), dim=1)
        logits = model.logits(model(row, 0, doc_ids(row, hp)))[..., :N_BYTES]
        score = F.cross_entropy(logits.mT, x, reduction="none")
    else:
        return {}
    return {"replaced_auc": float(auc(score.flatten(), is_replaced.long().flatten()))}


def eval_drafts(model, objective, hp, text):  # -> {bytes_per_pass}: bytes that one pass of the model writes
    """Mean of 32 samples, where the model drafts; a mean of eight may be off by 0.1."""
    draft = find_use(objective, Draft)
    drafter = draft.make_drafter(model, hp) if draft else None
    if not drafter:
        return {}
    T = hp.block_size
    n_new = min(T, 256) - 40
    n_written = 0
    n_passes = 0
    for i, prompt in enumerate(windows(text, PROMPT, ROWS // 2, "prompts").tolist()):
        stats = []
        g = make_rng(f"compare,{i}")
        written = list(sample.speculate(model, drafter, prompt, n_new, T, g, stats, temperature=0.8,
                                        doc_mask=hp.doc_mask))
        n_written += len(written)
        n_passes += len(stats)
    return {"bytes_per_pass": n_written / n_passes}


# ---- tasks: what sample.py uses the model for; {} where rows are too short or the settings do not train it

def eval_second_half(model, objective, hp, text):
    """Bits per byte of the second half of a window, given the first. Baseline: lzma on the held-out text as one
    stream."""
    n = hp.block_size // 2 - 2                  # leaves space for what stands around a prompt
    x = windows(text, 2 * n, 4 * ROWS, "halves")
    logits = left_logits(model, objective, hp, x, n, n)
    if logits is None:
        return {}
    stream = to_bytes(text[:COMPRESSED_BYTES])
    return {"score": bits_per_byte(logits, x[:, n:]), "baseline": 8 * len(lzma.compress(stream)) / len(stream)}


def eval_tokenizable_lines(model, objective, hp, text):
    """Share of the written bytes that stand in lines which are tokens of Python. Each line by itself, after prompts of
    32 bytes; the first and the last do not count, as they are cut. Baseline: bytes drawn one by one from the text's
    distribution. A model that writes one good line again and again would have 1: distinct is the share of the lines
    that differ from all before. held_out, held_out_distinct: the same two of the held-out windows themselves."""
    use = trained_use(objective, Fill, hp)
    # only such models were trained on rows that are mostly MASKs
    if not use or not use.trained_at_any_rate or hp.block_size < MIN_BLOCK:
        return {}
    x = windows(text, sample.text_space(use, hp.block_size), 2 * ROWS, "lines")     # some 500 lines
    gaps = F.pad(x[:, :PROMPT], (0, x.size(1) - PROMPT), value=MASK)
    gens = sample.sample_generators(1, len(x))
    written = sample.fill(model, gaps, gens, use, order=use.orders[0], doc_mask=hp.doc_mask,
                          **sample.DIFFUSION_SAMPLING)
    drawn = text[torch.randint(0, len(text), (len(x), 2000), generator=make_rng("compare,lines"))]
    score, distinct, _ = line_figures(written[:, PROMPT:])
    baseline, *_ = line_figures(drawn)
    held_out, held_out_distinct, _ = line_figures(x[:, PROMPT:])
    return {"score": score, "baseline": baseline, "distinct": distinct, "held_out": held_out,
            "held_out_distinct": held_out_distinct}


def line_figures(rows):  # (N, n) -> of whole lines: share of their bytes in lines that tokenize, share distinct, number
    lines = []
    for row in rows.tolist():
        stripped = [line.strip() for line in bytes(row).split(b"\n")[1:-1]]
        lines += [line for line in stripped if line]
    n_good = sum(len(line) for line in lines if byte_classes(line) is not None)
    tokenizes = n_good / max(1, sum(map(len, lines)))
    distinct = len(set(lines)) / max(1, len(lines))
    return tokenizes, distinct, len(lines)


def eval_infill_exact_match(model, objective, hp, text):
    """Share of holes of 4 bytes that are restored, byte for byte, as sample.py fills and trims them, with at most 5
    bytes for each that is missing. Baseline: four spaces. ends: of holes of 16 bytes, the share that ends by itself."""
    use = trained_use(objective, Infill, hp)
    if hp.block_size < MIN_BLOCK or not use:
        return {}

    def write(left, right, m):  # -> bytes written, did the hole end by itself?
        ids, P = use.prompt([left, right], m, hp)
        gens = sample.sample_generators(1, 1)
        [written], ended = sample.infill(model, objective, hp, ids, P, 1, 5 * m, gens, temperature=0)
        return written, ended
    half = min(80, hp.block_size // 2 - 48)
    x = windows(text, 2 * half, 2 * ROWS, "holes")
    n_restored = 0
    n_blank = 0
    n_ended = 0
    for row in x.tolist():
        left = row[:half - 2]
        middle = row[half - 2:half + 2]
        right = row[half + 2:]
        written, _ = write(left, right, 4)
        n_restored += sample.trim_to_suffix(model, objective, hp, left, written, right) == middle
        n_blank += bytes(middle) == b"    "
        _, ended = write(row[:half - 8], row[half + 8:], 16)
        n_ended += ended
    return {"score": n_restored / len(x), "baseline": n_blank / len(x), "ends": n_ended / len(x)}


def eval_repairs(model, objective, hp, text):
    """Edit distance to the clean text, as a multiple of the noisy text's. Baseline: 1, of a model that changes
    nothing."""
    x = windows(text, objective.n_bytes(hp.block_size, hp), ROWS // 2, "repairs")
    batch = objective.corrupt(x, make_rng("compare,repairs"), hp)
    in_place = find_use(objective, Repair).in_place
    left = 0
    before = 0
    for b, clean in enumerate(x.tolist()):
        noisy = batch["inp"][b].tolist()
        if not in_place:
            noisy = noisy[:int(batch["prefix"][b]) - 1]         # without SEP
            clean = clean[:int((batch["tgt"][b] != IGNORE_INDEX).sum()) - 1]        # EOT ends it
        gens = sample.sample_generators(1, 1)
        repaired = list(sample.repair(model, objective, noisy, hp, gens, temperature=0))
        left += edit_distance(repaired, clean)
        before += edit_distance(noisy, clean)
    return {"score": left / before, "baseline": 1.0} if before else {}


def edit_distance(a, b):  # Levenshtein's: bytes inserted, deleted and replaced
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        above = row
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (x != y)))
    return row[-1]


def eval_typos(model, objective, hp, text):
    """Share of texts whose most suspicious byte is their one typo: a lower-case letter between two others that was
    replaced by another. Baseline: the byte whose two pairs with its neighbours are the rarest in the held-out text."""
    g = make_rng("compare,typos")
    x = windows(text, min(hp.block_size, 128), 4 * ROWS, "typos")
    is_letter = (x >= ord("a")) & (x <= ord("z"))
    is_inside = is_letter & F.pad(is_letter[:, :-1], (1, 0)) & F.pad(is_letter[:, 1:], (0, 1))
    has_one = is_inside.any(1)
    x = x[has_one]
    is_inside = is_inside[has_one]
    if not len(x):
        return {}
    typo = torch.rand(x.shape, generator=g).where(is_inside, -1).argmax(1, keepdim=True)            # (N, 1)
    shift = torch.randint(1, 26, typo.shape, generator=g)
    letter = (x.gather(1, typo) - ord("a") + shift) % 26 + ord("a")
    x = x.scatter(1, typo, letter)
    marked = find_use(objective, Mark).predict(model, x).argmax(1, keepdim=True)

    pair_counts = torch.bincount(text[:-1].long() * 256 + text[1:].long(), minlength=1 << 16)
    counts = pair_counts[x[:, :-1] * 256 + x[:, 1:]]                                # (N, n - 1)
    rarest = (counts[:, :-1] + counts[:, 1:]).argmin(1, keepdim=True) + 1
    return {"score": float((marked == typo).float().mean()), "baseline": float((rarest == typo).float().mean())}


def eval_retrieval(model, objective, hp, text):
    """Share of 256 half passages whose nearest other half is their own. Baseline: cosines of histograms of bytes."""
    embed = find_use(objective, Search).embed
    pairs = windows(text, hp.block_size // 2 * 2, 256, "recalls").unflatten(1, (2, -1))             # (256, 2, n)

    def recall(e):  # (256, 2, C) -> share
        e = F.normalize(e, dim=-1)
        nearest = (e[:, 0] @ e[:, 1].T).argmax(1)
        return float((nearest == torch.arange(256)).float().mean())
    embedded = torch.stack([embed(model, pairs[:, 0]), embed(model, pairs[:, 1])], dim=1)
    histograms = torch.zeros(256, 2, 256).scatter_add(2, pairs, torch.ones(pairs.shape))
    return {"score": recall(embedded), "baseline": recall(histograms)}


def eval_accuracy(model, objective, hp, text):
    """Share of 512 rows, corrupted as in training (nsp's with masked bytes), that are answered correctly. Baseline:
    chance."""
    corpus = [dict(weight=1.0, text=text)]
    batches = [train.draw_batch(objective, corpus, "text", EVAL_ROWS, f"answers,{i}", hp) for i in range(16)]
    n_answers = 2 if find_use(objective, Follow) else hp.block_size
    figures, _ = train.mean_terms(objective, model, batches, hp)
    return {"score": figures["accuracy"], "baseline": 1 / n_answers} if "accuracy" in figures else {}


@dataclass(frozen=True)
class Task:
    heading: str                                # what is measured, and in brackets the baseline
    evaluate: Callable                          # (model, objective, hp, text) -> {"score", "baseline", ...} or {}


TASKS = {                                       # of an objective's first use, which decides sample.py's mode
    Continue: Task("bits per byte of the second half of a window (lzma)", eval_second_half),
    Fill: Task("bytes in written lines that tokenize (bytes by their frequency)", eval_tokenizable_lines),
    Infill: Task("holes of 4 bytes restored (four spaces)", eval_infill_exact_match),
    Repair: Task("edit distance left (of the noisy text)", eval_repairs),
    Mark: Task("typos that are the most suspicious byte (the rarest two pairs of bytes)", eval_typos),
    Search: Task("recall of 256 other halves (histograms of bytes)", eval_retrieval),
    Follow: Task("rows answered correctly (chance)", eval_accuracy),
    Seam: Task("rows answered correctly (chance)", eval_accuracy),
}


# ---- a linear probe on frozen states: which kind of token does a byte belong to?

def layer_states(model, objective, hp, x):  # (N, n) -> (L, N, n, C): each block's states, normed, in pieces of a block
    """Attention is the objective's own. Hooks read the states, since nothing else needs those inside the model."""
    N, n = x.shape
    kept = []

    def keep(block, args, out):
        kept.append(norm(out).float())
    hooks = [block.register_forward_hook(keep) for block in model.blocks]
    row = x.reshape(-1, min(hp.block_size, n))
    model(row, 0 if objective.attention == "causal" else row.size(1), doc_ids(row, hp))
    for hook in hooks:
        hook.remove()
    return torch.stack(kept).view(len(kept), N, n, -1)


def byte_classes(text):  # bytes -> (n,) long: index into CLASSES of every byte; None where tokenize gives up
    """White space and what has no class is class 0; a name that is a keyword counts as one. Only of ASCII, where
    columns are bytes."""
    if not text.isascii():
        return None
    kinds = {"NAME": 2, "STRING": 3, "FSTRING_START": 3, "FSTRING_MIDDLE": 3, "FSTRING_END": 3, "COMMENT": 4,
             "NUMBER": 5, "OP": 6}              # FSTRING_*: from Python 3.12 on
    lines = [line + "\n" for line in text.decode().split("\n")]
    labels = torch.zeros(len(text), dtype=torch.long)
    starts = [0, *itertools.accumulate(map(len, lines))]
    try:
        for token in tokenize.generate_tokens(iter(lines).__next__):
            kind = kinds.get(token_kinds.tok_name[token.type])
            if token.type == token_kinds.ERRORTOKEN:            # before Python 3.12 no error
                return None
            if kind:
                first = starts[token.start[0] - 1] + token.start[1]
                end = starts[token.end[0] - 1] + token.end[1]
                labels[first:end] = 1 if keyword.iskeyword(token.string) else kind
        return labels
    except (SyntaxError, tokenize.TokenError):
        return None


def fit_classifier(x, y, K, decay=1e-4):  # x (N, C), y (N,) -> a function x -> classes
    """Multinomial logistic regression on standardized x. All classes weigh the same, however rare."""
    mean = x.mean(0)
    std = x.std(0) + 1e-6
    weight = len(y) / (K * torch.bincount(y, minlength=K).clamp(min=1))
    W = torch.zeros(x.size(1) + 1, K, requires_grad=True)

    def standardize(x):  # (N, C) -> (N, C + 1), with a bias
        return F.pad((x - mean) / std, (0, 1), value=1.0)
    z = standardize(x)
    solver = torch.optim.LBFGS([W], max_iter=60, line_search_fn="strong_wolfe")

    def closure():
        solver.zero_grad()
        loss = F.cross_entropy(z @ W, y, weight=weight) + decay * W.square().sum()
        loss.backward()
        return loss
    solver.step(closure)                        # enables gradients by itself

    def classify(x):
        return (standardize(x) @ W.detach()).argmax(1)
    return classify


def balanced_accuracy(guess, y):  # (N,), (N,) -> the mean over classes of the share that is right
    return statistics.fmean(float((guess[y == k] == k).float().mean()) for k in y.unique().tolist())


PROBE_TRAIN, PROBE_VAL, PROBE_TEST = range(3)


def probe_accuracy(layers, y, part, K):  # layers (L, N, C), y (N,), part (N,) -> balanced accuracy
    """A classifier for each layer; the layer is chosen on bytes that neither fit it nor score it."""
    best = None
    best_accuracy = -1.0
    for x in layers:
        classify = fit_classifier(x[part == PROBE_TRAIN], y[part == PROBE_TRAIN], K)
        accuracy = balanced_accuracy(classify(x[part == PROBE_VAL]), y[part == PROBE_VAL])
        if accuracy > best_accuracy:
            best_accuracy = accuracy
            best = classify(x[part == PROBE_TEST])
    return balanced_accuracy(best, y[part == PROBE_TEST])


@dataclass
class ProbeData:
    x: torch.Tensor                             # (N, n) bytes
    classes: torch.Tensor                       # (N, n) index into CLASSES
    chosen: torch.Tensor                        # (N, n) bool: which bytes to probe
    part: torch.Tensor                          # (N,) PROBE_TRAIN, PROBE_VAL or PROBE_TEST


def probe_data(n):  # -> ProbeData of windows of n bytes
    """Of the standard library. PROBE_TEST are the documents that data.py holds out: up to 9 evenly spaced windows of
    each, and up to 3 of the others."""
    x, classes, parts = [], [], []
    for i, text in enumerate(read_stdlib().values()):
        labels = byte_classes(text)
        if labels is None or len(text) < n:
            continue
        if i % 10 == 9:
            part = PROBE_TEST
        else:
            part = PROBE_VAL if i % 5 == 0 else PROBE_TRAIN
        count = min(9 if part == PROBE_TEST else 3, len(text) // n)
        for k in range(count):
            a = (len(text) - n) * k // max(1, count - 1)
            x.append(from_bytes(text[a:a + n]).long())
            classes.append(labels[a:a + n])
            parts.append(part)
    x = torch.stack(x)
    part = torch.tensor(parts)
    is_scored = (part == PROBE_TEST)[:, None].expand_as(x)
    rate = torch.where(is_scored, 0.4, 8000 / float((~is_scored).sum()))            # 8000 bytes fit and choose
    chosen = torch.rand(x.shape, generator=make_rng("compare,positions")) < rate
    return ProbeData(x, torch.stack(classes), chosen, part)


def eval_probe(features, data):  # features: x (N, n) -> (L, N, n, C) -> {probe: balanced accuracy}
    layers = []
    for a in range(0, len(data.x), ROWS):
        layers.append(features(data.x[a:a + ROWS])[:, data.chosen[a:a + ROWS]])
    part = data.part[:, None].expand_as(data.chosen)[data.chosen]
    return {"probe": probe_accuracy(torch.cat(layers, dim=1), data.classes[data.chosen], part, len(CLASSES))}


# ---- the same for a whole passage: which package is it from?

N_PACKAGES = 10                                 # those with the most files


@dataclass
class PassageData:
    x: torch.Tensor                             # (N, n) bytes
    package: torch.Tensor                       # (N,) index of its package
    part: torch.Tensor                          # (N,) PROBE_TRAIN, PROBE_VAL or PROBE_TEST


def passage_data(n):  # -> PassageData of windows of n bytes
    """Of the standard library's packages: up to 6 evenly spaced windows of each file. Every third file of a package is
    PROBE_TEST, most of which the models were trained on, as text without labels. encodings is left out: its files are
    tables that hardly differ."""
    top = sysconfig.get_paths()["stdlib"]
    files = {}                                  # {package: [text]}
    for path, text in read_stdlib().items():
        package, _, rest = os.path.relpath(path, top).partition(os.sep)
        if rest and package != "encodings" and len(text) >= n:
            files.setdefault(package, []).append(text)
    largest = sorted(files.values(), key=len, reverse=True)[:N_PACKAGES]
    x, packages, parts = [], [], []
    for package, texts in enumerate(largest):
        for i, text in enumerate(texts):
            count = min(6, len(text) // n)
            for k in range(count):
                a = (len(text) - n) * k // max(1, count - 1)
                x.append(from_bytes(text[a:a + n]).long())
                packages.append(package)
                parts.append(i % 3)
    return PassageData(torch.stack(x), torch.tensor(packages), torch.tensor(parts))


def eval_passages(features, data):  # features: x (N, n) -> (L, N, n, C) -> {passages: balanced accuracy}
    """From the mean over a passage's positions."""
    layers = [features(data.x[a:a + ROWS]).mean(2) for a in range(0, len(data.x), ROWS)]            # (L, ROWS, C)
    return {"passages": probe_accuracy(torch.cat(layers, dim=1), data.package, data.part, N_PACKAGES)}


def histogram_features(x):  # (N, n) -> (1, N, n, 256): not states; their mean is the histogram of the bytes
    return F.one_hot(x, N_BYTES).float()[None]


def byte_features(x):  # (N, n) -> (1, N, n, 5 * 128): not states, but the bytes from two before to two after
    near = F.pad(x, (2, 2)).unfold(1, 5, 1).clamp(max=127)                          # (N, n, 5)
    return F.one_hot(near, 128).flatten(2).float()[None]
