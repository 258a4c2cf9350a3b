"""Data for the tiny passkey model: byte tokenizer, haystack corpus, sample builders.

Token ids: 0..255 = byte value, 256 = <bos>, 257 = <eos>, 258 = <pad>, 259 = <unk>.
Haystack : ASCII text of the Python standard library sources (of the running
           interpreter) and of /usr/share/common-licenses.  One file in ten (by
           CRC32 of its relative name) is held out for validation/evaluation.
"""

import gzip
import os
import sysconfig
import zlib

import numpy as np

BOS, EOS, PAD, UNK, VOCAB = 256, 257, 258, 259, 260
QUESTION = " What is the pass key? The pass key is "
_NAMES = [
    "Alice",
    "Bruno",
    "Carla",
    "David",
    "Emma",
    "Farid",
    "Greta",
    "Hugo",
    "Irene",
    "Jonas",
    "Karin",
    "Luca",
    "Mara",
    "Nils",
    "Olga",
    "Pavel",
    "Quinn",
    "Rosa",
    "Sven",
    "Tara",
    "Ugo",
    "Vera",
    "Willem",
    "Xenia",
    "Yann",
    "Zoe",
    "the door",
    "the safe",
    "the garage",
    "the server",
    "the archive",
    "room seven",
    "the north gate",
    "the blue box",
]


def encode(s):
    return np.frombuffer(s.encode("latin-1"), dtype=np.uint8).astype(np.int64)


def decode(ids):
    return "".join(chr(i) for i in ids if 0 <= i < 256)


def needle_text(digits, name=None):
    return f" The pass key{' of ' + name if name else ''} is {digits}. Remember it. "


def question_text(name=None):
    if name is None:
        return QUESTION
    return f" What is the pass key of {name}? The pass key of {name} is "


LICENSES = "/usr/share/common-licenses"


NOT_TEXT = {"site-packages", "test", "tests", "__pycache__", "dist-packages", "lib2to3"}


def python_files(root, skip=()):
    """The .py files below a folder, without tests, installed packages and the folders in `skip`."""
    files = []
    for d, dirs, names in os.walk(root):
        dirs[:] = sorted(set(dirs) - NOT_TEXT - set(skip))
        files += [os.path.join(d, n) for n in sorted(names) if n.endswith(".py")]
    return files


def plain_files(folder):
    """The files in a folder that are no links; none if there is no such folder."""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return [os.path.join(folder, n) for n in names if not os.path.islink(os.path.join(folder, n))]


def ascii_files(root, files, split):
    """The bytes of those files of a split that are ASCII. One in ten, by CRC32 of its name below root, is held out."""
    chunks = []
    for f in files:
        held = zlib.crc32(os.path.relpath(f, root).encode()) % 10 == 0
        if held != (split == "heldout"):
            continue
        opened = gzip.open if f.endswith(".gz") else open
        with opened(f, "rb") as file:
            raw = file.read()
        if raw.isascii():
            chunks.append(np.frombuffer(raw, dtype=np.uint8))
    return chunks


class Corpus:
    """Contiguous random slices of real text; split = 'train' or 'heldout'."""

    def __init__(self, split):
        root = sysconfig.get_path("stdlib")
        chunks = ascii_files(root, python_files(root), split)
        chunks += ascii_files(LICENSES, plain_files(LICENSES), split)
        self.data = np.concatenate(chunks).astype(np.int64)

    def slice(self, rng, n):
        s = int(rng.integers(0, len(self.data) - n - 1))
        return self.data[s : s + n]


def rand_digits(rng, k):
    return "".join(map(str, rng.integers(0, 10, k)))


def context_with_needles(rng, corpus, n, needles, depths=None):
    """Exactly n tokens: <bos>, haystack, needles inserted (at a space/newline near the depth).

    Returns the ids and the start position of each needle."""
    enc = [encode(x) for x in needles]
    hay = corpus.slice(rng, n - 1 - sum(map(len, enc)))
    pos = []
    for i in range(len(enc)):
        d = rng.random() if depths is None else depths[i]
        p = round(d * len(hay))
        if 0.0 < d < 1.0:
            q = p
            while q < len(hay) and q - p < 12 and hay[q] not in (32, 10):
                q += 1
            p = min(q, len(hay))
        pos.append(p)
    order = sorted(range(len(enc)), key=lambda i: pos[i])
    out, starts, last, cur = [np.array([BOS])], [0] * len(enc), 0, 1
    for i in order:
        out.append(hay[last : pos[i]])
        cur += pos[i] - last
        starts[i] = cur
        out.append(enc[i])
        cur += len(enc[i])
        last = pos[i]
    out.append(hay[last:])
    ids = np.concatenate(out)
    assert len(ids) == n
    return ids, starts


