//! A compiled template with checks before instructions that create values, and after those whose values nest.
//!
//! minijinja's operators (`~`, `+`, `*`, slices) and its output are implemented inside its VM, out of reach of filters.
//! So the program is copied, with calls of checking filters inserted at those instructions, under names that no
//! template can write. The filters return their input: the program does the same as before, or stops.
use super::limits::{
    SLOT_BYTES, afford, as_written, count, items, listed, looked_for, refuse, remember, spend, text_bytes,
    walkable, weigh, weigh_sum,
};
use minijinja::machinery::{Instruction, Instructions, eval, get_compiled_template, make_string_output};
use minijinja::value::{Rest, Value, ValueKind, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error};
use self_cell::self_cell;
use std::cell::Cell;
use std::collections::BTreeMap;

const RAW: &str = "(raw)";
const WRITTEN: &str = "(written)";
const ADDED: &str = "(added)";
const SUM: &str = "(sum)";
const MULTIPLIED: &str = "(multiplied)";
const JOINED: &str = "(joined)";
const SLICED: &str = "(sliced)";
const SPREAD: &str = "(spread)";
const MADE: &str = "(made)";
const ATTRIBUTE: &str = "(attribute)";
const FOUND: &str = "(found)";
const ROUND: &str = "(round)";
const ANOTHER: &str = "(another)";

const CLOSURE_BYTES: usize = 512;

/// The filter is looked up again each time, because minijinja has few places to cache look-ups.
const NOT_REMEMBERED: u8 = !0;

fn call<'s>(filter: &'static str, values: usize) -> Instruction<'s> {
    Instruction::ApplyFilter(filter, u16::try_from(values).ok(), NOT_REMEMBERED)
}

/// Checks this many values on top of the stack and leaves them there.
fn see<'s>(filter: &'static str, values: usize) -> Vec<Instruction<'s>> {
    vec![call(filter, values), Instruction::UnpackList(values)]
}

/// Checks a number.
fn note<'s>(filter: &'static str, number: usize) -> Vec<Instruction<'s>> {
    vec![Instruction::LoadConst(Value::from(number)), call(filter, 1), Instruction::DiscardTop]
}

fn before<'s>(instruction: &Instruction<'s>) -> Vec<Instruction<'s>> {
    match instruction {
        Instruction::EmitRaw(text) => note(RAW, text.len()),
        Instruction::Emit => vec![call(WRITTEN, 1)],
        Instruction::Add => see(ADDED, 2),
        Instruction::Mul => see(MULTIPLIED, 2),
        Instruction::StringConcat => see(JOINED, 2),
        Instruction::Slice => see(SLICED, 4),
        Instruction::SetAttr(_) => see(ATTRIBUTE, 2),
        Instruction::UnpackLists(n) if *n > 0 => see(SPREAD, *n),
        Instruction::In | Instruction::CompareAndPreserve(_) => see(FOUND, 2),
        Instruction::Iterate(_) => note(ROUND, 0),
        // The variables that a macro captures live as long as the rendering, with an entry per name.
        Instruction::Enclose(_) | Instruction::BuildMacro(..) => note(RAW, CLOSURE_BYTES),
        Instruction::Include(_) | Instruction::LoadBlocks | Instruction::ExportLocals => {
            vec![call(ANOTHER, 1)]
        }
        _ => Vec::new(),
    }
}

fn behind<'s>(instruction: &Instruction<'s>) -> Option<Instruction<'s>> {
    match instruction {
        Instruction::BuildMap(_)
        | Instruction::BuildKwargs(_)
        | Instruction::MergeKwargs(_)
        | Instruction::BuildList(_)
        | Instruction::BuildTuple(_) => Some(call(MADE, 1)),
        Instruction::Add => Some(call(SUM, 1)),
        _ => None,
    }
}

/// The rewritten copy of one template. It borrows names and strings from the environment that compiled the template.
struct Programs<'e> {
    main: Instructions<'e>,
    blocks: BTreeMap<&'e str, Instructions<'e>>,
    escape: AutoEscape,
}

impl<'e> Programs<'e> {
    fn new(environment: &'e Environment<'static>, name: &str) -> Result<Self, Error> {
        let template = environment.get_template(name)?;
        let compiled = get_compiled_template(&template);
        Ok(Programs {
            main: guarded(&compiled.instructions),
            blocks: compiled.blocks.iter().map(|(name, block)| (*name, guarded(block))).collect(),
            escape: compiled.initial_auto_escape.clone(),
        })
    }
}

