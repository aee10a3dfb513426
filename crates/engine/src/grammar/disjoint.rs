//! Decides whether two schemas can admit the same value, from their types, enumerated values, numeric bounds
//! and required properties. "No" is a proof. Without a proof the answer is "maybe", which counts as yes.
//!
//! The cost of proofs is counted in steps. Several questions may share one budget of steps; when it is used up,
//! nothing more is proven.
use serde_json::{Map, Value};
use std::cell::Cell;

/// Maximum nesting of schemas.
const MAX_DEPTH: u32 = 16;

/// True if it is proven that no value matches all schemas of `a` and all of `b`. References are resolved in
/// `root`. Proofs consume `steps`.
pub(super) fn disjoint(a: &[&Value], b: &[&Value], root: &Value, steps: &Cell<usize>) -> bool {
    Prover { root, steps }.disjoint(a, b, MAX_DEPTH)
}

struct Prover<'s> {
    root: &'s Value,
    steps: &'s Cell<usize>,
}

/// Schemas that one value must match all together.
#[derive(Default)]
struct Demands<'s> {
    parts: Vec<&'s Map<String, Value>>,
    /// True if the schema `false` is among them.
    nothing: bool,
}

const TYPES: [&str; 6] = ["null", "boolean", "number", "string", "array", "object"];

