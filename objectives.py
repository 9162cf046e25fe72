"""Every pre-training objective: how clean windows become a batch, and how a batch becomes a loss.

B rows, T positions of a row, n raw bytes that fill a row, P positions of the prefix, C width, V outputs of the byte
head, U ids of a row before packing, W ids of context; k chosen positions, S spans, N noise bytes, L bytes of a text

An objective is a few functions, followed by an `Objective` that lists them. hp holds all settings, as run.get_config
returns them; hp.progress is the share of the run that is done: a 0-D tensor in training, 1.0 elsewhere.

A batch is a dict of tensors with B rows. An objective may add keys of its own to these:

    inp         (B, T) ids
    tgt         (B, T) ids to predict, or IGNORE_INDEX where there is no loss
    ..._tgt     a second set of targets, such as case_tgt (B, T); every key that ends in tgt holds targets
    weight      (B, T), weights of tgt in the loss; case_weight holds those of case_tgt (see add_weights)
    share       (B,), weights of the rows
    prefix      int or (B,): 0 is causal, T is bidirectional
    positions   (B, T) position numbers, if they are not 0, 1, 2, ...
    mask        (B, T, T) bool: replaces the prefix rule
    before      (B, T, W - 1), required with mask: the ids that convolution and n-grams read before each position

`corrupt` draws only from its generator g and has static shapes: no loop over rows, no value read back from the device.
Where papers choose each position independently, the counts here are exact (k masked bytes, S spans with N bytes in a
full row), so that every row has a target.

A loss is a weighted sum of nats. add_weights computes the weights that `corrupt` does not set, over all rows of a step,
so the losses of micro-batches add up to the loss of the step; a mean of means would weight targets unequally.
"""
import dataclasses
import difflib
import math
from argparse import Namespace
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
EVAL_ROWS = 32                                  # rows of a validation batch, independent of the batch size


# ---- what a model is used for: each mode of sample.py needs one of these
@dataclass(frozen=True)
class Continue:
    """Continues a prompt."""
    mode = "continue"
    both_ways: bool = False                     # does the prompt attend to itself in both directions?
    before: tuple = ()                          # ids before the prompt
    after: tuple = ()                           # ids after the prompt
    # drafter(hp) returns None or draft(model, states (m, C)), which returns the logits (m, k, V) of the k bytes after
    # the next one (see generate_drafted)
    drafter: Callable | None = None


@dataclass(frozen=True)
class ContinueBlocks:
    """Continues a prompt block by block. Appends a block of MASKs to the clean blocks and fills it."""
    mode = "continue_blocks"
    length: Callable                            # (hp) -> number of bytes in a block
    orders: tuple = ("left", "ancestral", "confident")          # orders of sample.unmask; the first is the default


@dataclass(frozen=True)
class Fill:
    """Fills MASKs in a text that is read in both directions. Only for objectives that train on bidirectional rows."""
    mode = "fill"
    before: tuple = ()                          # ids before the text
    after: tuple = ()                           # ids after the text
    shift: int = 0                              # 1 if position i - 1 predicts byte i, 0 if position i does
    orders: tuple = ("confident", "left")       # orders of sample.unmask; the first is the default
    trained_at_any_rate: bool = False           # trained with up to 100% MASKs, so it can write a text from nothing


@dataclass(frozen=True)
class Infill:
    """Writes bytes other than EOT into holes of unknown length."""
    mode = "infill"
    # (texts around the holes, number of bytes expected in a hole, hp) -> ids up to the first answer, prefix length
    prompt: Callable
    stop_ids: tuple                             # stop_ids[k] ends the answer of hole k and starts that of hole k + 1


@dataclass(frozen=True)
class Repair:
    """Writes the clean version of a noisy text. Its rows are made by seq2seq."""
    mode = "repair"
    max_bytes: Callable | None = None           # (hp) -> maximum number of bytes to repair at once, or None: a full row


@dataclass(frozen=True)
class Predict:
    """Answers a question about a text. The mode says which:

        mark     (model, x (B, T)) -> log-odds (B, T) that a byte is wrong
        follow   (model, first ids, second ids, hp) -> log-odds (0-D) that the second text follows the first
        search   (model, x (B, n)) -> embeddings (B, C) of length 1, close if texts are similar
        seam     (model, x (B, T)) -> scores (B, T): how likely did the rotated text begin here?
    """
    mode: str
    predict: Callable


def find_use(objective, mode):  # -> the objective's use with this mode, or None
    return next((use for use in objective.uses if use.mode == mode), None)


# ---- an objective
def aligned_window(T, hp):  # n_bytes of objectives in which position i predicts byte i
    return T


def token_loss(model, batch, hp):  # cross-entropy of the byte head at every position with a target, in nats
    nll = target_nll(model, hidden_states(model, batch), batch)
    return nll, {"nll": nll}


@dataclass(frozen=True)
class Objective:
    name: str
    corrupt: Callable                           # (x (B, n), g, hp) -> batch
    help: str                                   # for --help: what is predicted from what
    use_help: str                               # for --help: what the model is used for
    attention: str                              # for display; experiments.evaluate reads it to choose a prefix

    # training
    # (T, hp) -> n, the number of raw bytes that fill a row of T positions; fails if the settings allow no row
    n_bytes: Callable = lambda T, hp: T + 1     # default: every position predicts the next byte
    min_rows: int = 1                           # minimum number of rows in a step (a micro-batch if compares_rows)
    heads: Callable = lambda config, hp: {}     # (config, hp) -> {name: module}: additional heads, in model.heads
    # (model, batch, hp) -> loss, {name: figure to print with it}; "nll" is also printed as a perplexity
    loss: Callable = token_loss
    n_outputs: int = N_BYTES                    # the byte head predicts ids below this one
    flags: dict = dataclasses.field(default_factory=dict)               # {name: Flag}, flags that it defines
    flag_defaults: dict = dataclasses.field(default_factory=dict)       # defaults of shared flags, or {device: default}
    supports_doc_mask: bool = False             # keeps the order of the text, so that --doc_mask makes sense

    # evaluation and use
    # where bits per byte come from. "loss": its own loss, which is nats per byte (clm)
    # "causal": clm's loss on clm's rows (fim, mtp, prefix, hybrid)
    # "bound": its own loss, which is an upper bound (mdlm); None: not defined
    bpb: str | None = None
    positions: Callable | None = None           # (ids, P (B,), hp) -> position numbers (B, T); None: 0, 1, 2, ...
    compares_rows: bool = False                 # the loss of a row depends on the other rows of its micro-batch
    # True promises that inputs hide the targets, except chosen bytes left unchanged (10% in mlm, 15% in electra).
    # False: the tests skip the check that inputs hide the targets
    target_hidden: bool = True
    uses: tuple = ()                            # the first one is the default mode of sample.py


OBJECTIVES = {}                                 # {name: Objective}, in the order of this file


# ---- clm: causal language modeling
def clm(x, g, hp):  # x (B, T + 1) -> inp, tgt (B, T)
    """Causal language modeling: predicts each byte from the bytes before it (Radford et al. 2018).

        inp   t h e   c a      attention: causal
        tgt   h e   c a t      loss at all T positions
    """
    return dict(inp=x[:, :-1], tgt=x[:, 1:], prefix=0)


def hidden_states(model, batch):  # -> (B, T, C): the model's output with the batch's prefix, mask and positions
    return model(batch["inp"], batch["prefix"], positions=batch.get("positions"), mask=batch.get("mask"),
                 before=batch.get("before"))


def add_weights(batch):  # all rows of a step -> the same batch with weights
    """Adds "share" (B,), which is 1 / B, and weights for every key that ends in tgt: "weight" for "tgt", "case_weight"
    for "case_tgt". The targets of a key (of future_tgt: of each head) have equal weights, which add up to 1. Weights
    in the batch are kept."""
    B = len(batch["inp"])
    weights = {"share": torch.full((B,), 1 / B, device=batch["inp"].device)}
    for key, tgt in batch.items():
        if key.endswith("tgt"):
            has_target = tgt != IGNORE_INDEX
            dims = (0, 1)[:tgt.dim()]           # rows and positions; further dimensions are heads
            n_targets = has_target.sum(dims).clamp(min=1)
            weights[key.replace("tgt", "weight")] = has_target / n_targets
    return weights | batch


def document_mask(batch):  # -> "mask" and "before", which keep attention, convolution and n-grams inside a document
    """A document ends with EOT. The corrupted ids count: if EOT is masked, the document goes on."""
    assert "mask" not in batch, "an objective that sets its own mask needs supports_doc_mask=False"
    inp = batch["inp"]
    doc = document_ids(inp)                                                         # (B, T)
    allowed = dense_mask(batch["prefix"], torch.arange(doc.size(1), device=doc.device), doc.size(1))
    same_document = doc[:, :, None] == doc[:, None, :]
    before = ids_before(inp) * (ids_before(doc) == doc[:, :, None])                 # ids of other documents become EOT
    return {"mask": allowed & same_document, "before": before}


def ids_before(ids):  # (B, T) -> (B, T, W - 1): the ids before each position, nearest first; the row is padded with EOT
    return F.pad(ids, (CONTEXT_WIDTH - 1, 0))[:, :-1].unfold(1, CONTEXT_WIDTH - 1, 1).flip(2)


