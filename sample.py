"""Use a trained model for what it was trained to do. Without input it shows itself on held-out text.

    clm mtp hybrid     python sample.py --prompt "def main(" --num_samples 3
    prefix             python sample.py --prompt "import os, sys"
    mtp                python sample.py --prompt "for i in " --speculate
    mlm hybrid         python sample.py --prompt "import [MASK:2], sys" --order left
    mdlm               python sample.py --prompt "class [MASK:40]:" --steps 20 --show
    span ul2           python sample.py --prompt "for i in <extra_id_0>: print(<extra_id_1>)"
    fim                python sample.py --prefix "def add(a, b):" --suffix "return c"
    bart               python sample.py --prompt "a noizy tex"
    electra            python sample.py --prompt "a text with a typq in it"
    nsp                python sample.py --prefix "Once upon a time" --suffix "there was a king."
    contrastive        python sample.py --query "open a file" --corpus book.txt
    rotation           python sample.py --prompt "dog. The quick brown fox jumps over the lazy "
    with a likelihood  python sample.py --score book.txt
"""
# N samples, n ids so far, T = block_size positions of the model, V vocabulary
import argparse
import codecs
import itertools
import math
import os
import re
import sys
import time

import torch
import torch.nn.functional as F

from data import CLS, EOT, MASK, MID, MODE_R, MODE_S, MODE_X, N_SENTINELS, PRE, SENTINEL, SEP, SUF
from data import decode, document_ids, encode, fail, generator, map_file
from model import new_cache, pack_weights
from objectives import GAP, N_BYTES, OBJECTIVES, embed, far_states, mdlm, mdlm_bounds, random_bytes
from train import Parser, aside, build, capture, compressors, load_checkpoint, members, newest_run, restore
from train import pick_device, pick_dtype, set_precision

SCORE_ROWS = 64                                 # windows scored at once
LOOK = 16                                       # on CUDA the host asks only so often whether all rows have ended

FLAGS = {
    "out_dir": ("", "run folder or checkpoint file; without it the newest run under out/"),
    "objective": ("", "of a mixture, the member to use; without it the first"),
    "prompt": ("", "the text to continue, fill, repair or examine"),
    "prefix": ("", "fim: the text before; nsp: the first text"),
    "suffix": ("", "fim: the text behind; nsp: the second text (of a long one the first "
                   f"{GAP} bytes are skipped, as in training)"),
    "spm": (False, "fim: give the suffix first"),
    "hole": ("", "marker of a hole, in place of <extra_id_0> or, for bytes one by one, [MASK] and [MASK:4]"),
    "mode": ("", "ul2: R (short holes), X (long holes) or S (continue); without it R where there is a hole, else S"),
    "order": ("", "mlm, hybrid: confident, left or parallel [confident]; mdlm: ancestral or confident [ancestral]"),
    "steps": (0, "mlm, hybrid, mdlm: passes in which the holes of a block are filled; 0 for one a byte (mdlm: at most "
              "64)", 0, 1 << 20),
    "show": (False, "mdlm: play the unmasking"),
    "speculate": (True, "mtp: heads 2, 3, ... draft, head 1 verifies; of itself for one sample at a temperature above "
                        "0 (in bfloat16 drafts break near-ties differently at 0). Given, it is compared with plain "
                        "decoding"),
    "query": ("", "contrastive: the text to look for"),
    "corpus": ("", "contrastive: file whose lines, or folder whose files, are embedded, or searched for --query"),
    "score": ("", "file whose bits per byte to print"),
    "stride": (0, "with --score: bytes scored per window, block_size for disjoint cold windows; 0 for half a block",
               0, 1 << 24),
    "compile": (False, "torch.compile the decoding step: slow to start, faster for long texts"),
    "max_new_tokens": (300, "bytes to write at most", 0, 1 << 40),
    "num_samples": (1, "samples; sample i draws from (seed, i)", 1, 1 << 16),
    "temperature": (0.8, "0 takes the most likely byte", 0.0, 1e6),
    "top_k": (0, "keep the k most likely bytes, 0 for all", 0, 1 << 40),
    "top_p": (1.0, "keep the most likely bytes that hold this probability", 0.0, 1.0),
    "seed": (1, "of the samples", 0, 2 ** 31),
    "device": ("auto", "auto, cpu, cuda, cuda:1, mps"),
    "dtype": ("auto", "of activations and weights: auto, float32 (exact to rounding), bfloat16"),
}
COMMON = {"out_dir", "objective", "seed", "device", "dtype"}
DRAWING = {"num_samples", "temperature", "top_k", "top_p"}


# ---- drawing a byte

def distribution(logits, temperature=1.0, top_k=0, top_p=1.0, extra=()):  # (..., V) -> (..., 256 + len(extra)) float64
    """Probabilities of the bytes, then of the extra ids allowed, such as a sentinel where holes are filled; nothing
    else is ever written. At temperature 0 all on the most likely. top_k cuts before top_p, which counts what was there
    before the cut. In float64, since float32 loses tails (Zheng et al. 2024), which mps does not have: there on the
    CPU."""
    logits = torch.cat((logits[..., :N_BYTES], logits[..., list(extra)]), dim=-1)
    logits = (logits.cpu() if logits.device.type == "mps" else logits).double()
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.size(-1)).double()
    # the difference first: 1 / temperature may overflow
    p = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    # nucleus (Holtzman et al. 2020): the mass in front of a byte decides, so the first stays
    if top_k and top_k < p.size(-1) or top_p < 1:
        p, ids = p.sort(dim=-1, descending=True, stable=True)
        before, p = p.cumsum(-1) - p, p.clone()
        p[..., top_k or p.size(-1):] = 0
        p[..., 1:] = p[..., 1:].where(before[..., 1:] < top_p, 0)                   # the first always stays
        p = torch.zeros_like(p).scatter(-1, ids, p)
    return p / p.sum(-1, keepdim=True)


def invert(p, u):  # p (..., M), u (...) in [0, 1) -> index (...): the inverse of the distribution function
    # the last sum may miss 1 by rounding: u is scaled to it, so no draw falls off the end
    cdf = p.cumsum(-1)
    return torch.searchsorted(cdf, (u * cdf[..., -1])[..., None], right=True)[..., 0].clamp(max=p.size(-1) - 1)


