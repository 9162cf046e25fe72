"""One transformer for every objective: the mask rule, the blocks, the network, the KV cache.

B rows, T positions, C width, H heads, D = C / H head width, L layers, V vocabulary; T_q queries, T_k keys;
W ids of context, N lengths of n-grams, R rows of the n-gram table for each length

Pre-norm blocks with layer norm without parameters (OLMo, Groeneveld et al. 2024), RoPE (Su et al. 2021),
QK-norm (Henry et al. 2020; here a layer norm), ReLU^2 (So et al. 2021), no biases; output projections and the byte head
start at zero. Before the first block each byte's embedding is added to those of the three bytes before it (similar to
the Canon layers of Allen-Zhu 2025) and to hashed n-gram embeddings (Pagnoni et al. 2024). The model returns
hidden states; the objective turns them into a loss.
"""
import functools
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

ROPE_BASE = 10000.0
CONV_WIDTH = 4                                  # ids that the convolution over the embeddings reads
NGRAMS = 3, 4, 5, 6                             # lengths of the n-grams that have embeddings
NGRAM_DIM = 32                                  # width of an n-gram embedding
NGRAM_DECAY = 0.95                              # decay of the second moments of the n-gram table
NGRAM_RATE = 6.0                                # learning rate of the n-gram table, as a multiple of the others'
CONTEXT_WIDTH = max(CONV_WIDTH, *NGRAMS)        # W: a position's input depends on so many ids, its own included
NGRAM_IDS = 258                                 # bytes, PAD and MASK; an n-gram with any other id has no embedding
HASH_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)    # 2^64 / golden ratio (Knuth 1973), as a signed number


@dataclass
class ModelConfig:
    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int = 512
    n_outputs: int = 512                        # the byte head predicts ids below this one
    ngram_rows: int = 0                         # rows of the n-gram table for each length; 0: no n-grams
    attn_scale: float = 1.0                     # multiplies the attention logits; 2 is sharper


# ---- the mask rule
def can_attend(q, k, prefix):
    """The one mask rule, on positions that broadcast: True where query q may attend to key k.

    causal (prefix 0)   prefix 2        bidirectional (prefix T)
      k 0 1 2 3           0 1 2 3         0 1 2 3
    q 0 x . . .         0 x x . .       0 x x x x
      1 x x . .         1 x x . .       1 x x x x
      2 x x x .         2 x x x .       2 x x x x
      3 x x x x         3 x x x x       3 x x x x

    choose_attention has faster forms of this rule."""
    return (k <= q) | (k < prefix)


def dense_mask(prefix, q, T_k):  # prefix an int or (B,), positions q (T_q,) -> (1 or B, T_q, T_k) bool
    k = torch.arange(T_k, device=q.device)[None, None]
    if not isinstance(prefix, int):
        prefix = prefix[:, None, None]
    return can_attend(q[:, None], k, prefix)


def choose_attention(prefix, q, T_k, config, dtype, mask=None):
    """-> attend(q (B, H, T_q, D), k, v (B, H, T_k, D)) -> (B, H, T_q, D), for all blocks of a forward pass. Each form
    equals attend_dense under can_attend, or under mask. q: positions of the queries (T_q,)."""
    cuda = q.device.type == "cuda"
    scale = config.attn_scale * (config.n_embd // config.n_head) ** -0.5
    if cuda and mask is None and isinstance(prefix, int):       # the two pure rules have the fastest kernels
        if prefix == 0 and len(q) == T_k:
            return functools.partial(F.scaled_dot_product_attention, is_causal=True, scale=scale)
        if prefix >= T_k:
            return functools.partial(F.scaled_dot_product_attention, scale=scale)
    if mask is None:
        mask = dense_mask(prefix, q, T_k)
    elif mask.stride(0) == 0:                   # expanded: one mask for all rows
        mask = mask[:1]
    allowed = mask[:, None]                     # (B or 1, 1, T_q, T_k)
    if cuda or len(q) < T_k:
        return functools.partial(F.scaled_dot_product_attention, attn_mask=allowed, scale=scale)
    bias = torch.zeros(allowed.shape, dtype=dtype, device=q.device).masked_fill(~allowed, -torch.inf)
    heads = config.n_head if len(bias) > 1 else 1
    bias = bias.expand(-1, heads, -1, -1).flatten(0, 1)         # (1 or B H, T_q, T_k)
    return functools.partial(attend_dense, bias=bias, scale=scale)


def attend_dense(q, k, v, bias, scale):  # q (B, H, T_q, D), k and v (B, H, T_k, D) -> (B, H, T_q, D)
    """softmax(scale q k^T + bias) v. bias (1 or B H, T_q, T_k): 0 where a query may attend, else -inf. On a CPU its
    backward pass is faster than that of scaled_dot_product_attention."""
    # one kernel computes the product, the scale and the bias
    att = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=scale)
    return (att.softmax(-1) @ v.flatten(0, 1)).unflatten(0, q.shape[:2])            # att (B H, T_q, T_k)