def passkey_sample(rng, corpus, T, multi, kmin=5, kmax=64, w_text=0.15):
    """Training sequence of T tokens and the loss weight of each token (as a target)."""
    names, keys, used = [], [], 1
    budget = T * (rng.uniform(0.4, 0.95) if multi else 1.0)
    pool = list(rng.permutation(len(_NAMES)))
    while True:
        name = None if not names and (not multi or rng.random() < 0.5) else _NAMES[pool.pop()]
        k = int(rng.integers(kmin, kmax + 1))
        d = rand_digits(rng, k)
        cost = len(needle_text(d, name)) + len(question_text(name)) + k + 1
        if used + cost > budget:
            if names:
                break
            kmax = max(kmin, kmax // 2)
            if kmax == kmin:
                budget = T
            continue
        names.append(name)
        keys.append(d)
        used += cost
        if not multi or not pool:
            break
    tail, tw = [], []
    for i in rng.permutation(len(names)):
        q, a = encode(question_text(names[i])), encode(keys[i] + ".")
        tail += [q, a]
        tw += [np.full(len(q), w_text), np.ones(len(a))]
    tail, tw = np.concatenate(tail), np.concatenate(tw)
    needles = [needle_text(d, nm) for d, nm in zip(keys, names)]
    ctx, starts = context_with_needles(rng, corpus, T - len(tail), needles)
    w = np.full(len(ctx), w_text)
    w[0] = 0.0
    for s, nd, d in zip(starts, needles, keys):
        j = s + nd.index(d)
        w[j : j + len(d)] = 0.0  # the first occurrence cannot be predicted
    return np.concatenate([ctx, tail]), np.concatenate([w, tw])


def copy_sample(rng, corpus, T, w_text=0.15):
    """Pure induction: random strings (mostly digits) repeated, little haystack between."""
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", dtype=np.uint8).astype(np.int64)
    digits = np.arange(48, 58)
    ids, w = [np.array([BOS])], [np.zeros(1)]
    n, seen = 1, []
    while n < T:
        if seen and rng.random() < 0.6:
            s = seen[int(rng.integers(len(seen)))]
            ww = np.ones(len(s))
            ww[:3] = 0.0 if len(seen) > 1 else 1.0
        else:
            alpha = digits if rng.random() < 0.8 else letters
            s = rng.choice(alpha, int(rng.integers(12, max(13, min(64, T // 3)))))
            ww = np.zeros(len(s))
            seen.append(s)
        g = corpus.slice(rng, int(rng.integers(0, max(1, T // 8))))
        for x, y in ((s, ww), (np.array([32]), np.zeros(1)), (g, np.full(len(g), w_text))):
            ids.append(x)
            w.append(y)
            n += len(x)
    return np.concatenate(ids)[:T], np.concatenate(w)[:T]


def batch(rng, corpus, T, B, p_copy=0.0, p_multi=0.6, **kw):
    xs, ws = [], []
    for _ in range(B):
        u = rng.random()
        if u < p_copy:
            x, w = copy_sample(rng, corpus, T)
        else:
            x, w = passkey_sample(rng, corpus, T, multi=rng.random() < p_multi, **kw)
        xs.append(x)
        ws.append(w)
    return np.stack(xs), np.stack(ws).astype(np.float32)


def eval_batch(rng, corpus, n_ctx, k, depths):
    """One single-needle context of exactly n_ctx tokens per entry of depths, and the digits."""
    keys = [rand_digits(rng, k) for _ in depths]
    ctx = [context_with_needles(rng, corpus, n_ctx, [needle_text(d)], [dep])[0] for d, dep in zip(keys, depths)]
    return np.stack(ctx), keys
