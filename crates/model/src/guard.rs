//! Calls into crates that panic at some input. The panic is caught and becomes an error; nobody is to read its
//! report first, with a backtrace, on stderr.
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// `None` if `call` panicked. What it could have left half done must not be used again, or be only read.
pub(crate) fn quietly<T>(call: impl FnOnce() -> T) -> Option<T> {
    // The hook is one for the process: every other thread, and this one elsewhere, keeps what stood before.
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |panic| {
            if !QUIET.get() {
                before(panic);
            }
        }));
    });
    let before = QUIET.replace(true);
    let result = catch_unwind(AssertUnwindSafe(call));
    QUIET.set(before);
    result.ok()
}
