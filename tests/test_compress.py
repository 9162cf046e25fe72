import os
import struct
from pathlib import Path

import pytest
import torch
from conftest import tiny, randomized

import train
from data import make_rng, to_bytes
from experiments import compress

T = 32
MODEL = randomized(n_outputs=256).eval().requires_grad_(False)
RANDOM = to_bytes(torch.randint(0, 256, (900,), generator=make_rng("random")).byte())
CODE = Path(compress.__file__).read_bytes()


@pytest.mark.parametrize("text", [b"", b"a", b"\0\0\0\0", RANDOM, CODE[:277], CODE[:1601]],
                         ids=["empty", "one byte", "NULs", "random", "two streams", "16 streams"])
def test_a_text_is_restored(text, monkeypatch):
    monkeypatch.setattr(compress, "STREAM_BYTES", 100)
    assert compress.decompress(MODEL, compress.compress(MODEL, text, T), T) == text


def test_the_file_is_as_short_as_the_probabilities_promise():
    """Except for the rounding of frequencies, and at most 50 bytes of header and state."""
    x = torch.tensor([0, *CODE[:500]])[None]
    logp = MODEL.logits(MODEL(x[:, :-1]))[0].double().log_softmax(-1)
    want = -float(logp.gather(1, x[0, 1:, None]).sum()) / torch.log(torch.tensor(2.0)) / 8
    assert want - 1 < len(compress.compress(MODEL, CODE[:500], 1000)) < want * 1.01 + 50


@pytest.mark.parametrize("first, second", [(1, 2), (2, 1)])
def test_a_text_is_restored_whatever_the_number_of_threads(first, second):
    model = randomized(n_embd=256, n_outputs=256).eval().requires_grad_(False)      # rounds differently with 1 and 2
    torch.set_num_threads(first)
    blob = compress.compress(model, CODE[:12], T)
    torch.set_num_threads(second)
    assert compress.decompress(model, blob, T) == CODE[:12]


def test_damage_another_model_and_an_older_format_are_found(monkeypatch):
    blob = compress.compress(MODEL, CODE[:80], T)
    damaged = [b"", blob[:-1], blob[:-2]]
    for i in (0, 5, 12, 17, 20, 25, 40, len(blob) - 1):         # flip a bit in every part of the file
        damaged.append(blob[:i] + bytes([blob[i] ^ 2]) + blob[i + 1:])
    for bad in damaged:
        with pytest.raises((ValueError, struct.error)):
            compress.decompress(MODEL, bad, T)
    with pytest.raises(ValueError, match="another model"):
        compress.decompress(randomized(seed=1, n_outputs=256), blob, T)
    with pytest.raises(ValueError, match="version of the program"):
        compress.decompress(MODEL, b"nPTX" + blob[4:], T)
    monkeypatch.setattr(MODEL, "logits", lambda h: torch.zeros(len(h), 256))        # other probabilities
    with pytest.raises(ValueError, match="damaged, or the model rounds differently.*machine.*device.*version of torch"):
        compress.decompress(MODEL, blob, T)


@pytest.mark.parametrize("flags", [["clm"], ["mlm,clm"], ["clm", "--doc_mask"], ["mlm"]])
def test_the_program_restores_a_file_or_refuses_the_run(flags, text, tmp_path, refuses):
    train.main(tiny("--data", text, "--objective", *flags, "--max_iters", "1", "--out_dir", "run"), False)
    if flags == ["mlm"]:
        refuses("left-to-right", compress.main, ["--out_dir", "run", "--file", text])
        assert not os.path.exists(text + ".nptx")
        return
    good = tmp_path / "good.txt"
    good.write_bytes(CODE[:200])
    compress.main(["--out_dir", "run", "--file", "good.txt"])
    refuses("exists", compress.main, ["--out_dir", "run", "--file", "good.txt.nptx"])
    good.unlink()
    compress.main(["--out_dir", "run", "--file", "good.txt.nptx"])
    assert good.read_bytes() == CODE[:200]
