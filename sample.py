"""Use a trained model for what it was trained to do. Examples, each below the objectives that it works with:

    any objective: a demonstration by the latest run, on text that it was not trained on
        python sample.py
    clm, mtp, prefix, ul2, fim, hybrid: continue a text
        python sample.py --prompt "def main(" --num_samples 3
    mlm, hybrid: fill holes of known length
        python sample.py --prompt "import [MASK:2], sys"
    mdlm, sedd: write in any order, here 40 bytes in 20 passes
        python sample.py --prompt "class [MASK:40]:" --steps 20 --show
    span, ul2: fill holes of unknown length
        python sample.py --prompt "for i in ran<extra_id_0>(10): pri<extra_id_1>(i)"
    fim, span, ul2: write between two texts
        python sample.py --prefix "def add(a, b):" --suffix "return c"
    bart: repair a text, in which [MASK] may stand for what is missing
        python sample.py --prompt "def main([MASK]) retu[MASK] 0"
    electra: mark the bytes that look wrong
        python sample.py --prompt "a text with a typq in it"
    nsp: does the second text follow the first?
        python sample.py --prefix "Once upon a time" --suffix "there was a king."
    contrastive: find the lines of a file that are most similar to a text
        python sample.py --query "open a file" --corpus book.txt
    rotation: find the start of a text whose end was moved to its front
        python sample.py --prompt "dog. The quick brown fox jumps over the lazy "
    objectives with a likelihood: print the bits per byte of a file
        python sample.py --score book.txt

Add --out_dir out/NAME to use another run than the latest. A text may also be FILE:path, or - for standard input.
Only these are special in a prompt: [MASK], a hole of one byte; [MASK:4], a hole of 4 bytes; <extra_id_0>, a hole of
any length. For bart [MASK], too, is a hole of any length.
"""
# N samples, n ids, T = block_size positions of the model, V outputs of the byte head, P ids of a prefix
# gens: a generator for each row; how: temperature, top_k and top_p, as distribution takes them
import codecs
import contextlib
import functools
import itertools
import math
import re
import sys
import time
from argparse import Namespace

# isort: off  data silences a warning of torch's, and so comes before it
from data import EOT, MASK, SEP, Flag, compressor_bits, decode, document_ids, encode, error_reason, fail, from_bytes
from data import make_rng, map_file
from model import Cache, StaticCache
from objectives import IGNORE_INDEX, N_BYTES, OBJECTIVES, Continue, Draft, Fill, Follow, Infill, Mark, Repair, Seam
from objectives import Search, find_use, get_objective, inverse_cdf, members_of, random_bytes, trained_use
from run import DEVICE_FLAGS, GraphedStep, check, is_out_of_memory, load_run, make_parser, newest_run
from run import preserve_torch_state, run_program
import torch
import torch.nn.functional as F
from tqdm import tqdm

MAX_ROWS = 64                                   # texts or windows that one pass reads
BOUND_SAMPLES = 16                              # corruptions of a window for a bound
REMASK_RATE = 0.05                              # probability of order remask to mask a written byte again in a pass
DIFFUSION_SAMPLING = dict(temperature=1.0, top_p=0.8)           # the default for text that mdlm and sedd write
END_THRESHOLD = 0.15                            # an infilled hole ends once its end is at least so likely
HOLE_BYTES = 4                                  # expected in a hole of unknown length
REPORT_SECONDS = 10                             # between progress lines
SUFFIX_BYTES = 16                               # of the suffix, which decide where a middle is trimmed
SPACES = {EOT, *b" \t\n\v\f\r"}                 # bytes after which a long text may be cut
MASKS, HOLES = rb"\[MASK(?::(\d+))?\]", rb"<extra_id_\d+>"

FLAGS = {
    "what": {
        "out_dir": Flag("", "run folder or checkpoint file; without it the latest run under out/"),
        "objective": Flag("", "of a mixture, the member to use; without it the first"),
        "prompt": Flag("", "the text to continue, fill, repair or examine"),
        "prefix": Flag("", "the text before a hole; nsp: the first text"),
        "suffix": Flag("", "the text after a hole; nsp: the second text"),
        "query": Flag("", "contrastive: the text to look for"),
        "corpus": Flag("", "contrastive: file whose lines to search; without --query their embeddings are printed"),
        "score": Flag("", "file whose bits per byte to print; takes no other text"),
        "stride": Flag(0, "with --score: bytes scored per window; 0 for half a block", 0, 1 << 24),
    },
    "how": {
        "max_new_tokens": Flag(300, "bytes to write at most; where it is given and more than 16 for each hole, ul2 is "
                                    "asked for long spans", 0, 1 << 40),
        "num_samples": Flag(1, "number of samples; sample i is seeded with (seed, i)", 1, 1 << 16),
        "temperature": Flag(0.8, "randomness; 0 always takes the most likely byte (the default for holes and repairs); "
                                 "mdlm and sedd write at 1 with top_p .8 where none of the three is given", 0.0, 1e6),
        "top_k": Flag(0, "sample from the k most likely bytes, 0 for all", 0, 1 << 40),
        "top_p": Flag(1.0, "sample from the most likely bytes that together have this probability", 0.0, 1.0),
        "order": Flag("", "in which [MASK]s are filled: confident, left, revise, ancestral, remask or analytic"),
        "steps": Flag(0, "passes that fill [MASK]s; 0: one for each, or 64 in order ancestral, remask or analytic", 0,
                      1 << 20),
        "show": Flag(False, "print every pass that fills [MASK]s"),
        "speculate": Flag(True, "mtp: the extra heads draft bytes that the first head verifies"),
        "compile": Flag(False, "torch.compile the decoding step: slow to start, faster for long texts"),
        "seed": Flag(1, "of the samples", 0, 2 ** 31),
    } | DEVICE_FLAGS,
}
COMMON = {"out_dir", "objective", "seed", "device", "dtype"}
SAMPLING_FLAGS = {"temperature", "top_k", "top_p"}


# ---- sampling a byte

def distribution(logits, temperature=1.0, top_k=0, top_p=1.0):  # (..., V) -> (..., 256) float64
    """Probabilities of the bytes; no other id is ever sampled. At temperature 0 the most likely byte has all of it.
    top_p counts probabilities as they were before top_k. In float64, since float32 loses the tail of the distribution
    (Zheng et al. 2024); mps lacks float64, so there it is computed on the CPU."""
    logits = logits[..., :N_BYTES]
    logits = (logits.cpu() if logits.device.type == "mps" else logits).double()
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.size(-1)).double()
    # subtract the maximum first: 1 / temperature may overflow
    p = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    if top_k and top_k < p.size(-1) or top_p < 1:
        p, ids = p.sort(dim=-1, descending=True, stable=True)
        # nucleus sampling (Holtzman et al. 2020): a byte stays if those before it have less than top_p
        before = p.cumsum(-1) - p
        p = p.clone()
        p[..., top_k or p.size(-1):] = 0
        p[..., 1:] = p[..., 1:].where(before[..., 1:] < top_p, 0)
        p = torch.zeros_like(p).scatter(-1, ids, p)
    return p / p.sum(-1, keepdim=True)


def uniforms(shape, gens):  # -> (N, *shape) float64: row i from generator i
    return torch.stack([torch.rand(shape, generator=g, dtype=torch.double) for g in gens])


