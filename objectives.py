"""Every pre-training objective: how clean windows become a batch, and how a batch becomes a loss.

B rows, T positions of a row, n raw bytes that fill a row, P length of the prefix, k chosen bytes of a row, C width,
V outputs of the byte head, W ids of context, U ids of a row before some are dropped

An objective is a few functions, followed by an `Objective` that lists them. hp holds all settings, as run.get_config
returns them. hp.progress is the share of the run that is done: a 0-D tensor in training (1 with --init_from), 1.0
elsewhere. In the pictures of rows, _ is a space and . a position without a loss.

A batch is a dict of tensors with B rows. These keys have a fixed meaning; an objective may add others:

    inp         (B, T) ids; contrastive's is (B, 2, n_crop)
    tgt         (B, T) ids to predict, or IGNORE_INDEX where there is no loss
    ..._tgt     further targets, such as mtp's future_tgt (B, T, heads); every key that ends in tgt holds targets
    weight      (B, T), weights of tgt in the loss; future_weight holds those of future_tgt (see add_weights)
    row_weight  (B,), weights of the rows, for losses with one value per row
    prefix      int or (B,): 0 is causal, T is bidirectional
    positions   (B, T) position numbers, if they are not 0, 1, 2, ...
    mask        (B, T, T) bool: replaces the prefix rule
    before      (B, T, W - 1), required with mask: the ids that convolution and n-grams read before each position
    is_hidden   (B, T) bool, read by the tests alone: True where no input may show the target

`corrupt` draws only from its generator g and has static shapes. It contains no loop over rows and reads no value back
from the device. Many papers choose each position independently. Here the counts are exact (mlm chooses exactly k bytes
of a row), so every row has a target.

A loss is a weighted sum of nats. add_weights computes the weights that `corrupt` does not set, over all rows of a step,
so the losses of micro-batches add up to the loss of the step. A mean of means would weight targets unequally.
"""
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from data import CLS, EOT, MASK, MID, MODE_R, MODE_S, MODE_X, N_SENTINELS, PAD, PRE, SENTINEL, SEP, SUF, VOCAB_SIZE
from data import Flag, document_ids, fail
from model import CONTEXT_WIDTH, Block, StackedLinear, Transformer, dense_mask, norm, run_blocks
import torch
import torch.nn as nn
import torch.nn.functional as F

IGNORE_INDEX = -100                             # as a target: no loss at this position
N_BYTES = 256


# ---- shared by several objectives: from a batch to a loss
def ids_before(ids):  # (B, T) -> (B, T, W - 1): the ids before each position, nearest first; the row is padded with EOT
    return F.pad(ids, (CONTEXT_WIDTH - 1, 0))[:, :-1].unfold(1, CONTEXT_WIDTH - 1, 1).flip(2)


def document_mask(batch):  # -> "mask" and "before", which keep attention, convolution and n-grams inside a document
    """A document ends with EOT. Documents are found in the corrupted ids, so a masked EOT does not end its document.
    Only training and evaluation set this mask: sample.py reads across the ends of documents."""
    assert "mask" not in batch, "an objective that sets its own mask needs supports_doc_mask=False"
    inp = batch["inp"]
    doc = document_ids(inp)                                                         # (B, T)
    allowed = dense_mask(batch["prefix"], torch.arange(doc.size(1), device=doc.device), doc.size(1))
    same_document = doc[:, :, None] == doc[:, None, :]
    same_before = ids_before(doc) == doc[:, :, None]                                # (B, T, W - 1)
    return {"mask": allowed & same_document, "before": ids_before(inp).where(same_before, EOT)}


def add_weights(batch):  # all rows of a step -> the same batch with weights
    """Adds "row_weight" (B,), which is 1 / B, and the weights of all targets: "weight" for "tgt", "future_weight" for
    "future_tgt". The targets of a key have equal weights, which add up to 1; if a key has further dimensions, as the
    heads of future_tgt (B, T, heads), this holds for each head. Weights that are already in the batch are kept."""
    B = len(batch["inp"])
    weights = {"row_weight": torch.full((B,), 1 / B, device=batch["inp"].device)}
    for key, tgt in batch.items():
        if key.endswith("tgt"):
            has_target = tgt != IGNORE_INDEX
            dims = (0, 1)[:tgt.dim()]           # rows and positions; a key of shape (B,) has only rows
            n_targets = has_target.sum(dims).clamp(min=1)
            weights[key.replace("tgt", "weight")] = has_target / n_targets
    return weights | batch


def hidden_states(model, batch):  # -> (B, T, C): the model's output with the batch's prefix, mask and positions
    return model(batch["inp"], batch["prefix"], positions=batch.get("positions"), mask=batch.get("mask"),
                 before=batch.get("before"))