# ---- blocks
def norm(x):  # (..., C) -> (..., C) with mean 0 and variance 1
    return F.layer_norm(x, (x.size(-1),))       # one kernel on the CPU, where F.rms_norm takes eight


def rope_cos_sin(positions, D, dtype):  # positions (...) -> cos, sin (..., D)
    freq = ROPE_BASE ** (-torch.arange(0, D, 2, device=positions.device, dtype=torch.float32) / D)
    angle = positions[..., None].float() * freq                                     # (..., D / 2)
    cos = angle.cos()
    sin = angle.sin()
    pair = torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)
    # as_strided makes torch.compile keep both in memory; it would compute them anew in every block
    return [t.as_strided(t.size(), t.stride()) for t in pair]


def apply_rope(x, cos, sin):  # x (..., D) -> the same shape; each pair (i, i + D/2) is rotated by its angle
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, dims=-1), sin)


class StackedLinear(nn.Module):
    """y = x W^T in x's dtype; the weight stays float32. Several maps of the same input are kept as one stack
    (n, n_out, n_in): one product forward, n matrices to the optimizer. Muon trains the StackedLinear layers
    inside blocks, AdamW every other parameter."""

    def __init__(self, n_in, n_out, stack=1, zero=False):
        super().__init__()
        weight = torch.zeros(stack, n_out, n_in) if zero else torch.randn(stack, n_out, n_in) * n_in ** -0.5
        self.weight = nn.Parameter(weight)

    def forward(self, x):  # (..., n_in) -> (..., stack * n_out)
        return F.linear(x, self.weight.flatten(0, 1).to(x.dtype))


