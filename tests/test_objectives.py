"""Every objective is put through the generic tests; a new one is tested by being in OBJECTIVES.

The generic tests know no objective by name: what they may assume is a field of Objective.
"""
import contextlib
import dataclasses
import functools
import itertools
import math
import os
import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, NoWaiting, Recording, clean_windows, randomize, randomized, settings

import objectives as O
import run
import sample
import train
from data import CLS, EOT, MASK, MID, MODE_R, MODE_S, MODE_X, PAD, PRE, SENTINEL, SEP, SUF
from data import make_rng, open_corpus
from model import CONTEXT_WIDTH, ModelConfig, Transformer, can_attend
from objectives import IGNORE_INDEX, OBJECTIVES, Continue, Draft, Fill, Infill, Objective, Repair
from objectives import find_use, get_objective, member_batch, trained_use
from run import get_config

T = 48
MIXTURES = ["clm:0.5,mlm:0.5", "electra,nsp,hybrid:2"]          # of 8 rows: 4 and 4; 2, 2 and 4
GENERIC = []                                    # the tests that every objective passes, the README's too


def every(test, names=(*OBJECTIVES,)):
    GENERIC.append(test)
    return pytest.mark.parametrize("name", names)(test)


every_mixture_too = functools.partial(every, names=[*OBJECTIVES, *MIXTURES])


def run_generic_tests(name):
    for test in GENERIC:
        with contextlib.suppress(pytest.skip.Exception):
            test(name)


@pytest.fixture
def forks():  # what a test adds to OBJECTIVES is removed again
    known = dict(OBJECTIVES)
    yield
    OBJECTIVES.clear()
    OBJECTIVES.update(known)


def change(name, /, **fields):  # replaces fields of an objective; for tests with the fixture forks
    OBJECTIVES[name] = dataclasses.replace(OBJECTIVES[name], **fields)


def make(name, B=4, T=T, seed=0, **changes):  # -> x, batch, hp
    hp = settings(name, T, **{"batch_size": B} | changes)
    x = clean_windows(hp, B, seed)
    return x, get_objective(hp).corrupt(x, make_rng(f"corruption {seed}"), hp), hp


def case(name, B=4, **changes):  # -> objective, net with random parameters, batch, hp
    _, batch, hp = make(name, B, **changes)
    torch.manual_seed(0)
    objective = get_objective(hp)
    net = randomized(n_outputs=objective.n_outputs)
    net.heads.update({k: randomize(h, 1) for k, h in objective.heads(net.config, hp).items()})
    return objective, net, batch, hp


def untrained(objective, hp, n_layer=2, n_head=2, n_embd=16):  # -> net as it is before its first step
    torch.manual_seed(0)
    net = Transformer(ModelConfig(n_layer, n_head, n_embd, n_outputs=objective.n_outputs))
    net.heads.update(objective.heads(net.config, hp))
    return net


def prefixes(batch):  # -> (B,): how many positions of each row are read both ways
    return torch.as_tensor(batch["prefix"]).expand(len(batch["inp"]))


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)


def total(objective, net, batch, hp):
    return train.weighted_loss(objective.loss(net, batch, hp), objective.terms(batch, hp))


def chi2(seen, want):
    return float(((seen - want) ** 2 / want).sum())


# ---- generic: batches

@every_mixture_too
def test_a_batch_is_a_function_of_its_generator(name):
    hp = settings(name, T, batch_size=8)
    objective = get_objective(hp)
    x = clean_windows(hp, 8)
    copy = x.clone()
    batches = [objective.corrupt(x, make_rng(key), hp) for key in "aab"]
    assert torch.equal(x, copy), "the caller's windows were changed"
    assert same(batches[0], batches[1])
    assert same(batches[0], batches[2]) == (not objective.is_random)


@every
def test_no_row_is_longer_than_its_block(name):
    """What pack_left is given fits, EOT too: a window that is too long would lose the ends of full rows silently."""
    pack_left = O.pack_left

    def checked(ids, keep, width):
        assert keep.sum(1).max() <= width
        return pack_left(ids, keep, width)
    with mock.patch.object(O, "pack_left", checked):
        for size in (T, 64, 65, 66):
            make(name, B=8, T=size)


@every
def test_batches_have_constant_shapes_valid_ids_and_rows_first(name):
    shapes = set()
    for seed in range(8):
        _, batch, _ = make(name, seed=seed)
        shapes.add(str({k: v if isinstance(v, int) else (v.shape, v.dtype) for k, v in batch.items()}))
        assert all(k == "prefix" if isinstance(v, int) else v.size(0) == 4 for k, v in batch.items())
        assert batch["inp"].min() >= 0 and batch["inp"].max() < 512
        if "tgt" in batch:
            has_target = batch["tgt"] != IGNORE_INDEX
            assert batch["inp"].shape == has_target.shape == (4, T)
            assert has_target.any(1).all(), "a row without a target"
            assert batch["tgt"][has_target].min() >= 0 and batch["tgt"].max() < 512
    assert len(shapes) == 1


@every_mixture_too
def test_corrupt_never_waits_for_the_device_nor_loops_over_rows(name):
    counts = []
    for B in (8, 16):
        hp = settings(name, T, batch_size=B)
        x = clean_windows(hp, B)
        objective = get_objective(hp)
        with NoWaiting() as counter:
            objective.corrupt(x, make_rng("w"), hp)
        counts.append(counter.count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("bad", [lambda x: torch.tensor([1, 2]), lambda x: x[x > 3], lambda x: x.sum().item(),
                                 lambda x: x.nonzero(), lambda x: x.masked_select(x > 3)])
def test_what_waits_for_the_device_is_refused(bad):
    x = torch.arange(8)
    with pytest.raises(AssertionError, match="waits"), NoWaiting():
        bad(x)


@every_mixture_too
def test_corrupt_never_synchronises_on_cuda(name):
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    hp = settings(name, T, batch_size=8)
    x = clean_windows(hp, 8).cuda()
    g = make_rng("w", "cuda")
    objective = get_objective(hp)
    torch.cuda.set_sync_debug_mode("error")
    try:
        objective.corrupt(x, g, hp)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name, T, changes", [
    ("span", 64, dict(span_rate=0.9)), ("span", 64, dict(span_rate=0.15, span_mean=20.0)),
    ("span", 3000, dict(span_mean=1.0)), ("ul2", 32, dict(batch_size=3)),
    ("bart", 64, dict(bart_noise="mask,mask")), ("bart", 64, dict(bart_noise="hide")),
    ("nsp", 32, dict(batch_size=1)), ("contrastive", 32, dict(batch_size=1)), ("hybrid", 32, dict(hybrid_ratio=0.01)),
    ("hybrid", 32, dict(mask_rate=1.0)), ("clm:9,mlm:1", 32, {}), ("clm,nsp", 32, dict(batch_size=2))])
def test_impossible_rows_are_refused_in_one_line(name, T, changes, capsys):
    with pytest.raises(SystemExit) as e:
        get_objective(settings(name, T, **changes))
    err = capsys.readouterr().err
    assert e.value.code == 2
    assert err.count("\n") == 1 and "Try" in err


# ---- generic: no position reads its target

def hidden_targets(objective, batch, hp):
    """-> (B, T) bool each: targets that are the next id; other targets that the objective claims to hide; targets that
    are predicted where the input shows a byte. An objective may have a few of the last kind (BERT leaves a tenth of its
    targets as they are, and replaces a tenth). If they are most of its targets, or if its loss gives bits per byte, it
    claims to hide them, too, unless it says target_hidden=False."""
    inp = batch["inp"]
    tgt = batch["tgt"]
    has_target = tgt != IGNORE_INDEX
    if "mask" in batch:
        follows = has_target & (tgt == F.pad(inp[:, 1:], (0, 1)))
    else:
        follows = has_target & (prefixes(batch) < inp.size(1))[:, None]
    fills = trained_use(objective, Fill, hp)
    shift = fills.shift if fills else 0
    shows_byte = F.pad(inp < O.N_BYTES, (0, shift))[:, shift:]
    hidden = has_target & ~follows & ~shows_byte
    in_sight = has_target & ~follows & shows_byte
    hides_all = objective.bpb in ("loss", "bound") or 2 * in_sight.sum() > has_target.sum()
    if objective.target_hidden and hides_all:
        return follows, hidden | in_sight, torch.zeros_like(in_sight)
    return follows, hidden, in_sight


def reachable(batch):
    """-> (B, T, T) bool: which inputs a position's state depends on, through any number of blocks. A mask may allow q
    to read k and k to read j, though not q to read j; and a position's input holds the ids of its context."""
    k = torch.arange(batch["inp"].size(1))
    if "mask" not in batch:
        return can_attend(k[:, None], k, prefixes(batch)[:, None, None])
    reach = batch["mask"] | torch.eye(len(k), dtype=torch.bool)
    for _ in range(len(k).bit_length()):        # paths twice as long each time
        reach = reach.float() @ reach.float() > 0
    context = (k <= k[:, None]) & (k > k[:, None] - CONTEXT_WIDTH)
    return reach.float() @ context.float() > 0


