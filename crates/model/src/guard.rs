//! Calls into crates that panic on some inputs. The panic is caught and becomes an error, and no panic message or
//! backtrace is printed to stderr.
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Returns `None` if `call` panicked. State that the call may have left inconsistent must not be used again, or must
/// only have been read.
pub(crate) fn quietly<T>(call: impl FnOnce() -> T) -> Option<T> {
    // The panic hook is global to the process. All other threads, and this thread outside of `call`, keep the previous
    // hook.
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
