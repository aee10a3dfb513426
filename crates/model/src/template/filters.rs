//! Filters, functions and methods for templates. Each is charged before it allocates.
//!
//! These are minijinja's own filters and Python's methods, wrapped with a cost: an upper bound on the bytes they
//! create, computed from the sizes of their arguments.
use super::dates::strftime_now;
use super::json::tojson;
use super::limits::{SLOT_BYTES, items, listed, looked_for, refuse, spend, text_bytes, weigh};
use minijinja::value::{Rest, Value, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, filters, functions, tests};
use minijinja_contrib::pycompat::unknown_method_callback;

/// What a filter or a method creates from its first value and the others.
#[derive(Clone, Copy)]
enum Makes {
    /// One of its values, a number, or a lazy value.
    Nothing,
    /// A multiple of the first value's text.
    Text(usize),
    /// A list of the items of all values. If `nested`, each item becomes a list.
    List {
        nested: bool,
    },
    /// Pieces of a text.
    Pieces,
    Joined,
    Replaced,
    Indented,
    Formatted,
}

/// A string built piece by piece grows by doubling, is copied as it grows, and once more when complete.
const GROWTH: usize = 4;

/// Upper bound on the bytes that `made` takes for these values. `values[0]` is what the filter is applied to.
fn cost(made: Makes, values: &[Value]) -> Result<usize, Error> {
    let first = values.first().cloned().unwrap_or_default();
    let text = || text_bytes(&first);
    let others = values.get(1..).unwrap_or_default();
    Ok(match made {
        Makes::Nothing => 0,
        Makes::Text(times) => text()?.saturating_mul(times).saturating_mul(2),
        Makes::List { .. } => {
            let mut n = 0_usize;
            for value in values {
                // A number argument gives the width to pad to.
                n = n.saturating_add(value.as_usize().map_or_else(|| items(value), Ok)?);
            }
            n.saturating_mul(2 * SLOT_BYTES)
        }
        Makes::Pieces => {
            let given = first.as_str().unwrap_or_default();
            let pieces = match others.first().and_then(Value::as_str) {
                Some(by) => given.matches(by).count(),
                None => given.chars().filter(|c| c.is_whitespace()).count(),
            };
            text()?.saturating_mul(2).saturating_add((pieces + 2).saturating_mul(2 * SLOT_BYTES))
        }
        Makes::Joined => joined(&first, others.first())?,
        Makes::Replaced => {
            let given = text()?;
            let [from, to] = [0, 1].map(|at| others.get(at).and_then(Value::as_str).unwrap_or_default());
            let found = first.as_str().map_or(given, |given| given.matches(from).count());
            given.saturating_add(found.saturating_mul(to.len())).saturating_mul(GROWTH)
        }
        Makes::Indented => {
            let lines = 1 + first.as_str().map_or(0, |text| text.matches('\n').count());
            text()?.saturating_add(lines.saturating_mul(1 + largest(others))).saturating_mul(GROWTH)
        }
        Makes::Formatted => {
            let format = first.as_str().unwrap_or_default();
            // Widths are in the format or among the values. Each placeholder may take any value, also from a map.
            let mut place = largest(others).saturating_add(192); // 128 digits, in fours
            for value in others {
                place = place.max(text_bytes(value)?.saturating_add(largest(others)));
            }
            let places = format.matches(['%', '{']).count();
            let bytes = format.len().saturating_add(widths(format));
            bytes.saturating_add(places.saturating_mul(place)).saturating_mul(GROWTH)
        }
    })
}

/// A list joined to a string with `by` between its items.
fn joined(list: &Value, by: Option<&Value>) -> Result<usize, Error> {
    let by = by.map_or(Ok(0), text_bytes)?;
    let mut bytes = 0_usize;
    let n = items(list)?;
    if let Ok(all) = list.try_iter() {
        for item in all {
            bytes = bytes.saturating_add(text_bytes(&item)?);
        }
    }
    Ok(bytes.saturating_add(n.saturating_mul(by)).saturating_mul(GROWTH))
}

/// The largest number among the values, including named ones.
fn largest(values: &[Value]) -> usize {
    let named = |value: &Value| -> usize {
        let Ok(names) = value.try_iter() else { return 0 };
        names.filter_map(|name| value.get_item(&name).ok()?.as_usize()).max().unwrap_or(0)
    };
    let number =
        |value: &Value| value.as_usize().unwrap_or_else(|| if value.is_kwargs() { named(value) } else { 0 });
    values.iter().map(number).max().unwrap_or(0)
}

/// The sum of all numbers in a format, which include its widths and precisions.
fn widths(format: &str) -> usize {
    let numbers = format.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    numbers.map(|digits| digits.parse().unwrap_or(usize::MAX)).fold(0, usize::saturating_add)
}

fn pay(made: Makes, values: &[Value]) -> Result<(), Error> {
    spend(cost(made, values)?)
}

