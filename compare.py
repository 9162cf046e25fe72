"""Train every objective alike and measure all of them with the same yardsticks.

    python compare.py                                   all objectives, one seed: about half an hour on a laptop CPU
    python compare.py --quick                           100 steps, five minutes: too short to conclude anything
    python compare.py --seeds 1,2,3 --objectives clm,mlm
    python compare.py --sweep mask_rate=.1,.15,.3,.4 --objectives mlm --seeds 1,2,3
    python compare.py --sweep bart_noise=mask,infill+permute        a + inside a value stands for a comma
    python compare.py --sweep replay=0,.05,.25          continual pre-training on C++ headers, Python as the old corpus
    python compare.py --sweep init=none,mlm --objectives contrastive        all steps, or half of them as mlm before

Every cell (objective, setting, seed) is one run of train.py in a folder of its own, for the same number of row
positions; what is finished is not trained again. Results go to results.jsonl, from which the Markdown tables and the
pictures are drawn anew each time, with differences from the first row paired by seed. To measure anew, delete
results.jsonl and baselines-*.json: the runs stay. Flags that are not listed below are train.py's, such as --n_layer 6.
"""
# N windows, n bytes of a window, a bytes left of a middle of m, T = block_size, C width, K classes, L layers
import argparse
import contextlib
import io
import json
import keyword
import math
import os
import statistics
import sys
import time
import token as token_kinds
import tokenize
import zlib

import torch
import torch.nn.functional as F

import bench
import sample
import train
from data import CLS, EOT, MASK, MID, MODE_R, MODE_S, MODE_X, PAD, PRE, SENTINEL, SEP, SUF
from data import check_sizes, draw, fail, from_bytes, gather, generator, open_corpus, read_stdlib, to_bytes
from model import allow, norm
from objectives import OBJECTIVES, auc, embed

FLAGS = {
    "objectives": ("", "which, separated by commas; without it all, or the first that has the setting of --sweep"),
    "seeds": ("1", "seeds, separated by commas: the same weights, and windows at the same places, for all objectives"),
    "max_iters": (1000, "steps of each run, of batch_size * block_size positions"),
    "quick": (False, "100 steps in place of --max_iters"),
    "data": ("stdlib", "corpus; yardstick 3 reads labels off Python source and needs stdlib"),
    "new_data": ("", "second corpus, for --sweep replay; without it the C++ headers that come with torch"),
    "sweep": ("", "a setting and its values, as in mask_rate=.1,.15,.3"),
    "out_dir": ("out/compare", "folder of results, tables, pictures and runs"),
    "rows": (False, "draw one row of every objective, with who sees whom, into rows.png, and end"),
}
MIDDLES = 4, 16, 64                             # bytes to infill
ROWS = 64                                       # windows of a yardstick, and samples
CPP_HEADERS = os.path.join(torch.__path__[0], "include")
SHARE = 0.1                                     # of the bytes are replaced in yardstick 5
CLASSES = "space", "keyword", "name", "string", "comment", "number", "operator"
ORDER = 5                                       # of the count model
# train.py's flags that compare.py sets
CELL = {"objective", "seed", "data", "out_dir", "resume", "max_iters", "eval_interval", "init_from"}

# what an objective's model can be asked: the left side alone, masked bytes, or text that it writes by itself
LEFT = {"clm", "mtp", "prefix"}
MASKED = {"mlm", "mdlm", "nsp", "hybrid"}
NATIVE = {"clm", "prefix", "ul2", "fim", "mtp", "hybrid", "mdlm"}

# two tables. metric: (heading, digits, is more better)
LEARNED = {
    "loss": ("own loss", 3, None), "bpb": ("left to right, bits/byte", 3, False),
    "old_before": ("old corpus before", 3, None), "old": ("old corpus after", 3, False),
    "new": ("new corpus", 3, False),
    **{f"infill_{m}": (f"infill {m}, bits/byte", 2, False) for m in MIDDLES},
    **{f"exact_{m}": (f"{m} exact", 3, True) for m in MIDDLES},
    "classes": ("byte classes", 3, True), "package": ("package", 3, True), "recall_1": ("recall@1", 3, True),
    "recall_10": ("recall@10", 3, True), "replaced": ("replaced, AUC", 3, True),
    "gen_bpb": ("samples, bits/byte", 2, None), "gen_lines": ("lines that tokenize", 2, True),
    "gen_distinct": ("distinct 8-grams", 2, True),
}
COST = {
    "raw_mb": ("MB read", 2, None), "targets": ("targets a row", 1, True), "tflop": ("TFLOP", 2, False),
    "seconds": ("training, s", 0, False), "train_speed": ("training, kB/s", 1, True),
    "decode_speed": ("writing 64, kB/s", 1, True), "alone_speed": ("writing one, kB/s, mtp with drafts", 2, True),
    "pass_bytes": ("bytes a pass", 2, True),
}


# ---- windows and what a model makes of them

def windows(text, n, count, key):  # (M,) uint8 -> (count, n) long: windows without a NUL where there are any
    source = [dict(weight=1.0, text=text)]
    return gather(source, "text", *draw(source, "text", n, count, generator(f"compare,{key}")), n, whole=True)


def fixed(x, *ids):  # (N, n) -> (N, len(ids)), the same ids in every row
    return torch.tensor(ids, dtype=torch.long).expand(len(x), -1)


def sight(hp):  # the mask under which a model's states are read
    return "causal" if OBJECTIVES[hp.objective]["mask"] == "causal" else "bidirectional"


@torch.no_grad()
def states(model, hp, x):  # (N, n) -> (L, N, n, C): each block's states, normed; n in pieces of the model's block
    """Read under the objective's own mask, by a hook on each block, since nothing else wants states from inside."""
    kept, (N, n) = [], x.shape
    keep = lambda module, args, out: kept.append(norm(out).float())
    hooks = [block.register_forward_hook(keep) for block in model.blocks]
    model(x.reshape(-1, min(hp.block_size, n)), sight(hp))
    for hook in hooks:
        hook.remove()
    return torch.stack(kept).view(len(kept), N, n, -1)


