//! The process environment, which only unsafe code may change. The only unsafe code of this program.
#![allow(unsafe_code)]

/// Make every thread pool that starts later (rayon's and candle's, which read these variables once) have `threads`
/// threads. To be called before any work.
pub fn set_threads(threads: u16) {
    for name in ["RAYON_NUM_THREADS", "CANDLE_NUM_THREADS"] {
        // SAFETY: nothing else reads or writes the environment meanwhile. The program has started no thread but the
        // one that waits for Ctrl-C, and that one only waits.
        unsafe { std::env::set_var(name, threads.to_string()) };
    }
}
