import io
import math
import os
import re
import shutil
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, randomize, randomized, settings

import sample
import train
from data import CLS, EOT, MASK, MID, MODE_S, PRE, SENTINEL, SEP, SUF, document_ids, generator
from model import Sizes, Transformer
from objectives import OBJECTIVES, USUAL, ParallelDrafter, embed, find_objective, mtp_drafter, seq2seq
from run import build, load_checkpoint

T = 12
GREEDY = dict(temperature=0)
FOUR = torch.tensor([0.5, 0.25, 0.15, 0.1])     # a distribution of 4 bytes
IN_PLACE, SHIFTED, FRAMED = ([], [], 0), ([EOT], [], 1), ([CLS, MODE_S], [SEP], 1)  # as fills returns them
FRAMES = pytest.mark.parametrize("frame", [IN_PLACE, SHIFTED, FRAMED], ids=["in place", "shifted", "framed"])


def ids(n, N=1, seed=0):
    return torch.randint(1, 256, (N, n), generator=generator(f"prompt {seed}"))


def gens(N=1, seed=1):
    return sample.sample_generators(seed, N)


def text_of(*args, **kwargs):  # generate as one tensor (N, written)
    return torch.stack(list(sample.generate(*args, **kwargs)), 1)


def bits_of(net, row, targets, mask="causal"):  # ids (n,), {position: byte} -> bits
    logp = net.logits(net(row[None], mask))[0].detach().log_softmax(-1)
    return -sum(float(logp[i, byte]) for i, byte in targets.items()) / math.log(2)


class Stub:
    """A model without weights, whose states are its ids, and whose logits are what it is given."""
    embed, sizes, dtype = torch.nn.Embedding(512, 4), Sizes(1, 1, 4), torch.float32

    def __init__(self, logits):
        self.logits = logits

    def __call__(self, ids, mask, doc=None, cache=None, at=None, lookups=None):
        if cache is not None:
            cache.move(ids.size(1))
        return ids


def sure(ids):  # ids (...) -> logits (..., V) that leave no doubt
    return F.one_hot(ids, 512) * 100.0


def four(p):  # probabilities (..., 4) of bytes 65 to 68 -> logits (..., V)
    return F.pad(p.log(), (65, 443), value=-1e9)


def chi2(seen, p):  # counts, probabilities of the same shape -> over the cells where some are expected
    want = p * seen.sum()
    assert seen[want < 1e-6].sum() == 0, "what cannot be was drawn"
    return float(((seen - want) ** 2 / want.clamp(min=1e-9))[want > 1].sum())


# ---- drawing a byte

def test_temperature_0_is_the_most_likely_byte_and_never_a_special_id():
    logits = torch.zeros(1, 512)
    logits[0, 300], logits[0, 65] = 9, 5
    assert sample.pick(logits, gens(), temperature=0).tolist() == [65]
    assert max(int(sample.pick(logits, [generator(f"{i}")])) for i in range(200)) < 256


def test_draws_follow_the_probabilities():
    drawn = sample.pick(four(FOUR).expand(1, 4000, -1), gens())[0]
    assert chi2(torch.bincount(drawn, minlength=69)[65:69], FOUR) < 25              # 3 degrees of freedom
    ends = torch.tensor([0, 1 - 1e-16], dtype=torch.double)
    assert sample.invert(torch.tensor([0.0, 1, 0]).expand(2, -1), ends).tolist() == [1, 1], "what cannot be"


@pytest.mark.parametrize("how, allowed", [
    (dict(top_k=2), 2), (dict(top_k=1), 1), (dict(top_k=5000), 4),
    (dict(top_p=0.6), 2), (dict(top_p=0.5), 1), (dict(top_p=0.0), 1),
    (dict(top_k=2, top_p=0.6), 2),              # counted after the cut, the first would hold .67
    (dict(top_k=3, top_p=0.6), 2), (dict(temperature=1e-310), 1)])
def test_top_k_and_top_p_cut_the_tail(how, allowed):
    drawn = sample.pick(four(FOUR).expand(1, 100, -1), gens(), **how)
    assert set(drawn[0].tolist()) == set(range(65, 65 + allowed))


# ---- continuing

def uncached(net, x, n, prefix=0):  # what generate writes, by a whole pass for each byte
    out, start, draws = x, max(0, x.size(1) - T), gens(len(x))
    ended = torch.zeros(len(x), dtype=torch.bool)
    for _ in range(n):
        if out.size(1) - start > T:
            if prefix:
                break
            start = out.size(1) - T // 2
        mask = torch.full((len(x),), prefix) if prefix else "causal"
        byte = sample.pick(net.logits(net(out[:, start:], mask)[:, -1]), draws).masked_fill(ended, EOT)
        ended |= byte == EOT
        out = torch.cat((out, byte[:, None]), 1)
    return out[:, x.size(1):]


@pytest.mark.parametrize("n, prefix", [(1, 0), (T, 0), (T + 1, 0), (3 * T, 0), (1, 1), (T, T), (7, 3)])
def test_the_cache_changes_nothing(n, prefix):
    """Before and after the block is full, with which a text ends whose prefix is read both ways."""
    net, x = randomized().requires_grad_(False), ids(n, 2)
    out = text_of(net, x, 30, T, gens(2), prefix)
    assert torch.equal(out, uncached(net, x, 30, prefix))
    assert out.shape == (2, T - n + 1 if prefix else 30)
    assert prefix < 2 or not torch.equal(out, uncached(net, x, T - n + 1))


