//! Attention over rows in the caller's memory.
#![allow(unsafe_code, non_camel_case_types)]
use super::{check_apart, shape};
use crate::cache::ffi::{kvist_cache, with_cache};
use crate::ffi::{reference, slice, slice_mut};
use crate::status::{Failure, Outcome, kvist_status};
use kvist_engine::kvist_cache::LayerId;
use kvist_engine::kvist_device::{AttendRows, Rows, RowsMut};
use std::ffi::c_void;
use std::ops::Range;

/// Elements of rows in the caller's memory.
#[repr(C)]
pub enum kvist_dtype {
    /// 32-bit floats.
    KVIST_F32 = 0,
    /// 16-bit floats of IEEE 754.
    KVIST_F16 = 1,
    /// The upper halves of 32-bit floats.
    KVIST_BF16 = 2,
}

const F32: u32 = kvist_dtype::KVIST_F32 as u32;
const F16: u32 = kvist_dtype::KVIST_F16 as u32;
const BF16: u32 = kvist_dtype::KVIST_BF16 as u32;

/// Bytes of an element of `dtype`.
fn element_bytes(dtype: u32, what: &str) -> Outcome<usize> {
    match dtype {
        F32 => Ok(4),
        F16 | BF16 => Ok(2),
        _ => Err(no_dtype(dtype, what)),
    }
}

fn no_dtype(dtype: u32, what: &str) -> Failure {
    Failure::argument(format!("{what}.dtype is {dtype}: use a kvist_dtype"))
}

/// Rows in the caller's memory: a tensor with the sizes and strides that PyTorch and DLPack give it, its axes in the order
/// batch, tokens, heads, elements. Strides count elements and are not negative. The elements of a row are contiguous.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvist_rows_view {
    /// The first element, aligned to its dtype.
    pub data: *mut c_void,
    /// A `kvist_dtype`.
    pub dtype: u32,
    /// Batch, tokens, heads, elements of a row. Batch × tokens is the number of tokens of the step: entry 0 first.
    pub sizes: [i64; 4],
    /// As sizes. Those of `out` must keep its rows apart; others may be 0.
    pub strides: [i64; 4],
}

/// One layer of a step.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvist_attend {
    /// The layer, from 0.
    pub layer: u32,
    /// Multiplies every score; usually 1/sqrt(head_dim).
    pub scale: f32,
    /// Scores become cap × tanh(score / cap); 0 is off.
    pub softcap: f32,
    /// `n_heads` scores of attention sinks that take part in the softmax and add nothing; null for none.
    pub sinks: *const f32,
    /// Queries: `n_heads` rows per token.
    pub q: kvist_rows_view,
    /// Keys after RoPE: `n_kv_heads` rows per token. Ignored for a layer that borrows.
    pub k: kvist_rows_view,
    /// Values, as keys.
    pub v: kvist_rows_view,
    /// The result, as `q`, rounded to its dtype. It must not overlap the others.
    pub out: kvist_rows_view,
}

/// The bytes of a view, from the first to the last.
fn bytes(view: &kvist_rows_view, what: &str) -> Outcome<Range<usize>> {
    let (_, n) = shape(view.sizes, view.strides, what)?;
    let start = view.data.addr();
    let end = n.checked_mul(element_bytes(view.dtype, what)?).and_then(|len| start.checked_add(len));
    end.map(|end| start..end).ok_or_else(|| Failure::argument(format!("{what} reaches past all memory")))
}

/// # Safety
/// The view is null, or its elements are valid for `'a` and not changed during it.
unsafe fn rows<'a>(view: &kvist_rows_view, what: &str) -> Outcome<Rows<'a>> {
    let (shape, n) = shape(view.sizes, view.strides, what)?;
    // SAFETY: `n` elements end with the last one of the view; the rest as the caller promises.
    Ok(unsafe {
        match view.dtype {
            F32 => Rows::F32(slice(view.data.cast(), n, what)?, shape),
            F16 => Rows::F16(slice(view.data.cast(), n, what)?, shape),
            BF16 => Rows::Bf16(slice(view.data.cast(), n, what)?, shape),
            dtype => return Err(no_dtype(dtype, what)),
        }
    })
}

/// # Safety
/// The view is null, or nothing else uses its elements during `'a`.
unsafe fn rows_mut<'a>(view: &kvist_rows_view, what: &str) -> Outcome<RowsMut<'a>> {
    let (shape, n) = shape(view.sizes, view.strides, what)?;
    // SAFETY: as in `rows`.
    Ok(unsafe {
        match view.dtype {
            F32 => RowsMut::F32(slice_mut(view.data.cast(), n, what)?, shape),
            F16 => RowsMut::F16(slice_mut(view.data.cast(), n, what)?, shape),
            BF16 => RowsMut::Bf16(slice_mut(view.data.cast(), n, what)?, shape),
            dtype => return Err(no_dtype(dtype, what)),
        }
    })
}

/// Runs one layer of the step in flight: writes its K and V, then attends over exactly what each token may see. Every layer
/// runs once; a layer that borrows K and V runs after the one that it borrows from. On an error the layer has not run, and the
/// step is still in flight.
///
/// # Safety
/// `cache` came from `kvist_cache_new`; `call` is valid with all rows that its views describe, and nothing else uses those of
/// `out` meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_step_attend(
    cache: *mut kvist_cache,
    call: *const kvist_attend,
) -> kvist_status {
    let run = |cache: &mut crate::cache::Cache| {
        // SAFETY: the caller keeps the contract above.
        let call = unsafe { reference(call, "call") }?;
        let layer = u16::try_from(call.layer).ok().map(LayerId);
        let layer = layer.filter(|layer| usize::from(layer.0) < cache.owners.len()).ok_or_else(|| {
            Failure::argument(format!("there is no layer {}: there are {}", call.layer, cache.owners.len()))
        })?;
        let owns = cache.owners[usize::from(layer.0)] == layer;
        let out = bytes(&call.out, "out")?;
        check_apart(&out, &bytes(&call.q, "q")?, "q")?;
        if owns {
            check_apart(&out, &bytes(&call.k, "k")?, "k")?;
            check_apart(&out, &bytes(&call.v, "v")?, "v")?;
        }
        let n_heads = if call.sinks.is_null() { 0 } else { cache.n_heads };
        // SAFETY: the caller keeps the contract above, and `out` overlaps none of the others.
        let call = unsafe {
            AttendRows {
                layer,
                q: rows(&call.q, "q")?,
                kv: match owns {
                    true => Some((rows(&call.k, "k")?, Some(rows(&call.v, "v")?))),
                    false => None,
                },
                out: rows_mut(&call.out, "out")?,
                scale: call.scale,
                softcap: (call.softcap != 0.0).then_some(call.softcap),
                sinks: (n_heads > 0).then_some(slice(call.sinks, n_heads, "sinks")?),
            }
        };
        cache.attend(call)
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_cache(cache, run) }
}
