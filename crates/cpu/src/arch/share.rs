//! Sharing between threads that the borrow checker cannot verify: a closure used past its static borrow because its
//! owner waits, and a slice whose parts are each taken once.
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// A borrowed closure with its lifetime erased. Its creator must keep the borrow alive as long as it may be called.
#[derive(Clone, Copy)]
pub struct Job(*const (dyn Fn(usize) + Sync));

// SAFETY: the closure is `Sync`, so it may be called from any thread; its lifetime is the caller's obligation in
// `call`.
unsafe impl Send for Job {}
// SAFETY: as above; a shared `Job` can only be called or copied.
unsafe impl Sync for Job {}

impl Job {
    pub fn new(work: &(dyn Fn(usize) + Sync)) -> Self {
        // SAFETY: only the lifetime changes; `call` requires that the borrow is still valid.
        Job(unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync), *const (dyn Fn(usize) + Sync + 'static)>(
                work,
            )
        })
    }

    /// # Safety
    /// The borrow passed to `new` must still be alive.
    pub unsafe fn call(self, thread: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { (*self.0)(thread) }
    }
}

/// Maximum number of runs of consecutive parts that have separate counters; one run per thread up to this.
const RUNS: usize = 16;

/// The next part of a run, on its own cache line.
#[repr(align(64))]
struct Next(AtomicUsize);

/// A `[rows, width]` matrix cut into parts of consecutive columns, each handed out once; and one `S` per thread. A
/// thread takes the parts of its own run in order, so that it uses what it prefetches, and then helps with the
/// remaining parts of other runs.
pub struct Cut<'d, T, S> {
    data: *mut T,
    rows: usize,
    width: usize,
    columns: usize,
    scratch: *mut S,
    n_scratch: usize,
    /// Number of entries of `next` in use.
    runs: usize,
    next: [Next; RUNS],
    borrowed: PhantomData<(&'d mut [T], &'d mut [S])>,
}

// SAFETY: threads get disjoint `&mut [T]` and `&mut S`, which `Send` allows.
unsafe impl<T: Send, S: Send> Sync for Cut<'_, T, S> {}

/// One part: the same columns of every row.
pub struct Columns<'c, T> {
    data: *mut T,
    rows: usize,
    width: usize,
    columns: usize,
    borrowed: PhantomData<&'c mut [T]>,
}

/// The first part of run `run` of `runs`.
fn start(n_parts: usize, runs: usize, run: usize) -> usize {
    // In two steps to avoid overflow.
    n_parts / runs * run + n_parts % runs * run / runs
}

impl<'d, T, S> Cut<'d, T, S> {
    /// `columns` columns per part; the last part may be narrower. Panics if `data` is not a whole number of rows.
    pub fn new(data: &'d mut [T], width: usize, columns: usize, scratch: &'d mut [S]) -> Self {
        assert!(width > 0 && columns > 0 && data.len().is_multiple_of(width), "no matrix of rows of {width}");
        let (n_parts, runs) = (width.div_ceil(columns), scratch.len().clamp(1, RUNS));
        Cut {
            rows: data.len() / width,
            data: data.as_mut_ptr(),
            width,
            columns,
            scratch: scratch.as_mut_ptr(),
            n_scratch: scratch.len(),
            next: std::array::from_fn(|run| Next(AtomicUsize::new(start(n_parts, runs, run)))),
            runs,
            borrowed: PhantomData,
        }
    }

    pub fn n_parts(&self) -> usize {
        self.width.div_ceil(self.columns)
    }

    /// Processes parts until none is left.
    ///
    /// # Safety
    /// Calls that overlap in time must use different values of `thread`.
    pub unsafe fn work(&self, thread: usize, f: &(dyn Fn(usize, Columns<'_, T>, &mut S) + Sync)) {
        assert!(thread < self.n_scratch, "thread {thread} has no scratch");
        // SAFETY: inside the slice; the caller guarantees that no other thread uses this number.
        let scratch = unsafe { &mut *self.scratch.add(thread) };
        let (mut own, mut empty) = (thread % self.runs, 0);
        while empty < self.runs {
            let part = self.next[own].0.fetch_add(1, Relaxed);
            if part >= start(self.n_parts(), self.runs, own + 1) {
                (own, empty) = ((own + 1) % self.runs, empty + 1);
                continue;
            }
            let first = part * self.columns;
            let columns = self.columns.min(self.width - first);
            // SAFETY: `first < width`, so the pointer stays inside the slice; the run's counter hands out each part
            // once.
            let data = unsafe { self.data.add(first) };
            f(
                part,
                Columns { data, rows: self.rows, width: self.width, columns, borrowed: PhantomData },
                scratch,
            );
        }
    }
}

impl<T> Columns<'_, T> {
    /// This part's columns of row `row`.
    pub fn row(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: rows are `width` apart and this part's columns lie inside each of them. Parts are disjoint, and
        // `&mut self` ends the borrow of one row before the next is returned.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(row * self.width), self.columns) }
    }
}
