"""Every objective is put through the generic tests; a new entry is tested by being there."""
import contextlib
import functools
import itertools
import math
import os
import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, clean_windows, randomize, randomized, settings
from torch.utils._python_dispatch import TorchDispatchMode

import objectives as O
import sample
import train
from data import CLS, EOT, MASK, MID, MODE_R, MODE_S, MODE_X, PAD, PRE, SENTINEL, SEP, SUF
from data import generator, open_corpus
from model import Sizes, Transformer, allow
from objectives import IGNORE, OBJECTIVES, USUAL, find_objective, part_of
from run import get_config

T = 48
MIXTURES = ["clm:0.5,mlm:0.5", "electra,nsp,hybrid:2"]          # of 8 rows: 4 and 4; 2, 2 and 4
GENERIC = []                                    # the tests that every objective passes, the README's too


def every(test, names=(*OBJECTIVES,)):
    GENERIC.append(test)
    return pytest.mark.parametrize("name", names)(test)


every_mixture_too = functools.partial(every, names=[*OBJECTIVES, *MIXTURES])


@pytest.fixture
def forks():  # what a test adds to OBJECTIVES goes again
    known = dict(OBJECTIVES)
    yield
    OBJECTIVES.clear()
    OBJECTIVES.update(known)


def make(name, B=4, T=T, seed=0, **changes):  # -> x, batch, hp
    hp = settings(name, T, **{"batch_size": B} | changes)
    x = clean_windows(hp, B, seed)
    return x, find_objective(hp)["make"](x, generator(f"corruption {seed}"), hp), hp


def case(name, B=4, **changes):  # -> entry, net with random parameters, batch, hp
    _, batch, hp = make(name, B, **changes)
    torch.manual_seed(0)
    entry = find_objective(hp)
    net = randomized(n_outputs=entry["n_outputs"])
    net.heads.update({k: randomize(h, 1) for k, h in entry["heads"](net.sizes, hp).items()})
    return entry, net, batch, hp


def prefixes(batch):  # -> (B,): how many positions of each row are read both ways
    if isinstance(batch["mask"], str):
        return torch.full((len(batch["inp"]),), {"causal": 0, "bidirectional": T}[batch["mask"]])
    return batch["mask"]


def same(a, b):
    return a.keys() == b.keys() and all(
        a[k] == b[k] if isinstance(a[k], str) else torch.equal(a[k], b[k]) for k in a)


def total(entry, net, batch, hp):
    sums, terms = entry["loss"](net, batch, hp), entry["terms"](batch, hp)
    return sum(c * sums[term] / count for term, (count, c) in terms.items() if c)


def chi2(seen, want):
    return float(((seen - want) ** 2 / want).sum())


# ---- generic: batches

@every_mixture_too
def test_a_batch_is_a_function_of_its_generator(name):
    hp = settings(name, T, batch_size=8)
    x = clean_windows(hp, 8)
    kept, batch = x.clone(), [find_objective(hp)["make"](x, generator(key), hp) for key in "aab"]
    assert torch.equal(x, kept), "the caller's windows were changed"
    assert same(batch[0], batch[1])
    assert name in ("clm", "mtp") or not same(batch[0], batch[2])


@every
def test_no_row_is_longer_than_its_block(name):
    """What pack is given fits, EOT too: a window that is too long would lose the ends of full rows in silence."""
    pack = O.pack

    def watched(ids, keep, width):
        assert keep.sum(1).max() <= width
        return pack(ids, keep, width)
    with mock.patch.object(O, "pack", watched):
        for size in (T, 64, 65, 66):
            make(name, B=8, T=size)


@every
def test_batches_have_constant_shapes_valid_ids_and_rows_first(name):
    shapes = set()
    for seed in range(8):
        _, batch, _ = make(name, seed=seed)
        shapes.add(str({k: v if isinstance(v, str) else (v.shape, v.dtype) for k, v in batch.items()}))
        assert all(isinstance(v, str) or v.size(0) == 4 for v in batch.values())
        assert batch["inp"].min() >= 0 and batch["inp"].max() < 512
        if "tgt" in batch:
            told = batch["tgt"] != IGNORE
            assert batch["inp"].shape == told.shape == (4, T)
            assert told.any(1).all(), "a row without a target"
            assert batch["tgt"][told].min() >= 0 and batch["tgt"].max() < 512
    assert len(shapes) == 1


class Watch(TorchDispatchMode):
    """Counts operations and refuses those that wait for the device or whose result has a data-dependent shape."""
    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2",
               "lift_fresh")                    # the last: a list from the host
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        op = func.overloadpacket.__name__
        assert op not in self.REFUSED, f"{op} waits for the device"
        if op in ("index", "index_put", "index_put_"):
            boolean = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
            assert not boolean, f"{op} with a boolean index"
        self.count += 1
        return func(*args, **(kwargs or {}))


@every_mixture_too
def test_make_never_waits_for_the_device_nor_loops_over_rows(name):
    counts = []
    for B in (8, 16):
        hp = settings(name, T, batch_size=B)
        x, entry = clean_windows(hp, B), find_objective(hp)
        with Watch() as watch:
            entry["make"](x, generator("w"), hp)
        counts.append(watch.count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("bad", [lambda x: torch.tensor([1, 2]), lambda x: x[x > 3], lambda x: x.sum().item(),
                                 lambda x: x.nonzero(), lambda x: x.masked_select(x > 3)])
def test_the_watch_sees_what_it_refuses(bad):
    x = torch.arange(8)
    with pytest.raises(AssertionError), Watch():
        bad(x)


@every_mixture_too
def test_make_never_synchronises_on_cuda(name):
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    hp = settings(name, T, batch_size=8)
    x, g, entry = clean_windows(hp, 8).cuda(), generator("w", "cuda"), find_objective(hp)
    torch.cuda.set_sync_debug_mode("error")
    try:
        entry["make"](x, g, hp)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name, T, changes", [
    ("span", 64, dict(span_rate=0.9)),
    ("span", 3000, dict(span_mean=1.0)), ("ul2", 32, dict(batch_size=3)),
    ("bart", 64, dict(bart_noise="mask,mask")), ("bart", 64, dict(bart_noise="hide")),
    ("nsp", 32, dict(batch_size=1)), ("contrastive", 32, dict(batch_size=1)), ("hybrid", 32, dict(hybrid_ratio=0.01)),
    ("hybrid", 32, dict(mask_rate=1.0)), ("clm:9,mlm:1", 32, {}), ("clm,nsp", 32, dict(batch_size=2))])
def test_rows_that_cannot_be_are_refused_in_one_line(name, T, changes, capsys):
    with pytest.raises(SystemExit) as e:
        find_objective(settings(name, T, **changes))
    err = capsys.readouterr().err
    assert e.value.code == 2
    assert err.count("\n") == 1 and "Try" in err


# ---- generic: nothing gives a target away

@every
def test_no_position_reads_its_target(name):
    """Byte by byte: where its change moves a target, no input moves that the target's position sees. In rows that are
    read both ways to their end this holds of what MASK hides; in the others position i predicts id i + 1."""
    hp, entry = settings(name, T), OBJECTIVES[name]
    x = clean_windows(hp, 4)
    batch = entry["make"](x, generator("byte"), hp)
    if "tgt" not in batch:
        pytest.skip("predicts no ids")
    P, k, told = prefixes(batch)[:, None], torch.arange(T), batch["tgt"] != IGNORE
    shift = (entry["fills"](hp) or [0])[-1]
    follows = told & (P < T)
    assert torch.equal(batch["tgt"][:, :-1][follows[:, :-1]], batch["inp"][:, 1:][follows[:, :-1]])
    assert not (follows & (k < P - 1)).any(), "a target is inside the prefix"
    asked = follows | told & F.pad(batch["inp"] == MASK, (0, shift))[:, shift:]
    seen = allow(k[:, None], k, P[..., None])                   # (4, T, T)
    if not entry["hides"]:
        seen &= k >= P[..., None]
    moved = torch.zeros(4, T, dtype=torch.bool)
    for j in range(x.size(1)):
        other = x.clone()
        other[:, j] = x[:, j] % 255 + 1
        again = entry["make"](other, generator("byte"), hp)
        target, shown = asked & (again["tgt"] != batch["tgt"]), again["inp"] != batch["inp"]
        assert not (target[..., None] & seen & shown[:, None]).any(), f"byte {j} is asked for and seen"
        moved |= target
    assert moved.any(1).all(), "a row asks for no byte"


