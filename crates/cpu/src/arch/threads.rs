//! A thread pool whose workers spin briefly, then sleep.
//!
//! A decode step has about a hundred short parallel regions, a few microseconds apart. A sleeping thread would wake too
//! late for each of them, and a thread that spins forever takes a core from other work. So workers spin for [`SPIN`],
//! then sleep until the next region. Work is taken in small parts from a counter, and a region closes when its parts
//! are taken. A worker that has not joined by then is not waited for, so that a busy machine slows kvist down but does
//! not stop it.
//!
//! Results do not depend on the number of threads: every part is computed independently and in its own order.
use super::share::{Columns, Cut, Job};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*};
use std::sync::{Arc, Condvar, Mutex, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// How long a thread spins before it sleeps.
const SPIN: Duration = Duration::from_micros(60);
/// Looks, of a third of a microsecond to one, after which a spinning thread lets others run on its core between two. Two threads
/// of a region may share a core while another is idle, until the system moves one of them: many milliseconds, in which the one that
/// spins would take the time of the one that works.
const LOOKS: usize = 8;

/// Bits of the gate that workers pass to join a region: its number, whether it is open, how many workers are inside.
const OPEN: u64 = 1 << 16;
const INSIDE: u64 = OPEN - 1;
const REGION: u32 = 17;

struct Shared {
    gate: AtomicU64,
    job: Mutex<Option<Job>>, // locked only between closing and opening, and by workers inside: never contended long
    sleepers: AtomicUsize,
    bed: Mutex<()>,
    wake: Condvar,
    waiting: AtomicBool,
    left: Condvar,
    stop: AtomicBool,
    panicked: AtomicBool,
}

/// A fixed number of threads, including the caller's.
pub struct Threads {
    shared: Arc<Shared>,
    workers: Vec<std::thread::JoinHandle<()>>,
    /// Locked by the region in progress. A caller that finds it locked works alone.
    region: Mutex<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // A panic cannot leave the contents inconsistent: values are replaced as a whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Spins until `ready`, for at most [`SPIN`]. Returns whether it became ready.
fn spin(ready: impl Fn() -> bool) -> bool {
    let until = Instant::now() + SPIN;
    for look in 0.. {
        for _ in 0..32 {
            if ready() {
                return true;
            }
            std::hint::spin_loop();
        }
        if Instant::now() >= until {
            break;
        }
        if look >= LOOKS {
            std::thread::yield_now();
        }
    }
    false
}

impl Shared {
    fn worker(&self, thread: usize) {
        let mut seen = 0;
        loop {
            let has_work = || {
                let gate = self.gate.load(SeqCst);
                gate >> REGION != seen && gate & OPEN != 0 || self.stop.load(Relaxed)
            };
            if !spin(has_work) {
                let mut bed = lock(&self.bed);
                self.sleepers.fetch_add(1, SeqCst);
                while !has_work() {
                    bed = self.wake.wait(bed).unwrap_or_else(PoisonError::into_inner);
                }
                self.sleepers.fetch_sub(1, SeqCst);
            }
            if self.stop.load(Relaxed) {
                return;
            }
            let gate = self.gate.load(Acquire);
            if gate & OPEN == 0 || gate >> REGION == seen {
                continue;
            }
            if self.gate.compare_exchange(gate, gate + 1, AcqRel, Relaxed).is_err() {
                continue;
            }
            seen = gate >> REGION;
            let job = *lock(&self.job);
            if let Some(job) = job {
                // SAFETY: `run` does not return, and so the borrow does not end, while this thread is inside.
                let work = std::panic::AssertUnwindSafe(|| unsafe { job.call(thread) });
                if std::panic::catch_unwind(work).is_err() {
                    self.panicked.store(true, Release);
                }
            }
            let before = self.gate.fetch_sub(1, SeqCst);
            if before & (OPEN | INSIDE) == 1 && self.waiting.load(SeqCst) {
                drop(lock(&self.bed));
                self.left.notify_one();
            }
        }
    }
}

impl Threads {
    /// Creates `n` threads, at least one: the caller and `n - 1` workers. Creates fewer if the system refuses more.
    pub fn new(n: usize) -> Self {
        let shared = Arc::new(Shared {
            gate: AtomicU64::new(0),
            job: Mutex::new(None),
            sleepers: AtomicUsize::new(0),
            bed: Mutex::new(()),
            wake: Condvar::new(),
            waiting: AtomicBool::new(false),
            left: Condvar::new(),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
        });
        let spawn = |thread: usize| {
            let shared = shared.clone();
            std::thread::Builder::new()
                .name(format!("kvist-{thread}"))
                .spawn(move || shared.worker(thread))
                .ok()
        };
        let workers = (1..n.clamp(1, INSIDE as usize)).map_while(spawn).collect();
        Threads { shared, workers, region: Mutex::new(()) }
    }

    /// As many threads as the system reports this process can run in parallel.
    pub fn per_core() -> Self {
        Threads::new(std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// Number of threads, including the caller's.
    pub fn n(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `f(part, columns, scratch)` for every part of `columns` columns of the `[rows, width]` matrix `data`, on
    /// all available threads. Each thread has its own scratch; `scratch` has one entry per thread. A panic in `f` is
    /// propagated.
    pub fn columns<T: Send, S: Send>(
        &self,
        data: &mut [T],
        width: usize,
        columns: usize,
        scratch: &mut [S],
        f: impl Fn(usize, Columns<'_, T>, &mut S) + Sync,
    ) {
        assert!(scratch.len() >= self.n(), "{} scratches for {} threads", scratch.len(), self.n());
        if data.is_empty() {
            return;
        }
        let cut = Cut::new(data, width, columns, scratch);
        let n_parts = cut.n_parts();
        // SAFETY: `run` gives every thread a different number.
        let work = |thread: usize| unsafe { cut.work(thread, &f) };
        self.run(n_parts, &work);
    }

    /// Like [`columns`](Self::columns), over parts of consecutive elements.
    pub fn parts<T: Send, S: Send>(
        &self,
        data: &mut [T],
        part: usize,
        scratch: &mut [S],
        f: impl Fn(usize, &mut [T], &mut S) + Sync,
    ) {
        let width = data.len().max(1);
        self.columns(data, width, part, scratch, |i, mut columns, scratch| f(i, columns.row(0), scratch));
    }

    fn run(&self, n_parts: usize, work: &(dyn Fn(usize) + Sync)) {
        if n_parts <= 1 || self.workers.is_empty() {
            return work(0);
        }
        let _region = match self.region.try_lock() {
            Ok(region) => region,
            Err(TryLockError::Poisoned(panicked)) => panicked.into_inner(), // the lock guards no data
            Err(TryLockError::WouldBlock) => return work(0),
        };
        let shared = &*self.shared;
        *lock(&shared.job) = Some(Job::new(work));
        let number = (shared.gate.load(Relaxed) >> REGION) + 1;
        shared.gate.store(number << REGION | OPEN, SeqCst);
        if shared.sleepers.load(SeqCst) > 0 {
            drop(lock(&shared.bed));
            shared.wake.notify_all();
        }
        // Even after a panic here, wait for the other threads: they use borrowed data.
        let own = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(0)));
        shared.gate.fetch_and(!OPEN, AcqRel);
        let done = || shared.gate.load(SeqCst) & INSIDE == 0;
        if !spin(done) {
            let mut bed = lock(&shared.bed);
            shared.waiting.store(true, SeqCst);
            while !done() {
                let wait = shared.left.wait_timeout(bed, Duration::from_millis(5));
                bed = wait.unwrap_or_else(PoisonError::into_inner).0;
            }
            shared.waiting.store(false, SeqCst);
        }
        *lock(&shared.job) = None;
        let panicked = shared.panicked.swap(false, AcqRel);
        if let Err(panic) = own {
            std::panic::resume_unwind(panic);
        }
        assert!(!panicked, "a worker thread panicked");
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        drop(lock(&self.shared.bed));
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

impl std::fmt::Debug for Threads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} threads", self.n())
    }
}
