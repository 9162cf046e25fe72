import pytest
import torch

from experiments import bench
from run import get_config

SMALL = ["--n_layer", "1", "--n_head", "2", "--n_embd", "16", "--block_size", "64", "--batch_size", "4",
         "--repeats", "1", "--steps", "1", "--new", "8", "--ngram_rows", "64", "--device", "cpu", "--dtype", "float32"]


def test_a_short_run_prints_every_part(capsys):
    bench.main([*SMALL, "--objectives", "clm,ul2,electra"])
    out = capsys.readouterr().out
    for word in ("GEMM probe", "positions/s", "of GEMM", "decoding", "plain", "ul2", "electra"):
        assert word in out, word
    assert "nanoGPT" not in out


def test_all_objectives_are_measured_in_rows_of_the_first(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(bench, "make_step", lambda hp: seen.append(hp) or (lambda: None))
    monkeypatch.setattr(bench, "interleave", lambda sides, *rest: dict.fromkeys(sides, 0.5))
    bench.main([*SMALL, "--parts", "train", "--objectives", "clm,rotation,contrastive", "--accum", "2"])
    assert [(hp.batch_size, hp.block_size, hp.accum) for hp in seen] == [(4, 64, 2)] * 3
    assert capsys.readouterr().out.count(" 1024 ") == 3, "4 * 2 rows of 64 positions in half a second"
    seen.clear()
    bench.main(["--parts", "train", "--objectives", "clm,rotation", "--repeats", "1", "--steps", "1", "--n_embd", "16"])
    assert len({(hp.batch_size, hp.block_size) for hp in seen}) == 1, "rotation's own rows are shorter"


# ---- FLOPs: of a product (m, k) x (k, n) forward 2 m k n, and backward as many for each of its factors

def products(rows, C, T, layers=1):  # of blocks of width C: 12 C^2 weights a position, T keys a query
    return 6 * rows * T * 12 * C * C * layers + 6 * rows * T * T * 2 * C * layers


def settings(name, T, C=8, *more):
    sizes = ["--n_layer", "1", "--n_head", "1", "--n_embd", str(C), "--block_size", str(T)]
    own = ["--objective", name, "--batch_size", "4", "--device", "cpu", "--dtype", "float32", *more]
    return get_config([*sizes, "--ngram_rows", "0", *own])


def count(name, C, T=40, *more):
    return bench.count_flops(settings(name, T, C, *more))


@pytest.mark.parametrize("name, T, told", [("clm", 40, 40), ("mlm", 40, 12), ("clm", 32, 32), ("mlm", 32, 10)])
def test_flops_are_counted_as_by_hand(name, T, told):
    """What the mask hides is computed all the same: a causal row's blocks cost what a bidirectional one's do. Logits
    are computed where there is a target."""
    for C in (2, 16):
        assert count(name, C, T, "--n_layer", "3") == products(4, C, T, 3) + 6 * 4 * told * C * 256


def test_ngrams_cost_the_product_that_joins_them():
    """Looking them up costs none; their width does not depend on the model's."""
    assert count("clm", 8, 40, "--ngram_rows", "16") == count("clm", 8) + 6 * 4 * 40 * 4 * 32 * 8


def test_the_first_half_of_a_long_causal_row_skips_the_keys_of_the_second():
    """The queries of other rows meet all keys."""
    hidden = 80 * 80
    assert count("clm", 8, 160) == count("prefix", 8, 160, "--prefix_max", "0.001") - 6 * 4 * hidden * 2 * 8


@pytest.mark.parametrize("name", ["clm", "mlm", "prefix"])
def test_on_a_gpu_every_position_has_logits_and_counting_computes_nothing(name):
    """As on a GPU, where FlexAttention refuses the counter's mode."""
    hp = settings(name, 40)
    hp.device = "cuda"
    assert bench.count_flops(hp) == products(4, 8, 40) + 6 * 4 * 40 * 8 * 256


def test_each_member_of_a_mixture_is_counted():
    assert count("clm:.5,mlm:.5", 8) == products(4, 8, 40) + 6 * 2 * (40 + 12) * 8 * 256


@pytest.mark.parametrize("n", [1, 4])
def test_future_heads_cost_their_maps_and_their_logits(n):
    far = 6 * 4 * 40 * (8 * 8 + 8 * 256)
    assert count("mtp", 8, 40, "--mtp_heads", str(n)) == count("clm", 8) + (n - 1) * far


@pytest.mark.parametrize("C", [4, 16])
def test_a_generator_costs_its_blocks_and_its_logits_at_the_masks(C):
    """Of 40 bytes 6 are masked; the discriminator reads one number off each position."""
    found = count("electra", 16, 40, "--gen_scale", str(C / 16))
    assert found == products(4, 16, 40) + 6 * 4 * 40 * 16 + products(4, C, 40) + 6 * 4 * 6 * C * 256


# ---- the other parts

@pytest.mark.parametrize("flags, hint", [
    (["--parts", "fly"], "train,decode"), (["--parts", "loss", "--data", "nowhere"], "nowhere"),
    (["--objectives", "mml"], "clm"), (["--nanogpt", "nowhere"], "model.py"),
    (["--objective", "mlm"], "itself"), (["--repeat", "2"], "--repeats"), (["--n_layr", "2"], "--n_layer"),
    (["--parts", "loss", "--data", "a", "b"], "one file"),
    (["--parts", "loss", "--objectives", "mlm"], "--objectives clm"),
    (["--new", "0"], "--new 0"), (["--repeats", "0"], "--repeats 0"), (["--steps", "-1"], "--steps -1"),
    (["--parts", "loss", "--data", __file__, "--block_size", "20000"], "--block_size")])
def test_bad_flags_are_one_line(flags, hint, capsys):
    with pytest.raises(SystemExit) as e:
        bench.main([*SMALL, *flags])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and hint in err


PEER = """
import torch
class GPTConfig:
    def __init__(self, **sizes):
        self.vocab_size = sizes["vocab_size"]
class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        table = torch.nn.Embedding(config.vocab_size, config.vocab_size)
        self.transformer = torch.nn.ModuleDict({"wte": table})
    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), learning_rate, betas)
    def forward(self, x, y):
        logits = self.transformer.wte(x)
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    def generate(self, x, n, temperature):
        return torch.cat((x, x[:, :1].expand(-1, n)), 1)
"""


def test_a_peer_is_measured_beside(text, tmp_path, capsys):
    (tmp_path / "model.py").write_text(PEER)
    bench.main([*SMALL, "--parts", "train,decode,loss", "--objectives", "clm", "--optimizer", "adamw",
                "--data", text, "--nanogpt", str(tmp_path), "--max_iters", "2", "--peer_iters", "30"])
    out = capsys.readouterr().out
    assert out.count("to nanoGPT") == 2 and "30 steps without evaluation" in out and "clm, muon" in out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_training_and_decoding_are_timed_on_a_gpu(capsys):
    sizes = ["--n_layer", "2", "--n_head", "4", "--n_embd", "64", "--block_size", "64", "--batch_size", "4"]
    fast = ["--compile", "--cuda_graph", "--repeats", "1", "--steps", "1", "--new", "8", "--device", "cuda"]
    bench.main(["--objectives", "clm,prefix", *sizes, *fast])
    said = capsys.readouterr()
    assert "prefix both" in said.out and "\ncompiled" in said.out
    assert "does not work here" not in said.out + said.err