def sample_bytes(logits, gens, **how):  # (N, ..., V) -> bytes (N, ...)
    p = distribution(logits, **how)
    return inverse_cdf(p, uniforms(logits.shape[1:-1], gens).to(p.device)).to(logits.device)


def sample_byte_or_stop(logits, gens, stop_id, **how):  # (N, V) -> ids (N,): a byte of a hole, or the id that ends it
    """The hole ends as soon as stop_id and EOT together have a probability of END_THRESHOLD; neither is sampled."""
    stops = logits.softmax(-1)[:, list({stop_id, EOT})].sum(1) >= END_THRESHOLD
    logits = logits.clone()
    logits[:, EOT] = -torch.inf
    return sample_bytes(logits, gens, **how).masked_fill(stops, stop_id)


def sample_generators(seed, n):
    return [make_rng(f"{seed},{i},sample") for i in range(n)]


# ---- continuing

def last_document(ids):  # list of n ids -> where its last document begins; EOT belongs to the document that it ends
    start = len(ids) - 1
    while start > 0 and ids[start - 1] != EOT:
        start -= 1
    return start


def block_start(start, n, T, document):  # -> where in n ids the block begins that the next pass reads
    """start: where the last pass's block began, None before the first pass; it is returned where the next pass
    continues that block. document: where a document begins, or None."""
    if start is None:
        return max(0, n - T)
    if n - 1 == document:                       # its first byte: nothing before it is read
        return document
    return n - T // 2 if n - start > T else start               # full: the next T / 2 bytes are cheap again


@torch.inference_mode()
def generate(model, prompt, max_new_tokens, T, gens, prefix=0, stop_id=None, positions=None, compiled=None,
             doc_mask=False, **how):
    """prompt (N, n) -> yields (N,): continues each row, one id a row at a time; a row that wrote EOT continues with
    EOT. stop_id: what ends a hole, for sample_byte_or_stop. positions: the objective's, of prefix rows. compiled: a
    step of compile_step, which takes over after the prompt.

    prefix 0: causal; when the block is full, its last half is encoded again. prefix P: the first P positions
    of the prompt are read both ways; generation ends where the block is full, so the prompt must leave space in it.

    doc_mask: as in training. Each position then sees its own document alone, so nothing before the prompt's last
    document is read: RoPE depends on distances only, so positions may count from its start. All rows must end their
    documents at the same positions, and positions must be None."""
    if doc_mask:
        first = last_document(prompt[0].tolist())
        prompt = prompt[:, first:]
        prefix = max(0, prefix - first)
    N, n = prompt.shape
    document = n if doc_mask and int(prompt[0, -1]) == EOT else None                # begins after the prompt
    device = prompt.device
    assert n > 0 and (n <= T or not prefix), (n, T)
    ids = prompt
    ended = torch.zeros(N, dtype=torch.bool, device=device)
    cache = Cache(model, N, T) if compiled is None else compiled.cache
    start = None
    byte = None
    for _ in range(max_new_tokens):
        last = start
        start = block_start(last, ids.size(1), T, document)
        is_new_block = start != last
        new = ids[:, -1:]
        if is_new_block:
            if start and prefix and start != document:          # a prefix ends with its block
                return
            prefix = 0 if start else prefix
            cache.rewind(cache.length)          # emptied, not replaced: a compiled step holds its address
            new = ids[:, start:]
        if compiled is not None and not is_new_block:
            logits = compiled.run(byte[:, None])    # not a view of ids, whose strides grow
        else:
            at = None                           # 0, 1, 2, ...
            if positions is not None:
                at = positions(ids, torch.full((N,), prefix, device=device))
            if at is not None:
                at = at[:, -new.size(1):]
            h = model(new, prefix if is_new_block else 0, cache=cache, positions=at)
            logits = model.logits(h[:, -1])
        if stop_id is None:
            byte = sample_bytes(logits, gens, **how)
        else:
            byte = sample_byte_or_stop(logits, gens, stop_id, **how)
        byte = byte.masked_fill(ended, EOT)
        ended |= byte == EOT
        ids = torch.cat((ids, byte[:, None]), dim=1)
        yield byte
        if ended.all():
            return


@torch.inference_mode()
def compile_step(model, N, T, draft_features=None, n=1):  # -> Namespace(cache, n, run), None where torch.compile fails
    """One decoding step over a static cache for a block of T, compiled; on CUDA also captured in a graph.

    run: ids (N, n) -> logits (N, V) of the next id; with a drafter's draft_features, for speculate, ids (1, n) ->
    logits (n, V) after each id, and the features of their states."""
    if n > T:
        return None
    cache = StaticCache(model, N, T)
    device = model.embed.weight.device
    static_ids = torch.zeros(N, n, dtype=torch.long, device=device)

    def step(ids):
        h = model(ids, 0, cache=cache)
        if draft_features is None:
            return model.logits(h[:, -1])
        return model.logits(h[0]), draft_features(h[0])
    forward = torch.compile(step, fullgraph=True, dynamic=False)
    try:
        from torch._inductor import config  # here: it costs half a second to import
        with config.patch(freezing=device.type == "cpu"):       # weights as constants, laid out for their kernels
            forward(static_ids)
    except Exception as e:                      # no compiler, an old one, an operating system without support
        why = f"{type(e).__name__}: {str(e).strip().splitlines()[0]}"
        print(f"--compile: does not work here ({why}), continuing without it", file=sys.stderr)
        return None
    if device.type != "cuda":
        return Namespace(cache=cache, n=n, run=forward)
    graphed = GraphedStep(lambda: forward(static_ids), warm=1)

    def replay(ids):
        static_ids.copy_(ids)
        return graphed()
    return Namespace(cache=cache, n=n, run=replay)


@torch.inference_mode()
def speculate(model, drafter, prompt, max_new_tokens, T, g, stats=None, compiled=None, doc_mask=False, **how):
    """ids -> yields ids. Self-speculative decoding: a drafter made of the model's heads drafts, the model verifies the
    draft in one pass (Stern et al. 2018). At temperature 0 the text equals that of generate, at others its
    distribution does. stats: a list that receives (drafted, kept) of each pass. compiled: a step of compile_step
    with the drafter's draft_features. doc_mask: as for generate."""
    def draw(logits):  # (j, V) -> j ids, the distributions they were drawn from (j, 256)
        q = distribution(logits, **how)
        u = torch.rand(len(q), generator=g, dtype=torch.double).to(q.device)
        return inverse_cdf(q, u).tolist(), q

    ids = list(prompt)
    if doc_mask:
        ids = ids[last_document(ids):]
    document = len(ids) if doc_mask and ids[-1] == EOT else None                    # begins after the prompt
    drafts = []                                 # of what follows ids[-1]
    q = None                                    # the distributions that they were drawn from
    cache = Cache(model, 1, T) if compiled is None else compiled.cache
    start = None
    end = len(ids) + max_new_tokens
    while len(ids) < end:
        # 1. the block; draft no further than it and max_new_tokens
        last = start
        start = block_start(last, len(ids), T, document)
        new = ids[-1:]
        if start != last:
            cache.rewind(cache.length)
            drafter.restart()
            new = ids[start:]
        drafts = drafts[:min(T - (len(ids) - start), end - len(ids) - 1)]
        # 2. one pass over the draft: the distributions after ids[-1] and after each draft
        new = torch.tensor([new + drafts], device=model.embed.weight.device)
        if compiled is not None and start == last and new.size(1) == compiled.n:
            logits, features = compiled.run(new)
        else:
            h = model(new, 0, cache=cache)[0]
            logits = model.logits(h[-len(drafts) - 1:])
            features = drafter.draft_features(h)
        # 3. keep what the model itself could have sampled; forget the rest
        out = verify(distribution(logits, **how), None if q is None else q[:len(drafts)], drafts, g)
        rejected = len(drafts) + 1 - len(out)
        cache.rewind(rejected)
        if stats is not None:
            stats.append((len(drafts), len(out) - 1))
        for i in out:
            ids.append(i)
            yield i
            if i == EOT:
                return
        # 4. draft again, from what was kept
        drafts, q = drafter.draft(features[:new.size(1) - rejected], ids[start:], draw)


