//! What a rendering may take: bytes of memory, and nesting.
//!
//! minijinja counts instructions (its fuel) and no bytes, and an allocation that fails ends the process. So every value
//! that a template makes, and every byte that it writes, is paid for before it is made ([`spend`]), from an allowance
//! that is set for the thread while it renders. What is freed is not paid back: the sum is a bound of what is there at
//! any time, and it needs no knowledge of which values live.
use crate::halt;
use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;

/// Bytes that the renderings of any conversation may take; and how many for each byte of the conversation. Templates of
/// models make some ten bytes for each that they are given. Those whose list grows by every message make 24 bytes for
/// each message and each one before it, at every thirtieth message.
const ALLOWANCE_BYTES: usize = 32 << 20;
const ALLOWANCE_FACTOR: usize = 16;

/// Values inside each other: what a request may bring, and what a template may make of it. Walks over values take a
/// frame of the stack for each.
pub(super) const MAX_REQUEST_DEPTH: usize = 64;
const MAX_DEPTH: usize = 100;

/// Items of a list that is only described (`list * n`, `list + list`): to walk it takes time, and little memory.
const MAX_ITEMS: usize = 1_000_000;

/// A value in a list or a map.
pub(super) const SLOT_BYTES: usize = 72;

/// What one rendering of so many bytes may take.
pub(super) fn of(bytes: usize) -> usize {
    ALLOWANCE_BYTES.saturating_add(bytes.saturating_mul(ALLOWANCE_FACTOR))
}

thread_local! {
    static LEFT: Cell<usize> = const { Cell::new(usize::MAX) };
    static LIMIT: Cell<usize> = const { Cell::new(usize::MAX) };
    /// The last sums of lists, and what they weigh: a list that grows by every message is not walked for each.
    static SUMS: RefCell<VecDeque<(Value, usize)>> = const { RefCell::new(VecDeque::new()) };
}

const MAX_SUMS: usize = 4;

/// Render on this thread within `limit` bytes.
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
        "the template takes more than the {} bytes that it may take for this conversation",
        LIMIT.get()
    ))
}

/// Pay for bytes that are about to be made. Also where a rendering that is to end ends.
pub(super) fn spend(bytes: usize) -> Result<(), Error> {
    halt::check().map_err(|e| refuse(e.to_string()))?;
    let left = LEFT.get().checked_sub(bytes).ok_or_else(too_much)?;
    LEFT.set(left);
    Ok(())
}

/// Refuse what could not be paid for.
pub(super) fn afford(bytes: usize) -> Result<(), Error> {
    if bytes > LEFT.get() { Err(too_much()) } else { Ok(()) }
}

/// Refuse a list that weighs more than a rendering may take, were it made.
pub(super) fn walkable(weight: usize) -> Result<(), Error> {
    if weight > LIMIT.get() { Err(too_much()) } else { Ok(()) }
}

/// Refuse a list of more items than may be walked.
pub(super) fn count(items: usize) -> Result<(), Error> {
    match items > MAX_ITEMS {
        true => Err(refuse(format!("a list of {items} items is too long; {MAX_ITEMS} are allowed"))),
        false => Ok(()),
    }
}

/// Items of a list or map, characters of a text at most; 1 of anything else.
pub(super) fn items(value: &Value) -> Result<usize, Error> {
    let n = match value.kind() {
        ValueKind::String | ValueKind::Bytes => return Ok(value.as_bytes().map_or(0, <[u8]>::len)),
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => match value.len() {
            Some(n) => n,
            // One whose length is known to its end alone.
            None => value.try_iter()?.take(MAX_ITEMS + 1).count(),
        },
        _ => 1,
    };
    count(n)?;
    Ok(n)
}

