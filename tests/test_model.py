import math
import os

import pytest
import torch
import torch.nn.functional as F
from conftest import randomized

import model as M
from data import generator

T, B = 8, 2
MASKS = {"causal": "causal", "bidirectional": "bidirectional", "prefix 0": torch.tensor([0, 0]), "prefix T": torch.tensor([T, T]),
         "prefix 3, 5": torch.tensor([3, 5])}


def rule(mask, b, q, k):  # the rule in plain words: who may be seen
    if isinstance(mask, str):
        return mask == "bidirectional" or k <= q
    return k <= q or k < int(mask[b])


def ids(seed=0, shape=(B, T)):
    return torch.randint(0, 512, shape, generator=generator(f"ids {seed}"))


def dependence(net, x, mask, doc=None):  # -> (B, T, B, T): size of d logits[b, q] / d embedding[b', k]
    taken = []
    hook = net.embed.register_forward_hook(lambda module, args, out: taken.append(out))
    logits = net.logits(net(x, mask, doc))
    hook.remove()
    direction = torch.randn(512, generator=generator("direction"))
    out = torch.stack([torch.autograd.grad((logits[b, q] * direction).sum(), taken[0], retain_graph=True)[0].abs().amax(-1)
                       for b in range(x.size(0)) for q in range(x.size(1))])
    return out.view(*x.shape, *x.shape)


def check_leaks(net, mask):
    size = dependence(net, ids(), mask)
    for b in range(B):
        for q in range(T):
            for k in range(T):
                assert (size[b, q, b, k] > 0) == rule(mask, b, q, k), (b, q, k)
                assert size[b, q, 1 - b, k] == 0, "rows see each other"


@pytest.mark.parametrize("attend", [M.attend_plain, M.attend_fused], ids=["plain", "fused"])
@pytest.mark.parametrize("name", MASKS)
def test_gradients_flow_exactly_where_the_rule_allows(name, attend, monkeypatch):
    monkeypatch.setattr(M, "attend", attend)
    check_leaks(randomized(), MASKS[name])


BROKEN_RULES = {"sees one too far": lambda q, k, prefix, *doc: (k <= q + 1) | (k < prefix),
                "prefix one too long": lambda q, k, prefix, *doc: (k <= q) | (k <= prefix),
                "suffix blind to itself": lambda q, k, prefix, *doc: (k == q) | (k < prefix),
                "prefix ignored": lambda q, k, prefix, *doc: (k <= q) | (prefix < 0)}


@pytest.mark.parametrize("name", BROKEN_RULES)
def test_the_leak_test_rejects_broken_rules(name, monkeypatch):
    monkeypatch.setattr(M, "allow", BROKEN_RULES[name])
    with pytest.raises(AssertionError):
        check_leaks(randomized(), MASKS["prefix 3, 5"])


@pytest.mark.parametrize("told, done", [("causal", "bidirectional"), ("bidirectional", "causal")])
def test_the_leak_test_rejects_broken_fast_paths(told, done, monkeypatch):
    attend = M.attend
    monkeypatch.setattr(M, "attend", lambda q, k, v, seen: attend(q, k, v, done))
    with pytest.raises(AssertionError):
        check_leaks(randomized(), told)


def test_the_leak_test_cannot_see_anything_at_zero_init():
    """Why every test here randomises: fresh weights mix no positions, so that any mask would pass."""
    torch.manual_seed(0)
    fresh = M.Transformer(M.Sizes(2, 2, 16))
    assert dependence(fresh, ids(), "bidirectional").max() == 0