def test_a_hole_is_filled_at_its_position():
    net, span = randomized().requires_grad_(False), OBJECTIVES["span"]
    ids, n = span["ask"]([[65], [66, 67, 68]], 4, None)
    [out], _ = sample.infill(net, span, ids, n, 1, 20, 24, gens(), **GREEDY)
    row, prefix = torch.tensor([ids + out]), torch.tensor([n])
    logits = net.logits(net(row, prefix, at=span["positions"](row, prefix)))[0, len(ids) - 1:-1]
    assert logits[:, [*range(256), SENTINEL + 1]].argmax(-1).tolist() == out
    assert len(out) > 5


def test_a_text_ends_when_every_row_has_ended():
    said = iter([[EOT, 66], [65, EOT]])
    says = Stub(lambda h: sure(torch.tensor(next(said))))
    assert text_of(says, ids(3, 2), 9, T, gens(2)).tolist() == [[EOT, EOT], [66, EOT]]


# ---- speculation

KINDS = pytest.mark.parametrize("kind", ["parallel", "sequential"])


def drafting(n, seed=0, device="cpu", kind="parallel"):  # a model, and what now and then drafts as it writes
    hp = settings("mtp", T, mtp_heads=n, mtp_kind=kind)
    net = randomized(seed=seed).requires_grad_(False).to(device)
    heads = OBJECTIVES["mtp"]["heads"](net.sizes, hp)
    net.heads.update({name: randomize(head, seed).requires_grad_(False).to(device) for name, head in heads.items()})
    return net, mtp_drafter(net, hp)


class Fixed(ParallelDrafter):  # drafts from the same far logits, whatever was written
    def __init__(self, far):
        self.far, self.k = far, len(far)

    def tail(self, h):  # far (k, V) -> (m, k, V)
        return self.far.expand(len(h), -1, -1)


@pytest.mark.parametrize("n", [1, 3])
def test_what_verify_writes_is_distributed_as_if_nothing_was_drafted(n):
    """Also where drafts were cut to fewer than there are distributions that they were drawn from."""
    p = torch.tensor([[.7, .1, .1, .1], [0, .1, .2, .7], [.25, .25, .25, .25], [0, .5, .5, 0]]).double()
    q = torch.tensor([[.04, .06, .1, .8], [.7, .2, .05, .05], [.1, .84, .05, .01]]).double()
    g, seen = generator("verify"), torch.zeros(n + 1, 4)
    for _ in range(900):
        drafts = sample.invert(q, torch.rand(3, generator=g, dtype=torch.double)).tolist()[:n]
        for i, byte in enumerate(sample.verify(p[:n + 1], q, drafts, g)):
            seen[i, byte] += 1
    for counts, want in zip(seen, p):           # an id after others is there where those were kept
        assert chi2(counts, want) < 25          # 3 degrees of freedom


@pytest.mark.parametrize("kind, n, budget, how", [
    ("fixed", 5, 4, dict(temperature=0.7, top_k=3)), ("fixed", T - 2, 9, {}), ("sequential", 5, 4, {})])
def test_speculation_draws_from_the_plain_distribution(kind, n, budget, how):
    """Triples of 4 bytes after one prompt, drafted by far heads that differ strongly or by modules. The budget
    leaves room for two drafts, the block for one."""
    (net, drafter), x = drafting(3, kind="sequential"), ids(n)
    logits, only = net.logits, torch.full((512,), -1e9).index_fill(0, torch.arange(65, 69), 0)
    net.logits = lambda h: logits(h) / 8 + only
    if kind == "fixed":
        drafter = Fixed(net.logits(torch.randn(3, net.sizes.n_embd, generator=generator("far")) * 20))
    bytes_, rows, joint = torch.arange(65, 69)[:, None], x, torch.ones(1, 1, dtype=torch.double)
    for _ in range(3):
        p = sample.distribution(net.logits(net(rows, "causal")[:, -1]), **how)[:, 65:69]
        joint = (joint * p).view(-1, 1)
        rows = torch.cat((rows.repeat_interleave(4, 0), bytes_.repeat(len(rows), 1)), dim=1)
    seen, tally = torch.zeros(4, 4, 4), []
    for s in range(500):
        written = sample.speculate(net, drafter, x[0].tolist(), budget, T, generator(f"{s}"), tally, **how)
        a, b, c = (next(written) - 65 for _ in range(3))
        seen[a, b, c] += 1
    assert chi2(seen.flatten(), joint.flatten()) < 110          # 63 degrees of freedom at most
    assert {drafted for drafted, _ in tally} == ({0, 1} if n == T - 2 else {0, 1, 2})
    assert 0 < sum(kept for _, kept in tally) < sum(drafted for drafted, _ in tally)


@pytest.mark.parametrize("n", [2, 7])
@KINDS
def test_speculation_at_temperature_0_is_plain_decoding(n, kind):
    """For prompts of several lengths, past the end of the block."""
    passes = written = 0
    for length in (1, 4, T - 1, T, T + 1, 2 * T):
        net, drafter = drafting(n, length, kind=kind)
        x, tally = ids(length), []
        plain = text_of(net, x, 25, T, gens(), **GREEDY)[0].tolist()
        text = sample.speculate(net, drafter, x[0].tolist(), 25, T, generator("s"), tally, **GREEDY)
        assert list(text) == plain
        assert all(0 <= kept <= drafted <= n - 1 for drafted, kept in tally)
        passes, written = passes + len(tally), written + len(plain)
    assert passes < written


def test_speculation_keeps_a_perfect_draft_and_ends_with_the_text():
    """A model that counts up to EOT, and far heads that count on: n bytes a pass after the first."""
    counts, tally, drafter = Stub(lambda h: sure((h + 1) % 256)), [], Fixed(torch.zeros(3, 512))
    drafter.tail = lambda h: sure((h[:, None] + torch.arange(2, 5)) % 256)
    text = sample.speculate(counts, drafter, [215], 99, 99, generator("s"), tally, **GREEDY)
    assert list(text) == [*range(216, 256), EOT]
    assert len(tally) == 11