def target_nll(model, h, batch):  # states (B, T, C) -> weighted sum of the byte head's nats (0-D)
    return (position_nats(model.logits(h), batch["tgt"]) * batch["weight"]).sum()


class ScalarHead(nn.Linear):
    """A linear layer from a state to one number, in float32: (..., C) of any dtype -> (...)."""

    def __init__(self, config):
        super().__init__(config.n_embd, 1)
        nn.init.zeros_(self.weight)             # an untrained model is at chance
        nn.init.zeros_(self.bias)

    def forward(self, h):
        return super().forward(h.float())[..., 0]


def score_positions(model, x, head_name):  # x (B, T) -> (B, T): the output of a scalar head at each position
    return model.heads[head_name](model(x, x.size(1)))          # runs the model; if you have states, apply the head


def position_nats(logits, tgt):  # logits (..., V), tgt (...) -> cross-entropy (...), 0 where there is no target
    nats = F.cross_entropy(logits.flatten(0, -2), tgt.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    return nats.view(tgt.shape)


OBJECTIVES["clm"] = Objective(
    "clm", corrupt=clm, help="each byte from those before it", use_help="continue a prompt", attention="causal",
    supports_doc_mask=True, bpb="loss", uses=(Continue(),))
CAUSAL = OBJECTIVES["clm"]                      # objectives with bpb="causal" are evaluated on its rows


# ---- mlm: masked language modeling
def mlm(x, g, hp):  # x (B, T) -> inp, tgt (B, T)
    """Masked language modeling: predicts masked bytes from the others (BERT, Devlin et al. 2019).

        inp   t [M] e   c a q    attention: bidirectional
        tgt   .  h  . . . . t    loss at the chosen positions: 80% become MASK, 10% a random byte, 10% stay unchanged

    Each row has exactly round(mask_rate * T) targets, as in BERT's own code. They are drawn anew for every batch, as in
    RoBERTa (Liu et al. 2019). If mask_span is above 1, they form spans of this mean length, which do not touch; each
    span is masked, replaced or kept as a whole (SpanBERT, Joshi et al. 2020). Departures: bytes instead of word pieces.
    30% of the bytes, since BERT's 15% teach less per row (Wettig et al. 2023). A random byte is never a special id. No
    dense layer before the head. Span lengths are in bytes and unbounded; SpanBERT's are at most 10 words."""
    B, T = x.shape
    k = max(1, round(hp.mask_rate * T))
    if hp.mask_span > 1:
        S = min(max(1, round(k / hp.mask_span)), T - k + 1)
        positions, groups = random_spans(B, T, k, S, g)
    else:
        positions, groups = random_positions(B, T, k, g), None
    inp, tgt = mask_bytes(x, positions, g, hp.mask_token, hp.mask_random, groups)
    return dict(inp=inp, tgt=tgt, prefix=T)


def random_spans(B, T, k, S, g):  # -> positions (B, k) of S spans with k bytes in all, number of each one's span (B, k)
    first, in_span = place_spans(B, T, k, S, g)                                     # (B, T) each
    positions = in_span.byte().argsort(dim=1, descending=True, stable=True)[:, :k]
    span = first.cumsum(1) - 1
    return positions, span.gather(1, positions)


def random_positions(B, T, k, g):  # -> (B, k) long: k different positions of each row, all subsets equally likely
    return torch.rand(B, T, generator=g, device=g.device).topk(k, dim=1).indices


def random_bytes(shape, g):  # -> long in 1..255: never EOT or another special id
    return torch.randint(1, N_BYTES, shape, generator=g, device=g.device)


def mask_bytes(x, positions, g, masked=0.8, random=0.1, groups=None):
    """x (B, T), positions (B, k) -> inp, tgt (B, T). The targets are the bytes at positions. A share `masked` becomes
    MASK, a share `random` a random byte, the rest stay. Positions of one group (groups (B, k)) are treated alike."""
    clean = x.gather(1, positions)                                                  # (B, k)
    u = torch.rand(positions.shape, generator=g, device=g.device)
    if groups is not None:
        u = u.gather(1, groups)
    noise = random_bytes(positions.shape, g).where(u < masked + random, clean)
    noise = noise.masked_fill(u < masked, MASK)
    return x.scatter(1, positions, noise), torch.full_like(x, IGNORE_INDEX).scatter(1, positions, clean)


def mlm_bytes(T, hp):
    if hp.mask_token + hp.mask_random > 1 + 1e-9:
        fail(f"--mask_token {hp.mask_token:g} --mask_random {hp.mask_random:g}: add up to more than 1. Try less of one")
    return aligned_window(T, hp)


MASK_RATE = {"mask_rate": Flag(0.3, "share of positions to predict", 0.001, 1.0)}
OBJECTIVES["mlm"] = Objective(
    "mlm", corrupt=mlm, help="masked bytes from the unmasked ones", use_help="fill [MASK]", attention="bidirectional",
    n_bytes=mlm_bytes, supports_doc_mask=True, uses=(Fill(),),
    flags=MASK_RATE | {
        "mask_token": Flag(0.8, "share of these positions that become MASK", 0.0, 1.0),
        "mask_random": Flag(0.1, "share of these positions that become a random byte; the rest stay as is", 0.0, 1.0),
        "mask_span": Flag(1.0, "mean length of masked spans; longer if they would touch; 1: no spans", 1.0, 1e6)})


# ---- prefix: prefix language modeling
def prefix_lm(x, g, hp):  # x (B, T + 1) -> inp, tgt (B, T), prefix (B,)
    """Prefix language modeling: predicts a text from a prefix that attends in both directions (T5, Raffel et al. 2020).

        inp   t h e   c a      attention: both directions in the first P positions, then causal (here P = 3)
        tgt   . .   c a t      loss from position P - 1 on, which predicts the first byte after the prefix

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
    supports_doc_mask=True, bpb="causal", uses=(Continue(both_ways=True),))


# ---- span: span corruption
def span_corruption(x, g, hp):  # x (B, n) -> inp, tgt, positions (B, T), prefix (B,)
    """Span corruption: spans of a text become sentinels, and the model writes the spans (T5, Raffel et al. 2020).

        t h [0] c a t   s [1] SEP | [0] e   [1] a t EOT     inp is all ids but the last, tgt all but the first
        source: both directions   | target: causal, loss

    A full row has exactly N = round(n * span_rate) noise bytes in S = round(N / span_mean) spans, which do not touch.
    One row in eight is truncated after 8 or more bytes, perhaps inside a span (see random_lengths). Each sentinel of
    the source reserves 4/3 * span_mean position numbers, which the bytes of its span use in the target.
    Departures: 30% of the bytes are noise, since T5's 15% teach less per row. The mean span is 6 bytes; T5's is 3
    tokens, ByT5's (Xue et al. 2022) 20 bytes. T5's code always starts with a kept token and ends with noise; here all
    placements are equally likely (spans may not touch, so the ends are hit less often). Sentinels count up and, as in
    T5's code but not in the paper's figure, none follows the last span. GLM (Du et al. 2022) gives each byte of a span
    two positions, that of its hole and one inside the span. Here the bytes count on from the position of their
    sentinel; a span longer than the reserved numbers shares some with the text after it."""
    _, N, S = fit_spans(hp.block_size, hp.span_rate, hp.span_mean)
    batch = span_rows(x, N, S, hp.block_size, g)
    return dict(batch, positions=span_positions(batch["inp"], batch["prefix"], hp))


def span_rows(x, N, S, T, g):  # x (B, n) -> batch of seq2seq rows
    """In the target, each byte gets two slots, for its sentinel and for itself; keep_target selects.

        x             t   h   e       c   a   t       s   a   t     source: t h [0] c a t   s [1]
        first         .   .   1   .   .   .   .   .   .   1   .
        noise         .   .   1   1   .   .   .   .   .   1   1
        keep          1   1   1   .   1   1   1   1   1   1   .
        keep_target  . . . . 1 1 . 1 . . . . . . . . . . 1 1 . 1    target: [0] e   [1] a t
    """
    B, n = x.shape
    first, noise = place_spans(B, n, N, S, g)                                       # (B, n) bool each
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


def place_spans(B, n, N, S, g):  # -> first, noise (B, n) bool, as in the example of span_rows
    """Chooses S spans with N bytes in all among n bytes. They do not touch; all placements are equally likely."""
    cut = random_positions(B, N - 1, S - 1, g).sort(dim=1).values + 1               # cuts the N bytes into S spans
    # spans do not touch if they lie in different gaps between the n - N other bytes; gap i has i of them before it
    gap = random_positions(B, n - N + 1, S, g).sort(dim=1).values                   # (B, S)
    start = gap + F.pad(cut, (1, 0))
    end = gap + F.pad(cut, (0, 1), value=N)
    # +1 at the start of a span and -1 after its end, so that the running sum is 1 inside
    edge = torch.zeros(B, n + 1, dtype=torch.long, device=g.device)
    edge = edge.scatter(1, start, 1).scatter(1, end, -1)
    return edge[:, :n] == 1, edge[:, :n].cumsum(1) == 1


def random_lengths(B, low, high, g, full=0.5):  # -> (B, 1) long: high in a share `full` of the rows, else low..high
    """Draws the lengths of texts. If every text filled its row, EOT would always be at the same position, and the model
    would never learn to stop early."""
    u = torch.rand(2, B, 1, generator=g, device=g.device)
    return torch.where(u[0] < full, high, low + (u[1] * (high - low + 1)).long())


def constant_column(x, value):  # -> (B, 1) filled with one id
    return x.new_full((x.size(0), 1), value)


def pack_left(ids, keep, T):  # ids, keep (B, U) -> (B, T)
    """Moves the ids to keep to the left and pads with PAD: 5 6 7 8 with keep 1 0 1 0 becomes 5 7 PAD PAD."""
    column = torch.where(keep, keep.cumsum(1) - 1, T).clamp(max=T)                  # dropped ids go to column T
    return ids.new_full((ids.size(0), T + 1), PAD).scatter(1, column, ids)[:, :T]


def seq2seq(source, keep, target, keep_target, T):  # source, keep (B, U); target, keep_target (B, U') -> batch
    """Puts the ids to keep of two texts in one row of T positions: source SEP target EOT PAD. The prefix ends with SEP.
    SEP and the positions after it predict the next id, up to EOT."""
    sep = constant_column(source, SEP)
    is_kept = torch.ones_like(sep, dtype=torch.bool)
    P = keep.sum(1) + 1                                                             # positions up to SEP
    end = P + keep_target.sum(1)                                                    # the position of EOT
    ids = torch.cat((source, sep, target, constant_column(source, EOT)), dim=1)
    row = pack_left(ids, torch.cat((keep, is_kept, keep_target, is_kept), dim=1), T + 1)
    i = torch.arange(T, device=row.device)
    has_loss = (i >= P[:, None] - 1) & (i < end[:, None])
    return dict(inp=row[:, :-1], tgt=row[:, 1:].where(has_loss, IGNORE_INDEX), prefix=P)


def span_positions(ids, P, hp):  # ids (B, T), prefix lengths (B,) -> position numbers (B, T)
    """Each sentinel of the source reserves numbers for the bytes of its span. In the target, a sentinel has the same
    number as in the source, and the bytes after it count on. With 8 reserved numbers (span_mean 6):

        ids         t h [0]  c  a  t     s [1] SEP [0] e   [1]  a  t
        positions   0 1  2  11 12 13 14 15 16   25   2 3 4  16 17 18
    """
    column = torch.arange(ids.size(1), device=ids.device).expand_as(ids)
    is_sentinel = ids >= SENTINEL
    in_source = is_sentinel & (column < P[:, None])
    in_target = is_sentinel & ~in_source
    reserved = torch.where(ids[:, :1] == MODE_X, 64, round(4 / 3 * hp.span_mean))   # 64 in ul2's X rows
    sentinels_before = in_source.cumsum(1) - in_source.long()
    position = column + reserved * sentinels_before
    # source_position[:, k] is the position of sentinel k in the source; the last column takes all other ids
    unused = position.new_zeros(len(ids), N_SENTINELS + 1)
    source_position = unused.scatter(1, torch.where(in_source, ids - SENTINEL, N_SENTINELS), position)
    latest = in_target.cumsum(1) - 1            # the latest sentinel of the target: they are 0, 1, 2, ...; -1: none yet
    since = column - torch.where(in_target, column, 0).cummax(1).values
    return torch.where(latest >= 0, source_position.gather(1, latest.clamp(min=0)) + since, position)


def fit_spans(T, rate, mean):  # -> n raw bytes, N noise bytes, S spans of a full row
    """Finds the largest n for which source, SEP, target and EOT fit in T + 1 ids. Every span has two sentinels.
    With T = 64, rate .3 and mean 6: n = 57, N = 17, S = 3, since 57 bytes + 2 * 3 sentinels + SEP + EOT = 65."""
    for n in range(T - 1, 1, -1):
        N = min(max(round(n * rate), 1), n - 1)
        S = max(1, round(N / mean))
        if n + 2 * S + 2 <= T + 1:
            break
    if S > min(N, n - N + 1, N_SENTINELS):
        fail(f"--span_rate {rate:g} --span_mean {mean:g}: the {S} spans in {n} bytes would touch, or need more than "
             f"{N_SENTINELS} sentinels. Try a lower --span_rate or a larger --span_mean")
    return n, N, S


def span_prompt(pieces, expected, hp, mode=()):
    """Returns the ids up to the first answer, and the prefix length. A text that does not end in a hole gets one more
    sentinel, which ends the last answer: the model rarely predicts EOT early, since in training EOT is mostly at the
    end of the row. Otherwise EOT ends the last answer."""
    ids = [*mode, *pieces[0]]
    for k, piece in enumerate(pieces[1:]):
        ids += [SENTINEL + k, *piece]
    if pieces[-1]:
        ids.append(SENTINEL + len(pieces) - 1)
    return ids + [SEP, SENTINEL], len(ids) + 1


SPAN_ENDS = tuple(range(SENTINEL + 1, VOCAB_SIZE))              # an answer ends at the next sentinel
SHARP_ATTENTION = {"attn_scale": 2.0}           # sharper attention learns long-range lookups sooner
# 4 heads instead of 2: better for bart and nsp, ul2's answers end more often; equal for span and contrastive
NARROW_HEADS = {"n_head": {"cpu": 4, "cuda": 6}}
OBJECTIVES["span"] = Objective(
    "span", corrupt=span_corruption, help="spans that sentinels replace", use_help="fill holes", attention="prefix",
    n_bytes=lambda T, hp: fit_spans(T, hp.span_rate, hp.span_mean)[0], n_outputs=VOCAB_SIZE,
    flag_defaults=SHARP_ATTENTION | NARROW_HEADS,
    flags={"span_rate": Flag(0.3, "share of bytes in spans", 0.001, 0.999),
           "span_mean": Flag(6.0, "mean length of a span in bytes; at most the noise bytes of a row", 1.0)},
    positions=span_positions, uses=(Infill(span_prompt, SPAN_ENDS),))


# ---- ul2: a mixture of denoisers
UL2_X_RATE_AND_MEAN = 0.5, 32                   # noise rate and mean span length of the extreme denoiser


def ul2(x, g, hp):  # x (B, n) -> inp, tgt, positions (B, T), prefix (B,)
    """A mixture of three denoisers; the first id of a row names its denoiser (UL2, Tay et al. 2022).

        [R] source SEP spans EOT     half of the rows: short spans, as in span
        [S] prefix SEP rest EOT      a quarter: the rest of a text that is split anywhere
        [X] source SEP spans EOT     a quarter: half of the text is in spans with mean length 32

    The shares are the same in every batch. All targets have the same weight; a row of S or X has about 1.6 times as
    many as a row of R. Departures: three denoisers instead of seven. The paper's S removes a quarter of a text, ours
    any share. Half of the rows are R; in U-PaLM (Tay et al. 2022) half are S. X reserves more position numbers."""
    B = x.size(0)
    T = hp.block_size - 1                       # positions after the mode
    n_s_rows = (B + 2) // 4                     # largest remainder: as near to 1/2, 1/4, 1/4 as whole rows allow
    n_x_rows = (B + 1) // 4
    r_text, s_text, x_text = x.split((B - n_s_rows - n_x_rows, n_s_rows, n_x_rows))
    n, N, S = fit_spans(T, hp.span_rate, hp.span_mean)
    r_rows = span_rows(r_text[:, :n], N, S, T, g)
    cut = torch.randint(1, T - 1, (n_s_rows, 1), generator=g, device=g.device)
    in_prefix = torch.arange(T - 1, device=g.device) < cut                          # (rows of S, T - 1)
    s_rows = seq2seq(s_text, in_prefix, s_text, ~in_prefix, T)
    n, N, S = fit_spans(T, *UL2_X_RATE_AND_MEAN)
    x_rows = span_rows(x_text[:, :n], N, S, T, g)
    batch = {key: torch.cat((r_rows[key], s_rows[key], x_rows[key])) for key in r_rows}
    modes = [constant_column(r_text, MODE_R), constant_column(s_text, MODE_S), constant_column(x_text, MODE_X)]
    inp = torch.cat((torch.cat(modes), batch["inp"]), dim=1)
    tgt = F.pad(batch["tgt"], (1, 0), value=IGNORE_INDEX)
    P = batch["prefix"] + 1
    return dict(inp=inp, tgt=tgt, prefix=P, positions=span_positions(inp, P, hp))


def ul2_bytes(T, hp):
    fit_spans(T - 1, hp.span_rate, hp.span_mean)                # fails if the spans do not fit
    fit_spans(T - 1, *UL2_X_RATE_AND_MEAN)
    return T - 2                                                # T + 1 ids minus MODE_S, SEP and EOT


def ul2_prompt(pieces, expected, hp):
    return span_prompt(pieces, expected, hp, [MODE_X if expected > 16 else MODE_R])


OBJECTIVES["ul2"] = dataclasses.replace(
    OBJECTIVES["span"], name="ul2", corrupt=ul2, help="short spans, long spans, suffixes",
    use_help="fill holes, continue", n_bytes=ul2_bytes, min_rows=4,
    uses=(Infill(ul2_prompt, SPAN_ENDS), Continue(True, (MODE_S,), (SEP,))))


# ---- fim: fill in the middle
def fim(x, g, hp):  # x (B, T + 1) -> inp, tgt (B, T)
    """Fill in the middle: rearranges a text so that its middle comes last (Bavarian et al. 2022).

        PSM   PRE prefix SUF suffix MID middle EOT       attention: causal
        SPM   PRE SUF suffix MID prefix middle EOT       loss at all T positions

    The two cuts are uniform over all places, so each section is a third on average. A row is rearranged with
    probability fim_rate, and then as SPM (the paper's variant 2) with probability fim_spm_rate; other rows stay plain
    text. In half of the rearranged rows, and if the batch is one row, the text fills the row; in the others it is
    shorter, and bytes of the previous row follow EOT (see random_lengths)."""
    B, n = x.size(0), x.size(1) - 4                                                 # room for four control ids
    i = torch.arange(n, device=g.device)
    length = random_lengths(B, 1 if B > 1 else n, n, g)                             # (B, 1): bytes to rearrange
    cut = (torch.rand(B, 2, generator=g, device=g.device) * (length + 1)).long().sort(dim=1).values
    a = cut[:, :1]                              # (B, 1): prefix i < a, middle a <= i < b, suffix b <= i < length
    b = cut[:, 1:]
    u = torch.rand(B, 2, 1, generator=g, device=g.device)
    is_spm = u[:, 0] < hp.fim_spm_rate                                              # (B, 1)
    is_fim = u[:, 1] < hp.fim_rate
    # a stable sort by these keys builds the row. PSM: PRE 0, prefix 1, SUF 2, suffix 3, MID 4, middle 5, EOT 6, rest 7
    prefix_key = torch.where(is_spm, 4, 1)                                          # (B, 1)
    suf_key = torch.where(is_spm, 1, 2)
    suffix_key = torch.where(is_spm, 2, 3)
    mid_key = torch.where(is_spm, 3, 4)
    text_key = torch.where(i < length, suffix_key, 7)                               # (B, n)
    text_key = torch.where(i < b, 5, text_key)
    text_key = torch.where(i < a, prefix_key, text_key)
    key = torch.cat((text_key, constant_column(x, 0), suf_key, mid_key, constant_column(x, 6)), dim=1)
    order = key.argsort(dim=1, stable=True)                                         # (B, n + 4)
    text = torch.where(i < length, x[:, :n], x[:, :n].roll(1, 0))
    controls = [constant_column(x, control) for control in (PRE, SUF, MID, EOT)]
    ids = torch.cat((text, *controls), dim=1)                                       # (B, n + 4)
    return clm(torch.where(is_fim, ids.gather(1, order), x), g, hp)


def fim_prompt(pieces, expected, hp):
    prefix, suffix = pieces
    if hp.fim_spm_rate > 0:                     # in SPM the middle directly follows the prefix
        return [PRE, SUF, *suffix, MID, *prefix], 0
    return [PRE, *prefix, SUF, *suffix, MID], 0


OBJECTIVES["fim"] = Objective(
    "fim", corrupt=fim, help="text with its middle moved to the end", use_help="write between two texts",
    attention="causal", n_outputs=MID + 1, bpb="causal",
    flags={"fim_rate": Flag(0.5, "share of rows that are rearranged", 0.0, 1.0),
           "fim_spm_rate": Flag(0.5, "share of the rearranged rows that start with the suffix", 0.0, 1.0)},
    uses=(Infill(fim_prompt, (EOT,)), Continue()))


# ---- mtp: multi-token prediction
def mtp(x, g, hp):  # x (B, T + n) -> inp, tgt (B, T), future_tgt (B, T, n - 1)
    """Multi-token prediction: predicts the next n = mtp_heads bytes at once (Gloeckle et al. 2024; DeepSeek-AI 2024).

        inp          t h e   c      attention: causal
        tgt          h e   c a      of head 1, the model's byte head
        future_tgt   e   c a t      of head 2, and so on; loss at all T positions for each head
        loss = nats of head 1 + mtp_weight / (n - 1) * sum of the nats of heads 2 .. n

    mtp_kind parallel (Gloeckle): head k applies the byte head to norm(h + W_k h). Departure: the paper's heads are one
    transformer layer each, and the trunk has as many layers less; on MBPP its linear heads score nearly the same.
    mtp_kind sequential (DeepSeek-V3): at position i, module k joins the state of module k - 1 (for k = 1, of the model)
    with the embedding of byte i + k, runs a block of its own and predicts byte i + k + 1 with the byte head. sample.py
    does not draft with these modules: each draft is another pass, and on a CPU drafts cost as much as they save.
    The loss is DeepSeek-V3's (one module, whose weight falls to .1); with 4 heads, --mtp_weight 3 is Gloeckle's. With
    mtp_heads 1, both kinds equal clm. Under --doc_mask only head 1 predicts a byte of the next document."""
    def after_next(ids):  # (B, T + n) -> (B, T, n - 1): ids t + 2 .. t + n at position t
        return ids[:, 1:].unfold(1, hp.mtp_heads, 1)[:, :, 1:]
    T = x.size(1) - hp.mtp_heads
    future = after_next(x)
    if hp.doc_mask:
        doc = document_ids(x)
        future = future.masked_fill(after_next(doc) != doc[:, :T, None], IGNORE_INDEX)
    return dict(clm(x[:, :T + 1], g, hp), future_tgt=future)


class MTPBlock(Block):
    def __init__(self, config):
        super().__init__(config)
        self.join = StackedLinear(2 * config.n_embd, config.n_embd)


def make_mtp_heads(config, hp):
    n = hp.mtp_heads - 1
    if n == 0:
        return {}
    if hp.mtp_kind == "parallel":
        return {"mtp": StackedLinear(config.n_embd, config.n_embd, stack=n, zero=True)}
    # because of the name "blocks", Muon trains the matrices of these blocks
    return {"mtp": nn.ModuleDict({"blocks": nn.ModuleList(MTPBlock(config) for _ in range(n))})}


def parallel_logits(model, h):  # states (..., C) -> logits (..., n - 1, V) of heads 2 .. n
    states = norm(h[..., None, :] + model.heads["mtp"](h).unflatten(-1, (-1, h.size(-1))))
    return model.logits(states)


def sequential_logits(model, h, batch):  # states (B, T, C) -> list of n - 1 logits (B, T, V)
    latest = batch["tgt"]                                       # the last byte that the next module reads
    logits = []
    for k, block in enumerate(model.heads["mtp"]["blocks"]):
        e = norm(model.embed(latest.clamp(min=0)).to(h.dtype))
        x = block.join(torch.cat((h, e), dim=-1))               # h is already normalized
        h = norm(run_blocks([block], x, model.config, 0, mask=batch.get("mask")))
        logits.append(model.logits(h))
        latest = batch["future_tgt"][:, :, k]
    return logits


def mtp_loss(model, batch, hp):
    h = hidden_states(model, batch)                             # (B, T, C)
    loss = target_nll(model, h, batch)
    figures = {"nll": loss}
    if hp.mtp_heads == 1:
        return loss, figures
    if hp.mtp_kind == "parallel":
        logits = parallel_logits(model, h).unbind(2)
    else:
        logits = sequential_logits(model, h, batch)
    for k, head_logits in enumerate(logits):                    # (B, T, V)
        nats = position_nats(head_logits, batch["future_tgt"][:, :, k]) * batch["future_weight"][:, :, k]
        figures[f"head{k + 2}"] = nats.sum()
        loss = loss + hp.mtp_weight / (hp.mtp_heads - 1) * figures[f"head{k + 2}"]
    return loss, figures


OBJECTIVES["mtp"] = Objective(
    "mtp", corrupt=mtp, help="several next bytes at once", use_help="continue, drafting ahead", attention="causal",
    n_bytes=lambda T, hp: T + hp.mtp_heads, heads=make_mtp_heads, loss=mtp_loss,
    flags={"mtp_heads": Flag(4, "number of bytes predicted at each position", 1),
           "mtp_kind": Flag("parallel", "parallel heads or sequential modules", choices=("parallel", "sequential")),
           "mtp_weight": Flag(0.3, "total weight of the losses of all heads but the first", 0.0)},
    supports_doc_mask=True, bpb="causal",
    uses=(Continue(drafter=lambda hp: parallel_logits if hp.mtp_kind == "parallel" and hp.mtp_heads > 1 else None),))


# ---- electra: replaced token detection
def electra(x, g, hp):  # x (B, T) -> inp, tgt (B, T), masked_positions (B, k), uniforms (B, k)
    """Replaced token detection: finds the bytes that a small generator replaced (ELECTRA, Clark et al. 2020).

        inp      t [M] e   c [M] t     the input of the generator, which is a masked language model
        fake     t  h  e   c  u  t     the same with sampled bytes, the input of the discriminator
        label    0  0  0 0 0  1  0     loss at every position: does the byte differ from the original?

    A byte that the generator guesses right counts as original. No gradient passes through the samples. The loss is
    the generator's plus electra_weight times the discriminator's. As in the authors' code, 85% of the chosen bytes are
    masked and 15% stay unchanged. Departures: positions are drawn without replacement, generator and discriminator do
    not share embeddings, and there is no dense layer before the two heads. The generator has no n-grams."""
    B, T = x.shape
    k = max(1, round(hp.mask_rate * T))
    positions = random_positions(B, T, k, g)
    u = torch.rand(B, 2, k, generator=g, device=g.device)
    clean = x.gather(1, positions)
    inp = x.scatter(1, positions, torch.where(u[:, 0] < 0.85, MASK, clean))
    tgt = torch.full_like(x, IGNORE_INDEX).scatter(1, positions, clean)
    return dict(inp=inp, tgt=tgt, masked_positions=positions, uniforms=u[:, 1], prefix=T)


def electra_heads(config, hp):
    # the number of heads shrinks with the width, but is at least 1; the width of a head must be even
    H = max(1, round(config.n_head * hp.gen_scale))
    C = 2 * H * max(1, round(config.n_embd * hp.gen_scale / (2 * H)))
    small = dataclasses.replace(config, n_head=H, n_embd=C, n_outputs=N_BYTES, ngram_rows=0)
    return {"generator": Transformer(small, getattr(torch, hp.dtype)), "replaced": ScalarHead(config)}


def sample_replacements(generator, batch):  # -> generator's logits (B, k, V), clean bytes (B, k), sampled bytes (B, k)
    positions = batch["masked_positions"]
    h = generator(batch["inp"], batch["prefix"])
    logits = generator.logits(h.gather(1, positions[..., None].expand(-1, -1, h.size(-1))))
    with torch.no_grad():
        fake = inverse_cdf(logits[..., :N_BYTES].softmax(-1), batch["uniforms"])
    return logits, batch["tgt"].gather(1, positions), fake


def inverse_cdf(p, u):  # p (..., M) with any positive sum, u (...) in [0, 1) -> index (...), drawn in proportion to p
    cdf = p.cumsum(-1)
    return torch.searchsorted(cdf, (u * cdf[..., -1])[..., None], right=True)[..., 0].clamp(max=p.size(-1) - 1)


def electra_loss(model, batch, hp):
    logits, clean, fake = sample_replacements(model.heads["generator"], batch)
    positions = batch["masked_positions"]
    labels = torch.zeros_like(batch["inp"]).scatter(1, positions, (fake != clean).long())           # (B, T)
    x = batch["inp"].scatter(1, positions, fake)                                    # (B, T)
    replaced = score_positions(model, x, "replaced")            # (B, T) log-odds
    nats = F.binary_cross_entropy_with_logits(replaced, labels.float(), reduction="none")
    generator = position_nats(logits, clean).mean(1) @ batch["share"]
    discriminator = nats.mean(1) @ batch["share"]
    share_replaced = labels.float().mean(1) @ batch["share"]
    figures = dict(generator=generator, discriminator=discriminator, replaced=share_replaced)
    return generator + hp.electra_weight * discriminator, figures


OBJECTIVES["electra"] = Objective(
    "electra", corrupt=electra, help="which bytes a generator replaced", use_help="mark suspicious bytes",
    attention="bidirectional", n_bytes=aligned_window, heads=electra_heads, loss=electra_loss,
    flags=MASK_RATE | {"electra_weight": Flag(50.0, "weight of the discriminator's loss", 0.0),
                       "gen_scale": Flag(0.25, "width of the generator, as a share of n_embd", 0.001, 4.0)},
    flag_defaults=SHARP_ATTENTION | {"mask_rate": 0.15},
    uses=(Predict("mark", lambda model, x: score_positions(model, x, "replaced")),))


# ---- bart: denoising
def bart(x, g, hp):  # x (B, L) -> inp, tgt, positions (B, T), prefix (B,)
    """Denoising: writes the whole clean text given a noisy one (BART, Lewis et al. 2020).

        a [M] d SEP              | a b c d EOT           inp is all ids but the last, tgt all but the first
        source: both directions  | target: causal, loss

    bart_noise names some of NOISES, which are applied in the order of that table. Each row draws one rate, uniform from
    bart_rate_min to bart_rate, which mask, delete, infill, replace and insert share equally; each changes at least one
    byte. A row has room for L = (T - 1) // 2 bytes, fewer with insert; half of the rows hold that many (see
    random_lengths). Closest to BART's own recipe: --bart_noise permute,infill --bart_rate_min .3 --poisson_lambda 3.5.
    Departures: the rate varies, since a model trained with BART's constant 30% damages texts with less noise. Sentences
    are not permuted by default: BART's ablation loses little without it, and small models do not learn it. replace and
    insert (at most one byte in a gap) are added, since a model trained only with infilling copies typos.

        fairseq                                                here
        spans begin at words, count words and may overlap      begin anywhere, count bytes and never overlap
        a tenth become a random token, some are empty          all become MASK, few are empty if a row has little noise
        sentences end with a full stop                         end with a newline, or the white space after a stop
        texts are rotated by 0 or more                         by 1 or more"""
    B, L = x.shape
    length = random_lengths(B, min(8, L), L, g)                                     # (B, 1) bytes of each row
    present = torch.arange(L, device=x.device) < length
    k = bart_counts(length, hp, g)                                                  # (B, 1)
    noisy = x
    keep = present
    for name, noise in NOISES.items():
        if name in hp.bart_noise.split(","):
            noisy, keep = noise(noisy, keep, k, g, hp)
    batch = seq2seq(noisy, keep, x, present, hp.block_size)
    return dict(batch, positions=bart_positions(batch["inp"], batch["prefix"], hp))


def bart_positions(ids, P, hp):  # ids (B, T), prefix lengths (B,) -> position numbers (B, T)
    """The target counts from 0 again, as BART's decoder does, so that a byte is close to the one that it copies:

        ids         a [M] d   SEP   a b c d
        positions   0  1  2   -1    0 1 2 3
    """
    i = torch.arange(ids.size(1), device=ids.device).expand_as(ids)
    return torch.where(i < P[:, None] - 1, i, i - P[:, None])


# a noise: ids, keep (B, U), number of bytes to change k (B, 1) -> ids, keep (B, U'); U' is larger if it inserts ids.
# permute and infill are applied first, so for them the bytes to keep are still the first ones of the row
def permute_noise(ids, keep, k, g, hp):  # shuffles the sentences
    """A sentence ends with a newline, or with white space after a full stop, question or exclamation mark."""
    space = (ids == 32) | ((ids >= 9) & (ids <= 13))
    stop = (ids == ord(".")) | (ids == ord("?")) | (ids == ord("!"))
    end = (ids == ord("\n")) | (space & F.pad(stop[:, :-1], (1, 0)))
    sentence = end.cumsum(1) - end.long()       # (B, U): the number of each byte's sentence, which includes its end
    # one random key per sentence: that of the position with its number
    key = torch.rand(ids.shape, generator=g, device=g.device).gather(1, sentence).masked_fill(~keep, 2)
    return ids.gather(1, key.argsort(dim=1, stable=True)), keep


def infill_noise(ids, keep, k, g, hp):  # each span of Poisson length becomes one MASK; an empty span inserts a MASK
    L = ids.size(1)
    K = 8 + int(hp.bart_rate * L + 1)           # k + 8 or more lengths of mean 2 or more practically always cover k
    length, use = infill_lengths(k, K, hp.poisson_lambda, g)
    stays, start, used = place_infills(keep, length, use, g)                        # (B, L), (B, K), (B, K)
    # a stable sort puts each MASK before the byte at which its span starts, and those of unused spans last
    byte = torch.arange(L, device=g.device).expand_as(ids)
    order = torch.cat((2 * byte + 1, torch.where(used, 2 * start, 2 * L)), dim=1).argsort(dim=1, stable=True)
    ids = torch.cat((ids, torch.full_like(start, MASK)), dim=1)                     # (B, L + K)
    return ids.gather(1, order), torch.cat((stays, used), dim=1).gather(1, order)


def mask_noise(ids, keep, k, g, hp):
    return torch.where(pick_bytes(ids, keep, k, g), MASK, ids), keep


def delete_noise(ids, keep, k, g, hp):
    return ids, keep & ~pick_bytes(ids, keep, k, g)


def replace_noise(ids, keep, k, g, hp):
    return torch.where(pick_bytes(ids, keep, k, g), random_bytes(ids.shape, g), ids), keep


def insert_noise(ids, keep, k, g, hp):  # inserts a random byte before each of k bytes
    inserted = torch.stack((random_bytes(ids.shape, g), ids), dim=2)                # (B, U, 2)
    is_kept = torch.stack((pick_bytes(ids, keep, k, g), keep), dim=2)
    return inserted.flatten(1), is_kept.flatten(1)


def rotate_noise(ids, keep, k, g, hp):  # rotates the text by 1 .. length - 1 positions
    U = ids.size(1)
    length = keep.sum(1, keepdim=True)
    shift = 1 + (torch.rand(len(ids), 1, generator=g, device=g.device) * (length - 1)).long()
    i = torch.arange(U, device=g.device)
    rotated = ((i + shift) % length.clamp(min=1)).where(i < length, i)
    return pack_left(ids, keep, U).gather(1, rotated), i < length


NOISES = {"permute": permute_noise, "infill": infill_noise, "mask": mask_noise, "delete": delete_noise,
          "replace": replace_noise, "insert": insert_noise, "rotate": rotate_noise}
NOISES_WITH_RATE = ("infill", "mask", "delete", "replace", "insert")       # these share bart_rate


def pick_bytes(ids, keep, k, g):  # -> (B, U) bool: k random bytes of each row, except those that became a MASK before
    free = keep & (ids < N_BYTES)
    return free & (ranks(torch.rand(ids.shape, generator=g, device=g.device).masked_fill(~free, 2)) < k)


def ranks(key):  # (..., n) -> (..., n) long: how many keys of the row are smaller; .5 .9 .1 becomes 1 2 0
    return key.argsort().argsort()              # the second argsort inverts the first


def infill_lengths(k, K, mean, g):  # k (B, 1) -> lengths of K spans (B, K), which of them to use (B, K) bool
    """Uses spans of Poisson lengths until k bytes are covered; the last is cut to fit. Drops empty spans beyond k -
    (number of non-empty ones): each span adds one MASK, and there may be at most k. With k = 3, the draws 2 0 4 1 give
    the lengths 2 0 1 0, and the first three spans are used."""
    j = torch.arange(64, device=g.device)
    cdf = (j * math.log(mean) - mean - torch.lgamma(j + 1.0)).exp().cumsum(0)
    drawn = torch.searchsorted(cdf, torch.rand(len(k), K, generator=g, device=g.device), right=True).clamp(max=63)
    left = (k - (drawn.cumsum(1) - drawn)).clamp(min=0)         # bytes that the spans before it do not cover
    length = drawn.minimum(left)
    is_full = length > 0
    is_empty = (left > 0) & ~is_full
    n_empty = k - is_full.sum(1, keepdim=True)                  # maximum number of empty spans
    return length, is_full | is_empty & (is_empty.cumsum(1) <= n_empty)


def place_infills(keep, length, use, g):  # (B, L), (B, K), (B, K) -> stays (B, L), start, used (B, K)
    """Places the spans to use, each in a random gap between the bytes that stay. start and used are in text order.

        text     a b c d e f g      lengths 2 0 1 in gaps 1 1 4 (a gap's number is the number of kept bytes before it)
        stays    1 0 0 1 1 1 0      start 1 3 6; the row becomes a [M] [M] d e f [M]
    """
    B, L = keep.shape
    n_stay = keep.sum(1, keepdim=True) - length.sum(1, keepdim=True)
    drawn = (torch.rand(use.shape, generator=g, device=g.device) * (n_stay + 1)).long()
    gap, order = torch.where(use, drawn, L).sort(dim=1)         # unused spans are last, in gap L
    used = gap < L
    size = length.gather(1, order)
    start = (gap + size.cumsum(1) - size).clamp(max=L)          # = kept bytes before it + span bytes before it
    end = (start + size).clamp(max=L)
    edge = torch.zeros(B, L + 1, dtype=torch.long, device=g.device)
    edge = edge.scatter_add(1, start, used.long()).scatter_add(1, end, -used.long())
    return (edge[:, :L].cumsum(1) == 0) & keep, start, used


def bart_counts(length, hp, g):  # bytes of each row (B, 1) -> how many of them each of NOISES_WITH_RATE changes (B, 1)
    n_rated = max(1, len(set(NOISES_WITH_RATE) & set(hp.bart_noise.split(","))))
    most = (length * (hp.bart_rate / n_rated) + 0.5).long().clamp(min=1)
    least = (length * (hp.bart_rate_min / n_rated) + 0.5).long().clamp(min=1).minimum(most)
    return least + (torch.rand(length.shape, generator=g, device=g.device) * (most - least + 1)).long()


def bart_bytes(T, hp):
    noises = hp.bart_noise.split(",")
    if not set(noises) <= set(NOISES) or len(set(noises)) < len(noises):
        fail(f"--bart_noise {hp.bart_noise}: unknown or repeated name. Try some of {','.join(NOISES)}")
    growth = hp.bart_rate if "insert" in noises else 0.0        # insert changes at least one byte: rounded up
    return int((T - 1 - (growth > 0)) / (2 + growth))


def bart_piece_bytes(hp):  # -> maximum number of bytes to repair at once, or None
    """After a mistake the model loses its place in the source; it finds it again at the start of the next piece. Noises
    that move text can only be undone in the whole text."""
    return None if {"permute", "rotate"} & set(hp.bart_noise.split(",")) else 32


OBJECTIVES["bart"] = Objective(
    "bart", corrupt=bart, help="a whole text from a noisy one", use_help="repair a text", attention="prefix",
    n_bytes=bart_bytes,
    flags={"bart_noise": Flag("infill,replace", "any of " + ",".join(NOISES)),
           "bart_rate": Flag(0.3, f"maximum share of bytes that {', '.join(NOISES_WITH_RATE)} change", 0.001, 0.9),
           "bart_rate_min": Flag(0.0, "minimum share; from bart_rate on, the share is constant", 0.0, 0.9),
           "poisson_lambda": Flag(3.0, "mean length of an infilled span, before the last is truncated", 2.0, 20.0)},
    # short rows are learned sooner; n-grams lower the loss, but with them the model loses its place sooner
    flag_defaults=(SHARP_ATTENTION | NARROW_HEADS
                   | {"block_size": 128, "batch_size": {"cpu": 32, "cuda": 256}, "ngram_rows": 0}),
    positions=bart_positions, target_hidden=False, uses=(Repair(max_bytes=bart_piece_bytes),))


# ---- nsp: next sentence prediction
NSP_GAP = 8                                         # bytes skipped between A and B, so that they do not share a word


def nsp(x, g, hp):  # x (B, 2 h + NSP_GAP) -> inp, tgt (B, T), labels (B,)
    """Next sentence prediction: does B follow A? Trained with masked language modeling (BERT, Devlin et al. 2019).

        inp     CLS A A [M] A SEP B B B [M] SEP      attention: bidirectional
        label   1 if B follows A, else 0             predicted at CLS

    A and B have h bytes each and are NSP_GAP bytes apart in both classes, so that neither their length nor a split word
    reveals the answer. Half of the rows are negative: "random" takes the B of another row, "swap" exchanges A and B
    (sentence order prediction, ALBERT, Lan et al. 2020). Departures: BERT takes B from another document, here the other
    row may be from the same one. Pieces have a fixed length, with NSP_GAP between them. SEP replaces segment
    embeddings. 15% of the text is masked; BERT also counts CLS and SEP. No pooler (BERT's dense layer and tanh)."""
    B, T = x.size(0), hp.block_size
    h = (x.size(1) - NSP_GAP) // 2
    first = x[:, :h]
    second = x[:, h + NSP_GAP:]
    negative = torch.rand(B, generator=g, device=g.device).argsort() < B // 2       # (B,)
    if hp.nsp_negatives == "swap":
        exchanged = torch.stack((second, first))
        first, second = torch.where(negative[:, None], exchanged, torch.stack((first, second)))
    else:
        shift = torch.randint(1, max(2, B), (1,), generator=g, device=g.device)
        other = second.index_select(0, (torch.arange(B, device=g.device) + shift) % B)
        second = torch.where(negative[:, None], other, second)
    sep = constant_column(x, SEP)
    row = torch.cat((constant_column(x, CLS), first, sep, second, sep), dim=1)
    row = F.pad(row, (0, T - row.size(1)), value=PAD)                               # one PAD if T is even
    masked = random_positions(B, 2 * h, max(1, round(hp.mask_rate * 2 * h)), g)
    inp, tgt = mask_bytes(row, 1 + masked + (masked >= h), g)                       # skip CLS and, in B, SEP
    return dict(inp=inp, tgt=tgt, labels=(~negative).long(), prefix=T)


def nsp_loss(model, batch, hp):
    h = hidden_states(model, batch)                                                 # (B, T, C)
    follows = model.heads["nsp"](h[:, 0])                                           # (B,) log-odds
    nll = target_nll(model, h, batch)
    nats = F.binary_cross_entropy_with_logits(follows, batch["labels"].float(), reduction="none")   # (B,)
    nsp_nats = nats @ batch["share"]
    correct = (follows > 0) == (batch["labels"] == 1)
    figures = dict(nll=nll, nsp=nsp_nats, accuracy=correct.float() @ batch["share"])
    return nll + hp.nsp_weight * nsp_nats, figures


def predict_follows(model, first, second, hp):  # two lists of ids -> 0-D log-odds that the second follows the first
    h = (hp.block_size - 3) // 2                # bytes of a piece
    if len(second) > h:                         # it will be truncated, so skip a gap, as in training
        second = second[NSP_GAP:]
    row = torch.tensor([[CLS, *first[-h:], SEP, *second[:h], SEP]], device=model.embed.weight.device)
    return model.heads["nsp"](model(row, row.size(1))[:, 0])[0]


OBJECTIVES["nsp"] = Objective(
    "nsp", corrupt=nsp, help="whether B follows A, and masked bytes", use_help="compare two texts",
    attention="bidirectional", n_bytes=lambda T, hp: 2 * ((T - 3) // 2) + NSP_GAP, min_rows=2,
    heads=lambda config, hp: {"nsp": ScalarHead(config)}, loss=nsp_loss,
    flags=MASK_RATE | {"nsp_negatives": Flag("random", "random (another row's B) or swap (A after B)",
                                             choices=("random", "swap")),
                       "nsp_weight": Flag(1.0, "weight of the next-sentence loss; 0: only masked bytes", 0.0)},
    flag_defaults=SHARP_ATTENTION | NARROW_HEADS | {"mask_rate": 0.15},
    uses=(Predict("follow", predict_follows), Fill((CLS,), (SEP,))))


# ---- contrastive: InfoNCE over crops
def contrastive(x, g, hp):  # x (B, T) -> inp (B, 2, Lc)
    """Contrastive learning: finds the other crop of the same window in a batch (Contriever, Izacard et al. 2022).

        window   t h e   c a t   s a t   o n       two crops of Lc = crop * T bytes each, from anywhere in the window
        inp      [h e   c a t] [a t   s a t]       attention: bidirectional

    The loss is InfoNCE (van den Oord et al. 2018) in both directions. A crop's embedding is the mean of its states,
    normalized; similarities are divided by tau. The negatives are the other rows of the micro-batch, so the loss
    depends on its size; unlike elsewhere, more accum or processes are not a larger batch. Validation compares 32 rows.
    Departures: both directions, embeddings of length 1, crops of one length (theirs are .05 to .5 of a window), no ids
    around a crop, no deleted bytes, no queue of older negatives."""
    B, T = x.shape
    Lc = max(1, round(hp.crop * T))
    start = torch.randint(0, T - Lc + 1, (B, 2, 1), generator=g, device=g.device)
    i = start + torch.arange(Lc, device=g.device)                                   # (B, 2, Lc)
    return dict(inp=x.gather(1, i.flatten(1)).view(B, 2, Lc), prefix=Lc)


def embed(model, x):  # (N, Lc) -> (N, C) float32 of length 1: the mean of the states
    return F.normalize(model(x, x.size(1)).float().mean(1), dim=-1)


def contrastive_loss(model, batch, hp):
    embeddings = embed(model, batch["inp"].flatten(0, 1))                           # (2 B, C)
    a, b = embeddings.unflatten(0, (-1, 2)).unbind(1)
    sim = a @ b.T / hp.tau                                                          # (B, B)
    same = torch.arange(len(sim), device=sim.device)
    nats = (position_nats(sim, same) + position_nats(sim.T, same)) / 2              # (B,)
    correct = sim.argmax(1) == same
    return nats @ batch["share"], {"top1": correct.float() @ batch["share"]}


OBJECTIVES["contrastive"] = Objective(
    "contrastive", corrupt=contrastive, help="which crops share a window", use_help="embed and search",
    attention="bidirectional", n_bytes=aligned_window, min_rows=2, loss=contrastive_loss,
    flags={"tau": Flag(0.05, "temperature of the similarities", 1e-4, 1e4),
           "crop": Flag(0.25, "length of a crop, as a share of the block", 0.01, 0.9)},
    flag_defaults=NARROW_HEADS | {"batch_size": 32},            # the other rows are the negatives
    compares_rows=True, uses=(Predict("search", embed),))


# ---- mdlm: masked diffusion
def mdlm(x, g, hp):  # x (B, L) -> inp, tgt, weight (B, L)
    """Masked diffusion: predicts bytes when any share is masked (MDLM, Sahoo et al. 2024; LLaDA, Nie et al. 2025).

        inp   t [M] [M]   c [M] t    attention: bidirectional; l of L bytes are masked
        tgt   .  h   e  . .  a  .    loss at the masked bytes, with weight L / l, divided by B * L

    The loss is an upper bound on -log p(x). MDLM integrates (1/t) E[sum of nats at bytes masked with probability t]
    over t in (0, 1). This equals the mean over l = 1..L of (L/l) E[sum of nats at l masked bytes]. Masking exactly l
    bytes has a far smaller variance, weights of at most L and no row without a target. l is stratified over the batch.
    Only bytes are predicted, never MASK or another id (MDLM's SUBS). Departure: before progress reaches uniform_from,
    the rate is mask_rate; after it, uniform. High rates teach little early. The early losses are no bound."""
    masked, weight = mask_blocks(x, x.size(1), g, hp)
    return dict(inp=x.masked_fill(masked, MASK), tgt=x.where(masked, IGNORE_INDEX), weight=weight / x.numel(),
                prefix=x.size(1))


def mask_blocks(x, n, g, hp):  # x (B, L) -> masked (B, L) bool, weight (B, L)
    """Masks l of the n bytes of each block and gives its bytes the weight n / l. Before progress reaches uniform_from,
    the rate l / n is mask_rate; after it, uniform and stratified over the rows. One row with L = 6 and n = 4:

        count     3              1      l of each block; the last block is shorter
        rank      2  0  3  1     1  0   of random keys; the bytes with a rank below the count are masked
        masked    x  x  .  x     .  x
        weight   4/3 for all     2 for both
    """
    B, L = x.shape
    n = min(n, L)
    size = (L - torch.arange(0, L, n, device=g.device)).clamp(max=n)                # (blocks,)
    # stratified: for each block, the rows have one number each in [0, 1/B), [1/B, 2/B), ..., in random order
    order = torch.rand(B, len(size), generator=g, device=g.device).argsort(dim=0)
    u = (order + torch.rand(B, len(size), generator=g, device=g.device)) / B
    uniform_count = 1 + (u * size).long().minimum(size - 1)                         # (B, blocks)
    early_count = (size * hp.mask_rate + 0.5).long().clamp(min=1)                   # (blocks,)
    is_early = hp.progress < hp.uniform_from    # a bool, or a 0-D tensor in training, so `if` would wait for the device
    count = uniform_count + is_early * (early_count - uniform_count)
    key = F.pad(torch.rand(B, L, generator=g, device=g.device), (0, len(size) * n - L), value=2.0)
    # padding has the largest key and ranks last, so it is never masked
    masked = ranks(key.view(B, len(size), n)) < count[..., None]                    # (B, blocks, n)
    weight = (size / count).repeat_interleave(n, dim=1)
    return masked.flatten(1)[:, :L], weight[:, :L]


def bound_loss(cost):  # -> an Objective.loss that sums cost(logits, tgt), nats (B, T), times the batch's weights
    def loss(model, batch, hp):
        logits = model.logits(hidden_states(model, batch))[..., :N_BYTES]
        return (cost(logits, batch["tgt"]) * batch["weight"]).sum(), {}
    return loss


OBJECTIVES["mdlm"] = Objective(
    "mdlm", corrupt=mdlm, help="masked bytes at any rate", use_help="write in any order", attention="bidirectional",
    n_bytes=aligned_window, loss=bound_loss(position_nats), supports_doc_mask=True, bpb="bound",
    flags=MASK_RATE | {"uniform_from": Flag(0.7, "before this share of the steps, the rate is mask_rate; after it, or "
                                                 "from the start with --init_from, uniform", 0.0, 1.0)},
    flag_defaults=SHARP_ATTENTION | {"mask_rate": 0.4},
    uses=(Fill(orders=("ancestral", "confident", "left"), trained_at_any_rate=True),))


# ---- sedd: score entropy discrete diffusion
def sedd_cost(logits, tgt):  # (B, T, 256), (B, T) -> nats (B, T)
    """Score entropy discrete diffusion (SEDD, Lou et al. 2024), absorbing state, without time (RADD, Ou et al. 2025).

        inp   t [M] [M]   c [M] t    attention: bidirectional; the rows are mdlm's
        tgt   .  h   e  . .  a  .    loss at the masked bytes

    The logits model log c_y + log 256, where c_y is the ratio p(y) / p(MASK) without its time factor (1 - t) / t. The
    log 256 puts an untrained model at chance: its logits are 0, so c_y = 1 / 256. A masked byte x costs
    (sum_y c_y - log c_x - 1) * L / l; in mdlm, -log softmax_x * L / l. The cost is lowest if c is the distribution of
    the byte, and bounds -log p(x) as mdlm's does. No softmax normalizes c: the model must learn to. Departures: the
    model does not read the time, which the absorbing state allows; RADD's network ends in log_softmax, which makes its
    loss mdlm's. sample.py's default order is MDLM's sampler; "analytic" is SEDD's."""
    has_target = tgt != IGNORE_INDEX
    logc = logits - math.log(N_BYTES)
    logc = logc.masked_fill(~has_target[..., None], 0.0)        # so that positions without a target stay finite
    cost = logc.exp().sum(-1) - logc.gather(-1, tgt.clamp(min=0)[..., None])[..., 0] - 1
    return cost * has_target


OBJECTIVES["sedd"] = dataclasses.replace(
    OBJECTIVES["mdlm"], name="sedd", help="ratios of masked bytes at any rate", loss=bound_loss(sedd_cost),
    uses=(Fill(orders=("ancestral", "analytic", "left"), trained_at_any_rate=True),))


# ---- bd3lm: block diffusion
def bd3lm(x, g, hp):  # x (B, L) -> inp, tgt, weight, positions (B, 2 L), mask (B, 2 L, 2 L), before (B, 2 L, W - 1)
    """Block diffusion: writes blocks from left to right, each by masked diffusion (BD3-LM, Arriola et al. 2025).

        inp   t [M]  [M] c | t  h  e  c     a noisy copy, then the clean one; blocks of bd3lm_block bytes, here 2
        tgt   .  h    e  . | .  .  .  .     loss at the l masked bytes of a block, with weight n / l, divided by B * L

    A block attends to all of itself and to the clean blocks before it. The mask for L = 4, queries in rows:

        noisy 0   x x . . | . . . .     clean 0   . . . . | x x . .     keys: noisy 0 1 2 3 | clean 0 1 2 3
              1   x x . . | . . . .           1   . . . . | x x . .
              2   . . x x | x x . .           2   . . . . | x x x x
              3   . . x x | x x . .           3   . . . . | x x x x

    Both copies count positions from 0. The loss is an upper bound on -log p(x): with one block it is mdlm's, with
    blocks of one byte exactly -log p(x), as clm's. Before a noisy block, convolution and n-grams read clean bytes, as
    from the cache in sampling. uniform_from is 0 here, so l is uniform throughout. sample.py fills a block from the
    left, one byte a pass. The authors first train with one block, and draw masking rates from a part of (0, 1)."""
    L = x.size(1)
    n = hp.bd3lm_block
    masked, weight = mask_blocks(x, n, g, hp)
    noisy = x.masked_fill(masked, MASK)
    tgt = x.where(masked, IGNORE_INDEX)
    i = torch.arange(L, device=g.device)
    block = i // n
    own = block == block[:, None]                                                   # (L, L)
    earlier = block < block[:, None]
    noisy_rows = torch.cat((own, earlier), dim=1)                                   # (L, 2 L)
    clean_rows = F.pad(own | earlier, (L, 0))
    mask = torch.cat((noisy_rows, clean_rows))                                      # (2 L, 2 L)
    in_block = torch.arange(1, CONTEXT_WIDTH, device=g.device) <= (i % n)[:, None]  # (L, W - 1): in the same block?
    before = ids_before(noisy).where(in_block, ids_before(x))
    return dict(inp=torch.cat((noisy, x), dim=1), tgt=F.pad(tgt, (0, L), value=IGNORE_INDEX), prefix=0,
                weight=F.pad(weight / x.numel(), (0, L)), mask=mask.expand(len(x), -1, -1),
                before=torch.cat((before, ids_before(x)), dim=1), positions=i.repeat(2).expand(len(x), -1))


# twice the positions, for as many clean bytes as in other objectives; small blocks gain nothing from a constant rate
BD3LM_DEFAULTS = {"block_size": {"cpu": 512, "cuda": 2048}, "batch_size": {"cpu": 16, "cuda": 64}, "uniform_from": 0.0}
OBJECTIVES["bd3lm"] = dataclasses.replace(
    OBJECTIVES["mdlm"], name="bd3lm", corrupt=bd3lm, help="blocks from left to right, each by diffusion",
    use_help="continue a prompt", attention="blocks", n_bytes=lambda T, hp: T // 2, supports_doc_mask=False,
    flags=OBJECTIVES["mdlm"].flags | {"bd3lm_block": Flag(4, "number of bytes in a block", 1)},
    flag_defaults=OBJECTIVES["mdlm"].flag_defaults | BD3LM_DEFAULTS,
    uses=(ContinueBlocks(lambda hp: hp.bd3lm_block),))


# ---- rotation: find the seam
def rotation(x, g, hp):  # x (B, T) -> inp (B, T), labels (B,)
    """Rotation: finds where the first byte of a rotated window is.

        window   t h e   c a t          attention: bidirectional
        inp      c a t t h e            label 3: the position of the window's first byte

    BART (Lewis et al. 2020) reconstructs rotated documents. Here the model only points to one of the T positions. The
    rotation is uniform over 0..T - 1."""
    B, T = x.shape
    shift = torch.randint(0, T, (B, 1), generator=g, device=g.device)
    rotated = (torch.arange(T, device=g.device) + shift) % T                        # (B, T)
    return dict(inp=x.gather(1, rotated), labels=((T - shift) % T)[:, 0], prefix=T)


def rotation_loss(model, batch, hp):
    scores = score_positions(model, batch["inp"], "seam")
    correct = scores.argmax(1) == batch["labels"]
    return position_nats(scores, batch["labels"]) @ batch["share"], {"accuracy": correct.float() @ batch["share"]}


OBJECTIVES["rotation"] = Objective(
    "rotation", corrupt=rotation, help="where a rotated text was cut", use_help="find where a text was cut",
    attention="bidirectional", n_bytes=aligned_window, heads=lambda config, hp: {"seam": ScalarHead(config)},
    loss=rotation_loss,
    flag_defaults={"block_size": 64, "batch_size": {"cpu": 64, "cuda": 512}},       # 16 rows of 256 do not learn
    uses=(Predict("seam", lambda model, x: score_positions(model, x, "seam")),))


# ---- hybrid: masked and causal rows
def hybrid(x, g, hp):  # x (B, T + 1) -> inp, tgt (B, T), prefix (B,)
    """Masked and causal rows in one batch, with one head (GPT-BERT, Charpentier and Samuel 2024).

        inp   t [M] e   c    tgt   h . . . .      masked row: bidirectional; position i - 1 predicts the masked byte i
        inp   t  h  e   c    tgt   h e   c a      causal row

    A share hybrid_ratio of the rows is masked: at least one row, never all. The mean losses of the two kinds have the
    weights hybrid_ratio and 1 - hybrid_ratio. The first byte is never masked, since no position predicts it; under
    --doc_mask, the first byte of a document is predicted without reading that document (by the EOT before it).
    Departures: a quarter of the rows is masked, the authors mask 15 of 16. Single bytes are masked, not short spans, at
    a constant rate (theirs falls from .3 to .15), and rarely masked bytes are not masked more often. No z-loss."""
    B, T = x.size(0), x.size(1) - 1
    n_masked = min(max(1, int(B * hp.hybrid_ratio + 1e-6)), B - 1)
    # spread the masked rows evenly: with n_masked 2 and B 6, rows 2 and 5
    is_masked = (torch.arange(B + 1, device=g.device) * n_masked // B).diff() > 0   # (B,)
    k = min(T - 1, max(1, round(hp.mask_rate * T)))
    positions = 1 + random_positions(B, T - 1, k, g)
    noisy, tgt = mask_bytes(x[:, :T], positions, g)
    tgt = F.pad(tgt[:, 1:], (0, 1), value=IGNORE_INDEX)                             # shifted, as in clm
    inp = noisy.where(is_masked[:, None], x[:, :-1])
    tgt = tgt.where(is_masked[:, None], x[:, 1:])
    # the targets of one kind have equal weights, which add up to the share of that kind
    n_targets = torch.where(is_masked, n_masked * k, (B - n_masked) * T)
    weight = torch.where(is_masked, hp.hybrid_ratio, 1 - hp.hybrid_ratio) / n_targets               # (B,)
    return dict(inp=inp, tgt=tgt, prefix=torch.where(is_masked, T, 0), weight=weight[:, None].expand(B, T))


OBJECTIVES["hybrid"] = Objective(
    "hybrid", corrupt=hybrid, help="masked rows and causal rows", use_help="continue, fill [MASK]", attention="both",
    min_rows=2, loss=lambda model, batch, hp: (token_loss(model, batch, hp)[0], {}),        # without a perplexity
    flags=MASK_RATE | {"hybrid_ratio": Flag(0.25, "share of masked rows: at least one row, never all", 0.0, 1.0)},
    supports_doc_mask=True, bpb="causal", uses=(Fill((EOT,), shift=1), Continue()))


# ---- --objective: one objective, or a mixture of several. Both become a list of members
@dataclass(frozen=True)
class Member:
    objective: Objective
    weight: float                               # share of the steps that train it; the weights add up to 1
    n: int                                      # raw bytes that fill a row
    hp: Namespace                               # the run's settings, with the defaults of this member's flags


def get_members(hp):  # hp.objective, such as "clm" or "clm:0.5,mlm:0.5" -> [Member]
    """Fails if a name is unknown, suggesting the closest one, and if the settings allow no row."""
    names = member_names(hp.objective)
    for name in names:
        if name not in OBJECTIVES:
            close = difflib.get_close_matches(name, OBJECTIVES, 1) or ["one of " + " ".join(OBJECTIVES)]
            fail(f"--objective {name}: unknown. Try {close[0]}")
    try:
        weights = [float(part.partition(":")[2]) if ":" in part else 1.0 for part in hp.objective.split(",")]
    except ValueError:
        weights = [0.0]
    if not all(1e-9 < w < 1e9 for w in weights) or len(set(names)) < len(names):
        fail(f"--objective {hp.objective}: needs different names with positive weights, as in clm:0.5,mlm:0.5")
    members = []
    for name, weight in zip(names, weights):
        objective = OBJECTIVES[name]
        member_hp = Namespace(**vars(hp) | hp.member_defaults.get(name, {}))
        rows = hp.batch_size if objective.compares_rows else hp.batch_size * hp.accum
        if rows < objective.min_rows:
            fail(f"--batch_size {hp.batch_size}: {name} needs {objective.min_rows} rows. "
                 f"Try --batch_size {objective.min_rows}")
        n = objective.n_bytes(hp.block_size, member_hp)         # fails if the settings allow no row
        members.append(Member(objective, weight / sum(weights), n, member_hp))
    return members


def member_names(objective):  # hp.objective, such as "clm:0.5,mlm:0.5" -> ["clm", "mlm"]
    return [part.partition(":")[0].strip() for part in objective.split(",")]
