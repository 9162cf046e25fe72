"""The transformer that all objectives share: mask rule, blocks, n-gram embeddings, network, KV cache.

B rows, T positions, C width, H heads, D = C / H head width, L layers, V vocabulary; T_q queries, T_k keys;
W ids in the context of a position, N n-gram lengths, R rows of the n-gram table for each length

Pre-norm blocks with layer norm without parameters (OLMo, Groeneveld et al. 2024), RoPE (Su et al. 2021), QK-norm (Henry
et al. 2020; here a layer norm), ReLU^2 (So et al. 2021), no biases; output projections and the byte head start at zero.
The first block reads a weighted sum of the embeddings of a byte and the three before it (similar to the Canon layers of
Allen-Zhu 2025) plus hashed n-gram embeddings (Pagnoni et al. 2024). Objectives compute a loss from the hidden states.
"""
import functools
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

ROPE_BASE = 10000.0
CONV_WIDTH = 4                                  # number of ids that the convolution over the embeddings reads
NGRAMS = 3, 4, 5, 6                             # lengths of the n-grams that are embedded
NGRAM_DIM = 32                                  # width of an n-gram embedding
NGRAM_DECAY = 0.95                              # decay of the second moments of the n-gram table
NGRAM_RATE = 6.0                                # learning rate of the n-gram table, relative to the other parameters
CONTEXT_WIDTH = max(CONV_WIDTH, *NGRAMS)        # W: number of ids that the input of a position depends on
NGRAM_IDS = 258                                 # bytes, PAD and MASK; n-grams that contain other ids are not embedded
HASH_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)    # 2^64 / golden ratio (Knuth 1973), as a signed integer


@dataclass
class ModelConfig:
    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int = 512
    n_outputs: int = 512                        # the byte head predicts ids 0 .. n_outputs - 1
    ngram_rows: int = 0                         # R; 0 turns n-gram embeddings off
    attn_scale: float = 1.0                     # multiplies the attention logits; 2 is sharper


# ---- the mask rule
def can_attend(q, k, prefix):
    """The mask rule: True where the query at position q may attend to the key at position k. Arguments broadcast.
    choose_attention has faster forms of this rule: if you change one, change both.

    causal (prefix 0)   prefix 2        bidirectional (prefix T)
      k 0 1 2 3           0 1 2 3         0 1 2 3
    q 0 x . . .         0 x x . .       0 x x x x
      1 x x . .         1 x x . .       1 x x x x
      2 x x x .         2 x x x .       2 x x x x
      3 x x x x         3 x x x x       3 x x x x"""
    return (k <= q) | (k < prefix)


def dense_mask(prefix, q, T_k):  # prefix an int or (B,), positions q (T_q,) -> (1 or B, T_q, T_k) bool
    k = torch.arange(T_k, device=q.device)[None, None]
    if not isinstance(prefix, int):
        prefix = prefix[:, None, None]
    return can_attend(q[:, None], k, prefix)


