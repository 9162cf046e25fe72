"""The transformer that all objectives share: mask rule, blocks, n-gram embeddings, network, KV cache.

B rows, T positions, C width, H heads, D = C / H head width, L layers, V vocabulary; T_q queries, T_k keys;
W ids that a position reads before the first block, N n-gram lengths, R rows of the n-gram table for each length

A pre-norm transformer: layer norm without parameters (OLMo, Groeneveld et al. 2024), RoPE (Su et al. 2021), QK-norm
(Henry et al. 2020; here a layer norm), ReLU^2 (So et al. 2021), no biases. The output projections of the blocks and the
byte head are initialized to zero. The first block reads a weighted sum of the embeddings of a byte and of the three
bytes before it (similar to the Canon layers of Allen-Zhu 2025), plus hashed n-gram embeddings (Pagnoni et al. 2024).
The network returns hidden states, from which each objective computes its loss.
"""
import functools
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

ROPE_BASE = 10000.0
CONV_WIDTH = 4                                  # number of ids that the convolution reads at each position
NGRAMS = 3, 4, 5, 6                             # lengths of the n-grams that are embedded
NGRAM_DIM = 32                                  # width of an n-gram embedding
CONTEXT_WIDTH = max(CONV_WIDTH, *NGRAMS)        # W: the current id and the W - 1 ids before it
NGRAM_IDS = 258                                 # only n-grams of ids below this (bytes, PAD, MASK) are embedded
HASH_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)    # 2^64 / golden ratio (Knuth 1973), as a signed integer


@dataclass
class ModelConfig:
    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int = 512
    n_outputs: int = 512                        # the byte head predicts ids 0 .. n_outputs - 1
    ngram_rows: int = 0                         # R; 0: no n-gram embeddings
    attn_scale: float = 1.0                     # multiplies the attention logits; above 1, attention is sharper


# ---- the mask rule
def can_attend(q_pos, k_pos, prefix):
    """The mask rule: True where the query at position q_pos may attend to the key at position k_pos. The arguments
    broadcast. choose_attention implements this rule with faster kernels. Change both together.

    causal (prefix 0)   prefix 2        bidirectional (prefix T)
      k 0 1 2 3           0 1 2 3         0 1 2 3
    q 0 x . . .         0 x x . .       0 x x x x
      1 x x . .         1 x x . .       1 x x x x
      2 x x x .         2 x x x .       2 x x x x
      3 x x x x         3 x x x x       3 x x x x"""
    return (k_pos <= q_pos) | (k_pos < prefix)


def dense_mask(prefix, q_pos, T_k):  # prefix an int or (B,), q_pos (T_q,) -> (1 or B, T_q, T_k) bool
    k_pos = torch.arange(T_k, device=q_pos.device)[None, None]                      # (1, 1, T_k)
    if not isinstance(prefix, int):
        prefix = prefix[:, None, None]                                              # (B, 1, 1)
    return can_attend(q_pos[:, None], k_pos, prefix)


