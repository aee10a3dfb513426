//! Ctrl-C, or a termination, ends the work at the next token, with the summary; a second one ends the program. Where
//! nothing is being computed the first one does: before [`listen`], while a model is loaded, and in [`idle`].
use std::sync::atomic::{AtomicBool, Ordering};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
static IDLE: AtomicBool = AtomicBool::new(false);

/// From here on Ctrl-C is heard by [`interrupted`].
pub fn listen() {
    // It can only fail if a handler stands already; then that one serves.
    let _ = ctrlc::set_handler(|| {
        if INTERRUPTED.swap(true, Ordering::SeqCst) || IDLE.load(Ordering::SeqCst) {
            std::process::exit(130);
        }
    });
}

pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::SeqCst)
}

/// Wait for something that no flag could end.
pub fn idle<T>(wait: impl FnOnce() -> T) -> T {
    IDLE.store(true, Ordering::SeqCst);
    // One that came a moment ago was not meant for what is read next.
    if interrupted() {
        std::process::exit(130);
    }
    let result = wait();
    IDLE.store(false, Ordering::SeqCst);
    result
}

/// Forget an interruption: the next turn of a chat starts unburdened.
pub fn reset() {
    INTERRUPTED.store(false, Ordering::SeqCst);
}