def verify(p, q, drafts, g):  # p (n + 1, 256), q (n, 256), n ids -> the ids to write: the drafts kept, and one more
    """A draft d is kept with probability min(1, p(d) / q(d)). The first rejected one is replaced by a sample of
    (p - q)+, after the last kept one comes a sample of p (Leviathan et al. 2023): each id is distributed as p."""
    n = len(drafts)
    kept = 0
    if n:
        d = torch.tensor(drafts, device=p.device)[:, None]
        u = torch.rand(n, 1, generator=g, dtype=torch.double).to(p.device)
        kept = int((u * q.gather(1, d) < p[:n].gather(1, d)).long().cumprod(0).sum())
    rest = p[kept] if kept == n else (p[kept] - q[kept]).clamp(min=0)
    rest = rest if rest.sum() > 0 else p[kept]  # zero only through rounding
    u = torch.rand((), generator=g, dtype=torch.double).to(p.device)
    return drafts[:kept] + [int(inverse_cdf(rest, u))]


# ---- filling masked bytes

def fill_logits(model, ids, use, doc_mask=False):  # (N, n) with MASKs, a Fill -> (N, n, V): predictions of each byte
    left = ids.new_tensor(use.before).expand(len(ids), -1)
    right = ids.new_tensor(use.after).expand(len(ids), -1)
    row = torch.cat((left, ids, right), dim=1)
    h = model(row, row.size(1), document_ids(row) if doc_mask else None)
    first = len(use.before) - use.shift
    return model.logits(h[:, first:first + ids.size(1)])


def text_space(use, T):  # -> bytes of a text in a row of T positions
    return T - len(use.before) - len(use.after)


@torch.inference_mode()
def unmask(model, ids, gens, use, steps=0, order="confident", doc_mask=False, **how):
    """ids (N, n) -> yields (N, n): fills MASKs in so many passes (0: one for each), leaving everything else.

    confident: where the model is most confident (MaskGIT, Chang et al. 2022); left: from the left. ancestral: MDLM's
    sampler, which between the times t and s < t of two passes unmasks each with probability (t - s) / t, in 64 passes.
    analytic: SEDD's (its Tweedie denoiser), which takes (t - s) / t * sum of the ratios c, untempered, as that
    probability. remask: ReMDM's (Wang et al. 2025, capped), which also masks each byte that it has written again with
    probability sigma, and unmasks as many more. The last pass unmasks all. revise: see unmask_and_revise."""
    is_hole = ids == MASK
    at_random = order in ("ancestral", "analytic", "remask")
    if not steps:
        steps = 64 if at_random else int((ids == MASK).sum(1).max())
    if order == "revise":
        yield from unmask_and_revise(model, ids, gens, use, steps, doc_mask, **how)
        return
    for passes_left in range(steps, 0, -1):
        is_mask = ids == MASK
        if not is_mask.any() and order != "remask":
            return
        logits = fill_logits(model, ids, use, doc_mask)         # (N, n, V)
        new = sample_bytes(logits, gens, **how)
        again = torch.zeros_like(is_mask)
        if at_random:                           # (t - s) / t = 1 / passes_left
            u = uniforms(ids.shape[1:], gens).float().to(ids.device)
            rate = torch.ones((), device=ids.device)
            if order == "analytic" and passes_left > 1:
                rate = (logits[..., :N_BYTES].float() - math.log(N_BYTES)).exp().sum(-1)            # near 1
            if order == "remask":
                passes_done = steps - passes_left
                sigma = min(REMASK_RATE, (passes_left - 1) / max(1, passes_done))
                rate = rate + sigma * passes_done
                again = is_hole & ~is_mask & (u < sigma)
            chosen = u * passes_left <= rate
        else:
            if order == "confident":
                priority = logits[..., :N_BYTES].float().softmax(-1).amax(-1)                       # (N, n)
            else:
                priority = -torch.arange(ids.size(1), device=ids.device).float().expand(ids.shape)
            priority = priority.masked_fill(~is_mask, -torch.inf)
            rank = priority.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
            chosen = rank < (is_mask.sum(1, keepdim=True) + passes_left - 1) // passes_left         # an equal share
        ids = torch.where(is_mask & chosen, new, ids).masked_fill(again, MASK)
        yield ids


