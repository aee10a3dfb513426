//! Prompts of a batch that stay in its cache longer than others.
use crate::errors::argument;
use kvist_scheduler::Retention;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Unless `ttl_s` says otherwise.
const TTL_S: f64 = 3600.0;

/// As for `kvist serve`: 30 days.
const MAX_TTL_S: f64 = 2_592_000.0;

/// What `cache={"pin": True, "ttl_s": 3600, "priority": 2}` says; each key may be absent or `None`.
pub fn retention(cache: &Bound<'_, PyDict>) -> PyResult<Retention> {
    const NAMES: [&str; 3] = ["pin", "ttl_s", "priority"];
    for key in cache.keys() {
        if !NAMES.iter().any(|name| key.eq(name).unwrap_or(false)) {
            let key = key.repr()?;
            return Err(argument(format!("`cache`: there is no {key}; its keys are {}", NAMES.join(", "))));
        }
    }
    let ttl_s = field::<f64>(cache, "ttl_s")?.unwrap_or(TTL_S);
    if !(ttl_s > 0.0 && ttl_s <= MAX_TTL_S) {
        return Err(argument(format!(
            "`cache`: `ttl_s` is {ttl_s}: give seconds, more than 0 and at most {MAX_TTL_S}"
        )));
    }
    let priority = field::<i64>(cache, "priority")?.unwrap_or(0);
    let priority = u8::try_from(priority).map_err(|_| {
        argument(format!("`cache`: `priority` is {priority}: give a number from 0 to {}", u8::MAX))
    })?;
    let pin = field(cache, "pin")?.unwrap_or(false);
    Ok(Retention { ttl_ns: (ttl_s * 1e9) as u64, priority, pin })
}

fn field<'py, T>(cache: &Bound<'py, PyDict>, name: &str) -> PyResult<Option<T>>
where
    T: for<'a> FromPyObject<'a, 'py>,
{
    let Some(value) = cache.get_item(name)?.filter(|value| !value.is_none()) else { return Ok(None) };
    value.extract::<T>().map(Some).map_err(|error| {
        let error: PyErr = error.into();
        argument(format!("`cache`: `{name}`: {}", error.value(value.py())))
    })
}