class Block(nn.Module):
    """Attention, then an MLP, each added to the residual stream.

    A block of your own must mask only through `attend`, keep x's dtype, and with a cache pass its new keys and
    values to `append_kv` and attend over what that returns, empty slots too, which `attend` hides. cos, sin: of
    rope_cos_sin, ([B,] T, 1, 1, D) for q and k (B, T, 2, H, D)."""

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
        # attention is the only layer of a block that moves information between positions
        qkv = self.qkv(norm(x)).view(B, T, 3, self.n_head, C // self.n_head)
        qk, v = qkv.split((2, 1), dim=2)                                            # (B, T, 2, H, D), (B, T, 1, H, D)
        q, k = apply_rope(norm(qk), cos, sin).permute(2, 0, 3, 1, 4)                # QK-norm; (B, H, T, D) each
        v = v[:, :, 0].transpose(1, 2)                                              # (B, H, T, D)
        if append_kv is not None:
            k, v = append_kv(k, v)                                                  # (B, H, T_k, D)
        y = attend(q, k, v)                                                         # (B, H, T, D)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        # the MLP sees each position by itself
        return x + self.down(F.relu(self.up(norm(x))).square())


def run_blocks(blocks, x, config, prefix, cache=None, positions=None, mask=None, ngrams=None):
    """x (B, T, C) -> (B, T, C). prefix, positions, mask: as in Transformer.forward. ngrams: embeddings
    (B, T, C) and one gain (C,) a block; their product is added to each block's input."""
    T = x.size(1)
    q = torch.arange(T, device=x.device)                                            # (T,): positions
    T_k = T
    if cache is not None:
        q = q + cache.length
        T_k = cache.k[0].size(2)
    attend = choose_attention(prefix, q, T_k, config, x.dtype, mask)
    positions = (q if positions is None else positions)[..., None, None]    # ([B,] T, 1, 1): alike for q, k and heads
    cos, sin = rope_cos_sin(positions, config.n_embd // config.n_head, x.dtype)
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
def context_ids(idx, previous):  # ids (B, T), the W - 1 before them (B, W - 1) -> (B, T, W)
    """The last W ids at each position, its own first. Every layer outside of attention that mixes positions reads
    these ids. They look back only, which every prefix allows; where a `mask` forbids that, a batch brings `before`."""
    return torch.cat((previous, idx), dim=1).unfold(1, CONTEXT_WIDTH, 1).flip(2)


def causal_conv(context, embedding, weight):  # ids (B, T, W), embedding (V, C), weight (CONV_WIDTH, C) -> (B, T, C)
    """y_t = sum over j of weight_j * embedding of the id j positions before t, channel by channel."""
    if context[..., 0].numel() < len(embedding):                # a decoding step
        return (F.embedding(context[..., :CONV_WIDTH], embedding) * weight).sum(2)
    # weight_j times V embeddings costs less than weight_j times B * T of them
    return sum(F.embedding(context[..., j], embedding * weight[j]) for j in range(CONV_WIDTH))


def hash_ngrams(context, rows):  # ids (B, T, W) -> (B, T, N): table row of each n-gram that ends at a position
    """A polynomial of the ids modulo 2^64, its high bits mixed into the low ones; each length has its own rows."""
    code = torch.zeros_like(context[..., 0])
    codes = {}                                  # of the last 1, 2, ... ids
    for n, ids in enumerate((context + 1).unbind(2), 1):
        codes[n] = code = torch.add(ids, code, alpha=HASH_MULTIPLIER)
    code = torch.stack([codes[n] for n in NGRAMS], dim=2)                           # (B, T, N)
    first_row = torch.arange(0, len(NGRAMS) * rows, rows, device=code.device)
    return (code ^ (code >> 32)) % rows + first_row


def hash_uniform(key, seed):  # keys (...), 0-D -> (...) in [0, 1): random numbers that need no generator
    x = key * HASH_MULTIPLIER + seed
    for _ in range(2):                          # after one round, seeds would still give shifted copies
        x = (x ^ (x >> 32)) * HASH_MULTIPLIER
    return (x >> 40 & 0xFFFFFF) / 2 ** 24


class NgramEmbedding(nn.Module):
    """Embeddings of the n-grams that end at each position (Pagnoni et al. 2024; Engram, Cheng et al. 2026): for each
    length one row of a table, then one matrix over all lengths. Rows start at zero. Sentinels and separators stand
    between unrelated pieces of text, so an n-gram that holds one counts as zero. Training drops a share of the lookups,
    as dropout does; which, depends on table row, position and seed alone. gain: each block's weights for the embeddings
    added to its input.

    The table is a buffer, not a parameter, because a step reads few of its rows: an optimizer would update all of them.
    With keep_lookups, which train.py switches on, backward passes store the gradient of each lookup until `update` uses
    them to change the rows that were read. Without it the table stays as it is."""

    def __init__(self, config):
        super().__init__()
        self.rows = config.ngram_rows
        self.register_buffer("table", torch.zeros(len(NGRAMS) * self.rows, NGRAM_DIM))          # (N R, NGRAM_DIM)
        # decayed sums of squared gradients, one number for each row of the table; saved with the optimizers' state
        self.register_buffer("moments", torch.zeros(len(NGRAMS) * self.rows), persistent=False)
        self.keep_lookups = False
        self.lookups = []                       # (rows (n,), gradients (n, NGRAM_DIM), their mean squares (n,)) each
        self.proj = StackedLinear(len(NGRAMS) * NGRAM_DIM, config.n_embd)
        self.gain = nn.Parameter(torch.zeros(config.n_layer, config.n_embd))
        # set by every training step: share of the lookups that it drops, and its seed
        self.register_buffer("drop", torch.zeros(()), persistent=False)
        self.register_buffer("seed", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, context, dtype):  # ids (B, T, W) -> (B, T, C)
        row = hash_ngrams(context, self.rows)                                       # (B, T, N)
        largest_id = context.cummax(dim=2).values                                   # of the last 1, 2, ... ids
        scale = torch.stack([largest_id[..., n - 1] for n in NGRAMS], dim=2) < NGRAM_IDS            # (B, T, N)
        if self.training:
            place = torch.arange(row.size(1), device=row.device)[:, None]
            u = hash_uniform(row * row.size(1) + place, self.seed)
            scale = scale * (u >= self.drop) / (1 - self.drop)
        keeps = self.training and self.keep_lookups
        x = self.look_up(row) if keeps else F.embedding(row, self.table)            # (B, T, N, NGRAM_DIM)
        return self.proj((x * scale[..., None]).flatten(2).to(dtype))

    @torch.compiler.disable                     # torch.compile does not support the hook
    def look_up(self, row):  # (B, T, N) -> (B, T, N, NGRAM_DIM), whose gradient a backward pass stores in self.lookups
        def keep(grad):
            grad = grad.flatten(0, 2)
            self.lookups.append((row.flatten(), grad, grad.square().mean(1)))
        x = F.embedding(row, self.table).requires_grad_()
        x.register_hook(keep)
        return x

    @torch.no_grad()
    def update(self, lr, ok):  # 0-D each; where ok is False, all gradients count as zero
        """RMSprop (Tieleman and Hinton 2012) of the rows that were looked up, with one second moment for each row: a
        decayed sum, not a mean, to which each lookup adds its own square."""
        self.moments.mul_(NGRAM_DECAY)
        for row, _, square in self.lookups:
            self.moments.index_add_(0, row, torch.where(ok, square, 0.0))
        for row, grad, _ in self.lookups:
            scale = NGRAM_RATE * lr / (self.moments[row].sqrt() + 1e-10)
            self.table.index_add_(0, row, -scale[:, None] * torch.where(ok, grad, 0.0))
        self.lookups.clear()


# ---- the network
class Transformer(nn.Module):
    """dtype: of the activations; weights and losses are float32, logits are cast to it. heads: objectives' modules."""

    def __init__(self, config, dtype=torch.float32):
        super().__init__()
        assert config.n_embd % (2 * config.n_head) == 0, config         # RoPE rotates pairs within a head
        self.config = config
        self.dtype = dtype
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        # small, since the norm after it undoes the scale and leaves larger relative steps
        nn.init.normal_(self.embed.weight, std=0.3)
        self.conv_weight = nn.Parameter(torch.randn(CONV_WIDTH, config.n_embd) * 0.3)           # row j: the id j before
        nn.init.ones_(self.conv_weight[0])
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.head = StackedLinear(config.n_embd, config.n_outputs, zero=True)
        self.ngrams = NgramEmbedding(config) if config.ngram_rows else None
        self.heads = nn.ModuleDict()

    def forward(self, idx, prefix=0, cache=None, positions=None, mask=None, before=None):
        """idx (B, T) -> hidden states (B, T, C), normalized.

        prefix: the first `prefix` positions attend to each other both ways; an int (0 causal, T bidirectional) or one
        for each row (B,). mask: replaces the prefix; any (B or 1, T, T) bool, True where a query may attend.
        positions: for RoPE (B, T), where they are not 0, 1, 2, ... before: the W - 1 ids before each position
        (B, T, W - 1), the nearest first, where they are not the row's own; convolution and n-grams read them.
        cache: a Cache, which idx continues; it is used without mask and before."""
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
    """Keys and values of the positions so far in every layer, and their ids, which the inputs of the next positions
    depend on. It has space for T positions of B rows. To forget the last n positions: cache.length -= n.

    The length is a tensor on the device, and every query is given all T slots, of which the mask hides those that are
    empty. So no shape depends on the length, and a decoding step can be compiled and captured."""

    def __init__(self, model, B, T):
        config = model.config
        device = model.embed.weight.device
        shape = B, config.n_head, T, config.n_embd // config.n_head                 # (B, H, T, D), each layer
        self.k = [torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(config.n_layer)]
        self.v = [torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(config.n_layer)]
        self.ids = torch.zeros(B, CONTEXT_WIDTH - 1 + T, dtype=torch.long, device=device)       # EOT before the first
        self.length = torch.zeros((), dtype=torch.long, device=device)              # changed in place alone

    def append_kv(self, i, positions, k, v):  # layer i's new keys and values -> all of them (B, H, T, D)
        return self.k[i].index_copy_(2, positions, k), self.v[i].index_copy_(2, positions, v)

    def append_ids(self, idx):  # the next ids (B, T) -> the W - 1 before them (B, W - 1)
        i = self.length + torch.arange(CONTEXT_WIDTH - 1 + idx.size(1), device=idx.device)
        self.ids.index_copy_(1, i[CONTEXT_WIDTH - 1:], idx)
        return self.ids.index_select(1, i[:CONTEXT_WIDTH - 1])
