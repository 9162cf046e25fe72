"""Train every objective alike and measure all of them with the same yardsticks.

    python compare.py                                   all objectives, one seed: about half an hour on a laptop CPU
    python compare.py --quick                           the same with 200 steps: too short to conclude anything
    python compare.py --seeds 1,2,3 --objectives clm,mlm
    python compare.py --sweep mask_rate=.1,.15,.3,.4 --objectives mlm --seeds 1,2,3
    python compare.py --sweep replay=0,.05,.25          continual pre-training on C++ headers, Python as the old corpus
    python compare.py --sweep init=none,mlm --objectives contrastive

Every cell (objective, setting, seed) is one run of train.py in a folder of its own, for the same number of row
positions; what is finished is not trained again. Results go to results.jsonl, from which the Markdown tables and the
pictures are drawn anew each time. Flags that are not listed below are train.py's, such as --n_layer 6.
"""
# N windows, n bytes of a window, m bytes of a middle, T = block_size, C width, K classes, L layers
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
from data import draw, fail, from_bytes, gather, generator, open_corpus, read_stdlib, to_bytes
from model import allow, norm
from objectives import OBJECTIVES, auc, embed

FLAGS = {
    "objectives": ("", "which, separated by commas; without it all, or the first that has the setting of --sweep"),
    "seeds": ("1", "seeds, separated by commas: the same weights and windows for all objectives"),
    "max_iters": (1000, "steps of each run, of batch_size * block_size positions"),
    "quick": (False, "200 steps in place of --max_iters"),
    "data": ("stdlib", "corpus; yardstick 3 reads labels off Python source and needs stdlib"),
    "new_data": ("", "second corpus, for --sweep replay; without it the C++ headers that come with torch"),
    "sweep": ("", "a setting and its values, as in mask_rate=.1,.15,.3"),
    "out_dir": ("out/compare", "folder of results, tables, pictures and runs"),
    "rows": (False, "draw one row of every objective, with who sees whom, into rows.png, and end"),
}
MIDDLES = 4, 16, 64                             # bytes to infill
ROWS = 64                                       # windows of a yardstick, and samples
SHARE = 0.1                                     # of the bytes are replaced in yardstick 5
CLASSES = "space", "keyword", "name", "string", "comment", "number", "operator"
ORDER = 5                                       # of the count model

# metric: (heading, digits, is more better)
METRICS = {
    "bpb": ("left to right, bits/byte", 3, False), "infill_4": ("infill 4, bits/byte", 2, False), "infill_16": ("infill 16", 2, False),
    "infill_64": ("infill 64", 2, False), "exact_4": ("4 exact", 3, True), "classes": ("byte classes", 3, True), "package": ("package", 3, True),
    "recall_1": ("recall@1", 3, True), "recall_10": ("recall@10", 3, True), "replaced": ("replaced bytes, AUC", 3, True),
    "gen_bpb": ("samples, bits/byte", 2, None), "gen_lines": ("lines that tokenize", 2, True), "gen_distinct": ("distinct 8-grams", 2, True),
    "train_speed": ("training kB/s", 1, True), "targets": ("targets a row", 1, True), "decode_speed": ("writing kB/s", 1, True),
    "gflops": ("GFLOP a step", 1, False),
}
SWEPT = {"pass_bytes": ("bytes a pass", 2, True), "before": ("old corpus before, bits/byte", 3, None), "old": ("old corpus after", 3, False),
         "new": ("new corpus", 3, False)}
CELL = {"objective", "seed", "data", "out_dir", "resume", "max_iters", "eval_interval", "init_from"}     # flags of train.py that compare.py sets
NATIVE = {"clm", "prefix", "ul2", "fim", "mtp", "hybrid", "mdlm"}                   # write text by themselves


# ---- windows and what a model makes of them

def windows(text, n, count, key):  # (M,) uint8 -> (count, n) long: windows without a NUL where there are any
    source = [dict(weight=1.0, text=text)]
    return gather(source, "text", *draw(source, "text", n, count, generator(f"compare,{key}")), n, whole=True)


def sight(name):  # the mask under which a model's states are read
    return "causal" if OBJECTIVES[name]["mask"] == "causal" else "bidirectional"


@torch.no_grad()
def states(model, name, x):  # (N, n) -> (L, N, n, C): each block's states, normed; n in pieces of the model's block
    kept = []
    hooks = [block.register_forward_hook(lambda module, args, out: kept.append(norm(out).float())) for block in model.blocks]
    model(x, sight(name))
    for hook in hooks:
        hook.remove()
    return torch.stack(kept)


# ---- 2: infilling

def fixed(x, *ids):  # -> (N, len(ids)), the same ids in every row
    return torch.tensor(ids, dtype=torch.long).expand(len(x), -1)


