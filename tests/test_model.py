import math
import os
import warnings

import pytest
import torch
import torch.nn.functional as F
from conftest import randomized

import model as M
from data import MASK, SEP, generator

T, B = 8, 2
SIZES = M.Sizes(2, 2, 32)
MASKS = {"causal": "causal", "bidirectional": "bidirectional", "prefix 0": torch.tensor([0, 0]),
         "prefix T": torch.tensor([T, T]), "prefix 3, 5": torch.tensor([3, 5])}
DOC = torch.tensor([[0] * 3 + [1] * 5, [0] * 6 + [1] * 2])
CACHES = [M.Cache, M.StaticCache]
fused = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def rows_so_short_are_halved_too(monkeypatch):
    monkeypatch.setattr(M, "SHORT", T - 1)


def rule(mask, b, q, k, doc=None):  # the rule in plain words: who may be seen
    if doc is not None and doc[b, q] != doc[b, k]:
        return False
    if isinstance(mask, str):
        return mask == "bidirectional" or k <= q
    return k <= q or k < int(mask[b])


def ids(seed=0, shape=(B, T)):
    return torch.randint(0, 512, shape, generator=generator(f"ids {seed}"))


def near(x, y):
    torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)


def mistake(monkeypatch, other):  # every pass has another mask than it was given
    choose = M.choose_attention
    monkeypatch.setattr(M, "choose_attention", lambda mask, q, *rest: choose(other(mask, q), q, *rest))


# ---- who may see whom

@torch.no_grad()
def dependence(net, x, mask, doc=None):  # -> (B, T, B, T) bool: does state [b, q] change with id [b', k]?
    """By other ids rather than by gradients, since n-grams are looked up by a hash of ids."""
    states, changes = net(x, mask, doc), []
    for b in range(B):
        for k in range(T):
            other = x.clone()
            other[b, k] = x[b, k] % 255 + 1
            changes.append((net(other, mask, doc) != states).any(-1))
    return torch.stack(changes, dim=-1).unflatten(-1, (B, T))


def check_leaks(mask, doc=None):
    depends = dependence(randomized(), ids(), mask, doc)
    for b in range(B):
        for q in range(T):
            for k in range(T):
                assert depends[b, q, b, k] == rule(mask, b, q, k, doc), (b, q, k)
                assert not depends[b, q, 1 - b, k], "rows see each other"


@pytest.mark.parametrize("doc", [None, DOC], ids=["one document", "two documents"])
@pytest.mark.parametrize("name", MASKS)
def test_states_depend_on_exactly_the_ids_that_the_rule_allows(name, doc):
    check_leaks(MASKS[name], doc)


BROKEN_RULES = {"sees one too far": lambda q, k, prefix, *doc: (k <= q + 1) | (k < prefix),
                "prefix one too long": lambda q, k, prefix, *doc: (k <= q) | (k <= prefix),
                "suffix blind to itself": lambda q, k, prefix, *doc: (k == q) | (k < prefix),
                "prefix ignored": lambda q, k, prefix, *doc: (k <= q) | (prefix < 0)}


@pytest.mark.parametrize("name", BROKEN_RULES)
def test_the_leak_test_rejects_broken_rules(name, monkeypatch):
    monkeypatch.setattr(M, "allow", BROKEN_RULES[name])
    with pytest.raises(AssertionError):
        check_leaks(MASKS["prefix 3, 5"])


@pytest.mark.parametrize("told, done", [("causal", "bidirectional"), ("bidirectional", "causal")])
def test_the_leak_test_rejects_broken_names(told, done, monkeypatch):
    mistake(monkeypatch, lambda mask, q: done)
    with pytest.raises(AssertionError):
        check_leaks(told)


def test_the_leak_test_rejects_documents_that_are_ignored(monkeypatch):
    allow = M.allow
    monkeypatch.setattr(M, "allow", lambda q, k, prefix, *doc: allow(q, k, prefix))
    with pytest.raises(AssertionError):
        check_leaks("causal", DOC)


