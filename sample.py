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

Add --out_dir out/NAME to use another run than the latest. Write FILE:path in place of a text to read it from a file.
A prompt may contain holes: [MASK] is a hole of one byte (bart: of any length), [MASK:4] a hole of 4 bytes, and
<extra_id_0> a hole of any length. All models read across the ends of documents, even if trained with --doc_mask.
"""
# N samples, n ids, T = block_size, V outputs of the byte head, P ids of a prefix
# sampling: the arguments of `distribution`: temperature, top_k and top_p
import codecs
import itertools
import math
import re
import sys
from argparse import Namespace
from collections import namedtuple

from data import EOT, MASK, SEP, Flag, fail, make_rng
from model import Cache
from objectives import N_BYTES, OBJECTIVES, Fill, find_use, get_members, inverse_cdf
from run import DEVICE_FLAGS, GraphedStep, load_run, make_parser, newest_run, run_program
import torch
import torch.nn.functional as F
from tqdm import tqdm

TEMPERATURE = 0.8                               # default for text that is written from left to right
DIFFUSION_SAMPLING = dict(temperature=1.0, top_p=0.8)           # default for text that is written by diffusion
END_THRESHOLD = 0.15                            # a hole ends as soon as its end has this probability
HOLE_BYTES = 4                                  # expected length of a hole of unknown length
SUFFIX_BYTES = 16                               # number of bytes of the suffix that decide where a middle is trimmed
SPACES = {EOT, *b" \t\n\v\f\r"}                 # a long text may be cut after one of these bytes
MASKS = rb"\[MASK(?::(\d{1,6}))?\]"
HOLES = rb"<extra_id_\d+>"
MARKERS = {"infill": HOLES, "fill": MASKS, "repair": MASKS}     # {mode: the marker of a hole in its prompt}

FLAGS = {
    "run": {
        "out_dir": Flag("", "run folder or checkpoint file; without it the latest run under out/"),
        "objective": Flag("", "member of a mixture to use; without it the first that fits the texts"),
        "seed": Flag(1, "random seed of the samples", 0, 2 ** 31),
    } | DEVICE_FLAGS,
    "texts": {
        "prompt": Flag("", "text to continue, fill, repair or examine; --prompt=-x if it starts with a dash"),
        "prefix": Flag("", "text before a hole; nsp: the first text"),
        "suffix": Flag("", "text after a hole; nsp: the second text"),
        "query": Flag("", "contrastive: text to look for"),
        "corpus": Flag("", "contrastive: file whose lines are searched, each by its first block_size bytes"),
    },
    "writing": {
        "max_new_tokens": Flag(300, "maximum number of bytes; above 16 for each hole, ul2 writes long spans", 0),
        "num_samples": Flag(1, "number of samples; sample i is seeded with (seed, i)", 1),
        "temperature": Flag(TEMPERATURE, "randomness; 0 always takes the most likely byte, the default for holes and "
                                         "repairs. mdlm, sedd and bd3lm write at 1 with top_p .8", 0.0, 1e6),
        "top_k": Flag(0, "sample from the k most likely bytes, 0 for all", 0),
        "top_p": Flag(1.0, "sample from the most likely bytes that together have this probability", 0.0, 1.0),
        "order": Flag("", "order in which [MASK]s are filled; analytic: only sedd",
                      choices=("confident", "left", "ancestral", "analytic")),
        "steps": Flag(0, "number of passes that fill the [MASK]s (bd3lm: of a block); 0: one for each [MASK], but 64 "
                         "if mdlm or sedd fills in order ancestral or analytic", 0),
        "show": Flag(False, "print the text after every pass that fills [MASK]s"),
        "speculate": Flag(True, "mtp: the extra heads draft bytes that the first head verifies"),
        "compile": Flag(False, "torch.compile the decoding step: slow to start, faster for long texts"),
    },
}
SAMPLING = "temperature", "top_k", "top_p"


# ---- sampling a byte
def distribution(logits, temperature=1.0, top_k=0, top_p=1.0):  # (..., V) -> (..., 256) float64
    """Returns the probabilities of the bytes; special ids are never sampled. At temperature 0 the most likely byte has
    probability 1. top_k keeps the k most likely bytes. top_p keeps the most likely bytes until their probabilities,
    before top_k, add up to top_p (nucleus sampling, Holtzman et al. 2020). In float64, because float32 loses the tail
    of the distribution (Zheng et al. 2024); an mps device has no float64, so the CPU does it."""
    logits = logits[..., :N_BYTES]
    logits = (logits.cpu() if logits.device.type == "mps" else logits).double()
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), N_BYTES).double()
    # subtract the maximum first: 1 / temperature may overflow
    p = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    k = top_k or N_BYTES
    if k < N_BYTES or top_p < 1:
        p, ids = p.sort(dim=-1, descending=True, stable=True)
        kept = p.cumsum(-1) - p < top_p         # a byte is kept if the more likely bytes have less than top_p
        kept[..., 0] = True                     # even if top_p is 0
        kept[..., k:] = False
        p = torch.zeros_like(p).scatter(-1, ids, p * kept)
    return p / p.sum(-1, keepdim=True)


def draw(p, g):  # (..., 256) -> bytes (...)
    return inverse_cdf(p, torch.rand(p.shape[:-1], generator=g, dtype=torch.double).to(p.device))


def sample_byte(logits, g, stop_id=None, **sampling):  # (N, V) -> ids (N,)
    """Samples a byte. With a stop_id, it returns stop_id as soon as stop_id and EOT together have the probability
    END_THRESHOLD. Then EOT is never returned, unless it is the stop_id."""
    if stop_id is None:
        return draw(distribution(logits, **sampling), g)
    stops = logits.softmax(-1)[:, list({stop_id, EOT})].sum(1) >= END_THRESHOLD     # a set: stop_id may be EOT
    logits = logits.clone()
    logits[:, EOT] = -torch.inf
    return draw(distribution(logits, **sampling), g).masked_fill(stops, stop_id)


# ---- continuing
@torch.inference_mode()
def generate(model, prompt, max_new_tokens, T, g, prefix=0, stop_id=None, positions=None, hp=None, compile=False,
             **sampling):
    """Yields the next id of each row, (N,) on the CPU, for a prompt (N, n). A row that has ended stays at EOT.
    prefix 0: attention is causal; when the block of T ids is full, its last half is encoded again. prefix P: the first
    P positions attend both ways; generation stops when the block is full. stop_id: the id that ends a hole; None: EOT
    ends the text. positions, hp: the objective's function for position numbers (None: 0, 1, 2, ...), its settings."""
    device = model.embed.weight.device
    ids = prompt.cpu()
    ended = torch.zeros(len(ids), dtype=torch.bool)
    cache = Cache(model, len(ids), T)
    start = max(0, ids.size(1) - T)             # index in ids at which the block starts
    new = ids[:, start:]                        # ids that are not cached yet

    def step(new):  # (N, m) -> logits of the next id (N, V)
        position_ids = None
        if positions:
            position_ids = positions(ids, ids.new_full((len(ids),), prefix), hp)[:, -new.size(1):].to(device)
        return model.logits(model(new.to(device), prefix, cache=cache, positions=position_ids)[:, -1])
    fast_step = make_fast_step(step, ids[:, :1], device, compile)
    for _ in range(max_new_tokens):
        if ids.size(1) - start > T:
            if prefix:                          # encoding again would change the prefix
                return
            start = ids.size(1) - T // 2        # leaves space for the next T / 2 bytes
            cache.length.zero_()
            new = ids[:, start:]
        logits = step(new) if positions or new.size(1) > 1 else fast_step(new)
        byte = sample_byte(logits.cpu(), g, stop_id, **sampling).masked_fill(ended, EOT)
        ended |= byte == (EOT if stop_id is None else stop_id)
        new = byte[:, None]
        ids = torch.cat((ids, new), dim=1)
        yield byte
        if ended.all():
            return


