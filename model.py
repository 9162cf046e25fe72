"""One transformer for every objective: the mask rule, the blocks, the KV cache.

B rows, T positions, C width, H heads, D = C / H head width, L layers, V vocabulary; T_q queries, T_k keys;
W ids of context, N lengths of n-grams, R rows of the n-gram table

Pre-norm blocks with layer norm without parameters (OLMo, Groeneveld et al. 2024), RoPE (Su et al. 2021),
QK-norm (Henry et al. 2020), ReLU^2 (So et al. 2021), no biases, output projections and byte head that start
at zero. Before the first block each byte's embedding is added to those of the three bytes before it (kin of the
Canon layers of Allen-Zhu 2025) and to hashed n-gram embeddings (Pagnoni et al. 2024). The model returns hidden
states; the objective decides what to do with them.
"""
import functools
import importlib.util
import os
import shutil
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

ROPE_BASE = 10000.0
CONV_WIDTH = 4                                  # ids that the convolution over the embeddings reads
NGRAMS = 3, 4, 5, 6                             # lengths of the n-grams that have embeddings
NGRAM_DIM = 32                                  # numbers in each of these
CONTEXT = max(CONV_WIDTH, *NGRAMS)              # W: ids that a position's input is made of, its own among them
NGRAM_IDS = 258                                 # bytes, PAD and MASK; an n-gram with any other id has no embedding
HASH_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)    # 2^64 / golden ratio (Knuth 1973), as a signed number
SHORT = 128                                     # positions of a causal row that is not worth being halved
# what FlexAttention is compiled with: Triton, and the C compiler that it looks for, which small images lack
COMPILER = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
TRITON = bool(COMPILER and importlib.util.find_spec("triton"))


@dataclass
class Sizes:
    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int = 512
    n_outputs: int = 512                        # the byte head predicts ids below this one
    ngram_rows: int = 0                         # rows of the n-gram table for each length; 0: no n-grams
    attn_scale: float = 1.0                     # attention's logits are so many times q k / sqrt(D)


# ---- who may see whom

def allow(q, k, prefix, doc_q=None, doc_k=None):
    """The one mask rule, on positions that broadcast: True where query q may attend to key k.

    causal          prefix 2        bidirectional (prefix T)
      k 0 1 2 3       0 1 2 3         0 1 2 3
    q 0 x . . .     0 x x . .       0 x x x x
      1 x x . .     1 x x . .       1 x x x x
      2 x x x .     2 x x x .       2 x x x x
      3 x x x x     3 x x x x       3 x x x x

    With documents given, attention also stays inside the query's own."""
    seen = (k <= q) | (k < prefix)
    return seen if doc_q is None else seen & (doc_q == doc_k)


def dense_mask(prefix, q, T_k, doc=None):  # prefix (B,), positions q (T_q,) -> (B, 1, T_q, T_k) bool
    k, prefix = torch.arange(T_k, device=prefix.device), prefix[:, None, None, None]
    if doc is None:
        return allow(q[:, None], k, prefix)
    return allow(q[:, None], k, prefix, doc[:, None, q, None], doc[:, None, None, :])


def block_mask(prefix, T, doc=None):  # prefix (B,) -> BlockMask, which other prefixes do not recompile
    from torch.nn.attention.flex_attention import create_block_mask  # here: a third of a second to import

    def rule(b, h, q, k):
        return allow(q, k, prefix[b]) if doc is None else allow(q, k, prefix[b], doc[b, q], doc[b, k])
    return create_block_mask(rule, len(prefix), None, T, T, device=prefix.device)


