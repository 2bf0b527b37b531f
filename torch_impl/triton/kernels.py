"""The Triton kernels of :mod:`hvd_compress.torch.triton.loops`.

A program takes one block: ``width`` elements of one tensor.  ``kept`` has room for the places of
``room`` candidates of each block.  Each kernel counts with integers or writes to places that no
other program writes to.  So results do not depend on the order in which programs run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .task_kernels import in_range

#: values of a digit, at most
BINS = tl.constexpr(2048)
#: above the magnitudes of all finite numbers
INFINITY = tl.constexpr(0x7F800000)

#: words (of four bytes) in front of a message, for a header
HEADER = tl.constexpr(4)

# The table of tensors has elements, selected elements, and the numbers of the first block and the
# first entry; the table of addresses has those of four arrays.
_N, _K, _FIRST_BLOCK, _FIRST_ENTRY, _COLUMNS = (tl.constexpr(i) for i in range(5))
GRADIENT, OUT, RESIDUAL, VELOCITY, _ARRAYS = (tl.constexpr(i) for i in range(5))
_LARGEST_HALF = tl.constexpr(65504.0)


@triton.jit
def _pointer(addresses, t, array, aligned: tl.constexpr):
    pointer = tl.load(addresses + t * _ARRAYS + array).to(tl.pointer_type(tl.float32))
    if aligned:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def magnitudes(x):
    # As integers, which orders them as numbers and puts NaN above all.
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _moved(addresses, t, at, inside, momenta, kind: tl.constexpr, aligned: tl.constexpr):
    """The next velocity and residual of the elements ``at``, before anything is sent.  ``kind`` is
    0 without momentum, 1 with momentum, 2 with Nesterov's."""
    gradient = tl.load(_pointer(addresses, t, GRADIENT, aligned) + at, mask=inside)
    direction = gradient
    velocity = gradient
    if kind != 0:
        velocity = tl.load(_pointer(addresses, t, VELOCITY, aligned) + at, mask=inside)
        if kind == 1:
            velocity = tl.load(momenta + t) * velocity + gradient
            direction = velocity
        else:
            velocity = tl.load(momenta + t) * (velocity + gradient)
            direction = velocity + gradient
    residual = tl.load(_pointer(addresses, t, RESIDUAL, aligned) + at, mask=inside)
    return velocity, direction + residual


@triton.jit
def _block(tensors, owners, width: tl.constexpr):
    """The program's block, its tensor, and where in that it starts."""
    block = tl.program_id(0)
    t = tl.load(owners + block)
    return block, t, (block - tl.load(tensors + t * _COLUMNS + _FIRST_BLOCK)) * width


@triton.jit
def search(
    addresses, tensors, owners, thresholds, found, largest, counts, kept, momenta,
    kind: tl.constexpr, aligned: tl.constexpr, width: tl.constexpr, room: tl.constexpr,
):  # fmt: skip
    """Keep the places of a block's candidates: as many as there is room for."""
    block, t, start = _block(tensors, owners, width)
    n = tl.load(tensors + t * _COLUMNS + _N)
    lane = tl.arange(0, width)
    at = start + lane
    inside = at < n
    if start + width <= n:
        _, x = _moved(addresses, t, at, None, momenta, kind, aligned)
    else:
        _, x = _moved(addresses, t, at, inside, momenta, kind, aligned)
    bits = tl.where(inside, magnitudes(x), 0)
    hits = bits >= tl.load(thresholds + t)  # which is at least 1
    count = tl.sum(hits.to(tl.int32))
    tl.store(counts + block, count)
    tl.atomic_max(largest + t, tl.max(bits), sem="relaxed")
    if count > 0:
        tl.atomic_add(found + t, count, sem="relaxed")
        rank = tl.cumsum(hits.to(tl.int32), 0) - 1
        tl.store(kept + block * room + rank, lane, mask=hits & (rank < room))


@triton.jit
def _to_search(
    tensors, found, largest, counts, block, t, start, width: tl.constexpr, room: tl.constexpr
):
    """Whether the kept candidates of a block are all that may be selected, and how many they are,
    or else the number of elements."""
    row = tensors + t * _COLUMNS
    count = tl.load(counts + block)
    suffice = (count <= room) & (tl.load(found + t) >= tl.load(row + _K))
    suffice = suffice & (tl.load(largest + t) < INFINITY)
    elements = tl.minimum(tl.load(row + _N) - start, width).to(tl.int32)
    return suffice, tl.where(suffice, count, elements)


