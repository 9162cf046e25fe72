"""Compress a file with a trained model's left-to-right probabilities: prediction is compression.

    python -m experiments.compress --out_dir out/clm --file book.txt            writes book.txt.nptx
    python -m experiments.compress --out_dir out/clm --file book.txt.nptx       writes book.txt again

Bits per byte promise a file of that size; this program writes it and restores the text. Both directions need the same
weights and a machine that computes the same bits: the file holds a checksum of the text and one of the weights.

S streams, parts of the text that are coded at the same time; T = block_size positions of the model
"""
import contextlib
import os
import struct
import time
import zlib

# isort: off  data silences a warning of torch's, and so comes before it
from data import EOT, Flag, compressor_bits, error_reason, fail, map_file, to_bytes
from experiments.flags import parse_own_flags
from model import Cache
from objectives import N_BYTES, Continue, get_objective, members_of, trained_use
from run import DEVICE_FLAGS, load_run, newest_run, preserve_torch_state, run_program
import torch
import torch.nn.functional as F

FLAGS = {
    "file": Flag("", "file to compress; one that ends in .nptx is decompressed"),
    "out_dir": Flag("", "run folder or checkpoint file of the model; without it the latest run under out/"),
    "device": DEVICE_FLAGS["device"],
}
SUFFIX = ".nptx"
PRECISION = 16                                  # the frequencies of all bytes add up to 2^PRECISION
STREAMS = 64                                    # at most
STREAM_BYTES = 4096                             # of a stream at least: each starts without context
HEADER = "<4sIIQI"                              # b"nPTX", checksums of text and weights, bytes, streams