def choose_attention(mask, q, T_k, B, sizes, dtype, doc=None, cache=None):
    """-> a function of q (B, H, T_q, D), k and v (B, H, T_k, D) -> (B, H, T_q, D), for all blocks of a pass.

    mask: "causal", "bidirectional" or prefix lengths (B,). q: the queries' positions (T_q,), the last of the
    T_k keys unless the cache is static. Each case takes its fastest form."""
    T_q, H, cuda = len(q), sizes.n_head, q.device.type == "cuda"
    named = isinstance(mask, str)
    assert mask in ("causal", "bidirectional") if named else mask.shape == (B,), mask
    if cuda and mask == "causal" and doc is None and cache is None:
        return functools.partial(F.scaled_dot_product_attention, is_causal=True)
    if cuda and named and doc is not None:      # a name and documents: one kernel for both
        mask, named = torch.full((B,), 0 if mask == "causal" else T_k, device=q.device), False
    flex = cuda and TRITON and torch.is_grad_enabled() and cache is None and 16 <= sizes.n_embd // H <= 256
    if flex and not named:
        return functools.partial(flex_attention(), block_mask=block_mask(mask, T_q, doc))

    seen = None                                 # (B or 1, 1, T_q, T_k), or None where every key is seen
    last = T_q == 1 and not isinstance(cache, StaticCache)      # a single query sees all that is before it
    if not named:
        seen = dense_mask(mask, q, T_k, doc)
    elif doc is not None or mask == "causal" and not last:
        prefix = torch.full((1,), 0 if mask == "causal" else T_k, device=q.device)
        seen = dense_mask(prefix, q, T_k, doc)
    if T_q == 1 and not cuda:
        return functools.partial(attend_one, seen=seen)
    if T_q < T_k or cuda:
        return functools.partial(F.scaled_dot_product_attention, attn_mask=seen)
    if seen is None:
        return functools.partial(attend_plain, bias=torch.zeros(1, 1, 1, dtype=dtype, device=q.device))
    bias = torch.zeros(seen.shape, dtype=dtype, device=q.device).masked_fill(~seen, -torch.inf)
    bias = bias[0] if len(seen) == 1 else bias.expand(-1, H, -1, -1).flatten(0, 1)  # (1 or B H, T_q, T_k)
    halved = named and mask == "causal" and T_q > SHORT
    return functools.partial(attend_causal if halved else attend_plain, bias=bias)


# ---- attention: q (B, H, T_q, D), k and v (B, H, T_k, D) -> (B, H, T_q, D)

def attend_plain(q, k, v, bias):
    """softmax(q k^T / sqrt(D) + bias) v. One kernel takes the product, the scale and the bias, which is 0
    where a query may attend and -inf elsewhere."""
    att = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=q.size(-1) ** -0.5)
    return (att.softmax(-1) @ v.flatten(0, 1)).unflatten(0, q.shape[:2])            # att (B H, T_q, T_k)


def attend_causal(q, k, v, bias):
    """The same in two halves, of which the first leaves the second's keys out: a quarter of all pairs. More pieces
    leave out more and are slower up to 1,024 positions: backward each adds to the gradients of all its keys."""
    h = q.size(2) // 2
    first = attend_plain(q[:, :, :h], k[:, :, :h], v[:, :, :h], bias[:, :h, :h])
    return torch.cat((first, attend_plain(q[:, :, h:], k, v, bias[:, h:])), dim=2)


def attend_one(q, k, v, seen):  # T_q = 1: sums are faster than products of one row
    att = (q * k).sum(-1, dtype=torch.float32) * q.size(-1) ** -0.5                 # (B, H, T_k)
    if seen is not None:
        att = att.masked_fill(~seen[:, :, 0], -torch.inf)
    return (att.softmax(-1)[..., None].to(v.dtype) * v).sum(2, keepdim=True)


def flex_attention():  # a kernel only when compiled, by itself or with what is around it: else it writes out all scores
    from torch.nn.attention.flex_attention import flex_attention
    return flex_attention if torch.compiler.is_compiling() else compiled(flex_attention)


@functools.cache
def compiled(f):
    return torch.compile(f, dynamic=False)


# ---- the network

def norm(x):  # (..., C) -> (..., C) of mean 0 and variance 1
    return F.layer_norm(x, (x.size(-1),))       # on the CPU one kernel, where F.rms_norm takes eight


def rotations(at, D, dtype, scale=1.0):  # positions (..., T) -> cos, sin (..., T, D), times the root of scale
    freq = ROPE_BASE ** (-torch.arange(0, D, 2, device=at.device, dtype=torch.float32) / D)
    angle = at[..., None].float() * freq                                            # (..., T, D / 2)
    cos, sin = angle.cos() * scale ** 0.5, angle.sin() * scale ** 0.5               # of queries and of keys
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(x, cos, sin):  # (..., T, D) -> the same, each pair (i, i + D/2) turned by its position's angle, and scaled
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, dims=-1), sin)