@triton.jit
def _places(kept, block, lane, size, suffice, room: tl.constexpr):
    listed = tl.where(suffice, size, 0)
    places = tl.load(kept + block * room + lane, mask=lane < listed, other=0)
    return tl.where(suffice, places, lane)


@triton.jit
def count_digits(
    addresses, tensors, owners, found, largest, counts, kept, prefixes, histograms, momenta,
    kind: tl.constexpr, shift: tl.constexpr, digits: tl.constexpr,
    width: tl.constexpr, room: tl.constexpr,
):  # fmt: skip
    """Count each value of a digit, ``digits`` bits above the ``shift`` lowest ones, over all
    magnitudes that begin with the tensor's prefix."""
    block, t, start = _block(tensors, owners, width)
    suffice, size = _to_search(tensors, found, largest, counts, block, t, start, width, room)
    prefix = 0
    if shift + digits < 31:
        prefix = tl.load(prefixes + t) >> (shift + digits)
    for first in range(0, size, room):
        lane = first + tl.arange(0, room)
        inside = lane < size
        place = _places(kept, block, lane, size, suffice, room)
        _, x = _moved(addresses, t, start + place, inside, momenta, kind, False)
        bits = magnitudes(x)
        same = inside & ((bits >> (shift + digits)) == prefix)
        digit = (bits >> shift) & ((1 << digits) - 1)
        tl.atomic_add(histograms + t * BINS + digit, 1, mask=same, sem="relaxed")


@triton.jit
def decide_digit(
    tensors, largest, thresholds, prefixes, missing, histograms,
    shift: tl.constexpr, is_first: tl.constexpr,
):  # fmt: skip
    """Lengthen the prefix of a tensor's k-th largest magnitude by a digit.  Say how many of those
    that begin with it are missing in the selection.  The first digit also predicts the threshold of
    the next step."""
    t = tl.program_id(0)
    values = tl.arange(0, BINS)
    histogram = tl.load(histograms + t * BINS + values)
    at_least = tl.cumsum(histogram, 0, reverse=True)
    n = tl.load(tensors + t * _COLUMNS + _N)
    k = tl.load(tensors + t * _COLUMNS + _K)
    if is_first:
        prefix = 0
        wanted = k.to(tl.int32)
    else:
        prefix = tl.load(prefixes + t)
        wanted = tl.load(missing + t)
    digit = tl.max(tl.where(at_least >= wanted, values, 0))
    tl.store(prefixes + t, prefix | (digit << shift))
    tl.store(missing + t, wanted - tl.sum(tl.where(values > digit, histogram, 0)))
    if is_first:
        # Twice as many candidates as are needed; lower while those found are not that many.
        ample = tl.max(tl.where(at_least >= tl.minimum(n, 2 * k + 16), values, -1))
        lower = tl.load(thresholds + t) - (1 << shift)
        threshold = tl.maximum(tl.where(ample >= 0, ample << shift, lower), 1)
        tl.store(thresholds + t, threshold, mask=tl.load(largest + t) < INFINITY)


@triton.jit
def count_selected(
    addresses, tensors, owners, found, largest, counts, kept, prefixes, above, equal,
    momenta, kind: tl.constexpr, width: tl.constexpr, room: tl.constexpr,
):  # fmt: skip
    """Count the magnitudes of a block above the k-th largest, and those equal to it."""
    block, t, start = _block(tensors, owners, width)
    suffice, size = _to_search(tensors, found, largest, counts, block, t, start, width, room)
    kth = tl.load(prefixes + t)
    larger = tl.zeros((room,), tl.int32)
    ties = tl.zeros((room,), tl.int32)
    for first in range(0, size, room):
        lane = first + tl.arange(0, room)
        inside = lane < size
        place = _places(kept, block, lane, size, suffice, room)
        _, x = _moved(addresses, t, start + place, inside, momenta, kind, False)
        bits = magnitudes(x)
        larger += (inside & (bits > kth)).to(tl.int32)
        ties += (inside & (bits == kth)).to(tl.int32)
    tl.store(above + block, tl.sum(larger))
    tl.store(equal + block, tl.sum(ties))


@triton.jit
def _before(ends, counts, block, first_block):
    """How many there are in the tensor's earlier blocks; ``ends`` are running sums."""
    others = tl.load(ends + first_block - 1, mask=first_block > 0, other=0)
    return (tl.load(ends + block) - tl.load(counts + block) - others).to(tl.int32)


