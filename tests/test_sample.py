import math
import os

import pytest
import torch
from conftest import TINY, randomized

import sample
import train
from data import EOT, MASK, generator
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


@pytest.mark.parametrize("n", [1, 4, T])
def test_the_cache_changes_nothing_for_a_prefix_which_ends_with_the_block(n):
    net, x = randomized(), ids(n, 2)
    with_cache, without = (text_of(net, x, 30, T, sample.sample_generators(1, 2), mask="prefix", cached=c) for c in (True, False))
    assert torch.equal(with_cache, without) and with_cache.shape == (2, T - n + 1)


def test_a_full_context_is_cut_to_its_last_half():
    net, x = randomized(), ids(T)
    out = text_of(net, x, 2, T, [None], **GREEDY)
    row = torch.cat((x, out), 1)
    argmax = lambda context: int(net.logits(net(context, "causal")[:, -1])[0, :256].argmax())
    assert [argmax(row[:, :T]), argmax(row[:, 1 + T // 2:T + 1])] == out[0].tolist()


def test_the_prompt_of_a_prefix_model_is_read_both_ways():
    net, x = randomized(), ids(6)
    first = text_of(net, x, 1, T, [None], mask="prefix", **GREEDY)
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
    net = randomized()
    net.logits = lambda h: torch.nn.functional.one_hot(torch.full(h.shape[:-1], EOT), 512) * 100.0
    assert text_of(net, ids(3, 2), 9, T, sample.sample_generators(1, 2)).tolist() == [[EOT], [EOT]]


# ---- filling

@pytest.mark.parametrize("order", ["parallel", "confident"])
def test_filling_leaves_no_mask_and_touches_nothing_else(order):
    net, x = randomized(), ids(T, 3)
    x[0, 2:5], x[1, 7], x[2, :] = MASK, MASK, MASK
    out = sample.fill(net, x, sample.sample_generators(1, 3), order)
    assert (out[x == MASK] < 256).all() and torch.equal(out[x != MASK], x[x != MASK])


def test_parallel_is_one_pass_and_confident_the_surest_byte_first():
    net, x = randomized().requires_grad_(False), ids(T)
    x[0, [2, 6, 9]] = MASK
    p, best = net.logits(net(x, "bidirectional"))[0, :, :256].softmax(-1).max(-1)
    parallel = sample.fill(net, x, [None], "parallel", **GREEDY)
    assert parallel[0, [2, 6, 9]].tolist() == best[[2, 6, 9]].tolist()
    want = x.clone()
    while (want == MASK).any():
        p, best = net.logits(net(want, "bidirectional"))[0, :, :256].softmax(-1).max(-1)
        at = max((i for i in range(T) if want[0, i] == MASK), key=lambda i: float(p[i]))
        want[0, at] = best[at]
    assert torch.equal(sample.fill(net, x, [None], "confident", **GREEDY), want)


def test_only_the_marker_is_special():
    assert sample.parse_holes(b"a[MASK]b[MASK:3]", b"") == [97, MASK, 98, MASK, MASK, MASK]
    assert sample.parse_holes(b"<MASK> [MASK:x] [mask]", b"") == list(b"<MASK> [MASK:x] [mask]")
    assert sample.parse_holes(b"a__[MASK]", b"_") == [97, MASK, MASK, *b"[MASK]"]


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
    for name in [*OBJECTIVES, "clm:.5,mlm:.5"]:
        assert train.main([*TINY, "--data", "text.txt", "--objective", name, "--max_iters", "2"]) == 0
    os.chdir(here)
    return path


@pytest.fixture
def runs(place, monkeypatch):
    monkeypatch.chdir(place)


def say(capsys, *flags):
    capsys.readouterr()
    assert not sample.main([*flags])
    return capsys.readouterr().out


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_run_shows_itself(name, runs, capsys):
    out = say(capsys, "--out_dir", f"out/{name}")
    assert "---" in out and len(out) > 60
    assert out == say(capsys, "--out_dir", f"out/{name}"), "the same seed, the same text"


def test_without_a_folder_the_newest_run_is_used(runs, capsys):
    os.utime("out/mlm/ckpt.pt")
    assert "masked" in say(capsys)


PROMPTS = {"empty": "", "long": "x" * 500, "not UTF-8": os.fsdecode(b"\xff\xfe\x80"), "NUL": "a\0b", "look-alike": "<MASK><extra_id_0>", "emoji": "🙂"}


@pytest.mark.parametrize("name", ["clm", "prefix"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_any_prompt_can_be_continued(name, prompt, runs, capsys):
    for extra in ([], ["--num_samples", "2"], ["--max_new_tokens", "0"], ["--top_k", "100000", "--top_p", ".9", "--temperature", "0"]):
        out = say(capsys, "--out_dir", f"out/{name}", "--prompt", PROMPTS[prompt], "--max_new_tokens", "40", *extra)
        assert prompt not in ("long", "look-alike", "emoji") or PROMPTS[prompt][-16:] in out


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


def test_a_hole_may_have_another_marker(runs, capsys):
    assert "[MASK]" in say(capsys, "--out_dir", "out/mlm", "--prompt", "a__b[MASK]", "--hole", "__")


def test_a_mixture_does_what_its_members_do(runs, capsys):
    folder = "out/clm_.5+mlm_.5"
    assert say(capsys, "--out_dir", folder, "--prompt", "import ").startswith("import ")
    assert "a" in say(capsys, "--out_dir", folder, "--objective", "mlm", "--prompt", "a[MASK]")


@pytest.mark.parametrize("name", ["clm", "prefix"])
def test_score_prints_bits_per_byte_beside_compressors(name, runs, capsys):
    out = say(capsys, "--out_dir", f"out/{name}", "--score", "text.txt", "--stride", "32")
    bits = float(out.split(": ")[1].split()[0])
    assert 2 < bits < 9.5 and "lzma" in out and "nats" in out


BAD = {
    "a flag that is not there": (["--temprature", "1"], "temprature"),
    "a temperature below 0": (["--temperature", "-1"], "--temperature"),
    "top_p above 1": (["--top_p", "2"], "--top_p"),
    "no sample": (["--num_samples", "0"], "--num_samples"),
    "no run": (["--out_dir", "nowhere"], "no checkpoint"),
    "no checkpoint": (["--out_dir", "text.txt"], "not a checkpoint"),
    "an objective that was not trained": (["--out_dir", "out/clm", "--objective", "mlm"], "Try --objective clm"),
    "score under mlm": (["--out_dir", "out/mlm", "--score", "text.txt"], "clm or prefix"),
    "score of nothing": (["--out_dir", "out/clm", "--score", "nothing.txt"], "nothing.txt"),
    "a stride beyond the block": (["--out_dir", "out/clm", "--score", "text.txt", "--stride", "33"], "--stride 32"),
    "nothing to fill": (["--out_dir", "out/mlm", "--prompt", "no hole"], "[MASK]"),
    "an unknown order": (["--out_dir", "out/mlm", "--order", "sideways"], "parallel"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case, runs, capsys):
    flags, hint = BAD[case]
    with pytest.raises(SystemExit) as e:
        sample.main(flags)
    out, err = capsys.readouterr()
    assert e.value.code == 2 and err.count("\n") == 1 and hint in err and not out
