import functools
import itertools
import math

import pytest
import torch
from conftest import Recording, kv_head, may_attend, randomized

import model as M
from data import MASK, SEP, make_rng

T, B = 8, 2
LONG = 72                                       # longer than common windows; a fork with a wider window raises it
SCALE = 1.5
N = len(M.NGRAMS)


def ids(seed=0, shape=(B, T), high=512):
    return torch.randint(1, high, shape, generator=make_rng(f"ids {seed}"))


def context_of(x):  # the context ids of rows with nothing before them
    return M.context_ids(x, torch.zeros(len(x), M.CONTEXT_WIDTH - 1, dtype=torch.long))


def near(x, y):
    torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)


# ---- the forms of attention
def by_rule(block, prefix):  # -> (B, LONG, LONG)
    k = torch.arange(LONG)
    prefix = torch.as_tensor(prefix).expand(B)[:, None, None]
    return may_attend(block, k[:, None], k, prefix).expand(B, LONG, LONG)


def slow_attend(q, k, v, allowed):  # allowed (B, T, T), keys of all positions -> (B, H, T, D)
    D = q.size(3)
    y = []
    for h in range(q.size(1)):
        j = kv_head(h) if k.size(1) < q.size(1) else h          # a block may also pass one key per query head
        scores = SCALE * q[:, h] @ k[:, j].mT / D ** 0.5
        y.append(scores.masked_fill(~allowed, -math.inf).softmax(-1) @ v[:, j])
    return torch.stack(y, dim=1)


