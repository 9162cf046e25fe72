import math
import os
import warnings

import pytest
import torch
import torch.nn.functional as F
from conftest import Recording, randomized

import model as M
from data import MASK, SEP, make_rng

T, B = 8, 2
CONFIG = M.ModelConfig(2, 2, 32)
PREFIXES = {"causal": 0, "bidirectional": T, "prefix 3": 3, "prefixes 0": torch.tensor([0, 0]),
            "prefixes T": torch.tensor([T, T]), "prefixes 3, 5": torch.tensor([3, 5])}
DOC = torch.tensor([[0] * 3 + [1] * 5, [0] * 6 + [1] * 2])
CACHES = [M.Cache, M.StaticCache]
sdpa = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def causal_halves_from_T_on(monkeypatch):
    monkeypatch.setattr(M, "HALVE_ABOVE", T - 1)


def prefix_of(prefix, b):  # an int for all rows, or one for each
    return prefix if isinstance(prefix, int) else int(prefix[b])


def allowed_by_rule(prefix, b, q, k, doc=None):  # the mask rule in plain words
    if doc is not None and doc[b, q] != doc[b, k]:
        return False
    return k <= q or k < prefix_of(prefix, b)


def ids(seed=0, shape=(B, T)):
    return torch.randint(0, 512, shape, generator=make_rng(f"ids {seed}"))


def near(x, y):
    torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)


def replace_prefix(monkeypatch, other):  # every pass has another prefix than it was given
    choose = M.choose_attention
    monkeypatch.setattr(M, "choose_attention", lambda prefix, q, *rest: choose(other(prefix, q), q, *rest))


# ---- which ids a state depends on

@torch.no_grad()
def dependence(net, x, prefix, doc=None, mask=None):  # -> (B, T, B, T) bool: does state [b, q] change with id [b', k]?
    """By other ids rather than by gradients, since n-grams are looked up by a hash of ids."""
    states = net(x, prefix, doc, mask=mask)
    changes = []
    for b in range(B):
        for k in range(T):
            other = x.clone()
            other[b, k] = x[b, k] % 255 + 1
            changes.append((net(other, prefix, doc, mask=mask) != states).any(-1))
    return torch.stack(changes, dim=-1).unflatten(-1, (B, T))


def check_leaks(prefix, doc=None):
    depends = dependence(randomized(), ids(), prefix, doc)
    for b in range(B):
        for q in range(T):
            for k in range(T):
                assert depends[b, q, b, k] == allowed_by_rule(prefix, b, q, k, doc), (b, q, k)
                assert not depends[b, q, 1 - b, k], "a row depends on another"


@pytest.mark.parametrize("doc", [None, DOC], ids=["one document", "two documents"])
@pytest.mark.parametrize("name", PREFIXES)
def test_states_depend_on_exactly_the_ids_that_the_rule_allows(name, doc):
    check_leaks(PREFIXES[name], doc)


BROKEN_RULES = {"one key too far": lambda q, k, prefix, *doc: (k <= q + 1) | (k < prefix),
                "prefix one too long": lambda q, k, prefix, *doc: (k <= q) | (k <= prefix),
                "suffix sees itself and the prefix alone": lambda q, k, prefix, *doc: (k == q) | (k < prefix),
                "prefix ignored": lambda q, k, prefix, *doc: (k <= q) | (prefix < 0)}


@pytest.mark.parametrize("name", BROKEN_RULES)
def test_the_leak_test_rejects_broken_rules(name, monkeypatch):
    monkeypatch.setattr(M, "can_attend", BROKEN_RULES[name])
    with pytest.raises(AssertionError):
        check_leaks(PREFIXES["prefixes 3, 5"])


@pytest.mark.parametrize("asked, done", [(0, T), (T, 0), (3, 0), (3, T), (3, 4)])
def test_the_leak_test_rejects_another_prefix(asked, done, monkeypatch):
    replace_prefix(monkeypatch, lambda prefix, q: done)
    with pytest.raises(AssertionError):
        check_leaks(asked)


