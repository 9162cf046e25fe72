"""Use a trained model for what it was trained to do. Examples, each with the objectives that it works with:

    python sample.py                                                any objective: a demonstration on held-out text
    python sample.py --prompt "def main(" --num_samples 3           clm, mtp, prefix, ul2, fim, hybrid, bd3lm: continue
    python sample.py --prompt "import [MASK:2], sys"                mlm, hybrid: fill holes of known length
    python sample.py --prompt "class [MASK:40]:" --steps 20 --show  mdlm, sedd: write in any order, here in 20 passes
    python sample.py --prompt "ran<extra_id_0>(10): pri<extra_id_1>(i)"     span, ul2: fill holes of unknown length
    python sample.py --prefix "def add(a, b):" --suffix "return c"  fim, span, ul2: write between two texts
    python sample.py --prompt "def main([MASK]) retu[MASK] 0"       bart: repair a text, fill what is missing
    python sample.py --prompt "a text with a typq in it"            electra: mark the bytes that look wrong
    python sample.py --prefix "Once upon" --suffix "a time"         nsp: does the second text follow the first?
    python sample.py --query "open a file" --corpus book.txt        contrastive: find the lines nearest to a text
    python sample.py --prompt "dog. The quick brown fox jumps over the lazy "       rotation: find where it began

Add --out_dir out/NAME to use another run than the latest. A text may also be FILE:path. Only these are special in a
prompt, to those that fill: [MASK], a hole of a byte (bart: of any length); [MASK:4], of 4; <extra_id_0>, of any length.
All models read across the ends of documents, whether or not they were trained with --doc_mask.
"""
# N samples, n ids, T = block_size, V outputs of the byte head, P ids of a prefix; how: temperature, top_k and top_p
import codecs
import inspect
import itertools
import math
import re
import sys

from data import EOT, MASK, SENTINEL, SEP, Flag, fail, make_rng
from model import Cache
from objectives import N_BYTES, Fill, find_use, get_members, inverse_cdf
from run import DEVICE_FLAGS, GraphedStep, load_run, make_parser, newest_run, run_program
import torch
import torch.nn.functional as F
from tqdm import tqdm

GREEDY = dict(temperature=0.0)                  # the default for holes and repairs
DIFFUSION_SAMPLING = dict(temperature=1.0, top_p=0.8)           # the default for text that diffusion writes
END_THRESHOLD = 0.15                            # an infilled hole ends once its end is at least so likely
HOLE_BYTES = 4                                  # expected in a hole of unknown length
SUFFIX_BYTES = 16                               # of the suffix, which decide where a middle is trimmed
SPACES = {EOT, *b" \t\n\v\f\r"}                 # bytes after which a long text may be cut
MASKS, HOLES = rb"\[MASK(?::(\d{1,6}))?\]", rb"<extra_id_(\d+)>"              # markers in a prompt
MARKERS = {"infill": HOLES, "fill": MASKS, "repair": MASKS}     # those that a mode reads

FLAGS = {
    "what": {
        "out_dir": Flag("", "run folder or checkpoint file; without it the latest run under out/"),
        "objective": Flag("", "of a mixture, the member to use; without it the first that fits the texts"),
        "prompt": Flag("", "the text to continue, fill, repair or examine; --prompt=-x where it starts with a dash"),
        "prefix": Flag("", "the text before a hole; nsp: the first text"),
        "suffix": Flag("", "the text after a hole; nsp: the second text"),
        "query": Flag("", "contrastive: the text to look for"),
        "corpus": Flag("", "contrastive: file whose lines to search, each by its first block_size bytes"),
    },
    "how": {
        "max_new_tokens": Flag(300, "bytes to write at most; given, above 16 a hole: ul2 in long spans", 0, 1 << 40),
        "num_samples": Flag(1, "number of samples; sample i is seeded with (seed, i)", 1, 1 << 16),
        "temperature": Flag(0.8, "randomness; 0 always takes the most likely byte: the default for holes and repairs. "
                                 "mdlm, sedd, bd3lm write at 1 with top_p .8", 0.0, 1e6),
        "top_k": Flag(0, "sample from the k most likely bytes, 0 for all", 0, 1 << 40),
        "top_p": Flag(1.0, "sample from the most likely bytes that together have this probability", 0.0, 1.0),
        "order": Flag("", "of filling [MASK]s; analytic: sedd", choices=("confident", "left", "ancestral", "analytic")),
        "steps": Flag(0, "passes that fill [MASK]s (bd3lm: of a block); 0: one for each, or 64 where mdlm and sedd "
                         "fill in order ancestral or analytic", 0, 1 << 20),
        "show": Flag(False, "print every pass that fills [MASK]s"),
        "speculate": Flag(True, "mtp: the extra heads draft bytes that the first head verifies"),
        "compile": Flag(False, "torch.compile the decoding step: slow to start, faster for long texts"),
        "seed": Flag(1, "of the samples", 0, 2 ** 31),
    } | DEVICE_FLAGS,
}
COMMON = {"out_dir", "objective", "seed", "device", "dtype"}
SAMPLING = {"temperature", "top_k", "top_p"}
TEXTS = {"prompt", "prefix", "suffix", "query", "corpus"}


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
        stays = p.cumsum(-1) - p < top_p
        stays[..., 0] = True                    # at top_p 0, too
        stays[..., top_k or p.size(-1):] = False
        p = torch.zeros_like(p).scatter(-1, ids, p * stays)
    return p / p.sum(-1, keepdim=True)


