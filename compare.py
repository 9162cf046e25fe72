"""Train every objective alike and measure all of them with the same yardsticks.

    python compare.py                                   all objectives, one seed: an hour or more on a laptop CPU
    python compare.py --budgets 100                     minutes: too short to conclude anything
    python compare.py --budgets 500,1000,2000,4000,8000 --objectives clm,mlm --seeds 1,2,3
    python compare.py --sweep mask_rate=.1,.15,.3,.4 --objectives mlm --seeds 1,2,3
    python compare.py --sweep bart_noise=mask,infill+permute        a + inside a value stands for a comma
    python compare.py --sweep replay=0,.05,.25          continual pre-training on C++ headers, Python as the old corpus

A cell is a run of train.py, in a folder named after its settings and its text: what is finished is not trained again,
what is begun goes on, with other defaults it is another run. What was measured lies beside it in measured.json: delete
that to measure anew. Tables are of the largest budget; the last table and the picture are of all. Holes and replaced
bytes want rows of at least 128 positions. Flags that are not listed below are train.py's, such as --n_layer 6.
"""
# N windows, n bytes of a window, a bytes left of a middle of m, C width, K classes, L layers
import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)                # a run in progress catches it by itself
import contextlib
import itertools
import json
import keyword
import lzma
import math
import os
import statistics
import token as token_kinds
import tokenize
import zlib
from argparse import Namespace

# isort: off  data silences a warning of torch's, and so comes before it
from data import EOT, MASK, check_sizes, draw, fail, from_bytes, gather, generator, open_corpus, read_stdlib, to_bytes
import bench
import sample
import train
from model import norm
from objectives import EVAL_ROWS, IGNORE, OBJECTIVES, auc, find_objective
from run import SETTINGS, VERSION, build, get_config, load_checkpoint, load_run, parse_beside, process_as_it_was, specs
import torch
import torch.nn.functional as F

FLAGS = {
    "objectives": ("", "which, separated by commas; without it all, or the first that has the setting of --sweep"),
    "seeds": ("1", "seeds, separated by commas: equal weights at start, and windows at the same places, for all"),
    "budgets": ("1000", "steps, separated by commas: a run of its own, with its own schedule, for each"),
    "data": ("stdlib", "corpus; byte classes are read off Python source and need stdlib"),
    "new_data": ("", "second corpus, for --sweep replay; without it the C++ headers that come with torch"),
    "sweep": ("", "a setting and its values, as in mask_rate=.1,.15,.3"),
    "out_dir": ("out/compare", "folder of tables, pictures and runs"),
}
MIDDLES = 4, 16, 64                             # bytes to infill
ROWS = 64                                       # windows of a yardstick
SHARE = 0.1                                     # of the bytes are replaced
CPP_HEADERS = os.path.join(torch.__path__[0], "include")
CLASSES = "space", "keyword", "name", "string", "comment", "number", "operator"
CELL = {"objective", "seed", "data", "out_dir", "resume", "max_iters", "eval_interval", "init_from"}    # set here

METRICS = {                                     # column: (heading, digits, is more better)
    "loss": ("own loss", 3, None), "bpb": ("left to right", 3, False), "bound": ("bound", 3, False),
    "before": ("old corpus before", 3, None), "old": ("old corpus after", 3, False), "new": ("new corpus", 3, False),
    **{f"left_{m}": (f"{m} bytes from the left", 2, False) for m in MIDDLES},
    **{f"infill_{m}": (f"infill {m}", 2, False) for m in MIDDLES},
    "classes": ("byte classes", 3, True), "replaced": ("replaced, AUC", 3, True),
    "pass_bytes": ("bytes a pass", 2, None), "targets": ("targets a row", 1, None), "tflop": ("TFLOP", 2, None),
    "seconds": ("seconds", 0, None),
}

DASHED = {"bound": "bpb", **{f"left_{m}": f"infill_{m}" for m in MIDDLES}}          # drawn in the other's panel


# ---- yardsticks

def windows(text, n, count, key):  # (M,) uint8 -> (count, n) long: windows without a NUL where there are any
    source = [dict(weight=1.0, text=text)]
    return gather(source, "text", *draw(source, "text", n, count, generator(f"compare,{key}"), whole=True), n)


