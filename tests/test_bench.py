import pytest

import bench
from model import Sizes

SMALL = ["--n_layer", "1", "--n_head", "2", "--n_embd", "16", "--block_size", "64", "--batch_size", "4", "--repeats", "1", "--steps", "1", "--new", "8",
         "--device", "cpu", "--dtype", "float32"]


def test_a_short_run_prints_every_part(capsys):
    bench.main([*SMALL, "--objectives", "clm,ul2,electra"])
    out = capsys.readouterr().out
    for word in ("GEMM probe", "positions/s", "making a batch", "decoding", "plain", "electra"):
        assert word in out, word
    assert "nanoGPT" not in out


def test_flops_are_counted_for_each_mask():
    """One layer of width 2, V = 8, T = 4: 6 * (12 * 4 + 16) for the weights, 12 * 2 * pairs / 4 for attention."""
    sizes = Sizes(1, 1, 2, 8)
    assert [bench.flops_per_position(sizes, 4, mask) for mask in ("causal", "bidirectional", "prefix")] == [384 + 60, 384 + 96, 384 + 78]


@pytest.mark.parametrize("flags, hint", [(["--parts", "fly"], "train,batch,decode"), (["--objectives", "mml"], "clm"), (["--nanogpt", "nowhere"], "model.py")])
def test_bad_flags_are_one_line(flags, hint, capsys):
    with pytest.raises(SystemExit) as e:
        bench.main([*SMALL, *flags])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and hint in err
