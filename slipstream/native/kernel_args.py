"""The arguments of kernels: 64-bit integers, many of them addresses. A class has the indices for one kernel.

The first one always points to the number of rows.
"""

from __future__ import annotations


class Pass:
    """The rows of a pass. K and V of each go to its PLACE in the pages; a LIST has the slots of all positions that a
    row sees, from the committed ones on; SCORES has SPAN floats for every query of a tile and thread.
    """

    ROWS, TILES, TILE_COUNT, POSITIONS, LISTS, PLACES, TURNS, SCORES, SPAN, LENGTH = range(10)


class Tile:
    """Some rows of one sequence: the address of its page numbers, positions that all of them see, those committed."""

    FIRST, ROWS, PAGES, SHARED, COMMITTED, LENGTH = range(6)


class FloatGemm:
    """START: initial value of every row's sums."""

    ROWS, X, X_STRIDE, WEIGHT, START, OUT, OUT_STRIDE, PANELS, INPUTS, LENGTH = range(10)


class IntGemm:
    """Shared by the quantisation of rows and the GEMM with their digits.

    COLUMNS multiply the inputs; UNITS receive the factor of a row's results, EXCESS what the added 128 contributes to
    them, and SUMS, for 4-bit weights, those of each group of inputs. FINENESS and FLOOR are addresses.
    """

    ROWS, X, X_STRIDE, COLUMNS, DIGITS, UNITS, EXCESS, INPUTS, FINENESS, FLOOR = range(10)
    WEIGHT, SCALES, START, OUT, OUT_STRIDE, PANELS, SUMS, LENGTH = range(10, 18)


class Pack:
    """ROWS are those of a weight, X, of floats; WEIGHT and SCALES are the packed result."""

    ROWS, X, X_STRIDE, INPUTS, WEIGHT, SCALES, LENGTH = range(7)


class Unpack:
    """Rows IDS (int64) of a packed WEIGHT, with SCALES, to OUT [rows, INPUTS]."""

    ROWS, IDS, INPUTS, WEIGHT, SCALES, OUT, LENGTH = range(7)


class Norm:
    """FLOOR: the address of what is added to the squared length. WEIGHT multiplies the normalised row."""

    ROWS, X, X_STRIDE, OUT, OUT_STRIDE, WIDTH, FLOOR, WEIGHT = range(8)


class Attention:
    """Queries come first in rows of QKV, [heads, size]; K and V are those of a layer, [pages, kv heads, page, size].
    WINDOW is how far back a row sees. Rotating and storing uses the first five.
    """

    PASS, QKV, QKV_STRIDE, KEYS, VALUES, OUT, OUT_STRIDE, WINDOW = range(8)


class Top:
    """COUNT values and ids of each row."""

    ROWS, X, X_STRIDE, WIDTH, COUNT, VALUES, IDS, LENGTH = range(8)


class Draw:
    """COUNT logits X and, unless they are the whole vocabulary, their tokens' IDS (int64). TEMPERATURE has the bits of
    a float32. RESULT receives an index of X, or -1. FIRST, SECOND and BOUND are the kernel's own: the two largest
    scores so far (float64), and what others have to exceed (float32).
    """

    ROWS, X, COUNT, IDS, TEMPERATURE, KEY, RESULT, FIRST, SECOND, BOUND, LENGTH = range(11)


class Perturb:
    """Rows of WIDTH logits X; IDS and TEMPERATURE as above; KEYS has one for each row."""

    ROWS, X, X_STRIDE, WIDTH, IDS, TEMPERATURE, KEYS, OUT, LENGTH = range(9)
