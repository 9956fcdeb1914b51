"""The words that a step's compiled parts are told by: the context of a call and the fields of each part.

Every word is an int64: an address, a number, or, where a comment says float32, a float in the low half. The step reads them;
the program writes them. Guarantees: parts of one kind differ in their fields alone, so one compiled variant serves all models.
"""

from typing import Final

# Words of the context of a call. The addresses of buffers, float32 rows, are words of it too.
ROWS, OFFSET, ROUNDING, THREADS, SLABS, SCRATCH, SCRATCH_SIZE, RINGS, POSITIONS = range(9)  # how many, where, and so on
BRANCH: Final = 11  # a buffer, too
STREAM, NORMED, QUERIES, KEYS, VALUES, TURNED, FRESH, ATTENDED, GATE, UP, GATED, SUMS = range(12, 24)  # buffers
TABLES: Final = 24  # addresses of cosines, then sines, of each rotation in turn
TABLE_WORDS: Final = 16
SCORES, SHARES, CHOSEN, GATHERED, OUTPUTS = range(40, 45)  # buffers of experts
CONTEXT_WORDS: Final = 48

# Fields of every part. SYNC: what follows reads what this part, or one since the last sync, has written.
KIND, CODE, SYNC, X, Y = range(5)
PRODUCT, OTHER = 0, 1
FIELDS: Final = 40

# A product. X and Y are words of the context.
INNER, WEIGHT, SCALES, BIASES, SHIFT, WIDTH, BLOCKS = range(5, 12)

# A norm: STREAM += [norm of] (X + bias) [* MULTIPLIER] [+ ALSO + its bias, before], then Y = norm of STREAM. X and Y as above,
# X 0 where nothing is added. BIAS, POST, N_WEIGHT and N_SHIFT are addresses of float32, 0 for none. N_EPS, POST_EPS, N_INVERSE
# (1 / width), MULTIPLIER: float32. N_KIND: which norm. ALSO: a word of the context as X is.
N_INNER, X_WIDTH, BIAS, POST, N_WEIGHT, N_EPS, POST_EPS, N_INVERSE = range(5, 13)
N_KIND, N_SHIFT, MULTIPLIER, HAS_MULTIPLIER, ALSO, ALSO_WIDTH, ALSO_BIAS = range(13, 20)
RMS, CENTRED, NO_NORM = range(3)

# Rotation and storing. GROUPS: heads of keys; GROUP: heads of queries a group; HEAD: elements of one, HEAD_BLOCKS: blocks of
# columns that it takes. *_BIAS, *_NORM: addresses of float32, 0 for none. TABLE: word of the context, 0 for no rotation.
# TURNING: elements that turn. NEIGHBOURS: pairs are neighbours rather than halves. H_EPS, H_INVERSE, GAIN, SCALE: float32.
GROUPS, GROUP, HEAD, HEAD_BLOCKS, COLUMNS, LAYER = range(5, 11)
Q_WIDTH, K_WIDTH, V_WIDTH, Q_BIAS, K_BIAS, V_BIAS, Q_NORM, K_NORM, H_EPS, H_INVERSE = range(11, 21)
TABLE, TURNING, NEIGHBOURS, HAS_GAIN, GAIN, SCALE = range(21, 27)
# Where queries, keys and values stand: words of the context (*_FROM), and floats before them in a row (*_AT).
Q_FROM, K_FROM, V_FROM, K_AT, V_AT = range(35, 40)

# Attention, besides GROUPS to LAYER. WINDOW: positions that a query sees, 0 for all. RING: which of the context's, -1 for none.
# VALUES_AT: bytes of a slab before its values.
# CAP: float32 of a soft cap on the scores, 0 for none.
WINDOW, RING, VALUES_AT = range(27, 30)
CAP: Final = 26

# Packing of what was stored, besides GROUPS to LAYER and VALUES_AT. ELEMENTS: that share a scale. TOP: the highest code, a
# float32. SCALES_AT, CODES_AT: bytes of a slab before scales and biases, and before codes.
ELEMENTS, TOP, SCALES_AT, CODES_AT = range(30, 34)

# The activation: GATED = activation(GATE + bias) [* (UP + bias)]. ACTIVATION: which. UP_FROM: word of the context where UP
# stands, 0 for a layer without a gate; UP_AT: floats before it in a row.
# A_CHOSEN: rows for each of the call's, 0 for one.
A_INNER, GATE_WIDTH, UP_WIDTH, GATE_BIAS, UP_BIAS, ACTIVATION, UP_FROM, UP_AT, A_CHOSEN = range(5, 14)
SWIGLU, GEGLU_APPROX, GEGLU, GELU = range(4)

SLAB: Final = 256  # positions of a slab of keys and values: a multiple of every tile's columns
MOST_ROWS: Final = 256  # rows of one call

# Routing: from SCORES + bias to SHARES, CHOSEN and GATHERED. R_INNER: elements of a row of NORMED. R_KIND: how. R_NORMALISED:
# whether shares are divided by their sum. The sum of experts besides: S_WIDTH: floats of a row of OUTPUTS.
R_EXPERTS, R_CHOSEN, R_INNER, R_WIDTH, R_BIAS, R_KIND, R_NORMALISED, S_WIDTH = range(5, 13)
PROBABLE, HIGHEST = range(2)

# A product of experts, besides X to BLOCKS of a product, BLOCKS those of one expert. RUN: address of the compiled product.
# *_STEP: bytes from one block to the next; OUT_STEP: bytes of a block's outputs. MANY: experts; TIMES: chosen for a row.
RUN, WEIGHT_STEP, SCALES_STEP, BIASES_STEP, OUT_STEP, MANY, TIMES = range(12, 19)

# What CHOSEN holds, int64: RUNS, then EXPERT, FIRST and COUNT of each run of rows of one expert, then for each choice its row.
