import argparse

import pytest
import torch

import bench

SMALL = ["--n_layer", "1", "--n_head", "2", "--n_embd", "16", "--block_size", "64", "--batch_size", "4", "--repeats", "1", "--steps", "1", "--new", "8",
         "--device", "cpu", "--dtype", "float32"]


def test_a_short_run_prints_every_part(capsys):
    bench.main([*SMALL, "--objectives", "clm,ul2,electra"])
    out = capsys.readouterr().out
    for word in ("GEMM probe", "positions/s", "batch, ms", "decoding", "plain", "electra", "kept for backward"):
        assert word in out, word
    assert "nanoGPT" not in out


def test_flops_are_counted_for_each_mask():
    """One layer of width 2, T = 4, V = 512: 72 * 4 a position for the block's matrices, 6 * 512 * 2 for the head, 24 for each
    pair that sees each other: 10 of a causal row, 16 of a bidirectional one, 10 + 3 with a prefix of 3."""
    hp = argparse.Namespace(n_layer=1, n_head=1, n_embd=2, mtp_heads=3)
    count = lambda mask, name="clm": bench.step_flops(name, dict(inp=torch.zeros(2, 4), mask=mask), hp)
    base = 8 * (72 * 4 + 6 * 512 * 2)
    assert count("causal") == base + 24 * 20 and count("bidirectional") == base + 24 * 32
    assert count(torch.tensor([3, 0])) == base + 24 * 23 and count(torch.tensor([4, 0])) == base + 24 * 26
    assert count("causal", "mtp") == base + 24 * 20 + 8 * 2 * 6 * (512 * 2 + 4)


def test_the_loss_part_trains(text, capsys):
    bench.main([*SMALL, "--parts", "loss", "--data", text, "--max_iters", "2"])
    assert "median" in capsys.readouterr().out


@pytest.mark.parametrize("flags, hint", [(["--parts", "fly"], "train,batch,decode"), (["--parts", "loss"], "--data"),
                                         (["--objectives", "mml"], "clm"), (["--nanogpt", "nowhere"], "model.py"),
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
        self.transformer = torch.nn.ModuleDict({"wte": torch.nn.Embedding(config.vocab_size, config.vocab_size)})
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
    bench.main([*SMALL, "--parts", "train,decode,loss", "--objectives", "clm", "--optimizer", "adamw", "--nanogpt", str(tmp_path), "--data", text,
                "--max_iters", "2", "--peer_iters", "30"])
    out = capsys.readouterr().out
    assert out.count("to nanoGPT") == 2 and "30 steps without evaluation" in out and "clm, muon" in out
