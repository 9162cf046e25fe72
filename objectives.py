"""Every pre-training objective: how clean windows become a batch, and how a batch becomes a loss.

B rows, T positions of a row, n raw bytes that fill one, P positions of the prefix, C width, V outputs of the byte
head, U ids in a row before packing, W ids of context; k chosen positions, S spans, N noise bytes, L bytes of a text

An objective is a few functions and, below them, one Objective, whose fields are described where they are declared.
hp holds every setting, as run.get_config returns them, and hp.progress, the share of the run that is done: 0-D in
training, 1.0 elsewhere.

A batch is a dict. "inp" (B, T) are ids; "tgt" (B, T), where ids are predicted, ids or IGNORE_INDEX, which has no loss;
"prefix" an int for all rows (0 causal, T bidirectional) or one for each row (B,). An objective may add keys: more
targets, under names that end in tgt; "positions" (B, T); a "mask" (B, T, T) and "before" (B, T, W - 1), as bd3lm and
document_mask return; and its own.
Every tensor has B rows. `corrupt` draws from its generator g alone and has static shapes: no loop over rows, nothing
read back from the device. Where papers draw each position by itself, the counts here are exact (k masked bytes, S spans
of N bytes in a full row), so that no row is without a target.

A loss is a weighted sum of nats. The weights are part of the batch: "weight" (B, T) for each target, "share" (B,) for
each row. add_weights makes those that `corrupt` does not return, for all rows of a step, so the losses of its micro-
batches add up to the loss of the whole batch. A mean of micro-batch means would give targets unequal weights.
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

IGNORE_INDEX = -100                             # in a target: no loss at this position
N_BYTES = 256
EVAL_ROWS = 32                                  # rows of a validation batch, whatever the batch size


# ---- what a model is used for: each mode of sample.py asks for one of these
@dataclass(frozen=True)
class Continue:
    """Continues a prompt."""
    mode = "continue"
    both_ways: bool = False                     # is the prompt read both ways?
    before: tuple = ()                          # ids before the prompt
    after: tuple = ()                           # ids after it
    drafter: Callable | None = None             # (hp) -> None, or a function that sample.generate_drafted drafts with:
    # (model, states (m, C)) -> logits (m, k, V) of the k bytes after the next


@dataclass(frozen=True)
class ContinueBlocks:
    """Continues a prompt block by block, each by filling MASKs after the clean blocks before it."""
    mode = "continue_blocks"
    length: Callable                            # (hp) -> bytes of a block
    orders: tuple = ("left", "ancestral", "confident")          # of sample.unmask; the first is the default


@dataclass(frozen=True)
class Fill:
    """Fills MASKs in a text, which it reads both ways: some rows of its training must have prefix T."""
    mode = "fill"
    before: tuple = ()                          # ids before the text
    after: tuple = ()                           # ids after it
    shift: int = 0                              # a byte is predicted so many positions earlier: 1 as by clm, 0 in place
    orders: tuple = ("confident", "left")       # of sample.unmask; the first is the default
    trained_at_any_rate: bool = False           # at every share of MASKs, so that it can write a whole text


@dataclass(frozen=True)
class Infill:
    """Writes what belongs in holes of unknown length, in bytes but EOT. prompt(pieces, m, hp) -> (ids up to the first
    answer, length of their prefix); pieces: the texts around the holes, m: bytes expected in a hole."""
    mode = "infill"
    prompt: Callable
    stop_ids: tuple                             # each ends an answer and starts the next: so many holes at most


@dataclass(frozen=True)
class Repair:
    """Writes the clean text of a noisy one, in rows of seq2seq."""
    mode = "repair"
    max_bytes: Callable | None = None           # (hp) -> bytes that are repaired at once; None: as many as fit a row


@dataclass(frozen=True)
class Predict:
    """Answers the question of one mode:

        mark     (model, x (B, T)) -> log-odds (B, T) that a byte is wrong
        follow   (model, first ids, second ids, hp) -> log-odds (0-D) that the second text follows the first
        search   (model, x (B, n)) -> embeddings (B, C) of length 1, alike for similar texts
        seam     (model, x (B, T)) -> scores (B, T) of the positions: where did a rotated text begin?
    """
    mode: str
    predict: Callable


def find_use(objective, mode):  # -> the objective's use of that mode, or None
    return next((use for use in objective.uses if use.mode == mode), None)


# ---- an objective
def aligned_window(T, hp):  # n_bytes of objectives that predict bytes in place
    return T


def token_loss(model, batch, hp):  # cross-entropy of the byte head at every position with a target, in nats
    nll = target_nll(model, hidden_states(model, batch), batch)
    return nll, {"nll": nll}


@dataclass(frozen=True)
class Objective:
    name: str
    corrupt: Callable                           # (x (B, n), g, hp) -> batch
    help: str                                   # for --help: what is predicted from what
    use_help: str                               # and what the model is used for
    attention: str                              # in words; probes read all but "causal" ones with prefix T

    # training
    # (T, hp) -> n, the raw bytes that fill a row of T positions; fails on settings that allow no row
    n_bytes: Callable = lambda T, hp: T + 1     # of objectives that predict the next byte
    min_rows: int = 1                           # of a step, or of a micro-batch where compares_rows
    heads: Callable = lambda config, hp: {}     # (config, hp) -> {name: module} beyond the byte head, in model.heads
    # (model, batch, hp) -> loss, {name: figure to print beside it}; of "nll" the perplexity is printed, too
    loss: Callable = token_loss
    n_outputs: int = N_BYTES                    # the byte head predicts ids below this one
    flags: dict = dataclasses.field(default_factory=dict)               # {name: Flag} of its own
    flag_defaults: dict = dataclasses.field(default_factory=dict)       # defaults of shared flags, perhaps by device
    supports_doc_mask: bool = False             # keeps the text's order, so that --doc_mask makes sense
    positions: Callable | None = None           # (ids, P (B,), hp) -> (B, T), from these alone; None: 0, 1, 2, ...

    # evaluation
    # bits per byte: "loss" (its loss / ln 2, for clm's rows), "causal" (its loss on clm's rows, as fim's), "bound" (its
    # loss / ln 2 is an upper bound, as mdlm's), None where it defines none
    bpb: str | None = None
    compares_rows: bool = False                 # the loss of a row depends on the other rows of its micro-batch
    target_hidden: bool = True                  # no input holds the target of a position, but for what BERT leaves

    # use: the first is sample.py's mode
    uses: tuple = ()


OBJECTIVES = {}                                 # name: Objective, in the order of this file


# ---- clm: causal language modeling
def clm(x, g, hp):  # x (B, T + 1) -> inp, tgt (B, T)
    """Causal language modeling: each byte from those before it (Radford et al. 2018).

        inp   t h e   c a      attention: causal
        tgt   h e   c a t      loss at all T positions
    """
    return dict(inp=x[:, :-1], tgt=x[:, 1:], prefix=0)


def hidden_states(model, batch):  # -> (B, T, C): under the batch's prefix (or mask) and positions
    return model(batch["inp"], batch["prefix"], positions=batch.get("positions"), mask=batch.get("mask"),
                 before=batch.get("before"))


def add_weights(batch):  # a batch of all rows of a step -> the same batch with weights
    """Adds "share" (B,), which is 1 / B, and for each key that ends in "tgt" the weights of these targets: "weight" for
    "tgt", "future_weight" for "future_tgt". All targets of a head have the same weight, and the weights of a head add
    up to 1. Weights that the batch has already are kept."""
    B = len(batch["inp"])
    weights = {"share": torch.full((B,), 1 / B, device=batch["inp"].device)}
    for key, tgt in batch.items():
        if key.endswith("tgt"):
            has_target = tgt != IGNORE_INDEX
            rows_and_positions = tuple(range(min(2, tgt.dim())))
            n_targets = has_target.sum(rows_and_positions).clamp(min=1)
            weights[key.replace("tgt", "weight")] = has_target / n_targets
    return weights | batch


def document_mask(batch):  # -> "mask" and "before" that keep attention, convolution and n-grams inside a document
    """Documents end with EOT. They are those of the corrupted ids: a masked EOT does not end one."""
    assert "mask" not in batch, "an objective with masks of its own has supports_doc_mask=False"
    inp = batch["inp"]
    doc = document_ids(inp)                                                         # (B, T)
    allowed = dense_mask(batch["prefix"], torch.arange(doc.size(1), device=doc.device), doc.size(1))
    same_document = doc[:, :, None] == doc[:, None, :]
    before = ids_before(inp) * (ids_before(doc) == doc[:, :, None])                 # EOT in place of others
    return {"mask": allowed & same_document, "before": before}


def ids_before(ids):  # (B, T) -> (B, T, W - 1): the ids before each position, the nearest first; EOT before the row
    return F.pad(ids, (CONTEXT_WIDTH - 1, 0))[:, :-1].unfold(1, CONTEXT_WIDTH - 1, 1).flip(2)


def target_nll(model, h, batch):  # states (B, T, C) -> weighted sum of the byte head's nats (0-D)
    return (position_nats(model.logits(h), batch["tgt"]) * batch["weight"]).sum()


def position_nats(logits, tgt):  # logits (..., V), tgt (...) -> cross-entropy (...), 0 where there is no target
    nats = F.cross_entropy(logits.flatten(0, -2), tgt.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    return nats.view(tgt.shape)


OBJECTIVES["clm"] = Objective(
    "clm", corrupt=clm, help="each byte from those before it", use_help="continue a prompt", attention="causal",
    supports_doc_mask=True, bpb="loss", uses=(Continue(),))
CAUSAL = OBJECTIVES["clm"]                      # others measure their bits per byte on its rows


# ---- mlm: masked language modeling
def mlm(x, g, hp):  # x (B, T) -> inp, tgt (B, T)
    """Masked language modeling: masked bytes from the unmasked ones (BERT, Devlin et al. 2019).

        inp   t [M] e   c a q    attention: bidirectional
        tgt   .  h  . . .  . t   loss at the chosen positions: 80% MASK, 10% a random byte, 10% left as they are
                                 (mask_token, mask_random, the rest)

    Exactly round(mask_rate * T) positions of each row, as in BERT's own code, drawn anew for every batch, as in RoBERTa
    (Liu et al. 2019). With mask_span above 1 they lie in spans of this mean length, none touching another, each masked,
    replaced or left as a whole (SpanBERT, Joshi et al. 2020). Departures: bytes in place of word pieces; 30% of them,
    since BERT's 15% teach less per row (Wettig et al. 2023); a random byte is never a special id; no dense layer before
    the head; spans are of bytes, of any length (SpanBERT: words, 10 at most), all placements equally likely."""
    B, T = x.shape
    k = max(1, round(hp.mask_rate * T))
    span = None
    if hp.mask_span > 1:
        first, is_masked = place_spans(B, T, k, min(max(1, round(k / hp.mask_span)), T - k + 1), g)
        positions = is_masked.byte().argsort(dim=1, descending=True, stable=True)[:, :k]
        span = (first.cumsum(1) - 1).gather(1, positions)                           # (B, k): number of each one's span
    else:
        positions = random_positions(B, T, k, g)
    inp, tgt = mask_bytes(x, positions, g, hp.mask_token, hp.mask_random, span)
    return dict(inp=inp, tgt=tgt, prefix=T)


def random_positions(B, T, k, g):  # -> (B, k) long: k distinct positions of each row, all subsets equally likely
    return torch.rand(B, T, generator=g, device=g.device).topk(k, dim=1).indices


def random_bytes(shape, g):  # -> long in 1..255: never the end of a document, never a special id
    return torch.randint(1, N_BYTES, shape, generator=g, device=g.device)


def mask_bytes(x, positions, g, masked=0.8, random=0.1, span=None):
    """x (B, T), positions (B, k) -> noisy (B, T), targets (B, T) with IGNORE_INDEX. Of the bytes at these positions a
    share becomes MASK, another a random byte, the rest stays; all are targets. span (B, k): bytes of one are alike."""
    clean = x.gather(1, positions)                                                  # (B, k)
    u = torch.rand(positions.shape, generator=g, device=g.device)
    u = u if span is None else u.gather(1, span)
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
    n_bytes=mlm_bytes,
    flags=MASK_RATE | {"mask_token": Flag(0.8, "share of the predicted bytes that are MASK in the input", 0.0, 1.0),
                       "mask_random": Flag(0.1, "share of them that are a random byte; the rest stays", 0.0, 1.0),
                       "mask_span": Flag(1.0, "mean length of the spans they lie in, longer where gaps are too few; "
                                              "1: drawn one by one, so that they may touch", 1.0, 1e6)},
    supports_doc_mask=True, uses=(Fill(),))


# ---- prefix: prefix language modeling
def prefix_lm(x, g, hp):  # x (B, T + 1) -> inp, tgt (B, T), prefix (B,)
    """Prefix language modeling: a suffix from a prefix that attends both ways (T5, Raffel et al. 2020).

        inp   t h e   c a      attention: both ways among the first P positions, then causal (P = 3)
        tgt   . .   c a t      loss from position P - 1 on, which predicts the first byte after the prefix

    P is uniform over 1 .. prefix_max * T (at most T - 1), drawn per row. Positions before P - 1 attend to the byte
    that they would predict, so they have no loss. Departure: T5 splits a text anywhere; prefixes of at most half a
    row leave three quarters of the positions with loss."""
    B, T = x.size(0), x.size(1) - 1
    longest = min(max(1, round(hp.prefix_max * T)), T - 1)
    P = torch.randint(1, longest + 1, (B,), generator=g, device=g.device)
    suffix = torch.arange(T, device=x.device) >= P[:, None] - 1                     # (B, T)
    return dict(inp=x[:, :-1], tgt=x[:, 1:].where(suffix, IGNORE_INDEX), prefix=P)


OBJECTIVES["prefix"] = Objective(
    "prefix", corrupt=prefix_lm, help="a suffix from a prefix read both ways", use_help="read a prompt, continue",
    attention="prefix", flags={"prefix_max": Flag(0.5, "longest prefix, as a share of the block", 0.001, 1.0)},
    supports_doc_mask=True, bpb="causal", uses=(Continue(both_ways=True),))


# ---- span: span corruption
def span(x, g, hp):  # x (B, n) -> inp, tgt, positions (B, T), prefix (B,)
    """Span corruption: a text's noise spans, from the text with a sentinel for each (T5, Raffel et al. 2020).

        z     t h [0] c a t   s [1] SEP [0] e   [1] a t EOT     z one longer than a row; inp z[:-1], tgt z[1:]
              \\____ source: both ways ____/  \\__ causal, loss __/

    Exactly N = round(n * span_rate) noise bytes in S = round(N / span_mean) spans in a full row, of which no two touch.
    One row in eight is truncated after 8 bytes or more, perhaps inside a span (see random_lengths). Each sentinel in
    the source reserves position numbers, 4/3 of span_mean; its span's bytes in the target use them.

    Departures: T5's own code always starts with a kept token and ends with a noise one; here all placements are equally
    likely, of which few have noise at an end (the first byte in a quarter as many rows as one inside).
    Sentinels count up and, as in T5's code but not in the paper's figure, no final sentinel follows the last span. 30%
    of the bytes are noise, since T5's 15% teach less per row. Spans have 6 bytes on average, where T5's have 3 tokens
    and ByT5's (Xue et al. 2022) 20 bytes. A span's positions continue from its sentinel's, where GLM (Du et al. 2022)
    gives its bytes a second kind of position; a span longer than reserved shares numbers with what follows it."""
    _, N, S = fit_spans(hp.block_size, hp.span_rate, hp.span_mean)
    batch = span_rows(x, N, S, hp.block_size, g)
    return dict(batch, positions=span_positions(batch["inp"], batch["prefix"], hp))


def span_rows(x, N, S, T, g, mode=None):  # x (B, n) -> batch of (B, T)
    B, n = x.shape
    first, noise = place_spans(B, n, N, S, g)                                       # (B, n) bool each
    m = random_lengths(B, min(8, n), n, g, full=7 / 8)                              # (B, 1)
    m = m.maximum(first.long().argmax(1, keepdim=True) + 1)                         # at least one noise byte
    present = torch.arange(n, device=g.device) < m
    first = first & present
    noise = noise & present
    sentinel = SENTINEL - 1 + first.cumsum(1)                                       # of the latest span
    # source: a span's first byte becomes its sentinel, its other bytes are dropped
    source = torch.where(first, sentinel, x)
    keep = first | present & ~noise
    # target: the noise bytes, and before each span's first byte its sentinel; every byte has a slot before it
    target = torch.stack((sentinel, x), dim=2).flatten(1)                           # (B, 2 n)
    keep_target = torch.stack((first, noise), dim=2).flatten(1)
    return seq2seq(source, keep, target, keep_target, T, mode)


def random_composition(B, m, k, g):  # -> (B, k) long: positive parts that add up to m, all equally likely
    cuts = random_positions(B, m - 1, k - 1, g).sort(dim=1).values + 1              # k - 1 of the m - 1 places
    return F.pad(F.pad(cuts, (1, 0)), (0, 1), value=m).diff(dim=1)


def place_spans(B, n, N, S, g):  # -> first, noise (B, n) bool: S spans of N bytes in all, none touching another
    length = random_composition(B, N, S, g)                                         # (B, S)
    # S + 1 stretches of kept bytes around them; the first and last may be empty, so they are drawn one byte too long
    kept = random_composition(B, n - N + 2, S + 1, g)[:, :-1].cumsum(1) - 1         # (B, S): kept bytes before a span
    start = kept + length.cumsum(1) - length
    # +1 where a span starts, -1 after its end: the running sum is 1 inside
    edge = torch.zeros(B, n + 1, dtype=torch.long, device=g.device)
    edge = edge.scatter(1, start, 1).scatter(1, start + length, -1)
    return edge[:, :n] == 1, edge[:, :n].cumsum(1) == 1


def random_lengths(B, low, high, g, full=0.5):  # -> (B, 1) long: high in a share `full` of the rows, else low..high
    """Lengths of texts. If each filled its row, EOT would always stand at the same position, and the model would never
    learn to stop early."""
    u = torch.rand(2, B, 1, generator=g, device=g.device)
    return torch.where(u[0] < full, high, low + (u[1] * (high - low + 1)).long())


def constant_column(x, value):  # -> (B, 1) of one id
    return x.new_full((x.size(0), 1), value)


def pack_left(ids, keep, T):  # ids, keep (B, U) -> (B, T): the kept ids moved to the left, PAD after them
    column = torch.where(keep, keep.cumsum(1) - 1, T).clamp(max=T)                  # dropped ids go to column T
    return ids.new_full((ids.size(0), T + 1), PAD).scatter(1, column, ids)[:, :T]


def seq2seq(source, keep, target, keep_target, T, mode=None):  # ids, keep (B, U) each -> batch
    """One row of T positions in place of an encoder and a decoder: [mode] source SEP target EOT PAD.

    The prefix is everything up to SEP; each position from SEP on predicts the next id, up to EOT. keep: which ids
    stand in the row; source and target need not have the same number."""
    sep = constant_column(source, SEP)
    is_kept = torch.ones_like(sep, dtype=torch.bool)
    if mode is not None:
        source = torch.cat((constant_column(source, mode), source), dim=1)
        keep = torch.cat((is_kept, keep), dim=1)
    P = keep.sum(1) + 1                                                             # positions up to SEP
    end = P + keep_target.sum(1)                                                    # the position of EOT
    ids = torch.cat((source, sep, target, constant_column(source, EOT)), dim=1)
    z = pack_left(ids, torch.cat((keep, is_kept, keep_target, is_kept), dim=1), T + 1)
    i = torch.arange(T, device=z.device)
    has_loss = (i >= P[:, None] - 1) & (i < end[:, None])
    return dict(inp=z[:, :-1], tgt=z[:, 1:].where(has_loss, IGNORE_INDEX), prefix=P)


LONG_SPAN_POSITIONS = 64                        # position numbers that a sentinel reserves in ul2's rows of long spans


def span_positions(ids, P, hp):  # ids (B, T), prefixes (B,) -> (B, T)
    """Position numbers for RoPE. Each sentinel of the source reserves some for the bytes that follow it in the target,
    here 8, as for spans of 6 bytes on average (LONG_SPAN_POSITIONS in rows that start with MODE_X):

        ids         t h [0]  c  a  t     s [1] SEP [0] e   [1]  a  t
        positions   0 1  2  11 12 13 14 15 16   25   2 3 4  16 17 18
    """
    i = torch.arange(ids.size(1), device=ids.device).expand_as(ids)
    in_source = i < P[:, None]
    is_sentinel = ids >= SENTINEL
    in_source_sentinel = (in_source & is_sentinel).long()
    reserved = torch.where(ids[:, :1] == MODE_X, LONG_SPAN_POSITIONS, round(4 / 3 * hp.span_mean))
    i = i + reserved * (in_source_sentinel.cumsum(1) - in_source_sentinel)

    def sentinel_positions(where):  # -> (B, N_SENTINELS + 1); the last column takes all other ids
        number = torch.where(is_sentinel & where, ids - SENTINEL, N_SENTINELS)
        return i.new_zeros(len(ids), N_SENTINELS + 1).scatter(1, number, i)
    # sentinels ascend, so their count is the number of the target's latest one, 0 where there is none yet
    latest = (is_sentinel & ~in_source).cumsum(1)
    offset = sentinel_positions(in_source) - sentinel_positions(~in_source)
    return torch.where(latest > 0, i + offset.gather(1, (latest - 1).clamp(min=0)), i)


def fit_spans(T, rate, mean, extra=0):  # -> n, N, S: raw bytes, noise bytes and spans of a row
    """The most raw bytes whose source, SEP, target, EOT and `extra` ids fit T + 1 ids."""
    for n in range(T - 1 - extra, 1, -1):
        N = min(max(round(n * rate), 1), n - 1)
        S = max(1, round(N / mean))
        if n + 2 * S + 2 + extra <= T + 1:
            break
    if S > min(N, n - N + 1, N_SENTINELS):
        fail(f"--span_rate {rate:g} --span_mean {mean:g}: the {S} spans in a row of {T} would touch, or be more than "
             f"the {N_SENTINELS} sentinels. Try a lower --span_rate or a larger --span_mean")
    return n, N, S


def span_prompt(pieces, m, hp, mode=()):
    """A text that does not end with a hole gets one more sentinel at its end, so that the last answer, too, ends with
    a sentinel: in training EOT mostly stood at the end of the row and is rarely predicted earlier."""
    ids = [*mode, *pieces[0]]
    for k, piece in enumerate(pieces[1:]):
        ids += [SENTINEL + k, *piece]
    if pieces[-1]:
        ids.append(SENTINEL + len(pieces) - 1)
    return ids + [SEP, SENTINEL], len(ids) + 1


SPAN_ENDS = tuple(range(SENTINEL + 1, VOCAB_SIZE))              # an answer ends with the next one's sentinel
SHARP_ATTENTION = {"attn_scale": 2.0}           # sharper attention learns long-range lookups sooner
# bart and nsp learn more with four heads than with two, ul2's holes end more often; span and contrastive learn alike
NARROW_HEADS = {"n_head": {"cpu": 4, "cuda": 6}}
OBJECTIVES["span"] = Objective(
    "span", corrupt=span, help="spans of a text after their sentinels", use_help="fill holes", attention="prefix",
    n_bytes=lambda T, hp: fit_spans(T, hp.span_rate, hp.span_mean)[0], n_outputs=VOCAB_SIZE,
    flag_defaults=SHARP_ATTENTION | NARROW_HEADS,
    flags={"span_rate": Flag(0.3, "share of bytes in spans", 0.001, 0.999),
           "span_mean": Flag(6.0, "mean length of a span, in bytes, at most a row's noise", 1.0)},
    positions=span_positions, uses=(Infill(span_prompt, SPAN_ENDS),))


# ---- ul2: a mixture of denoisers
UL2_X_RATE_AND_MEAN = 0.5, 32                   # rate and mean length of the extreme denoiser's spans


def ul2(x, g, hp):  # x (B, n) -> inp, tgt, positions (B, T), prefix (B,)
    """A mixture of denoisers, each named by the row's first id (UL2, Tay et al. 2022).

        [R] source SEP spans EOT     half of the rows: short spans, as in span
        [S] prefix SEP rest EOT      a quarter: the rest of a text, split anywhere
        [X] source SEP spans EOT     a quarter: half of the text in spans of mean 32

    The shares are the same in every batch. The loss is one mean over the targets of all rows; a row of S or X has
    about 1.6 times as many as one of R. Departures: three denoisers stand for the paper's seven, whose S removes a
    quarter of a text; half of the rows are R (in U-PaLM, Tay et al. 2022, half are S); X reserves more positions."""
    T = hp.block_size
    parts = denoisers(T, hp)
    batches = []
    rows_of_parts = apportion([share for share, *_ in parts], x.size(0))
    for (_, mode, n, N, S), rows in zip(parts, rows_of_parts):
        raw = x[:rows, :n]                      # a row uses its first n bytes
        x = x[rows:]
        if mode == MODE_S:
            cut = torch.randint(1, n, (rows, 1), generator=g, device=g.device)
            left = torch.arange(n, device=g.device) < cut                           # (rows, n)
            batches.append(seq2seq(raw, left, raw, ~left, T, mode))
        else:
            batches.append(span_rows(raw, N, S, T, g, mode))
    batch = {k: torch.cat([b[k] for b in batches]) for k in batches[0]}
    return dict(batch, positions=span_positions(batch["inp"], batch["prefix"], hp))


def apportion(weights, total):  # [w] -> [rows] that add up to total, by largest remainder
    shares = [w / sum(weights) * total for w in weights]
    rows = [int(share) for share in shares]
    by_remainder = sorted(range(len(rows)), key=lambda i: rows[i] - shares[i])
    for i in by_remainder[:total - sum(rows)]:
        rows[i] += 1
    return rows


def denoisers(T, hp):  # -> [(share of rows, mode id, n, N, S)]
    return [(0.5, MODE_R, *fit_spans(T, hp.span_rate, hp.span_mean, extra=1)), (0.25, MODE_S, T - 2, 0, 0),
            (0.25, MODE_X, *fit_spans(T, *UL2_X_RATE_AND_MEAN, extra=1))]


def ul2_prompt(pieces, m, hp):
    return span_prompt(pieces, m, hp, [MODE_X if m > 16 else MODE_R])


OBJECTIVES["ul2"] = dataclasses.replace(
    OBJECTIVES["span"], name="ul2", corrupt=ul2, help="short spans, long spans, suffixes",
    use_help="fill holes, continue", n_bytes=lambda T, hp: max(n for _, _, n, _, _ in denoisers(T, hp)), min_rows=4,
    uses=(Infill(ul2_prompt, SPAN_ENDS), Continue(True, (MODE_S,), (SEP,))))


# ---- fim: fill in the middle
def fim(x, g, hp):  # x (B, T + 1) -> inp, tgt (B, T)
    """Fill in the middle: a text rearranged so that its middle comes last (Bavarian et al. 2022).

        PSM   PRE prefix SUF suffix MID middle EOT       attention: causal
        SPM   PRE SUF suffix MID prefix middle EOT       loss at all T positions

    Two cuts uniform over all places, so that each section is a third on average. A row is rearranged with probability
    fim_rate, and of those SPM (the paper's variant 2) with fim_spm_rate; the others stay plain text. Half of the
    rearranged rows are one text; in the others bytes of the row before follow EOT, which may thus stand anywhere (see
    random_lengths); a single row is one text."""
    B, n = x.size(0), x.size(1) - 4                                                 # four ids join the bytes
    i = torch.arange(n, device=g.device)
    m = random_lengths(B, 1 if B > 1 else n, n, g)                                  # (B, 1): bytes to rearrange
    cut = (torch.rand(B, 2, generator=g, device=g.device) * (m + 1)).long().sort(dim=1).values
    a = cut[:, :1]                              # (B, 1): prefix i < a, middle a <= i < b, suffix b <= i < m
    b = cut[:, 1:]
    u = torch.rand(B, 2, 1, generator=g, device=g.device)
    is_spm = u[:, 0] < hp.fim_spm_rate                                              # (B, 1)
    is_fim = u[:, 1] < hp.fim_rate

    # each id gets the number of its piece in the row; one stable sort by that number puts the row together
    prefix = torch.where(is_spm, 4, 1)
    suffix = torch.where(is_spm, 2, 3)
    pieces = torch.where(i < a, prefix, torch.where(i < b, 5, torch.where(i < m, suffix, 7)))       # (B, n)
    place_of_suf = torch.where(is_spm, 1, 2)                                        # (B, 1)
    place_of_mid = torch.where(is_spm, 3, 4)
    places = torch.cat((pieces, constant_column(x, 0), place_of_suf, place_of_mid, constant_column(x, 6)), dim=1)
    order = places.argsort(dim=1, stable=True)                                      # (B, n + 4): of PRE, ..., EOT, too
    text = torch.where(i < m, x[:, :n], x[:, :n].roll(1, 0))
    controls = [constant_column(x, control) for control in (PRE, SUF, MID, EOT)]
    ids = torch.cat((text, *controls), dim=1)                                       # (B, n + 4)
    return clm(torch.where(is_fim, ids.gather(1, order), x), g, hp)


def fim_prompt(pieces, m, hp):
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
    """Multi-token prediction: the next n = mtp_heads bytes at once (Gloeckle et al. 2024; DeepSeek-AI 2024).

        inp          t h e   c      attention: causal
        tgt          h e   c a      of head 1, the model's own
        future_tgt   e   c a t      of head 2, and so on; each has loss at all T positions of one document

    mtp_kind parallel (Gloeckle): head k reads norm(h + W_k h) through the shared byte head. Departure: the paper's
    heads are a transformer layer each, taken off the trunk; on MBPP its linear heads score nearly the same.
    sequential (DeepSeek-V3): module k joins the state of module k - 1 at i (the model's, for the first) with the
    embedding of byte i + k, runs a block of its own and predicts byte i + k + 1 through the byte head. sample.py does
    not draft with these modules: each draft is one more pass, and on a CPU drafts cost what they save.
    The loss is the model's plus mtp_weight / (n - 1) times the others' sum, as DeepSeek-V3's (of one module, with a
    weight that falls to .1); --mtp_weight 3 for 4 heads is Gloeckle's plain sum. With mtp_heads 1 both kinds equal clm.
    Under --doc_mask no head but the first predicts bytes of the next document."""
    T = x.size(1) - hp.mtp_heads
    future = x[:, 1:].unfold(1, hp.mtp_heads, 1)[:, :, 1:]      # (B, T, n - 1): bytes t + 2 .. t + n
    if hp.doc_mask:
        doc = document_ids(x)
        in_another = doc[:, 1:].unfold(1, hp.mtp_heads, 1)[:, :, 1:] != doc[:, :T, None]
        future = future.masked_fill(in_another, IGNORE_INDEX)
    return dict(clm(x[:, :T + 1], g, hp), future_tgt=future)


class MTPBlock(Block):
    def __init__(self, config):
        super().__init__(config)
        self.join = StackedLinear(2 * config.n_embd, config.n_embd)


def mtp_heads(config, hp):
    n = hp.mtp_heads - 1
    if n == 0:
        return {}
    if hp.mtp_kind == "parallel":
        return {"mtp": StackedLinear(config.n_embd, config.n_embd, stack=n, zero=True)}
    return {"mtp": nn.ModuleDict({"blocks": nn.ModuleList(MTPBlock(config) for _ in range(n))})}


def mtp_ahead(model, h):  # (..., C) -> (..., n - 1, V): logits of the bytes 2, 3, ... ahead, by the parallel heads
    ahead = norm(h[..., None, :] + model.heads["mtp"](h).unflatten(-1, (-1, h.size(-1))))
    return model.logits(ahead)


def mtp_loss(model, batch, hp):
    h = hidden_states(model, batch)                             # (B, T, C)
    nll = target_nll(model, h, batch)
    figures = {"nll": nll}
    loss = nll
    future = batch["future_tgt"]                                # (B, T, n - 1)
    drafter = mtp_drafter(hp)
    logits = drafter(model, h) if drafter else None             # (B, T, n - 1, V)
    tgt = batch["tgt"]
    for k in range(hp.mtp_heads - 1):
        if drafter:
            head_logits = logits[:, :, k]
        else:
            block = model.heads["mtp"]["blocks"][k]
            e = norm(model.embed(tgt.clamp(min=0)).to(h.dtype))                     # of the byte before this target
            x = block.join(torch.cat((h, e), dim=-1))                               # h is normed already
            h = norm(run_blocks([block], x, model.config, 0, mask=batch.get("mask")))
            head_logits = model.logits(h)
        tgt = future[:, :, k]
        nats = (position_nats(head_logits, tgt) * batch["future_weight"][:, :, k]).sum()
        figures[f"head{k + 2}"] = nats
        loss = loss + hp.mtp_weight / (hp.mtp_heads - 1) * nats
    return loss, figures


def mtp_drafter(hp):
    return mtp_ahead if hp.mtp_kind == "parallel" and hp.mtp_heads > 1 else None


OBJECTIVES["mtp"] = Objective(
    "mtp", corrupt=mtp, help="several next bytes at once", use_help="continue, drafting ahead", attention="causal",
    n_bytes=lambda T, hp: T + hp.mtp_heads, heads=mtp_heads, loss=mtp_loss,
    flags={"mtp_heads": Flag(4, "bytes predicted at each position", 1),
           "mtp_kind": Flag("parallel", "parallel heads or sequential modules", choices=("parallel", "sequential")),
           "mtp_weight": Flag(0.3, "weight of the losses of all bytes but the next, together", 0.0)},
    supports_doc_mask=True, bpb="causal", uses=(Continue(drafter=mtp_drafter),))


# ---- electra: replaced token detection
def electra(x, g, hp):  # x (B, T) -> inp, tgt (B, T), masked_positions (B, k), uniforms (B, k)
    """Replaced token detection: which bytes did a small generator replace? (ELECTRA, Clark et al. 2020)

        inp      t [M] e   c [M] t     the generator's input; it is a masked language model
        fake     t  h  e   c  u  t     its samples filled in, which the discriminator reads
        label    0  0  0 0 0  1  0     loss at every position: does the byte differ from the original?

    A byte that the generator guesses right counts as original; no gradient passes through the samples;
    weights 1 and electra_weight. As in the authors' code 85% of the chosen bytes are masked and 15% left.
    Departures: positions are drawn without replacement; generator and discriminator do not share embeddings; no dense
    layer before the byte head and the scalar head. The generator has no n-grams."""
    B, T = x.shape
    k = max(1, round(hp.mask_rate * T))
    positions = random_positions(B, T, k, g)
    u = torch.rand(B, 2, k, generator=g, device=g.device)
    clean = x.gather(1, positions)
    inp = x.scatter(1, positions, torch.where(u[:, 0] < 0.85, MASK, clean))
    tgt = torch.full_like(x, IGNORE_INDEX).scatter(1, positions, clean)
    return dict(inp=inp, tgt=tgt, masked_positions=positions, uniforms=u[:, 1], prefix=T)


def electra_heads(config, hp):
    # gen_scale times the width; attention heads keep their width where that divides
    H = max(1, round(config.n_head * hp.gen_scale))
    C = 2 * H * max(1, round(config.n_embd * hp.gen_scale / (2 * H)))
    small = dataclasses.replace(config, n_head=H, n_embd=C, n_outputs=N_BYTES, ngram_rows=0)
    return {"generator": Transformer(small, getattr(torch, hp.dtype)), "replaced": scalar_head(config)}


def scalar_head(config):  # -> a head of one number for each state
    layer = nn.Linear(config.n_embd, 1)
    nn.init.zeros_(layer.weight)                # an untrained model is at chance
    nn.init.zeros_(layer.bias)
    return layer


def sample_replacements(generator, batch):  # -> generator's logits (B, k, V), clean bytes, sampled bytes (B, k)
    positions = batch["masked_positions"]
    h = generator(batch["inp"], batch["prefix"])
    logits = generator.logits(h.gather(1, positions[..., None].expand(-1, -1, h.size(-1))))
    with torch.no_grad():
        fake = inverse_cdf(logits[..., :N_BYTES].softmax(-1), batch["uniforms"])
    return logits, batch["tgt"].gather(1, positions), fake


def inverse_cdf(p, u):  # p (..., M) of any positive sum, u (...) in [0, 1) -> index (...), sampled from p
    cdf = p.cumsum(-1)
    return torch.searchsorted(cdf, (u * cdf[..., -1])[..., None], right=True)[..., 0].clamp(max=p.size(-1) - 1)


def score_positions(model, x, head):  # x (B, T) -> (B, T): what a head of one number says of each position
    return model.heads[head](model(x, x.size(1)).float())[..., 0]


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
    """Denoising: the whole clean text from a noisy one (BART, Lewis et al. 2020).

        z     a [M] b d   SEP   a b c d EOT      source both ways; causal, loss on the clean text and EOT

    bart_noise names any of NOISES, which are applied in the order below. Each row draws one rate, uniform from
    bart_rate_min to bart_rate, which mask, delete, infill, replace and insert divide equally, at least a byte each.
    L = (T - 1) // 2 bytes fit a row, fewer under insert. Half of the rows hold as many (see random_lengths).
    Nearest to BART's own recipe: --bart_noise permute,infill --bart_rate_min .3 --poisson_lambda 3.5.
    Departures: the rate varies, since a model trained at BART's constant 30% spoils texts with less noise; sentences
    are not permuted by default, since BART's ablation loses little without it and small models do not learn it;
    replace and insert (at most one byte into a gap) are added, since a model trained with infilling alone copies typos.
    In fairseq's code spans begin at words, count words and may overlap, and a tenth become a random token; here they
    begin anywhere, count bytes, never overlap and all become MASK, and few have length 0 where a row's noise is small.
    Its sentences end with a full stop, here with a newline or the space after the stop. Its rotation may be by 0."""
    B, L = x.shape
    m = random_lengths(B, min(8, L), L, g)                                          # (B, 1) bytes of each row
    present = torch.arange(L, device=x.device) < m
    k = bart_counts(m, hp, g)                                                       # (B, 1)
    noisy = x
    keep = present
    for name, noise in NOISES.items():
        if name in hp.bart_noise.split(","):
            noisy, keep = noise(noisy, keep, k, g, hp)
    batch = seq2seq(noisy, keep, x, present, hp.block_size)
    return dict(batch, positions=bart_positions(batch["inp"], batch["prefix"], hp))


def bart_positions(ids, P, hp):  # ids (B, T), prefixes (B,) -> (B, T)
    """Position numbers for RoPE. The target counts from 0 again, as BART's decoder does, near the bytes that it copies:

        ids         a [M] b d   SEP   a b c d
        positions   0  1  2 3   -1    0 1 2 3
    """
    i = torch.arange(ids.size(1), device=ids.device).expand_as(ids)
    return torch.where(i < P[:, None] - 1, i, i - P[:, None])


# a noise: ids, keep (B, U), k (B, 1) bytes to corrupt -> ids, keep (B, U'), with another U' if it inserts ids
def permute_noise(ids, keep, k, g, hp):  # sentences in another order; ids that are not kept come after them
    """A sentence ends with a newline, or with white space after a full stop, question or exclamation mark."""
    space = (ids == 32) | ((ids >= 9) & (ids <= 13))
    stop = (ids == ord(".")) | (ids == ord("?")) | (ids == ord("!"))
    end = (ids == ord("\n")) | (space & F.pad(stop[:, :-1], (1, 0)))
    sentence = end.cumsum(1) - end.long()       # (B, U): number of each byte's sentence; the end belongs to it
    key = torch.rand(ids.shape, generator=g, device=g.device).gather(1, sentence).masked_fill(~keep, 2)
    return ids.gather(1, key.argsort(dim=1, stable=True)), keep


def infill_noise(ids, keep, k, g, hp):  # spans of Poisson length become one MASK each; those of length 0 insert one
    L = ids.size(1)
    K = 8 + int(hp.bart_rate * L + 1)                                               # spans at most
    stays, start, used = place_infills(keep, k, K, hp.poisson_lambda, g)            # (B, L), (B, K), (B, K)
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


def insert_noise(ids, keep, k, g, hp):  # a random byte before each of k bytes
    inserted = torch.stack((random_bytes(ids.shape, g), ids), dim=2)                # (B, U, 2)
    is_kept = torch.stack((pick_bytes(ids, keep, k, g), keep), dim=2)
    return inserted.flatten(1), is_kept.flatten(1)


def rotate_noise(ids, keep, k, g, hp):  # the text starts at another byte: rotated by 1 .. length - 1 positions
    U = ids.size(1)
    length = keep.sum(1, keepdim=True)
    shift = 1 + (torch.rand(len(ids), 1, generator=g, device=g.device) * (length - 1)).long()
    i = torch.arange(U, device=g.device)
    rotated = ((i + shift) % length.clamp(min=1)).where(i < length, i)
    return pack_left(ids, keep, U).gather(1, rotated), i < length


NOISES = {"permute": permute_noise, "infill": infill_noise, "mask": mask_noise, "delete": delete_noise,
          "replace": replace_noise, "insert": insert_noise, "rotate": rotate_noise}
NOISES_WITH_RATE = ("infill", "mask", "delete", "replace", "insert")       # noises that share bart_rate


def pick_bytes(ids, keep, k, g):  # -> (B, U) bool: k bytes of each row; never a MASK, so no byte is corrupted twice
    free = keep & (ids < N_BYTES)
    return free & (ranks(torch.rand(ids.shape, generator=g, device=g.device).masked_fill(~free, 2)) < k)


def ranks(key):  # (..., n) -> (..., n) long: how many keys of its row are smaller
    return key.argsort().argsort()              # the second argsort inverts the first


def place_infills(present, M, K, mean, g):  # present (B, L), M (B, 1) -> stays (B, L), start, used (B, K)
    """At most K spans that cover exactly M of the present bytes. Lengths are Poisson until they add up to M, the last
    one is cut to fit; each span lies at a uniformly drawn place between the bytes that stay."""
    B, L = present.shape
    m = present.sum(1, keepdim=True)
    # lengths, through the inverse of Poisson's CDF
    j = torch.arange(64, device=g.device)
    cdf = (j * math.log(mean) - mean - torch.lgamma(j + 1.0)).exp().cumsum(0)
    length = torch.searchsorted(cdf, torch.rand(B, K, generator=g, device=g.device), right=True).clamp(max=63)
    # use spans until they cover M bytes; of those of length 0 so few that the source is no longer than the text
    before = length.cumsum(1) - length
    used = before < M                                                               # (B, K)
    length = torch.where(used, length.minimum(M - before), 0)
    full = (used & (length > 0)).sum(1, keepdim=True)
    used &= (length > 0) | ((used & (length == 0)).cumsum(1) <= M - full)
    # each at a place between the m - M bytes that stay, in the order of the text
    gap = (torch.rand(B, K, generator=g, device=g.device) * (m - M + 1)).long()
    order = torch.where(used, gap, L).sort(dim=1)                                   # unused spans last
    used = used.gather(1, order.indices)
    length = length.gather(1, order.indices)
    start = (order.values + length.cumsum(1) - length).clamp(max=L)                 # bytes before it, in spans too
    edge = torch.zeros(B, L + 1, dtype=torch.long, device=g.device).scatter_add(1, start, used.long())
    edge = edge.scatter_add(1, (start + length).clamp(max=L), -used.long())
    return (edge[:, :L].cumsum(1) == 0) & present, start, used


def bart_counts(m, hp, g):  # bytes of the rows (B, 1) -> bytes that each noise with a rate corrupts (B, 1)
    n_rated = max(1, len(set(NOISES_WITH_RATE) & set(hp.bart_noise.split(","))))
    most = (m * (hp.bart_rate / n_rated) + 0.5).long().clamp(min=1)
    least = (m * (hp.bart_rate_min / n_rated) + 0.5).long().clamp(min=1).minimum(most)
    return least + (torch.rand(m.shape, generator=g, device=g.device) * (most - least + 1)).long()


def bart_bytes(T, hp):
    noises = hp.bart_noise.split(",")
    if not set(noises) <= set(NOISES) or len(set(noises)) < len(noises):
        fail(f"--bart_noise {hp.bart_noise}: wants different names with commas between. "
             f"Try some of {','.join(NOISES)}")
    growth = hp.bart_rate if "insert" in noises else 0.0        # of the source
    return int((T - 1 - (growth > 0)) / (2 + growth))


def bart_piece_bytes(hp):  # -> most bytes that are repaired at once, or None
    """After an error of its own the model loses its place in the source, and finds it again where the next piece
    begins. Noises that move text can only be undone in the whole text."""
    return None if {"permute", "rotate"} & set(hp.bart_noise.split(",")) else 32


# short rows are learned sooner
SHORT_ROWS = {"block_size": 128, "batch_size": {"cpu": 32, "cuda": 256}}
OBJECTIVES["bart"] = Objective(
    "bart", corrupt=bart, help="a whole text from a noisy one", use_help="repair a text", attention="prefix",
    n_bytes=bart_bytes,
    flags={"bart_noise": Flag("infill,replace", "any of " + ",".join(NOISES)),
           "bart_rate": Flag(0.3, f"largest share of bytes that {', '.join(NOISES_WITH_RATE)} change", 0.001, 0.9),
           "bart_rate_min": Flag(0.0, "smallest share of them; as bart_rate or more: always the same", 0.0, 0.9),
           "poisson_lambda": Flag(3.0, "mean length of an infilled span, before the last is truncated", 2.0, 20.0)},
    # n-grams lower the loss, but the model loses its place in the source sooner
    flag_defaults=SHARP_ATTENTION | NARROW_HEADS | SHORT_ROWS | {"ngram_rows": 0},
    positions=bart_positions, target_hidden=False,
    uses=(Repair(max_bytes=bart_piece_bytes),))


# ---- nsp: next sentence prediction
NSP_GAP = 8                                         # bytes skipped between A and B, so that no split word links them


def nsp(x, g, hp):  # x (B, 2 h + NSP_GAP) -> inp, tgt (B, T), labels (B,)
    """Next sentence prediction: does B follow A? Beside masked language modeling (BERT, Devlin et al. 2019).

        inp     CLS A A [M] A SEP B B B [M] SEP      attention: bidirectional
        label   1 if B follows A, else 0             read at CLS

    A and B are h bytes each, NSP_GAP bytes apart in both classes, so that neither length nor a split word gives the
    answer away. Half the rows are negative: "random" takes another row's B, "swap" exchanges A and B (sentence order
    prediction, ALBERT, Lan et al. 2020). Departures: another row may be of the same document, as all are in a text of
    one, where BERT's is of another; pieces of fixed length; SEP stands for segment embeddings; NSP_GAP; 15% of the text
    are masked, BERT's count CLS and SEP too; no pooler (BERT's dense layer and tanh) before the scalar head."""
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
    row = F.pad(row, (0, T - row.size(1)), value=PAD)                               # one position where T is even
    masked = random_positions(B, 2 * h, max(1, round(hp.mask_rate * 2 * h)), g)
    inp, tgt = mask_bytes(row, 1 + masked + (masked >= h), g)                       # skip CLS and, in B, SEP
    return dict(inp=inp, tgt=tgt, labels=(~negative).long(), prefix=T)


def nsp_loss(model, batch, hp):
    h = hidden_states(model, batch)                                                 # (B, T, C)
    follows = model.heads["nsp"](h[:, 0].float())[:, 0]                             # (B,)
    nll = target_nll(model, h, batch)
    nats = F.binary_cross_entropy_with_logits(follows, batch["labels"].float(), reduction="none")   # (B,)
    nsp_nats = nats @ batch["share"]
    correct = (follows > 0) == (batch["labels"] == 1)
    figures = dict(nll=nll, nsp=nsp_nats, accuracy=correct.float() @ batch["share"])
    return nll + hp.nsp_weight * nsp_nats, figures


def predict_follows(model, first, second, hp):  # ids, ids -> 0-D log-odds that the second follows the first
    h = (hp.block_size - 3) // 2                # bytes of a piece; a longer second text loses its first NSP_GAP
    second = second[NSP_GAP:] if len(second) > h else second
    row = torch.tensor([[CLS, *first[-h:], SEP, *second[:h], SEP]], device=model.embed.weight.device)
    return model.heads["nsp"](model(row, row.size(1))[:, 0].float())[0, 0]


OBJECTIVES["nsp"] = Objective(
    "nsp", corrupt=nsp, help="whether B follows A, and masked bytes", use_help="compare two texts",
    attention="bidirectional", n_bytes=lambda T, hp: 2 * ((T - 3) // 2) + NSP_GAP, min_rows=2,
    heads=lambda config, hp: {"nsp": scalar_head(config)}, loss=nsp_loss,
    flags=MASK_RATE | {"nsp_negatives": Flag("random", "random (another row's B) or swap (A after B)",
                                             choices=("random", "swap")),
                       "nsp_weight": Flag(1.0, "weight of the next-sentence loss; 0: masked bytes alone", 0.0)},
    flag_defaults=SHARP_ATTENTION | NARROW_HEADS | {"mask_rate": 0.15},
    uses=(Predict("follow", predict_follows), Fill((CLS,), (SEP,))))


# ---- contrastive: InfoNCE over crops
def contrastive(x, g, hp):  # x (B, T) -> inp (B, 2, Lc)
    """Contrastive learning: which of the batch's crops comes from the same window? (Contriever, Izacard et al. 2022)

        window   t h e   c a t   s a t   o n       two crops of Lc = crop * T bytes each, from anywhere in it
        inp      [h e   c a t] [a t   s a t]       attention: bidirectional

    InfoNCE (van den Oord et al. 2018) on the mean of a crop's states, normalized, divided by tau, in both directions.
    The negatives are the other rows of the micro-batch: accumulation and several processes equal one big batch only at
    a fixed micro-batch size; validation compares 32 rows. Departures: both directions, states of length 1, crops of one
    length (theirs are .05 to .5 of a window), no ids around a crop, no byte deleted, no queue of older negatives."""
    B, T = x.shape
    Lc = max(1, round(hp.crop * T))
    start = torch.randint(0, T - Lc + 1, (B, 2, 1), generator=g, device=g.device)
    i = start + torch.arange(Lc, device=g.device)                                   # (B, 2, Lc)
    return dict(inp=x.gather(1, i.flatten(1)).view(B, 2, Lc), prefix=Lc)


def embed(model, x):  # (N, Lc) -> (N, C) float32 of length 1: the mean of the states
    return F.normalize(model(x, x.size(1)).float().mean(1), dim=-1)


def contrastive_loss(model, batch, hp):
    states = embed(model, batch["inp"].flatten(0, 1))                                # (2 B, C)
    a, b = states.unflatten(0, (-1, 2)).unbind(1)
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
    flag_defaults=NARROW_HEADS | {"batch_size": 32},            # its rows are the negatives
    compares_rows=True, uses=(Predict("search", embed),))


# ---- mdlm: masked diffusion
def mdlm(x, g, hp):  # x (B, L) -> inp, tgt, weight (B, L)
    """Masked diffusion: bytes from any share of the others (MDLM, Sahoo et al. 2024; LLaDA, Nie et al. 2025).

        inp   t [M] [M]   c [M] t    attention: bidirectional; l of L bytes are masked
        tgt   .  h   e  . .  a  .    loss at these, times L / l, divided by B * L

    The loss bounds -log p(x) from above. MDLM's integral over t in (0, 1) of (1/t) E[sum of nats at bytes masked with
    probability t] equals the mean over l = 1..L of (L/l) E[sum of nats at l masked bytes]: with exactly l bytes the
    weight is never larger than L, no row is empty, and the spread is far smaller. l is stratified over the batch. Only
    bytes are predicted, never MASK or another id (MDLM's SUBS). Departure: up to a share uniform_from of the steps, l
    is mask_rate of L, since high rates teach little early. The loss of these steps is no bound; validation's is."""
    masked, weight = mask_blocks(x, x.size(1), g, hp)
    return dict(inp=x.masked_fill(masked, MASK), tgt=x.where(masked, IGNORE_INDEX), weight=weight / x.numel(),
                prefix=x.size(1))


def mask_blocks(x, n, g, hp):  # x (B, L) -> masked (B, L) bool, weight (B, L)
    """Masks l of the n bytes of each block (the last one may be shorter). l is uniform over 1..n, stratified over the
    rows; up to uniform_from of a run it is mask_rate of n, rounded. weight: of the bytes of a block, n / l."""
    B, L = x.shape
    n = min(n, L)
    size = (L - torch.arange(0, L, n, device=g.device)).clamp(max=n)                # (blocks,)
    # one number from each B-th of [0, 1), in random order
    order = torch.rand(B, len(size), generator=g, device=g.device).argsort(dim=0)
    u = (order + torch.rand(B, len(size), generator=g, device=g.device)) / B
    count = 1 + (u * size).long().minimum(size - 1)                                 # (B, blocks)
    is_early = hp.progress < hp.uniform_from
    count = count + ((size * hp.mask_rate + 0.5).long().clamp(min=1) - count) * is_early
    key = F.pad(torch.rand(B, L, generator=g, device=g.device), (0, len(size) * n - L), value=2.0)
    masked = ranks(key.view(B, len(size), n)) < count[..., None]                    # (B, blocks, n)
    weight = (size / count).repeat_interleave(n, dim=1)
    return masked.flatten(1)[:, :L], weight[:, :L]


def bound_loss(cost):  # -> loss of an Objective: an estimate of the bound, in nats a byte
    def loss(model, batch, hp):
        logits = model.logits(hidden_states(model, batch))[..., :N_BYTES]
        return (cost(logits, batch["tgt"]) * batch["weight"]).sum(), {}
    return loss


DIFFUSION_FLAGS = MASK_RATE | {
    "uniform_from": Flag(0.7, "first share of the steps, which mask mask_rate of the bytes (0: no step does); then, "
                              "and with --init_from at once, any share", 0.0, 1.0)}
DIFFUSION_DEFAULTS = SHARP_ATTENTION | {"mask_rate": 0.4}
OBJECTIVES["mdlm"] = Objective(
    "mdlm", corrupt=mdlm, help="masked bytes at any rate", use_help="write in any order", attention="bidirectional",
    n_bytes=aligned_window, loss=bound_loss(position_nats), flags=DIFFUSION_FLAGS, flag_defaults=DIFFUSION_DEFAULTS,
    supports_doc_mask=True, bpb="bound",
    uses=(Fill(orders=("ancestral", "confident", "left"), trained_at_any_rate=True),))


# ---- sedd: score entropy discrete diffusion
def sedd_cost(logits, tgt):  # (B, T, 256), (B, T) -> (B, T) nats
    """Score entropy discrete diffusion (SEDD, Lou et al. 2024), absorbing state, time-free (RADD, Ou et al. 2025).

        inp   t [M] [M]   c [M] t    rows are mdlm's; the model gives log c_y = logit_y - log 256, the log ratio of
        tgt   .  h   e  . .  a  .    byte y to MASK without its factor of time (1 - t) / t

    A masked byte x costs (sum_y c_y - log c_x - 1) * L / l, where it costs mdlm -log softmax_x * L / l. That is least
    where c is the byte's distribution, and bounds -log p(x) as mdlm's does: the normalizer, which the softmax gives
    mdlm, is learned. Departures: the model is not given the time, which the absorbing state allows; RADD's network ends
    in log_softmax, which makes its loss mdlm's. sample.py's default order is MDLM's sampler; analytic is SEDD's."""
    has_target = tgt != IGNORE_INDEX
    logc = logits - math.log(N_BYTES)
    logc = logc.masked_fill(~has_target[..., None], 0.0)        # so that ignored positions stay finite
    cost = logc.exp().sum(-1) - logc.gather(-1, tgt.clamp(min=0)[..., None])[..., 0] - 1
    return cost * has_target


OBJECTIVES["sedd"] = dataclasses.replace(
    OBJECTIVES["mdlm"], name="sedd", help="ratios of masked bytes at any rate", loss=bound_loss(sedd_cost),
    uses=(Fill(orders=("ancestral", "analytic", "left"), trained_at_any_rate=True),))


# ---- bd3lm: block diffusion
def bd3lm(x, g, hp):  # x (B, L) -> inp, tgt, weight, positions (B, 2 L), mask (B, 2 L, 2 L), before (B, 2 L, W - 1)
    """Block diffusion: blocks from left to right, the bytes of each by masked diffusion (BD3-LM, Arriola et al. 2025).

        inp   t [M]  [M] c | t  h  e  c     a noisy copy, then the clean one; blocks of bd3lm_block bytes, here 2
        tgt   .  h    e  . | .  .  .  .     loss at the l masked bytes of a block, times n / l, divided by B * L

    A block attends to itself both ways and to the clean blocks before it; both copies count positions from 0. The loss
    bounds -log p(x): with one block it is mdlm's, with blocks of one byte exactly -log p, as clm's. Convolution and
    n-grams, too, read clean bytes before a noisy block, as the cache holds them when a text is written. l is uniform
    (--uniform_from .7: as in mdlm), for each block by itself. sample.py fills a block from the left, a byte a pass.
    Departures: the authors first train a model of one block, and draw masking rates from a part of (0, 1)."""
    L = x.size(1)
    n = hp.bd3lm_block
    masked, weight = mask_blocks(x, n, g, hp)
    noisy = x.masked_fill(masked, MASK)
    i = torch.arange(L, device=g.device)
    block = i // n
    own = block == block[:, None]                                                   # (L, L)
    earlier = block < block[:, None]
    mask = torch.cat((torch.cat((own, earlier), dim=1), F.pad(own | earlier, (L, 0))))
    in_block = torch.arange(1, CONTEXT_WIDTH, device=g.device) <= (i % n)[:, None]  # (L, W - 1): of the own block
    before = ids_before(noisy).where(in_block, ids_before(x))
    return dict(inp=torch.cat((noisy, x), dim=1), tgt=F.pad(x.where(masked, IGNORE_INDEX), (0, L), value=IGNORE_INDEX),
                prefix=0, weight=F.pad(weight / x.numel(), (0, L)), mask=mask.expand(len(x), -1, -1),
                before=torch.cat((before, ids_before(x)), dim=1), positions=i.repeat(2).expand(len(x), -1))


# as many clean bytes as the other objectives read; small blocks learn no more with a constant rate first
BD3LM_DEFAULTS = {"block_size": {"cpu": 512, "cuda": 2048}, "batch_size": {"cpu": 16, "cuda": 64}, "uniform_from": 0.0}
OBJECTIVES["bd3lm"] = dataclasses.replace(
    OBJECTIVES["mdlm"], name="bd3lm", corrupt=bd3lm, help="blocks from left to right, each by diffusion",
    use_help="continue a prompt", attention="blocks", n_bytes=lambda T, hp: T // 2,
    flags=DIFFUSION_FLAGS | {"bd3lm_block": Flag(4, "bytes of a block", 1)},
    flag_defaults=DIFFUSION_DEFAULTS | BD3LM_DEFAULTS, supports_doc_mask=False,
    uses=(ContinueBlocks(lambda hp: hp.bd3lm_block),))


# ---- rotation: find the seam
def rotation(x, g, hp):  # x (B, T) -> inp (B, T), labels (B,)
    """Rotation: where was a rotated window cut?

        window   t h e   c a t          attention: bidirectional
        inp      c a t t h e            the label is 3, the position of the window's first byte; one label a row

    BART (Lewis et al. 2020) rotates documents and reconstructs them; here the question is asked directly, and a
    pointer over the T positions answers it. The rotation is uniform over 0..T - 1."""
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
    attention="bidirectional", n_bytes=aligned_window, heads=lambda config, hp: {"seam": scalar_head(config)},
    loss=rotation_loss,
    flag_defaults={"block_size": 64, "batch_size": {"cpu": 64, "cuda": 512}},       # 16 rows of 256 do not learn
    uses=(Predict("seam", lambda model, x: score_positions(model, x, "seam")),))