@every
def test_no_position_reads_its_target(name):
    """Byte by byte: where its change changes a hidden target, it changes no input that the target's position depends
    on. With target_hidden=False a prefix row's source may hold its target's bytes."""
    hp = settings(name, T)
    objective = OBJECTIVES[name]
    x = clean_windows(hp, 4)
    batch = objective.corrupt(x, make_rng("byte"), hp)
    if "tgt" not in batch:
        pytest.skip("predicts no ids")
    P = prefixes(batch)[:, None]
    k = torch.arange(T)
    follows, hidden, in_sight = hidden_targets(objective, batch, hp)
    assert torch.equal(batch["tgt"][:, :-1][follows[:, :-1]], batch["inp"][:, 1:][follows[:, :-1]])
    assert not (follows & (k < P - 1)).any(), "a target is inside the prefix"
    reads = reachable(batch)                                                        # (4, T, T)
    tested = follows | hidden
    if not objective.target_hidden:
        reads &= (k >= P[..., None]) | ~follows[..., None]
    asked = torch.zeros(4, T, dtype=torch.bool)
    for j in range(x.size(1)):
        other = x.clone()
        other[:, j] = x[:, j] % 255 + 1
        again = objective.corrupt(other, make_rng("byte"), hp)
        target = again["tgt"] != batch["tgt"]
        shown = again["inp"] != batch["inp"]
        read = (target & tested)[..., None] & reads & shown[:, None]
        assert not read.any(), f"byte {j} is a target and can be read: if it may be, say target_hidden=False"
        asked |= target
    assert asked.any(1).all(), "a row asks for no byte"


def prefix_one_too_long(x, g, hp):
    batch = O.prefix_lm(x, g, hp)
    return batch | {"prefix": batch["prefix"] + 1}


@pytest.mark.parametrize("name, wrong", [
    ("bart", dict(target_hidden=True)), ("prefix", dict(corrupt=prefix_one_too_long))],
    ids=["a source that holds its target", "a prefix too long"])
def test_a_target_that_is_read_would_be_noticed(name, wrong, forks):
    change(name, **wrong)
    with pytest.raises(AssertionError, match="can be read|inside"):
        test_no_position_reads_its_target(name)


@every
def test_targets_in_place_are_the_clean_bytes(name):
    x, batch, hp = make(name, B=8)
    objective = OBJECTIVES[name]
    repair = find_use(objective, Repair)
    fills = trained_use(objective, Fill, hp)
    in_place = fills and (fills.before, fills.after, fills.shift) == ((), (), 0)
    if not in_place and not (repair and repair.in_place):
        pytest.skip("predicts nothing in place, or in rows with ids beside the text")
    has_target = batch["tgt"] != IGNORE_INDEX
    n = x.size(1)
    assert torch.equal(batch["tgt"][:, :n][has_target[:, :n]], x[has_target[:, :n]])
    assert not has_target[:, n:].any(), "there is no byte to predict"


@every
def test_document_masks_keep_documents_apart(name):
    """The loss on the second document does not depend on the first one's bytes, but does without the mask."""
    objective, net, batch, hp = case(name)
    if not objective.supports_doc_mask:
        pytest.skip("does not keep the text's order")
    doc = (torch.arange(T) >= 20).long().expand(4, T)
    for k in {"tgt", "future_tgt"} & set(batch):
        batch[k] = batch[k].clone()
        batch[k][:, :20] = IGNORE_INDEX
    other = dict(batch, inp=torch.where(doc == 0, batch["inp"] % 255 + 1, batch["inp"]))
    masked, free = [], []
    for b in (batch, other):
        masked.append(objective.loss(net, b | {"doc": doc}, hp))
        free.append(objective.loss(net, b, hp))
    assert masked[0] == masked[1]
    assert all(s != free[1][term] for term, s in free[0].items() if s)


# ---- generic: on random bytes no likelihood falls below the entropy

SMALL_T = 32
ENTROPY = math.log(255)                         # nats of a byte that is drawn uniformly from 1..255


def check_entropy(name, **changes):
    """A term is a likelihood, or a bound of one, if it costs an untrained model log V a target; what it costs a trained
    model is compared with that."""
    hp = settings(name, SMALL_T, **dict(batch_size=16, n_layer=2, n_head=2, n_embd=32, ngram_rows=0, attn_scale=2.0,
                                        max_iters=120, learning_rate=0.05, warmup_iters=5, lr_decay=0.2) | changes)
    objective = get_objective(hp)
    data = torch.randint(1, 256, (220_000,), generator=make_rng("random bytes"), dtype=torch.uint8)
    corpus = [dict(name="random", weight=1.0, train=data[:200_000], val=data[200_000:], size=len(data), crc=0)]
    s = train.prepare(objective, corpus, hp)
    batches = [train.draw_batch(objective, corpus, "val", 64, f"entropy,{i}", hp) for i in range(4)]
    if "tgt" not in batches[0]:
        pytest.skip("predicts no ids")

    # the untrained model's nats at hidden bytes, which is log V at each
    log_V = math.log(objective.n_outputs)
    with torch.no_grad():
        means, _ = train.mean_terms(objective, s.model, batches, hp)
    likelihoods = [term for term, mean in means.items() if mean == pytest.approx(log_V, abs=1e-4)]
    batches = [only_hidden_bytes(objective, batch, hp) for batch in batches]
    untrained_sums = validation_sums(objective, s.model, batches, hp)
    if not any(untrained_sums[term] for term in likelihoods):
        pytest.skip("has no likelihood of bytes that its source must not hold")

    # the trained model's
    for step in range(hp.max_iters):
        train.load_step_inputs(s, step)
        train.training_step(s)
    assert int(s.first_nonfinite_step) == -1
    sums = validation_sums(objective, s.model, batches, hp)
    for term in likelihoods:
        nats = sums[term] / untrained_sums[term] * log_V
        assert nats > ENTROPY - 0.02, f"{term} has {nats:.3f} nats for bytes of {ENTROPY:.3f}, which nobody can predict"


@every
def test_on_random_bytes_no_likelihood_falls_below_the_entropy(name):
    """Nobody can predict such bytes: a model that does has read them, whatever the layout of the row."""
    check_entropy(name)


@pytest.mark.parametrize("name, changes", [("mtp", dict(mtp_kind="sequential")), ("nsp", dict(nsp_negatives="swap"))])
def test_on_random_bytes_no_likelihood_of_other_settings_falls_below_the_entropy(name, changes):
    check_entropy(name, **changes)


def only_hidden_bytes(objective, batch, hp):
    """-> the batch without its other targets: special ids, which may be known from their place, and bytes that the
    objective lets stand in the input."""
    follows, hidden, _ = hidden_targets(objective, batch, hp)
    kept = hidden | follows if objective.target_hidden else hidden
    is_byte = (batch["tgt"] > EOT) & (batch["tgt"] < O.N_BYTES)
    return dict(batch, tgt=batch["tgt"].where(kept & is_byte, IGNORE_INDEX))


@torch.no_grad()
def validation_sums(objective, net, batches, hp):  # -> {term: sum over all batches}
    each = [objective.loss(net, batch, hp) for batch in batches]
    return {term: sum(float(sums[term]) for sums in each) for term in each[0]}


# ---- generic: terms and losses

@every
def test_terms_are_all_that_the_loss_returns(name):
    """Training may leave figures out: terms with coefficient 0."""
    objective, net, batch, hp = case(name, B=8)
    coefficients = {term: c for term, (_, c) in objective.terms(batch, hp).items()}
    training = set(objective.loss(net, batch, hp))
    with torch.no_grad():
        assert set(objective.loss(net, batch, hp)) == set(coefficients)
    assert {term for term, c in coefficients.items() if c} <= training <= set(coefficients)


@every_mixture_too
def test_micro_batches_add_up_to_the_batch(name):
    objective, net, batch, hp = case(name, B=24, batch_size=8, accum=3)
    if objective.compares_rows:
        pytest.skip("compares the rows of a micro-batch with each other")
    batches = [batch, *(train.micro_batch(batch, i, 3) for i in range(3))]
    sums = [objective.loss(net, b, hp) for b in batches]
    terms = [objective.terms(b, hp) for b in batches]
    for term, whole in sums[0].items():
        assert float(terms[0][term][0]) == sum(float(known[term][0]) for known in terms[1:])
        parts = sum(s[term] for s in sums[1:])
        assert torch.allclose(whole, parts, rtol=1e-5, atol=1e-3), "rows are compared: say compares_rows=True"


@every
def test_an_untrained_likelihood_is_8_bits_a_byte(name):
    """Else a wrong count would go unnoticed: of a doubled row, for instance, twice its bytes."""
    _, batch, hp = make(name, B=8)
    objective = get_objective(hp)
    if objective.bpb not in ("loss", "bound"):
        pytest.skip("its loss is not nats per byte")
    loss = float(total(objective, untrained(objective, hp), batch, hp).detach())
    assert loss == pytest.approx(math.log(256), abs=1e-4), "the terms' counts are not the raw bytes"


@every
def test_an_untrained_byte_head_is_at_chance(name):
    _, batch, hp = make(name, B=8)
    objective = get_objective(hp)
    sums = objective.loss(untrained(objective, hp), batch, hp)
    if "nll" not in sums:
        pytest.skip("has terms, and so a test, of its own")
    count, _ = objective.terms(batch, hp)["nll"]
    assert float(sums["nll"].detach() / count) == pytest.approx(math.log(objective.n_outputs), abs=1e-5)


@every
def test_nats_equal_loops_over_positions_with_a_target(name):
    objective, net, batch, hp = case(name, B=8)
    sums = objective.loss(net, batch, hp)
    if "nll" not in sums:
        pytest.skip("has terms, and so a test, of its own")
    h = net(batch["inp"], batch["prefix"], batch.get("doc"), positions=batch.get("positions"), mask=batch.get("mask"))
    logp = net.logits(h).detach().double().log_softmax(-1)
    nats = [-float(logp[b, t, batch["tgt"][b, t]]) for b, t in itertools.product(range(8), range(T))
            if batch["tgt"][b, t] != IGNORE_INDEX]
    assert int(objective.terms(batch, hp)["nll"][0]) == len(nats)
    assert float(sums["nll"].detach()) == pytest.approx(sum(nats))