def context_ids(idx, before, doc=None):  # ids (B, T), the W - 1 before them (B, W - 1) -> (B, T, W)
    """The last W ids at each position, its own first. EOT (0) stands for what lies before the row or, with documents
    given, in another document. All that mixes positions outside of attention reads these ids: it looks back only,
    which every mask allows."""
    past = torch.cat((before, idx), dim=1).unfold(1, CONTEXT, 1).flip(2)
    if doc is None:
        return past
    return past * (F.pad(doc, (CONTEXT - 1, 0), value=-1).unfold(1, CONTEXT, 1).flip(2) == doc[..., None])


def causal_conv(past, embedding, weight):  # ids (B, T, W), embedding (V, C), weight (CONV_WIDTH, C) -> (B, T, C)
    """y_t = sum over j of weight_j * embedding of the id j positions before t, channel by channel."""
    if past[..., 0].numel() < len(embedding):   # a decoding step
        return (F.embedding(past[..., :CONV_WIDTH], embedding) * weight).sum(2)
    # a row of weight times all embeddings costs less than times those of all positions
    return sum(F.embedding(past[..., j], embedding * weight[j]) for j in range(CONV_WIDTH))


def hash_ngrams(past, rows):  # ids (B, T, W) -> (B, T, N): row of the table for each n-gram that ends at a position
    """A polynomial of the ids, modulo 2^64, its high bits mixed into the low ones. Each length has rows of its own;
    n-grams of the same hash share one."""
    code, codes = torch.zeros_like(past[..., 0]), []
    ids = (past + 1).unbind(2)
    for n in range(1, max(NGRAMS) + 1):
        code = torch.add(ids[n - 1], code, alpha=HASH_FACTOR)
        codes += [code] if n in NGRAMS else []
    code = torch.stack(codes, dim=2)                                                # (B, T, N)
    first = torch.arange(0, len(NGRAMS) * rows, rows, device=past.device)
    return (code ^ (code >> 32)) % rows + first


class SquaredReLU(torch.autograd.Function):
    """relu(x)^2, whose gradient 2 relu(x) takes two passes over memory; autograd's own takes four. Has no second
    derivative."""

    @staticmethod
    def forward(ctx, x):
        r = F.relu(x)
        ctx.save_for_backward(r)
        return r * r

    @staticmethod
    def backward(ctx, grad):
        [r] = ctx.saved_tensors
        return (grad * r).mul_(2)


class Linear(nn.Module):
    """y = x W^T in x's dtype; the weight stays float32. Several maps of one input are kept as a stack
    (n, n_out, n_in): one product forward, n matrices to the optimizer. Muon takes the Linear layers inside
    blocks, AdamW every other parameter, whatever its shape."""

    def __init__(self, n_in, n_out, stack=1, zero=False):
        super().__init__()
        weight = torch.zeros(stack, n_out, n_in) if zero else torch.randn(stack, n_out, n_in) * n_in ** -0.5
        self.weight, self.packed = nn.Parameter(weight), None

    def forward(self, x):  # (..., n_in) -> (..., stack * n_out)
        if self.packed is not None and not torch.compiler.is_compiling():
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")
        return F.linear(x, self.weight.flatten(0, 1).to(x.dtype))


def pack_weights(module):
    """For decoding in bfloat16 on a CPU: keeps every matrix a second time, as oneDNN lays it out for its own
    use. The product with a single row, all that a decoding step is made of, then takes half the time."""
    for layer in [m for m in module.modules() if isinstance(m, Linear)]:
        if layer.weight.dtype != torch.bfloat16 or layer.weight.device.type != "cpu":
            continue
        try:
            layer.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().flatten(0, 1), 1)
        except (AttributeError, RuntimeError):                  # a build of torch without oneDNN
            return


class Lookups(NamedTuple):
    """What a training step knows of its lookups in the n-gram table."""
    scale: torch.Tensor                         # (B, T, N): their factors, 0 for those that are dropped
    row: torch.Tensor                           # (B, T, N): the rows that were looked up, written by the model
    delta: torch.Tensor                         # (B, T, N, NGRAM_DIM): zeros added to these; its gradient is theirs