def test_the_leak_test_rejects_ignored_documents(monkeypatch):
    can_attend = M.can_attend
    monkeypatch.setattr(M, "can_attend", lambda q, k, prefix, *doc: can_attend(q, k, prefix))
    with pytest.raises(AssertionError):
        check_leaks(0, DOC)


def test_the_readme_shows_the_rule():
    with open(os.path.join(os.path.dirname(M.__file__), "README.md"), encoding="utf-8") as f:
        readme = f.read()
    masks = M.dense_mask(torch.tensor([0, 3, 5]), torch.arange(5), 5)[:, 0].tolist()
    grids = [[" ".join("■" if allowed else "·" for allowed in row) for row in mask] for mask in masks]
    for rows in zip(*grids):
        assert (" " * 14).join(rows) in readme


# ---- the ways to give a mask and an input

@pytest.mark.parametrize("doc", [None, DOC], ids=["one document", "two documents"])
@pytest.mark.parametrize("P", range(T + 1))
def test_an_int_prefix_equals_the_same_prefix_for_every_row(P, doc):
    net = randomized()
    near(net(ids(), P, doc), net(ids(), torch.full((B,), P), doc))


@pytest.mark.parametrize("name", PREFIXES)
def test_a_mask_that_says_what_the_prefix_says_gives_the_same_states(name):
    prefix = PREFIXES[name]
    net = randomized()
    mask = torch.tensor([[[allowed_by_rule(prefix, b, q, k) for k in range(T)] for q in range(T)] for b in range(B)])
    want = net(ids(), prefix)
    near(net(ids(), mask=mask), want)
    near(net(ids(), T - prefix_of(prefix, 0), mask=mask), want)         # the prefix beside it is not read
    if isinstance(prefix, int):
        near(net(ids(), mask=mask[:1]), want)   # one mask for all rows


def test_under_a_mask_states_depend_on_what_it_allows_and_on_their_context():
    """One layer, in which nothing is passed on: a key of the mask brings the ids of its context with it."""
    mask = torch.rand(B, T, T, generator=make_rng("mask")) < 0.2
    mask |= torch.eye(T, dtype=torch.bool)
    bytes_only = ids() % 255 + 1                # an n-gram with a special id has no embedding
    depends = dependence(randomized(n_layer=1, ngram_rows=4096), bytes_only, 0, mask=mask)
    for b in range(B):
        for q in range(T):
            allowed = {k - j for k in range(T) if mask[b, q, k] for j in range(M.CONTEXT_WIDTH)}
            assert {k for k in range(T) if depends[b, q, b, k]} == allowed & {*range(T)}
            assert not depends[b, q, 1 - b].any(), "a row depends on another"


@pytest.mark.parametrize("name", PREFIXES)
def test_embeddings_given_as_input_replace_those_of_the_ids(name):
    net = randomized(ngram_rows=0)
    prefix = PREFIXES[name]
    e, ngrams = net.embed_ids(ids())
    assert ngrams is None
    assert torch.equal(net(None, prefix, inputs_embeds=e), net(ids(), prefix))
    assert torch.equal(net(ids(1), prefix, inputs_embeds=e), net(ids(), prefix)), "the ids beside them are not read"
    e = e.detach().requires_grad_()
    net(None, prefix, inputs_embeds=e).square().sum().backward()
    assert (e.grad != 0).any(-1).all()


# ---- the forms of attention

def random_qkv():
    return [torch.randn(B, 2, T, 16, generator=make_rng(s), requires_grad=True) for s in "qkv"]


def by_loops(q, k, v, prefix, doc=None):
    want = torch.zeros(q.shape)
    for b in range(B):
        for h in range(2):
            for i in range(T):
                keys = [j for j in range(T) if allowed_by_rule(prefix, b, i, j, doc)]
                scores = torch.stack([q[b, h, i] @ k[b, h, j] / 4 for j in keys])       # 4 = sqrt(D)
                want[b, h, i] = sum(w * v[b, h, j] for w, j in zip(scores.softmax(0), keys))
    return want


def chosen(prefix, q, T_k=T, doc=None, cache=None, config=CONFIG, mask=None):
    return M.choose_attention(prefix, q, T_k, B, config, torch.float32, doc, cache, mask)