# ---- hybrid: masked and causal rows
def hybrid(x, g, hp):  # x (B, T + 1) -> inp, tgt (B, T), prefix (B,)
    """Masked and causal rows in one batch, through one head (GPT-BERT, Charpentier and Samuel 2024).

        inp   t [M] e   c    tgt   h . . . .      masked row: bidirectional; position i - 1 predicts the masked byte i
        inp   t  h  e   c    tgt   h e   c a      causal row

    hybrid_ratio of the rows are masked, one at least and not all; the loss is the mean of each kind, weighed by
    hybrid_ratio. The first byte, which no position predicts, is never masked; under --doc_mask the first byte of a
    document is predicted without it. Departures: a quarter of the rows is masked, where the authors mask nearly all of
    them (15 of 16); single bytes are masked, not short spans, at a constant rate (theirs falls from .3 to .15), and
    none more often because it was masked seldom before; no z-loss."""
    B, T = x.size(0), x.size(1) - 1
    # masked rows are spread evenly: row i is one where i * n_masked / B passes a whole number
    n_masked = min(max(1, int(B * hp.hybrid_ratio + 1e-6)), B - 1)
    is_masked = (torch.arange(B + 1, device=g.device) * n_masked // B).diff() > 0   # (B,)
    k = min(T - 1, max(1, round(hp.mask_rate * T)))
    positions = 1 + random_positions(B, T - 1, k, g)
    noisy, tgt = mask_bytes(x[:, :T], positions, g)
    tgt = F.pad(tgt[:, 1:], (0, 1), value=IGNORE_INDEX)                             # shifted as in clm
    inp = noisy.where(is_masked[:, None], x[:, :-1])
    tgt = tgt.where(is_masked[:, None], x[:, 1:])
    # the targets of each kind weigh the same, and together as much as its share
    n_targets = torch.where(is_masked, n_masked * k, (B - n_masked) * T)
    weight = torch.where(is_masked, hp.hybrid_ratio, 1 - hp.hybrid_ratio) / n_targets               # (B,)
    return dict(inp=inp, tgt=tgt, prefix=torch.where(is_masked, T, 0), weight=weight[:, None].expand(B, T))


def hybrid_loss(model, batch, hp):
    loss, _ = token_loss(model, batch, hp)
    return loss, {}                             # of both kinds of rows, so it has no perplexity


OBJECTIVES["hybrid"] = Objective(
    "hybrid", corrupt=hybrid, help="masked rows and causal rows", use_help="continue, fill [MASK]", attention="both",
    min_rows=2, loss=hybrid_loss,
    flags=MASK_RATE | {"hybrid_ratio": Flag(0.25, "share of masked rows, of which there is one at least", 0.0, 1.0)},
    supports_doc_mask=True, bpb="causal", uses=(Fill((EOT,), shift=1), Continue()))


# ---- --objective: one of these, or a mixture; always a list of members, of one where it is no mixture
@dataclass(frozen=True)
class Member:
    objective: Objective
    weight: float                               # share of the steps that train it; the weights add up to 1
    n: int                                      # raw bytes that fill a row
    hp: Namespace                               # the run's settings, with the member's own flags


def get_members(hp):  # hp.objective, such as "clm" or "clm:0.5,mlm:0.5" -> [Member]
    """Fails on a name that does not exist, naming the nearest, and on rows that the settings make impossible."""
    names = member_names(hp.objective)
    for name in names:
        if name not in OBJECTIVES:
            near = difflib.get_close_matches(name, OBJECTIVES, 1)
            fail(f"--objective {name}: unknown. Try {near[0] if near else 'one of ' + ' '.join(OBJECTIVES)}")
    try:
        weights = [float(part.partition(":")[2]) if ":" in part else 1.0 for part in hp.objective.split(",")]
    except ValueError:
        weights = [0.0]
    if not all(1e-9 < w < 1e9 for w in weights) or len(set(names)) < len(names):
        fail(f"--objective {hp.objective}: wants different names with positive weights, as in clm:0.5,mlm:0.5")
    members = []
    for name, weight in zip(names, weights):
        objective = OBJECTIVES[name]
        own = Namespace(**vars(hp) | hp.members.get(name, {}))
        rows = hp.batch_size if objective.compares_rows else hp.batch_size * hp.accum
        if rows < objective.min_rows:
            fail(f"--batch_size {hp.batch_size}: {name} needs {objective.min_rows} rows. "
                 f"Try --batch_size {objective.min_rows}")
        n = objective.n_bytes(hp.block_size, own)               # fails where rows are impossible
        members.append(Member(objective, weight / sum(weights), n, own))
    return members


def member_names(objective):  # hp.objective, such as "clm:0.5,mlm:0.5" -> ["clm", "mlm"]
    return [part.partition(":")[0].strip() for part in objective.split(",")]