def choose_attention(prefix, q_pos, T_k, config, dtype, mask=None):
    """Returns a function attend(q (B, H, T_q, D), k and v (B, H, T_k, D)) -> (B, H, T_q, D), which the blocks of a
    forward pass share. The cases differ only in speed. q_pos (T_q,): positions of the queries. mask (B or 1, T_q, T_k)
    bool: replaces can_attend."""
    on_gpu = q_pos.device.type == "cuda"
    has_cached_keys = len(q_pos) < T_k
    scale = config.attn_scale * (config.n_embd // config.n_head) ** -0.5
    sdpa = functools.partial(F.scaled_dot_product_attention, scale=scale)

    # on a GPU, kernels without a mask tensor are the fastest
    needs_no_mask = on_gpu and mask is None and isinstance(prefix, int)
    if needs_no_mask and prefix == 0 and not has_cached_keys:   # causal objectives, such as clm
        return functools.partial(sdpa, is_causal=True)
    if needs_no_mask and prefix >= T_k:         # bidirectional objectives, such as mlm
        return sdpa

    if mask is None:
        mask = dense_mask(prefix, q_pos, T_k)
    elif mask.stride(0) == 0:                   # one mask that was expanded to all rows
        mask = mask[:1]
    allowed = mask[:, None]                                                         # (B or 1, 1, T_q, T_k)

    # on a GPU: rows of different prefixes (span), a mask (bd3lm), or decoding; on a CPU: decoding
    if on_gpu or has_cached_keys:
        return functools.partial(sdpa, attn_mask=allowed)
    # on a CPU without a cache, as in training: attend_dense has a faster backward pass
    bias = torch.zeros(allowed.shape, dtype=dtype, device=q_pos.device).masked_fill(~allowed, -torch.inf)
    if len(bias) > 1:
        bias = bias.expand(-1, config.n_head, -1, -1)
    return functools.partial(attend_dense, bias=bias.flatten(0, 1), scale=scale)


def attend_dense(q, k, v, bias, scale):  # q (B, H, T_q, D), k and v (B, H, T_k, D) -> (B, H, T_q, D)
    """softmax(scale q k^T + bias) v. bias (1 or B H, T_q, T_k) is 0 where a query may attend and -inf elsewhere.
    baddbmm adds it in the same kernel. On a CPU, the backward pass of scaled_dot_product_attention is slower."""
    logits = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=scale)  # (B H, T_q, T_k)
    y = logits.softmax(-1) @ v.flatten(0, 1)                                        # (B H, T_q, D)
    return y.unflatten(0, q.shape[:2])


# ---- blocks
def norm(x):  # (..., C) -> (..., C) with mean 0 and variance 1
    return F.layer_norm(x, (x.size(-1),))       # on a CPU, this is one kernel and F.rms_norm is eight


def rope_cos_sin(positions, D, dtype):
    """Returns cos and sin (..., D) of the angles by which apply_rope rotates vectors at the positions (...). Channels i
    and i + D / 2 share the angle position * ROPE_BASE^(-2 i / D). For example, position 1 and D = 4 give the angles 1
    and 0.01, cos [0.54, 1.00, 0.54, 1.00] and sin [-0.84, -0.01, 0.84, 0.01]."""
    freq = ROPE_BASE ** (-torch.arange(0, D, 2, device=positions.device, dtype=torch.float32) / D)
    angle = positions[..., None].float() * freq                                     # (..., D / 2)
    cos = angle.cos()
    sin = angle.sin()
    cos = torch.cat((cos, cos), dim=-1).to(dtype)                                   # (..., D)
    sin = torch.cat((-sin, sin), dim=-1).to(dtype)                                  # (..., D)
    # as_strided changes nothing, but torch.compile does not fuse it, so cos and sin are computed once, not per block
    return cos.as_strided(cos.size(), cos.stride()), sin.as_strided(sin.size(), sin.stride())