def one_too_long(x, g, hp):
    batch = O.prefix_lm(x, g, hp)
    return batch | {"mask": batch["mask"] + 1}


@pytest.mark.parametrize("name, wrong", [
    ("bart", dict(hides=True)), ("prefix", dict(make=one_too_long))], ids=["a source that shows", "a prefix too long"])
def test_a_target_that_is_read_would_be_noticed(name, wrong, forks):
    OBJECTIVES[name] = OBJECTIVES[name] | wrong
    with pytest.raises(AssertionError, match="and seen|inside"):
        test_no_position_reads_its_target(name)


@pytest.mark.parametrize("name", [name for name, entry in OBJECTIVES.items() if entry["packs"]])
def test_document_masks_keep_documents_apart(name):
    """The loss on the second document does not depend on the first one's bytes, but does without the mask."""
    entry, net, batch, hp = case(name)
    doc = (torch.arange(T) >= 20).long().expand(4, T)
    for k in {"tgt", "tgt_far"} & set(batch):
        batch[k] = batch[k].clone()
        batch[k][:, :20] = IGNORE
    other = dict(batch, inp=torch.where(doc == 0, batch["inp"] % 255 + 1, batch["inp"]))
    masked, free = [], []
    for b in (batch, other):
        masked.append(entry["loss"](net, b | {"doc": doc}, hp))
        free.append(entry["loss"](net, b, hp))
    assert masked[0] == masked[1]
    assert all(s != free[1][term] for term, s in free[0].items() if s)


# ---- generic: terms and losses

COEFFICIENTS = {
    "mtp": {"nll": 1, "head2": 0.1, "head3": 0.1, "head4": 0.1}, "sedd": {"bound": 1},
    "electra": {"generator": 1, "discriminator": 50, "auc": 0, "replaced": 0},
    "nsp": {"nll": 1, "nsp": 1, "accuracy": 0},
    "contrastive": {"info": 1, "top1": 0}, "mdlm": {"bound": 1}, "rotation": {"seam": 1, "accuracy": 0},
    "hybrid": {"masked": 0.25, "causal": 0.75}}
COSTLY = {"electra": {"auc", "replaced"}, "nsp": {"accuracy"}}


@every
def test_terms_are_all_that_the_loss_returns_and_training_pays_for_no_figure(name):
    entry, net, batch, hp = case(name, B=8)
    weights = {term: c for term, (_, c) in entry["terms"](batch, hp).items()}
    training = set(entry["loss"](net, batch, hp))
    with torch.no_grad():
        assert set(entry["loss"](net, batch, hp)) == set(entry["terms"](batch, hp)) == set(weights)
    assert {term for term, c in weights.items() if c} <= training <= set(weights)
    assert not COSTLY.get(name, set()) & training
    if name in COEFFICIENTS or set(weights) == {"nll"}:         # a fork's own terms are its own affair
        assert weights == pytest.approx(COEFFICIENTS.get(name, {"nll": 1}))


@every_mixture_too
def test_micro_batches_add_up_to_the_batch(name):
    if name == "contrastive":
        pytest.skip("compares the rows of a micro-batch with each other, as its docstring says")
    entry, net, batch, hp = case(name, B=24, batch_size=8, accum=3)
    batches = [batch, *(train.micro_batch(batch, i, 3) for i in range(3))]
    sums = [entry["loss"](net, b, hp) for b in batches]
    terms = [entry["terms"](b, hp) for b in batches]
    for term, whole in sums[0].items():
        assert float(terms[0][term][0]) == sum(float(known[term][0]) for known in terms[1:])
        torch.testing.assert_close(whole, sum(s[term] for s in sums[1:]), rtol=1e-5, atol=1e-3)


BYTE_TERMS = "nll", "head2", "generator", "masked", "causal", "bound"
CHANCE = {"nsp": 2, "discriminator": 2, "seam": T}


@every
def test_an_untrained_model_is_at_chance(name):
    entry, _, batch, hp = case(name, B=8)
    net = Transformer(Sizes(2, 2, 16, n_outputs=entry["n_outputs"]))
    net.heads.update(entry["heads"](net.sizes, hp))
    sums, terms = entry["loss"](net, batch, hp), entry["terms"](batch, hp)
    chance = dict.fromkeys(BYTE_TERMS, entry["n_outputs"]) | CHANCE
    for term in chance.keys() & sums.keys():
        assert float(sums[term].detach() / terms[term][0]) == pytest.approx(math.log(chance[term]), abs=1e-5)


@every
def test_nats_equal_loops_over_positions_with_a_target(name):
    entry, net, batch, hp = case(name, B=8)
    sums = entry["loss"](net, batch, hp)
    if "nll" not in sums:
        pytest.skip("has terms, and so a test, of its own")
    logp = net.logits(net(batch["inp"], batch["mask"], at=batch.get("at"))).detach().double().log_softmax(-1)
    told = [(b, t) for b, t in itertools.product(range(8), range(T)) if batch["tgt"][b, t] != IGNORE]
    assert int(entry["terms"](batch, hp)["nll"][0]) == len(told)
    assert float(sums["nll"].detach()) == pytest.approx(-float(sum(logp[b, t, batch["tgt"][b, t]] for b, t in told)))


@every
def test_logits_of_all_positions_give_the_same_loss(name):
    """As on a GPU, where the number of positions with a target would have to be waited for."""
    entry, net, batch, hp = case(name)
    few = entry["loss"](net, batch, hp)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        patch.setattr(torch.Tensor, "nonzero", None)
        everywhere = entry["loss"](net, batch, hp)
    for term, x in few.items():
        torch.testing.assert_close(everywhere[term], x)


@every
def test_one_batch_can_be_learned_by_heart(name):
    entry, _, batch, hp = case(name, T=20, gen_scale=1.0, electra_weight=1.0)
    torch.manual_seed(1)
    net = Transformer(Sizes(1, 4, 64, n_outputs=entry["n_outputs"]))
    net.heads.update(entry["heads"](net.sizes, hp))
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(300):
        loss = total(entry, net, batch, hp)
        if float(loss.detach()) < 0.1:
            return
        opt.zero_grad()
        loss.backward()
        opt.step()
    raise AssertionError(f"still at {float(loss.detach()):.3f}")


# ---- entries

@every
def test_an_entry_says_all_that_is_asked_of_it(name):
    """It has every key, and what sample.py asks of its mode."""
    entry, (_, batch, hp) = OBJECTIVES[name], make(name)
    modes = {"continue": entry["continues"](hp), "fill": entry["fills"](hp) and entry["orders"],
             "infill": entry["ask"]([[97], [98]], 4, hp) and entry["ends"],
             "repair": not isinstance(batch["mask"], str)}
    assert set(entry) == {*USUAL, "name", "make", "help", "use", "mask"}
    assert entry["mode"] in sample.MODES
    assert modes.get(entry["mode"], entry["answer"]), "sample.py could not use it"
    assert (entry["bpb"] == "bound") == (entry["bounds"] is not None)


@pytest.mark.parametrize("mode", sample.MODES)
def test_an_entry_without_what_its_mode_asks_for_would_be_noticed(mode, forks):
    O.add("new", make=O.clm, help="", use="", mask="causal", mode=mode)
    with pytest.raises(AssertionError, match="could not"):
        test_an_entry_says_all_that_is_asked_of_it("new")