def check_fast_steps(n, temperature=0.0, device="cpu", kind="parallel"):
    """The same texts with a step and without one, past the block's end, for prompts of several lengths."""
    net, drafter = drafting(n, device=device, kind=kind)
    single, several = sample.fast_step(net, 2, T), sample.fast_step(net, 1, T, drafter.tail, n)
    assert single is not None
    assert (several is None) == (n > T)
    for seed in range(3):
        x = ids(1 + 7 * seed, seed=seed).to(device)
        plain, fast = (text_of(net, x.expand(2, -1), 30, T, gens(2), step=s) for s in (None, single))
        assert torch.equal(plain, fast)
        plain, fast = (list(sample.speculate(net, drafter, x[0].tolist(), 40, T, generator(f"{seed}"), step=s,
                                             temperature=temperature)) for s in (None, several))
        assert plain == fast
        assert len(plain) == 40 or plain[-1] == EOT


def static(f, **options):  # torch.compile without the compiler: other shapes or strides would compile anew
    seen = set()

    def run(ids):
        seen.add((ids.shape, ids.stride()))
        assert len(seen) == 1
        return f(ids)
    return run


@pytest.mark.parametrize("n, temperature", [(4, 1.0), (7, 0.0), (T + 1, 0.0)])
@KINDS
def test_a_step_over_a_static_cache_changes_nothing(kind, n, temperature, monkeypatch, capsys):
    """The step that is compiled, here as it stands; with more heads than two passes or one have room for."""
    monkeypatch.setattr(torch, "compile", static)
    check_fast_steps(n, temperature, kind=kind)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler")
