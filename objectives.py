"""Every pre-training objective: how clean windows become a batch, and how a batch becomes a loss.

B rows, T positions of a row, n raw bytes that fill one, C width, V vocabulary

An objective is a few functions and one entry in OBJECTIVES, at the foot of this file:
    window(T, hp) -> n                     raw bytes that fill a row of T positions
    make(x (B, n), g, hp) -> batch         dict of tensors with B rows each; "mask" may be a name instead
    heads(sizes, hp) -> {name: module}     what is needed beyond the model's byte head
    loss(model, heads, batch, hp) -> {term: (sum in nats, count, coefficient)}
    counts(batch, hp) -> {term: count}     the counts alone, known before the forward pass
Corruption draws from g alone and has static shapes: no loop over rows, nothing read back from the device.
Exact counts (k masked bytes in every row) stand where papers draw each position by itself, so that no row is
ever without a target. The total is the sum over terms of coefficient * sum / count, with sums and counts over
the whole global batch: a mean of micro-batch means would weigh the targets unequally.
"""
import torch
import torch.nn.functional as F

from data import MASK, fail

IGNORE = -100                                   # in a target: no loss at this position


# ---- building blocks

def choose(B, T, k, g):  # -> (B, k) long: k distinct positions of each row, all subsets equally likely
    return torch.rand(B, T, generator=g, device=g.device).topk(k, dim=1).indices


def random_bytes(shape, g):  # -> long in 1..255: never the end of a document, never a special id
    return torch.randint(1, 256, shape, generator=g, device=g.device)


def next_byte(T, hp):  # window of the objectives that predict each row's next byte
    return T + 1


def same_length(T, hp):  # window of the objectives that predict bytes in place
    return T


def no_heads(sizes, hp):
    return {}


def token_counts(batch, hp):  # -> {"nll": number of targets}
    return {"nll": (batch["tgt"] != IGNORE).sum()}


def token_loss(model, heads, batch, hp):
    """Cross-entropy of the byte head at every position with a target, in nats."""
    h = model(batch["inp"], batch["mask"], batch.get("doc"))                        # (B, T, C)
    nats = F.cross_entropy(model.logits(h).flatten(0, 1), batch["tgt"].flatten(), ignore_index=IGNORE, reduction="sum")
    return {"nll": (nats, token_counts(batch, hp)["nll"], 1.0)}


# ---- causal language modeling

def clm(x, g, hp):  # x (B, T + 1) -> inp, tgt (B, T)
    """Causal language modeling: each byte from those before it (Radford et al. 2018).

        inp   t h e   c a      who sees whom: causal
        tgt   h e   c a t      loss at all T positions
    """
    return dict(inp=x[:, :-1], tgt=x[:, 1:], mask="causal")


# ---- masked language modeling

def mlm(x, g, hp):  # x (B, T) -> inp, tgt (B, T)
    """Masked language modeling: some bytes from all the others (BERT, Devlin et al. 2019).

        inp   t [M] e   c a q    who sees whom: bidirectional
        tgt   .  h  . . .  . t   loss at the chosen positions: 80% MASK, 10% a random byte, 10% left as they are

    Exactly round(mask_rate * T) positions of each row, as in BERT's own code, drawn anew for every batch, as in
    RoBERTa (Liu et al. 2019). Departures: bytes in place of word pieces; a random byte is never a special id."""
    B, T = x.shape
    k = max(1, round(hp.mask_rate * T))
    at = choose(B, T, k, g)                                                         # (B, k)
    clean = x.gather(1, at)
    u = torch.rand(B, k, generator=g, device=g.device)
    noise = torch.where(u < 0.8, MASK, torch.where(u < 0.9, random_bytes((B, k), g), clean))
    return dict(inp=x.scatter(1, at, noise), tgt=torch.full_like(x, IGNORE).scatter(1, at, clean), mask="bidirectional")


# ---- prefix language modeling

def prefix_lm(x, g, hp):  # x (B, T + 1) -> inp, tgt (B, T), mask (B,)
    """Prefix language modeling: a suffix from a prefix that is read in both directions (T5, Raffel et al. 2020).

        inp   t h e   c a      who sees whom: the first P positions all of each other, the rest causal (P = 3)
        tgt   . . .   c a t    loss from position P - 1 on, which predicts the first byte after the prefix

    P is uniform over prefix_min * T .. prefix_max * T (at least 1, at most T - 1), drawn per row. Positions
    before P - 1 see the byte that they would predict, so they have no loss."""
    B, T = x.size(0), x.size(1) - 1
    low, high = prefix_range(T, hp)
    P = torch.randint(low, high + 1, (B,), generator=g, device=g.device)
    suffix = torch.arange(T, device=x.device) >= P[:, None] - 1                     # (B, T)
    return dict(inp=x[:, :-1], tgt=x[:, 1:].where(suffix, IGNORE), mask=P)


def prefix_range(T, hp):  # -> shortest and longest prefix
    return max(1, round(hp.prefix_min * T)), max(1, min(T - 1, round(hp.prefix_max * T)))


def prefix_window(T, hp):
    low, high = prefix_range(T, hp)
    if low > high:
        fail(f"--prefix_min {hp.prefix_min} --prefix_max {hp.prefix_max}: leave no prefix length at --block_size {T}. "
             "Try a minimum below the maximum")
    return next_byte(T, hp)


# ---- the table: what train.py, sample.py, --help and the tests know of the objectives
# settings: {flag: (default, help, lowest, highest)}. left_to_right: trained to code text from the left under the
# causal mask, which gives bits per byte. whole: wants windows without a NUL inside.

OBJECTIVES = {
    "clm": dict(
        help="causal: each byte from those before it", use="continue a prompt", mask="causal", left_to_right=True,
        settings={}, window=next_byte, make=clm, heads=no_heads, loss=token_loss, counts=token_counts),
    "mlm": dict(
        help="masked: some bytes from all the others", use="fill [MASK]", mask="bidirectional",
        settings={"mask_rate": (0.15, "share of positions to predict", 0.001, 1.0)},
        window=same_length, make=mlm, heads=no_heads, loss=token_loss, counts=token_counts),
    "prefix": dict(
        help="a suffix from a prefix read both ways", use="read a prompt, continue", mask="prefix", left_to_right=True,
        settings={"prefix_min": (0.0, "shortest prefix, as a share of the block", 0.0, 1.0),
                  "prefix_max": (1.0, "longest prefix, as a share of the block", 0.0, 1.0)},
        window=prefix_window, make=prefix_lm, heads=no_heads, loss=token_loss, counts=token_counts),
}
