//! Limits on a rendering: bytes of memory, and nesting.
//!
//! minijinja counts instructions (its fuel) but not bytes, and a failed allocation aborts the process. So every value
//! that a template creates, and every byte that it writes, is charged in advance ([`spend`]) to a budget set for the
//! thread while it renders. Freed memory is not credited. The total is therefore an upper bound on live memory, and no
//! tracking of live values is needed.
use crate::halt;
use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;

/// Limit of a rendering in bytes: a base, and additional bytes per byte of the conversation. Templates of models
/// create about ten bytes per input byte. Templates that extend a list with every message create, at every thirtieth
/// message, 24 bytes for it and for each message before it.
const BASE_BYTES: usize = 32 << 20;
const FACTOR: usize = 16;

/// Maximum nesting of values, both in a request and in a template's own values. Walking a value takes a stack frame per
/// level.
pub(super) const MAX_REQUEST_DEPTH: usize = 64;
const MAX_DEPTH: usize = 100;

/// Maximum items of a lazy list (`list * n`, `list + list`): walking it takes time, but little memory.
const MAX_ITEMS: usize = 1_000_000;

/// Bytes charged per value in a list or a map.
pub(super) const SLOT_BYTES: usize = 72;

/// The limit in bytes of a rendering of a conversation of this many bytes.
pub(super) fn bytes_for(bytes: usize) -> usize {
    BASE_BYTES.saturating_add(bytes.saturating_mul(FACTOR))
}

thread_local! {
    static LEFT: Cell<usize> = const { Cell::new(usize::MAX) };
    static LIMIT: Cell<usize> = const { Cell::new(usize::MAX) };
    /// The last list sums and their weights, so that a list extended with every message is not walked again each time.
    static SUMS: RefCell<VecDeque<(Value, usize)>> = const { RefCell::new(VecDeque::new()) };
}

const MAX_SUMS: usize = 4;

/// Runs `render` on this thread with a limit of `limit` bytes.
pub(super) fn within<T>(limit: usize, render: impl FnOnce() -> T) -> T {
    struct Before(usize, usize);
    impl Drop for Before {
        fn drop(&mut self) {
            LEFT.set(self.0);
            LIMIT.set(self.1);
            SUMS.take();
        }
    }
    let _before = Before(LEFT.replace(limit), LIMIT.replace(limit));
    SUMS.take();
    render()
}

pub(super) fn refuse(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what.into())
}

fn too_much() -> Error {
    refuse(format!(
        "the template uses more than the {} bytes of memory that it may use for this conversation",
        LIMIT.get()
    ))
}

/// Charges bytes that are about to be allocated. Fails too if the rendering must stop.
pub(super) fn spend(bytes: usize) -> Result<(), Error> {
    halt::check().map_err(|e| refuse(e.to_string()))?;
    let left = LEFT.get().checked_sub(bytes).ok_or_else(too_much)?;
    LEFT.set(left);
    Ok(())
}

/// Fails if this many bytes could not be charged. Charges nothing.
pub(super) fn afford(bytes: usize) -> Result<(), Error> {
    if bytes > LEFT.get() { Err(too_much()) } else { Ok(()) }
}

/// Fails if a list of this weight would exceed the rendering's limit when materialised.
pub(super) fn walkable(weight: usize) -> Result<(), Error> {
    if weight > LIMIT.get() { Err(too_much()) } else { Ok(()) }
}

/// Fails if a list has too many items to walk.
pub(super) fn count(items: usize) -> Result<(), Error> {
    match items > MAX_ITEMS {
        true => Err(refuse(format!("a list of {items} items is too long; {MAX_ITEMS} are allowed"))),
        false => Ok(()),
    }
}

/// Number of items in a list or map, upper bound on the characters of a string, 1 for anything else.
pub(super) fn items(value: &Value) -> Result<usize, Error> {
    let n = match value.kind() {
        ValueKind::String | ValueKind::Bytes => return Ok(value.as_bytes().map_or(0, <[u8]>::len)),
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => match value.len() {
            Some(n) => n,
            // A list whose length is known only at its end.
            None => value.try_iter()?.take(MAX_ITEMS + 1).count(),
        },
        _ => 1,
    };
    count(n)?;
    Ok(n)
}

/// Materialises a lazy list (`list[1:]`, `list * 2`). Lazy lists must not be nested in each other, because each level
/// takes a stack frame.
pub(super) fn listed(value: Value) -> Result<Value, Error> {
    if value.kind() != ValueKind::Iterable {
        return Ok(value);
    }
    let n = items(&value)?;
    spend((n + 1).saturating_mul(size_of::<Value>()))?;
    let mut list = Vec::with_capacity(n);
    for item in value.try_iter()? {
        // `zip` and `items` create their items during the walk.
        if item.is_tuple() {
            spend((items(&item)? + 1).saturating_mul(SLOT_BYTES))?;
        }
        list.push(item);
    }
    Ok(Value::from(list))
}