def make_fast_step(step, ids, device, compile):
    """Returns a faster version of the function step(ids), for ids of the same shape as the example `ids`. Compiles it
    if asked to. On CUDA the second call is captured in a graph, which it and all later calls replay."""
    if compile:
        step = torch.compile(step, fullgraph=True, dynamic=False)
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
    """Yields the ids that follow the prompt, a list of ids. Self-speculative decoding (Stern et al. 2018): the model's
    extra heads draft the next bytes, and the model verifies them in one pass. The text has the same distribution as
    that of `generate`; at temperature 0 it is the same text. draft: the function that Continue.drafter returns. stats:
    a list, to which each pass appends (number of drafts, number of kept drafts).

    Example: the text ends with 7, and the drafts are 8, 9, 5. One pass reads 7 8 9 5 and predicts what follows each. If
    8 and 9 are kept and 6 replaces 5, then 8 9 6 is written, and 5 is removed from the cache. The next drafts, of the
    bytes after 6, are what the heads predicted at 9: row 2 of the pass, because two drafts were kept."""
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
    k = draft(model, model.embed.weight[:1]).size(1)            # number of drafts, from any state
    full_step = make_fast_step(step, torch.zeros(1, k + 1, dtype=torch.long), device, compile)
    while len(ids) < end:
        # 1. make space in the block; drop drafts that would exceed the block or max_new_tokens
        if len(ids) - start > T:
            start = len(ids) - T // 2
            cache.length.zero_()
        drafts = drafts[:min(T - (len(ids) - start), end - len(ids) - 1)]
        n = len(drafts)
        # 2. one pass over the ids that are not cached yet; keep what follows ids[-1] and each draft: n + 1 rows
        new = torch.tensor([ids[start + int(cache.length):] + drafts])
        logits, draft_logits = full_step(new) if new.size(1) == k + 1 else step(new)
        logits = logits[-n - 1:]
        draft_logits = draft_logits[-n - 1:]
        # 3. keep the drafts that pass verification; remove the others from the cache
        out = verify(distribution(logits.cpu(), **sampling), q, drafts, g)
        kept = len(out) - 1
        cache.length -= n - kept
        stats.append((n, kept))
        for i in out:
            ids.append(i)
            yield i
            if i == EOT:
                return
        # 4. draft again, from the state at the last kept draft (at the old ids[-1] if none was kept)
        q = distribution(draft_logits[kept].cpu(), **sampling)
        drafts = draw(q, g).tolist()


