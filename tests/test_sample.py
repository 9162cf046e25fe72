import argparse
import dataclasses
import io
import math
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, randomize, randomized, settings

import sample
import train
from data import CLS, EOT, MASK, MID, MODE_R, MODE_S, MODE_X, PRE, SENTINEL, SEP, SUF, Flag, document_ids, make_rng
from model import ModelConfig, Transformer
from objectives import OBJECTIVES, Continue, Fill, Follow, Infill, Mark, Objective, ParallelDrafter, Repair, Seam
from objectives import embed, find_use, get_objective, mtp_drafter, seq2seq
from run import build, load_checkpoint, load_run

T = 12
GREEDY = dict(temperature=0)
FOUR = torch.tensor([0.5, 0.25, 0.15, 0.1])     # a distribution of 4 bytes
IN_PLACE = Fill()
SHIFTED = Fill((EOT,), shift=1)
FRAMED = Fill((CLS, MODE_S), (SEP,), shift=1)
LAYOUTS = pytest.mark.parametrize("use", [IN_PLACE, SHIFTED, FRAMED], ids=["in place", "shifted", "framed"])


def ids(n, N=1, seed=0):
    return torch.randint(1, 256, (N, n), generator=make_rng(f"prompt {seed}"))


def gens(N=1, seed=1):
    return sample.sample_generators(seed, N)


def generated(*args, **kwargs):  # what generate yields, as one tensor (N, written)
    return torch.stack(list(sample.generate(*args, **kwargs)), dim=1)


def bits_of(net, row, targets, prefix=0):  # ids (n,), {position: byte} -> bits
    logp = net.logits(net(row[None], prefix))[0].detach().log_softmax(-1)
    return -sum(float(logp[i, byte]) for i, byte in targets.items()) / math.log(2)


class Stub:
    """A model without weights, whose states are its ids, and whose logits are what it is given."""
    embed = torch.nn.Embedding(512, 4)
    config = ModelConfig(1, 1, 4)
    dtype = torch.float32

    def __init__(self, logits):
        self.logits = logits

    def __call__(self, ids, prefix=0, doc=None, cache=None, positions=None, lookups=None, mask=None):
        if cache is not None:
            cache.advance(ids.size(1))
        return ids


def certain(ids):  # ids (...) -> logits (..., V) that give each of them all the probability
    return F.one_hot(ids, 512) * 100.0


def four(p):  # probabilities (..., 4) of bytes 65 to 68 -> logits (..., V)
    return F.pad(p.log(), (65, 443), value=-1e9)


def chi2(counts, p):  # counts, probabilities of the same shape -> over the cells where some are expected
    expected = p * counts.sum()
    assert counts[expected < 1e-6].sum() == 0, "an impossible outcome was sampled"
    return float(((counts - expected) ** 2 / expected.clamp(min=1e-9))[expected > 1].sum())


# ---- sampling a byte

def test_temperature_0_takes_the_most_likely_byte_and_no_special_id_is_ever_sampled():
    logits = torch.zeros(1, 512)
    logits[0, 300] = 9
    logits[0, 65] = 5
    assert sample.sample_bytes(logits, gens(), temperature=0).tolist() == [65]
    assert max(int(sample.sample_bytes(logits, [make_rng(f"{i}")])) for i in range(200)) < 256


def test_samples_follow_the_probabilities():
    sampled = sample.sample_bytes(four(FOUR).expand(1, 4000, -1), gens())[0]
    assert chi2(torch.bincount(sampled, minlength=69)[65:69], FOUR) < 25            # 3 degrees of freedom
    ends = torch.tensor([0, 1 - 1e-16], dtype=torch.double)
    assert sample.inverse_cdf(torch.tensor([0.0, 1, 0]).expand(2, -1), ends).tolist() == [1, 1]


@pytest.mark.parametrize("how, allowed", [
    (dict(top_k=2), 2), (dict(top_k=1), 1), (dict(top_k=5000), 4),
    (dict(top_p=0.6), 2), (dict(top_p=0.5), 1), (dict(top_p=0.0), 1),
    (dict(top_k=2, top_p=0.6), 2),              # counted after the cut, the first would hold .67
    (dict(top_k=3, top_p=0.6), 2), (dict(temperature=1e-310), 1)])
def test_top_k_and_top_p_cut_the_tail(how, allowed):
    sampled = sample.sample_bytes(four(FOUR).expand(1, 100, -1), gens(), **how)
    assert set(sampled[0].tolist()) == set(range(65, 65 + allowed))


def test_the_nucleus_ends_where_it_has_exactly_top_p():
    """Two bytes of probability 1/2, which is exact in binary: the first alone has top_p."""
    p = sample.distribution(torch.full((512,), -1e9).index_fill(0, torch.tensor([65, 66]), 0.0), top_p=0.5)
    assert (p > 0).nonzero()[:, 0].tolist() == [65]


# ---- continuing

def without_cache(net, x, n, prefix=0, doc_mask=False):  # what generate writes, by a whole pass for each byte
    out = x
    start = max(0, x.size(1) - T)
    rngs = gens(len(x))
    ended = torch.zeros(len(x), dtype=torch.bool)
    for _ in range(n):
        if out.size(1) - start > T:
            if prefix:
                break
            start = out.size(1) - T // 2
        row = out[:, start:]
        rule = torch.full((len(x),), prefix) if prefix else 0
        h = net(row, rule, document_ids(row) if doc_mask else None)
        byte = sample.sample_bytes(net.logits(h[:, -1]), rngs).masked_fill(ended, EOT)
        ended |= byte == EOT
        out = torch.cat((out, byte[:, None]), dim=1)
    return out[:, x.size(1):]


@pytest.mark.parametrize("n, prefix", [(1, 0), (T, 0), (T + 1, 0), (3 * T, 0), (1, 1), (T, T), (7, 3)])
def test_the_cache_changes_nothing(n, prefix):
    """Before and after the block is full; with a prefix the text ends there."""
    net = randomized().requires_grad_(False)
    x = ids(n, 2)
    out = generated(net, x, 30, T, gens(2), prefix)
    assert torch.equal(out, without_cache(net, x, 30, prefix))
    assert out.shape == (2, T - n + 1 if prefix else 30)
    assert prefix < 2 or not torch.equal(out, without_cache(net, x, T - n + 1))


ENDS = pytest.mark.parametrize("ends", [[3], [0, 4], [2, 6], [6], [0, 1, 2, 3, 4, 5, 6], []])


@ENDS
@pytest.mark.parametrize("prefix", [0, 7, 5])
def test_a_continuation_attends_to_its_own_document_alone(prefix, ends, monkeypatch):
    """A prompt of 7 bytes of which some end a document, perhaps the last, or all. Over a static cache, too."""
    monkeypatch.setattr(torch, "compile", compile_nothing)
    differs = False
    for seed in range(4):
        net = randomized(seed=seed).requires_grad_(False)
        x = ids(7, 2, seed)
        x[:, ends] = EOT
        out = generated(net, x, T - 7, T, gens(2), prefix, doc_mask=True)
        expected = without_cache(net, x, T - 7, prefix, doc_mask=True)
        assert torch.equal(out, expected)
        step = sample.compile_step(net, 2, T)
        assert torch.equal(generated(net, x, T - 7, T, gens(2), prefix, doc_mask=True, compiled=step), expected)
        differs |= not torch.equal(out, without_cache(net, x, T - 7, prefix))
    assert differs == bool(ends)


def test_a_hole_is_filled_at_its_position():
    net = randomized().requires_grad_(False)
    span = OBJECTIVES["span"]
    ids, n = find_use(span, Infill).prompt([[65], [66, 67, 68]], 4, None)
    hp = settings("span", 24)
    [out], _ = sample.infill(net, span, hp, ids, n, 1, 20, gens(), **GREEDY)
    row = torch.tensor([ids + out])
    prefix = torch.tensor([n])
    logits = net.logits(net(row, prefix, positions=span.positions(row, prefix, hp)))[0, len(ids) - 1:-1]
    assert logits[:, [*range(256), SENTINEL + 1]].argmax(-1).tolist() == out
    assert len(out) > 5


def test_generate_returns_when_every_row_has_ended():
    script = iter([[EOT, 66], [65, EOT]])
    model = Stub(lambda h: certain(torch.tensor(next(script))))
    assert generated(model, ids(3, 2), 9, T, gens(2)).tolist() == [[EOT, EOT], [66, EOT]]


# ---- speculation

KINDS = pytest.mark.parametrize("kind", ["parallel", "sequential"])


def model_and_drafter(n, seed=0, device="cpu", kind="parallel"):  # of random weights: few drafts are accepted
    hp = settings("mtp", T, mtp_heads=n, mtp_kind=kind)
    net = randomized(seed=seed).requires_grad_(False).to(device)
    for name, head in OBJECTIVES["mtp"].heads(net.config, hp).items():
        net.heads[name] = randomize(head, seed).requires_grad_(False).to(device)
    return net, mtp_drafter(net, hp)