@triton.jit
def write_selected(
    addresses, tensors, owners, found, largest, counts, kept, prefixes, missing,
    above, equal, above_ends, equal_ends, heads, values, places, momenta,
    tensor_count, kind: tl.constexpr, width: tl.constexpr, room: tl.constexpr,
):  # fmt: skip
    """Write the selected entries of a block into the message, in ascending order, the number of the
    first, and the tensor's largest magnitude.  A tensor that is not finite has NaN at the first
    places."""
    block, t, start = _block(tensors, owners, width)
    suffice, size = _to_search(tensors, found, largest, counts, block, t, start, width, room)
    row = tensors + t * _COLUMNS
    k = tl.load(row + _K)
    first_block = tl.load(row + _FIRST_BLOCK)
    entry = tl.load(row + _FIRST_ENTRY)
    kth = tl.load(prefixes + t)
    ties = tl.load(missing + t)
    magnitude = tl.load(largest + t)
    finite = magnitude < INFINITY
    tl.store(heads + HEADER + t, magnitude, mask=block == first_block)
    larger = _before(above_ends, above, block, first_block)
    equals = _before(equal_ends, equal, block, first_block)
    before = tl.where(finite, larger + tl.minimum(equals, ties), tl.minimum(start, k))
    tl.store(heads + HEADER + tensor_count + block, (entry + before).to(tl.int32))
    for first in range(0, size, room):
        lane = first + tl.arange(0, room)
        inside = lane < size
        place = _places(kept, block, lane, size, suffice, room)
        _, x = _moved(addresses, t, start + place, inside, momenta, kind, False)
        bits = magnitudes(x)
        is_larger = inside & (bits > kth)
        is_equal = inside & (bits == kth)
        larger_here = tl.cumsum(is_larger.to(tl.int32), 0)
        equals_here = tl.cumsum(is_equal.to(tl.int32), 0)
        # Of equal ones the first are selected.
        equals_before = equals + equals_here - is_equal.to(tl.int32)
        rank = larger + larger_here - is_larger.to(tl.int32) + tl.minimum(equals_before, ties)
        at = start + place
        selected = tl.where(finite, is_larger | (is_equal & (equals_before < ties)), at < k)
        selected = inside & selected
        rank = entry + tl.where(finite, rank, at)
        x = tl.where(finite, x, float("nan"))
        if values.dtype.element_ty == tl.float16:
            x = tl.where(x > _LARGEST_HALF, _LARGEST_HALF, x)
            x = tl.where(x < -_LARGEST_HALF, -_LARGEST_HALF, x)
        tl.store(values + rank, x.to(values.dtype.element_ty), mask=selected)
        tl.store(places + rank, place.to(tl.int16), mask=selected)
        larger += tl.sum(is_larger.to(tl.int32))
        equals += tl.sum(is_equal.to(tl.int32))


@triton.jit
def _entries(heads, block, tensor_count, block_count, entries):
    """The first and last entries of a message that are those of a block.  A damaged message has as
    many as there is room for."""
    at = heads + HEADER + tensor_count + block
    last = tl.load(at + 1, mask=block + 1 < block_count, other=0)
    last = tl.where(block + 1 < block_count, last, entries)
    return tl.maximum(tl.load(at), 0), tl.minimum(last, entries)


@triton.jit
def _entry(values, places, i, inside, width: tl.constexpr):
    """Place within their block, and value, of the entries ``i``."""
    place = tl.load(places + i, mask=inside, other=0).to(tl.int32) & (width - 1)
    return place, tl.load(values + i, mask=inside, other=0.0).to(tl.float32)


#: what is another number in each bucket, for which kernels are not compiled anew
_NUMBERS = ["tensor_count", "block_count", "entries", "ranks", "row"]
_ROWS = ["values_at", "values_row", "places_at", "places_row", "size"]