/// Created lists may nest values: check their number and their depth.
fn seen(made: Makes, value: Value) -> Result<Value, Error> {
    if matches!(made, Makes::List { nested: true }) {
        weigh(&value, false)?;
    }
    Ok(value)
}

pub(super) fn register(environment: &mut Environment<'static>) {
    let list = Makes::List { nested: false };
    let lists = Makes::List { nested: true };
    macro_rules! filters {
        ($($makes:expr => $($name:literal: $filter:ident),*;)*) => {$($({
            let filter = Value::from_function(filters::$filter);
            let makes = $makes;
            environment.add_filter($name, move |state: &mut State, values: Rest<ValueOrKwargs>| {
                let values = values.into_values();
                pay(makes, &values)?;
                seen(makes, filter.call(state, &values)?)
            });
        })*)*};
    }
    filters! {
        Makes::Nothing => "default": default, "d": default, "round": round, "abs": abs, "int": int, "float": float,
            "attr": attr, "first": first, "last": last, "min": min, "max": max, "length": length, "count": length,
            "bool": bool;
        Makes::Text(1) => "safe": safe, "string": string, "trim": trim;
        Makes::Text(3) => "lower": lower, "upper": upper, "title": title, "capitalize": capitalize, "sum": sum,
            "pprint": pprint;
        Makes::Text(8) => "escape": escape, "e": escape;
        list => "list": list, "sort": sort, "unique": unique, "reverse": reverse, "map": map, "select": select,
            "reject": reject, "selectattr": selectattr, "rejectattr": rejectattr;
        lists => "batch": batch, "slice": slice, "groupby": groupby, "items": items, "dictsort": dictsort;
        Makes::Pieces => "split": split, "lines": lines;
        Makes::Joined => "join": join;
        Makes::Replaced => "replace": replace;
        Makes::Indented => "indent": indent;
        Makes::Formatted => "format": format;
    }
    // These create lazy lists over their input, or maps of maps.
    let (chain, zip) = (Value::from_function(filters::chain), Value::from_function(filters::zip));
    environment.add_filter("chain", move |state: &mut State, values: Rest<ValueOrKwargs>| {
        let values = values.into_values();
        pay(lists, &values)?;
        let chained = chain.call(state, &values)?;
        weigh(&chained, false)?;
        let items: Vec<Value> = chained.try_iter()?.collect();
        Ok::<_, Error>(match chained.kind() {
            ValueKind::Map => {
                let pairs = items.into_iter().map(|key| Ok((key.clone(), chained.get_item(&key)?)));
                Value::from_pairs(pairs.collect::<Result<Vec<(Value, Value)>, Error>>()?)
            }
            ValueKind::Iterable => {
                Value::make_object_iterable(items, |items| Box::new(items.iter().cloned()))
            }
            _ => Value::from(items),
        })
    });
    environment.add_filter("zip", move |state: &mut State, values: Rest<ValueOrKwargs>| {
        let values = values.into_values();
        pay(lists, &values)?;
        let values = values.into_iter().map(listed).collect::<Result<Vec<Value>, Error>>()?;
        seen(lists, zip.call(state, &values)?)
    });
    // `select` and similar filters call it for each of their items.
    environment.add_test("in", |state: &State, value: &Value, list: &Value| {
        looked_for(value, list)?;
        tests::is_in(state, value, list)
    });
    environment.add_filter("tojson", tojson);
    environment.set_unknown_method_callback(method);
    register_functions(environment);
}

fn register_functions(environment: &mut Environment<'static>) {
    for (name, function) in [
        ("dict", Value::from_function(functions::dict)),
        ("namespace", Value::from_function(functions::namespace)),
    ] {
        environment.add_function(name, move |state: &mut State, values: Rest<ValueOrKwargs>| {
            let values = values.into_values();
            pay(Makes::List { nested: false }, &values)?;
            function.call(state, &values)
        });
    }
    environment.add_function("raise_exception", |text: String| -> Result<Value, Error> { Err(refuse(text)) });
    environment.add_function("strftime_now", strftime_now);
    // Dumps the whole context, and is not part of Jinja.
    environment.remove_global("debug");
}

/// Python's methods.
fn method(state: &mut State, value: &Value, name: &str, others: &[Value]) -> Result<Value, Error> {
    let is_text = value.as_str().is_some();
    let makes = match name {
        "upper" | "lower" | "title" | "capitalize" => Makes::Text(3),
        "strip" | "lstrip" | "rstrip" => Makes::Text(1),
        "split" | "splitlines" => Makes::Pieces,
        "replace" => Makes::Replaced,
        "format" => Makes::Formatted,
        "items" => Makes::List { nested: true },
        "join" if is_text => {
            let all = others.first().cloned().unwrap_or_default();
            spend(joined(&all, Some(value))?)?;
            Makes::Nothing
        }
        _ => Makes::Nothing,
    };
    let mut values = vec![value.clone()];
    values.extend_from_slice(others);
    pay(makes, &values)?;
    seen(makes, unknown_method_callback(state, value, name, others)?)
}