def verify(p, q, drafts, g):  # p (n + 1, 256), q (n or more, 256), n ids -> the ids to write: kept drafts, and one more
    """Keeps a draft d with probability min(1, p(d) / q(d)), where the model predicts p and the draft was sampled from
    q. Replaces the first rejected draft by a sample of (p - q)+; if all are kept, adds a sample of the last p.
    So each id is distributed as p (Leviathan et al. 2023)."""
    n = len(drafts)
    d = torch.tensor(drafts, dtype=torch.long)[:, None]
    u = torch.rand(n, 1, generator=g, dtype=torch.double)
    is_kept = u * q[:n].gather(1, d) < p[:n].gather(1, d)       # (n, 1)
    kept = int(is_kept.long().cumprod(0).sum()) # number of drafts before the first rejected one
    rest = p[kept] if kept == n else (p[kept] - q[kept]).clamp(min=0)
    if rest.sum() == 0:                         # only because of rounding
        rest = p[kept]
    return drafts[:kept] + [int(draw(rest, g))]


# ---- filling masked bytes
def read_block(model, ids, cache):  # (N, n) -> states (N, n, C); attends to all of the cache and the block
    prefix = (cache.length + ids.size(1)).expand(len(ids))
    return model(ids, prefix, cache=cache)


def fill_logits(model, ids, use, cache=None):  # ids (N, n) with MASKs -> (N, n, V)
    """Predicts every byte of a text. use: a Fill, which says what ids surround the text; cache: if given, it holds the
    blocks before ids, and stays as it is."""
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


def text_space(use, T):  # -> maximum number of bytes of a text in a row of T positions
    return T - len(use.before) - len(use.after)


