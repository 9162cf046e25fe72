"""Use a trained model for what it was trained to do. Without input it shows itself on held-out text.

    clm mtp hybrid     python sample.py --prompt "def main(" --num_samples 3
    prefix             python sample.py --prompt "import os, sys"
    mlm hybrid         python sample.py --prompt "import [MASK:2], sys" --order left
    mdlm sedd          python sample.py --prompt "class [MASK:40]:" --steps 20 --show
    span ul2           python sample.py --prompt "for i in ran<extra_id_0>(10): pri<extra_id_1>(i)"
    fim span ul2       python sample.py --prefix "def add(a, b):" --suffix "return c"
    bart               python sample.py --prompt "def main([MASK]) retu[MASK] 0"
    electra            python sample.py --prompt "a text with a typq in it"
    nsp                python sample.py --prefix "Once upon a time" --suffix "there was a king."
    contrastive        python sample.py --query "open a file" --corpus book.txt
    rotation           python sample.py --prompt "dog. The quick brown fox jumps over the lazy "
    with a likelihood  python sample.py --score book.txt

A text may be - (standard input) or FILE:path. In prompts nothing is special but [MASK], [MASK:4] (a hole of 4
bytes) and <extra_id_0> (a hole of any length).
"""
# N samples, n ids, T = block_size positions of the model, V vocabulary
import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)                # Ctrl-C just ends
import codecs
import itertools
import math
import os
import re
import time
from argparse import Namespace

# isort: off  data silences a warning of torch's, and so comes before it
from data import EOT, MASK, SEP, decode, document_ids, encode, fail, from_bytes, generator, map_file
from model import Cache, StaticCache
from objectives import IGNORE, N_BYTES, OBJECTIVES, find_objective, random_bytes
from run import DEVICE, SETTINGS, Captured, check, defaults, load_run, make_parser, newest_run, process_as_it_was
import torch
import torch.nn.functional as F

SCORE_ROWS = 64                                 # windows scored at once
BOUND_DRAWS = 16                                # strata of a bound
WRITING = 0.65                                  # temperature at which diffusion models write
ENDING = 0.15                                   # a hole of any length ends where that is at least so likely
JOINT = 16                                      # bytes by which a middle and what stands after it are joined
MASKS, HOLES = rb"\[MASK(?::(\d+))?\]", rb"<extra_id_\d+>"

FLAGS = {
    "what": {
        "out_dir": ("", "run folder or checkpoint file; without it the newest run under out/"),
        "objective": ("", "of a mixture, the member to use; without it the first"),
        "prompt": ("", "the text to continue, fill, repair or examine"),
        "prefix": ("", "the text before a hole; nsp: the first text"),
        "suffix": ("", "the text after a hole; nsp: the second text"),
        "query": ("", "contrastive: the text to look for"),
        "corpus": ("", "contrastive: file whose lines to embed, or to search for --query"),
        "score": ("", "file whose bits per byte to print"),
        "stride": (0, "with --score: bytes scored per window; 0 for half a block", 0, 1 << 24),
    },
    "how": {
        "max_new_tokens": (300, "bytes to write at most", 0, 1 << 40),
        "num_samples": (1, "samples; sample i draws from (seed, i)", 1, 1 << 16),
        "temperature": (0.8, "0: the likeliest byte, usual for holes and repairs; diffusion writes at .65", 0.0, 1e6),
        "top_k": (0, "keep the k most likely bytes, 0 for all", 0, 1 << 40),
        "top_p": (1.0, "keep the most likely bytes that hold this probability", 0.0, 1.0),
        "order": ("", "in which [MASK]s are filled: confident, left, ancestral or analytic, as the objective allows"),
        "steps": (0, "passes that fill [MASK]s; 0 for one a byte, in order ancestral or analytic 64", 0, 1 << 20),
        "show": (False, "play the filling of [MASK]s"),
        "speculate": (True, "mtp: its far heads draft what its first head verifies"),
        "compile": (False, "torch.compile the decoding step: slow to start, faster for long texts"),
        "seed": (1, "of the samples", 0, 2 ** 31),
    } | DEVICE,
}
COMMON = {"out_dir", "objective", "seed", "device", "dtype"}
DRAWING = {"num_samples", "temperature", "top_k", "top_p"}


# ---- drawing a byte

def distribution(logits, temperature=1.0, top_k=0, top_p=1.0):  # (..., V) -> (..., 256) float64
    """Probabilities of the bytes; no other id is ever drawn. At temperature 0 all on the most likely. top_k cuts
    before top_p, which counts what was there before the cut. In float64, since float32 loses tails (Zheng et al.
    2024), which mps does not have: there on the CPU."""
    logits = logits[..., :N_BYTES]
    logits = (logits.cpu() if logits.device.type == "mps" else logits).double()
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.size(-1)).double()
    # the difference first: 1 / temperature may overflow
    p = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    if top_k and top_k < p.size(-1) or top_p < 1:
        p, ids = p.sort(dim=-1, descending=True, stable=True)
        # nucleus (Holtzman et al. 2020): the mass before a byte decides, so the first stays
        before, p = p.cumsum(-1) - p, p.clone()
        p[..., top_k or p.size(-1):] = 0
        p[..., 1:] = p[..., 1:].where(before[..., 1:] < top_p, 0)
        p = torch.zeros_like(p).scatter(-1, ids, p)
    return p / p.sum(-1, keepdim=True)


def invert(p, u):  # p (..., M), u (...) in [0, 1) -> index (...): the inverse of the distribution function
    # the last sum may miss 1 by rounding: u is scaled to it, so no draw falls off the end
    cdf = p.cumsum(-1)
    return torch.searchsorted(cdf, (u * cdf[..., -1])[..., None], right=True)[..., 0].clamp(max=p.size(-1) - 1)


