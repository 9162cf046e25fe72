"""One transformer for every objective: the mask rule, the blocks, the KV cache.

B batch rows, T positions, C width, H heads, D = C / H head width, L layers, V vocabulary; T_q queries, T_k keys

Pre-norm blocks with layer norm without parameters (OLMo, Groeneveld et al. 2024), RoPE (Su et al. 2021), QK-norm
(Henry et al. 2020), ReLU^2 (So et al. 2021), no biases, output projections and byte head that start at zero, logits
capped by 15 tanh(z / 15) (Gemma 2, 2024). The model returns hidden states; what is done with them is the objective's.
"""
import functools
import importlib.util
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

ROPE_BASE = 10000.0
LOGIT_CAP = 15.0


@dataclass
class Sizes:
    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int = 512


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


def dense_mask(prefix, q, T_k, doc=None):  # prefix (B,), positions q (T_q,) -> (B, 1, T_q, T_k) bool, True = may attend
    k, prefix = torch.arange(T_k, device=prefix.device), prefix[:, None, None, None]
    if doc is None:
        return allow(q[:, None], k, prefix)
    return allow(q[:, None], k, prefix, doc[:, None, q, None], doc[:, None, None, :])


def block_mask(prefix, T, doc=None):  # prefix (B,) -> BlockMask, which new lengths do not recompile
    from torch.nn.attention.flex_attention import create_block_mask  # here: it costs a third of a second to import
    if doc is None:
        rule = lambda b, h, q, k: allow(q, k, prefix[b])
    else:
        rule = lambda b, h, q, k: allow(q, k, prefix[b], doc[b, q], doc[b, k])
    return create_block_mask(rule, len(prefix), None, T, T, device=prefix.device)


def resolve_mask(mask, B, q, T_k, D, doc=None, static=False):
    """What attend takes, built once per forward pass: "causal" or "bidirectional" where the kernels know the
    mask by name, else a dense mask, or a BlockMask where FlexAttention has a kernel (CUDA, Triton, D >= 16).
    mask: those two names, or prefix lengths (B,). q: the queries' positions (T_q,), the last of the T_k unless the
    keys are a static cache, which has room behind them."""
    T_q, device = len(q), q.device
    if isinstance(mask, str):
        assert mask in ("causal", "bidirectional"), mask
        if doc is None and not static and (mask == "bidirectional" or T_q == 1):
            return "bidirectional"              # a single query is the last position and sees every key
        if doc is None and not static and T_q == T_k:
            return "causal"
        mask = torch.full((B,), 0 if mask == "causal" else T_k, device=device)
    assert mask.shape == (B,), f"prefix lengths {tuple(mask.shape)}, batch of {B} rows"
    if device.type == "cuda" and D >= 16 and T_q == T_k and importlib.util.find_spec("triton"):
        return block_mask(mask, T_q, doc)
    return dense_mask(mask, q, T_k, doc)


# ---- attention: q (B, H, T_q, D), k and v (B, H, T_k, D) -> (B, H, T_q, D)

def attend(q, k, v, seen):
    """seen: what resolve_mask returns. Each form where it is the fastest: sums for the single query of a decoding
    step on the CPU, written out for whole rows there, else the fused kernels."""
    T_q, T_k, cuda = q.size(2), k.size(2), q.device.type == "cuda"
    assert not (isinstance(seen, str) and seen == "causal") or T_q == T_k, "a cache moves the triangle's corner"
    if T_q == 1 and not cuda:
        return attend_one(q, k, v, seen)
    return attend_fused(q, k, v, seen) if cuda or T_q < T_k else attend_plain(q, k, v, seen)