def apply_rope(x, cos, sin):  # x (..., D) -> (..., D)
    """Rotates each pair (a, b) of channels i and i + D / 2 to (a cos - b sin, b cos + a sin)."""
    swapped = x.roll(x.size(-1) // 2, dims=-1)                                      # b where x has a, a where it has b
    return torch.addcmul(x * cos, swapped, sin)


class StackedLinear(nn.Module):
    """y = x W^T in the dtype of x. The weight (stack, n_out, n_in) is float32. With stack > 1 it holds several linear
    layers of the same input. The forward pass is then one matrix product, but the optimizer sees separate matrices.
    By default, Muon trains the StackedLinear layers inside blocks, and AdamW all other parameters."""

    def __init__(self, n_in, n_out, stack=1, zero=False):
        super().__init__()
        weight = torch.zeros(stack, n_out, n_in) if zero else torch.randn(stack, n_out, n_in) * n_in ** -0.5
        self.weight = nn.Parameter(weight)

    def forward(self, x):  # (..., n_in) -> (..., stack * n_out)
        return F.linear(x, self.weight.flatten(0, 1).to(x.dtype))


class Block(nn.Module):
    """Attention, then an MLP. The output of each is added to the residual stream x.
    cos, sin: ([B,] T, 1, 1, D), from rope_cos_sin; they rotate queries and keys (B, T, 2, H, D) together
    attend: from choose_attention; its mask hides the empty slots of a cache
    append_kv: with a cache, adds new keys and values to it, and returns those of all its slots
    A custom block must mask only through `attend`, attend over what `append_kv` returns, and return x's dtype."""

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
        # attention, the only layer of a block that mixes positions
        qkv = self.qkv(norm(x)).view(B, T, 3, self.n_head, C // self.n_head)
        qk, v = qkv.split((2, 1), dim=2)                                            # (B, T, 2, H, D), (B, T, 1, H, D)
        q, k = apply_rope(norm(qk), cos, sin).permute(2, 0, 3, 1, 4)                # QK-norm; both (B, H, T, D)
        v = v[:, :, 0].transpose(1, 2)                                              # (B, H, T, D)
        if append_kv is not None:
            k, v = append_kv(k, v)                                                  # (B, H, T_k, D)
        y = attend(q, k, v)                                                         # (B, H, T, D)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        # MLP
        return x + self.down(F.relu(self.up(norm(x))).square())


def run_blocks(blocks, x, config, prefix, cache=None, positions=None, mask=None, ngrams=None, ngram_gains=None):
    """Applies the blocks to x (B, T, C) -> (B, T, C). prefix, cache, positions, mask: as in Transformer.forward.
    ngrams: (B, T, C) normalized n-gram embeddings, which times ngram_gains[i] (C,) are added to the input of block i.
    If block i needs a rule of its own, such as a window, choose its `attend` in the loop (see docs/EXTENDING.md)."""
    T = x.size(1)
    T_k = T
    q_pos = torch.arange(T, device=x.device)                                        # (T,): positions of the queries
    if cache is not None:
        T_k = cache.k[0].size(2)
        q_pos = q_pos + cache.length
    if positions is None:
        positions = q_pos
    attend = choose_attention(prefix, q_pos, T_k, config, x.dtype, mask)
    cos, sin = rope_cos_sin(positions[..., None, None], config.n_embd // config.n_head, x.dtype)    # ([B,] T, 1, 1, D)
    append_kv = None
    for i, block in enumerate(blocks):
        if ngrams is not None:
            x = x + ngrams * ngram_gains[i]
        if cache is not None:
            append_kv = functools.partial(cache.append_kv, i, q_pos)
        x = block(x, cos, sin, attend, append_kv)
    if cache is not None:
        cache.length += T
    return x


# ---- the input of the first block
def context_ids(idx, history):  # ids idx (B, T), the W - 1 ids before them (B, W - 1) -> (B, T, W)
    """Returns the last W ids of each position, from its own id backwards. With W = 3, the ids 5 6 7 after 3 4 give
    [5 4 3], [6 5 4] and [7 6 5]. Under every prefix, a position may attend to itself and to earlier positions, so it
    may read these ids. If a custom mask forbids some of them, the batch must contain `before`."""
    return torch.cat((history, idx), dim=1).unfold(1, CONTEXT_WIDTH, 1).flip(2)


def causal_conv(context, embedding, weight):  # ids (B, T, W), embedding (V, C), weight (CONV_WIDTH, C) -> (B, T, C)
    """y_t = sum over j < CONV_WIDTH of weight[j] * (embedding of the id j positions before t), channel by channel."""
    n_positions = context[..., 0].numel()                                           # B * T
    if n_positions < len(embedding):            # few positions, as in decoding: weight their embeddings
        return (F.embedding(context[..., :CONV_WIDTH], embedding) * weight).sum(2)
    # many positions: weighting the V embeddings, then looking them up, is cheaper
    return sum(F.embedding(context[..., j], embedding * weight[j]) for j in range(CONV_WIDTH))


def hash_ngrams(context, rows):  # ids (B, T, W) -> (B, T, N): row in the table of each n-gram that ends at a position
    """The code of an n-gram is a polynomial of its ids, modulo 2^64, with the multiplier HASH_MULTIPLIER. With the
    multiplier 10, the text 7 8 9 would have the codes 9 + 1 = 10 for (9), 10 * 10 + 8 + 1 = 109 for (8 9), and
    10 * 109 + 7 + 1 = 1098 for (7 8 9). The row is the remainder of the code, after its high bits are mixed in."""
    code = torch.zeros_like(context[..., 0])                                        # (B, T)
    codes = []                                  # one for each length in NGRAMS
    for n in range(1, CONTEXT_WIDTH + 1):
        code = code * HASH_MULTIPLIER + context[..., n - 1] + 1                     # int64 overflow is the modulo
        if n in NGRAMS:
            codes.append(code)
    codes = torch.stack(codes, dim=2)                                               # (B, T, N)
    codes = codes ^ (codes >> 32)               # the remainder depends mostly on the low bits: mix in the high ones
    first_row = torch.arange(0, len(NGRAMS) * rows, rows, device=codes.device)      # (N,), of each n-gram length
    return codes % rows + first_row


class NgramEmbedding(nn.Module):
    """Embeddings of the n-grams that end at each position (Pagnoni et al. 2024; Engram, Cheng et al. 2026).
    The hash of an n-gram selects a row of a table. The rows of the N lengths are concatenated and projected to width C.
    Transformer.forward adds the result before the first block, and its norm times a learned gain before each block.
    The table is initialized to zero. N-grams with an id of NGRAM_IDS or above, such as a sentinel, count as zero,
    because these ids join unrelated pieces of text. Training drops the share `drop` of the lookups, as in dropout."""

    def __init__(self, config):
        super().__init__()
        self.rows = config.ngram_rows
        self.table = nn.Parameter(torch.zeros(len(NGRAMS) * self.rows, NGRAM_DIM))              # (N R, NGRAM_DIM)
        self.proj = StackedLinear(len(NGRAMS) * NGRAM_DIM, config.n_embd)
        self.gain = nn.Parameter(torch.zeros(config.n_layer, config.n_embd))
        self.drop = 0.0                         # train.py sets it

    def forward(self, context, dtype):  # ids (B, T, W) -> (B, T, C)
        row = hash_ngrams(context, self.rows)                                       # (B, T, N)
        is_valid = context < NGRAM_IDS                                              # (B, T, W)
        is_embedded = torch.stack([is_valid[..., :n].all(2) for n in NGRAMS], dim=2)            # (B, T, N)
        scale = F.dropout(is_embedded.float(), self.drop, self.training)
        x = F.embedding(row, self.table) * scale[..., None]                         # (B, T, N, NGRAM_DIM)
        return self.proj(x.flatten(2).to(dtype))


# ---- the network
class Transformer(nn.Module):
    """dtype: that of the activations. Weights are float32. Logits are computed in dtype, then converted to float32, in
    which losses are computed. heads: modules that objectives add."""

    def __init__(self, config, dtype=torch.float32):
        super().__init__()
        assert config.n_embd % (2 * config.n_head) == 0, config         # RoPE rotates pairs within a head
        self.config = config
        self.dtype = dtype
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        nn.init.normal_(self.embed.weight, std=0.3)             # small weights change faster, relative to their size
        self.conv_weight = nn.Parameter(torch.randn(CONV_WIDTH, config.n_embd) * 0.3)
        nn.init.ones_(self.conv_weight[0])      # the weight of the current id
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.head = StackedLinear(config.n_embd, config.n_outputs, zero=True)
        self.ngrams = NgramEmbedding(config) if config.ngram_rows else None
        self.heads = nn.ModuleDict()

    def forward(self, idx, prefix=0, cache=None, positions=None, mask=None, before=None):
        """Returns the normalized hidden states (B, T, C) of ids idx (B, T).

        prefix: number of first positions that all positions attend to; int or (B,); 0: causal, T: bidirectional
        mask: replaces the prefix; (B or 1, T, T) bool, True where a query may attend to a key
        positions: (B, T) for RoPE; default: 0, 1, 2, ..., or with a cache, the positions that follow the cached ones
        before: (B, T, W - 1) ids before each position, nearest first, for convolution and n-grams; default: from idx
        cache: a Cache, to which idx is appended; cannot be combined with mask or before"""
        assert cache is None or (mask is None and before is None)
        if before is not None:
            context = torch.cat((idx[..., None], before), dim=2)                    # (B, T, W)
        elif cache is not None:
            context = context_ids(idx, cache.append_ids(idx))
        else:
            context = context_ids(idx, idx.new_zeros(len(idx), CONTEXT_WIDTH - 1))
        x = causal_conv(context, self.embed.weight, self.conv_weight).to(self.dtype)            # (B, T, C)
        ngrams = None
        gains = None
        if self.ngrams is not None:
            ngrams = self.ngrams(context, self.dtype)                               # (B, T, C)
            x = x + ngrams
            ngrams = norm(ngrams)
            gains = self.ngrams.gain.to(self.dtype).unbind()                        # L of (C,)
        return norm(run_blocks(self.blocks, norm(x), self.config, prefix, cache, positions, mask, ngrams, gains))

    def logits(self, h):  # hidden (..., C) -> (..., n_outputs) float32
        return self.head(h).float()


# ---- KV cache
class Cache:
    """Keys and values of all layers for B rows of up to T_k positions, and their ids, of which convolution and n-grams
    read the last W - 1. To remove the last n positions, subtract n from `length`.

    The length is a tensor on the device. Attention always reads all T_k slots, and its mask hides the empty ones. So
    no shape depends on the length, and a decoding step can be compiled and captured in a CUDA graph."""

    def __init__(self, model, B, T_k):
        config = model.config
        device = model.embed.weight.device
        shape = B, config.n_head, T_k, config.n_embd // config.n_head               # (B, H, T_k, D), for each layer
        self.k = [torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(config.n_layer)]
        self.v = [torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(config.n_layer)]
        # W - 1 EOTs, then the ids: the id at position t is ids[:, t + W - 1]
        self.ids = torch.zeros(B, CONTEXT_WIDTH - 1 + T_k, dtype=torch.long, device=device)
        self.length = torch.zeros((), dtype=torch.long, device=device)              # only modified in place
        self.start = 0                          # index in the text of the first cached id

    def first_unread(self, n):  # a text has n ids so far -> index of the first one that the next pass reads
        """When the cache is full, it is emptied, and the last T_k / 2 ids of the text are read again. With
        T_k = 8, while a text of 6 ids grows, the passes read the ids 0-5, 6, 7, 5-8, 9, ..."""
        T_k = self.k[0].size(2)
        if n - self.start > T_k:
            self.start = n - (T_k // 2 if self.length else T_k)
            self.length.zero_()
        return self.start + int(self.length)

    def append_kv(self, i, q_pos, k, v):  # layer i, positions (T,), k and v (B, H, T, D) -> all slots (B, H, T_k, D)
        return self.k[i].index_copy_(2, q_pos, k), self.v[i].index_copy_(2, q_pos, v)

    def append_ids(self, idx):  # stores ids (B, T) -> the W - 1 ids before them (B, W - 1)
        slots = self.length + torch.arange(CONTEXT_WIDTH - 1 + idx.size(1), device=idx.device)      # (W - 1 + T,)
        self.ids.index_copy_(1, slots[CONTEXT_WIDTH - 1:], idx)
        return self.ids.index_select(1, slots[:CONTEXT_WIDTH - 1])


def for_inference(model):  # casts most weights to the type of the activations: in bfloat16, a pass reads less memory
    for layer in [m for m in model.modules() if isinstance(m, (StackedLinear, nn.Embedding))]:
        layer.to(model.dtype)
    return model.eval().requires_grad_(False)
