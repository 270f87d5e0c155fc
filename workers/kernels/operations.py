"""The operations that a program is made of: a code and its arguments for each, as `workers/build.py` writes them down.

An operation is a row of int64 (code, counter, barrier, next, then the arguments) and one float64. "next" is the place
of the next operation in the program that reads a matrix, LINEAR or GATED. Arguments are addresses (0: absent) and
sizes; "width" is the distance of two rows in float32. A "private" address is this member's own memory.
"""

from __future__ import annotations

CODE, COUNTER, BARRIER, NEXT, ARGUMENTS = range(5)
OP_COLUMNS = 20

EMBED = 0  # wtype, matrix, n, out, position_embed; float: scale
# kind, source, out, quantized out, weight, bias, n, residual, num_terms, private out, private quantized
NORM = 1  # float: eps
# wtype, matrix, n_in, n_out, source, source row bytes, private source; out, out width, bias, residual, num_terms
LINEAR = 2
QK_ROPE_WRITE = 3  # layer, qkv, width, cos, sin, rope_dim, pairing, q_norm, k_norm, num_heads; float: eps
ATTENTION = 4  # layer, qkv, width, out, num_heads, window index, quantized out, sampled only; float: scale
COMBINE = 5  # out, num_heads, window index, quantized out, sampled only
QUANTIZE = 6  # source, n, out
ACTIVATE = 7  # kind, gated, gate and up, width, n, out, quantized out
SAMPLE = 8  # logits, width, vocab_size, logprobs, ranks, top ids, top logprobs
COPY_BLOCKS = 9
# wtype, gate, n_in, n_out, source, source row bytes, private source; up, kind, quantized out, its row bytes
GATED = 10
GATHER = 11  # source, row bytes, out; source, row bytes, out: the rows whose tokens sample, of two arrays

NORM_RMS, NORM_LAYER = 0, 1
PRIVATE_OUT = ARGUMENTS + 9  # a column of NORM

# Columns of LINEAR and of GATED, and the first argument that they do not have in common.
WTYPE, MATRIX, N_IN, N_OUT, SOURCE, SOURCE_ROW_BYTES, PRIVATE_SOURCE, REST = range(ARGUMENTS, ARGUMENTS + 8)

# Up to so many rows every member normalises all of them, for itself alone: quicker than to wait for who does it.
PRIVATE_ROWS = 4
