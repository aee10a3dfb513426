//! Can two schemas admit the same value? Told from what they say of types, named values, bounds of numbers, and of
//! properties that must be there. "No" is a proof; where nothing is proven the answer is "maybe", which counts as yes.
use serde_json::{Map, Value};

/// References and alternatives that are followed, over all of a question; behind them nothing is proven.
const MAX_STEPS: u32 = 4096;
/// Levels of schemas inside each other.
const MAX_DEPTH: u32 = 16;

/// Is there no value that all schemas of `a` and all of `b` admit? References are looked up in `root`.
pub(super) fn disjoint(a: &[&Value], b: &[&Value], root: &Value) -> bool {
    Prover { root, steps: MAX_STEPS }.disjoint(a, b, MAX_DEPTH)
}

struct Prover<'s> {
    root: &'s Value,
    steps: u32,
}

/// What is asked of one value: all of it.
#[derive(Default)]
struct Demands<'s> {
    parts: Vec<&'s Map<String, Value>>,
    /// `false` is among them.
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

/// As JSON Schema compares: 1 and 1.0 are the same.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(x), Value::Number(y)) => x == y || x.as_f64() == y.as_f64(),
        (Value::Array(x), Value::Array(y)) => x.len() == y.len() && x.iter().zip(y).all(|(x, y)| same(x, y)),
        (Value::Object(x), Value::Object(y)) => {
            x.len() == y.len() && x.iter().all(|(name, x)| y.get(name).is_some_and(|y| same(x, y)))
        }
        _ => a == b,
    }
}

impl<'s> Prover<'s> {
    fn step(&mut self) -> bool {
        self.steps = self.steps.saturating_sub(1);
        self.steps > 0
    }

    /// With references and `allOf` taken apart.
    fn demands(&mut self, schemas: &[&'s Value], depth: u32, out: &mut Demands<'s>) {
        for schema in schemas {
            match schema {
                Value::Bool(false) => out.nothing = true,
                Value::Object(map) if depth > 0 && self.step() => {
                    if out.parts.iter().any(|known| std::ptr::eq(*known, map)) {
                        continue;
                    }
                    out.parts.push(map);
                    let to = map.get("$ref").and_then(Value::as_str).and_then(|to| to.strip_prefix('#'));
                    if let Some(target) = to.and_then(|to| self.root.pointer(to)) {
                        self.demands(&[target], depth - 1, out);
                    }
                    if let Some(all) = map.get("allOf").and_then(Value::as_array) {
                        let all: Vec<&Value> = all.iter().collect();
                        self.demands(&all, depth - 1, out);
                    }
                }
                // What is not looked at asks for nothing.
                _ => {}
            }
        }
    }

    fn disjoint(&mut self, a: &[&'s Value], b: &[&'s Value], depth: u32) -> bool {
        if depth == 0 || !self.step() {
            return false;
        }
        // One value has to meet both.
        let mut both = Demands::default();
        self.demands(a, depth, &mut both);
        let n_of_a = both.parts.len();
        self.demands(b, depth, &mut both);
        if both.nothing {
            return true;
        }
        let parts = both.parts;
        // Alternatives: each of them has to be impossible.
        for (at, part) in parts.iter().enumerate() {
            for keyword in ["anyOf", "oneOf"] {
                let Some(ways) = part.get(keyword).and_then(Value::as_array) else { continue };
                // The alternatives of one side against the other.
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
        // Where values are named, those that all parts name and whose type all admit.
        let lists: Vec<Vec<&Value>> = parts.iter().filter_map(|part| values(part)).collect();
        if let Some((first, rest)) = lists.split_first() {
            let mut left = first.iter().filter(|value| {
                types & bit(type_of(value)) != 0
                    && rest.iter().all(|list| list.iter().any(|other| same(other, value)))
                    && !parts.iter().any(|part| out_of_bounds(part, value))
            });
            return left.next().is_none();
        }
        let of = |name: &str| types & bit(name) != 0;
        let possible = (of("null") || of("boolean") || of("string") || of("array"))
            || (of("number") && !no_number(&parts))
            || (of("object") && !self.no_object(&parts, depth));
        !possible
    }

    /// Some property must be there, and cannot be.
    fn no_object(&mut self, parts: &[&'s Map<String, Value>], depth: u32) -> bool {
        let required: Vec<&str> = parts
            .iter()
            .filter_map(|part| part.get("required")?.as_array())
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        required.into_iter().any(|name| {
            let mut asked: Vec<&'s Value> = Vec::new();
            for part in parts {
                let own = part.get("properties").and_then(|properties| properties.get(name));
                match own {
                    Some(schema) => asked.push(schema),
                    // By a pattern it might have another schema.
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

/// The values that it may be, where they are named.
fn values(part: &Map<String, Value>) -> Option<Vec<&Value>> {
    match (part.get("const"), part.get("enum")) {
        (Some(value), _) => Some(vec![value]),
        (None, Some(values)) => Some(values.as_array()?.iter().collect()),
        (None, None) => None,
    }
}

/// The least and the most that it may be, and whether these may be.
fn bounds(part: &Map<String, Value>) -> [(f64, bool); 2] {
    let number = |name: &str| part.get(name).and_then(Value::as_f64);
    let bound = |inclusive: &str, exclusive: &str, none: f64, tighter: fn(f64, f64) -> bool| {
        let own = (number(inclusive).unwrap_or(none), true);
        // An old draft has true there, about the other one.
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
    let [(least, may_least), (most, may_most)] = bounds(part);
    x < least || (x == least && !may_least) || x > most || (x == most && !may_most)
}

/// The bounds leave no number.
fn no_number(parts: &[&Map<String, Value>]) -> bool {
    let all: Vec<[(f64, bool); 2]> = parts.iter().map(|part| bounds(part)).collect();
    all.iter().any(|[(least, a), _]| {
        all.iter().any(|[_, (most, b)]| least > most || (least == most && !(*a && *b)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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
            // Bounds say nothing of what is no number.
            (json!({"maximum": 4}), json!({"minimum": 5}), false),
            (kind(json!({"const": "a"})), kind(json!({"const": "b"})), true),
            (kind(json!({"const": "a"})), kind(json!({"enum": ["a", "b"]})), false),
            (kind(json!({"type": "string"})), kind(json!({"type": "integer"})), true),
            // Not required: without it both hold.
            (
                json!({"type": "object", "properties": {"k": {"const": "a"}}}),
                json!({"type": "object", "properties": {"k": {"const": "b"}}}),
                false,
            ),
            // Required in one is enough.
            (
                json!({"type": "object", "properties": {"k": {"const": "a"}}}),
                kind(json!({"const": "b"})),
                true,
            ),
            // `properties` says nothing of what is no object.
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
        // What stands beside the alternatives counts too.
        let beside = json!({"type": "object", "required": ["k"]});
        let (a, b) = (json!({"properties": {"k": {"const": 1}}}), json!({"properties": {"k": {"const": 2}}}));
        assert!(disjoint(&[&beside, &a], &[&beside, &b], &root));
    }
}
