//! Whether the numbers of a schema are enforced as they are written: llguidance computes with `f64`, in which neighbouring integers from
//! 2⁵³ on are the same number, and then with `i64`.
//!
//! A number with a fraction or an exponent means its `f64` value, as it does to most readers of JSON.
use super::InvalidParameter;
use super::disjoint::INEXACT;
use serde_json::{Map, Number, Value};

/// 2⁶³: `i64` ends here.
const BEYOND: f64 = (1_u64 << 63) as f64;

/// Keywords whose value counts something.
pub(super) const COUNTS: [&str; 6] =
    ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"];

/// Writes counts such as `20.0` as integers, which they are in JSON Schema: clients that have doubles alone write them so, and
/// llguidance takes integers alone.
pub(super) fn count_in_integers(value: &mut Value) {
    match value {
        Value::Array(list) => list.iter_mut().for_each(count_in_integers),
        Value::Object(map) => {
            for (name, value) in map {
                let count =
                    value.as_f64().filter(|n| (0.0..=f64::from(u32::MAX)).contains(n) && n.fract() == 0.0);
                match count {
                    Some(n) if value.is_f64() && COUNTS.contains(&name.as_str()) => {
                        *value = (n as u64).into()
                    }
                    _ => count_in_integers(value),
                }
            }
        }
        _ => {}
    }
}

/// Refuses the numbers of one schema, without those of the schemas in it, that would be enforced as others.
pub(super) fn check(map: &Map<String, Value>, place: &str) -> Result<(), InvalidParameter> {
    let bad = |path: &str, number: &Number| {
        let what = format!(
            "is {number}, which cannot be enforced exactly: not every integer from 2^53 on can be; use a string for \
             large ones"
        );
        Err(InvalidParameter::new(&format!("{place}.{path}"), what))
    };
    for keyword in ["const", "enum"] {
        if let Some((path, number)) = map.get(keyword).and_then(inexact) {
            return bad(&format!("{keyword}{path}"), number);
        }
    }
    // In an old draft these keywords are booleans that make the other bound exclusive.
    let excludes = |keyword: &str| map.get(keyword) == Some(&Value::Bool(true));
    for (keyword, is_exact) in [
        ("minimum", is_bound as fn(&Number, bool) -> bool),
        ("maximum", is_upper_bound),
        ("exclusiveMinimum", is_bound),
        ("exclusiveMaximum", is_upper_bound),
        ("multipleOf", is_bound),
    ] {
        let Some(number) = map.get(keyword).and_then(Value::as_number) else { continue };
        let exclusive = match keyword {
            "minimum" => excludes("exclusiveMinimum"),
            "maximum" => excludes("exclusiveMaximum"),
            _ => keyword != "multipleOf",
        };
        if !is_exact(number, exclusive) {
            return bad(keyword, number);
        }
    }
    Ok(())
}

/// The first number in a value that is not enforced as such, and its path from there.
fn inexact(value: &Value) -> Option<(String, &Number)> {
    match value {
        Value::Number(number) => (!is_bound(number, false)).then(|| (String::new(), number)),
        Value::Array(list) => list.iter().enumerate().find_map(|(at, value)| {
            let (path, number) = inexact(value)?;
            Some((format!("[{at}]{path}"), number))
        }),
        Value::Object(map) => map.iter().find_map(|(name, value)| {
            let (path, number) = inexact(value)?;
            Some((format!(".{name}{path}"), number))
        }),
        _ => None,
    }
}

/// Whether answers are compared with this number itself. An exclusive bound of integers becomes the integer beside it.
fn is_bound(number: &Number, exclusive: bool) -> bool {
    let Some(x) = number.as_f64() else { return false };
    let is_written = number.as_i64().is_none_or(|n| x as i128 == i128::from(n));
    is_written && x.abs() < if exclusive { INEXACT } else { BEYOND }
}

/// Integers beyond `i64` are not generated, so a larger bound excludes none of those that are. `i64::MAX` is a usual one.
fn is_upper_bound(number: &Number, exclusive: bool) -> bool {
    let is_beyond = number.as_i64().is_none() && number.as_f64().is_some_and(|x| x >= BEYOND);
    is_beyond || (!exclusive && number.as_i64() == Some(i64::MAX)) || is_bound(number, exclusive)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn whole_counts_are_integers() {
        let mut schema = json!({"minItems": 1.0, "items": {"maxLength": 20.0, "minimum": 1.0}, "maxItems": 2.5,
            "anyOf": [{"minProperties": 0.0}, {"minLength": -1.0}]});
        count_in_integers(&mut schema);
        let expected = json!({"minItems": 1, "items": {"maxLength": 20, "minimum": 1.0}, "maxItems": 2.5,
            "anyOf": [{"minProperties": 0}, {"minLength": -1.0}]});
        assert_eq!(schema, expected);
    }
}