def uniforms(shape, gens):  # -> (N, *shape) float64: row i from generator i, whatever the others are
    return torch.stack([torch.rand(shape, generator=g, dtype=torch.double) for g in gens])


def pick(logits, gens, **how):  # (N, ..., V) -> bytes (N, ...)
    p = distribution(logits, **how)
    return invert(p, uniforms(logits.shape[1:-1], gens).to(p.device)).to(logits.device)


def pick_or_end(logits, gens, end, **how):  # (N, V) -> ids (N,): a byte of a hole, or the id that ends it
    """end as soon as it and EOT have a probability of ENDING together; neither is drawn."""
    over, text = logits.softmax(-1)[:, list({end, EOT})].sum(1) >= ENDING, logits.clone()
    text[:, EOT] = -torch.inf
    return pick(text, gens, **how).masked_fill(over, end)


def sample_generators(seed, n):
    return [generator(f"{seed},{i},sample") for i in range(n)]


# ---- continuing

@torch.inference_mode()
def generate(model, prompt, max_new_tokens, T, gens, prefix=0, end=None, positions=None, step=None, **how):
    """prompt (N, n) -> yields (N,): continues each row, an id a row at a time; a row that wrote EOT goes on
    with EOT. end: of a hole, for pick_or_end. positions: the entry's, of prefix rows. step: what fast_step returned,
    to take the steps after the prompt.

    prefix 0: causal; when the block is full, its last half is encoded anew. prefix P: the first P positions
    of the prompt are read in both directions; ends with the block, for which the prompt must leave room."""
    (N, n), device = prompt.shape, prompt.device
    assert n > 0 and (n <= T or not prefix), (n, T)
    ids, ended = prompt, torch.zeros(N, dtype=torch.bool, device=device)
    cache, byte = Cache(model, N, T) if step is None else step.cache, None
    start, fed = max(0, n - T), 0               # fed: ids from start on that the cache holds
    for _ in range(max_new_tokens):
        if ids.size(1) - start > T:             # the next T / 2 bytes are cheap again
            if prefix:
                return
            start, fed = ids.size(1) - T // 2, 0
        new, mask = ids[:, start + fed:], "causal"
        if not fed:                             # the prompt alone is read both ways
            cache.move(-cache.length)           # emptied, not replaced: a compiled step knows it by address
            mask = torch.full((N,), prefix, device=device) if prefix else mask
        if step is not None and fed:
            logits = step.run(byte[:, None])    # not a view of ids, whose strides grow
        else:
            at = positions(ids, torch.full((N,), prefix, device=device)) if positions else None
            h = model(new, mask, cache=cache, at=None if at is None else at[:, fed:])
            logits = model.logits(h[:, -1])
        fed += new.size(1)
        byte = pick(logits, gens, **how) if end is None else pick_or_end(logits, gens, end, **how)
        byte = byte.masked_fill(ended, EOT)
        ended |= byte == EOT
        ids = torch.cat((ids, byte[:, None]), dim=1)
        yield byte
        if ended.all():
            return


@torch.inference_mode()
def fast_step(model, N, T, tail=None, n=1):  # -> what has cache, n and run, or None where torch.compile cannot
    """One decoding step over a static cache for a block of T, compiled; on CUDA captured in a graph besides.

    run: ids (N, n) -> logits (N, V) of what follows; with a drafter's tail, for speculate, ids (1, n) -> logits
    (n, V) of what follows each, and the tails of their states."""
    if n > T:
        return None
    cache, device = StaticCache(model, N, T), model.embed.weight.device
    held = torch.zeros(N, n, dtype=torch.long, device=device)

    def step(ids):
        h = model(ids, "causal", cache=cache)
        return model.logits(h[:, -1]) if tail is None else (model.logits(h[0]), tail(h[0]))
    forward = torch.compile(step, fullgraph=True, dynamic=False)
    try:
        from torch._inductor import config  # here: it costs half a second to import
        with config.patch(freezing=device.type == "cpu"):       # weights as constants, laid out for their kernels
            forward(held)
    except Exception as e:                      # no compiler, an old one, an operating system without support
        why = f"{type(e).__name__}: {str(e).strip().splitlines()[0]}"
        print(f"--compile: does not work here ({why}), going on without it", file=sys.stderr)
        return None
    if device.type != "cuda":
        return Namespace(cache=cache, n=n, run=forward)
    replay = Captured(lambda: forward(held), warm=1)
    return Namespace(cache=cache, n=n, run=lambda ids: (held.copy_(ids), replay())[1])


@torch.inference_mode()
def speculate(model, drafter, prompt, max_new_tokens, T, g, tally=None, step=None, **how):  # ids -> yields ids
    """Self-speculative decoding: the drafter of the model's heads drafts, the model verifies the draft in one pass
    (Stern et al. 2018). At temperature 0 the text is that of generate, at others its distribution is. tally: a
    list that receives, a pass, (drafted, kept). step: what fast_step returned with the drafter's tail."""
    def draw(logits):  # (j, V) -> j ids, what they were drawn from (j, 256)
        q = distribution(logits, **how)
        return invert(q, torch.rand(len(q), generator=g, dtype=torch.double).to(q.device)).tolist(), q

    ids, drafts, q = list(prompt), [], None     # drafts: of what follows ids[-1]
    cache = Cache(model, 1, T) if step is None else step.cache
    start, fed, end = max(0, len(ids) - T), 0, len(prompt) + max_new_tokens
    while len(ids) < end:
        # 1. room: a full block's last half is encoded anew; draft no further than block and budget
        if len(ids) - start > T:
            start, fed = len(ids) - T // 2, 0
        if not fed:
            cache.move(-cache.length)
            drafter.restart()
        drafts = drafts[:min(T - (len(ids) - start), end - len(ids) - 1)]
        # 2. one pass over the draft: what follows ids[-1] and each draft
        new = torch.tensor([ids[start + fed:] + drafts], device=model.embed.weight.device)
        if step is not None and fed and new.size(1) == step.n:
            logits, tails = step.run(new)
        else:
            h = model(new, "causal", cache=cache)[0]
            logits, tails = model.logits(h[-len(drafts) - 1:]), drafter.tail(h)
        # 3. keep what the model would have said; forget the rest, whose keys will be written over
        out = verify(distribution(logits, **how), None if q is None else q[:len(drafts)], drafts, g)
        refused = len(drafts) + 1 - len(out)
        cache.move(-refused)
        fed += new.size(1) - refused
        if tally is not None:
            tally.append((len(drafts), len(out) - 1))
        for i in out:
            ids.append(i)
            yield i
            if i == EOT:
                return
        # 4. draft anew, from what was kept
        drafts, q = drafter.draft(tails[:new.size(1) - refused], ids[start:], draw)