class NgramEmbedding(nn.Module):
    """Embeddings of the n-grams that end at each position (Pagnoni et al. 2024; Engram, DeepSeek-AI 2026): for each
    length a row of one table, joined by one matrix. Rows start at zero. Sentinels and separators stand between pieces
    of text that do not belong together: n-grams that hold one count as zero. The table is no leaf of the gradient,
    which would be as large: train.ngram_step updates the rows of Lookups alone. gain: how much of the embeddings each
    block's input takes."""

    def __init__(self, config):
        super().__init__()
        self.rows = config.ngram_rows
        table = torch.zeros(len(NGRAMS) * self.rows, NGRAM_DIM)
        self.table = nn.Parameter(table, requires_grad=False)                       # (N R, NGRAM_DIM)
        self.proj = Linear(len(NGRAMS) * NGRAM_DIM, config.n_embd)
        self.gain = nn.Parameter(torch.zeros(config.n_layer, config.n_embd))

    def forward(self, past, dtype, lookups=None):  # ids (B, T, W) -> (B, T, C)
        row = hash_ngrams(past, self.rows)                                          # (B, T, N)
        largest = past.cummax(dim=2).values         # of the last 1, 2, ... ids
        scale = torch.stack([largest[..., n - 1] for n in NGRAMS], dim=2) < NGRAM_IDS               # (B, T, N)
        x = F.embedding(row, self.table)                                            # (B, T, N, NGRAM_DIM)
        if lookups is not None:
            lookups.row.copy_(row)
            x, scale = x + lookups.delta, scale * lookups.scale
        return self.proj((x * scale[..., None]).flatten(2).to(dtype))


class Block(nn.Module):
    """What a block must honour: `attend` holds the mask, the prefix and the documents; where there is a cache, `extend`
    takes the new keys and values and returns all of them (a StaticCache's stale ones too, which only `attend` hides);
    activations stay in x's dtype."""

    def __init__(self, sizes):
        super().__init__()
        C, self.n_head = sizes.n_embd, sizes.n_head
        self.qkv = Linear(C, C, stack=3)
        self.proj = Linear(C, C, zero=True)
        self.up = Linear(C, 4 * C)
        self.down = Linear(4 * C, C, zero=True)

    def forward(self, x, cos, sin, attend, extend=None):  # x (B, T, C) -> (B, T, C)
        B, T, C = x.shape
        # attention is the only layer of a block that moves information between positions
        qkv = self.qkv(norm(x)).view(B, T, 3, self.n_head, C // self.n_head)
        qkv = qkv.permute(2, 0, 3, 1, 4).contiguous()                               # (3, B, H, T, D)
        qk, v = qkv.split((2, 1))               # split's backward is one kernel, indexing's are five
        (q, k), v = rotate(norm(qk), cos, sin), v[0]                                # QK-norm, then RoPE
        if extend is not None:
            k, v = extend(k, v)                                                     # (B, H, T_k, D)
        y = attend(q, k, v)                                                         # (B, H, T, D)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        # each position for itself
        return x + self.down(SquaredReLU.apply(self.up(norm(x))))


def run_blocks(blocks, x, sizes, mask, doc=None, cache=None, at=None, added=None):  # x (B, T, C) -> (B, T, C)
    """added: e (B, T, C) and gains (L, C); the input of block i is added to e * gains[i]."""
    B, T, _ = x.shape
    q = torch.arange(T, device=x.device) if cache is None else cache.positions(T)                   # (T,)
    attend = choose_attention(mask, q, T if cache is None else cache.reach(T), B, sizes, x.dtype, doc, cache)
    at = q if at is None else at[:, None]
    cos, sin = rotations(at, sizes.n_embd // sizes.n_head, x.dtype, sizes.attn_scale)
    for i, block in enumerate(blocks):
        if added is not None:
            e, gains = added
            x = x + e * gains[i]
        x = block(x, cos, sin, attend, None if cache is None else functools.partial(cache.extend, i, q))
    if cache is not None:
        cache.move(T)
    return x


class Transformer(nn.Module):
    """dtype: of the activations. Weights are float32, and so are logits and losses. heads: what an objective needs
    beyond the byte head, by name."""

    def __init__(self, sizes, dtype=torch.float32):
        super().__init__()
        assert sizes.n_embd % sizes.n_head == 0 and sizes.n_embd // sizes.n_head % 2 == 0, sizes
        self.sizes, self.dtype = sizes, dtype
        self.embed = nn.Embedding(sizes.vocab_size, sizes.n_embd)
        nn.init.normal_(self.embed.weight, std=0.3)             # a norm follows: a smaller start, larger steps
        self.conv_weight = nn.Parameter(torch.randn(CONV_WIDTH, sizes.n_embd) * 0.3)            # of x_t, x_(t-1), ...
        nn.init.ones_(self.conv_weight[0])
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.n_layer))
        self.head = Linear(sizes.n_embd, sizes.n_outputs, zero=True)
        self.ngrams = NgramEmbedding(sizes) if sizes.ngram_rows else None
        self.heads = nn.ModuleDict()

    def forward(self, idx, mask, doc=None, cache=None, at=None, lookups=None):  # idx (B, T) -> (B, T, C)
        """-> hidden states, normed. mask: "causal", "bidirectional", or prefix lengths (B,). doc: document ids (B, T),
        to keep a document to itself. cache: a Cache or StaticCache; idx then continues what it holds. at: positions
        for RoPE (B, T), where they are not 0, 1, 2, ... lookups: of n-grams, where the table is trained."""
        before = idx.new_zeros(len(idx), CONTEXT - 1) if cache is None else cache.context(idx)
        past = context_ids(idx, before, doc)                                        # (B, T, W)
        x = causal_conv(past, self.embed.weight, self.conv_weight).to(self.dtype)
        added = None
        if self.ngrams is not None:
            e = self.ngrams(past, self.dtype, lookups)                              # (B, T, C)
            x = x + e
            added = norm(e), self.ngrams.gain.to(self.dtype).unbind()
        return norm(run_blocks(self.blocks, norm(x), self.sizes, mask, doc, cache, at, added))

    def logits(self, h):  # hidden (..., C) -> (..., n_outputs) float32
        return self.head(h).float()