def uniforms(shape, gens):  # -> (N, *shape) float64: row i from generator i, so that it does not depend on the others
    return torch.stack([torch.rand(shape, generator=g, dtype=torch.double) for g in gens])


def pick(logits, gens, extra=(), **how):  # (N, ..., V) -> ids (N, ...)
    p = distribution(logits, extra=extra, **how)
    at = invert(p, uniforms(logits.shape[1:-1], gens).to(p.device))
    return (torch.tensor([*range(N_BYTES), *extra], device=at.device)[at] if extra else at).to(logits.device)


def sample_generators(seed, n):
    return [generator(f"{seed},{i},sample") for i in range(n)]


# ---- continuing

@torch.inference_mode()
def generate(model, prompt, max_new_tokens, T, gens, mask="causal", cached=True, prefix=0, extra=(), step=None, **how):
    """prompt (N, n) -> yields (N,): continues each row, an id a row at a time; a row that wrote EOT goes on with EOT.
    extra: ids that may be written beside bytes. step: what fast_step returned, to take the steps behind the prompt.

    mask "causal": when the context is full, its last half is encoded again, with the cache or without.
    mask "prefix": the prompt, or its first `prefix` positions, is read in both directions; ends with the block, for
    which the prompt must leave room."""
    N, n = prompt.shape
    assert n > 0 and (mask == "causal" or n <= T), (n, T)
    ids, ended = prompt, torch.zeros(N, dtype=torch.bool, device=prompt.device)
    start, fed, cache, byte = max(0, n - T), 0, None, None     # fed: ids behind start that the cache holds
    patience = LOOK if prompt.device.type == "cuda" else 1
    for i in range(max_new_tokens):
        # the block is full: read its last half again, and the next T / 2 bytes are cheap
        if ids.size(1) - start > T:
            if mask == "prefix":
                return
            start, fed = ids.size(1) - T // 2, 0
        # a compiled step knows its cache by address: empty it, never make a new one
        if cached and not fed:
            cache = new_cache(model, N, T) if step is None else emptied(step["cache"])
        new = ids[:, start + fed:]
        if step is not None and fed:
            logits = step["run"](byte[:, None])
        else:
            # the prompt alone is read both ways; what has been written is read to the left
            seen = "causal" if mask == "causal" or fed else torch.full((N,), prefix or n, device=ids.device)
            logits = model.logits(model(new, seen, cache=cache)[:, -1])
        fed += new.size(1) if cached else 0
        byte = pick(logits, gens, extra, **how).masked_fill(ended, EOT)
        ended |= byte == EOT
        ids = torch.cat((ids, byte[:, None]), dim=1)
        yield byte
        if (i + 1) % patience == 0 and ended.all():
            return


def emptied(cache):  # a static cache, for another text
    cache["length"].zero_()
    return cache


@torch.inference_mode()
def fast_step(model, N, T, heads=None, n=1):  # -> dict(cache, n, run), or None where torch.compile cannot
    """One decoding step over a static cache for a block of T, compiled; on CUDA captured in a graph besides.

    run: bytes (N, 1) -> logits (N, V); with heads, for speculate, ids (1, n) -> logits (n, V) of head 1 and
    (n, heads - 1, V) of the others."""
    cache, device = new_cache(model, N, T, static=True), model.embed.weight.device
    held = torch.zeros(N, n, dtype=torch.long, device=device)
    def step(ids):
        h = model(ids, "causal", cache=cache)
        return model.logits(h[:, -1]) if heads is None else (model.logits(h[0]), model.logits(far_states(heads, h[0])))
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
        return dict(cache=cache, n=n, run=forward)
    aside(lambda: forward(held), torch.cuda.Stream())
    replay = capture(lambda: forward(held), [])
    return dict(cache=cache, n=n, run=lambda ids: (held.copy_(ids), replay())[1])


@torch.inference_mode()
def speculate(model, heads, prompt, max_new_tokens, T, g, tally=None, step=None, **how):  # ids -> yields ids
    """Self-speculative decoding: heads 2.. draft, head 1 verifies the draft in one pass (Stern et al. 2018). A draft d
    is kept with probability min(1, p(d) / q(d)), else (p - q)+ is drawn from (Leviathan et al. 2023): at temperature 0
    the text is that of generate, at others its distribution is. tally: a list that receives, a pass, (drafted, kept).
    step: what fast_step returned for these heads."""
    ids, drafts, q = list(prompt), [], None     # drafts d_2 .. d_n that follow ids[-1], and what they were drawn from
    start, fed, cache, written = max(0, len(ids) - T), 0, None, 0                   # fed: ids from start in the cache
    draw = lambda p: invert(p, torch.rand(p.shape[:-1], generator=g, dtype=torch.double).to(p.device))
    while written < max_new_tokens:
        # 1. room: when the block is full its last half is encoded anew
        if len(ids) - start > T:
            start, fed = len(ids) - T // 2, 0
        if not fed:
            cache = new_cache(model, 1, T) if step is None else emptied(step["cache"])
        # 2. draft no further than the block and the budget reach
        drafts = drafts[:min(T - (len(ids) - start), max_new_tokens - written - 1)]
        new = torch.tensor([ids[start + fed:] + drafts], device=model.embed.weight.device)
        # 3. verify: one pass of head 1 over the draft, V numbers behind each of its bytes
        if step is not None and fed and new.size(1) == step["n"]:
            logits, far = step["run"](new)
        else:
            h, far = model(new, "causal", cache=cache)[0, new.size(1) - len(drafts) - 1:], None
            logits = model.logits(h)            # (drafts + 1, V): what follows ids[-1], d_2, ...

        # 4. keep drafts while u q(d) < p(d), draw one byte in place of the first refused or behind the last
        p, kept = distribution(logits, **how), 0
        if drafts:
            d, u = torch.tensor(drafts)[:, None], torch.rand(len(drafts), 1, generator=g, dtype=torch.double)
            d, u = d.to(p.device), u.to(p.device)
            kept = int((u * q[:len(d)].gather(1, d) < p[:-1].gather(1, d)).long().cumprod(0).sum())
        rest = p[kept] if kept == len(drafts) else (p[kept] - q[kept]).clamp(min=0)
        out = drafts[:kept] + [int(draw(rest if rest.sum() > 0 else p[kept]))]
        if tally is not None:
            tally.append((len(drafts), kept))
        # 5. forget what was refused: its keys lie behind the length and will be written over
        cache["length"] -= len(drafts) - kept
        fed += new.size(1) - (len(drafts) - kept)

        # 6. draft anew, from the state behind the last draft that was kept
        if "mtp" in heads:
            ahead = model.logits(far_states(heads, h[kept])) if far is None else far[kept]
            q = distribution(ahead, **how)                                          # (n - 1, 256)
            drafts = draw(q).tolist()
        for i in out:
            ids.append(i)
            written += 1
            yield i
            if i == EOT:
                return


