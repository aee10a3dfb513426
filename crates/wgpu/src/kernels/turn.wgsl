// Rotates rows of DIM elements in workgroup memory, or back.
//
//   turned[r * DIM + i]     r < rows
//   turn 0: nothing
//   turn 1: the Hadamard matrix, block-diagonal over the largest power of two that divides DIM; its own inverse
//   turn 2: elements first .. DIM as one row of n: signs flipped, the first 2^k elements rotated, and if n is not 2^k, signs
//           flipped again and the last 2^k elements rotated
//
// Every one of the THREADS invocations must call it, after a barrier; what it leaves may be read after it returns.

// The sign bit that is flipped of element i, or 0.
fn sign_of(i: u32) -> u32 {
    let mixed = (i + 1u) * 0x9e3779b1u;
    return ((mixed ^ (mixed >> 15u)) * 0x85ebca6bu) & 0x80000000u;
}

fn flip_signs(thread: u32, rows: u32, first: u32) {
    let n = DIM - first;
    for (var i = thread; i < rows * n; i += THREADS) {
        let at = i / n * DIM + first + i % n;
        turned[at] = bitcast<f32>(bitcast<u32>(turned[at]) ^ sign_of(i % n));
    }
    workgroupBarrier();
}

// Rotates blocks of `block` elements, a power of two, of elements first .. first + n of every row.
fn rotate(thread: u32, rows: u32, first: u32, n: u32, block: u32) {
    for (var half = 1u; half < block; half *= 2u) {
        for (var i = thread; i < rows * (n / 2u); i += THREADS) {
            let pair = i % (n / 2u);
            let low = i / (n / 2u) * DIM + first + pair / half * 2u * half + pair % half;
            let a = turned[low];
            let b = turned[low + half];
            turned[low] = a + b;
            turned[low + half] = a - b;
        }
        workgroupBarrier();
    }
    let twos = firstTrailingBit(block);
    let norm = power(-f32(twos / 2u)) * select(1.0, 0.70710678118654752, (twos & 1u) == 1u);
    for (var i = thread; i < rows * n; i += THREADS) {
        turned[i / n * DIM + first + i % n] *= norm;
    }
    workgroupBarrier();
}

fn turn_rows(thread: u32, rows: u32, turn: u32, first: u32) {
    if (turn == 1u) {
        rotate(thread, rows, 0u, DIM, 1u << firstTrailingBit(DIM));
    }
    if (turn == 2u && first < DIM) {
        let block = 1u << firstLeadingBit(DIM - first);
        flip_signs(thread, rows, first);
        rotate(thread, rows, first, block, block);
        if (block < DIM - first) {
            flip_signs(thread, rows, first);
            rotate(thread, rows, DIM - block, block, block);
        }
    }
}

fn turn_rows_back(thread: u32, rows: u32, turn: u32, first: u32) {
    if (turn == 1u) {
        rotate(thread, rows, 0u, DIM, 1u << firstTrailingBit(DIM));
    }
    if (turn == 2u && first < DIM) {
        let block = 1u << firstLeadingBit(DIM - first);
        if (block < DIM - first) {
            rotate(thread, rows, DIM - block, block, block);
            flip_signs(thread, rows, first);
        }
        rotate(thread, rows, first, block, block);
        flip_signs(thread, rows, first);
    }
}
