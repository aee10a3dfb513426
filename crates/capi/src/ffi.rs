//! The boundary: arguments from C are checked and turned into references here, and no panic leaves it.
#![allow(unsafe_code)]
use crate::handle::Idle;
use crate::status::{Failure, Outcome, kvist_status, last_error, set_last_error};
use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The version of the library, such as "0.1.0". A static string.
#[unsafe(no_mangle)]
pub extern "C" fn kvist_version() -> *const c_char {
    const { concat!(env!("CARGO_PKG_VERSION"), "\0") }.as_ptr().cast()
}

/// The text of the last error on the calling thread, in UTF-8; empty if there was none. Valid until the next failing call on
/// this thread. Never null.
#[unsafe(no_mangle)]
pub extern "C" fn kvist_last_error() -> *const c_char {
    last_error()
}

/// Runs the body of an exported function: an error becomes its status and this thread's last text, a panic becomes
/// `KVIST_INTERNAL_ERROR`. What a panic leaves half done stays behind a poisoned lock.
pub(crate) fn guard(run: impl FnOnce() -> Outcome<()>) -> kvist_status {
    let failure = match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => return kvist_status::KVIST_OK,
        Ok(Err(failure)) => failure,
        Err(panic) => {
            let why = panic.downcast_ref::<&str>().map(|why| why.to_string());
            let why = why.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
            Failure::new(kvist_status::KVIST_INTERNAL_ERROR, format!("a defect of kvist: {why}"))
        }
    };
    set_last_error(&failure.text);
    failure.status
}

fn is_null(what: &str) -> Failure {
    Failure::argument(format!("{what} is null"))
}

/// # Safety
/// `pointer` is null, or points to a value that is valid for `'a`.
pub(crate) unsafe fn reference<'a, T>(pointer: *const T, what: &str) -> Outcome<&'a T> {
    // SAFETY: as the caller promises.
    unsafe { pointer.as_ref() }.ok_or_else(|| is_null(what))
}

/// A place for a result.
///
/// # Safety
/// `pointer` is null, or points to memory for a `T` that nothing else uses during `'a`.
pub(crate) unsafe fn out<'a, T>(pointer: *mut T, what: &str) -> Outcome<&'a mut MaybeUninit<T>> {
    // SAFETY: as the caller promises; `MaybeUninit` needs no initialised memory.
    unsafe { pointer.cast::<MaybeUninit<T>>().as_mut() }.ok_or_else(|| is_null(what))
}

/// `n` elements; `pointer` may be null if `n` is 0.
///
/// # Safety
/// `pointer` is null, or points to `n` values that are valid for `'a` and not changed during it.
pub(crate) unsafe fn slice<'a, T>(pointer: *const T, n: usize, what: &str) -> Outcome<&'a [T]> {
    if n == 0 {
        return Ok(&[]);
    }
    check_elements(pointer, n, what)?;
    // SAFETY: not null, aligned and below the largest size of an object; the rest as the caller promises.
    Ok(unsafe { std::slice::from_raw_parts(pointer, n) })
}

/// Like [`slice`], for elements that are written.
///
/// # Safety
/// `pointer` is null, or points to `n` initialised values that nothing else uses during `'a`.
pub(crate) unsafe fn slice_mut<'a, T>(pointer: *mut T, n: usize, what: &str) -> Outcome<&'a mut [T]> {
    if n == 0 {
        return Ok(&mut []);
    }
    check_elements(pointer, n, what)?;
    // SAFETY: as in `slice`.
    Ok(unsafe { std::slice::from_raw_parts_mut(pointer, n) })
}

fn check_elements<T>(pointer: *const T, n: usize, what: &str) -> Outcome<()> {
    if pointer.is_null() {
        return Err(is_null(what));
    }
    if !pointer.is_aligned() {
        return Err(Failure::argument(format!("{what} is not aligned to {} bytes", align_of::<T>())));
    }
    if n.checked_mul(size_of::<T>()).is_none_or(|bytes| isize::try_from(bytes).is_err()) {
        return Err(Failure::argument(format!("{what}: {n} elements are more than memory holds")));
    }
    Ok(())
}

/// # Safety
/// `pointer` is null, or points to a null-terminated string that is valid for `'a`.
pub(crate) unsafe fn text<'a>(pointer: *const c_char, what: &str) -> Outcome<&'a str> {
    // SAFETY: as the caller promises.
    unsafe { optional_text(pointer, what) }?.ok_or_else(|| is_null(what))
}

/// Like [`text`]; null is none.
///
/// # Safety
/// As [`text`].
pub(crate) unsafe fn optional_text<'a>(pointer: *const c_char, what: &str) -> Outcome<Option<&'a str>> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: not null; the rest as the caller promises.
    let text = unsafe { CStr::from_ptr(pointer) }.to_str();
    text.map(Some).map_err(|why| Failure::argument(format!("{what} is not UTF-8: {why}")))
}

/// Gives a value to C.
pub(crate) fn give<T>(value: T) -> *mut T {
    Box::into_raw(Box::new(value))
}

/// Frees what [`give`] gave; null is nothing. Refuses a handle in use.
///
/// # Safety
/// `pointer` is null, or came from [`give`] and was not freed since.
pub(crate) unsafe fn free<T, H: Idle>(pointer: *mut T, handle: impl Fn(&T) -> &H) -> Outcome<()> {
    // SAFETY: as the caller promises.
    let Some(value) = (unsafe { pointer.as_ref() }) else { return Ok(()) };
    if !handle(value).is_idle() {
        return Err(Failure::new(
            kvist_status::KVIST_BUSY,
            "the handle is in use by another call: not freed",
        ));
    }
    // SAFETY: not null; the rest as the caller promises.
    drop(unsafe { Box::from_raw(pointer) });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handle::Handle;

    fn last() -> String {
        // SAFETY: the text lives until the next failing call of this thread.
        unsafe { CStr::from_ptr(kvist_last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_becomes_a_status_and_breaks_only_its_handle() {
        let handle = Handle::new(1);
        let broken = guard(|| handle.with(|_| -> Outcome<()> { panic!("row {}", 7) }));
        assert_eq!(broken, kvist_status::KVIST_INTERNAL_ERROR);
        assert_eq!(last(), "a defect of kvist: row 7");
        assert_eq!(guard(|| handle.with(|_| Ok(()))), kvist_status::KVIST_INTERNAL_ERROR);
        assert!(last().contains("free the handle"), "{}", last());
        assert!(handle.is_idle());
        assert_eq!(guard(|| Handle::new(1).with(|_| Ok(()))), kvist_status::KVIST_OK);
    }

    #[test]
    fn texts_of_errors_belong_to_their_thread_and_have_no_zero_byte() {
        guard(|| Err(Failure::argument("first\0second")));
        std::thread::spawn(|| assert_eq!(last(), "")).join().unwrap();
        assert_eq!(last(), "first\u{fffd}second");
    }

    #[test]
    fn elements_are_checked_before_they_are_read() {
        let refused = |pointer: *const u32, n| {
            // SAFETY: `slice` refuses all of these without reading.
            unsafe { slice(pointer, n, "tokens") }.map(|_| ()).unwrap_err().text
        };
        assert_eq!(refused(std::ptr::null(), 1), "tokens is null");
        assert_eq!(refused(std::ptr::without_provenance(6), 1), "tokens is not aligned to 4 bytes");
        assert!(refused(std::ptr::without_provenance(8), usize::MAX / 4).contains("more than memory holds"));
        // SAFETY: no element is read.
        assert!(unsafe { slice::<u32>(std::ptr::null(), 0, "tokens") }.unwrap().is_empty());
    }
}
