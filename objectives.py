"""Every pre-training objective: how clean windows become a batch, and how a batch becomes a loss.

B rows, T positions of a row, n raw bytes that fill one, P positions of the prefix, C width, V vocabulary; k
chosen positions, S spans, N noise bytes, L bytes of a text, of which m are present

An objective is one page: a few functions, and its entry below them. Most entries leave out what is usual
(USUAL).
    make(x (B, n), g, hp) -> batch         dict of tensors with B rows each; "mask" may be a name instead
    window(T, hp) -> n                     raw bytes that fill a row of T positions
    heads(sizes, hp) -> {name: module}     what is needed beyond the model's byte head, in model.heads
    terms(batch, hp) -> {term: (count, coefficient)}      known before the forward pass
    loss(model, batch, hp) -> {term: sum}  in nats; figures have coefficient 0
hp holds every setting, as run.get_config returns them. A term named "nll" is nats of the byte head: its mean
is also printed as perplexity. Corruption draws from g alone and has static shapes: no loop over rows, nothing
read back from the device. Exact counts (k masked bytes, S spans of N bytes in a full row) stand where papers
draw each position by itself, so that no row is ever without a target. The total is the sum over terms of
coefficient * sum / count, with sums and counts over the whole global batch: a mean of micro-batch means would
weigh targets unequally.
"""
import dataclasses
import difflib
import math
from argparse import Namespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from data import CLS, EOT, MASK, MID, MODE_R, MODE_S, MODE_X, N_SENTINELS, PAD, PRE, SENTINEL, SEP, SUF, V, fail
from model import Block, Cache, Linear, Transformer, norm, run_blocks

IGNORE = -100                                   # in a target: no loss at this position
N_BYTES = 256
EVAL_ROWS = 32                                  # rows of a validation batch, whatever the batch size
OBJECTIVES = {}                                 # name: entry, in the order of this file


# ---- building blocks: drawing

def choose(B, T, k, g):  # -> (B, k) long: k distinct positions of each row, all subsets equally likely
    return torch.rand(B, T, generator=g, device=g.device).topk(k, dim=1).indices


def compose(B, m, k, g):  # -> (B, k) long: positive parts that add up to m, all compositions equally likely
    cuts = choose(B, m - 1, k - 1, g).sort(dim=1).values + 1                        # k - 1 of the m - 1 gaps
    return F.pad(F.pad(cuts, (1, 0)), (0, 1), value=m).diff(dim=1)


def stratified(B, g):  # -> (B,) in [0, 1): one number from each B-th of the range, in random order
    order = torch.rand(B, generator=g, device=g.device).argsort()
    return (order + torch.rand(B, generator=g, device=g.device)) / B


def lengths(B, low, high, g, full=0.5):  # -> (B, 1) long: high in that share of the rows, else uniform over low..high
    """For rows whose end a model must tell: with full rows alone it would know EOT by its place."""
    u = torch.rand(2, B, 1, generator=g, device=g.device)
    return torch.where(u[0] < full, high, low + (u[1] * (high - low + 1)).long()).clamp(max=high)


def random_bytes(shape, g):  # -> long in 1..255: never the end of a document, never a special id
    return torch.randint(1, N_BYTES, shape, generator=g, device=g.device)


def ranks(key):  # (B, n) -> (B, n) long: how many keys of its row come before each
    return key.argsort(dim=1).argsort(dim=1)    # the second one inverts the first


def apportion(weights, total):  # [w] -> [rows] that add up to total, by largest remainder
    shares = [w / sum(weights) * total for w in weights]
    rows = [int(share) for share in shares]
    for i in sorted(range(len(rows)), key=lambda i: rows[i] - shares[i])[:total - sum(rows)]:
        rows[i] += 1
    return rows


# ---- building blocks: laying out rows

def column(x, value):  # (B, 1) of one id
    return x.new_full((x.size(0), 1), value)


def pack(ids, keep, T):  # ids, keep (B, W) -> (B, T): the kept ids moved to the left, PAD after them
    at = torch.where(keep, keep.cumsum(1) - 1, T).clamp(max=T)                      # what is dropped: column T
    return ids.new_full((ids.size(0), T + 1), PAD).scatter(1, at, ids)[:, :T]


def seq2seq(source, keep, target, keep_target, T, mode=None):  # ids, keep (B, W), (B, W2) -> batch of (B, T)
    """One prefix row in place of an encoder and a decoder: [mode] source SEP target EOT PAD.

    Source and SEP are read in both directions; each position from SEP on predicts its next id, up to EOT."""
    one, mode = column(source, SEP), [] if mode is None else [column(source, mode)]
    always = torch.ones_like(one, dtype=torch.bool)
    z = torch.cat([*mode, source, one, target, column(source, EOT)], dim=1)
    keep = torch.cat([always] * len(mode) + [keep, always, keep_target, always], dim=1)
    z = pack(z, keep, T + 1)
    P = len(mode) + keep[:, len(mode):len(mode) + source.size(1)].sum(1) + 1        # positions up to SEP
    end = keep.sum(1) - 1                                                           # EOT's
    at = torch.arange(T, device=z.device)
    loss = (at >= P[:, None] - 1) & (at < end[:, None])
    return dict(inp=z[:, :-1], tgt=z[:, 1:].where(loss, IGNORE), mask=P)


def mask_bytes(x, at, g):  # x (B, T), at (B, k) -> noisy (B, T), targets (B, T) with IGNORE
    """Of the bytes at the given positions 80% become MASK, 10% a random byte, 10% stay; all are targets."""
    clean = x.gather(1, at)                                                         # (B, k)
    u = torch.rand(at.shape, generator=g, device=g.device)
    noise = torch.where(u < 0.8, MASK, torch.where(u < 0.9, random_bytes(at.shape, g), clean))
    return x.scatter(1, at, noise), torch.full_like(x, IGNORE).scatter(1, at, clean)


# ---- building blocks: losses

def nats(logits, tgt):  # logits (..., V), tgt (...) -> sum of the cross-entropy at every position with a target
    return F.cross_entropy(logits.flatten(0, -2), tgt.flatten(), ignore_index=IGNORE, reduction="sum")


def told(h, tgt):  # states (B, T, C), tgt (B, T) -> states (N, C), targets (N,), rows (N,)
    """Of the positions with a target, since no others need logits; of all positions on a GPU, where the number of
    those would have to be waited for, and under a compiler."""
    row = torch.arange(len(tgt), device=tgt.device).repeat_interleave(tgt.size(1))
    h, tgt = h.flatten(0, 1), tgt.flatten()
    if h.device.type != "cpu" or torch.compiler.is_compiling():
        return h, tgt, row
    at = (tgt != IGNORE).nonzero()[:, 0]
    return h.index_select(0, at), tgt[at], row[at]


def byte_nats(model, h, tgt):  # states (B, T, C), tgt (B, T) -> (N,) cross-entropy of the byte head, rows (N,)
    h, tgt, row = told(h, tgt)
    return F.cross_entropy(model.logits(h), tgt, ignore_index=IGNORE, reduction="none"), row


def yes_no(logits, labels):  # logits, labels (...) of 0 and 1 -> sum of the binary cross-entropy
    return F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="sum")


def count_targets(batch):
    return (batch["tgt"] != IGNORE).sum()


def token_terms(batch, hp):
    return {"nll": (count_targets(batch), 1.0)}


def hidden_states(model, batch):  # -> (B, T, C)
    """Of a batch's inputs under its mask. Hands on the lookups by which a training step trains the n-gram table."""
    return model(batch["inp"], batch["mask"], batch.get("doc"), at=batch.get("at"), lookups=batch.get("lookups"))


def token_loss(model, batch, hp):
    """Cross-entropy of the byte head at every position with a target, in nats."""
    h = hidden_states(model, batch)                                                 # (B, T, C)
    return {"nll": byte_nats(model, h, batch["tgt"])[0].sum()}


def evaluating():  # figures that cost something are left out of training
    return not torch.is_grad_enabled()


def readout(C):  # a number for each state; starts at zero, so that an untrained model is at chance
    layer = nn.Linear(C, 1)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


# ---- entries

def next_byte(T, hp):  # window of the objectives that predict each row's next byte
    return T + 1


def same_length(T, hp):  # window of the objectives that work in place
    return T


def from_left(hp):
    return "causal", [], []


def in_place(hp):
    return [], [], 0


