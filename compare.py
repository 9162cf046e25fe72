"""Train every objective alike and measure all of them with the same yardsticks.

    python compare.py                                   all objectives, one seed: an hour or more on a laptop CPU
    python compare.py --quick                           100 steps, minutes: too short to conclude anything
    python compare.py --seeds 1,2,3 --objectives clm,mlm
    python compare.py --sweep mask_rate=.1,.15,.3,.4 --objectives mlm --seeds 1,2,3
    python compare.py --sweep bart_noise=mask,infill+permute        a + inside a value stands for a comma
    python compare.py --sweep replay=0,.05,.25          continual pre-training on C++ headers, Python as the old corpus

Every cell (objective, setting, seed) is one run of train.py in a folder of its own, for the same number of
row positions; what is finished is not trained again. Results go to results.jsonl, from which the Markdown
tables and the pictures are drawn anew each time, with differences from the first row paired by seed. To
measure anew, delete results.jsonl: the runs stay. Flags that are not listed below are train.py's, such as
--n_layer 6.
"""
# N windows, n bytes of a window, a bytes left of a middle of m, C width, K classes, L layers
import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)                # a run in progress catches it by itself
import contextlib
import json
import keyword
import math
import os
import statistics
import time
import token as token_kinds
import tokenize
import zlib
from argparse import Namespace

# isort: off  data silences a warning of torch's, and so comes before it
from data import EOT, MASK, check_sizes, draw, fail, from_bytes, gather, generator, open_corpus, read_stdlib
import bench
import sample
import train
from model import norm
from objectives import EVAL_ROWS, IGNORE, OBJECTIVES, auc, find_objective
from run import VERSION, build, check, get_config, load_checkpoint, load_run, make_parser, specs
import torch
import torch.nn.functional as F

FLAGS = {
    "objectives": ("", "which, separated by commas; without it all, or the first that has the setting of --sweep"),
    "seeds": ("1", "seeds, separated by commas: equal weights at start, and windows at the same places, for all"),
    "max_iters": (1000, "steps of each run, of batch_size * block_size positions", 1, 1 << 40),
    "quick": (False, "100 steps in place of --max_iters"),
    "data": ("stdlib", "corpus; byte classes are read off Python source and need stdlib"),
    "new_data": ("", "second corpus, for --sweep replay; without it the C++ headers that come with torch"),
    "sweep": ("", "a setting and its values, as in mask_rate=.1,.15,.3"),
    "out_dir": ("out/compare", "folder of results, tables, pictures and runs"),
}
MIDDLES = 4, 16, 64                             # bytes to infill
ROWS = 64                                       # windows of a yardstick
SHARE = 0.1                                     # of the bytes are replaced
CPP_HEADERS = os.path.join(torch.__path__[0], "include")
CLASSES = "space", "keyword", "name", "string", "comment", "number", "operator"
CELL = {"objective", "seed", "data", "out_dir", "resume", "max_iters", "eval_interval", "init_from"}    # set here

# two tables. metric: (heading, digits, is more better)
LEARNED = {
    "loss": ("own loss", 3, None), "bpb": ("left to right, bits/byte", 3, False),
    "old_before": ("old corpus before", 3, None), "old": ("old corpus after", 3, False),
    "new": ("new corpus", 3, False),
    **{f"infill_{m}": (f"infill {m}, bits/byte", 2, False) for m in MIDDLES},
    "classes": ("byte classes", 3, True), "replaced": ("replaced, AUC", 3, True),
}
COST = {
    "raw_mb": ("MB read", 2, None), "targets": ("targets a row", 1, True), "tflop": ("TFLOP", 2, False),
    "seconds": ("training, s", 0, False), "train_speed": ("training, kB/s", 1, True),
    "pass_bytes": ("bytes a pass", 2, True),
}


# ---- yardsticks

def windows(text, n, count, key):  # (M,) uint8 -> (count, n) long: windows without a NUL where there are any
    source = [dict(weight=1.0, text=text)]
    return gather(source, "text", *draw(source, "text", n, count, generator(f"compare,{key}"), whole=True), n)