/// A list of its own instead of one that is a walk over another (`list[1:]`, `list * 2`): no walk is to be inside
/// another, and that one inside a third, because each takes a frame of the stack.
pub(super) fn listed(value: Value) -> Result<Value, Error> {
    if value.kind() != ValueKind::Iterable {
        return Ok(value);
    }
    let n = items(&value)?;
    spend((n + 1).saturating_mul(size_of::<Value>()))?;
    let mut list = Vec::with_capacity(n);
    for item in value.try_iter()? {
        // `zip` and `items` make theirs as they are walked.
        if item.is_tuple() {
            spend((items(&item)? + 1).saturating_mul(SLOT_BYTES))?;
        }
        list.push(item);
    }
    Ok(Value::from(list))
}

/// What two lists weigh together, and whether it stays so.
pub(super) fn weigh_sum(left: &Value, right: &Value) -> Result<(usize, bool), Error> {
    let (mut sum, mut stays) = (0_usize, true);
    for list in [left, right] {
        let (weight, so) = weighed(list, false)?;
        sum = sum.saturating_add(weight);
        stays &= so;
    }
    walkable(sum)?;
    Ok((sum, stays))
}

/// Remember what a sum weighs.
pub(super) fn remember(sum: &Value, weight: usize) {
    SUMS.with_borrow_mut(|sums| {
        if sums.len() == MAX_SUMS {
            sums.pop_front();
        }
        sums.push_back((sum.clone(), weight));
    });
}

/// Bytes of a value, with everything that it leads to, however often. Refused if that is more than a rendering may
/// take, or nested more deeply. `inside`: a namespace in it is refused too, because it may become part of itself.
///
/// It bounds time too: no list, made or only described, is there that weighs more, so that to compare two, to look for
/// something in one, or to sort it, comes to an end.
pub(super) fn weigh(value: &Value, inside: bool) -> Result<usize, Error> {
    weighed(value, inside).map(|(weight, _)| weight)
}

/// Beside it: whether it stays so. Namespaces and loops change.
fn weighed(value: &Value, inside: bool) -> Result<(usize, bool), Error> {
    fn walk(
        value: &Value,
        inside: bool,
        depth: usize,
        left: &mut usize,
        stays: &mut bool,
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
            return Err(refuse(format!("values are nested more than {MAX_DEPTH} deep")));
        };
        if kind == ValueKind::Map {
            let is = |name: &str| value.as_object().is_some_and(|object| object.type_name().ends_with(name));
            if is("::Namespace") {
                *stays = false;
                if inside {
                    return Err(refuse("a namespace cannot be put into a namespace"));
                }
            }
            *stays &= !is("::Loop");
            for key in value.try_iter()? {
                walk(&value.get_item(&key)?, inside, depth, left, stays)?;
                walk(&key, inside, depth, left, stays)?;
            }
        } else {
            for item in value.try_iter()? {
                walk(&item, inside, depth, left, stays)?;
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
    let (mut left, mut stays) = (limit, true);
    walk(value, inside, MAX_DEPTH, &mut left, &mut stays)?;
    Ok((limit - left, stays))
}

/// Bytes that a value has as a text, at most.
pub(super) fn text_bytes(value: &Value) -> Result<usize, Error> {
    match value.kind() {
        ValueKind::String => Ok(value.as_bytes().map_or(0, <[u8]>::len)),
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map | ValueKind::Bytes | ValueKind::Plain => {
            // A character inside a list may be written as `\u{10ffff}`.
            Ok(weigh(value, false)?.saturating_mul(10))
        }
        // 1e308 has all its digits.
        ValueKind::Number if !value.is_integer() => Ok(352),
        _ => Ok(48),
    }
}

/// Pay for `value in text`: what is no text itself is written as one.
pub(super) fn looked_for(value: &Value, container: &Value) -> Result<(), Error> {
    match container.kind() == ValueKind::String && value.kind() != ValueKind::String {
        true => spend(text_bytes(value)?.saturating_mul(3)),
        false => spend(0),
    }
}

/// A text that is paid for as it is written.
#[derive(Default)]
struct Paid {
    text: String,
    refused: Option<Error>,
}

impl fmt::Write for Paid {
    fn write_str(&mut self, more: &str) -> fmt::Result {
        // A text grows by doubling, and is copied as it grows.
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

/// What a template writes of a value: texts and numbers themselves, lists and maps as a text.
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