class FixedDrafter(ParallelDrafter):  # drafts from the same logits (k, V), whatever was written
    def __init__(self, logits):
        self.logits = logits
        self.k = len(logits)

    def draft_features(self, h):  # -> (m, k, V)
        return self.logits.expand(len(h), -1, -1)


@pytest.mark.parametrize("n", [1, 3])
def test_what_verify_keeps_is_distributed_as_the_model_alone_would_sample(n):
    """Also where fewer drafts are left than distributions."""
    p = torch.tensor([[.7, .1, .1, .1], [0, .1, .2, .7], [.25, .25, .25, .25], [0, .5, .5, 0]]).double()
    q = torch.tensor([[.04, .06, .1, .8], [.7, .2, .05, .05], [.1, .84, .05, .01]]).double()
    g = make_rng("verify")
    counts = torch.zeros(n + 1, 4)
    for _ in range(900):
        drafts = sample.inverse_cdf(q, torch.rand(3, generator=g, dtype=torch.double)).tolist()[:n]
        for i, byte in enumerate(sample.verify(p[:n + 1], q, drafts, g)):
            counts[i, byte] += 1
    for i in range(n + 1):                      # the i-th id is written only where all drafts before it were kept
        assert chi2(counts[i], p[i]) < 25       # 3 degrees of freedom


@pytest.mark.parametrize("kind, n, max_new_tokens, how", [
    ("fixed", 5, 4, dict(temperature=0.7, top_k=3)), ("fixed", T - 2, 9, {}), ("sequential", 5, 4, {})])
def test_speculation_samples_from_the_model_s_own_distribution(kind, n, max_new_tokens, how):
    """Triples of 4 bytes after one prompt, drafted by heads that differ strongly from the model, or by modules.
    max_new_tokens leaves space for two drafts, the block for one."""
    net, drafter = model_and_drafter(3, kind="sequential")
    x = ids(n)
    logits = net.logits
    only_four = torch.full((512,), -1e9).index_fill(0, torch.arange(65, 69), 0)
    net.logits = lambda h: logits(h) / 8 + only_four
    if kind == "fixed":
        drafter = FixedDrafter(net.logits(torch.randn(3, net.config.n_embd, generator=make_rng("far")) * 20))
    bytes_ = torch.arange(65, 69)[:, None]
    rows = x
    joint = torch.ones(1, 1, dtype=torch.double)
    for _ in range(3):
        p = sample.distribution(net.logits(net(rows)[:, -1]), **how)[:, 65:69]
        joint = (joint * p).view(-1, 1)
        rows = torch.cat((rows.repeat_interleave(4, 0), bytes_.repeat(len(rows), 1)), dim=1)
    counts = torch.zeros(4, 4, 4)
    stats = []
    for seed in range(500):
        g = make_rng(f"{seed}")
        steps = sample.speculate(net, drafter, x[0].tolist(), max_new_tokens, T, g, stats, **how)
        a, b, c = [next(steps) - 65 for _ in range(3)]
        counts[a, b, c] += 1
    assert chi2(counts.flatten(), joint.flatten()) < 110        # 63 degrees of freedom at most
    assert {drafted for drafted, _ in stats} == ({0, 1} if n == T - 2 else {0, 1, 2})
    assert 0 < sum(kept for _, kept in stats) < sum(drafted for drafted, _ in stats)


@pytest.mark.parametrize("n", [2, 7])
@KINDS
def test_speculation_at_temperature_0_is_plain_decoding(n, kind):
    """For prompts of several lengths, past the end of the block."""
    passes = 0
    written = 0
    for length in (1, 4, T - 1, T, T + 1, 2 * T):
        net, drafter = model_and_drafter(n, length, kind=kind)
        x = ids(length)
        stats = []
        plain = generated(net, x, 25, T, gens(), **GREEDY)[0].tolist()
        text = sample.speculate(net, drafter, x[0].tolist(), 25, T, make_rng("s"), stats, **GREEDY)
        assert list(text) == plain
        assert all(0 <= kept <= drafted <= n - 1 for drafted, kept in stats)
        passes += len(stats)
        written += len(plain)
    assert passes < written


@ENDS
@KINDS
def test_speculation_attends_to_its_own_document_alone(kind, ends):
    """What it writes equals plain decoding, of which another test says so; past the end of the block, too."""
    differs = False
    for seed in range(4):
        net, drafter = model_and_drafter(4, seed, kind=kind)
        x = ids(7, seed=seed)
        x[:, ends] = EOT
        for T_block in (T, 99):
            drafter.T = T_block
            plain = generated(net, x, 25, T_block, gens(), doc_mask=True, **GREEDY)[0].tolist()
            prompt = x[0].tolist()
            g = make_rng("s")
            assert [*sample.speculate(net, drafter, prompt, 25, T_block, g, doc_mask=True, **GREEDY)] == plain
            differs |= [*sample.speculate(net, drafter, prompt, 25, T_block, g, **GREEDY)] != plain
    assert differs == bool(ends)


def test_speculation_keeps_a_perfect_draft_and_stops_at_the_end_of_the_document():
    """A model that counts up to EOT, and heads that count on: n bytes a pass after the first."""
    counting = Stub(lambda h: certain((h + 1) % 256))
    stats = []
    drafter = FixedDrafter(torch.zeros(3, 512))
    drafter.draft_features = lambda h: certain((h[:, None] + torch.arange(2, 5)) % 256)
    text = sample.speculate(counting, drafter, [215], 99, 99, make_rng("s"), stats, **GREEDY)
    assert list(text) == [*range(216, 256), EOT]
    assert len(stats) == 11


def check_compiled_steps(n, temperature=0.0, device="cpu", kind="parallel"):
    """The same texts with a step and without one, past the block's end, for prompts of several lengths."""
    net, drafter = model_and_drafter(n, device=device, kind=kind)
    one_byte = sample.compile_step(net, 2, T)
    several = sample.compile_step(net, 1, T, drafter.draft_features, n)
    assert one_byte is not None
    assert (several is None) == (n > T)
    for seed in range(3):
        x = ids(1 + 7 * seed, seed=seed).to(device)
        rows = x.expand(2, -1)
        plain = generated(net, rows, 30, T, gens(2))
        assert torch.equal(plain, generated(net, rows, 30, T, gens(2), compiled=one_byte))
        texts = []
        for step in (None, several):
            g = make_rng(f"{seed}")
            prompt = x[0].tolist()
            texts.append([*sample.speculate(net, drafter, prompt, 40, T, g, compiled=step, temperature=temperature)])
        assert texts[0] == texts[1]
        assert len(texts[0]) == 40 or texts[0][-1] == EOT


def compile_nothing(f, **options):  # stands for torch.compile: other shapes or strides would compile anew
    seen = set()

    def run(ids):
        seen.add((ids.shape, ids.stride()))
        assert len(seen) == 1
        return f(ids)
    return run


@pytest.mark.parametrize("n, temperature", [(4, 1.0), (7, 0.0), (T + 1, 0.0)])
@KINDS
def test_a_step_over_a_static_cache_changes_nothing(kind, n, temperature, monkeypatch, capsys):
    """The step that --compile compiles, uncompiled; with more heads than two passes, or one, have space for."""
    monkeypatch.setattr(torch, "compile", compile_nothing)
    check_compiled_steps(n, temperature, kind=kind)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler")