def draw(p, g):  # (..., 256) -> bytes (...)
    return inverse_cdf(p, torch.rand(p.shape[:-1], generator=g, dtype=torch.double).to(p.device))


def sample_byte(logits, g, stop_id=None, **how):  # (N, V) -> ids (N,)
    """stop_id ends a hole as soon as it and EOT together have a probability of END_THRESHOLD; neither is sampled."""
    if stop_id is None:
        return draw(distribution(logits, **how), g)
    stops = logits.softmax(-1)[:, list({stop_id, EOT})].sum(1) >= END_THRESHOLD
    logits = logits.clone()
    logits[:, EOT] = -torch.inf
    return draw(distribution(logits, **how), g).masked_fill(stops, stop_id)


# ---- continuing
@torch.inference_mode()
def generate(model, prompt, max_new_tokens, T, g, prefix=0, stop_id=None, positions=None, hp=None, compile=False,
             **how):
    """prompt (N, n) -> yields (N,), on the CPU: continues each row, one id a row at a time; a row that wrote EOT
    continues with EOT. stop_id: what ends a hole, for sample_byte. positions, hp: the objective's, for prefix rows.

    prefix 0: causal; when the block of T is full, its last half is encoded again. prefix P: the first P positions
    of the prompt are read both ways; generation ends where the block is full, so the prompt must leave space in it."""
    device = model.embed.weight.device
    ids = prompt.cpu()
    ended = torch.zeros(len(ids), dtype=torch.bool)
    cache = Cache(model, len(ids), T)
    start = max(0, ids.size(1) - T)             # of the block in ids
    new = ids[:, start:]                        # ids that the cache lacks

    def step(new, at=None):                     # at: positions, None where they are 0, 1, 2, ...
        return model.logits(model(new.to(device), prefix, cache=cache, positions=at)[:, -1])
    fast_step = make_fast_step(step, ids[:, :1], device, compile)
    for _ in range(max_new_tokens):
        if ids.size(1) - start > T:
            if prefix:                          # it ends with its block
                return
            start = ids.size(1) - T // 2        # the next T / 2 bytes are cheap again
            cache.length.zero_()
            new = ids[:, start:]
        at = positions(ids, ids.new_full((len(ids),), prefix), hp)[:, -new.size(1):].to(device) if positions else None
        logits = step(new, at) if positions or new.size(1) > 1 else fast_step(new)
        byte = sample_byte(logits.cpu(), g, stop_id, **how).masked_fill(ended, EOT)
        ended |= byte == EOT
        new = byte[:, None]
        ids = torch.cat((ids, new), dim=1)
        yield byte
        if ended.all():
            return


def make_fast_step(step, ids, device, compile):  # step: ids -> tensors; ids: of the shape that it will get -> a step
    """Compiled where asked for; on CUDA its second call is captured in a graph, which it and later calls replay."""
    step = torch.compile(step, fullgraph=True, dynamic=False) if compile else step
    if device.type != "cuda":
        return step
    static_ids = torch.zeros_like(ids, device=device)
    graphed = GraphedStep(lambda: step(static_ids), warm=1)

    def replay(ids):
        static_ids.copy_(ids)
        return graphed()
    return replay