USUAL = dict(
    # what training asks
    window=next_byte,
    heads=lambda sizes, hp: {},
    terms=token_terms,
    loss=token_loss,
    n_outputs=N_BYTES,      # the byte head predicts ids below this one
    settings={},            # {flag: (default, help)}, with lowest and highest, or with choices
    defaults={},            # other defaults of the flags that all objectives share
    whole=False,            # wants windows without a NUL inside
    packs=False,            # keeps the text's order, so that --doc_mask can keep attention inside a document
    targets=None,           # counts positions with loss, where terms count something else
    # bits per byte, left to right: "loss" (its own loss says them), "causal" (plain causal rows do), "bound" (its
    # bounds(model, batch, hp) -> (B,) bound them, in nats a row), or None
    bpb=None,
    bounds=None,            # sample.py asks for texts shorter than a row too
    hides=True,             # of prefix rows: no byte of the target stands in the source; the tests look
    positions=lambda ids, P: None,          # for RoPE, of rows (B, T) with prefixes (B,), where not 0, 1, 2, ...
    # how it is used: sample.py's mode, and how a text is laid out as in training; None where its settings never
    # trained it so
    mode="continue",        # continue, fill, infill, repair, mark, follow, search or seam
    continues=lambda hp: None,              # a prompt: (mask "causal" or "prefix", ids before, ids after)
    fills=lambda hp: None,  # a text with MASKs: (ids before, ids after, shift); byte i is read shift before it
    orders=(),              # in which MASKs may be filled, of sample.unmask's; the first is usual
    ask=lambda pieces, m, hp: None,         # a text with holes: (ids up to the first answer, P). m: bytes expected
                            # in a hole, in compare.py its length, in sample.py 4
    ends=None,              # (k) -> the id that ends the answer for hole k
    holes=1,                # at most
    drafter=None,           # (model, hp) -> what drafts for sample.speculate, or None; see mtp
    answer=None,            # what mode mark, follow, search or seam asks of the model; see sample.py
    reaches=None,           # (steps, what a model of default size does after them): sample.py says it of earlier ones
)


def add(name, **entry):
    """An objective of that name: make, help and use (for --help), mask (in words), and what is not USUAL."""
    unknown = set(entry) - set(USUAL) - {"make", "help", "use", "mask"}
    assert not unknown and name not in OBJECTIVES, f"{name}: {unknown or 'is there already'}"
    entry = USUAL | entry | {"name": name}
    OBJECTIVES[name] = entry | {"make": with_positions(entry["make"], entry["positions"])}


def with_positions(make, positions):  # -> make, whose batches hold what positions says of their rows, as "at"
    def made(x, g, hp):
        batch = make(x, g, hp)
        at = positions(batch["inp"], batch["mask"])
        return batch if at is None else batch | {"at": at}
    return made


# ---- clm: causal language modeling

def clm(x, g, hp):  # x (B, T + 1) -> inp, tgt (B, T)
    """Causal language modeling: each byte from those before it (Radford et al. 2018).

        inp   t h e   c a      who sees whom: causal
        tgt   h e   c a t      loss at all T positions
    """
    return dict(inp=x[:, :-1], tgt=x[:, 1:], mask="causal")


add("clm", make=clm, help="each byte from those before it", use="continue a prompt", mask="causal",
    bpb="loss", packs=True, continues=from_left, reaches=(8000, "codes held-out text in 1.18 bits per byte"))
CAUSAL = OBJECTIVES["clm"]                      # on its rows others measure their bits per byte


# ---- mlm: masked language modeling

def mlm(x, g, hp):  # x (B, T) -> inp, tgt (B, T)
    """Masked language modeling: some bytes from all the others (BERT, Devlin et al. 2019).

        inp   t [M] e   c a q    who sees whom: bidirectional
        tgt   .  h  . . .  . t   loss at the chosen positions: 80% MASK, 10% a random byte, 10% left as they are

    Exactly round(mask_rate * T) positions of each row, as in BERT's own code, drawn anew for every batch, as
    in RoBERTa (Liu et al. 2019). Departures: bytes in place of word pieces; 30% of them, BERT's 15 teach less a
    row (Wettig et al. 2023); a random byte is never a special id."""
    B, T = x.shape
    inp, tgt = mask_bytes(x, choose(B, T, max(1, round(hp.mask_rate * T)), g), g)
    return dict(inp=inp, tgt=tgt, mask="bidirectional")


MASK_RATE = {"mask_rate": (0.3, "share of positions to predict", 0.001, 1.0)}
PATIENT = {"max_passes": 16.0}                  # of an objective that corrupts a text anew each time: it overfits later
add("mlm", make=mlm, help="masked bytes from all the others", use="fill [MASK]", mask="bidirectional",
    window=same_length, settings=MASK_RATE, packs=True, mode="fill", fills=in_place,
    orders=("confident", "left"), defaults=PATIENT, reaches=(8000, "fills a hole of 4 bytes at 1.10 bits a byte"))


# ---- prefix: prefix language modeling

def prefix_lm(x, g, hp):  # x (B, T + 1) -> inp, tgt (B, T), mask (B,)
    """Prefix language modeling: a suffix from a prefix that is read in both directions (T5, Raffel et al.
    2020).

        inp   t h e   c a      who sees whom: the first P positions all of each other, the rest causal (P = 3)
        tgt   . .   c a t      loss from position P - 1 on, which predicts the first byte after the prefix

    P is uniform over 1 .. prefix_max * T (at most T - 1), drawn per row. Positions before P - 1 see the byte that
    they would predict, so they have no loss. Departure: T5 splits a text anywhere; prefixes of at most half a row
    leave three quarters of the positions to learn from."""
    B, T = x.size(0), x.size(1) - 1
    longest = min(max(1, round(hp.prefix_max * T)), T - 1)
    P = torch.randint(1, longest + 1, (B,), generator=g, device=g.device)
    suffix = torch.arange(T, device=x.device) >= P[:, None] - 1                     # (B, T)
    return dict(inp=x[:, :-1], tgt=x[:, 1:].where(suffix, IGNORE), mask=P)


add("prefix", make=prefix_lm, help="a suffix from a prefix read both ways", use="read a prompt, continue",
    mask="prefix", bpb="causal", packs=True, continues=lambda hp: ("prefix", [], []),
    reaches=(8000, "codes second halves of windows in 1.13 bits per byte"),
    settings={"prefix_max": (0.5, "longest prefix, as a share of the block", 0.0, 1.0)})


# ---- span: span corruption

def span(x, g, hp):  # x (B, n) -> inp, tgt (B, T), mask (B,)
    """Span corruption: a text's noise spans, from the text with a sentinel in place of each (T5, Raffel et
    al. 2020).

        z     t h [0] c a t   s [1] SEP [0] e   [1] a t EOT     z one longer than a row; inp z[:-1], tgt z[1:]
              \\____ source: both ways ____/  \\__ causal, loss __/

    Exactly N = round(n * span_rate) noise bytes in S = round(N / span_mean) spans in a full row, all placements in
    which no two spans touch equally likely. One row in eight is cut short, in a span too, after 8 bytes or more and
    one of noise: else EOT would be known by its place, and no text as short as a prompt be trained. Departures: T5's
    own code always starts with a kept token and ends with a noise one, which makes the last position noise in every
    row; here both edges are free. Sentinels count up, and, as in the code but not in the paper's figure, no final
    sentinel follows the last span; 30% of the bytes are noise, T5's 15 teach less a row; spans of 6 bytes on average,
    where T5 has 3 tokens and ByT5 (Xue et al. 2022) 20 bytes. A span's positions go on from its place in the source,
    kin of GLM's (Du et al. 2022), which leaves ROOM for it; a longer one shares positions with what follows."""
    _, N, S = fit_spans(hp.block_size, hp.span_rate, hp.span_mean)
    return span_rows(x, N, S, hp.block_size, g)


def span_rows(x, N, S, T, g, mode=None):  # x (B, n) -> batch of (B, T)
    B, n = x.shape
    first, noise = place_spans(B, n, N, S, g)                                       # (B, n) bool each
    m = lengths(B, min(8, n), n, g, full=7 / 8)                                     # (B, 1)
    m = m.maximum(first.long().argmax(1, keepdim=True) + 1)                         # a noise byte at least
    present = torch.arange(n, device=g.device) < m
    first, noise = first & present, noise & present
    sentinel = SENTINEL - 1 + first.cumsum(1)                                       # of the last span begun
    # source: a span's first byte becomes its sentinel, its others go
    source, keep = torch.where(first, sentinel, x), first | present & ~noise
    # target: the noise bytes, and before each span's first one its sentinel; every byte has a slot before it
    target = torch.stack((sentinel, x), dim=2).flatten(1)                           # (B, 2 n)
    return seq2seq(source, keep, target, torch.stack((first, noise), dim=2).flatten(1), T, mode)


ROOM, ROOM_X = 8, 64                            # positions that a sentinel of the source leaves for its span


