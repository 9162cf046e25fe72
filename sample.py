"""Use a trained model for what it was trained to do. Examples, each with the objectives that it is made for:

    python sample.py                                                a demonstration on held-out text: any objective
    python sample.py --prompt "def main(" --num_samples 3           continue: clm, mtp, prefix, ul2, fim, hybrid, bd3lm
    python sample.py --prompt "import [MASK:2], sys"                fill holes of known length: mlm, hybrid
    python sample.py --prompt "class [MASK:40]:" --steps 20 --show  write in any order, in 20 passes: mdlm, sedd, xlnet
    python sample.py --prompt "retrun x" --correct                  correct typos: clm, hybrid, mtp, fim; wrong letters
                                                                    only: mlm, mdlm, sedd, nsp, xlnet
    python sample.py --prompt FILE:old.txt --fix > new.txt          correct a file
    python sample.py --prompt "ran<extra_id_0>(9): pri<extra_id_1>(i)"  fill holes of any length: hybrid, fim, span, ul2
    python sample.py --prefix "def add(a, b):" --suffix "return c"  write between two texts: hybrid, fim, span, ul2
    python sample.py --prompt "def main([MASK]) retu[MASK] 0"       repair a text and fill its holes: bart
    python sample.py --prompt "a text with a typq in it"            mark the bytes that look wrong: electra
    python sample.py --prefix "Once upon" --suffix "a time"         does the second text follow the first: nsp
    python sample.py --query "open a file" --corpus book.txt        find the lines nearest to a text: contrastive
    python sample.py --prompt "dog. The quick brown fox jumps over the lazy "       find where a text began: rotation

Add --out_dir out/NAME to use a run other than the latest. Write FILE:path in place of a text to read it from a file.
Holes in a prompt: [MASK] is one byte (bart: any number), [MASK:4] is 4 bytes, <extra_id_0> is any number of bytes.
In an <extra_id_0>, hybrid tries 0 to 16 bytes (or up to max_new_tokens, at most a third of the block).
fim and hybrid fill several holes one after the other, and each may have max_new_tokens bytes; span and ul2 share them.
Texts go to standard output, and notes to standard error. A terminal highlights what was filled in.

defaults:         temperature  top_p  order      steps     objectives
  continue                0.8         -          -         clm, prefix, ul2, fim, mtp, hybrid
  continue_blocks         1.0    0.8  left       1 a byte  bd3lm
  fill                    0.0         confident  1 a byte  mlm, nsp, hybrid
  fill                    0.0         ancestral  64        mdlm, sedd, xlnet
  write                   1.0    0.8  ancestral  64        mdlm, sedd, xlnet
  infill                  0.0         -          -         span, ul2, fim, hybrid
  repair                  0.0         -          -         bart
The temperature 0 becomes 0.8 with num_samples, top_k or top_p.
"""
# N rows, n ids of a text, T = block_size (bd3lm: half of it), V outputs of the byte head, g: random generator
# **sampling: the arguments of `distribution`, that is temperature, top_k and top_p
import codecs
import math
import os
import re
import sys
from argparse import Namespace
from collections import namedtuple

from data import EOT, MASK, SEP, Flag, check_text, fail, from_bytes, make_rng
from model import Cache
from objectives import IGNORE_INDEX, N_BYTES, Continue, fill_logits, frame_prompt, inverse_cdf, position_nats
from objectives import text_space
from run import DEVICE_FLAGS, GraphedStep, get_members, load_run, make_parser, newest_run, run_program, to_words
import torch
import torch.nn.functional as F
from tqdm import tqdm

END_THRESHOLD = 0.15                            # a hole ends as soon as its end has this probability
HOLE_BYTES = 4                                  # expected length of a hole of unknown length
LONGEST_FILLED = 16                             # by default, the longest answer that is tried by filling [MASK]s
SUFFIX_BYTES = 16                               # number of bytes after a hole that decide where its answer is trimmed
ANCESTRAL_PASSES = 64                           # default number of passes in order ancestral
CORRECTION_PASSES = 4                           # number of passes of corrections by masking
ERROR_RATE = 0.01                               # default share of wrong bytes that corrections by masking assume
EDIT_RATE = 1e-6                                # and that corrections by edits assume
EDIT_WINDOW = 128                               # number of bytes that are read to correct a text by edits
LOOKAHEAD = 16                                  # number of bytes on which edits are compared
SURPRISE_BYTES = 4                              # number of bytes within which an error surprises the model
LIKELY_BYTES = 4                                # number of bytes that are tried at each place
MAX_ROWS = 64                                   # maximum number of rows of a forward pass
SPACES = {EOT, *b" \t\n\v\f\r"}                 # a long text may be cut after one of these bytes
MASKS = rb"\[MASK(?::([1-9]\d{0,5}))?\]"
HOLES = rb"(?:<extra_id_\d+>)+"                  # neighbours are one hole
# a marker of a hole, or one that was mistyped, but not x[mask]
LIKE_A_HOLE = (rb"(?i:<\|?(?:mask|extra.?id|fill|blank)[^<>\s]{0,20}>|(?<!\w)\[ ?(?:mask|blank)[^]\[\n]{0,12}\])"
               rb"|\[MASK[^]\[\n]{0,12}\]")
# Start and end of a part to highlight, in the text that a mode yields. These are halves of surrogate
# pairs, which no decoded text contains; `show` and `ask` replace them
FILLED = "\ud800\ud801"                         # the model has filled it in
WRONG = "\ud802\ud803"                          # it looks wrong
IN_A_FILE = str.maketrans({FILLED[0]: "", FILLED[1]: "", WRONG[0]: "«", WRONG[1]: "»"})
CONTROL = {*range(32), *range(127, 160)} - {*b"\t\n"}
NOT_UTF8 = dict.fromkeys(range(0xDC80, 0xDD00), "�")            # how to_text decodes bytes that are not UTF-8
PLAIN = {i: f"\\x{i:02x}" for i in CONTROL} | {ord("\r"): ""} | NOT_UTF8 | IN_A_FILE      # on a terminal without colors
COLORED = PLAIN | str.maketrans(
    {FILLED[0]: "\033[7m", FILLED[1]: "\033[0m", WRONG[0]: "\033[7m", WRONG[1]: "\033[0m"})
SAMPLING = "temperature", "top_k", "top_p"
SWITCHES = {"correct", "fix"}                   # flags that choose a use, as texts do

FLAGS = {
    "run": {
        "out_dir": Flag("", "run folder or checkpoint file; by default the latest run under out/"),
        "objective": Flag("", "member of a mixture to use; by default the first that fits the texts"),
        "seed": Flag(1, "random seed of the samples", 0, 2 ** 31),
    } | DEVICE_FLAGS,
    "texts": {
        "prompt": Flag("", "text to continue, fill, repair or examine; --prompt=-x if it starts with a dash"),
        "prefix": Flag("", "text before a hole; nsp: the first text"),
        "suffix": Flag("", "text after a hole; nsp: the second text"),
        "query": Flag("", "contrastive: text to look for"),
        "corpus": Flag("", "contrastive: file to search; its three nearest lines are printed"),
    },
    "writing": {                                # for defaults that depend on the mode see above
        "max_new_tokens": Flag(300, "maximum number of new bytes (ul2: above 16 a hole, it writes long spans)", 0),
        "num_samples": Flag(1, "number of samples; sample i is seeded with (seed, i)", 1, 10 ** 5),
        "temperature": Flag(0.0, "randomness; 0 takes the most likely byte", 0.0, 1e6),
        "top_k": Flag(0, "sample from the k most likely bytes, 0 for all", 0),
        "top_p": Flag(0.0, "sample from the most likely bytes that together have this probability", 0.0, 1.0),
        "order": Flag("", "order in which [MASK]s are filled", choices=("confident", "left", "ancestral")),
        "steps": Flag(0, "number of passes to fill the [MASK]s of a window or a block", 0),
        "show": Flag(False, "print the text after every pass that fills [MASK]s"),
        "correct": Flag(False, "mark the bytes that look wrong, and say what was meant"),
        "fix": Flag(False, "print the corrected text, and nothing else, to standard output"),
        "error_rate": Flag(0.0, f"assumed share of wrong bytes [{EDIT_RATE}; by masking {ERROR_RATE}]", 1e-9, 0.5),
        "speculate": Flag(True, "mtp: the extra heads draft bytes that the first head verifies"),
        "compile": Flag(False, "torch.compile the decoding step: slow to start, faster for long texts"),
    },
}