def choose_attention(prefix, q, T_k, config, dtype, mask=None):
    """Returns the function attend(q (B, H, T_q, D), k, v (B, H, T_k, D)) -> (B, H, T_q, D) for a forward pass. Every
    choice computes the same attention; which is fastest depends on the device and the mask. The argument q holds the
    positions of the queries (T_q,), not the queries. mask: (B or 1, T_q, T_k) bool, replaces can_attend."""
    cuda = q.device.type == "cuda"
    scale = config.attn_scale * (config.n_embd // config.n_head) ** -0.5
    if cuda and mask is None and isinstance(prefix, int):       # kernels without a mask tensor are the fastest
        if prefix == 0 and len(q) == T_k:
            return functools.partial(F.scaled_dot_product_attention, is_causal=True, scale=scale)
        if prefix >= T_k:
            return functools.partial(F.scaled_dot_product_attention, scale=scale)
    if mask is None:
        mask = dense_mask(prefix, q, T_k)
    elif mask.stride(0) == 0:                   # one mask that was expanded to all rows
        mask = mask[:1]
    allowed = mask[:, None]                     # (B or 1, 1, T_q, T_k)
    if cuda or len(q) < T_k:                    # with a cache there is no backward pass, for which attend_dense is made
        return functools.partial(F.scaled_dot_product_attention, attn_mask=allowed, scale=scale)
    bias = torch.zeros(allowed.shape, dtype=dtype, device=q.device).masked_fill(~allowed, -torch.inf)
    if len(bias) > 1:
        bias = bias.expand(-1, config.n_head, -1, -1)
    return functools.partial(attend_dense, bias=bias.flatten(0, 1), scale=scale)


def attend_dense(q, k, v, bias, scale):  # q (B, H, T_q, D), k and v (B, H, T_k, D) -> (B, H, T_q, D)
    """softmax(scale q k^T + bias) v, where bias (1 or B H, T_q, T_k) is 0 where a query may attend and -inf elsewhere.
    baddbmm adds the bias in the same kernel. On a CPU, scaled_dot_product_attention has a slower backward pass."""
    att = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=scale)     # (B H, T_q, T_k)
    return (att.softmax(-1) @ v.flatten(0, 1)).unflatten(0, q.shape[:2])


# ---- blocks
def norm(x):  # (..., C) -> (..., C) with mean 0 and variance 1
    return F.layer_norm(x, (x.size(-1),))       # on a CPU this is one kernel, F.rms_norm is eight


def rope_cos_sin(positions, D, dtype):  # positions (...) -> cos, sin (..., D), for apply_rope
    freq = ROPE_BASE ** (-torch.arange(0, D, 2, device=positions.device, dtype=torch.float32) / D)
    angle = positions[..., None].float() * freq                                     # (..., D / 2)
    cos = angle.cos()
    sin = angle.sin()
    pair = torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)
    # as_strided changes nothing, but torch.compile does not fuse it, so cos and sin are computed once, not per block
    return [t.as_strided(t.size(), t.stride()) for t in pair]


def apply_rope(x, cos, sin):  # x (..., D) -> the same shape; rotates channels i and i + D / 2 by their angle
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, dims=-1), sin)


class StackedLinear(nn.Module):
    """y = x W^T in x's dtype, with a float32 weight (stack, n_out, n_in). stack > 1 stores several linear layers of the
    same input: the forward pass is one matrix product, but the optimizer sees separate matrices. Muon trains the
    StackedLinear layers inside blocks, AdamW all other parameters."""

    def __init__(self, n_in, n_out, stack=1, zero=False):
        super().__init__()
        weight = torch.zeros(stack, n_out, n_in) if zero else torch.randn(stack, n_out, n_in) * n_in ** -0.5
        self.weight = nn.Parameter(weight)

    def forward(self, x):  # (..., n_in) -> (..., stack * n_out)
        return F.linear(x, self.weight.flatten(0, 1).to(x.dtype))