self_cell! {
    struct Cells {
        owner: Environment<'static>,
        #[covariant]
        dependent: Programs,
    }
}

/// A template with its checks. They are inserted once.
pub(super) struct Guarded(Cells);

impl Guarded {
    /// `environment` must have compiled a template of this name, and have the check filters [`register`]ed.
    pub fn new(environment: Environment<'static>, name: &str) -> Result<Self, Error> {
        Cells::try_new(environment, |environment| Programs::new(environment, name)).map(Guarded)
    }

    pub fn render(&self, values: Value) -> Result<String, Error> {
        self.0.with_dependent(|environment, programs| {
            let mut text = String::new();
            let mut out = make_string_output(&mut text);
            let escape = programs.escape.clone();
            eval(environment, &programs.main, values, &programs.blocks, &mut out, escape)?;
            drop(out);
            Ok(text)
        })
    }
}

/// The same program with checks.
fn guarded<'s>(program: &Instructions<'s>) -> Instructions<'s> {
    let all = || (0..).map_while(|at| program.get(at));
    let checks: Vec<_> = all().map(|instruction| (before(instruction), behind(instruction))).collect();
    // The new position of each instruction, including the checks before it; and the end.
    let mut places = Vec::with_capacity(checks.len() + 1);
    let mut n = 0_u32;
    for (before, behind) in &checks {
        places.push(n);
        n += 1 + before.len() as u32 + u32::from(behind.is_some());
    }
    places.push(n);
    let to = |at: u32| places.get(at as usize).copied().unwrap_or(n);
    let mut out = Instructions::new(program.name(), program.source());
    for ((at, instruction), (before, behind)) in (0..).zip(all()).zip(checks) {
        let moved = match instruction {
            Instruction::Iterate(target) => Instruction::Iterate(to(*target)),
            Instruction::Jump(target) => Instruction::Jump(to(*target)),
            Instruction::JumpIfFalse(target) => Instruction::JumpIfFalse(to(*target)),
            Instruction::JumpIfFalseOrPop(target) => Instruction::JumpIfFalseOrPop(to(*target)),
            Instruction::JumpIfTrueOrPop(target) => Instruction::JumpIfTrueOrPop(to(*target)),
            Instruction::BuildMacro(name, target, flags) => {
                Instruction::BuildMacro(name, to(*target), *flags)
            }
            other => other.clone(),
        };
        let line = program.get_line(at).and_then(|line| u16::try_from(line).ok());
        for instruction in before.into_iter().chain([moved]).chain(behind) {
            match line {
                Some(line) => out.add_with_line(instruction, line),
                None => out.add(instruction),
            };
        }
    }
    out
}