def select_all_positions(h, tgt, select_targets=O.select_targets):  # as on a GPU
    with mock.patch.object(torch.compiler, "is_compiling", lambda: True):
        return select_targets(h, tgt)


@every
def test_logits_of_all_positions_give_the_same_loss(name):
    """On a GPU reading the number of positions with a target would stall the device."""
    objective, net, batch, hp = case(name)
    few = objective.loss(net, batch, hp)
    with mock.patch.object(O, "select_targets", select_all_positions), mock.patch.object(torch.Tensor, "nonzero", None):
        everywhere = objective.loss(net, batch, hp)
    for term, x in few.items():
        torch.testing.assert_close(everywhere[term], x)


@every
def test_one_batch_can_be_learned_by_heart(name):
    _, batch, hp = make(name, T=20, gen_scale=1.0, electra_weight=1.0)
    objective = get_objective(hp)
    net = untrained(objective, hp, n_layer=1, n_head=4, n_embd=64)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(300):
        loss = total(objective, net, batch, hp)
        if float(loss.detach()) < 0.1:
            return
        opt.zero_grad()
        loss.backward()
        opt.step()
    raise AssertionError(f"still at {float(loss.detach()):.3f}")


# ---- generic: a step that a CUDA graph will replay, replayed on the CPU

def state_of(s):  # -> {name: tensor}: all that a step leaves behind
    state = dict(s.model.state_dict(), first_nonfinite_step=s.first_nonfinite_step)
    for i, moments in enumerate(s.opt["adamw"].state_dict()["state"].values()):
        state |= {f"adamw {i} {k}": v for k, v in moments.items()}
    for shape, (_, momentum) in s.opt["muon"].items():
        state[f"muon {shape}"] = momentum
    if s.opt["moments"] is not None:
        state["n-gram moments"] = s.opt["moments"]
    return {k: v.detach().clone() for k, v in state.items()}


def identical(a, b):  # to the bit, NaN where the other is NaN
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def check_replay(hp, nan_before=None):
    """A step is recorded and replayed after only load_step_inputs; everything equals eager steps to the bit. Before
    step nan_before a weight becomes NaN."""
    objective = get_objective(hp)
    data = torch.randint(1, 60, (20_000,), generator=make_rng("text"), dtype=torch.uint8)
    data[::23] = EOT
    corpus = [dict(name="text", weight=1.0, train=data, val=data, size=len(data), crc=0)]
    eager = train.prepare(objective, corpus, hp)
    graphed = train.prepare(objective, corpus, hp)
    recording = Recording()
    with mock.patch.object(O, "select_targets", select_all_positions):
        for step in range(5):
            if step == nan_before:
                for s in (eager, graphed):
                    s.model.conv_weight.data[0] = math.nan
            train.load_step_inputs(eager, step)
            batch, loss, norm = train.training_step(eager)
            train.load_step_inputs(graphed, step)
            if step == 0:                       # the optimizer makes its state
                train.training_step(graphed)
            elif step == 1:
                with recording:
                    static_batch, static_loss, static_norm = train.training_step(graphed)
            else:
                recording.replay()
            if step:
                assert same(batch, static_batch), f"another batch at step {step}"
                assert identical(loss, static_loss) and identical(norm, static_norm), f"another loss at step {step}"
            a = state_of(eager)
            b = state_of(graphed)
            assert a.keys() == b.keys()
            assert not [k for k in a if not identical(a[k], b[k])], f"other weights after step {step}"
    assert int(eager.first_nonfinite_step) == (-1 if nan_before is None else nan_before)


def replay_settings(name, **changes):  # rates, the share of dropped lookups and the step number differ at each step
    return settings(name, SMALL_T, **dict(batch_size=8, n_layer=2, n_head=2, n_embd=16, max_iters=8, warmup_iters=3,
                                          weight_decay=0.1) | changes)


@every_mixture_too
def test_a_recorded_step_can_be_replayed(name):
    check_replay(replay_settings(name))
    check_replay(replay_settings(name, optimizer="adamw", accum=2))


@pytest.mark.parametrize("name, changes", [
    ("mtp", dict(mtp_kind="sequential")), ("clm", dict(doc_mask=True, accum=2)), ("clm,mlm", dict(doc_mask=True)),
    ("prefix", dict(doc_mask=True, accum=2)), ("mlm", dict(ngram_rows=0, grad_clip=0.0))])
def test_a_recorded_step_of_other_settings_can_be_replayed(name, changes):
    check_replay(replay_settings(name, **changes))


def rate_that_is_read(params, momentum, lr, *rest, muon_step=train.muon_step):
    return muon_step(params, momentum, torch.full((), float(lr)), *rest)


def test_a_recorded_step_can_be_replayed_after_one_that_was_not_finite():
    check_replay(replay_settings("clm"), nan_before=3)