@torch.no_grad()
def infill_logits(model, name, x, a, m, T):  # x (N, n) -> (N, m, V) for bytes a .. a + m - 1, each given those before it, or None
    """In the model's own format, each byte from the middle's bytes before it, and from both sides where the objective
    gives both: the chain rule, so that their nats add up to a code length."""
    left, middle, right = x[:, :a], x[:, a:a + m], x[:, a + m:]
    if name in ("mlm", "mdlm", "hybrid", "nsp"):
        before, behind = {"hybrid": ((EOT,), ()), "nsp": ((CLS,), (SEP,))}.get(name, ((), ()))
        out = []
        for i in range(m):
            row = torch.cat((fixed(x, *before), left, middle[:, :i], fixed(x, *[MASK] * (m - i)), right, fixed(x, *behind)), 1)
            at = len(before) + a + i - (name == "hybrid")
            out.append(model.logits(model(row, "bidirectional")[:, at]))
        return torch.stack(out, 1)
    head = {
        "clm": (left,), "mtp": (left,), "prefix": (left,),
        "fim": (fixed(x, PRE, SUF), right, fixed(x, MID), left),                  # SPM, in which the middle goes on from its left side
        "span": (left, fixed(x, SENTINEL), right, fixed(x, SENTINEL + 1, SEP, SENTINEL)),
        "ul2": (fixed(x, MODE_X if m > 16 else MODE_R), left, fixed(x, SENTINEL), right, fixed(x, SENTINEL + 1, SEP, SENTINEL)),
        "bart": (left, fixed(x, MASK), right, fixed(x, SEP), left),
    }.get(name)
    if head is None:
        return None
    row = torch.cat((*head, middle), 1)
    assert row.size(1) <= T, (row.shape, T)
    P = {"prefix": a, "span": row.size(1) - m - 1, "ul2": row.size(1) - m - 1, "bart": row.size(1) - m - a}.get(name, 0)
    h = model(row[:, :-1], torch.full((len(x),), P) if P else "causal")
    return model.logits(h[:, -m:])