/// The weight of two lists together, and whether it is constant.
pub(super) fn weigh_sum(left: &Value, right: &Value) -> Result<(usize, bool), Error> {
    let (mut sum, mut is_constant) = (0_usize, true);
    for list in [left, right] {
        let (weight, constant) = weighed(list, false)?;
        sum = sum.saturating_add(weight);
        is_constant &= constant;
    }
    walkable(sum)?;
    Ok((sum, is_constant))
}

/// Remembers the weight of a sum.
pub(super) fn remember(sum: &Value, weight: usize) {
    SUMS.with_borrow_mut(|sums| {
        if sums.len() == MAX_SUMS {
            sums.pop_front();
        }
        sums.push_back((sum.clone(), weight));
    });
}

/// The weight of a value: its bytes including everything it refers to, counted at every occurrence. Fails if it exceeds
/// the rendering's limit or is nested too deeply. `inside`: also fails on a namespace in it, because a namespace may
/// come to contain itself.
///
/// The limit bounds time as well: no list, materialised or lazy, weighs more, so comparing, searching and sorting lists
/// all end.
pub(super) fn weigh(value: &Value, inside: bool) -> Result<usize, Error> {
    weighed(value, inside).map(|(weight, _)| weight)
}

/// Like [`weigh`]; also returns whether the weight is constant. Namespaces and loops can change.
fn weighed(value: &Value, inside: bool) -> Result<(usize, bool), Error> {
    fn walk(
        value: &Value,
        inside: bool,
        depth: usize,
        left: &mut usize,
        is_constant: &mut bool,
    ) -> Result<(), Error> {
        let mut take = |bytes: usize| {
            *left = left.checked_sub(bytes).ok_or_else(too_much)?;
            Ok::<(), Error>(())
        };
        take(SLOT_BYTES)?;
        let kind = value.kind();
        match kind {
            ValueKind::String | ValueKind::Bytes => return take(value.as_bytes().map_or(0, <[u8]>::len)),
            ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => {}
            _ => return Ok(()),
        }
        let Some(depth) = depth.checked_sub(1) else {
            return Err(refuse(format!("values are nested more than {MAX_DEPTH} levels deep")));
        };
        if kind == ValueKind::Map {
            let is = |name: &str| value.as_object().is_some_and(|object| object.type_name().ends_with(name));
            if is("::Namespace") {
                *is_constant = false;
                if inside {
                    return Err(refuse("a namespace cannot be put into a namespace"));
                }
            }
            *is_constant &= !is("::Loop");
            for key in value.try_iter()? {
                walk(&value.get_item(&key)?, inside, depth, left, is_constant)?;
                walk(&key, inside, depth, left, is_constant)?;
            }
        } else {
            for item in value.try_iter()? {
                walk(&item, inside, depth, left, is_constant)?;
            }
        }
        Ok(())
    }
    let known = SUMS.with_borrow(|sums| {
        sums.iter().find(|(sum, _)| minijinja::tests::is_sameas(sum, value)).map(|(_, weight)| *weight)
    });
    if let Some(weight) = known {
        return Ok((weight, true));
    }
    let limit = LIMIT.get();
    let (mut left, mut is_constant) = (limit, true);
    walk(value, inside, MAX_DEPTH, &mut left, &mut is_constant)?;
    Ok((limit - left, is_constant))
}

/// Upper bound on the bytes of a value as a string.
pub(super) fn text_bytes(value: &Value) -> Result<usize, Error> {
    match value.kind() {
        ValueKind::String => Ok(value.as_bytes().map_or(0, <[u8]>::len)),
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map | ValueKind::Bytes | ValueKind::Plain => {
            // A character inside a list may be written as `\u{10ffff}`.
            Ok(weigh(value, false)?.saturating_mul(10))
        }
        // 1e308 is written with all its digits.
        ValueKind::Number if !value.is_integer() => Ok(352),
        _ => Ok(48),
    }
}

/// Charges for `value in text`: a value that is not a string is converted to one.
pub(super) fn looked_for(value: &Value, container: &Value) -> Result<(), Error> {
    match container.kind() == ValueKind::String && value.kind() != ValueKind::String {
        true => spend(text_bytes(value)?.saturating_mul(3)),
        false => spend(0),
    }
}

/// A string that is charged as it is written.
#[derive(Default)]
struct Paid {
    text: String,
    refused: Option<Error>,
}

impl fmt::Write for Paid {
    fn write_str(&mut self, more: &str) -> fmt::Result {
        // A string grows by doubling, and is copied as it grows.
        match spend(3 * more.len()) {
            Ok(()) => {
                self.text += more;
                Ok(())
            }
            Err(error) => {
                self.refused = Some(error);
                Err(fmt::Error)
            }
        }
    }
}

/// What a template writes for a value: strings and numbers directly, lists and maps as a string.
pub(super) fn as_written(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map | ValueKind::Bytes | ValueKind::Plain => {}
        _ => return Ok(value),
    }
    weigh(&value, false)?;
    let mut paid = Paid::default();
    let written = fmt::write(&mut paid, format_args!("{value}"));
    match (paid.refused, written) {
        (Some(error), _) => Err(error),
        (None, Err(_)) => Err(refuse("a value cannot be written")),
        (None, Ok(())) => {
            spend(paid.text.len())?;
            Ok(Value::from(paid.text))
        }
    }
}
