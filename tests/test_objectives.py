"""Every objective of the table is put through the generic tests; a new entry is tested by being there."""
import itertools
import math
import os
import re

import pytest
import torch
import torch.nn.functional as F
from conftest import clean_windows, randomize, randomized, settings
from torch.utils._python_dispatch import TorchDispatchMode

import objectives as O
from data import CLS, EOT, MASK, MID, MODE_R, MODE_S, MODE_X, PAD, PRE, SENTINEL, SEP, SUF, generator
from model import Sizes, Transformer
from objectives import IGNORE, OBJECTIVES

T = 48
every = pytest.mark.parametrize("name", OBJECTIVES)


def make(name, B=4, T=T, seed=0, **changes):  # -> x, batch, hp
    hp = settings(name, T, **changes)
    x = clean_windows(name, B, T, hp, seed)
    return x, OBJECTIVES[name]["make"](x, generator(f"corruption {seed}"), hp), hp


def same(a, b):
    return a.keys() == b.keys() and all(a[k] == b[k] if isinstance(a[k], str) else torch.equal(a[k], b[k]) for k in a)


def rows(batch, a, b):
    return {k: v if isinstance(v, str) else v[a:b] for k, v in batch.items()}


def heads_of(name, hp, seed=1):
    torch.manual_seed(0)
    return {k: randomize(h, seed) for k, h in OBJECTIVES[name]["heads"](Sizes(2, 2, 16), hp).items()}


def total(terms):
    return sum(c * s / n for s, n, c in terms.values())


# ---- generic

def check_purity(make, name, hp):
    x = clean_windows(name, 4, T, hp)
    kept = x.clone()
    batch = [make(x, generator(key), hp) for key in "aab"]
    assert torch.equal(x, kept), "the caller's windows were changed"
    assert same(batch[0], batch[1])
    assert name in ("clm", "mtp") or not same(batch[0], batch[2])


@every
def test_a_batch_is_a_function_of_its_generator(name):
    check_purity(OBJECTIVES[name]["make"], name, settings(name, T))


@every
def test_what_is_used_like_another_needs_no_head_that_it_lacks(name):
    like = OBJECTIVES[name].get("like")
    assert like is None or like in OBJECTIVES and "like" not in OBJECTIVES[like] and not heads_of(like, settings(like, T))


@pytest.mark.parametrize("name, T, changes", [
    ("prefix", 32, dict(prefix_min=0.9, prefix_max=0.1)), ("span", 4, {}), ("span", 64, dict(span_rate=0.9)), ("span", 3000, dict(span_mean=1.0)),
    ("ul2", 32, dict(ul2_weights="Q:1")), ("ul2", 32, dict(ul2_weights="R:99,S:1")), ("fim", 3, {}), ("bart", 16, {}), ("bart", 64, dict(bart_noise="mask,mask")),
    ("bart", 64, dict(bart_noise="hide")), ("nsp", 6, {}), ("nsp", 32, dict(batch_size=1)), ("nsp", 32, dict(nsp_negatives="none")),
    ("contrastive", 32, dict(crop=1.0)), ("contrastive", 32, dict(batch_size=1)), ("hybrid", 32, dict(hybrid_ratio=0.01)), ("hybrid", 32, dict(mask_rate=1.0))])
def test_rows_that_cannot_be_are_refused_in_one_line(name, T, changes, capsys):
    with pytest.raises(SystemExit) as e:
        OBJECTIVES[name]["window"](T, settings(name, T, **changes))
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and "Try" in err


def test_masking_in_place_would_be_noticed():
    def in_place(x, g, hp):                     # the seeds write the masks into the caller's tensor
        batch = O.mlm(x, g, hp)
        x.copy_(batch["inp"])
        return batch
    with pytest.raises(AssertionError, match="caller"):
        check_purity(in_place, "mlm", settings("mlm", T))


@every
def test_batches_have_constant_shapes_valid_ids_and_rows_first(name):
    _, first, _ = make(name)
    for seed in range(1, 20):
        _, batch, _ = make(name, seed=seed)
        assert {k: v if isinstance(v, str) else (v.shape, v.dtype) for k, v in batch.items()} == \
               {k: v if isinstance(v, str) else (v.shape, v.dtype) for k, v in first.items()}
        assert all(isinstance(v, str) or v.size(0) == 4 for v in batch.values())
        assert batch["inp"].min() >= 0 and batch["inp"].max() < 512
        if "tgt" in batch:
            assert batch["inp"].shape == batch["tgt"].shape == (4, T)
            assert ((batch["tgt"] == IGNORE) | ((batch["tgt"] >= 0) & (batch["tgt"] < 512))).all()
            assert (batch["tgt"] != IGNORE).any(1).all(), "a row without a target"


class Watch(TorchDispatchMode):
    """Counts operations and refuses those that wait for the device or whose result has a data-dependent shape."""
    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "lift_fresh")   # the last: a list from the host

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        op = func.overloadpacket.__name__
        assert op not in self.REFUSED, f"{op} waits for the device"
        if op in ("index", "index_put", "index_put_"):
            assert all(i is None or i.dtype not in (torch.bool, torch.uint8) for i in args[1]), f"{op} with a boolean index"
        self.count += 1
        return func(*args, **(kwargs or {}))