# ---- filling masked bytes

@torch.inference_mode()
def unmask(model, ids, gens, steps=0, order="confident", shift=False, **how):  # (N, n) with MASKs -> yields (N, n)
    """Fills the masked positions in so many passes (0: one for each), leaving everything else.

    confident: where the model is surest (Ghazvininejad et al. 2019); left: from the left; parallel: one pass, each
    as if alone; ancestral: MDLM's sampler, which at time t on its way from 1 to 0 unmasks each with probability
    (t - s) / t. shift: position i - 1 predicts byte i, as in hybrid."""
    ids = ids.clone()
    steps = 1 if order == "parallel" else steps or max(1, int((ids == MASK).sum(1).max()))
    at = torch.arange(ids.size(1), device=ids.device)
    for i in range(steps):
        holes = ids == MASK
        if not holes.any():
            return
        if shift:
            # hybrid's byte i is predicted at position i - 1, so EOT stands before the first
            start = ids.new_full((len(ids), 1), EOT)
            logits = model.logits(model(torch.cat((start, ids), dim=1), "bidirectional"))[:, :-1]
        else:
            logits = model.logits(model(ids, "bidirectional"))                      # (N, n, V)
        new = pick(logits, gens, **how)
        if order == "ancestral":                # t = 1 - i / steps, s = t - 1 / steps: (t - s) / t = 1 / (steps - i)
            now = (uniforms(ids.shape[1:], gens) * (steps - i) < 1).to(ids.device)
        else:
            sure = logits[..., :N_BYTES].float().softmax(-1).amax(-1)               # (N, n)
            urgency = sure if order == "confident" else -at.float().expand(ids.shape)
            rank = urgency.masked_fill(~holes, -torch.inf).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
            now = rank < -(-holes.sum(1, keepdim=True) // (steps - i))              # an equal share of what is left
        ids = torch.where(holes & now, new, ids)
        yield ids


def fill(*args, **kwargs):  # unmask, its last state alone
    return [args[1], *unmask(*args, **kwargs)][-1]


# ---- scoring

@torch.inference_mode()
def score(model, data, T, stride, doc_mask=False):  # data (n,) uint8 -> bits of the whole text, left to right
    """Window i codes bytes i * stride + 1 .. (i + 1) * stride from at most T bytes of context; with stride = T the
    windows are disjoint and cold. The first byte of all, which has no context, counts 8 bits. doc_mask: as in
    training."""
    n, bits = len(data), 8.0
    windows = [(max(0, at + stride - T), at, min(at + stride, n - 1)) for at in range(0, n - 1, stride)]
    # windows of one length share a batch: all but the first few and the last
    for length, group in itertools.groupby(windows, lambda w: w[2] - w[0]):
        group = list(group)
        for i in range(0, len(group), SCORE_ROWS):
            bits += score_rows(model, data, group[i:i + SCORE_ROWS], length, doc_mask)
    return bits


@torch.inference_mode()
def score_rows(model, data, rows, length, doc_mask):  # rows [(first, first scored, end)] of one length -> bits
    x = torch.stack([data[a:end + 1] for a, _, end in rows])                        # (rows, length + 1)
    x = x.long().to(model.embed.weight.device)
    logits = model.logits(model(x[:, :-1], "causal", document_ids(x[:, :-1]) if doc_mask else None))
    nats = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="none").view(len(rows), length)
    return sum(float(row[at - a:].double().sum()) for row, (a, at, _) in zip(nats.cpu(), rows)) / math.log(2)


@torch.inference_mode()
def score_bound(model, data, T, seed, doc_mask=False, draws=16):  # data (n,) uint8 -> bits at most, standard error
    """The bound of masked diffusion in windows of T, each with `draws` numbers of masked bytes from as many strata."""
    g, bits, variance = generator(f"{seed},bound"), 0.0, 0.0
    for x in data.split(T):
        batch = mdlm(x.long().expand(draws, -1), g, None)
        batch = {k: v if isinstance(v, str) else v.to(model.embed.weight.device) for k, v in batch.items()}
        batch |= {"doc": document_ids(batch["inp"])} if doc_mask else {}
        each = mdlm_bounds(model, batch).cpu().double() / math.log(2)               # (draws,)
        bits, variance = bits + float(each.mean()), variance + float(each.var()) / draws
    return bits, variance ** 0.5


@torch.inference_mode()
def score_pseudo(model, data, T, shift=False, doc_mask=False):  # data (n,) uint8 -> bits
    """Pseudo-log-likelihood (Salazar et al. 2020): no code length, since every byte is given all the others of its
    window. shift: as in unmask."""
    bits = 0.0
    for x in data.split(T - shift):
        x = x.long().to(model.embed.weight.device)
        for i in range(0, len(x), SCORE_ROWS):
            at = torch.arange(i, min(i + SCORE_ROWS, len(x)), device=x.device)
            rows = x.repeat(len(at), 1).scatter(1, at[:, None], MASK)
            rows = torch.cat((rows.new_full((len(at), 1), EOT), rows), dim=1) if shift else rows
            h = model(rows, "bidirectional", document_ids(rows) if doc_mask else None)              # (rows, n, C)
            h = h[torch.arange(len(at), device=x.device), at]
            bits += float(F.cross_entropy(model.logits(h), x[at], reduction="sum")) / math.log(2)
    return bits


# ---- a run