def unmask_and_revise(model, ids, gens, use, steps, doc_mask, **how):  # (N, n) -> yields (N, n)
    """Mask-Predict (Ghazvininejad et al. 2019): each pass fills all MASKs, then masks again the bytes that it was least
    sure of when it wrote them, fewer from pass to pass."""
    is_hole = ids == MASK
    n_holes = is_hole.sum(1, keepdim=True)
    confidence = torch.full(ids.shape, torch.inf, device=ids.device)
    for i in range(steps):
        is_mask = ids == MASK
        logits = fill_logits(model, ids, use, doc_mask)         # (N, n, V)
        new = sample_bytes(logits, gens, **how)
        p = logits[..., :N_BYTES].float().softmax(-1).gather(-1, new[..., None])[..., 0]
        confidence = p.where(is_mask, confidence)
        ids = new.where(is_mask, ids)
        rank = confidence.argsort(dim=1).argsort(dim=1)         # outside of holes confidence is infinite
        ids = ids.masked_fill(is_hole & (rank < n_holes * (steps - 1 - i) // steps), MASK)
        yield ids


def fill(model, ids, *args, **kwargs):  # -> the last state of unmask
    states = [ids, *unmask(model, ids, *args, **kwargs)]
    return states[-1]


def fill_long(model, ids, T, gens, use, on_pass=None, **how):  # (1, n) of any length, window by window -> (1, n)
    """Each window starts a quarter of its length before its first MASK. on_pass: is called with every state."""
    ids = ids.clone()
    n = text_space(use, T)
    while (ids == MASK).any():
        first = int((ids[0] == MASK).byte().argmax())
        a = max(0, min(first - n // 4, ids.size(1) - n))
        for state in unmask(model, ids[:, a:a + n], gens, use, **how):
            if on_pass:
                on_pass(state[0])
        ids[:, a:a + n] = state
    return ids


# ---- infilling holes of unknown length

def infill(model, objective, hp, ids, P, holes, max_new_tokens, gens, **how):  # -> bytes of each hole, did all end?
    """ids, P: as Infill.prompt returns them. Each answer is written up to the id that ends it, which starts the next.
    Stops one position short of a full row: in training its last target is always EOT."""
    stop_ids = find_use(objective, Infill).stop_ids
    spans = [[] for _ in range(holes)]
    row = torch.tensor([ids], device=model.embed.weight.device)
    for span, end in zip(spans, stop_ids):
        left = min(max_new_tokens - sum(map(len, spans)), hp.block_size - row.size(1))
        steps = []
        if left > 0:
            positions = functools.partial(objective.positions, hp=hp)
            steps = generate(model, row, left, hp.block_size, gens, P, end, positions, doc_mask=hp.doc_mask, **how)
        for i in steps:
            if int(i) == end:
                break
            span.append(int(i))
        else:
            return spans, False
        row = torch.cat((row, row.new_tensor([span + [end]])), dim=1)
    return spans, True


@torch.inference_mode()
def trim_to_suffix(model, objective, hp, left, middle, right):  # ids each -> the start of the middle
    """For a model that also predicts left to right and rarely emits EOT after a middle: trims the middle where
    the suffix fits. Of all cuts it takes the first after which the suffix's first bytes are at least a tenth as likely
    as after the best cut; a later cut may be as good, where the middle repeats the suffix."""
    use = trained_use(objective, Continue, hp)
    right = right[:SUFFIX_BYTES]
    if not right or not use or use.both_ways:
        return middle
    n = len(right)
    nats = []
    for k in range(len(middle) + 1):
        x = to_tensor(([EOT] + left + middle[:k])[n - hp.block_size:] + right, hp)
        doc = document_ids(x[:, :-1]) if hp.doc_mask else None
        logits = model.logits(model(x[:, :-1], 0, doc)[0, -n:])                     # (n, V)
        nats.append(float(F.cross_entropy(logits, x[0, -n:], reduction="sum")))
    best = min(nats)
    first = next(k for k, each in enumerate(nats) if each < best + math.log(10))
    return middle[:first]


# ---- scoring

def no_progress(n):
    pass


@torch.inference_mode()
def score(model, data, T, stride, doc_mask=False, on_bytes=no_progress):  # data (n,) uint8 -> bits, left to right
    """Window i scores bytes i * stride + 1 .. (i + 1) * stride from at most T bytes of context; with stride = T the
    windows are disjoint, and each starts with one byte of context. The first byte of all counts 8 bits. doc_mask: as in
    training. on_bytes: is called with each number of bytes that have been scored."""
    n = len(data)
    bits = 8.0
    on_bytes(1)
    # (first byte, first scored byte, end) of each
    windows = ((max(0, at + stride - T), at, min(at + stride, n - 1)) for at in range(0, n - 1, stride))
    for rows in batches(windows, lambda w: w[2] - w[0]):
        x = torch.stack([data[a:end + 1] for a, _, end in rows])                    # (rows, n + 1)
        x = x.long().to(model.embed.weight.device)
        logits = model.logits(model(x[:, :-1], 0, document_ids(x[:, :-1]) if doc_mask else None))
        nats = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="none").view(len(rows), -1)
        for row, (a, at, _) in zip(nats.cpu(), rows):
            bits += float(row[at - a:].double().sum()) / math.log(2)
        on_bytes(sum(end - at for _, at, end in rows))
    return bits


def batches(rows, length):  # -> lists of at most MAX_ROWS consecutive rows of one length
    for _, group in itertools.groupby(rows, length):
        while some := list(itertools.islice(group, MAX_ROWS)):
            yield some


@torch.inference_mode()
def score_bound(model, objective, data, hp, seed, on_bytes=no_progress):
    """data (n,) uint8 -> bits at most, standard error. The objective's bound in disjoint windows of a block, each with
    numbers of masked bytes from BOUND_SAMPLES strata. The error is estimated from differences of neighbouring strata,
    ordered by their number of targets, since each has one sample. It assumes that an objective's only strata are
    numbers of targets, as mdlm's are; where corrupt stratifies something else too, the error comes out too large."""
    g = make_rng(f"{seed},bound")
    bits = 0.0
    variance = 0.0
    device = model.embed.weight.device
    for x in data.split(objective.n_bytes(hp.block_size, hp)):
        batch = objective.corrupt(x.long().expand(BOUND_SAMPLES, -1), g, hp)
        by_stratum = (batch["tgt"] != IGNORE_INDEX).sum(1).argsort()
        batch = {k: v if isinstance(v, int) else v.to(device) for k, v in batch.items()}
        if hp.doc_mask:
            batch["doc"] = document_ids(batch["inp"])
        each = objective.nelbo(model, batch, hp).cpu().double()[by_stratum] / math.log(2)           # (draws,)
        bits += float(each.mean())
        variance += float((each[::2] - each[1::2]).square().sum()) / BOUND_SAMPLES ** 2
        on_bytes(len(x))
    return bits, variance ** 0.5


@torch.inference_mode()
def score_pseudo(model, data, T, use, doc_mask=False, on_bytes=no_progress):  # data (n,) uint8 -> bits
    """Pseudo-log-likelihood (Salazar et al. 2020): no code length, since every byte is predicted from all the others
    of its window."""
    bits = 0.0
    for x in data.split(text_space(use, T)):
        x = x.long().to(model.embed.weight.device)
        for masked in torch.arange(len(x), device=x.device).split(MAX_ROWS):
            rows = x.repeat(len(masked), 1).scatter(1, masked[:, None], MASK)
            logits = fill_logits(model, rows, use, doc_mask)
            logits = logits[torch.arange(len(masked), device=x.device), masked]
            bits += float(F.cross_entropy(logits, x[masked], reduction="sum")) / math.log(2)
            on_bytes(len(masked))
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
        fail(f"--{flag} {path or 'FILE:'}: cannot be read ({error_reason(e)}). Try a path to text")


def parse_text(flag, value):  # what a flag was given -> ids, or None
    if value is None:
        return None
    if value != "-" and not value.startswith("FILE:"):
        return encode(value)
    return list(read_text(flag, value.removeprefix("FILE:")))


def require(ids, flag):  # -> the same ids; fails where there are none
    if not ids:
        fail(f"--{flag}: is {'missing' if ids is None else 'empty'}. Try some text")
    return ids


def parse_masks(ids):  # ids of a prompt -> ids with MASK for each byte of a hole
    first, *rest = re.split(MASKS, bytes(ids))  # text, number of a hole or None, text, ...
    out = list(first)
    for digits, text in zip(rest[::2], rest[1::2]):
        length = int((digits or b"1")[:8])
        if not 0 < length < 10 ** 6:
            fail(f"--prompt: [MASK:{digits.decode()}]: a hole holds 1 to 999999 bytes. Try [MASK:4]")
        out += [MASK] * length + list(text)
    return out


def escape_control(text):  # on a terminal control characters are printed as \x1b; a pipe gets them as they are
    if not sys.stdout.isatty():
        return text
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda c: f"\\x{ord(c[0]):02x}", text)


def to_text(ids):  # -> str, without EOT
    return escape_control(decode(i for i in ids if int(i) != EOT))


def to_text_with_masks(ids):  # -> str in which MASK is a block
    return to_text(ids).replace("<MASK>", "█")


def highlight(parts, plain=("", "")):  # [(ids, is new)] -> str, on a terminal with the new parts in reverse video
    tint = ("\033[7m", "\033[0m") if sys.stdout.isatty() else plain
    return "".join(tint[0] + to_text(ids) + tint[1] if new and ids else to_text(ids) for ids, new in parts)


def split_by(ids, flags):  # n ids, n bools -> [(ids, flag)]: runs of characters with one flag
    """A character of several bytes (UTF-8) is flagged if one of them is. A stray byte stands for itself."""
    runs = []
    k = 0
    while k < len(ids):
        length = 1 + sum(first <= ids[k] < 0xf8 for first in (0xc0, 0xe0, 0xf0))    # of the character, in bytes
        end = k + 1
        while end < min(k + length, len(ids)) and 0x80 <= ids[end] < 0xc0:
            end += 1
        flag = any(flags[k:end])
        if not runs or runs[-1][1] != flag:
            runs.append(([], flag))
        runs[-1][0].extend(ids[k:end])
        k = end
    return runs


def stream(prompt, steps):  # ids, what yields more -> the ids that it yielded
    """Prints bytes as they come, a character once all its bytes are there."""
    ids = []
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for i in map(int, itertools.chain(prompt, steps)):
        ids.append(i)
        print(escape_control(decoder.decode(bytes([i] if i != EOT else []))), end="", flush=True)
    print(decoder.decode(b"", final=True), flush=True)
    return ids[len(prompt):]


def note(text):  # what is not the answer goes to standard error
    print(f"--- {text}", file=sys.stderr, flush=True)


def show_pass(ids):
    terminal = sys.stdout.isatty()
    print(f"\033[2J\033[H{to_text_with_masks(ids)}" if terminal else f"--- pass\n{to_text_with_masks(ids)}", flush=True)
    time.sleep(0.05 if terminal else 0)


@contextlib.contextmanager
def progress(total, prints=False):  # -> f(n), to be called whenever n more of the total bytes are done
    """A bar on a terminal, elsewhere a line every REPORT_SECONDS; both on standard error. prints: the work prints its
    results as they come, so that a terminal needs no bar."""
    if prints and sys.stdout.isatty():
        yield no_progress
        return
    if sys.stderr.isatty():
        with tqdm(total=total, unit="B", unit_scale=True, leave=False) as bar:
            yield bar.update
        return
    start = time.monotonic()
    last_line = start
    done = 0

    def update(n):
        nonlocal done, last_line
        done += n
        now = time.monotonic()
        if now - last_line < REPORT_SECONDS:
            return
        last_line = now
        left = (now - start) / done * (total - done)
        note(f"{done:,} of {total:,} bytes, about {left:.0f} s left")
    yield update


def each_sample(flags):  # -> yields [generator] for each sample, with a heading if there are several
    for i, g in enumerate(sample_generators(flags.seed, flags.num_samples)):
        if flags.num_samples > 1:
            print(f"--- sample {i + 1}")
        yield [g]


def to_tensor(ids, hp):  # list or (n,) of any integers -> (1, n) long on the model's device
    return torch.as_tensor(ids).long().to(hp.device)[None]


def sampling_settings(flags):  # -> keyword arguments of sample_bytes
    return dict(temperature=flags.temperature, top_k=flags.top_k, top_p=flags.top_p)


def greedy_settings(flags):  # the same for holes and repairs, which take the most likely byte by default
    # at temperature 0 several samples would be alike, and top_k and top_p have no effect
    if flags.num_samples > 1 or flags.given & SAMPLING_FLAGS:
        return sampling_settings(flags)
    return dict(temperature=0.0)


# ---- modes: (model, objective, hp, flags, held-out bytes) -> prints
# a flag is None where it was not given; without a text a mode demonstrates itself on the held-out bytes

def continue_mode(model, objective, hp, flags, held_out):
    """Continues a prompt as the objective's Continue says."""
    use = find_use(objective, Continue)
    T = hp.block_size
    prompt = flags.prompt
    if prompt is None:
        prompt = held_out[:T // 2].tolist()
        print(f"held-out text, of which the first {len(prompt)} bytes are the prompt:")
        print(f"{to_text(held_out[:T].tolist())}\n--- the model's continuation:")
    prompt = prompt or [EOT]                    # an empty prompt is the start of a document
    if use.both_ways:                           # one block holds the prompt and what is written, half of it at most
        space = max(1, T - len(use.before) - len(use.after) - min(flags.max_new_tokens, T // 2))
        if len(prompt) > space:
            note(f"reads the last {space} of {len(prompt)} bytes of the prompt, which leave space in the block")
        prompt = prompt[-space:]
    draft = find_use(objective, Draft)
    drafter = draft.make_drafter(model, hp) if draft and flags.speculate else None
    if drafter:
        return speculate_mode(model, drafter, hp, flags, prompt)
    ids = to_tensor([*use.before, *prompt, *use.after], hp).expand(flags.num_samples, -1)
    prefix = ids.size(1) if use.both_ways else 0
    compiled = compile_step(model, flags.num_samples, T) if flags.compile else None
    gens = sample_generators(flags.seed, flags.num_samples)
    written = generate(model, ids, flags.max_new_tokens, T, gens, prefix, compiled=compiled, doc_mask=hp.doc_mask,
                       **sampling_settings(flags))
    if flags.num_samples > 1:
        columns = [byte.tolist() for byte in written]
        for i, _ in enumerate(each_sample(flags)):
            print(to_text(prompt + [column[i] for column in columns]))
        return
    written = stream(prompt, written)
    if prefix and len(written) < flags.max_new_tokens and written[-1] != EOT:
        note(f"the block of {T} is full")


def speculate_mode(model, drafter, hp, flags, prompt):
    """Writes, then prints on standard error how many drafts were kept."""
    T, k = hp.block_size, drafter.k
    compiled = compile_step(model, 1, T, drafter.draft_features, k + 1) if flags.compile else None
    stats = []
    n = 0
    for [g] in each_sample(flags):
        written = speculate(model, drafter, prompt, flags.max_new_tokens, T, g, stats, compiled, hp.doc_mask,
                            **sampling_settings(flags))
        n += len(stream(prompt, written))
    shares = []                                 # of the passes that drafted j bytes: the share that kept the j-th
    for j in range(1, k + 1):
        kept_it = [kept >= j for drafted, kept in stats if drafted >= j]
        shares.append(f"{sum(kept_it) / max(1, len(kept_it)):.0%}")
    note(f"{n / max(1, len(stats)):.2f} bytes per forward pass; drafts kept: {' '.join(shares)}")


def fill_mode(model, objective, hp, flags, held_out):
    """Fills masked bytes. A model that was trained at any mask rate also continues a prompt, in the same block."""
    use = find_use(objective, Fill)
    T = hp.block_size
    order = flags.order or use.orders[0]
    if order not in use.orders:
        fail(f"--order {order}: unknown to {objective.name}. Try {' or '.join(use.orders)}")
    if flags.prompt is None:
        clean = held_out[:text_space(use, T)].long()
        is_masked = torch.rand(len(clean), generator=make_rng("demonstration")) < 0.15
        is_masked[-1] |= ~is_masked.any()       # at least one
        ids = clean.masked_fill(is_masked, MASK).tolist()
        print(f"clean:\n{to_text(clean)}\n--- {ids.count(MASK)} bytes masked:\n{to_text_with_masks(ids)}")
    else:
        ids = parse_masks(flags.prompt)
    if MASK in ids:
        how = greedy_settings(flags)
    else:
        if not use.trained_at_any_rate:
            fail("--prompt: has no hole. Try one with [MASK] or [MASK:4] in it")
        if len(ids) > T // 2:
            note(f"reads the last {T // 2} of {len(ids)} bytes of the prompt, which leave space in the block")
        ids = ids[-(T // 2):]
        if T - len(ids) < flags.max_new_tokens and "max_new_tokens" in flags.given:
            note(f"writes {T - len(ids)} bytes, which fill the block of {T}")
        ids += [MASK] * min(flags.max_new_tokens, T - len(ids))
        how = sampling_settings(flags) if flags.given & SAMPLING_FLAGS else DIFFUSION_SAMPLING
    on_pass = show_pass if flags.show else None
    for gens in each_sample(flags):
        out = fill_long(model, to_tensor(ids, hp), T, gens, use, on_pass, steps=flags.steps, order=order,
                        doc_mask=hp.doc_mask, **how)[0].tolist()
        if flags.prompt is None:
            correct = int((torch.tensor(out) == clean)[is_masked].sum())
            print(f"--- filled, {correct} of {ids.count(MASK)} masked bytes as in the original:\n{to_text(out)}")
        else:
            print(highlight(split_by(out, [i == MASK for i in ids])))


def infill_mode(model, objective, hp, flags, held_out):
    """Writes what belongs in the holes of a prompt, or between --prefix and --suffix."""
    use = find_use(objective, Infill)
    T = hp.block_size
    pieces = pieces_around_holes(flags, held_out[:T // 2].tolist())
    holes = len(pieces) - 1
    if not 1 <= holes <= len(use.stop_ids):
        fail(f"--prompt: has {holes} holes, {objective.name} fills 1 to {len(use.stop_ids)}. Try one <extra_id_0>")
    near = pieces
    if holes == 1:
        near = nearest_bytes(*pieces, T - 8 - min(flags.max_new_tokens, T // 3))
    if near != pieces:
        note(f"reads the last {len(near[0])} bytes before the hole and the first {len(near[1])} after it")
    m = flags.max_new_tokens // holes if "max_new_tokens" in flags.given else HOLE_BYTES
    ids, P = use.prompt(near, m, hp)
    if len(ids) + holes > T:
        fail(f"--prompt: {len(ids)} positions with its holes leave no space in a block of {T}. Try a shorter text")
    how = greedy_settings(flags)
    for gens in each_sample(flags):
        spans, ended = infill(model, objective, hp, ids, P, holes, flags.max_new_tokens, gens, **how)
        written = len(spans[0])
        if holes == 1:
            spans = [trim_to_suffix(model, objective, hp, near[0], spans[0], near[1])]
        text = list(pieces[0])
        is_new = [False] * len(text)
        for span, piece in zip(spans, pieces[1:]):
            text += span + piece
            is_new += [True] * len(span) + [False] * len(piece)
        print(highlight(split_by(text, is_new)), flush=True)
        if len(spans[0]) < written:
            note("trimmed where the suffix fits best")
        elif not ended:
            note("did not end by itself. Try a larger --max_new_tokens, or a shorter text")


def pieces_around_holes(flags, held_out):  # -> the texts before, between and after the holes, lists of ids
    """Of --prompt, or of --prefix and --suffix; without any, held-out text with a hole of 4 bytes in the middle."""
    sides = [flags.prefix, flags.suffix]
    if flags.prompt is not None:
        if sides != [None, None]:
            fail("--prompt: contains the text around its holes. Try it without --prefix and --suffix")
        return [list(piece) for piece in re.split(HOLES, bytes(flags.prompt))]
    if sides != [None, None]:
        return [side or [] for side in sides]
    middle = len(held_out) // 2
    pieces = [held_out[:middle], held_out[middle + 4:]]
    print(f"clean:\n{to_text(held_out)}\n--- with a hole:\n{to_text(pieces[0])}[..]{to_text(pieces[1])}\n--- filled:")
    return pieces


def nearest_bytes(left, right, space):  # -> left, right: of a long text the bytes nearest to its one hole
    """Half of the space for each side, more where the other is shorter."""
    space = max(2, space)
    n_left = max(space // 2, space - len(right))
    return [left[-n_left:], right[:space - min(len(left), n_left)]]


def repair_mode(model, objective, hp, flags, held_out):
    """Writes the clean text of a noisy one, piece by piece of a long text; [MASK] may stand in it."""
    T = hp.block_size
    n = objective.n_bytes(T, hp)
    in_place = find_use(objective, Repair).in_place
    if flags.prompt is None:
        batch = demo_batch(objective, hp, held_out)
        P = T if in_place else int(batch["prefix"][0]) - 1
        noisy = batch["inp"][0, :P].tolist()
        print(f"clean:\n{to_text(held_out[:n])}\n--- noisy:\n{to_text_with_masks(noisy)}\n--- repaired:")
    else:
        noisy = parse_masks(flags.prompt)
    limit = flags.max_new_tokens if "max_new_tokens" in flags.given else None
    how = greedy_settings(flags)
    for gens in each_sample(flags):
        with progress(len(noisy), prints=True) as on_bytes:
            written = stream([], itertools.islice(repair(model, objective, noisy, hp, gens, on_bytes, **how), limit))
        if len(written) == limit:
            note(f"stopped after {limit} bytes")


@torch.inference_mode()
def repair(model, objective, noisy, hp, gens, on_bytes=no_progress, **how):  # ids of any number -> yields bytes
    T = hp.block_size
    use = find_use(objective, Repair)
    n = objective.n_bytes(T, hp)
    for piece in cut_after_spaces(noisy, repair_size(objective, noisy, hp)):
        if use.in_place:
            x = to_tensor(piece, hp)
            h = model(x, x.size(1), document_ids(x) if hp.doc_mask else None)
            yield from sample_bytes(model.logits(h), gens, **how)[0].tolist()
        else:
            ids = to_tensor([i for i in piece if i != EOT] + [SEP], hp)             # a copied EOT would end the row
            P = ids.size(1)
            positions = functools.partial(objective.positions, hp=hp)
            limit = min(T + 1 - P, n + 1)       # no target was longer in training
            written = map(int, generate(model, ids, limit, T, gens, P, positions=positions, **how))
            yield from (i for i in written if i != EOT)
        on_bytes(len(piece))


def repair_size(objective, noisy, hp):  # -> ids that are repaired at once
    n = objective.n_bytes(hp.block_size, hp)
    max_bytes = find_use(objective, Repair).max_bytes(hp)
    if max_bytes:
        return min(n, max_bytes)
    if n < len(noisy) <= hp.block_size - 1 - n:                 # a source may be longer than its text of n bytes
        return len(noisy)
    return n


def cut_after_spaces(ids, n):  # -> yields pieces of at most n ids
    """Pieces of about equal length. Each ends after white space, but not right before a hole; without white space it
    ends between two characters."""
    a = 0
    while a < len(ids):
        left = len(ids) - a
        goal = a + math.ceil(left / math.ceil(left / n))
        end = goal
        if left > n:
            places = [i for i in range(a + n // 4 + 1, a + n + 1) if ids[i - 1] in SPACES and ids[i] != MASK]
            end = min(places, key=lambda i: abs(i - goal), default=goal)
            while end > max(a + 1, goal - 3) and 0x80 <= ids[end] < 0xc0:           # inside of a character (UTF-8)
                end -= 1
        yield ids[a:end]
        a = end


def demo_batch(objective, hp, held_out):  # -> a batch of one row of held-out text, corrupted as in training
    n = objective.n_bytes(hp.block_size, hp)
    if len(held_out) < n:
        fail("the checkpoint's held-out text is shorter than a row. Try --prompt")
    return objective.corrupt(held_out[:n].long()[None], make_rng("demonstration"), hp)


def mark_mode(model, objective, hp, flags, held_out):
    """Marks the bytes that the model finds suspicious; lists the most suspicious ones."""
    predict = find_use(objective, Mark).predict
    if flags.prompt is None:
        g = make_rng("demonstration")
        clean = to_tensor(held_out[:hp.block_size], hp)[0]
        is_wrong = torch.rand(clean.shape, generator=g).to(hp.device) < 0.05
        x = torch.where(is_wrong, random_bytes(clean.shape, g).to(hp.device), clean)
        is_wrong = x != clean
        print(f"clean:\n{to_text(clean)}\n--- {int(is_wrong.sum())} bytes replaced at random:\n{to_text(x)}")
        print("--- marked: bytes that the model finds more likely wrong than right:")
    else:
        x = to_tensor(require(flags.prompt, "prompt"), hp)[0]
    p = torch.cat([predict(model, part[None])[0] for part in x.split(hp.block_size)]).sigmoid()
    marked = p > 0.5
    print(highlight(split_by(x.tolist(), marked.tolist()), ("«", "»")))
    if not marked.any():
        print("--- no byte is marked: none is more likely wrong than right. The most suspicious ones:")
    for i in p.argsort(descending=True)[:10].tolist():
        byte = repr(bytes([int(x[i])]))[1:]
        print(f"  byte {i:4d}  {byte:6s} is wrong with probability {float(p[i]):.2f}")
    if flags.prompt is None:
        hits = int((marked & is_wrong).sum())
        print(f"--- {hits} of {int(is_wrong.sum())} wrong bytes marked, {hits} of {int(marked.sum())} marks correct")


def follow_mode(model, objective, hp, flags, held_out):
    """Prints the probability that --suffix follows --prefix."""
    predict = find_use(objective, Follow).predict

    def follows(first, second):  # -> the answer in words
        p = float(predict(model, first, second, hp).sigmoid())
        return f"with probability {p:.3f}: more likely than not, it does{'' if p > 0.5 else ' not'} (.5 is chance)"
    if flags.prefix is not None or flags.suffix is not None:
        first = require(flags.prefix, "prefix")
        second = require(flags.suffix, "suffix")
        print(f"the second text follows the first {follows(first, second)}")
        return
    n = min(len(held_out) // 4, hp.block_size // 2)
    first = held_out[:n].tolist()
    pairs = {"its continuation": held_out[n:2 * n].tolist(), "a later passage": held_out[-n:].tolist()}
    print(f"first text:\n{to_text(first)}")
    for title, second in pairs.items():
        print(f"--- {title}:\n{to_text(second)}\n--- follows {follows(first, second)}")


def embed_texts(model, embed, texts, T):  # list of ids -> (N, C) float32 of length 1
    """By embed(model, x (B, n)) -> (B, C). A long text gets the mean over its blocks, weighed by length."""
    blocks = []                                 # (number of its text, ids)
    for i, text in enumerate(texts):
        for a in range(0, max(1, len(text)), T):
            blocks.append((i, text[a:a + T] or [EOT]))          # an empty text is one EOT

    def length(block):
        return len(block[1])
    blocks.sort(key=length)                     # blocks of one length can share a batch
    owners = []
    sums = []
    for some in batches(blocks, length):
        owner, rows = zip(*some)
        e = embed(model, torch.tensor(rows, device=model.embed.weight.device)).cpu()
        owners += owner
        sums.append(len(rows[0]) * e)
    sums = torch.cat(sums)
    out = torch.zeros(len(texts), sums.size(1)).index_add(0, torch.tensor(owners), sums)
    return F.normalize(out, dim=1)


def search_mode(model, objective, hp, flags, held_out):
    """Prints the three lines of --corpus nearest to --query; without a query the lines' embeddings."""
    embed = find_use(objective, Search).embed
    T = min(hp.block_size, len(held_out))
    if flags.corpus is None:
        texts = {f"passage {i}": p.tolist() for i, p in enumerate(held_out.split(T // 2), 1)}
    else:
        lines = enumerate(read_text("corpus", flags.corpus).splitlines(), 1)
        texts = require({f"line {i}": list(line) for i, line in lines if line.strip()}, "corpus")
    titles = [*texts]
    vectors = embed_texts(model, embed, [*texts.values()], T)                       # (N, C)
    if flags.query is None and flags.corpus is not None:
        for title, e in zip(titles, vectors.tolist()):
            print(" ".join(f"{v:.5f}" for v in e), title, sep="\t")
        return
    if flags.query is None:
        query = held_out[T // 4:T // 4 + T // 2].tolist()
        print(f"query, which overlaps passages 1 and 2:\n{to_text(query)}")
    else:
        query = require(flags.query, "query")
        print(f"query:\n{to_text(query)}")
    similarity = vectors @ embed_texts(model, embed, [query], T)[0]
    for i in similarity.argsort(descending=True)[:3].tolist():
        print(f"--- similarity {float(similarity[i]):.3f}, {titles[i]}:\n{to_text(texts[titles[i]][:T])}")


def seam_mode(model, objective, hp, flags, held_out):
    """Rotates a text back to where the model finds its first byte."""
    T = hp.block_size
    shift = T // 3
    ids = held_out[:T].roll(shift).tolist() if flags.prompt is None else require(flags.prompt, "prompt")
    if len(ids) > T:
        note(f"reads the first {T} of {len(ids)} bytes, which fill the block")
        ids = ids[:T]
    p = find_use(objective, Seam).predict(model, to_tensor(ids, hp))[0].softmax(0)
    seam = int(p.argmax())
    truth = f"; the original starts at byte {shift % len(ids)}" if flags.prompt is None else ""
    print(f"rotated:\n{to_text(ids)}")
    print(f"--- rotated back to start at byte {seam} (probability {float(p[seam]):.2f}{truth}):")
    print(to_text(ids[seam:] + ids[:seam]))


def score_mode(model, objective, hp, flags, held_out):
    """Bits per byte of a file: exact, a bound, or a pseudo-likelihood, and prints which. Fails for objectives that
    have none of these."""
    name = objective.name
    T = hp.block_size
    fill_use = trained_use(objective, Fill, hp)
    data = from_bytes(read_text("score", "-")) if flags.score == "-" else map_file(flags.score, "--score")
    exact = objective.bpb in ("loss", "causal") and trained_use(objective, Continue, hp) is not None
    if not exact and not objective.nelbo and not fill_use:
        those = " ".join(n for n, o in OBJECTIVES.items() if o.nelbo or find_use(o, Continue) or find_use(o, Fill))
        fail(f"--score: {name} defines no probability of a text. Try a run trained as {those}")
    stride = flags.stride or max(1, T // 2)
    if flags.stride and not exact:
        fail(f"--stride: {name} scores windows of the block as a whole. Try without it")
    if stride > T:
        fail(f"--stride {stride}: is more than the block of {T}. Try --stride {T}")
    if not len(data):
        fail(f"--score {flags.score}: is empty. Try some text")

    def print_bits(bits, kind):
        bits /= len(data)
        figures = f"{bits:.4f} bits per byte ({bits * math.log(2):.4f} nats), {len(data):,} bytes"
        print(f"{flags.score}: {figures}, {kind}", flush=True)
    if exact:
        with progress(len(data)) as on_bytes:
            bits = score(model, data, T, stride, hp.doc_mask, on_bytes)
        print_bits(bits, f"windows of {T}, stride {stride}")
    if objective.nelbo:
        with progress(len(data)) as on_bytes:
            bits, error = score_bound(model, objective, data, hp, flags.seed, on_bytes)
        n = objective.n_bytes(T, hp)
        print_bits(bits, f"{name}'s upper bound, standard error {error / len(data):.4f}, disjoint windows of {n}")
    elif fill_use:
        with progress(len(data)) as on_bytes:
            bits = score_pseudo(model, data, T, fill_use, hp.doc_mask, on_bytes)
        print_bits(bits, f"pseudo: every byte given all others of its window of {text_space(fill_use, T)}")
    print(f"compressors: {compressor_bits(data)}")


# ---- which mode, and the flags that it reads in addition to COMMON

MODES = {
    Continue: (continue_mode, {"prompt", "num_samples", "max_new_tokens", "compile"} | SAMPLING_FLAGS),
    Fill: (fill_mode, {"prompt", "num_samples", "order", "steps", "show"} | SAMPLING_FLAGS),
    Infill: (infill_mode, {"prompt", "num_samples", "prefix", "suffix", "max_new_tokens"} | SAMPLING_FLAGS),
    Repair: (repair_mode, {"prompt", "num_samples", "max_new_tokens"} | SAMPLING_FLAGS),
    Mark: (mark_mode, {"prompt"}),
    Follow: (follow_mode, {"prefix", "suffix"}),
    Search: (search_mode, {"query", "corpus"}),
    Seam: (seam_mode, {"prompt"}),
}


def choose_mode(objective, hp, flags):  # -> mode, the flags that it reads
    """An objective's first use. Where that fills holes, a prompt without a hole is continued if the objective can
    do so, and so is any prompt if its settings did not train holes."""
    if flags.score is not None:
        return score_mode, {"score", "stride"}
    if not objective.uses:
        hint = "--score with a text file" if objective.nelbo else "adding one in objectives.py"
        fail(f"--objective {objective.name}: has no use. Try {hint}")
    use = objective.uses[0]
    kind = type(use)
    has_hole = flags.prompt is not None and re.search(MASKS if kind is Fill else HOLES, bytes(flags.prompt))
    if kind is Continue and not use.is_trained(hp):
        fail(f"--out_dir: this {objective.name} model was not trained to continue a text. Try another run")
    if kind in (Fill, Infill):
        trained = use.is_trained(hp)
        continues = trained_use(objective, Continue, hp)
        if not trained and not continues:
            fail(f"--out_dir: this {objective.name} model was not trained to fill holes. Try another run")
        if continues and (not trained or flags.prompt is not None and not has_hole):
            kind = Continue
    mode, read = MODES[kind]
    if kind is Continue and find_use(objective, Draft):
        read = read | {"speculate"}
    if kind is Fill and use.trained_at_any_rate and flags.prompt is not None and not has_hole:
        read = read | {"max_new_tokens"}
    return mode, read


def report_unread_markers(mode, name, members, flags):
    """Prints a line on standard error for each marker of a hole that a mode takes for text."""
    reads = {fill_mode: MASKS, repair_mode: MASKS, infill_mode: HOLES}
    for flag in ("prompt", "prefix", "suffix"):
        for marker in (MASKS, HOLES):
            found = re.search(marker, bytes(getattr(flags, flag) or []))
            if not found or flag == "prompt" and reads.get(mode) == marker:
                continue
            hint = "Use a model that fills holes"
            if reads.get(mode) == marker:
                hint = "Put it into --prompt"
            elif mode in reads:
                hint = f"Write {'[MASK]' if reads[mode] == MASKS else '<extra_id_0>'} instead"
            for other, objective in members.items():
                others_mode, _ = MODES[type(objective.uses[0])] if objective.uses else (None, None)
                if flag == "prompt" and other != name and reads.get(others_mode) == marker:
                    hint = f"Try --objective {other}"
            note(f"--{flag}: {found[0].decode()} is read as text, {name} does not fill it here. {hint}")


def parse(argv):  # -> Namespace of every flag; texts as ids, None where they were not given
    specs = {name: flag for flags in FLAGS.values() for name, flag in flags.items()}
    given = vars(make_parser("python sample.py", __doc__, FLAGS).parse_args(argv))
    check({name: flag.default for name, flag in specs.items()} | given, specs)
    flags = {name: None if flag.default == "" else flag.default for name, flag in specs.items()} | given
    if [*given.values()].count("-") > 1:
        fail("-: standard input can be read once. Try FILE:path for the other text")
    texts = {name: parse_text(name, flags[name]) for name in ("prompt", "prefix", "suffix", "query")}
    return Namespace(**flags | texts, given=set(given))


@preserve_torch_state()
def main(argv=None):
    """Fails where the flags ask for something that the model cannot do."""
    flags = parse(sys.argv[1:] if argv is None else argv)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    path = flags.out_dir or newest_run()
    exact = flags.score is not None and flags.dtype == "auto"           # scores are worth the slower float32
    model, hp, ckpt = load_run(path, flags.device, "float32" if exact else flags.dtype)
    members = {m.name: m for _, m in members_of(get_objective(hp))}
    name = flags.objective or next(iter(members))
    if name not in members:
        fail(f"--objective {name}: {path} was trained as {hp.objective}. Try --objective {next(iter(members))}")
    if flags.score is not None and not flags.objective:         # the first that can
        name = next((n for n, member in members.items() if member.bpb or trained_use(member, Fill, hp)), name)
    objective = members[name]
    mode, read = choose_mode(objective, hp, flags)
    for flag in sorted(flags.given - read - COMMON):        # ignoring it would look as if it had no effect
        if mode is score_mode:
            fail(f"--{flag}: --score takes no {flag}. Try one of the two")
        users = [n for n, o in OBJECTIVES.items() if o.uses and flag in MODES[type(o.uses[0])][1] and n != name]
        hint = f"a run trained as {' or '.join(users)}" if users else "without it"
        for other in users:
            if other in members:
                hint = f"--objective {other}"
        if flag == "stride":
            hint = "with --score"
        fail(f"--{flag}: not used by {name} here. Try {hint}")
    report_unread_markers(mode, name, members, flags)
    try:
        mode(model, objective, hp, flags, ckpt["held_out"])
    except RuntimeError as e:
        if not is_out_of_memory(e):
            raise
        fail(f"not enough memory ({str(e).splitlines()[0][:80]}). Try a smaller --num_samples, or less text")


if __name__ == "__main__":
    if sys.stdout is None:
        fail("standard output is closed, but that is where the answer goes. Try without >&-")
    run_program(main)
