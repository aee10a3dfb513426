//! What threads may share that the borrow checker cannot see: a closure that outlives its own borrow because its
//! owner waits, and a slice whose parts are taken once each.
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// A borrowed closure without its lifetime. Whoever made it must not let the borrow end while it may be called.
#[derive(Clone, Copy)]
pub struct Job(*const (dyn Fn(usize) + Sync));

// SAFETY: the closure is `Sync`, so calling it from any thread is fine; how long it lives is `call`'s condition.
unsafe impl Send for Job {}
// SAFETY: as above; a shared `Job` can do nothing but be called or copied.
unsafe impl Sync for Job {}

impl Job {
    pub fn new(work: &(dyn Fn(usize) + Sync)) -> Self {
        // SAFETY: only the lifetime changes; `call` demands that it still holds.
        Job(unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync), *const (dyn Fn(usize) + Sync + 'static)>(
                work,
            )
        })
    }

    /// # Safety
    /// The borrow that `new` was given has not ended.
    pub unsafe fn call(self, thread: usize) {
        // SAFETY: the caller's promise.
        unsafe { (*self.0)(thread) }
    }
}

/// A `[rows, width]` matrix cut into parts of neighbouring columns, each handed out once; and one `S` per thread.
pub struct Cut<'d, T, S> {
    data: *mut T,
    rows: usize,
    width: usize,
    columns: usize,
    scratch: *mut S,
    n_scratch: usize,
    next: AtomicUsize,
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

impl<'d, T, S> Cut<'d, T, S> {
    /// `columns` columns per part, the last one may be narrower. Panics if `data` is no whole number of rows.
    pub fn new(data: &'d mut [T], width: usize, columns: usize, scratch: &'d mut [S]) -> Self {
        assert!(width > 0 && columns > 0 && data.len().is_multiple_of(width), "no matrix of rows of {width}");
        Cut {
            rows: data.len() / width,
            data: data.as_mut_ptr(),
            width,
            columns,
            scratch: scratch.as_mut_ptr(),
            n_scratch: scratch.len(),
            next: AtomicUsize::new(0),
            borrowed: PhantomData,
        }
    }

    pub fn n_parts(&self) -> usize {
        self.width.div_ceil(self.columns)
    }

    /// Take parts until none is left.
    ///
    /// # Safety
    /// No two calls that overlap in time name the same `thread`.
    pub unsafe fn work(&self, thread: usize, f: &(dyn Fn(usize, Columns<'_, T>, &mut S) + Sync)) {
        assert!(thread < self.n_scratch, "thread {thread} has no scratch");
        // SAFETY: inside the slice; the caller promises that nobody else has this thread's number.
        let scratch = unsafe { &mut *self.scratch.add(thread) };
        loop {
            let part = self.next.fetch_add(1, Relaxed);
            if part >= self.n_parts() {
                return;
            }
            let first = part * self.columns;
            let columns = self.columns.min(self.width - first);
            // SAFETY: `first < width`, so the pointer stays inside the slice; the counter gives each part out once.
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
    /// This part of row `row`.
    pub fn row(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: rows are `width` apart and this part's columns lie inside each of them; parts are disjoint, and
        // `&mut self` lets go of one row before it gives the next.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(row * self.width), self.columns) }
    }
}