thread_local! {
    /// The weight of the lists that are about to be added.
    static PENDING: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Registers the check filters.
pub(super) fn register(environment: &mut Environment<'static>) {
    environment.add_filter(RAW, raw);
    environment.add_filter(WRITTEN, written);
    environment.add_filter(ADDED, added);
    environment.add_filter(SUM, sum);
    environment.add_filter(MULTIPLIED, multiplied);
    environment.add_filter(JOINED, joined);
    environment.add_filter(SLICED, sliced);
    environment.add_filter(SPREAD, spread);
    environment.add_filter(MADE, made);
    environment.add_filter(ATTRIBUTE, attribute);
    environment.add_filter(FOUND, found);
    environment.add_filter(ROUND, round);
    environment.add_filter(ANOTHER, another);
}

type Seen = Result<Value, Error>;
// Keyword arguments count as a value.
type Given = Rest<ValueOrKwargs>;

fn value(values: &[Value], at: usize) -> Value {
    values.get(at).cloned().unwrap_or_default()
}

/// Unpacking a list leaves its first item on top of the stack.
fn back(values: Vec<Value>) -> Value {
    Value::from(values.into_iter().rev().collect::<Vec<Value>>())
}

fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

fn raw(bytes: usize) -> Seen {
    spend(bytes.saturating_mul(3))?;
    Ok(Value::UNDEFINED)
}

fn written(values: Given) -> Seen {
    let written = as_written(value(&values.into_values(), 0))?;
    // A string grows by doubling, and is copied as it grows.
    spend(text_bytes(&written)?.saturating_mul(3))?;
    Ok(written)
}

fn added(values: Given) -> Seen {
    let values = values.into_values();
    let [left, right] = [value(&values, 0), value(&values, 1)];
    PENDING.set(None);
    if is_list(&left) && is_list(&right) {
        // Repeated sums of empty lists must not form a chain of 2^n lists. A list of unknown length would be
        // materialised without end.
        let plain = |list: Value| match list.len() {
            Some(0) if list.kind() == ValueKind::Iterable => Ok(Value::from(Vec::<Value>::new())),
            Some(_) => Ok(list),
            None => listed(list),
        };
        let (left, right) = (plain(left)?, plain(right)?);
        let n = items(&left)? + items(&right)?;
        count(n)?;
        let (weight, stays) = weigh_sum(&left, &right)?;
        PENDING.set(stays.then_some(weight));
        // Long chains of lazy lists are materialised.
        afford((n + 1) * size_of::<Value>())?;
        spend(2 * SLOT_BYTES)?;
        return Ok(Value::from(vec![right, left]));
    } else if let (Some(left), Some(right)) = (left.as_str(), right.as_str()) {
        // Joined, then copied into a value.
        spend(2 * (left.len() + right.len()))?;
    }
    Ok(back(values))
}

fn sum(values: Given) -> Seen {
    let sum = value(&values.into_values(), 0);
    if sum.kind() == ValueKind::Seq {
        spend((items(&sum)? + 1).saturating_mul(size_of::<Value>()))?;
    }
    if let Some(weight) = PENDING.take() {
        remember(&sum, weight);
    }
    Ok(sum)
}

fn multiplied(values: Given) -> Seen {
    let mut values = values.into_values();
    for at in [0, 1] {
        let (many, times) = (value(&values, at), value(&values, 1 - at));
        let Some(times) = times.as_usize() else { continue };
        if let Some(text) = many.as_str() {
            spend(text.len().saturating_mul(times).saturating_mul(2))?;
        } else if is_list(&many) {
            let many = listed(many)?;
            let n = items(&many)?.saturating_mul(times);
            count(n)?;
            walkable(weigh(&many, false)?.saturating_mul(times))?;
            spend(if many.is_tuple() { n * size_of::<Value>() } else { SLOT_BYTES })?;
            values[at] = many;
        }
    }
    Ok(back(values))
}

fn joined(values: Given) -> Seen {
    let values = values.into_values();
    let [left, right] = [as_written(value(&values, 0))?, as_written(value(&values, 1))?];
    // Both are written into one string, which grows by doubling, is copied as it grows, and once more when
    // complete.
    spend((text_bytes(&left)? + text_bytes(&right)?).saturating_mul(4))?;
    Ok(Value::from(vec![right, left]))
}

fn sliced(values: Given) -> Seen {
    let mut values = values.into_values();
    let sliced = listed(value(&values, 0))?;
    // Reversing a string creates a list of its characters; reversing a list copies it. A forward slice of a list is
    // lazy.
    let backwards = i64::try_from(value(&values, 3)).is_ok_and(|step| step < 0);
    let bytes = match (sliced.as_str().is_some(), backwards || sliced.is_tuple()) {
        (true, _) => items(&sliced)?.saturating_mul(8),
        (false, true) => items(&sliced)?.saturating_mul(2 * size_of::<Value>()),
        (false, false) => SLOT_BYTES,
    };
    spend(bytes)?;
    if let Some(first) = values.first_mut() {
        *first = sliced;
    }
    Ok(back(values))
}

fn spread(values: Given) -> Seen {
    let values = values.into_values();
    for list in values.iter() {
        spend(items(list)?.saturating_mul(SLOT_BYTES))?;
    }
    Ok(back(values))
}

fn made(values: Given) -> Seen {
    let values = values.into_values();
    let made = value(&values, 0);
    weigh(&made, false)?;
    spend((items(&made)? + 1).saturating_mul(SLOT_BYTES))?;
    Ok(made)
}

fn attribute(values: Given) -> Seen {
    let values = values.into_values();
    weigh(&value(&values, 0), true)?;
    spend(SLOT_BYTES)?;
    Ok(back(values))
}

fn found(values: Given) -> Seen {
    let values = values.into_values();
    looked_for(&value(&values, 0), &value(&values, 1))?;
    Ok(back(values))
}

fn round(_: usize) -> Seen {
    spend(0)?;
    Ok(Value::UNDEFINED)
}

fn another(_: Given) -> Seen {
    Err(refuse("a chat template cannot include, import or extend other templates"))
}