def test_a_compiled_step_changes_nothing():
    check_fast_steps(4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("n", [4, 7])
def test_a_captured_step_changes_nothing(n):
    check_fast_steps(n, device="cuda")


# ---- filling

@pytest.mark.parametrize("order, scale, steps", [
    ("ancestral", 1.0, 1), ("ancestral", 1.0, 5), ("ancestral", 1.0, 0), ("analytic", 1.0, 5), ("analytic", 0.5, 5),
    ("analytic", 0.5, 1), ("analytic", 0.5, 0)])
def test_the_samplers_of_diffusion_reproduce_their_oracle(order, scale, steps):
    """A denoiser that knows the distribution of each byte by itself. A pass unmasks (t - s) / t of what is left,
    the analytic one times the sum of its ratios, which need not be 1; the last one all."""
    N, n, most = 20, 100, steps or 64
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


@pytest.mark.parametrize("order, steps, passes", [("confident", 3, 3), ("left", 0, T), ("ancestral", 1, 1)])
def test_filling_leaves_no_mask_and_touches_nothing_else(order, steps, passes):
    net, x = randomized(), ids(T, 3)
    x[0, 2:5], x[1, 7], x[2, :] = MASK, MASK, MASK
    states = [*sample.unmask(net, x, gens(3), IN_PLACE, steps, order)]
    assert len(states) == passes
    assert (states[-1][x == MASK] < 256).all()
    assert torch.equal(states[-1][x != MASK], x[x != MASK])


@FRAMES
def test_confident_fills_the_surest_byte_first_and_left_the_first(frame):
    (before, after, shift), net, x, holes = frame, randomized().requires_grad_(False), ids(T), [2, 6, 9]
    x[0, holes] = MASK

    def best(x):  # -> probability and byte of each position
        row = torch.tensor([[*before, *x[0].tolist(), *after]])
        return net.logits(net(row, "bidirectional"))[0, len(before) - shift:, :256].softmax(-1).max(-1)
    for order, urgency in (("confident", lambda p, i: p[i]), ("left", lambda p, i: -i)):
        want = x.clone()
        while (want == MASK).any():
            p, byte = best(want)
            at = max((i for i in holes if want[0, i] == MASK), key=lambda i: urgency(p, i))
            want[0, at] = byte[at]
        assert torch.equal(sample.fill(net, x, gens(), frame, order=order, **GREEDY), want)


# ---- writing what belongs in holes

def infill(script, pieces, most, block):  # a model that writes the script -> bytes of each hole, did all end?
    script, span = iter(script), OBJECTIVES["span"]
    model = Stub(lambda h: sure(torch.tensor([next(script)])))
    source, prefix = span["ask"](pieces, 4, None)
    return sample.infill(model, span, source, prefix, len(pieces) - 1, most, block, gens())


def test_spans_are_split_at_their_sentinels():
    script = [70, SENTINEL + 1, 71, 72, SENTINEL + 2, SENTINEL + 3]
    assert infill(script, [[65], [66], [], []], 50, 99) == ([[70], [71, 72], []], True)
    assert infill([70, EOT, SENTINEL + 2], [[65], [66], []], 50, 99) == ([[70], []], True), "EOT ends one too"


@pytest.mark.parametrize("block, most, room", [(16, 50, 8), (99, 9, 9), (99, 3, 3), (99, 0, 0)])
@pytest.mark.parametrize("written", range(1, 12))
def test_holes_end_with_the_block_or_the_budget_whatever_was_written(written, block, most, room):
    """8 of 16 positions are the source's and the first sentinel's."""
    script = [70] * written + [SENTINEL + 1] + [71] * 20
    left = room - written - (block == 16)       # a sentinel takes a position, but no budget
    want = [[70] * min(written, room), [71] * max(0, left)], False
    assert infill(script, [[65], [66], [67]], most, block) == want


def test_the_end_of_the_block_ends_no_middle():
    """Half of the rearranged rows have taught that EOT is what a full one ends with."""
    ids, P = OBJECTIVES["fim"]["ask"]([[65], [66]], 4, settings("fim", 32))
    script = iter([70] * (32 - len(ids)) + [EOT])
    model = Stub(lambda h: sure(torch.tensor([next(script)])))
    assert sample.infill(model, OBJECTIVES["fim"], ids, P, 1, 99, 32, gens()) == ([[70] * (32 - len(ids))], False)


def test_a_middle_is_cut_where_the_rest_follows():
    """By a model that knows the alphabet. That the rest has been written already makes no later cut better."""
    alphabet, hp = Stub(lambda ids: sure((ids + 1) % 512)), settings("fim", 32)
    cases = (b"defxyz", b"def"), (b"xyzdef", b"xyzdef"), (b"defghidef", b"def"), (b"ghi", b""), (b"", b"")
    for middle, kept in cases:
        assert bytes(sample.join(alphabet, OBJECTIVES["fim"], hp, [*b"abc"], [*middle], [*b"ghi"])) == kept
    for name, right in (("span", b"ghi"), ("ul2", b"ghi"), ("fim", b"")):
        entry = OBJECTIVES[name]
        assert sample.join(alphabet, entry, settings(name, 32), [*b"abc"], [*b"defxyz"], [*right]) == [*b"defxyz"]


@pytest.mark.parametrize("name", ["span", "ul2", "fim"])
def test_a_hole_ends_as_soon_as_that_is_likely_and_no_sooner(name):
    """Whatever bytes are drawn; EOT is an end too, and is not drawn."""
    net, entry, lengths = randomized().requires_grad_(False), OBJECTIVES[name], set()
    end = entry["ends"](0)
    net.head.weight[0, [end, EOT]] *= 6         # likely here and there
    for seed in range(40):
        asked, P = entry["ask"]([ids(3, seed=seed)[0].tolist(), [*b"ghi"]], 4, settings(name, 64))
        [written], whole = sample.infill(net, entry, asked, P, 1, 9, 64, gens(seed=seed))
        each = []
        for k in range(len(written) + whole):   # before each byte, and before the end
            row = torch.tensor([asked + written[:k]])
            at = entry["positions"](row, torch.tensor([P]))
            p = net.logits(net(row, torch.tensor([P]), at=at))[0, -1].softmax(-1)
            each.append(sum(float(p[i]) for i in {end, EOT}))
        assert [p >= sample.ENDING for p in each] == [False] * len(written) + [True] * whole
        lengths.add(len(written))
    assert len(lengths) > 2, "not the same for all"


@pytest.mark.parametrize("n_left", [0, 5, 300])
@pytest.mark.parametrize("n_right", [1, 9, 40])
def test_cuts_are_compared_byte_by_byte(n_left, n_right):
    """The first after which the right's first 16 bytes are at least a tenth as likely as after the best."""
    net, hp, found = randomized().requires_grad_(False), settings("fim", 32), set()
    for seed in range(5):
        left, middle, right = (ids(n, seed=f"{seed}{n}")[0].tolist() for n in (n_left, 11, n_right))
        some = right[:16]
        each = []
        for k in range(12):
            context = ([EOT] + left + middle[:k])[-(32 - len(some)):]
            row, w = torch.tensor(context + some), len(context)
            each.append(bits_of(net, row, {w - 1 + i: byte for i, byte in enumerate(some)}))
        cut = next(k for k in range(12) if each[k] < min(each) + math.log2(10))
        assert sample.join(net, OBJECTIVES["fim"], hp, left, middle, right) == middle[:cut]
        found.add(cut)
    assert len(found) > 1


# ---- scoring

@pytest.mark.parametrize("stride", [1, 5, T])
@pytest.mark.parametrize("n", [1, 2, T, T + 1, 3 * T + 5])
def test_a_score_adds_up_byte_by_byte(n, stride):
    """Of disjoint windows each starts cold."""
    net, x = randomized(), ids(n)[0]
    bits = 8.0
    for at in range(0, n - 1, stride):
        a, end = max(0, at + stride - T), min(at + stride, n - 1)
        bits += bits_of(net, x[a:end], {i - a: x[i + 1] for i in range(at, end)})
    assert sample.score(net, x.byte(), T, stride) == pytest.approx(bits, rel=1e-5)


@FRAMES
def test_a_pseudo_score_masks_one_byte_at_a_time(frame):
    (before, after, shift), net, x = frame, randomized(), ids(T + 3)[0]
    bits = 0.0
    for window in x.split(T - len(before) - len(after)):
        for i, byte in enumerate(window):
            row = torch.tensor([*before, *window.tolist(), *after])
            row[len(before) + i] = MASK
            bits += bits_of(net, row, {len(before) + i - shift: byte}, "bidirectional")
    assert sample.score_pseudo(net, x.byte(), T, frame) == pytest.approx(bits, rel=1e-5)


def test_the_standard_error_of_a_bound_is_what_its_estimates_scatter():
    """Of any model, and of one that knows the text the better the more of it it sees."""
    net, wild = randomized().requires_grad_(False), torch.randn(32, generator=generator("wild")) * 2
    hp = settings("mdlm", 32)

    class Knows(Stub):
        def __call__(self, ids, mask, *rest, **how):
            return ((ids != MASK).float().mean(1, keepdim=True) * 5 + wild)[..., None]
    knows = Knows(lambda h: F.one_hot(torch.tensor(65), 512) * h)
    for model, text in ((net, ids(96)[0]), (knows, torch.full((96,), 65))):
        several = [sample.score_bound(model, find_objective(hp), text.byte(), hp, seed) for seed in range(80)]
        bits, errors = torch.tensor(several).T
        assert 0.8 < bits.std() / errors.mean() < 1.3


def test_a_long_text_is_embedded_by_the_mean_of_its_blocks():
    net, x = randomized().requires_grad_(False), ids(2 * T + 3)[0]
    mean = sum(embed(net, p[None])[0] * len(p) for p in x.split(T))
    got = sample.embeddings(net, OBJECTIVES["contrastive"], [[5], x.tolist(), []], T)
    torch.testing.assert_close(got[1], F.normalize(mean, dim=0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[0], embed(net, torch.tensor([[5]]))[0])
    assert got.norm(dim=1).tolist() == pytest.approx([1, 1, 1])


# ---- the command

FILES = {"blank.txt": b"\n\n", "void.txt": b"", "short.txt": b"import argparse\n" * 40,
         "lines.txt": b"a\n\nccc\nbb\n", "ends.txt": b"one\0two\0" * 9}


@pytest.fixture(scope="module")
def place(tmp_path_factory):  # a folder with a run of every objective, and of a mixture
    path, here = tmp_path_factory.mktemp("runs"), os.getcwd()
    os.chdir(path)
    shutil.copy(shutil.__file__, "text.txt")
    os.mkfifo("pipe")
    for name, content in FILES.items():
        with open(name, "wb") as f:
            f.write(content)
    for name in [*OBJECTIVES, "clm:.5,mlm:.5"]:
        assert train.main([*TINY, "--data", "text.txt", "--max_iters", "2", "--objective", name]) == 0
    os.chdir(here)
    return path


@pytest.fixture
def runs(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setitem(sample.FLAGS["how"], "max_new_tokens", (60, "past the block", 0, 999))


def say(capsys, run, *flags):  # what sample.py prints of a run
    capsys.readouterr()
    assert not sample.main(["--out_dir", f"out/{run}", *flags, "--dtype", "float32"])
    return capsys.readouterr().out


def refuse(capsys, run, *flags):  # the one line with which sample.py refuses
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        sample.main([*(["--out_dir", f"out/{run}"] if run else []), *flags])
    out, err = capsys.readouterr()
    assert e.value.code == 2
    assert err.count("\n") == 1
    assert not out
    return err


def altered(run, path, config=(), **parts):  # a run with another checkpoint -> its name
    ckpt = load_checkpoint(f"out/{run}")
    os.makedirs(f"out/{path}", exist_ok=True)
    torch.save(ckpt | {"config": ckpt["config"] | dict(config)} | parts, f"out/{path}/ckpt.pt")
    return path


RAW, NEAT = "a\x1b[31mb\x07c\x08d", "a\\x1b[31mb\\x07c\\x08d"


def controls(out):  # but for what marks the new parts
    return re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", re.sub(r"\x1b\[[07]m", "", out))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_run_shows_itself(name, runs, capsys, monkeypatch):
    run = altered(name, "raw", held_out=torch.tensor([*(RAW.encode() * 99)], dtype=torch.uint8))
    out = say(capsys, run)
    assert "---" in out
    assert len(out) > 60
    assert out == say(capsys, run), "the same seed, the same text"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert not controls(say(capsys, run)), "control bytes reach no terminal"


def test_the_help_shows_every_mode_and_no_objective_that_is_none():
    heads = [line.split(" python ")[0] for line in sample.__doc__.splitlines() if " python " in line]
    named = set(" ".join(heads).split())
    known = named & set(OBJECTIVES)
    assert {OBJECTIVES[name]["mode"] for name in known} == set(sample.MODES)
    assert named - known == {"with", "a", "likelihood"}


LONG, HOLE, SIDES = "x" * 99, "a<extra_id_0>b", ["--prefix", "a", "--suffix", "b"]
INPUTS = {
    "clm": [[""], [LONG], [os.fsdecode(b"\xff\xfe\x80")], ["a\0b"], ["<MASK><extra_id_0>"], ["🙂"]],
    "mtp": [[""], ["x", "--max_new_tokens", "0"], ["x", "--num_samples", "2"]],
    "prefix": [[""], [LONG], ["x", "--max_new_tokens", "0"]],
    "hybrid": [["[MASK]" + LONG, "--order", "left"]],
    "mdlm": [[""], ["", "--order", "left"], ["[MASK:90]", "--order", "confident"], ["[MASK:4]", "--show"], [LONG],
             ["é\0"]],
    "sedd": [["import "], ["a[MASK:9]b", "--order", "analytic"], ["a[MASK:9]b", "--order", "left"]],
    "mlm": [[LONG + "[MASK:3]" + LONG + "[MASK]"], ["[MASK:90]", "--steps", "1"], ["é[MASK]\udcff"], ["a__b[MASK]"]],
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
    """And shows it whole, but for a prompt that is longer than its block, of which it says so."""
    flags = flags if flags[0].startswith("--") else ["--prompt", *flags]
    out = say(capsys, name, *flags)
    assert not re.search(r"<MASK>(?!<)|\[MASK|<PRE>|<SEP>", out)
    text = dict(zip(flags[::2], flags[1::2]))
    text = text.get("--prompt", text.get("--prefix", "") + "<extra_id_0>" + text.get("--suffix", ""))
    pieces = re.split(r"\[MASK.*?\]|<extra_id_.>|\0", os.fsencode(text).decode(errors="replace"))
    if OBJECTIVES[name]["mode"] in ("continue", "fill", "infill"):
        whole = re.search(".*".join(map(re.escape, pieces)), out, re.DOTALL)
        assert whole or "bytes of the prompt" in out


@pytest.mark.parametrize("name, flags, others", [
    ("clm", [], ["--num_samples", "2"]), ("mtp", [], ["--num_samples", "2"]),
    ("clm", [], ["--compile"]), ("mtp", [], ["--compile"]),
    ("mtp", ["--temperature", "0"], ["--temperature", "0", "--no-speculate"])])
def test_the_same_text_comes_out_by_other_means(name, flags, others, runs, capsys, monkeypatch):
    monkeypatch.setattr(torch, "compile", static)
    ask = ["--out_dir", f"out/{name}", "--prompt", "import ", "--max_new_tokens", "99"]
    sample.main([*ask, *flags])
    one = capsys.readouterr()
    sample.main([*ask, *others])
    two = capsys.readouterr()
    assert two.out.count(one.out.strip()) == 1, "the second sample is another"
    assert ("--- sample 2" in two.out) == ("--num_samples" in others)
    assert ("bytes a pass" in one.err) == (name == "mtp")
    assert ("bytes a pass" in two.err) == (name == "mtp" and "--no-speculate" not in others)


def test_each_objective_has_its_own_order_and_shift(runs, capsys, monkeypatch):
    seen, plain = [], sample.unmask
    spy = lambda *a, **how: seen.append((a[3], how["order"])) or plain(*a, **how)
    monkeypatch.setattr(sample, "unmask", spy)
    for name in ("mlm", "mdlm", "sedd", "hybrid"):
        say(capsys, name, "--prompt", "a[MASK]")
    assert seen == [(IN_PLACE, "confident")] + [(IN_PLACE, "ancestral")] * 2 + [(SHIFTED, "confident")]


@pytest.mark.parametrize("name, flags, usual", [
    ("mlm", ["a[MASK]"], 0), ("mlm", ["a[MASK]", "--num_samples", "2"], 0.8), ("mdlm", ["a"], 0.65),
    ("mdlm", ["a", "--num_samples", "2"], 0.65), ("sedd", ["a", "--top_p", ".9"], 0.65),
    ("span", [HOLE], 0), ("span", [HOLE, "--top_k", "9"], 0.8), ("bart", ["a"], 0),
    ("bart", ["a", "--temperature", "0.3"], 0.3), ("clm", ["a"], 0.8)])
def test_what_has_one_best_answer_is_not_drawn(name, flags, usual, runs, capsys, monkeypatch):
    seen, plain = set(), sample.distribution
    monkeypatch.setattr(sample, "distribution", lambda z, t, *a, **how: seen.add(t) or plain(z, t, *a, **how))
    monkeypatch.setattr(sample, "pick", lambda z, g, **how: (
        seen.add(how["temperature"]), torch.full(z.shape[:-1], 65))[1])
    say(capsys, name, "--prompt", *flags)
    assert seen == {usual}


def test_a_short_run_is_told_what_a_longer_one_does(runs, capsys, monkeypatch):
    usual = load_checkpoint("out/clm")["config"]
    for steps, own, says in ((2, {}, False), (4, {}, True), (4, {"n_layer": 4}, False), (4, {"data": ["a"]}, False)):
        monkeypatch.setitem(OBJECTIVES["clm"], "reaches", (steps, "rhymes"))
        monkeypatch.setattr(sample, "defaults", lambda own=own: usual | own)
        sample.main(["--out_dir", "out/clm", "--prompt", "x", "--max_new_tokens", "1"])
        told = capsys.readouterr().err
        assert ("clm rhymes" in told and "--resume --out_dir out/clm --max_iters 4" in told) == says


@pytest.mark.parametrize("whole", [True, False])
def test_a_middle_is_shown_as_far_as_the_rest_follows(whole, runs, capsys, monkeypatch):
    monkeypatch.setattr(sample, "infill", lambda *args, **how: ([[*b"defghi"]], whole))
    monkeypatch.setattr(sample, "join", lambda model, entry, hp, left, middle, right: middle[:3])
    out = say(capsys, "fim", "--prefix", "abc", "--suffix", "ghi")
    assert out == "abcdefghi\n--- cut where the rest follows best\n"


@pytest.mark.parametrize("name, setting", [("hybrid", "hybrid_ratio"), ("fim", "fim_rate")])
def test_what_was_trained_without_holes_goes_on_with_any_prompt(name, setting, runs, capsys):
    run = altered(name, f"plain {name}", {setting: 0.0})
    assert "the model's continuation" in say(capsys, run)
    assert say(capsys, run, "--prompt", "a[MASK]b").startswith("a[MASK]b")


def test_a_mixture_does_what_its_members_do(runs, capsys):
    mixture = "clm_.5+mlm_.5"
    assert say(capsys, mixture, "--prompt", "import ").startswith("import ")
    assert len(say(capsys, mixture, "--objective", "mlm", "--prompt", "a[MASK]")) < 9


# ---- what the model is given

@pytest.fixture
def given(runs, monkeypatch):  # [(ids, mask, are documents kept apart?)] of each pass
    seen, forward = [], Transformer.forward

    def spy(self, x, mask, doc=None, **kwargs):
        apart = doc is not None and torch.equal(doc, document_ids(x))
        seen.append((x.tolist(), mask if isinstance(mask, str) else mask.tolist(), apart))
        return forward(self, x, mask, doc, **kwargs)
    monkeypatch.setattr(Transformer, "forward", spy)
    return seen


BOTH = "bidirectional"
GIVEN = [                                       # in a block of 32
    ("clm", ["--prompt", "abc"], [*b"abc"], "causal"),
    ("prefix", ["--prompt", "abc"], [*b"abc"], [3]),
    ("ul2", ["--prompt", "abc"], [MODE_S, *b"abc", SEP], [5]),
    ("span", ["--prompt", HOLE], [97, SENTINEL, 98, SENTINEL + 1, SEP, SENTINEL], [5]),
    ("fim", SIDES, [PRE, SUF, 98, MID, 97], "causal"),
    # of long sides what is nearest to the hole stays
    ("fim", ["--prefix", LONG + "123", "--suffix", "456" + LONG],
     [PRE, SUF, *b"456xxxx", MID, *b"xxxx123"], "causal"),
    ("bart", ["--prompt", "ab[MASK]"], [97, 98, MASK, SEP], [4]),
    # a long first text counts with its last bytes, a long second one without its first few, as in training
    ("nsp", ["--prefix", LONG + "123", "--suffix", "z"], [CLS, *b"xxxxxxxxxxx123", SEP, 122, SEP], BOTH),
    ("nsp", ["--prefix", "a", "--suffix", "12345678" + "x" * 12], [CLS, 97, SEP, *b"x" * 12, SEP], BOTH),
    ("mlm", ["--prompt", "a[MASK:2]b"], [97, MASK, MASK, 98], BOTH),
    # a quarter of the block stands before a hole, more where the text ends
    ("mlm", ["--prompt", LONG + "[MASK]" + "y" * 99], [*b"x" * 8, MASK, *b"y" * 23], BOTH),
    ("mlm", ["--prompt", LONG + "[MASK]"], [*b"x" * 31, MASK], BOTH),
    ("hybrid", ["--prompt", LONG + "[MASK]"], [EOT, *b"x" * 30, MASK], BOTH),
    ("hybrid", ["--prompt", "abc"], [*b"abc"], "causal"),
    ("mdlm", ["--prompt", "abc", "--max_new_tokens", "2"], [*b"abc", MASK, MASK], BOTH),
]


@pytest.mark.parametrize("run, flags, row, mask", GIVEN, ids=lambda v: v if isinstance(v, str) else "")
def test_a_prompt_is_read_as_its_objective_was_trained(run, flags, row, mask, given, capsys):
    say(capsys, run, *flags)
    assert given[0] == ([row], mask, False)


def fork(monkeypatch, run, **entry):  # a run of an objective that is not ours -> its name
    monkeypatch.setitem(OBJECTIVES, "fork", USUAL | dict(name="fork", help="", use="", mask="") | entry)
    return altered(run, "fork", dict(objective="fork"))


def test_a_fork_that_works_in_place_is_shown_filled_and_scored_as_it_says(given, capsys, monkeypatch):
    run = fork(monkeypatch, "mlm", make=OBJECTIVES["mlm"]["make"], window=lambda T, hp: T - 3, mode="fill",
               fills=lambda hp: FRAMED, orders=("left",))
    before, after, _ = FRAMED
    for flags in ([], ["--prompt", LONG + "[MASK]"], ["--score", "short.txt"]):
        given.clear()
        out = say(capsys, run, *flags)
        assert {(*row[:2], *row[-1:], len(row)) for row in given[0][0]} == {(*before, *after, 32)}
        assert all(MASK in row for row in given[0][0])
    assert "pseudo: every byte given all others of its window of 29" in out


def test_a_fork_that_writes_a_target_is_shown_and_repaired_as_it_says(given, capsys, monkeypatch):
    every = lambda x: torch.ones_like(x, dtype=torch.bool)
    asked = []
    run = fork(monkeypatch, "bart", mode="repair", window=lambda T, hp: 10, positions=lambda ids, P: asked.append(P),
               make=lambda x, g, hp: seq2seq(x.flip(1), every(x), x, every(x), hp.block_size))
    held_out = load_checkpoint("out/bart")["held_out"][:10].tolist()
    say(capsys, run)
    assert given[0][:2] == ([held_out[::-1] + [SEP]], [11])
    given.clear()
    say(capsys, run, "--prompt", "x" * 22 + "a[MASK]")
    firsts = [(row, mask) for [row], mask, _ in given if SEP in row]
    assert firsts == [([120] * 10 + [SEP], [11])] * 2 + [([120, 120, 97, MASK, SEP], [5])]
    assert {int(P) for P in asked} == {11, 5}, "its positions are asked for"


def test_a_fork_with_a_bound_of_its_own_is_scored_by_it(runs, capsys, monkeypatch):
    some = lambda model, batch, hp: torch.full((len(batch["inp"]),), 25 * math.log(2))
    run = fork(monkeypatch, "mdlm", make=OBJECTIVES["mdlm"]["make"], window=lambda T, hp: T - 7, bpb="bound",
               bounds=some)
    out = say(capsys, run, "--score", "short.txt")
    assert out.startswith("short.txt: 1.0156 bits per byte"), "26 windows of 25 bits for 640 bytes"
    assert "fork's bound from above, standard error 0.0000, cold windows of 25" in out


# ---- what is printed

def test_what_is_shown_is_what_was_found(runs, capsys, monkeypatch):
    """The seam is rolled back to the front; the nearest passages come first; a positive answer means
    replaced; a positive answer means that the second text follows."""
    monkeypatch.setitem(OBJECTIVES["rotation"], "answer", lambda model, x: (x == ord("f")) * 9.0)
    assert say(capsys, "rotation", "--prompt", "defabc").endswith("\nfabcde\n")
    monkeypatch.setattr(sample, "embeddings", lambda *a: torch.tensor([[float(len(t)), 1.0] for t in a[2]]))
    out = say(capsys, "contrastive", "--query", "aa", "--corpus", "lines.txt")
    assert re.findall(r"line (\d)", out) == ["3", "4", "1"]
    monkeypatch.setitem(OBJECTIVES["electra"], "answer", lambda model, x: (x > 127) * 4.0 - 2)
    out = say(capsys, "electra", "--prompt", "naïve café")
    assert out.startswith("na«ï»ve caf«é»\n"), "characters of several bytes stay whole"
    assert out.count("probability 0.88") == 4
    monkeypatch.setitem(OBJECTIVES["nsp"], "answer", lambda *a: torch.tensor(2.0))
    assert say(capsys, "nsp", *SIDES) == "the second text follows the first with probability 0.881\n"


ECHO = dict.fromkeys(["clm", "prefix", "mtp", "mdlm", "electra", "rotation"], RAW)
ECHO |= {"mlm": RAW + "[MASK]", "fim": RAW + "<extra_id_0>"}


@pytest.mark.parametrize("name", ECHO)
def test_control_bytes_reach_a_pipe_but_no_terminal(name, runs, capsys, monkeypatch):
    for other in ("electra", "rotation"):       # the first byte leads, and none is suspicious
        monkeypatch.setitem(OBJECTIVES[other], "answer", lambda model, x: -(x.cumsum(1) + 1.0))
    assert RAW in say(capsys, name, "--prompt", ECHO[name])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    out = say(capsys, name, "--prompt", ECHO[name])
    assert NEAT in out
    assert not controls(out)
    assert ("\x1b[7m" in out) == (name in ("mlm", "mdlm", "fim")), "what is new stands out"


@pytest.mark.parametrize("name", ["mdlm", "sedd"])
def test_the_bound_of_an_untrained_model_is_8_bits_a_byte(name):
    hp = settings(name, 32)
    model = build(hp)
    bits, error = sample.score_bound(model, find_objective(hp), ids(100)[0].byte(), hp, 1)
    assert bits == pytest.approx(800, rel=1e-5)
    assert error == pytest.approx(0, abs=1e-3)


# ---- scores of the command

@pytest.mark.parametrize("name", ["clm", "mlm", "mdlm"])
def test_scores_keep_documents_apart_where_training_did(name, given, capsys):
    for run, wanted in ((name, False), (altered(name, "masked", dict(doc_mask=True)), True)):
        given.clear()
        say(capsys, run, "--score", "ends.txt")
        if name != "clm":
            say(capsys, run, "--prompt", "a [MASK] b")
        assert {apart for _, _, apart in given} == {wanted}


@pytest.mark.parametrize("name", ["clm", "hybrid", "sedd", "mlm", "nsp"])
def test_score_prints_bits_per_byte_beside_compressors(name, runs, capsys):
    exact = name in ("clm", "hybrid")
    out = say(capsys, name, "--score", "short.txt", *(["--stride", "32"] if exact else []))
    assert 2 < float(out.split(": ")[1].split()[0]) < 9.5
    assert "lzma" in out
    assert ("stride 32" in out) == exact
    assert (f"{name}'s bound" in out) == (name == "sedd")
    assert ("pseudo" in out) == (name in ("mlm", "hybrid", "nsp"))


# ---- texts from standard input and from files

@pytest.mark.parametrize("name, flag, more", [
    ("clm", "--prompt", []), ("mlm", "--prompt", []), ("fim", "--suffix", []), ("contrastive", "--query", []),
    ("nsp", "--prefix", ["--suffix", "b"]), ("clm", "--score", []), ("contrastive", "--corpus", [])])
def test_a_text_may_come_from_standard_input_or_a_file(name, flag, more, runs, capsys, monkeypatch, tmp_path):
    text, path = b"\xffa b[MASK]\nc\xc3\xa9\n", str(tmp_path / "a text")
    with open(path, "wb") as f:
        f.write(text)
    files = flag in ("--score", "--corpus")     # these name a file anyway
    want = say(capsys, name, flag, path if files else os.fsdecode(text), *more).replace(path, "-")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert say(capsys, name, flag, "-", *more) == want
    assert files or say(capsys, name, flag, f"FILE:{path}", *more) == want


def test_a_terminal_is_no_text(runs, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    for name, flag in (("clm", "--prompt"), ("clm", "--score"), ("contrastive", "--corpus")):
        assert "is a terminal" in refuse(capsys, name, flag, "-")


# ---- what is refused

BAD = {
    "a temperature that is no number": ("", ["--temperature", "nan"], "--temperature"),
    "an objective that was not trained": ("clm", ["--objective", "mlm"], "Try --objective clm"),
    "score without a likelihood": ("bart", ["--score", "text.txt"], "clm mlm prefix"),
    "a score of no name": ("clm", ["--score", ""], "no such file"),
    "an empty score": ("clm", ["--score", "void.txt"], "is empty"),
    "a stride beyond the block": ("clm", ["--score", "text.txt", "--stride", "33"], "--stride 32"),
    "a stride where there is none": ("mdlm", ["--score", "text.txt", "--stride", "8"], "as a whole"),
    "a stride without a score": ("clm", ["--stride", "8"], "Try with --score"),
    "a score with a prompt": ("clm", ["--score", "text.txt", "--prompt", "x"], "--prompt: not used"),
    "nothing to fill": ("mlm", ["--prompt", "no hole"], "[MASK]"),
    "a hole of no byte": ("mlm", ["--prompt", "a[MASK:0]"], "1 to 999999"),
    "a hole of more digits than Python reads": ("bart", ["--prompt", f"a[MASK:{'9' * 5000}]"], "1 to 999999"),
    "an unknown order": ("mlm", ["--order", "sideways"], "confident or left"),
    "an order where there is no hole": ("hybrid", ["--prompt", "x", "--order", "left"], "--order"),
    "a text and its sides": ("fim", ["--prompt", "a<extra_id_0>", "--prefix", "b"], "without --prefix"),
    "too many holes": ("span", ["--prompt", "<extra_id_0>" * 250], "250 holes"),
    "a text too long for its block": ("span", ["--prompt", LONG + "<extra_id_0>" * 2], "shorter text"),
    "a flag of another objective": ("clm", ["--suffix", "x"], "fim nsp"),
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
def test_bad_input_is_one_line(case, runs, capsys):
    run, flags, hint = BAD[case]
    assert hint in refuse(capsys, run, *flags)