@torch.inference_mode()
def generate_drafted(model, draft, prompt, max_new_tokens, T, g, stats, compile=False, **how):
    """ids -> yields ids. Self-speculative decoding: heads of the model draft, the model verifies the draft in one pass
    (Stern et al. 2018). At temperature 0 the text equals that of generate, at others its distribution does. draft:
    Continue.drafter's function. stats: a list that receives (drafted, kept) of each pass."""
    ids = list(prompt)
    device = model.embed.weight.device
    end = len(ids) + max_new_tokens
    start = max(0, len(ids) - T)                # of the block in ids
    cache = Cache(model, 1, T)
    drafts = []                                 # of what follows ids[-1]
    q = torch.zeros(0, N_BYTES)                 # the distributions that they were drawn from

    def step(new):  # (1, m) -> logits of the next id (m, V), of the k after it (m, k, V)
        h = model(new.to(device), 0, cache=cache)[0]
        return model.logits(h), draft(model, h)
    k = draft(model, model.embed.weight[:1]).size(1)
    full_step = make_fast_step(step, torch.zeros(1, k + 1, dtype=torch.long), device, compile)
    while len(ids) < end:
        # 1. the block; draft no further than it and max_new_tokens
        if len(ids) - start > T:
            start = len(ids) - T // 2
            cache.length.zero_()
        drafts = drafts[:min(T - (len(ids) - start), end - len(ids) - 1)]
        # 2. one pass over what the cache lacks: the distributions after ids[-1] and after each draft
        new = torch.tensor([ids[start + int(cache.length):] + drafts])
        logits, ahead = full_step(new) if new.size(1) == k + 1 else step(new)
        # 3. keep what the model itself could have sampled; forget the rest
        n = len(drafts)
        out = verify(distribution(logits[-n - 1:].cpu(), **how), q, drafts, g)
        cache.length -= n + 1 - len(out)
        stats.append((n, len(out) - 1))
        for i in out:
            ids.append(i)
            yield i
            if i == EOT:
                return
        # 4. draft again, from the state of the last kept draft
        q = distribution(ahead[len(ahead) - n - 2 + len(out)].cpu(), **how)
        drafts = draw(q, g).tolist()


def verify(p, q, drafts, g):  # p (n + 1, 256), q (n or more, 256), n ids -> the ids to write: drafts kept, and one more
    """A draft d is kept with probability min(1, p(d) / q(d)). The first rejected one is replaced by a sample of
    (p - q)+, after the last kept one comes a sample of p (Leviathan et al. 2023): each id is distributed as p."""
    n = len(drafts)
    d = torch.tensor(drafts, dtype=torch.long)[:, None]
    u = torch.rand(n, 1, generator=g, dtype=torch.double)
    kept = int((u * q[:n].gather(1, d) < p[:n].gather(1, d)).long().cumprod(0).sum())
    rest = p[kept] if kept == n else (p[kept] - q[kept]).clamp(min=0)
    rest = rest if rest.sum() > 0 else p[kept]  # zero only through rounding
    return drafts[:kept] + [int(draw(rest, g))]


# ---- filling masked bytes
def read_block(model, ids, cache):  # (N, n) -> states (N, n, C): it attends to what is cached and to itself, both ways
    prefix = (cache.length + ids.size(1)).expand(len(ids))
    return model(ids, prefix, cache=cache)


def fill_logits(model, ids, use, cache=None):
    """ids (N, n) with MASKs, a Fill -> (N, n, V): predictions of each byte. cache: of what comes before."""
    if cache is not None:
        h = read_block(model, ids, cache)
        cache.length -= ids.size(1)
        return model.logits(h)
    left = ids.new_tensor(use.before).expand(len(ids), -1)
    right = ids.new_tensor(use.after).expand(len(ids), -1)
    row = torch.cat((left, ids, right), dim=1)
    h = model(row, row.size(1))
    first = len(use.before) - use.shift
    return model.logits(h[:, first:first + ids.size(1)])


def text_space(use, T):  # -> bytes of a text in a row of T positions
    return T - len(use.before) - len(use.after)