def test_add_refuses_what_nobody_reads_and_a_name_twice(forks):
    with pytest.raises(AssertionError, match="widow"):
        O.add("new", make=O.clm, help="", use="", mask="causal", widow=O.next_byte)
    with pytest.raises(AssertionError, match="there already"):
        O.add("clm", make=O.mlm, help="", use="", mask="causal")


@pytest.mark.parametrize("name", ["all_tokens", "recase"])
def test_the_readmes_objectives_pass_the_generic_tests(name, forks):
    with open(os.path.join(os.path.dirname(O.__file__), "README.md"), encoding="utf-8") as f:
        section = f.read().split("\n## Adding an objective\n")[1].split("\n## ")[0]
    OBJECTIVES.pop(name, None)                  # somebody has pasted it in
    OBJECTIVES.pop({"all_tokens": "recase", "recase": "all_tokens"}[name], None)
    for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        exec(block, dict(vars(O)))
    for test in GENERIC:
        with contextlib.suppress(pytest.skip.Exception):
            test(name)


# ---- building blocks

def test_pack_moves_what_is_kept_to_the_left():
    ids, keep = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[0, 1, 1, 0]]).bool()
    assert O.pack(ids, keep, 2).tolist() == [[2, 3]]
    assert O.pack(ids, keep, 5).tolist() == [[2, 3, PAD, PAD, PAD]]


def test_seq2seq_is_one_prefix_row():
    source, target, x = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[7, 8], [9, 10]]), IGNORE
    keep, keep_target = torch.tensor([[1, 0, 1], [1, 1, 1]]).bool(), torch.tensor([[1, 1], [1, 0]]).bool()
    batch = O.seq2seq(source, keep, target, keep_target, 8, mode=MODE_R)
    assert batch["inp"].tolist() == [[MODE_R, 1, 3, SEP, 7, 8, EOT, PAD], [MODE_R, 4, 5, 6, SEP, 9, EOT, PAD]]
    assert batch["tgt"].tolist() == [[x, x, x, 7, 8, EOT, x, x], [x, x, x, x, 9, EOT, x, x]]
    assert batch["mask"].tolist() == [4, 5]


def drawn(name, key, B, T=T, **changes):
    return make(name, B=B, T=T, **changes)[1][key]


