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

Add --out_dir out/NAME to use another run than the latest. A text may also be FILE:path. Markers that filling models
understand in a prompt: [MASK], a hole of one byte (bart: of any length); [MASK:4], a hole of 4 bytes; <extra_id_0>, a
hole of any length. All models read across the ends of documents, whether or not they were trained with --doc_mask.
"""
# N samples, n ids, T = block_size, V outputs of the byte head, P ids of a prefix
# sampling: the arguments of `distribution`, temperature, top_k and top_p
import codecs
import itertools
import math
import re
import sys
from argparse import Namespace
from collections import namedtuple

from data import EOT, MASK, SENTINEL, SEP, Flag, fail, make_rng
from model import Cache
from objectives import N_BYTES, OBJECTIVES, Fill, find_use, get_members, inverse_cdf
from run import DEVICE_FLAGS, GraphedStep, load_run, make_parser, newest_run, run_program
import torch
import torch.nn.functional as F
from tqdm import tqdm

TEMPERATURE = 0.8                               # the default for text that is written from left to right
DIFFUSION_SAMPLING = dict(temperature=1.0, top_p=0.8)           # the default for text that diffusion writes
END_THRESHOLD = 0.15                            # a hole ends as soon as its end has this probability
HOLE_BYTES = 4                                  # expected length of a hole of unknown length
SUFFIX_BYTES = 16                               # number of bytes of the suffix that decide where a middle is trimmed
SPACES = {EOT, *b" \t\n\v\f\r"}                 # bytes after which a long text may be cut
MASKS = rb"\[MASK(?::(\d{1,6}))?\]"
HOLES = rb"<extra_id_(\d+)>"
MARKERS = {"infill": HOLES, "fill": MASKS, "repair": MASKS}     # mode: its marker in a prompt

FLAGS = {
    "run": {
        "out_dir": Flag("", "run folder or checkpoint file; without it the latest run under out/"),
        "objective": Flag("", "of a mixture, the member to use; without it the first that fits the texts"),
        "seed": Flag(1, "random seed of the samples", 0, 2 ** 31),
    } | DEVICE_FLAGS,
    "texts": {
        "prompt": Flag("", "the text to continue, fill, repair or examine; --prompt=-x where it starts with a dash"),
        "prefix": Flag("", "the text before a hole; nsp: the first text"),
        "suffix": Flag("", "the text after a hole; nsp: the second text"),
        "query": Flag("", "contrastive: the text to look for"),
        "corpus": Flag("", "contrastive: file whose lines to search, each by its first block_size bytes"),
    },
    "writing": {
        "max_new_tokens": Flag(300, "maximum number of bytes; ul2: above 16 a hole, in long spans", 0),
        "num_samples": Flag(1, "number of samples; sample i is seeded with (seed, i)", 1),
        "temperature": Flag(TEMPERATURE, "randomness; 0 always takes the most likely byte: the default for holes and "
                                         "repairs. mdlm, sedd, bd3lm write at 1 with top_p .8", 0.0, 1e6),
        "top_k": Flag(0, "sample from the k most likely bytes, 0 for all", 0),
        "top_p": Flag(1.0, "sample from the most likely bytes that together have this probability", 0.0, 1.0),
        "order": Flag("", "in which [MASK]s are filled; analytic: sedd",
                      choices=("confident", "left", "ancestral", "analytic")),
        "steps": Flag(0, "number of passes that fill [MASK]s (bd3lm: of a block); 0: one for each [MASK], or 64 where "
                         "mdlm and sedd fill in order ancestral or analytic", 0),
        "show": Flag(False, "print the text after every pass that fills [MASK]s"),
        "speculate": Flag(True, "mtp: the extra heads draft bytes that the first head verifies"),
        "compile": Flag(False, "torch.compile the decoding step: slow to start, faster for long texts"),
    },
}
SAMPLING = "temperature", "top_k", "top_p"


# ---- sampling a byte
def distribution(logits, temperature=1.0, top_k=0, top_p=1.0):  # (..., V) -> (..., 256) float64
    """Probabilities of the bytes; no other id is ever sampled. At temperature 0 the most likely byte has probability 1.
    top_p adds up probabilities from before top_k. In float64, since float32 loses the tail of the distribution (Zheng
    et al. 2024); on the CPU where the device is mps, which lacks float64."""
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
        stays[..., 0] = True                    # one byte stays at top_p 0, too
        stays[..., top_k or p.size(-1):] = False
        p = torch.zeros_like(p).scatter(-1, ids, p * stays)
    return p / p.sum(-1, keepdim=True)


def draw(p, g):  # (..., 256) -> bytes (...)
    return inverse_cdf(p, torch.rand(p.shape[:-1], generator=g, dtype=torch.double).to(p.device))


def sample_byte(logits, g, stop_id=None, **sampling):  # (N, V) -> ids (N,)
    """stop_id, if any, is returned as soon as it and EOT together have the probability END_THRESHOLD; EOT never is."""
    if stop_id is None:
        return draw(distribution(logits, **sampling), g)
    stops = logits.softmax(-1)[:, list({stop_id, EOT})].sum(1) >= END_THRESHOLD
    logits = logits.clone()
    logits[:, EOT] = -torch.inf
    return draw(distribution(logits, **sampling), g).masked_fill(stops, stop_id)


# ---- continuing
@torch.inference_mode()
def generate(model, prompt, max_new_tokens, T, g, prefix=0, stop_id=None, positions=None, hp=None, compile=False,
             **sampling):
    """prompt (N, n) -> yields (N,) on the CPU, the next byte of each row; a row that has ended stays at EOT.
    stop_id: the id that ends a hole. positions, hp: the objective's function for position numbers, and its settings.

    prefix 0: attention is causal; when the block of T is full, its last half is encoded again. prefix P: the first P
    positions attend both ways; generation stops when the block is full, so the prompt must leave space in it."""
    device = model.embed.weight.device
    ids = prompt.cpu()
    ended = torch.zeros(len(ids), dtype=torch.bool)
    cache = Cache(model, len(ids), T)
    start = max(0, ids.size(1) - T)             # index in ids at which the block starts
    new = ids[:, start:]                        # ids that are not cached yet

    def step(new, at=None):                     # at: position numbers, None for 0, 1, 2, ...
        return model.logits(model(new.to(device), prefix, cache=cache, positions=at)[:, -1])
    fast_step = make_fast_step(step, ids[:, :1], device, compile)
    for _ in range(max_new_tokens):
        if ids.size(1) - start > T:
            if prefix:                          # encoding again would change the prefix
                return
            start = ids.size(1) - T // 2        # leaves space for the next T / 2 bytes
            cache.length.zero_()
            new = ids[:, start:]
        at = positions(ids, ids.new_full((len(ids),), prefix), hp)[:, -new.size(1):].to(device) if positions else None
        logits = step(new, at) if positions or new.size(1) > 1 else fast_step(new)
        byte = sample_byte(logits.cpu(), g, stop_id, **sampling).masked_fill(ended, EOT)
        ended |= byte == EOT
        new = byte[:, None]
        ids = torch.cat((ids, new), dim=1)
        yield byte
        if ended.all():
            return


def make_fast_step(step, ids, device, compile):  # step: ids -> tensors; ids: an example of its input -> a faster step
    """Compiles the step if asked to. On CUDA the second call captures it in a graph, which that and all later calls
    replay; so the ids of all calls must have the same shape."""
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
def generate_drafted(model, draft, prompt, max_new_tokens, T, g, stats, compile=False, **sampling):
    """ids -> yields ids. Self-speculative decoding: heads of the model draft, the model verifies the draft in one pass
    (Stern et al. 2018). The text has the same distribution as that of generate; at temperature 0 it is the same text.
    draft: the function that Continue.drafter returns. stats: a list to which each pass appends (drafted, kept)."""
    ids = list(prompt)
    device = model.embed.weight.device
    end = len(ids) + max_new_tokens
    start = max(0, len(ids) - T)                # index in ids at which the block starts
    cache = Cache(model, 1, T)
    drafts = []                                 # guesses of the ids after ids[-1]
    q = torch.zeros(0, N_BYTES)                 # the distributions from which they were drawn

    def step(new):  # (1, m) -> logits of the next id (m, V) and of the k ids after it (m, k, V)
        h = model(new.to(device), 0, cache=cache)[0]
        return model.logits(h), draft(model, h)
    k = draft(model, model.embed.weight[:1]).size(1)
    full_step = make_fast_step(step, torch.zeros(1, k + 1, dtype=torch.long), device, compile)
    while len(ids) < end:
        # 1. make space in the block; drop drafts that would exceed the block or max_new_tokens
        if len(ids) - start > T:
            start = len(ids) - T // 2
            cache.length.zero_()
        drafts = drafts[:min(T - (len(ids) - start), end - len(ids) - 1)]
        # 2. one pass over the ids that are not cached yet: the distributions after ids[-1] and after each draft
        new = torch.tensor([ids[start + int(cache.length):] + drafts])
        logits, ahead = full_step(new) if new.size(1) == k + 1 else step(new)
        # 3. keep the drafts that pass verification; remove the others from the cache
        n = len(drafts)
        out = verify(distribution(logits[-n - 1:].cpu(), **sampling), q, drafts, g)
        cache.length -= n + 1 - len(out)
        stats.append((n, len(out) - 1))
        for i in out:
            ids.append(i)
            yield i
            if i == EOT:
                return
        # 4. draft again, from the state at the last kept draft
        q = distribution(ahead[len(ahead) - n - 2 + len(out)].cpu(), **sampling)
        drafts = draw(q, g).tolist()


def verify(p, q, drafts, g):  # p (n + 1, 256), q (n or more, 256), n ids -> the ids to write: kept drafts, and one more
    """A draft d is kept with probability min(1, p(d) / q(d)). The first rejected draft is replaced by a sample of
    (p - q)+; if all are kept, a sample of p follows. So each id is distributed as p (Leviathan et al. 2023)."""
    n = len(drafts)
    d = torch.tensor(drafts, dtype=torch.long)[:, None]
    u = torch.rand(n, 1, generator=g, dtype=torch.double)
    kept = int((u * q[:n].gather(1, d) < p[:n].gather(1, d)).long().cumprod(0).sum())
    rest = p[kept] if kept == n else (p[kept] - q[kept]).clamp(min=0)
    rest = rest if rest.sum() > 0 else p[kept]  # zero only because of rounding
    return drafts[:kept] + [int(draw(rest, g))]


# ---- filling masked bytes
def read_block(model, ids, cache):  # (N, n) -> states (N, n, C); attends to all of the cache and the block
    prefix = (cache.length + ids.size(1)).expand(len(ids))
    return model(ids, prefix, cache=cache)


def fill_logits(model, ids, use, cache=None):
    """ids (N, n) with MASKs, a Fill -> (N, n, V): predictions of each byte. cache: the blocks before ids, if any."""
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


def text_space(use, T):  # -> number of bytes of a text that fit a row of T positions
    return T - len(use.before) - len(use.after)


@torch.inference_mode()
def unmask(model, ids, g, use, steps=0, order="confident", cache=None, **sampling):
    """ids (N, n) -> yields (N, n) after each pass. Fills MASKs, and changes nothing else, in the given number of passes
    (0: one for each MASK, or 64 in orders ancestral and analytic). A pass fills

        confident   the MASKs whose sampled bytes are most likely (LLaDA, Nie et al. 2025; MaskGIT, Chang et al. 2022,
                    without the noise that it adds to the ranking)
        left        the leftmost MASKs
        ancestral   each with probability 1 / (number of passes left), as MDLM's sampler
        analytic    each with this probability times the sum of the ratios, as SEDD's Tweedie denoiser
    """
    at_random = order in ("ancestral", "analytic")
    if not steps:
        steps = 64 if at_random else int((ids == MASK).sum(1).max())
    for passes_left in range(steps, 0, -1):
        is_mask = ids == MASK
        if not is_mask.any():
            return
        logits = fill_logits(model, ids, use, cache)            # (N, n, V)
        new = draw(distribution(logits, **sampling), g).to(ids.device)
        share = (is_mask.sum(1, keepdim=True) + passes_left - 1) // passes_left     # of the MASKs, rounded up
        if at_random:
            rate = 1.0                          # times 1 / passes_left: the probability
            if order == "analytic" and passes_left > 1:
                rate = (logits[..., :N_BYTES].float() - math.log(N_BYTES)).exp().sum(-1)            # about 1
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
    """how: the arguments of unmask. A window starts a quarter of its length before its first MASK. Of what it fills its
    last quarter is dropped, since MASKs there lack right context, unless the text ends there."""
    n = text_space(use, T)
    while (ids == MASK).any():
        first = int((ids[0] == MASK).byte().argmax())
        a = max(0, min(first - n // 4, ids.size(1) - n))
        end = n if a + n >= ids.size(1) else n - n // 4
        for window in unmask(model, ids[:, a:a + n], g, use, **how):
            ids = torch.cat((ids[:, :a], window[:, :end], ids[:, a + end:]), dim=1)
            yield ids


@torch.inference_mode()
def generate_blocks(model, prompt, max_new_tokens, T, n, g, steps=0, order="confident", **sampling):
    """ids -> yields ids. Block diffusion: appends a block of n MASKs and fills it, then the next; the clean blocks
    before it are cached. When the window of T bytes has no space for another block, the whole blocks of its last half
    are encoded again (none, if a block is longer than half a window)."""
    ids = list(prompt)
    end = len(ids) + max_new_tokens
    cache = Cache(model, 1, T)
    start = 0                                   # index in ids at which the window starts
    while len(ids) < end:
        whole = (len(ids) - start) // n * n     # number of bytes in whole blocks
        if whole + n > T:
            start += whole - T // 2 // n * n
            cache.length.zero_()
            continue
        for i in range(start + int(cache.length), start + whole, n):
            read_block(model, cache.ids.new_tensor([ids[i:i + n]]), cache)
        begun = ids[start + whole:]             # the prompt may end inside a block
        block = cache.ids.new_tensor([begun + [MASK] * (n - len(begun))])
        *_, block = unmask(model, block, g, Fill(), steps or n, order, cache=cache, **sampling)
        for i in block[0, len(begun):].tolist()[:end - len(ids)]:
            ids.append(i)
            yield i
            if i == EOT:
                return


# ---- infilling holes of unknown length
def infill(model, objective, hp, ids, P, holes, max_new_tokens, g, **sampling):  # -> bytes of each hole, did all end?
    """ids, P: what Infill.prompt returns. Each hole is written up to the id that ends it, which also starts the next.
    Stops one position before the end of a full row, where in training the target is always EOT."""
    T = hp.block_size
    spans = [[] for _ in range(holes)]
    for span, end in zip(spans, find_use(objective, "infill").stop_ids):
        row = to_row(ids, hp)
        left = max(0, min(max_new_tokens - sum(map(len, spans)), T - len(ids)))
        for i in map(int, generate(model, row, left, T, g, P, end, objective.positions, hp, **sampling)):
            if i == end:
                break
            span.append(i)
        else:
            return spans, False
        ids = [*ids, *span, end]
    return spans, True


@torch.inference_mode()
def trim_to_suffix(model, objective, hp, left, middle, right):  # lists of ids -> the start of the middle
    """For a model that also predicts left to right and rarely emits EOT after a middle: trims the middle where the
    suffix fits. A middle that repeats the suffix has several such places; so it takes the first cut after which the
    start of the suffix is at least a tenth as likely as after the best cut."""
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
def repair(model, objective, noisy, hp, g, **sampling):  # any number of ids -> yields bytes
    T = hp.block_size
    use = find_use(objective, "repair")
    n = objective.n_bytes(T, hp)
    most = use.max_bytes(hp) if use.max_bytes else None
    for piece in cut_after_spaces(noisy, min(n, most) if most else T - 1 - n):      # noise may make a text longer
        ids = to_row([i for i in piece if i != EOT] + [SEP], hp)                    # a copied EOT would end the row
        P = ids.size(1)
        limit = min(T + 1 - P, n + 1)           # the longest target in training
        written = map(int, generate(model, ids, limit, T, g, P, None, objective.positions, hp, **sampling))
        yield from (i for i in written if i != EOT)


def cut_after_spaces(ids, n):  # -> yields pieces of up to n ids, about equally long, cut after white space if possible
    while ids:
        end = math.ceil(len(ids) / math.ceil(len(ids) / n))
        if len(ids) > n:
            places = [i for i in range(n // 4 + 1, n + 1) if ids[i - 1] in SPACES and ids[i] != MASK]
            end = min(places, key=lambda i: abs(i - end), default=end)
        yield ids[:end]
        ids = ids[end:]


# ---- texts, in and out
def read_text(flag, value):  # the value of a flag -> bytes; the value of --corpus is the name of a file
    path = value.removeprefix("FILE:")
    if path == value and flag != "corpus":
        return value.encode("utf-8", "surrogateescape")         # Python decodes a POSIX command line this way
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


# ---- modes: (model, objective, its use of that mode, hp, args, g) -> prints one sample
# args: a Namespace of all flags. Texts are ids or bytes, None if they were not given; other flags have their defaults.
# args.given: the names of the flags that were given; args.sampling: those of temperature, top_k and top_p among them
def continue_mode(model, objective, use, hp, args, g):
    T = hp.block_size
    limit = args.max_new_tokens
    sampling = dict(temperature=TEMPERATURE) | args.sampling
    text = args.prompt or [EOT]                 # an empty prompt is the start of a document
    prompt = text
    if use.both_ways:                           # one block holds the prompt and, in up to half of it, what follows
        prompt = keep_within(text, max(1, text_space(use, T) - min(limit, T // 2)))
    draft = use.drafter(hp) if use.drafter and args.speculate else None
    if draft:
        stats = []
        written = stream(text, generate_drafted(model, draft, prompt, limit, T, g, stats, args.compile, **sampling))
        note(f"{len(written) / max(1, len(stats)):.2f} bytes per forward pass")
        return
    ids = to_row([*use.before, *prompt, *use.after], hp)
    prefix = ids.size(1) if use.both_ways else 0
    written = stream(text, generate(model, ids, limit, T, g, prefix, compile=args.compile, **sampling))
    if prefix and len(written) < limit and written[-1] != EOT:
        note(f"the block of {T} is full")


def continue_blocks_mode(model, objective, use, hp, args, g):
    prompt = args.prompt or [EOT]               # an empty prompt is the start of a document
    T = objective.n_bytes(hp.block_size, hp)
    n = min(use.length(hp), T)
    order = args.order or use.orders[0]
    sampling = DIFFUSION_SAMPLING | args.sampling
    stream(prompt, generate_blocks(model, prompt, args.max_new_tokens, T, n, g, args.steps, order, **sampling))


def fill_mode(model, objective, use, hp, args, g):
    """Fills masked bytes. A model that was trained at any mask rate also continues a prompt, even an empty one."""
    T = hp.block_size
    prompt = args.prompt
    first = 0                                   # index in the prompt of the first byte that the model reads
    sampling = hole_sampling(args)
    if MASK not in prompt:
        if not use.trained_at_any_rate:
            fail("--prompt: has no hole. Try one with [MASK] or [MASK:4] in it")
        near = keep_within(prompt, T // 2)
        first = len(prompt) - len(near)
        space = T - len(near)
        if args.max_new_tokens > space:
            note(f"writes {space} bytes, which fill the block of {T}")
        prompt = prompt + [MASK] * min(args.max_new_tokens, space)
        sampling = DIFFUSION_SAMPLING | args.sampling
    elif "max_new_tokens" in args.given:
        fail("--max_new_tokens: the holes have their own lengths. Try [MASK:4] for a hole of 4 bytes")
    ids = state = to_row(prompt[first:], hp)
    order = args.order or use.orders[0]
    for state in unmask_long(model, ids, T, g, use, steps=args.steps, order=order, **sampling):
        if args.show:
            print(f"--- pass\n{to_text(state[0])}", flush=True)
    print(highlight(prompt[:first] + state[0].tolist(), [i == MASK for i in prompt]))


def hole_sampling(args):  # holes and repairs take the most likely bytes, unless several samples are wanted
    return dict(temperature=TEMPERATURE if args.num_samples > 1 else 0.0) | args.sampling


def infill_mode(model, objective, use, hp, args, g):
    T = hp.block_size
    limit = args.max_new_tokens
    if args.prompt is not None and (args.prefix is not None or args.suffix is not None):
        fail("--prompt: contains the text around its holes. Try it without --prefix and --suffix")
    text = args.prompt
    if text is None:
        text = [*(args.prefix or []), SENTINEL, *(args.suffix or [])]
    cuts = [-1, *(i for i, each in enumerate(text) if each == SENTINEL), len(text)]
    pieces = [text[a + 1:b] for a, b in itertools.pairwise(cuts)]                   # the texts around the holes
    holes = len(pieces) - 1
    if not 1 <= holes <= len(use.stop_ids):
        fail(f"--prompt: has {holes} holes, {objective.name} fills 1 to {len(use.stop_ids)}. Try one <extra_id_0>")
    near = pieces
    if holes == 1:                              # of a long text, only the bytes nearest to the hole
        half = max(1, (T - 8 - min(limit, T // 3)) // 2)
        near = [pieces[0][-half:], pieces[1][:half]]
    if near != pieces:
        note(f"reads the last {len(near[0])} bytes before the hole and the first {len(near[1])} after it")
    expected = limit // holes if "max_new_tokens" in args.given else HOLE_BYTES     # number of bytes of a hole
    ids, P = use.prompt(near, expected, hp)
    if len(ids) + holes > T:
        fail(f"--prompt: {len(ids)} positions with its holes leave no space in a block of {T}. Try a shorter text")
    spans, ended = infill(model, objective, hp, ids, P, holes, limit, g, **hole_sampling(args))
    if holes == 1:
        trimmed = trim_to_suffix(model, objective, hp, near[0], spans[0], near[1])
        ended = ended or trimmed != spans[0]    # a span that was trimmed has ended
        spans = [trimmed]
    out = list(pieces[0])
    is_new = [False] * len(out)
    for span, piece in zip(spans, pieces[1:]):
        out += span + piece
        is_new += [True] * len(span) + [False] * len(piece)
    print(highlight(out, is_new), flush=True)
    if not ended:
        note(f"did not end by itself within {limit} bytes and the block of {T}")


def repair_mode(model, objective, use, hp, args, g):
    stream([], repair(model, objective, args.prompt, hp, g, **hole_sampling(args)))


def mark_mode(model, objective, use, hp, args, g):  # marks suspicious bytes, and lists the most suspicious ones
    rows = [to_row(piece, hp) for piece in cut_after_spaces(args.prompt, hp.block_size)]
    p = torch.cat([use.predict(model, row)[0] for row in rows]).sigmoid().cpu()
    print(highlight(args.prompt, p > 0.5, ("«", "»")))
    for i in p.argsort(descending=True)[:10].tolist():
        print(f"  byte {i:4d}  {repr(bytes([args.prompt[i]]))[1:]:6s} is wrong with probability {float(p[i]):.2f}")


def follow_mode(model, objective, use, hp, args, g):  # prints the probability that --suffix follows --prefix
    p = float(use.predict(model, args.prefix, args.suffix, hp).sigmoid())
    print(f"the second text follows the first with probability {p:.3f} (.5 is chance)")


def search_mode(model, objective, use, hp, args, g):  # prints the three lines of --corpus nearest to --query
    lines = [(number, line) for number, line in enumerate(args.corpus.splitlines(), 1) if line.strip()]
    texts = tqdm([args.query, *(line for _, line in lines)], disable=None, leave=False)
    vectors = torch.cat([use.predict(model, to_row([*text[:hp.block_size]], hp)) for text in texts])    # (N + 1, C)
    similarity = vectors[1:] @ vectors[0]
    for i in similarity.argsort(descending=True)[:3].tolist():
        number, line = lines[i]
        print(f"--- similarity {float(similarity[i]):.3f}, line {number}:\n{to_text(line[:hp.block_size])}")


def seam_mode(model, objective, use, hp, args, g):  # rotates a text back to where the model finds its first byte
    ids = keep_within(args.prompt, hp.block_size)
    p = use.predict(model, to_row(ids, hp))[0].softmax(0)
    seam = int(p.argmax())
    print(f"--- the text starts at byte {seam} (probability {float(p[seam]):.2f}):\n{to_text(ids[seam:] + ids[:seam])}")


# flags: all that a mode reads, beside those of a run; required: the texts among them that must not be missing or empty
Mode = namedtuple("Mode", "function flags required", defaults=[()])
SAMPLED = ("num_samples", *SAMPLING)
MODES = {
    "continue": Mode(continue_mode, ("prompt", "max_new_tokens", "speculate", "compile", *SAMPLED)),
    "continue_blocks": Mode(continue_blocks_mode, ("prompt", "max_new_tokens", "order", "steps", *SAMPLED)),
    "fill": Mode(fill_mode, ("prompt", "max_new_tokens", "order", "steps", "show", *SAMPLED)),
    "infill": Mode(infill_mode, ("prompt", "prefix", "suffix", "max_new_tokens", *SAMPLED)),
    "repair": Mode(repair_mode, ("prompt", *SAMPLED), required=("prompt",)),
    "mark": Mode(mark_mode, ("prompt",), required=("prompt",)),
    "follow": Mode(follow_mode, ("prefix", "suffix"), required=("prefix", "suffix")),
    "search": Mode(search_mode, ("query", "corpus"), required=("query", "corpus")),
    "seam": Mode(seam_mode, ("prompt",), required=("prompt",)),
}


# ---- the command
def choose_members(hp, name):  # -> [Member] of a run; with a name only that one
    members = get_members(hp)
    chosen = [m for m in members if name in ("", m.objective.name)]
    if not chosen:
        fail(f"--objective {name}: the run was trained as {hp.objective}. Try --objective {members[0].objective.name}")
    return chosen


def choose_use(members, texts):  # -> (member, use): the first that reads these texts and fits the prompt
    uses = [(m, use) for m in members for use in m.objective.uses]
    uses = [(m, use) for m, use in uses if set(texts) <= {*MODES[use.mode].flags}] or uses
    wanted = [uses[0][1].mode]
    if "prompt" in texts:                       # modes whose markers it contains, then modes that need no marker
        asked = [mode for mode, marker in MARKERS.items() if re.search(marker, texts["prompt"])]
        wanted = asked + [use.mode for _, use in uses if use.mode not in ("infill", "fill")] + wanted
    return next((m, use) for mode in wanted for m, use in uses if use.mode == mode)


def demonstration(mode, held_out, T):  # -> texts in place of flags: held-out bytes, corrupted as the mode needs them
    text = held_out[:T // 2].tolist()
    half = len(text) // 2
    noisy = [ord("x") if i % 20 == 9 else byte for i, byte in enumerate(text)]
    texts = {
        "fill": dict(prompt=[MASK if i % 7 == 3 else byte for i, byte in enumerate(text)]),
        "infill": dict(prefix=text[:half], suffix=text[half + 4:]),
        "repair": dict(prompt=noisy),
        "mark": dict(prompt=noisy),
        "follow": dict(prefix=text[:half], suffix=text[half:]),
        "search": dict(query=text, corpus=bytes(held_out.tolist())),
        "seam": dict(prompt=text[half:] + text[:half]),
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
    members = choose_members(hp, given.get("objective", ""))
    texts = {flag: read_text(flag, given[flag]) for flag in FLAGS["texts"] if flag in given}
    m, use = choose_use(members, texts)
    objective = m.objective
    mode = MODES[use.mode]
    for flag in sorted(set(given) - {*FLAGS["run"], *mode.flags}):      # ignoring it would look as if it had no effect
        readers = [name for name, other in OBJECTIVES.items() for each in other.uses if flag in MODES[each.mode].flags]
        hint = "other texts, as in --help" if objective.name in readers else f"a run of {readers[0]}"
        fail(f"--{flag}: is not read here, where {objective.name} reads --{' --'.join(mode.flags)}. Try {hint}")
    if "order" in given and given["order"] not in use.orders:
        fail(f"--order {given['order']}: unknown to {objective.name}. Try {' or '.join(use.orders)}")
    if "prompt" in texts:
        texts["prompt"] = read_markers(texts["prompt"], use.mode)
    member = f", used as {objective.name}" if len(get_members(hp)) > 1 else ""
    note(f"{path}: {hp.objective}{member}, step {ckpt['step']} of {hp.max_iters}")
    if not texts:
        texts = demonstration(use.mode, ckpt["held_out"], hp.block_size)
    for flag in mode.required:
        if not texts.get(flag):
            fail(f"--{flag}: is missing or empty. Try some text")
    args = Namespace(**{name: flag.default for flags in FLAGS.values() for name, flag in flags.items()} | given)
    vars(args).update(dict.fromkeys(FLAGS["texts"]) | texts)
    args.given = set(given)
    args.sampling = {flag: given[flag] for flag in SAMPLING if flag in given}
    for i in range(args.num_samples):
        if args.num_samples > 1:
            print(f"--- sample {i + 1}")
        mode.function(model, objective, use, m.hp, args, make_rng(f"{args.seed},{i},sample"))


if __name__ == "__main__":
    run_program(main)