def position_nats(logits, tgt):  # logits (..., V), tgt (...) -> cross-entropy (...), 0 where there is no target
    nats = F.cross_entropy(logits.flatten(0, -2), tgt.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    return nats.view(tgt.shape)


def target_nll(model, h, batch):  # states (B, T, C) -> 0-D: the byte head's nats at all targets, a weighted sum
    return (position_nats(model.logits(h), batch["tgt"]) * batch["weight"]).sum()


def token_loss(model, batch, hp):  # cross-entropy of the byte head at every position with a target, in nats
    nll = target_nll(model, hidden_states(model, batch), batch)
    return nll, {"nll": nll}


class ScalarHead(nn.Linear):
    """A linear layer from a state to one number, in float32: (..., C) of any dtype -> (...).
    It starts at zero, so that an untrained model is at chance. Before training, its output is 0 whatever it reads, and
    it passes no gradient to the states: a test on a new model must randomize it first (tests/conftest.py)."""

    def __init__(self, config):
        super().__init__(config.n_embd, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, h):
        return super().forward(h.float())[..., 0]


def score_positions(model, x, head_name):  # ids x (B, T) -> (B, T): the output of a scalar head at each position
    return model.heads[head_name](model(x, x.size(1)))


# ---- shared: random draws
def random_positions(B, T, k, g):  # -> (B, k) long: k different positions of each row, all subsets equally likely
    return torch.rand(B, T, generator=g, device=g.device).topk(k, dim=1).indices


def random_bytes(shape, g):  # -> long in 1..255: never EOT or another special id
    return torch.randint(1, N_BYTES, shape, generator=g, device=g.device)


def random_lengths(B, low, high, g, full=0.5):  # -> (B, 1) long
    """Draws the length of the text in each row: `high` with probability `full`, otherwise uniform over low .. high. If
    every text filled its row, EOT would always be at the same position, and the model would never learn to stop."""
    u = torch.rand(2, B, 1, generator=g, device=g.device)
    return torch.where(u[0] < full, high, low + (u[1] * (high - low + 1)).long())


def inverse_cdf(p, u):  # p (..., M), u (...) in [0, 1) -> index (...)
    """Draws an index in proportion to p, which may have any positive sum. p = 1 2 1 has the running sums 1 3 4. With
    u = .5, u * 4 = 2 lies between 1 and 3, so the index is 1."""
    cdf = p.cumsum(-1)
    threshold = u * cdf[..., -1]
    index = torch.searchsorted(cdf, threshold[..., None], right=True)[..., 0]       # number of sums <= threshold
    return index.clamp(max=p.size(-1) - 1)      # a NaN would give the index p.size(-1)


def ranks(key):  # (..., n) -> (..., n) long: how many keys of the row are smaller; .5 .9 .1 becomes 1 2 0
    order = key.argsort()                       # for .5 .9 .1: 2 0 1, the positions of the keys in ascending order
    return order.argsort()                      # the inverse of this permutation


# ---- shared: rows
def mask_bytes(x, chosen, g, masked=0.8, random=0.1):  # x (B, T), chosen positions (B, k) -> inp, tgt (B, T)
    """The targets are the bytes at the chosen positions. In the input, each of them becomes MASK with probability
    `masked`, a random byte with probability `random`, and otherwise stays unchanged."""
    clean = x.gather(1, chosen)                                                     # (B, k)
    u = torch.rand(chosen.shape, generator=g, device=g.device)
    noise = random_bytes(chosen.shape, g).where(u < masked + random, clean)
    noise = noise.masked_fill(u < masked, MASK)
    inp = x.scatter(1, chosen, noise)
    tgt = torch.full_like(x, IGNORE_INDEX).scatter(1, chosen, clean)
    return inp, tgt


def constant_column(x, value):  # -> (B, 1) filled with one id
    return x.new_full((x.size(0), 1), value)


def pack_left(ids, keep, T):  # ids, keep (B, U) -> (B, T)
    """Moves the ids to keep to the left and pads with PAD: 5 6 7 8 with keep 1 0 1 0 becomes 5 7 PAD PAD."""
    column = torch.where(keep, keep.cumsum(1) - 1, T).clamp(max=T)                  # dropped ids go to column T
    return ids.new_full((ids.size(0), T + 1), PAD).scatter(1, column, ids)[:, :T]


def seq2seq(source, keep, target, keep_target, T):  # source, keep (B, U); target, keep_target (B, U') -> batch
    """Puts two texts in one row: the ids to keep of `source`, SEP, those of `target`, EOT. Pads with PAD.

        source a b c, keep 1 0 1; target x y, keep_target 1 1; T = 7

        inp   a c SEP x y EOT PAD      attention: both directions up to SEP (prefix 3), then causal
        tgt   . .  x  y EOT .  .       loss from SEP on: each position predicts the next id, up to EOT
    """
    sep = constant_column(source, SEP)
    eot = constant_column(source, EOT)
    always = torch.ones_like(sep, dtype=torch.bool)
    ids = torch.cat((source, sep, target, eot), dim=1)
    is_kept = torch.cat((keep, always, keep_target, always), dim=1)
    row = pack_left(ids, is_kept, T + 1)
    P = keep.sum(1) + 1                         # the source and SEP
    end = P + keep_target.sum(1)                # the position of EOT
    i = torch.arange(T, device=row.device)
    has_loss = (i >= P[:, None] - 1) & (i < end[:, None])
    return dict(inp=row[:, :-1], tgt=row[:, 1:].where(has_loss, IGNORE_INDEX), prefix=P)


# ---- shared: flags, their defaults, sizes
MASK_RATE = {"mask_rate": Flag(0.3, "share of positions to predict", 0.001, 1.0)}
SHARP_ATTENTION = {"attn_scale": 2.0}           # sharper attention learns long-range lookups sooner
# on a CPU, 4 heads instead of 2: this helps bart, nsp and ul2, and does not hurt span or contrastive. On a GPU, 6, the
# default of all objectives
MORE_HEADS = {"n_head": {"cpu": 4, "cuda": 6}}


def aligned_window(T, hp):  # n_bytes of objectives whose row of T positions is a window of T bytes
    return T


# ---- what a model is used for
# An Objective's `uses` is a dict {mode of sample.py: what this mode needs}. Its first mode is the default:
#
#   continue          Continue         continues a prompt
#   continue_blocks   ContinueBlocks   continues a prompt block by block
#   fill              Fill             fills MASKs in a text that is read in both directions
#   write             Fill             continues a prompt by filling MASKs; trained with up to 100% MASKs
#   correct           Fill             finds wrong bytes: each byte is masked, and predicted from the others
#                     Continue         finds typos of all kinds: compares small edits, reading with prefix 0
#   infill            Infill           writes into holes of unknown length
#   repair            Repair           writes the clean version of a noisy text
#   mark              a function       (model, x (B, T)) -> log-odds (B, T) that a byte is wrong
#   follow            a function       (model, first ids, second ids, hp) -> log-odds (0-D) that the second follows
#   search            Search           finds the nearest lines of a file
#   seam              a function       (model, x (B, T)) -> scores (B, T): did the rotated text begin here?
@dataclass(frozen=True)
class Continue:
    both_ways: bool = False                     # does the prompt attend to itself in both directions?
    left_ids: tuple = ()                        # ids before the prompt
    right_ids: tuple = ()                       # ids after the prompt
    # drafter(hp) returns None, or a function draft(model, states (m, C)) -> logits (m, k, V) of the k bytes after the
    # next one, which the extra heads predict (see generate_drafted)
    drafter: Callable | None = None


def frame_prompt(ids, use):  # prompts (N, n), a Continue -> rows with the ids around them, prefix length
    row = frame(ids, use)
    return row, row.size(1) if use.both_ways else 0


def frame(ids, use):  # (N, n), a Continue or a Fill -> the ids between its left_ids and right_ids
    left = ids.new_tensor(use.left_ids).expand(len(ids), -1)
    right = ids.new_tensor(use.right_ids).expand(len(ids), -1)
    return torch.cat((left, ids, right), dim=1)


@dataclass(frozen=True)
class ContinueBlocks:
    """Appends a block of MASKs to the clean blocks and fills it."""
    length: Callable                            # (hp) -> number of bytes in a block
    order: str = "left"                         # in which the MASKs of a block are filled by default


@dataclass(frozen=True)
class Fill:
    """If layout is None, the objective must train on bidirectional rows."""
    left_ids: tuple = ()                        # ids before the text
    right_ids: tuple = ()                       # ids after the text
    shift: int = 0                              # 1 if position i - 1 predicts byte i, 0 if position i does
    # (ids (N, n) with MASKs) -> batch whose first n positions predict the bytes, in a row that holds the text twice.
    # None: the row is left_ids, ids, right_ids, with bidirectional attention
    layout: Callable | None = None
    order: str = "confident"                    # in which MASKs are filled by default (sample.choose_masks)


def fill_logits(model, ids, fill):  # ids (N, n) with MASKs, fill: a Fill -> (N, n, V) predictions of every byte
    if fill.layout:
        return model.logits(hidden_states(model, fill.layout(ids))[:, :ids.size(1)])
    row = frame(ids, fill)
    h = model(row, row.size(1))
    first = len(fill.left_ids) - fill.shift     # the position that predicts the first byte
    return model.logits(h[:, first:first + ids.size(1)])


def text_space(fill, T):  # -> maximum number of bytes of a text in a row of T positions
    if fill.layout:
        return T // 2
    return T - len(fill.left_ids) - len(fill.right_ids)


@dataclass(frozen=True)
class Infill:
    """Writes bytes other than EOT into holes. Without a prompt, tries every number of MASKs and takes the
    most likely answer; for this, the objective needs "fill" and a causal "continue"."""
    # (texts around the holes, number of bytes expected in a hole, hp) -> ids up to the first answer, prefix length
    prompt: Callable | None = None
    stop_ids: tuple = ()                        # stop_ids[i] or EOT ends hole i; stop_ids[i] starts hole i + 1


@dataclass(frozen=True)
class Repair:
    """Its rows are made by seq2seq."""
    # (hp) -> maximum number of bytes to repair at once; fewer if a row has less space
    max_bytes: Callable = lambda hp: hp.block_size


@dataclass(frozen=True)
class Search:
    # (model, x (B, n)) -> embeddings (B, C) of norm 1, close if texts are similar
    embed: Callable
    piece_bytes: Callable                       # (hp) -> maximum number of bytes to embed at once


# ---- an objective
@dataclass(frozen=True)
class Objective:
    name: str
    corrupt: Callable                           # (x (B, n), g, hp) -> batch
    help: str                                   # for --help: what is predicted from what
    use_help: str                               # for --help: what the model is used for
    attention: str                              # for --help: what a position attends to

    # training
    # (T, hp) -> n, the number of raw bytes that fill a row of T positions; fails if these settings allow no row at all
    n_bytes: Callable = lambda T, hp: T + 1     # default: every position predicts the next byte
    min_rows: int = 1                           # minimum number of rows in a step (a micro-batch if compares_rows)
    heads: Callable = lambda config, hp: {}     # (config, hp) -> {name: module}: additional heads, in model.heads
    # (model, batch, hp) -> loss, {name: figure to print with it}; "nll" is also printed as a perplexity. For
    # an example with two terms, one for each position and one for each row, see nsp_loss
    loss: Callable = token_loss
    n_outputs: int = N_BYTES                    # the byte head predicts ids below this one
    flags: dict = dataclasses.field(default_factory=dict)               # {name: Flag}; a name must not be a batch key
    # {flag of train.py: default, or {device: default}}; a mixture ignores them
    flag_defaults: dict = dataclasses.field(default_factory=dict)
    # rows are one text in its order, and the loss reads the batch's mask (see hidden_states), so that --doc_mask works
    supports_doc_mask: bool = False

    # evaluation and use
    # where bits per byte come from. "loss": its own loss, which is nats per byte (clm)
    # "causal": clm's loss on clm's rows (fim, mtp, prefix, hybrid)
    # "bound": its own loss, which is an upper bound (mdlm); None: not defined
    bpb: str | None = None
    # (ids (B, T), P (B,), hp) -> position numbers (B, T), so that sample.py can compute them; None: 0, 1, 2, ...
    numbering: Callable | None = None
    compares_rows: bool = False                 # the loss of a row depends on the other rows of its micro-batch
    # True: inputs hide the targets, except chosen bytes that stay unchanged (by default 10% in mlm, 15% in electra).
    # False: inputs may contain targets, and the tests check only masked and causal targets
    target_hidden: bool = True
    # {mode of sample.py: what it needs}; without a text, it takes the first; {}: it cannot use the model
    uses: dict = dataclasses.field(default_factory=dict)


OBJECTIVES = {}                                 # {name: Objective}, in the order of this file


# ---- clm: causal language modeling
def clm(x, g, hp):  # x (B, T + 1) -> inp, tgt (B, T)
    """Causal language modeling: predicts each byte from the bytes before it (Radford et al. 2018).

        inp   t h e _ c a      attention: causal
        tgt   h e _ c a t      loss at all T positions
    """
    return dict(inp=x[:, :-1], tgt=x[:, 1:], prefix=0)


OBJECTIVES["clm"] = Objective(
    "clm", corrupt=clm, help="each byte from those before it", use_help="continue a prompt, correct",
    attention="causal", supports_doc_mask=True, bpb="loss", uses=dict.fromkeys(("continue", "correct"), Continue()))
CAUSAL = OBJECTIVES["clm"]                      # objectives with bpb="causal" are evaluated on its rows


# ---- mlm: masked language modeling
def mlm(x, g, hp):  # x (B, T) -> inp, tgt (B, T)
    """Masked language modeling: predicts masked bytes from the others (BERT, Devlin et al. 2019).

        inp   t [M] e _ c a q    attention: bidirectional
        tgt   .  h  . . . . t    loss at the chosen positions: 80% become MASK, 10% a random byte, 10% stay unchanged

    Each row has exactly round(mask_rate * T) targets, at least one, as in BERT's own code. They are drawn anew for
    every batch, as in RoBERTa (Liu et al. 2019). Departures:
    - Bytes are masked instead of word pieces.
    - 30% of the bytes are masked, since BERT's 15% teach less per row (Wettig et al. 2023).
    - A random byte is never a special id. There is no dense layer before the head."""
    B, T = x.shape
    k = max(1, round(hp.mask_rate * T))
    chosen = random_positions(B, T, k, g)
    inp, tgt = mask_bytes(x, chosen, g, hp.mask_token, hp.mask_random)
    return dict(inp=inp, tgt=tgt, prefix=T)


def mlm_bytes(T, hp):
    if hp.mask_token + hp.mask_random > 1 + 1e-9:
        fail(f"--mask_token {hp.mask_token:g} --mask_random {hp.mask_random:g}: add up to more than 1. Try less of one")
    return aligned_window(T, hp)


OBJECTIVES["mlm"] = Objective(
    "mlm", corrupt=mlm, help="masked bytes from the others", use_help="fill [MASK], correct", attention="bidirectional",
    n_bytes=mlm_bytes, supports_doc_mask=True, uses={"fill": Fill(), "correct": Fill()},
    flags=MASK_RATE | {
        "mask_token": Flag(0.8, "share of the predicted positions that become MASK", 0.0, 1.0),
        "mask_random": Flag(0.1, "share of the predicted positions that become a random byte", 0.0, 1.0)})


# ---- prefix: prefix language modeling
def prefix_lm(x, g, hp):  # x (B, T + 1) -> inp, tgt (B, T), prefix (B,)
    """Prefix language modeling: predicts a text from a prefix that attends in both directions (T5, Raffel et al. 2020).

        inp   t h e _ c a      attention: both directions in the first P positions, then causal (here P = 3)
        tgt   . . _ c a t      loss from position P - 1 on, which predicts the first byte after the prefix

    P is drawn for each row, uniform over 1 .. prefix_max * T (at most T - 1). Positions before P - 1 can attend to the
    byte that they would predict, so they have no loss. Departure: T5 splits a text anywhere. Here a prefix is at most
    half of the row by default, so that three quarters of the positions have a loss."""
    B, T = x.size(0), x.size(1) - 1
    longest = min(max(1, round(hp.prefix_max * T)), T - 1)
    P = torch.randint(1, longest + 1, (B,), generator=g, device=g.device)
    has_loss = torch.arange(T, device=x.device) >= P[:, None] - 1                   # (B, T)
    return dict(inp=x[:, :-1], tgt=x[:, 1:].where(has_loss, IGNORE_INDEX), prefix=P)


OBJECTIVES["prefix"] = Objective(
    "prefix", corrupt=prefix_lm, help="a suffix from a prefix read both ways", use_help="read a prompt, continue",
    attention="prefix", flags={"prefix_max": Flag(0.5, "longest prefix, as a share of the block", 0.001, 1.0)},
    supports_doc_mask=True, bpb="causal", uses={"continue": Continue(both_ways=True)})


# ---- span: span corruption. Spans of a text become sentinels, and the model writes the spans
def fit_spans(T, rate, mean):  # -> n raw bytes, n_noise bytes in spans, n_spans
    """Finds the largest n for which source, SEP, target and EOT fit in T + 1 ids. Every span has two sentinels.
    With T = 64, rate .3 and mean 6: n = 57, n_noise = 17, n_spans = 3; 57 bytes + 2 * 3 sentinels + SEP + EOT = 65."""
    for n in range(T - 1, 1, -1):
        n_noise = min(max(round(n * rate), 1), n - 1)
        n_spans = max(1, round(n_noise / mean))
        if n + 2 * n_spans + 2 <= T + 1:
            break
    if n_spans > min(n_noise, n - n_noise + 1, N_SENTINELS):
        fail(f"--block_size: {n_spans} spans (mean length {mean:g}) and their gaps do not fit into {n} bytes "
             f"or need over {N_SENTINELS} sentinels. Try another, or fewer or longer spans (--span_rate, --span_mean)")
    return n, n_noise, n_spans


def place_spans(B, n, n_noise, n_spans, g):  # -> first, noise (B, n) bool: first bytes of spans, all bytes of spans
    """Chooses n_spans spans with n_noise bytes in all among n bytes. They do not touch; all placements are equally
    likely. With n = 11, n_noise = 4 and n_spans = 2:

        cut      2           the 4 noise bytes are cut into spans of 2 and 2
        gap      2 7         the 7 other bytes have gaps 0..7: gap i has i of them before it. No gap has two spans
        start    2 9         the gap plus the noise bytes in the spans before it, 0 and 2
        end      4 11        the gap plus the noise bytes up to the end of this span, 2 and 4
        change   0 0 1 0 -1 0 0 0 0 1 0 -1
        first    0 0 1 0  0 0 0 0 0 1 0
        noise    0 0 1 1  0 0 0 0 0 1 1      running sums of change
    """
    cut = random_positions(B, n_noise - 1, n_spans - 1, g).sort(dim=1).values + 1   # (B, n_spans - 1)
    gap = random_positions(B, n - n_noise + 1, n_spans, g).sort(dim=1).values       # (B, n_spans)
    start = gap + F.pad(cut, (1, 0))
    end = gap + F.pad(cut, (0, 1), value=n_noise)
    change = torch.zeros(B, n + 1, dtype=torch.long, device=g.device)
    change = change.scatter(1, start, 1).scatter(1, end, -1)[:, :n]
    first = change == 1
    noise = change.cumsum(1) == 1
    return first, noise


def span_rows(x, rate, mean, T, g):  # x (B, at least n) -> batch of seq2seq rows of the first n bytes (see fit_spans)
    """In the target, each byte gets two slots, one for a sentinel and one for itself; keep_target selects.

        x             t   h   e   _   c   a   t   _   s   a   t     source: t h [0] c a t _ s [1]
        first         .   .   1   .   .   .   .   .   .   1   .
        noise         .   .   1   1   .   .   .   .   .   1   1
        keep          1   1   1   .   1   1   1   1   1   1   .
        keep_target  . . . . 1 1 . 1 . . . . . . . . . . 1 1 . 1    target: [0] e _ [1] a t
    """
    n, n_noise, n_spans = fit_spans(T, rate, mean)
    B = len(x)
    x = x[:, :n]
    first, noise = place_spans(B, n, n_noise, n_spans, g)                           # (B, n) bool each
    length = random_lengths(B, min(8, n), n, g, full=7 / 8)                         # (B, 1)
    length = length.maximum(first.long().argmax(1, keepdim=True) + 1)               # at least one noise byte
    present = torch.arange(n, device=g.device) < length
    first = first & present
    noise = noise & present
    sentinel = SENTINEL - 1 + first.cumsum(1)                                       # of the latest span
    source = torch.where(first, sentinel, x)
    keep = first | present & ~noise
    target = torch.stack((sentinel, x), dim=2).flatten(1)                           # (B, 2 n)
    keep_target = torch.stack((first, noise), dim=2).flatten(1)
    return seq2seq(source, keep, target, keep_target, T)


def span_positions(ids, P, hp):  # ids (B, T), prefix lengths (B,) -> position numbers (B, T)
    """Each sentinel of the source reserves numbers for the bytes of its span. In the target, a sentinel has the same
    number as in the source, and the bytes after it count on. With 8 reserved numbers (span_mean 6):

        ids         t h [0]  c  a  t  _  s [1] SEP [0] e _ [1]  a  t
        column      0 1  2   3  4  5  6  7  8    9  10 ...
        position    0 1  2  11 12 13 14 15 16   25                     column + 8 * sentinels before it
        latest                                       0 0 0   1  1  1   in the target: the latest sentinel
        since                                        0 1 2   0  1  2   and the number of ids since then
        result      0 1  2  11 12 13 14 15 16   25   2 3 4  16 17 18   the sentinel's position in the source, + since
    """
    column = torch.arange(ids.size(1), device=ids.device).expand_as(ids)
    is_sentinel = ids >= SENTINEL
    in_source = is_sentinel & (column < P[:, None])
    in_target = is_sentinel & ~in_source
    reserved = torch.where(ids[:, :1] == MODE_X, 64, round(4 / 3 * hp.span_mean))   # 64 for ul2's mode X
    sentinels_before = in_source.cumsum(1) - in_source.long()
    position = column + reserved * sentinels_before
    # sentinel_position[:, i] is the position of sentinel i in the source; an additional last column takes all other ids
    slot = torch.where(in_source, ids - SENTINEL, N_SENTINELS)
    sentinel_position = position.new_zeros(len(ids), N_SENTINELS + 1).scatter(1, slot, position)
    latest = in_target.cumsum(1) - 1            # sentinels count up: 0, 1, 2, ...; -1 before the first of the target
    since = column - torch.where(in_target, column, 0).cummax(1).values
    return torch.where(latest >= 0, sentinel_position.gather(1, latest.clamp(min=0)) + since, position)


def span_corruption(x, g, hp):  # x (B, n) -> inp, tgt, positions (B, T), prefix (B,)
    """Span corruption: writes the spans of a text that sentinels replace (T5, Raffel et al. 2020).

        t h [0] c a t _ s [1] SEP | [0] e _ [1] a t EOT     inp is all ids but the last, tgt all but the first
        source: both directions   | target: causal, loss

    In a full row, exactly round(n * span_rate) bytes are noise. They form round(noise bytes / span_mean) spans, which
    do not touch. One row in eight is truncated after 8 or more bytes, perhaps inside a span (see random_lengths). Each
    sentinel of the source reserves 4/3 * span_mean position numbers, which the bytes of its span use in the target.
    Departures:
    - 30% of the bytes are noise, since T5's 15% teach less per row.
    - The mean span is 6 bytes. T5's is 3 tokens, ByT5's (Xue et al. 2022) 20 bytes.
    - T5's code always starts with a kept token and ends with noise. Here all placements are equally likely. Since no
      span crosses the border of a row, the ends of a row are noise less often than its middle.
    - No sentinel follows the last span. T5's code has none either, but the paper's figure shows one.
    - GLM (Du et al. 2022) gives each byte of a span two positions, that of its hole and one inside the span. Here the
      bytes count on from the position of their sentinel. If a span is longer than the reserved numbers, its last bytes
      have the same position numbers as the text after it."""
    batch = span_rows(x, hp.span_rate, hp.span_mean, hp.block_size, g)
    return dict(batch, positions=span_positions(batch["inp"], batch["prefix"], hp))


def span_prompt(pieces, expected, hp, mode=()):
    """Returns the ids up to the first answer, and the prefix length. If the text does not end in a hole, one more
    sentinel is appended, which ends the last answer: the model rarely predicts EOT early, since in training EOT is
    mostly at the end of the row. If the text ends in a hole, EOT ends the last answer."""
    ids = [*mode, *pieces[0]]
    for i, piece in enumerate(pieces[1:]):
        ids += [SENTINEL + i, *piece]
    if pieces[-1]:
        ids.append(SENTINEL + len(pieces) - 1)
    return ids + [SEP, SENTINEL], len(ids) + 1


SPAN_ENDS = tuple(range(SENTINEL + 1, VOCAB_SIZE))              # an answer ends at the next sentinel
OBJECTIVES["span"] = Objective(
    "span", corrupt=span_corruption, help="spans that sentinels replace", use_help="fill holes", attention="prefix",
    n_bytes=lambda T, hp: fit_spans(T, hp.span_rate, hp.span_mean)[0], n_outputs=VOCAB_SIZE,
    flag_defaults=SHARP_ATTENTION | MORE_HEADS,
    flags={"span_rate": Flag(0.3, "share of bytes in spans", 0.001, 0.999),
           "span_mean": Flag(6.0, "mean length of a span in bytes; a row has at least one span", 1.0, 1e6)},
    numbering=span_positions, uses={"infill": Infill(span_prompt, SPAN_ENDS)})


# ---- ul2: a mixture of denoisers
UL2_X_RATE_AND_MEAN = 0.5, 32                   # noise rate and mean span length of the extreme denoiser


def suffix_rows(x, T, g):  # x (B, T - 1) -> batch of seq2seq rows: a text is split anywhere; the target is its end
    B, n = x.shape
    cut = torch.randint(1, n, (B, 1), generator=g, device=g.device)
    in_prefix = torch.arange(n, device=g.device) < cut                              # (B, n)
    return seq2seq(x, in_prefix, x, ~in_prefix, T)


def ul2(x, g, hp):  # x (B, n) -> inp, tgt, positions (B, T), prefix (B,)
    """A mixture of denoisers: writes what is missing; the first id names the denoiser (UL2, Tay et al. 2022).

        [R] source SEP spans EOT     half of the rows: short spans, as in span
        [S] prefix SEP rest EOT      a quarter: the rest of a text that is split anywhere
        [X] source SEP spans EOT     a quarter: half of the text is in spans with mean length 32

    The shares are the same in every batch. All targets have the same weight; a row of S or X has about 1.6 times as
    many targets as a row of R. Departures:
    - There are three denoisers instead of seven.
    - The paper's S removes a quarter of a text, ours any share.
    - Half of the rows are R. In U-PaLM (Tay et al. 2022) half are S.
    - A text of S always fills its row, so its EOT is always at the end.
    - A sentinel of X reserves 64 position numbers."""
    B = len(x)
    n_s_rows = (B + 2) // 4                     # largest remainder: as near to 1/2, 1/4, 1/4 as whole rows allow
    n_x_rows = (B + 1) // 4
    n_r_rows = B - n_s_rows - n_x_rows
    r_text, s_text, x_text = x.split((n_r_rows, n_s_rows, n_x_rows))
    T_rest = hp.block_size - 1                  # positions after the mode
    r_rows = span_rows(r_text, hp.span_rate, hp.span_mean, T_rest, g)
    s_rows = suffix_rows(s_text, T_rest, g)
    x_rows = span_rows(x_text, *UL2_X_RATE_AND_MEAN, T_rest, g)
    batch = {key: torch.cat((r_rows[key], s_rows[key], x_rows[key])) for key in r_rows}
    modes = [constant_column(r_text, MODE_R), constant_column(s_text, MODE_S), constant_column(x_text, MODE_X)]
    inp = torch.cat((torch.cat(modes), batch["inp"]), dim=1)
    tgt = F.pad(batch["tgt"], (1, 0), value=IGNORE_INDEX)
    P = batch["prefix"] + 1
    return dict(inp=inp, tgt=tgt, prefix=P, positions=span_positions(inp, P, hp))


def ul2_bytes(T, hp):
    for rate, mean in ((hp.span_rate, hp.span_mean), UL2_X_RATE_AND_MEAN):
        fit_spans(T - 1, rate, mean)                            # fails if the spans do not fit
    return T - 2                                                # T + 1 ids minus MODE_S, SEP, EOT


def ul2_prompt(pieces, expected, hp):
    mode = MODE_X if expected > 16 else MODE_R
    return span_prompt(pieces, expected, hp, [mode])


OBJECTIVES["ul2"] = dataclasses.replace(
    OBJECTIVES["span"], name="ul2", corrupt=ul2, help="short spans, long spans, suffixes",
    use_help="fill holes, continue", n_bytes=ul2_bytes, min_rows=4,
    uses={"infill": Infill(ul2_prompt, SPAN_ENDS),
          "continue": Continue(both_ways=True, left_ids=(MODE_S,), right_ids=(SEP,))})


# ---- fim: fill in the middle
def fim_order(prefix_end, middle_end, length, is_spm, n):  # (B, 1) each -> (B, n + 4)
    """Returns the order of a rearranged row: indices into n bytes followed by PRE, SUF, MID, EOT. They are sorted by
    these keys; ids with equal keys keep their order. The rest are the bytes from `length` on:

               PRE   prefix   SUF   suffix   MID   middle   EOT   rest
        PSM     0       1      2       3      4       5      6     7
        SPM     0       4      1       2      3       5      6     7
    """
    i = torch.arange(n, device=length.device)
    prefix_key = torch.where(is_spm, 4, 1)                                          # (B, 1)
    suf_key = torch.where(is_spm, 1, 2)
    suffix_key = torch.where(is_spm, 2, 3)
    mid_key = torch.where(is_spm, 3, 4)
    # each line also writes the sections left of its own, which the next lines overwrite
    byte_key = torch.where(i < length, suffix_key, 7)                               # (B, n)
    byte_key = torch.where(i < middle_end, 5, byte_key)
    byte_key = torch.where(i < prefix_end, prefix_key, byte_key)
    pre_key = constant_column(length, 0)
    eot_key = constant_column(length, 6)
    key = torch.cat((byte_key, pre_key, suf_key, mid_key, eot_key), dim=1)          # (B, n + 4)
    return key.argsort(dim=1, stable=True)


def fim(x, g, hp):  # x (B, T + 1) -> inp, tgt (B, T)
    """Fill in the middle: writes the middle of a text after its other parts (Bavarian et al. 2022).

        PSM   PRE prefix SUF suffix MID middle EOT       attention: causal
        SPM   PRE SUF suffix MID prefix middle EOT       loss at all T positions

    The two cuts are uniform over all places, so each section is a third on average. A row is rearranged with
    probability fim_rate, and then as SPM (the paper's variant 2) with probability fim_spm_rate; other rows stay plain
    text. Half of the rearranged texts fill their row. The others are shorter, and bytes of the previous row follow
    their EOT (see random_lengths)."""
    B = len(x)
    n = x.size(1) - 4                                                               # room for four control ids
    length = random_lengths(B, 1, n, g)                                             # (B, 1): bytes to rearrange
    cut = (torch.rand(B, 2, generator=g, device=g.device) * (length + 1)).long().sort(dim=1).values
    u = torch.rand(B, 2, 1, generator=g, device=g.device)
    is_spm = u[:, 0] < hp.fim_spm_rate                                              # (B, 1)
    is_fim = u[:, 1] < hp.fim_rate
    order = fim_order(cut[:, :1], cut[:, 1:], length, is_spm, n)                    # (B, n + 4)
    text = torch.where(torch.arange(n, device=g.device) < length, x[:, :n], x[:, :n].roll(1, 0))
    controls = [constant_column(x, control) for control in (PRE, SUF, MID, EOT)]
    ids = torch.cat((text, *controls), dim=1)                                       # (B, n + 4)
    return clm(torch.where(is_fim, ids.gather(1, order), x), g, hp)


def fim_prompt(pieces, expected, hp):
    prefix, suffix = pieces
    if hp.fim_spm_rate > 0:                     # in SPM the middle directly follows the prefix
        return [PRE, SUF, *suffix, MID, *prefix], 0
    return [PRE, *prefix, SUF, *suffix, MID], 0


OBJECTIVES["fim"] = Objective(
    "fim", corrupt=fim, help="text with its middle moved to the end",
    use_help="write between two texts, continue, correct", attention="causal", n_outputs=MID + 1, bpb="causal",
    flags={"fim_rate": Flag(0.5, "share of rows that are rearranged", 0.0, 1.0),
           "fim_spm_rate": Flag(0.5, "share of the rearranged rows that start with the suffix", 0.0, 1.0)},
    uses={"infill": Infill(fim_prompt, (EOT,)), "continue": Continue(), "correct": Continue()})


# ---- mtp: multi-token prediction
def ids_after_next(ids, n_heads):  # (B, T + n_heads) -> (B, T, n_heads - 1): ids t + 2 .. t + n_heads at position t
    return ids[:, 1:].unfold(1, n_heads, 1)[:, :, 1:]


def mtp(x, g, hp):  # x (B, T + mtp_heads) -> inp, tgt (B, T), future_tgt (B, T, mtp_heads - 1)
    """Multi-token prediction: predicts several next bytes at once (Gloeckle et al. 2024; DeepSeek-AI 2024).

        inp          t h e _ c      attention: causal
        tgt          h e _ c a      of head 1, the model's byte head
        future_tgt   e _ c a t      of head 2, and so on; loss at all T positions for each head

    loss = nats of head 1 + mtp_weight / (mtp_heads - 1) * sum of the nats of the other heads. DeepSeek-V3 trains one
    module with weight .3, later .1. Gloeckle's loss is the plain sum: with 4 heads, --mtp_weight 3. Under --doc_mask
    only head 1 predicts a byte of the next document.

    mtp_kind parallel (Gloeckle): head j applies the byte head to norm(h + W_j h). Departure: the paper's heads are
    transformer layers, taken from the trunk. On MBPP, its experiment with linear heads scores nearly the same.
    mtp_kind sequential (DeepSeek-V3): see sequential_logits. sample.py does not draft with these modules, since each
    draft is another pass, and on a CPU drafts cost as much as they save."""
    T = x.size(1) - hp.mtp_heads
    future = ids_after_next(x, hp.mtp_heads)
    if hp.doc_mask:
        doc = document_ids(x)
        is_other = ids_after_next(doc, hp.mtp_heads) != doc[:, :T, None]
        future = future.masked_fill(is_other, IGNORE_INDEX)
    return dict(clm(x[:, :T + 1], g, hp), future_tgt=future)


class MTPBlock(Block):
    def __init__(self, config):
        super().__init__(config)
        self.join = StackedLinear(2 * config.n_embd, config.n_embd)


def make_mtp_heads(config, hp):
    if hp.mtp_kind == "parallel":               # all heads but the first, which is the byte head
        return {"mtp": StackedLinear(config.n_embd, config.n_embd, stack=hp.mtp_heads - 1, zero=True)}
    # because of the name "blocks", Muon trains the matrices of these blocks
    return {"mtp": nn.ModuleDict({"blocks": nn.ModuleList(MTPBlock(config) for _ in range(hp.mtp_heads - 1))})}


def parallel_logits(model, h):  # states (..., C) -> logits (..., mtp_heads - 1, V) of all heads but the first
    changes = model.heads["mtp"](h).unflatten(-1, (-1, h.size(-1)))                 # (..., mtp_heads - 1, C): W_j h
    return model.logits(norm(h[..., None, :] + changes))


def sequential_logits(model, h, batch):  # states (B, T, C) -> list of mtp_heads - 1 logits (B, T, V)
    """At position i, module j = 1, 2, ... joins the state of module j - 1 (module 1: the state of the model) with the
    embedding of byte i + j, runs a block of its own, and predicts byte i + j + 1 with the byte head. At position 0,
    module 1 reads byte 1 and predicts byte 2, module 2 reads byte 2 and predicts byte 3. While it is trained, the clean
    byte i + j is known: it is the target of head j."""
    future = torch.cat((batch["tgt"][..., None], batch["future_tgt"]), dim=2)       # [:, i]: bytes i + 1, i + 2, ...
    logits = []
    for j, block in enumerate(model.heads["mtp"]["blocks"], 1):
        byte = future[:, :, j - 1]              # (B, T): byte i + j; IGNORE_INDEX if it is in another document
        e = norm(model.embed(byte.clamp(min=0)).to(h.dtype))
        x = block.join(torch.cat((h, e), dim=-1))                                   # h is already normalized
        h = norm(run_blocks([block], x, model.config, 0, mask=batch.get("mask")))
        logits.append(model.logits(h))
    return logits


def mtp_loss(model, batch, hp):
    h = hidden_states(model, batch)                             # (B, T, C)
    loss = target_nll(model, h, batch)
    figures = {"nll": loss}
    if hp.mtp_kind == "parallel":
        logits = parallel_logits(model, h).unbind(2)
    else:
        logits = sequential_logits(model, h, batch)
    for j, logits_j in enumerate(logits):                       # (B, T, V)
        nats = position_nats(logits_j, batch["future_tgt"][:, :, j])
        head_loss = (nats * batch["future_weight"][:, :, j]).sum()
        figures[f"head{j + 2}"] = head_loss
        loss = loss + hp.mtp_weight / (hp.mtp_heads - 1) * head_loss
    return loss, figures


OBJECTIVES["mtp"] = Objective(
    "mtp", corrupt=mtp, help="several next bytes at once", use_help="continue, drafting ahead; correct",
    attention="causal", n_bytes=lambda T, hp: T + hp.mtp_heads, heads=make_mtp_heads, loss=mtp_loss,
    flags={"mtp_heads": Flag(4, "number of bytes predicted at each position", 2),
           "mtp_kind": Flag("parallel", "parallel heads or sequential modules", choices=("parallel", "sequential")),
           "mtp_weight": Flag(0.3, "total weight of the losses of all heads but the first", 0.0)},
    supports_doc_mask=True, bpb="causal",
    uses={"continue": Continue(drafter=lambda hp: parallel_logits if hp.mtp_kind == "parallel" else None),
          "correct": Continue()})


# ---- electra: replaced token detection
def electra(x, g, hp):  # x (B, T) -> inp, tgt (B, T), chosen positions (B, k), uniforms (B, k)
    """Replaced token detection: finds the bytes that a small generator replaced (ELECTRA, Clark et al. 2020).

        inp      t [M] e _ c [M] t     the input of the generator, which is a masked language model
        fake     t  h  e _ c  u  t     the same with sampled bytes, the input of the discriminator
        label    0  0  0 0 0  1  0     loss at every position: does the byte differ from the original?

    As in the authors' code, 85% of the chosen bytes are masked and 15% stay unchanged. A byte that the generator
    guesses right counts as original. No gradient passes through its samples, which are drawn with `uniforms`. The loss
    is the generator's plus electra_weight times the discriminator's. Departures:
    - Positions are drawn without replacement.
    - Generator and discriminator do not share embeddings, and there is no dense layer before the two heads.
    - The generator has no n-grams."""
    B, T = x.shape
    k = max(1, round(hp.electra_mask_rate * T))
    chosen = random_positions(B, T, k, g)
    u = torch.rand(B, 2, k, generator=g, device=g.device)
    clean = x.gather(1, chosen)
    inp = x.scatter(1, chosen, torch.where(u[:, 0] < 0.85, MASK, clean))
    tgt = torch.full_like(x, IGNORE_INDEX).scatter(1, chosen, clean)
    return dict(inp=inp, tgt=tgt, chosen=chosen, uniforms=u[:, 1], prefix=T)


def electra_heads(config, hp):
    # the number of attention heads shrinks with the width, but is at least 1; the width of a head must be even
    H = max(1, round(config.n_head * hp.gen_scale))
    C = 2 * H * max(1, round(config.n_embd * hp.gen_scale / (2 * H)))
    small = dataclasses.replace(config, n_head=H, n_embd=C, n_outputs=N_BYTES, ngram_rows=0)
    return {"generator": Transformer(small, getattr(torch, hp.dtype)), "replaced": ScalarHead(config)}


def sample_replacements(generator, batch):  # -> generator's logits (B, k, V), clean bytes (B, k), sampled bytes (B, k)
    chosen = batch["chosen"]
    h = generator(batch["inp"], batch["prefix"])                                    # (B, T, width of the generator)
    logits = generator.logits(h.gather(1, chosen[..., None].expand(-1, -1, h.size(-1))))
    with torch.no_grad():
        fake = inverse_cdf(logits.softmax(-1), batch["uniforms"])
    return logits, batch["tgt"].gather(1, chosen), fake


def electra_loss(model, batch, hp):
    logits, clean, fake = sample_replacements(model.heads["generator"], batch)
    is_replaced = torch.zeros_like(batch["inp"]).scatter(1, batch["chosen"], (fake != clean).long())    # (B, T)
    x = batch["inp"].scatter(1, batch["chosen"], fake)                              # (B, T)
    log_odds = score_positions(model, x, "replaced")                                # (B, T)
    nats = F.binary_cross_entropy_with_logits(log_odds, is_replaced.float(), reduction="none")
    generator = position_nats(logits, clean).mean(1) @ batch["row_weight"]
    discriminator = nats.mean(1) @ batch["row_weight"]
    share_replaced = is_replaced.float().mean(1) @ batch["row_weight"]
    figures = dict(generator=generator, discriminator=discriminator, replaced=share_replaced)
    return generator + hp.electra_weight * discriminator, figures


OBJECTIVES["electra"] = Objective(
    "electra", corrupt=electra, help="which bytes a generator replaced", use_help="mark suspicious bytes",
    attention="bidirectional", n_bytes=aligned_window, heads=electra_heads, loss=electra_loss,
    flags={"electra_mask_rate": Flag(0.15, "share of bytes that the generator predicts", 0.001, 1.0),
           "electra_weight": Flag(50.0, "weight of the discriminator's loss", 0.0),
           "gen_scale": Flag(0.25, "width of the generator, as a share of n_embd", 0.001, 4.0)},
    flag_defaults=SHARP_ATTENTION,
    uses={"mark": lambda model, x: score_positions(model, x, "replaced")})


# ---- bart: denoising. A noisy text is the source, the clean text is the target
# A noise is a function (ids (B, U), keep (B, U), k (B, 1), g, hp) -> ids, keep (B, U'). k is the number of bytes to
# change. U' is larger than U if the noise inserts ids. permute and infill are applied first, because they require that
# the bytes to keep are the first ones of a row.
def pick_bytes(ids, keep, k, g):  # -> (B, U) bool: k random bytes of each row; never an id that is already MASK
    free = keep & (ids < N_BYTES)
    key = torch.rand(ids.shape, generator=g, device=g.device).masked_fill(~free, 2)
    return free & (ranks(key) < k)


def permute_noise(ids, keep, k, g, hp):
    """Shuffles the sentences. A sentence ends with a newline, or with white space after a full stop, question or
    exclamation mark. Its bytes have the number of their sentence and sort by its random key:

        ids        A  .     B  .     C
        sentence   0  0  0  1  1  1  2
        key        .5 .5 .5 .2 .2 .2 .9      the shuffled text is "B. A. C"
    """
    space = (ids == 32) | ((ids >= 9) & (ids <= 13))
    stop = (ids == ord(".")) | (ids == ord("?")) | (ids == ord("!"))
    after_stop = F.pad(stop[:, :-1], (1, 0))
    end = (ids == ord("\n")) | (space & after_stop)
    sentence = end.cumsum(1) - end.long()       # (B, U); the byte that ends a sentence belongs to it
    u = torch.rand(ids.shape, generator=g, device=g.device)                         # u[:, i] is the key of sentence i
    key = u.gather(1, sentence).masked_fill(~keep, 2)
    return ids.gather(1, key.argsort(dim=1, stable=True)), keep


def random_poisson(mean, shape, g):  # -> long, from 0 to 63
    value = torch.arange(64, device=g.device)
    cdf = (value * math.log(mean) - mean - torch.lgamma(value + 1.0)).exp().cumsum(0)
    u = torch.rand(shape, generator=g, device=g.device)
    return torch.searchsorted(cdf, u, right=True).clamp(max=63)                     # how many values have cdf <= u


def infill_lengths(k, n_draws, mean, g):  # k (B, 1) -> lengths of spans, which of them to use (bool), (B, n_draws) each
    """Uses spans of Poisson lengths until they cover k bytes. Each span adds one MASK. At most k spans are used, so
    that no row gets longer. The example goes on in place_infills and infill_noise; k is 3:

        drawn     2 0 4 1
        left      3 1 1 0     bytes that the spans before it do not cover
        length    2 0 1 0     the third span is cut to fit
        use       1 1 1 0     the two spans that are not empty, and the first empty ones, up to k spans in all
    """
    drawn = random_poisson(mean, (len(k), n_draws), g)
    left = (k - (drawn.cumsum(1) - drawn)).clamp(min=0)
    length = drawn.minimum(left)
    is_full = length > 0
    is_empty = (left > 0) & ~is_full
    max_empty = k - is_full.sum(1, keepdim=True)
    return length, is_full | is_empty & (is_empty.cumsum(1) <= max_empty)


def place_infills(keep, length, use, g):  # (B, n), two (B, n_draws) -> stays (B, n), start, used (B, n_draws)
    """Places each span to use in a random gap between the bytes that stay. Several spans may share a gap. In the text
    abcdefg, 4 bytes stay if the lengths are 2 0 1; gap 0 is before the first of them, gap 4 after the last:

        gap       1 1 4 7      of the spans 2 0 1 0, sorted; an unused span is in gap n = 7
        start     1 3 6 7      the gap plus the bytes in the spans before it, at most n
        end       3 3 7 7
        stays     1 0 0 1 1 1 0
    """
    B, n = keep.shape
    n_stay = keep.sum(1, keepdim=True) - length.sum(1, keepdim=True)
    u = torch.rand(use.shape, generator=g, device=g.device)
    gap, order = torch.where(use, (u * (n_stay + 1)).long(), n).sort(dim=1)
    used = gap < n
    size = length.gather(1, order)              # the lengths in the order of the gaps
    start = (gap + size.cumsum(1) - size).clamp(max=n)
    end = (start + size).clamp(max=n)
    # +1 at each start and -1 at each end: the running sum is 0 outside of spans
    change = torch.zeros(B, n + 1, dtype=torch.long, device=g.device)
    change = change.scatter_add(1, start, used.long()).scatter_add(1, end, -used.long())
    return (change[:, :n].cumsum(1) == 0) & keep, start, used


def infill_noise(ids, keep, k, g, hp):
    """Replaces each span by one MASK, which may stand for no byte. A stable sort puts each MASK before the byte at
    which its span starts: byte i has the key 2 i + 1, a MASK 2 * start, an unused MASK 2 n. Then the spans are dropped:

        key      1 2 3 5 6 7 9 11 12 13 14
        ids      a M b c M d e f  M  g  M
        kept     1 1 0 0 1 1 1 1  1  0  0      the noisy text is a [M] [M] d e f [M]
    """
    n = ids.size(1)
    n_draws = 8 + int(hp.bart_rate * n + 1)     # at least k + 8 draws with a mean of at least 2: enough to cover k
    length, use = infill_lengths(k, n_draws, hp.poisson_lambda, g)
    stays, start, used = place_infills(keep, length, use, g)
    byte_key = 2 * torch.arange(n, device=g.device).expand_as(ids) + 1
    mask_key = torch.where(used, 2 * start, 2 * n)
    order = torch.cat((byte_key, mask_key), dim=1).argsort(dim=1, stable=True)      # (B, n + n_draws)
    ids = torch.cat((ids, torch.full_like(start, MASK)), dim=1)
    is_kept = torch.cat((stays, used), dim=1)
    return ids.gather(1, order), is_kept.gather(1, order)


def mask_noise(ids, keep, k, g, hp):
    return torch.where(pick_bytes(ids, keep, k, g), MASK, ids), keep


def delete_noise(ids, keep, k, g, hp):
    return ids, keep & ~pick_bytes(ids, keep, k, g)


def replace_noise(ids, keep, k, g, hp):
    picked = pick_bytes(ids, keep, k, g)
    return torch.where(picked, random_bytes(ids.shape, g), ids), keep


def insert_noise(ids, keep, k, g, hp):  # inserts a random byte before each of k bytes
    inserted = torch.stack((random_bytes(ids.shape, g), ids), dim=2)                # (B, U, 2)
    is_kept = torch.stack((pick_bytes(ids, keep, k, g), keep), dim=2)
    return inserted.flatten(1), is_kept.flatten(1)


def rotate_noise(ids, keep, k, g, hp):  # rotates the text by 1 .. length - 1 positions: abcde by 2 becomes cdeab
    U = ids.size(1)
    length = keep.sum(1, keepdim=True)
    shift = 1 + (torch.rand(len(ids), 1, generator=g, device=g.device) * (length - 1)).long()
    i = torch.arange(U, device=g.device)
    present = i < length
    rotated = (i + shift) % length.clamp(min=1)                                     # 2 3 4 0 1 in the example
    return pack_left(ids, keep, U).gather(1, rotated.where(present, i)), present


NOISES = {"permute": permute_noise, "infill": infill_noise, "mask": mask_noise, "delete": delete_noise,
          "replace": replace_noise, "insert": insert_noise, "rotate": rotate_noise}
NOISES_WITH_RATE = ("infill", "mask", "delete", "replace", "insert")       # these share bart_rate


def bart_counts(length, hp, g):  # bytes of each row (B, 1) -> how many of them each of NOISES_WITH_RATE changes (B, 1)
    """bart_rate_min and bart_rate, divided by the number of these noises, give the smallest and the largest count, both
    at least 1. The count is uniform between them: with 100 bytes, rates from 0 to .3 and two noises, over 1 .. 15."""
    n_noises = max(1, len(set(NOISES_WITH_RATE) & set(hp.bart_noise.split(","))))
    most = (length * (hp.bart_rate / n_noises) + 0.5).long().clamp(min=1)
    least = (length * (hp.bart_rate_min / n_noises) + 0.5).long().clamp(min=1).minimum(most)
    return least + (torch.rand(length.shape, generator=g, device=g.device) * (most - least + 1)).long()


def bart_positions(ids, P, hp):  # ids (B, T), prefix lengths (B,) -> position numbers (B, T)
    """The target counts from 0 again, as BART's decoder does, so that a byte is close to the one that it copies:

        ids         a [M] d   SEP   a b c d
        positions   0  1  2   -1    0 1 2 3
    """
    i = torch.arange(ids.size(1), device=ids.device).expand_as(ids)
    return torch.where(i < P[:, None] - 1, i, i - P[:, None])


def bart(x, g, hp):  # x (B, n) -> inp, tgt, positions (B, T), prefix (B,)
    """Denoising: writes the whole clean text given a noisy one (BART, Lewis et al. 2020).

        a [M] d SEP              | a b c d EOT           inp is all ids but the last, tgt all but the first
        source: both directions  | target: causal, loss

    bart_noise names some of NOISES, which are applied in the order of that table. Each row draws one rate, uniform from
    bart_rate_min to bart_rate, which mask, delete, infill, replace and insert share equally; each picks at least one
    byte. A row has room for n = (T - 1) // 2 bytes, fewer with insert; half of the rows hold that many (see
    random_lengths). Closest to BART's own recipe: --bart_noise permute,infill --bart_rate_min .3 --poisson_lambda 3.5.
    Departures:
    - The rate varies. A model trained only at BART's 30% damages texts that contain less noise.
    - Sentences are not permuted by default. BART's ablation loses little without it, and small models do not learn it.
    - replace and insert (at most one byte in a gap) are added, since a model trained only with infilling copies typos.

        fairseq                                                here
        spans begin at words, count words and may overlap      begin anywhere, count bytes and never overlap
        a tenth of the spans become a random token             all become MASK
        some spans are empty                                   few are empty if a row has little noise
        sentences end with a full stop                         end with a newline, or the white space after a stop
        texts are rotated by 0 or more                         by 1 or more"""
    B, n = x.shape
    length = random_lengths(B, min(8, n), n, g)                                     # (B, 1) bytes of each row
    present = torch.arange(n, device=x.device) < length
    k = bart_counts(length, hp, g)                                                  # (B, 1)
    noisy = x
    keep = present
    for name, noise in NOISES.items():
        if name in hp.bart_noise.split(","):
            noisy, keep = noise(noisy, keep, k, g, hp)
    batch = seq2seq(noisy, keep, x, present, hp.block_size)
    return dict(batch, positions=bart_positions(batch["inp"], batch["prefix"], hp))


def bart_bytes(T, hp):
    noises = hp.bart_noise.split(",")
    if not set(noises) <= set(NOISES) or len(set(noises)) < len(noises):
        fail(f"--bart_noise {hp.bart_noise}: unknown or repeated name. Try some of {','.join(NOISES)}")
    if "insert" not in noises:
        return (T - 1) // 2
    # insert adds k <= max(1, n * bart_rate + .5) bytes to the source; n + k + SEP + n + EOT fit in T + 1 ids
    return int((T - 2) / (2 + hp.bart_rate))


def bart_piece_bytes(hp):  # -> maximum number of bytes to repair at once
    """After a mistake, the model no longer knows which byte of the source to copy next. A new piece is a fresh start.
    Noises that move text can only be undone in the whole text."""
    moves_text = {"permute", "rotate"} & set(hp.bart_noise.split(","))
    return min(hp.block_size if moves_text else 32, bart_bytes(hp.block_size, hp))


OBJECTIVES["bart"] = Objective(
    "bart", corrupt=bart, help="a whole text from a noisy one", use_help="repair a text", attention="prefix",
    n_bytes=bart_bytes,
    flags={"bart_noise": Flag("infill,replace", "any of " + ",".join(NOISES)),
           "bart_rate": Flag(0.3, f"maximum share of bytes that {', '.join(NOISES_WITH_RATE)} change", 0.001, 0.9),
           "bart_rate_min": Flag(0.0, "minimum share of such bytes; never more than bart_rate", 0.0, 0.9),
           "poisson_lambda": Flag(3.0, "infill: mean length of a span; the last is cut to fit", 2.0, 20.0)},
    # short rows are learned sooner; n-grams lower the loss, but with them the model loses its place sooner
    flag_defaults=(SHARP_ATTENTION | MORE_HEADS
                   | {"block_size": 128, "batch_size": {"cpu": 32, "cuda": 256}, "ngram_rows": 0}),
    numbering=bart_positions, target_hidden=False, uses={"repair": Repair(max_bytes=bart_piece_bytes)})


# ---- nsp: next sentence prediction
NSP_GAP = 8                                     # bytes skipped between the two texts, so that they seldom share a word


def nsp(x, g, hp):  # x (B, 2 n_text + NSP_GAP) -> inp, tgt (B, T), labels (B,)
    """Next sentence prediction: does the second text follow the first? Trained with masked language modeling (BERT,
    Devlin et al. 2019).

        inp     CLS t [M] e SEP c a t SEP      attention: bidirectional; the first text, then the second
        label   1 if the second follows        predicted at CLS; 0 in half of the rows

    Both texts always have n_text bytes. In the window they are NSP_GAP bytes apart, so that a split word seldom
    reveals a positive pair. In negative rows, nsp_negatives "random" takes the second text of another row, and "swap"
    exchanges the two texts (sentence order prediction, ALBERT, Lan et al. 2020). The loss is mlm's, plus nsp_weight
    times that of the answer. Departures:
    - BERT takes the second text from another document. Here the other row may be from the same one.
    - Texts have a fixed length, with NSP_GAP between them.
    - SEP replaces segment embeddings, and there is no pooler (BERT's dense layer and tanh).
    - 15% of the bytes of both texts are masked. BERT counts CLS and SEP in the 15%, but never masks them.
    - sample.py also fills holes in a single text, a row that never occurs in training."""
    B = len(x)
    n_text = (x.size(1) - NSP_GAP) // 2
    first = x[:, :n_text]
    second = x[:, n_text + NSP_GAP:]
    negative = torch.rand(B, generator=g, device=g.device).argsort() < B // 2       # (B,)
    if hp.nsp_negatives == "swap":
        left = torch.where(negative[:, None], second, first)
        right = torch.where(negative[:, None], first, second)
    else:
        shift = torch.randint(1, max(2, B), (1,), generator=g, device=g.device)
        other = second.index_select(0, (torch.arange(B, device=g.device) + shift) % B)
        left = first
        right = torch.where(negative[:, None], other, second)
    sep = constant_column(x, SEP)
    row = torch.cat((constant_column(x, CLS), left, sep, right, sep), dim=1)
    row = F.pad(row, (0, hp.block_size - row.size(1)), value=PAD)                   # one PAD if T is even
    k = max(1, round(hp.nsp_mask_rate * 2 * n_text))
    chosen = random_positions(B, 2 * n_text, k, g)              # among the bytes of both texts
    inp, tgt = mask_bytes(row, 1 + chosen + (chosen >= n_text), g)                  # skip CLS, and SEP after the first
    return dict(inp=inp, tgt=tgt, labels=(~negative).long(), prefix=hp.block_size)


def nsp_loss(model, batch, hp):
    h = hidden_states(model, batch)                                                 # (B, T, C)
    log_odds = model.heads["nsp"](h[:, 0])                                          # (B,)
    nll = target_nll(model, h, batch)
    nats = F.binary_cross_entropy_with_logits(log_odds, batch["labels"].float(), reduction="none")  # (B,)
    nsp_nats = nats @ batch["row_weight"]
    correct = (log_odds > 0) == (batch["labels"] == 1)
    figures = dict(nll=nll, nsp=nsp_nats, accuracy=correct.float() @ batch["row_weight"])
    return nll + hp.nsp_weight * nsp_nats, figures


def predict_follows(model, first, second, hp):  # two lists of ids -> 0-D log-odds that the second follows the first
    n_text = (hp.block_size - 3) // 2
    if len(second) > n_text:                    # it is long enough to skip a gap, as in training
        second = second[NSP_GAP:]
    row = torch.tensor([[CLS, *first[-n_text:], SEP, *second[:n_text], SEP]], device=model.embed.weight.device)
    return model.heads["nsp"](model(row, row.size(1))[:, 0])[0]


OBJECTIVES["nsp"] = Objective(
    "nsp", corrupt=nsp, help="whether a text follows another, and masked bytes",
    use_help="compare two texts, fill [MASK], correct", attention="bidirectional", min_rows=2, loss=nsp_loss,
    n_bytes=lambda T, hp: 2 * ((T - 3) // 2) + NSP_GAP, heads=lambda config, hp: {"nsp": ScalarHead(config)},
    flags={"nsp_mask_rate": Flag(0.15, "share of bytes to predict", 0.001, 1.0),
           "nsp_negatives": Flag("random", "take another row's text, or swap the texts", choices=("random", "swap")),
           "nsp_weight": Flag(1.0, "weight of the next-sentence loss; 0: only masked bytes", 0.0)},
    flag_defaults=SHARP_ATTENTION | MORE_HEADS,
    uses=({"follow": predict_follows}
          | dict.fromkeys(("fill", "correct"), Fill(left_ids=(CLS,), right_ids=(SEP,)))))


# ---- contrastive: InfoNCE over crops
def contrastive(x, g, hp):  # x (B, T) -> inp (B, 2, n_crop)
    """Contrastive learning: finds the other crop of the same window in a batch (Contriever, Izacard et al. 2022).

        window   t h e _ c a t _ s a t _ o n       two crops of crop * T bytes each, from anywhere in the window
        inp      [h e _ c a t] [a t _ s a t]       attention: bidirectional

    The loss is InfoNCE (van den Oord et al. 2018) in both directions. A crop's embedding is the mean of its states,
    normalized; similarities are divided by tau. The negatives are the other rows of the micro-batch, so the loss
    depends on --batch_size; more --accum or more processes do not add negatives. Validation compares 32 rows.
    Departures:
    - The loss has both directions, and embeddings have norm 1.
    - Crops have one length. Theirs are .05 to .5 of a window.
    - There are no ids around a crop, no deleted bytes, no queue of older negatives, and no momentum encoder."""
    B, T = x.shape
    n_crop = crop_bytes(T, hp)
    start = torch.randint(0, T - n_crop + 1, (B, 2, 1), generator=g, device=g.device)
    column = start + torch.arange(n_crop, device=g.device)                          # (B, 2, n_crop)
    return dict(inp=x.gather(1, column.flatten(1)).view(B, 2, n_crop), prefix=n_crop)


def crop_bytes(T, hp):
    return max(1, round(hp.crop * T))


def embed_crops(model, x):  # (N, n_crop) -> (N, C) float32 of norm 1: the mean of the states, normalized
    return F.normalize(model(x, x.size(1)).float().mean(1), dim=-1)


def contrastive_loss(model, batch, hp):
    embeddings = embed_crops(model, batch["inp"].flatten(0, 1))                     # (2 B, C)
    first, second = embeddings.unflatten(0, (-1, 2)).unbind(1)                      # (B, C) each
    sim = first @ second.T / hp.tau                                                 # (B, B)
    own_row = torch.arange(len(sim), device=sim.device)
    nats = (position_nats(sim, own_row) + position_nats(sim.T, own_row)) / 2        # (B,)
    correct = sim.argmax(1) == own_row
    return nats @ batch["row_weight"], {"top1": correct.float() @ batch["row_weight"]}


OBJECTIVES["contrastive"] = Objective(
    "contrastive", corrupt=contrastive, help="which crops share a window", use_help="embed and search",
    attention="bidirectional", n_bytes=aligned_window, min_rows=2, loss=contrastive_loss,
    flags={"tau": Flag(0.05, "temperature of the similarities", 1e-4, 1e4),
           "crop": Flag(0.25, "length of a crop, as a share of the block", 0.01, 0.9)},
    flag_defaults=MORE_HEADS | {"batch_size": 32},            # the other rows are the negatives
    compares_rows=True,
    uses={"search": Search(embed_crops, piece_bytes=lambda hp: crop_bytes(hp.block_size, hp))})


# ---- mdlm: masked diffusion
def block_sizes(n, block_bytes, device):  # -> number of bytes of each block of a row (blocks,); the last may be shorter
    return (n - torch.arange(0, n, block_bytes, device=device)).clamp(max=block_bytes)


def masked_counts(size, B, g):  # number of bytes of each block (blocks,) -> how many to mask (B, blocks)
    """Each count from 1 to the size of the block is equally likely. The counts are stratified: for each block, the rows
    draw one number each from [0, 1/B), [1/B, 2/B), ..., in random order. With B = 2 rows and 4 bytes, the numbers .7
    and .3 give 3 and 2."""
    order = torch.rand(B, len(size), generator=g, device=g.device).argsort(dim=0)
    u = (order + torch.rand(B, len(size), generator=g, device=g.device)) / B
    return 1 + (u * size).long().minimum(size - 1)


def mask_blocks(x, block_bytes, count, g):  # x (B, n), count (B, blocks) -> masked (B, n) bool, weight (B, n)
    """Masks count bytes of each block and gives the bytes of this block the weight size / count. One row with n = 6 and
    block_bytes = 4:

        size      4              2      the last block is shorter
        count     3              1
        rank      2  0  3  1     1  0   of random keys; the bytes with a rank below count are masked
        masked    x  x  .  x     .  x
        weight   4/3 for all     2 for both
    """
    B, n = x.shape
    size = block_sizes(n, block_bytes, g.device)                                    # (blocks,)
    key = torch.rand(B, n, generator=g, device=g.device)
    key = F.pad(key, (0, len(size) * block_bytes - n), value=2.0)                   # padding ranks last: never masked
    masked = ranks(key.view(B, len(size), block_bytes)) < count[..., None]          # (B, blocks, block_bytes)
    weight = (size / count).repeat_interleave(block_bytes, dim=1)
    return masked.flatten(1)[:, :n], weight[:, :n]


def weighted_loss(cost):  # -> an Objective.loss that sums cost(logits, tgt), nats (B, T), times the batch's weights
    def loss(model, batch, hp):
        logits = model.logits(hidden_states(model, batch))[..., :N_BYTES]
        return (cost(logits, batch["tgt"]) * batch["weight"]).sum(), {}
    return loss


def mdlm(x, g, hp):  # x (B, T) -> inp, tgt, weight (B, T)
    """Masked diffusion: predicts bytes when any share is masked (MDLM, Sahoo et al. 2024; LLaDA, Nie et al. 2025).

        inp   t [M] [M] _ c [M] t    attention: bidirectional; k of T bytes are masked
        tgt   .  h   e  . .  a  .    loss at the masked bytes, with weight T / k, divided by B * T

    k is stratified over the batch. Only bytes are predicted, never MASK or another id (MDLM's SUBS). The loss
    is an upper bound on -log p(x). MDLM integrates (1/t) E[sum of nats at bytes masked with probability t] over t in
    (0, 1). This equals the mean over k = 1 .. T of (T/k) E[sum of nats at k masked bytes]. Masking exactly k bytes has
    a far smaller variance, weights of at most T, and no row without a target. Departure: before progress reaches
    uniform_from (never with --init_from), the rate k / T is early_mask_rate; after it, uniform. High rates teach little
    early. The early losses are no bound."""
    B, T = x.shape
    size = block_sizes(T, T, g.device)          # (1,): the whole row is one block
    early_count = (size * hp.early_mask_rate + 0.5).long().clamp(min=1)
    is_early = hp.progress < hp.uniform_from    # a 0-D tensor in training: an `if` would wait for the device
    count = masked_counts(size, B, g)           # (B, 1)
    count = count + is_early * (early_count - count)
    masked, weight = mask_blocks(x, T, count, g)
    return dict(inp=x.masked_fill(masked, MASK), tgt=x.where(masked, IGNORE_INDEX), weight=weight / x.numel(), prefix=T)


OBJECTIVES["mdlm"] = Objective(
    "mdlm", corrupt=mdlm, help="masked bytes at any rate", use_help="write in any order, fill [MASK], correct",
    attention="bidirectional", n_bytes=aligned_window, loss=weighted_loss(position_nats), bpb="bound",
    supports_doc_mask=True, flag_defaults=SHARP_ATTENTION,
    flags={"early_mask_rate": Flag(0.4, "share of bytes masked before uniform_from; not with init_from", 0.001, 1.0),
           "uniform_from": Flag(0.7, "share of the steps after which each row draws its own masking rate", 0.0, 1.0)},
    uses=dict.fromkeys(("fill", "write", "correct"), Fill(order="ancestral")))


# ---- sedd: score entropy discrete diffusion. Rows are mdlm's, and the cost differs
def sedd_cost(logits, tgt):  # (B, T, 256), (B, T) -> nats (B, T)
    """Score entropy discrete diffusion: predicts ratios of probabilities (SEDD, Lou et al. 2024), with absorbing state
    and without time (RADD, Ou et al. 2025). Rows and weights are mdlm's; only the cost of a masked byte x differs:

        mdlm   logsumexp(z) - z_x          z: the logits
        sedd   sum(c) - log(c_x) - 1       c = exp(z) / 256

    c_y models p(y) / p(MASK), without its time factor (1 - t) / t. The cost is lowest if c is the distribution of the
    byte. It bounds -log p(x) as mdlm's does, but no softmax normalizes c: the model must learn to. The division by 256
    puts an untrained model at chance: its logits are 0, so all c_y are 1/256, and both costs are log 256. Departures:
    - The model does not read the time: with an absorbing state, the best c does not depend on it.
    - RADD's network ends in log_softmax, which makes its loss mdlm's.
    - sample.py's default order is MDLM's sampler, instead of SEDD's."""
    has_target = tgt != IGNORE_INDEX
    logc = logits - math.log(N_BYTES)
    logc = logc.masked_fill(~has_target[..., None], 0.0)        # so that positions without a target stay finite
    cost = logc.exp().sum(-1) - logc.gather(-1, tgt.clamp(min=0)[..., None])[..., 0] - 1
    return cost * has_target


OBJECTIVES["sedd"] = dataclasses.replace(
    OBJECTIVES["mdlm"], name="sedd", help="ratios of masked bytes at any rate", loss=weighted_loss(sedd_cost))


# ---- shared by bd3lm and xlnet: rows that hold a text twice
def two_copies(noisy, clean, block):  # noisy and clean (B, n), block (1 or B, n) -> batch without targets
    """A row that holds a noisy copy of a text, then the clean text. block: the number of each byte's block. Blocks are
    predicted in the order of their numbers, each from the clean bytes of the blocks before it, so one pass predicts all
    of them:

        query    attends to noisy bytes    attends to clean bytes
        noisy    of its own block          of earlier blocks
        clean    none                      of earlier blocks and its own

    The bytes before a position, which convolution and n-grams read, follow the same rule: a noisy position reads those
    of its own block from the noisy copy and those of earlier blocks from the clean copy, where a byte of a later block
    is MASK. Both copies count `positions` from 0: a rule about distances must compare these, not columns of the row."""
    B, n = clean.shape
    same = block[:, :, None] == block[:, None, :]                                   # (1 or B, n, n): queries, keys
    earlier = block[:, :, None] > block[:, None, :]
    from_noisy = torch.cat((same, earlier), dim=2)                                  # noisy keys, clean keys
    from_clean = torch.cat((torch.zeros_like(same), same | earlier), dim=2)
    mask = torch.cat((from_noisy, from_clean), dim=1)                               # (1 or B, 2 n, 2 n)
    block_before = ids_before(block + 1) - 1                                        # (1 or B, n, W - 1); -1: padding
    before_clean = ids_before(clean).where(block_before <= block[..., None], MASK)
    before_noisy = ids_before(noisy).where(block_before == block[..., None], before_clean)
    return dict(
        inp=torch.cat((noisy, clean), dim=1),
        prefix=0,                                               # mask replaces it
        mask=mask.expand(B, -1, -1),
        before=torch.cat((before_noisy, before_clean), dim=1),
        positions=torch.arange(n, device=clean.device).repeat(2).expand(B, -1))


# ---- bd3lm: block diffusion
def bd3lm(x, g, hp):  # x (B, n) -> inp, tgt, weight, positions (B, 2 n), mask (B, 2 n, 2 n), before (B, 2 n, W - 1)
    """Block diffusion: writes blocks from left to right, each by masked diffusion (BD3-LM, Arriola et al. 2025).

        inp   t [M]  [M] c | t  h  e  c     a noisy copy, then the clean one; blocks of bd3lm_block bytes, here 2
        tgt   .  h    e  . | .  .  .  .     loss at the masked bytes of the noisy copy

    A block attends to all of itself and to the clean blocks before it. The mask for n = 4, queries in rows:

        noisy 0   x x . . | . . . .     clean 0   . . . . | x x . .     keys: noisy 0 1 2 3 | clean 0 1 2 3
              1   x x . . | . . . .           1   . . . . | x x . .
              2   . . x x | x x . .           2   . . . . | x x x x
              3   . . x x | x x . .           3   . . . . | x x x x

    Before a noisy block, convolution and n-grams read clean bytes, as from the cache in sampling: with blocks of 2,
    noisy 3 reads noisy 2, then clean 1 and clean 0. In all steps, every number of masked bytes is equally likely: a
    constant rate at the start, as mdlm's, does not help small blocks.

    If k of the m bytes of a block are masked, each has the weight m / k, divided by B * n. The loss is an upper bound
    on -log p(x): with one block it is mdlm's, with blocks of one byte exactly -log p(x), as clm's. Departures:
    - The authors first train with one block, then draw masking rates from a part of (0, 1), chosen by the variance.
    - Their first token is never masked. Ours is predicted from nothing.
    - sample.py fills a block from the left, one byte a pass. They fill a random MASK a pass."""
    B, n = x.shape
    count = masked_counts(block_sizes(n, hp.bd3lm_block, g.device), B, g)
    masked, weight = mask_blocks(x, hp.bd3lm_block, count, g)
    block = torch.arange(n, device=g.device)[None] // hp.bd3lm_block                # (1, n)
    return dict(
        two_copies(x.masked_fill(masked, MASK), x, block),
        tgt=F.pad(x.where(masked, IGNORE_INDEX), (0, n), value=IGNORE_INDEX),
        weight=F.pad(weight / x.numel(), (0, n)))


OBJECTIVES["bd3lm"] = dataclasses.replace(
    OBJECTIVES["mdlm"], name="bd3lm", corrupt=bd3lm, help="blocks from left to right, each by diffusion",
    use_help="continue a prompt", attention="blocks", n_bytes=lambda T, hp: T // 2, supports_doc_mask=False,
    flags={"bd3lm_block": Flag(4, "number of bytes in a block", 1)},
    # the two copies take twice the positions
    flag_defaults=SHARP_ATTENTION | {"block_size": {"cpu": 512, "cuda": 2048}, "batch_size": {"cpu": 16, "cuda": 64}},
    uses={"continue_blocks": ContinueBlocks(lambda hp: min(hp.bd3lm_block, hp.block_size // 2))})


# ---- xlnet: permutation language modeling
def xlnet(x, g, hp):  # x (B, n) -> inp, tgt, positions (B, 2 n), mask (B, 2 n, 2 n), before (B, 2 n, W - 1)
    """Permutation language modeling: predicts bytes in a random order (XLNet, Yang et al. 2019).

        inp    [M] [M] [M] [M] | t h e c     queries, then the clean text (the paper's query and content streams)
        tgt     t   h   e   c  | . . . .     loss at all queries
        order   2   0   3   1                of each row: here h is predicted first, then c, t and e

    A query knows its position, and attends to itself and to the clean bytes that come before it in the order, which are
    c and h for the query of t. A clean byte attends to itself and to the clean bytes before it in the order. So the
    loss of a row is exactly -log p(x) in its order; the mean over orders is an upper bound on -log p(x). Departures:
    - All bytes are predicted. The authors predict about a sixth, which come last, and let the others attend to each
      other.
    - A query attends to itself, so that the first one of the order has a key. In the authors' code it does not.
    - Queries are MASKs in the same row, and read the bytes just before them through convolution and n-grams, as far as
      these come before them in the order. The authors' second stream has a learned vector as its only input.
    - There are no relative position encodings, no segments, no memory of the text before a row, and no reversed rows.
    """
    n = x.size(1)
    order = ranks(torch.rand(x.shape, generator=g, device=g.device))                # (B, n)
    return dict(two_copies(torch.full_like(x, MASK), x, order), tgt=F.pad(x, (0, n), value=IGNORE_INDEX))


def xlnet_fill_row(ids):  # ids (N, n) with MASKs -> batch: rows whose queries at MASKs attend to all known bytes
    """The known bytes come first in the order, from left to right, and the MASKs come last. No position attends to the
    clean copy of a MASK, except that copy itself, so that it has a key."""
    n = ids.size(1)
    known = ids != MASK
    order = torch.where(known, known.cumsum(1) - 1, n + torch.arange(n, device=ids.device))
    batch = two_copies(torch.full_like(ids, MASK), ids, order)
    is_read = torch.cat((torch.ones_like(known), known), dim=1)                     # (N, 2 n)
    own = torch.eye(2 * n, dtype=torch.bool, device=ids.device)
    return batch | {"mask": batch["mask"] & (is_read[:, None] | own)}


OBJECTIVES["xlnet"] = dataclasses.replace(
    OBJECTIVES["bd3lm"], name="xlnet", corrupt=xlnet, help="bytes in a random order",
    use_help="write in any order, fill [MASK], correct", attention="any order", flags={},
    uses=dict.fromkeys(("fill", "write", "correct"), Fill(layout=xlnet_fill_row, order="ancestral")))


# ---- rotation: find the seam
def rotation(x, g, hp):  # x (B, T) -> inp (B, T), labels (B,)
    """Rotation: finds where the first byte of a rotated window is, one of T positions. BART (Lewis et al. 2020)
    reconstructs rotated documents; here the model only points.

        window   a b c d e f g          attention: bidirectional
        inp      e f g a b c d          label 3: the position of the window's first byte

    The rotation is uniform over 0..T - 1."""
    B, T = x.shape
    shift = torch.randint(0, T, (B, 1), generator=g, device=g.device)
    rotated = (torch.arange(T, device=g.device) + shift) % T                        # (B, T)
    return dict(inp=x.gather(1, rotated), labels=((T - shift) % T)[:, 0], prefix=T)


def rotation_loss(model, batch, hp):
    scores = score_positions(model, batch["inp"], "seam")                           # (B, T), the logits of T classes
    correct = scores.argmax(1) == batch["labels"]
    loss = position_nats(scores, batch["labels"]) @ batch["row_weight"]
    return loss, {"accuracy": correct.float() @ batch["row_weight"]}


OBJECTIVES["rotation"] = Objective(
    "rotation", corrupt=rotation, help="where a rotated text was cut", use_help="find where a text was cut",
    attention="bidirectional", n_bytes=aligned_window, heads=lambda config, hp: {"seam": ScalarHead(config)},
    loss=rotation_loss,
    flag_defaults={"block_size": 64, "batch_size": {"cpu": 64, "cuda": 512}},       # 16 rows of 256 do not learn
    uses={"seam": lambda model, x: score_positions(model, x, "seam")})


# ---- hybrid: masked and causal rows
def hybrid(x, g, hp):  # x (B, T + 1) -> inp, tgt (B, T), prefix (B,)
    """Masked and causal rows: predicts both with one head and one shift (GPT-BERT, Charpentier and Samuel 2024).

        inp   t [M] e _ c    tgt   h . . . .      masked row: bidirectional; position i - 1 predicts the masked byte i
        inp   t  h  e _ c    tgt   h e _ c a      causal row

    A share hybrid_ratio of the rows is masked: at least one row, never all. The first byte is never masked, since no
    position predicts it. Under --doc_mask, the EOT of a document predicts the first byte of the next document, which it
    does not attend to. The loss is hybrid_ratio times the mean over the targets of masked rows, plus 1 - hybrid_ratio
    times that of causal rows. Departures:
    - A quarter of the rows is masked. The authors mask 15 of 16.
    - Single bytes are masked, not short spans, at a constant rate. Theirs falls from .3 to .15.
    - All bytes are equally likely to be masked, however often they were masked before, and there is no z-loss."""
    B = len(x)
    T = x.size(1) - 1
    n_masked = min(max(1, int(B * hp.hybrid_ratio + 1e-6)), B - 1)
    # spreads the masked rows evenly: with B = 6 and n_masked = 2, the remainders are 2 4 0 2 4 0; the rows whose
    # remainder is below 2, rows 2 and 5, are masked
    is_masked = torch.arange(1, B + 1, device=g.device) * n_masked % B < n_masked   # (B,)
    k = min(T - 1, max(1, round(hp.mask_rate * T)))
    chosen = 1 + random_positions(B, T - 1, k, g)
    noisy, noisy_tgt = mask_bytes(x[:, :T], chosen, g)
    noisy_tgt = F.pad(noisy_tgt[:, 1:], (0, 1), value=IGNORE_INDEX)                 # shifted, as in clm
    inp = noisy.where(is_masked[:, None], x[:, :-1])
    tgt = noisy_tgt.where(is_masked[:, None], x[:, 1:])
    kind_weight = torch.where(is_masked, hp.hybrid_ratio, 1 - hp.hybrid_ratio)      # (B,): of all rows of the kind
    n_targets = torch.where(is_masked, n_masked * k, (B - n_masked) * T)            # (B,): in all rows of the kind
    weight = kind_weight / n_targets
    return dict(inp=inp, tgt=tgt, prefix=torch.where(is_masked, T, 0), weight=weight[:, None].expand(B, T))


OBJECTIVES["hybrid"] = Objective(
    "hybrid", corrupt=hybrid, help="masked and causal rows", use_help="continue, fill holes, correct", attention="both",
    min_rows=2, loss=weighted_loss(position_nats),              # no "nll": a perplexity of both kinds means nothing
    flags=MASK_RATE | {"hybrid_ratio": Flag(0.25, "share of masked rows: at least one row, never all", 0.0, 1.0)},
    supports_doc_mask=True, bpb="causal",
    uses={"fill": Fill(left_ids=(EOT,), shift=1), "correct": Continue(), "continue": Continue(), "infill": Infill()})


# ---- other names: --objective refuses them, and suggests the objective
ALIASES = dict(
    gpt="clm", llama="clm", causal_lm="clm", autoregressive="clm", next_token="clm", bert="mlm", roberta="mlm",
    masked_lm="mlm", t5="span", byt5="span", span_corruption="span", mixture_of_denoisers="ul2",
    fill_in_the_middle="fim", multi_token="mtp", replaced_token_detection="electra", denoising="bart", albert="nsp",
    next_sentence="nsp", sentence_order="nsp", contriever="contrastive", info_nce="contrastive", llada="mdlm",
    diffusion="mdlm", score_entropy="sedd", block_diffusion="bd3lm", permutation="xlnet", gpt_bert="hybrid")