def test_a_compiled_step_changes_nothing():
    check_compiled_steps(4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("n", [4, 7])
def test_a_step_in_a_cuda_graph_changes_nothing(n):
    check_compiled_steps(n, device="cuda")


# ---- filling masked bytes

@pytest.mark.parametrize("order, scale, steps", [
    ("ancestral", 1.0, 1), ("ancestral", 1.0, 5), ("ancestral", 1.0, 0), ("analytic", 1.0, 5), ("analytic", 0.5, 5),
    ("analytic", 0.5, 1), ("analytic", 0.5, 0)])
def test_diffusion_samplers_reproduce_the_distribution_of_a_perfect_denoiser(order, scale, steps):
    """The denoiser knows the distribution of each byte. A pass unmasks (t - s) / t of what is left, the analytic one
    times the sum of its ratios, which need not be 1; the last pass unmasks all."""
    N, n = 20, 100
    most = steps or 64
    oracle = Stub(lambda ids: four(FOUR).expand(*ids.shape, -1) + math.log(256 * scale))
    x = torch.full((N, n), MASK)
    states = [x, *sample.unmask(oracle, x, gens(N), IN_PLACE, steps, order)]
    for before, after in zip(states, states[1:]):
        assert torch.equal(after[before != MASK], before[before != MASK]), "a byte was changed again"
    assert len(states) <= most + 1
    counts = torch.bincount(states[-1].flatten(), minlength=MASK + 1)
    assert counts[65:69].sum() == N * n
    assert chi2(counts[65:69], FOUR) < 25
    first = 1.0 if most == 1 else scale / most
    assert abs(float((states[1] != x).float().mean()) - first) < 5 * (first / N / n) ** 0.5


@pytest.mark.parametrize("order, steps, passes", [("confident", 3, 3), ("left", 0, T), ("ancestral", 1, 1),
                                                  ("revise", 4, 4), ("remask", 9, 9)])
def test_filling_leaves_no_mask_and_changes_nothing_else(order, steps, passes):
    net = randomized()
    x = ids(T, 3)
    x[0, 2:5] = MASK
    x[1, 7] = MASK
    x[2, :] = MASK
    states = [*sample.unmask(net, x, gens(3), IN_PLACE, steps, order)]
    assert len(states) == passes
    assert (states[-1][x == MASK] < 256).all()
    assert torch.equal(states[-1][x != MASK], x[x != MASK])


@LAYOUTS
def test_order_confident_fills_the_most_certain_byte_first_and_order_left_the_leftmost(use):
    before, after, shift = list(use.before), list(use.after), use.shift
    net = randomized().requires_grad_(False)
    x = ids(T)
    holes = [2, 6, 9]
    x[0, holes] = MASK

    def best(x):  # -> probability and byte of each position
        row = torch.tensor([[*before, *x[0].tolist(), *after]])
        return net.logits(net(row, row.size(1)))[0, len(before) - shift:, :256].softmax(-1).max(-1)
    for order, priority in (("confident", lambda p, i: p[i]), ("left", lambda p, i: -i)):
        expected = x.clone()
        while (expected == MASK).any():
            p, byte = best(expected)
            left = [i for i in holes if expected[0, i] == MASK]
            i = max(left, key=lambda i: priority(p, i))
            expected[0, i] = byte[i]
        assert torch.equal(sample.fill(net, x, gens(), use, order=order, **GREEDY), expected)


def test_order_remask_reproduces_the_distribution_of_a_perfect_denoiser():
    """ReMDM keeps MDLM's marginals: after the pass to time s each byte is masked with probability s. Until the last
    pass a written byte is masked again with probability sigma, at most s / (1 - t)."""
    N, n, steps = 20, 100, 8
    oracle = Stub(lambda ids: four(FOUR).expand(*ids.shape, -1) + math.log(256))
    x = torch.full((N, n), MASK)
    x[:, 0] = 65                                # not a hole
    states = [x, *sample.unmask(oracle, x, gens(N), IN_PLACE, steps, "remask")]
    assert len(states) == steps + 1
    for i, (before, after) in enumerate(zip(states, states[1:])):
        s, t = 1 - (i + 1) / steps, 1 - i / steps
        assert abs(float((after[:, 1:] == MASK).float().mean()) - s) < 0.05
        written = before[:, 1:] != MASK
        if written.any():
            sigma = min(sample.REMASK_RATE, s / (1 - t))
            again = float((after[:, 1:] == MASK)[written].float().mean())
            assert abs(again - sigma) < 5 * (0.05 / int(written.sum())) ** 0.5
        changed = written & (after[:, 1:] != before[:, 1:])
        assert (after[:, 1:][changed] == MASK).all(), "a byte changed without a MASK between"
    assert (states[-1][:, 0] == 65).all()
    counts = torch.bincount(states[-1][:, 1:].flatten(), minlength=MASK + 1)
    assert counts[65:69].sum() == N * (n - 1)
    assert chi2(counts[65:69], FOUR) < 25


def test_order_revise_masks_the_least_certain_bytes_again():
    """Against a loop: Mask-Predict, in 4 passes over 8 holes of each row, of which 6, 4, 2 and 0 are masked again."""
    net = randomized().requires_grad_(False)
    x = ids(T, 2)
    holes = [1, 2, 3, 5, 6, 8, 9, 10]
    x[:, holes] = MASK
    states = [*sample.unmask(net, x, gens(2), IN_PLACE, 4, "revise", **GREEDY)]
    for row, found in enumerate(zip(*states)):
        expected = x[row].clone()
        certainty = {}
        for again, state in zip((6, 4, 2, 0), found):
            p, byte = net.logits(net(expected[None], T))[0, :, :256].softmax(-1).max(-1)
            for i in holes:
                if expected[i] == MASK:
                    certainty[i] = float(p[i])
                    expected[i] = byte[i]
            expected[sorted(holes, key=certainty.get)[:again]] = MASK
            assert torch.equal(state, expected)
    assert (states[-1] != MASK).all()


# ---- infilling holes of unknown length

def infill(script, pieces, max_new_tokens, block):  # by a model that writes the script -> bytes of each hole, ended?
    script = iter(script)
    span = OBJECTIVES["span"]
    model = Stub(lambda h: certain(torch.tensor([next(script)])))
    source, prefix = find_use(span, Infill).prompt(pieces, 4, None)
    return sample.infill(model, span, settings("span", block), source, prefix, len(pieces) - 1, max_new_tokens, gens())


def test_spans_are_split_at_their_sentinels():
    script = [70, SENTINEL + 1, 71, 72, SENTINEL + 2, SENTINEL + 3]
    assert infill(script, [[65], [66], [], []], 50, 99) == ([[70], [71, 72], []], True)
    assert infill([70, EOT, SENTINEL + 2], [[65], [66], []], 50, 99) == ([[70], []], True), "EOT ends a span, too"


@pytest.mark.parametrize("block, most, space", [(16, 50, 8), (99, 9, 9), (99, 3, 3), (99, 0, 0)])
@pytest.mark.parametrize("written", range(1, 12))
def test_holes_end_with_the_block_or_at_max_new_tokens(written, block, most, space):
    """8 of 16 positions are the source's and the first sentinel's."""
    script = [70] * written + [SENTINEL + 1] + [71] * 20
    left = space - written - (block == 16)      # a sentinel takes a position, but is no new byte
    first = [70] * min(written, space)
    second = [71] * max(0, left)
    assert infill(script, [[65], [66], [67]], most, block) == ([first, second], False)


def test_the_end_of_the_block_does_not_count_as_the_end_of_a_middle():
    """Half of the rearranged rows teach that a full row ends with EOT."""
    fim = OBJECTIVES["fim"]
    ids, P = find_use(fim, Infill).prompt([[65], [66]], 4, settings("fim", 32))
    n = 32 - len(ids)
    script = iter([70] * n + [EOT])
    model = Stub(lambda h: certain(torch.tensor([next(script)])))
    assert sample.infill(model, fim, settings("fim", 32), ids, P, 1, 99, gens()) == ([[70] * n], False)


def test_a_middle_is_trimmed_where_the_suffix_fits():
    """By a model that knows the alphabet. A later cut after a repetition of the suffix is no better."""
    alphabet = Stub(lambda ids: certain((ids + 1) % 512))

    def trim(name, middle, right):
        hp = settings(name, 32)
        return bytes(sample.trim_to_suffix(alphabet, OBJECTIVES[name], hp, [*b"abc"], [*middle], [*right]))
    assert trim("fim", b"defxyz", b"ghi") == b"def"
    assert trim("fim", b"xyzdef", b"ghi") == b"xyzdef"
    assert trim("fim", b"defghidef", b"ghi") == b"def"
    assert trim("fim", b"ghi", b"ghi") == b""
    assert trim("fim", b"", b"ghi") == b""
    # without a suffix, or by a model that does not code text from left to right, nothing is trimmed
    assert trim("fim", b"defxyz", b"") == b"defxyz"
    assert trim("span", b"defxyz", b"ghi") == b"defxyz"
    assert trim("ul2", b"defxyz", b"ghi") == b"defxyz"


@pytest.mark.parametrize("name", ["span", "ul2", "fim"])
def test_a_hole_ends_as_soon_as_its_end_is_likely_and_no_sooner(name):
    """Whatever bytes are sampled; EOT is an end, too, and is never sampled."""
    net = randomized().requires_grad_(False)
    objective = OBJECTIVES[name]
    use = find_use(objective, Infill)
    lengths = set()
    end = use.stop_ids[0]
    net.head.weight[0, [end, EOT]] *= 6         # likely here and there
    for seed in range(40):
        hp = settings(name, 64)
        asked, P = use.prompt([ids(3, seed=seed)[0].tolist(), [*b"ghi"]], 4, hp)
        [written], ended = sample.infill(net, objective, hp, asked, P, 1, 9, gens(seed=seed))
        likely = []
        for k in range(len(written) + ended):   # before each byte, and before the end
            row = torch.tensor([asked + written[:k]])
            prefix = torch.tensor([P])
            p = net.logits(net(row, prefix, positions=objective.positions(row, prefix, hp)))[0, -1].softmax(-1)
            likely.append(sum(float(p[i]) for i in {end, EOT}) >= sample.END_THRESHOLD)
        assert likely == [False] * len(written) + [True] * ended
        lengths.add(len(written))
    assert len(lengths) > 2, "all holes are equally long"


@pytest.mark.parametrize("n_left", [0, 5, 300])
@pytest.mark.parametrize("n_right", [1, 9, 40])
@pytest.mark.parametrize("doc_mask", [False, True])
def test_cuts_of_a_middle_are_compared_byte_by_byte(doc_mask, n_left, n_right):
    """It takes the first cut after which the suffix's first 16 bytes are at least a tenth as likely as after the best
    cut. A document ends inside of the middle."""
    net = randomized().requires_grad_(False)
    hp = settings("fim", 32, doc_mask=doc_mask)
    found = set()
    for seed in range(5):
        left = ids(n_left, seed=f"{seed}{n_left}")[0].tolist()
        middle = ids(11, seed=f"{seed}11")[0].tolist()
        right = ids(n_right, seed=f"{seed}{n_right}")[0].tolist()
        middle[5] = EOT
        some = right[:16]
        bits = []
        for k in range(12):
            context = ([EOT] + left + middle[:k])[-(32 - len(some)):]
            row = torch.tensor([context + some])
            logp = net.logits(net(row, 0, document_ids(row) if doc_mask else None)).log_softmax(-1)[0]
            bits.append(-sum(float(logp[len(context) - 1 + i, byte]) for i, byte in enumerate(some)) / math.log(2))
        cut = next(k for k in range(12) if bits[k] < min(bits) + math.log2(10))
        assert sample.trim_to_suffix(net, OBJECTIVES["fim"], hp, left, middle, right) == middle[:cut]
        found.add(cut)
    assert len(found) > 1 or n_right == 1       # one byte decides little


# ---- scoring

@pytest.mark.parametrize("stride", [1, 5, T])
@pytest.mark.parametrize("n", [1, 2, T, T + 1, 3 * T + 5])
def test_a_score_is_the_sum_over_bytes(n, stride):
    """With stride T the windows are disjoint, and each starts without context."""
    net = randomized()
    x = ids(n)[0]
    bits = 8.0
    for start in range(0, n - 1, stride):
        a = max(0, start + stride - T)
        end = min(start + stride, n - 1)
        bits += bits_of(net, x[a:end], {i - a: x[i + 1] for i in range(start, end)})
    assert sample.score(net, x.byte(), T, stride) == pytest.approx(bits, rel=1e-5)


@LAYOUTS
def test_a_pseudo_score_masks_one_byte_at_a_time(use):
    before, after, shift = list(use.before), list(use.after), use.shift
    net = randomized()
    x = ids(T + 3)[0]
    bits = 0.0
    for window in x.split(T - len(before) - len(after)):
        for i, byte in enumerate(window):
            row = torch.tensor([*before, *window.tolist(), *after])
            row[len(before) + i] = MASK
            bits += bits_of(net, row, {len(before) + i - shift: byte}, len(row))
    assert sample.score_pseudo(net, x.byte(), T, use) == pytest.approx(bits, rel=1e-5)


def test_the_standard_error_of_a_bound_is_the_scatter_of_its_estimates():
    """For a random model, and for one that predicts the text the better the more of it it sees."""
    net = randomized().requires_grad_(False)
    noise = torch.randn(32, generator=make_rng("wild")) * 2
    hp = settings("mdlm", 32)

    class Informed(Stub):
        def __call__(self, ids, prefix, *rest, **how):
            return ((ids != MASK).float().mean(1, keepdim=True) * 5 + noise)[..., None]
    informed = Informed(lambda h: F.one_hot(torch.tensor(65), 512) * h)
    for model, text in ((net, ids(96)[0]), (informed, torch.full((96,), 65))):
        estimates = [sample.score_bound(model, get_objective(hp), text.byte(), hp, seed) for seed in range(80)]
        bits, errors = torch.tensor(estimates).T
        assert 0.8 < bits.std() / errors.mean() < 1.3


def test_the_standard_error_of_a_bound_with_other_strata_is_too_large_and_never_too_small():
    """As score_bound's docstring says: here half of a window's rows are of a kind that costs more, whatever their
    number of targets."""
    net = randomized().requires_grad_(False)
    hp = settings("mdlm", 32)
    mdlm = OBJECTIVES["mdlm"]

    def nelbo(model, batch, hp):
        return mdlm.nelbo(model, batch, hp) + 50.0 * (torch.arange(len(batch["inp"])) % 2)
    fork = dataclasses.replace(mdlm, nelbo=nelbo)
    estimates = [sample.score_bound(net, fork, ids(96)[0].byte(), hp, seed) for seed in range(20)]
    bits, errors = torch.tensor(estimates).T
    assert bits.std() < 0.8 * errors.mean()


@pytest.mark.parametrize("name", ["mdlm", "sedd"])
def test_the_bound_of_an_untrained_model_is_8_bits_a_byte(name):
    hp = settings(name, 32)
    model = build(hp)
    bits, error = sample.score_bound(model, get_objective(hp), ids(100)[0].byte(), hp, 1)
    assert bits == pytest.approx(800, rel=1e-5)
    assert error == pytest.approx(0, abs=1e-3)


def test_a_long_text_is_embedded_by_the_mean_of_its_blocks():
    net = randomized().requires_grad_(False)
    x = ids(2 * T + 3)[0]
    mean = sum(embed(net, block[None])[0] * len(block) for block in x.split(T))
    vectors = sample.embed_texts(net, embed, [[5], x.tolist(), []], T)
    torch.testing.assert_close(vectors[1], F.normalize(mean, dim=0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(vectors[0], embed(net, torch.tensor([[5]]))[0])
    assert vectors.norm(dim=1).tolist() == pytest.approx([1, 1, 1])


# ---- the command

FILES = {"blank.txt": b"\n\n", "void.txt": b"", "short.txt": b"import argparse\n" * 40,
         "lines.txt": b"a\n\nccc\nbb\n", "ends.txt": b"one\0two\0" * 9}


@pytest.fixture(scope="module")
def place(tmp_path_factory):  # a folder with a run of every objective, and of a mixture
    path = tmp_path_factory.mktemp("runs")
    here = os.getcwd()
    os.chdir(path)
    shutil.copy(shutil.__file__, "text.txt")
    os.mkfifo("pipe")
    for name, content in FILES.items():
        with open(name, "wb") as f:
            f.write(content)
    for name in [*OBJECTIVES, "clm:.5,mlm:.5"]:
        flags = [*TINY, "--data", "text.txt", "--max_iters", "2", "--objective", name]
        assert train.main(flags, with_sample=False) == 0
    os.chdir(here)
    return path


@pytest.fixture
def runs(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setitem(sample.FLAGS["how"], "max_new_tokens", Flag(60, "longer than the block", 0, 999))


def output(capsys, run, *flags):  # -> what sample.py prints: standard output, standard error
    capsys.readouterr()
    assert not sample.main(["--out_dir", f"out/{run}", *flags, "--dtype", "float32"])
    return capsys.readouterr()


def stdout(capsys, run, *flags):
    return output(capsys, run, *flags).out


def refusal(capsys, run, *flags):  # the one line with which sample.py refuses
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        sample.main([*(["--out_dir", f"out/{run}"] if run else []), *flags])
    out, err = capsys.readouterr()
    assert e.value.code == 2
    assert err.count("\n") == 1
    assert not out
    return err


def changed_run(run, name, config=(), **fields):  # writes out/name, a run with another checkpoint -> name
    ckpt = load_checkpoint(f"out/{run}")
    os.makedirs(f"out/{name}", exist_ok=True)
    torch.save(ckpt | {"config": ckpt["config"] | dict(config)} | fields, f"out/{name}/ckpt.pt")
    return name


def set_use(monkeypatch, name, use):  # gives an objective another first use
    monkeypatch.setitem(OBJECTIVES, name, dataclasses.replace(OBJECTIVES[name], uses=(use,)))


RAW = "a\x1b[31mb\x07c\x08d"                    # with control characters, and as a terminal gets them
ESCAPED = "a\\x1b[31mb\\x07c\\x08d"


def has_control_characters(out):  # other than those that highlight new parts
    return re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", re.sub(r"\x1b\[[07]m", "", out))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_without_a_prompt_every_objective_demonstrates_itself(name, runs, capsys, monkeypatch):
    run = changed_run(name, "raw", held_out=torch.tensor([*(RAW.encode() * 99)], dtype=torch.uint8))
    out = stdout(capsys, run)
    assert "---" in out
    assert len(out) > 60
    assert out == stdout(capsys, run), "the same seed gave another text"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert not has_control_characters(stdout(capsys, run)), "a control character reached a terminal"


def test_too_little_memory_is_one_line(runs, capsys, monkeypatch):
    def mode(*args):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    monkeypatch.setitem(sample.MODES, Continue, (mode, {"num_samples"}))
    assert "Try a smaller --num_samples" in refusal(capsys, "clm", "--num_samples", "9")


def test_of_a_mixture_the_member_is_named_that_reads_a_flag(runs, capsys):
    assert refusal(capsys, "clm_.5+mlm_.5", "--steps", "3").endswith("Try --objective mlm\n")
    hint = "Try a run trained as span or ul2 or fim or nsp\n"
    assert refusal(capsys, "clm_.5+mlm_.5", "--prefix", "a").endswith(hint)


def test_the_help_begins_with_an_example_of_every_mode(capsys):
    """Each below a line with its objectives' names and what they do."""
    with pytest.raises(SystemExit):
        sample.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    examples = [i for i, line in enumerate(lines) if line.strip().startswith("python sample.py")]
    assert max(examples) < min(i for i, line in enumerate(lines) if line.startswith("  --"))
    assert not any(line.startswith("N samples") for line in lines), "the legend of sizes is for readers of the source"
    named = set()
    for i in examples:
        names, _, task = lines[i - 1].partition(": ")
        assert task
        named |= set(names.strip().split(", "))
    known = named & set(OBJECTIVES)
    assert {type(OBJECTIVES[name].uses[0]) for name in known} == set(sample.MODES)
    assert named - known == {"any objective", "objectives with a likelihood"}


@pytest.mark.parametrize("line", [line.strip() for line in sample.__doc__.splitlines() if "--p" in line])
def test_the_examples_of_the_help_work(line, runs, capsys):
    """For the objectives that they are for."""
    heading = sample.__doc__.splitlines()[sample.__doc__.splitlines().index(f"        {line}") - 1]
    for name in heading.strip().partition(": ")[0].split(", "):
        assert stdout(capsys, name, *shlex.split(line)[2:])


LONG = "x" * 99
HOLE = "a<extra_id_0>b"
SIDES = ["--prefix", "a", "--suffix", "b"]
INPUTS = {
    "clm": [[""], [LONG], [os.fsdecode(b"\xff\xfe\x80")], ["a\0b"], ["<MASK><extra_id_0>"], ["🙂"]],
    "mtp": [[""], ["x", "--max_new_tokens", "0"], ["x", "--num_samples", "2"]],
    "prefix": [[""], [LONG], ["x", "--max_new_tokens", "0"]],
    "hybrid": [["[MASK]" + LONG, "--order", "left"]],
    "mdlm": [[""], ["", "--order", "left"], ["a[MASK:9]", "--order", "remask"],
             ["[MASK:90]", "--order", "confident"], ["[MASK:4]", "--show"], [LONG], ["é\0"]],
    "sedd": [["import "], ["a[MASK:9]b", "--order", "analytic"], ["a[MASK:9]b", "--order", "left"]],
    "mlm": [[LONG + "[MASK:3]" + LONG + "[MASK]"], ["[MASK:90]", "--steps", "1"], ["é[MASK]\udcff"], ["a__b[MASK]"],
            ["[MASK:9]", "--order", "revise", "--steps", "4"]],
    "span": [[HOLE + "<extra_id_1>"], ["<extra_id_0>", "--num_samples", "2"], [HOLE + LONG]],
    "ul2": [["go on"], [""], [LONG], SIDES],
    "fim": [["--prefix", LONG, "--suffix", LONG], ["--suffix", "b"], ["--prefix", "", "--suffix", ""]],
    "bart": [[LONG], [""], [LONG, "--max_new_tokens", "20"]],
    "electra": [[LONG], ["\udcff"]],
    "nsp": [["--prefix", LONG, "--suffix", LONG]],
    "contrastive": [["--query", "a"], ["--query", LONG, "--corpus", "lines.txt"]],
    "rotation": [[LONG]],
}


@pytest.mark.parametrize("name, flags", [(n, f) for n, each in INPUTS.items() for f in each],
                         ids=lambda v: v if isinstance(v, str) else " ".join(v)[:30])
def test_every_mode_takes_any_input(name, flags, runs, capsys):
    """And prints all of it, unless it says that a prompt is longer than its block."""
    flags = flags if flags[0].startswith("--") else ["--prompt", *flags]
    out, err = output(capsys, name, *flags)
    assert not re.search(r"<MASK>(?!<)|\[MASK|<PRE>|<SEP>", out)
    text = dict(zip(flags[::2], flags[1::2]))
    text = text.get("--prompt", text.get("--prefix", "") + "<extra_id_0>" + text.get("--suffix", ""))
    pieces = re.split(r"\[MASK.*?\]|<extra_id_.>|\0", os.fsencode(text).decode(errors="replace"))
    if isinstance(OBJECTIVES[name].uses[0], (Continue, Fill, Infill)):
        complete = re.search(".*".join(map(re.escape, pieces)), out, re.DOTALL)
        assert complete or "bytes of the prompt" in err


@pytest.mark.parametrize("name, flags, others", [
    ("clm", [], ["--num_samples", "2"]), ("mtp", [], ["--num_samples", "2"]),
    ("clm", [], ["--compile"]), ("mtp", [], ["--compile"]),
    ("mtp", ["--temperature", "0"], ["--temperature", "0", "--no-speculate"])])
def test_other_ways_to_the_same_text_print_the_same_text(name, flags, others, runs, capsys, monkeypatch):
    monkeypatch.setattr(torch, "compile", compile_nothing)
    common = ["--out_dir", f"out/{name}", "--prompt", "import ", "--max_new_tokens", "99"]
    sample.main([*common, *flags])
    one = capsys.readouterr()
    sample.main([*common, *others])
    two = capsys.readouterr()
    assert two.out.count(one.out.strip()) == 1, "the second of two samples equals the first, or the first differs"
    assert ("--- sample 2" in two.out) == ("--num_samples" in others)
    assert ("bytes per forward pass" in one.err) == (name == "mtp")
    assert ("bytes per forward pass" in two.err) == (name == "mtp" and "--no-speculate" not in others)


def test_each_objective_has_its_own_default_order_and_shift(runs, capsys, monkeypatch):
    seen = []
    plain = sample.unmask

    def spy(model, ids, gens, use, **how):
        seen.append((use, how["order"]))
        return plain(model, ids, gens, use, **how)
    monkeypatch.setattr(sample, "unmask", spy)
    for name in ("mlm", "mdlm", "sedd", "hybrid"):
        stdout(capsys, name, "--prompt", "a[MASK]")
    assert [(use.before, use.after, use.shift, order) for use, order in seen] == [
        ((), (), 0, "confident"), ((), (), 0, "ancestral"), ((), (), 0, "ancestral"), ((EOT,), (), 1, "confident")]


@pytest.mark.parametrize("name, flags, expected", [
    ("mlm", ["a[MASK]"], 0), ("mlm", ["a[MASK]", "--num_samples", "2"], 0.8), ("mdlm", ["a"], 1.0),
    ("mdlm", ["a", "--num_samples", "2"], 1.0), ("sedd", ["a", "--top_p", ".9"], 0.8),
    ("span", [HOLE], 0), ("span", [HOLE, "--top_k", "9"], 0.8), ("bart", ["a"], 0),
    ("bart", ["a", "--temperature", "0.3"], 0.3), ("clm", ["a"], 0.8)])
def test_holes_and_repairs_take_the_most_likely_byte_by_default(name, flags, expected, runs, capsys, monkeypatch):
    seen = set()

    def spy(logits, gens, temperature, **how):
        seen.add(temperature)
        return torch.full(logits.shape[:-1], 65)
    monkeypatch.setattr(sample, "sample_bytes", spy)
    stdout(capsys, name, "--prompt", *flags)
    assert seen == {expected}


@pytest.mark.parametrize("ended", [True, False])
def test_a_middle_is_printed_up_to_where_the_suffix_fits(ended, runs, capsys, monkeypatch):
    monkeypatch.setattr(sample, "infill", lambda *args, **how: ([[*b"defghi"]], ended))
    monkeypatch.setattr(sample, "trim_to_suffix", lambda model, objective, hp, left, middle, right: middle[:3])
    out, err = output(capsys, "fim", "--prefix", "abc", "--suffix", "ghi")
    assert out == "abcdefghi\n"
    assert err == "--- trimmed where the suffix fits best\n"


@pytest.mark.parametrize("flags", [["--prompt", HOLE], ["--prompt", HOLE + "<extra_id_1>"]])
def test_a_hole_that_does_not_end_by_itself_comes_with_advice(flags, runs, capsys, monkeypatch):
    def never_ends(model, objective, ids, P, holes, *args, **how):
        return [[65]] * holes, False
    monkeypatch.setattr(sample, "infill", never_ends)
    err = output(capsys, "span", *flags).err
    assert err == "--- did not end by itself. Try a larger --max_new_tokens, or a shorter text\n"


@pytest.mark.parametrize("name, setting", [("hybrid", "hybrid_ratio"), ("fim", "fim_rate")])
def test_a_model_trained_without_holes_continues_any_prompt(name, setting, runs, capsys):
    run = changed_run(name, f"plain {name}", {setting: 0.0})
    assert "the model's continuation" in stdout(capsys, run)
    assert stdout(capsys, run, "--prompt", "a[MASK]b").startswith("a[MASK]b")


def test_a_model_that_never_saw_mask_fills_nothing(runs, capsys):
    run = changed_run("mlm", "no masks", dict(mask_token=0.0))
    for flags in ([], ["--prompt", "a[MASK]b"], ["--prompt", "a"]):
        assert "was not trained to fill holes" in refusal(capsys, run, *flags)


def test_a_model_that_was_not_trained_to_continue_does_not(runs, capsys, monkeypatch):
    run = fork(monkeypatch, "clm", corrupt=OBJECTIVES["clm"].corrupt, uses=(Continue(is_trained=lambda hp: False),))
    assert "was not trained to continue a text" in refusal(capsys, run, "--prompt", "a")


def test_a_member_that_never_saw_mask_does_not_keep_another_from_continuing(runs, capsys):
    run = changed_run("clm_.5+mlm_.5", "mixture without masks", dict(mask_token=0.0))
    assert stdout(capsys, run, "--prompt", "a[MASK]b").startswith("a[MASK]b")


@pytest.mark.parametrize("flags, mode", [
    ([], MODE_R), (["--max_new_tokens", "4"], MODE_R), (["--max_new_tokens", "17"], MODE_X)])
def test_the_bytes_that_a_hole_may_take_choose_the_mode_of_ul2(flags, mode, given, capsys):
    stdout(capsys, "ul2", "--prompt", "a<extra_id_0>b", *flags)
    assert given[0][0][0][0] == mode


def test_a_mixture_does_what_its_members_do(runs, capsys):
    mixture = "clm_.5+mlm_.5"
    assert stdout(capsys, mixture, "--prompt", "import ").startswith("import ")
    assert len(stdout(capsys, mixture, "--objective", "mlm", "--prompt", "a[MASK]")) < 9


@pytest.mark.parametrize("run, flags, expected", [
    ("clm", ["--prompt", "a[MASK:3]b"], "--prompt: [MASK:3] is read as text"),
    ("clm_.5+mlm_.5", ["--prompt", "a[MASK]b"], "Try --objective mlm"),
    ("clm", ["--prompt", HOLE], "<extra_id_0> is read as text"),
    ("span", ["--prompt", "[MASK]" + HOLE], "[MASK] is read as text"),
    ("bart", ["--prompt", HOLE], "<extra_id_0> is read as text"),
    ("fim", ["--prefix", HOLE, "--suffix", "b"], "--prefix: <extra_id_0> is read as text"),
    ("mlm", ["--prompt", "a[MASK]b"], ""), ("bart", ["--prompt", "a[MASK]b"], ""), ("span", ["--prompt", HOLE], ""),
    ("clm", ["--prompt", "a[MASK"], ""), ("clm_.5+mlm_.5", ["--objective", "mlm", "--prompt", "a[MASK]b"], "")])
def test_a_marker_that_the_model_cannot_fill_is_reported_in_one_line(run, flags, expected, runs, capsys):
    err = output(capsys, run, *flags).err
    assert expected in err
    assert err.count("read as text") == bool(expected)


# ---- what the model is given

@pytest.fixture
def given(runs, monkeypatch):  # [(ids, prefix, does it keep documents apart?)] of each pass
    seen = []
    forward = Transformer.forward

    def spy(self, x, prefix=0, doc=None, **kwargs):
        apart = doc is not None and torch.equal(doc, document_ids(x))
        seen.append((x.tolist(), prefix if isinstance(prefix, int) else prefix.tolist(), apart))
        return forward(self, x, prefix, doc, **kwargs)
    monkeypatch.setattr(Transformer, "forward", spy)
    return seen


ALL = 99                                        # of the row: bidirectional
GIVEN = [                                       # in a block of 32
    ("clm", ["--prompt", "abc"], [*b"abc"], 0),
    ("prefix", ["--prompt", "abc"], [*b"abc"], ALL),
    ("ul2", ["--prompt", "abc"], [MODE_S, *b"abc", SEP], ALL),
    ("span", ["--prompt", HOLE], [97, SENTINEL, 98, SENTINEL + 1, SEP, SENTINEL], 5),
    ("fim", SIDES, [PRE, SUF, 98, MID, 97], 0),
    # of long sides what is nearest to the hole stays; a short side leaves its space to the other
    ("fim", ["--prefix", LONG + "123", "--suffix", "456" + LONG],
     [PRE, SUF, *b"456xxxx", MID, *b"xxxx123"], 0),
    ("fim", ["--prefix", LONG + "123", "--suffix", "45"], [PRE, SUF, *b"45", MID, *b"xxxxxxxxx123"], 0),
    ("fim", ["--prefix", "12", "--suffix", "456" + LONG], [PRE, SUF, *b"456xxxxxxxxx", MID, *b"12"], 0),
    ("bart", ["--prompt", "ab[MASK]"], [97, 98, MASK, SEP], ALL),
    # of a long first text the end counts, of a long second one the start but for its first few bytes, as in training
    ("nsp", ["--prefix", LONG + "123", "--suffix", "z"], [CLS, *b"xxxxxxxxxxx123", SEP, 122, SEP], ALL),
    ("nsp", ["--prefix", "a", "--suffix", "12345678" + "x" * 12], [CLS, 97, SEP, *b"x" * 12, SEP], ALL),
    ("mlm", ["--prompt", "a[MASK:2]b"], [97, MASK, MASK, 98], ALL),
    # a quarter of the block stands before a hole, more where the text ends
    ("mlm", ["--prompt", LONG + "[MASK]" + "y" * 99], [*b"x" * 8, MASK, *b"y" * 23], ALL),
    ("mlm", ["--prompt", LONG + "[MASK]"], [*b"x" * 31, MASK], ALL),
    ("hybrid", ["--prompt", LONG + "[MASK]"], [EOT, *b"x" * 30, MASK], ALL),
    ("hybrid", ["--prompt", "abc"], [*b"abc"], 0),
    ("mdlm", ["--prompt", "abc", "--max_new_tokens", "2"], [*b"abc", MASK, MASK], ALL),
]


@pytest.mark.parametrize("run, flags, row, prefix", GIVEN, ids=lambda v: v if isinstance(v, str) else "")
def test_a_prompt_is_laid_out_as_in_training(run, flags, row, prefix, given, capsys):
    stdout(capsys, run, *flags)
    assert given[0] == ([row], min(prefix, len(row)), False)


@pytest.mark.parametrize("name", ["clm", "mtp", "hybrid", "prefix"])
def test_where_training_kept_documents_apart_only_the_prompt_s_last_one_is_read(name, given, capsys):
    with open("two.txt", "wb") as f:
        f.write(b"one\0two")
    for run, row in ((name, b"one\0two"), (changed_run(name, "apart", dict(doc_mask=True)), b"two")):
        given.clear()
        stdout(capsys, run, "--prompt", "FILE:two.txt", "--max_new_tokens", "4")
        assert given[0][0] == [[*row]]


def fork(monkeypatch, run, **fields):  # a run of an objective that this repository does not have -> its name
    monkeypatch.setitem(OBJECTIVES, "fork", Objective("fork", help="", use_help="", attention="", **fields))
    return changed_run(run, "fork", dict(objective="fork"))


def test_a_fork_that_fills_holes_keeps_documents_apart_where_training_did(given, capsys, monkeypatch):
    with open("two.txt", "wb") as f:
        f.write(b"one\0two")
    fim = OBJECTIVES["fim"]
    run = fork(monkeypatch, "fim", corrupt=fim.corrupt, n_outputs=fim.n_outputs, uses=fim.uses, flags=fim.flags)
    row = [PRE, SUF, 98, MID, *b"one\0two"]
    for doc_mask, expected in ((False, row), (True, row[-3:])):
        given.clear()
        changed_run(run, run, dict(doc_mask=doc_mask))
        sample.main(["--out_dir", f"out/{run}", "--prefix", "FILE:two.txt", "--suffix", "b"])
        assert given[0][0] == [expected]


def test_a_fork_that_fills_in_place_is_demonstrated_filled_and_scored_in_its_own_layout(given, capsys, monkeypatch):
    run = fork(monkeypatch, "mlm", corrupt=OBJECTIVES["mlm"].corrupt, n_bytes=lambda T, hp: T - 3,
               uses=(dataclasses.replace(FRAMED, orders=("left",)),))
    for flags in ([], ["--prompt", LONG + "[MASK]"], ["--score", "short.txt"]):
        given.clear()
        out = stdout(capsys, run, *flags)
        assert {(*row[:2], *row[-1:], len(row)) for row in given[0][0]} == {(*FRAMED.before, *FRAMED.after, 32)}
        assert all(MASK in row for row in given[0][0])
    assert "pseudo: every byte given all others of its window of 29" in out


def test_a_fork_that_writes_a_target_is_demonstrated_and_repairs_in_its_own_layout(given, capsys, monkeypatch):
    asked = []

    def corrupt(x, g, hp):
        every = torch.ones_like(x, dtype=torch.bool)
        return seq2seq(x.flip(1), every, x, every, hp.block_size)

    def positions(ids, P, hp):
        asked.append(int(P))
    run = fork(monkeypatch, "bart", corrupt=corrupt, n_bytes=lambda T, hp: 10, positions=positions, uses=(Repair(),))
    held_out = load_checkpoint("out/bart")["held_out"][:10].tolist()
    stdout(capsys, run)
    assert given[0][:2] == ([held_out[::-1] + [SEP]], 11)
    given.clear()
    stdout(capsys, run, "--prompt", "x" * 22 + "a[MASK]")
    firsts = [(row, prefix) for [row], prefix, _ in given if SEP in row]
    assert firsts == [([120] * 8 + [SEP], 9)] * 2 + [([120] * 6 + [97, MASK, SEP], 9)]
    assert set(asked) == {11, 9}, "the objective's positions were not asked for"


@pytest.mark.parametrize("text, pieces", [
    (b"", []), (b"abcdefgh", [b"abcdefgh"]), (b"abcdefghi", [b"abcde", b"fghi"]),
    (b"ab cd efgh", [b"ab cd ", b"efgh"]), (b"a bcdefghijk", [b"a bcde", b"fghijk"]),
    (b"abc\ndefghi", [b"abc\n", b"defghi"]), (b"abcdefg\thijklmno", [b"abcdefg\t", b"hijklmno"]),
    ("äöüäö".encode(), ["äö".encode(), "üäö".encode()]), (b"\x80" * 9, [b"\x80" * 2, b"\x80" * 7])])
def test_a_long_text_is_cut_into_equal_parts_after_spaces(text, pieces):
    found = [bytes(piece) for piece in sample.cut_after_spaces([*text], 8)]
    assert found == pieces


def test_a_text_is_not_cut_right_before_a_hole():
    ids = [*b"ab de ", MASK, *b" fgh"]
    assert [*sample.cut_after_spaces(ids, 8)] == [[*b"ab de ", MASK, *b" "], [*b"fgh"]]


def test_an_objective_says_in_how_long_pieces_it_repairs(given, capsys, monkeypatch):
    bart = OBJECTIVES["bart"]
    run = fork(monkeypatch, "bart", corrupt=bart.corrupt, n_bytes=bart.n_bytes, positions=bart.positions,
               flags=bart.flags, uses=(Repair(max_bytes=lambda hp: 6),))
    stdout(capsys, run, "--prompt", "x" * 15)
    assert [row for [row], prefix, _ in given if SEP in row] == [[120] * 5 + [SEP]] * 3


def test_bart_repairs_as_a_whole_what_its_noise_moves():
    [use] = [use for use in OBJECTIVES["bart"].uses if isinstance(use, Repair)]
    assert use.max_bytes(argparse.Namespace(bart_noise="infill,replace")) == 32
    assert use.max_bytes(argparse.Namespace(bart_noise="mask,permute")) is None


def test_a_repair_is_never_longer_than_a_target_in_training(runs, monkeypatch):
    limits = []

    def generate(model, ids, limit, *args, **how):
        limits.append(limit)
        yield torch.tensor(EOT)
    monkeypatch.setattr(sample, "generate", generate)
    _, hp, _ = load_run("out/bart", "cpu", "float32")
    assert [*sample.repair(None, OBJECTIVES["bart"], [*b"abc"], hp, None)] == []
    assert limits == [OBJECTIVES["bart"].n_bytes(hp.block_size, hp) + 1]


def test_a_source_with_a_nul_is_repaired_behind_it(runs, monkeypatch):
    def copy(model, ids, *args, **how):
        yield from ids[0, :-1]                  # all but SEP
        yield torch.tensor(EOT)
    monkeypatch.setattr(sample, "generate", copy)
    _, hp, _ = load_run("out/bart", "cpu", "float32")
    assert bytes(sample.repair(None, OBJECTIVES["bart"], [*b"ab\0cd"], hp, None)) == b"abcd"


def test_a_fork_that_repairs_in_place_keeps_documents_apart_where_training_did(given, capsys, monkeypatch):
    run = fork(monkeypatch, "mlm", corrupt=OBJECTIVES["mlm"].corrupt, n_bytes=lambda T, hp: T, supports_doc_mask=True,
               uses=(Repair(in_place=True),))
    for doc_mask in (False, True):
        given.clear()
        stdout(capsys, changed_run(run, run, dict(doc_mask=doc_mask)), "--prompt", "FILE:ends.txt")
        assert {apart for _, _, apart in given} == {doc_mask}


def test_a_fork_with_a_bound_of_its_own_is_scored_by_it(runs, capsys, monkeypatch):
    def nelbo(model, batch, hp):
        return torch.full((len(batch["inp"]),), 25 * math.log(2))
    run = fork(monkeypatch, "mdlm", corrupt=OBJECTIVES["mdlm"].corrupt, n_bytes=lambda T, hp: T - 7, bpb="bound",
               nelbo=nelbo)
    out = stdout(capsys, run, "--score", "short.txt")
    assert out.startswith("short.txt: 1.0156 bits per byte"), "26 windows of 25 bits for 640 bytes"
    assert "fork's upper bound, standard error 0.0000, disjoint windows of 25" in out
    assert "--score" in refusal(capsys, run), "it has no mode of its own"


# ---- what is printed

def test_every_mode_prints_what_the_model_found(runs, capsys, monkeypatch):
    """A rotated text starts at its seam, the nearest passages come first, suspicious characters stay whole."""
    set_use(monkeypatch, "rotation", Seam(lambda model, x: (x == ord("f")) * 9.0))
    assert stdout(capsys, "rotation", "--prompt", "defabc").endswith("\nfabcde\n")
    set_use(monkeypatch, "electra", Mark(lambda model, x: (x > 127) * 4.0 - 2))
    out = stdout(capsys, "electra", "--prompt", "naïve café")
    assert out.startswith("na«ï»ve caf«é»\n")
    assert out.count("probability 0.88") == 4

    def fake_vectors(model, embed, texts, T):
        return torch.tensor([[float(len(text)), 1.0] for text in texts])
    monkeypatch.setattr(sample, "embed_texts", fake_vectors)
    out = stdout(capsys, "contrastive", "--query", "aa", "--corpus", "lines.txt")
    assert re.findall(r"line (\d)", out) == ["3", "4", "1"]


@pytest.mark.parametrize("log_odds, answer", [(2.0, "it does"), (-2.0, "it does not")])
def test_a_probability_of_following_is_put_into_words(log_odds, answer, runs, capsys, monkeypatch):
    set_use(monkeypatch, "nsp", Follow(lambda *args: torch.tensor(log_odds)))
    p = 1 / (1 + math.exp(-log_odds))
    expected = f"the second text follows the first with probability {p:.3f}: more likely than not, {answer} (.5 is "
    assert stdout(capsys, "nsp", *SIDES) == f"{expected}chance)\n"
    out = stdout(capsys, "nsp")
    assert out.count(answer) == 2, "in the demonstration, too"


def test_a_text_in_which_no_byte_is_marked_is_reported_as_such(runs, capsys, monkeypatch):
    set_use(monkeypatch, "electra", Mark(lambda model, x: x * 0.0 - 2))
    assert "--- no byte is marked" in stdout(capsys, "electra", "--prompt", "abc")
    set_use(monkeypatch, "electra", Mark(lambda model, x: x * 0.0 + 2))
    assert "no byte is marked" not in stdout(capsys, "electra", "--prompt", "abc")


ECHO = dict.fromkeys(["clm", "prefix", "mtp", "mdlm", "electra", "rotation"], RAW)
ECHO |= {"mlm": RAW + "[MASK]", "fim": RAW + "<extra_id_0>"}


@pytest.mark.parametrize("name", ECHO)
def test_control_characters_reach_a_pipe_but_no_terminal(name, runs, capsys, monkeypatch):
    def first_byte_leads(model, x):             # and none is suspicious
        return -(x.cumsum(1) + 1.0)
    set_use(monkeypatch, "electra", Mark(first_byte_leads))
    set_use(monkeypatch, "rotation", Seam(first_byte_leads))
    assert RAW in stdout(capsys, name, "--prompt", ECHO[name])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    out = stdout(capsys, name, "--prompt", ECHO[name])
    assert ESCAPED in out
    assert not has_control_characters(out)
    assert ("\x1b[7m" in out) == (name in ("mlm", "mdlm", "fim")), "new parts are not highlighted, or old ones are"


@pytest.mark.parametrize("flags, expected", [
    ("000000", [("naïve", False)]), ("000100", [("na", False), ("ï", True), ("ve", False)]),
    ("001000", [("na", False), ("ï", True), ("ve", False)]), ("000011", [("naï", False), ("ve", True)])])
def test_a_character_of_several_bytes_is_flagged_as_a_whole(flags, expected):
    runs = sample.split_by([*"naïve".encode()], [flag == "1" for flag in flags])
    assert [(bytes(ids).decode(), flag) for ids, flag in runs] == expected


@pytest.mark.parametrize("ids, flags, expected", [
    (b"", [], []), (b"\xa9A", [True, False], [(b"\xa9", True), (b"A", False)]),
    (b" \x85a", [False, True, False], [(b" ", False), (b"\x85", True), (b"a", False)]),
    (b"\xf0A\x85", [True, False, True], [(b"\xf0", True), (b"A", False), (b"\x85", True)])])
def test_a_stray_byte_stands_for_itself(ids, flags, expected):
    assert [(bytes(run), flag) for run, flag in sample.split_by([*ids], flags)] == expected


def test_repaired_pieces_are_printed_as_they_come(runs, capsys, monkeypatch):
    printed = []

    def generate(*args, **how):
        printed.append(capsys.readouterr().out)
        yield from torch.tensor([[0xC3], [0xA9], [66]])         # é and B
    monkeypatch.setattr(sample, "generate", generate)
    n = OBJECTIVES["bart"].n_bytes(32, argparse.Namespace(bart_noise="infill"))
    sample.main(["--out_dir", "out/bart", "--prompt", "x" * 3 * n])
    assert printed == ["", "éB", "éB"]
    assert capsys.readouterr().out == "éB\n"


# ---- scores of the command

@pytest.mark.parametrize("name", ["clm", "mlm", "mdlm"])
def test_scores_keep_documents_apart_where_training_did(name, given, capsys):
    for run, expected in ((name, False), (changed_run(name, "masked", dict(doc_mask=True)), True)):
        given.clear()
        stdout(capsys, run, "--score", "ends.txt")
        if name != "clm":
            stdout(capsys, run, "--prompt", "a [MASK] b")
        assert {apart for _, _, apart in given} == {expected}


@pytest.mark.parametrize("name", ["clm", "hybrid", "sedd", "mlm", "nsp"])
def test_score_prints_bits_per_byte_beside_compressors(name, runs, capsys):
    exact = name in ("clm", "hybrid")
    out = stdout(capsys, name, "--score", "short.txt", *(["--stride", "32"] if exact else []))
    assert 2 < float(out.split(": ")[1].split()[0]) < 9.5
    assert "lzma" in out
    assert ("stride 32" in out) == exact
    assert (f"{name}'s upper bound" in out) == (name == "sedd")
    assert ("pseudo" in out) == (name in ("mlm", "hybrid", "nsp"))


@pytest.mark.parametrize("flags, expected", [
    (["--score", "short.txt"], "float32"), (["--score", "short.txt", "--dtype", "bfloat16"], "bfloat16"),
    (["--prompt", "a"], "auto")])
def test_scores_are_computed_in_float32_unless_told_otherwise(flags, expected, runs, monkeypatch):
    dtypes = []
    plain = sample.load_run

    def spy(path, device, dtype):
        dtypes.append(dtype)
        return plain(path, device, dtype)
    monkeypatch.setattr(sample, "load_run", spy)
    sample.main(["--out_dir", "out/clm", *flags])
    assert dtypes == [expected]


LONG_WORK = [("clm", ["--score", "short.txt"], 640), ("mdlm", ["--score", "short.txt"], 640),
             ("mlm", ["--score", "short.txt"], 640), ("bart", ["--prompt", "FILE:short.txt"], 640)]


@pytest.mark.parametrize("name, flags, total", LONG_WORK)
def test_long_work_reports_on_standard_error_how_far_it_is(name, flags, total, runs, capsys, monkeypatch):
    plain = output(capsys, name, *flags)
    assert plain.err == "", "less than 10 seconds"
    monkeypatch.setattr(sample, "REPORT_SECONDS", 0)
    reported = output(capsys, name, *flags)
    assert reported.out == plain.out
    lines = reported.err.splitlines()
    assert all(re.fullmatch(rf"--- [\d,]+ of {total} bytes, about \d+ s left", line) for line in lines)
    done = [int(line.split()[1]) for line in lines]
    assert done == sorted(done)
    assert 0 < done[0] < done[-1] == total


@pytest.mark.parametrize("name, flags, total", LONG_WORK)
def test_long_work_shows_a_bar_on_a_terminal(name, flags, total, runs, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert f"/{total}" in output(capsys, name, *flags).err
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert (f"/{total}" in output(capsys, name, *flags).err) == (name != "bart"), "its text is printed as it comes"


# ---- texts from standard input and from files

@pytest.mark.parametrize("name, flag, more", [
    ("clm", "--prompt", []), ("mlm", "--prompt", []), ("fim", "--suffix", []), ("contrastive", "--query", []),
    ("nsp", "--prefix", ["--suffix", "b"]), ("clm", "--score", []), ("contrastive", "--corpus", [])])
def test_a_text_may_come_from_standard_input_or_a_file(name, flag, more, runs, capsys, monkeypatch, tmp_path):
    text = b"\xffa b[MASK]\nc\xc3\xa9\n"
    path = str(tmp_path / "a text")
    with open(path, "wb") as f:
        f.write(text)
    names_a_file = flag in ("--score", "--corpus")
    expected = stdout(capsys, name, flag, path if names_a_file else os.fsdecode(text), *more).replace(path, "-")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert stdout(capsys, name, flag, "-", *more) == expected
    assert names_a_file or stdout(capsys, name, flag, f"FILE:{path}", *more) == expected


def test_standard_input_that_is_a_terminal_is_refused(runs, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    for name, flag in (("clm", "--prompt"), ("clm", "--score"), ("contrastive", "--corpus")):
        assert "is a terminal" in refusal(capsys, name, flag, "-")


# ---- what is refused

BAD = {
    "standard input twice": ("nsp", ["--prefix", "-", "--suffix", "-"], "can be read once"),
    "a temperature that is no number": ("", ["--temperature", "nan"], "--temperature"),
    "an objective that was not trained": ("clm", ["--objective", "mlm"], "Try --objective clm"),
    "score without a likelihood": ("bart", ["--score", "text.txt"], "clm mlm prefix"),
    "a score of no name": ("clm", ["--score", ""], "no such file"),
    "an empty score": ("clm", ["--score", "void.txt"], "is empty"),
    "a stride beyond the block": ("clm", ["--score", "text.txt", "--stride", "33"], "--stride 32"),
    "a stride where there is none": ("mdlm", ["--score", "text.txt", "--stride", "8"], "as a whole"),
    "a stride without a score": ("clm", ["--stride", "8"], "Try with --score"),
    "a score with a prompt": ("clm", ["--score", "text.txt", "--prompt", "x"], "--prompt: --score takes no prompt"),
    "a score with a temperature": ("mlm", ["--score", "text.txt", "--top_k", "3"], "--top_k: --score takes no top_k"),
    "nothing to fill": ("mlm", ["--prompt", "no hole"], "[MASK]"),
    "a hole of no byte": ("mlm", ["--prompt", "a[MASK:0]"], "1 to 999999"),
    "a hole of more digits than Python reads": ("bart", ["--prompt", f"a[MASK:{'9' * 5000}]"], "1 to 999999"),
    "an unknown order": ("mlm", ["--order", "sideways"], "confident or left"),
    "an order where there is no hole": ("hybrid", ["--prompt", "x", "--order", "left"], "--order"),
    "a text and its sides": ("fim", ["--prompt", "a<extra_id_0>", "--prefix", "b"], "without --prefix"),
    "too many holes": ("span", ["--prompt", "<extra_id_0>" * 250], "250 holes"),
    "a text too long for its block": ("span", ["--prompt", LONG + "<extra_id_0>" * 2], "shorter text"),
    "a flag of another objective": ("clm", ["--suffix", "x"], "fim or nsp"),
    "an empty corpus": ("contrastive", ["--corpus", "blank.txt"], "--corpus: is empty"),
    "a corpus that is no file": ("contrastive", ["--corpus", "."], "--corpus ."),
    "a score of no file": ("clm", ["--score", "pipe"], "--score pipe"),
    "a text in no file": ("clm", ["--prompt", "FILE:nowhere"], "--prompt nowhere"),
    "a text in a folder": ("fim", ["--suffix", "FILE:."], "--suffix ."),
    "a text with a NUL in its name": ("mlm", ["--prompt", "FILE:a\0b"], "--prompt a"),
    "a corpus with a NUL in its name": ("contrastive", ["--corpus", "a\0b"], "--corpus a"),
    "no text to mark": ("electra", ["--prompt", ""], "--prompt: is empty"),
    "a first text alone": ("nsp", ["--prefix", "a"], "--suffix: is missing"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_line(case, runs, capsys):
    run, flags, hint = BAD[case]
    assert hint in refusal(capsys, run, *flags)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("redirection", [">&-", ">/dev/full"])
@pytest.mark.parametrize("flags", ["--prompt a --max_new_tokens 3", "--score short.txt"])
def test_an_output_that_cannot_be_written_is_reported_in_one_line(flags, redirection, runs):
    program = os.path.join(os.path.dirname(sample.__file__), "sample.py")
    command = f"{sys.executable} {program} --out_dir out/clm {flags} {redirection}"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, env=os.environ)
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "output" in done.stderr
