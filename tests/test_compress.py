import os

import pytest
import torch
from conftest import TINY, randomized

import train
from data import from_bytes, make_rng, to_bytes
from experiments import compress

T = 32


def source_code(n):
    with open(compress.__file__, "rb") as f:
        return (f.read() * 20)[:n]


@pytest.fixture(scope="module")
def model():
    return randomized(n_outputs=256).requires_grad_(False)


RANDOM = to_bytes(torch.randint(0, 256, (900,), generator=make_rng("random")).byte())


@pytest.mark.parametrize("text", [b"", b"a", b"\0\0\0\0", source_code(900), RANDOM],
                         ids=["empty", "one byte", "NULs", "code", "random"])
def test_a_text_comes_back(model, text):
    blob = compress.compress(model, from_bytes(text), T)
    assert to_bytes(compress.decompress(model, blob, T)) == text


@pytest.mark.slow
def test_a_long_text_comes_back(model):
    data = from_bytes(source_code(100_000))
    blob = compress.compress(model, data, T)
    assert torch.equal(compress.decompress(model, blob, T), data)
    changed = bytearray(blob)
    changed[50_000] ^= 1
    with pytest.raises(ValueError):
        compress.decompress(model, bytes(changed), T)


def test_several_streams_come_back(model, monkeypatch):
    monkeypatch.setattr(compress, "STREAM_BYTES", 100)
    for n in (6400, 6401, 277):
        data = from_bytes(source_code(n))
        assert torch.equal(compress.decompress(model, compress.compress(model, data, T), T), data)


def test_the_file_is_as_long_as_the_probabilities_say(model, monkeypatch):
    """Within the rounding of the frequencies and a state for each stream."""
    data = from_bytes(source_code(500))
    x = torch.cat((torch.zeros(1), data)).long()[None]
    logp = model.logits(model(x[:, :-1]))[0].double().log_softmax(-1)
    want = -float(logp.gather(1, x[0, 1:, None]).sum()) / torch.log(torch.tensor(2.0)) / 8
    size = len(compress.compress(model, data, 1000))
    assert want - 1 < size < want * 1.01 + 50


@pytest.mark.parametrize("place", [0, 5, 17, 18, 30, -1])
def test_a_flipped_bit_is_found(model, place):
    blob = bytearray(compress.compress(model, from_bytes(source_code(300)), T))
    blob[place] ^= 4
    with pytest.raises(ValueError):
        compress.decompress(model, bytes(blob), T)


def test_another_model_is_refused(model):
    blob = compress.compress(model, from_bytes(b"some text"), T)
    with pytest.raises(ValueError, match="another model"):
        compress.decompress(randomized(seed=1, n_outputs=256), blob, T)


@pytest.mark.parametrize("objective", ["clm", "mlm,clm"])
def test_the_program_compresses_and_restores_a_file(objective, text, capsys):
    flags = ["--data", text, "--objective", objective, "--max_iters", "2", "--out_dir", "run"]
    assert train.main([*TINY, *flags], with_sample=False) == 0
    with open("good.txt", "wb") as f:
        f.write(source_code(500))
    compress.main(["--out_dir", "run", "--file", "good.txt"])
    with pytest.raises(SystemExit):
        compress.main(["--out_dir", "run", "--file", "good.txt.nptx"])
    assert "exists" in capsys.readouterr().err
    os.rename("good.txt", "kept.txt")
    compress.main(["--out_dir", "run", "--file", "good.txt.nptx"])
    with open("good.txt", "rb") as a, open("kept.txt", "rb") as b:
        assert a.read() == b.read()


def test_a_model_without_a_probability_is_refused(text, capsys):
    train.main([*TINY, "--data", text, "--objective", "mlm", "--max_iters", "1", "--out_dir", "run"], with_sample=False)
    with pytest.raises(SystemExit):
        compress.main(["--out_dir", "run", "--file", text])
    assert "no left-to-right probability" in capsys.readouterr().err


def test_a_model_of_single_documents_is_refused(text, capsys):
    flags = ["--data", text, "--doc_mask", "--max_iters", "1", "--out_dir", "run"]
    train.main([*TINY, *flags], with_sample=False)
    with pytest.raises(SystemExit):
        compress.main(["--out_dir", "run", "--file", text])
    assert "--doc_mask" in capsys.readouterr().err