def load_run(path, device="auto", dtype="auto"):  # -> model, heads, settings, checkpoint; for inference
    """Exits with code 2 where there is no such run, or its weights do not fit."""
    ckpt = load_checkpoint(path)
    hp = argparse.Namespace(**ckpt["config"])
    device = pick_device(device)
    hp.device, hp.dtype = str(device), pick_dtype(dtype, device)
    model, heads = build(hp)
    restore(model, heads, ckpt, path)
    # no training here: weights take the activations' type, and a pass reads half as much
    model, heads = model.to(getattr(torch, hp.dtype)).requires_grad_(False), heads.requires_grad_(False)
    pack_weights(model)
    return model, heads, hp, ckpt


def tensor(ids, hp):  # list or (n,) of any integers -> (1, n) long on the model's device
    return torch.as_tensor(ids).long().to(hp.device)[None]


def drawing(flags):
    return dict(temperature=flags.temperature, top_k=flags.top_k, top_p=flags.top_p)


def one_row(flags, i):  # the generator of sample i, as a list of one
    return [generator(f"{flags.seed},{i},sample")]


class Stream:
    """Prints bytes as they come, holding back a character that is not complete yet."""

    def __init__(self, prompt):
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for byte in prompt:
            self.write(byte)

    def write(self, byte):
        print(self.decoder.decode(bytes([byte] if byte != EOT else [])), end="", flush=True)

    def end(self):
        print(self.decoder.decode(b"", final=True), flush=True)


def shown(ids):  # -> text, without the ends of documents
    return decode(i for i in ids if int(i) != EOT)


def marked(parts, plain=("", "")):  # [(ids, is new)] -> text, on a terminal with the new parts in reverse
    tint = ("\033[7m", "\033[0m") if sys.stdout.isatty() else plain
    return "".join(tint[0] + shown(ids) + tint[1] if new and ids else shown(ids) for ids, new in parts)


def runs(ids, flags):  # n ids, n bools -> [(ids, flag)]: characters of several bytes stay in one piece
    return [([i for i, _ in group], flag) for flag, group in itertools.groupby(zip(ids, flags), lambda pair: pair[1])]


def headings(flags):  # -> yields the number of each sample, with a heading where there are several
    for i in range(flags.num_samples):
        if flags.num_samples > 1:
            print(f"--- sample {i + 1}")
        yield i


def parse_holes(text, marker, pattern):  # bytes -> [ids or hole length]: literal pieces and holes, in turn
    """[MASK] and [MASK:4] or <extra_id_0>, by the pattern, or the user's marker. Nothing else is special."""
    pieces, end = [], 0
    for match in re.finditer(re.escape(marker) if marker else pattern, text):
        pieces += [encode(text[end:match.start()]), int(match[1]) if not marker and match.re.groups and match[1] else 1]
        end = match.end()
    return pieces + [encode(text[end:])]


def hole_ids(flags):  # -> ids of the prompt, MASK for each byte of a hole
    pieces = parse_holes(bytes(encode(flags.prompt)), encoded(flags.hole), MASKS)
    return [i for p in pieces for i in ([MASK] * p if isinstance(p, int) else p)]


MASKS, HOLES = rb"\[MASK(?::(\d{1,6}))?\]", rb"<extra_id_\d+>"


# ---- what each objective is for. Each mode: (model, heads, hp, flags, held-out bytes) -> prints
# a flag is None when not given; without a prompt a mode demonstrates itself on the held-out bytes

