//! Rows in the caller's memory, as C describes them.
mod ffi;

use crate::status::{Failure, Outcome};
use kvist_engine::kvist_device::StridedShape;
use std::ops::Range;

/// Checks sizes and strides, and returns them with the number of elements from the first to the last.
fn shape(sizes: [i64; 4], strides: [i64; 4], what: &str) -> Outcome<(StridedShape, usize)> {
    let positive = |values: [i64; 4], name: &str| -> Outcome<[usize; 4]> {
        let mut checked = [0; 4];
        for (to, value) in checked.iter_mut().zip(values) {
            *to = usize::try_from(value).map_err(|_| {
                Failure::argument(format!("{what}.{name} has {value}: they must not be negative"))
            })?;
        }
        Ok(checked)
    };
    let shape = StridedShape { sizes: positive(sizes, "sizes")?, strides: positive(strides, "strides")? };
    if shape.sizes.contains(&0) {
        return Ok((shape, 0));
    }
    let last = shape
        .sizes
        .iter()
        .zip(shape.strides)
        .try_fold(0usize, |sum, (size, stride)| sum.checked_add((size - 1).checked_mul(stride)?));
    match last.and_then(|last| last.checked_add(1)) {
        Some(n) => Ok((shape, n)),
        None => Err(Failure::argument(format!("{what}: the strides {strides:?} reach past all memory"))),
    }
}

/// Checks that the bytes of `out` are not read while they are written.
fn check_apart(out: &Range<usize>, input: &Range<usize>, what: &str) -> Outcome<()> {
    if out.start < input.end && input.start < out.end {
        return Err(Failure::argument(format!("out overlaps {what}")));
    }
    Ok(())
}