class Block(nn.Module):
    """Attention, then an MLP, each added to the residual stream.
    A custom block must mask only through `attend` and keep x's dtype. With a cache, it must pass its new keys and
    values to `append_kv` and attend over all that this returns; `attend` masks the empty slots. cos, sin: from
    rope_cos_sin, ([B,] T, 1, 1, D), for queries and keys (B, T, 2, H, D)."""

    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.n_head = config.n_head
        self.qkv = StackedLinear(C, C, stack=3)
        self.proj = StackedLinear(C, C, zero=True)
        self.up = StackedLinear(C, 4 * C)
        self.down = StackedLinear(4 * C, C, zero=True)

    def forward(self, x, cos, sin, attend, append_kv=None):  # x (B, T, C) -> (B, T, C)
        B, T, C = x.shape
        # attention is the only layer of a block that mixes positions
        qkv = self.qkv(norm(x)).view(B, T, 3, self.n_head, C // self.n_head)
        qk, v = qkv.split((2, 1), dim=2)                                            # (B, T, 2, H, D), (B, T, 1, H, D)
        q, k = apply_rope(norm(qk), cos, sin).permute(2, 0, 3, 1, 4)                # QK-norm; both (B, H, T, D)
        v = v[:, :, 0].transpose(1, 2)                                              # (B, H, T, D)
        if append_kv is not None:
            k, v = append_kv(k, v)                                                  # (B, H, T_k, D)
        y = attend(q, k, v)                                                         # (B, H, T, D)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.relu(self.up(norm(x))).square())


def run_blocks(blocks, x, config, prefix, cache=None, positions=None, mask=None, ngrams=None):
    """Applies the blocks to x (B, T, C) -> (B, T, C). prefix, cache, positions, mask: as in Transformer.forward.
    ngrams: (embeddings (B, T, C), one gain (C,) per block); their product is added to the input of each block."""
    T = x.size(1)
    T_k = T
    q = torch.arange(T, device=x.device)                                            # (T,): positions of the queries
    if cache is not None:
        T_k = cache.k[0].size(2)
        q = q + cache.length
    attend = choose_attention(prefix, q, T_k, config, x.dtype, mask)
    positions = q if positions is None else positions
    cos, sin = rope_cos_sin(positions[..., None, None], config.n_embd // config.n_head, x.dtype)    # ([B,] T, 1, 1, D)
    for i, block in enumerate(blocks):
        if ngrams is not None:
            e, gains = ngrams
            x = x + e * gains[i]
        append_kv = None if cache is None else functools.partial(cache.append_kv, i, q)
        x = block(x, cos, sin, attend, append_kv)
    if cache is not None:
        cache.length += T
    return x


# ---- the input of the first block
def context_ids(idx, previous):  # ids (B, T), the W - 1 ids before them (B, W - 1) -> (B, T, W)
    """Returns the last W ids at each position, its own first: with W = 3, ids 5 6 7 after 3 4 give [5 4 3], [6 5 4] and
    [7 6 5]. Apart from attention, only layers that read these ids mix positions. The ids are at or before their
    position, so every prefix allows them; a custom `mask` may not, and such a batch passes `before`."""
    return torch.cat((previous, idx), dim=1).unfold(1, CONTEXT_WIDTH, 1).flip(2)


def causal_conv(context, embedding, weight):  # ids (B, T, W), embedding (V, C), weight (CONV_WIDTH, C) -> (B, T, C)
    """y_t = sum over j < CONV_WIDTH of weight[j] * (embedding of the id j positions before t), channel by channel."""
    if context[..., 0].numel() < len(embedding):                # few positions, as in decoding
        return (F.embedding(context[..., :CONV_WIDTH], embedding) * weight).sum(2)
    # with B * T > V, weighting the V embeddings is cheaper than weighting those of all positions
    return sum(F.embedding(context[..., j], embedding * weight[j]) for j in range(CONV_WIDTH))


def hash_ngrams(context, rows):  # ids (B, T, W) -> (B, T, N): row in the table of each n-gram that ends at a position
    """Hashes n-grams by a polynomial of their ids. With M = HASH_MULTIPLIER, ids a b c d that end in d have the code
    (((d + 1) M + c + 1) M + b + 1) M + a + 1, modulo 2^64. Each n-gram length has its own `rows` rows of the table."""
    code = torch.zeros_like(context[..., 0])
    codes = []                                  # of the last id, the last 2 ids, the last 3 ids, ...
    for n in range(1, CONTEXT_WIDTH + 1):
        code = code * HASH_MULTIPLIER + context[..., n - 1] + 1                     # int64 overflow is the modulo
        codes.append(code)
    codes = torch.stack([codes[n - 1] for n in NGRAMS], dim=2)                      # (B, T, N)
    codes = codes ^ (codes >> 32)               # the low bits, which decide the remainder, must depend on the high ones
    first_row = torch.arange(0, len(NGRAMS) * rows, rows, device=codes.device)      # (N,)
    return codes % rows + first_row


def hash_uniform(key, seed):  # int64 (...), int64 0-D -> (...) float32
    """Returns a pseudorandom number in [0, 1) for each key, a function of key and seed only, so it needs no generator.
    With seed 7, the keys 0, 1, 2, 3 give 0.3344, 0.8377, 0.8721, 0.9934."""
    x = key * HASH_MULTIPLIER + seed
    for _ in range(2):                          # with one round, another seed would only shift the numbers
        x = (x ^ (x >> 32)) * HASH_MULTIPLIER
    return (x >> 40 & 0xFFFFFF) / 2 ** 24       # the highest 24 bits, the precision of float32


class NgramEmbedding(nn.Module):
    """Embeddings of the n-grams that end at each position (Pagnoni et al. 2024; Engram, Cheng et al. 2026).
    The hash of an n-gram selects a row of a table; the rows of all lengths are concatenated and projected to width C.
    Rows are initialized to zero. N-grams with a sentinel or a separator count as zero, since these ids join unrelated
    pieces of text. Training drops a share of the lookups, as in dropout; which ones depends only on table row, position
    and seed. The embeddings are added before the first block and, normalized and times `gain`, to each block's input.

    The table is a buffer, not a parameter, because an optimizer would update all rows, and a step reads only a few. If
    keep_lookups is set (train.py sets it), backward passes store the gradient of each lookup, and `update` applies them
    to the rows that were read. Otherwise the table does not change."""

    def __init__(self, config):
        super().__init__()
        self.rows = config.ngram_rows
        self.register_buffer("table", torch.zeros(len(NGRAMS) * self.rows, NGRAM_DIM))          # (N R, NGRAM_DIM)
        # decayed sums of squared gradients, one for each row of the table; saved with the state of the optimizers
        self.register_buffer("moments", torch.zeros(len(NGRAMS) * self.rows), persistent=False)
        self.keep_lookups = False
        self.lookups = []                       # tuples: rows (n,), gradients (n, NGRAM_DIM), their mean squares (n,)
        self.proj = StackedLinear(len(NGRAMS) * NGRAM_DIM, config.n_embd)
        self.gain = nn.Parameter(torch.zeros(config.n_layer, config.n_embd))
        # each training step sets the share of the lookups to drop, and the seed
        self.register_buffer("drop", torch.zeros(()), persistent=False)
        self.register_buffer("seed", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, context, dtype):  # ids (B, T, W) -> (B, T, C)
        T = context.size(1)
        row = hash_ngrams(context, self.rows)                                       # (B, T, N)
        is_valid = context < NGRAM_IDS                                              # (B, T, W)
        scale = torch.stack([is_valid[..., :n].all(2) for n in NGRAMS], dim=2)      # (B, T, N): 0 or 1
        if self.training:
            position = torch.arange(T, device=row.device)[:, None]                  # (T, 1)
            is_kept = hash_uniform(row * T + position, self.seed) >= self.drop      # (B, T, N)
            scale = scale * is_kept / (1 - self.drop)                               # keeps the expected value
        keep = self.training and self.keep_lookups
        x = self.look_up(row) if keep else F.embedding(row, self.table)             # (B, T, N, NGRAM_DIM)
        return self.proj((x * scale[..., None]).flatten(2).to(dtype))

    def look_up(self, row):  # (B, T, N) -> (B, T, N, NGRAM_DIM); a backward pass appends the gradients to self.lookups
        def store(grad):
            grad = grad.flatten(0, 2)
            self.lookups.append((row.flatten(), grad, grad.square().mean(1)))
        x = F.embedding(row, self.table).requires_grad_()
        x.register_hook(store)
        return x

    @torch.no_grad()
    def update(self, lr, ok):  # 0-D tensors; if ok is False, all gradients count as zero
        """Applies the stored gradients with RMSprop (Tieleman and Hinton 2012), then discards them. A row of the table
        has one second moment, a decayed sum (not a mean), to which each lookup adds the mean square of its gradient."""
        self.moments.mul_(NGRAM_DECAY)
        for row, _, square in self.lookups:
            self.moments.index_add_(0, row, torch.where(ok, square, 0.0))
        for row, grad, _ in self.lookups:
            rate = NGRAM_RATE * lr / (self.moments[row].sqrt() + 1e-10)             # (n,)
            self.table.index_add_(0, row, -rate[:, None] * torch.where(ok, grad, 0.0))
        self.lookups.clear()


# ---- the network
class Transformer(nn.Module):
    """dtype: of the activations; weights, logits and losses are float32. heads: modules that objectives add."""

    def __init__(self, config, dtype=torch.float32):
        super().__init__()
        assert config.n_embd % (2 * config.n_head) == 0, config         # RoPE rotates pairs within a head
        self.config = config
        self.dtype = dtype
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        nn.init.normal_(self.embed.weight, std=0.3)             # small, for larger relative updates; a norm follows
        self.conv_weight = nn.Parameter(torch.randn(CONV_WIDTH, config.n_embd) * 0.3)           # row j: the id j before
        nn.init.ones_(self.conv_weight[0])
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.head = StackedLinear(config.n_embd, config.n_outputs, zero=True)
        self.ngrams = NgramEmbedding(config) if config.ngram_rows else None
        self.heads = nn.ModuleDict()

    def forward(self, idx, prefix=0, cache=None, positions=None, mask=None, before=None):
        """Returns the normalized hidden states (B, T, C) of ids idx (B, T).

        prefix: number of first positions that attend both ways; int or (B,), one per row; 0: causal, T: bidirectional
        mask: replaces the prefix; (B or 1, T, T) bool, True where a query may attend to a key
        positions: (B, T) for RoPE; default: 0, 1, 2, ..., counted from the start of the cache if there is one
        before: (B, T, W - 1) previous ids for convolution and n-grams, nearest first; default: those of the row
        cache: a Cache that idx continues; cannot be combined with mask or before"""
        if before is None:
            previous = idx.new_zeros(len(idx), CONTEXT_WIDTH - 1) if cache is None else cache.append_ids(idx)
            context = context_ids(idx, previous)                                    # (B, T, W)
        else:
            context = torch.cat((idx[..., None], before), dim=2)
        x = causal_conv(context, self.embed.weight, self.conv_weight).to(self.dtype)
        ngrams = None
        if self.ngrams is not None:
            e = self.ngrams(context, self.dtype)                                    # (B, T, C)
            x = x + e
            ngrams = norm(e), self.ngrams.gain.to(self.dtype).unbind()
        return norm(run_blocks(self.blocks, norm(x), self.config, prefix, cache, positions, mask, ngrams))

    def logits(self, h):  # hidden (..., C) -> (..., n_outputs) float32
        return self.head(h).float()


# ---- KV cache
class Cache:
    """Keys and values of all layers for up to T positions of B rows. Also their ids, of which convolution and n-grams
    read the last W - 1. To remove the last n positions: cache.length -= n. The length is a tensor on the device, and
    attention reads all T slots, of which the mask hides the empty ones. So no shape depends on the length, and a
    decoding step can be compiled and captured in a CUDA graph."""

    def __init__(self, model, B, T):
        config = model.config
        device = model.embed.weight.device
        shape = B, config.n_head, T, config.n_embd // config.n_head                 # (B, H, T, D), per layer
        self.k = [torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(config.n_layer)]
        self.v = [torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(config.n_layer)]
        self.ids = torch.zeros(B, CONTEXT_WIDTH - 1 + T, dtype=torch.long, device=device)       # W - 1 EOTs first
        self.length = torch.zeros((), dtype=torch.long, device=device)              # only modified in place

    def append_kv(self, i, positions, k, v):  # new keys and values of layer i -> all its keys and values (B, H, T, D)
        return self.k[i].index_copy_(2, positions, k), self.v[i].index_copy_(2, positions, v)

    def append_ids(self, idx):  # appends ids (B, T); returns the W - 1 ids before them (B, W - 1)
        slots = self.length + torch.arange(CONTEXT_WIDTH - 1 + idx.size(1), device=idx.device)
        self.ids.index_copy_(1, slots[CONTEXT_WIDTH - 1:], idx)
        return self.ids.index_select(1, slots[:CONTEXT_WIDTH - 1])