def span_positions(ids, P):  # ids (B, T), prefixes (B,) -> (B, T)
    """Those of the row, but that each sentinel of the source leaves ROOM after it (ROOM_X in ul2's rows of long spans),
    where the bytes that follow it in the target stand:

        ids   t h [0]  c  a  t     s [1] SEP [0] e   [1]  a  t
        at    0 1  2  11 12 13 14 15 16   25   2 3 4  16 17 18
    """
    i, N = torch.arange(ids.size(1), device=ids.device).expand_as(ids), N_SENTINELS
    source, sentinel = i < P[:, None], ids >= SENTINEL
    asks = (source & sentinel).long()
    room = torch.where(ids[:, :1] == MODE_X, ROOM_X, ROOM)
    i = i + room * (asks.cumsum(1) - asks)
    def places(those):  # -> (B, N + 1): of each sentinel; in the last column of what is none
        return i.new_zeros(len(ids), N + 1).scatter(1, torch.where(sentinel & those, ids - SENTINEL, N), i)
    begun = (sentinel & ~source).cumsum(1)      # they ascend: the last one of the target so far, 0 for none
    back = (places(source) - places(~source)).gather(1, (begun - 1).clamp(min=0))
    return torch.where(begun > 0, i + back, i)


def place_spans(B, n, N, S, g):  # -> first, noise (B, n) bool: S spans of N bytes in all, none touching another
    length = compose(B, N, S, g)                                                    # (B, S)
    # S + 1 stretches of kept bytes around them; the two at the edges may be empty: drawn one byte too long
    kept = compose(B, n - N + 2, S + 1, g)[:, :-1].cumsum(1) - 1                    # (B, S): kept bytes before
    start = kept + length.cumsum(1) - length
    # +1 where a span starts, -1 after its end: the running sum is 1 inside
    edge = torch.zeros(B, n + 1, dtype=torch.long, device=g.device)
    edge = edge.scatter(1, start, 1).scatter(1, start + length, -1)
    return edge[:, :n] == 1, edge[:, :n].cumsum(1) == 1


def fit_spans(T, rate, mean, extra=0):  # -> n, N, S: raw bytes, noise bytes and spans of a row
    """The most raw bytes whose source, SEP, target and EOT, with `extra` ids beside, fill T + 1 ids."""
    for n in range(T - 1 - extra, 1, -1):
        N = min(max(round(n * rate), 1), n - 1)
        S = max(1, round(N / mean))
        if n + 2 * S + 2 + extra <= T + 1:
            break
    if S > min(N, n - N + 1):
        fail(f"spans of mean {mean:g} at rate {rate:g} would touch in rows of --block_size {T}. "
             "Try a lower rate or longer spans")
    if S > N_SENTINELS:
        fail(f"spans of mean {mean:g} at rate {rate:g} need {S} sentinels, there are {N_SENTINELS}. "
             "Try longer spans or a smaller --block_size")
    return n, N, S


def span_ask(pieces, m, hp, mode=()):
    """A source that does not end with a hole gets one more sentinel: in training EOT mostly stood in one place."""
    ids = [*mode, *pieces[0]]
    for k, piece in enumerate(pieces[1:]):
        ids += [SENTINEL + k, *piece]
    ids += [SENTINEL + len(pieces) - 1] if pieces[-1] else []
    return ids + [SEP, SENTINEL], len(ids) + 1


SPANS = {"span_rate": (0.3, "share of bytes in spans", 0.001, 0.999),
         "span_mean": (6.0, "mean length of a span, in bytes", 1.0, 1e6)}
SHARP = {"attn_scale": 2.0}                     # what stands far off is found sooner
add("span", make=span, help="spans of a text after their sentinels", use="fill holes", mask="prefix",
    window=lambda T, hp: fit_spans(T, hp.span_rate, hp.span_mean)[0], settings=SPANS, whole=True, n_outputs=V,
    positions=span_positions, mode="infill", ask=span_ask, defaults=SHARP | PATIENT,
    holes=N_SENTINELS - 1, ends=lambda k: SENTINEL + k + 1,
    reaches=(8000, "restores 37% of holes of 4 bytes, codes 16 at 1.22 bits a byte"))


# ---- ul2: a mixture of denoisers

UL2_X = 0.5, 32                                 # rate and mean of the extreme denoiser's spans


def ul2(x, g, hp):  # x (B, n) -> inp, tgt (B, T), mask (B,)
    """A mixture of denoisers, each named by the row's first id (UL2, Tay et al. 2022).

        [R] source SEP spans EOT     half of the rows: short spans, as in span
        [S] prefix SEP rest EOT      a quarter: the rest of a text, cut anywhere
        [X] source SEP spans EOT     a quarter: half of the text in spans of mean 32

    The shares are the same in every batch. Departures: three denoisers stand for the paper's seven, whose S cuts off
    a quarter; half of the rows are R (U-PaLM, Tay et al. 2022, gives S as many); spans as in span, but that X leaves
    them ROOM_X. Targets of all rows are pooled in one mean: S and X have about as many, more than half again R's."""
    T, parts, batches = hp.block_size, denoisers(hp.block_size, hp), []
    for (_, mode, n, N, S), rows in zip(parts, apportion([share for share, *_ in parts], x.size(0))):
        raw, x = x[:rows, :n], x[rows:]         # a row uses its first n bytes
        if mode == MODE_S:
            cut = torch.randint(1, n, (rows, 1), generator=g, device=g.device)
            left = torch.arange(n, device=g.device) < cut                           # (rows, n)
            batches.append(seq2seq(raw, left, raw, ~left, T, mode))
        else:
            batches.append(span_rows(raw, N, S, T, g, mode))
    return {k: torch.cat([b[k] for b in batches]) for k in batches[0]}


def denoisers(T, hp):  # -> [(share of rows, mode id, n, N, S)]
    return [(0.5, MODE_R, *fit_spans(T, hp.span_rate, hp.span_mean, extra=1)), (0.25, MODE_S, T - 2, 0, 0),
            (0.25, MODE_X, *fit_spans(T, *UL2_X, extra=1))]


def ul2_window(T, hp):
    if hp.batch_size * hp.accum < 4:
        fail(f"--objective ul2: wants 4 rows a step, and has {hp.batch_size * hp.accum}. Try a larger --batch_size")
    return max(n for _, _, n, _, _ in denoisers(T, hp))


def ul2_ask(pieces, m, hp):
    return span_ask(pieces, m, hp, [MODE_X if m > 16 else MODE_R])


add("ul2", make=ul2, help="short spans, long spans, suffixes", use="fill holes, continue", mask="prefix",
    window=ul2_window, settings=SPANS, whole=True, n_outputs=V, positions=span_positions, mode="infill", ask=ul2_ask,
    defaults=SHARP | {"max_passes": 8.0},
    continues=lambda hp: ("prefix", [MODE_S], [SEP]), ends=lambda k: SENTINEL + k + 1, holes=N_SENTINELS - 1,
    reaches=(8000, "restores 34% of holes of 4 bytes, codes 16 at 1.20 bits a byte"))


# ---- fim: fill in the middle

def fim(x, g, hp):  # x (B, T + 1) -> inp, tgt (B, T)
    """Fill in the middle: a text rearranged so that its middle comes last (Bavarian et al. 2022).

        PSM   PRE prefix SUF suffix MID middle EOT       who sees whom: causal
        SPM   PRE SUF suffix MID prefix middle EOT       loss at all T positions

    Two cuts uniform over all places, so that each section is a third on average; a row is rearranged with
    probability fim_rate, of those SPM (the paper's variant 2) with fim_spm_rate; the others stay plain text.
    Windows lie within one document where they can (context-level FIM). Half of the rearranged rows are so to
    their end; in the others another row's text follows EOT, as another document would: else EOT would be
    known by its place in the row. A batch of one row has no other, and is rearranged to its end."""
    B, n = x.size(0), x.size(1) - 4                                                 # four ids join the bytes
    i, m = torch.arange(n, device=g.device), lengths(B, 1 if B > 1 else n, n, g)    # m (B, 1) are rearranged
    cut = (torch.rand(B, 2, generator=g, device=g.device) * (m + 1)).long().sort(dim=1).values
    a, b = cut[:, :1], cut[:, 1:]               # (B, 1): prefix i < a, middle a <= i < b, suffix b <= i < m
    u = torch.rand(B, 2, 1, generator=g, device=g.device)
    spm, moved = u[:, 0] < hp.fim_spm_rate, u[:, 1] < hp.fim_rate                   # (B, 1)

    # every piece has its number in the row's order, and one stable sort puts the row together
    prefix, suffix = torch.where(spm, 4, 1), torch.where(spm, 2, 3)
    pieces = torch.where(i < a, prefix, torch.where(i < b, 5, torch.where(i < m, suffix, 7)))       # (B, n)
    controls = [column(x, 0), torch.where(spm, 1, 2), torch.where(spm, 3, 4), column(x, 6)]         # (B, 1) each
    order = torch.cat((pieces, *controls), dim=1).argsort(dim=1, stable=True)
    text = torch.where(i < m, x[:, :n], x[:, :n].roll(1, 0))
    ids = torch.cat((text, *(column(x, i) for i in (PRE, SUF, MID, EOT))), dim=1)   # (B, n + 4)
    return clm(torch.where(moved, ids.gather(1, order), x), g, hp)


