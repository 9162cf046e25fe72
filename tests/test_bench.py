import argparse

import pytest
import torch

import bench

SMALL = ["--n_layer", "1", "--n_head", "2", "--n_embd", "16", "--block_size", "64", "--batch_size", "4", "--repeats", "1", "--steps", "1", "--new", "8",
         "--device", "cpu", "--dtype", "float32"]


def test_a_short_run_prints_every_part(capsys):
    bench.main([*SMALL, "--objectives", "clm,ul2,electra"])
    out = capsys.readouterr().out
    for word in ("GEMM probe", "positions/s", "making a batch", "decoding", "plain", "electra", "kept for backward"):
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
                                         (["--objectives", "mml"], "clm"), (["--nanogpt", "nowhere"], "model.py")])
def test_bad_flags_are_one_line(flags, hint, capsys):
    with pytest.raises(SystemExit) as e:
        bench.main([*SMALL, *flags])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and hint in err