# ---- KV cache

class Cache:
    """Keys and values of the positions so far, of a model's layers or of n_layer others, and their ids, of which the
    input of the next ones is made: room for T positions of B rows. move(-n) forgets the last n."""

    def __init__(self, model, B, T, n_layer=None):
        sizes, device, L = model.sizes, model.embed.weight.device, n_layer or model.sizes.n_layer
        shape = B, sizes.n_head, T, sizes.n_embd // sizes.n_head                    # (B, H, T, D), each layer
        self.k = [torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(L)]
        self.v = [torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(L)]
        self.ids = torch.zeros(B, CONTEXT - 1 + T, dtype=torch.long, device=device)             # EOT before the first
        self.length = 0

    def positions(self, T):  # -> (T,), of the next T ids
        return self.length + torch.arange(T, device=self.k[0].device)

    def reach(self, T):  # -> how many keys the next T queries are given
        return self.length + T

    def extend(self, i, at, k, v):  # layer i's new keys and values -> all of them (B, H, T_k, D)
        end = self.length + k.size(2)
        assert end <= self.k[i].size(2), f"the cache has room for {self.k[i].size(2)} positions, not {end}"
        self.k[i][:, :, self.length:end] = k
        self.v[i][:, :, self.length:end] = v
        return self.k[i][:, :, :end], self.v[i][:, :, :end]

    def context(self, idx):  # the next ids (B, T) -> the W - 1 before them (B, W - 1)
        a = self.length + CONTEXT - 1
        self.ids[:, a:a + idx.size(1)] = idx
        return self.ids[:, self.length:a]

    def move(self, n):
        self.length += n


class StaticCache(Cache):
    """The same with its length on the device. Every query is given all T positions, under a mask: no shape
    depends on the length, so that a step can be compiled and captured."""

    def __init__(self, model, B, T):
        super().__init__(model, B, T)
        self.length = torch.zeros((), dtype=torch.long, device=self.k[0].device)

    def reach(self, T):
        return self.k[0].size(2)

    def extend(self, i, at, k, v):
        return self.k[i].index_copy_(2, at, k), self.v[i].index_copy_(2, at, v)

    def context(self, idx):
        self.ids.index_copy_(1, self.positions(idx.size(1)) + CONTEXT - 1, idx)
        return self.ids.index_select(1, self.positions(CONTEXT - 1))

    def move(self, n):
        self.length.add_(n)