@torch.inference_mode()
def unmask(model, ids, g, use, steps=0, order="confident", cache=None, **sampling):
    """Fills the MASKs of ids (N, n), and yields ids after each pass. Other ids do not change. steps: number of passes;
    0: one for each MASK, or 64 in orders ancestral and analytic. In each pass it fills

        confident   the MASKs whose sampled bytes are most likely (LLaDA, Nie et al. 2025; MaskGIT, Chang et al. 2022,
                    without the noise that it adds to the ranking)
        left        the leftmost MASKs
        ancestral   each MASK with probability 1 / (number of passes left), as MDLM's sampler
        analytic    each MASK with this probability times the sum of the ratios, as SEDD's Tweedie denoiser
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
        count = (is_mask.sum(1, keepdim=True) + passes_left - 1) // passes_left     # MASKs per pass, rounded up
        if at_random:
            rate = 1.0                          # times 1 / passes_left: the probability
            if order == "analytic" and passes_left > 1:
                rate = (logits[..., :N_BYTES].float() - math.log(N_BYTES)).exp().sum(-1)            # about 1
            u = torch.rand(ids.shape, generator=g, dtype=torch.double).float().to(ids.device)
            chosen = u * passes_left <= rate
        elif order == "confident":
            p = logits[..., :N_BYTES].float().softmax(-1).gather(-1, new[..., None])[..., 0]        # (N, n), untempered
            p = p.masked_fill(~is_mask, -torch.inf)
            rank = p.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
            chosen = rank < count
        else:
            chosen = is_mask.cumsum(1) <= count
        ids = torch.where(is_mask & chosen, new, ids)
        yield ids


def unmask_long(model, ids, T, g, use, **kwargs):  # (1, n) of any length -> yields (1, n)
    """Fills a long text in windows that overlap; kwargs: further arguments of `unmask`. A window starts a quarter of
    its length before the first MASK. Its last quarter is filled again in the next window, where it has context on the
    right, unless the text ends in this one."""
    n = text_space(use, T)
    while (ids == MASK).any():
        first_mask = int((ids[0] == MASK).byte().argmax())
        start = max(0, min(first_mask - n // 4, ids.size(1) - n))
        n_kept = n if start + n >= ids.size(1) else n - n // 4
        for window in unmask(model, ids[:, start:start + n], g, use, **kwargs):
            ids = torch.cat((ids[:, :start], window[:, :n_kept], ids[:, start + n_kept:]), dim=1)
            yield ids


@torch.inference_mode()
def generate_blocks(model, prompt, max_new_tokens, T, n, g, steps=0, order="confident", **sampling):
    """Yields the ids that follow the prompt, a list of ids, by block diffusion: appends a block of n MASKs, fills it,
    appends the next. The clean blocks before it are cached. When the window of T ids has no space for another block,
    the blocks of its last half are encoded again. With T = 12 and n = 4, three blocks fill it, and the last is kept;
    blocks longer than T / 2 are all dropped."""
    ids = list(prompt)
    device = model.embed.weight.device
    end = len(ids) + max_new_tokens
    cache = Cache(model, 1, T)
    start = 0                                   # index in ids at which the window starts
    while len(ids) < end:
        clean = (len(ids) - start) // n * n     # number of ids in complete blocks
        if clean + n > T:
            kept = T // 2 // n * n
            start += clean - kept
            clean = kept
            cache.length.zero_()
        for i in range(start + int(cache.length), start + clean, n):
            read_block(model, torch.tensor([ids[i:i + n]], device=device), cache)
        begun = ids[start + clean:]             # the prompt may end inside a block
        block = torch.tensor([begun + [MASK] * (n - len(begun))], device=device)
        *_, block = unmask(model, block, g, Fill(), steps or n, order, cache=cache, **sampling)
        for i in block[0, len(begun):].tolist()[:end - len(ids)]:
            ids.append(i)
            yield i
            if i == EOT:
                return


# ---- infilling holes of unknown length
def infill(model, objective, hp, ids, P, holes, max_new_tokens, g, **sampling):
    """Returns the bytes of each hole, and whether all holes ended. ids, P: what Infill.prompt returns; holes: their
    number. The model writes each hole up to the id that ends it, which also starts the next. It stops one position
    before the end of a full row, because in training the last target of a full row is always EOT."""
    T = hp.block_size
    answers = [[] for _ in range(holes)]
    for answer, end in zip(answers, find_use(objective, "infill").stop_ids):
        left = max(0, min(max_new_tokens - sum(map(len, answers)), T - len(ids)))
        answer += map(int, generate(model, to_row(ids, hp), left, T, g, P, end, objective.positions, hp, **sampling))
        if answer[-1:] != [end]:
            return answers, False
        ids = [*ids, *answer]
        answer.pop()
    return answers, True


@torch.inference_mode()
def trim_to_suffix(model, objective, hp, left, middle, right):  # lists of ids -> the start of the middle
    """For a model that also predicts left to right and rarely ends a middle with EOT. Returns the shortest start of the
    middle after which the first bytes of the suffix are at least a tenth as likely as after the best cut."""
    use = find_use(objective, "continue")
    right = right[:SUFFIX_BYTES]
    if not right or not use or use.both_ways:
        return middle
    n = len(right)
    nats = []                                   # of the suffix after each cut
    for cut in range(len(middle) + 1):
        context = ([EOT] + left + middle[:cut])[-(hp.block_size - n):]
        x = to_row(context + right, hp)
        logits = model.logits(model(x[:, :-1], 0)[0, -n:])                          # (n, V)
        nats.append(float(F.cross_entropy(logits, x[0, -n:], reduction="sum")))
    likely = [cut for cut in range(len(nats)) if nats[cut] < min(nats) + math.log(10)]
    return middle[:likely[0]]


# ---- repairing
@torch.inference_mode()
def repair(model, objective, noisy, hp, g, **sampling):  # any number of ids -> yields bytes
    T = hp.block_size
    use = find_use(objective, "repair")
    n = objective.n_bytes(T, hp)
    limit = use.max_bytes(hp) if use.max_bytes else None        # may also return None
    longest = min(n, limit) if limit else T - 1 - n             # noise may make a text longer
    for piece in cut_after_spaces(noisy, longest):
        ids = to_row([i for i in piece if i != EOT] + [SEP], hp)                    # a copied EOT would end the row
        P = ids.size(1)
        max_new_tokens = min(T + 1 - P, n + 1)  # the longest target in training
        written = map(int, generate(model, ids, max_new_tokens, T, g, P, None, objective.positions, hp, **sampling))
        yield from (i for i in written if i != EOT)


def cut_after_spaces(ids, n):  # -> yields pieces of up to n ids
    """The pieces are about equally long and end after white space where possible, but not right before a hole."""
    while ids:
        end = math.ceil(len(ids) / math.ceil(len(ids) / n))
        if len(ids) > n:
            ends = [i for i in range(n // 4 + 1, n + 1) if ids[i - 1] in SPACES and ids[i] != MASK]
            end = min(ends, key=lambda i: abs(i - end), default=end)
        yield ids[:end]
        ids = ids[end:]


# ---- texts, in and out
def read_text(flag, value):  # the value of a flag -> bytes; --corpus is always the name of a file
    path = value.removeprefix("FILE:")
    if path == value and flag != "corpus":
        return value.encode("utf-8", "surrogateescape")         # Python decodes a POSIX command line this way
    try:
        with open(path, "rb") as f:
            return f.read()
    except (OSError, ValueError) as e:          # ValueError: a path with a NUL in it
        fail(f"--{flag} {path}: cannot be read ({e}). Try a path to text")


def read_masks(text):  # bytes -> ids, with MASKs in place of the markers
    first, *rest = re.split(MASKS, text)        # text, number of bytes in the marker, text, ...
    ids = list(first)
    for n, text in zip(rest[::2], rest[1::2]):
        ids += [MASK] * int(n or 1) + list(text)
    return ids


def to_row(ids, hp):  # list or (n,) of any integers -> (1, n) long on the model's device
    return torch.as_tensor(ids).long().to(hp.device)[None]


def to_text(ids):  # -> str; MASK becomes a block, EOT is left out
    text = b"".join("█".encode() if i == MASK else bytes([i]) for i in map(int, ids) if i != EOT)
    return printable(text.decode("utf-8", "replace"))


def printable(text):  # on a terminal, escapes control characters as \x1b and drops carriage returns
    if not sys.stdout.isatty():
        return text
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda c: f"\\x{ord(c[0]):02x}", text.replace("\r", ""))


def highlight(ids, is_new, plain=("", "")):  # -> str
    """On a terminal new characters are in reverse video, elsewhere between the strings of `plain`. A character of
    several bytes is new if one of them is."""
    character = list(itertools.accumulate(not 0x80 <= i < 0xc0 for i in ids))       # number of each byte's character
    new = set(itertools.compress(character, is_new))
    before, after = ("\033[7m", "\033[0m") if sys.stdout.isatty() else plain
    out = ""
    for part_is_new, part in itertools.groupby(zip(ids, character), lambda pair: pair[1] in new):
        text = to_text([i for i, _ in part])
        out += before + text + after if part_is_new else text
    return out


def stream(prompt, steps):  # ids, an iterator of ids -> the ids that it yielded
    """Prints the prompt, then bytes as they come, a character once all its bytes are there. The line between the two
    goes to standard error: a terminal, a notebook and a log show it, while a pipe or a file gets only the text."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(bytes(i for i in prompt if i != EOT))
    print(printable(text), end="", flush=True)
    if text:
        note("the model continues:", start="" if text.endswith("\n") else "\n")
    ids = []
    for i in map(int, steps):
        ids.append(i)
        text = decoder.decode(bytes([i] if i != EOT else []))
        print(printable(text), end="", flush=True)
    print(decoder.decode(b"", final=True), flush=True)
    return ids