def fim_ask(pieces, m, hp):
    """With the suffix first where it was trained so: the middle then goes on from the prefix."""
    prefix, suffix = pieces
    if hp.fim_rate == 0:
        return None
    if hp.fim_spm_rate > 0:
        return [PRE, SUF, *suffix, MID, *prefix], 0
    return [PRE, *prefix, SUF, *suffix, MID], 0


add("fim", make=fim, help="text with its middle moved to the end", use="write between two texts", mask="causal",
    bpb="causal", whole=True, n_outputs=MID + 1, mode="infill", ask=fim_ask, ends=lambda k: EOT,
    continues=lambda hp: from_left(hp) if hp.fim_rate < 1 else None,
    reaches=(8000, "codes text in 1.27 bits per byte, restores 37% of holes of 4 bytes"),
    settings={"fim_rate": (0.5, "share of rows that are rearranged", 0.0, 1.0),
              "fim_spm_rate": (0.5, "share of those with the suffix first", 0.0, 1.0)})


# ---- mtp: multi-token prediction

def mtp(x, g, hp):  # x (B, T + n) -> inp, tgt (B, T), tgt_far (B, T, n - 1)
    """Multi-token prediction: the next n = mtp_heads bytes at once (Gloeckle et al. 2024; DeepSeek-AI 2024).

        inp       t h e   c      who sees whom: causal
        tgt       h e   c a      head 1, the model's own
        tgt_far   e   c a t      head 2, and so on; each has loss at all T positions

    mtp_kind parallel (Gloeckle): head k reads norm(h + W_k h) through the shared byte head. Departure: the paper
    takes a transformer layer per head; its linear heads score nearly the same.
    sequential (DeepSeek-V3): module k joins the state of module k - 1 at i (of the model, for the first) with the
    embedding of byte i + k, runs a block of its own and predicts byte i + k + 1 through the byte head.
    The loss is the model's plus mtp_weight / (n - 1) times the others' sum, as DeepSeek-V3's; Gloeckle's plain sum,
    --mtp_weight 3 for 4 heads, cost .14 bits a byte after 1,200 steps. With mtp_heads 1 both kinds are clm exactly."""
    T = x.size(1) - hp.mtp_heads
    ahead = x[:, 1:].unfold(1, hp.mtp_heads, 1)                 # (B, T, n): bytes t + 1 .. t + n
    return dict(clm(x[:, :T + 1], g, hp), tgt_far=ahead[:, :, 1:])


class JoinBlock(Block):
    def __init__(self, sizes):
        super().__init__(sizes)
        self.join = Linear(2 * sizes.n_embd, sizes.n_embd)


def deeper(model, block, h, ids, doc=None, cache=None):  # states (B, T, C), ids (B, T) -> states (B, T, C)
    e = norm(model.embed(ids.clamp(min=0)).to(h.dtype))
    x = block.join(torch.cat((h, e), dim=-1))                   # h is normed already
    return norm(run_blocks([block], x, model.sizes, "causal", doc, cache))


def mtp_heads(sizes, hp):
    n, C = hp.mtp_heads, sizes.n_embd
    if n == 1:
        return {}
    if hp.mtp_kind == "parallel":
        return {"mtp": Linear(C, C, stack=n - 1, zero=True)}
    return {"mtp": nn.ModuleDict({"blocks": nn.ModuleList(JoinBlock(sizes) for _ in range(n - 1))})}


def mtp_ahead(model, h):  # (..., C) -> (..., n - 1, C): what the byte head reads for bytes 2, 3, ... ahead
    return norm(h[..., None, :] + model.heads["mtp"](h).unflatten(-1, (-1, h.size(-1))))


def mtp_terms(batch, hp):
    N, far = batch["tgt"].numel(), hp.mtp_heads - 1
    weight = hp.mtp_weight / max(1, far)
    return {"nll": (N, 1.0)} | {f"head{k + 2}": (N, weight) for k in range(far)}


def mtp_loss(model, batch, hp):
    h, far = hidden_states(model, batch), batch["tgt_far"]      # (B, T, C), (B, T, n - 1)
    sums = {"nll": nats(model.logits(h), batch["tgt"])}
    if hp.mtp_kind == "parallel" and hp.mtp_heads > 1:
        logits = model.logits(mtp_ahead(model, h))              # (B, T, n - 1, V)
        return sums | {f"head{k + 2}": nats(logits[:, :, k], far[:, :, k]) for k in range(far.size(2))}
    for k in range(far.size(2)):
        ids = batch["tgt"] if k == 0 else far[:, :, k - 1]      # byte i + k + 1 at position i
        h = deeper(model, model.heads["mtp"]["blocks"][k], h, ids, batch.get("doc"))
        sums[f"head{k + 2}"] = nats(model.logits(h), far[:, :, k])
    return sums


class ParallelDrafter:
    """What sample.speculate drafts with: k drafts a pass. tail: what a pass keeps of the model's states (m, C), which
    may be compiled with the model's step. draft: goes on from the tails of the positions that were kept, where ids
    are the block's so far and draw (logits (j, V)) gives j drafts and what they were drawn from (j, 256)."""

    def __init__(self, model, hp):
        self.model, self.k, self.T = model, hp.mtp_heads - 1, hp.block_size

    def restart(self):  # another block
        pass

    def tail(self, h):  # (m, C) -> (m, k, V)
        return self.model.logits(mtp_ahead(self.model, h))

    def draft(self, tails, ids, draw):
        return draw(tails[-1])


class SequentialDrafter(ParallelDrafter):
    """Module 1 reads the last byte, module 2 what module 1 drafted, and so on, each over a cache of its own. What a
    module made of drafts it makes anew when the bytes that came are known."""

    def restart(self):
        C, device = self.model.sizes.n_embd, self.model.embed.weight.device
        self.caches = [Cache(self.model, 1, self.T, n_layer=1) for _ in range(self.k)]
        # states[k]: of module k at every position so far; sure[k]: how many module k + 1 made of bytes that came
        self.states = [torch.zeros(0, C, dtype=self.model.dtype, device=device) for _ in range(self.k + 1)]
        self.sure = [0] * self.k

    def tail(self, h):
        return h

    def draft(self, tails, ids, draw):
        self.states[0] = torch.cat((self.states[0], tails))     # (n, C); the last of the n + 1 ids has none yet
        n, ids, drafts, q = len(self.states[0]), list(ids), [], []
        for k, (block, cache) in enumerate(zip(self.model.heads["mtp"]["blocks"], self.caches)):
            a = self.sure[k]
            cache.move(a - cache.length)
            new = torch.tensor([ids[a + k + 1:n + k + 1]], device=tails.device)     # byte i + k + 1 at position i
            h = deeper(self.model, block, self.states[k][None, a:n], new, cache=cache)[0]           # (n - a, C)
            self.states[k + 1] = torch.cat((self.states[k + 1][:a], h))
            some, p = draw(self.model.logits(h[-1:]))
            self.sure[k] = max(0, n - k)
            ids, drafts, q = ids + some, drafts + some, q + [p]
        return drafts, torch.cat(q)


def mtp_drafter(model, hp):
    if hp.mtp_heads == 1:
        return None
    return (ParallelDrafter if hp.mtp_kind == "parallel" else SequentialDrafter)(model, hp)


add("mtp", make=mtp, help="several next bytes at once", use="continue, drafting ahead", mask="causal",
    window=lambda T, hp: T + hp.mtp_heads, heads=mtp_heads, terms=mtp_terms, loss=mtp_loss, bpb="causal",
    packs=True, continues=from_left, drafter=mtp_drafter,
    reaches=(8000, "codes held-out text in 1.25 bits per byte, and writes 2.25 bytes a pass"),
    settings={"mtp_heads": (4, "bytes predicted at each position", 1, 64),
              "mtp_kind": ("parallel", "parallel heads or sequential modules", ("parallel", "sequential")),
              "mtp_weight": (0.3, "weight of the losses of all bytes but the next, together", 0.0, 1e3)})


