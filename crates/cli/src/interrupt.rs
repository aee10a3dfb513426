//! Ctrl-C ends the work at the next token, with the summary; a second one ends the program.
use std::sync::atomic::{AtomicBool, Ordering};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// From here on Ctrl-C is heard by [`interrupted`].
pub fn listen() {
    // It can only fail if a handler stands already; then that one serves.
    let _ = ctrlc::set_handler(|| {
        if INTERRUPTED.swap(true, Ordering::SeqCst) {
            std::process::exit(130);
        }
    });
}

pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::SeqCst)
}

/// Forget an interruption: the next turn of a chat starts unburdened.
pub fn reset() {
    INTERRUPTED.store(false, Ordering::SeqCst);
}
