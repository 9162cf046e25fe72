"""Every pre-training objective: how clean windows become a batch, and how a batch becomes a loss.

B rows, T positions of a row, n raw bytes that fill one, P positions of the prefix, C width, V vocabulary; k chosen
positions, S spans, N noise bytes, L bytes of a text, of which m are present

An objective is a few functions and one entry in OBJECTIVES, at the foot of this file:
    window(T, hp) -> n                     raw bytes that fill a row of T positions
    make(x (B, n), g, hp) -> batch         dict of tensors with B rows each; "mask" may be a name instead
    heads(sizes, hp) -> {name: module}     what is needed beyond the model's byte head
    loss(model, heads, batch, hp) -> {term: (sum in nats, count, coefficient)}
    counts(batch, hp) -> {term: count}     the counts alone, known before the forward pass
    stats(model, heads, batch, hp) -> {name: (sum, count)}     optional, figures for evaluation alone
hp holds every setting, as train.get_config returns them. A term named "nll" is nats of the byte head: its mean is also
printed as perplexity. What else an entry may say stands above the table.
Corruption draws from g alone and has static shapes: no loop over rows, nothing read back from the device.
Exact counts (k masked bytes, S spans of N bytes in every row) stand where papers draw each position by itself,
so that no row is ever without a target. The total is the sum over terms of coefficient * sum / count, with sums
and counts over the whole global batch: a mean of micro-batch means would weigh the targets unequally.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from data import CLS, EOT, MASK, MID, MODE_R, MODE_S, MODE_X, N_SENTINELS, PAD, PRE, SENTINEL, SEP, SUF, fail
from model import Linear, Sizes, Transformer, norm

IGNORE = -100                                   # in a target: no loss at this position
N_BYTES = 256
EVAL_ROWS = 32                                  # rows of a validation batch, whatever the batch size


# ---- building blocks: drawing

def choose(B, T, k, g):  # -> (B, k) long: k distinct positions of each row, all subsets equally likely
    return torch.rand(B, T, generator=g, device=g.device).topk(k, dim=1).indices


def compose(B, m, k, g):  # -> (B, k) long: positive parts that add up to m, all compositions equally likely
    cuts = choose(B, m - 1, k - 1, g).sort(dim=1).values + 1                        # k - 1 of the m - 1 gaps
    return F.pad(F.pad(cuts, (1, 0)), (0, 1), value=m).diff(dim=1)


def stratified(B, g):  # -> (B,) in [0, 1): one number from each B-th of the range, in random order
    order = torch.rand(B, generator=g, device=g.device).argsort()
    return (order + torch.rand(B, generator=g, device=g.device)) / B


def lengths(B, low, high, g):  # -> (B, 1) long: high in half of the rows, in the others uniform over low..high
    """For rows whose end a model must tell: with full rows alone it would know EOT by its place."""
    u = torch.rand(2, B, 1, generator=g, device=g.device)
    return torch.where(u[0] < 0.5, high, low + (u[1] * (high - low + 1)).long()).clamp(max=high)


def random_bytes(shape, g):  # -> long in 1..255: never the end of a document, never a special id
    return torch.randint(1, N_BYTES, shape, generator=g, device=g.device)


def ranks(key):  # (B, n) -> (B, n) long: how many keys of its row come before each
    order = key.argsort(dim=1)
    at = torch.arange(key.size(1), device=key.device).expand_as(order)
    return torch.zeros_like(order).scatter(1, order, at)        # faster than to sort twice


def apportion(weights, total):  # [w] -> [rows] that add up to total, by largest remainder
    shares = [w / sum(weights) * total for w in weights]
    rows = [int(s + 1e-9) for s in shares]
    for i in sorted(range(len(rows)), key=lambda i: rows[i] - shares[i])[:total - sum(rows)]:
        rows[i] += 1
    return rows


# ---- building blocks: laying out rows

def column(x, value):  # (B, 1) of one id
    return x.new_full((x.size(0), 1), value)


def pack(ids, keep, T):  # ids, keep (B, W) -> (B, T): the kept ids moved to the left, PAD behind them
    at = torch.where(keep, keep.cumsum(1) - 1, T).clamp(max=T)                      # what is dropped goes to column T
    return ids.new_full((ids.size(0), T + 1), PAD).scatter(1, at, ids)[:, :T]


def seq2seq(source, keep, target, keep_target, T, mode=None):  # ids, keep (B, W) and (B, W2) -> batch of (B, T)
    """One prefix row in place of an encoder and a decoder: [mode] source SEP target EOT PAD.

    Source and SEP are read in both directions; each position from SEP on predicts its next id, up to EOT."""
    one, mode = column(source, SEP), [] if mode is None else [column(source, mode)]
    z = torch.cat([*mode, source, one, target, column(source, EOT)], dim=1)
    keep = torch.cat([*(m > 0 for m in mode), keep, one > 0, keep_target, one > 0], dim=1)
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

def token_counts(batch, hp):  # -> {"nll": number of targets}
    return {"nll": (batch["tgt"] != IGNORE).sum()}


def states_at(h, at):  # h (B, T, C), positions at (B, k) -> (B, k, C)
    return h.gather(1, at[..., None].expand(-1, -1, h.size(-1)))


def nats(logits, tgt):  # logits (..., V), tgt (...) -> sum of the cross-entropy at every position with a target
    return F.cross_entropy(logits.flatten(0, -2), tgt.flatten(), ignore_index=IGNORE, reduction="sum")


def yes_no(logits, labels):  # logits, labels (...) of 0 and 1 -> sum of the binary cross-entropy
    return F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="sum")


def token_loss(model, heads, batch, hp):
    """Cross-entropy of the byte head at every position with a target, in nats."""
    h = model(batch["inp"], batch["mask"], batch.get("doc"))                        # (B, T, C)
    return {"nll": (nats(model.logits(h), batch["tgt"]), token_counts(batch, hp)["nll"], 1.0)}


def no_heads(sizes, hp):
    return {}


def readout(C):  # a number for each state; starts at zero, so that an untrained model is at chance
    layer = nn.Linear(C, 1)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def same_length(T, hp):  # window of the objectives that work in place
    return T


def next_byte(T, hp):  # window of the objectives that predict each row's next byte
    return T + 1


# ---- clm: causal language modeling

def clm(x, g, hp):  # x (B, T + 1) -> inp, tgt (B, T)
    """Causal language modeling: each byte from those before it (Radford et al. 2018).

        inp   t h e   c a      who sees whom: causal
        tgt   h e   c a t      loss at all T positions
    """
    return dict(inp=x[:, :-1], tgt=x[:, 1:], mask="causal")


# ---- mlm: masked language modeling

def mlm(x, g, hp):  # x (B, T) -> inp, tgt (B, T)
    """Masked language modeling: some bytes from all the others (BERT, Devlin et al. 2019).

        inp   t [M] e   c a q    who sees whom: bidirectional
        tgt   .  h  . . .  . t   loss at the chosen positions: 80% MASK, 10% a random byte, 10% left as they are

    Exactly round(mask_rate * T) positions of each row, as in BERT's own code, drawn anew for every batch, as in
    RoBERTa (Liu et al. 2019). Departures: bytes in place of word pieces; a random byte is never a special id."""
    B, T = x.shape
    inp, tgt = mask_bytes(x, choose(B, T, max(1, round(hp.mask_rate * T)), g), g)
    return dict(inp=inp, tgt=tgt, mask="bidirectional")


# ---- prefix: prefix language modeling

def prefix_lm(x, g, hp):  # x (B, T + 1) -> inp, tgt (B, T), mask (B,)
    """Prefix language modeling: a suffix from a prefix that is read in both directions (T5, Raffel et al. 2020).

        inp   t h e   c a      who sees whom: the first P positions all of each other, the rest causal (P = 3)
        tgt   . .   c a t      loss from position P - 1 on, which predicts the first byte after the prefix

    P is uniform over prefix_min * T .. prefix_max * T (at least 1, at most T - 1), drawn per row. Positions
    before P - 1 see the byte that they would predict, so they have no loss."""
    B, T = x.size(0), x.size(1) - 1
    low, high = prefix_range(T, hp)
    P = torch.randint(low, high + 1, (B,), generator=g, device=g.device)
    suffix = torch.arange(T, device=x.device) >= P[:, None] - 1                     # (B, T)
    return dict(inp=x[:, :-1], tgt=x[:, 1:].where(suffix, IGNORE), mask=P)


def prefix_range(T, hp):  # -> shortest and longest prefix
    return tuple(min(max(1, round(share * T)), T - 1) for share in (hp.prefix_min, hp.prefix_max))


def prefix_window(T, hp):
    low, high = prefix_range(T, hp)
    if low > high:
        fail(f"--prefix_min {hp.prefix_min} --prefix_max {hp.prefix_max}: leave no prefix length at --block_size {T}. "
             "Try a minimum below the maximum")
    return next_byte(T, hp)


# ---- span: span corruption

def span(x, g, hp):  # x (B, n) -> inp, tgt (B, T), mask (B,)
    """Span corruption: a text's noise spans, from the text with a sentinel in place of each (T5, Raffel et al. 2020).

        z     t h [0] c a t   s [1] SEP [0] e   [1] a t EOT     z one longer than a row; inp z[:-1], tgt z[1:]
              \\____ source: both ways ____/  \\__ causal, loss __/

    Exactly N = round(n * span_rate) noise bytes in S = round(N / span_mean) spans in every row, all placements in
    which no two spans touch equally likely. Departures: T5's own code always starts with a kept token and ends with
    a noise one, which makes the last position noise in every row; here both edges are free. Sentinels count up,
    and, as in the code but not in the paper's figure, no final sentinel follows the last span."""
    _, N, S = fit_spans(hp.block_size, hp.span_rate, hp.span_mean)
    return span_rows(x, N, S, hp.block_size, g)


