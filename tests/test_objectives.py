"""Every objective of the table is put through the generic tests; a new entry is tested by being there."""
import math

import pytest
import torch
from conftest import clean_windows, randomize, randomized, settings
from torch.utils._python_dispatch import TorchDispatchMode

import objectives as O
from data import MASK, generator
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

@every
def test_a_batch_is_a_function_of_its_generator(name):
    hp = settings(name, T)
    x = clean_windows(name, 4, T, hp)
    kept = x.clone()
    batch = [OBJECTIVES[name]["make"](x, generator(key), hp) for key in "aab"]
    assert same(batch[0], batch[1]) and torch.equal(x, kept), "the caller's windows were changed"
    assert name == "clm" or not same(batch[0], batch[2])


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
    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2")

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


def test_the_watch_sees_what_it_refuses():
    x = torch.arange(8)
    for bad in (lambda: x[x > 3], lambda: x.sum().item(), lambda: x.nonzero(), lambda: x.masked_select(x > 3)):
        with pytest.raises(AssertionError), Watch():
            bad()


@every
def test_micro_batches_add_up_to_the_batch(name):
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
    _, batch, hp = make(name, B=2, T=16)
    if OBJECTIVES[name]["loss"] is not O.token_loss:
        pytest.skip("has a loss, and so a test, of its own")
    net = randomized()
    p = net.logits(net(batch["inp"], batch["mask"])).detach().double().softmax(-1)
    want = sum(-math.log(float(p[b, t, batch["tgt"][b, t]])) for b in range(2) for t in range(16) if batch["tgt"][b, t] != IGNORE)
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
def test_one_batch_can_be_learned_by_heart(name):
    _, batch, hp = make(name, B=4, T=32)
    torch.manual_seed(1)
    net = Transformer(Sizes(2, 4, 64))
    heads = torch.nn.ModuleDict(OBJECTIVES[name]["heads"](net.sizes, hp))
    opt = torch.optim.AdamW([*net.parameters(), *heads.parameters()], lr=6e-3, weight_decay=0.0)
    for _ in range(150):
        loss = total(OBJECTIVES[name]["loss"](net, heads, batch, hp))
        opt.zero_grad()
        loss.backward()
        opt.step()
    assert float(loss.detach()) < 0.1


# ---- clm

def test_clm_shifts_once():
    x, batch, _ = make("clm")
    assert torch.equal(batch["inp"], x[:, :-1]) and torch.equal(batch["tgt"], x[:, 1:]) and batch["mask"] == "causal"


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