def masked_states(model, hp, x):  # (N, n) with MASKs -> (N, n, C): the state that predicts each byte
    """Of a masked objective, in a row as in training."""
    before, behind = {"hybrid": ((EOT,), ()), "nsp": ((CLS,), (SEP,))}.get(hp.objective, ((), ()))
    h = model(torch.cat((fixed(x, *before), x, fixed(x, *behind)), 1), "bidirectional")
    first = 0 if hp.objective == "hybrid" else len(before)      # hybrid's position i - 1 predicts byte i
    return h[:, first:first + x.size(1)]


# ---- 2: infilling

@torch.no_grad()
def infill_logits(model, hp, x, a, m):  # x (N, n) -> (N, m, V) for bytes a .. a + m - 1; None where there is no way
    """In the model's own format, each byte from the middle's bytes before it, and from both sides where the objective
    gives both: the chain rule, so that their nats add up to a code length."""
    name, (left, middle, right) = hp.objective, (x[:, :a], x[:, a:a + m], x[:, a + m:])
    if name in MASKED:
        # m passes, pass i with the middle's first i bytes in place: the chain rule
        rows = [torch.cat((left, middle[:, :i], fixed(x, *[MASK] * (m - i)), right), 1) for i in range(m)]
        return torch.stack([model.logits(masked_states(model, hp, row)[:, a + i]) for i, row in enumerate(rows)], 1)
    holes = {"infill": 1, "mask": m}            # MASKs that stand for a hole; the other noises leave none
    holes = next((holes[noise] for noise in getattr(hp, "bart_noise", "").split(",") if noise in holes), 0)
    head = {
        **dict.fromkeys(LEFT, (left,)),
        "fim": (fixed(x, PRE, SUF), right, fixed(x, MID), left),    # SPM: the middle goes on from its left side
        "span": (left, fixed(x, SENTINEL), right, fixed(x, SENTINEL + 1, SEP, SENTINEL)),
        "ul2": (fixed(x, MODE_X if m > 16 else MODE_R), left, fixed(x, SENTINEL), right,
                fixed(x, SENTINEL + 1, SEP, SENTINEL)),
        "bart": (left, fixed(x, *[MASK] * holes), right, fixed(x, SEP), left),
    }.get(name)
    if head is None or name == "bart" and not holes:
        return None
    row = torch.cat((*head, middle), 1)
    assert row.size(1) <= hp.block_size, (row.shape, hp.block_size)
    n = row.size(1) - m
    P = {"prefix": a, "span": n - 1, "ul2": n - 1, "bart": n - a}.get(name, 0)      # up to SEP
    h = model(row[:, :-1], torch.full((len(x),), P) if P else "causal")
    return model.logits(h[:, -m:])


def infilling(model, hp, text):  # -> {infill_m: bits a byte, exact_m: share of middles that the likeliest bytes make}
    """As many bytes left as right of the middle, all from the same held-out windows."""
    n, out = (hp.block_size - 16) // 2, {}
    for m in [m for m in MIDDLES if m + 2 <= n]:
        x, a = windows(text, n, ROWS, f"infill,{m}"), (n - m) // 2
        logits = infill_logits(model, hp, x, a, m)
        if logits is None:
            return {}
        logits, middle = logits[..., :256].float(), x[:, a:a + m]
        out[f"infill_{m}"] = float(F.cross_entropy(logits.flatten(0, 1), middle.flatten())) / math.log(2)
        out[f"exact_{m}"] = float((logits.argmax(-1) == middle).all(1).float().mean())
    return out | {"left_only": hp.objective in LEFT}


# ---- 3: understanding

def byte_classes(text):  # bytes -> (n,) long: index into CLASSES of every byte, or None where tokenize gives up
    """White space and what tokenize names nothing is class 0; a name that is a keyword counts as one."""
    try:
        lines = [line + "\n" for line in text.decode().split("\n")]
        kinds = {"NAME": 2, "STRING": 3, "FSTRING_START": 3, "FSTRING_MIDDLE": 3, "FSTRING_END": 3, "COMMENT": 4,
                 "NUMBER": 5, "OP": 6}          # FSTRING_*: from Python 3.12 on
        starts, labels = [0], torch.zeros(len(text) + 1, dtype=torch.long)
        for line in lines:
            starts.append(starts[-1] + len(line.encode()))
        place = lambda at: starts[at[0] - 1] + len(lines[at[0] - 1][:at[1]].encode())
        for token in tokenize.generate_tokens(iter(lines).__next__):
            kind = kinds.get(token_kinds.tok_name[token.type])
            if kind:
                labels[place(token.start):place(token.end)] = 1 if keyword.iskeyword(token.string) else kind
        return labels[:len(text)]
    except (SyntaxError, tokenize.TokenError, UnicodeDecodeError, IndexError):
        return None