def span_rows(x, N, S, T, g, mode=None):  # x (B, n) -> batch of (B, T)
    first, noise = place_spans(*x.shape, N, S, g)                                   # (B, n) bool each
    sentinel = SENTINEL - 1 + first.cumsum(1)                                       # of the last span that has begun
    # source: a span's first byte becomes its sentinel, its others go
    source, keep = torch.where(first, sentinel, x), first | ~noise
    # target: the noise bytes, and before each span's first one its sentinel; every byte has a slot before it
    target = torch.stack((sentinel, x), dim=2).flatten(1)                           # (B, 2 n)
    return seq2seq(source, keep, target, torch.stack((first, noise), dim=2).flatten(1), T, mode)


def place_spans(B, n, N, S, g):  # -> first (B, n), noise (B, n) bool: S spans of N bytes in all, none touching another
    length = compose(B, N, S, g)                                                    # (B, S)
    # S + 1 stretches of kept bytes around them; the two at the edges may be empty, so they are drawn one byte too long
    kept = compose(B, n - N + 2, S + 1, g)[:, :-1].cumsum(1) - 1                    # (B, S): kept bytes before each
    start = kept + length.cumsum(1) - length
    # +1 where a span starts, -1 behind its end: the running sum is 1 inside
    edge = torch.zeros(B, n + 1, dtype=torch.long, device=g.device).scatter(1, start, 1).scatter(1, start + length, -1)
    return edge[:, :n] == 1, edge[:, :n].cumsum(1) == 1


def count_spans(n, rate, mean):  # -> N noise bytes among n, S spans that hold them; at least one of each
    N = min(max(round(n * rate), 1), n - 1)
    return N, max(1, round(N / mean))


def fit_spans(T, rate, mean, extra=0):  # -> n, N, S: raw bytes, noise bytes and spans of a row
    """The most raw bytes whose source, SEP, target and EOT, with `extra` ids beside, fill T + 1 ids."""
    for n in range(T - 1 - extra, 1, -1):
        N, S = count_spans(n, rate, mean)
        if n + 2 * S + 2 + extra <= T + 1:
            break
    else:
        fail(f"--block_size {T}: too short for a span. Try --block_size 16")
    if S > min(N, n - N + 1):
        fail(f"spans of mean {mean:g} at rate {rate:g} would touch in rows of --block_size {T}. "
             "Try a lower rate or longer spans")
    if S > N_SENTINELS:
        fail(f"spans of mean {mean:g} at rate {rate:g} need {S} sentinels, there are {N_SENTINELS}. "
             f"Try --span_mean {math.ceil(N / N_SENTINELS)}")
    return n, N, S


def span_window(T, hp):
    return fit_spans(T, hp.span_rate, hp.span_mean)[0]