@torch.no_grad()
def infill_logits(model, entry, hp, x, a, m):  # x (N, n) -> (N, m, V) for bytes a .. a + m - 1, or None
    """In the entry's own format, each byte from the middle's bytes before it, and from both sides where the
    objective gives both: the chain rule, so that their nats add up to a code length. None where there is no
    way to ask."""
    left, middle, right = x[:, :a], x[:, a:a + m], x[:, a + m:]
    frame = entry["fills"](hp)
    if frame:                                   # m passes, pass i with the middle's first i bytes in place
        rows = [torch.cat((left, middle[:, :i], torch.full_like(middle[:, i:], MASK), right), 1) for i in range(m)]
        return torch.stack([sample.fill_logits(model, row, frame)[:, a + i] for i, row in enumerate(rows)], 1)
    asked = [entry["ask"](pair, m, hp) for pair in zip(left.tolist(), right.tolist())]
    if not asked[0] and entry["continues"](hp):                 # the left side alone
        mask, before, after = entry["continues"](hp)
        asked = [(before + row + after, (len(before) + a + len(after)) * (mask == "prefix")) for row in left.tolist()]
    if not asked[0]:
        return None
    row, P = torch.cat((torch.tensor([ids for ids, _ in asked]), middle), 1), asked[0][1]
    assert row.size(1) <= hp.block_size, (row.shape, hp.block_size)
    prefix = torch.full((len(x),), P)
    h = model(row[:, :-1], prefix if P else "causal", at=entry["positions"](row[:, :-1], prefix))
    return model.logits(h[:, -m:])


def infilling(model, entry, hp, text):  # -> {infill_m: bits a byte, left_only}
    """As many bytes left as right of the middle, all from the same held-out windows."""
    n, out = (hp.block_size - 16) // 2, {}
    for m in [m for m in MIDDLES if m + 2 <= n]:
        x, a = windows(text, n, ROWS, f"infill,{m}"), (n - m) // 2
        logits = infill_logits(model, entry, hp, x, a, m)
        if logits is None:
            return {}
        nats = F.cross_entropy(logits[..., :256].float().flatten(0, 1), x[:, a:a + m].flatten())
        out[f"infill_{m}"] = float(nats) / math.log(2)
    return out | {"left_only": not entry["fills"](hp) and not entry["ask"](([1], [1]), 1, hp)}


@torch.no_grad()
def corruption(model, heads, entry, hp, text):  # -> {replaced: AUC}
    """A tenth of the bytes is replaced by bytes of the text's own distribution; a byte's score is what its
    head says where it has one that marks bytes, else its surprise: given the others while every eighth byte
    is masked, or given those before it."""
    x, g = windows(text, min(hp.block_size, 256) - 2, ROWS, "corruption"), generator("compare,replaced")
    other = text[torch.randint(0, len(text), x.shape, generator=g)].long()
    bad = (torch.rand(x.shape, generator=g) < SHARE) & (other != x)
    z, frame = torch.where(bad, other, x), entry["fills"](hp)
    if entry["mode"] == "mark":
        score = entry["answer"](model, heads, z)
    elif frame:
        score, eighth = torch.zeros(z.shape), torch.arange(z.size(1)) % 8
        for r in range(8):
            logits = sample.fill_logits(model, z.masked_fill(eighth == r, MASK), frame)[..., :256]
            score = torch.where(eighth == r, F.cross_entropy(logits.mT, z, reduction="none"), score)
    elif entry["bpb"] in ("loss", "causal"):
        h = model(torch.cat((torch.full_like(z[:, :1], EOT), z[:, :-1]), 1), "causal")
        score = F.cross_entropy(model.logits(h)[..., :256].mT, z, reduction="none")
    else:
        return {}
    return {"replaced": float(auc(score.flatten(), bad.long().flatten()))}