EQUALLY_LIKELY = {  # how many kinds there are, and draws of them
    "placements of spans": (12, lambda: O.place_spans(4000, 6, 3, 2, generator("p"))[1]),
    "masked bytes": (15, lambda: drawn("mlm", "tgt", 4000, T=6, mask_rate=0.34) != IGNORE),
    "electra's bytes": (15, lambda: drawn("electra", "masked", 4000, T=6, mask_rate=0.34).sort(dim=1).values),
    "prefixes": (T // 2, lambda: drawn("prefix", "mask", 4000)),
    "cuts of ul2": (31, lambda: drawn("ul2", "mask", 4000, T=34)[2000:3000]),
    "pairs of crops": (121, lambda: O.contrastive(torch.arange(20).expand(6000, -1), generator("c"),
                                                  settings("contrastive", 20, crop=0.5))["inp"][:, :, 0]),
    "seams": (T, lambda: drawn("rotation", "labels", 4000))}


@pytest.mark.parametrize("kinds, draws", EQUALLY_LIKELY.values(), ids=EQUALLY_LIKELY)
def test_all_are_equally_likely(kinds, draws):
    _, seen = draws().unique(dim=0, return_counts=True)
    assert len(seen) == kinds
    assert chi2(seen, seen.double().mean()) < kinds + 6 * (2 * kinds) ** 0.5        # 6 standard deviations


# ---- clm, mlm

def check_clm(x, batch):
    assert torch.equal(batch["inp"], x[:, :-1])
    assert torch.equal(batch["tgt"], x[:, 1:])


def test_clm_shifts_once():
    x, batch, _ = make("clm")
    check_clm(x, batch)
    assert batch["mask"] == "causal"


def check_mlm(x, batch, k, mask=0.8, left=0.1 + 0.1 / 255):
    chosen = batch["tgt"] != IGNORE
    assert (chosen.sum(1) == k).all()
    assert torch.equal(batch["tgt"][chosen], x[chosen])
    assert torch.equal(batch["inp"][~chosen], x[~chosen])
    changed = batch["inp"][chosen]
    assert ((changed == MASK) | ((changed >= 1) & (changed < 256))).all(), "a random byte is a special id"
    n = len(changed)
    for share, seen in ((mask, changed == MASK), (left, changed == x[chosen])):
        assert abs(float(seen.float().mean()) - share) < 5 * (share * (1 - share) / n) ** 0.5


@pytest.mark.parametrize("rate, k", [(0.15, 7), (0.33, 16), (1.0, T), (0.001, 1)])
def test_mlm_masks_exact_counts_80_10_10(rate, k):
    x, batch, _ = make("mlm", B=2000, mask_rate=rate)
    check_mlm(x, batch, k)


# ---- prefix

@pytest.mark.parametrize("share, longest", [(0.0, 1), (0.75, 36), (1.0, T - 1)])
def test_prefix_has_loss_on_the_suffix_alone(share, longest):
    x, batch, _ = make("prefix", B=500, prefix_max=share)
    told, P = batch["tgt"] != IGNORE, batch["mask"]
    assert torch.equal(told, torch.arange(T) >= P[:, None] - 1)
    assert torch.equal(batch["tgt"][told], x[:, 1:][told])
    assert (int(P.min()), int(P.max())) == (1, longest)


# ---- span

def all_parts(batch):  # seq2seq rows -> [(source ids, target ids without EOT)]
    rows = []
    for z, tgt, P in zip(batch["inp"].tolist(), batch["tgt"].tolist(), batch["mask"].tolist()):
        told = [t for t in tgt if t != IGNORE]
        assert z[P - 1] == SEP and SEP not in z[:P - 1]
        assert told == [*z[P:P - 1 + len(told)], EOT]
        rows.append((z[:P - 1], told[:-1]))
    return rows


def spliced(source, target):  # sentinels of the source replaced by their spans -> bytes, span lengths
    spans = {}
    for t in target:
        if t >= SENTINEL:
            assert t == SENTINEL + len(spans), "sentinels must ascend"
            span = spans[t] = []
        else:
            span.append(t)
    assert [i for i in source if i >= SENTINEL] == list(spans)
    return [j for i in source for j in spans.get(i, [i])], [len(s) for s in spans.values()]


@pytest.mark.parametrize("T, mean, rate, want", [
    (1023, 3, 0.15, (929, 139, 46)), (1023, 20, 0.15, (1006, 151, 8)), (1023, 3, 0.5, (766, 383, 128)),
    (1023, 64, 0.5, (1006, 503, 8)), (255, 20, 0.15, (250, 38, 2))])
def test_span_rows_hold_as_many_bytes_as_fit(T, mean, rate, want):
    assert O.fit_spans(T, rate, mean) == want


@pytest.mark.parametrize("T, rate, mean", [
    (48, 0.15, 3), (64, 0.15, 20), (100, 0.5, 2), (33, 0.9, 9)])
def test_span_rows_can_be_put_together_again(T, rate, mean):
    x, batch, _ = make("span", B=400, T=T, span_rate=rate, span_mean=mean)
    (_, N, S), sizes, cut = O.fit_spans(T, rate, mean), [], 0
    for row, (source, target) in zip(x.tolist(), all_parts(batch)):
        raw, lengths = spliced(source, target)
        sizes.append(len(raw))
        cut += len(raw) < len(row) and source[-1] >= SENTINEL
        assert raw == row[:len(raw)], "the row cannot be put together again"
        assert min(lengths) > 0 and sum(lengths) <= N
        assert len(raw) < len(row) or len(lengths) == S and sum(lengths) == N
        assert not any(i >= SENTINEL and j >= SENTINEL for i, j in zip(source, source[1:])), "two spans touch"
    short = [size for size in sizes if size < x.size(1)]
    assert 20 < len(short) < 80 and min(short) >= 8 and len(set(short)) > 10, "one row in eight is short"
    assert 0 < cut < len(short), "in a span or after it"


@every
def test_positions_are_what_sampling_will_say(name):
    _, batch, _ = make(name, B=64)
    said = OBJECTIVES[name]["positions"](batch["inp"], batch["mask"])
    assert said is None if "at" not in batch else torch.equal(batch["at"], said)


@pytest.mark.parametrize("name", ["span", "ul2"])
def test_spans_stand_where_their_hole_is(name):
    _, batch, _ = make(name, B=40, T=100)
    for z, P, at in zip(batch["inp"].tolist(), batch["mask"].tolist(), batch["at"].tolist()):
        place, here, room = {}, -1, 64 if z[0] == MODE_X else 8
        for i in range(P):
            here += 1 + (room if i and z[i - 1] >= SENTINEL else 0)         # room after a sentinel
            assert at[i] == here
            place |= {z[i]: here} if z[i] >= SENTINEL else {}
        for i in range(P, len(z)):
            here = place[z[i]] if z[i] >= SENTINEL else here + 1
            assert at[i] == here
    assert (batch["at"] != torch.arange(100)).any(1).sum() >= 30, "all rows but those of S"


# ---- ul2

def test_ul2_rows_are_what_their_mode_says():
    T = 100
    x, batch, _ = make("ul2", B=160, T=T)
    modes, tail, short = batch["inp"][:, 0].tolist(), [], {MODE_R: 0, MODE_X: 0}
    assert modes == [MODE_R] * 80 + [MODE_S] * 40 + [MODE_X] * 40
    for row, mode, (source, target) in zip(x.tolist(), modes, all_parts(batch)):
        if mode == MODE_S:
            assert source[1:] + target == row[:98] and 1 <= len(source) - 1 <= 97
            continue
        n, N, S = O.fit_spans(T, *((0.3, 6) if mode == MODE_R else (0.5, 32)), extra=1)
        raw, lengths = spliced(source[1:], target)
        assert raw == row[:len(raw)] and len(raw) <= n
        assert len(raw) < n or len(lengths) == S and sum(lengths) == N
        short[mode] += len(raw) < n
        tail.append(source[-1] >= SENTINEL)
    assert not all(tail[80:]), "one long span would be a suffix, as in S"
    assert 0 < short[MODE_R] < 40 and 0 < short[MODE_X] < 20


# ---- fim

def fim_rows(B=2000, **changes):
    x, batch, _ = make("fim", B=B, T=33, **changes)
    assert torch.equal(batch["inp"][:, 1:], batch["tgt"][:, :-1])
    return x, torch.cat((batch["inp"], batch["tgt"][:, -1:]), dim=1)


def psm(row):  # -> prefix, suffix, middle, what follows EOT
    s, m, e = row.index(SUF), row.index(MID), row.index(EOT)
    assert row[0] == PRE and sum(i >= 256 for i in row) == 3
    return row[1:s], row[s + 1:m], row[m + 1:e], row[e + 1:]


def test_fim_psm_can_be_put_together_again_and_has_thirds():
    x, z = fim_rows(fim_rate=1.0, fim_spm_rate=0.0)
    n, sizes = x.size(1) - 4, []
    for raw, other, row in zip(x.tolist(), x.roll(1, 0).tolist(), z.tolist()):
        prefix, suffix, middle, after = psm(row)
        text = prefix + middle + suffix
        assert text == raw[:len(text)]
        assert after == other[len(text):n], "another row's text follows EOT"
        sizes.append((len(prefix), len(middle), len(suffix)))
    sizes = torch.tensor(sizes, dtype=torch.float)
    used = sizes.sum(1)
    assert abs(float((used == n).float().mean()) - 0.5 - 0.5 / n) < 0.04
    assert len(used.unique()) == n, "the place of EOT gives it away"
    assert ((sizes.sum(0) / used.sum() - 1 / 3).abs() < 0.03).all(), "sections are not thirds"
    assert (sizes == 0).any(0).all(), "each may be empty"


def test_fim_spm_is_the_papers_second_variant():
    """With the same cuts, the bytes of PSM in another order; and a middle is asked for as in training."""
    (_, first), (_, second) = (fim_rows(200, fim_rate=1.0, fim_spm_rate=rate) for rate in (0.0, 1.0))
    for row, spm in zip(first.tolist(), second.tolist()):
        n, (prefix, suffix, middle, after) = row.index(MID) + 1, psm(row)
        assert spm == [PRE, SUF, *suffix, MID, *prefix, *middle, EOT, *after]
        assert O.fim_ask([prefix, suffix], 4, settings("fim", 33, fim_spm_rate=0.0)) == (row[:n], 0)
        assert O.fim_ask([prefix, suffix], 4, settings("fim", 33)) == (spm[:n], 0)


def test_fim_rates_are_shares_of_rows():
    x, z = fim_rows()
    moved = (z == MID).any(1)
    assert abs(float(moved.float().mean()) - 0.5) < 5 * 0.5 / 2000 ** 0.5
    assert torch.equal(z[~moved], x[~moved])
    assert 0.45 < float((z[moved][:, 1] == SUF).float().mean()) < 0.62      # PSM with an empty prefix too


def test_fim_of_one_row_has_no_text_after_its_end():
    for seed in range(10):
        x, z = fim_rows(B=1, seed=seed, fim_rate=1.0, fim_spm_rate=0.0)
        prefix, suffix, middle, after = psm(z[0].tolist())
        assert after == [] and prefix + middle + suffix == x[0, :-4].tolist(), "its own text follows EOT"


# ---- mtp

def test_mtp_heads_start_as_the_identity():
    hp = settings("mtp", 8)
    net, h = Transformer(Sizes(2, 2, 16)), torch.randn(3, 16, generator=generator("h"))
    net.heads.update(O.mtp_heads(net.sizes, hp))
    assert torch.equal(O.mtp_ahead(net, h), O.norm(h)[:, None].expand(3, 3, 16))


def test_mtp_loss_is_the_weighed_sum_of_separate_heads():
    x, _, _ = make("mtp")
    entry, net, batch, hp = case("mtp")
    h = net(x[:, :T], "causal")
    want = F.cross_entropy(net.logits(h).mT, x[:, 1:T + 1])
    for k, W in enumerate(net.heads["mtp"].weight, start=2):
        want = want + 0.1 * F.cross_entropy(net.logits(O.norm(h + h @ W.T)).mT, x[:, k:T + k])
    torch.testing.assert_close(total(entry, net, batch, hp), want)


def sequential():
    _, net, batch, hp = case("mtp", B=1, mtp_kind="sequential")
    return make("mtp", B=1)[0], batch, hp, net


def test_the_loss_of_sequential_modules_is_that_of_the_papers_equations():
    """h^k_i = block(M_k [norm(h^(k-1)_i); norm(embed(t_(i+k)))]), p(t_(i+k+1)) = head(norm(h^k_i))."""
    x, batch, hp, net = sequential()
    h, sums = net(batch["inp"], "causal"), O.mtp_loss(net, batch, hp)
    for k, block in enumerate(net.heads["mtp"]["blocks"], 1):
        joined = torch.cat((O.norm(h), O.norm(net.embed(x[:, k:T + k]))), dim=-1) @ block.join.weight[0].T
        h = O.norm(O.run_blocks([block], joined, net.sizes, "causal"))
        want = F.cross_entropy(net.logits(h).mT, x[:, k + 1:T + k + 1], reduction="sum")
        torch.testing.assert_close(sums[f"head{k + 1}"], want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", ["parallel", "sequential"])
def test_all_bytes_but_the_next_weigh_mtp_weight_together(kind):
    for n, weight in ((2, 0.3), (4, 0.3), (8, 3.0)):
        _, batch, hp = make("mtp", mtp_heads=n, mtp_kind=kind, mtp_weight=weight)
        first, *others = [c for _, c in O.mtp_terms(batch, hp).values()]
        assert first == 1 and others == pytest.approx([weight / (n - 1)] * (n - 1))


@pytest.mark.parametrize("kind", ["parallel", "sequential"])
def test_one_head_of_either_kind_is_clm(kind):
    x, batch, hp = make("mtp", mtp_heads=1, mtp_kind=kind)
    net = randomized()
    assert O.mtp_heads(net.sizes, hp) == {} and O.mtp_drafter(net, hp) is None
    assert set(O.mtp_terms(batch, hp)) == {"nll"}
    clm = O.token_loss(net, O.clm(x, None, hp), hp)
    torch.testing.assert_close(O.mtp_loss(net, batch, hp)["nll"], clm["nll"])


def uncached_drafts(net, ids, n):  # module after module over the whole text -> drafts, logits
    h, ids, logits = net(torch.tensor([ids[:-1]]), "causal"), list(ids), []
    N = len(ids) - 1
    for k in range(n - 1):
        h = O.deeper(net, net.heads["mtp"]["blocks"][k], h, torch.tensor([ids[k + 1:N + k + 1]]))
        logits.append(net.logits(h)[0, -1, :256])
        ids.append(int(logits[-1].argmax()))
    return ids[N + 1:], torch.stack(logits)


def test_cached_drafts_equal_uncached_ones_whatever_was_kept_of_those_before():
    _, _, hp, net = sequential()
    net.requires_grad_(False)
    text, drafter = clean_windows(hp, 1)[0].tolist(), O.mtp_drafter(net, hp)
    drafter.restart()
    at = 0
    for grown in (5, 1, 4, 2, 1, 9):
        h = net(torch.tensor([text[:at + grown]]), "causal")[0, at:]
        at += grown
        drafts, q = drafter.draft(h, text[:at + 1], lambda z: ([int(z[0, :256].argmax())], z[:, :256]))
        want, logits = uncached_drafts(net, text[:at + 1], 4)
        assert drafts == want
        torch.testing.assert_close(q, logits, rtol=1e-4, atol=1e-4)
        text[at + 1:at + 1 + len(drafts[:grown % 3])] = drafts[:grown % 3]          # some drafts come true


# ---- electra

def says(logits):  # a generator with the given logits
    net = torch.nn.Module()
    net.forward, net.logits = lambda idx, mask: logits, lambda h: h
    return net


@torch.no_grad()
@pytest.mark.parametrize("right", [torch.tensor(True), torch.arange(T) % 2 == 0])
def test_electra_labels_what_differs_and_reports_it(right):
    """right: which bytes the generator guesses; those count as original."""
    entry, net, batch, hp = case("electra", B=6)
    x, _, _ = make("electra", B=6)
    said = torch.where(right, x, x % 255 + 1)
    net.heads["generator"] = says(F.one_hot(said, 256) * 200.0)
    row = x.scatter(1, batch["masked"], said.gather(1, batch["masked"]))
    labels, scores = (row != x).float(), net.heads["replaced"](net(row, "bidirectional"))[..., 0]
    sums, terms = entry["loss"](net, batch, hp), entry["terms"](batch, hp)
    mean = {term: float(sums[term]) / count for term, (count, _) in terms.items()}
    assert mean["discriminator"] == pytest.approx(float(F.binary_cross_entropy_with_logits(scores, labels)))
    assert mean["replaced"] == pytest.approx(float(labels.mean()))
    assert mean["auc"] == pytest.approx(float(O.auc(scores.flatten(), labels.flatten())))


@pytest.mark.parametrize("rate, k", [(0.15, 7), (0.001, 1)])
def test_electra_masks_85_percent_of_an_exact_number(rate, k):
    x, batch, _ = make("electra", B=3000, mask_rate=rate)
    check_mlm(x, batch, k, mask=0.85, left=0.15)
    assert torch.equal(batch["tgt"].gather(1, batch["masked"]), x.gather(1, batch["masked"]))
    masked, u = batch["inp"].gather(1, batch["masked"]) == MASK, batch["u"]
    assert u[masked].max() > 0.99 and u[~masked].min() < 0.1, "the masks' own numbers"
    assert abs(float(u.mean()) - 0.5) < 0.05


@pytest.mark.parametrize("sizes, want", [((12, 12, 768), (3, 192)), ((2, 6, 60), (2, 16))])
def test_a_generator_has_heads_of_the_trunks_width(sizes, want):
    small = O.electra_sizes(Sizes(*sizes), settings("electra", 8))
    assert (small.n_layer, small.n_head, small.n_embd) == (sizes[0], *want)


def test_electra_is_two_models_whose_gradients_stay_on_their_side():
    entry, net, batch, hp = case("electra", B=6)
    sums, small = entry["loss"](net, batch, hp), net.heads["generator"]
    want = O.nats(small.logits(small(batch["inp"], "bidirectional")), batch["tgt"])
    torch.testing.assert_close(sums["generator"], want)
    trunk = [net.embed.weight, *net.blocks.parameters()]
    sides = {"generator": list(small.parameters()), "discriminator": trunk}
    for term, side in itertools.product(sides, sides):
        grads = torch.autograd.grad(sums[term], sides[side], retain_graph=True, allow_unused=True)
        assert any(g is not None and g.abs().max() > 0 for g in grads) == (term == side)


def test_electra_samples_follow_the_generator():
    p, x = torch.tensor([0.4, 0.3, 0.2, 0.1]), torch.full((2000, 8), 65)
    four = torch.full((2000, 8, 512), -60.0)
    four[..., 65:69] = p.log()
    _, clean, fake = O.electra_fakes(says(four), O.electra(x, generator("e"), settings("electra", 8, mask_rate=0.15)))
    assert fake.shape == (2000, 1) and (clean == 65).all()
    assert chi2(torch.bincount(fake[:, 0], minlength=69)[65:], 2000 * p) < 25       # 3 degrees of freedom


def test_auc_is_the_chance_of_the_right_order():
    scores = torch.randint(0, 6, (60,), generator=generator("s")).float()
    labels = torch.randint(0, 2, (60,), generator=generator("l"))
    ones, zeros = scores[labels == 1][:, None], scores[labels == 0]
    want = (ones > zeros).double().mean() + 0.5 * (ones == zeros).double().mean()
    assert float(O.auc(scores, labels)) == pytest.approx(float(want))
    assert float(O.auc(torch.zeros(60), labels)) == 0.5
    assert float(O.auc(scores, torch.zeros(60))) == 0.5, "one of the two is missing"


# ---- bart

def bart_case(noise, B=100, T=129, rate=0.3, text=None):  # -> [(clean text, source)] of each row
    hp = settings("bart", T, bart_noise=noise, bart_rate=rate, batch_size=B)
    x = clean_windows(hp, B)
    L = x.size(1)
    if text is not None:
        x = torch.tensor(list(text * (1 + (B + T) // len(text)))).unfold(0, L, 1)[:B]
    split = all_parts(O.bart(x, generator("bart"), hp))
    assert all(t == row[:len(t)] for (_, t), row in zip(split, x.tolist())), "the target is the clean text"
    assert all(len(s) <= len(t) for s, t in split)
    used = [len(t) for _, t in split]
    if L >= 20:
        assert 0.25 < used.count(L) / B < 0.75, "the place of EOT gives it away"
        assert len(set(used)) > 12 and min(used) >= 8
    return [(t, s) for s, t in split]


def test_barts_target_counts_its_positions_as_its_source_does():
    _, batch, _ = make("bart", B=40, T=100)
    for P, at in zip(batch["mask"].tolist(), batch["at"].tolist()):
        assert at == [*range(P - 1), *range(-1, 100 - P)]


@pytest.mark.parametrize("rate", [0.3, 0.001])
@pytest.mark.parametrize("noise", ["mask", "delete", "replace", "mask,delete,replace"])
def test_bart_strikes_exact_numbers_and_shares_its_rate(noise, rate, monkeypatch):
    monkeypatch.setattr(O, "bart_counts", all_that_bart_strikes)
    noises, changed, most = noise.split(","), 0, 0
    for row, source in bart_case(noise, rate=rate):
        k = max(1, int(rate / len(noises) * len(row) + 0.5001))
        assert source.count(MASK) == k * ("mask" in noises)
        assert len(row) - len(source) == k * ("delete" in noises)
        assert min(source) > 0 and max(source) <= MASK
        if noise == "delete":
            rest = iter(row)
            assert all(i in rest for i in source), "the others stay in order"
        elif "delete" not in noises:
            differ = sum(a != b for a, b in zip(source, row))
            changed, most = changed + differ, most + k
            assert differ <= k
    assert abs(changed - most * 254 / 255) <= 0.01 * most       # a random byte may be the old one


def all_that_bart_strikes(m, hp, g):
    noises = {"mask", "delete", "infill", "replace"} & set(hp.bart_noise.split(","))
    return (m * hp.bart_rate / len(noises) + 0.5).long().clamp(min=1)


@pytest.mark.parametrize("noise, rate, most", [
    ("infill", 0.3, 30), ("infill,replace", 0.3, 15), ("mask,delete,permute", 0.3, 15), ("mask", 0.001, 1)])
def test_of_barts_rows_some_are_struck_little_some_much(noise, rate, most):
    k = O.bart_counts(torch.full((3000, 1), 100), settings("bart", T, bart_noise=noise, bart_rate=rate), generator("k"))
    seen = torch.bincount(k[:, 0], minlength=most + 1)
    assert seen[0] == 0 and len(seen) == most + 1 and k.shape == (3000, 1)
    assert chi2(seen[1:].double(), 3000 / most) < most + 5 * (2 * most) ** 0.5


def test_bart_noises_follow_in_one_order():
    a, b = (make("bart", bart_noise=noise)[1] for noise in ("permute,infill,delete", "delete,permute,infill"))
    assert same(a, b)


def test_bart_infills_exactly_its_rate_with_poisson_spans():
    keep, start, used = O.place_infills(
        torch.ones(2000, 200, dtype=torch.bool), torch.full((2000, 1), 60), 68, 3.0, generator("i"))
    gone = ~keep
    assert (gone.sum(1) == 60).all() and (used.sum(1) <= 60).all()
    third = gone.float().mean(0)[:198].view(3, 66).mean(1)
    assert ((third - 0.3).abs() < 0.01).all(), f"thirds are struck unequally: {third.tolist()}"
    edges = gone.float().mean(0)[[0, -1]]
    assert edges.min() > 0.08 and abs(float(edges[0] - edges[1])) < 0.03
    lengths = []
    for b in range(500):                        # lengths from the next start, or from the end of the noise
        at, row = sorted(start[b][used[b]].tolist()), gone[b].tolist()
        for s, following in zip(at, at[1:] + [200]):
            lengths.append(len([*itertools.takewhile(bool, row[s:following])]))
    share = torch.bincount(torch.tensor(lengths), minlength=9)[:9].double() / len(lengths)
    want = torch.tensor([math.exp(-3) * 3 ** j / math.factorial(j) for j in range(9)], dtype=torch.double)
    assert (share - want).abs().max() < 0.02    # a row's last span is cut to fit, which moves them a little


def test_bart_infilled_text_fits_its_holes(monkeypatch):
    text = b"The quick brown fox jumps over the lazy dog and runs away again from it. "
    monkeypatch.setattr(O, "bart_counts", all_that_bart_strikes)
    for row, source in bart_case("infill", text=text):
        pattern = b"".join(b"(.*?)" if i == MASK else re.escape(bytes([i])) for i in source)
        holes = re.fullmatch(pattern, bytes(row), re.DOTALL).groups()
        assert sum(map(len, holes)) == int(0.3 * len(row) + 0.5)


def test_bart_permutes_whole_sentences():
    text = b"One. Two is here! Three?\nFour has no stop\nFive, e.g. this one, is longer. Six. "
    rows = bart_case("permute", text=text)
    assert all(sorted(source) == sorted(row) for row, source in rows)
    assert sum(source != row for row, source in rows) > 60
    x = torch.tensor(list(text)).expand(300, -1)
    order, _ = O.permute(x, torch.ones_like(x, dtype=torch.bool), None, generator("o"), None)
    assert len({bytes(row) for row in order.tolist()}) > 250
    sentences = r"(?s).*?(?:\n|[.?!][ \t\r\x0b\x0c]|\Z)"
    for row in order.tolist():
        assert sorted(re.findall(sentences, bytes(row).decode())) == sorted(re.findall(sentences, text.decode()))


def test_bart_rotates():
    rows = bart_case("rotate")
    turns = [next(r for r in range(1, len(row)) if source == row[r:] + row[:r]) for row, source in rows]
    assert len(set(turns)) > 20
    assert 0.3 < sum(r / len(row) for r, (row, _) in zip(turns, rows)) / len(rows) < 0.7


@pytest.mark.parametrize("noise", [
    "mask,delete,infill,permute,rotate,replace", "infill,rotate", "infill,delete"])
@pytest.mark.parametrize("T, rate", [(17, 0.3), (48, 0.9), (130, 0.05)])
def test_bart_noises_combine_at_any_size(noise, T, rate):
    bart_case(noise, T=T, rate=rate)


# ---- nsp

def clean_row(batch):
    return torch.where(batch["tgt"] == IGNORE, batch["inp"], batch["tgt"])


@pytest.mark.parametrize("B", [2, 3, 40])
@pytest.mark.parametrize("negatives", ["random", "swap"])
def test_nsp_is_half_true_and_its_classes_look_alike(negatives, B):
    data, h = torch.randint(1, 256, (20000,), generator=generator("nsp")), (T - 3) // 2
    hp, corpus = settings("nsp", T, nsp_negatives=negatives, batch_size=B), bytes(data.tolist())
    for seed in range(10):
        batch = O.nsp(data.unfold(0, 2 * h + O.GAP, 400)[:B], generator(f"{seed}"), hp)
        assert int(batch["labels"].sum()) == B - B // 2
        for label, row in zip(batch["labels"].tolist(), clean_row(batch).tolist()):
            a, b = row[1:h + 1], row[h + 2:2 * h + 2]
            assert row == [CLS, *a, SEP, *b, SEP] + [PAD] * (T - 2 * h - 3)
            i, j = corpus.find(bytes(a)), corpus.find(bytes(b))
            assert i >= 0 and j >= 0
            assert (j == i + h + O.GAP) == bool(label)
            assert label or (i == j + h + O.GAP if negatives == "swap" else abs(i - j) > 300)


@pytest.mark.parametrize("rate, k", [(0.15, 7), (0.001, 1)])
def test_nsp_masks_its_rate_in_both_texts(rate, k):
    _, batch, _ = make("nsp", B=1000, mask_rate=rate)
    check_mlm(clean_row(batch), batch, k)
    h, chosen = (T - 3) // 2, batch["tgt"] != IGNORE
    first, second = (int(chosen[:, a:a + h].sum()) for a in (1, h + 2))
    assert first + second == 1000 * k
    assert abs(first - second) < 5 * (first + second) ** 0.5, "5 standard deviations"


def test_nsp_reads_its_answer_at_cls():
    entry, net, batch, hp = case("nsp")
    follows = net.heads["nsp"](net(batch["inp"], "bidirectional")[:, 0])[:, 0]
    want = F.binary_cross_entropy_with_logits(follows, batch["labels"].float(), reduction="sum")
    torch.testing.assert_close(entry["loss"](net, batch, hp)["nsp"], want)


@pytest.mark.parametrize("name, head", [("nsp", "nsp"), ("rotation", "seam")])
@pytest.mark.parametrize("right", [True, False])
def test_accuracy_counts_what_is_right(name, head, right):
    entry, net, batch, hp = case(name)
    answer = 2 * batch["labels"] - 1 if name == "nsp" else F.one_hot(batch["labels"], T)
    answer = answer[..., None].float() * (1 if right else -1)
    net.heads[head].forward = lambda h: answer
    with torch.no_grad():
        accuracy = entry["loss"](net, batch, hp)["accuracy"]
    assert float(accuracy) / entry["terms"](batch, hp)["accuracy"][0] == right


# ---- contrastive

def test_contrastive_crops_are_pieces_of_their_window():
    x = torch.arange(1, 21).expand(400, -1) * torch.arange(1, 401)[:, None]
    inp = O.contrastive(x, generator("c"), settings("contrastive", 20, crop=0.5))["inp"]
    assert inp.shape == (400, 2, 10) and (inp.diff(dim=2) == torch.arange(1, 401)[:, None, None]).all()


def test_contrastive_equals_loops():
    entry, net, batch, hp = case("contrastive", B=5)
    a, b = (F.normalize(net(view, "bidirectional").mean(1), dim=-1) for view in batch["inp"].unbind(1))
    sim, want = (a @ b.T / hp.tau).tolist(), 0.0
    for side in (sim, [*zip(*sim)]):
        want += sum(math.log(sum(map(math.exp, row))) - row[i] for i, row in enumerate(side))
    sums = entry["loss"](net, batch, hp)
    assert float(sums["info"].detach()) == pytest.approx(want, rel=1e-4)
    right = sum(max(row) == row[i] for i, row in enumerate(sim))
    assert 0 < right < 5
    assert sums["top1"] == right
    assert {term: count for term, (count, _) in entry["terms"](batch, hp).items()} == {"info": 10, "top1": 5}


# ---- mdlm

def test_mdlm_masks_l_bytes_with_l_from_every_stratum():
    x, batch, hp = make("mdlm", B=16, T=64)
    masked = batch["tgt"] != IGNORE
    count = masked.sum(1)
    assert sorted(((count - 1) // 4).tolist()) == list(range(16)), "one l from each sixteenth of 1..64"
    torch.testing.assert_close(batch["weight"], 64 / count)
    assert (batch["inp"][masked] == MASK).all() and torch.equal(batch["tgt"][masked], x[masked])
    assert torch.equal(batch["inp"][~masked], x[~masked])


THREE = torch.tensor([[65, 66, 67]])
EACH_MASK = [torch.tensor([m]) for m in itertools.product([False, True], repeat=3) if any(m)]


def masked_logits(net, hidden):  # -> (3, 256)
    return net.logits(net(THREE.masked_fill(hidden, MASK), "bidirectional"))[0, :, :256]


def by_count(bounds, net):  # the mean over l of 3 / l times what l masked bytes cost
    mean = 0.0
    for hidden in EACH_MASK:
        inp, tgt = THREE.masked_fill(hidden, MASK), THREE.where(hidden, IGNORE)
        cost = float(bounds(net, dict(inp=inp, tgt=tgt, weight=torch.ones(1), mask="bidirectional"), None))
        mean += cost / math.comb(3, int(hidden.sum())) / int(hidden.sum())
    return mean


@torch.no_grad()
def test_mdlm_equals_the_integral_over_t():
    """The integral of t^(m-1) (1-t)^(L-m) is Beta(m, L-m+1), and the estimator's mean over many rows agrees."""
    net, exact, hp = randomized(), 0.0, settings("mdlm", 3)
    for hidden in EACH_MASK:
        m, logp = int(hidden.sum()), masked_logits(net, hidden).log_softmax(-1)
        nats = -float(logp.gather(1, THREE.T)[hidden[0]].sum())
        exact += nats * math.gamma(m) * math.gamma(4 - m) / math.gamma(4)
    assert by_count(O.mdlm_bounds, net) == pytest.approx(exact)
    batch = O.mdlm(THREE.expand(3000, -1), generator("m"), hp)
    assert float(O.mdlm_bounds(net, batch, hp).mean()) == pytest.approx(exact, rel=0.03)


# ---- sedd

@torch.no_grad()
def test_sedd_equals_its_authors_integral_over_t():
    """dsigma * (sum_y s_y - q log s_x + q (log q - 1)) at masked bytes, q = 1 / expm1(sigma), s = q c, where sigma is
    -log(1 - t) and each byte is masked with probability t."""
    net, authors, steps = randomized(), 0.0, 4000
    t = (torch.arange(steps, dtype=torch.double) + 0.5) / steps
    q, dsigma = 1 / torch.expm1(-torch.log1p(-t)), 1 / (1 - t)
    for hidden in EACH_MASK:
        m, c = int(hidden.sum()), masked_logits(net, hidden).double().exp() / 256
        for i in hidden[0].nonzero().flatten().tolist():
            s = q[:, None] * c[i]
            cost = s.sum(1) - q * s[:, int(THREE[0, i])].log() + q * (q.log() - 1)
            authors += float((t ** m * (1 - t) ** (3 - m) * dsigma * cost).mean())
    assert by_count(O.sedd_bounds, net) == pytest.approx(authors, rel=1e-3)


def test_sedd_costs_nothing_where_nothing_is_masked():
    """Also where the ratios there overflow."""
    entry, net, batch, hp = case("sedd")
    logits, told = net.logits, (batch["tgt"] != IGNORE).flatten()[:, None]
    want = entry["loss"](net, batch, hp)["bound"]
    net.logits = lambda h: torch.where(told, logits(h), 1e3)
    with pytest.MonkeyPatch.context() as patch:                 # as on a GPU, which computes all positions
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        loss = entry["loss"](net, batch, hp)["bound"]
    torch.testing.assert_close(loss, want)
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())


# ---- rotation, hybrid

def test_rotation_can_be_rolled_back():
    x, batch, _ = make("rotation", B=50)
    for row, inp, label in zip(x, batch["inp"], batch["labels"].tolist()):
        assert torch.equal(inp.roll(-label), row)


def test_hybrid_rows_are_masked_or_causal():
    x, batch, _ = make("hybrid", B=400, hybrid_ratio=0.25)
    masked = batch["mask"] == T
    assert int(masked.sum()) == 100 and (batch["mask"][~masked] == 0).all()
    check_clm(x[~masked], {k: batch[k][~masked] for k in ("inp", "tgt")})
    tgt = F.pad(batch["tgt"][masked], (1, 0), value=IGNORE)     # position i - 1 predicts byte i
    assert (tgt[:, T] == IGNORE).all() and (tgt[:, 1] != IGNORE).any(), "any byte but the first"
    check_mlm(x[masked, :T], dict(inp=batch["inp"][masked], tgt=tgt[:, :T]), round(0.3 * T))


@pytest.mark.parametrize("B, ratio", [(8, 0.0), (8, 1.0), (3, 1 / 3), (5, 0.58), (75, 0.84), (100, 0.29)])
def test_hybrid_masks_the_whole_part_of_its_share_spread_evenly(B, ratio):
    """In float32 the product misses its integer for 75 rows and .84, in float64 for 100 and .29."""
    x, rows = torch.ones(B, 3, dtype=torch.long), int(B * ratio + 1e-6)
    masked = O.hybrid(x, generator("h"), settings("hybrid", 2, hybrid_ratio=ratio))["mask"] > 0
    assert int(masked.sum()) == rows
    assert ((masked.cumsum(0) - torch.arange(1, B + 1) * rows / B).abs() < 1).all()


@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
def test_hybrid_weighs_its_kinds_by_their_rows(ratio):
    entry, net, batch, hp = case("hybrid", B=8, hybrid_ratio=ratio)
    want = 0.0
    for mask, P, share in (("bidirectional", T, ratio), ("causal", 0, 1 - ratio)):
        rows = batch["mask"] == P
        if share:
            kind = dict(inp=batch["inp"][rows], tgt=batch["tgt"][rows], mask=mask)
            want += share * O.token_loss(net, kind, hp)["nll"] / O.count_targets(kind)
    torch.testing.assert_close(total(entry, net, batch, hp), want)


# ---- mixtures

@pytest.mark.parametrize("mixture, B, rows", [
    ("clm:3,mlm:1", 8, [6, 2]), ("clm:.5,mlm:.3,prefix:.2", 7, [4, 2, 1]), ("clm:2,mlm,nsp", 8, [4, 2, 2])])
def test_every_micro_batch_holds_fixed_rows_of_each_member(mixture, B, rows):
    x, batch, hp = make(mixture, B=3 * B, batch_size=B, accum=3)
    g, each = generator("corruption 0"), x.unflatten(0, (3, B)).split(rows, dim=1)
    members, middle = [m for _, m in find_objective(hp)["members"]], train.micro_batch(batch, 1, 3)
    for m, part, r in zip(members, each, rows):
        own = settings(m["name"], T, batch_size=r, accum=3)
        assert same(part_of(batch, m), m["make"](part.flatten(0, 1)[:, :m["n"]], g, own)), "its first n bytes"
        assert len(middle[f"{m['name']}.inp"]) == r
    assert torch.equal(middle["clm.inp"], x[B:B + rows[0], :T])


def test_a_mixtures_loss_is_its_members_weighed():
    entry, net, batch, hp = case("electra:3,nsp:1", B=8)
    weights = {term: c for term, (_, c) in entry["terms"](batch, hp).items()}
    assert weights == {"electra.generator": 0.75, "electra.discriminator": 37.5, "electra.auc": 0,
                       "electra.replaced": 0, "nsp.nll": 0.25, "nsp.nsp": 0.25, "nsp.accuracy": 0}
    assert entry["loss"](net, batch, hp).keys() == {term for term, c in weights.items() if c}
    assert net.heads.keys() == {"generator", "replaced", "nsp"}
    each = [w * total(m, net, part_of(batch, m), hp) for w, m in entry["members"]]
    torch.testing.assert_close(total(entry, net, batch, hp), sum(each))


@pytest.mark.parametrize("mixture, whole, packs", [
    ("clm,mlm", False, True), ("clm,fim:3", [False, True, True, True], False)])
def test_a_mixture_is_as_its_members_are(mixture, whole, packs):
    entry = find_objective(settings(mixture, T))
    assert torch.as_tensor(entry["whole"]).tolist() == whole
    assert entry["packs"] == packs
    assert entry["settings"].keys() == {flag for _, m in entry["members"] for flag in m["settings"]}


def test_the_targets_of_a_mixture_are_those_of_its_members():
    entry, _, batch, hp = case("clm,mlm,mdlm,rotation", B=8)
    masked = int((batch["mdlm.tgt"] != IGNORE).sum())           # whose loss is divided by all positions
    assert float(O.targets_of(entry, batch, hp)) == 2 * T + 2 * round(0.3 * T) + masked + 2


def test_a_mixture_with_heads_of_its_own_trains(text):
    hp = get_config([*TINY, "--objective", MIXTURES[1], "--batch_size", "8", "--accum", "2", "--max_iters", "4"])
    s = train.prepare(find_objective(hp), open_corpus([text]), hp)
    before = [p.detach().clone() for p in s.params]
    for step in range(4):
        train.set_step(s, step)
        train.training_step(s)
    assert int(s.first_bad) == -1
    assert not any(torch.equal(p, q) for p, q in zip(before, s.params)), "a parameter never moved"
    _, offset = s.where                         # nsp's rows alone have several candidates for a window
    assert (offset != offset[:, :1]).any(1).tolist() == [False, False, True, True, *[False] * 4] * 2


# ---- what is asked is laid out as in training

@every
def test_a_prompt_is_laid_out_as_in_training(name):
    x, batch, hp = make(name, B=8)
    mask, before, after = OBJECTIVES[name]["continues"](hp) or pytest.skip("continues nothing")
    laid = set()
    for row, inp, p in zip(x.tolist(), batch["inp"].tolist(), prefixes(batch).tolist()):
        if (mask == "causal") == (p in (0, T)):
            n = p or T                          # a causal row is a prompt to its end
            laid.add(inp[:n] == before + row[:n - len(before) - len(after)] + after)
    assert True in laid


A, Z = 97, 98
ASKED = [  # settings, bytes of a hole between A and Z, what is asked
    ("ul2", {}, 16, ([MODE_R, A, SENTINEL, Z, SENTINEL + 1, SEP, SENTINEL], 6)),
    ("ul2", {}, 17, ([MODE_X, A, SENTINEL, Z, SENTINEL + 1, SEP, SENTINEL], 6)),
    ("fim", dict(fim_spm_rate=0.01), 4, ([PRE, SUF, Z, MID, A], 0)),
    ("fim", dict(fim_rate=0.0), 4, None),
    ("bart", dict(bart_noise="mask,infill"), 3, ([A, MASK, Z, SEP, A], 4)),
    ("bart", dict(bart_noise="mask"), 3, ([A, MASK, MASK, MASK, Z, SEP, A], 6)),
    ("bart", dict(bart_noise="delete,permute,rotate,replace"), 3, None)]


@pytest.mark.parametrize("name, changes, m, want", ASKED)
def test_a_hole_is_asked_for_as_the_settings_trained_it(name, changes, m, want):
    assert OBJECTIVES[name]["ask"]([[A], [Z]], m, settings(name, T, **changes)) == want


@pytest.mark.parametrize("name, key, changes", [
    ("hybrid", "continues", dict(hybrid_ratio=1.0)), ("hybrid", "fills", dict(hybrid_ratio=0.0)),
    ("mlm", "continues", {}), ("clm", "fills", {})])
def test_what_was_never_trained_cannot_be_asked(name, key, changes):
    assert OBJECTIVES[name][key](settings(name, T, **changes)) is None


def test_spans_are_asked_for_as_in_training():
    """A source that does not end with a hole gets one more sentinel, before which the last answer ends."""
    _, batch, hp = make("span", B=100, T=64)
    endings = set()
    for source, target in all_parts(batch):
        holes = [i for i, id in enumerate(source) if id >= SENTINEL]
        pieces = [source[a + 1:b] for a, b in itertools.pairwise([-1, *holes, len(source)])]
        closing = [SENTINEL + len(holes)] if pieces[-1] else []
        assert O.span_ask(pieces, 4, hp) == (source + closing + [SEP, SENTINEL], len(source + closing) + 1)
        answers = [i for i in target if i >= SENTINEL] + closing
        for name in ("span", "ul2"):
            assert answers == [SENTINEL, *map(OBJECTIVES[name]["ends"], range(len(answers) - 1))]
        endings.add(len(closing))
    assert endings == {0, 1}


@pytest.mark.parametrize("noise", ["mask", "infill"])
def test_bart_is_asked_as_in_training(noise):
    """With one byte struck the source has one hole; the answer follows what is written of the left side."""
    _, batch, hp = make("bart", B=100, bart_noise=noise, bart_rate=0.001)
    for z, (source, target) in zip(batch["inp"].tolist(), all_parts(batch)):
        a = source.index(MASK)
        ids, P = O.bart_ask([source[:a], source[a + 1:]], 1, hp)
        assert P == len(source) + 1
        assert ids == z[:P + a] == source + [SEP] + target[:a]
    assert OBJECTIVES["bart"]["ends"](0) == OBJECTIVES["fim"]["ends"](0) == EOT