def attend_plain(q, k, v, seen):
    """softmax(q k^T / sqrt(D) + bias) v. One kernel takes the product, the scale and the bias, which is 0 where a query
    may attend and -inf elsewhere."""
    (B, H, T_q, D), T_k = q.shape, k.size(2)
    bias = q.new_zeros(1, 1, 1)
    if isinstance(seen, torch.Tensor):
        bias = q.new_zeros(seen.shape).masked_fill(~seen, -torch.inf).expand(B, H, T_q, T_k).flatten(0, 1)
    elif seen == "causal":
        # triu(1): only what lies strictly behind a query is shut out, so it sees itself
        bias = q.new_full((T_q, T_k), -torch.inf).triu(1)
    att = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=D ** -0.5)  # (B H, T_q, T_k)
    return (att.softmax(-1) @ v.flatten(0, 1)).view_as(q)


def attend_one(q, k, v, seen):  # T_q = 1; seen: a dense mask, or any name, since the last position sees every key
    att = (q * k).sum(-1, dtype=torch.float32) * q.size(-1) ** -0.5                 # (B, H, T_k)
    if isinstance(seen, torch.Tensor):
        att = att.masked_fill(~seen[:, :, 0], -torch.inf)
    return (att.softmax(-1)[..., None].to(v.dtype) * v).sum(2, keepdim=True)


def attend_fused(q, k, v, seen):
    if isinstance(seen, str):
        return F.scaled_dot_product_attention(q, k, v, is_causal=seen == "causal")
    if isinstance(seen, torch.Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    return flex_attention()(q, k, v, block_mask=seen)


@functools.cache
def flex_attention():  # a kernel only when compiled: run eagerly it writes out all scores
    from torch.nn.attention.flex_attention import flex_attention
    return torch.compile(flex_attention, dynamic=False) if torch.cuda.is_available() else flex_attention


# ---- the network

def norm(x):  # (..., C) -> (..., C) of mean 0 and variance 1
    return F.layer_norm(x, (x.size(-1),))       # on the CPU one kernel, where F.rms_norm takes eight


def rotations(at, D, dtype):  # positions (T,) -> cos, sin (T, D)
    freq = ROPE_BASE ** (-torch.arange(0, D, 2, device=at.device, dtype=torch.float32) / D)
    angle = torch.outer(at.float(), freq)                                           # (T, D / 2)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), dim=1).to(dtype), torch.cat((-sin, sin), dim=1).to(dtype)


def rotate(x, cos, sin):  # (..., T, D) -> the same, each pair (i, i + D/2) turned by its position's angle
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, dims=-1), sin)


class Linear(nn.Module):
    """y = x W^T in x's dtype; the weight stays float32. Several maps of one input are kept as a stack
    (n, n_out, n_in): one product forward, n matrices to the optimizer."""

    def __init__(self, n_in, n_out, stack=1, zero=False):
        super().__init__()
        weight = torch.zeros(stack, n_out, n_in) if zero else torch.randn(stack, n_out, n_in) * n_in ** -0.5
        self.weight, self.packed = nn.Parameter(weight), None

    def forward(self, x):  # (..., n_in) -> (..., stack * n_out)
        if self.packed is not None and not torch.compiler.is_compiling():
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")
        return F.linear(x, self.weight.flatten(0, 1).to(x.dtype))


def pack_weights(model):
    """For decoding in bfloat16 on a CPU: keeps every matrix a second time, as oneDNN lays it out for its own use. The
    product with a single row, which is all that a decoding step is made of, then takes half the time."""
    for layer in model.modules():
        if isinstance(layer, Linear) and layer.weight.dtype == torch.bfloat16 and layer.weight.device.type == "cpu":
            try:
                layer.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().flatten(0, 1), 1)
            except (AttributeError, RuntimeError):              # a build of torch without oneDNN
                return


