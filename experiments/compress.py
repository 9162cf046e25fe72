"""Compress a file with a trained model's left-to-right probabilities: prediction is compression.

    python -m experiments.compress --out_dir out/clm --file book.txt            writes book.txt.nptx
    python -m experiments.compress --out_dir out/clm --file book.txt.nptx       writes book.txt again

Bits per byte promise a file of that size; this program writes it and restores the text. Both directions need the same
weights and a machine that computes the same bits: the file holds a checksum of the text and one of the weights.

S streams, parts of the text that are coded at the same time; T = block_size positions of the model
"""
import os
import struct
import zlib

from data import EOT, Flag, compressor_bits, fail, from_bytes, to_bytes
from experiments.flags import parse_own_flags
from model import Cache
from objectives import N_BYTES, find_use, get_members
from run import DEVICE_FLAGS, load_run, newest_run, run_program
import torch
import torch.nn.functional as F

FLAGS = {
    "file": Flag("", "file to compress; one that ends in .nptx is decompressed"),
    "out_dir": Flag("", "run folder or checkpoint file of the model; without it the latest run under out/"),
    "device": DEVICE_FLAGS["device"],
}
PRECISION = 16                                  # the frequencies of all bytes add up to 2^PRECISION
STREAMS = 64                                    # at most
STREAM_BYTES = 4096                             # of a stream at least: each starts without context
HEADER = "<4sIIQI"                              # b"nPTX", checksums of text and weights, bytes, streams


@torch.inference_mode()
def byte_frequencies(model, S, T):  # a coroutine: is sent the last bytes (S,), yields frequencies of the next (S, 256)
    """Compression and decompression both run it, one byte of each stream at a time: so both compute the same bits."""
    ids = new = torch.full((S, 1), EOT, device=model.embed.weight.device)
    cache = Cache(model, S, T)
    while True:
        if ids.size(1) > T:                     # a full block's last half is encoded again
            ids = new = ids[:, -(T // 2):]
            cache.length.zero_()
        h = model(new, 0, cache=cache)
        p = model.logits(h[:, -1])[:, :N_BYTES].cpu().double().softmax(-1)              # mps has no float64
        freq = (p * (2 ** PRECISION - N_BYTES)).long() + 1      # at least 1: every byte can be coded
        rest = 2 ** PRECISION - freq.sum(1, keepdim=True)
        byte = yield freq.scatter_add(1, p.argmax(1, keepdim=True), rest)
        new = byte[:, None].to(ids.device)
        ids = torch.cat((ids, new), dim=1)


def weights_checksum(model):  # -> int
    weights = model.state_dict().values()
    return zlib.crc32(b"".join(to_bytes(w.cpu().flatten().view(torch.uint8)) for w in weights))


def compress(model, text, T):  # bytes -> bytes
    """rANS (Duda 2013): a stream is one integer, which absorbs its last byte first and gives off 16-bit words; those of
    all streams stand in the order in which decompress reads them."""
    S = min(STREAMS, max(1, len(text) // STREAM_BYTES))
    frequencies = byte_frequencies(model, S, T)
    freq = next(frequencies)
    symbols = []                                # of each step: frequencies (S,), sums of the frequencies before (S,)
    for byte in F.pad(from_bytes(text).long(), (0, -len(text) % S)).view(S, -1).unbind(1):
        chosen = freq.gather(1, byte[:, None])
        before = freq.cumsum(1).gather(1, byte[:, None]) - chosen
        symbols.append((chosen[:, 0], before[:, 0]))
        freq = frequencies.send(byte)
    state = torch.full((S,), 1 << 31)           # stays in 2^31 .. 2^47
    words = []                                  # the last one first
    for freq, before in reversed(symbols):
        full = state >= freq << 31
        words += (state[full] & 0xFFFF).flip(0).tolist()
        state = state.where(~full, state >> 16)
        state = (state // freq << PRECISION) + state % freq + before
    header = struct.pack(HEADER, b"nPTX", zlib.crc32(text), weights_checksum(model), len(text), S)
    return header + struct.pack(f"<{S}q{len(words)}H", *state.tolist(), *reversed(words))


def decompress(model, blob, T):  # bytes -> bytes
    """Raises ValueError or struct.error where blob is damaged, or the model is not the one that compress used."""
    magic, checksum, weights, n, S = struct.unpack_from(HEADER, blob)
    body = blob[struct.calcsize(HEADER):]
    if magic != b"nPTX" or not 0 < S <= STREAMS:
        raise ValueError("was not compressed by this program")
    numbers = struct.unpack(f"<{S}q{(len(body) - 8 * S) // 2}H", body)
    if weights != weights_checksum(model):
        raise ValueError("was compressed with another model")
    state, words = torch.tensor(numbers).split((S, len(numbers) - S))
    frequencies = byte_frequencies(model, S, T)
    freq = next(frequencies)
    columns = [torch.zeros(S, 0, dtype=torch.long)]
    for _ in range((n + S - 1) // S):
        slot = state & (2 ** PRECISION - 1)
        ends = freq.cumsum(1)
        byte = torch.searchsorted(ends, slot[:, None], right=True)
        chosen = freq.gather(1, byte)[:, 0]
        before = ends.gather(1, byte)[:, 0] - chosen
        state = chosen * (state >> PRECISION) + slot - before
        low = state < 1 << 31
        some, words = words.tensor_split((int(low.sum()),))
        if len(some) < low.sum():
            raise ValueError("is damaged")
        state[low] = state[low] << 16 | some
        columns.append(byte)
        freq = frequencies.send(byte[:, 0])
    text = to_bytes(torch.cat(columns, dim=1).flatten()[:n].byte())
    if zlib.crc32(text) != checksum:
        raise ValueError("is damaged, or was written on a machine on which the model computes other last bits")
    return text


def main(argv=None):  # -> exit code
    flags = parse_own_flags("python -m experiments.compress", __doc__, FLAGS, argv)
    path = flags.file
    unpack = path.endswith(".nptx")
    out = path.removesuffix(".nptx") if unpack else f"{path}.nptx"
    if os.path.exists(out):
        fail(f"--file {path}: would write {out}, which exists. Try to move it away")
    model, hp, _ = load_run(flags.out_dir or newest_run(), flags.device, "float32")
    exact = [m for m in get_members(hp) if m.objective.bpb in ("loss", "causal") and find_use(m.objective, "continue")]
    if not exact:
        fail(f"--out_dir: {hp.objective} has no left-to-right probability. Try a run trained as clm")
    try:
        with open(path, "rb") as f:
            given = f.read()
        result = decompress(model, given, hp.block_size) if unpack else compress(model, given, hp.block_size)
        with open(out, "xb") as f:
            f.write(result)
    except (OSError, ValueError, struct.error) as e:
        fail(f"--file {path}: {e}. Try {'the run and machine that compressed it' if unpack else 'another file'}")
    print(f"{path}: {len(given):,} bytes -> {out}: {len(result):,} bytes")
    if not unpack and given:
        print(f"{8 * len(result) / len(given):.4f} bits per byte; compressors: {compressor_bits(from_bytes(given))}")
    return 0


if __name__ == "__main__":
    run_program(main)