@pytest.mark.parametrize("name", PREFIXES)
def test_every_form_on_a_cpu_agrees_with_loops(name):
    q, k, v = random_qkv()
    prefix = PREFIXES[name]
    positions = torch.arange(T)
    want = by_loops(q, k, v, prefix)
    whole = chosen(prefix, positions)
    assert whole.func is (M.attend_causal_halves if name == "causal" else M.attend_dense)
    each_row = torch.tensor([prefix_of(prefix, b) for b in range(B)])
    grads = []
    for y in (whole(q, k, v), sdpa(q, k, v, M.dense_mask(each_row, positions, T))):
        near(y, want)
        grads.append(torch.autograd.grad((y * v.detach().cos()).sum(), (q, k, v)))
    for a, b in zip(*grads):
        near(a, b)
    last = chosen(prefix, positions[3:])        # after a cache of three
    assert last.func is sdpa
    near(last(q[:, :, 3:], k, v), want[:, :, 3:])
    static = M.StaticCache(randomized(), B, T)
    for i in range(T):                          # a decoding step, after a cache of i or in a static one for T
        for T_k, cache in ((i + 1 if name == "causal" else T, None), (T, static)):
            one = chosen(prefix, positions[i:i + 1], T_k, cache=cache)
            assert one.func is M.attend_single_query
            near(one(q[:, :, i:i + 1], k[:, :, :T_k], v[:, :, :T_k]), want[:, :, i:i + 1])


@pytest.mark.parametrize("n", [2, 7, T])
def test_a_causal_row_in_halves_equals_the_whole(n):
    q, k, v = (x[:, :, :n] for x in random_qkv())
    bias = torch.zeros(n, n).masked_fill(torch.ones(n, n).triu(1) > 0, -torch.inf)[None]
    near(M.attend_causal_halves(q, k, v, bias), M.attend_dense(q, k, v, bias))


class Gpu(str):  # the CPU under another name: what is chosen for a GPU can be seen and tried without one
    type = "cuda"


class OnGpu(torch.Tensor):
    device = property(lambda self: Gpu("cpu"))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("doc", [None, DOC], ids=["one document", "two documents"])