@torch.inference_mode()
def byte_frequencies(model, S, T):  # a coroutine: is sent the last bytes (S,), yields frequencies of the next (S, 256)
    """Compression and decompression both run it, one byte of each stream at a time: so both compute the same bits."""
    ids = torch.full((S, 1), EOT, device=model.embed.weight.device)
    cache = Cache(model, S, T)
    while True:
        if ids.size(1) > T:                     # a full block's last half is encoded again
            ids = ids[:, -(T // 2):]
            cache.rewind(cache.length)
        h = model(ids[:, cache.length:], 0, cache=cache)
        p = model.logits(h[:, -1])[:, :N_BYTES].cpu().double().softmax(-1)              # mps has no float64
        freq = (p * (2 ** PRECISION - N_BYTES)).long() + 1      # at least 1: every byte can be coded
        rest = 2 ** PRECISION - freq.sum(1, keepdim=True)
        byte = yield freq.scatter_add(1, p.argmax(1, keepdim=True), rest)
        ids = torch.cat((ids, byte[:, None].to(ids.device)), dim=1)


def text_checksum(data):  # (n,) uint8 -> int
    return zlib.crc32(to_bytes(data))


def weights_checksum(model):  # -> int
    crc = 0
    for weight in model.state_dict().values():
        crc = zlib.crc32(to_bytes(weight.cpu().flatten().view(torch.uint8)), crc)
    return crc


def compress(model, data, T):  # (n,) uint8 -> bytes
    """rANS (Duda 2013): a stream is one integer, which absorbs its last byte first and gives off 16-bit words."""
    S = min(STREAMS, max(1, len(data) // STREAM_BYTES))
    header = struct.pack(HEADER, b"nPTX", text_checksum(data), weights_checksum(model), len(data), S)
    rows = F.pad(data.long(), (0, -len(data) % S)).view(S, -1)
    frequencies = byte_frequencies(model, S, T)
    freq = next(frequencies)
    symbols = []                                # of each step: frequencies (S,), sums of the frequencies before (S,)
    for byte in rows.unbind(1):
        chosen = freq.gather(1, byte[:, None])
        before = freq.cumsum(1).gather(1, byte[:, None]) - chosen
        symbols.append((chosen[:, 0], before[:, 0]))
        freq = frequencies.send(byte)
    state = torch.full((S,), 1 << 31)           # stays in 2^31 .. 2^47
    words = [[] for _ in range(S)]
    for freq, before in reversed(symbols):
        full = state >= freq << 31
        for s in full.nonzero()[:, 0].tolist():
            words[s].append(int(state[s]) & 0xFFFF)
        state = state.where(~full, state >> 16)
        state = (state // freq << PRECISION) + state % freq + before
    parts = [header, struct.pack(f"<{S}I", *map(len, words)), struct.pack(f"<{S}Q", *state.tolist())]
    parts += [struct.pack(f"<{len(w)}H", *reversed(w)) for w in words]
    return b"".join(parts)


def read_streams(blob):  # -> checksums of text and weights, n, states (S,), words (S, W)
    """Raises ValueError where blob is damaged or was not written by compress."""
    try:
        magic, text, weights, n, S = struct.unpack_from(HEADER, blob)
        lengths = struct.unpack_from(f"<{S}I", blob, struct.calcsize(HEADER))
        states = struct.unpack_from(f"<{S}Q", blob, struct.calcsize(HEADER) + 4 * S)
        flat = struct.unpack(f"<{sum(lengths)}H", blob[struct.calcsize(HEADER) + 12 * S:])
    except struct.error:
        raise ValueError("is damaged") from None
    if magic != b"nPTX" or not 0 < S <= STREAMS or max(states) >= 1 << 47:
        raise ValueError("is damaged")
    if n > S * (16 * max(lengths) + 47) * 2 ** (PRECISION - 8):                     # a byte costs at least 2^-8 bits
        raise ValueError("is damaged")
    words = torch.zeros(S, max(lengths) + 1, dtype=torch.long)
    for s, some in enumerate(torch.tensor(flat, dtype=torch.long).split(lengths)):
        words[s, :len(some)] = some
    return text, weights, n, torch.tensor(states), words


def decompress(model, blob, T):  # bytes -> (n,) uint8
    """Raises ValueError where blob is damaged, or the model is not the one that compress used."""
    text, weights, n, state, words = read_streams(blob)
    if weights != weights_checksum(model):
        raise ValueError("was compressed with another model")
    S = len(state)
    position = torch.zeros(S, 1, dtype=torch.long)
    frequencies = byte_frequencies(model, S, T)
    freq = next(frequencies)
    rows = []
    for _ in range((n + S - 1) // S):
        slot = state & (2 ** PRECISION - 1)
        ends = freq.cumsum(1)
        byte = torch.searchsorted(ends, slot[:, None], right=True)
        chosen = freq.gather(1, byte)[:, 0]
        before = ends.gather(1, byte)[:, 0] - chosen
        state = chosen * (state >> PRECISION) + slot - before
        low = state < 1 << 31
        state = torch.where(low, state << 16 | words.gather(1, position)[:, 0], state)
        position = (position + low[:, None]).clamp(max=words.size(1) - 1)
        rows.append(byte[:, 0])
        freq = frequencies.send(byte[:, 0])
    data = torch.stack(rows, dim=1).flatten()[:n].byte() if rows else torch.empty(0, dtype=torch.uint8)
    if text_checksum(data) != text:
        raise ValueError("is damaged, or was written on a machine on which the model computes other last bits")
    return data


@preserve_torch_state()
def main(argv=None):
    flags = parse_own_flags("python -m experiments.compress", __doc__, FLAGS, argv)
    path = flags.file
    unpack = path.endswith(SUFFIX)
    out = path.removesuffix(SUFFIX) if unpack else path + SUFFIX
    if not path:
        fail("--file: is missing. Try --file book.txt")
    if os.path.exists(out):
        fail(f"--file {path}: would write {out}, which exists. Try to move it away")
    model, hp, _ = load_run(flags.out_dir or newest_run(), flags.device, "float32")
    members = [objective for _, objective in members_of(get_objective(hp))]
    if not any(m.bpb in ("loss", "causal") and trained_use(m, Continue, hp) for m in members):
        fail(f"--out_dir: {hp.objective} gives a text no left-to-right probability. Try a run trained as clm")
    if hp.doc_mask:                             # byte_frequencies attends to all documents
        fail("--out_dir: was trained with --doc_mask. Try a run without it")
    begin = time.perf_counter()
    data = map_file(path, "--file")
    try:
        with open(out + ".tmp", "wb") as f:     # opened first: work that cannot be written is not begun
            if unpack:
                result = to_bytes(decompress(model, to_bytes(data), hp.block_size))
            else:
                result = compress(model, data, hp.block_size)
            f.write(result)
        os.replace(out + ".tmp", out)
    except ValueError as e:
        fail(f"--file {path}: {e}. Try the run and the machine that compressed it")
    except OSError as e:
        fail(f"--file {path}: {out} cannot be written ({error_reason(e)}). Try another folder")
    finally:                                    # Ctrl-C too
        with contextlib.suppress(OSError):
            os.remove(out + ".tmp")
    print(f"{path}: {len(data):,} bytes -> {out}: {len(result):,} bytes, {time.perf_counter() - begin:.0f} s")
    if not unpack:
        print(f"{8 * len(result) / len(data):.4f} bits per byte; compressors: {compressor_bits(data)}")


if __name__ == "__main__":
    run_program(main)
