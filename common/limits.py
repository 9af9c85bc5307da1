"""Every bound in one place, with the relations between them asserted where they are declared.

A receiver compares a size with its bound *before* it allocates. Settings may lower some of these; nothing raises them.
"""

from __future__ import annotations

MIB = 1 << 20
GIB = 1 << 30

# --- the grid (grid law: what a token's rows are depends on the token ids alone)
UBATCH_TOKENS = 256
"""Positions are cut at multiples of this, with and without a worker."""
UBATCH_TOKENS_MIN = 2
"""A read never ends in a one-row ubatch: one row takes other kernels than many."""

# --- the model
N_LAYER_MAX = 512
N_EMBD_MAX = 32_768
N_VOCAB_MAX = 1 << 20
N_CTX_MAX = 1 << 20
KV_PAD_TOKENS = 256
"""Attention reads the cache in multiples of this many cells (stock llama.cpp pads alike: needed for bit parity)."""

# --- pages
PAGE_TOKENS = 4096
"""Keys of one layer that are attended, moved and kept together."""
GROUP_PAGES = 4
"""Pages whose partial results are folded before the groups are: the unit that may be computed elsewhere."""
KV_HOST_TOKENS = 65_536
"""Tokens whose keys and values stay in the host's memory, where the settings say nothing."""
PAGE_WORKERS_MAX = 7
"""Workers that hold pages beside the one of the link; each has a bridge."""
PAGE_PAD_TOKENS = 64
"""Pages are multiples of this many keys, and attention over the newest one reads a multiple of it."""

APPEND_PIECE_BYTES = 1 * MIB
"""A page travels in pieces of so many bytes, so that a query waits for one of them and not for a page."""
APPEND_PIECE_BYTES_MAX = 4 * MIB
N_HEAD_MAX = 1024
"""Heads of keys and values, and query heads on each of them, that a worker holds pages for."""
HEAD_DIM_MAX = 4096
QUERY_TOKENS_MAX = 1024
"""Tokens that one query asks for."""

FROZEN_ASK_BUCKETS_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024)
"""Upper bounds by which a worker counts the seconds of a frozen page's answers."""

# --- the cable
FRAME_BYTES_MAX = 256 * MIB
"""Longest payload a receiver accepts on a binary channel."""
PING_BYTES_MAX = 64 * MIB
CONTROL_LINE_BYTES_MAX = 64 * 1024
ERROR_TEXT_BYTES_MAX = 4096
FINGERPRINT_TEXT_BYTES_MAX = 256 * 1024
CHUNK_WINDOW_MAX = 16
"""Most residual chunks in flight."""
CHUNK_WINDOW = 4
"""Chunks in flight where the settings say nothing: of these a read uses as many as the way to the worker takes."""
CHUNK_TOKENS_MAX = 4096
"""Most tokens in one residual chunk."""
ROW_SECTIONS_MAX = 4 * N_LAYER_MAX
"""Most sections of a ROWS blob: four kinds a layer."""
SOCKET_BUFFER_BYTES = 4 * MIB
SNAPSHOTS_MAX = 8
"""Recurrent states a worker keeps; the oldest goes first."""
WORKER_CLIENTS_MAX = 8
"""Connections a worker reads at once on one channel, greeted or not; one more is closed."""

# --- handing over a tail file
TAIL_BYTES_MAX = 1 << 40
TAIL_BLOCKS_MAX = 1 << 18

# --- the bus
BUS_HWM_MESSAGES = 1024
BUS_HWM_DATA_MESSAGES = 2 * CHUNK_WINDOW_MAX
"""Messages waiting in a socket that carries residuals or rows: each may hold a frame of megabytes."""
BUS_BODY_BYTES_MAX = 8 * MIB
BUS_FRAMES_MAX = 8

# --- the public ZeroMQ endpoint
PUBLIC_BYTES_MAX = 17 * MIB
"""Longest frame of a client; a longer one cuts its connection before it is read."""
PUBLIC_ID_CHARS_MAX = 64
PUBLIC_HWM_MESSAGES = 256
"""Messages that ZeroMQ holds for one client; what comes after them waits in the gateway, bounded as below."""
PUBLIC_CLIENTS_MAX = 256
PUBLIC_REQUESTS_MAX = 128
"""Requests of one client that are not ended yet."""
PUBLIC_REPLIES_MAX = 2048
"""Replies that wait for a client that does not read, streams aside; one more and the client is cut."""
PUBLIC_PENDING_BYTES_MAX = 64 * MIB
"""Bytes of bodies that wait to be prepared, of all clients."""
PUBLIC_CREDIT = 256
PUBLIC_CREDIT_MAX = 1 << 20
PUBLIC_BUFFER_TOKENS_MAX = 4096
"""Tokens of one answer that wait for a client's credit; one more and the request is ended."""
PUBLIC_PIECE_TOKENS_MAX = 256
"""Tokens told in one message when several wait."""
EVENTS_HWM_MESSAGES = 1024
"""Events that wait for one subscriber; later ones are dropped, and their numbers show the gap."""

# --- requests
REQUESTS_WAITING_MAX = 64
PROMPT_BYTES_MAX = 16 * MIB
TOKEN_CREDIT = 256
"""Tokens the host may send before the gateway grants more."""
CHOICES_MAX = 4
"""Answers to one prompt."""
TOP_LOGPROBS_MAX = 20
LOGIT_BIAS_MAX = 1024
"""Token ids with a bias in one request."""
SPLIT_TOKENS_MIN = 513
"""Reads of at most 512 new tokens stay on the host."""

assert UBATCH_TOKENS % KV_PAD_TOKENS == 0, "a full ubatch ends on a cache pad"
assert PAGE_TOKENS % PAGE_PAD_TOKENS == 0 and KV_PAD_TOKENS % PAGE_PAD_TOKENS == 0, "no page ends in a pad"
assert UBATCH_TOKENS_MIN >= 2, "one row takes other kernels"
assert UBATCH_TOKENS * N_EMBD_MAX * 4 <= FRAME_BYTES_MAX, "a frame holds one ubatch of f32 residual"
assert FINGERPRINT_TEXT_BYTES_MAX < FRAME_BYTES_MAX
assert TOKEN_CREDIT < BUS_HWM_MESSAGES, "a stream out of credit never fills the pipe"
assert CHUNK_WINDOW_MAX < BUS_HWM_DATA_MESSAGES, "a full window never fills the pipe"
assert PROMPT_BYTES_MAX < PUBLIC_BYTES_MAX <= PUBLIC_PENDING_BYTES_MAX, (
    "the longest prompt fits, and can be prepared"
)
assert CHUNK_WINDOW <= CHUNK_WINDOW_MAX
assert APPEND_PIECE_BYTES <= APPEND_PIECE_BYTES_MAX < FRAME_BYTES_MAX
assert UBATCH_TOKENS <= QUERY_TOKENS_MAX
assert UBATCH_TOKENS <= CHUNK_TOKENS_MAX