def infill_logits(model, entry, hp, x, a, m):  # x (N, n) -> (N, m, V) for bytes a .. a + m - 1, or None
    """In the entry's own format, each byte from the middle's bytes before it and from both sides: the chain rule, so
    that their nats add up to a code length. None where there is no way to ask."""
    left, middle, right = x[:, :a], x[:, a:a + m], x[:, a + m:]
    frame = entry["fills"](hp)
    if frame:                                   # m passes, pass i with the middle's first i bytes in place
        rows = [torch.cat((left, middle[:, :i], torch.full_like(middle[:, i:], MASK), right), 1) for i in range(m)]
        return torch.stack([sample.fill_logits(model, row, frame)[:, a + i] for i, row in enumerate(rows)], 1)
    asked = [entry["ask"](pair, m, hp) for pair in zip(left.tolist(), right.tolist())]
    return answer_logits(model, entry, hp, *zip(*asked), middle) if asked[0] else None


def left_logits(model, entry, hp, x, a, m):  # the same from the left side alone, or None
    if not entry["continues"](hp):
        return None
    mask, before, after = entry["continues"](hp)
    prompts = [before + row + after for row in x[:, :a].tolist()]
    P = len(prompts[0]) if mask == "prefix" else 0
    return answer_logits(model, entry, hp, prompts, [P] * len(x), x[:, a:a + m])


def answer_logits(model, entry, hp, prompts, P, middle):  # N lists of one length, N numbers, (N, m) -> (N, m, V)
    row, prefix = torch.cat((torch.tensor(prompts), middle), 1), torch.tensor(P)
    assert row.size(1) <= hp.block_size + 1, (row.shape, hp.block_size)
    h = model(row[:, :-1], prefix if P[0] else "causal", at=entry["positions"](row[:, :-1], prefix))
    return model.logits(h[:, -middle.size(1):])


def bits(logits, ids):  # (N, m, V), (N, m) -> bits a byte
    return float(F.cross_entropy(logits[..., :256].float().flatten(0, 1), ids.flatten())) / math.log(2)


def infilling(model, entry, hp, text):  # -> {left_m, infill_m: bits a byte}, of what can be asked
    """As many bytes left as right of the middle, all from the same held-out windows."""
    n, out = (hp.block_size - 16) // 2, {}
    for m in [m for m in MIDDLES if m + 2 <= n]:
        x, a = windows(text, n, ROWS, f"infill,{m}"), (n - m) // 2
        for name, ask in (("left", left_logits), ("infill", infill_logits)):
            logits = ask(model, entry, hp, x, a, m)
            if logits is not None:
                out[f"{name}_{m}"] = bits(logits, x[:, a:a + m])
    return out


def corruption(model, entry, hp, text):  # -> {replaced: AUC}
    """A tenth of the bytes is replaced by bytes of the text's own distribution; a byte's score is what its
    head says where it has one that marks bytes, else its surprise: given the others while every eighth byte
    is masked, or given those before it."""
    x, g = windows(text, min(hp.block_size, 256) - 2, ROWS, "corruption"), generator("compare,replaced")
    other = text[torch.randint(0, len(text), x.shape, generator=g)].long()
    bad = (torch.rand(x.shape, generator=g) < SHARE) & (other != x)
    z, frame = torch.where(bad, other, x), entry["fills"](hp)
    if entry["mode"] == "mark":
        score = entry["answer"](model, z)
    elif frame:
        score, eighth = torch.zeros(z.shape), torch.arange(z.size(1)) % 8
        for r in range(8):
            logits = sample.fill_logits(model, z.masked_fill(eighth == r, MASK), frame)[..., :256]
            score = torch.where(eighth == r, F.cross_entropy(logits.mT, z, reduction="none"), score)
    elif entry["bpb"] in ("loss", "causal") and entry["continues"](hp):
        h = model(torch.cat((torch.full_like(z[:, :1], EOT), z[:, :-1]), 1), "causal")
        score = F.cross_entropy(model.logits(h)[..., :256].mT, z, reduction="none")
    else:
        return {}
    return {"replaced": float(auc(score.flatten(), bad.long().flatten()))}