@pytest.mark.parametrize("name, prefix", [("causal", 0), ("bidirectional", T)])
def test_prefix_0_is_causal_and_prefix_T_is_bidirectional(name, prefix):
    net = randomized()
    h, same = net(ids(), name), net(ids(), torch.full((B,), prefix))
    torch.testing.assert_close(h, same)
    other = net(ids(), torch.full((B,), T // 2))
    assert (h - other).abs().max() > 1e-2


@pytest.mark.parametrize("name", MASKS)
def test_the_attention_paths_agree_with_loops(name):
    g = generator("qkv")
    q, k, v = (torch.randn(B, 2, T, 4, generator=g, requires_grad=True) for _ in range(3))
    seen = M.resolve_mask(MASKS[name], B, torch.arange(T), T, 4)
    want = torch.zeros(B, 2, T, 4)
    for b in range(B):
        for h in range(2):
            for i in range(T):
                keys = [j for j in range(T) if rule(MASKS[name], b, i, j)]
                p = torch.softmax(torch.stack([q[b, h, i] @ k[b, h, j] / 2 for j in keys]), 0)      # 2 = sqrt(D)
                want[b, h, i] = sum(w * v[b, h, j] for w, j in zip(p, keys))
    grads = []
    for attend in (M.attend_plain, M.attend_fused):
        y = attend(q, k, v, seen)
        torch.testing.assert_close(y, want, atol=1e-5, rtol=1e-5)
        grads.append(torch.autograd.grad((y * v.detach().cos()).sum(), (q, k, v)))
    for plain, fused in zip(*grads):
        torch.testing.assert_close(plain, fused, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("doc", [None, torch.arange(T).ge(5).long().expand(B, T)], ids=["one document", "two documents"])
def test_the_block_mask_of_cuda_is_the_same_rule(doc):
    """FlexAttention runs on the CPU without gradients; the mask is built as for CUDA."""
    q, k, v = (torch.randn(B, 2, T, 16, generator=generator("flex")) for _ in range(3))
    prefix = MASKS["prefix 3, 5"]
    with torch.no_grad():
        flex = M.attend_fused(q, k, v, M.block_mask(prefix, T, doc))
    torch.testing.assert_close(flex, M.attend_plain(q, k, v, M.dense_mask(prefix, torch.arange(T), T, doc)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mask", ["causal", "bidirectional", "prefix 3, 5"])
def test_documents_do_not_see_each_other(mask):
    doc = torch.tensor([[0] * 3 + [1] * 5, [0] * 6 + [1] * 2])
    size = dependence(randomized(), ids(), MASKS[mask], doc)
    for b in range(B):
        for q in range(T):
            for k in range(T):
                assert (size[b, q, b, k] > 0) == (bool(doc[b, q] == doc[b, k]) and rule(MASKS[mask], b, q, k)), (b, q, k)


def test_packed_weights_give_the_same_states():
    """In bfloat16, where the order of a sum shows in the last bits; in float32 nothing is packed."""
    net, same = randomized().to(torch.bfloat16), randomized().to(torch.bfloat16)
    net.dtype = same.dtype = torch.bfloat16
    M.pack_weights(net)
    assert all(layer.packed is not None for layer in net.modules() if isinstance(layer, M.Linear)) or not torch.backends.mkldnn.is_available()
    for shape in ((B, T), (1, 1)):
        torch.testing.assert_close(net.logits(net(ids(shape=shape), "causal")), same.logits(same(ids(shape=shape), "causal")), atol=0.1, rtol=0.05)
    assert net.state_dict().keys() == same.state_dict().keys()
    exact = randomized()
    M.pack_weights(exact)
    assert exact.head.packed is None


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("start", range(1, T + 1))
@pytest.mark.parametrize("mask", ["causal", "prefix"])
def test_cached_decoding_equals_the_full_forward_at_every_length(mask, start, static):
    net, x = randomized().requires_grad_(False), ids()
    prefix = torch.full((B,), start)
    cache = M.new_cache(net, B, T, static)
    first = net(x[:, :start], prefix if mask == "prefix" else "causal", cache=cache)
    for n in range(start, T + 1):
        full = net(x[:, :n], prefix if mask == "prefix" else "causal")
        torch.testing.assert_close(first[:, -1], full[:, -1], atol=1e-5, rtol=1e-4)
        if n < T:
            first = net(x[:, n:n + 1], "causal", cache=cache)


def test_several_bytes_at_once_may_follow_a_cache_and_be_taken_back():
    net, x = randomized(), ids()
    full = net(x, "causal")
    cache = M.new_cache(net, B, T)
    net(x[:, :3], "causal", cache=cache)
    net(ids(1)[:, :4], "causal", cache=cache)                       # a draft that is rejected
    cache["length"] = 3
    torch.testing.assert_close(net(x[:, 3:], "causal", cache=cache), full[:, 3:], atol=1e-5, rtol=1e-4)


def other_mask(monkeypatch, wrong):  # the model resolves every mask as another one
    resolve = M.resolve_mask
    monkeypatch.setattr(M, "resolve_mask", lambda mask, B, q, *rest: resolve(wrong if len(q) > 1 else mask, B, q, *rest))


@pytest.mark.parametrize("test, wrong", [
    (lambda: test_cached_decoding_equals_the_full_forward_at_every_length("causal", 3, True), "bidirectional"),
    (lambda: test_cached_decoding_equals_the_full_forward_at_every_length("prefix", 3, False), "bidirectional"),
    (lambda: test_several_bytes_at_once_may_follow_a_cache_and_be_taken_back(), "bidirectional")])
def test_the_cache_tests_reject_a_broken_mask(test, wrong, monkeypatch):
    other_mask(monkeypatch, wrong)
    with pytest.raises(AssertionError):
        test()


@pytest.mark.parametrize("name, prefix", [("causal", 0), ("bidirectional", T)])
def test_the_prefix_equalities_reject_a_broken_rule(name, prefix, monkeypatch):
    monkeypatch.setattr(M, "allow", BROKEN_RULES["sees one too far" if name == "causal" else "prefix ignored"])
    with pytest.raises(AssertionError):
        test_prefix_0_is_causal_and_prefix_T_is_bidirectional(name, prefix)


@pytest.mark.parametrize("rule", BROKEN_RULES)
def test_the_loops_reject_broken_rules(rule, monkeypatch):
    monkeypatch.setattr(M, "allow", BROKEN_RULES[rule])
    with pytest.raises(AssertionError):
        test_the_attention_paths_agree_with_loops("prefix 3, 5")


def test_a_cache_with_a_broken_offset_is_noticed(monkeypatch):
    rotations = M.rotations
    monkeypatch.setattr(M, "rotations", lambda at, *rest: rotations(at - at[0], *rest))
    with pytest.raises(AssertionError):
        test_cached_decoding_equals_the_full_forward_at_every_length("causal", 2, False)


def test_rope_turns_pair_i_by_t_over_10000_to_the_2i_over_D():
    cos, sin = M.rotations(torch.arange(50), 8, torch.float32)
    x = torch.randn(50, 8, generator=generator("x"))
    out = M.rotate(x, cos, sin)
    for t in (0, 1, 7, 49):
        for i in range(4):
            turn = complex(x[t, i], x[t, i + 4]) * complex(math.cos(a := t * 10000 ** (-2 * i / 8)), math.sin(a))
            assert (float(out[t, i]), float(out[t, i + 4])) == pytest.approx((turn.real, turn.imag), abs=1e-4)


def test_a_cache_is_dynamic_unless_it_is_asked_to_be_static():
    net = randomized()
    assert M.new_cache(net, 1, 4)["length"] == 0 and isinstance(M.new_cache(net, 1, 4)["length"], int)
    assert isinstance(M.new_cache(net, 1, 4, static=True)["length"], torch.Tensor)


def test_rope_scores_depend_on_distance_alone():
    q, k = (torch.randn(1, 1, 1, 8, generator=generator(s)) for s in "qk")
    def score(i, j):
        return float((M.rotate(q, *M.rotations(torch.tensor([i]), 8, torch.float32)) * M.rotate(k, *M.rotations(torch.tensor([j]), 8, torch.float32))).sum())
    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4) != pytest.approx(score(9, 5), abs=1e-2)


def test_the_readme_shows_the_rule():
    with open(os.path.join(os.path.dirname(M.__file__), "README.md"), encoding="utf-8") as f:
        readme = f.read()
    grids = [[" ".join("■" if seen else "·" for seen in row) for row in M.dense_mask(torch.tensor([p]), torch.arange(T), T)[0, 0].tolist()]
             for p in (0, 3, T)]
    for rows in zip(*grids):
        assert (" " * 8).join(rows) in readme


def test_fresh_weights_predict_every_id_alike_and_the_block_has_no_length_limit():
    torch.manual_seed(0)
    net = M.Transformer(M.Sizes(2, 2, 16))
    logits = net.logits(net(ids(shape=(1, 300)), "causal"))
    assert logits.shape == (1, 300, 512) and logits.abs().max() == 0 and logits.dtype == torch.float32
    x = ids(shape=(2, 9))
    assert torch.equal(net(x, "causal"), M.norm(M.norm(net.embed(x)))), "every block starts as the identity"


def test_bfloat16_activations_stay_near_float32():
    exact, rounded = randomized(), randomized(dtype=torch.bfloat16)
    a, b = (F.log_softmax(net.logits(net(ids(), "causal")), -1) for net in (exact, rounded))
    assert b.dtype == torch.float32 and 0 < (a - b).abs().mean() < 0.2
    kept = []
    rounded.blocks[0].register_forward_hook(lambda module, args, out: kept.extend((args[0].dtype, out.dtype)))
    rounded(ids(), "causal")
    assert kept == [torch.bfloat16, torch.bfloat16]