class OwnRate:  # computed by Python at each call, so a replay has that of the recorded step
    def __init__(self):
        self.calls = 0
        self.muon_step = train.muon_step

    def __call__(self, params, momentum, lr, *rest):
        self.calls += 1
        return self.muon_step(params, momentum, torch.full((), 0.001 * (self.calls // 4)), *rest)


class OwnGenerator:  # seeded by the number of calls instead of load_step_inputs; two runs take turns
    def __init__(self):
        self.calls = 0

    def __call__(self, x, g, hp):
        key = f"{self.calls // 2}"
        self.calls += 1
        return O.mlm(x, make_rng(key), hp)


def test_a_recorded_step_that_reads_its_rate_would_be_noticed(monkeypatch):
    monkeypatch.setattr(train, "muon_step", rate_that_is_read)
    with pytest.raises(AssertionError, match="waits for the device"):
        check_replay(replay_settings("mlm"))


def test_a_recorded_step_whose_rate_is_a_python_number_would_be_noticed(monkeypatch):
    monkeypatch.setattr(train, "muon_step", OwnRate())
    with pytest.raises(AssertionError, match="other weights"):
        check_replay(replay_settings("mlm"))


def test_a_recorded_step_that_draws_from_another_generator_would_be_noticed(forks):
    change("mlm", corrupt=OwnGenerator())
    with pytest.raises(AssertionError, match="another batch"):
        check_replay(replay_settings("mlm"))


# ---- generic: flags

@every
def test_a_flag_of_several_objectives_is_the_same_for_all(name):
    """Else its default or its range in one objective would be another's; flag_defaults hold an objective's own."""
    for flag, spec in OBJECTIVES[name].flags.items():
        assert not any(flag in group for group in run.SETTINGS.values()), f"--{flag} is a flag of train.py"
        for other in OBJECTIVES.values():
            assert other.flags.get(flag, spec) == spec, (flag, other.name)


# ---- generic: uses

ORDERS = {"confident", "left", "revise", "ancestral", "remask", "analytic"}      # of sample.unmask


@every
def test_an_objectives_uses_have_what_sample_py_needs(name):
    _, batch, hp = make(name)
    objective = OBJECTIVES[name]
    assert objective.name == name
    assert objective.uses, "sample.py can do nothing with it"
    assert type(objective.uses[0]) in sample.MODES
    assert {type(use) for use in objective.uses} <= {*sample.MODES, Draft}
    assert (objective.bpb == "bound") == (objective.nelbo is not None)
    for use in objective.uses:
        if isinstance(use, (Continue, Fill, Infill)):
            assert use.is_trained(hp), "its default settings do not train it"
        if isinstance(use, (Continue, Fill)):
            assert isinstance(use.before, tuple) and isinstance(use.after, tuple)
        if isinstance(use, Continue):
            assert isinstance(use.both_ways, bool)
        if isinstance(use, Fill):
            assert use.orders and {*use.orders} <= ORDERS
        if isinstance(use, Infill):
            ids, P = use.prompt([[97], [98]], 4, hp)
            assert 0 <= P <= len(ids) and use.stop_ids and max(use.stop_ids) < objective.n_outputs
        if isinstance(use, Repair) and use.in_place:
            assert objective.n_bytes(T, hp) == T and (prefixes(batch) == T).all()
        if isinstance(use, Repair) and not use.in_place:
            last = (prefixes(batch) - 1).clamp(min=0)           # of the prefix
            assert (batch["inp"].gather(1, last[:, None]) == SEP).all(), "its rows are not laid out by seq2seq"


@pytest.mark.parametrize("name, wrong", [
    ("mlm", dict(uses=())), ("clm", dict(uses=(Draft(O.mtp_drafter),))), ("clm", dict(uses=(Repair(),))),
    ("clm", dict(uses=(Repair(in_place=True),))), ("mlm", dict(uses=(Fill(orders=("right",)),))),
    ("mlm", dict(uses=(Repair(),))), ("mlm", dict(nelbo=O.mdlm_nelbo)), ("mdlm", dict(nelbo=None)),
    ("fim", dict(n_outputs=256, uses=(Infill(O.fim_prompt, O.SPAN_ENDS),))), ("clm", dict(name="another"))])
def test_a_use_without_what_it_needs_would_be_noticed(name, wrong, forks):
    change(name, **wrong)
    with pytest.raises(AssertionError):
        test_an_objectives_uses_have_what_sample_py_needs(name)


# ---- objectives of one's own

def unshuffle(x, g, hp):  # x (B, T) -> inp, tgt (B, T): pieces of four bytes in another order; nothing is masked
    B, T = x.shape
    piece = torch.arange(T, device=g.device) // 4
    order = torch.rand(B, T, generator=g, device=g.device)[:, piece].argsort(dim=1, stable=True)
    return dict(inp=x.gather(1, order), tgt=x, prefix=T)


BLOCK = 4


def twice(T, hp):
    return T // 2


def block_diffusion_mask(L, own_clean_block=False):  # -> (1, 2 L, 2 L) bool: a noisy copy, then the clean one
    """A noisy block attends to itself and to the clean blocks before it; a clean block to those up to itself."""
    i = torch.arange(2 * L)
    block = i % L // BLOCK
    q_noisy = (i < L)[:, None]
    k_noisy = i < L
    q = block[:, None]
    k = block
    before = (k <= q) if own_clean_block else (k < q)
    noisy = torch.where(k_noisy, k == q, before)
    clean = ~k_noisy & (k <= q)
    return torch.where(q_noisy, noisy, clean)[None]


def block_diffusion(x, g, hp, own_clean_block=False):  # x (B, L) -> inp, tgt (B, 2 L), mask (B, 2 L, 2 L)
    """Block diffusion (Arriola et al. 2025): the bytes of a block from some of them and from the blocks before it."""
    B, L = x.shape
    noisy, tgt = O.mask_bytes(x, O.random_positions(B, L, L // 2, g), g)
    noisy = noisy.where(tgt == IGNORE_INDEX, MASK)
    i = torch.arange(L, device=g.device)
    copy = torch.arange(2 * L, device=g.device) // L            # convolution and n-grams stay inside a copy
    return dict(inp=torch.cat((noisy, x), dim=1), tgt=F.pad(tgt, (0, L), value=IGNORE_INDEX), prefix=0,
                positions=torch.cat((i, i)).expand(B, -1), doc=copy.expand(B, -1),
                mask=block_diffusion_mask(L, own_clean_block).to(g.device).expand(B, -1, -1))


def block_positions(ids, P, hp):
    L = ids.size(1) // 2
    return torch.arange(L, device=ids.device).repeat(2).expand(len(ids), -1)


def own_terms(batch, hp):                       # a name that another objective uses for another thing
    return {"nsp": (batch["tgt"].numel(), 2.0), "auc": (len(batch["tgt"]), 0.0)}


def own_loss(model, batch, hp):
    return {"nsp": O.token_loss(model, batch, hp)["nll"], "auc": torch.zeros(())}


FORKS = {
    "unshuffle": Objective(
        "unshuffle", corrupt=unshuffle, help="", use_help="", attention="bidirectional", n_bytes=O.aligned_window,
        target_hidden=False, uses=(Repair(in_place=True),)),
    "block_diffusion": Objective(
        "block_diffusion", corrupt=block_diffusion, help="", use_help="", attention="blocks", n_bytes=twice,
        positions=block_positions, uses=(Fill(orders=("left",)),)),
    "own_terms": Objective(
        "own_terms", corrupt=O.clm, help="", use_help="", attention="causal", is_random=False, terms=own_terms,
        loss=own_loss, uses=(Continue(),))}


@pytest.mark.parametrize("name", FORKS)
def test_objectives_of_ones_own_pass_the_generic_tests(name, forks):
    OBJECTIVES[name] = FORKS[name]
    run_generic_tests(name)


@pytest.mark.parametrize("name", ["all_tokens", "recase"])
def test_the_readmes_objectives_pass_the_generic_tests(name, forks):
    with open(os.path.join(os.path.dirname(O.__file__), "README.md"), encoding="utf-8") as f:
        section = f.read().split("\n## Adding an objective\n")[1].split("\n## ")[0]
    OBJECTIVES.pop(name, None)                  # somebody has pasted it in
    for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        exec(block, dict(vars(O)))
    run_generic_tests(name)


def mdlm_that_masks_too_little(x, g, hp):
    batch = O.mdlm(x, g, hp)
    stays = torch.rand(x.shape, generator=g, device=g.device) < 0.3
    return batch | {"inp": x.where(stays, batch["inp"])}


READS_ITS_TARGET = {
    "in sight": ("unshuffle", dict(target_hidden=True)),
    "most in sight": ("mlm", dict(corrupt=lambda x, g, hp: O.mlm(x, g, hp) | {"tgt": x})),
    "no mask at all": ("mlm", dict(corrupt=lambda x, g, hp: dict(inp=x, tgt=x, prefix=x.size(1)))),
    "a bound": ("mdlm", dict(corrupt=mdlm_that_masks_too_little)),
    "its own clean block": ("block_diffusion", dict(corrupt=functools.partial(block_diffusion, own_clean_block=True)))}


@pytest.mark.parametrize("name, wrong", READS_ITS_TARGET.values(), ids=READS_ITS_TARGET)
def test_a_likelihood_below_the_entropy_would_be_noticed(name, wrong, forks):
    OBJECTIVES.update(FORKS)
    change(name, **wrong)
    with pytest.raises(AssertionError, match="which nobody can predict"):
        test_on_random_bytes_no_likelihood_falls_below_the_entropy(name)
    with pytest.raises(AssertionError, match="can be read"):
        test_no_position_reads_its_target(name)


# ---- building blocks

def test_pack_left_moves_what_is_kept_to_the_left():
    ids = torch.tensor([[1, 2, 3, 4]])
    keep = torch.tensor([[0, 1, 1, 0]]).bool()
    assert O.pack_left(ids, keep, 2).tolist() == [[2, 3]]
    assert O.pack_left(ids, keep, 5).tolist() == [[2, 3, PAD, PAD, PAD]]


def test_seq2seq_is_one_prefix_row():
    source = torch.tensor([[1, 2, 3], [4, 5, 6]])
    target = torch.tensor([[7, 8], [9, 10]])
    x = IGNORE_INDEX
    keep = torch.tensor([[1, 0, 1], [1, 1, 1]]).bool()
    keep_target = torch.tensor([[1, 1], [1, 0]]).bool()
    batch = O.seq2seq(source, keep, target, keep_target, 8, mode=MODE_R)
    assert batch["inp"].tolist() == [[MODE_R, 1, 3, SEP, 7, 8, EOT, PAD], [MODE_R, 4, 5, 6, SEP, 9, EOT, PAD]]
    assert batch["tgt"].tolist() == [[x, x, x, 7, 8, EOT, x, x], [x, x, x, x, 9, EOT, x, x]]
    assert batch["prefix"].tolist() == [4, 5]


def drawn(name, key, B, T=T, **changes):
    return make(name, B=B, T=T, **changes)[1][key]


EQUALLY_LIKELY = {  # how many kinds there are, and draws of them
    "placements of spans": (12, lambda: O.place_spans(4000, 6, 3, 2, make_rng("p"))[1]),
    "masked bytes": (15, lambda: drawn("mlm", "tgt", 4000, T=6, mask_rate=0.34) != IGNORE_INDEX),
    "electra's bytes": (15, lambda: drawn("electra", "masked_positions", 4000, T=6, mask_rate=0.34).sort(dim=1).values),
    "prefixes": (T // 2, lambda: drawn("prefix", "prefix", 4000)),
    "cuts of ul2": (31, lambda: drawn("ul2", "prefix", 4000, T=34)[2000:3000]),
    "pairs of crops": (121, lambda: O.contrastive(torch.arange(20).expand(6000, -1), make_rng("c"),
                                                  settings("contrastive", 20, crop=0.5))["inp"][:, :, 0]),
    "seams": (T, lambda: drawn("rotation", "labels", 4000))}


@pytest.mark.parametrize("kinds, draws", EQUALLY_LIKELY.values(), ids=EQUALLY_LIKELY)
def test_all_are_equally_likely(kinds, draws):
    _, seen = draws().unique(dim=0, return_counts=True)
    assert len(seen) == kinds
    assert chi2(seen, seen.double().mean()) < kinds + 6 * (2 * kinds) ** 0.5        # 6 standard deviations


# ---- the terms of each objective

@pytest.mark.parametrize("name, coefficients", [
    ("clm", {"nll": 1}), ("mtp", {"nll": 1, "head2": 0.1, "head3": 0.1, "head4": 0.1}), ("sedd", {"bound": 1}),
    ("electra", {"generator": 1, "discriminator": 50, "auc": 0, "replaced": 0}),
    ("nsp", {"nll": 1, "nsp": 1, "accuracy": 0}), ("contrastive", {"infonce": 1, "top1": 0}), ("mdlm", {"bound": 1}),
    ("rotation", {"seam": 1, "accuracy": 0}), ("hybrid", {"masked": 0.25, "causal": 0.75})])
def test_terms_have_the_papers_coefficients(name, coefficients):
    _, batch, hp = make(name)
    assert {term: c for term, (_, c) in OBJECTIVES[name].terms(batch, hp).items()} == pytest.approx(coefficients)


@pytest.mark.parametrize("name, term, kinds", [
    ("mtp", "head2", 256), ("electra", "generator", 256), ("electra", "discriminator", 2), ("nsp", "nsp", 2),
    ("mdlm", "bound", 256), ("sedd", "bound", 256), ("rotation", "seam", T), ("hybrid", "masked", 256),
    ("hybrid", "causal", 256)])
def test_untrained_terms_are_at_chance(name, term, kinds):
    _, batch, hp = make(name, B=8)
    objective = OBJECTIVES[name]
    sums = objective.loss(untrained(objective, hp), batch, hp)
    count, _ = objective.terms(batch, hp)[term]
    assert float(sums[term].detach() / count) == pytest.approx(math.log(kinds), abs=1e-5)


@pytest.mark.parametrize("name, figures", [("electra", {"auc", "replaced"}), ("nsp", {"accuracy"})])
def test_training_leaves_costly_figures_out(name, figures):
    objective, net, batch, hp = case(name)
    assert not figures & set(objective.loss(net, batch, hp))
    with torch.no_grad():
        assert figures < set(objective.loss(net, batch, hp))


# ---- clm, mlm

def check_clm(x, batch):
    assert torch.equal(batch["inp"], x[:, :-1])
    assert torch.equal(batch["tgt"], x[:, 1:])


def test_clm_shifts_once():
    x, batch, _ = make("clm")
    check_clm(x, batch)
    assert batch["prefix"] == 0


def check_mlm(x, batch, k, mask=0.8, left=0.1 + 0.1 / 255):
    chosen = batch["tgt"] != IGNORE_INDEX
    assert (chosen.sum(1) == k).all()
    assert torch.equal(batch["tgt"][chosen], x[chosen])
    assert torch.equal(batch["inp"][~chosen], x[~chosen])
    changed = batch["inp"][chosen]
    assert ((changed == MASK) | ((changed >= 1) & (changed < 256))).all(), "a random byte is a special id"
    n = len(changed)
    for share, seen in ((mask, changed == MASK), (left, changed == x[chosen])):
        assert abs(float(seen.float().mean()) - share) <= 5 * (share * (1 - share) / n) ** 0.5


@pytest.mark.parametrize("rate, k", [(0.15, 7), (0.33, 16), (1.0, T), (0.001, 1)])
def test_mlm_masks_exact_counts_80_10_10(rate, k):
    x, batch, _ = make("mlm", B=2000, mask_rate=rate)
    check_mlm(x, batch, k)


@pytest.mark.parametrize("masked, random", [(1.0, 0.0), (0.0, 1.0), (0.5, 0.25), (0.0, 0.0)])
def test_mlm_may_mask_replace_and_leave_other_shares(masked, random):
    x, batch, hp = make("mlm", B=2000, mask_token=masked, mask_random=random)
    check_mlm(x, batch, round(0.3 * T), mask=masked, left=1 - masked - random + random / 255)
    assert bool(trained_use(OBJECTIVES["mlm"], Fill, hp)) == (masked > 0), "MASK was never an input"


# ---- prefix

@pytest.mark.parametrize("share, longest", [(0.0, 1), (0.75, 36), (1.0, T - 1)])
def test_prefix_has_loss_on_the_suffix_alone(share, longest):
    x, batch, _ = make("prefix", B=500, prefix_max=share)
    has_target = batch["tgt"] != IGNORE_INDEX
    P = batch["prefix"]
    assert torch.equal(has_target, torch.arange(T) >= P[:, None] - 1)
    assert torch.equal(batch["tgt"][has_target], x[:, 1:][has_target])
    assert (int(P.min()), int(P.max())) == (1, longest)


# ---- span

def all_parts(batch):  # seq2seq rows -> [(source ids, target ids without EOT)]
    rows = []
    for z, tgt, P in zip(batch["inp"].tolist(), batch["tgt"].tolist(), batch["prefix"].tolist()):
        has_target = [t for t in tgt if t != IGNORE_INDEX]
        assert z[P - 1] == SEP and SEP not in z[:P - 1]
        assert has_target == [*z[P:P - 1 + len(has_target)], EOT]
        rows.append((z[:P - 1], has_target[:-1]))
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
    (48, 0.15, 3), (64, 0.15, 9), (100, 0.5, 2), (33, 0.9, 9)])
def test_span_rows_can_be_put_together_again(T, rate, mean):
    x, batch, _ = make("span", B=400, T=T, span_rate=rate, span_mean=mean)
    _, N, S = O.fit_spans(T, rate, mean)
    sizes = []
    cut = 0
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
def test_positions_are_those_of_sampling(name):
    _, batch, hp = make(name, B=64)
    at_sampling = OBJECTIVES[name].positions(batch["inp"], batch["prefix"], hp)
    if "positions" in batch:
        assert at_sampling is not None, "a batch with positions needs the Objective's field positions too"
        assert torch.equal(batch["positions"], at_sampling)
    else:
        assert at_sampling is None


@pytest.mark.parametrize("name, mean, reserved_by_mean", [("span", 6.0, 8), ("span", 3.0, 4), ("ul2", 6.0, 8)])
def test_spans_stand_where_their_hole_is(name, mean, reserved_by_mean):
    _, batch, _ = make(name, B=40, T=100, span_mean=mean)
    for z, P, positions in zip(batch["inp"].tolist(), batch["prefix"].tolist(), batch["positions"].tolist()):
        reserved = 64 if z[0] == MODE_X else reserved_by_mean
        position = -1
        sentinel_position = {}
        for i in range(P):
            position += 1
            if i and z[i - 1] >= SENTINEL:      # the sentinel before it reserves positions
                position += reserved
            assert positions[i] == position
            if z[i] >= SENTINEL:
                sentinel_position[z[i]] = position
        for i in range(P, len(z)):
            position = sentinel_position[z[i]] if z[i] >= SENTINEL else position + 1
            assert positions[i] == position
    assert (batch["positions"] != torch.arange(100)).any(1).sum() >= 30, "all rows but those of S"


# ---- ul2

def test_ul2_rows_are_what_their_mode_says():
    T = 100
    x, batch, _ = make("ul2", B=160, T=T)
    modes = batch["inp"][:, 0].tolist()
    tail = []
    short = {MODE_R: 0, MODE_X: 0}
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
    s = row.index(SUF)
    m = row.index(MID)
    e = row.index(EOT)
    assert row[0] == PRE and sum(i >= 256 for i in row) == 3
    return row[1:s], row[s + 1:m], row[m + 1:e], row[e + 1:]


def test_fim_psm_can_be_put_together_again_and_has_thirds():
    x, z = fim_rows(fim_rate=1.0, fim_spm_rate=0.0)
    n = x.size(1) - 4
    sizes = []
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
    _, first = fim_rows(200, fim_rate=1.0, fim_spm_rate=0.0)
    _, second = fim_rows(200, fim_rate=1.0, fim_spm_rate=1.0)
    for row, spm in zip(first.tolist(), second.tolist()):
        n = row.index(MID) + 1
        prefix, suffix, middle, after = psm(row)
        assert spm == [PRE, SUF, *suffix, MID, *prefix, *middle, EOT, *after]
        assert O.fim_prompt([prefix, suffix], 4, settings("fim", 33, fim_spm_rate=0.0)) == (row[:n], 0)
        assert O.fim_prompt([prefix, suffix], 4, settings("fim", 33)) == (spm[:n], 0)


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
    net = Transformer(ModelConfig(2, 2, 16))
    h = torch.randn(3, 16, generator=make_rng("h"))
    net.heads.update(O.mtp_heads(net.config, hp))
    assert torch.equal(O.mtp_ahead(net, h), O.norm(h)[:, None].expand(3, 3, 16))


def test_mtp_loss_is_the_weighed_sum_of_separate_heads():
    x, _, _ = make("mtp")
    objective, net, batch, hp = case("mtp")
    h = net(x[:, :T])
    want = F.cross_entropy(net.logits(h).mT, x[:, 1:T + 1])
    for k, W in enumerate(net.heads["mtp"].weight, start=2):
        want = want + 0.1 * F.cross_entropy(net.logits(O.norm(h + h @ W.T)).mT, x[:, k:T + k])
    torch.testing.assert_close(total(objective, net, batch, hp), want)


def sequential():
    _, net, batch, hp = case("mtp", B=1, mtp_kind="sequential")
    return make("mtp", B=1)[0], batch, hp, net


def test_the_loss_of_sequential_modules_is_that_of_the_papers_equations():
    """h^k_i = block(M_k [norm(h^(k-1)_i); norm(embed(t_(i+k)))]), p(t_(i+k+1)) = head(norm(h^k_i))."""
    x, batch, hp, net = sequential()
    h = net(batch["inp"])
    sums = O.mtp_loss(net, batch, hp)
    for k, block in enumerate(net.heads["mtp"]["blocks"], 1):
        joined = torch.cat((O.norm(h), O.norm(net.embed(x[:, k:T + k]))), dim=-1) @ block.join.weight[0].T
        h = O.norm(O.run_blocks([block], joined, net.config, 0))
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
    assert O.mtp_heads(net.config, hp) == {} and O.mtp_drafter(net, hp) is None
    assert set(O.mtp_terms(batch, hp)) == {"nll"}
    clm = O.token_loss(net, O.clm(x, None, hp), hp)
    torch.testing.assert_close(O.mtp_loss(net, batch, hp)["nll"], clm["nll"])


def uncached_drafts(net, ids, n):  # module after module over the whole text -> drafts, logits
    h = net(torch.tensor([ids[:-1]]))
    ids = list(ids)
    logits = []
    N = len(ids) - 1
    for k in range(n - 1):
        h = O.mtp_module(net, net.heads["mtp"]["blocks"][k], h, torch.tensor([ids[k + 1:N + k + 1]]))
        logits.append(net.logits(h)[0, -1, :256])
        ids.append(int(logits[-1].argmax()))
    return ids[N + 1:], torch.stack(logits)


def test_cached_drafts_equal_uncached_ones_whatever_was_kept_of_those_before():
    _, _, hp, net = sequential()
    net.requires_grad_(False)
    text = clean_windows(hp, 1)[0].tolist()
    drafter = O.mtp_drafter(net, hp)
    drafter.restart()
    n = 0
    for grown in (5, 1, 4, 2, 1, 9):
        h = net(torch.tensor([text[:n + grown]]))[0, n:]
        n += grown
        drafts, q = drafter.draft(h, text[:n + 1], lambda z: ([int(z[0, :256].argmax())], z[:, :256]))
        want, logits = uncached_drafts(net, text[:n + 1], 4)
        assert drafts == want
        torch.testing.assert_close(q, logits, rtol=1e-4, atol=1e-4)
        kept = drafts[:grown % 3]               # some drafts are verified
        text[n + 1:n + 1 + len(kept)] = kept


# ---- electra

def says(logits):  # a generator with the given logits
    net = torch.nn.Module()
    net.forward = lambda idx, mask: logits
    net.logits = lambda h: h
    return net


@torch.no_grad()
@pytest.mark.parametrize("right", [torch.tensor(True), torch.arange(T) % 2 == 0])
def test_electra_labels_what_differs_and_reports_it(right):
    """right: which bytes the generator guesses; those count as original."""
    objective, net, batch, hp = case("electra", B=6)
    x, _, _ = make("electra", B=6)
    said = torch.where(right, x, x % 255 + 1)
    net.heads["generator"] = says(F.one_hot(said, 256) * 200.0)
    row = x.scatter(1, batch["masked_positions"], said.gather(1, batch["masked_positions"]))
    labels = (row != x).float()
    scores = net.heads["replaced"](net(row, T))[..., 0]
    sums = objective.loss(net, batch, hp)
    terms = objective.terms(batch, hp)
    mean = {term: float(sums[term]) / count for term, (count, _) in terms.items()}
    assert mean["discriminator"] == pytest.approx(float(F.binary_cross_entropy_with_logits(scores, labels)))
    assert mean["replaced"] == pytest.approx(float(labels.mean()))
    assert mean["auc"] == pytest.approx(float(O.auc(scores.flatten(), labels.flatten())))


@pytest.mark.parametrize("rate, k", [(0.15, 7), (0.001, 1)])
def test_electra_masks_85_percent_of_an_exact_number(rate, k):
    x, batch, _ = make("electra", B=3000, mask_rate=rate)
    check_mlm(x, batch, k, mask=0.85, left=0.15)
    assert torch.equal(batch["tgt"].gather(1, batch["masked_positions"]), x.gather(1, batch["masked_positions"]))
    masked = batch["inp"].gather(1, batch["masked_positions"]) == MASK
    u = batch["uniforms"]
    assert u[masked].max() > 0.99 and u[~masked].min() < 0.1, "the masks' own numbers"
    assert abs(float(u.mean()) - 0.5) < 0.05


@pytest.mark.parametrize("sizes, want", [((12, 12, 768), (3, 192)), ((2, 6, 60), (2, 16))])
def test_a_generator_has_heads_of_the_trunks_width(sizes, want):
    small = O.generator_config(ModelConfig(*sizes), settings("electra", 8))
    assert (small.n_layer, small.n_head, small.n_embd) == (sizes[0], *want)


def test_electra_is_two_models_whose_gradients_stay_on_their_side():
    objective, net, batch, hp = case("electra", B=6)
    sums = objective.loss(net, batch, hp)
    small = net.heads["generator"]
    want = O.cross_entropy_sum(small.logits(small(batch["inp"], T)), batch["tgt"])
    torch.testing.assert_close(sums["generator"], want)
    trunk = [net.embed.weight, *net.blocks.parameters()]
    sides = {"generator": list(small.parameters()), "discriminator": trunk}
    for term, side in itertools.product(sides, sides):
        grads = torch.autograd.grad(sums[term], sides[side], retain_graph=True, allow_unused=True)
        assert any(g is not None and g.abs().max() > 0 for g in grads) == (term == side)


def test_electra_samples_follow_the_generator():
    p = torch.tensor([0.4, 0.3, 0.2, 0.1])
    x = torch.full((2000, 8), 65)
    four = torch.full((2000, 8, 512), -60.0)
    four[..., 65:69] = p.log()
    batch = O.electra(x, make_rng("e"), settings("electra", 8, mask_rate=0.15))
    _, clean, fake = O.sample_replacements(says(four), batch)
    assert fake.shape == (2000, 1) and (clean == 65).all()
    assert chi2(torch.bincount(fake[:, 0], minlength=69)[65:], 2000 * p) < 25       # 3 degrees of freedom


def test_auc_is_the_chance_of_the_right_order():
    scores = torch.randint(0, 6, (60,), generator=make_rng("s")).float()
    labels = torch.randint(0, 2, (60,), generator=make_rng("l"))
    ones = scores[labels == 1][:, None]
    zeros = scores[labels == 0]
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
    split = all_parts(O.bart(x, make_rng("bart"), hp))
    assert all(t == row[:len(t)] for (_, t), row in zip(split, x.tolist())), "the target is the clean text"
    growth = rate if "insert" in noise else 0.0
    assert all(len(s) <= len(t) + max(growth > 0, int(growth * len(t) + 0.5001)) for s, t in split)
    used = [len(t) for _, t in split]
    if L >= 20:
        assert 0.25 < used.count(L) / B < 0.75, "the place of EOT gives it away"
        assert len(set(used)) > 12 and min(used) >= 8
    return [(t, s) for s, t in split]


def test_barts_target_counts_its_positions_as_its_source_does():
    _, batch, _ = make("bart", B=40, T=100)
    for P, positions in zip(batch["prefix"].tolist(), batch["positions"].tolist()):
        assert positions == [*range(P - 1), *range(-1, 100 - P)]


@pytest.mark.parametrize("rate", [0.3, 0.001])
@pytest.mark.parametrize("noise", ["mask", "delete", "replace", "insert", "mask,delete,replace", "mask,insert"])
def test_bart_strikes_exact_numbers_and_shares_its_rate(noise, rate, monkeypatch):
    monkeypatch.setattr(O, "bart_counts", all_that_bart_strikes)
    noises = noise.split(",")
    changed = 0
    most = 0
    for row, source in bart_case(noise, rate=rate):
        k = max(1, int(rate / len(noises) * len(row) + 0.5001))
        assert source.count(MASK) == k * ("mask" in noises)
        assert len(row) - len(source) == k * (("delete" in noises) - ("insert" in noises))
        assert min(source) > 0 and max(source) <= MASK
        if noise == "delete":
            rest = iter(row)
            assert all(i in rest for i in source), "the others stay in order"
        elif noise == "insert":
            rest = iter(source)
            assert all(i in rest for i in row), "the bytes of the text stay, in order"
        elif not {"delete", "insert"} & set(noises):
            differ = sum(a != b for a, b in zip(source, row))
            changed = changed + differ
            most = most + k
            assert differ <= k
    assert abs(changed - most * 254 / 255) <= 0.01 * most       # a random byte may be the old one


def all_that_bart_strikes(m, hp, g):
    noises = set(O.NOISES_WITH_RATE) & set(hp.bart_noise.split(","))
    return (m * hp.bart_rate / len(noises) + 0.5).long().clamp(min=1)


@pytest.mark.parametrize("noise, rate, most", [
    ("infill", 0.3, 30), ("infill,replace", 0.3, 15), ("mask,delete,permute", 0.3, 15), ("mask", 0.001, 1)])
def test_of_barts_rows_some_are_struck_little_some_much(noise, rate, most):
    k = O.bart_counts(torch.full((3000, 1), 100), settings("bart", T, bart_noise=noise, bart_rate=rate), make_rng("k"))
    seen = torch.bincount(k[:, 0], minlength=most + 1)
    assert seen[0] == 0 and len(seen) == most + 1 and k.shape == (3000, 1)
    assert chi2(seen[1:].double(), 3000 / most) < most + 5 * (2 * most) ** 0.5


def test_barts_largest_count_is_rounded():
    hp = settings("bart", T, bart_noise="mask", bart_rate=0.3)
    k = O.bart_counts(torch.full((3000, 1), 52), hp, make_rng("k"))
    assert int(k.max()) == 16                   # of 15.6



def test_bart_noises_follow_in_one_order():
    a, b = (make("bart", bart_noise=noise)[1] for noise in ("permute,infill,delete", "delete,permute,infill"))
    assert same(a, b)


def test_bart_infills_exactly_its_rate_with_poisson_spans():
    keep, start, used = O.place_infills(
        torch.ones(2000, 200, dtype=torch.bool), torch.full((2000, 1), 60), 68, 3.0, make_rng("i"))
    gone = ~keep
    assert (gone.sum(1) == 60).all() and (used.sum(1) <= 60).all()
    third = gone.float().mean(0)[:198].view(3, 66).mean(1)
    assert ((third - 0.3).abs() < 0.01).all(), f"thirds are struck unequally: {third.tolist()}"
    edges = gone.float().mean(0)[[0, -1]]
    assert edges.min() > 0.08 and abs(float(edges[0] - edges[1])) < 0.03
    lengths = []
    for b in range(500):                        # lengths from the next start, or from the end of the noise
        starts = sorted(start[b][used[b]].tolist())
        row = gone[b].tolist()
        for s, following in zip(starts, starts[1:] + [200]):
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
    order, _ = O.permute_noise(x, torch.ones_like(x, dtype=torch.bool), None, make_rng("o"), None)
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
    "mask,delete,infill,permute,rotate,replace,insert", "infill,rotate", "infill,delete", "insert",
    "infill,replace,insert"])
@pytest.mark.parametrize("T, rate", [(17, 0.3), (48, 0.9), (130, 0.05)])
def test_bart_noises_combine_at_any_size(noise, T, rate):
    bart_case(noise, T=T, rate=rate)


# ---- nsp

def clean_row(batch):
    return torch.where(batch["tgt"] == IGNORE_INDEX, batch["inp"], batch["tgt"])


@pytest.mark.parametrize("B", [2, 3, 40])
@pytest.mark.parametrize("negatives", ["random", "swap"])
def test_nsp_is_half_true_and_its_classes_look_alike(negatives, B):
    data = torch.randint(1, 256, (20000,), generator=make_rng("nsp"))
    h = (T - 3) // 2
    hp = settings("nsp", T, nsp_negatives=negatives, batch_size=B)
    corpus = bytes(data.tolist())
    for seed in range(10):
        batch = O.nsp(data.unfold(0, 2 * h + O.NSP_GAP, 400)[:B], make_rng(f"{seed}"), hp)
        assert int(batch["labels"].sum()) == B - B // 2
        for label, row in zip(batch["labels"].tolist(), clean_row(batch).tolist()):
            a = row[1:h + 1]
            b = row[h + 2:2 * h + 2]
            assert row == [CLS, *a, SEP, *b, SEP] + [PAD] * (T - 2 * h - 3)
            i = corpus.find(bytes(a))
            j = corpus.find(bytes(b))
            assert i >= 0 and j >= 0
            assert (j == i + h + O.NSP_GAP) == bool(label)
            assert label or (i == j + h + O.NSP_GAP if negatives == "swap" else abs(i - j) > 300)


@pytest.mark.parametrize("rate, k", [(0.15, 7), (0.001, 1)])
def test_nsp_masks_its_rate_in_both_texts(rate, k):
    _, batch, _ = make("nsp", B=1000, mask_rate=rate)
    check_mlm(clean_row(batch), batch, k)
    h = (T - 3) // 2
    chosen = batch["tgt"] != IGNORE_INDEX
    first, second = (int(chosen[:, a:a + h].sum()) for a in (1, h + 2))
    assert first + second == 1000 * k
    assert abs(first - second) < 5 * (first + second) ** 0.5, "5 standard deviations"


def test_nsp_reads_its_answer_at_cls():
    objective, net, batch, hp = case("nsp")
    follows = net.heads["nsp"](net(batch["inp"], T)[:, 0])[:, 0]
    want = F.binary_cross_entropy_with_logits(follows, batch["labels"].float(), reduction="sum")
    torch.testing.assert_close(objective.loss(net, batch, hp)["nsp"], want)


def test_nsp_reads_short_texts_whole_and_leaves_the_gap_before_long_ones():
    objective, net, _, hp = case("nsp")
    h = (T - 3) // 2
    rows = []
    net.register_forward_pre_hook(lambda model, args: rows.append(args[0][0].tolist()))
    text = [*range(1, 2 * h)]
    for n in (1, h, h + 1, 2 * h - 1):
        objective.uses[0].predict(net, text, text[:n], hp)
    expected = [text[:1], text[:h], text[O.NSP_GAP:h + 1], text[O.NSP_GAP:O.NSP_GAP + h]]
    assert rows == [[CLS, *text[-h:], SEP, *second, SEP] for second in expected]


@pytest.mark.parametrize("name, head", [("nsp", "nsp"), ("rotation", "seam")])
@pytest.mark.parametrize("right", [True, False])
def test_accuracy_counts_what_is_right(name, head, right):
    objective, net, batch, hp = case(name)
    answer = 2 * batch["labels"] - 1 if name == "nsp" else F.one_hot(batch["labels"], T)
    answer = answer[..., None].float() * (1 if right else -1)
    net.heads[head].forward = lambda h: answer
    with torch.no_grad():
        accuracy = objective.loss(net, batch, hp)["accuracy"]
    assert float(accuracy) / objective.terms(batch, hp)["accuracy"][0] == right


# ---- contrastive

def test_contrastive_crops_are_pieces_of_their_window():
    x = torch.arange(1, 21).expand(400, -1) * torch.arange(1, 401)[:, None]
    inp = O.contrastive(x, make_rng("c"), settings("contrastive", 20, crop=0.5))["inp"]
    assert inp.shape == (400, 2, 10) and (inp.diff(dim=2) == torch.arange(1, 401)[:, None, None]).all()


def test_contrastive_equals_loops():
    objective, net, batch, hp = case("contrastive", B=5)
    a, b = (F.normalize(net(view, T).mean(1), dim=-1) for view in batch["inp"].unbind(1))
    sim = (a @ b.T / hp.tau).tolist()
    want = 0.0
    for side in (sim, [*zip(*sim)]):
        want += sum(math.log(sum(map(math.exp, row))) - row[i] for i, row in enumerate(side))
    sums = objective.loss(net, batch, hp)
    assert float(sums["infonce"].detach()) == pytest.approx(want, rel=1e-4)
    right = sum(max(row) == row[i] for i, row in enumerate(sim))
    assert 0 < right < 5
    assert sums["top1"] == right
    assert {term: count for term, (count, _) in objective.terms(batch, hp).items()} == {"infonce": 10, "top1": 5}


# ---- mdlm

def test_mdlm_masks_l_bytes_with_l_from_every_stratum():
    x, batch, hp = make("mdlm", B=16, T=64)
    masked = batch["tgt"] != IGNORE_INDEX
    count = masked.sum(1)
    assert sorted(((count - 1) // 4).tolist()) == list(range(16)), "one l from each sixteenth of 1..64"
    torch.testing.assert_close(batch["weight"], 64 / count)
    assert (batch["inp"][masked] == MASK).all() and torch.equal(batch["tgt"][masked], x[masked])
    assert torch.equal(batch["inp"][~masked], x[~masked])


THREE = torch.tensor([[65, 66, 67]])
EACH_MASK = [torch.tensor([m]) for m in itertools.product([False, True], repeat=3) if any(m)]


def masked_logits(net, hidden):  # -> (3, 256)
    return net.logits(net(THREE.masked_fill(hidden, MASK), T))[0, :, :256]


def by_count(bounds, net):  # the mean over l of 3 / l times what l masked bytes cost
    mean = 0.0
    for hidden in EACH_MASK:
        inp = THREE.masked_fill(hidden, MASK)
        tgt = THREE.where(hidden, IGNORE_INDEX)
        cost = float(bounds(net, dict(inp=inp, tgt=tgt, weight=torch.ones(1), prefix=3), None))
        mean += cost / math.comb(3, int(hidden.sum())) / int(hidden.sum())
    return mean


@torch.no_grad()
def test_mdlm_equals_the_integral_over_t():
    """The integral of t^(m-1) (1-t)^(L-m) is Beta(m, L-m+1), and the estimator's mean over many rows agrees."""
    net = randomized()
    exact = 0.0
    hp = settings("mdlm", 3)
    for hidden in EACH_MASK:
        m = int(hidden.sum())
        logp = masked_logits(net, hidden).log_softmax(-1)
        nats = -float(logp.gather(1, THREE.T)[hidden[0]].sum())
        exact += nats * math.gamma(m) * math.gamma(4 - m) / math.gamma(4)
    assert by_count(O.mdlm_nelbo, net) == pytest.approx(exact)
    batch = O.mdlm(THREE.expand(3000, -1), make_rng("m"), hp)
    assert float(O.mdlm_nelbo(net, batch, hp).mean()) == pytest.approx(exact, rel=0.03)


# ---- sedd

@torch.no_grad()
def test_sedd_equals_its_authors_integral_over_t():
    """dsigma * (sum_y s_y - q log s_x + q (log q - 1)) at masked bytes, q = 1 / expm1(sigma), s = q c, where sigma is
    -log(1 - t) and each byte is masked with probability t."""
    net = randomized()
    authors = 0.0
    steps = 4000
    t = (torch.arange(steps, dtype=torch.double) + 0.5) / steps
    q = 1 / torch.expm1(-torch.log1p(-t))
    dsigma = 1 / (1 - t)
    for hidden in EACH_MASK:
        m = int(hidden.sum())
        c = masked_logits(net, hidden).double().exp() / 256
        for i in hidden[0].nonzero().flatten().tolist():
            s = q[:, None] * c[i]
            cost = s.sum(1) - q * s[:, int(THREE[0, i])].log() + q * (q.log() - 1)
            authors += float((t ** m * (1 - t) ** (3 - m) * dsigma * cost).mean())
    assert by_count(O.sedd_nelbo, net) == pytest.approx(authors, rel=1e-3)


def test_sedd_costs_nothing_where_nothing_is_masked():
    """Also where the ratios there overflow."""
    objective, net, batch, hp = case("sedd")
    logits = net.logits
    has_target = (batch["tgt"] != IGNORE_INDEX).flatten()[:, None]
    want = objective.loss(net, batch, hp)["bound"]
    net.logits = lambda h: torch.where(has_target, logits(h), 1e3)
    with pytest.MonkeyPatch.context() as patch:                 # as on a GPU, which computes all positions
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        loss = objective.loss(net, batch, hp)["bound"]
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
    masked = batch["prefix"] == T
    assert int(masked.sum()) == 100 and (batch["prefix"][~masked] == 0).all()
    check_clm(x[~masked], {k: batch[k][~masked] for k in ("inp", "tgt")})
    tgt = F.pad(batch["tgt"][masked], (1, 0), value=IGNORE_INDEX)     # position i - 1 predicts byte i
    assert (tgt[:, T] == IGNORE_INDEX).all() and (tgt[:, 1] != IGNORE_INDEX).any(), "any byte but the first"
    check_mlm(x[masked, :T], dict(inp=batch["inp"][masked], tgt=tgt[:, :T]), round(0.3 * T))


@pytest.mark.parametrize("B, ratio", [(8, 0.0), (8, 1.0), (3, 1 / 3), (5, 0.58), (75, 0.84), (100, 0.29)])
def test_hybrid_masks_the_whole_part_of_its_share_spread_evenly(B, ratio):
    """In float32 the product misses its integer for 75 rows and .84, in float64 for 100 and .29."""
    x = torch.ones(B, 3, dtype=torch.long)
    rows = int(B * ratio + 1e-6)
    masked = O.hybrid(x, make_rng("h"), settings("hybrid", 2, hybrid_ratio=ratio))["prefix"] > 0
    assert int(masked.sum()) == rows
    assert ((masked.cumsum(0) - torch.arange(1, B + 1) * rows / B).abs() < 1).all()


@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
def test_hybrid_weighs_its_kinds_by_their_rows(ratio):
    objective, net, batch, hp = case("hybrid", B=8, hybrid_ratio=ratio)
    want = 0.0
    for P, share in ((T, ratio), (0, 1 - ratio)):
        rows = batch["prefix"] == P
        if share:
            kind = dict(inp=batch["inp"][rows], tgt=batch["tgt"][rows], prefix=P)
            want += share * O.token_loss(net, kind, hp)["nll"] / O.count_token_targets(kind)
    torch.testing.assert_close(total(objective, net, batch, hp), want)


# ---- mixtures

@pytest.mark.parametrize("mixture, B, rows", [
    ("clm:3,mlm:1", 8, [6, 2]), ("clm:.5,mlm:.3,prefix:.2", 7, [4, 2, 1]), ("clm:2,mlm,nsp", 8, [4, 2, 2])])
def test_every_micro_batch_holds_fixed_rows_of_each_member(mixture, B, rows):
    x, batch, hp = make(mixture, B=3 * B, batch_size=B, accum=3)
    g = make_rng("corruption 0")
    each = x.unflatten(0, (3, B)).split(rows, dim=1)
    members = [m for _, m in get_objective(hp).members]
    middle = train.micro_batch(batch, 1, 3)
    for m, part, r in zip(members, each, rows):
        own = settings(m.name, T, batch_size=r, accum=3)
        its_bytes = part.flatten(0, 1)[:, :m.n_bytes(T, own)]
        assert same(member_batch(batch, m), m.corrupt(its_bytes, g, own)), "its first n bytes"
        assert len(middle[f"{m.name}.inp"]) == r
    assert torch.equal(middle["clm.inp"], x[B:B + rows[0], :T])


def test_a_mixtures_loss_is_its_members_weighed():
    objective, net, batch, hp = case("electra:3,nsp:1", B=8)
    weights = {term: c for term, (_, c) in objective.terms(batch, hp).items()}
    assert weights == {"electra.generator": 0.75, "electra.discriminator": 37.5, "electra.auc": 0,
                       "electra.replaced": 0, "nsp.nll": 0.25, "nsp.nsp": 0.25, "nsp.accuracy": 0}
    assert objective.loss(net, batch, hp).keys() == {term for term, c in weights.items() if c}
    assert net.heads.keys() == {"generator", "replaced", "nsp"}
    each = [w * total(m, net, member_batch(batch, m), hp) for w, m in objective.members]
    torch.testing.assert_close(total(objective, net, batch, hp), sum(each))


@pytest.mark.parametrize("mixture, single_document, supports_doc_mask, is_random, compares_rows", [
    ("clm,mlm", False, True, True, False), ("clm,mtp", False, True, False, False),
    ("clm,fim:3", [False, True, True, True], False, True, False),
    ("clm:2,contrastive:2", [False, False, True, True], False, True, True)])
def test_a_mixture_is_as_its_members_are(mixture, single_document, supports_doc_mask, is_random, compares_rows):
    objective = get_objective(settings(mixture, T))
    assert torch.as_tensor(objective.single_document).tolist() == single_document
    assert objective.supports_doc_mask == supports_doc_mask
    assert objective.is_random == is_random
    assert objective.compares_rows == compares_rows
    assert objective.flags.keys() == {flag for _, m in objective.members for flag in m.flags}


def test_the_targets_of_a_mixture_are_those_of_its_members():
    objective, _, batch, hp = case("clm,mlm,mdlm,rotation", B=8)
    masked = int((batch["mdlm.tgt"] != IGNORE_INDEX).sum())           # whose loss is divided by all positions
    assert float(O.n_targets(objective, batch, hp)) == 2 * T + 2 * round(0.3 * T) + masked + 2


def test_a_mixture_with_heads_of_its_own_trains(text):
    hp = get_config([*TINY, "--objective", MIXTURES[1], "--batch_size", "8", "--accum", "2", "--max_iters", "4"])
    s = train.prepare(get_objective(hp), open_corpus([text]), hp)
    before = [p.detach().clone() for p in s.params]
    for step in range(4):
        train.load_step_inputs(s, step)
        train.training_step(s)
    assert int(s.first_nonfinite_step) == -1
    assert not any(torch.equal(p, q) for p, q in zip(before, s.params)), "a parameter never moved"
    _, offset = s.windows                       # nsp's rows alone have several candidates for a window
    assert (offset != offset[:, :1]).any(1).tolist() == [False, False, True, True, *[False] * 4] * 2


# ---- a prompt is laid out as in training

@every
def test_a_prompt_is_laid_out_as_in_training(name):
    x, batch, hp = make(name, B=8)
    use = trained_use(OBJECTIVES[name], Continue, hp)
    if not use:
        pytest.skip("continues nothing")
    before = list(use.before)
    after = list(use.after)
    is_like_training = []
    for row, inp, P in zip(x.tolist(), batch["inp"].tolist(), prefixes(batch).tolist()):
        if use.both_ways == (0 < P < T):
            n = P or T                          # a causal row is a prompt to its end
            is_like_training.append(inp[:n] == before + row[:n - len(before) - len(after)] + after)
    assert any(is_like_training)


A, Z = 97, 98
PROMPTS = [  # settings, bytes of a hole between A and Z, the prompt
    ("ul2", {}, 16, ([MODE_R, A, SENTINEL, Z, SENTINEL + 1, SEP, SENTINEL], 6)),
    ("ul2", {}, 17, ([MODE_X, A, SENTINEL, Z, SENTINEL + 1, SEP, SENTINEL], 6)),
    ("fim", dict(fim_spm_rate=0.01), 4, ([PRE, SUF, Z, MID, A], 0)),
    ("bart", dict(bart_noise="mask,infill"), 3, ([A, MASK, Z, SEP, A], 4)),
    ("bart", dict(bart_noise="mask"), 3, ([A, MASK, MASK, MASK, Z, SEP, A], 6))]


@pytest.mark.parametrize("name, changes, m, want", PROMPTS)
def test_a_hole_is_laid_out_as_the_settings_trained_it(name, changes, m, want):
    infill = find_use(OBJECTIVES[name], Infill)
    assert infill.prompt([[A], [Z]], m, settings(name, T, **changes)) == want


@pytest.mark.parametrize("name, kind, changes", [
    ("hybrid", Continue, dict(hybrid_ratio=1.0)), ("hybrid", Fill, dict(hybrid_ratio=0.0)),
    ("fim", Continue, dict(fim_rate=1.0)), ("fim", Infill, dict(fim_rate=0.0)), ("mlm", Continue, {}),
    ("clm", Fill, {}), ("bart", Infill, dict(bart_noise="delete,permute,rotate,replace"))])
def test_what_was_never_trained_is_no_use(name, kind, changes):
    assert trained_use(OBJECTIVES[name], kind, settings(name, T, **changes)) is None


def test_a_prompt_of_spans_is_laid_out_as_in_training():
    """A source that does not end with a hole gets one more sentinel, before which the last answer ends."""
    _, batch, hp = make("span", B=100, T=64)
    endings = set()
    for source, target in all_parts(batch):
        holes = [i for i, id in enumerate(source) if id >= SENTINEL]
        pieces = [source[a + 1:b] for a, b in itertools.pairwise([-1, *holes, len(source)])]
        closing = [SENTINEL + len(holes)] if pieces[-1] else []
        assert O.span_prompt(pieces, 4, hp) == (source + closing + [SEP, SENTINEL], len(source + closing) + 1)
        answers = [i for i in target if i >= SENTINEL] + closing
        for name in ("span", "ul2"):
            stop_ids = find_use(OBJECTIVES[name], Infill).stop_ids
            assert answers == [SENTINEL, *stop_ids[:len(answers) - 1]]
        endings.add(len(closing))
    assert endings == {0, 1}


@pytest.mark.parametrize("noise", ["mask", "infill"])
def test_a_prompt_of_bart_is_laid_out_as_in_training(noise):
    """With one byte struck the source has one hole; the answer follows what is written of the left side."""
    _, batch, hp = make("bart", B=100, bart_noise=noise, bart_rate=0.001)
    for z, (source, target) in zip(batch["inp"].tolist(), all_parts(batch)):
        a = source.index(MASK)
        ids, P = O.bart_prompt([source[:a], source[a + 1:]], 1, hp)
        assert P == len(source) + 1
        assert ids == z[:P + a] == source + [SEP] + target[:a]
    assert all(find_use(OBJECTIVES[name], Infill).stop_ids == (EOT,) for name in ("bart", "fim"))