# ---- electra: replaced token detection

def electra(x, g, hp):  # x (B, T) -> inp, tgt (B, T), masked (B, k) places, u (B, k)
    """Replaced token detection: which bytes did a small generator make up? (ELECTRA, Clark et al. 2020)

        inp      t [M] e   c [M] t     the generator's, a masked language model
        fake     t  h  e   c  u  t     its samples filled in, which the discriminator reads
        label    0  0  0 0 0  1  0     loss at every position: is the byte another than the original?

    A byte that the generator guesses right counts as original; no gradient passes through the samples;
    weights 1 and electra_weight. As in the authors' code 85% of the chosen bytes are masked, 15% left.
    Departures: positions without replacement; generator and discriminator do not share embeddings; no dense
    layer before the readout."""
    B, T = x.shape
    k = max(1, round(hp.mask_rate * T))
    at, u = choose(B, T, k, g), torch.rand(B, 2, k, generator=g, device=g.device)
    clean = x.gather(1, at)
    inp = x.scatter(1, at, torch.where(u[:, 0] < 0.85, MASK, clean))
    tgt = torch.full_like(x, IGNORE).scatter(1, at, clean)
    return dict(inp=inp, tgt=tgt, masked=at, u=u[:, 1], mask="bidirectional")


def electra_sizes(sizes, hp):  # of the generator: gen_scale times the width, heads as wide where that divides
    H = max(1, round(sizes.n_head * hp.gen_scale))
    C = 2 * H * max(1, round(sizes.n_embd * hp.gen_scale / (2 * H)))
    return dataclasses.replace(sizes, n_head=H, n_embd=C, n_outputs=N_BYTES, ngram_rows=0)


def electra_heads(sizes, hp):
    generator = Transformer(electra_sizes(sizes, hp), getattr(torch, hp.dtype))
    return {"generator": generator, "replaced": readout(sizes.n_embd)}


def electra_fakes(generator, batch):  # -> generator's logits (B, k, V), clean bytes, sampled bytes (B, k)
    at = batch["masked"]
    h = generator(batch["inp"], batch["mask"])
    logits = generator.logits(h.gather(1, at[..., None].expand(-1, -1, h.size(-1))))
    with torch.no_grad():                       # the inverse of the distribution function, at the batch's uniforms
        cdf = logits[..., :N_BYTES].softmax(-1).cumsum(-1)                          # (B, k, 256)
        fake = torch.searchsorted(cdf, (batch["u"] * cdf[..., -1])[..., None], right=True)[..., 0]
    return logits, batch["tgt"].gather(1, at), fake.clamp(max=N_BYTES - 1)


def electra_answer(model, x, lookups=None):  # x (B, T) -> (B, T): log-odds that each byte was replaced
    return model.heads["replaced"](model(x, "bidirectional", lookups=lookups).float())[..., 0]


def electra_terms(batch, hp):
    positions = batch["inp"].numel()
    return {"generator": (batch["masked"].numel(), 1.0), "discriminator": (positions, hp.electra_weight),
            "auc": (positions, 0.0), "replaced": (positions, 0.0)}


def electra_loss(model, batch, hp):
    logits, clean, fake = electra_fakes(model.heads["generator"], batch)
    labels = torch.zeros_like(batch["inp"]).scatter(1, batch["masked"], (fake != clean).long())         # (B, T)
    x = batch["inp"].scatter(1, batch["masked"], fake)                              # (B, T)
    replaced = electra_answer(model, x, batch.get("lookups"))
    sums = {"generator": nats(logits, clean), "discriminator": yes_no(replaced, labels)}
    if evaluating():
        area = auc(replaced.flatten(), labels.flatten())
        sums |= {"auc": area * labels.numel(), "replaced": labels.sum()}
    return sums


def auc(scores, labels):  # (N,), (N,) of 0 and 1 -> chance that a 1 scores above a 0
    """From the sum of the ones' ranks (Mann and Whitney 1947); ties count half; .5 where one of the two is
    missing."""
    scores, labels = scores.cpu().double(), labels.cpu().double()                   # mps has no float64
    order, ones = scores.sort().values, labels.sum()
    rank = (torch.searchsorted(order, scores) + torch.searchsorted(order, scores, right=True) + 1) / 2
    pairs = ones * (len(labels) - ones)
    return ((rank * labels).sum() - ones * (ones + 1) / 2) / pairs if pairs else torch.tensor(0.5)


add("electra", make=electra, help="which bytes a generator made up", use="mark suspicious bytes",
    mask="bidirectional", window=same_length, heads=electra_heads, terms=electra_terms, loss=electra_loss,
    mode="mark", answer=electra_answer, defaults=SHARP | {"mask_rate": 0.15},
    reaches=(8000, "marks the typo first in 68% of texts"),
    settings=MASK_RATE | {"electra_weight": (50.0, "weight of the discriminator's loss", 0.0, 1e6),
                          "gen_scale": (0.25, "width of the generator, as a share of n_embd", 0.001, 4.0)})


# ---- bart: denoising

def bart(x, g, hp):  # x (B, L) -> inp, tgt (B, T), mask (B,)
    """Denoising: the whole clean text from a noisy one (BART, Lewis et al. 2020).

        z     a [M] b d   SEP   a b c d EOT      source both ways; causal, loss on the clean text and EOT

    bart_noise names any of NOISES, which follow each other in the order below. mask, delete, infill and replace share
    a rate, uniform up to bart_rate and drawn per row: each strikes as many bytes. L = (T - 1) // 2 bytes fit a row
    under every noise; half of the rows hold as many, the others fewer: else EOT would be known by its place.
    Departures: BART strikes 30% of every text, which teaches to spoil a cleaner one; it permutes sentences too
    (infill,permute), which its ablations hardly miss and small models do not learn; replace is not BART's: with
    infilling alone a model learns to mend what is marked, and copies a typo; infilled spans never overlap, where
    fairseq's do and miss their rate; all of them become MASK, none a random byte; a sentence also ends with a
    newline."""
    B, L = x.shape
    m = lengths(B, min(8, L), L, g)                                                 # (B, 1) bytes of each row
    present = torch.arange(L, device=x.device) < m
    k = bart_counts(m, hp, g)                                                       # (B, 1)
    noisy, kept = x, present
    for name, noise in NOISES.items():
        if name in hp.bart_noise.split(","):
            noisy, kept = noise(noisy, kept, k, g, hp)
    return seq2seq(noisy, kept, x, present, hp.block_size)


def bart_positions(ids, P):  # ids (B, T), prefixes (B,) -> (B, T)
    """Those of the row, but that the target counts from 0 again, as BART's decoder does: what is to be copied stands
    near where it is written.

        ids   a [M] b d   SEP   a b c d
        at    0  1  2 3   -1    0 1 2 3
    """
    i = torch.arange(ids.size(1), device=ids.device).expand_as(ids)
    return torch.where(i < P[:, None] - 1, i, i - P[:, None])


# a noise: ids, kept (B, W), k (B, 1) bytes to strike -> ids, kept, of another W where it adds positions

def permute(ids, kept, k, g, hp):  # sentences in another order, what is not kept after them
    """A sentence ends with a newline, or with white space after a full stop, question or exclamation mark."""
    key = torch.rand(ids.shape, generator=g, device=g.device).gather(1, sentence_ids(ids)).masked_fill(~kept, 2)
    return ids.gather(1, key.argsort(dim=1, stable=True)), kept


def infill(ids, kept, k, g, hp):  # spans of Poisson length, each one MASK; those of length 0 insert one
    B, L = ids.shape
    K = 8 + int(hp.bart_rate * L + 1)                                               # spans at most
    stays, start, used = place_infills(kept, k, K, hp.poisson_lambda, g)            # (B, L), (B, K), (B, K)
    # byte i has the slot after all spans that start at or before it, the j-th span the slot after j others
    before = torch.zeros(B, L + 1, dtype=torch.long, device=g.device).scatter_add(1, start, used.long())
    byte = torch.arange(L, device=g.device) + before.cumsum(1)[:, :L]               # (B, L)
    span = torch.where(used, start + torch.arange(K, device=g.device), L + K)       # (B, K); unused: cut off
    slots = torch.cat((byte, span), dim=1)
    wide = torch.full((B, L + K + 1), PAD, dtype=ids.dtype, device=g.device)
    stays = torch.zeros_like(wide, dtype=torch.bool).scatter(1, slots, torch.cat((stays, used), dim=1))
    ids = wide.scatter(1, slots, torch.cat((ids, torch.full_like(start, MASK)), dim=1))
    return ids[:, :L + K], stays[:, :L + K]