@every
def test_make_never_waits_for_the_device_nor_loops_over_rows(name):
    counts = []
    for B in (4, 16):
        hp = settings(name, T, batch_size=B)
        x = clean_windows(name, B, T, hp)
        with Watch() as watch:
            OBJECTIVES[name]["make"](x, generator("w"), hp)
        counts.append(watch.count)
    assert counts[0] == counts[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@every
def test_make_never_synchronises_on_cuda(name):
    hp = settings(name, T)
    x, g = clean_windows(name, 4, T, hp).cuda(), generator("w", "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        OBJECTIVES[name]["make"](x, g, hp)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_watch_sees_what_it_refuses():
    x = torch.arange(8)
    for bad in (lambda: torch.tensor([1, 2]), lambda: x[x > 3], lambda: x.sum().item(), lambda: x.nonzero(), lambda: x.masked_select(x > 3)):
        with pytest.raises(AssertionError), Watch():
            bad()


@every
def test_micro_batches_add_up_to_the_batch(name):
    if name == "contrastive":
        pytest.skip("compares the rows of a micro-batch with each other, as its docstring says")
    _, batch, hp = make(name, B=8)
    net, heads, entry = randomized(), heads_of(name, hp), OBJECTIVES[name]
    whole = entry["loss"](net, heads, batch, hp)
    parts = [entry["loss"](net, heads, rows(batch, i, i + 2), hp) for i in range(0, 8, 2)]
    known = entry["counts"](batch, hp)
    assert known.keys() == whole.keys()
    for term, (s, n, _) in whole.items():
        assert float(n) == float(known[term]) == sum(float(p[term][1]) for p in parts), "counts must be known before the forward pass"
        torch.testing.assert_close(s, sum(p[term][0] for p in parts), rtol=1e-5, atol=1e-3)


@every
def test_an_untrained_model_scores_ln_V_per_target(name):
    _, batch, hp = make(name)
    torch.manual_seed(0)
    terms = OBJECTIVES[name]["loss"](Transformer(Sizes(2, 2, 16)), heads_of(name, hp), batch, hp)
    if "nll" in terms:
        assert float(terms["nll"][0].detach() / terms["nll"][1]) == pytest.approx(math.log(512), abs=1e-5)


@every
def test_the_loss_equals_loops(name):
    _, batch, hp = make(name, B=2, T=24)
    if OBJECTIVES[name]["loss"] is not O.token_loss:
        pytest.skip("has a loss, and so a test, of its own")
    net = randomized()
    p = net.logits(net(batch["inp"], batch["mask"])).detach().double().softmax(-1)
    want = sum(-math.log(float(p[b, t, batch["tgt"][b, t]])) for b in range(2) for t in range(24) if batch["tgt"][b, t] != IGNORE)
    assert float(O.token_loss(net, {}, batch, hp)["nll"][0].detach()) == pytest.approx(want, rel=1e-5)


@every
def test_positions_without_a_target_have_no_effect(name):
    _, batch, hp = make(name)
    if OBJECTIVES[name]["loss"] is not O.token_loss:
        pytest.skip("has a loss, and so a test, of its own")
    net = randomized()
    logits = net.logits(net(batch["inp"], batch["mask"])).requires_grad_()
    net.logits = lambda h: logits
    grad, = torch.autograd.grad(O.token_loss(net, {}, batch, hp)["nll"][0], logits)
    assert torch.equal(grad.abs().amax(-1) > 0, batch["tgt"] != IGNORE)


@every
def test_no_target_stands_where_the_mask_shows_it(name):
    """Where a row is read to the left alone, position i predicts id i + 1, which must lie behind the prefix."""
    for seed in range(10):
        _, batch, _ = make(name, seed=seed)
        if "tgt" not in batch or batch["mask"] == "bidirectional":
            return
        P = torch.zeros(4, dtype=torch.long) if isinstance(batch["mask"], str) else batch["mask"]
        at, target = torch.arange(T), batch["tgt"] != IGNORE
        rows = P < T
        assert not (target & (at < P[:, None] - 1))[rows].any(), "a target is inside the prefix"
        told = target[rows, :-1]
        assert torch.equal(batch["tgt"][rows, :-1][told], batch["inp"][rows, 1:][told])


@every
def test_one_batch_can_be_learned_by_heart(name):
    _, batch, hp = make(name, B=4, T=32, gen_scale=1.0, electra_weight=1.0)
    torch.manual_seed(1)
    net = Transformer(Sizes(2, 4, 64))
    heads = torch.nn.ModuleDict(OBJECTIVES[name]["heads"](net.sizes, hp))
    opt = torch.optim.AdamW([*net.parameters(), *heads.parameters()], lr=6e-3, weight_decay=0.0)
    for _ in range(200):
        loss = total(OBJECTIVES[name]["loss"](net, heads, batch, hp))
        opt.zero_grad()
        loss.backward()
        opt.step()
    assert float(loss.detach()) < 0.1


def test_the_readmes_objective_passes_the_generic_tests(monkeypatch):
    with open(os.path.join(os.path.dirname(O.__file__), "README.md"), encoding="utf-8") as f:
        functions, entry = re.findall(r"```python\n(.*?)```", f.read(), re.DOTALL)
    scope = dict(vars(O))
    exec(functions, scope)
    [(name, entry)] = eval("{" + entry + "}", scope).items()
    monkeypatch.setitem(OBJECTIVES, name, entry)
    assert entry["like"] in OBJECTIVES
    for test in (test_a_batch_is_a_function_of_its_generator, test_batches_have_constant_shapes_valid_ids_and_rows_first,
                 test_make_never_waits_for_the_device_nor_loops_over_rows, test_micro_batches_add_up_to_the_batch,
                 test_an_untrained_model_scores_ln_V_per_target, test_the_loss_equals_loops, test_one_batch_can_be_learned_by_heart):
        test(name)


# ---- clm

def check_clm(x, batch):
    assert torch.equal(batch["inp"], x[:, :-1]) and torch.equal(batch["tgt"], x[:, 1:]) and batch["mask"] == "causal"


def test_clm_shifts_once():
    x, batch, _ = make("clm")
    check_clm(x, batch)
    twice = dict(batch, inp=batch["inp"][:, :-1], tgt=batch["tgt"][:, 1:])          # the seeds: labels "already shifted", shifted again
    with pytest.raises(AssertionError):
        check_clm(x, twice)


# ---- mlm

def check_mlm(x, batch, k):
    chosen = batch["tgt"] != IGNORE
    assert (chosen.sum(1) == k).all()
    assert torch.equal(batch["tgt"][chosen], x[chosen])
    assert torch.equal(batch["inp"][~chosen], x[~chosen])
    changed = batch["inp"][chosen]
    assert ((changed == MASK) | ((changed >= 1) & (changed < 256))).all(), "a random byte is a special id"
    n = len(changed)
    for share, seen in ((0.8, changed == MASK), (0.1 + 0.1 / 255, changed == x[chosen])):
        assert abs(float(seen.float().mean()) - share) < 5 * (share * (1 - share) / n) ** 0.5


@pytest.mark.parametrize("rate", [0.15, 0.4])
def test_mlm_masks_exact_counts_80_10_10(rate):
    x, batch, _ = make("mlm", B=2000, mask_rate=rate)
    check_mlm(x, batch, round(rate * T))


@pytest.mark.parametrize("rate, k", [(0.001, 1), (1.0, T), (0.5, T // 2)])
def test_mlm_rates_at_their_ends(rate, k):
    _, batch, _ = make("mlm", mask_rate=rate)
    assert ((batch["tgt"] != IGNORE).sum(1) == k).all()


def test_mlm_chooses_all_positions_alike():
    _, batch, _ = make("mlm", B=20000)
    share = (batch["tgt"] != IGNORE).float().mean(0)
    p = round(0.15 * T) / T
    assert ((share - p).abs() < 5 * (p * (1 - p) / 20000) ** 0.5).all()           # 48 looks at 5 sigma: 3 in 100,000


def test_mlm_hides_what_it_asks_for():
    """Change a byte that is masked: what the model sees stays as it was."""
    x, batch, hp = make("mlm")
    hidden = batch["inp"] == MASK
    again = OBJECTIVES["mlm"]["make"](torch.where(hidden, x % 255 + 1, x), generator("corruption 0"), hp)
    assert torch.equal(again["inp"], batch["inp"]) and not torch.equal(again["tgt"], batch["tgt"])


def seed_mlm_bernoulli(x):  # the seeds: each position by itself, random ids from the whole vocabulary
    chosen = torch.rand(x.shape, generator=generator("s")) < 0.15
    u = torch.rand(x.shape, generator=generator("u"))
    noise = torch.where(u < 0.8, MASK, torch.where(u < 0.9, torch.randint(0, 512, x.shape, generator=generator("v")), x))
    return dict(inp=torch.where(chosen, noise, x), tgt=torch.where(chosen, x, IGNORE))


def seed_mlm_all_masks(x):  # a simplification often seen: every chosen byte becomes MASK
    batch = O.mlm(x, generator("m"), settings("mlm", T))
    return dict(batch, inp=torch.where(batch["tgt"] != IGNORE, MASK, x))


def seed_mlm_special_ids(x):  # random ids from the whole vocabulary
    batch = O.mlm(x, generator("m"), settings("mlm", T))
    random = (batch["inp"] != x) & (batch["inp"] != MASK)
    return dict(batch, inp=torch.where(random, torch.randint(1, 512, x.shape, generator=generator("v")), batch["inp"]))


@pytest.mark.parametrize("wrong", [seed_mlm_bernoulli, seed_mlm_all_masks, seed_mlm_special_ids])
def test_the_checks_of_mlm_reject_known_mistakes(wrong):
    x = clean_windows("mlm", 2000, T, settings("mlm", T))
    with pytest.raises(AssertionError):
        check_mlm(x, wrong(x), round(0.15 * T))


# ---- prefix

def test_prefix_has_loss_on_the_suffix_alone():
    x, batch, _ = make("prefix", B=500)
    at = torch.arange(T)
    assert torch.equal(batch["tgt"] != IGNORE, at >= batch["mask"][:, None] - 1)
    assert torch.equal(batch["tgt"][batch["tgt"] != IGNORE], x[:, 1:][batch["tgt"] != IGNORE])
    assert batch["mask"].min() == 1 and batch["mask"].max() == T - 1
    assert abs(float(batch["mask"].float().mean()) - T / 2) < 5 * T / 12 ** 0.5 / 500 ** 0.5


def test_prefix_range_is_a_share_of_the_block():
    _, batch, _ = make("prefix", B=500, prefix_min=0.25, prefix_max=0.75)
    assert (int(batch["mask"].min()), int(batch["mask"].max())) == (T // 4, 3 * T // 4)


def test_prefix_1_is_clm():
    net = randomized()
    x, batch, hp = make("prefix", prefix_max=0.0)
    assert (batch["mask"] == 1).all()
    plain = O.token_loss(net, {}, O.clm(x, None, hp), hp)["nll"]
    prefix = O.token_loss(net, {}, batch, hp)["nll"]
    assert float(prefix[1]) == float(plain[1])
    torch.testing.assert_close(prefix[0], plain[0])


def test_a_prefix_position_with_loss_would_see_its_answer():
    """The leak that the targets avoid: the last of the prefix, P - 1, may not see byte P; the one before sees its own."""
    net = randomized()
    x, batch, _ = make("prefix", B=1, T=16, prefix_min=0.5, prefix_max=0.5)
    taken = []
    net.embed.register_forward_hook(lambda module, args, out: taken.append(out))
    logits = net.logits(net(batch["inp"], batch["mask"]))
    reach = lambda q, k: float(torch.autograd.grad(logits[0, q, :7].sum(), taken[0], retain_graph=True)[0][0, k].abs().max())
    assert int(batch["mask"]) == 8 and batch["tgt"][0, 6] == IGNORE and batch["tgt"][0, 7] == x[0, 8]
    assert reach(6, 7) > 0 and reach(7, 8) == 0


# ---- building blocks

def test_pack_moves_what_is_kept_to_the_left():
    ids, keep = torch.randint(0, 512, (50, 9), generator=generator("p")), torch.rand(50, 9, generator=generator("k")) < 0.6
    for T in (9, 4, 12):
        out = O.pack(ids, keep, T)
        for row, i, k in zip(out.tolist(), ids.tolist(), keep.tolist()):
            kept = [a for a, b in zip(i, k) if b]
            assert row == (kept + [PAD] * T)[:T]


def test_all_compositions_are_equally_likely():
    parts = O.compose(12000, 6, 3, generator("c"))
    assert (parts.sum(1) == 6).all() and parts.min() >= 1
    counts = torch.tensor([int((parts == torch.tensor(c)).all(1).sum()) for c in itertools.product(range(1, 5), repeat=3) if sum(c) == 6])
    assert len(counts) == 10 and counts.sum() == 12000
    assert float(((counts - 1200.0) ** 2 / 1200).sum()) < 40                        # 9 degrees of freedom: 1 in 100,000


def test_seq2seq_is_one_prefix_row():
    source, target = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[7, 8], [9, 10]])
    batch = O.seq2seq(source, torch.tensor([[True, False, True], [True, True, True]]), target, torch.tensor([[True, True], [True, False]]), 8, mode=MODE_R)
    x = IGNORE
    assert batch["inp"].tolist() == [[MODE_R, 1, 3, SEP, 7, 8, EOT, PAD], [MODE_R, 4, 5, 6, SEP, 9, EOT, PAD]]
    assert batch["tgt"].tolist() == [[x, x, x, 7, 8, EOT, x, x], [x, x, x, x, 9, EOT, x, x]]
    assert batch["mask"].tolist() == [4, 5]


# ---- span

def parts(batch, b):  # one seq2seq row -> source ids, target ids without EOT
    z = batch["inp"][b].tolist()
    P = int(batch["mask"][b])
    assert z[P - 1] == SEP and SEP not in z[:P - 1]
    tgt = [t for t in batch["tgt"][b].tolist() if t != IGNORE]
    assert tgt[-1] == EOT and tgt[:-1] == z[P:P + len(tgt) - 1] and set(z[P + len(tgt):]) <= {PAD}
    assert batch["tgt"][b].tolist().index(tgt[0]) >= 0 and batch["tgt"][b, P - 1] == tgt[0] and (batch["tgt"][b, :P - 1] == IGNORE).all()
    return z[:P - 1], tgt[:-1]


def spliced(source, target):  # sentinels of the source replaced by their spans -> bytes, span lengths
    spans = {}
    for t in target:
        if t >= SENTINEL:
            assert t == SENTINEL + len(spans), "sentinels must ascend"
            spans[t] = []
        else:
            spans[SENTINEL + len(spans) - 1].append(t)
    assert [i for i in source if i >= SENTINEL] == list(spans)
    return [j for i in source for j in spans.get(i, [i])], [len(s) for s in spans.values()]


def check_spans(x, batch, N, S, touching=False):
    for b in range(len(x)):
        source, target = parts(batch, b)
        raw, lengths = spliced(source, target)
        assert raw == x[b].tolist(), "the row cannot be put together again"
        assert len(lengths) == S and sum(lengths) == N and min(lengths) > 0
        assert not any(i >= SENTINEL and j >= SENTINEL for i, j in zip(source, source[1:])), "two spans touch"


@pytest.mark.parametrize("T, mean, rate, want", [(1023, 3, 0.15, (929, 139, 46)), (1023, 20, 0.15, (1006, 151, 8)), (1023, 3, 0.5, (766, 383, 128)),
                                                 (1023, 64, 0.5, (1006, 503, 8)), (255, 20, 0.15, (250, 38, 2))])
def test_span_rows_hold_as_many_bytes_as_fit(T, mean, rate, want):
    assert O.fit_spans(T, rate, mean) == want


@pytest.mark.parametrize("T, rate, mean", [(48, 0.15, 3), (64, 0.5, 3), (64, 0.15, 20), (100, 0.5, 2), (33, 0.9, 9)])
def test_span_rows_can_be_put_together_again(T, rate, mean):
    x, batch, hp = make("span", B=200, T=T, span_rate=rate, span_mean=mean)
    check_spans(x, batch, *O.fit_spans(T, rate, mean)[1:])


def test_all_placements_of_spans_are_equally_likely():
    first, noise = O.place_spans(12000, 6, 3, 2, generator("p"))
    assert torch.equal(first, noise & ~F.pad(noise[:, :-1], (1, 0)))
    seen = torch.bincount((noise.long() * 2 ** torch.arange(6)).sum(1), minlength=64)
    seen = seen[seen > 0]
    assert len(seen) == 12 and float(((seen - 1000.0) ** 2 / 1000).sum()) < 45      # 11 degrees of freedom: 1 in 100,000


def check_edges(noise):
    share = noise.float().mean(0)
    assert share[0] > 0.02 and share[-1] > 0.02 and abs(share[0] - share[-1]) < 0.03, "edges are treated otherwise"
    assert share[5:-5].max() < 1.3 * share[5:-5].min()


def t5_noise(B, n, N, S, g):  # T5's own code: a kept part before each span, so that the row ends with noise
    lengths, kept = O.compose(B, N, S, g), O.compose(B, n - N, S, g)
    start = kept.cumsum(1) + lengths.cumsum(1) - lengths
    edge = torch.zeros(B, n + 1, dtype=torch.long).scatter(1, start, 1).scatter(1, start + lengths, -1)
    return edge[:, :n] == 1, edge[:, :n].cumsum(1) == 1


def seeds_noise(B, n, N, S, g):  # the seeds: random starts that may overlap, cut at the end
    noise = torch.zeros(B, n, dtype=torch.bool)
    for b in range(B):
        for start in torch.randint(0, n, (S,), generator=g).tolist():
            noise[b, start:start + int(torch.randint(1, 7, (), generator=g))] = True
    return noise & ~F.pad(noise[:, :-1], (1, 0)), noise


def test_spans_may_touch_both_edges_alike():
    check_edges(O.place_spans(4000, 40, 6, 2, generator("e"))[1])
    with pytest.raises(AssertionError):
        check_edges(t5_noise(4000, 40, 6, 2, generator("e"))[1])


def test_the_checks_of_span_reject_the_seeds_masks(monkeypatch):
    monkeypatch.setattr(O, "place_spans", seeds_noise)
    x, batch, hp = make("span", B=50, T=64, span_rate=0.3)
    with pytest.raises(AssertionError):
        check_spans(x, batch, *O.fit_spans(64, 0.3, 3)[1:])


@pytest.mark.parametrize("name", ["span", "ul2"])
def test_the_source_does_not_hold_the_answer(name):
    """Change the bytes that the target alone should hold: the source stays as it was."""
    x, batch, hp = make(name, B=8, T=64)
    for b in range(8):
        source, target = parts(batch, b)
        if source[0] == MODE_S:
            hidden = torch.arange(x.size(1)) >= len(source) - 1
        else:
            hidden, at = torch.zeros(x.size(1), dtype=torch.bool), 0
            lengths = iter(spliced(source[source[0] == MODE_R or source[0] == MODE_X:], target)[1])
            for i in source[source[0] == MODE_R or source[0] == MODE_X:]:
                step = next(lengths) if i >= SENTINEL else 1
                hidden[at:at + step] = i >= SENTINEL
                at += step
        other = x.clone()
        other[b] = torch.where(hidden, x[b] % 255 + 1, x[b])
        again = OBJECTIVES[name]["make"](other, generator("corruption 0"), hp)
        assert parts(again, b)[0] == source and parts(again, b)[1] != target


# ---- ul2

def test_ul2_rows_are_what_their_mode_says():
    T = 100
    x, batch, hp = make("ul2", B=40, T=T, batch_size=40)
    modes = [int(i) for i in batch["inp"][:, 0]]
    assert modes == [MODE_R] * 20 + [MODE_S] * 10 + [MODE_X] * 10
    tail = []
    for b, mode in enumerate(modes):
        source, target = parts(batch, b)
        if mode == MODE_S:
            assert source[1:] + target == x[b, :T - 2].tolist() and (T - 2) // 4 <= len(source) - 1 <= 3 * (T - 2) // 4
            continue
        n, N, S = O.fit_spans(T, *((0.15, 3) if mode == MODE_R else O.UL2_X), extra=1)
        raw, lengths = spliced(source[1:], target)
        assert raw == x[b, :n].tolist() and len(lengths) == S and sum(lengths) == N
        tail.append(source[-1] >= SENTINEL)
    assert not all(tail[20:]), "one long span would be a suffix, as in S"
    cuts = [len(parts(OBJECTIVES["ul2"]["make"](x, generator(f"{i}"), hp), 20)[0]) - 1 for i in range(150)]
    assert min(cuts) < 30 and max(cuts) > 68 and abs(sum(cuts) / 150 - 49) < 5      # uniform over 24..73


def test_ul2_cuts_anywhere_from_a_quarter_to_three_quarters():
    x, _, hp = make("ul2", B=8, T=18, batch_size=8, ul2_weights="S:1")             # n = 16: cuts 4 .. 12
    batches = [OBJECTIVES["ul2"]["make"](x, generator(f"{i}"), hp) for i in range(40)]
    cuts = torch.cat([batch["mask"] for batch in batches]) - 2                     # without the mode and SEP
    assert set(cuts.tolist()) == set(range(4, 13)), "missing one of 9 in 320 draws: 9 (8/9)^320 < 1e-15"


def test_ul2_figures_are_its_denoisers_means():
    x, batch, hp = make("ul2", B=8, T=64, batch_size=8)
    net = randomized()
    stats, terms = O.ul2_stats(net, {}, batch, hp), O.token_loss(net, {}, batch, hp)
    torch.testing.assert_close(sum(s for s, _ in stats.values()), terms["nll"][0])
    assert sum(int(n) for _, n in stats.values()) == int(terms["nll"][1])
    alone = rows(batch, 0, 4)
    torch.testing.assert_close(O.token_loss(net, {}, alone, hp)["nll"][0], stats["nll_R"][0])


# ---- fim

def fim_rows(**changes):
    x, batch, hp = make("fim", B=6000, T=33, **changes)
    z = torch.cat((batch["inp"], batch["tgt"][:, -1:]), dim=1)
    assert torch.equal(batch["inp"][:, 1:], batch["tgt"][:, :-1]) and (batch["tgt"] != IGNORE).all()
    return x, z


def check_psm(x, z):
    n, sizes = x.size(1) - 4, []
    for raw, other, row in zip(x.tolist(), x.roll(1, 0).tolist(), z.tolist()):
        s, m, e = row.index(SUF), row.index(MID), row.index(EOT)
        assert row[0] == PRE and sum(i >= 256 for i in row) == 3
        prefix, suffix, middle = row[1:s], row[s + 1:m], row[m + 1:e]
        assert prefix + middle + suffix == raw[:e - 3] and row[e + 1:] == other[e - 3:n], "another row's text follows EOT"
        sizes.append((len(prefix), len(middle), len(suffix)))
    sizes = torch.tensor(sizes, dtype=torch.float)
    used = sizes.sum(1)
    assert abs(float((used == n).float().mean()) - 0.5 - 0.5 / n) < 0.04 and len(used.unique()) == n, "the place of EOT gives it away"
    shares = sizes.sum(0) / used.sum()
    assert ((shares - 1 / 3).abs() < 5 * (used.square().sum() / 18).sqrt() / used.sum()).all(), f"sections {shares.tolist()} are not thirds"


def test_fim_psm_can_be_put_together_again_and_has_thirds():
    check_psm(*fim_rows(fim_rate=1.0, fim_spm_rate=0.0))


def check_spm(x, spm, psm):
    empty = 0
    for raw, row, other in zip(x.tolist(), spm.tolist(), psm.tolist()):
        m, e = row.index(MID), row.index(EOT)
        s = other.index(SUF)
        suffix, rest = row[2:m], row[m + 1:e]
        assert row[:2] == [PRE, SUF] and rest + suffix == raw[:e - 3] and row[e + 1:] == other[e + 1:]
        assert suffix == other[s + 1:other.index(MID)]
        if s == 1:                              # an empty prefix: both variants are one
            assert row == other
            empty += 1
    assert empty > 0


def test_fim_spm_is_the_papers_second_variant():
    """PRE SUF suffix MID prefix middle EOT: with the same cuts, the bytes of PSM in another order."""
    x, spm = fim_rows(fim_rate=1.0, fim_spm_rate=1.0)
    _, psm = fim_rows(fim_rate=1.0, fim_spm_rate=0.0)
    check_spm(x, spm, psm)
    first = []                                  # the seeds' variant: SUF suffix PRE prefix MID middle
    for row in psm.tolist():
        s, m = row.index(SUF), row.index(MID)
        first.append(row[s:m] + row[:s] + row[m:])
    with pytest.raises(AssertionError):
        check_spm(x, torch.tensor(first), psm)


def test_fim_rates_are_shares_of_rows():
    x, z = fim_rows()
    moved = (z == MID).any(1)
    assert abs(float(moved.float().mean()) - 0.5) < 5 * 0.5 / 6000 ** 0.5
    assert torch.equal(z[~moved], x[~moved])
    assert 0.47 < float((z[moved][:, 1] == SUF).float().mean()) < 0.6               # PSM rows with an empty prefix count too


def test_the_checks_of_fim_reject_the_seeds_cuts(monkeypatch):
    """The seeds draw the second cut behind the first: halves and quarters, and no EOT."""
    x, z = fim_rows(fim_rate=1.0, fim_spm_rate=0.0)
    n, wrong = x.size(1) - 4, []
    for raw in x.tolist():
        a = int(torch.randint(0, n + 1, (), generator=generator(f"{raw}")))
        b = int(torch.randint(a, n + 1, (), generator=generator(f"{raw[::-1]}")))
        wrong.append([PRE, *raw[:a], SUF, *raw[b:n], MID, *raw[a:b], EOT])
    with pytest.raises(AssertionError, match="gives it away"):
        check_psm(x, torch.tensor(wrong))
    monkeypatch.setattr(torch, "rand", skewed(torch.rand))
    with pytest.raises(AssertionError, match="thirds"):
        check_psm(*fim_rows(fim_rate=1.0, fim_spm_rate=0.0))


def skewed(rand):  # where two cuts are drawn, the second falls uniformly behind the first
    def draw(*size, **how):
        u = rand(*size, **how)
        return torch.stack((u[:, 0], u[:, 0] + u[:, 1] * (1 - u[:, 0])), 1) if size[1:] == (2,) else u
    return draw


# ---- mtp

def test_mtp_head_k_is_asked_for_byte_t_plus_k():
    x, batch, hp = make("mtp", mtp_heads=4)
    assert torch.equal(batch["tgt"], x[:, 1:T + 1]) and batch["tgt_far"].shape == (4, T, 3)
    for k in (2, 3, 4):
        assert torch.equal(batch["tgt_far"][:, :, k - 2], x[:, k:T + k])


def test_mtp_with_one_head_is_clm():
    x, batch, hp = make("mtp", mtp_heads=1)
    net = randomized()
    out = []
    for terms in (O.mtp_loss(net, O.mtp_heads(net.sizes, hp), batch, hp), O.token_loss(net, {}, O.clm(x, None, hp), hp)):
        out.append((total(terms), torch.autograd.grad(total(terms), list(net.parameters()))))
    assert torch.equal(out[0][0], out[1][0]) and all(torch.equal(a, b) for a, b in zip(out[0][1], out[1][1]))


def test_mtp_heads_do_not_see_ahead():
    x, batch, hp = make("mtp", B=1, T=8)
    net, heads = randomized(), heads_of("mtp", hp)
    taken = []
    net.embed.register_forward_hook(lambda module, args, out: taken.append(out))
    far = net.logits(O.far_states(heads, net(batch["inp"], "causal")))               # (1, T, 3, V)
    for k in range(3):
        for t in range(8):
            grad, = torch.autograd.grad(far[0, t, k, :9].sum(), taken[0], retain_graph=True)
            assert (grad[0, t + 1:] == 0).all() and (grad[0, :t + 1].abs().amax(1) > 0).all()


def check_mtp_sum(net, heads, x, batch, terms):
    h = net(batch["inp"], "causal")
    want = F.cross_entropy(net.logits(h).flatten(0, 1), x[:, 1:T + 1].flatten())
    for k, W in enumerate(heads["mtp"].weight, start=2):
        each = F.cross_entropy(net.logits(O.norm(h + h @ W.T)).flatten(0, 1), x[:, k:T + k].flatten())
        torch.testing.assert_close(terms[f"head{k}"][0] / terms[f"head{k}"][1], each)
        want = want + each
    torch.testing.assert_close(total(terms), want)


def test_mtp_loss_is_the_sum_of_separate_heads():
    x, batch, hp = make("mtp")
    net, heads = randomized(), heads_of("mtp", hp)
    terms = O.mtp_loss(net, heads, batch, hp)
    check_mtp_sum(net, heads, x, batch, terms)
    with pytest.raises(AssertionError):         # the seeds divide by the number of heads
        check_mtp_sum(net, heads, x, batch, {k: (s, n, c / 4) for k, (s, n, c) in terms.items()})


def test_mtp_learns_a_periodic_text_with_every_head():
    hp = settings("mtp", 32)
    torch.manual_seed(0)
    net = Transformer(Sizes(2, 2, 32))
    heads = torch.nn.ModuleDict(O.mtp_heads(net.sizes, hp))
    opt = torch.optim.AdamW([*net.parameters(), *heads.parameters()], lr=1e-2, weight_decay=0.0)
    start = torch.arange(7)
    text = torch.tensor(list(b"periods" * 8))
    x = text[start[:, None] + torch.arange(36)]                                     # (7, T + 4)
    batch = O.mtp(x, None, hp)
    for _ in range(120):
        loss = total(O.mtp_loss(net, heads, batch, hp))
        opt.zero_grad()
        loss.backward()
        opt.step()
    with torch.no_grad():
        best = net.logits(O.far_states(heads, net(batch["inp"], "causal"))).argmax(-1)
    assert torch.equal(best[:, 7:], batch["tgt_far"][:, 7:])


# ---- electra

class Says(torch.nn.Module):
    """A generator whose most likely byte at every position is the given one."""
    def __init__(self, x):
        super().__init__()
        self.x = x

    def forward(self, idx, mask):
        return F.one_hot(self.x, 256).float() * 200

    def logits(self, h):
        return h


def electra_case(B=6):
    x, batch, hp = make("electra", B=B)
    return x, batch, hp, randomized(), heads_of("electra", hp)


def check_labels(x, batch, labels, right):
    assert (labels.sum(1) == (0 if right else round(0.15 * T))).all()
    assert right or torch.equal(labels, torch.zeros_like(x).scatter(1, batch["at"], 1))


@pytest.mark.parametrize("right", [True, False])
def test_electra_labels_only_what_differs(right):
    x, batch, hp, net, heads = electra_case()
    _, clean, labels, _ = O.electra_forward(net, dict(heads, generator=Says(x if right else x % 255 + 1)), batch)
    assert torch.equal(clean, x.gather(1, batch["at"]))
    check_labels(x, batch, labels, right)


def test_the_seeds_electra_labels_would_be_noticed():
    """Compared with the masked input, every masked position counts as replaced, a right guess too."""
    x, batch, hp, net, heads = electra_case()
    with pytest.raises(AssertionError):
        check_labels(x, batch, (x != batch["inp"]).long(), right=True)


def test_electra_masks_85_percent_of_an_exact_number():
    x, batch, _ = make("electra", B=3000)
    chosen = batch["tgt"] != IGNORE
    k = round(0.15 * T)
    assert (chosen.sum(1) == k).all() and torch.equal(batch["tgt"][chosen], x[chosen]) and torch.equal(batch["inp"][~chosen], x[~chosen])
    seen = batch["inp"][chosen]
    assert ((seen == MASK) | (seen == x[chosen])).all()
    assert abs(float((seen == MASK).float().mean()) - 0.85) < 5 * (0.85 * 0.15 / (3000 * k)) ** 0.5


def test_electra_reports_the_auc_of_its_labels():
    x, batch, hp, net, heads = electra_case()
    _, _, labels, replaced = O.electra_forward(net, heads, batch)
    figures = O.electra_stats(net, heads, batch, hp)
    mean = {name: float(s) / float(n) for name, (s, n) in figures.items()}
    assert mean["auc"] == pytest.approx(float(O.auc(replaced.flatten(), labels.flatten())))
    assert mean["replaced"] == pytest.approx(float(labels.float().mean()))


def test_electra_draws_its_fakes_with_numbers_of_their_own():
    """With the numbers that decide what is masked, a masked byte's would all lie below .85."""
    _, batch, _ = make("electra", B=300)
    u, masked = batch["u"], batch["inp"].gather(1, batch["at"]) == MASK
    assert float(u[masked].max()) > 0.99 and float(u[~masked].min()) < 0.1 and abs(float(u.mean()) - 0.5) < 0.05


def test_a_generator_has_heads_of_the_trunks_width():
    for sizes, want in ((Sizes(4, 4, 128), (1, 32)), (Sizes(12, 12, 768), (3, 192)), (Sizes(2, 8, 64), (2, 16)), (Sizes(2, 6, 60), (2, 16))):
        small = O.electra_sizes(sizes, settings("electra", 8))
        assert (small.n_layer, small.n_head, small.n_embd) == (sizes.n_layer, *want)


def test_electra_gradients_stay_on_their_side():
    x, batch, hp, net, heads = electra_case()
    terms = O.electra_loss(net, heads, batch, hp)
    generator, trunk = list(heads["generator"].parameters()), [p for n, p in net.named_parameters() if not n.startswith("head")]
    grads = lambda term, params: torch.autograd.grad(terms[term][0], params, retain_graph=True, allow_unused=True)
    assert all(g is None for g in grads("discriminator", generator)) and all(g is None for g in grads("generator", trunk))
    assert any(g.abs().max() > 0 for g in grads("discriminator", trunk)) and any(g.abs().max() > 0 for g in grads("generator", generator))
    assert [c for _, _, c in terms.values()] == [1.0, 50.0]


def test_electra_samples_follow_the_generator():
    hp = settings("electra", 8)
    x = torch.full((4000, 8), 65)
    batch = OBJECTIVES["electra"]["make"](x, generator("e"), hp)
    p = torch.tensor([0.4, 0.3, 0.2, 0.1])
    class Four(Says):
        def forward(self, idx, mask):
            logits = torch.full((*idx.shape, 512), -60.0)
            logits[..., 65:69] = p.log()
            return logits
    net = randomized()
    seen = []
    net.embed.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    O.electra_forward(net, dict(heads_of("electra", hp), generator=Four(x)), batch)
    counts = torch.bincount(seen[0].gather(1, batch["at"]).flatten(), minlength=69)[65:69]
    n = counts.sum()
    assert n == batch["at"].numel() and float(((counts - n * p) ** 2 / (n * p)).sum()) < 25


def test_auc_is_the_chance_of_the_right_order():
    scores = torch.randint(0, 6, (60,), generator=generator("s")).float()
    labels = torch.randint(0, 2, (60,), generator=generator("l"))
    pairs = [(float(a), float(b)) for a, la in zip(scores, labels) if la for b, lb in zip(scores, labels) if not lb]
    assert float(O.auc(scores, labels)) == pytest.approx(sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs))
    assert float(O.auc(torch.zeros(9), torch.tensor([1, 0, 0] * 3))) == 0.5


# ---- bart

def subsequence(small, large):
    it = iter(large)
    return all(i in it for i in small)


def sentences(row):
    return sorted(re.findall(rb"(?s).*?(?:\n|[.?!][ \t\r\x0b\x0c]|\Z)", bytes(row)))


def bart_case(noise, B=100, T=129, rate=0.3, text=None, **changes):
    hp = settings("bart", T, bart_noise=noise, bart_rate=rate, **changes)
    x = clean_windows("bart", B, T, hp)
    if text is not None:
        data = torch.tensor(list(text * (1 + (B + T) // len(text))))
        x = data[torch.arange(B)[:, None] + torch.arange(x.size(1))]
    batch = OBJECTIVES["bart"]["make"](x, generator("bart"), hp)
    split = [parts(batch, b) for b in range(B)]
    assert all(t == row[:len(t)] for (_, t), row in zip(split, x.tolist())), "the target is the clean text"
    L = x.size(1)
    used = [len(t) for _, t in split]
    assert B < 100 or L < 20 or (0.25 < sum(u == L for u in used) / B < 0.75 and len(set(used)) > 12 and min(used) >= 8), "the place of EOT gives it away"
    assert all(len(s) <= len(t) for s, t in split)
    return [t for _, t in split], [s for s, _ in split]


def struck(row, rate):
    return max(1, int(rate * len(row) + 0.5))


def test_bart_masks_deletes_and_replaces_exact_numbers():
    rows, sources = bart_case("mask")
    assert all(s.count(MASK) == struck(r, 0.3) and len(s) == len(r) and all(a in (b, MASK) for a, b in zip(s, r)) for s, r in zip(sources, rows))
    rows, sources = bart_case("delete")
    assert all(len(s) == len(r) - struck(r, 0.3) and subsequence(s, r) for s, r in zip(sources, rows))
    rows, sources = bart_case("replace")
    changed = [sum(a != b for a, b in zip(s, r)) for s, r in zip(sources, rows)]
    most = [struck(r, 0.3) for r in rows]
    assert all(c <= k for c, k in zip(changed, most)) and abs(sum(changed) / sum(most) - 254 / 255) < 0.01 and max(map(max, sources)) < 256


def test_bart_shares_its_rate_over_its_noises():
    rows, sources = bart_case("mask,delete,replace", rate=0.3)
    assert all(len(s) == len(r) - struck(r, 0.1) and s.count(MASK) == struck(r, 0.1) for s, r in zip(sources, rows))


def infills(source, row):  # -> lengths of the spans behind each MASK, or None where the source does not fit the row
    pattern = b"".join(b"(.*?)" if i == MASK else re.escape(bytes([i])) for i in source)
    found = re.fullmatch(pattern, bytes(row), re.DOTALL)
    return found and [len(s) for s in found.groups()]


def test_bart_infills_exactly_its_rate_with_poisson_spans():
    keep, start, used = O.place_infills(torch.ones(4000, 200, dtype=torch.bool), torch.full((4000, 1), 60), 68, 3.0, generator("i"))
    assert ((~keep).sum(1) == 60).all() and (used.sum(1) <= 60).all()
    third = (~keep).float().mean(0).view(-1)[:198].view(3, 66).mean(1)
    assert ((third - 0.3).abs() < 0.01).all(), f"thirds are struck unequally: {third.tolist()}"
    edges = (~keep).float().mean(0)[[0, -1]]
    assert edges.min() > 0.08 and abs(float(edges[0] - edges[1])) < 0.03
    lengths = []
    for b in range(1000):                       # lengths from the next start, or from the end of the noise
        at = sorted(start[b][used[b]].tolist())
        gone = (~keep[b]).tolist() + [False]
        for s, nxt in zip(at, at[1:] + [200]):
            n = 0
            while s + n < nxt and gone[s + n]:
                n += 1
            lengths.append(n)
    share = torch.bincount(torch.tensor(lengths), minlength=9)[:9].double() / len(lengths)
    want = torch.tensor([math.exp(-3) * 3 ** j / math.factorial(j) for j in range(9)], dtype=torch.double)
    assert (share - want).abs().max() < 0.02    # the last span of a row is cut to fit, which moves the shares a little


def test_bart_infilled_text_fits_its_holes():
    rows, sources = bart_case("infill", text=b"The quick brown fox jumps over the lazy dog and runs away again from it. ")
    for source, row in zip(sources, rows):
        found = infills(source, row)
        assert found is not None and sum(found) == struck(row, 0.3) == len(row) - len([i for i in source if i != MASK])


@every
def test_masked_bytes_are_nowhere_in_the_input(name):
    """Change what is masked: what the model reads stays as it was."""
    x, batch, hp = make(name, B=8, T=64, bart_noise="mask", batch_size=8)
    in_place = "tgt" in batch and batch["inp"].shape == x.shape and batch["mask"] == "bidirectional"
    if not in_place and name not in ("hybrid", "bart"):
        pytest.skip("masks no bytes in place")
    hidden = batch["inp"] == MASK
    if name == "bart":                          # the source stands at the same place, its clean text behind SEP
        hidden = hidden[:, :x.size(1)] & (torch.arange(x.size(1)) < batch["mask"][:, None] - 1)
    hidden = F.pad(hidden, (0, x.size(1) - hidden.size(1)))
    again = OBJECTIVES[name]["make"](torch.where(hidden, x % 255 + 1, x), generator("corruption 0"), hp)
    if name == "bart":
        assert [parts(again, b)[0] for b in range(8)] == [parts(batch, b)[0] for b in range(8)]
    else:
        assert torch.equal(again["inp"], batch["inp"])
    assert hidden.any() and not torch.equal(again["tgt"], batch["tgt"])


def test_a_broken_infilling_is_noticed(monkeypatch):
    """Gaps sorted before the unused ones are set aside: only the front of the row is struck."""
    rand = torch.rand
    calls = iter([False, True])                 # lengths are drawn first, gaps second
    monkeypatch.setattr(torch, "rand", lambda *size, **how:
                        rand(*size, **how).sort(dim=1).values if size == (4000, 68) and next(calls) else rand(*size, **how))
    with pytest.raises(AssertionError, match="thirds"):
        test_bart_infills_exactly_its_rate_with_poisson_spans()


def test_bart_permutes_whole_sentences():
    text = b"One. Two is here! Three?\nFour has no stop\nFive, e.g. this one, is longer. Six. "
    rows, sources = bart_case("permute", text=text)
    assert all(sorted(source) == sorted(row) for source, row in zip(sources, rows))
    assert sum(source != row for source, row in zip(sources, rows)) > 60
    x = torch.tensor(list(text)).expand(300, -1)
    order = O.permute_sentences(x, torch.ones_like(x, dtype=torch.bool), generator("o"))
    assert len({bytes(r.tolist()) for r in order}) > 250 and all(sentences(r.tolist()) == sentences(text) for r in order)


def test_bart_rotates():
    rows, sources = bart_case("rotate")
    turns = [next(r for r in range(1, len(row)) if source == row[r:] + row[:r]) for source, row in zip(sources, rows)]
    assert len(set(turns)) > 20 and 0.3 < sum(r / len(row) for r, row in zip(turns, rows)) / len(rows) < 0.7


@pytest.mark.parametrize("noise", ["mask,delete,infill,permute,rotate,replace", "infill,rotate", "delete,rotate", "infill,delete"])
@pytest.mark.parametrize("T, rate", [(17, 0.3), (48, 0.9), (130, 0.05)])
def test_bart_noises_combine_at_any_size(noise, T, rate):
    if rate == 0.9 and "infill" in noise and T < 20:
        return
    bart_case(noise, T=T, rate=rate)


# ---- nsp

def nsp_case(negatives, B=40):
    data = torch.randint(1, 256, (20000,), generator=generator("nsp"))
    hp = settings("nsp", T, nsp_negatives=negatives, mask_rate=0.001, batch_size=B)
    n = OBJECTIVES["nsp"]["window"](T, hp)
    x = data[torch.arange(B)[:, None] * 400 + torch.arange(n)]
    batch = OBJECTIVES["nsp"]["make"](x, generator("n"), hp)
    h = (n - O.GAP) // 2
    clean = torch.where(batch["tgt"] == IGNORE, batch["inp"], batch["tgt"])
    assert (clean[:, 0] == CLS).all() and (clean[:, h + 1] == SEP).all() and (clean[:, 2 * h + 2] == SEP).all() and (clean[:, 2 * h + 3:] == PAD).all()
    return bytes(data.tolist()), batch, clean[:, 1:h + 1].tolist(), clean[:, h + 2:2 * h + 2].tolist(), h


@pytest.mark.parametrize("negatives", ["random", "swap"])
def test_nsp_is_half_true_and_its_text_is_from_the_corpus(negatives):
    corpus, batch, A, B, h = nsp_case(negatives)
    assert int(batch["labels"].sum()) == 20
    for label, a, b in zip(batch["labels"].tolist(), A, B):
        i, j = corpus.find(bytes(a)), corpus.find(bytes(b))
        assert i >= 0 and j >= 0
        follows = j == i + h + O.GAP
        assert follows == bool(label)
        assert label or (i == j + h + O.GAP if negatives == "swap" else abs(i - j) > 300)


def test_nsp_masks_both_texts_and_takes_batches_of_two():
    _, batch, _ = make("nsp", B=200)
    h = (T - 3) // 2
    first, second = (int((batch["tgt"][:, a:a + h] != IGNORE).sum()) for a in (1, h + 2))
    assert abs(first - second) < 5 * (first + second) ** 0.5, "5 standard deviations"
    assert make("nsp", B=2, batch_size=2)[1]["labels"].sum() == 1


@pytest.mark.parametrize("name", ["mlm", "electra", "nsp", "hybrid"])
def test_the_smallest_rate_still_asks_for_a_byte(name):
    _, batch, _ = make(name, mask_rate=0.001)
    assert ((batch["tgt"] != IGNORE).sum(1) >= 1).all()


@pytest.mark.parametrize("noise", ["mask", "infill", "delete"])
def test_the_smallest_rate_of_bart_still_strikes_a_byte(noise):
    x, batch, _ = make("bart", bart_noise=noise, bart_rate=0.001)
    length = batch["tgt"].ne(IGNORE).sum(1) - 1                                    # of the clean text, without EOT
    source = [row[:p - 1].tolist() for row, p in zip(batch["inp"], batch["mask"])]
    assert all(MASK in row if noise != "delete" else len(row) == n - 1 for row, n in zip(source, length))


COEFFICIENTS = {"ul2": {"nll": 1}, "mtp": {"nll": 1, "head2": 1, "head3": 1, "head4": 1}, "electra": {"generator": 1, "discriminator": 50},
                "nsp": {"nll": 1, "nsp": 1}, "contrastive": {"info": 1}, "mdlm": {"bound": 1}, "rotation": {"seam": 1},
                "hybrid": {"masked": 0.5, "causal": 0.5}}


@every
def test_terms_weigh_what_the_papers_say(name):
    _, batch, hp = make(name)
    terms = OBJECTIVES[name]["loss"](randomized(), heads_of(name, hp), batch, hp)
    if name in COEFFICIENTS or set(terms) == {"nll"}:                              # a fork's own terms are its own affair
        assert {term: c for term, (_, _, c) in terms.items()} == COEFFICIENTS.get(name, {"nll": 1})


def test_two_heads_have_two_terms():
    _, batch, hp = make("mtp", mtp_heads=2)
    assert set(OBJECTIVES["mtp"]["loss"](randomized(), heads_of("mtp", hp), batch, hp)) == {"nll", "head2"} == set(O.mtp_counts(batch, hp))


def test_far_heads_start_as_the_identity():
    hp = settings("mtp", 8)
    heads, h = OBJECTIVES["mtp"]["heads"](Sizes(2, 2, 16), hp), torch.randn(3, 16, generator=generator("h"))
    assert torch.equal(O.far_states(heads, h), O.norm(h)[:, None].expand(3, 3, 16))


def test_nsp_masks_its_rate():
    _, batch, hp = make("nsp")
    n = 2 * ((T - 3) // 2)
    assert ((batch["tgt"] != IGNORE).sum(1) == round(0.15 * n)).all() and (batch["inp"][batch["tgt"] != IGNORE] < CLS).all()


def test_the_figures_count_what_is_right():
    """Heads and models that know, or always miss, the answer."""
    for name, figure in (("nsp", "accuracy"), ("rotation", "accuracy")):
        x, batch, hp = make(name)
        for sign in (1, -1):
            if name == "nsp":
                answer = (2.0 * batch["labels"] - 1)[:, None, None].expand(4, T, 1) * sign
            else:
                answer = F.one_hot(batch["labels"], T).float()[..., None] * sign
            class Knows:
                def __call__(self, h, answer=answer):
                    return answer if h.dim() == 3 else answer[:, 0]
            stats = OBJECTIVES[name]["stats"](randomized(), {"follows": Knows(), "seam": Knows()}, batch, hp)
            assert float(stats[figure][0]) / stats[figure][1] == (sign > 0)
    x, batch, hp = make("contrastive")
    for shift in (0, 1):
        window = (torch.arange(8) // 2 + (torch.arange(8) % 2) * shift) % 4
        ideal = lambda inp, mask, window=window: F.one_hot(window, 16).float()[:, None].expand(8, inp.size(1), 16)
        stats = O.contrastive_stats(ideal, {}, batch, hp)
        assert float(stats["top1"][0]) / stats["top1"][1] == (shift == 0)


def test_nsp_classes_look_alike():
    """Same lengths, same special ids, each piece of text in both classes over time."""
    _, batch, A, B, h = nsp_case("random")
    special = (batch["inp"] >= 256) & (batch["inp"] != MASK)
    assert (special == special[0]).all()


# ---- contrastive

def test_contrastive_equals_loops_and_knows_its_extremes():
    x, batch, hp = make("contrastive", B=5)
    net = randomized()
    z = torch.stack([F.normalize(net(view, "bidirectional").mean(1), dim=-1) for view in batch["inp"]]).detach()     # (B, 2, C)
    want = 0.0
    for i in range(5):
        row = [float(z[i, 0] @ z[j, 1]) / hp.tau for j in range(5)]
        col = [float(z[j, 0] @ z[i, 1]) / hp.tau for j in range(5)]
        want += sum(math.log(sum(math.exp(s) for s in side)) - side[i] for side in (row, col))
    s, n, _ = O.contrastive_loss(net, {}, batch, hp)["info"]
    assert n == 10 and float(s.detach()) == pytest.approx(want, rel=1e-4)
    swapped = dict(batch, inp=batch["inp"].flip(1))
    torch.testing.assert_close(O.contrastive_loss(net, {}, swapped, hp)["info"][0], s)
    collapsed = lambda inp, mask: torch.ones(*inp.shape, 16)
    assert float(O.contrastive_loss(collapsed, {}, batch, hp)["info"][0]) / 10 == pytest.approx(math.log(5))
    ideal = lambda inp, mask: F.one_hot(torch.arange(len(inp)) // 2, 16).float()[:, None].expand(-1, inp.size(1), -1)
    assert float(O.contrastive_loss(ideal, {}, batch, hp)["info"][0]) / 10 == pytest.approx(math.log(1 + 4 * math.exp(-1 / hp.tau)), abs=1e-6)


def test_contrastive_crops_lie_anywhere_in_their_window():
    hp = settings("contrastive", 20)
    x = torch.arange(1, 21).expand(4000, -1)
    inp = OBJECTIVES["contrastive"]["make"](x, generator("c"), hp)["inp"]
    assert inp.shape == (4000, 2, 10) and (inp.diff(dim=2) == 1).all()
    counts = torch.bincount(inp[:, :, 0].flatten() - 1, minlength=11)
    assert len(counts) == 11 and float(((counts - 8000 / 11) ** 2 / (8000 / 11)).sum()) < 42      # 10 degrees of freedom


# ---- mdlm

def test_mdlm_masks_l_bytes_with_l_from_every_stratum():
    x, batch, hp = make("mdlm", B=16, T=64)
    masked = batch["tgt"] != IGNORE
    count = masked.sum(1)
    assert sorted(((count - 1) // 4).tolist()) == list(range(16)), "one l from each sixteenth of 1..64"
    torch.testing.assert_close(batch["weight"], 64 / count)
    assert (batch["inp"][masked] == MASK).all() and torch.equal(batch["inp"][~masked], x[~masked]) and torch.equal(batch["tgt"][masked], x[masked])


def check_uniform_bound(loss):
    _, batch, hp = make("mdlm", B=16)
    torch.manual_seed(0)
    s, n, _ = loss(Transformer(Sizes(1, 2, 16)), {}, batch, hp)["bound"]
    assert float(s.detach()) / float(n) / math.log(2) == pytest.approx(8.0, abs=1e-5)


def test_a_uniform_model_scores_exactly_8_bits_under_mdlm():
    check_uniform_bound(O.mdlm_loss)


def test_mdlm_without_its_weights_would_be_noticed():
    def mean_over_masked(model, heads, batch, hp):                  # with all 512 ids competing
        return {"bound": O.token_loss(model, heads, batch, hp)["nll"]}
    def unweighted(model, heads, batch, hp):
        return O.mdlm_loss(model, heads, dict(batch, weight=torch.ones_like(batch["weight"])), hp)
    for wrong in (mean_over_masked, unweighted):
        with pytest.raises(AssertionError):
            check_uniform_bound(wrong)


def test_mdlm_equals_the_integral_over_t():
    """All 7 masks of 3 bytes by a random model: the integral of t^(m-1) (1-t)^(L-m) is Beta(m, L-m+1), and the
    estimator's mean over many rows agrees."""
    L, net, x = 3, randomized(), torch.tensor([[65, 66, 67]])
    exact, by_l = 0.0, 0.0
    for mask in itertools.product([False, True], repeat=L):
        m = sum(mask)
        if m:
            hidden = torch.tensor([mask])
            logits = net.requires_grad_(False).logits(net(x.masked_fill(hidden, MASK), "bidirectional"))[..., :256]
            logp = logits.log_softmax(-1).gather(2, x[..., None])[..., 0]
            f = -float(logp[hidden].sum())
            exact += f * math.gamma(m) * math.gamma(L - m + 1) / math.gamma(L + 1)
            by_l += f / math.comb(L, m) / L * (L / m)
    assert by_l == pytest.approx(exact)
    hp = settings("mdlm", L)
    batch = OBJECTIVES["mdlm"]["make"](x.expand(30000, -1), generator("m"), hp)
    with torch.no_grad():
        s, n, _ = O.mdlm_loss(net, {}, batch, hp)["bound"]
    assert float(s) / 30000 == pytest.approx(exact, rel=0.01)


# ---- rotation

def test_rotation_can_be_rolled_back_and_every_seam_is_as_likely():
    x, batch, hp = make("rotation", B=9600)
    back = torch.stack([row.roll(-int(label)) for row, label in zip(batch["inp"][:50], batch["labels"])])
    assert torch.equal(back, x[:50])
    counts = torch.bincount(batch["labels"], minlength=T)
    assert len(counts) == T and float(((counts - 200.0) ** 2 / 200).sum()) < 100    # 47 degrees of freedom: 1 in 100,000


# ---- hybrid

def test_hybrid_rows_are_masked_or_causal():
    x, batch, hp = make("hybrid", B=400, hybrid_ratio=0.25)
    masked = batch["mask"] == T
    assert int(masked.sum()) == 100 and (batch["mask"][~masked] == 0).all()
    assert torch.equal(batch["inp"][~masked], x[~masked, :-1]) and torch.equal(batch["tgt"][~masked], x[~masked, 1:])
    inp, tgt, clean = batch["inp"][masked], batch["tgt"][masked], x[masked, :T]
    asked = tgt != IGNORE
    assert (asked.sum(1) == round(0.15 * T)).all() and not asked[:, -1].any()
    assert torch.equal(tgt[:, :-1][asked[:, :-1]], clean[:, 1:][asked[:, :-1]]), "position i - 1 predicts byte i"
    seen = F.pad(asked[:, :-1], (1, 0))
    assert torch.equal(inp[~seen], clean[~seen]) and abs(float((inp[seen] == MASK).float().mean()) - 0.8) < 0.1
    assert not seen[:, 0].any()


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_hybrid_at_its_ends_is_one_kind(ratio):
    x, batch, hp = make("hybrid", hybrid_ratio=ratio)
    net = randomized()
    got = total(O.hybrid_loss(net, {}, batch, hp))
    pure = dict(batch, mask="bidirectional") if ratio else O.clm(x, None, hp)
    torch.testing.assert_close(got, total(O.token_loss(net, {}, pure, hp)))


def test_hybrid_weighs_its_kinds_by_their_rows():
    x, batch, hp = make("hybrid", B=8, hybrid_ratio=0.25, batch_size=8)
    net = randomized()
    logits = net.logits(net(batch["inp"], batch["mask"]))
    mean = [F.cross_entropy(logits[rows].flatten(0, 1), batch["tgt"][rows].flatten(), ignore_index=IGNORE) for rows in (batch["mask"] > 0, batch["mask"] == 0)]
    torch.testing.assert_close(total(O.hybrid_loss(net, {}, batch, hp)), 0.25 * mean[0] + 0.75 * mean[1])


@pytest.mark.parametrize("name", [name for name, entry in OBJECTIVES.items() if entry.get("packs")])
def test_document_masks_keep_documents_apart(name):
    """The loss on the second document does not depend on the first one's bytes, but does without the mask."""
    x, batch, hp = make(name, B=4, batch_size=4)
    doc = (torch.arange(T) >= 20).long().expand(4, T)
    net, heads = randomized(), heads_of(name, hp)
    far = {k: v if isinstance(v, str) or v.dim() < 2 else v.clone() for k, v in batch.items()}
    far["tgt"][:, :20] = IGNORE
    other = dict(far, inp=torch.where(doc == 0, far["inp"] % 255 + 1, far["inp"]))
    if "tgt_far" in batch:
        far["tgt_far"][:, :20] = IGNORE
        other["tgt_far"] = far["tgt_far"]
    values = [[float(s.detach()) for s, _, _ in OBJECTIVES[name]["loss"](net, heads, {**b, **d}, hp).values()]
              for d in ({"doc": doc}, {}) for b in (far, other)]
    assert values[0] == values[1] and all(a != b for a, b in zip(values[2], values[3]) if a)


def test_hybrid_rows_do_not_touch_each_other():
    x, batch, hp = make("hybrid", B=8)
    net = randomized()
    causal = batch["mask"] == 0
    logits = net(batch["inp"], batch["mask"])
    other = batch["inp"].where(causal[:, None], batch["inp"] % 255 + 1)
    assert torch.equal(net(other, batch["mask"])[causal], logits[causal])