def labelled(documents, held, n):  # {path: bytes}, paths held out -> x (N, n), classes (N, n), path of each window
    x, classes, paths = [], [], []
    for path, text in documents.items():
        labels = byte_classes(text)
        if labels is None or len(text) < n:
            continue
        count = min(9 if path in held else 3, len(text) // n)
        for i in range(count):                  # evenly spaced over the document
            a = (len(text) - n) * i // max(1, count - 1)
            x.append(from_bytes(text[a:a + n]).long())
            classes.append(labels[a:a + n])
            paths.append(path)
    return torch.stack(x), torch.stack(classes), paths


def fit(x, y, K, decay=1e-4):  # x (N, C), y (N,) -> a function x -> classes
    """Multinomial logistic regression on standardized x. All classes weigh the same, however rare."""
    # a class weighs the inverse of its count, or a probe that says "name" would do well
    mean, std, weight = x.mean(0), x.std(0) + 1e-6, len(y) / (K * torch.bincount(y, minlength=K).clamp(min=1))
    W = torch.zeros(x.size(1) + 1, K, requires_grad=True)
    wide = lambda x: F.pad((x - mean) / std, (0, 1), value=1.0)
    z = wide(x)
    solver = torch.optim.LBFGS([W], max_iter=60, line_search_fn="strong_wolfe")
    def closure():
        solver.zero_grad()
        loss = F.cross_entropy(z @ W, y, weight=weight) + decay * W.square().sum()
        loss.backward()
        return loss
    solver.step(closure)
    return lambda x: (wide(x) @ W.detach()).argmax(1)


def balanced(guess, y):  # (N,), (N,) -> the mean over classes of the share that is right
    return statistics.fmean(float((guess[y == k] == k).float().mean()) for k in y.unique().tolist())


def probe(layers, y, split, K):  # layers (L, N, C), y (N,), split (N,) -> balanced accuracy
    """split: 0 to fit on, 1 to choose the layer, 2 to score."""
    at = [split == part for part in range(3)]
    solved = [fit(x[at[0]], y[at[0]], K) for x in layers]
    best = max(range(len(layers)), key=lambda i: balanced(solved[i](layers[i][at[1]]), y[at[1]]))
    return balanced(solved[best](layers[best][at[2]]), y[at[2]])


def probe_data(n):  # -> x (N, n), classes (N, n), package (N,), split (N,), K packages, rows and cols of bytes to probe
    """Labels from the corpus itself. split: 0 fit, 1 choose the layer, 2 score, which are the documents that data.py
    holds out. package: -1 outside the ten largest with enough windows held out."""
    documents = read_stdlib()
    top, order = os.path.commonpath([*documents]), {path: i for i, path in enumerate(documents)}
    x, classes, paths = labelled(documents, {path for path, i in order.items() if i % 10 == 9}, n)
    split = torch.tensor([2 if order[path] % 10 == 9 else int(order[path] % 5 == 0) for path in paths])
    names = [os.path.relpath(path, top).split(os.sep)[0] for path in paths]
    fitted = [name for name, part in zip(names, split.tolist()) if part < 2]
    scored = [name for name, part in zip(names, split.tolist()) if part == 2]
    enough = {name for name in names if not name.endswith(".py") and scored.count(name) >= 12}
    kept = sorted(enough, key=lambda name: (-fitted.count(name), name))[:10]
    package = torch.tensor([kept.index(name) if name in kept else -1 for name in names])
    held = (split == 2)[:, None].expand(-1, n)
    rate = torch.where(held, 0.4, 8000 / float((~held).sum()))  # of the others 8000 bytes fit and choose
    rows, cols = (torch.rand(len(x), n, generator=generator("compare,positions")) < rate).nonzero().T
    return dict(x=x, classes=classes, package=package, split=split, K=len(kept), rows=rows, cols=cols)


def understanding(features, data):  # features: x (N, n) -> (L, N, n, C) -> {classes, package: accuracy}
    """A probe of single states for the classes, of a window's mean state for its package."""
    rows, cols, inside = data["rows"], data["cols"], data["package"] >= 0           # rows (N',) in ascending order
    local, pooled = [], []
    for a in range(0, len(data["x"]), ROWS):
        h = features(data["x"][a:a + ROWS])
        here = (rows >= a) & (rows < a + ROWS)
        local.append(h[:, rows[here] - a, cols[here]])
        pooled.append(h.mean(2))
    local, pooled = torch.cat(local, 1), torch.cat(pooled, 1)[:, inside]            # (L, N', C), (L, inside, C)
    return {"classes": probe(local, data["classes"][rows, cols], data["split"][rows], len(CLASSES)),
            "package": probe(pooled, data["package"][inside], data["split"][inside], data["K"])}


def byte_features(x):  # (N, n) -> (1, N, n, 5 * 128): in place of states the bytes from two before to two behind
    near = F.pad(x, (2, 2)).unfold(1, 5, 1).clamp(max=127)                          # (N, n, 5)
    return F.one_hot(near, 128).flatten(2).float()[None]


# ---- 4: retrieval, 5: corruption

@torch.no_grad()
def retrieval(model, hp, text):  # -> {recall_1, recall_10}: a passage's second half by its first, among 256
    x = windows(text, min(hp.block_size, 256), 256, "retrieval")
    half = x.size(1) // 2
    pooled = [embed(model, part) if sight(hp) == "bidirectional" else model(part, "causal").float().mean(1)
              for part in (x[:, :half], x[:, half:])]
    # the mean state is shared by all passages; with it every cosine is near 1
    a, b = (F.normalize(p - p.mean(0), dim=-1) for p in map(F.normalize, pooled))   # without what all passages share
    near = a @ b.T                              # (256, 256)
    rank = (near >= near.diagonal()[:, None]).sum(1) - 1        # of a tie every other one comes first
    return {"recall_1": float((rank < 1).float().mean()), "recall_10": float((rank < 10).float().mean())}


@torch.no_grad()
def corruption(model, heads, hp, text):  # -> {replaced: AUC}
    """A tenth of the bytes is replaced by bytes of the text's own distribution; a byte's score is the head's for
    electra, else its surprise: given those before it, or given the others while every eighth byte is masked."""
    x, g = windows(text, min(hp.block_size, 256) - 2, ROWS, "corruption"), generator("compare,replaced")
    other = text[torch.randint(0, len(text), x.shape, generator=g)].long()
    bad = (torch.rand(x.shape, generator=g) < SHARE) & (other != x)
    z = torch.where(bad, other, x)
    if hp.objective == "electra":
        score = heads["replaced"](model(z, "bidirectional").float())[..., 0]
    elif hp.objective in LEFT | {"fim"}:
        h = model(torch.cat((fixed(z, EOT), z[:, :-1]), 1), "causal")
        score = F.cross_entropy(model.logits(h).mT, z, reduction="none")
    elif hp.objective in MASKED:
        score, eighth = torch.zeros(z.shape), torch.arange(z.size(1)) % 8
        # eight passes, each with every eighth byte masked, in place of one for each byte
        for r in range(8):
            logits = model.logits(masked_states(model, hp, z.masked_fill(eighth == r, MASK)))[..., :256]
            score = torch.where(eighth == r, F.cross_entropy(logits.mT, z, reduction="none"), score)
    else:
        return {}
    return {"replaced": float(auc(score.flatten(), bad.long().flatten()))}


# ---- 6: generation

class CountModel:
    """Byte probabilities from counts with up to ORDER bytes of context, interpolated (Witten and Bell 1991)."""

    def __init__(self, text):  # (M,) uint8
        self.tables = []
        for k in range(ORDER + 1):
            grams, n = keys(text, k + 1).unique(return_counts=True)
            contexts, kinds = (grams // 256).unique(return_counts=True)
            at = torch.searchsorted(contexts, grams // 256)
            total = torch.zeros(len(contexts), dtype=torch.long).index_add_(0, at, n)
            self.tables.append((grams, n, contexts, kinds, total))

    def bits(self, text):  # (n,) uint8 -> bits of its bytes behind the first ORDER
        p = torch.full((len(text) - ORDER,), 1 / 256, dtype=torch.double)
        for k, (grams, n, contexts, kinds, total) in enumerate(self.tables):
            key = keys(text, k + 1)[ORDER - k:]
            new, all_n = (look_up(contexts, values, key // 256).double() for values in (kinds, total))
            mixed = (look_up(grams, n, key) + new * p) / (all_n + new).clamp(min=1)
            p = torch.where(all_n > 0, mixed, p)
        return float(-p.log2().sum())


def look_up(table, values, key):  # sorted keys (M,), their values (M,), keys (n,) -> (n,) values, 0 where there is none
    i = torch.searchsorted(table, key).clamp(max=len(table) - 1)
    return torch.where(table[i] == key, values[i], 0)


def keys(text, n):  # (M,) uint8 -> (M - n + 1,) long: every n-gram as a number in base 256
    key = torch.zeros(len(text) - n + 1, dtype=torch.long)
    for i in range(n):
        key = key * 256 + text[i:len(text) - n + 1 + i]
    return key


def write(model, hp, prompt, new, gens):  # prompt (N, n) -> (N, at most new): the objective's own way to write
    if hp.objective == "mdlm":
        x = torch.cat((prompt, fixed(prompt, *[MASK] * new)), 1)
        return sample.fill(model, x, gens, steps=64, order="ancestral", temperature=0.8)[:, prompt.size(1):]
    before, behind = ((MODE_S,), (SEP,)) if hp.objective == "ul2" else ((), ())
    ids = torch.cat((fixed(prompt, *before), prompt, fixed(prompt, *behind)), 1)
    mask = "prefix" if hp.objective in ("prefix", "ul2") else "causal"
    return torch.stack([*sample.generate(model, ids, new, hp.block_size, gens, mask, temperature=0.8)], 1)


@torch.no_grad()
def generation(model, heads, hp, text, counts):  # -> {gen_*, decode_speed, alone_speed, pass_bytes}
    """64 samples at once behind prompts of 32 bytes, then eight one at a time; mtp's eight are speculated."""
    if hp.objective not in NATIVE or hp.objective == "hybrid" and hp.hybrid_ratio == 1:
        return {}
    T, gens = hp.block_size, sample.sample_generators(1, ROWS)
    prompt, new = windows(text, 32, ROWS, "prompts"), min(T, 256) - 40
    begin = time.perf_counter()
    out = write(model, hp, prompt, new, gens)
    speed = out.numel() / (time.perf_counter() - begin) / 1e3

    tally, written, begin = [], 0, time.perf_counter()
    for i in range(8):
        if "mtp" in heads:
            g, ids = generator(f"compare,{i}"), prompt[i].tolist()
            written += len(list(sample.speculate(model, heads, ids, new, T, g, tally, temperature=0.8)))
        else:
            written += write(model, hp, prompt[i:i + 1], new, gens[i:i + 1]).numel()
    alone, passes = written / (time.perf_counter() - begin) / 1e3, {"mtp": len(tally) or written, "mdlm": 8 * 64}
    texts = [bytes(row).partition(b"\0")[0] for row in out.tolist()]
    return text_figures(texts, counts) | {"decode_speed": speed, "alone_speed": alone,
                                          "pass_bytes": written / passes.get(hp.objective, written)}


def text_figures(texts, counts):  # [bytes] -> {gen_bpb, gen_lines, gen_distinct}
    """Bits under the count model; lines that begin and end inside the text; distinct 8-grams among all."""
    long = [from_bytes(t) for t in texts if len(t) > ORDER]
    lines = [line for t in texts for line in t.decode("utf-8", "replace").split("\n")[1:-1] if line.strip()]
    grams = [t[i:i + 8] for t in texts for i in range(len(t) - 7)]
    return {"gen_bpb": sum(map(counts.bits, long)) / max(1, sum(len(t) - ORDER for t in long)),
            "gen_lines": sum(map(tokenizes, lines)) / max(1, len(lines)),
            "gen_distinct": len(set(grams)) / max(1, len(grams))}


def tokenizes(line):  # str -> does tokenize accept the line by itself?
    try:
        tokens = tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline)
        return all(token.type != token_kinds.ERRORTOKEN for token in tokens)
    except (SyntaxError, tokenize.TokenError):
        return False


# ---- a cell: train, measure

def asked_as(hp):  # -> the objective in whose way a model is asked: not in one that its settings never trained
    name = OBJECTIVES[hp.objective].get("like", hp.objective)
    plain = {"fim": min(hp.fim_rate, hp.fim_spm_rate) == 0, "hybrid": hp.hybrid_ratio == 0,
             "ul2": not {"R", "X"} & set(hp.ul2_weights)}
    return {"fim": "clm", "hybrid": "clm", "ul2": "prefix"}[name] if plain.get(name) else name


def measure(folder, shared):  # -> {metric: number}; on the CPU, wherever the run was trained
    """What an objective cannot be asked is left out."""
    model, heads, hp, _ = sample.load_run(folder, "cpu")
    hp.objective = asked_as(hp)
    text, out = shared["text"], {}
    if hp.block_size >= 128:
        out |= infilling(model, hp, text) | retrieval(model, hp, text) | corruption(model, heads, hp, text)
        out |= generation(model, heads, hp, text, shared["counts"])
    if shared["probe"] and 256 % min(hp.block_size, 256) == 0:
        out |= understanding(lambda x: states(model, hp, x), shared["probe"])
    return out


def logged(folder):  # -> {metric: number} that metrics.jsonl and the settings hold
    """The last validation, the median pace, bytes of the windows that were drawn (rows of ul2 and bart may use fewer),
    and FLOPs for the masks as they were."""
    with open(os.path.join(folder, "metrics.jsonl"), "rb") as f:
        records = [json.loads(line) for line in f][1:]
    val = next(r for r in records if r.get("split") == "val" and r["step"] == records[-1]["step"])
    hp = argparse.Namespace(**train.load_checkpoint(folder)["config"])
    [run] = train.members(hp)
    steps, raw = val["step"], run["n"] * run["rows"] * hp.accum                     # raw: bytes of a step
    clock = [(r["step"], r["seconds"]) for r in records if r["split"] == "train"]
    paces = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in zip(clock, clock[1:])] or [val["seconds"] / max(1, steps)]
    return {"loss": val["loss"], "bpb": val["bpb"], "targets": val["targets"] * hp.block_size,
            "seconds": val["seconds"], "train_speed": raw / max(statistics.median(paces), 1e-9) / 1e3,
            "raw_mb": raw * steps / 1e6, "tflop": bench.mean_flops(run["name"], hp) * hp.accum * steps / 1e12}


def left_right_bits(folder, text):  # -> bits a byte of held-out windows under the causal mask
    model, _, hp, _ = sample.load_run(folder, "cpu", "float32")
    x, nats = windows(text, hp.block_size + 1, 4 * ROWS, "left to right"), []
    with torch.no_grad():
        for part in x.split(ROWS):
            logits = model.logits(model(part[:, :-1], "causal"))
            nats.append(float(F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())))
    return statistics.fmean(nats) / math.log(2)


def swept(cell):  # -> the flag of train.py that a sweep sets
    setting, value = cell["setting"], cell["value"]
    if setting in ("", "replay", "init"):
        return []
    words = isinstance(train.specs()[setting][0], str)          # 1e+1 is a number
    return [f"--{setting}", value.replace("+", ",") if words else value]


def run_training(cell, flags):  # -> folder of the finished run, folder of the run that it began with, or None
    """What it finds finished it leaves, what it finds begun it resumes. A run that diverged is none."""
    setting, value, steps, first = cell["setting"], cell["value"], cell["max_iters"], None
    # the cell without its sweep: the parent that all values of replay start from
    plain = {**cell, "setting": "", "value": "", "new_data": "", "crc": cell["crc"][:1]}
    argv = ["--objective", cell["objective"], "--seed", str(cell["seed"]), *cell["flags"]]
    if setting == "replay":                     # the same steps again, on the new corpus
        first, share = run_training(plain, flags)[0], float(value)
        new = cell["new_data"] or CPP_HEADERS
        argv += ["--data", f"{new}:{1 - share:g}", *([f"{cell['data']}:{share:g}"] if share else [])]
    else:
        argv += ["--data", cell["data"]]
    if setting == "init" and value != "none":   # half of the steps with another objective
        first = run_training({**plain, "objective": value, "max_iters": steps // 2}, flags)[0]
        steps -= steps // 2
        argv += ["--seed", str(cell["seed"] + 1000)]            # or the second half would read the first one's windows
    argv += swept(cell) + (["--init_from", first] if first else [])
    if first is None and (setting == "replay" or setting == "init" and value != "none"):
        return None, None
    words = [cell["objective"], f"{setting}={value}", str(cell["max_iters"]), f"seed{cell['seed']}"]
    # settings and corpus are in the folder's name: other ones cannot resume it
    tag = zlib.crc32(json.dumps([cell["flags"], cell["data"], cell["new_data"], cell["crc"]]).encode())
    name = "-".join(word for word in words if word != "=").replace(":", "_")
    folder = os.path.join(flags.out_dir, "runs", f"{name}-{tag:x}")
    begun = os.path.exists(os.path.join(folder, "ckpt.pt"))
    if begun and train.load_checkpoint(folder)["step"] == steps:
        return folder, first
    os.makedirs(folder, exist_ok=True)
    for name in ("best.pt", "metrics.jsonl") if not begun else ():
        if os.path.exists(os.path.join(folder, name)):          # killed before its first checkpoint was whole
            os.remove(os.path.join(folder, name))
    argv = ["--resume"] if begun else [*argv, "--max_iters", str(steps), "--eval_interval", str(steps)]
    with open(os.path.join(folder, "log.txt"), "a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        code = train.main([*argv, "--out_dir", folder])
    if code > 1:                                # a signal
        print(f"stopped, saved in {folder}. The same command goes on")
        sys.exit(code)
    crc = {s[2] for s in train.load_checkpoint(folder)["sources"]}
    assert crc <= set(cell["crc"]), f"{folder} was trained on other bytes than {cell['crc']}: {crc}"
    return (None if code else folder), first


def cells(flags, rest):  # -> [{objective, setting, value, seed, max_iters, data, new_data, flags}], every flag checked
    """Exits with code 2 on a flag or a setting that train.py would refuse, before anything runs."""
    setting, _, values = flags.sweep.partition("=")
    values = [v for v in values.split(",") if v] if setting else [""]
    own = [name for name, entry in OBJECTIVES.items() if setting in entry["settings"]]
    own = {"replay": ["clm"], "init": ["contrastive"]}.get(setting, own)
    if flags.sweep and not own and setting not in set(train.specs()) - CELL:
        fail(f"--sweep {flags.sweep}: no such setting. Try one of train.py's, replay or init")
    if not values:
        fail(f"--sweep {flags.sweep}: wants a setting and values, as in mask_rate=.1,.15,.3")
    for flag in rest:
        if flag.lstrip("-").partition("=")[0] in CELL:
            fail(f"{flag}: is set by compare.py itself. Try its own flags, python compare.py --help")
    names = flags.objectives.split(",") if flags.objectives else (own[:1] or [*OBJECTIVES])
    coders = [name for name, entry in OBJECTIVES.items() if entry.get("bpb") == "exact"]
    for name in names:
        if name not in OBJECTIVES:
            fail(f"--objectives {name}: unknown. Try some of {','.join(OBJECTIVES)}")
        if setting == "replay" and name not in coders:
            fail(f"--objectives {name}: forgetting is measured in bits per byte. Try {','.join(coders)}")
    try:
        seeds = [int(s) for s in flags.seeds.split(",")]
        assert setting != "replay" or all(0 <= float(v) < 1 for v in values)
    except (ValueError, AssertionError):
        fail(f"--seeds {flags.seeds} --sweep {flags.sweep}: want whole numbers, and shares of replay from 0 to below 1")
    for value in values if setting == "init" else []:
        if value != "none" and value not in OBJECTIVES:
            fail(f"--sweep {flags.sweep}: {value} is no objective. Try none, mlm")
    if flags.max_iters < 1 + (setting == "init"):
        fail(f"--max_iters {flags.max_iters}: must be {1 + (setting == 'init')} or more. Try the default")
    base = dict(max_iters=100 if flags.quick else flags.max_iters, data=flags.data, new_data=flags.new_data, flags=rest)
    todo = [dict(objective=name, setting=setting, value=value, seed=seed, **base)
            for seed in dict.fromkeys(seeds) for name in dict.fromkeys(names) for value in dict.fromkeys(values)]
    for cell in todo:                           # what cannot run is said before anything runs
        argv = ["--max_iters", str(cell["max_iters"]), "--seed", str(cell["seed"]), *rest]
        train.get_config(["--objective", cell["objective"], *argv, *swept(cell)])
        if setting == "init" and cell["value"] != "none":
            train.get_config(["--objective", cell["value"], *argv])
    return todo


def open_shared(source):  # what every measurement reads
    pieces = source["train"].split(1 << 16)     # evenly spaced: 4 MiB of a larger corpus
    pieces = [p for i, p in enumerate(pieces) if i * 64 % max(64, len(pieces)) < 64]
    probe = probe_data(256) if source["name"] == "stdlib" else None
    return dict(text=source["val"], counts=CountModel(torch.cat(pieces)), probe=probe)


def baselines(path, source, cell, shared):  # -> {name: metrics} of an untrained model, raw bytes, the held-out text
    """Kept in the file at path, since neither depends on a run."""
    if not os.path.exists(path):
        shared = shared or open_shared(source)
        argv = ["--objective", cell["objective"], *cell["flags"], "--device", "cpu", "--dtype", "float32"]
        hp = train.get_config(argv)
        model, hp.objective = train.build(hp)[0].requires_grad_(False), "mlm"       # its states are read both ways
        text = [to_bytes(row.byte()) for row in windows(shared["text"], 216, ROWS, "prompts")]
        found = retrieval(model, hp, shared["text"]) if hp.block_size >= 128 else {}
        out = {"untrained, which mixes no positions": found, "five raw bytes": {},
               "held-out text": text_figures(text, shared["counts"])}
        if shared["probe"] and 256 % min(hp.block_size, 256) == 0:
            first, second, _ = out.values()
            first |= understanding(lambda x: states(model, hp, x), shared["probe"])
            second |= understanding(byte_features, shared["probe"])
        with open(path + ".tmp", "w") as f:
            json.dump(out, f)
        os.replace(path + ".tmp", path)
    with open(path) as f:
        return json.load(f)


# ---- results, tables, pictures

def read_results(path):  # what a killed process left half is skipped
    results = []
    if os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            for line in f:
                with contextlib.suppress(ValueError):
                    results.append(json.loads(line))
    return results


def add_result(path, result):
    with open(path, "a+b") as f:
        if f.tell():
            f.seek(-1, os.SEEK_END)
            if f.read(1) != b"\n":              # a kill left half a line: end it before the next
                f.write(b"\n")
        f.write(json.dumps(result).encode() + b"\n")


def collect(results, keep, order):  # -> {row name: {seed: metrics}}, those named in order first
    rows = {}
    for r in results:
        if keep(r["cell"]):
            bound = OBJECTIVES[r["cell"]["objective"]].get("bpb") == "bound"
            name = r["cell"]["value"] or r["cell"]["objective"]
            rows.setdefault(name, {})[r["cell"]["seed"]] = r["metrics"] | {"bound": bound}
    return {name: rows[name] for name in dict.fromkeys([*order, *rows]) if name in rows}


def column(rows, metric):  # -> {row name: {seed: number}} of the rows that have the metric
    have = lambda seeds: {seed: m[metric] for seed, m in seeds.items() if m.get(metric) is not None}
    return {name: found for name, seeds in rows.items() if (found := have(seeds))}


def mean_and_error(values, digits, error, sign=""):  # -> "mean ± error" in words, the mean alone for a single value
    mean = f"{statistics.fmean(values):{sign}.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {error(values):.{digits}f}"


def table(rows, metrics, cell):  # -> Markdown: a line for each row, a column for each metric that any has
    """cell: (metric, {seed: number} of a row, row name) -> str."""
    columns = {m: found for m in metrics if (found := column(rows, m))}
    lines = ["| | " + " | ".join(metrics[m][0] for m in columns) + " | seeds |", "|---" * (len(columns) + 2) + "|"]
    for name, seeds in rows.items():
        line = [cell(m, found[name], name) if name in found else "" for m, found in columns.items()]
        ran = [f"{s}{' diverged' * seeds[s].get('diverged', False)}" for s in seeds if s is not None]
        lines.append(f"| {name} | " + " | ".join(line) + f" | {' '.join(ran)} |")
    return "\n".join(lines) + "\n" if columns else ""


T975 = 12.7, 4.3, 3.2, 2.8, 2.6, 2.4, 2.4, 2.3, 2.3             # Student's t for 2, 3, ... seeds


def tables(rows, extra):  # rows {name: {seed: metrics}}, extra {name: metrics} -> Markdown
    """What was learned, at what cost, and differences from the first row."""
    says = lambda name, mark: any(m.get(mark) for m in rows.get(name, {}).values())
    def spread(m, seeds, name):
        digits, bound = (LEARNED | COST)[m][1], m == "bpb" and says(name, "bound")
        return "<= " * bound + mean_and_error([*seeds.values()], digits, statistics.stdev)
    named = {name + " †" * says(name, "left_only"): seeds for name, seeds in rows.items()}
    named |= {name: {None: m} for name, m in extra.items()}
    note = "† has the left side alone in infill.\n" if any(says(name, "left_only") for name in rows) else ""
    spreads = "Mean over seeds ± their standard deviation.\n"
    parts = [table(named, LEARNED, spread), note, spreads, table(rows, COST, spread)]

    # every row against the first, of the metrics that have a better side
    first, *others = rows
    compared = {m: LEARNED[m] for m in LEARNED if LEARNED[m][2] is not None and column(rows, m).get(first)}
    def difference(m, seeds, name):
        base = column(rows, m)[first]
        pairs = [value - base[seed] for seed, value in seeds.items() if seed in base]
        error = lambda d: statistics.stdev(d) / len(d) ** 0.5
        alike = m != "bpb" or says(name, "bound") == says(first, "bound")
        return mean_and_error(pairs, max(3, LEARNED[m][1]), error, "+") if len(pairs) > 1 and alike else ""
    paired = {name: {seed: m for seed, m in rows[name].items() if seed in rows[first]} for name in others}
    n = max((len(seeds) for seeds in paired.values()), default=0)
    if n > 1:
        clear = T975[min(n, len(T975) + 1) - 2]
        parts += [f"Difference from {first}, paired by seed: mean ± standard error over the runs, the held-out text "
                  f"being the same. With {n} seeds one of {clear} standard errors is clear (95%).\n",
                  table(paired, compared, difference)]
    return "\n".join(part for part in parts if part)


def pyplot():  # -> matplotlib's, or None where it is not installed
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot


def picture(rows, path):  # -> path, or why there is none
    """One panel of dots for each metric that differs, a line for each row, a bar at the mean."""
    plt = pyplot()
    if not plt:
        return "no picture: pip install matplotlib, and the next run draws it"
    differs = lambda found: len({value for seeds in found.values() for value in seeds.values()}) > 1
    panels = {m: found for m in LEARNED | COST if differs(found := column(rows, m))}
    across = max(1, min(5, len(panels)))
    down = max(1, -(-len(panels) // across))
    size = 3.2 * across, 0.6 + down * (0.9 + 0.2 * len(rows))   # inches
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False)
    for axis in axes.flat[len(panels):]:
        axis.axis("off")
    for (m, found), axis in zip(panels.items(), axes.flat):
        for i, name in enumerate(rows):
            values = [*found.get(name, {}).values()]
            axis.plot(values, [i] * len(values), "o", ms=4, alpha=0.5, color="C0")
            axis.plot([statistics.fmean(values)] if values else [], [i] if values else [], "|", ms=12, color="C3")
        heading, _, better = (LEARNED | COST)[m]
        axis.set_yticks(range(len(rows)), [*rows])
        axis.invert_yaxis()
        axis.grid(alpha=0.3)
        axis.set_title(heading + {True: " (more is better)", False: " (less is better)", None: ""}[better], fontsize=8)
        axis.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return path


def report(flags, todo, extra):  # -> exit code; tables and pictures
    """Of all finished cells that differ from those asked for in seed, objective or value alone."""
    drawn = 0
    same = ("setting", "max_iters", "data", "new_data", "flags", "crc")
    results, setting = read_results(os.path.join(flags.out_dir, "results.jsonl")), todo[0]["setting"]
    for name in dict.fromkeys(cell["objective"] for cell in todo) if setting else [""]:
        alike = lambda cell: all(cell.get(k) == todo[0][k] for k in same)
        order = [cell["value"] or cell["objective"] for cell in todo]
        rows = collect(results, lambda cell, name=name: alike(cell) and name in ("", cell["objective"]), order)
        if not any(column(rows, "loss").values()):
            print(f"{name or 'every objective'}: nothing finished, all diverged. Try a lower --learning_rate")
            continue
        drawn += 1
        stem = os.path.join(flags.out_dir, f"sweep-{setting}-{name}" if setting else "compare")
        text = tables(rows, extra)
        with open(stem + ".md", "w", encoding="utf-8") as f:
            f.write(text)
        print(f"\n{stem}.md, {picture(rows, stem + '.png')}\n\n{text}")
    return 0 if drawn else 1


LABELS = {train.IGNORE: " ", 10: "\\n", EOT: "EOT", PAD: "PAD", MASK: "MASK", CLS: "CLS", SEP: "SEP", PRE: "PRE",
          SUF: "SUF", MID: "MID", MODE_R: "R", MODE_S: "S", MODE_X: "X"}


def picture_of_rows(path, T=32):
    """What make really makes of one text: inputs above targets, and which position (down) may attend to which
    (across)."""
    plt = pyplot()
    if not plt:
        fail("--rows: draws with matplotlib. Try: pip install matplotlib")
    text = b"if cat.sat(mat):\n    cat.nap()\nelse: cat.walk(home)\nreturn cat, mat, home\n"
    figure, axes = plt.subplots(len(OBJECTIVES), 2, figsize=(12, 1.25 * len(OBJECTIVES)), width_ratios=[9, 1])
    for name, (row, grid) in zip(OBJECTIVES, axes):
        hp = train.get_config(["--objective", name, "--device", "cpu", "--block_size", str(T), "--batch_size", "4"])
        [m] = train.members(hp)
        B = 2 if name == "hybrid" else 4        # its masked row is the second of two
        batch = m["make"](from_bytes(text[:m["n"]]).long().expand(B, -1), generator("rows"), hp)
        telling = {"hybrid": lambda b: b == B - 1, "fim": lambda b: PRE in batch["inp"][b].tolist(),
                   "rotation": lambda b: batch["labels"][b] > 0}
        b = next(b for b in range(B) if telling.get(name, lambda b: True)(b))
        inp = batch["inp"][b].reshape(-1)
        tgt = batch["tgt"][b] if "tgt" in batch else torch.full_like(inp, train.IGNORE)
        P = batch["mask"]
        P = {"causal": 0, "bidirectional": T}[P] if isinstance(P, str) else int(P[b])
        at = torch.arange(batch["inp"].size(-1))
        for y, (ids, colour) in enumerate(((inp, "#dde8f5"), (tgt, "#f9e3c8"))):
            for x, i in enumerate(ids.tolist()):
                colour_of = "white" if i == train.IGNORE else "#c9b6e4" if i > 255 or i == EOT else colour
                row.add_patch(plt.Rectangle((x, -y), 1, 1, fc=colour_of, ec="#cccccc", lw=0.5))
                glyph = LABELS.get(i) or (f"{i - SENTINEL}" if i >= SENTINEL else train.glyphs([i]))
                row.text(x + 0.5, 0.5 - y, glyph, ha="center", va="center", fontsize=5 if i in LABELS else 7,
                         family="DejaVu Sans Mono")
        note = f"   label {int(batch['labels'][b])}" if "labels" in batch else ""
        note = "   two crops of one window" if inp.numel() > len(at) else note
        row.set(xlim=(0, T), ylim=(-1, 1))
        row.set_title(f"{name}: {m['help']}{note}", fontsize=8, loc="left", pad=2)
        grid.imshow(allow(at[:, None], at, P), cmap="Blues", vmin=0, vmax=1.5, interpolation="nearest")
        for axis in (row, grid):
            axis.set_xticks([])
            axis.set_yticks([])
    figure.tight_layout(h_pad=0.6)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# ---- the comparison

def parse(argv):  # -> flags, train.py's flags
    parser = train.Parser(prog="compare.py", description=__doc__, allow_abbrev=False,
                          formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, (default, text) in FLAGS.items():
        how = dict(action="store_true") if default is False else dict(type=type(default), default=default, metavar="X")
        parser.add_argument(f"--{flag}", help=f"{text} [{default}]" if default not in ("", False) else text, **how)
    return parser.parse_known_args(argv)


def main(argv=None):
    """Trains what is not finished, measures it, draws the tables. Ctrl-C saves the run in progress."""
    flags, rest = parse(sys.argv[1:] if argv is None else argv)
    if flags.rows:
        return picture_of_rows("rows.png")
    todo, replay = cells(flags, rest), flags.sweep.startswith("replay=")
    sources = open_corpus([flags.data, *([flags.new_data or CPP_HEADERS] if replay else [])])
    if len(sources[0]["val"]) < 1 << 12:
        fail(f"--data {flags.data}: has {len(sources[0]['val'])} bytes to validate on, the yardsticks want 4096. "
             "Try more text")
    if os.path.exists(flags.out_dir) and not os.path.isdir(flags.out_dir):
        fail(f"--out_dir {flags.out_dir}: is a file. Try another name")
    for folder in (flags.data, flags.new_data):
        inside = os.path.isdir(folder) and os.path.commonpath(map(os.path.realpath, (folder, flags.out_dir)))
        if inside == os.path.realpath(folder):  # the results would be read as text
            fail(f"--out_dir {flags.out_dir}: lies inside the corpus {folder}. Try a folder outside it")
    for name in dict.fromkeys(cell["objective"] for cell in todo):
        hp = train.get_config(["--objective", name, *rest])
        [m] = train.members(hp)
        check_sizes(sources, m["n"], hp.block_size, lambda T, m=m, hp=hp: m["window"](T, hp))
    os.makedirs(flags.out_dir, exist_ok=True)
    path, shared = os.path.join(flags.out_dir, "results.jsonl"), None
    done = [r["cell"] for r in read_results(path)]
    for i, cell in enumerate(todo):
        cell["crc"] = [s["crc"] for s in sources]               # other bytes are another cell
        what = f" {cell['setting']}={cell['value']}" if cell["setting"] else ""
        title = f"[{i + 1}/{len(todo)}] {cell['objective']}{what} seed {cell['seed']}"
        if cell in done:
            print(f"{title}: finished before")
            continue
        begin, shared = time.perf_counter(), shared or open_shared(sources[0])
        folder, first = run_training(cell, flags)
        if not folder:
            add_result(path, {"cell": cell, "metrics": {"diverged": True}})
            print(f"{title}: diverged", flush=True)
            continue
        metrics = logged(folder) | measure(folder, shared)
        if replay:                              # all three by one ruler
            old, new = shared["text"], sources[1]["val"]
            metrics |= {"bpb": None, "new": left_right_bits(folder, new), "old": left_right_bits(folder, old),
                        "old_before": left_right_bits(first, old)}
        if first and not replay:
            metrics |= {m: metrics[m] + logged(first)[m] for m in ("seconds", "raw_mb", "tflop")}
        add_result(path, {"cell": cell, "metrics": metrics})
        print(f"{title}: loss {metrics['loss']:.4f}, {time.perf_counter() - begin:.0f} s", flush=True)
    extra = {}
    if not flags.sweep:
        tag = zlib.crc32(json.dumps([rest, todo[0]["crc"]]).encode())
        extra = baselines(os.path.join(flags.out_dir, f"baselines-{tag:x}.json"), sources[0], todo[0], shared)
    return report(flags, todo, extra)


if __name__ == "__main__":
    sys.exit(main())