# ---- sampling a byte
def distribution(logits, temperature=1.0, top_k=0, top_p=1.0):  # (..., V) -> (..., 256) float64
    """Returns the probabilities of the bytes; special ids are never sampled. At temperature 0 the most likely byte has
    probability 1. top_k keeps the k most likely bytes. top_p keeps the most likely bytes until their probabilities,
    computed before top_k is applied, add up to top_p (nucleus sampling, Holtzman et al. 2020). The result is float64:
    float32 loses the tail of the distribution (Zheng et al. 2024). mps has no float64, so there the CPU computes it."""
    logits = logits[..., :N_BYTES]
    if logits.device.type == "mps":
        logits = logits.cpu()
    logits = logits.double()
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), N_BYTES).double()
    # subtract the maximum first, because a very low temperature would make large logits overflow
    p = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    if 0 < top_k < N_BYTES or top_p < 1:
        p, ids = p.sort(dim=-1, descending=True, stable=True)
        kept = p.cumsum(-1) - p < top_p         # a byte is kept if the more likely bytes have less than top_p
        kept[..., 0] = True                     # even if top_p is 0
        if top_k:
            kept[..., top_k:] = False
        p = torch.zeros_like(p).scatter(-1, ids, p * kept)
    return p / p.sum(-1, keepdim=True)


def sample_from(p, g):  # (..., 256) -> bytes (...)
    return inverse_cdf(p, torch.rand(p.shape[:-1], generator=g, dtype=torch.double).to(p.device))


def sample_byte(logits, g, stop_id=None, **sampling):  # (N, V) -> ids (N,)
    """Samples a byte. With a stop_id, returns stop_id if stop_id and EOT together have at least the probability
    END_THRESHOLD, and otherwise a byte other than EOT."""
    if stop_id is None:
        return sample_from(distribution(logits, **sampling), g)
    p_end = logits.softmax(-1)[:, list({stop_id, EOT})].sum(1)
    return sample_from(distribution(without_eot(logits), **sampling), g).masked_fill(p_end >= END_THRESHOLD, stop_id)


def without_eot(logits):  # (..., V) -> the same logits, with which EOT is never sampled
    return logits.index_fill(-1, torch.tensor(EOT, device=logits.device), -torch.inf)


# ---- continuing
@torch.inference_mode()
def generate(model, prompt, max_new_tokens, T, g, prefix=0, stop_id=None, get_positions=None, compile=False,
             **sampling):
    """Continues a prompt (N, n). Yields the next id of each row, (N,) on the CPU; a row that has ended stays at EOT.

        prefix          number of ids at the start that attend to each other in both directions
        stop_id         the id that ends a hole; None: EOT ends the text
        get_positions   (ids (N, n)) -> position numbers (N, n); None: 0, 1, 2, ...

    When the cache of T ids is full, a text with a prefix ends; for others see Cache.first_unread."""
    device = model.embed.weight.device
    ids = prompt.cpu()
    N, n = ids.shape
    if prefix:                                  # T ids can be read, and the last one predicts one more
        max_new_tokens = min(max_new_tokens, T + 1 - n)
    ended = torch.zeros(N, dtype=torch.bool)
    cache = Cache(model, N, T)

    def step(new, positions=None):  # (N, m) -> logits of the next id (N, V)
        h = model(new.to(device), prefix, cache=cache, positions=positions)
        return model.logits(h[:, -1])
    fast_step = make_fast_step(step, ids[:, :1], device, compile)
    for _ in range(max_new_tokens):
        new = ids[:, cache.first_unread(ids.size(1)):]          # the ids that this pass reads
        if get_positions:
            logits = step(new, get_positions(ids)[:, -new.size(1):].to(device))
        elif new.size(1) == 1:
            # a copy, whose strides do not depend on the length of the text: so the step is compiled once
            logits = fast_step(new.clone(memory_format=torch.contiguous_format))
        else:
            logits = step(new)
        new_id = sample_byte(logits.cpu(), g, stop_id, **sampling).masked_fill(ended, EOT)
        ended |= new_id == (EOT if stop_id is None else stop_id)
        ids = torch.cat((ids, new_id[:, None]), dim=1)
        yield new_id
        if ended.all():
            return


def position_function(objective, prefix, hp):  # -> the get_positions of `generate`
    if objective.numbering is None:
        return None
    return lambda ids: objective.numbering(ids, ids.new_full((len(ids),), prefix), hp)


def make_fast_step(step, ids, device, compile):
    """Returns a faster version of step(ids), for ids of the same shape as the example `ids`: compiled if asked to, and
    on CUDA captured in a graph by the second call; this call and all later ones replay it."""
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
    """Continues a prompt, a list of ids, and yields ids. Self-speculative decoding (Stern et al. 2018): the model's
    extra heads draft the next bytes, and the model verifies them in one pass. The text has the same distribution as
    that of `generate`; at temperature 0 it is the same text. draft: what Continue.drafter returns. stats: a list, to
    which each pass appends (number of drafts, number of kept drafts).

    Example: the text ends with 7, and the drafts are 8, 9, 5. One pass reads 7 8 9 5 and predicts what follows each. If
    8 and 9 are kept and 6 replaces 5, then 8 9 6 is written, and 5 is removed from the cache. The next drafts, of the
    bytes after 6, are what the heads predicted at 9: row 2 of the pass, because two drafts were kept."""
    ids = list(prompt)
    device = model.embed.weight.device
    end = len(ids) + max_new_tokens
    cache = Cache(model, 1, T)
    drafts = []                                 # guesses of the ids after ids[-1]
    q = torch.zeros(0, N_BYTES)                 # the distributions from which they were drawn

    def step(new):  # (1, m) -> logits of the next id (m, V) and of the ids after it (m, n_heads, V)
        h = model(new.to(device), 0, cache=cache)[0]
        return model.logits(h), draft(model, h)
    n_heads = draft(model, model.embed.weight[:1]).size(1)      # number of drafts from a state; here from any state
    full_step = make_fast_step(step, torch.zeros(1, n_heads + 1, dtype=torch.long), device, compile)
    while len(ids) < end:
        # 1. make space in the cache, as `generate` does; drop drafts that would exceed it or max_new_tokens
        unread = ids[cache.first_unread(len(ids)):]
        n_drafts = min(len(drafts), cache.start + T - len(ids), end - len(ids) - 1)
        drafts = drafts[:n_drafts]
        # 2. one pass over the ids that are not cached yet; keep the predictions after ids[-1] and after each draft
        new = torch.tensor([unread + drafts])
        logits, draft_logits = full_step(new) if new.size(1) == n_heads + 1 else step(new)
        logits = logits[-n_drafts - 1:]                         # (n_drafts + 1, V)
        draft_logits = draft_logits[-n_drafts - 1:]             # (n_drafts + 1, n_heads, V)
        # 3. keep the drafts that pass verification; remove the others from the cache
        written = verify(distribution(logits.cpu(), **sampling), q, drafts, g)
        n_kept = len(written) - 1
        cache.length -= n_drafts - n_kept
        stats.append((n_drafts, n_kept))
        for i in written:
            ids.append(i)
            yield i
            if i == EOT:
                return
        # 4. draft again, from the state at the last kept draft (at the old ids[-1] if none was kept)
        q = distribution(draft_logits[n_kept].cpu(), **sampling)
        drafts = sample_from(q, g).tolist()