def mask(ids, kept, k, g, hp):
    return torch.where(strike(ids, kept, k, g), MASK, ids), kept


def delete(ids, kept, k, g, hp):
    return ids, kept & ~strike(ids, kept, k, g)


def replace(ids, kept, k, g, hp):
    return torch.where(strike(ids, kept, k, g), random_bytes(ids.shape, g), ids), kept


def rotate(ids, kept, k, g, hp):  # another byte comes first: by 1 .. length - 1 positions
    W, length = ids.size(1), kept.sum(1, keepdim=True)
    turn = 1 + (torch.rand(len(ids), 1, generator=g, device=g.device) * (length - 1)).long()
    i = torch.arange(W, device=g.device)
    at = ((i + turn) % length.clamp(min=1)).where(i < length, i)
    return pack(ids, kept, W).gather(1, at), i < length


NOISES = dict(permute=permute, infill=infill, mask=mask, delete=delete, replace=replace, rotate=rotate)


def strike(ids, kept, k, g):  # -> (B, W) bool: k bytes of each row; a MASK is no byte, so none is struck twice
    free = kept & (ids < N_BYTES)
    return free & (ranks(torch.rand(ids.shape, generator=g, device=g.device).masked_fill(~free, 2)) < k)


def sentence_ids(x):  # (B, L) -> (B, L) long: which sentence of its row a byte belongs to
    space = (x == 32) | ((x >= 9) & (x <= 13))
    stop = (x == ord(".")) | (x == ord("?")) | (x == ord("!"))
    end = (x == ord("\n")) | (space & F.pad(stop[:, :-1], (1, 0)))
    return end.cumsum(1) - end.long()           # an end is its sentence's


def place_infills(present, M, K, mean, g):  # present (B, L), M (B, 1) -> stays (B, L), start, used (B, K)
    """At most K spans that cover exactly M of the present bytes: lengths are Poisson until they add up to M,
    the last cut to fit; each span lies at a uniform gap between the bytes that stay."""
    (B, L), m = present.shape, present.sum(1, keepdim=True)
    # lengths, by the inverse of Poisson's distribution function
    j = torch.arange(64, device=g.device)
    cdf = (j * math.log(mean) - mean - torch.lgamma(j + 1.0)).exp().cumsum(0)
    length = torch.searchsorted(cdf, torch.rand(B, K, generator=g, device=g.device), right=True).clamp(max=63)
    # as many as cover M bytes; of those of length 0, which add a MASK and take nothing, so few that the source
    # never outgrows the text
    before = length.cumsum(1) - length
    used = before < M                                                               # (B, K)
    length = torch.where(used, length.minimum(M - before), 0)
    full = (used & (length > 0)).sum(1, keepdim=True)
    used &= (length > 0) | ((used & (length == 0)).cumsum(1) <= M - full)
    # each at a gap between the m - M bytes that stay, in the order of the text
    gap = (torch.rand(B, K, generator=g, device=g.device) * (m - M + 1)).long()
    order = torch.where(used, gap, L).sort(dim=1)                                   # unused spans last
    used, length = used.gather(1, order.indices), length.gather(1, order.indices)
    start = (order.values + length.cumsum(1) - length).clamp(max=L)                 # bytes, then spans, before it
    edge = torch.zeros(B, L + 1, dtype=torch.long, device=g.device).scatter_add(1, start, used.long())
    edge = edge.scatter_add(1, (start + length).clamp(max=L), -used.long())
    return (edge[:, :L].cumsum(1) == 0) & present, start, used


def bart_counts(m, hp, g):  # bytes of the rows (B, 1) -> bytes that each of the noises with a rate strikes (B, 1)
    rated = len({"mask", "delete", "infill", "replace"} & set(hp.bart_noise.split(",")))
    most = (m * (hp.bart_rate / max(1, rated)) + 0.5).long().clamp(min=1)
    return 1 + (torch.rand(m.shape, generator=g, device=g.device) * most).long()


def bart_window(T, hp):
    noises, L = hp.bart_noise.split(","), (T - 1) // 2
    if not set(noises) <= set(NOISES) or len(set(noises)) < len(noises):
        fail(f"--bart_noise {hp.bart_noise}: wants different names with commas between. "
             f"Try some of {','.join(NOISES)}")
    return L


def bart_ask(pieces, m, hp):
    """It writes the whole text: its answer follows what it writes of the left side. infill stands for a hole
    of any length, mask for one byte, the other noises for none."""
    left, right = pieces
    noises = hp.bart_noise.split(",")
    hole = [MASK] if "infill" in noises else [MASK] * m if "mask" in noises else []
    return ([*left, *hole, *right, SEP, *left], len(left) + len(hole) + len(right) + 1) if hole else None


add("bart", make=bart, help="a whole text from a noisy one", use="repair a text", mask="prefix",
    window=bart_window, whole=True, hides=False, positions=bart_positions, mode="repair", ask=bart_ask,
    ends=lambda k: EOT, defaults=SHARP | PATIENT,
    reaches=(8000, "leaves 69% of a text's noise, 34% of that of few typos"),
    settings={"bart_noise": ("infill,replace", "any of " + ",".join(NOISES)),
              "bart_rate": (0.3, "share of bytes that mask, delete, infill and replace strike, at most", 0.001, 0.9),
              "poisson_lambda": (3.0, "mean length of an infilled span, before the last is cut", 2.0, 20.0)})


# ---- nsp: next sentence prediction

GAP = 8                                         # bytes skipped between A and B: no cut word gives the answer away


def nsp(x, g, hp):  # x (B, 2 h + GAP) -> inp, tgt (B, T), labels (B,)
    """Next sentence prediction: does B follow A? With masked language modeling beside it (BERT, Devlin et al.
    2019).

        inp     CLS A A [M] A SEP B B B [M] SEP      who sees whom: bidirectional
        label   1 if B follows A, else 0             read at CLS

    A and B are h bytes each, GAP bytes apart in both classes, so that neither length nor seam gives the
    answer away. Exactly half the rows are negative: "random" takes another row's B, "swap" exchanges A and B
    (sentence order prediction, ALBERT, Lan et al. 2020). Departures: pieces of fixed length; SEP stands for
    segment embeddings."""
    B, T = x.size(0), hp.block_size
    h = (x.size(1) - GAP) // 2
    first, second = x[:, :h], x[:, h + GAP:]
    negative = torch.rand(B, generator=g, device=g.device).argsort() < B // 2       # (B,)
    if hp.nsp_negatives == "swap":
        first, second = torch.where(negative[:, None], torch.stack((second, first)), torch.stack((first, second)))
    else:
        shift = torch.randint(1, max(2, B), (1,), generator=g, device=g.device)
        other = second.index_select(0, (torch.arange(B, device=g.device) + shift) % B)
        second = torch.where(negative[:, None], other, second)
    sep = column(x, SEP)
    row = torch.cat((column(x, CLS), first, sep, second, sep), dim=1)
    row = F.pad(row, (0, T - row.size(1)), value=PAD)                               # one position where T is even
    at = choose(B, 2 * h, max(1, round(hp.mask_rate * 2 * h)), g)
    inp, tgt = mask_bytes(row, 1 + at + (at >= h), g)                               # past CLS, of B past SEP
    return dict(inp=inp, tgt=tgt, labels=(~negative).long(), mask="bidirectional")