# ---- ul2: a mixture of denoisers

UL2_X = 0.5, 32                                 # rate and mean of the extreme denoiser's spans


def ul2(x, g, hp):  # x (B, n) -> inp, tgt (B, T), mask (B,)
    """A mixture of denoisers, each named by the row's first id (UL2, Tay et al. 2022).

        [R] source SEP spans EOT     short spans, as in span
        [S] prefix SEP rest EOT      the rest of a text, cut between n/4 and 3n/4
        [X] source SEP spans EOT     half of the text in spans of mean 32

    A batch holds fixed rows of each, by ul2_weights. The paper's seven denoisers are here three, with the weights of
    this project's sources (U-PaLM, Tay et al. 2022, gives S half of the rows); spans as in span. Targets of all rows
    are pooled in one mean, so X rows, which have most, weigh most; each denoiser's own mean is logged."""
    T, parts, batches = hp.block_size, denoisers(hp.block_size, hp), []
    for (_, mode, n, N, S), rows in zip(parts, apportion([d[0] for d in parts], x.size(0))):
        raw, x = x[:rows, :n], x[rows:]         # a row uses its first n bytes
        if rows and mode == MODE_S:
            cut = torch.randint(n // 4, 3 * n // 4 + 1, (rows, 1), generator=g, device=g.device)
            left = torch.arange(n, device=g.device) < cut                           # (rows, n)
            batches.append(seq2seq(raw, left, raw, ~left, T, mode))
        elif rows:
            batches.append(span_rows(raw, N, S, T, g, mode))
    return {k: torch.cat([b[k] for b in batches]) for k in batches[0]}


def denoisers(T, hp):  # -> [(weight, mode id, n, N, S)] of those in ul2_weights
    try:
        weights = {name: float(w) for name, w in (part.split(":") for part in hp.ul2_weights.split(","))}
    except ValueError:
        weights = {}
    if not weights or not set(weights) <= set("RSX") or not all(0 < w < math.inf for w in weights.values()):
        fail(f"--ul2_weights {hp.ul2_weights}: wants positive weights of R, S and X. Try R:.5,S:.25,X:.25")
    out = []
    for name, weight in weights.items():
        if name == "S":
            out.append((weight, MODE_S, T - 2, 0, 0))
        else:
            mode, rate, mean = {"R": (MODE_R, hp.span_rate, hp.span_mean), "X": (MODE_X, *UL2_X)}[name]
            out.append((weight, mode, *fit_spans(T, rate, mean, extra=1)))
    return out


def ul2_window(T, hp):
    parts = denoisers(T, hp)
    for rows in (hp.batch_size * hp.accum, EVAL_ROWS):
        if min(apportion([d[0] for d in parts], rows)) == 0:
            fail(f"--ul2_weights {hp.ul2_weights}: leave a denoiser without one of {rows} rows. Try more even weights"
                 + (", or a larger --batch_size" if rows < EVAL_ROWS else ""))
    return max(d[2] for d in parts)


def ul2_stats(model, heads, batch, hp):  # each denoiser's nats per target
    logits = model.logits(model(batch["inp"], batch["mask"]))
    out = {}
    for name, mode in (("R", MODE_R), ("S", MODE_S), ("X", MODE_X)):
        tgt = batch["tgt"].where(batch["inp"][:, :1] == mode, IGNORE)
        out[f"nll_{name}"] = nats(logits, tgt), (tgt != IGNORE).sum()
    return out


# ---- fim: fill in the middle

def fim(x, g, hp):  # x (B, T + 1) -> inp, tgt (B, T)
    """Fill in the middle: a text rearranged so that its middle comes last (Bavarian et al. 2022).

        PSM   PRE prefix SUF suffix MID middle EOT       who sees whom: causal
        SPM   PRE SUF suffix MID prefix middle EOT       loss at all T positions

    Two cuts uniform over all places, so that each section is a third on average; a row is rearranged with probability
    fim_rate, of those SPM (the paper's variant 2) with fim_spm_rate; the others stay plain text. Windows lie within
    one document where they can (context-level FIM). Half of the rearranged rows are so to their end; in the others
    another row's text follows EOT, as another document would: else EOT would be known by its place in the row."""
    B, n = x.size(0), x.size(1) - 4                                                 # four ids join the bytes of a row
    i, m = torch.arange(n, device=g.device), lengths(B, 1, n, g)                    # m (B, 1) bytes are rearranged
    cut = (torch.rand(B, 2, generator=g, device=g.device) * (m + 1)).long().sort(dim=1).values
    a, b = cut[:, :1], cut[:, 1:]               # (B, 1): prefix i < a, middle a <= i < b, suffix b <= i < m
    suffix, rest = m - b, i >= m                # the suffix's length; which bytes are another row's

    # the place of byte i in either order, then the places of PRE, SUF, MID and EOT
    psm = torch.where(i < a, 1 + i, torch.where(i < b, 3 + suffix + i, 2 + a + i - b))          # (B, n)
    spm = torch.where(i < b, 3 + suffix + i, 2 + i - b)
    zero = torch.zeros_like(a)
    psm = torch.cat((torch.where(rest, i + 4, psm), zero, 1 + a, 2 + a + suffix, m + 3), dim=1)             # (B, n + 4)
    spm = torch.cat((torch.where(rest, i + 4, spm), zero, zero + 1, 2 + suffix, m + 3), dim=1)

    # each row in its order, or as it was
    u = torch.rand(B, 2, 1, generator=g, device=g.device)
    at = torch.where(u[:, 0] < hp.fim_spm_rate, spm, psm)
    text = torch.where(rest, x[:, :n].roll(1, 0), x[:, :n])
    ids = torch.cat((text, *(column(x, i) for i in (PRE, SUF, MID, EOT))), dim=1)   # (B, n + 4)
    moved = torch.zeros_like(x).scatter(1, at, ids)
    return clm(torch.where(u[:, 1] < hp.fim_rate, moved, x), g, hp)


def fim_window(T, hp):
    if T < 4:
        fail(f"--block_size {T}: fim needs rows of 4 positions. Try --block_size 64")
    return next_byte(T, hp)


# ---- mtp: multi-token prediction

def mtp(x, g, hp):  # x (B, T + n) -> inp, tgt (B, T), tgt_far (B, T, n - 1)
    """Multi-token prediction: the next n = mtp_heads bytes at once, from one trunk (Gloeckle et al. 2024).

        inp       t h e   c      who sees whom: causal
        tgt       h e   c a      head 1, the model's own
        tgt_far   e   c a t      head 2, and so on; each has loss at all T positions

    The loss is the sum over heads. Head k reads norm(h + W_k h) through the shared byte head, so that mtp_heads 1 is
    clm exactly. Departure: the paper takes a transformer layer per head; its linear heads score nearly the same."""
    T = x.size(1) - hp.mtp_heads
    ahead = x[:, 1:].unfold(1, hp.mtp_heads, 1)                                     # (B, T, n): bytes t + 1 .. t + n
    return dict(clm(x[:, :T + 1], g, hp), tgt_far=ahead[:, :, 1:])


def mtp_window(T, hp):
    return T + hp.mtp_heads


def mtp_heads(sizes, hp):
    n = hp.mtp_heads
    return {"mtp": Linear(sizes.n_embd, sizes.n_embd, stack=n - 1, zero=True)} if n > 1 else {}


def far_states(heads, h):  # (..., C) -> (..., heads - 1, C): what the byte head reads for bytes 2, 3, ... ahead
    return norm(h[..., None, :] + heads["mtp"](h).unflatten(-1, (-1, h.size(-1))))


def mtp_counts(batch, hp):
    return {"nll" if k == 1 else f"head{k}": batch["tgt"].numel() for k in range(1, hp.mtp_heads + 1)}


def mtp_loss(model, heads, batch, hp):
    h = model(batch["inp"], batch["mask"], batch.get("doc"))                        # (B, T, C)
    terms = {"nll": nats(model.logits(h), batch["tgt"])}
    if hp.mtp_heads > 1:
        far = model.logits(far_states(heads, h))                                    # (B, T, n - 1, V)
        for k in range(2, hp.mtp_heads + 1):
            terms[f"head{k}"] = nats(far[:, :, k - 2], batch["tgt_far"][:, :, k - 2])
    return {term: (total, mtp_counts(batch, hp)[term], 1.0) for term, total in terms.items()}


# ---- electra: replaced token detection

def electra(x, g, hp):  # x (B, T) -> inp, tgt (B, T), at (B, k), u (B, k)
    """Replaced token detection: which bytes did a small generator make up? (ELECTRA, Clark et al. 2020)

        inp      t [M] e   c [M] t     the generator's, a masked language model
        fake     t  h  e   c  u  t     its samples filled in, which the discriminator reads
        label    0  0  0 0 0  1  0     loss at every position: is the byte another than the original?

    A byte that the generator guesses right counts as original; no gradient passes through the samples; weights 1
    and electra_weight. As in the authors' code 85% of the chosen bytes are masked, 15% left. Departures: positions
    without replacement; generator and discriminator do not share embeddings."""
    B, T = x.shape
    k = max(1, round(hp.mask_rate * T))
    at, u = choose(B, T, k, g), torch.rand(B, 2, k, generator=g, device=g.device)
    clean = x.gather(1, at)
    inp = x.scatter(1, at, torch.where(u[:, 0] < 0.85, MASK, clean))
    return dict(inp=inp, tgt=torch.full_like(x, IGNORE).scatter(1, at, clean), at=at, u=u[:, 1], mask="bidirectional")


def electra_sizes(sizes, hp):  # of the generator: gen_scale times the width, heads of the same width where that divides
    H = max(1, round(sizes.n_head * hp.gen_scale))
    return Sizes(sizes.n_layer, H, 2 * H * max(1, round(sizes.n_embd * hp.gen_scale / (2 * H))), sizes.vocab_size)


def electra_heads(sizes, hp):
    generator = Transformer(electra_sizes(sizes, hp), getattr(torch, hp.dtype))
    return {"generator": generator, "replaced": readout(sizes.n_embd)}


def electra_counts(batch, hp):
    return {"generator": batch["at"].numel(), "discriminator": batch["inp"].numel()}


def electra_forward(model, heads, batch):
    """-> generator's logits (B, k, V), clean bytes (B, k), labels (B, T), discriminator's logits (B, T)"""
    generator, at = heads["generator"], batch["at"]
    logits = generator.logits(states_at(generator(batch["inp"], "bidirectional"), at))
    clean = batch["tgt"].gather(1, at)                                              # (B, k)
    with torch.no_grad():                       # the inverse of the distribution function, at the uniforms of the batch
        cdf = logits[..., :N_BYTES].softmax(-1).cumsum(-1)                          # (B, k, 256)
        fake = torch.searchsorted(cdf, (batch["u"] * cdf[..., -1])[..., None], right=True)[..., 0]
        fake = fake.clamp(max=N_BYTES - 1)                                          # (B, k)
        labels = torch.zeros_like(batch["inp"]).scatter(1, at, (fake != clean).long())
    seen = model(batch["inp"].scatter(1, at, fake), "bidirectional")
    return logits, clean, labels, heads["replaced"](seen.float())[..., 0]


def electra_loss(model, heads, batch, hp):
    logits, clean, labels, replaced = electra_forward(model, heads, batch)
    counts = electra_counts(batch, hp)
    return {"generator": (nats(logits, clean), counts["generator"], 1.0),
            "discriminator": (yes_no(replaced, labels), counts["discriminator"], hp.electra_weight)}


def electra_stats(model, heads, batch, hp):
    _, _, labels, replaced = electra_forward(model, heads, batch)
    return {"auc": (auc(replaced.flatten(), labels.flatten()), 1), "replaced": (labels.sum(), labels.numel())}


def auc(scores, labels):  # (N,), (N,) of 0 and 1 -> chance that a 1 scores above a 0
    """From the sum of the ones' ranks (Mann and Whitney 1947); ties count half; .5 where one of the two is missing."""
    scores, labels = scores.cpu().double(), labels.cpu().double()                   # mps has no float64
    order, ones = scores.sort().values, labels.sum()
    rank = (torch.searchsorted(order, scores) + torch.searchsorted(order, scores, right=True) + 1) / 2
    pairs = ones * (len(labels) - ones)
    return ((rank * labels).sum() - ones * (ones + 1) / 2) / pairs if pairs else torch.tensor(0.5)


# ---- bart: denoising

NOISES = ("mask", "delete", "infill", "permute", "rotate", "replace")


def bart(x, g, hp):  # x (B, L) -> inp, tgt (B, T), mask (B,)
    """Denoising: the whole clean text from a noisy one (BART, Lewis et al. 2020).

        z     a [M] b d   SEP   a b c d EOT      source both ways; causal, loss on the clean text and EOT

    bart_noise names any of: mask, delete, replace (by a random byte), infill (spans of Poisson length, each one MASK;
    those of length 0 insert one), permute (sentences), rotate (another byte comes first). Order: permute, infill,
    the others, rotate. mask, delete, infill and replace share bart_rate equally, each an exact number of bytes.
    Departures: replace is not BART's; infilled spans never overlap, where fairseq's do and miss their rate; all of them
    become MASK, none a random byte; a sentence also ends with a newline. L = (T - 1) // 2 bytes fit a row under every
    noise; half of the rows hold as many, the others fewer: else EOT would be known by its place in the row."""
    B, L = x.shape
    noises, i, m = hp.bart_noise.split(","), torch.arange(L, device=x.device), lengths(B, min(8, L), L, g)
    # k bytes of each row for each noise with a rate: they share bart_rate
    k = bart_counts(m, hp)                                                          # (B, 1)
    y, present = x, i < m                                                           # (B, L)
    keep = present
    if "permute" in noises:
        y = permute_sentences(y, present, g)
    if "infill" in noises:                      # where the spans lie; their MASKs come last, since they add positions
        most = 8 + int(hp.bart_rate * L + 1)                                        # K spans at most
        keep, start, used = place_infills(present, k, most, hp.poisson_lambda, g)   # (B, L), (B, K), (B, K)

    # distinct bytes outside the infilled spans, k for each noise: the first k of a random order, the next k, ...
    point = [noise for noise in ("mask", "delete", "replace") if noise in noises]
    if point:
        rank = ranks(torch.rand(B, L, generator=g, device=g.device).masked_fill(~keep, 2))
        for j, noise in enumerate(point):
            struck = (rank >= j * k) & (rank < (j + 1) * k)
            if noise == "delete":
                keep = keep & ~struck
            else:
                y = torch.where(struck, MASK if noise == "mask" else random_bytes((B, L), g), y)

    # byte i has the slot behind all spans that start at or before it, the j-th span the slot behind j others
    if "infill" in noises:
        K = start.size(1)
        before = torch.zeros(B, L + 1, dtype=torch.long, device=x.device).scatter_add(1, start, used.long())
        before = before.cumsum(1)[:, :L]                                            # (B, L): spans up to byte i
        slots = torch.cat((i + before, torch.where(used, start + torch.arange(K, device=x.device), L + K)), dim=1)
        wide = torch.full((B, L + K + 1), PAD, dtype=x.dtype, device=x.device)
        keep = torch.zeros_like(wide, dtype=torch.bool).scatter(1, slots, torch.cat((keep, used), dim=1))[:, :L + K]
        y = wide.scatter(1, slots, torch.cat((y, torch.full_like(start, MASK)), dim=1))[:, :L + K]

    if "rotate" in noises:                      # by 1 .. length - 1 positions
        y, length = pack(y, keep, L), keep.sum(1, keepdim=True)
        turn = 1 + (torch.rand(B, 1, generator=g, device=g.device) * (length - 1)).long()
        y, keep = y.gather(1, ((i + turn) % length.clamp(min=1)).where(i < length, i)), i < length
    return seq2seq(y, keep, x, present, hp.block_size)


def sentence_ids(x):  # (B, L) -> (B, L) long: which sentence of its row a byte belongs to
    """A sentence ends with a newline, or with white space behind a full stop, question or exclamation mark."""
    space = (x == 32) | ((x >= 9) & (x <= 13))
    stop = (x == ord(".")) | (x == ord("?")) | (x == ord("!"))
    end = (x == ord("\n")) | (space & F.pad(stop[:, :-1], (1, 0)))
    return end.cumsum(1) - end.long()           # an end is its sentence's


def permute_sentences(x, present, g):  # (B, L) -> the same sentences in another order, what is not present behind them
    key = torch.rand(x.shape, generator=g, device=g.device).gather(1, sentence_ids(x)).masked_fill(~present, 2)
    return x.gather(1, key.argsort(dim=1, stable=True))


def place_infills(present, M, K, mean, g):  # present (B, L), M (B, 1) -> keep (B, L), start (B, K), used (B, K)
    """At most K spans that cover exactly M of the present bytes: lengths are Poisson until they add up to M, the last
    cut to fit; each span lies at a uniform gap between kept bytes."""
    (B, L), m = present.shape, present.sum(1, keepdim=True)
    # lengths, by the inverse of Poisson's distribution function
    j = torch.arange(64, device=g.device)
    cdf = (j * math.log(mean) - mean - torch.lgamma(j + 1.0)).exp().cumsum(0)
    length = torch.searchsorted(cdf, torch.rand(B, K, generator=g, device=g.device), right=True).clamp(max=63)
    # as many as cover M bytes; of those of length 0, which add a MASK and take nothing, so few that the source never
    # outgrows the text
    before = length.cumsum(1) - length
    used = before < M                                                               # (B, K)
    length = torch.where(used, length.minimum(M - before), 0)
    full = (used & (length > 0)).sum(1, keepdim=True)
    used &= (length > 0) | ((used & (length == 0)).cumsum(1) <= M - full)
    # each at a gap between the m - M bytes that stay, in the order of the text
    gap = (torch.rand(B, K, generator=g, device=g.device) * (m - M + 1)).long()
    order = torch.where(used, gap, L).sort(dim=1)                                   # unused spans last
    used, length = used.gather(1, order.indices), length.gather(1, order.indices)
    start = (order.values + length.cumsum(1) - length).clamp(max=L)                 # kept bytes, then spans, before it
    edge = torch.zeros(B, L + 1, dtype=torch.long, device=g.device)
    edge = edge.scatter_add(1, start, used.long()).scatter_add(1, (start + length).clamp(max=L), -used.long())
    return (edge[:, :L].cumsum(1) == 0) & present, start, used


def bart_counts(m, hp):  # bytes of the rows (B, 1) -> bytes that each of the noises with a rate strikes (B, 1)
    rated = len({"mask", "delete", "infill", "replace"} & set(hp.bart_noise.split(",")))
    return (m * (hp.bart_rate / max(1, rated)) + 0.5).long().clamp(min=1)


def bart_window(T, hp):
    noises, L = hp.bart_noise.split(","), (T - 1) // 2
    if not set(noises) <= set(NOISES) or len(set(noises)) < len(noises):
        fail(f"--bart_noise {hp.bart_noise}: wants different names with commas between. Try some of {','.join(NOISES)}")
    if L < 8:
        fail(f"--block_size {T}: bart needs rows of 17 positions. Try --block_size 64")
    return L


# ---- nsp: next sentence prediction

GAP = 8                                         # bytes skipped between A and B: no cut word gives the answer away


def nsp(x, g, hp):  # x (B, 2 h + GAP) -> inp, tgt (B, T), labels (B,)
    """Next sentence prediction: does B follow A? With masked language modeling beside it (BERT, Devlin et al. 2019).

        inp     CLS A A [M] A SEP B B B [M] SEP      who sees whom: bidirectional
        label   1 if B follows A, else 0             read at CLS

    A and B are h bytes each, GAP bytes apart in both classes, so that neither length nor seam gives the answer away.
    Exactly half the rows are negative: "random" takes another row's B, "swap" exchanges A and B (sentence order
    prediction, ALBERT, Lan et al. 2020). Departures: pieces of fixed length; SEP stands for segment embeddings."""
    B, T = x.size(0), hp.block_size
    h = (x.size(1) - GAP) // 2
    first, second = x[:, :h], x[:, h + GAP:]
    negative = torch.rand(B, generator=g, device=g.device).argsort() < B // 2       # (B,)
    if hp.nsp_negatives == "swap":
        first, second = (torch.where(negative[:, None], q, p) for p, q in ((first, second), (second, first)))
    else:
        shift = torch.randint(1, max(2, B), (1,), generator=g, device=g.device)
        other = second.index_select(0, (torch.arange(B, device=g.device) + shift) % B)
        second = torch.where(negative[:, None], other, second)
    text = torch.cat((first, second), dim=1)                                        # (B, 2 h)
    noisy, tgt = mask_bytes(text, choose(B, 2 * h, max(1, round(hp.mask_rate * 2 * h)), g), g)
    def frame(t, cls, sep, pad):  # (B, 2 h) -> (B, T)
        rest = t.new_full((B, T - 2 * h - 3), pad)                                  # one position where T is even
        return torch.cat((column(t, cls), t[:, :h], column(t, sep), t[:, h:], column(t, sep), rest), dim=1)
    return dict(inp=frame(noisy, CLS, SEP, PAD), tgt=frame(tgt, IGNORE, IGNORE, IGNORE),
                labels=(~negative).long(), mask="bidirectional")


def nsp_window(T, hp):
    if hp.nsp_negatives not in ("random", "swap"):
        fail(f"--nsp_negatives {hp.nsp_negatives}: unknown. Try random or swap")
    if T < 7 or hp.batch_size * hp.accum < 2:
        fail(f"--objective nsp: needs rows of 7 positions and 2 rows a step, and has {T} and "
             f"{hp.batch_size * hp.accum}. Try a larger --block_size, --batch_size or weight")
    return 2 * ((T - 3) // 2) + GAP


def nsp_heads(sizes, hp):
    return {"follows": readout(sizes.n_embd)}


def nsp_counts(batch, hp):
    return {"nll": token_counts(batch, hp)["nll"], "nsp": len(batch["labels"])}


def nsp_loss(model, heads, batch, hp):
    h = model(batch["inp"], batch["mask"])                                          # (B, T, C)
    follows, counts = heads["follows"](h[:, 0].float())[:, 0], nsp_counts(batch, hp)
    return {"nll": (nats(model.logits(h), batch["tgt"]), counts["nll"], 1.0),
            "nsp": (yes_no(follows, batch["labels"]), counts["nsp"], 1.0)}


def nsp_stats(model, heads, batch, hp):
    follows = heads["follows"](model(batch["inp"], batch["mask"])[:, 0].float())[:, 0]
    return {"accuracy": (((follows > 0) == (batch["labels"] == 1)).sum(), len(follows))}


# ---- contrastive: InfoNCE over crops

def contrastive(x, g, hp):  # x (B, T) -> inp (B, 2, Lc)
    """Contrastive learning: which of the batch's crops comes from the same window? (Contriever, Izacard et al. 2022)

        window   t h e   c a t   s a t   o n       two crops of Lc = crop * T bytes each, from anywhere in it
        inp      [h e   c a t] [a t   s a t]       who sees whom: bidirectional

    InfoNCE (van den Oord et al. 2018) on the mean of a crop's states, normalized, divided by tau, in both directions.
    The negatives are the other rows of the micro-batch: accumulation and several processes equal one big batch only
    at a fixed micro-batch size, and validation compares 32 rows. Departures: crops of one length, no byte deleted, no
    queue of older negatives."""
    B, T = x.shape
    Lc = max(1, round(hp.crop * T))
    start = torch.randint(0, T - Lc + 1, (B, 2, 1), generator=g, device=g.device)
    at = start + torch.arange(Lc, device=g.device)                                  # (B, 2, Lc)
    return dict(inp=x.gather(1, at.flatten(1)).view(B, 2, Lc), mask="bidirectional")


def contrastive_window(T, hp):
    if round(hp.crop * T) >= T:
        fail(f"--crop {hp.crop:g}: both crops would be the whole window. Try --crop 0.5")
    if hp.batch_size < 2:
        fail(f"--objective contrastive: compares the rows of a micro-batch, and has {hp.batch_size}. "
             "Try a larger --batch_size, such as 8, or weight")
    return T


def embed(model, inp):  # (N, Lc) -> (N, C) float32 of length 1: the mean of the states
    return F.normalize(model(inp, "bidirectional").float().mean(1), dim=-1)


def similarities(model, batch, hp):  # -> (B, B): row i's first crop against row j's second
    a, b = embed(model, batch["inp"].flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
    return a @ b.T / hp.tau


def contrastive_counts(batch, hp):
    return {"info": 2 * len(batch["inp"])}


def contrastive_loss(model, heads, batch, hp):
    sim = similarities(model, batch, hp)
    own = torch.arange(len(sim), device=sim.device)
    return {"info": (nats(sim, own) + nats(sim.T, own), contrastive_counts(batch, hp)["info"], 1.0)}


def contrastive_stats(model, heads, batch, hp):
    sim = similarities(model, batch, hp)
    return {"top1": ((sim.argmax(1) == torch.arange(len(sim), device=sim.device)).sum(), len(sim))}


# ---- mdlm: masked diffusion

def mdlm(x, g, hp):  # x (B, L) -> inp, tgt (B, L), weight (B,)
    """Masked diffusion: bytes from any share of the others (MDLM, Sahoo et al. 2024; LLaDA, Nie et al. 2025).

        inp   t [M] [M]   c [M] t    who sees whom: bidirectional; l of L bytes masked
        tgt   .  h   e  . .  a  .    loss at these, times L / l, divided by B * L

    The loss bounds -log p(x) from above. MDLM's integral over t in (0, 1) of (1/t) E[sum of nats at bytes masked with
    probability t] equals the mean over l = 1..L of (L/l) E[sum of nats at l masked bytes]: with exactly l bytes the
    weight is never larger than L, no row is empty, and the spread is far smaller. l is stratified over the batch. Only
    bytes compete: MASK and other ids are never predicted (MDLM's SUBS)."""
    B, L = x.shape
    count = 1 + (stratified(B, g) * L).long().clamp(max=L - 1)                      # (B,): l of each row
    masked = ranks(torch.rand(B, L, generator=g, device=g.device)) < count[:, None]                 # (B, L)
    return dict(inp=x.masked_fill(masked, MASK), tgt=x.where(masked, IGNORE), weight=L / count, mask="bidirectional")


def mdlm_counts(batch, hp):
    return {"bound": batch["inp"].numel()}


def mdlm_bounds(model, batch):  # -> (B,): an estimate of each row's bound, in nats
    h = model(batch["inp"], batch["mask"], batch.get("doc"))
    logits = model.logits(h)[..., :N_BYTES]
    each = F.cross_entropy(logits.flatten(0, 1), batch["tgt"].flatten(), ignore_index=IGNORE, reduction="none")
    return each.view_as(batch["inp"]).sum(1) * batch["weight"]


def mdlm_loss(model, heads, batch, hp):
    return {"bound": (mdlm_bounds(model, batch).sum(), mdlm_counts(batch, hp)["bound"], 1.0)}


# ---- rotation: find the seam

def rotation(x, g, hp):  # x (B, T) -> inp (B, T), labels (B,)
    """Rotation: where was a rotated window cut?

        window   t h e   c a t          who sees whom: bidirectional
        inp      c a t t h e            the label is 3, the place of the window's first byte; one label a row

    BART (Lewis et al. 2020) rotates documents but reconstructs them; to predict the seam is this project's sources'
    reading, made a pointer over the T positions. The rotation is uniform over 0..T - 1."""
    B, T = x.shape
    r = torch.randint(0, T, (B, 1), generator=g, device=g.device)
    at = (torch.arange(T, device=g.device) + r) % T                                 # (B, T)
    return dict(inp=x.gather(1, at), labels=((T - r) % T)[:, 0], mask="bidirectional")


def rotation_heads(sizes, hp):
    return {"seam": readout(sizes.n_embd)}


def rotation_counts(batch, hp):
    return {"seam": len(batch["labels"])}


def seams(model, heads, batch):  # -> (B, T): a score for each position
    return heads["seam"](model(batch["inp"], batch["mask"]).float())[..., 0]


def rotation_loss(model, heads, batch, hp):
    return {"seam": (nats(seams(model, heads, batch), batch["labels"]), rotation_counts(batch, hp)["seam"], 1.0)}


def rotation_stats(model, heads, batch, hp):
    return {"accuracy": ((seams(model, heads, batch).argmax(1) == batch["labels"]).sum(), len(batch["labels"]))}


# ---- hybrid: masked and causal rows through one head

def hybrid(x, g, hp):  # x (B, T + 1) -> inp, tgt (B, T), mask (B,)
    """Masked and causal rows in one batch, one head, one shift (GPT-BERT, Charpentier and Samuel 2024).

        inp   t [M] e   c    tgt   h . . . .      masked row: bidirectional; position i - 1 predicts the masked byte i
        inp   t  h  e   c    tgt   h e   c a      causal row

    hybrid_ratio of the rows are masked; the loss is the mean of each kind, weighed by its share of the rows. The first
    byte, which no position predicts, is never masked. Departure: single bytes are masked in place of short spans."""
    B, T = x.size(0), x.size(1) - 1
    row = torch.arange(B + 1, device=g.device) * hp.hybrid_ratio + 1e-6
    masked = row.long().diff() > 0                                                  # (B,): spread evenly over the batch
    noisy, tgt = mask_bytes(x[:, :T], 1 + choose(B, T - 1, max(1, round(hp.mask_rate * T)), g), g)
    tgt = F.pad(tgt[:, 1:], (0, 1), value=IGNORE)                                   # shifted as in clm
    inp, tgt = noisy.where(masked[:, None], x[:, :-1]), tgt.where(masked[:, None], x[:, 1:])
    return dict(inp=inp, tgt=tgt, mask=torch.where(masked, T, 0))


def hybrid_window(T, hp):
    for rows in (hp.batch_size * hp.accum, EVAL_ROWS):
        if not 0 < int(rows * hp.hybrid_ratio + 1e-6) < rows and 0 < hp.hybrid_ratio < 1:
            fail(f"--hybrid_ratio {hp.hybrid_ratio:g}: leaves one kind without a row in a batch of {rows}. "
                 "Try a ratio nearer to .5")
    if round(hp.mask_rate * T) > T - 1:
        fail(f"--mask_rate {hp.mask_rate:g}: hybrid never masks the first byte. Try --mask_rate 0.15")
    return next_byte(T, hp)


def hybrid_targets(batch):  # -> masked rows' and causal rows' targets, each (B, T)
    masked = (batch["mask"] > 0)[:, None]
    return batch["tgt"].where(masked, IGNORE), batch["tgt"].where(~masked, IGNORE)


def hybrid_counts(batch, hp):
    masked, causal = hybrid_targets(batch)
    return {"masked": (masked != IGNORE).sum().clamp(min=1), "causal": (causal != IGNORE).sum().clamp(min=1)}


def hybrid_loss(model, heads, batch, hp):
    logits = model.logits(model(batch["inp"], batch["mask"], batch.get("doc")))
    masked, causal = hybrid_targets(batch)
    counts = hybrid_counts(batch, hp)
    return {"masked": (nats(logits, masked), counts["masked"], hp.hybrid_ratio),
            "causal": (nats(logits, causal), counts["causal"], 1 - hp.hybrid_ratio)}


# ---- the table: what train.py, sample.py, --help and the tests know of the objectives
#   settings  {flag: (default, help, lowest, highest)}
#   bpb       "exact" where the objective trains the model to code text from the left under the causal mask,
#             "bound" where its own loss bounds that code
#   whole     wants windows without a NUL inside
#   packs     keeps the text's order, so that --doc_mask can keep attention inside a document
#   targets   counts of positions with loss, where counts are of something else
#   defaults  other defaults of train.py's flags
#   like      the objective whose way to be used sample.py and compare.py take for it, such as "mlm" to fill [MASK]

MASK_RATE = {"mask_rate": (0.15, "share of positions to predict", 0.001, 1.0)}
SPANS = {"span_rate": (0.15, "share of bytes in spans", 0.001, 0.999),
         "span_mean": (3.0, "mean length of a span, in bytes", 1.0, 1e6)}

OBJECTIVES = {
    "clm": dict(
        help="each byte from those before it", use="continue a prompt", mask="causal", bpb="exact", packs=True,
        settings={}, window=next_byte, make=clm, heads=no_heads, loss=token_loss, counts=token_counts),
    "mlm": dict(
        help="masked bytes from all the others", use="fill [MASK]", mask="bidirectional", packs=True,
        settings=MASK_RATE, window=same_length, make=mlm, heads=no_heads, loss=token_loss, counts=token_counts),
    "prefix": dict(
        help="a suffix from a prefix read both ways", use="read a prompt, continue", mask="prefix",
        bpb="exact", packs=True,
        settings={"prefix_min": (0.0, "shortest prefix, as a share of the block", 0.0, 1.0),
                  "prefix_max": (1.0, "longest prefix, as a share of the block", 0.0, 1.0)},
        window=prefix_window, make=prefix_lm, heads=no_heads, loss=token_loss, counts=token_counts),
    "span": dict(
        help="spans of a text behind their sentinels", use="fill holes", mask="prefix", whole=True,
        settings=SPANS, window=span_window, make=span, heads=no_heads, loss=token_loss, counts=token_counts),
    "ul2": dict(
        help="short spans, long spans, suffixes", use="fill holes, continue", mask="prefix", whole=True,
        settings=SPANS | {"ul2_weights": ("R:.5,S:.25,X:.25", "shares of the rows of the denoisers R, S and X")},
        window=ul2_window, make=ul2, heads=no_heads, loss=token_loss, counts=token_counts, stats=ul2_stats),
    "fim": dict(
        help="text with its middle moved to the end", use="write between two texts", mask="causal",
        bpb="exact", whole=True,
        settings={"fim_rate": (0.5, "share of rows that are rearranged", 0.0, 1.0),
                  "fim_spm_rate": (0.5, "share of those with the suffix first", 0.0, 1.0)},
        window=fim_window, make=fim, heads=no_heads, loss=token_loss, counts=token_counts),
    "mtp": dict(
        help="several next bytes at once", use="continue, drafting ahead", mask="causal", bpb="exact", packs=True,
        settings={"mtp_heads": (4, "bytes predicted at each position", 1, 64)},
        window=mtp_window, make=mtp, heads=mtp_heads, loss=mtp_loss, counts=mtp_counts),
    "electra": dict(
        help="which bytes a generator made up", use="mark suspicious bytes", mask="bidirectional",
        settings=MASK_RATE | {"electra_weight": (50.0, "weight of the discriminator's loss", 0.0, 1e6),
                              "gen_scale": (0.25, "width of the generator, as a share of n_embd", 0.001, 4.0)},
        window=same_length, make=electra, heads=electra_heads, loss=electra_loss, counts=electra_counts,
        stats=electra_stats),
    "bart": dict(
        help="a whole text from a noisy one", use="repair a text", mask="prefix", whole=True,
        settings={"bart_noise": ("infill,permute", "any of " + ",".join(NOISES)),
                  "bart_rate": (0.3, "share of bytes struck by mask, delete, infill and replace together", 0.001, 0.9),
                  "poisson_lambda": (3.0, "mean length of an infilled span", 2.0, 20.0)},
        window=bart_window, make=bart, heads=no_heads, loss=token_loss, counts=token_counts),
    "nsp": dict(
        help="whether B follows A, and masked bytes", use="compare two texts", mask="bidirectional", whole=True,
        settings=MASK_RATE | {"nsp_negatives": ("random", "random (another row's B) or swap (A behind B)")},
        window=nsp_window, make=nsp, heads=nsp_heads, loss=nsp_loss, counts=nsp_counts, stats=nsp_stats),
    "contrastive": dict(
        help="which crops share a window", use="embed and search", mask="bidirectional", whole=True,
        settings={"tau": (0.05, "temperature of the similarities", 1e-4, 1e4),
                  "crop": (0.5, "length of a crop, as a share of the block", 0.01, 1.0)},
        window=contrastive_window, make=contrastive, heads=no_heads, loss=contrastive_loss, counts=contrastive_counts,
        stats=contrastive_stats),
    "mdlm": dict(
        help="masked bytes at any rate", use="write in any order", mask="bidirectional", bpb="bound", packs=True,
        settings={}, window=same_length, make=mdlm, heads=no_heads, loss=mdlm_loss, counts=mdlm_counts,
        targets=token_counts),
    "rotation": dict(
        help="where a rotated text was cut", use="find the seam", mask="bidirectional", whole=True,
        defaults={"block_size": 64, "batch_size": 32},          # one label a row: 8 long rows do not start to learn
        settings={}, window=same_length, make=rotation, heads=rotation_heads, loss=rotation_loss,
        counts=rotation_counts, stats=rotation_stats),
    "hybrid": dict(
        help="masked rows and causal rows", use="continue, fill [MASK]", mask="both", bpb="exact", packs=True,
        settings=MASK_RATE | {"hybrid_ratio": (0.5, "share of rows that are masked", 0.0, 1.0)},
        window=hybrid_window, make=hybrid, heads=no_heads, loss=hybrid_loss, counts=hybrid_counts),
}