@triton.jit(do_not_specialize=_NUMBERS)
def move(
    addresses, tensors, owners, momenta, everything, overflows, heads, values, places,
    tensor_count, block_count, entries, ranks, row, kind: tl.constexpr, aligned: tl.constexpr,
    masking: tl.constexpr, limited: tl.constexpr, width: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Write the next velocities and residuals of a block, without the elements that were sent.

    All ranks' elements of its tensor must be finite, and their sum must have room.  ``everything``
    are the messages of all ranks, of ``row`` words each; ``heads``, ``values`` and ``places`` are
    in this rank's own.
    """
    block, t, start = _block(tensors, owners, width)
    at, n = start + tl.arange(0, width), tl.load(tensors + t * _COLUMNS + _N)
    inside = at < n
    residual_to = _pointer(addresses, t, RESIDUAL, aligned)
    velocity_to = _pointer(addresses, t, VELOCITY, aligned)
    magnitude = 0
    theirs = everything + HEADER + t
    for _ in range(ranks):
        magnitude = tl.maximum(magnitude, tl.load(theirs))
        theirs += row
    fine = magnitude < INFINITY
    if limited:
        fine = fine & (tl.load(overflows + t) == 0)
    if fine:
        if start + width <= n:  # without a mask, which would keep it from moving vectors
            velocity, residual = _moved(addresses, t, at, None, momenta, kind, aligned)
            if kind != 0:
                tl.store(velocity_to + at, velocity)
            tl.store(residual_to + at, residual)
        else:
            velocity, residual = _moved(addresses, t, at, inside, momenta, kind, aligned)
            if kind != 0:
                tl.store(velocity_to + at, velocity, mask=inside)
            tl.store(residual_to + at, residual, mask=inside)
        tl.debug_barrier()  # other threads have written what is read here
        begin, end = _entries(heads, block, tensor_count, block_count, entries)
        for first in range(begin, end, chunk):
            i = first + tl.arange(0, chunk)
            place, sent = _entry(values, places, i, i < end, width)
            to = residual_to + start + place
            tl.store(to, tl.load(to, mask=i < end) - sent, mask=i < end)
            if masking:
                tl.store(velocity_to + start + place, 0.0, mask=i < end)
    else:
        tl.store(residual_to + at, in_range(tl.load(residual_to + at, mask=inside)), mask=inside)
        if kind != 0:
            old = tl.load(velocity_to + at, mask=inside)
            tl.store(velocity_to + at, in_range(old), mask=inside)


@triton.jit(do_not_specialize=[*_NUMBERS, *_ROWS])
def average(
    addresses, tensors, owners, everything, values, places, limits, overflows,
    tensor_count, block_count, entries, ranks, row,
    values_at, values_row, places_at, places_row, size,
    aligned: tl.constexpr, limited: tl.constexpr, width: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Write the mean of a block of elements: the entries of each rank are added in the order of the
    ranks.  With ``limited`` a tensor is noted whose mean reaches its limit.

    ``everything``, ``values`` and ``places`` are the messages of all ranks as words and as numbers
    of these types.  They say where the first rank's begin, and how far it is to the next rank's.
    """
    block, t, start = _block(tensors, owners, width)
    n = tl.load(tensors + t * _COLUMNS + _N)
    at = start + tl.arange(0, width)
    inside = at < n
    out = _pointer(addresses, t, OUT, aligned)
    if start + width <= n:  # without a mask, which would keep it from moving vectors
        tl.store(out + at, tl.zeros((width,), tl.float32))
    else:
        tl.store(out + at, tl.zeros((width,), tl.float32), mask=inside)
    heads = everything
    values += values_at
    places += places_at
    for _ in range(ranks):
        tl.debug_barrier()  # other threads have written what is read here
        begin, end = _entries(heads, block, tensor_count, block_count, entries)
        for first in range(begin, end, chunk):
            i = first + tl.arange(0, chunk)
            place, value = _entry(values, places, i, i < end, width)
            taken = (i < end) & (start + place < n)
            to = out + start + place
            tl.store(to, tl.load(to, mask=taken) + value, mask=taken)
        heads += row
        values += values_row
        places += places_row
    tl.debug_barrier()
    by = tl.full((width,), size, tl.float32)
    if start + width <= n:
        mean = tl.div_rn(tl.load(out + at), by)
        tl.store(out + at, mean)
    else:
        mean = tl.div_rn(tl.load(out + at, mask=inside, other=0.0), by)
        tl.store(out + at, mean, mask=inside)
    if limited:
        reaches = tl.max((tl.abs(mean) >= tl.load(limits + t)).to(tl.int32))
        tl.atomic_max(overflows + t, reaches, sem="relaxed")


@triton.jit
def stream(addresses, tensors, owners, width: tl.constexpr):
    """Read the gradient, velocity and residual of a block; write the latter two in place."""
    _, t, start = _block(tensors, owners, width)
    at = start + tl.arange(0, width)
    inside = at < tl.load(tensors + t * _COLUMNS + _N)
    gradient = tl.load(_pointer(addresses, t, GRADIENT, True) + at, mask=inside)
    velocity = _pointer(addresses, t, VELOCITY, True) + at
    residual = _pointer(addresses, t, RESIDUAL, True) + at
    new_velocity = 0.5 * tl.load(velocity, mask=inside) + gradient
    tl.store(velocity, new_velocity, mask=inside)
    tl.store(residual, tl.load(residual, mask=inside) + new_velocity, mask=inside)