def verify(p, q, drafts, g):  # p (n + 1, 256), q (n, 256), n ids -> the ids to write: the drafts kept, and one more
    """A draft d is kept with probability min(1, p(d) / q(d)); in place of the first refused one (p - q)+ is
    drawn from, after the last kept one p (Leviathan et al. 2023): each id is distributed as p."""
    n, kept = len(drafts), 0
    if n:
        d = torch.tensor(drafts, device=p.device)[:, None]
        u = torch.rand(n, 1, generator=g, dtype=torch.double).to(p.device)
        kept = int((u * q.gather(1, d) < p[:n].gather(1, d)).long().cumprod(0).sum())
    rest = p[kept] if kept == n else (p[kept] - q[kept]).clamp(min=0)
    rest = rest if rest.sum() > 0 else p[kept]  # by rounding alone
    return drafts[:kept] + [int(invert(rest, torch.rand((), generator=g, dtype=torch.double).to(p.device)))]


# ---- filling masked bytes

def fill_logits(model, ids, frame, doc_mask=False):  # (N, n) with MASKs -> (N, n, V): what each byte is
    """frame: (ids before, ids after, shift), as an entry's fills returns it."""
    before, after, shift = frame
    left, right = (ids.new_tensor(some).expand(len(ids), -1) for some in (before, after))
    row = torch.cat((left, ids, right), dim=1)
    h = model(row, "bidirectional", document_ids(row) if doc_mask else None)
    first = len(before) - shift
    return model.logits(h[:, first:first + ids.size(1)])