def verify(p, q, drafts, g):  # -> list of ids to write: the kept drafts, and one more
    """Decides which drafts to keep, so that each written id is distributed as the model's own prediction (Leviathan et
    al. 2023). p (n + 1, 256): the model's predictions for n drafts and the id after them. q (n or more, 256): the
    distributions from which the drafts were drawn. A draft d is kept with probability min(1, p(d) / q(d)). The first
    rejected draft is replaced by a sample of (p - q)+. If all are kept, one more id is sampled from the last p."""
    u = torch.rand(len(drafts), generator=g, dtype=torch.double)
    for i, d in enumerate(drafts):
        if u[i] * q[i, d] < p[i, d]:
            continue
        rest = (p[i] - q[i]).clamp(min=0)
        if rest.sum() == 0:                     # only because of rounding
            rest = p[i]
        return drafts[:i] + [int(sample_from(rest, g))]
    return drafts + [int(sample_from(p[len(drafts)], g))]


# ---- filling masked bytes
def read_block(model, ids, cache):  # (N, n) -> states (N, n, C); attends to all of the cache and the block
    prefix = (cache.length + ids.size(1)).expand(len(ids))
    return model(ids, prefix, cache=cache)


@torch.inference_mode()
def unmask(model, ids, g, use, steps=0, order="confident", cache=None, may_end=False, **sampling):
    """Fills the MASKs of ids (N, n), and yields ids after each pass. A pass predicts all MASKs, and keeps the sampled
    bytes of those that `choose_masks` chooses. If it chose none, the next pass reuses the predictions.

        steps       number of passes; 0: one for each MASK, or ANCESTRAL_PASSES in order ancestral
        cache       in block diffusion, the blocks before ids; then `use` is ignored
        may_end     EOT may be sampled
    """
    if not steps:
        steps = ANCESTRAL_PASSES if order == "ancestral" else max(1, int((ids == MASK).sum(1).max()))
    changed = True                              # are these ids new to the model?
    for passes_left in range(steps, 0, -1):
        is_mask = ids == MASK
        if changed and cache is None:
            logits = fill_logits(model, ids, use)               # (N, n, V)
        elif changed:                           # block diffusion
            logits = model.logits(read_block(model, ids, cache))
            cache.length -= ids.size(1)         # the block is cached when it is complete
        allowed = logits if may_end else without_eot(logits)
        sampled = sample_from(distribution(allowed, **sampling), g).to(ids.device)         # (N, n)
        chosen = is_mask & choose_masks(order, is_mask, logits, sampled, passes_left, g)
        changed = bool(chosen.any())
        ids = torch.where(chosen, sampled, ids)
        yield ids
        if not (ids == MASK).any():
            return


def choose_masks(order, is_mask, logits, sampled, passes_left, g):  # -> (N, n) bool
    """Chooses the MASKs that a pass fills.

        left        the leftmost MASKs
        confident   the MASKs whose sampled bytes are most likely (LLaDA, Nie et al. 2025; MaskGIT, Chang et al. 2022,
                    without the noise that it adds to the ranking)
        ancestral   each MASK with probability 1 / passes_left, as MDLM's sampler

    Orders left and confident choose 1 / passes_left of the MASKs, rounded up: of 5 in 2 passes, 3 and 2.
    In order confident, a text that is written from nothing becomes white space."""
    n_chosen = (is_mask.sum(1, keepdim=True) + passes_left - 1) // passes_left      # (N, 1)
    if order == "left":
        return is_mask.cumsum(1) <= n_chosen
    if order == "confident":                    # by the model's own probability, at temperature 1
        p = logits[..., :N_BYTES].float().softmax(-1).gather(-1, sampled[..., None])[..., 0]        # (N, n)
        p = p.masked_fill(~is_mask, -torch.inf)
        by_p = p.argsort(dim=1, descending=True, stable=True)   # positions, most likely first
        rank = by_p.argsort(dim=1)              # 0 at the most likely position
        return rank < n_chosen
    u = torch.rand(is_mask.shape, generator=g, dtype=torch.double).float().to(is_mask.device)
    return u * passes_left <= 1