fn bit(name: &str) -> u8 {
    let name = if name == "integer" { "number" } else { name };
    TYPES.iter().position(|known| *known == name).map_or(0, |at| 1 << at)
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

impl<'s> Prover<'s> {
    /// Consumes steps; returns whether some are left.
    fn spend(&self, steps: usize) -> bool {
        self.steps.set(self.steps.get().saturating_sub(steps));
        self.steps.get() > 0
    }

    /// True if the values are equal by JSON Schema's rules (1 equals 1.0), or may be because the steps ran out.
    fn same(&self, a: &Value, b: &Value) -> bool {
        if !self.spend(1) {
            return true;
        }
        match (a, b) {
            (Value::Number(x), Value::Number(y)) => x == y || x.as_f64() == y.as_f64(),
            (Value::Array(x), Value::Array(y)) => {
                x.len() == y.len() && x.iter().zip(y).all(|(x, y)| self.same(x, y))
            }
            (Value::Object(x), Value::Object(y)) => {
                x.len() == y.len() && x.iter().all(|(name, x)| y.get(name).is_some_and(|y| self.same(x, y)))
            }
            _ => a == b,
        }
    }

    /// Collects the schemas, and those they contain through `$ref` and `allOf`.
    fn demands(&self, schemas: &[&'s Value], depth: u32, out: &mut Demands<'s>) {
        for schema in schemas {
            match schema {
                Value::Bool(false) => out.nothing = true,
                Value::Object(map) if depth > 0 && self.spend(1 + out.parts.len() / 16) => {
                    if out.parts.iter().any(|known| std::ptr::eq(*known, map)) {
                        continue;
                    }
                    out.parts.push(map);
                    let to = map.get("$ref").and_then(Value::as_str).and_then(|to| to.strip_prefix('#'));
                    let paid = |to: &&str| self.spend(length(to));
                    if let Some(target) = to.filter(paid).and_then(|to| self.root.pointer(to)) {
                        self.demands(&[target], depth - 1, out);
                    }
                    if let Some(all) = map.get("allOf").and_then(Value::as_array) {
                        let all: Vec<&Value> = all.iter().collect();
                        self.demands(&all, depth - 1, out);
                    }
                }
                // A schema that is not examined adds no constraint.
                _ => {}
            }
        }
    }

    fn disjoint(&self, a: &[&'s Value], b: &[&'s Value], depth: u32) -> bool {
        if depth == 0 || !self.spend(1) {
            return false;
        }
        // A common value has to match both sides.
        let mut both = Demands::default();
        self.demands(a, depth, &mut both);
        let n_of_a = both.parts.len();
        self.demands(b, depth, &mut both);
        if both.nothing {
            return true;
        }
        let parts = both.parts;
        // If no alternative of a schema is possible, neither is the schema.
        for (at, part) in parts.iter().enumerate() {
            for keyword in ["anyOf", "oneOf"] {
                let Some(ways) = part.get(keyword).and_then(Value::as_array) else { continue };
                // Compare the alternatives of one side with the other side.
                let other = if at < n_of_a { b } else { a };
                if ways.iter().all(|way| self.disjoint(&[way], other, depth - 1)) {
                    return true;
                }
            }
        }
        let mut types = u8::MAX;
        for part in &parts {
            types &= match part.get("type") {
                Some(Value::String(name)) => bit(name),
                Some(Value::Array(names)) => {
                    names.iter().filter_map(Value::as_str).map(bit).fold(0, |all, bit| all | bit)
                }
                _ => u8::MAX,
            };
        }
        // If values are enumerated: those in every list, of an allowed type and within all bounds.
        let lists: Vec<Vec<&Value>> = parts.iter().filter_map(|part| values(part)).collect();
        if let Some((first, rest)) = lists.split_first() {
            let mut left = first.iter().filter(|value| {
                types & bit(type_of(value)) != 0
                    && rest.iter().all(|list| list.iter().any(|other| self.same(other, value)))
                    && !parts.iter().any(|part| self.spend(1) && out_of_bounds(part, value))
            });
            return left.next().is_none();
        }
        let of = |name: &str| types & bit(name) != 0;
        let possible = (of("null") || of("boolean") || of("string") || of("array"))
            || (of("number") && !no_number(&parts))
            || (of("object") && !self.no_object(&parts, depth));
        !possible
    }

    /// True if a required property cannot have a valid value.
    fn no_object(&self, parts: &[&'s Map<String, Value>], depth: u32) -> bool {
        let required: Vec<&str> = parts
            .iter()
            .filter_map(|part| part.get("required")?.as_array())
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        required.into_iter().any(|name| {
            if !self.spend(parts.len() * (1 + length(name))) {
                return false;
            }
            let mut asked: Vec<&'s Value> = Vec::new();
            for part in parts {
                let own = part.get("properties").and_then(|properties| properties.get(name));
                match own {
                    Some(schema) => asked.push(schema),
                    // A pattern might give the property a different schema.
                    None if part.contains_key("patternProperties") => {}
                    None => asked.extend(part.get("additionalProperties")),
                }
            }
            asked.iter().any(|schema| **schema == Value::Bool(false))
                || (0..asked.len())
                    .any(|i| (i + 1..asked.len()).any(|j| self.disjoint(&[asked[i]], &[asked[j]], depth - 1)))
        })
    }
}

/// Extra steps for looking up a long name.
fn length(name: &str) -> usize {
    name.len() / 64
}

/// The allowed values, if the schema enumerates them.
fn values(part: &Map<String, Value>) -> Option<Vec<&Value>> {
    match (part.get("const"), part.get("enum")) {
        (Some(value), _) => Some(vec![value]),
        (None, Some(values)) => Some(values.as_array()?.iter().collect()),
        (None, None) => None,
    }
}

/// From here on, different integers may have the same `f64` value.
pub(super) const INEXACT: f64 = (1_u64 << 53) as f64;

/// The lower and upper bound, each with whether it is inclusive. Bounds too large to be exact are ignored.
fn bounds(part: &Map<String, Value>) -> [(f64, bool); 2] {
    let number = |name: &str| part.get(name).and_then(Value::as_f64).filter(|x| x.abs() < INEXACT);
    let bound = |inclusive: &str, exclusive: &str, none: f64, tighter: fn(f64, f64) -> bool| {
        let own = (number(inclusive).unwrap_or(none), true);
        // In an old draft this keyword is a boolean that makes the other bound exclusive.
        match (number(exclusive), part.get(exclusive)) {
            (Some(x), _) if !tighter(own.0, x) => (x, false),
            (None, Some(Value::Bool(true))) => (own.0, false),
            _ => own,
        }
    };
    [
        bound("minimum", "exclusiveMinimum", f64::NEG_INFINITY, |own, x| own > x),
        bound("maximum", "exclusiveMaximum", f64::INFINITY, |own, x| own < x),
    ]
}

fn out_of_bounds(part: &Map<String, Value>, value: &Value) -> bool {
    let Some(x) = value.as_f64() else { return false };
    let [(min, includes_min), (max, includes_max)] = bounds(part);
    x < min || (x == min && !includes_min) || x > max || (x == max && !includes_max)
}

/// True if the bounds exclude every number.
fn no_number(parts: &[&Map<String, Value>]) -> bool {
    let all: Vec<[(f64, bool); 2]> = parts.iter().map(|part| bounds(part)).collect();
    all.iter().any(|[(min, a), _]| all.iter().any(|[_, (max, b)]| min > max || (min == max && !(*a && *b))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn disjoint(a: &[&Value], b: &[&Value], root: &Value) -> bool {
        super::disjoint(a, b, root, &Cell::new(4096))
    }

    #[test]
    fn what_is_proven() {
        let root = json!({"$defs": {
            "a": {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
            "loop": {"allOf": [{"$ref": "#/$defs/loop"}]},
            "tree": {"anyOf": [{"$ref": "#/$defs/tree"}, {"$ref": "#/$defs/tree"}]},
        }});
        let kind = |k: Value| json!({"type": "object", "properties": {"k": k}, "required": ["k"]});
        let closed = |name: &str| json!({"type": "object", "properties": {name: {}}, "required": [name], "additionalProperties": false});
        for (a, b, expected) in [
            (json!({"type": "string"}), json!({"type": "number"}), true),
            (json!({"type": "integer"}), json!({"type": "number"}), false),
            (json!({"type": ["string", "null"]}), json!({"type": ["null", "number"]}), false),
            (json!({}), json!({"type": "number"}), false),
            (json!(false), json!({}), true),
            (json!(true), json!({}), false),
            (json!({"const": 1}), json!({"const": 1.0}), false),
            (json!({"const": 1}), json!({"const": "1"}), true),
            (json!({"const": [1, {"a": 2}]}), json!({"const": [1.0, {"a": 2}]}), false),
            (json!({"enum": ["a", "b"]}), json!({"enum": ["c", "b"]}), false),
            (json!({"enum": ["a", "b"]}), json!({"enum": ["c", "d"]}), true),
            (json!({"enum": ["a", 3]}), json!({"type": "integer"}), false),
            (json!({"enum": ["a", 3]}), json!({"type": "boolean"}), true),
            (json!({"enum": [3, 4]}), json!({"type": "integer", "minimum": 5}), true),
            (json!({"type": "integer", "maximum": 4}), json!({"type": "integer", "minimum": 5}), true),
            (json!({"type": "integer", "maximum": 5}), json!({"type": "integer", "minimum": 5}), false),
            (json!({"type": "number", "exclusiveMaximum": 5}), json!({"type": "number", "minimum": 5}), true),
            (
                json!({"type": ["number", "null"], "maximum": 4}),
                json!({"type": ["number", "null"], "minimum": 5}),
                false,
            ),
            // Regression: these two bounds are the same `f64`, so the range seemed empty, but 9007199254740993
            // is in it.
            (
                json!({"type": "integer", "exclusiveMinimum": 9007199254740992_u64}),
                json!({"type": "integer", "maximum": 9007199254740993_u64}),
                false,
            ),
            (
                json!({"type": "integer", "exclusiveMaximum": -9007199254740992_i64}),
                json!({"const": -9007199254740993_i64}),
                false,
            ),
            (
                json!({"type": "integer", "exclusiveMinimum": 9007199254740990_u64}),
                json!({"type": "integer", "maximum": 9007199254740990_u64}),
                true,
            ),
            // Bounds do not apply to values that are not numbers.
            (json!({"maximum": 4}), json!({"minimum": 5}), false),
            (kind(json!({"const": "a"})), kind(json!({"const": "b"})), true),
            (kind(json!({"const": "a"})), kind(json!({"enum": ["a", "b"]})), false),
            (kind(json!({"type": "string"})), kind(json!({"type": "integer"})), true),
            // Not required: an object without the property matches both.
            (
                json!({"type": "object", "properties": {"k": {"const": "a"}}}),
                json!({"type": "object", "properties": {"k": {"const": "b"}}}),
                false,
            ),
            // Required by one side is enough.
            (
                json!({"type": "object", "properties": {"k": {"const": "a"}}}),
                kind(json!({"const": "b"})),
                true,
            ),
            // `properties` does not apply to values that are not objects.
            (
                json!({"properties": {"k": {"const": "a"}}, "required": ["k"]}),
                json!({"properties": {"k": {"const": "b"}}}),
                false,
            ),
            (closed("a"), closed("b"), true),
            (
                json!({"type": "object", "required": ["a"]}),
                json!({"type": "object", "required": ["b"]}),
                false,
            ),
            (json!({"type": "object", "required": ["a"]}), closed("b"), true),
            (
                json!({"type": "object", "required": ["a"]}),
                json!({"type": "object", "additionalProperties": false, "patternProperties": {"^a": {}}}),
                false,
            ),
            (json!({"$ref": "#/$defs/a"}), kind(json!({"const": "b"})), true),
            (json!({"$ref": "#/$defs/a"}), kind(json!({"const": "a"})), false),
            (json!({"$ref": "#/$defs/loop"}), json!({"type": "string"}), false),
            (json!({"$ref": "#/$defs/tree"}), json!({"$ref": "#/$defs/tree"}), false),
            (json!({"allOf": [{"type": "string"}, {}]}), json!({"type": "null"}), true),
            (json!({"anyOf": [{"type": "string"}, {"type": "integer"}]}), json!({"type": "null"}), true),
            (json!({"anyOf": [{"type": "string"}, {"type": "integer"}]}), json!({"type": "integer"}), false),
            (
                json!({"type": "array", "items": {"type": "string"}}),
                json!({"type": "array", "items": {"type": "null"}}),
                false,
            ),
        ] {
            assert_eq!(disjoint(&[&a], &[&b], &root), expected, "{a} and {b}");
            assert_eq!(disjoint(&[&b], &[&a], &root), expected, "{b} and {a}");
        }
        // Schemas beside the alternatives count too.
        let beside = json!({"type": "object", "required": ["k"]});
        let (a, b) = (json!({"properties": {"k": {"const": 1}}}), json!({"properties": {"k": {"const": 2}}}));
        assert!(disjoint(&[&beside, &a], &[&beside, &b], &root));
    }

    /// Regression: lists, names and references cost one step each regardless of their length, and each question
    /// had its own budget.
    #[test]
    fn all_that_is_looked_at_is_counted() {
        let many = |from: u32| json!({"enum": (from..from + 100).collect::<Vec<_>>()});
        let name = "n".repeat(6400);
        let long = json!({"type": "object", "required": [name]});
        let all = json!({"allOf": vec![json!({}); 400]});
        let to = json!({"$ref": format!("#/$defs/{name}")});
        for (a, b, expected, min) in [
            (many(0), many(1000), true, 10_000),
            (json!({"const": vec![1; 500]}), json!({"const": vec![1; 500]}), false, 500),
            (many(0), json!({"allOf": vec![json!({"type": "number"}); 100]}), false, 100),
            (long.clone(), long, false, 400),
            (all.clone(), all, false, 10_000),
            (to.clone(), to, false, 200),
        ] {
            let steps = Cell::new(100_000);
            assert_eq!(super::disjoint(&[&a], &[&b], &json!({}), &steps), expected);
            let taken = 100_000 - steps.get();
            assert!(taken >= min && steps.get() > 0, "{taken}");
            // With fewer steps it ends without a proof.
            let few = Cell::new(min / 2);
            assert!(!super::disjoint(&[&a], &[&b], &json!({}), &few));
            assert_eq!(few.get(), 0);
        }
    }
}