@torch.inference_mode()
def unmask(model, ids, g, use, steps=0, order="confident", cache=None, **how):
    """ids (N, n) -> yields (N, n): fills MASKs in so many passes (0: one for each), leaving everything else.

    confident: the sampled bytes that the model finds most likely (LLaDA, Nie et al. 2025; MaskGIT, Chang et al. 2022,
    without the noise that it adds to the ranking); left: from the left. ancestral: MDLM's sampler, which between the
    times t and s < t of two passes unmasks each with probability (t - s) / t, in 64 passes. analytic: SEDD's (its
    Tweedie denoiser), which takes (t - s) / t * sum of the ratios c, untempered, as that probability. Time runs from 1,
    all masked, to 0, so that (t - s) / t is 1 / the number of passes left."""
    at_random = order in ("ancestral", "analytic")
    if not steps:
        steps = 64 if at_random else int((ids == MASK).sum(1).max())
    for passes_left in range(steps, 0, -1):
        is_mask = ids == MASK
        if not is_mask.any():
            return
        logits = fill_logits(model, ids, use, cache)            # (N, n, V)
        new = draw(distribution(logits, **how), g).to(ids.device)
        share = (is_mask.sum(1, keepdim=True) + passes_left - 1) // passes_left     # as many in each pass left
        if at_random:
            rate = 1.0
            if order == "analytic" and passes_left > 1:
                rate = (logits[..., :N_BYTES].float() - math.log(N_BYTES)).exp().sum(-1)            # near 1
            u = torch.rand(ids.shape, generator=g, dtype=torch.double).float().to(ids.device)
            chosen = u * passes_left <= rate
        elif order == "confident":
            p = logits[..., :N_BYTES].float().softmax(-1).gather(-1, new[..., None])[..., 0]        # (N, n), untempered
            p = p.masked_fill(~is_mask, -torch.inf)
            chosen = p.argsort(dim=1, descending=True, stable=True).argsort(dim=1) < share
        else:
            chosen = is_mask.cumsum(1) <= share
        ids = torch.where(is_mask & chosen, new, ids)
        yield ids