def nsp_window(T, hp):
    if hp.batch_size * hp.accum < 2:
        fail("--objective nsp: half of a step's rows are negative, and it has one. Try a larger --batch_size or weight")
    return 2 * ((T - 3) // 2) + GAP


def nsp_terms(batch, hp):
    B = len(batch["labels"])
    return {"nll": (count_targets(batch), 1.0), "nsp": (B, 1.0), "accuracy": (B, 0.0)}


def nsp_loss(model, batch, hp):
    h = hidden_states(model, batch)                                                 # (B, T, C)
    follows = model.heads["nsp"](h[:, 0].float())[:, 0]                             # (B,)
    sums = {"nll": byte_nats(model, h, batch["tgt"])[0].sum(), "nsp": yes_no(follows, batch["labels"])}
    if evaluating():
        sums["accuracy"] = ((follows > 0) == (batch["labels"] == 1)).sum()
    return sums


def nsp_answer(model, first, second, hp):  # ids, ids -> 0-D log-odds that the second follows the first
    """As in training the pieces are at most h bytes, and a long second text loses its first GAP bytes."""
    h = (hp.block_size - 3) // 2
    second = second[GAP:GAP + h] if len(second) > 2 * GAP else second[:h]
    row = torch.tensor([[CLS, *first[-h:], SEP, *second, SEP]], device=model.embed.weight.device)
    return model.heads["nsp"](model(row, "bidirectional")[:, 0].float())[0, 0]


add("nsp", make=nsp, help="whether B follows A, and masked bytes", use="compare two texts", mask="bidirectional",
    window=nsp_window, heads=lambda sizes, hp: {"nsp": readout(sizes.n_embd)}, terms=nsp_terms, loss=nsp_loss,
    whole=True, mode="follow", fills=lambda hp: ([CLS], [SEP], 0), answer=nsp_answer,
    defaults=SHARP | PATIENT | {"mask_rate": 0.15}, reaches=(8000, "answers 82% of pairs right"),
    settings=MASK_RATE | {"nsp_negatives": ("random", "random (another row's B) or swap (A after B)",
                                            ("random", "swap"))})


# ---- contrastive: InfoNCE over crops

def contrastive(x, g, hp):  # x (B, T) -> inp (B, 2, Lc)
    """Contrastive learning: which of the batch's crops comes from the same window? (Contriever, Izacard et
    al. 2022)

        window   t h e   c a t   s a t   o n       two crops of Lc = crop * T bytes each, from anywhere in it
        inp      [h e   c a t] [a t   s a t]       who sees whom: bidirectional

    InfoNCE (van den Oord et al. 2018) on the mean of a crop's states, normalized, divided by tau, in both
    directions. The negatives are the other rows of the micro-batch: accumulation and several processes equal
    one big batch only at a fixed micro-batch size, and validation compares 32 rows. Departures: both
    directions, states of length 1, crops of one length, no byte deleted, no queue of older negatives."""
    B, T = x.shape
    Lc = max(1, round(hp.crop * T))
    start = torch.randint(0, T - Lc + 1, (B, 2, 1), generator=g, device=g.device)
    at = start + torch.arange(Lc, device=g.device)                                  # (B, 2, Lc)
    return dict(inp=x.gather(1, at.flatten(1)).view(B, 2, Lc), mask="bidirectional")


def contrastive_window(T, hp):
    if hp.batch_size < 2:
        fail(f"--objective contrastive: compares the rows of a micro-batch, and has {hp.batch_size}. "
             "Try a larger --batch_size, such as 8, or weight")
    return T


def embed(model, x, lookups=None):  # (N, Lc) -> (N, C) float32 of length 1: the mean of the states
    return F.normalize(model(x, "bidirectional", lookups=lookups).float().mean(1), dim=-1)


def contrastive_terms(batch, hp):
    B = len(batch["inp"])
    return {"info": (2 * B, 1.0), "top1": (B, 0.0)}


def contrastive_loss(model, batch, hp):
    states = embed(model, batch["inp"].flatten(0, 1), batch.get("lookups"))         # (2 B, C)
    a, b = states.unflatten(0, (-1, 2)).unbind(1)
    sim = a @ b.T / hp.tau                                                          # (B, B)
    own = torch.arange(len(sim), device=sim.device)
    return {"info": nats(sim, own) + nats(sim.T, own), "top1": (sim.argmax(1) == own).sum()}


add("contrastive", make=contrastive, help="which crops share a window", use="embed and search",
    mask="bidirectional", window=contrastive_window, terms=contrastive_terms, loss=contrastive_loss, whole=True,
    mode="search", answer=embed, defaults=PATIENT | {"batch_size": 32},  # rows are its negatives
    reaches=(8000, "finds 44% of 256 passages by their other half"),
    settings={"tau": (0.05, "temperature of the similarities", 1e-4, 1e4),
              "crop": (0.25, "length of a crop, as a share of the block", 0.01, 0.9)})


# ---- mdlm: masked diffusion

def mdlm(x, g, hp):  # x (B, L) -> inp, tgt (B, L), weight (B,)
    """Masked diffusion: bytes from any share of the others (MDLM, Sahoo et al. 2024; LLaDA, Nie et al. 2025).

        inp   t [M] [M]   c [M] t    who sees whom: bidirectional; l of L bytes masked
        tgt   .  h   e  . .  a  .    loss at these, times L / l, divided by B * L

    The loss bounds -log p(x) from above. MDLM's integral over t in (0, 1) of (1/t) E[sum of nats at bytes
    masked with probability t] equals the mean over l = 1..L of (L/l) E[sum of nats at l masked bytes]: with
    exactly l bytes the weight is never larger than L, no row is empty, and the spread is far smaller. l is
    stratified over the batch. Only bytes compete: MASK and other ids are never predicted (MDLM's SUBS)."""
    B, L = x.shape
    count = 1 + (stratified(B, g) * L).long().clamp(max=L - 1)                      # (B,): l of each row
    masked = ranks(torch.rand(B, L, generator=g, device=g.device)) < count[:, None]                 # (B, L)
    inp, tgt = x.masked_fill(masked, MASK), x.where(masked, IGNORE)
    return dict(inp=inp, tgt=tgt, weight=L / count, mask="bidirectional")


def mdlm_bounds(model, batch, hp):  # -> (B,): an estimate of each row's bound, in nats
    h, tgt, row = told(hidden_states(model, batch), batch["tgt"])
    each = F.cross_entropy(model.logits(h)[..., :N_BYTES], tgt, ignore_index=IGNORE, reduction="none")    # (N,)
    return torch.zeros_like(batch["weight"]).index_add(0, row, each) * batch["weight"]


def bound_terms(batch, hp):
    return {"bound": (batch["inp"].numel(), 1.0)}


add("mdlm", make=mdlm, help="masked bytes at any rate", use="write in any order", mask="bidirectional",
    window=same_length, targets=count_targets, bpb="bound", bounds=mdlm_bounds, terms=bound_terms,
    loss=lambda model, batch, hp: {"bound": mdlm_bounds(model, batch, hp).sum()},
    packs=True, mode="fill", fills=in_place, orders=("ancestral", "confident", "left"), defaults=SHARP | PATIENT,
    reaches=(8000, "bounds held-out text by 2.07 bits per byte, fills a hole of 4 at 1.23"))


# ---- sedd: score entropy discrete diffusion

def sedd_bounds(model, batch, hp):  # -> (B,): an estimate of each row's bound, in nats
    """Score entropy discrete diffusion (SEDD, Lou et al. 2024), absorbing state, time-free (RADD, Ou et al. 2025).

        inp   t [M] [M]   c [M] t    rows are mdlm's; the model gives log c_y = logit_y - log 256, the log ratio of
        tgt   .  h   e  . .  a  .    every byte y to MASK

    A masked byte x costs (sum_y c_y - log c_x - 1) * L / l, where it costs mdlm -log softmax_x * L / l. That is least
    where c is the byte's distribution, and bounds -log p(x) as mdlm's does: the normaliser, which the softmax gives
    mdlm, is learned. Departure: the model is told no time, which the absorbing state allows."""
    h, tgt, row = told(hidden_states(model, batch), batch["tgt"])
    logc = model.logits(h)[..., :N_BYTES] - math.log(N_BYTES)                       # (N, 256)
    logc = logc.masked_fill((tgt == IGNORE)[:, None], 0.0)      # finite, whatever was there
    each = logc.exp().sum(-1) - logc.gather(-1, tgt.clamp(min=0)[:, None])[:, 0] - 1                # (N,)
    each = each * (tgt != IGNORE)
    return torch.zeros_like(batch["weight"]).index_add(0, row, each) * batch["weight"]


add("sedd", make=mdlm, help="ratios of masked bytes at any rate", use="write in any order", mask="bidirectional",
    window=same_length, targets=count_targets, bpb="bound", bounds=sedd_bounds, terms=bound_terms,
    loss=lambda model, batch, hp: {"bound": sedd_bounds(model, batch, hp).sum()},
    packs=True, mode="fill", fills=in_place, orders=("ancestral", "analytic", "left"), defaults=SHARP | PATIENT,
    reaches=(8000, "bounds held-out text by 2.11 bits per byte, fills a hole of 4 at 1.47"))


# ---- rotation: find the seam

def rotation(x, g, hp):  # x (B, T) -> inp (B, T), labels (B,)
    """Rotation: where was a rotated window cut?

        window   t h e   c a t          who sees whom: bidirectional
        inp      c a t t h e            the label is 3, the place of the window's first byte; one label a row

    BART (Lewis et al. 2020) rotates documents and reconstructs them; here its noise is made a question, which
    a pointer over the T positions answers. The rotation is uniform over 0..T - 1."""
    B, T = x.shape
    r = torch.randint(0, T, (B, 1), generator=g, device=g.device)
    at = (torch.arange(T, device=g.device) + r) % T                                 # (B, T)
    return dict(inp=x.gather(1, at), labels=((T - r) % T)[:, 0], mask="bidirectional")


def rotation_answer(model, x, lookups=None):  # x (B, T) -> (B, T): a score for each position
    return model.heads["seam"](model(x, "bidirectional", lookups=lookups).float())[..., 0]


def rotation_terms(batch, hp):
    B = len(batch["labels"])
    return {"seam": (B, 1.0), "accuracy": (B, 0.0)}


def rotation_loss(model, batch, hp):
    scores = rotation_answer(model, batch["inp"], batch.get("lookups"))
    return {"seam": nats(scores, batch["labels"]), "accuracy": (scores.argmax(1) == batch["labels"]).sum()}


add("rotation", make=rotation, help="where a rotated text was cut", use="find the seam", mask="bidirectional",
    window=same_length, heads=lambda sizes, hp: {"seam": readout(sizes.n_embd)}, terms=rotation_terms,
    loss=rotation_loss, whole=True, mode="seam", answer=rotation_answer,
    defaults={"block_size": 64, "batch_size": 64},  # 8 long rows do not learn
    reaches=(8000, "finds 68% of seams"))


# ---- hybrid: masked and causal rows through one head

def hybrid(x, g, hp):  # x (B, T + 1) -> inp, tgt (B, T), mask (B,)
    """Masked and causal rows in one batch, one head, one shift (GPT-BERT, Charpentier and Samuel 2024).

        inp   t [M] e   c    tgt   h . . . .      masked row: bidirectional; position i - 1 predicts the masked byte i
        inp   t  h  e   c    tgt   h e   c a      causal row

    hybrid_ratio of the rows are masked; the loss is the mean of each kind, weighed by hybrid_ratio.
    The first byte, which no position predicts, is never masked. Departure: single bytes are masked, not short
    spans."""
    B, T = x.size(0), x.size(1) - 1
    row = torch.arange(B + 1, device=g.device) * hybrid_rows(B, hp) // B
    masked = row.diff() > 0                                                         # (B,): spread evenly
    noisy, tgt = mask_bytes(x[:, :T], 1 + choose(B, T - 1, max(1, round(hp.mask_rate * T)), g), g)
    tgt = F.pad(tgt[:, 1:], (0, 1), value=IGNORE)                                   # shifted as in clm
    inp, tgt = noisy.where(masked[:, None], x[:, :-1]), tgt.where(masked[:, None], x[:, 1:])
    return dict(inp=inp, tgt=tgt, mask=torch.where(masked, T, 0))


def hybrid_rows(B, hp):  # -> how many of B rows are masked
    return int(B * hp.hybrid_ratio + 1e-6)


def hybrid_window(T, hp):
    for rows in (hp.batch_size * hp.accum, EVAL_ROWS):
        if not 0 < hybrid_rows(rows, hp) < rows and 0 < hp.hybrid_ratio < 1:
            fail(f"--hybrid_ratio {hp.hybrid_ratio:g}: leaves one kind without a row in a batch of {rows}. "
                 "Try a ratio nearer to .5, or a larger --batch_size")
    if round(hp.mask_rate * T) > T - 1:
        fail(f"--mask_rate {hp.mask_rate:g}: hybrid never masks the first byte. Try --mask_rate 0.15")
    return next_byte(T, hp)


def hybrid_terms(batch, hp):
    asked, masked = batch["tgt"] != IGNORE, (batch["mask"] > 0)[:, None]
    counts = (asked & masked).sum().clamp(min=1), (asked & ~masked).sum().clamp(min=1)
    return {"masked": (counts[0], hp.hybrid_ratio), "causal": (counts[1], 1 - hp.hybrid_ratio)}


def hybrid_loss(model, batch, hp):
    each, row = byte_nats(model, hidden_states(model, batch), batch["tgt"])
    masked = batch["mask"][row] > 0                                                 # (N,)
    return {"masked": (each * masked).sum(), "causal": (each * ~masked).sum()}


add("hybrid", make=hybrid, help="masked rows and causal rows", use="continue, fill [MASK]", mask="both",
    window=hybrid_window, terms=hybrid_terms, loss=hybrid_loss, bpb="causal", packs=True, mode="fill",
    orders=("confident", "left"), continues=lambda hp: from_left(hp) if hp.hybrid_ratio < 1 else None,
    defaults={"max_passes": 8.0},
    fills=lambda hp: ([EOT], [], 1) if hp.hybrid_ratio > 0 else None,
    reaches=(8000, "fills a hole of 4 bytes at 1.15 bits a byte, goes on with a text at 1.30"),
    settings=MASK_RATE | {"hybrid_ratio": (0.25, "share of rows that are masked", 0.0, 1.0)})


# ---- what --objective names: one of these, or a mixture of them, which is an objective too

def find_objective(hp):  # hp.objective such as "clm" or "clm:0.5,mlm:0.5" -> entry
    """With "n", the raw bytes of a row, and "members" [(weight, entry)], which for clm is clm alone. Fails on
    a name that does not exist, naming the nearest, and on rows that the settings make impossible."""
    parts = [part.strip().partition(":") for part in hp.objective.split(",")]
    for name, _, _ in parts:
        if name not in OBJECTIVES:
            near = difflib.get_close_matches(name, OBJECTIVES, 1)
            fail(f"--objective {name}: unknown. Try {near[0] if near else 'one of ' + ' '.join(OBJECTIVES)}")
    try:
        weights = [float(weight) if colon else 1.0 for _, colon, weight in parts]
    except ValueError:
        weights = [0.0]
    if not all(1e-9 < w < 1e9 for w in weights) or len({name for name, _, _ in parts}) < len(parts):
        fail(f"--objective {hp.objective}: wants different names with positive weights, as in clm:0.5,mlm:0.5")
    members = [(w / sum(weights), OBJECTIVES[name]) for (name, _, _), w in zip(parts, weights)]
    entry = mix(members, hp) if len(members) > 1 else members[0][1]
    n = entry["window"](hp.block_size, hp)
    return entry | {"n": n, "members": [(w, m | {"n": m["window"](hp.block_size, hp)}) for w, m in members]}


def mix(members, hp):  # [(weight, entry)] -> entry
    """An objective out of others. Every micro-batch holds the same rows of each, apportioned by weight, so
    that shapes never change; tensors and terms are named after their member, as in clm.inp, coefficients
    weighed."""
    weights = [w for w, _ in members]
    rows = apportion(weights, hp.batch_size)
    if min(rows) == 0:
        fail(f"--objective {hp.objective}: --batch_size {hp.batch_size} leaves a member without a row. "
             f"Try --batch_size {math.ceil(1 / min(weights))}")
    each = [(w, m, Namespace(**vars(hp) | {"batch_size": r})) for (w, m), r in zip(members, rows)]

    def named(name, values):
        return {f"{name}.{k}": v for k, v in values.items()}

    def window(T, hp):
        return max(m["window"](T, own) for _, m, own in each)

    def make(x, g, hp):  # x (accum * batch_size, n): the rows of each member, of every micro-batch
        batch = {}
        for (_, m, own), part in zip(each, x.unflatten(0, (-1, hp.batch_size)).split(rows, dim=1)):
            n = m["window"](hp.block_size, own)
            batch |= named(m["name"], m["make"](part.flatten(0, 1)[:, :n], g, own))
        return batch

    def heads(sizes, hp):
        return {name: head for _, m in members for name, head in m["heads"](sizes, hp).items()}

    def terms(batch, hp):
        out = {}
        for w, m, own in each:
            known = m["terms"](part_of(batch, m), own)
            out |= named(m["name"], {term: (count, w * c) for term, (count, c) in known.items()})
        return out

    def loss(model, batch, hp):
        out = {}
        for _, m, own in each:
            out |= named(m["name"], m["loss"](model, part_of(batch, m), own))
        return out

    def targets(batch):
        return sum(targets_of(m, part_of(batch, m), own) for _, m, own in each)

    whole = torch.tensor([m["whole"] for (_, m), r in zip(members, rows) for _ in range(r)])
    return USUAL | dict(
        name=hp.objective, make=make, window=window, heads=heads, terms=terms, loss=loss, targets=targets,
        n_outputs=max(m["n_outputs"] for _, m in members),
        whole=whole if whole.any() else False, packs=all(m["packs"] for _, m in members),
        settings={flag: spec for _, m in members for flag, spec in m["settings"].items()})


def part_of(batch, member):  # a mixture's batch -> that of one member
    start = member["name"] + "."
    return {k.removeprefix(start): v for k, v in batch.items() if k.startswith(start)}


def targets_of(entry, batch, hp):  # -> positions with loss; a position counts once for every target it has
    if entry["targets"]:
        return entry["targets"](batch)
    return sum(count for count, coefficient in entry["terms"](batch, hp).values() if coefficient)