def test_the_readme_shows_the_rule():
    with open(os.path.join(os.path.dirname(M.__file__), "README.md"), encoding="utf-8") as f:
        readme = f.read()
    seen = M.dense_mask(torch.tensor([0, 3, T]), torch.arange(T), T)[:, 0].tolist()
    grids = [[" ".join("■" if may else "·" for may in row) for row in grid] for grid in seen]
    for rows in zip(*grids):
        assert (" " * 8).join(rows) in readme


# ---- the forms of attention

def random_qkv():
    return [torch.randn(B, 2, T, 16, generator=generator(s), requires_grad=True) for s in "qkv"]


def by_loops(q, k, v, mask, doc=None):
    want = torch.zeros(q.shape)
    for b in range(B):
        for h in range(2):
            for i in range(T):
                keys = [j for j in range(T) if rule(mask, b, i, j, doc)]
                scores = torch.stack([q[b, h, i] @ k[b, h, j] / 4 for j in keys])       # 4 = sqrt(D)
                want[b, h, i] = sum(w * v[b, h, j] for w, j in zip(scores.softmax(0), keys))
    return want


def chosen(mask, at, T_k=T, doc=None, cache=None, sizes=SIZES):
    return M.choose_attention(mask, at, T_k, B, sizes, torch.float32, doc, cache)


@pytest.mark.parametrize("name", MASKS)
def test_every_form_on_a_cpu_agrees_with_loops(name):
    (q, k, v), mask, at, grads = random_qkv(), MASKS[name], torch.arange(T), []
    want, static = by_loops(q, k, v, mask), M.StaticCache(randomized(), B, T)
    whole, prefix = chosen(mask, at), mask
    assert whole.func is (M.attend_causal if name == "causal" else M.attend_plain)
    if isinstance(mask, str):
        prefix = torch.full((B,), 0 if mask == "causal" else T)
    for y in (whole(q, k, v), fused(q, k, v, M.dense_mask(prefix, at, T))):
        near(y, want)
        grads.append(torch.autograd.grad((y * v.detach().cos()).sum(), (q, k, v)))
    for a, b in zip(*grads):
        near(a, b)
    last = chosen(mask, at[3:])                 # after a cache of three
    assert last.func is fused
    near(last(q[:, :, 3:], k, v), want[:, :, 3:])
    for i in range(T):                          # a decoding step, after a cache of i or in room for T
        for T_k, cache in ((i + 1 if mask == "causal" else T, None), (T, static)):
            one = chosen(mask, at[i:i + 1], T_k, cache=cache)
            assert one.func is M.attend_one
            near(one(q[:, :, i:i + 1], k[:, :, :T_k], v[:, :, :T_k]), want[:, :, i:i + 1])


@pytest.mark.parametrize("n", [2, 7, T])
def test_halves_of_a_causal_row_give_what_the_whole_gives(n):
    q, k, v = (x[:, :, :n] for x in random_qkv())
    bias = torch.zeros(n, n).masked_fill(torch.ones(n, n).triu(1) > 0, -torch.inf)[None]
    near(M.attend_causal(q, k, v, bias), M.attend_plain(q, k, v, bias))


class Gpu(str):  # the CPU under another name: what is chosen for a GPU can be seen and tried without one
    type = "cuda"


class OnGpu(torch.Tensor):
    device = property(lambda self: Gpu("cpu"))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("doc", [None, DOC], ids=["one document", "two documents"])