class Block(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        C, self.n_head = sizes.n_embd, sizes.n_head
        self.qkv = Linear(C, C, stack=3)
        self.proj = Linear(C, C, zero=True)
        self.up = Linear(C, 4 * C)
        self.down = Linear(4 * C, C, zero=True)

    def forward(self, x, cos, sin, seen, cache=None):  # x (B, T, C) -> (B, T, C)
        B, T, C = x.shape
        # attention is the only layer that moves information between positions
        qkv = self.qkv(norm(x)).view(B, T, 3, self.n_head, C // self.n_head)
        qkv = qkv.permute(2, 0, 3, 1, 4).contiguous()                               # (3, B, H, T, D)
        (q, k), v = rotate(norm(qkv[:2]), cos, sin), qkv[2]                         # QK-norm, then RoPE
        if cache is not None:
            k, v = extend(cache, k, v)                                              # (B, H, T_k, D)
        y = attend(q, k, v, seen)                                                   # (B, H, T, D)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        # each position for itself
        return x + self.down(F.relu(self.up(norm(x))).square())


class Transformer(nn.Module):
    """dtype: of the activations. Weights are float32, and so are logits and losses."""

    def __init__(self, sizes, dtype=torch.float32):
        super().__init__()
        assert sizes.n_embd % sizes.n_head == 0 and sizes.n_embd // sizes.n_head % 2 == 0, sizes
        self.sizes, self.dtype = sizes, dtype
        self.embed = nn.Embedding(sizes.vocab_size, sizes.n_embd)
        nn.init.normal_(self.embed.weight, std=0.3)             # a norm follows: a smaller start means larger steps
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.n_layer))
        self.head = Linear(sizes.n_embd, sizes.vocab_size, zero=True)

    def forward(self, idx, mask, doc=None, cache=None):  # idx (B, T) -> hidden states (B, T, C), normed
        """mask: "causal", "bidirectional", or prefix lengths (B,). doc: document ids (B, T), to keep attention
        inside a document. cache: what new_cache returned; idx then continues what it holds."""
        B, T = idx.shape
        # absolute positions: with a cache the first new one stands behind what it holds
        start, D = 0 if cache is None else cache["length"], self.sizes.n_embd // self.sizes.n_head
        static = isinstance(start, torch.Tensor)
        at = start + torch.arange(T, device=idx.device)                             # (T,)
        seen = resolve_mask(mask, B, at, cache["k"][0].size(2) if static else start + T, D, doc, static)
        cos, sin = rotations(at, D, self.dtype)
        x = norm(self.embed(idx).to(self.dtype))
        for i, block in enumerate(self.blocks):
            x = block(x, cos, sin, seen, None if cache is None else (cache["k"][i], cache["v"][i], start, at))
        if static:
            start.add_(T)
        elif cache is not None:
            cache["length"] = start + T
        return norm(x)

    def logits(self, h):  # hidden (..., C) -> (..., V) float32
        z = self.head(h).float()
        return LOGIT_CAP * torch.tanh(z / LOGIT_CAP)


# ---- KV cache

def new_cache(model, B, T, static=False):  # -> room for T positions of B rows
    """Setting "length" back forgets the positions after it. static: the length is a tensor and every step attends over
    all T positions under a mask, so that no shape depends on the length and a step can be compiled."""
    sizes, device = model.sizes, model.embed.weight.device
    shape = B, sizes.n_head, T, sizes.n_embd // sizes.n_head                        # (B, H, T, D), one for each layer
    k, v = ([torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(sizes.n_layer)] for _ in range(2))
    return dict(k=k, v=v, length=torch.zeros((), dtype=torch.long, device=device) if static else 0)


def extend(cache, k, v):  # one layer's (keys, values, length, positions) -> all keys and values (B, H, T_k, D)
    keys, values, start, at = cache
    if isinstance(start, torch.Tensor):
        return keys.index_copy_(2, at, k), values.index_copy_(2, at, v)
    end = start + k.size(2)
    assert end <= keys.size(2), f"the cache has room for {keys.size(2)} positions, not {end}"
    keys[:, :, start:end], values[:, :, start:end] = k, v
    return keys[:, :, :end], values[:, :, :end]