def note(text, start=""):  # prints what is not part of the answer, to standard error
    print(f"{start}--- {text}", file=sys.stderr, flush=True)


def keep_within(ids, n):  # -> the last n ids; notes what is dropped
    if len(ids) > n:
        note(f"reads only the last {n} of {len(ids)} bytes of the prompt, to leave space in the block")
    return ids[-n:]


# ---- modes: (model, objective, its use of that mode, hp, args, g) -> prints one sample
# args: a Namespace of all flags, with defaults; texts are ids or bytes, None if they were not given. args.given: the
# names of the flags that were given; args.sampling: temperature, top_k and top_p, if they were given
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
    """Fills masked bytes. A model that was trained at any mask rate also continues a prompt without holes."""
    T = hp.block_size
    prompt = args.prompt
    first = 0                                   # index in the prompt of the first byte that the model reads
    sampling = args.hole_sampling
    if MASK not in prompt:
        if not use.trained_at_any_rate:
            fail("--prompt: has no hole. Try one with [MASK] or [MASK:4] in it")
        near = keep_within(prompt, T // 2)
        first = len(prompt) - len(near)
        space = T - len(near)
        if args.max_new_tokens > space:
            note(f"writes only {space} bytes, which fill the block of {T}")
        prompt = prompt + [MASK] * min(args.max_new_tokens, space)
        sampling = DIFFUSION_SAMPLING | args.sampling
    elif "max_new_tokens" in args.given:
        fail("--max_new_tokens: the holes have their own lengths. Try [MASK:4] for a hole of 4 bytes")
    filled = row = to_row(prompt[first:], hp)
    order = args.order or use.orders[0]
    for filled in unmask_long(model, row, T, g, use, steps=args.steps, order=order, **sampling):
        if args.show:
            print(f"--- pass\n{to_text(filled[0])}", flush=True)
    print(highlight(prompt[:first] + filled[0].tolist(), [i == MASK for i in prompt]))


def infill_mode(model, objective, use, hp, args, g):
    T = hp.block_size
    limit = args.max_new_tokens
    if args.prompt is None:
        pieces = [[*(args.prefix or [])], [*(args.suffix or [])]]               # the texts around the holes
    elif args.prefix is None and args.suffix is None:
        pieces = [[*piece] for piece in re.split(HOLES, args.prompt)]
    else:
        fail("--prompt: already contains the text around its holes. Try it without --prefix and --suffix")
    holes = len(pieces) - 1
    if not 1 <= holes <= len(use.stop_ids):
        fail(f"--prompt: has {holes} holes, {objective.name} fills 1 to {len(use.stop_ids)}. Try one <extra_id_0>")
    near = pieces                               # the parts of them that the model reads
    if holes == 1:                              # only the bytes nearest to the hole, if the text is long
        half = max(1, (T - 8 - min(limit, T // 3)) // 2)        # 8: space for special ids
        near = [pieces[0][-half:], pieces[1][:half]]
    if near != pieces:
        note(f"reads only the last {len(near[0])} bytes before the hole and the first {len(near[1])} after it")
    expected = limit // holes if "max_new_tokens" in args.given else HOLE_BYTES     # number of bytes of a hole
    ids, P = use.prompt(near, expected, hp)
    if len(ids) + holes > T:
        fail(f"--prompt: takes {len(ids)} positions, which leaves no space in a block of {T}. Try a shorter text")
    answers, ended = infill(model, objective, hp, ids, P, holes, limit, g, **args.hole_sampling)
    if holes == 1:
        trimmed = trim_to_suffix(model, objective, hp, near[0], answers[0], near[1])
        ended = ended or trimmed != answers[0]  # an answer that was trimmed has ended
        answers = [trimmed]
    out = list(pieces[0])
    is_new = [False] * len(out)
    for answer, piece in zip(answers, pieces[1:]):
        out += answer + piece
        is_new += [True] * len(answer) + [False] * len(piece)
    print(highlight(out, is_new), flush=True)
    if not ended:
        note(f"the answer did not end by itself within {limit} bytes and the block of {T}")


def repair_mode(model, objective, use, hp, args, g):
    stream([], repair(model, objective, args.prompt, hp, g, **args.hole_sampling))


def mark_mode(model, objective, use, hp, args, g):  # marks suspicious bytes, and lists the ten most suspicious ones
    rows = [to_row(piece, hp) for piece in cut_after_spaces(args.prompt, hp.block_size)]
    p = torch.cat([use.predict(model, row)[0] for row in rows]).sigmoid().cpu()
    print(highlight(args.prompt, p > 0.5, ("«", "»")))
    print("--- the most suspicious bytes, with the probability that each is wrong:")
    text = bytes(args.prompt).decode("utf-8", "surrogateescape")
    character = [k for k, c in enumerate(text) for _ in c.encode("utf-8", "surrogateescape")]       # of each byte
    for i in p.argsort(descending=True)[:10].tolist():
        k = character[i]
        line = text.count("\n", 0, k) + 1
        start = text.rfind("\n", 0, k) + 1      # of the line
        after = text[k:k + 9].partition("\n")[0][1:]            # nothing after the end of the line
        context = repr(f"{text[max(start, k - 8):k]}«{text[k]}»{after}")[1:-1]      # control characters as \x1b
        print(f"line {line}, column {k - start + 1}: {context}  {float(p[i]):.2f}")


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


# task: what it does, for messages; flags: all that it reads, except those of a run; required: texts that must be given
Mode = namedtuple("Mode", "function task flags required", defaults=[()])
WRITING = "max_new_tokens", "num_samples", *SAMPLING
MODES = {
    "continue": Mode(continue_mode, "continue a prompt", ("prompt", "speculate", "compile", *WRITING)),
    "continue_blocks": Mode(continue_blocks_mode, "continue a prompt", ("prompt", "order", "steps", *WRITING)),
    "fill": Mode(fill_mode, "fill [MASK]s", ("prompt", "order", "steps", "show", *WRITING)),
    "infill": Mode(infill_mode, "write between texts", ("prompt", "prefix", "suffix", *WRITING)),
    "repair": Mode(repair_mode, "repair a text", ("prompt", "num_samples", *SAMPLING), required=("prompt",)),
    "mark": Mode(mark_mode, "mark suspicious bytes", ("prompt",), required=("prompt",)),
    "follow": Mode(follow_mode, "compare two texts", ("prefix", "suffix"), required=("prefix", "suffix")),
    "search": Mode(search_mode, "search", ("query", "corpus"), required=("query", "corpus")),
    "seam": Mode(seam_mode, "find where a text was cut", ("prompt",), required=("prompt",)),
}


# ---- the command
def choose_members(hp, name):  # -> [Member] of a run; with a name only that one
    members = get_members(hp)
    chosen = [m for m in members if name in ("", m.objective.name)]
    if not chosen:
        fail(f"--objective {name}: the run was trained as {hp.objective}. Try --objective {members[0].objective.name}")
    return chosen


def choose_use(members, texts):  # [Member], {flag: bytes} -> (member, use)
    """Among the uses whose mode reads all of these texts (if there is none, among all uses): the first whose marker is
    in the prompt, else the first that needs no marker, else the first."""
    all_uses = [(m, use) for m in members for use in m.objective.uses]
    uses = [(m, use) for m, use in all_uses if set(texts) <= set(MODES[use.mode].flags)] or all_uses
    modes = [uses[0][1].mode]
    if "prompt" in texts:
        marked = [mode for mode, marker in MARKERS.items() if re.search(marker, texts["prompt"])]
        unmarked = [use.mode for _, use in uses if use.mode not in ("infill", "fill")]
        modes = marked + unmarked + modes
    return next((m, use) for mode in modes for m, use in uses if use.mode == mode)


def refuse_flag(flag, objective, mode):  # reports a flag that the Mode does not read, instead of ignoring it
    if flag not in FLAGS["texts"] or any(flag in MODES[use.mode].flags for use in objective.uses):
        fail(f"--{flag}: has no effect when {objective.name} is used to {mode.task}. Try other texts, or without it")
    name = next(name for name, other in MODES.items() if flag in other.flags)
    able = [other.name for other in OBJECTIVES.values() if find_use(other, name)]
    fail(f"--{flag}: {objective.name} does not {MODES[name].task}; train {' or '.join(able)} for that")


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
    args = Namespace(**{name: flag.default for flags in FLAGS.values() for name, flag in flags.items()} | given)
    path = args.out_dir or newest_run()
    model, hp, ckpt = load_run(path, args.device, args.dtype)
    texts = {flag: read_text(flag, given[flag]) for flag in FLAGS["texts"] if flag in given}
    members = get_members(hp)
    m, use = choose_use(choose_members(hp, args.objective), texts)
    objective = m.objective
    mode = MODES[use.mode]
    for flag in sorted(set(given) - {*FLAGS["run"], *mode.flags}):
        refuse_flag(flag, objective, mode)
    if args.order and args.order not in use.orders:
        fail(f"--order {args.order}: unknown to {objective.name}. Try {' or '.join(use.orders)}")
    if "prompt" in texts and use.mode != "infill":              # infill_mode splits the bytes at their holes
        texts["prompt"] = read_masks(texts["prompt"]) if use.mode in MARKERS else list(texts["prompt"])
    member = f", used as {objective.name}" if len(members) > 1 else ""
    note(f"{path}: {hp.objective}{member}, step {ckpt['step']} of {hp.max_iters}")
    if not texts:
        texts = demonstration(use.mode, ckpt["held_out"], hp.block_size)
    for flag in mode.required:
        if not texts.get(flag):
            fail(f"--{flag}: is missing or empty. Try some text")
    vars(args).update(dict.fromkeys(FLAGS["texts"]) | texts)
    args.given = set(given)
    args.sampling = {flag: given[flag] for flag in SAMPLING if flag in given}
    # holes and repairs take the most likely bytes, unless several samples are wanted
    args.hole_sampling = dict(temperature=TEMPERATURE if args.num_samples > 1 else 0.0) | args.sampling
    for i in range(args.num_samples):
        if args.num_samples > 1:
            print(f"--- sample {i + 1}")
        mode.function(model, objective, use, m.hp, args, make_rng(f"{args.seed},{i},sample"))


if __name__ == "__main__":
    run_program(main)