def slow_states(net, x, rules):
    """-> (B, T, C): the states by definition, if block i attends where rules[i] (B, T, T) is True. The embeddings e of
    n-grams are added before the first block, and norm(e) times a gain before each block."""
    context = context_of(x)
    e = net.ngrams(context, torch.float32)
    states = M.norm(M.causal_conv(context, net.embed.weight, net.conv_weight) + e)
    cos_sin = M.rope_cos_sin(torch.arange(x.size(1))[:, None, None], net.config.n_embd // net.config.n_head, net.dtype)
    for block, allowed, gain in zip(net.blocks, rules, net.ngrams.gain):
        states = block(states + M.norm(e) * gain, *cos_sin, functools.partial(slow_attend, allowed=allowed))
    return M.norm(states)


class Gpu(str):  # a CPU that calls itself a GPU, to test without a GPU what is chosen for one
    type = "cuda"


class OnGpu(torch.Tensor):
    device = property(lambda self: Gpu(torch.Tensor.device.__get__(self)))


def choose_on_gpu(prefix, q_pos, *args, choose=M.choose_attention, **kwargs):
    attend = choose(prefix, q_pos.as_subclass(OnGpu), *args, **kwargs)
    masks = {name: t.as_subclass(torch.Tensor) for name, t in attend.keywords.items() if isinstance(t, torch.Tensor)}
    return functools.partial(attend, **masks)


@pytest.fixture(params=["cpu", "faked gpu"])
def each_device(request, monkeypatch):
    if request.param != "cpu":
        monkeypatch.setattr(M, "choose_attention", choose_on_gpu)


def same(net, states, want):  # are they equal, and their gradients, too?
    near(states, want)
    direction = torch.randn(want.shape, generator=make_rng("direction"))
    params = [p for name, p in net.named_parameters() if name != "head.weight"]
    for a, b in zip(*(torch.autograd.grad((y * direction).sum(), params) for y in (states, want))):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


PREFIXES = {"causal": 0, "bidirectional": LONG, "prefix 3": 3, "prefixes 0": torch.tensor([0, 0]),
            "prefixes T": torch.tensor([LONG, LONG]), "prefixes 5, 68": torch.tensor([5, 68])}


@pytest.mark.parametrize("name", PREFIXES)
def test_every_form_of_attention_follows_the_rule_of_each_block(name, each_device):
    net = randomized()
    net.config.attn_scale = SCALE
    x = ids(shape=(B, LONG))
    prefix = PREFIXES[name]
    rules = [by_rule(i, prefix) for i in range(2)]
    want = slow_states(net, x, rules)
    same(net, net(x, prefix), want)
    with torch.no_grad():                       # the first piece holds the prefix
        first = int(torch.as_tensor(prefix).max())
        cache = M.Cache(net, B, LONG + 3)
        cuts = sorted({0, first, max(first, 7), max(first, 66), *range(max(first, 67), LONG + 1)})
        parts = [net(x[:, a:b], prefix if a == 0 else 0, cache=cache) for a, b in zip(cuts, cuts[1:])]
        near(torch.cat(parts, dim=1), want)
        assert int(cache.length) == LONG


@pytest.mark.parametrize("rows", [1, B])
def test_a_mask_replaces_the_prefix(rows, each_device):
    net = randomized()
    net.config.attn_scale = SCALE
    x = ids(shape=(B, LONG))
    mask = torch.rand(rows, LONG, LONG, generator=make_rng("mask")) < 0.5
    mask = (mask | torch.eye(LONG, dtype=torch.bool)).expand(B, -1, -1)
    same(net, net(x, mask=mask), slow_states(net, x, [mask & by_rule(i, LONG) for i in range(2)]))


@pytest.mark.parametrize("name", PREFIXES)
def test_a_gpu_needs_a_mask_only_for_prefixes(name):
    positions = torch.arange(LONG).as_subclass(OnGpu)
    attend = M.choose_attention(PREFIXES[name], positions, LONG, randomized().config, torch.float32)
    assert ("is_causal" in attend.keywords) == (name == "causal")
    assert ("attn_mask" in attend.keywords) == (name not in ("causal", "bidirectional"))


@torch.no_grad()
def test_a_recorded_decoding_step_can_be_replayed():
    """The recording stands in for a CUDA graph of one decoding step: only the ids are set before each replay."""
    net = randomized()
    x = ids()
    cache = M.Cache(net, B, T)
    static_ids = x[:, 2:3].clone()
    net(x[:, :2], cache=cache)
    recording = Recording()
    with recording:
        h = net(static_ids, cache=cache)
    for n in range(3, T):
        static_ids.copy_(x[:, n:n + 1])
        recording.replay()
        near(h, net(x)[:, n:n + 1])


# ---- the network
def test_rope_rotates_pair_i_by_t_over_10000_to_the_2i_over_D():
    x = torch.randn(50, 8, generator=make_rng("x"))
    out = M.apply_rope(x, *M.rope_cos_sin(torch.arange(50), 8, torch.float32))
    for t in (0, 1, 7, 49):
        for i in range(4):
            a = t * 10000 ** (-2 * i / 8)
            turn = complex(x[t, i], x[t, i + 4]) * complex(math.cos(a), math.sin(a))
            assert float(out[t, i]) == pytest.approx(turn.real, abs=1e-4)
            assert float(out[t, i + 4]) == pytest.approx(turn.imag, abs=1e-4)


def test_positions_rotate_queries_and_keys_but_leave_the_mask_as_it_is():
    net = randomized()
    x = ids()
    i = torch.arange(T).expand(B, T)
    near(net(x, positions=i + 50), net(x))      # only distances matter
    moved = net(x, positions=i + 9 * (i > 3))   # 0, 1, 2, 3, 13, 14, ...
    near(moved[:, :4], net(x)[:, :4])
    assert (moved[:, 4:] - net(x)[:, 4:]).abs().amax(-1).min() > 1e-3


def test_bfloat16_activations_stay_near_float32():
    exact = randomized()
    rounded = randomized(dtype=torch.bfloat16)
    kept = []
    rounded.blocks[0].register_forward_hook(lambda module, args, out: kept.extend((args[0].dtype, out.dtype)))
    a, b = (net.logits(net(ids())) for net in (exact, rounded))
    assert b.dtype == torch.float32 and 0 < (a.log_softmax(-1) - b.log_softmax(-1)).abs().mean() < 0.2
    assert kept == [torch.bfloat16, torch.bfloat16]


def test_the_convolution_sums_the_last_embeddings_weighted_by_channel():
    embedding, weight = (torch.randn(*shape, generator=make_rng(f"{shape}")) for shape in [(9, 6), (M.CONV_WIDTH, 6)])
    context = torch.randint(0, 9, (B, T, M.CONTEXT_WIDTH), generator=make_rng("context"))
    want = sum(weight[j] * embedding[context[:, :, j]] for j in range(M.CONV_WIDTH))
    near(M.causal_conv(context, embedding, weight), want)                  # more positions than embeddings
    near(M.causal_conv(context[:, :2], embedding, weight), want[:, :2])    # fewer


# ---- n-grams
def row_by_hand(gram, rows):  # the ids of an n-gram, the last one first -> its row of the table
    code = 0
    for i in gram:
        code = (code * M.HASH_MULTIPLIER + i + 1 + (1 << 63)) % (1 << 64) - (1 << 63)          # signed 64-bit overflow
    return (code ^ (code >> 32)) % rows + M.NGRAMS.index(len(gram)) * rows


def test_ngrams_are_looked_up_as_in_a_dictionary():
    """Rows are padded with EOT at the front. N-grams with a sentinel or a separator count as zero, with a MASK not."""
    net = randomized()
    assert net.ngrams.table.std() > 0.2, "with a table of zeros, tests of n-grams could not fail"
    x = ids(high=256)
    x[0, 3] = MASK
    x[1, 5] = SEP
    got = net.ngrams(context_of(x), torch.float32)
    for b, t in itertools.product(range(B), range(T)):
        row = [0] * (M.CONTEXT_WIDTH - 1) + x[b].tolist()
        grams = [row[t + M.CONTEXT_WIDTH - n:t + M.CONTEXT_WIDTH][::-1] for n in M.NGRAMS]
        looked_up = [net.ngrams.table[row_by_hand(gram, 64)] * (max(gram) <= MASK) for gram in grams]
        near(got[b, t], torch.cat(looked_up) @ net.ngrams.proj.weight[0].T)


@torch.no_grad()
def test_training_drops_a_share_of_the_lookups_and_scales_the_others():
    ngrams = randomized(ngram_rows=4096).ngrams
    ngrams.table.fill_(1)                       # so that output i is the scale of the n-gram of length NGRAMS[i]
    ngrams.proj.weight.copy_(torch.eye(16, N).repeat_interleave(M.NGRAM_DIM, 1) / M.NGRAM_DIM)
    ngrams.drop = 0.25
    context = context_of(ids(shape=(64, 64), high=256))
    torch.manual_seed(7)
    f = ngrams(context, torch.float32)[..., :N]
    assert torch.equal((f * 0.75 * 3).round(), (f > 0) * 3.0), "kept lookups are not scaled by 1 / (1 - drop)"
    for some in (f[..., 0], f[..., N - 1], f[:32], f[3:, 9]):
        assert abs(float((some == 0).float().mean()) - 0.25) < 5 * (0.25 * 0.75 / some.numel()) ** 0.5
    both = (f[..., 0] == 0) & (f[..., N - 1] == 0)
    assert abs(float(both.float().mean()) - 0.25 ** 2) < 0.02, "lengths are not dropped independently"
    ngrams.eval()
    assert (ngrams(context, torch.float32)[..., :N] == 1).all()