def infilling(model, name, text, T):  # -> {infill_m: bits a byte, exact_m: share of middles that greedy decoding gets right}
    n, out = (T - 16) // 2, {}
    for m in [m for m in MIDDLES if m + 2 <= n]:
        x = windows(text, n, ROWS, f"infill,{m}")
        logits = infill_logits(model, name, x, (n - m) // 2, m, T)
        if logits is None:
            return {}
        logits, middle = logits[..., :256].float(), x[:, (n - m) // 2:][:, :m]
        out[f"infill_{m}"] = float(F.cross_entropy(logits.flatten(0, 1), middle.flatten())) / math.log(2)
        out[f"exact_{m}"] = float((logits.argmax(-1) == middle).all(1).float().mean())
    return out


# ---- 3: understanding

def byte_classes(text):  # bytes -> (n,) long: index into CLASSES of every byte, or None where tokenize gives up
    try:
        lines = [line + "\n" for line in text.decode().split("\n")]
        kinds = {token_kinds.NAME: 2, token_kinds.STRING: 3, token_kinds.COMMENT: 4, token_kinds.NUMBER: 5, token_kinds.OP: 6}
        kinds |= {getattr(token_kinds, f"FSTRING_{part}"): 3 for part in ("START", "MIDDLE", "END") if hasattr(token_kinds, "FSTRING_START")}
        starts, labels = [0], torch.zeros(len(text) + 1, dtype=torch.long)
        for line in lines:
            starts.append(starts[-1] + len(line.encode()))
        place = lambda at: starts[at[0] - 1] + len(lines[at[0] - 1][:at[1]].encode())
        for token in tokenize.generate_tokens(iter(lines).__next__):
            if token.type in kinds:
                labels[place(token.start):place(token.end)] = 1 if keyword.iskeyword(token.string) else kinds[token.type]
        return labels[:len(text)]
    except (SyntaxError, tokenize.TokenError, UnicodeDecodeError, IndexError):
        return None


def labelled(documents, n, each=3):  # {path: bytes} -> x (N, n), classes (N, n), package (N,) names
    x, classes, packages = [], [], []
    for path, text in documents.items():
        labels = byte_classes(text)
        if labels is None or len(text) < n:
            continue
        count = min(each, len(text) // n)
        for i in range(count):
            a = (len(text) - n) * i // max(1, count - 1) if count > 1 else 0
            x.append(from_bytes(text[a:a + n]).long())
            classes.append(labels[a:a + n])
            packages.append(path)
    return torch.stack(x), torch.stack(classes), packages


def fit(x, y, K, decay=1e-4):  # x (N, C), y (N,) -> a function x -> classes: multinomial logistic regression on standardized x
    """All classes weigh the same, however rare."""
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


def probe(layers, y, split, K):  # layers (L, N, C), y (N,), split (N,) 0 fit, 1 choose the layer, 2 score -> balanced accuracy
    at = [split == part for part in range(3)]
    solved = [fit(x[at[0]], y[at[0]], K) for x in layers]
    best = max(range(len(layers)), key=lambda i: balanced(solved[i](layers[i][at[1]]), y[at[1]]))
    return balanced(solved[best](layers[best][at[2]]), y[at[2]])


def probe_data(n):  # -> x (N, n), classes (N, n), package (N,), split (N,), positions (N', 2) to probe; labels from the corpus itself
    documents = read_stdlib()
    top = os.path.commonpath([*documents])
    package = lambda path: os.path.relpath(path, top).split(os.sep)[0]
    paths = [*documents]
    split_of = {path: 2 if i % 10 == 9 else int(i % 5 == 0) for i, path in enumerate(paths)}          # as data.py splits documents
    x, classes, owner = labelled(documents, n)
    split = torch.tensor([split_of[path] for path in owner])
    names = [package(path) for path in owner]
    count = {name: [names[i] == name for i in range(len(names))] for name in set(names) if not name.endswith(".py")}
    held = {name: sum(1 for i, own in enumerate(names) if own == name and split[i] == 2) for name in count}
    kept = sorted((name for name in count if held[name] >= 6), key=lambda name: (-sum(count[name]), name))[:10]
    labels = torch.tensor([kept.index(name) if name in kept else -1 for name in names])
    held = (split == 2)[:, None].expand(-1, n)                                      # every byte is scored, 8000 others serve to fit
    chosen = torch.rand(len(x), n, generator=generator("compare,positions")) < 8000 / float((~held).sum())
    rows, cols = (held | chosen).nonzero().T
    return dict(x=x, classes=classes, package=labels, split=split, K=len(kept), rows=rows, cols=cols)


def understanding(features, data):  # features: x (N, n) -> (L, N, n, C) -> {classes, package: accuracy}
    rows, cols, inside = data["rows"], data["cols"], data["package"] >= 0           # rows (N',) in ascending order
    local, pooled = [], []
    for a in range(0, len(data["x"]), ROWS):
        h = features(data["x"][a:a + ROWS])
        here = (rows >= a) & (rows < a + ROWS)
        local.append(h[:, rows[here] - a, cols[here]])
        pooled.append(h.mean(2))
    local, pooled = torch.cat(local, 1), torch.cat(pooled, 1)[:, inside]            # (L, N', C), (L, windows with a package, C)
    return {"classes": probe(local, data["classes"][rows, cols], data["split"][rows], len(CLASSES)),
            "package": probe(pooled, data["package"][inside], data["split"][inside], data["K"])}


def byte_features(x):  # (N, n) -> (1, N, n, 5 * 128): the bytes from two before to two behind, one-hot, without any model
    near = F.pad(x, (2, 2)).unfold(1, 5, 1).clamp(max=127)                          # (N, n, 5)
    return F.one_hot(near, 128).flatten(2).float()[None]


# ---- 4: retrieval, 5: corruption

@torch.no_grad()
def retrieval(model, name, text, T):  # -> {recall_1, recall_10}: a passage's second half by its first, among 256
    x = windows(text, min(T, 256), 256, "retrieval")
    half = x.size(1) // 2
    pooled = [embed(model, x[:, a:a + half]) if sight(name) == "bidirectional" else
              F.normalize(model(x[:, a:a + half], "causal").float().mean(1), dim=-1) for a in (0, half)]
    pooled = [F.normalize(p - p.mean(0), dim=-1) for p in pooled]                   # without what all passages share
    near = pooled[0] @ pooled[1].T
    rank = (near >= near.diagonal()[:, None]).sum(1) - 1        # of a tie every other one comes first
    return {"recall_1": float((rank < 1).float().mean()), "recall_10": float((rank < 10).float().mean())}


@torch.no_grad()
def corruption(model, heads, name, text, T):  # -> {replaced: AUC}
    """A tenth of the bytes is replaced by bytes of the text's own distribution; a byte's score is the head's for
    electra, else its surprise: given those before it, or given the others while every eighth byte is masked."""
    x = windows(text, min(T, 256) - 2, ROWS, "corruption")
    g = generator("compare,replaced")
    other = text[torch.randint(0, len(text), x.shape, generator=g)].long()
    bad = (torch.rand(x.shape, generator=g) < SHARE) & (other != x)
    z = torch.where(bad, other, x)
    if name == "electra":
        score = heads["replaced"](model(z, "bidirectional").float())[..., 0]
    elif name in ("clm", "mtp", "prefix", "fim"):
        start = fixed(z, EOT)
        score = F.cross_entropy(model.logits(model(torch.cat((start, z[:, :-1]), 1), "causal")).mT, z, reduction="none")
    elif name in ("mlm", "mdlm", "nsp", "hybrid"):
        score, at = torch.zeros(z.shape), torch.arange(z.size(1))
        before, behind = {"hybrid": ((EOT,), ()), "nsp": ((CLS,), (SEP,))}.get(name, ((), ()))
        for r in range(8):
            row = torch.cat((fixed(z, *before), z.masked_fill(at % 8 == r, MASK), fixed(z, *behind)), 1)
            first = len(before) - (name == "hybrid")
            logits = model.logits(model(row, "bidirectional"))[:, first:first + z.size(1), :256]
            score = torch.where(at % 8 == r, F.cross_entropy(logits.mT, z, reduction="none"), score)
    else:
        return {}
    return {"replaced": float(auc(score.flatten(), bad.long().flatten()))}


# ---- 6: generation

class CountModel:
    """Byte probabilities from counts of n-grams up to ORDER bytes of context, interpolated as by Witten and Bell (1991)."""

    def __init__(self, text):  # (M,) uint8
        self.tables = []
        for k in range(ORDER + 1):
            grams, n = keys(text, k + 1).unique(return_counts=True)
            contexts, kinds = (grams // 256).unique(return_counts=True)
            total = torch.zeros(len(contexts), dtype=torch.long).index_add_(0, torch.searchsorted(contexts, grams // 256), n)
            self.tables.append((grams, n, contexts, kinds, total))

    def bits(self, text):  # (n,) uint8 -> bits of its bytes behind the first ORDER
        p = torch.full((len(text) - ORDER,), 1 / 256, dtype=torch.double)
        for k, (grams, n, contexts, kinds, total) in enumerate(self.tables):
            key = keys(text, k + 1)[ORDER - k:]
            found = lambda table, values, key: torch.where(table[(i := torch.searchsorted(table, key).clamp(max=len(table) - 1))] == key, values[i], 0)
            new, all_n = found(contexts, kinds, key // 256).double(), found(contexts, total, key // 256).double()
            mixed = (found(grams, n, key) + new * p) / (all_n + new).clamp(min=1)
            p = torch.where(all_n > 0, mixed, p)
        return float(-p.log2().sum())


def keys(text, n):  # (M,) uint8 -> (M - n + 1,) long: every n-gram as a number in base 256
    key = torch.zeros(len(text) - n + 1, dtype=torch.long)
    for i in range(n):
        key = key * 256 + text[i:len(text) - n + 1 + i]
    return key


@torch.no_grad()
def generation(model, name, text, T, counts):  # -> {gen_*, decode_speed}: 64 samples from prompts of 32 bytes
    if name not in NATIVE:
        return {}
    prompt, new, gens = windows(text, 32, ROWS, "prompts"), min(T, 256) - 40, sample.sample_generators(1, ROWS)
    begin = time.perf_counter()
    if name == "mdlm":
        out = sample.fill(model, torch.cat((prompt, fixed(prompt, *[MASK] * new)), 1), gens, steps=64, order="ancestral", temperature=0.8)[:, 32:]
    else:
        before, behind = ((MODE_S,), (SEP,)) if name == "ul2" else ((), ())
        ids = torch.cat((fixed(prompt, *before), prompt, fixed(prompt, *behind)), 1)
        mask = "prefix" if name in ("prefix", "ul2") else "causal"
        out = torch.stack([*sample.generate(model, ids, new, T, gens, mask, temperature=0.8)], 1)
    speed = out.numel() / (time.perf_counter() - begin) / 1e3
    return text_figures([bytes(row).partition(b"\0")[0] for row in out.tolist()], counts) | {"decode_speed": speed}


def text_figures(texts, counts):  # [bytes] -> {gen_bpb, gen_lines, gen_distinct}
    long = [from_bytes(t) for t in texts if len(t) > ORDER]
    lines = [line for t in texts for line in t.decode("utf-8", "replace").split("\n")[1:-1] if line.strip()]
    grams = [t[i:i + 8] for t in texts for i in range(len(t) - 7)]
    return {"gen_bpb": sum(map(counts.bits, long)) / max(1, sum(len(t) - ORDER for t in long)),
            "gen_lines": sum(map(tokenizes, lines)) / max(1, len(lines)), "gen_distinct": len(set(grams)) / max(1, len(grams))}


def tokenizes(line):  # str -> does tokenize accept the line by itself?
    try:
        return all(t.type != token_kinds.ERRORTOKEN for t in tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline))
    except (SyntaxError, tokenize.TokenError):
        return False


# ---- a cell: train, measure

def measure(folder, shared):  # -> {metric: number}
    model, heads, hp, _ = sample.load_run(folder, "cpu")
    name, T, text = hp.objective, hp.block_size, shared["text"]
    out = {}
    if T >= 128:
        out |= infilling(model, name, text, T) | retrieval(model, name, text, T) | corruption(model, heads, name, text, T)
        out |= generation(model, name, text, T, shared["counts"])
    if shared["probe"] and 256 % min(T, 256) == 0:
        pieces = lambda x: states(model, name, x.reshape(-1, min(T, x.size(1)))).unflatten(1, (len(x), -1)).flatten(2, 3)
        out |= understanding(pieces, shared["probe"])
    if name == "mtp" and hp.mtp_heads > 1:
        tally = []
        for i, prompt in enumerate(windows(text, 32, 8, "prompts")):
            list(sample.speculate(model, heads, prompt.tolist(), 100, T, generator(f"compare,{i}"), tally, temperature=0.8))
        out["pass_bytes"] = sum(kept + 1 for _, kept in tally) / len(tally)
    return out


def logged(folder):  # -> {metric: number} that metrics.jsonl holds
    with open(os.path.join(folder, "metrics.jsonl"), "rb") as f:
        records = [json.loads(line) for line in f][1:]
    last = [r for r in records if r.get("split") == "val" and r["step"] == records[-1]["step"]]
    hp = argparse.Namespace(**train.load_checkpoint(folder)["config"])
    [run] = train.members(hp)
    corpus = [dict(name="bytes", weight=1.0, train=torch.randint(1, 256, (1 << 16,), generator=generator("compare"), dtype=torch.uint8))]
    [batch] = train.draw_batches([run], corpus, "train", lambda m: m["rows"], "compare", argparse.Namespace(**vars(hp) | {"device": "cpu", "doc_mask": False}))
    clock = [(r["step"], r["seconds"]) for r in records if r["split"] == "train"]
    step = statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in zip(clock, clock[1:])) if len(clock) > 1 else last[0]["seconds"]     # s
    return {"loss": last[0]["loss"], "bpb": last[0]["bpb"], "terms": last[0]["terms"], "targets": last[0]["targets"] * hp.block_size,
            "train_speed": run["n"] * run["rows"] * hp.accum / max(step, 1e-9) / 1e3, "seconds": last[0]["seconds"],
            "gflops": bench.step_flops(run["name"], batch, hp) * hp.accum / 1e9}


def train_argv(cell, folder, base):  # -> flags of train.py
    argv = ["--objective", cell["objective"], "--seed", str(cell["seed"]), "--max_iters", str(cell["max_iters"]), "--out_dir", folder,
            "--eval_interval", str(cell["max_iters"]), *cell["flags"]]
    if cell["setting"] == "replay":
        share = float(cell["value"])
        return argv + ["--init_from", base, "--data", f"{cell['new_data']}:{1 - share:g}", *([f"{cell['data']}:{share:g}"] if share else [])]
    if cell["setting"] == "init":
        return argv + ["--data", cell["data"], *(["--init_from", base] if cell["value"] != "none" else [])]
    return argv + ["--data", cell["data"], *([f"--{cell['setting']}", cell["value"]] if cell["setting"] else [])]


def run_training(cell, flags):  # -> folder of the finished run, trained now if it was not before; of the run that it began with
    words = [cell["objective"], *([f"{cell['setting']}={cell['value']}"] if cell["setting"] else []), f"{cell['max_iters']}", f"seed{cell['seed']}"]
    tag = f"-{hash_of([cell['flags'], cell['data'], cell['new_data']]):x}"
    folder, base = os.path.join(flags.out_dir, "runs", "-".join(words).replace(",", "+").replace(":", "_") + tag), None
    if cell["setting"] == "replay" or cell["setting"] == "init" and cell["value"] != "none":
        first = {"objective": cell["value"] if cell["setting"] == "init" else cell["objective"], "setting": "", "value": "", "new_data": ""}
        base, _ = run_training({**cell, **first}, flags)
    begun = os.path.exists(os.path.join(folder, "ckpt.pt"))
    if begun and train.load_checkpoint(folder)["step"] == cell["max_iters"]:
        return folder, base
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "log.txt"), "a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        code = train.main(["--resume", "--out_dir", folder] if begun else train_argv(cell, folder, base))
    if code:
        sys.exit(code)                          # it said why
    return folder, base


def hash_of(value):
    return zlib.crc32(json.dumps(value).encode())


def cells(flags, rest):  # -> [{objective, setting, value, seed, max_iters, data, new_data, flags}]
    setting, _, values = flags.sweep.partition("=")
    values = [v for v in values.split(",") if v] if setting else [""]
    own = [name for name, entry in OBJECTIVES.items() if setting in entry["settings"]]
    if setting in ("replay", "init"):
        own = ["clm" if setting == "replay" else "contrastive"]
    elif setting and not own and setting not in set(train.specs()) - CELL:
        fail(f"--sweep {flags.sweep}: no such setting. Try one of train.py's, replay or init")
    if not values:
        fail(f"--sweep {flags.sweep}: wants a setting and values, as in mask_rate=.1,.15,.3")
    for flag in rest:
        if flag.lstrip("-").partition("=")[0] in CELL:
            fail(f"{flag}: is set by compare.py itself. Try its own flags, python compare.py --help")
    names = flags.objectives.split(",") if flags.objectives else own[:1] or [*OBJECTIVES]
    for name in names:
        if name not in OBJECTIVES:
            fail(f"--objectives {name}: unknown. Try some of {','.join(OBJECTIVES)}")
        if setting == "replay" and OBJECTIVES[name].get("bpb") != "exact":
            fail(f"--objectives {name}: forgetting is measured in bits per byte. Try {','.join(n for n, e in OBJECTIVES.items() if e.get('bpb') == 'exact')}")
    try:
        seeds = [int(s) for s in flags.seeds.split(",")]
        assert setting != "replay" or all(0 <= float(v) < 1 for v in values)
    except (ValueError, AssertionError):
        fail(f"--seeds {flags.seeds} --sweep {flags.sweep}: want whole numbers, and shares of replay from 0 to below 1")
    for value in values if setting == "init" else []:
        if value != "none" and value not in OBJECTIVES:
            fail(f"--sweep {flags.sweep}: {value} is no objective. Try none, mlm")
    if flags.max_iters < 1:
        fail(f"--max_iters {flags.max_iters}: must be 1 or more. Try the default")
    new = (flags.new_data or os.path.join(torch.__path__[0], "include")) if setting == "replay" else ""
    base = dict(max_iters=200 if flags.quick else flags.max_iters, data=flags.data, new_data=new, flags=rest)
    return [dict(objective=name, setting=setting, value=value, seed=seed, **base)
            for seed in dict.fromkeys(seeds) for name in dict.fromkeys(names) for value in dict.fromkeys(values)]


def open_shared(source, flags):  # what every measurement reads
    train_text = source["train"]
    pieces = train_text.split(1 << 16)          # evenly spaced: 4 MiB of a larger corpus
    pieces = [p for i, p in enumerate(pieces) if i * 64 % max(64, len(pieces)) < 64]
    return dict(text=source["val"], counts=CountModel(torch.cat(pieces)), probe=probe_data(256) if flags.data == "stdlib" else None)


# ---- tables and pictures

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
        half = f.tell() > 0 and (f.seek(-1, os.SEEK_END), f.read(1))[1] != b"\n"
        f.write(b"\n" * half + json.dumps(result).encode() + b"\n")


def group(results, keep):  # -> {row name: [results of its seeds]}
    rows = {}
    for r in results:
        if keep(r["cell"]):
            rows.setdefault(r["cell"]["value"] or r["cell"]["objective"], []).append(r)
    return rows


def spread(values):  # -> mean, standard deviation over seeds
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def table(rows, metrics, baselines=()):  # {name: [results]} -> Markdown; mean over seeds, +- standard deviation where there are several
    shown = [m for m in metrics if any(r["metrics"].get(m) is not None for rs in rows.values() for r in rs)]
    lines = ["| | " + " | ".join(metrics[m][0] for m in shown) + " | seeds |", "|---" * (len(shown) + 2) + "|"]
    for name, results in [*rows.items(), *((name, [{"metrics": b}]) for name, b in baselines)]:
        line = []
        for m in shown:
            values = [r["metrics"][m] for r in results if r["metrics"].get(m) is not None]
            mean, deviation = spread(values) if values else (None, None)
            bound = "<= " if m == "bpb" and any(r.get("cell", {}).get("objective") == "mdlm" for r in results) else ""
            line.append("" if mean is None else f"{bound}{mean:.{metrics[m][1]}f}" + (f" ± {deviation:.{metrics[m][1]}f}" if deviation is not None else ""))
        lines.append(f"| {name} | " + " | ".join(line) + f" | {len(results) if name in rows else ''} |")
    return "\n".join(lines) + "\n"


def picture(rows, metrics, path):  # one panel of dots for each metric, a line for each name
    try:
        import matplotlib
    except ImportError:
        return print("hint: pip install matplotlib, and the next run draws the table")
    matplotlib.use("Agg")
    from matplotlib import pyplot
    shown = [m for m in metrics if any(r["metrics"].get(m) is not None for rs in rows.values() for r in rs)]
    across = min(4, len(shown))
    down = -(-len(shown) // across)
    figure, axes = pyplot.subplots(down, across, figsize=(3.4 * across, 0.6 + down * (0.9 + 0.2 * len(rows))), squeeze=False)
    for axis in axes.flat[len(shown):]:
        axis.axis("off")
    for m, axis in zip(shown, axes.flat):
        for i, results in enumerate(rows.values()):
            values = [r["metrics"][m] for r in results if r["metrics"].get(m) is not None]
            axis.plot(values, [i] * len(values), "o", ms=4, alpha=0.5, color="C0")
            axis.plot([statistics.fmean(values)] if values else [], [i] if values else [], "|", ms=12, color="C3")
        axis.set_yticks(range(len(rows)), [*rows])
        axis.invert_yaxis()
        axis.grid(alpha=0.3)
        axis.set_title(metrics[m][0] + {True: " (more is better)", False: " (less is better)", None: ""}[metrics[m][2]], fontsize=8)
        axis.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def picture_of_rows(path, T=32):
    """What make really makes of one text: inputs above targets, and which position (down) may attend to which (across)."""
    try:
        import matplotlib
    except ImportError:
        fail("--rows: draws with matplotlib. Try: pip install matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot
    text = b"if cat.sat(mat):\n    cat.nap()\nelse: cat.walk(home)\nreturn cat, mat, home\n"
    figure, axes = pyplot.subplots(len(OBJECTIVES), 2, figsize=(12, 1.25 * len(OBJECTIVES)), width_ratios=[9, 1])
    for name, (row, grid) in zip(OBJECTIVES, axes):
        hp = train.get_config(["--objective", name, "--device", "cpu", "--block_size", str(T), "--batch_size", "4"])
        [m] = train.members(hp)
        B = 2 if name == "hybrid" else 4        # its masked row is the second of two
        batch = m["make"](from_bytes(text[:m["n"]]).long().expand(B, -1), generator("rows"), hp)
        telling = {"hybrid": lambda b: b == B - 1, "fim": lambda b: PRE in batch["inp"][b].tolist(), "rotation": lambda b: batch["labels"][b] > 0}
        b = next(b for b in range(B) if telling.get(name, lambda b: True)(b))
        inp = batch["inp"][b].reshape(-1)
        tgt = batch["tgt"][b] if "tgt" in batch else torch.full_like(inp, train.IGNORE)
        P = {"causal": 0, "bidirectional": T}[batch["mask"]] if isinstance(batch["mask"], str) else int(batch["mask"][b])
        at = torch.arange(batch["inp"].size(-1))
        seen = allow(at[:, None], at, P)
        for y, (ids, colour) in enumerate(((inp, "#dde8f5"), (tgt, "#f9e3c8"))):
            for x, i in enumerate(ids.tolist()):
                special = i > 255 or i == EOT
                row.add_patch(pyplot.Rectangle((x, -y), 1, 1, fc="white" if i == train.IGNORE else "#c9b6e4" if special else colour, ec="#cccccc", lw=0.5))
                row.text(x + 0.5, 0.5 - y, "" if i == train.IGNORE else LABELS.get(i) or (f"{i - SENTINEL}" if i >= SENTINEL else train.glyphs([i])),
                         ha="center", va="center", fontsize=5 if i in LABELS else 7, family="DejaVu Sans Mono")
        note = f"   label {int(batch['labels'][b])}" if "labels" in batch else "   two crops of one window" if inp.numel() > len(at) else ""
        row.set(xlim=(0, T), ylim=(-1, 1))
        row.set_title(f"{name}: {m['help']}{note}", fontsize=8, loc="left", pad=2)
        grid.imshow(seen, cmap="Blues", vmin=0, vmax=1.5, interpolation="nearest")
        for axis in (row, grid):
            axis.set_xticks([])
            axis.set_yticks([])
    figure.tight_layout(h_pad=0.6)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


LABELS = {10: "\\n", EOT: "EOT", PAD: "PAD", MASK: "MASK", CLS: "CLS", SEP: "SEP", PRE: "PRE", SUF: "SUF", MID: "MID", MODE_R: "R", MODE_S: "S", MODE_X: "X"}


def report(flags, todo, baselines):  # tables and pictures of all finished cells that differ from those asked for in seed or objective alone
    alike = lambda cell: all(cell[k] == todo[0][k] for k in ("setting", "max_iters", "data", "new_data", "flags"))
    results, setting = read_results(os.path.join(flags.out_dir, "results.jsonl")), todo[0]["setting"]
    groups = {name: group(results, lambda c: alike(c) and c["objective"] == name) for name in dict.fromkeys(c["objective"] for c in todo)} if setting else {
        "": group(results, alike)}
    for name, rows in groups.items():
        stem = os.path.join(flags.out_dir, f"sweep-{setting}-{name}" if setting else "compare")
        text = table(rows, METRICS | SWEPT, baselines if not setting else ())
        with open(stem + ".md", "w", encoding="utf-8") as f:
            f.write(text)
        picture(rows, METRICS | SWEPT, stem + ".png")
        print(f"\n{stem}.md, {stem}.png\n\n{text}")


def parse(argv):  # -> flags, train.py's flags
    parser = train.Parser(prog="compare.py", description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, (default, text) in FLAGS.items():
        how = dict(action="store_true") if default is False else dict(type=type(default), default=default, metavar="X")
        parser.add_argument(f"--{flag}", help=f"{text} [{default}]" if default not in ("", False) else text, **how)
    return parser.parse_known_args(argv)


def main(argv=None):
    flags, rest = parse(sys.argv[1:] if argv is None else argv)
    if flags.rows:
        return picture_of_rows("rows.png")
    todo = cells(flags, rest)
    for cell in todo:                           # what cannot run is said before anything runs
        setting = [f"--{cell['setting']}", cell["value"]] if cell["setting"] not in ("", "replay", "init") else []
        train.get_config(["--objective", cell["objective"], "--max_iters", str(cell["max_iters"]), *cell["flags"], *setting])
    [source, *new] = open_corpus([flags.data, *([todo[0]["new_data"]] if todo[0]["new_data"] else [])])
    if len(source["val"]) < 1 << 12:
        fail(f"--data {flags.data}: has {len(source['val'])} bytes to validate on, the yardsticks want 4096. Try more text")
    if os.path.exists(flags.out_dir) and not os.path.isdir(flags.out_dir):
        fail(f"--out_dir {flags.out_dir}: is a file. Try another name")
    path = os.path.join(flags.out_dir, "results.jsonl")
    os.makedirs(flags.out_dir, exist_ok=True)
    shared, done = None, {json.dumps(r["cell"], sort_keys=True) for r in read_results(path)}
    for i, cell in enumerate(todo):
        title = f"[{i + 1}/{len(todo)}] {cell['objective']} {cell['setting']}{'=' if cell['setting'] else ''}{cell['value']} seed {cell['seed']}"
        if json.dumps(cell, sort_keys=True) in done:
            print(f"{title}: finished before")
            continue
        begin, shared = time.perf_counter(), shared or open_shared(source, flags)
        folder, base = run_training(cell, flags)
        metrics = logged(folder) | measure(folder, shared)
        if cell["setting"] == "replay":         # all three by one ruler
            metrics |= {"bpb": None, "new": left_right_bits(folder, new[0]["val"]), "old": left_right_bits(folder, shared["text"]),
                        "before": left_right_bits(base, shared["text"])}
        add_result(path, {"cell": cell, "metrics": metrics})
        print(f"{title}: loss {metrics['loss']:.4f}, {time.perf_counter() - begin:.0f} s", flush=True)
    report(flags, todo, baselines(source, flags, rest, todo) if not todo[0]["setting"] else [])


def left_right_bits(folder, text):  # -> bits a byte of held-out windows under the causal mask
    model, _, hp, _ = sample.load_run(folder, "cpu", "float32")
    x = windows(text, hp.block_size + 1, 4 * ROWS, "left to right")
    with torch.no_grad():
        nats = sum(F.cross_entropy(model.logits(model(part[:, :-1], "causal")).flatten(0, 1), part[:, 1:].flatten()) for part in x.split(ROWS)) / 4
    return float(nats) / math.log(2)


def baselines(source, flags, rest, todo):  # -> [(name, metrics)]: an untrained model, raw bytes, the held-out text itself
    kept = os.path.join(flags.out_dir, f"baselines-{hash_of([rest, flags.data]):x}.json")
    if not os.path.exists(kept):
        shared = open_shared(source, flags)
        hp = train.get_config(["--objective", todo[0]["objective"], *rest, "--device", "cpu", "--dtype", "float32"])
        model, T = train.build(hp)[0].requires_grad_(False), hp.block_size
        text = [to_bytes(row.byte()) for row in windows(shared["text"], 216, ROWS, "prompts")]
        out = {"untrained, which mixes no positions": retrieval(model, "mlm", shared["text"], T) if T >= 128 else {}, "five raw bytes": {},
               "held-out text": text_figures(text, shared["counts"])}
        if shared["probe"] and 256 % min(T, 256) == 0:
            first, second, _ = out
            out[first] |= understanding(lambda x: states(model, "mlm", x), shared["probe"])
            out[second] = understanding(byte_features, shared["probe"])
        with open(kept, "w") as f:
            json.dump(out, f)
    with open(kept) as f:
        return [*json.load(f).items()]


if __name__ == "__main__":
    sys.exit(main())