@torch.no_grad()
def writing(model, heads, entry, hp, text):  # -> {pass_bytes: bytes that a pass of the model writes}
    """Of eight samples, drafted where the objective drafts."""
    T, new, written, passes = hp.block_size, min(hp.block_size, 256) - 40, 0, 0
    for i, prompt in enumerate(windows(text, 32, 8, "prompts")):
        drafter = entry["drafter"] and entry["drafter"](model, heads, hp)
        if drafter:
            tally, g = [], generator(f"compare,{i}")
            out = sample.speculate(model, drafter, prompt.tolist(), new, T, g, tally, temperature=0.8)
            written, passes = written + len([*out]), passes + len(tally)
        elif entry["bounds"] and entry["orders"]:
            x = torch.cat((prompt, torch.full((new,), MASK)))[None]
            out = sample.unmask(model, x, sample.sample_generators(i, 1), entry["fills"](hp), order=entry["orders"][0])
            written, passes = written + new, passes + len([*out])
    if passes:
        return {"pass_bytes": written / passes}
    return {"pass_bytes": 1.0} if entry["continues"](hp) else {}


# ---- its own job: (model, heads, entry, hp, text) -> what the model reaches, what a trivial rule does

def holes(model, heads, entry, hp, text):  # edit distance to 16 bytes taken out, that of nothing being 1
    """What it writes, most likely byte after most likely byte, and ends by itself, in at most 80."""
    if hp.block_size < 128 or not entry["ask"](([1], [1]), 1, hp):
        return None
    off, n = 0, min(160, hp.block_size - 96)
    for row in windows(text, n, ROWS, "holes").tolist():
        a, b = n // 2 - 8, n // 2 + 8
        ids, P = entry["ask"]([row[:a], row[b:]], 16, hp)
        gens = sample.sample_generators(1, 1)
        [written], _ = sample.infill(model, entry, ids, P, 1, 80, hp.block_size, gens, temperature=0)
        off += edit_distance(written, row[a:b])
    return off / (16 * ROWS), 1.0


def repairs(model, heads, entry, hp, text):  # edit distance to the clean text, that of the noisy text being 1
    x = windows(text, entry["n"], ROWS // 2, "repairs")
    batch, left, before = entry["make"](x, generator("compare,repairs"), hp), 0, 0
    for clean, row, P, tgt in zip(x.tolist(), *(batch[k].tolist() for k in ("inp", "mask", "tgt"))):
        clean = clean[:sum(i != IGNORE for i in tgt) - 1]       # EOT ends it
        source, gens = torch.tensor([row[:P]]), sample.sample_generators(1, 1)
        steps = sample.generate(model, source, hp.block_size + 1 - P, hp.block_size, gens, P, temperature=0)
        left += edit_distance([i for i in map(int, steps) if i != EOT], clean)
        before += edit_distance(row[:P - 1], clean)
    return left / before, 1.0


def edit_distance(a, b):  # of Levenshtein: bytes inserted, deleted and replaced
    row = [*range(len(b) + 1)]
    for i, x in enumerate(a, 1):
        before, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (x != y)))
    return row[-1]


def typos(model, heads, entry, hp, text):  # share of texts whose one wrong letter is the first mark
    """A lower-case letter between two others is replaced by another. The rule: the pair of bytes that is the rarest in
    the held-out text."""
    n, g = min(hp.block_size, 128), generator("compare,typos")
    x, pairs = windows(text, n, 4 * ROWS, "typos"), torch.bincount(text[:-1].long() * 256 + text[1:].long())
    letter = (x >= ord("a")) & (x <= ord("z"))
    inside = letter & F.pad(letter[:, :-1], (1, 0)) & F.pad(letter[:, 1:], (0, 1))
    x, inside = (t[inside.any(1)] for t in (x, inside))
    if not len(x):
        return None
    at = torch.rand(x.shape, generator=g).where(inside, -1).argmax(1, keepdim=True)
    other = (x.gather(1, at) - ord("a") + torch.randint(1, 26, at.shape, generator=g)) % 26 + ord("a")
    x = x.scatter(1, at, other)
    marks = entry["answer"](model, heads, x).argmax(1, keepdim=True)
    rarest = F.pad(pairs, (0, 1 << 16))[x[:, :-1] * 256 + x[:, 1:]].argmin(1, keepdim=True) + 1
    return float((marks == at).float().mean()), float((rarest == at).float().mean())


