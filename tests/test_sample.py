import math
import os
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, randomize, randomized, settings

import sample
import train
from data import EOT, MASK, SENTINEL, SEP, generator
from model import Sizes
from objectives import OBJECTIVES

T = 12
GREEDY = dict(temperature=0)


def ids(n, N=1, seed=0):
    return torch.randint(1, 256, (N, n), generator=generator(f"prompt {seed}"))


def text_of(*args, **kwargs):  # generate as one tensor (N, written)
    return torch.stack(list(sample.generate(*args, **kwargs)), 1)


# ---- drawing a byte

def test_temperature_0_is_the_most_likely_byte_and_never_a_special_id():
    logits = torch.zeros(1, 512)
    logits[0, 300], logits[0, 65] = 9, 5
    assert sample.pick(logits, [generator("g")], temperature=0).tolist() == [65]
    assert max(int(sample.pick(logits, [generator(f"{i}")])) for i in range(200)) < 256


def test_draws_follow_the_probabilities():
    p = torch.tensor([0.5, 0.25, 0.15, 0.1])
    logits = torch.full((512,), -50.0)
    logits[100:104] = p.log()
    g, n = generator("draws"), 4000
    seen = torch.bincount(torch.cat([sample.pick(logits.expand(1, 50, -1), [g]).flatten() for _ in range(n // 50)]), minlength=104)[100:104]
    chi2 = float(((seen - n * p) ** 2 / (n * p)).sum())
    assert chi2 < 25                                                # 3 degrees of freedom: 1.5 in 100,000


@pytest.mark.parametrize("how, allowed", [(dict(top_k=2), {100, 101}), (dict(top_p=0.6), {100, 101}), (dict(top_p=0.5), {100}),
                                          (dict(top_k=1), {100}), (dict(top_p=0.0), {100}), (dict(top_k=5000), {100, 101, 102, 103})])
def test_top_k_and_top_p_cut_the_tail(how, allowed):
    logits = torch.full((1, 512), -1e9)
    logits[0, 100:104] = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    assert {int(sample.pick(logits, [generator(f"{i}")], **how)) for i in range(100)} == allowed


# ---- continuing

@pytest.mark.parametrize("n", [1, 5, T - 1, T, T + 1, 3 * T])
@pytest.mark.parametrize("how", [GREEDY, dict(temperature=1.0)], ids=["greedy", "drawn"])
def test_the_cache_changes_nothing_before_and_after_the_block_is_full(n, how):
    net, x = randomized(), ids(n, 2)
    gens = lambda: sample.sample_generators(1, 2)
    with_cache, without = (text_of(net, x, 30, T, gens(), cached=c, **how) for c in (True, False))
    assert torch.equal(with_cache, without) and with_cache.shape == (2, 30)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_fast_step_over_a_static_cache_speculates_alike(temperature, monkeypatch):
    """The step that is compiled, here as it stands: the same texts, past the end of the block, for prompts of any length."""
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    for n in (2, 4):
        net, heads = drafting(n)
        step = sample.fast_step(net, 1, T, heads, n)
        for seed in range(12):
            x = ids(1 + 2 * seed, seed=seed)[0].tolist()
            fast, plain = (list(sample.speculate(net, heads, x, 40, T, generator(f"{seed}"), step=s, temperature=temperature)) for s in (step, None))
            assert fast == plain and (len(fast) == 40 or fast[-1] == EOT)


@pytest.mark.slow
def test_a_compiled_step_changes_nothing():
    net, x = randomized().requires_grad_(False), ids(5, 2)
    step = sample.fast_step(net, 2, T)
    compiled, plain = (text_of(net, x, 30, T, sample.sample_generators(1, 2), step=s) for s in (step, None))
    assert torch.equal(compiled, plain) and (step is not None or not shutil.which("g++"))
    net, heads = drafting(4)
    step = sample.fast_step(net, 1, T, heads, 4)
    compiled, plain = (list(sample.speculate(net, heads, [65, 66], 40, T, generator("s"), step=s, **GREEDY)) for s in (step, None))
    assert compiled == plain


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_captured_step_changes_nothing():
    net, x = randomized().requires_grad_(False).cuda(), ids(5, 2).cuda()
    step = sample.fast_step(net, 2, T)
    captured, plain = (text_of(net, x, 30, T, sample.sample_generators(1, 2), step=s) for s in (step, None))
    assert torch.equal(captured, plain)


@pytest.mark.parametrize("n", [1, 4, T])
def test_the_cache_changes_nothing_for_a_prefix_which_ends_with_the_block(n):
    net, x = randomized(), ids(n, 2)
    with_cache, without = (text_of(net, x, 30, T, sample.sample_generators(1, 2), mask="prefix", cached=c) for c in (True, False))
    assert torch.equal(with_cache, without) and with_cache.shape == (2, T - n + 1)


def test_a_full_context_is_cut_to_its_last_half():
    net, x = randomized(), ids(T)
    out = text_of(net, x, 2, T, sample.sample_generators(1, 1), **GREEDY)
    row = torch.cat((x, out), 1)
    argmax = lambda context: int(net.logits(net(context, "causal")[:, -1])[0, :256].argmax())
    assert [argmax(row[:, :T]), argmax(row[:, 1 + T // 2:T + 1])] == out[0].tolist()


def test_the_prompt_of_a_prefix_model_is_read_both_ways():
    net, x = randomized(), ids(6)
    first = text_of(net, x, 1, T, sample.sample_generators(1, 1), mask="prefix", **GREEDY)
    logits = lambda mask: net.logits(net(x, mask)[:, -1])[0, :256]
    assert int(first) == int(logits(torch.tensor([6])).argmax())
    assert (logits(torch.tensor([6])) - logits("causal")).abs().max() > 1e-3


def test_row_i_of_a_batch_is_the_single_run_of_its_seed():
    net, x = randomized(), ids(5)
    batch = text_of(net, x.expand(3, -1), 20, T, sample.sample_generators(7, 3))
    for i in range(3):
        assert torch.equal(text_of(net, x, 20, T, [sample.sample_generators(7, 3)[i]])[0], batch[i])
    assert len({tuple(row.tolist()) for row in batch}) == 3


def test_a_row_that_ended_stays_ended():
    net, count = randomized(), iter(range(99))
    says = lambda h: torch.tensor([[EOT if next(count) == 0 else 65, 66]]).T         # the first row ends at once, the second never
    net.logits = lambda h: torch.nn.functional.one_hot(says(h)[:, 0], 512) * 100.0
    assert text_of(net, ids(3, 2), 4, T, sample.sample_generators(1, 2)).tolist() == [[EOT] * 4, [66] * 4]
    net.logits = lambda h: torch.nn.functional.one_hot(torch.full(h.shape[:-1], EOT), 512) * 100.0
    assert text_of(net, ids(3, 2), 9, T, sample.sample_generators(1, 2)).tolist() == [[EOT], [EOT]]


# ---- speculation

def drafting(n, seed=0):  # a model and heads that agree often enough for drafts to be kept now and then
    net = randomized(seed=seed)
    torch.manual_seed(seed)
    heads = OBJECTIVES["mtp"]["heads"](net.sizes, settings("mtp", T, mtp_heads=n))
    return net.requires_grad_(False), {k: randomize(h, seed).requires_grad_(False) for k, h in heads.items()}


@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_speculation_at_temperature_0_is_plain_decoding(n):
    """200 prompts over the n tried, of all lengths, past the end of the block."""
    passes = written = 0
    for seed in range(50):
        net, heads = drafting(n, seed % 5)
        x, tally = ids(1 + seed % (2 * T), seed=seed), []
        plain = [int(b) for b in sample.generate(net, x, 25, T, sample.sample_generators(1, 1), **GREEDY)]
        drafted = list(sample.speculate(net, heads, x[0].tolist(), 25, T, generator("s"), tally, **GREEDY))
        assert drafted == plain
        assert all(0 <= kept <= drafted <= n - 1 for drafted, kept in tally)
        passes, written = passes + len(tally), written + len(plain)
    assert passes <= written <= n * passes


def test_speculation_keeps_a_perfect_draft():
    """Every head says the same byte for ever: all drafts are kept, n bytes a pass after the first."""
    net, heads = drafting(4)
    net.logits = lambda h: F.one_hot(torch.full(h.shape[:-1], 65), 512) * 100.0
    tally = []
    assert list(sample.speculate(net, heads, [66], 41, 99, generator("s"), tally, **GREEDY)) == [65] * 41
    assert len(tally) == 11


@pytest.mark.parametrize("how", [dict(temperature=1.0), dict(temperature=0.7, top_k=3)])
def test_speculation_draws_from_the_plain_distribution(how):
    """Pairs of bytes after one prompt, from a model of 4 bytes: the second is drafted, kept or replaced."""
    net, heads = drafting(3)
    logits = net.logits
    only = torch.full((512,), -1e9)
    only[65:69] = 0
    net.logits = lambda h: logits(h) / 8 + only
    x, count = ids(5), 1500
    exact = torch.zeros(4, 4, dtype=torch.double)
    first = sample.distribution(net.logits(net(x, "causal")[:, -1]), **how)[0, 65:69]
    for i in range(4):
        longer = torch.cat((x, torch.tensor([[65 + i]])), 1)
        exact[i] = first[i] * sample.distribution(net.logits(net(longer, "causal")[:, -1]), **how)[0, 65:69]
    seen, tally = torch.zeros(4, 4), []
    for s in range(count):
        a, b, _ = sample.speculate(net, heads, x[0].tolist(), 3, T, generator(f"{s}"), tally, **how)
        seen[a - 65, b - 65] += 1
    want = exact * count
    assert float(((seen - want) ** 2 / want.clamp(min=1e-9))[want > 1].sum()) < 50 and seen[want < 1e-6].sum() == 0      # 15 degrees of freedom at most
    assert 0 < sum(k for _, k in tally) < sum(d for d, _ in tally), "some are kept, some are not"


def test_speculation_without_rejection_would_be_noticed(monkeypatch):
    net, heads = drafting(4)
    x = ids(5)
    plain = [int(b) for b in sample.generate(net, x, 25, T, sample.sample_generators(1, 1), **GREEDY)]
    invert = sample.invert
    rand = torch.rand
    monkeypatch.setattr(torch, "rand", lambda *shape, **k: rand(*shape, **k) - 1)              # below any ratio: every draft is kept
    monkeypatch.setattr(sample, "invert", lambda p, u: invert(p, u.clamp(min=0)))
    assert list(sample.speculate(net, heads, x[0].tolist(), 25, T, generator("s"), **GREEDY)) != plain


# ---- filling

class Oracle:
    """A denoiser that knows the distribution: each byte by itself, 4 values."""
    p = torch.tensor([0.4, 0.3, 0.2, 0.1])
    passes = 0

    def __call__(self, ids, mask):
        self.passes += 1
        return ids

    def logits(self, ids):
        out = torch.full((*ids.shape, 512), -1e9)
        out[..., 65:69] = self.p.log()
        return out


@pytest.mark.parametrize("steps", [1, 5, 40])
def test_the_ancestral_sampler_reproduces_its_oracle(steps):
    oracle, N, n = Oracle(), 300, 20
    x = torch.full((N, n), MASK)
    x[:, 3] = 90
    states = [x, *sample.unmask(oracle, x, sample.sample_generators(1, N), steps, "ancestral")]
    for before, after in zip(states, states[1:]):
        assert torch.equal(after[before != MASK], before[before != MASK]), "a byte was changed again"
    assert oracle.passes <= steps and not (states[-1] == MASK).any()
    counts = torch.bincount(states[-1][:, [i for i in range(n) if i != 3]].flatten(), minlength=69)[65:69]
    want = Oracle.p * N * (n - 1)
    assert counts.sum() == N * (n - 1) and float(((counts - want) ** 2 / want).sum()) < 25
    if steps == 40:                             # (t - s) / t unmasks an equal share a pass
        first = float((states[1] != MASK).float().mean()) - 1 / n
        assert abs(first - (n - 1) / n / 40) < 5 * (1 / 40 / N / n) ** 0.5


class Pair:
    """A denoiser that knows a joint distribution of two bytes: equal with probability .8, else each other pair alike."""
    joint = torch.full((4, 4), 0.2 / 12).fill_diagonal_(0.2)

    def __call__(self, ids, mask):
        return ids

    def logits(self, ids):                      # each byte given the other, where that one is known
        other = ids.flip(1)
        rows = torch.where((other == MASK)[..., None], self.joint.sum(0), (self.joint / self.joint.sum(1, keepdim=True))[(other - 65).clamp(0, 3)])
        return torch.cat((torch.full((*ids.shape, 65), -1e9), rows.log(), torch.full((*ids.shape, 443), -1e9)), -1)


@pytest.mark.parametrize("steps, equal", [(64, 0.8), (1, 0.25)])
def test_the_ancestral_sampler_reproduces_a_joint_distribution(steps, equal):
    """In many passes, of which few unmask both bytes at once; in one pass both are drawn as if alone."""
    N = 2000
    out = sample.fill(Pair(), torch.full((N, 2), MASK), sample.sample_generators(2, N), steps=steps, order="ancestral") - 65
    both = equal + (0.25 - equal) / steps       # the chance of a pass in common is 1 / steps
    counts = torch.bincount(out[:, 0] * 4 + out[:, 1], minlength=16).view(4, 4)
    want = torch.full((4, 4), (1 - both) / 12).fill_diagonal_(both / 4) * N
    assert float(((counts - want) ** 2 / want).sum()) < 45                         # 15 degrees of freedom


def test_a_shifted_model_predicts_from_the_position_before():
    net, x = randomized(), ids(T)
    x[0, [0, 5]] = MASK
    out = sample.fill(net, x, sample.sample_generators(1, 1), order="parallel", shift=True, **GREEDY)
    row = torch.cat((torch.tensor([[EOT]]), x), 1)
    logits = net.logits(net(row, "bidirectional"))[0, :, :256]
    assert out[0, 0] == logits[0].argmax() and out[0, 5] == logits[5].argmax()


def scripted(*script):  # a model that writes these ids
    script = list(script)
    class Writes:
        embed = torch.nn.Embedding(512, 4)
        sizes, dtype = Sizes(1, 1, 4), torch.float32
        def __call__(self, ids, mask, cache):
            cache["length"] += ids.size(1)
            return ids
        def logits(self, ids):
            return F.one_hot(torch.tensor([script.pop(0)]), 512) * 100.0
    return Writes()


@pytest.mark.parametrize("written", range(1, 12))
def test_holes_end_with_the_block_whatever_was_written(written):
    script = [70] * written + [SENTINEL + 1] + [71] * 20
    spans, whole = sample.infill_spans(scripted(*script), [65, SENTINEL, 66, SENTINEL + 1, 67, SENTINEL + 2, SEP], 2, 50, 16, sample.sample_generators(1, 1))
    assert not whole and spans[0] == [70] * min(written, 9) and len(spans) == 2


def test_spans_are_split_at_their_sentinels():
    model = scripted(70, SENTINEL + 1, 71, 72, SENTINEL + 2, SENTINEL + 3)
    spans, whole = sample.infill_spans(model, [65, SENTINEL, 66, SENTINEL + 1, SENTINEL + 2, SENTINEL + 3, SEP], 3, 50, 99, sample.sample_generators(1, 1))
    assert spans == [[70], [71, 72], []] and whole

@pytest.mark.parametrize("order", ["parallel", "confident", "left", "ancestral"])
def test_filling_leaves_no_mask_and_touches_nothing_else(order):
    net, x = randomized(), ids(T, 3)
    x[0, 2:5], x[1, 7], x[2, :] = MASK, MASK, MASK
    out = sample.fill(net, x, sample.sample_generators(1, 3), order=order)
    assert (out[x == MASK] < 256).all() and torch.equal(out[x != MASK], x[x != MASK])


def test_parallel_is_one_pass_and_confident_the_surest_byte_first():
    net, x = randomized().requires_grad_(False), ids(T)
    x[0, [2, 6, 9]] = MASK
    p, best = net.logits(net(x, "bidirectional"))[0, :, :256].softmax(-1).max(-1)
    gens = sample.sample_generators(1, 1)
    parallel = sample.fill(net, x, gens, order="parallel", **GREEDY)
    assert parallel[0, [2, 6, 9]].tolist() == best[[2, 6, 9]].tolist()
    want = x.clone()
    while (want == MASK).any():
        p, best = net.logits(net(want, "bidirectional"))[0, :, :256].softmax(-1).max(-1)
        at = max((i for i in range(T) if want[0, i] == MASK), key=lambda i: float(p[i]))
        want[0, at] = best[at]
    assert torch.equal(sample.fill(net, x, gens, order="confident", **GREEDY), want)
    left = x.clone()
    for i in (2, 6, 9):
        left[0, i] = net.logits(net(left, "bidirectional"))[0, i, :256].argmax()
    assert torch.equal(sample.fill(net, x, gens, order="left", **GREEDY), left)


def test_only_the_marker_is_special():
    assert sample.parse_holes(b"a[MASK]b[MASK:3]", b"", sample.MASKS) == [[97], 1, [98], 3, []]
    assert sample.parse_holes(b"<MASK> [MASK:x] [mask]", b"", sample.MASKS) == [list(b"<MASK> [MASK:x] [mask]")]
    assert sample.parse_holes(b"a__[MASK]", b"_", sample.MASKS) == [[97], 1, [], 1, list(b"[MASK]")]
    assert sample.parse_holes(b"<extra_id_7>b<extra_id_>", b"", sample.HOLES) == [[], 1, list(b"b<extra_id_>")]


# ---- scoring

@pytest.mark.parametrize("stride", [1, 5, T - 1, T])
@pytest.mark.parametrize("n", [1, 2, T, T + 1, 3 * T + 5])
def test_a_score_adds_up_byte_by_byte(n, stride):
    net, x = randomized(), ids(n)[0]
    bits = 8.0
    for at in range(0, n - 1, stride):
        a, end = max(0, at + stride - T), min(at + stride, n - 1)
        logp = net.logits(net(x[None, a:end], "causal"))[0].log_softmax(-1)
        bits -= sum(float(logp[i - a, x[i + 1]]) for i in range(at, end)) / math.log(2)
    assert sample.score(net, x.byte(), T, stride) == pytest.approx(bits, rel=1e-5)


def test_disjoint_windows_start_cold_and_overlapping_ones_do_not():
    net, x = randomized(), ids(4 * T + 1)[0]
    cold = torch.nn.functional.cross_entropy(net.logits(net(x[:-1].view(4, T), "causal")).flatten(0, 1), x[1:], reduction="sum") / math.log(2)
    assert sample.score(net, x.byte(), T, T) == pytest.approx(8 + float(cold), rel=1e-5)
    assert sample.score(net, x.byte(), T, T // 2) != pytest.approx(8 + float(cold), rel=1e-3)


# ---- the command

@pytest.fixture(scope="module")
def place(tmp_path_factory):  # a folder with a run of every objective
    path = tmp_path_factory.mktemp("runs")
    here = os.getcwd()
    os.chdir(path)
    with open(train.argparse.__file__, "rb") as f, open("text.txt", "wb") as g:
        g.write(f.read())
    for name, content in (("blank.txt", b"\n\n"), ("void.txt", b""), ("short.txt", b"import argparse\n" * 40), ("lines.txt", b"a\n\nccc\nbb\n")):
        with open(name, "wb") as g:
            g.write(content)
    for name in [*OBJECTIVES, "clm:.5,mlm:.5"]:
        assert train.main([*TINY, "--data", "text.txt", "--objective", name, "--max_iters", "2"]) == 0
    os.chdir(here)
    return path


@pytest.fixture
def runs(place, monkeypatch):
    monkeypatch.chdir(place)


def say(capsys, *flags):
    capsys.readouterr()
    assert not sample.main([*flags, "--dtype", "float32"])
    return capsys.readouterr().out


@pytest.mark.parametrize("name", sample.MODES)
def test_every_run_shows_itself(name, runs, capsys):
    out = say(capsys, "--out_dir", f"out/{name}")
    assert "---" in out and len(out) > 60
    assert out == say(capsys, "--out_dir", f"out/{name}"), "the same seed, the same text"


def test_without_a_folder_the_newest_run_is_used(runs, capsys):
    os.utime("out/mlm/ckpt.pt")
    assert "masked" in say(capsys)


def test_help_shows_every_objective(capsys):
    with pytest.raises(SystemExit):
        sample.main(["--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in [*sample.MODES, *(f"--{flag}" for flag in sample.FLAGS)])
    assert set(sample.MODES) <= set(OBJECTIVES)


MODE_FLAGS = {
    "mtp": [["--prompt", "for", "--speculate"], ["--prompt", "", "--speculate", "--num_samples", "2"],
            ["--prompt", "x" * 99, "--speculate", "--temperature", "0"], ["--prompt", "x", "--speculate", "--max_new_tokens", "0"], ["--prompt", "x"]],
    "hybrid": [["--prompt", "a[MASK:3]"], ["--prompt", "a plain prompt"], ["--prompt", "[MASK]" + "x" * 80, "--order", "left"]],
    "mdlm": [["--prompt", ""], ["--prompt", "import "], ["--prompt", "a[MASK:9]b", "--steps", "3"], ["--prompt", "[MASK:90]", "--order", "confident"],
             ["--prompt", "[MASK:4]", "--show"], ["--prompt", "x" * 99], ["--prompt", "é\0"]],
    "span": [["--prompt", "a<extra_id_0>b<extra_id_1>"], ["--prompt", "<extra_id_0>"], ["--prompt", "a__b", "--hole", "__", "--num_samples", "2"]],
    "ul2": [["--prompt", "a<extra_id_0>b"], ["--prompt", "a<extra_id_0>b", "--mode", "X"], ["--prompt", "go on", "--mode", "S"],
            ["--prompt", ""], ["--prompt", "x" * 99]],
    "fim": [["--prefix", "a", "--suffix", "b"], ["--prefix", "x" * 99, "--suffix", "y" * 99, "--spm"], ["--prompt", "a<extra_id_0>b"], ["--suffix", "b"],
            ["--prefix", "", "--suffix", ""]],
    "bart": [["--prompt", "a noizy tex"], ["--prompt", "x" * 99], ["--prompt", "a[MASK]b"], ["--prompt", ""]],
    "electra": [["--prompt", "some text"], ["--prompt", "x" * 99], ["--prompt", ""], ["--prompt", "\udcff"]],
    "nsp": [["--prefix", "a", "--suffix", "b"], ["--prefix", "x" * 99, "--suffix", "y" * 99], ["--prefix", ""]],
    "contrastive": [["--query", "a"], ["--query", "", "--corpus", "text.txt"], ["--prompt", "a text"], ["--corpus", "text.txt"], ["--query", "x" * 99]],
    "rotation": [["--prompt", "b a"], ["--prompt", ""], ["--prompt", "x" * 99]],
}


@pytest.mark.parametrize("name, flags", [(n, f) for n, each in MODE_FLAGS.items() for f in each], ids=lambda v: v if isinstance(v, str) else " ".join(v)[:30])
def test_every_mode_takes_any_input(name, flags, runs, capsys):
    writes = "max_new_tokens" in sample.MODES[name][1] and not (name in ("hybrid", "mdlm") and "[MASK" in "".join(flags))
    short = ["--max_new_tokens", "20"] if writes and "--max_new_tokens" not in flags else []
    out = say(capsys, "--out_dir", f"out/{name}", *flags, *short)
    assert "<MASK>" not in out and "<PRE>" not in out and "<SEP>" not in out
    if name in ("span", "ul2", "fim") and "--prompt" in flags and "<extra" in flags[1]:
        before, _, behind = flags[1].partition("<extra_id_0>")
        assert out.startswith(before) and behind.partition("<extra")[0] in out


PROMPTS = {"empty": "", "long": "x" * 500, "not UTF-8": os.fsdecode(b"\xff\xfe\x80"), "NUL": "a\0b", "look-alike": "<MASK><extra_id_0>", "emoji": "🙂"}


@pytest.mark.parametrize("name", ["clm", "prefix"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_any_prompt_can_be_continued(name, prompt, runs, capsys):
    for extra in ([], ["--num_samples", "2"], ["--max_new_tokens", "0"], ["--top_k", "100000", "--top_p", ".9", "--temperature", "0"]):
        out = say(capsys, "--out_dir", f"out/{name}", "--prompt", PROMPTS[prompt], "--max_new_tokens", "40", *extra)
        assert prompt not in ("long", "look-alike", "emoji") or PROMPTS[prompt][-16:] in out


def test_mtp_drafts_of_itself_and_can_be_told_not_to(runs, capsys):
    def passes(*flags):
        assert sample.main(["--out_dir", "out/mtp", "--prompt", "x", "--max_new_tokens", "9", *flags]) is None
        return capsys.readouterr().err
    assert "per pass" in passes() and "plain" not in passes()
    assert "plain" in passes("--speculate") and "plain" in passes("--speculate", "--num_samples", "2")
    assert passes("--no-speculate") == "" == passes("--num_samples", "2")


def test_a_streamed_sample_is_the_first_of_a_batch(runs, capsys):
    one = say(capsys, "--out_dir", "out/clm", "--prompt", "import ", "--max_new_tokens", "40")
    two = say(capsys, "--out_dir", "out/clm", "--prompt", "import ", "--max_new_tokens", "40", "--num_samples", "2")
    assert one.strip() in two and "--- sample 2" in two


@pytest.mark.parametrize("prompt", ["[MASK]", "a[MASK:4]b", "x" * 200 + "[MASK:3]" + "y" * 200 + "[MASK]", "[MASK:90]", "é[MASK]\udcff"])
@pytest.mark.parametrize("order", ["parallel", "confident"])
def test_any_text_can_be_filled(prompt, order, runs, capsys):
    out = say(capsys, "--out_dir", "out/mlm", "--prompt", prompt, "--order", order)
    assert "MASK" not in out and len(out) > 1
    assert "x" * 200 in out or "x" * 200 not in prompt


def test_what_is_shown_is_what_was_found(runs, capsys, monkeypatch):
    """The seam is rolled back to the front; the nearest passages come first; a positive score means replaced."""
    monkeypatch.setattr(sample, "seam", lambda model, heads, ids, hp: (2, 1.0))
    assert say(capsys, "--out_dir", "out/rotation", "--prompt", "defabc").endswith("fabcde\n")
    monkeypatch.setattr(sample, "embeddings", lambda model, texts, T: torch.tensor([[float(len(t)), 1.0] for t in texts]))
    out = say(capsys, "--out_dir", "out/contrastive", "--query", "aa", "--corpus", "lines.txt")
    assert re.findall(r"line (\d)", out) == ["3", "4", "1"]
    model, heads, hp, _ = sample.load_run("out/electra", dtype="float32")
    torch.nn.init.zeros_(heads["replaced"].weight)
    heads["replaced"].bias.fill_(2.0)
    assert sample.suspicion(model, heads, torch.tensor([65, 66]), 32).tolist() == pytest.approx([0.8808, 0.8808], abs=1e-4)


@pytest.mark.parametrize("prompt", ["[MASK]", None])
def test_each_objective_has_its_own_order_and_shift(prompt, runs, capsys, monkeypatch):
    seen, plain = [], sample.unmask
    monkeypatch.setattr(sample, "unmask", lambda *a, **k: seen.append((k["order"], k["shift"], k["steps"])) or plain(*a, **k))
    for name in ("mlm", "mdlm", "hybrid"):
        say(capsys, "--out_dir", f"out/{name}", *(["--prompt", prompt] if prompt else []))
    assert seen == [("confident", False, 0), ("ancestral", False, 64), ("confident", True, 0)]


def test_characters_of_several_bytes_stay_whole(runs, capsys, monkeypatch):
    monkeypatch.setattr(sample, "suspicion", lambda model, heads, ids, T: (ids > 127).float())
    assert "na«ï»ve caf«é»" in say(capsys, "--out_dir", "out/electra", "--prompt", "naïve café")


def test_a_prompt_is_read_as_its_objective_was_trained(runs, capsys, monkeypatch):
    """What the model is given: both ways for prefix; the mode of ul2; the order of fim."""
    seen = []
    forward = train.Transformer.forward
    monkeypatch.setattr(train.Transformer, "forward", lambda self, idx, mask, *a, **k: seen.append((idx, mask)) or forward(self, idx, mask, *a, **k))
    first = lambda *flags: (seen.clear(), say(capsys, *flags), seen[0])[-1]
    idx, mask = first("--out_dir", "out/prefix", "--prompt", "abc")
    assert mask.tolist() == [3] == [idx.size(1)]
    assert first("--out_dir", "out/clm", "--prompt", "abc")[1] == "causal"
    for mode, i in (("R", 263), ("X", 265)):
        idx, mask = first("--out_dir", "out/ul2", "--prompt", "a<extra_id_0>b", "--mode", mode)
        assert idx.tolist() == [[i, 97, SENTINEL, 98, SENTINEL + 1, SEP, SENTINEL]] and mask.tolist() == [6]
    idx, mask = first("--out_dir", "out/ul2", "--prompt", "abc", "--mode", "S")
    assert idx.tolist() == [[264, 97, 98, 99, SEP]] and mask.tolist() == [5]
    assert first("--out_dir", "out/fim", "--prefix", "a", "--suffix", "b")[0].tolist() == [[260, 97, 261, 98, 262]]
    assert first("--out_dir", "out/fim", "--prefix", "a", "--suffix", "b", "--spm")[0].tolist() == [[260, 261, 98, 262, 97]]
    row = first("--out_dir", "out/fim", "--prefix", "a" * 50 + "bcdefghi", "--suffix", "jklmnopq" + "a" * 50)[0][0].tolist()
    middle = row.index(261)
    assert bytes(row[middle - 8:middle]) == b"bcdefghi" and bytes(row[middle + 1:middle + 9]) == b"jklmnopq", "what is nearest to the hole stays"
    idx, mask = first("--out_dir", "out/bart", "--prompt", "ab[MASK]")
    assert idx.tolist() == [[97, 98, MASK, SEP]] and mask.tolist() == [4]
    idx, _ = first("--out_dir", "out/nsp", "--prefix", "abc", "--suffix", "12345678" + "x" * 12)
    assert idx.tolist() == [[258, 97, 98, 99, SEP, *b"x" * 12, SEP]], "of a long second text the first bytes are skipped"
    idx, _ = first("--out_dir", "out/mlm", "--prompt", "x" * 100 + "[MASK]")
    assert idx.tolist() == [[120] * 31 + [MASK]], "a hole is filled with what stands before it in view"
    assert first("--out_dir", "out/hybrid", "--prompt", "a[MASK]")[0].tolist() == [[EOT, 97, MASK]]
    first("--out_dir", "out/hybrid", "--score", "short.txt")
    assert all(i[0, 0] == EOT for i, _ in seen if (i == MASK).any()) and (seen[-1][0] == MASK).any()


def test_a_hole_may_have_another_marker(runs, capsys):
    assert "[MASK]" in say(capsys, "--out_dir", "out/mlm", "--prompt", "a__b[MASK]", "--hole", "__")


def test_a_mixture_does_what_its_members_do(runs, capsys):
    folder = "out/clm_.5+mlm_.5"
    assert say(capsys, "--out_dir", folder, "--prompt", "import ").startswith("import ")
    assert "a" in say(capsys, "--out_dir", folder, "--objective", "mlm", "--prompt", "a[MASK]")


@pytest.mark.parametrize("shift", [False, True])
def test_a_pseudo_score_masks_one_byte_at_a_time(shift):
    net, x = randomized().requires_grad_(False), ids(T + 3)[0]
    bits, n = 0.0, T - shift                    # shifted, position i - 1 predicts byte i: one position before the first byte
    for a in range(0, len(x), n):
        window = x[a:a + n]
        for i in range(len(window)):
            row = window.clone()
            row[i] = MASK
            row = torch.cat((torch.tensor([EOT]), row)) if shift else row
            bits -= float(net.logits(net(row[None], "bidirectional"))[0, i].log_softmax(-1)[window[i]].detach()) / math.log(2)
    assert sample.score_pseudo(net, x.byte(), T, shift) == pytest.approx(bits, rel=1e-5)


def test_scores_keep_documents_apart_where_training_did(monkeypatch):
    net, text = randomized(), torch.randint(1, 256, (20,), generator=generator("t")).byte()
    text[9], seen = EOT, []
    class Spy:
        embed, logits = net.embed, net.logits
        def __call__(self, x, mask, doc=None):
            seen.append(doc is not None and torch.equal(doc, sample.document_ids(x)))
            return net(x, mask, doc)
    for keep in (True, False):
        seen.clear()
        bits = [f(Spy(), text, 32, *more, doc_mask=keep) for f, more in ((sample.score, (32,)), (sample.score_pseudo, ()))]
        bits += sample.score_bound(Spy(), text, 32, 1, doc_mask=keep)
        assert len(seen) == 3 and all(s == keep for s in seen) and all(b > 0 for b in bits)


def test_a_score_keeps_to_documents_as_training_did():
    """Of two documents that fill a window the second is scored as if it stood alone, behind the NUL that it follows."""
    net, x = randomized().requires_grad_(False), ids(T, seed=3)[0]
    a, b = x[:6].clamp(min=1), x[6:].clamp(min=1)
    text = torch.cat((a, torch.tensor([EOT]), b)).byte()
    alone = lambda row: -float(net.logits(net(row[None, :-1], "causal"))[0].log_softmax(-1).gather(1, row[1:, None]).sum()) / math.log(2)
    logits = net.logits(net(torch.cat((a, torch.tensor([EOT])))[None], "causal"))[0, -1]
    want = 8 + alone(torch.cat((a, torch.tensor([EOT])))) - float(logits.log_softmax(-1)[b[0]]) / math.log(2)
    angle = sample.score(net, text, 2 * T, 2 * T, doc_mask=True)
    assert angle == pytest.approx(want + alone(b), rel=1e-4) and sample.score(net, text, 2 * T, 2 * T) != pytest.approx(angle, rel=1e-4)


def test_a_long_text_is_embedded_by_the_mean_of_its_blocks():
    net, x = randomized().requires_grad_(False), ids(2 * T + 3)[0]
    parts = [sample.embed(net, p[None])[0] * len(p) for p in x.split(T)]
    got = sample.embeddings(net, [[5], x.tolist(), []], T)
    torch.testing.assert_close(got[1], F.normalize(sum(parts), dim=0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[0], sample.embed(net, torch.tensor([[5]]))[0])
    assert got.norm(dim=1).tolist() == pytest.approx([1, 1, 1])


def test_the_files_of_a_folder_are_passages(runs, tmp_path, capsys):
    for name, text in (("a.txt", b"open a file"), ("sub/b.txt", b"close a window"), (".hidden", b"no"), ("empty", b"")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    out = say(capsys, "--out_dir", "out/contrastive", "--corpus", str(tmp_path))
    assert [os.path.basename(line.split("\t")[1]) for line in out.splitlines()] == ["a.txt", "b.txt"]
    out = say(capsys, "--out_dir", "out/contrastive", "--corpus", str(tmp_path), "--query", "open a file")
    assert out.index("a.txt") < out.index("b.txt") and "similarity 1.000" in out


def test_the_bound_of_an_untrained_model_is_8_bits_a_byte():
    torch.manual_seed(0)
    net = sample.build(train.get_config([*TINY]))[0]
    bits, error = sample.score_bound(net, ids(70)[0].byte(), 32, 1)
    assert bits / 70 == pytest.approx(8.0, abs=1e-5) and error < 1e-3


def test_the_standard_error_of_a_bound_is_what_its_estimates_scatter():
    net, x = randomized().requires_grad_(False), ids(3 * T)[0].clamp(max=255).byte()
    each = [sample.score_bound(net, x, T, seed) for seed in range(60)]
    scatter = torch.tensor([bits for bits, _ in each]).std()
    assert 0.6 < scatter / torch.tensor([error for _, error in each]).mean() < 1.6


def test_a_run_with_document_masks_is_scored_with_them(runs, capsys, monkeypatch):
    given, plain = [], sample.score
    monkeypatch.setattr(sample, "score", lambda *a: given.append(a[-1]) or plain(*a))
    ckpt = train.load_checkpoint("out/clm")
    torch.save(ckpt | {"config": ckpt["config"] | {"doc_mask": True}}, "masked.pt")
    for path in ("out/clm", "masked.pt"):
        say(capsys, "--out_dir", path, "--score", "short.txt")
    assert given == [False, True]


@pytest.mark.parametrize("name", ["clm", "prefix", "mtp", "fim", "hybrid", "mdlm", "mlm"])
def test_score_prints_bits_per_byte_beside_compressors(name, runs, capsys):
    out = say(capsys, "--out_dir", f"out/{name}", "--score", "short.txt", *([] if name in ("mlm", "mdlm") else ["--stride", "32"]))
    bits = float(out.split(": ")[1].split()[0])
    assert 2 < bits < 9.5 and "lzma" in out and "nats" in out
    assert ("at most" in out, "pseudo" in out) == (name == "mdlm", name in ("mlm", "hybrid"))


BAD = {
    "a flag that is not there": (["--temprature", "1"], "temprature"),
    "a temperature below 0": (["--temperature", "-1"], "--temperature"),
    "top_p above 1": (["--top_p", "2"], "--top_p"),
    "no sample": (["--num_samples", "0"], "--num_samples"),
    "no run": (["--out_dir", "nowhere"], "no checkpoint"),
    "no checkpoint": (["--out_dir", "text.txt"], "not a checkpoint"),
    "an objective that was not trained": (["--out_dir", "out/clm", "--objective", "mlm"], "Try --objective clm"),
    "score without a likelihood": (["--out_dir", "out/bart", "--score", "text.txt"], "clm prefix"),
    "score of nothing": (["--out_dir", "out/clm", "--score", "nothing.txt"], "nothing.txt"),
    "a stride beyond the block": (["--out_dir", "out/clm", "--score", "text.txt", "--stride", "33"], "--stride 32"),
    "nothing to fill": (["--out_dir", "out/mlm", "--prompt", "no hole"], "[MASK]"),
    "an unknown order": (["--out_dir", "out/mlm", "--order", "sideways"], "parallel"),
    "a stride where there is none": (["--out_dir", "out/mdlm", "--score", "text.txt", "--stride", "8"], "as a whole"),
    "a stride without a score": (["--out_dir", "out/clm", "--stride", "8"], "--score"),
    "a score with a prompt": (["--out_dir", "out/clm", "--score", "text.txt", "--prompt", "x"], "without --score"),
    "a score of no name": (["--out_dir", "out/clm", "--score", ""], "no such file"),
    "bytes to write into holes": (["--out_dir", "out/mdlm", "--prompt", "[MASK]", "--max_new_tokens", "3"], "by mdlm here"),
    "a marker without a text": (["--out_dir", "out/mlm", "--hole", "_"], "--prompt"),
    "an embedding and a search": (["--out_dir", "out/contrastive", "--prompt", "x", "--query", "y"], "without --query"),
    "a corpus with a NUL in its name": (["--out_dir", "out/contrastive", "--corpus", "a\0b"], "cannot be read"),
    "passes of a parallel fill": (["--out_dir", "out/mlm", "--order", "parallel", "--steps", "3"], "--order confident"),
    "a text and its sides": (["--out_dir", "out/fim", "--prompt", "a<extra_id_0>", "--prefix", "b"], "without --prefix"),
    "too many holes": (["--out_dir", "out/span", "--prompt", "<extra_id_0>" * 250], "250 holes"),
    "a flag of another objective": (["--out_dir", "out/clm", "--suffix", "x"], "fim nsp"),
    "no hole for span": (["--out_dir", "out/span", "--prompt", "no hole"], "<extra_id_0>"),
    "no hole for ul2 in mode R": (["--out_dir", "out/ul2", "--prompt", "no hole", "--mode", "R"], "<extra_id_0>"),
    "an order where there is no hole": (["--out_dir", "out/hybrid", "--prompt", "x", "--order", "left"], "--order"),
    "an unknown mode": (["--out_dir", "out/ul2", "--mode", "Q"], "R, S or X"),
    "two holes for fim": (["--out_dir", "out/fim", "--prompt", "<extra_id_0><extra_id_1>"], "2 holes"),
    "a text too long for its block": (["--out_dir", "out/span", "--prompt", "x" * 99 + "<extra_id_0>"], "shorter text"),
    "a corpus that is not there": (["--out_dir", "out/contrastive", "--corpus", "nowhere"], "--corpus nowhere"),
    "an empty corpus": (["--out_dir", "out/contrastive", "--corpus", "blank.txt"], "no line"),
    "an empty score": (["--out_dir", "out/clm", "--score", "void.txt"], "is empty"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case, runs, capsys):
    flags, hint = BAD[case]
    with pytest.raises(SystemExit) as e:
        sample.main(flags)
    out, err = capsys.readouterr()
    assert e.value.code == 2 and err.count("\n") == 1 and hint in err and not out