@torch.inference_mode()
def unmask(model, ids, gens, frame, steps=0, order="confident", doc_mask=False, **how):
    """ids (N, n) -> yields (N, n): fills MASKs in so many passes (0: one for each), leaving everything else.

    confident: where the model is surest (Ghazvininejad et al. 2019); left: from the left. ancestral: MDLM's
    sampler, which at time t on its way from 1 to 0 unmasks each with probability (t - s) / t, in 64 passes.
    analytic: SEDD's (its Tweedie denoiser), the same with the ratios c as the model gives them, untempered:
    (t - s) / t * sum of c; the last pass unmasks all."""
    ids = ids.clone()
    steps = steps or (64 if order in ("ancestral", "analytic") else int((ids == MASK).sum(1).max()))
    at = torch.arange(ids.size(1), device=ids.device)
    for i in range(steps):
        holes = ids == MASK
        if not holes.any():
            return
        logits = fill_logits(model, ids, frame, doc_mask)       # (N, n, V)
        new = pick(logits, gens, **how)
        if order in ("ancestral", "analytic"):  # t = 1 - i / steps, s = t - 1 / steps: (t - s) / t = 1 / (steps - i)
            share = torch.ones((), device=ids.device)
            if order == "analytic" and i < steps - 1:
                share = (logits[..., :N_BYTES].float() - math.log(N_BYTES)).exp().sum(-1)           # near 1
            now = uniforms(ids.shape[1:], gens).float().to(ids.device) * (steps - i) < share
        else:
            sure = logits[..., :N_BYTES].float().softmax(-1).amax(-1)               # (N, n)
            urgency = sure if order == "confident" else -at.float().expand(ids.shape)
            rank = urgency.masked_fill(~holes, -torch.inf).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
            now = rank < -(-holes.sum(1, keepdim=True) // (steps - i))              # an equal share of what is left
        ids = torch.where(holes & now, new, ids)
        yield ids


def fill(model, ids, *args, **kwargs):  # unmask, its last state alone
    return [ids, *unmask(model, ids, *args, **kwargs)][-1]


def fill_long(model, ids, T, gens, frame, seen=None, **how):  # (1, n) of any length, window by window -> (1, n)
    """A quarter of a window stands before its first hole. seen: is shown every state."""
    ids, n = ids.clone(), T - len(frame[0]) - len(frame[1])
    while (ids == MASK).any():
        first = int((ids[0] == MASK).byte().argmax())
        a = max(0, min(first - n // 4, ids.size(1) - n))
        for state in unmask(model, ids[:, a:a + n], gens, frame, **how):
            if seen:
                seen(state[0])
        ids[:, a:a + n] = state
    return ids


# ---- writing what belongs in holes

def infill(model, entry, ids, P, holes, max_new_tokens, T, gens, **how):  # -> bytes of each hole, did all end?
    """ids, P: what the entry's ask returned. Each answer is written up to the id that ends it, which leads to the next.
    None reaches the last target of a full row, where training has EOT whatever was said."""
    spans, x = [[] for _ in range(holes)], torch.tensor([ids], device=model.embed.weight.device)
    for k, span in enumerate(spans):
        end, left = entry["ends"](k), min(max_new_tokens - sum(map(len, spans)), T - x.size(1))
        steps = generate(model, x, left, T, gens, P, end, entry["positions"], **how) if left > 0 else []
        for i in steps:
            if int(i) == end:
                break
            span.append(int(i))
        else:
            return spans, False
        x = torch.cat((x, x.new_tensor([span + [end]])), dim=1)
    return spans, True


@torch.inference_mode()
def join(model, entry, hp, left, middle, right):  # ids each -> the middle, cut where the right follows
    """For a model that codes text from left to right too and seldom says where a middle ends: of all cuts the first
    after which the right's first bytes are at least a tenth as likely as after the best. A later one may be as
    good since the middle holds the right already."""
    layout, right = entry["continues"](hp), right[:JOINT]
    if not right or not layout or layout[0] != "causal":
        return middle
    nats, n = [], len(right)
    for k in range(len(middle) + 1):
        x = tensor(([EOT] + left + middle[:k])[n - hp.block_size:] + right, hp)
        logits = model.logits(model(x[:, :-1], "causal")[0, -n:])                   # (n, V)
        nats.append(float(F.cross_entropy(logits, x[0, -n:], reduction="sum")))
    return middle[:next(k for k, each in enumerate(nats) if each < min(nats) + math.log(10))]


# ---- scoring

@torch.inference_mode()
def score(model, data, T, stride, doc_mask=False):  # data (n,) uint8 -> bits of the whole text, left to right
    """Window i codes bytes i * stride + 1 .. (i + 1) * stride from at most T bytes of context; with stride =
    T the windows are disjoint and cold. The first byte of all, which has no context, counts 8 bits. doc_mask:
    as in training."""
    n, bits = len(data), 8.0
    # of each: first, first scored, end
    windows = ((max(0, at + stride - T), at, min(at + stride, n - 1)) for at in range(0, n - 1, stride))
    for rows in batches(windows, lambda w: w[2] - w[0]):
        x = torch.stack([data[a:end + 1] for a, _, end in rows])                    # (rows, n + 1)
        x = x.long().to(model.embed.weight.device)
        logits = model.logits(model(x[:, :-1], "causal", document_ids(x[:, :-1]) if doc_mask else None))
        nats = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="none").view(len(rows), -1)
        bits += sum(float(row[at - a:].double().sum()) for row, (a, at, _) in zip(nats.cpu(), rows)) / math.log(2)
    return bits


def batches(rows, length):  # -> lists of at most SCORE_ROWS rows that follow each other and are of one length
    for _, group in itertools.groupby(rows, length):
        while some := list(itertools.islice(group, SCORE_ROWS)):
            yield some


@torch.inference_mode()
def score_bound(model, entry, data, hp, seed):  # data (n,) uint8 -> bits at most, standard error
    """The entry's bound in cold windows of a block, each with numbers of masked bytes from BOUND_DRAWS
    strata. The error is that of neighbouring strata's differences: each stratum gives one draw."""
    g, bits, variance = generator(f"{seed},bound"), 0.0, 0.0
    for x in data.split(entry["n"]):
        batch = entry["make"](x.long().expand(BOUND_DRAWS, -1), g, hp)
        order = (batch["tgt"] != IGNORE).sum(1).argsort()       # by stratum
        batch = {k: v if isinstance(v, str) else v.to(model.embed.weight.device) for k, v in batch.items()}
        batch |= {"doc": document_ids(batch["inp"])} if hp.doc_mask else {}
        each = entry["bounds"](model, batch, hp).cpu().double()[order] / math.log(2)                # (draws,)
        bits += float(each.mean())
        variance += float((each[::2] - each[1::2]).square().sum()) / BOUND_DRAWS ** 2
    return bits, variance ** 0.5


@torch.inference_mode()
def score_pseudo(model, data, T, frame, doc_mask=False):  # data (n,) uint8 -> bits
    """Pseudo-log-likelihood (Salazar et al. 2020): no code length, since every byte is given all the others
    of its window."""
    bits = 0.0
    for x in data.split(T - len(frame[0]) - len(frame[1])):
        x = x.long().to(model.embed.weight.device)
        for at in torch.arange(len(x), device=x.device).split(SCORE_ROWS):
            rows = x.repeat(len(at), 1).scatter(1, at[:, None], MASK)
            logits = fill_logits(model, rows, frame, doc_mask)[torch.arange(len(at), device=x.device), at]
            bits += float(F.cross_entropy(logits, x[at], reduction="sum")) / math.log(2)
    return bits


# ---- texts, in and out

def read_text(flag, path):  # a file, or - for standard input -> bytes
    """Fails where it cannot be read."""
    if path == "-":
        if sys.stdin is None or sys.stdin.isatty():
            fail(f"--{flag} -: standard input is a terminal. Try: cat text.txt | python sample.py --{flag} -")
        return sys.stdin.buffer.read()
    try:
        with open(path, "rb") as f:
            return f.read()
    except (OSError, ValueError) as e:          # a path with a NUL in it
        fail(f"--{flag} {path}: cannot be read ({e}). Try a path to text")


def given_text(flag, value):  # what a flag was given -> ids, or None
    if value is None:
        return None
    if value != "-" and not value.startswith("FILE:"):
        return encode(value)
    return list(read_text(flag, value.removeprefix("FILE:")))


def needed(ids, flag):  # -> the same ids, of which there must be some
    return ids or fail(f"--{flag}: is {'missing' if ids is None else 'empty'}. Try some text")


def masked(ids):  # ids of a prompt -> ids with MASK for each byte of a hole
    first, *rest = re.split(MASKS, bytes(ids))  # text, digits of a hole or None, text, ...
    out = list(first)
    for digits, text in zip(rest[::2], rest[1::2]):
        length = int((digits or b"1")[:8])
        if not 0 < length < 10 ** 6:
            fail(f"--prompt: [MASK:{digits.decode()}]: a hole holds 1 to 999999 bytes. Try [MASK:4]")
        out += [MASK] * length + list(text)
    return out


def visible(text):  # on a terminal control characters are shown, not obeyed; a pipe gets what was written
    if not sys.stdout.isatty():
        return text
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda c: f"\\x{ord(c[0]):02x}", text)


def shown(ids):  # -> text, without the ends of documents
    return visible(decode(i for i in ids if int(i) != EOT))


def with_holes(ids):  # -> text in which a masked byte is a block
    return shown(ids).replace("<MASK>", "█")


def marked(parts, plain=("", "")):  # [(ids, is new)] -> text, on a terminal with the new parts in reverse
    tint = ("\033[7m", "\033[0m") if sys.stdout.isatty() else plain
    return "".join(tint[0] + shown(ids) + tint[1] if new and ids else shown(ids) for ids, new in parts)


def runs(ids, flags):  # n ids, n bools -> [(ids, flag)]: characters of several bytes stay in one piece
    groups = itertools.groupby(zip(ids, flags), lambda pair: pair[1])
    return [([i for i, _ in group], flag) for flag, group in groups]


def stream(prompt, steps):  # ids, what yields more -> the ids that it yielded
    """Prints bytes as they come, holding back a character that is not complete yet."""
    ids, decoder = [], codecs.getincrementaldecoder("utf-8")("replace")
    for i in map(int, itertools.chain(prompt, steps)):
        ids.append(i)
        print(visible(decoder.decode(bytes([i] if i != EOT else []))), end="", flush=True)
    print(decoder.decode(b"", final=True), flush=True)
    return ids[len(prompt):]


def show_frame(ids):
    terminal = sys.stdout.isatty()
    print(f"\033[2J\033[H{with_holes(ids)}" if terminal else f"--- pass\n{with_holes(ids)}", flush=True)
    time.sleep(0.05 if terminal else 0)


def each_sample(flags):  # -> yields a list of one generator for each sample, after a heading where there are several
    for i, g in enumerate(sample_generators(flags.seed, flags.num_samples)):
        if flags.num_samples > 1:
            print(f"--- sample {i + 1}")
        yield [g]


def tensor(ids, hp):  # list or (n,) of any integers -> (1, n) long on the model's device
    return torch.as_tensor(ids).long().to(hp.device)[None]


def drawing(flags, usual=None):  # how bytes are drawn; usual: the temperature, unless a flag asks for another
    asked = {"temperature"} if usual == WRITING else DRAWING    # at less samples are alike, and top_k idle
    temperature = flags.temperature if usual is None or asked & flags.given else usual
    return dict(temperature=temperature, top_k=flags.top_k, top_p=flags.top_p)


# ---- modes: (model, entry, hp, flags, held-out bytes) -> prints
# a flag is None where it was not given; without a text a mode demonstrates itself on the held-out bytes

def continue_mode(model, entry, hp, flags, held_out):
    """Goes on with a prompt, laid out as the entry's continues says."""
    layout = entry["continues"](hp) or fail(f"--out_dir: {entry['name']} does not say how a text goes on")
    (mask, before, after), T, prompt = layout, hp.block_size, flags.prompt
    if prompt is None:
        prompt = held_out[:T // 2].tolist()
        print(f"held-out text, its first {len(prompt)} bytes as the prompt, its next bytes for comparison:")
        print(f"{shown(held_out[:T].tolist())}\n--- the model's continuation:")
    prompt = prompt or [EOT]                    # an empty prompt is the start of a document
    if mask == "prefix":                        # one block holds the prompt and what is written, half of it at most
        room = max(1, T - len(before) - len(after) - min(flags.max_new_tokens, T // 2))
        if len(prompt) > room:
            print(f"--- the last {room} of {len(prompt)} bytes of the prompt, which leave room in the block")
        prompt = prompt[-room:]
    drafter = flags.speculate and entry["drafter"] and entry["drafter"](model, hp)
    if drafter:
        return speculate_mode(model, drafter, hp, flags, prompt)
    ids = tensor(before + prompt + after, hp).expand(flags.num_samples, -1)
    prefix = ids.size(1) if mask == "prefix" else 0
    step = fast_step(model, flags.num_samples, T) if flags.compile else None
    gens = sample_generators(flags.seed, flags.num_samples)
    steps = generate(model, ids, flags.max_new_tokens, T, gens, prefix, step=step, **drawing(flags))
    if flags.num_samples > 1:
        rows = [byte.tolist() for byte in steps]
        for i, _ in enumerate(each_sample(flags)):
            print(shown(prompt + [row[i] for row in rows]))
        return
    written = stream(prompt, steps)
    if prefix and len(written) < flags.max_new_tokens and written[-1] != EOT:
        print(f"--- the block of {T} is full", file=sys.stderr)


def speculate_mode(model, drafter, hp, flags, prompt):
    """Writes, then says on standard error how many drafts were kept."""
    T, k, tally, n = hp.block_size, drafter.k, [], 0
    step = fast_step(model, 1, T, drafter.tail, k + 1) if flags.compile else None
    for [g] in each_sample(flags):
        steps = speculate(model, drafter, prompt, flags.max_new_tokens, T, g, tally, step, **drawing(flags))
        n += len(stream(prompt, steps))
    each = []                                   # of the passes that drafted so far: the share that kept it
    for j in range(1, k + 1):
        asked = [kept >= j for drafted, kept in tally if drafted >= j]
        each.append(f"{sum(asked) / max(1, len(asked)):.0%}")
    print(f"--- {n / max(1, len(tally)):.2f} bytes a pass; drafts kept: {' '.join(each)}", file=sys.stderr)


def fill_mode(model, entry, hp, flags, held_out):
    """Fills masked bytes; a model whose MASKs may be anywhere also goes on with a prompt in the same
    block."""
    frame, T = entry["fills"](hp), hp.block_size
    order = flags.order or entry["orders"][0]
    if order not in entry["orders"]:
        fail(f"--order {order}: unknown to {entry['name']}. Try {' or '.join(entry['orders'])}")
    if flags.prompt is None:
        clean = held_out[:T - len(frame[0]) - len(frame[1])].long()
        asked = torch.rand(len(clean), generator=generator("demonstration")) < 0.15
        asked[-1] |= ~asked.any()               # at least one
        ids = clean.masked_fill(asked, MASK).tolist()
        print(f"clean:\n{shown(clean)}\n--- {ids.count(MASK)} bytes masked:\n{with_holes(ids)}")
    else:
        ids = masked(flags.prompt)
    writes = MASK not in ids                    # all of it is new
    if writes and entry["bpb"] != "bound":
        fail("--prompt: has no hole. Try one with [MASK] or [MASK:4] in it")
    if writes:
        if len(ids) > T // 2:
            print(f"--- the last {T // 2} of {len(ids)} bytes of the prompt, which leave room in the block")
        ids = ids[-(T // 2):]
        ids += [MASK] * max(0, min(flags.max_new_tokens, T - len(ids)))
    how = dict(steps=flags.steps, order=order, doc_mask=hp.doc_mask, seen=show_frame if flags.show else None)
    how |= drawing(flags, WRITING if writes else 0.0)
    for gens in each_sample(flags):
        out = fill_long(model, tensor(ids, hp), T, gens, frame, **how)[0].tolist()
        if flags.prompt is None:
            right = int((torch.tensor(out) == clean)[asked].sum())
            print(f"--- filled, {right} of {ids.count(MASK)} masked bytes as in the original:\n{shown(out)}")
        else:
            print(marked(runs(out, [i == MASK for i in ids])))


def infill_mode(model, entry, hp, flags, held_out):
    """Writes what belongs in the holes of a prompt, or between --prefix and --suffix."""
    T, sides = hp.block_size, [flags.prefix, flags.suffix]
    if flags.prompt is not None:
        if sides != [None, None]:
            fail("--prompt: holds what is around its holes. Try it without --prefix and --suffix")
        pieces = [list(piece) for piece in re.split(HOLES, bytes(flags.prompt))]
    elif sides != [None, None]:
        pieces = [side or [] for side in sides]
    else:
        text = held_out[:T // 2].tolist()
        pieces = [text[:len(text) // 2], text[len(text) // 2 + 4:]]
        print(f"clean:\n{shown(text)}\n--- with a hole:\n{shown(pieces[0])}[..]{shown(pieces[1])}\n--- filled:")
    holes = len(pieces) - 1
    if not 1 <= holes <= entry["holes"]:
        fail(f"--prompt: has {holes} holes, {entry['name']} fills 1 to {entry['holes']}. Try one <extra_id_0>")
    near = pieces
    if holes == 1:                              # of a long text the model sees what is nearest to the hole
        room = max(2, T - 8 - min(flags.max_new_tokens, T // 3))
        keep = max(room // 2, room - len(pieces[1]))
        near = [pieces[0][-keep:], pieces[1][:room - min(len(pieces[0]), keep)]]
    ids, P = entry["ask"](near, 4, hp) or fail(f"--out_dir: {entry['name']} does not say how a hole is asked")
    if len(ids) + holes > T:
        fail(f"--prompt: {len(ids)} positions with its holes leave no room in a block of {T}. Try a shorter text")
    for gens in each_sample(flags):
        spans, whole = infill(model, entry, ids, P, holes, flags.max_new_tokens, T, gens, **drawing(flags, 0.0))
        note = "" if whole else "\n--- did not end by itself"
        kept = join(model, entry, hp, near[0], spans[0], near[1]) if holes == 1 else spans[0]
        if len(kept) < len(spans[0]):
            spans, note = [kept], "\n--- cut where the rest follows best"
        parts = [(pieces[0], False)]
        for span, piece in zip(spans, pieces[1:]):
            parts += [(span, True), (piece, False)]
        print(marked(parts) + note)


def repair_mode(model, entry, hp, flags, held_out):
    """Writes the target of a source, row after row of a long text; [MASK] may stand in it."""
    T, n, noisy = hp.block_size, entry["n"], flags.prompt
    if noisy is None:
        x = tensor(held_out[:n], hp)
        if x.size(1) < n:
            fail("the checkpoint's held-out text is shorter than a row. Try --prompt")
        batch = entry["make"](x.cpu(), generator("demonstration"), hp)
        noisy = batch["inp"][0, :int(batch["mask"][0]) - 1].tolist()
        print(f"clean:\n{shown(x[0])}\n--- noisy:\n{with_holes(noisy)}\n--- repaired:")
    else:
        noisy = masked(noisy)
    for gens in each_sample(flags):
        out, most = [], flags.max_new_tokens if "max_new_tokens" in flags.given else math.inf
        for a in range(0, len(noisy), n):
            ids = tensor(noisy[a:a + n] + [SEP], hp)
            left = min(most - len(out), T + 1 - ids.size(1))
            how = drawing(flags, 0.0)
            steps = generate(model, ids, left, T, gens, ids.size(1), positions=entry["positions"], **how)
            out += [int(b) for b in steps if int(b) != EOT]
        print(shown(out) + (f"\n--- stopped after {most} bytes" if len(out) >= most else ""))


def mark_mode(model, entry, hp, flags, held_out):
    """Marks the bytes that answer(model, x (1, n)) -> log-odds (1, n) finds suspicious; lists the
    likeliest."""
    if flags.prompt is None:
        g, clean = generator("demonstration"), tensor(held_out[:hp.block_size], hp)[0]
        bad = torch.rand(clean.shape, generator=g).to(hp.device) < 0.05
        x = torch.where(bad, random_bytes(clean.shape, g).to(hp.device), clean)
        bad = x != clean
        print(f"clean:\n{shown(clean)}\n--- {int(bad.sum())} bytes replaced at random:\n{shown(x)}")
        print("--- marked where the model thinks so:")
    else:
        x = tensor(needed(flags.prompt, "prompt"), hp)[0]
    p = torch.cat([entry["answer"](model, part[None])[0] for part in x.split(hp.block_size)]).sigmoid()
    found = p > 0.5
    print(marked(runs(x.tolist(), found.tolist()), ("«", "»")))
    for i in p.argsort(descending=True)[:10].tolist():
        print(f"  byte {i:4d}  {shown([int(x[i])])!r:6s} replaced with probability {float(p[i]):.2f}")
    if flags.prompt is None:
        hits = int((found & bad).sum())
        print(f"--- {hits} of {int(bad.sum())} replaced bytes found, {hits} of {int(found.sum())} marks right")


def follow_mode(model, entry, hp, flags, held_out):
    """Prints the probability that --suffix follows --prefix, by answer(model, ids, ids, hp) ->
    log-odds."""
    if flags.prefix is not None or flags.suffix is not None:
        first, second = needed(flags.prefix, "prefix"), needed(flags.suffix, "suffix")
        p = float(entry["answer"](model, first, second, hp).sigmoid())
        print(f"the second text follows the first with probability {p:.3f}")
        return
    n = min(len(held_out) // 2, hp.block_size // 2)
    first, true, other = (held_out[a:a + n].tolist() for a in (0, n, len(held_out) - n))
    print(f"first text:\n{shown(first)}")
    for title, second in (("its continuation", true), ("a later passage", other)):
        p = float(entry["answer"](model, first, second, hp).sigmoid())
        print(f"--- {title}, which follows with probability {p:.3f}:\n{shown(second)}")


def embeddings(model, entry, texts, T):  # list of ids -> (N, C) float32 of length 1
    """By answer(model, x (B, n)) -> (B, C). Of a long text the mean over its blocks, weighed by
    length."""
    blocks = [(i, text[a:a + T] or [EOT]) for i, text in enumerate(texts) for a in range(0, max(1, len(text)), T)]
    blocks.sort(key=lambda b: len(b[1]))        # those of one length can share a batch
    out = torch.zeros(len(texts), model.sizes.n_embd)
    for some in batches(blocks, lambda b: len(b[1])):
        owner, rows = zip(*some)
        e = entry["answer"](model, torch.tensor(rows, device=model.embed.weight.device)).cpu()
        out.index_add_(0, torch.tensor(owner), len(rows[0]) * e)
    return F.normalize(out, dim=1)


def search_mode(model, entry, hp, flags, held_out):
    """Prints the three passages nearest to --query, of the lines of --corpus; without a query the lines' embeddings."""
    T = hp.block_size
    if flags.corpus is None:
        texts = {f"passage {i}": p.tolist() for i, p in enumerate(held_out.split(T // 2), 1)}
    else:
        found = enumerate(read_text("corpus", flags.corpus).splitlines(), 1)
        texts = needed({f"line {i}": list(line) for i, line in found if line.strip()}, "corpus")
    titles, vectors = [*texts], embeddings(model, entry, [*texts.values()], T)       # (N, C)
    if flags.query is None and flags.corpus is not None:
        for title, e in zip(titles, vectors.tolist()):
            print(" ".join(f"{v:.5f}" for v in e), title, sep="\t")
        return
    query = held_out[T // 4:T // 4 + T // 2].tolist() if flags.query is None else needed(flags.query, "query")
    near = vectors @ embeddings(model, entry, [query], T)[0]
    print(f"query:\n{shown(query)}")
    for i in near.argsort(descending=True)[:3].tolist():
        print(f"--- similarity {float(near[i]):.3f}, {titles[i]}:\n{shown(texts[titles[i]][:T])}")


def seam_mode(model, entry, hp, flags, held_out):
    """Rolls a text back to where its first byte most likely is, by answer(model, x (1, n)) -> scores
    (1, n)."""
    T, turn = hp.block_size, hp.block_size // 3
    ids = held_out[:T].roll(turn).tolist() if flags.prompt is None else needed(flags.prompt, "prompt")
    if len(ids) > T:
        print(f"--- the first {T} of {len(ids)} bytes, which fill the block")
        ids = ids[:T]
    p = entry["answer"](model, tensor(ids, hp))[0].softmax(0)
    at = int(p.argmax())
    truth = f", the right one is {turn % len(ids)}" if flags.prompt is None else ""
    print(f"rotated:\n{shown(ids)}\n--- rolled back at byte {at} (probability {float(p[at]):.2f}{truth}):")
    print(shown(ids[at:] + ids[:at]))


def score_mode(model, entry, hp, flags, held_out):
    """Bits per byte of a file: exact, a bound, or a pseudo-likelihood, and says which. Fails for objectives
    without any."""
    from train import compressors  # here: scoring alone wants it
    name, T, frame = entry["name"], hp.block_size, entry["fills"](hp)
    try:
        data = from_bytes(read_text("score", "-")) if flags.score == "-" else map_file(flags.score, "--score")
    except RuntimeError as e:
        fail(f"--score {flags.score}: cannot be read ({str(e).splitlines()[0]}). Try another file")
    exact = entry["bpb"] in ("loss", "causal") and entry["continues"](hp) is not None
    stride = flags.stride or max(1, T // 2)
    if flags.stride and not exact:
        fail(f"--stride: {name} scores windows of the block as a whole. Try without it")
    if stride > T:
        fail(f"--stride {stride}: is more than the block of {T}. Try --stride {T}")
    if not exact and not entry["bounds"] and not frame:
        those = " ".join(n for n, e in OBJECTIVES.items() if n != name and (e["bpb"] or e["fills"](hp)))
        fail(f"--score: {name} defines no probability of a text. Try a run trained as {those}")
    if not len(data):
        fail(f"--score {flags.score}: is empty. Try some text")

    def say(bits, note):
        bits /= len(data)
        figures = f"{bits:.4f} bits per byte ({bits * math.log(2):.4f} nats), {len(data):,} bytes"
        print(f"{flags.score}: {figures}, {note}", flush=True)
    if exact:
        say(score(model, data, T, stride, hp.doc_mask), f"windows of {T}, stride {stride}")
    if entry["bounds"]:
        bits, error = score_bound(model, entry, data, hp, flags.seed)
        say(bits, f"{name}'s bound from above, standard error {error / len(data):.4f}, cold windows of {entry['n']}")
    elif frame:
        bits = score_pseudo(model, data, T, frame, hp.doc_mask)
        say(bits, f"pseudo: every byte given all others of its window of {T - len(frame[0]) - len(frame[1])}")
    print(f"beside it: {compressors(data)}")


# ---- which mode, and the flags it reads beside COMMON

MODES = {
    "continue": (continue_mode, {"prompt", "max_new_tokens", "compile"} | DRAWING),
    "fill": (fill_mode, {"prompt", "order", "steps", "show"} | DRAWING),
    "infill": (infill_mode, {"prompt", "prefix", "suffix", "max_new_tokens"} | DRAWING),
    "repair": (repair_mode, {"prompt", "max_new_tokens"} | DRAWING),
    "mark": (mark_mode, {"prompt"}),
    "follow": (follow_mode, {"prefix", "suffix"}),
    "search": (search_mode, {"query", "corpus"}),
    "seam": (seam_mode, {"prompt"}),
}


def choose_mode(entry, hp, flags):  # -> mode, the flags it reads
    """A prompt without a hole is continued, where the objective can; any, where its settings never trained holes."""
    if flags.score is not None:
        return score_mode, {"score", "stride"}
    name, prompt = entry["mode"], flags.prompt
    holes = prompt is not None and re.search(MASKS if name == "fill" else HOLES, bytes(prompt))
    if name in ("fill", "infill") and entry["continues"](hp):
        trained = entry["fills"](hp) if name == "fill" else entry["ask"]([[1], [1]], 4, hp)
        if not trained or prompt is not None and not holes:
            name = "continue"
    mode, read = MODES[name]
    if name == "continue" and entry["drafter"]:
        read = read | {"speculate"}
    if name == "fill" and entry["bpb"] == "bound" and prompt is not None and not holes:
        read = read | {"max_new_tokens"}
    return mode, read


def parse(argv):  # -> Namespace of every flag; texts as ids, None where they were not given
    specs = {flag: spec for flags in FLAGS.values() for flag, spec in flags.items()}
    given = vars(make_parser("sample.py", __doc__, FLAGS).parse_args(argv))
    check({flag: spec[0] for flag, spec in specs.items()} | given, specs)
    flags = {flag: None if spec[0] == "" else spec[0] for flag, spec in specs.items()} | given
    texts = {flag: given_text(flag, flags[flag]) for flag in ("prompt", "prefix", "suffix", "query")}
    return Namespace(**flags | texts, given=set(given))


def say_how_far(entry, hp, step, path):  # on standard error, of a model that is not yet what its size can be
    steps, what = entry["reaches"] or (0, "")
    usual = defaults() | entry["defaults"]
    known = {*SETTINGS["model"], *SETTINGS["training"], *entry["settings"], "data", "train_bytes"}
    known -= {"max_iters", "max_passes"}
    told = hp.objective == entry["name"] and all(getattr(hp, flag) == usual[flag] for flag in known)
    if told and step < steps:
        print(f"--- {step:,} steps; after {steps:,} of the standard library {entry['name']} {what}. Go on with: "
              f"python train.py --resume --out_dir {path} --max_iters {steps}", file=sys.stderr)


@process_as_it_was()
def main(argv=None):
    """Fails where something was asked that cannot be."""
    flags = parse(sys.argv[1:] if argv is None else argv)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    path = flags.out_dir or newest_run()
    exact = flags.score is not None and flags.dtype == "auto"           # a score is worth the slower float32
    model, hp, ckpt = load_run(path, flags.device, "float32" if exact else flags.dtype)
    members = {m["name"]: m for _, m in find_objective(hp)["members"]}
    name = flags.objective or next(iter(members))
    if name not in members:
        fail(f"--objective {name}: {path} was trained as {hp.objective}. Try --objective {next(iter(members))}")
    mode, read = choose_mode(members[name], hp, flags)
    for flag in sorted(flags.given - read - COMMON):        # its silence would look like an effect
        users = [n for n, e in OBJECTIVES.items() if flag in MODES[e["mode"]][1] and n != name]
        hint = "with --score" if flag == "stride" else f"with {' '.join(users)}" if users else "without it"
        fail(f"--{flag}: not used by {name} here. Try {hint}")
    mode(model, members[name], hp, flags, ckpt["held_out"])
    say_how_far(members[name], hp, ckpt["step"], path)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:                     # as of | head; Python would complain once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