def recalls(model, heads, entry, hp, text):  # share of 256 half passages nearest to their other half
    """The rule: cosines of histograms of bytes."""
    halves = windows(text, hp.block_size // 2 * 2, 256, "recalls").unflatten(1, (2, -1))            # (256, 2, n)
    def recall(e):  # (256, 2, C) -> share
        e = F.normalize(e, dim=-1)
        return float(((e[:, 0] @ e[:, 1].T).argmax(1) == torch.arange(256)).float().mean())
    embedded = torch.stack([entry["answer"](model, heads, halves[:, i]) for i in range(2)], dim=1)
    histograms = torch.zeros(256, 2, 256).scatter_add(2, halves, torch.ones(halves.shape))
    return recall(embedded), recall(histograms)


def answers(model, heads, entry, hp, text):  # share of 512 rows answered right; the rule: chance
    source = [dict(weight=1.0, text=text)]
    batches = [train.draw_batch(entry, source, "text", EVAL_ROWS, f"answers,{i}", hp) for i in range(16)]
    classes = 2 if entry["mode"] == "follow" else hp.block_size
    figures, _ = train.means(entry, model, heads, batches, hp)
    return (figures["accuracy"], 1 / classes) if "accuracy" in figures else None


# by sample.py's mode; what continues or fills bytes is measured by the yardsticks of all
JOBS = {"infill": ("edit distance of a hole of 16 bytes, left empty 1", holes),
        "repair": ("edit distance left, the noisy text's being 1", repairs),
        "mark": ("typos that are its first mark", typos), "search": ("recall of 256 other halves", recalls),
        "follow": ("rows answered right", answers), "seam": ("rows answered right", answers)}


@torch.no_grad()
def own_job(model, heads, entry, hp, text):  # -> {job, job_done, job_untrained, job_trivial}
    if entry["mode"] not in JOBS:
        return {}
    heading, measured = JOBS[entry["mode"]]
    done = measured(model, heads, entry, hp, text)
    if done is None:                            # these rows cannot be asked
        return {}
    untrained = measured(*build(hp), entry, hp, text)
    return {"job": heading, "job_done": done[0], "job_untrained": untrained[0], "job_trivial": done[1]}


# ---- byte classes: a linear probe on frozen states

@torch.no_grad()
def states(model, entry, hp, x):  # (N, n) -> (L, N, n, C): each block's states, normed, in pieces of the block
    """Read under the objective's own mask, by a hook on each block, since nothing else wants states from
    inside."""
    kept, (N, n) = [], x.shape
    hooks = [block.register_forward_hook(lambda _, args, out: kept.append(norm(out).float())) for block in model.blocks]
    model(x.reshape(-1, min(hp.block_size, n)), "causal" if entry["mask"] == "causal" else "bidirectional")
    for hook in hooks:
        hook.remove()
    return torch.stack(kept).view(len(kept), N, n, -1)


def byte_classes(text):  # bytes -> (n,) long: index into CLASSES of every byte, or None where tokenize gives up
    """White space and what tokenize names nothing is class 0; a name that is a keyword counts as one."""
    try:
        lines = [line + "\n" for line in text.decode().split("\n")]
        kinds = {"NAME": 2, "STRING": 3, "FSTRING_START": 3, "FSTRING_MIDDLE": 3, "FSTRING_END": 3, "COMMENT": 4,
                 "NUMBER": 5, "OP": 6}          # FSTRING_*: from Python 3.12 on
        starts, labels = [0], torch.zeros(len(text) + 1, dtype=torch.long)
        for line in lines:
            starts.append(starts[-1] + len(line.encode()))

        def place(at):  # (line, column) -> byte
            return starts[at[0] - 1] + len(lines[at[0] - 1][:at[1]].encode())
        for token in tokenize.generate_tokens(iter(lines).__next__):
            kind = kinds.get(token_kinds.tok_name[token.type])
            if kind:
                labels[place(token.start):place(token.end)] = 1 if keyword.iskeyword(token.string) else kind
        return labels[:len(text)]
    except (SyntaxError, tokenize.TokenError, UnicodeDecodeError, IndexError):
        return None


def fit(x, y, K, decay=1e-4):  # x (N, C), y (N,) -> a function x -> classes
    """Multinomial logistic regression on standardized x. All classes weigh the same, however rare."""
    mean, std, weight = x.mean(0), x.std(0) + 1e-6, len(y) / (K * torch.bincount(y, minlength=K).clamp(min=1))
    W = torch.zeros(x.size(1) + 1, K, requires_grad=True)

    def wide(x):
        return F.pad((x - mean) / std, (0, 1), value=1.0)
    z, solver = wide(x), torch.optim.LBFGS([W], max_iter=60, line_search_fn="strong_wolfe")

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


def probe_data(n):  # -> x (N, n), classes (N, n), split (N,), rows and cols of the bytes to probe
    """Labels from the corpus itself. split: 0 fit, 1 choose the layer, 2 score, which are the documents that
    data.py holds out."""
    x, classes, split = [], [], []
    for i, text in enumerate(read_stdlib().values()):
        labels, part = byte_classes(text), 2 if i % 10 == 9 else int(i % 5 == 0)
        if labels is None or len(text) < n:
            continue
        count = min(9 if part == 2 else 3, len(text) // n)
        for k in range(count):                  # evenly spaced over the document
            a = (len(text) - n) * k // max(1, count - 1)
            x.append(from_bytes(text[a:a + n]).long())
            classes.append(labels[a:a + n])
            split.append(part)
    x, classes, split = torch.stack(x), torch.stack(classes), torch.tensor(split)
    held = (split == 2)[:, None].expand(-1, n)
    rate = torch.where(held, 0.4, 8000 / float((~held).sum()))  # of the others 8000 bytes fit and choose
    rows, cols = (torch.rand(len(x), n, generator=generator("compare,positions")) < rate).nonzero().T
    return dict(x=x, classes=classes, split=split, rows=rows, cols=cols)


def understanding(features, data):  # features: x (N, n) -> (L, N, n, C) -> {classes: accuracy}
    rows, cols, local = data["rows"], data["cols"], []          # rows in ascending order
    for a in range(0, len(data["x"]), ROWS):
        here = (rows >= a) & (rows < a + ROWS)
        local.append(features(data["x"][a:a + ROWS])[:, rows[here] - a, cols[here]])
    return {"classes": probe(torch.cat(local, 1), data["classes"][rows, cols], data["split"][rows], len(CLASSES))}


def byte_features(x):  # (N, n) -> (1, N, n, 5 * 128): in place of states the bytes from two before to two after
    near = F.pad(x, (2, 2)).unfold(1, 5, 1).clamp(max=127)                          # (N, n, 5)
    return F.one_hot(near, 128).flatten(2).float()[None]


# ---- a cell: train, measure

def measure(folder, shared):  # -> {metric: number}; on the CPU, wherever the run was trained
    """What an objective cannot be asked is left out."""
    model, heads, hp, _ = load_run(folder, "cpu", "float32")
    entry, text, out = find_objective(hp), shared["text"], {}
    if hp.block_size >= 128:
        out |= infilling(model, entry, hp, text) | corruption(model, heads, entry, hp, text)
        out |= writing(model, heads, entry, hp, text)
    out |= own_job(model, heads, entry, hp, text)
    if shared["probe"] and 256 % min(hp.block_size, 256) == 0:
        out |= understanding(lambda x: states(model, entry, hp, x), shared["probe"])
    return out


def logged(folder):  # -> {metric: number} that metrics.jsonl and the settings hold
    """The last validation, the median pace, bytes of the windows that were drawn (some rows may use
    fewer)."""
    with open(os.path.join(folder, "metrics.jsonl"), "rb") as f:
        records = [json.loads(line) for line in f][1:]
    val = next(r for r in records if r.get("split") == "val" and r["step"] == records[-1]["step"])
    hp = Namespace(**load_checkpoint(folder)["config"])
    steps, raw = val["step"], find_objective(hp)["n"] * hp.batch_size * hp.accum    # raw: bytes of a step
    clock = [(r["step"], r["seconds"]) for r in records if r["split"] == "train"]
    paces = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in zip(clock, clock[1:])] or [val["seconds"] / max(1, steps)]
    hp.device, hp.dtype = "cpu", "float32"
    return {"loss": val["loss"], "bpb": val["bpb"], "targets": val["targets"] * hp.block_size,
            "seconds": val["seconds"], "train_speed": raw / max(statistics.median(paces), 1e-9) / 1e3,
            "raw_mb": raw * steps / 1e6, "tflop": bench.count_flops(hp) * hp.accum * steps / 1e12}


def left_right_bits(folder, text):  # -> bits a byte of held-out windows under the causal mask
    model, _, hp, _ = load_run(folder, "cpu", "float32")
    nats = []
    with torch.no_grad():
        for part in windows(text, hp.block_size + 1, 4 * ROWS, "left to right").split(ROWS):
            logits = model.logits(model(part[:, :-1], "causal"))
            nats.append(float(F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())))
    return statistics.fmean(nats) / math.log(2)