def writing(model, entry, hp, text):  # -> {pass_bytes: bytes that a pass of the model writes}
    """Of 32 samples, of what drafts: eight of them are .1 off."""
    T, new, written, passes = hp.block_size, min(hp.block_size, 256) - 40, 0, 0
    drafter = entry["drafter"] and entry["drafter"](model, hp)
    if not drafter:
        return {}
    for i, prompt in enumerate(windows(text, 32, ROWS // 2, "prompts").tolist()):
        tally, g = [], generator(f"compare,{i}")
        written += len([*sample.speculate(model, drafter, prompt, new, T, g, tally, temperature=0.8)])
        passes += len(tally)
    return {"pass_bytes": written / passes}


# ---- its own job: (model, entry, hp, text) -> {done, rule}: what the model reaches, what a trivial rule does
# more of it where the job has another side to it; {} where these rows cannot be asked

def halves(model, entry, hp, text):  # bits a byte of the second half of a window, given the first
    """The rule: lzma on the held-out text as one stream."""
    n = hp.block_size // 2 - 2                  # room for what stands around a prompt
    x = windows(text, 2 * n, 4 * ROWS, "halves")
    logits = left_logits(model, entry, hp, x, n, n)
    if logits is None:
        return {}
    some = to_bytes(text[:train.COMPRESSED])
    return {"done": bits(logits, x[:, n:]), "rule": 8 * len(lzma.compress(some)) / len(some)}


def lines(model, entry, hp, text):  # share of the lines it writes that are tokens of Python
    """Each line by itself, after prompts of 32 bytes; the last, which is cut, does not count. The rule: bytes drawn one
    by one from the text's distribution."""
    if entry["bpb"] != "bound" or hp.block_size < 128:          # the MASKs of others may not be anywhere
        return {}
    x = windows(text, hp.block_size, 2 * ROWS, "lines")        # some 500 lines
    gaps, gens = F.pad(x[:, :32], (0, x.size(1) - 32), value=MASK), sample.sample_generators(1, len(x))
    how = dict(order=entry["orders"][0], temperature=sample.WRITING)
    written = sample.fill(model, gaps, gens, entry["fills"](hp), **how)
    drawn = text[torch.randint(0, len(text), (len(x), 2000), generator=generator("compare,lines"))]
    return {"done": well_formed(written[:, 32:]), "rule": well_formed(drawn)}


def well_formed(rows):  # (N, n) -> share of the whole lines in them
    found = [line.strip() for row in rows.tolist() for line in bytes(row).split(b"\n")[1:-1]]
    good = [byte_classes(line) is not None for line in found if line]
    return statistics.fmean(good or [0])


def holes(model, entry, hp, text):  # share of holes of 4 bytes that are restored, byte for byte
    """As sample.py fills them, with at most 5 bytes for each that is missing, and cut as there. ended: of holes
    of 16, the share that ends by itself. The rule: blanks."""
    if hp.block_size < 128 or not entry["ask"](([1], [1]), 1, hp):
        return {}

    def fill(left, right, m):  # -> what is written, did it end?
        ids, P = entry["ask"]([left, right], m, hp)
        how = dict(gens=sample.sample_generators(1, 1), temperature=0)
        [written], whole = sample.infill(model, entry, ids, P, 1, 5 * m, hp.block_size, **how)
        return written, whole

    half, restored, blanks, ended = min(80, hp.block_size // 2 - 48), 0, 0, 0
    rows = windows(text, 2 * half, 2 * ROWS, "holes").tolist()
    for row in rows:
        left, middle, right = row[:half - 2], row[half - 2:half + 2], row[half + 2:]
        written, _ = fill(left, right, 4)
        restored += sample.join(model, entry, hp, left, written, right) == middle
        blanks += bytes(middle) == b"    "
        ended += fill(row[:half - 8], row[half + 8:], 16)[1]
    return {"done": restored / len(rows), "rule": blanks / len(rows), "ended": ended / len(rows)}


def repairs(model, entry, hp, text):  # edit distance to the clean text, that of the noisy text being 1
    x = windows(text, entry["n"], ROWS // 2, "repairs")
    batch, left, before = entry["make"](x, generator("compare,repairs"), hp), 0, 0
    for clean, row, P, tgt in zip(x.tolist(), *(batch[k].tolist() for k in ("inp", "mask", "tgt"))):
        clean = clean[:sum(i != IGNORE for i in tgt) - 1]       # EOT ends it
        source, gens = torch.tensor([row[:P]]), sample.sample_generators(1, 1)
        room, at = hp.block_size + 1 - P, entry["positions"]
        steps = sample.generate(model, source, room, hp.block_size, gens, P, positions=at, temperature=0)
        left += edit_distance([i for i in map(int, steps) if i != EOT], clean)
        before += edit_distance(row[:P - 1], clean)
    return {"done": left / before, "rule": 1.0} if before else {}


def edit_distance(a, b):  # of Levenshtein: bytes inserted, deleted and replaced
    row = [*range(len(b) + 1)]
    for i, x in enumerate(a, 1):
        before, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (x != y)))
    return row[-1]


def typos(model, entry, hp, text):  # share of texts whose one wrong letter is the first mark
    """A lower-case letter between two others is replaced by another. The rule: the byte whose two pairs with its
    neighbours are the rarest in the held-out text."""
    n, g = min(hp.block_size, 128), generator("compare,typos")
    x, pairs = windows(text, n, 4 * ROWS, "typos"), torch.bincount(text[:-1].long() * 256 + text[1:].long())
    letter = (x >= ord("a")) & (x <= ord("z"))
    inside = letter & F.pad(letter[:, :-1], (1, 0)) & F.pad(letter[:, 1:], (0, 1))
    x, inside = (t[inside.any(1)] for t in (x, inside))
    if not len(x):
        return {}
    at = torch.rand(x.shape, generator=g).where(inside, -1).argmax(1, keepdim=True)
    other = (x.gather(1, at) - ord("a") + torch.randint(1, 26, at.shape, generator=g)) % 26 + ord("a")
    x = x.scatter(1, at, other)
    marks = entry["answer"](model, x).argmax(1, keepdim=True)
    counts = F.pad(pairs, (0, 1 << 16))[x[:, :-1] * 256 + x[:, 1:]]                 # (N, n - 1)
    rarest = (counts[:, :-1] + counts[:, 1:]).argmin(1, keepdim=True) + 1
    return {"done": float((marks == at).float().mean()), "rule": float((rarest == at).float().mean())}


def recalls(model, entry, hp, text):  # share of 256 half passages nearest to their other half
    """The rule: cosines of histograms of bytes."""
    pairs = windows(text, hp.block_size // 2 * 2, 256, "recalls").unflatten(1, (2, -1))             # (256, 2, n)
    def recall(e):  # (256, 2, C) -> share
        e = F.normalize(e, dim=-1)
        return float(((e[:, 0] @ e[:, 1].T).argmax(1) == torch.arange(256)).float().mean())
    embedded = torch.stack([entry["answer"](model, pairs[:, i]) for i in range(2)], dim=1)
    histograms = torch.zeros(256, 2, 256).scatter_add(2, pairs, torch.ones(pairs.shape))
    return {"done": recall(embedded), "rule": recall(histograms)}


def answers(model, entry, hp, text):  # share of 512 rows answered right; the rule: chance
    source = [dict(weight=1.0, text=text)]
    batches = [train.draw_batch(entry, source, "text", EVAL_ROWS, f"answers,{i}", hp) for i in range(16)]
    classes = 2 if entry["mode"] == "follow" else hp.block_size
    figures, _ = train.means(entry, model, batches, hp)
    return {"done": figures["accuracy"], "rule": 1 / classes} if "accuracy" in figures else {}


JOBS = {                                        # of sample.py's modes: (in words, how it is measured)
    "continue": ("second half of a window, bits/byte (lzma)", halves),
    "fill": ("written lines that tokenize (bytes by their frequency)", lines),
    "infill": ("holes of 4 bytes restored (blanks)", holes),
    "repair": ("edit distance left (of the noisy text)", repairs),
    "mark": ("typos that are its first mark (the rarest two pairs of bytes)", typos),
    "search": ("recall of 256 other halves (histograms of bytes)", recalls),
    "follow": ("rows answered right (chance)", answers), "seam": ("rows answered right (chance)", answers)}


# ---- byte classes: a linear probe on frozen states

def states(model, entry, hp, x):  # (N, n) -> (L, N, n, C): each block's states, normed, in pieces of the block
    """Read under the objective's own mask, by a hook on each block, since nothing else wants states from
    inside."""
    kept, (N, n) = [], x.shape
    hooks = [block.register_forward_hook(lambda _, args, out: kept.append(norm(out).float())) for block in model.blocks]
    model(x.reshape(-1, min(hp.block_size, n)), "causal" if entry["mask"] == "causal" else "bidirectional")
    for hook in hooks:
        hook.remove()
    return torch.stack(kept).view(len(kept), N, n, -1)


def byte_classes(text):  # bytes -> (n,) long: index into CLASSES of every byte; None where tokenize gives up
    """White space and what tokenize names nothing is class 0; a name that is a keyword counts as one. Only of ASCII,
    where columns are bytes."""
    if not text.isascii():
        return None
    kinds = {"NAME": 2, "STRING": 3, "FSTRING_START": 3, "FSTRING_MIDDLE": 3, "FSTRING_END": 3, "COMMENT": 4,
             "NUMBER": 5, "OP": 6}              # FSTRING_*: from Python 3.12 on
    lines, labels = [line + "\n" for line in text.decode().split("\n")], torch.zeros(len(text), dtype=torch.long)
    starts = [0, *itertools.accumulate(map(len, lines))]
    try:
        for token in tokenize.generate_tokens(iter(lines).__next__):
            kind = kinds.get(token_kinds.tok_name[token.type])
            if token.type == token_kinds.ERRORTOKEN:            # before Python 3.12 no error
                return None
            if kind:
                first, last = (starts[row - 1] + column for row, column in (token.start, token.end))
                labels[first:last] = 1 if keyword.iskeyword(token.string) else kind
        return labels
    except (SyntaxError, tokenize.TokenError):
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


def probe_data(n):  # -> x, classes, chosen (N, n), which bytes to probe, split (N,)
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
    chosen = torch.rand(len(x), n, generator=generator("compare,positions")) < rate
    return dict(x=x, classes=classes, split=split, chosen=chosen)


def understanding(features, data):  # features: x (N, n) -> (L, N, n, C) -> {classes: accuracy}
    x, chosen = data["x"], data["chosen"]
    layers = torch.cat([features(x[a:a + ROWS])[:, chosen[a:a + ROWS]] for a in range(0, len(x), ROWS)], dim=1)
    split = data["split"][:, None].expand_as(chosen)[chosen]
    return {"classes": probe(layers, data["classes"][chosen], split, len(CLASSES))}


def byte_features(x):  # (N, n) -> (1, N, n, 5 * 128): in place of states the bytes from two before to two after
    near = F.pad(x, (2, 2)).unfold(1, 5, 1).clamp(max=127)                          # (N, n, 5)
    return F.one_hot(near, 128).flatten(2).float()[None]


# ---- a cell: train, measure

def cells(flags, rest):  # -> [(table, row, settings, argv, argv of the run to begin with or None)]
    """Fails on a flag or a setting that train.py would refuse, before anything runs."""
    setting, _, values = flags.sweep.partition("=")
    values = values.split(",") if setting else [""]
    own = [name for name, entry in OBJECTIVES.items() if setting in entry["settings"]]
    coders = [name for name, entry in OBJECTIVES.items() if entry["bpb"] in ("loss", "causal")]
    own = coders if setting == "replay" else own
    if flags.sweep and (not all(values) or not own and setting not in set(specs()) - CELL):
        fail(f"--sweep {flags.sweep}: wants a setting of train.py's, or replay, and values, as in mask_rate=.1,.15,.3")
    names = flags.objectives.split(",") if flags.objectives else (own[:1] or [*OBJECTIVES])
    for name in names:
        if name not in OBJECTIVES:
            fail(f"--objectives {name}: unknown. Try some of {','.join(OBJECTIVES)}")
        if setting == "replay" and name not in coders:
            fail(f"--objectives {name}: forgetting is measured in bits per byte. Try {','.join(coders)}")
    todo, product = [], itertools.product(flags.budgets.split(","), flags.seeds.split(","), names, values)
    for steps, seed, name, value in dict.fromkeys(product):
        plain = ["--objective", name, "--seed", seed, "--max_iters", steps, "--eval_interval", steps, *rest]
        argv, first = [*plain, "--data", flags.data], None
        if setting == "replay":                 # the same steps again, on the new corpus
            new, share, first = flags.new_data or CPP_HEADERS, as_share(value), argv
            argv = [*plain, "--data", f"{new}:{1 - share:g}"] + ([f"{flags.data}:{share:g}"] if share else [])
        elif setting:
            words = isinstance(specs()[setting][0], str)        # 1e+1 is a number
            argv += [f"--{setting}", value.replace("+", ",") if words else value]
        table = f"sweep-{setting}-{name}" if setting else "compare"
        todo.append((table, value or name, get_config(argv), argv, first))
    return todo


def as_share(value):
    with contextlib.suppress(ValueError):
        if 0 <= float(value) < 1:
            return float(value)
    fail(f"--sweep replay={value}: wants shares from 0 to below 1. Try replay=0,.05,.25")


def trained(argv, crc, flags):  # -> folder of the finished run of this command line, None where it diverged
    """What it finds finished it leaves, what it finds begun it resumes."""
    hp = get_config(argv)
    own = {flag for group in SETTINGS.values() for flag in group} | set(find_objective(hp)["settings"])
    # it may go on upon another device, but not in another dtype
    reads = {flag: value for flag, value in vars(hp).items() if flag in own - {"device"}}
    tag = zlib.crc32(json.dumps([VERSION, crc, reads], sort_keys=True).encode())
    folder = os.path.join(flags.out_dir, "runs", f"{hp.objective}-{hp.max_iters}-seed{hp.seed}-{tag:08x}")
    begun = any(os.path.exists(os.path.join(folder, file)) for file in ("ckpt.pt", "best.pt"))
    if begun and load_checkpoint(folder)["step"] == hp.max_iters:
        return folder
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "log.txt"), "a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        code = train.main([*argv, *(["--resume"] if begun else []), "--out_dir", folder])
    if code > 1:                                # a signal
        print(f"stopped, saved in {folder}. The same command goes on")
        sys.exit(code)
    return None if code else folder


def result(argv, first, crc, flags, shared):  # -> {column: number}, {} where the run diverged
    start = trained(first, crc[:1], flags) if first else None
    if first and not start:
        return {}
    folder = trained([*argv, *(["--init_from", start] if start else [])], crc, flags)
    if not folder:
        return {}
    path = os.path.join(folder, "measured.json")
    if not os.path.exists(path):
        metrics = logged(folder) | measure(folder, shared)
        if start:                               # all three by one ruler
            old, new = validated(folder, shared["sources"])
            metrics |= {"bpb": None, "old": old, "new": new, "before": validated(start, shared["sources"])[0]}
        with open(path + ".tmp", "w", encoding="utf-8") as f:
            json.dump(metrics, f)
        os.replace(path + ".tmp", path)
    with open(path, encoding="utf-8") as f:
        return json.load(f)


@torch.no_grad()
def measure(folder, shared):  # -> {column: number}; on the CPU, wherever the run was trained
    """What an objective cannot be asked is left out."""
    model, hp, _ = load_run(os.path.join(folder, "ckpt.pt"), "cpu", "float32")
    entry, text, out = find_objective(hp), shared["text"], {}
    if hp.block_size >= 128:
        out |= infilling(model, entry, hp, text) | corruption(model, entry, hp, text)
        out |= writing(model, entry, hp, text)
    heading, job = JOBS[entry["mode"]]
    found = job(model, entry, hp, text)
    if found:
        untrained = job(build(hp), entry, hp, text)
        out |= found | {"job": heading, "untrained": untrained["done"]}
    if shared["probe"] and 256 % min(hp.block_size, 256) == 0:
        out |= understanding(lambda x: states(model, entry, hp, x), shared["probe"])
    return out


def logged(folder):  # -> {column: number} that metrics.jsonl and the settings hold
    with open(os.path.join(folder, "metrics.jsonl"), "rb") as f:
        records = [r for r in map(json.loads, f) if r.get("split") == "val"]
    val = next(r for r in records if r["step"] == records[-1]["step"])              # of the first source
    hp = Namespace(**load_checkpoint(folder)["config"] | {"dtype": "float32"})
    return {"loss": val["loss"], "bound" if find_objective(hp)["bpb"] == "bound" else "bpb": val["bpb"],
            "targets": val["targets"] * hp.block_size, "seconds": val["seconds"],
            "tflop": bench.count_flops(hp) * hp.accum * val["step"] / 1e12}


def validated(folder, sources):  # -> [bits a byte of each source]
    model, hp, _ = load_run(os.path.join(folder, "ckpt.pt"), "cpu", "float32")
    validation = train.validation_list(find_objective(hp), sources, hp)
    return [record["bpb"] for record in train.evaluate(model, validation, hp)]


# ---- tables, pictures

def column(seeds, m):  # {seed: metrics} -> {seed: number}
    return {seed: metrics[m] for seed, metrics in seeds.items() if metrics.get(m) is not None}


def mean_and_error(values, digits, error, sign=""):  # -> "mean ± error" in words, the mean alone of a single value
    if not values:
        return ""
    mean = f"{statistics.fmean(values):{sign}.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {error(values):.{digits}f}"


def table(rows, say):  # {row: {seed: metrics}}, (seeds, column) -> str -> Markdown without empty columns
    columns = [m for m in METRICS if any(say(seeds, m) for seeds in rows.values())]
    if not columns:
        return ""
    lines = ["| | " + " | ".join(METRICS[m][0] for m in columns) + " | seeds |", "|---" * (len(columns) + 2) + "|"]
    for name, seeds in rows.items():
        ran = [f"{seed}{'' if metrics else ' diverged'}" for seed, metrics in seeds.items()]
        lines.append(f"| {name} | " + " | ".join(say(seeds, m) for m in columns) + f" | {' '.join(ran)} |")
    return "\n".join(lines) + "\n"


def job_table(rows):  # -> Markdown
    lines = ["| | its job (the trivial rule) | model | untrained | rule | ended by itself |", "|---" * 6 + "|"]
    for name, seeds in rows.items():
        headings = [metrics["job"] for metrics in seeds.values() if "job" in metrics]
        figures = [mean_and_error([*column(seeds, k).values()], 3, statistics.stdev)
                   for k in ("done", "untrained", "rule", "ended")]
        lines += [f"| {name} | {headings[0]} | {' | '.join(figures)} |"] if headings else []
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def standard_error(values):
    return statistics.stdev(values) / len(values) ** 0.5


T975 = 12.7, 4.3, 3.2, 2.8, 2.6, 2.4, 2.4, 2.3, 2.3             # Student's t for 2, 3, ... seeds


def tables(rows):  # {row: {seed: metrics}} -> Markdown: what was learned, its job, differences from the first row
    def spread(seeds, m):
        return mean_and_error([*column(seeds, m).values()], METRICS[m][1], statistics.stdev)

    def difference(seeds, m):
        base, better = column(rows[first], m), METRICS[m][2]
        pairs = [value - base[seed] for seed, value in column(seeds, m).items() if seed in base]
        return mean_and_error(pairs, 3, standard_error, "+") if len(pairs) > 1 and better is not None else ""

    def paired(seeds):
        return {seed: metrics for seed, metrics in seeds.items() if metrics and rows[first].get(seed)}
    first, *others = rows
    parts = ["Bits per byte where nothing else is said; mean over seeds ± their standard deviation.\n",
             table(rows, spread), job_table(rows)]
    others = {name: paired(rows[name]) for name in others if len(paired(rows[name])) > 1}
    if others:
        n = min(map(len, others.values()))
        clear = T975[min(n, len(T975) + 1) - 2]
        parts += [f"Difference from {first}, paired by seed: mean ± standard error over the runs, the held-out text "
                  f"being the same. With {n} seeds one of {clear} standard errors is clear (95%).\n",
                  table(others, difference)]
    return "\n".join(part for part in parts if part)


def along(budgets, name, m):  # -> {budget: mean over the seeds}, of the budgets that have one
    values = {steps: column(rows.get(name, {}), m).values() for steps, rows in sorted(budgets.items())}
    return {steps: statistics.fmean(some) for steps, some in values.items() if some}


def trends(budgets):  # {budget: {row: {seed: metrics}}} -> Markdown: a value at every budget; "" where there is but one
    names, steps = [*dict.fromkeys(name for rows in budgets.values() for name in rows)], sorted(budgets)
    columns = [["", *names]]
    for m, (heading, digits, better) in (METRICS | {"done": ("its job, as above", 3, True)}).items():
        means = [along(budgets, name, m) for name in names]
        if better is None or not any(means):
            continue
        said = [[f"{found[n]:.{digits}f}" if n in found else "-" for n in steps] for found in means]
        columns.append([heading, *(" ".join(words) if found else "" for words, found in zip(said, means))])
    if len(steps) < 2 or len(columns) < 2:
        return ""
    head, *lines = [f"| {' | '.join(row)} |" for row in zip(*columns)]
    return "\n".join([f"After {' '.join(map(str, steps))} steps, means over the seeds that finished:\n",
                      head, "|---" * len(columns) + "|", *lines, ""])


def picture(budgets, path):  # {budget: {row: {seed: metrics}}} -> path, or why there is none
    """A panel for each metric that has a better side, over the budget; a line for each row, dashed for what shares its
    panel with another metric. More than 8 bits a byte, which is worse than no model, would hide the rest: not drawn."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: pip install matplotlib, and the next run draws it"
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    names = [*dict.fromkeys(name for rows in budgets.values() for name in rows)]
    looks = [dict(color=f"C{i % 10}", marker="ov"[i // 10 % 2], ms=4, lw=1) for i in range(len(names))]
    panels = {}                                 # {metric: [(metric drawn, look, means)]}
    for m in [m for m in METRICS if METRICS[m][2] is not None]:
        for name, look in zip(names, looks):
            means = {steps: mean for steps, mean in along(budgets, name, m).items() if mean < 8}
            if means:
                panels.setdefault(DASHED.get(m, m), []).append((m, look, means))
    if not panels:
        return "no picture: nothing to draw"
    across, down = min(4, len(panels) + 1), len(panels) // 4 + 1                    # the last one holds the names
    figure, axes = plt.subplots(down, across, figsize=(4 * across, 3 * down), squeeze=False)
    for (panel, lines), axis in zip(panels.items(), axes.flat):
        for m, look, means in lines:
            axis.plot([*means], [*means.values()], "-" if m == panel else "--", **look)
        also = "".join(f"; dashed: {METRICS[m][0]}" for m in dict.fromkeys(m for m, *_ in lines) if m != panel)
        axis.set_title(f"{METRICS[panel][0]} ({'more' if METRICS[panel][2] else 'less'} is better{also})", fontsize=8)
        axis.set_xscale("log")
        axis.set_xticks([*budgets], [*budgets])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    key, *_ = rest = axes.flat[len(panels):]
    for name, look in zip(names, looks):
        key.plot([], [], label=name, **look)
    key.legend(ncols=2, loc="center", frameon=False)
    for axis in rest:
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return path


def check_folders(flags):
    """Fails where results cannot be kept, would be read as text, or the text can be read once alone."""
    if flags.data == "-" or flags.new_data == "-":
        fail("--data -: every run reads the text anew. Try a file")
    if os.path.isfile(flags.out_dir):
        fail(f"--out_dir {flags.out_dir}: is a file. Try another name")
    for folder in (flags.data, flags.new_data):
        inside = os.path.isdir(folder) and os.path.commonpath(map(os.path.realpath, (folder, flags.out_dir)))
        if inside == os.path.realpath(folder):
            fail(f"--out_dir {flags.out_dir}: lies inside the corpus {folder}. Try a folder outside it")


@process_as_it_was()
def main(argv=None):
    """Trains what is not finished, measures it, draws the tables. Ctrl-C saves the run in progress."""
    argv = sys.argv[1:] if argv is None else argv
    flags, rest = parse_beside("compare.py", __doc__, FLAGS, CELL, argv)
    setting = flags.sweep.partition("=")[0]
    if any(word.partition("=")[0] == f"--{setting}" for word in rest):
        fail(f"--{setting}: is what --sweep sets. Try without it")
    todo, replay = cells(flags, rest), setting == "replay"
    check_folders(flags)
    sources = open_corpus([flags.data, *([flags.new_data or CPP_HEADERS] if replay else [])])
    if len(sources[0]["val"]) < 1 << 12:
        fail(f"--data {flags.data}: has {len(sources[0]['val'])} bytes to validate on, the yardsticks want 4096. "
             "Try more text")
    for _, _, hp, _, _ in todo:
        cut = [source | {"train": source["train"][:hp.train_bytes or None]} for source in sources]
        check_sizes(cut, find_objective(hp)["n"], hp.block_size)
    shared = dict(sources=sources, text=sources[0]["val"], probe=probe_data(256) if flags.data == "stdlib" else None)
    found, finished, crc = {}, 0, [source["crc"] for source in sources]
    for i, (stem, row, hp, words, first) in enumerate(todo):
        metrics = result(words, first, crc, flags, shared)
        found.setdefault(stem, {}).setdefault(hp.max_iters, {}).setdefault(row, {})[hp.seed] = metrics
        finished += bool(metrics)
        said = f"loss {metrics['loss']:.4f}" if metrics else "diverged"
        print(f"[{i + 1}/{len(todo)}] {row}, {hp.max_iters} steps, seed {hp.seed}: {said}", flush=True)
    for stem, budgets in found.items():
        rows, path = budgets[max(budgets)], os.path.join(flags.out_dir, stem)
        if shared["probe"] and not flags.sweep:
            rows = rows | {"five raw bytes": {"-": understanding(byte_features, shared["probe"])}}
        text = "\n".join(part for part in (tables(rows), trends(budgets)) if part)
        with open(path + ".md", "w", encoding="utf-8") as f:
            f.write(text)
        print(f"\n{path}.md, {picture(budgets, path + '.png')}\n\n{text}")
    return 0 if finished else 1


if __name__ == "__main__":
    sys.exit(main())