def continue_mode(model, heads, hp, flags, held_out):
    """clm, prefix, mtp, and where there is nothing to fill ul2 and hybrid: goes on with a prompt."""
    name, T = flags.objective, hp.block_size
    by_itself = flags.num_samples == 1 and flags.temperature > 0
    ahead = name == "mtp" and flags.speculate and ("speculate" in flags.given or by_itself)
    prompt = held_out[:T // 2].tolist() if flags.prompt is None else encode(flags.prompt)
    if flags.prompt is None:
        print(f"held-out text, its first {len(prompt)} bytes as the prompt, its next bytes for comparison:")
        print(f"{decode(held_out[:T].tolist())}\n--- the model's continuation:")
    prompt = prompt or [EOT]                    # an empty prompt is the start of a document
    before, behind = ([MODE_S], [SEP]) if name == "ul2" else ([], [])
    if name in ("prefix", "ul2"):               # one block holds the prompt and what is written
        # what is written needs room, half of the block at most
        room = max(1, T - 2 * len(before) - min(flags.max_new_tokens, T // 2))
        if len(prompt) > room:
            print(f"--- the last {room} of {len(prompt)} bytes of the prompt, which leave room in the block")
        prompt = prompt[-room:]
    ids = torch.tensor(before + prompt + behind, device=hp.device).expand(flags.num_samples, -1)
    mask = "prefix" if name in ("prefix", "ul2") else "causal"
    if ahead:
        return speculate_mode(model, heads, hp, flags, prompt)
    step = fast_step(model, flags.num_samples, T) if flags.compile else None
    gens = sample_generators(flags.seed, flags.num_samples)
    steps = generate(model, ids, flags.max_new_tokens, T, gens, mask, step=step, **drawing(flags))
    if flags.num_samples == 1:
        stream, byte, written = Stream(prompt), None, 0
        for byte in steps:
            stream.write(int(byte))
            written += 1
        stream.end()
        if mask == "prefix" and written < flags.max_new_tokens and int(byte) != EOT:
            print(f"--- the block of {T} is full", file=sys.stderr)
        return
    rows = [byte.tolist() for byte in steps]
    for i in headings(flags):
        print(shown(prompt + [row[i] for row in rows]))


def speculate_mode(model, heads, hp, flags, prompt):
    """Writes, then says on standard error how many drafts were kept."""
    T, n, written, seconds, tally = hp.block_size, hp.mtp_heads, 0, 0.0, []
    step = fast_step(model, 1, T, heads, n) if flags.compile and n > 1 else None
    for i in headings(flags):
        stream, [g], begin = Stream(prompt), one_row(flags, i), time.perf_counter()
        for byte in speculate(model, heads, prompt, flags.max_new_tokens, T, g, tally, step, **drawing(flags)):
            seconds += time.perf_counter() - begin              # without the printing
            stream.write(byte)
            written, begin = written + 1, time.perf_counter()
        stream.end()
    each = []                                   # of the passes that had a draft of head k + 1: the share that kept it
    for k in range(1, n):
        asked = [kept >= k for drafted, kept in tally if drafted >= k]
        each.append(f"{k + 1}: {sum(asked) / max(1, len(asked)):.0%}")
    line = f"--- {written / max(1, len(tally)):.2f} bytes per pass; kept of head {', '.join(each)}"
    if "speculate" in flags.given:              # the same bytes one by one, with the same cache
        begin, most = time.perf_counter(), min(written, flags.max_new_tokens)
        plain = list(generate(model, tensor(prompt, hp), most, T, one_row(flags, 0), **drawing(flags)))
        speed = len(plain) / max(time.perf_counter() - begin, 1e-9)
        line += f"; {written / max(seconds, 1e-9):.0f} bytes/s against {speed:.0f} plain"
    print(line, file=sys.stderr)


def fill_mode(model, heads, hp, flags, held_out):
    """mlm, hybrid, mdlm: fill masked bytes; mdlm also continues a prompt, or writes from nothing."""
    name, T = flags.objective, hp.block_size
    order = flags.order or ("ancestral" if name == "mdlm" else "confident")
    if order == "parallel" and flags.steps:
        fail("--steps: --order parallel is one pass. Try --order confident")
    orders = ("ancestral", "confident") if name == "mdlm" else ("confident", "left", "parallel")
    if order not in orders:
        fail(f"--order {order}: unknown to {name}. Try {', '.join(orders)}")
    steps = flags.steps or (64 if name == "mdlm" else 0)
    how = dict(steps=steps, order=order, shift=name == "hybrid", **drawing(flags))
    if flags.prompt is None:
        x = tensor(held_out[:T - (name == "hybrid")], hp)
        g = generator("demonstration")
        asked = torch.rand(x.shape, generator=g).to(hp.device) < (0.5 if name == "mdlm" else hp.mask_rate)
        asked[:, -1] |= ~asked.any()            # at least one
        masked = x.masked_fill(asked, MASK)
        print(f"clean:\n{decode(x[0])}\n--- {int(asked.sum())} bytes masked:\n{with_holes(masked[0])}")
        for i in range(flags.num_samples):
            for out in unmask(model, masked, one_row(flags, i), **how):
                if flags.show:
                    show_frame(out[0])
            right = f"{int((out == x)[asked].sum())} of {int(asked.sum())}"
            print(f"--- filled, {right} masked bytes as in the original:\n{shown(out[0])}")
        return
    ids = hole_ids(flags)
    if MASK not in ids and name != "mdlm":
        fail(f"--prompt: has no hole. Try one with {flags.hole or '[MASK] or [MASK:4]'} in it")
    if MASK not in ids:                         # mdlm: what follows the prompt, in the same block
        if len(ids) > T // 2:
            print(f"--- the last {T // 2} of {len(ids)} bytes of the prompt, which leave room in the block")
        ids = ids[-(T // 2):]
        ids += [MASK] * max(0, min(flags.max_new_tokens, T - len(ids)))
    for i in headings(flags):
        x, gens, T1 = tensor(ids, hp), one_row(flags, i), T - (name == "hybrid")
        while (x == MASK).any():                # a text longer than the block is filled window by window
            # a quarter of the window stands before the hole, the rest behind it
            at = int((x[0] == MASK).byte().argmax())
            a = max(0, min(at - T1 // 4, x.size(1) - T1))
            for state in unmask(model, x[:, a:a + T1], gens, **how):
                if flags.show:
                    show_frame(state[0])
            x[:, a:a + T1] = state
        new = torch.tensor(ids) == MASK
        print(marked(runs(x[0].tolist(), new.tolist())) if sys.stdout.isatty() else shown(x[0]))


def with_holes(ids):  # (n,) -> text in which a masked byte is a block
    return shown(ids).replace("<MASK>", "█")


def show_frame(ids):
    text = with_holes(ids)
    print(f"\033[2J\033[H{text}" if sys.stdout.isatty() else f"--- pass\n{text}", flush=True)
    time.sleep(0.05 if sys.stdout.isatty() else 0)


def holes_mode(model, heads, hp, flags, held_out):
    """span, ul2: fill the holes of a text; ul2 without a hole continues it."""
    name, T = flags.objective, hp.block_size
    if flags.mode not in (None, "R", "S", "X"):
        fail(f"--mode {flags.mode}: unknown. Try R, S or X")
    if flags.prompt is None:
        n = min(len(held_out), T * 3 // 4)
        cuts = sorted(torch.randperm(max(1, n // 8), generator=generator("holes"))[:max(1, n // 40)].tolist())
        pieces, end = [], 0
        for c in cuts:                          # a hole of 4 bytes in some of the pieces of 8
            pieces, end = pieces + [held_out[end:8 * c + 2].tolist(), 1], 8 * c + 6
        pieces += [held_out[end:n].tolist()]
        text = "".join(decode(p) if isinstance(p, list) else "[..]" for p in pieces)
        print(f"clean:\n{decode(held_out[:n])}\n--- with holes:\n{text}\n--- filled:")
    else:
        pieces = parse_holes(bytes(encode(flags.prompt)), encoded(flags.hole), HOLES)
    holes = len(pieces) // 2
    if name == "ul2" and (flags.mode == "S" or flags.mode is None and not holes):
        return continue_mode(model, heads, hp, flags, held_out)
    if not holes:
        fail(f"--prompt: has no hole. Try one with {flags.hole or '<extra_id_0>'} in it")
    mode = [] if name == "span" else [MODE_X if flags.mode == "X" else MODE_R]
    if holes >= N_SENTINELS:
        fail(f"--prompt: has {holes} holes, there are {N_SENTINELS} sentinels. Try a shorter text")
    source = mode + [i for k, p in enumerate(pieces) for i in (p if isinstance(p, list) else [SENTINEL + k // 2])]
    source += ([SENTINEL + holes] if pieces[-1] else []) + [SEP]        # one more hole, see infill_spans
    if len(source) + holes + 1 > T:
        fail(f"--prompt: {len(source)} positions with its holes leave no room in a block of {T}. Try a shorter text")
    for i in headings(flags):
        spans, whole = infill_spans(model, source, holes, flags.max_new_tokens, T, one_row(flags, i), **drawing(flags))
        text = marked([(spans[k // 2], True) if k % 2 else (p, False) for k, p in enumerate(pieces)])
        print(text + ("" if whole else "\n--- stopped before the end"))


def infill_spans(model, source, holes, max_new_tokens, T, gens, **how):  # -> [bytes of each hole], did all end?
    """Writes sentinel 0, then lets the model write each span up to the next sentinel. A source that does not end with a
    hole has one more sentinel behind it: rows of one length have taught the model to write EOT at one place alone."""
    spans, x = [], torch.tensor([source], device=model.embed.weight.device)
    prefix = x.size(1)
    for k in range(holes):
        left = min(max_new_tokens - sum(map(len, spans)), T - x.size(1))
        if left <= 0:
            return spans + [[] for _ in range(holes - k)], False
        spans.append([])
        x = torch.cat((x, x.new_tensor([[SENTINEL + k]])), dim=1)
        for i in generate(model, x, left, T, gens, "prefix", prefix=prefix, extra=[SENTINEL + k + 1], **how):
            if int(i) == SENTINEL + k + 1 or int(i) == EOT:
                break
            spans[-1].append(int(i))
            x = torch.cat((x, i[:, None]), dim=1)
        else:
            return spans + [[] for _ in range(holes - k - 1)], False
    return spans, True


def fim_mode(model, heads, hp, flags, held_out):
    """fim: writes the middle between --prefix and --suffix, or in the one hole of a prompt, up to EOT."""
    T = hp.block_size
    if flags.prompt is not None:
        if flags.prefix is not None or flags.suffix is not None:
            fail("--prompt: holds both sides of its hole. Try it without --prefix and --suffix")
        pieces = parse_holes(bytes(encode(flags.prompt)), encoded(flags.hole), HOLES)
        if len(pieces) != 3:
            fail(f"--prompt: has {len(pieces) // 2} holes, fim fills one. Try one {flags.hole or '<extra_id_0>'}")
        prefix, suffix = pieces[0], pieces[2]
    elif flags.prefix is not None or flags.suffix is not None:
        prefix, suffix = encode(flags.prefix or ""), encode(flags.suffix or "")
    else:
        text = held_out[:T // 2].tolist()
        a, b = len(text) // 2, len(text) // 2 + 16
        prefix, suffix = text[:a], text[b:]
        print(f"clean:\n{decode(text)}\n--- with a hole:\n{decode(prefix)}[..]{decode(suffix)}\n--- filled:")
    # room for both sides, of which each keeps what is nearest
    room = max(2, T - 4 - min(flags.max_new_tokens, T // 3))
    # near the hole counts most: the prefix loses its front, the suffix its end
    keep = max(room // 2, room - len(suffix))
    left, right = prefix[-keep:], suffix[:room - min(len(prefix), keep)]
    ids = [PRE, SUF, *right, MID, *left] if flags.spm else [PRE, *left, SUF, *right, MID]
    most = min(flags.max_new_tokens, T + 1 - len(ids))
    for i in headings(flags):
        middle = [int(b) for b in generate(model, tensor(ids, hp), most, T, one_row(flags, i), **drawing(flags))]
        whole = bool(middle) and middle[-1] == EOT
        text = marked([(prefix, False), (middle[:len(middle) - whole], True), (suffix, False)])
        print(text + ("" if whole else "\n--- stopped before EOT"))


def repair_mode(model, heads, hp, flags, held_out):
    """bart: writes the clean text of a noisy one, in pieces as long as a row's source."""
    T, L = hp.block_size, (hp.block_size - 1) // 2
    if flags.prompt is None:
        x = tensor(held_out[:L], hp)
        if x.size(1) < L:
            fail("the checkpoint's held-out text is shorter than a row. Try --prompt")
        batch = OBJECTIVES["bart"]["make"](x.cpu(), generator("demonstration"), hp)
        noisy = batch["inp"][0, :int(batch["mask"][0]) - 1].tolist()
        print(f"clean:\n{decode(x[0])}\n--- noisy:\n{with_holes(noisy)}\n--- repaired:")
    else:
        noisy = hole_ids(flags)
    for i in headings(flags):
        gens, out, most = one_row(flags, i), [], flags.max_new_tokens if "max_new_tokens" in flags.given else math.inf
        for a in range(0, len(noisy), L):       # a longer text is repaired piece by piece
            ids = tensor(noisy[a:a + L] + [SEP], hp)
            steps = generate(model, ids, min(most - len(out), L + 1), T, gens, "prefix", **drawing(flags))
            out += [int(b) for b in steps if int(b) != EOT]
        print(shown(out) + (f"\n--- stopped after {most} bytes" if len(out) >= most else ""))


@torch.inference_mode()
def suspicion(model, heads, ids, T):  # ids (n,) long -> (n,): probability that each byte was replaced
    logits = [heads["replaced"](model(x[None], "bidirectional").float())[0, :, 0] for x in ids.split(T)]
    return torch.cat(logits).sigmoid()


def suspicious_mode(model, heads, hp, flags, held_out):
    """electra: marks the bytes that its discriminator gives more than .5, and lists the ten likeliest."""
    x = tensor(held_out[:hp.block_size] if flags.prompt is None else encode(flags.prompt) or [EOT], hp)[0]
    if flags.prompt is None:
        g = generator("demonstration")
        bad = torch.rand(x.shape, generator=g).to(x.device) < 0.05
        clean, x = x, torch.where(bad, random_bytes(x.shape, g).to(x.device), x)
        bad = x != clean
        print(f"clean:\n{decode(clean)}\n--- {int(bad.sum())} bytes replaced at random:\n{decode(x)}")
        print("--- marked where the model thinks so:")
    p = suspicion(model, heads, x, hp.block_size)
    found = p > 0.5
    print(marked(runs(x.tolist(), found.tolist()), ("«", "»")))
    for i in p.argsort(descending=True)[:10].tolist():
        print(f"  byte {i:4d}  {decode([int(x[i])])!r:6s} replaced with probability {float(p[i]):.2f}")
    if flags.prompt is None:
        hits = int((found & bad).sum())
        print(f"--- {hits} of {int(bad.sum())} replaced bytes found, {hits} of {int(found.sum())} marks right")


@torch.inference_mode()
def follows(model, heads, first, second, hp):  # ids, ids -> probability that the second text follows the first
    """As in training the pieces are at most h bytes, and GAP bytes are skipped between them."""
    h = (hp.block_size - 3) // 2
    # training skipped GAP bytes between the texts; a long second text loses them too
    second = second[GAP:GAP + h] if len(second) > 2 * GAP else second[:h]
    row = tensor([CLS, *first[-h:], SEP, *second, SEP], hp)
    return float(heads["follows"](model(row, "bidirectional")[:, 0].float()).sigmoid())


def follows_mode(model, heads, hp, flags, held_out):
    """nsp: the probability that --suffix follows --prefix."""
    if flags.prefix is None and flags.suffix is None:
        n = min(len(held_out) // 2, hp.block_size // 2)
        first, true, other = (held_out[a:a + n].tolist() for a in (0, n, len(held_out) - n))
        print(f"first text:\n{decode(first)}")
        for title, second in (("its continuation", true), ("a later passage", other)):
            p = follows(model, heads, first, second, hp)
            print(f"--- {title}, which follows with probability {p:.3f}:\n{decode(second)}")
    else:
        print(f"{follows(model, heads, encode(flags.prefix or ''), encode(flags.suffix or ''), hp):.4f}")


@torch.inference_mode()
def embeddings(model, texts, T):  # list of ids -> (N, C) float32 of length 1; of a long text the mean over its blocks
    """Blocks of one length share a batch; their means are weighed by their lengths."""
    blocks = [(i, text[a:a + T] or [EOT]) for i, text in enumerate(texts) for a in range(0, max(1, len(text)), T)]
    blocks.sort(key=lambda b: len(b[1]))        # those of one length can share a batch
    out = torch.zeros(len(texts), model.sizes.n_embd)
    for n, group in itertools.groupby(blocks, lambda b: len(b[1])):
        group = list(group)
        for a in range(0, len(group), SCORE_ROWS):
            owner, rows = zip(*group[a:a + SCORE_ROWS])
            e = embed(model, torch.tensor(rows, device=model.embed.weight.device)).cpu()
            out.index_add_(0, torch.tensor(owner), n * e)
    return F.normalize(out, dim=1)


def passages(path):  # a file's lines, or a folder's files -> [(title, ids)]
    """Exits with code 2 where the path cannot be read, or holds no text."""
    try:
        if not os.path.isdir(path):
            lines = enumerate(read_file(path).splitlines(), 1)
            found = [(f"line {i}", list(line)) for i, line in lines if line.strip()]
        else:
            names = [(root, name) for root, _, names in os.walk(path) for name in names if not name.startswith(".")]
            paths = sorted(os.path.join(*name) for name in names)
            found = [(p, list(text)) for p in paths if os.path.isfile(p) and (text := read_file(p))]
    except (OSError, ValueError) as e:          # a path with a NUL in it
        fail(f"--corpus {path}: cannot be read ({e}). Try another file or folder")
    if not found:
        fail(f"--corpus {path}: has no line of text. Try another file or folder")
    return found


def read_file(path):  # -> bytes
    with open(path, "rb") as f:
        return f.read()


def search_mode(model, heads, hp, flags, held_out):
    """contrastive: prints an embedding, those of a corpus, or the three passages nearest to --query."""
    Lc = max(1, round(hp.crop * hp.block_size))
    if flags.prompt is not None and (flags.query or flags.corpus):
        fail("--prompt: prints the embedding of one text. Try it without --query and --corpus")
    if flags.prompt is not None:                # an embedding, as numbers
        return print(" ".join(f"{v:.5f}" for v in embeddings(model, [encode(flags.prompt)], hp.block_size)[0].tolist()))
    if flags.corpus:
        titles, texts = zip(*passages(flags.corpus))
    else:
        texts = [p.tolist() for p in held_out.split(Lc) if len(p) == Lc] or [held_out.tolist()]
        titles = [f"passage {i + 1}" for i in range(len(texts))]
    near = embeddings(model, texts, hp.block_size)                                  # (N, C)
    if flags.query is None and flags.corpus:
        for title, e in zip(titles, near):
            print(" ".join(f"{v:.5f}" for v in e.tolist()), title, sep="\t")
        return
    query = encode(flags.query) if flags.query is not None else held_out[Lc // 2:Lc // 2 + Lc].tolist()
    near = near @ embeddings(model, [query], hp.block_size)[0]
    print(f"query:\n{decode(query)}")
    for i in near.argsort(descending=True)[:3].tolist():
        print(f"--- similarity {float(near[i]):.3f}, {titles[i]}:\n{decode(texts[i][:hp.block_size])}")


@torch.inference_mode()
def seam(model, heads, ids, hp):  # ids -> index of the byte that came first before the rotation, probability
    p = heads["seam"](model(tensor(ids, hp), "bidirectional").float())[0, :, 0].softmax(0)
    return int(p.argmax()), float(p.max())


def seam_mode(model, heads, hp, flags, held_out):
    """rotation: rolls a text back to where its first byte most likely is."""
    T, turn = hp.block_size, hp.block_size // 3
    ids = held_out[:T].roll(turn).tolist() if flags.prompt is None else encode(flags.prompt) or [EOT]
    if len(ids) > T:
        print(f"--- the first {T} of {len(ids)} bytes, which fill the block")
        ids = ids[:T]
    at, p = seam(model, heads, ids, hp)
    truth = f", the right one is {turn % len(ids)}" if flags.prompt is None else ""
    print(f"rotated:\n{shown(ids)}\n--- rolled back at byte {at} (probability {p:.2f}{truth}):")
    print(shown(ids[at:] + ids[:at]))


def score_mode(model, heads, hp, flags, held_out):
    """Bits per byte of a file: exact, a bound, or a pseudo-likelihood, and says which. Exits with code 2 for objectives
    without any."""
    name, T = flags.objective, hp.block_size
    try:
        data = map_file(flags.score, "--score")
    except RuntimeError as e:
        fail(f"--score {flags.score}: cannot be read ({str(e).splitlines()[0]}). Try another file")
    if flags.stride and OBJECTIVES[name].get("bpb") != "exact":
        fail(f"--stride: {name} scores windows of the block as a whole. Try without it")
    stride = flags.stride or max(1, T // 2)
    if stride > T:
        fail(f"--stride {stride}: is more than the block of {T}. Try --stride {T}")
    def say(bits, note):
        bits /= len(data)
        figures = f"{bits:.4f} bits per byte ({bits * math.log(2):.4f} nats), {len(data):,} bytes"
        print(f"{flags.score}: {figures}, {note}", flush=True)
    if OBJECTIVES[name].get("bpb") == "exact":
        say(score(model, data, T, stride, hp.doc_mask), f"windows of {T}, stride {stride}")
    elif name == "mdlm":
        bits, error = score_bound(model, data, T, flags.seed, hp.doc_mask)
        say(bits, f"at most, standard error {error / len(data):.4f}, cold windows of {T}")
    elif name != "mlm":
        those = " ".join(other for other, entry in OBJECTIVES.items() if "bpb" in entry)
        fail(f"--score: {name} defines no probability of a text. Try a run trained as {those} mlm")
    if name in ("mlm", "hybrid"):
        shift = name == "hybrid"
        bits = score_pseudo(model, data, T, shift, hp.doc_mask)
        say(bits, f"pseudo: every byte given all others of its window of {T - shift}")
    print(f"beside it: {compressors(data)}")


# name: (mode, the flags it reads beside COMMON)
MODES = {
    **dict.fromkeys(("clm", "prefix"), (continue_mode, {"prompt", "max_new_tokens", "compile"} | DRAWING)),
    "mtp": (continue_mode, {"prompt", "max_new_tokens", "compile", "speculate"} | DRAWING),
    "mlm": (fill_mode, {"prompt", "hole", "order", "steps"} | DRAWING),
    "mdlm": (fill_mode, {"prompt", "hole", "order", "steps", "show", "max_new_tokens"} | DRAWING),
    "hybrid": (fill_mode, {"prompt", "hole", "order", "steps", "max_new_tokens", "compile"} | DRAWING),
    "span": (holes_mode, {"prompt", "hole", "max_new_tokens"} | DRAWING),
    "ul2": (holes_mode, {"prompt", "hole", "mode", "max_new_tokens"} | DRAWING),
    "fim": (fim_mode, {"prompt", "hole", "prefix", "suffix", "spm", "max_new_tokens"} | DRAWING),
    "bart": (repair_mode, {"prompt", "hole", "max_new_tokens"} | DRAWING),
    "electra": (suspicious_mode, {"prompt"}),
    "nsp": (follows_mode, {"prefix", "suffix"}),
    "contrastive": (search_mode, {"prompt", "query", "corpus"}),
    "rotation": (seam_mode, {"prompt"}),
}


def encoded(text):  # str or None -> bytes
    return bytes(encode(text or ""))


def parse(argv):  # -> Namespace of every flag; texts that were not given are None
    """Exits with code 2 on a flag that does not exist, or a value out of its range."""
    parser = Parser(prog="sample.py", usage="python sample.py [flags below]", description=__doc__, allow_abbrev=False,
                    argument_default=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, (default, text, *_) in FLAGS.items():
        how = dict(type=type(default), metavar="X") if not isinstance(default, bool) else \
            dict(action=argparse.BooleanOptionalAction if default else "store_true")
        parser.add_argument(f"--{flag}", help=text + (f" [{default}]" if default not in ("", 0, True) else ""), **how)
    given = vars(parser.parse_args(argv))
    defaults = {flag: None if default == "" else default for flag, (default, *_) in FLAGS.items()}
    flags = argparse.Namespace(**defaults | given)
    for flag, spec in FLAGS.items():
        if len(spec) == 4 and not spec[2] <= getattr(flags, flag) <= spec[3]:
            fail(f"--{flag} {getattr(flags, flag)}: must lie between {spec[2]} and {spec[3]}. Try the default")
    flags.given = set(given)
    return flags


def choose_mode(flags):  # -> mode, the flags it reads
    """hybrid and mdlm have two: what is asked for decides."""
    name = flags.objective
    if flags.score is not None:
        return score_mode, {"score", "stride"}
    mode, read = MODES[name]
    holes = flags.prompt is not None and MASK in hole_ids(flags)
    if name == "hybrid" and flags.prompt is not None and not holes:                 # continues
        return MODES["clm"][0], MODES["clm"][1] | {"hole"}
    if name == "hybrid" or name == "mdlm" and (flags.prompt is None or holes):      # fills what is there
        read = read - {"max_new_tokens", "compile"}
    return mode, read - ({"hole"} if flags.prompt is None else set())


def main(argv=None):  # exits with code 2 where something was asked that cannot be
    flags = parse(sys.argv[1:] if argv is None else argv)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    path = flags.out_dir or newest_run()
    precision = torch.get_float32_matmul_precision()
    set_precision(pick_device(flags.device))
    try:
        exact = flags.score is not None and flags.dtype == "auto"           # a score is worth the slower float32
        model, heads, hp, ckpt = load_run(path, flags.device, "float32" if exact else flags.dtype)
        names = [m["name"] for m in members(hp)]
        flags.objective = flags.objective or names[0]
        if flags.objective not in names:
            fail(f"--objective {flags.objective}: {path} was trained as {hp.objective}. Try --objective {names[0]}")
        name = flags.objective
        flags.objective = OBJECTIVES[name].get("like", name)
        if flags.objective not in MODES and flags.score is None:    # a fork's new objective
            return print(f"{path}: sample.py has no mode for {name} yet. Try one in its table MODES, or "
                         "like=\"mlm\" in objectives.py")
        mode, read = choose_mode(flags)
        # a flag that would be ignored is refused: its silence would look like an effect
        for flag in sorted(flags.given - read - COMMON):
            those = [n for n, (_, r) in MODES.items() if flag in r and n != flags.objective]
            hint = "--score" if not those else "a --prompt" if flag == "hole" else " ".join(those)
            if flags.score is not None:
                fail(f"--{flag}: not used with --score. Try it without --score")
            here = " here" if flag in MODES[flags.objective][1] else ""
            fail(f"--{flag}: not used by {name}{here}. Try it with {hint}")
        mode(model, heads, hp, flags, ckpt["held_out"])
    finally:
        torch.set_float32_matmul_precision(precision)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:                     # as of | head; Python would complain once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