def swept(cell):  # -> the flag of train.py that a sweep sets
    setting, value = cell["setting"], cell["value"]
    if setting in ("", "replay"):
        return []
    words = isinstance(specs()[setting][0], str)                # 1e+1 is a number
    return [f"--{setting}", value.replace("+", ",") if words else value]


def run_training(cell, flags):  # -> folder of the finished run, folder of the run that it began with, or None
    """What it finds finished it leaves, what it finds begun it resumes. A run that diverged is none."""
    setting, value, steps, first = cell["setting"], cell["value"], cell["max_iters"], None
    argv = ["--objective", cell["objective"], "--seed", str(cell["seed"]), *cell["flags"]]
    if setting == "replay":                     # the same steps again, on the new corpus
        plain = {**cell, "setting": "", "value": "", "new_data": "", "crc": cell["crc"][:1]}
        first, share = run_training(plain, flags)[0], float(value)
        if first is None:
            return None, None
        new = cell["new_data"] or CPP_HEADERS
        argv += ["--init_from", first, "--data", f"{new}:{1 - share:g}"]
        argv += [f"{cell['data']}:{share:g}"] if share else []
    else:
        argv += ["--data", cell["data"], *swept(cell)]
    words = [cell["objective"], f"{setting}={value}", str(steps), f"seed{cell['seed']}"]
    # settings and corpus are in the folder's name: other ones cannot resume it
    tag = zlib.crc32(json.dumps([cell["version"], cell["flags"], cell["data"], cell["new_data"], cell["crc"]]).encode())
    name = "-".join(word for word in words if word != "=").replace(":", "_")
    folder = os.path.join(flags.out_dir, "runs", f"{name}-{tag:x}")
    begun = any(os.path.exists(os.path.join(folder, file)) for file in ("ckpt.pt", "best.pt"))
    if begun and load_checkpoint(folder)["step"] == steps:
        return folder, first
    os.makedirs(folder, exist_ok=True)
    argv = ["--resume"] if begun else [*argv, "--max_iters", str(steps), "--eval_interval", str(steps)]
    with open(os.path.join(folder, "log.txt"), "a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        code = train.main([*argv, "--out_dir", folder])
    if code > 1:                                # a signal
        print(f"stopped, saved in {folder}. The same command goes on")
        sys.exit(code)
    crc = {s[2] for s in load_checkpoint(folder)["sources"]}
    assert crc <= set(cell["crc"]), f"{folder} was trained on other bytes than {cell['crc']}: {crc}"
    return (None if code else folder), first


def cells(flags, rest):  # -> [{objective, setting, value, seed, max_iters, data, new_data, flags}], all flags checked
    """Fails on a flag or a setting that train.py would refuse, before anything runs."""
    setting, _, values = flags.sweep.partition("=")
    values = [v for v in values.split(",") if v] if setting else [""]
    own = [name for name, entry in OBJECTIVES.items() if setting in entry["settings"]]
    coders = [name for name, entry in OBJECTIVES.items() if entry["bpb"] in ("loss", "causal")]
    own = coders if setting == "replay" else own
    if flags.sweep and not own and setting not in set(specs()) - CELL:
        fail(f"--sweep {flags.sweep}: no such setting. Try one of train.py's, or replay")
    if not values:
        fail(f"--sweep {flags.sweep}: wants a setting and values, as in mask_rate=.1,.15,.3")
    for flag in rest:
        if flag.lstrip("-").partition("=")[0] in CELL:
            fail(f"{flag}: is set by compare.py itself. Try its own flags, python compare.py --help")
    names = flags.objectives.split(",") if flags.objectives else (own[:1] or [*OBJECTIVES])
    for name in names:
        if name not in OBJECTIVES:
            fail(f"--objectives {name}: unknown. Try some of {','.join(OBJECTIVES)}")
        if setting == "replay" and name not in coders:
            fail(f"--objectives {name}: forgetting is measured in bits per byte. Try {','.join(coders)}")
    try:
        seeds = [int(s) for s in flags.seeds.split(",")]
        assert setting != "replay" or all(0 <= float(v) < 1 for v in values)
    except (ValueError, AssertionError):
        fail(f"--seeds {flags.seeds} --sweep {flags.sweep}: want whole numbers, and shares of replay in 0 .. 1")
    base = dict(version=VERSION, max_iters=100 if flags.quick else flags.max_iters, data=flags.data,
                new_data=flags.new_data)
    todo = [dict(objective=name, setting=setting, value=value, seed=seed, flags=rest, **base)
            for seed in dict.fromkeys(seeds) for name in dict.fromkeys(names) for value in dict.fromkeys(values)]
    for cell in todo:                           # what cannot run is said before anything runs
        get_config(["--objective", cell["objective"], "--max_iters", str(cell["max_iters"]),
                    "--seed", str(cell["seed"]), *rest, *swept(cell)])
    return todo


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
            bound = OBJECTIVES[r["cell"]["objective"]]["bpb"] == "bound"
            name = r["cell"]["value"] or r["cell"]["objective"]
            rows.setdefault(name, {})[r["cell"]["seed"]] = r["metrics"] | {"bound": bound}
    return {name: rows[name] for name in dict.fromkeys([*order, *rows]) if name in rows}


def column(rows, metric):  # -> {row name: {seed: number}} of the rows that have the metric
    found = {name: {seed: m[metric] for seed, m in seeds.items() if m.get(metric) is not None}
             for name, seeds in rows.items()}
    return {name: seeds for name, seeds in found.items() if seeds}


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


def job_table(rows):  # -> Markdown
    lines = ["| its job | | model | untrained | trivial rule |", "|---" * 5 + "|"]
    for name, seeds in rows.items():
        done = [m for m in seeds.values() if "job" in m]
        figures = [mean_and_error([m[k] for m in done], 3, statistics.stdev)
                   for k in ("job_done", "job_untrained", "job_trivial") if done]
        lines += [f"| {name} | {done[0]['job']} | {' | '.join(figures)} |"] if done else []
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


T975 = 12.7, 4.3, 3.2, 2.8, 2.6, 2.4, 2.4, 2.3, 2.3             # Student's t for 2, 3, ... seeds


def tables(rows, extra):  # rows {name: {seed: metrics}}, extra {name: metrics} -> Markdown
    """What was learned, at what cost, and differences from the first row."""
    def says(name, mark):
        return any(m.get(mark) for m in rows.get(name, {}).values())

    def spread(m, seeds, name):
        bound = m == "bpb" and says(name, "bound")
        return "<= " * bound + mean_and_error([*seeds.values()], (LEARNED | COST)[m][1], statistics.stdev)

    def error(d):
        return statistics.stdev(d) / len(d) ** 0.5

    def difference(m, seeds, name):
        base = column(rows, m)[first]
        pairs = [value - base[seed] for seed, value in seeds.items() if seed in base]
        alike = m != "bpb" or says(name, "bound") == says(first, "bound")
        return mean_and_error(pairs, max(3, LEARNED[m][1]), error, "+") if len(pairs) > 1 and alike else ""
    named = {name + " †" * says(name, "left_only"): seeds for name, seeds in rows.items()}
    named |= {name: {None: m} for name, m in extra.items()}
    note = "† has the left side alone in infill.\n" if any(says(name, "left_only") for name in rows) else ""
    spreads = "Mean over seeds ± their standard deviation.\n"
    parts = [table(named, LEARNED, spread), note, spreads, job_table(rows), table(rows, COST, spread)]

    # every row against the first, of the metrics that have a better side
    first, *others = rows
    compared = {m: LEARNED[m] for m in LEARNED if LEARNED[m][2] is not None and column(rows, m).get(first)}
    paired = {name: {seed: m for seed, m in rows[name].items() if seed in rows[first]} for name in others}
    n = max((len(seeds) for seeds in paired.values()), default=0)
    if n > 1:
        clear = T975[min(n, len(T975) + 1) - 2]
        parts += [f"Difference from {first}, paired by seed: mean ± standard error over the runs, the held-out text "
                  f"being the same. With {n} seeds one of {clear} standard errors is clear (95%).\n",
                  table(paired, compared, difference)]
    return "\n".join(part for part in parts if part)


def picture(rows, path):  # -> path, or why there is none
    """One panel of dots for each metric that differs, a line for each row, a bar at the mean."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: pip install matplotlib, and the next run draws it"
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    panels = {m: column(rows, m) for m in LEARNED | COST}
    panels = {m: found for m, found in panels.items() if len({v for s in found.values() for v in s.values()}) > 1}
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
    same, drawn = ("version", "setting", "max_iters", "data", "new_data", "flags", "crc"), 0
    results, setting = read_results(os.path.join(flags.out_dir, "results.jsonl")), todo[0]["setting"]
    results = [r for r in results if all(r["cell"].get(k) == todo[0][k] for k in same)]
    for name in dict.fromkeys(cell["objective"] for cell in todo) if setting else [""]:
        order = [cell["value"] or cell["objective"] for cell in todo]
        rows = collect(results, lambda cell, name=name: name in ("", cell["objective"]), order)
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


# ---- the comparison

def check_folders(flags):
    """Fails where results cannot be kept, or would be read as text."""
    if os.path.exists(flags.out_dir) and not os.path.isdir(flags.out_dir):
        fail(f"--out_dir {flags.out_dir}: is a file. Try another name")
    for folder in (flags.data, flags.new_data):
        inside = os.path.isdir(folder) and os.path.commonpath(map(os.path.realpath, (folder, flags.out_dir)))
        if inside == os.path.realpath(folder):
            fail(f"--out_dir {flags.out_dir}: lies inside the corpus {folder}. Try a folder outside it")


def main(argv=None):
    """Trains what is not finished, measures it, draws the tables. Ctrl-C saves the run in progress."""
    parser = make_parser("compare.py", __doc__, {"flags, beside train.py's": FLAGS})
    given, rest = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    flags = Namespace(**{flag: spec[0] for flag, spec in FLAGS.items()} | vars(given))
    check(vars(flags), FLAGS)
    todo, replay = cells(flags, rest), flags.sweep.startswith("replay=")
    sources = open_corpus([flags.data, *([flags.new_data or CPP_HEADERS] if replay else [])])
    if len(sources[0]["val"]) < 1 << 12:
        fail(f"--data {flags.data}: has {len(sources[0]['val'])} bytes to validate on, the yardsticks want 4096. "
             "Try more text")
    check_folders(flags)
    for name in dict.fromkeys(cell["objective"] for cell in todo):
        hp = get_config(["--objective", name, *rest])
        check_sizes(sources, find_objective(hp)["n"], hp.block_size)
    os.makedirs(flags.out_dir, exist_ok=True)
    path = os.path.join(flags.out_dir, "results.jsonl")
    done = [r["cell"] for r in read_results(path)]
    shared = dict(text=sources[0]["val"], probe=probe_data(256) if flags.data == "stdlib" else None)
    for i, cell in enumerate(todo):
        cell["crc"] = [s["crc"] for s in sources]               # other bytes are another cell
        what = f" {cell['setting']}={cell['value']}" if cell["setting"] else ""
        title, begin = f"[{i + 1}/{len(todo)}] {cell['objective']}{what} seed {cell['seed']}", time.perf_counter()
        if cell in done:
            print(f"{title}: finished before")
            continue
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
        add_result(path, {"cell": cell, "metrics": metrics})
        print(f"{title}: loss {metrics['loss']:.4f}, {time.perf_counter() - begin:.0f} s", flush=True)
    extra = {"five raw bytes": understanding(byte_features, shared["probe"])} if shared["probe"] else {}
    return report(flags, todo, {} if flags.sweep else extra)


if __name__ == "__main__":
    sys.exit(main())