def unmask_long(model, ids, T, g, use, **how):  # (1, n) of any length -> yields (1, n), window by window
    n = text_space(use, T)
    while (ids == MASK).any():                  # a window starts a quarter of its length before its first MASK
        first = int((ids[0] == MASK).byte().argmax())
        a = max(0, min(first - n // 4, ids.size(1) - n))
        end = n if a + n >= ids.size(1) else n - n // 4         # of what is kept: MASKs after it lack their right side
        for window in unmask(model, ids[:, a:a + n], g, use, **how):
            ids = torch.cat((ids[:, :a], window[:, :end], ids[:, a + end:]), dim=1)
            yield ids


@torch.inference_mode()
def generate_blocks(model, prompt, max_new_tokens, T, n, g, steps=0, order="confident", **how):
    """ids -> yields ids. Block diffusion: fills the MASKs of one block of n after another; the clean blocks before it
    stand in the cache. When no block fits a window of T bytes any more, the whole blocks of its last half are read
    again, of which there is none where a block is longer than that."""
    ids = list(prompt)
    end = len(ids) + max_new_tokens
    cache = Cache(model, 1, T)
    start = 0                                   # of the window in ids
    while len(ids) < end:
        whole = (len(ids) - start) // n * n     # bytes in whole blocks
        if whole + n > T:
            start += whole - T // 2 // n * n
            cache.length.zero_()
            continue
        for i in range(start + int(cache.length), start + whole, n):
            read_block(model, cache.ids.new_tensor([ids[i:i + n]]), cache)
        begun = ids[start + whole:]
        block = cache.ids.new_tensor([begun + [MASK] * (n - len(begun))])
        *_, block = unmask(model, block, g, Fill(), steps or n, order, cache=cache, **how)
        for i in block[0, len(begun):].tolist()[:end - len(ids)]:
            ids.append(i)
            yield i
            if i == EOT:
                return


# ---- infilling holes of unknown length
def infill(model, objective, hp, ids, P, holes, max_new_tokens, g, **how):  # -> bytes of each hole, did all end?
    """ids, P: as Infill.prompt returns them. Each answer is written up to the id that ends it, which starts the next.
    Stops one position short of a full row: in training its last target is always EOT."""
    T = hp.block_size
    spans = [[] for _ in range(holes)]
    for span, end in zip(spans, find_use(objective, "infill").stop_ids):
        row = to_row(ids, hp)
        left = max(0, min(max_new_tokens - sum(map(len, spans)), T - len(ids)))
        for i in map(int, generate(model, row, left, T, g, P, end, objective.positions, hp, **how)):
            if i == end:
                break
            span.append(i)
        else:
            return spans, False
        ids = [*ids, *span, end]
    return spans, True


@torch.inference_mode()
def trim_to_suffix(model, objective, hp, left, middle, right):  # ids each -> the start of the middle
    """For a model that also predicts left to right and rarely emits EOT after a middle: trims the middle where
    the suffix fits. Of all cuts it takes the first after which the suffix's first bytes are at least a tenth as likely
    as after the best cut; a later cut may be as good, where the middle repeats the suffix."""
    use = find_use(objective, "continue")
    right = right[:SUFFIX_BYTES]
    if not right or not use or use.both_ways:
        return middle
    n = len(right)
    nats = []
    for k in range(len(middle) + 1):
        x = to_row(([EOT] + left + middle[:k])[n - hp.block_size:] + right, hp)
        logits = model.logits(model(x[:, :-1], 0)[0, -n:])                          # (n, V)
        nats.append(float(F.cross_entropy(logits, x[0, -n:], reduction="sum")))
    first = next(k for k, each in enumerate(nats) if each < min(nats) + math.log(10))
    return middle[:first]


# ---- repairing
@torch.inference_mode()
def repair(model, objective, noisy, hp, g, **how):  # ids of any number -> yields bytes
    T = hp.block_size
    use = find_use(objective, "repair")
    n = objective.n_bytes(T, hp)
    most = use.max_bytes(hp) if use.max_bytes else None
    for piece in cut_after_spaces(noisy, min(n, most) if most else T - 1 - n):      # a source may be longer than n
        ids = to_row([i for i in piece if i != EOT] + [SEP], hp)                    # a copied EOT would end the row
        P = ids.size(1)
        limit = min(T + 1 - P, n + 1)           # no target was longer in training
        written = map(int, generate(model, ids, limit, T, g, P, None, objective.positions, hp, **how))
        yield from (i for i in written if i != EOT)


def cut_after_spaces(ids, n):  # -> yields pieces of at most n ids, about equally long, after white space where it can
    while ids:
        end = math.ceil(len(ids) / math.ceil(len(ids) / n))
        if len(ids) > n:
            places = [i for i in range(n // 4 + 1, n + 1) if ids[i - 1] in SPACES and ids[i] != MASK]
            end = min(places, key=lambda i: abs(i - end), default=end)
        yield ids[:end]
        ids = ids[end:]


# ---- texts, in and out
def read_text(flag, value):  # what a flag was given -> bytes; of --corpus it is the name of a file
    path = value.removeprefix("FILE:")
    if path == value and flag != "corpus":
        return value.encode("utf-8", "surrogateescape")         # how a POSIX shell hands over any bytes
    try:
        with open(path, "rb") as f:
            return f.read()
    except (OSError, ValueError) as e:          # a path with a NUL in it
        fail(f"--{flag} {path}: cannot be read ({e}). Try a path to text")


def read_markers(text, mode):  # bytes -> ids with MASKs, or SENTINELs, in place of the markers that a mode reads
    if mode not in MARKERS:
        return list(text)
    first, *rest = re.split(MARKERS[mode], text)                # text, number of a hole, text, ...
    out = list(first)
    for digits, text in zip(rest[::2], rest[1::2]):
        out += [SENTINEL] if mode == "infill" else [MASK] * int(digits or 1)
        out += text
    return out


def to_row(ids, hp):  # list or (n,) of any integers -> (1, n) long on the model's device
    return torch.as_tensor(ids).long().to(hp.device)[None]


def to_text(ids):  # -> str, without EOT; MASK is a block
    text = b"".join("█".encode() if i == MASK else bytes([i]) for i in map(int, ids) if i != EOT)
    return printable(text.decode("utf-8", "replace"))


def printable(text):  # on a terminal, control characters as \x1b, and no carriage returns
    if not sys.stdout.isatty():
        return text
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda c: f"\\x{ord(c[0]):02x}", text.replace("\r", ""))


def highlight(ids, is_new, plain=("", "")):  # -> str, on a terminal with the new characters in reverse video
    """A character of several bytes (UTF-8) is new if one of them is."""
    character = list(itertools.accumulate(not 0x80 <= i < 0xc0 for i in ids))       # number of each byte's character
    new = {number for number, each in zip(character, is_new) if each}
    tint = ("\033[7m", "\033[0m") if sys.stdout.isatty() else plain
    out = ""
    for tinted, run in itertools.groupby(zip(ids, character), lambda pair: pair[1] in new):
        text = to_text([i for i, _ in run])
        out += tint[0] + text + tint[1] if tinted else text
    return out


def stream(prompt, steps):  # ids, what yields more -> the ids that it yielded
    """Prints bytes as they come, a character once all its bytes are there."""
    ids = []
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for i in map(int, itertools.chain(prompt, steps)):
        ids.append(i)
        text = decoder.decode(bytes([i] if i != EOT else []))
        print(printable(text), end="", flush=True)
    print(decoder.decode(b"", final=True), flush=True)
    return ids[len(prompt):]


def note(text):  # what is not the answer goes to standard error
    print(f"--- {text}", file=sys.stderr, flush=True)


def keep_within(ids, n):  # -> the last n ids, with a note where that is not all
    if len(ids) > n:
        note(f"reads the last {n} of {len(ids)} bytes of the prompt, which leave space in the block")
    return ids[-n:]


# ---- modes: (model, objective, its use, hp, the flags that it reads) -> prints one sample; texts are ids
# how: the flags of SAMPLING that were given; each mode has its own defaults
def continue_mode(model, objective, use, hp, g, how, prompt=(), max_new_tokens=300, speculate=True, compile=False):
    T = hp.block_size
    how = dict(temperature=0.8, compile=compile) | how
    text = prompt = list(prompt) or [EOT]       # an empty prompt is the start of a document
    if use.both_ways:                           # one block holds the prompt and what is written, half of it at most
        prompt = keep_within(prompt, max(1, text_space(use, T) - min(max_new_tokens, T // 2)))
    draft = use.drafter(hp) if use.drafter and speculate else None
    if draft:
        stats = []
        written = stream(text, generate_drafted(model, draft, prompt, max_new_tokens, T, g, stats, **how))
        note(f"{len(written) / max(1, len(stats)):.2f} bytes per forward pass")
        return
    ids = to_row([*use.before, *prompt, *use.after], hp)
    prefix = ids.size(1) if use.both_ways else 0
    written = stream(text, generate(model, ids, max_new_tokens, T, g, prefix, **how))
    if prefix and len(written) < max_new_tokens and written[-1] != EOT:
        note(f"the block of {T} is full")


def continue_blocks_mode(model, objective, use, hp, g, how, prompt=(), max_new_tokens=300, order="", steps=0):
    how = dict(steps=steps, order=order or use.orders[0]) | DIFFUSION_SAMPLING | how
    prompt = list(prompt) or [EOT]
    T = objective.n_bytes(hp.block_size, hp)
    n = min(use.length(hp), T)
    stream(prompt, generate_blocks(model, prompt, max_new_tokens, T, n, g, **how))


def fill_mode(model, objective, use, hp, g, how, prompt=(), max_new_tokens=300, order="", steps=0, show=False):
    """Fills masked bytes. A model that was trained at any mask rate also continues a prompt, even an empty one."""
    T = hp.block_size
    default = GREEDY
    first = 0                                   # of what fits the block
    if MASK not in prompt:
        if not use.trained_at_any_rate:
            fail("--prompt: has no hole. Try one with [MASK] or [MASK:4] in it")
        near = keep_within(prompt, T // 2)
        first = len(prompt) - len(near)
        space = T - len(near)
        if max_new_tokens > space:
            note(f"writes {space} bytes, which fill the block of {T}")
        prompt = prompt + [MASK] * min(max_new_tokens, space)
        default = DIFFUSION_SAMPLING
    ids = state = to_row(prompt[first:], hp)
    how = dict(steps=steps, order=order or use.orders[0]) | default | how
    for state in unmask_long(model, ids, T, g, use, **how):
        if show:
            print(f"--- pass\n{to_text(state[0])}", flush=True)
    print(highlight(prompt[:first] + state[0].tolist(), [i == MASK for i in prompt]))


def infill_mode(model, objective, use, hp, g, how, prompt=None, prefix=None, suffix=None, max_new_tokens=None):
    T = hp.block_size
    if prompt is not None and (prefix is not None or suffix is not None):
        fail("--prompt: contains the text around its holes. Try it without --prefix and --suffix")
    text = [*(prefix or []), SENTINEL, *(suffix or [])] if prompt is None else prompt
    cuts = [-1, *(i for i, each in enumerate(text) if each == SENTINEL), len(text)]
    pieces = [text[a + 1:b] for a, b in zip(cuts, cuts[1:])]
    holes = len(pieces) - 1
    if not 1 <= holes <= len(use.stop_ids):
        fail(f"--prompt: has {holes} holes, {objective.name} fills 1 to {len(use.stop_ids)}. Try one <extra_id_0>")
    limit = 300 if max_new_tokens is None else max_new_tokens
    near = pieces
    if holes == 1:                              # of a long text the bytes nearest to the hole
        half = max(1, (T - 8 - min(limit, T // 3)) // 2)
        near = [pieces[0][-half:], pieces[1][:half]]
    if near != pieces:
        note(f"reads the last {len(near[0])} bytes before the hole and the first {len(near[1])} after it")
    ids, P = use.prompt(near, HOLE_BYTES if max_new_tokens is None else max_new_tokens // holes, hp)
    if len(ids) + holes > T:
        fail(f"--prompt: {len(ids)} positions with its holes leave no space in a block of {T}. Try a shorter text")
    spans, ended = infill(model, objective, hp, ids, P, holes, limit, g, **GREEDY | how)
    if holes == 1:
        trimmed = trim_to_suffix(model, objective, hp, near[0], spans[0], near[1])
        ended = ended or trimmed != spans[0]    # where the suffix fits
        spans = [trimmed]
    out = list(pieces[0])
    is_new = [False] * len(out)
    for span, piece in zip(spans, pieces[1:]):
        out += span + piece
        is_new += [True] * len(span) + [False] * len(piece)
    print(highlight(out, is_new), flush=True)
    if not ended:
        note(f"did not end by itself within {limit} bytes and the block of {T}")


def repair_mode(model, objective, use, hp, g, how, prompt):
    stream([], repair(model, objective, prompt, hp, g, **GREEDY | how))


def mark_mode(model, objective, use, hp, prompt):  # marks suspicious bytes, and lists the most suspicious ones
    rows = [to_row(piece, hp) for piece in cut_after_spaces(prompt, hp.block_size)]
    p = torch.cat([use.predict(model, row)[0] for row in rows]).sigmoid().cpu()
    print(highlight(prompt, p > 0.5, ("«", "»")))
    for i in p.argsort(descending=True)[:10].tolist():
        print(f"  byte {i:4d}  {repr(bytes([prompt[i]]))[1:]:6s} is wrong with probability {float(p[i]):.2f}")


def follow_mode(model, objective, use, hp, prefix, suffix):  # prints the probability that --suffix follows --prefix
    p = float(use.predict(model, prefix, suffix, hp).sigmoid())
    print(f"the second text follows the first with probability {p:.3f} (.5 is chance)")


def search_mode(model, objective, use, hp, query, corpus):  # prints the three lines of --corpus nearest to --query
    lines = [(number, line) for number, line in enumerate(corpus.splitlines(), 1) if line.strip()]
    texts = tqdm([query, *(line for _, line in lines)], disable=None, leave=False)
    vectors = torch.cat([use.predict(model, to_row([*text[:hp.block_size]], hp)) for text in texts])    # (N + 1, C)
    similarity = vectors[1:] @ vectors[0]
    for i in similarity.argsort(descending=True)[:3].tolist():
        number, line = lines[i]
        print(f"--- similarity {float(similarity[i]):.3f}, line {number}:\n{to_text(line[:hp.block_size])}")


def seam_mode(model, objective, use, hp, prompt):  # rotates a text back to where the model finds its first byte
    ids = keep_within(prompt, hp.block_size)
    p = use.predict(model, to_row(ids, hp))[0].softmax(0)
    seam = int(p.argmax())
    print(f"--- the text starts at byte {seam} (probability {float(p[seam]):.2f}):\n{to_text(ids[seam:] + ids[:seam])}")


# a mode's parameters are named as the flags that they take; those that are texts also stand in TEXTS
MODES = {"continue": continue_mode, "continue_blocks": continue_blocks_mode, "fill": fill_mode, "infill": infill_mode,
         "repair": repair_mode, "mark": mark_mode, "follow": follow_mode, "search": search_mode, "seam": seam_mode}


# ---- the command
def choose_members(hp, name):  # -> the objectives of a run; with a name only that one
    members = [member.objective for member in get_members(hp)]
    chosen = [objective for objective in members if name in ("", objective.name)]
    if not chosen:
        fail(f"--objective {name}: the run was trained as {hp.objective}. Try --objective {members[0].name}")
    return chosen


def choose_mode(objectives, texts):  # -> objective, key of MODES: of those that read these texts the first that fits
    uses = [(use.mode, each) for each in objectives for use in each.uses]
    uses = [pair for pair in uses if set(texts) <= set(inspect.signature(MODES[pair[0]]).parameters)] or uses
    wanted = [uses[0][0]]
    if "prompt" in texts:                       # what it asks for by its markers comes first, then what needs none
        asked = [mode for mode, marker in MARKERS.items() if re.search(marker, texts["prompt"])]
        wanted = asked + [mode for mode, _ in uses if mode not in ("infill", "fill")] + wanted
    return next((each, mode) for want in wanted for mode, each in uses if mode == want)


def demonstration(mode, held_out, T):  # -> texts in place of flags: held-out bytes, spoiled as the mode wants them
    text = held_out[:T // 2].tolist()
    half = len(text) // 2
    noisy = [ord("x") if i % 20 == 9 else byte for i, byte in enumerate(text)]
    texts = {
        "fill": dict(prompt=[MASK if i % 7 == 3 else byte for i, byte in enumerate(text)]),
        "infill": dict(prefix=text[:half], suffix=text[half + 4:]),
        "repair": dict(prompt=noisy), "mark": dict(prompt=noisy),
        "follow": dict(prefix=text[:half], suffix=text[half:]),
        "search": dict(query=text, corpus=bytes(held_out.tolist())), "seam": dict(prompt=text[half:] + text[:half]),
    }.get(mode, dict(prompt=text))
    print(f"held-out text:\n{to_text(text)}")
    for flag, ids in texts.items():
        if flag != "corpus" and ids != text:
            print(f"--- as --{flag}:\n{to_text(ids)}")
    print("--- the model's answer:", flush=True)
    return texts


def main(argv=None):
    given = vars(make_parser("python sample.py", __doc__, FLAGS).parse_args(sys.argv[1:] if argv is None else argv))
    path = given.get("out_dir") or newest_run()
    model, hp, ckpt = load_run(path, given.get("device", "auto"), given.get("dtype", "auto"))
    objectives = choose_members(hp, given.pop("objective", ""))
    texts = {flag: read_text(flag, given[flag]) for flag in TEXTS & set(given)}
    objective, mode = choose_mode(objectives, texts)
    flags = inspect.signature(MODES[mode]).parameters
    read = {*flags, *COMMON, *(SAMPLING | {"num_samples"} if "how" in flags else ())}
    for flag in sorted(set(given) - read):      # ignoring it would look as if it had no effect
        fail(f"--{flag}: is not read here. Try what {objective.name} reads: --{' --'.join(sorted(TEXTS & read))}")
    use = find_use(objective, mode)
    if "order" in given and given["order"] not in use.orders:
        fail(f"--order {given['order']}: unknown to {objective.name}. Try {' or '.join(use.orders)}")
    if "prompt" in texts:
        texts["prompt"] = read_markers(texts["prompt"], mode)
    if mode == "fill" and MASK in texts.get("prompt", []) and "max_new_tokens" in given:
        fail("--max_new_tokens: the holes have their own lengths. Try [MASK:4] for a hole of 4 bytes")
    member = f", used as {objective.name}" if len(get_members(hp)) > 1 else ""
    note(f"{path}: {hp.objective}{member}, step {ckpt['step']} of {hp.max_iters}")
    if not texts:
        texts = demonstration(mode, ckpt["held_out"], hp.block_size)
    for flag in TEXTS & set(flags):
        if not texts.get(flag) and flags[flag].default is inspect.Parameter.empty:
            fail(f"--{flag}: is missing or empty. Try some text")
    n = given.get("num_samples", 1)
    how = {flag: given[flag] for flag in SAMPLING & set(given)}
    if n > 1 and (mode in ("infill", "repair") or MASK in texts.get("prompt", [])):
        how.setdefault("temperature", 0.8)      # at 0 all would be alike
    for i in range(n):
        if n > 1:
            print(f"--- sample {i + 1}")
        values = given | texts | {"how": how, "g": make_rng(f"{given.get('seed', 1)},{i},sample")}
        MODES[mode](model, objective, use, hp, **{flag: values[flag] for flag in flags if flag in values})


if __name__ == "__main__":
    run_program(main)