def unmask_long(model, ids, T, g, use, **kwargs):  # (1, n) of any length -> yields (1, n) after each pass
    """Fills a long text in windows that overlap; kwargs: further arguments of `unmask`. A window starts a quarter of
    its length before the first MASK. Its last quarter is thrown away, unless the text ends there: MASKs in it are
    filled in the next window, where they have context on the right."""
    size = text_space(use, T)
    n = ids.size(1)
    while (ids == MASK).any():
        first_mask = int((ids[0] == MASK).byte().argmax())
        start = max(0, min(first_mask - size // 4, n - size))   # the window lies inside the text
        end = start + size
        kept_end = end if end >= n else end - size // 4
        for window in unmask(model, ids[:, start:end], g, use, **kwargs):
            ids = torch.cat((ids[:, :start], window[:, :kept_end - start], ids[:, kept_end:]), dim=1)
            yield ids


@torch.inference_mode()
def generate_blocks(model, prompt, max_new_tokens, T, length, g, steps=0, order="confident", **sampling):
    """Continues a prompt, a list of ids, by block diffusion, and yields ids. Appends a block of `length` MASKs, fills
    it, and appends the next. The complete blocks before it are cached. When the window of T ids has no space for
    another block, a new window starts with the last T / 2 ids, which are read again."""
    ids = list(prompt)
    device = model.embed.weight.device
    end = len(ids) + max_new_tokens
    cache = Cache(model, 1, T)
    start = 0                                   # index in ids at which the window starts
    while len(ids) < end:
        # 1. make space in the window for another block
        if (len(ids) - start) // length >= T // length:         # all blocks of the window are complete
            start = len(ids) - T // 2
            cache.length.zero_()
        n_complete = (len(ids) - start) // length * length      # number of ids in complete blocks
        # 2. read the complete blocks that are not cached yet
        for i in range(start + int(cache.length), start + n_complete, length):
            read_block(model, torch.tensor([ids[i:i + length]], device=device), cache)
        # 3. fill the next block; the prompt may end inside it
        begun = ids[start + n_complete:]
        block = torch.tensor([begun + [MASK] * (length - len(begun))], device=device)
        *_, block = unmask(model, block, g, None, steps or length, order, cache=cache, may_end=True, **sampling)
        new = block[0, len(begun):].tolist()
        for i in new[:end - len(ids)]:
            ids.append(i)
            yield i
            if i == EOT:
                return


# ---- correcting
def masked_log_probs(model, ids, use, passes):  # (1, n), a Fill -> log p of bytes 1..255 (n, 255), float64 on the CPU
    """Predicts each byte from the others. In pass i, the bytes i, i + passes, i + 2 * passes, ... are masked."""
    i = torch.arange(ids.size(1), device=ids.device)
    is_masked = i % passes == torch.arange(passes, device=ids.device)[:, None]      # (passes, n)
    rows = ids.expand(passes, -1).masked_fill(is_masked, MASK)
    logits = torch.cat([fill_logits(model, some, use) for some in rows.split(MAX_ROWS)])
    return logits[i % passes, i, 1:N_BYTES].cpu().double().log_softmax(-1)          # of each byte in its own pass


def find_corrections(logp, ids, error_rate):  # log p of bytes 1..255 (n, 255), bytes (n,) -> three tensors (n,)
    """Returns the log-odds that each byte is wrong, the most likely other byte, and the log-odds of that byte against
    the one that stands there. By Bayes' rule, if a byte is wrong with probability error_rate, and each of the 254
    others then stands there with equal probability:

        log p(y was meant, x stands there) = log p(x) + log(1 - error_rate)      if y = x
                                             log p(y) + log(error_rate / 254)    otherwise

    Only printable ASCII is corrected, by printable ASCII: so no character breaks in UTF-8, and line ends stay."""
    own = (ids - 1).clamp(min=0)[:, None]                                           # (n, 1)
    right = logp.gather(1, own)[:, 0] + math.log(1 - error_rate)
    right = right.masked_fill((ids < 32) | (ids > 126), torch.inf)                  # never wrong
    wrong = logp.scatter(1, own, -torch.inf) + math.log(error_rate / 254)           # (n, 255)
    best, other = wrong[:, 31:126].max(1)       # of the bytes 32 .. 126
    return wrong.logsumexp(1) - right, other + 32, best - right


@torch.inference_mode()
def correct(model, ids, T, use, passes, error_rate):  # list of n bytes, a Fill -> what find_corrections returns
    parts = []
    for piece in tqdm(list(cut_after_spaces(ids, text_space(use, T))), disable=None, leave=False):
        x = torch.tensor(piece)
        logp = masked_log_probs(model, x[None].to(model.embed.weight.device), use, min(passes, len(x)))
        parts.append(find_corrections(logp, x, error_rate))
    return [torch.cat(part) for part in zip(*parts)]


# ---- correcting by edits
# bytes start .. stop of a text become `new`, which is exp(log_odds) times as likely; new is None if it is not known
Edit = namedtuple("Edit", "start stop new log_odds")


def nats_from_left(model, ids, T):  # list of n bytes -> (n,) on the CPU; the text is read in pieces of T bytes
    nats = []
    for first in range(0, len(ids), T):
        x = torch.tensor([EOT] + ids[first:first + T], device=model.embed.weight.device)
        logits = model.logits(model(x[None, :-1], 0))[0, :, :N_BYTES]
        nats.append(position_nats(logits, x[1:]).cpu())
    return torch.cat(nats)


def list_candidates(seen, likely, cost):  # next bytes, likely bytes, nats -> [(nats, n, new)]
    """In each candidate, `new` replaces n bytes. An error costs `cost` nats, and log 95 more if the writer also chose
    one of 95 characters."""
    with_choice = cost + math.log(95)
    candidates = [(0.0, 1, seen[:1]), (with_choice, 1, [])]     # no error; an extra byte
    if len(seen) > 1 and 32 <= seen[1] < 127:
        candidates.append((cost, 2, [seen[1], seen[0]]))        # two swapped bytes
    for byte in likely:
        candidates.append((with_choice, 1, [byte]))             # another byte
        candidates.append((cost, 0, [byte]))                    # a missing byte
    return candidates


def nats_of_rows(model, cache, logits, rows):  # lists of ids, logits (1, 1, V) of their first -> (N,) on the CPU
    """The rows follow what is cached, which is read once: each row gets a copy of its keys and values."""
    n = max(map(len, rows))
    tgt = [row + [IGNORE_INDEX] * (n - len(row)) for row in rows]
    tgt = torch.tensor(tgt, device=logits.device)                                   # (N, n)
    branch = Cache(model, len(rows), cache.k[0].size(2))
    for copy, original in zip([*branch.k, *branch.v, branch.ids, branch.length],
                              [*cache.k, *cache.v, cache.ids, cache.length]):
        copy.copy_(original)
    h = model(tgt[:, :-1].clamp(min=0), 0, cache=branch)
    logits = torch.cat((logits.expand(len(rows), -1, -1), model.logits(h)), dim=1)  # (N, n, V)
    return position_nats(logits[..., :N_BYTES], tgt).sum(1).cpu()


def best_edit(model, cache, text, ids, i, lookahead, cost):  # -> Edit of ids at place i that saves the most, or None
    """text: what stands before the place, with corrections; the cache holds a part of it."""
    # the last id is read again, if it was read: its logits are needed
    cache.length.clamp_(max=len(text) - 1 - cache.start)
    unread = text[cache.first_unread(len(text) + lookahead + 1):]
    x = torch.tensor([unread], device=model.embed.weight.device)
    logits = model.logits(model(x, 0, cache=cache)[:, -1:])                         # (1, 1, V)
    likely = 32 + logits[0, 0, 32:127].topk(LIKELY_BYTES).indices
    seen = ids[i:i + lookahead]
    candidates = list_candidates(seen, likely.tolist(), cost)
    nats = nats_of_rows(model, cache, logits, [new + seen[n:] for _, n, new in candidates])
    nats += torch.tensor([error for error, _, _ in candidates])
    best = int(nats.argmin())
    _, n, new = candidates[best]
    return Edit(i, i + n, new, float(nats[0] - nats[best])) if best else None       # 0: no error


@torch.inference_mode()
def find_edits(model, ids, T, error_rate):  # list of bytes -> [Edit], from left to right
    """A noisy channel (Kernighan et al. 1990): a byte is wrong with probability error_rate, and each of four kinds of
    error is equally likely. Walks through the text once. At each place, compares the text as it stands with all small
    edits, by the nats of the next bytes plus those of the error. An edit is made if it saves more than those at the
    next two places. The model reads its own corrections. Only printable ASCII is changed, so no character breaks in
    UTF-8, and line ends stay."""
    T = min(T, EDIT_WINDOW)
    lookahead = min(LOOKAHEAD, T // 4)
    cost = math.log(4 * (1 - error_rate) / error_rate)          # of an error, against none
    # an error usually surprises the model at once: skip places whose next bytes have fewer nats than an error
    nats = F.pad(nats_from_left(model, ids, T), (0, SURPRISE_BYTES - 1))
    may_be_wrong = nats.unfold(0, SURPRISE_BYTES, 1).sum(1) > cost                  # (n,)
    cache = Cache(model, 1, T)
    text = [EOT]                                # corrected so far
    edits = []
    pending = None                              # the best edit at the last places
    i = 0
    bar = tqdm(total=len(ids), disable=True if len(ids) < 5000 else None, leave=False)
    while i < len(ids) or pending:
        bar.update(i - bar.n)
        edit = None
        if i < len(ids) and may_be_wrong[i] and 32 <= ids[i] < 127:
            edit = best_edit(model, cache, text, ids, i, lookahead, cost)
        if edit and (not pending or edit.log_odds > pending.log_odds):
            pending = edit
        elif pending and (i >= pending.start + 2 or i >= len(ids)):
            text = text[:len(text) - (i - pending.start)]
            cache.length.clamp_(max=len(text) - cache.start)    # forgets what was read after this place
            text += pending.new
            i = pending.stop
            edits.append(pending)
            pending = None
            continue
        text += ids[i:i + 1]
        i += 1
    return edits


def suggest_edits(model, use, ids, T, error_rate=0.0):  # list of bytes, a Continue or a Fill -> [Edit]
    if isinstance(use, Continue):
        return find_edits(model, ids, T, error_rate or EDIT_RATE)
    found = correct(model, ids, T, use, CORRECTION_PASSES, error_rate or ERROR_RATE)
    _, others, log_odds = (t.tolist() for t in found)
    return [Edit(i, i + 1, [others[i]], odds) for i, odds in enumerate(log_odds) if odds > 0]


def apply_edits(ids, edits):  # list of bytes -> list of bytes
    out = []
    done = 0
    for edit in edits:
        out += ids[done:edit.start] + edit.new
        done = edit.stop
    return out + ids[done:]


# ---- infilling holes of unknown length
def infill(model, objective, hp, prompt, prefix, n_holes, max_new_tokens, g, **sampling):
    """Fills n_holes holes, one after the other. Returns their answers, a list of bytes for each, and whether all
    ended by themselves. prompt, prefix: what Infill.prompt returns. Each answer ends with its stop id, which also
    starts the next answer. An answer that does not end leaves no space for the next ones, which stay empty.
    The last position of a full row is not used: in training, its target is always EOT."""
    T = hp.block_size
    ids = list(prompt)
    get_positions = position_function(objective, prefix, hp)
    answers = [[] for _ in range(n_holes)]
    space = max_new_tokens
    for answer, stop_id in zip(answers, objective.uses["infill"].stop_ids):
        row = to_row(ids, hp)
        n = min(space, T - len(ids))
        written = [int(i) for i in generate(model, row, n, T, g, prefix, stop_id, get_positions, **sampling)]
        if stop_id not in written:
            answer += written
            return answers, False
        answer += written[:-1]
        ids += written
        space -= len(answer)
    return answers, True


@torch.inference_mode()
def text_nats(model, hp, before, text):  # lists of bytes -> nats (0-D) of the text, which follows `before`
    return nats_from_left(model, (before + text)[-hp.block_size:], hp.block_size)[-len(text):].sum()


def trim_to_suffix(model, objective, hp, before, answer, after):  # lists of ids -> the start of the answer
    """Returns the shortest start of the answer after which the text after the hole is at least a tenth as likely as
    after the best start: fim rarely ends an answer with EOT. Objectives without a causal "continue" keep it."""
    after = after[:SUFFIX_BYTES]
    use = objective.uses.get("continue")
    if not after or use is None or use.both_ways:
        return answer
    nats = [float(text_nats(model, hp, before + answer[:cut], after)) for cut in range(len(answer) + 1)]
    cut = 0
    while nats[cut] >= min(nats) + math.log(10):
        cut += 1
    return answer[:cut]


def fill_any_length(model, objective, hp, before, after, longest, g, **sampling):  # lists of ids -> answer
    """Fills the hole with each number of bytes from 0 to `longest`. Returns the answer which, with the text after it,
    is most likely from left to right. If nothing follows the hole, the end of the text does."""
    after = after or [EOT]
    candidates = []
    for n in tqdm(range(longest + 1), disable=None, leave=False):
        row = to_row(before + [MASK] * n + after, hp)
        *_, row = unmask(model, row, g, objective.uses["fill"], **sampling)
        answer = row[0, len(before):len(before) + n].tolist()
        nats = float(text_nats(model, hp, before, answer + after[:SUFFIX_BYTES]))
        candidates.append((nats, answer))
    return min(candidates)[1]


def infill_from_left(model, objective, hp, texts, expected, longest, g, **sampling):  # texts: lists of ids
    """Fills the holes between the texts one after the other. Reads only what is nearest to a hole: the text before it
    with its answers, and the text up to the next hole. Returns the answers and whether all ended."""
    use = objective.uses["infill"]
    space = min(longest, hp.block_size // 3)    # for the answer
    room = hp.block_size - 8 - space            # for the texts on both sides; 8: space for special ids
    if sum(map(len, texts)) > room:
        note(f"reads only up to {room} bytes around each hole")
    before = texts[0]
    answers = []
    ended = True
    for after in texts[1:]:
        right = after[:max(room // 2, room - len(before))]      # more if the other side is short
        near = [before[-(room - len(right)):], right]
        if use.prompt:
            prompt, prefix = use.prompt(near, expected, hp)
            [written], has_ended = infill(model, objective, hp, prompt, prefix, 1, longest, g, **sampling)
            answer = trim_to_suffix(model, objective, hp, near[0], written, near[1])
            ended = ended and (has_ended or answer != written)  # an answer that was trimmed has ended
        else:
            answer = fill_any_length(model, objective, hp, *near, space, g, **sampling)
        answers.append(answer)
        before = before + answer + after
    return answers, ended


def fill_holes(model, objective, hp, texts, expected, longest, g, **sampling):  # -> as infill_from_left
    """Fills all holes in one row if the model was trained to and the text fits, otherwise one after the other."""
    use = objective.uses["infill"]
    n_holes = len(texts) - 1
    if 1 < n_holes <= len(use.stop_ids):
        row, prefix = use.prompt(texts, expected, hp)
        if len(row) + n_holes <= hp.block_size:
            return infill(model, objective, hp, row, prefix, n_holes, longest, g, **sampling)
    return infill_from_left(model, objective, hp, texts, expected, longest, g, **sampling)


# ---- repairing
@torch.inference_mode()
def repair(model, objective, noisy, hp, g, **sampling):  # list of ids, of any length -> yields bytes
    T = hp.block_size
    n = objective.n_bytes(T, hp)                # maximum number of clean bytes in a row
    # a noisy text may be longer than the clean one
    longest = min(T - 1 - n, objective.uses["repair"].max_bytes(hp))
    noisy = [i for i in noisy if i != EOT]      # the model would copy it, and it ends a row
    pieces = list(cut_after_spaces(noisy, longest))
    for piece in tqdm(pieces, disable=True if sys.stdout.isatty() else None, leave=False):      # a terminal shows text
        row = to_row(piece + [SEP], hp)
        prefix = row.size(1)
        get_positions = position_function(objective, prefix, hp)
        for byte in generate(model, row, n + 1, T, g, prefix, None, get_positions, **sampling):     # + 1: for EOT
            if byte != EOT:
                yield int(byte)


def cut_after_spaces(ids, n):  # -> yields pieces of up to n ids
    """Cuts a long text into pieces of about equal length, after white space where possible, but not before a hole."""
    start = 0
    while len(ids) - start > n:
        n_pieces = math.ceil((len(ids) - start) / n)
        ideal = start + math.ceil((len(ids) - start) / n_pieces)
        candidates = range(start + n // 4 + 1, start + n + 1)
        ends = [i for i in candidates if ids[i - 1] in SPACES and ids[i] != MASK]
        end = min(ends, key=lambda i: abs(i - ideal), default=ideal)
        yield ids[start:end]
        start = end
    if start < len(ids):
        yield ids[start:]


# ---- reading texts
def read_text(flag, value):  # the value of a flag -> bytes; --corpus is always the name of a file
    path = os.path.expanduser(value.removeprefix("FILE:"))
    if not value.startswith("FILE:") and flag != "corpus":
        if os.path.isfile(value):
            note(f"--{flag} {value} is read as text. FILE:{value} reads the file")
        try:
            return value.encode("utf-8", "surrogateescape")     # Python decodes a POSIX command line this way
        except UnicodeEncodeError:
            fail(f"--{flag}: contains half of a character, such as \\ud83d. Try a text that can be encoded as UTF-8")
    try:
        with open(path, "rb") as f:
            text = f.read()
    except (OSError, ValueError) as e:          # ValueError: a path with a NUL in it
        fail(f"--{flag} {path}: cannot be read ({e}). Try a path to text")
    check_text(path, from_bytes(text), flag)
    return text


def read_masks(text):  # bytes such as b"a[MASK:2]" -> ids [97, MASK, MASK]
    ids = []
    for i, part in enumerate(re.split(MASKS, text)):            # a text, the number in a marker, a text, ...
        ids += part if i % 2 == 0 else [MASK] * int(part or 1)
    return ids


def read_holes(text):  # bytes such as b"a<extra_id_0>b" -> the texts around the holes: [[97], [98]]
    return [list(part) for part in re.split(HOLES, text)]


def to_row(ids, hp):  # list or (n,) of any integers -> (1, n) long on the model's device
    return torch.as_tensor(ids).long().to(hp.device)[None]


def keep_last(ids, n):  # -> the last n ids; a note says so if there are more
    if len(ids) > n:
        note(f"reads only the last {n} of {len(ids)} bytes of the prompt")
    return ids[-n:]


# ---- writing texts
def to_text(ids):  # list or (n,) -> str; MASK becomes a block, EOT is left out; bytes that are not UTF-8 are escaped
    special = {MASK: "█".encode(), EOT: b""}
    text = b"".join(special[i] if i in special else bytes([i]) for i in map(int, ids))
    return text.decode("utf-8", "surrogateescape")              # so that a file or a pipe gets these bytes back


def highlight(ids, is_new, marks):  # ids, a bool for each -> str
    """Puts new characters between the two marks. A character of several bytes is new if one of them is."""
    # in UTF-8, the first byte of a character is never in 0x80 .. 0xbf, and all others are
    starts = [i for i, byte in enumerate(ids) if i == 0 or not 0x80 <= byte < 0xc0]
    out = ""
    highlighted = False
    for start, end in zip(starts, [*starts[1:], len(ids)]):     # a character
        if any(is_new[start:end]) != highlighted:
            highlighted = not highlighted
            out += marks[0] if highlighted else marks[1]
        out += to_text(ids[start:end])
    return out + marks[1] if highlighted else out


def stream(prompt, ids):  # list of ids, iterator of ids -> yields text; returns the list of the ids
    """Yields the prompt, then each character as soon as all of its bytes are there. The line between them
    goes to standard error, so that a pipe or a file gets only text."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    text = decoder.decode(bytes(prompt).replace(b"\0", b""))
    yield text
    if text:
        note("the model continues:", start="" if text.endswith("\n") else "\n")
    written = []
    for i in ids:
        written.append(int(i))
        yield decoder.decode(bytes(written[-1:]).replace(b"\0", b""))
    yield decoder.decode(b"", final=True) + "\n"    # the rest, if the last character is incomplete
    return written


def show(text):  # prints to standard output. All that this program prints there passes here
    table = IN_A_FILE
    if sys.stdout.isatty():                     # then no control character but the colors
        table = PLAIN if "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb" else COLORED
    elif getattr(sys.stdout, "errors", "") != "surrogateescape":                    # set by run_program
        table = IN_A_FILE | NOT_UTF8
    print(text.translate(table), end="", flush=True)


def note(text, start=""):  # prints what is not part of the answer, to standard error
    print(f"{start}--- {text}", file=sys.stderr, flush=True)


# ---- modes: (model, objective, use, hp, args, g) -> yields the text of a sample, piece by piece
# use: what objective.uses has for this mode. args: all flags, with the defaults of the mode, but texts that
# were not given are None. args.prompt is a list of ids, in infill_mode a list of the texts around the holes;
# the other texts are bytes or lists of bytes. Further fields of args:
#     given       names of the flags that were given
#     sampling    the arguments of `distribution`
def continue_mode(model, objective, use, hp, args, g):
    T = hp.block_size
    text = args.prompt or [EOT]                 # an empty prompt is the start of a document
    n = args.max_new_tokens
    how = dict(compile=args.compile, **args.sampling)
    draft = use.drafter(hp) if use.drafter and args.speculate else None
    if draft:
        stats = []
        ids = generate_drafted(model, draft, text, n, T, g, stats, **how)
    else:
        prompt = text
        if use.both_ways:                       # prompt and new text share a block; the new text gets up to half of it
            space = T - len(use.left_ids) - len(use.right_ids)
            prompt = keep_last(text, space - min(n, T // 2))
        row, prefix = frame_prompt(to_row(prompt, hp), use)
        ids = generate(model, row, n, T, g, prefix, **how)
    written = yield from stream(text, ids)
    if draft:
        note(f"{len(written) / max(1, len(stats)):.2f} bytes per forward pass")
    elif use.both_ways and len(written) < n and written[-1] != EOT:
        note(f"the block of {T} is full")


def continue_blocks_mode(model, objective, use, hp, args, g):
    prompt = args.prompt or [EOT]               # an empty prompt is the start of a document
    T = objective.n_bytes(hp.block_size, hp)
    n = args.max_new_tokens
    how = dict(steps=args.steps, order=args.order, **args.sampling)
    yield from stream(prompt, generate_blocks(model, prompt, n, T, use.length(hp), g, **how))


def fill_mode(model, objective, use, hp, args, g):
    ids = yield from fill_masks(model, args.prompt, use, hp, args, g)
    yield highlight(ids, [i == MASK for i in args.prompt], FILLED) + "\n"


def write_mode(model, objective, use, hp, args, g):  # continues a prompt by filling MASKs, in one block
    space = text_space(use, hp.block_size)
    prompt = keep_last(args.prompt, space // 2)
    n_new = min(args.max_new_tokens, space - len(prompt))
    if n_new < args.max_new_tokens:
        note(f"writes only {n_new} bytes, which fill the block of {space}")
    ids = yield from fill_masks(model, prompt + [MASK] * n_new, use, hp, args, g, may_end=True)
    new = ids[len(prompt):]
    yield from stream(args.prompt, new[:new.index(EOT)] if EOT in new else new)


def fill_masks(model, ids, use, hp, args, g, may_end=False):  # list of ids; yields the text of each pass if args.show
    row = to_row(ids, hp)
    passes = unmask_long(model, row, hp.block_size, g, use, steps=args.steps, order=args.order, may_end=may_end,
                         **args.sampling)
    for row in passes:
        if args.show:
            yield f"--- pass\n{to_text(row[0])}\n"
    return row[0].tolist()


def infill_mode(model, objective, use, hp, args, g):
    # 1. the texts around the holes, one more than there are holes
    texts = args.prompt
    if texts is None:                           # a hole between the two texts
        texts = read_holes(bytes(args.prefix or []) + b"<extra_id_0>" + bytes(args.suffix or []))
    elif args.prefix is not None or args.suffix is not None:
        fail("--prompt: cannot be combined with --prefix or --suffix. Try it without them, with an <extra_id_0>")
    n_holes = len(texts) - 1
    if not n_holes:
        fail("--prompt: has no hole. Try an <extra_id_0> where bytes are missing")
    # 2. the answers
    is_given = "max_new_tokens" in args.given
    longest = args.max_new_tokens if is_given or use.prompt else LONGEST_FILLED
    expected = longest // n_holes if is_given else HOLE_BYTES
    answers, ended = fill_holes(model, objective, hp, texts, expected, longest, g, **args.sampling)
    # 3. the whole text
    ids = texts[0]
    is_new = [False] * len(ids)
    for answer, text in zip(answers, texts[1:]):
        ids = ids + answer + text
        is_new += [True] * len(answer) + [False] * len(text)
    yield highlight(ids, is_new, FILLED) + "\n"
    if not ended:
        note(f"the answer was cut off after {longest} bytes, or at the end of the block of {hp.block_size}")


def repair_mode(model, objective, use, hp, args, g):
    yield from stream([], repair(model, objective, args.prompt, hp, g, **args.sampling))


def mark_mode(model, objective, use, hp, args, g):
    pieces = tqdm(list(cut_after_spaces(args.prompt, hp.block_size)), disable=None, leave=False)
    log_odds = torch.cat([use(model, to_row(piece, hp))[0].cpu() for piece in pieces]).tolist()
    is_wrong = bytes(odds > 0 for odds in log_odds)
    places = [place.span() for place in re.finditer(b"\x01+", is_wrong)]
    edits = [Edit(start, stop, None, max(log_odds[start:stop])) for start, stop in places]
    yield from list_edits(args.prompt, edits, hp)


def correct_mode(model, objective, use, hp, args, g):
    edits = suggest_edits(model, use, args.prompt, hp.block_size, args.error_rate)
    if args.fix:
        fixed = bytes(apply_edits(args.prompt, edits)).decode("utf-8", "surrogateescape")
        yield fixed
        note(f"{len(edits)} corrections in {len(args.prompt)} bytes", start="" if fixed.endswith("\n") else "\n")
    else:
        yield from list_edits(args.prompt, edits, hp)
        note("a larger --error_rate finds more")


KINDS = {(0, 1): "missing", (1, 0): "extra", (1, 1): "replaced", (2, 2): "swapped"}    # {(bytes, new bytes): kind}


def list_edits(prompt, edits, hp):  # [Edit] -> yields text
    """Lists the edits, the most likely first, each with the word around it; before them the marked text, if it fits
    into a block."""
    is_marked = [False] * len(prompt)
    for edit in edits:
        is_marked[edit.start:edit.stop] = [True] * (edit.stop - edit.start)
    if len(prompt) <= hp.block_size:
        yield highlight(prompt, is_marked, WRONG) + "\n"
    note(f"{len(edits)} places look wrong: line:column, the place, how much more likely it is to be wrong than right")
    whole = bytes(prompt)
    for edit in sorted(edits, key=lambda edit: -edit.log_odds):
        line = whole.count(b"\n", 0, edit.start) + 1
        line_start = whole.rfind(b"\n", 0, edit.start) + 1
        column = len(whole[line_start:edit.start].decode("utf-8", "replace")) + 1
        left = re.search(rb"\S*\Z", whole[max(0, edit.start - 20):edit.start])[0]
        right = re.match(rb"\S*", whole[edit.stop:edit.stop + 20])[0]
        word = slice(edit.start - len(left), edit.stop + len(right))
        text = highlight(prompt[word], is_marked[word], WRONG).replace("\n", "\\n")
        if edit.new is not None:
            kind = KINDS[edit.stop - edit.start, len(edit.new)]
            text += f" -> {to_text([*left, *edit.new, *right])}, {kind}"
        yield f"{line}:{column}: {text}, {math.exp(min(edit.log_odds, 700)):.2g} times as likely\n"


def follow_mode(model, objective, use, hp, args, g):  # the probability that --suffix follows --prefix
    p = float(use(model, args.prefix, args.suffix, hp).sigmoid())
    yield f"the second text follows the first with probability {p:.3f} (.5 is chance)\n"


def search_mode(model, objective, use, hp, args, g):
    """Yields the three lines of --corpus that are nearest to --query. Texts are embedded in pieces, at most
    as long as those in training. Each piece of the query is compared with the nearest one of a line."""
    whole = args.corpus.splitlines()
    lines = list(dict.fromkeys(line for line in whole if line.strip()))             # without duplicates
    if not lines:
        fail("--corpus: has no line of text. Try another file")
    n = use.piece_bytes(hp)
    cut = [list(cut_after_spaces(text, n)) for text in [bytes(args.query), *lines]]
    pieces = [piece for text in cut for piece in text]
    vectors = map_texts(lambda x: use.embed(model, x), pieces, hp.device)           # {piece: (C,)}
    query, *others = [torch.stack([vectors[piece] for piece in text]) for text in cut]          # (pieces, C) each
    similarity = torch.stack([(query @ line.T).amax(1).mean() for line in others])
    for i in similarity.argsort(descending=True)[:3].tolist():
        number = whole.index(lines[i]) + 1
        yield f"--- similarity {float(similarity[i]):.3f}, line {number}:\n{to_text(lines[i])}\n"


def map_texts(function, texts, device):  # function: ids (N, n) -> N results; list of bytes -> {text: result}
    """A batch consists of texts of equal length: a bidirectional model would attend to padding. Equal texts
    have equal results."""
    results = {}
    texts = list(dict.fromkeys(texts))          # without duplicates
    with tqdm(total=len(texts), disable=None, leave=False) as bar:
        for n in sorted({len(text) for text in texts}):
            same = [text for text in texts if len(text) == n]
            for first in range(0, len(same), MAX_ROWS):
                batch = same[first:first + MAX_ROWS]
                x = torch.tensor([list(text) for text in batch], device=device)
                results.update(zip(batch, function(x)))
                bar.update(len(batch))
    return results


def seam_mode(model, objective, use, hp, args, g):  # rotates a text so that it starts where the model finds its start
    ids = keep_last(args.prompt, hp.block_size)
    p = use(model, to_row(ids, hp))[0].softmax(0)
    seam = int(p.argmax())
    rotated = to_text(ids[seam:] + ids[:seam])
    yield f"--- the text starts at byte {seam} (probability {float(p[seam]):.2f}):\n{rotated}\n"


# task: what it does, for messages; flags: all that it reads, except those of a run; sampling: its default
# arguments of `distribution`; required: texts that must be given; read: turns its prompt into ids;
# marker: of a hole in its prompt, a pattern, which by default matches nothing
Mode = namedtuple("Mode", "function task flags sampling required read marker", defaults=({}, (), list, rb"(?!)"))
WRITING = "max_new_tokens", "num_samples", *SAMPLING
LEFT_TO_RIGHT = dict(temperature=0.8)
DIFFUSION = dict(temperature=1.0, top_p=0.8)
LIKELIEST = dict(temperature=0.0)               # LEFT_TO_RIGHT with num_samples, top_k or top_p
MODES = {
    "continue": Mode(continue_mode, "continue a prompt", ("prompt", "speculate", "compile", *WRITING), LEFT_TO_RIGHT),
    "continue_blocks": Mode(continue_blocks_mode, "write in blocks", ("prompt", "order", "steps", *WRITING), DIFFUSION),
    "fill": Mode(fill_mode, "fill [MASK]s", ("prompt", "order", "steps", "show", "num_samples", *SAMPLING), LIKELIEST,
                 read=read_masks, marker=MASKS),
    "write": Mode(write_mode, "write by filling [MASK]s", ("prompt", "order", "steps", "show", *WRITING), DIFFUSION),
    "correct": Mode(correct_mode, "correct a text", ("prompt", "correct", "fix", "error_rate"),
                    required=("prompt",)),
    "infill": Mode(infill_mode, "write between texts", ("prompt", "prefix", "suffix", *WRITING), LIKELIEST,
                   read=read_holes, marker=HOLES),
    "repair": Mode(repair_mode, "repair a text", ("prompt", "num_samples", *SAMPLING), LIKELIEST, ("prompt",),
                   read=read_masks, marker=MASKS),
    "mark": Mode(mark_mode, "mark suspicious bytes", ("prompt",), required=("prompt",)),
    "follow": Mode(follow_mode, "compare two texts", ("prefix", "suffix"), required=("prefix", "suffix")),
    "search": Mode(search_mode, "search", ("query", "corpus"), required=("query", "corpus")),
    "seam": Mode(seam_mode, "find where a text was cut", ("prompt",), required=("prompt",)),
}


# ---- the command
def choose_use(hp, name, flags, prompt):  # name of an objective or "", flags that were given -> objective, mode
    """Of several uses, takes the first one. flags: names of texts and SWITCHES. prompt: bytes."""
    has_hole = {mode_name for mode_name, mode in MODES.items() if re.search(mode.marker, prompt)}
    uses = [(m.objective, mode) for m in get_members(hp) for mode in m.objective.uses if name in ("", m.objective.name)]
    if not uses:
        fail(f"--objective {name or hp.objective}: sample.py has no use for it in this run, which was trained as "
             f"{hp.objective}. Try another objective or run")
    # uses that read all of the flags; if none does, plan_samples refuses one of the flags
    uses = prefer(uses, lambda mode: flags <= {*MODES[mode].flags})
    if "prompt" in flags:                       # uses for its holes, else those that need none, "correct" last
        uses = prefer(uses, lambda mode: mode in has_hole)
        uses = prefer(uses, lambda mode: mode in has_hole or mode not in ("fill", "infill"))
        uses = prefer(uses, lambda mode: mode != "correct")
    return uses[0]


def prefer(uses, is_good):  # -> the uses with a good mode; if there is none, all
    return [use for use in uses if is_good(use[1])] or uses


def check_markers(text, objective, mode):
    """Prints a note if the text has a marker that is read as text, which may be mistyped. Refuses such a marker
    beside a hole that is filled."""
    own = MODES[mode].marker
    as_text = [word for word in re.findall(LIKE_A_HOLE, text) if not re.fullmatch(own, word)]
    if not as_text:
        return
    message = (f"{as_text[0].decode('utf-8', 'replace')} is read as text when {objective.name} is used to "
               f"{MODES[mode].task}. Holes are written [MASK], [MASK:4] or <extra_id_0>, see --help")
    if re.search(own, text):
        fail(f"{message}. Try one kind of hole")
    note(message)


def demonstration(mode, held_out, T):  # -> {flag: text} from held-out bytes, what to print before the answer
    text = held_out[:T // 2].tolist()
    half = len(text) // 2
    noisy = [ord("x") if i % 20 == 9 else byte for i, byte in enumerate(text)]
    masked = [MASK if i % 7 == 3 else byte for i, byte in enumerate(text)]
    texts = {
        "fill": dict(prompt=masked),
        "infill": dict(prefix=text[:half], suffix=text[half + 4:]),
        "repair": dict(prompt=noisy),
        "mark": dict(prompt=noisy),
        "follow": dict(prefix=text[:half], suffix=text[half:]),
        "search": dict(query=text[:half], corpus=bytes(held_out[half:].tolist())),  # does not contain the query
        "seam": dict(prompt=text[half:] + text[:half]),
    }.get(mode, dict(prompt=text))              # to continue
    lines = [f"held-out text:\n{to_text(text)}"]
    for flag, ids in texts.items():
        if flag != "corpus" and ids != text:
            lines.append(f"--- as --{flag}:\n{to_text(ids)}")
    return texts, "\n".join([*lines, "--- the model's answer:\n"])


def plan_samples(loaded, given):  # what load_run returns, {flag: value} -> a generator of text for each sample
    model, hp, ckpt = loaded
    # 1. the texts, and what to do with them
    texts = {flag: read_text(flag, given[flag]) for flag in FLAGS["texts"] if flag in given}
    switches = {flag for flag in SWITCHES if given.get(flag)}
    prompt = texts.get("prompt", b"")
    objective, mode_name = choose_use(hp, given.get("objective", ""), {*texts, *switches}, prompt)
    mode = MODES[mode_name]
    use = objective.uses[mode_name]
    # 2. what does not fit is refused; --no-fix and --no-correct always fit
    for flag in sorted(set(given) - {*FLAGS["run"], *mode.flags, *(SWITCHES - switches)}):
        tasks = dict.fromkeys(other.task for other in MODES.values() if flag in other.flags)
        fail(f"--{flag}: has no effect when {objective.name} is used to {mode.task}, only to {' or '.join(tasks)}. Try "
             "without it, or python sample.py --help for the objectives that can")
    if objective.name != hp.objective:
        note(f"used as {objective.name}")
    if not switches:                            # all of a text to correct is text
        read = [text for flag, text in texts.items() if flag != "corpus"]
        check_markers(b"\n".join(read), objective, mode_name)
    # 3. the arguments of the mode
    if "prompt" in texts:
        texts["prompt"] = mode.read(prompt)
    if not texts and not switches:
        texts, introduction = demonstration(mode_name, ckpt["held_out"], hp.block_size)
        show(introduction)
    for flag in mode.required:
        if not texts.get(flag):
            fail(f"--{flag}: is missing or empty. Try {'the name of a file' if flag == 'corpus' else 'some text'}")
    defaults = {name: flag.default for flags in FLAGS.values() for name, flag in flags.items()}
    defaults["order"] = getattr(use, "order", "")
    args = Namespace(**defaults | given | dict.fromkeys(FLAGS["texts"]) | texts, given=set(given))
    args.sampling = choose_sampling(mode, given)
    # 4. a generator of text for each sample
    generators = [make_rng(f"{args.seed},{i},sample") for i in range(args.num_samples)]
    return [mode.function(model, objective, use, hp, args, g) for g in generators]


def choose_sampling(mode, given):  # -> arguments of `distribution`: those that were given, and defaults
    sampling = {flag: given[flag] for flag in SAMPLING if flag in given}
    if mode.sampling == LIKELIEST and (sampling or given.get("num_samples", 1) > 1):
        return LEFT_TO_RIGHT | sampling         # so that samples differ
    return mode.sampling | sampling


def ask(loaded, **flags):
    """Returns a sample as the program prints it: a str, or with num_samples a list of them.

        loaded = run.load_run("out/hybrid")
        sample.ask(loaded, prompt="for i in ra[MASK:3](10):")

    flags: those of the program except out_dir, device and dtype. A text that begins with FILE: is read from that file.
    Raises a UserError if they cannot be used, and a TypeError if a value is None. Notes go through sample.note,
    which may be replaced, to standard error, and the text of a demonstration to standard output."""
    groups = FLAGS | {"run": {flag: FLAGS["run"][flag] for flag in ("objective", "seed")}}
    given = parse(to_words(flags), groups)
    texts = []
    for pieces in plan_samples(loaded, given):
        text = "".join(pieces).translate(IN_A_FILE)
        texts.append(text if flags.get("fix") else text.translate(NOT_UTF8).removesuffix("\n"))
    return texts if "num_samples" in flags else texts[0]


def parse(argv, groups=FLAGS):  # -> {name: value} of the flags that were given
    return vars(make_parser("python sample.py", __doc__, groups).parse_args(argv))


def main(argv=None):
    given = parse(sys.argv[1:] if argv is None else argv)
    loaded = load_run(given.get("out_dir") or newest_run(), given.get("device", "auto"), given.get("dtype", "auto"))
    _, hp, ckpt = loaded
    note(f"{ckpt['path']}: {hp.objective}, step {ckpt['step']} of {hp.max_iters}")
    samples = plan_samples(loaded, given)
    for i, pieces in enumerate(samples):
        if len(samples) > 1:
            show(f"--- sample {i + 1}\n")
        for text in pieces:
            show(text)


if __name__ == "__main__":
    run_program(main)