@pytest.mark.parametrize("name", PREFIXES)
def test_a_gpu_takes_flex_attention_for_prefixes_in_training_alone(name, doc, monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention as flex       # which a GPU compiles
    monkeypatch.setattr(M, "TRITON", True)
    monkeypatch.setattr(M, "flex_attention", lambda: flex)
    prefix = PREFIXES[name]
    positions = torch.arange(T).as_subclass(OnGpu)
    own_mask = torch.ones(1, T, T, dtype=torch.bool).tril()
    forms = {"training": chosen(prefix, positions, doc=doc),
             "a cache": chosen(prefix, positions, doc=doc, cache=M.Cache(randomized(), B, T)),
             "narrow heads": chosen(prefix, positions, doc=doc, config=M.ModelConfig(2, 4, 32)),
             "wide heads": chosen(prefix, positions, doc=doc, config=M.ModelConfig(2, 4, 2048))}
    with torch.no_grad():
        forms["evaluation"] = chosen(prefix, positions, doc=doc)
    monkeypatch.setattr(M, "TRITON", False)
    forms["no Triton"] = chosen(prefix, positions, doc=doc)
    blocks = name.startswith("prefix") or doc is not None       # documents have no kernel of their own
    want = dict.fromkeys(forms, sdpa) | {"training": flex if blocks else sdpa}
    assert {why: form.func for why, form in forms.items()} == want
    is_causal = {why for why, form in forms.items() if "is_causal" in form.keywords}
    assert is_causal == (set(forms) - {"a cache"} if name == "causal" and doc is None else set())
    assert chosen(prefix, positions[-1:], doc=doc).func is sdpa, "one query too"
    monkeypatch.setattr(M, "TRITON", True)
    assert chosen(prefix, positions, mask=own_mask).keywords["attn_mask"].shape == (1, 1, T, T), "a mask as it is"
    q, k, v = (x.detach() for x in random_qkv())
    for form in forms.values():
        near(form(q, k, v).as_subclass(torch.Tensor), by_loops(q, k, v, prefix, doc))


@pytest.mark.filterwarnings("ignore:.*NumPy|.*script_method")
def test_flex_attention_is_traced_with_what_is_around_it_and_warns_of_nothing():
    q, k, v = (torch.randn(2, 2, 128, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    prefix = torch.tensor([3, 70])

    def attend(q, k, v, prefix):
        return M.flex_attention()(q, k, v, block_mask=M.block_mask(prefix, 128))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lru_cache")
        y = torch.compile(attend, backend="eager", fullgraph=True, dynamic=False)(q, k, v, prefix)
    near(y, sdpa(q, k, v, M.dense_mask(prefix, torch.arange(128), 128)))
    assert M.flex_attention() is M.flex_attention(), "compiled once"


# ---- the cache

@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("start", range(1, T + 1))
@pytest.mark.parametrize("how", ["causal", "prefix", "a prefix each row"])
def test_cached_decoding_equals_the_full_forward_at_every_length(how, start, kind):
    net = randomized().requires_grad_(False)
    x = ids()
    prefix = {"causal": 0, "prefix": start, "a prefix each row": torch.full((B,), start)}[how]
    cache = kind(net, B, T)
    h = net(x[:, :start], prefix, cache=cache)
    for n in range(start, T + 1):
        near(h[:, -1], net(x[:, :n], prefix)[:, -1])
        if n < T:
            h = net(x[:, n:n + 1], cache=cache)


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_that_is_rewound_and_written_again_equals_a_fresh_one(kind):
    net = randomized().requires_grad_(False)
    x = ids()
    cache = kind(net, B, T)
    fresh = kind(net, B, T)
    net(x[:, :3], cache=cache)
    net(ids(1)[:, :4], cache=cache)             # a draft that is rejected
    cache.rewind(4)
    again = net(x[:, 3:], cache=cache)          # several bytes at once
    near(again, net(x)[:, 3:])
    net(x[:, :3], cache=fresh)
    assert torch.equal(again, net(x[:, 3:], cache=fresh))


@pytest.mark.parametrize("kind", CACHES)
def test_a_full_cache_takes_no_more_and_a_static_length_keeps_its_address(kind):
    net = randomized()
    cache = kind(net, B, T)
    length = cache.length
    net(ids(), cache=cache)
    assert int(cache.length) == T and (cache.length is length) == (kind is M.StaticCache)
    with pytest.raises((AssertionError, IndexError)):
        cache.update(1, cache.positions(1), *torch.zeros(2, B, 2, 1, 8))


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("what, how", [("mask", "causal"), ("mask", None), ("ids", "causal"), ("ids", None),
                                       ("angle", "causal"), ("rewind", None)])
def test_the_cache_tests_reject_common_mistakes(what, how, kind, monkeypatch):
    rope_cos_sin = M.rope_cos_sin
    rewind = kind.rewind
    if what == "mask":                          # several queries at once attend to all keys
        choose = M.choose_attention
        monkeypatch.setattr(M, "choose_attention", lambda prefix, q, T_k, *rest: choose(
            T_k if len(q) > 1 else prefix, q, T_k, *rest))
    elif what == "angle":                       # every pass starts at angle 0
        monkeypatch.setattr(M, "rope_cos_sin", lambda positions, *rest: rope_cos_sin(positions - positions[0], *rest))
    elif what == "ids":                         # every pass's convolution and n-grams start anew
        monkeypatch.setattr(kind, "append_ids", lambda cache, idx: idx.new_zeros(B, M.CONTEXT_WIDTH - 1))
    else:                                       # one position too many is forgotten
        monkeypatch.setattr(kind, "rewind", lambda cache, n: rewind(cache, n + 1))
    with pytest.raises(AssertionError):
        if how:
            test_cached_decoding_equals_the_full_forward_at_every_length(how, 3, kind)
        else:
            test_a_cache_that_is_rewound_and_written_again_equals_a_fresh_one(kind)


@torch.no_grad()
def replay_decoding(kind, start=2):
    """A CUDA graph of one decoding step, in the form of a recording: only the ids are set before each replay."""
    net = randomized()
    x = ids()
    want_cache = M.Cache(randomized(), B, T)
    cache = kind(net, B, T)
    static_ids = x[:, start:start + 1].clone()
    net(x[:, :start], cache=cache)
    net(x[:, :start], cache=want_cache)
    recording = Recording()
    with recording:
        logits = net.logits(net(static_ids, cache=cache))
    for n in range(start, T):
        if n > start:
            static_ids.copy_(x[:, n:n + 1])
            recording.replay()
        near(logits, net.logits(net(x[:, n:n + 1], cache=want_cache)))


def test_a_recorded_decoding_step_over_a_static_cache_can_be_replayed():
    replay_decoding(M.StaticCache)


def test_a_decoding_step_whose_length_is_a_python_number_cannot_be_replayed():
    with pytest.raises(AssertionError):
        replay_decoding(M.Cache)


# ---- the network

def test_prepacked_weights_give_the_same_states():
    """In bfloat16, where the order of a sum shows in the last bits; in float32 nothing is packed."""
    net = randomized().to(torch.bfloat16)
    same = randomized().to(torch.bfloat16)
    net.dtype = same.dtype = torch.bfloat16
    M.prepack_weights(net)
    layers = [layer for layer in net.modules() if isinstance(layer, M.StackedLinear)]
    packs = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert all((layer.prepacked_weight is not None) == packs for layer in layers)   # older CPUs lack them
    for x in (ids(), ids(shape=(1, 1))):
        a, b = (each.logits(each(x)) for each in (net, same))
        torch.testing.assert_close(a, b, atol=0.1, rtol=0.05)
    assert net.state_dict().keys() == same.state_dict().keys()
    exact = randomized()
    M.prepack_weights(exact)
    assert exact.head.prepacked_weight is None


def test_rope_rotates_pair_i_by_t_over_10000_to_the_2i_over_D():
    x = torch.randn(50, 8, generator=make_rng("x"))
    out = M.apply_rope(x, *M.rope_cos_sin(torch.arange(50), 8, torch.float32))
    for t in (0, 1, 7, 49):
        for i in range(4):
            a = t * 10000 ** (-2 * i / 8)
            turn = complex(x[t, i], x[t, i + 4]) * complex(math.cos(a), math.sin(a))
            assert float(out[t, i]) == pytest.approx(turn.real, abs=1e-4)
            assert float(out[t, i + 4]) == pytest.approx(turn.imag, abs=1e-4)


def test_attn_scale_multiplies_the_logits_of_attention(monkeypatch):
    scores = []

    def attend(q, k, v):
        scores.append(q @ k.mT)
        return v
    monkeypatch.setattr(M, "choose_attention", lambda *args: attend)
    net = randomized(n_layer=1)
    far = torch.arange(T).expand(B, T) * 2
    for net.config.attn_scale in (1.0, 3.0):
        net(ids())
        net(ids(), positions=far)
    near(scores[2], 3 * scores[0])
    near(scores[3], 3 * scores[1])


def test_fresh_weights_predict_every_id_alike_and_the_block_has_no_length_limit():
    torch.manual_seed(0)
    net = M.Transformer(M.ModelConfig(2, 2, 16))
    logits = net.logits(net(ids(shape=(1, 300))))
    assert logits.shape == (1, 300, 512) and logits.dtype == torch.float32
    assert logits.abs().max() == 0
    x = ids(shape=(2, 9))
    context = M.context_ids(x, torch.zeros(2, M.CONTEXT_WIDTH - 1, dtype=torch.long))
    start = M.norm(M.causal_conv(context, net.embed.weight, net.conv_weight))
    assert torch.equal(net(x), M.norm(start)), "every block starts as the identity"


@pytest.mark.parametrize("doc", [None, DOC])
def test_the_context_of_a_position_is_the_last_ids_of_its_document(doc):
    x = ids()
    before = torch.zeros(B, M.CONTEXT_WIDTH - 1, dtype=torch.long)
    context = M.context_ids(x, before, doc)
    for b in range(B):
        for t in range(T):
            for j in range(M.CONTEXT_WIDTH):
                inside = t >= j and (doc is None or doc[b, t - j] == doc[b, t])
                assert context[b, t, j] == (x[b, t - j] if inside else 0)
    if doc is None:                             # in pieces, as over a cache
        rest = M.context_ids(x[:, 6:], x[:, 6 - (M.CONTEXT_WIDTH - 1):6])
        assert torch.equal(rest, context[:, 6:])


def test_the_convolution_adds_the_last_embeddings_weighed_by_channel():
    embedding, weight = (torch.randn(*shape, generator=make_rng(f"{shape}")) for shape in [(9, 6), (M.CONV_WIDTH, 6)])
    context = torch.randint(0, 9, (B, T, M.CONTEXT_WIDTH), generator=make_rng("context"))
    want = torch.zeros(B, T, 6)
    for b in range(B):
        for t in range(T):
            for j in range(M.CONV_WIDTH):
                want[b, t] += weight[j] * embedding[context[b, t, j]]
    near(M.causal_conv(context, embedding, weight), want)                  # more positions than embeddings
    near(M.causal_conv(context[:, :2], embedding, weight), want[:, :2])    # fewer


# ---- n-grams

def signed(x):  # a whole number -> what is left of it in 64 bits
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def row_by_hand(gram, rows):  # the ids of an n-gram, the last one first -> its row of the table
    code = 0
    for i in gram:
        code = signed(code * M.HASH_MULTIPLIER + i + 1)
    return (code ^ (code >> 32)) % rows + M.NGRAMS.index(len(gram)) * rows


def test_ngrams_are_looked_up_as_in_a_dictionary():
    """What stands before the row is EOT; an n-gram with a sentinel or a separator counts as zero, one with a MASK
    does not."""
    net = randomized()
    x = ids()
    x[0, 3] = MASK
    x[1, 5] = SEP
    context = M.context_ids(x, torch.zeros(B, M.CONTEXT_WIDTH - 1, dtype=torch.long))
    got = net.ngrams(context, torch.float32)
    special = 0
    for b in range(B):
        row = [0] * (M.CONTEXT_WIDTH - 1) + x[b].tolist()
        for t in range(T):
            grams = [row[t + M.CONTEXT_WIDTH - n:t + M.CONTEXT_WIDTH][::-1] for n in M.NGRAMS]
            each = [net.ngrams.table[row_by_hand(gram, 64)] * (max(gram) <= MASK) for gram in grams]
            special += sum(max(gram) > MASK for gram in grams)
            near(got[b, t], torch.cat(each) @ net.ngrams.proj.weight[0].T)
    assert M.NGRAM_IDS == MASK + 1 and 0 < special < B * T * len(M.NGRAMS)


def test_ngrams_spread_evenly_over_their_rows():
    """Of 20,000 different n-grams of each length, in 4,096 rows: as uneven as chance has it, text or not."""
    text = torch.tensor([*open(M.__file__, "rb").read()])
    for x in (torch.randint(0, 512, (40_000,), generator=make_rng("spread")), text):
        grams = torch.unique(x.unfold(0, M.CONTEXT_WIDTH, 1), dim=0)[None, :20_000].flip(2)
        for i, rows in enumerate(M.hash_ngrams(grams, 4096)[0].T):
            assert rows.min() >= i * 4096 and rows.max() < (i + 1) * 4096
            different = len(torch.unique(grams[0, :, :M.NGRAMS[i]], dim=0))
            used = len(rows.unique())
            expected = 4096 * (1 - (1 - 1 / 4096) ** different)
            assert abs(used - expected) < 0.05 * 4096


def test_ngrams_change_nothing_before_they_are_trained_and_can_be_left_out():
    torch.manual_seed(0)
    net = M.Transformer(M.ModelConfig(2, 2, 16, ngram_rows=64))
    torch.manual_seed(0)
    plain = M.Transformer(M.ModelConfig(2, 2, 16))
    assert plain.ngrams is None
    weights = dict(net.named_parameters())
    for name, p in plain.named_parameters():
        assert torch.equal(p, weights[name]), name
        p.data.copy_(weights[name].data.normal_(0, 0.3))
    assert torch.equal(net(ids()), plain(ids()))


def test_the_squared_relu_has_the_gradient_of_its_parts():
    x = torch.randn(50, generator=make_rng("x"), dtype=torch.double, requires_grad=True)
    weight = torch.randn(50, generator=make_rng("weight"), dtype=torch.double)
    got = torch.autograd.grad((M.SquaredReLU.apply(x) * weight).sum(), x)
    near(got[0], torch.autograd.grad((F.relu(x).square() * weight).sum(), x)[0])
    assert torch.equal(M.SquaredReLU.apply(x), F.relu(x).square())


def test_every_block_adds_the_ngrams_times_its_gain():
    net = randomized()
    x = ids()
    seen = []
    for block in net.blocks:
        block.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    net(x)
    context = M.context_ids(x, torch.zeros(B, M.CONTEXT_WIDTH - 1, dtype=torch.long))
    e = net.ngrams(context, torch.float32)
    before = M.norm(M.causal_conv(context, net.embed.weight, net.conv_weight) + e)
    for (taken, out), gain in zip(seen, net.ngrams.gain):
        near(taken, before + M.norm(e) * gain)
        before = out


def test_lookups_are_scaled_and_their_gradients_are_those_of_the_table():
    net = randomized().double()
    x = ids()
    x[0, 3] = SEP                               # n-grams with it have no gradient
    context = M.context_ids(x, torch.zeros(B, M.CONTEXT_WIDTH - 1, dtype=torch.long))
    scale = torch.rand(B, T, len(M.NGRAMS), generator=make_rng("scale"), dtype=torch.double).round() * 2
    delta = torch.zeros(*scale.shape, M.NGRAM_DIM, dtype=torch.double, requires_grad=True)
    lookups = M.NgramLookups(scale, torch.zeros_like(scale, dtype=torch.long), delta)
    direction = torch.randn(B, T, 16, generator=make_rng("direction"), dtype=torch.double)
    (net.ngrams(context, torch.double, lookups) * direction).sum().backward()
    assert torch.equal(lookups.row, M.hash_ngrams(context, 64))

    table = net.ngrams.table.requires_grad_()
    clean = torch.stack([context[..., :n].amax(2) < M.NGRAM_IDS for n in M.NGRAMS], dim=2)
    taken = table[lookups.row] * (scale * clean)[..., None]                         # (B, T, N, NGRAM_DIM)
    (net.ngrams.proj(taken.flatten(2)) * direction).sum().backward()
    near(torch.zeros_like(table).index_add(0, lookups.row.flatten(), delta.grad.flatten(0, 2)), table.grad)
    assert (delta.grad.any(-1) == (scale * clean > 0)).all()


def test_positions_rotate_queries_and_keys_but_leave_the_mask_as_it_is():
    net = randomized()
    x = ids()
    positions = torch.arange(T).expand(B, T)
    near(net(x, positions=positions), net(x))
    near(net(x, positions=positions + 50), net(x))              # distance alone counts
    far = positions + 9 * (positions > 3)
    moved = net(x, positions=far)
    near(moved[:, :4], net(x)[:, :4])
    assert (moved[:, 4:] - net(x)[:, 4:]).abs().amax(-1).min() > 1e-3
    for kind in CACHES:                         # over a cache, where the mask still counts ids
        cache = kind(net, B, T)
        parts = [net(x[:, a:b], cache=cache, positions=far[:, a:b]) for a, b in [(0, 3), (3, 6), (6, T)]]
        near(torch.cat(parts, 1), moved)


def test_bfloat16_activations_stay_near_float32():
    exact = randomized()
    rounded = randomized(dtype=torch.bfloat16)
    a, b = (F.log_softmax(net.logits(net(ids())), -1) for net in (exact, rounded))
    assert b.dtype == torch.float32 and 0 < (a - b).abs().mean() < 0.2
    kept = []
    rounded.blocks[0].register_forward_hook(lambda module, args, out: kept.extend((args[0].dtype, out.dtype)))
    rounded(ids())
    assert kept == [torch.bfloat16, torch.bfloat16]


def test_the_convolution_starts_with_small_weights_of_the_bytes_before():
    weight = M.Transformer(M.ModelConfig(1, 2, 512)).conv_weight
    assert (weight[0] == 1).all()
    assert abs(float(weight[1:].detach().std()) - 0.3) < 0.03