@pytest.mark.parametrize("name", MASKS)
def test_a_gpu_takes_flex_attention_for_prefixes_in_training_alone(name, doc, monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention as flex       # which a GPU compiles
    monkeypatch.setattr(M, "TRITON", True)
    monkeypatch.setattr(M, "flex_attention", lambda: flex)
    mask, at = MASKS[name], torch.arange(T).as_subclass(OnGpu)
    forms = {"training": chosen(mask, at, doc=doc),
             "a cache": chosen(mask, at, doc=doc, cache=M.Cache(randomized(), B, T)),
             "narrow heads": chosen(mask, at, doc=doc, sizes=M.Sizes(2, 4, 32)),
             "wide heads": chosen(mask, at, doc=doc, sizes=M.Sizes(2, 4, 2048))}
    with torch.no_grad():
        forms["evaluation"] = chosen(mask, at, doc=doc)
    monkeypatch.setattr(M, "TRITON", False)
    forms["no Triton"] = chosen(mask, at, doc=doc)
    blocks = name.startswith("prefix") or doc is not None       # documents have no kernel of their own
    want = dict.fromkeys(forms, fused) | {"training": flex if blocks else fused}
    assert {why: form.func for why, form in forms.items()} == want
    by_name = {why for why, form in forms.items() if "is_causal" in form.keywords}
    assert by_name == (set(forms) - {"a cache"} if name == "causal" and doc is None else set())
    assert chosen(mask, at[-1:], doc=doc).func is fused, "one query too"
    q, k, v = (x.detach() for x in random_qkv())
    for form in forms.values():
        near(form(q, k, v).as_subclass(torch.Tensor), by_loops(q, k, v, mask, doc))


@pytest.mark.filterwarnings("ignore:.*NumPy|.*script_method")
def test_flex_attention_is_traced_with_what_is_around_it_and_warns_of_nothing():
    q, k, v = (torch.randn(2, 2, 128, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    prefix = torch.tensor([3, 70])

    def attend(q, k, v, prefix):
        return M.flex_attention()(q, k, v, block_mask=M.block_mask(prefix, 128))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lru_cache")
        y = torch.compile(attend, backend="eager", fullgraph=True, dynamic=False)(q, k, v, prefix)
    near(y, fused(q, k, v, M.dense_mask(prefix, torch.arange(128), 128)))
    assert M.flex_attention() is M.flex_attention(), "compiled once"


# ---- the cache

@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("start", range(1, T + 1))
@pytest.mark.parametrize("mask", ["causal", "prefix"])
def test_cached_decoding_equals_the_full_forward_at_every_length(mask, start, kind):
    net, x = randomized().requires_grad_(False), ids()
    mask, cache = torch.full((B,), start) if mask == "prefix" else mask, kind(net, B, T)
    h = net(x[:, :start], mask, cache=cache)
    for n in range(start, T + 1):
        near(h[:, -1], net(x[:, :n], mask)[:, -1])
        if n < T:
            h = net(x[:, n:n + 1], "causal", cache=cache)


@pytest.mark.parametrize("kind", CACHES)
def test_what_is_taken_back_and_written_again_equals_a_fresh_cache(kind):
    net, x = randomized().requires_grad_(False), ids()
    cache, fresh = kind(net, B, T), kind(net, B, T)
    net(x[:, :3], "causal", cache=cache)
    net(ids(1)[:, :4], "causal", cache=cache)                   # a draft that is rejected
    cache.move(-4)
    again = net(x[:, 3:], "causal", cache=cache)                # several bytes at once
    near(again, net(x, "causal")[:, 3:])
    net(x[:, :3], "causal", cache=fresh)
    assert torch.equal(again, net(x[:, 3:], "causal", cache=fresh))


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_has_no_more_room_than_it_says_and_a_static_length_stays_where_a_graph_reads_it(kind):
    net = randomized()
    cache = kind(net, B, T)
    length = cache.length
    net(ids(), "causal", cache=cache)
    assert int(cache.length) == T and (cache.length is length) == (kind is M.StaticCache)
    with pytest.raises((AssertionError, IndexError)):
        cache.extend(1, cache.positions(1), *torch.zeros(2, B, 2, 1, 8))


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("what, mask", [("mask", "causal"), ("mask", None), ("ids", "causal"), ("ids", None),
                                        ("rotation", "causal"), ("move", None)])
def test_the_cache_tests_reject_common_mistakes(what, mask, kind, monkeypatch):
    rotations, move = M.rotations, kind.move
    if what == "mask":                          # several queries at once see everything
        mistake(monkeypatch, lambda mask, q: "bidirectional" if len(q) > 1 else mask)
    elif what == "rotation":                    # every pass starts at angle 0
        monkeypatch.setattr(M, "rotations", lambda at, *rest: rotations(at - at[0], *rest))
    elif what == "ids":                         # every pass's convolution and n-grams start anew
        monkeypatch.setattr(kind, "context", lambda cache, idx: idx.new_zeros(B, M.CONTEXT - 1))
    else:                                       # one too many is taken back
        monkeypatch.setattr(kind, "move", lambda cache, n: move(cache, n - (n < 0)))
    with pytest.raises(AssertionError):
        if mask:
            test_cached_decoding_equals_the_full_forward_at_every_length(mask, 3, kind)
        else:
            test_what_is_taken_back_and_written_again_equals_a_fresh_cache(kind)


# ---- the network

def test_packed_weights_give_the_same_states():
    """In bfloat16, where the order of a sum shows in the last bits; in float32 nothing is packed."""
    net, same = randomized().to(torch.bfloat16), randomized().to(torch.bfloat16)
    net.dtype = same.dtype = torch.bfloat16
    M.pack_weights(net)
    layers = [layer for layer in net.modules() if isinstance(layer, M.Linear)]
    packs = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert all((layer.packed is not None) == packs for layer in layers)             # older CPUs go without
    for x in (ids(), ids(shape=(1, 1))):
        a, b = (each.logits(each(x, "causal")) for each in (net, same))
        torch.testing.assert_close(a, b, atol=0.1, rtol=0.05)
    assert net.state_dict().keys() == same.state_dict().keys()
    exact = randomized()
    M.pack_weights(exact)
    assert exact.head.packed is None


def test_rope_turns_pair_i_by_t_over_10000_to_the_2i_over_D():
    x = torch.randn(50, 8, generator=generator("x"))
    out = M.rotate(x, *M.rotations(torch.arange(50), 8, torch.float32))
    for t in (0, 1, 7, 49):
        for i in range(4):
            a = t * 10000 ** (-2 * i / 8)
            turn = complex(x[t, i], x[t, i + 4]) * complex(math.cos(a), math.sin(a))
            assert (float(out[t, i]), float(out[t, i + 4])) == pytest.approx((turn.real, turn.imag), abs=1e-4)


def test_attn_scale_multiplies_the_logits_of_attention(monkeypatch):
    scores = []

    def attend(q, k, v):
        scores.append(q @ k.mT)
        return v
    monkeypatch.setattr(M, "choose_attention", lambda *args: attend)
    net, far = randomized(n_layer=1), torch.arange(T).expand(B, T) * 2
    for net.sizes.attn_scale in (1.0, 3.0):
        net(ids(), "causal")
        net(ids(), "causal", at=far)
    near(scores[2], 3 * scores[0])
    near(scores[3], 3 * scores[1])


def test_fresh_weights_predict_every_id_alike_and_the_block_has_no_length_limit():
    torch.manual_seed(0)
    net = M.Transformer(M.Sizes(2, 2, 16))
    logits = net.logits(net(ids(shape=(1, 300)), "causal"))
    assert logits.shape == (1, 300, 512) and logits.dtype == torch.float32
    assert logits.abs().max() == 0
    x = ids(shape=(2, 9))
    past = M.context_ids(x, torch.zeros(2, M.CONTEXT - 1, dtype=torch.long))
    start = M.norm(M.causal_conv(past, net.embed.weight, net.conv_weight))
    assert torch.equal(net(x, "causal"), M.norm(start)), "every block starts as the identity"


@pytest.mark.parametrize("doc", [None, DOC])
def test_the_context_of_a_position_is_the_last_ids_of_its_document(doc):
    x = ids()
    before = torch.zeros(B, M.CONTEXT - 1, dtype=torch.long)
    past = M.context_ids(x, before, doc)
    for b in range(B):
        for t in range(T):
            for j in range(M.CONTEXT):
                inside = t >= j and (doc is None or doc[b, t - j] == doc[b, t])
                assert past[b, t, j] == (x[b, t - j] if inside else 0)
    if doc is None:                             # in pieces, as over a cache
        rest = M.context_ids(x[:, 6:], x[:, 6 - (M.CONTEXT - 1):6])
        assert torch.equal(rest, past[:, 6:])


def test_the_convolution_adds_the_embeddings_before_each_weighed_by_channel():
    embedding, weight = (torch.randn(*shape, generator=generator(f"{shape}")) for shape in [(9, 6), (M.CONV_WIDTH, 6)])
    past = torch.randint(0, 9, (B, T, M.CONTEXT), generator=generator("past"))
    want = torch.zeros(B, T, 6)
    for b in range(B):
        for t in range(T):
            for j in range(M.CONV_WIDTH):
                want[b, t] += weight[j] * embedding[past[b, t, j]]
    near(M.causal_conv(past, embedding, weight), want)                      # more positions than embeddings
    near(M.causal_conv(past[:, :2], embedding, weight), want[:, :2])        # fewer


# ---- n-grams

def signed(x):  # a whole number -> what is left of it in 64 bits
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def row_by_hand(gram, rows):  # the ids of an n-gram, the last one first -> its row of the table
    code = 0
    for i in gram:
        code = signed(code * M.HASH_FACTOR + i + 1)
    return (code ^ (code >> 32)) % rows + M.NGRAMS.index(len(gram)) * rows


def test_ngrams_are_looked_up_as_in_a_dictionary():
    """What stands before the row is EOT; an n-gram with a sentinel or a separator counts as zero, one with a MASK
    does not."""
    net, x = randomized(), ids()
    x[0, 3], x[1, 5] = MASK, SEP
    past = M.context_ids(x, torch.zeros(B, M.CONTEXT - 1, dtype=torch.long))
    got, special = net.ngrams(past, torch.float32), 0
    for b in range(B):
        row = [0] * (M.CONTEXT - 1) + x[b].tolist()
        for t in range(T):
            grams = [row[t + M.CONTEXT - n:t + M.CONTEXT][::-1] for n in M.NGRAMS]
            each = [net.ngrams.table[row_by_hand(gram, 64)] * (max(gram) <= MASK) for gram in grams]
            special += sum(max(gram) > MASK for gram in grams)
            near(got[b, t], torch.cat(each) @ net.ngrams.proj.weight[0].T)
    assert M.NGRAM_IDS == MASK + 1 and 0 < special < B * T * len(M.NGRAMS)


def test_ngrams_spread_evenly_over_their_rows():
    """Of 20,000 different n-grams of each length, in 4,096 rows: as uneven as chance has it, text or not."""
    text = torch.tensor([*open(M.__file__, "rb").read()])
    for x in (torch.randint(0, 512, (40_000,), generator=generator("spread")), text):
        grams = torch.unique(x.unfold(0, M.CONTEXT, 1), dim=0)[None, :20_000].flip(2)
        for i, rows in enumerate(M.hash_ngrams(grams, 4096)[0].T):
            assert rows.min() >= i * 4096 and rows.max() < (i + 1) * 4096
            different = len(torch.unique(grams[0, :, :M.NGRAMS[i]], dim=0))
            used, expected = len(rows.unique()), 4096 * (1 - (1 - 1 / 4096) ** different)
            assert abs(used - expected) < 0.05 * 4096


def test_ngrams_change_nothing_before_they_are_trained_and_can_be_left_out():
    torch.manual_seed(0)
    net = M.Transformer(M.Sizes(2, 2, 16, ngram_rows=64))
    torch.manual_seed(0)
    plain = M.Transformer(M.Sizes(2, 2, 16))
    assert plain.ngrams is None
    weights = dict(net.named_parameters())
    for name, p in plain.named_parameters():
        assert torch.equal(p, weights[name]), name
        p.data.copy_(weights[name].data.normal_(0, 0.3))
    assert torch.equal(net(ids(), "causal"), plain(ids(), "causal"))


def test_the_squared_relu_has_the_gradient_of_its_parts():
    x = torch.randn(50, generator=generator("x"), dtype=torch.double, requires_grad=True)
    weight = torch.randn(50, generator=generator("weight"), dtype=torch.double)
    got = torch.autograd.grad((M.SquaredReLU.apply(x) * weight).sum(), x)
    near(got[0], torch.autograd.grad((F.relu(x).square() * weight).sum(), x)[0])
    assert torch.equal(M.SquaredReLU.apply(x), F.relu(x).square())


def test_every_block_adds_its_share_of_the_ngrams():
    net, x, seen = randomized(), ids(), []
    for block in net.blocks:
        block.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    net(x, "causal")
    past = M.context_ids(x, torch.zeros(B, M.CONTEXT - 1, dtype=torch.long))
    e = net.ngrams(past, torch.float32)
    before = M.norm(M.causal_conv(past, net.embed.weight, net.conv_weight) + e)
    for (taken, out), gain in zip(seen, net.ngrams.gain):
        near(taken, before + M.norm(e) * gain)
        before = out


def test_lookups_are_scaled_and_their_gradients_are_those_of_the_table():
    net, x = randomized().double(), ids()
    x[0, 3] = SEP                               # n-grams with it have no gradient
    past = M.context_ids(x, torch.zeros(B, M.CONTEXT - 1, dtype=torch.long))
    scale = torch.rand(B, T, len(M.NGRAMS), generator=generator("scale"), dtype=torch.double).round() * 2
    delta = torch.zeros(*scale.shape, M.NGRAM_DIM, dtype=torch.double, requires_grad=True)
    lookups = M.Lookups(scale, torch.zeros_like(scale, dtype=torch.long), delta)
    direction = torch.randn(B, T, 16, generator=generator("direction"), dtype=torch.double)
    (net.ngrams(past, torch.double, lookups) * direction).sum().backward()
    assert torch.equal(lookups.row, M.hash_ngrams(past, 64))

    table = net.ngrams.table.requires_grad_()
    clean = torch.stack([past[..., :n].amax(2) < M.NGRAM_IDS for n in M.NGRAMS], dim=2)
    taken = table[lookups.row] * (scale * clean)[..., None]                         # (B, T, N, NGRAM_DIM)
    (net.ngrams.proj(taken.flatten(2)) * direction).sum().backward()
    near(torch.zeros_like(table).index_add(0, lookups.row.flatten(), delta.grad.flatten(0, 2)), table.grad)
    assert (delta.grad.any(-1) == (scale * clean > 0)).all()


def test_positions_given_turn_queries_and_keys_but_move_no_mask():
    net, x, at = randomized(), ids(), torch.arange(T).expand(B, T)
    near(net(x, "causal", at=at), net(x, "causal"))
    near(net(x, "causal", at=at + 50), net(x, "causal"))        # distance alone counts
    far = at + 9 * (at > 3)
    moved = net(x, "causal", at=far)
    near(moved[:, :4], net(x, "causal")[:, :4])
    assert (moved[:, 4:] - net(x, "causal")[:, 4:]).abs().amax(-1).min() > 1e-3
    for kind in CACHES:                         # over a cache, where the mask still counts ids
        cache = kind(net, B, T)
        parts = [net(x[:, a:b], "causal", cache=cache, at=far[:, a:b]) for a, b in [(0, 3), (3, 6), (6, T)]]
        near(torch.cat(parts, 1), moved)


def test_bfloat16_activations_stay_near_float32():
    exact, rounded = randomized(), randomized(dtype=torch.bfloat16)
    a, b = (F.log_softmax(net.logits(net(ids(), "causal")), -1) for net in (exact, rounded))
    assert b.dtype == torch.float32 and 0 < (a - b).abs().mean() < 0.2
    kept = []
    rounded.blocks[0].register_forward_hook(lambda module, args, out: kept.extend((args[0].dtype, out.dtype)))
    rounded(ids(), "causal")
    assert kept == [torch.bfloat16, torch.bfloat16]
